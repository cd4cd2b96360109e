// The panel layout: tokens in tiles of T, and inside a tile one row of T tokens for each channel, [tiles][channels][T].
// A kernel that vectorises over tokens then loads whole vectors for any channel. Token-major data
// is transposed in registers, kLanes x kLanes at a time, while it is in the cache for the multiplication anyway.
#pragma once

#include <algorithm>

#include "epilogue.h"

namespace sparta {

// Weights of a whole network come from far. Processors ask ahead by themselves, but not beyond a page.
constexpr int64_t kWeightsAhead = 4096 / static_cast<int64_t>(sizeof(float));

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A square of kLanes x kLanes values is read from rows `stride` apart and written transposed. Whole squares are a case
// of their own, because constant counts keep all of it in registers.
template <bool Whole>
SPARTA_INLINE void load_square(const float* from, int64_t stride, int64_t rows, int64_t columns,
                               Vec (&square)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (Whole) {
      square[i] = load(from + i * stride);
    } else {
      square[i] = i < rows ? load_some(from + i * stride, columns) : Vec{};
    }
  }
}

template <bool Whole>
SPARTA_NOINLINE void pack_square(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to,
                                 int64_t tile) {
  Vec square[kLanes];
  load_square<Whole>(from, stride, rows, columns, square);
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (Whole || i < columns) store(to + i * tile, square[i]);
  }
}

// Packs the columns [begin, end) of `tokens` (at most `tile`) token-major rows into one panel tile that begins with
// column `begin`. Tokens that do not exist become 0 up to the next whole vector; vectors without any token are left
// alone, nobody reads them.
inline void pack_tile(const float* x, int64_t stride, int64_t tokens, int64_t begin, int64_t end, int64_t tile,
                      float* panel) {
  // All tokens of a few channels before the next channels: whole rows of the panel are written at once.
  for (int64_t k = begin; k < end; k += kLanes) {
    const int64_t columns = std::min<int64_t>(end - k, kLanes);
    for (int64_t first = 0; first < tokens; first += kLanes) {
      const int64_t rows = std::min<int64_t>(tokens - first, kLanes);
      const bool whole = rows == kLanes && columns == kLanes;
      (whole ? pack_square<true> : pack_square<false>)(x + first * stride + k, stride, rows, columns,
                                                       panel + (k - begin) * tile + first, tile);
    }
  }
}

template <Activation Act, bool Whole>
SPARTA_NOINLINE void unpack_square(const float* from, int64_t tile, int64_t rows, int64_t tokens, const float* bias,
                                   const float* residual, int64_t residual_stride, float* y, int64_t stride) {
  Vec square[kLanes];
  load_square<Whole>(from, tile, rows, kLanes, square);
  transpose(square);
  if constexpr (Whole) {
    // Rows are far apart, so the hardware does not see that the next square of channels comes soon.
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) __builtin_prefetch(y + i * stride + 2 * kLanes, 1);
  }
  const int64_t count = Whole ? kLanes : rows;
  const Vec shift = bias ? load_some(bias, count) : splat(-0.0f);  // adding -0 changes nothing, not even a -0
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!Whole && i >= tokens) break;
    Vec sum = activate<Act>(square[i] + shift);
    if (residual) sum += load_some(residual + i * residual_stride, count);
    store_some(y + i * stride, activate_last<Act>(sum), count);
  }
}

// Writes `rows` panel rows, the channels from `channel` on, token-major, through the epilogue.
template <Activation Act>
inline void unpack_rows(const float* panel, int64_t tile, int64_t channel, int64_t rows, int64_t tokens,
                        const Epilogue& epilogue, float* y, int64_t stride) {
  for (int64_t first = 0; first < tokens; first += kLanes) {
    const int64_t present = std::min<int64_t>(tokens - first, kLanes);
    for (int64_t row = 0; row < rows; row += kLanes) {
      const int64_t count = std::min<int64_t>(rows - row, kLanes);
      const int64_t at = channel + row;
      const bool whole = present == kLanes && count == kLanes;
      (whole ? unpack_square<Act, true> : unpack_square<Act, false>)(
          panel + row * tile + first, tile, count, present, epilogue.bias ? epilogue.bias + at : nullptr,
          epilogue.residual ? epilogue.residual + first * epilogue.residual_stride + at : nullptr,
          epilogue.residual_stride, y + first * stride + at, stride);
    }
  }
}

// Applies the epilogue to `rows` rows of an output panel in place; `panel` and `residual` start at `channel`.
template <Activation Act>
inline void finish_rows(float* panel, int64_t tile, int64_t channel, int64_t rows, int64_t vectors,
                        const float* bias, const float* residual) {
  for (int64_t row = 0; row < rows; ++row) {
    const Vec shift = splat(bias ? bias[channel + row] : -0.0f);  // adding -0 changes nothing, not even a -0
    for (int64_t j = 0; j < vectors; ++j) {
      const int64_t at = row * tile + j * kLanes;
      Vec sum = activate<Act>(load(panel + at) + shift);
      if (residual) sum += load(residual + at);
      store(panel + at, activate_last<Act>(sum));
    }
  }
}

}  // namespace sparta
