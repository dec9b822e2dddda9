// MLA decode attention for 33 query rows and more over an fp8_e4m3fn cache (docs/attention-sm90-wide.md).
//
// Two warps load tiles of 64 tokens. Two math warpgroups own alternate tiles: the owner computes a tile's scores and,
// while it adds the values of the tile before, its probabilities; both add its values, each for half of the latents.
//
//     group 0   scores 0 | softmax 0 | values 0 | scores 2             | values 1 + softmax 2 | values 2 | ...
//     group 1        scores 1        | values 0 + softmax 1 | values 1 | scores 3             | values 2 + softmax 3 ...
#include "wide_load.cuh"
#include "wide_merge.cuh"
#include "wide_output.cuh"
#include "wide_product.cuh"
#include "wide_query.cuh"
#include "wide_softmax.cuh"

namespace streamla {

// Accumulators and what goes with them.
struct State {
    float out[4][SCORES], mass[COLUMNS / 4];
    Fragments fragments;
};

DEVICE u32 stage_of(u32 tile, u32 shared) { return shared + Shared::STAGE + tile % STAGES * STAGE_BYTES; }

// Adds the values of tile `tile` (counted over the program) once its probabilities are there.
template <typename Between>
DEVICE void add_values(State& state, u32 tile, bool owner, u32 shared, const Lane& lane, Between between) {
    const u32 values = stage_of(tile, shared) + token_offset(lane.value_token()) + lane.value_latent();
    Values held;
    if (owner) held.load(values, 0);
    mbarrier_wait(shared + Shared::PROBABILITY_FULL, tile & 1);
    const u32 raised = load_shared_u32(shared + Shared::RAISED);
    if (!owner) held.load(values, 0);  // the owner may have hidden tokens until now
    if (raised) rescale(state.out, state.mass, owner, shared, lane);
    value_tile(state.out, state.fragments, held, values,
               matrix_descriptor(shared + Shared::PROBABILITY, 128, TILE * 16, SWIZZLE_NONE), between);
    __syncwarp();
    if (threadIdx.x % WARP < ARRIVING_LANES) {
        mbarrier_arrive(shared + Shared::PROBABILITY_EMPTY);
        mbarrier_arrive(shared + Shared::EMPTY + tile % STAGES * 8);
    }
}
DEVICE void add_values(State& state, u32 tile, bool owner, u32 shared, const Lane& lane) {
    add_values(state, tile, owner, shared, lane, [](int) {});
}

// Tiles [first, end) of one item, counted over the program. From tile `first_hidden` on there is something that some query
// must not see; `hide(scores, tile)` hides it.
template <typename Hide>
DEVICE void attend(
    State& state, u32 first, u32 end, u32 first_hidden, u32 shared, const Lane& lane, Hide hide) {
    const u64 query = matrix_descriptor(shared + Shared::QUERY, 16, 1024, SWIZZLE_128);
    for (u32 tile = first + ((first ^ lane.group) & 1); tile < end; tile += GROUPS) {
        const u32 stage = stage_of(tile, shared);
        mbarrier_wait(shared + Shared::FULL + tile % STAGES * 8, tile / STAGES & 1);
        float s[SCORES];
        bool raise = false;
        // Between the products of the tile before, the scores become probabilities; in the hope that no reference must
        // be raised for them, and nothing hidden. If so, they are made again, alone.
        for (bool alone = tile == first;; alone = true) {
            score_tile(s, state.fragments, stage + token_offset(lane.score_token()) + lane.lane_pair * 16, query);
            float excess = NEG_INF;
            if (alone) {
                wait_for_room(tile, shared);
                if (tile >= first_hidden) hide(s, tile);
                measure(s, excess, shared, lane);
                raise = must_raise(excess, lane);
                if (raise) raise_references(s, state.mass, shared, lane);
                exponentiate(s, excess, 0, BLOCKS, shared, lane);
                break;
            }
            bool useless = false;
            add_values(state, tile - 1, false, shared, lane, [&](int group) {
                constexpr int PARTS = VALUE_GROUPS - 1;
                if (group < PARTS)
                    exponentiate(s, excess, group * BLOCKS / PARTS, (group + 1) * BLOCKS / PARTS, shared, lane);
                if (group == PARTS - 1) useless = must_raise(excess, lane);
            });
            if (tile < first_hidden && !useless) {
                wait_for_room(tile, shared);
                break;
            }
        }
        publish(s, state.mass, raise, shared, lane);
        add_values(state, tile, true, shared, lane);
    }
    if (end > first && (end - 1 & 1) != lane.group) add_values(state, end - 1, false, shared, lane);
}

DEVICE void math(
    const Query& query, const Output& output, const int* work, const int* work_indptr, float score_scale,
    float value_scale, bool causal, u32 shared) {
    const Lane lane;
    u32 tiles = 0;
    for (int index = work_indptr[this_program()]; index < work_indptr[this_program() + 1]; ++index) {
        State state = {};
        {
            const Item item = load_item(work, index);
            const int first_row = this_first_row();
            named_barrier(MATH_BARRIER, MATH_THREADS);  // nobody reads the item before's query or row states
            stage_query(query, item.request, first_row, min(TILE_ROWS, ROWS - first_row), score_scale, shared);
            fence_async_proxy();
            named_barrier(MATH_BARRIER, MATH_THREADS);

            const int seen = Causal{item.seqlen, first_row, causal}.limit(0) - item.begin;  // by every query
            attend(state, tiles, tiles + item.num_tiles(), tiles + max(0, seen) / TILE, shared, lane,
                   [&](float(&scores)[SCORES], u32 tile) {
                       const Item here = load_item(work, forget(index));
                       const int token = here.begin + static_cast<int>(tile - tiles) * TILE;
                       hide_tokens(scores, stage_of(tile, shared), token, {here.seqlen, this_first_row(), causal}, lane);
                   });
            tiles += item.num_tiles();
        }
        const Item item = load_item(work, forget(index));
        const int first_row = this_first_row(), num_rows = min(TILE_ROWS, ROWS - first_row);
        named_barrier(MATH_BARRIER, MATH_THREADS);  // the scratch is free
        finish_rows(state.mass, output, item, first_row, num_rows, value_scale, shared, lane);
        store_rows(state.out, output, item, first_row, num_rows, shared, lane);
    }
}

}  // namespace streamla

using namespace streamla;

extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_attention_wide(
    const u16* q_nope, i64 q_nope_request, i64 q_nope_query, i64 q_nope_head,  // (batch, seqlen_q, num_heads, 512) bf16
    const u16* q_pe, i64 q_pe_request, i64 q_pe_query, i64 q_pe_head,          // (.., 64)
    const u8* kv_cache, i64 page_stride, i64 token_stride,                     // (num_pages, page_size, 576) e4m3fn
    const float* k_scale,                                                      // (1,)
    const int* page_table, i64 page_table_stride,                              // (batch, width)
    const int* work, const int* work_indptr,                                   // the plan
    u16* out, i64 out_request, i64 out_query, i64 out_head,                    // (batch, seqlen_q, num_heads, 512) bf16
    float* lse, i64 lse_request, i64 lse_query, i64 lse_head,                  // (batch, seqlen_q, num_heads)
    float* out_partial, float* lse_partial,                                    // (slots, seqlen_q, num_heads, 512)
    float softmax_scale_log2, float lse_scale, int causal) {
    extern __shared__ __align__(1024) u8 storage[];
    const u32 shared = shared_address(storage);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared + Shared::FULL + stage * 8, LOAD_WARPS);
            mbarrier_init(shared + Shared::EMPTY + stage * 8, MATH_WARPS * ARRIVING_LANES);
        }
        mbarrier_init(shared + Shared::PROBABILITY_FULL, GROUP_WARPS * ARRIVING_LANES);
        mbarrier_init(shared + Shared::PROBABILITY_EMPTY, MATH_WARPS * ARRIVING_LANES);
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_previous_grid();

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        allow_next_grid();
        const int half = (threadIdx.x - MATH_THREADS) / WARP;
        if (half < LOAD_WARPS)
            load_tiles({kv_cache, page_stride, token_stride, page_table, page_table_stride}, work, work_indptr, half,
                       shared);
    } else {
        registers_grow<MATH_REGISTERS>();
        const float scale = k_scale ? *k_scale : 1.f;
        math({q_nope, q_pe, {q_nope_request, q_nope_query, q_nope_head}, {q_pe_request, q_pe_query, q_pe_head}},
             {out, lse, {out_request, out_query, out_head}, {lse_request, lse_query, lse_head}, out_partial,
              lse_partial, lse_scale},
             work, work_indptr, softmax_scale_log2 * scale, scale, causal, shared);
    }
}

// The merge: grid (ROWS, batch, LATENT / MERGE_LATENTS).
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) mla_merge_wide(
    const int* split_indptr,
    u16* out, i64 out_request, i64 out_query, i64 out_head,
    float* lse, i64 lse_request, i64 lse_query, i64 lse_head,
    const float* out_partial, const float* lse_partial, float lse_scale) {
    merge_request<false>(split_indptr, out, {out_request, out_query, out_head}, lse,
                         {lse_request, lse_query, lse_head}, out_partial, lse_partial, lse_scale);
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) mla_merge_wide_ahead(
    const int* split_indptr,
    u16* out, i64 out_request, i64 out_query, i64 out_head,
    float* lse, i64 lse_request, i64 lse_query, i64 lse_head,
    const float* out_partial, const float* lse_partial, float lse_scale) {
    merge_request<true>(split_indptr, out, {out_request, out_query, out_head}, lse,
                        {lse_request, lse_query, lse_head}, out_partial, lse_partial, lse_scale);
}
