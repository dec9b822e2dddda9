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

// A partial leaves in whole rows, by bulk stores from the slot of the item's last tile, 16 rows at a time. The pitch
// keeps the four rows of a store to shared memory in different banks.
constexpr int STAGE_GROUPS = GROUPS < 2 ? GROUPS : 2;
constexpr int STAGE_PITCH = LATENT * 4 + 16;
static_assert(8 * STAGE_GROUPS * STAGE_PITCH <= SHORT_N * TOKEN_BYTES, "a slot holds the rows");

DEVICE void store_partial(const Accumulator& acc, const float (&normal)[GROUPS][2], const Output& output, int slot,
                          u32 stage, const Lane& lane) {
#pragma unroll
    for (int first = 0; first < GROUPS; first += STAGE_GROUPS) {
        if (first) {  // the rows before have left
            if (lane.warp == 0) bulk_wait_read();
            named_barrier(BARRIER_MATH, MATH_THREADS);
        }
        const u32 address = stage + 2 * lane.t * STAGE_PITCH + (16 * lane.warp + lane.g) * 4;
#pragma unroll
        for (int c = first; c < min(first + STAGE_GROUPS, GROUPS); c++) {
#pragma unroll
            for (int j = 0; j < LATENT_BLOCKS; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    store_shared(address + (8 * (c - first) + e % 2) * STAGE_PITCH + (BLOCK_DIM * j + e / 2 * 8) * 4,
                                 accumulated(acc, j, c, e) * normal[c][e % 2]);
            }
        }
        fence_async_proxy();
        named_barrier(BARRIER_MATH, MATH_THREADS);
        const int row = 8 * first + lane.lane;
        if (lane.warp == 0 && lane.lane < 8 * STAGE_GROUPS && row < TOTAL_ROWS)
            bulk_store(output.out_partial + output.partial_row(slot, row) * LATENT, stage + lane.lane * STAGE_PITCH,
                       LATENT * 4);
        bulk_commit();
    }
}

DEVICE void store_output(const Accumulator& acc, const float (&normal)[GROUPS][2], const Output& output,
                         int request, const Lane& lane) {
    const bool odd = lane.g % 2;
    const int first_latent = 16 * lane.warp + lane.g - odd;
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const int row = lane.row(c, odd);
#pragma unroll
        for (int j = 0; j < LATENT_BLOCKS; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 v = trade_latents(accumulated(acc, j, c, 2 * i) * normal[c][0],
                                               accumulated(acc, j, c, 2 * i + 1) * normal[c][1], odd);
                if (row < TOTAL_ROWS)
                    store_bfloat2(output.out_row(request, row) + first_latent + BLOCK_DIM * j + 8 * i, v.x, v.y,
                                  output.aligned);
            }
        }
    }
}

// All math threads. `stage` is the slot of the item's last tile, which is free from now on, and `stage_empty` the
// mbarrier that gives it back to the loader.
DEVICE void finish_item(const State& state, const Accumulator& acc, const Output& output, const Item& item,
                        u32 stage, u32 stage_empty, u32 shared, const Lane& lane) {
    named_barrier(BARRIER_MATH, MATH_THREADS);  // an item without tiles has no other: the sums before are read
    publish(state.sum, shared + Shared::SUM, lane, Sum());
    named_barrier(BARRIER_MATH, MATH_THREADS);
    float normal[GROUPS][2];
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = lane.row(c, k);
            const float sum = join_warps(shared + Shared::SUM, row, Sum());
            normal[c][k] = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (lane.warp || lane.g || row >= TOTAL_ROWS) continue;
            const float lse = LN_2 * (exponent_base(state.largest[c][k]) + log2_approx(sum));
            if (item.slot >= 0)
                output.lse_partial[output.partial_row(item.slot, row)] = lse;
            else
                output.lse[output.lse_strides.at(item.request, row)] = lse * output.lse_scale;
        }
    }
    if (item.slot >= 0) {
        store_partial(acc, normal, output, item.slot, stage, lane);
        if (lane.warp == 0) bulk_wait_read();
        __syncwarp();
    } else {
        store_output(acc, normal, output, item.request, lane);
    }
    if (stage_empty && lane.lane == 0) mbarrier_arrive(stage_empty);
}

}  // namespace streamla
