// The end of an item: the accumulators, normalised, leave the program, as a partial (fp32) or, if the item is the
// whole request, as the output itself (bf16).
#pragma once

#include "bf16_softmax.cuh"

namespace streamla {

struct Output {
    u16* out;  // bf16
    float* lse;
    Strides out_strides, lse_strides;
    float *out_partial, *lse_partial;  // contiguous
    bool aligned;                      // every row of out starts at a multiple of 16 bytes
    float lse_scale;                   // 1 for the natural logarithm

    DEVICE i64 partial_row(int slot, int row) const { return static_cast<i64>(slot) * TOTAL_ROWS + row; }
    DEVICE u16* out_row(int request, int row) const { return out + out_strides.at(request, row); }
};

DEVICE void store_bfloat2(u16* p, float low, float high, bool aligned) {
    const u32 pair = pack_bfloat2(low, high);
    if (aligned) {
        *reinterpret_cast<u32*>(p) = pair;
    } else {
        p[0] = static_cast<u16>(pair);
        p[1] = static_cast<u16>(pair >> 16);
    }
}

// Neighbouring threads (g and g ^ 1) hold neighbouring latents of two rows: the even one takes both latents of the
// first row, the odd one of the second.
DEVICE float2 trade_latents(float first_row, float second_row, bool odd) {
    const float other = __shfl_xor_sync(FULL_WARP, odd ? first_row : second_row, 4);
    return odd ? make_float2(other, second_row) : make_float2(first_row, other);
}

DEVICE void finish_item(const State& state, const Accumulator& acc, const Output& output, const Item& item,
                        u32 shared, const Lane& lane) {
    publish(state.sum, shared + Shared::SUM, lane, Sum());
    named_barrier(BARRIER_MATH, MATH_THREADS);
    const bool odd = lane.g % 2;
    const int first_latent = lane.half * HALF_LATENTS + 16 * lane.warp + lane.g - odd;
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        float normal[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = lane.row(c, k);
            const float sum = join_warps(shared + Shared::SUM, row, Sum());
            normal[k] = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (lane.math_warp() || lane.g || row >= TOTAL_ROWS) continue;
            const float lse = LN_2 * (exponent_base(state.largest[c][k]) + log2_approx(sum));
            if (item.slot >= 0)
                output.lse_partial[output.partial_row(item.slot, row)] = lse;
            else
                output.lse[output.lse_strides.at(item.request, row)] = lse * output.lse_scale;
        }
        const int row = lane.row(c, odd);
#pragma unroll
        for (int j = 0; j < M_TILES; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 v = trade_latents(acc[j][4 * c + 2 * i] * normal[0],
                                               acc[j][4 * c + 2 * i + 1] * normal[1], odd);
                const int latent = first_latent + 64 * j + 8 * i;
                if (row >= TOTAL_ROWS) continue;
                if (item.slot >= 0)
                    *reinterpret_cast<float2*>(output.out_partial +
                                               output.partial_row(item.slot, row) * LATENT + latent) = v;
                else
                    store_bfloat2(output.out_row(item.request, row) + latent, v.x, v.y, output.aligned);
            }
        }
    }
}

}  // namespace streamla
