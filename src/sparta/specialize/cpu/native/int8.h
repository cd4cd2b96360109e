// y = x W^T of 8-bit integers for many tokens, requantised on the way out. As in spmm.h, vectors run along tokens and
// weights are broadcast; the unit is four neighbouring input channels, the bytes of one 32-bit lane (int8_units.h). Sums
// are exact 32-bit integers in every build and are requantised in registers; four channels of a token leave as the bytes
// of one lane, so that the output of a layer is a panel as the next one reads it, with a quarter of the memory of fp32.
#pragma once

#include "int8_groups.h"
#include "int8_tiles.h"

namespace sparta {

enum Int8Output : int32_t { kFloat = 0, kInt8 = 1, kUint8 = 2 };

// One call. A panel of bytes has four channels in every place, unsigned where has_vnni() and signed elsewhere. The result
// is activation(sum * multiplier + offset) + residual; of a dynamic x, a sum is multiplied by the scale of its token
// first. Without a residual, `floor` is the activation where that is a ReLU or none. As an integer, the result is
// multiplied by y_inverse_scale unless that is 0, rounded to even, moved by its zero point and cut to its range.
struct Int8Call {
  const void* x;
  void* y;
  int64_t tokens;
  int64_t x_stride;         // in units of 4 bytes
  int64_t y_stride;         // in values
  const float* multiplier;  // [channels]
  const float* offset;      // [channels], or null
  const int32_t* row_sums;  // [channels], of the weight
  float floor;              // 0 for ReLU, -inf for none
  int32_t x_is_unsigned;
  int32_t x_zero;
  int32_t output;
  int32_t y_zero;
  int32_t threads;
  float x_inverse_scale;  // 0 for bytes; else x is fp32, token-major, and is rounded to x * this + x_zero
  int32_t x_channels;     // of fp32
  int32_t x_is_panel;
  int32_t y_is_panel;  // bytes only
  const float* residual;  // [tokens][channels], or null
  int64_t residual_stride;
  int32_t activation;  // other than what `floor` says
  int32_t x_is_dynamic;  // tokens have a scale each, |largest| / 127; x_inverse_scale is not 0 where x is fp32
  float y_inverse_scale;
  int32_t no_least_weight;  // whether no weight is -128
};

// What `floor` cannot say.
inline bool is_general(const Int8Call& call) { return call.residual || call.activation != kNone; }

using Int8Kernel = void (*)(const Int8Task&);

template <class Unit, int BN>
Int8Kernel find_int8_kernel_for(int64_t mv) {
  switch (mv) {
    case 1: return multiply_int8_groups<Unit, BN, 1>;
    case 2: return multiply_int8_groups<Unit, BN, 2>;
    case 3: return multiply_int8_groups<Unit, BN, 3>;
    case 4: return multiply_int8_groups<Unit, BN, 4>;
    default: return nullptr;
  }
}

template <class Tiles>
Int8Kernel find_int8_tiles(int64_t mv) {
  switch (mv) {
    case 1: return multiply_int8_tiles<Tiles, 1>;
    case 2: return multiply_int8_tiles<Tiles, 2>;
    case 3: return multiply_int8_tiles<Tiles, 3>;
    case 4: return multiply_int8_tiles<Tiles, 4>;
    default: return nullptr;
  }
}

template <class Unit>
Int8Kernel find_int8_kernel_of(int32_t bn, int64_t mv) {
  return bn == 1 ? find_int8_kernel_for<Unit, 1>(mv) : bn == 4 ? find_int8_kernel_for<Unit, 4>(mv) : nullptr;
}

// Null for a tile that this library does not hold.
inline Int8Kernel find_int8_kernel(int32_t bn, int64_t mv, bool no_least_weight = false) {
  if (bn == kTileRows) {
#if defined(SPARTA_AMX)
    if (has_byte_tiles()) return find_int8_tiles<NativeByteTiles>(mv);
#endif
    return find_int8_tiles<PlainByteTiles>(mv);
  }
#if defined(SPARTA_AVX512) || defined(SPARTA_AVX_VNNI)
  if (has_vnni()) return find_int8_kernel_of<VnniUnit>(bn, mv);
#endif
#if defined(SPARTA_AVX2)
  if (no_least_weight) return find_int8_kernel_of<AbsoluteUnit>(bn, mv);
#endif
  (void)no_least_weight;
  return find_int8_kernel_of<SignedUnit>(bn, mv);
}

// Four rows of results at a time become one of bytes, in place: a row is written after all that it is made of is read.
inline void join_all_rows(float* results, int64_t tile, int64_t rows, int64_t vectors, const Bytes& bytes) {
  int32_t* joined = reinterpret_cast<int32_t*>(results);
  for (int64_t row = 0; row < rows; row += 4) {
    for (int64_t j = 0; j < vectors * kLanes; j += kLanes) {
      Vec four[4];
      for (int64_t r = 0; r < 4; ++r) four[r] = load(results + std::min(row + r, rows - 1) * tile + j);
      store_ints(joined + row / 4 * tile + j, join_rows<false>(four, bytes));
    }
  }
}

// One tile of a token-major input, as the kernel reads it; of a dynamic one, the scale of each of its tokens too.
inline void pack_int8_tile(const Int8Call& call, int64_t index, int64_t places, int64_t tile, int32_t* panel,
                           float* token_scales = nullptr) {
  const int64_t first = index * tile, tokens = std::min(tile, call.tokens - first);
  if (call.x_inverse_scale != 0.0f) {
    const Bytes bytes = bytes_around(call.x_zero, call.x_is_unsigned != 0, has_vnni());
    const float* x = static_cast<const float*>(call.x) + first * call.x_stride;
    float factors[kMostTileTokens];
    std::fill_n(factors, tokens, call.x_inverse_scale);
    if (call.x_is_dynamic) {
      for (int64_t i = 0; i < tokens; ++i) {
        token_scales[i] = token_scale(x + i * call.x_stride, call.x_channels);
        factors[i] = 1.0f / token_scales[i];
      }
      std::fill(token_scales + tokens, token_scales + tile, 0.0f);
    }
    quantise_tile(x, call.x_stride, tokens, call.x_channels, factors, bytes, tile, panel);
  } else {
    const bool flips = has_vnni() != (call.x_is_unsigned != 0);
    pack_bytes_tile(static_cast<const int32_t*>(call.x) + first * call.x_stride, call.x_stride, tokens, places,
                    flips ? kFlip : 0, tile, panel);
  }
}

// Where the scales of the tokens of a dynamic panel are: after its bytes.
inline float* panel_scales(int32_t* panel, int64_t tiles, int64_t places, int64_t tile) {
  return reinterpret_cast<float*>(panel + tiles * places * tile);
}

// Where the results of one block of rows go, and how.
struct Int8Rows {
  int64_t index;  // of the tile
  int64_t tokens;
  int64_t row;
  int64_t rows;
  int32_t* panel;  // of the output, at these rows, or null
};

// Four rows of results at a time become one of bytes, through an activation; `to` may be where the results are.
template <Activation Act>
inline void join_activated(const float* results, int64_t tile, int64_t rows, int64_t vectors, float factor,
                           const Bytes& bytes, int32_t* to) {
  const Vec scale = splat(factor);
  for (int64_t row = 0; row < rows; row += 4) {
    for (int64_t j = 0; j < vectors * kLanes; j += kLanes) {
      Vec four[4];
#pragma GCC unroll 4
      for (int64_t r = 0; r < 4; ++r) {
        four[r] = scale * activate_last<Act>(activate<Act>(load(results + std::min(row + r, rows - 1) * tile + j)));
      }
      store_ints(to + row / 4 * tile + j, join_rows<false>(four, bytes));
    }
  }
}

// Stores results through an epilogue with all there may be.
inline bool store_general(const Int8Call& call, const Int8Rows& at, float* results, int64_t tile, const Bytes& bytes) {
  static thread_local Scratch scratch;
  if (call.output != kFloat && !call.residual) {
    int32_t* to = at.panel ? at.panel : reinterpret_cast<int32_t*>(results);
    const float factor = call.y_inverse_scale != 0.0f ? call.y_inverse_scale : 1.0f;
    with_activation(call.activation, [&](auto tag) {
      join_activated<decltype(tag)::value>(results, tile, at.rows, ceil_div(at.tokens, kLanes), factor, bytes, to);
    });
    if (!at.panel) {
      unpack_bytes_tile(to, tile, at.rows, at.tokens,
                        static_cast<uint8_t*>(call.y) + at.index * tile * call.y_stride + at.row, call.y_stride);
    }
    return true;
  }
  const int64_t first = at.index * tile;
  const Epilogue epilogue{nullptr, call.residual ? call.residual + first * call.residual_stride : nullptr,
                          call.residual_stride, call.activation};
  const bool real = call.output == kFloat;
  // unpack_rows() counts channels from the first of all.
  float* to = real ? static_cast<float*>(call.y) + first * call.y_stride : scratch.get(at.tokens * at.rows);
  if (!to) return false;
  const int64_t stride = real ? call.y_stride : at.rows;
  with_activation(call.activation, [&](auto tag) {
    unpack_rows<decltype(tag)::value>(results, tile, at.row, at.rows, at.tokens, epilogue, real ? to : to - at.row,
                                      stride);
  });
  if (real) return true;
  float factors[kMostTileTokens];
  std::fill_n(factors, at.tokens, call.y_inverse_scale != 0.0f ? call.y_inverse_scale : 1.0f);
  if (at.panel) {
    quantise_tile(to, stride, at.tokens, at.rows, factors, bytes, tile, at.panel);
  } else {
    uint8_t* y = static_cast<uint8_t*>(call.y) + first * call.y_stride + at.row;
    quantise_rows(to, stride, at.tokens, at.rows, factors[0], bytes, y, call.y_stride);
  }
  return true;
}

inline void store_simple(const Int8Call& call, const Int8Rows& at, float* results, int64_t tile, int64_t vectors,
                         const Int8Finish& finish) {
  const bool bytes = call.output != kFloat;
  if (bytes && !finish.joins) join_all_rows(results, tile, at.rows, vectors, finish.bytes);
  if (at.panel) {
    if (!finish.joins) {
      std::memcpy(at.panel, results, sizeof(int32_t) * static_cast<size_t>(ceil_div(at.rows, 4) * tile));
    }
  } else if (bytes) {
    unpack_bytes_tile(reinterpret_cast<int32_t*>(results), tile, at.rows, at.tokens,
                      static_cast<uint8_t*>(call.y) + at.index * tile * call.y_stride + at.row, call.y_stride);
  } else {
    const Epilogue nothing{nullptr, nullptr, 0, kNone};
    unpack_rows<kNone>(results, tile, at.row, at.rows, at.tokens, nothing,
                       static_cast<float*>(call.y) + at.index * tile * call.y_stride, call.y_stride);
  }
}

// The blocks [begin, end) of one tile of tokens; false when memory ran out.
inline bool multiply_int8_tile(const PanelMatrix& matrix, const Int8Call& call, Int8Finish finish, int64_t index,
                               int64_t begin, int64_t end) {
  static thread_local Scratch input_scratch, results_scratch;
  const int64_t tile = matrix.mv * kLanes;
  const int64_t tokens = std::min(tile, call.tokens - index * tile), vectors = ceil_div(tokens, kLanes);
  float token_scales[kMostTileTokens];
  if (call.x_is_dynamic) finish.token_scales = token_scales;
  const int32_t* x;
  float* results = results_scratch.get(kBlocksTogether * kBlockRows * tile);
  if (!results) return false;
  if (call.x_is_panel) {
    x = static_cast<const int32_t*>(call.x) + index * tile * matrix.inputs;
    if (call.x_is_dynamic) {
      int32_t* panel = static_cast<int32_t*>(const_cast<void*>(call.x));
      finish.token_scales = panel_scales(panel, ceil_div(call.tokens, tile), matrix.inputs, tile) + index * tile;
    }
  } else {
    int32_t* packed = reinterpret_cast<int32_t*>(input_scratch.get(std::max<int64_t>(matrix.inputs, 1) * tile));
    if (!packed) return false;
    pack_int8_tile(call, index, matrix.inputs, tile, packed, token_scales);
    x = packed;
  }
  const Int8Kernel kernel = find_int8_kernel(matrix.bn, vectors, call.no_least_weight != 0);
  const int64_t groups_each = kBlockRows / matrix.bn, places = ceil_div(matrix.channels, 4);
  for (int64_t block = begin; block < end; block += kBlocksTogether) {
    const int64_t blocks = std::min(kBlocksTogether, end - block), row = block * kBlockRows;
    const int64_t rows = std::min(blocks * kBlockRows, matrix.channels - row);
    int32_t* panel = call.y_is_panel ? static_cast<int32_t*>(call.y) + (index * places + row / 4) * tile : nullptr;
    int32_t* y = panel && finish.joins ? panel : reinterpret_cast<int32_t*>(results);
    kernel(Int8Task{&matrix, &finish, block * groups_each, std::min((block + blocks) * groups_each, matrix.groups), x,
                    y, row, tile, tile});
    const Int8Rows at{index, tokens, row, rows, panel};
    if (!is_general(call)) {
      store_simple(call, at, results, tile, vectors, finish);
    } else if (!store_general(call, at, results, tile, finish.bytes)) {
      return false;
    }
  }
  return true;
}

// Tells whether no result can be beyond 2^31, whatever the sums are; false where a scale is no number.
inline bool is_bounded(const Int8Call& call, int64_t channels) {
  bool small = true;
  for (int64_t i = 0; i < channels; ++i) small &= std::abs(call.multiplier[i]) < 0.5f;
  for (int64_t i = 0; call.offset && i < channels; ++i) small &= std::abs(call.offset[i]) < 1e9f;
  return small;
}

inline bool multiply_int8(const PanelMatrix& matrix, const Int8Call& call) {
  static thread_local Scratch scratch;
  int32_t* starts = reinterpret_cast<int32_t*>(scratch.get(matrix.channels));
  if (!starts) return false;
  // The zero point of bytes as they are multiplied.
  const int32_t moved = has_vnni() == (call.x_is_unsigned != 0) ? 0 : has_vnni() ? 128 : -128;
  for (int64_t i = 0; i < matrix.channels; ++i) starts[i] = -(call.x_zero + moved) * call.row_sums[i];
  const bool bytes = call.output != kFloat, is_unsigned = call.output == kUint8, plain = !is_general(call);
  const Bytes stored = bytes_around(call.y_zero, is_unsigned, call.y_is_panel ? has_vnni() : is_unsigned,
                                    plain && call.floor == 0.0f);
  const float floor = plain ? call.floor : -std::numeric_limits<float>::infinity();
  const Int8Finish finish{call.multiplier, call.offset, starts, floor,
                          bytes && matrix.bn >= 4 && plain && !call.x_is_dynamic,
                          bytes && is_bounded(call, matrix.channels), stored, nullptr};
  const int64_t tiles = ceil_div(call.tokens, matrix.mv * kLanes);
  return share_tiles(matrix, tiles, call.threads, [&](int64_t tile, int64_t begin, int64_t end) {
    return multiply_int8_tile(matrix, call, finish, tile, begin, end);
  });
}

// Token-major rows to panels of bytes; of fp32, the call says how it is rounded on the way. The scales of dynamic tokens
// come after the panel.
inline void pack_int8_panels(const Int8Call& call, int64_t places, int64_t mv, int32_t* panel) {
  const int64_t tile = mv * kLanes, tiles = ceil_div(call.tokens, tile);
  parallel(call.threads, [&](int64_t index, int64_t count) {
    for (int64_t i = tiles * index / count; i < tiles * (index + 1) / count; ++i) {
      pack_int8_tile(call, i, places, tile, panel + i * places * tile, panel_scales(panel, tiles, places, tile) + i * tile);
    }
  });
}

}  // namespace sparta
