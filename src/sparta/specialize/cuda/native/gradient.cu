// The gradient of a weight whose blocks are kept or dead, on Hopper: grad^T x in kept blocks, zeros elsewhere, and the
// sums of grad, by the matrix instructions of a warpgroup (wgmma).
//
// A block of threads computes one chunk: HEIGHT outputs times up to BOXES strips of 64 inputs in which they have kept
// blocks, so that what is read of grad serves all of them. Neither grad nor x is transposed: both lie in shared memory as
// they do in memory, 64 tokens by 64 channels at once, and the instruction takes them so. One thread has the copy engine
// fetch what is next, another has it write zeros into dead blocks.
//
// Compile-time numbers: IS_HALF, HEIGHT (64 or 128), BOXES (2, 4 or 8), STAGES, CLUSTER and BESIDE (1), GROUPS (2).
#include "few_tokens.cuh"
#include "warpgroup.cuh"

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int STEP = 64;                      // tokens that are fetched at once
constexpr int BOX = STEP * 64 * 2;            // bytes of them, of 64 channels
constexpr int HIGH = HEIGHT / 64;             // boxes of grad
constexpr int STAGE = (HIGH + BOXES) * BOX;
constexpr int OWN = HIGH == 2 ? BOXES : BOXES / 2; // strips of a warpgroup: all for half of the outputs, or half for all
constexpr int COLUMNS = OWN * 64;
constexpr int ONES = 1024;
static_assert(COLUMNS == 128 || COLUMNS == 256, "what instructions are written out for");

struct Call {
    alignas(64) unsigned char grad_map[128];
    alignas(64) unsigned char x_map[128];
    alignas(64) unsigned char result_map[128];
    const int4* chunks;        // first output, where its columns begin, how many there are, whether grad is summed
    const int* columns;        // of strips: their first input
    const int2* dead;          // output and input where 64x64 zeros begin
    const unsigned char* mask; // (outputs, inputs) where the weight is live; or nothing, where all of kept blocks is
    u16* result;               // (outputs, inputs)
    u16* summed;               // (outputs,) or nothing
    int tokens, outputs, inputs, zeros; // how many of them
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

__device__ __forceinline__ void fetch(const Call& call, const int4& chunk, u32 memory, u32 full, u32 empty) {
    int columns[BOXES];
#pragma unroll
    for (int b = 0; b < BOXES; ++b) columns[b] = b < chunk.z ? __ldg(call.columns + chunk.y + b) : 0;
    Ring ring;
    for (int token = 0; token < call.tokens; token += STEP, ring.next()) {
        const u32 stage = memory + ring.stage * STAGE, done = full + ring.stage * 8;
        wait(empty + ring.stage * 8, ring.phase ^ 1);
        expect(done, (HIGH + chunk.z) * BOX);
#pragma unroll
        for (int h = 0; h < HIGH; ++h) copy_box(stage + h * BOX, call.grad_map, chunk.x + h * 64, token, done);
#pragma unroll
        for (int b = 0; b < BOXES; ++b)
            if (b < chunk.z) copy_box(stage + (HIGH + b) * BOX, call.x_map, columns[b], token, done);
    }
}

// Writes this block's part of the zeros from a box of them.
__device__ __forceinline__ void write_zeros(const Call& call, u32 zeros) {
    for (int i = blockIdx.x; i < call.zeros; i += gridDim.x) {
        const int2 place = __ldg(call.dead + i);
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(call.result_map),
                     "r"(place.y), "r"(place.x), "r"(zeros) : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

#if IS_HALF
#define KIND "k16.f32.f16.f16"
#else
#define KIND "k16.f32.bf16.bf16"
#endif
#define TRANSPOSED "1, 1, 1, 1;" // neither is negated, channels stand side by side in both
#if BOXES * 64 / (3 - HEIGHT / 64) == 128
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

// How boxes of 64 channels lie one after another, of which an instruction takes 16 tokens.
__device__ __forceinline__ u64 described_boxes(u32 address) {
    return (u64)(address >> 4) | (u64)(BOX >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Multiplies 16 tokens of 64 outputs and COLUMNS inputs; adds to the sums if told to.
__device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 2], u32 grad, u32 x, int adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\n"
                 "wgmma.mma_async.sync.aligned.m64" WIDE KIND " {" SUMS "}, " OPERANDS ", adds, " TRANSPOSED "\n}"
                 : LIST(sums)
                 : "l"(described_boxes(grad)), "l"(described_boxes(x)), "r"(adds));
}

// The same with ones in the place of x: all eight columns are the sums of grad.
__device__ __forceinline__ void add_up(float (&sums)[4], u32 grad, u32 ones, int adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8" KIND " {%0,%1,%2,%3}, %4, %5, adds, 1, 1, 1, 0;\n}"
                 : LIST_4(sums, 0)
                 : "l"(described_boxes(grad)), "l"(described(ones, 128, 0)), "r"(adds));
}

// Multiplies all tokens.
template <bool SUMMED>
__device__ __forceinline__ void multiply_all(float (&sums)[COLUMNS / 2], float (&of_grad)[4], int tokens, u32 memory,
                                             u32 full, u32 empty, u32 ones) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    Ring ring;
    u32 before = 0; // the barrier of the stage whose multiplications may still run
    for (int token = 0; token < tokens; token += STEP, ring.next()) {
        const u32 stage = memory + ring.stage * STAGE;
        const u32 grad = stage + (HIGH == 2 ? group * BOX : 0), x = stage + (HIGH + (HIGH == 2 ? 0 : group * OWN)) * BOX;
        wait(full + ring.stage * 8, ring.phase);
        begin_multiplying();
#pragma unroll
        for (int part = 0; part < STEP / 16; ++part) {
            multiply(sums, grad + part * 2048, x + part * 2048, token + part > 0);
            if constexpr (SUMMED) add_up(of_grad, grad + part * 2048, ones, token + part > 0);
        }
        end_multiplying();
        wait_multiplied<1>(); // for the step before
        if (before && lane == 0) arrive(before, 0);
        before = empty + ring.stage * 8;
    }
    wait_multiplied<0>();
    if (before && lane == 0) arrive(before, 0);
}

// Writes two neighbours of one row, 0 where the weight is dead.
__device__ __forceinline__ void write_pair(const Call& call, int row, int column, float first, float second) {
    if (row >= call.outputs || column >= call.inputs) return;
    const long long place = (long long)row * call.inputs + column;
    u32 pair = to_bits(first) | (u32)to_bits(second) << 16;
    if (call.mask) pair &= (call.mask[place] ? 0xffffu : 0u) | (call.mask[place + 1] ? 0xffff0000u : 0u);
    *reinterpret_cast<u32*>(call.result + place) = pair;
}

__device__ __forceinline__ void compute(const Call& call, const int4& chunk, u32 memory, u32 full, u32 empty, u32 ones) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float sums[COLUMNS / 2], of_grad[4] = {};
    if (chunk.w)
        multiply_all<true>(sums, of_grad, call.tokens, memory, full, empty, ones);
    else
        multiply_all<false>(sums, of_grad, call.tokens, memory, full, empty, ones);
    const int row = chunk.x + (HIGH == 2 ? group * 64 : 0) + warp * 16 + lane / 4;
    const int first_strip = HIGH == 2 ? 0 : group * OWN;
#pragma unroll
    for (int strip = 0; strip < OWN; ++strip) {
        if (first_strip + strip >= chunk.z) break;
        const int first = __ldg(call.columns + chunk.y + first_strip + strip) + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float* four = sums + (strip * 8 + j) * 4;
            write_pair(call, row, first + j * 8, four[0], four[1]);
            write_pair(call, row + 8, first + j * 8, four[2], four[3]);
        }
    }
    if (!chunk.w || (HIGH == 1 && group)) return;
    if (lane % 4) return;
    if (row < call.outputs) call.summed[row] = to_bits(of_grad[0]);
    if (row + 8 < call.outputs) call.summed[row + 8] = to_bits(of_grad[2]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gradient(const __grid_constant__ Call call) {
    extern __shared__ unsigned char raw[];
    const u32 memory = (address_of(raw) + 1023) / 1024 * 1024, zeros = memory + STAGES * STAGE, ones = zeros + BOX;
    const u32 full = ones + ONES, empty = full + STAGES * 8;
    const int4 chunk = __ldg(call.chunks + blockIdx.x);
    for (int at = threadIdx.x * 4; at < BOX; at += THREADS * 4) write4(zeros + at, 0.f);
    for (int at = threadIdx.x * 4; at < ONES; at += THREADS * 4)
        write4(ones + at, __uint_as_float(IS_HALF ? 0x3c003c00 : 0x3f803f80));
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(full + s * 8, 1);
            make_barrier(empty + s * 8, GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // the copy engine and the matrix unit read those
    __syncthreads();
    let_next_begin();
    wait_for_last();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers();
        if (threadIdx.x == CONSUMERS) fetch(call, chunk, memory, full, empty);
        if (threadIdx.x == CONSUMERS + 32) write_zeros(call, zeros);
    } else {
        more_registers();
        compute(call, chunk, memory, full, empty, ones);
    }
}
