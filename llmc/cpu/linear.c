/* Linear layers and GELU. What follows a product (bias, GELU, its derivative) is done by the thread that made a tile of
   it, while the tile is in its cache.

   gelu(x) = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016). As (1 + tanh u)/2 is the
   sigmoid of 2u, gelu(x) = x sigmoid(2u): no difference of near-equal numbers, one exp and one division. */
#include "cpu.h"

static const real CUBIC = (real)0.044715;
static const real TWO_SQRT_2_OVER_PI = (real)1.5957691216057307;

enum { GELU_CHUNK = 4096, ROW_BLOCK = 64, FEW_ROWS = 8 };

/* sigmoid(v) and sigmoid(-v) = 1 - sigmoid(v), both to full relative precision. Only values that are there anyway are
   chosen between: compilers vectorise that, and no more. */
static inline void sigmoid_pair(real v, real *of_plus, real *of_minus) {
    real e = exp_real(-(real)fabs(v)), factor = 1 / (1 + e);
    *of_plus = (v > 0 ? 1 : e) * factor;
    *of_minus = (v > 0 ? e : 1) * factor;
}

static void gelu_row(real *out, const real *in, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        real x = in[i], sigmoid, complement;
        sigmoid_pair(TWO_SQRT_2_OVER_PI * (x + CUBIC * x * x * x), &sigmoid, &complement);
        out[i] = x * sigmoid;
    }
}

/* gradient *= gelu'(in) */
static void gelu_backward_row(real *gradient, const real *in, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        real x = in[i], sigmoid, complement;
        sigmoid_pair(TWO_SQRT_2_OVER_PI * (x + CUBIC * x * x * x), &sigmoid, &complement);
        real slope = TWO_SQRT_2_OVER_PI * (1 + 3 * CUBIC * x * x);
        gradient[i] *= sigmoid + x * sigmoid * complement * slope;
    }
}

static enum status gelu_forward(struct backend *b, void *out, const void *in, int64_t count) {
    use_threads(b);
#pragma omp parallel for
    for (int64_t i = 0; i < count; i += GELU_CHUNK) {
        gelu_row((real *)out + i, (const real *)in + i, min_i64(GELU_CHUNK, count - i));
    }
    return STATUS_OK;
}

/* ---- forward ---- */

struct forward_epilogue {
    real *product, *gelu; /* (rows, features); gelu NULL: none */
    const real *bias;     /* NULL: none */
    int64_t features;
};

static void finish_forward(const void *context, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const struct forward_epilogue *e = context;
    for (int64_t i = row; i < row + rows; i++) {
        int64_t at = i * e->features + column;
        if (e->bias != NULL) {
            for (int64_t j = 0; j < columns; j++) {
                e->product[at + j] += e->bias[column + j];
            }
        }
        if (e->gelu != NULL) {
            gelu_row(e->gelu + at, e->product + at, columns);
        }
    }
}

/* A product with few rows reads each weight once and has nothing to gain from packing. */
static void multiply_few_rows(struct backend *b, real *out, const real *in, const real *weight, int64_t rows,
    int64_t depth, int64_t features, const struct forward_epilogue *e) {
    use_threads(b);
#pragma omp parallel for
    for (int64_t first = 0; first < features; first += COLUMN_CHUNK) {
        int64_t width = min_i64(COLUMN_CHUNK, features - first);
        for (int64_t column = first; column < first + width; column++) {
            for (int64_t row = 0; row < rows; row++) {
                out[row * features + column] = dot_rows(in + row * depth, weight + column * depth, depth);
            }
        }
        finish_forward(e, 0, rows, first, width);
    }
}

static enum status linear_forward(struct backend *b, void *out, void *pre_gelu, const void *in,
    const void *weight, const void *bias, int64_t rows, int in_features, int out_features,
    enum linear_epilogue epilogue) {
    bool gelu = epilogue == LINEAR_BIAS_GELU;
    struct forward_epilogue e = {gelu ? pre_gelu : out, gelu ? out : NULL, bias, out_features};
    if (rows <= FEW_ROWS) {
        multiply_few_rows(b, e.product, in, weight, rows, in_features, out_features, &e);
        return STATUS_OK;
    }
    struct matrix left = {in, in_features, false}, right = {weight, in_features, true};
    gemm(b, e.product, out_features, left, right, rows, out_features, in_features, false, finish_forward, &e);
    return STATUS_OK;
}

/* ---- backward ---- */

struct backward_epilogue {
    real *d_in;
    const real *pre_gelu;
    int64_t features;
};

static void finish_backward(const void *context, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const struct backward_epilogue *e = context;
    for (int64_t i = row; i < row + rows; i++) {
        int64_t at = i * e->features + column;
        gelu_backward_row(e->d_in + at, e->pre_gelu + at, columns);
    }
}

static enum status linear_backward_input(struct backend *b, void *d_in, const void *d_out, const void *weight,
    const void *pre_gelu, int64_t rows, int in_features, int out_features) {
    struct backward_epilogue e = {d_in, pre_gelu, in_features};
    struct matrix left = {d_out, out_features, false}, right = {weight, in_features, false};
    gemm(b, d_in, in_features, left, right, rows, in_features, out_features, false,
        pre_gelu != NULL ? finish_backward : NULL, &e);
    return STATUS_OK;
}

/* Blocks of rows are summed apart for the sake of accuracy. */
static void sum_columns(
    real *out, const real *in, int64_t rows, int64_t stride, int64_t first, int64_t width, bool accumulate) {
    real sum[COLUMN_CHUNK] = {0};
    for (int64_t block = 0; block < rows; block += ROW_BLOCK) {
        real block_sum[COLUMN_CHUNK] = {0};
        for (int64_t n = block; n < min_i64(block + ROW_BLOCK, rows); n++) {
            for (int64_t c = 0; c < width; c++) {
                block_sum[c] += in[n * stride + first + c];
            }
        }
        for (int64_t c = 0; c < width; c++) {
            sum[c] += block_sum[c];
        }
    }
    for (int64_t c = 0; c < width; c++) {
        out[first + c] = accumulate ? out[first + c] + sum[c] : sum[c];
    }
}

static enum status linear_backward_parameters(struct backend *b, struct tensor d_weight, struct tensor d_bias,
    const void *d_out, const void *in, int64_t rows, int in_features, int out_features, bool accumulate) {
    CHECK(check_gradient(d_weight));
    CHECK(check_gradient(d_bias));
    if (d_weight.data != NULL) {
        struct matrix left = {d_out, out_features, true}, right = {in, in_features, false};
        gemm(b, d_weight.data, in_features, left, right, out_features, in_features, rows, accumulate, NULL,
            NULL);
    }
    if (d_bias.data != NULL) {
        use_threads(b);
#pragma omp parallel for
        for (int64_t first = 0; first < out_features; first += COLUMN_CHUNK) {
            sum_columns(d_bias.data, d_out, rows, out_features, first,
                min_i64(COLUMN_CHUNK, out_features - first), accumulate);
        }
    }
    return STATUS_OK;
}

void linear_install(struct backend *b) {
    b->linear_forward = linear_forward;
    b->linear_backward_input = linear_backward_input;
    b->linear_backward_parameters = linear_backward_parameters;
    b->gelu_forward = gelu_forward;
}
