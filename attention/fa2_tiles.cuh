/* How the FlashAttention-2 kernels cut their work: one table for each direction, by head dimension (padded) and the
   kilobytes of shared memory that a block may have: 163 on sm_80, 227 on sm_90 and sm_100, 99 elsewhere.

   `make tune-attention` times candidates on the GPU that is there, prints the best lines of these tables and can put them
   here. It compiles them by defining FA2_FORWARD_TILE or FA2_BACKWARD_TILE as the numbers of a line. */
#ifndef ATTENTION_FA2_TILES_CUH
#define ATTENTION_FA2_TILES_CUH

/* ---- forward ---- */

struct forward_tile {
    int rows, columns, warps;
    int blocks; /* on a multiprocessor at a time; registers are limited to allow it */
};

struct forward_choice {
    int head_dim, shared_kb;
    forward_tile tile;
};

constexpr forward_choice FORWARD_TILES[] = {
    {64, 99, {128, 128, 4, 2}},
    {64, 163, {128, 128, 4, 2}},
    {64, 227, {128, 128, 4, 2}},
    {80, 99, {128, 64, 4, 2}},
    {80, 163, {128, 80, 4, 2}},
    {80, 227, {128, 80, 4, 2}},
    {96, 99, {128, 64, 4, 2}},
    {96, 163, {128, 64, 4, 2}},
    {96, 227, {128, 64, 4, 2}},
    {128, 99, {128, 32, 4, 2}},
    {128, 163, {128, 64, 4, 2}},
    {128, 227, {128, 64, 4, 2}},
    {192, 99, {64, 64, 4, 1}},
    {192, 163, {64, 64, 4, 2}},
    {192, 227, {64, 64, 4, 2}},
    {256, 99, {64, 64, 4, 1}},
    {256, 163, {128, 64, 8, 1}},
    {256, 227, {128, 64, 8, 1}},
};

/* ---- backward ---- */

struct backward_tile {
    int rows, columns;
    int parts;                  /* that S^T of the rows is taken in, one after the other */
    int key_warps, query_warps; /* over S^T */
    int dq_row_warps;           /* over dQ; the others share its columns */
    int stages;                 /* row blocks of Q and dO in shared memory */
    int blocks;
};

struct backward_choice {
    int head_dim, shared_kb;
    backward_tile tile;
};

/* Where two are close, the one with more keys: dQ's deterministic sums are read and written once for every block of
   keys. */
constexpr backward_choice BACKWARD_TILES[] = {
    {64, 99, {32, 128, 1, 4, 1, 2, 2, 1}},
    {64, 163, {32, 128, 1, 4, 1, 1, 2, 2}},
    {64, 227, {64, 128, 2, 4, 1, 2, 2, 2}},
    {80, 99, {64, 64, 1, 4, 1, 4, 2, 1}},
    {80, 163, {64, 128, 1, 8, 1, 4, 2, 1}},
    {80, 227, {128, 128, 2, 8, 1, 8, 2, 1}},
    {96, 99, {64, 64, 1, 4, 1, 2, 2, 1}},
    {96, 163, {64, 128, 1, 8, 1, 4, 2, 1}},
    {96, 227, {64, 128, 1, 8, 1, 4, 2, 1}},
    {128, 99, {32, 64, 1, 4, 1, 2, 2, 1}},
    {128, 163, {64, 128, 1, 8, 1, 2, 2, 1}},
    {128, 227, {64, 128, 1, 4, 2, 2, 2, 1}},
    {192, 99, {32, 32, 1, 2, 2, 2, 2, 1}},
    {192, 163, {32, 64, 1, 4, 2, 2, 2, 1}},
    {192, 227, {64, 64, 1, 4, 2, 2, 2, 1}},
    {256, 99, {32, 32, 1, 2, 2, 2, 1, 1}},
    {256, 163, {32, 64, 1, 4, 2, 2, 2, 1}},
    {256, 227, {64, 64, 1, 4, 2, 1, 2, 1}},
};

/* ---- look up, at compile time ---- */

template <typename Choice, int COUNT>
constexpr auto tile_of(const Choice (&choices)[COUNT], int head_dim, int shared_kb) {
    int i = 0;
    while (choices[i].head_dim != head_dim || choices[i].shared_kb != shared_kb) {
        i++;
    }
    return choices[i].tile;
}

constexpr forward_tile forward_tile_of(int head_dim, int shared_kb) {
#ifdef FA2_FORWARD_TILE
    return forward_tile{FA2_FORWARD_TILE};
#else
    return tile_of(FORWARD_TILES, head_dim, shared_kb);
#endif
}

constexpr backward_tile backward_tile_of(int head_dim, int shared_kb) {
#ifdef FA2_BACKWARD_TILE
    return backward_tile{FA2_BACKWARD_TILE};
#else
    return tile_of(BACKWARD_TILES, head_dim, shared_kb);
#endif
}

#endif
