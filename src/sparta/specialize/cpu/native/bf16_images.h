// Images in bf16: contiguous planes of 16 bits, as PyTorch keeps them. A vector of them holds twice as many pixels as one
// of real numbers; two channels are interleaved in registers where they are multiplied as pairs, and sums come in the
// order that this leaves: the pixels of a vector in a lower and an upper part. Here images are rounded, sums leave as bf16
// or as real numbers, and images are pooled.
#pragma once

#include "bf16.h"
#include "bands.h"
#include "pool.h"

namespace sparta {

constexpr int kHalves = 2 * kLanes;  // pixels of a vector in bf16
constexpr int64_t kHalfBytes = 2;

// One call. Of `conv`, x, y and the residual may be bf16, and x always is where kernels read it: images that come in real
// numbers are rounded to it first.
struct Bf16ConvCall {
  ConvCall conv;
  const float* image;  // [images][channels][in_rows][in_columns], contiguous, in real numbers
  float* real;         // the result in real numbers beside bf16, or null
  int64_t channels;    // of the input
  int64_t outputs;
  int32_t x_is_short;
  int32_t y_is_short;
  int32_t residual_is_short;
  int32_t unused;
};

// The numbers of one channel and those of another as pairs, in two vectors.
struct PairParts {
  IntVec lower;
  IntVec upper;
};

// Real numbers in the order of pairs.
struct RealParts {
  Vec lower;
  Vec upper;
};

SPARTA_INLINE IntVec load_short(const uint16_t* from) { return (IntVec)load(reinterpret_cast<const float*>(from)); }

#if defined(SPARTA_AVX512)
SPARTA_INLINE PairParts interleaved(IntVec a, IntVec b) {
  return {(IntVec)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b), (IntVec)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b)};
}
SPARTA_INLINE RealParts widened(IntVec v) {
  const PairParts parts = interleaved(IntVec{}, v);
  return {(Vec)parts.lower, (Vec)parts.upper};
}
// The same for real numbers that lie one after the other, and back.
SPARTA_INLINE RealParts in_parts(Vec first, Vec second) {
  return {SPARTA_SHUFFLE(first, second, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
          SPARTA_SHUFFLE(first, second, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)};
}
SPARTA_INLINE RealParts in_a_row(RealParts parts) {
  return {SPARTA_SHUFFLE(parts.lower, parts.upper, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
          SPARTA_SHUFFLE(parts.lower, parts.upper, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
}
#else
// Even pixels and odd ones.
SPARTA_INLINE PairParts interleaved(IntVec a, IntVec b) {
  const BitVec one = (BitVec)a, two = (BitVec)b;
  return {(IntVec)((one & ~kUpperHalf) | two << 16), (IntVec)(one >> 16 | (two & kUpperHalf))};
}
SPARTA_INLINE RealParts widened(IntVec v) { return {(Vec)((BitVec)v << 16), (Vec)((BitVec)v & kUpperHalf)}; }
SPARTA_INLINE RealParts in_parts(Vec first, Vec second) {
  RealParts parts;
  for (int i = 0; i < kLanes; ++i) {
    parts.lower[i] = 2 * i < kLanes ? first[2 * i] : second[2 * i - kLanes];
    parts.upper[i] = 2 * i < kLanes ? first[2 * i + 1] : second[2 * i + 1 - kLanes];
  }
  return parts;
}
SPARTA_INLINE RealParts in_a_row(RealParts parts) {
  RealParts row;
  for (int i = 0; i < kHalves; ++i) (i < kLanes ? row.lower : row.upper)[i % kLanes] = (i % 2 ? parts.upper : parts.lower)[i / 2];
  return row;
}
#endif

// Rounded, as the bf16 of neighbouring pixels.
template <class Unit>
SPARTA_INLINE IntVec narrowed(RealParts parts) {
#if defined(SPARTA_AVX512)
  const BitVec lower = nearest_bf16(parts.lower) >> 16, upper = nearest_bf16(parts.upper) >> 16;
  return (IntVec)_mm512_packus_epi32((__m512i)lower, (__m512i)upper);
#else
  return joined_halves(parts.lower, parts.upper);
#endif
}

#if defined(SPARTA_AVX512)
template <>
SPARTA_INLINE IntVec narrowed<NativePairs>(RealParts parts) {
  IntVec apart;  // the lower part, and behind it the upper one
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(apart) : "v"(parts.upper), "v"(parts.lower));
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  return (IntVec)_mm512_permutexvar_epi64(order, (__m512i)apart);
}
#endif

// Up to a vector of bf16.
SPARTA_INLINE IntVec load_short_some(const uint16_t* from, int64_t count) {
  if (count >= kHalves) return load_short(from);
#if defined(SPARTA_AVX512)
  return (IntVec)_mm512_maskz_loadu_epi16((1u << count) - 1u, from);
#else
  IntVec v = {};
  std::memcpy(&v, from, kHalfBytes * static_cast<size_t>(count));
  return v;
#endif
}

SPARTA_INLINE void store_short_some(uint16_t* to, IntVec v, int64_t count) {
  if (count >= kHalves) {
    store(reinterpret_cast<float*>(to), (Vec)v);
    return;
  }
#if defined(SPARTA_AVX512)
  _mm512_mask_storeu_epi16(to, (1u << count) - 1u, (__m512i)v);
#else
  std::memcpy(to, &v, kHalfBytes * static_cast<size_t>(count));
#endif
}

// Up to as many real numbers, in the order of pairs.
SPARTA_INLINE RealParts load_parts(const float* from, int64_t count) {
  return in_parts(load_some(from, count), count > kLanes ? load_some(from + kLanes, count - kLanes) : Vec{});
}

// Calls f with what multiplies pairs on this processor, as a value.
template <class F>
SPARTA_INLINE auto with_pairs(F f) {
#if defined(SPARTA_AVX512)
  if (has_bf16()) return f(NativePairs{});
#endif
  return f(PlainPairs{});
}

// Real numbers become bf16, and bf16 real numbers.
template <class Unit>
SPARTA_NOINLINE void narrow_all(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i += kHalves) {
    store_short_some(to + i, narrowed<Unit>(load_parts(from + i, count - i)), count - i);
  }
}

SPARTA_NOINLINE inline void widen_all(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kHalves) {
    const int64_t left = count - i;
    const RealParts row = in_a_row(widened(load_short_some(from + i, left)));
    store_some(to + i, row.lower, left);
    if (left > kLanes) store_some(to + i + kLanes, row.upper, left - kLanes);
  }
}

// Pixels that are rounded by one thread at a time.
constexpr int64_t kRoundedTogether = 4096;

// Rounds the images of a call, unless they come in bf16.
inline void round_images(const Bf16ConvCall& call) {
  if (call.x_is_short) return;
  const int64_t all = call.conv.images * call.channels * call.conv.in_rows * call.conv.in_columns;
  const int64_t parts = ceil_div(all, kRoundedTogether);
  uint16_t* to = reinterpret_cast<uint16_t*>(const_cast<float*>(call.conv.x));
  parallel(call.conv.threads, [&](int64_t index, int64_t count) {
    const int64_t first = parts * index / count * kRoundedTogether;
    const int64_t last = std::min(parts * (index + 1) / count * kRoundedTogether, all);
    with_pairs([&](auto unit) { narrow_all<decltype(unit)>(call.image + first, last - first, to + first); });
  });
}

// Where results go and what is added to them, each at the first row and the first pixel, or null.
struct ShortEnds {
  uint16_t* y;
  float* real;
  const uint16_t* residual;
  const float* real_residual;
  int64_t plane;

  SPARTA_INLINE ShortEnds moved(int64_t by) const {
    return {y ? y + by : nullptr, real ? real + by : nullptr, residual ? residual + by : nullptr,
            real_residual ? real_residual + by : nullptr, plane};
  }
};

inline ShortEnds short_ends(const Bf16ConvCall& given, int64_t image) {
  const ConvCall& call = given.conv;
  const int64_t plane = call.out_rows * call.out_columns;
  const bool added = given.residual_is_short;
  const ShortEnds first{given.y_is_short ? reinterpret_cast<uint16_t*>(call.y) : nullptr,
                        given.y_is_short ? given.real : call.y,
                        added ? reinterpret_cast<const uint16_t*>(call.residual) : nullptr,
                        added ? nullptr : call.residual, plane};
  return first.moved(image * given.outputs * plane);
}

// Up to a vector of pixels, which were activated, leave: what is added comes to them first.
template <class Unit>
SPARTA_INLINE void put_short(RealParts parts, float last_floor, const ShortEnds& ends, int64_t at, int64_t count) {
  if (ends.residual) {
    const RealParts added = widened(load_short_some(ends.residual + at, count));
    parts.lower += added.lower;
    parts.upper += added.upper;
  } else if (ends.real_residual) {
    const RealParts added = load_parts(ends.real_residual + at, count);
    parts.lower += added.lower;
    parts.upper += added.upper;
  }
  const Vec floor = splat(last_floor);
  parts.lower = parts.lower < floor ? floor : parts.lower;  // NaN is not below and stays
  parts.upper = parts.upper < floor ? floor : parts.upper;
  if (ends.y) store_short_some(ends.y + at, narrowed<Unit>(parts), count);
  if (ends.real) {
    const RealParts row = in_a_row(parts);
    store_some(ends.real + at, row.lower, count);
    if (count > kLanes) store_some(ends.real + at + kLanes, row.upper, count - kLanes);
  }
}

// The largest value of every window of planes in bf16, each widened while it is near: rounding keeps the order of numbers.
inline bool max_pool_bf16(const PoolCall& call) {
  const int64_t size = call.rows * call.columns, out_size = call.out_rows * call.out_columns;
  bool enough_memory = true;
  parallel(call.threads, [&](int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    float* plane = scratch.get(size + out_size);
    if (!plane) {
#pragma omp atomic write
      enough_memory = false;
      return;
    }
    PoolCall one = call;
    one.x = plane;
    one.y = plane + size;
    one.planes = one.threads = 1;
    for (int64_t i = call.planes * index / count; i < call.planes * (index + 1) / count; ++i) {
      widen_all(reinterpret_cast<const uint16_t*>(call.x) + i * size, size, plane);
      const bool done = max_pool(one);
      uint16_t* y = reinterpret_cast<uint16_t*>(call.y) + i * out_size;
      with_pairs([&](auto unit) { narrow_all<decltype(unit)>(one.y, out_size, y); });
      if (!done) {
#pragma omp atomic write
        enough_memory = false;
      }
    }
  });
  return enough_memory;
}

}  // namespace sparta
