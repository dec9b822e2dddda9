// Scores: S^T (64 tokens x ROWS) = K (tokens x 576) * Q^T, as wgmma with tokens on M, so 8 rows waste
// nothing.
//
// A = keys, widened from fp8 to fp16 in registers. B = queries, in shared memory, read once for the four
// warps. Two halves of a team take four of the 9 blocks of 64 dimensions each, and two of the four steps of
// the last; then they add up what they have through shared memory.
#pragma once

#include "query.cuh"

namespace streamla {

constexpr int LAST_BLOCK = HEAD_DIM / 64 - 1;
constexpr int HALF_BLOCKS = LAST_BLOCK / TEAM_HALVES;
constexpr int LAST_WORDS = 4 / TEAM_HALVES;  // of the last block

// Offset in a stage of the first 16 bytes that a thread reads of a block: token 16 * warp + g.
DEVICE u32 key_offset(const Lane& lane) { return stage_offset(16 * lane.warp + lane.g) + lane.t * 16; }

// B of step `step` of a block, as the fragments' order of dimensions has it (query_column in query.cuh).
DEVICE u64 query_descriptor(u32 shared, int block, int step) {
    return matrix_descriptor(shared + Shared::QUERY + block * QUERY_BLOCK_BYTES + step * 32, 16, 1024,
                             SWIZZLE_128);
}

// What a thread reads of a block: 16 bytes of each of its fragments' two tokens, g and g + 8.
struct KeyBlock {
    u32 token[4], other[4];

    template <int WORDS> DEVICE void load(u32 address) {
        constexpr u32 OTHER_TOKEN = 8 * TOKEN_BYTES;
        if constexpr (WORDS == 4) {
            const uint4 a = load_shared_u32x4(address), b = load_shared_u32x4(address + OTHER_TOKEN);
            token[0] = a.x, token[1] = a.y, token[2] = a.z, token[3] = a.w;
            other[0] = b.x, other[1] = b.y, other[2] = b.z, other[3] = b.w;
        } else {
            const uint2 a = load_shared_u32x2(address), b = load_shared_u32x2(address + OTHER_TOKEN);
            token[0] = a.x, token[1] = a.y;
            other[0] = b.x, other[1] = b.y;
        }
    }
    // A of the wgmma of word j.
    DEVICE void widen(u32 (&a)[4], int j) const {
        widen_e4m3(token[j], a[0], a[2]);
        widen_e4m3(other[j], a[1], a[3]);
    }
};

// Issues the wgmmas of WORDS words of a block, two at a time, from buffer `pair` % KEY_PAIRS on.
constexpr int KEY_PAIRS = 2;
using KeyFragments = u32[KEY_PAIRS][2][4];
template <int WORDS>
DEVICE void issue_block(float (&scores)[ROWS / 2], KeyFragments& a, const KeyBlock& block, u64 queries,
                        int pair) {
#pragma unroll
    for (int p = 0; p < WORDS / 2; p++) {
        u32(&pair_a)[2][4] = a[(pair + p) % KEY_PAIRS];
        if (pair + p >= KEY_PAIRS) wgmma_wait<KEY_PAIRS - 1>();
        block.widen(pair_a[0], 2 * p);
        block.widen(pair_a[1], 2 * p + 1);
        wgmma_fence();
        wgmma_f16<false>(scores, pair_a[0], queries + 2 * p * 2, pair + p > 0);
        wgmma_f16<false>(scores, pair_a[1], queries + (2 * p + 1) * 2, true);
        wgmma_commit();
    }
}

// Issues this half's part of a tile's scores; the caller waits.
DEVICE void issue_scores(float (&scores)[ROWS / 2], u32 stage, u32 shared, const Lane& lane) {
    const u32 keys = stage + key_offset(lane);
    const u32 first = keys + lane.half * HALF_BLOCKS * 64;
    const u64 queries = query_descriptor(shared, lane.half * HALF_BLOCKS, 0);
    KeyBlock blocks[HALF_BLOCKS + 1];
    KeyFragments a;
    blocks[0].load<4>(first);
    blocks[1].load<4>(first + 64);
#pragma unroll
    for (int b = 0; b < HALF_BLOCKS; b++) {
        if (b + 2 < HALF_BLOCKS) blocks[b + 2].load<4>(first + (b + 2) * 64);
        if (b + 2 == HALF_BLOCKS) blocks[b + 2].load<LAST_WORDS>(keys + LAST_BLOCK * 64 + lane.half * 8);
        issue_block<4>(scores, a, blocks[b], queries + b * QUERY_BLOCK_BYTES / 16, 2 * b);
    }
    issue_block<LAST_WORDS>(scores, a, blocks[HALF_BLOCKS],
                            query_descriptor(shared, LAST_BLOCK, 2 * lane.half), 2 * HALF_BLOCKS);
}

using Scores = float[GROUPS][THREAD_TOKENS][2];  // of rows Lane::row(c, k) and tokens Lane::token(x)

// What is sent to half 0; what is sent to half 1 lies SCORE_BYTES further.
DEVICE u32 score_address(u32 shared, const Lane& lane) {
    return shared + Shared::SCORE + lane.team * 2 * Shared::SCORE_BYTES + threadIdx.x % WARPGROUP * 8;
}
// Two halves trade: each keeps its own tokens.
DEVICE void send_scores(const float (&fragment)[ROWS / 2], Scores& scores, u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const float2 first = make_float2(fragment[4 * c], fragment[4 * c + 1]);
        const float2 second = make_float2(fragment[4 * c + 2], fragment[4 * c + 3]);
        if constexpr (TEAM_HALVES == 2) {
            const u32 address = score_address(shared, lane) + c * WARPGROUP * 8;
            if (lane.half)
                store_shared(address, first);
            else
                store_shared(address + Shared::SCORE_BYTES, second);
            scores[c][0][0] = lane.half ? second.x : first.x;
            scores[c][0][1] = lane.half ? second.y : first.y;
        } else {
            scores[c][0][0] = first.x, scores[c][0][1] = first.y;
            scores[c][1][0] = second.x, scores[c][1][1] = second.y;
        }
    }
}
// In base 2, ready for the softmax.
DEVICE void receive_scores(Scores& scores, u32 shared, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        if constexpr (TEAM_HALVES == 2) {
            const u32 address = score_address(shared, lane) + c * WARPGROUP * 8;
            float2 other;
            if (lane.half)
                other = load_shared_f32x2(address + Shared::SCORE_BYTES);
            else
                other = load_shared_f32x2(address);
            scores[c][0][0] += other.x;
            scores[c][0][1] += other.y;
        }
        const float2 scale = load_shared_f32x2(row_scale_address(shared, lane.team, lane.row(c, 0)));
#pragma unroll
        for (int x = 0; x < THREAD_TOKENS; x++) {
            scores[c][x][0] *= scale.x;
            scores[c][x][1] *= scale.y;
        }
    }
}

}  // namespace streamla
