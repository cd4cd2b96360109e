// y = activation(x W^T + bias) + residual for an unstructured weight and few tokens: each lane walks through live values of
// its own, and makes of them what the dense matrix unit takes.
//
// A warp owns SPAN inputs, and holds them in registers for all tokens: x is read once and takes part in no traffic after
// that. It multiplies SLABS slabs of 16 outputs by them, one after the other. The live values of what a lane owns of a slab
// stand in one bank of shared memory, one behind the other, and bits say which elements they are: an element that is live
// takes the value where the lane is, and the lane goes on; another is 0. Lanes go on at their own pace and still never meet
// in a bank. Values come by bulk copies into a ring of rows, one word for each lane; where lanes are so far apart that the
// ring could not hold it, packing lets them go on in the same row. Bits come from memory to registers. Inputs are ordered
// such that a lane's share of x is 16 bytes in a row. The ALONG warps that share outputs lay the sums of a slab into one of
// two boxes, and add up the slab before: they wait for each other only if one is a whole slab behind. Sums are added in a
// fixed order, in the block and over the cluster, so equal inputs give equal bits. See linear/cuda_lanes_layout.py for the
// layout.
//
// Compile-time numbers: TOKENS, GROUP (elements that a bit stands for), SPAN, SLABS, BESIDE (warps that have slabs of their
// own), ALONG (warps that share outputs), CLUSTER, STAGES, IS_HALF, ACTIVATION.

#include "few_tokens.cuh"
#include "bulk.cuh"

constexpr int WARPS = BESIDE * ALONG;
constexpr int THREADS = WARPS * 32;
constexpr int ROWS = BESIDE * SLABS * 16;         // outputs of a block
constexpr int PITCH = ROWS + 4;                   // of the block's sums: keeps those of a warp in different banks
constexpr int CHUNK = 64 * GROUP;                 // inputs for which a lane has a word of bits
constexpr int CHUNKS = SPAN / CHUNK;              // of a slab
constexpr int STEPS = CHUNK / 16;                 // multiplications of 16 inputs
constexpr int BITS = 32 / STEPS;                  // of a lane in a step
constexpr u32 ROW = 128;                          // bytes of a row of the ring
constexpr int COPY = 8;                           // rows that are copied at once
constexpr int RING = STAGES * COPY;               // rows; 8 more repeat the first ones, so that two steps read straight on
constexpr u32 WARP_BYTES = (RING + COPY) * ROW;
constexpr int BOX_PITCH = 20;                     // of the sums of a slab: keeps those of a warp in different banks
constexpr int BOX = TOKENS * BOX_PITCH;           // floats that a warp lays down
constexpr int MEETINGS_AT = WARPS * STAGES * 8;   // barriers of warps that share outputs, behind those of copies
constexpr int RINGS_AT = (MEETINGS_AT + BESIDE * 8 + 127) / 128 * 128;
constexpr int BOXES_AT = RINGS_AT + WARPS * WARP_BYTES;
constexpr int SUMS_AT = BOXES_AT + 2 * WARPS * BOX * 4;
static_assert(SPAN % CHUNK == 0, "a warp has whole chunks");

struct Call {
    const u16* x;
    const unsigned char* values; // rows of 128 bytes
    const u32* bits;             // (tiles, CLUSTER * ALONG, BESIDE, SLABS, CHUNKS, 32)
    const int2* marks;           // (tiles, ..., CHUNKS): rows that a chunk needs, and rows that are done with after it
    const int* firsts;           // (tiles, CLUSTER * ALONG, BESIDE) and the end: first rows
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, chunks;
};

__device__ __forceinline__ void multiply(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col." KINDS " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What a warp holds of x: of token lane / 4 (and those 8 further) a lane has 8 inputs in every 32, from 8 (lane % 4) on.
struct Held {
    u32 words[SPAN / 32][TOKENS / 8][4];

    __device__ __forceinline__ void load(const Call& call, int first_token, int first, int lane) {
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
            const int token = first_token + n * 8 + lane / 4;
            const u16* from = call.x + token * call.x_stride + first + lane % 4 * 8;
#pragma unroll
            for (int u = 0; u < SPAN / 32; ++u) {
                u32(&x)[4] = words[u][n];
                x[0] = x[1] = x[2] = x[3] = 0;
                if (token < call.tokens && first + u * 32 + lane % 4 * 8 < call.inputs)
                    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                                 : "l"(from + u * 32));
            }
        }
    }
};

// The rows of a warp: asked for in order, COPY at a time, into a ring.
struct Ring {
    const unsigned char* from; // what is asked for next
    u32 places, barriers;
    int left;                  // rows that are not asked for yet
    int asked, ready;          // copies
    u32 stage_asked, stage_ready, parity;

    __device__ __forceinline__ void ask(int lane) {
        const u32 bytes = min(left, COPY) * ROW, barrier = barriers + stage_asked * 8;
        if (lane == 0) {
            const bool first = stage_asked == 0;
            expect(barrier, first ? 2 * bytes : bytes);
            copy(places + stage_asked * (COPY * ROW), from, bytes, barrier);
            if (first) copy(places + RING * ROW, from, bytes, barrier);
        }
        from += COPY * ROW, left -= COPY, ++asked;
        if (++stage_asked == STAGES) stage_asked = 0;
    }

    // Asks for all that has a place when so many rows are done with.
    __device__ __forceinline__ void fill(int done, int lane) {
        while (left > 0 && (asked - STAGES + 1) * COPY <= done) ask(lane);
    }

    // Waits until so many rows are there.
    __device__ __forceinline__ void need(int rows) {
        while (ready * COPY < rows) {
            wait(barriers + stage_ready * 8, parity);
            ++ready;
            if (++stage_ready == STAGES) stage_ready = 0, parity ^= 1;
        }
    }
};

// Where a lane is: in the ring, for the halves of a register apart if a bit stands for one element.
struct Walk {
    u32 at[2];

    __device__ __forceinline__ void set(const Ring& ring, int row, int lane) {
        at[0] = ring.places + row % RING * ROW + lane * 4;
        at[1] = at[0] + 2;
    }

    __device__ __forceinline__ void around(const Ring& ring) {
        const u32 end = ring.places + RING * ROW;
#pragma unroll
        for (int i = 0; i < 3 - GROUP; ++i)
            if (at[i] >= end) at[i] -= RING * ROW;
    }

    // Takes what a lane owns of 16 outputs and 16 inputs; `which`: the bit of the first of them.
    __device__ __forceinline__ void expand(u32 (&found)[BITS], u32 bits, int which) {
#pragma unroll
        for (int i = 0; i < BITS; ++i) {
            found[i] = 0;
#if GROUP == 1
            asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.shared.u16 %0, [%1];\n@p add.u32 %1, %1, 128;}"
                         : "+r"(found[i]), "+r"(at[i % 2])
                         : "r"(bits & (1u << (which + i))));
#else
            // One instruction tests a bit and leaves it apart; times what brings it to 128 it is the step to the next
            // row, in a new register, so that the load before need not have read the old one. With a bit per element
            // this was not faster.
            const int place = which + i;
            asm volatile("{.reg .pred p;\n.reg .b32 d;\nlop3.or.b32 d|p, %2, %3, 0, 0xc0, 0;\n"
                         "@p ld.shared.u32 %0, [%1];\nmad.lo.u32 %1, d, %4, %1;}"
                         : "+r"(found[i]), "+r"(at[0])
                         : "r"(bits >> (place / 8 * 8)), "r"(1 << place % 8), "r"(ROW >> place % 8));
#endif
        }
    }
};

// Multiplies what a lane took of a slab by 16 inputs of all tokens, the lower or the upper half of 32.
__device__ __forceinline__ void multiply_step(float (&sums)[TOKENS / 8][4], const u32 (&found)[BITS],
                                              const u32 (&x)[TOKENS / 8][4], int half) {
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if GROUP == 1
        a[i] = __byte_perm(found[2 * i], found[2 * i + 1], 0x5410);
#else
        a[i] = found[i];
#endif
    }
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n) multiply(sums[n], a, x[n][2 * half], x[n][2 * half + 1]);
}

// The warps that share outputs: each lays down its sums of a slab, and all of them add up the slab before.
struct Meeting {
    float* boxes; // (2, ALONG, TOKENS, BOX_PITCH)
    float* sums;  // of the block: (TOKENS, PITCH), from the first output of these warps on
    u32 barrier;
    int along, lane;

    __device__ __forceinline__ void add_up(int slab) const {
        wait(barrier, slab & 1);
        const float* box = boxes + slab % 2 * (ALONG * BOX);
        for (int i = along * 32 + lane; i < TOKENS * 16; i += ALONG * 32) {
            const int token = i / 16, row = i % 16;
            float total = 0.f;
#pragma unroll
            for (int part = 0; part < ALONG; ++part) total += box[part * BOX + token * BOX_PITCH + row];
            sums[token * PITCH + slab * 16 + row] = total;
        }
    }

    __device__ __forceinline__ void lay(int slab, const float (&mine)[TOKENS / 8][4]) const {
        float* box = boxes + (slab % 2 * ALONG + along) * BOX + lane / 4;
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
            float* to = box + (n * 8 + lane % 4 * 2) * BOX_PITCH;
            to[0] = mine[n][0], to[BOX_PITCH] = mine[n][1], to[8] = mine[n][2], to[BOX_PITCH + 8] = mine[n][3];
        }
        __syncwarp();
        if (lane == 0) arrive(barrier);
    }
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, 1) lanes(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, first_token = blockIdx.y * TOKENS;
    const int along = warp / BESIDE, beside = warp % BESIDE, part = rank * ALONG + along;
    const int stream = (tile * (CLUSTER * ALONG) + part) * BESIDE + beside;
    const u32 base = (u32)__cvta_generic_to_shared(shared);

    Ring ring = {};
    ring.places = base + RINGS_AT + warp * WARP_BYTES, ring.barriers = base + warp * STAGES * 8;
    if (lane < STAGES) prepare_barrier(ring.barriers + lane * 8);
    const Meeting meeting = {reinterpret_cast<float*>(shared + BOXES_AT) + beside * (2 * ALONG * BOX),
                             reinterpret_cast<float*>(shared + SUMS_AT) + beside * SLABS * 16,
                             base + MEETINGS_AT + beside * 8, along, lane};
    if (along == 0 && lane == 0) prepare_barrier(meeting.barrier, ALONG);
    barriers_prepared();
    const int first = __ldg(call.firsts + stream);
    ring.left = __ldg(call.firsts + stream + 1) - first;
    ring.from = call.values + (long long)first * ROW;
    const u32* bits_from = call.bits + (long long)stream * (SLABS * CHUNKS * 32) + lane;
    const int2* marks = call.marks + (long long)stream * (SLABS * CHUNKS);
    if (lane == 0) {
        ask_early(bits_from, SLABS * CHUNKS * 128);
        if (ring.left > 0) ask_early(ring.from, min(ring.left, RING) * ROW);
    }
    __syncthreads();

    follow(); // where values are is older than the kernel before this one; values and x may not be
    ring.fill(0, lane);
    Held held;
    held.load(call, first_token, part * SPAN, lane);
    constexpr int AHEAD = 2; // chunks whose bits are on their way
    u32 bits[AHEAD + 1];
    int2 mark[AHEAD + 1];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        const int which = min(i, SLABS * CHUNKS - 1);
        mark[i] = __ldg(marks + which), bits[i] = __ldg(bits_from + which * 32);
    }

    Walk walk;
    walk.set(ring, 0, lane);
    for (int slab = 0; slab < SLABS; ++slab) {
        float sums[TOKENS / 8][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int next = min(slab * CHUNKS + chunk + AHEAD, SLABS * CHUNKS - 1);
            mark[AHEAD] = __ldg(marks + next), bits[AHEAD] = __ldg(bits_from + next * 32);
            ring.need(mark[0].x);
            u32 found[2][BITS]; // one is taken while the one before is multiplied
#pragma unroll
            for (int step = 0; step <= STEPS; ++step) {
                if (step < STEPS) {
                    walk.expand(found[step % 2], bits[0], step * BITS);
                    if (step % 2) walk.around(ring);
                }
                if (step > 0) {
                    const int now = step - 1;
                    multiply_step(sums, found[now % 2], held.words[chunk * STEPS / 2 + now / 2], now % 2);
                }
            }
            if (mark[0].x == mark[0].y) walk.set(ring, mark[0].x, lane);
            __syncwarp();
            ring.fill(mark[0].y, lane);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) mark[i] = mark[i + 1], bits[i] = bits[i + 1];
        }
        if (slab > 0) meeting.add_up(slab - 1);
        meeting.lay(slab, sums);
    }
    meeting.add_up(SLABS - 1);
    meet_cluster();
    write<1, ROWS, PITCH, THREADS>(call, base + SUMS_AT, tile, rank, first_token);
    leave_cluster();
}
