// Output: O^T (128 latents of a quarter x ROWS) += V^T (latents x tokens) * P^T, as wgmma with latents on M.
//
// A = values: the same stage as the keys. A fragment needs two tokens of one latent in one register, so
// a thread reads 4 latents of four tokens, pairs them by byte permutes and widens. Tokens and latents are
// permuted to make these reads free of bank conflicts: the probabilities are stored in the same order of
// tokens, and the output is stored by its true latents.
#pragma once

#include "tile.cuh"

namespace streamla {

constexpr int STEPS = TILE_N / 16;  // wgmma steps of 16 tokens
constexpr int QUARTER_LATENTS = LATENT / QUARTERS;
constexpr int M_TILES = QUARTER_LATENTS / 64;  // wgmma tiles of 64 latents
constexpr int THREAD_LATENTS = 2 * M_TILES;    // contiguous: m-tile j, register row r hold latent 2 * j + r

using Accumulator = float[M_TILES][ROWS / 2];

DEVICE int first_latent(const Lane& lane) {
    return lane.quarter * QUARTER_LATENTS + (8 * lane.warp + lane.g) * THREAD_LATENTS;
}
// A thread's tokens in step s are first_token + 8 * s + {0, 2, 4, 6}.
DEVICE int first_token(const Lane& lane) { return 32 * (lane.t / 2) + lane.t % 2; }

DEVICE u32 value_offset(const Lane& lane) { return stage_offset(first_token(lane)) + first_latent(lane); }

// Where a token stands among the 64 of its tile in P^T, given the order above: it is element `slot` of step
// token / 8 % 4.
DEVICE int probability_position(int token) {
    const int t = token / 32 * 2 + token % 2, i = token % 8 / 2;
    const int slot = i / 2 * 8 + 2 * t + i % 2;
    return token / 8 % 4 * 16 + slot;
}
// P^T is [group][tile][position][row % 8], fp16.
constexpr u32 PROBABILITY_GROUP = STEP_N * 16;
DEVICE u32 probability_address(u32 shared, const Lane& lane) {
    return shared + Shared::PROBABILITY + lane.tile() * TILE_N * 16 +
           probability_position(lane.token() % TILE_N) * 16 + lane.t * 4;
}
DEVICE u64 probability_descriptor(u32 shared) {
    return matrix_descriptor(shared + Shared::PROBABILITY, 128, PROBABILITY_GROUP, SWIZZLE_NONE);
}

// Values of two wgmma steps (32 tokens), as they lie in the stage: [step][token], 4 latents a word.
constexpr int PAIR_STEPS = 2;
constexpr int TILE_PAIRS = STEPS / PAIR_STEPS;

struct RawValues {
    u32 words[PAIR_STEPS][4];

    DEVICE void load(u32 values, int pair) {
#pragma unroll
        for (int s = 0; s < PAIR_STEPS; s++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[s][i] = load_shared_u32(values + (8 * (pair * PAIR_STEPS + s) + 2 * i) * TOKEN_BYTES);
        }
    }
    // Tokens from `valid` of the tile on were not loaded: whatever lies there must not meet a probability of 0.
    DEVICE void clear_from(int valid, int pair, const Lane& lane) {
#pragma unroll
        for (int s = 0; s < PAIR_STEPS; s++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (first_token(lane) + 8 * (pair * PAIR_STEPS + s) + 2 * i >= valid) words[s][i] = 0;
        }
    }
};

struct Values {
    u32 a[PAIR_STEPS][M_TILES][4];

    DEVICE void widen(const RawValues& raw) {
#pragma unroll
        for (int s = 0; s < PAIR_STEPS; s++) {
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const u32 even = raw.words[s][2 * p], odd = raw.words[s][2 * p + 1];
                widen_e4m3(__byte_perm(even, odd, 0x5140), a[s][0][2 * p], a[s][0][2 * p + 1]);
                widen_e4m3(__byte_perm(even, odd, 0x7362), a[s][1][2 * p], a[s][1][2 * p + 1]);
            }
        }
    }
    // NaN to a number. A NaN key makes its probability NaN wherever it is visible; where it is hidden (a
    // later token of the same causal block) its value must not turn 0 * NaN into NaN.
    DEVICE void clear_nan() {
        constexpr u32 LOWEST = 0xdf00df00;  // -448 twice, the lowest e4m3fn
#pragma unroll
        for (int s = 0; s < PAIR_STEPS; s++) {
#pragma unroll
            for (int j = 0; j < M_TILES; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[s][j][i] = max_half2(a[s][j][i], LOWEST);
            }
        }
    }
};

// `pair`: counted over the tiles of the step.
DEVICE void issue_output(Accumulator& acc, const Values& values, u64 probabilities, int pair) {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < PAIR_STEPS; s++) {
#pragma unroll
        for (int j = 0; j < M_TILES; j++)
            wgmma_f16<true>(acc[j], values.a[s][j], probabilities + (pair * PAIR_STEPS + s) * 16, true);
    }
    wgmma_commit();
}

}  // namespace streamla
