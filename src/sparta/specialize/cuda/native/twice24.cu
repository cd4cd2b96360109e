// y = activation(x W^T + bias) + residual for an unstructured weight and few tokens, as the sum of two 2:4 weights.
//
// Of four neighbouring inputs that the sparse matrix unit takes together, the first weight has the first two live ones,
// and the second one what is left, which always stands in the last two places: where its values are needs no words. So
// the matrix unit expands most of the weight, and threads expand only what few groups of four have too much. A warp
// multiplies SLABS slabs of 16 outputs by all tokens, over a part of K. Records (16 outputs by 128 inputs; see
// linear/cuda_24_twice_layout.py) come into a ring in shared memory by bulk copies. What is stored without its zeros are
// runs, one for each lane; where a run begins, and the next record, lanes find by summing up their counts. Inputs are
// ordered such that a lane's share of x is 16 bytes in a row: it goes from memory to registers. Parts of K are summed in
// a fixed order, in the block and over the cluster, so equal inputs give equal bits.
//
// Compile-time numbers: TOKENS, UNIT (values that a bit stands for), WHOLE (whether the first weight is stored with its
// zeros), SLABS, BESIDE (warps that have slabs of their own), ALONG (warps that share K), CLUSTER, STAGES (at most 32),
// IS_HALF, ACTIVATION.

#include "few_tokens.cuh"
#include "bulk.cuh"

constexpr int WARPS = BESIDE * ALONG;
constexpr int THREADS = WARPS * 32;
constexpr int ROWS = BESIDE * SLABS * 16;          // outputs of a block
constexpr int PITCH = ROWS + 4;                    // of partial sums: keeps those of a warp in different banks
constexpr int CHUNK = 128;                         // inputs of a record: four multiplications of 32
constexpr int BITS_BYTES = 32 * 4 / UNIT;          // bits of all lanes, of one weight
constexpr int REST_BITS_AT = 256 + (WHOLE ? 0 : BITS_BYTES); // behind the places, and the bits of the first weight
constexpr int VALUES_AT = REST_BITS_AT + BITS_BYTES;
constexpr int RUNS_AT = VALUES_AT + (WHOLE ? 2048 : 0);
constexpr int PIECE = 2048;                        // bytes that are copied at once
constexpr int RING = STAGES * PIECE;               // bytes; 16 more repeat the first ones, for runs that go around
constexpr int WARP_BYTES = RING + 128;
constexpr u32 LAST_TWO = 0xeeeeeeee;               // places 2 and 3 of every group
constexpr int BARRIERS = (WARPS * STAGES * 8 + 127) / 128 * 128;

struct Call {
    const u16* x;
    const unsigned char* records;
    const int* lengths; // of parts, in bytes: (groups, CLUSTER * ALONG)
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, chunks;
    int settled; // whether the weight is older than the kernels before this one
    int stride;  // bytes from one part to the next
    int largest; // bytes of the largest record
};

template <int SELECTOR>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], const uint4& b, u32 places) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." KINDS
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(places), "n"(SELECTOR));
}

// A lane's way through x: of token lane / 4 (and those 8 further) it takes 8 inputs in every 32, from 8 (lane % 4) on.
struct Stream {
    const u16* from;
    long long stride; // of 8 tokens
    int k, inputs, tokens;

    // Loads what multiplication j of the four of a chunk needs; the last one goes on to the next chunk.
    __device__ __forceinline__ void load(uint4 (&x)[TOKENS / 8], int j) {
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
            x[n] = make_uint4(0, 0, 0, 0);
            if (k + j * 32 < inputs && n * 8 < tokens)
                asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(x[n].x), "=r"(x[n].y), "=r"(x[n].z), "=r"(x[n].w)
                             : "l"(from + n * stride + j * 32));
        }
        if (j == 3) k += CHUNK, from += CHUNK;
    }
};

// The records of a warp, which stand in memory one behind the other: asked for in pieces, into a ring.
struct Ring {
    const unsigned char* from; // what is asked for next
    u32 places, barriers;
    int left;                  // bytes that are not asked for yet
    int asked, ready;          // pieces
    u32 stage_asked, stage_ready, parity;
    u32 place;                 // of the next record
    int taken;                 // bytes of the records before it

    __device__ __forceinline__ void ask(int lane) {
        if (lane == 0) {
            const u32 bytes = min(left, PIECE), barrier = barriers + stage_asked * 8;
            const bool first = stage_asked == 0;
            expect(barrier, first ? bytes + 16 : bytes);
            copy(places + stage_asked * PIECE, from, bytes, barrier);
            if (first) copy(places + RING, from, 16, barrier);
        }
        from += PIECE, left -= PIECE, ++asked;
        if (++stage_asked == STAGES) stage_asked = 0;
    }

    // Asks for all that has a place when so many bytes are done with.
    __device__ __forceinline__ void fill(int done, int lane) {
        while (left > 0 && (asked - STAGES + 1) * PIECE <= done) ask(lane);
    }

    // Waits until so many bytes are there.
    __device__ __forceinline__ void need(int bytes) {
        while (ready * PIECE < bytes) {
            wait(barriers + stage_ready * 8, parity);
            ++ready;
            if (++stage_ready == STAGES) stage_ready = 0, parity ^= 1;
        }
    }

    // Where in the ring an address is that goes beyond it.
    __device__ __forceinline__ u32 around(u32 address) const {
        return address >= places + RING ? address - RING : address;
    }
};

__device__ __forceinline__ u32 load_bits(u32 from) {
    u32 bits;
#if UNIT == 1
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
#else
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
#endif
    return bits;
}

// Takes the four registers of a multiplication out of a lane's run: what a bit says to be there, else 0.
__device__ __forceinline__ void expand(u32 (&a)[4], u32 bits, int multiply, u32& at, const Ring& ring) {
    at = ring.around(at); // from here, 16 bytes stand in a row
    constexpr int EACH = 2 / UNIT;     // bits of a register
    constexpr int SHIFTED = 1 + UNIT;  // bits for which one shift is enough
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        u32 found[EACH] = {};
#pragma unroll
        for (int h = 0; h < EACH; ++h) {
            // One instruction tests a bit and leaves it apart; times what brings it to the bytes of a value it is the step
            // to the next one, in a new register, so that the load before need not have read the old one.
            const int place = (multiply * 4 + r) * EACH + h, shift = place / SHIFTED * SHIFTED;
            asm volatile("{.reg .pred p;\n.reg .b32 d;\nlop3.or.b32 d|p, %2, %3, 0, 0xc0, 0;\n"
#if UNIT == 1
                         "@p ld.shared.u16 %0, [%1];"
#else
                         "@p ld.shared.u32 %0, [%1];"
#endif
                         "\nmad.lo.u32 %1, d, %4, %1;}"
                         : "+r"(found[h]), "+r"(at)
                         : "r"(bits >> shift), "r"(1 << (place - shift)), "r"(2 * UNIT >> (place - shift)));
        }
        a[r] = EACH == 1 ? found[0] : __byte_perm(found[0], found[EACH - 1], 0x5410);
    }
}

// What a lane knows of a record before it takes values out of it.
struct Head {
    u32 place, places[2]; // where it is; where values of the first weight are
    u32 rest, first;      // bits of both weights
    u32 at;               // where this lane's run is
    int end;              // bytes of all records up to this one

    __device__ __forceinline__ void read(Ring& ring, int length, int largest, int lane) {
        const bool any = ring.taken < length;
        ring.need(min(ring.taken + largest, length));
        place = ring.place;
        rest = load_bits(ring.around(place + REST_BITS_AT + lane * (4 / UNIT)));
        first = WHOLE ? 0 : load_bits(ring.around(place + 256 + lane * (4 / UNIT)));
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                     : "=r"(places[0]), "=r"(places[1])
                     : "r"(ring.around(place + lane * 8))
                     : "memory");
        if (!any) rest = first = 0; // beyond the last one there is nothing to take
        const int own = __popc(rest) + (WHOLE ? 0 : __popc(first));
        int until = own; // values of the lanes up to this one
#pragma unroll
        for (int far = 1; far < 32; far *= 2) {
            const int more = __shfl_up_sync(0xffffffff, until, far);
            if (lane >= far) until += more;
        }
        at = place + RUNS_AT + (until - own) * (2 * UNIT);
        const int size = (RUNS_AT + __shfl_sync(0xffffffff, until, 31) * (2 * UNIT) + 15) / 16 * 16;
        ring.taken = end = ring.taken + size;
        ring.place = ring.around(place + size);
    }
};

constexpr int EXPANDED = WHOLE ? 1 : 2; // weights whose operands are expanded

typedef u32 Operands[4][EXPANDED][4]; // of a record's multiplications

__device__ __forceinline__ void expand(Operands& operands, Head& head, int multiply, const Ring& ring) {
    if (!WHOLE) expand(operands[multiply][0], head.first, multiply, head.at, ring);
    expand(operands[multiply][EXPANDED - 1], head.rest, multiply, head.at, ring);
}

// Multiplies one record by its 128 inputs of all tokens, and meanwhile takes the operands of the next one. The last one of
// these inputs also loads those that follow.
template <bool LAST>
__device__ __forceinline__ void multiply_record(float (&sums)[TOKENS / 8][4], uint4 (&x)[4][TOKENS / 8], Stream& stream,
                                                const Head& head, Head& next, Operands& operands, const Ring& ring,
                                                int lane) {
    u32 whole[2][4];
    const auto load = [&](int j) {
        if (WHOLE)
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(whole[j % 2][0]), "=r"(whole[j % 2][1]), "=r"(whole[j % 2][2]), "=r"(whole[j % 2][3])
                         : "r"(ring.around(head.place + VALUES_AT + j * 512 + lane * 16))
                         : "memory");
    };
    load(0);
    load(1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
            const u32(&a)[4] = WHOLE ? whole[j % 2] : operands[j][0];
            if (j % 2)
                multiply<1>(sums[n], a, x[j][n], head.places[j / 2]);
            else
                multiply<0>(sums[n], a, x[j][n], head.places[j / 2]);
        }
        if (j < 2) load(j + 2);
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) multiply<0>(sums[n], operands[j][EXPANDED - 1], x[j][n], LAST_TWO);
        if (LAST) stream.load(x[j], j);
        expand(operands, next, j, ring);
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, 1) twice24(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, first_token = blockIdx.y * TOKENS;
    const int part = rank * ALONG + warp / BESIDE, parts = CLUSTER * ALONG, group = tile * BESIDE + warp % BESIDE;
    const int begin = (int)((long long)call.chunks * part / parts);
    const int end = (int)((long long)call.chunks * (part + 1) / parts);
    const u32 base = (u32)__cvta_generic_to_shared(shared);

    Ring ring = {};
    ring.places = ring.place = base + BARRIERS + warp * WARP_BYTES, ring.barriers = base + warp * STAGES * 8;
    if (lane < STAGES) prepare_barrier(ring.barriers + lane * 8);
    barriers_prepared();
    const int which = group * parts + part;
    ring.from = call.records + (long long)which * call.stride, ring.left = call.stride;
    __syncwarp();

    let_next_begin();
    if (!call.settled) wait_for_last();
    ring.fill(0, lane); // also beyond the end of a short part: nobody waits to see how long it is
    const int length = __ldg(call.lengths + which);
    wait_for_last();
    Stream stream;
    stream.k = begin * CHUNK + lane % 4 * 8, stream.inputs = min(call.inputs, end * CHUNK);
    stream.from = call.x + (first_token + lane / 4) * call.x_stride + stream.k, stream.stride = 8 * call.x_stride;
    stream.tokens = call.tokens - first_token - lane / 4;
    uint4 x[4][TOKENS / 8];
#pragma unroll
    for (int j = 0; j < 4; ++j) stream.load(x[j], j);

    float sums[SLABS][TOKENS / 8][4] = {};
    Operands operands;
    Head now, next, after;
    ring.left = length - ring.asked * PIECE;
    now.read(ring, length, call.largest, lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) expand(operands, now, j, ring);
    next.read(ring, length, call.largest, lane);
    for (int chunk = begin; chunk < end; ++chunk) {
#pragma unroll
        for (int s = 0; s < SLABS; ++s) {
            after.read(ring, length, call.largest, lane);
            if (s < SLABS - 1)
                multiply_record<false>(sums[s], x, stream, now, next, operands, ring, lane);
            else
                multiply_record<true>(sums[s], x, stream, now, next, operands, ring, lane);
            __syncwarp();
            ring.fill(now.end, lane);
            now = next, next = after;
        }
    }
    ring.need(ring.asked * PIECE); // nothing is on its way any more

    // The ring is free now: it takes the partial sums, (ALONG, TOKENS, PITCH); what was a barrier takes nothing else.
    __syncthreads();
    float* partials = reinterpret_cast<float*>(shared + BARRIERS) + warp / BESIDE * TOKENS * PITCH;
    lay_sums<PITCH>(partials, sums, warp % BESIDE * SLABS * 16, lane);
    meet_cluster();
    write<ALONG, ROWS, PITCH, THREADS>(call, base + BARRIERS, tile, rank, first_token);
    leave_cluster();
}
