// y = activation(x W^T + bias) + residual for an unstructured weight of which little is live, and very few tokens.
//
// A lane owns an output and walks over a share of its live values: each comes with the distance to its input from the one
// before, in a byte or half of one, so a weight is read as little more than its live values. All of x waits in shared
// memory, which answers 32 lanes at once only if they look into different banks. So the first SPREAD inputs stand in one
// bank, the next ones in the next, and so on around; the lanes of a warp begin SPREAD inputs apart, and walk around as
// well. Outputs with about as many live values stand together, so that lanes end together. Shares are summed in a fixed
// order, so equal inputs give equal bits. What is pruned is not read at all.
//
// Compile-time numbers: TOKENS, ROWS, THREADS, DEPTH, NIBBLES, IS_HALF, ACTIVATION, FORMAT (0: 16 bits, 1: fp8 e4m3,
// 2: int8).

#define CLUSTER 1
#include "few_tokens.cuh"

constexpr int STEP = NIBBLES ? 16 : 8;            // live values that a lane takes at once
constexpr int PARTS = THREADS / ROWS;             // lanes that share an output
constexpr int PLANES = (TOKENS + 1) / 2;          // words of an input: one token as a float, or two as they are
constexpr u32 BANKS = 128;                        // bytes of all banks
constexpr int BESIDE = ROWS < 32 ? 32 / ROWS : 1; // lanes of a warp that share an output
static_assert(ROWS % 32 == 0 || (32 % ROWS == 0 && PARTS % BESIDE == 0), "warps hold whole outputs");

struct Call {
    const u16* x;
    const uint4* values;
    const uint2* distances; // with values and distances of 8 bits they stand in front of the values, and this is not read
    const int* index;       // (blocks + 1) first steps; (blocks, ROWS) outputs; (blocks, PARTS, ROWS) first places
#if FORMAT
    const float* scales;
#endif
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, blocks, settled;
};

// Live values and their distances.
struct Piece {
    u32 distances[2];
#if FORMAT && !NIBBLES
    u32 values[2];
#else
    u32 values[4];
#endif

    __device__ __forceinline__ void load(const Call& call, long long place) {
        const uint4 all = stream16(call.values + place);
#if FORMAT && !NIBBLES
        distances[0] = all.x, distances[1] = all.y, values[0] = all.z, values[1] = all.w;
#else
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                     : "=r"(distances[0]), "=r"(distances[1])
                     : "l"(call.distances + place));
        values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
#endif
    }

    __device__ __forceinline__ u32 distance(int number) const {
#if NIBBLES
        return distances[number / 8] >> (number % 8 * 4) & 0xf;
#else
        return distances[number / 4] >> (number % 4 * 8) & 0xff;
#endif
    }
};

// The inputs of all tokens in shared memory. Input k of them all stands at k times 128 bytes, around a ring that is 4
// bytes short of a whole number of rows, so that each time around ends in the next bank.
struct Inputs {
    unsigned char* memory;
    u32 rows, around; // inputs in a bank; bytes of the ring

    __device__ __forceinline__ void walk(u32& at, u32 distance) const {
        at += distance * BANKS;
        at = min(at, at - around); // what is not beyond the end becomes a very large number
    }

    // Adds one value times its input of all tokens.
    __device__ __forceinline__ void add(float (&sums)[TOKENS], float value, u32 at) const {
#if TOKENS == 1
        sums[0] = fmaf(value, *reinterpret_cast<const float*>(memory + at), sums[0]);
#else
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const u32 two = *reinterpret_cast<const u32*>(memory + plane * rows * BANKS + at);
            sums[2 * plane] = fmaf(value, to_float((u16)two), sums[2 * plane]);
            sums[2 * plane + 1] = fmaf(value, to_float((u16)(two >> 16)), sums[2 * plane + 1]);
        }
#endif
    }

    // Copies x; inputs and tokens beyond the last are 0. A lane writes to its own bank.
    __device__ __forceinline__ void fetch(const Call& call, int first_token) const {
        for (int piece = threadIdx.x; piece < 4 * (int)rows; piece += THREADS) {
            const int bank = piece % 32, row = piece / 32 * 8, input = bank * (int)rows + row;
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
                    unsigned char* to = memory + (plane * rows + row + i) * BANKS + bank * 4;
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
};

__device__ __forceinline__ void add_piece(float (&sums)[TOKENS], const Inputs& inputs, const Piece& piece, u32& at) {
#pragma unroll
    for (int pair = 0; pair < STEP / 2; ++pair) {
        const float2 value = two_values(piece.values, pair);
        inputs.walk(at, piece.distance(2 * pair));
        inputs.add(sums, value.x, at);
        inputs.walk(at, piece.distance(2 * pair + 1));
        inputs.add(sums, value.y, at);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gather(const Call call) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int slot = threadIdx.x % ROWS, part = threadIdx.x / ROWS, first_token = blockIdx.y * TOKENS;
    const int* outputs = call.index + call.blocks + 1;
    const int* firsts = outputs + call.blocks * ROWS;
    const int from = __ldg(call.index + blockIdx.x), steps = __ldg(call.index + blockIdx.x + 1) - from;
    const int share = part % BESIDE * (PARTS / BESIDE) + part / BESIDE; // lanes side by side walk far apart
    const int begin = steps * share / PARTS, end = steps * (share + 1) / PARTS;
    const u32 rows = 8 * (call.inputs / 256 + 1);
    const Inputs inputs = {shared, rows, rows * BANKS - 4};
    u32 at = __ldg(firsts + (blockIdx.x * PARTS + share) * ROWS + slot);
    long long place = ((long long)from + begin) * ROWS + slot;

    follow(); // where values are is older than the kernel before this one; values and x may not be
    Piece ring[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (begin + d < end) ring[d].load(call, place + d * ROWS);
    inputs.fetch(call, first_token);
    __syncthreads();

    float sums[TOKENS] = {};
    for (int step = begin; step < end; step += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (step + d < end) {
                const Piece piece = ring[d];
                if (step + d + DEPTH < end) ring[d].load(call, place + DEPTH * ROWS);
                place += ROWS;
                add_piece(sums, inputs, piece, at);
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
