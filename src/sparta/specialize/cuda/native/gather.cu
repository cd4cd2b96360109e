// y = activation(x W^T + bias) + residual for an unstructured weight of which little is live, and very few tokens.
//
// A lane owns an output and walks over a share of its live values: each comes with the distance to its input from the one
// before, in one byte, so a weight is read as little more than its live values. All of x waits in shared memory, the
// tokens of an input side by side. Outputs with about as many live values stand together, so that lanes end together.
// Shares are summed in a fixed order, so equal inputs give equal bits. What is pruned is not read at all.
//
// Compile-time numbers: TOKENS, ROWS, THREADS, DEPTH, IS_HALF, ACTIVATION, FORMAT (0: 16 bits, 1: fp8 e4m3, 2: int8).

#define CLUSTER 1
#include "few_tokens.cuh"

constexpr int STEP = 8;                 // live values that a lane takes at once
constexpr int PARTS = THREADS / ROWS;   // lanes that share an output
constexpr u32 STRIDE = TOKENS * 2;      // bytes of an input in shared memory

struct Call {
    const u16* x;
    const uint4* values;
    const uint2* distances; // with values of 8 bits they stand in front of them, and this is not read
    const int* index;       // (blocks + 1) first steps; (blocks, ROWS) outputs; (blocks, PARTS, ROWS) first inputs
#if FORMAT
    const float* scales;
#endif
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, blocks;
};

// Eight live values and their distances.
struct Piece {
    u32 distances[2];
#if FORMAT
    u32 values[2];
#else
    uint4 values;
#endif

    __device__ __forceinline__ void load(const Call& call, long long place) {
#if FORMAT
        uint4 all = stream16(call.values + place);
        distances[0] = all.x, distances[1] = all.y, values[0] = all.z, values[1] = all.w;
#else
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                     : "=r"(distances[0]), "=r"(distances[1])
                     : "l"(call.distances + place));
        values = stream16(call.values + place);
#endif
    }

    // Values 2 pair and 2 pair + 1.
    __device__ __forceinline__ float2 two(int pair) const {
#if FORMAT == 1
        u32 halves;
        const u16 codes = (u16)(values[pair / 2] >> (pair % 2 * 16));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
        float2 value;
        asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;}"
            : "=f"(value.x), "=f"(value.y)
            : "r"(halves));
        return value;
#elif FORMAT == 2
        // The last byte of 2^23 takes the integer plus 128.
        const u32 shifted = values[pair / 2] ^ 0x80808080;
        const u32 low = __byte_perm(shifted, 0x4b000000, pair % 2 ? 0x7442 : 0x7440);
        const u32 high = __byte_perm(shifted, 0x4b000000, pair % 2 ? 0x7443 : 0x7441);
        return make_float2(__uint_as_float(low) - 8388736.f, __uint_as_float(high) - 8388736.f);
#else
        const u32 word = pair == 0 ? values.x : pair == 1 ? values.y : pair == 2 ? values.z : values.w;
        return make_float2(to_float((u16)word), to_float((u16)(word >> 16)));
#endif
    }
};

// Adds one value times its input of all tokens.
__device__ __forceinline__ void add(float (&sums)[TOKENS], float value, u32 at) {
#if TOKENS == 1
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
    sums[0] = fmaf(value, to_float(x), sums[0]);
#else
    u32 x[TOKENS / 2];
#if TOKENS == 2
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x[0]) : "r"(at) : "memory");
#elif TOKENS == 4
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
#else
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
#endif
#pragma unroll
    for (int t = 0; t < TOKENS / 2; ++t) {
        sums[2 * t] = fmaf(value, to_float((u16)x[t]), sums[2 * t]);
        sums[2 * t + 1] = fmaf(value, to_float((u16)(x[t] >> 16)), sums[2 * t + 1]);
    }
#endif
}

__device__ __forceinline__ void add_piece(float (&sums)[TOKENS], const Piece& piece, u32& at) {
#pragma unroll
    for (int pair = 0; pair < STEP / 2; ++pair) {
        const float2 value = piece.two(pair);
        const u32 word = piece.distances[pair / 2] >> (pair % 2 * 16);
        at += (word & 0xff) * STRIDE;
        add(sums, value.x, at);
        at += (word >> 8 & 0xff) * STRIDE;
        add(sums, value.y, at);
    }
}

// Copies x to shared memory, (inputs, TOKENS); tokens beyond the last are 0.
__device__ __forceinline__ void fetch(const Call& call, u16* shared, int first_token) {
    for (int piece = threadIdx.x; piece < call.inputs / 8; piece += THREADS) {
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (first_token + t < call.tokens)
                x = *reinterpret_cast<const uint4*>(call.x + (first_token + t) * call.x_stride + piece * 8);
#if TOKENS == 1
            reinterpret_cast<uint4*>(shared)[piece] = x;
#else
            const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) shared[(piece * 8 + i) * TOKENS + t] = (u16)(words[i / 2] >> (i % 2 * 16));
#endif
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gather(const Call call) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int slot = threadIdx.x % ROWS, part = threadIdx.x / ROWS, first_token = blockIdx.y * TOKENS;
    const int* outputs = call.index + call.blocks + 1;
    const int* firsts = outputs + call.blocks * ROWS;
    const int from = __ldg(call.index + blockIdx.x), steps = __ldg(call.index + blockIdx.x + 1) - from;
    const int begin = steps * part / PARTS, end = steps * (part + 1) / PARTS;
    u32 at = (u32)__cvta_generic_to_shared(shared) + __ldg(firsts + (blockIdx.x * PARTS + part) * ROWS + slot) * STRIDE;
    long long place = ((long long)from + begin) * ROWS + slot;

    follow(); // where values are is older than the kernel before this one; values and x may not be
    Piece ring[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (begin + d < end) ring[d].load(call, place + d * ROWS);
    fetch(call, reinterpret_cast<u16*>(shared), first_token);
    __syncthreads();

    float sums[TOKENS] = {};
    for (int step = begin; step < end; step += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (step + d < end) {
                const Piece piece = ring[d];
                if (step + d + DEPTH < end) ring[d].load(call, place + DEPTH * ROWS);
                place += ROWS;
                add_piece(sums, piece, at);
            }
        }
    }

    // x is not needed any more: its memory takes the partial sums, (PARTS, TOKENS, ROWS).
    __syncthreads();
    float* partials = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) partials[(part * TOKENS + t) * ROWS + slot] = sums[t];
    __syncthreads();
    for (int i = threadIdx.x; i < TOKENS * ROWS; i += THREADS) {
        const int token = first_token + i / ROWS, output = __ldg(outputs + blockIdx.x * ROWS + i % ROWS);
        if (token >= call.tokens || output < 0) continue;
        float total = 0.f;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) total += partials[p * TOKENS * ROWS + i];
#if FORMAT
        total *= call.scales[output];
#endif
        if (call.bias) total += to_float(call.bias[output]);
        total = finish(total);
        const long long here = (long long)token * call.outputs + output;
        if (call.residual) total += to_float(call.residual[here]);
        call.y[here] = to_bits(total);
    }
}
