/* FlashAttention-2 backward (Dao 2023, algorithm 2): dQ, dK and dV with P computed again from Q, K and lse.

   grid      one thread block for every block of COLUMNS keys of a (batch, key/value head), with all its query heads:
             K and V stay in shared memory, dK and dV in registers, row blocks of Q and dO stream through.
             backward.cuh has the passes before and after, and what is different when deterministic

   For each block of ROWS queries, but for dQ a part of them after the other; everything about S is transposed, keys down
   and queries across, so that the accumulators of one product are the A operand of the next:
       S^T = K Q^T        P^T = 2^(S^T c - lse log2(e)), c = scale log2(e)
       dP^T = V dO^T      dS^T = P^T o (dP^T - D)  -> shared memory
       dV += P^T dO       dK += dS^T Q             (times scale at the end)
       dQ sums += dS K    in fp32 memory, one step behind, so that one barrier a step is enough

   Registers allow S^T of 16 to 32 queries a warp; PARTS lets a step have more. There are fewer barriers then, and dQ's
   product, which is the one that reads most of shared memory, has larger pieces for each warp.

   warps     KEY_WARPS x QUERY_WARPS over S^T. The accumulators of dK and dV of a warp are its keys times D / QUERY_WARPS
             columns; with more than one query warp P^T too is passed on through shared memory, among the warps of the
             same keys, with a second barrier. For dQ the warps are spread anew, DQ_ROW_WARPS x the rest over ROWS x D.
   shared    K, V; Q, dO, lse and D of STAGES row blocks; dS^T of two; P^T

   FLOPs: 10 seqlen_q seqlen_k D a head, half of it when causal: 5 products. */
#include "attention/backward.cuh"
#include "attention/fa2_tiles.cuh"

#include <type_traits>

/* ---- fragments of weights ---- */

/* What a lane has of a C fragment: rows lane / 4 (half 0) and lane / 4 + 8 (half 1), two columns each. */
template <enum dtype TYPE> struct float_fragment {
    float values[4];
    __device__ __forceinline__ void set(float a, float b, float c, float d) {
        values[0] = a, values[1] = b, values[2] = c, values[3] = d;
    }
    __device__ __forceinline__ float2 floats(int half) const {
        return make_float2(values[2 * half], values[2 * half + 1]);
    }
    __device__ __forceinline__ uint32_t rounded(int half) const {
        return pack<TYPE>(values[2 * half], values[2 * half + 1]);
    }
};

template <enum dtype TYPE> struct rounded_fragment {
    uint32_t pairs[2];
    __device__ __forceinline__ void set(float a, float b, float c, float d) {
        pairs[0] = pack<TYPE>(a, b), pairs[1] = pack<TYPE>(c, d);
    }
    __device__ __forceinline__ float2 floats(int half) const {
        return unpack<TYPE>(pairs[half]);
    }
    __device__ __forceinline__ uint32_t rounded(int half) const {
        return pairs[half];
    }
};

/* ---- main ---- */

template <enum dtype TYPE, int D, int SHARED_KB> struct backward_block {
    static constexpr backward_tile TILE = backward_tile_of(D, SHARED_KB);
    static constexpr int ROWS = TILE.rows, COLUMNS = TILE.columns, STAGES = TILE.stages;
    static constexpr int PARTS = TILE.parts, PART_ROWS = ROWS / PARTS;
    static constexpr int KEY_WARPS = TILE.key_warps, QUERY_WARPS = TILE.query_warps;
    static constexpr int WARPS = KEY_WARPS * QUERY_WARPS, THREADS = WARPS * LANES;
    static constexpr int DQ_ROW_WARPS = TILE.dq_row_warps, DQ_COLUMN_WARPS = WARPS / DQ_ROW_WARPS;
    /* what a warp has of each product */
    static constexpr int WARP_KEYS = COLUMNS / KEY_WARPS, WARP_QUERIES = PART_ROWS / QUERY_WARPS;
    static constexpr int WARP_COLUMNS = D / QUERY_WARPS; /* of dK and dV */
    /* and in fragments; of dQ in squares of two, the last warp maybe fewer */
    static constexpr int M = WARP_KEYS / 16, S_N = WARP_QUERIES / 8, D_N = WARP_COLUMNS / 8;
    static constexpr int DQ_M = ROWS / DQ_ROW_WARPS / 16;
    static constexpr int DQ_SQUARES = (D / 16 + DQ_COLUMN_WARPS - 1) / DQ_COLUMN_WARPS;

    using tile = shared_tile<D>;                /* Q, K, V, dO */
    using weight_tile = shared_tile<PART_ROWS>; /* P^T, dS^T of a part: keys down, queries across */
    static constexpr int KEYS_BYTES = COLUMNS * tile::ROW_BYTES, QUERIES_BYTES = ROWS * tile::ROW_BYTES;
    static constexpr int WEIGHTS_BYTES = COLUMNS * weight_tile::ROW_BYTES;
    static constexpr int ROW_SUMS_OFFSET = ROWS * (int)sizeof(float), STATISTICS_BYTES = 2 * ROW_SUMS_OFFSET;
    static constexpr int K_OFFSET = 0, V_OFFSET = K_OFFSET + KEYS_BYTES, Q_OFFSET = V_OFFSET + KEYS_BYTES,
                         D_O_OFFSET = Q_OFFSET + STAGES * QUERIES_BYTES,
                         D_S_OFFSET = D_O_OFFSET + STAGES * QUERIES_BYTES,
                         P_OFFSET = D_S_OFFSET + 2 * PARTS * WEIGHTS_BYTES,
                         STATISTICS_OFFSET = P_OFFSET + (QUERY_WARPS > 1 ? WEIGHTS_BYTES : 0);
    static constexpr int SHARED_BYTES = STATISTICS_OFFSET + STAGES * STATISTICS_BYTES;

    static_assert(COLUMNS % (16 * KEY_WARPS) == 0 && ROWS % (16 * PARTS * QUERY_WARPS) == 0 &&
                      D % (16 * QUERY_WARPS) == 0 && ROWS % (16 * DQ_ROW_WARPS) == 0,
        "a warp has whole squares");
    static_assert(PARTS == 1 || QUERY_WARPS == 1, "there is one place for P^T");
    static_assert(FA2_LARGEST_ROW_BLOCK % ROWS == 0, "the workspace fits");
    static_assert(
        TILE.blocks * (SHARED_BYTES + 1024) <= (SHARED_KB + 1) * 1024, "more shared memory than there is");

    /* With several query warps P^T is rounded as soon as it is there: registers are short, and it must be for the others.
       dS^T is then of the rounded one. */
    using probability =
        typename std::conditional<(QUERY_WARPS > 1), rounded_fragment<TYPE>, float_fragment<TYPE>>::type;

    /* Everything that depends on the thread is worked out for every block of keys anew: registers are too few to keep it. */
    const backward_arguments &a;
    const uint32_t shared;
    const int thread = (int)opaque(threadIdx.x), warp = (int)uniform_warp_index(), lane = thread % LANES;
    const int key_warp = warp / QUERY_WARPS, query_warp = warp % QUERY_WARPS;
    const int dq_row_warp = warp / DQ_COLUMN_WARPS, dq_column_warp = warp % DQ_COLUMN_WARPS;
    const int first_key;
    int batch, kv_head;

    float dk[M][D_N][4], dv[M][D_N][4];

    __device__ __forceinline__ backward_block(
        const backward_arguments &arguments, uint32_t shared_memory, int first)
        : a(arguments), shared(opaque(shared_memory)), first_key(first) {
        int place, index;
        a.order.find(opaque(blockIdx.x), &place, &index);
        batch = index / a.kv_heads, kv_head = index % a.kv_heads;
    }

    /* Where a step is: the row block of a query head. The steps go through the heads of the group, and in each from the
       diagonal down, so that blocks of keys that run together add to different rows of dQ. */
    struct step {
        int head, row;
    };
    __device__ __forceinline__ int first_row() const {
        return a.diagonal_row(first_key, ROWS);
    }
    __device__ __forceinline__ int last_row() const {
        return (a.seqlen_q - 1) / ROWS * ROWS;
    }
    __device__ __forceinline__ step after(step s) const {
        bool wrap = s.row == last_row();
        return {s.head + wrap, wrap ? first_row() : s.row + ROWS};
    }
    __device__ __forceinline__ step before(step s) const {
        bool wrap = s.row == first_row();
        return {s.head - wrap, wrap ? last_row() : s.row - ROWS};
    }

    /* Copies ROWS rows of a tensor into a tile. */
    template <int TILE_ROWS>
    __device__ __forceinline__ void copy(
        uint32_t to, const device_tensor &from, int row, int head, int seqlen) const {
        using copies = tile_copy<TILE_ROWS, D, THREADS>;
        int again = (int)opaque(thread); /* as in `opaque`, and the loop is that over the steps */
        copies::start(to, copies::source(from.row(batch, row, head), from.seq_stride, again), from.seq_stride,
            seqlen - row, a.head_dim, again);
    }

    __device__ __forceinline__ void copy_step(const step &s, int stage) {
        copy<ROWS>(shared + Q_OFFSET + stage * QUERIES_BYTES, a.q, s.row, s.head, a.seqlen_q);
        copy<ROWS>(shared + D_O_OFFSET + stage * QUERIES_BYTES, a.d_o, s.row, s.head, a.seqlen_q);
        /* a chunk a thread: first lse, then D */
        unsigned which = threadIdx.x / (ROWS / 4), first = threadIdx.x % (ROWS / 4) * 4;
        if (which < 2) {
            const float *from = a.statistics_of(batch * a.heads + s.head) + s.row;
            copy_async(shared + STATISTICS_OFFSET + stage * STATISTICS_BYTES + threadIdx.x * CHUNK_BYTES,
                from + (which * a.padded_rows + first), true);
        }
        copy_commit();
    }

    /* ---- products ---- */

    /* out (keys, queries) += rows of K or V times rows of Q or dO; between the products of depth k, meanwhile(k). */
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply_over_columns(
        float (&out)[M][S_N][4], uint32_t keys, uint32_t queries, Meanwhile meanwhile) {
        uint32_t keys_lane = tile::lane_offset(DOWN_FIRST), queries_lane = tile::lane_offset(ACROSS_FIRST);
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
    template <typename Fragment, typename Meanwhile>
    __device__ __forceinline__ void multiply_own(float (&sums)[M][D_N][4], const Fragment (&own)[M][S_N],
        uint32_t tile_of_queries, Meanwhile meanwhile) {
        multiply_over_queries(sums, tile_of_queries + query_warp * WARP_QUERIES * tile::ROW_BYTES,
            [&](uint32_t(&left)[M][4], int k) {
                meanwhile(k);
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        left[m][i] = own[m][2 * k + i / 2].rounded(i % 2);
                    }
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

    /* out (queries, columns) = dS (queries, keys) K of a row block */
    __device__ __forceinline__ void multiply_over_keys(float (&out)[DQ_M][2 * DQ_SQUARES][4], uint32_t d_s) {
        uint32_t weights_lane = weight_tile::lane_offset(ACROSS_FIRST),
                 keys_lane = tile::lane_offset(DOWN_FIRST);
        clear(out);
        multiply<TYPE, COLUMNS / 16>(
            out,
            [&](uint32_t(&left)[DQ_M][4], int k) {
#pragma unroll
                for (int m = 0; m < DQ_M; m++) {
                    int square = dq_row_warp * DQ_M + m, part = square / (PART_ROWS / 16);
                    ldmatrix_transposed(
                        left[m], d_s + part * WEIGHTS_BYTES +
                                     weight_tile::square(weights_lane, 16 * k, square % (PART_ROWS / 16)));
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
    __device__ __forceinline__ void exponentiate(
        probability (&p)[M][S_N], const float (&s)[M][S_N][4], int n, uint32_t lse) {
        float scale_log2 = a.scale * LOG2_E;
        float2 pair = load_shared_pair(lse + (8 * n + lane % 4 * 2) * (uint32_t)sizeof(float));
#pragma unroll
        for (int m = 0; m < M; m++) {
            p[m][n].set(exp2_fast(s[m][n][0] * scale_log2 - pair.x),
                exp2_fast(s[m][n][1] * scale_log2 - pair.y), exp2_fast(s[m][n][2] * scale_log2 - pair.x),
                exp2_fast(s[m][n][3] * scale_log2 - pair.y));
        }
    }

    /* What dP^T begins with: -D, so that dP^T - D costs nothing, where registers allow it; else 0 */
    static constexpr bool SUBTRACTED_FIRST = QUERY_WARPS > 1;
    __device__ __forceinline__ void begin_gradients(float (&dp)[M][S_N][4], uint32_t row_sums) {
        clear(dp);
#pragma unroll
        for (int n = 0; SUBTRACTED_FIRST && n < S_N; n++) {
            float2 pair = load_shared_pair(row_sums + (8 * n + lane % 4 * 2) * (uint32_t)sizeof(float));
#pragma unroll
            for (int m = 0; m < M; m++) {
                dp[m][n][0] = dp[m][n][2] = -pair.x;
                dp[m][n][1] = dp[m][n][3] = -pair.y;
            }
        }
    }

    /* dS^T = P^T o (dP^T - D) in fragment column n */
    __device__ __forceinline__ void differentiate(rounded_fragment<TYPE> (&ds)[M][S_N],
        const float (&dp)[M][S_N][4], const probability (&p)[M][S_N], int n, uint32_t row_sums) {
        float2 pair = make_float2(0, 0);
        if constexpr (!SUBTRACTED_FIRST) {
            pair = load_shared_pair(row_sums + (8 * n + lane % 4 * 2) * (uint32_t)sizeof(float));
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            float2 first = p[m][n].floats(0), second = p[m][n].floats(1);
            ds[m][n].set(first.x * (dp[m][n][0] - pair.x), first.y * (dp[m][n][1] - pair.y),
                second.x * (dp[m][n][2] - pair.x), second.y * (dp[m][n][3] - pair.y));
        }
    }

    /* This warp's fragment column n of P^T or dS^T to its place. */
    template <typename Fragment>
    __device__ __forceinline__ void store_weights(uint32_t to, const Fragment (&weights)[M][S_N], int n) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int key = key_warp * WARP_KEYS + 16 * m + 8 * half + lane / 4;
                store_shared(to + weight_tile::offset(key, query_warp * S_N + n) + lane % 4 * 4,
                    weights[m][n].rounded(half));
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

    /* Every query warp has stored its P^T and dS^T. (A named barrier among those of the same keys would do, but is not faster,
       and compute-sanitizer does not understand it.) */
    __device__ __forceinline__ static void wait_for_others() {
        if constexpr (QUERY_WARPS > 1) {
            __syncthreads();
        }
    }

    /* A part of the step at `row`: adds to dK and dV, and leaves dS^T at d_s. */
    __device__ __forceinline__ void step_keys(int row, int part, int stage, uint32_t d_s) {
        int first_query = row + part * PART_ROWS;
        uint32_t part_offset = part * PART_ROWS * tile::ROW_BYTES;
        uint32_t q = shared + Q_OFFSET + stage * QUERIES_BYTES + part_offset,
                 d_o = shared + D_O_OFFSET + stage * QUERIES_BYTES + part_offset;
        uint32_t statistics = shared + STATISTICS_OFFSET + stage * STATISTICS_BYTES +
                              (part * PART_ROWS + query_warp * WARP_QUERIES) * (uint32_t)sizeof(float);
        uint32_t keys_offset = key_warp * WARP_KEYS * tile::ROW_BYTES,
                 queries_offset = query_warp * WARP_QUERIES * tile::ROW_BYTES;
        int warp_key = first_key + key_warp * WARP_KEYS, warp_query = first_query + query_warp * WARP_QUERIES;
        int diagonal = a.seqlen_k - a.seqlen_q;
        float s[M][S_N][4], dp[M][S_N][4];
        probability p[M][S_N];
        rounded_fragment<TYPE> ds[M][S_N];
        if (a.causal && first_query + PART_ROWS - 1 + diagonal < warp_key) {
            part_of_columns(0, 1, [&](int n) { /* these keys are seen by no query of the part */
#pragma unroll
                for (int m = 0; m < M; m++) {
                    ds[m][n].set(0, 0, 0, 0);
                }
                store_weights(d_s, ds, n);
            });
            wait_for_others();
            return;
        }
        clear(s);
        multiply_over_columns(s, shared + K_OFFSET + keys_offset, q + queries_offset, [](int) {});
        if ((a.causal && warp_query + diagonal < warp_key + WARP_KEYS - 1) ||
            warp_key + WARP_KEYS > a.seqlen_k) {
            mask(s, warp_key, warp_query);
        }
        begin_gradients(dp, statistics + ROW_SUMS_OFFSET);
        multiply_over_columns(dp, shared + V_OFFSET + keys_offset, d_o + queries_offset, [&](int k) {
            part_of_columns(k, D / 16, [&](int n) {
                exponentiate(p, s, n, statistics);
                if constexpr (QUERY_WARPS > 1) {
                    store_weights(shared + P_OFFSET, p, n);
                }
            });
        });
        multiply_own(dv, p, d_o, [&](int k) {
            part_of_columns(k, WARP_QUERIES / 16, [&](int n) {
                differentiate(ds, dp, p, n, statistics + ROW_SUMS_OFFSET);
                store_weights(d_s, ds, n);
            });
        });
        multiply_own(dk, ds, q, [](int) {});
        wait_for_others();
#pragma unroll
        for (int i = 1; i < QUERY_WARPS; i++) {
            int other = (query_warp + i) % QUERY_WARPS;
            multiply_others(dv, shared + P_OFFSET, d_o, other);
            multiply_others(dk, d_s, q, other);
        }
    }

    /* Adds to dQ's sums of a row block; deterministic, its thread block's first block of keys begins them. */
    __device__ __forceinline__ void step_dq(const step &s, uint32_t d_s) {
        float out[DQ_M][2 * DQ_SQUARES][4];
        multiply_over_keys(out, d_s);
        bool begin = a.deterministic && first_key < a.order.blocks * COLUMNS;
        int split = a.deterministic ? a.split_of(first_key / COLUMNS) : 0;
        float *sums = a.dq_sums_of<D>(split, batch * a.heads + s.head, s.row);
#pragma unroll
        for (int m = 0; m < DQ_M; m++) {
#pragma unroll
            for (int n = 0; n < 2 * DQ_SQUARES; n++) {
                int fragment = (dq_row_warp * DQ_M + m) * (D / 8) + dq_column_warp * 2 * DQ_SQUARES + n;
                if (has_dq_square(n / 2) && begin) {
                    store_fragment(sums + fragment * FRAGMENT_FLOATS, out[m][n]);
                } else if (has_dq_square(n / 2)) {
                    add_fragment(sums + fragment * FRAGMENT_FLOATS, out[m][n]);
                }
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

    /* One block of keys, from first_key on. */
    __device__ __forceinline__ void run() {
        int left = a.group * ((last_row() - first_row()) / ROWS + 1) - 1; /* after this step */
        step now = {kv_head * a.group, first_row()};
        bool first = true;
        clear(dk);
        clear(dv);
        copy<COLUMNS>(shared + K_OFFSET, a.k, first_key, kv_head, a.seqlen_k);
        copy<COLUMNS>(shared + V_OFFSET, a.v, first_key, kv_head, a.seqlen_k);
        wait_for_previous(); /* up to here this overlaps with what `prepare` does */
        launch_next();
        copy_step(now, left % STAGES);
        for (; left >= 0; left--) {
            if (STAGES == 1 && !first) {
                __syncthreads();
                copy_step(now, 0);
            }
            copy_wait<0>();
            __syncthreads();
            if (STAGES == 2 && left > 0) {
                copy_step(after(now), (left + 1) % STAGES);
            }
#pragma unroll 1
            for (int part = 0; part < PARTS; part++) {
                step_keys(now.row, part, left % STAGES,
                    shared + D_S_OFFSET + (left % 2 * PARTS + part) * WEIGHTS_BYTES);
            }
            if (!first) {
                step_dq(before(now), shared + D_S_OFFSET + (left + 1) % 2 * PARTS * WEIGHTS_BYTES);
            }
            now = after(now);
            first = false;
        }
        __syncthreads();
        step_dq(before(now), shared + D_S_OFFSET);
        __syncthreads();
        kv_head = before(now).head / a.group; /* as it was: it has not been kept meanwhile */
        store_sums(shared + K_OFFSET, dk, a.scale);
        store_sums(shared + V_OFFSET, dv, 1);
        __syncthreads();
        store_tile<COLUMNS, D, THREADS>(a.dk.row(batch, first_key, kv_head), a.dk.seq_stride,
            shared + K_OFFSET, a.seqlen_k - first_key, a.head_dim, thread);
        store_tile<COLUMNS, D, THREADS>(a.dv.row(batch, first_key, kv_head), a.dv.seq_stride,
            shared + V_OFFSET, a.seqlen_k - first_key, a.head_dim, thread);
    }
};

template <enum dtype TYPE, int D, int SHARED_KB>
__global__ void __launch_bounds__(backward_block<TYPE, D, SHARED_KB>::THREADS,
    backward_tile_of(D, SHARED_KB).blocks) fa2_backward_main(backward_arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    if constexpr (COMPILED_FOR(SHARED_KB)) {
        using block = backward_block<TYPE, D, SHARED_KB>;
        for (int i = a.first_block(blockIdx.x); i < a.key_blocks;) {
            block b(a, shared_address(shared), i * block::COLUMNS);
            b.run();
            __syncthreads();                                /* before the tiles are filled again */
            i = a.next_block(b.first_key / block::COLUMNS); /* i has not been kept meanwhile */
        }
    }
}

/* ---- the call ---- */

template <enum dtype TYPE, int D, int SHARED_KB> struct backward_pass {
    static enum status call(const struct attention_params *p) {
        using block = backward_block<TYPE, D, SHARED_KB>;
        constexpr bool OVERLAP = SHARED_KB == 227; /* sm_90 and newer */
        backward_arguments a = backward_arguments_of<D>(p, block::ROWS, block::COLUMNS);
        CHECK((prepare_backward<TYPE, D>(p, a)));
        CHECK(launch("fa2 backward", fa2_backward_main<TYPE, D, SHARED_KB>,
            p->batch * p->kv_heads * a.order.blocks, block::THREADS, block::SHARED_BYTES, p->stream, a,
            OVERLAP));
        return finish_backward<TYPE, D>(p, a, OVERLAP);
    }
};

extern "C" enum status fa2_backward(const struct attention *a, const struct attention_params *p) {
    return dispatch<backward_pass>(a, p);
}
