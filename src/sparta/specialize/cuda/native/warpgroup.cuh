// What kernels by the matrix instructions of Hopper's warpgroups share: barriers, copies that signal them, results on their
// way out, registers, and the lists of sums that an instruction takes.
//
// Compile-time numbers: BESIDE (blocks of a cluster that fetch for each other), GROUPS (warpgroups that multiply).
#pragma once

typedef unsigned long long u64;

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
    if (GROUPS == 1 || group == 0) { // numbers that are known, or the compiler reserves all barriers there are
        asm volatile("bar.sync 1, 128;" ::: "memory");
    } else if (GROUPS == 2 || group == 1) {
        asm volatile("bar.sync 2, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 3, 128;" ::: "memory");
    }
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

__device__ __forceinline__ uint4 read16(u32 from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from) : "memory");
    return value;
}

// ---------------------------------------------------------------------------------------------- multiplication

// Registers of warpgroups that only copy go to those that multiply.
__device__ __forceinline__ void fewer_registers() {
#if GROUPS == 2
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#elif GROUPS == 3
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
}

__device__ __forceinline__ void more_registers() {
#if GROUPS == 2 && CTAS == 2 // blocks on a multiprocessor, where they are told
    asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
#elif GROUPS == 2
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#elif GROUPS == 3
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#endif
}

__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_multiplying() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_multiplied() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

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
#define SUMS_88 SUMS_64 "," FROM_64 "," FROM_80
#define SUMS_96 SUMS_88 "," FROM_88
#define SUMS_128 SUMS_96 "," FROM_96
#define LIST_4(a, i) "+f"(a[i]), "+f"(a[(i) + 1]), "+f"(a[(i) + 2]), "+f"(a[(i) + 3])
#define LIST_8(a, i) LIST_4(a, i), LIST_4(a, (i) + 4)
#define LIST_16(a, i) LIST_8(a, i), LIST_8(a, (i) + 8)
#define LIST_32(a, i) LIST_16(a, i), LIST_16(a, (i) + 16)
#define LIST_64(a, i) LIST_32(a, i), LIST_32(a, (i) + 32)
