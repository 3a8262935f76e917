/* FlashAttention backward for Hopper: the algorithm of fa2_backward.cu with Hopper's instructions.

   grid      one thread block for every block of KEYS keys of a (batch, key/value head), with all its query heads: K and V
             stay in shared memory, dK and dV in registers, row blocks of Q and dO stream through, the last one first.
             backward.cuh has the passes before and after
   block     a warpgroup of which one thread starts copies and two add dQ, and 2 warpgroups with 64 keys each
   shared    K, V; Q, dO, lse and D of STAGES row blocks; dS^T of two; dQ of one, fp32

   For each block of ROWS queries; everything about S is transposed, keys down and queries across, so that the
   accumulators of one product are the A operand of the next:
       S^T = K Q^T        P^T = 2^(S^T c - lse log2(e)), c = scale log2(e)
       dP^T = V dO^T      dS^T = P^T o (dP^T - D)  -> shared memory
       dV += P^T dO       dK += dS^T Q             (times scale at the end)
       dQ = dS K          -> shared memory -> added to fp32 sums in memory by a bulk reduction
   dQ needs all keys: the two warpgroups meet once a step, and each computes half of its rows (ROWS 128) or of its columns.
   What takes long without using the tensor cores is begun early, under products: loads of lse and D, and the fence between
   a stored dQ and the thread that adds it, which comes in the next step.

   The first block of keys at a row block stores instead of adding, which saves a pass that clears; a counter says to the others
   that it has.

   Deterministic: blocks of keys add to a row block in order, each after a counter says that the one before has. All start
   with the last row block, so that they follow each other at the distance of one addition, and take their places in the
   order in which they start, so that nobody waits for one that has not. The last one rounds the sum, which saves the pass
   after, where no thread block has so many rows to finish that the others would wait for it. Short sequences have order
   unasked, for that pass.

   FLOPs: 10 seqlen_q seqlen_k D a head, half of it when causal: 5 products. */
#include "attention/backward.cuh"
#include "attention/fa3.cuh"

/* ---- shapes ---- */

struct fa3_backward_arguments {
    tensor_map q, k, v, d_o, dq, dk, dv;
    backward_arguments common;
    /* in order: the last block of keys of a row block writes dQ, and no backward_finish does */
    bool finishing;
};

template <int D> struct fa3_backward_shape {
    static constexpr int KEYS = 128, ROWS = D <= 80 ? 128 : 64, STAGES = 2, GROUPS = 2;
    static constexpr int THREADS = WARPGROUP * (GROUPS + 1);
    using key_tile = panel_tile<KEYS, D>;           /* K, V */
    using row_tile = panel_tile<ROWS, D>;           /* Q, dO */
    using weight_tile = panel_tile<KEYS, ROWS>;     /* dS^T */
    static constexpr bool SPLIT_ROWS = ROWS == 128; /* of dQ, between the warpgroups; else its columns */
    static constexpr int DQ_COLUMNS = SPLIT_ROWS ? D : D / 2, DQ_BYTES = ROWS * D * (int)sizeof(float);
    /* What there are registers for. Fragments of dS^T that are from P^T in 16 bits: the others are from P^T as it was. */
    static constexpr int ROUNDED = D == 80 ? ROWS / 8 : D == 64 ? 2 : 0;
    /* Fragments whose lse and D are loaded before the products are waited for that they are combined with. */
    static constexpr int EARLY_LSE = 8, EARLY_D = D == 128 ? 8 : 4;
    /* Threads that add dQ, in turn: an addition may take longer than a step. */
    static constexpr int ADDING = 2;
    static constexpr int STATISTICS_BYTES = ROWS * (int)sizeof(float);

    static constexpr int K_OFFSET = 0, V_OFFSET = K_OFFSET + key_tile::BYTES,
                         Q_OFFSET = V_OFFSET + key_tile::BYTES,
                         D_O_OFFSET = Q_OFFSET + STAGES * row_tile::BYTES,
                         D_S_OFFSET = D_O_OFFSET + STAGES * row_tile::BYTES,
                         DQ_OFFSET = D_S_OFFSET + 2 * weight_tile::BYTES, LSE_OFFSET = DQ_OFFSET + DQ_BYTES,
                         D_OFFSET = LSE_OFFSET + STAGES * STATISTICS_BYTES,
                         BARRIERS_OFFSET = D_OFFSET + STAGES * STATISTICS_BYTES;
    /* of arrival barriers */
    static constexpr int K_FULL = 0, V_FULL = 1, Q_FULL = 2, Q_EMPTY = Q_FULL + STAGES,
                         D_O_FULL = Q_EMPTY + STAGES, D_O_EMPTY = D_O_FULL + STAGES,
                         DQ_FULL = D_O_EMPTY + STAGES, DQ_EMPTY = DQ_FULL + ADDING, BARRIERS = DQ_EMPTY + 1;
    static constexpr int PLACE_OFFSET = BARRIERS_OFFSET + 8 * BARRIERS; /* of the thread block in the grid */
    static constexpr int SHARED_BYTES = PLACE_OFFSET + 8;
    static_assert(SHARED_BYTES <= 227 * 1024, "more shared memory than there is");
    static __device__ __forceinline__ uint32_t barrier(uint32_t shared, int which) {
        return shared + BARRIERS_OFFSET + 8 * which;
    }
    static constexpr int COPY_REGISTERS = 24, REGISTERS = 240;
    static_assert(COPY_REGISTERS + GROUPS * REGISTERS <= (GROUPS + 1) * registers_at_start(THREADS),
        "more registers than there are");
    static constexpr int TOGETHER = 1; /* named barrier of both warpgroups */
};

/* One row block of one query head. */
struct fa3_backward_step {
    int step, row, head; /* step: how many there were before */
};

/* What a thread block works on. */
template <int D> struct fa3_backward_place {
    using shape = fa3_backward_shape<D>;
    int batch, kv_head, group, key_block;
    int lowest_row, last_row; /* blocks that see any key */

    __device__ __forceinline__ fa3_backward_place(const backward_arguments &a, unsigned index) {
        int batch_head;
        a.order.find(index, &key_block, &batch_head);
        batch = batch_head / a.kv_heads, kv_head = batch_head % a.kv_heads;
        group = a.heads / a.kv_heads;
        bool all = !a.causal || key_block == 0; /* dQ of rows that see nothing is written too */
        int first_query = all ? 0 : max(first_key() - (a.seqlen_k - a.seqlen_q), 0);
        lowest_row = first_query / shape::ROWS * shape::ROWS;
        last_row = (a.seqlen_q - 1) / shape::ROWS * shape::ROWS;
    }

    __device__ __forceinline__ int first_key() const {
        return key_block * shape::KEYS;
    }

    __device__ __forceinline__ fa3_backward_step first_step() const {
        return {0, last_row, kv_head * group};
    }
    /* Row blocks from the last down, for each all query heads. */
    __device__ __forceinline__ void advance(fa3_backward_step &at) const {
        at.step++;
        if (++at.head == (kv_head + 1) * group) {
            at.head = kv_head * group, at.row -= shape::ROWS;
        }
    }
    __device__ __forceinline__ bool is_over(const fa3_backward_step &at) const {
        return at.row < lowest_row;
    }

    /* Whether this block of keys finishes dQ of a row block: the last one that it sees, where that is to do it. */
    __device__ __forceinline__ bool finishes(const fa3_backward_arguments &a, int row) const {
        const backward_arguments &c = a.common;
        int last_key = c.causal ? max(row + shape::ROWS - 1 + c.seqlen_k - c.seqlen_q, 0) : c.seqlen_k - 1;
        return a.finishing && key_block == min(last_key / shape::KEYS, c.key_blocks - 1);
    }
};

/* ---- the threads that copy ---- */

template <int D> struct fa3_backward_copies {
    using shape = fa3_backward_shape<D>;
    using key_tile = typename shape::key_tile;
    using row_tile = typename shape::row_tile;
    const fa3_backward_arguments &a;
    const fa3_backward_place<D> &place;
    uint32_t shared;

    __device__ __forceinline__ void load_keys(const tensor_map &map, int offset, int full) {
        arrive_expecting(shape::barrier(shared, full), key_tile::BYTES);
        load_tile<key_tile>(shared + offset, map, shape::barrier(shared, full), place.first_key(),
            place.kv_head, place.batch);
    }

    __device__ __forceinline__ void load_rows(const tensor_map &map, int offset, const float *statistics,
        int statistics_offset, int full, int empty, const fa3_backward_step &at) {
        int stage = at.step % shape::STAGES;
        uint32_t arrival = shape::barrier(shared, full + stage);
        arrival_wait(shape::barrier(shared, empty + stage), at.step / shape::STAGES % 2 ^ 1);
        arrive_expecting(arrival, row_tile::BYTES + shape::STATISTICS_BYTES);
        load_tile<row_tile>(
            shared + offset + stage * row_tile::BYTES, map, arrival, at.row, at.head, place.batch);
        bulk_load(shared + statistics_offset + stage * shape::STATISTICS_BYTES, statistics + at.row, arrival,
            shape::STATISTICS_BYTES);
    }

    __device__ __forceinline__ void run() {
        for (fa3_backward_step at = place.first_step(); !place.is_over(at); place.advance(at)) {
            const float *statistics = a.common.statistics_of(place.batch * a.common.heads + at.head);
            if (at.step == 0) {
                load_keys(a.k, shape::K_OFFSET, shape::K_FULL);
            }
            load_rows(a.q, shape::Q_OFFSET, statistics, shape::LSE_OFFSET, shape::Q_FULL, shape::Q_EMPTY, at);
            if (at.step == 0) {
                load_keys(a.v, shape::V_OFFSET, shape::V_FULL);
            }
            load_rows(a.d_o, shape::D_O_OFFSET, statistics + a.common.padded_rows, shape::D_OFFSET,
                shape::D_O_FULL, shape::D_O_EMPTY, at);
        }
    }
};

/* Blocks of keys that have added to dQ of a row block. Before these counters there is one of thread blocks started. */
template <int D>
__device__ __forceinline__ int *fa3_counter(const fa3_backward_arguments &a, int index, int row) {
    constexpr int ROWS = fa3_backward_shape<D>::ROWS;
    return a.common.counters + 1 + (int64_t)index * (a.common.padded_rows / ROWS) + row / ROWS;
}

/* Added to the counter of a row block when its sums are begun, where there is no order; above all counts. */
enum { BEGUN = 1 << 30 };

/* A thread that adds dQ, of every ADDING-th step. */
template <int D> struct fa3_backward_additions {
    using shape = fa3_backward_shape<D>;
    const fa3_backward_arguments &a;
    const fa3_backward_place<D> &place;
    uint32_t shared;

    /* Without order whoever is there first begins the sums of a row block, and the others wait until it has: it has what it
       stores. Whether this one is the first. */
    static __device__ __forceinline__ bool is_first(int *counter) {
        int count = take_count(counter);
        bool first = count == 0;
        while (!first && count < BEGUN) {
            count = load_count(counter);
        }
        fence_async_memory();
        return first;
    }

    /* Before dQ is there: waits for the turn at a row block; without order, looks whether its sums are begun, as they are most
       often, so that nothing is left to find out. Whether so. */
    __device__ __forceinline__ bool is_ready(int *counter) const {
        bool ready = true;
        if (a.common.deterministic) {
            wait_for_count(counter, place.key_block);
        } else {
            ready = load_count(counter) >= BEGUN;
        }
        fence_async_memory();
        return ready;
    }

    __device__ __forceinline__ void run(int which) {
        bool ordered = a.common.deterministic;
        for (fa3_backward_step at = place.first_step(); !place.is_over(at); place.advance(at)) {
            if (at.step % shape::ADDING != which || place.finishes(a, at.row)) {
                continue;
            }
            int index = place.batch * a.common.heads + at.head;
            int *counter = fa3_counter<D>(a, index, at.row);
            float *sums = a.common.template dq_sums_of<D>(0, index, at.row);
            bool ready = is_ready(counter);
            arrival_wait(shape::barrier(shared, shape::DQ_FULL + which), at.step / shape::ADDING % 2);
            bool first = ready ? ordered && place.key_block == 0 : is_first(counter);
            if (first) {
                bulk_store(sums, shared + shape::DQ_OFFSET, shape::DQ_BYTES);
            } else {
                bulk_add(sums, shared + shape::DQ_OFFSET, shape::DQ_BYTES);
            }
            bulk_commit();
            bulk_wait_read<0>();
            arrive(shape::barrier(shared, shape::DQ_EMPTY));
            if (ordered || first) {
                bulk_wait<0>();
                count_up(counter, ordered ? 1 : BEGUN);
            }
        }
        bulk_wait<0>();
        if (a.common.ended != nullptr) {
            count_up(a.common.ended + place.batch * a.common.kv_heads + place.kv_head);
        }
    }
};

/* ---- a warpgroup that computes ---- */

template <enum dtype TYPE, int D> struct fa3_backward_group {
    using shape = fa3_backward_shape<D>;
    using key_tile = typename shape::key_tile;
    using row_tile = typename shape::row_tile;
    using weight_tile = typename shape::weight_tile;
    static constexpr int S_N = shape::ROWS / 8, D_N = D / 8, DQ_N = shape::DQ_COLUMNS / 8,
                         ROWS_K = shape::ROWS / 16;

    const fa3_backward_arguments &a;
    const fa3_backward_place<D> &place;
    uint32_t shared;
    int group, warp, lane; /* warp: of the group */
    int handed_over = 0;   /* row blocks of dQ, to the threads that add */

    float dk[D_N][4], dv[D_N][4];

    __device__ __forceinline__ fa3_backward_group(const fa3_backward_arguments &arguments,
        const fa3_backward_place<D> &place_of_block, uint32_t shared_memory, int group_index)
        : a(arguments), place(place_of_block), shared(shared_memory), group(group_index),
          warp((int)uniform_warp_index() % 4), lane(lane_index()) {
    }

    __device__ __forceinline__ void leave(int barrier) {
        __syncwarp();
        if (lane == 0) {
            arrive(shape::barrier(shared, barrier));
        }
    }

    /* lse or D of the queries that this thread has in a fragment of S^T, and in the first of them */
    __device__ __forceinline__ float2 load_statistic(uint32_t statistics, int n) {
        return load_shared_pair(statistics + (8 * n + lane % 4 * 2) * sizeof(float));
    }
    template <int COUNT>
    __device__ __forceinline__ void load_statistics(float2 (&to)[COUNT], uint32_t statistics) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            to[n] = load_statistic(statistics, n);
        }
    }

    /* P^T in place of S^T, and in 16 bits */
    __device__ __forceinline__ void exponentiate(uint32_t (&p_weights)[ROWS_K][4], float (&s)[S_N][4],
        const float2 (&early_lse)[shape::EARLY_LSE], uint32_t lse) {
        float scale_log2 = a.common.scale * LOG2_E;
#pragma unroll
        for (int n = 0; n < S_N; n++) {
            float2 shift = n < shape::EARLY_LSE ? early_lse[n % shape::EARLY_LSE] : load_statistic(lse, n);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[n][i] = exp2_fast(s[n][i] * scale_log2 - (i % 2 == 0 ? shift.x : shift.y));
            }
            if (n % 2 == 1) {
                pack_fragment<TYPE>(p_weights[n / 2], s[n - 1], s[n]);
            }
        }
    }

    /* S = -infinity where a query does not see a key; P of rows past the end is 0 by their lse. */
    __device__ __forceinline__ void mask(float (&s)[S_N][4], int row) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = place.first_key() + 64 * group + 16 * warp + lane / 4 + i / 2 * 8;
            int first_row = key - (a.common.seqlen_k - a.common.seqlen_q); /* that sees it */
            if (!a.common.causal) {
                first_row = key < a.common.seqlen_k ? 0 : INT32_MAX;
            }
            int limit = first_row - row - (lane % 4 * 2 + i % 2);
#pragma unroll
            for (int n = 0; n < S_N; n++) {
                s[n][i] = 8 * n >= limit ? s[n][i] : -INFINITY;
            }
        }
    }

    /* dS^T in 16 bits, from P^T and dP^T */
    __device__ __forceinline__ void differentiate(uint32_t (&d_s_weights)[ROWS_K][4], float (&dp)[S_N][4],
        const float (&p)[S_N][4], const uint32_t (&p_weights)[ROWS_K][4],
        const float2 (&early_d)[shape::EARLY_D], uint32_t statistics) {
#pragma unroll
        for (int n = 0; n < S_N; n++) {
            float2 d = n < shape::EARLY_D ? early_d[n % shape::EARLY_D] : load_statistic(statistics, n);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float2 pair = n < shape::ROUNDED ? unpack<TYPE>(p_weights[n / 2][n % 2 * 2 + half])
                                                 : make_float2(p[n][2 * half], p[n][2 * half + 1]);
                dp[n][2 * half] = pair.x * (dp[n][2 * half] - d.x);
                dp[n][2 * half + 1] = pair.y * (dp[n][2 * half + 1] - d.y);
            }
            if (n % 2 == 1) {
                pack_fragment<TYPE>(d_s_weights[n / 2], dp[n - 1], dp[n]);
            }
        }
    }

    /* Two fragments side by side to 16 rows x 16 columns of shared memory */
    static __device__ __forceinline__ void store_scaled(
        uint32_t address, const float (&left)[4], const float (&right)[4], float factor) {
        const float scaled[2][4] = {{left[0] * factor, left[1] * factor, left[2] * factor, left[3] * factor},
            {right[0] * factor, right[1] * factor, right[2] * factor, right[3] * factor}};
        uint32_t square[4];
        pack_fragment<TYPE>(square, scaled[0], scaled[1]);
        store_matrices(address, square);
    }

    /* where this group's part of dQ begins: its fragments (16 rows of the tile, 8 columns) */
    __device__ __forceinline__ int dq_row() const {
        return shape::SPLIT_ROWS ? 4 * group + warp : warp;
    }
    __device__ __forceinline__ int dq_column() const {
        return shape::SPLIT_ROWS ? 0 : DQ_N * group;
    }

    /* dQ to shared memory, as fragments in the order of the sums in memory */
    __device__ __forceinline__ void store_dq(const float (&dq)[DQ_N][4]) {
        uint32_t to = shared + shape::DQ_OFFSET +
                      ((dq_row() * D_N + dq_column()) * FRAGMENT_FLOATS + 4 * lane) * (int)sizeof(float);
#pragma unroll
        for (int n = 0; n < DQ_N; n++) {
            store_shared_floats(to + n * FRAGMENT_FLOATS * sizeof(float),
                make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]));
        }
    }

    /* The last block of keys of a row block, in order: dQ = scale (sums + dq), rounded, by way of shared memory. */
    __device__ __forceinline__ void finish_dq(float (&dq)[DQ_N][4], int row, int head) {
        bool leader = threadIdx.x == WARPGROUP;
        int index = place.batch * a.common.heads + head;
        if (leader) {
            bulk_wait_read<0>(); /* of the row block before */
            if (place.key_block > 0) {
                wait_for_count(fa3_counter<D>(a, index, row), place.key_block);
            }
        }
        named_wait(shape::TOGETHER, shape::GROUPS * WARPGROUP);
        if (place.key_block > 0) {
            const float4 *sums = (const float4 *)(a.common.template dq_sums_of<D>(0, index, row) +
                                                  (dq_row() * D_N + dq_column()) * FRAGMENT_FLOATS) +
                                 lane;
#pragma unroll
            for (int n = 0; n < DQ_N; n++) {
                float4 sum = __ldcg(sums + n * FRAGMENT_FLOATS / 4);
                dq[n][0] += sum.x, dq[n][1] += sum.y, dq[n][2] += sum.z, dq[n][3] += sum.w;
            }
        }
        uint32_t tile = shared + shape::DQ_OFFSET;
#pragma unroll
        for (int k = 0; k < DQ_N / 2; k++) {
            store_scaled(tile + row_tile::offset(16 * dq_row() + lane % 16, dq_column() + 2 * k + lane / 16),
                dq[2 * k], dq[2 * k + 1], a.common.scale);
        }
        fence_async();
        named_wait(shape::TOGETHER, shape::GROUPS * WARPGROUP);
        if (leader) {
            store_tile_async<row_tile>(a.dq, tile, 0, row, head, place.batch);
        }
    }

    /* Whether a warp's part of S^T has queries and keys that do not see each other */
    __device__ __forceinline__ bool is_masked(int row) const {
        int last_key = place.first_key() + 64 * group + 16 * warp + 15;
        return a.common.causal ? last_key - (a.common.seqlen_k - a.common.seqlen_q) > row
                               : last_key >= a.common.seqlen_k;
    }

    /* dQ of a step to the threads that add, or to its end: what this block of keys finishes are its last row blocks. */
    __device__ __forceinline__ void hand_over(float (&dq)[DQ_N][4], const fa3_backward_step &at) {
        arrival_wait(shape::barrier(shared, shape::DQ_EMPTY), handed_over % 2 ^ 1);
        if (place.finishes(a, at.row)) {
            finish_dq(dq, at.row, at.head);
        } else {
            store_dq(dq);
            handed_over++;
        }
    }

    /* Tells the threads that add of what they have from the step before, while a product is under way: the fence takes
       some time. */
    __device__ __forceinline__ void announce(const fa3_backward_step &at) {
        if (at.step > 0 && handed_over == at.step) {
            fence_async();
            leave(shape::DQ_FULL + (at.step - 1) % shape::ADDING);
        }
    }

    /* dS^T of this group's keys to the tile that dQ's product reads */
    __device__ __forceinline__ void store_weights(uint32_t tile, const uint32_t (&d_s_weights)[ROWS_K][4]) {
#pragma unroll
        for (int k = 0; k < ROWS_K; k++) {
            store_matrices(tile + weight_tile::offset(64 * group + 16 * warp + lane % 16, 2 * k + lane / 16),
                d_s_weights[k]);
        }
        fence_async();
    }

    /* Starts the group's part of dQ = dS K, with all keys, once both groups have stored dS^T. */
    __device__ __forceinline__ void start_dq(float (&dq)[DQ_N][4], uint32_t weights) {
        named_wait(shape::TOGETHER, shape::GROUPS * WARPGROUP);
        wgmma_begin();
        multiply_columns<TYPE>(dq, weight_tile(weights, 0, shape::SPLIT_ROWS ? 64 * group : 0),
            key_tile(shared + shape::K_OFFSET, 0, 8 * dq_column()));
        wgmma_commit();
    }

    __device__ __forceinline__ void take_step(const fa3_backward_step &at) {
        lane = (int)opaque((uint32_t)lane); /* no registers for addresses from one step to the next */
        int stage = at.step % shape::STAGES;
        unsigned parity = at.step / shape::STAGES % 2;
        row_tile q(shared + shape::Q_OFFSET + stage * row_tile::BYTES),
            d_o(shared + shape::D_O_OFFSET + stage * row_tile::BYTES);
        uint32_t lse = shared + shape::LSE_OFFSET + stage * shape::STATISTICS_BYTES,
                 d = shared + shape::D_OFFSET + stage * shape::STATISTICS_BYTES,
                 d_s_tile = shared + shape::D_S_OFFSET + at.step % 2 * weight_tile::BYTES;
        float s[S_N][4], dp[S_N][4], dq[DQ_N][4];
        float2 early_lse[shape::EARLY_LSE], early_d[shape::EARLY_D];
        uint32_t p_weights[ROWS_K][4], d_s_weights[ROWS_K][4];

        arrival_wait(shape::barrier(shared, shape::Q_FULL + stage), parity);
        wgmma_begin();
        multiply_rows<TYPE>(s, key_tile(shared + shape::K_OFFSET, 64 * group), q);
        wgmma_commit();
        announce(at);
        arrival_wait(shape::barrier(shared, shape::D_O_FULL + stage), parity);
        wgmma_begin();
        multiply_rows<TYPE>(dp, key_tile(shared + shape::V_OFFSET, 64 * group), d_o);
        wgmma_commit();

        load_statistics(early_lse, lse);
        wgmma_wait<1>(s);
        if (is_masked(at.row)) {
            mask(s, at.row);
        }
        exponentiate(p_weights, s, early_lse, lse);
        load_statistics(early_d, d);
        wgmma_begin();
        multiply_fragments<TYPE>(dv, p_weights, d_o);
        wgmma_commit();

        wgmma_wait<1>(dp);
        differentiate(d_s_weights, dp, s, p_weights, early_d, d);
        store_weights(d_s_tile, d_s_weights);
        start_dq(dq, d_s_tile);
        multiply_fragments<TYPE>(dk, d_s_weights, q);
        wgmma_commit();

        wgmma_wait<1>(dq);
        registers_change(dv);
        arrive(shape::barrier(shared, shape::D_O_EMPTY + stage));
        hand_over(dq, at);
        wgmma_wait<0>(dk);
        arrive(shape::barrier(shared, shape::Q_EMPTY + stage));
    }

    /* dK or dV of this group's keys by way of the tile of K or V */
    __device__ __forceinline__ void store_sums(
        const tensor_map &map, uint32_t tile, const float (&sums)[D_N][4], float factor) {
#pragma unroll
        for (int k = 0; k < D_N / 2; k++) {
            store_scaled(tile + key_tile::offset(64 * group + 16 * warp + lane % 16, 2 * k + lane / 16),
                sums[2 * k], sums[2 * k + 1], factor);
        }
        fence_async();
        named_wait(shape::TOGETHER + 1 + group, WARPGROUP);
        int key = place.first_key() + 64 * group;
        if (threadIdx.x % WARPGROUP == 0 && key < a.common.seqlen_k) {
            store_tile_async<key_tile>(map, tile, 64 * group, key, place.kv_head, place.batch);
        }
    }

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int n = 0; n < D_N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dk[n][i] = dv[n][i] = 0;
            }
        }
        arrival_wait(shape::barrier(shared, shape::K_FULL), 0);
        arrival_wait(shape::barrier(shared, shape::V_FULL), 0);
        fa3_backward_step at = place.first_step();
        for (; !place.is_over(at); place.advance(at)) {
            take_step(at);
        }
        announce(at);
        named_wait(shape::TOGETHER, shape::GROUPS * WARPGROUP); /* K is not read any more */
        store_sums(a.dv, shared + shape::V_OFFSET, dv, 1);
        store_sums(a.dk, shared + shape::K_OFFSET, dk, a.common.scale);
        bulk_wait_read<0>();
    }
};

/* ---- the kernel ---- */

template <int D>
__device__ __forceinline__ void fa3_backward_start(const fa3_backward_arguments &a, uint32_t shared) {
    using shape = fa3_backward_shape<D>;
    constexpr int WARPS = 4 * shape::GROUPS;
    arrival_init(shape::barrier(shared, shape::K_FULL), 1);
    arrival_init(shape::barrier(shared, shape::V_FULL), 1);
    for (int stage = 0; stage < shape::STAGES; stage++) {
        arrival_init(shape::barrier(shared, shape::Q_FULL + stage), 1);
        arrival_init(shape::barrier(shared, shape::Q_EMPTY + stage), shape::GROUPS * WARPGROUP);
        arrival_init(shape::barrier(shared, shape::D_O_FULL + stage), 1);
        arrival_init(shape::barrier(shared, shape::D_O_EMPTY + stage), shape::GROUPS * WARPGROUP);
    }
    for (int i = 0; i < shape::ADDING; i++) {
        arrival_init(shape::barrier(shared, shape::DQ_FULL + i), WARPS);
    }
    arrival_init(shape::barrier(shared, shape::DQ_EMPTY), 1);
    arrival_init_done();
    store_shared(shared + shape::PLACE_OFFSET,
        a.common.deterministic ? (uint32_t)atomicAdd(a.common.counters, 1) : blockIdx.x);
}

template <enum dtype TYPE, int D>
__global__ void __launch_bounds__(fa3_backward_shape<D>::THREADS, 1)
    fa3_backward_kernel(const __grid_constant__ fa3_backward_arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    if constexpr (COMPILED_FOR_SM90A) {
        using shape = fa3_backward_shape<D>;
        uint32_t base = shared_address(shared);
        wait_for_previous();
        launch_next(); /* not before: backward_finish reads counters that backward_prepare clears */
        if (threadIdx.x == 0) {
            fa3_backward_start<D>(a, base);
        }
        __syncthreads();
        int warp = (int)uniform_warp_index();
        if (warp < 4) {
            registers_release<shape::COPY_REGISTERS>();
            fa3_backward_place<D> place(a.common, load_shared(base + shape::PLACE_OFFSET));
            if (threadIdx.x == 0) {
                fa3_backward_copies<D>{a, place, base}.run();
            } else if (warp <= shape::ADDING && lane_index() == 0) {
                fa3_backward_additions<D>{a, place, base}.run(warp - 1);
            }
        } else {
            registers_acquire<shape::REGISTERS>();
            fa3_backward_place<D> place(a.common, load_shared(base + shape::PLACE_OFFSET));
            fa3_backward_group<TYPE, D>(a, place, base, warp / 4 - 1).run();
        }
    }
}

/* ---- the call ---- */

/* Without a mask the last block of keys finishes all rows: only if a head has no more blocks than this. */
enum { MOST_FINISHED = 4 };

/* Up to so many blocks of keys of a head, order costs less than the passes that it saves, whether it is asked for or not. */
enum { MOST_ORDERED = 16 };

/* How many blocks of keys of a head are at work together when they have to wait for each other. More wait longer. Fewer, of
   more heads, find less of Q, dO and dQ in the L2 cache: in long sequences without a mask, where the distance between them can
   grow for long, most often nothing. */
static int fa3_blocks_together(int head_dim, bool causal, int key_blocks) {
    return head_dim > 80 || (!causal && key_blocks > MOST_ORDERED) ? 8 : 4;
}

template <int D>
static fa3_backward_arguments fa3_backward_arguments_of(
    const struct attention *attention, const struct attention_params *p) {
    using shape = fa3_backward_shape<D>;
    fa3_backward_arguments a = {};
    backward_arguments &c = a.common;
    c = backward_problem(p, shape::ROWS, shape::KEYS);
    c.deterministic = p->deterministic || c.key_blocks <= MOST_ORDERED;
    int64_t heads = p->batch * p->kv_heads;
    c.order = order_blocks(c.key_blocks, heads, p->heads / p->kv_heads * p->seqlen_q * D * 8, 1);
    if (c.deterministic) {
        int64_t together = attention->multiprocessors / fa3_blocks_together(D, p->causal, c.key_blocks);
        c.order = order_heads(c.key_blocks, heads, max_i64(c.order.together, together), 1);
    }
    a.finishing = c.deterministic && (p->causal || c.key_blocks <= MOST_FINISHED);
    c.counters = (int *)((char *)p->workspace + fa3_workspace(p).counters_offset);
    c.ended = a.finishing ? nullptr : c.counters + 1 + p->batch * p->heads * (c.padded_rows / PREPARE_ROWS);
    c.all_ended = shape::ADDING * c.key_blocks;
    return a;
}

template <enum dtype TYPE, int D>
static enum status fa3_backward_pass(const struct attention *attention, const struct attention_params *p) {
    using shape = fa3_backward_shape<D>;
    using key_tile = typename shape::key_tile;
    using row_tile = typename shape::row_tile;
    fa3_backward_arguments a = fa3_backward_arguments_of<D>(attention, p);
    CHECK(make_tensor_map<row_tile>(&a.q, attention, p, p->q, p->seqlen_q, p->heads, shape::ROWS));
    CHECK(make_tensor_map<row_tile>(&a.d_o, attention, p, p->d_o, p->seqlen_q, p->heads, shape::ROWS));
    CHECK(make_tensor_map<key_tile>(&a.k, attention, p, p->k, p->seqlen_k, p->kv_heads, shape::KEYS));
    CHECK(make_tensor_map<key_tile>(&a.v, attention, p, p->v, p->seqlen_k, p->kv_heads, shape::KEYS));
    CHECK(make_tensor_map<row_tile>(&a.dq, attention, p, p->dq, p->seqlen_q, p->heads, shape::ROWS));
    CHECK(make_tensor_map<key_tile>(&a.dk, attention, p, p->dk, p->seqlen_k, p->kv_heads, 64));
    CHECK(make_tensor_map<key_tile>(&a.dv, attention, p, p->dv, p->seqlen_k, p->kv_heads, 64));
    CHECK((prepare_backward<TYPE, D>(p, a.common)));
    CHECK(launch("fa3 backward", fa3_backward_kernel<TYPE, D>, p->batch * p->kv_heads * a.common.key_blocks,
        shape::THREADS, shape::SHARED_BYTES, p->stream, a, true));
    a.common.deterministic = false; /* there is one sum */
    return a.finishing ? STATUS_OK : finish_backward<TYPE, D>(p, a.common, true);
}

extern "C" enum status fa3_backward(const struct attention *a, const struct attention_params *p) {
    if (p->head_dim > FA3_LARGEST_BACKWARD_HEAD_DIM) {
        return fa2_backward(a, p);
    }
#define PASS(D)                                                                                              \
    return p->dtype == DTYPE_BF16 ? fa3_backward_pass<DTYPE_BF16, D>(a, p)                                   \
                                  : fa3_backward_pass<DTYPE_F16, D>(a, p)
    switch (fa3_backward_head_dim(p->head_dim)) {
    case 64:
        PASS(64);
    case 80:
        PASS(80);
    default:
        PASS(128);
    }
#undef PASS
}
