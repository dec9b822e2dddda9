// The epilogue's values: 8 of a row at a time, loaded, divided by a scale, rotated, rounded to a format, stored.
#pragma once

#include "ptx.cuh"

namespace streamla {

enum Format { BF16, E4M3FN, E4M3FNUZ, DS_MLA };
enum Rope { NONE, INTERLEAVED, NEOX };

constexpr int LATENT = 512, PIECE = 8;
constexpr int LATENT_PIECES = LATENT / PIECE, ROPE_DIM = 64, ROPE_PIECES = ROPE_DIM / PIECE;

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

}  // namespace streamla
