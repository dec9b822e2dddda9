// Scores over fp8_ds_mla rows: S^T = the sum over groups of 128 latents of scale * (K * Q^T), plus rope.
//
// As in qk.cuh; but the latents of a group are summed apart, in accumulators of their own, and scaled in fp32.
// A half takes two groups, and half of the rope, which is multiplied in bf16 as it is stored: 32 values, of
// which a thread's 16-byte read serves as the A fragments of two wgmmas.
#pragma once

#include "bf16_ptx.cuh"
#include "qk.cuh"

namespace streamla {

constexpr int GROUP_LATENTS = LATENT / SCALE_GROUPS;
constexpr int SCALES_OFFSET = LATENT;  // bytes in a row
constexpr int ROPE_OFFSET = SCALES_OFFSET + 4 * SCALE_GROUPS;
constexpr int HALF_GROUPS = SCALE_GROUPS / TEAM_HALVES;
static_assert(TEAM_HALVES == 2 && HALF_GROUPS == 2, "a half holds accumulators of two groups");

// A half's part of a tile's scores, in flight: of its first group and of the rope, and of its second group.
// `scales` are those of the second group, of the fragment's two tokens.
struct GroupScores {
    float first[ROWS / 2], second[ROWS / 2];
    float scales[2];

    DEVICE static void scale(float (&scores)[ROWS / 2], float token, float other) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) scores[i] *= i % 4 < 2 ? token : other;
    }

    // The caller waits, then sums.
    DEVICE void issue(u32 stage, u32 shared, const Lane& lane) {
        const u32 tokens = stage + stage_offset(lane.fragment_token());
        const u32 keys = tokens + lane.half * HALF_GROUPS * GROUP_LATENTS + lane.t * 16;
        const u64 queries = query_descriptor(shared, lane.half * HALF_BLOCKS, 0);
        KeyBlock blocks[HALF_BLOCKS + 1];
        KeyFragments a;
        blocks[0].load<4>(keys);
#pragma unroll
        for (int b = 0; b < HALF_BLOCKS; b++) {
            const u64 block_queries = queries + b * QUERY_BLOCK_BYTES / 16;
            issue_latents(b < 2 ? first : second, a, blocks[b], block_queries, 2 * b);
            if (b + 1 < HALF_BLOCKS) blocks[b + 1].load<4>(keys + (b + 1) * 64);
            if (b + 1 == HALF_BLOCKS)
                blocks[b + 1].load<4>(tokens + ROPE_OFFSET + lane.half * ROPE + lane.t * 16);
            issue_latents(b < 2 ? first : second, a, blocks[b], block_queries, 2 * b + 1);
        }
        const u32 scale_address = tokens + SCALES_OFFSET + lane.half * HALF_GROUPS * 4;
        const float2 token = load_shared_f32x2(scale_address);
        const float2 other = load_shared_f32x2(scale_address + 8 * TOKEN_BYTES);
        scales[0] = token.y, scales[1] = other.y;
        wgmma_wait<1>();
        scale(first, token.x, other.x);
        issue_rope(blocks[HALF_BLOCKS], query_descriptor(shared, LAST_BLOCK, 2 * lane.half));
    }

    // Behind a wait for all.
    DEVICE void sum() {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) first[i] += scales[i % 4 / 2] * second[i];
    }

private:
    // Two of the four wgmmas of a block: pair `pair` of all of the half's.
    DEVICE static void issue_latents(float (&scores)[ROWS / 2], KeyFragments& a, const KeyBlock& block,
                                     u64 queries, int pair) {
        u32(&pair_a)[2][4] = a[pair % KEY_PAIRS];
        const int word = pair % 2 * 2;
        if (pair >= KEY_PAIRS) wgmma_wait<KEY_PAIRS - 1>();
        block.widen(pair_a[0], word);
        block.widen(pair_a[1], word + 1);
        wgmma_fence();
        wgmma_f16<false>(scores, pair_a[0], queries + word * 2, pair % 4 > 0);
        wgmma_f16<false>(scores, pair_a[1], queries + (word + 1) * 2, true);
        wgmma_commit();
    }

    DEVICE void issue_rope(const KeyBlock& block, u64 queries) {
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const u32 a[4] = {block.token[2 * s], block.other[2 * s], block.token[2 * s + 1],
                              block.other[2 * s + 1]};
            wgmma_bf16<false>(first, a, queries + 2 * s, true);
        }
        wgmma_commit();
    }
};

}  // namespace streamla
