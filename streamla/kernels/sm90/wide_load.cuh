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
    DEVICE const u8* row(int page, int place) const {
        return rows + page * page_stride + place * token_stride;
    }
    DEVICE int page(int request, int token) const {
        return page_table[request * page_table_stride + token / PAGE_SIZE];
    }
};

// One warp loads one half of every tile: 32 tokens, one a lane. A bulk copy is a run of rows that neither a page nor
// the half ends, and the lane at its first row issues it.
struct HalfLoader {
    const Cache& cache;
    int half, lane;

    DEVICE bool begins_run(int token, int end) const {
        return token < end && (lane == 0 || token % PAGE_SIZE == 0 || !cache.contiguous_pages());
    }
    DEVICE int find_page(int request, int token, int end) const {
        return begins_run(token, end) ? cache.page(request, token) : 0;
    }
    DEVICE void copy(int page, int token, int end, u32 half_stage, u32 full, u64 l2_policy) const {
        if (!begins_run(token, end)) return;
        const int place = token % PAGE_SIZE;
        int rows = 1;
        if (cache.contiguous_pages()) rows = min(min(end - token, HALF - lane), PAGE_SIZE - place);
        bulk_load(half_stage + lane * ROW_BYTES, cache.row(page, place), rows * ROW_BYTES, full, l2_policy);
    }
    // Rows that the copy engine cannot take: slow and right.
    DEVICE void copy_bytes(int request, int token, int end, u32 half_stage) const {
        if (token >= end) return;
        const u8* source = cache.row(cache.page(request, token), token % PAGE_SIZE);
#pragma unroll 1
        for (int i = 0; i < ROW_BYTES; ++i) store_shared_u8(half_stage + lane * ROW_BYTES + i, source[i]);
    }
};

// `half`: which of the load warps this is.
DEVICE void load_tiles(const Cache& cache, const int* work, const int* work_indptr, int half, u32 shared) {
    const HalfLoader loader = {cache, half, static_cast<int>(threadIdx.x % WARP)};
    // Programs that share tokens (row tiles) find each other's rows in L2.
    const u64 policy = ROW_TILES == 1 ? l2_evict_first() : l2_evict_normal();
    u32 count = 0;
#pragma unroll 1
    for (int index = work_indptr[this_program()]; index < work_indptr[this_program() + 1]; ++index) {
        const int* item = work + index * 8;
        const int request = item[0], end = item[2];
        int token = item[1] + half * HALF + loader.lane;  // of this lane
        int next_page = loader.find_page(request, token, end);
        // All lanes go round as often as tiles begin before the end.
#pragma unroll 1
        for (; token - half * HALF - loader.lane < end; token += TILE, ++count) {
            const int page = next_page;
            next_page = loader.find_page(request, token + TILE, end);
            const u32 base = forget(shared);  // registers are few here
            const u32 slot = count % STAGES, full = base + Shared::FULL + slot * 8;
            const u32 half_stage = base + Shared::STAGE + slot * STAGE_BYTES + half * (HALF * ROW_BYTES + HALF_SKEW);
            mbarrier_wait(base + Shared::EMPTY + slot * 8, count / STAGES & 1 ^ 1);
            if constexpr (BULK_COPIES) {
                if (loader.lane == 0) mbarrier_arrive_expect(full, max(0, min(HALF, end - token)) * ROW_BYTES);
                __syncwarp();
                loader.copy(page, token, end, half_stage, full, policy);
            } else {
                loader.copy_bytes(request, token, end, half_stage);
                __syncwarp();
                if (loader.lane == 0) mbarrier_arrive(full);
            }
        }
    }
}

}  // namespace streamla
