/* FlashAttention forward for Hopper (Shah et al. 2024): the algorithm of fa2_forward.cu with Hopper's instructions.

   grid      one thread block a multiprocessor, which takes tiles of ROWS queries of a (batch, head) until none is left, in
             block_order
   block     a warpgroup that has one thread start all copies (TMA), and 2 or 3 warpgroups with 64 queries each
   shared    Q and O (ROWS x D, from 192 columns on in one place); K and V blocks (KEYS x D), STAGES of each
   registers O~ and S of the warpgroup's rows as fp32 accumulators, P in 16 bits; the copying warpgroup gives up most of
             its own

   Three things run at once:
   - copies run ahead of the products by as many blocks as there are stages, and into the next tile
   - within a warpgroup S of the next block and O~ += P V of this one are started together, and the softmax of the next
     block begins as soon as its S is there, under the second product
   - warpgroups take turns to start their products, so that the softmax of one lies under the products of the other

   for each block of keys, from the last visible one down:
       take turn; start S' = Q K'^T; start O~ += P V; give turn
       wait for S'; mask; m' = max(m, rowmax S'); P' = 2^(S' c - m' c), l += rowsum P'
       wait for O~; rescale it if m' has grown by much; P = P' in 16 bits

   At head dimension 128 most blocks are not searched for rowmax S': m stays, and if the sums say that P' is too large, S' is
   computed once more and searched. Between S' and P' there is then nothing but exponentials.

   FLOPs and bytes as fa2's. */
#include "attention/fa3.cuh"

/* ---- tiles ---- */

struct fa3_forward_tile {
    int warpgroups; /* of 64 rows each */
    int keys;
    int stages;
};

__host__ __device__ constexpr fa3_forward_tile fa3_forward_tile_of(int head_dim) {
    return head_dim <= 64    ? fa3_forward_tile{3, 128, 2}
           : head_dim <= 96  ? fa3_forward_tile{3, 96, 2}
           : head_dim <= 128 ? fa3_forward_tile{2, 128, 2}
           : head_dim <= 192 ? fa3_forward_tile{2, 112, 2}
                             : fa3_forward_tile{2, 80, 2};
}

struct fa3_forward_arguments {
    tensor_map q, k, v, o;
    float *lse;
    int *taken;                           /* tiles, beyond the first of every thread block */
    int seqlen_q, seqlen_k, heads, group; /* group: query heads to a key/value head */
    float scale;
    bool causal;
    int tiles;
    block_order order;
};

template <int D> struct fa3_forward_shape {
    static constexpr fa3_forward_tile TILE = fa3_forward_tile_of(D);
    static constexpr int GROUPS = TILE.warpgroups, KEYS = TILE.keys, STAGES = TILE.stages;
    static constexpr int ROWS = 64 * GROUPS, THREADS = WARPGROUP * (GROUPS + 1);
    using row_tile = panel_tile<64, D>;
    using key_tile = panel_tile<KEYS, D>;
    static constexpr bool O_OVER_Q = D > 128; /* there is no room for both */
    static constexpr int Q_OFFSET = 0, O_OFFSET = O_OVER_Q ? Q_OFFSET : Q_OFFSET + GROUPS * row_tile::BYTES,
                         K_OFFSET = O_OFFSET + GROUPS * row_tile::BYTES,
                         V_OFFSET = K_OFFSET + STAGES * key_tile::BYTES,
                         BARRIERS_OFFSET = V_OFFSET + STAGES * key_tile::BYTES;
    /* of arrival barriers */
    static constexpr int Q_FULL = 0, Q_EMPTY = 1, K_FULL = 2, K_EMPTY = K_FULL + STAGES,
                         V_FULL = K_EMPTY + STAGES, V_EMPTY = V_FULL + STAGES, BARRIERS = V_EMPTY + STAGES;
    static constexpr int TILE_OFFSET = BARRIERS_OFFSET + 8 * BARRIERS; /* which one Q is of */
    static constexpr int SHARED_BYTES = TILE_OFFSET + 8;
    static_assert(SHARED_BYTES <= 227 * 1024, "more shared memory than there is");
    /* Whether every block is searched for new maxima, or only those that cannot do without: where registers are few, and where
       it is slower. */
    static constexpr bool SEARCHING = D != 128;
    /* registers of a thread: what the threads that copy give up, the others get */
    static constexpr int COPY_REGISTERS = GROUPS == 2 ? 24 : 32, REGISTERS = GROUPS == 2 ? 240 : 160;
    static_assert(COPY_REGISTERS + GROUPS * REGISTERS <= (GROUPS + 1) * registers_at_start(THREADS),
        "more registers than there are");
    /* named barriers: a warpgroup's turn, and its own */
    static constexpr int TURN = 1, OWN = TURN + GROUPS;
};

/* A tile of the grid: ROWS queries of a head. */
template <int D> struct fa3_forward_place {
    using shape = fa3_forward_shape<D>;
    int batch, head, row, key_blocks;

    __device__ __forceinline__ fa3_forward_place(const fa3_forward_arguments &a, unsigned tile) {
        int block, batch_head;
        a.order.find(tile, &block, &batch_head);
        batch = batch_head / a.heads, head = batch_head % a.heads;
        row = (a.order.blocks - 1 - block) * shape::ROWS;
        key_blocks = key_blocks_of(a, row, shape::ROWS);
    }

    /* How many blocks of keys `rows` queries from first_row on see, those that there are. */
    static __device__ __forceinline__ int key_blocks_of(
        const fa3_forward_arguments &a, int first_row, int rows) {
        int last_row = min(first_row + rows, a.seqlen_q);
        int seen = a.causal ? last_row + a.seqlen_k - a.seqlen_q : a.seqlen_k;
        return last_row > first_row ? max(seen + shape::KEYS - 1, 0) / shape::KEYS : 0;
    }
};

/* ---- the thread that copies, and that takes tiles from the grid ---- */

template <int D> struct fa3_forward_copies {
    using shape = fa3_forward_shape<D>;
    const fa3_forward_arguments &a;
    uint32_t shared, barriers;
    int block = 0; /* of keys, of all tiles so far */

    __device__ __forceinline__ void load_queries(const fa3_forward_place<D> &place) {
        arrive_expecting(barriers + 8 * shape::Q_FULL, shape::GROUPS * shape::row_tile::BYTES);
#pragma unroll
        for (int group = 0; group < shape::GROUPS; group++) {
            load_tile<typename shape::row_tile>(shared + shape::Q_OFFSET + group * shape::row_tile::BYTES,
                a.q, barriers + 8 * shape::Q_FULL, place.row + 64 * group, place.head, place.batch);
        }
    }

    __device__ __forceinline__ void load_keys(
        const tensor_map &map, uint32_t tiles, int full, int empty, int key, int head, int batch) {
        int stage = block % shape::STAGES;
        uint32_t arrival = barriers + 8 * (full + stage);
        arrival_wait(barriers + 8 * (empty + stage), block / shape::STAGES % 2 ^ 1);
        arrive_expecting(arrival, shape::key_tile::BYTES);
        load_tile<typename shape::key_tile>(
            tiles + stage * shape::key_tile::BYTES, map, arrival, key, head, batch);
    }

    __device__ __forceinline__ void run() {
        int tile = (int)blockIdx.x;
        for (unsigned filled = 0;; filled++) {
            arrival_wait(barriers + 8 * shape::Q_EMPTY, filled % 2 ^ 1);
            store_shared(shared + shape::TILE_OFFSET, (uint32_t)tile);
            if (tile >= a.tiles) {
                arrive(barriers + 8 * shape::Q_FULL);
                return;
            }
            fa3_forward_place<D> place(a, tile);
            load_queries(place);
            for (int j = place.key_blocks - 1; j >= 0; j--, block++) {
                load_keys(a.k, shared + shape::K_OFFSET, shape::K_FULL, shape::K_EMPTY, j * shape::KEYS,
                    place.head / a.group, place.batch);
                load_keys(a.v, shared + shape::V_OFFSET, shape::V_FULL, shape::V_EMPTY, j * shape::KEYS,
                    place.head / a.group, place.batch);
            }
            /* Not sooner: a thread block with much left to do would keep a tile that another could begin with. */
            tile = (int)gridDim.x + atomicAdd(a.taken, 1);
        }
    }
};

/* ---- a warpgroup that computes ---- */

template <enum dtype TYPE, int D> struct fa3_forward_group {
    using shape = fa3_forward_shape<D>;
    using row_tile = typename shape::row_tile;
    using key_tile = typename shape::key_tile;
    static constexpr int S_N = shape::KEYS / 8, O_N = D / 8, P_K = shape::KEYS / 16;
    static constexpr float LARGEST_GROWTH = 8; /* log2 of the largest P~; fa2_forward.cu says why */
    /* Of a thread's P~ of a row, none of which is then larger: fp16 has it. Blocks that are searched stay below, so that none is
       done twice again. */
    static constexpr float LARGEST_SUM = 1 << 14;
    static_assert(
        shape::KEYS / 4 * (1 << (int)LARGEST_GROWTH) < LARGEST_SUM, "blocks that are searched stay below");

    const fa3_forward_arguments &a;
    uint32_t shared, barriers;
    int group, warp, lane; /* warp: of the group */
    int block = 0;         /* of keys, of all tiles so far */

    float out[O_N][4], scores[S_N][4];
    uint32_t weights[P_K][4]; /* P as A fragments */
    float row_max[2], row_sum[2];

    __device__ __forceinline__ fa3_forward_group(
        const fa3_forward_arguments &arguments, uint32_t shared_memory, int group_index)
        : a(arguments), shared(shared_memory), barriers(shared_memory + shape::BARRIERS_OFFSET),
          group(group_index), warp((int)uniform_warp_index() % 4), lane(lane_index()) {
    }

    __device__ __forceinline__ void wait_full(int full, int of_block) {
        arrival_wait(barriers + 8 * (full + of_block % shape::STAGES), of_block / shape::STAGES % 2);
    }
    __device__ __forceinline__ void leave(int barrier) {
        __syncwarp();
        if (lane == 0) {
            arrive(barriers + 8 * barrier);
        }
    }

    /* K of a block is not read any more. Where it is not only products that read it, every thread says so. */
    __device__ __forceinline__ void leave_keys(int of_block) {
        if (shape::SEARCHING) {
            leave(shape::K_EMPTY + of_block % shape::STAGES);
        } else {
            arrive(barriers + 8 * (shape::K_EMPTY + of_block % shape::STAGES));
        }
    }

    /* Starts S = Q K^T of a block. */
    __device__ __forceinline__ void start_scores(int of_block) {
        wgmma_begin();
        multiply_rows<TYPE>(scores, row_tile(shared + shape::Q_OFFSET + group * row_tile::BYTES),
            key_tile(shared + shape::K_OFFSET + of_block % shape::STAGES * key_tile::BYTES));
        wgmma_commit();
    }

    /* Starts O~ += P V of a block. */
    __device__ __forceinline__ void start_output(int of_block) {
        wgmma_begin();
        multiply_fragments<TYPE>(
            out, weights, key_tile(shared + shape::V_OFFSET + of_block % shape::STAGES * key_tile::BYTES));
        wgmma_commit();
    }

    /* S = -infinity for the keys that a row does not see. The warp's first row sees `visible` of this block's keys, each
       row after it `step` more. */
    __device__ __forceinline__ void mask(int visible, int step) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int limit = visible + step * (lane / 4 + i / 2 * 8) - (lane % 4 * 2 + i % 2);
#pragma unroll
            for (int n = 0; n < S_N; n++) {
                scores[n][i] = 8 * n < limit ? scores[n][i] : -INFINITY;
            }
        }
    }

    /* Larger maxima, when one has grown too much: then true, and O~ has to be multiplied by `factors`. */
    __device__ __forceinline__ bool update_max(float (&factors)[2], float scale_log2) {
        float larger[2];
        bool rescale = false;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = row_max[half];
#pragma unroll
            for (int n = 0; n < S_N; n++) {
                x = fmaxf(x, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            larger[half] = x;
            /* never true for a row that has seen nothing: -infinity minus itself is not a number */
            rescale |= (x - row_max[half]) * scale_log2 > LARGEST_GROWTH;
        }
        rescale = __any_sync(~0u, rescale);
        if (rescale) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float growth = larger[half] - row_max[half];
                factors[half] = growth > 0 ? exp2_fast(-growth * scale_log2) : 1;
                row_max[half] = larger[half];
                row_sum[half] *= factors[half];
            }
        }
        return rescale;
    }

    /* P~ in place of S, and this thread's part of the row sums of the block. A row that has seen nothing: P~ = 0 where it still
       does not, `nothing` = 0; or infinity where it does and has no maximum, `nothing` = -infinity. */
    __device__ __forceinline__ void exponentiate(float (&sums)[2], float scale_log2, float nothing) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float max = row_max[half];
            float shift = max == -INFINITY ? nothing : max * scale_log2;
            sums[half] = 0;
#pragma unroll
            for (int n = 0; n < S_N; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[n][i] = exp2_fast(scores[n][i] * scale_log2 - shift);
                    sums[half] += scores[n][i];
                }
            }
        }
    }

    __device__ __forceinline__ void rescale_output(const float (&factors)[2]) {
#pragma unroll
        for (int n = 0; n < O_N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                out[n][i] *= factors[i / 2];
            }
        }
    }

    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int k = 0; k < P_K; k++) {
            pack_fragment<TYPE>(weights[k], scores[2 * k], scores[2 * k + 1]);
        }
    }

    /* Q is not read any more; where O takes its place, it is occupied until O is stored. */
    __device__ __forceinline__ void leave_queries() {
        if (!shape::O_OVER_Q) {
            arrive(barriers + 8 * shape::Q_EMPTY);
        }
    }

    /* S of a block once more, of this warp alone, where exponentials have taken its place */
    __device__ __forceinline__ void multiply_again(int of_block) {
        uint32_t queries = shared + shape::Q_OFFSET + group * row_tile::BYTES,
                 keys = shared + shape::K_OFFSET + of_block % shape::STAGES * key_tile::BYTES;
#pragma unroll
        for (int n = 0; n < S_N; n++) {
            scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0;
        }
#pragma unroll 1
        for (int k = 0; k < D / 16; k++) {
            uint32_t q[4], pair[4];
            ldmatrix(q, queries + row_tile::offset(16 * warp + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int n = 0; n < S_N; n += 2) {
                ldmatrix(
                    pair, keys + key_tile::offset(8 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                mma<TYPE>(scores[n], q, pair[0], pair[1]);
                mma<TYPE>(scores[n + 1], q, pair[2], pair[3]);
            }
        }
    }

    /* S of a block has arrived, and P~ takes its place. Between a tile's first block and its last, and where no key is hidden,
       maxima need no search: if one has grown by much the sums tell, and only then all is done again with new ones. (The last
       is searched because Q is then given back before the exponentials.) True: O~ has to be multiplied by `factors`. */
    __device__ __forceinline__ bool take_scores(
        const fa3_forward_place<D> &place, int of_block, int first_key, bool first, float (&factors)[2]) {
        float scale_log2 = a.scale * LOG2_E, sums[2];
        int first_row = place.row + 64 * group + 16 * warp;
        int visible = a.causal ? first_row + a.seqlen_k - a.seqlen_q + 1 : a.seqlen_k;
        bool hidden = first_key + shape::KEYS > visible, last = first_key == 0, rescale = false;
        if (shape::SEARCHING || first || hidden || last) {
            leave_keys(of_block);
            if (last) {
                leave_queries();
            }
            if (hidden) {
                mask(visible - first_key, a.causal ? 1 : 0);
            }
            rescale = update_max(factors, scale_log2);
            exponentiate(sums, scale_log2, 0);
        } else {
            exponentiate(sums, scale_log2, -INFINITY);
            /* not a number: all scores are -infinity, as the maxima are */
            if (__any_sync(~0u, !(sums[0] + sums[1] <= LARGEST_SUM))) {
                multiply_again(of_block);
                rescale = update_max(factors, scale_log2);
                exponentiate(sums, scale_log2, 0);
            }
            leave_keys(of_block);
        }
        row_sum[0] += sums[0], row_sum[1] += sums[1];
        return rescale;
    }

    __device__ __forceinline__ void take_turn() {
        named_wait(shape::TURN + group, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void give_turn() {
        named_arrive(shape::TURN + (group + 1) % shape::GROUPS, 2 * WARPGROUP);
    }

    /* Goes by the blocks of keys that only other groups' queries see, and by their turns, one less than a tile's blocks. */
    __device__ __forceinline__ void skip(int blocks, int turns) {
        for (int i = 0; i < blocks; i++, block++) {
            if (i < turns) {
                take_turn();
                give_turn();
            }
            wait_full(shape::K_FULL, block);
            leave_keys(block);
            wait_full(shape::V_FULL, block);
            leave(shape::V_EMPTY + block % shape::STAGES);
        }
    }

    /* The loop of this file's beginning, over blocks of keys. */
    __device__ __forceinline__ void attend(int key_blocks, const fa3_forward_place<D> &place) {
        int first_key = (key_blocks - 1) * shape::KEYS;
        float factors[2];
        wait_full(shape::K_FULL, block);
        start_scores(block);
        wgmma_wait<0>(scores);
        take_scores(place, block, first_key, true, factors);
        pack_weights();
        for (; first_key > 0; block++) {
            first_key -= shape::KEYS;
            wait_full(shape::K_FULL, block + 1);
            take_turn();
            start_scores(block + 1);
            wait_full(shape::V_FULL, block);
            start_output(block);
            give_turn();
            wgmma_wait<1>(scores);
            bool rescale = take_scores(place, block + 1, first_key, false, factors);
            wgmma_wait<0>(out);
            leave(shape::V_EMPTY + block % shape::STAGES);
            if (rescale) {
                rescale_output(factors);
            }
            pack_weights();
        }
        wait_full(shape::V_FULL, block);
        start_output(block);
        wgmma_wait<0>(out);
        leave(shape::V_EMPTY + block % shape::STAGES);
        block++;
    }

    /* O = O~ / l by way of shared memory, and lse */
    __device__ __forceinline__ void store(const fa3_forward_place<D> &place) {
        bool leader = threadIdx.x % WARPGROUP == 0;
        int first_row = place.row + 64 * group;
        float *lse = a.lse + ((int64_t)place.batch * a.heads + place.head) * a.seqlen_q;
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = row_sum[half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            inverse[half] = sum > 0 ? 1 / sum : 0;
            int row = first_row + 16 * warp + lane / 4 + 8 * half;
            if (lane % 4 == 0 && row < a.seqlen_q) {
                lse[row] = row_max[half] * a.scale + logf(sum);
            }
        }
        rescale_output(inverse);
        uint32_t tile = shared + shape::O_OFFSET + group * row_tile::BYTES;
        if (leader) {
            bulk_wait_read<0>(); /* of the tile before */
        }
        named_wait(shape::OWN + group, WARPGROUP);
#pragma unroll
        for (int k = 0; k < O_N / 2; k++) {
            uint32_t square[4];
            pack_fragment<TYPE>(square, out[2 * k], out[2 * k + 1]);
            store_matrices(tile + row_tile::offset(16 * warp + lane % 16, 2 * k + lane / 16), square);
        }
        fence_async();
        named_wait(shape::OWN + group, WARPGROUP);
        if (leader && first_row < a.seqlen_q) {
            store_tile_async<row_tile>(a.o, tile, 0, first_row, place.head, place.batch);
        }
        if (shape::O_OVER_Q) {
            if (leader) {
                bulk_wait_read<0>();
            }
            arrive(barriers + 8 * shape::Q_EMPTY);
        }
    }

    __device__ __forceinline__ void run() {
        if (group == shape::GROUPS - 1) {
            named_arrive(shape::TURN, 2 * WARPGROUP); /* the first turn is the first group's */
        }
        for (unsigned filled = 0;; filled++) {
            arrival_wait(barriers + 8 * shape::Q_FULL, filled % 2);
            int tile = (int)load_shared(shared + shape::TILE_OFFSET);
            if (tile >= a.tiles) {
                break;
            }
            fa3_forward_place<D> place(a, (unsigned)tile);
#pragma unroll
            for (int n = 0; n < O_N; n++) {
                out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
            }
            row_max[0] = row_max[1] = -INFINITY;
            row_sum[0] = row_sum[1] = 0;
            int key_blocks = place.key_blocks_of(a, place.row + 64 * group, 64);
            skip(place.key_blocks - key_blocks, place.key_blocks - 1);
            if (key_blocks > 0) {
                attend(key_blocks, place);
            } else {
                leave_queries();
            }
            store(place);
        }
        bulk_wait_read<0>();
    }
};

/* ---- the kernel ---- */

template <enum dtype TYPE, int D>
__global__ void __launch_bounds__(fa3_forward_shape<D>::THREADS, 1)
    fa3_forward_kernel(const __grid_constant__ fa3_forward_arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    if constexpr (COMPILED_FOR_SM90A) {
        using shape = fa3_forward_shape<D>;
        uint32_t base = shared_address(shared), barriers = base + shape::BARRIERS_OFFSET;
        if (threadIdx.x == 0) {
            arrival_init(barriers + 8 * shape::Q_FULL, 1);
            arrival_init(barriers + 8 * shape::Q_EMPTY, shape::GROUPS * WARPGROUP);
            for (int stage = 0; stage < shape::STAGES; stage++) {
                arrival_init(barriers + 8 * (shape::K_FULL + stage), 1);
                arrival_init(barriers + 8 * (shape::V_FULL + stage), 1);
                arrival_init(barriers + 8 * (shape::K_EMPTY + stage),
                    shape::GROUPS * (shape::SEARCHING ? WARPGROUP / LANES : WARPGROUP));
                arrival_init(barriers + 8 * (shape::V_EMPTY + stage), 4 * shape::GROUPS);
            }
            arrival_init_done();
        }
        __syncthreads();
        int warpgroup = (int)uniform_warp_index() / 4;
        if (warpgroup == 0) {
            registers_release<shape::COPY_REGISTERS>();
            if (threadIdx.x == 0) {
                fa3_forward_copies<D>{a, base, barriers}.run();
            }
        } else {
            registers_acquire<shape::REGISTERS>();
            fa3_forward_group<TYPE, D>(a, base, warpgroup - 1).run();
        }
    }
}

/* ---- the call ---- */

/* Under a causal mask. With more, short sequences find too little of K and V in the L2 cache. */
enum { FA3_GROUPS_AT_END = 2 };

template <enum dtype TYPE, int D>
static enum status fa3_forward_pass(const struct attention *attention, const struct attention_params *p) {
    using shape = fa3_forward_shape<D>;
    int64_t blocks = ceil_div(p->seqlen_q, shape::ROWS), heads = p->batch * p->heads;
    fa3_forward_arguments a = {};
    CHECK(make_tensor_map<typename shape::row_tile>(&a.q, attention, p, p->q, p->seqlen_q, p->heads, 64));
    CHECK(make_tensor_map<typename shape::row_tile>(&a.o, attention, p, p->o, p->seqlen_q, p->heads, 64));
    CHECK(make_tensor_map<typename shape::key_tile>(
        &a.k, attention, p, p->k, p->seqlen_k, p->kv_heads, shape::KEYS));
    CHECK(make_tensor_map<typename shape::key_tile>(
        &a.v, attention, p, p->v, p->seqlen_k, p->kv_heads, shape::KEYS));
    if (blocks * heads > INT32_MAX / 2) {
        return fail("attention fa3: %lld tiles, more than a call takes: use smaller batches",
            (long long)(blocks * heads));
    }
    a.lse = (float *)p->lse;
    a.taken = (int *)((char *)p->workspace + fa3_workspace(p).counters_offset);
    CHECK(cuda_check(cudaMemsetAsync(a.taken, 0, sizeof *a.taken, (cudaStream_t)p->stream), "fa3 forward"));
    a.seqlen_q = (int)p->seqlen_q, a.seqlen_k = (int)p->seqlen_k;
    a.heads = (int)p->heads, a.group = (int)(p->heads / p->kv_heads);
    a.scale = (float)p->scale, a.causal = p->causal;
    a.tiles = (int)(blocks * heads);
    a.order =
        order_blocks(blocks, heads, 4 * p->seqlen_k * D / a.group + 1, p->causal ? FA3_GROUPS_AT_END : 1);
    return launch("fa3 forward", fa3_forward_kernel<TYPE, D>, min_i64(a.tiles, attention->multiprocessors),
        shape::THREADS, shape::SHARED_BYTES, p->stream, a);
}

extern "C" bool fa3_is_compiled(void) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, fa3_forward_kernel<DTYPE_BF16, 64>) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    return attributes.ptxVersion >= 90; /* less: an empty kernel, compiled by the driver for this device */
}

extern "C" enum status fa3_forward(const struct attention *a, const struct attention_params *p) {
#define PASS(D)                                                                                              \
    return p->dtype == DTYPE_BF16 ? fa3_forward_pass<DTYPE_BF16, D>(a, p)                                    \
                                  : fa3_forward_pass<DTYPE_F16, D>(a, p)
    switch (fa2_padded_head_dim(p->head_dim)) {
    case 64:
        PASS(64);
    case 80:
        PASS(80);
    case 96:
        PASS(96);
    case 128:
        PASS(128);
    case 192:
        PASS(192);
    default:
        PASS(256);
    }
#undef PASS
}
