// decode_step: a query that is not rotated yet, and new rows that are not in the cache yet.
//
// The program that reads a new row also writes it. Two warps beside the loading one form the rows of the
// program's items: they store them to the cache, for the steps to come, and to the stage itself, for this one.
// So what is read is what was stored, and nothing waits for memory: the loading warp leaves the new rows out, and
// a stage with new rows is full once the writers have arrived, too.
//
// The bits are those of the epilogue: products and sums are rounded one by one, quotients are IEEE.
#pragma once

#include "load.cuh"
#include "query.cuh"

namespace streamla {

struct Rope {
    const i64* positions;  // null: nothing is rotated
    const float* cos_sin;  // a row: ROPE / 2 cosines, then the sines
    i64 row_stride, num_positions;
    bool neox;  // pair i is (i, i + ROPE / 2), else (2 i, 2 i + 1)

    // A token that writes no row may lie past the table: nothing is read there.
    DEVICE const float* row(int token) const {
        const i64 position = __ldg(positions + token);
        return cos_sin + min(max(position, 0ll), num_positions - 1) * row_stride;
    }
};

// One of a pair, `other` being the other one.
DEVICE float rotated(float own, float other, float cos, float sin, bool second) {
    const float a = __fmul_rn(own, cos), b = __fmul_rn(other, sin);
    return second ? __fadd_rn(a, b) : __fsub_rn(a, b);
}

// The rope part of a row is its last 8 chunks: lanes 0 to 7 hold them.
DEVICE void rotate_query(QueryRows& rows, const Rope& rope, int request, int row_begin) {
    static_assert(LATENT / CHUNK == (LANE_CHUNKS - 1) * WARP && ROPE / CHUNK == 8, "see above");
    if (!rope.positions) return;
    const int thread = forget(static_cast<int>(threadIdx.x));  // nothing below is kept from item to item
    const int warp = thread / WARP, chunk = thread % 8;
    const bool has_rope = thread % WARP < 8, upper = chunk >= 4;
#pragma unroll
    for (int i = 0; i < QueryRows::WARP_ROWS; i++) {
        const int row = min(row_begin + warp + i * MATH_WARPS, TOTAL_ROWS - 1);
        const float* table = rope.row(request * SEQLEN_Q + row / NUM_HEADS);
        uint4& words = rows.chunks[i][LANE_CHUNKS - 1];
        u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 own = pairs[j], far = __shfl_xor_sync(FULL_WARP, own, 4);
            const u32 other = rope.neox ? far : __byte_perm(own, 0, 0x1032);
            const float* low = table + (rope.neox ? chunk % 4 * CHUNK + 2 * j : chunk * CHUNK / 2 + j);
            const float* high = low + rope.neox;
            if (!has_rope) continue;
            pairs[j] = pack_bfloat2(rotated(bfloat_low(own), bfloat_low(other), __ldg(low), __ldg(low + ROPE / 2),
                                            rope.neox && upper),
                                    rotated(bfloat_high(own), bfloat_high(other), __ldg(high),
                                            __ldg(high + ROPE / 2), !rope.neox || upper));
        }
        words = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

struct NewTokens {
    const u16 *kv_c, *k_pe;  // bf16
    i64 kv_c_stride, k_pe_stride;
    bool aligned;  // every row of kv_c starts at a multiple of 16 bytes
    const i64* slot_mapping;
    i64 num_slots, reserved_slot, pool_slots;

    // -1 if no row is written.
    DEVICE i64 slot(int token) const {
        const i64 slot = token < num_slots ? __ldg(slot_mapping + token) : -1;
        return slot < pool_slots && slot != reserved_slot ? slot : -1;
    }
};

DEVICE float load_bfloat(const u16* p) { return __uint_as_float(static_cast<u32>(__ldg(p)) << 16); }

// Rounded to nearest even, saturating; NaN stays NaN.
DEVICE u32 e4m3_pair(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE u32 e4m3_quad(u32 low, u32 high, float scale) {
    return e4m3_pair(__fdiv_rn(bfloat_low(low), scale), __fdiv_rn(bfloat_high(low), scale)) |
           e4m3_pair(__fdiv_rn(bfloat_low(high), scale), __fdiv_rn(bfloat_high(high), scale)) << 16;
}

// A lane of a writer holds 8 latents of a stored row and one of its rope values: that of pair `lane`, of which the
// other writer has the other.
struct RowPart {
    uint2 latents;
    u32 rope;

    DEVICE static RowPart form(const NewTokens& tokens, const Rope& rope, int token, float scale) {
        const uint4 v = load_chunk(tokens.kv_c + token * tokens.kv_c_stride + first_latent(), tokens.aligned);
        const u16* pe = tokens.k_pe + token * tokens.k_pe_stride;
        const int place = rope_place(rope.neox);
        float value = load_bfloat(pe + place);
        if (rope.positions) {
            const float* table = rope.row(token) + threadIdx.x % WARP;
            value = rotated(value, load_bfloat(pe + (place ^ (rope.neox ? ROPE / 2 : 1))), __ldg(table),
                            __ldg(table + ROPE / 2), writer());
        }
        return {{e4m3_quad(v.x, v.y, scale), e4m3_quad(v.z, v.w, scale)}, e4m3_pair(__fdiv_rn(value, scale), 0.0f)};
    }
    // What is there already, of a token that writes no row.
    DEVICE static RowPart load(const u8* row, bool neox) {
        return {*reinterpret_cast<const uint2*>(row + first_latent()), row[LATENT + rope_place(neox)]};
    }
    DEVICE void store(u8* row, bool neox) const {
        *reinterpret_cast<uint2*>(row + first_latent()) = latents;
        row[LATENT + rope_place(neox)] = static_cast<u8>(rope);
    }
    DEVICE void store(u32 shared_row, bool neox) const {
        store_shared(shared_row + first_latent(), latents);
        store_shared_u8(shared_row + LATENT + rope_place(neox), static_cast<u8>(rope));
    }

    DEVICE static int writer() { return threadIdx.x / WARP % WRITERS; }
    DEVICE static int first_latent() { return threadIdx.x % (WRITERS * WARP) * CHUNK; }
    DEVICE static int rope_place(bool neox) {
        const int lane = threadIdx.x % WARP;
        return neox ? lane + writer() * (ROPE / 2) : 2 * lane + writer();
    }
};
static_assert(WRITERS * WARP * CHUNK == LATENT && WRITERS * WARP == ROPE && THREADS % (WRITERS * WARP) == 0,
              "the lanes of all writers hold a row");

DEVICE u8* cache_row(const Cache& cache, i64 page, int place) {
    return const_cast<u8*>(cache.rows) + page * cache.page_stride + place * cache.token_stride;
}

// Writes a row to the cache, if it has a slot; returns what is there afterwards.
DEVICE RowPart write_row(const Item& item, int token, const NewTokens& tokens, const Rope& rope,
                         const Cache& cache, float scale) {
    const int place = (item.request + 1) * SEQLEN_Q + token - item.seqlen;
    const i64 slot = tokens.slot(place);
    if (slot >= 0) {
        const RowPart part = RowPart::form(tokens, rope, place, scale);
        part.store(cache_row(cache, slot / PAGE_SIZE, slot % PAGE_SIZE), rope.neox);
        return part;
    }
    if (token < 0) return {};
    const int page = __ldg(cache.page_table + item.request * cache.table_stride + token / PAGE_SIZE);
    return RowPart::load(cache_row(cache, page, token % PAGE_SIZE), rope.neox);
}

// The new rows of a program's items. Those before a request's first token are written, too, and read by nobody.
DEVICE void run_writer(const NewTokens& tokens, const Rope& rope, const Cache& cache, const float* k_scale,
                       const int* work, const int* program_items, const Ring& ring) {
    const float scale = k_scale ? load_float(k_scale) : 1.0f;
    u32 turns = 0;  // bit s: the parity of stage s's next turn
    int position = 0;
    for (int index = load_index(program_items); index < load_index(program_items + 1); index++) {
        const Item item = Item::load(work, index);
        int token = item.seqlen - SEQLEN_Q;
        if (item.begin) token = max(item.begin, token);
        for (; token < item.end; token++) {
            const RowPart part = write_row(item, token, tokens, rope, cache, scale);
            if (token < 0) continue;
            const int tile = position + (token - item.begin) / TILE_N;
            mbarrier_wait(ring.turn(tile), turns >> tile % STAGES & 1);  // the loading warp has the stage
            part.store(ring.stage(tile) + stage_offset((token - item.begin) % TILE_N), rope.neox);
            if ((token + 1) % TILE_N && token + 1 < item.end) continue;
            turns ^= 1u << tile % STAGES;
            fence_async_proxy();
            __syncwarp();
            if (threadIdx.x % WARP < ARRIVING_LANES) mbarrier_arrive(ring.full(tile));
        }
        position += item.num_tiles();
    }
}

}  // namespace streamla
