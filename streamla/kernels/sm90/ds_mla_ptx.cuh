// What the fp8_ds_mla kernel needs of PTX beyond ptx.cuh: wgmma with bf16 operands, the first of them in registers.
#pragma once

#include "ptx.cuh"

namespace streamla {

// d (64 x N fp32) = a (64 x 16 bf16, registers) * b (16 x N bf16, shared) + (accumulate ? d : 0).
// N_MAJOR: b's N is the contiguous dimension in shared memory, else its K.
template <bool N_MAJOR> DEVICE void wgmma_bf16(float (&d)[4], const u32 (&a)[4], u64 b, bool accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, %10;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(N_MAJOR)));
}
template <bool N_MAJOR> DEVICE void wgmma_bf16(float (&d)[8], const u32 (&a)[4], u64 b, bool accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, %14;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                   "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(N_MAJOR)));
}
template <bool N_MAJOR> DEVICE void wgmma_bf16(float (&d)[12], const u32 (&a)[4], u64 b, bool accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %17, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, p, 1, 1, "
                 "%18;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                   "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(N_MAJOR)));
}
template <bool N_MAJOR> DEVICE void wgmma_bf16(float (&d)[16], const u32 (&a)[4], u64 b, bool accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                   "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
                   "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(N_MAJOR)));
}

}  // namespace streamla
