// The end of an item: the teams add up what they have, and the result leaves the program, as a partial
// (fp32, normalised) or, if the item is the whole request, as the output itself (bf16).
//
// Team 0 finishes the even rows, team 1 the odd ones. Each sends its accumulators of the other's rows
// through the last stage it has read, which it has not released yet.
#pragma once

#include "exchange.cuh"
#include "load.cuh"
#include "softmax.cuh"

namespace streamla {

struct Output {
    u16* out;  // bf16
    float* lse;
    Strides out_strides, lse_strides;
    float *out_partial, *lse_partial;  // contiguous
    bool aligned;                      // every row of out starts at a multiple of 16 bytes
    float lse_scale;                   // 1 for the natural logarithm
    bool merges;                       // partials go to the programs of this launch, through Exchange

    DEVICE Exchange exchange() const { return {out_partial, lse_partial}; }
    DEVICE float* partial(int slot, int row) const {
        return out_partial + (static_cast<i64>(slot) * TOTAL_ROWS + row) * LATENT;
    }
};

DEVICE u32 sum_address(u32 shared, int team, int team_warp, int row) {
    return shared + Shared::SUM + ((team * TEAM_WARPS + team_warp) * ROWS + row) * 4;
}
DEVICE void publish_sums(const RowValues& sums, u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float sum = sums[c][k];
#pragma unroll
            for (int o = 4; o < WARP; o *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, o);
            if (lane.g == 0)
                store_shared(sum_address(shared, lane.team, lane.team_warp(), lane.row(c, k)), sum);
        }
    }
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

// Four latents of a thread, quad `quad` of run `run`, of row 8 * c + 2 * t + k.
DEVICE float4 quad_of(const Accumulator& acc, int c, int run, int quad, int k) {
    const int j = run * M_TILES + quad * 2;
    const float4 even =
        make_float4(acc[j][4 * c], acc[j][4 * c + 2], acc[j + 1][4 * c], acc[j + 1][4 * c + 2]);
    const float4 odd =
        make_float4(acc[j][4 * c + 1], acc[j][4 * c + 3], acc[j + 1][4 * c + 1], acc[j + 1][4 * c + 3]);
    return k ? odd : even;
}

DEVICE u32 swap_address(u32 stage, const Lane& lane, int c, int run, int quad) {
    return stage + (((c * RUNS + run) * 2 + quad) * TEAM_THREADS + lane.team_thread()) * 16;
}
static_assert(GROUPS * RUNS * 2 * TEAM_THREADS * 16 <= STAGE_BYTES, "what a team sends fits in a stage");

DEVICE void send_accumulators(const Accumulator& acc, u32 stage, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int i = 0; i < RUNS * 2; i++)
            store_shared(swap_address(stage, lane, c, i / 2, i % 2),
                         quad_of(acc, c, i / 2, i % 2, lane.team ^ 1));
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
        u16* p = row + first_latent(lane, run);
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = pack_bfloat2(v[2 * i], v[2 * i + 1]);
        if (aligned) {
            *reinterpret_cast<uint4*>(p) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) p[i] = static_cast<u16>(pairs[i / 2] >> 16 * (i % 2));
        }
    }
};

// One run of latents of one row of the item.
template <typename Latents>
DEVICE void store_row(const Output& output, const Item& item, int row, int run,
                      const float (&v)[THREAD_LATENTS], float lse, const Lane& lane) {
    const bool writes_lse = lane.team_warp() == 0 && lane.g == 0 && run == 0;
    const bool exists = row < TOTAL_ROWS;
    if (item.slot >= 0 && output.merges) {
        if (exists) Latents::store_words(output.exchange().row(item.slot, row), v, run, lane);
        if (writes_lse && exists) output.exchange().store_lse(item.slot, row, lse);
    } else if (item.slot >= 0) {
        Latents::store_floats(output.partial(item.slot, row), v, exists, run, lane);
        if (writes_lse && exists) output.lse_partial[static_cast<i64>(item.slot) * TOTAL_ROWS + row] = lse;
    } else if (exists) {
        Latents::store_bfloats(output.out + output.out_strides.at(item.request, row), v, output.aligned, run,
                               lane);
        if (writes_lse) output.lse[output.lse_strides.at(item.request, row)] = lse * output.lse_scale;
    }
}

// The item's tiles, up to ring position `end`, have been accumulated, each by the team it fell to. The values are
// multiplied by value_scale, except those of an Exchange.
template <typename Latents = OneRange>
DEVICE void finish_item(const RowValues& sums, const Accumulator& acc, const Output& output,
                        const Item& item, int row_begin, const Ring& ring, int end, float value_scale) {
    if (item.slot >= 0 && output.merges) value_scale = 1.0f;
    // No address of the stores below is kept in a register all the while.
    const Lane lane = Lane::of(forget(static_cast<int>(threadIdx.x)));
    const u32 shared = ring.shared;
    const int first = end - item.num_tiles(), other_team = lane.team ^ 1;
    const int my_last = (end - 1) % TEAMS == lane.team ? end - 1 : end - 2;
    const int other_last = (end - 1) % TEAMS == lane.team ? end - 2 : end - 1;
    publish_sums(sums, shared, lane);
    named_barrier(BARRIER_TEAM + lane.team, TEAM_THREADS);  // all its warps have read its last stage
    add_team_sums(shared, lane);
    if (my_last >= first) send_accumulators(acc, ring.stage(my_last), lane);
    named_barrier(BARRIER_MATH, MATH_THREADS);

#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const int row = lane.row(c, lane.team);
        const float my_max = load_shared_f32(team_max_address(shared, lane.team, row));
        const float other_max = load_shared_f32(team_max_address(shared, other_team, row));
        const float base = exponent_base(fmaxf(my_max, other_max));
        float my_weight = exp2_approx(my_max - base), other_weight = exp2_approx(other_max - base);
        const float sum = my_weight * load_shared_f32(team_sum_address(shared, lane.team, row)) +
                          other_weight * load_shared_f32(team_sum_address(shared, other_team, row));
        const float normal = sum == 0.0f ? 0.0f : __fdividef(value_scale, sum);
        my_weight *= normal * Latents::value_unit(shared, lane.team);
        other_weight *= normal * Latents::value_unit(shared, other_team);
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            float v[THREAD_LATENTS];
#pragma unroll
            for (int quad = 0; quad < 2; quad++) {
                const float4 mine = quad_of(acc, c, run, quad, lane.team);
                float4 other = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (other_last >= first)
                    other = load_shared_f32x4(swap_address(ring.stage(other_last), lane, c, run, quad));
                v[4 * quad] = my_weight * mine.x + other_weight * other.x;
                v[4 * quad + 1] = my_weight * mine.y + other_weight * other.y;
                v[4 * quad + 2] = my_weight * mine.z + other_weight * other.z;
                v[4 * quad + 3] = my_weight * mine.w + other_weight * other.w;
            }
            store_row<Latents>(output, item, row_begin + row, run, v, LN_2 * (base + log2_approx(sum)), lane);
        }
    }
    if (other_last >= first) {
        fence_async_proxy();  // behind what the other team stored there
        ring.release(other_last, lane.leads_warp());
    }
}

}  // namespace streamla
