// Wide attention: the sizes, the shared memory, and which thread holds what.
//
// A tile is 64 tokens of one request; a row tile is up to COLUMNS query rows (heads x seqlen_q), which are the
// columns (N) of every product:
//     scores^T (64 tokens x COLUMNS)   = K (64 x 576)    Q^T      A = K in registers,   B = Q in shared memory
//     out^T    (512 latents x COLUMNS) = V^T (512 x 64)  P^T      A = V^T in registers, B = P in shared memory
#pragma once

#include "problem.cuh"

namespace streamla {

// Compile-time facts, set by wide.py.
constexpr int PAGE_SIZE = STREAMLA_PAGE_SIZE;
constexpr bool BULK_COPIES = STREAMLA_BULK_COPIES;  // every cache row begins at a multiple of 16 bytes

constexpr int TOKEN_BYTES = HEAD_DIM;
constexpr int COLUMNS = (ROWS + 15) / 16 * 16;                       // the last program of a request may have fewer rows
constexpr int BLOCKS = COLUMNS / 8;                                  // of 8 columns
constexpr int SCORES = COLUMNS / 2;                                  // accumulators of a 64 x COLUMNS product
static_assert(COLUMNS == 48 || COLUMNS == 64, "a row tile has 33 to 64 rows");

constexpr int GROUPS = 2;                                            // math warpgroups
constexpr int GROUP_WARPS = 4;
constexpr int MATH_WARPS = GROUPS * GROUP_WARPS;
constexpr int MATH_THREADS = GROUPS * WARPGROUP;
constexpr int LOAD_WARPS = 2;                                        // of the last warpgroup
constexpr int EMPTIER = MATH_THREADS + LOAD_WARPS * WARP;            // the warp that empties slots (exchange.cuh)
constexpr int THREADS = MATH_THREADS + WARPGROUP;
// A block owns what it was launched with, 168 registers a thread; asking for more in total would wait for ever.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int MATH_REGISTERS = 240;
constexpr int LOAD_REGISTERS = 24;
static_assert(GROUPS * MATH_REGISTERS + LOAD_REGISTERS <= (GROUPS + 1) * LAUNCH_REGISTERS, "the block's registers");

// The two halves of a tile lie 32 bytes apart: with the pitch of 576 bytes, a quarter warp's reads of
// K (two tokens, 64 bytes each) and a half warp's of V (four tokens, 32 bytes each) meet every bank once.
constexpr int HALF = TILE_N / 2;
constexpr int HALF_SKEW = 32;
constexpr int STAGE_BYTES = TILE_N * TOKEN_BYTES + HALF_SKEW;
constexpr int STAGES = 4;  // even, so that a stage always belongs to the same group

constexpr int QUERY_CHUNK = COLUMNS * 128;                           // 64 dimensions in fp16, 128-byte swizzle
constexpr int QUERY_CHUNKS = TOKEN_BYTES / 64;
constexpr int PROBABILITY_BYTES = BLOCKS * TILE_N * 16;                // [block][token][8 columns] fp16

struct Shared {
    static constexpr u32 QUERY = 0;
    static constexpr u32 STAGE = QUERY + QUERY_CHUNKS * QUERY_CHUNK;
    static constexpr u32 PROBABILITY = STAGE + STAGES * STAGE_BYTES;  // also scratch between products
    static constexpr u32 ROW_STATE = PROBABILITY + PROBABILITY_BYTES; // [column] score scale, reference
    static constexpr u32 FACTOR = ROW_STATE + COLUMNS * 8;            // [column] what the last raise multiplies by
    static constexpr u32 RAISED = FACTOR + COLUMNS * 4;               // whether this tile raised a reference
    static constexpr u32 FULL = RAISED + 8;                           // mbarriers
    static constexpr u32 EMPTY = FULL + STAGES * 8;
    static constexpr u32 PROBABILITY_FULL = EMPTY + STAGES * 8;
    static constexpr u32 PROBABILITY_EMPTY = PROBABILITY_FULL + 8;
    static constexpr u32 EMPTIED = PROBABILITY_EMPTY + 8;             // slots are EMPTY
    static constexpr u32 BYTES = EMPTIED + 8;
};
static_assert(Shared::STAGE % 128 == 0 && Shared::PROBABILITY % 128 == 0, "operands of wgmma");
static_assert(MATH_WARPS * COLUMNS * 4 <= PROBABILITY_BYTES, "the masses of all warps fit the scratch");
static_assert(Shared::BYTES == STREAMLA_SHARED_BYTES, "what the launcher reserves");

// The reference of a row that has seen nothing: finite, so that a masked score (-inf) less it stays -inf.
constexpr float LOWEST_REFERENCE = -3.0e38f;

// Of the merge: words that a lane takes of each of many partials, or of few; and how many of many a warp has in flight
// (132 on 8 warps).
constexpr int MANY_WORDS = 4, FEW_WORDS = 8, MERGE_DEPTH = 17;

// Named barriers; 0 is __syncthreads.
constexpr int BARRIER_GROUP = 1;  // and the one after it
constexpr int BARRIER_MATH = BARRIER_GROUP + GROUPS;

// Program p of the plan runs as ROW_TILES neighbouring blocks, which share its tokens. These are read anew where they
// are needed: registers are few.
DEVICE int this_program() { return forget(blockIdx.x) / ROW_TILES; }
DEVICE int this_first_row() { return forget(blockIdx.x) % ROW_TILES * ROWS; }

DEVICE u32 token_offset(int token) { return token * TOKEN_BYTES + token / HALF * HALF_SKEW; }

// Where a thread stands in its warpgroup. In the accumulators of a product, value 4 * block + e is
//     row    16 * warp + lane_row + e / 2 * 8
//     column 8 * block + 2 * lane_pair + e % 2
struct Lane {
    u32 group;
    int warp, lane_row, lane_pair;

    DEVICE explicit Lane(int thread)
        : group(thread / WARPGROUP), warp(thread / WARP % GROUP_WARPS), lane_row(thread % WARP / 4),
          lane_pair(thread % 4) {}

    // Scores: the token in accumulator row (lane_row, 0); row (lane_row, 1) is 4 tokens on. Warp w takes the
    // 16 tokens that are step w of the second product, four neighbours from each half.
    DEVICE int score_token() const { return lane_row / 4 * HALF + 8 * warp + lane_row % 4; }
    // Values: the tokens of places 2 * lane_pair + {0, 1, 8, 9} of a step are this one + {0, 2, 4, 6}; a step
    // is 8 on.
    DEVICE int value_token() const { return lane_pair / 2 * HALF + lane_pair % 2; }
    // Values: the first of eight neighbouring latents; block b of 64 rows holds latents 2 b and 2 b + 1.
    DEVICE int value_latent() const { return group * (LATENT / GROUPS) + (8 * warp + lane_row) * 8; }
};

}  // namespace streamla
