/* Every op of the CPU backends, fp64 and fp32. Forward ops against the formula written out in doubles; backward ops
   against central differences of the forward op in fp64, and fp32 against fp64; flags, aliases and edges as backend.h
   has them; the same bits for any number of threads. */
#include "test.h"

#include <stdlib.h>
#include <unistd.h>

#include "attention/attention.h"
#include "llmc/backend.h"
#include "llmc/cpu/cpu.h"
#include "llmc/random.h"

static struct backend *f64, *f32;

/* ---- arrays in a backend's memory, which is the host's ---- */

struct array {
    struct backend *backend;
    void *data;
    int64_t count;
};

enum { MAX_ARRAYS = 4096 };
static struct array arrays[MAX_ARRAYS];
static int array_count;

static enum dtype dtype_of(const struct backend *b) {
    return b->profile.activation_dtype;
}

static double get(struct array a, int64_t i) {
    return dtype_of(a.backend) == DTYPE_F64 ? ((double *)a.data)[i] : (double)((float *)a.data)[i];
}
static void set(struct array a, int64_t i, double value) {
    if (dtype_of(a.backend) == DTYPE_F64) {
        ((double *)a.data)[i] = value;
    } else {
        ((float *)a.data)[i] = (float)value;
    }
}
static size_t array_bytes(struct array a) {
    return (size_t)a.count * dtype_bytes(dtype_of(a.backend));
}
static struct tensor tensor_of(struct array a) {
    struct tensor t = {a.data, dtype_of(a.backend)};
    return t;
}

static struct array make(struct backend *b, int64_t count) {
    struct array a = {b, NULL, count};
    if (array_count == MAX_ARRAYS || b->memory_allocate(b, &a.data, array_bytes(a)) != STATUS_OK) {
        printf("no memory for the test: %s\n", error_message());
        exit(1);
    }
    arrays[array_count++] = a;
    return a;
}
static struct array make_filled(struct backend *b, int64_t count, double value) {
    struct array a = make(b, count);
    for (int64_t i = 0; i < count; i++) {
        set(a, i, value);
    }
    return a;
}
/* Normal values that are the same, and exact, in both precisions. */
static struct array make_random(struct backend *b, int64_t count, uint64_t stream) {
    struct array a = make(b, count);
    for (int64_t i = 0; i < count; i++) {
        set(a, i, random_normal(1234, stream, (uint64_t)i));
    }
    return a;
}
static struct array make_copy(struct array from) {
    struct array a = make(from.backend, from.count);
    memcpy(a.data, from.data, array_bytes(from));
    return a;
}
static int32_t *make_tokens(struct backend *b, int64_t count, int vocab_size, uint64_t stream) {
    int32_t *tokens = make(b, count).data; /* real's 4 or 8 bytes suffice */
    for (int64_t i = 0; i < count; i++) {
        tokens[i] = (int32_t)(random_uniform(99, stream, (uint64_t)i) * vocab_size);
    }
    return tokens;
}
static void free_arrays(void) {
    while (array_count > 0) {
        struct array a = arrays[--array_count];
        a.backend->memory_free(a.backend, a.data);
    }
}

static bool same_bits(struct array a, struct array b) {
    return a.count == b.count && memcmp(a.data, b.data, array_bytes(a)) == 0;
}

/* |a - b| / |b| in the Euclidean norm */
static double distance(struct array a, struct array b) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < b.count; i++) {
        difference += (get(a, i) - get(b, i)) * (get(a, i) - get(b, i));
        norm += get(b, i) * get(b, i);
    }
    return sqrt(difference) / (sqrt(norm) + 1e-300);
}

static double inner_product(struct array a, struct array b) {
    double sum = 0;
    for (int64_t i = 0; i < a.count; i++) {
        sum += get(a, i) * get(b, i);
    }
    return sum;
}

/* What rounding may leave of a few hundred sums. */
static double tolerance(const struct backend *b) {
    return dtype_of(b) == DTYPE_F64 ? 1e-13 : 2e-6;
}

#define EXPECT_CLOSE(a, b) EXPECT_NEAR(distance(a, b), 0, tolerance((a).backend))
#define FOR_BOTH(b) for (struct backend *b = f64; b != NULL; b = b == f64 ? f32 : NULL)
#define RUN_AND_FREE(test)                                                                                   \
    do {                                                                                                     \
        RUN(test);                                                                                           \
        free_arrays();                                                                                       \
    } while (0)

/* ---- central differences ---- */

/* Computes the loss from what the context's arrays hold. */
typedef double (*loss_function)(const void *context);

/* Five-point differences, whose error goes with step^4: the step can be large enough for rounding not to matter. */
static double slope_along(loss_function loss, const void *context, struct array at, struct array direction) {
    const double step = 1e-3, offset[] = {1, -1, 2, -2}, weight[] = {8, -8, -1, 1};
    struct array start = make_copy(at);
    double slope = 0;
    for (int p = 0; p < 4; p++) {
        for (int64_t i = 0; i < at.count; i++) {
            set(at, i, get(start, i) + offset[p] * step * get(direction, i));
        }
        slope += weight[p] * loss(context) / (12 * step);
    }
    memcpy(at.data, start.data, array_bytes(at));
    return slope;
}

/* The gradient against differences: every element of a small array, random directions of a large one. */
static void expect_gradient(loss_function loss, const void *context, struct array at, struct array gradient) {
    enum { SMALL = 256, DIRECTIONS = 4 };
    double norm = sqrt(inner_product(gradient, gradient));
    EXPECT(norm > 0);
    int mark = array_count;
    for (int64_t i = 0; i < (at.count <= SMALL ? at.count : DIRECTIONS); i++) {
        struct array direction = make_random(at.backend, at.count, 1000 + (uint64_t)i);
        double scale = sqrt(inner_product(direction, direction));
        for (int64_t j = 0; j < at.count; j++) {
            set(direction, j, at.count <= SMALL ? i == j : get(direction, j) / scale);
        }
        EXPECT_NEAR(
            inner_product(gradient, direction), slope_along(loss, context, at, direction), 1e-9 * (1 + norm));
        while (array_count > mark) {
            struct array a = arrays[--array_count];
            a.backend->memory_free(a.backend, a.data);
        }
    }
}

/* ---- exp ---- */

static void test_exp_is_within_two_units_in_the_last_place(void) {
    double worst = 0;
    for (float x = -86.9f; x <= 1.0f; x += 0.00037f) {
        worst = fmax(worst, fabs((double)exp_real(x) / exp((double)x) - 1));
    }
    EXPECT(worst < 2 * 1.2e-7);
    EXPECT(exp_real(0.0f) == 1.0f);
    EXPECT(exp_real(-88.0f) == 0.0f && exp_real(-1e30f) == 0.0f && exp_real(-INFINITY) == 0.0f);
    EXPECT(isnan(exp_real(NAN)));
}

/* ---- linear and GELU ---- */

static double naive_gelu(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

struct linear {
    struct backend *b;
    struct array in, weight, bias, pre_gelu, out, d_out;
    int64_t rows;
    int in_features, out_features;
};

static struct linear make_linear(struct backend *b, int64_t rows, int in_features, int out_features) {
    struct linear l = {b, make_random(b, rows * in_features, 1),
        make_random(b, (int64_t)in_features * out_features, 2), make_random(b, out_features, 3),
        make_filled(b, rows * out_features, NAN), make_filled(b, rows * out_features, NAN),
        make_random(b, rows * out_features, 4), rows, in_features, out_features};
    return l;
}

static struct array naive_linear(const struct linear *l, bool bias) {
    struct array out = make(l->b, l->rows * l->out_features);
    for (int64_t n = 0; n < l->rows; n++) {
        for (int o = 0; o < l->out_features; o++) {
            double sum = bias ? get(l->bias, o) : 0;
            for (int i = 0; i < l->in_features; i++) {
                sum += get(l->in, n * l->in_features + i) * get(l->weight, (int64_t)o * l->in_features + i);
            }
            set(out, n * l->out_features + o, sum);
        }
    }
    return out;
}

/* On, beside and beyond the edges of register tiles, packed blocks and threads' tiles. */
static const struct {
    int64_t rows;
    int in_features, out_features;
} linear_shapes[] = {{1, 1, 1}, {1, 8, 24}, {3, 5, 7}, {7, 24, 40}, {12, 32, 32}, {33, 257, 31}, {64, 64, 48},
    {193, 72, 520}, {200, 264, 8}, {385, 16, 513}, {5, 515, 130}};
enum { LINEAR_SHAPES = sizeof linear_shapes / sizeof *linear_shapes };

static struct linear make_linear_shape(struct backend *b, int shape) {
    return make_linear(
        b, linear_shapes[shape].rows, linear_shapes[shape].in_features, linear_shapes[shape].out_features);
}

static void test_linear_forward_is_the_sum_of_products_and_the_bias(void) {
    FOR_BOTH(b) {
        for (int s = 0; s < LINEAR_SHAPES; s++) {
            struct linear l = make_linear_shape(b, s);
            EXPECT_OK(b->linear_forward(b, l.out.data, NULL, l.in.data, l.weight.data, l.bias.data, l.rows,
                l.in_features, l.out_features, LINEAR_BIAS));
            EXPECT_CLOSE(l.out, naive_linear(&l, true));
            EXPECT_OK(b->linear_forward(b, l.out.data, NULL, l.in.data, l.weight.data, NULL, l.rows,
                l.in_features, l.out_features, LINEAR_BIAS));
            EXPECT_CLOSE(l.out, naive_linear(&l, false));
        }
    }
}

static void test_linear_forward_with_gelu_keeps_what_went_into_it(void) {
    FOR_BOTH(b) {
        for (int s = 0; s < LINEAR_SHAPES; s++) {
            struct linear l = make_linear_shape(b, s);
            EXPECT_OK(b->linear_forward(b, l.out.data, l.pre_gelu.data, l.in.data, l.weight.data, l.bias.data,
                l.rows, l.in_features, l.out_features, LINEAR_BIAS_GELU));
            EXPECT_CLOSE(l.pre_gelu, naive_linear(&l, true));
            struct array alone = make(b, l.out.count);
            EXPECT_OK(b->gelu_forward(b, alone.data, l.pre_gelu.data, alone.count));
            EXPECT(same_bits(alone, l.out));
        }
    }
}

static void test_gelu_is_the_tanh_form_to_full_relative_precision(void) {
    FOR_BOTH(b) {
        enum { COUNT = 2401 };
        struct array in = make(b, COUNT), out = make(b, COUNT);
        for (int i = 0; i < COUNT; i++) {
            set(in, i, (i - COUNT / 2) / 200.0);
        }
        EXPECT_OK(b->gelu_forward(b, out.data, in.data, COUNT));
        for (int i = 0; i < COUNT; i++) {
            double x = get(in, i), u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
            double want = x / (1 + exp(-2 * u)); /* the same function, exact where 1 + tanh(u) cancels */
            EXPECT_NEAR(get(out, i), want, (b == f64 ? 1e-14 : 4e-6) * fabs(want));
            EXPECT_NEAR(want, naive_gelu(x), 1e-14);
        }
    }
}

static void test_gelu_goes_to_zero_and_to_its_argument_far_out(void) {
    FOR_BOTH(b) {
        struct array in = make(b, 4), out = make(b, 4);
        set(in, 0, -1e6);
        set(in, 1, 1e6);
        set(in, 2, 0);
        set(in, 3, NAN);
        EXPECT_OK(b->gelu_forward(b, out.data, in.data, 4));
        EXPECT(get(out, 0) == 0 && get(out, 1) == 1e6 && get(out, 2) == 0 && isnan(get(out, 3)));
    }
}

/* L = sum of d_out * out, of a layer whose input was made by a GELU of `pre_gelu` when there is one */
struct linear_loss {
    struct linear l;
    struct array gelu_in; /* data NULL: none */
};
static double linear_loss(const void *context) {
    const struct linear_loss *c = context;
    const struct linear *l = &c->l;
    struct backend *b = l->b;
    if (c->gelu_in.data != NULL) {
        EXPECT_OK(b->gelu_forward(b, l->in.data, c->gelu_in.data, l->in.count));
    }
    EXPECT_OK(b->linear_forward(b, l->out.data, NULL, l->in.data, l->weight.data, l->bias.data, l->rows,
        l->in_features, l->out_features, LINEAR_BIAS));
    return inner_product(l->out, l->d_out);
}

static void test_linear_backward_is_central_differences(void) {
    struct backend *b = f64;
    for (int s = 0; s < LINEAR_SHAPES; s++) {
        struct linear_loss c = {make_linear_shape(b, s), {b, NULL, 0}};
        struct linear *l = &c.l;
        struct array d_in = make_filled(b, l->in.count, NAN), d_weight = make_filled(b, l->weight.count, NAN),
                     d_bias = make_filled(b, l->out_features, NAN);
        EXPECT_OK(b->linear_backward_input(
            b, d_in.data, l->d_out.data, l->weight.data, NULL, l->rows, l->in_features, l->out_features));
        EXPECT_OK(b->linear_backward_parameters(b, tensor_of(d_weight), tensor_of(d_bias), l->d_out.data,
            l->in.data, l->rows, l->in_features, l->out_features, false));
        expect_gradient(linear_loss, &c, l->in, d_in);
        expect_gradient(linear_loss, &c, l->weight, d_weight);
        expect_gradient(linear_loss, &c, l->bias, d_bias);
    }
}

static void test_linear_backward_through_gelu_is_central_differences(void) {
    struct backend *b = f64;
    for (int s = 0; s < LINEAR_SHAPES; s++) {
        struct linear_loss c = {make_linear_shape(b, s), {b, NULL, 0}};
        struct linear *l = &c.l;
        c.gelu_in = make_random(b, l->in.count, 5);
        struct array d_in = make_filled(b, l->in.count, NAN);
        EXPECT_OK(b->linear_backward_input(b, d_in.data, l->d_out.data, l->weight.data, c.gelu_in.data,
            l->rows, l->in_features, l->out_features));
        expect_gradient(linear_loss, &c, c.gelu_in, d_in);
    }
}

/* The fp64 results, which differences have proved right, in fp32's array: for EXPECT_CLOSE. */
static struct array in_f32(struct array a) {
    struct array copy = make(f32, a.count);
    for (int64_t i = 0; i < a.count; i++) {
        set(copy, i, get(a, i));
    }
    return copy;
}

static void test_linear_backward_in_fp32_is_that_in_fp64(void) {
    for (int s = 0; s < LINEAR_SHAPES; s++) {
        struct array d_in[2], d_weight[2], d_bias[2];
        for (int w = 0; w < 2; w++) {
            struct backend *b = w == 0 ? f64 : f32;
            struct linear l = make_linear_shape(b, s);
            struct array pre_gelu = make_random(b, l.in.count, 5);
            d_in[w] = make(b, l.in.count);
            d_weight[w] = make(b, l.weight.count);
            d_bias[w] = make(b, l.out_features);
            EXPECT_OK(b->linear_backward_input(b, d_in[w].data, l.d_out.data, l.weight.data, pre_gelu.data,
                l.rows, l.in_features, l.out_features));
            EXPECT_OK(b->linear_backward_parameters(b, tensor_of(d_weight[w]), tensor_of(d_bias[w]),
                l.d_out.data, l.in.data, l.rows, l.in_features, l.out_features, false));
        }
        EXPECT_CLOSE(d_in[1], in_f32(d_in[0]));
        EXPECT_CLOSE(d_weight[1], in_f32(d_weight[0]));
        EXPECT_CLOSE(d_bias[1], in_f32(d_bias[0]));
    }
}

static void test_linear_backward_accumulates_and_does_without_weight_or_bias(void) {
    FOR_BOTH(b) {
        for (int s = 0; s < LINEAR_SHAPES; s++) {
            struct linear l = make_linear_shape(b, s);
            struct array once_weight = make(b, l.weight.count), once_bias = make(b, l.out_features);
            struct array weight = make_random(b, l.weight.count, 6), bias = make_random(b, l.out_features, 7);
            EXPECT_OK(b->linear_backward_parameters(b, tensor_of(once_weight), tensor_of(once_bias),
                l.d_out.data, l.in.data, l.rows, l.in_features, l.out_features, false));
            struct array want_weight = make_copy(weight), want_bias = make_copy(bias);
            for (int64_t i = 0; i < weight.count; i++) {
                set(want_weight, i, get(weight, i) + get(once_weight, i));
            }
            for (int64_t i = 0; i < bias.count; i++) {
                set(want_bias, i, get(bias, i) + get(once_bias, i));
            }
            EXPECT_OK(b->linear_backward_parameters(b, tensor_of(weight), tensor_of(bias), l.d_out.data,
                l.in.data, l.rows, l.in_features, l.out_features, true));
            EXPECT_CLOSE(weight, want_weight);
            EXPECT_CLOSE(bias, want_bias);
            struct tensor none = {NULL, dtype_of(b)};
            EXPECT_OK(b->linear_backward_parameters(b, tensor_of(weight), none, l.d_out.data, l.in.data,
                l.rows, l.in_features, l.out_features, false));
            EXPECT_OK(b->linear_backward_parameters(b, none, tensor_of(bias), l.d_out.data, l.in.data, l.rows,
                l.in_features, l.out_features, false));
            EXPECT(same_bits(weight, once_weight));
            EXPECT(same_bits(bias, once_bias));
        }
    }
}

static void test_gradients_of_another_dtype_are_refused(void) {
    struct linear l = make_linear(f32, 2, 8, 8);
    struct tensor bf16 = {l.weight.data, DTYPE_BF16}, none = {NULL, DTYPE_F32};
    EXPECT(f32->linear_backward_parameters(f32, bf16, none, l.d_out.data, l.in.data, 2, 8, 8, false) ==
           STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "F32");
    EXPECT_CONTAINS(error_message(), "BF16");
}

/* ---- layernorm ---- */

struct norm {
    struct backend *b;
    struct array in, weight, bias, out, mean, rstd, d_out;
    int64_t rows;
    int channels;
};

static struct norm make_norm(struct backend *b, int64_t rows, int channels) {
    struct norm n = {b, make_random(b, rows * channels, 1), make_random(b, channels, 2),
        make_random(b, channels, 3), make_filled(b, rows * channels, NAN), make_filled(b, rows, NAN),
        make_filled(b, rows, NAN), make_random(b, rows * channels, 4), rows, channels};
    return n;
}
static enum status forward_norm(const struct norm *n) {
    return n->b->layernorm_forward(n->b, n->out.data, n->mean.data, n->rstd.data, n->in.data, n->weight.data,
        n->bias.data, n->rows, n->channels);
}

static const struct {
    int64_t rows;
    int channels;
} norm_shapes[] = {{1, 8}, {3, 24}, {5, 40}, {67, 64}, {2, 776}, {130, 136}};
enum { NORM_SHAPES = sizeof norm_shapes / sizeof *norm_shapes };

static void expect_normalized(const struct norm *n) {
    struct array out = make(n->b, n->out.count), mean = make(n->b, n->rows), rstd = make(n->b, n->rows);
    for (int64_t r = 0; r < n->rows; r++) {
        double sum = 0, squares = 0;
        for (int c = 0; c < n->channels; c++) {
            sum += get(n->in, r * n->channels + c);
        }
        double m = sum / n->channels;
        for (int c = 0; c < n->channels; c++) {
            squares += pow(get(n->in, r * n->channels + c) - m, 2);
        }
        double s = 1 / sqrt(squares / n->channels + 1e-5);
        set(mean, r, m);
        set(rstd, r, s);
        for (int c = 0; c < n->channels; c++) {
            int64_t i = r * n->channels + c;
            set(out, i, (get(n->in, i) - m) * s * get(n->weight, c) + get(n->bias, c));
        }
    }
    EXPECT_CLOSE(n->out, out);
    EXPECT_CLOSE(n->mean, mean);
    EXPECT_CLOSE(n->rstd, rstd);
}

static void test_layernorm_forward_is_its_formula(void) {
    FOR_BOTH(b) {
        for (int s = 0; s < NORM_SHAPES; s++) {
            struct norm n = make_norm(b, norm_shapes[s].rows, norm_shapes[s].channels);
            EXPECT_OK(forward_norm(&n));
            expect_normalized(&n);
        }
    }
}

/* The variance of values that lie close together far from zero: lost if it were taken as E(x^2) - E(x)^2. */
static void test_layernorm_forward_keeps_the_variance_beside_a_large_mean(void) {
    FOR_BOTH(b) {
        struct norm n = make_norm(b, 4, 64);
        for (int64_t i = 0; i < n.in.count; i++) {
            set(n.in, i, 4096 + (double)(i % 7) / 8);
        }
        EXPECT_OK(forward_norm(&n));
        for (int r = 0; r < 4; r++) {
            double sum = 0, squares = 0;
            for (int c = 0; c < 64; c++) {
                sum += (double)((r * 64 + c) % 7) / 8;
            }
            for (int c = 0; c < 64; c++) {
                squares += pow((double)((r * 64 + c) % 7) / 8 - sum / 64, 2);
            }
            EXPECT_NEAR(get(n.rstd, r) * sqrt(squares / 64 + 1e-5), 1, b == f64 ? 1e-10 : 1e-5);
        }
    }
}

static void test_residual_layernorm_is_bitwise_residual_then_layernorm(void) {
    FOR_BOTH(b) {
        for (int s = 0; s < NORM_SHAPES; s++) {
            struct norm n = make_norm(b, norm_shapes[s].rows, norm_shapes[s].channels);
            struct array a = make_random(b, n.in.count, 5), addend = make_random(b, n.in.count, 6);
            EXPECT_OK(b->residual_forward(b, n.in.data, a.data, addend.data, n.in.count));
            for (int64_t i = 0; i < n.in.count; i++) {
                EXPECT_NEAR(get(n.in, i), get(a, i) + get(addend, i), tolerance(b));
            }
            EXPECT_OK(forward_norm(&n));
            /* the sum apart, over `a`, and over the addend */
            for (int alias = 0; alias < 3; alias++) {
                struct array a_copy = make_copy(a), addend_copy = make_copy(addend);
                struct array sum = alias == 0 ? make(b, a.count) : alias == 1 ? a_copy : addend_copy;
                struct array out = make(b, a.count), mean = make(b, n.rows), rstd = make(b, n.rows);
                EXPECT_OK(b->residual_layernorm_forward(b, sum.data, out.data, mean.data, rstd.data,
                    a_copy.data, addend_copy.data, n.weight.data, n.bias.data, n.rows, n.channels));
                EXPECT(same_bits(sum, n.in) && same_bits(out, n.out));
                EXPECT(same_bits(mean, n.mean) && same_bits(rstd, n.rstd));
            }
        }
    }
}

static void test_residual_may_write_over_either_input(void) {
    FOR_BOTH(b) {
        struct array a = make_random(b, 5001, 1), addend = make_random(b, 5001, 2), sum = make(b, 5001);
        struct array over_a = make_copy(a), over_addend = make_copy(addend);
        EXPECT_OK(b->residual_forward(b, sum.data, a.data, addend.data, a.count));
        EXPECT_OK(b->residual_forward(b, over_a.data, over_a.data, addend.data, a.count));
        EXPECT_OK(b->residual_forward(b, over_addend.data, a.data, over_addend.data, a.count));
        EXPECT(same_bits(over_a, sum) && same_bits(over_addend, sum));
    }
}

static double norm_loss(const void *context) {
    const struct norm *n = context;
    EXPECT_OK(forward_norm(n));
    return inner_product(n->out, n->d_out);
}

struct norm_gradients {
    struct array d_in, d_weight, d_bias;
};
static struct norm_gradients backward_norm(
    const struct norm *n, double initial, bool accumulate_input, bool accumulate_parameters) {
    struct norm_gradients g = {make_filled(n->b, n->in.count, initial),
        make_filled(n->b, n->channels, initial), make_filled(n->b, n->channels, initial)};
    EXPECT_OK(n->b->layernorm_backward(n->b, g.d_in.data, tensor_of(g.d_weight), tensor_of(g.d_bias),
        n->d_out.data, n->in.data, n->weight.data, n->mean.data, n->rstd.data, n->rows, n->channels,
        accumulate_input, accumulate_parameters));
    return g;
}

static void test_layernorm_backward_is_central_differences(void) {
    for (int s = 0; s < NORM_SHAPES; s++) {
        struct norm n = make_norm(f64, norm_shapes[s].rows, norm_shapes[s].channels);
        EXPECT_OK(forward_norm(&n));
        struct norm_gradients g = backward_norm(&n, NAN, false, false);
        expect_gradient(norm_loss, &n, n.in, g.d_in);
        expect_gradient(norm_loss, &n, n.weight, g.d_weight);
        expect_gradient(norm_loss, &n, n.bias, g.d_bias);
    }
}

static void test_layernorm_backward_in_fp32_is_that_in_fp64(void) {
    for (int s = 0; s < NORM_SHAPES; s++) {
        struct norm exact = make_norm(f64, norm_shapes[s].rows, norm_shapes[s].channels);
        struct norm n = make_norm(f32, norm_shapes[s].rows, norm_shapes[s].channels);
        EXPECT_OK(forward_norm(&exact));
        EXPECT_OK(forward_norm(&n));
        struct norm_gradients want = backward_norm(&exact, NAN, false, false);
        struct norm_gradients g = backward_norm(&n, NAN, false, false);
        EXPECT_CLOSE(g.d_in, in_f32(want.d_in));
        EXPECT_CLOSE(g.d_weight, in_f32(want.d_weight));
        EXPECT_CLOSE(g.d_bias, in_f32(want.d_bias));
    }
}

static void test_layernorm_backward_accumulates_input_and_parameters_apart(void) {
    FOR_BOTH(b) {
        struct norm n = make_norm(b, 67, 72);
        EXPECT_OK(forward_norm(&n));
        struct norm_gradients plain = backward_norm(&n, NAN, false, false);
        struct norm_gradients input = backward_norm(&n, 1, true, false);
        struct norm_gradients parameters = backward_norm(&n, 1, false, true);
        EXPECT(same_bits(input.d_weight, plain.d_weight) && same_bits(input.d_bias, plain.d_bias));
        EXPECT(same_bits(parameters.d_in, plain.d_in));
        for (int64_t i = 0; i < plain.d_in.count; i++) {
            set(plain.d_in, i, get(plain.d_in, i) + 1);
        }
        for (int c = 0; c < n.channels; c++) {
            set(plain.d_weight, c, get(plain.d_weight, c) + 1);
            set(plain.d_bias, c, get(plain.d_bias, c) + 1);
        }
        EXPECT_CLOSE(input.d_in, plain.d_in);
        EXPECT_CLOSE(parameters.d_weight, plain.d_weight);
        EXPECT_CLOSE(parameters.d_bias, plain.d_bias);
    }
}

/* ---- embedding ---- */

static void test_embedding_forward_adds_the_rows_of_token_and_position(void) {
    FOR_BOTH(b) {
        enum { B = 3, T = 7, C = 40, V = 11 };
        struct array token = make_random(b, V * C, 1), position = make_random(b, T * C, 2);
        struct array out = make_filled(b, B * T * C, NAN), want = make(b, B * T * C);
        int32_t *tokens = make_tokens(b, B * T, V, 1);
        EXPECT_OK(b->embedding_forward(b, out.data, tokens, token.data, position.data, B, T, C));
        for (int i = 0; i < B * T * C; i++) {
            int n = i / C, c = i % C;
            set(want, i, get(token, tokens[n] * C + c) + get(position, n % T * C + c));
        }
        EXPECT(same_bits(out, want));
    }
}

static void test_embedding_backward_sums_over_equal_tokens_and_over_the_batch(void) {
    FOR_BOTH(b) {
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            enum { B = 5, T = 9, C = 72, V = 6 };
            struct array token = make_random(b, V * C, 1), position = make_random(b, T * C, 2);
            struct array want_token = make_copy(token), want_position = make_copy(position);
            struct array d_out = make_random(b, B * T * C, 3);
            int32_t *tokens = make_tokens(b, B * T, V, 1);
            for (int i = 0; i < T * C && !accumulate; i++) {
                set(want_position, i, 0);
            }
            for (int i = 0; i < B * T * C; i++) {
                int n = i / C, c = i % C, t = tokens[n] * C + c, p = n % T * C + c;
                set(want_token, t, get(want_token, t) + get(d_out, i));
                set(want_position, p, get(want_position, p) + get(d_out, i));
            }
            EXPECT_OK(b->embedding_backward(
                b, tensor_of(token), tensor_of(position), d_out.data, tokens, B, T, C, V, accumulate));
            EXPECT_CLOSE(token, want_token);
            EXPECT_CLOSE(position, want_position);
        }
    }
}

/* ---- attention ---- */

struct attention {
    struct backend *b;
    struct attention_shape shape;
    struct array qkv, out, lse, d_out, d_qkv;
};

static struct attention make_attention(struct backend *b, struct attention_shape s) {
    int64_t rows = (int64_t)s.batch * s.seq_len;
    int64_t packed = rows * (s.heads + 2 * s.kv_heads) * s.head_dim, wide = rows * s.heads * s.head_dim;
    struct attention a = {b, s, make_random(b, packed, 1), make_filled(b, wide, NAN),
        make_filled(b, rows * s.heads, NAN), make_random(b, wide, 2), make_filled(b, packed, NAN)};
    return a;
}
static enum status forward_attention(const struct attention *a) {
    return a->b->attention_forward(a->b, a->out.data, a->lse.data, NULL, NULL, a->qkv.data, a->shape);
}
static enum status backward_attention(const struct attention *a) {
    return a->b->attention_backward(
        a->b, a->d_qkv.data, NULL, a->d_out.data, a->out.data, a->lse.data, NULL, a->qkv.data, a->shape);
}

/* Index in qkv of position t's first element of head `index`, counted over queries, keys and values. */
static int64_t packed_at(const struct attention_shape *s, int64_t batch, int64_t t, int64_t index) {
    return ((batch * s->seq_len + t) * (s->heads + 2 * s->kv_heads) + index) * s->head_dim;
}

/* One query against the keys it may see, all written out. */
static void naive_attention_row(
    const struct attention *a, struct array out, struct array lse, int64_t batch, int64_t head, int64_t t) {
    const struct attention_shape *s = &a->shape;
    int64_t kv = head / (s->heads / s->kv_heads), q = packed_at(s, batch, t, head);
    int64_t at = ((batch * s->seq_len + t) * s->heads + head) * s->head_dim;
    double score[1024], highest = -INFINITY, sum = 0;
    for (int64_t j = 0; j <= t; j++) {
        int64_t k = packed_at(s, batch, j, s->heads + kv);
        score[j] = 0;
        for (int d = 0; d < s->head_dim; d++) {
            score[j] += get(a->qkv, q + d) * get(a->qkv, k + d) / sqrt(s->head_dim);
        }
        highest = fmax(highest, score[j]);
    }
    for (int64_t j = 0; j <= t; j++) {
        sum += exp(score[j] - highest);
    }
    for (int d = 0; d < s->head_dim; d++) {
        double value = 0;
        for (int64_t j = 0; j <= t; j++) {
            int64_t v = packed_at(s, batch, j, s->heads + s->kv_heads + kv);
            value += exp(score[j] - highest) / sum * get(a->qkv, v + d);
        }
        set(out, at + d, value);
    }
    set(lse, (batch * s->heads + head) * s->seq_len + t, highest + log(sum));
}

static void expect_attention_is_naive(const struct attention *a) {
    struct array out = make(a->b, a->out.count), lse = make(a->b, a->lse.count);
    for (int64_t row = 0; row < a->lse.count; row++) {
        int64_t t = row % a->shape.seq_len, head = row / a->shape.seq_len % a->shape.heads;
        naive_attention_row(a, out, lse, row / a->shape.seq_len / a->shape.heads, head, t);
    }
    EXPECT_CLOSE(a->out, out);
    EXPECT_CLOSE(a->lse, lse);
}

/* Multi-head, grouped and multi-query; short, odd, and on both sides of row and column blocks. */
static const struct attention_shape attention_shapes[] = {
    {2, 1, 3, 3, 8},
    {1, 2, 4, 2, 16},
    {2, 7, 4, 1, 8},
    {1, 33, 6, 2, 24},
    {2, 64, 2, 2, 40},
    {1, 65, 2, 1, 64},
    {1, 130, 4, 4, 12},
    {1, 330, 4, 2, 16},
    {1, 600, 1, 1, 80},
};
enum { ATTENTION_SHAPES = sizeof attention_shapes / sizeof *attention_shapes };

static void test_attention_forward_is_causal_softmax_written_out(void) {
    FOR_BOTH(b) {
        for (int s = 0; s < ATTENTION_SHAPES; s++) {
            struct attention a = make_attention(b, attention_shapes[s]);
            EXPECT_OK(forward_attention(&a));
            expect_attention_is_naive(&a);
        }
    }
}

static void test_attention_forward_holds_for_scores_of_thousands(void) {
    FOR_BOTH(b) {
        struct attention a = make_attention(b, attention_shapes[7]);
        for (int64_t i = 0; i < a.qkv.count; i++) {
            set(a.qkv, i, get(a.qkv, i) * (i % 3 == 0 ? 64 : 32));
        }
        EXPECT_OK(forward_attention(&a));
        struct array out = make(b, a.out.count), lse = make(b, a.lse.count);
        for (int64_t head = 0; head < a.shape.heads; head++) {
            for (int64_t t = 0; t < a.shape.seq_len; t++) {
                naive_attention_row(&a, out, lse, 0, head, t);
            }
        }
        EXPECT(get(a.lse, 300) > 1000);
        EXPECT_NEAR(distance(a.lse, lse), 0, tolerance(b));
        /* a score of thousands carries an error of its own size in units of the last place */
        EXPECT_NEAR(distance(a.out, out), 0, b == f64 ? 1e-11 : 1e-3);
    }
}

static void test_attention_does_not_see_the_future(void) {
    FOR_BOTH(b) {
        struct attention_shape shape = {1, 300, 4, 2, 16};
        struct attention before = make_attention(b, shape), after = make_attention(b, shape);
        int64_t changed = 270, first = packed_at(&shape, 0, changed, 0);
        for (int64_t i = first; i < after.qkv.count; i++) {
            set(after.qkv, i, 100 + (double)(i % 5));
        }
        EXPECT_OK(forward_attention(&before));
        EXPECT_OK(forward_attention(&after));
        size_t row_bytes = (size_t)(shape.heads * shape.head_dim) * dtype_bytes(dtype_of(b));
        EXPECT(memcmp(before.out.data, after.out.data, (size_t)changed * row_bytes) == 0);
        EXPECT(memcmp((char *)before.out.data + (size_t)changed * row_bytes,
                   (char *)after.out.data + (size_t)changed * row_bytes, row_bytes) != 0);
    }
}

static double attention_loss(const void *context) {
    const struct attention *a = context;
    EXPECT_OK(forward_attention(a));
    return inner_product(a->out, a->d_out);
}

static void test_attention_backward_is_central_differences(void) {
    for (int s = 0; s < ATTENTION_SHAPES; s++) {
        struct attention a = make_attention(f64, attention_shapes[s]);
        EXPECT_OK(forward_attention(&a));
        EXPECT_OK(backward_attention(&a));
        expect_gradient(attention_loss, &a, a.qkv, a.d_qkv);
    }
}

/* dQ, dK and dV differ in size by orders of magnitude: each head is measured by itself. */
static void test_attention_backward_in_fp32_is_that_in_fp64(void) {
    for (int s = 0; s < ATTENTION_SHAPES; s++) {
        struct attention exact = make_attention(f64, attention_shapes[s]);
        struct attention a = make_attention(f32, attention_shapes[s]);
        EXPECT_OK(forward_attention(&exact));
        EXPECT_OK(backward_attention(&exact));
        EXPECT_OK(forward_attention(&a));
        EXPECT_OK(backward_attention(&a));
        int packed_heads = a.shape.heads + 2 * a.shape.kv_heads, dim = a.shape.head_dim;
        for (int head = 0; head < packed_heads; head++) {
            double difference = 0, norm = 0;
            for (int64_t i = 0; i < a.d_qkv.count; i++) {
                if (i / dim % packed_heads == head) {
                    difference += pow(get(a.d_qkv, i) - get(exact.d_qkv, i), 2);
                    norm += pow(get(exact.d_qkv, i), 2);
                }
            }
            EXPECT_NEAR(sqrt(difference), 0, 5e-6 * sqrt(norm) + 1e-6);
        }
    }
}

/* ---- classifier ---- */

enum { CLASSES = 131, PADDED = 256, CLASSIFIED = 6 };

struct classified {
    struct backend *b;
    struct array logits, losses;
    int32_t targets[CLASSIFIED];
};
static struct classified make_classified(struct backend *b) {
    struct classified c = {
        b, make_random(b, CLASSIFIED * PADDED, 1), make_filled(b, CLASSIFIED, NAN), {0, 130, -1, 64, 7, -1}};
    for (int i = 0; i < CLASSIFIED * PADDED; i++) {
        if (i % PADDED >= CLASSES) {
            set(c.logits, i, i % 2 == 0 ? NAN : 1e30); /* must not count */
        }
    }
    return c;
}
static enum status classify(const struct classified *c, double d_loss, bool write_gradient) {
    return c->b->classifier(c->b, c->logits.data, c->losses.data, c->targets, CLASSIFIED, CLASSES, PADDED,
        d_loss, write_gradient);
}

static void test_classifier_loss_is_cross_entropy_over_the_unpadded_columns(void) {
    FOR_BOTH(b) {
        struct classified c = make_classified(b);
        struct array before = make_copy(c.logits), want = make_filled(b, CLASSIFIED, 0);
        for (int n = 0; n < CLASSIFIED; n++) {
            double sum = 0;
            for (int i = 0; i < CLASSES; i++) {
                sum += exp(get(c.logits, n * PADDED + i));
            }
            if (c.targets[n] >= 0) {
                set(want, n, log(sum) - get(c.logits, n * PADDED + c.targets[n]));
            }
        }
        EXPECT_OK(classify(&c, 1, false));
        EXPECT_CLOSE(c.losses, want);
        EXPECT(get(c.losses, 2) == 0 && get(c.losses, 5) == 0);
        EXPECT(same_bits(c.logits, before));
    }
}

static double classifier_loss(const void *context) {
    const struct classified *c = context;
    EXPECT_OK(classify(c, 1, false));
    double sum = 0;
    for (int n = 0; n < CLASSIFIED; n++) {
        sum += 0.25 * get(c->losses, n);
    }
    return sum;
}

static void test_classifier_gradient_is_central_differences_and_zero_in_the_padding(void) {
    struct classified forward = make_classified(f64), backward = make_classified(f64);
    EXPECT_OK(classify(&backward, 0.25, true));
    for (int i = 0; i < CLASSIFIED * PADDED; i++) {
        int n = i / PADDED;
        if (i % PADDED >= CLASSES || forward.targets[n] < 0) {
            EXPECT(get(backward.logits, i) == 0);
            set(forward.logits, i, 0);
        }
    }
    expect_gradient(classifier_loss, &forward, forward.logits, backward.logits);
    for (int n = 0; n < CLASSIFIED; n++) {
        double softmax = get(backward.logits, n * PADDED + 1) / 0.25, sum = 0;
        for (int i = 0; i < CLASSES; i++) {
            sum += exp(get(forward.logits, n * PADDED + i));
        }
        double want = forward.targets[n] < 0 ? 0 : exp(get(forward.logits, n * PADDED + 1)) / sum;
        EXPECT_NEAR(softmax, want, 1e-14);
    }
}

static void test_classifier_in_fp32_is_that_in_fp64_with_and_without_the_gradient(void) {
    struct classified exact = make_classified(f64), c = make_classified(f32),
                      loss_only = make_classified(f32);
    EXPECT_OK(classify(&exact, 0.25, true));
    EXPECT_OK(classify(&c, 0.25, true));
    EXPECT_OK(classify(&loss_only, 0.25, false));
    EXPECT_CLOSE(c.logits, in_f32(exact.logits));
    EXPECT_CLOSE(c.losses, in_f32(exact.losses));
    EXPECT(same_bits(c.losses, loss_only.losses));
}

static void test_classifier_holds_for_logits_of_ten_thousands(void) {
    FOR_BOTH(b) {
        struct classified c = make_classified(b);
        for (int i = 0; i < CLASSIFIED * PADDED; i++) {
            set(c.logits, i, i % PADDED == 7 ? 30000 : -30000 + i % 5);
        }
        EXPECT_OK(classify(&c, 1, true));
        EXPECT_NEAR(get(c.losses, 4), 0, 0);
        EXPECT_NEAR(get(c.losses, 0), 60000, 0.01);
        EXPECT_NEAR(get(c.logits, 0), -1, 0);
        EXPECT_NEAR(get(c.logits, 7), 1, 0);
    }
}

static void test_a_logit_that_is_not_a_number_makes_the_loss_not_a_number(void) {
    FOR_BOTH(b) {
        for (int write_gradient = 0; write_gradient < 2; write_gradient++) {
            struct classified c = make_classified(b);
            set(c.logits, 50, NAN);
            set(c.logits, PADDED + 50, INFINITY);
            EXPECT_OK(classify(&c, 1, write_gradient));
            EXPECT(!isfinite(get(c.losses, 0)) && !isfinite(get(c.losses, 1)) && isfinite(get(c.losses, 3)));
        }
    }
}

static void test_not_a_number_passes_through_products_layernorm_and_attention(void) {
    FOR_BOTH(b) {
        struct linear l = make_linear(b, 30, 24, 40);
        set(l.in, 5 * 24 + 3, NAN);
        EXPECT_OK(b->linear_forward(b, l.out.data, l.pre_gelu.data, l.in.data, l.weight.data, l.bias.data, 30,
            24, 40, LINEAR_BIAS_GELU));
        struct norm n = make_norm(b, 6, 40);
        set(n.in, 5 * 40 + 3, NAN);
        EXPECT_OK(forward_norm(&n));
        for (int c = 0; c < 40; c++) {
            EXPECT(isnan(get(l.out, 5 * 40 + c)) && !isnan(get(l.out, 4 * 40 + c)));
            EXPECT(isnan(get(n.out, 5 * 40 + c)) && !isnan(get(n.out, 4 * 40 + c)));
        }
        struct attention a = make_attention(b, attention_shapes[2]); /* one key/value head for all */
        set(a.qkv, packed_at(&a.shape, 0, 3, a.shape.heads), NAN);
        EXPECT_OK(forward_attention(&a));
        int width = a.shape.heads * a.shape.head_dim;
        for (int i = 0; i < a.shape.seq_len * width; i++) {
            EXPECT((i / width >= 3) == isnan(get(a.out, i)));
        }
    }
}

/* ---- sums, the step's decision, AdamW ---- */

static void test_sums_add_to_what_is_there(void) {
    FOR_BOTH(b) {
        const int64_t counts[] = {1, 7, 2048, 100003};
        for (int i = 0; i < 4; i++) {
            struct array in = make_random(b, counts[i], 1), sum = make_filled(b, 2, 0.5);
            double want = 0.5, want_squares = 0.5;
            for (int64_t j = 0; j < in.count; j++) {
                want += get(in, j);
                want_squares += get(in, j) * get(in, j);
            }
            EXPECT_OK(b->sum(b, sum.data, in.data, in.count));
            EXPECT_OK(b->sum_squares(b, tensor_at(tensor_of(sum), 1).data, tensor_of(in), in.count));
            EXPECT_NEAR(get(sum, 0), want, tolerance(b) * sqrt(want_squares));
            EXPECT_NEAR(get(sum, 1), want_squares, tolerance(b) * want_squares);
        }
    }
}

/* A million equal addends: a plain running sum in fp32 would be off by a hundredth. */
static void test_long_sums_are_exact_to_the_last_place_in_fp32(void) {
    struct array in = make_filled(f32, 1 << 20, 0.1f), sum = make_filled(f32, 1, 0);
    EXPECT_OK(f32->sum(f32, sum.data, in.data, in.count));
    EXPECT(get(sum, 0) == (float)(0.1f * 1048576.0));
}

static struct array make_control(struct backend *b, double loss_sum, double norm_squared, double steps) {
    struct array control = make_filled(b, CONTROL_COUNT, NAN);
    set(control, CONTROL_LOSS_SUM, loss_sum);
    set(control, CONTROL_NORM_SQUARED, norm_squared);
    set(control, CONTROL_OPTIMIZER_STEP, steps);
    return control;
}
static const struct step_limits plain_limits = {
    .tokens = 64, .clip = 1, .loss_limit = INFINITY, .norm_limit = INFINITY, .beta1 = 0.9, .beta2 = 0.95};

static void test_step_control_takes_mean_norm_clip_factor_and_corrections(void) {
    FOR_BOTH(b) {
        struct array control = make_control(b, 160, 16, 2);
        EXPECT_OK(b->step_control(b, control.data, &plain_limits));
        EXPECT(get(control, CONTROL_LOSS) == 2.5 && get(control, CONTROL_NORM) == 4);
        EXPECT(get(control, CONTROL_SCALE) == 0.25 && get(control, CONTROL_APPLY) == 1);
        EXPECT(get(control, CONTROL_OPTIMIZER_STEP) == 3);
        EXPECT_NEAR(get(control, CONTROL_CORRECTION1), 1 - pow(0.9, 3), tolerance(b));
        EXPECT_NEAR(get(control, CONTROL_CORRECTION2), 1 - pow(0.95, 3), tolerance(b));
        /* small gradients are not scaled up, and clip 0 never scales */
        control = make_control(b, 160, 0.25, 0);
        EXPECT_OK(b->step_control(b, control.data, &plain_limits));
        EXPECT(get(control, CONTROL_SCALE) == 1 && get(control, CONTROL_OPTIMIZER_STEP) == 1);
        struct step_limits no_clip = plain_limits;
        no_clip.clip = 0;
        control = make_control(b, 160, 16, 0);
        EXPECT_OK(b->step_control(b, control.data, &no_clip));
        EXPECT(get(control, CONTROL_SCALE) == 1 && get(control, CONTROL_APPLY) == 1);
    }
}

static void test_step_control_skips_what_is_not_finite_or_over_a_limit(void) {
    const struct {
        double loss_sum, norm_squared, loss_limit, norm_limit;
        bool apply;
    } cases[] = {
        {128, 9, INFINITY, INFINITY, true},
        {NAN, 9, INFINITY, INFINITY, false},
        {INFINITY, 9, INFINITY, INFINITY, false},
        {-INFINITY, 9, INFINITY, INFINITY, false},
        {128, NAN, INFINITY, INFINITY, false},
        {128, INFINITY, INFINITY, INFINITY, false},
        {128, 9, 2, 3, true}, /* at the limits */
        {129, 9, 2, 3, false},
        {128, 10, 2, 3, false},
        {128, 9, NAN, INFINITY, false},
    };
    FOR_BOTH(b) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            struct array control = make_control(b, cases[i].loss_sum, cases[i].norm_squared, 5);
            struct step_limits limits = plain_limits;
            limits.loss_limit = cases[i].loss_limit;
            limits.norm_limit = cases[i].norm_limit;
            EXPECT_OK(b->step_control(b, control.data, &limits));
            EXPECT(get(control, CONTROL_APPLY) == cases[i].apply);
            EXPECT(get(control, CONTROL_OPTIMIZER_STEP) == (cases[i].apply ? 6 : 5));
        }
    }
}

enum { UPDATED = 9000, DECAYED = 5003 };
static const struct adamw_options adamw_options = {
    .learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};

static void test_adamw_is_its_formula_over_several_steps(void) {
    FOR_BOTH(b) {
        struct array p = make_random(b, UPDATED, 1), m = make_filled(b, UPDATED, 0),
                     v = make_filled(b, UPDATED, 0);
        struct array want = make_copy(p);
        double moment1[UPDATED] = {0}, moment2[UPDATED] = {0}, weight[UPDATED];
        for (int i = 0; i < UPDATED; i++) {
            weight[i] = get(p, i);
        }
        struct array control = make_control(b, 64, 4, 0); /* norm 2, clipped to 1: gradients are halved */
        for (int step = 1; step <= 5; step++) {
            struct array g = make_random(b, UPDATED, 10 + (uint64_t)step);
            EXPECT_OK(b->step_control(b, control.data, &plain_limits));
            EXPECT_OK(b->adamw(b, p.data, NULL, m.data, v.data, tensor_of(g), UPDATED, DECAYED,
                &adamw_options, control.data, 0));
            for (int i = 0; i < UPDATED; i++) {
                double gradient = get(g, i) / 2;
                moment1[i] = 0.9 * moment1[i] + 0.1 * gradient;
                moment2[i] = 0.95 * moment2[i] + 0.05 * gradient * gradient;
                double direction =
                    moment1[i] / (1 - pow(0.9, step)) / (sqrt(moment2[i] / (1 - pow(0.95, step))) + 1e-8);
                weight[i] -= 0.01 * (direction + (i < DECAYED ? 0.1 * weight[i] : 0));
                set(want, i, weight[i]);
            }
            EXPECT_CLOSE(p, want);
        }
    }
}

static void test_adamw_touches_nothing_when_the_step_is_skipped(void) {
    FOR_BOTH(b) {
        struct array p = make_random(b, 100, 1), m = make_random(b, 100, 2), v = make_filled(b, 100, 0.5);
        struct array g = make_filled(b, 100, NAN), control = make_control(b, NAN, NAN, 3);
        struct array p_before = make_copy(p), m_before = make_copy(m), v_before = make_copy(v);
        EXPECT_OK(b->step_control(b, control.data, &plain_limits));
        EXPECT_OK(b->adamw(
            b, p.data, NULL, m.data, v.data, tensor_of(g), 100, 50, &adamw_options, control.data, 0));
        EXPECT(same_bits(p, p_before) && same_bits(m, m_before) && same_bits(v, v_before));
    }
}

static void test_adamw_of_pieces_is_adamw_of_the_whole(void) {
    FOR_BOTH(b) {
        struct array g = make_random(b, UPDATED, 3), control = make_control(b, 64, 4, 0);
        EXPECT_OK(b->step_control(b, control.data, &plain_limits));
        struct array p[2], m[2], v[2];
        for (int w = 0; w < 2; w++) {
            p[w] = make_random(b, UPDATED, 1);
            m[w] = make_random(b, UPDATED, 2);
            v[w] = make_filled(b, UPDATED, 0.5);
        }
        EXPECT_OK(b->adamw(b, p[0].data, NULL, m[0].data, v[0].data, tensor_of(g), UPDATED, DECAYED,
            &adamw_options, control.data, 0));
        const int64_t cuts[] = {0, 17, 4999, DECAYED + 1, UPDATED};
        for (int i = 0; i < 4; i++) {
            int64_t at = cuts[i], count = cuts[i + 1] - at, decay = max_i64(0, min_i64(DECAYED - at, count));
            EXPECT_OK(b->adamw(b, tensor_at(tensor_of(p[1]), at).data, NULL,
                tensor_at(tensor_of(m[1]), at).data, tensor_at(tensor_of(v[1]), at).data,
                tensor_at(tensor_of(g), at), count, decay, &adamw_options, control.data, 0));
        }
        EXPECT(same_bits(p[0], p[1]) && same_bits(m[0], m[1]) && same_bits(v[0], v[1]));
    }
}

/* ---- values and memory ---- */

static void test_convert_rounds_to_nearest_and_back_without_loss(void) {
    const float values[] = {0, -0.0f, 1, -1.5f, 3.14159265f, 65504, 1e-3f, 1e30f, INFINITY, -INFINITY};
    enum { VALUES = sizeof values / sizeof *values };
    const enum dtype dtypes[] = {DTYPE_F64, DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    FOR_BOTH(b) {
        for (int d = 0; d < 4; d++) {
            uint64_t there[VALUES];
            float back[VALUES];
            struct tensor in = {(void *)values, DTYPE_F32}, middle = {there, dtypes[d]},
                          out = {back, DTYPE_F32};
            EXPECT_OK(b->convert(b, middle, in, VALUES));
            EXPECT_OK(b->convert(b, out, middle, VALUES));
            for (int i = 0; i < VALUES; i++) {
                float want = dtypes[d] == DTYPE_BF16  ? bf16_to_float(float_to_bf16(values[i]))
                             : dtypes[d] == DTYPE_F16 ? f16_to_float(float_to_f16(values[i]))
                                                      : values[i];
                EXPECT(memcmp(&back[i], &want, sizeof want) == 0);
            }
        }
        float not_a_number = NAN;
        uint16_t half;
        struct tensor in = {&not_a_number, DTYPE_F32}, out = {&half, DTYPE_BF16}, tokens = {&half, DTYPE_U16};
        EXPECT_OK(b->convert(b, out, in, 1));
        EXPECT(isnan(bf16_to_float(half)));
        EXPECT(b->convert(b, tokens, in, 1) == STATUS_ERROR);
        EXPECT_CONTAINS(error_message(), "U16");
    }
}

static void test_add_sums_in_any_pair_of_types_and_reaches_no_other_element(void) {
    FOR_BOTH(b) {
        struct array in = make_random(b, 2000, 1);
        float sum[2002];
        uint16_t narrow[2000];
        struct tensor inner = {sum + 1, DTYPE_F32}, bits = {narrow, DTYPE_BF16};
        for (int i = 0; i < 2002; i++) {
            sum[i] = (float)i;
        }
        EXPECT_OK(b->convert(b, bits, tensor_of(in), 2000));
        EXPECT_OK(b->add(b, inner, bits, 2000));
        EXPECT_OK(b->add(b, inner, tensor_of(in), 2000));
        for (int i = 0; i < 2000; i++) {
            EXPECT_NEAR(sum[i + 1], i + 1 + (double)bf16_to_float(narrow[i]) + get(in, i), 3e-4);
        }
        EXPECT(sum[0] == 0 && sum[2001] == 2001);
    }
}

static void test_convert_and_fill_reach_every_element_and_no_other(void) {
    FOR_BOTH(b) {
        struct array in = make_random(b, 2000, 1);
        float out[2002] = {7};
        out[2001] = 7;
        struct tensor inner = {out + 1, DTYPE_F32};
        EXPECT_OK(b->convert(b, inner, tensor_of(in), 2000));
        for (int i = 0; i < 2000; i++) {
            EXPECT(out[i + 1] == (float)get(in, i));
        }
        EXPECT_OK(b->fill(b, inner, 0.1, 2000));
        for (int i = 0; i < 2000; i++) {
            EXPECT(out[i + 1] == 0.1f);
        }
        EXPECT(out[0] == 7 && out[2001] == 7);
    }
}

static void test_memory_is_aligned_and_counted(void) {
    struct backend *b = f32;
    uint64_t used, peak, total, used_now, peak_now;
    b->memory_usage(b, &used, &peak, &total);
    EXPECT(total == (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
    void *block[3];
    const size_t bytes[] = {0, 1, 64 << 20};
    for (int i = 0; i < 3; i++) {
        EXPECT_OK(b->memory_allocate(b, &block[i], bytes[i]));
        EXPECT(block[i] != NULL && (uintptr_t)block[i] % 256 == 0);
    }
    b->memory_usage(b, &used_now, &peak_now, &total);
    EXPECT(used_now == used + (64 << 20) + 1 && peak_now >= used_now);
    for (int i = 0; i < 3; i++) {
        b->memory_free(b, block[i]);
    }
    b->memory_free(b, NULL);
    b->memory_usage(b, &used_now, &peak, &total);
    EXPECT(used_now == used && peak == peak_now);
}

static void test_more_memory_than_there_is_is_refused_with_its_size(void) {
    uint64_t used, peak, total;
    f32->memory_usage(f32, &used, &peak, &total);
    const size_t sizes[] = {(size_t)total + 1, (size_t)(total - used) + 1, SIZE_MAX, SIZE_MAX / 2};
    for (int i = 0; i < 4; i++) {
        void *block = f32;
        EXPECT(f32->memory_allocate(f32, &block, sizes[i]) == STATUS_OUT_OF_MEMORY);
        EXPECT(block == NULL);
        char text[32];
        snprintf(text, sizeof text, "%zu bytes", sizes[i]);
        EXPECT_CONTAINS(error_message(), text);
    }
    uint64_t used_now;
    f32->memory_usage(f32, &used_now, &peak, &total);
    EXPECT(used_now == used);
}

static void test_copies_and_zeros(void) {
    struct backend *b = f32;
    struct array a = make(b, 1000), c = make(b, 1000);
    float host[1000], back[1000];
    for (int i = 0; i < 1000; i++) {
        host[i] = (float)i;
    }
    EXPECT_OK(b->copy_to_device(b, a.data, host, sizeof host));
    EXPECT_OK(b->copy(b, c.data, a.data, sizeof host));
    EXPECT_OK(b->set_zero(b, a.data, sizeof host / 2));
    EXPECT_OK(b->synchronize(b));
    EXPECT_OK(b->copy_to_host(b, back, c.data, sizeof host));
    EXPECT(memcmp(host, back, sizeof host) == 0);
    EXPECT_OK(b->copy_to_host(b, back, a.data, sizeof host));
    for (int i = 0; i < 1000; i++) {
        EXPECT(back[i] == (i < 500 ? 0 : (float)i));
    }
}

static void test_marks_tell_the_time_between_them(void) {
    FOR_BOTH(b) {
        double milliseconds, start = time_seconds();
        EXPECT_OK(b->mark(b, 0));
        EXPECT_OK(b->synchronize(b));
        double wait_start = time_seconds();
        while (time_seconds() - wait_start < 0.02) {
        }
        EXPECT_OK(b->mark(b, BACKEND_MARKS - 1));
        double most = (time_seconds() - start) * 1e3;
        EXPECT_OK(b->elapsed(b, 0, BACKEND_MARKS - 1, &milliseconds));
        EXPECT(milliseconds > 19 && milliseconds <= most);
    }
}

/* ---- the number of threads ---- */

/* The concatenated results of every op that shares work out, big enough that every thread has some. */
struct digest {
    struct array part[32];
    int count;
};
static void keep(struct digest *d, struct array a) {
    d->part[d->count++] = a;
}

static void digest_rows(struct digest *d, struct backend *b) {
    struct linear l = make_linear(b, 500, 136, 600);
    EXPECT_OK(b->linear_forward(b, l.out.data, l.pre_gelu.data, l.in.data, l.weight.data, l.bias.data, l.rows,
        l.in_features, l.out_features, LINEAR_BIAS_GELU));
    struct array d_in = make(b, l.in.count), d_weight = make(b, l.weight.count),
                 d_bias = make(b, l.out_features);
    EXPECT_OK(b->linear_backward_input(
        b, d_in.data, l.d_out.data, l.weight.data, l.in.data, l.rows, l.in_features, l.out_features));
    EXPECT_OK(b->linear_backward_parameters(b, tensor_of(d_weight), tensor_of(d_bias), l.d_out.data,
        l.in.data, l.rows, l.in_features, l.out_features, false));
    struct norm n = make_norm(b, 300, 264);
    EXPECT_OK(forward_norm(&n));
    struct norm_gradients g = backward_norm(&n, 0, false, false);
    struct array sum = make(b, n.in.count), fused = make(b, n.in.count), mean = make(b, 300),
                 rstd = make(b, 300);
    EXPECT_OK(b->residual_layernorm_forward(b, sum.data, fused.data, mean.data, rstd.data, n.in.data,
        n.d_out.data, n.weight.data, n.bias.data, 300, 264));
    struct array results[] = {l.out, l.pre_gelu, d_in, d_weight, d_bias, n.out, n.mean, n.rstd, g.d_in,
        g.d_weight, g.d_bias, sum, fused};
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        keep(d, results[i]);
    }
}

static void digest_tokens(struct digest *d, struct backend *b) {
    enum { B = 4, T = 100, C = 200, V = 300 };
    int32_t *tokens = make_tokens(b, B * T, V, 1);
    struct array token = make_random(b, V * C, 1), position = make_random(b, T * C, 2),
                 out = make(b, B * T * C);
    EXPECT_OK(b->embedding_forward(b, out.data, tokens, token.data, position.data, B, T, C));
    EXPECT_OK(
        b->embedding_backward(b, tensor_of(token), tensor_of(position), out.data, tokens, B, T, C, V, true));
    struct array logits = make_random(b, B * T * 384, 3), losses = make(b, B * T);
    EXPECT_OK(b->classifier(b, logits.data, losses.data, tokens, B * T, V, 384, 0.01, true));
    struct attention a = make_attention(b, attention_shapes[7]);
    EXPECT_OK(forward_attention(&a));
    EXPECT_OK(backward_attention(&a));
    struct array results[] = {out, token, position, logits, losses, a.out, a.lse, a.d_qkv};
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        keep(d, results[i]);
    }
}

static void digest_optimizer(struct digest *d, struct backend *b) {
    struct array sums = make_filled(b, 2, 0), values = make_random(b, 300001, 1);
    EXPECT_OK(b->sum(b, sums.data, values.data, values.count));
    EXPECT_OK(b->sum_squares(b, tensor_at(tensor_of(sums), 1).data, tensor_of(values), values.count));
    struct array p = make_random(b, UPDATED, 1), m = make_random(b, UPDATED, 2),
                 v = make_filled(b, UPDATED, 0.5);
    struct array control = make_control(b, 64, 4, 0), normal = make(b, 30000);
    EXPECT_OK(b->step_control(b, control.data, &plain_limits));
    EXPECT_OK(b->adamw(b, p.data, NULL, m.data, v.data, tensor_of(values), UPDATED, DECAYED, &adamw_options,
        control.data, 0));
    EXPECT_OK(b->random_normal(b, tensor_of(normal), normal.count, 1, 2, 3, 0.02));
    struct array results[] = {sums, p, m, v, normal};
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        keep(d, results[i]);
    }
}

static void test_every_op_gives_the_same_bits_for_any_number_of_threads(void) {
    enum status (*const create[])(struct backend **, int) = {backend_cpu_create, backend_cpu_f64_create};
    for (int precision = 0; precision < 2; precision++) {
        struct backend *b[3];
        struct digest digest[3] = {{.count = 0}, {.count = 0}, {.count = 0}};
        for (int i = 0; i < 3; i++) {
            EXPECT_OK(create[precision](&b[i], i + 1));
            digest_rows(&digest[i], b[i]);
            digest_tokens(&digest[i], b[i]);
            digest_optimizer(&digest[i], b[i]);
        }
        for (int part = 0; part < digest[0].count; part++) {
            EXPECT(same_bits(digest[0].part[part], digest[1].part[part]));
            EXPECT(same_bits(digest[0].part[part], digest[2].part[part]));
        }
        free_arrays();
        for (int i = 0; i < 3; i++) {
            b[i]->free(b[i]);
        }
    }
}

static void test_a_number_of_threads_that_makes_no_sense_is_refused(void) {
    struct backend *b;
    EXPECT(backend_cpu_create(&b, -1) == STATUS_ERROR && b == NULL);
    EXPECT_CONTAINS(error_message(), "--threads");
    EXPECT_OK(backend_cpu_create(&b, 0));
    b->free(b);
}

/* ---- profiles ---- */

static void test_profiles_tell_dtypes_and_attention_memory(void) {
    struct backend_profile p;
    struct attention_shape shape = {2, 100, 6, 3, 40};
    EXPECT_OK(backend_profile_find(&p, "cpu", "auto"));
    EXPECT(p.activation_dtype == DTYPE_F32 && p.master_dtype == p.parameter_dtype);
    EXPECT(
        backend_attention_saved_bytes(&p, shape) == 0 && backend_attention_workspace_bytes(&p, shape) == 0);
    EXPECT_OK(backend_profile_find(&p, "cpu-f64", "auto"));
    EXPECT(p.activation_dtype == DTYPE_F64 && p.gradient_dtype == DTYPE_F64);
    EXPECT_OK(backend_profile_find(&p, "cuda", "standard"));
    EXPECT(p.parameter_dtype == DTYPE_BF16 && p.statistic_dtype == DTYPE_F32 && p.master_dtype == DTYPE_F32);
    EXPECT(backend_attention_saved_bytes(&p, shape) == 2 * 6 * 100 * 104 * 2);
    EXPECT_OK(backend_profile_find(&p, "cuda", "fa2"));
    EXPECT(backend_attention_saved_bytes(&p, shape) == 0);
    EXPECT(backend_attention_workspace_bytes(&p, shape) >= 2 * 6 * 128 * 40 * 4);
    shape.seq_len = 1 << 20; /* sizes beyond 32 bits */
    EXPECT(backend_attention_workspace_bytes(&p, shape) > 1ull << 31);
    EXPECT_OK(backend_profile_find(&p, "cuda", "auto"));
    EXPECT_STRING(p.attention, "fa2"); /* on any GPU */
}

static void test_unknown_devices_and_kernels_are_named_beside_the_known_ones(void) {
    struct backend_profile p;
    EXPECT(backend_profile_find(&p, "tpu", "auto") == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "tpu");
    EXPECT_CONTAINS(error_message(), "cpu, cpu-f64, cuda");
    EXPECT(backend_profile_find(&p, "cuda", "fa9") == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "fa9");
    for (int i = 0; attention_kernel_name(i) != NULL; i++) {
        EXPECT_CONTAINS(error_message(), attention_kernel_name(i));
    }
    EXPECT(backend_profile_find(&p, "cpu", "fa2") == STATUS_ERROR);
}

#ifndef WITH_CUDA
static void test_a_build_without_cuda_says_so(void) {
    struct backend *b = f32;
    EXPECT(backend_cuda_device_count() == 0);
    EXPECT(backend_cuda_create(&b, 0, "auto", true) == STATUS_ERROR && b == NULL);
    EXPECT_CONTAINS(error_message(), "without CUDA");
}
#endif

int main(void) {
    if (backend_cpu_f64_create(&f64, 2) != STATUS_OK || backend_cpu_create(&f32, 2) != STATUS_OK) {
        printf("%s\n", error_message());
        return 1;
    }
    RUN_AND_FREE(test_exp_is_within_two_units_in_the_last_place);
    RUN_AND_FREE(test_linear_forward_is_the_sum_of_products_and_the_bias);
    RUN_AND_FREE(test_linear_forward_with_gelu_keeps_what_went_into_it);
    RUN_AND_FREE(test_gelu_is_the_tanh_form_to_full_relative_precision);
    RUN_AND_FREE(test_gelu_goes_to_zero_and_to_its_argument_far_out);
    RUN_AND_FREE(test_linear_backward_is_central_differences);
    RUN_AND_FREE(test_linear_backward_through_gelu_is_central_differences);
    RUN_AND_FREE(test_linear_backward_in_fp32_is_that_in_fp64);
    RUN_AND_FREE(test_linear_backward_accumulates_and_does_without_weight_or_bias);
    RUN_AND_FREE(test_gradients_of_another_dtype_are_refused);
    RUN_AND_FREE(test_layernorm_forward_is_its_formula);
    RUN_AND_FREE(test_layernorm_forward_keeps_the_variance_beside_a_large_mean);
    RUN_AND_FREE(test_residual_layernorm_is_bitwise_residual_then_layernorm);
    RUN_AND_FREE(test_residual_may_write_over_either_input);
    RUN_AND_FREE(test_layernorm_backward_is_central_differences);
    RUN_AND_FREE(test_layernorm_backward_in_fp32_is_that_in_fp64);
    RUN_AND_FREE(test_layernorm_backward_accumulates_input_and_parameters_apart);
    RUN_AND_FREE(test_embedding_forward_adds_the_rows_of_token_and_position);
    RUN_AND_FREE(test_embedding_backward_sums_over_equal_tokens_and_over_the_batch);
    RUN_AND_FREE(test_attention_forward_is_causal_softmax_written_out);
    RUN_AND_FREE(test_attention_forward_holds_for_scores_of_thousands);
    RUN_AND_FREE(test_attention_does_not_see_the_future);
    RUN_AND_FREE(test_attention_backward_is_central_differences);
    RUN_AND_FREE(test_attention_backward_in_fp32_is_that_in_fp64);
    RUN_AND_FREE(test_classifier_loss_is_cross_entropy_over_the_unpadded_columns);
    RUN_AND_FREE(test_classifier_gradient_is_central_differences_and_zero_in_the_padding);
    RUN_AND_FREE(test_classifier_in_fp32_is_that_in_fp64_with_and_without_the_gradient);
    RUN_AND_FREE(test_classifier_holds_for_logits_of_ten_thousands);
    RUN_AND_FREE(test_a_logit_that_is_not_a_number_makes_the_loss_not_a_number);
    RUN_AND_FREE(test_not_a_number_passes_through_products_layernorm_and_attention);
    RUN_AND_FREE(test_sums_add_to_what_is_there);
    RUN_AND_FREE(test_long_sums_are_exact_to_the_last_place_in_fp32);
    RUN_AND_FREE(test_step_control_takes_mean_norm_clip_factor_and_corrections);
    RUN_AND_FREE(test_step_control_skips_what_is_not_finite_or_over_a_limit);
    RUN_AND_FREE(test_adamw_is_its_formula_over_several_steps);
    RUN_AND_FREE(test_adamw_touches_nothing_when_the_step_is_skipped);
    RUN_AND_FREE(test_adamw_of_pieces_is_adamw_of_the_whole);
    RUN_AND_FREE(test_convert_rounds_to_nearest_and_back_without_loss);
    RUN_AND_FREE(test_add_sums_in_any_pair_of_types_and_reaches_no_other_element);
    RUN_AND_FREE(test_convert_and_fill_reach_every_element_and_no_other);
    RUN_AND_FREE(test_memory_is_aligned_and_counted);
    RUN_AND_FREE(test_more_memory_than_there_is_is_refused_with_its_size);
    RUN_AND_FREE(test_copies_and_zeros);
    RUN_AND_FREE(test_marks_tell_the_time_between_them);
    RUN_AND_FREE(test_every_op_gives_the_same_bits_for_any_number_of_threads);
    RUN_AND_FREE(test_a_number_of_threads_that_makes_no_sense_is_refused);
    RUN_AND_FREE(test_profiles_tell_dtypes_and_attention_memory);
    RUN_AND_FREE(test_unknown_devices_and_kernels_are_named_beside_the_known_ones);
#ifndef WITH_CUDA
    RUN_AND_FREE(test_a_build_without_cuda_says_so);
#endif
    f64->free(f64);
    f32->free(f32);
    return test_summary();
}
