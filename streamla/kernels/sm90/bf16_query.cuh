// The query: bf16 rows from global to shared memory, once an item.
#pragma once

#include "bf16_tile.cuh"

namespace streamla {

struct Query {
    const u16 *nope, *pe;  // bf16
    Strides nope_strides, pe_strides;
    bool aligned;  // every row of both starts at a multiple of 16 bytes
};

constexpr int CHUNK = 8;  // values in 16 bytes
constexpr int ROW_CHUNKS = HEAD_DIM / CHUNK;
constexpr int THREAD_CHUNKS = (ROWS * ROW_CHUNKS + MATH_THREADS - 1) / MATH_THREADS;

DEVICE uint4 load_chunk(const u16* p, bool aligned) {
    if (aligned) return __ldg(reinterpret_cast<const uint4*>(p));
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __ldg(p + 2 * i) | static_cast<u32>(__ldg(p + 2 * i + 1)) << 16;
    return make_uint4(v[0], v[1], v[2], v[3]);
}

// All math threads; the caller's barrier completes it.
DEVICE void load_query(const Query& q, int request, u32 shared) {
    uint4 chunks[THREAD_CHUNKS];
#pragma unroll
    for (int i = 0; i < THREAD_CHUNKS; i++) {
        const int index = threadIdx.x + i * MATH_THREADS;
        const int row = index / ROW_CHUNKS, dim = index % ROW_CHUNKS * CHUNK;
        chunks[i] = make_uint4(0, 0, 0, 0);
        if (row >= TOTAL_ROWS) continue;
        const u16* source = dim < LATENT ? q.nope + q.nope_strides.at(request, row) + dim
                                         : q.pe + q.pe_strides.at(request, row) + dim - LATENT;
        chunks[i] = load_chunk(source, q.aligned);
    }
#pragma unroll
    for (int i = 0; i < THREAD_CHUNKS; i++) {
        const int index = threadIdx.x + i * MATH_THREADS;
        const int row = index / ROW_CHUNKS, dim = index % ROW_CHUNKS * CHUNK;
        if (row >= ROWS) continue;
        const u32 swizzled = (dim % 64 / CHUNK ^ row % 8) * 16;
        store_shared(shared + Shared::QUERY + dim / 64 * QUERY_BLOCK_BYTES + row * 128 + swizzled, chunks[i]);
    }
    fence_async_proxy();
}

// B of step `step` (16 dimensions) of a block of 64.
DEVICE u64 query_descriptor(u32 shared, int block, int step) {
    return matrix_descriptor(shared + Shared::QUERY + block * QUERY_BLOCK_BYTES + step * 32, 16, 1024,
                             SWIZZLE_128);
}

}  // namespace streamla
