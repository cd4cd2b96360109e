// y = activation(x W^T + bias) + residual for a 2:4 weight and very few tokens: x stays, the weight streams past it.
//
// A block stays on its multiprocessor and walks over tiles of ROWS outputs. Each warp has the same part of K in all of
// them, so that its part of x is read once, and the pieces of the weight that come next, also those of the tile that
// comes next, are always on their way. Parts of K are summed in a fixed order, so equal inputs give equal bits.
//
// Compile-time numbers: TOKENS, SLABS, WARPS, STAGES, CTAS, IS_HALF, ACTIVATION; FORMAT and GROUPED, see few_bits.cuh.

#define CLUSTER 1
#include "few_tokens.cuh"
#include "few_bits.cuh"
#include "two_four.cuh"

constexpr int ROWS = SLABS * 16;                      // outputs of a tile
constexpr int PITCH = ROWS + 4;                       // keeps the partial sums of a warp in different banks
constexpr int THREADS = WARPS * 32;
constexpr int PARTIALS = WARPS * TOKENS * PITCH * 4;  // bytes of the partial sums of one tile

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

// Copies x to shared memory, (TOKENS, chunks * CHUNK); pieces of eight tokens at the same input go to different banks.
__device__ __forceinline__ void fetch(const Call& call, u32 to, int first_token) {
    const int pieces = call.chunks * (CHUNK / 8);
    for (int place = threadIdx.x; place < TOKENS * pieces; place += THREADS) {
        const int token = TOKENS == 1 ? 0 : place / pieces, piece = TOKENS == 1 ? place : place % pieces;
        const bool inside = first_token + token < call.tokens && piece * 8 < call.inputs;
        const u16* from = inside ? call.x + (first_token + token) * call.x_stride + piece * 8 : call.x;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + (token * pieces + (piece ^ (token & 7))) * 16),
                     "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) resident24(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_token = blockIdx.y * TOKENS;
    const int begin = call.chunks * warp / WARPS, end = call.chunks * (warp + 1) / WARPS;
    const int tiles = (call.outputs + ROWS - 1) / ROWS, last_slab = (call.outputs + 15) / 16 - 1;
    const u32 x = (u32)__cvta_generic_to_shared(shared), row_bytes = call.chunks * (CHUNK * 2);
    const u32 zeros = x + TOKENS * row_bytes, partials = zeros + 16; // tokens that are not there are read as zeros

    Slab slabs[SLABS];
    int load_tile = blockIdx.x, load_chunk = begin;
    const auto point = [&] {
#pragma unroll
        for (int s = 0; s < SLABS; ++s) {
            const long long slab = min(load_tile * SLABS + s, last_slab);
            slabs[s].values = call.values + slab * call.chunks * (VECTORS * 32) + lane;
            slabs[s].selectors = call.selectors + slab * call.chunks * 32 + lane;
#if GROUPED
            slabs[s].scales = call.scales + slab * call.chunks * 16 + lane / 4;
#endif
        }
    };
    Piece pieces[STAGES][SLABS];
    const auto load = [&](Piece(&into)[SLABS]) {
        if (load_tile < tiles) {
#pragma unroll
            for (int s = 0; s < SLABS; ++s) slabs[s].load(into[s], load_chunk);
            if (++load_chunk == end) {
                load_chunk = begin, load_tile += gridDim.x;
                point();
            }
        }
    };

    point();
    let_next_begin();
    if (!call.settled) wait_for_last();
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) load(pieces[stage]);
    wait_for_last();
    fetch(call, x, first_token);
    if (threadIdx.x < 4) reinterpret_cast<u32*>(shared + TOKENS * row_bytes)[threadIdx.x] = 0;
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    // Threads that write results load the scales of a tile before they need them: others would wait for it.
    static_assert(TOKENS * ROWS / 2 <= THREADS, "a thread writes two results at most");
    float2 scales = make_float2(0.f, 0.f);
    const auto load_scales = [&](int tile) {
#if FORMAT && !GROUPED
        const int output = tile * ROWS + threadIdx.x % (ROWS / 2) * 2;
        if (threadIdx.x < TOKENS * ROWS / 2 && output < call.outputs) {
            scales.x = __ldg(call.scales + output);
            if (output + 1 < call.outputs) scales.y = __ldg(call.scales + output + 1);
        }
#endif
    };
    load_scales(blockIdx.x);

    float sums[SLABS][WIDTH / 8][4] = {};
    int chunk = begin;
    u32 buffer = 0; // of two for partial sums: one barrier for each tile is enough
    for (int tile = blockIdx.x; tile < tiles;) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            if (tile >= tiles) break;
            multiply_chunk(sums, pieces[stage], [&](int n, int j) {
                const int row = n * 8 + lane % 8, piece = chunk * (CHUNK / 8) + j * 4 + lane / 8;
                return TOKENS >= 8 || row < TOKENS ? x + row * row_bytes + (piece ^ (row & 7)) * 16 : zeros;
            });
            load(pieces[stage]);
            if (++chunk < end) continue;
            float* mine = reinterpret_cast<float*>(shared + TOKENS * row_bytes + 16 + buffer) + warp * TOKENS * PITCH;
            lay_sums<PITCH>(mine, sums, 0, lane);
            asm volatile("bar.sync 0;" ::: "memory");
            write<WARPS, ROWS, PITCH, THREADS>(call, partials + buffer, tile, 0, first_token, &scales);
#pragma unroll
            for (int s = 0; s < SLABS; ++s)
#pragma unroll
                for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[s][n][i] = 0.f;
            chunk = begin, tile += gridDim.x, buffer ^= PARTIALS;
            load_scales(tile);
        }
    }
}
