/* FlashAttention forward as it was before FlashAttention-2 (Dao et al. 2022, algorithm 1), and the two cuts on the way.

   grid      fa1, cut1: one block for a (batch, head), which takes its row blocks one after the other
             cut2: one block for every row block of every (batch, head)
   block     4 warps, sliced-K: each has a quarter of the keys of a block, and all rows. 16 rows at a time:
             S of the warp's keys; maxima of the rows through shared memory; P; its part of P V through shared memory,
             where the parts of the four warps are added
   shared    Q (ROWS x D), K and V (COLUMNS x D), the parts (4 x 16 x 64 floats), maxima and sums of the rows
   registers O of all rows, each warp every fourth fragment

   online softmax after each block of keys, with m' = max(m, rowmax S), l' = e^(m - m') l + rowsum e^(S - m'):
       fa1       O = (e^(m - m') l O + e^(S - m') V) / l'       and m, l are stored
       cut1, 2   O~ = e^(m - m') O~ + e^(S - m') V              O = O~ / l at the end, lse is stored

   Per 16 rows and block of keys the warps meet 1 + 2 ceil(D / 64) times: what the third cut does away with. */
#include "attention/fa1.cuh"

struct fa1_forward_arguments {
    device_tensor q, k, v, o;
    float *lse;                                     /* [batch, heads, seqlen_q] */
    float *m_and_l;                                 /* fa1: [batch, heads, 2, seqlen_q] */
    int seqlen_q, seqlen_k, heads, group, head_dim; /* group: query heads to a key/value head */
    float scale;
    bool causal;
    rung what;
    int row_blocks;
};

template <enum dtype TYPE, int D> struct fa1_forward_block {
    static constexpr int ROWS = D <= 128 ? 64 : 32, COLUMNS = D <= 64 ? 256 : D <= 128 ? 128 : 64;
    static constexpr int WARP_KEYS = COLUMNS / FA1_WARPS, S_N = WARP_KEYS / 8;
    static constexpr int SQUARES = D / 16;
    static constexpr int STEPS = ROWS / FA1_STEP_ROWS;                    /* of 16 rows */
    static constexpr int OWN = (2 * SQUARES + FA1_WARPS - 1) / FA1_WARPS; /* fragments of O of 16 rows */
    using tile = shared_tile<D>;
    using copy_rows = tile_copy<ROWS, D, FA1_THREADS>;
    using copy_keys = tile_copy<COLUMNS, D, FA1_THREADS>;
    using exchange = fragment_exchange;
    static constexpr int Q_OFFSET = 0, K_OFFSET = Q_OFFSET + ROWS * tile::ROW_BYTES,
                         V_OFFSET = K_OFFSET + COLUMNS * tile::ROW_BYTES,
                         PARTS_OFFSET = V_OFFSET + COLUMNS * tile::ROW_BYTES,
                         MAXIMA_OFFSET = PARTS_OFFSET + exchange::BYTES,
                         SUMS_OFFSET = MAXIMA_OFFSET + FA1_WARPS * FA1_STEP_ROWS * (int)sizeof(float),
                         SHARED_BYTES = SUMS_OFFSET + FA1_WARPS * FA1_STEP_ROWS * (int)sizeof(float);
    static_assert(SHARED_BYTES <= 99 * 1024, "fits every generation");

    const fa1_forward_arguments &a;
    const uint32_t shared;
    const int warp = (int)warp_index(), lane = lane_index();

    float out[STEPS][OWN][4]; /* O, or O~ */
    float row_max[STEPS][2],
        row_sum[STEPS][2]; /* m and l of rows lane / 4 and lane / 4 + 8: the same in every warp */

    __device__ __forceinline__ fa1_forward_block(
        const fa1_forward_arguments &arguments, uint32_t shared_memory)
        : a(arguments), shared(shared_memory) {
    }

    /* Every warp's value of row lane / 4 + 8 * half; `combine` them. */
    template <typename Combine>
    __device__ __forceinline__ float over_warps(uint32_t values, int half, float start, Combine combine) {
        for (int w = 0; w < FA1_WARPS; w++) {
            start = combine(start, load_shared_float(values + (w * FA1_STEP_ROWS + lane / 4 + 8 * half) * 4));
        }
        return start;
    }
    __device__ __forceinline__ void put_row(uint32_t values, int half, float value) {
        if (lane % 4 == 0) {
            store_shared_float(values + (warp * FA1_STEP_ROWS + lane / 4 + 8 * half) * 4, value);
        }
    }

    /* S of 16 rows and this warp's keys; -infinity where a row does not see a key */
    __device__ __forceinline__ void scores(float (&s)[1][S_N][4], int step, int first_row, int first_key) {
        uint32_t q = shared + Q_OFFSET + step * FA1_STEP_ROWS * tile::ROW_BYTES;
        uint32_t k = shared + K_OFFSET + warp * WARP_KEYS * tile::ROW_BYTES;
        uint32_t q_lane = tile::lane_offset(DOWN_FIRST), k_lane = tile::lane_offset(ACROSS_FIRST);
        clear(s);
        multiply<TYPE, SQUARES>(
            s, [&](uint32_t(&left)[1][4], int d) { ldmatrix(left[0], q + tile::square(q_lane, 0, d)); },
            [&](uint32_t(&right)[4], int d, int n) { ldmatrix(right, k + tile::square(k_lane, 16 * n, d)); });
#pragma unroll
        for (int n = 0; n < S_N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = first_row + lane / 4 + i / 2 * 8, key = first_key + 8 * n + lane % 4 * 2 + i % 2;
                bool sees = key < a.seqlen_k && (!a.causal || key <= row + a.seqlen_k - a.seqlen_q);
                s[0][n][i] = sees ? s[0][n][i] : -INFINITY;
            }
        }
    }

    /* One block of keys for 16 rows. */
    __device__ __forceinline__ void update(int step, int first_row, int first_key) {
        uint32_t maxima = shared + MAXIMA_OFFSET, sums = shared + SUMS_OFFSET;
        float s[1][S_N][4], scale_log2 = a.scale * LOG2_E;
        scores(s, step, first_row, first_key + warp * WARP_KEYS);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = -INFINITY;
#pragma unroll
            for (int n = 0; n < S_N; n++) {
                x = fmaxf(x, fmaxf(s[0][n][2 * half], s[0][n][2 * half + 1]));
            }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            put_row(maxima, half, fmaxf(x, __shfl_xor_sync(~0u, x, 2)));
        }
        __syncthreads();
        float kept[2]; /* e^(m - m') */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float larger =
                over_warps(maxima, half, row_max[step][half], [](float x, float y) { return fmaxf(x, y); });
            float shift = larger == -INFINITY ? 0 : larger * scale_log2, sum = 0;
            kept[half] = exp2_fast(row_max[step][half] * scale_log2 - shift);
            row_max[step][half] = larger;
#pragma unroll
            for (int n = 0; n < S_N; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[0][n][i] = exp2_fast(s[0][n][i] * scale_log2 - shift);
                    sum += s[0][n][i];
                }
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            put_row(sums, half, sum + __shfl_xor_sync(~0u, sum, 2));
        }
        add_up(s, step, kept);
    }

    /* O or O~ of 16 rows, and l: what was there, rescaled, plus the parts of all warps. */
    __device__ __forceinline__ void add_up(const float (&p)[1][S_N][4], int step, const float (&kept)[2]) {
        uint32_t parts = shared + PARTS_OFFSET, v = shared + V_OFFSET + warp * WARP_KEYS * tile::ROW_BYTES;
        uint32_t v_lane = tile::lane_offset(DOWN_FIRST);
        float before[2], after[2]; /* factors of what was there and of what is added */
#pragma unroll
        for (int first = 0; first < SQUARES; first += FA1_EXCHANGE_SQUARES) {
            float part[1][exchange::FRAGMENTS][4];
            clear(part);
            multiply<TYPE, WARP_KEYS / 16>(
                part,
                [&](uint32_t(&left)[1][4], int k) {
                    pack_fragment<TYPE>(left[0], p[0][2 * k], p[0][2 * k + 1]);
                },
                [&](uint32_t(&right)[4], int k, int n) {
                    ldmatrix_transposed(right, v + tile::square(v_lane, 16 * k, min(first + n, SQUARES - 1)));
                });
#pragma unroll
            for (int f = 0; f < exchange::FRAGMENTS; f++) {
                exchange::put(parts, f, part[0][f]);
            }
            __syncthreads();
            if (first == 0) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float l = kept[half] * row_sum[step][half];
                    float sum =
                        over_warps(shared + SUMS_OFFSET, half, l, [](float x, float y) { return x + y; });
                    after[half] = a.what.normalised && sum > 0 ? 1 / sum : 1;
                    before[half] = a.what.normalised ? l * after[half] : kept[half];
                    row_sum[step][half] = sum;
                }
            }
#pragma unroll
            for (int f = 0; f < exchange::FRAGMENTS / FA1_WARPS; f++) {
                int own = first * 2 / FA1_WARPS + f;
                float sum[4];
                exchange::sum(sum, parts, f * FA1_WARPS + warp);
                if (own < OWN) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        out[step][own][i] = before[i / 2] * out[step][own][i] + after[i / 2] * sum[i];
                    }
                }
            }
            __syncthreads();
        }
    }

    /* O by way of Q's tile; lse, and m and l */
    __device__ __forceinline__ void store(int batch, int head, int first_row) {
        int64_t statistics = (int64_t)(batch * a.heads + head) * a.seqlen_q;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int tile_row = step * FA1_STEP_ROWS + lane / 4 + 8 * half, row = first_row + tile_row;
                float l = row_sum[step][half], m = row_max[step][half] * a.scale;
                float factor = a.what.normalised ? 1 : l > 0 ? 1 / l : 0;
#pragma unroll
                for (int own = 0; own < OWN; own++) {
                    int fragment = own * FA1_WARPS + warp;
                    if (fragment < 2 * SQUARES) {
                        store_shared(shared + Q_OFFSET + tile::offset(tile_row, fragment) + lane % 4 * 4,
                            pack<TYPE>(
                                out[step][own][2 * half] * factor, out[step][own][2 * half + 1] * factor));
                    }
                }
                if (warp == 0 && lane % 4 == 0 && row < a.seqlen_q) {
                    a.lse[statistics + row] = m + logf(l);
                    if (a.what.normalised) {
                        a.m_and_l[2 * statistics + row] = m;
                        a.m_and_l[2 * statistics + a.seqlen_q + row] = l;
                    }
                }
            }
        }
        __syncthreads();
        store_tile<ROWS, D, FA1_THREADS>(a.o.row(batch, first_row, head), a.o.seq_stride, shared + Q_OFFSET,
            a.seqlen_q - first_row, a.head_dim, (int)threadIdx.x);
        __syncthreads();
    }

    __device__ __forceinline__ void row_block(int batch, int head, int first_row) {
        int kv_head = head / a.group;
        int visible = a.causal ? min(first_row + ROWS + a.seqlen_k - a.seqlen_q, a.seqlen_k) : a.seqlen_k;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            row_max[step][0] = row_max[step][1] = -INFINITY;
            row_sum[step][0] = row_sum[step][1] = 0;
        }
        clear(out);
        copy_rows::start(shared + Q_OFFSET,
            copy_rows::source(a.q.row(batch, first_row, head), a.q.seq_stride), a.q.seq_stride,
            a.seqlen_q - first_row, a.head_dim);
        for (int first_key = 0; first_key < visible; first_key += COLUMNS) {
            copy_keys::start(shared + K_OFFSET,
                copy_keys::source(a.k.row(batch, first_key, kv_head), a.k.seq_stride), a.k.seq_stride,
                a.seqlen_k - first_key, a.head_dim);
            copy_keys::start(shared + V_OFFSET,
                copy_keys::source(a.v.row(batch, first_key, kv_head), a.v.seq_stride), a.v.seq_stride,
                a.seqlen_k - first_key, a.head_dim);
            copy_commit();
            copy_wait<0>();
            __syncthreads();
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                int row = first_row + step * FA1_STEP_ROWS;
                if (!a.causal || first_key < row + FA1_STEP_ROWS + a.seqlen_k - a.seqlen_q) {
                    update(step, row, first_key);
                }
            }
        }
        copy_commit(); /* Q, if there was no key */
        copy_wait<0>();
        __syncthreads();
        store(batch, head, first_row);
    }

    __device__ __forceinline__ void run() {
        int index = a.what.head_parallel ? (int)blockIdx.x : (int)(blockIdx.x / a.row_blocks);
        int first = a.what.head_parallel ? 0 : (int)(blockIdx.x % a.row_blocks);
        int end = a.what.head_parallel ? a.row_blocks : first + 1;
        for (int block = first; block < end; block++) {
            row_block(index / a.heads, index % a.heads, block * ROWS);
        }
    }
};

template <enum dtype TYPE, int D>
__global__ void __launch_bounds__(FA1_THREADS) fa1_forward_kernel(fa1_forward_arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    fa1_forward_block<TYPE, D>(a, shared_address(shared)).run();
}

/* ---- the calls ---- */

template <enum dtype TYPE, int D, int SHARED_KB> struct fa1_forward_pass {
    static enum status call(const struct attention_params *p, rung what) {
        using block = fa1_forward_block<TYPE, D>;
        fa1_forward_arguments a = {};
        a.q = on_device(p->q), a.k = on_device(p->k), a.v = on_device(p->v), a.o = on_device(p->o);
        a.lse = (float *)p->lse, a.m_and_l = (float *)p->saved;
        a.seqlen_q = (int)p->seqlen_q, a.seqlen_k = (int)p->seqlen_k;
        a.heads = (int)p->heads, a.group = (int)(p->heads / p->kv_heads), a.head_dim = (int)p->head_dim;
        a.scale = (float)p->scale, a.causal = p->causal;
        a.what = what;
        a.row_blocks = (int)ceil_div(p->seqlen_q, block::ROWS);
        int64_t blocks = p->batch * p->heads * (what.head_parallel ? 1 : a.row_blocks);
        return launch("fa1 forward", fa1_forward_kernel<TYPE, D>, blocks, FA1_THREADS, block::SHARED_BYTES,
            p->stream, a);
    }
};

extern "C" enum status fa1_forward(const struct attention *a, const struct attention_params *p) {
    return dispatch<fa1_forward_pass>(a, p, FA1);
}

extern "C" enum status cut1_forward(const struct attention *a, const struct attention_params *p) {
    return dispatch<fa1_forward_pass>(a, p, CUT1);
}

extern "C" enum status cut2_forward(const struct attention *a, const struct attention_params *p) {
    return dispatch<fa1_forward_pass>(a, p, CUT2);
}
