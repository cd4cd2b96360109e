// Panels of bf16: two neighbouring channels of a token are the halves of one 32-bit place, and places stand in strips of 16
// tokens, [strips][places][16]. Here real numbers are rounded into them, and halves of two places put together.
#pragma once

#include "matrix_tiles.h"
#include "spmm.h"

#if defined(SPARTA_AVX512)
#include <cpuid.h>
#endif

namespace sparta {

typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));

constexpr BitVec kUpperHalf = BitVec{} + 0xffff0000u;
// Places of a panel are a multiple of those of a tile register; what is beyond the channels is 0.
inline int64_t bf16_places(int64_t channels) { return ceil_div(channels, kTileInputs) * kTileRows; }

inline bool has_bf16() {
#if defined(SPARTA_AVX512)
  static const bool found = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 5 & 1) != 0;
  }();
  return found;
#else
  return false;
#endif
}

// The nearest bf16 in the upper half of each lane, ties to even; NaN stays NaN.
SPARTA_INLINE BitVec nearest_bf16(Vec v) {
  const BitVec bits = (BitVec)v;
  const BitVec rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return v == v ? rounded : (bits | 0x400000u);
}

SPARTA_INLINE IntVec joined_halves(Vec low, Vec high) {
  return (IntVec)(nearest_bf16(low) >> 16 | (nearest_bf16(high) & kUpperHalf));
}

template <int... Lane>
SPARTA_INLINE Vec neighbours(Vec first, Vec second, std::integer_sequence<int, Lane...>) {
  const Vec even = SPARTA_SHUFFLE(first, second, (2 * Lane)...);
  const Vec odd = SPARTA_SHUFFLE(first, second, (2 * Lane + 1)...);
  return (Vec)joined_halves(even, odd);
}

// Where a vector of tokens begins, in a panel with so many places to a strip.
SPARTA_INLINE int64_t vector_start(int64_t vector, int64_t places) {
  const int64_t token = vector * kLanes;
  return token / kTileTokens * places * kTileTokens + token % kTileTokens;
}

// 2 * kLanes channels of kLanes tokens become kLanes places; `columns` and `rows` say what there is of them.
template <bool Whole>
SPARTA_NOINLINE void pack_bf16_square(const float* from, int64_t stride, int64_t rows, int64_t columns, int32_t* to) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
  Vec square[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const float* row = from + i * stride;
    if constexpr (Whole) {
      square[i] = neighbours(load(row), load(row + kLanes), kAll);
    } else {
      const Vec first = i < rows && columns > 0 ? load_some(row, columns) : Vec{};
      const Vec second = i < rows && columns > kLanes ? load_some(row + kLanes, columns - kLanes) : Vec{};
      square[i] = neighbours(first, second, kAll);
    }
  }
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) std::memcpy(to + i * kTileTokens, &square[i], sizeof square[i]);
}

// Rounds token-major rows into a panel, from its first strip on.
inline void pack_bf16_rows(const float* x, int64_t stride, int64_t tokens, int64_t channels, int32_t* panel) {
  const int64_t places = bf16_places(channels);
  for (int64_t first = 0; first < tokens; first += kLanes) {
    const int64_t rows = std::min<int64_t>(tokens - first, kLanes);
    int32_t* to = panel + vector_start(first / kLanes, places);
    for (int64_t place = 0; place < places; place += kLanes) {
      const int64_t columns = channels - 2 * place;
      const bool whole = rows == kLanes && columns >= 2 * kLanes;
      (whole ? pack_bf16_square<true> : pack_bf16_square<false>)(x + first * stride + 2 * place, stride, rows, columns,
                                                                 to + place * kTileTokens);
    }
  }
}

inline void pack_bf16_panels(const float* x, int64_t stride, int64_t tokens, int64_t channels, int32_t* panel,
                             int32_t threads) {
  const int64_t strips = ceil_div(tokens, kTileTokens), places = bf16_places(channels);
  parallel(threads, [&](int64_t index, int64_t count) {
    const int64_t first = strips * index / count * kTileTokens;
    const int64_t last = std::min(strips * (index + 1) / count * kTileTokens, tokens);
    if (first < last) pack_bf16_rows(x + first * stride, stride, last - first, channels, panel + first * places);
  });
}

// Some groups of rows for the tokens of one tile, or for some vectors of them.
struct Bf16Task {
  const PanelMatrix* matrix;  // two offsets for each pair, or one for each block; values are bf16
  int64_t group_begin;
  int64_t group_end;
  const int32_t* x;      // the panel, at the first strip of the tile
  float* y;              // results, [rows][tile], at row `first_row`
  int64_t first_row;
  int64_t tile;
  int64_t tokens;        // that are there
  int64_t first_vector;  // pairs
};

// The even channel of one place and the odd one of another.
SPARTA_INLINE IntVec load_halves(const int32_t* even, const int32_t* odd) {
#if defined(SPARTA_AVX512)
  return (IntVec)_mm512_mask_loadu_epi16(_mm512_loadu_si512(even), 0xAAAAAAAAu, odd);
#else
  BitVec low, high;
  std::memcpy(&low, even, sizeof low);
  std::memcpy(&high, odd, sizeof high);
  return (IntVec)((low & ~kUpperHalf) | (high & kUpperHalf));
#endif
}

SPARTA_INLINE const int32_t* place_at(const int32_t* x, uint32_t offset) {
  return reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(x) + offset);
}

}  // namespace sparta
