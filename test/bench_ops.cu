/* How fast each op of the CUDA backend is, at the shapes of one GPT model:

       make build/test/bench_ops && build/test/bench_ops [CHANNELS [SEQ_LEN [BATCH]]]       (2048 2048 16: GPT-3 1.3B)

   Products are told in TFLOP/s, everything else in TB/s of the bytes that an op cannot avoid (each input read once,
   each output written once) and as a share of what a plain copy reaches in the same run. Random data, medians. */
#include "../llmc/cuda/cuda.cuh"
#include "../llmc/random.h"

#include <math.h>
#include <stdlib.h>

enum { REPEATS = 21, VOCAB_SIZE = 50257, PADDED_VOCAB = 50304 };

static struct backend *gpu;
static double copy_rate; /* bytes a second */

static void must(enum status status) {
    if (status != STATUS_OK) {
        printf("%s\n", error_message());
        exit(1);
    }
}

static void *device_memory(int64_t bytes) {
    void *memory;
    must(gpu->memory_allocate(gpu, &memory, (size_t)bytes));
    return memory;
}

static void *random_memory(int64_t count, enum dtype dtype, double std) {
    static uint64_t stream;
    struct tensor t = {device_memory(count * (int64_t)dtype_bytes(dtype)), dtype};
    must(gpu->random_normal(gpu, t, count, 1, stream++, 0, std));
    return t.data;
}

/* ---- timing ---- */

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Milliseconds of one call on the GPU: the median over REPEATS calls. They are enqueued one after the other, as in a
   training step, so that the GPU does not wait for the host. */
static double time_op(enum status (*op)(void)) {
    static cudaEvent_t mark[REPEATS + 1];
    float sample[REPEATS];
    for (int i = 0; mark[REPEATS] == NULL && i <= REPEATS; i++) {
        cudaEventCreate(&mark[i]);
    }
    for (int i = -3; i <= REPEATS; i++) {
        if (i >= 0) {
            cudaEventRecord(mark[i], gpu->state->stream);
        }
        if (i < REPEATS) {
            must(op());
        }
    }
    must(gpu->synchronize(gpu));
    for (int i = 0; i < REPEATS; i++) {
        cudaEventElapsedTime(&sample[i], mark[i], mark[i + 1]);
    }
    qsort(sample, REPEATS, sizeof sample[0], compare_floats);
    return sample[REPEATS / 2];
}

static void report_rate(const char *name, double bytes, double ms) {
    double rate = bytes / ms * 1e3;
    copy_rate = copy_rate == 0 ? rate : copy_rate;
    printf("%-44s %9.4f ms %8.2f TB/s %5.0f%% of copy\n", name, ms, rate * 1e-12, 100 * rate / copy_rate);
    fflush(stdout);
}

static void report_bytes(const char *name, double bytes, enum status (*op)(void)) {
    report_rate(name, bytes, time_op(op));
}

static double report_flops(const char *name, double flops, enum status (*op)(void)) {
    double ms = time_op(op);
    printf("%-44s %9.4f ms %8.0f TFLOP/s\n", name, ms, flops / ms * 1e-9);
    fflush(stdout);
    return ms;
}

/* ---- the model's buffers ---- */

static int channels, seq_len, batch;
static int64_t rows, parameters;
static void *activation[3], *wide[2], *logits, *weight, *vector, *mean, *rstd, *losses, *control;
static void *master, *first_moment, *second_moment, *token_table;
static struct tensor gradients;
static int32_t *tokens, *skewed_tokens;
static int in_features, out_features; /* of the linear layer under test */

static void allocate_buffers(void) {
    rows = (int64_t)batch * seq_len;
    for (int i = 0; i < 3; i++) {
        activation[i] = random_memory(rows * channels, DTYPE_BF16, 1);
    }
    for (int i = 0; i < 2; i++) {
        wide[i] = random_memory(rows * 4 * channels, DTYPE_BF16, 1);
    }
    logits = random_memory(rows * PADDED_VOCAB, DTYPE_BF16, 1);
    token_table = random_memory((int64_t)PADDED_VOCAB * channels, DTYPE_BF16, 0.02);
    vector = random_memory(PADDED_VOCAB, DTYPE_BF16, 1);
    mean = random_memory(rows, DTYPE_F32, 1);
    rstd = random_memory(rows, DTYPE_F32, 1);
    losses = random_memory(rows, DTYPE_F32, 1);
    parameters = (int64_t)12 * channels * channels; /* one layer */
    int64_t table = (int64_t)PADDED_VOCAB * channels;
    weight = random_memory(parameters > table ? parameters : table, DTYPE_BF16, 0.02);
    gradients.data = random_memory(parameters > table ? parameters : table, DTYPE_F32, 1e-3);
    gradients.dtype = DTYPE_F32;
    master = random_memory(parameters, DTYPE_F32, 0.02);
    first_moment = random_memory(parameters, DTYPE_F32, 1e-3);
    second_moment = device_memory(parameters * 4);
    struct tensor second = {second_moment, DTYPE_F32};
    must(gpu->fill(gpu, second, 1e-6, parameters));
    control = device_memory(CONTROL_COUNT * 4);
    struct tensor ones = {control, DTYPE_F32};
    must(gpu->fill(gpu, ones, 1, CONTROL_COUNT));

    int32_t *host;
    must(ALLOCATE(host, rows));
    tokens = (int32_t *)device_memory(rows * 4);
    skewed_tokens = (int32_t *)device_memory(rows * 4);
    for (int skewed = 0; skewed < 2; skewed++) {
        for (int64_t i = 0; i < rows; i++) {
            bool common = skewed && random_uniform(1, 2, (uint64_t)i) < 0.3;
            host[i] = common ? 11 : (int32_t)(random_uniform(1, 1, (uint64_t)i) * VOCAB_SIZE);
        }
        must(gpu->copy_to_device(gpu, skewed ? skewed_tokens : tokens, host, (size_t)rows * 4));
    }
    free(host);
}

/* ---- the ops ---- */

static enum status run_copy(void) {
    return gpu->copy(gpu, wide[0], wide[1], (size_t)(rows * 4 * channels) * 2);
}
static enum status run_embedding_forward(void) {
    return gpu->embedding_forward(gpu, activation[0], tokens, token_table, weight, batch, seq_len, channels);
}
static enum status embedding_backward(const int32_t *of_tokens) {
    struct tensor positions = {logits, DTYPE_F32};
    return gpu->embedding_backward(
        gpu, gradients, positions, activation[0], of_tokens, batch, seq_len, channels, VOCAB_SIZE, true);
}
static enum status run_embedding_backward(void) {
    return embedding_backward(tokens);
}
static enum status run_embedding_backward_skewed(void) {
    return embedding_backward(skewed_tokens);
}
static enum status run_layernorm(void) {
    return gpu->layernorm_forward(
        gpu, activation[1], mean, rstd, activation[0], vector, vector, rows, channels);
}
static enum status run_residual_layernorm(void) {
    return gpu->residual_layernorm_forward(gpu, wide[0], activation[2], mean, rstd, activation[0],
        activation[1], vector, vector, rows, channels);
}
static enum status run_residual(void) {
    return gpu->residual_forward(gpu, activation[2], activation[0], activation[1], rows * channels);
}
static enum status run_layernorm_backward(void) {
    return gpu->layernorm_backward(gpu, activation[2], gradients, tensor_at(gradients, channels),
        activation[0], activation[1], vector, mean, rstd, rows, channels, true, true);
}
static enum status run_gelu(void) {
    return gpu->gelu_forward(gpu, wide[1], wide[0], rows * 4 * channels);
}
static enum status run_classifier(void) {
    return gpu->classifier(gpu, logits, losses, tokens, rows, VOCAB_SIZE, PADDED_VOCAB, 1.0, true);
}
static enum status run_sum_squares(void) {
    return gpu->sum_squares(gpu, losses, gradients, parameters);
}
static enum status run_adamw(void) {
    static const struct adamw_options options = {1e-4, 0.9, 0.95, 1e-8, 0.1};
    return gpu->adamw(gpu, weight, master, first_moment, second_moment, gradients, parameters, parameters,
        &options, control, 0);
}
static enum status run_adamw_stochastic(void) {
    static const struct adamw_options options = {1e-4, 0.9, 0.95, 1e-8, 0.1};
    return gpu->adamw(gpu, weight, master, first_moment, second_moment, gradients, parameters, parameters,
        &options, control, 7);
}

/* in (N,I) is the narrow or the wide activation, out (N,O) the other or the logits */
static void *linear_in(void) {
    return in_features > channels ? wide[0] : activation[0];
}
static void *linear_out(void) {
    return out_features > 4 * channels ? logits : wide[1];
}
static enum status run_linear(void) {
    return gpu->linear_forward(gpu, linear_out(), NULL, linear_in(), weight,
        out_features > 4 * channels ? NULL : vector, rows, in_features, out_features, LINEAR_BIAS);
}
static enum status run_linear_gelu(void) {
    return gpu->linear_forward(gpu, wide[1], wide[0], activation[0], weight, vector, rows, in_features,
        out_features, LINEAR_BIAS_GELU);
}
static enum status run_linear_backward_input(void) {
    return gpu->linear_backward_input(
        gpu, linear_in(), linear_out(), weight, NULL, rows, in_features, out_features);
}
static enum status run_linear_backward_input_gelu(void) {
    return gpu->linear_backward_input(
        gpu, wide[0], activation[0], weight, wide[1], rows, in_features, out_features);
}
static enum status run_linear_backward_parameters(void) {
    struct tensor none = {NULL, DTYPE_F32};
    return gpu->linear_backward_parameters(
        gpu, gradients, none, linear_out(), linear_in(), rows, in_features, out_features, true);
}
static enum status run_linear_backward_parameters_bias(void) {
    struct tensor d_bias = {master, DTYPE_F32};
    return gpu->linear_backward_parameters(
        gpu, gradients, d_bias, linear_out(), linear_in(), rows, in_features, out_features, true);
}

/* Of all products of a step, as if the model had LAYERS layers. */
enum { LAYERS = 24 };
static double products_flops, products_ms;

static void report_linear(const char *name, int in, int out, int count) {
    char line[64];
    in_features = in;
    out_features = out;
    double flops = 2.0 * (double)rows * in * out, ms = 0;
    snprintf(line, sizeof line, "%s: forward", name);
    ms += report_flops(line, flops, run_linear);
    snprintf(line, sizeof line, "%s: d_in", name);
    ms += report_flops(line, flops, run_linear_backward_input);
    snprintf(line, sizeof line, "%s: d_weight +=", name);
    ms += report_flops(line, flops, run_linear_backward_parameters);
    products_flops += 3 * flops * count;
    products_ms += ms * count;
}

/* A bias gradient comes with a product: the same with and without it, the product as small as can be. */
static void report_bias_gradient(const char *name, int out) {
    in_features = 8;
    out_features = out;
    double without = time_op(run_linear_backward_parameters),
           with = time_op(run_linear_backward_parameters_bias);
    report_rate(name, (double)rows * out * 2, with - without);
}

int main(int argc, char **argv) {
    channels = argc > 1 ? atoi(argv[1]) : 2048;
    seq_len = argc > 2 ? atoi(argv[2]) : 2048;
    batch = argc > 3 ? atoi(argv[3]) : 16;
    must(backend_cuda_create(&gpu, 0, "standard", true));
    uint64_t used, peak, total;
    gpu->memory_usage(gpu, &used, &peak, &total);
    allocate_buffers();
    printf("%s: %d x %d tokens, %d channels\n", gpu->device_name, batch, seq_len, channels);
    printf("%llu MiB of %llu in use before any buffer\n", (unsigned long long)(used >> 20),
        (unsigned long long)(total >> 20));
    double bytes = (double)rows * channels * 2, wide_bytes = 4 * bytes;
    double row_bytes = (double)rows * 4, table_bytes = (double)seq_len * channels * 4;
    report_bytes("copy", 2 * wide_bytes, run_copy);
    report_bytes("embedding forward", 2 * bytes, run_embedding_forward);
    /* distinct tokens of a uniform draw, each row read and written */
    double touched = VOCAB_SIZE * (1 - exp(-(double)rows / VOCAB_SIZE)) * channels * 8;
    double touched_skewed = VOCAB_SIZE * (1 - exp(-0.7 * (double)rows / VOCAB_SIZE)) * channels * 8;
    report_bytes("embedding backward", bytes + touched + 2 * table_bytes, run_embedding_backward);
    report_bytes("embedding backward, 30% one token", bytes + touched_skewed + 2 * table_bytes,
        run_embedding_backward_skewed);
    report_bytes("layernorm", 2 * bytes + 2 * row_bytes, run_layernorm);
    report_bytes("residual + layernorm", 4 * bytes + 2 * row_bytes, run_residual_layernorm);
    report_bytes("residual", 3 * bytes, run_residual);
    report_bytes("layernorm backward", 4 * bytes + 2 * row_bytes, run_layernorm_backward);
    report_bytes("gelu", 2 * wide_bytes, run_gelu);
    report_bytes("classifier", 2 * (double)rows * PADDED_VOCAB * 2, run_classifier);
    report_bytes("sum of squares, one layer", (double)parameters * 4, run_sum_squares);
    report_bytes("adamw, one layer", (double)parameters * 30, run_adamw);
    report_bytes("adamw, stochastic rounding", (double)parameters * 30, run_adamw_stochastic);
    report_bias_gradient("bias gradient of qkv", 3 * channels);
    report_bias_gradient("bias gradient of mlp up", 4 * channels);
    report_bias_gradient("bias gradient of mlp down", channels);
    report_linear("qkv", channels, 3 * channels, LAYERS);
    report_linear("attention projection", channels, channels, LAYERS);
    report_linear("mlp up", channels, 4 * channels, LAYERS);
    report_linear("mlp down", 4 * channels, channels, LAYERS);
    report_linear("head", channels, PADDED_VOCAB, 1);
    printf("%-44s %9.4f ms %8.0f TFLOP/s\n", "all products of 24 layers and the head", products_ms,
        products_flops / products_ms * 1e-9);
    in_features = channels;
    out_features = 4 * channels;
    report_flops("mlp up: forward with gelu", 8.0 * (double)rows * channels * channels, run_linear_gelu);
    in_features = 4 * channels;
    out_features = channels;
    report_flops("mlp down: d_in through gelu", 8.0 * (double)rows * channels * channels,
        run_linear_backward_input_gelu);
    gpu->free(gpu);
    return 0;
}
