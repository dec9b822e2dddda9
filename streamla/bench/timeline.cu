// Stands in for the product that makes the query: writes it late, and lets the next grid in as soon as the rule of
// programmatic launch allows, if `early`. Keeps times as ptx.cuh's stamps do.
extern "C" __global__ void produce(const uint4* source, uint4* query, int pieces, int nanoseconds, int early,
                                   volatile unsigned long long* stamps) {
    unsigned long long begin, now;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin) :: "memory");
    if (early) asm volatile("griddepcontrol.launch_dependents;");
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    } while (now - begin < nanoseconds);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += gridDim.x * blockDim.x) query[i] = source[i];
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    if (threadIdx.x == 0) {
        stamps[blockIdx.x * 3] = stamps[blockIdx.x * 3 + 1] = begin;
        stamps[blockIdx.x * 3 + 2] = now;
    }
}
