// Scores over fp8_ds_mla rows: S^T = the sum over groups of 128 latents of scale * (K * Q^T), plus rope.
//
// As in qk.cuh; but the latents of a group are summed apart, in accumulators of their own, and scaled in fp32.
// The rope is multiplied in bf16 as it is stored: of 32 values a thread's 16-byte read serves as the A fragments
// of two wgmmas. A half takes two groups and 32 values of the rope.
#pragma once

#include "qk.cuh"

namespace streamla {

constexpr int GROUP_LATENTS = LATENT / SCALE_GROUPS;
constexpr int SCALES_OFFSET = LATENT;  // bytes in a row
constexpr int ROPE_OFFSET = SCALES_OFFSET + 4 * SCALE_GROUPS;
constexpr int HALF_GROUPS = SCALE_GROUPS / TEAM_HALVES;
constexpr int GROUP_BLOCKS = HALF_BLOCKS / HALF_GROUPS;
constexpr int ROPE_BLOCKS = 2 / TEAM_HALVES;  // of 32 values
static_assert(GROUP_BLOCKS == 2, "128 latents are two blocks of 64");

// Of a fragment's two tokens, for the groups of a half.
struct FragmentScales {
    float token[HALF_GROUPS], other[HALF_GROUPS];

    DEVICE void load(u32 tokens, const Lane& lane) {
        const u32 address = tokens + SCALES_OFFSET + lane.half * HALF_GROUPS * 4;
        if constexpr (HALF_GROUPS == 2) {
            const float2 a = load_shared_f32x2(address), b = load_shared_f32x2(address + 8 * TOKEN_BYTES);
            token[0] = a.x, token[1] = a.y;
            other[0] = b.x, other[1] = b.y;
        } else {
            const float4 a = load_shared_f32x4(address), b = load_shared_f32x4(address + 8 * TOKEN_BYTES);
            token[0] = a.x, token[1] = a.y, token[2] = a.z, token[3] = a.w;
            other[0] = b.x, other[1] = b.y, other[2] = b.z, other[3] = b.w;
        }
    }
    // Of element i of the accumulators.
    DEVICE float of(int group, int i) const { return i % 4 < 2 ? token[group] : other[group]; }
};

// A half's part of a tile's scores. The first group is summed in `total`, which takes in the others (of which two
// are in flight at the most), each when it is complete.
struct GroupScores {
    float total[ROWS / 2], apart[HALF_GROUPS / 2][ROWS / 2];
    FragmentScales scales;

    // The caller waits, then adds the last group.
    DEVICE void issue(u32 stage, u32 shared, const Lane& lane) {
        const u32 tokens = stage + stage_offset(lane.fragment_token());
        const u32 keys = tokens + lane.half * HALF_GROUPS * GROUP_LATENTS + lane.t * 16;
        const u64 queries = query_descriptor(shared, lane.half * HALF_BLOCKS, 0);
        KeyBlock blocks[HALF_BLOCKS + ROPE_BLOCKS];
        KeyFragments a;
        blocks[0].load<4>(keys);
#pragma unroll
        for (int b = 0; b < HALF_BLOCKS; b++) {
            const int group = b / GROUP_BLOCKS;
            const u64 block_queries = queries + b * QUERY_BLOCK_BYTES / 16;
            if (b % GROUP_BLOCKS == 0 && group >= 2) {
                if (group == 2) scales.load(tokens, lane);
                wgmma_wait<1>();
                add(group - 2);
            }
            issue_latents(of(group), a, blocks[b], block_queries, 2 * b);
            if (b + 1 < HALF_BLOCKS) blocks[b + 1].load<4>(keys + (b + 1) * 64);
            if (b + 1 == HALF_BLOCKS) blocks[b + 1].load<4>(tokens + ROPE_OFFSET + lane.half * ROPE + lane.t * 16);
            issue_latents(of(group), a, blocks[b], block_queries, 2 * b + 1);
        }
        if (ROPE_BLOCKS == 2) blocks[HALF_BLOCKS + ROPE_BLOCKS - 1].load<4>(tokens + ROPE_OFFSET + ROPE + lane.t * 16);
        if (HALF_GROUPS == 2) scales.load(tokens, lane);
        wgmma_wait<1>();
        add(HALF_GROUPS - 2);
        issue_rope(blocks + HALF_BLOCKS, query_descriptor(shared, LAST_BLOCK, 2 * lane.half));
    }

    // Behind a wait for all.
    DEVICE void add_last() { add(HALF_GROUPS - 1); }

private:
    DEVICE float (&of(int group))[ROWS / 2] { return group ? apart[(group - 1) % 2] : total; }

    DEVICE void add(int group) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            const float product = scales.of(group, i) * of(group)[i];
            total[i] = group ? total[i] + product : product;
        }
    }

    // Two of the four wgmmas of a block: pair `pair` of all of the half's.
    DEVICE static void issue_latents(float (&scores)[ROWS / 2], KeyFragments& a, const KeyBlock& block,
                                     u64 queries, int pair) {
        u32(&pair_a)[2][4] = a[pair % KEY_PAIRS];
        const int word = pair % 2 * 2;
        if (pair >= KEY_PAIRS) wgmma_wait<KEY_PAIRS - 1>();
        block.widen(pair_a[0], word);
        block.widen(pair_a[1], word + 1);
        wgmma_fence();
        wgmma_f16<false>(scores, pair_a[0], queries + word * 2, pair % (2 * GROUP_BLOCKS) > 0);
        wgmma_f16<false>(scores, pair_a[1], queries + (word + 1) * 2, true);
        wgmma_commit();
    }

    DEVICE void issue_rope(const KeyBlock* blocks, u64 queries) {
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2 * ROPE_BLOCKS; s++) {
            const KeyBlock& block = blocks[s / 2];
            const int word = s % 2 * 2;
            const u32 a[4] = {block.token[word], block.other[word], block.token[word + 1], block.other[word + 1]};
            wgmma_bf16<false>(total, a, queries + 2 * s, true);
        }
        wgmma_commit();
    }
};

}  // namespace streamla
