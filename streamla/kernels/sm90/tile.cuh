// What a program is made of: its tile, its threads, its shared memory.
//
// A program is one block on one SM. It walks its items tile by tile (64 tokens a tile). Two *teams* of math
// warps take the tiles in turn and meet at the end of an item only. A team is one warpgroup or, as long as
// the registers allow, two: its *halves*, which share the head dimension of Q K^T, the tokens of the
// softmax and the latents of P V. One more warpgroup loads, empties slots and writes new rows.
#pragma once

#include "problem.cuh"

// Defined as 1 if the query is not rotated yet, and new rows are not in the cache yet (step.cuh).
#ifndef STREAMLA_STEP
#define STREAMLA_STEP 0
#endif

namespace streamla {

// Compile-time facts, set by narrow.py and ds_mla.py.
constexpr int PAGE_SIZE = STREAMLA_PAGE_SIZE;
constexpr int RUN = STREAMLA_RUN;  // tokens of one bulk copy: contiguous in a page, divides 32
constexpr bool STEP = STREAMLA_STEP;

constexpr int SCALE_GROUPS = 4;  // of latents, each with a scale of its own
constexpr int TOKEN_BYTES = GROUP_SCALES ? LATENT + 4 * SCALE_GROUPS + 2 * ROPE : HEAD_DIM;
constexpr int STAGES = ROWS <= 16 && !GROUP_SCALES ? 5 : 4;

constexpr int TEAMS = 2;
constexpr int TEAM_HALVES = ROWS <= 16 ? 2 : 1;
constexpr int TEAM_WARPS = 4 * TEAM_HALVES;
constexpr int TEAM_THREADS = TEAM_WARPS * WARP;
constexpr int MATH_WARPS = TEAMS * TEAM_WARPS;
constexpr int MATH_THREADS = MATH_WARPS * WARP;
constexpr int THREADS = MATH_THREADS + WARPGROUP;
// Of the last warpgroup's warps the first loads, the second empties slots and, if STEP, the others write new rows.
constexpr int LOADER = MATH_THREADS, EMPTIER = LOADER + WARP, FIRST_WRITER = EMPTIER + WARP;
constexpr int WRITERS = 2;
// 4 * 112 + 32 = 5 * 96 and 2 * 232 + 40 = 3 * 168: what the threads hold at launch.
constexpr int MATH_REGISTERS = TEAM_HALVES == 2 ? 112 : 232;
constexpr int LOAD_REGISTERS = TEAM_HALVES == 2 ? 32 : 40;

// A column group is 8 rows of N: a thread of a wgmma accumulator holds 2 of them.
constexpr int GROUPS = ROWS / 8;
constexpr int THREAD_ROWS = 2 * GROUPS;

// Of the merge: words that a lane takes of each of many partials, or of few; and how many of many a warp has in flight
// (132 on 16 warps; on 8 they take two rounds).
constexpr int MANY_WORDS = 1, FEW_WORDS = 4, MERGE_DEPTH = 9;

// Named barriers.
constexpr int BARRIER_MATH = 1;
constexpr int BARRIER_READY = 2;  // mbarriers are initialised
constexpr int BARRIER_EMPTIER_READY = 5, BARRIER_WRITERS_READY = 6;
constexpr int BARRIER_TEAM = 3;  // and the one after it

// Tokens 32 to 63 of a stage lie 32 bytes further than they would: then 16-byte reads of keys and
// 8-byte reads of values meet no bank conflict in rows of plain 576 bytes. Rows of 656 need no gap.
constexpr int HALF_TOKENS = 32;
constexpr int HALF_GAP = GROUP_SCALES ? 0 : 32;
constexpr int STAGE_BYTES = (TILE_N * TOKEN_BYTES + HALF_GAP + 127) / 128 * 128;

DEVICE constexpr u32 stage_offset(int token) {
    return token * TOKEN_BYTES + (token / HALF_TOKENS) * HALF_GAP;
}

constexpr int QUERY_BLOCK_BYTES = ROWS * 128;  // 64 dimensions of all rows in fp16, 128-byte swizzle

// Two halves meet in a barrier between a tile's last read of P^T and the next tile's first write. One
// warpgroup does not: it writes to the other buffer, or meets there if P^T of four groups leaves no room for two.
constexpr int PROBABILITY_BUFFERS = GROUP_SCALES ? 1 : 2 / TEAM_HALVES;

// Byte offsets in dynamic shared memory, from a multiple of 1024.
struct Shared {
    static constexpr u32 STAGE = 0;
    static constexpr u32 QUERY = (STAGES * STAGE_BYTES + 1023) / 1024 * 1024;      // 9 blocks
    static constexpr u32 PROBABILITY = QUERY + HEAD_DIM / 64 * QUERY_BLOCK_BYTES;  // [team][buffer], fp16
    static constexpr u32 PROBABILITY_BYTES = TILE_N * ROWS * 2 * (GROUP_SCALES ? SCALE_GROUPS : 1);
    static constexpr u32 SCORE =
        PROBABILITY + TEAMS * PROBABILITY_BUFFERS * PROBABILITY_BYTES;  // [team][to half], fp32
    static constexpr u32 SCORE_BYTES = TEAM_HALVES == 2 ? TILE_N / 2 * ROWS * 4 : 0;
    static constexpr u32 MAX = SCORE + TEAMS * 2 * SCORE_BYTES;    // [team][warp][row]
    static constexpr u32 SUM = MAX + MATH_WARPS * ROWS * 4;        // [team][warp][row]
    static constexpr u32 TEAM_MAX = SUM + MATH_WARPS * ROWS * 4;   // [team][row]
    static constexpr u32 TEAM_SUM = TEAM_MAX + TEAMS * ROWS * 4;   // [team][row]
    static constexpr u32 ROW_SCALE = TEAM_SUM + TEAMS * ROWS * 4;  // [team][row], the same for both
    static constexpr u32 SCALE_MAX = ROW_SCALE + TEAMS * ROWS * 4;  // [team][warp], of the group scales
    static constexpr u32 SCALE_LIMIT = SCALE_MAX + (GROUP_SCALES ? MATH_WARPS * 4 : 0);  // [team]
    // [round % 2][stage] mbarrier
    static constexpr u32 FULL = SCALE_LIMIT + (GROUP_SCALES ? TEAMS * 4 : 0);
    static constexpr u32 EMPTY = FULL + 2 * STAGES * 8;            // [stage] mbarrier
    static constexpr u32 EMPTIED = EMPTY + STAGES * 8;             // mbarrier: slots are EMPTY
    static constexpr u32 TURN = EMPTIED + 8;                       // [stage] mbarrier, if STEP
    static constexpr u32 BYTES = TURN + (STEP ? STAGES * 8 : 0) + 1024;  // 1024: to align the base
};
static_assert(Shared::BYTES == STREAMLA_SHARED_BYTES, "what the launcher reserves");
static_assert(Shared::BYTES <= 227 * 1024, "shared memory of one SM");
static_assert(Shared::FULL % 8 == 0, "mbarriers are 8-byte aligned");

// Where a math thread stands. g and t are its place in wgmma fragments.
struct Lane {
    int team;
    int half;  // of the team
    int warp;  // 0 to 3 in the half
    int g;     // lane / 4
    int t;     // lane % 4

    DEVICE static Lane here() { return of(threadIdx.x); }
    DEVICE static Lane of(int thread) {
        const int warp = uniform(thread / WARP), lane = thread % WARP;
        return {warp / TEAM_WARPS, warp % TEAM_WARPS / 4, warp % 4, lane / 4, lane % 4};
    }
    // The same, computed at this point and not kept in registers from long before.
    DEVICE Lane again() const {
        const int thread = forget(static_cast<int>(threadIdx.x));
        return {team, half, warp, thread % WARP / 4, thread % 4};
    }
    DEVICE int team_warp() const { return half * 4 + warp; }
    DEVICE int team_thread() const { return team_warp() * WARP + g * 4 + t; }
    DEVICE bool leads_warp() const { return g == 0 && t == 0; }
    // A thread brings to an end the scores of rows 8 * c + 2 * t + k of each group c ...
    DEVICE int row(int c, int k) const { return 8 * c + 2 * t + k; }
    // ... and of two tokens, 8 apart, or the one of them that its half takes.
    DEVICE int token(int x) const { return fragment_token() + 8 * (TEAM_HALVES == 2 ? half : x); }
    // The first token whose keys this thread reads. Rows of 656 bytes begin 4 banks apart: lanes that read
    // 64 bytes each of two rows at once meet no bank conflict if these are 4 rows apart.
    DEVICE int fragment_token() const { return 16 * warp + (GROUP_SCALES ? g % 2 * 4 + g / 2 : g); }
};
constexpr int THREAD_TOKENS = 2 / TEAM_HALVES;

// Where an item ends, and how far the first query of its request sees.
struct Range {
    int end, first_visible_end;

    DEVICE static Range of(const Item& item, bool causal) {
        return {item.end, causal ? item.seqlen - SEQLEN_Q + 1 : item.seqlen};
    }
    // First token that a row does not see.
    DEVICE int visible_end(int row) const {
        if (SEQLEN_Q == 1) return end;
        return min(end, first_visible_end + row / NUM_HEADS);
    }
};

}  // namespace streamla
