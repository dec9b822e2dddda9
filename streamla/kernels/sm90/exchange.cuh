// Partials between the programs of one launch: words of one or two latents, and no flag says that they are stored.
//
// While the first tiles load, a spare warp of every program fills its slots with EMPTY, a word that no result
// has, and waits until all programs of its requests have done so. From then on every word tells by itself
// whether it has been stored, and who needs it loads until it has been. So between the last store of one
// program and the sum of another there is no fence, no counter and no second round of loads. All programs are
// resident (a cooperative launch), so they may wait for each other.
#pragma once

#include "problem.cuh"

namespace streamla {

// NaN, but not the one (0x7fff, 0x7fffffff) that arithmetic and conversions give.
constexpr u32 EMPTY = 0xffffffffu;
constexpr u32 NAN_BITS = 0x7fffffffu;

// Values before they are multiplied by k_scale fit fp16, except where scales are in the rows.
constexpr int WORD_LATENTS = GROUP_SCALES ? 1 : 2;
constexpr int ROW_WORDS = LATENT / WORD_LATENTS;

DEVICE void unpack_word(float* v, u32 word) {
    if constexpr (WORD_LATENTS == 2) {
        const float2 pair = unpack_half2(word);
        v[0] = pair.x, v[1] = pair.y;
    } else {
        v[0] = __uint_as_float(word);
    }
}

DEVICE i64 partial_row(int slot, int row) { return static_cast<i64>(slot) * TOTAL_ROWS + row; }

// The workspace of partials as the programs of a launch that also merges use it: the words of a row lie at the
// beginning of its place.
struct Exchange {
    float *out_partial, *lse_partial;

    DEVICE u32* row(int slot, int row) const {
        return reinterpret_cast<u32*>(out_partial + partial_row(slot, row) * LATENT);
    }
    DEVICE u32* lse(int slot, int row) const {
        return reinterpret_cast<u32*>(lse_partial + partial_row(slot, row));
    }
    DEVICE void store_lse(int slot, int row, float v) const {
        store_relaxed(lse(slot, row), v == v ? __float_as_uint(v) : NAN_BITS);
    }
    template <int UNROLL>
    DEVICE void empty(int slot, int row_begin, int lane) const {
        constexpr int ROW_CHUNKS = ROW_WORDS / 4;
        const int rows = min(ROWS, TOTAL_ROWS - row_begin);
#pragma unroll UNROLL
        for (int i = lane; i < rows * ROW_CHUNKS; i += WARP)
            store_relaxed(row(slot, row_begin + i / ROW_CHUNKS) + i % ROW_CHUNKS * 4,
                          make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
#pragma unroll 1
        for (int i = lane; i < rows; i += WARP) store_relaxed(lse(slot, row_begin + i), EMPTY);
    }
};

// The spare warp. counters[request] counts the emptied slots of all launches since the plan was made: it is a
// multiple of what one launch empties whenever none is missing. Arrives at the mbarrier `emptied` when none is. UNROLL
// stores of a slot are under way at once, as registers allow.
template <int UNROLL>
DEVICE void empty_slots(const Exchange& exchange, const int* work, const int* program_items, int row_begin,
                        int* counters, u32 emptied) {
    const int lane = threadIdx.x % WARP;
    const int first = load_index(program_items), last = load_index(program_items + 1);
#pragma unroll 1
    for (int index = first; index < last; index++) {
        const Item item = Item::load(work, index);
        if (item.slot >= 0) exchange.empty<UNROLL>(item.slot, row_begin, lane);
    }
    __syncwarp();
    if (lane) return;
#pragma unroll 1
    for (int index = first; index < last; index++) {
        const Item item = Item::load(work, index);
        if (item.slot >= 0) add_release(counters + item.request, 1);
    }
#pragma unroll 1
    for (int index = first; index < last; index++) {
        const Item item = Item::load(work, index);
        const int arrivals = item.num_splits() * ROW_TILES;
        while (item.slot >= 0 && load_acquire(counters + item.request) % arrivals) {
        }
    }
    mbarrier_arrive(emptied);
}
DEVICE void wait_until_emptied(u32 emptied) { mbarrier_wait(emptied, 0); }

}  // namespace streamla
