/* FlashAttention backward as it was before FlashAttention-2 (Dao et al. 2022, algorithm 4), and the two cuts on the way.

   grid      fa1, cut1: one block for a (batch, key/value head), which takes its blocks of keys one after the other
             cut2: one block for every block of COLUMNS keys of every (batch, key/value head)
   block     4 warps, sliced-K: each has a quarter of the block's keys, and their rows of dK and dV in registers. 16
             queries at a time:
                 S = Q K^T, P; dP = dO V^T, dS = P o (dP - D)      of the warp's keys
                 dV += P^T dO, dK += dS^T Q                        P and dS by way of the warp's own shared memory
                 its part of dS K through shared memory, where the parts of the four warps are added, and on to dQ's sums
   shared    K, V (COLUMNS x D); Q, dO (ROWS x D); the parts (4 x 16 x 64 floats); P, then dS, of every warp

   fa1 has P = e^(S - m) / l from the stored m and l, the cuts have P = e^(S - lse). Head dimensions over 128 are taken
   in two halves of the columns of dK and dV, with S and dP computed for each: registers hold no more. */
#include "attention/backward.cuh"
#include "attention/fa1.cuh"

struct fa1_backward_arguments {
    backward_arguments common;
    const float *m_and_l; /* fa1: [batch, heads, 2, seqlen_q] */
    rung what;
};

template <enum dtype TYPE, int D> struct fa1_backward_block {
    static constexpr int ROWS = D <= 128 ? 64 : 16, COLUMNS = D <= 64 ? 128 : 64;
    static constexpr int WARP_KEYS = COLUMNS / FA1_WARPS, M = WARP_KEYS / 16, S_N = WARP_KEYS / 8;
    static constexpr int SQUARES = D / 16, HALVES = D <= 128 ? 1 : 2, PART_SQUARES = SQUARES / HALVES;
    using tile = shared_tile<D>;
    using weight_tile = shared_tile<WARP_KEYS>; /* 16 queries down, the warp's keys across */
    using exchange = fragment_exchange;
    static constexpr int K_OFFSET = 0, V_OFFSET = K_OFFSET + COLUMNS * tile::ROW_BYTES,
                         Q_OFFSET = V_OFFSET + COLUMNS * tile::ROW_BYTES,
                         D_O_OFFSET = Q_OFFSET + ROWS * tile::ROW_BYTES,
                         PARTS_OFFSET = D_O_OFFSET + ROWS * tile::ROW_BYTES,
                         WEIGHTS_OFFSET = PARTS_OFFSET + exchange::BYTES,
                         WEIGHTS_BYTES = FA1_STEP_ROWS * weight_tile::ROW_BYTES,
                         SHARED_BYTES = WEIGHTS_OFFSET + FA1_WARPS * WEIGHTS_BYTES;
    static_assert(SHARED_BYTES <= 99 * 1024, "fits every generation");

    const fa1_backward_arguments &all;
    const backward_arguments &a = all.common;
    const uint32_t shared;
    const int warp = (int)warp_index(), lane = lane_index();
    const uint32_t k_warp = shared + K_OFFSET + warp * WARP_KEYS * tile::ROW_BYTES,
                   v_warp = shared + V_OFFSET + warp * WARP_KEYS * tile::ROW_BYTES,
                   weights = shared + WEIGHTS_OFFSET + warp * WEIGHTS_BYTES;

    int batch, kv_head, split, first_key;
    float dk[M][2 * PART_SQUARES][4], dv[M][2 * PART_SQUARES][4];

    __device__ __forceinline__ fa1_backward_block(
        const fa1_backward_arguments &arguments, uint32_t shared_memory)
        : all(arguments), shared(shared_memory) {
    }

    template <int TILE_ROWS>
    __device__ __forceinline__ void copy(
        uint32_t to, const device_tensor &from, int row, int head, int seqlen) const {
        using copies = tile_copy<TILE_ROWS, D, FA1_THREADS>;
        copies::start(to, copies::source(from.row(batch, row, head), from.seq_stride), from.seq_stride,
            seqlen - row, a.head_dim);
    }

    /* out (16 queries, the warp's keys) = rows of Q or dO times rows of K or V */
    __device__ __forceinline__ void multiply_over_columns(
        float (&out)[1][S_N][4], uint32_t queries, uint32_t keys) {
        uint32_t queries_lane = tile::lane_offset(DOWN_FIRST), keys_lane = tile::lane_offset(ACROSS_FIRST);
        clear(out);
        multiply<TYPE, SQUARES>(
            out,
            [&](uint32_t(&left)[1][4], int d) {
                ldmatrix(left[0], queries + tile::square(queries_lane, 0, d));
            },
            [&](uint32_t(&right)[4], int d, int n) {
                ldmatrix(right, keys + tile::square(keys_lane, 16 * n, d));
            });
    }

    /* sums (the warp's keys, columns) += weights^T (keys, 16 queries) times rows of Q or dO */
    __device__ __forceinline__ void multiply_over_queries(
        float (&sums)[M][2 * PART_SQUARES][4], const float (&w)[1][S_N][4], uint32_t queries, int half) {
        uint32_t weights_lane = weight_tile::lane_offset(ACROSS_FIRST),
                 queries_lane = tile::lane_offset(DOWN_FIRST);
        __syncwarp();
#pragma unroll
        for (int n = 0; n < S_N; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                store_shared(weights + weight_tile::offset(lane / 4 + 8 * i, n) + lane % 4 * 4,
                    pack<TYPE>(w[0][n][2 * i], w[0][n][2 * i + 1]));
            }
        }
        __syncwarp();
        multiply<TYPE, 1>(
            sums,
            [&](uint32_t(&left)[M][4], int) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    ldmatrix_transposed(left[m], weights + weight_tile::square(weights_lane, 0, m));
                }
            },
            [&](uint32_t(&right)[4], int, int n) {
                ldmatrix_transposed(right, queries + tile::square(queries_lane, 0, half * PART_SQUARES + n));
            });
    }

    /* P, in place of S, of 16 queries from first_row on: 0 where a query does not see a key */
    __device__ __forceinline__ void probabilities(float (&s)[1][S_N][4], int head, int first_row) {
        int index = batch * a.heads + head, key = first_key + warp * WARP_KEYS + lane % 4 * 2;
        float scale_log2 = a.scale * LOG2_E;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first_row + lane / 4 + 8 * half;
            int visible = row >= a.seqlen_q ? 0 : a.causal ? row + 1 + a.seqlen_k - a.seqlen_q : a.seqlen_k;
            float shift = a.statistics_of(index)[row], factor = 1; /* lse log2(e) */
            if (all.what.normalised && row < a.seqlen_q) {
                const float *m = all.m_and_l + (int64_t)index * 2 * a.seqlen_q + row;
                shift = m[0] * LOG2_E;
                factor = 1 / m[a.seqlen_q];
            }
#pragma unroll
            for (int n = 0; n < S_N; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    bool sees = key + 8 * n + i % 2 < min(visible, a.seqlen_k);
                    s[0][n][i] = sees ? exp2_fast(s[0][n][i] * scale_log2 - shift) * factor : 0;
                }
            }
        }
    }

    /* dS = P o (dP - D), in place of dP */
    __device__ __forceinline__ void differentiate(
        float (&dp)[1][S_N][4], const float (&p)[1][S_N][4], int head, int first_row) {
        const float *row_sums =
            a.statistics_of(batch * a.heads + head) + a.padded_rows + first_row + lane / 4;
#pragma unroll
        for (int n = 0; n < S_N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dp[0][n][i] = p[0][n][i] * (dp[0][n][i] - row_sums[i / 2 * 8]);
            }
        }
    }

    /* dQ's sums of 16 rows += dS K, the parts of all warps; deterministic, the first block of keys begins them. */
    __device__ __forceinline__ void add_dq(const float (&ds)[1][S_N][4], int head, int row) {
        uint32_t parts = shared + PARTS_OFFSET, keys_lane = tile::lane_offset(DOWN_FIRST);
        float *sums = a.dq_sums_of<D>(split, batch * a.heads + head, row);
        bool begin = a.deterministic && first_key == split * COLUMNS;
#pragma unroll
        for (int first = 0; first < SQUARES; first += FA1_EXCHANGE_SQUARES) {
            float part[1][exchange::FRAGMENTS][4];
            clear(part);
            multiply<TYPE, WARP_KEYS / 16>(
                part,
                [&](uint32_t(&left)[1][4], int k) {
                    pack_fragment<TYPE>(left[0], ds[0][2 * k], ds[0][2 * k + 1]);
                },
                [&](uint32_t(&right)[4], int k, int n) {
                    ldmatrix_transposed(
                        right, k_warp + tile::square(keys_lane, 16 * k, min(first + n, SQUARES - 1)));
                });
#pragma unroll
            for (int f = 0; f < exchange::FRAGMENTS; f++) {
                exchange::put(parts, f, part[0][f]);
            }
            __syncthreads();
#pragma unroll
            for (int f = warp; f < exchange::FRAGMENTS; f += FA1_WARPS) {
                float sum[4];
                exchange::sum(sum, parts, f);
                float *fragment = sums + (2 * first + f) * FRAGMENT_FLOATS;
                if (2 * first + f < 2 * SQUARES && begin) {
                    store_fragment(fragment, sum);
                } else if (2 * first + f < 2 * SQUARES) {
                    add_fragment(fragment, sum);
                }
            }
            __syncthreads();
        }
    }

    /* 16 queries of a head against the block of keys */
    __device__ __forceinline__ void step(int head, int row, uint32_t queries_offset, int half) {
        uint32_t q = shared + Q_OFFSET + queries_offset, d_o = shared + D_O_OFFSET + queries_offset;
        float p[1][S_N][4], ds[1][S_N][4];
        multiply_over_columns(p, q, k_warp);
        probabilities(p, head, row);
        multiply_over_queries(dv, p, d_o, half);
        multiply_over_columns(ds, d_o, v_warp);
        differentiate(ds, p, head, row);
        multiply_over_queries(dk, ds, q, half);
        if (half == 0) {
            add_dq(ds, head, row);
        }
    }

    __device__ __forceinline__ void row_block(int head, int first_row, int half) {
        __syncthreads();
        copy<ROWS>(shared + Q_OFFSET, a.q, first_row, head, a.seqlen_q);
        copy<ROWS>(shared + D_O_OFFSET, a.d_o, first_row, head, a.seqlen_q);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        for (int row = 0; row < ROWS; row += FA1_STEP_ROWS) {
            step(head, first_row + row, row * tile::ROW_BYTES, half);
        }
    }

    /* This half's columns of dK or dV */
    __device__ __forceinline__ void store_sums(
        const device_tensor &to, const float (&sums)[M][2 * PART_SQUARES][4], float factor, int half) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < 2 * PART_SQUARES; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int key = warp * WARP_KEYS + 16 * m + 8 * i + lane / 4;
                    int column = (half * 2 * PART_SQUARES + n) * 8 + lane % 4 * 2;
                    if (first_key + key < a.seqlen_k && column < a.head_dim) {
                        *(uint32_t *)(to.row(batch, first_key + key, kv_head) + column) =
                            pack<TYPE>(sums[m][n][2 * i] * factor, sums[m][n][2 * i + 1] * factor);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void key_block() {
        for (int half = 0; half < HALVES; half++) {
            clear(dk);
            clear(dv);
            __syncthreads();
            copy<COLUMNS>(shared + K_OFFSET, a.k, first_key, kv_head, a.seqlen_k);
            copy<COLUMNS>(shared + V_OFFSET, a.v, first_key, kv_head, a.seqlen_k);
            copy_commit();
            for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; head++) {
                for (int row = a.diagonal_row(first_key, ROWS); row < a.seqlen_q; row += ROWS) {
                    row_block(head, row, half);
                }
            }
            store_sums(a.dk, dk, a.scale, half);
            store_sums(a.dv, dv, 1, half);
        }
    }

    __device__ __forceinline__ void run() {
        int index;
        a.order.find(blockIdx.x, &split, &index);
        batch = index / a.kv_heads, kv_head = index % a.kv_heads;
        for (int block = split; block < a.key_blocks; block += a.order.blocks) {
            first_key = block * COLUMNS;
            key_block();
        }
    }
};

template <enum dtype TYPE, int D>
__global__ void __launch_bounds__(FA1_THREADS) fa1_backward_kernel(fa1_backward_arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    fa1_backward_block<TYPE, D>(a, shared_address(shared)).run();
}

/* ---- the calls ---- */

template <enum dtype TYPE, int D, int SHARED_KB> struct fa1_backward_pass {
    static enum status call(const struct attention_params *p, rung what) {
        using block = fa1_backward_block<TYPE, D>;
        fa1_backward_arguments a = {};
        a.common = backward_arguments_of<D>(p, block::ROWS, block::COLUMNS, what.head_parallel);
        a.m_and_l = (const float *)p->saved;
        a.what = what;
        int64_t blocks = p->batch * p->kv_heads * a.common.order.blocks;
        CHECK((prepare_backward<TYPE, D>(p, a.common)));
        CHECK(launch("fa1 backward", fa1_backward_kernel<TYPE, D>, blocks, FA1_THREADS, block::SHARED_BYTES,
            p->stream, a));
        return finish_backward<TYPE, D>(p, a.common);
    }
};

extern "C" enum status fa1_backward(const struct attention *a, const struct attention_params *p) {
    return dispatch<fa1_backward_pass>(a, p, FA1);
}

extern "C" enum status cut1_backward(const struct attention *a, const struct attention_params *p) {
    return dispatch<fa1_backward_pass>(a, p, CUT1);
}

extern "C" enum status cut2_backward(const struct attention *a, const struct attention_params *p) {
    return dispatch<fa1_backward_pass>(a, p, CUT2);
}
