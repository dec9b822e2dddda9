// Online softmax of a tile of fp8_ds_mla rows: what goes to P^T of a group of latents is probability * scale.
//
// Scales are arbitrary fp32 numbers and fp16 has 30 binades, so P^T is in units of the team's *limit*: a power of
// two that no scale seen so far exceeds. It moves as the running maximum does: rarely, by the same vote.
#pragma once

#include "ds_mla_pv.cuh"
#include "softmax.cuh"

namespace streamla {

// A scale equal to the limit is 2^LIMIT_EXPONENT in P^T, where probabilities reach 2^THRESHOLD: 2^15 at the most,
// and 11 bits remain of a product 2^-25 of probability 1 and the limit.
constexpr int LIMIT_EXPONENT = 11;
static_assert(LIMIT_EXPONENT + THRESHOLD <= 15.0f, "P^T is fp16");
constexpr u32 LOWEST_LIMIT = (127 - 110) << 23;  // 2^-110: its unit is a normal number
constexpr u32 HIGHEST_LIMIT = (127 + 127) << 23;

DEVICE u32 limit_address(u32 shared, int team) { return shared + Shared::SCALE_LIMIT + team * 4; }
// Beside reset_max.
DEVICE void reset_limit(u32 shared, const Lane& lane) {
    if (lane.team_thread() == 0)
        store_shared(limit_address(shared, lane.team), __uint_as_float(LOWEST_LIMIT));
}
// What a scale is multiplied by in P^T.
DEVICE float unit_of(float limit) {
    return __uint_as_float((254u + LIMIT_EXPONENT << 23) - __float_as_uint(limit));
}
// What a team's accumulators are multiplied by at the end.
DEVICE float value_unit(u32 shared, int team) {
    return load_shared_f32(limit_address(shared, team)) * (1.0f / (1 << LIMIT_EXPONENT));
}

// Of this thread's tokens.
struct GroupScales {
    float of[THREAD_TOKENS][SCALE_GROUPS];

    DEVICE void load(u32 stage, const Lane& lane) {
#pragma unroll
        for (int x = 0; x < THREAD_TOKENS; x++) {
            const float4 v = load_shared_f32x4(stage + stage_offset(lane.token(x)) + SCALES_OFFSET);
            of[x][0] = v.x, of[x][1] = v.y, of[x][2] = v.z, of[x][3] = v.w;
        }
    }
    // A token that was not loaded, or one that some row must not see: its probability of 0 must stay 0.
    DEVICE void clear_unless_finite(int x, bool exists) {
#pragma unroll
        for (int i = 0; i < SCALE_GROUPS; i++)
            if (!exists || !(fabsf(of[x][i]) < -NEG_INF)) of[x][i] = 0.0f;
    }
    DEVICE float largest() const {
        float v = 0.0f;
#pragma unroll
        for (int i = 0; i < THREAD_TOKENS * SCALE_GROUPS; i++)
            v = fmaxf(v, fabsf(of[i / SCALE_GROUPS][i % SCALE_GROUPS]));
        return v;
    }
};

// Exponentials of this thread's scores: to shared memory as P^T of every group, and returned unscaled.
DEVICE void store_scaled_probabilities(Scores& p, const Scores& scores, const RowValues& largest,
                                       const GroupScales& scales, float limit, u32 address) {
    const float unit = unit_of(limit);
#pragma unroll
    for (int x = 0; x < THREAD_TOKENS; x++) {
#pragma unroll
        for (int c = 0; c < GROUPS; c++) {
#pragma unroll
            for (int k = 0; k < 2; k++)
                p[c][x][k] = exp2_approx(scores[c][x][k] - exponent_base(largest[c][k]));
        }
#pragma unroll
        for (int i = 0; i < SCALE_GROUPS; i++) {
            const float scale = scales.of[x][i] * unit;
#pragma unroll
            for (int c = 0; c < GROUPS; c++)
                store_shared(address + i * SCALED_PROBABILITY_BYTES + c * PROBABILITY_GROUP + x * 8 * 16,
                             pack_half2(p[c][x][0] * scale, p[c][x][1] * scale));
        }
    }
    fence_async_proxy();
}

// Before raise_max, whose barrier completes it. An infinite scale spoils what it meets whatever the limit is.
DEVICE void send_largest_scale(float largest, u32 shared, const Lane& lane) {
    if (largest == -NEG_INF) largest = 0.0f;
#pragma unroll
    for (int o = 4; o < WARP; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, o));
    if (lane.leads_warp())
        store_shared(shared + Shared::SCALE_MAX + (lane.team * TEAM_WARPS + lane.team_warp()) * 4, largest);
}
// Behind raise_max: the new limit, and the accumulators in its units.
DEVICE void raise_limit(float& limit, Accumulator& acc, u32 shared, const Lane& lane) {
    float largest = limit;
#pragma unroll
    for (int w = 0; w < TEAM_WARPS; w++)
        largest = fmaxf(largest, load_shared_f32(shared + Shared::SCALE_MAX + (lane.team * TEAM_WARPS + w) * 4));
    const u32 power = (__float_as_uint(largest) + 0x7fffff) & 0x7f800000;
    const float old = limit;
    limit = __uint_as_float(min(power, HIGHEST_LIMIT));
    if (lane.team_thread() == 0) store_shared(limit_address(shared, lane.team), limit);
    const float scale = old * unit_of(limit) * (1.0f / (1 << LIMIT_EXPONENT));
#pragma unroll
    for (int j = 0; j < RUNS * M_TILES; j++) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) acc[j][i] *= scale;
    }
}

// Returns behind a barrier of the team: P^T of every group is complete in shared memory.
DEVICE void softmax_scaled_tile(RowValues& sums, Accumulator& acc, const Scores& scores,
                                const GroupScales& scales, u32 shared, int position, const Lane& lane) {
    const u32 address = probability_buffer(shared, position, lane) + lane.token(0) * 16 + lane.t * 4;
    float limit = load_shared_f32(limit_address(shared, lane.team));
    const float largest_scale = scales.largest();
    RowValues largest;
    bool exceeds = largest_scale > limit;
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const float2 running = load_shared_f32x2(team_max_address(shared, lane.team, lane.row(c, 0)));
        largest[c][0] = running.x;
        largest[c][1] = running.y;
#pragma unroll
        for (int x = 0; x < THREAD_TOKENS; x++) {
            exceeds |= scores[c][x][0] > largest[c][0] + THRESHOLD;
            exceeds |= scores[c][x][1] > largest[c][1] + THRESHOLD;
        }
    }
    exceeds = __any_sync(FULL_WARP, exceeds);
    Scores p;
    if (!exceeds) store_scaled_probabilities(p, scores, largest, scales, limit, address);
    if (named_barrier_any(BARRIER_TEAM + lane.team, TEAM_THREADS, exceeds)) {
        send_largest_scale(largest_scale, shared, lane);
        raise_max(largest, sums, acc, scores, shared, lane);
        raise_limit(limit, acc, shared, lane);
        store_scaled_probabilities(p, scores, largest, scales, limit, address);
        named_barrier(BARRIER_TEAM + lane.team, TEAM_THREADS);
    }
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int x = 0; x < THREAD_TOKENS; x++) {
            sums[c][0] += p[c][x][0];
            sums[c][1] += p[c][x][1];
        }
    }
}

}  // namespace streamla
