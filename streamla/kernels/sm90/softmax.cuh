// Online softmax of a tile, in base 2: a thread holds ROWS / 4 rows of one or two tokens.
//
// The warps of a team share one running maximum a row. It moves only when some score exceeds it by more
// than 2^THRESHOLD: so a tile costs one barrier that also asks "did anybody exceed?", and nearly always
// nobody did. Probabilities then reach 2^THRESHOLD, far below fp16's limit, and the result is the same.
#pragma once

#include "pv.cuh"
#include "qk.cuh"

namespace streamla {

constexpr float THRESHOLD = GROUP_SCALES ? 4.0f : 8.0f;

// The running maxima live in shared memory: registers are scarcer. Reset by one warp of the team, before
// its first barrier.
DEVICE u32 team_max_address(u32 shared, int team, int row) {
    return shared + Shared::TEAM_MAX + (team * ROWS + row) * 4;
}
DEVICE void reset_max(u32 shared, const Lane& lane) {
    const int row = forget(static_cast<int>(threadIdx.x)) % TEAM_THREADS;  // not kept from item to item
    if (row < ROWS) store_shared(team_max_address(shared, lane.team, row), NEG_INF);
}

using RowValues = float[GROUPS][2];

DEVICE void load_max(RowValues& largest, u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const float2 running = load_shared_f32x2(team_max_address(shared, lane.team, lane.row(c, 0)));
        largest[c][0] = running.x;
        largest[c][1] = running.y;
    }
}

// Exponentials of this thread's scores: to shared memory as P^T, and returned.
DEVICE void store_probabilities(Scores& p, const Scores& scores, const RowValues& largest, u32 address) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int x = 0; x < THREAD_TOKENS; x++) {
#pragma unroll
            for (int k = 0; k < 2; k++)
                p[c][x][k] = exp2_approx(scores[c][x][k] - exponent_base(largest[c][k]));
            store_shared(address + c * PROBABILITY_GROUP + x * OTHER_POSITION,
                         pack_half2(p[c][x][0], p[c][x][1]));
        }
    }
    fence_async_proxy();
}

DEVICE u32 max_address(u32 shared, const Lane& lane, int warp) {
    return shared + Shared::MAX + ((lane.team * TEAM_WARPS + warp) * ROWS + lane.row(0, 0)) * 4;
}

// The rare case: agree on new maxima (`largest`: old ones in, new ones out), and rescale what was
// accumulated under the old ones.
DEVICE void raise_max(RowValues& largest, RowValues& sums, Accumulator& acc, const Scores& scores,
                      u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        float seen[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            seen[k] = fmaxf(scores[c][0][k], scores[c][THREAD_TOKENS - 1][k]);
#pragma unroll
            for (int o = 4; o < WARP; o *= 2)
                seen[k] = fmaxf(seen[k], __shfl_xor_sync(FULL_WARP, seen[k], o));
        }
        if (lane.g == 0)
            store_shared(max_address(shared, lane, lane.team_warp()) + c * 32,
                         make_float2(seen[0], seen[1]));
    }
    named_barrier(BARRIER_TEAM + lane.team, TEAM_THREADS);
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        float2 seen = make_float2(largest[c][0], largest[c][1]);
#pragma unroll
        for (int w = 0; w < TEAM_WARPS; w++) {
            const float2 other = load_shared_f32x2(max_address(shared, lane, w) + c * 32);
            seen.x = fmaxf(seen.x, other.x);
            seen.y = fmaxf(seen.y, other.y);
        }
        if (lane.team_warp() == 0 && lane.g == 0)
            store_shared(team_max_address(shared, lane.team, lane.row(c, 0)), seen);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float old = largest[c][k];
            largest[c][k] = k ? seen.y : seen.x;
            const float scale = exp2_approx(old - exponent_base(largest[c][k]));
            sums[c][k] *= scale;
#pragma unroll
            for (int j = 0; j < RUNS * M_TILES; j++) {
                acc[j][4 * c + k] *= scale;
                acc[j][4 * c + k + 2] *= scale;
            }
        }
    }
}

// Returns behind a barrier of the team: P^T is complete in shared memory.
DEVICE void softmax_tile(RowValues& sums, Accumulator& acc, const Scores& scores, u32 shared, int position,
                         const Lane& lane) {
    const u32 address = probability_address(shared, position, lane);
    RowValues largest;
    load_max(largest, shared, lane);
    bool exceeds = false;
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int x = 0; x < THREAD_TOKENS; x++) {
            exceeds |= scores[c][x][0] > largest[c][0] + THRESHOLD;
            exceeds |= scores[c][x][1] > largest[c][1] + THRESHOLD;
        }
    }
    exceeds = __any_sync(FULL_WARP, exceeds);
    Scores p;
    if (!exceeds) store_probabilities(p, scores, largest, address);
    if (named_barrier_any(BARRIER_TEAM + lane.team, TEAM_THREADS, exceeds)) {
        load_max(largest, shared, lane);  // again: not held in registers at the barrier
        raise_max(largest, sums, acc, scores, shared, lane);
        store_probabilities(p, scores, largest, address);
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
