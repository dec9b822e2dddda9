// MLA decode attention for 33 query rows and more over an fp8_e4m3fn cache (docs/attention-sm90-wide.md).
//
// Two warps load tiles of 64 tokens. Two math warpgroups own alternate tiles: the owner computes a tile's scores and
// probabilities; both add its values, each for half of the latents.
//
//     group 0   scores 0 | softmax 0 | values 0 | scores 2          | values 1 | softmax 2 | values 2 ...
//     group 1        scores 1        | values 0 | softmax 1 | values 1 | scores 3 | values 2 | softmax 3 ...
//
#include "wide_load.cuh"
#include "wide_merge.cuh"
#include "wide_output.cuh"
#include "wide_product.cuh"
#include "wide_query.cuh"
#include "wide_softmax.cuh"

namespace streamla {

// Adds the values of tile `tile` (counted over the program) once its probabilities are there.
DEVICE void add_values(
    float (&out)[4][SCORES], float (&mass)[COLUMNS / 4], int tile, bool owner, u32 shared, const Lane& lane) {
    const u32 stage = uniform(shared + Shared::STAGE + tile % STAGES * STAGE_BYTES);
    mbarrier_wait(shared + Shared::PROBABILITY_FULL, tile & 1);
    if (load_shared_u32(shared + Shared::RAISED)) rescale(out, mass, owner, shared, lane);
    value_tile(out, stage + token_offset(lane.value_token()) + lane.value_latent(),
               matrix_descriptor(shared + Shared::PROBABILITY, 128, TILE * 16, SWIZZLE_NONE));
    __syncwarp();
    if (threadIdx.x % WARP == 0) {
        mbarrier_arrive(shared + Shared::EMPTY + tile % STAGES * 8);
        mbarrier_arrive(shared + Shared::PROBABILITY_EMPTY);
    }
}

// The tiles of one item; `first` of them were before it in this program.
DEVICE void attend(
    float (&out)[4][SCORES], float (&mass)[COLUMNS / 4], const Item& item, int first, const Causal& causal,
    u32 shared, const Lane& lane) {
    const int num_tiles = item.num_tiles();
    const u64 query = matrix_descriptor(shared + Shared::QUERY, 16, 1024, SWIZZLE_128);
    const int first_own = (first ^ lane.group) & 1;
    for (int i = first_own; i < num_tiles; i += GROUPS) {
        const int tile = first + i, token = item.begin + i * TILE;
        const u32 stage = uniform(shared + Shared::STAGE + tile % STAGES * STAGE_BYTES);
        mbarrier_wait(shared + Shared::FULL + tile % STAGES * 8, tile / STAGES & 1);
        float s[SCORES];
        score_tile(s, stage + token_offset(lane.score_token()) + lane.lane_pair * 16, query);
        if (i > 0)
            add_values(out, mass, tile - 1, false, shared, lane);
        else
            wgmma_wait<0>();
        if (token + TILE > causal.first_limit) hide_tokens(s, stage, token, causal, lane);
        softmax_tile(s, mass, shared, tile, lane);
        add_values(out, mass, tile, true, shared, lane);
    }
    if (num_tiles && (num_tiles - 1 & 1) != first_own)
        add_values(out, mass, first + num_tiles - 1, false, shared, lane);
}

DEVICE void math(
    const Query& query, const Output& output, const int* work, int first, int last, int row_tile,
    float score_scale, float value_scale, bool causal, u32 shared) {
    const Lane lane;
    const int first_row = row_tile * TILE_ROWS, num_rows = min(TILE_ROWS, ROWS - first_row);
    int tiles = 0;
    for (int index = first; index < last; ++index) {
        const Item item = load_item(work, index);
        named_barrier(MATH_BARRIER, MATH_THREADS);  // nobody reads the item before's query or row states
        stage_query(query, item.request, first_row, num_rows, score_scale, shared);
        fence_async_proxy();
        named_barrier(MATH_BARRIER, MATH_THREADS);

        const bool by_query = causal && SEQLEN_Q > 1;
        Causal limits = {0, item.seqlen, first_row, by_query};
        limits.first_limit = limits.limit(0);
        float out[4][SCORES] = {}, mass[COLUMNS / 4] = {};
        attend(out, mass, item, tiles, limits, shared, lane);
        tiles += item.num_tiles();

        named_barrier(MATH_BARRIER, MATH_THREADS);  // the scratch is free
        finish_rows(mass, output, item, first_row, num_rows, value_scale, shared, lane);
        store_rows(out, output, item, first_row, num_rows, shared, lane);
    }
}

}  // namespace streamla

using namespace streamla;

// Program p of the plan runs as ROW_TILES neighbouring blocks, which share its tokens.
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
            mbarrier_init(shared + Shared::EMPTY + stage * 8, MATH_WARPS);
        }
        mbarrier_init(shared + Shared::PROBABILITY_FULL, GROUP_WARPS);
        mbarrier_init(shared + Shared::PROBABILITY_EMPTY, MATH_WARPS);
        fence_mbarrier_init();
    }
    __syncthreads();

    const int program = blockIdx.x / ROW_TILES, row_tile = blockIdx.x % ROW_TILES;
    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        const int half = (threadIdx.x - MATH_THREADS) / WARP;
        if (half < LOAD_WARPS)
            load_tiles({kv_cache, page_stride, token_stride, page_table, page_table_stride}, work,
                       work_indptr[program], work_indptr[program + 1], half, shared);
        allow_next_grid();
    } else {
        registers_grow<MATH_REGISTERS>();
        const float scale = k_scale ? *k_scale : 1.f;
        math({q_nope, q_pe, {q_nope_request, q_nope_query, q_nope_head}, {q_pe_request, q_pe_query, q_pe_head}},
             {out, lse, {out_request, out_query, out_head}, {lse_request, lse_query, lse_head}, out_partial,
              lse_partial, lse_scale},
             work, work_indptr[program], work_indptr[program + 1], row_tile, softmax_scale_log2 * scale, scale,
             causal, shared);
    }
}

// Grid (ROWS, batch), LATENT / 4 threads.
extern "C" __global__ void __launch_bounds__(LATENT / 4) mla_merge_wide(
    const int* split_indptr,
    u16* out, i64 out_request, i64 out_query, i64 out_head,
    float* lse, i64 lse_request, i64 lse_query, i64 lse_head,
    const float* out_partial, const float* lse_partial, float lse_scale) {
    const int request = blockIdx.y, begin = split_indptr[request], end = split_indptr[request + 1];
    wait_for_previous_grid();
    if (begin < end)
        merge_row(out_partial, lse_partial, begin, end, blockIdx.x,
                  out + Rows{out_request, out_query, out_head}.offset(request, blockIdx.x),
                  lse + Rows{lse_request, lse_query, lse_head}.offset(request, blockIdx.x), lse_scale);
}
