/* The instructions of sm_80 that the kernels are made of, each under a name.

   Fragments of mma m16n8k16, for lane l of the warp, with row = l / 4 and pair = 2 * (l % 4):
     A (16 x 16)  a[0] (row, pair)  a[1] (row + 8, pair)  a[2] (row, pair + 8)  a[3] (row + 8, pair + 8)   two 16-bit each
     B (16 x 8)   b0 (pair, row)    b1 (pair + 8, row)                                                     two 16-bit each
     C (16 x 8)   c[0..1] (row, pair..pair + 1)           c[2..3] (row + 8, pair..pair + 1)                fp32
   Two C fragments side by side, packed to 16 bits, are one A fragment: that is how P goes from one product to the next
   without leaving the registers. */
#ifndef ATTENTION_MMA_SM80_CUH
#define ATTENTION_MMA_SM80_CUH

#include "attention/device.cuh"

/* The shuffle changes nothing, but keeps the compiler from working the address out again wherever it is used, from a
   slow special register. */
__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return __shfl_sync(~0u, (uint32_t)__cvta_generic_to_shared(pointer), 0);
}

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* c += a b */
template <enum dtype TYPE>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (TYPE == DTYPE_BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

/* 16 bytes from global to shared memory, past the registers; zeros, and nothing is read, when not valid. Arrives by
   copy_wait. */
__device__ __forceinline__ void copy_async(uint32_t address, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t bits) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
    uint32_t bits;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
    return bits;
}

__device__ __forceinline__ uint4 load_shared_chunk(uint32_t address) {
    uint4 r;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ void store_shared_float(uint32_t address, float value) {
    store_shared(address, __float_as_uint(value));
}

__device__ __forceinline__ float load_shared_float(uint32_t address) {
    return __uint_as_float(load_shared(address));
}

__device__ __forceinline__ void store_shared_floats(uint32_t address, float4 values) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values.x), "f"(values.y),
                 "f"(values.z), "f"(values.w)
                 : "memory");
}

__device__ __forceinline__ float4 load_shared_floats(uint32_t address) {
    float4 r;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}

__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
    return r;
}

/* A barrier among `threads` of the block; barrier 0 is __syncthreads. */
__device__ __forceinline__ void barrier(int which, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

/* Counters in memory, between thread blocks: whoever finds a count sees what others wrote before they counted up. */
__device__ __forceinline__ int load_count(const int *counter) {
    int count;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}

__device__ __forceinline__ void wait_for_count(const int *counter, int count) {
    while (load_count(counter) != count) {
    }
}

__device__ __forceinline__ void count_up(int *counter, int by = 1) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(by) : "memory");
}

/* Counts one more; the count before. */
__device__ __forceinline__ int take_count(int *counter) {
    int count;
    asm volatile("atom.acquire.gpu.global.add.s32 %0, [%1], 1;" : "=r"(count) : "l"(counter) : "memory");
    return count;
}

/* to[0..3] += c, in the L2 cache; sm_90 */
__device__ __forceinline__ void reduce_add_4(float *to, const float (&c)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(c[0]), "f"(c[1]),
                 "f"(c[2]), "f"(c[3])
                 : "memory");
}

#endif
