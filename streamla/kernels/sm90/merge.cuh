// Merge: a split request's result from its partials, weighted by exp(lse).
//
// In the same launch: every program of a request, once all of them have stored their partials, merges an
// equal share of the request's rows. The programs of a launch are all resident (a cooperative launch), so
// they may wait for each other. The order of summation depends on the plan alone.
#pragma once

#include "finish.cuh"

namespace streamla {

constexpr int UNIT_LATENTS = 64;  // a unit of merging: 64 latents of a row, 256 bytes of each partial
constexpr int ROW_UNITS = LATENT / UNIT_LATENTS;
constexpr int UNIT_LANES = UNIT_LATENTS / 4;
constexpr int MERGE_DEPTH = 5;  // partials a lane has in flight

// Four latents, weighted relative to exp(largest); lse is natural here.
struct Weighted {
    float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float largest = NEG_INF;
    float sum = 0.0f;

    DEVICE void rescale(float new_largest) {
        const float scale = exp2_approx(LOG2_E * (largest - exponent_base(new_largest)));
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] *= scale;
        sum *= scale;
        largest = new_largest;
    }
    DEVICE void add(const float4& v, float lse) {
        const float weight = exp2_approx(LOG2_E * (lse - exponent_base(largest)));
        value[0] += weight * v.x;
        value[1] += weight * v.y;
        value[2] += weight * v.z;
        value[3] += weight * v.w;
        sum += weight;
    }
    // The partials begin, begin + stride, ... before end; `v` and `lse` are those of slot 0.
    DEVICE void add_partials(const float* v, const float* lse, int begin, int end, int stride) {
        for (int first = begin; first < end; first += stride * MERGE_DEPTH) {
            float4 values[MERGE_DEPTH];
            float weights[MERGE_DEPTH], new_largest = largest;
#pragma unroll
            for (int i = 0; i < MERGE_DEPTH; i++) {
                const i64 slot = first + i * stride;
                const bool exists = slot < end;
                weights[i] = exists ? __ldcg(lse + slot * TOTAL_ROWS) : NEG_INF;
                values[i] = exists ? __ldcg(reinterpret_cast<const float4*>(v + slot * TOTAL_ROWS * LATENT))
                                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (int i = 0; i < MERGE_DEPTH; i++) new_largest = fmaxf(new_largest, weights[i]);
            rescale(new_largest);
#pragma unroll
            for (int i = 0; i < MERGE_DEPTH; i++) add(values[i], weights[i]);
        }
    }
    DEVICE void add(Weighted other) {
        const float new_largest = fmaxf(largest, other.largest);
        rescale(new_largest);
        other.rescale(new_largest);
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] += other.value[i];
        sum += other.sum;
    }
    DEVICE Weighted from_lane(int mask) const {
        Weighted w;
#pragma unroll
        for (int i = 0; i < 4; i++) w.value[i] = __shfl_xor_sync(FULL_WARP, value[i], mask);
        w.largest = __shfl_xor_sync(FULL_WARP, largest, mask);
        w.sum = __shfl_xor_sync(FULL_WARP, sum, mask);
        return w;
    }
    DEVICE void store(const Output& output, int request, int row, int latent) const {
        const float normal = sum == 0.0f ? 0.0f : 1.0f / sum;
        u16* p = output.out + output.out_strides.at(request, row) + latent;
        const uint2 pairs = {pack_bfloat2(value[0] * normal, value[1] * normal),
                             pack_bfloat2(value[2] * normal, value[3] * normal)};
        if (output.aligned) {
            *reinterpret_cast<uint2*>(p) = pairs;
        } else {
            p[0] = static_cast<u16>(pairs.x);
            p[1] = static_cast<u16>(pairs.x >> 16);
            p[2] = static_cast<u16>(pairs.y);
            p[3] = static_cast<u16>(pairs.y >> 16);
        }
        if (latent == 0)
            output.lse[output.lse_strides.at(request, row)] =
                output.lse_scale * (exponent_base(largest) + LN_2 * log2_approx(sum));
    }
};

DEVICE void store_weighted(u32 address, const Weighted& w) {
    store_shared(address, make_float4(w.value[0], w.value[1], w.value[2], w.value[3]));
    store_shared(address + 16, make_float2(w.largest, w.sum));
}
DEVICE Weighted load_weighted(u32 address) {
    const float4 v = load_shared_f32x4(address);
    const float2 ms = load_shared_f32x2(address + 16);
    Weighted w;
    w.value[0] = v.x, w.value[1] = v.y, w.value[2] = v.z, w.value[3] = v.w;
    w.largest = ms.x, w.sum = ms.y;
    return w;
}
constexpr int WEIGHTED_BYTES = 32;

// All math warps of share `share` of `num_shares`: units share, share + num_shares, ... Several warps take
// one unit when there are warps to spare; each half warp takes every so many-th partial.
DEVICE void merge_share(const Output& output, const Item& item, int row_begin, int share, int num_shares,
                        u32 scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int num_units = min(ROWS, TOTAL_ROWS - row_begin) * ROW_UNITS;
    const int my_units = (num_units + num_shares - 1) / num_shares;
    int unit_warps = 1;
    while (unit_warps < MATH_WARPS && 2 * unit_warps * my_units <= MATH_WARPS) unit_warps *= 2;
    const int place = warp % unit_warps;  // among the warps of a unit
    const int pass_units = MATH_WARPS / unit_warps;

    for (int pass = 0; pass < my_units; pass += pass_units) {
        const int unit = share + (pass + warp / unit_warps) * num_shares;
        const int row = row_begin + unit / ROW_UNITS;
        const int latent = unit % ROW_UNITS * UNIT_LATENTS + lane % UNIT_LANES * 4;
        Weighted w;
        if (unit < num_units)
            w.add_partials(output.out_partial + static_cast<i64>(row) * LATENT + latent,
                           output.lse_partial + row, item.split_begin + 2 * place + lane / UNIT_LANES,
                           item.split_end, 2 * unit_warps);
        w.add(w.from_lane(UNIT_LANES));
        if (unit_warps > 1) {
            const u32 mine = scratch + (warp * UNIT_LANES + lane % UNIT_LANES) * WEIGHTED_BYTES;
            if (lane < UNIT_LANES) store_weighted(mine, w);
            named_barrier(BARRIER_MATH, MATH_THREADS);
            if (place == 0)
                for (int i = 1; i < unit_warps; i++)
                    w.add(load_weighted(mine + i * UNIT_LANES * WEIGHTED_BYTES));
            named_barrier(BARRIER_MATH, MATH_THREADS);
        }
        if (unit < num_units && place == 0 && lane < UNIT_LANES) w.store(output, item.request, row, latent);
    }
}

// counters[request] counts the stored partials of all launches since the plan was made: it is a multiple of
// what one launch stores whenever none is missing. One fence serves all items of the program, so this comes
// after the last of them.
DEVICE void trade_partials(int* counters, const int* work, const int* program_items) {
    named_barrier(BARRIER_MATH, MATH_THREADS);
    if (threadIdx.x == 0) {
        const int first = load_index(program_items), last = load_index(program_items + 1);
        for (int index = first; index < last; index++) {
            const Item item = Item::load(work, index);
            if (item.slot >= 0) add_release(counters + item.request, 1);
        }
        for (int index = first; index < last; index++) {
            const Item item = Item::load(work, index);
            const int arrivals = item.num_splits() * ROW_TILES;
            while (item.slot >= 0 && load_acquire(counters + item.request) % arrivals) {
            }
        }
    }
    named_barrier(BARRIER_MATH, MATH_THREADS);
}

}  // namespace streamla
