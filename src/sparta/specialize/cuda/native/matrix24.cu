// A 2:4 weight for many tokens on Hopper: y = finish(x W^T * scales + bias) + residual by the sparse matrix instructions
// of a warpgroup (wgmma.sp).
//
// Blocks of threads stay and walk over tiles of 64 * GROUPS * EACH outputs and TOKENS tokens. One thread has the copy
// engine fetch what is next: STAGES times DEPTH steps of the input channels, the weight of all outputs by one copy. Each of
// GROUPS warpgroups multiplies EACH times 64 outputs.
// Either the blocks of a cluster compute neighbouring outputs of the same tokens, and each fetches a part of x for all of
// them; or SPLIT blocks share the steps of one tile, and in the end each gets the sums of the others for some of the tokens
// and adds them to its own, in a fixed order. The weight lies in memory as the instruction wants it in shared memory, see
// cuda_24_matrix_layout.py.
//
// Compile-time numbers: IS_HALF, ACTIVATION, FORMAT (0: 16 bits, 1: fp8 with scales of tokens and outputs), RESIDUAL
// (whether there is one), TOKENS, GROUPS, EACH, BESIDE (blocks that fetch x for each other), SPLIT, CLUSTER (the larger of
// both), STAGES, DEPTH, CTAS (blocks on a multiprocessor).
#include "few_tokens.cuh"
#include "warpgroup.cuh"
#include "warpgroup24.cuh"

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int ROW = 128;                               // bytes of a token in a step
constexpr int X_BYTES = TOKENS * ROW;                  // of a step
constexpr int W_BYTES = PANELS + META_BYTES;           // of a step of 64 outputs
constexpr int PIECES = GROUPS * EACH;                  // slabs of 64 outputs of a block
constexpr int FETCHED = DEPTH * (X_BYTES + PIECES * W_BYTES); // of a stage
constexpr int STAGE = (FETCHED + 1023) / 1024 * 1024;
constexpr int CHUNK = TOKENS < 64 ? TOKENS : 64;       // tokens that are written at once
// Whether a settled weight is asked for before x: with many tokens, the first multiplications would wait for x behind it.
constexpr bool WEIGHT_FIRST = TOKENS < 128;
constexpr int UNIT = 16, UNITS = TOKENS / UNIT;        // tokens whose sums are written together
constexpr int MOST_UNITS = (UNITS + SPLIT - 1) / SPLIT; // of one block
__device__ constexpr int first_unit(int rank) { return UNITS * rank / SPLIT; }
constexpr int PITCH = 64 * 2 + 16;                     // bytes between tokens
constexpr int STAGING = CHUNK * PITCH + TOKENS * 4;    // of a warpgroup: results and the scales of tokens
static_assert(BESIDE == 1 || SPLIT == 1, "blocks either fetch x for each other or share its steps");
static_assert(DEPTH <= 2, "one step at most is left where they do not fill a stage");
static_assert(SPLIT == 1 || SPLIT * PIECES * MOST_UNITS * 4096 <= STAGES * STAGE, "sums of parts lie where the ring was");

struct Call {
    alignas(64) unsigned char x_map[128];
    alignas(64) unsigned char w_map[128]; // of the weight as (slabs of 64 outputs, steps * W_BYTES / LINE, LINE)
    const unsigned char* weight;
    const float* scales;         // of outputs
    const float* x_scales;       // of tokens
    const u16* bias;
    const u16* residual;
    u16* y;
    int tokens, outputs, slabs, steps, token_tiles, columns, group; // columns: tiles of outputs
    int settled; // whether the weight is older than the kernels before this one
};

// Which outputs and tokens a tile of the cluster has: `group` tiles of tokens are worked on before the next ones.
struct Place {
    int slab, token;
    __device__ __forceinline__ Place(const Call& call, int tile, int rank) {
        const int whole = call.group * call.columns, before = call.token_tiles > call.group ? tile / whole : 0;
        const int inside = tile - before * whole, height = min(call.token_tiles - before * call.group, call.group);
        const int column = height > 1 ? inside / height : inside;
        token = (before * call.group + inside - column * height) * TOKENS;
        slab = (column * BESIDE + (BESIDE > 1 ? rank : 0)) * PIECES;
    }
};

// The tiles of a cluster, one after another.
struct Tiles {
    const Call& call;
    int rank, tile;
    Place place;

    // Finds the first one: before this kernel waits for anything, as divisions take their time.
    __device__ __forceinline__ Tiles(const Call& given, int rank)
        : call(given), rank(rank), tile(blockIdx.x / CLUSTER), place(given, blockIdx.x / CLUSTER, rank) {
        asm volatile("" : "+r"(place.slab), "+r"(place.token));
    }

    __device__ __forceinline__ bool left() const { return tile < call.token_tiles * call.columns; }

    __device__ __forceinline__ void next() {
        tile += gridDim.x / CLUSTER;
        if (left()) place = Place(call, tile, rank);
    }
};

// The steps of one block: all, or its part of them.
struct Steps {
    int begin, end;
    __device__ __forceinline__ Steps(const Call& call, int rank)
        : begin(SPLIT > 1 ? call.steps * rank / SPLIT : 0), end(SPLIT > 1 ? call.steps * (rank + 1) / SPLIT : call.steps) {}
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

// Has the cache fetch the weight of a block's first steps: only the cache is filled, so what is still written to it is seen.
__device__ __forceinline__ void fetch_early(const Call& call, const Tiles& tiles) {
    know_map(call.w_map);
    know_map(call.x_map);
    const Steps steps(call, tiles.rank);
    const int slab = tiles.place.slab, count = min(steps.end - steps.begin, STAGES * DEPTH);
    if (count <= 0 || (WEIGHT_FIRST && call.settled)) return; // a settled weight goes into the ring at once
    for (int piece = slab; piece < min(slab + PIECES, call.slabs); ++piece)
        ask_early(call.weight + ((long long)piece * call.steps + steps.begin) * W_BYTES, count * W_BYTES);
}

// Asks for the weight of a stage, whose barrier waits for x as well.
__device__ __forceinline__ void fetch_weight(const Call& call, const Place& place, int step, u32 stage, u32 done) {
    if (PIECES == 1) { // its steps stand side by side, and a plain copy is a little faster
        const u32 bytes = min(DEPTH, call.steps - step) * W_BYTES;
        expect(done, DEPTH * X_BYTES + bytes);
        copy(stage + DEPTH * X_BYTES, call.weight + ((long long)place.slab * call.steps + step) * W_BYTES, bytes, done);
    } else {
        expect(done, FETCHED);
        copy_panels(stage + DEPTH * X_BYTES, call.w_map, step * (W_BYTES / LINE), place.slab, done);
    }
}

// What is fetched beyond the last step is not multiplied.
__device__ __forceinline__ void fetch(const Call& call, Tiles& tiles, u32 memory, u32 full, u32 empty) {
    const int part = BESIDE > 1 ? tiles.rank * (TOKENS / BESIDE) : 0;
    const Steps steps(call, tiles.rank);
    int ahead = 0; // stages whose weight was asked for before x
    if (WEIGHT_FIRST && call.settled) {
        for (int step = steps.begin; tiles.left() && step < steps.end && ahead < STAGES; step += DEPTH, ++ahead)
            fetch_weight(call, tiles.place, step, memory + ahead * STAGE, full + ahead * 8);
        wait_for_last();
    }
    Ring ring;
    for (; tiles.left(); tiles.next()) {
        const Place place = tiles.place;
        for (int step = steps.begin; step < steps.end; step += DEPTH, ring.next()) {
            const u32 stage = memory + ring.stage * STAGE, done = full + ring.stage * 8;
            if (ahead > 0) {
                --ahead;
            } else {
                wait(empty + ring.stage * 8, ring.phase ^ 1);
                fetch_weight(call, place, step, stage, done);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                copy_box(stage + d * X_BYTES + part * ROW, call.x_map, (step + d) * (ROW / ITEM), place.token + part, done);
        }
    }
}

// Scales, adds and writes the sums of 64 outputs and the tokens of this block; `sums_of` gives those of its units of tokens.
template <class SumsOf>
__device__ __forceinline__ void write(const Call& call, SumsOf sums_of, u32 staging, int first_output, int first_token,
                                      int group, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
    const int output = first_output + warp * 16 + lane / 4;
    const int begin = SPLIT > 1 ? first_unit(rank) : 0, end = SPLIT > 1 ? first_unit(rank + 1) : UNITS;
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
    for (int chunk = 0; chunk < MOST_UNITS; chunk += CHUNK / UNIT) {
        const int of_chunk = first_token + (begin + chunk) * UNIT; // its first token
        if (of_chunk >= call.tokens) break;
        float all[CHUNK / UNIT][8];
#pragma unroll
        for (int u = 0; u < CHUNK / UNIT && chunk + u < MOST_UNITS; ++u)
            if (begin + chunk + u < end) sums_of(chunk + u, all[u]);
#pragma unroll
        for (int u = 0; u < CHUNK / UNIT && chunk + u < MOST_UNITS; ++u) {
            if (begin + chunk + u >= end) break;
            const float(&sums)[8] = all[u];
            u32 pairs[4];
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const int h = p % 2;
                [[maybe_unused]] const int token = of_chunk + u * UNIT + p / 2 * 8 + lane % 4 * 2;
                u16 bits[2];
#if FORMAT
                const float2 of_tokens = read8(scales + (token - first_token) * 4);
#endif
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    float value = sums[p / 2 * 4 + h * 2 + t];
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
            const int row = u * UNIT + lane / 16 * 8 + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
            store_transposed(staging + row * PITCH + column * 2, pairs);
        }
        meet(group);
#pragma unroll
        for (int pass = 0; pass < CHUNK / UNIT && chunk + pass < MOST_UNITS; ++pass) {
            const int row = pass * UNIT + thread / 8, n = first_output + thread % 8 * 8;
            if (begin + chunk + pass < end && of_chunk + row < call.tokens && n < call.outputs)
                *reinterpret_cast<uint4*>(call.y + (long long)(of_chunk + row) * call.outputs + n) =
                    read16(staging + row * PITCH + thread % 8 * 16);
        }
        meet(group);
    }
}

typedef float Sums[EACH][TOKENS / 2]; // of a thread
typedef Selectors Places[EACH][DEPTH]; // of a stage

// One warpgroup's way through the ring.
struct Consumer {
    const Call& call;
    u32 memory, full, empty;
    int group, lane;
    Ring ring;
    u32 before; // the barrier of the stage whose multiplications may still run

    // Multiplies COUNT steps of a stage. Their places go to `mine`; those of the stage before are in `others`.
    template <int COUNT>
    __device__ __forceinline__ void multiply_stage(Sums& sums, Places& mine, const Places& others, int adds) {
        const u32 x = memory + ring.stage * STAGE, w = x + DEPTH * X_BYTES + group * EACH * DEPTH * W_BYTES;
        wait(full + ring.stage * 8, ring.phase);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int d = 0; d < COUNT; ++d)
                mine[e][d].load(w + (e * DEPTH + d) * W_BYTES + PANELS, threadIdx.x % 128);
        begin_multiplying();
#pragma unroll
        for (int d = 0; d < COUNT; ++d) {
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const u32 values = w + (e * DEPTH + d) * W_BYTES;
                multiply<0>(sums[e], values, x + d * X_BYTES, mine[e][d], d ? 1 : adds);
                multiply<1>(sums[e], values, x + d * X_BYTES, mine[e][d], 1);
            }
        }
        end_multiplying();
        wait_multiplied<1>(); // for the stage before
        keep(others);
        __syncwarp(); // all lanes have read their places before one of them gives the stage back
        if (before && lane < BESIDE) arrive(before, lane);
        before = empty + ring.stage * 8;
        ring.next();
    }

    __device__ __forceinline__ void keep(const Places& places) const {
#pragma unroll
        for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) places[e][d].keep(memory, call.tokens);
    }

    // Multiplies all steps of a tile.
    __device__ __forceinline__ void multiply_tile(Sums& sums, const Steps& steps) {
        Places even, odd;
        before = 0;
        for (int step = steps.begin; step + DEPTH <= steps.end; step += 2 * DEPTH) {
            multiply_stage<DEPTH>(sums, even, odd, step > steps.begin);
            if (step + 2 * DEPTH <= steps.end) multiply_stage<DEPTH>(sums, odd, even, 1);
        }
        end_stages(even, odd);
        if (DEPTH > 1 && (steps.end - steps.begin) % DEPTH) {
            multiply_stage<1>(sums, even, odd, steps.end - steps.begin > 1);
            end_stages(even, odd);
        }
    }

    // Waits for all that is multiplied, and gives the last stage back.
    __device__ __forceinline__ void end_stages(const Places& even, const Places& odd) {
        wait_multiplied<0>();
        keep(even);
        keep(odd);
        __syncwarp();
        if (before && lane < BESIDE) arrive(before, lane);
        before = 0;
    }
};

#if SPLIT > 1
// Where a block has what block `from` gave it of a slab and of a unit of its tokens, for this thread.
__device__ __forceinline__ u32 given_by(u32 memory, int from, int slab, int unit) {
    return memory + (((from * PIECES + slab) * MOST_UNITS + unit) * 256 + threadIdx.x % 128) * 16;
}

// Gives the other blocks of the cluster the sums of their tokens, into the place of their rings; 0 if it had no steps.
__device__ __forceinline__ void give(const Sums& sums, bool any, u32 memory, int group, int rank) {
#pragma unroll
    for (int q = 0; q < SPLIT; ++q) {
        if (q == rank) continue;
#pragma unroll
        for (int unit = first_unit(q); unit < first_unit(q + 1); ++unit)
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const u32 to = given_by(memory, rank, group * EACH + e, unit - first_unit(q));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* four = sums[e] + unit * 8 + half * 4;
                    write16_there(to + half * 2048, q,
                                  any ? make_float4(four[0], four[1], four[2], four[3]) : make_float4(0.f, 0.f, 0.f, 0.f));
                }
            }
    }
}

// A unit of this block's tokens: its own sums, and then those of the others in their order.
__device__ __forceinline__ void add_given(float (&total)[8], const float (&sums)[TOKENS / 2], bool any, u32 memory,
                                          int slab, int unit, int rank) {
#pragma unroll
    for (int q = 0; q < SPLIT; ++q)
        if (q == rank && first_unit(q) + unit < first_unit(q + 1)) {
#pragma unroll
            for (int i = 0; i < 8; ++i) total[i] = any ? sums[(first_unit(q) + unit) * 8 + i] : 0.f;
        }
#pragma unroll
    for (int q = 0; q < SPLIT; ++q) {
        if (q == rank) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 more = read16(given_by(memory, q, slab, unit) + half * 2048);
            total[half * 4] += __uint_as_float(more.x);
            total[half * 4 + 1] += __uint_as_float(more.y);
            total[half * 4 + 2] += __uint_as_float(more.z);
            total[half * 4 + 3] += __uint_as_float(more.w);
        }
    }
}
#endif

__device__ __forceinline__ void compute(const Call& call, Tiles& tiles, u32 memory, u32 full, u32 empty, u32 staging) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, rank = tiles.rank;
    const Steps steps(call, rank);
    Consumer consumer{call, memory, full, empty, group, lane, Ring(), 0};
    Sums sums;
    for (; tiles.left(); tiles.next()) {
        const Place place = tiles.place;
        consumer.multiply_tile(sums, steps);
#if SPLIT > 1
        const bool any = steps.begin < steps.end;
        __syncwarp(); // barriers of clusters count warps whose lanes come together
        meet_cluster(); // all have read their rings; there is one tile for each cluster
        give(sums, any, memory, group, rank);
        meet_cluster();
#endif
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const auto sums_of = [&](int unit, float (&into)[8]) {
#if SPLIT > 1
                add_given(into, sums[e], any, memory, group * EACH + e, unit, rank);
#else
#pragma unroll
                for (int i = 0; i < 8; ++i) into[i] = sums[e][unit * 8 + i];
#endif
            };
            write(call, sums_of, staging + group * STAGING, (place.slab + group * EACH + e) * 64, place.token, group, rank);
        }
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
    Tiles tiles(call, CLUSTER > 1 ? blockIdx.x % CLUSTER : 0);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(full + s * 8, 1);
            make_barrier(empty + s * 8, BESIDE * GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x == CONSUMERS) fetch_early(call, tiles);
#if BESIDE > 1
    meet_cluster();
#else
    __syncthreads();
#endif
    let_next_begin();
    if (!WEIGHT_FIRST || !call.settled || threadIdx.x < CONSUMERS) wait_for_last();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers();
        if (threadIdx.x == CONSUMERS) fetch(call, tiles, memory, full, empty);
        __syncwarp();
#if SPLIT > 1
        meet_cluster();
        meet_cluster();
#endif
    } else {
        more_registers();
        compute(call, tiles, memory, full, empty, staging);
    }
#if BESIDE > 1
    leave_cluster(); // others still copy into this block's memory and arrive at its barriers
#endif
}
