// What an attention kernel over fp8, or a merge, is compiled for and what it is given, whatever its tiles are: sizes, the plan, tensors.
#pragma once

#include "wgmma.cuh"

// Defined as 1 for fp8_ds_mla rows: 512 e4m3 latents, a fp32 scale for each 128 of them, 64 bf16 rope values.
#ifndef STREAMLA_GROUP_SCALES
#define STREAMLA_GROUP_SCALES 0
#endif

namespace streamla {

// Compile-time facts, set by the launchers.
constexpr bool GROUP_SCALES = STREAMLA_GROUP_SCALES;
constexpr int NUM_HEADS = STREAMLA_NUM_HEADS;
constexpr int SEQLEN_Q = STREAMLA_SEQLEN_Q;
constexpr int ROWS = STREAMLA_ROWS;  // query rows of a program (of a request, for a merge in a launch of its own)

constexpr int TOTAL_ROWS = NUM_HEADS * SEQLEN_Q;  // row r is query r / NUM_HEADS, head r % NUM_HEADS
constexpr int ROW_TILES = (TOTAL_ROWS + ROWS - 1) / ROWS;

constexpr int LATENT = 512;
constexpr int ROPE = 64;
constexpr int HEAD_DIM = LATENT + ROPE;
constexpr int TILE_N = 64;  // tokens

// Volatile loads, Item::load too: who loads again after the tiles need not hold it in registers meanwhile.
DEVICE int load_index(const int* p) {
    int v;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

DEVICE float load_float(const float* p) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

// One row of plan.work.
struct Item {
    int request, begin, end, seqlen, slot, split_begin, split_end;

    DEVICE static Item load(const int* work, int index) {
        const int* row = work + 8 * static_cast<i64>(index);
        Item item;
        int unused;
        asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(item.request), "=r"(item.begin), "=r"(item.end), "=r"(item.seqlen)
                     : "l"(row));
        asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(item.slot), "=r"(item.split_begin), "=r"(item.split_end), "=r"(unused)
                     : "l"(row + 4));
        return item;
    }
    // That of a program without items: in no slot.
    DEVICE static Item none() {
        Item item{};
        item.slot = -1;
        return item;
    }
    // The request alone: where its query lies.
    DEVICE static int load_request(const int* work, int index) {
        return load_index(work + 8 * static_cast<i64>(index));
    }
    DEVICE int num_tiles() const { return (end - begin + TILE_N - 1) / TILE_N; }
    DEVICE int num_splits() const { return split_end - split_begin; }
};

// A (batch, seqlen_q, num_heads, x) tensor: strides in elements, x contiguous.
struct Strides {
    i64 batch, query, head;

    DEVICE i64 at(int request, int row) const {
        return request * batch + row / NUM_HEADS * query + row % NUM_HEADS * head;
    }
};

struct Softmaxing {
    float softmax_scale;
    const float* k_scale;  // null: 1
    bool causal;

    DEVICE float value_scale() const { return k_scale ? load_float(k_scale) : 1.0f; }
    DEVICE float score_scale() const { return softmax_scale * LOG2_E * value_scale(); }
};

// What is subtracted in the exponent. -inf means that nothing was seen yet: keep -inf - (-inf) out.
DEVICE float exponent_base(float largest) { return largest == NEG_INF ? 0.0f : largest; }

}  // namespace streamla
