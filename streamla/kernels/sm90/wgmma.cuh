// wgmma of a warpgroup: d (64 x N fp32) = a (64 x 16) * b (16 x N) + (accumulate ? d : 0), b in shared memory, a in registers or
// there, too.
#pragma once

#include "ptx.cuh"

namespace streamla {

// Shared-memory matrix descriptor. Offsets in bytes; their meaning depends on the swizzle and on which
// dimension is contiguous (PTX ISA, "Matrix descriptor format").
enum Swizzle : u64 { SWIZZLE_NONE = 0, SWIZZLE_128 = 1, SWIZZLE_64 = 2, SWIZZLE_32 = 3 };
DEVICE u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, Swizzle swizzle) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// The operands of an asm statement are numbered, d first, so each N has numbers of its own: those of what follows d are
// the last arguments below. A dimension of an operand in shared memory that is not K may be the contiguous one there: N of
// b (N_MAJOR), M of a (M_MAJOR).
#define WGMMA_TEXT_4 "%0, %1, %2, %3"
#define WGMMA_TEXT_8 WGMMA_TEXT_4 ", %4, %5, %6, %7"
#define WGMMA_TEXT_12 WGMMA_TEXT_8 ", %8, %9, %10, %11"
#define WGMMA_TEXT_16 WGMMA_TEXT_12 ", %12, %13, %14, %15"
#define WGMMA_TEXT_24 WGMMA_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_TEXT_32 WGMMA_TEXT_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D_8(i) WGMMA_D_4(i), WGMMA_D_4(i + 4)
#define WGMMA_D_12(i) WGMMA_D_8(i), WGMMA_D_4(i + 8)
#define WGMMA_D_16(i) WGMMA_D_8(i), WGMMA_D_8(i + 8)
#define WGMMA_D_24(i) WGMMA_D_16(i), WGMMA_D_8(i + 16)
#define WGMMA_D_32(i) WGMMA_D_16(i), WGMMA_D_16(i + 16)
#define WGMMA_TEXT(TYPE, N, SIZE, A, B, ACCUMULATE, MAJORS)                                                      \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                                                      \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {" WGMMA_TEXT_##SIZE "}, " A ", " B     \
    ", p, 1, 1, " MAJORS ";\n}"

#define WGMMA_REGISTERS(TYPE, N, SIZE, A0, A1, A2, A3, B, ACCUMULATE, B_MAJOR)                                   \
    template <bool N_MAJOR>                                                                                     \
    DEVICE void wgmma_##TYPE(float (&d)[SIZE], const u32 (&a)[4], u64 b, bool accumulate) {                      \
        asm volatile(WGMMA_TEXT(TYPE, N, SIZE, "{" A0 ", " A1 ", " A2 ", " A3 "}", B, ACCUMULATE, B_MAJOR)       \
                     : WGMMA_D_##SIZE(0)                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),    \
                       "n"(static_cast<int>(N_MAJOR)));                                                         \
    }
WGMMA_REGISTERS(f16, 8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
WGMMA_REGISTERS(f16, 16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA_REGISTERS(f16, 24, 12, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
WGMMA_REGISTERS(f16, 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA_REGISTERS(f16, 48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
WGMMA_REGISTERS(f16, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA_REGISTERS(bf16, 8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
WGMMA_REGISTERS(bf16, 16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA_REGISTERS(bf16, 24, 12, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
WGMMA_REGISTERS(bf16, 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")

#define WGMMA_SHARED(TYPE, N, SIZE, A, B, ACCUMULATE, A_MAJOR, B_MAJOR)                                          \
    template <bool M_MAJOR, bool N_MAJOR>                                                                       \
    DEVICE void wgmma_##TYPE(float (&d)[SIZE], u64 a, u64 b, bool accumulate) {                                  \
        asm volatile(WGMMA_TEXT(TYPE, N, SIZE, A, B, ACCUMULATE, A_MAJOR ", " B_MAJOR)                           \
                     : WGMMA_D_##SIZE(0)                                                                        \
                     : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(M_MAJOR)),        \
                       "n"(static_cast<int>(N_MAJOR)));                                                         \
    }
WGMMA_SHARED(bf16, 8, 4, "%4", "%5", "%6", "%7", "%8")
WGMMA_SHARED(bf16, 16, 8, "%8", "%9", "%10", "%11", "%12")
WGMMA_SHARED(bf16, 24, 12, "%12", "%13", "%14", "%15", "%16")
WGMMA_SHARED(bf16, 32, 16, "%16", "%17", "%18", "%19", "%20")

}  // namespace streamla
