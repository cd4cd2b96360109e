// Products of four bytes a lane with four bytes that are the same in all lanes, exact in every build: one instruction
// where the processor has VNNI (AVX-512 or AVX-VNNI), three or four elsewhere. A unit says whether the bytes of x are
// stored with or without a sign, and how x and a weight are prepared before they are multiplied many times; weights that
// differ from lane to lane come as a vector.
#pragma once

#include "bytes.h"

// Assemblers that are older than these compilers may not know the instruction.
#if defined(SPARTA_AVX2) && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 12)
#define SPARTA_AVX_VNNI
#include <cpuid.h>
#endif

namespace sparta {

inline bool has_vnni() {
#if defined(SPARTA_AVX512)
  static const bool found = __builtin_cpu_supports("avx512vnni");
  return found;
#elif defined(SPARTA_AVX_VNNI)
  static const bool found = [] {  // AVX-VNNI, which not every compiler's list of features has
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
  }();
  return found;
#else
  return false;
#endif
}

// Signed bytes without VNNI: even and odd bytes are widened to pairs of 16 bits, which one instruction multiplies and
// adds. Takes every weight.
struct SignedUnit {
#if defined(SPARTA_AVX512)
  struct Inputs { __m512i even, odd; };
  static SPARTA_INLINE Inputs split(IntVec v) {
    const __m512i x = (__m512i)v;
    return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
  }
  using Weight = Inputs;
  static SPARTA_INLINE Weight spread(const int32_t* weight) { return split((IntVec)_mm512_set1_epi32(*weight)); }
  static SPARTA_INLINE Weight weights(IntVec v) { return split(v); }
  static SPARTA_INLINE void add(IntVec& sum, const Inputs& x, const Weight& w) {
    sum += (IntVec)_mm512_madd_epi16(x.even, w.even) + (IntVec)_mm512_madd_epi16(x.odd, w.odd);
  }
#elif defined(SPARTA_AVX2)
  struct Inputs { __m256i even, odd; };
  static SPARTA_INLINE Inputs split(IntVec v) {
    const __m256i x = (__m256i)v;
    return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
  }
  using Weight = Inputs;
  static SPARTA_INLINE Weight spread(const int32_t* weight) { return split((IntVec)_mm256_set1_epi32(*weight)); }
  static SPARTA_INLINE Weight weights(IntVec v) { return split(v); }
  static SPARTA_INLINE void add(IntVec& sum, const Inputs& x, const Weight& w) {
    sum += (IntVec)_mm256_madd_epi16(x.even, w.even) + (IntVec)_mm256_madd_epi16(x.odd, w.odd);
  }
#else
  struct Inputs { IntVec bytes[4]; };
  static SPARTA_INLINE Inputs split(IntVec v) {
    typedef uint32_t Bits __attribute__((vector_size(sizeof(IntVec))));  // shifting a sign out is not defined
    const Bits x = (Bits)v;
    return {{(IntVec)(x << 24) >> 24, (IntVec)(x << 16) >> 24, (IntVec)(x << 8) >> 24, v >> 24}};
  }
  struct Weight { int32_t bytes[4]; };
  static SPARTA_INLINE Weight spread(const int32_t* weight) {
    int8_t w[4];
    std::memcpy(w, weight, sizeof w);
    return {{w[0], w[1], w[2], w[3]}};
  }
  static SPARTA_INLINE Inputs weights(IntVec v) { return split(v); }
  template <class W>
  static SPARTA_INLINE void add(IntVec& sum, const Inputs& x, const W& w) {
    for (int i = 0; i < 4; ++i) sum += x.bytes[i] * w.bytes[i];
  }
#endif
};

#if defined(SPARTA_AVX2)
// Signed bytes by |x| times the weight with the sign of x. Two products are added in 16 bits, which hold 2 * 128 * 127:
// it is exact for every x as long as no weight is -128.
struct AbsoluteUnit {
  struct Inputs { __m256i signs, absolute; };
  using Weight = __m256i;
  static SPARTA_INLINE Inputs split(IntVec v) { return {(__m256i)v, _mm256_abs_epi8((__m256i)v)}; }
  static SPARTA_INLINE Weight spread(const int32_t* weight) { return _mm256_set1_epi32(*weight); }
  static SPARTA_INLINE Weight weights(IntVec v) { return (__m256i)v; }
  static SPARTA_INLINE void add(IntVec& sum, const Inputs& x, const Weight& w) {
    const __m256i pairs = _mm256_maddubs_epi16(x.absolute, _mm256_sign_epi8(w, x.signs));
    sum += (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
};
#endif

#if defined(SPARTA_AVX512) || defined(SPARTA_AVX_VNNI)
// Unsigned bytes. Written as assembly: compilers copy and spill accumulators around the intrinsic, and this needs no
// flag of its own. The weight is broadcast to a register first: as an operand in memory every instruction would load it
// again.
struct VnniUnit {
  using Inputs = IntVec;
  using Weight = IntVec;
  static SPARTA_INLINE Inputs split(IntVec v) { return v; }
  static SPARTA_INLINE Weight spread(const int32_t* weight) {
#if defined(SPARTA_AVX512)
    return (IntVec)_mm512_set1_epi32(*weight);
#else
    return (IntVec)_mm256_set1_epi32(*weight);
#endif
  }
  static SPARTA_INLINE Weight weights(IntVec v) { return v; }
  static SPARTA_INLINE void add(IntVec& sum, const Inputs& x, const Weight& weight) {
    IntVec result = sum;  // a value of its own, or compilers keep the sums in memory
#if defined(SPARTA_AVX512)
    asm("vpdpbusd %2, %1, %0" : "+v"(result) : "v"(x), "v"(weight));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(result) : "x"(x), "x"(weight));
#endif
    sum = result;
  }
};
#endif

}  // namespace sparta
