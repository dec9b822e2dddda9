// Wide attention: scores to probabilities.
//
// A row's probabilities are 2^(score - reference), in base 2, with one reference for all threads. It is set
// HEADROOM below the row's highest score so far and moves only when a score exceeds it by LIMIT: fp16 holds
// 2^LIMIT, and probabilities down to 2^-14 of the largest keep all their bits. Both groups accumulate under the same
// reference: whoever raises it leaves the factor beside the tile's probabilities, and each group applies it
// before it adds that tile.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

constexpr float HEADROOM = 6.f;
constexpr float LIMIT = 14.f;

// How many tokens each query of a row tile sees.
struct Causal {
    int seqlen, first_row;
    bool causal;

    DEVICE int limit(int column) const {
        return causal && SEQLEN_Q > 1 ? seqlen - SEQLEN_Q + 1 + (first_row + column) / NUM_HEADS : seqlen;
    }
};

// NaN bytes to zero; every query that sees the token has NaN for its probability anyway.
DEVICE u32 without_nan(u32 quad) {
    // A byte is NaN if its low seven bits are ones: only then the sum carries into its sign.
    const u32 signs = ((quad & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    return quad & ~(signs | (signs - (signs >> 7)));
}

// The tile at `token` holds tokens that some query must not see, or ends past the request. Hides them from the
// scores and, since 0 * NaN is NaN, from the values: what lies past the request becomes zero, and so do
// NaN bytes of tokens that only some queries see.
DEVICE void hide_tokens(float (&s)[SCORES], u32 stage, int token, const Causal& causal, const Lane& lane) {
    const int low = lane.score_token(), high = low + 4;
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
        const int limit = causal.limit(8 * (i / 4) + 2 * lane.lane_pair + i % 2) - token;
        if ((i & 2 ? high : low) >= limit) s[i] = NEG_INF;
    }
    named_barrier(BARRIER_GROUP + lane.group, WARPGROUP);  // the group has read K
    const int begin = max(0, causal.limit(0) - token), end = causal.seqlen - token;
    constexpr int VECTORS = LATENT / 16;
    for (int i = begin * VECTORS + threadIdx.x % WARPGROUP; i < TILE_N * VECTORS; i += WARPGROUP) {
        const int row = i / VECTORS;
        const u32 address = stage + token_offset(row) + i % VECTORS * 16;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < end) {
            v = load_shared_u32x4(address);
            v = make_uint4(without_nan(v.x), without_nan(v.y), without_nan(v.z), without_nan(v.w));
        }
        store_shared(address, v);
    }
    fence_async_proxy();  // the next load of this stage comes after these stores
}

// Score scales and references of columns 8 block + 2 lane_pair and the next: {scale, reference} twice.
DEVICE float4 row_state(u32 shared, int block, const Lane& lane) {
    return load_shared_f32x4(shared + Shared::ROW_STATE + (8 * block + 2 * lane.lane_pair) * 8);
}

// Some score of the tile exceeds its reference by LIMIT: raise the references of such rows.
DEVICE void raise_references(const float (&s)[SCORES], float (&mass)[COLUMNS / 4], u32 shared, const Lane& lane) {
    const u32 scratch = shared + Shared::PROBABILITY;  // [warp][column], the highest score
    float highest[COLUMNS / 4];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        const float4 state = row_state(shared, block, lane);
        highest[2 * block] = fmaxf(s[4 * block], s[4 * block + 2]) * state.x;
        highest[2 * block + 1] = fmaxf(s[4 * block + 1], s[4 * block + 3]) * state.z;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) {
#pragma unroll
        for (int step = 4; step <= 16; step *= 2)
            highest[i] = fmaxf(highest[i], __shfl_xor_sync(FULL_WARP, highest[i], step));
        const int column = 8 * (i / 2) + 2 * lane.lane_pair + i % 2;
        if (lane.lane_row == 0) store_shared(scratch + (lane.warp * COLUMNS + column) * 4, highest[i]);
    }
    named_barrier(BARRIER_GROUP + lane.group, WARPGROUP);
    const int column = threadIdx.x % WARPGROUP;
    if (column < COLUMNS) {
        float top = NEG_INF;
#pragma unroll
        for (int warp = 0; warp < GROUP_WARPS; ++warp)
            top = fmaxf(top, load_shared_f32(scratch + (warp * COLUMNS + column) * 4));
        const u32 reference = shared + Shared::ROW_STATE + column * 8 + 4;
        const float before = load_shared_f32(reference);
        const bool raise = top - before > LIMIT;
        const float after = raise ? top - HEADROOM : before;
        store_shared(reference, after);
        store_shared(shared + Shared::FACTOR + column * 4, raise ? exp2_approx(before - after) : 1.f);
    }
    named_barrier(BARRIER_GROUP + lane.group, WARPGROUP);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        const float2 factor = load_shared_f32x2(shared + Shared::FACTOR + (8 * block + 2 * lane.lane_pair) * 4);
        mass[2 * block] *= factor.x;
        mass[2 * block + 1] *= factor.y;
    }
}

// Whether any score of the group's tile exceeds its reference by more than fp16 can bear. `excess`: the most that this
// thread has met.
DEVICE bool must_raise(float excess, const Lane& lane) {
    return named_barrier_any(BARRIER_GROUP + lane.group, WARPGROUP, excess > LIMIT);
}

// Scores less their references to `excess`; a NaN exceeds nothing.
DEVICE void measure(const float (&s)[SCORES], float& excess, u32 shared, const Lane& lane) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        const float4 state = row_state(shared, block, lane);
#pragma unroll
        for (int i = 4 * block; i < 4 * block + 4; i += 2) {
            excess = fmaxf(excess, fmaf(s[i], state.x, -state.y));
            excess = fmaxf(excess, fmaf(s[i + 1], state.z, -state.w));
        }
    }
}

// Scores of some blocks to probabilities, in place. They are of use if `excess` turns out to be bearable.
DEVICE void exponentiate(
    float (&s)[SCORES], float& excess, int first_block, int last_block, u32 shared, const Lane& lane) {
#pragma unroll
    for (int block = first_block; block < last_block; ++block) {
        const float4 state = row_state(shared, block, lane);
#pragma unroll
        for (int i = 4 * block; i < 4 * block + 4; i += 2) {
            const float low = fmaf(s[i], state.x, -state.y), high = fmaf(s[i + 1], state.z, -state.w);
            excess = fmaxf(excess, fmaxf(low, high));
            s[i] = exp2_in_shadow(low);
            s[i + 1] = exp2_in_shadow(high);
        }
    }
}

// Both groups have used the probabilities of the tile before, and its factors. Tiles are counted over the program.
DEVICE void wait_for_room(u32 tile, u32 shared) {
    mbarrier_wait(shared + Shared::PROBABILITY_EMPTY, (tile & 1) ^ 1);
}

// Probabilities to shared memory, and their sums to `mass`: of what fp16 holds of them, so that who sees one key returns it to
// the last bit, though the reference is rounded and the probability is not quite 2^HEADROOM. The four matrices of a stmatrix are
// the accumulator rows (lane_row, 0) and (lane_row, 1) of one block, then of the next.
DEVICE void publish(
    const float (&p)[SCORES], float (&mass)[COLUMNS / 4], bool raised, u32 shared, const Lane& lane) {
    if (threadIdx.x % WARPGROUP == 0) store_shared(shared + Shared::RAISED, static_cast<u32>(raised));
    const int l = threadIdx.x % WARP;
    const int place = 16 * lane.warp + l / 8 % 2 * 8 + l % 8 / 4 * 4 + l % 2 * 2 + l / 2 % 2;
    const u32 address = shared + Shared::PROBABILITY + l / 16 * (TILE_N * 16) + place * 16;
    u32 pairs[SCORES / 2];
#pragma unroll
    for (int i = 0; i < SCORES; i += 2) pairs[i / 2] = pack_half2(p[i], p[i + 1]);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i += 4)
        store_matrix_x4(address + i / 2 * (TILE_N * 16), pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]);
    fence_async_proxy();
    __syncwarp();
    if (l < ARRIVING_LANES) mbarrier_arrive(shared + Shared::PROBABILITY_FULL);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        const float2 low = unpack_half2(pairs[2 * block]), high = unpack_half2(pairs[2 * block + 1]);
        mass[2 * block] += low.x + high.x;
        mass[2 * block + 1] += low.y + high.y;
    }
}

// Apply the factors of a tile that raised references. The owner's mass has them already.
DEVICE void rescale(float (&out)[4][SCORES], float (&mass)[COLUMNS / 4], bool owner, u32 shared, const Lane& lane) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        const float2 factor = load_shared_f32x2(shared + Shared::FACTOR + (8 * block + 2 * lane.lane_pair) * 4);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            out[m][4 * block] *= factor.x;
            out[m][4 * block + 1] *= factor.y;
            out[m][4 * block + 2] *= factor.x;
            out[m][4 * block + 3] *= factor.y;
        }
        if (!owner) {
            mass[2 * block] *= factor.x;
            mass[2 * block + 1] *= factor.y;
        }
    }
}

}  // namespace streamla
