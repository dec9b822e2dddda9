// MLA decode attention for 1 to 32 query rows over an fp8 cache (576-byte rows), and its merge.
//
// A program walks its items: the query goes to shared memory, tile after tile is accumulated, the result is
// stored. docs/attention-sm90.md explains the pipeline and its budget.

#include "program.cuh"
#include "qk.cuh"
#include "query.cuh"
#include "step.cuh"

namespace streamla {

constexpr int VALUE_BUFFERS = 2;          // units of values in registers, widened
constexpr int AHEAD = ROWS <= 24 ? 2 : 1;  // units of values on their way from shared memory; few registers are left
constexpr int LAST_LOAD = UNITS == 4 ? 0 : UNITS - 1 - AHEAD;  // unit at which the last values have been read

// Values of one unit; tokens that were not loaded read as 0.
DEVICE void load_values(RawValues& raw, u32 values, int unit, bool masked, int valid, const Lane& lane) {
    raw.load(values, unit);
    if (masked) raw.clear_from(valid, unit, lane);
}

// One tile, from stage to accumulators. `release`: hand the stage back after the last read.
DEVICE void attend_tile(RowValues& sums, Accumulator& acc, const Range& range, int token, int row_begin,
                        const Ring& ring, int position, bool release, const Lane& lane) {
    const u32 shared = ring.shared, stage = uniform(ring.stage(position));
    const u32 values = stage + value_offset(lane);
    const bool masked = token + TILE_N > range.visible_end(0);
    const int valid = range.end - token;
    ring.wait_full(position);

    float fragment[ROWS / 2];
    Scores scores;
    RawValues raw[UNITS];
    Values widened[VALUE_BUFFERS];
    issue_scores(fragment, stage, shared, lane);
    load_values(raw[0], values, 0, masked, valid, lane);
    load_values(raw[1], values, 1, masked, valid, lane);
    wgmma_wait<0>();
    send_scores(fragment, scores, shared, lane);
    if (TEAM_HALVES == 2) named_barrier(BARRIER_TEAM + lane.team, TEAM_THREADS);
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
    }
    softmax_tile(sums, acc, scores, shared, position, lane);

    const u64 probabilities = probability_descriptor(shared, position, lane);
    load_values(raw[2], values, 2, masked, valid, lane);
    if (AHEAD == 2) load_values(raw[3], values, 3, masked, valid, lane);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        Values& v = widened[u % VALUE_BUFFERS];
        if (u >= VALUE_BUFFERS) {
            wgmma_wait<VALUE_BUFFERS - 1>();
            v.widen(raw[u]);
            if (u + AHEAD < UNITS) load_values(raw[u + AHEAD], values, u + AHEAD, masked, valid, lane);
        }
        if (u == LAST_LOAD && release) ring.release(position, lane.leads_warp());
        if (masked && SEQLEN_Q > 1) v.clear_nan();
        issue_output(acc, v, probabilities, u);
    }
    wgmma_wait<0>();
}

DEVICE void run_math(const Query& query, const Output& output, const Softmaxing& how, const int* work,
                     const int* program_items, int row_begin, const Rope& rope, const Ring& ring) {
    const Lane lane = Lane::here();
    walk_items<OneRange>(
        output, how.causal, how.value_scale(), work, program_items, row_begin, ring, lane,
        [&](int request) {
            load_query(query, request, row_begin, ring.shared, how.score_scale(), [&](QueryRows& rows) {
                if (STEP) rotate_query(rows, rope, request, row_begin);
            });
        },
        [&] { reset_max(ring.shared, lane); },
        [&](RowValues& sums, Accumulator& acc, const Range& range, int token, int position, bool goes_on) {
            attend_tile(sums, acc, range, token, row_begin, ring, position, goes_on, lane);
        });
}

}  // namespace streamla

using namespace streamla;

#if STREAMLA_STEP
#define STEP_PARAMETERS                                                                                     \
    , const u16 *kv_c, i64 kv_c_stride, const u16 *k_pe, i64 k_pe_stride, int kv_c_aligned,                 \
        const i64 *slot_mapping, i64 num_slots, i64 reserved_slot, i64 pool_slots, const i64 *positions,    \
        const float *cos_sin, i64 cos_sin_stride, i64 num_positions, int neox
#else
#define STEP_PARAMETERS
#endif

// Programs are numbered program * ROW_TILES + row tile: those that read the same tokens run side by side.
// counters == 0: leave the partials to mla_merge. k_scale == 0: the scale is 1.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_attention(const u16* q_nope, i64 q_nope_batch, i64 q_nope_query, i64 q_nope_head, const u16* q_pe,
                  i64 q_pe_batch, i64 q_pe_query, i64 q_pe_head, int q_aligned, const u8* kv_cache,
                  i64 page_stride, i64 token_stride, const float* k_scale, const int* page_table,
                  i64 table_stride, const int* work, const int* work_indptr, int* counters, u16* out,
                  i64 out_batch, i64 out_query, i64 out_head, int out_aligned, float* lse, i64 lse_batch,
                  i64 lse_query, i64 lse_head, float* out_partial, float* lse_partial, float softmax_scale,
                  int causal, float lse_scale STEP_PARAMETERS) {
    extern __shared__ u8 dynamic_shared[];
    const Ring ring{(shared_address(dynamic_shared) + 1023) & ~1023u};
#if STREAMLA_STEP
    const Rope rope{positions, cos_sin, cos_sin_stride, num_positions, neox != 0};
    const NewTokens tokens{kv_c,         k_pe,      kv_c_stride,   k_pe_stride, kv_c_aligned != 0,
                           slot_mapping, num_slots, reserved_slot, pool_slots};
#else
    const Rope rope{};
#endif
    const int program = blockIdx.x / ROW_TILES, row_begin = blockIdx.x % ROW_TILES * ROWS;

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        const Cache cache{kv_cache, page_stride, token_stride, page_table, table_stride};
        const int* program_items = work_indptr + program;
        if (threadIdx.x < EMPTIER) {
            run_loader(work, program_items, cache, ring);
        } else if (threadIdx.x < FIRST_WRITER) {
            run_emptier({out_partial, lse_partial}, work, program_items, row_begin, counters, ring);
        }
#if STREAMLA_STEP
        else {
            ring.wait_as_writer();
            wait_for_previous_grid();
            run_writer(tokens, rope, cache, k_scale, work, program_items, ring);
        }
#endif
    } else {
        registers_grow<MATH_REGISTERS>();
        wait_for_previous_grid();
        const Query query{q_nope, q_pe, {q_nope_batch, q_nope_query, q_nope_head},
                          {q_pe_batch, q_pe_query, q_pe_head}, q_aligned != 0};
        const Output output{out, lse, {out_batch, out_query, out_head}, {lse_batch, lse_query, lse_head},
                            out_partial, lse_partial, out_aligned != 0, lse_scale, counters != nullptr};
        const Softmaxing how{softmax_scale, k_scale, causal != 0};
        ring.wait_as_math();
        run_math(query, output, how, work, work_indptr + program, row_begin, rope, ring);
    }
}
