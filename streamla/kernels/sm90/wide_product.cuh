// Wide attention: the two products of a tile. Both widen fp8 in registers, in the shadow of the wgmma before.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

// scores^T of a tile: 36 steps of 16 dimensions, two a commit group, one group in flight. Left in flight.
DEVICE void score_tile(float (&s)[SCORES], u32 tokens, u64 query) {
    uint4 raw[2][2];  // chunk parity, accumulator row
    u32 a[2][2][4];
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
        raw[chunk][0] = load_shared_u32x4(tokens + chunk * 64);
        raw[chunk][1] = load_shared_u32x4(tokens + chunk * 64 + 4 * ROW_BYTES);
    }
#pragma unroll
    for (int chunk = 0; chunk < QUERY_CHUNKS; ++chunk) {
        const uint4 low = raw[chunk % 2][0], high = raw[chunk % 2][1];
        const u32 words[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            if (chunk > 0) wgmma_wait<1>();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                widen_e4m3(words[2 * pair + i][0], a[pair][i][0], a[pair][i][2]);
                widen_e4m3(words[2 * pair + i][1], a[pair][i][1], a[pair][i][3]);
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2; ++i)
                wgmma_f16<false>(s, a[pair][i], query + (chunk * QUERY_CHUNK + (2 * pair + i) * 32) / 16,
                                 chunk + pair + i > 0);
            wgmma_commit();
        }
        if (chunk + 2 < QUERY_CHUNKS) {
            raw[chunk % 2][0] = load_shared_u32x4(tokens + (chunk + 2) * 64);
            raw[chunk % 2][1] = load_shared_u32x4(tokens + (chunk + 2) * 64 + 4 * ROW_BYTES);
        }
    }
}

// A fragments of two blocks (four latents): the tokens of places {0, 1, 8, 9}, four latents each, byte by byte.
DEVICE void value_fragments(const u32 (&tokens)[4], u32 (&a)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // places {0, 1}, then {8, 9}
        const u32 first = tokens[2 * half], second = tokens[2 * half + 1];
        widen_e4m3(__byte_perm(first, second, 0x5140), a[0][2 * half], a[0][2 * half + 1]);
        widen_e4m3(__byte_perm(first, second, 0x7362), a[1][2 * half], a[1][2 * half + 1]);
    }
}

// out^T += V^T P^T over a tile: 4 steps of 16 tokens, each for the group's 4 blocks of 64 latents; two blocks a
// commit group, one group in flight. Complete on return, and with it everything in flight before.
DEVICE void value_tile(float (&out)[4][SCORES], u32 values, u64 probabilities) {
    uint2 raw[2][4];    // step parity, token
    u32 a[2][2][4];     // pair of blocks, block, register
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[0][i] = load_shared_u32x2(values + i * 2 * ROW_BYTES);
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step) {
        const uint2(&now)[4] = raw[step % 2];
        if (step + 1 < TILE / 16) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                raw[(step + 1) % 2][i] = load_shared_u32x2(values + ((step + 1) * 8 + i * 2) * ROW_BYTES);
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            if (step > 0) wgmma_wait<1>();
            if (pair == 0)
                value_fragments({now[0].x, now[1].x, now[2].x, now[3].x}, a[pair]);
            else
                value_fragments({now[0].y, now[1].y, now[2].y, now[3].y}, a[pair]);
            wgmma_fence();
#pragma unroll
            for (int block = 0; block < 2; ++block)
                wgmma_f16<true>(out[2 * pair + block], a[pair][block], probabilities + step * 256 / 16, true);
            wgmma_commit();
        }
    }
    wgmma_wait<0>();
}

}  // namespace streamla
