// The epilogue: the query, rotated, scaled and joined, and the new cache rows, in one launch (docs/epilogue.md).
// The result is epilogue_reference's to the last bit.
//
// A thread has 8 values of a row, 16 bytes of bf16; a program has 4 rows: eight warps their latents, one their ropes.
// The first programs have cache rows, the others query rows.
//
// Order under programmatic dependent launch: only q_nope and q_pe may come from the grid ahead. With `early`, everything
// else is read before the wait. Nothing is stored, and the next grid is not let in, before it.
#include "ptx.cuh"

namespace streamla {

enum Format { BF16, E4M3FN, E4M3FNUZ, DS_MLA };
enum Rope { NONE, INTERLEAVED, NEOX };
constexpr Format KV_FORMAT = static_cast<Format>(STREAMLA_KV_FORMAT);
constexpr Format Q_FORMAT = static_cast<Format>(STREAMLA_Q_FORMAT);

constexpr int LATENT = 512, PIECE = 8;
constexpr int LATENT_PIECES = LATENT / PIECE, ROPE_DIM = 64, ROPE_PIECES = ROPE_DIM / PIECE;
constexpr int BLOCK_ROWS = 4, LATENT_THREADS = BLOCK_ROWS * LATENT_PIECES;
constexpr int THREADS = BLOCK_ROWS * (LATENT_PIECES + ROPE_PIECES);
constexpr int GROUP_LANES = 128 / PIECE;  // lanes that hold a scaling group of fp8_ds_mla
constexpr int GROUP_SCALES = LATENT, DS_MLA_ROPE = LATENT + LATENT / 128 * 4;  // bytes into a row

// Whose rows start at multiples of 16 bytes.
enum Aligned { ALIGNED_QUERY = 1, ALIGNED_NEW = 2, ALIGNED_TABLE = 4, ALIGNED_CACHE = 8, ALIGNED_OUT = 16 };

// ---- memory. Volatile: none of these may move across the wait.

DEVICE u32 load_u16(const u16* p) {
    u16 v;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
DEVICE i64 load_i64(const i64* p) {
    i64 v;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
DEVICE float load_f32(const float* p) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

struct Piece {
    u32 pairs[4];  // bf16

    DEVICE static Piece load(const u16* p, bool aligned) {
        Piece v;
        if (aligned) {
            asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.pairs[0]), "=r"(v.pairs[1]), "=r"(v.pairs[2]), "=r"(v.pairs[3]) : "l"(p));
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) v.pairs[i] = load_u16(p + 2 * i) | load_u16(p + 2 * i + 1) << 16;
        }
        return v;
    }
    DEVICE void widen(float (&v)[PIECE]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i] = bfloat_low(pairs[i]);
            v[2 * i + 1] = bfloat_high(pairs[i]);
        }
    }
    // The piece of another lane.
    DEVICE Piece exchanged(int lanes) const {
        Piece other;
#pragma unroll
        for (int i = 0; i < 4; i++) other.pairs[i] = __shfl_xor_sync(FULL_WARP, pairs[i], lanes);
        return other;
    }
};

DEVICE void store(u8* p, const u32 (&v)[4], bool aligned) {
    if (aligned) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("st.global.b16 [%0], %1;"
                     :: "l"(p + 2 * i), "h"(static_cast<u16>(v[i / 2] >> 16 * (i % 2))) : "memory");
}
DEVICE void store(u8* p, const u32 (&v)[2], bool aligned) {
    if (aligned) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(p), "r"(v[0]), "r"(v[1]) : "memory");
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("st.global.b8 [%0], %1;" :: "l"(p + i), "r"(v[i / 4] >> 8 * (i % 4)) : "memory");
}

// ---- formats

// Byte of e4m3fnuz, rounded in integers: the hardware has no such conversion.
DEVICE u32 to_e4m3fnuz(float value) {
    // Patterns of float32: the largest value, the least normal one, and the power of two whose last place is the
    // format's least value, so that adding it rounds to a multiple.
    constexpr u32 LARGEST = 0x43700000, LEAST_NORMAL = 0x3c000000, ROUNDER = 0x46000000;
    constexpr u32 BIAS = 119;  // difference of the exponent biases
    const u32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80, magnitude = min(bits & 0x7fffffff, LARGEST);
    const u32 normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1) >> 20) - (BIAS << 3);
    const u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(ROUNDER))) - ROUNDER;
    u32 code = magnitude < LEAST_NORMAL ? subnormal : normal;
    code = code ? code | sign : 0;                         // there is no negative zero:
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x80 : code;  // that is the one NaN
}

// Values as a format stores them: nearest even; fp8 saturates and keeps NaN.
template <Format FORMAT> struct Stored {
    static constexpr int VALUE_BYTES = FORMAT == BF16 ? 2 : 1;
    u32 words[2 * VALUE_BYTES];

    DEVICE static Stored of(const float (&v)[PIECE]) {
        Stored s;
        if constexpr (FORMAT == BF16) {
#pragma unroll
            for (int i = 0; i < 4; i++) s.words[i] = pack_bfloat2(v[2 * i], v[2 * i + 1]);
        } else if constexpr (FORMAT == E4M3FNUZ) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                s.words[i] = to_e4m3fnuz(v[4 * i]) | to_e4m3fnuz(v[4 * i + 1]) << 8 |
                             to_e4m3fnuz(v[4 * i + 2]) << 16 | to_e4m3fnuz(v[4 * i + 3]) << 24;
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++)
                asm("{\n"
                    ".reg .b16 low, high;\n"
                    "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
                    "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
                    "mov.b32 %0, {low, high};\n"
                    "}" : "=r"(s.words[i]) : "f"(v[4 * i]), "f"(v[4 * i + 1]), "f"(v[4 * i + 2]), "f"(v[4 * i + 3]));
        }
        return s;
    }
    // A piece that is not rotated. A bf16 one stays as it is.
    DEVICE static Stored of(const Piece& piece, const float* scale_pointer, float scale) {
        if constexpr (FORMAT == BF16) {
            Stored s;
#pragma unroll
            for (int i = 0; i < 4; i++) s.words[i] = piece.pairs[i];
            return s;
        } else {
            float v[PIECE];
            piece.widen(v);
            return of(v, scale_pointer, scale);
        }
    }
    // Of the quotients value / scale; without a scale, of the values.
    DEVICE static Stored of(float (&v)[PIECE], const float* scale_pointer, float scale) {
        if (FORMAT != BF16 && scale_pointer) {
#pragma unroll
            for (int i = 0; i < PIECE; i++) v[i] = __fdiv_rn(v[i], scale);
        }
        return of(v);
    }
    DEVICE void write(u8* p, bool aligned) const { store(p, words, aligned); }
};

// ---- rotation

struct Table {
    const i64* positions;
    const float* cos_sin;  // rows of 32 cosines, then 32 sines
    i64 stride, rows;
    int rope;  // Rope
    bool aligned;
};

// What a piece of a rope is rotated by: v * cos + partner * sin, where the first of a pair has -sin.
struct Rotation {
    float cos[PIECE], sin[PIECE];

    DEVICE static void load4(float* v, const float* p, bool aligned) {
        if (aligned) {
            asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(p));
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = load_f32(p + i);
        }
    }
    // Nothing is read outside the table: the nearest row is taken.
    DEVICE void load(const Table& table, u32 token, int piece) {
        const i64 position = min(max(load_i64(table.positions + token), 0ll), table.rows - 1);
        const float* row = table.cos_sin + position * table.stride;
        if (table.rope == INTERLEAVED) {
            float c[4], s[4];
            load4(c, row + piece * 4, table.aligned);
            load4(s, row + ROPE_DIM / 2 + piece * 4, table.aligned);
#pragma unroll
            for (int i = 0; i < PIECE; i++) {
                cos[i] = c[i / 2];
                sin[i] = i % 2 ? s[i / 2] : -s[i / 2];
            }
        } else {
            const float* first = row + piece % (ROPE_PIECES / 2) * PIECE;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                load4(cos + 4 * i, first + 4 * i, table.aligned);
                load4(sin + 4 * i, first + ROPE_DIM / 2 + 4 * i, table.aligned);
            }
#pragma unroll
            for (int i = 0; i < PIECE; i++) sin[i] = piece < ROPE_PIECES / 2 ? -sin[i] : sin[i];
        }
    }
    // Every product and sum is rounded by itself. All lanes of the rope warp call it.
    DEVICE void apply(float (&v)[PIECE], const Piece& piece, int rope) const {
        float own[PIECE], other[PIECE];
        piece.widen(own);
        if (rope == NEOX) {
            piece.exchanged(ROPE_PIECES / 2).widen(other);
        } else {
#pragma unroll
            for (int i = 0; i < PIECE; i++) other[i] = own[i ^ 1];
        }
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            v[i] = __fadd_rn(__fmul_rn(own[i], cos[i]), __fmul_rn(other[i], sin[i]));
    }
};

// ---- rows

// Quotient by a divisor that the host knows: magic = min(2^32 / divisor, 2^32 - 1) is at most one short.
struct Divisor {
    u32 divisor, magic;

    DEVICE u32 divide(u32 n) const {
        const u32 q = __umulhi(n, magic);
        return q + (n - q * divisor >= divisor);
    }
};

// The piece of this thread: of which of the program's rows, and where.
struct Place {
    int row, piece;
    bool is_rope;

    DEVICE static Place here() {
        const int t = threadIdx.x, r = t - LATENT_THREADS;
        if (r < 0) return {t / LATENT_PIECES, t % LATENT_PIECES, false};
        return {r / ROPE_PIECES, r % ROPE_PIECES, true};
    }
};

struct Halves {
    const u16 *latent, *rope;
    i64 latent_token, latent_head, rope_token, rope_head;

    DEVICE const u16* at(u32 token, u32 head, const Place& place) const {
        return (place.is_rope ? rope + token * rope_token + head * rope_head
                              : latent + token * latent_token + head * latent_head) + place.piece * PIECE;
    }
};

struct Cache {
    u8* rows;
    i64 page_stride, token_stride;  // bytes
    Divisor page_size;
    const i64* slot_mapping;
    i64 num_slots, pool_slots, reserved_slot;
    const float* scale;
};

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

// What one thread stores of a cache row.
template <Format FORMAT> struct CachePiece {
    static constexpr Format LATENT_FORMAT = FORMAT == DS_MLA ? E4M3FN : FORMAT;
    static constexpr Format ROPE_FORMAT = FORMAT == DS_MLA ? BF16 : FORMAT;
    Stored<LATENT_FORMAT> latent;
    Stored<ROPE_FORMAT> rope;
    float group_scale;

    DEVICE void make(const Piece& piece, const Place& place, const Rotation& rotation, int kind, const float* scale_pointer) {
        const float scale = FORMAT != DS_MLA && scale_pointer ? load_f32(scale_pointer) : 1.0f;
        if (place.is_rope) {
            if (kind == NONE) {
                rope = Stored<ROPE_FORMAT>::of(piece, scale_pointer, scale);
            } else {
                float v[PIECE];
                rotation.apply(v, piece, kind);
                rope = Stored<ROPE_FORMAT>::of(v, scale_pointer, scale);
            }
        } else if constexpr (FORMAT == DS_MLA) {
            const u32 exponent = group_exponent(piece);
            group_scale = power_of_two(exponent);
            float v[PIECE];
            piece.widen(v);
            // The inverse of a power of two, so the product is rounded as the quotient is.
#pragma unroll
            for (int i = 0; i < PIECE; i++) v[i] = __fmul_rn(v[i], power_of_two(254 - exponent));
            latent = Stored<LATENT_FORMAT>::of(v);
        } else {
            latent = Stored<LATENT_FORMAT>::of(piece, scale_pointer, scale);
        }
    }
    DEVICE void write(u8* row, const Place& place, bool aligned) const {
        if (place.is_rope) {
            constexpr int BEGIN = FORMAT == DS_MLA ? DS_MLA_ROPE : LATENT * Stored<ROPE_FORMAT>::VALUE_BYTES;
            rope.write(row + BEGIN + place.piece * sizeof(rope), aligned);
            return;
        }
        latent.write(row + place.piece * sizeof(latent), aligned);
        if (FORMAT == DS_MLA && place.piece % GROUP_LANES == 0)
            asm volatile("st.global.f32 [%0], %1;"
                         :: "l"(row + GROUP_SCALES + place.piece / GROUP_LANES * 4), "f"(group_scale) : "memory");
    }
};

DEVICE void write_cache_rows(u32 block, const Halves& source, const Cache& cache, const Table& table, int aligned,
                             bool early) {
    const Place place = Place::here();
    const u32 token = block * BLOCK_ROWS + place.row;
    const bool exists = token < cache.num_slots;
    if (!early) wait_for_previous_grid();
    i64 slot = -1;
    Piece piece = {};
    Rotation rotation;
    if (exists) {
        slot = load_i64(cache.slot_mapping + token);
        piece = Piece::load(source.at(token, 0, place), aligned & ALIGNED_NEW);
        if (place.is_rope && table.rope != NONE) rotation.load(table, token, place.piece);
    }
    CachePiece<KV_FORMAT> stored;
    stored.make(piece, place, rotation, table.rope, cache.scale);
    // A pool has fewer than 2^32 slots: rows of 576 bytes would fill more than 2 TB.
    const u32 used = static_cast<u32>(slot), page = cache.page_size.divide(used);
    u8* row = cache.rows + page * cache.page_stride + (used - page * cache.page_size.divisor) * cache.token_stride;
    if (early) wait_for_previous_grid();
    allow_next_grid();
    if (slot >= 0 && slot < cache.pool_slots && slot != cache.reserved_slot)
        stored.write(row, place, aligned & ALIGNED_CACHE);
    stamp(STAMP_DONE);
}

struct Query {
    u8* out;
    i64 token_stride, head_stride;  // bytes
    const float* scale;
    Divisor heads;
    u32 rows;  // of all tokens
};

template <int THREAD_ROWS>
DEVICE void write_query(u32 block, const Halves& source, const Query& query, const Table& table, int aligned,
                        bool early) {
    const Place place = Place::here();
    const u32 first = block * (BLOCK_ROWS * THREAD_ROWS) + place.row;
    const bool rotates = place.is_rope && table.rope != NONE;
    if (!early) wait_for_previous_grid();
    Rotation rotation;
    if (rotates && first < query.rows) rotation.load(table, query.heads.divide(first), place.piece);
    const float scale = Q_FORMAT != BF16 && query.scale ? load_f32(query.scale) : 1.0f;
    if (early) wait_for_previous_grid();
    allow_next_grid();

    Piece pieces[THREAD_ROWS];
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        const u32 row = first + i * BLOCK_ROWS, token = query.heads.divide(row);
        pieces[i] = {};
        if (row < query.rows)
            pieces[i] = Piece::load(source.at(token, row - token * query.heads.divisor, place), aligned & ALIGNED_QUERY);
    }
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        const u32 row = first + i * BLOCK_ROWS, token = query.heads.divide(row);
        const u32 head = row - token * query.heads.divisor;
        Stored<Q_FORMAT> stored;
        if (rotates) {
            if (i > 0 && row < query.rows) rotation.load(table, token, place.piece);
            float v[PIECE];
            rotation.apply(v, pieces[i], table.rope);
            stored = Stored<Q_FORMAT>::of(v, query.scale, scale);
        } else {
            stored = Stored<Q_FORMAT>::of(pieces[i], query.scale, scale);
        }
        const int piece = place.is_rope ? LATENT_PIECES + place.piece : place.piece;
        if (row < query.rows)
            stored.write(query.out + token * query.token_stride + head * query.head_stride + piece * sizeof(stored),
                         aligned & ALIGNED_OUT);
    }
    stamp(STAMP_DONE);
}

}  // namespace streamla

using namespace streamla;

#define MLA_EPILOGUE(THREAD_ROWS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) mla_epilogue_##THREAD_ROWS(                                  \
        const u16* q_nope, i64 q_nope_token, i64 q_nope_head, const u16* q_pe, i64 q_pe_token, i64 q_pe_head,          \
        const u16* kv_c, i64 kv_c_token, const u16* k_pe, i64 k_pe_token, u8* kv_cache, i64 page_stride,               \
        i64 token_stride, u32 page_size, u32 page_magic, i64 pool_slots, const i64* slot_mapping, i64 num_slots,       \
        i64 reserved_slot, const float* k_scale, const i64* positions, const float* cos_sin, i64 cos_sin_stride,       \
        i64 num_positions, int rope, u8* q_out, i64 q_out_token, i64 q_out_head, const float* q_scale, u32 num_heads,  \
        u32 heads_magic, u32 query_rows, u32 cache_blocks, int aligned, int early) {                                   \
        const Table table{positions, cos_sin, cos_sin_stride, num_positions, rope, (aligned & ALIGNED_TABLE) != 0};    \
        if (blockIdx.x < cache_blocks) {                                                                               \
            const Cache cache{kv_cache,     page_stride, token_stride, {page_size, page_magic},                        \
                              slot_mapping, num_slots,   pool_slots,   reserved_slot,                                  \
                              k_scale};                                                                                \
            write_cache_rows(blockIdx.x, {kv_c, k_pe, kv_c_token, 0, k_pe_token, 0}, cache, table, aligned, early);    \
        } else {                                                                                                       \
            const Query query{q_out, q_out_token, q_out_head, q_scale, {num_heads, heads_magic}, query_rows};          \
            const Halves source{q_nope, q_pe, q_nope_token, q_nope_head, q_pe_token, q_pe_head};                       \
            write_query<THREAD_ROWS>(blockIdx.x - cache_blocks, source, query, table, aligned, early);                 \
        }                                                                                                              \
    }

MLA_EPILOGUE(1)
MLA_EPILOGUE(2)
MLA_EPILOGUE(4)
