/* Hopper's instructions as attention/wgmma_sm90.cuh wraps them, each alone, against plain loops. Elements are small whole
   numbers, whose products and sums are exact in every type: results must be equal. */
#include "attention/fa3.cuh"
#include "llmc/random.h"
#include "test/test.h"

#include <stdlib.h>
#include <vector>

#define CUDA_MUST(call)                                                                                      \
    do {                                                                                                     \
        cudaError_t error_ = (call);                                                                         \
        if (error_ != cudaSuccess) {                                                                         \
            printf("    %s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_));                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static struct attention *fa3;

/* ---- matrices ---- */

/* rows x columns in 16 bits on the device, in floats on the host */
struct matrix {
    int rows, columns;
    std::vector<float> values;
    attention_params params; /* as a tensor of one head */
    attention_tensor tensor;
};

static void *device_memory(size_t bytes) {
    void *memory;
    CUDA_MUST(cudaMalloc(&memory, bytes));
    CUDA_MUST(cudaMemset(memory, 0xFF, bytes));
    return memory;
}

static matrix make_matrix(enum dtype dtype, int rows, int columns) {
    static uint64_t stream;
    matrix m = {rows, columns, std::vector<float>((size_t)(rows * columns)), {}, {}};
    std::vector<uint16_t> bits(m.values.size());
    stream++;
    for (size_t i = 0; i < bits.size(); i++) {
        m.values[i] = floorf(random_normal(1, stream, i) * 2);
        bits[i] = dtype == DTYPE_BF16 ? float_to_bf16(m.values[i]) : float_to_f16(m.values[i]);
    }
    void *data = device_memory(bits.size() * sizeof(uint16_t));
    CUDA_MUST(cudaMemcpy(data, bits.data(), bits.size() * sizeof(uint16_t), cudaMemcpyHostToDevice));
    m.params.dtype = dtype, m.params.batch = 1, m.params.head_dim = columns;
    m.tensor = attention_dense(data, rows, 1, columns);
    return m;
}

template <typename Tile> static tensor_map map_of(const matrix &m, int box_rows) {
    tensor_map map = {};
    if (make_tensor_map<Tile>(&map, fa3, &m.params, m.tensor, m.rows, 1, box_rows) != STATUS_OK) {
        printf("    %s\n", error_message());
        exit(1);
    }
    return map;
}

/* ---- copies ---- */

struct copy_arguments {
    tensor_map in, out;
    uint16_t *seen; /* what ordinary loads find in the tile, [row][column] */
    int row;
};

/* in -> tile -> out, by one thread; the others look at the tile between */
template <typename Tile>
__global__ void __launch_bounds__(WARPGROUP) copy_tile(const __grid_constant__ copy_arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    if constexpr (COMPILED_FOR_SM90A) {
        uint32_t tile = shared_address(memory), barrier = tile + Tile::BYTES;
        if (threadIdx.x == 0) {
            arrival_init(barrier, 1);
            arrival_init_done();
            arrive_expecting(barrier, Tile::BYTES);
            load_tile<Tile>(tile, a.in, barrier, a.row, 0, 0);
        }
        __syncthreads();
        arrival_wait(barrier, 0);
        for (int i = (int)threadIdx.x; i < Tile::ROWS * Tile::COLUMNS / 8; i += WARPGROUP) {
            int row = i / (Tile::COLUMNS / 8), chunk = i % (Tile::COLUMNS / 8);
            *(uint4 *)(a.seen + row * Tile::COLUMNS + chunk * 8) =
                load_shared_chunk(tile + Tile::offset(row, chunk));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            store_tile_async<Tile>(a.out, tile, 0, a.row, 0, 0);
            bulk_wait<0>();
        }
    }
}

/* A tile that hangs over the end of a matrix, below and to the right. */
template <int ROWS, int COLUMNS> static void expect_tile_is_copied(int rows, int columns, int row) {
    using tile = panel_tile<ROWS, COLUMNS>;
    matrix in = make_matrix(DTYPE_BF16, rows, columns), out = make_matrix(DTYPE_BF16, rows, columns);
    size_t count = ROWS * COLUMNS;
    copy_arguments a = {map_of<tile>(in, ROWS), map_of<tile>(out, ROWS),
        (uint16_t *)device_memory(count * sizeof(uint16_t)), row};
    EXPECT(launch("copy_tile", copy_tile<tile>, 1, WARPGROUP, tile::BYTES + 8, NULL, a) == STATUS_OK);
    std::vector<uint16_t> seen(count), copied((size_t)(rows * columns));
    CUDA_MUST(cudaMemcpy(seen.data(), a.seen, count * sizeof(uint16_t), cudaMemcpyDeviceToHost));
    CUDA_MUST(
        cudaMemcpy(copied.data(), out.tensor.data, copied.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost));
    int wrong_in_tile = 0, wrong_in_copy = 0;
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < COLUMNS; j++) {
            bool inside = row + i < rows && j < columns;
            float expected = inside ? in.values[(size_t)((row + i) * columns + j)] : 0;
            wrong_in_tile += bf16_to_float(seen[(size_t)(i * COLUMNS + j)]) != expected;
        }
    }
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < columns; j++) {
            size_t at = (size_t)(i * columns + j);
            bool inside = i >= row && i < row + ROWS;
            wrong_in_copy += bf16_to_float(copied[at]) != (inside ? in.values[at] : out.values[at]);
        }
    }
    EXPECT_NEAR(wrong_in_tile, 0, 0);
    EXPECT_NEAR(wrong_in_copy, 0, 0);
}

static void test_tiles_are_copied_and_cut_off_at_the_end_of_a_tensor(void) {
    expect_tile_is_copied<64, 64>(200, 64, 64);
    expect_tile_is_copied<128, 128>(200, 128, 128);
    expect_tile_is_copied<128, 128>(3, 104, 0);
    expect_tile_is_copied<64, 64>(200, 8, 192);
    expect_tile_is_copied<64, 96>(100, 96, 64);
    expect_tile_is_copied<128, 80>(100, 80, 0);
    expect_tile_is_copied<128, 80>(300, 72, 256);
}

/* ---- products ---- */

struct product_arguments {
    tensor_map a, b;
    float *d; /* 64 x N */
};

template <int ROWS, int DEPTH, enum depth WAY>
using operand = std::conditional_t<WAY == DEPTH_ACROSS, panel_tile<ROWS, DEPTH>, panel_tile<DEPTH, ROWS>>;

/* D = A B of one warpgroup, with another share of registers than the kernel began with; 1 + A B where B lies down and A across:
   that A goes through registers. */
template <enum dtype TYPE, int N, int DEPTH, enum depth WAY_A, enum depth WAY_B>
__global__ void __launch_bounds__(2 * WARPGROUP, 1)
    multiply_tiles(const __grid_constant__ product_arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    if constexpr (COMPILED_FOR_SM90A) {
        using left = operand<64, DEPTH, WAY_A>;
        using right = operand<N, DEPTH, WAY_B>;
        uint32_t tile_a = shared_address(memory), tile_b = tile_a + left::BYTES,
                 barrier = tile_b + right::BYTES;
        if (threadIdx.x == 0) {
            arrival_init(barrier, 1);
            arrival_init_done();
        }
        __syncthreads();
        if (uniform_warp_index() < 4) {
            registers_release<40>();
            if (threadIdx.x == 0) {
                arrive_expecting(barrier, left::BYTES + right::BYTES);
                load_tile<left>(tile_a, a.a, barrier, 0, 0, 0);
                load_tile<right>(tile_b, a.b, barrier, 0, 0, 0);
            }
        } else {
            registers_acquire<240>();
            int warp = (int)uniform_warp_index() % 4, lane = lane_index();
            float d[N / 8][4];
            arrival_wait(barrier, 0);
            wgmma_begin();
            if constexpr (WAY_B == DEPTH_ACROSS) {
                multiply_rows<TYPE>(d, left(tile_a), right(tile_b));
            } else if constexpr (WAY_A == DEPTH_DOWN) {
                multiply_columns<TYPE>(d, left(tile_a), right(tile_b));
            } else {
                uint32_t fragments[DEPTH / 16][4];
#pragma unroll
                for (int k = 0; k < DEPTH / 16; k++) {
                    ldmatrix(fragments[k], tile_a + left::offset(16 * warp + lane % 16, 2 * k + lane / 16));
                }
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    d[n][0] = d[n][1] = d[n][2] = d[n][3] = 1; /* what is there is added to */
                }
                registers_change(d);
                wgmma_begin();
                multiply_fragments<TYPE>(d, fragments, right(tile_b));
            }
            wgmma_commit();
            wgmma_wait<0>(d);
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int row = 16 * warp + lane / 4 + i / 2 * 8, column = 8 * n + lane % 4 * 2 + i % 2;
                    a.d[row * N + column] = d[n][i];
                }
            }
        }
    }
}

template <enum dtype TYPE, int N, int DEPTH, enum depth WAY_A, enum depth WAY_B>
static void expect_product(void) {
    using left = operand<64, DEPTH, WAY_A>;
    using right = operand<N, DEPTH, WAY_B>;
    matrix a = make_matrix(TYPE, left::ROWS, left::COLUMNS),
           b = make_matrix(TYPE, right::ROWS, right::COLUMNS);
    std::vector<float> d(64 * N);
    product_arguments arguments = {map_of<left>(a, left::ROWS), map_of<right>(b, right::ROWS),
        (float *)device_memory(d.size() * sizeof(float))};
    EXPECT(launch("multiply_tiles", multiply_tiles<TYPE, N, DEPTH, WAY_A, WAY_B>, 1, 2 * WARPGROUP,
               left::BYTES + right::BYTES + 8, NULL, arguments) == STATUS_OK);
    CUDA_MUST(cudaMemcpy(d.data(), arguments.d, d.size() * sizeof(float), cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int i = 0; i < 64; i++) {
        for (int j = 0; j < N; j++) {
            float sum = WAY_A != WAY_B;
            for (int k = 0; k < DEPTH; k++) {
                sum += a.values[(size_t)(WAY_A == DEPTH_ACROSS ? i * DEPTH + k : k * 64 + i)] *
                       b.values[(size_t)(WAY_B == DEPTH_ACROSS ? j * DEPTH + k : k * N + j)];
            }
            wrong += d[(size_t)(i * N + j)] != sum;
        }
    }
    if (wrong > 0) {
        printf("    N %d, depth %d, A %s, B %s, %s:\n", N, DEPTH,
            WAY_A != WAY_B          ? "in registers"
            : WAY_A == DEPTH_ACROSS ? "across"
                                    : "down",
            WAY_B == DEPTH_ACROSS ? "across" : "down", dtype_name(TYPE));
    }
    EXPECT_NEAR(wrong, 0, 0);
}

/* S = Q K^T, S^T = K Q^T */
static void test_products_of_rows_with_rows(void) {
    expect_product<DTYPE_BF16, 64, 64, DEPTH_ACROSS, DEPTH_ACROSS>();
    expect_product<DTYPE_BF16, 128, 128, DEPTH_ACROSS, DEPTH_ACROSS>();
    expect_product<DTYPE_F16, 128, 96, DEPTH_ACROSS, DEPTH_ACROSS>();
    expect_product<DTYPE_BF16, 128, 80, DEPTH_ACROSS, DEPTH_ACROSS>();
    expect_product<DTYPE_F16, 112, 192, DEPTH_ACROSS, DEPTH_ACROSS>();
    expect_product<DTYPE_BF16, 80, 256, DEPTH_ACROSS, DEPTH_ACROSS>();
}

/* O = P V, dV = P^T dO, dK = dS^T Q */
static void test_products_of_fragments_with_columns(void) {
    expect_product<DTYPE_BF16, 64, 64, DEPTH_ACROSS, DEPTH_DOWN>();
    expect_product<DTYPE_BF16, 64, 128, DEPTH_ACROSS, DEPTH_DOWN>();
    expect_product<DTYPE_F16, 128, 128, DEPTH_ACROSS, DEPTH_DOWN>();
    expect_product<DTYPE_BF16, 96, 128, DEPTH_ACROSS, DEPTH_DOWN>();
    expect_product<DTYPE_F16, 80, 128, DEPTH_ACROSS, DEPTH_DOWN>();
    expect_product<DTYPE_F16, 192, 80, DEPTH_ACROSS, DEPTH_DOWN>();
    expect_product<DTYPE_BF16, 256, 80, DEPTH_ACROSS, DEPTH_DOWN>();
}

/* dQ = dS K from dS^T */
static void test_products_of_columns_with_columns(void) {
    expect_product<DTYPE_BF16, 64, 128, DEPTH_DOWN, DEPTH_DOWN>();
    expect_product<DTYPE_F16, 128, 128, DEPTH_DOWN, DEPTH_DOWN>();
    expect_product<DTYPE_BF16, 80, 128, DEPTH_DOWN, DEPTH_DOWN>();
    expect_product<DTYPE_BF16, 96, 64, DEPTH_DOWN, DEPTH_DOWN>();
}

/* ---- from registers to memory ---- */

struct sum_arguments {
    float *sums;
    uint16_t *stored; /* 64 x 64 */
};

/* Every block adds its number + i to sums[i]; store_matrices against what ordinary loads find. */
__global__ void __launch_bounds__(WARPGROUP) add_numbers(const __grid_constant__ sum_arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    if constexpr (COMPILED_FOR_SM90A) {
        using tile = panel_tile<64, 64>;
        uint32_t shared = shared_address(memory);
        store_shared_float(shared + 4 * threadIdx.x, (float)(blockIdx.x + threadIdx.x));
        fence_async();
        named_wait(1, WARPGROUP);
        if (threadIdx.x == 0) {
            bulk_add(a.sums, shared, WARPGROUP * sizeof(float));
            bulk_commit();
            bulk_wait<0>();
        }
        named_wait(1, WARPGROUP);
        int warp = (int)warp_index(), lane = lane_index();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t square[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                /* fragment i: rows 8 (i % 2), columns 8 (i / 2) of the square; its elements are their own place */
                uint32_t place = (uint32_t)((16 * warp + 8 * (i % 2) + lane / 4) * 64 + 16 * k + 8 * (i / 2) +
                                            lane % 4 * 2);
                square[i] = place | (place + 1) << 16;
            }
            store_matrices(shared + tile::offset(16 * warp + lane % 16, 2 * k + lane / 16), square);
        }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < 64 * 8; i += WARPGROUP) {
            *(uint4 *)(a.stored + i * 8) = load_shared_chunk(shared + tile::offset(i / 8, i % 8));
        }
    }
}

static void test_reductions_in_memory_and_stores_of_fragments(void) {
    enum { BLOCKS = 300 };
    sum_arguments a = {(float *)device_memory(WARPGROUP * sizeof(float)),
        (uint16_t *)device_memory(64 * 64 * sizeof(uint16_t))};
    CUDA_MUST(cudaMemset(a.sums, 0, WARPGROUP * sizeof(float)));
    EXPECT(launch("add_numbers", add_numbers, BLOCKS, WARPGROUP, 64 * 128, NULL, a) == STATUS_OK);
    std::vector<float> sums(WARPGROUP);
    std::vector<uint16_t> stored(64 * 64);
    CUDA_MUST(cudaMemcpy(sums.data(), a.sums, sums.size() * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA_MUST(cudaMemcpy(stored.data(), a.stored, stored.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost));
    int wrong = 0, misplaced = 0;
    for (int i = 0; i < WARPGROUP; i++) {
        wrong += sums[(size_t)i] != BLOCKS * (BLOCKS - 1) / 2 + BLOCKS * i;
    }
    for (size_t i = 0; i < stored.size(); i++) {
        misplaced += stored[i] != i;
    }
    EXPECT_NEAR(wrong, 0, 0);
    EXPECT_NEAR(misplaced, 0, 0);
}

int main(void) {
    if (attention_create(&fa3, "fa3") != STATUS_OK) {
        printf("  skipped: %s\n", error_message());
        return 0;
    }
    RUN(test_tiles_are_copied_and_cut_off_at_the_end_of_a_tensor);
    RUN(test_products_of_rows_with_rows);
    RUN(test_products_of_fragments_with_columns);
    RUN(test_products_of_columns_with_columns);
    RUN(test_reductions_in_memory_and_stores_of_fragments);
    attention_free(fa3);
    return test_summary();
}
