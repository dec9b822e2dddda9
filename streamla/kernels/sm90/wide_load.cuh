// Wide attention: one warp streams the tiles of its program's items through the ring of stages.
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

// Bulk copies of one tile. A copy is a run of rows that neither a page nor a half of the tile ends; the lane
// at its first row issues it.
struct TileCopy {
    int position[2], page[2];  // of rows lane and 32 + lane
    int run[2];                // rows of the run that begins here, or 0

    DEVICE void locate(const Cache& cache, const int* pages, int token, int valid, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = half * HALF + lane;
            position[half] = token + row;
            const int place = position[half] % PAGE_SIZE;
            const bool first = lane == 0 || place == 0 || !cache.contiguous_pages();
            run[half] = 0;
            if (row < valid && first) {
                const int rest = min(min(valid - row, HALF - lane), PAGE_SIZE - place);
                run[half] = cache.contiguous_pages() ? rest : 1;
                page[half] = pages[position[half] / PAGE_SIZE];
            }
        }
    }
    DEVICE void issue(const Cache& cache, u32 stage, u32 full, int lane, u64 l2_policy) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (run[half])
                bulk_load(stage + token_offset(half * HALF + lane),
                          cache.row(page[half], position[half] % PAGE_SIZE), run[half] * ROW_BYTES, full, l2_policy);
        }
    }
};

// Rows that no copy engine takes (some stride is no multiple of 16 bytes): byte by byte, slow and right.
DEVICE void copy_bytes(const Cache& cache, const int* pages, u32 stage, int token, int valid, int lane) {
    for (int row = 0; row < valid; ++row) {
        const u8* source = cache.row(pages[(token + row) / PAGE_SIZE], (token + row) % PAGE_SIZE);
#pragma unroll 6
        for (int i = lane; i < ROW_BYTES; i += WARP) store_shared_u8(stage + token_offset(row) + i, source[i]);
    }
}

DEVICE void load_tiles(const Cache& cache, const int* work, int first, int last, u32 shared) {
    const int lane = threadIdx.x % WARP;
    const bool by_copy_engine = cache.aligned16();
    // Programs that share tokens (row tiles) find each other's rows in L2.
    const u64 policy = ROW_TILES == 1 ? l2_evict_first() : l2_evict_normal();
    u32 stage = 0, round = 0;
    for (int index = first; index < last; ++index) {
        const Item item = load_item(work, index);
        const int* pages = cache.page_table + item.request * cache.page_table_stride;
        TileCopy next;
        next.locate(cache, pages, item.begin, item.end - item.begin, lane);
        for (int token = item.begin; token < item.end; token += TILE) {
            const TileCopy copy = next;
            next.locate(cache, pages, token + TILE, item.end - token - TILE, lane);
            const int valid = min(TILE, item.end - token);
            const u32 base = shared + Shared::STAGE + stage * STAGE_BYTES, full = shared + Shared::FULL + stage * 8;
            mbarrier_wait(shared + Shared::EMPTY + stage * 8, round & 1 ^ 1);
            if (by_copy_engine) {
                if (lane == 0) mbarrier_arrive_expect(full, valid * ROW_BYTES);
                __syncwarp();
                copy.issue(cache, base, full, lane, policy);
            } else {
                copy_bytes(cache, pages, base, token, valid, lane);
                __syncwarp();
                if (lane == 0) mbarrier_arrive(full);
            }
            if (++stage == STAGES) {
                stage = 0;
                ++round;
            }
        }
    }
}

}  // namespace streamla
