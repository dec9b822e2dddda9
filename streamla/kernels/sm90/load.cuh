// The loading warp: keeps the ring of stages full with bulk copies.
//
// A tile is TILE_N / RUN runs of RUN tokens, each contiguous in one page, whatever the page size: a page of
// 64 or more gives two runs of 32 tokens, an odd page size 64 runs of one token. Lane i holds the page of
// run i (of several tiles, if a tile has fewer than 32 runs) and issues its copy.
#pragma once

#include "tile.cuh"

namespace streamla {

struct Cache {
    const u8* rows;
    i64 page_stride, token_stride;  // bytes
    const int* page_table;
    i64 table_stride;
};

// Tiles being loaded at once, by the number of tiles of the program. With too many none lands before all do, and the math of
// a short share waits for that; with too few the math of a long one starves.
DEVICE int tiles_in_flight(int num_tiles) { return num_tiles <= 8 ? 2 : num_tiles <= 40 ? 3 : STAGES - 1; }

constexpr int TILE_RUNS = TILE_N / RUN;
constexpr int LANE_RUNS = (TILE_RUNS + WARP - 1) / WARP;              // runs of a tile that one lane issues
constexpr int BATCH_TILES = TILE_RUNS < WARP ? WARP / TILE_RUNS : 1;  // tiles whose pages a warp holds

// The ring, as its writer and its readers count it: position p is stage p % STAGES, round p / STAGES. FULL has two mbarriers a
// stage, which rounds take in turn: with an odd number of stages one changes hands between the teams, so one of them may
// wait for its round when the round before has not landed, and that of equal parity has.
struct Ring {
    u32 shared;

    DEVICE u32 stage(int position) const {
        return shared + Shared::STAGE + position % STAGES * STAGE_BYTES;
    }
    DEVICE u32 full(int position) const { return shared + Shared::FULL + position % (2 * STAGES) * 8; }
    DEVICE u32 empty(int position) const { return shared + Shared::EMPTY + position % STAGES * 8; }
    DEVICE u32 turn(int position) const { return shared + Shared::TURN + position % STAGES * 8; }
    DEVICE void wait_full(int position) const { mbarrier_wait(full(position), position / (2 * STAGES) & 1); }
    DEVICE void wait_empty(int position) const { mbarrier_wait(empty(position), ~(position / STAGES) & 1); }
    // A warp has read all that it needs of a stage. What generic stores left there must be ordered before
    // (fence_async_proxy).
    DEVICE void release(int position, bool leads_warp) const {
        __syncwarp();
        if (leads_warp || RACECHECK) mbarrier_arrive(empty(position));
    }
    DEVICE void init() const {
        for (int p = 0; p < 2 * STAGES; p++) mbarrier_init(full(p), STEP ? 1 + WRITERS * ARRIVING_LANES : 1);
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(empty(s), TEAM_WARPS * ARRIVING_LANES);
            if (STEP) mbarrier_init(turn(s), 1);
        }
        mbarrier_init(shared + Shared::EMPTIED, 1);
        fence_mbarrier_init();
    }
    // By the loading warp: from now on the mbarriers may be used. A barrier for each kind of warp: who waits at one
    // must do so at one instruction.
    DEVICE void announce() const {
        named_barrier_arrive(BARRIER_READY, MATH_THREADS + WARP);
        named_barrier_arrive(BARRIER_EMPTIER_READY, 2 * WARP);
        if (STEP) named_barrier_arrive(BARRIER_WRITERS_READY, (WRITERS + 1) * WARP);
    }
    DEVICE static void wait_as_math() { named_barrier_wait(BARRIER_READY, MATH_THREADS + WARP); }
    DEVICE static void wait_as_emptier() { named_barrier_wait(BARRIER_EMPTIER_READY, 2 * WARP); }
    DEVICE static void wait_as_writer() { named_barrier_wait(BARRIER_WRITERS_READY, (WRITERS + 1) * WARP); }
};

// Expects `bytes` in the stage, which is free; if it gets new rows, its writers take their turn.
DEVICE void open_stage(const Ring& ring, int position, int bytes, bool has_new_rows) {
    mbarrier_arrive_expect(ring.full(position), bytes);
    if (STEP && has_new_rows) mbarrier_arrive(ring.turn(position));
    if (STEP && !has_new_rows) mbarrier_arrive_times(ring.full(position), WRITERS * ARRIVING_LANES);
}

// Tokens from here on are not in the cache yet.
DEVICE int cached_end(const Item& item) {
    return STEP ? min(item.end, max(item.begin, item.seqlen - SEQLEN_Q)) : item.end;
}

// Pages of the runs that this lane issues in the batch of tiles from `tile` on.
DEVICE void fetch_pages(int (&pages)[LANE_RUNS], const int* table, const Item& item, int tile, int lane) {
    const int end = cached_end(item);
#pragma unroll
    for (int i = 0; i < LANE_RUNS; i++) {
        const int token = item.begin + tile * TILE_N + (lane + i * WARP) * RUN;
        pages[i] = token < end ? __ldg(table + token / PAGE_SIZE) : 0;
    }
}

DEVICE void load_item(const Item& item, const Cache& cache, const Ring& ring, int& position, int in_flight,
                      u64 l2_policy) {
    const int lane = threadIdx.x % WARP;
    const int* table = cache.page_table + item.request * cache.table_stride;
    const int num_tiles = item.num_tiles(), end = cached_end(item);
    int pages[LANE_RUNS], next_pages[LANE_RUNS];
    fetch_pages(pages, table, item, 0, lane);
    for (int batch = 0; batch < num_tiles; batch += BATCH_TILES) {
        fetch_pages(next_pages, table, item, batch + BATCH_TILES, lane);
        const int tiles = min(BATCH_TILES, num_tiles - batch);
        for (int i = 0; i < tiles; i++, position++) {
            const int first = item.begin + (batch + i) * TILE_N;  // token
            const u32 full = ring.full(position), stage = ring.stage(position);
            ring.wait_empty(position);
            if (position >= in_flight) ring.wait_full(position - in_flight);
            if (lane == 0)
                open_stage(ring, position, max(0, min(TILE_N, end - first)) * TOKEN_BYTES,
                           min(first + TILE_N, item.end) > end);
            __syncwarp();
#pragma unroll
            for (int k = 0; k < LANE_RUNS; k++) {
                const int run = lane + k * WARP - i * TILE_RUNS;
                const int token = first + run * RUN;
                if (run < 0 || run >= TILE_RUNS || token >= end) continue;
                const u8* source =
                    cache.rows + pages[k] * cache.page_stride + token % PAGE_SIZE * cache.token_stride;
                bulk_load(stage + stage_offset(run * RUN), source, min(RUN, end - token) * TOKEN_BYTES,
                          full, l2_policy);
            }
        }
#pragma unroll
        for (int k = 0; k < LANE_RUNS; k++) pages[k] = next_pages[k];
    }
}

// Tiles of the items from `index` on, as many as there are lanes.
DEVICE int count_tiles(const int* work, int index, int last_item) {
    const int lane = threadIdx.x % WARP;
    return __reduce_add_sync(FULL_WARP, index + lane < last_item ? Item::load(work, index + lane).num_tiles() : 0);
}

// All items of a program.
DEVICE void load_items(const int* work, const int* program_items, const Cache& cache, const Ring& ring) {
    const u64 l2_policy = ROW_TILES > 1 ? l2_evict_normal() : l2_evict_first();
    const int first_item = load_index(program_items), last_item = load_index(program_items + 1);
    const int in_flight = tiles_in_flight(count_tiles(work, first_item, last_item));
    int position = 0;
    for (int index = first_item; index < last_item; index++)
        load_item(Item::load(work, index), cache, ring, position, in_flight, l2_policy);
}

}  // namespace streamla
