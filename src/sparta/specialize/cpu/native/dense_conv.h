// Dense convolutions: a product of a packed weight with the tokens of an image, nothing of it skipped. A band of tokens is
// copied as conv.h does it, once for each shift of the taps along a row, so that tokens have no gaps and whole vectors are
// stored; all rows share one table of offsets. Groups of channels are images of their own with weights of their own:
// contiguous images times groups lie one behind the other.
#pragma once

#include "conv.h"

namespace sparta {

struct DenseConvCall {
  ConvCall conv;            // of images times groups, with the channels of one group; rows are out_columns wide
  const float* values;      // [groups][chunks][blocks of bn rows][columns of the chunk][bn]
  const uint32_t* offsets;  // [columns], bytes from a token to the input value that a column multiplies
  int64_t groups;
  int64_t outputs;  // rows of one group
  int64_t columns;  // input channels of one group times taps
  int64_t chunk;    // columns that all tokens are multiplied with before the next ones
  int32_t bn;
  int32_t mv;
};

// Blocks [begin, end) of rows times the columns of one chunk, for one tile of tokens.
struct DenseRows {
  const float* x;           // the first token; offsets count from here
  const uint32_t* offsets;
  const float* values;      // of block 0
  int64_t columns;
  int64_t begin;
  int64_t end;
  int64_t outputs;
  float* y;                 // the first token in row 0
  int64_t stride;           // floats between two rows
  int64_t count;            // tokens that are stored
  bool adds;                // to what is stored already
  const RowsFinish* finish; // null stores sums as they are
  bool ahead;               // whether the tokens after these are asked for
};

// Stores the sums of one row, the last `count` of which may be less than a vector.
template <int MV, bool Whole>
SPARTA_INLINE void put_dense(const DenseRows& task, Vec (&sums)[MV], int64_t row, float* y) {
  const int64_t rest = task.count - (MV - 1) * kLanes;
  if (task.adds) {
#pragma GCC unroll 4
    for (int j = 0; j < MV; ++j) {
      sums[j] += Whole || j + 1 < MV ? load(y + j * kLanes) : load_some(y + j * kLanes, rest);
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
      if (residual) out += Whole || j + 1 < MV ? load(residual + j * kLanes) : load_some(residual + j * kLanes, rest);
      sums[j] = out < last_floor ? last_floor : out;
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j + 1 < MV; ++j) store(y + j * kLanes, sums[j]);
  if constexpr (Whole) {
    store(y + (MV - 1) * kLanes, sums[MV - 1]);
  } else {
    store_some(y + (MV - 1) * kLanes, sums[MV - 1], rest);
  }
}

// All columns of one block. Weights are asked for ahead, as StreamAhead does it, and so may be the tokens of the next tile:
// the channels of an image lie far apart, where the processor does not look by itself.
template <int BN, int MV, bool Ahead>
SPARTA_INLINE void multiply_columns(const DenseRows& task, const float* values, Vec (&sums)[BN][MV]) {
  constexpr int64_t kAhead = StreamAhead::kBytes / static_cast<int64_t>(sizeof(float));
  const float* const x = task.x;
  const uint32_t* const offsets = task.offsets;
  for (int64_t i = 0; i < task.columns; ++i) {
    const float* from = at_offset(x, offsets[i]);
    __builtin_prefetch(values + i * BN + kAhead);
    Vec inputs[MV];
#pragma GCC unroll 4
    for (int j = 0; j < MV; ++j) inputs[j] = load(from + j * kLanes);
    if constexpr (Ahead) announce_early<MV>(from + MV * kLanes);
    multiply_entry<BN, MV>(values + i * BN, inputs, sums);
  }
}

template <int BN, int MV>
void multiply_dense_rows(const DenseRows& task) {
  for (int64_t block = task.begin; block < task.end; ++block) {
    const int64_t row = block * BN;
    float* y = task.y + row * task.stride;
    const int64_t rows = std::min<int64_t>(BN, task.outputs - row);
    for (int64_t r = 0; r < rows; ++r) announce<MV>(y + r * task.stride);
    Vec sums[BN][MV] = {};
    const float* values = task.values + block * task.columns * BN;
    if (task.ahead && block == task.begin) {
      multiply_columns<BN, MV, true>(task, values, sums);
    } else {
      multiply_columns<BN, MV, false>(task, values, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < BN; ++r) {
      if (r >= rows) break;
      if (task.count == MV * kLanes) {
        put_dense<MV, true>(task, sums[r], row + r, y + r * task.stride);
      } else {
        put_dense<MV, false>(task, sums[r], row + r, y + r * task.stride);
      }
    }
  }
}

using DenseKernel = void (*)(const DenseRows&);

// Null for a tile that this library does not hold.
inline DenseKernel find_dense_kernel(int32_t bn, int64_t mv) {
  if (bn == 4) {
    if (mv == 1) return multiply_dense_rows<4, 1>;
    if (mv == 2) return multiply_dense_rows<4, 2>;
    if (mv == 3) return multiply_dense_rows<4, 3>;
    if (mv == 4) return multiply_dense_rows<4, 4>;
  }
  return nullptr;
}

// Of the nearest cache, for the inputs of several tiles.
constexpr int64_t kNearBytes = 16 * 1024;

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
};

// Tokens [begin, begin + count) of a band in blocks [first, last) of rows and one chunk of columns.
inline void multiply_dense_tile(const DenseBand& band, int64_t begin, int64_t count, int64_t vectors, int64_t column,
                                int64_t first, int64_t last) {
  const DenseConvCall& call = *band.call;
  const int64_t plane = call.conv.out_rows * call.conv.out_columns;
  const int64_t blocks = ceil_div(call.outputs, call.bn);
  const int64_t columns = std::min(call.chunk, call.columns - column);
  const bool ends = column + columns == call.columns, in_registers = fits_registers(call.conv.activation);
  const float* residual = band.residual ? band.residual + begin : nullptr;
  const RowsFinish finish = rows_finish(band.bias, residual, call.conv.activation);
  find_dense_kernel(call.bn, vectors)(DenseRows{band.x + begin, call.offsets + column,
                                                band.values + column * blocks * call.bn, columns, first, last,
                                                call.outputs, band.y + begin, plane, count, column > 0,
                                                ends && in_registers ? &finish : nullptr, call.conv.direct != 0});
  if (!ends || in_registers) return;
  with_activation(call.conv.activation, [&](auto tag) {
    finish_dense<decltype(tag)::value>(band.y + begin, plane, first * call.bn, std::min(last * call.bn, call.outputs),
                                       count, band.bias, residual);
  });
}

// The blocks [first, last) of rows of one band; false when memory ran out.
inline bool multiply_dense_band(const DenseConvCall& given, int64_t index, int64_t first, int64_t last) {
  static thread_local Scratch scratch;
  const ConvCall& call = given.conv;
  const int64_t tokens = call.out_rows * call.out_columns, bands = ceil_div(tokens, call.band_tokens);
  const int64_t start = index % bands * call.band_tokens, image = index / bands, group = image % given.groups;
  const Band band{image, start, std::min(call.band_tokens, tokens - start)};
  const float* x = call.x + image * call.x_strides[0];
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
                       call.y + pixels};
  // Tiles differ by one vector at most: one that is much narrower than the others would wait for its own sums.
  const int64_t vectors = ceil_div(band.tokens, kLanes), tiles = ceil_div(vectors, given.mv);
  const auto multiply_tile = [&](int64_t tile, int64_t column, int64_t begin_block, int64_t end_block) {
    const int64_t from = vectors * tile / tiles, each = vectors * (tile + 1) / tiles - from;
    int64_t begin = band.first + from * kLanes;
    const int64_t count = std::min(each * kLanes, band.first + band.tokens - begin);
    // The input itself has no room behind it: there, the last tile begins earlier, over tokens that are computed already.
    if (call.direct) begin += count - each * kLanes;
    multiply_dense_tile(task, begin, call.direct ? each * kLanes : count, each, column, begin_block, end_block);
  };
  if (given.chunk < given.columns) {
    for (int64_t column = 0; column < given.columns; column += given.chunk) {
      for (int64_t tile = 0; tile < tiles; ++tile) multiply_tile(tile, column, first, last);
    }
    return true;
  }
  // Few columns: several tiles stay in the nearest cache, and rows are written in long runs, few at a time, because they
  // lie in pages far apart.
  const int64_t tile_bytes = given.columns * given.mv * kLanes * static_cast<int64_t>(sizeof(float));
  const int64_t together = std::max<int64_t>(kNearBytes / tile_bytes, 1);
  const int64_t part = together > 1 ? kBlockRows / given.bn : last - first;
  for (int64_t run = 0; run < tiles; run += together) {
    for (int64_t block = first; block < last; block += part) {
      for (int64_t tile = run; tile < std::min(run + together, tiles); ++tile) {
        multiply_tile(tile, 0, block, std::min(block + part, last));
      }
    }
  }
  return true;
}

inline bool multiply_dense_conv(const DenseConvCall& call) {
  const int64_t bands = ceil_div(call.conv.out_rows * call.conv.out_columns, call.conv.band_tokens);
  const int64_t blocks = ceil_div(call.outputs, call.bn), each = kBlockRows / call.bn, parts = ceil_div(blocks, each);
  const int64_t units = call.conv.images * bands * parts;
  bool enough_memory = true;
  parallel(call.conv.threads, [&](int64_t index, int64_t count) {
    int64_t at = units * index / count;
    const int64_t end = units * (index + 1) / count;
    while (at < end) {
      const int64_t band = at / parts, stop = std::min(end, (band + 1) * parts);
      if (!multiply_dense_band(call, band, (at - band * parts) * each, std::min((stop - band * parts) * each, blocks))) {
#pragma omp atomic write
        enough_memory = false;
        return;
      }
      at = stop;
    }
  });
  return enough_memory;
}

inline bool knows_dense_tile(const DenseConvCall& call) {
  for (int64_t vectors = 1; vectors <= call.mv; ++vectors) {
    if (!find_dense_kernel(call.bn, vectors)) return false;
  }
  return call.mv >= 1;
}

}  // namespace sparta
