// Bulk copies from memory into shared memory: one instruction of one lane each, and a barrier that counts their bytes.
//
// Compute capability 9.0. A warp that has read what a copy brought must meet (`__syncwarp`) before one of its lanes asks for
// the next one to the same place.
#pragma once

__device__ __forceinline__ void prepare_barrier(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// What the lanes that prepared barriers call before any of them is used.
__device__ __forceinline__ void barriers_prepared() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;}" ::"r"(
                     barrier),
                 "r"(parity)
                 : "memory");
}

// Asks for bytes without a place to put them: only the L2 cache is filled, so what is still written to them is seen.
__device__ __forceinline__ void ask_early(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
