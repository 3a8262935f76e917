/* LayerNorm (Ba et al. 2016), alone and behind a residual addition.

     x^ = (x - mean) rstd, out = weight x^ + bias
     backward, with g = weight dout:  din = rstd (g - mean(g) - x^ mean(g x^))
     dweight = sum over rows of dout x^, dbias = sum over rows of dout

   Backward goes over the rows twice: by rows for din, by chunks of columns for the parameters. */
#include "cpu.h"

static const double EPSILON = 1e-5;

enum { ROW_BLOCK = 64, CHANNEL_BLOCK = 256 };

static void normalize_row(
    real *out, real *mean, real *rstd, const real *in, const real *weight, const real *bias, int channels) {
    real m = sum_row(in, channels) / (real)channels;
    for (int c = 0; c < channels; c++) {
        out[c] = in[c] - m;
    }
    real r = 1 / (real)sqrt(dot_rows(out, out, channels) / (real)channels + EPSILON);
    for (int c = 0; c < channels; c++) {
        out[c] = out[c] * r * weight[c] + bias[c];
    }
    *mean = m;
    *rstd = r;
}

static enum status layernorm_forward(struct backend *b, void *out, void *mean, void *rstd, const void *in,
    const void *weight, const void *bias, int64_t rows, int channels) {
    use_threads(b);
#pragma omp parallel for
    for (int64_t n = 0; n < rows; n++) {
        normalize_row((real *)out + n * channels, (real *)mean + n, (real *)rstd + n,
            (const real *)in + n * channels, weight, bias, channels);
    }
    return STATUS_OK;
}

static void add_row(real *out, const real *a, const real *addend, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = a[i] + addend[i];
    }
}

static enum status residual_layernorm_forward(struct backend *b, void *sum, void *out, void *mean, void *rstd,
    const void *a, const void *addend, const void *weight, const void *bias, int64_t rows, int channels) {
    use_threads(b);
#pragma omp parallel for
    for (int64_t n = 0; n < rows; n++) {
        real *sum_row_n = (real *)sum + n * channels;
        add_row(sum_row_n, (const real *)a + n * channels, (const real *)addend + n * channels, channels);
        normalize_row((real *)out + n * channels, (real *)mean + n, (real *)rstd + n, sum_row_n, weight, bias,
            channels);
    }
    return STATUS_OK;
}

static enum status residual_forward(
    struct backend *b, void *out, const void *a, const void *addend, int64_t count) {
    enum { CHUNK = 4096 };
    use_threads(b);
#pragma omp parallel for
    for (int64_t i = 0; i < count; i += CHUNK) {
        add_row((real *)out + i, (const real *)a + i, (const real *)addend + i, min_i64(CHUNK, count - i));
    }
    return STATUS_OK;
}

static void backward_row(real *d_in, const real *d_out, const real *in, const real *weight, real mean,
    real rstd, int channels, bool accumulate) {
    real g[CHANNEL_BLOCK], centered[CHANNEL_BLOCK], g_sum = 0, g_dot = 0;
    for (int first = 0; first < channels; first += CHANNEL_BLOCK) {
        int width = (int)min_i64(CHANNEL_BLOCK, channels - first);
        for (int c = 0; c < width; c++) {
            g[c] = weight[first + c] * d_out[first + c];
            centered[c] = in[first + c] - mean;
        }
        g_sum += sum_row(g, width);
        g_dot += dot_rows(g, centered, width);
    }
    real mean_g = g_sum / (real)channels, slope = g_dot * rstd * rstd / (real)channels;
    for (int c = 0; c < channels; c++) {
        real d = rstd * (weight[c] * d_out[c] - mean_g - (in[c] - mean) * slope);
        d_in[c] = accumulate ? d_in[c] + d : d;
    }
}

/* Columns [first, first + width) of d_weight and d_bias; blocks of rows are summed apart for the sake of accuracy. */
static void backward_columns(real *d_weight, real *d_bias, const real *d_out, const real *in,
    const real *mean, const real *rstd, int64_t rows, int channels, int first, int width, bool accumulate) {
    real weight_sum[COLUMN_CHUNK] = {0}, bias_sum[COLUMN_CHUNK] = {0};
    for (int64_t block = 0; block < rows; block += ROW_BLOCK) {
        real weight_block[COLUMN_CHUNK] = {0}, bias_block[COLUMN_CHUNK] = {0};
        for (int64_t n = block; n < min_i64(block + ROW_BLOCK, rows); n++) {
            const real *d = d_out + n * channels + first, *x = in + n * channels + first;
            for (int c = 0; c < width; c++) {
                weight_block[c] += d[c] * (x[c] - mean[n]) * rstd[n];
                bias_block[c] += d[c];
            }
        }
        for (int c = 0; c < width; c++) {
            weight_sum[c] += weight_block[c];
            bias_sum[c] += bias_block[c];
        }
    }
    for (int c = 0; c < width; c++) {
        d_weight[first + c] = accumulate ? d_weight[first + c] + weight_sum[c] : weight_sum[c];
        d_bias[first + c] = accumulate ? d_bias[first + c] + bias_sum[c] : bias_sum[c];
    }
}

static enum status layernorm_backward(struct backend *b, void *d_in, struct tensor d_weight,
    struct tensor d_bias, const void *d_out, const void *in, const void *weight, const void *mean,
    const void *rstd, int64_t rows, int channels, bool accumulate_input, bool accumulate_parameters) {
    CHECK(check_gradient(d_weight));
    CHECK(check_gradient(d_bias));
    use_threads(b);
#pragma omp parallel for
    for (int first = 0; first < channels; first += COLUMN_CHUNK) {
        backward_columns(d_weight.data, d_bias.data, d_out, in, mean, rstd, rows, channels, first,
            (int)min_i64(COLUMN_CHUNK, channels - first), accumulate_parameters);
    }
#pragma omp parallel for
    for (int64_t n = 0; n < rows; n++) {
        backward_row((real *)d_in + n * channels, (const real *)d_out + n * channels,
            (const real *)in + n * channels, weight, ((const real *)mean)[n], ((const real *)rstd)[n],
            channels, accumulate_input);
    }
    return STATUS_OK;
}

void layernorm_install(struct backend *b) {
    b->layernorm_forward = layernorm_forward;
    b->residual_layernorm_forward = residual_layernorm_forward;
    b->residual_forward = residual_forward;
    b->layernorm_backward = layernorm_backward;
}
