// Merge: a split request's result from its partials, weighted by exp(lse), in the launch that made them.
//
// Every program of a request merges an equal share of its rows, as soon as the partials are there (exchange.cuh).
// The order of summation depends on the plan alone. Comes behind the header that says what a program is made of: its math
// warps and their barrier, MANY_WORDS, FEW_WORDS and MERGE_DEPTH.
#pragma once

#include "output.cuh"

namespace streamla {

// Where a unit of merging lies, `LANE_WORDS` words a lane: its row, and this lane's latents of it.
template <int LANE_WORDS>
struct Unit {
    static_assert(LANE_WORDS == 1 || LANE_WORDS % 4 == 0, "loads of 4 or 16 bytes");
    static_assert(ROW_WORDS % (WARP * LANE_WORDS) == 0, "whole units in a row");
    static constexpr int LANE_LATENTS = LANE_WORDS * WORD_LATENTS, IN_ROW = ROW_WORDS / (WARP * LANE_WORDS);
    int row, latent;

    DEVICE static Unit of(int row_begin, int unit, int lane) {
        return {row_begin + unit / IN_ROW, (unit % IN_ROW * WARP + lane) * LANE_LATENTS};
    }
    // The lane's words of a partial.
    DEVICE const u32* words(const Exchange& exchange, int slot) const {
        return exchange.row(slot, row) + latent / WORD_LATENTS;
    }
    DEVICE static bool missing(const u32 (&words)[LANE_WORDS]) {
        bool any = false;
#pragma unroll
        for (int k = 0; k < LANE_WORDS; k++) any |= words[k] == EMPTY;
        return any;
    }
    DEVICE static void load(u32 (&words)[LANE_WORDS], const u32* from) {
        if constexpr (LANE_WORDS == 1) {
            words[0] = load_relaxed(from);
        } else {
#pragma unroll
            for (int k = 0; k < LANE_WORDS; k += 4) {
                const uint4 v = load_relaxed_x4(from + k);
                words[k] = v.x, words[k + 1] = v.y, words[k + 2] = v.z, words[k + 3] = v.w;
            }
        }
    }
};

// A warp's sum of partials of a unit, weighted relative to exp(largest); lse is natural here.
template <int LANE_WORDS>
struct UnitSum {
    static constexpr int LANE_LATENTS = Unit<LANE_WORDS>::LANE_LATENTS;
    float value[LANE_LATENTS] = {};
    float largest = NEG_INF;  // the same in all lanes
    float sum = 0.0f;         // likewise

    // The partials begin, begin + stride, ... before end; lane i brings the lse of the i-th. DEPTH are in flight.
    template <int DEPTH>
    DEVICE void add_partials(const Exchange& exchange, const Unit<LANE_WORDS>& unit, int begin, int end, int stride,
                             int lane) {
        static_assert(DEPTH <= WARP, "a lane for the lse of each");
        for (int first = begin; first < end; first += stride * DEPTH) {
            const int own = first + stride * lane;
            const u32 *own_lse = exchange.lse(own, unit.row), *first_words = unit.words(exchange, first);
            u32 lse = lane < DEPTH && own < end ? EMPTY : __float_as_uint(NEG_INF);
            u32 words[DEPTH][LANE_WORDS];
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
#pragma unroll
                for (int k = 0; k < LANE_WORDS; k++) words[i][k] = first + stride * i < end ? EMPTY : 0;
            }
            bool missing = true;
            while (missing) {
                if (lse == EMPTY) lse = load_relaxed(own_lse);
#pragma unroll
                for (int i = 0; i < DEPTH; i++)
                    if (unit.missing(words[i]))
                        unit.load(words[i], first_words + stride * i * (TOTAL_ROWS * LATENT));
                missing = lse == EMPTY;
#pragma unroll
                for (int i = 0; i < DEPTH; i++) missing |= unit.missing(words[i]);
            }
            __syncwarp();
            const float weight = weigh(__uint_as_float(lse));
#pragma unroll
            for (int i = 0; i < DEPTH; i++) add(__shfl_sync(FULL_WARP, weight, i), words[i]);
        }
    }
    // The weight of the partial with this lse, one a lane, after what was summed is put on the same base. The caller adds
    // it to the sum.
    DEVICE float weigh(float lse) {
        const float new_largest = warp_max(fmaxf(largest, lse));
        const float base = exponent_base(new_largest), scale = exp2_approx(LOG2_E * (largest - base));
        const float weight = exp2_approx(LOG2_E * (lse - base));
#pragma unroll
        for (int j = 0; j < LANE_LATENTS; j++) value[j] *= scale;
        sum *= scale;
        largest = new_largest;
        return weight;
    }
    DEVICE void add(float weight, const u32 (&words)[LANE_WORDS]) {
        sum += weight;
#pragma unroll
        for (int k = 0; k < LANE_WORDS; k++) {
            float v[WORD_LATENTS];
            unpack_word(v, words[k]);
#pragma unroll
            for (int j = 0; j < WORD_LATENTS; j++) value[k * WORD_LATENTS + j] += weight * v[j];
        }
    }
    DEVICE void store(const Output& output, int request, const Unit<LANE_WORDS>& unit, float value_scale) const {
        const float normal = sum == 0.0f ? 0.0f : __fdividef(value_scale, sum);
        u16* p = output.out_row(request, unit.row) + unit.latent;
        constexpr int N = LANE_LATENTS < 8 ? LANE_LATENTS : 8;
#pragma unroll
        for (int first = 0; first < LANE_LATENTS; first += N) {
            float v[N];
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = value[first + j] * normal;
            store_bfloats<N>(p + first, v, output.aligned);
        }
        if (unit.latent == 0)
            output.lse[output.lse_strides.at(request, unit.row)] =
                output.lse_scale * (exponent_base(largest) + LN_2 * log2_approx(sum));
    }
};

// The part of a split request that one of its programs merges: every num_shares-th unit, from that of its own place
// among them on.
struct Share {
    const Output& output;
    const Item& item;
    int row_begin;
    float value_scale;

    DEVICE int first() const { return item.slot - item.split_begin; }
    DEVICE int num_shares() const { return item.num_splits(); }
    DEVICE int num_rows() const { return min(ROWS, TOTAL_ROWS - row_begin); }
};

// A request in few splits: a program has many units, so they are large and each warp adds up its own.
constexpr int FEW_PARTIALS = 6;

DEVICE void merge_few(const Share& share, int warp, int lane) {
    const int num_units = share.num_rows() * Unit<FEW_WORDS>::IN_ROW, num_shares = share.num_shares();
    for (int i = share.first() + warp * num_shares; i < num_units; i += MATH_WARPS * num_shares) {
        const auto unit = Unit<FEW_WORDS>::of(share.row_begin, i, lane);
        UnitSum<FEW_WORDS> w;
        w.add_partials<FEW_PARTIALS>(share.output.exchange(), unit, share.item.split_begin, share.item.split_end, 1,
                                     lane);
        w.store(share.output, share.item.request, unit, share.value_scale);
    }
}

// A request in many splits: units are small, and several warps add up one when there are warps to spare.
using ManySum = UnitSum<MANY_WORDS>;

// What the warps of a unit tell each other: [warp][latent of a lane][lane] values, and [warp] largest and sum. The gap between
// warps is such that lanes that read the same place of all warps meet no bank conflict.
constexpr int WARP_VALUES = ManySum::LANE_LATENTS * WARP + WARP / MATH_WARPS;
DEVICE u32 unit_value(u32 scratch, int warp, int j, int lane) {
    return scratch + (warp * WARP_VALUES + j * WARP + lane) * 4;
}
DEVICE u32 unit_mass(u32 scratch, int warp) { return unit_value(scratch, MATH_WARPS, 0, 0) + warp * 8; }
constexpr u32 SCRATCH_BYTES = MATH_WARPS * (WARP_VALUES * 4 + 8);
constexpr u32 MERGE_BYTES = 2 * SCRATCH_BYTES;  // passes take turns

DEVICE void publish_sum(const ManySum& w, u32 scratch, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < ManySum::LANE_LATENTS; j++) store_shared(unit_value(scratch, warp, j, lane), w.value[j]);
    if (lane == 0) store_shared(unit_mass(scratch, warp), make_float2(w.largest, w.sum));
}

// The sum of 2^doublings warps, the first of which is `first_warp`: as many lanes add up what lane `of_lane` of each has.
DEVICE ManySum join_warps(u32 scratch, int first_warp, int doublings, int of_lane) {
    const int last = (1 << doublings) - 1, from = first_warp + (threadIdx.x & last);
    const float2 mass = load_shared_f32x2(unit_mass(scratch, from));
    ManySum w;
    w.largest = mass.x;
#pragma unroll
    for (int j = 0; j < ManySum::LANE_LATENTS; j++)
        w.value[j] = load_shared_f32(unit_value(scratch, from, j, of_lane));
    for (int o = 1; o <= last; o *= 2) w.largest = fmaxf(w.largest, __shfl_xor_sync(FULL_WARP, w.largest, o));
    const float weight = exp2_approx(LOG2_E * (mass.x - exponent_base(w.largest)));
    w.sum = mass.y * weight;
#pragma unroll
    for (int j = 0; j < ManySum::LANE_LATENTS; j++) w.value[j] *= weight;
    for (int o = 1; o <= last; o *= 2) {
        w.sum += __shfl_xor_sync(FULL_WARP, w.sum, o);
#pragma unroll
        for (int j = 0; j < ManySum::LANE_LATENTS; j++) w.value[j] += __shfl_xor_sync(FULL_WARP, w.value[j], o);
    }
    return w;
}

// `pass` counts the barriers: scratch of one pass is written again in the next but one.
DEVICE void merge_many(const Share& share, u32 scratches, int& pass, int warp, int lane) {
    const int num_units = share.num_rows() * Unit<MANY_WORDS>::IN_ROW, num_shares = share.num_shares();
    int doublings = 0;  // 2^doublings warps a unit
    while ((2 << doublings) <= MATH_WARPS && num_units <= num_shares * (MATH_WARPS >> (doublings + 1)))
        doublings++;
    const int last = (1 << doublings) - 1, place = warp & last;  // among the warps of a unit

    for (int first = share.first(); first < num_units; first += num_shares * (MATH_WARPS >> doublings), pass++) {
        const u32 scratch = scratches + pass % 2 * SCRATCH_BYTES;
        const int i = first + (warp >> doublings) * num_shares;
        ManySum w;
        if (i < num_units)
            w.add_partials<MERGE_DEPTH>(share.output.exchange(), Unit<MANY_WORDS>::of(share.row_begin, i, lane),
                                        share.item.split_begin + place, share.item.split_end, 1 << doublings, lane);
        publish_sum(w, scratch, warp, lane);
        named_barrier(BARRIER_MATH, MATH_THREADS);
        const int of_lane = place * (WARP >> doublings) + (lane >> doublings);
        w = join_warps(scratch, warp - place, doublings, of_lane);
        if (i < num_units && (lane & last) == 0)
            w.store(share.output, share.item.request, Unit<MANY_WORDS>::of(share.row_begin, i, of_lane),
                    share.value_scale);
    }
}

// All split items of a program; the last is at hand. Those in many splits come first, and where there are none in few, no code
// of these lies in their way. MERGE_BYTES of shared memory at `scratches` are free.
DEVICE void merge_items(const Output& output, Item item, const int* work, const int* program_items, int row_begin,
                        float value_scale, u32 scratches) {
    const int thread = forget(static_cast<int>(threadIdx.x)), warp = uniform(thread / WARP), lane = thread % WARP;
    const int first = load_index(program_items), last = load_index(program_items + 1) - 1;
    bool any_few = false;
    for (int index = last, pass = 0;; item = Item::load(work, index)) {
        const bool few = item.num_splits() <= FEW_PARTIALS;
        if (item.slot >= 0 && !few) merge_many({output, item, row_begin, value_scale}, scratches, pass, warp, lane);
        any_few |= item.slot >= 0 && few;
        if (--index < first) break;
    }
    if (!any_few) return;
    for (int index = last; index >= first; index--) {
        item = Item::load(work, index);
        if (item.slot >= 0 && item.num_splits() <= FEW_PARTIALS)
            merge_few({output, item, row_begin, value_scale}, warp, lane);
    }
}

}  // namespace streamla
