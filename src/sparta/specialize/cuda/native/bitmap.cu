// y = activation(x W^T + bias) + residual for an unstructured weight and few tokens: bitmap and live values, read once.
//
// A warp multiplies SLABS slabs of 16 outputs by all tokens, over a part of K. Records (16 outputs by 128 inputs: bits,
// starts, values; see bitmap.py for the layout) come into a ring in shared memory by bulk copies, which cost the warp one
// instruction each. A lane finds its first value by one count of bits, the others by going on where it is; what it loads
// are the registers of the dense matrix unit. Inputs are ordered such that a lane's share of x is 16 bytes in a row: it
// goes from memory (the L1 cache, mostly) to registers without detour. Parts of K are summed in a fixed order, in the
// block and over the cluster, so equal inputs give equal bits.
//
// Compile-time numbers: TOKENS, GROUP, RUN, SLABS, WARPS, CLUSTER, STAGES, IS_HALF, ACTIVATION.

#include "few_tokens.cuh"
#include "bulk.cuh"

constexpr int CHUNK = 128;                         // inputs of a record
constexpr int ROWS = SLABS * 16;                   // outputs of a block
constexpr int PITCH = ROWS + 4;                    // of partial sums: keeps those of a warp in different banks
constexpr int CELLS = 64 / GROUP / RUN;            // a lane owns 64 elements of a record, RUN bits of each cell
constexpr int STARTS = CELLS * RUN * 4;            // where in a record the starts begin, behind the bits
constexpr int BATCH = 4 * RUN * GROUP / 8;         // multiplications of 16 inputs for which bits are loaded at once
constexpr int BARRIERS = (WARPS * STAGES * 8 + 15) / 16 * 16;

struct Call {
    const u16* x;
    const unsigned char* records;
    const int* offsets; // of records, in units of 16 bytes
    const u16* bias;
    const u16* residual;
    u16* y;
    long long x_stride;
    int tokens, outputs, inputs, chunks, settled, slot;
};

__device__ __forceinline__ void multiply(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col." KINDS " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load16(u32 from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ uint2 load8(u32 from) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
    return value;
}

// Expands the RUN bits of a lane to RUN * GROUP / 2 registers of two neighbouring inputs each: where a bit is set, it
// takes the value at `from` and goes on behind it, else 0.
__device__ __forceinline__ void expand(u32* a, u32 bits, u32 from) {
#pragma unroll
    for (int j = 0; j < RUN * GROUP / 2; ++j) {
        u32 pair = 0;
#if GROUP == 1
        asm volatile("{.reg .pred p, q;\n.reg .b32 v;\nsetp.ne.u32 p, %2, 0;\nsetp.ne.u32 q, %3, 0;\n"
                     "@p ld.shared.u16 %0, [%1];\n@p add.u32 %1, %1, 2;\n"
                     "@q ld.shared.u16 v, [%1];\n@q add.u32 %1, %1, 2;\n@q prmt.b32 %0, %0, v, 0x5410;}"
                     : "+r"(pair), "+r"(from)
                     : "r"(bits & (1u << (2 * j))), "r"(bits & (2u << (2 * j)))
                     : "memory");
#else
        asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.shared.u32 %0, [%1];\n@p add.u32 %1, %1, 4;}"
                     : "+r"(pair), "+r"(from)
                     : "r"(bits & (1u << j))
                     : "memory");
#endif
        a[j] = pair;
    }
}

// Where the records of one chunk are, for all slabs of a warp.
struct Place {
    int begin[SLABS], end[SLABS];
};

__device__ __forceinline__ Place locate(const Call& call, const int (&first)[SLABS], int chunk) {
    Place place;
#pragma unroll
    for (int s = 0; s < SLABS; ++s) {
        place.begin[s] = __ldg(call.offsets + first[s] + chunk);
        place.end[s] = __ldg(call.offsets + first[s] + chunk + 1);
    }
    return place;
}

// Starts the copies of one chunk's records, from one lane.
__device__ __forceinline__ void fetch(const Call& call, const Place& place, u32 stage, u32 barrier, int lane) {
    if (lane == 0) {
        u32 bytes = 0;
#pragma unroll
        for (int s = 0; s < SLABS; ++s) bytes += (place.end[s] - place.begin[s]) * 16;
        expect(barrier, bytes);
#pragma unroll
        for (int s = 0; s < SLABS; ++s)
            copy(stage + s * call.slot, call.records + (long long)place.begin[s] * 16,
                 (place.end[s] - place.begin[s]) * 16, barrier);
    }
    __syncwarp();
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

// Multiplies one chunk; `x` holds the next 32 inputs, and again when it is done.
__device__ __forceinline__ void multiply_chunk(float (&sums)[SLABS][TOKENS / 8][4], uint4 (&x)[TOKENS / 8],
                                               Stream& stream, u32 stage, int slot, int lane) {
    const u32 shift = lane * RUN % 32, below = (1u << shift) - 1, word = lane * RUN / 32;
#pragma unroll 1
    for (int batch = 0; batch < 8 / BATCH; ++batch) {
        u32 bits[SLABS][4], starts[SLABS][2];
#pragma unroll
        for (int s = 0; s < SLABS; ++s) {
            uint4 four = load16(stage + s * slot + (batch * RUN + word) * 16);
            uint2 two = load8(stage + s * slot + STARTS + (batch * RUN + word) * 8);
            bits[s][0] = four.x, bits[s][1] = four.y, bits[s][2] = four.z, bits[s][3] = four.w;
            starts[s][0] = two.x, starts[s][1] = two.y;
        }
#pragma unroll
        for (int pair = 0; pair < BATCH / 2; ++pair) { // of multiplications: 32 inputs
            uint4 b[TOKENS / 8];
#pragma unroll
            for (int n = 0; n < TOKENS / 8; ++n) b[n] = x[n];
            stream.next(x);
#pragma unroll
            for (int s = 0; s < SLABS; ++s) {
                u32 a[8];
                constexpr int EACH = 16 / GROUP / RUN; // cells of 32 inputs
#pragma unroll
                for (int c = 0; c < EACH; ++c) {
                    const int cell = pair * EACH + c;
                    const u32 both = starts[s][cell / 2], start = cell % 2 ? both >> 16 : both & 0xffff;
                    const u32 from = stage + s * slot + start + __popc(bits[s][cell] & below) * (2 * GROUP);
                    expand(a + c * RUN * GROUP / 2, bits[s][cell] >> shift, from);
                }
#pragma unroll
                for (int n = 0; n < TOKENS / 8; ++n) {
                    multiply(sums[s][n], a, b[n].x, b[n].y);
                    multiply(sums[s][n], a + 4, b[n].z, b[n].w);
                }
            }
        }
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(WARPS * 32) bitmap(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, first_token = blockIdx.y * TOKENS;
    const int part = rank * WARPS + warp, parts = CLUSTER * WARPS;
    const int begin = (int)((long long)call.chunks * part / parts);
    const int end = (int)((long long)call.chunks * (part + 1) / parts);
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const u32 stage_bytes = SLABS * call.slot;
    const u32 ring = base + BARRIERS + warp * STAGES * stage_bytes, barriers = base + warp * STAGES * 8;

    int first[SLABS]; // record of each slab
    const int last_slab = (call.outputs + 15) / 16 - 1;
#pragma unroll
    for (int s = 0; s < SLABS; ++s) first[s] = min(tile * SLABS + s, last_slab) * call.chunks;

    if (lane < STAGES) prepare_barrier(barriers + lane * 8);
    barriers_prepared();
    __syncwarp();

    for (int stage = 0; stage < STAGES && begin + stage < end; ++stage)
        fetch(call, locate(call, first, begin + stage), ring + stage * stage_bytes, barriers + stage * 8, lane);
    Place ahead = {};
    if (begin + STAGES < end) ahead = locate(call, first, begin + STAGES);

    Stream stream;
    stream.k = begin * CHUNK + lane % 4 * 8, stream.inputs = min(call.inputs, end * CHUNK);
    stream.from = call.x + (first_token + lane / 4) * call.x_stride + stream.k, stream.stride = 8 * call.x_stride;
    stream.tokens = call.tokens - first_token - lane / 4;
    uint4 x[TOKENS / 8];
    stream.next(x);

    float sums[SLABS][TOKENS / 8][4] = {};
    u32 stage = 0, parity = 0;
    for (int chunk = begin; chunk < end; ++chunk) {
        wait(barriers + stage * 8, parity);
        multiply_chunk(sums, x, stream, ring + stage * stage_bytes, call.slot, lane);
        __syncwarp();
        if (chunk + STAGES < end) {
            fetch(call, ahead, ring + stage * stage_bytes, barriers + stage * 8, lane);
            if (chunk + STAGES + 1 < end) ahead = locate(call, first, chunk + STAGES + 1);
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    // The ring is free now: it takes the partial sums, (WARPS, TOKENS, PITCH); what was a barrier takes nothing else.
    __syncthreads();
    float* partials = reinterpret_cast<float*>(shared + BARRIERS) + warp * TOKENS * PITCH;
    lay_sums<PITCH>(partials, sums, 0, lane);
    meet_cluster();
    write<WARPS, ROWS, PITCH, WARPS * 32>(call, base + BARRIERS, tile, rank, first_token);
    leave_cluster();
}
