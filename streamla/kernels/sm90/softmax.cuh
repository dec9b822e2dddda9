// Online softmax of a step, in base 2: a thread holds one token and ROWS / 4 rows.
//
// All warps share one running maximum a row. It moves only when some score exceeds it by more than
// 2^THRESHOLD: so a step costs one barrier that also asks "did anybody exceed?", and nearly always nobody
// did. Probabilities then reach 2^THRESHOLD, far below fp16's limit, and the result is the same.
#pragma once

#include "pv.cuh"

namespace streamla {

constexpr float THRESHOLD = 8.0f;

// The running maxima live in shared memory: registers are scarcer.
DEVICE u32 running_max_address(u32 shared, int row) { return shared + Shared::RUNNING_MAX + row * 4; }
DEVICE void reset_max(u32 shared) {
    if (threadIdx.x < ROWS) store_shared(running_max_address(shared, threadIdx.x), NEG_INF);
}

// Exponentials of this thread's own tokens and rows.
using Scores = float[GROUPS][2];
using Sums = float[GROUPS][2];

// What is subtracted in the exponent. -inf means that nothing was seen yet: keep -inf - (-inf) out.
DEVICE float exponent_base(float largest) { return largest == NEG_INF ? 0.0f : largest; }

// Exponentials of this thread's scores: to shared memory as P^T, and returned.
DEVICE void store_probabilities(Scores& p, const Scores& scores, const Scores& largest, u32 address) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) p[c][k] = exp2_approx(scores[c][k] - exponent_base(largest[c][k]));
        store_shared(address + c * PROBABILITY_GROUP, pack_half2(p[c][0], p[c][1]));
    }
    fence_async_proxy();
}

// MATH_WARPS floats of a row, one from each warp.
DEVICE u32 row_warps_address(u32 first, int row) { return first + row * MATH_WARPS * 4; }
DEVICE float largest_of_warps(u32 first, int row) {
    float largest = NEG_INF;
#pragma unroll
    for (int i = 0; i < MATH_WARPS; i += 4) {
        const float4 a = load_shared_f32x4(row_warps_address(first, row) + i * 4);
        largest = fmaxf(largest, fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)));
    }
    return largest;
}
DEVICE float sum_of_warps(u32 first, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < MATH_WARPS; i += 4) {
        const float4 a = load_shared_f32x4(row_warps_address(first, row) + i * 4);
        sum += (a.x + a.y) + (a.z + a.w);
    }
    return sum;
}

// The rare case: agree on new maxima (`largest`: old ones in, new ones out), and rescale what was
// accumulated under the old ones.
DEVICE void raise_max(Scores& largest, Sums& sums, Accumulator& acc, u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float old = largest[c][k];
            largest[c][k] = fmaxf(old, largest_of_warps(shared + Shared::MAX, lane.row(c, k)));
            const float scale = exp2_approx(old - exponent_base(largest[c][k]));
            sums[c][k] *= scale;
#pragma unroll
            for (int j = 0; j < M_TILES; j++) {
                acc[j][4 * c + k] *= scale;
                acc[j][4 * c + k + 2] *= scale;
            }
        }
    }
    if (lane.math_warp() || lane.g) return;
#pragma unroll
    for (int c = 0; c < GROUPS; c++)
        store_shared(running_max_address(shared, lane.row(c, 0)), make_float2(largest[c][0], largest[c][1]));
}

// Returns behind a barrier: P^T is complete in shared memory.
DEVICE void softmax_step(Sums& sums, Accumulator& acc, const Scores& scores, u32 shared, const Lane& lane) {
    const u32 address = probability_address(shared, lane);
    Scores largest, p;
    bool exceeds = false;
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const float2 running = load_shared_f32x2(running_max_address(shared, lane.row(c, 0)));
        largest[c][0] = running.x;
        largest[c][1] = running.y;
#pragma unroll
        for (int k = 0; k < 2; k++) exceeds |= scores[c][k] > largest[c][k] + THRESHOLD;
    }
    exceeds = __any_sync(FULL_WARP, exceeds);
    if (!exceeds) store_probabilities(p, scores, largest, address);
    if (named_barrier_any(BARRIER_MATH, MATH_THREADS, exceeds)) {
#pragma unroll
        for (int c = 0; c < GROUPS; c++) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float seen = scores[c][k];
#pragma unroll
                for (int o = 4; o < WARP; o *= 2) seen = fmaxf(seen, __shfl_xor_sync(FULL_WARP, seen, o));
                if (lane.g == 0)
                    store_shared(row_warps_address(shared + Shared::MAX, lane.row(c, k)) + lane.math_warp() * 4,
                                 seen);
            }
        }
        named_barrier(BARRIER_MATH, MATH_THREADS);
        raise_max(largest, sums, acc, shared, lane);
        store_probabilities(p, scores, largest, address);
        named_barrier(BARRIER_MATH, MATH_THREADS);
    }
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) sums[c][k] += p[c][k];
    }
}

}  // namespace streamla
