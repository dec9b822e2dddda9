// What a program is made of: its step, its threads, its shared memory.
//
// A program is one block on one SM. It walks its items in steps of two tiles (64 tokens each; the last step may
// have one). Four warpgroups of math, the *quarters*, work on a step together. In Q K^T and the softmax,
// quarters 0 and 1 take the first tile and 2 and 3 the second, each of a pair one half of the head dimension
// and then one half of the tokens; in P V each takes a quarter of the latents of both tiles. So a step's
// latency is a quarter of what one warpgroup would need, and nothing is left to be joined at the end. One
// more warp loads.
#pragma once

#include "ptx.cuh"

namespace streamla {

// Compile-time facts, set by attention.py.
constexpr int NUM_HEADS = STREAMLA_NUM_HEADS;
constexpr int SEQLEN_Q = STREAMLA_SEQLEN_Q;
constexpr int PAGE_SIZE = STREAMLA_PAGE_SIZE;
constexpr int ROWS = STREAMLA_ROWS;  // query rows of a program: N of its wgmma, 8 to 32
constexpr int RUN = STREAMLA_RUN;    // tokens of one bulk copy: contiguous in a page, divides 32

constexpr int TOTAL_ROWS = NUM_HEADS * SEQLEN_Q;  // row r is query r / NUM_HEADS, head r % NUM_HEADS
constexpr int ROW_TILES = (TOTAL_ROWS + ROWS - 1) / ROWS;

constexpr int LATENT = 512;
constexpr int ROPE = 64;
constexpr int HEAD_DIM = LATENT + ROPE;
constexpr int TOKEN_BYTES = HEAD_DIM;  // fp8
constexpr int TILE_N = 64;
constexpr int STEP_TILES = 2;
constexpr int STEP_N = STEP_TILES * TILE_N;
constexpr int STAGES = ROWS <= 16 ? 5 : 4;

constexpr int QUARTERS = 4;
constexpr int MATH_THREADS = QUARTERS * WARPGROUP;
constexpr int MATH_WARPS = MATH_THREADS / WARP;
constexpr int THREADS = MATH_THREADS + WARPGROUP;  // one warp of the last warpgroup loads
constexpr int MATH_REGISTERS = 112;                // 512 * 112 + 128 * 32 = 640 * 96, the pool at launch
constexpr int LOAD_REGISTERS = 32;

// A column group is 8 rows of N. A thread of a wgmma accumulator holds two of them, a pair.
constexpr int GROUPS = ROWS / 8;

// Named barriers.
constexpr int BARRIER_MATH = 1;
constexpr int BARRIER_READY = 2;  // mbarriers are initialised
constexpr int BARRIER_PAIR = 3;   // and 4: the quarters of a tile

// Tokens 32 to 63 of a stage lie 32 bytes further than they would: then 16-byte reads of keys and
// 8-byte reads of values meet no bank conflict in rows of plain 576 bytes.
constexpr int HALF_TOKENS = 32;
constexpr int HALF_GAP = 32;
constexpr int STAGE_BYTES = TILE_N * TOKEN_BYTES + 128;

DEVICE constexpr u32 stage_offset(int token) {
    return token * TOKEN_BYTES + (token / HALF_TOKENS) * HALF_GAP;
}

constexpr int QUERY_BLOCK_BYTES = ROWS * 128;  // 64 dimensions of all rows in fp16, 128-byte swizzle

// Byte offsets in dynamic shared memory, from a multiple of 1024.
struct Shared {
    static constexpr u32 STAGE = 0;
    static constexpr u32 QUERY = (STAGES * STAGE_BYTES + 1023) / 1024 * 1024;  // 9 blocks
    static constexpr u32 PROBABILITY = QUERY + HEAD_DIM / 64 * QUERY_BLOCK_BYTES;  // P^T, fp16
    static constexpr u32 SCORE = PROBABILITY + STEP_N * ROWS * 2;  // [to quarter], fp32
    static constexpr u32 SCORE_BYTES = TILE_N / 2 * ROWS * 4;
    static constexpr u32 MAX = SCORE + QUARTERS * SCORE_BYTES;   // [row][warp]
    static constexpr u32 SUM = MAX + ROWS * MATH_WARPS * 4;      // [row][warp]
    static constexpr u32 ROW_SCALE = SUM + ROWS * MATH_WARPS * 4;  // [row]
    static constexpr u32 RUNNING_MAX = ROW_SCALE + ROWS * 4;       // [row]
    static constexpr u32 FULL = RUNNING_MAX + ROWS * 4;            // [stage] mbarrier
    static constexpr u32 EMPTY = FULL + STAGES * 8;                // [stage] mbarrier
    static constexpr u32 BYTES = EMPTY + STAGES * 8 + 1024;        // 1024: to align the base
};
static_assert(Shared::BYTES <= 227 * 1024, "shared memory of one SM");
static_assert(Shared::FULL % 8 == 0, "mbarriers are 8-byte aligned");

// Where a math thread stands. g and t are its place in wgmma fragments.
struct Lane {
    int quarter;  // 0 to 3
    int warp;     // 0 to 3 in the quarter
    int g;        // lane / 4
    int t;        // lane % 4

    DEVICE static Lane here() {
        const int warp = uniform(static_cast<int>(threadIdx.x) / WARP), lane = threadIdx.x % WARP;
        return {warp / 4, warp % 4, lane / 4, lane % 4};
    }
    DEVICE bool leads_warp() const { return g == 0 && t == 0; }
    DEVICE int math_warp() const { return quarter * 4 + warp; }
    // Its tile of the step, and its half of that tile's head dimension and tokens.
    DEVICE int tile() const { return quarter / 2; }
    DEVICE int half() const { return quarter % 2; }
    // The scores that this thread brings to an end: of one token of the step, and of rows 8 * c + 2 * t and + 1
    // of each group c.
    DEVICE int token() const { return TILE_N * tile() + 16 * warp + g + 8 * half(); }
    DEVICE int row(int c, int k) const { return 8 * c + 2 * t + k; }
};

// One row of plan.work.
struct Item {
    int request, begin, end, seqlen, slot, split_begin, split_end, unused;

    // Volatile: who loads it again after the tiles need not hold it in registers meanwhile.
    DEVICE static Item load(const int* work, int index) {
        const int* row = work + 8 * static_cast<i64>(index);
        Item item;
        asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(item.request), "=r"(item.begin), "=r"(item.end), "=r"(item.seqlen) : "l"(row));
        asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(item.slot), "=r"(item.split_begin), "=r"(item.split_end), "=r"(item.unused)
                     : "l"(row + 4));
        return item;
    }
    DEVICE int num_tiles() const { return (end - begin + TILE_N - 1) / TILE_N; }
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
