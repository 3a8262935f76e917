/* Token and position embedding.

   Forward: a block adds FORWARD_ROWS rows; its threads go along the channels, eight in each access. Bytes moved: the
   rows of the token table read, the output written; the position table stays in L2.

   Backward of the positions: a thread owns eight channels of one position and adds over the batch.

   Backward of the tokens must add rows of d_out that have the same token, in a fixed order, however often a token
   comes. The token positions are sorted by token (a stable radix sort on the device, so equal tokens keep their
   order), and the sorted list is cut into pieces of PIECE entries, however long the runs of equal tokens are:

       sorted tokens   3 3 3 7 | 7 7 7 7 | 7 7 9 9 | 9 12 ...        pieces of 4 here
       sums            3       | - - - - | - -     |    12           runs inside one piece: added to the table at once
       partial sums          7 | 7       | 7   9   | 9               runs that cross: one partial sum a piece

   A second kernel adds the partial sums of each crossing run, in order, to the table. Bytes moved: d_out read once,
   each touched row of the table read and written once, at most two partial rows for PIECE rows of d_out. */
#include "cuda.cuh"

enum { FORWARD_ROWS = 4, PIECE = 32, CHANNEL_THREADS = 256 };

/* Threads along the channels: as few slabs of at most CHANNEL_THREADS as cover them, of equal size. */
static unsigned channel_threads(int channels) {
    int64_t slabs = ceil_div(channels / 8, CHANNEL_THREADS);
    return (unsigned)round_up(ceil_div(channels / 8, slabs), 32);
}

/* ---- forward ---- */

__global__ void embedding_forward_kernel(bf16 *out, const int32_t *tokens, const bf16 *token_table,
    const bf16 *position_table, int64_t rows, int seq_len, int channels) {
    int64_t first = (int64_t)blockIdx.x * FORWARD_ROWS;
    for (int c = 8 * threadIdx.x; c < channels; c += 8 * blockDim.x) {
        uint4 token[FORWARD_ROWS], position[FORWARD_ROWS];
#pragma unroll
        for (int r = 0; r < FORWARD_ROWS; r++) {
            if (first + r < rows) {
                token[r] = load16(token_table + (int64_t)tokens[first + r] * channels + c);
                position[r] = load16(position_table + (first + r) % seq_len * channels + c);
            }
        }
#pragma unroll
        for (int r = 0; r < FORWARD_ROWS; r++) {
            if (first + r < rows) {
                float sum[8], addend[8];
                unpack8(sum, token[r]);
                unpack8(addend, position[r]);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum[i] += addend[i];
                }
                store16(out + (first + r) * channels + c, pack8(sum));
            }
        }
    }
}

static enum status embedding_forward(struct backend *b, void *out, const int32_t *tokens,
    const void *token_table, const void *position_table, int batch, int seq_len, int channels) {
    CHECK(check_channels("embedding", channels));
    int64_t rows = (int64_t)batch * seq_len;
    return launch(b, {"embedding", (unsigned)ceil_div(rows, FORWARD_ROWS), channel_threads(channels)},
        embedding_forward_kernel, (bf16 *)out, tokens, (const bf16 *)token_table,
        (const bf16 *)position_table, rows, seq_len, channels);
}

/* ---- backward of the positions ---- */

__global__ void position_backward_kernel(
    struct tensor d_position_table, const bf16 *d_out, int batch, int64_t elements, bool accumulate) {
    int64_t at = 8 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x); /* in (T,C) */
    if (at >= elements) {
        return;
    }
    float sum[8] = {};
#pragma unroll 8
    for (int i = 0; i < batch; i++) {
        float value[8];
        unpack8(value, load16(d_out + i * elements + at));
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum[j] += value[j];
        }
    }
    gradient_store8(d_position_table, at, sum, accumulate);
}

/* ---- the sort: least significant digit first, one digit a pass, one token a thread ---- */

enum { DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS, SORT_TILE = 1024, SORT_WARPS = SORT_TILE / 32 };

__device__ inline int digit_of(const int32_t *keys, int i, int count, int shift) {
    /* threads past the end count as the last digit: they come after all others and write nothing */
    return i < count ? (keys[i] >> shift) & (DIGITS - 1) : DIGITS - 1;
}

/* counts (DIGITS, tiles): how often each digit comes in each tile */
__global__ void sort_count_kernel(int *counts, const int32_t *keys, int count, int shift) {
    __shared__ int tile_count[DIGITS];
    if (threadIdx.x < DIGITS) {
        tile_count[threadIdx.x] = 0;
    }
    __syncthreads();
    int i = blockIdx.x * SORT_TILE + threadIdx.x;
    if (i < count) {
        atomicAdd(&tile_count[digit_of(keys, i, count, shift)], 1);
    }
    __syncthreads();
    if (threadIdx.x < DIGITS) {
        counts[threadIdx.x * gridDim.x + blockIdx.x] = tile_count[threadIdx.x];
    }
}

/* One block: counts become the places where each digit of each tile begins (an exclusive prefix sum). */
__global__ void sort_scan_kernel(int *counts, int total) {
    __shared__ int warp_total[SORT_WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, carry = 0;
    for (int base = 0; base < total; base += SORT_TILE) {
        int i = base + threadIdx.x;
        int own = i < total ? counts[i] : 0, sum = own;
        for (int offset = 1; offset < 32; offset *= 2) {
            int below = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
            sum += lane >= offset ? below : 0;
        }
        if (lane == 31) {
            warp_total[warp] = sum;
        }
        __syncthreads();
        int before = 0, all = 0;
        for (int w = 0; w < SORT_WARPS; w++) {
            before += w < warp ? warp_total[w] : 0;
            all += warp_total[w];
        }
        if (i < total) {
            counts[i] = carry + before + sum - own;
        }
        carry += all;
        __syncthreads();
    }
}

/* Moves each key and its token position to its place. order_in NULL: the positions are 0, 1, 2, ... */
__global__ void sort_scatter_kernel(int32_t *keys_out, int *order_out, const int32_t *keys_in,
    const int *order_in, const int *places, int count, int shift) {
    __shared__ int warp_place[SORT_WARPS][DIGITS]; /* counts, then places, of each digit in each warp */
    int i = blockIdx.x * SORT_TILE + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int j = threadIdx.x; j < SORT_WARPS * DIGITS; j += SORT_TILE) {
        (&warp_place[0][0])[j] = 0;
    }
    __syncthreads();
    int digit = digit_of(keys_in, i, count, shift);
    unsigned same = __match_any_sync(0xFFFFFFFFu, digit);
    int rank = __popc(same & ((1u << lane) - 1));
    if (rank == 0) {
        warp_place[warp][digit] = __popc(same);
    }
    __syncthreads();
    if (threadIdx.x < DIGITS) {
        int place = places[threadIdx.x * gridDim.x + blockIdx.x];
        for (int w = 0; w < SORT_WARPS; w++) {
            int next = place + warp_place[w][threadIdx.x];
            warp_place[w][threadIdx.x] = place;
            place = next;
        }
    }
    __syncthreads();
    if (i < count) {
        int place = warp_place[warp][digit] + rank;
        keys_out[place] = keys_in[i];
        order_out[place] = order_in != NULL ? order_in[i] : i;
    }
}

/* ---- backward of the tokens ---- */

struct sorted_tokens {
    const int32_t *token; /* ascending */
    const int *position;  /* row of d_out */
    int count;
};

__device__ inline int piece_end(struct sorted_tokens s, int piece) {
    return min((piece + 1) * PIECE, s.count);
}
/* Whether the piece's first / last run goes on in the piece before / after. */
__device__ inline bool enters(struct sorted_tokens s, int piece) {
    int begin = piece * PIECE;
    return begin > 0 && s.token[begin - 1] == s.token[begin];
}
__device__ inline bool leaves(struct sorted_tokens s, int piece) {
    int end = piece_end(s, piece);
    return end < s.count && s.token[end - 1] == s.token[end];
}

/* partials (pieces, 2, C): of the run that enters a piece, and of the one that begins in it and leaves it */
__global__ void token_runs_kernel(
    struct tensor d_token_table, float *partials, const bf16 *d_out, struct sorted_tokens s, int channels) {
    enum { AHEAD = 8 }; /* rows loaded before the first is used */
    int c = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= channels) {
        return;
    }
    int piece = blockIdx.x, begin = piece * PIECE, end = piece_end(s, piece);
    bool run_enters = enters(s, piece);
    float sum[8] = {};
    for (int group = begin; group < end; group += AHEAD) {
        uint4 row[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (group + j < end) {
                row[j] = load16(d_out + (int64_t)s.position[group + j] * channels + c);
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            int i = group + j;
            if (i >= end) {
                break;
            }
            float value[8];
            unpack8(value, row[j]);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                sum[k] += value[k];
            }
            bool goes_on = i + 1 < s.count && s.token[i + 1] == s.token[i];
            if (goes_on && i + 1 < end) {
                continue;
            }
            if (run_enters || goes_on) {
                struct tensor partial = {partials, DTYPE_F32};
                gradient_store8(
                    partial, ((int64_t)2 * piece + (run_enters ? 0 : 1)) * channels + c, sum, false);
            } else {
                gradient_store8(d_token_table, (int64_t)s.token[i] * channels + c, sum, true);
            }
            run_enters = false;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                sum[k] = 0.0f;
            }
        }
    }
}

enum { CROSSING_ROWS = 8 };

/* The block of the piece where a crossing run begins adds it up: each of its warps takes every CROSSING_ROWS-th partial
   sum of 256 channels, then the warps' sums are added in order. */
__global__ void token_crossing_runs_kernel(
    struct tensor d_token_table, const float *partials, struct sorted_tokens s, int channels) {
    __shared__ float sums[CROSSING_ROWS][32][8];
    int piece = blockIdx.x, c = 8 * (blockIdx.y * 32 + threadIdx.x), end = piece_end(s, piece);
    int32_t token = s.token[end - 1];
    if (!leaves(s, piece) || (enters(s, piece) && s.token[piece * PIECE] == token)) {
        return; /* the whole block */
    }
    int last = end, beyond = s.count; /* the run's last entry is in [last, beyond) */
    while (beyond - last > 1) {
        int middle = last + (beyond - last) / 2;
        if (s.token[middle] == token) {
            last = middle;
        } else {
            beyond = middle;
        }
    }
    float sum[8] = {};
    if (c < channels) {
        /* slot 1 of the piece where it begins, slot 0 of the others */
#pragma unroll 4
        for (int i = piece + (int)threadIdx.y; i <= last / PIECE; i += CROSSING_ROWS) {
            float value[8];
            load8(value, partials + ((int64_t)2 * i + (i == piece ? 1 : 0)) * channels + c);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                sum[k] += value[k];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        sums[threadIdx.y][threadIdx.x][k] = sum[k];
    }
    __syncthreads();
    if (threadIdx.y == 0 && c < channels) {
        for (int row = 1; row < CROSSING_ROWS; row++) {
#pragma unroll
            for (int k = 0; k < 8; k++) {
                sum[k] += sums[row][threadIdx.x][k];
            }
        }
        gradient_store8(d_token_table, (int64_t)token * channels + c, sum, true);
    }
}

/* Scratch memory of the backward pass, in this order. */
struct backward_scratch {
    int32_t *token[2]; /* (N) each: a pass of the sort reads one and writes the other */
    int *position[2];  /* (N) each */
    int *places;       /* (DIGITS, tiles) */
    float *partials;   /* (pieces, 2, C) */
};

static enum status reserve_scratch(struct backend *b, struct backward_scratch *out, int count, int channels) {
    size_t list = (size_t)round_up(count, 64) * sizeof(int32_t);
    size_t places = (size_t)ceil_div(count, SORT_TILE) * DIGITS * sizeof(int);
    size_t partials = (size_t)ceil_div(count, PIECE) * 2 * (size_t)channels * sizeof(float);
    void *memory;
    CHECK(scratch_reserve(b, &memory, 4 * list + places + partials));
    char *at = (char *)memory;
    for (int i = 0; i < 2; i++) {
        out->token[i] = (int32_t *)(at + (size_t)i * list);
        out->position[i] = (int *)(at + (size_t)(2 + i) * list);
    }
    out->places = (int *)(at + 4 * list);
    out->partials = (float *)(at + 4 * list + places);
    return STATUS_OK;
}

static enum status sort_tokens(struct backend *b, struct sorted_tokens *out, struct backward_scratch scratch,
    const int32_t *tokens, int count, int vocab_size) {
    unsigned tiles = (unsigned)ceil_div(count, SORT_TILE);
    const int32_t *keys = tokens;
    const int *positions = NULL;
    int to = 0;
    for (int shift = 0; shift == 0 || (shift < 31 && (vocab_size - 1) >> shift > 0); shift += DIGIT_BITS) {
        struct launch_shape shape = {"embedding backward's sort", tiles, SORT_TILE};
        CHECK(launch(b, shape, sort_count_kernel, scratch.places, keys, count, shift));
        CHECK(launch(b, {shape.op, 1, SORT_TILE}, sort_scan_kernel, scratch.places, (int)tiles * DIGITS));
        CHECK(launch(b, shape, sort_scatter_kernel, scratch.token[to], scratch.position[to], keys, positions,
            scratch.places, count, shift));
        keys = scratch.token[to];
        positions = scratch.position[to];
        to = 1 - to;
    }
    out->token = keys;
    out->position = positions;
    out->count = count;
    return STATUS_OK;
}

static enum status embedding_backward(struct backend *b, struct tensor d_token_table,
    struct tensor d_position_table, const void *d_out, const int32_t *tokens, int batch, int seq_len,
    int channels, int vocab_size, bool accumulate_position) {
    CHECK(check_channels("embedding", channels));
    int64_t rows = (int64_t)batch * seq_len;
    if (rows > INT32_MAX / 2) {
        return fail("embedding on the GPU: %lld tokens in a micro-batch are too many", (long long)rows);
    }
    int64_t positions = (int64_t)seq_len * channels;
    CHECK(launch(b, {"embedding backward of positions", (unsigned)ceil_div(positions, 8 * 128), 128},
        position_backward_kernel, d_position_table, (const bf16 *)d_out, batch, positions,
        accumulate_position));

    struct backward_scratch scratch;
    struct sorted_tokens sorted;
    CHECK(reserve_scratch(b, &scratch, (int)rows, channels));
    CHECK(sort_tokens(b, &sorted, scratch, tokens, (int)rows, vocab_size));
    unsigned threads = channel_threads(channels);
    dim3 grid((unsigned)ceil_div(rows, PIECE), (unsigned)ceil_div(channels, 8 * threads));
    CHECK(launch(b, {"embedding backward", grid, threads}, token_runs_kernel, d_token_table, scratch.partials,
        (const bf16 *)d_out, sorted, channels));
    dim3 crossing_grid(grid.x, (unsigned)ceil_div(channels, 8 * 32));
    return launch(b, {"embedding backward", crossing_grid, dim3(32, CROSSING_ROWS)},
        token_crossing_runs_kernel, d_token_table, scratch.partials, sorted, channels);
}

void cuda_embedding_install(struct backend *b) {
    b->embedding_forward = embedding_forward;
    b->embedding_backward = embedding_backward;
}
