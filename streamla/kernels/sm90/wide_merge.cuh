// Wide attention: one row of a split request from its partials, added in an order that the plan alone decides.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

// A block merges MERGE_LATENTS of a row: a warp covers them, four a lane, and each warp adds every so many-th partial.
constexpr int MERGE_LATENTS = 4 * WARP;
constexpr int MERGE_WARPS = 8;
constexpr int MERGE_THREADS = MERGE_WARPS * WARP;
// Partials that a warp reads before it knows their weights: hides their latency, and takes registers for fewer blocks an SM.
constexpr int MERGE_AHEAD = 12;
static_assert(MERGE_AHEAD * MERGE_WARPS <= MERGE_THREADS, "every partial that is read ahead has a weight");

struct MergeScratch {
    float weight[MERGE_THREADS], warp_top[MERGE_WARPS], warp_mass[MERGE_WARPS];
    float4 total[MERGE_WARPS][WARP];
};

// The log mass of every partial (a request has at most one a program, and at most MERGE_THREADS) to weights relative to
// 2^(log2 e * base). A partial that saw nothing has log mass -inf, or +inf as some libraries write it.
DEVICE void weigh(
    const float* lse_partial, i64 first, int num_partials, float& base, float& mass, MergeScratch& scratch) {
    const int own = threadIdx.x, warp = own / WARP, lane = own % WARP;
    float log_mass = own < num_partials ? lse_partial[first + static_cast<i64>(own) * ROWS] : NEG_INF;
    if (log_mass == -NEG_INF) log_mass = NEG_INF;
    float top = log_mass;
#pragma unroll
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
    if (lane == 0) scratch.warp_top[warp] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; ++w) top = fmaxf(top, scratch.warp_top[w]);
    base = top == NEG_INF ? 0.f : top;

    const float weight = exp2_approx((log_mass - base) * LOG2_E);
    scratch.weight[own] = weight;
    float sum = weight;
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (lane == 0) scratch.warp_mass[warp] = sum;
    __syncthreads();
    mass = 0.f;
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; ++w) mass += scratch.warp_mass[w];
}

// Without a weight, what a partial holds may be NaN.
DEVICE void add_weighted(float4& total, float weight, const float4& v) {
    if (weight == 0.f) return;
    total.x = fmaf(weight, v.x, total.x);
    total.y = fmaf(weight, v.y, total.y);
    total.z = fmaf(weight, v.z, total.z);
    total.w = fmaf(weight, v.w, total.w);
}

DEVICE float4 load_partial(const float* partials, int i) {
    return *reinterpret_cast<const float4*>(partials + static_cast<i64>(i) * (ROWS * LATENT));
}

// `out` and `lse` are this row's; the block's latents begin at `latent`. Either way adds in the same order.
template <bool READ_AHEAD>
DEVICE void merge_row(
    const float* out_partial, const float* lse_partial, int begin, int num_partials, int row, int latent, u16* out,
    float* lse, float lse_scale, MergeScratch& scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 first = static_cast<i64>(begin) * ROWS + row;
    float base, mass;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    if constexpr (READ_AHEAD) {
        const float* partials = out_partial + first * LATENT + latent + 4 * lane;
        float4 ahead[MERGE_AHEAD];
#pragma unroll
        for (int k = 0; k < MERGE_AHEAD; ++k) {
            const int i = warp + k * MERGE_WARPS;
            ahead[k] = i < num_partials ? load_partial(partials, i) : total;
        }
        weigh(lse_partial, first, num_partials, base, mass, scratch);
#pragma unroll
        for (int k = 0; k < MERGE_AHEAD; ++k) add_weighted(total, scratch.weight[warp + k * MERGE_WARPS], ahead[k]);
#pragma unroll 4
        for (int i = warp + MERGE_AHEAD * MERGE_WARPS; i < num_partials; i += MERGE_WARPS)
            add_weighted(total, scratch.weight[i], load_partial(partials, i));
    } else {
        weigh(lse_partial, first, num_partials, base, mass, scratch);
        const float* partials = out_partial + first * LATENT + latent + 4 * lane;
#pragma unroll 8
        for (int i = warp; i < num_partials; i += MERGE_WARPS)
            add_weighted(total, scratch.weight[i],
                     *reinterpret_cast<const float4*>(partials + static_cast<i64>(i) * (ROWS * LATENT)));
    }
    scratch.total[warp][lane] = total;
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int w = 1; w < MERGE_WARPS; ++w) add_weighted(total, 1.f, scratch.total[w][lane]);

    const float factor = mass == 0.f ? 0.f : 1.f / mass;
    const u32 low = pack_bfloat2(total.x * factor, total.y * factor);
    const u32 high = pack_bfloat2(total.z * factor, total.w * factor);
    u16* p = out + latent + 4 * lane;
    if (reinterpret_cast<u64>(p) % 8 == 0) {
        *reinterpret_cast<uint2*>(p) = make_uint2(low, high);
    } else {
        p[0] = low;
        p[1] = low >> 16;
        p[2] = high;
        p[3] = high >> 16;
    }
    if (latent == 0 && lane == 0) *lse = (base + log2_approx(mass) * LN_2) * lse_scale;
}

// The row blockIdx.x of request blockIdx.y, if it was split, and of it the latents of block blockIdx.z.
template <bool READ_AHEAD>
DEVICE void merge_request(
    const int* split_indptr, u16* out, const Rows& out_rows, float* lse, const Rows& lse_rows,
    const float* out_partial, const float* lse_partial, float lse_scale) {
    __shared__ MergeScratch scratch;
    const int request = blockIdx.y, begin = split_indptr[request], end = split_indptr[request + 1];
    wait_for_previous_grid();
    if (begin < end)
        merge_row<READ_AHEAD>(out_partial, lse_partial, begin, end - begin, blockIdx.x, blockIdx.z * MERGE_LATENTS,
                              out + out_rows.offset(request, blockIdx.x), lse + lse_rows.offset(request, blockIdx.x),
                              lse_scale, scratch);
}

}  // namespace streamla
