// What the bf16 kernel needs of PTX beyond ptx.cuh: tensor copies and asynchronous 16-byte copies.
#pragma once

#include "ptx.cuh"

namespace streamla {

// What cuTensorMapEncodeTiled makes: a kernel parameter, passed by value.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

DEVICE void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}
// The box at (x0, x1, x2, x3), innermost first.
DEVICE void tensor_load(u32 destination, const TensorMap& map, int x0, int x1, int x2, int x3, u32 barrier,
                        u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
        :: "r"(destination), "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier), "l"(l2_policy)
        : "memory");
}

// Shared to global: 16-byte aligned, a multiple of 16 bytes. The waits are of the thread that stored: until the source
// has been read, or until the destination has been written.
DEVICE void bulk_store(void* destination, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(destination), "r"(source), "r"(bytes) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// 16 bytes that nobody writes during the launch. Volatile: requested here, whenever they are used.
DEVICE uint4 load_global_now(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// 16 bytes from global to shared memory by this thread, in the generic proxy.
DEVICE void async_copy(u32 destination, const void* source, u64 l2_policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 :: "r"(destination), "l"(source), "l"(l2_policy) : "memory");
}
DEVICE void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// Both halves brought into the finite range; NaN becomes a number too.
DEVICE u32 finite_bfloat2(u32 v) {
    constexpr u32 LARGEST = 0x7f7f7f7f, LOWEST = 0xff7fff7f;
    asm("max.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(LOWEST));
    asm("min.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(LARGEST));
    return v;
}

}  // namespace streamla
