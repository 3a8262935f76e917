/* What surrounds every tiled backward kernel: its arguments, the pass before it and the pass after it.

   prepare   D = rowsum(dO o O) and lse log2(e) of every row; zeroes in dQ's fp32 sums
   finish    dQ = scale * sums, rounded */
#ifndef ATTENTION_BACKWARD_CUH
#define ATTENTION_BACKWARD_CUH

#include "attention/fa2.cuh"

struct backward_arguments {
    device_tensor q, k, v, o, d_o, dq, dk, dv;
    const float *lse;
    float *statistics; /* [batch, heads, 2, padded_rows]: lse log2(e), then D */
    float *dq_sums;    /* [batch, heads, padded_rows / 16, D / 8] fragments */
    int *ticket;       /* the next block of keys, when deterministic; else NULL */
    int *turns;        /* [batch, heads, row block]: the block of keys whose turn it is */
    int seqlen_q, seqlen_k, heads, kv_heads, head_dim, padded_rows;
    float scale;
    bool causal;
    block_order order; /* of blocks of keys and key/value heads */

    /* of head `index` of all sequences */
    __device__ __forceinline__ float *statistics_of(int index) const {
        return statistics + (int64_t)index * 2 * padded_rows;
    }
    template <int D> __device__ __forceinline__ float *dq_sums_of(int index, int row) const {
        return dq_sums + ((int64_t)index * padded_rows + row) * D;
    }
    __device__ __forceinline__ int *turn_of(int index, int row) const {
        return turns + (int64_t)index * (padded_rows / FA2_SMALLEST_ROW_BLOCK) + row / FA2_SMALLEST_ROW_BLOCK;
    }
};

/* ---- prepare ---- */

enum {
    PREPARE_THREADS = 256,
    PREPARE_ROWS = FA2_SMALLEST_ROW_BLOCK,
    ROW_THREADS = PREPARE_THREADS / PREPARE_ROWS, /* that share a row */
};

/* rowsum(dO o O) over this thread's chunks of a row */
template <enum dtype TYPE>
__device__ __forceinline__ float multiply_rows(const uint16_t *o, const uint16_t *d_o, int head_dim) {
    float sum = 0;
    for (int d = (int)(threadIdx.x % ROW_THREADS) * CHUNK; d < head_dim; d += ROW_THREADS * CHUNK) {
        uint4 a = *(const uint4 *)(o + d), b = *(const uint4 *)(d_o + d);
        const uint32_t pairs_a[] = {a.x, a.y, a.z, a.w}, pairs_b[] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            float2 x = unpack<TYPE>(pairs_a[i]), y = unpack<TYPE>(pairs_b[i]);
            sum += x.x * y.x + x.y * y.y;
        }
    }
    return sum;
}

/* One block for PREPARE_ROWS rows of a head. Rows past the end, and rows that see nothing, get lse = infinity: P is 0
   there without a mask. */
template <enum dtype TYPE, int D>
static __global__ void __launch_bounds__(PREPARE_THREADS) backward_prepare(backward_arguments a) {
    int blocks = a.padded_rows / PREPARE_ROWS, index = (int)(blockIdx.x / blocks);
    int first_row = (int)(blockIdx.x % blocks) * PREPARE_ROWS,
        row = first_row + (int)threadIdx.x / ROW_THREADS;
    int batch = index / a.heads, head = index % a.heads;
    float sum = 0, lse = INFINITY;
    if (row < a.seqlen_q) {
        sum = multiply_rows<TYPE>(a.o.row(batch, row, head), a.d_o.row(batch, row, head), a.head_dim);
        lse = a.lse[(int64_t)index * a.seqlen_q + row];
    }
#pragma unroll
    for (int offset = ROW_THREADS / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(~0u, sum, offset);
    }
    if (threadIdx.x % ROW_THREADS == 0) {
        a.statistics_of(index)[row] = lse == -INFINITY ? INFINITY : lse * LOG2_E;
        a.statistics_of(index)[a.padded_rows + row] = sum;
    }
    float4 *sums = (float4 *)a.dq_sums_of<D>(index, first_row);
    for (int i = (int)threadIdx.x; i < PREPARE_ROWS * D / 4; i += PREPARE_THREADS) {
        sums[i] = make_float4(0, 0, 0, 0);
    }
    if (a.ticket != NULL && threadIdx.x == 0) {
        *a.turn_of(index, first_row) = 0;
        if (blockIdx.x == 0) {
            *a.ticket = 0;
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

/* dQ of FINISH_ROWS rows of a head, from the sums of their fragments. */
template <enum dtype TYPE, int D>
static __global__ void __launch_bounds__(FINISH_THREADS) backward_finish(backward_arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    using tile = shared_tile<D>;
    int blocks = a.padded_rows / FINISH_ROWS, index = (int)(blockIdx.x / blocks);
    int row = (int)(blockIdx.x % blocks) * FINISH_ROWS, lane = lane_index();
    const float *sums = a.dq_sums_of<D>(index, row);
    for (int f = warp_index(); f < FINISH_ROWS / 16 * (D / 8); f += FINISH_THREADS / LANES) {
        float c[4];
        load_fragment(c, sums + f * FRAGMENT_FLOATS);
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

template <enum dtype TYPE, int D>
static enum status finish_backward(const struct attention_params *p, const backward_arguments &a) {
    return launch("backward, finish", backward_finish<TYPE, D>,
        p->batch * p->heads * (a.padded_rows / FINISH_ROWS), FINISH_THREADS,
        FINISH_ROWS * shared_tile<D>::ROW_BYTES, p->stream, a);
}

/* ---- arguments ---- */

/* For a main kernel with blocks of `columns` keys. */
template <int D>
static backward_arguments backward_arguments_of(const struct attention_params *p, int columns) {
    struct fa2_workspace w = fa2_workspace(p);
    char *workspace = (char *)p->workspace;
    backward_arguments a = {};
    a.q = on_device(p->q), a.k = on_device(p->k), a.v = on_device(p->v);
    a.o = on_device(p->o), a.d_o = on_device(p->d_o);
    a.dq = on_device(p->dq), a.dk = on_device(p->dk), a.dv = on_device(p->dv);
    a.lse = (const float *)p->lse;
    a.statistics = (float *)(workspace + w.statistics_offset);
    a.dq_sums = (float *)(workspace + w.dq_offset);
    a.ticket = p->deterministic ? (int *)(workspace + w.ticket_offset) : NULL;
    a.turns = (int *)(workspace + w.turns_offset);
    a.seqlen_q = (int)p->seqlen_q, a.seqlen_k = (int)p->seqlen_k, a.padded_rows = (int)w.padded_rows;
    a.heads = (int)p->heads, a.kv_heads = (int)p->kv_heads, a.head_dim = (int)p->head_dim;
    a.scale = (float)p->scale, a.causal = p->causal;
    /* read again and again of a key/value head: Q and dO of its group, and the sums of dQ */
    a.order = order_blocks(
        ceil_div(p->seqlen_k, columns), p->batch * p->kv_heads, p->heads / p->kv_heads * p->seqlen_q * D * 8);
    return a;
}

#endif
