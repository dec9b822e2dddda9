// Wide attention: query rows to shared memory, in fp16.
//
// A row is scaled by a power of two that brings its largest magnitude to [2^14, 2^15), so every bf16 value that
// matters is exact in fp16; the row's score scale takes it back. Inside a chunk of 64 dimensions the order is
// the one in which K's 16-byte reads fall into A fragments.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

struct Query {
    const u16 *nope, *pe;  // bf16
    Strides nope_strides, pe_strides;
    bool aligned;  // every row of both starts at a multiple of 16 bytes
};

// Eight bf16 values from any address.
DEVICE uint4 load_eight(const u16* p, bool aligned) {
    if (aligned) return *reinterpret_cast<const uint4*>(p);
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = p[2 * i] | static_cast<u32>(p[2 * i + 1]) << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Exponent that brings `highest` to [2^14, 2^15), as far as a float holds the factor.
DEVICE int exponent_to_fp16(float highest) {
    const int biased = __float_as_uint(highest) >> 23 & 255;
    return biased == 0 ? 0 : min(126, max(-126, 14 + 127 - biased));
}
DEVICE float power_of_two(int exponent) { return __uint_as_float(static_cast<u32>(exponent + 127) << 23); }

// A lane holds a quarter of a row: dimensions 16 t to 16 t + 15 of every chunk of 64.
struct QuarterRow {
    uint4 half[QUERY_CHUNKS][2];

    DEVICE void load(const u16* nope, const u16* pe, int t, bool aligned) {
#pragma unroll
        for (int chunk = 0; chunk < QUERY_CHUNKS; ++chunk) {
            const u16* p = (chunk < LATENT / 64 ? nope + 64 * chunk : pe) + 16 * t;
            half[chunk][0] = load_eight(p, aligned);
            half[chunk][1] = load_eight(p + 8, aligned);
        }
    }
    DEVICE float largest() const {
        float largest = 0.f;
#pragma unroll
        for (int chunk = 0; chunk < QUERY_CHUNKS; ++chunk) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 pair = word(chunk, i);
                largest = fmaxf(largest, fmaxf(fabsf(bfloat_low(pair)), fabsf(bfloat_high(pair))));
            }
        }
        return largest;
    }
    // Word j of the 16 bytes of K at 16 t becomes elements {2 t, 2 t + 1} and {2 t + 8, 2 t + 9} of step j.
    DEVICE void store(u32 query, int column, int t, float factor) const {
#pragma unroll
        for (int chunk = 0; chunk < QUERY_CHUNKS; ++chunk) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 pair = word(chunk, i);
                store_shared(query + chunk * QUERY_CHUNK + column * 128 + (i ^ column % 8) * 16 + 4 * t,
                             pack_half2(bfloat_low(pair) * factor, bfloat_high(pair) * factor));
            }
        }
    }

private:
    // Dimensions 2 i and 2 i + 1 of the quarter: elements of eighth i of the chunk.
    DEVICE u32 word(int chunk, int i) const {
        const uint4 v = half[chunk][i / 4];
        return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
    }
};

// All math warps, eight rows each; rows past the request's are zero. Also resets the row states.
DEVICE void stage_query(const Query& q, int request, int first_row, int num_rows, float score_scale, u32 shared) {
    const int column = threadIdx.x / 4, t = threadIdx.x % 4;
    if (column >= COLUMNS) return;
    QuarterRow row = {};
    if (column < num_rows)
        row.load(q.nope + q.nope_strides.at(request, first_row + column),
                 q.pe + q.pe_strides.at(request, first_row + column), t, q.aligned);
    float largest = row.largest();
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
    const int exponent = exponent_to_fp16(largest);
    row.store(shared + Shared::QUERY, column, t, power_of_two(exponent));
    if (t == 0)
        store_shared(shared + Shared::ROW_STATE + column * 8,
                     make_float2(score_scale * power_of_two(-exponent), LOWEST_REFERENCE));
}

}  // namespace streamla
