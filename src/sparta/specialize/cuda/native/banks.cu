// y = activation(x W^T + bias) + residual for an unstructured weight and very few tokens; no two lanes meet in a bank.
//
// x waits in shared memory, cut into 32 runs of neighbouring inputs, and each run stands in one bank. Lane b of every
// warp only ever looks into run b: it multiplies the live values of one output in that run, a strip, and 32 strips of
// about the same length, one of each run, make a task of a warp. Which outputs they belong to does not matter, so strips
// are sorted by length and hardly anything is added to make them equal. A position in a run is a byte: it is stored as it
// is where little is live, else as distances of half a byte, eight of which one multiplication adds up. What a block
// reads lies in one piece of memory and is asked for before the kernel ahead has ended; only the L2 cache is filled by
// that, so what that kernel still writes is seen. Sums of strips meet in shared memory and are added in a fixed order.
// See linear/cuda_banks_layout.py for the layout.
//
// Compile-time numbers: TOKENS, WARPS, TASKS, DEPTH, NIBBLES, CTAS, SEGMENTS, RUN, IS_HALF, ACTIVATION, FORMAT (0: 16
// bits, 1: fp8 e4m3, 2: int8).

#define CLUSTER 1
#include "few_tokens.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int ROWS = WARPS * TASKS;                     // outputs of a block
constexpr int STRIPS = ROWS * SEGMENTS;                 // of each run, in a block
constexpr int TURNS = TASKS * SEGMENTS;                 // tasks of a warp
constexpr int STEP = NIBBLES ? 8 : 4;                   // live values of a piece
constexpr int VALUE_WORDS = STEP / (FORMAT ? 4 : 2);
constexpr int PIECE = 32 * 4 * (1 + VALUE_WORDS);       // bytes: a word of positions and the values, for each lane
constexpr bool INTERLEAVED = FORMAT && !NIBBLES;        // positions and values of a lane side by side
constexpr int PLANES = (TOKENS + 1) / 2;                // words of an input: one token as a float, or two as they are
constexpr int BANKS = 128;                              // bytes of all banks
constexpr int PLANE = SEGMENTS * RUN * BANKS;           // bytes
constexpr int PITCH = 33;                               // of sums of strips: keeps those of a row in different banks
static_assert(TURNS <= 32, "a lane holds the end of a task");
constexpr int ADDERS = 8;                               // lanes that add up the strips of an output

struct Call {
    const u16* x;
    const unsigned char* pieces;
    const int* index;           // (blocks, WARPS, TURNS) first pieces and the end; (blocks, ROWS) outputs
    const unsigned char* owners; // (blocks, WARPS, TURNS, 32): the strip of a lane, output * SEGMENTS + segment
#if FORMAT
    const float* scales;
#endif
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, blocks;
};

// Live values of one lane and where their inputs are.
struct Piece {
    u32 positions, values[VALUE_WORDS];

    // `at` points to the lane's positions in a piece, `values_at` to its values.
    __device__ __forceinline__ void load(const unsigned char* at, const unsigned char* values_at) {
#if FORMAT && !NIBBLES
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                     : "=r"(positions), "=r"(values[0])
                     : "l"(at));
#else
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(positions) : "l"(at));
#if FORMAT == 0 && NIBBLES
        const uint4 all = stream16(values_at);
        values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
#else
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                     : "=r"(values[0]), "=r"(values[1])
                     : "l"(values_at));
#endif
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
        return make_float2(to_float((u16)values[pair]), to_float((u16)(values[pair] >> 16)));
#endif
    }
};

// Byte `which` of four, times the bytes of a row of banks, plus `base`.
__device__ __forceinline__ u32 address(u32 bytes, int which, u32 base) {
    u32 value;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(value) : "r"(bytes), "r"(BANKS << (8 * which)), "r"(base));
    return value;
}

// Where the inputs of a piece are. `last`: the position of the value before, in all four bytes; `base`: where position 0
// of this lane's run is.
__device__ __forceinline__ void locate(u32 (&places)[STEP], const Piece& piece, u32& last, u32 base) {
#if NIBBLES
    const u32 even = piece.positions & 0x0f0f0f0f, odd = piece.positions >> 4 & 0x0f0f0f0f;
    const u32 first = (even + odd) * 0x01010100 + (even + last), second = first + odd;
    last = __byte_perm(second, 0, 0x3333);
#pragma unroll
    for (int i = 0; i < STEP; ++i) places[i] = address(i % 2 ? second : first, i / 2, base);
#else
#pragma unroll
    for (int i = 0; i < STEP; ++i) places[i] = address(piece.positions, i, base);
#endif
}

// Adds the values of a piece times their inputs of all tokens; two sums for each token shorten the wait for the last one.
__device__ __forceinline__ void add_piece(float (&sums)[2][TOKENS], const Piece& piece, u32& last, u32 base) {
    u32 places[STEP], words[PLANES][STEP];
    locate(places, piece, last, base);
#pragma unroll
    for (int i = 0; i < STEP; ++i)
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane)
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[plane][i]) : "r"(places[i] + plane * PLANE));
#pragma unroll
    for (int i = 0; i < STEP; ++i) {
        const float2 both = piece.two(i / 2);
        const float value = i % 2 ? both.y : both.x;
#if TOKENS == 1
        sums[i % 2][0] = fmaf(value, __uint_as_float(words[0][i]), sums[i % 2][0]);
#else
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const u32 word = words[plane][i];
            sums[i % 2][2 * plane] = fmaf(value, to_float((u16)word), sums[i % 2][2 * plane]);
            sums[i % 2][2 * plane + 1] = fmaf(value, to_float((u16)(word >> 16)), sums[i % 2][2 * plane + 1]);
        }
#endif
    }
}

// Copies x; inputs and tokens beyond the last are 0. A lane writes to its own bank.
__device__ __forceinline__ void fetch(const Call& call, unsigned char* memory, int first_token) {
    for (int piece = threadIdx.x; piece < 4 * RUN * SEGMENTS; piece += THREADS) {
        const int bank = piece % 32, row = piece / 32 * 8;
        const int input = (row / RUN * 32 + bank) * RUN + row % RUN;
        u32 words[2 * PLANES][4] = {};
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
            if (first_token + t < call.tokens && input < call.inputs) {
                const uint4 x = *reinterpret_cast<const uint4*>(call.x + (first_token + t) * call.x_stride + input);
                words[t][0] = x.x, words[t][1] = x.y, words[t][2] = x.z, words[t][3] = x.w;
            }
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                unsigned char* to = memory + plane * PLANE + (row + i) * BANKS + bank * 4;
                const u32 one = words[2 * plane][i / 2] >> (i % 2 * 16) & 0xffff;
#if TOKENS == 1
                *reinterpret_cast<float*>(to) = to_float((u16)one);
#else
                const u32 two = words[2 * plane + 1][i / 2] >> (i % 2 * 16) & 0xffff;
                *reinterpret_cast<u32*>(to) = one | two << 16;
#endif
            }
    }
}

// Adds up the strips of each output, 8 lanes for one of them, and writes the results.
__device__ __forceinline__ void write(const Call& call, const float* partials, int first_token) {
    const int* outputs = call.index + call.blocks * (WARPS * TURNS) + 1 + blockIdx.x * ROWS;
    const int part = threadIdx.x % ADDERS;
    for (int i = threadIdx.x / ADDERS; i < (TOKENS * ROWS + 3) / 4 * 4; i += THREADS / ADDERS) {
        const int t = i / ROWS, row = i % ROWS;
        float total = 0.f;
        if (t < TOKENS) {
#pragma unroll
            for (int strip = 0; strip < SEGMENTS * 32 / ADDERS; ++strip) {
                const int segment = strip / (32 / ADDERS), run = part * (32 / ADDERS) + strip % (32 / ADDERS);
                total += partials[(t * STRIPS + row * SEGMENTS + segment) * PITCH + run];
            }
        }
#pragma unroll
        for (int far = ADDERS / 2; far; far /= 2) total += __shfl_xor_sync(0xffffffff, total, far);
        if (t >= TOKENS || part) continue;
        const int token = first_token + t, output = __ldg(outputs + row);
        if (token >= call.tokens || output < 0) continue;
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

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) banks(const Call call) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_token = blockIdx.y * TOKENS;
    const int turn = (blockIdx.x * WARPS + warp) * TURNS;
    const int* ends = call.index + turn + 1;
    const unsigned char* owners = call.owners + turn * 32 + lane;
    const int from = __ldg(ends - 1), count = __ldg(ends + TURNS - 1) - from;
    const unsigned char* next = call.pieces + (long long)from * PIECE;
#if __CUDA_ARCH__ >= 900
    if (lane == 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(next), "r"(count * PIECE) : "memory");
#endif
    const int mine = lane < TURNS ? __ldg(ends + lane) - from : 0; // where task `lane` ends
    int end = __shfl_sync(0xffffffff, mine, 0), number = 0;
    int owner = __ldg(owners), owner_next = TURNS > 1 ? __ldg(owners + 32) : 0;

    const unsigned char* at = next + lane * (INTERLEAVED ? 8 : 4); // and the values in `values_at`
    const unsigned char* values_at = next + 128 + lane * (4 * VALUE_WORDS);

    follow(); // where values are is older than the kernel before this one; values and x may not be
    Piece ring[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (d < count) ring[d].load(at + d * PIECE, values_at + d * PIECE);
    fetch(call, shared, first_token);
    __syncthreads();

    u32 run = (u32)__cvta_generic_to_shared(shared) + lane * 4;
    asm volatile("" : "+r"(run)::"memory"); // no look into x before it is there
    float* partials = reinterpret_cast<float*>(shared + PLANES * PLANE) + lane;
    float sums[2][TOKENS] = {};
    u32 last = 0, base = run + owner % SEGMENTS * (RUN * BANKS);
    for (int first = 0; first < count; first += DEPTH) {
        at += DEPTH * PIECE, values_at += DEPTH * PIECE;
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (first + d >= count) break;
            const Piece piece = ring[d];
            if (first + d + DEPTH < count) ring[d].load(at + d * PIECE, values_at + d * PIECE);
            add_piece(sums, piece, last, base);
            if (first + d + 1 == end) { // the end of a task
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) {
                    partials[(t * STRIPS + owner) * PITCH] = sums[0][t] + sums[1][t];
                    sums[0][t] = sums[1][t] = 0.f;
                }
                end = __shfl_sync(0xffffffff, mine, ++number & 31), owner = owner_next;
                if (number + 1 < TURNS) owner_next = __ldg(owners + (number + 1) * 32);
                last = 0, base = run + owner % SEGMENTS * (RUN * BANKS);
            }
        }
    }
    __syncthreads();
    write(call, partials - lane, first_token);
}
