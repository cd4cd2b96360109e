// A vector of floats, the same in every build. The compiler's own vector types give arithmetic, comparison and
// selection for AVX-512, AVX2 and plain SSE/NEON from one source; only the number of lanes differs. Note
// that `a * b + c` is one fused instruction where the machine has it (-ffp-contract=fast); nothing else is relaxed.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(SPARTA_AVX512) || defined(SPARTA_AVX2)
#include <immintrin.h>
#endif

#define SPARTA_INLINE inline __attribute__((always_inline))
#define SPARTA_NOINLINE __attribute__((noinline))

namespace sparta {

#if defined(SPARTA_AVX512)
constexpr int kLanes = 16;
#elif defined(SPARTA_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Calls f with 0, 1, ... as types: numbers that the compiler knows from the start, without which it would keep the sums
// in memory.
template <int... I, class F>
SPARTA_INLINE void each_of(std::integer_sequence<int, I...>, F f) {
  (f(std::integral_constant<int, I>()), ...);
}

template <int Count, class F>
SPARTA_INLINE void each(F f) {
  each_of(std::make_integer_sequence<int, Count>(), f);
}

#define SPARTA_LAMBDA __attribute__((always_inline))

template <int Lanes>
struct Vector {
  typedef float floats __attribute__((vector_size(4 * Lanes)));
  typedef int32_t ints __attribute__((vector_size(4 * Lanes)));
};

using Vec = Vector<kLanes>::floats;
using IntVec = Vector<kLanes>::ints;

template <class V = Vec>
SPARTA_INLINE V load(const float* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
SPARTA_INLINE void store(float* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

// The first `count` lanes, the others 0: for ragged edges, where a whole load would leave the array.
SPARTA_INLINE Vec load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
#if defined(SPARTA_AVX512)
  return (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), from);
#else
  Vec v = {};
  std::memcpy(&v, from, sizeof(float) * static_cast<size_t>(count));
  return v;
#endif
}

SPARTA_INLINE void store_some(float* to, Vec v, int64_t count) {
  if (count >= kLanes) {
    store(to, v);
    return;
  }
#if defined(SPARTA_AVX512)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1u), (__m512)v);
#else
  std::memcpy(to, &v, sizeof(float) * static_cast<size_t>(count));
#endif
}

// Subtracting +0 keeps every value as it is, -0 included; compilers turn this into one broadcast.
template <class V = Vec>
SPARTA_INLINE V splat(float value) {
  return value - V{};
}

#if defined(__clang__) || __GNUC__ >= 12
#define SPARTA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SPARTA_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// Four floats, repeated over all lanes: one load for four weights, which pick() then spreads.
SPARTA_INLINE Vec load_four(const float* from) {
#if defined(SPARTA_AVX512)
  return (Vec)_mm512_broadcast_f32x4(_mm_loadu_ps(from));
#elif defined(SPARTA_AVX2)
  return (Vec)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
#else
  return load(from);
#endif
}

template <int Which, int... Lane>
SPARTA_INLINE Vec pick_lane(Vec four, std::integer_sequence<int, Lane...>) {
  return SPARTA_SHUFFLE(four, four, ((Lane & ~3) + Which)...);
}

// One of the four that load_four() has loaded, in all lanes; `which` is known where loops are unrolled.
SPARTA_INLINE Vec pick(Vec four, int which) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
  switch (which) {
    case 0: return pick_lane<0>(four, kAll);
    case 1: return pick_lane<1>(four, kAll);
    case 2: return pick_lane<2>(four, kAll);
    default: return pick_lane<3>(four, kAll);
  }
}

// One number of all lanes: halves are put together until one lane is left, so few steps wait for the one before.
template <int Span, class F, int... Lane>
SPARTA_INLINE Vec folded(Vec v, F f, std::integer_sequence<int, Lane...> lanes) {
  if constexpr (Span == 0) {
    return v;
  } else {
    return folded<Span / 2>(f(v, SPARTA_SHUFFLE(v, v, (Lane ^ Span)...)), f, lanes);
  }
}

SPARTA_INLINE float sum_of_lanes(Vec v) {
  const auto sum = [](Vec a, Vec b) SPARTA_LAMBDA { return a + b; };
  return folded<kLanes / 2>(v, sum, std::make_integer_sequence<int, kLanes>())[0];
}

// The larger of two numbers in each lane; the second where one is NaN.
SPARTA_INLINE Vec larger(Vec a, Vec b) {
#if defined(SPARTA_AVX512)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// The largest number, which no lane that is NaN must be.
SPARTA_INLINE float greatest_lane(Vec v) {
  const auto most = [](Vec a, Vec b) SPARTA_LAMBDA { return larger(a, b); };
  return folded<kLanes / 2>(v, most, std::make_integer_sequence<int, kLanes>())[0];
}

#if defined(SPARTA_AVX512) || defined(SPARTA_AVX2)
SPARTA_INLINE float sum_of(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Eight numbers of 8 bits as floats.
SPARTA_INLINE __m256 eight_bytes(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
#endif

// e^x to 2 ulp; 0 and inf beyond the range of float, NaN for NaN.
SPARTA_INLINE Vec exp(Vec x) {
  const Vec kTooLarge = splat(88.8f), kTooSmall = splat(-104.0f);
#if defined(SPARTA_AVX512)
  // NaN is returned where it is the second of the two.
  const Vec clamped = (Vec)_mm512_max_ps((__m512)kTooSmall, _mm512_min_ps((__m512)kTooLarge, (__m512)x));
#else
  const Vec clamped = x > kTooLarge ? kTooLarge : (x < kTooSmall ? kTooSmall : x);
#endif
  const Vec kRound = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
  const Vec shifted = clamped * splat(1.44269504f) + kRound;
  const Vec whole = shifted - kRound;
  // log2(e) in two parts, so that the fraction keeps all its bits.
  Vec fraction = clamped * splat(1.44269504f) - whole;
  fraction = clamped * splat(1.92596299e-8f) + fraction;
  Vec power = splat(0.00015337577f);
  power = power * fraction + splat(0.001339986f);
  power = power * fraction + splat(0.00961852f);
  power = power * fraction + splat(0.05550329f);
  power = power * fraction + splat(0.24022646f);
  power = power * fraction + splat(0.6931472f);
  power = power * fraction + splat(1.0f);
#if defined(SPARTA_AVX512)
  return (Vec)_mm512_scalef_ps((__m512)power, (__m512)whole);
#else
  // Two factors 2^(n/2), because 2^n itself may be a denormal number.
  const IntVec exponent = (IntVec)shifted - (IntVec)kRound;
  const IntVec half = exponent >> 1;
  const Vec first = (Vec)((half + 127) << 23);
  const Vec second = (Vec)((exponent - half + 127) << 23);
  return power * first * second;
#endif
}

// Exchanges the off-diagonal halves of every 2*Span x 2*Span square that rows `a` and `b`, Span apart, run through.
template <int Span, int... Lane>
SPARTA_INLINE void exchange(Vec& a, Vec& b, std::integer_sequence<int, Lane...>) {
  const Vec upper = SPARTA_SHUFFLE(a, b, ((Lane & Span) ? kLanes + Lane - Span : Lane)...);
  const Vec lower = SPARTA_SHUFFLE(a, b, ((Lane & Span) ? kLanes + Lane : Lane + Span)...);
  a = upper;
  b = lower;
}

template <int Span>
SPARTA_INLINE void exchange_all(Vec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & Span)) exchange<Span>(rows[i], rows[i + Span], std::make_integer_sequence<int, kLanes>());
  }
}

// Transposes a square of kLanes rows in registers, in log2(kLanes) rounds.
SPARTA_INLINE void transpose(Vec (&rows)[kLanes]) {
  if constexpr (kLanes >= 16) exchange_all<8>(rows);
  if constexpr (kLanes >= 8) exchange_all<4>(rows);
  exchange_all<2>(rows);
  exchange_all<1>(rows);
}

}  // namespace sparta
