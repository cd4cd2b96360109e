// y = activation(x W^T * scales + bias) + residual for a weight of kept blocks and few tokens: the weight is read once,
// from memory into registers.
//
// A block of threads has the ROWS outputs of one block row; its warps share the kept blocks of that row. As each lane may
// have any input channels of the matrix unit's, as long as it has the same of both operands, it takes 16 bytes in a row of
// the weight and what belongs to them of x: both lie in memory as they are. Before it waits for the kernel ahead, which may
// make x, it has the weight come as far as the L2 cache. Parts of K are summed in a fixed order, so equal inputs give equal
// bits.
//
// Compile-time numbers: TOKENS, SLABS, WARPS, STAGES, IS_HALF, ACTIVATION; FORMAT, see few_bits.cuh.

#define CLUSTER 1
#include "few_tokens.cuh"
#include "few_bits.cuh"
#include "bulk.cuh"

constexpr int ROWS = SLABS * 16;             // outputs of a block row
constexpr int PITCH = ROWS + 4;              // keeps the partial sums of a warp in different banks
constexpr int THREADS = WARPS * 32;
constexpr int HELD = 128 / VALUE_BITS;       // input channels of a lane in a kept block
constexpr int X_PIECES = HELD / 8;           // of 16 bytes
constexpr int BYTES = ROWS * 64;             // of a kept block
constexpr int WRITTEN = (TOKENS * ROWS / 2 + THREADS - 1) / THREADS; // pairs of results of a thread

struct Call {
    const u16* x;
    const unsigned char* values; // kept blocks, one after the other, rows of 64 bytes
    const int* columns;          // of kept blocks: their first input
    const int4* schedule;        // of block rows: their number, first block, end of blocks, first column
#if FORMAT
    const float* scales; // of outputs
#endif
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, chunks;
    int settled; // whether the weight is older than the kernels before this one
};

// What a lane has of a kept block: two rows of each slab, and tokens.
struct Piece {
    uint4 weight[SLABS][2];
    uint4 x[WIDTH / 8][X_PIECES];
};

// 16 bytes that the kernel before may have written: past the L1 cache.
__device__ __forceinline__ uint4 recent16(const void* from) {
    uint4 value;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from));
    return value;
}

__device__ __forceinline__ void load_weight(const Call& call, Piece& piece, int block, int lane) {
    const unsigned char* from = call.values + (long long)block * BYTES + lane * 16;
#pragma unroll
    for (int s = 0; s < SLABS; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) piece.weight[s][h] = stream16(from + (s * 2 + h) * 512);
}

__device__ __forceinline__ void load_x(const Call& call, Piece& piece, int column, int first_token, int lane) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n) {
        const int token = first_token + n * 8 + lane / 4;
        const bool there = token < call.tokens && (TOKENS >= 8 || lane / 4 < TOKENS);
        const u16* row = call.x + token * call.x_stride;
#pragma unroll
        for (int p = 0; p < X_PIECES; ++p) {
            const int input = column + lane % 4 * HELD + p * 8;
            piece.x[n][p] = there && input < call.inputs ? recent16(row + input) : make_uint4(0, 0, 0, 0);
        }
    }
}

__device__ __forceinline__ u32 word_of(const uint4& piece, int i) {
    return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}

// Two values of a row, in the order of input channels: pair 2s and 2s + 1 are those of multiplication s.
__device__ __forceinline__ u32 weights_of(const uint4& row, int pair) {
#if FORMAT == 0
    return word_of(row, pair);
#else
    const u32 word = word_of(row, pair / 2);
    return widen(pair % 2 ? word << 8 : word);
#endif
}

__device__ __forceinline__ void multiply(float (&sums)[SLABS][WIDTH / 8][4], const Piece& piece) {
#pragma unroll
    for (int j = 0; j < HELD / 4; ++j) {
#pragma unroll
        for (int s = 0; s < SLABS; ++s) {
            const u32 a0 = weights_of(piece.weight[s][0], j * 2), a1 = weights_of(piece.weight[s][1], j * 2);
            const u32 a2 = weights_of(piece.weight[s][0], j * 2 + 1), a3 = weights_of(piece.weight[s][1], j * 2 + 1);
#pragma unroll
            for (int n = 0; n < WIDTH / 8; ++n) {
                const uint4& x = piece.x[n][j / 2];
                float(&c)[4] = sums[s][n];
                asm volatile("mma.sync.aligned.m16n8k16.row.col." KINDS " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                             : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                             : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(word_of(x, j % 2 * 2)), "r"(word_of(x, j % 2 * 2 + 1)));
            }
        }
    }
}

// What is added to a pair of results; a thread has the same two outputs of all its tokens.
struct Ending {
    float2 scale = make_float2(1.f, 1.f), bias = make_float2(0.f, 0.f);
    float2 residual[WRITTEN];

    __device__ __forceinline__ static int token(int i) { return (i * THREADS + (int)threadIdx.x) / (ROWS / 2); }

    __device__ __forceinline__ Ending(const Call& call, int n, int first_token) {
        if (n >= call.outputs) return;
        const bool both = n + 1 < call.outputs;
#if FORMAT
        scale = make_float2(call.scales[n], both ? call.scales[n + 1] : 0.f);
#endif
        if (call.bias) bias = make_float2(to_float(call.bias[n]), both ? to_float(call.bias[n + 1]) : 0.f);
        if (!call.residual) return;
#pragma unroll
        for (int i = 0; i < WRITTEN; ++i) {
            const int m = first_token + token(i);
            if (token(i) >= TOKENS || m >= call.tokens) continue;
            const u16* from = call.residual + (long long)m * call.outputs + n;
            residual[i] = make_float2(to_float(from[0]), both ? to_float(from[1]) : 0.f);
        }
    }

    // Sums the parts of K, (WARPS, TOKENS, PITCH), in their order and writes the results.
    __device__ __forceinline__ void write(const Call& call, const float* partials, int n, int first_token) const {
        if (n >= call.outputs) return;
        const bool both = n + 1 < call.outputs;
#pragma unroll
        for (int i = 0; i < WRITTEN; ++i) {
            const int t = token(i), m = first_token + t;
            if (t >= TOKENS || m >= call.tokens) continue;
            float2 total = make_float2(0.f, 0.f);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float2 more =
                    *reinterpret_cast<const float2*>(partials + (w * TOKENS + t) * PITCH + threadIdx.x % (ROWS / 2) * 2);
                total.x += more.x;
                total.y += more.y;
            }
            total.x = finish(total.x * scale.x + bias.x);
            total.y = finish(total.y * scale.y + bias.y);
            if (call.residual) {
                total.x += residual[i].x;
                total.y += residual[i].y;
            }
            u16* to = call.y + (long long)m * call.outputs + n;
            if (both && call.outputs % 2 == 0) {
                *reinterpret_cast<u32*>(to) = to_bits(total.x) | (u32)to_bits(total.y) << 16;
            } else {
                to[0] = to_bits(total.x);
                if (both) to[1] = to_bits(total.y);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) few_blocks(const Call call) {
    extern __shared__ __align__(128) float partials[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_token = blockIdx.y * TOKENS;
    const int4 row = __ldg(call.schedule + blockIdx.x);
    const int count = row.z - row.y, begin = row.y + count * warp / WARPS, end = row.y + count * (warp + 1) / WARPS;
    if (count && threadIdx.x == 0 && blockIdx.y == 0) ask_early(call.values + (long long)row.y * BYTES, count * BYTES);
    int columns = begin + lane < end ? __ldg(call.columns + begin + lane) : 0;
    let_next_begin();
    if (!call.settled) wait_for_last(); // where values are is older in any case

    Piece pieces[STAGES];
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage)
        if (begin + stage < end) load_weight(call, pieces[stage], begin + stage, lane);
    wait_for_last();
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage)
        if (begin + stage < end) load_x(call, pieces[stage], __shfl_sync(~0u, columns, stage), first_token, lane);
    int next = min(begin + STAGES, end);
    const auto load_next = [&](Piece& piece) {
        if (next == end) return;
        const int known = (next - begin) % 32;
        if (known == 0) columns = next + lane < end ? __ldg(call.columns + next + lane) : 0;
        load_weight(call, piece, next, lane);
        load_x(call, piece, __shfl_sync(~0u, columns, known), first_token, lane);
        ++next;
    };
    const int n = row.x * ROWS + threadIdx.x % (ROWS / 2) * 2;
    const Ending ending(call, n, first_token);

    float sums[SLABS][WIDTH / 8][4] = {};
    for (int block = begin; block < end;) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            if (block == end) break;
            multiply(sums, pieces[stage]);
            load_next(pieces[stage]);
            ++block;
        }
    }
    lay_sums<PITCH>(partials + warp * TOKENS * PITCH, sums, 0, lane);
    __syncthreads();
    ending.write(call, partials, n, first_token);
}
