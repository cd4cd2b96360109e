// A weight of kept blocks for many tokens on Hopper: y = finish(x W^T * scales + bias) + residual by the matrix
// instructions of a warpgroup (wgmma).
//
// Blocks of threads stay and walk over tiles of 64 outputs, one block row, and TOKENS tokens. One thread has the copy
// engine fetch the next STAGES kept blocks with their columns of x, and runs on from tile to tile. GROUPS warpgroups take
// tiles in turn: while one writes its results, the others multiply, so that rows of few kept blocks cost no waiting.
//
// Compile-time numbers: IS_HALF, ACTIVATION, FORMAT (0: 16 bits, 1: fp8 with scales of tokens and outputs), RESIDUAL
// (whether there is one), TOKENS, GROUPS, STAGES, ROW (bytes of a token in a step: 64 or 128), BESIDE (1).
#include "few_tokens.cuh"
#include "warpgroup.cuh"

constexpr int X_BYTES = TOKENS * ROW, W_BYTES = 64 * ROW, STAGE = X_BYTES + W_BYTES;
constexpr int CHUNK = 64;                           // tokens that are written at once
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int PITCH = 64 * 2 + 16;                  // bytes between tokens of results on their way out
constexpr int STAGING = CHUNK * PITCH + TOKENS * 4; // of a warpgroup: results and the scales of tokens
constexpr u64 SWIZZLE = ROW == 128 ? 1 : 2;

struct Call {
    alignas(64) unsigned char x_map[128];
    alignas(64) unsigned char w_map[128];
    const int* columns;     // of kept blocks: their first input
    const int4* schedule;   // of block rows: their number, first step, end of steps, first column
    const float* scales;    // of outputs
    const float* x_scales;  // of tokens
    const u16* bias;
    const u16* residual;
    u16* y;
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

// What is added to the results of a thread: the bias of its two outputs, and of the residual the 16 bytes that it writes,
// for one chunk of tokens.
struct Added {
    float bias[2] = {0.f, 0.f};
#if RESIDUAL
    uint4 residual[CHUNK / 16];
#endif
};

// Asks for the bias early: it takes as long to come as a warpgroup multiplies a block.
__device__ __forceinline__ void fetch_bias(const Call& call, Added& added, int first_output) {
    const int output = first_output + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    for (int h = 0; h < 2; ++h)
        added.bias[h] = call.bias && output + h * 8 < call.outputs ? to_float(call.bias[output + h * 8]) : 0.f;
}

#if RESIDUAL
__device__ __forceinline__ void fetch_residual(const Call& call, Added& added, int first_output, int token) {
    const int thread = threadIdx.x % 128, n = first_output + thread % 8 * 8;
#pragma unroll
    for (int pass = 0; pass < CHUNK / 16; ++pass) {
        const int from = token + thread / 8 + pass * 16;
        if (from < call.tokens && n < call.outputs)
            added.residual[pass] = recent16(call.residual + (long long)from * call.outputs + n);
    }
}
#endif

// Scales, adds and writes the sums of one warpgroup: 64 outputs of TOKENS tokens; the residual of the first chunk is there.
__device__ __forceinline__ void write(const Call& call, const float (&sums)[TOKENS / 2], Added& added, u32 staging,
                                      int first_output, int first_token, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
    const int n = first_output + thread % 8 * 8;
#if FORMAT
    const int output = first_output + warp * 16 + lane / 4;
    float scale[2] = {1.f, 1.f};
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (output + h * 8 < call.outputs) scale[h] = call.scales[output + h * 8];
    const u32 scales = staging + CHUNK * PITCH;
    for (int t = thread; t < TOKENS; t += 128)
        write4(scales + t * 4, first_token + t < call.tokens ? call.x_scales[first_token + t] : 0.f);
    meet(group);
#endif
#pragma unroll
    for (int chunk = 0; chunk < TOKENS / CHUNK; ++chunk) {
        if (first_token + chunk * CHUNK >= call.tokens) break;
        const int from = first_token + chunk * CHUNK + thread / 8;
        const u32 mine = staging + thread / 8 * PITCH + thread % 8 * 16;
#if RESIDUAL
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; ++pass) write16(mine + pass * 16 * PITCH, added.residual[pass]);
        meet(group);
        if (chunk + 1 < TOKENS / CHUNK)
            fetch_residual(call, added, first_output, first_token + (chunk + 1) * CHUNK);
#endif
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j += 2) {
            const int row = j * 8 + lane / 16 * 8 + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
            const u32 place = staging + row * PITCH + column * 2;
            u32 pairs[4];
#if RESIDUAL
            load_transposed(place, pairs);
#endif
            float values[8];
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const int h = p % 2, at = (chunk * (CHUNK / 8) + j + p / 2) * 4 + h * 2;
#if FORMAT
                const float2 of_tokens = read8(scales + (chunk * CHUNK + (j + p / 2) * 8 + lane % 4 * 2) * 4);
                values[p * 2] = sums[at] * of_tokens.x * scale[h] + added.bias[h];
                values[p * 2 + 1] = sums[at + 1] * of_tokens.y * scale[h] + added.bias[h];
#else
                values[p * 2] = sums[at] + added.bias[h];
                values[p * 2 + 1] = sums[at + 1] + added.bias[h];
#endif
            }
            finish_all(values);
#pragma unroll
            for (int p = 0; p < 4; ++p) {
#if RESIDUAL
                values[p * 2] += to_float((u16)pairs[p]);
                values[p * 2 + 1] += to_float((u16)(pairs[p] >> 16));
#endif
                pairs[p] = to_bits(values[p * 2]) | (u32)to_bits(values[p * 2 + 1]) << 16;
            }
            store_transposed(place, pairs);
        }
        meet(group);
        uint4 results[CHUNK / 16];
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; ++pass) results[pass] = read16(mine + pass * 16 * PITCH);
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; ++pass) {
            const int token = from + pass * 16;
            if (token < call.tokens && n < call.outputs)
                *reinterpret_cast<uint4*>(call.y + (long long)token * call.outputs + n) = results[pass];
        }
        meet(group);
    }
}

// A warpgroup may look into the ring only where all before has come: a barrier does not tell one turn of the ring from the
// next but one. So each lets the next one in when the last step of its tile is there.
__device__ __forceinline__ void compute(const Call& call, u32 memory, u32 full, u32 empty, u32 turns, u32 staging) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, after = group + 1 == GROUPS ? 0 : group + 1;
    Ring ring;
    float sums[TOKENS / 2];
    int at = 0;
    u32 turn = 0;
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
        Added added;
        fetch_bias(call, added, block_row * 64);
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
#if RESIDUAL
        fetch_residual(call, added, block_row * 64, token);
#endif
        wait_multiplied<0>();
        if (before && lane == 0) arrive(before, 0);
        if (!steps) {
            asm volatile("" ::: "memory"); // a branch that is hardly ever taken, and not as many selections
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.f;
        }
        write(call, sums, added, staging + group * STAGING, block_row * 64, token, group);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) blocks(const __grid_constant__ Call call) {
    extern __shared__ unsigned char raw[];
    const u32 memory = (address_of(raw) + 1023) / 1024 * 1024;
    const u32 staging = memory + STAGES * STAGE, full = staging + GROUPS * STAGING, empty = full + STAGES * 8;
    const u32 turns = empty + STAGES * 8;
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
        compute(call, memory, full, empty, turns, staging);
    }
}
