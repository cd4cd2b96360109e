// A 2:4 weight for many tokens on Hopper: y = finish(x W^T * scales + bias) + residual by the sparse matrix instructions
// of a warpgroup (wgmma.sp).
//
// Blocks of threads stay and walk over tiles of 64 * GROUPS outputs and TOKENS tokens. One thread has the copy engine
// fetch the next STAGES steps of the input channels; each of GROUPS warpgroups multiplies 64 outputs. The blocks of a
// cluster compute neighbouring outputs of the same tokens, and each fetches a part of x for all of them. The weight lies in
// memory as the instruction wants it in shared memory, see cuda_24_matrix_layout.py.
//
// Compile-time numbers: IS_HALF, ACTIVATION, FORMAT (0: 16 bits, 1: fp8 with scales of tokens and outputs), RESIDUAL
// (whether there is one), TOKENS, GROUPS, CLUSTER, STAGES, CTAS (blocks on a multiprocessor).
#include "few_tokens.cuh"
#include "warpgroup.cuh"
#include "warpgroup24.cuh"

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int ROW = 128;                               // bytes of a token in a step
constexpr int X_BYTES = TOKENS * ROW;                  // of a step
constexpr int W_BYTES = PANELS + META_BYTES;           // of a step of 64 outputs
constexpr int STAGE = (X_BYTES + GROUPS * W_BYTES + 1023) / 1024 * 1024;
constexpr int CHUNK = TOKENS < 64 ? TOKENS : 64;       // tokens that are written at once
constexpr int PITCH = 64 * 2 + 16;                     // bytes between them
constexpr int STAGING = CHUNK * PITCH + TOKENS * 4;    // of a warpgroup: results and the scales of tokens

struct Call {
    alignas(64) unsigned char x_map[128];
    const unsigned char* weight; // (slabs of 64 outputs, steps, W_BYTES)
    const float* scales;         // of outputs
    const float* x_scales;       // of tokens
    const u16* bias;
    const u16* residual;
    u16* y;
    int tokens, outputs, steps, token_tiles, tiles, group;
};

// Which outputs and tokens a tile of the cluster has: `group` tiles of tokens are worked on before the next ones.
struct Place {
    int slab, token;
    __device__ __forceinline__ Place(const Call& call, int tile, int rank) {
        const int columns = call.tiles / call.token_tiles;
        const int before = tile / (call.group * columns), inside = tile - before * call.group * columns;
        const int height = min(call.token_tiles - before * call.group, call.group);
        token = (before * call.group + inside % height) * TOKENS;
        slab = ((inside / height) * CLUSTER + rank) * GROUPS;
    }
};

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__device__ __forceinline__ void fetch(const Call& call, u32 memory, u32 full, u32 empty, int rank) {
    Ring ring;
    for (int tile = blockIdx.x / CLUSTER; tile < call.tiles; tile += gridDim.x / CLUSTER) {
        const Place place(call, tile, rank);
        for (int step = 0; step < call.steps; ++step, ring.next()) {
            const u32 stage = memory + ring.stage * STAGE, done = full + ring.stage * 8;
            wait(empty + ring.stage * 8, ring.phase ^ 1);
            expect(done, X_BYTES + GROUPS * W_BYTES);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const long long chunk = (long long)(place.slab + g) * call.steps + step;
                copy(stage + X_BYTES + g * W_BYTES, call.weight + chunk * W_BYTES, W_BYTES, done);
            }
            constexpr int PART = TOKENS / CLUSTER;
            copy_box(stage + rank * PART * ROW, call.x_map, step * (ROW / ITEM), place.token + rank * PART, done);
        }
    }
}

// Scales, adds and writes the sums of one warpgroup: 64 outputs of TOKENS tokens.
__device__ __forceinline__ void write(const Call& call, const float (&sums)[TOKENS / 2], u32 staging, int first_output,
                                      int first_token, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
    const int output = first_output + warp * 16 + lane / 4;
    float bias[2] = {0.f, 0.f};
#if FORMAT
    float scale[2] = {1.f, 1.f};
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (output + h * 8 >= call.outputs) continue;
#if FORMAT
        scale[h] = call.scales[output + h * 8];
#endif
        if (call.bias) bias[h] = to_float(call.bias[output + h * 8]);
    }
#if FORMAT
    const u32 scales = staging + CHUNK * PITCH;
    for (int t = thread; t < TOKENS; t += 128)
        write4(scales + t * 4, first_token + t < call.tokens ? call.x_scales[first_token + t] : 0.f);
    meet(group);
#endif
#pragma unroll
    for (int chunk = 0; chunk < TOKENS / CHUNK; ++chunk) {
        if (first_token + chunk * CHUNK >= call.tokens) break;
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j += 2) {
            u32 pairs[4];
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const int h = p % 2, at = (chunk * (CHUNK / 8) + j + p / 2) * 4 + h * 2;
                const int token = first_token + chunk * CHUNK + (j + p / 2) * 8 + lane % 4 * 2;
                u16 bits[2];
#if FORMAT
                const float2 of_tokens = read8(scales + (token - first_token) * 4);
#endif
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    float value = sums[at + t];
#if FORMAT
                    value = value * (t ? of_tokens.y : of_tokens.x) * scale[h];
#endif
                    value = finish(value + bias[h]);
#if RESIDUAL
                    if (token + t < call.tokens && output + h * 8 < call.outputs)
                        value += to_float(call.residual[(long long)(token + t) * call.outputs + output + h * 8]);
#endif
                    bits[t] = to_bits(value);
                }
                pairs[p] = bits[0] | (u32)bits[1] << 16;
            }
            const int row = j * 8 + lane / 16 * 8 + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
            store_transposed(staging + row * PITCH + column * 2, pairs);
        }
        meet(group);
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; ++pass) {
            const int row = pass * 16 + thread / 8, token = first_token + chunk * CHUNK + row;
            const int n = first_output + thread % 8 * 8;
            if (token < call.tokens && n < call.outputs)
                *reinterpret_cast<uint4*>(call.y + (long long)token * call.outputs + n) =
                    read16(staging + row * PITCH + thread % 8 * 16);
        }
        meet(group);
    }
}

// One warpgroup's way through the ring.
struct Consumer {
    const Call& call;
    u32 memory, full, empty;
    int group, lane;
    Ring ring;
    u32 before; // the barrier of the step whose multiplications may still run

    // Multiplies one step, whose places go to `mine`; those of the step before are in `others`.
    __device__ __forceinline__ void multiply_step(float (&sums)[TOKENS / 2], Selectors& mine, const Selectors& others,
                                                  int adds) {
        const u32 x = memory + ring.stage * STAGE, w = x + X_BYTES + group * W_BYTES;
        wait(full + ring.stage * 8, ring.phase);
        mine.load(w + PANELS, threadIdx.x % 128);
        begin_multiplying();
        multiply<0>(sums, w, x, mine, adds);
        multiply<1>(sums, w, x, mine, 1);
        end_multiplying();
        wait_multiplied<1>(); // for the step before
        others.keep(memory, call.tokens);
        if (before && lane < CLUSTER) arrive(before, lane);
        before = empty + ring.stage * 8;
        ring.next();
    }
};

__device__ __forceinline__ void compute(const Call& call, u32 memory, u32 full, u32 empty, u32 staging, int rank) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    Consumer consumer{call, memory, full, empty, group, lane, Ring(), 0};
    float sums[TOKENS / 2];
    Selectors even, odd;
    for (int tile = blockIdx.x / CLUSTER; tile < call.tiles; tile += gridDim.x / CLUSTER) {
        const Place place(call, tile, rank);
        consumer.before = 0;
        for (int step = 0; step < call.steps; step += 2) {
            consumer.multiply_step(sums, even, odd, step > 0);
            if (step + 1 < call.steps) consumer.multiply_step(sums, odd, even, 1);
        }
        wait_multiplied<0>();
        even.keep(memory, call.tokens);
        odd.keep(memory, call.tokens);
        if (lane < CLUSTER) arrive(consumer.before, lane);
        write(call, sums, staging + group * STAGING, (place.slab + group) * 64, place.token, group);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        matrix24(const __grid_constant__ Call call) {
    extern __shared__ unsigned char raw[];
    const u32 memory = (address_of(raw) + 1023) / 1024 * 1024;
    const u32 staging = memory + STAGES * STAGE, full = staging + GROUPS * STAGING, empty = full + STAGES * 8;
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(full + s * 8, 1);
            make_barrier(empty + s * 8, CLUSTER * GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_cluster();
    follow();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers();
        if (threadIdx.x == CONSUMERS) fetch(call, memory, full, empty, rank);
        __syncwarp();
    } else {
        more_registers();
        compute(call, memory, full, empty, staging, rank);
    }
    leave_cluster(); // others still copy into this block's memory and arrive at its barriers
}
