// A weight of kept blocks for many tokens on Hopper: y = finish(x W^T * scales + bias) + residual by the matrix
// instructions of a warpgroup (wgmma).
//
// Blocks of threads stay and walk over tiles of 64 outputs, one block row, and TOKENS tokens. One thread has the copy
// engine fetch the next STAGES kept blocks with their columns of x, and runs on from tile to tile. GROUPS warpgroups take
// tiles in turn: while one writes its results, the others multiply, so that rows of few kept blocks cost no waiting. The
// copy engine writes results too, from one of two places while the other is filled.
//
// Compile-time numbers: IS_HALF, ACTIVATION, FORMAT (0: 16 bits, 1: fp8 with scales of tokens and outputs), RESIDUAL
// (whether there is one), TOKENS, GROUPS, STAGES, ROW (bytes of a token in a step: 64 or 128), BESIDE (1).
#include "few_tokens.cuh"
#include "warpgroup.cuh"

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int X_BYTES = TOKENS * ROW, W_BYTES = 64 * ROW, STAGE = X_BYTES + W_BYTES;
constexpr int CHUNK = 32;               // tokens that are written at once
constexpr int RESULTS = CHUNK * 64 * 2; // bytes of them, in which the copy engine expects 16 of them exchanged with others
constexpr int STAGING = 2 * RESULTS;    // of a warpgroup
constexpr u64 SWIZZLE = ROW == 128 ? 1 : 2;

struct Call {
    alignas(64) unsigned char x_map[128];
    alignas(64) unsigned char w_map[128];
    alignas(64) unsigned char y_map[128];
    const int* columns;     // of kept blocks: their first input
    const int4* schedule;   // of block rows: their number, first step, end of steps, first column
    const float* scales;    // of outputs
    const float* x_scales;  // of tokens
    const u16* bias;
    const u16* residual;
    int tokens, outputs, block_rows, token_tiles, tiles, group;
    int settled; // whether the weight is older than the kernels before this one
};

// Walks over the tiles of this block of threads: `group` tiles of tokens are worked on before the next ones, and every
// other round goes backwards, so that who had a long row gets a short one.
struct Tiles {
    const Call& call;
    int round = 0, tile = 0, token = 0;
    int4 row;

    __device__ __forceinline__ Tiles(const Call& given) : call(given) { find(); }

    __device__ __forceinline__ bool left() const { return tile < call.tiles; }

    __device__ __forceinline__ void next() {
        ++round;
        find();
    }

    __device__ __forceinline__ void find() {
        const int programs = gridDim.x;
        tile = round * programs + (round % 2 ? programs - 1 - (int)blockIdx.x : (int)blockIdx.x);
        if (tile >= call.tiles) return;
        const int before = tile / (call.group * call.block_rows), inside = tile - before * call.group * call.block_rows;
        const int height = min(call.token_tiles - before * call.group, call.group);
        token = (before * call.group + inside % height) * TOKENS;
        row = __ldg(call.schedule + inside / height);
    }
};

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void skip(int steps) {
        const int turns = (stage + steps) / STAGES;
        stage += steps - turns * STAGES;
        phase ^= turns & 1;
    }
};

// Asks for the kept blocks of the first stages, whose barriers wait for x as well; returns how many.
__device__ __forceinline__ int fetch_blocks(const Call& call, u32 memory, u32 full) {
    int asked = 0;
    for (Tiles tiles(call); tiles.left() && asked < STAGES; tiles.next())
        for (int step = tiles.row.y; step < tiles.row.z && asked < STAGES; ++step, ++asked) {
            expect(full + asked * 8, STAGE);
            copy_box(memory + asked * STAGE + X_BYTES, call.w_map, 0, step * 64, full + asked * 8);
        }
    return asked;
}

__device__ __forceinline__ void fetch(const Call& call, u32 memory, u32 full, u32 empty) {
    int ahead = call.settled ? fetch_blocks(call, memory, full) : 0;
    wait_for_last();
    Ring ring;
    for (Tiles tiles(call); tiles.left();) {
        const int end = tiles.row.z, token = tiles.token;
        int step = tiles.row.y, column = tiles.row.w;
        tiles.next(); // early, as it reads
        for (; step < end; ++step, ring.skip(1)) {
            const int following = __ldg(call.columns + step + 1);
            const u32 stage = memory + ring.stage * STAGE, done = full + ring.stage * 8;
            if (ahead > 0) {
                --ahead;
            } else {
                wait(empty + ring.stage * 8, ring.phase ^ 1);
                expect(done, STAGE);
                copy_box(stage + X_BYTES, call.w_map, 0, step * 64, done);
            }
            copy_box(stage, call.x_map, column, token, done);
            column = following;
        }
    }
}

#if TOKENS == 64
#define WIDE "n64"
#define SUMS SUMS_32
#define LIST(a) LIST_32(a, 0)
#define OPERANDS "%32, %33"
#define ADDS "%34"
#elif TOKENS == 128
#define WIDE "n128"
#define SUMS SUMS_64
#define LIST(a) LIST_64(a, 0)
#define OPERANDS "%64, %65"
#define ADDS "%66"
#else
#define WIDE "n256"
#define SUMS SUMS_128
#define LIST(a) LIST_64(a, 0), LIST_64(a, 64)
#define OPERANDS "%128, %129"
#define ADDS "%130"
#endif
#if FORMAT
#define KIND "k32.f32.e4m3.e4m3"
#define TAIL "1, 1;"
#elif IS_HALF
#define KIND "k16.f32.f16.f16"
#define TAIL "1, 1, 0, 0;"
#else
#define KIND "k16.f32.bf16.bf16"
#define TAIL "1, 1, 0, 0;"
#endif

// Multiplies 32 bytes of inputs of 64 outputs and TOKENS tokens; adds to the sums if told to.
__device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], u32 w, u32 x, int adds) {
    const u64 left = described(w, 8 * ROW, SWIZZLE), right = described(x, 8 * ROW, SWIZZLE);
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\n"
                 "wgmma.mma_async.sync.aligned.m64" WIDE KIND " {" SUMS "}, " OPERANDS ", adds, " TAIL "\n}"
                 : LIST(sums)
                 : "l"(left), "l"(right), "r"(adds));
}

// activation(value). GELU is value / (1 + 2^-l), where l, the binary logarithm of Phi / (1 - Phi), is value times a
// polynomial in its square up to 5^2: right to 2e-5 of itself, or to 3e-7.
__device__ __forceinline__ float activated(float value) {
#if ACTIVATION == 2
    const float square = fminf(value * value, 25.f);
    float sum = fmaf(-7.73093603e-11f, square, 9.00558137e-9f);
    sum = fmaf(sum, square, -4.40540305e-7f);
    sum = fmaf(sum, square, 1.14961604e-5f);
    sum = fmaf(sum, square, -1.54160516e-4f);
    sum = fmaf(sum, square, -1.36707866e-4f);
    sum = fmaf(sum, square, 0.104943737f);
    sum = fmaf(sum, square, 2.30213666f);
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(sum * -value));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
    return value * inverse;
#else
    return finish(value);
#endif
}

__device__ __forceinline__ void load_transposed(u32 row, u32 (&pairs)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(row) : "memory");
}

// 16 bytes that the kernel before may have written: past the L1 cache.
__device__ __forceinline__ uint4 recent16(const void* from) {
    uint4 value;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from));
    return value;
}

__device__ __forceinline__ void write16(u32 to, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w) : "memory");
}

// Has the copy engine write what a warpgroup has laid down, as far as it lies inside y.
__device__ __forceinline__ void write_results(const Call& call, u32 place, int output, int token) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                 "cp.async.bulk.commit_group;" ::"l"(call.y_map), "r"(output), "r"(token), "r"(place) : "memory");
}

// Waits until all results but the last LEFT ones have been read from their places.
template <int LEFT>
__device__ __forceinline__ void wait_written() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// Scales, adds and writes the sums of one warpgroup: 64 outputs of TOKENS tokens. `which` place is free next.
__device__ __forceinline__ void write(const Call& call, const float (&sums)[TOKENS / 2], u32 staging, u32 scales, u32& which,
                                      int first_output, int first_token, int group) {
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
    for (int t = thread; t < TOKENS; t += 128)
        write4(scales + t * 4, first_token + t < call.tokens ? call.x_scales[first_token + t] : 0.f);
#endif
#pragma unroll
    for (int chunk = 0; chunk < TOKENS / CHUNK; ++chunk, which ^= RESULTS) {
        if (first_token + chunk * CHUNK >= call.tokens) break;
        const u32 place = staging + which;
#if RESIDUAL
        const int row = thread / 8, from = first_token + chunk * CHUNK + row, n = first_output + thread % 8 * 8;
        uint4 added[CHUNK / 16];
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; ++pass) {
            const int token = from + pass * 16;
            if (token < call.tokens && n < call.outputs)
                added[pass] = recent16(call.residual + (long long)token * call.outputs + n);
        }
#endif
        if (thread == 0) wait_written<1>();
        meet(group);
#if RESIDUAL
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; ++pass)
            write16(place + (pass * 16 + row) * 128 + ((thread % 8 ^ row % 8) << 4), added[pass]);
        meet(group);
#endif
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j += 2) {
            const u32 mine = place + (j * 8 + lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2 ^ lane % 8) << 4);
            u32 pairs[4];
#if RESIDUAL
            load_transposed(mine, pairs);
#endif
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const int h = p % 2, at = (chunk * (CHUNK / 8) + j + p / 2) * 4 + h * 2;
#if FORMAT
                const float2 of_tokens = read8(scales + (chunk * CHUNK + (j + p / 2) * 8 + lane % 4 * 2) * 4);
#endif
                u16 bits[2];
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    float value = sums[at + t];
#if FORMAT
                    value = value * (t ? of_tokens.y : of_tokens.x) * scale[h];
#endif
                    value = activated(value + bias[h]);
#if RESIDUAL
                    value += to_float((u16)(pairs[p] >> (t * 16)));
#endif
                    bits[t] = to_bits(value);
                }
                pairs[p] = bits[0] | (u32)bits[1] << 16;
            }
            store_transposed(mine, pairs);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet(group);
        if (thread == 0) write_results(call, place, first_output, first_token + chunk * CHUNK);
    }
}

// A warpgroup may look into the ring only where all before has come: a barrier does not tell one turn of the ring from the
// next but one. So each lets the next one in when the last step of its tile is there.
__device__ __forceinline__ void compute(const Call& call, u32 memory, u32 full, u32 empty, u32 turns, u32 staging,
                                        u32 scales) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, after = group + 1 == GROUPS ? 0 : group + 1;
    Ring ring;
    float sums[TOKENS / 2];
    int at = 0;
    u32 turn = 0, which = 0;
    for (Tiles tiles(call); tiles.left(); at = at + 1 == GROUPS ? 0 : at + 1) {
        const int steps = tiles.row.z - tiles.row.y, block_row = tiles.row.x, token = tiles.token;
        const bool first = tiles.round == 0;
        tiles.next(); // early, as it reads
        if (at != group) {
            ring.skip(steps);
            continue;
        }
        if (!first) {
            wait(turns + group * 8, turn);
            turn ^= 1;
        }
        if (!steps && threadIdx.x % 128 == 0) arrive(turns + after * 8, 0);
        u32 before = 0; // the barrier of the step whose multiplications may still run
        for (int step = 0; step < steps; ++step, ring.skip(1)) {
            const u32 x = memory + ring.stage * STAGE, w = x + X_BYTES;
            wait(full + ring.stage * 8, ring.phase);
            if (step + 1 == steps && threadIdx.x % 128 == 0) arrive(turns + after * 8, 0);
            begin_multiplying();
#pragma unroll
            for (int part = 0; part < ROW / 32; ++part) multiply(sums, w + part * 32, x + part * 32, step + part > 0);
            end_multiplying();
            wait_multiplied<1>(); // for the step before
            if (before && lane == 0) arrive(before, 0);
            before = empty + ring.stage * 8;
        }
        wait_multiplied<0>();
        if (before && lane == 0) arrive(before, 0);
        if (!steps) {
            asm volatile("" ::: "memory"); // a branch that is hardly ever taken, and not as many selections
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.f;
        }
        write(call, sums, staging + group * STAGING, scales + group * TOKENS * 4, which, block_row * 64, token, group);
    }
    if (threadIdx.x % 128 == 0) wait_written<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) blocks(const __grid_constant__ Call call) {
    extern __shared__ unsigned char raw[];
    const u32 memory = (address_of(raw) + 1023) / 1024 * 1024;
    const u32 staging = memory + STAGES * STAGE, scales = staging + GROUPS * STAGING, full = scales + GROUPS * TOKENS * 4;
    const u32 empty = full + STAGES * 8, turns = empty + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int g = 0; g < GROUPS; ++g) make_barrier(turns + g * 8, 1);
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(full + s * 8, 1);
            make_barrier(empty + s * 8, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_cluster();
    let_next_begin();
    if (threadIdx.x < CONSUMERS) wait_for_last();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers();
        if (threadIdx.x == CONSUMERS) fetch(call, memory, full, empty);
        __syncwarp();
    } else {
        more_registers();
        compute(call, memory, full, empty, turns, staging, scales);
    }
}
