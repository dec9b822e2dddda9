// Output: O^T (256 latents of a half x ROWS) += V^T (latents x 64 tokens) * P^T, as wgmma with latents on M.
//
// A = values: the same stage as the keys, read transposed. B = probabilities in shared memory, each as the sum
// of two bf16 numbers, so that they keep 16 bits; the second product takes the same A.
#pragma once

#include "bf16_scores.cuh"

namespace streamla {

constexpr int HALF_LATENTS = LATENT / HALVES;
constexpr int M_TILES = HALF_LATENTS / 64;
constexpr int TOKEN_STEPS = TILE_N / 16;

// [m-tile]: latents 64 * j + 16 * warp + g of the half in elements 0, 1 of a group, + 8 in elements 2, 3.
using Accumulator = float[M_TILES][ROWS / 2];

// P^T is [part][group][place][row % 8].
constexpr u32 PROBABILITY_GROUP = TILE_N * 16;
DEVICE u32 probability_address(u32 shared, const Lane& lane) {
    return shared + Shared::PROBABILITY + lane.place() * 16 + lane.t * 4;
}

// A of 16 tokens: places 16 * step and on.
struct Values {
    u32 a[M_TILES][4];

    DEVICE void load(u32 values, int step) {
#pragma unroll
        for (int j = 0; j < M_TILES; j++)
            load_matrix_x4_transposed(a[j], values + 2 * step * TOKEN_BYTES + j * 128);
    }
    // Even rows (tokens) are the lower 16 bits.
    DEVICE void trade() {
#pragma unroll
        for (int j = 0; j < M_TILES; j++) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const u32 first = a[j][i], second = a[j][i + 1];
                a[j][i] = __byte_perm(first, second, 0x7610);
                a[j][i + 1] = __byte_perm(second, first, 0x7610);
            }
        }
    }
    // Tokens from `valid` of the tile on were not loaded: whatever lies there must not meet a probability of 0.
    // Tokens from `hidden` on are hidden from some row: what is not finite in them must not turn its 0 into
    // NaN; where such a token is visible, its score already is not finite.
    DEVICE void mask(int valid, int hidden, int step, const Lane& lane) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int place = 16 * step + 8 * i + 2 * lane.t;
            const u32 keep = halves_before(valid, place), unseen = ~halves_before(hidden, place);
#pragma unroll
            for (int j = 0; j < M_TILES; j++) {
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    u32& v = a[j][2 * i + k];
                    v &= keep;
                    if (SEQLEN_Q > 1) v = (v & ~unseen) | (finite_bfloat2(v) & unseen);
                }
            }
        }
    }
    // Mask of the 16-bit halves whose tokens (of places `place` and `place` + 1) come before `end`.
    DEVICE static u32 halves_before(int end, int place) {
        return (token_of_place(place) < end ? 0xffffu : 0u) | (token_of_place(place + 1) < end ? 0xffff0000u : 0u);
    }
};

DEVICE void issue_output(Accumulator& acc, const Values (&values)[TOKEN_STEPS], u32 shared) {
    const u64 probabilities =
        matrix_descriptor(shared + Shared::PROBABILITY, 128, PROBABILITY_GROUP, SWIZZLE_NONE);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < TOKEN_STEPS; s++) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
#pragma unroll
            for (int j = 0; j < M_TILES; j++)
                wgmma_bf16<true>(acc[j], values[s].a[j],
                                 probabilities + (part * Shared::PROBABILITY_BYTES + s * 16 * 16) / 16, true);
        }
    }
    wgmma_commit();
}

}  // namespace streamla
