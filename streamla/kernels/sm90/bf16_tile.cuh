// What a program of the bf16 kernel is made of: its tile, its threads, its shared memory.
//
// A program is one block on one SM. It walks its items in tiles of 64 tokens. Two warpgroups of math, the
// *halves*, work on a tile together: in Q K^T each takes half of the head dimension, in the softmax half of the
// tokens, in P V half of the latents. One more warp loads.
//
// Stored bf16 is what the tensor cores take: no value is converted, and a key or value goes from shared memory
// to a wgmma's registers by one ldmatrix.
#pragma once

#include "bf16_ptx.cuh"

namespace streamla {

// Compile-time facts, set by bf16.py.
constexpr int NUM_HEADS = STREAMLA_NUM_HEADS;
constexpr int SEQLEN_Q = STREAMLA_SEQLEN_Q;
constexpr int PAGE_SIZE = STREAMLA_PAGE_SIZE;
constexpr int RUN = STREAMLA_RUN;  // tokens of one bulk copy: contiguous in a page, divides 8

constexpr int TOTAL_ROWS = NUM_HEADS * SEQLEN_Q;  // row r is query r / NUM_HEADS, head r % NUM_HEADS
constexpr int GROUPS = (TOTAL_ROWS + 7) / 8;      // of 8 rows
constexpr int ROWS = 8 * GROUPS;                  // N of every wgmma
static_assert(ROWS <= 32, "accumulators of more rows do not fit into the registers");

constexpr int LATENT = 512;
constexpr int ROPE = 64;
constexpr int HEAD_DIM = LATENT + ROPE;
constexpr int TOKEN_BYTES = 2 * HEAD_DIM;
constexpr int TILE_N = 64;
constexpr int STAGE_N = 32;  // tokens of a stage; a tile takes two, or one if it has no more tokens
constexpr int STAGES = ROWS <= 24 ? 5 : 4;

constexpr int HALVES = 2;
constexpr int MATH_THREADS = HALVES * WARPGROUP;
constexpr int MATH_WARPS = MATH_THREADS / WARP;
constexpr int THREADS = MATH_THREADS + WARPGROUP;  // one warp of the last warpgroup loads
constexpr int MATH_REGISTERS = 224;                // 256 * 224 + 128 * 56 = 384 * 168, the pool at launch
constexpr int LOAD_REGISTERS = 56;

// Named barriers.
constexpr int BARRIER_MATH = 1;
constexpr int BARRIER_READY = 2;  // mbarriers are initialised

// Rows of 1152 bytes all start in the same bank. A tile is 4 bands of 16 tokens, and band b starts 32 * b bytes
// further (a bulk copy to an odd multiple of 16 bytes is slower). The 8 rows of an ldmatrix are two tokens of each
// band; of such a pair the second reads the other 16 bytes of a 32-byte chunk: so no two meet in a bank.
constexpr int BAND = 16;
constexpr int BAND_GAP = 32;
constexpr int STAGE_BYTES = (STAGE_N * TOKEN_BYTES + (TILE_N / BAND - 1) * BAND_GAP + 127) / 128 * 128;

// Where a token of a tile lies in its stage: tokens from STAGE_N on are in the tile's second.
DEVICE constexpr u32 token_offset(int token) {
    return token % STAGE_N * TOKEN_BYTES + token / BAND * BAND_GAP;
}
// The order of a tile's tokens in fragments: place p, row p % 8 of an 8 x 8 matrix, is token p / 8 of the p % 8-th
// eight.
DEVICE constexpr int token_of_place(int place) { return place % 8 * 8 + place / 8; }

constexpr int QUERY_BLOCK_BYTES = ROWS * 128;  // 64 dimensions of all rows, 128-byte swizzle

// Byte offsets in dynamic shared memory, from a multiple of 1024.
struct Shared {
    static constexpr u32 QUERY = 0;  // 9 blocks
    static constexpr u32 STAGE = QUERY + HEAD_DIM / 64 * QUERY_BLOCK_BYTES;
    static constexpr u32 PROBABILITY = STAGE + STAGES * STAGE_BYTES;  // P^T: upper parts, then lower parts
    static constexpr u32 PROBABILITY_BYTES = TILE_N * ROWS * 2;       // of one part
    static constexpr u32 SCORE = PROBABILITY + 2 * PROBABILITY_BYTES;  // [to half], fp32
    static constexpr u32 SCORE_BYTES = TILE_N / 2 * ROWS * 4;
    static constexpr u32 MAX = SCORE + HALVES * SCORE_BYTES;    // [row][warp]
    static constexpr u32 SUM = MAX + ROWS * MATH_WARPS * 4;     // [row][warp]
    static constexpr u32 FULL = SUM + ROWS * MATH_WARPS * 4;    // [stage] mbarrier
    static constexpr u32 EMPTY = FULL + STAGES * 8;             // [stage] mbarrier
    static constexpr u32 BYTES = EMPTY + STAGES * 8 + 1024;     // 1024: to align the base
};
static_assert(Shared::BYTES <= 227 * 1024, "shared memory of one SM");
static_assert(Shared::BYTES == STREAMLA_SHARED_BYTES, "bf16.py counts the same");

// Where a math thread stands. g and t are its place in fragments.
struct Lane {
    int half;  // 0 or 1
    int warp;  // 0 to 3 in the half
    int lane, g, t;

    DEVICE static Lane here() {
        const int warp = uniform(static_cast<int>(threadIdx.x) / WARP), lane = threadIdx.x % WARP;
        return {warp / 4, warp % 4, lane, lane / 4, lane % 4};
    }
    DEVICE int math_warp() const { return half * 4 + warp; }
    // The scores that this thread brings to an end: of one token, and of rows 8 * c + 2 * t and + 1 of each
    // group c.
    DEVICE int place() const { return 16 * warp + g + 8 * half; }
    DEVICE int token() const { return token_of_place(place()); }
    DEVICE int row(int c, int k) const { return 8 * c + 2 * t + k; }
};

// One row of plan.work.
struct Item {
    int request, begin, end, seqlen, slot, split_begin, split_end;

    DEVICE static Item load(const int* work, int index) {
        const int4* row = reinterpret_cast<const int4*>(work) + 2 * static_cast<i64>(index);
        const int4 a = __ldg(row), b = __ldg(row + 1);
        return {a.x, a.y, a.z, a.w, b.x, b.y, b.z};
    }
    DEVICE int num_splits() const { return split_end - split_begin; }
};

// A (batch, seqlen_q, num_heads, x) tensor: strides in elements, x contiguous.
struct Strides {
    i64 batch, query, head;

    DEVICE i64 at(int request, int row) const {
        return request * batch + row / NUM_HEADS * query + row % NUM_HEADS * head;
    }
};

}  // namespace streamla
