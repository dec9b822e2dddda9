// Merge: a split request's result from its partials, weighted by exp(lse).
//
// In the same launch: every program of a request merges an equal share of its rows, as soon as the partials
// are there (exchange.cuh). The order of summation depends on the plan alone.
#pragma once

#include "finish.cuh"

namespace streamla {

constexpr int UNIT_LATENTS = WARP * WORD_LATENTS;  // a unit of merging: one word a lane
constexpr int ROW_UNITS = LATENT / UNIT_LATENTS;
constexpr int MERGE_DEPTH = 9;  // partials a warp has in flight: 132 splits on 16 warps

// A warp's share of a unit: one word a lane, weighted relative to exp(largest); lse is natural here.
struct UnitSum {
    float value[WORD_LATENTS] = {};
    float largest = NEG_INF;  // the same in all lanes
    float sum = 0.0f;         // likewise

    // The partials begin, begin + stride, ... before end; lane i brings the lse of the i-th.
    DEVICE void add_partials(const u32* words, const u32* lses, int begin, int end, int stride, int lane) {
        for (int first = begin; first < end; first += stride * MERGE_DEPTH) {
            const int own = first + stride * lane;
            const u32* own_lse = lses + static_cast<i64>(own) * TOTAL_ROWS;
            const u32* first_word = words + static_cast<i64>(first) * TOTAL_ROWS * LATENT;
            u32 lse = lane < MERGE_DEPTH && own < end ? EMPTY : __float_as_uint(NEG_INF);
            u32 word[MERGE_DEPTH];
#pragma unroll
            for (int i = 0; i < MERGE_DEPTH; i++) word[i] = first + stride * i < end ? EMPTY : 0;
            bool missing = true;
            while (missing) {
                if (lse == EMPTY) lse = load_relaxed(own_lse);
#pragma unroll
                for (int i = 0; i < MERGE_DEPTH; i++)
                    if (word[i] == EMPTY) word[i] = load_relaxed(first_word + stride * i * (TOTAL_ROWS * LATENT));
                missing = lse == EMPTY;
#pragma unroll
                for (int i = 0; i < MERGE_DEPTH; i++) missing |= word[i] == EMPTY;
            }
            __syncwarp();
            const float weight = weigh(__uint_as_float(lse));
#pragma unroll
            for (int i = 0; i < MERGE_DEPTH; i++) {
                const float w = __shfl_sync(FULL_WARP, weight, i);
                sum += w;
                float v[WORD_LATENTS];
                unpack_word(v, word[i]);
#pragma unroll
                for (int j = 0; j < WORD_LATENTS; j++) value[j] += w * v[j];
            }
        }
    }
    // The weight of the partial with this lse, one a lane, after what was summed is put on the same base. The caller adds
    // it to the sum.
    DEVICE float weigh(float lse) {
        const float new_largest = warp_max(fmaxf(largest, lse));
        const float base = exponent_base(new_largest), scale = exp2_approx(LOG2_E * (largest - base));
        const float weight = exp2_approx(LOG2_E * (lse - base));
#pragma unroll
        for (int j = 0; j < WORD_LATENTS; j++) value[j] *= scale;
        sum *= scale;
        largest = new_largest;
        return weight;
    }
};

// What the warps of a unit tell each other: [warp][word] values, and [warp] largest and sum.
DEVICE u32 unit_values(u32 scratch, int warp, int word) {
    return scratch + (warp * WARP + word) * WORD_LATENTS * 4;
}
DEVICE u32 unit_mass(u32 scratch, int warp) { return unit_values(scratch, MATH_WARPS, 0) + warp * 8; }
constexpr u32 SCRATCH_BYTES = MATH_WARPS * (WARP * WORD_LATENTS * 4 + 8);
static_assert(2 * SCRATCH_BYTES <= HEAD_DIM / 64 * QUERY_BLOCK_BYTES, "passes take turns in the query's place");

DEVICE void publish(const UnitSum& w, u32 scratch, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < WORD_LATENTS; j++) store_shared(unit_values(scratch, warp, lane) + j * 4, w.value[j]);
    if (lane == 0) store_shared(unit_mass(scratch, warp), make_float2(w.largest, w.sum));
}

// The sum of 2^doublings warps, the first of which is `first_warp`: as many lanes add up one word.
DEVICE void finish_word(const Output& output, u32 scratch, int first_warp, int doublings, int word,
                        int request, int row, int first_latent, bool exists, float value_scale) {
    const int lane = threadIdx.x % WARP, last = (1 << doublings) - 1, from = first_warp + (lane & last);
    const float2 mass = load_shared_f32x2(unit_mass(scratch, from));
    float v[WORD_LATENTS], largest = mass.x;
#pragma unroll
    for (int j = 0; j < WORD_LATENTS; j++) v[j] = load_shared_f32(unit_values(scratch, from, word) + j * 4);
    for (int o = 1; o <= last; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, o));
    const float base = exponent_base(largest), weight = exp2_approx(LOG2_E * (mass.x - base));
    float sum = mass.y * weight;
#pragma unroll
    for (int j = 0; j < WORD_LATENTS; j++) v[j] *= weight;
    for (int o = 1; o <= last; o *= 2) {
        sum += __shfl_xor_sync(FULL_WARP, sum, o);
#pragma unroll
        for (int j = 0; j < WORD_LATENTS; j++) v[j] += __shfl_xor_sync(FULL_WARP, v[j], o);
    }
    if (!exists || (lane & last)) return;
    const float normal = sum == 0.0f ? 0.0f : __fdividef(value_scale, sum);
    u16* p = output.out + output.out_strides.at(request, row) + first_latent + word * WORD_LATENTS;
    const u32 pair = pack_bfloat2(v[0] * normal, v[WORD_LATENTS - 1] * normal);
    if (WORD_LATENTS == 2 && output.aligned) {
        *reinterpret_cast<u32*>(p) = pair;
    } else {
        p[0] = static_cast<u16>(pair);
        p[WORD_LATENTS - 1] = static_cast<u16>(pair >> 16);
    }
    if (first_latent + word == 0)
        output.lse[output.lse_strides.at(request, row)] = output.lse_scale * (base + LN_2 * log2_approx(sum));
}

// All math warps of one of the request's programs: it takes every num_splits-th unit, from that of its own
// place among them on. Several warps take one unit when there are warps to spare. `pass` counts the barriers: scratch
// of one pass is written again in the next but one.
DEVICE void merge_share(const Output& output, const Item& item, int row_begin, float value_scale,
                        u32 query, int& pass) {
    const int share = item.slot - item.split_begin, num_shares = item.num_splits();
    const int warp = uniform(static_cast<int>(threadIdx.x) / WARP), lane = threadIdx.x % WARP;
    const int num_units = min(ROWS, TOTAL_ROWS - row_begin) * ROW_UNITS;
    int doublings = 0;  // 2^doublings warps a unit
    while ((2 << doublings) <= MATH_WARPS && num_units <= num_shares * (MATH_WARPS >> (doublings + 1)))
        doublings++;
    const int place = warp & ((1 << doublings) - 1);  // among the warps of a unit

    for (int first = share; first < num_units; first += num_shares * (MATH_WARPS >> doublings), pass++) {
        const u32 scratch = query + pass % 2 * SCRATCH_BYTES;
        const int unit = first + (warp >> doublings) * num_shares;
        const int row = row_begin + unit / ROW_UNITS, first_latent = unit % ROW_UNITS * UNIT_LATENTS;
        UnitSum w;
        if (unit < num_units)
            w.add_partials(output.exchange().row(0, row) + first_latent / WORD_LATENTS + lane,
                           output.exchange().lse(0, row), item.split_begin + place, item.split_end,
                           1 << doublings, lane);
        publish(w, scratch, warp, lane);
        named_barrier(BARRIER_MATH, MATH_THREADS);
        finish_word(output, scratch, warp - place, doublings,
                    place * (WARP >> doublings) + (lane >> doublings), item.request, row, first_latent,
                    unit < num_units, value_scale);
    }
}

// All split items of a program, the last of which is at hand. No warp reads the query any more.
DEVICE void merge_items(const Output& output, Item item, const int* work, const int* program_items, int row_begin,
                        float value_scale, u32 shared) {
    const int first = load_index(program_items);
    int index = load_index(program_items + 1) - 1, pass = 0;
    while (true) {
        if (item.slot >= 0) merge_share(output, item, row_begin, value_scale, shared + Shared::QUERY, pass);
        if (--index < first) break;
        item = Item::load(work, index);
    }
}

// Partials of a launch before: four latents a thread, each partial once.
struct Weighted {
    float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float largest = NEG_INF;
    float sum = 0.0f;

    // `v` and `lse` are those of slot 0.
    DEVICE void add_partials(const float* v, const float* lse, int begin, int end) {
        constexpr int DEPTH = 4;  // in flight
        for (int first = begin; first < end; first += DEPTH) {
            float4 values[DEPTH];
            float lses[DEPTH], new_largest = largest;
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                const i64 row = static_cast<i64>(first + i) * TOTAL_ROWS;
                const bool exists = first + i < end;
                lses[i] = exists ? __ldcg(lse + row) : NEG_INF;
                if (lses[i] == -NEG_INF) lses[i] = NEG_INF;  // how some libraries write an empty row
                values[i] = exists ? __ldcg(reinterpret_cast<const float4*>(v + row * LATENT))
                                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                new_largest = fmaxf(new_largest, lses[i]);
            }
            const float base = exponent_base(new_largest);
            scale(exp2_approx(LOG2_E * (largest - base)));
            largest = new_largest;
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                const float weight = exp2_approx(LOG2_E * (lses[i] - base));
                if (weight == 0.0f) continue;  // what it holds may be NaN
                value[0] += weight * values[i].x;
                value[1] += weight * values[i].y;
                value[2] += weight * values[i].z;
                value[3] += weight * values[i].w;
                sum += weight;
            }
        }
    }
    DEVICE void scale(float factor) {
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] *= factor;
        sum *= factor;
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

// A row of a request, in a launch of its own: grid (TOTAL_ROWS, batch), LATENT / 4 threads. A request that was not
// split is final already.
DEVICE void merge_row(const Output& output, const int* split_indptr, const float* out_partial,
                      const float* lse_partial) {
    const int row = blockIdx.x, request = blockIdx.y, latent = threadIdx.x * 4;
    const int begin = __ldg(split_indptr + request), end = __ldg(split_indptr + request + 1);
    if (begin == end) return;
    Weighted w;
    w.add_partials(out_partial + static_cast<i64>(row) * LATENT + latent, lse_partial + row, begin, end);
    w.store(output, request, row, latent);
}

}  // namespace streamla
