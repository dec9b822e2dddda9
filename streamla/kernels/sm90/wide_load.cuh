// Wide attention: two warps stream the tiles of their program's items through the ring of stages.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

struct Cache {
    const u8* rows;
    i64 page_stride, token_stride;  // bytes
    const int* page_table;
    i64 page_table_stride;

    DEVICE bool contiguous_pages() const { return token_stride == TOKEN_BYTES; }
    DEVICE const u8* row(int page, int place) const {
        return rows + page * page_stride + place * token_stride;
    }
    DEVICE int page(int request, int token) const {
        return page_table[request * page_table_stride + token / PAGE_SIZE];
    }
};

// A thread a token of the tile: a warp loads a half. A bulk copy is a run of rows that neither a page nor the half ends, and
// the thread at its first row issues it.
struct TokenLoader {
    const Cache& cache;
    int place;  // of the token in the tile

    DEVICE int lane() const { return place % HALF; }
    DEVICE bool begins_run(int token, int end) const {
        return token < end && (lane() == 0 || token % PAGE_SIZE == 0 || !cache.contiguous_pages());
    }
    DEVICE int find_page(int request, int token, int end) const {
        return begins_run(token, end) ? cache.page(request, token) : 0;
    }
    DEVICE void copy(int page, int token, int end, u32 stage, u32 full, u64 l2_policy) const {
        if (!begins_run(token, end)) return;
        const int in_page = token % PAGE_SIZE;
        int rows = 1;
        if (cache.contiguous_pages()) rows = min(min(end - token, HALF - lane()), PAGE_SIZE - in_page);
        bulk_load(stage + token_offset(place), cache.row(page, in_page), rows * TOKEN_BYTES, full, l2_policy);
    }
    // Rows that the copy engine cannot take: slow and right.
    DEVICE void copy_bytes(int request, int token, int end, u32 stage) const {
        if (token >= end) return;
        const u8* source = cache.row(cache.page(request, token), token % PAGE_SIZE);
#pragma unroll 1
        for (int i = 0; i < TOKEN_BYTES; ++i) store_shared_u8(stage + token_offset(place) + i, source[i]);
    }
};

// By the load warps: all items of their program.
DEVICE void load_items(const Cache& cache, const int* work, const int* program_items, u32 shared) {
    const TokenLoader loader = {cache, static_cast<int>(threadIdx.x) - MATH_THREADS};
    // Programs that share tokens (row tiles) find each other's rows in L2.
    const u64 policy = ROW_TILES == 1 ? l2_evict_first() : l2_evict_normal();
    u32 count = 0;
#pragma unroll 1
    for (int index = uniform(load_index(program_items)); index < load_index(program_items + 1); ++index) {
        const Item item = Item::load(work, index);
        const int request = item.request, end = item.end;
        int token = item.begin + loader.place;
        int next_page = loader.find_page(request, token, end);
        // All lanes go round as often as tiles begin before the end.
#pragma unroll 1
        for (; token - loader.place < end; token += TILE_N, ++count) {
            const int page = next_page;
            next_page = loader.find_page(request, token + TILE_N, end);
            const u32 base = forget(shared);  // registers are few here
            const u32 slot = count % STAGES, full = base + Shared::FULL + slot * 8;
            const u32 stage = base + Shared::STAGE + slot * STAGE_BYTES;
            mbarrier_wait(base + Shared::EMPTY + slot * 8, count / STAGES & 1 ^ 1);
            if constexpr (BULK_COPIES) {
                if (loader.lane() == 0) mbarrier_arrive_expect(full, max(0, min(HALF, end - token)) * TOKEN_BYTES);
                __syncwarp();
                loader.copy(page, token, end, stage, full, policy);
            } else {
                loader.copy_bytes(request, token, end, stage);
                __syncwarp();
                if (loader.lane() < ARRIVING_LANES) mbarrier_arrive(full);
            }
        }
    }
}

}  // namespace streamla
