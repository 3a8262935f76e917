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
#else
    switch (head_dim) {
    case 64:
        return {128, 128, 4, 2};
    case 80:
        return shared_kb == 99 ? forward_tile{128, 64, 4, 2} : forward_tile{128, 80, 4, 2};
    case 96:
        return {128, 64, 4, 2};
    case 128:
        return shared_kb == 99 ? forward_tile{128, 32, 4, 2} : forward_tile{128, 64, 4, 2};
    case 192:
        return shared_kb == 99 ? forward_tile{64, 64, 4, 1} : forward_tile{64, 64, 4, 2};
    default: /* 256 */
        return shared_kb == 99 ? forward_tile{64, 64, 4, 1} : forward_tile{128, 64, 8, 1};
    }
#endif
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
#else
    switch (head_dim) {
    case 64:
        return shared_kb == 99 ? backward_tile{32, 128, 4, 1, 2, 2, 1}
                               : backward_tile{32, 128, 4, 1, 2, 2, 2};
    case 80:
        return shared_kb == 99    ? backward_tile{64, 64, 4, 1, 4, 2, 1}
               : shared_kb == 163 ? backward_tile{64, 128, 8, 1, 4, 2, 1}
                                  : backward_tile{128, 128, 8, 1, 8, 2, 1};
    case 96:
        return shared_kb == 99 ? backward_tile{64, 64, 4, 1, 2, 2, 1} : backward_tile{64, 128, 8, 1, 4, 2, 1};
    case 128:
        return shared_kb == 99    ? backward_tile{32, 64, 4, 1, 2, 2, 1}
               : shared_kb == 163 ? backward_tile{64, 128, 8, 1, 2, 2, 1}
                                  : backward_tile{64, 128, 4, 2, 2, 2, 1};
    case 192:
        return shared_kb == 99    ? backward_tile{32, 32, 2, 2, 2, 2, 1}
               : shared_kb == 163 ? backward_tile{32, 64, 4, 2, 2, 2, 1}
                                  : backward_tile{64, 64, 4, 2, 2, 2, 1};
    default: /* 256 */
        return shared_kb == 99    ? backward_tile{32, 32, 2, 2, 2, 1, 1}
               : shared_kb == 163 ? backward_tile{32, 64, 4, 2, 2, 2, 1}
                                  : backward_tile{64, 64, 4, 2, 1, 2, 1};
    }
#endif
}

#endif
