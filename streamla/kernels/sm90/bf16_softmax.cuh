// Online softmax of a tile, in base 2: a thread holds one token and ROWS / 4 rows.
//
// All warps agree on one running maximum a row. It moves only when some score exceeds it by more than
// 2^THRESHOLD: so a tile costs one barrier that also asks "did anybody exceed?", and nearly always nobody did.
#pragma once

#include "bf16_values.cuh"

namespace streamla {

constexpr float THRESHOLD = 8.0f;

// Of this thread's rows: the running maximum, and the sum of its own tokens' probabilities.
struct State {
    Scores largest, sum;

    DEVICE void reset() {
#pragma unroll
        for (int c = 0; c < GROUPS; c++) {
            largest[c][0] = largest[c][1] = NEG_INF;
            sum[c][0] = sum[c][1] = 0.0f;
        }
    }
};

// What is subtracted in the exponent. -inf means that nothing was seen yet: keep -inf - (-inf) out.
DEVICE float exponent_base(float largest) { return largest == NEG_INF ? 0.0f : largest; }

// MATH_WARPS floats of a row, one from each warp.
DEVICE u32 row_warps_address(u32 first, int row) { return first + row * MATH_WARPS * 4; }
template <typename Join> DEVICE float join_warps(u32 first, int row, Join join) {
    const float4 a = load_shared_f32x4(row_warps_address(first, row));
    const float4 b = load_shared_f32x4(row_warps_address(first, row) + 16);
    return join(join(join(a.x, a.y), join(a.z, a.w)), join(join(b.x, b.y), join(b.z, b.w)));
}
// Joins `v` over the warp's tokens and leaves it where join_warps finds it.
template <typename Join>
DEVICE void publish(const Scores& v, u32 first, const Lane& lane, Join join) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float joined = v[c][k];
#pragma unroll
            for (int o = 4; o < WARP; o *= 2) joined = join(joined, __shfl_xor_sync(FULL_WARP, joined, o));
            if (lane.g == 0)
                store_shared(row_warps_address(first, lane.row(c, k)) + lane.math_warp() * 4, joined);
        }
    }
}
struct Maximum {
    DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    DEVICE float operator()(float a, float b) const { return a + b; }
};

// Exponentials of this thread's scores: to shared memory as P^T, and returned.
DEVICE void store_probabilities(Scores& p, const Scores& scores, const Scores& largest, u32 address) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) p[c][k] = exp2_approx(scores[c][k] - exponent_base(largest[c][k]));
        const u32 upper = pack_bfloat2(p[c][0], p[c][1]);
        const u32 lower = pack_bfloat2(p[c][0] - bfloat_low(upper), p[c][1] - bfloat_high(upper));
        store_shared(address + c * PROBABILITY_GROUP, upper);
        store_shared(address + c * PROBABILITY_GROUP + Shared::PROBABILITY_BYTES, lower);
    }
    fence_async_proxy();
}

// The rare case: agree on new maxima, and rescale what was accumulated under the old ones.
DEVICE void raise_max(State& state, Accumulator& acc, const Scores& scores, u32 shared, const Lane& lane) {
    publish(scores, shared + Shared::MAX, lane, Maximum());
    named_barrier(BARRIER_MATH, MATH_THREADS);
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float old = state.largest[c][k];
            const float largest = fmaxf(old, join_warps(shared + Shared::MAX, lane.row(c, k), Maximum()));
            const float scale = exp2_approx(old - exponent_base(largest));
            state.largest[c][k] = largest;
            state.sum[c][k] *= scale;
#pragma unroll
            for (int j = 0; j < M_TILES; j++) {
                acc[j][4 * c + k] *= scale;
                acc[j][4 * c + k + 2] *= scale;
            }
        }
    }
}

// Returns behind a barrier: P^T is complete in shared memory.
DEVICE void softmax_step(State& state, Accumulator& acc, const Scores& scores, u32 shared, const Lane& lane) {
    const u32 address = probability_address(shared, lane);
    Scores p;
    bool exceeds = false;
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) exceeds |= scores[c][k] > state.largest[c][k] + THRESHOLD;
    }
    exceeds = __any_sync(FULL_WARP, exceeds);
    if (!exceeds) store_probabilities(p, scores, state.largest, address);
    if (named_barrier_any(BARRIER_MATH, MATH_THREADS, exceeds)) {
        raise_max(state, acc, scores, shared, lane);
        store_probabilities(p, scores, state.largest, address);
        named_barrier(BARRIER_MATH, MATH_THREADS);
    }
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) state.sum[c][k] += p[c][k];
    }
}

}  // namespace streamla
