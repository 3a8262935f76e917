/* The instructions of sm_80 that the kernels are made of, each under a name, and the shared-memory tile that they read.

   Fragments of mma m16n8k16, for lane l of the warp, with row = l / 4 and pair = 2 * (l % 4):
     A (16 x 16)  a[0] (row, pair)  a[1] (row + 8, pair)  a[2] (row, pair + 8)  a[3] (row + 8, pair + 8)   two 16-bit each
     B (16 x 8)   b0 (pair, row)    b1 (pair + 8, row)                                                     two 16-bit each
     C (16 x 8)   c[0..1] (row, pair..pair + 1)           c[2..3] (row + 8, pair..pair + 1)                fp32
   Two C fragments side by side, packed to 16 bits, are one A fragment: that is how P goes from one product to the next
   without leaving the registers.

   A shared tile holds rows of COLUMNS 16-bit elements as chunks of 16 bytes, chunk c of row r in place
   c ^ swizzle(r), so that the eight rows that one phase of ldmatrix reads lie in eight different bank groups, without
   padding, for every multiple of 16 columns. Fragments are loaded as 16 x 16 squares, four 8 x 8 matrices in r[0..3];
   lane l gives the address of a row of matrix l / 8. By the order of the matrices, down the rows first or across the
   chunks first, r is
     ldmatrix             DOWN_FIRST    from [m][k]: A
                          ACROSS_FIRST  from [n][k]: B of columns 0-7 in r[0..1], of columns 8-15 in r[2..3]
     ldmatrix_transposed  DOWN_FIRST    from [k][n]: the same B
                          ACROSS_FIRST  from [k][m]: A */
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

enum square_order { DOWN_FIRST, ACROSS_FIRST };

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
    static __device__ __forceinline__ uint32_t lane_offset(enum square_order order) {
        int lane = lane_index();
        return order == DOWN_FIRST ? offset(lane % 16, lane / 16)
                                   : offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
    /* the square whose first row is `row` (a multiple of 8), its first column 16 * `square`, as an offset for this lane */
    static __device__ __forceinline__ uint32_t square(uint32_t lane_offset, int row, int square) {
        uint32_t column_bytes = (uint32_t)square * 2 * CHUNK_BYTES;
        return (lane_offset ^ column_bytes % SWIZZLED_BYTES) +
               column_bytes / SWIZZLED_BYTES * SWIZZLED_BYTES + (uint32_t)(row * ROW_BYTES);
    }
};

/* Copies of ROWS rows from memory to a tile by THREADS threads. Every thread keeps to one column of chunks, and its rows
   are THREADS / CHUNKS apart. */
template <int ROWS, int COLUMNS, int THREADS> struct tile_copy {
    using shared = shared_tile<COLUMNS>;
    static constexpr int ROWS_A_PASS = THREADS / shared::CHUNKS,
                         PASSES = (ROWS + ROWS_A_PASS - 1) / ROWS_A_PASS;

    static __device__ __forceinline__ int thread_row() {
        return (int)(threadIdx.x / shared::CHUNKS);
    }
    static __device__ __forceinline__ int thread_chunk() {
        return (int)(threadIdx.x % shared::CHUNKS);
    }
    /* what this thread copies first, when the rows begin at `from` */
    static __device__ __forceinline__ const uint16_t *source(const uint16_t *from, int64_t row_stride) {
        return from + thread_row() * row_stride + thread_chunk() * CHUNK;
    }
    /* The first valid_rows rows and `columns` of their elements; zeros elsewhere. */
    static __device__ __forceinline__ void start(
        uint32_t tile, const uint16_t *source, int64_t row_stride, int valid_rows, int columns) {
        if (THREADS % shared::CHUNKS != 0 && thread_row() >= ROWS_A_PASS) {
            return;
        }
        int valid = thread_chunk() * CHUNK < columns ? valid_rows - thread_row() : 0;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            int row = thread_row() + pass * ROWS_A_PASS;
            if (ROWS % ROWS_A_PASS == 0 || row < ROWS) {
                copy_async(tile + shared::offset(row, thread_chunk()), source, pass * ROWS_A_PASS < valid);
            }
            source += ROWS_A_PASS * row_stride;
        }
    }
};

/* ---- products ---- */

/* sums += A B of a warp: M x N fragments, the sum over DEPTH squares. load_left(a, k) gives the A fragments of square k,
   load_right(b, k, n) those of B in square (k, n). Each is loaded one step before it is used. */
template <enum dtype TYPE, int DEPTH, int M, int N, typename Left, typename Right>
__device__ __forceinline__ void multiply(float (&sums)[M][N][4], Left load_left, Right load_right) {
    static_assert(N % 2 == 0, "B comes in squares");
    uint32_t left[2][M][4], right[2][4];
    load_left(left[0], 0);
    load_right(right[0], 0, 0);
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            int step = k * (N / 2) + n;
            if (n + 1 < N / 2) {
                load_right(right[(step + 1) % 2], k, n + 1);
            } else if (k + 1 < DEPTH) {
                load_left(left[(k + 1) % 2], k + 1);
                load_right(right[(step + 1) % 2], k + 1, 0);
            }
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma<TYPE>(sums[m][2 * n], left[k % 2][m], right[step % 2][0], right[step % 2][1]);
                mma<TYPE>(sums[m][2 * n + 1], left[k % 2][m], right[step % 2][2], right[step % 2][3]);
            }
        }
    }
}

#endif
