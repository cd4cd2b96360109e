// y = activation(x W^T + bias) + residual for a 2:4 weight and few tokens: the packed weight is streamed once.
//
// A warp multiplies SLABS slabs of 16 outputs by all tokens, over a part of K. The weight comes straight from memory
// into registers, in the order in which the sparse matrix unit takes it (see stream24.py for the layout); x goes through
// a ring in shared memory. Parts of K are summed in a fixed order, in the block and over the cluster, so equal inputs
// give equal bits.
//
// Compile-time numbers: TOKENS, SLABS, WARPS_N, WARPS_K, CLUSTER, STAGES, IS_HALF, ACTIVATION; of weights in few bits
// also FORMAT and GROUPED, see few_bits.cuh.

#include "few_tokens.cuh"
#include "few_bits.cuh"
#include "two_four.cuh"

constexpr int ROWS = WARPS_N * SLABS * 16;      // outputs of a block
constexpr int PITCH = ROWS + 4;                 // keeps the partial sums of a warp in different banks
constexpr int STAGE_BYTES = TOKENS * CHUNK * 2; // x of one chunk
constexpr int PIECES = CHUNK / 8;               // 16-byte pieces of a token's chunk
constexpr int GROUP_THREADS = WARPS_N * 32;     // threads that share one part of K

struct Call {
    const u16* x;
    const uint4* values;
    const uint2* selectors;
#if FORMAT
    const float* scales; // of outputs, or of outputs in each chunk: (slabs, chunks, 16)
#endif
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, chunks;
    int settled; // whether the weight is older than the kernels before this one
};

// Waits for the threads that share a part of K. Numbers of barriers are known, or the compiler reserves all there are.
template <int NUMBER = 0>
__device__ __forceinline__ void meet(int group) {
    if constexpr (WARPS_N == 1) {
        __syncwarp();
    } else if constexpr (NUMBER + 1 < WARPS_K) {
        if (group == NUMBER)
            asm volatile("bar.sync %0, %1;" ::"n"(NUMBER + 1), "n"(GROUP_THREADS) : "memory");
        else
            meet<NUMBER + 1>(group);
    } else {
        asm volatile("bar.sync %0, %1;" ::"n"(NUMBER + 1), "n"(GROUP_THREADS) : "memory");
    }
}

// Starts the copy of one chunk of x, (TOKENS, CHUNK), into the ring; beyond the edges it is 0.
__device__ __forceinline__ void fetch(const Call& call, u32 ring, int chunk, int first_token, int thread) {
#pragma unroll
    for (int i = 0; i < TOKENS * PIECES / GROUP_THREADS || i == 0; ++i) {
        int piece = i * GROUP_THREADS + thread;
        if (TOKENS * PIECES % GROUP_THREADS && piece >= TOKENS * PIECES) break;
        int token = piece / PIECES, part = piece % PIECES;
        int k = chunk * CHUNK + part * 8, row = first_token + token;
        bool inside = row < call.tokens && k < call.inputs;
        const u16* from = inside ? call.x + row * call.x_stride + k : call.x;
        // Pieces of eight tokens at the same k go to eight different banks.
        u32 to = ring + (token * PIECES + (part ^ (token & 7))) * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(WARPS_N * WARPS_K * 32) stream24(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = warp / WARPS_N, thread = threadIdx.x % GROUP_THREADS;
    const int tile = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    const int first_token = blockIdx.y * TOKENS;
    const int part = rank * WARPS_K + group, parts = CLUSTER * WARPS_K;
    const int begin = (int)((long long)call.chunks * part / parts), end = (int)((long long)call.chunks * (part + 1) / parts);
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const u32 ring = base + group * STAGES * STAGE_BYTES;

    Slab slabs[SLABS];
    const int last_slab = (call.outputs + 15) / 16 - 1;
#pragma unroll
    for (int s = 0; s < SLABS; ++s) {
        int slab = min(tile * (ROWS / 16) + (warp % WARPS_N) * SLABS + s, last_slab);
        slabs[s].values = call.values + (long long)slab * call.chunks * (VECTORS * 32) + lane;
        slabs[s].selectors = call.selectors + (long long)slab * call.chunks * 32 + lane;
#if GROUPED
        slabs[s].scales = call.scales + (long long)slab * call.chunks * 16 + lane / 4;
#endif
    }

    float sums[SLABS][WIDTH / 8][4] = {};
    Piece pieces[STAGES][SLABS];
    let_next_begin();
    if (!call.settled) wait_for_last();
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage)
        if (begin + stage < end) {
#pragma unroll
            for (int s = 0; s < SLABS; ++s) slabs[s].load(pieces[stage][s], begin + stage);
        }
    wait_for_last();
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        if (begin + stage < end) fetch(call, ring + stage * STAGE_BYTES, begin + stage, first_token, thread);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // ldmatrix: lane l gives the address of token l % 8 and of the 16-byte piece l / 8 of a multiply's four.
    const u32 row_offset = (lane % 8) * PIECES * 16;
    const int piece = lane / 8;
    // All groups meet as often, also those with one chunk less.
    const int rounds = (call.chunks + parts - 1) / parts;
    for (int first = 0; first < rounds; first += STAGES) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            if (first + stage < rounds) {
                const int chunk = begin + first + stage;
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
                meet(group);
                const u32 x = ring + stage * STAGE_BYTES + row_offset;
                if (chunk < end)
                    multiply_chunk(sums, pieces[stage], [&](int n, int j) {
                        return x + n * 8 * PIECES * 16 + (((j * 4 + piece) ^ (lane % 8)) * 16);
                    });
                meet(group);
                const int next = chunk + STAGES;
                if (next < end) {
                    fetch(call, ring + stage * STAGE_BYTES, next, first_token, thread);
#pragma unroll
                    for (int s = 0; s < SLABS; ++s) slabs[s].load(pieces[stage][s], next);
                }
                asm volatile("cp.async.commit_group;" ::: "memory");
            }
        }
    }

    // The ring is free now: it takes the partial sums, (WARPS_K, TOKENS, PITCH).
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float* partials = reinterpret_cast<float*>(shared) + group * TOKENS * PITCH;
    lay_sums<PITCH>(partials, sums, (warp % WARPS_N) * SLABS * 16, lane);
    meet_cluster();
    write<WARPS_K, ROWS, PITCH, WARPS_N * WARPS_K * 32>(call, base, tile, rank, first_token);
    leave_cluster();
}
