/* FlashAttention-2 backward (Dao 2023, algorithm 2): dQ, dK and dV with P computed again from Q, K and lse.

   prepare   D = rowsum(dO o O) and lse log2(e) of every row; zeroes in dQ's fp32 sums
   main      one thread block for every block of COLUMNS keys of a (batch, key/value head), all its query heads:
             K and V stay in shared memory, dK and dV in registers, row blocks of Q and dO stream through
   finish    dQ = scale * sums, rounded

   main, for each block of ROWS queries; everything about S is transposed, keys down and queries across, so that the
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
#include "attention/fa2.cuh"
#include "attention/fa2_tiles.cuh"

/* ---- memory ---- */

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
__global__ void __launch_bounds__(PREPARE_THREADS) fa2_backward_prepare(backward_arguments a) {
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
    const uint32_t lane_of_tile = tile::lane_offset(), lane_of_weights = weight_tile::lane_offset();

    float dk[M][D_N][4], dv[M][D_N][4];

    __device__ __forceinline__ backward_block(const backward_arguments &arguments, uint32_t shared_memory)
        : a(arguments), shared(shared_memory) {
    }

    /* Where a step is: the row block of a query head. */
    struct step {
        int index; /* batch * heads + head */
        int row;   /* its first */
    };

    /* ---- copies ---- */

    __device__ __forceinline__ void copy_keys(int batch, int kv_head, int first_key) {
        copy_tile<COLUMNS, D, THREADS>(shared + K_OFFSET, a.k.row(batch, first_key, kv_head), a.k.seq_stride,
            a.seqlen_k - first_key, a.head_dim);
        copy_tile<COLUMNS, D, THREADS>(shared + V_OFFSET, a.v.row(batch, first_key, kv_head), a.v.seq_stride,
            a.seqlen_k - first_key, a.head_dim);
    }

    __device__ __forceinline__ void copy_queries(const step &s, int stage) {
        int batch = s.index / a.heads, head = s.index % a.heads;
        copy_tile<ROWS, D, THREADS>(shared + Q_OFFSET + stage * QUERIES_BYTES, a.q.row(batch, s.row, head),
            a.q.seq_stride, a.seqlen_q - s.row, a.head_dim);
        copy_tile<ROWS, D, THREADS>(shared + D_O_OFFSET + stage * QUERIES_BYTES,
            a.d_o.row(batch, s.row, head), a.d_o.seq_stride, a.seqlen_q - s.row, a.head_dim);
        /* four statistics a thread: first lse, then D */
        int which = (int)threadIdx.x / (ROWS / 4), first = (int)threadIdx.x % (ROWS / 4) * 4;
        if (which < 2) {
            copy_async(shared + STATISTICS_OFFSET + stage * STATISTICS_BYTES + threadIdx.x * CHUNK_BYTES,
                a.statistics_of(s.index) + which * a.padded_rows + s.row + first, true);
        }
        copy_commit();
    }

    /* ---- products ---- */

    /* out (keys, queries) = rows of K or V times rows of Q or dO */
    __device__ __forceinline__ void multiply_over_columns(
        float (&out)[M][S_N][4], uint32_t keys, uint32_t queries) {
        clear(out);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t left[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
                ldmatrix(left[m], keys + tile::square(lane_of_tile, 16 * m, k));
            }
#pragma unroll
            for (int n = 0; n < S_N / 2; n++) {
                uint32_t right[4];
                ldmatrix(right, queries + tile::square(lane_of_tile, 16 * n, k));
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma<TYPE>(out[m][2 * n], left[m], right[0], right[2]);
                    mma<TYPE>(out[m][2 * n + 1], left[m], right[1], right[3]);
                }
            }
        }
    }

    /* sums (keys, columns) += weights^T (keys, queries) times rows of Q or dO. The weights are this warp's own fragments,
       or with several query warps what all of them stored. */
    __device__ __forceinline__ void multiply_over_queries(
        float (&sums)[M][D_N][4], const float (&own)[M][S_N][4], uint32_t stored, uint32_t queries) {
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++) {
            uint32_t left[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
                if constexpr (QUERY_WARPS == 1) {
                    pack_fragment<TYPE>(left[m], own[m][2 * k], own[m][2 * k + 1]);
                } else {
                    ldmatrix(left[m], stored + weight_tile::square(lane_of_weights, 16 * m, k));
                }
            }
#pragma unroll
            for (int n = 0; n < D_N / 2; n++) {
                uint32_t right[4];
                ldmatrix_transposed(
                    right, queries + tile::square(lane_of_tile, 16 * k, query_warp * (D_N / 2) + n));
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma<TYPE>(sums[m][2 * n], left[m], right[0], right[1]);
                    mma<TYPE>(sums[m][2 * n + 1], left[m], right[2], right[3]);
                }
            }
        }
    }

    /* Whether this warp has square n of dQ. */
    __device__ __forceinline__ bool has_dq_square(int n) const {
        return D / 16 % DQ_COLUMN_WARPS == 0 || dq_column_warp * DQ_SQUARES + n < D / 16;
    }

    /* out (queries, columns) = dS (queries, keys) K */
    __device__ __forceinline__ void multiply_over_keys(float (&out)[DQ_M][2 * DQ_SQUARES][4], uint32_t d_s) {
        clear(out);
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++) {
            uint32_t left[DQ_M][4];
#pragma unroll
            for (int m = 0; m < DQ_M; m++) {
                uint32_t r[4];
                ldmatrix_transposed(
                    r, d_s + weight_tile::square(lane_of_weights, 16 * k, dq_row_warp * DQ_M + m));
                left[m][0] = r[0], left[m][1] = r[2], left[m][2] = r[1], left[m][3] = r[3];
            }
#pragma unroll
            for (int n = 0; n < DQ_SQUARES; n++) {
                if (has_dq_square(n)) {
                    uint32_t right[4];
                    ldmatrix_transposed(
                        right, shared + K_OFFSET +
                                   tile::square(lane_of_tile, 16 * k, dq_column_warp * DQ_SQUARES + n));
#pragma unroll
                    for (int m = 0; m < DQ_M; m++) {
                        mma<TYPE>(out[m][2 * n], left[m], right[0], right[1]);
                        mma<TYPE>(out[m][2 * n + 1], left[m], right[2], right[3]);
                    }
                }
            }
        }
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

    /* P^T = 2^(S^T scale_log2 - lse) */
    __device__ __forceinline__ void exponentiate(float (&s)[M][S_N][4], uint32_t lse) {
        float scale_log2 = a.scale * LOG2_E;
#pragma unroll
        for (int n = 0; n < S_N; n++) {
            float2 pair = load_shared_pair(lse + (8 * n + lane % 4 * 2) * (uint32_t)sizeof(float));
#pragma unroll
            for (int m = 0; m < M; m++) {
                s[m][n][0] = exp2_fast(s[m][n][0] * scale_log2 - pair.x);
                s[m][n][1] = exp2_fast(s[m][n][1] * scale_log2 - pair.y);
                s[m][n][2] = exp2_fast(s[m][n][2] * scale_log2 - pair.x);
                s[m][n][3] = exp2_fast(s[m][n][3] * scale_log2 - pair.y);
            }
        }
    }

    /* dS^T = P^T o (dP^T - D), in place of dP^T */
    __device__ __forceinline__ void differentiate(
        float (&dp)[M][S_N][4], const float (&p)[M][S_N][4], uint32_t row_sums) {
#pragma unroll
        for (int n = 0; n < S_N; n++) {
            float2 pair = load_shared_pair(row_sums + (8 * n + lane % 4 * 2) * (uint32_t)sizeof(float));
#pragma unroll
            for (int m = 0; m < M; m++) {
                dp[m][n][0] = p[m][n][0] * (dp[m][n][0] - pair.x);
                dp[m][n][1] = p[m][n][1] * (dp[m][n][1] - pair.y);
                dp[m][n][2] = p[m][n][2] * (dp[m][n][2] - pair.x);
                dp[m][n][3] = p[m][n][3] * (dp[m][n][3] - pair.y);
            }
        }
    }

    /* This warp's fragments of P^T or dS^T, rounded, to their places. */
    __device__ __forceinline__ void store_weights(uint32_t to, const float (&weights)[M][S_N][4]) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < S_N; n++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int key = key_warp * WARP_KEYS + 16 * m + 8 * half + lane / 4;
                    store_shared(to + weight_tile::offset(key, query_warp * S_N + n) + lane % 4 * 4,
                        pack<TYPE>(weights[m][n][2 * half], weights[m][n][2 * half + 1]));
                }
            }
        }
    }

    /* Lets the query warps of the same keys see what they stored. */
    __device__ __forceinline__ void meet_query_warps() {
        if constexpr (QUERY_WARPS > 1) {
            barrier(1 + key_warp, QUERY_WARPS * LANES);
        }
    }

    /* ---- a step ---- */

    __device__ __forceinline__ void step_keys(int first_key, int first_query, int stage, uint32_t d_s) {
        uint32_t q = shared + Q_OFFSET + stage * QUERIES_BYTES,
                 d_o = shared + D_O_OFFSET + stage * QUERIES_BYTES;
        uint32_t statistics = shared + STATISTICS_OFFSET + stage * STATISTICS_BYTES +
                              query_warp * WARP_QUERIES * (uint32_t)sizeof(float);
        uint32_t keys_offset = key_warp * WARP_KEYS * tile::ROW_BYTES,
                 queries_offset = query_warp * WARP_QUERIES * tile::ROW_BYTES,
                 weights_offset = key_warp * WARP_KEYS * weight_tile::ROW_BYTES;
        int warp_key = first_key + key_warp * WARP_KEYS, warp_query = first_query + query_warp * WARP_QUERIES;
        int diagonal = a.seqlen_k - a.seqlen_q;
        float p[M][S_N][4], ds[M][S_N][4];
        if (a.causal && first_query + ROWS - 1 + diagonal < warp_key) {
            clear(ds); /* these keys are seen by no query of the row block */
            store_weights(d_s, ds);
            return;
        }
        multiply_over_columns(p, shared + K_OFFSET + keys_offset, q + queries_offset);
        if ((a.causal && warp_query + diagonal < warp_key + WARP_KEYS - 1) ||
            warp_key + WARP_KEYS > a.seqlen_k) {
            mask(p, warp_key, warp_query);
        }
        exponentiate(p, statistics);
        if constexpr (QUERY_WARPS > 1) {
            store_weights(shared + P_OFFSET, p);
        }
        multiply_over_columns(ds, shared + V_OFFSET + keys_offset, d_o + queries_offset);
        meet_query_warps();
        multiply_over_queries(dv, p, shared + P_OFFSET + weights_offset, d_o);
        differentiate(ds, p, statistics + ROWS * (uint32_t)sizeof(float));
        store_weights(d_s, ds);
        meet_query_warps();
        multiply_over_queries(dk, ds, d_s + weights_offset, q);
    }

    /* Adds a row block's part to dQ's sums; key_block is this block's number among those that do. */
    __device__ __forceinline__ void step_dq(const step &s, uint32_t d_s, int key_block) {
        float out[DQ_M][2 * DQ_SQUARES][4];
        multiply_over_keys(out, d_s);
        if (a.ticket != NULL) {
            if (threadIdx.x == 0) {
                wait_for_value(a.turn_of(s.index, s.row), key_block);
            }
            __syncthreads();
        }
        float *sums = a.dq_sums_of<D>(s.index, s.row);
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
                store_release(a.turn_of(s.index, s.row), key_block + 1);
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
        int key_block, kv_index;
        a.order.find(a.ticket == NULL ? blockIdx.x : draw_ticket(a.ticket, shared), &key_block, &kv_index);
        int batch = kv_index / a.kv_heads, kv_head = kv_index % a.kv_heads, group = a.heads / a.kv_heads;
        int first_key = key_block * COLUMNS, diagonal = a.seqlen_k - a.seqlen_q;
        /* the row blocks that see any of these keys, of every head of the group */
        int row_blocks = (a.seqlen_q + ROWS - 1) / ROWS;
        int first_block = a.causal ? max(first_key - diagonal, 0) / ROWS : 0;
        int blocks = row_blocks - first_block, steps = group * blocks;
        int first_index = batch * a.heads + kv_head * group;
        /* From the diagonal down, so that blocks of keys that run together add to different rows. When they wait for
           each other they all begin with the last rows, which all of them see. */
        auto step_at = [&](int t) {
            int i = a.ticket == NULL ? first_block + t % blocks : row_blocks - 1 - t % blocks;
            return step{first_index + t / blocks, i * ROWS};
        };
        clear(dk);
        clear(dv);
        copy_keys(batch, kv_head, first_key);
        copy_queries(step_at(0), 0);
        for (int t = 0; t < steps; t++) {
            if (STAGES == 1 && t > 0) {
                __syncthreads();
                copy_queries(step_at(t), 0);
            }
            copy_wait<0>();
            __syncthreads();
            if (STAGES == 2 && t + 1 < steps) {
                copy_queries(step_at(t + 1), (t + 1) % STAGES);
            }
            uint32_t d_s = shared + D_S_OFFSET + t % 2 * WEIGHTS_BYTES,
                     d_s_before = shared + D_S_OFFSET + (t + 1) % 2 * WEIGHTS_BYTES;
            step_keys(first_key, step_at(t).row, t % STAGES, d_s);
            if (t > 0) {
                step_dq(step_at(t - 1), d_s_before, key_block);
            }
        }
        __syncthreads();
        step_dq(step_at(steps - 1), shared + D_S_OFFSET + (steps - 1) % 2 * WEIGHTS_BYTES, key_block);
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

/* ---- finish ---- */

enum { FINISH_THREADS = 256, FINISH_ROWS = 64 };

/* dQ of FINISH_ROWS rows of a head, from the sums of their fragments. */
template <enum dtype TYPE, int D>
__global__ void __launch_bounds__(FINISH_THREADS) fa2_backward_finish(backward_arguments a) {
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

/* ---- the call ---- */

template <enum dtype TYPE, int D, int SHARED_KB> struct backward_pass {
    using block = backward_block<TYPE, D, SHARED_KB>;

    static backward_arguments arguments(const struct attention_params *p) {
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
        a.order = order_blocks(ceil_div(p->seqlen_k, block::COLUMNS), p->batch * p->kv_heads,
            p->heads / p->kv_heads * p->seqlen_q * D * 8);
        return a;
    }

    static enum status call(const struct attention_params *p) {
        backward_arguments a = arguments(p);
        int64_t heads = p->batch * p->heads, key_blocks = p->batch * p->kv_heads * a.order.blocks;
        CHECK(launch("fa2 backward prepare", fa2_backward_prepare<TYPE, D>,
            heads * (a.padded_rows / PREPARE_ROWS), PREPARE_THREADS, 0, p->stream, a));
        CHECK(launch("fa2 backward", fa2_backward_main<TYPE, D, SHARED_KB>, key_blocks, block::THREADS,
            block::SHARED_BYTES, p->stream, a));
        return launch("fa2 backward finish", fa2_backward_finish<TYPE, D>,
            heads * (a.padded_rows / FINISH_ROWS), FINISH_THREADS, FINISH_ROWS * block::tile::ROW_BYTES,
            p->stream, a);
    }
};

extern "C" enum status fa2_backward(const struct attention *a, const struct attention_params *p) {
    return dispatch<backward_pass>(a, p);
}
