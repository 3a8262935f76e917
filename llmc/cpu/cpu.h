/* Inside of the CPU backend. Every file here is compiled twice: with real = float for training and, with -DCPU_F64,
   with real = double as the oracle of the tests. All roles of backend.h (activation, parameter, statistic, gradient)
   have real's dtype.

   Results do not depend on the number of threads: work is cut by shape alone, every element has one writer, and
   partial sums are combined in a fixed order. Sums over long rows run in LANES interleaved partial sums, which is as
   many as a compiler needs to vectorise them without permission to reorder. */
#ifndef LLMC_CPU_CPU_H
#define LLMC_CPU_CPU_H

/* Nobody reads the flags that a comparison with a NaN raises; while it heeds them, gcc does not vectorise a choice
   between two values. Values are the same. */
#if defined __GNUC__ && !defined __clang__
#pragma GCC optimize("no-trapping-math")
#endif

#include "../backend.h"

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef CPU_F64
typedef double real;
#define REAL_DTYPE DTYPE_F64
#define CPU_SYMBOL(name) cpu_f64_##name
#else
typedef float real;
#define REAL_DTYPE DTYPE_F32
#define CPU_SYMBOL(name) cpu_f32_##name
#endif

#define embedding_install CPU_SYMBOL(embedding_install)
#define layernorm_install CPU_SYMBOL(layernorm_install)
#define linear_install CPU_SYMBOL(linear_install)
#define attention_install CPU_SYMBOL(attention_install)
#define classifier_install CPU_SYMBOL(classifier_install)
#define optimizer_install CPU_SYMBOL(optimizer_install)
#define random_install CPU_SYMBOL(random_install)
#define gemm CPU_SYMBOL(gemm)
#define gemm_serial CPU_SYMBOL(gemm_serial)

/* Each family of ops sets its functions in the table. */
void embedding_install(struct backend *b);
void layernorm_install(struct backend *b);
void linear_install(struct backend *b);
void attention_install(struct backend *b);
void classifier_install(struct backend *b);
void optimizer_install(struct backend *b);
void random_install(struct backend *b);

enum {
    LANES = 64 / sizeof(real),
    /* matrix products: the packed blocks are (rows, depth) and (depth, columns) */
    GEMM_DEPTH = 256,
    GEMM_COLUMNS = 512,
    GEMM_ROWS = 96,
    /* attention: a block of scores; multiples of the register tiles */
    ATTENTION_ROWS = 48,
    ATTENTION_COLUMNS = 192,
    /* columns that one thread sums over all rows: a few cache lines wide */
    COLUMN_CHUNK = 64,
};

/* What one thread needs while it works. */
struct scratch {
    real packed_right[GEMM_DEPTH * GEMM_COLUMNS];
    real packed_left[GEMM_DEPTH * GEMM_ROWS];
    real scores[ATTENTION_ROWS * ATTENTION_COLUMNS];
    real d_scores[ATTENTION_ROWS * ATTENTION_COLUMNS];
    real row_max[ATTENTION_ROWS];
    real row_sum[ATTENTION_ROWS];
};

struct backend_state {
    int threads;
    struct scratch *scratch; /* one a thread */
    uint64_t used_bytes, peak_bytes, total_bytes;
    double marks[BACKEND_MARKS]; /* seconds */
};

/* Makes the parallel loops that follow run on the backend's threads. */
static inline void use_threads(const struct backend *b) {
#ifdef _OPENMP
    omp_set_num_threads(b->state->threads);
#else
    (void)b;
#endif
}

/* The calling thread's own, inside a parallel loop. */
static inline struct scratch *thread_scratch(const struct backend *b) {
#ifdef _OPENMP
    return &b->state->scratch[omp_get_thread_num()];
#else
    return &b->state->scratch[0];
#endif
}

/* Gradients of parameters come as tensors because other backends have a choice of dtype; this one has not. */
static inline enum status check_gradient(struct tensor gradient) {
    if (gradient.data != NULL && gradient.dtype != REAL_DTYPE) {
        return fail(
            "the CPU keeps gradients in %s, not %s", dtype_name(REAL_DTYPE), dtype_name(gradient.dtype));
    }
    return STATUS_OK;
}

/* ---- matrix products ---- */

/* Element (i, j) is data[i * stride + j], or data[j * stride + i] of a transposed one. */
struct matrix {
    const real *data;
    int64_t stride;
    bool transposed;
};

/* Called with each finished piece of a product by the thread that made it. */
typedef void (*gemm_finish)(const void *context, int64_t row, int64_t rows, int64_t column, int64_t columns);

/* out (rows, columns) = or += left (rows, depth) right (depth, columns), on all threads; finish may be NULL. */
void gemm(struct backend *b, real *out, int64_t out_stride, struct matrix left, struct matrix right,
    int64_t rows, int64_t columns, int64_t depth, bool accumulate, gemm_finish finish, const void *context);
/* The same on the calling thread alone. */
void gemm_serial(struct scratch *scratch, real *out, int64_t out_stride, struct matrix left,
    struct matrix right, int64_t rows, int64_t columns, int64_t depth, bool accumulate);

/* ---- sums over rows ---- */

/* Adds the lanes up as a tree. */
static inline real lanes_sum(real *lane) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) {
            lane[l] += lane[l + width];
        }
    }
    return lane[0];
}

static inline real sum_row(const real *x, int64_t count) {
    real lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            lane[l] += x[i + l];
        }
    }
    for (int l = 0; i < count; i++, l++) {
        lane[l] += x[i];
    }
    return lanes_sum(lane);
}

static inline real dot_rows(const real *x, const real *y, int64_t count) {
    real lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            lane[l] += x[i + l] * y[i + l];
        }
    }
    for (int l = 0; i < count; i++, l++) {
        lane[l] += x[i] * y[i];
    }
    return lanes_sum(lane);
}

/* A NaN is passed over: the sums that follow find it. */
static inline real max_row(const real *x, int64_t count) {
    real lane[LANES];
    for (int l = 0; l < LANES; l++) {
        lane[l] = -INFINITY;
    }
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
        }
    }
    for (int l = 0; i < count; i++, l++) {
        lane[l] = x[i] > lane[l] ? x[i] : lane[l];
    }
    real highest = lane[0];
    for (int l = 1; l < LANES; l++) {
        highest = lane[l] > highest ? lane[l] : highest;
    }
    return highest;
}

/* ---- exp ---- */

/* e^x for x <= 1 or so (softmax and the sigmoid need no more), a NaN for a NaN, within 2 units in the last place down
   to e^-87, 0 soon below. Plain arithmetic, so that loops over it vectorise: x = n ln 2 + r with |r| <= ln(2)/2, e^r by
   its Taylor series to r^7 (the next term is under 6e-9), 2^n by the exponent's bits. */
static inline real exp_real(real x) {
#ifdef CPU_F64
    return exp(x);
#else
    const float log2_e = 1.44269504f, ln2_high = 0.693145752f, ln2_low = 1.42860677e-6f;
    const float lowest = -88.0f;                /* n = -127, whose exponent bits are those of 0 */
    const float round_to_integer = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to an integer */
    x = x < lowest ? lowest : x;
    float shifted = x * log2_e + round_to_integer;
    float n = shifted - round_to_integer;
    float r = (x - n * ln2_high) - n * ln2_low;
    float series = 1.0f / 5040;
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 1.0f / 2;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3F800000u;
    float power;
    memcpy(&power, &bits, sizeof power);
    return series * power;
#endif
}

#endif
