// The end of an item: the teams add up what they have, and the result leaves the program, as a normalised partial (words of
// exchange.cuh, or fp32 for a merge in a launch of its own) or, if the item is the whole request, as the output itself (bf16).
//
// Each team finishes half of the rows. It sends its accumulators of the other's rows through the last stage it has
// read, which it has not released yet. Nobody else is on the SM meanwhile: which rows a team finishes is known at compile
// time, and nothing waits for global memory.
#pragma once

#include "load.cuh"
#include "output.cuh"
#include "softmax.cuh"

namespace streamla {

DEVICE u32 sum_address(u32 shared, int team, int team_warp, int row) {
    return shared + Shared::SUM + ((team * TEAM_WARPS + team_warp) * ROWS + row) * 4;
}
// A warp's sums: what its eight g hold of each row of a thread, added up. At every step two lanes trade half of the rows
// they hold, as long as they hold more than one.
DEVICE void publish_sums(const RowValues& sums, u32 shared, const Lane& lane) {
    constexpr int HELD = GROUPS <= 2 ? THREAD_ROWS : 8;
    float v[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) v[i] = i < THREAD_ROWS ? sums[i / 2][i % 2] : 0.0f;
    int first = 0;  // the row in v[0]
#pragma unroll
    for (int g = 4, held = HELD; g; g /= 2) {
        const bool trades = held > 1, upper = trades && lane.g & g;
        if (trades) held /= 2;
        if (upper) first += held;
#pragma unroll
        for (int i = 0; i < held; i++) {
            const float sent = trades && !upper ? v[i + held] : v[i], kept = upper ? v[i + held] : v[i];
            v[i] = kept + __shfl_xor_sync(FULL_WARP, sent, 4 * g);
        }
    }
    if (lane.g % (8 / HELD) == 0 && first < THREAD_ROWS)
        store_shared(sum_address(shared, lane.team, lane.team_warp(), lane.row(first / 2, first % 2)), v[0]);
}
DEVICE u32 team_sum_address(u32 shared, int team, int row) {
    return shared + Shared::TEAM_SUM + (team * ROWS + row) * 4;
}
// The sums of a team's warps, published before a barrier of the team, added in a fixed order.
DEVICE void add_team_sums(u32 shared, const Lane& lane) {
    const int row = lane.team_thread();
    if (row >= ROWS) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < TEAM_WARPS; w++) sum += load_shared_f32(sum_address(shared, lane.team, w, row));
    store_shared(team_sum_address(shared, lane.team, row), sum);
}

// Of the rows of a thread a team finishes GROUPS: whole column groups if they can be shared out, else one of the two of
// each. The i-th is row 8 * group + 2 * t + k.
struct FinishedRow {
    int group, k;

    DEVICE static constexpr FinishedRow of(int team, int i) {
        if (GROUPS % 2) return {i, team};
        return {team * GROUPS / 2 + i / 2, i % 2};
    }
    DEVICE int row(const Lane& lane) const { return lane.row(group, k); }
    // Four latents of a thread, quad `quad` of run `run`.
    DEVICE float4 quad_of(const Accumulator& acc, int run, int quad) const {
        const int j = run * M_TILES + quad * 2, i = 4 * group + k;
        return make_float4(acc[j][i], acc[j][i + 2], acc[j + 1][i], acc[j + 1][i + 2]);
    }
};

DEVICE u32 swap_address(u32 stage, const Lane& lane, int i, int run, int quad) {
    return stage + (((i * RUNS + run) * 2 + quad) * TEAM_THREADS + lane.team_thread()) * 16;
}
static_assert(GROUPS * RUNS * 2 * TEAM_THREADS * 16 <= STAGE_BYTES, "what a team sends fits in a stage");

template <int TEAM>
DEVICE void send_accumulators(const Accumulator& acc, u32 stage, const Lane& lane) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
#pragma unroll
        for (int r = 0; r < RUNS * 2; r++)
            store_shared(swap_address(stage, lane, i, r / 2, r % 2),
                         FinishedRow::of(TEAM ^ 1, i).quad_of(acc, r / 2, r % 2));
    }
}

// Where a thread's latents lie: 8 that follow each other in each run.
struct OneRange {
    // What accumulators are multiplied by to become values.
    DEVICE static float value_unit(u32 shared, int team) { return 1.0f; }

    // The neighbour in g has the next 8: lane pairs trade quads so that one store instruction fills whole
    // 32-byte sectors.
    DEVICE static void store_floats(float* row, const float (&v)[THREAD_LATENTS], bool exists, int run,
                                    const Lane& lane) {
        const bool odd = lane.g % 2;
        float low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float received = __shfl_xor_sync(FULL_WARP, odd ? v[i] : v[4 + i], 4);
            low[i] = odd ? received : v[i];
            high[i] = odd ? v[4 + i] : received;
        }
        if (!exists) return;
        float* pair = row + first_latent(lane, run) - odd * THREAD_LATENTS + odd * 4;
        *reinterpret_cast<float4*>(pair) = make_float4(low[0], low[1], low[2], low[3]);
        *reinterpret_cast<float4*>(pair + 8) = make_float4(high[0], high[1], high[2], high[3]);
    }
    DEVICE static void store_words(u32* row, const float (&v)[THREAD_LATENTS], int run, const Lane& lane) {
        store_relaxed(row + first_latent(lane, run) / 2,
                      make_uint4(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]), pack_half2(v[4], v[5]),
                                 pack_half2(v[6], v[7])));
    }
    DEVICE static void store_bfloats(u16* row, const float (&v)[THREAD_LATENTS], bool aligned, int run,
                                     const Lane& lane) {
        streamla::store_bfloats<THREAD_LATENTS>(row + first_latent(lane, run), v, aligned);
    }
};

using FinishedValues = float[GROUPS][RUNS][THREAD_LATENTS];

// What a team finished leaves the program: to the programs of this launch, as partials for a launch of its own, or to
// the output.
template <int TEAM, typename Latents>
DEVICE void store_rows(const Output& output, const Item& item, int row_begin, const FinishedValues& v,
                       const float (&lse)[GROUPS], u32 shared, const Lane& lane) {
    const bool writes_lse = lane.team_warp() == 0 && lane.g == 0;
    if (item.slot >= 0 && output.merges) wait_until_emptied(shared + Shared::EMPTIED);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        const int row = row_begin + FinishedRow::of(TEAM, i).row(lane);
        const bool exists = row < TOTAL_ROWS;
        if (item.slot >= 0 && output.merges) {
            if (!exists) continue;
#pragma unroll
            for (int run = 0; run < RUNS; run++)
                Latents::store_words(output.exchange().row(item.slot, row), v[i][run], run, lane);
            if (writes_lse) output.exchange().store_lse(item.slot, row, lse[i]);
        } else if (item.slot >= 0) {
#pragma unroll
            for (int run = 0; run < RUNS; run++)
                Latents::store_floats(output.partial(item.slot, row), v[i][run], exists, run, lane);
            if (writes_lse && exists) output.lse_partial[partial_row(item.slot, row)] = lse[i];
        } else if (exists) {
#pragma unroll
            for (int run = 0; run < RUNS; run++)
                Latents::store_bfloats(output.out_row(item.request, row), v[i][run],
                                       output.aligned, run, lane);
            if (writes_lse) output.lse[output.lse_strides.at(item.request, row)] = lse[i] * output.lse_scale;
        }
    }
}

// `other_stage` holds what the other team has sent, if it had a tile.
template <int TEAM, typename Latents>
DEVICE void finish_rows(const Accumulator& acc, const Output& output, const Item& item, int row_begin,
                        u32 other_stage, bool other_sent, float value_scale, u32 shared, const Lane& lane) {
    float my_weight[GROUPS], other_weight[GROUPS], lse[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        const int row = FinishedRow::of(TEAM, i).row(lane);
        const float my_max = load_shared_f32(team_max_address(shared, TEAM, row));
        const float other_max = load_shared_f32(team_max_address(shared, TEAM ^ 1, row));
        const float my_sum = load_shared_f32(team_sum_address(shared, TEAM, row));
        const float other_sum = load_shared_f32(team_sum_address(shared, TEAM ^ 1, row));
        const float base = exponent_base(fmaxf(my_max, other_max));
        my_weight[i] = exp2_approx(my_max - base), other_weight[i] = exp2_approx(other_max - base);
        const float sum = my_weight[i] * my_sum + other_weight[i] * other_sum;
        const float normal = sum == 0.0f ? 0.0f : __fdividef(value_scale, sum);
        my_weight[i] *= normal * Latents::value_unit(shared, TEAM);
        other_weight[i] *= normal * Latents::value_unit(shared, TEAM ^ 1);
        lse[i] = LN_2 * (base + log2_approx(sum));
    }
    FinishedValues v;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
#pragma unroll
        for (int r = 0; r < RUNS * 2; r++) {
            const int run = r / 2, quad = r % 2;
            const float4 mine = FinishedRow::of(TEAM, i).quad_of(acc, run, quad);
            float4 other = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (other_sent) other = load_shared_f32x4(swap_address(other_stage, lane, i, run, quad));
            v[i][run][4 * quad] = my_weight[i] * mine.x + other_weight[i] * other.x;
            v[i][run][4 * quad + 1] = my_weight[i] * mine.y + other_weight[i] * other.y;
            v[i][run][4 * quad + 2] = my_weight[i] * mine.z + other_weight[i] * other.z;
            v[i][run][4 * quad + 3] = my_weight[i] * mine.w + other_weight[i] * other.w;
        }
    }
    store_rows<TEAM, Latents>(output, item, row_begin, v, lse, shared, lane);
}

// The item's tiles, ring positions `begin` to `end`, have been accumulated, each by the team it fell to. The values are
// multiplied by value_scale, except those of an Exchange.
template <typename Latents = OneRange>
DEVICE void finish_item(const RowValues& sums, const Accumulator& acc, const Output& output,
                        const Item& item, int row_begin, const Ring& ring, int begin, int end,
                        float value_scale) {
    // No address of the stores below is kept in a register all the while.
    const Lane lane = Lane::of(forget(static_cast<int>(threadIdx.x)));
    const u32 shared = ring.shared;
    const bool last_is_mine = (end - 1) % TEAMS == lane.team;
    const int my_last = last_is_mine ? end - 1 : end - 2, other_last = last_is_mine ? end - 2 : end - 1;
    const bool sends = my_last >= begin, other_sends = other_last >= begin;
    publish_sums(sums, shared, lane);
    named_barrier(BARRIER_TEAM + lane.team, TEAM_THREADS);  // all its warps have read its last stage
    add_team_sums(shared, lane);
    const u32 my_stage = ring.stage(my_last), other_stage = ring.stage(other_last);
    if (lane.team) {
        if (sends) send_accumulators<1>(acc, my_stage, lane);
    } else {
        if (sends) send_accumulators<0>(acc, my_stage, lane);
    }
    named_barrier(BARRIER_MATH, MATH_THREADS);

    if (item.slot >= 0 && output.merges) value_scale = 1.0f;
    if (lane.team)
        finish_rows<1, Latents>(acc, output, item, row_begin, other_stage, other_sends, value_scale, shared, lane);
    else
        finish_rows<0, Latents>(acc, output, item, row_begin, other_stage, other_sends, value_scale, shared, lane);
    if (other_sends) {
        fence_async_proxy();  // behind what the other team stored there
        ring.release(other_last, lane.leads_warp());
    }
}

}  // namespace streamla
