// y = activation(x W^T + bias) + residual for an unstructured weight and few tokens, as the sum of two 2:4 weights.
//
// Of four neighbouring inputs that the sparse matrix unit takes together, the first weight has the first two live ones,
// and the second one what is left, which always stands in the last two places: where its values are needs no words. So
// the matrix unit expands most of the weight, and threads expand only what few groups of four have too much. A warp
// multiplies SLABS slabs of 16 outputs by all tokens, over a part of K. Records (16 outputs by 128 inputs; see
// linear/cuda_24_twice_layout.py) come into a ring in shared memory by bulk copies. What is stored without its zeros are
// runs, one for each lane, and where a run begins the lanes find by summing up their counts. Inputs are ordered such that
// a lane's share of x is 16 bytes in a row: it goes from memory to registers. Parts of K are summed in a fixed order, in
// the block and over the cluster, so equal inputs give equal bits.
//
// Compile-time numbers: TOKENS, UNIT (values that a bit stands for), WHOLE (whether the first weight is stored with its
// zeros), SLABS, BESIDE (warps that have slabs of their own), ALONG (warps that share K), CLUSTER, STAGES, IS_HALF,
// ACTIVATION.
//
// To expand a record while the one before is multiplied was slower, and so was x that is loaded later than here.

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
constexpr u32 LAST_TWO = 0xeeeeeeee;               // places 2 and 3 of every group
// Whether there are registers for the x of the next record as well.
constexpr bool AHEAD = 65536 / THREADS >= 80 + SLABS * TOKENS / 2 + 4 * TOKENS;
constexpr int BARRIERS = (WARPS * STAGES * 8 + 127) / 128 * 128;

struct Call {
    const u16* x;
    const unsigned char* records;
    const int* offsets; // of records, in units of 16 bytes, and the end
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, chunks;
    int settled; // whether the weight is older than the kernels before this one
    int slot;    // bytes of the largest record
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

    __device__ __forceinline__ void next(uint4 (&x)[4][TOKENS / 8]) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int n = 0; n < TOKENS / 8; ++n) {
                x[j][n] = make_uint4(0, 0, 0, 0);
                if (k + j * 32 < inputs && n * 8 < tokens)
                    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(x[j][n].x), "=r"(x[j][n].y), "=r"(x[j][n].z), "=r"(x[j][n].w)
                                 : "l"(from + n * stride + j * 32));
            }
        k += CHUNK;
        from += CHUNK;
    }
};

// The records of a warp, which stand in memory one behind the other: asked for in order, into a ring.
struct Ring {
    const unsigned char* records;
    const int* offsets; // of this warp's records, from this lane on
    u32 places, barriers, slot;
    int count, asked;
    int begin[2], end[2]; // of 32 records, one in each lane, and of the 32 after them
    u32 stage_asked, stage, parity;

    __device__ __forceinline__ void look(int lane) { // where the 32 records after next are
        const int i = asked + 32;
        begin[0] = begin[1], end[0] = end[1];
        if (i + lane < count) begin[1] = __ldg(offsets + i), end[1] = __ldg(offsets + i + 1);
    }

    __device__ __forceinline__ void ask(int lane) {
        if (asked >= count) return;
        if (asked % 32 == 0) look(lane);
        const int from = __shfl_sync(0xffffffff, begin[0], asked % 32), to = __shfl_sync(0xffffffff, end[0], asked % 32);
        if (lane == 0) {
            const u32 barrier = barriers + stage_asked * 8, bytes = (to - from) * 16;
            expect(barrier, bytes);
            copy(places + stage_asked * slot, records + (long long)from * 16, bytes, barrier);
        }
        ++asked;
        if (++stage_asked == STAGES) stage_asked = 0;
    }

    // Waits for the next record and returns where it is.
    __device__ __forceinline__ u32 next() {
        const u32 place = places + stage * slot;
        wait(barriers + stage * 8, parity);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        return place;
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
__device__ __forceinline__ void expand(u32 (&a)[4], u32 bits, int multiply, u32& at) {
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

// Multiplies one record by its 128 inputs of all tokens.
__device__ __forceinline__ void multiply_record(float (&sums)[TOKENS / 8][4], const uint4 (&x)[4][TOKENS / 8], u32 place,
                                                int lane) {
    const u32 rest = load_bits(place + REST_BITS_AT + lane * (4 / UNIT));
    [[maybe_unused]] const u32 first = WHOLE ? 0 : load_bits(place + 256 + lane * (4 / UNIT));
    u32 places[2];
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(places[0]), "=r"(places[1]) : "r"(place + lane * 8) : "memory");
    const int own = __popc(rest) + (WHOLE ? 0 : __popc(first));
    int until = own; // values of the lanes up to this one
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
        const int more = __shfl_up_sync(0xffffffff, until, far);
        if (lane >= far) until += more;
    }
    u32 at = place + RUNS_AT + (until - own) * (2 * UNIT);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 a[4], b[4];
#if WHOLE
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(place + VALUES_AT + j * 512 + lane * 16)
                     : "memory");
#else
        expand(a, first, j, at);
#endif
        expand(b, rest, j, at);
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
            if (j % 2)
                multiply<1>(sums[n], a, x[j][n], places[j / 2]);
            else
                multiply<0>(sums[n], a, x[j][n], places[j / 2]);
        }
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) multiply<0>(sums[n], b, x[j][n], LAST_TWO);
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
    ring.barriers = base + warp * STAGES * 8, ring.slot = call.slot;
    ring.places = base + BARRIERS + warp * STAGES * ring.slot;
    if (lane < STAGES) prepare_barrier(ring.barriers + lane * 8);
    barriers_prepared();
    ring.records = call.records, ring.count = (end - begin) * SLABS;
    ring.offsets = call.offsets + ((long long)group * call.chunks + begin) * SLABS + lane;
    // Where values are is older in any case.
    if (lane < ring.count) ring.begin[1] = __ldg(ring.offsets), ring.end[1] = __ldg(ring.offsets + 1);
    __syncwarp();

    let_next_begin();
    if (!call.settled) wait_for_last();
    for (int i = 0; i < STAGES; ++i) ring.ask(lane);
    wait_for_last();
    Stream stream;
    stream.k = begin * CHUNK + lane % 4 * 8, stream.inputs = min(call.inputs, end * CHUNK);
    stream.from = call.x + (first_token + lane / 4) * call.x_stride + stream.k, stream.stride = 8 * call.x_stride;
    stream.tokens = call.tokens - first_token - lane / 4;
    uint4 x[4][TOKENS / 8], x_next[4][TOKENS / 8];
    if (AHEAD) stream.next(x_next);

    float sums[SLABS][TOKENS / 8][4] = {};
    for (int chunk = begin; chunk < end; ++chunk) {
        if (AHEAD) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int n = 0; n < TOKENS / 8; ++n) x[j][n] = x_next[j][n];
        }
        stream.next(AHEAD ? x_next : x);
#pragma unroll
        for (int s = 0; s < SLABS; ++s) {
            multiply_record(sums[s], x, ring.next(), lane);
            __syncwarp();
            ring.ask(lane);
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
