/* Attention as its definition reads, in float64 on the CPU: what every other kernel is held against.

   One row of scores at a time. Forward, for query i:    s_j = scale * q_i . k_j over the visible keys j,
   lse = max + log(sum exp(s_j - max)), o_i = sum_j exp(s_j - lse) v_j.
   Backward, with p_j = exp(s_j - lse) and D = do_i . o_i = sum_j p_j dp_j:
   dp_j = do_i . v_j, ds_j = p_j (dp_j - D), dq_i += scale ds_j k_j, dk_j += scale ds_j q_i, dv_j += p_j do_i. */
#include "attention/kernel.h"

#include <math.h>
#include <stdlib.h>

static double *row_of(const struct attention_tensor *t, int64_t batch, int64_t position, int64_t head) {
    return (double *)t->data + batch * t->batch_stride + position * t->seq_stride + head * t->head_stride;
}

static double dot(const double *a, const double *b, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

static void add_scaled(double *to, double factor, const double *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        to[i] += factor * from[i];
    }
}

static void clear(double *row, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        row[i] = 0;
    }
}

/* How many keys query i sees. */
static int64_t visible_keys(const struct attention_params *p, int64_t i) {
    int64_t visible = p->causal ? i + 1 + p->seqlen_k - p->seqlen_q : p->seqlen_k;
    return max_i64(visible, 0);
}

static void scores(double *s, const struct attention_params *p, int64_t b, int64_t i, int64_t h) {
    int64_t kv_head = h / (p->heads / p->kv_heads);
    const double *q = row_of(&p->q, b, i, h);
    for (int64_t j = 0; j < visible_keys(p, i); j++) {
        s[j] = p->scale * dot(q, row_of(&p->k, b, j, kv_head), p->head_dim);
    }
}

/* One query row forward; s is scratch for seqlen_k scores. */
static void forward_row(double *s, const struct attention_params *p, int64_t b, int64_t h, int64_t i) {
    int64_t visible = visible_keys(p, i), kv_head = h / (p->heads / p->kv_heads);
    double *o = row_of(&p->o, b, i, h), *lse = (double *)p->lse + (b * p->heads + h) * p->seqlen_q + i;
    scores(s, p, b, i, h);
    clear(o, p->head_dim);
    double max = -INFINITY, sum = 0;
    for (int64_t j = 0; j < visible; j++) {
        max = fmax(max, s[j]);
    }
    for (int64_t j = 0; j < visible; j++) {
        sum += exp(s[j] - max);
    }
    *lse = visible == 0 ? -INFINITY : max + log(sum);
    for (int64_t j = 0; j < visible; j++) {
        add_scaled(o, exp(s[j] - *lse), row_of(&p->v, b, j, kv_head), p->head_dim);
    }
}

/* One query row backward: writes its dq, adds to dk and dv. */
static void backward_row(double *s, const struct attention_params *p, int64_t b, int64_t h, int64_t i) {
    int64_t kv_head = h / (p->heads / p->kv_heads), dim = p->head_dim;
    const double *q = row_of(&p->q, b, i, h), *d_o = row_of(&p->d_o, b, i, h);
    double *dq = row_of(&p->dq, b, i, h);
    double lse = ((double *)p->lse)[(b * p->heads + h) * p->seqlen_q + i];
    double row_sum = dot(d_o, row_of(&p->o, b, i, h), dim);
    scores(s, p, b, i, h);
    clear(dq, dim);
    for (int64_t j = 0; j < visible_keys(p, i); j++) {
        double probability = exp(s[j] - lse);
        double dp = dot(d_o, row_of(&p->v, b, j, kv_head), dim);
        double ds = p->scale * probability * (dp - row_sum);
        add_scaled(dq, ds, row_of(&p->k, b, j, kv_head), dim);
        add_scaled(row_of(&p->dk, b, j, kv_head), ds, q, dim);
        add_scaled(row_of(&p->dv, b, j, kv_head), probability, d_o, dim);
    }
}

enum status attention_reference_forward(const struct attention_params *p) {
    CHECK(attention_reference_check(p, false));
    double *s;
    CHECK(ALLOCATE(s, p->seqlen_k));
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t h = 0; h < p->heads; h++) {
            for (int64_t i = 0; i < p->seqlen_q; i++) {
                forward_row(s, p, b, h, i);
            }
        }
    }
    free(s);
    return STATUS_OK;
}

enum status attention_reference_backward(const struct attention_params *p) {
    CHECK(attention_reference_check(p, true));
    double *s;
    CHECK(ALLOCATE(s, p->seqlen_k));
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t h = 0; h < p->kv_heads; h++) {
            for (int64_t j = 0; j < p->seqlen_k; j++) {
                clear(row_of(&p->dk, b, j, h), p->head_dim);
                clear(row_of(&p->dv, b, j, h), p->head_dim);
            }
        }
        for (int64_t h = 0; h < p->heads; h++) {
            for (int64_t i = 0; i < p->seqlen_q; i++) {
                backward_row(s, p, b, h, i);
            }
        }
    }
    free(s);
    return STATUS_OK;
}
