// y = activation(x W^T + bias) + residual for an unstructured weight and few tokens: each lane walks through live values of
// its own, and makes of them what the dense matrix unit takes.
//
// A warp multiplies SLABS slabs of 16 outputs by all tokens, over a part of K. The live values of what a lane owns of them
// stand in one bank of shared memory, one behind the other, and bits say which elements they are: an element that is live
// takes the value where the lane is, and the lane goes on; another is 0. Lanes go on at their own pace and still never meet
// in a bank. Values come by bulk copies into a ring of rows, one word for each lane; where lanes are so far apart that the
// ring could not hold it, packing lets them go on in the same row. Bits and x come from memory to registers, inputs
// being ordered such that a lane's share of x is 16 bytes in a row. Parts of K are summed in a fixed order, in the block
// and over the cluster, so equal inputs give equal bits. See linear/cuda_lanes_layout.py for the layout.
//
// Compile-time numbers: TOKENS, GROUP (elements that a bit stands for), SLABS, BESIDE (warps that have slabs of their own),
// ALONG (warps that share K), CLUSTER, STAGES, IS_HALF, ACTIVATION.

#include "few_tokens.cuh"
#include "bulk.cuh"

constexpr int WARPS = BESIDE * ALONG;
constexpr int THREADS = WARPS * 32;
constexpr int ROWS = BESIDE * SLABS * 16;         // outputs of a block
constexpr int PITCH = ROWS + 4;                   // of partial sums: keeps those of a warp in different banks
constexpr int CHUNK = 64 * GROUP;                 // inputs for which a lane has a word of bits of each slab
constexpr int STEPS = CHUNK / 32;                 // of 32 inputs, two multiplications
constexpr int BITS = 32 / STEPS;                  // of a lane in a step of a slab
constexpr int UNITS = STEPS * SLABS;              // steps of all slabs
constexpr u32 ROW = 128;                          // bytes of a row of the ring
constexpr int COPY = 8;                           // rows that are copied at once
constexpr int RING = STAGES * COPY;               // rows; 8 more repeat the first ones, so that a step reads straight on
constexpr u32 WARP_BYTES = (RING + COPY) * ROW;
constexpr int BARRIERS = (WARPS * STAGES * 8 + 127) / 128 * 128;

struct Call {
    const u16* x;
    const unsigned char* values; // rows of 128 bytes
    const u32* bits;             // (tiles, BESIDE, chunks, SLABS, 32)
    const int2* marks;           // (tiles, BESIDE, chunks): rows that a chunk needs, and rows that are done with after it
    const int* firsts;           // (tiles, BESIDE, CLUSTER * ALONG) and the end: first rows
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, chunks;
    int settled; // whether the weight is older than the kernels before this one
};

__device__ __forceinline__ void multiply(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col." KINDS " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A lane's way through x: of token lane / 4 (and those 8 further) it takes 8 inputs in every 32, from 8 (lane % 4) on.
struct Stream {
    const u16* from;
    long long stride; // of 8 tokens
    int k, inputs, tokens;

    __device__ __forceinline__ void next(uint4 (&x)[TOKENS / 8]) {
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
            x[n] = make_uint4(0, 0, 0, 0);
            if (k < inputs && n * 8 < tokens)
                asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(x[n].x), "=r"(x[n].y), "=r"(x[n].z), "=r"(x[n].w)
                             : "l"(from + n * stride));
        }
        k += 32;
        from += 32;
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

    // Takes what a lane owns of 16 outputs and 32 inputs; `which`: the bit of the first of them.
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

// Multiplies what a lane took of a slab by 32 inputs of all tokens.
__device__ __forceinline__ void multiply_unit(float (&sums)[TOKENS / 8][4], const u32 (&found)[BITS],
                                              const uint4 (&x)[TOKENS / 8]) {
    u32 a[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#if GROUP == 1
        a[i] = found[2 * i] | found[2 * i + 1] << 16;
#else
        a[i] = found[i];
#endif
    }
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n) {
        multiply(sums[n], a, x[n].x, x[n].y);
        multiply(sums[n], a + 4, x[n].z, x[n].w);
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, 1) lanes(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, first_token = blockIdx.y * TOKENS;
    const int part = rank * ALONG + warp / BESIDE, parts = CLUSTER * ALONG, group = tile * BESIDE + warp % BESIDE;
    const int begin = (int)((long long)call.chunks * part / parts);
    const int end = (int)((long long)call.chunks * (part + 1) / parts);
    const u32 base = (u32)__cvta_generic_to_shared(shared);

    Ring ring = {};
    ring.places = base + BARRIERS + warp * WARP_BYTES, ring.barriers = base + warp * STAGES * 8;
    if (lane < STAGES) prepare_barrier(ring.barriers + lane * 8);
    barriers_prepared();
    const int first = __ldg(call.firsts + group * parts + part);
    ring.left = __ldg(call.firsts + group * parts + part + 1) - first;
    ring.from = call.values + (long long)first * ROW;
    const u32* bits_from = call.bits + ((long long)group * call.chunks + begin) * (SLABS * 32) + lane;
    const int2* marks = call.marks + (long long)group * call.chunks + begin;
    if (lane == 0 && begin < end) ask_early(bits_from, (end - begin) * (SLABS * 128));
    __syncwarp();

    let_next_begin();
    if (!call.settled) wait_for_last(); // where values are is older in any case
    ring.fill(0, lane);
    constexpr int AHEAD = 2; // chunks whose bits are on their way
    u32 bits[AHEAD + 1][SLABS];
    int2 mark[AHEAD + 1];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (begin + i < end) {
            mark[i] = __ldg(marks + i);
#pragma unroll
            for (int s = 0; s < SLABS; ++s) bits[i][s] = __ldg(bits_from + (i * SLABS + s) * 32);
        }
    wait_for_last();
    Stream stream;
    stream.k = begin * CHUNK + lane % 4 * 8, stream.inputs = min(call.inputs, end * CHUNK);
    stream.from = call.x + (first_token + lane / 4) * call.x_stride + stream.k, stream.stride = 8 * call.x_stride;
    stream.tokens = call.tokens - first_token - lane / 4;
    uint4 x[2][TOKENS / 8];
    stream.next(x[0]);
    stream.next(x[1]);

    float sums[SLABS][TOKENS / 8][4] = {};
    Walk walk;
    walk.set(ring, 0, lane);
    for (int chunk = begin; chunk < end; ++chunk) {
        marks += 1, bits_from += SLABS * 32;
        if (chunk + AHEAD < end) {
            mark[AHEAD] = __ldg(marks + AHEAD - 1);
#pragma unroll
            for (int s = 0; s < SLABS; ++s) bits[AHEAD][s] = __ldg(bits_from + ((AHEAD - 1) * SLABS + s) * 32);
        }
        ring.need(mark[0].x);
        u32 found[2][BITS]; // one is taken while the one before is multiplied
#pragma unroll
        for (int unit = 0; unit <= UNITS; ++unit) {
            if (unit < UNITS) {
                walk.expand(found[unit % 2], bits[0][unit % SLABS], unit / SLABS * BITS);
                walk.around(ring);
            }
            if (unit > 0) {
                const int slab = (unit - 1) % SLABS, step = (unit - 1) / SLABS;
                multiply_unit(sums[slab], found[(unit - 1) % 2], x[step % 2]);
                if (slab == SLABS - 1) stream.next(x[step % 2]);
            }
        }
        if (mark[0].x == mark[0].y) walk.set(ring, mark[0].x, lane);
        __syncwarp();
        ring.fill(mark[0].y, lane);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            mark[i] = mark[i + 1];
#pragma unroll
            for (int s = 0; s < SLABS; ++s) bits[i][s] = bits[i + 1][s];
        }
    }

    // The ring is free now: it takes the partial sums, (ALONG, TOKENS, PITCH); what was a barrier takes nothing else.
    __syncthreads();
    float* partials = reinterpret_cast<float*>(shared + BARRIERS) + warp / BESIDE * TOKENS * PITCH;
    lay_sums<PITCH>(partials, sums, warp % BESIDE * SLABS * 16, lane);
    meet_cluster();
    write<ALONG, ROWS, PITCH, THREADS>(call, base + BARRIERS, tile, rank, first_token);
    leave_cluster();
}
