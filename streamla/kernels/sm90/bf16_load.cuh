// The loading warp: keeps the ring of stages full with bulk copies.
//
// A stage is STAGE_N / RUN runs of RUN tokens, each contiguous in one page, whatever the page size: a multiple
// of 8 gives four runs of 8 tokens, an odd page size 32 runs of one token. Lane i holds the page of run i of the
// stages to come and issues its copy.
#pragma once

#include "bf16_query.cuh"

namespace streamla {

struct Cache {
    const u8* rows;
    i64 page_stride, token_stride;  // bytes
    const int* page_table;
    i64 table_stride;
};

constexpr int STAGE_RUNS = STAGE_N / RUN;
constexpr int BATCH_N = WARP * RUN;  // tokens whose pages a warp holds

// The ring, as its writer and its readers count it: position p is stage p % STAGES, round p / STAGES.
struct Ring {
    u32 shared;

    DEVICE u32 stage(int position) const { return shared + Shared::STAGE + position % STAGES * STAGE_BYTES; }
    DEVICE u32 full(int position) const { return shared + Shared::FULL + position % STAGES * 8; }
    DEVICE u32 empty(int position) const { return shared + Shared::EMPTY + position % STAGES * 8; }
    DEVICE void wait_full(int position) const { mbarrier_wait(full(position), position / STAGES & 1); }
    DEVICE void wait_empty(int position) const { mbarrier_wait(empty(position), ~(position / STAGES) & 1); }
    DEVICE void init() const {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full(s), 1);
            mbarrier_init(empty(s), MATH_WARPS);
        }
        fence_mbarrier_init();
    }
};

// Page of the run that this lane issues in the batch of tokens from `begin` on.
DEVICE int fetch_page(const int* table, int begin, int end, int lane) {
    const int token = begin + lane * RUN;
    return token < end ? __ldg(table + token / PAGE_SIZE) : 0;
}

// The next query to L2, early enough: behind a full ring of loads a miss would take some microseconds.
DEVICE void prefetch_query(const Query& q, int request) {
    constexpr int LINE = 64, ROW_LINES = HEAD_DIM / LINE;  // values in 128 bytes
    for (int i = threadIdx.x % WARP; i < TOTAL_ROWS * ROW_LINES; i += WARP) {
        const int row = i / ROW_LINES, dim = i % ROW_LINES * LINE;
        prefetch_l2(dim < LATENT ? q.nope + q.nope_strides.at(request, row) + dim
                                 : q.pe + q.pe_strides.at(request, row));
    }
}

DEVICE void load_item(const Item& item, const Cache& cache, const Ring& ring, int& position, u64 l2_policy) {
    const int lane = threadIdx.x % WARP;
    const int* table = cache.page_table + item.request * cache.table_stride;
    int page = fetch_page(table, item.begin, item.end, lane);
    for (int batch = item.begin; batch < item.end; batch += BATCH_N) {
        const int next_page = fetch_page(table, batch + BATCH_N, item.end, lane);
        for (int i = 0; i < WARP / STAGE_RUNS; i++) {
            const int first = batch + i * STAGE_N;  // token
            if (first >= item.end) break;
            const u32 full = ring.full(position), stage = ring.stage(position);
            ring.wait_empty(position++);
            if (lane == 0) mbarrier_arrive_expect(full, min(STAGE_N, item.end - first) * TOKEN_BYTES);
            __syncwarp();
            const int token = batch + lane * RUN;
            if (lane / STAGE_RUNS != i || token >= item.end) continue;
            const u8* source = cache.rows + page * cache.page_stride + token % PAGE_SIZE * cache.token_stride;
            bulk_load(stage + token_offset((token - item.begin) % TILE_N), source,
                      min(RUN, item.end - token) * TOKEN_BYTES, full, l2_policy);
        }
        page = next_page;
    }
}

}  // namespace streamla
