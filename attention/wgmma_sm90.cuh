/* Hopper's own instructions (sm_90a), one function each: matrix products of a warpgroup that read shared memory by
   themselves (wgmma), copies of whole tiles by a single thread (TMA), and the barriers between the two.

   Products. D (64 x N) += A (64 x 16) B (16 x N); warp w of the warpgroup has rows 16 w to 16 w + 15 of D, as N / 8
   C fragments of mma_sm80.cuh. A is in registers (an A fragment of mma_sm80.cuh for each warp) or in a tile, B always in a
   tile; panel_tile.cuh says how tiles lie, and makes the descriptors that products take.

   Proxies. wgmma and TMA read and write shared memory past the ordinary loads and stores: between an ordinary store and
   their reading it lie fence_async and a barrier. */
#ifndef ATTENTION_WGMMA_SM90_CUH
#define ATTENTION_WGMMA_SM90_CUH

#include "attention/panel_tile.cuh"

#include <cuda.h>

/* Code with these instructions can be compiled for no other target. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define COMPILED_FOR_SM90A true
#else
#define COMPILED_FOR_SM90A false
#endif

enum { WARPGROUP = 128 };

/* ---- products ---- */

/* Before the first product, and after registers of one have been written by anything else. */
__device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* Ends a group of products. */
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Tells the compiler that the registers change here: it must not touch them between a product and its wait. */
template <int N> __device__ __forceinline__ void registers_change(float (&d)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
    }
}

/* Waits until at most the newest PENDING groups are under way; d was the result of one that is not. */
template <int PENDING, int N> __device__ __forceinline__ void wgmma_wait(float (&d)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    registers_change(d);
}

/* wgmma_tiles<TYPE, depth of A, depth of B>(d, a, b, add): d (+)= A B, both in tiles
   wgmma_fragment<TYPE, depth of B>(d, a, b, add):          d (+)= A B, A in registers
   add false: d is overwritten. N, the columns, follows from d. */
#define TEN_REGISTERS(tens)                                                                                  \
    "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, "            \
    "%" #tens "7, %" #tens "8, %" #tens "9"
#define FRAGMENT(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FRAGMENTS_2 FRAGMENT(0), FRAGMENT(1)
#define FRAGMENTS_4 FRAGMENTS_2, FRAGMENT(2), FRAGMENT(3)
#define FRAGMENTS_8                                                                                          \
    FRAGMENT(0), FRAGMENT(1), FRAGMENT(2), FRAGMENT(3), FRAGMENT(4), FRAGMENT(5), FRAGMENT(6), FRAGMENT(7)
#define FRAGMENTS_10 FRAGMENTS_8, FRAGMENT(8), FRAGMENT(9)
#define FRAGMENTS_12 FRAGMENTS_10, FRAGMENT(10), FRAGMENT(11)
#define FRAGMENTS_14 FRAGMENTS_12, FRAGMENT(12), FRAGMENT(13)
#define FRAGMENTS_16 FRAGMENTS_14, FRAGMENT(14), FRAGMENT(15)

#define WGMMA_TILES_ASM(n, type, registers, fragments, r0, r1, r2, r3, r4)                                   \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #r2 ", 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, "        \
                 "%" #r0 ", %" #r1 ", add, 1, 1, %" #r3 ", %" #r4 ";\n}"                                     \
                 : FRAGMENTS_##fragments                                                                     \
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A), "n"((int)B)                                   \
                 : "memory")
#define WGMMA_FRAGMENT_ASM(n, type, registers, fragments, r0, r1, r2, r3, r4, r5, r6)                        \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #r5 ", 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, "        \
                 "{%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", add, 1, 1, %" #r6 ";\n}"               \
                 : FRAGMENTS_##fragments                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)B)            \
                 : "memory")
#define WGMMA(n, registers, fragments, r0, r1, r2, r3, r4, r5, r6)                                           \
    template <enum dtype TYPE, enum depth A, enum depth B>                                                   \
    __device__ __forceinline__ void wgmma_tiles(float(&d)[n / 8][4], uint64_t a, uint64_t b, bool add) {     \
        if constexpr (TYPE == DTYPE_BF16) {                                                                  \
            WGMMA_TILES_ASM(n, "bf16", registers, fragments, r0, r1, r2, r3, r4);                            \
        } else {                                                                                             \
            WGMMA_TILES_ASM(n, "f16", registers, fragments, r0, r1, r2, r3, r4);                             \
        }                                                                                                    \
    }                                                                                                        \
    template <enum dtype TYPE, enum depth B>                                                                 \
    __device__ __forceinline__ void wgmma_fragment(                                                          \
        float(&d)[n / 8][4], const uint32_t(&a)[4], uint64_t b, bool add) {                                  \
        if constexpr (TYPE == DTYPE_BF16) {                                                                  \
            WGMMA_FRAGMENT_ASM(n, "bf16", registers, fragments, r0, r1, r2, r3, r4, r5, r6);                 \
        } else {                                                                                             \
            WGMMA_FRAGMENT_ASM(n, "f16", registers, fragments, r0, r1, r2, r3, r4, r5, r6);                  \
        }                                                                                                    \
    }

#define REGISTERS_30 TEN_REGISTERS() ", " TEN_REGISTERS(1) ", " TEN_REGISTERS(2)
#define REGISTERS_40 REGISTERS_30 ", " TEN_REGISTERS(3)
#define REGISTERS_50 REGISTERS_40 ", " TEN_REGISTERS(4)
#define REGISTERS_60 REGISTERS_50 ", " TEN_REGISTERS(5)
WGMMA(16, "%0, %1, %2, %3, %4, %5, %6, %7", 2, 8, 9, 10, 11, 12, 13, 14)
WGMMA(32, TEN_REGISTERS() ", %10, %11, %12, %13, %14, %15", 4, 16, 17, 18, 19, 20, 21, 22)
WGMMA(64, REGISTERS_30 ", %30, %31", 8, 32, 33, 34, 35, 36, 37, 38)
WGMMA(80, REGISTERS_40, 10, 40, 41, 42, 43, 44, 45, 46)
WGMMA(96, REGISTERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47", 12, 48, 49, 50, 51, 52, 53, 54)
WGMMA(112, REGISTERS_50 ", %50, %51, %52, %53, %54, %55", 14, 56, 57, 58, 59, 60, 61, 62)
WGMMA(128, REGISTERS_60 ", %60, %61, %62, %63", 16, 64, 65, 66, 67, 68, 69, 70)
#undef WGMMA
#undef WGMMA_FRAGMENT_ASM
#undef WGMMA_TILES_ASM
#undef FRAGMENTS_16
#undef FRAGMENTS_14
#undef FRAGMENTS_12
#undef FRAGMENTS_10
#undef FRAGMENTS_8
#undef FRAGMENTS_4
#undef FRAGMENTS_2
#undef FRAGMENT
#undef REGISTERS_60
#undef REGISTERS_50
#undef REGISTERS_40
#undef REGISTERS_30
#undef TEN_REGISTERS

/* An A fragment of a warp to 16 rows x 16 columns: lane l gives the address of chunk l / 16 of row l % 16. */
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* ---- barriers ---- */

/* Arrival barriers in shared memory, 8 bytes. A phase is over when `count` arrivals and all expected bytes have come;
   waiting for parity p returns once the phase of that parity is over: 0 first, then 1, 0, ... */
__device__ __forceinline__ void arrival_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/* After the last arrival_init, before the barrier that tells the others. */
__device__ __forceinline__ void arrival_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and has the phase wait for `bytes` more from copies. */
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void arrival_wait(uint32_t barrier, unsigned parity) {
    uint32_t over = 0;
    while (over == 0) {
        asm volatile("{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, over;\n}"
                     : "=r"(over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    }
}

/* A named barrier (1 to 15) among `threads` of the block: these wait for it ... */
__device__ __forceinline__ void named_wait(int which, int threads) {
    barrier(which, threads);
}
/* ... and these do not. */
__device__ __forceinline__ void named_arrive(int which, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

/* What ordinary instructions of this thread have written to shared memory, TMA and wgmma see after this. */
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Bulk copies that this thread starts after this come after all in memory that it knows to be done, by a counter. */
__device__ __forceinline__ void fence_async_memory() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* ---- copies ---- */

/* One box of a 4-dimensional tensor to shared memory, by one thread; its bytes arrive at `barrier`. What lies outside of the
   tensor is zero. */
__device__ __forceinline__ void tma_load(
    uint32_t to, const CUtensorMap *map, uint32_t barrier, int d, int position, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(d), "r"(position), "r"(head), "r"(batch)
                 : "memory");
}

/* The way back; what lies outside is not written. Belongs to the thread's group of bulk copies. */
__device__ __forceinline__ void tma_store(
    const CUtensorMap *map, uint32_t from, int d, int position, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(from), "r"(d), "r"(position), "r"(head), "r"(batch)
        : "memory");
}

/* `bytes` in a row, a multiple of 16 */
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t barrier, int bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* The way back; belongs to the thread's group of bulk copies. */
__device__ __forceinline__ void bulk_store(void *to, uint32_t from, int bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
        : "memory");
}

/* to[i] += from[i], floats, in the L2 cache; belongs to the thread's group of bulk copies */
__device__ __forceinline__ void bulk_add(float *to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until at most PENDING of this thread's groups still read shared memory ... */
template <int PENDING> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
/* ... or are not yet visible in memory. */
template <int PENDING> __device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* ---- registers ---- */

/* What a thread block begins with, a thread: all that fit, a multiple of 8. It has no more later: whoever asks for more than
   others have given back waits for ever. */
constexpr int registers_at_start(int threads) {
    return 65536 / threads / 8 * 8;
}

/* The warpgroup's registers a thread, a multiple of 8. */
template <int REGISTERS> __device__ __forceinline__ void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void registers_acquire() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif
