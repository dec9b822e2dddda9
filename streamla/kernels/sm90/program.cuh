// What the warps of a program do, whatever a row of the cache holds: the loading warp and the one that empties slots, and the
// math warps' walk over the items. attention.cu and attention_ds_mla.cu say how a query is loaded and a tile attended to.
#pragma once

#include "finish.cuh"
#include "load.cuh"
#include "merge.cuh"  // behind tile.cuh, which the others include

namespace streamla {

// Makes the mbarriers, then loads all items of its program.
DEVICE void run_loader(const int* work, const int* program_items, const Cache& cache, const Ring& ring) {
    if (threadIdx.x == LOADER) ring.init();
    __syncwarp();
    ring.announce();
    wait_for_previous_grid();
    allow_next_grid();
    load_items(work, program_items, cache, ring);
}

// counters == null: no program of this launch merges.
DEVICE void run_emptier(const Exchange& exchange, const int* work, const int* program_items, int row_begin,
                        int* counters, const Ring& ring) {
    ring.wait_as_emptier();
    wait_for_previous_grid();
    if (counters) empty_slots<4>(exchange, work, program_items, row_begin, counters, ring.shared + Shared::EMPTIED);
}

// All math warps: item by item, then the merge of those that are split, if the launch merges.
//     load(request)    its query goes to shared memory
//     reset()          one warp of the team: what the team keeps there of an item is that of none
//     attend(sums, acc, range, token, position, goes_on)    the tile from `token` on, at this position of the ring; the item
//         goes on with another of the same team
template <typename Latents, typename Load, typename Reset, typename Attend>
DEVICE void walk_items(const Output& output, bool causal, float value_scale, const int* work, const int* program_items,
                       int row_begin, const Ring& ring, const Lane& lane, const Load& load, const Reset& reset,
                       const Attend& attend) {
    const int last_item = load_index(program_items + 1);
    int index = load_index(program_items), position = 0;
    Item item = Item::none();
    int request = index < last_item ? Item::load_request(work, index) : 0;
    for (; index < last_item; index++) {
        item = Item::load(work, index);
        load(request);
        named_barrier(BARRIER_MATH, MATH_THREADS);
        reset();  // no warp still reads what is left of the item before
        named_barrier(BARRIER_TEAM + lane.team, TEAM_THREADS);

        Accumulator acc;
#pragma unroll
        for (int j = 0; j < RUNS * M_TILES; j++) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) acc[j][i] = 0.0f;
        }
        RowValues sums;
#pragma unroll
        for (int c = 0; c < GROUPS; c++) sums[c][0] = sums[c][1] = 0.0f;

        const Range range = Range::of(item, causal);
        const int skip = (lane.team - position % TEAMS + TEAMS) % TEAMS, end = position + item.num_tiles();
        for (int tile = position + skip; tile < end; tile += TEAMS)
            attend(sums, acc, range, item.begin + (tile - position) * TILE_N, tile, tile + TEAMS < end);
        if (index + 1 < last_item) request = Item::load_request(work, index + 1);  // on its way meanwhile
        item = Item::load(work, forget(index));  // not kept in registers beside the tiles
        finish_item<Latents>(sums, acc, output, item, row_begin, ring, position, end, value_scale);
        position = end;
    }
    static_assert(MERGE_BYTES <= HEAD_DIM / 64 * QUERY_BLOCK_BYTES, "the merge takes the query's place");
    if (output.merges)
        merge_items(output, item, work, program_items, row_begin, value_scale, ring.shared + Shared::QUERY);
}

}  // namespace streamla
