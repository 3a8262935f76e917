/* FlashAttention-2 forward (Dao 2023, algorithm 1): O and logsumexp in one pass over K and V, nothing of size
   seqlen_q x seqlen_k in memory.

   grid      one block for every ROWS queries of a (batch, head), in block_order
   block     WARPS warps, each with ROWS / WARPS queries of its own against all keys: no exchange between warps
   shared    Q (ROWS x D); one K and one V block (COLUMNS x D), each copied while the other is worked on
   registers O~ and S of the warp's rows as fp32 fragments; maxima and sums of the rows

   for each block of keys, from the last visible one down:
       wait for K; barrier; start copying V
       S = Q K^T; mask it if the block crosses the diagonal or the end
       m' = max(m, rowmax S)
       wait for V; barrier; start copying the next K
       P~ = 2^(S c - m' c) with c = scale log2(e); l += rowsum P~; O~ += P~ V
   O = O~ / l, lse = scale m + ln l

   Two departures from the letter of the paper, both exact. Blocks come from the diagonal down, so that the masked ones
   are first. And m follows the row's maximum only once that has grown enough for P~ to pass 2^8: l and O~ carry the same
   factor, and rescaling O~ becomes rare.

   FLOPs: 4 seqlen_q seqlen_k D a head, half of it when causal. Bytes: Q, O, lse once; K and V once a row block, from L2. */
#include "attention/fa2.cuh"
#include "attention/fa2_tiles.cuh"

/* ---- the kernel ---- */

constexpr float LARGEST_GROWTH = 8; /* log2 of the largest P~ */

struct forward_arguments {
    device_tensor q, k, v, o;
    float *lse;
    int seqlen_q, seqlen_k, heads, group, head_dim; /* group: query heads to a key/value head */
    float scale;
    bool causal;
    block_order order;
};

template <enum dtype TYPE, int D, int SHARED_KB> struct forward_block {
    static constexpr forward_tile TILE = forward_tile_of(D, SHARED_KB);
    static constexpr int ROWS = TILE.rows, COLUMNS = TILE.columns, THREADS = TILE.warps * LANES;
    static constexpr int WARP_ROWS = ROWS / TILE.warps;
    static constexpr int M = WARP_ROWS / 16, S_N = COLUMNS / 8, O_N = D / 8; /* fragments of the warp */
    using tile = shared_tile<D>;
    using copy_queries = tile_copy<ROWS, D, THREADS>;
    using copy_keys = tile_copy<COLUMNS, D, THREADS>;
    static constexpr int SHARED_BYTES = (ROWS + 2 * COLUMNS) * tile::ROW_BYTES;
    static_assert(WARP_ROWS % 16 == 0, "a warp has whole fragments");
    static_assert(
        TILE.blocks * (SHARED_BYTES + 1024) <= (SHARED_KB + 1) * 1024, "more shared memory than there is");

    float out[M][O_N][4];    /* O~ */
    float scores[M][S_N][4]; /* S, then P~ */
    float row_max[M][2], row_sum[M][2];

    /* S = Q K^T */
    __device__ __forceinline__ void multiply_queries_keys(uint32_t q_warp, uint32_t k_tile) {
        uint32_t q_lane = tile::lane_offset(DOWN_FIRST), k_lane = tile::lane_offset(ACROSS_FIRST);
        clear(scores);
        multiply<TYPE, D / 16>(
            scores,
            [&](uint32_t(&a)[M][4], int k) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    ldmatrix(a[m], q_warp + tile::square(q_lane, 16 * m, k));
                }
            },
            [&](uint32_t(&b)[4], int k, int n) { ldmatrix(b, k_tile + tile::square(k_lane, 16 * n, k)); });
    }

    /* S = -infinity for the keys that a row does not see. The warp's first row sees `visible` of this block's keys, each
       row after it `step` more. */
    __device__ __forceinline__ void mask(int visible, int step) {
        int lane = lane_index();
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = 16 * m + lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                int limit = visible + step * row - column;
#pragma unroll
                for (int n = 0; n < S_N; n++) {
                    scores[m][n][i] = 8 * n < limit ? scores[m][n][i] : -INFINITY;
                }
            }
        }
    }

    /* Larger maxima, when one has grown too much; O~ and l follow. */
    __device__ __forceinline__ void update_max(float scale_log2) {
        float larger[M][2];
        bool rescale = false;
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = row_max[m][half];
#pragma unroll
                for (int n = 0; n < S_N; n++) {
                    x = fmaxf(x, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                }
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                larger[m][half] = x;
                /* never true for a row that has seen nothing: -infinity minus itself is not a number */
                rescale |= (x - row_max[m][half]) * scale_log2 > LARGEST_GROWTH;
            }
        }
        if (!__any_sync(~0u, rescale)) {
            return;
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float growth = larger[m][half] - row_max[m][half];
                float factor = growth > 0 ? exp2_fast(-growth * scale_log2) : 1;
                row_max[m][half] = larger[m][half];
                row_sum[m][half] *= factor;
#pragma unroll
                for (int n = 0; n < O_N; n++) {
                    out[m][n][2 * half] *= factor;
                    out[m][n][2 * half + 1] *= factor;
                }
            }
        }
    }

    /* P~ in place of S in columns 16 k to 16 k + 15; this thread's part of the row sums. */
    __device__ __forceinline__ void exponentiate(int k, float scale_log2) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float max = row_max[m][i / 2];
                float shift =
                    max == -INFINITY ? 0 : max * scale_log2; /* seen nothing: 2^-infinity is wanted */
#pragma unroll
                for (int n = 2 * k; n < 2 * k + 2; n++) {
                    scores[m][n][i] = exp2_fast(scores[m][n][i] * scale_log2 - shift);
                    row_sum[m][i / 2] += scores[m][n][i];
                }
            }
        }
    }

    /* O~ += P~ V. The exponentials are taken between the products, where the warp has nothing else to do. */
    __device__ __forceinline__ void multiply_probabilities_values(uint32_t v_tile, float scale_log2) {
        uint32_t v_lane = tile::lane_offset(DOWN_FIRST);
        multiply<TYPE, COLUMNS / 16>(
            out,
            [&](uint32_t(&a)[M][4], int k) {
                exponentiate(k, scale_log2);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    pack_fragment<TYPE>(a[m], scores[m][2 * k], scores[m][2 * k + 1]);
                }
            },
            [&](uint32_t(&b)[4], int k, int n) {
                ldmatrix_transposed(b, v_tile + tile::square(v_lane, 16 * k, n));
            });
    }

    /* O by way of the warp's own rows of Q's tile, and lse. */
    __device__ __forceinline__ void store(
        const forward_arguments &a, uint32_t q_warp, int batch, int head, int first_row) {
        int lane = lane_index();
        float *lse = a.lse + ((int64_t)batch * a.heads + head) * a.seqlen_q + first_row;
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = row_sum[m][half];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                float inverse = sum > 0 ? 1 / sum : 0;
                int row = 16 * m + lane / 4 + 8 * half;
#pragma unroll
                for (int n = 0; n < O_N; n++) {
                    store_shared(q_warp + tile::offset(row, n) + lane % 4 * 4,
                        pack<TYPE>(out[m][n][2 * half] * inverse, out[m][n][2 * half + 1] * inverse));
                }
                if (lane % 4 == 0 && first_row + row < a.seqlen_q) {
                    lse[row] = row_max[m][half] * a.scale + logf(sum);
                }
            }
        }
        __syncwarp();
        store_tile<WARP_ROWS, D, LANES>(a.o.row(batch, first_row, head), a.o.seq_stride, q_warp,
            a.seqlen_q - first_row, a.head_dim, lane);
    }

    __device__ __forceinline__ void run(const forward_arguments &a, uint32_t shared) {
        int block, batch_head;
        a.order.find(blockIdx.x, &block, &batch_head);
        int batch = batch_head / a.heads, head = batch_head % a.heads, kv_head = head / a.group;
        int warp = (int)warp_index(), block_row = (a.order.blocks - 1 - block) * ROWS;
        /* each saves a register where it is used */
        int uniform_warp = SHARED_KB == 227 ? (int)uniform_warp_index() : warp;
        int first_row = block_row + uniform_warp * WARP_ROWS;

        /* How many keys the first row of the warp, its last row, and the last row of the block see. */
        int step = a.causal ? 1 : 0, beyond = a.seqlen_k - a.seqlen_q + 1;
        int visible_first = a.causal ? first_row + beyond : a.seqlen_k;
        int visible_block = a.causal ? min(block_row + ROWS - 1 + beyond, a.seqlen_k) : a.seqlen_k;
        int blocks = visible_block > 0 ? (visible_block + COLUMNS - 1) / COLUMNS : 0;

        uint32_t q_tile = shared, k_tile = q_tile + ROWS * tile::ROW_BYTES,
                 v_tile = k_tile + COLUMNS * tile::ROW_BYTES;
        uint32_t q_warp = q_tile + warp * WARP_ROWS * tile::ROW_BYTES;
        float scale_log2 = a.scale * LOG2_E;

        clear(out);
#pragma unroll
        for (int m = 0; m < M; m++) {
            row_max[m][0] = row_max[m][1] = -INFINITY;
            row_sum[m][0] = row_sum[m][1] = 0;
        }
        int first_key = (blocks - 1) * COLUMNS;
        auto copy_block = [&](uint32_t to, const device_tensor &from, int key) {
            copy_keys::start(to, copy_keys::source(from.row(batch, key, kv_head), from.seq_stride),
                from.seq_stride, a.seqlen_k - key, a.head_dim);
            copy_commit();
        };
        if (blocks > 0) {
            copy_queries::start(q_tile, copy_queries::source(a.q.row(batch, block_row, head), a.q.seq_stride),
                a.q.seq_stride, a.seqlen_q - block_row, a.head_dim);
            copy_block(k_tile, a.k, first_key);
        }
        for (; first_key >= 0; first_key -= COLUMNS) {
            bool sees = first_key < visible_first + step * (WARP_ROWS - 1);
            copy_wait<0>();
            __syncthreads();
            copy_block(v_tile, a.v, first_key);
            if (sees) {
                multiply_queries_keys(q_warp, k_tile);
                if (first_key + COLUMNS > visible_first) {
                    mask(visible_first - first_key, step);
                }
                update_max(scale_log2);
            }
            copy_wait<0>();
            __syncthreads();
            if (first_key > 0) {
                copy_block(k_tile, a.k, first_key - COLUMNS);
            }
            if (sees) {
                multiply_probabilities_values(v_tile, scale_log2);
            }
        }
        store(a, q_warp, batch, head, first_row);
    }
};

template <enum dtype TYPE, int D, int SHARED_KB>
__global__ void __launch_bounds__(forward_block<TYPE, D, SHARED_KB>::THREADS,
    forward_tile_of(D, SHARED_KB).blocks) fa2_forward_kernel(forward_arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    if constexpr (COMPILED_FOR(SHARED_KB)) {
        forward_block<TYPE, D, SHARED_KB> block;
        block.run(a, shared_address(shared));
    }
}

/* ---- the call ---- */

template <enum dtype TYPE, int D, int SHARED_KB> struct forward_pass {
    static enum status call(const struct attention_params *p) {
        using block = forward_block<TYPE, D, SHARED_KB>;
        int64_t blocks = ceil_div(p->seqlen_q, block::ROWS), heads = p->batch * p->heads;
        forward_arguments a = {};
        a.q = on_device(p->q), a.k = on_device(p->k), a.v = on_device(p->v), a.o = on_device(p->o);
        a.lse = (float *)p->lse;
        a.seqlen_q = (int)p->seqlen_q, a.seqlen_k = (int)p->seqlen_k;
        a.heads = (int)p->heads, a.group = (int)(p->heads / p->kv_heads), a.head_dim = (int)p->head_dim;
        a.scale = (float)p->scale, a.causal = p->causal;
        a.order = order_blocks(blocks, heads, 2 * p->seqlen_k * block::tile::ROW_BYTES / a.group + 1,
            p->causal ? FA2_GROUPS_AT_END : 1);
        return launch("fa2 forward", fa2_forward_kernel<TYPE, D, SHARED_KB>, blocks * heads, block::THREADS,
            block::SHARED_BYTES, p->stream, a);
    }
};

extern "C" enum status fa2_forward(const struct attention *a, const struct attention_params *p) {
    return dispatch<forward_pass>(a, p);
}
