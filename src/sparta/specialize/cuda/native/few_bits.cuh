// Weights in few bits: how pairs of them become operands of the matrix unit.
//
// Compile-time numbers: IS_HALF; FORMAT (0: 16 bits, 1: fp8 e4m3, 2: int8 as sign and magnitude, 3: int4 plus 8);
// GROUPED (1: scales of groups of inputs, 0: one for each output). Packing lays values out such that a pair stands in the
// upper bytes (8 bits) or the lowest nibbles (4 bits) of both halves of a word.
#pragma once

#if FORMAT == 0
#define VALUE_BITS 16
#elif FORMAT == 3
#define VALUE_BITS 4
#else
#define VALUE_BITS 8
#endif

#if IS_HALF
#define PAIR "f16x2"
#else
#define PAIR "bf16x2"
#endif

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 value;
    asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(value) : "r"(a), "r"(b), "r"(c));
    return value;
}

#if VALUE_BITS == 8
// Exponent and significand are moved to their places and the sign stays; a power of two then mends the bias of the
// exponent, also of numbers so small that they have none. Integers are such numbers; the rest of their power of two is in
// the scales. No NaN comes out of this: an output with one has it as its scale.
__device__ __forceinline__ u32 widen(u32 word) {
#if FORMAT == 1 && IS_HALF
    return multiply_add((word & 0x80008000) | ((word >> 1) & 0x3f803f80), 0x5c005c00, 0x80008000); // 2^8
#elif FORMAT == 1
    return multiply_add((word & 0x80008000) | ((word >> 4) & 0x07f007f0), 0x7b807b80, 0x80008000); // 2^120
#elif IS_HALF
    return multiply_add((word & 0x80008000) | ((word >> 8) & 0x007f007f), 0x78007800, 0x80008000); // 2^15 of 2^24
#else
    return multiply_add((word & 0x80008000) | ((word >> 8) & 0x007f007f), 0x7b807b80, 0x80008000); // 2^120 of 2^133
#endif
}
#elif VALUE_BITS == 4
// A number whose last digit counts 1 takes the nibble as its last digits; then what it was before is taken off, and 8.
__device__ __forceinline__ u32 widen(u32 word) {
#if IS_HALF
    return multiply_add((word & 0x000f000f) | 0x64006400, 0x3c003c00, 0xe408e408);
#else
    return multiply_add((word & 0x000f000f) | 0x43004300, 0x3f803f80, 0xc308c308);
#endif
}
#endif
