// What the kernels for 2:4 weights share: how a lane finds its part of the packed weight (see cuda_24_layout.py), and how
// it is multiplied.
//
// Compile-time numbers: those of few_tokens.cuh and few_bits.cuh.
#pragma once

constexpr int CHUNK = 128;                   // input channels of a chunk: four multiplications of 32
constexpr int VECTORS = 4 * VALUE_BITS / 16; // 16-byte pieces of a lane's values in a chunk

template <int SELECTOR>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4& a, const u32 (&b)[4], u32 selectors) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." KINDS
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(selectors),
          "n"(SELECTOR));
}

__device__ __forceinline__ uint2 stream8(const uint2* from) {
    uint2 value;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
    return value;
}

// What one stage holds of one slab, as it was stored.
struct Piece {
    uint4 values[VECTORS];
    uint2 selectors;
#if GROUPED
    float2 scales; // of outputs lane / 4 and lane / 4 + 8
#endif
};

// A lane's way through one slab.
struct Slab {
    const uint4* values;
    const uint2* selectors;
#if GROUPED
    const float* scales;
#endif

    __device__ __forceinline__ void load(Piece& piece, int chunk) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) piece.values[v] = stream16(values + chunk * (VECTORS * 32) + v * 32);
        piece.selectors = stream8(selectors + chunk * 32);
#if GROUPED
        piece.scales = make_float2(__ldg(scales + chunk * 16), __ldg(scales + chunk * 16 + 8));
#endif
    }
};

// The values of multiplication `j` of four, as the matrix unit takes them.
template <int j>
__device__ __forceinline__ uint4 operand(const Piece& piece) {
#if VALUE_BITS == 16
    return piece.values[j];
#elif VALUE_BITS == 8
    const uint4& both = piece.values[j / 2];
    const u32 first = j % 2 ? both.z : both.x, second = j % 2 ? both.w : both.y;
    return make_uint4(widen(first), widen(first << 8), widen(second), widen(second << 8));
#else
    const uint4& all = piece.values[0];
    const u32 word = j == 0 ? all.x : j == 1 ? all.y : j == 2 ? all.z : all.w;
    return make_uint4(widen(word), widen(word >> 4), widen(word >> 8), widen(word >> 12));
#endif
}

// Multiplies 32 inputs; `at` gives the address of the 16 bytes of x that this lane names for multiplication j of 8 tokens.
template <int j, class At>
__device__ __forceinline__ void multiply_part(float (&sums)[SLABS][WIDTH / 8][4], const Piece (&pieces)[SLABS], At at) {
    uint4 a[SLABS];
#pragma unroll
    for (int s = 0; s < SLABS; ++s) a[s] = operand<j>(pieces[s]);
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n) {
        u32 b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(at(n, j))
                     : "memory");
#pragma unroll
        for (int s = 0; s < SLABS; ++s)
            multiply<j % 2>(sums[s][n], a[s], b, j < 2 ? pieces[s].selectors.x : pieces[s].selectors.y);
    }
}

// Multiplies one chunk; where groups of inputs have scales of their own, its sums are scaled before they are added.
template <class At>
__device__ __forceinline__ void multiply_chunk(float (&sums)[SLABS][WIDTH / 8][4], const Piece (&pieces)[SLABS], At at) {
#if GROUPED
    float part[SLABS][WIDTH / 8][4] = {};
#else
    float(&part)[SLABS][WIDTH / 8][4] = sums;
#endif
    multiply_part<0>(part, pieces, at);
    multiply_part<1>(part, pieces, at);
    multiply_part<2>(part, pieces, at);
    multiply_part<3>(part, pieces, at);
#if GROUPED
#pragma unroll
    for (int s = 0; s < SLABS; ++s)
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[s][n][i] = fmaf(part[s][n][i], i < 2 ? pieces[s].scales.x : pieces[s].scales.y, sums[s][n][i]);
#endif
}
