/* The second stage of sums over rows (layernorm's and the linear layers' parameter gradients): many blocks have each
   left a row of partial sums, and here the rows are added up, always in the same order.

   A block owns 32 columns; each of its warps reads every ROWS-th row, 128 bytes at once, and the warps' sums are then
   added in order. */
#include "cuda.cuh"

enum { COLUMNS = 32, ROWS = 32 };

__global__ void partials_sum_kernel(struct tensor first, struct tensor second, const float *partials,
    int parts, int row_elements, int columns, bool accumulate) {
    __shared__ float sums[ROWS][COLUMNS];
    int column = blockIdx.x * COLUMNS + threadIdx.x;
    float sum = 0.0f;
    wait_for_previous();
    if (column < row_elements) {
#pragma unroll 4
        for (int i = threadIdx.y; i < parts; i += ROWS) {
            sum += partials[(int64_t)i * row_elements + column];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= row_elements) {
        return;
    }
    for (int i = 1; i < ROWS; i++) {
        sum += sums[i][threadIdx.x];
    }
    struct tensor out = column < columns ? first : second;
    column -= column < columns ? 0 : columns;
    if (out.dtype == DTYPE_F32) {
        float *to = static_cast<float *>(out.data) + column;
        *to = accumulate ? *to + sum : sum;
    } else {
        bf16 *to = static_cast<bf16 *>(out.data) + column;
        *to = __float2bfloat16_rn(accumulate ? __bfloat162float(*to) + sum : sum);
    }
}

enum status partials_sum(struct backend *b, struct tensor first, struct tensor second, const float *partials,
    int parts, int columns, bool accumulate) {
    int row_elements = second.data != NULL ? 2 * columns : columns;
    dim3 grid((unsigned)ceil_div(row_elements, COLUMNS));
    return launch(b, {"sum of partial sums", grid, dim3(COLUMNS, ROWS), 0, true}, partials_sum_kernel, first,
        second, partials, parts, row_elements, columns, accumulate);
}
