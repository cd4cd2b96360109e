// Attention of all queries to all keys on Hopper: y = softmax(q k^T * scale) v, for heads of 64 elements, by the matrix
// instructions of a warpgroup (wgmma).
//
// Blocks of threads stay and walk over tiles of 128 queries of one head. One thread has the copy engine fetch queries, and
// keys and values in tiles of 128 in turn, and runs on from tile to tile. Each of two warpgroups takes 64 queries: while one
// computes powers, the other multiplies. What a warpgroup multiplies with the values stays in its registers.
//
// Compile-time numbers: IS_HALF, GROUPS (2), STAGES (tiles of keys or values on their way), BESIDE (1), CLUSTER (1).
#include "few_tokens.cuh"
#include "warpgroup.cuh"

constexpr int WIDTH = 64, ROW = WIDTH * 2, KEYS = 128, QUERIES = GROUPS * 64;
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int Q_BYTES = QUERIES * ROW, STAGE = KEYS * ROW;

struct Call {
    alignas(64) unsigned char q_map[128];
    alignas(64) unsigned char k_map[128];
    alignas(64) unsigned char v_map[128];
    u16* y; // (batches, queries, heads, 64)
    int heads, group, queries, keys, query_tiles, tiles;
    float factor; // of scores, for powers of 2
};

#define NOTHING __int_as_float(0xff800000) // minus infinity

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ void copy_rows(u32 to, const void* map, int row, int head, int batch, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
                 "[%6];" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(head), "r"(batch), "r"(barrier) : "memory");
}

#if IS_HALF
#define KIND "k16.f32.f16.f16"
#else
#define KIND "k16.f32.bf16.bf16"
#endif

// Multiplies 16 elements of 64 queries and KEYS keys; adds to the scores if told to.
__device__ __forceinline__ void score(float (&scores)[64], u32 q, u32 k, int adds) {
    const u64 left = described(q, 8 * ROW, 1), right = described(k, 8 * ROW, 1);
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128" KIND " {" SUMS_64 "}, %64, %65, adds, 1, 1, 0, 0;\n}"
                 : LIST_64(scores, 0)
                 : "l"(left), "l"(right), "r"(adds));
}

// Adds the product of 16 chances of 64 queries, in registers, and the values of as many keys.
__device__ __forceinline__ void weigh(float (&sums)[32], const u32 (&chances)[4], u32 v) {
    const u64 right = described(v, 8 * ROW, 1);
    asm volatile("wgmma.mma_async.sync.aligned.m64n64" KIND " {" SUMS_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
                 : LIST_32(sums, 0)
                 : "r"(chances[0]), "r"(chances[1]), "r"(chances[2]), "r"(chances[3]), "l"(right));
}

__device__ __forceinline__ float power(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 pair;
#if IS_HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

// Over the four lanes that share a query.
__device__ __forceinline__ float most_of_four(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float sum_of_four(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

__device__ __forceinline__ void fetch(const Call& call, u32 queries, u32 ring_memory, u32 q_full, u32 q_empty, u32 full,
                                      u32 empty) {
    wait_for_last();
    Ring ring;
    u32 turn = 0;
    for (int tile = blockIdx.x; tile < call.tiles; tile += gridDim.x, turn ^= 1) {
        const int number = tile / call.query_tiles, first = (tile - number * call.query_tiles) * QUERIES;
        const int batch = number / call.heads, head = number - batch * call.heads, shared = head / call.group;
        wait(q_empty, turn ^ 1);
        expect(q_full, Q_BYTES);
        copy_rows(queries, call.q_map, first, head, batch, q_full);
        for (int key = 0; key < call.keys; key += KEYS)
#pragma unroll
            for (int of_values = 0; of_values < 2; ++of_values, ring.next()) {
                const u32 done = full + ring.stage * 8;
                wait(empty + ring.stage * 8, ring.phase ^ 1);
                expect(done, STAGE);
                copy_rows(ring_memory + ring.stage * STAGE, of_values ? call.v_map : call.k_map, key, shared, batch, done);
            }
    }
}

__device__ __forceinline__ void compute(const Call& call, u32 queries, u32 ring_memory, u32 q_full, u32 q_empty, u32 full,
                                        u32 empty) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 mine = queries + group * 64 * ROW;
    Ring ring;
    u32 turn = 0;
    for (int tile = blockIdx.x; tile < call.tiles; tile += gridDim.x, turn ^= 1) {
        const int number = tile / call.query_tiles, first = (tile - number * call.query_tiles) * QUERIES;
        const int batch = number / call.heads, head = number - batch * call.heads;
        float scores[64], sums[32];
        float most[2] = {NOTHING, NOTHING}, weight[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i] = 0.f;
        wait(q_full, turn);
        for (int key = 0; key < call.keys; key += KEYS) {
            wait(full + ring.stage * 8, ring.phase);
            begin_multiplying();
#pragma unroll
            for (int part = 0; part < ROW / 32; ++part)
                score(scores, mine + part * 32, ring_memory + ring.stage * STAGE + part * 32, part > 0);
            end_multiplying();
            wait_multiplied<0>();
            if (lane == 0) arrive(empty + ring.stage * 8, 0);
            ring.next();
            if (key + KEYS >= call.keys) { // the last of its queries, of which keys may be missing
                if (lane == 0) arrive(q_empty, 0);
                const int there = call.keys - key - lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < 64; ++i)
                    if (i / 4 * 8 + i % 2 >= there) scores[i] = NOTHING;
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float higher = scores[h * 2];
#pragma unroll
                for (int i = 0; i < 64; ++i)
                    if (i / 2 % 2 == h) higher = fmaxf(higher, scores[i]);
                higher = fmaxf(most[h], most_of_four(higher) * call.factor);
                const float base = higher == NOTHING ? 0.f : higher; // -inf less itself is no number
                const float scale = power(most[h] - base);
                float total = 0.f;
#pragma unroll
                for (int i = 0; i < 64; ++i)
                    if (i / 2 % 2 == h) {
                        scores[i] = power(fmaf(scores[i], call.factor, -base));
                        total += scores[i];
                    }
                weight[h] = weight[h] * scale + total; // of this lane's keys
#pragma unroll
                for (int i = 0; i < 32; ++i)
                    if (i / 2 % 2 == h) sums[i] *= scale;
                most[h] = higher;
            }
            u32 chances[KEYS / 16][4];
#pragma unroll
            for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i) chances[step][i] = packed(scores[step * 8 + i * 2], scores[step * 8 + i * 2 + 1]);
            wait(full + ring.stage * 8, ring.phase);
            begin_multiplying();
#pragma unroll
            for (int step = 0; step < KEYS / 16; ++step)
                weigh(sums, chances[step], ring_memory + ring.stage * STAGE + step * 16 * ROW);
            end_multiplying();
            wait_multiplied<0>();
            if (lane == 0) arrive(empty + ring.stage * 8, 0);
            ring.next();
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int query = first + group * 64 + warp * 16 + lane / 4 + h * 8;
            const float inverse = 1.f / sum_of_four(weight[h]);
            u16* row = call.y + (((long long)batch * call.queries + query) * call.heads + head) * WIDTH + lane % 4 * 2;
            if (query < call.queries)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    *reinterpret_cast<u32*>(row + j * 8) =
                        packed(sums[j * 4 + h * 2] * inverse, sums[j * 4 + h * 2 + 1] * inverse);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Call call) {
    extern __shared__ unsigned char raw[];
    const u32 queries = (address_of(raw) + 1023) / 1024 * 1024, ring = queries + Q_BYTES;
    const u32 q_full = ring + STAGES * STAGE, q_empty = q_full + 8, full = q_empty + 8, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        make_barrier(q_full, 1);
        make_barrier(q_empty, GROUPS * 4);
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(full + s * 8, 1);
            make_barrier(empty + s * 8, GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_begin();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers();
        if (threadIdx.x == CONSUMERS) fetch(call, queries, ring, q_full, q_empty, full, empty);
        __syncwarp();
    } else {
        wait_for_last();
        more_registers();
        compute(call, queries, ring, q_full, q_empty, full, empty);
    }
}
