// MLA decode attention for 1 to 32 query rows over a bf16 cache (1152-byte rows), and its merge.
//
// A program walks its items: the query goes to shared memory, tile after tile is accumulated, the result is
// stored. docs/attention-sm90-bf16.md explains the pipeline and its budget.

#include "bf16_load.cuh"
#include "bf16_merge.cuh"

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

DEVICE void mask_scores(Scores& scores, const Range& range, int token, const Lane& lane) {
#pragma unroll
    for (int c = 0; c < GROUPS; c++) {
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (token + lane.token() >= range.visible_end(lane.row(c, k))) scores[c][k] = NEG_INF;
    }
}

// One tile, from stages to accumulators, whose last products are left in flight. A tile of up to STAGE_N tokens
// has one stage: then what is read of another is masked like every token that does not exist.
DEVICE void attend_tile(State& state, Accumulator& acc, const Range& range, int token, float score_scale,
                        const Ring& ring, int position, const Lane& lane) {
    const u32 shared = ring.shared;
    const bool has_second = token + STAGE_N < range.end;
    const bool masked = token + TILE_N > range.visible_end(0);
    const TileAddress tile = TileAddress::of(ring.stage(position), ring.stage(position + 1), lane);
    ring.wait_full(position);
    if (has_second) ring.wait_full(position + 1);

    float partial[ROWS / 2];
    Scores scores;
    Values values[TOKEN_STEPS];
    compute_scores(partial, tile.keys(lane), shared, lane);
    send_scores(partial, scores, shared, lane);
    const u32 value_address = tile.values(lane);
#pragma unroll
    for (int s = 0; s < TOKEN_STEPS; s++) values[s].load(value_address, s);
    named_barrier(BARRIER_MATH, MATH_THREADS);
    receive_scores(scores, score_scale, shared, lane);
    if (masked) {
        mask_scores(scores, range, token, lane);
#pragma unroll
        for (int s = 0; s < TOKEN_STEPS; s++)
            values[s].mask(range.end - token, range.visible_end(0) - token, s, lane);
    }
    softmax_step(state, acc, scores, shared, lane);
    if (lane.lane == 0) {
        mbarrier_arrive(ring.empty(position));
        if (has_second) mbarrier_arrive(ring.empty(position + 1));
    }
    issue_output(acc, values, shared);
    wgmma_wait<0>();
}

DEVICE void run_math(const Query& query, const Output& output, float score_scale, bool causal, const int* work,
                     int first_item, int last_item, int* counters, const Ring& ring) {
    const Lane lane = Lane::here();
    const u32 shared = ring.shared;
    int position = 0;
    for (int index = first_item; index < last_item; index++) {
        const Item item = Item::load(work, index);
        load_query(query, item.request, shared);
        named_barrier(BARRIER_MATH, MATH_THREADS);

        Accumulator acc;
#pragma unroll
        for (int j = 0; j < M_TILES; j++) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) acc[j][i] = 0.0f;
        }
        State state;
        state.reset();
        const Range range = Range::of(item, causal);
        for (int token = range.begin; token < range.end; token += TILE_N, position += 2)
            attend_tile(state, acc, range, token, score_scale, ring, position, lane);
        wgmma_wait<0>();
        position -= (range.end - range.begin + STAGE_N - 1) / STAGE_N % 2;
        finish_item(state, acc, output, item, shared, lane);
        if (counters && item.slot >= 0) announce_partial(counters, item);
    }
    if (!counters) return;
    for (int index = first_item; index < last_item; index++) {
        const Item item = Item::load(work, index);
        if (item.slot < 0) continue;
        wait_for_partials(counters, item);
        merge_share(output, item, shared + Shared::STAGE, lane);
    }
}

}  // namespace streamla

using namespace streamla;

// counters == 0: leave the partials to mla_merge_bf16.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_attention_bf16(const u16* q_nope, i64 q_nope_batch, i64 q_nope_query, i64 q_nope_head, const u16* q_pe,
                       i64 q_pe_batch, i64 q_pe_query, i64 q_pe_head, int q_aligned, const u8* kv_cache,
                       i64 page_stride, i64 token_stride, const int* page_table, i64 table_stride, const int* work,
                       const int* work_indptr, int* counters, u16* out, i64 out_batch, i64 out_query, i64 out_head,
                       int out_aligned, float* lse, i64 lse_batch, i64 lse_query, i64 lse_head, float* out_partial,
                       float* lse_partial, float softmax_scale, int causal, float lse_scale) {
    extern __shared__ u8 dynamic_shared[];
    const Ring ring{(shared_address(dynamic_shared) + 1023) & ~1023u};
    const int first_item = __ldg(work_indptr + blockIdx.x), last_item = __ldg(work_indptr + blockIdx.x + 1);

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        if (threadIdx.x >= MATH_THREADS + WARP) return;
        if (threadIdx.x == MATH_THREADS) ring.init();
        __syncwarp();
        named_barrier_arrive(BARRIER_READY, MATH_THREADS + WARP);
        const Cache cache{kv_cache, page_stride, token_stride, page_table, table_stride};
        const u64 l2_policy = l2_evict_first();
        int position = 0;
        for (int index = first_item; index < last_item; index++)
            load_item(Item::load(work, index), cache, ring, position, l2_policy);
    } else {
        registers_grow<MATH_REGISTERS>();
        const Query query{q_nope, q_pe, {q_nope_batch, q_nope_query, q_nope_head},
                          {q_pe_batch, q_pe_query, q_pe_head}, q_aligned != 0};
        const Output output{out, lse, {out_batch, out_query, out_head}, {lse_batch, lse_query, lse_head},
                            out_partial, lse_partial, out_aligned != 0, lse_scale};
        named_barrier(BARRIER_READY, MATH_THREADS + WARP);
        run_math(query, output, softmax_scale * LOG2_E, causal != 0, work, first_item, last_item, counters, ring);
    }
}

// Grid (TOTAL_ROWS, batch), LATENT / 4 threads. A request that was not split is final already.
extern "C" __global__ void __launch_bounds__(LATENT / 4)
    mla_merge_bf16(const int* split_indptr, u16* out, i64 out_batch, i64 out_query, i64 out_head, int out_aligned,
                   float* lse, i64 lse_batch, i64 lse_query, i64 lse_head, const float* out_partial,
                   const float* lse_partial, float lse_scale) {
    const int row = blockIdx.x, request = blockIdx.y, latent = threadIdx.x * 4;
    const int begin = __ldg(split_indptr + request), end = __ldg(split_indptr + request + 1);
    if (begin == end) return;
    const Output output{out, lse, {out_batch, out_query, out_head}, {lse_batch, lse_query, lse_head},
                        const_cast<float*>(out_partial), const_cast<float*>(lse_partial), out_aligned != 0,
                        lse_scale};
    Weighted w;
    w.add_partials(output, row, latent, begin, end, 1);
    w.store(output, request, row, latent);
}
