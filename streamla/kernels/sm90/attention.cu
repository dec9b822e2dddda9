// MLA decode attention for 1 to 32 query rows over an fp8 cache (576-byte rows), and its merge.
//
// A program walks its items: the query goes to shared memory, step after step is accumulated, the result is
// stored. docs/attention-sm90.md explains the pipeline and its budget.

#include "load.cuh"
#include "merge.cuh"
#include "qk.cuh"
#include "query.cuh"

namespace streamla {

struct Softmaxing {
    float score_scale;  // softmax_scale * log2(e) * k_scale
    float value_scale;  // k_scale
    bool causal;
};

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

constexpr int VALUE_BUFFERS = 2;  // of 32 tokens' values, widened

// Values of 32 tokens of the step; those that were not loaded read as 0.
DEVICE void load_values(RawValues& raw, const Range& range, int token, int pair, const Ring& ring, int position,
                        bool masked, const Lane& lane) {
    const int tile = pair / TILE_PAIRS;
    raw.load(uniform(ring.stage(position + tile)) + value_offset(lane), pair % TILE_PAIRS);
    if (masked) raw.clear_from(range.end - token - tile * TILE_N, pair % TILE_PAIRS, lane);
}

// One step, from stages to accumulators. The second tile may not exist: then what is read of its stage is
// masked like the tail of the first.
DEVICE void attend_step(Sums& sums, Accumulator& acc, const Range& range, int token, int row_begin, const Ring& ring,
                        int position, const Lane& lane) {
    const u32 shared = ring.shared;
    const bool has_second = token + TILE_N < range.end;
    const bool masked = token + STEP_N > range.visible_end(0);
    if (lane.tile() == 0 || has_second) ring.wait_full(position + lane.tile());

    float scores[ROWS / 2];
    Scores mine;
    RawValues raw[STEP_TILES * TILE_PAIRS];
    Values values[VALUE_BUFFERS];
    issue_scores(scores, uniform(ring.stage(position + lane.tile())), shared, lane);
    if (lane.tile() == 1) ring.wait_full(position);
    if (lane.tile() == 0 && has_second) ring.wait_full(position + 1);
    load_values(raw[0], range, token, 0, ring, position, masked, lane);
    load_values(raw[1], range, token, 1, ring, position, masked, lane);
    wgmma_wait<0>();
    send_scores(scores, mine, shared, lane);
    named_barrier(BARRIER_PAIR + lane.tile(), 2 * WARPGROUP);

    values[0].widen(raw[0]);
    values[1].widen(raw[1]);
    load_values(raw[2], range, token, 2, ring, position, masked, lane);
    load_values(raw[3], range, token, 3, ring, position, masked, lane);
    ring.release(position, lane.leads_warp());
    if (has_second) ring.release(position + 1, lane.leads_warp());
    receive_scores(mine, shared, lane);
    if (masked) {
#pragma unroll
        for (int c = 0; c < GROUPS; c++) {
#pragma unroll
            for (int k = 0; k < 2; k++)
                if (token + lane.token() >= range.visible_end(row_begin + lane.row(c, k))) mine[c][k] = NEG_INF;
        }
    }
    softmax_step(sums, acc, mine, shared, lane);

    const u64 probabilities = probability_descriptor(shared);
#pragma unroll
    for (int pair = 0; pair < STEP_TILES * TILE_PAIRS; pair++) {
        Values& v = values[pair % VALUE_BUFFERS];
        if (pair >= VALUE_BUFFERS) wgmma_wait<VALUE_BUFFERS - 1>();
        if (pair >= 2) v.widen(raw[pair]);
        if (masked && SEQLEN_Q > 1) v.clear_nan();
        issue_output(acc, v, probabilities, pair);
    }
    wgmma_wait<0>();
}

DEVICE void run_math(const Query& query, const Output& output, const Softmaxing& how, const int* work, int first_item,
                     int last_item, int row_begin, int* counters, const Ring& ring) {
    const Lane lane = Lane::here();
    const u32 shared = ring.shared;
    int position = 0;
    for (int index = first_item; index < last_item; index++) {
        const Item item = Item::load(work, index);
        load_query(query, item.request, row_begin, shared, how.score_scale);
        named_barrier(BARRIER_MATH, MATH_THREADS);
        reset_max(shared);  // no warp still reads those of the item before

        Accumulator acc;
#pragma unroll
        for (int j = 0; j < M_TILES; j++) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) acc[j][i] = 0.0f;
        }
        Sums sums;
#pragma unroll
        for (int c = 0; c < GROUPS; c++) sums[c][0] = sums[c][1] = 0.0f;

        const Range range = Range::of(item, how.causal);
        for (int token = range.begin; token < range.end; token += STEP_N, position += STEP_TILES)
            attend_step(sums, acc, range, token, row_begin, ring, position, lane);
        position -= item.num_tiles() % STEP_TILES;
        finish_item(sums, acc, output, item, row_begin, shared, how.value_scale, lane);
        if (counters && item.slot >= 0) announce_partial(counters, item);
    }
    if (!counters) return;
    for (int index = first_item; index < last_item; index++) {
        const Item item = Item::load(work, index);
        if (item.slot < 0) continue;
        wait_for_partials(counters, item);
        merge_share(output, item, row_begin, item.slot - item.split_begin, item.num_splits(),
                    shared + Shared::STAGE);
    }
}

}  // namespace streamla

using namespace streamla;

// Programs are numbered program * ROW_TILES + row tile: those that read the same tokens run side by side.
// counters == 0: leave the partials to mla_merge. k_scale == 0: the scale is 1.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_attention(const u16* q_nope, i64 q_nope_batch, i64 q_nope_query, i64 q_nope_head, const u16* q_pe,
                  i64 q_pe_batch, i64 q_pe_query, i64 q_pe_head, int q_aligned, const u8* kv_cache,
                  i64 page_stride, i64 token_stride, const float* k_scale, const int* page_table,
                  i64 table_stride, const int* work, const int* work_indptr, int* counters, u16* out,
                  i64 out_batch, i64 out_query, i64 out_head, int out_aligned, float* lse, i64 lse_batch,
                  i64 lse_query, i64 lse_head, float* out_partial, float* lse_partial, float softmax_scale,
                  int causal, float lse_scale) {
    extern __shared__ u8 dynamic_shared[];
    const Ring ring{(shared_address(dynamic_shared) + 1023) & ~1023u};
    const int program = blockIdx.x / ROW_TILES, row_begin = blockIdx.x % ROW_TILES * ROWS;

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        if (threadIdx.x >= MATH_THREADS + WARP) return;
        if (threadIdx.x == MATH_THREADS) ring.init();
        __syncwarp();
        named_barrier_arrive(BARRIER_READY, MATH_THREADS + WARP);
        const Cache cache{kv_cache, page_stride, token_stride, page_table, table_stride};
        const u64 l2_policy = ROW_TILES > 1 ? l2_evict_normal() : l2_evict_first();
        const int last_item = __ldg(work_indptr + program + 1);
        int position = 0;
        for (int index = __ldg(work_indptr + program); index < last_item; index++)
            load_item(Item::load(work, index), cache, ring, position, l2_policy);
    } else {
        registers_grow<MATH_REGISTERS>();
        const int first_item = __ldg(work_indptr + program), last_item = __ldg(work_indptr + program + 1);
        const float scale = k_scale ? __ldg(k_scale) : 1.0f;
        const Query query{q_nope, q_pe, {q_nope_batch, q_nope_query, q_nope_head},
                          {q_pe_batch, q_pe_query, q_pe_head}, q_aligned != 0};
        const Output output{out, lse, {out_batch, out_query, out_head}, {lse_batch, lse_query, lse_head},
                            out_partial, lse_partial, out_aligned != 0, lse_scale};
        const Softmaxing how{softmax_scale * LOG2_E * scale, scale, causal != 0};
        named_barrier(BARRIER_READY, MATH_THREADS + WARP);
        run_math(query, output, how, work, first_item, last_item, row_begin, counters, ring);
    }
}

// Grid (TOTAL_ROWS, batch), LATENT / 4 threads. A request that was not split is final already.
extern "C" __global__ void __launch_bounds__(LATENT / 4)
    mla_merge(const int* split_indptr, u16* out, i64 out_batch, i64 out_query, i64 out_head, int out_aligned,
              float* lse, i64 lse_batch, i64 lse_query, i64 lse_head, const float* out_partial,
              const float* lse_partial, float lse_scale) {
    const int row = blockIdx.x, request = blockIdx.y, latent = threadIdx.x * 4;
    const int begin = __ldg(split_indptr + request), end = __ldg(split_indptr + request + 1);
    if (begin == end) return;
    const Output output{out, lse, {out_batch, out_query, out_head}, {lse_batch, lse_query, lse_head},
                        nullptr, nullptr, out_aligned != 0, lse_scale};
    Weighted w;
    w.add_partials(out_partial + static_cast<i64>(row) * LATENT + latent, lse_partial + row, begin, end, 1);
    w.store(output, request, row, latent);
}
