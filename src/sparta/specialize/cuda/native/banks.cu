// y = activation(x W^T + bias) + residual for an unstructured weight and very few tokens; no two lanes meet in a bank.
//
// x waits in shared memory, cut into 32 runs of neighbouring inputs, and each run stands in one bank. Lane b of every
// warp only ever looks into run b: it multiplies the live values of one output in that run, a strip, and 32 strips of
// about the same length, one of each run, make a task of a warp. Which outputs they belong to does not matter, so strips
// are sorted by length and hardly anything is added to make them equal. A position in a run is a byte: it is stored as it
// is where little is live, else as distances of half a byte, eight of which one multiplication adds up. What a warp
// reads lies in one piece of memory. It comes by bulk copies into STAGES places of DEPTH pieces each in shared memory,
// which keeps many bytes on their way; or, with STAGES of 0, into registers, and is then asked for before the kernel ahead
// has ended: only the L2 cache is filled by that, so what that kernel still writes is seen. Where pieces begin is looked up
// before that one has ended in any case. Sums of strips meet in shared memory and are added in a fixed order. What is
// needed only at the end is loaded at the begin and waited for at the end. See linear/cuda_banks_layout.py for the layout.
//
// Compile-time numbers: TOKENS, WARPS, TASKS, DEPTH, NIBBLES, CTAS, STAGES, SEGMENTS, RUN, IS_HALF, ACTIVATION, FORMAT
// (0: 16 bits, 1: fp8 e4m3, 2: int8).

#define CLUSTER 1
#include "few_tokens.cuh"
#include "bulk.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int ROWS = WARPS * TASKS;                     // outputs of a block
constexpr int STRIPS = ROWS * SEGMENTS;                 // of each run, in a block
constexpr int TURNS = TASKS * SEGMENTS;                 // tasks of a warp
constexpr int STEP = NIBBLES ? 8 : 4;                   // live values of a piece
constexpr int VALUE_WORDS = STEP / (FORMAT ? 4 : 2);
constexpr int PIECE = 32 * 4 * (1 + VALUE_WORDS);       // bytes: a word of positions and the values, for each lane
constexpr int PLANES = (TOKENS + 1) / 2;                // words of an input: one token as a float, or two as they are
constexpr int BANKS = 128;                              // bytes of all banks
constexpr int PLANE = SEGMENTS * RUN * BANKS;           // bytes
constexpr int PITCH = 33;                               // of sums of strips: keeps those of a row in different banks
static_assert(TURNS <= 32, "a lane holds the end of a task");
static_assert(TASKS <= 32, "a thread has what one output needs");
constexpr int ADDERS = 8;                               // lanes that add up the strips of an output
// Pieces whose inputs are looked up before the first of them is multiplied.
constexpr int MANY = NIBBLES ? 2 : 4, BATCH = PLANES == 1 && SEGMENTS == 1 && DEPTH % MANY == 0 ? MANY : 1;
// Shared memory: x, the places for pieces, owners of strips, barriers, what results need, sums of strips.
constexpr int STAGE = DEPTH * PIECE;
constexpr int RING_AT = PLANES * PLANE;
constexpr int OWNERS_AT = RING_AT + WARPS * STAGES * STAGE;
constexpr int BARRIERS_AT = OWNERS_AT + STRIPS * 32;
constexpr int OUTPUTS_AT = BARRIERS_AT + WARPS * STAGES * 8;
constexpr int SUMS_AT = OUTPUTS_AT + ROWS * 12;

struct Call {
    const u16* x;
    const unsigned char* pieces;
    const int* index;            // (blocks, WARPS) first pieces; (blocks, WARPS, TURNS) ends of tasks in the pieces of their
                                 // warp; (blocks, ROWS) outputs
    const unsigned char* owners; // (blocks, WARPS, TURNS, 32): the strip of a lane, output * SEGMENTS + segment
#if FORMAT
    const float* scales;
#endif
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, blocks;
    int settled; // whether the weight is older than the kernels before this one
};

// Live values of one lane and where their inputs are.
struct Piece {
    u32 positions, values[VALUE_WORDS];

    // `at` points to the lane's positions in a piece, `values_at` to its values.
    __device__ __forceinline__ void load(const unsigned char* at, const unsigned char* values_at) {
#if FORMAT && !NIBBLES
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                     : "=r"(positions), "=r"(values[0])
                     : "l"(at));
#else
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(positions) : "l"(at));
#if FORMAT == 0 && NIBBLES
        const uint4 all = stream16(values_at);
        values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
#else
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                     : "=r"(values[0]), "=r"(values[1])
                     : "l"(values_at));
#endif
#endif
    }

    // The same from shared memory; `from`: where the piece is.
    __device__ __forceinline__ void take(u32 from, int lane) {
#if FORMAT && !NIBBLES
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(positions), "=r"(values[0]) : "r"(from + lane * 8) : "memory");
#else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(positions) : "r"(from + lane * 4) : "memory");
#if FORMAT == 0 && NIBBLES
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                     : "r"(from + 128 + lane * 16)
                     : "memory");
#else
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                     : "=r"(values[0]), "=r"(values[1])
                     : "r"(from + 128 + lane * 8)
                     : "memory");
#endif
#endif
    }
};

// Byte `which` of four, times the bytes of a row of banks, plus `base`.
__device__ __forceinline__ u32 address(u32 bytes, int which, u32 base) {
    u32 value;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(value) : "r"(bytes), "r"(BANKS << (8 * which)), "r"(base));
    return value;
}

// Where the inputs of a piece are. `last`: the position of the value before, in all four bytes; `base`: where position 0
// of this lane's run is.
__device__ __forceinline__ void locate(u32 (&places)[STEP], const Piece& piece, u32& last, u32 base) {
#if NIBBLES
    const u32 even = piece.positions & 0x0f0f0f0f, odd = piece.positions >> 4 & 0x0f0f0f0f;
    const u32 first = (even + odd) * 0x01010100 + (even + last), second = first + odd;
    last = __byte_perm(second, 0, 0x3333);
#pragma unroll
    for (int i = 0; i < STEP; ++i) places[i] = address(i % 2 ? second : first, i / 2, base);
#else
#pragma unroll
    for (int i = 0; i < STEP; ++i) places[i] = address(piece.positions, i, base);
#endif
}

// Looks up the inputs of a piece.
__device__ __forceinline__ void look(u32 (&words)[PLANES][STEP], const Piece& piece, u32& last, u32 base) {
    u32 places[STEP];
    locate(places, piece, last, base);
#pragma unroll
    for (int i = 0; i < STEP; ++i)
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane)
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[plane][i]) : "r"(places[i] + plane * PLANE));
}

// Adds the values of a piece times their inputs of all tokens; two sums for each token shorten the wait for the last one.
__device__ __forceinline__ void add(float (&sums)[2][TOKENS], const Piece& piece, const u32 (&words)[PLANES][STEP]) {
#pragma unroll
    for (int i = 0; i < STEP; ++i) {
        const float2 both = two_values(piece.values, i / 2);
        const float value = i % 2 ? both.y : both.x;
#if TOKENS == 1
        sums[i % 2][0] = fmaf(value, __uint_as_float(words[0][i]), sums[i % 2][0]);
#else
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const u32 word = words[plane][i];
            sums[i % 2][2 * plane] = fmaf(value, to_float((u16)word), sums[i % 2][2 * plane]);
            sums[i % 2][2 * plane + 1] = fmaf(value, to_float((u16)(word >> 16)), sums[i % 2][2 * plane + 1]);
        }
#endif
    }
}

// Copies x; inputs and tokens beyond the last are 0. A lane writes to its own bank.
__device__ __forceinline__ void fetch(const Call& call, unsigned char* memory, int first_token) {
    for (int piece = threadIdx.x; piece < 4 * RUN * SEGMENTS; piece += THREADS) {
        const int bank = piece % 32, row = piece / 32 * 8;
        const int input = (row / RUN * 32 + bank) * RUN + row % RUN;
        u32 words[2 * PLANES][4] = {};
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
            if (first_token + t < call.tokens && input < call.inputs) {
                const uint4 x = *reinterpret_cast<const uint4*>(call.x + (first_token + t) * call.x_stride + input);
                words[t][0] = x.x, words[t][1] = x.y, words[t][2] = x.z, words[t][3] = x.w;
            }
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                unsigned char* to = memory + plane * PLANE + (row + i) * BANKS + bank * 4;
                const u32 one = words[2 * plane][i / 2] >> (i % 2 * 16) & 0xffff;
#if TOKENS == 1
                *reinterpret_cast<float*>(to) = to_float((u16)one);
#else
                const u32 two = words[2 * plane + 1][i / 2] >> (i % 2 * 16) & 0xffff;
                *reinterpret_cast<u32*>(to) = one | two << 16;
#endif
            }
    }
}

// What results need beside their sums: outputs and, of each, scale and bias. A thread loads them for one output of the
// block, and lays them into shared memory when its strips are done: nobody waits for them.
struct Endings {
    int output = -1; // none
    float scale = 0.f, bias = 0.f;

    __device__ __forceinline__ void load(const Call& call, const int* from) {
        if (threadIdx.x >= ROWS) return;
        output = __ldg(from + threadIdx.x);
#if FORMAT
        scale = output < 0 ? 0.f : call.scales[output];
#endif
        bias = output < 0 || !call.bias ? 0.f : to_float(call.bias[output]);
    }

    __device__ __forceinline__ void lay(unsigned char* shared) const {
        if (threadIdx.x >= ROWS) return;
        reinterpret_cast<int*>(shared + OUTPUTS_AT)[threadIdx.x] = output;
        reinterpret_cast<float*>(shared + OUTPUTS_AT)[ROWS + threadIdx.x] = scale;
        reinterpret_cast<float*>(shared + OUTPUTS_AT)[2 * ROWS + threadIdx.x] = bias;
    }
};

// Adds up the strips of each output, 8 lanes for one of them, and writes the results.
__device__ __forceinline__ void write(const Call& call, const unsigned char* shared, int first_token) {
    const int* outputs = reinterpret_cast<const int*>(shared + OUTPUTS_AT);
    const float* scales = reinterpret_cast<const float*>(outputs + ROWS);
    const float* partials = reinterpret_cast<const float*>(shared + SUMS_AT);
    const int part = threadIdx.x % ADDERS;
    for (int i = threadIdx.x / ADDERS; i < (TOKENS * ROWS + 3) / 4 * 4; i += THREADS / ADDERS) {
        const int t = i / ROWS, row = i % ROWS;
        float total = 0.f;
        if (t < TOKENS) {
#pragma unroll
            for (int strip = 0; strip < SEGMENTS * 32 / ADDERS; ++strip) {
                const int segment = strip / (32 / ADDERS), run = part * (32 / ADDERS) + strip % (32 / ADDERS);
                total += partials[(t * STRIPS + row * SEGMENTS + segment) * PITCH + run];
            }
        }
#pragma unroll
        for (int far = ADDERS / 2; far; far /= 2) total += __shfl_xor_sync(0xffffffff, total, far);
        if (t >= TOKENS || part) continue;
        const int token = first_token + t, output = outputs[row];
        if (token >= call.tokens || output < 0) continue;
#if FORMAT
        total *= scales[row];
#endif
        if (call.bias) total += scales[ROWS + row];
        total = finish(total);
        const long long here = (long long)token * call.outputs + output;
        if (call.residual) total += to_float(call.residual[here]);
        call.y[here] = to_bits(total);
    }
}

// The pieces of one warp in their order, DEPTH at a time.
struct Pieces {
    Piece ring[DEPTH];
#if STAGES
    const unsigned char* from; // what is copied next
    u32 places, barriers, stage, parity;
    int left; // pieces that are not asked for yet
    int lane;

    __device__ __forceinline__ void ask() {
        const int some = min(left, DEPTH);
        if (lane == 0) {
            expect(barriers + stage * 8, some * PIECE);
            copy(places + stage * STAGE, from, some * PIECE, barriers + stage * 8);
        }
        from += STAGE, left -= some;
    }

    __device__ __forceinline__ Pieces(const unsigned char* pieces, int count, u32 base, int warp, int lane)
        : from(pieces), places(base + RING_AT + warp * STAGES * STAGE), barriers(base + BARRIERS_AT + warp * STAGES * 8),
          stage(0), parity(0), left(count), lane(lane) {
        if (lane < STAGES) prepare_barrier(barriers + lane * 8);
        barriers_prepared();
        __syncwarp();
    }

    __device__ __forceinline__ void begin() {
        for (stage = 0; stage < STAGES; ++stage)
            if (left > 0) ask();
        stage = 0;
    }

    // Takes the next pieces into `ring`, and asks for those that come into their place.
    __device__ __forceinline__ void next() {
        wait(barriers + stage * 8, parity);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) ring[d].take(places + stage * STAGE + d * PIECE, lane);
        __syncwarp();
        if (left > 0) ask();
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
#else
    const unsigned char *at, *values_at; // of this lane
    int left;

    __device__ __forceinline__ Pieces(const unsigned char* pieces, int count, u32, int, int lane)
        : at(pieces + lane * (FORMAT && !NIBBLES ? 8 : 4)), values_at(pieces + 128 + lane * (4 * VALUE_WORDS)), left(count) {}

    __device__ __forceinline__ void load(int d) {
        if (left > 0) ring[d].load(at, values_at);
        at += PIECE, values_at += PIECE, --left;
    }

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) load(d);
    }

    __device__ __forceinline__ void next() {}
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) banks(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_token = blockIdx.y * TOKENS;
    const int which = blockIdx.x * WARPS + warp;
    const int* ends = call.index + call.blocks * WARPS;
    const int end_of = lane < TURNS ? __ldg(ends + which * TURNS + lane) : 0; // where task `lane` ends
    const unsigned char* mine = call.pieces + (long long)__ldg(call.index + which) * PIECE;
    const int count = __shfl_sync(0xffffffff, end_of, TURNS - 1);
#if __CUDA_ARCH__ >= 900 && !STAGES
    if (lane == 0) ask_early(mine, count * PIECE);
#endif
    const u32 base_of_all = (u32)__cvta_generic_to_shared(shared);
    Pieces pieces(mine, count, base_of_all, warp, lane);

    let_next_begin();
    if (!call.settled) wait_for_last(); // where values are is older in any case
    pieces.begin();
    const uint4* owned = reinterpret_cast<const uint4*>(call.owners + (long long)blockIdx.x * STRIPS * 32);
    for (int i = threadIdx.x; i < STRIPS * 2; i += THREADS)
        reinterpret_cast<uint4*>(shared + OWNERS_AT)[i] = __ldg(owned + i);
    wait_for_last();
    Endings endings;
    endings.load(call, ends + call.blocks * (WARPS * TURNS) + blockIdx.x * ROWS);
    fetch(call, shared, first_token);
    __syncthreads();

    u32 run = base_of_all + lane * 4;
    asm volatile("" : "+r"(run)::"memory"); // no look into x before it is there
    const unsigned char* owners = shared + OWNERS_AT + warp * TURNS * 32 + lane;
    float* partials = reinterpret_cast<float*>(shared + SUMS_AT) + lane;
    float sums[2][TOKENS] = {};
    int number = 0, owner = owners[0];
    u32 last = 0, base = run + owner % SEGMENTS * (RUN * BANKS);
    for (int first = 0; first < count; first += DEPTH) {
        pieces.next();
        const u32 ahead = end_of - 1 - first; // pieces to the last one of task `lane`
        const u32 ends = __reduce_or_sync(0xffffffff, lane < TURNS && ahead < DEPTH ? 1u << ahead : 0u);
#pragma unroll
        for (int d = 0; d < DEPTH; d += BATCH) {
            Piece piece[BATCH];
            u32 words[BATCH][PLANES][STEP];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                piece[b] = pieces.ring[d + b];
                if (first + d + b >= count) piece[b].positions = 0; // beyond the last piece: sums that nobody stores
#if !STAGES
                pieces.load(d + b);
#endif
                look(words[b], piece[b], last, base);
                if (ends >> (d + b) & 1) last = 0;
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                add(sums, piece[b], words[b]);
                if (ends >> (d + b) & 1) {
#pragma unroll
                    for (int t = 0; t < TOKENS; ++t) {
                        partials[(t * STRIPS + owner) * PITCH] = sums[0][t] + sums[1][t];
                        sums[0][t] = sums[1][t] = 0.f;
                    }
                    owner = ++number < TURNS ? owners[number * 32] : 0;
                    base = run + owner % SEGMENTS * (RUN * BANKS);
                }
            }
        }
    }
    endings.lay(shared);
    __syncthreads();
    write(call, shared, first_token);
}
