// A weight of kept blocks and few inputs for many tokens on Hopper: y = finish(x W^T + bias) + residual by the matrix
// instructions of a warpgroup (wgmma).
//
// A block of threads keeps TOKENS tokens of x, with all their inputs, in shared memory, and walks over its share of the
// block rows, so that from the L2 cache come kept blocks only: 8 KB each, where their columns of x for 256 tokens are 32
// KB. Pieces of x are waited for one by one, those of the first block row come first. GROUPS warpgroups take block rows in
// turn: while one writes its results, the others multiply. Blocks of a cluster (BESIDE) have different tokens and the same
// block rows, and each fetches a part of a kept block for all of them.
//
// Compile-time numbers: IS_HALF, ACTIVATION, RESIDUAL (whether there is one), TOKENS, GROUPS, STAGES (kept blocks on their
// way), CHUNK (tokens whose results are written at once), BESIDE, CLUSTER (the same), FORMAT (0), ROW (128).
#include "few_tokens.cuh"
#include "warpgroup.cuh"
#include "block_tiles.cuh"

constexpr int WIDTH = 64; // inputs of a piece of x and of a kept block
constexpr int PIECE = TOKENS * ROW, STAGE = 64 * ROW, PIECES = 16;

struct Call {
    alignas(64) unsigned char x_map[128];
    alignas(64) unsigned char w_map[128];
    const int* columns;     // of kept blocks: their first input
    const int4* schedule;   // of block rows: their number, first step, end of steps, first column; long ones first
    const u16* bias;
    const u16* residual;
    u16* y;
    int tokens, outputs, block_rows, shares, pieces;
    int settled; // whether the weight is older than the kernels before this one
};

// Where everything lies in shared memory.
struct Places {
    u32 x, ring, staging, full, empty, turns, arrived, pieces;

    __device__ __forceinline__ Places(u32 memory, int count) : x(memory) {
        ring = x + count * PIECE;
        staging = ring + STAGES * STAGE;
        full = staging + GROUPS * STAGING;
        empty = full + STAGES * 8;
        turns = empty + STAGES * 8;
        arrived = turns + GROUPS * 8;
        pieces = arrived + PIECES * 8;
    }
};

// Walks over the block rows of this block of threads; every other round goes backwards, so that who had a long row gets a
// short one.
struct Rows {
    const Call& call;
    int share, round = 0, at = 0;
    int4 row;

    __device__ __forceinline__ Rows(const Call& given) : call(given), share((int)blockIdx.x / BESIDE % given.shares) {
        find();
    }

    __device__ __forceinline__ bool left() const { return at < call.block_rows; }

    __device__ __forceinline__ void next() {
        ++round;
        find();
    }

    __device__ __forceinline__ void find() {
        at = round * call.shares + (round % 2 ? call.shares - 1 - share : share);
        if (left()) row = __ldg(call.schedule + at);
    }
};

__device__ __forceinline__ int first_token(const Call& call) {
    const int block = blockIdx.x, tile = block / (BESIDE * call.shares) * BESIDE + block % BESIDE;
    return tile * TOKENS;
}

__device__ __forceinline__ void write_word(u32 to, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u32 read_word(u32 from) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

// The pieces of x in the order in which they are fetched, four bits each, told by a whole warp.
__device__ __forceinline__ u64 order_of_pieces(const Call& call) {
    const Rows rows(call);
    const int steps = rows.left() ? min(rows.row.z - rows.row.y, PIECES) : 0, lane = threadIdx.x % 32;
    const int mine = lane < steps ? __ldg(call.columns + rows.row.y + lane) / WIDTH : 0;
    u64 order = 0;
    u32 seen = 0;
    int count = 0;
    for (int i = 0; i < steps; ++i, ++count) {
        const int piece = __shfl_sync(0xffffffffu, mine, i);
        order |= (u64)piece << (4 * count);
        seen |= 1u << piece;
    }
    for (int piece = 0; piece < call.pieces; ++piece)
        if (!(seen >> piece & 1)) order |= (u64)piece << (4 * count++);
    return order;
}

__device__ __forceinline__ void fetch_x(const Call& call, const Places& places, u64 order) {
    wait_for_last();
    const int token = first_token(call);
    for (int i = 0; i < call.pieces; ++i, order >>= 4) {
        const int piece = (int)(order & 15);
        const u32 done = places.arrived + piece * 8;
        expect(done, PIECE);
        copy_own_box(places.x + piece * PIECE, call.x_map, piece * WIDTH, token, done);
    }
}

__device__ __forceinline__ void fetch(const Call& call, const Places& places, u64 order) {
    constexpr int PART = 64 / BESIDE; // outputs of a kept block that this block of threads fetches for the cluster
    const int part = blockIdx.x % BESIDE * PART, early = call.settled ? STAGES : 0;
    int asked = 0;
    Ring ring;
    for (Rows rows(call); rows.left();) {
        const int end = rows.row.z;
        int step = rows.row.y, column = rows.row.w;
        rows.next(); // early, as it reads
        for (; step < end; ++step, ++asked, ring.skip(1)) {
            const int following = __ldg(call.columns + step + 1);
            const u32 done = places.full + ring.stage * 8;
            if (asked == early) fetch_x(call, places, order);
            wait(places.empty + ring.stage * 8, ring.phase ^ 1);
            write_word(places.pieces + ring.stage * 4, column / WIDTH);
            expect(done, STAGE);
            copy_box(places.ring + ring.stage * STAGE + part * ROW, call.w_map, 0, step * 64 + part, done);
            column = following;
        }
    }
    if (asked <= early) fetch_x(call, places, order);
    for (int piece = 0; piece < call.pieces; ++piece) wait(places.arrived + piece * 8, 0); // none may be on its way still
}

// A warpgroup may look into the ring only where all before has come: a barrier does not tell one turn of the ring from the
// next but one. So each lets the next one in when the last step of its block row is there.
__device__ __forceinline__ void compute(const Call& call, const Places& places) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, after = group + 1 == GROUPS ? 0 : group + 1;
    const int token = first_token(call);
    Ring ring;
    float sums[TOKENS / 2];
    int at = 0;
    u32 turn = 0;
    for (Rows rows(call); rows.left(); at = at + 1 == GROUPS ? 0 : at + 1) {
        const int steps = rows.row.z - rows.row.y, block_row = rows.row.x;
        const bool first = rows.round == 0;
        rows.next(); // early, as it reads
        if (at != group) {
            ring.skip(steps);
            continue;
        }
        if (!first) {
            wait(places.turns + group * 8, turn);
            turn ^= 1;
        }
        if (!steps && threadIdx.x % 128 == 0) arrive(places.turns + after * 8, blockIdx.x % BESIDE);
        u32 before = 0; // the barrier of the step whose multiplications may still run
        for (int step = 0; step < steps; ++step, ring.skip(1)) {
            wait(places.full + ring.stage * 8, ring.phase);
            if (step + 1 == steps && threadIdx.x % 128 == 0) arrive(places.turns + after * 8, blockIdx.x % BESIDE);
            const u32 piece = read_word(places.pieces + ring.stage * 4);
            const u32 w = places.ring + ring.stage * STAGE, x = places.x + piece * PIECE;
            wait(places.arrived + piece * 8, 0);
            begin_multiplying();
#pragma unroll
            for (int part = 0; part < ROW / 32; ++part) multiply(sums, w + part * 32, x + part * 32, step + part > 0);
            end_multiplying();
            wait_multiplied<1>(); // for the step before
            if (before && lane < BESIDE) arrive(before, lane);
            before = places.empty + ring.stage * 8;
        }
        wait_multiplied<0>();
        if (before && lane < BESIDE) arrive(before, lane);
        if (!steps) {
            asm volatile("" ::: "memory"); // a branch that is hardly ever taken, and not as many selections
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.f;
        }
        write(call, sums, places.staging + group * STAGING, block_row * 64, token, group);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        resident_blocks(const __grid_constant__ Call call) {
    extern __shared__ unsigned char raw[];
    const Places places((address_of(raw) + 1023) / 1024 * 1024, call.pieces);
    if (threadIdx.x == 0) {
        for (int g = 0; g < GROUPS; ++g) make_barrier(places.turns + g * 8, 1);
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(places.full + s * 8, 1);
            make_barrier(places.empty + s * 8, 4 * BESIDE);
        }
        for (int p = 0; p < PIECES; ++p) make_barrier(places.arrived + p * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_cluster();
    let_next_begin();
    if (threadIdx.x < CONSUMERS) wait_for_last();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers();
        if (threadIdx.x < CONSUMERS + 32) {
            const u64 order = order_of_pieces(call);
            if (threadIdx.x == CONSUMERS) fetch(call, places, order);
            __syncwarp();
        }
    } else {
        more_registers();
        compute(call, places);
    }
    leave_cluster(); // others still copy into this block's memory and arrive at its barriers
}
