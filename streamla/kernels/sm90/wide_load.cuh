// Wide attention: two warps stream the tiles of their program's items through the ring of stages.
#pragma once

#include "wide_tile.cuh"

namespace streamla {

struct Cache {
    const u8* rows;
    i64 page_stride, token_stride;  // bytes
    const int* page_table;
    i64 page_table_stride;

    DEVICE bool contiguous_pages() const { return token_stride == ROW_BYTES; }
    DEVICE bool aligned16() const {
        return ((reinterpret_cast<u64>(rows) | page_stride | token_stride) & 15) == 0;
    }
    DEVICE const u8* row(int page, int place) const {
        return rows + page * page_stride + place * token_stride;
    }
};

// One warp loads one half of every tile: 32 tokens, one a lane. A bulk copy is a run of rows that neither a page nor
// the half ends, and the lane at its first row issues it.
struct HalfLoader {
    const Cache& cache;
    int half, lane;

    // The token of this lane in the tile at `tile`.
    DEVICE int token(int tile) const { return tile + half * HALF + lane; }
    DEVICE bool begins_run(int token, int end) const {
        return token < end && (lane == 0 || token % PAGE_SIZE == 0 || !cache.contiguous_pages());
    }
    DEVICE int find_page(const int* pages, int token, int end) const {
        return begins_run(token, end) ? pages[token / PAGE_SIZE] : 0;
    }
    DEVICE void copy(int page, int token, int end, u32 half_stage, u32 full, u64 l2_policy) const {
        if (!begins_run(token, end)) return;
        const int place = token % PAGE_SIZE;
        int rows = 1;
        if (cache.contiguous_pages()) rows = min(min(end - token, HALF - lane), PAGE_SIZE - place);
        bulk_load(half_stage + lane * ROW_BYTES, cache.row(page, place), rows * ROW_BYTES, full, l2_policy);
    }
    // Rows that no copy engine takes (some stride is no multiple of 16 bytes): slow and right.
    DEVICE void copy_bytes(const int* pages, int token, int end, u32 half_stage) const {
        if (token >= end) return;
        const u8* source = cache.row(pages[token / PAGE_SIZE], token % PAGE_SIZE);
#pragma unroll 4
        for (int i = 0; i < ROW_BYTES; ++i) store_shared_u8(half_stage + lane * ROW_BYTES + i, source[i]);
    }
};

// `half`: which of the load warps this is.
DEVICE void load_tiles(const Cache& cache, const int* work, int first, int last, int half, u32 shared) {
    const HalfLoader loader = {cache, half, static_cast<int>(threadIdx.x % WARP)};
    const bool by_copy_engine = cache.aligned16();
    // Programs that share tokens (row tiles) find each other's rows in L2.
    const u64 policy = ROW_TILES == 1 ? l2_evict_first() : l2_evict_normal();
    u32 count = 0;
    for (int index = first; index < last; ++index) {
        const Item item = load_item(work, index);
        const int* pages = cache.page_table + item.request * cache.page_table_stride;
        int next_page = loader.find_page(pages, loader.token(item.begin), item.end);
        for (int tile = item.begin; tile < item.end; tile += TILE, ++count) {
            const int page = next_page, token = loader.token(tile);
            next_page = loader.find_page(pages, token + TILE, item.end);
            const u32 slot = count % STAGES, full = shared + Shared::FULL + slot * 8;
            const u32 half_stage = shared + Shared::STAGE + slot * STAGE_BYTES + token_offset(half * HALF);
            mbarrier_wait(shared + Shared::EMPTY + slot * 8, count / STAGES & 1 ^ 1);
            if (by_copy_engine) {
                const int rows = max(0, min(HALF, item.end - tile - half * HALF));
                if (loader.lane == 0) mbarrier_arrive_expect(full, rows * ROW_BYTES);
                __syncwarp();
                loader.copy(page, token, item.end, half_stage, full, policy);
            } else {
                loader.copy_bytes(pages, token, item.end, half_stage);
                __syncwarp();
                if (loader.lane == 0) mbarrier_arrive(full);
            }
        }
    }
}

}  // namespace streamla
