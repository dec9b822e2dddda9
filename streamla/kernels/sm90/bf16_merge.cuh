// Merge: a split request's result from its partials, weighted by exp(lse).
//
// In the same launch: every program of a request, once all of them have stored their partials, merges an equal
// share of the request's units. The programs of a launch are all resident (a cooperative launch), so they may
// wait for each other. The order of summation depends on the plan alone.
#pragma once

#include "bf16_finish.cuh"

namespace streamla {

constexpr int UNIT_LATENTS = 64;  // a unit of merging: 64 latents of a row, 256 bytes of each partial
constexpr int UNIT_LANES = UNIT_LATENTS / 4;
constexpr int UNITS = TOTAL_ROWS * LATENT / UNIT_LATENTS;
constexpr int MERGE_DEPTH = 9;  // partials a lane has in flight: with 16 half warps, those of 132 programs

// Four latents and their weight relative to 2^largest.
struct Weighted {
    float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float largest = NEG_INF;
    float sum = 0.0f;

    DEVICE void rescale(float new_largest) {
        const float scale = exp2_approx(largest - exponent_base(new_largest));
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] *= scale;
        sum *= scale;
        largest = new_largest;
    }
    // `v` of weight 2^weight: no more than the largest so far. Without a weight it may hold NaN.
    DEVICE void add(const float4& v, float weight) {
        const float scale = exp2_approx(weight - exponent_base(largest));
        if (scale == 0.0f) return;
        value[0] += scale * v.x;
        value[1] += scale * v.y;
        value[2] += scale * v.z;
        value[3] += scale * v.w;
        sum += scale;
    }
    // Slots begin, begin + stride, ... before end.
    DEVICE void add_partials(const Output& output, int row, int latent, int begin, int end, int stride) {
        for (int first = begin; first < end; first += stride * MERGE_DEPTH) {
            float4 values[MERGE_DEPTH];
            float weights[MERGE_DEPTH], new_largest = largest;
#pragma unroll
            for (int i = 0; i < MERGE_DEPTH; i++) {
                const i64 partial = output.partial_row(first + i * stride, row);
                const bool exists = first + i * stride < end;
                weights[i] = exists ? LOG2_E * __ldcg(output.lse_partial + partial) : NEG_INF;
                if (weights[i] == -NEG_INF) weights[i] = NEG_INF;  // how some libraries write an empty row
                values[i] = exists ? __ldcg(reinterpret_cast<const float4*>(output.out_partial +
                                                                            partial * LATENT + latent))
                                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (int i = 0; i < MERGE_DEPTH; i++) new_largest = fmaxf(new_largest, weights[i]);
            rescale(new_largest);
#pragma unroll
            for (int i = 0; i < MERGE_DEPTH; i++) add(values[i], weights[i]);
        }
    }
    DEVICE void join(Weighted other) {
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
    DEVICE void store_shared_at(u32 address) const {
        store_shared(address, make_float4(value[0], value[1], value[2], value[3]));
        store_shared(address + 16, make_float2(largest, sum));
    }
    DEVICE static Weighted load_shared_at(u32 address) {
        const float4 v = load_shared_f32x4(address);
        const float2 weight = load_shared_f32x2(address + 16);
        Weighted w;
        w.value[0] = v.x, w.value[1] = v.y, w.value[2] = v.z, w.value[3] = v.w;
        w.largest = weight.x, w.sum = weight.y;
        return w;
    }
    DEVICE void store(const Output& output, int request, int row, int latent) const {
        const float normal = sum == 0.0f ? 0.0f : 1.0f / sum;
        u16* out = output.out_row(request, row) + latent;
        store_bfloat2(out, value[0] * normal, value[1] * normal, output.aligned);
        store_bfloat2(out + 2, value[2] * normal, value[3] * normal, output.aligned);
        if (latent == 0)
            output.lse[output.lse_strides.at(request, row)] =
                output.lse_scale * LN_2 * (exponent_base(largest) + log2_approx(sum));
    }
};
constexpr int WEIGHTED_BYTES = 32;

// All warps of share `share` of `num_shares`: units share, share + num_shares, ... Several warps take
// one unit when there are warps to spare; each half warp takes every so many-th partial.
DEVICE void merge_share(const Output& output, const Item& item, u32 scratch, const Lane& lane) {
    const int share = item.slot - item.split_begin, num_shares = item.num_splits();
    const int my_units = (UNITS + num_shares - 1) / num_shares;
    int unit_warps = 1;
    while (unit_warps < WARPS && 2 * unit_warps * my_units <= WARPS) unit_warps *= 2;
    const int pass_units = WARPS / unit_warps;
    const int place = lane.warp % unit_warps;  // among the warps of a unit

    for (int pass = 0; pass < my_units; pass += pass_units) {
        const int unit = share + (pass + lane.warp / unit_warps) * num_shares;
        const int row = unit / (LATENT / UNIT_LATENTS);
        const int latent = unit % (LATENT / UNIT_LATENTS) * UNIT_LATENTS + lane.lane % UNIT_LANES * 4;
        Weighted w;
        if (unit < UNITS)
            w.add_partials(output, row, latent, item.split_begin + 2 * place + lane.lane / UNIT_LANES,
                           item.split_end, 2 * unit_warps);
        w.join(w.from_lane(UNIT_LANES));
        if (unit_warps > 1) {
            const u32 mine = scratch + (lane.warp * UNIT_LANES + lane.lane % UNIT_LANES) * WEIGHTED_BYTES;
            if (lane.lane < UNIT_LANES) w.store_shared_at(mine);
            __syncthreads();
            if (place == 0) {  // each half warp joins half of the warps
                const int other = lane.lane / UNIT_LANES * unit_warps / 2;
                w = Weighted::load_shared_at(mine + other * UNIT_LANES * WEIGHTED_BYTES);
                for (int i = 1; i < unit_warps / 2; i++)
                    w.join(Weighted::load_shared_at(mine + (other + i) * UNIT_LANES * WEIGHTED_BYTES));
                w.join(w.from_lane(UNIT_LANES));
            }
            __syncthreads();
        }
        if (unit < UNITS && place == 0 && lane.lane < UNIT_LANES) w.store(output, item.request, row, latent);
    }
}

// counters[request] counts the stored partials of all launches since the plan was made: it is a multiple of what
// one launch stores whenever none is missing. Announced once, after the last item: in the middle a fence would
// wait behind a full ring of loads.
DEVICE void announce_partials(int* counters, const int* work, int first_item, int last_item) {
    int index = first_item + static_cast<int>(threadIdx.x);
    Item item{};
    if (index < last_item) item = Item::load(work, index);
    bulk_wait_written();
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    __threadfence();
    for (; index < last_item; index += WARP) {
        if (index >= first_item + WARP) item = Item::load(work, index);
        if (item.slot >= 0) atomicAdd(counters + item.request, 1);
    }
}
DEVICE void wait_for_partials(const int* counters, const Item& item) {
    if (threadIdx.x == 0) {
        while (load_acquire(counters + item.request) % item.num_splits()) {
        }
    }
    __syncthreads();
}

// All threads of the program, once its items are finished.
DEVICE void merge_items(const Output& output, int* counters, const int* work, int first_item, int last_item,
                        u32 scratch) {
    const Lane lane = Lane::here();
    Items items = Items::of(work, first_item, last_item);
    announce_partials(counters, work, first_item, last_item);
    for (; items.any(); items.advance()) {
        if (items.item.slot < 0) continue;
        wait_for_partials(counters, items.item);
        merge_share(output, items.item, scratch, lane);
    }
}

}  // namespace streamla
