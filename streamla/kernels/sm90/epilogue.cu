// The epilogue: the query, rotated, scaled and joined, and the new cache rows, in one launch (docs/epilogue.md).
// The result is epilogue_reference's to the last bit.
//
// 8 values of a row, 16 bytes of bf16, are a piece. Eight warps of a program have the latents of its rows, and a thread
// PIECES of them, all of one row; the other warps have the ropes, and a thread one piece. The first programs have cache
// rows, the others query rows.
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
constexpr int LATENT_THREADS = 256;
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

// Where a piece's two halves of 4 values lie in a row: side by side; or apart, the first and the second of neox's pairs.
struct Where {
    int first, second;
    bool apart;

    DEVICE static Where latent(int piece) { return {piece * PIECE, piece * PIECE + PIECE / 2, false}; }
    DEVICE static Where rope(int piece, int rope) {
        if (rope != NEOX) return latent(piece);
        return {piece * (PIECE / 2), (ROPE_DIM + piece * PIECE) / 2, true};
    }
};

struct Piece {
    u32 pairs[4];  // bf16

    DEVICE static Piece load(const u16* row, const Where& where, bool aligned) {
        Piece v;
        const u16 *first = row + where.first, *second = row + where.second;
        if (aligned && !where.apart) {
            asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.pairs[0]), "=r"(v.pairs[1]), "=r"(v.pairs[2]), "=r"(v.pairs[3]) : "l"(first));
        } else if (aligned) {
            asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(v.pairs[0]), "=r"(v.pairs[1]) : "l"(first));
            asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(v.pairs[2]), "=r"(v.pairs[3]) : "l"(second));
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u16* p = (i < 2 ? first : second) + i % 2 * 2;
                v.pairs[i] = load_u16(p) | load_u16(p + 1) << 16;
            }
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
};

DEVICE void store(u8* row, const Where& where, const u32 (&v)[4], bool aligned) {
    u8 *first = row + 2 * where.first, *second = row + 2 * where.second;
    if (aligned && !where.apart) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "l"(first), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
    } else if (aligned) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(first), "r"(v[0]), "r"(v[1]) : "memory");
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(second), "r"(v[2]), "r"(v[3]) : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            asm volatile("st.global.b16 [%0], %1;"
                         :: "l"((i < 4 ? first : second) + i % 4 * 2), "h"(static_cast<u16>(v[i / 2] >> 16 * (i % 2)))
                         : "memory");
    }
}
DEVICE void store(u8* row, const Where& where, const u32 (&v)[2], bool aligned) {
    u8 *first = row + where.first, *second = row + where.second;
    if (aligned && !where.apart) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(first), "r"(v[0]), "r"(v[1]) : "memory");
    } else if (aligned) {
        asm volatile("st.global.b32 [%0], %1;" :: "l"(first), "r"(v[0]) : "memory");
        asm volatile("st.global.b32 [%0], %1;" :: "l"(second), "r"(v[1]) : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            asm volatile("st.global.b8 [%0], %1;"
                         :: "l"((i < 4 ? first : second) + i % 4), "r"(v[i / 4] >> 8 * (i % 4)) : "memory");
    }
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

// IEEE quotients, as far as fp8 can tell: with the rounded inverse, two steps of Newton's iteration give the correctly
// rounded quotient wherever nothing under- or overflows. Powers of two keep the scale far from both; a value that
// overflows with them has a quotient that saturates, one that vanishes has 0.
DEVICE void divide(float (&v)[PIECE], float scale) {
    const float magnitude = fabsf(scale);
    const float shift = magnitude < 0x1p-60f ? 0x1p100f : magnitude > 0x1p60f ? 0x1p-100f : 1.0f;
    const float shifted_scale = __fmul_rn(scale, shift), inverse = __frcp_rn(shifted_scale);
    // 0, infinity, NaN: the product is the quotient, and stays it.
    const bool ordinary = magnitude > 0.0f && magnitude < __uint_as_float(0x7f800000);
    const float divisor = ordinary ? shifted_scale : 0.0f;
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        const float dividend = __fmul_rn(v[i], shift), product = __fmul_rn(dividend, inverse);
        float q = product;
#pragma unroll
        for (int step = 0; step < 2; step++) q = __fmaf_rn(__fmaf_rn(-q, divisor, dividend), inverse, q);
        // An iteration from infinity or NaN, or from -0, would go astray.
        v[i] = copysignf(fabsf(product) < 1e6f ? q : product, product);
    }
}

// What fp8 values are divided by. Nearly always the products with a bit less and a bit more than the inverse, between
// which the quotient lies, have the same fp8 value. The inverse of a power of two is exact: then both are the quotient.
struct Scale {
    bool exists;
    float value, low, high;

    DEVICE static Scale of(bool exists, float value) {
        if (!exists) return {false, 1.0f, 1.0f, 1.0f};
        const float magnitude = fabsf(value), inverse = __frcp_rn(value);
        if (!(magnitude >= 0x1p-60f && magnitude <= 0x1p60f)) return {true, value, 1.0f, -1.0f};  // never the same
        if (!(__float_as_uint(value) & 0x7fffff)) return {true, value, inverse, inverse};
        return {true, value, __fmul_rn(inverse, 1.0f - 0x1p-21f), __fmul_rn(inverse, 1.0f + 0x1p-21f)};
    }
};

// Values as a format stores them: nearest even; fp8 saturates and keeps NaN.
template <Format FORMAT> struct Stored {
    static constexpr int VALUE_BYTES = FORMAT == BF16 ? 2 : 1, WORDS = 2 * VALUE_BYTES;
    u32 words[WORDS];

    // Of the products with `factor`.
    DEVICE static Stored of(const float (&v)[PIECE], float factor) {
        float product[PIECE];
#pragma unroll
        for (int i = 0; i < PIECE; i++) product[i] = __fmul_rn(v[i], factor);
        return of(product);
    }
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
    // Of the quotients; without a scale, of the values.
    DEVICE static Stored of(float (&v)[PIECE], const Scale& scale) {
        if (FORMAT == BF16 || !scale.exists) return of(v);
        if constexpr (FORMAT == E4M3FN) {
            const Stored low = of(v, scale.low);
            if (scale.low == scale.high) return low;
            const Stored high = of(v, scale.high);
            if (low.words[0] == high.words[0] && low.words[1] == high.words[1]) return low;
        }
        divide(v, scale.value);
        return of(v);
    }
    // A piece that is not rotated. A bf16 one stays as it is.
    DEVICE static Stored of(const Piece& piece, const Scale& scale) {
        if constexpr (FORMAT == BF16) {
            Stored s;
#pragma unroll
            for (int i = 0; i < 4; i++) s.words[i] = piece.pairs[i];
            return s;
        } else {
            float v[PIECE];
            piece.widen(v);
            return of(v, scale);
        }
    }
    DEVICE void write(u8* row, const Where& where, bool aligned) const { store(row, where, words, aligned); }
};

// ---- rotation

struct Table {
    const i64* positions;
    const float* cos_sin;  // rows of 32 cosines, then 32 sines
    i64 stride, rows;
    int rope;  // Rope
    bool aligned;
};

// What the 4 pairs of a piece are rotated by.
struct Rotation {
    float cos[PIECE / 2], sin[PIECE / 2];

    DEVICE static void load4(float (&v)[4], const float* p, bool aligned) {
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
        const float* row = table.cos_sin + position * table.stride + piece * (PIECE / 2);
        load4(cos, row, table.aligned);
        load4(sin, row + ROPE_DIM / 2, table.aligned);
    }
    // Every product and sum is rounded by itself.
    DEVICE void apply(float (&v)[PIECE], const Piece& piece, int kind) const {
        piece.widen(v);
        if (kind == NONE) return;
        if (kind == NEOX) {
#pragma unroll
            for (int i = 0; i < PIECE / 2; i++) rotate(v[i], v[PIECE / 2 + i], i);
        } else {
#pragma unroll
            for (int i = 0; i < PIECE / 2; i++) rotate(v[2 * i], v[2 * i + 1], i);
        }
    }
    DEVICE void rotate(float& a, float& b, int i) const {
        const float first = __fsub_rn(__fmul_rn(a, cos[i]), __fmul_rn(b, sin[i]));
        b = __fadd_rn(__fmul_rn(b, cos[i]), __fmul_rn(a, sin[i]));
        a = first;
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
