// Scores: S^T (64 tokens x ROWS) = K (tokens x 576) * Q^T, as wgmma with tokens on M, so 8 rows waste nothing.
//
// A = keys, in registers. B = queries, in shared memory, read once for the four warps. Of the 9 blocks of 64
// dimensions each half takes four, and two of the four steps of the last; the two then add up what they have
// through shared memory.
#pragma once

#include "bf16_query.cuh"

namespace streamla {

constexpr int HALF_BLOCKS = 4;
constexpr int LAST_BLOCK = 2 * HALF_BLOCKS;
constexpr int STEP_DIM = 16;
constexpr int STEP_BYTES = 2 * STEP_DIM;
constexpr int BLOCK_STEPS = 64 / STEP_DIM;
constexpr int HALF_STEPS = HALF_BLOCKS * BLOCK_STEPS + BLOCK_STEPS / 2;
static_assert((LAST_BLOCK + 1) * 64 == HEAD_DIM, "the halves take all dimensions");

// Steps that are loaded, then issued together, and how many of these batches are in flight.
constexpr int KEY_BATCH = ROWS <= 16 ? 6 : 3;
constexpr int KEY_BUFFERS = 2;
static_assert(HALF_STEPS % KEY_BATCH == 0, "whole batches");

// Where a lane reads for ldmatrix: row lane % 8 of matrix lane / 8, 8 values wide. Matrices 0 and 1 make the upper
// and lower half of a fragment's M for the first 8 of its K, matrices 2 and 3 for the other 8. Odd rows read the
// other 8 values of each 16: so matrices that differ in these values trade their odd rows afterwards.
struct TileAddress {
    u32 tokens;  // of the first of the lane's eight tokens
    int matrix, odd;

    DEVICE static TileAddress of(u32 first_stage, u32 second_stage, const Lane& lane) {
        const int row = lane.lane % 8;
        const u32 stage = row < STAGE_N / 8 ? first_stage : second_stage;
        return {stage + token_offset(token_of_place(row)), lane.lane / 8, row % 2};
    }
    // M is the warp's 16 tokens, K is dimensions.
    DEVICE u32 keys(const Lane& lane) const {
        return tokens + (2 * lane.warp + matrix % 2) * TOKEN_BYTES + (matrix / 2 ^ odd) * 16;
    }
    // M is the warp's 16 latents, K is tokens.
    DEVICE u32 values(const Lane& lane) const {
        return tokens + matrix / 2 * TOKEN_BYTES + lane.half * LATENT + lane.warp * STEP_BYTES +
               (matrix % 2 ^ odd) * 16;
    }
};

// A of a wgmma from four matrices of keys. A thread holds elements of one row.
DEVICE void trade_keys(u32 (&a)[4], bool odd_row) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 first = a[i], second = a[i + 2];
        a[i] = odd_row ? second : first;
        a[i + 2] = odd_row ? first : second;
    }
}

// Leaves this half's part of the tile's scores. Also waits for whatever wgmma was issued before.
DEVICE void compute_scores(float (&scores)[ROWS / 2], u32 keys, u32 shared, const Lane& lane) {
    const u32 first = keys + lane.half * HALF_BLOCKS * BLOCK_STEPS * STEP_BYTES;
    const u32 last = keys + LAST_BLOCK * BLOCK_STEPS * STEP_BYTES + lane.half * BLOCK_STEPS / 2 * STEP_BYTES;
    const u64 first_query = query_descriptor(shared, lane.half * HALF_BLOCKS, 0);
    const u64 last_query = query_descriptor(shared, LAST_BLOCK, lane.half * BLOCK_STEPS / 2);
    u32 a[KEY_BUFFERS][KEY_BATCH][4];
#pragma unroll
    for (int batch = 0; batch < HALF_STEPS / KEY_BATCH; batch++) {
        if (batch >= KEY_BUFFERS) wgmma_wait<KEY_BUFFERS - 1>();
        u32(&buffer)[KEY_BATCH][4] = a[batch % KEY_BUFFERS];
#pragma unroll
        for (int i = 0; i < KEY_BATCH; i++) {
            const int step = batch * KEY_BATCH + i, past = step - HALF_BLOCKS * BLOCK_STEPS;
            load_matrix_x4(buffer[i], past < 0 ? first + step * STEP_BYTES : last + past * STEP_BYTES);
        }
#pragma unroll
        for (int i = 0; i < KEY_BATCH; i++) trade_keys(buffer[i], lane.g % 2);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEY_BATCH; i++) {
            const int step = batch * KEY_BATCH + i, past = step - HALF_BLOCKS * BLOCK_STEPS;
            const u64 query = past < 0 ? first_query + (step / BLOCK_STEPS * QUERY_BLOCK_BYTES +
                                                        step % BLOCK_STEPS * STEP_BYTES) / 16
                                       : last_query + past * STEP_BYTES / 16;
            wgmma_bf16<false>(scores, buffer[i], query, step > 0);
        }
        wgmma_commit();
    }
    wgmma_wait<0>();
}

// Scores of this thread's own token and rows.
using Scores = float[GROUPS][2];

// The halves trade: each keeps its own tokens (the first g of every 16 places, the second g + 8).
DEVICE u32 score_address(u32 shared, int to, int c) {
    return shared + Shared::SCORE + to * Shared::SCORE_BYTES + (c * WARPGROUP + threadIdx.x % WARPGROUP) * 8;
}
DEVICE void send_scores(const float (&scores)[ROWS / 2], Scores& mine, u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const float2 first = make_float2(scores[4 * c], scores[4 * c + 1]);
        const float2 second = make_float2(scores[4 * c + 2], scores[4 * c + 3]);
        store_shared(score_address(shared, lane.half ^ 1, c), lane.half ? first : second);
        mine[c][0] = lane.half ? second.x : first.x;
        mine[c][1] = lane.half ? second.y : first.y;
    }
}
// In base 2, ready for the softmax.
DEVICE void receive_scores(Scores& mine, float score_scale, u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const float2 other = load_shared_f32x2(score_address(shared, lane.half, c));
        mine[c][0] = (mine[c][0] + other.x) * score_scale;
        mine[c][1] = (mine[c][1] + other.y) * score_scale;
    }
}

}  // namespace streamla
