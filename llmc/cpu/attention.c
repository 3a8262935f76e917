/* Causal attention over packed qkv (B,T,Hq+2Hkv,D): query heads first, then keys, then values. Scores exist only as
   blocks of ATTENTION_ROWS queries x ATTENTION_COLUMNS keys in a thread's scratch.

   Forward (Milakov and Gimelshein 2018; Dao et al. 2022): one task a row block of one head. Over its column blocks it
   keeps per row the running maximum m and sum l of exponentials, scales what the output has so far by
   exp(m_old - m_new), adds P V, and divides by l at the end; logsumexp = m + log l.

   Backward: one task a key/value head with the query heads that share it, so that dK and dV have one writer:
     P = exp(scale S - logsumexp), dP = dO V^T, dS = scale P (dP - rowsum(dO O))
     dV += P^T dO, dK += dS^T Q, dQ += dS K

   With a cache, forward is the same over keys and values that lie there: bit for bit (but for OpenBLAS' products),
   wherever the new tokens begin. */
#include "cpu.h"

/* One head of one sequence: element (t, d) is data[t * stride + d]. */
struct head {
    int64_t offset, stride;
};

static int64_t packed_stride(const struct attention_shape *s) {
    return (int64_t)(s->heads + 2 * s->kv_heads) * s->head_dim;
}
/* Head `index` of the packed tensor, counted over queries, keys and values. */
static struct head packed_head(const struct attention_shape *s, int64_t batch, int64_t index) {
    int64_t stride = packed_stride(s);
    struct head head = {batch * s->seq_len * stride + index * s->head_dim, stride};
    return head;
}
static struct head output_head(const struct attention_shape *s, int64_t batch, int64_t index) {
    int64_t stride = (int64_t)s->heads * s->head_dim;
    struct head head = {batch * s->seq_len * stride + index * s->head_dim, stride};
    return head;
}
static struct head key_head(const struct attention_shape *s, int64_t batch, int64_t query_head) {
    return packed_head(s, batch, s->heads + query_head / (s->heads / s->kv_heads));
}
static struct head value_head(const struct attention_shape *s, int64_t batch, int64_t query_head) {
    return packed_head(s, batch, s->heads + s->kv_heads + query_head / (s->heads / s->kv_heads));
}
/* Rows from `row` of a head, as a matrix. */
static struct matrix head_rows(const real *data, struct head head, int64_t row, bool transposed) {
    struct matrix m = {data + head.offset + row * head.stride, head.stride, transposed};
    return m;
}
static struct matrix scores_matrix(const real *scores, bool transposed) {
    struct matrix m = {scores, ATTENTION_COLUMNS, transposed};
    return m;
}

/* ---- forward ---- */

/* Turns a block of scores into exponentials and brings m, l and the output so far to the new maximum. Row i may see
   the block's first visible + i columns, which are none where the block lies after it; never in the first block. */
static void softmax_block(struct scratch *scratch, real *out, int64_t out_stride, int64_t rows,
    int64_t columns, int64_t visible, int head_dim, real scale, bool first) {
    for (int64_t i = 0; i < rows; i++) {
        real *row = scratch->scores + i * ATTENTION_COLUMNS;
        int64_t count = max_i64(0, min_i64(columns, visible + i));
        real block_max = max_row(row, count) * scale;
        real old_max = scratch->row_max[i], new_max = !first && old_max > block_max ? old_max : block_max;
        for (int64_t j = 0; j < count; j++) {
            row[j] = exp_real(row[j] * scale - new_max);
        }
        for (int64_t j = count; j < columns; j++) {
            row[j] = 0;
        }
        real sum = sum_row(row, count);
        if (!first) {
            real correction = exp_real(old_max - new_max);
            sum += scratch->row_sum[i] * correction;
            for (int d = 0; d < head_dim; d++) {
                out[i * out_stride + d] *= correction;
            }
        }
        scratch->row_max[i] = new_max;
        scratch->row_sum[i] = sum;
    }
}

/* Keys or values of one head from the first position on, and its queries and output from the block's first row on. */
struct forward_task {
    struct matrix query, key, value;
    real *out;
    int64_t out_stride;
    int64_t row, rows; /* positions of the queries */
    int head_dim;
};

/* Leaves the maximum and the sum of exponentials of every row in the scratch. */
static void forward_rows(struct scratch *scratch, const struct forward_task *t) {
    struct matrix key = t->key, value = t->value;
    real scale = 1 / (real)sqrt((double)t->head_dim);
    for (int64_t column = 0; column < t->row + t->rows; column += ATTENTION_COLUMNS) {
        int64_t columns = min_i64(ATTENTION_COLUMNS, t->row + t->rows - column);
        key.data = t->key.data + column * key.stride;
        value.data = t->value.data + column * value.stride;
        gemm_serial(
            scratch, scratch->scores, ATTENTION_COLUMNS, t->query, key, t->rows, columns, t->head_dim, false);
        softmax_block(scratch, t->out, t->out_stride, t->rows, columns, t->row - column + 1, t->head_dim,
            scale, column == 0);
        gemm_serial(scratch, t->out, t->out_stride, scores_matrix(scratch->scores, false), value, t->rows,
            t->head_dim, columns, column > 0);
    }
    for (int64_t i = 0; i < t->rows; i++) {
        real factor = 1 / scratch->row_sum[i];
        for (int d = 0; d < t->head_dim; d++) {
            t->out[i * t->out_stride + d] *= factor;
        }
    }
}

static enum status attention_forward(struct backend *b, void *out, void *logsumexp, void *saved,
    void *workspace, const void *qkv, struct attention_shape shape) {
    (void)saved;
    (void)workspace;
    int64_t blocks = ceil_div(shape.seq_len, ATTENTION_ROWS);
    int64_t tasks = (int64_t)shape.batch * shape.heads * blocks;
    use_threads(b);
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t row = task % blocks * ATTENTION_ROWS, head = task / blocks % shape.heads,
                batch = task / blocks / shape.heads;
        struct head output = output_head(&shape, batch, head);
        struct forward_task t = {head_rows(qkv, packed_head(&shape, batch, head), row, false),
            head_rows(qkv, key_head(&shape, batch, head), 0, true),
            head_rows(qkv, value_head(&shape, batch, head), 0, false),
            (real *)out + output.offset + row * output.stride, output.stride, row,
            min_i64(ATTENTION_ROWS, shape.seq_len - row), shape.head_dim};
        struct scratch *scratch = thread_scratch(b);
        forward_rows(scratch, &t);
        for (int64_t i = 0; i < t.rows; i++) {
            ((real *)logsumexp)[(batch * shape.heads + head) * shape.seq_len + row + i] =
                scratch->row_max[i] + (real)log(scratch->row_sum[i]);
        }
    }
    return STATUS_OK;
}

/* ---- forward with a cache ---- */

/* Copies the new keys and values of one sequence and key/value head. */
static void put_into_cache(real *cache, const real *qkv, const struct attention_shape *s, int64_t batch,
    int64_t kv_head, int64_t past, int64_t capacity) {
    for (int64_t part = 0; part < 2; part++) {
        struct head from = packed_head(s, batch, s->heads + part * s->kv_heads + kv_head);
        real *to = cache + (((batch * 2 + part) * s->kv_heads + kv_head) * capacity + past) * s->head_dim;
        for (int64_t t = 0; t < s->seq_len; t++) {
            memcpy(to + t * s->head_dim, qkv + from.offset + t * from.stride,
                (size_t)s->head_dim * sizeof(real));
        }
    }
}

static enum status attention_cached(struct backend *b, void *out, void *cache, const void *qkv,
    struct attention_shape shape, int past, int capacity) {
    int64_t blocks = ceil_div(shape.seq_len, ATTENTION_ROWS);
    int64_t tasks = (int64_t)shape.batch * shape.heads * blocks;
    use_threads(b);
#pragma omp parallel for
    for (int64_t task = 0; task < (int64_t)shape.batch * shape.kv_heads; task++) {
        put_into_cache(cache, qkv, &shape, task / shape.kv_heads, task % shape.kv_heads, past, capacity);
    }
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t row = task % blocks * ATTENTION_ROWS, head = task / blocks % shape.heads,
                batch = task / blocks / shape.heads;
        int64_t kv_head = head / (shape.heads / shape.kv_heads);
        int64_t cached_head = (int64_t)capacity * shape.head_dim; /* elements */
        const real *keys = (const real *)cache + (batch * 2 * shape.kv_heads + kv_head) * cached_head;
        struct head output = output_head(&shape, batch, head);
        struct forward_task t = {head_rows(qkv, packed_head(&shape, batch, head), row, false),
            {keys, shape.head_dim, true}, {keys + shape.kv_heads * cached_head, shape.head_dim, false},
            (real *)out + output.offset + row * output.stride, output.stride, past + row,
            min_i64(ATTENTION_ROWS, shape.seq_len - row), shape.head_dim};
        forward_rows(thread_scratch(b), &t);
    }
    return STATUS_OK;
}

/* ---- backward ---- */

struct backward_tensors {
    real *d_qkv;
    const real *d_out, *out, *logsumexp, *qkv;
};

/* scores: S -> P; d_scores: dP -> dS. row_sum holds rowsum(dO O). Masked places become 0 in both. */
static void score_gradients(struct scratch *scratch, const real *logsumexp, int64_t rows, int64_t columns,
    int64_t visible, real scale) {
    for (int64_t i = 0; i < rows; i++) {
        real *p = scratch->scores + i * ATTENTION_COLUMNS, *d = scratch->d_scores + i * ATTENTION_COLUMNS;
        int64_t count = max_i64(0, min_i64(columns, visible + i));
        real lse = logsumexp[i], delta = scratch->row_sum[i];
        for (int64_t j = 0; j < count; j++) {
            p[j] = exp_real(p[j] * scale - lse);
            d[j] = p[j] * (d[j] - delta) * scale;
        }
        for (int64_t j = count; j < columns; j++) {
            p[j] = 0;
            d[j] = 0;
        }
    }
}

/* One row block of one query head: writes its dQ, adds to dK and dV. */
static void backward_rows(struct scratch *scratch, const struct backward_tensors *t,
    const struct attention_shape *s, int64_t batch, int64_t query_head, int64_t row) {
    int64_t rows = min_i64(ATTENTION_ROWS, s->seq_len - row);
    int dim = s->head_dim;
    struct head query = packed_head(s, batch, query_head), key = key_head(s, batch, query_head),
                value = value_head(s, batch, query_head), output = output_head(s, batch, query_head);
    struct matrix d_out = head_rows(t->d_out, output, row, false),
                  out = head_rows(t->out, output, row, false);
    struct matrix scores = scores_matrix(scratch->scores, true),
                  d_scores = scores_matrix(scratch->d_scores, false), d_scores_t = d_scores;
    d_scores_t.transposed = true;
    const real *logsumexp = t->logsumexp + (batch * s->heads + query_head) * s->seq_len + row;
    real scale = 1 / (real)sqrt((double)dim);
    for (int64_t i = 0; i < rows; i++) {
        scratch->row_sum[i] = dot_rows(d_out.data + i * d_out.stride, out.data + i * out.stride, dim);
    }
    for (int64_t column = 0; column < row + rows; column += ATTENTION_COLUMNS) {
        int64_t columns = min_i64(ATTENTION_COLUMNS, row + rows - column);
        gemm_serial(scratch, scratch->scores, ATTENTION_COLUMNS, head_rows(t->qkv, query, row, false),
            head_rows(t->qkv, key, column, true), rows, columns, dim, false);
        gemm_serial(scratch, scratch->d_scores, ATTENTION_COLUMNS, d_out,
            head_rows(t->qkv, value, column, true), rows, columns, dim, false);
        score_gradients(scratch, logsumexp, rows, columns, row - column + 1, scale);
        gemm_serial(scratch, t->d_qkv + value.offset + column * value.stride, value.stride, scores, d_out,
            columns, dim, rows, true);
        gemm_serial(scratch, t->d_qkv + key.offset + column * key.stride, key.stride, d_scores_t,
            head_rows(t->qkv, query, row, false), columns, dim, rows, true);
        gemm_serial(scratch, t->d_qkv + query.offset + row * query.stride, query.stride, d_scores,
            head_rows(t->qkv, key, column, false), rows, dim, columns, column > 0);
    }
}

static void zero_head(real *data, struct head head, const struct attention_shape *s) {
    for (int64_t row = 0; row < s->seq_len; row++) {
        memset(data + head.offset + row * head.stride, 0, (size_t)s->head_dim * sizeof(real));
    }
}

static enum status attention_backward(struct backend *b, void *d_qkv, void *workspace, const void *d_out,
    const void *out, const void *logsumexp, const void *saved, const void *qkv,
    struct attention_shape shape) {
    (void)saved;
    (void)workspace;
    struct backward_tensors tensors = {d_qkv, d_out, out, logsumexp, qkv};
    int group = shape.heads / shape.kv_heads;
    int64_t tasks = (int64_t)shape.batch * shape.kv_heads;
    use_threads(b);
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t batch = task / shape.kv_heads, first_head = task % shape.kv_heads * group;
        zero_head(d_qkv, key_head(&shape, batch, first_head), &shape);
        zero_head(d_qkv, value_head(&shape, batch, first_head), &shape);
        for (int64_t head = first_head; head < first_head + group; head++) {
            for (int64_t row = 0; row < shape.seq_len; row += ATTENTION_ROWS) {
                backward_rows(thread_scratch(b), &tensors, &shape, batch, head, row);
            }
        }
    }
    return STATUS_OK;
}

void attention_install(struct backend *b) {
    b->attention_forward = attention_forward;
    b->attention_backward = attention_backward;
    b->attention_cached = attention_cached;
}
