// Epilogues that are cheap enough for registers, and where finished sums of images go: not every token that a kernel
// computes is a pixel, and those that are not are dropped before anything is stored.
#pragma once

#include <limits>

#include "epilogue.h"

namespace sparta {

// An epilogue that is cheap enough for registers: max(min(max(sum + bias, floor), ceiling) + residual, last_floor).
struct RowsFinish {
  const float* bias;      // one a channel, or null
  const float* residual;  // laid out as the output and from `first_row` on, or null
  float floor;            // 0 for ReLU, -inf for none
  float ceiling;          // 6 for ReLU6, inf for none
  float last_floor;       // 0 for a ReLU behind the residual, -inf for none
};

inline bool fits_registers(int32_t activation) { return activation != kGelu && activation != kSilu; }

inline RowsFinish rows_finish(const float* bias, const float* residual, int32_t activation) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  return {bias, residual, activation == kRelu || activation == kRelu6 ? 0.0f : -kInfinity,
          activation == kRelu6 ? 6.0f : kInfinity, activation == kReluLast ? 0.0f : -kInfinity};
}

// Where finished sums go of a vector whose tokens are not all pixels of an image: those of the lanes that are, one after
// the other from `pixel` on.
struct PixelLanes {
  int64_t pixel;
  uint32_t lanes;
  int32_t count;
};

// Whether the lanes of a vector that are pixels can be moved together in a register.
#if defined(SPARTA_AVX512)
constexpr bool kMovesLanes = true;
SPARTA_INLINE Vec together(Vec v, uint32_t lanes) {
  return (Vec)_mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), (__m512)v);
}
#else
constexpr bool kMovesLanes = false;
SPARTA_INLINE Vec together(Vec v, uint32_t) { return v; }
#endif

// What finishing needs of one row, in registers.
template <class V>
struct RowEnd {
  V shift, floor, ceiling, last_floor;
  RowEnd(const RowsFinish& finish, int64_t row)
      : shift(splat<V>(finish.bias ? finish.bias[row] : -0.0f)),  // adding -0 changes nothing, not even a -0
        floor(splat<V>(finish.floor)),
        ceiling(splat<V>(finish.ceiling)),
        last_floor(splat<V>(finish.last_floor)) {}
  SPARTA_INLINE V before(V sum) const {
    sum += shift;
    const V out = sum < floor ? floor : sum;  // NaN is not below and stays
    return out > ceiling ? ceiling : out;
  }
  SPARTA_INLINE V after(V sum) const { return sum < last_floor ? last_floor : sum; }
};

}  // namespace sparta
