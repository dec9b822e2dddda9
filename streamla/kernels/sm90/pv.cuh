// Output: O^T (latents x ROWS) += V^T (latents x tokens) * P^T, as wgmma with latents on M.
//
// A = values: the same stage as the keys. A fragment needs two tokens of one latent in one register, so
// a thread reads 8 latents of four tokens, pairs them by byte permutes and widens. Tokens and latents are
// permuted to make these reads wide and free of bank conflicts: the probabilities are stored in the same
// order of tokens, and the output is stored by its true latents.
#pragma once

#include "tile.cuh"

namespace streamla {

constexpr int STEPS = TILE_N / 16;  // wgmma steps of 16 tokens
constexpr int RUN_LATENTS = 256;    // of a half, or of each of two runs that one warpgroup takes
constexpr int RUNS = LATENT / RUN_LATENTS / TEAM_HALVES;
constexpr int M_TILES = RUN_LATENTS / 64;
constexpr int THREAD_LATENTS = 2 * M_TILES;  // contiguous: m-tile j, register row r hold latent 2 * j + r
constexpr int UNITS = STEPS * RUNS;          // unit u is run u % RUNS of step u / RUNS: four wgmmas

using Accumulator = float[RUNS * M_TILES][ROWS / 2];

DEVICE int first_latent(const Lane& lane, int run) {
    return (lane.half + run) * RUN_LATENTS + (8 * lane.warp + lane.g) * THREAD_LATENTS;
}
// A thread's tokens in step s are first_token + 8 * s + {0, 2, 4, 6}.
DEVICE int first_token(const Lane& lane) { return 32 * (lane.t / 2) + lane.t % 2; }

DEVICE u32 value_offset(const Lane& lane) {
    return stage_offset(first_token(lane)) + first_latent(lane, 0);
}

// Where a token stands in P^T, given the order above: it is element `slot` of step token / 8 % 4.
DEVICE int probability_position(int token) {
    const int t = token / 32 * 2 + token % 2, i = token % 8 / 2;
    const int slot = i / 2 * 8 + 2 * t + i % 2;
    return token / 8 % 4 * 16 + slot;
}
// P^T of a team is [group][position][row % 8], fp16.
constexpr u32 PROBABILITY_GROUP = TILE_N * 16;
constexpr u32 OTHER_POSITION =
    16 * 16;  // from that of a thread's first token to that of its second, in bytes
DEVICE u32 probability_buffer(u32 shared, int position, const Lane& lane) {
    const int buffer = lane.team * PROBABILITY_BUFFERS + position / TEAMS % PROBABILITY_BUFFERS;
    return shared + Shared::PROBABILITY + buffer * Shared::PROBABILITY_BYTES;
}
DEVICE u32 probability_address(u32 shared, int position, const Lane& lane) {
    return probability_buffer(shared, position, lane) + probability_position(lane.token(0)) * 16 +
           lane.t * 4;
}
DEVICE u64 probability_descriptor(u32 shared, int position, const Lane& lane) {
    return matrix_descriptor(probability_buffer(shared, position, lane), 128, PROBABILITY_GROUP,
                             SWIZZLE_NONE);
}

// Values of one unit as they lie in the stage: four tokens.
struct RawValues {
    uint2 token[4];

    DEVICE void load(u32 values, int unit) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            token[i] = load_shared_u32x2(values + (8 * (unit / RUNS) + 2 * i) * TOKEN_BYTES +
                                         unit % RUNS * RUN_LATENTS);
    }
    // Tokens from `valid` on were not loaded: whatever lies there must not meet a probability of 0.
    DEVICE void clear_from(int valid, int unit, const Lane& lane) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first_token(lane) + 8 * (unit / RUNS) + 2 * i >= valid) token[i] = make_uint2(0, 0);
    }
};

struct Values {
    u32 a[M_TILES][4];

    DEVICE void widen(const RawValues& raw) {
        const u32 words[2][4] = {{raw.token[0].x, raw.token[1].x, raw.token[2].x, raw.token[3].x},
                                 {raw.token[0].y, raw.token[1].y, raw.token[2].y, raw.token[3].y}};
#pragma unroll
        for (int w = 0; w < 2; w++) {
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const u32 even = words[w][2 * p], odd = words[w][2 * p + 1];
                widen_e4m3(__byte_perm(even, odd, 0x5140), a[2 * w][2 * p], a[2 * w][2 * p + 1]);
                widen_e4m3(__byte_perm(even, odd, 0x7362), a[2 * w + 1][2 * p], a[2 * w + 1][2 * p + 1]);
            }
        }
    }
    // NaN to a number. A NaN key makes its probability NaN wherever it is visible; where it is hidden (a
    // later token of the same causal block) its value must not turn 0 * NaN into NaN.
    DEVICE void clear_nan() {
        constexpr u32 LOWEST = 0xdf00df00;  // -448 twice, the lowest e4m3fn
#pragma unroll
        for (int j = 0; j < M_TILES; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[j][i] = max_half2(a[j][i], LOWEST);
        }
    }
};

DEVICE void issue_output(Accumulator& acc, const Values& values, u64 probabilities, int unit) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < M_TILES; j++)
        wgmma_f16<true>(acc[unit % RUNS * M_TILES + j], values.a[j], probabilities + unit / RUNS * 16,
                        true);
    wgmma_commit();
}

}  // namespace streamla
