// The sparse multiplication of a warpgroup, for matrix24.cu, with what warpgroup.cuh has.
//
// Compile-time numbers: those of matrix24.cu.
#pragma once

#if FORMAT
#define INSTRUCTION "k64.f32.e4m3.e4m3"
#define TAIL "1, 1;"
constexpr int ITEM = 1, META_BYTES = 1024;
#else
#if IS_HALF
#define INSTRUCTION "k32.f32.f16.f16"
#else
#define INSTRUCTION "k32.f32.bf16.bf16"
#endif
#define TAIL "1, 1, 0, 0;"
constexpr int ITEM = 2, META_BYTES = 512; // bytes of an input; of the places of 64 outputs in a step
#endif
constexpr int PANELS = 64 * 64; // bytes of the values of 64 outputs in a step
constexpr int LINE = 512;       // bytes of the weight in a line of its map

// Has the copy engine read what describes a matrix before the first copy needs it.
__device__ __forceinline__ void know_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies a stage of the weight for all outputs of a block, from a line and a slab on.
__device__ __forceinline__ void copy_panels(u32 to, const void* map, int line, int slab, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
                 "[%5];" ::"r"(to), "l"(map), "r"(0), "r"(line), "r"(slab), "r"(barrier) : "memory");
}

// Asks for bytes without a place to put them: only the L2 cache is filled, so what is still written to them is seen.
__device__ __forceinline__ void ask_early(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Writes four sums to this place in block `rank` of the cluster.
__device__ __forceinline__ void write16_there(u32 place, int rank, float4 four) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "st.shared::cluster.v4.f32 [there], {%2,%3,%4,%5};\n}" ::"r"(place), "r"(rank), "f"(four.x), "f"(four.y),
                 "f"(four.z), "f"(four.w) : "memory");
}

// Where the live values of a step are, as this thread hands them to the instruction. It reads these registers while it
// runs, which the compiler does not know: they have to be kept until the multiplications of the step have ended.
struct Selectors {
    u32 words[2] = {0, 0};

    __device__ __forceinline__ void load(u32 from, int thread) {
#if FORMAT
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from + thread * 8));
#else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from + thread * 4));
        words[1] = words[0]; // half of the threads have those of either multiplication
#endif
    }

    // Uses the registers in a way that has no effect and cannot be left out; `positive` is never below 0.
    __device__ __forceinline__ void keep(u32 anywhere, int positive) const {
        asm volatile("{\n.reg .pred never;\nsetp.lt.s32 never, %3, 0;\n@never st.shared.v2.u32 [%0], {%1,%2};\n}" ::"r"(
                         anywhere),
                     "r"(words[0]), "r"(words[1]), "r"(positive)
                     : "memory");
    }
};

#if TOKENS == 16
#define WIDE "n16"
#define SUMS SUMS_8
#define LIST(a) LIST_8(a, 0)
#define OPERANDS "%8, %9, %10, %12"
#define ADDS "%11"
#elif TOKENS == 32
#define WIDE "n32"
#define SUMS SUMS_16
#define LIST(a) LIST_16(a, 0)
#define OPERANDS "%16, %17, %18, %20"
#define ADDS "%19"
#elif TOKENS == 64
#define WIDE "n64"
#define SUMS SUMS_32
#define LIST(a) LIST_32(a, 0)
#define OPERANDS "%32, %33, %34, %36"
#define ADDS "%35"
#elif TOKENS == 128
#define WIDE "n128"
#define SUMS SUMS_64
#define LIST(a) LIST_64(a, 0)
#define OPERANDS "%64, %65, %66, %68"
#define ADDS "%67"
#elif TOKENS == 176
#define WIDE "n176"
#define SUMS SUMS_88
#define LIST(a) LIST_64(a, 0), LIST_16(a, 64), LIST_8(a, 80)
#define OPERANDS "%88, %89, %90, %92"
#define ADDS "%91"
#elif TOKENS == 192
#define WIDE "n192"
#define SUMS SUMS_96
#define LIST(a) LIST_64(a, 0), LIST_32(a, 64)
#define OPERANDS "%96, %97, %98, %100"
#define ADDS "%99"
#else
#define WIDE "n256"
#define SUMS SUMS_128
#define LIST(a) LIST_64(a, 0), LIST_64(a, 64)
#define OPERANDS "%128, %129, %130, %132"
#define ADDS "%131"
#endif

// Multiplies one half of a step: 64 outputs whose values begin at `w`, TOKENS rows of x; adds to the sums if told to.
template <int HALF>
__device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], u32 w, u32 x, const Selectors& selectors, int adds) {
    const u64 left = described(w + HALF * (PANELS / 2), 256, 3), right = described(x + HALF * 64, 1024, 1);
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\n"
                 "wgmma.mma_async.sp.sync.aligned.m64" WIDE INSTRUCTION " {" SUMS "}, " OPERANDS ", adds, " TAIL "\n}"
                 : LIST(sums)
                 : "l"(left), "l"(right), "r"(selectors.words[HALF]), "r"(adds), "n"(FORMAT ? 0 : HALF));
}
