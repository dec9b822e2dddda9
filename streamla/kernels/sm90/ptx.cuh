// Hopper's own instructions as small functions: mbarriers, bulk copies, conversions, and the
// loads, stores and barriers that need an address space or an ordering C++ cannot express.
// Compiles under NVRTC: no header is included.
#pragma once

#define DEVICE __device__ __forceinline__

// Defined as 1 for runs under compute-sanitizer's racecheck, which does not follow everything that is ordered
// (docs/attention-sm90.md, "Checked").
#ifndef STREAMLA_RACECHECK
#define STREAMLA_RACECHECK 0
#endif

namespace streamla {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int WARP = 32;
constexpr int WARPGROUP = 128;
constexpr u32 FULL_WARP = 0xffffffffu;
constexpr bool RACECHECK = STREAMLA_RACECHECK;
// Lanes that arrive at an mbarrier for their warp: one, behind a __syncwarp() that orders all.
constexpr int ARRIVING_LANES = RACECHECK ? WARP : 1;
constexpr float NEG_INF = __builtin_bit_cast(float, 0xff800000u);
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// ---- shared memory. Addresses are 32-bit offsets in the shared window (u32), never generic pointers.

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE u32 load_shared_u32(u32 address) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
DEVICE uint2 load_shared_u32x2(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
DEVICE uint4 load_shared_u32x4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
DEVICE float load_shared_f32(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}
DEVICE float2 load_shared_f32x2(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}
DEVICE float4 load_shared_f32x4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
    return v;
}
DEVICE void store_shared(u32 address, u32 v) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(v) : "memory");
}
DEVICE void store_shared_u8(u32 address, u8 v) {
    asm volatile("st.shared.u8 [%0], %1;" :: "r"(address), "r"(static_cast<u32>(v)) : "memory");
}
DEVICE void store_shared(u32 address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(v) : "memory");
}
DEVICE void store_shared(u32 address, float2 v) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(v.x), "f"(v.y) : "memory");
}
DEVICE void store_shared(u32 address, uint2 v) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(address), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void store_shared(u32 address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
DEVICE void store_shared(u32 address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8, and holds two
// neighbours of row lane / 4 of each.
DEVICE void store_matrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(m0), "r"(m1), "r"(m2), "r"(m3) : "memory");
}

// ---- ordering

// What this thread stored to shared memory becomes visible to wgmma and to the copy engine. Execute it
// in every storing thread, then a barrier.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads, a multiple of 32. All of them wait.
DEVICE void named_barrier(int id, int threads) {
#pragma unroll
    for (int i = 0; i < (RACECHECK ? 2 : 1); i++)
        asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
// The same where others only arrive.
DEVICE void named_barrier_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
// Counts this thread in without waiting.
DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
// As named_barrier, and tells every thread whether any of them passed true.
DEVICE bool named_barrier_any(int id, int threads, bool mine) {
    int any;
    asm volatile("{\n"
                 ".reg .pred p, q;\n"
                 "setp.ne.s32 q, %3, 0;\n"
                 "bar.red.or.pred p, %1, %2, q;\n"
                 "selp.s32 %0, 1, 0, p;\n"
                 "}" : "=r"(any) : "r"(id), "r"(threads), "r"(static_cast<int>(mine)) : "memory");
    return any;
}

// ---- mbarriers (8 bytes each)

DEVICE void mbarrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
// After all mbarrier_init: visible to the copy engine (and to the cluster).
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(barrier) : "memory");
}
DEVICE void mbarrier_arrive_times(u32 barrier, int arrivals) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase with this parity has completed.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "WAIT_%=:\n"
                 "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@!p bra WAIT_%=;\n"
                 "}" :: "r"(barrier), "r"(parity) : "memory");
}

// ---- bulk copies: global to shared, 16-byte aligned, a multiple of 16 bytes

DEVICE u64 l2_evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE u64 l2_evict_normal() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;"
        :: "r"(destination), "l"(source), "r"(bytes), "r"(barrier), "l"(l2_policy) : "memory");
}

// One 16-byte store, which the compiler may not take apart.
DEVICE void store_global(float* p, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// The same value, of which the compiler knows nothing: what follows from it is computed after this point and not kept
// in registers (or spilled) from long before.
DEVICE int forget(int v) {
    asm volatile("" : "+r"(v));
    return v;
}
DEVICE u32 forget(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}

// ---- conversions and fp32 helpers

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The same, volatile: it stays where it was written, in the shadow of the wgmma before it.
DEVICE float exp2_in_shadow(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u32 pack_half2(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE u32 pack_bfloat2(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE float2 unpack_half2(u32 pair) {
    float2 v;
    asm("{\n"
        ".reg .b16 l, h;\n"
        "mov.b32 {l, h}, %2;\n"
        "cvt.f32.f16 %0, l;\n"
        "cvt.f32.f16 %1, h;\n"
        "}" : "=f"(v.x), "=f"(v.y) : "r"(pair));
    return v;
}
DEVICE float bfloat_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bfloat_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Four packed e4m3fn to two f16x2, exact (NaN stays NaN). Volatile keeps it where it was written, in
// the shadow of the wgmma before it.
DEVICE void widen_e4m3(u32 quad, u32& low, u32& high) {
    asm volatile("{\n"
                 ".reg .b16 l, h;\n"
                 "mov.b32 {l, h}, %2;\n"
                 "cvt.rn.f16x2.e4m3x2 %0, l;\n"
                 "cvt.rn.f16x2.e4m3x2 %1, h;\n"
                 "}" : "=r"(low), "=r"(high) : "r"(quad));
}
DEVICE u32 max_half2(u32 a, u32 b) {
    u32 r;
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// ---- roles

// Hands registers back to, or takes them from, the block's pool; executed by a whole warpgroup.
template <int REGISTERS> DEVICE void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> DEVICE void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
// The value of lane 0 in every lane: tells the compiler that it is uniform in the warp.
template <typename T> DEVICE T uniform(T v) { return __shfl_sync(FULL_WARP, v, 0); }

// The largest in the warp, by way of integers in the same order; a positive NaN is larger than all.
DEVICE float warp_max(float v) {
    const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(ordered(__reduce_max_sync(FULL_WARP, ordered(__float_as_int(v)))));
}

// ---- between programs

// Adds 1 to a counter in global memory; everything this thread (and those it met in a barrier before)
// wrote is visible to whoever sees the sum through load_acquire.
DEVICE void add_release(int* counter, int v) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" :: "l"(counter), "r"(v) : "memory");
}
DEVICE int load_acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Stores and loads of words that programs hand each other without a fence between: each word is whole, in no
// order with others.
DEVICE void store_relaxed(u32* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
DEVICE void store_relaxed(u32* p, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE u32 load_relaxed(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE uint4 load_relaxed_x4(const u32* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// ---- programmatic dependent launch

// When a program came to the wait, when that was over, when it had issued its last store.
enum Stamp { STAMP_ARRIVED, STAMP_RELEASED, STAMP_DONE, STAMPS };
#ifdef STREAMLA_STAMPS  // the address of STAMPS times (ns) a program: `streamla bench timeline` reads them
DEVICE void stamp(Stamp which) {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    if (threadIdx.x == 0) reinterpret_cast<volatile u64*>(STREAMLA_STAMPS)[blockIdx.x * STAMPS + which] = now;
}
#else
DEVICE void stamp(Stamp) {}
#endif

// Until the grid before this one in the stream has finished and its writes are visible.
DEVICE void wait_for_previous_grid() {
    stamp(STAMP_ARRIVED);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    stamp(STAMP_RELEASED);
}
// The next grid may be launched; it still waits for this one before it reads.
DEVICE void allow_next_grid() { asm volatile("griddepcontrol.launch_dependents;"); }

}  // namespace streamla
