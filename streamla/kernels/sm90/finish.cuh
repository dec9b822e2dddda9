// The end of an item: the accumulators, normalised, leave the program, as a partial (fp32) or, if the item is the
// whole request, as the output itself (bf16).
#pragma once

#include "softmax.cuh"

namespace streamla {

struct Output {
    u16* out;  // bf16
    float* lse;
    Strides out_strides, lse_strides;
    float *out_partial, *lse_partial;  // contiguous
    bool aligned;                      // every row of out starts at a multiple of 16 bytes
    float lse_scale;                   // 1 for the natural logarithm

    DEVICE float* partial(int slot, int row) const {
        return out_partial + (static_cast<i64>(slot) * TOTAL_ROWS + row) * LATENT;
    }
};

DEVICE void publish_sums(const Sums& sums, u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float sum = sums[c][k];
#pragma unroll
            for (int o = 4; o < WARP; o *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, o);
            if (lane.g == 0)
                store_shared(row_warps_address(shared + Shared::SUM, lane.row(c, k)) + lane.math_warp() * 4, sum);
        }
    }
}

DEVICE void store_bfloats(u16* p, const float (&v)[4], bool aligned) {
    const uint2 pairs = {pack_bfloat2(v[0], v[1]), pack_bfloat2(v[2], v[3])};
    if (aligned) {
        *reinterpret_cast<uint2*>(p) = pairs;
    } else {
        p[0] = static_cast<u16>(pairs.x);
        p[1] = static_cast<u16>(pairs.x >> 16);
        p[2] = static_cast<u16>(pairs.y);
        p[3] = static_cast<u16>(pairs.y >> 16);
    }
}

DEVICE void finish_item(const Sums& sums, const Accumulator& acc, const Output& output, const Item& item,
                        int row_begin, u32 shared, float value_scale, const Lane& lane) {
    publish_sums(sums, shared, lane);
    named_barrier(BARRIER_MATH, MATH_THREADS);
    const int latent = first_latent(lane);
    const bool writes_lse = lane.math_warp() == 0 && lane.g == 0;
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int tile_row = lane.row(c, k), row = row_begin + tile_row;
            if (row >= TOTAL_ROWS) continue;
            const float sum = sum_of_warps(shared + Shared::SUM, tile_row);
            const float normal = sum == 0.0f ? 0.0f : value_scale / sum;
            const float largest = load_shared_f32(running_max_address(shared, tile_row));
            const float lse = LN_2 * (exponent_base(largest) + log2_approx(sum));
            const float v[THREAD_LATENTS] = {acc[0][4 * c + k] * normal, acc[0][4 * c + k + 2] * normal,
                                             acc[1][4 * c + k] * normal, acc[1][4 * c + k + 2] * normal};
            if (item.slot >= 0) {
                *reinterpret_cast<float4*>(output.partial(item.slot, row) + latent) =
                    make_float4(v[0], v[1], v[2], v[3]);
                if (writes_lse) output.lse_partial[static_cast<i64>(item.slot) * TOTAL_ROWS + row] = lse;
            } else {
                store_bfloats(output.out + output.out_strides.at(item.request, row) + latent, v,
                              output.aligned);
                if (writes_lse)
                    output.lse[output.lse_strides.at(item.request, row)] = lse * output.lse_scale;
            }
        }
    }
}

}  // namespace streamla
