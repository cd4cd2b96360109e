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

constexpr int CHUNK = 64; // tokens that are written at once
#include "block_tiles.cuh"

constexpr int X_BYTES = TOKENS * ROW, W_BYTES = 64 * ROW, STAGE = X_BYTES + W_BYTES;

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
        write(call, sums, staging + group * STAGING, block_row * 64, token, group);
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
