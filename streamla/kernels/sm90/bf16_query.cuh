// The query: bf16 rows from global to shared memory, once an item, by warps that hold the next item's in registers
// while the tiles of this one are under way.
#pragma once

#include "bf16_ring.cuh"

namespace streamla {

struct Query {
    const u16 *nope, *pe;  // bf16
    Strides nope_strides, pe_strides;
    bool aligned;  // every row of both starts at a multiple of 16 bytes
};

constexpr int CHUNK = 8;  // values in 16 bytes: what a lane copies at once
constexpr int BLOCK_CHUNKS = BLOCK_DIM / CHUNK;
constexpr int WARP_BLOCKS = WARP / BLOCK_CHUNKS;  // that a warp copies at once

// Rows that a warp of the query holds; a query of more takes further passes.
constexpr int PASS_ROWS = 6;

template <bool ALIGNED> DEVICE uint4 load_chunk(const u16* p) {
    if (ALIGNED) return load_global_now(p);
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __ldg(p + 2 * i) | static_cast<u32>(__ldg(p + 2 * i + 1)) << 16;
    return make_uint4(v[0], v[1], v[2], v[3]);
}

// This lane's part of a row: one chunk of each fourth block, and of the last block if it is one of the first eight.
struct RowChunks {
    uint4 nope[LATENT_BLOCKS / WARP_BLOCKS], pe;

    template <bool ALIGNED> DEVICE void load(const Query& q, int request, int row, int lane) {
        pe = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < LATENT_BLOCKS / WARP_BLOCKS; i++) nope[i] = pe;
        if (row >= TOTAL_ROWS) return;
        const u16* source = q.nope + q.nope_strides.at(request, row) + lane * CHUNK;
#pragma unroll
        for (int i = 0; i < LATENT_BLOCKS / WARP_BLOCKS; i++)
            nope[i] = load_chunk<ALIGNED>(source + i * WARP * CHUNK);
        if (lane < BLOCK_CHUNKS)
            pe = load_chunk<ALIGNED>(q.pe + q.pe_strides.at(request, row) + lane * CHUNK);
    }
    // With the 128-byte swizzle.
    DEVICE void store(u32 shared, int row, int lane) const {
        const u32 address = shared + Shared::QUERY + lane / BLOCK_CHUNKS * QUERY_BLOCK_BYTES + row * 128 +
                            (lane % BLOCK_CHUNKS ^ row % 8) * 16;
#pragma unroll
        for (int i = 0; i < LATENT_BLOCKS / WARP_BLOCKS; i++)
            store_shared(address + i * WARP_BLOCKS * QUERY_BLOCK_BYTES, nope[i]);
        if (lane < BLOCK_CHUNKS) store_shared(address + LATENT_BLOCKS * QUERY_BLOCK_BYTES, pe);
    }
};

template <bool ALIGNED>
DEVICE void load_rows(RowChunks (&rows)[PASS_ROWS], const Query& q, int request, int first, int lane) {
#pragma unroll
    for (int i = 0; i < PASS_ROWS; i++) rows[i].load<ALIGNED>(q, request, first + i * QUERY_WARPS, lane);
}

// Warp `warp` of the query's: rows warp, warp + QUERY_WARPS, ...
DEVICE void run_query(const Query& q, Items items, int warp, u32 shared) {
    const int lane = threadIdx.x % WARP;
    for (u32 round = 0; items.any(); items.advance(), round++) {
        for (int pass = warp; pass < ROWS; pass += PASS_ROWS * QUERY_WARPS) {
            RowChunks rows[PASS_ROWS];
            if (q.aligned)
                load_rows<true>(rows, q, items.item.request, pass, lane);
            else
                load_rows<false>(rows, q, items.item.request, pass, lane);
            if (pass == warp) {
                if (round == 0) named_barrier_arrive(BARRIER_QUERY, THREADS - MATH_THREADS);
                mbarrier_wait(shared + Shared::QUERY_EMPTY, ~round & 1);
            }
#pragma unroll
            for (int i = 0; i < PASS_ROWS; i++)
                if (pass + i * QUERY_WARPS < ROWS) rows[i].store(shared, pass + i * QUERY_WARPS, lane);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared + Shared::QUERY_FULL);
    }
}

}  // namespace streamla
