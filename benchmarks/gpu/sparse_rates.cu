// What forbids a faster 2:4 layer, each alone: the sparse matrix instructions of Hopper on operands that are in shared
// memory already (rate), and the bytes of a call on their way into it (stream). Neither computes a layer.
//
// Compile-time numbers: those of matrix24.cu.
#include "few_tokens.cuh"
#include "warpgroup.cuh"
#include "warpgroup24.cuh"

constexpr int X_BYTES = TOKENS * 128, W_BYTES = PANELS + META_BYTES, STEP = X_BYTES + GROUPS * EACH * W_BYTES;
constexpr int TURNS = 2; // steps whose operands are there

struct Rate {
    const uint4* operands; // TURNS steps, as matrix24.cu has them in a stage
    float* sums;
    int rounds;
};

extern "C" __global__ void __launch_bounds__(GROUPS * 128, 1) rate(const Rate call) {
    extern __shared__ unsigned char raw[];
    const u32 memory = (address_of(raw) + 1023) / 1024 * 1024;
    for (int i = threadIdx.x; i < TURNS * STEP / 16; i += GROUPS * 128) {
        const uint4 value = call.operands[i];
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(memory + i * 16), "r"(value.x), "r"(value.y),
                     "r"(value.z), "r"(value.w) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const int group = threadIdx.x / 128;
    Selectors places[TURNS][EACH];
    float sums[EACH][TOKENS / 2];
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int t = 0; t < TURNS; ++t)
            places[t][e].load(memory + t * STEP + X_BYTES + (group * EACH + e) * W_BYTES + PANELS, threadIdx.x % 128);
    for (int round = 0; round < call.rounds; ++round) {
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            const u32 x = memory + t * STEP, w = x + X_BYTES + group * EACH * W_BYTES;
            begin_multiplying();
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                multiply<0>(sums[e], w + e * W_BYTES, x, places[t][e], round + t > 0);
                multiply<1>(sums[e], w + e * W_BYTES, x, places[t][e], 1);
            }
            end_multiplying();
            wait_multiplied<1>();
        }
    }
    wait_multiplied<0>();
    float total = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) total += sums[e][i];
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int t = 0; t < TURNS; ++t) places[t][e].keep(memory, call.rounds);
    call.sums[blockIdx.x * GROUPS * 128 + threadIdx.x] = total;
}

constexpr int PIECE = 16384, PIECES = 12; // bytes of a copy, and copies on their way

struct Stream {
    const unsigned char* bytes;
    int pieces;
};

extern "C" __global__ void __launch_bounds__(32, 1) stream(const Stream call) {
    extern __shared__ unsigned char raw[];
    const u32 memory = (address_of(raw) + 1023) / 1024 * 1024, done = memory + PIECES * PIECE;
    if (threadIdx.x) return;
    for (int s = 0; s < PIECES; ++s) make_barrier(done + s * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    let_next_begin(); // what is read is older than the kernels before this one
    const int mine = (call.pieces - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    for (int i = 0; i < mine + PIECES; ++i) {
        const int slot = i % PIECES;
        if (i >= PIECES) wait(done + slot * 8, (i / PIECES - 1) & 1);
        if (i >= mine) continue;
        expect(done + slot * 8, PIECE);
        copy(memory + slot * PIECE, call.bytes + (blockIdx.x + (long long)i * gridDim.x) * PIECE, PIECE, done + slot * 8);
    }
    wait_for_last();
}
