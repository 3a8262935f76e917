/* How the FlashAttention-2 kernels cut their work: one table for each direction, by head dimension (padded) and the
   kilobytes of shared memory that a block may have: 163 on sm_80, 227 on sm_90 and sm_100, 99 elsewhere.

   scripts/tune_attention.sh compiles candidates for one head dimension, by defining FA2_FORWARD_TILE or
   FA2_BACKWARD_TILE as the values of one line, times them on the GPU that is there and prints the best. */
#ifndef ATTENTION_FA2_TILES_CUH
#define ATTENTION_FA2_TILES_CUH

struct forward_tile {
    int rows, columns, warps;
    int blocks; /* on a multiprocessor at a time; registers are limited to allow it */
};

__host__ __device__ constexpr forward_tile forward_tile_of(int head_dim, int shared_kb) {
#ifdef FA2_FORWARD_TILE
    return forward_tile{FA2_FORWARD_TILE};
#endif
    return head_dim <= 96    ? forward_tile{128, 64, 4, 2}
           : head_dim == 128 ? forward_tile{128, shared_kb == 99 ? 32 : 64, 4, 2}
           : shared_kb == 99 ? forward_tile{64, 64, 4, 1}
                             : forward_tile{128, 64, 8, 1};
}

struct backward_tile {
    int rows, columns;
    int key_warps, query_warps; /* over S^T */
    int dq_row_warps;           /* over dQ; the others share its columns */
    int stages;                 /* row blocks of Q and dO in shared memory */
    int blocks;
};

__host__ __device__ constexpr backward_tile backward_tile_of(int head_dim, int shared_kb) {
#ifdef FA2_BACKWARD_TILE
    return backward_tile{FA2_BACKWARD_TILE};
#endif
    return shared_kb == 99    ? (head_dim == 64       ? backward_tile{64, 128, 8, 1, 4, 2, 1}
                                    : head_dim == 80  ? backward_tile{64, 64, 4, 1, 4, 2, 1}
                                    : head_dim == 96  ? backward_tile{64, 64, 4, 1, 2, 2, 1}
                                    : head_dim == 128 ? backward_tile{32, 64, 4, 1, 2, 2, 1}
                                    : head_dim == 192 ? backward_tile{32, 32, 2, 2, 2, 2, 1}
                                                      : backward_tile{32, 32, 2, 2, 2, 1, 1})
           : head_dim == 64   ? backward_tile{64, 128, 8, 1, 4, 2, 1}
           : head_dim == 80   ? backward_tile{64, 64, 4, 1, 4, 2, shared_kb == 227 ? 2 : 1}
           : head_dim == 96   ? backward_tile{64, 128, 8, 1, 4, 2, 1}
           : head_dim == 128  ? backward_tile{64, 128, 8, 1, 2, 2, 1}
           : shared_kb == 163 ? backward_tile{32, 64, 4, 2, 2, 2, 1}
                              : backward_tile{64, 64, 4, 2, 2, 2, 1};
}

#endif
