// Wide attention: query rows to shared memory, in fp16.
//
// A row is scaled by a power of two that brings its largest magnitude to [2^14, 2^15), so every bf16 value that
// matters is exact in fp16; the row's score scale takes it back. Inside a chunk of 64 dimensions the order is
// the one in which K's 16-byte reads fall into A fragments.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

struct Query {
    const u16* nope;
    const u16* pe;
    Rows nope_rows, pe_rows;
};

// Eight bf16 values from any address.
DEVICE uint4 load_eight(const u16* p, bool aligned) {
    if (aligned) return *reinterpret_cast<const uint4*>(p);
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = p[2 * i] | static_cast<u32>(p[2 * i + 1]) << 16;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

DEVICE float magnitude(float highest, const uint4& v) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        highest = fmaxf(highest, fmaxf(fabsf(bfloat_low(w[i])), fabsf(bfloat_high(w[i]))));
    return highest;
}

// Exponent that brings `highest` to [2^14, 2^15), as far as a float holds the factor.
DEVICE int exponent_to_fp16(float highest) {
    const int biased = __float_as_uint(highest) >> 23 & 255;
    return biased == 0 ? 0 : min(126, max(-126, 14 + 127 - biased));
}
DEVICE float power_of_two(int exponent) { return __uint_as_float(static_cast<u32>(exponent + 127) << 23); }

// Eight dimensions, 8 * unit to 8 * unit + 7 of the row in `column`. In a chunk, word j of the 16 bytes at 16 t
// becomes elements {2 t, 2 t + 1} and {2 t + 8, 2 t + 9} of step j.
DEVICE void store_query_unit(u32 query, int column, int unit, const uint4& v, float factor) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    const u32 row = query + unit / 8 * QUERY_CHUNK + column * 128;
    const int t = unit % 8 / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int step = unit % 2 * 2 + i / 2;
        const int element = 16 * step + 2 * t + i % 2 * 8;
        const u32 swizzled = ((element / 8) ^ (column % 8)) * 16 + element % 8 * 2;
        store_shared(row + swizzled, pack_half2(bfloat_low(w[i]) * factor, bfloat_high(w[i]) * factor));
    }
}

// All math warps; rows past the request's are zero. Also resets the row states.
DEVICE void stage_query(const Query& q, int request, int first_row, int num_rows, float score_scale, u32 shared) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool aligned = q.nope_rows.aligned16(q.nope, 2) && q.pe_rows.aligned16(q.pe, 2);
#pragma unroll 2
    for (int column = warp; column < COLUMNS; column += MATH_WARPS) {
        uint4 unit[3] = {};
        if (column < num_rows) {
            const u16* nope = q.nope + q.nope_rows.offset(request, first_row + column);
            const u16* pe = q.pe + q.pe_rows.offset(request, first_row + column);
            unit[0] = load_eight(nope + 8 * lane, aligned);
            unit[1] = load_eight(nope + 8 * (WARP + lane), aligned);
            if (lane < ROPE / 8) unit[2] = load_eight(pe + 8 * lane, aligned);
        }
        float highest = magnitude(magnitude(magnitude(0.f, unit[0]), unit[1]), unit[2]);
#pragma unroll
        for (int step = 16; step; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, step));
        const int exponent = exponent_to_fp16(highest);
        const float factor = power_of_two(exponent);
        store_query_unit(shared + Shared::QUERY, column, lane, unit[0], factor);
        store_query_unit(shared + Shared::QUERY, column, WARP + lane, unit[1], factor);
        if (lane < ROPE / 8) store_query_unit(shared + Shared::QUERY, column, 2 * WARP + lane, unit[2], factor);
        if (lane == 0)
            store_shared(shared + Shared::ROW_STATE + column * 8,
                         make_float2(score_scale * power_of_two(-exponent), LOWEST_REFERENCE));
    }
}

}  // namespace streamla
