// MLA decode attention over an fp8_ds_mla cache (656-byte rows), and its merge.
//
// The pipeline is that of attention.cu; docs/attention-sm90-ds-mla.md tells what the format changes in it.

#define STREAMLA_GROUP_SCALES 1

#include "ds_mla_finish.cuh"
#include "program.cuh"
#include "query.cuh"

namespace streamla {

constexpr int VALUE_BUFFERS = 2;                       // units of values in registers, widened
constexpr int LAST_LOAD = UNITS == 4 ? 0 : UNITS - 3;  // unit at which the last values have been read

// One tile, from stage to accumulators. `release`: hand the stage back after the last read.
DEVICE void attend_tile(RowValues& sums, Accumulator& acc, const Range& range, int token, int row_begin,
                        const Ring& ring, int position, bool release, const Lane& lane) {
    const u32 shared = ring.shared, stage = uniform(ring.stage(position));
    const bool masked = token + TILE_N > range.visible_end(0);
    const int valid = range.end - token;
    ring.wait_full(position);

    GroupScores partial;
    Scores scores;
    RawValues raw[UNITS];
    Values widened[VALUE_BUFFERS];
    partial.issue(stage, shared, lane);
    const u32 values = stage + group_value_offset(lane.again());
    load_group_values(raw[0], values, 0, masked, valid, lane);
    load_group_values(raw[1], values, 1, masked, valid, lane);
    wgmma_wait<0>();
    partial.add_last();
    send_scores(partial.total, scores, shared, lane);
    GroupScales scales;
    scales.load(stage, lane);
    named_barrier(BARRIER_TEAM + lane.team, TEAM_THREADS);  // also: nobody reads P^T of the tile before
    widened[0].widen(raw[0]);
    widened[1].widen(raw[1]);
    receive_scores(scores, shared, lane);
    if (masked) {
#pragma unroll
        for (int i = 0; i < GROUPS * THREAD_TOKENS * 2; i++) {
            const int c = i / 2 / THREAD_TOKENS, x = i / 2 % THREAD_TOKENS, k = i % 2;
            if (token + lane.token(x) >= range.visible_end(row_begin + lane.row(c, k)))
                scores[c][x][k] = NEG_INF;
        }
#pragma unroll
        for (int x = 0; x < THREAD_TOKENS; x++)
            if (token + lane.token(x) >= range.visible_end(0))
                scales.clear_unless_finite(x, lane.token(x) < valid);
    }
    softmax_scaled_tile(sums, acc, scores, scales, shared, position, lane);

    const u64 probabilities = probability_descriptor(shared, position, lane);
    load_group_values(raw[2], values, 2, masked, valid, lane);
    load_group_values(raw[3], values, 3, masked, valid, lane);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        Values& v = widened[u % VALUE_BUFFERS];
        if (u >= VALUE_BUFFERS) {
            wgmma_wait<VALUE_BUFFERS - 1>();
            v.widen(raw[u]);
            if (u + 2 < UNITS) load_group_values(raw[u + 2], values, u + 2, masked, valid, lane);
        }
        if (u == LAST_LOAD && release) ring.release(position, lane.leads_warp());
        if (masked && SEQLEN_Q > 1) v.clear_nan();
        issue_group_output(acc, v, probabilities, u, lane);
    }
    wgmma_wait<0>();
}

DEVICE void run_math(const Query& query, const Output& output, float score_scale, bool causal, const int* work,
                     const int* program_items, int row_begin, const Ring& ring) {
    const Lane lane = Lane::here();
    walk_items<RangePerGroup>(
        output, causal, 1.0f, work, program_items, row_begin, ring, lane,
        [&](int request) { load_query(query, request, row_begin, ring.shared, score_scale); },
        [&] {
            reset_max(ring.shared, lane);
            reset_limit(ring.shared, lane);
        },
        [&](RowValues& sums, Accumulator& acc, const Range& range, int token, int position, bool goes_on) {
            attend_tile(sums, acc, range, token, row_begin, ring, position, goes_on, lane);
        });
}

}  // namespace streamla

using namespace streamla;

// Programs are numbered program * ROW_TILES + row tile: those that read the same tokens run side by side.
// counters == 0: leave the partials to mla_merge.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_attention_ds_mla(const u16* q_nope, i64 q_nope_batch, i64 q_nope_query, i64 q_nope_head,
                         const u16* q_pe, i64 q_pe_batch, i64 q_pe_query, i64 q_pe_head, int q_aligned,
                         const u8* kv_cache, i64 page_stride, i64 token_stride, const int* page_table,
                         i64 table_stride, const int* work, const int* work_indptr, int* counters, u16* out,
                         i64 out_batch, i64 out_query, i64 out_head, int out_aligned, float* lse,
                         i64 lse_batch, i64 lse_query, i64 lse_head, float* out_partial, float* lse_partial,
                         float softmax_scale, int causal, float lse_scale) {
    extern __shared__ u8 dynamic_shared[];
    const Ring ring{(shared_address(dynamic_shared) + 1023) & ~1023u};
    const int program = blockIdx.x / ROW_TILES, row_begin = blockIdx.x % ROW_TILES * ROWS;

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        const int* program_items = work_indptr + program;
        if (threadIdx.x < EMPTIER) {
            run_loader(work, program_items, {kv_cache, page_stride, token_stride, page_table, table_stride}, ring);
        } else if (threadIdx.x < FIRST_WRITER) {
            run_emptier({out_partial, lse_partial}, work, program_items, row_begin, counters, ring);
        }
    } else {
        registers_grow<MATH_REGISTERS>();
        wait_for_previous_grid();
        const Query query{q_nope, q_pe, {q_nope_batch, q_nope_query, q_nope_head},
                          {q_pe_batch, q_pe_query, q_pe_head}, q_aligned != 0};
        const Output output{out, lse, {out_batch, out_query, out_head}, {lse_batch, lse_query, lse_head},
                            out_partial, lse_partial, out_aligned != 0, lse_scale, counters != nullptr};
        ring.wait_as_math();
        run_math(query, output, softmax_scale * LOG2_E, causal != 0, work, work_indptr + program, row_begin,
                 ring);
    }
}
