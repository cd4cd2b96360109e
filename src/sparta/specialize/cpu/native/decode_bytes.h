// Rows of int8 weights times one token, 64 at a time, on processors that expand bytes under a mask (VBMI2) and add
// products of four bytes (VNNI). The token is rounded to 16 bits, with a scale for every 256 inputs, and each number is
// two bytes, high and low: its products cost two instructions instead of a conversion to float for every weight.
// Sums of a group are exact in 32 bits. -DSPARTA_EMULATED builds the same kernels of plain loops, for tests.
#pragma once

#include <cmath>

#include "bytes.h"

#if defined(SPARTA_AVX512) || defined(SPARTA_EMULATED)
#define SPARTA_DECODE_BYTES
#endif

namespace sparta {

constexpr int64_t kByteChunk = 64;   // weights that one instruction takes
constexpr int64_t kByteGroup = 256;  // inputs with one scale
constexpr int64_t kByteLanes = 16;   // sums of a chunk, each of four neighbours

// The sum of a vector by halves: a chain of additions from lane to lane would take longer than a short row.
SPARTA_INLINE float sum_by_halves(Vec v) {
#if defined(SPARTA_AVX512)
  const __m512 all = (__m512)v;
  return sum_of(_mm256_add_ps(_mm512_castps512_ps256(all), _mm512_castps512_ps256(_mm512_shuffle_f32x4(all, all, 14))));
#elif defined(SPARTA_AVX2)
  return sum_of((__m256)v);
#else
  return sum_of_lanes(v);
#endif
}

// Whether this processor has the instructions.
inline bool has_byte_products() {
#if defined(SPARTA_EMULATED)
  return true;
#elif defined(SPARTA_AVX512)
  static const bool found = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi2");
  return found;
#else
  return false;
#endif
}

// A token of which every number is scale * (256 * high + low).
struct RoundedToken {
  const int8_t* high;     // [inputs, whole chunks], 0 beyond the last; null where the token cannot be rounded
  const int8_t* low;
  const int32_t* starts;  // [groups][kByteLanes]: what undoes that weights are taken with 128 more
  const float* scales;    // [groups]
};

// Floats of memory that a rounded token needs.
inline int64_t rounded_floats(int64_t inputs) {
  const int64_t groups = ceil_div(inputs, kByteGroup);
  return 16 + groups * (kByteGroup / 2 + kByteLanes + 1);
}

#if defined(SPARTA_DECODE_BYTES)
typedef int32_t ByteSums __attribute__((vector_size(64)));
typedef uint8_t ByteVec __attribute__((vector_size(64)));
typedef uint8_t BytesInMemory __attribute__((vector_size(64), aligned(1), may_alias));

// Adds to each of 16 sums the products of four weights without a sign and four numbers with one.
SPARTA_INLINE ByteSums add_products(ByteSums sums, ByteVec weights, const int8_t* x) {
#if defined(SPARTA_AVX512)
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "m"(*reinterpret_cast<const BytesInMemory*>(x)));
#else
  for (int i = 0; i < kByteChunk; ++i) sums[i / 4] += static_cast<int32_t>(weights[i]) * x[i];
#endif
  return sums;
}

// 64 weights, each with 128 more, of which those with a bit stand together; the others become 128, which is 0.
SPARTA_INLINE ByteVec expanded_bytes(const int8_t* values, uint64_t mask) {
  ByteVec found = {};
#if defined(SPARTA_AVX512)
  ByteVec together;
  std::memcpy(&together, values, sizeof together);
  asm("vpexpandb %1, %0%{%2%}%{z%}" : "=v"(found) : "v"(together), "Yk"(static_cast<__mmask64>(mask)));
#else
  for (int i = 0; i < kByteChunk; ++i) {
    if (mask >> i & 1) found[i] = static_cast<uint8_t>(*values++);
  }
#endif
  return found ^ static_cast<uint8_t>(128);
}

SPARTA_INLINE ByteVec plain_bytes(const int8_t* values) {
  ByteVec found;
  std::memcpy(&found, values, sizeof found);
  return found ^ static_cast<uint8_t>(128);
}

typedef float ByteTotals __attribute__((vector_size(64)));

// What the sums of a group add to the totals of a row.
SPARTA_INLINE ByteTotals add_group(ByteTotals totals, ByteSums high, ByteSums low, float scale) {
  return totals + __builtin_convertvector(low + (high << 8), ByteTotals) * (scale - ByteTotals{});
}

inline float sum_of_totals(ByteTotals totals) {
#if defined(SPARTA_AVX512)
  return _mm512_reduce_add_ps((__m512)totals);
#endif
  float sum = 0;
  for (int64_t lane = 0; lane < kByteLanes; ++lane) sum += totals[lane];
  return sum;
}

// Rounds one vector of numbers to two bytes each.
SPARTA_INLINE void round_some(Vec x, float inverse, int8_t* high, int8_t* low) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
  const IntVec whole = (IntVec)(x * splat(inverse) + shift) - (IntVec)shift;
  const IntVec upper = (whole + 128) >> 8;
  const IntVec lower = whole - upper * 256;
#if defined(SPARTA_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8((__m512i)upper));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8((__m512i)lower));
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    high[lane] = static_cast<int8_t>(upper[lane]);
    low[lane] = static_cast<int8_t>(lower[lane]);
  }
#endif
}

// The scale of a group whose largest number is `most`: what 16 bits hold, or of a token whose numbers are multiples of a
// step the largest part of it by a power of two that keeps them in 16 bits, with which they are not rounded at all.
inline float group_scale(float most, float step) {
  constexpr float kMost = 127.0f * 256.0f;
  if (step <= 0.0f || most <= 0.0f) return std::max(most / kMost, kLeastScale);
  const float ratio = most / step;
  if (!std::isfinite(ratio) || !(ratio > 0.0f)) return std::max(most / kMost, kLeastScale);
  return std::max(std::ldexp(step, -std::ilogb(kMost / ratio)), kLeastScale);
}

// Rounds a token into `memory`. A number that is infinite or none leaves it unrounded: float is for those.
inline RoundedToken rounded_token(const float* x, int64_t inputs, float* memory, float step = 0.0f) {
  const int64_t groups = ceil_div(inputs, kByteGroup), padded = groups * kByteGroup;
  const uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
  int8_t* high = reinterpret_cast<int8_t*>(aligned);
  int8_t* low = high + padded;
  int32_t* starts = reinterpret_cast<int32_t*>(low + padded);
  float* scales = reinterpret_cast<float*>(starts + groups * kByteLanes);
  const ByteVec ones = ByteVec{} + static_cast<uint8_t>(1);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = group * kByteGroup, count = std::min(kByteGroup, inputs - first);
    const float scale = group_scale(token_scale(x + first, count) * 127.0f, step);
    if (!std::isfinite(scale)) return {};
    scales[group] = scale;
    for (int64_t k = 0; k < kByteGroup; k += kLanes) {
      const Vec some = k < count ? load_some(x + first + k, count - k) : Vec{};
      round_some(some, 1.0f / scale, high + first + k, low + first + k);
    }
    ByteSums upper = {}, lower = {};
    for (int64_t k = first; k < first + kByteGroup; k += kByteChunk) {
      upper = add_products(upper, ones, high + k);
      lower = add_products(lower, ones, low + k);
    }
    const ByteSums start = (lower + (upper << 8)) * -128;
    std::memcpy(starts + group * kByteLanes, &start, sizeof start);
  }
  return {high, low, starts, scales};
}

SPARTA_INLINE ByteSums start_of(const RoundedToken& token, int64_t group) {
  ByteSums start;
  std::memcpy(&start, token.starts + group * kByteLanes, sizeof start);
  return start;
}

// One row: `next(chunk)` gives the weights of the chunks in order.
template <class F>
SPARTA_INLINE float byte_row(const RoundedToken& token, int64_t inputs, F next) {
  const int64_t chunks = ceil_div(inputs, kByteChunk);
  constexpr int64_t kEach = kByteGroup / kByteChunk;
  const int8_t* highs = token.high;
  const int8_t* lows = token.low;
  ByteTotals totals = {};
  for (int64_t chunk = 0, group = 0; chunk < chunks; ++group) {
    ByteSums high = {}, low = start_of(token, group);
    for (const int64_t end = std::min(chunk + kEach, chunks); chunk < end; ++chunk) {
      const ByteVec weights = next(chunk);
      high = add_products(high, weights, highs + chunk * kByteChunk);
      low = add_products(low, weights, lows + chunk * kByteChunk);
    }
    totals = add_group(totals, high, low, token.scales[group]);
  }
  return sum_of_totals(totals);
}

// A row whose every input has its place. What is read beyond it meets inputs that are 0.
inline float dense_byte_row(const int8_t* values, const RoundedToken& token, int64_t inputs) {
  return byte_row(token, inputs, [&](int64_t chunk) __attribute__((always_inline)) {
    __builtin_prefetch(values + chunk * kByteChunk + 1024);
    return plain_bytes(values + chunk * kByteChunk);
  });
}

SPARTA_INLINE uint64_t whole_marks(const uint8_t* from) {
  uint64_t mask;
  std::memcpy(&mask, from, sizeof mask);
  return mask;
}

// Not inline: a mask whose address is taken would be written to memory for every chunk.
SPARTA_NOINLINE inline uint64_t last_marks(const uint8_t* from, int64_t bytes) {
  uint64_t mask = 0;
  std::memcpy(&mask, from, static_cast<size_t>(bytes));
  return mask;
}

inline float bitmap_byte_row(const int8_t* values, const uint8_t* marks, const RoundedToken& token, int64_t inputs) {
  const int64_t bytes = ceil_div(inputs, 8);
  return byte_row(token, inputs, [&](int64_t chunk) __attribute__((always_inline)) {
    const int64_t left = bytes - 8 * chunk;
    const uint64_t mask = left >= 8 ? whole_marks(marks + 8 * chunk) : last_marks(marks + 8 * chunk, left);
    __builtin_prefetch(values + 1024);
    const ByteVec weights = expanded_bytes(values, mask);
    values += __builtin_popcountll(mask);
    return weights;
  });
}
#endif

}  // namespace sparta
