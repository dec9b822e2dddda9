// The loading warps: keep the ring full.
//
// A slot is runs of 8 tokens, each [block][token][64 dimensions] with wgmma's 128-byte swizzle.
#pragma once

#include "bf16_ring.cuh"

namespace streamla {

struct Cache {
    const TensorMap& map;  // (64 dimensions, token of the page, block, page)
    const u8* rows;
    i64 page_stride, token_stride;  // bytes
    const int* page_table;
    i64 table_stride;
};

// Pages of 32 runs, one a lane, and of the 32 after them.
struct Pages {
    const int* table;
    int begin, end, lane;
    int here, ahead;

    DEVICE static Pages of(const Item& item, const Cache& cache, int lane) {
        Pages p{cache.page_table + item.request * cache.table_stride, item.begin, item.end, lane, 0, 0};
        p.here = p.fetch(0);
        p.ahead = p.fetch(WARP);
        return p;
    }
    DEVICE int fetch(int first_run) const {
        const int token = begin + (first_run + lane) * RUN_N;
        return token < end ? __ldg(table + token / PAGE_SIZE) : 0;
    }
    // Of this lane's run, counted from `token`.
    DEVICE int page(int token) {
        if (token >= begin + WARP * RUN_N) {
            begin += WARP * RUN_N;
            here = ahead;
            ahead = fetch(WARP);
        }
        const int run = (token - begin) / RUN_N + lane;
        const int first = __shfl_sync(FULL_WARP, here, run % WARP);
        const int second = __shfl_sync(FULL_WARP, ahead, run % WARP);
        return run < WARP ? first : second;
    }
};

// One warp: a tensor copy for each run.
DEVICE void load_item_by_runs(const Item& item, Pages& pages, const Cache& cache, Ring& ring, u64 l2_policy) {
    const int lane = threadIdx.x % WARP;
    for (int token = item.begin; token < item.end; token += ring.tokens(), ring.advance()) {
        const int runs = (min(ring.tokens(), item.end - token) + RUN_N - 1) / RUN_N;
        const int page = pages.page(token), mine = token + lane * RUN_N;
        ring.wait_empty();
        if (lane == 0) mbarrier_arrive_expect(ring.full(), runs * RUN_BYTES);
        __syncwarp();
        if (lane < runs)
            tensor_load(ring.address() + lane * RUN_BYTES, cache.map, 0, mine % PAGE_SIZE, 0, page, ring.full(),
                        l2_policy);
    }
}

// All loading warps: a copy for each 16 bytes. A slot's copies are waited for when the next slot's are under way.
struct Copies {
    u32 pending_full = 0;  // of the slot before

    DEVICE void load_item(const Item& item, const Cache& cache, Ring& ring, u64 l2_policy) {
        constexpr int ROW_CHUNKS = TOKEN_BYTES / 16, RUN_CHUNKS = RUN_N * ROW_CHUNKS;
        const int lane = threadIdx.x % WARP, warp = (threadIdx.x - MATH_THREADS) / WARP;
        const int* table = cache.page_table + item.request * cache.table_stride;
        for (int token = item.begin; token < item.end; token += ring.tokens(), ring.advance()) {
            const int end = min(token + ring.tokens(), item.end);
            ring.wait_empty();
            for (int run = warp; token + run * RUN_N < end; run += LOAD_WARPS) {
#pragma unroll 6
                for (int i = lane; i < RUN_CHUNKS; i += WARP) {
                    const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS, mine = token + run * RUN_N + row;
                    if (mine >= end) break;
                    const u8* source = cache.rows + __ldg(table + mine / PAGE_SIZE) * cache.page_stride +
                                       mine % PAGE_SIZE * cache.token_stride + chunk * 16;
                    async_copy(ring.address() + run * RUN_BYTES + chunk / 8 * ATOM_BYTES + row * 128 +
                                   (chunk % 8 ^ row) * 16,
                               source, l2_policy);
                }
            }
            async_commit();
            async_wait<1>();
            announce();
            pending_full = ring.full();
        }
    }
    DEVICE void finish() {
        async_wait<0>();
        announce();
    }
    DEVICE void announce() {
        fence_async_proxy();
        __syncwarp();
        if (pending_full && threadIdx.x % WARP == 0) mbarrier_arrive(pending_full);
        pending_full = 0;
    }
};

// The first query is requested before the first copy: what is requested later comes later, by as much as the copies
// of a full ring take.
DEVICE void run_load(const Cache& cache, Items items, u32 shared) {
    if (!items.any()) return;
    Ring ring{shared};
    const u64 l2_policy = l2_evict_first();
    if constexpr (COPY_ENGINE) {
        const int lane = threadIdx.x % WARP;
        if (items.item.begin < items.item.end) prefetch_tensor_map(cache.map);
        Pages pages = Pages::of(items.item, cache, lane);
        named_barrier_wait(BARRIER_QUERY, THREADS - MATH_THREADS);
        for (; items.any(); items.advance()) {
            const Pages next_pages = Pages::of(items.next, cache, lane);
            load_item_by_runs(items.item, pages, cache, ring, l2_policy);
            pages = next_pages;
        }
    } else {
        named_barrier_wait(BARRIER_QUERY, THREADS - MATH_THREADS);
        Copies copies;
        for (; items.any(); items.advance()) copies.load_item(items.item, cache, ring, l2_policy);
        copies.finish();
    }
}

}  // namespace streamla
