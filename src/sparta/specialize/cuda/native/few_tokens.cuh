// What the kernels for few tokens share: the dtype, loads of what is read once, sums over blocks, and how results end.
//
// Compile-time numbers: IS_HALF, CLUSTER; of the kernels that have an epilogue, also ACTIVATION, TOKENS, SLABS; of
// weights in few bits, FORMAT and GROUPED, see few_bits.cuh.
#pragma once

#ifndef FORMAT
#define FORMAT 0
#endif
#ifndef GROUPED
#define GROUPED 0
#endif

typedef unsigned int u32;
typedef unsigned short u16;

#if IS_HALF
#define KINDS "f32.f16.f16.f32" // of a multiplication: sum, operands, sum
#else
#define KINDS "f32.bf16.bf16.f32"
#endif

__device__ __forceinline__ float to_float(u16 bits) {
#if IS_HALF
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return __uint_as_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ u16 to_bits(float value) {
    u16 bits;
#if IS_HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

#if FORMAT < 3
// Two values in a row of 16 or 8 bits: 2 pair and 2 pair + 1 of those that stand in `words`. The codes of int8 are the
// integers themselves here, and those of fp8 may be NaN.
__device__ __forceinline__ float2 two_values(const u32* words, int pair) {
#if FORMAT == 1
    u32 halves;
    const u32 word = words[pair / 2];
    if (pair % 2) // the instruction takes either half of a register
        asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(halves) : "r"(word));
    else
        asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(halves) : "r"(word));
    float2 value;
    asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;}"
        : "=f"(value.x), "=f"(value.y)
        : "r"(halves));
    return value;
#elif FORMAT == 2
    // The last byte of 2^23 takes the integer plus 128.
    const u32 shifted = words[pair / 2] ^ 0x80808080;
    const u32 low = __byte_perm(shifted, 0x4b000000, pair % 2 ? 0x7442 : 0x7440);
    const u32 high = __byte_perm(shifted, 0x4b000000, pair % 2 ? 0x7443 : 0x7441);
    return make_float2(__uint_as_float(low) - 8388736.f, __uint_as_float(high) - 8388736.f);
#else
    return make_float2(to_float((u16)words[pair]), to_float((u16)(words[pair] >> 16)));
#endif
}
#endif

// 16 bytes of a weight, which is read once and must not push x out of the L1 cache.
__device__ __forceinline__ uint4 stream16(const void* from) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

// Lets the kernel after this one begin to start. A kernel that is started in the ordinary way does nothing here, nor below.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the results of the kernel before are there; once they are, it costs nothing. What `call.settled` says is older
// than everything that may still run may be read without waiting.
__device__ __forceinline__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void follow() {
    let_next_begin();
    wait_for_last();
}

__device__ __forceinline__ void meet_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// What another block still reads must not go away.
__device__ __forceinline__ void leave_cluster() {
#if CLUSTER > 1
    meet_cluster();
#endif
}

// Partial sums in the shared memory of one block of the cluster, at an address of the own block's.
__device__ __forceinline__ float partial(u32 address, int rank) {
    float value;
#if CLUSTER > 1
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
#else
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
    return value;
}

__device__ __forceinline__ float2 partial_pair(u32 address, int rank) {
    float2 value;
#if CLUSTER > 1
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(there) : "memory");
#else
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
#endif
    return value;
}

#ifdef ACTIVATION
// 1 / (1 + 2^power): two instructions that give 4 results per cycle each are what an activation takes.
__device__ __forceinline__ float logistic(float power) {
    float whole, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(whole) : "f"(power));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + whole));
    return inverse;
}

// The activation of several values, for results of 16 bits, one step of all after another. GELU is value / (1 + 2^-l), where
// l, the binary logarithm of Phi / (1 - Phi), is value times a polynomial in its square. Its first factor is above 0, so
// that it needs no bounds: beyond those for which it is right, it only grows.
template <int COUNT>
__device__ __forceinline__ void finish_all(float (&values)[COUNT]) {
#if ACTIVATION == 1
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = values[i] < 0.f ? 0.f : values[i]; // keeps NaN
#elif ACTIVATION == 2
#if IS_HALF // right to 4e-6 of itself, or to 6e-8
    constexpr float GELU[] = {4.84855148e-9f,  -3.64983450e-7f, 1.10426617e-5f, -1.55515992e-4f,
                              -1.12950840e-4f, 0.104871727f,    2.30218829f};
#else // right to 9e-5 of itself, a twentieth of what rounding to bf16 changes, or to 1.4e-6
    constexpr float GELU[] = {2.19671138e-6f, -6.24397535e-5f, -5.62693442e-4f, 0.105785592f, 2.30163852f};
#endif
    float sums[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[i] = GELU[0];
#pragma unroll
    for (int f = 1; f < sizeof(GELU) / sizeof(float); ++f)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] = fmaf(sums[i], values[i] * values[i], GELU[f]);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] *= logistic(sums[i] * -values[i]);
#elif ACTIVATION == 3
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] *= logistic(values[i] * -1.44269504f);
#endif
}

__device__ __forceinline__ float finish(float value) {
    float values[1] = {value};
    finish_all(values);
    return values[0];
}

#ifdef SLABS
constexpr int WIDTH = TOKENS < 8 ? 8 : TOKENS; // the matrix unit multiplies 8 tokens at least

// Lays a warp's sums, as the matrix unit leaves them, into shared memory (TOKENS, PITCH) from row `first_row` on.
template <int PITCH>
__device__ __forceinline__ void lay_sums(float* partials, const float (&sums)[SLABS][WIDTH / 8][4], int first_row,
                                         int lane) {
#pragma unroll
    for (int s = 0; s < SLABS; ++s) {
        int row = first_row + s * 16 + lane / 4;
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n) {
            int token = n * 8 + lane % 4 * 2;
            if (TOKENS >= 8 || token < TOKENS) {
                partials[token * PITCH + row] = sums[s][n][0];
                partials[token * PITCH + row + 8] = sums[s][n][2];
            }
            if (TOKENS >= 8 || token + 1 < TOKENS) {
                partials[(token + 1) * PITCH + row] = sums[s][n][1];
                partials[(token + 1) * PITCH + row + 8] = sums[s][n][3];
            }
        }
    }
}

// Sums the PARTS parts of K of each block of the cluster, (PARTS, TOKENS, PITCH), in their order and writes the results.
// `scales` are those of the two outputs of this thread, where they were loaded before.
template <int PARTS, int ROWS, int PITCH, int THREADS, class Call>
__device__ __forceinline__ void write(const Call& call, u32 partials, int tile, int rank, int first_token,
                                      const float2* scales = nullptr) {
    constexpr int PAIRS = TOKENS * ROWS / 2;
    for (int pair = rank * THREADS + threadIdx.x; pair < PAIRS; pair += CLUSTER * THREADS) {
        int token = pair / (ROWS / 2), row = pair % (ROWS / 2) * 2;
        int m = first_token + token, n = tile * ROWS + row;
        if (m >= call.tokens || n >= call.outputs) continue;
        float2 total = make_float2(0.f, 0.f);
        for (int q = 0; q < CLUSTER; ++q) {
#pragma unroll
            for (int g = 0; g < PARTS; ++g) {
                float2 more = partial_pair(partials + ((g * TOKENS + token) * PITCH + row) * 4, q);
                total.x += more.x;
                total.y += more.y;
            }
        }
        long long place = (long long)m * call.outputs + n;
        bool both = n + 1 < call.outputs;
#if FORMAT && !GROUPED
        total.x *= scales ? scales->x : call.scales[n];
        if (both) total.y *= scales ? scales->y : call.scales[n + 1];
#endif
        if (call.bias) {
            total.x += to_float(call.bias[n]);
            if (both) total.y += to_float(call.bias[n + 1]);
        }
        total.x = finish(total.x);
        total.y = finish(total.y);
        if (call.residual) {
            total.x += to_float(call.residual[place]);
            if (both) total.y += to_float(call.residual[place + 1]);
        }
        if (both && call.outputs % 2 == 0) {
            *reinterpret_cast<u32*>(call.y + place) = to_bits(total.x) | (u32)to_bits(total.y) << 16;
        } else {
            call.y[place] = to_bits(total.x);
            if (both) call.y[place + 1] = to_bits(total.y);
        }
    }
}
#endif
#endif
