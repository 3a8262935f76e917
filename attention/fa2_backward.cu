/* FlashAttention-2 backward (Dao 2023, algorithm 2): dQ, dK and dV with P computed again from Q, K and lse.

   grid      one thread block for every block of COLUMNS keys of a (batch, key/value head), with all its query heads:
             K and V stay in shared memory, dK and dV in registers, row blocks of Q and dO stream through.
             backward.cuh has the passes before and after

   For each block of ROWS queries; everything about S is transposed, keys down and queries across, so that the
   accumulators of one product are the A operand of the next:
       S^T = K Q^T        P^T = 2^(S^T c - lse log2(e)), c = scale log2(e)
       dP^T = V dO^T      dS^T = P^T o (dP^T - D)  -> shared memory
       dV += P^T dO       dK += dS^T Q             (times scale at the end)
       dQ sums += dS K    in fp32 memory, one step behind, so that one barrier a step is enough

   warps     KEY_WARPS x QUERY_WARPS over S^T. The accumulators of dK and dV of a warp are its keys times D / QUERY_WARPS
             columns; with more than one query warp P^T too is passed on through shared memory, among the warps of the
             same keys. For dQ the warps are spread anew, DQ_ROW_WARPS x the rest over ROWS x D.
   shared    K, V; Q, dO, lse and D of STAGES row blocks; dS^T of two; P^T

   dQ gets a part from every block of keys. Ordinarily they are added as they come (fp32 reductions in the L2 cache);
   deterministic: in the order of the keys, each row block passing from one block of keys to the next by a counter. Blocks
   of keys then take their place by a ticket, so that whoever is waited for is running already.

   FLOPs: 10 seqlen_q seqlen_k D a head, half of it when causal: 5 products. */
#include "attention/backward.cuh"
#include "attention/fa2_tiles.cuh"

/* ---- main ---- */

template <enum dtype TYPE, int D, int SHARED_KB> struct backward_block {
    static constexpr backward_tile TILE = backward_tile_of(D, SHARED_KB);
    static constexpr int ROWS = TILE.rows, COLUMNS = TILE.columns, STAGES = TILE.stages;
    static constexpr int KEY_WARPS = TILE.key_warps, QUERY_WARPS = TILE.query_warps;
    static constexpr int WARPS = KEY_WARPS * QUERY_WARPS, THREADS = WARPS * LANES;
    static constexpr int DQ_ROW_WARPS = TILE.dq_row_warps, DQ_COLUMN_WARPS = WARPS / DQ_ROW_WARPS;
    /* what a warp has of each product */
    static constexpr int WARP_KEYS = COLUMNS / KEY_WARPS, WARP_QUERIES = ROWS / QUERY_WARPS;
    static constexpr int WARP_COLUMNS = D / QUERY_WARPS; /* of dK and dV */
    /* and in fragments; of dQ in squares of two, the last warp maybe fewer */
    static constexpr int M = WARP_KEYS / 16, S_N = WARP_QUERIES / 8, D_N = WARP_COLUMNS / 8;
    static constexpr int DQ_M = ROWS / DQ_ROW_WARPS / 16;
    static constexpr int DQ_SQUARES = (D / 16 + DQ_COLUMN_WARPS - 1) / DQ_COLUMN_WARPS;

    using tile = shared_tile<D>;           /* Q, K, V, dO */
    using weight_tile = shared_tile<ROWS>; /* P^T, dS^T: keys down, queries across */
    static constexpr int KEYS_BYTES = COLUMNS * tile::ROW_BYTES, QUERIES_BYTES = ROWS * tile::ROW_BYTES;
    static constexpr int WEIGHTS_BYTES = COLUMNS * weight_tile::ROW_BYTES;
    static constexpr int STATISTICS_BYTES = 2 * ROWS * (int)sizeof(float);
    static constexpr int K_OFFSET = 0, V_OFFSET = K_OFFSET + KEYS_BYTES, Q_OFFSET = V_OFFSET + KEYS_BYTES,
                         D_O_OFFSET = Q_OFFSET + STAGES * QUERIES_BYTES,
                         D_S_OFFSET = D_O_OFFSET + STAGES * QUERIES_BYTES,
                         P_OFFSET = D_S_OFFSET + 2 * WEIGHTS_BYTES,
                         STATISTICS_OFFSET = P_OFFSET + (QUERY_WARPS > 1 ? WEIGHTS_BYTES : 0);
    static constexpr int SHARED_BYTES = STATISTICS_OFFSET + STAGES * STATISTICS_BYTES;

    static_assert(COLUMNS % (16 * KEY_WARPS) == 0 && ROWS % (16 * QUERY_WARPS) == 0 &&
                      D % (16 * QUERY_WARPS) == 0 && ROWS % (16 * DQ_ROW_WARPS) == 0,
        "a warp has whole squares");
    static_assert(
        FA2_LARGEST_ROW_BLOCK % ROWS == 0 && ROWS % FA2_SMALLEST_ROW_BLOCK == 0, "the workspace fits");
    static_assert(
        TILE.blocks * (SHARED_BYTES + 1024) <= (SHARED_KB + 1) * 1024, "more shared memory than there is");

    const backward_arguments &a;
    const uint32_t shared;
    const int warp = warp_index(), lane = lane_index();
    const int key_warp = warp / QUERY_WARPS, query_warp = warp % QUERY_WARPS;
    const int dq_row_warp = warp / DQ_COLUMN_WARPS, dq_column_warp = warp % DQ_COLUMN_WARPS;

    float dk[M][D_N][4], dv[M][D_N][4];

    int batch, kv_head, key_block; /* this thread block's */

    __device__ __forceinline__ backward_block(const backward_arguments &arguments, uint32_t shared_memory)
        : a(arguments), shared(shared_memory) {
    }

    /* Where a step is: the row block of a query head. */
    struct step {
        int head, row; /* the block's first */
    };

    /* Copies ROWS rows of a tensor into a tile. */
    template <int TILE_ROWS>
    __device__ __forceinline__ void copy(
        uint32_t to, const device_tensor &from, int row, int head, int seqlen) const {
        using copies = tile_copy<TILE_ROWS, D, THREADS>;
        copies::start(to, copies::source(from.row(batch, row, head), from.seq_stride), from.seq_stride,
            seqlen - row, a.head_dim);
    }

    __device__ __forceinline__ void copy_step(const step &s, int stage) {
        copy<ROWS>(shared + Q_OFFSET + stage * QUERIES_BYTES, a.q, s.row, s.head, a.seqlen_q);
        copy<ROWS>(shared + D_O_OFFSET + stage * QUERIES_BYTES, a.d_o, s.row, s.head, a.seqlen_q);
        /* a chunk a thread: first lse, then D */
        int which = (int)threadIdx.x / (ROWS / 4), first = (int)threadIdx.x % (ROWS / 4) * 4;
        if (which < 2) {
            copy_async(shared + STATISTICS_OFFSET + stage * STATISTICS_BYTES + threadIdx.x * CHUNK_BYTES,
                a.statistics_of(batch * a.heads + s.head) + which * a.padded_rows + s.row + first, true);
        }
        copy_commit();
    }

    /* ---- products ---- */

    /* out (keys, queries) = rows of K or V times rows of Q or dO; between the products of depth k, meanwhile(k). */
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply_over_columns(
        float (&out)[M][S_N][4], uint32_t keys, uint32_t queries, Meanwhile meanwhile) {
        uint32_t keys_lane = tile::lane_offset(DOWN_FIRST), queries_lane = tile::lane_offset(ACROSS_FIRST);
        clear(out);
        multiply<TYPE, D / 16>(
            out,
            [&](uint32_t(&left)[M][4], int k) {
                meanwhile(k);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    ldmatrix(left[m], keys + tile::square(keys_lane, 16 * m, k));
                }
            },
            [&](uint32_t(&right)[4], int k, int n) {
                ldmatrix(right, queries + tile::square(queries_lane, 16 * n, k));
            });
    }

    /* sums (keys, columns) += weights^T (keys, queries) times rows of Q or dO, over the WARP_QUERIES queries of one query
       warp. load_left(a, k) gives the weights of square k; queries points at its first query. */
    template <typename Left>
    __device__ __forceinline__ void multiply_over_queries(
        float (&sums)[M][D_N][4], uint32_t queries, Left load_left) {
        uint32_t queries_lane = tile::lane_offset(DOWN_FIRST);
        multiply<TYPE, WARP_QUERIES / 16>(sums, load_left, [&](uint32_t(&right)[4], int k, int n) {
            ldmatrix_transposed(
                right, queries + tile::square(queries_lane, 16 * k, query_warp * (D_N / 2) + n));
        });
    }

    /* The same with the weights that this warp holds, first changed by meanwhile(k). */
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply_own(float (&sums)[M][D_N][4], const float (&own)[M][S_N][4],
        uint32_t tile_of_queries, Meanwhile meanwhile) {
        multiply_over_queries(sums, tile_of_queries + query_warp * WARP_QUERIES * tile::ROW_BYTES,
            [&](uint32_t(&left)[M][4], int k) {
                meanwhile(k);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    pack_fragment<TYPE>(left[m], own[m][2 * k], own[m][2 * k + 1]);
                }
            });
    }

    /* The same with the weights that query warp `other` has stored. */
    __device__ __forceinline__ void multiply_others(
        float (&sums)[M][D_N][4], uint32_t weights, uint32_t tile_of_queries, int other) {
        uint32_t lane_of_weights = weight_tile::lane_offset(DOWN_FIRST);
        multiply_over_queries(sums, tile_of_queries + other * WARP_QUERIES * tile::ROW_BYTES,
            [&](uint32_t(&left)[M][4], int k) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    ldmatrix(
                        left[m], weights + weight_tile::square(lane_of_weights, key_warp * WARP_KEYS + 16 * m,
                                               other * (WARP_QUERIES / 16) + k));
                }
            });
    }

    /* Where square n of this warp's part of dQ lies. When the squares do not divide evenly, the last warp's last ones are
       not its own: it computes some other, for nothing. */
    static constexpr bool DQ_EVEN = D / 16 % DQ_COLUMN_WARPS == 0;
    __device__ __forceinline__ bool has_dq_square(int n) const {
        return DQ_EVEN || dq_column_warp * DQ_SQUARES + n < D / 16;
    }
    __device__ __forceinline__ int dq_square(int n) const {
        return has_dq_square(n) ? dq_column_warp * DQ_SQUARES + n : 0;
    }

    /* out (queries, columns) = dS (queries, keys) K */
    __device__ __forceinline__ void multiply_over_keys(float (&out)[DQ_M][2 * DQ_SQUARES][4], uint32_t d_s) {
        uint32_t weights_lane = weight_tile::lane_offset(ACROSS_FIRST),
                 keys_lane = tile::lane_offset(DOWN_FIRST);
        clear(out);
        multiply<TYPE, COLUMNS / 16>(
            out,
            [&](uint32_t(&left)[DQ_M][4], int k) {
#pragma unroll
                for (int m = 0; m < DQ_M; m++) {
                    ldmatrix_transposed(
                        left[m], d_s + weight_tile::square(weights_lane, 16 * k, dq_row_warp * DQ_M + m));
                }
            },
            [&](uint32_t(&right)[4], int k, int n) {
                ldmatrix_transposed(right, shared + K_OFFSET + tile::square(keys_lane, 16 * k, dq_square(n)));
            });
    }

    /* ---- between the products ---- */

    /* S^T = -infinity where this warp's query q does not see its key k: k > q + diagonal, or k past the end. */
    __device__ __forceinline__ void mask(float (&s)[M][S_N][4], int first_key, int first_query) {
        int diagonal = a.seqlen_k - a.seqlen_q;
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = first_key + 16 * m + lane / 4 + i / 2 * 8,
                    query = first_query + lane % 4 * 2 + i % 2;
                int first_seeing = a.causal ? key - diagonal - query : 0;
                first_seeing = key < a.seqlen_k ? first_seeing : WARP_QUERIES;
#pragma unroll
                for (int n = 0; n < S_N; n++) {
                    s[m][n][i] = 8 * n >= first_seeing ? s[m][n][i] : -INFINITY;
                }
            }
        }
    }

    /* P^T = 2^(S^T scale_log2 - lse) in fragment column n */
    __device__ __forceinline__ void exponentiate(float (&s)[M][S_N][4], int n, uint32_t lse) {
        float scale_log2 = a.scale * LOG2_E;
        float2 pair = load_shared_pair(lse + (8 * n + lane % 4 * 2) * (uint32_t)sizeof(float));
#pragma unroll
        for (int m = 0; m < M; m++) {
            s[m][n][0] = exp2_fast(s[m][n][0] * scale_log2 - pair.x);
            s[m][n][1] = exp2_fast(s[m][n][1] * scale_log2 - pair.y);
            s[m][n][2] = exp2_fast(s[m][n][2] * scale_log2 - pair.x);
            s[m][n][3] = exp2_fast(s[m][n][3] * scale_log2 - pair.y);
        }
    }

    /* dS^T = P^T o (dP^T - D) in fragment column n, in place of dP^T */
    __device__ __forceinline__ void differentiate(
        float (&dp)[M][S_N][4], const float (&p)[M][S_N][4], int n, uint32_t row_sums) {
        float2 pair = load_shared_pair(row_sums + (8 * n + lane % 4 * 2) * (uint32_t)sizeof(float));
#pragma unroll
        for (int m = 0; m < M; m++) {
            dp[m][n][0] = p[m][n][0] * (dp[m][n][0] - pair.x);
            dp[m][n][1] = p[m][n][1] * (dp[m][n][1] - pair.y);
            dp[m][n][2] = p[m][n][2] * (dp[m][n][2] - pair.x);
            dp[m][n][3] = p[m][n][3] * (dp[m][n][3] - pair.y);
        }
    }

    /* This warp's fragment column n of P^T or dS^T, rounded, to its place. */
    __device__ __forceinline__ void store_weights(uint32_t to, const float (&weights)[M][S_N][4], int n) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int key = key_warp * WARP_KEYS + 16 * m + 8 * half + lane / 4;
                store_shared(to + weight_tile::offset(key, query_warp * S_N + n) + lane % 4 * 4,
                    pack<TYPE>(weights[m][n][2 * half], weights[m][n][2 * half + 1]));
            }
        }
    }

    /* work(n) for the fragment columns that fall to part k of `parts` */
    template <typename Work>
    __device__ __forceinline__ static void part_of_columns(int k, int parts, Work work) {
#pragma unroll
        for (int n = 0; n < S_N; n++) {
            if (n * parts / S_N == k) {
                work(n);
            }
        }
    }

    /* ---- a step ---- */

    __device__ __forceinline__ void step_keys(int first_key, int first_query, int stage, uint32_t d_s) {
        uint32_t q = shared + Q_OFFSET + stage * QUERIES_BYTES,
                 d_o = shared + D_O_OFFSET + stage * QUERIES_BYTES;
        uint32_t statistics = shared + STATISTICS_OFFSET + stage * STATISTICS_BYTES +
                              query_warp * WARP_QUERIES * (uint32_t)sizeof(float);
        uint32_t keys_offset = key_warp * WARP_KEYS * tile::ROW_BYTES,
                 queries_offset = query_warp * WARP_QUERIES * tile::ROW_BYTES;
        int warp_key = first_key + key_warp * WARP_KEYS, warp_query = first_query + query_warp * WARP_QUERIES;
        int diagonal = a.seqlen_k - a.seqlen_q;
        float p[M][S_N][4], ds[M][S_N][4];
        if (a.causal && first_query + ROWS - 1 + diagonal < warp_key) {
            clear(ds); /* these keys are seen by no query of the row block */
            part_of_columns(0, 1, [&](int n) { store_weights(d_s, ds, n); });
            return;
        }
        multiply_over_columns(p, shared + K_OFFSET + keys_offset, q + queries_offset, [](int) {});
        if ((a.causal && warp_query + diagonal < warp_key + WARP_KEYS - 1) ||
            warp_key + WARP_KEYS > a.seqlen_k) {
            mask(p, warp_key, warp_query);
        }
        multiply_over_columns(ds, shared + V_OFFSET + keys_offset, d_o + queries_offset, [&](int k) {
            part_of_columns(k, D / 16, [&](int n) {
                exponentiate(p, n, statistics);
                if constexpr (QUERY_WARPS > 1) {
                    store_weights(shared + P_OFFSET, p, n);
                }
            });
        });
        multiply_own(dv, p, d_o, [&](int k) {
            part_of_columns(k, WARP_QUERIES / 16, [&](int n) {
                differentiate(ds, p, n, statistics + ROWS * (uint32_t)sizeof(float));
                store_weights(d_s, ds, n);
            });
        });
        multiply_own(dk, ds, q, [](int) {});
        if constexpr (QUERY_WARPS > 1) {
            barrier(1 + key_warp, QUERY_WARPS * LANES); /* the query warps of the same keys */
#pragma unroll
            for (int i = 1; i < QUERY_WARPS; i++) {
                int other = (query_warp + i) % QUERY_WARPS;
                multiply_others(dv, shared + P_OFFSET, d_o, other);
                multiply_others(dk, d_s, q, other);
            }
        }
    }

    /* Adds to dQ's sums of a row block. The blocks of keys that do are the first ones, up to the diagonal. */
    __device__ __forceinline__ void step_dq(const step &s, uint32_t d_s) {
        float out[DQ_M][2 * DQ_SQUARES][4];
        multiply_over_keys(out, d_s);
        if (a.ticket != NULL) {
            if (threadIdx.x == 0) {
                wait_for_value(a.turn_of(batch * a.heads + s.head, s.row), key_block);
            }
            __syncthreads();
        }
        float *sums = a.dq_sums_of<D>(batch * a.heads + s.head, s.row);
#pragma unroll
        for (int m = 0; m < DQ_M; m++) {
#pragma unroll
            for (int n = 0; n < 2 * DQ_SQUARES; n++) {
                if (has_dq_square(n / 2)) {
                    int fragment = (dq_row_warp * DQ_M + m) * (D / 8) + dq_column_warp * 2 * DQ_SQUARES + n;
                    add_fragment(sums + fragment * FRAGMENT_FLOATS, out[m][n]);
                }
            }
        }
        if (a.ticket != NULL) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                store_release(a.turn_of(batch * a.heads + s.head, s.row), key_block + 1);
            }
        }
    }

    /* dK or dV, by way of the shared tile of K or V */
    __device__ __forceinline__ void store_sums(uint32_t to, const float (&sums)[M][D_N][4], float factor) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < D_N; n++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int key = key_warp * WARP_KEYS + 16 * m + 8 * half + lane / 4;
                    store_shared(to + tile::offset(key, query_warp * D_N + n) + lane % 4 * 4,
                        pack<TYPE>(sums[m][n][2 * half] * factor, sums[m][n][2 * half + 1] * factor));
                }
            }
        }
    }

    __device__ __forceinline__ void run() {
        int kv_index;
        a.order.find(a.ticket == NULL ? blockIdx.x : draw_ticket(a.ticket, shared), &key_block, &kv_index);
        batch = kv_index / a.kv_heads, kv_head = kv_index % a.kv_heads;
        int first_key = key_block * COLUMNS, group = a.heads / a.kv_heads;
        /* The row blocks that see any of these keys, of every head of the group. From the diagonal down, so that blocks
           of keys that run together add to different rows of dQ; but when they wait for each other they all begin with
           the last rows, which all of them see. */
        bool ordered = a.ticket != NULL;
        int first_row = a.causal ? max(first_key - (a.seqlen_k - a.seqlen_q), 0) / ROWS * ROWS : 0;
        int last_row = (a.seqlen_q - 1) / ROWS * ROWS;
        int steps = group * ((last_row - first_row) / ROWS + 1);
        step now = {kv_head * group, ordered ? last_row : first_row}, before = now;
        auto after = [&](step s) {
            bool last = s.row == (ordered ? first_row : last_row);
            int row = s.row + (ordered ? -ROWS : ROWS), begin = ordered ? last_row : first_row;
            return step{last ? s.head + 1 : s.head, last ? begin : row};
        };
        clear(dk);
        clear(dv);
        copy<COLUMNS>(shared + K_OFFSET, a.k, first_key, kv_head, a.seqlen_k);
        copy<COLUMNS>(shared + V_OFFSET, a.v, first_key, kv_head, a.seqlen_k);
        copy_step(now, 0);
        for (int t = 0; t < steps; t++) {
            if (STAGES == 1 && t > 0) {
                __syncthreads();
                copy_step(now, 0);
            }
            copy_wait<0>();
            __syncthreads();
            if (STAGES == 2 && t + 1 < steps) {
                copy_step(after(now), (t + 1) % STAGES);
            }
            uint32_t d_s = shared + D_S_OFFSET + t % 2 * WEIGHTS_BYTES,
                     d_s_before = shared + D_S_OFFSET + (t + 1) % 2 * WEIGHTS_BYTES;
            step_keys(first_key, now.row, t % STAGES, d_s);
            if (t > 0) {
                step_dq(before, d_s_before);
            }
            before = now;
            now = after(now);
        }
        __syncthreads();
        step_dq(before, shared + D_S_OFFSET + (steps - 1) % 2 * WEIGHTS_BYTES);
        __syncthreads();
        store_sums(shared + K_OFFSET, dk, a.scale);
        store_sums(shared + V_OFFSET, dv, 1);
        __syncthreads();
        store_tile<COLUMNS, D, THREADS>(a.dk.row(batch, first_key, kv_head), a.dk.seq_stride,
            shared + K_OFFSET, a.seqlen_k - first_key, a.head_dim, (int)threadIdx.x);
        store_tile<COLUMNS, D, THREADS>(a.dv.row(batch, first_key, kv_head), a.dv.seq_stride,
            shared + V_OFFSET, a.seqlen_k - first_key, a.head_dim, (int)threadIdx.x);
    }
};

template <enum dtype TYPE, int D, int SHARED_KB>
__global__ void __launch_bounds__(backward_block<TYPE, D, SHARED_KB>::THREADS,
    backward_tile_of(D, SHARED_KB).blocks) fa2_backward_main(backward_arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    if constexpr (SHARED_KB == COMPILED_SHARED_KB) {
        backward_block<TYPE, D, SHARED_KB>(a, shared_address(shared)).run();
    }
}

/* ---- the call ---- */

template <enum dtype TYPE, int D, int SHARED_KB> struct backward_pass {
    static enum status call(const struct attention_params *p) {
        using block = backward_block<TYPE, D, SHARED_KB>;
        backward_arguments a = backward_arguments_of<D>(p, block::COLUMNS);
        CHECK((prepare_backward<TYPE, D>(p, a)));
        CHECK(launch("fa2 backward", fa2_backward_main<TYPE, D, SHARED_KB>,
            p->batch * p->kv_heads * a.order.blocks, block::THREADS, block::SHARED_BYTES, p->stream, a));
        return finish_backward<TYPE, D>(p, a);
    }
};

extern "C" enum status fa2_backward(const struct attention *a, const struct attention_params *p) {
    return dispatch<backward_pass>(a, p);
}
