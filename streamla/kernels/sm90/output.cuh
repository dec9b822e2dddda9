// Where results go: to the output, or as a partial to who merges it.
#pragma once

#include "exchange.cuh"

namespace streamla {

struct Output {
    u16* out;  // bf16
    float* lse;
    Strides out_strides, lse_strides;
    float *out_partial, *lse_partial;  // contiguous
    bool aligned;                      // every row of out starts at a multiple of 16 bytes
    float lse_scale;                   // 1 for the natural logarithm
    bool merges;                       // partials go to the programs of this launch, through Exchange

    DEVICE Exchange exchange() const { return {out_partial, lse_partial}; }
    DEVICE u16* out_row(int request, int row) const { return out + out_strides.at(request, row); }
    DEVICE float* partial(int slot, int row) const { return out_partial + partial_row(slot, row) * LATENT; }
};

// N latents that follow each other, as bf16.
template <int N>
DEVICE void store_bfloats(u16* p, const float* v, bool aligned) {
    u32 pairs[(N + 1) / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2) pairs[i / 2] = pack_bfloat2(v[i], v[min(i + 1, N - 1)]);
    if (aligned && N > 1) {
        if constexpr (N == 8) *reinterpret_cast<uint4*>(p) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        if constexpr (N == 4) *reinterpret_cast<uint2*>(p) = make_uint2(pairs[0], pairs[1]);
        if constexpr (N == 2) *reinterpret_cast<u32*>(p) = pairs[0];
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) p[i] = static_cast<u16>(pairs[i / 2] >> 16 * (i % 2));
}

}  // namespace streamla
