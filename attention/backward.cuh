/* What surrounds every tiled backward kernel: its arguments, the pass before it and the pass after it.

   prepare   D = rowsum(dO o O) and lse log2(e) of every row; zeroes in dQ's fp32 sums where nobody begins them by storing,
             and in counters
   finish    dQ = scale * sums, rounded; of heads that nobody adds to any more while the main kernel is at others, where
             that counts them

   dQ of a row gets a part from every block of keys. Ordinarily there is a thread block for each, and they add to one sum
   as they come: fp32 reductions in the L2 cache. Deterministic, there are several sums, `splits`, each of one thread block
   (of a key/value head), which takes blocks of keys one after the other: in round r one of r * splits to
   (r + 1) * splits - 1. The first round begins the sums; `finish` adds them up, always in the same order. */
#ifndef ATTENTION_BACKWARD_CUH
#define ATTENTION_BACKWARD_CUH

#include "attention/fa2.cuh"

struct backward_arguments {
    device_tensor q, k, v, o, d_o, dq, dk, dv;
    const float *lse;
    float *statistics; /* [batch, heads, 2, padded_rows]: lse log2(e), then D */
    float *dq_sums;    /* [split, batch, heads, padded_rows / 16, D / 8] fragments */
    int *counters;     /* one, and one more for every PREPARE_ROWS rows of a head; NULL: none are needed */
    int seqlen_q, seqlen_k, heads, kv_heads, head_dim, padded_rows;
    int group; /* query heads to a key/value head */
    float scale;
    bool causal;
    bool deterministic;
    int rows, columns;    /* of the main kernel's blocks */
    int key_blocks;       /* of one key/value head */
    int64_t split_stride; /* floats from one sum of dQ to the next; 0: there is one */
    block_order order;    /* of thread blocks and key/value heads */
    int *ended;    /* [batch, kv_heads]: threads that have added all that they add to dQ; NULL: not counted */
    int all_ended; /* threads that add to a key/value head's dQ */
    bool cleared;  /* dQ's sums begin with zeroes */

    /* of head `index` of all sequences */
    __device__ __forceinline__ float *statistics_of(int index) const {
        return statistics + (int64_t)index * 2 * padded_rows;
    }
    template <int D> __device__ __forceinline__ float *dq_sums_of(int split, int index, int row) const {
        return dq_sums + split * split_stride + ((int64_t)index * padded_rows + row) * D;
    }
    /* Which blocks of keys thread block i takes: the one of its split, and then to and fro through the rounds, so that under a
       causal mask all splits have about the same to do. */
    __device__ __forceinline__ int first_block(unsigned i) const {
        int place, index;
        order.find(i, &place, &index);
        return place;
    }
    __device__ __forceinline__ int next_block(int block) const {
        return 2 * (block / order.blocks + 1) * order.blocks - 1 - block;
    }
    __device__ __forceinline__ int split_of(int block) const {
        int round = block / order.blocks, place = block % order.blocks;
        return round % 2 == 0 ? place : order.blocks - 1 - place;
    }
    __device__ __forceinline__ int diagonal_row(int first_key) const {
        return diagonal_row(first_key, rows);
    }
    /* The block of `rows` queries with the first one that sees any key from first_key on. */
    __device__ __forceinline__ int diagonal_row(int first_key, int rows) const {
        return causal ? max(first_key - (seqlen_k - seqlen_q), 0) / rows * rows : 0;
    }
};

/* ---- prepare ---- */

enum { PREPARE_THREADS = 256, PREPARE_ROWS = 64 };

/* The sum of the products of 8 neighbours */
template <enum dtype TYPE> __device__ __forceinline__ float multiply_chunks(uint4 a, uint4 b) {
    const uint32_t pairs_a[] = {a.x, a.y, a.z, a.w}, pairs_b[] = {b.x, b.y, b.z, b.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) {
        float2 x = unpack<TYPE>(pairs_a[i]), y = unpack<TYPE>(pairs_b[i]);
        sum += x.x * y.x + x.y * y.y;
    }
    return sum;
}

/* One block for PREPARE_ROWS rows of a head, a chunk of a row for every thread and pass. Rows past the end, and rows that
   see nothing, get lse = infinity: P is 0 there without a mask. */
template <enum dtype TYPE, int D>
static __global__ void __launch_bounds__(PREPARE_THREADS) backward_prepare(backward_arguments a) {
    constexpr int ROW_THREADS = D <= 64 ? 8 : D <= 128 ? 16 : 32; /* that share a row */
    constexpr int ROWS_A_PASS = PREPARE_THREADS / ROW_THREADS, PASSES = PREPARE_ROWS / ROWS_A_PASS;
    launch_next();
    int blocks = a.padded_rows / PREPARE_ROWS, index = (int)(blockIdx.x / blocks);
    int first_row = (int)(blockIdx.x % blocks) * PREPARE_ROWS, batch = index / a.heads,
        head = index % a.heads;
    int row = first_row + (int)threadIdx.x / ROW_THREADS, column = (int)threadIdx.x % ROW_THREADS * CHUNK;
    float *statistics = a.statistics_of(index);
    float sums[PASSES] = {};
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int r = row + pass * ROWS_A_PASS;
        if (r < a.seqlen_q && column < a.head_dim) {
            sums[pass] = multiply_chunks<TYPE>(*(const uint4 *)(a.o.row(batch, r, head) + column),
                *(const uint4 *)(a.d_o.row(batch, r, head) + column));
        }
    }
    if (a.counters != nullptr && threadIdx.x == 0) {
        a.counters[blockIdx.x + 1] = 0;
        if (blockIdx.x == 0) {
            a.counters[0] = 0;
        }
    }
    if (a.ended != nullptr && threadIdx.x == 0 && first_row == 0) {
        a.ended[index / a.group] = 0;
    }
    float4 *dq = (float4 *)a.dq_sums_of<D>(0, index, first_row);
    for (int i = (int)threadIdx.x; a.cleared && i < PREPARE_ROWS * D / 4; i += PREPARE_THREADS) {
        dq[i] = make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll
        for (int offset = ROW_THREADS / 2; offset > 0; offset /= 2) {
            sums[pass] += __shfl_xor_sync(~0u, sums[pass], offset);
        }
        int r = row + pass * ROWS_A_PASS;
        if (column == 0) {
            float lse = r < a.seqlen_q ? a.lse[(int64_t)index * a.seqlen_q + r] : -INFINITY;
            statistics[r] = lse == -INFINITY ? INFINITY : lse * LOG2_E;
            statistics[a.padded_rows + r] = sums[pass];
        }
    }
}

template <enum dtype TYPE, int D>
static enum status prepare_backward(const struct attention_params *p, const backward_arguments &a) {
    return launch("backward, prepare", backward_prepare<TYPE, D>,
        p->batch * p->heads * (a.padded_rows / PREPARE_ROWS), PREPARE_THREADS, 0, p->stream, a);
}

/* ---- finish ---- */

enum { FINISH_THREADS = 256, FINISH_ROWS = 64 };

/* Fragment f of the rows from `row` on, over the splits that have it: the first block of keys of a split wrote all the
   rows that see any of its keys. Nothing need have been written past the last row. */
template <int D>
__device__ __forceinline__ void sum_splits(
    float (&c)[4], const backward_arguments &a, int index, int row, int f) {
    c[0] = c[1] = c[2] = c[3] = 0;
    int fragment_row = row + f / (D / 8) * 16;
    int splits = fragment_row >= a.seqlen_q ? 0 : a.deterministic ? a.order.blocks : 1;
    for (int split = 0; split < splits; split++) {
        if (!a.deterministic || fragment_row >= a.diagonal_row(split * a.columns)) {
            float part[4];
            load_fragment(part, a.dq_sums_of<D>(split, index, row) + f * FRAGMENT_FLOATS);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                c[i] += part[i];
            }
        }
    }
}

/* Until a head's sums are complete. Where it is counted who has added to them, this pass begins with the last thread blocks
   of the main kernel, on multiprocessors that have none: most heads are complete by then. Nothing waits for a counter: where
   it says no, all wait for the main kernel. So does the last thread block, that this pass does not end before. */
static __device__ __forceinline__ void wait_for_sums(const backward_arguments &a, int index) {
    bool last = blockIdx.x + 1 == gridDim.x;
    if (a.ended == nullptr || last || load_count(a.ended + index / a.group) != a.all_ended) {
        wait_for_previous();
    }
}

/* dQ of FINISH_ROWS rows of a head, from the sums of their fragments. */
template <enum dtype TYPE, int D>
static __global__ void __launch_bounds__(FINISH_THREADS) backward_finish(backward_arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    using tile = shared_tile<D>;
    int blocks = a.padded_rows / FINISH_ROWS, index = (int)(blockIdx.x / blocks);
    int row = (int)(blockIdx.x % blocks) * FINISH_ROWS, lane = lane_index();
    wait_for_sums(a, index);
    for (int f = (int)warp_index(); f < FINISH_ROWS / 16 * (D / 8); f += FINISH_THREADS / LANES) {
        float c[4];
        sum_splits<D>(c, a, index, row, f);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int tile_row = f / (D / 8) * 16 + 8 * half + lane / 4;
            store_shared(shared_address(shared) + tile::offset(tile_row, f % (D / 8)) + lane % 4 * 4,
                pack<TYPE>(c[2 * half] * a.scale, c[2 * half + 1] * a.scale));
        }
    }
    __syncthreads();
    store_tile<FINISH_ROWS, D, FINISH_THREADS>(a.dq.row(index / a.heads, row, index % a.heads),
        a.dq.seq_stride, shared_address(shared), a.seqlen_q - row, a.head_dim, (int)threadIdx.x);
}

/* overlap: as in `launch`, of the main kernel before it */
template <enum dtype TYPE, int D>
static enum status finish_backward(
    const struct attention_params *p, const backward_arguments &a, bool overlap = false) {
    return launch("backward, finish", backward_finish<TYPE, D>,
        p->batch * p->heads * (a.padded_rows / FINISH_ROWS), FINISH_THREADS,
        FINISH_ROWS * shared_tile<D>::ROW_BYTES, p->stream, a, overlap);
}

/* ---- arguments ---- */

/* What a main kernel with blocks of `rows` queries and `columns` keys has whatever thread blocks it is divided into. */
static inline backward_arguments backward_problem(const struct attention_params *p, int rows, int columns) {
    struct fa2_workspace w = fa2_workspace(p);
    backward_arguments a = {};
    a.q = on_device(p->q), a.k = on_device(p->k), a.v = on_device(p->v);
    a.o = on_device(p->o), a.d_o = on_device(p->d_o);
    a.dq = on_device(p->dq), a.dk = on_device(p->dk), a.dv = on_device(p->dv);
    a.lse = (const float *)p->lse;
    a.statistics = (float *)((char *)p->workspace + w.statistics_offset);
    a.dq_sums = (float *)((char *)p->workspace + w.dq_offset);
    a.seqlen_q = (int)p->seqlen_q, a.seqlen_k = (int)p->seqlen_k, a.padded_rows = (int)w.padded_rows;
    a.heads = (int)p->heads, a.kv_heads = (int)p->kv_heads, a.head_dim = (int)p->head_dim;
    a.group = (int)(p->heads / p->kv_heads);
    a.scale = (float)p->scale, a.causal = p->causal;
    a.rows = rows, a.columns = columns;
    a.key_blocks = (int)ceil_div(p->seqlen_k, columns);
    return a;
}

/* For a main kernel whose thread blocks share a head's blocks of keys by splits. whole_heads: one thread block for all of
   them. */
template <int D>
static backward_arguments backward_arguments_of(
    const struct attention_params *p, int rows, int columns, bool whole_heads = false) {
    backward_arguments a = backward_problem(p, rows, columns);
    a.deterministic = p->deterministic || whole_heads;
    a.cleared = !a.deterministic;
    a.split_stride = a.deterministic ? p->batch * p->heads * a.padded_rows * D : 0;
    int64_t splits = whole_heads        ? 1
                     : p->deterministic ? min_i64(fa2_workspace(p).splits, a.key_blocks)
                                        : a.key_blocks;
    /* read again and again of a key/value head: Q and dO of its group, and the sums of dQ */
    a.order = order_blocks(splits, p->batch * p->kv_heads, p->heads / p->kv_heads * p->seqlen_q * D * 8,
        p->causal && !a.deterministic ? FA2_GROUPS_AT_END : 1);
    return a;
}

#endif
