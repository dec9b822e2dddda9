// What a program of the bf16 kernel is made of: its tile, its threads, its shared memory.
//
// A program is one block on one SM. It walks its items in tiles of up to 64 tokens. One warpgroup does all math,
// one warp loads the cache and three the next query, or three and one if a thread must copy every 16 bytes.
//
// Stored bf16 is what the tensor cores take, and the copy engine lays it down as they read it: keys and values go
// from shared memory to wgmma and are never in a register.
#pragma once

#include "bf16_ptx.cuh"
#include "wgmma.cuh"

namespace streamla {

// Compile-time facts, set by bf16.py.
constexpr int NUM_HEADS = STREAMLA_NUM_HEADS;
constexpr int SEQLEN_Q = STREAMLA_SEQLEN_Q;
constexpr int PAGE_SIZE = STREAMLA_PAGE_SIZE;

constexpr int TOTAL_ROWS = NUM_HEADS * SEQLEN_Q;  // row r is query r / NUM_HEADS, head r % NUM_HEADS
constexpr int GROUPS = (TOTAL_ROWS + 7) / 8;      // of 8 rows
constexpr int ROWS = 8 * GROUPS;                  // N of the products
static_assert(ROWS <= 32, "accumulators of more rows do not fit into the registers");

constexpr int LATENT = 512;
constexpr int ROPE = 64;
constexpr int HEAD_DIM = LATENT + ROPE;
constexpr int TOKEN_BYTES = 2 * HEAD_DIM;

// A block is 64 dimensions, 128 bytes of a row: as wide as a swizzle atom of 8 rows. A run is 8 tokens: 9 atoms,
// one for each block.
constexpr int BLOCK_DIM = 64;
constexpr int BLOCKS = HEAD_DIM / BLOCK_DIM;
constexpr int LATENT_BLOCKS = LATENT / BLOCK_DIM;
constexpr int ATOM_BYTES = 1024;
constexpr int RUN_N = 8;
constexpr int RUN_BYTES = BLOCKS * ATOM_BYTES;
constexpr int STEP_N = 16;  // K of a wgmma

// A slot holds one tile. Three slots of 64 tokens do not fit beside the query: the first is shorter. It is first
// because the tokens that wgmma's M of 64 finds past its end must be memory.
constexpr int TILE_N = 64;
constexpr int SHORT_N = ROWS <= 16 ? 48 : 32;
constexpr int SLOTS = 3;
constexpr int RING_N = SHORT_N + (SLOTS - 1) * TILE_N;

// Pages of whole runs are loaded by the copy engine. Of any other, a thread copies each 16 bytes.
constexpr bool COPY_ENGINE = PAGE_SIZE % RUN_N == 0;

constexpr int MATH_THREADS = WARPGROUP;
constexpr int MATH_WARPS = MATH_THREADS / WARP;
constexpr int LOAD_WARPS = COPY_ENGINE ? 1 : 3;
constexpr int QUERY_WARPS = 4 - LOAD_WARPS;
constexpr int THREADS = MATH_THREADS + (LOAD_WARPS + QUERY_WARPS) * WARP;
constexpr int WARPS = THREADS / WARP;

// Named barriers.
constexpr int BARRIER_MATH = 1;
constexpr int BARRIER_QUERY = 2;  // the first query is requested

constexpr int QUERY_BLOCK_BYTES = ROWS * 128;

// Byte offsets in dynamic shared memory, from a multiple of 1024.
struct Shared {
    static constexpr u32 SLOT = 0;
    static constexpr u32 QUERY = SLOT + RING_N * TOKEN_BYTES;              // [block], 128-byte swizzle
    static constexpr u32 PROBABILITY = QUERY + BLOCKS * QUERY_BLOCK_BYTES; // P^T: upper parts, then lower parts
    static constexpr u32 PROBABILITY_BYTES = TILE_N * ROWS * 2;            // of one part
    static constexpr u32 MAX = PROBABILITY + 2 * PROBABILITY_BYTES;        // [row][warp]
    static constexpr u32 SUM = MAX + ROWS * MATH_WARPS * 4;                // [row][warp]
    static constexpr u32 FULL = SUM + ROWS * MATH_WARPS * 4;               // [slot] mbarrier
    static constexpr u32 EMPTY = FULL + SLOTS * 8;                         // [slot] mbarrier
    static constexpr u32 QUERY_FULL = EMPTY + SLOTS * 8;                   // mbarrier
    static constexpr u32 QUERY_EMPTY = QUERY_FULL + 8;                     // mbarrier
    static constexpr u32 BYTES = QUERY_EMPTY + 8 + 1024;                   // 1024: to align the base
};
static_assert(Shared::BYTES <= 227 * 1024, "shared memory of one SM");
static_assert(Shared::BYTES == STREAMLA_SHARED_BYTES, "bf16.py counts the same");

// Where a math thread stands. g and t are its place in accumulators.
struct Lane {
    int warp, lane, g, t;

    DEVICE static Lane here() {
        const int warp = uniform(static_cast<int>(threadIdx.x) / WARP), lane = threadIdx.x % WARP;
        return {warp, lane, lane / 4, lane % 4};
    }
    // The scores that this thread holds: of two tokens of the tile, and of two rows of each group c.
    DEVICE int token(int i) const { return 16 * warp + g + 8 * i; }
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

// The items of a program in order, each row of work requested an item ahead: behind a full ring of loads it takes
// microseconds.
struct Items {
    const int* work;
    int index, last;
    Item item, next;

    DEVICE static Items of(const int* work, int first, int last) {
        Items items{work, first, last, {}, {}};
        items.item = items.load(first);
        items.next = items.load(first + 1);
        return items;
    }
    DEVICE Item load(int i) const { return i < last ? Item::load(work, i) : Item{}; }
    DEVICE bool any() const { return index < last; }
    DEVICE void advance() {
        item = next;
        next = load(++index + 1);
    }
};

// A (batch, seqlen_q, num_heads, x) tensor: strides in elements, x contiguous.
struct Strides {
    i64 batch, query, head;

    DEVICE i64 at(int request, int row) const {
        return request * batch + row / NUM_HEADS * query + row % NUM_HEADS * head;
    }
};

}  // namespace streamla
