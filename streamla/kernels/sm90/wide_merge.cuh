// Wide attention: one row of a split request from its partials, added in an order that the plan alone decides.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

constexpr int MERGE_TEAM = LATENT / 4;  // threads that cover a row, four latents each
constexpr int MERGE_TEAMS = 2;          // each adds every other partial
constexpr int MERGE_THREADS = MERGE_TEAMS * MERGE_TEAM;
constexpr int MERGE_WARPS = MERGE_THREADS / WARP;

struct MergeScratch {
    float weight[MERGE_THREADS], warp_top[MERGE_WARPS], warp_mass[MERGE_WARPS];
    float4 total[MERGE_TEAM];
};

// A request has at most one partial a program, and at most MERGE_THREADS. A partial that saw nothing has log mass -inf
// and zeros.
DEVICE void merge_row(
    const float* out_partial, const float* lse_partial, int begin, int num_partials, int row, u16* out, float* lse,
    float lse_scale, MergeScratch& scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 first = static_cast<i64>(begin) * ROWS + row;
    const int own = threadIdx.x;
    const float log_mass = own < num_partials ? lse_partial[first + static_cast<i64>(own) * ROWS] : NEG_INF;
    float top = log_mass;
#pragma unroll
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
    if (lane == 0) scratch.warp_top[warp] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; ++w) top = fmaxf(top, scratch.warp_top[w]);
    const float base = top == NEG_INF ? 0.f : top;

    const float weight = exp2_approx((log_mass - base) * LOG2_E);
    scratch.weight[own] = weight;
    float mass = weight;
#pragma unroll
    for (int step = 16; step; step /= 2) mass += __shfl_xor_sync(FULL_WARP, mass, step);
    if (lane == 0) scratch.warp_mass[warp] = mass;
    __syncthreads();
    mass = 0.f;
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; ++w) mass += scratch.warp_mass[w];

    const int team = threadIdx.x / MERGE_TEAM, quad = threadIdx.x % MERGE_TEAM;
    const float4* partials = reinterpret_cast<const float4*>(out_partial + first * LATENT) + quad;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int i = team; i < num_partials; i += MERGE_TEAMS) {
        const float4 v = partials[static_cast<i64>(i) * (ROWS * LATENT / 4)];
        const float w = scratch.weight[i];
        total.x = fmaf(w, v.x, total.x);
        total.y = fmaf(w, v.y, total.y);
        total.z = fmaf(w, v.z, total.z);
        total.w = fmaf(w, v.w, total.w);
    }
    if (team == 1) scratch.total[quad] = total;
    __syncthreads();
    if (team == 1) return;
    const float4 other = scratch.total[quad];
    const float factor = mass == 0.f ? 0.f : 1.f / mass;
    const u32 low = pack_bfloat2((total.x + other.x) * factor, (total.y + other.y) * factor);
    const u32 high = pack_bfloat2((total.z + other.z) * factor, (total.w + other.w) * factor);
    u16* p = out + 4 * quad;
    if (reinterpret_cast<u64>(p) % 8 == 0) {
        *reinterpret_cast<uint2*>(p) = make_uint2(low, high);
    } else {
        p[0] = low;
        p[1] = low >> 16;
        p[2] = high;
        p[3] = high >> 16;
    }
    if (quad == 0) *lse = (base + log2_approx(mass) * LN_2) * lse_scale;
}

}  // namespace streamla
