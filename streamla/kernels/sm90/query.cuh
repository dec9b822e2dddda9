// The query: bf16 rows in global memory to fp16 in shared memory, once an item.
//
// Each row is scaled by the power of two that brings its largest magnitude to [2^14, 2^15): a bf16 value
// then is exact in fp16 unless it is 2^-31 of the row's largest. The scale is undone in fp32.
#pragma once

#include "tile.cuh"

namespace streamla {

struct Query {
    const u16 *nope, *pe;  // bf16
    Strides nope_strides, pe_strides;
    bool aligned;  // every row of both starts at a multiple of 16 bytes
};

constexpr int CHUNK = 8;  // bf16 values in 16 bytes
constexpr int LANE_CHUNKS = (HEAD_DIM / CHUNK + WARP - 1) / WARP;

DEVICE uint4 load_chunk(const u16* p, bool aligned) {
    if (aligned) return __ldg(reinterpret_cast<const uint4*>(p));
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __ldg(p + 2 * i) | static_cast<u32>(__ldg(p + 2 * i + 1)) << 16;
    return make_uint4(v[0], v[1], v[2], v[3]);
}

// Exponent of the power of two that a row is multiplied by; 0 for a row of zeros.
DEVICE int scale_exponent(float largest) {
    const int exponent = (__float_as_uint(largest) >> 23 & 255) - 127;
    return largest == 0.0f ? 0 : min(max(14 - exponent, -126), 126);
}
DEVICE float power_of_two(int exponent) { return __uint_as_float((exponent + 127) << 23); }

// The order of dimensions within a block of 64 that lets a thread's 16-byte read of a key serve as four A
// fragments: byte r of word j of thread t is column 2 * t + r % 2 + 8 * (r / 2) of the j-th wgmma.
DEVICE int query_column(int dim) {
    const int t = dim / 16, j = dim % 16 / 4, r = dim % 4;
    return 16 * j + 2 * t + 8 * (r / 2) + r % 2;
}

// The same of bf16 rope values, of which a half takes 32: 16 bytes of a key serve as two A fragments.
DEVICE int rope_column(int dim) {
    const int t = dim % 32 / 8, word = dim % 8 / 2;
    return dim / 32 * 32 + word / 2 * 16 + 2 * t + 8 * (word % 2) + dim % 2;
}

DEVICE u32 row_scale_address(u32 shared, int team, int row) {
    return shared + Shared::ROW_SCALE + (team * ROWS + row) * 4;
}

// The rows [row_begin, row_begin + ROWS) of a request; every math warp takes its share.
struct QueryRows {
    static constexpr int WARP_ROWS = (ROWS + MATH_WARPS - 1) / MATH_WARPS;
    uint4 chunks[WARP_ROWS][LANE_CHUNKS];

    DEVICE void load(const Query& q, int request, int row_begin) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i++) {
            const int row = row_begin + warp + i * MATH_WARPS;
            const bool exists = warp + i * MATH_WARPS < ROWS && row < TOTAL_ROWS;
            const u16* nope = q.nope + q.nope_strides.at(request, row);
            const u16* pe = q.pe + q.pe_strides.at(request, row);
#pragma unroll
            for (int k = 0; k < LANE_CHUNKS; k++) {
                const int dim = (lane + k * WARP) * CHUNK;
                chunks[i][k] = make_uint4(0, 0, 0, 0);
                if (exists && dim < HEAD_DIM)
                    chunks[i][k] = load_chunk(dim < LATENT ? nope + dim : pe + dim - LATENT, q.aligned);
            }
        }
    }

    // score_scale / 2^exponent goes to ROW_SCALE.
    DEVICE void store(u32 shared, float score_scale) const {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i++) {
            const int row = warp + i * MATH_WARPS;
            if (row >= ROWS) break;
            float largest = 0.0f;
#pragma unroll
            for (int k = 0; k < LANE_CHUNKS; k++) largest = fmaxf(largest, largest_of(chunks[i][k]));
#pragma unroll
            for (int o = WARP / 2; o; o /= 2)
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, o));
            const int exponent = scale_exponent(largest);
            const float scale = power_of_two(exponent);
#pragma unroll
            for (int k = 0; k < LANE_CHUNKS; k++) {
                const int dim = (lane + k * WARP) * CHUNK;
                if (dim < HEAD_DIM) store_chunk(shared + Shared::QUERY, chunks[i][k], row, dim, scale);
            }
            if (lane < TEAMS)
                store_shared(row_scale_address(shared, lane, row), score_scale * power_of_two(-exponent));
        }
    }

    DEVICE static float largest_of(const uint4& chunk) {
        const u32 pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            largest = fmaxf(largest, fmaxf(fabsf(bfloat_low(pairs[i])), fabsf(bfloat_high(pairs[i]))));
        return largest;
    }

    DEVICE static void store_chunk(u32 query, const uint4& chunk, int row, int dim, float scale) {
        const u32 pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        const bool stays_bfloat = GROUP_SCALES && dim >= LATENT;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int first = dim % 64 + 2 * i, column = stays_bfloat ? rope_column(first) : query_column(first);
            const u32 swizzled = (column / 8 ^ row % 8) * 16 + column % 8 * 2;
            const float low = bfloat_low(pairs[i]) * scale, high = bfloat_high(pairs[i]) * scale;
            store_shared(query + dim / 64 * QUERY_BLOCK_BYTES + row * 128 + swizzled,
                         stays_bfloat ? pack_bfloat2(low, high) : pack_half2(low, high));
        }
    }
};

// The caller's barrier completes it. `change` may change the rows that were loaded.
template <typename Change>
DEVICE void load_query(const Query& q, int request, int row_begin, u32 shared, float score_scale,
                       const Change& change) {
    QueryRows rows;
    rows.load(q, request, row_begin);
    change(rows);
    rows.store(shared, score_scale);
    fence_async_proxy();
}
DEVICE void load_query(const Query& q, int request, int row_begin, u32 shared, float score_scale) {
    load_query(q, request, row_begin, shared, score_scale, [](QueryRows&) {});
}

}  // namespace streamla
