// A ring of one stage in which racecheck reports a hazard although every access is ordered (docs/attention-sm90.md).
//
//     nvcc -arch=sm_90a -o ring docs/racecheck_ring.cu && compute-sanitizer --tool racecheck ./ring
//
// A warp reads the stage, __syncwarp() orders its lanes, one lane hands the stage back through an mbarrier, and another
// warp waits for that before its next bulk copy. Reads of the lane that arrives are followed; those of the others are
// reported as racing with the copy.
#include <cstdio>

__device__ unsigned addr(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void wait(unsigned bar, unsigned parity) {
    asm volatile("{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra L;\n}" :: "r"(bar), "r"(parity) : "memory");
}
__global__ void ring(const int* in, int* out) {
    __shared__ alignas(128) int stage[256];
    __shared__ alignas(8) unsigned long long full, empty;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(addr(&full)));
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(addr(&empty)));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 8; i++) {
            if (i) wait(addr(&empty), (i - 1) & 1);
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" :: "r"(addr(&full)) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" :: "r"(addr(stage)), "l"(in + i * 256), "r"(addr(&full)) : "memory");
        }
    } else if (threadIdx.x >= 32) {
        int sum = 0;
        for (int i = 0; i < 8; i++) {
            wait(addr(&full), i & 1);
            for (int k = threadIdx.x - 32; k < 256; k += 32) sum += stage[k];
            __syncwarp();
            if (threadIdx.x == 32) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(addr(&empty)) : "memory");
        }
        out[threadIdx.x - 32] = sum;
    }
}
int main() {
    int *in, *out;
    cudaMalloc(&in, 8 * 1024);
    cudaMalloc(&out, 32 * sizeof(int));
    cudaMemset(in, 1, 8 * 1024);
    ring<<<1, 64>>>(in, out);
    printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
