// MLA decode attention for 33 query rows and more over an fp8_e4m3fn cache (docs/attention-sm90-wide.md).
//
// Two warps load tiles of 64 tokens, one empties slots. Two math warpgroups own alternate tiles: the owner computes a tile's scores and,
// while it adds the values of the tile before, its probabilities; both add its values, each for half of the latents.
//
//     group 0   scores 0 | softmax 0 | values 0 | scores 2             | values 1 + softmax 2 | values 2 | ...
//     group 1        scores 1        | values 0 + softmax 1 | values 1 | scores 3             | values 2 + softmax 3 ...
#include "wide_finish.cuh"
#include "wide_load.cuh"
#include "wide_product.cuh"
#include "wide_query.cuh"
#include "wide_softmax.cuh"

#include "merge.cuh"  // behind wide_tile.cuh

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
               matrix_descriptor(shared + Shared::PROBABILITY, 128, TILE_N * 16, SWIZZLE_NONE), between);
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

DEVICE void run_math(const Query& query, const Output& output, const Softmaxing& how, const int* work,
                     const int* program_items, u32 shared) {
    const Lane lane(threadIdx.x);
    int index = load_index(program_items);
    u32 tiles = 0;
    Item item = Item::none();
    int request = index < load_index(program_items + 1) ? Item::load_request(work, index) : 0;
    for (; index < load_index(program_items + 1); ++index) {
        State state = {};
        {
            const Item whole = Item::load(work, index);
            const int first_row = this_first_row();
            named_barrier(BARRIER_MATH, MATH_THREADS);  // nobody reads the item before's query or row states
            stage_query(query, request, first_row, min(ROWS, TOTAL_ROWS - first_row), how.score_scale(), shared);
            fence_async_proxy();
            named_barrier(BARRIER_MATH, MATH_THREADS);

            const int seen = Causal{whole.seqlen, first_row, how.causal}.limit(0) - whole.begin;  // by every query
            attend(state, tiles, tiles + whole.num_tiles(), tiles + max(0, seen) / TILE_N, shared, lane,
                   [&](float(&scores)[SCORES], u32 tile) {
                       const Item here = Item::load(work, forget(index));
                       const int token = here.begin + static_cast<int>(tile - tiles) * TILE_N;
                       hide_tokens(scores, stage_of(tile, shared), token, {here.seqlen, this_first_row(), how.causal},
                                   lane);
                   });
            tiles += whole.num_tiles();
        }
        item = Item::load(work, forget(index));  // not kept in registers beside the tiles
        if (index + 1 < load_index(program_items + 1)) request = Item::load_request(work, index + 1);  // on its way meanwhile
        const Lane again(forget(static_cast<int>(threadIdx.x)));
        named_barrier(BARRIER_MATH, MATH_THREADS);  // the scratch is free
        finish_item(state.out, state.mass, output, item, how.value_scale(), shared, again);
    }
    static_assert(MERGE_BYTES <= QUERY_CHUNKS * QUERY_CHUNK, "the merge takes the query's place");
    if (output.merges)
        merge_items(output, item, work, program_items, this_first_row(), how.value_scale(), shared + Shared::QUERY);
}

}  // namespace streamla

using namespace streamla;

// Programs are numbered program * ROW_TILES + row tile: those that read the same tokens run side by side.
// counters == 0: leave the partials to mla_merge. k_scale == 0: the scale is 1.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_attention_wide(const u16* q_nope, i64 q_nope_batch, i64 q_nope_query, i64 q_nope_head, const u16* q_pe,
                       i64 q_pe_batch, i64 q_pe_query, i64 q_pe_head, int q_aligned, const u8* kv_cache,
                       i64 page_stride, i64 token_stride, const float* k_scale, const int* page_table,
                       i64 table_stride, const int* work, const int* work_indptr, int* counters, u16* out,
                       i64 out_batch, i64 out_query, i64 out_head, int out_aligned, float* lse, i64 lse_batch,
                       i64 lse_query, i64 lse_head, float* out_partial, float* lse_partial, float softmax_scale,
                       int causal, float lse_scale) {
    extern __shared__ __align__(1024) u8 storage[];
    const u32 shared = shared_address(storage);
    const int* program_items = work_indptr + this_program();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared + Shared::FULL + stage * 8, LOAD_WARPS * (BULK_COPIES ? 1 : ARRIVING_LANES));
            mbarrier_init(shared + Shared::EMPTY + stage * 8, MATH_WARPS * ARRIVING_LANES);
        }
        mbarrier_init(shared + Shared::PROBABILITY_FULL, GROUP_WARPS * ARRIVING_LANES);
        mbarrier_init(shared + Shared::PROBABILITY_EMPTY, MATH_WARPS * ARRIVING_LANES);
        mbarrier_init(shared + Shared::EMPTIED, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_previous_grid();

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        allow_next_grid();
        if (threadIdx.x < EMPTIER)
            load_items({kv_cache, page_stride, token_stride, page_table, table_stride}, work, program_items, shared);
        else if (threadIdx.x < EMPTIER + WARP && counters)
            empty_slots<1>({out_partial, lse_partial}, work, program_items, this_first_row(), counters,
                        shared + Shared::EMPTIED);
    } else {
        registers_grow<MATH_REGISTERS>();
        const Query query{q_nope, q_pe, {q_nope_batch, q_nope_query, q_nope_head},
                          {q_pe_batch, q_pe_query, q_pe_head}, q_aligned != 0};
        const Output output{out, lse, {out_batch, out_query, out_head}, {lse_batch, lse_query, lse_head},
                            out_partial, lse_partial, out_aligned != 0, lse_scale, counters != nullptr};
        run_math(query, output, {softmax_scale, k_scale, causal != 0}, work, program_items, shared);
    }
}
