/* Attention of new tokens over the cache of keys and values: the attention of generation.

   A block has one query head of one new token, and all positions that it sees. Its threads form groups of G lanes, G the
   power of two that holds D/8 of them: a lane has eight channels of the query, of each key and of each value in
   registers, the group has one position at a time and goes on by the number of groups:

       position        0   1   2   3  ...                 D = 64: G = 8, 64 groups
       group           0   1   2   3  ...  63   0   1

   A group keeps its own maximum, sum of exponentials and output (online softmax, Milakov and Gimelshein 2018), for
   AHEAD positions at a time so that their loads overlap; in the end the groups meet in shared memory, in the order of
   their numbers. Keys and values of tokens that are new in this call are read from qkv; one block of each key/value head
   also puts its token's into the cache, where nobody reads them before the next call.
   Bytes moved: the cache once for each query head (those that share keys and values find them in L2). */
#include "cuda.cuh"

enum { DECODE_THREADS = 512, AHEAD = 4, MOST_HEAD_DIM = 256 };

struct cached_arguments {
    bf16 *out, *cache;
    const bf16 *qkv;
    int seq_len, heads, kv_heads, head_dim, past, capacity;
    float scale_log2; /* log2(e) / sqrt(D): exponentials are powers of two */
};

/* The state of a softmax over some positions: output = sum of 2^(score - highest) values, unscaled. */
struct online_softmax {
    float highest, sum, out[8];
};

/* Element of the head's first channel of key (part 0) or value (part 1) at a position. */
__device__ inline const bf16 *key_or_value(
    const cached_arguments &a, int part, int64_t sequence, int kv_head, int position) {
    if (position < a.past) {
        return a.cache +
               (((sequence * 2 + part) * a.kv_heads + kv_head) * a.capacity + position) * a.head_dim;
    }
    int64_t row = sequence * a.seq_len + position - a.past;
    return a.qkv + (row * (a.heads + 2 * a.kv_heads) + a.heads + part * a.kv_heads + kv_head) * a.head_dim;
}

template <int GROUP> __device__ inline float group_add(float value) {
#pragma unroll
    for (int offset = GROUP / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
    }
    return value;
}

/* The positions first, first + GROUPS, ... that come next, AHEAD of them. All threads of a warp go through it together;
   `present`: the lane has channels. */
template <int GROUP>
__device__ inline void take_positions(online_softmax &state, const cached_arguments &a,
    const float (&query)[8], int64_t sequence, int kv_head, int channel, bool present, int first,
    int positions) {
    constexpr int GROUPS = DECODE_THREADS / GROUP;
    uint4 key[AHEAD], value[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        int position = first + i * GROUPS;
        bool there = present && position < positions;
        key[i] = there ? load16(key_or_value(a, 0, sequence, kv_head, position) + channel)
                       : make_uint4(0, 0, 0, 0);
        value[i] = there ? load16(key_or_value(a, 1, sequence, kv_head, position) + channel)
                         : make_uint4(0, 0, 0, 0);
    }
    float score[AHEAD], highest = state.highest;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        float k[8], dot = 0.0f;
        unpack8(k, key[i]);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            dot = fmaf(query[c], k[c], dot);
        }
        dot = group_add<GROUP>(dot);
        score[i] = first + i * GROUPS < positions ? dot * a.scale_log2 : -INFINITY;
        highest = fmaxf(highest, score[i]);
    }
    if (highest == -INFINITY) { /* nothing seen yet */
        return;
    }
    float correction = exp2_fast(state.highest - highest);
    state.highest = highest;
    state.sum *= correction;
#pragma unroll
    for (int c = 0; c < 8; c++) {
        state.out[c] *= correction;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        float v[8], weight = exp2_fast(score[i] - highest);
        unpack8(v, value[i]);
        state.sum += weight;
#pragma unroll
        for (int c = 0; c < 8; c++) {
            state.out[c] = fmaf(weight, v[c], state.out[c]);
        }
    }
}

/* Grid (query heads, new tokens of all sequences). */
template <int GROUP>
__global__ void __launch_bounds__(DECODE_THREADS) attention_cached_kernel(cached_arguments a) {
    constexpr int GROUPS = DECODE_THREADS / GROUP;
    __shared__ float highest[GROUPS], sum[GROUPS], out[GROUPS][8 * GROUP];
    int head = blockIdx.x, kv_head = head / (a.heads / a.kv_heads);
    int64_t row = blockIdx.y, sequence = row / a.seq_len;
    int token = (int)(row % a.seq_len), positions = a.past + token + 1;
    int group = threadIdx.x / GROUP, channel = 8 * (threadIdx.x % GROUP);
    bool present = channel < a.head_dim;

    float query[8];
    unpack8(query, present ? load16(a.qkv + (row * (a.heads + 2 * a.kv_heads) + head) * a.head_dim + channel)
                           : make_uint4(0, 0, 0, 0));
    if (head % (a.heads / a.kv_heads) == 0 && group < 2 && present) { /* group 0: the key, 1: the value */
        bf16 *to = a.cache + (((sequence * 2 + group) * a.kv_heads + kv_head) * a.capacity + a.past + token) *
                                 a.head_dim;
        store16(to + channel, load16(key_or_value(a, group, sequence, kv_head, a.past + token) + channel));
    }
    online_softmax state = {-INFINITY, 0.0f, {}};
    int warp_first = (threadIdx.x / 32) * (32 / GROUP); /* the warp's first group: its lanes stay together */
    for (int base = 0; base + warp_first < positions; base += AHEAD * GROUPS) {
        take_positions<GROUP>(state, a, query, sequence, kv_head, channel, present, base + group, positions);
    }

    if (channel == 0) {
        highest[group] = state.highest;
        sum[group] = state.sum;
    }
#pragma unroll
    for (int c = 0; c < 8; c++) {
        out[group][channel + c] = state.out[c];
    }
    __syncthreads();
    if (threadIdx.x >= a.head_dim) {
        return;
    }
    float top = -INFINITY, total = 0.0f, result = 0.0f;
    for (int g = 0; g < GROUPS; g++) {
        top = fmaxf(top, highest[g]);
    }
    for (int g = 0; g < GROUPS; g++) {
        float factor = exp2_fast(highest[g] - top); /* 0 for a group without positions */
        total = fmaf(sum[g], factor, total);
        result = fmaf(out[g][threadIdx.x], factor, result);
    }
    a.out[(row * a.heads + head) * a.head_dim + threadIdx.x] = __float2bfloat16_rn(result / total);
}

static enum status attention_cached(struct backend *b, void *out, void *cache, const void *qkv,
    struct attention_shape shape, int past, int capacity) {
    if (shape.head_dim % 8 != 0 || shape.head_dim > MOST_HEAD_DIM) {
        return fail("generation on the GPU: heads of %d channels are not a multiple of 8 up to %d",
            shape.head_dim, (int)MOST_HEAD_DIM);
    }
    struct cached_arguments a = {(bf16 *)out, (bf16 *)cache, (const bf16 *)qkv, shape.seq_len, shape.heads,
        shape.kv_heads, shape.head_dim, past, capacity, 1.4426950408889634f / sqrtf((float)shape.head_dim)};
    dim3 grid((unsigned)shape.heads, (unsigned)(shape.batch * shape.seq_len));
    struct launch_shape how = {"attention over the cache", grid, DECODE_THREADS};
    return shape.head_dim <= 8 * 4    ? launch(b, how, attention_cached_kernel<4>, a)
           : shape.head_dim <= 8 * 8  ? launch(b, how, attention_cached_kernel<8>, a)
           : shape.head_dim <= 8 * 16 ? launch(b, how, attention_cached_kernel<16>, a)
                                      : launch(b, how, attention_cached_kernel<32>, a);
}

void cuda_decode_install(struct backend *b) {
    b->attention_cached = attention_cached;
}
