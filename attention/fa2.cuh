/* What the FlashAttention-2 kernels, forward and backward, share. */
#ifndef ATTENTION_FA2_CUH
#define ATTENTION_FA2_CUH

#include "attention/tile.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

/* ---- generations ---- */

/* Kilobytes of shared memory that a block may have; the tile tables are by it. */
__host__ __device__ constexpr int shared_kb_of(int compute_capability) {
    return compute_capability == 80 || compute_capability == 87                                  ? 163
           : compute_capability == 90 || (compute_capability >= 100 && compute_capability < 120) ? 227
                                                                                                 : 99;
}
/* Kernels for other generations than the one being compiled are empty. (The test that runs kernels on the CPU compiles
   all.) */
#if defined(__CUDA_ARCH__)
#define COMPILED_FOR(shared_kb) ((shared_kb) == shared_kb_of(__CUDA_ARCH__ / 10))
#elif !defined(COMPILED_FOR)
#define COMPILED_FOR(shared_kb) false
#endif

/* Pass<dtype, padded head dimension, SHARED_KB>::call(p, more...) for what the arguments and the device are. */
template <template <enum dtype, int, int> class Pass, enum dtype TYPE, int SHARED_KB, typename... More>
static enum status dispatch_head_dim(const struct attention_params *p, More... more) {
    switch (fa2_padded_head_dim(p->head_dim)) {
    case 64:
        return Pass<TYPE, 64, SHARED_KB>::call(p, more...);
    case 80:
        return Pass<TYPE, 80, SHARED_KB>::call(p, more...);
    case 96:
        return Pass<TYPE, 96, SHARED_KB>::call(p, more...);
    case 128:
        return Pass<TYPE, 128, SHARED_KB>::call(p, more...);
    case 192:
        return Pass<TYPE, 192, SHARED_KB>::call(p, more...);
    default:
        return Pass<TYPE, 256, SHARED_KB>::call(p, more...);
    }
}

template <template <enum dtype, int, int> class Pass, enum dtype TYPE, typename... More>
static enum status dispatch_generation(
    const struct attention *a, const struct attention_params *p, More... more) {
    switch (shared_kb_of(a->compute_capability)) {
    case 163:
        return dispatch_head_dim<Pass, TYPE, 163>(p, more...);
    case 227:
        return dispatch_head_dim<Pass, TYPE, 227>(p, more...);
    default:
        return dispatch_head_dim<Pass, TYPE, 99>(p, more...);
    }
}

template <template <enum dtype, int, int> class Pass, typename... More>
static enum status dispatch(const struct attention *a, const struct attention_params *p, More... more) {
#ifdef FA2_TUNE_HEAD_DIM /* one candidate of tune_attention.sh */
    return Pass<DTYPE_BF16, FA2_TUNE_HEAD_DIM, FA2_TUNE_SHARED_KB>::call(p, more...);
#else
    return p->dtype == DTYPE_BF16 ? dispatch_generation<Pass, DTYPE_BF16>(a, p, more...)
                                  : dispatch_generation<Pass, DTYPE_F16>(a, p, more...);
#endif
}

/* ---- the order of blocks ---- */

/* One-dimensional grid over (batch and head, block of the sequence). Blocks of `together` heads are neighbours, first
   block of every head first: those heads' tensors share the L2 cache while they are worked on, and the longest blocks of
   a causal mask start first. */
struct block_order {
    int blocks;     /* of one head */
    int heads;      /* of the batch's sequences altogether */
    int together;   /* divides the grid into groups of this many heads */
    int last_group; /* the head with which the last group begins: it has those that are left */

    __device__ __forceinline__ void find(unsigned index, int *block, int *head) const {
        unsigned end = (unsigned)(last_group * blocks), members = index < end ? together : heads - last_group;
        unsigned first = index < end ? index / (unsigned)(together * blocks) * together : last_group;
        unsigned rest = index - first * blocks;
        *block = (int)(rest / members);
        *head = (int)(first + rest % members);
    }
};

enum {
    L2_SHARE_BYTES = 16 << 20, /* for one group but the last: well under half of any L2 cache of interest */
    FEWEST_BLOCKS = 128, /* in one group: about as many as a GPU takes at a time, for longest-first to work */
    FA2_GROUPS_AT_END = 4 /* under a causal mask */
};

/* The last group has the heads of `groups_at_end`, 1 or more: where blocks are not all as long as each other, several, so that
   there are short ones enough to keep all busy until the end. */
static inline block_order order_heads(int64_t blocks, int64_t heads, int64_t together, int groups_at_end) {
    together = min_i64(together, heads);
    int64_t groups = max_i64(ceil_div(heads, together) - groups_at_end, 0); /* before the last one */
    return {(int)blocks, (int)heads, (int)together, (int)(groups * together)};
}

/* bytes_a_head: what is read again and again of one head */
static inline block_order order_blocks(
    int64_t blocks, int64_t heads, int64_t bytes_a_head, int groups_at_end) {
    int64_t together = max_i64(L2_SHARE_BYTES / bytes_a_head, ceil_div(FEWEST_BLOCKS, blocks));
    return order_heads(blocks, heads, together, groups_at_end);
}

/* ---- fragments ---- */

/* Two neighbouring C fragments as the A fragment of the next product. */
template <enum dtype TYPE>
__device__ __forceinline__ void pack_fragment(
    uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack<TYPE>(left[0], left[1]);
    a[1] = pack<TYPE>(left[2], left[3]);
    a[2] = pack<TYPE>(right[0], right[1]);
    a[3] = pack<TYPE>(right[2], right[3]);
}

template <int M, int N> __device__ __forceinline__ void clear(float (&fragments)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                fragments[m][n][i] = 0;
            }
        }
    }
}

constexpr int FRAGMENT_FLOATS = 4 * LANES;
/* How the fragment of every lane lies in memory: as a warp adds it best. sm_90 has reductions of four
   floats; before, a lane's floats lie LANES apart, so that each reduction of a warp is one line of 128 bytes. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int FRAGMENT_STRIDE = LANES, FRAGMENT_LANE_STRIDE = 1;
#else
constexpr int FRAGMENT_STRIDE = 1, FRAGMENT_LANE_STRIDE = 4;
#endif

__device__ __forceinline__ void load_fragment(float (&c)[4], const float *from) {
    const float *lane = from + lane_index() * FRAGMENT_LANE_STRIDE;
    if constexpr (FRAGMENT_STRIDE == 1) {
        float4 all = *(const float4 *)lane;
        c[0] = all.x, c[1] = all.y, c[2] = all.z, c[3] = all.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            c[i] = lane[i * FRAGMENT_STRIDE];
        }
    }
}

__device__ __forceinline__ void store_fragment(float *to, const float (&c)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[i * FRAGMENT_STRIDE + lane_index() * FRAGMENT_LANE_STRIDE] = c[i];
    }
}

__device__ __forceinline__ void add_fragment(float *to, const float (&c)[4]) {
    float *lane = to + lane_index() * FRAGMENT_LANE_STRIDE;
    if constexpr (FRAGMENT_STRIDE == 1) {
        reduce_add_4(lane, c);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            atomicAdd(lane + i * FRAGMENT_STRIDE, c[i]);
        }
    }
}

/* ---- leaving shared memory ---- */

/* The first valid_rows of ROWS rows of a shared tile to memory, `columns` of each, by THREADS threads of which this is
   number `thread`. */
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void store_tile(
    uint16_t *to, int64_t row_stride, uint32_t tile, int valid_rows, int columns, int thread) {
    using shared = shared_tile<COLUMNS>;
#pragma unroll
    for (int i = thread; i < ROWS * shared::CHUNKS; i += THREADS) {
        int row = i / shared::CHUNKS, chunk = i % shared::CHUNKS;
        if (row < valid_rows && chunk * CHUNK < columns) {
            *(uint4 *)(to + row * row_stride + chunk * CHUNK) =
                load_shared_chunk(tile + shared::offset(row, chunk));
        }
    }
}

#endif
