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

constexpr int CHUNK = 128;                      // input channels that are multiplied between two turns of the ring
constexpr int ROWS = WARPS_N * SLABS * 16;      // outputs of a block
constexpr int PITCH = ROWS + 4;                 // keeps the partial sums of a warp in different banks
constexpr int STAGE_BYTES = TOKENS * CHUNK * 2; // x of one chunk
constexpr int PIECES = CHUNK / 8;               // 16-byte pieces of a token's chunk
constexpr int GROUP_THREADS = WARPS_N * 32;     // threads that share one part of K
constexpr int VECTORS = 4 * VALUE_BITS / 16;    // 16-byte pieces of a lane's values in a chunk

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
};

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

// Waits for the threads that share a part of K.
__device__ __forceinline__ void meet(int group) {
    if (WARPS_N == 1)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(GROUP_THREADS) : "memory");
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

template <int j>
__device__ __forceinline__ void multiply_part(float (&sums)[SLABS][TOKENS / 8][4], const Piece (&pieces)[SLABS], u32 x,
                                              int piece, int lane) {
    uint4 a[SLABS];
#pragma unroll
    for (int s = 0; s < SLABS; ++s) a[s] = operand<j>(pieces[s]);
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n) {
        u32 b[4];
        u32 from = x + n * 8 * PIECES * 16 + (((j * 4 + piece) ^ (lane % 8)) * 16);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(from)
                     : "memory");
#pragma unroll
        for (int s = 0; s < SLABS; ++s)
            multiply<j % 2>(sums[s][n], a[s], b, j < 2 ? pieces[s].selectors.x : pieces[s].selectors.y);
    }
}

// Multiplies one chunk; where groups of inputs have scales of their own, its sums are scaled before they are added.
__device__ __forceinline__ void multiply_chunk(float (&sums)[SLABS][TOKENS / 8][4], const Piece (&pieces)[SLABS], u32 x,
                                               int piece, int lane) {
#if GROUPED
    float part[SLABS][TOKENS / 8][4] = {};
#else
    float(&part)[SLABS][TOKENS / 8][4] = sums;
#endif
    multiply_part<0>(part, pieces, x, piece, lane);
    multiply_part<1>(part, pieces, x, piece, lane);
    multiply_part<2>(part, pieces, x, piece, lane);
    multiply_part<3>(part, pieces, x, piece, lane);
#if GROUPED
#pragma unroll
    for (int s = 0; s < SLABS; ++s)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[s][n][i] = fmaf(part[s][n][i], i < 2 ? pieces[s].scales.x : pieces[s].scales.y, sums[s][n][i]);
#endif
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

    float sums[SLABS][TOKENS / 8][4] = {};
    Piece pieces[STAGES][SLABS];
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        if (begin + stage < end) {
            fetch(call, ring + stage * STAGE_BYTES, begin + stage, first_token, thread);
#pragma unroll
            for (int s = 0; s < SLABS; ++s) slabs[s].load(pieces[stage][s], begin + stage);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // ldmatrix: lane l gives the address of token l % 8 and of the 16-byte piece l / 8 of a multiply's four.
    const u32 row_offset = (lane % 8) * PIECES * 16;
    const int piece = lane / 8;
    for (int first = begin; first < end; first += STAGES) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            const int chunk = first + stage;
            if (chunk < end) {
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
                meet(group);
                const u32 x = ring + stage * STAGE_BYTES + row_offset;
                multiply_chunk(sums, pieces[stage], x, piece, lane);
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
