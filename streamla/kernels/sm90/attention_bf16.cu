// MLA decode attention for 1 to 32 query rows over a bf16 cache (1152-byte rows), and its merge.
//
// A program walks its items: the query goes to shared memory, tile after tile is accumulated, the result is
// stored. docs/attention-sm90-bf16.md explains the pipeline and its budget.

#include "bf16_load.cuh"
#include "bf16_merge.cuh"
#include "bf16_query.cuh"

namespace streamla {

// The tokens of an item, and how far the first query of its request sees.
struct Range {
    int begin, end, first_visible_end;

    DEVICE static Range of(const Item& item, bool causal) {
        return {item.begin, item.end, causal ? item.seqlen - SEQLEN_Q + 1 : item.seqlen};
    }
    // First token that a row does not see.
    DEVICE int visible_end(int row) const {
        if (SEQLEN_Q == 1) return end;
        return min(end, first_visible_end + row / NUM_HEADS);
    }
};

// Where tokens end in a tile: those from `count` on do not exist.
struct Tile {
    int token, count;

    DEVICE static Tile at(const Range& range, int token, const Ring& ring) {
        return {token, min(ring.tokens(), range.end - token)};
    }
    // Of a row: the first token of the tile that it does not see.
    DEVICE int visible(const Range& range, int row) const {
        return SEQLEN_Q == 1 ? count : min(count, range.visible_end(row) - token);
    }
};

DEVICE void mask_scores(Scores& scores, const Tile& tile, const Range& range, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int visible = tile.visible(range, lane.row(c, k));
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (lane.token(i) >= visible) scores[4 * c + 2 * i + k] = NEG_INF;
        }
    }
}

// From a tile in its slot to accumulators.
DEVICE void attend_tile(State& state, Accumulator& acc, const Tile& tile, const Range& range, float score_scale,
                        const Ring& ring, const Lane& lane) {
    const u32 shared = ring.shared, slot = uniform(ring.address());
    Scores scores;
    ring.wait_full();
    compute_scores(scores, slot, shared);
#pragma unroll
    for (int e = 0; e < ROWS / 2; e++) scores[e] *= score_scale;  // in base 2
    const int first_hidden = max(0, tile.visible(range, 0));
    if (first_hidden < TILE_N) mask_scores(scores, tile, range, lane);
    agree_on_max(state, acc, scores, shared, lane);
    const int steps = product_steps(tile.count);
    if (first_hidden < steps * STEP_N) cover_values(slot, first_hidden, tile.count, steps * STEP_N, lane);
    store_probabilities(state, scores, shared, lane);
    fence_async_proxy();
    named_barrier(BARRIER_MATH, MATH_THREADS);
    accumulate_output(acc, slot, steps, shared);
}

DEVICE void run_math(const Output& output, float score_scale, bool causal, Items items, u32 shared) {
    const Lane lane = Lane::here();
    Ring ring{shared};
    u32 round = 0;
    for (; items.any(); items.advance(), round ^= 1) {
        const Item item = items.item;
        const Range range = Range::of(item, causal);
        State state;
        state.reset();
        Accumulator acc;
#pragma unroll
        for (int j = 0; j < LATENT_BLOCKS; j++) {
#pragma unroll
            for (int e = 0; e < COLUMNS / 2; e++) acc[j][e] = 0.0f;
        }
        mbarrier_wait(shared + Shared::QUERY_FULL, round);
        u32 last_slot = 0, last_empty = 0;
        for (int token = range.begin; token < range.end; token += ring.tokens(), ring.advance()) {
            attend_tile(state, acc, Tile::at(range, token, ring), range, score_scale, ring, lane);
            last_slot = ring.address();
            last_empty = ring.empty();
            if (token + ring.tokens() < range.end && lane.lane == 0) mbarrier_arrive(last_empty);
        }
        if (lane.lane == 0) mbarrier_arrive(shared + Shared::QUERY_EMPTY);
        finish_item(state, acc, output, item, last_slot, last_empty, shared, lane);
    }
}

}  // namespace streamla

using namespace streamla;

// counters == 0: leave the partials to mla_merge.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_attention_bf16(const u16* q_nope, i64 q_nope_batch, i64 q_nope_query, i64 q_nope_head, const u16* q_pe,
                       i64 q_pe_batch, i64 q_pe_query, i64 q_pe_head, int q_aligned,
                       const __grid_constant__ TensorMap kv_map, const u8* kv_cache, i64 page_stride,
                       i64 token_stride, const int* page_table, i64 table_stride, const int* work,
                       const int* work_indptr, int* counters, u16* out, i64 out_batch, i64 out_query, i64 out_head,
                       int out_aligned, float* lse, i64 lse_batch, i64 lse_query, i64 lse_head, float* out_partial,
                       float* lse_partial, float softmax_scale, int causal, float lse_scale) {
    extern __shared__ u8 dynamic_shared[];
    const u32 shared = (shared_address(dynamic_shared) + 1023) & ~1023u;
    if (threadIdx.x == 0) init_barriers(shared);
    wait_for_previous_grid();
    allow_next_grid();
    const int first_item = __ldg(work_indptr + blockIdx.x), last_item = __ldg(work_indptr + blockIdx.x + 1);
    const Output output{out, lse, {out_batch, out_query, out_head}, {lse_batch, lse_query, lse_head},
                        out_partial, lse_partial, out_aligned != 0, lse_scale};
    __syncthreads();

    const int warp = uniform(static_cast<int>(threadIdx.x) / WARP);
    if (warp < MATH_WARPS) {
        run_math(output, softmax_scale * LOG2_E, causal != 0, Items::of(work, first_item, last_item), shared);
    } else if (warp < MATH_WARPS + LOAD_WARPS) {
        const Cache cache{kv_map, kv_cache, page_stride, token_stride, page_table, table_stride};
        run_load(cache, Items::of(work, first_item, last_item), shared);
    } else {
        const Query query{q_nope, q_pe, {q_nope_batch, q_nope_query, q_nope_head},
                          {q_pe_batch, q_pe_query, q_pe_head}, q_aligned != 0};
        run_query(query, Items::of(work, first_item, last_item), warp - MATH_WARPS - LOAD_WARPS, shared);
    }
    if (counters) merge_items(output, counters, work, first_item, last_item, shared + Shared::SLOT);
}
