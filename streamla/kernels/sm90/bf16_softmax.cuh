// Online softmax of a tile, in base 2: a thread holds two tokens and ROWS / 4 rows.
//
// All warps agree on one running maximum a row. It moves only when some score exceeds it by more than
// 2^THRESHOLD: a barrier asks "did anybody exceed?", and nearly always nobody did.
#pragma once

#include "bf16_products.cuh"

namespace streamla {

constexpr float THRESHOLD = 8.0f;

// Of this thread's rows: the running maximum, and the sum of its own tokens' probabilities.
struct State {
    float largest[GROUPS][2], sum[GROUPS][2];

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

struct Maximum {
    DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    DEVICE float operator()(float a, float b) const { return a + b; }
};

// One float of a row from each warp.
DEVICE u32 row_warps_address(u32 first, int row) { return first + row * MATH_WARPS * 4; }
template <typename Join> DEVICE float join_warps(u32 first, int row, Join join) {
    const float4 v = load_shared_f32x4(row_warps_address(first, row));
    return join(join(v.x, v.y), join(v.z, v.w));
}
// Joins `v` over the warp's tokens and leaves it where join_warps finds it.
template <typename Join>
DEVICE void publish(const float (&v)[GROUPS][2], u32 first, const Lane& lane, Join join) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float joined = v[c][k];
#pragma unroll
            for (int o = 4; o < WARP; o *= 2) joined = join(joined, __shfl_xor_sync(FULL_WARP, joined, o));
            if (lane.g == 0) store_shared(row_warps_address(first, lane.row(c, k)) + lane.warp * 4, joined);
        }
    }
}

// The rare case: agree on new maxima, and rescale what was accumulated under the old ones.
DEVICE void raise_max(State& state, Accumulator& acc, const Scores& scores, u32 shared, const Lane& lane) {
    float mine[GROUPS][2];
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) mine[c][k] = fmaxf(scores[4 * c + k], scores[4 * c + 2 + k]);
    }
    publish(mine, shared + Shared::MAX, lane, Maximum());
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
            for (int j = 0; j < LATENT_BLOCKS; j++) {
#pragma unroll
                for (int e = 4 * c + k; e < COLUMNS / 2; e += 4 * GROUPS) {
                    acc[j][e] *= scale;
                    acc[j][e + 2] *= scale;
                }
            }
        }
    }
}

// The first of a tile's two barriers: behind it, nobody reads the tile's keys or the probabilities before any more.
DEVICE void agree_on_max(State& state, Accumulator& acc, const Scores& scores, u32 shared, const Lane& lane) {
    bool exceeds = false;
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) exceeds |= scores[4 * c + e] > state.largest[c][e % 2] + THRESHOLD;
    }
    if (named_barrier_any(BARRIER_MATH, MATH_THREADS, exceeds)) raise_max(state, acc, scores, shared, lane);
}

// To shared memory as P^T, and to the sum.
DEVICE void store_probabilities(State& state, const Scores& scores, u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const float base[2] = {exponent_base(state.largest[c][0]), exponent_base(state.largest[c][1])};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float p0 = exp2_approx(scores[4 * c + 2 * i] - base[0]);
            const float p1 = exp2_approx(scores[4 * c + 2 * i + 1] - base[1]);
            state.sum[c][0] += p0;
            state.sum[c][1] += p1;
            const u32 upper = pack_bfloat2(p0, p1);
            const u32 lower = pack_bfloat2(p0 - bfloat_low(upper), p1 - bfloat_high(upper));
            const u32 address = probability_address(shared, lane, i) + c * PROBABILITY_GROUP;
            store_shared(address, upper);
            store_shared(address + Shared::PROBABILITY_BYTES, lower);
        }
    }
}

}  // namespace streamla
