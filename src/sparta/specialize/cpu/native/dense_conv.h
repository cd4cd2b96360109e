// Dense convolutions: a product of a packed weight with the tokens of an image, nothing of it skipped. A band of tokens is
// copied as conv.h does it, once for each shift of the taps along a row, so that tokens have no gaps; the tokens of a tile
// are then copied to a panel of whole vectors, which all rows read from the nearest cache. Groups of channels are images
// of their own with weights of their own: contiguous images times groups lie one behind the other.
#pragma once

#include "conv.h"

namespace sparta {

struct WinogradPlan;

struct DenseConvCall {
  ConvCall conv;            // of images times groups, with the channels of one group; rows are out_columns wide
  const float* values;      // [groups][chunks][blocks of bn rows][columns of the chunk][bn]
  const uint32_t* offsets;  // [columns], bytes from a token to the input value that a column multiplies
  int64_t groups;
  int64_t outputs;     // rows of one group
  int64_t columns;     // input channels of one group times taps
  int64_t chunk;       // columns that all tokens are multiplied with before the next ones
  int64_t tiles;       // that an image is cut into, alike but for a token or a vector
  int64_t band_tiles;  // that are copied together, at most
  int32_t bn;
  int32_t mv;
  const WinogradPlan* winograd;  // of a layer that is computed with fewer products, or null: see winograd.h
  const float* winograd_values;
};

// Tokens behind the last whole vector of a tile that are computed for BN rows at once, and not as a vector of their own.
constexpr int64_t kMostTail = 2;
// Fewer blocks of rows read tokens where they are.
constexpr int64_t kFewBlocks = 4;
// Of the nearest cache, for the panels of several tiles.
constexpr int64_t kNearBytes = 16 * 1024;

// A tile of tokens as kernels compute it.
struct DenseTile {
  int64_t begin;    // token
  int64_t count;    // tokens
  int64_t vectors;  // the last of which may lack some
  int64_t tail;     // tokens behind them
};

// The first token of a tile. Where images are whole vectors, so are tiles.
inline int64_t tile_begin(const DenseConvCall& call, int64_t tile) {
  const int64_t tokens = call.conv.out_rows * call.conv.out_columns;
  return tokens % kLanes ? tokens * tile / call.tiles : tokens / kLanes * tile / call.tiles * kLanes;
}

inline DenseTile dense_tile(const DenseConvCall& call, int64_t tile) {
  const int64_t begin = tile_begin(call, tile), count = tile_begin(call, tile + 1) - begin;
  const int64_t rest = count % kLanes;
  const bool tail = count > kLanes && rest <= kMostTail;
  return {begin, count, tail ? count / kLanes : ceil_div(count, kLanes), tail ? rest : 0};
}

// Blocks [begin, end) of rows times the columns of one chunk, for one tile of tokens.
struct DenseRows {
  const float* panel;       // [columns][vectors * kLanes], or null where tokens are read at `x`
  const float* tails;       // [columns][tail]
  const float* x;           // the first token; offsets count from here
  const uint32_t* offsets;
  const float* values;      // of block 0
  int64_t columns;
  int64_t begin;
  int64_t end;
  int64_t outputs;
  float* y;                 // the first token in row 0
  int64_t stride;           // floats between two rows
  int64_t last;             // tokens of the last vector
  bool adds;                // to what is stored already
  const RowsFinish* finish; // null stores sums as they are
};

// Copies a tile's tokens of some columns to a panel, and what is behind the vectors apart.
template <int MV>
inline void pack_dense(const float* x, const uint32_t* offsets, int64_t columns, int64_t last, int64_t tail,
                       float* panel, float* tails) {
  constexpr int64_t kAhead = 8;
  for (int64_t i = 0; i < columns; ++i) {
    const float* from = at_offset(x, offsets[i]);
    // Channels of an image lie far apart, where the processor does not look by itself.
    const float* later = at_offset(x, offsets[std::min(i + kAhead, columns - 1)]);
    float* to = panel + i * MV * kLanes;
#pragma GCC unroll 4
    for (int j = 0; j < MV; ++j) {
      __builtin_prefetch(later + j * kLanes);
      store(to + j * kLanes, j + 1 < MV ? load(from + j * kLanes) : load_some(from + j * kLanes, last));
    }
    for (int64_t t = 0; t < tail; ++t) tails[i * tail + t] = from[MV * kLanes + t];
  }
}

// Stores the sums of one row, the last of which may be less than a vector.
template <int MV, bool Whole>
SPARTA_INLINE void put_dense(const DenseRows& task, Vec (&sums)[MV], int64_t row, float* y) {
  if (task.adds) {
#pragma GCC unroll 4
    for (int j = 0; j < MV; ++j) {
      sums[j] += Whole || j + 1 < MV ? load(y + j * kLanes) : load_some(y + j * kLanes, task.last);
    }
  }
  if (task.finish) {
    const RowsFinish& finish = *task.finish;
    const Vec shift = splat(finish.bias ? finish.bias[row] : -0.0f);  // adding -0 changes nothing, not even a -0
    const Vec floor = splat(finish.floor), ceiling = splat(finish.ceiling), last_floor = splat(finish.last_floor);
    const float* residual = finish.residual ? finish.residual + (y - task.y) : nullptr;
#pragma GCC unroll 4
    for (int j = 0; j < MV; ++j) {
      const Vec sum = sums[j] + shift;
      Vec out = sum < floor ? floor : sum;  // NaN is not below and stays
      out = out > ceiling ? ceiling : out;
      if (residual) {
        out += Whole || j + 1 < MV ? load(residual + j * kLanes) : load_some(residual + j * kLanes, task.last);
      }
      sums[j] = out < last_floor ? last_floor : out;
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j + 1 < MV; ++j) store(y + j * kLanes, sums[j]);
  if constexpr (Whole) {
    store(y + (MV - 1) * kLanes, sums[MV - 1]);
  } else {
    store_some(y + (MV - 1) * kLanes, sums[MV - 1], task.last);
  }
}

// The same for one token.
SPARTA_INLINE void put_token(const DenseRows& task, float sum, int64_t row, float* y) {
  if (task.adds) sum += *y;
  if (task.finish) {
    const RowsFinish& finish = *task.finish;
    sum += finish.bias ? finish.bias[row] : -0.0f;
    sum = sum < finish.floor ? finish.floor : sum;
    sum = sum > finish.ceiling ? finish.ceiling : sum;
    if (finish.residual) sum += finish.residual[y - task.y];
    sum = sum < finish.last_floor ? finish.last_floor : sum;
  }
  *y = sum;
}

// The tokens behind the vectors of BN rows.
template <int BN, int Tail>
SPARTA_INLINE void put_tails(const DenseRows& task, const Tails<BN, Tail>& tails, int64_t row, int64_t rows, float* y) {
  if constexpr (Tail > 0) {
    for (int t = 0; t < Tail; ++t) {
      for (int r = 0; r < BN && r < rows; ++r) put_token(task, tails.sums[t][r], row + r, y + r * task.stride + t);
    }
  }
}

// Weights are asked for ahead, as StreamAhead does it.
template <int BN, int MV, int Tail, bool Packed>
void multiply_dense_rows(const DenseRows& given) {
  constexpr int64_t kAhead = StreamAhead::kBytes / static_cast<int64_t>(sizeof(float));
  const DenseRows task = given;
  for (int64_t block = task.begin; block < task.end; ++block) {
    const int64_t row = block * BN;
    float* y = task.y + row * task.stride;
    const int64_t rows = std::min<int64_t>(BN, task.outputs - row);
    for (int64_t r = 0; r < rows; ++r) announce<MV>(y + r * task.stride);
    Vec sums[BN][MV] = {};
    Tails<BN, Tail> tails;
    const float* values = task.values + block * task.columns * BN;
    for (int64_t i = 0; i < task.columns; ++i) {
      const float* from = Packed ? task.panel + i * MV * kLanes : at_offset(task.x, task.offsets[i]);
      __builtin_prefetch(values + i * BN + kAhead);
      Vec inputs[MV];
#pragma GCC unroll 4
      for (int j = 0; j < MV; ++j) inputs[j] = load(from + j * kLanes);
      multiply_entry<BN, MV>(values + i * BN, inputs, sums);
      tails.multiply(values + i * BN, task.tails + i * Tail);
    }
#pragma GCC unroll 8
    for (int r = 0; r < BN; ++r) {
      if (r >= rows) break;
      if (task.last == kLanes) {
        put_dense<MV, true>(task, sums[r], row + r, y + r * task.stride);
      } else {
        put_dense<MV, false>(task, sums[r], row + r, y + r * task.stride);
      }
    }
    put_tails(task, tails, row, rows, y + MV * kLanes);
  }
}

using DenseKernel = void (*)(const DenseRows&);

template <int BN, int MV>
DenseKernel find_dense_kernel_of(int64_t tail, bool packed) {
  if (!packed) return tail ? nullptr : multiply_dense_rows<BN, MV, 0, false>;
  if (tail == 0) return multiply_dense_rows<BN, MV, 0, true>;
  return tail == 1 ? multiply_dense_rows<BN, MV, 1, true> : multiply_dense_rows<BN, MV, 2, true>;
}

// Null for a tile that this library does not hold. Registers hold 24 sums of the widest vectors, and 12 of others.
inline DenseKernel find_dense_kernel(int32_t bn, int64_t mv, int64_t tail, bool packed) {
#if defined(SPARTA_AVX512)
  if (bn == 8 && mv == 1) return find_dense_kernel_of<8, 1>(tail, packed);
  if (bn == 8 && mv == 2) return find_dense_kernel_of<8, 2>(tail, packed);
  if (bn == 8 && mv == 3) return find_dense_kernel_of<8, 3>(tail, packed);
#else
  if (bn == 4 && mv == 1) return find_dense_kernel_of<4, 1>(tail, packed);
  if (bn == 4 && mv == 2) return find_dense_kernel_of<4, 2>(tail, packed);
  if (bn == 4 && mv == 3) return find_dense_kernel_of<4, 3>(tail, packed);
#endif
  return nullptr;
}

// Activations that take more than registers, over what is stored already.
template <Activation Act>
inline void finish_dense(float* y, int64_t stride, int64_t first, int64_t last, int64_t count, const float* bias,
                         const float* residual) {
  for (int64_t row = first; row < last; ++row) {
    const Vec shift = splat(bias ? bias[row] : -0.0f);
    for (int64_t j = 0; j < count; j += kLanes) {
      const int64_t at = row * stride + j;
      Vec sum = activate<Act>(load_some(y + at, count - j) + shift);
      if (residual) sum += load_some(residual + at, count - j);
      store_some(y + at, activate_last<Act>(sum), count - j);
    }
  }
}

// What is the same for all tiles of a band; pointers are those of its image and group.
struct DenseBand {
  const DenseConvCall* call;
  const float* x;  // token 0 of the image
  const float* values;
  const float* bias;
  const float* residual;
  float* y;
  float* panels;
};

// Some columns of a tile as kernels read them.
struct DensePanel {
  DenseTile tile;
  int64_t column;
  int64_t columns;
  float* panel;  // or null where tokens are read where they are
};

inline int64_t panel_floats(const DenseConvCall& call) {
  return ceil_div(std::min(call.chunk, call.columns) * (call.mv * kLanes + kMostTail), kLanes) * kLanes;
}

// Copies tokens to `room`, where more rows read them than copying costs.
inline DensePanel dense_panel(const DenseBand& band, int64_t index, int64_t column, bool many, float* room) {
  const DenseConvCall& call = *band.call;
  const DenseTile tile = dense_tile(call, index);
  const int64_t columns = std::min(call.chunk, call.columns - column), last = tile.count - (tile.vectors - 1) * kLanes;
  if (!many && !tile.tail && last == kLanes) return {tile, column, columns, nullptr};
  const auto pack = tile.vectors == 1 ? pack_dense<1> : tile.vectors == 2 ? pack_dense<2> : pack_dense<3>;
  pack(band.x + tile.begin, call.offsets + column, columns, std::min<int64_t>(last, kLanes), tile.tail, room,
       room + columns * tile.vectors * kLanes);
  return {tile, column, columns, room};
}

// A tile in blocks [first, last) of rows and one chunk of columns.
inline void multiply_dense_tile(const DenseBand& band, const DensePanel& given, int64_t first, int64_t last) {
  const DenseConvCall& call = *band.call;
  const DenseTile& tile = given.tile;
  const int64_t plane = call.conv.out_rows * call.conv.out_columns;
  const int64_t blocks = ceil_div(call.outputs, call.bn);
  const bool ends = given.column + given.columns == call.columns, in_registers = fits_registers(call.conv.activation);
  const float* residual = band.residual ? band.residual + tile.begin : nullptr;
  const RowsFinish finish = rows_finish(band.bias, residual, call.conv.activation);
  float* y = band.y + tile.begin;
  find_dense_kernel(call.bn, tile.vectors, tile.tail, given.panel != nullptr)(DenseRows{
      given.panel, given.panel ? given.panel + given.columns * tile.vectors * kLanes : nullptr, band.x + tile.begin,
      call.offsets + given.column, band.values + given.column * blocks * call.bn, given.columns, first, last,
      call.outputs, y, plane, std::min<int64_t>(tile.count - (tile.vectors - 1) * kLanes, kLanes), given.column > 0,
      ends && in_registers ? &finish : nullptr});
  if (!ends || in_registers) return;
  with_activation(call.conv.activation, [&](auto tag) {
    finish_dense<decltype(tag)::value>(y, plane, first * call.bn, std::min(last * call.bn, call.outputs), tile.count,
                                       band.bias, residual);
  });
}

// Few columns: the panels of several tiles stay in the nearest cache, and rows are written in long runs, few at a time,
// because they lie in pages far apart.
inline void multiply_short_columns(const DenseBand& band, int64_t begin, int64_t end, int64_t first, int64_t last) {
  constexpr int64_t kMostTogether = 8;
  const DenseConvCall& call = *band.call;
  const int64_t floats = panel_floats(call), fit = kNearBytes / (floats * static_cast<int64_t>(sizeof(float)));
  const int64_t together = std::min(std::max<int64_t>(fit, 1), kMostTogether);
  const int64_t part = together > 1 ? kBlockRows / call.bn : last - first;
  DensePanel panels[kMostTogether];
  for (int64_t run = begin; run < end; run += together) {
    const int64_t tiles = std::min(together, end - run);
    for (int64_t i = 0; i < tiles; ++i) {
      panels[i] = dense_panel(band, run + i, 0, last - first > kFewBlocks, band.panels + i * floats);
    }
    for (int64_t block = first; block < last; block += part) {
      for (int64_t i = 0; i < tiles; ++i) multiply_dense_tile(band, panels[i], block, std::min(block + part, last));
    }
  }
}

// Tiles [begin, end) of one image and group in blocks [first, last) of rows; false when memory ran out.
inline bool multiply_dense_band(const DenseConvCall& given, int64_t image, int64_t begin, int64_t end, int64_t first,
                                int64_t last) {
  static thread_local Scratch scratch, panel_scratch;
  const ConvCall& call = given.conv;
  const int64_t tokens = call.out_rows * call.out_columns, group = image % given.groups;
  const int64_t start = tile_begin(given, begin);
  const Band band{image, start, tile_begin(given, end) - start};
  const float* x = call.x + image * call.x_strides[0];
  float* panels = panel_scratch.get(panel_floats(given) + kNearBytes / static_cast<int64_t>(sizeof(float)));
  if (!panels) return false;
  if (!call.direct) {
    float* copy = scratch.get(call.slots * call.in_channels * call.plane + kMostTokens);
    if (!copy) return false;
    for (int64_t slot = 0; slot < call.slots; ++slot) {
      pack_slot(call, band, slot, copy + slot * call.in_channels * call.plane);
    }
    x = copy - band.first;
  }
  const int64_t pixels = image * given.outputs * tokens, rows = ceil_div(given.outputs, given.bn) * given.bn;
  const DenseBand task{&given,
                       x,
                       given.values + group * rows * given.columns,
                       call.bias ? call.bias + group * given.outputs : nullptr,
                       call.residual ? call.residual + pixels : nullptr,
                       call.y + pixels,
                       panels};
  if (given.chunk >= given.columns) {
    multiply_short_columns(task, begin, end, first, last);
    return true;
  }
  for (int64_t column = 0; column < given.columns; column += given.chunk) {
    for (int64_t tile = begin; tile < end; ++tile) {
      multiply_dense_tile(task, dense_panel(task, tile, column, last - first > kFewBlocks, panels), first, last);
    }
  }
  return true;
}

// Parts of rows that a tile is shared in.
inline int64_t dense_parts(const DenseConvCall& call) {
  return ceil_div(ceil_div(call.outputs, call.bn), kBlockRows / call.bn);
}

// The tiles and parts of rows [at, end) of all images, in bands: a tile that two threads share, and whole ones.
inline bool multiply_dense_share(const DenseConvCall& call, int64_t at, int64_t end) {
  const int64_t blocks = ceil_div(call.outputs, call.bn), each = kBlockRows / call.bn, parts = dense_parts(call);
  while (at < end) {
    const int64_t tile = at / parts, part = at % parts, image = tile / call.tiles, from = tile % call.tiles;
    const bool whole = part == 0 && end - at >= parts;
    const int64_t tiles = whole ? std::min({call.band_tiles, call.tiles - from, (end - at) / parts}) : 1;
    const int64_t stop = whole ? parts : std::min(parts, part + end - at);
    if (!multiply_dense_band(call, image, from, from + tiles, part * each, std::min(stop * each, blocks))) return false;
    at += whole ? tiles * parts : stop - part;
  }
  return true;
}

inline bool multiply_dense_conv(const DenseConvCall& call) {
  const int64_t units = call.conv.images * call.tiles * dense_parts(call);
  bool enough_memory = true;
  parallel(call.conv.threads, [&](int64_t index, int64_t count) {
    if (multiply_dense_share(call, units * index / count, units * (index + 1) / count)) return;
#pragma omp atomic write
    enough_memory = false;
  });
  return enough_memory;
}

inline bool knows_dense_tile(const DenseConvCall& call) {
  for (int64_t vectors = 1; vectors <= call.mv; ++vectors) {
    if (!find_dense_kernel(call.bn, vectors, 0, false)) return false;
  }
  return call.mv >= 1 && call.tiles >= 1 && call.band_tiles >= 1;
}

}  // namespace sparta
