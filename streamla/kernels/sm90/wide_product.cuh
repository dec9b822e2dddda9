// Wide attention: the two products of a tile. Both widen fp8 in registers, in the shadow of the wgmma before.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

// A commit group is four wgmma; their A fragments are written while the group before is in flight, and written
// again once the one after has been issued and this one is complete.
using Fragments = u32[2][4][4];

// scores^T of a tile: a group is a chunk of 64 dimensions.
DEVICE void score_tile(float (&s)[SCORES], Fragments& a, u32 tokens, u64 query) {
    uint4 raw[2][2];  // chunk parity, accumulator row
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
        raw[chunk][0] = load_shared_u32x4(tokens + chunk * 64);
        raw[chunk][1] = load_shared_u32x4(tokens + chunk * 64 + 4 * TOKEN_BYTES);
    }
#pragma unroll
    for (int chunk = 0; chunk < QUERY_CHUNKS; ++chunk) {
        u32(&now)[4][4] = a[chunk % 2];
        const uint4 low = raw[chunk % 2][0], high = raw[chunk % 2][1];
        const u32 words[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
        if (chunk > 1) wgmma_wait<1>();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            widen_e4m3(words[step][0], now[step][0], now[step][2]);
            widen_e4m3(words[step][1], now[step][1], now[step][3]);
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma_f16<false>(s, now[step], query + (chunk * QUERY_CHUNK + step * 32) / 16, chunk + step > 0);
        wgmma_commit();
        if (chunk + 2 < QUERY_CHUNKS) {
            raw[chunk % 2][0] = load_shared_u32x4(tokens + (chunk + 2) * 64);
            raw[chunk % 2][1] = load_shared_u32x4(tokens + (chunk + 2) * 64 + 4 * TOKEN_BYTES);
        }
    }
    wgmma_wait<0>();
}

// The tokens of one step of the values that a thread holds: eight latents of places {0, 1, 8, 9}.
struct Values {
    uint2 tokens[4];

    DEVICE void load(u32 values, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tokens[i] = load_shared_u32x2(values + (step * 8 + i * 2) * TOKEN_BYTES);
    }
    // A fragments of four blocks: two latents each, byte by byte from the tokens.
    DEVICE void widen(u32 (&a)[4][4]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // places {0, 1}, then {8, 9}
            const uint2 first = tokens[2 * half], second = tokens[2 * half + 1];
            widen_e4m3(__byte_perm(first.x, second.x, 0x5140), a[0][2 * half], a[0][2 * half + 1]);
            widen_e4m3(__byte_perm(first.x, second.x, 0x7362), a[1][2 * half], a[1][2 * half + 1]);
            widen_e4m3(__byte_perm(first.y, second.y, 0x5140), a[2][2 * half], a[2][2 * half + 1]);
            widen_e4m3(__byte_perm(first.y, second.y, 0x7362), a[3][2 * half], a[3][2 * half + 1]);
        }
    }
};

// out^T += V^T P^T over a tile: a group is a step of 16 tokens, for the warpgroup's 4 blocks of 64 latents. `held` is
// step 0. `between(g)` runs in the shadow of group g. All is complete on return.
constexpr int VALUE_GROUPS = TILE_N / 16;
template <typename Between>
DEVICE void value_tile(
    float (&out)[4][SCORES], Fragments& a, Values& held, u32 values, u64 probabilities, Between between) {
#pragma unroll
    for (int step = 0; step < VALUE_GROUPS; ++step) {
        u32(&now)[4][4] = a[step % 2];
        if (step > 1) wgmma_wait<1>();
        held.widen(now);
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < 4; ++block)
            wgmma_f16<true>(out[block], now[block], probabilities + step * 256 / 16, true);
        wgmma_commit();
        if (step + 1 < VALUE_GROUPS) held.load(values, step + 1);
        between(step);
    }
    wgmma_wait<0>();
}

}  // namespace streamla
