// The merge in a launch of its own, of the fp32 partials that attention without a merge leaves, whatever the cache holds.
// merge.cuh is the merge in attention's own launch.

#include "output.cuh"

namespace streamla {

// A row's partials are shared out to slices of threads, four latents a thread.
constexpr int SLICE_THREADS = LATENT / 4;
constexpr int SLICES = 4;
constexpr int THREADS = SLICES * SLICE_THREADS;
constexpr int DEPTH = 4;  // partials in flight

// Four latents, weighted relative to exp(largest).
struct Weighted {
    float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float largest = NEG_INF;
    float sum = 0.0f;

    DEVICE void rescale(float new_largest) {
        const float factor = exp2_approx(LOG2_E * (largest - exponent_base(new_largest)));
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] *= factor;
        sum *= factor;
        largest = new_largest;
    }
    DEVICE void add(const float4& v, float weight) {
        if (weight == 0.0f) return;  // what it holds may be NaN
        value[0] += weight * v.x;
        value[1] += weight * v.y;
        value[2] += weight * v.z;
        value[3] += weight * v.w;
        sum += weight;
    }
    // Slots begin, begin + SLICES, ... before end. `v` and `lse` are those of slot 0.
    DEVICE void add_partials(const float* v, const float* lse, int begin, int end) {
        for (int first = begin; first < end; first += SLICES * DEPTH) {
            float4 values[DEPTH];
            float lses[DEPTH], new_largest = largest;
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                const int slot = first + i * SLICES;
                const i64 row = static_cast<i64>(slot) * TOTAL_ROWS;
                lses[i] = slot < end ? __ldcg(lse + row) : NEG_INF;
                if (lses[i] == -NEG_INF) lses[i] = NEG_INF;  // how some libraries write an empty row
                values[i] = slot < end ? __ldcg(reinterpret_cast<const float4*>(v + row * LATENT))
                                       : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                new_largest = fmaxf(new_largest, lses[i]);
            }
            rescale(new_largest);
#pragma unroll
            for (int i = 0; i < DEPTH; i++)
                add(values[i], exp2_approx(LOG2_E * (lses[i] - exponent_base(largest))));
        }
    }
    DEVICE void join(const Weighted& other) {
        rescale(fmaxf(largest, other.largest));
        const float weight = exp2_approx(LOG2_E * (other.largest - exponent_base(largest)));
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] += weight * other.value[i];
        sum += weight * other.sum;
    }
    DEVICE void store(const Output& output, int request, int row, int latent) const {
        const float normal = sum == 0.0f ? 0.0f : 1.0f / sum;
        const float v[4] = {value[0] * normal, value[1] * normal, value[2] * normal, value[3] * normal};
        store_bfloats<4>(output.out_row(request, row) + latent, v, output.aligned);
        if (latent == 0)
            output.lse[output.lse_strides.at(request, row)] =
                output.lse_scale * (exponent_base(largest) + LN_2 * log2_approx(sum));
    }
};

}  // namespace streamla

using namespace streamla;

// A row of a request: grid (TOTAL_ROWS, batch). A request that was not split is final already.
extern "C" __global__ void __launch_bounds__(THREADS)
    mla_merge(const int* split_indptr, u16* out, i64 out_batch, i64 out_query, i64 out_head, int out_aligned,
              float* lse, i64 lse_batch, i64 lse_query, i64 lse_head, float* out_partial, float* lse_partial,
              float lse_scale) {
    __shared__ Weighted others[SLICES - 1][SLICE_THREADS];
    const int slice = threadIdx.x / SLICE_THREADS, thread = threadIdx.x % SLICE_THREADS;
    const int row = blockIdx.x, request = blockIdx.y, latent = thread * 4;
    const int begin = __ldg(split_indptr + request), end = __ldg(split_indptr + request + 1);
    if (begin == end) return;
    const Output output{out, lse, {out_batch, out_query, out_head}, {lse_batch, lse_query, lse_head},
                        out_partial, lse_partial, out_aligned != 0, lse_scale, false};
    Weighted w;
    w.add_partials(output.partial(0, row) + latent, lse_partial + row, begin + slice, end);
    if (slice) others[slice - 1][thread] = w;
    __syncthreads();
    if (slice) return;
#pragma unroll
    for (int i = 0; i < SLICES - 1; i++) w.join(others[i][thread]);
    w.store(output, request, row, latent);
}
