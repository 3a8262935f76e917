/* The instructions of sm_80 that the kernels are made of, each under a name, and the shared-memory tile that they read.

   Fragments of mma m16n8k16, for lane l of the warp, with row = l / 4 and pair = 2 * (l % 4):
     A (16 x 16)  a[0] (row, pair)  a[1] (row + 8, pair)  a[2] (row, pair + 8)  a[3] (row + 8, pair + 8)   two 16-bit each
     B (16 x 8)   b0 (pair, row)    b1 (pair + 8, row)                                                     two 16-bit each
     C (16 x 8)   c[0..1] (row, pair..pair + 1)           c[2..3] (row + 8, pair..pair + 1)                fp32
   Two C fragments side by side, packed to 16 bits, are one A fragment: that is how P goes from one product to the next
   without leaving the registers.

   A shared tile holds rows of COLUMNS 16-bit elements as chunks of 16 bytes, chunk c of row r in place
   c ^ swizzle(r), so that the eight rows that one phase of ldmatrix reads lie in eight different bank groups, without
   padding, for every multiple of 16 columns. All loads use one lane pattern: lane l gives the address of row l % 16,
   chunk l / 16 of a 16 x 16 square. What arrives as r[0..3] is then
     ldmatrix             square [m][k]: A = r[0], r[1], r[2], r[3]
                          square [n][k]: B of columns 0-7 = r[0], r[2]; of columns 8-15 = r[1], r[3]
     ldmatrix_transposed  square [k][n]: B of columns 0-7 = r[0], r[1]; of columns 8-15 = r[2], r[3]
                          square [k][m]: A = r[0], r[2], r[1], r[3] */
#ifndef ATTENTION_MMA_SM80_CUH
#define ATTENTION_MMA_SM80_CUH

#include "attention/device.cuh"

enum {
    LANES = 32,
    CHUNK_BYTES = 16,
    CHUNK = 8, /* elements in a chunk */
};

__device__ __forceinline__ int lane_index() {
    return (int)(threadIdx.x % LANES);
}

__device__ __forceinline__ int warp_index() {
    return (int)(threadIdx.x / LANES);
}

/* ---- instructions ---- */

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
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

/* 16 bytes from global to shared memory, past the registers; zeros when not valid. Arrives by copy_wait. */
__device__ __forceinline__ void copy_async(uint32_t address, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

/* Ends a group of copies. */
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most the newest PENDING groups of this thread are under way. */
template <int PENDING> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
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

__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
    return r;
}

/* A barrier among `threads` of the block; barrier 0 is __syncthreads. */
__device__ __forceinline__ void barrier(int which, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

/* to[0..3] += c, in the L2 cache; sm_90 */
__device__ __forceinline__ void reduce_add_4(float *to, const float (&c)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(c[0]), "f"(c[1]),
                 "f"(c[2]), "f"(c[3])
                 : "memory");
}

__device__ __forceinline__ int load_acquire(const int *from) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(int *to, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

/* ---- shared tiles ---- */

template <int COLUMNS> struct shared_tile {
    static_assert(COLUMNS % 16 == 0, "columns come in squares of 16");
    static constexpr int CHUNKS = COLUMNS / CHUNK;
    static constexpr int ROW_BYTES = COLUMNS * 2;
    /* the largest power of two, at most 8, that divides CHUNKS: the chunks that change places with each other */
    static constexpr int SWIZZLED = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
    static constexpr int SWIZZLED_BYTES = SWIZZLED * CHUNK_BYTES;

    static __device__ __forceinline__ int swizzle(int row) {
        return row / (8 / SWIZZLED) % SWIZZLED;
    }
    /* offset of a chunk from the tile's beginning, which is a multiple of 128 bytes */
    static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
        return (uint32_t)(row * ROW_BYTES + (chunk ^ swizzle(row)) * CHUNK_BYTES);
    }
    /* what this lane adds to the address of every square, and with it to `square` */
    static __device__ __forceinline__ uint32_t lane_offset() {
        int lane = lane_index();
        return offset(lane % 16, lane / 16);
    }
    /* the square whose first row is `row` (a multiple of 8), its first column 16 * `square`, as an offset for this lane */
    static __device__ __forceinline__ uint32_t square(uint32_t lane_offset, int row, int square) {
        uint32_t column_bytes = (uint32_t)square * 2 * CHUNK_BYTES;
        return (lane_offset ^ column_bytes % SWIZZLED_BYTES) +
               column_bytes / SWIZZLED_BYTES * SWIZZLED_BYTES + (uint32_t)(row * ROW_BYTES);
    }
};

/* Copies ROWS rows of `columns` elements (chunks), the first valid_rows of them real, into a tile; zeros elsewhere. Every
   thread keeps to one chunk column, and rows are THREADS / CHUNKS apart. */
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void copy_tile(
    uint32_t tile, const uint16_t *from, int64_t row_stride, int64_t valid_rows, int columns) {
    using shared = shared_tile<COLUMNS>;
    constexpr int ROWS_A_PASS = THREADS / shared::CHUNKS, PASSES = (ROWS + ROWS_A_PASS - 1) / ROWS_A_PASS;
    int first = (int)(threadIdx.x / shared::CHUNKS), chunk = (int)(threadIdx.x % shared::CHUNKS);
    if (THREADS % shared::CHUNKS != 0 && first >= ROWS_A_PASS) {
        return;
    }
    bool real_chunk = chunk * CHUNK < columns;
    const uint16_t *source = from + first * row_stride + chunk * CHUNK;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int row = first + pass * ROWS_A_PASS;
        if (ROWS % ROWS_A_PASS == 0 || row < ROWS) {
            bool valid = real_chunk && row < valid_rows;
            copy_async(tile + shared::offset(row, chunk), valid ? source : from, valid);
        }
        source += ROWS_A_PASS * row_stride;
    }
}

#endif
