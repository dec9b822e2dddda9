// Scores: S^T (64 tokens x ROWS) = K (tokens x 576) * Q^T, as wgmma with tokens on M, so 8 rows waste nothing.
//
// A = keys, widened from fp8 to fp16 in registers. B = queries, in shared memory, read once for the four
// warps. Of the 9 blocks of 64 dimensions each quarter of a pair takes four, and two of the four steps of the
// last; the two then add up what they have through shared memory.
#pragma once

#include "tile.cuh"

namespace streamla {

constexpr int HALF_BLOCKS = 4;
constexpr int LAST_BLOCK = 2 * HALF_BLOCKS;
static_assert((LAST_BLOCK + 1) * 64 == HEAD_DIM, "the pair takes all dimensions");

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
constexpr int KEY_PAIRS = 3;
using KeyFragments = u32[KEY_PAIRS][2][4];
template <int WORDS>
DEVICE void issue_block(float (&scores)[ROWS / 2], KeyFragments& a, const KeyBlock& block, u64 queries, int pair) {
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

// Issues this quarter's part of its tile's scores; the caller waits.
DEVICE void issue_scores(float (&scores)[ROWS / 2], u32 stage, u32 shared, const Lane& lane) {
    const u32 keys = stage + key_offset(lane);
    const u32 first = keys + lane.half() * HALF_BLOCKS * 64;
    const u64 queries = query_descriptor(shared, lane.half() * HALF_BLOCKS, 0);
    KeyBlock blocks[HALF_BLOCKS + 1];
    KeyFragments a;
    blocks[0].load<4>(first);
    blocks[1].load<4>(first + 64);
#pragma unroll
    for (int b = 0; b < HALF_BLOCKS; b++) {
        if (b + 2 < HALF_BLOCKS) blocks[b + 2].load<4>(first + (b + 2) * 64);
        if (b + 2 == HALF_BLOCKS) blocks[b + 2].load<2>(keys + LAST_BLOCK * 64 + lane.half() * 8);
        issue_block<4>(scores, a, blocks[b], queries + b * QUERY_BLOCK_BYTES / 16, 2 * b);
    }
    issue_block<2>(scores, a, blocks[HALF_BLOCKS], query_descriptor(shared, LAST_BLOCK, 2 * lane.half()),
                   2 * HALF_BLOCKS);
}

// The quarters of a pair trade: each keeps its own tokens (the first +0 of every 16, the second +8).
DEVICE u32 score_address(u32 shared, int to, int c) {
    return shared + Shared::SCORE + to * Shared::SCORE_BYTES + (c * WARPGROUP + threadIdx.x % WARPGROUP) * 8;
}
DEVICE void send_scores(const float (&scores)[ROWS / 2], float (&mine)[GROUPS][2], u32 shared, const Lane& lane) {
    const u32 address = score_address(shared, lane.quarter ^ 1, 0);
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const float2 first = make_float2(scores[4 * c], scores[4 * c + 1]);
        const float2 second = make_float2(scores[4 * c + 2], scores[4 * c + 3]);
        store_shared(address + c * WARPGROUP * 8, lane.half() ? first : second);
        mine[c][0] = lane.half() ? second.x : first.x;
        mine[c][1] = lane.half() ? second.y : first.y;
    }
}
// In base 2, ready for the softmax.
DEVICE void receive_scores(float (&mine)[GROUPS][2], u32 shared, const Lane& lane) {
    const u32 address = score_address(shared, lane.quarter, 0);
    const u32 scales = shared + Shared::ROW_SCALE + lane.t * 8;
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
        const float2 other = load_shared_f32x2(address + c * WARPGROUP * 8);
        const float2 scale = load_shared_f32x2(scales + c * 32);
        mine[c][0] = (mine[c][0] + other.x) * scale.x;
        mine[c][1] = (mine[c][1] + other.y) * scale.y;
    }
}

}  // namespace streamla
