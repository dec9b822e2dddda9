// Wide attention: the end of an item, from accumulators to the result or to a partial slot.
#pragma once

#include "output.cuh"
#include "wide_tile.cuh"

namespace streamla {

// All math warps have added their last tile. Leaves each column's 1 / mass (times the value scale) in the
// scratch and writes its log mass.
DEVICE void finish_rows(
    const float (&mass)[COLUMNS / 4], const Output& o, const Item& item, int first_row, int num_rows,
    float value_scale, u32 shared, const Lane& lane) {
    const u32 scratch = shared + Shared::PROBABILITY;  // [warp][column]
    const int warp = threadIdx.x / WARP;
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) {
        float sum = mass[i];
#pragma unroll
        for (int step = 4; step <= 16; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
        const int column = 8 * (i / 2) + 2 * lane.lane_pair + i % 2;
        if (lane.lane_row == 0) store_shared(scratch + (warp * COLUMNS + column) * 4, sum);
    }
    named_barrier(BARRIER_MATH, MATH_THREADS);
    const int column = forget(static_cast<int>(threadIdx.x));
    if (column < COLUMNS) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < MATH_WARPS; ++w) sum += load_shared_f32(scratch + (w * COLUMNS + column) * 4);
        const float reference = load_shared_f32(shared + Shared::ROW_STATE + column * 8 + 4);
        const float log_mass = (reference + log2_approx(sum)) * LN_2;
        if (column < num_rows) {
            const int row = first_row + column;
            if (item.slot < 0)
                o.lse[o.lse_strides.at(item.request, row)] = log_mass * o.lse_scale;
            else if (o.merges)
                o.exchange().store_lse(item.slot, row, log_mass);
            else
                o.lse_partial[partial_row(item.slot, row)] = log_mass;
        }
        store_shared(shared + Shared::FACTOR + column * 4, sum == 0.f ? 0.f : value_scale / sum);
    }
    named_barrier(BARRIER_MATH, MATH_THREADS);
}

// Lanes of neighbouring accumulator rows trade halves, so that every store covers whole sectors of 32 bytes.
DEVICE void store_partial(float* p, const float (&v)[8], bool exists, const Lane& lane) {
    const bool odd = lane.lane_row % 2;
    float low[4], high[4];  // of the two lanes' first four latents, and of their last
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(FULL_WARP, odd ? v[i] : v[4 + i], 4);
        low[i] = odd ? other : v[i];
        high[i] = odd ? v[4 + i] : other;
    }
    if (!exists) return;
    float* pair = p - (odd ? 4 : 0);
    store_global(pair, make_float4(low[0], low[1], low[2], low[3]));
    store_global(pair + 8, make_float4(high[0], high[1], high[2], high[3]));
}

// A thread holds eight neighbouring latents of each of its columns.
DEVICE void store_rows(
    const float (&out)[4][SCORES], const Output& o, const Item& item, int first_row, int num_rows, u32 shared,
    const Lane& lane) {
    const int latent = forget(lane.value_latent());
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) {
        const int column = 8 * (i / 2) + 2 * lane.lane_pair + i % 2;
        const float factor = load_shared_f32(shared + Shared::FACTOR + column * 4);
        float v[8];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            v[2 * m] = out[m][i / 2 * 4 + i % 2] * factor;
            v[2 * m + 1] = out[m][i / 2 * 4 + i % 2 + 2] * factor;
        }
        const bool exists = column < num_rows;
        const int row = first_row + column;
        if (item.slot >= 0 && o.merges) {
            if (exists)
                store_relaxed(o.exchange().row(item.slot, row) + latent / 2,
                              make_uint4(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]), pack_half2(v[4], v[5]),
                                         pack_half2(v[6], v[7])));
        } else if (item.slot >= 0) {
            store_partial(o.partial(item.slot, row) + latent, v, exists, lane);
        } else if (exists) {
            store_bfloats<8>(o.out_row(item.request, row) + latent, v, o.aligned);
        }
    }
}

DEVICE void finish_item(
    const float (&out)[4][SCORES], const float (&mass)[COLUMNS / 4], const Output& o, const Item& item, float value_scale,
    u32 shared, const Lane& lane) {
    const int first_row = this_first_row(), num_rows = min(ROWS, TOTAL_ROWS - first_row);
    const bool to_programs = item.slot >= 0 && o.merges;
    if (to_programs) wait_until_emptied(shared + Shared::EMPTIED);
    finish_rows(mass, o, item, first_row, num_rows, to_programs ? 1.0f : value_scale, shared, lane);
    store_rows(out, o, item, first_row, num_rows, shared, lane);
}

}  // namespace streamla
