// Output over fp8_ds_mla rows: O^T += V^T * P^T, where P^T of each group of 128 latents has been multiplied by
// that group's scales.
//
// As in pv.cuh, but a thread reads 4 latents of each of a run's two groups: of the four 64-latent wgmmas two
// belong to either group. Tokens keep their order: a warp reads 32 bytes of four rows of 656 bytes, each 2 tokens
// apart, without a bank conflict.
#pragma once

#include "ds_mla_qk.cuh"
#include "pv.cuh"

namespace streamla {

constexpr int RUN_GROUPS = RUN_LATENTS / GROUP_LATENTS;
constexpr int GROUP_M_TILES = M_TILES / RUN_GROUPS;
constexpr int GROUP_THREAD_LATENTS = 2 * GROUP_M_TILES;  // contiguous
static_assert(RUN_GROUPS == 2, "a thread's latents of a run are a word of each of two groups");

// Of the thread's latents of group `group` of a run.
DEVICE int first_group_latent(const Lane& lane, int run, int group) {
    return ((lane.half + run) * RUN_GROUPS + group) * GROUP_LATENTS +
           (8 * lane.warp + lane.g) * GROUP_THREAD_LATENTS;
}
// A thread's four tokens in step s are those of a fragment's elements.
DEVICE int value_token(const Lane& lane, int step, int i) { return 16 * step + 2 * lane.t + i % 2 + i / 2 * 8; }

DEVICE u32 group_value_offset(const Lane& lane) {
    return stage_offset(value_token(lane, 0, 0)) + first_group_latent(lane, 0, 0);
}

// P^T of a team is [scale group][group][token][row % 8], fp16.
constexpr u32 SCALED_PROBABILITY_BYTES = Shared::PROBABILITY_BYTES / SCALE_GROUPS;

// Values of one unit as they lie in the stage. Masked: tokens from `valid` on were not loaded, and whatever lies
// there must not meet a probability of 0.
DEVICE void load_group_values(RawValues& raw, u32 values, int unit, bool masked, int valid, const Lane& lane) {
    const int step = unit / RUNS, run = unit % RUNS;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 address = values + (16 * step + i % 2 + i / 2 * 8) * TOKEN_BYTES + run * RUN_LATENTS;
        raw.token[i] = make_uint2(load_shared_u32(address), load_shared_u32(address + GROUP_LATENTS));
    }
    if (!masked) return;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (value_token(lane, step, i) >= valid) raw.token[i] = make_uint2(0, 0);
}

DEVICE void issue_group_output(Accumulator& acc, const Values& values, u64 probabilities, int unit,
                               const Lane& lane) {
    const int step = unit / RUNS, run = unit % RUNS;
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < M_TILES; j++) {
        const int group = (lane.half + run) * RUN_GROUPS + j / GROUP_M_TILES;
        wgmma_f16<true>(acc[run * M_TILES + j], values.a[j],
                        probabilities + group * SCALED_PROBABILITY_BYTES / 16 + step * 16, true);
    }
    wgmma_commit();
}

}  // namespace streamla
