/* Tiles in shared memory, and the products of a warp that read them.

   A tile holds rows of COLUMNS 16-bit elements as chunks of 16 bytes, chunk c of row r in place
   c ^ swizzle(r), so that the eight rows that one phase of ldmatrix reads lie in eight different bank groups, without
   padding, for every multiple of 16 columns. Fragments are loaded as 16 x 16 squares, four 8 x 8 matrices in r[0..3];
   lane l gives the address of a row of matrix l / 8. By the order of the matrices, down the rows first or across the
   chunks first, r is
     ldmatrix             DOWN_FIRST    from [m][k]: A
                          ACROSS_FIRST  from [n][k]: B of columns 0-7 in r[0..1], of columns 8-15 in r[2..3]
     ldmatrix_transposed  DOWN_FIRST    from [k][n]: the same B
                          ACROSS_FIRST  from [k][m]: A */
#ifndef ATTENTION_TILE_CUH
#define ATTENTION_TILE_CUH

#include "attention/mma_sm80.cuh"

enum {
    LANES = 32,
    CHUNK_BYTES = 16,
    CHUNK = 8, /* elements in a chunk */
};

__device__ __forceinline__ int lane_index() {
    return (int)(threadIdx.x % LANES);
}

__device__ __forceinline__ unsigned warp_index() {
    return threadIdx.x / LANES;
}
/* x, which is the same in all lanes, by way of a shuffle that tells the compiler so: what follows from it then takes one
   register of the warp, not one of every lane. */
template <typename T> __device__ __forceinline__ T uniform(T x) {
    return __shfl_sync(~0u, x, 0);
}
__device__ __forceinline__ unsigned uniform_warp_index() {
    return uniform(warp_index());
}

/* x, without the compiler knowing: what is worked out from it inside of a loop is worked out every time, and takes no
   registers meanwhile. */
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* ---- tiles ---- */

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

/* Copies of ROWS rows from memory to a tile by THREADS threads, of which this is number `thread`. Every thread keeps to one
   column of chunks, and its rows are THREADS / CHUNKS apart. */
template <int ROWS, int COLUMNS, int THREADS> struct tile_copy {
    using shared = shared_tile<COLUMNS>;
    static constexpr int ROWS_A_PASS = THREADS / shared::CHUNKS,
                         PASSES = (ROWS + ROWS_A_PASS - 1) / ROWS_A_PASS;

    static __device__ __forceinline__ int thread_row(int thread) {
        return (int)((unsigned)thread / shared::CHUNKS);
    }
    static __device__ __forceinline__ int thread_chunk(int thread) {
        return (int)((unsigned)thread % shared::CHUNKS);
    }
    /* what this thread copies first, when the rows begin at `from` */
    static __device__ __forceinline__ const uint16_t *source(
        const uint16_t *from, int64_t row_stride, int thread = (int)threadIdx.x) {
        return from + thread_row(thread) * row_stride + thread_chunk(thread) * CHUNK;
    }
    /* The first valid_rows rows and `columns` of their elements; zeros elsewhere. */
    static __device__ __forceinline__ void start(uint32_t tile, const uint16_t *source, int64_t row_stride,
        int valid_rows, int columns, int thread = (int)threadIdx.x) {
        if (THREADS % shared::CHUNKS != 0 && thread_row(thread) >= ROWS_A_PASS) {
            return;
        }
        int valid = thread_chunk(thread) * CHUNK < columns ? valid_rows - thread_row(thread) : 0;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            int row = thread_row(thread) + pass * ROWS_A_PASS;
            if (ROWS % ROWS_A_PASS == 0 || row < ROWS) {
                copy_async(
                    tile + shared::offset(row, thread_chunk(thread)), source, pass * ROWS_A_PASS < valid);
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
