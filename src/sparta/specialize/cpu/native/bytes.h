// Panels of 8-bit integers: four neighbouring channels of a token are the bytes of one 32-bit place, so that a panel of
// bytes is moved and transposed as one of floats with a quarter of the channels. Bytes are rounded
// and joined with the saturating instructions that halve numbers, 32 bits to 16 to 8, which also cut them to their range.
#pragma once

#include "panel.h"

namespace sparta {

// A byte without a sign is the one with a sign plus 128, and adding 128 is flipping the highest bit.
constexpr int32_t kFlip = static_cast<int32_t>(0x80808080u);

SPARTA_INLINE IntVec load_ints(const int32_t* from) {
  IntVec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

SPARTA_INLINE void store_ints(int32_t* to, IntVec v) { std::memcpy(to, &v, sizeof v); }

// How a number becomes a byte: rounded to even, `shift` added, cut to 0 to 255, at least `least`, bits flipped.
struct Bytes {
  int32_t shift;
  int32_t least;
  int32_t flip;
};

// Integers around a zero point, in the range that the first says and stored as the second says. Numbers below 0 can be
// cut to 0 here, where four are in one place.
inline Bytes bytes_around(int32_t zero, bool is_unsigned, bool stored_unsigned, bool relu = false) {
  const int32_t shift = is_unsigned ? zero : zero + 128;
  return {shift, relu ? std::min(std::max(shift, 0), 255) : 0, stored_unsigned ? 0 : kFlip};
}

// Rounds four vectors. In every 128 bits of the result stand four bytes of the first, then four of the second, and so
// on; in a build with vectors of 128 bits that is the order of all. Bounded: no number is beyond 2^31.
template <bool Bounded>
SPARTA_INLINE IntVec round_bytes(const Vec (&four)[4], const Bytes& bytes) {
#if defined(SPARTA_AVX512)
  __m512i whole[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    // Beyond 2^31 the conversion would give the least number for the largest.
    const __m512 number = (__m512)four[i];
    whole[i] = _mm512_cvtps_epi32(Bounded ? number : _mm512_min_ps(_mm512_set1_ps(1e9f), number));
  }
  const __m512i shift = _mm512_set1_epi16(static_cast<int16_t>(bytes.shift));
  const __m512i low = _mm512_adds_epi16(_mm512_packs_epi32(whole[0], whole[1]), shift);
  const __m512i high = _mm512_adds_epi16(_mm512_packs_epi32(whole[2], whole[3]), shift);
  const __m512i least = _mm512_set1_epi8(static_cast<int8_t>(bytes.least));
  return (IntVec)_mm512_max_epu8(_mm512_packus_epi16(low, high), least) ^ bytes.flip;
#elif defined(SPARTA_AVX2)
  __m256i whole[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    // Beyond 2^31 the conversion would give the least number for the largest.
    const __m256 number = (__m256)four[i];
    whole[i] = _mm256_cvtps_epi32(Bounded ? number : _mm256_min_ps(_mm256_set1_ps(1e9f), number));
  }
  const __m256i shift = _mm256_set1_epi16(static_cast<int16_t>(bytes.shift));
  const __m256i low = _mm256_adds_epi16(_mm256_packs_epi32(whole[0], whole[1]), shift);
  const __m256i high = _mm256_adds_epi16(_mm256_packs_epi32(whole[2], whole[3]), shift);
  const __m256i least = _mm256_set1_epi8(static_cast<int8_t>(bytes.least));
  return (IntVec)_mm256_max_epu8(_mm256_packus_epi16(low, high), least) ^ bytes.flip;
#else
  const Vec least = splat(static_cast<float>(bytes.least - bytes.shift));
  const Vec limit = splat(static_cast<float>(255 - bytes.shift));
  const Vec round = splat(12582912.0f);  // 1.5 * 2^23
  uint8_t all[4 * kLanes];
  for (int i = 0; i < 4; ++i) {
    // No number is below all of them, as with the instructions above.
    const Vec cut = four[i] >= least ? (four[i] > limit ? limit : four[i]) : least;
    const IntVec whole = (IntVec)(cut + round) - (IntVec)round + bytes.shift;
    for (int lane = 0; lane < kLanes; ++lane) all[i * kLanes + lane] = static_cast<uint8_t>(whole[lane]);
  }
  IntVec joined;
  std::memcpy(&joined, all, sizeof joined);
  return joined ^ bytes.flip;
#endif
}

// Four channels with the same tokens: lane i of the result has lane i of each.
template <bool Bounded>
SPARTA_INLINE IntVec join_rows(const Vec (&four)[4], const Bytes& bytes) {
  const IntVec rounded = round_bytes<Bounded>(four, bytes);
#if defined(SPARTA_AVX512)
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return (IntVec)_mm512_shuffle_epi8((__m512i)rounded, order);
#elif defined(SPARTA_AVX2)
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return (IntVec)_mm256_shuffle_epi8((__m256i)rounded, order);
#else
  uint8_t from[16], to[16];
  std::memcpy(from, &rounded, sizeof from);
  for (int i = 0; i < 16; ++i) to[i] = from[i % 4 * 4 + i / 4];
  IntVec joined;
  std::memcpy(&joined, to, sizeof joined);
  return joined;
#endif
}

// Neighbouring channels of one token: lane i of the result has the channels from 4 * i on.
SPARTA_INLINE IntVec join_channels(const Vec (&four)[4], const Bytes& bytes) {
  const IntVec rounded = round_bytes<false>(four, bytes);
#if defined(SPARTA_AVX512)
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return (IntVec)_mm512_permutexvar_epi32(order, (__m512i)rounded);
#elif defined(SPARTA_AVX2)
  return (IntVec)_mm256_permutevar8x32_epi32((__m256i)rounded, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#else
  return rounded;
#endif
}

// Stores a transposed square of places, one row of the panel after the other.
SPARTA_INLINE void store_square(const Vec (&square)[kLanes], int64_t places, int32_t flip, int32_t* to, int64_t tile) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i < places) store_ints(to + i * tile, (IntVec)square[i] ^ flip);
  }
}

template <bool Whole>
SPARTA_NOINLINE void pack_bytes_square(const int32_t* from, int64_t stride, int64_t rows, int64_t places, int32_t flip,
                                       int32_t* to, int64_t tile) {
  Vec square[kLanes];
  load_square<Whole>(reinterpret_cast<const float*>(from), stride, rows, places, square);
  transpose(square);
  store_square(square, Whole ? kLanes : places, flip, to, tile);
}

// Packs `tokens` (at most `tile`) token-major rows of bytes, four to a place, into one panel tile.
inline void pack_bytes_tile(const int32_t* x, int64_t stride, int64_t tokens, int64_t places, int32_t flip,
                            int64_t tile, int32_t* panel) {
  for (int64_t k = 0; k < places; k += kLanes) {
    const int64_t columns = std::min<int64_t>(places - k, kLanes);
    for (int64_t first = 0; first < tokens; first += kLanes) {
      const int64_t rows = std::min<int64_t>(tokens - first, kLanes);
      const bool whole = rows == kLanes && columns == kLanes;
      (whole ? pack_bytes_square<true> : pack_bytes_square<false>)(x + first * stride + k, stride, rows, columns, flip,
                                                                   panel + k * tile + first, tile);
    }
  }
}

constexpr int64_t kMostTileTokens = 4 * kLanes;

template <bool Whole>
SPARTA_NOINLINE void quantise_square(const float* from, int64_t stride, int64_t rows, int64_t channels,
                                     const float* factors, const Bytes& bytes, int32_t* to, int64_t tile) {
  Vec square[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    Vec four[4] = {};
    if (Whole || i < rows) {
      const Vec scale = splat(factors[i]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const float* at = from + i * stride + j * kLanes;
        if (Whole) four[j] = scale * load(at);
        if (!Whole && j * kLanes < channels) four[j] = scale * load_some(at, channels - j * kLanes);
      }
    }
    square[i] = (Vec)join_channels(four, bytes);
  }
  transpose(square);
  store_square(square, Whole ? kLanes : ceil_div(channels, 4), 0, to, tile);
}

// Rounds x * the factor of its token to bytes and packs it into one panel tile, in one pass.
inline void quantise_tile(const float* x, int64_t stride, int64_t tokens, int64_t channels, const float* factors,
                          const Bytes& bytes, int64_t tile, int32_t* panel) {
  for (int64_t k = 0; k < channels; k += 4 * kLanes) {
    const int64_t columns = std::min<int64_t>(channels - k, 4 * kLanes);
    for (int64_t first = 0; first < tokens; first += kLanes) {
      const int64_t rows = std::min<int64_t>(tokens - first, kLanes);
      const bool whole = rows == kLanes && columns == 4 * kLanes;
      (whole ? quantise_square<true> : quantise_square<false>)(x + first * stride + k, stride, rows, columns,
                                                               factors + first, bytes, panel + k / 4 * tile + first,
                                                               tile);
    }
  }
}

SPARTA_INLINE void store_some_bytes(uint8_t* to, Vec v, int64_t count) {
  constexpr int64_t kAll = sizeof(Vec);
#if defined(SPARTA_AVX512)
  const __mmask64 kept = count >= kAll ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
  _mm512_mask_storeu_epi8(to, kept, (__m512i)v);
#else
  std::memcpy(to, &v, static_cast<size_t>(std::min(count, kAll)));
#endif
}

// Rounds x * factor to bytes, both token-major.
inline void quantise_rows(const float* x, int64_t stride, int64_t tokens, int64_t channels, float factor,
                          const Bytes& bytes, uint8_t* y, int64_t y_stride) {
  const Vec scale = splat(factor);
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t channel = 0; channel < channels; channel += 4 * kLanes) {
      Vec four[4] = {};
      for (int64_t j = 0; j < 4 && channel + j * kLanes < channels; ++j) {
        const int64_t at = channel + j * kLanes;
        four[j] = scale * load_some(x + i * stride + at, channels - at);
      }
      store_some_bytes(y + i * y_stride + channel, (Vec)join_channels(four, bytes), channels - channel);
    }
  }
}

// The scale with which a token's largest number becomes 127, at least kLeastScale, whose inverse is a number. Not a
// number where one of the token's is none: the bits of |x| are in the order of numbers, with NaN above all.
constexpr float kLeastScale = 1e-37f;

inline float token_scale(const float* x, int64_t channels) {
  IntVec most = {};
  for (int64_t k = 0; k < channels; k += kLanes) {
    const IntVec bits = (IntVec)load_some(x + k, channels - k) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = std::max(largest, most[i]);
  float number;
  std::memcpy(&number, &largest, sizeof number);
  const float scale = number / 127.0f;
  return scale < kLeastScale ? kLeastScale : scale;
}

// Writes panel rows of bytes token-major; `channels` of them, four to a row.
inline void unpack_bytes_tile(const int32_t* panel, int64_t tile, int64_t channels, int64_t tokens, uint8_t* y,
                              int64_t stride) {
  const float* places = reinterpret_cast<const float*>(panel);
  for (int64_t first = 0; first < tokens; first += kLanes) {
    const int64_t present = std::min<int64_t>(tokens - first, kLanes);
    for (int64_t channel = 0; channel < channels; channel += 4 * kLanes) {
      Vec square[kLanes];
      const float* from = places + channel / 4 * tile + first;
      const int64_t rows = ceil_div(channels - channel, 4);
      if (rows >= kLanes) {
        load_square<true>(from, tile, kLanes, kLanes, square);
      } else {
        load_square<false>(from, tile, rows, kLanes, square);
      }
      transpose(square);
      for (int64_t i = 0; i < present; ++i) {
        store_some_bytes(y + (first + i) * stride + channel, square[i], channels - channel);
      }
    }
  }
}

}  // namespace sparta
