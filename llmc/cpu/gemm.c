/* Matrix products. A product is cut into tiles of the result by its shape alone; threads take tiles. Within a tile one
   thread calls OpenBLAS, or else works as Goto and van de Geijn do ("Anatomy of high-performance matrix
   multiplication", 2008):

     for blocks of GEMM_COLUMNS columns and GEMM_DEPTH of the depth
       right (depth, columns) -> packed in panels of PANEL_COLUMNS columns
       for blocks of GEMM_ROWS rows
         left (rows, depth) -> packed in panels of PANEL_ROWS rows; both blocks fit the second-level cache
         for each left panel, which fits the first-level cache, for each right panel
           a register tile of PANEL_ROWS x PANEL_COLUMNS sums over the depth

   Every element sums over the depth in the same order whatever the tile, so the bits do not depend on the cut. */
#include "cpu.h"

enum { TILE_ROWS = 192 };

/* The part of a matrix that begins at (row, column). */
static struct matrix matrix_at(struct matrix m, int64_t row, int64_t column) {
    m.data += m.transposed ? column * m.stride + row : row * m.stride + column;
    return m;
}

#ifdef WITH_OPENBLAS

#include <cblas.h>

void gemm_serial(struct scratch *scratch, real *out, int64_t out_stride, struct matrix left,
    struct matrix right, int64_t rows, int64_t columns, int64_t depth, bool accumulate) {
    (void)scratch;
    enum CBLAS_TRANSPOSE left_form = left.transposed ? CblasTrans : CblasNoTrans;
    enum CBLAS_TRANSPOSE right_form = right.transposed ? CblasTrans : CblasNoTrans;
#ifdef CPU_F64
    cblas_dgemm(CblasRowMajor, left_form, right_form, (int)rows, (int)columns, (int)depth, 1, left.data,
        (int)left.stride, right.data, (int)right.stride, accumulate ? 1 : 0, out, (int)out_stride);
#else
    cblas_sgemm(CblasRowMajor, left_form, right_form, (int)rows, (int)columns, (int)depth, 1, left.data,
        (int)left.stride, right.data, (int)right.stride, accumulate ? 1 : 0, out, (int)out_stride);
#endif
}

#else

/* The register tile wants multiply and add in one instruction where there is one; in ISO mode compilers must be told
   that they may. */
#ifdef __clang__
#pragma STDC FP_CONTRACT ON
#else
#pragma GCC optimize("fp-contract=fast")
#endif

/* The machine's vector, and a register tile of two vectors by as many rows as its registers hold. */
#if defined __AVX512F__
enum { VECTOR_BYTES = 64, PANEL_ROWS = 12 };
#elif defined __AVX__
enum { VECTOR_BYTES = 32, PANEL_ROWS = 6 };
#else
enum { VECTOR_BYTES = 16, PANEL_ROWS = 6 };
#endif
enum { VECTOR = VECTOR_BYTES / sizeof(real), PANEL_COLUMNS = 2 * VECTOR };
typedef real vector __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef real vector_unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));
_Static_assert((int)GEMM_ROWS % (int)PANEL_ROWS == 0 && (int)GEMM_COLUMNS % (int)PANEL_COLUMNS == 0,
    "the scratch holds whole panels");

#if defined __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define HAVE_SHUFFLE
#endif
#endif

/* out[q * out_stride + p] = in[p * in_stride + q] for p, q < 4 */
static inline void transpose_4x4(real *out, int64_t out_stride, const real *in, int64_t in_stride) {
#ifdef HAVE_SHUFFLE
    typedef real quad __attribute__((vector_size(4 * sizeof(real)), aligned(sizeof(real)), may_alias));
    quad row0 = *(const quad *)in, row1 = *(const quad *)(in + in_stride);
    quad row2 = *(const quad *)(in + 2 * in_stride), row3 = *(const quad *)(in + 3 * in_stride);
    quad low01 = __builtin_shufflevector(row0, row1, 0, 4, 1, 5);
    quad low23 = __builtin_shufflevector(row2, row3, 0, 4, 1, 5);
    quad high01 = __builtin_shufflevector(row0, row1, 2, 6, 3, 7);
    quad high23 = __builtin_shufflevector(row2, row3, 2, 6, 3, 7);
    *(quad *)out = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
    *(quad *)(out + out_stride) = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
    *(quad *)(out + 2 * out_stride) = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
    *(quad *)(out + 3 * out_stride) = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
#else
    for (int p = 0; p < 4; p++) {
        for (int q = 0; q < 4; q++) {
            out[q * out_stride + p] = in[p * in_stride + q];
        }
    }
#endif
}

/* Packing: lanes (rows of the left matrix, columns of the right one) in panels of `width`, one panel after the other,
   out[k * width + lane] in each, zero for lanes that the matrix does not have.
   Here in[k * stride + lane]: lanes lie side by side. */
static inline void pack_side_by_side(
    real *out, int width, const real *in, int64_t stride, int64_t lanes, int64_t depth) {
    for (int64_t k = 0; k < depth; k++) {
        for (int64_t first = 0; first < lanes; first += width) {
            real *to = out + first * depth + k * width;
            const real *from = in + k * stride + first;
            if (first + width <= lanes) {
                memcpy(to, from, (size_t)width * sizeof(real));
            } else {
                for (int lane = 0; lane < width; lane++) {
                    to[lane] = first + lane < lanes ? from[lane] : 0;
                }
            }
        }
    }
}

/* Here in[lane * stride + k]: a lane lies along the depth. One panel. */
static inline void pack_along_depth(
    real *out, int width, const real *in, int64_t stride, int64_t lanes, int64_t depth) {
    int64_t whole_lanes = lanes / 4 * 4, whole_depth = depth / 4 * 4;
    for (int64_t lane = 0; lane < whole_lanes; lane += 4) {
        for (int64_t k = 0; k < whole_depth; k += 4) {
            transpose_4x4(out + k * width + lane, width, in + lane * stride + k, stride);
        }
        for (int64_t k = whole_depth; k < depth; k++) {
            for (int64_t l = lane; l < lane + 4; l++) {
                out[k * width + l] = in[l * stride + k];
            }
        }
    }
    for (int64_t lane = whole_lanes; lane < width; lane++) {
        for (int64_t k = 0; k < depth; k++) {
            out[k * width + lane] = lane < lanes ? in[lane * stride + k] : 0;
        }
    }
}

static inline void pack(
    real *out, int width, const real *in, int64_t stride, int64_t lanes, int64_t depth, bool side_by_side) {
    if (side_by_side) {
        pack_side_by_side(out, width, in, stride, lanes, depth);
        return;
    }
    for (int64_t first = 0; first < lanes; first += width) {
        pack_along_depth(
            out + first * depth, width, in + first * stride, stride, min_i64(width, lanes - first), depth);
    }
}

/* out (PANEL_ROWS, PANEL_COLUMNS) = or += left panel times right panel */
static inline void multiply_panels(
    real *out, int64_t out_stride, const real *left, const real *right, int64_t depth, bool accumulate) {
    vector sum[PANEL_ROWS][2];
    for (int i = 0; i < PANEL_ROWS; i++) {
        sum[i][0] = sum[i][1] = (vector){0};
    }
    for (int64_t k = 0; k < depth; k++) {
        vector right0 = *(const vector *)(right + k * PANEL_COLUMNS);
        vector right1 = *(const vector *)(right + k * PANEL_COLUMNS + VECTOR);
        for (int i = 0; i < PANEL_ROWS; i++) {
            sum[i][0] += left[k * PANEL_ROWS + i] * right0;
            sum[i][1] += left[k * PANEL_ROWS + i] * right1;
        }
    }
    for (int i = 0; i < PANEL_ROWS; i++) {
        vector_unaligned *row0 = (vector_unaligned *)(out + i * out_stride), *row1 = row0 + 1;
        if (accumulate) {
            sum[i][0] += *row0;
            sum[i][1] += *row1;
        }
        *row0 = sum[i][0];
        *row1 = sum[i][1];
    }
}

/* At the edge of the result: through a whole tile aside. */
static void multiply_edge(real *out, int64_t out_stride, const real *left, const real *right, int64_t rows,
    int64_t columns, int64_t depth, bool accumulate) {
    real tile[PANEL_ROWS * PANEL_COLUMNS];
    multiply_panels(tile, PANEL_COLUMNS, left, right, depth, false);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < columns; j++) {
            real value = tile[i * PANEL_COLUMNS + j];
            out[i * out_stride + j] = accumulate ? out[i * out_stride + j] + value : value;
        }
    }
}

/* Packed blocks against each other. */
static void multiply_blocks(const struct scratch *scratch, real *out, int64_t out_stride, int64_t rows,
    int64_t columns, int64_t depth, bool accumulate) {
    for (int64_t i = 0; i < rows; i += PANEL_ROWS) {
        for (int64_t j = 0; j < columns; j += PANEL_COLUMNS) {
            const real *left = scratch->packed_left + i * depth, *right = scratch->packed_right + j * depth;
            real *tile = out + i * out_stride + j;
            if (i + PANEL_ROWS <= rows && j + PANEL_COLUMNS <= columns) {
                multiply_panels(tile, out_stride, left, right, depth, accumulate);
            } else {
                multiply_edge(tile, out_stride, left, right, min_i64(PANEL_ROWS, rows - i),
                    min_i64(PANEL_COLUMNS, columns - j), depth, accumulate);
            }
        }
    }
}

void gemm_serial(struct scratch *scratch, real *out, int64_t out_stride, struct matrix left,
    struct matrix right, int64_t rows, int64_t columns, int64_t depth, bool accumulate) {
    for (int64_t j = 0; j < columns; j += GEMM_COLUMNS) {
        int64_t block_columns = min_i64(GEMM_COLUMNS, columns - j);
        for (int64_t k = 0; k < depth; k += GEMM_DEPTH) {
            int64_t block_depth = min_i64(GEMM_DEPTH, depth - k);
            pack(scratch->packed_right, PANEL_COLUMNS, matrix_at(right, k, j).data, right.stride,
                block_columns, block_depth, !right.transposed);
            for (int64_t i = 0; i < rows; i += GEMM_ROWS) {
                int64_t block_rows = min_i64(GEMM_ROWS, rows - i);
                pack(scratch->packed_left, PANEL_ROWS, matrix_at(left, i, k).data, left.stride, block_rows,
                    block_depth, left.transposed);
                multiply_blocks(scratch, out + i * out_stride + j, out_stride, block_rows, block_columns,
                    block_depth, accumulate || k > 0);
            }
        }
    }
}

#endif

void gemm(struct backend *b, real *out, int64_t out_stride, struct matrix left, struct matrix right,
    int64_t rows, int64_t columns, int64_t depth, bool accumulate, gemm_finish finish, const void *context) {
    int64_t tiles_across = ceil_div(columns, GEMM_COLUMNS), tiles = ceil_div(rows, TILE_ROWS) * tiles_across;
    use_threads(b);
#pragma omp parallel for schedule(dynamic)
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t i = tile / tiles_across * TILE_ROWS, j = tile % tiles_across * GEMM_COLUMNS;
        int64_t tile_rows = min_i64(TILE_ROWS, rows - i), tile_columns = min_i64(GEMM_COLUMNS, columns - j);
        gemm_serial(thread_scratch(b), out + i * out_stride + j, out_stride, matrix_at(left, i, 0),
            matrix_at(right, 0, j), tile_rows, tile_columns, depth, accumulate);
        if (finish != NULL) {
            finish(context, i, tile_rows, j, tile_columns);
        }
    }
}
