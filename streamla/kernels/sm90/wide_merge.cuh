// Wide attention: one row of a split request from its partials, in the order of the slots.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

// LATENT / 4 threads, four latents each. A partial that saw nothing has log mass -inf and zeros.
DEVICE void merge_row(
    const float* out_partial, const float* lse_partial, int begin, int end, int row, u16* out, float* lse,
    float lse_scale) {
    float top = NEG_INF;
#pragma unroll 4
    for (int slot = begin; slot < end; ++slot) top = fmaxf(top, lse_partial[static_cast<i64>(slot) * ROWS + row]);
    const float base = top == NEG_INF ? 0.f : top;

    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    float mass = 0.f;
#pragma unroll 8
    for (int slot = begin; slot < end; ++slot) {
        const i64 partial = static_cast<i64>(slot) * ROWS + row;
        const float4 v = *reinterpret_cast<const float4*>(out_partial + partial * LATENT + threadIdx.x * 4);
        const float weight = exp2_approx((lse_partial[partial] - base) * LOG2_E);
        mass += weight;
        total.x = fmaf(weight, v.x, total.x);
        total.y = fmaf(weight, v.y, total.y);
        total.z = fmaf(weight, v.z, total.z);
        total.w = fmaf(weight, v.w, total.w);
    }
    const float factor = mass == 0.f ? 0.f : 1.f / mass;
    const u32 low = pack_bfloat2(total.x * factor, total.y * factor);
    const u32 high = pack_bfloat2(total.z * factor, total.w * factor);
    u16* p = out + threadIdx.x * 4;
    if (reinterpret_cast<u64>(p) % 8 == 0) {
        *reinterpret_cast<uint2*>(p) = make_uint2(low, high);
    } else {
        p[0] = low;
        p[1] = low >> 16;
        p[2] = high;
        p[3] = high >> 16;
    }
    if (threadIdx.x == 0) *lse = (base + log2_approx(mass) * LN_2) * lse_scale;
}

}  // namespace streamla
