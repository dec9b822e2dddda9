// The end of an item over fp8_ds_mla rows: as finish.cuh has it, with this format's latents and units.
#pragma once

#include "ds_mla_softmax.cuh"
#include "finish.cuh"

namespace streamla {

// 4 latents of a thread that follow each other in each group of a run; the neighbour in g has the next 4.
struct RangePerGroup {
    DEVICE static float value_unit(u32 shared, int team) { return streamla::value_unit(shared, team); }

    DEVICE static void store_floats(float* row, const float (&v)[THREAD_LATENTS], bool exists, int run,
                                    const Lane& lane) {
        if (!exists) return;
#pragma unroll
        for (int i = 0; i < RUN_GROUPS; i++)
            *reinterpret_cast<float4*>(row + first_group_latent(lane, run, i)) =
                make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
    DEVICE static void store_words(u32* row, const float (&v)[THREAD_LATENTS], int run, const Lane& lane) {
#pragma unroll
        for (int i = 0; i < RUN_GROUPS; i++)
            store_relaxed(row + first_group_latent(lane, run, i),
                          make_uint4(__float_as_uint(v[4 * i]), __float_as_uint(v[4 * i + 1]),
                                     __float_as_uint(v[4 * i + 2]), __float_as_uint(v[4 * i + 3])));
    }
    DEVICE static void store_bfloats(u16* row, const float (&v)[THREAD_LATENTS], bool aligned, int run,
                                     const Lane& lane) {
#pragma unroll
        for (int i = 0; i < RUN_GROUPS; i++)
            streamla::store_bfloats<4>(row + first_group_latent(lane, run, i), v + 4 * i, aligned);
    }
};
static_assert(GROUP_THREAD_LATENTS == 4, "a quad of accumulators is of one group");

}  // namespace streamla
