// The epilogue: the query, rotated, scaled and joined, and the new cache rows, in one launch (docs/epilogue.md).
// The result is epilogue_reference's to the last bit.
//
// 8 values of a row, 16 bytes of bf16, are a piece. Eight warps of a program have the latents of its rows, and a thread
// PIECES of them, all of one row; the other warps have the ropes, and a thread one piece. The first programs have cache
// rows, the others query rows.
//
// Order under programmatic dependent launch: only q_nope and q_pe may come from the grid ahead. With `early`, everything
// else is read before the wait. Nothing is stored, and the next grid is not let in, before it.
#include "epilogue_values.cuh"

namespace streamla {

constexpr Format KV_FORMAT = static_cast<Format>(STREAMLA_KV_FORMAT);
constexpr Format Q_FORMAT = static_cast<Format>(STREAMLA_Q_FORMAT);

constexpr int LATENT_THREADS = 256;
constexpr int GROUP_LANES = 128 / PIECE;  // lanes that hold a scaling group of fp8_ds_mla
constexpr int GROUP_SCALES = LATENT, DS_MLA_ROPE = LATENT + LATENT / 128 * 4;  // bytes into a row

// Whose rows start at multiples of 16 bytes.
enum Aligned { ALIGNED_QUERY = 1, ALIGNED_NEW = 2, ALIGNED_TABLE = 4, ALIGNED_CACHE = 8, ALIGNED_OUT = 16 };

// Quotient by a divisor that the host knows: magic = min(2^32 / divisor, 2^32 - 1) is at most one short.
struct Divisor {
    u32 divisor, magic;

    DEVICE u32 divide(u32 n) const {
        const u32 q = __umulhi(n, magic);
        return q + (n - q * divisor >= divisor);
    }
};

// Which of the program's rows a thread has, and which pieces: latents `piece + i * ROW_LANES`, or the one of the rope.
template <int PIECES> struct Place {
    static constexpr int ROW_LANES = LATENT_PIECES / PIECES, ROWS = LATENT_THREADS / ROW_LANES;
    int row, piece;
    bool is_rope;

    DEVICE static Place here() {
        const int t = threadIdx.x, r = t - LATENT_THREADS;
        if (r < 0) return {t / ROW_LANES, t % ROW_LANES, false};
        return {r / ROPE_PIECES, r % ROPE_PIECES, true};
    }
    DEVICE Where latent(int i) const { return Where::latent(piece + i * ROW_LANES); }
};

struct Halves {
    const u16 *latent, *rope;
    i64 latent_token, latent_head, rope_token, rope_head;

    DEVICE const u16* row(u32 token, u32 head, bool is_rope) const {
        return is_rope ? rope + token * rope_token + head * rope_head
                       : latent + token * latent_token + head * latent_head;
    }
};

// A piece of a rope, rotated, as it is stored.
template <Format FORMAT>
DEVICE void write_rope(u8* row, const Where& where, const Piece& piece, const Rotation& rotation, int kind,
                       const Scale& scale, bool aligned) {
    if (FORMAT == BF16 && kind == NONE) {
        Stored<FORMAT>::of(piece, scale).write(row, where, aligned);
        return;
    }
    float v[PIECE];
    rotation.apply(v, piece, kind);
    Stored<FORMAT>::of(v, scale).write(row, where, aligned);
}

// fp8_ds_mla: the exponent of the power of two, 2^ceil(log2(max(amax / 448, 1e-4))), that scales a group's 128 values.
DEVICE u32 group_exponent(const Piece& piece) {
    constexpr u32 LARGEST = 0x7f7f, INFINITE = 0x7f80;  // bf16
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        const u32 magnitude = piece.pairs[i / 2] >> 16 * (i % 2) & 0x7fff;
        largest = max(largest, magnitude > INFINITE ? 0 : min(magnitude, LARGEST));
    }
#pragma unroll
    for (int lanes = GROUP_LANES / 2; lanes; lanes /= 2)
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, lanes));
    const float needed = fmaxf(__fdiv_rn(__uint_as_float(largest << 16), 448.0f), 1e-4f);
    // Up to the next power of two: any bit of the mantissa carries into the exponent.
    return __float_as_uint(needed) + 0x7fffff >> 23;
}
DEVICE float power_of_two(u32 biased_exponent) { return __uint_as_float(biased_exponent << 23); }

struct Cache {
    u8* rows;
    i64 page_stride, token_stride;  // bytes
    Divisor page_size;
    const i64* slot_mapping;
    i64 num_slots, pool_slots, reserved_slot;
    const float* scale;

    DEVICE bool has(i64 slot) const { return slot >= 0 && slot < pool_slots && slot != reserved_slot; }
    // Of a slot of the pool, which has fewer than 2^32: rows of 576 bytes would fill more than 2 TB.
    DEVICE u8* row(i64 slot) const {
        const u32 used = static_cast<u32>(slot), page = page_size.divide(used);
        return rows + page * page_stride + (used - page * page_size.divisor) * token_stride;
    }
};

// fp8_ds_mla: latents scaled by group, and the scales. All lanes of a warp call it; `writes`: this one has a row.
DEVICE void write_group(u8* row, const Where& where, const Piece& piece, bool writes, bool aligned) {
    const u32 exponent = group_exponent(piece);
    if (!writes) return;
    float v[PIECE];
    piece.widen(v);
    // The inverse of a power of two, so the product is rounded as the quotient is.
    Stored<E4M3FN>::of(v, power_of_two(254 - exponent)).write(row, where, aligned);
    const int group = where.first / 128;
    if (where.first % 128 == 0)
        asm volatile("st.global.f32 [%0], %1;"
                     :: "l"(row + GROUP_SCALES + group * 4), "f"(power_of_two(exponent)) : "memory");
}

template <int PIECES>
DEVICE void write_cache_rows(u32 block, const Halves& source, const Cache& cache, const Table& table, int aligned,
                             bool early) {
    using Place = Place<PIECES>;
    const Place place = Place::here();
    const Where rope = Where::rope(place.piece, table.rope);
    const u32 token = block * Place::ROWS + place.row;
    const bool exists = token < cache.num_slots;
    if (!early) wait_for_previous_grid();
    i64 slot = -1;
    Piece pieces[PIECES] = {};
    Rotation rotation;
    float scale_value = 1.0f;
    if (exists) {
        const u16* row = source.row(token, 0, place.is_rope);
        slot = load_i64(cache.slot_mapping + token);
        if (place.is_rope) {
            pieces[0] = Piece::load(row, rope, aligned & ALIGNED_NEW);
            if (table.rope != NONE) rotation.load(table, token, place.piece);
        } else {
#pragma unroll
            for (int i = 0; i < PIECES; i++) pieces[i] = Piece::load(row, place.latent(i), aligned & ALIGNED_NEW);
        }
        if (cache.scale) scale_value = load_f32(cache.scale);
    }
    // What was loaded is not used before the wait: it may still be on its way.
    if (early) wait_for_previous_grid();
    allow_next_grid();
    const Scale scale = Scale::of(cache.scale != nullptr, scale_value);
    const bool writes = cache.has(slot);
    u8* row = cache.row(slot);
    if constexpr (KV_FORMAT == DS_MLA) {
        if (place.is_rope && writes)
            write_rope<BF16>(row + DS_MLA_ROPE, rope, pieces[0], rotation, table.rope, scale, aligned & ALIGNED_CACHE);
        if (!place.is_rope) {
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                write_group(row, place.latent(i), pieces[i], writes, aligned & ALIGNED_CACHE);
        }
    } else if (writes) {
        using Row = Stored<KV_FORMAT>;
        if (place.is_rope) {
            write_rope<KV_FORMAT>(row + LATENT * Row::VALUE_BYTES, rope, pieces[0], rotation, table.rope, scale,
                                  aligned & ALIGNED_CACHE);
        } else {
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                Row::of(pieces[i], scale).write(row, place.latent(i), aligned & ALIGNED_CACHE);
        }
    }
    stamp(STAMP_DONE);
}

struct Query {
    u8* out;
    i64 token_stride, head_stride;  // bytes
    const float* scale;
    Divisor heads;
    u32 rows;  // of all tokens
};

template <int PIECES>
DEVICE void write_query(u32 block, const Halves& source, const Query& query, const Table& table, int aligned,
                        bool early) {
    using Row = Stored<Q_FORMAT>;
    using Place = Place<PIECES>;
    const Place place = Place::here();
    const Where rope = Where::rope(place.piece, table.rope);
    const u32 index = block * Place::ROWS + place.row, token = query.heads.divide(index);
    const u32 head = index - token * query.heads.divisor;
    const bool exists = index < query.rows;
    const u16* from = source.row(token, head, place.is_rope);
    u8* to = query.out + token * query.token_stride + head * query.head_stride;
    const bool has_scale = Q_FORMAT != BF16 && query.scale;
    if (!early) wait_for_previous_grid();
    Rotation rotation;
    if (exists && place.is_rope && table.rope != NONE) rotation.load(table, token, place.piece);
    const float scale_value = has_scale ? load_f32(query.scale) : 1.0f;
    if (early) wait_for_previous_grid();
    allow_next_grid();
    if (!exists) return;
    if (place.is_rope) {
        const Piece piece = Piece::load(from, rope, aligned & ALIGNED_QUERY);
        write_rope<Q_FORMAT>(to + LATENT * Row::VALUE_BYTES, rope, piece, rotation, table.rope,
                             Scale::of(has_scale, scale_value), aligned & ALIGNED_OUT);
    } else {
        Piece pieces[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; i++) pieces[i] = Piece::load(from, place.latent(i), aligned & ALIGNED_QUERY);
        const Scale scale = Scale::of(has_scale, scale_value);
#pragma unroll
        for (int i = 0; i < PIECES; i++) Row::of(pieces[i], scale).write(to, place.latent(i), aligned & ALIGNED_OUT);
    }
    stamp(STAMP_DONE);
}

}  // namespace streamla

using namespace streamla;

#define MLA_EPILOGUE(PIECES)                                                                                           \
    extern "C" __global__ void __launch_bounds__(LATENT_THREADS + 32 * PIECES) mla_epilogue_##PIECES(                  \
        const u16* q_nope, i64 q_nope_token, i64 q_nope_head, const u16* q_pe, i64 q_pe_token, i64 q_pe_head,          \
        const u16* kv_c, i64 kv_c_token, const u16* k_pe, i64 k_pe_token, u8* kv_cache, i64 page_stride,               \
        i64 token_stride, u32 page_size, u32 page_magic, i64 pool_slots, const i64* slot_mapping, i64 num_slots,       \
        i64 reserved_slot, const float* k_scale, const i64* positions, const float* cos_sin, i64 cos_sin_stride,       \
        i64 num_positions, int rope, u8* q_out, i64 q_out_token, i64 q_out_head, const float* q_scale, u32 num_heads,  \
        u32 heads_magic, u32 query_rows, u32 cache_programs, int aligned, int early) {                                 \
        const Table table{positions, cos_sin, cos_sin_stride, num_positions, rope, (aligned & ALIGNED_TABLE) != 0};    \
        if (blockIdx.x < cache_programs) {                                                                             \
            const Cache cache{kv_cache,     page_stride, token_stride, {page_size, page_magic},                        \
                              slot_mapping, num_slots,   pool_slots,   reserved_slot,                                  \
                              k_scale};                                                                                \
            write_cache_rows<PIECES>(blockIdx.x, {kv_c, k_pe, kv_c_token, 0, k_pe_token, 0}, cache, table, aligned,    \
                                     early);                                                                           \
        } else {                                                                                                       \
            const Query query{q_out, q_out_token, q_out_head, q_scale, {num_heads, heads_magic}, query_rows};          \
            const Halves source{q_nope, q_pe, q_nope_token, q_nope_head, q_pe_token, q_pe_head};                       \
            write_query<PIECES>(blockIdx.x - cache_programs, source, query, table, aligned, early);                    \
        }                                                                                                              \
    }

MLA_EPILOGUE(1)
MLA_EPILOGUE(2)
MLA_EPILOGUE(4)
