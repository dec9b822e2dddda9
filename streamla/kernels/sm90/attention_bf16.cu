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

// Where a tile lies in the ring. A tile of up to STAGE_N tokens has one stage: then what is read of another is
// masked like every token that does not exist.
struct Tile {
    int token, position;
    bool has_second;

    DEVICE static Tile at(const Range& range, int token, int position) {
        return {token, position, token + STAGE_N < range.end};
    }
    DEVICE TileAddress address(const Ring& ring, const Lane& lane) const {
        return TileAddress::of(ring.stage(position), ring.stage(position + 1), lane);
    }
    DEVICE void wait_full(const Ring& ring) const {
        ring.wait_full(position);
        if (has_second) ring.wait_full(position + 1);
    }
    // This warp has read all that it needs.
    DEVICE void release(const Ring& ring, const Lane& lane) const {
        if (lane.lane) return;
        mbarrier_arrive(ring.empty(position));
        if (has_second) mbarrier_arrive(ring.empty(position + 1));
    }
};

// Leaves this half's part of the tile's scores, and waits for whatever wgmma was issued before.
DEVICE void score_tile(float (&partial)[ROWS / 2], const Tile& tile, const Ring& ring, const Lane& lane) {
    tile.wait_full(ring);
    compute_scores(partial, tile.address(ring, lane).keys(lane), ring.shared, lane);
}

// From a tile's scores to products in flight.
DEVICE void weigh_tile(State& state, Accumulator& acc, const float (&partial)[ROWS / 2], Values (&values)[TOKEN_STEPS],
                       const Tile& tile, const Range& range, float score_scale, const Ring& ring, const Lane& lane) {
    const u32 shared = ring.shared;
    Scores scores;
    send_scores(partial, scores, shared, lane);
    const u32 address = tile.address(ring, lane).values(lane);
#pragma unroll
    for (int s = 0; s < TOKEN_STEPS; s++) values[s].load(address, s);
    named_barrier(BARRIER_MATH, MATH_THREADS);
    receive_scores(scores, score_scale, shared, lane);
#pragma unroll
    for (int s = 0; s < TOKEN_STEPS; s++) values[s].trade();
    if (tile.token + TILE_N > range.visible_end(0)) {
        mask_scores(scores, range, tile.token, lane);
#pragma unroll
        for (int s = 0; s < TOKEN_STEPS; s++)
            values[s].mask(range.end - tile.token, range.visible_end(0) - tile.token, s, lane);
    }
    softmax_step(state, acc, scores, shared, lane);
    tile.release(ring, lane);
    issue_output(acc, values, shared);
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
        float partial[ROWS / 2];
        Tile tile = Tile::at(range, range.begin, position);
        if (tile.token < range.end) score_tile(partial, tile, ring, lane);
        while (tile.token < range.end) {
            const Tile next = Tile::at(range, tile.token + TILE_N, tile.position + 2);
            Values values[TOKEN_STEPS];
            weigh_tile(state, acc, partial, values, tile, range, score_scale, ring, lane);
            if (next.token < range.end)
                score_tile(partial, next, ring, lane);
            else
                wgmma_wait<0>();
            tile = next;
        }
        position += (range.end - range.begin + STAGE_N - 1) / STAGE_N;
        finish_item(state, acc, output, item, shared, lane);
    }
    if (!counters) return;
    announce_partials(counters, work, first_item, last_item);
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
    const Query query{q_nope, q_pe, {q_nope_batch, q_nope_query, q_nope_head},
                      {q_pe_batch, q_pe_query, q_pe_head}, q_aligned != 0};

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        if (threadIdx.x >= MATH_THREADS + WARP) return;
        if (threadIdx.x == MATH_THREADS) ring.init();
        __syncwarp();
        named_barrier_arrive(BARRIER_READY, MATH_THREADS + WARP);
        wait_for_previous_grid();
        allow_next_grid();
        const int first_item = __ldg(work_indptr + blockIdx.x), last_item = __ldg(work_indptr + blockIdx.x + 1);
        const Cache cache{kv_cache, page_stride, token_stride, page_table, table_stride};
        const u64 l2_policy = l2_evict_first();
        int position = 0;
        for (int index = first_item; index < last_item; index++) {
            const Item item = Item::load(work, index);
            if (index > first_item) prefetch_query(query, item.request);
            load_item(item, cache, ring, position, l2_policy);
        }
    } else {
        registers_grow<MATH_REGISTERS>();
        wait_for_previous_grid();
        const int first_item = __ldg(work_indptr + blockIdx.x), last_item = __ldg(work_indptr + blockIdx.x + 1);
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
