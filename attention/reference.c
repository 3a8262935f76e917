/* Attention as its definition reads, in float64 on the CPU: what every other kernel is held against.

   With s_ij = scale q_i . k_j and p_ij = exp(s_ij - lse_i) where query i sees key j, and 0 elsewhere:
     lse_i = log sum_j exp(s_ij)           o_i  = sum_j p_ij v_j
     D_i   = do_i . o_i                    ds_ij = p_ij (do_i . v_j - D_i)
     dq_i  = scale sum_j ds_ij k_j         dk_j = scale sum_i ds_ij q_i         dv_j = sum_i p_ij do_i
   Every row of every result is computed on its own, so all of them can be at once. */
#include "attention/kernel.h"

#include <math.h>
#include <stdlib.h>

static double *row_of(const struct attention_tensor *t, int64_t batch, int64_t position, int64_t head) {
    return (double *)t->data + batch * t->batch_stride + position * t->seq_stride + head * t->head_stride;
}

static double dot(const double *a, const double *b, int64_t count) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
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

static int64_t group_of(const struct attention_params *p) {
    return p->heads / p->kv_heads;
}

/* How many keys query i sees: keys 0 to this. */
static int64_t visible_keys(const struct attention_params *p, int64_t i) {
    int64_t visible = p->causal ? i + 1 + p->seqlen_k - p->seqlen_q : p->seqlen_k;
    return max_i64(visible, 0);
}

/* The first query that sees key j: it and all after it do. */
static int64_t first_seeing(const struct attention_params *p, int64_t j) {
    return p->causal ? max_i64(j + p->seqlen_q - p->seqlen_k, 0) : 0;
}

static int64_t statistic_index(const struct attention_params *p, int64_t b, int64_t h, int64_t i) {
    return (b * p->heads + h) * p->seqlen_q + i;
}

static double score(const struct attention_params *p, int64_t b, int64_t h, int64_t i, int64_t j) {
    return p->scale * dot(row_of(&p->q, b, i, h), row_of(&p->k, b, j, h / group_of(p)), p->head_dim);
}

/* Sums relative to the largest score so far: nothing overflows. */
static double logsumexp(const struct attention_params *p, int64_t b, int64_t h, int64_t i) {
    double max = -INFINITY, sum = 0;
    for (int64_t j = 0; j < visible_keys(p, i); j++) {
        double s = score(p, b, h, i, j);
        if (s > max) {
            sum *= exp(max - s);
            max = s;
        }
        sum += exp(s - max);
    }
    return visible_keys(p, i) == 0 ? -INFINITY : max + log(sum);
}

static void forward_query(const struct attention_params *p, int64_t b, int64_t h, int64_t i) {
    double lse = logsumexp(p, b, h, i), *o = row_of(&p->o, b, i, h);
    ((double *)p->lse)[statistic_index(p, b, h, i)] = lse;
    clear(o, p->head_dim);
    for (int64_t j = 0; j < visible_keys(p, i); j++) {
        add_scaled(o, exp(score(p, b, h, i, j) - lse), row_of(&p->v, b, j, h / group_of(p)), p->head_dim);
    }
}

/* p_ij, and with it ds_ij */
static double probability(const struct attention_params *p, const double *row_sums, int64_t b, int64_t h,
    int64_t i, int64_t j, double *ds) {
    int64_t row = statistic_index(p, b, h, i);
    double weight = exp(score(p, b, h, i, j) - ((double *)p->lse)[row]);
    double dp = dot(row_of(&p->d_o, b, i, h), row_of(&p->v, b, j, h / group_of(p)), p->head_dim);
    *ds = weight * (dp - row_sums[row]);
    return weight;
}

static void backward_query(
    const struct attention_params *p, const double *row_sums, int64_t b, int64_t h, int64_t i) {
    double *dq = row_of(&p->dq, b, i, h), ds;
    clear(dq, p->head_dim);
    for (int64_t j = 0; j < visible_keys(p, i); j++) {
        probability(p, row_sums, b, h, i, j, &ds);
        add_scaled(dq, p->scale * ds, row_of(&p->k, b, j, h / group_of(p)), p->head_dim);
    }
}

static void backward_key(
    const struct attention_params *p, const double *row_sums, int64_t b, int64_t kv_head, int64_t j) {
    double *dk = row_of(&p->dk, b, j, kv_head), *dv = row_of(&p->dv, b, j, kv_head), ds;
    clear(dk, p->head_dim);
    clear(dv, p->head_dim);
    for (int64_t h = kv_head * group_of(p); h < (kv_head + 1) * group_of(p); h++) {
        for (int64_t i = first_seeing(p, j); i < p->seqlen_q; i++) {
            double weight = probability(p, row_sums, b, h, i, j, &ds);
            add_scaled(dk, p->scale * ds, row_of(&p->q, b, i, h), p->head_dim);
            add_scaled(dv, weight, row_of(&p->d_o, b, i, h), p->head_dim);
        }
    }
}

enum status attention_reference_forward(const struct attention_params *p) {
    CHECK(attention_reference_check(p, false));
    int64_t queries = p->batch * p->heads * p->seqlen_q;
#pragma omp parallel for schedule(dynamic, 16)
    for (int64_t row = 0; row < queries; row++) {
        forward_query(p, row / (p->heads * p->seqlen_q), row / p->seqlen_q % p->heads, row % p->seqlen_q);
    }
    return STATUS_OK;
}

enum status attention_reference_backward(const struct attention_params *p) {
    CHECK(attention_reference_check(p, true));
    int64_t queries = p->batch * p->heads * p->seqlen_q, keys = p->batch * p->kv_heads * p->seqlen_k;
    double *row_sums;
    CHECK(ALLOCATE(row_sums, queries));
    for (int64_t row = 0; row < queries; row++) {
        int64_t b = row / (p->heads * p->seqlen_q), h = row / p->seqlen_q % p->heads, i = row % p->seqlen_q;
        row_sums[row] = dot(row_of(&p->d_o, b, i, h), row_of(&p->o, b, i, h), p->head_dim);
    }
#pragma omp parallel for schedule(dynamic, 16)
    for (int64_t row = 0; row < queries; row++) {
        backward_query(
            p, row_sums, row / (p->heads * p->seqlen_q), row / p->seqlen_q % p->heads, row % p->seqlen_q);
    }
#pragma omp parallel for schedule(dynamic, 16)
    for (int64_t row = 0; row < keys; row++) {
        backward_key(p, row_sums, row / (p->kv_heads * p->seqlen_k), row / p->seqlen_k % p->kv_heads,
            row % p->seqlen_k);
    }
    free(row_sums);
    return STATUS_OK;
}
