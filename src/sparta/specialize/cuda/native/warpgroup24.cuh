// The instructions of matrix24.cu: barriers and copies that signal them, and the sparse multiplication of a warpgroup.
//
// Compile-time numbers: those of matrix24.cu.
#pragma once

typedef unsigned long long u64;

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

__device__ __forceinline__ u32 address_of(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ---------------------------------------------------------------------------------------------- barriers and copies

__device__ __forceinline__ void make_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier with this address in block `rank` of the cluster.
__device__ __forceinline__ void arrive(u32 barrier, int rank) {
#if BESIDE > 1
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank)
                 : "memory");
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra END;\n"
                 "bra AGAIN;\nEND:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Asks for bytes without a place to put them: only the L2 cache is filled, so what is still written to them is seen.
__device__ __forceinline__ void ask_early(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Copies a box of x to this place in all blocks that share it, and signals the barrier of each.
__device__ __forceinline__ void copy_box(u32 to, const void* map, int column, int row, u32 barrier) {
#if BESIDE > 1
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier),
                 "h"((u16)((1 << BESIDE) - 1)) : "memory");
#else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
#endif
}

// Waits for the other threads of a warpgroup.
__device__ __forceinline__ void meet(int group) {
    if (GROUPS == 1 || group == 0) {
        asm volatile("bar.sync 1, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 128;" ::: "memory");
    }
}

// Waits for all warpgroups that multiply.
__device__ __forceinline__ void meet_consumers() {
    asm volatile("bar.sync 3, %0;" ::"n"(GROUPS * 128) : "memory");
}

// Stores four 8x8 matrices, as the matrix unit leaves them, with rows and columns exchanged; a lane names one row.
__device__ __forceinline__ void store_transposed(u32 row, const u32 (&pairs)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
}

__device__ __forceinline__ void write4(u32 to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

__device__ __forceinline__ float2 read8(u32 from) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from));
    return value;
}

__device__ __forceinline__ void write16(u32 to, float4 value) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(value.x), "f"(value.y), "f"(value.z),
                 "f"(value.w) : "memory");
}

__device__ __forceinline__ uint4 read16(u32 from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from) : "memory");
    return value;
}

#if SPLIT > 1
// Adds up what the blocks of a cluster have at this place, in their order: eight sums of each.
__device__ __forceinline__ void add_parts(float (&total)[8], u32 place) {
    float4 parts[SPLIT][2];
#pragma unroll
    for (int q = 0; q < SPLIT; ++q) {
        u32 there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(q));
#pragma unroll
        for (int half = 0; half < 2; ++half)
            asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                         : "=f"(parts[q][half].x), "=f"(parts[q][half].y), "=f"(parts[q][half].z), "=f"(parts[q][half].w)
                         : "r"(there + half * 2048) : "memory");
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) total[i] = 0.f;
#pragma unroll
    for (int q = 0; q < SPLIT; ++q)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            total[half * 4] += parts[q][half].x;
            total[half * 4 + 1] += parts[q][half].y;
            total[half * 4 + 2] += parts[q][half].z;
            total[half * 4 + 3] += parts[q][half].w;
        }
}
#endif

// ---------------------------------------------------------------------------------------------- multiplication

// Registers of warpgroups that only copy go to those that multiply.
__device__ __forceinline__ void fewer_registers() {
#if GROUPS == 2
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
}

__device__ __forceinline__ void more_registers() {
#if GROUPS == 2
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
}

__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_multiplying() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_multiplied() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
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

// How a matrix lies in shared memory: its address, the bytes between 8 rows, and the kind of swizzle.
__device__ __forceinline__ u64 described(u32 address, u32 stride, u64 swizzle) {
    return (u64)(address >> 4) | (u64)1 << 16 | (u64)(stride >> 4) << 32 | swizzle << 62;
}

#define SUMS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SUMS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FROM_32 \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FROM_64 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define FROM_80 "%80,%81,%82,%83,%84,%85,%86,%87"
#define FROM_88 "%88,%89,%90,%91,%92,%93,%94,%95"
#define FROM_96 \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_64 SUMS_32 "," FROM_32
#define LIST_4(a, i) "+f"(a[i]), "+f"(a[(i) + 1]), "+f"(a[(i) + 2]), "+f"(a[(i) + 3])
#define LIST_8(a, i) LIST_4(a, i), LIST_4(a, (i) + 4)
#define LIST_16(a, i) LIST_8(a, i), LIST_8(a, (i) + 8)
#define LIST_32(a, i) LIST_16(a, i), LIST_16(a, (i) + 16)
#define LIST_64(a, i) LIST_32(a, i), LIST_32(a, (i) + 32)

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
#define SUMS SUMS_64 "," FROM_64 "," FROM_80
#define LIST(a) LIST_64(a, 0), LIST_16(a, 64), LIST_8(a, 80)
#define OPERANDS "%88, %89, %90, %92"
#define ADDS "%91"
#elif TOKENS == 192
#define WIDE "n192"
#define SUMS SUMS_64 "," FROM_64 "," FROM_80 "," FROM_88
#define LIST(a) LIST_64(a, 0), LIST_32(a, 64)
#define OPERANDS "%96, %97, %98, %100"
#define ADDS "%99"
#else
#define WIDE "n256"
#define SUMS SUMS_64 "," FROM_64 "," FROM_80 "," FROM_88 "," FROM_96
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
