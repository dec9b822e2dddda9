// Cycles that a wgmma m64nNk16 costs its warpgroup when A comes from registers, widened from fp8 just before, by the
// number of warpgroups of an SM that do so at once (docs/attention-sm90.md, "What holds the rest").
//
//     nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -I streamla/kernels/sm90 -o rate docs/wgmma_rate.cu && ./rate
#include <cstdio>

#include "wgmma.cuh"

using namespace streamla;

constexpr int STEPS = 16;  // of a stage: wgmmas between two full waits, two a commit
constexpr int SMS = 132, SHARED_BYTES = 100 * 1024;

// Steps go to CHAINS accumulators in turn.
template <int N, int CHAINS> __global__ void stages(long long* cycles, float* sink, const u32* source, int count) {
    extern __shared__ u8 dynamic_shared[];
    const u32 shared = (shared_address(dynamic_shared) + 1023) & ~1023u;
    for (int i = threadIdx.x; i < 8192; i += blockDim.x) store_shared(shared + i * 4, 0u);
    fence_async_proxy();
    const u64 b = matrix_descriptor(shared, 16, 1024, SWIZZLE_128);
    u32 raw[8], a[4][4] = {};
    for (int i = 0; i < 8; i++) raw[i] = source[threadIdx.x * 8 + i];
    float d[CHAINS][N / 2] = {}, sum = 0.0f;
    __syncthreads();
    const long long begin = clock64();
    for (int s = 0; s < count; s++) {
#pragma unroll
        for (int w = 0; w < STEPS; w += 2) {
            if (w >= 4) wgmma_wait<1>();
#pragma unroll
            for (int i = w; i < w + 2; i++) {
                widen_e4m3(raw[i % 4], a[i % 4][0], a[i % 4][2]);
                widen_e4m3(raw[i % 4 + 4], a[i % 4][1], a[i % 4][3]);
            }
            wgmma_fence();
#pragma unroll
            for (int i = w; i < w + 2; i++)
                wgmma_f16<false>(d[i % CHAINS], a[i % 4], b + i % 4 * 2, i >= CHAINS);
            wgmma_commit();
        }
        wgmma_wait<0>();
        for (int c = 0; c < CHAINS; c++)
            for (int i = 0; i < N / 2; i++) sum += d[c][i];
    }
    __syncthreads();
    const long long end = clock64();
    sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    if (blockIdx.x == 0 && threadIdx.x == 0) *cycles = end - begin;
}

template <int N, int CHAINS> void measure() {
    long long *cycles, value = 0;
    float* sink;
    u32* source;
    cudaMalloc(&cycles, 8);
    cudaMalloc(&sink, SMS * 4 * WARPGROUP * 4);
    cudaMalloc(&source, 4 * WARPGROUP * 32);
    cudaMemset(source, 0, 4 * WARPGROUP * 32);
    cudaFuncSetAttribute(stages<N, CHAINS>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    printf("N %2d, %d accumulators:", N, CHAINS);
    for (int groups = 1; groups <= 4; groups++) {
        for (int count : {10, 100}) stages<N, CHAINS><<<SMS, groups * WARPGROUP, SHARED_BYTES>>>(cycles, sink, source, count);
        const cudaError_t error = cudaMemcpy(&value, cycles, 8, cudaMemcpyDeviceToHost);
        if (error) {
            printf(" %s\n", cudaGetErrorString(error));
            return;
        }
        printf(" %6.1f", double(value) / (100 * STEPS));
    }
    printf("  (1 to 4 warpgroups)\n");
    cudaFree(cycles), cudaFree(sink), cudaFree(source);
}

int main() {
    measure<8, 1>(), measure<8, 2>(), measure<16, 1>(), measure<16, 2>(), measure<32, 1>(), measure<32, 2>();
}
