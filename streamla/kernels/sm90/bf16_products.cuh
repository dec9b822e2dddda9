// The two products of a tile, as wgmma with both operands in shared memory.
//
// Scores: S^T (64 tokens x ROWS) = K * Q^T, tokens on M, so that 8 rows waste nothing.
// Output: O^T (512 latents x ROWS) += V^T * P^T, latents on M: the same bytes of the slot, read transposed.
#pragma once

#include "bf16_ring.cuh"

namespace streamla {

// Of token(i) and row(c, k) in [4 * c + 2 * i + k].
using Scores = float[ROWS / 2];

DEVICE void compute_scores(Scores& scores, u32 slot, u32 shared) {
    const u64 keys = matrix_descriptor(slot, 16, RUN_BYTES, SWIZZLE_128);
    const u64 query = matrix_descriptor(shared + Shared::QUERY, 16, ATOM_BYTES, SWIZZLE_128);
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
#pragma unroll
        for (int step = 0; step < BLOCK_DIM / 16; step++)
            wgmma_bf16<false, false>(scores, keys + (block * ATOM_BYTES + step * 32) / 16,
                                     query + (block * QUERY_BLOCK_BYTES + step * 32) / 16, block + step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
}

// Each probability is the sum of two bf16 numbers: 16 bits. Up to 16 rows, the two parts are columns of one product,
// so that values are read once; accumulators of more rows do not fit, and two products add to the same.
constexpr bool SIDE_BY_SIDE = ROWS <= 16;
constexpr int PRODUCTS = SIDE_BY_SIDE ? 1 : 2;
constexpr int COLUMNS = SIDE_BY_SIDE ? 2 * ROWS : ROWS;

// [block of latents]: latents 64 * j + 16 * warp + g in elements 0, 1 of a group, + 8 in elements 2, 3.
using Accumulator = float[LATENT_BLOCKS][COLUMNS / 2];

// Element i of rows of group c.
DEVICE float accumulated(const Accumulator& acc, int j, int c, int i) {
    return SIDE_BY_SIDE ? acc[j][4 * c + i] + acc[j][4 * (c + GROUPS) + i] : acc[j][4 * c + i];
}

// P^T is [part][group][token][row % 8].
constexpr u32 PROBABILITY_GROUP = TILE_N * 16;
DEVICE u32 probability_address(u32 shared, const Lane& lane, int i) {
    return shared + Shared::PROBABILITY + lane.token(i) * 16 + lane.t * 4;
}

// Of the first STEPS * 16 tokens. A loop over steps at run time would make the compiler wait for every wgmma.
template <int STEPS> DEVICE void accumulate_steps(Accumulator& acc, u32 slot, u32 shared) {
    const u64 values = matrix_descriptor(slot, ATOM_BYTES, RUN_BYTES, SWIZZLE_128);
    const u64 probabilities =
        matrix_descriptor(shared + Shared::PROBABILITY, 128, PROBABILITY_GROUP, SWIZZLE_NONE);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int part = 0; part < PRODUCTS; part++) {
#pragma unroll
            for (int j = 0; j < LATENT_BLOCKS; j++)
                wgmma_bf16<true, true>(
                    acc[j], values + (step * (STEP_N / RUN_N * RUN_BYTES) + j * ATOM_BYTES) / 16,
                    probabilities + (part * Shared::PROBABILITY_BYTES + step * STEP_N * 16) / 16, true);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
}
DEVICE int product_steps(int tokens) { return max(2, (tokens + STEP_N - 1) / STEP_N); }
DEVICE void accumulate_output(Accumulator& acc, u32 slot, int steps, u32 shared) {
    switch (steps) {
        case 2: return accumulate_steps<2>(acc, slot, shared);
        case 3: return accumulate_steps<3>(acc, slot, shared);
        default: return accumulate_steps<4>(acc, slot, shared);
    }
}

// Latents of tokens [first, slot's end) that some row must not see: of those from `valid` on, which were not loaded
// or are nobody's, zeros; of the others, what is not finite must not turn a probability of 0 into NaN. (Where such
// a token is visible its score already is not finite.) All math threads; after every read of the tile as keys.
DEVICE void cover_values(u32 slot, int first, int valid, int tokens, const Lane& lane) {
    for (int token = first + lane.warp; token < tokens; token += MATH_WARPS) {
#pragma unroll
        for (int i = 0; i < 2; i++) {  // 8 lanes have 128 bytes; their order in them does not matter
            const int block = lane.lane / 8 + 4 * i;
            const u32 address = slot + token / RUN_N * RUN_BYTES + block * ATOM_BYTES + token % RUN_N * 128 +
                                lane.lane % 8 * 16;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (token < valid) {
                v = load_shared_u32x4(address);
                v = make_uint4(finite_bfloat2(v.x), finite_bfloat2(v.y), finite_bfloat2(v.z), finite_bfloat2(v.w));
            }
            store_shared(address, v);
        }
    }
}

}  // namespace streamla
