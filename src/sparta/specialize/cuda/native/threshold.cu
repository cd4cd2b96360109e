// y = x' W^T + bias, where x' is x with every |x| <= threshold made 0: the weight's rows of dead inputs are not read.
//
// The weight is stored (K, N), so that an input channel is one contiguous row. A block owns COLUMNS outputs and, with the
// other blocks of its cluster, a part of K. It lists the channels of its part that are live for some token, in order and
// without the host, then its warps take the listed rows in turn. Sums are added in a fixed order, in the block and over
// the cluster, so equal inputs give equal bits.
//
// Compile-time numbers: TOKENS, WARPS, CLUSTER, ROUND, WHOLE (rows begin at multiples of 16 bytes), IS_HALF.

#include "few_tokens.cuh"

constexpr int COLUMNS = 256;            // 32 lanes with 16 bytes each
constexpr int THREADS = WARPS * 32;
constexpr int UNROLL = TOKENS > 2 ? 4 : 8; // rows that a warp has on their way
constexpr int PITCH = COLUMNS + 4;

static_assert(ROUND % 1024 == 0, "counts of live channels are added up 32 at a time");

struct Call {
    const u16* x;
    const u16* weight;
    const u16* bias;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs;
    float threshold;
};

// Eight weights of one row; 0 beyond the last output.
__device__ __forceinline__ uint4 row_piece(const u16* row, int column, int outputs) {
#if WHOLE
    return column < outputs ? stream16(row + column) : make_uint4(0, 0, 0, 0);
#else
    u32 parts[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (column + i < outputs) parts[i / 2] |= (u32)row[column + i] << (16 * (i % 2));
    return make_uint4(parts[0], parts[1], parts[2], parts[3]);
#endif
}

struct Lists {
    float x[ROUND][TOKENS];
    int channel[ROUND];
    int counts[ROUND / 32];
};

// Lists the live ones of up to ROUND channels from `first` on, in their order; returns how many there are.
__device__ __forceinline__ int list_live(const Call& call, Lists& lists, int first, int end, int first_token) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr int TURNS = (ROUND + THREADS - 1) / THREADS;
    float x[TURNS][TOKENS];
    u32 live[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int place = turn * THREADS + threadIdx.x, channel = first + place;
        bool any = false;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const bool inside = place < ROUND && channel < end && first_token + t < call.tokens;
            const float value = inside ? to_float(call.x[(first_token + t) * call.x_stride + channel]) : 0.f;
            const bool dead = fabsf(value) <= call.threshold || !inside; // NaN is live
            x[turn][t] = dead ? 0.f : value;
            any |= !dead;
        }
        live[turn] = __ballot_sync(0xffffffffu, any);
        if (lane == 0 && place < ROUND) lists.counts[place / 32] = __popc(live[turn]);
    }
    __syncthreads();
    int total = 0, before[TURNS] = {};
#pragma unroll
    for (int part = 0; part < ROUND / 1024; ++part) { // each warp adds up 32 counts at once
        const int count = lists.counts[part * 32 + lane];
        int upto = count;
#pragma unroll
        for (int far = 1; far < 32; far *= 2) {
            const int more = __shfl_up_sync(0xffffffffu, upto, far);
            if (lane >= far) upto += more;
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int mine = turn * WARPS + warp, there = __shfl_sync(0xffffffffu, upto - count, mine % 32);
            if (mine / 32 == part) before[turn] = total + there;
        }
        total += __shfl_sync(0xffffffffu, upto, 31);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        if (live[turn] >> lane & 1) {
            const int place = before[turn] + __popc(live[turn] & ((1u << lane) - 1));
            lists.channel[place] = first + turn * THREADS + threadIdx.x;
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) lists.x[place][t] = x[turn][t];
        }
    }
    __syncthreads();
    return total;
}

__device__ __forceinline__ void add_row(float (&sums)[TOKENS][8], const uint4& row, const float* x) {
    const u32 words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float weight = to_float((u16)(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff));
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) sums[t][i] += weight * x[t];
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS) threshold(const Call call) {
    extern __shared__ __align__(16) unsigned char shared[];
    Lists& lists = *reinterpret_cast<Lists*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, first_token = blockIdx.y * TOKENS;
    const int begin = (int)((long long)call.inputs * rank / CLUSTER);
    const int end = (int)((long long)call.inputs * (rank + 1) / CLUSTER);
    const int column = tile * COLUMNS + lane * 8;

    float sums[TOKENS][8] = {};
    for (int first = begin; first < end; first += ROUND) {
        const int live = list_live(call, lists, first, end, first_token);
        for (int i = warp; i < live; i += WARPS * UNROLL) {
            uint4 rows[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int place = i + u * WARPS;
                const int channel = lists.channel[min(place, live - 1)];
                rows[u] = row_piece(call.weight + (long long)channel * call.outputs, column,
                                    place < live ? call.outputs : 0);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int place = i + u * WARPS;
                if (place < live) add_row(sums, rows[u], lists.x[place]);
            }
        }
        __syncthreads();
    }

    float* partials = reinterpret_cast<float*>(shared) + warp * TOKENS * PITCH; // (WARPS, TOKENS, PITCH)
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        for (int i = 0; i < 8; i += 4)
            *reinterpret_cast<float4*>(partials + t * PITCH + lane * 8 + i) =
                make_float4(sums[t][i], sums[t][i + 1], sums[t][i + 2], sums[t][i + 3]);
    }
    __syncthreads();
    float* results = reinterpret_cast<float*>(shared); // of the block, where those of warp 0 are
    for (int i = threadIdx.x; i < TOKENS * COLUMNS; i += THREADS) {
        const int place = i / COLUMNS * PITCH + i % COLUMNS;
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += results[w * TOKENS * PITCH + place];
        results[place] = total;
    }
    meet_cluster();
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    for (int i = rank * THREADS + threadIdx.x; i < TOKENS * COLUMNS; i += CLUSTER * THREADS) {
        const int token = i / COLUMNS, m = first_token + token, n = tile * COLUMNS + i % COLUMNS;
        if (m >= call.tokens || n >= call.outputs) continue;
        float total = 0.f;
#pragma unroll
        for (int q = 0; q < CLUSTER; ++q) total += partial(base + (token * PITCH + i % COLUMNS) * 4, q);
        if (call.bias) total += to_float(call.bias[n]);
        call.y[(long long)m * call.outputs + n] = to_bits(total);
    }
    leave_cluster();
}
