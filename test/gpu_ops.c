/* Every op of the CUDA backend against the CPU backend in fp64, on the same bf16-rounded inputs.

   Inputs are random and new in every run; FLASHGPT_SEED=n repeats the run that printed n. Outputs are poisoned with
   NaN before each call, and each call is made twice and must give the same bits. A bf16 result may differ from the
   reference by little more than its own rounding; an fp32 one by a small part of the results' size. Where an op rounds
   in the middle (the residual before its layernorm, what goes into a GELU), the reference goes on from the rounded
   value. FLASHGPT_SMALL leaves out what takes long under compute-sanitizer (make sanitize-gpu): large shapes whose
   code smaller ones reach as well. */
#include "../attention/attention.h"
#include "../llmc/backend.h"
#include "../llmc/random.h"
#include "control.h"
#include "test.h"

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

static struct backend *gpu, *cpu;
static uint64_t seed, draws;
static bool small;

/* ---- values that live on both sides ---- */

struct values {
    int64_t count;
    struct tensor gpu;
    double *cpu;
};

enum { MAX_VALUES = 64 };
static struct values pool[MAX_VALUES];
static int pool_count;

static void *host_memory(size_t count, size_t size) {
    void *memory;
    if (allocate(&memory, count, size) != STATUS_OK) {
        printf("%s\n0 passed, 1 failed\n", error_message());
        exit(1);
    }
    return memory;
}

static void *device_memory(size_t bytes) {
    void *memory;
    if (gpu->memory_allocate(gpu, &memory, bytes) != STATUS_OK) {
        printf("%s\n0 passed, 1 failed\n", error_message());
        exit(1);
    }
    return memory;
}

static void release_values(void) {
    for (int i = 0; i < pool_count; i++) {
        gpu->memory_free(gpu, pool[i].gpu.data);
        free(pool[i].cpu);
    }
    pool_count = 0;
}

static double normal(void) {
    return random_normal(seed, 0, draws++);
}
static double uniform(void) {
    return random_uniform(seed, 1, draws++);
}

/* `host` as the GPU's dtype, in `out` (room for count floats) */
static void encode(void *out, const double *host, enum dtype dtype, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (dtype == DTYPE_F32) {
            ((float *)out)[i] = (float)host[i];
        } else {
            ((uint16_t *)out)[i] = float_to_bf16((float)host[i]);
        }
    }
}
static void decode(double *host, const void *in, enum dtype dtype, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        host[i] = dtype == DTYPE_F32 ? ((const float *)in)[i] : bf16_to_float(((const uint16_t *)in)[i]);
    }
}

static void upload(struct values *v) {
    void *bits = host_memory((size_t)v->count, 4);
    encode(bits, v->cpu, v->gpu.dtype, v->count);
    decode(v->cpu, bits, v->gpu.dtype, v->count); /* the reference works on what was rounded */
    EXPECT_OK(gpu->copy_to_device(gpu, v->gpu.data, bits, (size_t)v->count * dtype_bytes(v->gpu.dtype)));
    free(bits);
}

static struct values *new_values(int64_t count, enum dtype dtype) {
    if (pool_count == MAX_VALUES) {
        printf("too many values in a test\n0 passed, 1 failed\n");
        exit(1);
    }
    struct values *v = &pool[pool_count++];
    v->count = count;
    v->gpu.dtype = dtype;
    v->gpu.data = device_memory((size_t)count * dtype_bytes(dtype));
    v->cpu = host_memory((size_t)count, sizeof *v->cpu);
    return v;
}

static struct values *random_values(int64_t count, enum dtype dtype, double mean, double std) {
    struct values *v = new_values(count, dtype);
    for (int64_t i = 0; i < count; i++) {
        v->cpu[i] = mean + std * normal();
    }
    upload(v);
    return v;
}

static void poison(struct values *v) {
    size_t bytes = (size_t)v->count * dtype_bytes(v->gpu.dtype);
    void *ones = host_memory(bytes, 1);
    memset(ones, 0xFF, bytes); /* a NaN in every float dtype */
    EXPECT_OK(gpu->copy_to_device(gpu, v->gpu.data, ones, bytes));
    free(ones);
    for (int64_t i = 0; i < v->count; i++) {
        v->cpu[i] = NAN;
    }
}

static struct values *output_values(int64_t count, enum dtype dtype) {
    struct values *v = new_values(count, dtype);
    poison(v);
    return v;
}

static double *download(const struct values *v) {
    void *bits = host_memory((size_t)v->count, 4);
    double *host = host_memory((size_t)v->count, sizeof *host);
    EXPECT_OK(gpu->copy_to_host(gpu, bits, v->gpu.data, (size_t)v->count * dtype_bytes(v->gpu.dtype)));
    decode(host, bits, v->gpu.dtype, v->count);
    free(bits);
    return host;
}

/* The reference takes over what the GPU has. */
static void adopt(struct values *v) {
    double *host = download(v);
    memcpy(v->cpu, host, (size_t)v->count * sizeof *host);
    free(host);
}

static int32_t *device_tokens(const int32_t *host, int64_t count) {
    int32_t *tokens = device_memory((size_t)count * sizeof *tokens);
    EXPECT_OK(gpu->copy_to_device(gpu, tokens, host, (size_t)count * sizeof *tokens));
    return tokens;
}

/* ---- comparison ---- */

/* Everything that the GPU holds in `v`, for the comparison of two calls. */
static void *snapshot(const struct values *v) {
    size_t bytes = (size_t)v->count * dtype_bytes(v->gpu.dtype);
    void *bits = host_memory(bytes, 1);
    EXPECT_OK(gpu->copy_to_host(gpu, bits, v->gpu.data, bytes));
    return bits;
}

static void expect_same_bits(const struct values *v, void *first, const char *what) {
    void *second = snapshot(v);
    if (memcmp(first, second, (size_t)v->count * dtype_bytes(v->gpu.dtype)) != 0) {
        printf("    %s: the same call gave other bits the second time\n", what);
        test_failures_in_this_++;
    }
    free(first);
    free(second);
}

/* |gpu - cpu| <= roundings * (largest rounding of cpu to its dtype) + absolute, for every element */
static void expect_within(const struct values *v, double roundings, double absolute, const char *what) {
    double *got = download(v), unit = v->gpu.dtype == DTYPE_F32 ? 0x1p-24 : 0x1p-8, worst = 0;
    int64_t at = 0;
    for (int64_t i = 0; i < v->count; i++) {
        double excess = fabs(got[i] - v->cpu[i]) / (roundings * unit * fabs(v->cpu[i]) + absolute + 1e-30);
        if (!(excess <= worst)) {
            worst = isnan(excess) ? INFINITY : excess;
            at = i;
        }
    }
    if (!(worst <= 1)) {
        printf("    %s: element %lld of %lld is %.9g, not %.9g: %.3g times the tolerance\n", what,
            (long long)at, (long long)v->count, got[at], v->cpu[at], worst);
        test_failures_in_this_++;
    }
    free(got);
}

/* The same, with an absolute part in proportion to the results' root mean square. */
static void expect_close(const struct values *v, double roundings, double noise, const char *what) {
    double squares = 0;
    for (int64_t i = 0; i < v->count; i++) {
        squares += v->cpu[i] * v->cpu[i];
    }
    expect_within(v, roundings, noise * sqrt(squares / (double)v->count), what);
}

/* ||gpu - cpu|| <= relative * ||cpu|| */
static void expect_small_norm(const struct values *v, double relative, const char *what) {
    double *got = download(v), difference = 0, size = 0;
    for (int64_t i = 0; i < v->count; i++) {
        difference += (got[i] - v->cpu[i]) * (got[i] - v->cpu[i]);
        size += v->cpu[i] * v->cpu[i];
    }
    if (!(sqrt(difference) <= relative * sqrt(size))) {
        printf("    %s: off by %.3g of the norm\n", what, sqrt(difference / size));
        test_failures_in_this_++;
    }
    free(got);
}

static const double EXACT_BF16 = 1.001; /* correctly rounded */

/* ---- shapes ---- */

static const int channel_sizes[] = {
    8, 64, 72, 136, 200, 256, 768, 776, 1000, 1600, 2048, 2560, 4104, 5120, 12288};
enum { CHANNEL_SIZES = sizeof channel_sizes / sizeof channel_sizes[0] };

/* Rows so that the test's work stays small: odd, and more than one block has. */
static int rows_for(int channels) {
    return small ? 11 : channels <= 256 ? 1337 : channels <= 2560 ? 331 : 77;
}

static char label_text[128];
static const char *label(const char *what, int64_t a, int64_t b, int64_t c) {
    snprintf(label_text, sizeof label_text, "%s [%lld, %lld, %lld]", what, (long long)a, (long long)b,
        (long long)c);
    return label_text;
}

/* ---- memory ---- */

static void test_copies_return_what_was_sent_even_if_the_buffer_is_reused_at_once(void) {
    size_t bytes = 37 * 1024 * 1024 + 13;
    uint8_t *sent = host_memory(bytes, 1), *back = host_memory(bytes, 1);
    for (size_t i = 0; i < bytes; i++) {
        sent[i] = (uint8_t)(i * 2654435761u >> 13);
    }
    void *a = device_memory(bytes), *b = device_memory(bytes);
    memcpy(back, sent, bytes);
    EXPECT_OK(gpu->copy_to_device(gpu, a, back, bytes));
    memset(back, 0, bytes);
    EXPECT_OK(gpu->copy(gpu, b, a, bytes));
    EXPECT_OK(gpu->set_zero(gpu, a, bytes));
    EXPECT_OK(gpu->copy_to_host(gpu, back, b, bytes));
    EXPECT(memcmp(sent, back, bytes) == 0);
    EXPECT_OK(gpu->copy_to_host(gpu, back, a, bytes));
    EXPECT(back[0] == 0 && memcmp(back, back + 1, bytes - 1) == 0);
    gpu->memory_free(gpu, a);
    gpu->memory_free(gpu, b);
    free(sent);
    free(back);
}

static void test_out_of_memory_names_gpu_and_sizes(void) {
    void *memory;
    uint64_t used, peak, total;
    gpu->memory_usage(gpu, &used, &peak, &total);
    EXPECT(used > 0 && used <= peak && peak <= total);
    EXPECT(gpu->memory_allocate(gpu, &memory, total) == STATUS_OUT_OF_MEMORY);
    EXPECT(memory == NULL);
    EXPECT_CONTAINS(error_message(), gpu->device_name);
    EXPECT_CONTAINS(error_message(), "GiB asked");
    EXPECT_CONTAINS(error_message(), "--micro-batch");
    /* and everything works on */
    EXPECT_OK(gpu->memory_allocate(gpu, &memory, 1 << 20));
    EXPECT_OK(gpu->set_zero(gpu, memory, 1 << 20));
    EXPECT_OK(gpu->synchronize(gpu));
    gpu->memory_free(gpu, memory);
}

static void test_memory_usage_follows_allocations(void) {
    uint64_t before, with, after, peak, total;
    const uint64_t bytes = 1u << 30;
    gpu->memory_usage(gpu, &before, &peak, &total);
    void *memory = device_memory(bytes);
    gpu->memory_usage(gpu, &with, &peak, &total);
    gpu->memory_free(gpu, memory);
    gpu->memory_usage(gpu, &after, &peak, &total);
    EXPECT(with >= before + bytes && with < before + bytes + (64u << 20));
    EXPECT(after < before + (64u << 20));
    EXPECT(peak >= with);
}

/* ---- values ---- */

static const enum dtype float_dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};

/* `count` floats made by the CPU backend's op and the GPU's: the same bits? */
static void expect_equal_bytes(const void *device, const void *host, size_t bytes, const char *what) {
    void *got = host_memory(bytes, 1);
    EXPECT_OK(gpu->copy_to_host(gpu, got, device, bytes));
    if (memcmp(got, host, bytes) != 0) {
        printf("    %s: not the CPU's bits\n", what);
        test_failures_in_this_++;
    }
    free(got);
}

static void test_convert_add_and_fill_give_the_cpus_bits(void) {
    enum { COUNT = 70001, OFFSET = 3 };
    char *host_in = host_memory(COUNT + OFFSET, 4), *host_out = host_memory(COUNT + OFFSET, 4);
    void *in = device_memory((COUNT + OFFSET) * 4), *out = device_memory((COUNT + OFFSET) * 4);
    float *floats = host_memory(COUNT + OFFSET, sizeof *floats);
    for (int i = 0; i < COUNT + OFFSET; i++) {
        floats[i] = (float)(normal() * pow(10, 12 * uniform() - 6));
    }
    floats[10] = INFINITY;
    floats[11] = -0.0f;
    for (int a = 0; a < 3; a++) {
        for (int b = 0; b < 3; b++) {
            struct tensor from = {floats, DTYPE_F32}, cpu_in = {host_in, float_dtypes[a]};
            struct tensor cpu_out = {host_out, float_dtypes[b]};
            struct tensor gpu_in = {in, float_dtypes[a]}, gpu_out = {out, float_dtypes[b]};
            EXPECT_OK(cpu->convert(cpu, cpu_in, from, COUNT + OFFSET));
            EXPECT_OK(gpu->copy_to_device(gpu, in, host_in, (COUNT + OFFSET) * dtype_bytes(float_dtypes[a])));
            EXPECT_OK(cpu->fill(cpu, cpu_out, 0.3, COUNT + OFFSET));
            EXPECT_OK(gpu->fill(gpu, gpu_out, 0.3, COUNT + OFFSET));
            EXPECT_OK(cpu->convert(cpu, tensor_at(cpu_out, OFFSET), tensor_at(cpu_in, OFFSET), COUNT));
            EXPECT_OK(gpu->convert(gpu, tensor_at(gpu_out, OFFSET), tensor_at(gpu_in, OFFSET), COUNT));
            expect_equal_bytes(out, host_out, (COUNT + OFFSET) * dtype_bytes(float_dtypes[b]),
                label("convert between dtypes", a, b, COUNT));
            EXPECT_OK(cpu->add(cpu, tensor_at(cpu_out, OFFSET), tensor_at(cpu_in, OFFSET), COUNT));
            EXPECT_OK(gpu->add(gpu, tensor_at(gpu_out, OFFSET), tensor_at(gpu_in, OFFSET), COUNT));
            expect_equal_bytes(out, host_out, (COUNT + OFFSET) * dtype_bytes(float_dtypes[b]),
                label("add between dtypes", a, b, COUNT));
        }
    }
    gpu->memory_free(gpu, in);
    gpu->memory_free(gpu, out);
    free(host_in);
    free(host_out);
    free(floats);
}

static void test_random_normal_gives_the_cpus_bits_in_any_split(void) {
    enum { COUNT = 100003, SPLIT = 4567 };
    void *host = host_memory(COUNT, 4), *device = device_memory(COUNT * 4);
    for (int d = 0; d < 3; d++) {
        struct tensor on_cpu = {host, float_dtypes[d]}, on_gpu = {device, float_dtypes[d]};
        int64_t first = (int64_t)1 << 33;
        EXPECT_OK(cpu->random_normal(cpu, on_cpu, COUNT, seed, 7, first, 0.02));
        EXPECT_OK(gpu->random_normal(gpu, on_gpu, SPLIT, seed, 7, first, 0.02));
        EXPECT_OK(
            gpu->random_normal(gpu, tensor_at(on_gpu, SPLIT), COUNT - SPLIT, seed, 7, first + SPLIT, 0.02));
        expect_equal_bytes(device, host, COUNT * dtype_bytes(float_dtypes[d]), dtype_name(float_dtypes[d]));
    }
    gpu->memory_free(gpu, device);
    free(host);
}

/* ---- embedding ---- */

enum token_mix { UNIFORM, SKEWED, ONE_TOKEN };

static void draw_tokens(int32_t *tokens, int64_t count, int vocab_size, enum token_mix mix) {
    for (int64_t i = 0; i < count; i++) {
        bool common = mix == ONE_TOKEN || (mix == SKEWED && uniform() < 0.3);
        tokens[i] = common ? vocab_size / 3 : (int32_t)(uniform() * vocab_size);
    }
}

static void check_embedding(
    int batch, int seq_len, int channels, int vocab_size, enum token_mix mix, enum dtype gradient) {
    int64_t rows = (int64_t)batch * seq_len;
    double roundings =
        gradient == DTYPE_F32 ? 32 : EXACT_BF16; /* thousands of fp32 additions, or one to bf16 */
    int32_t *host_tokens = host_memory((size_t)rows, sizeof *host_tokens);
    draw_tokens(host_tokens, rows, vocab_size, mix);
    int32_t *tokens = device_tokens(host_tokens, rows);
    struct values *token_table = random_values((int64_t)vocab_size * channels, DTYPE_BF16, 0, 1);
    struct values *position_table = random_values((int64_t)seq_len * channels, DTYPE_BF16, 0, 1);
    struct values *out = output_values(rows * channels, DTYPE_BF16);
    EXPECT_OK(cpu->embedding_forward(
        cpu, out->cpu, host_tokens, token_table->cpu, position_table->cpu, batch, seq_len, channels));
    EXPECT_OK(gpu->embedding_forward(gpu, out->gpu.data, tokens, token_table->gpu.data,
        position_table->gpu.data, batch, seq_len, channels));
    expect_close(out, EXACT_BF16, 0, label("embedding forward", rows, channels, vocab_size));

    for (int accumulate = 0; accumulate < 2; accumulate++) {
        struct values *d_out = random_values(rows * channels, DTYPE_BF16, 0, 1);
        struct values *d_token = random_values((int64_t)vocab_size * channels, gradient, 0, 1);
        struct values *d_position = random_values((int64_t)seq_len * channels, gradient, 0, 1);
        void *bits[2] = {NULL, NULL}, *positions = NULL;
        for (int call = 0; call < 2; call++) {
            upload(d_token);
            if (accumulate) {
                upload(d_position);
            } else {
                poison(d_position);
            }
            EXPECT_OK(gpu->embedding_backward(gpu, d_token->gpu, d_position->gpu, d_out->gpu.data, tokens,
                batch, seq_len, channels, vocab_size, accumulate));
            bits[call] = snapshot(d_token);
            positions = call == 0 ? snapshot(d_position) : positions;
        }
        free(bits[1]);
        expect_same_bits(d_token, bits[0], "d_token_table");
        expect_same_bits(d_position, positions, "d_position_table");
        struct tensor reference_token = {d_token->cpu, DTYPE_F64},
                      reference_position = {d_position->cpu, DTYPE_F64};
        EXPECT_OK(cpu->embedding_backward(cpu, reference_token, reference_position, d_out->cpu, host_tokens,
            batch, seq_len, channels, vocab_size, accumulate));
        expect_close(d_token, roundings, 1e-5, label("d_token_table", rows, channels, vocab_size));
        expect_close(d_position, roundings, 1e-5, label("d_position_table", rows, channels, vocab_size));
    }
    gpu->memory_free(gpu, tokens);
    free(host_tokens);
    release_values();
}

static void test_embedding_matches_reference(void) {
    check_embedding(1, 1, small ? 8 : 64, 50257, UNIFORM, DTYPE_F32);
    check_embedding(2, 31, 72, 300, UNIFORM, DTYPE_F32);
    check_embedding(3, 77, 776, 257, UNIFORM, DTYPE_BF16);
    check_embedding(1, 4095, small ? 8 : 64, 50257, UNIFORM, DTYPE_F32);
    check_embedding(2, 129, 5120, 1000, UNIFORM, DTYPE_F32);
    check_embedding(1, 33, 12288, 100, UNIFORM, DTYPE_F32);
}

static void test_embedding_backward_is_right_when_few_tokens_fill_the_batch(void) {
    check_embedding(4, 2048, small ? 8 : 64, 50257, SKEWED, DTYPE_F32);
    check_embedding(8, 1024, small ? 8 : 136, 70000, SKEWED, DTYPE_F32); /* over 2^16: three sorting passes */
    check_embedding(5, 999, small ? 8 : 200, 50257, ONE_TOKEN, DTYPE_F32);
    check_embedding(5, 100, 64, 3, UNIFORM, DTYPE_F32);
    check_embedding(1, 64, 64, 1, ONE_TOKEN, DTYPE_BF16);
}

/* ---- layernorm ---- */

static void check_layernorm_forward(int64_t rows, int channels) {
    struct values *in = random_values(rows * channels, DTYPE_BF16, 0.5, 2);
    struct values *addend = random_values(rows * channels, DTYPE_BF16, 0, 1);
    struct values *weight = random_values(channels, DTYPE_BF16, 1, 0.3);
    struct values *bias = random_values(channels, DTYPE_BF16, 0, 0.3);
    struct values *sum = output_values(rows * channels, DTYPE_BF16);
    struct values *out = output_values(rows * channels, DTYPE_BF16);
    struct values *mean = output_values(rows, DTYPE_F32), *rstd = output_values(rows, DTYPE_F32);

    EXPECT_OK(gpu->layernorm_forward(gpu, out->gpu.data, mean->gpu.data, rstd->gpu.data, in->gpu.data,
        weight->gpu.data, bias->gpu.data, rows, channels));
    EXPECT_OK(cpu->layernorm_forward(
        cpu, out->cpu, mean->cpu, rstd->cpu, in->cpu, weight->cpu, bias->cpu, rows, channels));
    expect_close(out, EXACT_BF16, 1e-5, label("layernorm", rows, channels, 0));
    expect_within(mean, 16, 2e-6, label("layernorm mean", rows, channels, 0));
    expect_close(rstd, 16, 0, label("layernorm rstd", rows, channels, 0));

    poison(out);
    poison(mean);
    poison(rstd);
    EXPECT_OK(gpu->residual_layernorm_forward(gpu, sum->gpu.data, out->gpu.data, mean->gpu.data,
        rstd->gpu.data, in->gpu.data, addend->gpu.data, weight->gpu.data, bias->gpu.data, rows, channels));
    EXPECT_OK(cpu->residual_forward(cpu, sum->cpu, in->cpu, addend->cpu, rows * channels));
    expect_close(sum, EXACT_BF16, 0, label("residual sum", rows, channels, 0));
    adopt(sum);
    EXPECT_OK(cpu->layernorm_forward(
        cpu, out->cpu, mean->cpu, rstd->cpu, sum->cpu, weight->cpu, bias->cpu, rows, channels));
    expect_close(out, EXACT_BF16, 1e-5, label("residual + layernorm", rows, channels, 0));
    expect_within(mean, 16, 2e-6, label("residual + layernorm mean", rows, channels, 0));
    expect_close(rstd, 16, 0, label("residual + layernorm rstd", rows, channels, 0));

    /* what recomputation relies on: the stored sum normalised alone, and summed in place, give the same bits */
    void *out_bits = snapshot(out), *mean_bits = snapshot(mean), *rstd_bits = snapshot(rstd);
    void *sum_bits = snapshot(sum);
    poison(out);
    poison(mean);
    poison(rstd);
    EXPECT_OK(gpu->layernorm_forward(gpu, out->gpu.data, mean->gpu.data, rstd->gpu.data, sum->gpu.data,
        weight->gpu.data, bias->gpu.data, rows, channels));
    expect_same_bits(out, out_bits, label("layernorm of the stored sum", rows, channels, 0));
    expect_same_bits(mean, mean_bits, label("mean of the stored sum", rows, channels, 0));
    expect_same_bits(rstd, rstd_bits, label("rstd of the stored sum", rows, channels, 0));
    for (int in_place = 0; in_place < 4; in_place++) {
        upload(in);
        upload(addend);
        struct values *to = in_place % 2 == 0 ? in : addend;
        if (in_place < 2) {
            EXPECT_OK(gpu->residual_layernorm_forward(gpu, to->gpu.data, out->gpu.data, mean->gpu.data,
                rstd->gpu.data, in->gpu.data, addend->gpu.data, weight->gpu.data, bias->gpu.data, rows,
                channels));
        } else {
            EXPECT_OK(
                gpu->residual_forward(gpu, to->gpu.data, in->gpu.data, addend->gpu.data, rows * channels));
        }
        void *in_place_bits = snapshot(to);
        EXPECT(memcmp(in_place_bits, sum_bits, (size_t)(rows * channels) * 2) == 0);
        free(in_place_bits);
    }
    free(sum_bits);
    release_values();
}

static void test_layernorm_forward_matches_reference(void) {
    for (int i = 0; i < CHANNEL_SIZES; i++) {
        check_layernorm_forward(rows_for(channel_sizes[i]), channel_sizes[i]);
        check_layernorm_forward(1, channel_sizes[i]);
    }
}

static void check_layernorm_backward(int64_t rows, int channels, enum dtype gradient, bool accumulate) {
    struct values *in = random_values(rows * channels, DTYPE_BF16, 0.5, 2);
    struct values *d_out = random_values(rows * channels, DTYPE_BF16, 0, 1);
    struct values *weight = random_values(channels, DTYPE_BF16, 1, 0.3);
    struct values *d_in = random_values(rows * channels, DTYPE_BF16, 0, 1);
    struct values *mean = new_values(rows, DTYPE_F32), *rstd = new_values(rows, DTYPE_F32);
    struct values *d_weight = random_values(channels, gradient, 0, 1);
    struct values *d_bias = random_values(channels, gradient, 0, 1);
    double *unused = host_memory((size_t)(rows * channels), sizeof *unused);
    EXPECT_OK(cpu->layernorm_forward(
        cpu, unused, mean->cpu, rstd->cpu, in->cpu, weight->cpu, weight->cpu, rows, channels));
    free(unused);
    upload(mean);
    upload(rstd);

    void *bits[3] = {NULL, NULL, NULL};
    struct values *outputs[3] = {d_in, d_weight, d_bias};
    for (int call = 0; call < 2; call++) {
        for (int i = 0; i < 3; i++) {
            if (accumulate) {
                upload(outputs[i]);
            } else {
                poison(outputs[i]);
            }
        }
        EXPECT_OK(gpu->layernorm_backward(gpu, d_in->gpu.data, d_weight->gpu, d_bias->gpu, d_out->gpu.data,
            in->gpu.data, weight->gpu.data, mean->gpu.data, rstd->gpu.data, rows, channels, accumulate,
            accumulate));
        for (int i = 0; call == 0 && i < 3; i++) {
            bits[i] = snapshot(outputs[i]);
        }
    }
    for (int i = 0; i < 3; i++) {
        expect_same_bits(outputs[i], bits[i], label("layernorm backward", rows, channels, i));
    }
    struct tensor reference_weight = {d_weight->cpu, DTYPE_F64}, reference_bias = {d_bias->cpu, DTYPE_F64};
    EXPECT_OK(cpu->layernorm_backward(cpu, d_in->cpu, reference_weight, reference_bias, d_out->cpu, in->cpu,
        weight->cpu, mean->cpu, rstd->cpu, rows, channels, accumulate, accumulate));
    expect_close(d_in, EXACT_BF16, 1e-5, label("layernorm d_in", rows, channels, accumulate));
    expect_close(d_weight, EXACT_BF16, 1e-5, label("layernorm d_weight", rows, channels, accumulate));
    expect_close(d_bias, EXACT_BF16, 1e-5, label("layernorm d_bias", rows, channels, accumulate));
    release_values();
}

static void test_layernorm_backward_matches_reference(void) {
    for (int i = 0; i < CHANNEL_SIZES; i++) {
        int channels = channel_sizes[i];
        check_layernorm_backward(rows_for(channels), channels, DTYPE_F32, false);
        check_layernorm_backward(rows_for(channels), channels, i % 2 == 0 ? DTYPE_F32 : DTYPE_BF16, true);
        check_layernorm_backward(1, channels, DTYPE_F32, false);
    }
    /* several rows for each group of warps */
    check_layernorm_backward(301, 12288, DTYPE_F32, true);
    check_layernorm_backward(1201, 2560, DTYPE_F32, false);
    if (!small) {
        check_layernorm_backward(3001, 2048, DTYPE_F32, true);
        check_layernorm_backward(5003, 768, DTYPE_F32, false);
        check_layernorm_backward(20011, 72, DTYPE_F32, true);
    }
}

/* ---- linear and GELU ---- */

struct linear_shape {
    int rows, in, out;
};

static const struct linear_shape linear_shapes[] = {{1, 64, 64}, {7, 72, 200}, {128, 256, 768},
    {333, 136, 72}, {1023, 768, 64}, {257, 1000, 3000}, {128, 64, 50304}, {61, 5120, 512}, {4096, 128, 384},
    {2048, 512, 1024}};
static int linear_shape_count(void) {
    return small ? 4 : (int)(sizeof linear_shapes / sizeof linear_shapes[0]);
}

static void check_linear_forward(struct linear_shape s, bool with_bias, enum linear_epilogue epilogue) {
    bool gelu = epilogue == LINEAR_BIAS_GELU;
    int64_t out_count = (int64_t)s.rows * s.out;
    struct values *in = random_values((int64_t)s.rows * s.in, DTYPE_BF16, 0, 1);
    struct values *weight = random_values((int64_t)s.out * s.in, DTYPE_BF16, 0, 1 / sqrt(s.in));
    struct values *bias = with_bias ? random_values(s.out, DTYPE_BF16, 0, 1) : NULL;
    struct values *out = output_values(out_count, DTYPE_BF16);
    struct values *pre_gelu = gelu ? output_values(out_count, DTYPE_BF16) : NULL;
    void *bits = NULL;
    for (int call = 0; call < 2; call++) {
        poison(out);
        EXPECT_OK(gpu->linear_forward(gpu, out->gpu.data, gelu ? pre_gelu->gpu.data : NULL, in->gpu.data,
            weight->gpu.data, with_bias ? bias->gpu.data : NULL, s.rows, s.in, s.out, epilogue));
        bits = call == 0 ? snapshot(out) : bits;
    }
    expect_same_bits(out, bits, label("linear forward", s.rows, s.in, s.out));
    struct values *product = gelu ? pre_gelu : out;
    EXPECT_OK(cpu->linear_forward(cpu, product->cpu, NULL, in->cpu, weight->cpu, with_bias ? bias->cpu : NULL,
        s.rows, s.in, s.out, LINEAR_BIAS));
    expect_close(product, EXACT_BF16, 2e-5, label("linear forward", s.rows, s.in, s.out));
    if (gelu) {
        adopt(pre_gelu);
        EXPECT_OK(cpu->gelu_forward(cpu, out->cpu, pre_gelu->cpu, out_count));
        expect_close(out, EXACT_BF16, 1e-6, label("linear + gelu forward", s.rows, s.in, s.out));
        bits = snapshot(out);
        poison(out);
        EXPECT_OK(gpu->gelu_forward(gpu, out->gpu.data, pre_gelu->gpu.data, out_count));
        expect_same_bits(out, bits, label("gelu on its own", s.rows, s.in, s.out));
    }
    release_values();
}

static void test_linear_forward_matches_reference(void) {
    for (int i = 0; i < linear_shape_count(); i++) {
        check_linear_forward(linear_shapes[i], true, LINEAR_BIAS);
        check_linear_forward(linear_shapes[i], false, LINEAR_BIAS);
        check_linear_forward(linear_shapes[i], true, LINEAR_BIAS_GELU);
    }
}

static void check_linear_backward_input(struct linear_shape s, bool gelu) {
    int64_t in_count = (int64_t)s.rows * s.in;
    struct values *d_out = random_values((int64_t)s.rows * s.out, DTYPE_BF16, 0, 1);
    struct values *weight = random_values((int64_t)s.out * s.in, DTYPE_BF16, 0, 1 / sqrt(s.out));
    struct values *pre_gelu = random_values(in_count, DTYPE_BF16, 0, 2);
    struct values *d_in = output_values(in_count, DTYPE_BF16);
    void *bits = NULL;
    for (int call = 0; call < 2; call++) {
        poison(d_in);
        EXPECT_OK(gpu->linear_backward_input(gpu, d_in->gpu.data, d_out->gpu.data, weight->gpu.data,
            gelu ? pre_gelu->gpu.data : NULL, s.rows, s.in, s.out));
        bits = call == 0 ? snapshot(d_in) : bits;
    }
    expect_same_bits(d_in, bits, label("linear d_in", s.rows, s.in, s.out));
    EXPECT_OK(cpu->linear_backward_input(
        cpu, d_in->cpu, d_out->cpu, weight->cpu, gelu ? pre_gelu->cpu : NULL, s.rows, s.in, s.out));
    /* the product may be rounded once more before gelu' multiplies it */
    expect_close(d_in, gelu ? 3 : EXACT_BF16, 2e-5,
        label(gelu ? "linear d_in through gelu" : "linear d_in", s.rows, s.in, s.out));
    release_values();
}

static void test_linear_backward_input_matches_reference(void) {
    for (int i = 0; i < linear_shape_count(); i++) {
        check_linear_backward_input(linear_shapes[i], false);
        check_linear_backward_input(linear_shapes[i], true);
    }
}

static void check_linear_backward_parameters(
    struct linear_shape s, enum dtype gradient, bool with_bias, bool accumulate) {
    struct values *d_out = random_values((int64_t)s.rows * s.out, DTYPE_BF16, 0.1, 1);
    struct values *in = random_values((int64_t)s.rows * s.in, DTYPE_BF16, 0.1, 1);
    struct values *d_weight = random_values((int64_t)s.out * s.in, gradient, 0, 1);
    struct values *d_bias = random_values(s.out, gradient, 0, 1);
    struct tensor none = {NULL, gradient};
    void *weight_bits = NULL, *bias_bits = NULL;
    for (int call = 0; call < 2; call++) {
        if (accumulate) {
            upload(d_weight);
            upload(d_bias);
        } else {
            poison(d_weight);
            poison(d_bias);
        }
        EXPECT_OK(gpu->linear_backward_parameters(gpu, d_weight->gpu, with_bias ? d_bias->gpu : none,
            d_out->gpu.data, in->gpu.data, s.rows, s.in, s.out, accumulate));
        if (call == 0) {
            weight_bits = snapshot(d_weight);
            bias_bits = snapshot(d_bias);
        }
    }
    expect_same_bits(d_weight, weight_bits, label("linear d_weight", s.rows, s.in, s.out));
    expect_same_bits(d_bias, bias_bits, label("linear d_bias", s.rows, s.in, s.out));
    if (with_bias) {
        bias_bits = snapshot(d_bias);
        if (accumulate) {
            upload(d_bias);
        } else {
            poison(d_bias);
        }
        EXPECT_OK(gpu->linear_backward_parameters(
            gpu, none, d_bias->gpu, d_out->gpu.data, in->gpu.data, s.rows, s.in, s.out, accumulate));
        expect_same_bits(d_bias, bias_bits, label("linear d_bias alone", s.rows, s.in, s.out));
    }
    struct tensor reference_weight = {d_weight->cpu, DTYPE_F64};
    struct tensor reference_bias = {with_bias ? d_bias->cpu : NULL, DTYPE_F64};
    EXPECT_OK(cpu->linear_backward_parameters(
        cpu, reference_weight, reference_bias, d_out->cpu, in->cpu, s.rows, s.in, s.out, accumulate));
    /* bf16 gradients: cuBLAS rounds the product, then the sum with what was there */
    double product_rounding = gradient == DTYPE_BF16 && accumulate ? 5 * sqrt(s.rows) * 0x1p-8 : 0;
    expect_within(d_weight, EXACT_BF16, 2e-5 * sqrt(s.rows) + product_rounding,
        label("linear d_weight", s.rows, s.in, s.out));
    if (with_bias) {
        expect_close(d_bias, EXACT_BF16, 1e-5, label("linear d_bias", s.rows, s.in, s.out));
    }
    release_values();
}

static void test_linear_backward_parameters_matches_reference(void) {
    for (int i = 0; i < linear_shape_count(); i++) {
        check_linear_backward_parameters(linear_shapes[i], DTYPE_F32, true, false);
        check_linear_backward_parameters(linear_shapes[i], DTYPE_F32, true, true);
        check_linear_backward_parameters(linear_shapes[i], DTYPE_BF16, true, i % 2 == 0);
        check_linear_backward_parameters(linear_shapes[i], DTYPE_F32, false, i % 2 == 0);
    }
}

static void test_gelu_is_right_for_every_finite_bf16(void) {
    struct values *in = new_values(1 << 16, DTYPE_BF16), *out = output_values(1 << 16, DTYPE_BF16);
    for (int i = 0; i < 1 << 16; i++) {
        in->cpu[i] = isfinite(bf16_to_float((uint16_t)i)) ? bf16_to_float((uint16_t)i) : 0;
        in->cpu[i] = fabs(in->cpu[i]) > 1e12 ? 0 : in->cpu[i]; /* where x^3 and its root are finite */
    }
    upload(in);
    EXPECT_OK(gpu->gelu_forward(gpu, out->gpu.data, in->gpu.data, 1 << 16));
    EXPECT_OK(cpu->gelu_forward(cpu, out->cpu, in->cpu, 1 << 16));
    double *got = download(out);
    int wrong = 0;
    for (int i = 0; i < 1 << 16; i++) {
        /* below -10 or so the result is under 1e-20 and may be off in its last bits */
        double tolerance = 1.01 * 0x1p-8 * fabs(out->cpu[i]) + 1e-20;
        wrong += !(fabs(got[i] - out->cpu[i]) <= tolerance);
    }
    EXPECT(wrong == 0);
    free(got);
    release_values();
}

/* ---- classifier ---- */

static void check_classifier(int64_t rows, int vocab_size, double logit_std, bool write_gradient) {
    int padded_vocab = (int)round_up(vocab_size, 128);
    const double d_loss = 0.125;
    struct values *logits = random_values(rows * padded_vocab, DTYPE_BF16, 0, logit_std);
    struct values *losses = output_values(rows, DTYPE_F32);
    int32_t *host_targets = host_memory((size_t)rows, sizeof *host_targets);
    for (int64_t i = 0; i < rows; i++) {
        host_targets[i] = i % 5 == 3 ? -1 : (int32_t)(uniform() * vocab_size);
    }
    host_targets[0] = vocab_size - 1;
    int32_t *targets = device_tokens(host_targets, rows);
    void *untouched = snapshot(logits), *logits_bits = NULL, *losses_bits = NULL;
    for (int call = 0; call < 2; call++) {
        upload(logits);
        poison(losses);
        EXPECT_OK(gpu->classifier(gpu, logits->gpu.data, losses->gpu.data, targets, rows, vocab_size,
            padded_vocab, d_loss, write_gradient));
        if (call == 0) {
            logits_bits = snapshot(logits);
            losses_bits = snapshot(losses);
        }
    }
    expect_same_bits(logits, logits_bits, label("d_logits", rows, vocab_size, write_gradient));
    expect_same_bits(losses, losses_bits, label("losses", rows, vocab_size, write_gradient));
    EXPECT_OK(cpu->classifier(
        cpu, logits->cpu, losses->cpu, host_targets, rows, vocab_size, padded_vocab, d_loss, write_gradient));
    if (write_gradient) {
        expect_within(logits, EXACT_BF16, 1e-6 * d_loss, label("d_logits", rows, vocab_size, 0));
        free(untouched);
    } else {
        expect_same_bits(logits, untouched, label("logits that are only read", rows, vocab_size, 0));
    }
    expect_within(losses, 4, 1e-6 * (1 + 5 * logit_std), label("losses", rows, vocab_size, write_gradient));
    gpu->memory_free(gpu, targets);
    free(host_targets);
    release_values();
}

static void test_classifier_matches_reference(void) {
    const int vocab_sizes[] = {1, 3, 128, 257, 1000, 50257, 131073};
    int rows = small ? 3 : 37;
    for (int i = 0; i < 7; i++) {
        check_classifier(rows, vocab_sizes[i], 1, true);
        check_classifier(rows, vocab_sizes[i], 1, false);
        check_classifier(5, vocab_sizes[i], 30, true);
    }
    check_classifier(1, 50257, 2, true);
}

/* ---- attention ---- */

static void check_attention(struct attention_shape s) {
    int64_t tokens = (int64_t)s.batch * s.seq_len;
    int64_t packed = tokens * (s.heads + 2 * s.kv_heads) * s.head_dim, dense = tokens * s.heads * s.head_dim;
    struct values *qkv = random_values(packed, DTYPE_BF16, 0, 1);
    struct values *d_out = random_values(dense, DTYPE_BF16, 0, 1);
    struct values *out = output_values(dense, DTYPE_BF16), *d_qkv = output_values(packed, DTYPE_BF16);
    struct values *logsumexp = output_values(tokens * s.heads, DTYPE_F32);
    void *saved = device_memory(backend_attention_saved_bytes(&gpu->profile, s));
    void *workspace = device_memory(backend_attention_workspace_bytes(&gpu->profile, s));
    void *bits[3] = {NULL, NULL, NULL};
    struct values *outputs[3] = {out, logsumexp, d_qkv};
    for (int call = 0; call < 2; call++) {
        for (int i = 0; i < 3; i++) {
            poison(outputs[i]);
        }
        EXPECT_OK(gpu->attention_forward(
            gpu, out->gpu.data, logsumexp->gpu.data, saved, workspace, qkv->gpu.data, s));
        EXPECT_OK(gpu->attention_backward(gpu, d_qkv->gpu.data, workspace, d_out->gpu.data, out->gpu.data,
            logsumexp->gpu.data, saved, qkv->gpu.data, s));
        for (int i = 0; call == 0 && i < 3; i++) {
            bits[i] = snapshot(outputs[i]);
        }
    }
    for (int i = 0; i < 3; i++) {
        expect_same_bits(outputs[i], bits[i], label("attention", s.seq_len, s.heads, s.head_dim));
    }
    EXPECT_OK(cpu->attention_forward(cpu, out->cpu, logsumexp->cpu, NULL, NULL, qkv->cpu, s));
    /* P and O are each rounded to bf16, which is 2^-9 or less; scores that are kept in bf16 add as much again */
    expect_small_norm(out, 1e-2, label("attention out", s.seq_len, s.heads, s.head_dim));
    /* scores that are kept in bf16 are each off by 2^-8 of their size or less, and so is the logsumexp of one score */
    expect_small_norm(logsumexp, 0x1p-8, label("attention logsumexp", s.seq_len, s.heads, s.head_dim));
    EXPECT_OK(cpu->attention_backward(
        cpu, d_qkv->cpu, NULL, d_out->cpu, out->cpu, logsumexp->cpu, NULL, qkv->cpu, s));
    expect_small_norm(d_qkv, 1e-2, label("attention d_qkv", s.seq_len, s.heads, s.head_dim));
    gpu->memory_free(gpu, saved);
    gpu->memory_free(gpu, workspace);
    release_values();
}

/* The kernels themselves have tests of their own; this is the packed layout. */
static void test_attention_matches_reference(void) {
    const struct attention_shape shapes[] = {{1, 1, 1, 1, 64}, {2, 2, 2, 1, 64}, {1, 127, 3, 3, 80},
        {2, 256, 4, 4, 64}, {3, 130, 6, 1, 64}, {1, 513, 4, 2, 128}, {1, 1024, 2, 2, 64}, {1, 4095, 1, 1, 64},
        {1, 4096, 2, 1, 128}};
    size_t count = small ? 5 : sizeof shapes / sizeof shapes[0];
    for (size_t i = 0; i < count; i++) {
        check_attention(shapes[i]);
    }
}

/* ---- sums and optimizer ---- */

static double read_float(const void *device) {
    float value = NAN;
    EXPECT_OK(gpu->copy_to_host(gpu, &value, device, sizeof value));
    return value;
}

static void test_sums_add_every_element_once_at_any_length_and_offset(void) {
    const int64_t counts[] = {0, 1, 2, 3, 4, 5, 31, 1023, 4097, 262147, 9000001};
    void *sum = device_memory(4);
    float start = 2.5f;
    size_t lengths = sizeof counts / sizeof counts[0] - (small ? 1 : 0);
    for (size_t i = 0; i < lengths; i++) {
        for (int dtype = 0; dtype < 2; dtype++) {
            int64_t offset = (int64_t)(uniform() * 8);
            enum dtype type = dtype == 0 ? DTYPE_F32 : DTYPE_BF16;
            struct values *in =
                random_values(counts[i] + offset + 9, type, 0.5, 1); /* what lies around must not count */
            double expected = start, expected_squares = start;
            for (int64_t j = 0; j < counts[i]; j++) {
                expected += in->cpu[offset + j];
                expected_squares += in->cpu[offset + j] * in->cpu[offset + j];
            }
            double results[2];
            for (int call = 0; call < 2; call++) {
                EXPECT_OK(gpu->copy_to_device(gpu, sum, &start, sizeof start));
                EXPECT_OK(gpu->sum_squares(gpu, sum, tensor_at(in->gpu, offset), counts[i]));
                results[call] = read_float(sum);
            }
            EXPECT(results[0] == results[1]);
            EXPECT_NEAR(results[0], expected_squares, 2e-6 * expected_squares);
            if (type == DTYPE_F32) {
                EXPECT_OK(gpu->copy_to_device(gpu, sum, &start, sizeof start));
                EXPECT_OK(gpu->sum(gpu, sum, tensor_at(in->gpu, offset).data, counts[i]));
                EXPECT_NEAR(read_float(sum), expected, 2e-6 * expected_squares);
            }
            release_values();
        }
    }
    gpu->memory_free(gpu, sum);
}

static void test_step_control_decides_as_the_reference(void) {
    for (int i = 0; i < CONTROL_CASES; i++) {
        const struct control_case *c = &control_cases[i];
        struct values *control = new_values(CONTROL_COUNT, DTYPE_F32);
        control_before(control->cpu, c);
        upload(control);
        EXPECT_OK(gpu->step_control(gpu, control->gpu.data, &c->limits));
        EXPECT_OK(cpu->step_control(cpu, control->cpu, &c->limits));
        double *got = download(control);
        expect_same_control(got, control->cpu);
        free(got);
        release_values();
    }
}

static struct values *control_values(bool apply) {
    struct values *control = new_values(CONTROL_COUNT, DTYPE_F32);
    control_of_step_3(control->cpu, apply);
    upload(control);
    return control;
}

static const struct adamw_options adamw_options = {3e-3, 0.9, 0.95, 1e-8, 0.1};

static void check_adamw(
    int64_t count, int64_t decay_count, enum dtype gradient, bool has_masters, bool apply) {
    struct values *control = control_values(apply);
    const double weight_size = 0.02, gradient_size = 1e-3;
    struct values *parameters = random_values(count, DTYPE_BF16, 0, weight_size);
    struct values *master = random_values(count, DTYPE_F32, 0, weight_size);
    struct values *first_moment = random_values(count, DTYPE_F32, 0, gradient_size);
    struct values *second_moment = new_values(count, DTYPE_F32);
    struct values *gradients = random_values(count, gradient, 0, gradient_size);
    for (int64_t i = 0; i < count; i++) {
        second_moment->cpu[i] = gradient_size * gradient_size * (0.1 + uniform());
    }
    upload(second_moment);
    void *before = snapshot(parameters);
    EXPECT_OK(gpu->adamw(gpu, parameters->gpu.data, has_masters ? master->gpu.data : NULL,
        first_moment->gpu.data, second_moment->gpu.data, gradients->gpu, count, decay_count, &adamw_options,
        control->gpu.data, 0));
    if (!apply) {
        expect_same_bits(parameters, before, "parameters of a step that is not applied");
    } else {
        free(before);
    }
    struct values *updated = has_masters ? master : parameters;
    struct tensor reference_gradients = {gradients->cpu, DTYPE_F64};
    EXPECT_OK(cpu->adamw(cpu, updated->cpu, NULL, first_moment->cpu, second_moment->cpu, reference_gradients,
        count, decay_count, &adamw_options, control->cpu, 0));
    /* what is added may cancel: the absolute part goes by the size of the terms */
    double update_error = 2e-6 * weight_size;
    expect_within(first_moment, 8, 0x1p-23 * gradient_size, label("first moment", count, decay_count, apply));
    expect_within(second_moment, 8, 0x1p-23 * gradient_size * gradient_size,
        label("second moment", count, decay_count, apply));
    if (has_masters) {
        expect_within(master, 8, update_error, label("adamw master", count, decay_count, apply));
        if (apply) {
            adopt(master);
            memcpy(parameters->cpu, master->cpu, (size_t)count * sizeof(double));
        }
    }
    expect_within(parameters, EXACT_BF16, has_masters ? 0 : update_error,
        label("adamw parameters", count, decay_count, apply));
    release_values();
}

static void test_adamw_matches_reference(void) {
    const int64_t counts[] = {1, 3, 4, 1021, 70003};
    for (int i = 0; i < 5; i++) {
        for (int masters = 0; masters < 2; masters++) {
            check_adamw(counts[i], counts[i], DTYPE_F32, masters, true);
            check_adamw(counts[i], 0, DTYPE_F32, masters, true);
            check_adamw(counts[i], counts[i] / 2, DTYPE_BF16, masters, true);
            check_adamw(counts[i], counts[i] / 2, DTYPE_F32, masters, false);
        }
    }
}

static void test_stochastic_rounding_is_right_on_average_and_repeatable(void) {
    enum { COUNT = 1 << 20 };
    struct values *control = control_values(true);
    struct values *parameters = output_values(COUNT, DTYPE_BF16), *master = new_values(COUNT, DTYPE_F32);
    struct values *zero = new_values(COUNT, DTYPE_F32), *gradients = new_values(COUNT, DTYPE_F32);
    struct adamw_options still = {0, 0.9, 0.95, 1e-8, 0}; /* learning rate 0: the masters stay */
    for (int i = 0; i < COUNT; i++) {
        master->cpu[i] = 1.0 + 0.3 / 128; /* 3 tenths of the way from one bf16 to the next */
    }
    upload(master);
    upload(zero);
    upload(gradients);
    void *bits = NULL;
    for (int call = 0; call < 2; call++) {
        EXPECT_OK(gpu->adamw(gpu, parameters->gpu.data, master->gpu.data, zero->gpu.data, zero->gpu.data,
            gradients->gpu, COUNT, 0, &still, control->gpu.data, 99));
        bits = call == 0 ? snapshot(parameters) : bits;
    }
    expect_same_bits(parameters, bits, "stochastic rounding");
    double *got = download(parameters);
    int up = 0, neither = 0;
    for (int i = 0; i < COUNT; i++) {
        up += got[i] == 1.0 + 1.0 / 128;
        neither += got[i] != 1.0 + 1.0 / 128 && got[i] != 1.0;
    }
    free(got);
    EXPECT(neither == 0);
    EXPECT_NEAR((double)up / COUNT, 0.3, 5 * sqrt(0.3 * 0.7 / COUNT));
    release_values();
}

/* ---- the cache of chosen algorithms ---- */

/* The bits of a product large enough to have its algorithm chosen by time, by a backend of its own. */
static void *large_product(void) {
    struct backend *shared = gpu;
    uint64_t first_draw = draws;
    EXPECT_OK(backend_cuda_create(&gpu, 0, "standard", true));
    struct values *in = random_values(1024 * 1024, DTYPE_BF16, 0, 1);
    struct values *weight = random_values(512 * 1024, DTYPE_BF16, 0, 1);
    struct values *out = output_values(1024 * 512, DTYPE_BF16);
    EXPECT_OK(gpu->linear_forward(
        gpu, out->gpu.data, NULL, in->gpu.data, weight->gpu.data, NULL, 1024, 1024, 512, LINEAR_BIAS));
    void *bits = snapshot(out);
    release_values();
    gpu->free(gpu);
    gpu = shared;
    draws = first_draw;
    return bits;
}

/* The only file of the folder, read whole; its path as well. */
static char *read_cache(char *path, size_t size, const char *folder) {
    uint8_t *text = NULL;
    size_t bytes = 0;
    DIR *directory = opendir(folder);
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] != '.') {
            EXPECT_OK(path_join(path, size, folder, entry->d_name));
            EXPECT_OK(file_read_all(path, &text, &bytes));
        }
    }
    if (directory != NULL) {
        closedir(directory);
    }
    return (char *)text;
}

static void test_chosen_algorithms_are_kept_and_a_damaged_file_is_no_error(void) {
    char folder[512], path[1024] = "";
    EXPECT_OK(path_join(folder, sizeof folder, getenv("FLASHGPT_CACHE"), "kept"));
    char *usual = string_copy(getenv("FLASHGPT_CACHE"));
    setenv("FLASHGPT_CACHE", folder, 1);
    void *chosen = large_product(), *kept = large_product();
    EXPECT(memcmp(chosen, kept, 1024 * 512 * 2) == 0);
    char *text = read_cache(path, sizeof path, folder);
    EXPECT(text != NULL && strchr(text, '\n') != NULL);
    EXPECT(text != NULL && strchr(text, '\n')[1] == '\0'); /* one line: the second backend found it */
    free(text);
    free(kept);
    free(chosen);

    const char damaged[] = "\0\n512 1024 1024 1 0 what is this\n512 1024 1024 1 0 2 0 1 256 256\n";
    EXPECT_OK(file_write_all(path, damaged, sizeof damaged - 1));
    free(large_product());
    text = read_cache(path, sizeof path, folder);
    EXPECT(text != NULL && strstr(text + 2, "1024 1024 1 0 2 0 1 256 256 256 256 256") != NULL);
    free(text);

    setenv("FLASHGPT_CACHE", "/proc/no/such/place", 1);
    free(large_product());
    setenv("FLASHGPT_CACHE", usual, 1);
    free(usual);
}

/* ---- bad input ---- */

static void test_shapes_that_do_not_fit_vectors_are_refused_by_name(void) {
    struct values *v = random_values(1 << 12, DTYPE_BF16, 0, 1),
                  *statistics = random_values(64, DTYPE_F32, 0, 1);
    EXPECT(gpu->layernorm_forward(gpu, v->gpu.data, statistics->gpu.data, statistics->gpu.data, v->gpu.data,
               v->gpu.data, v->gpu.data, 2, 63) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "63 channels");
    EXPECT(gpu->linear_forward(gpu, v->gpu.data, NULL, v->gpu.data, v->gpu.data, NULL, 2, 12, 16,
               LINEAR_BIAS) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "12 channels");
    EXPECT(gpu->layernorm_forward(gpu, v->gpu.data, statistics->gpu.data, statistics->gpu.data, v->gpu.data,
               v->gpu.data, v->gpu.data, 2, 1 << 20) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "1048576 channels");
    struct backend *none;
    EXPECT(backend_cuda_create(&none, 1000, "standard", true) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "GPU 1000");
    EXPECT(none == NULL);
    release_values();
}

int main(void) {
    if (backend_cuda_device_count() == 0) {
        printf("gpu_ops needs a GPU\n0 passed, 1 failed\n");
        return 1;
    }
    const char *fixed = getenv("FLASHGPT_SEED");
    small = getenv("FLASHGPT_SMALL") != NULL;
    seed = fixed != NULL ? strtoull(fixed, NULL, 10)
                         : (uint64_t)(time_seconds() * 1e6) ^ (uint64_t)getpid() << 32;
    printf("FLASHGPT_SEED=%llu\n", (unsigned long long)seed);
    char cache[] = "/tmp/flashgpt-gpu-ops-XXXXXX";
    if (mkdtemp(cache) == NULL || setenv("FLASHGPT_CACHE", cache, 1) != 0) {
        printf("no temporary folder\n0 passed, 1 failed\n");
        return 1;
    }
    if (backend_cuda_create(&gpu, 0, "standard", true) != STATUS_OK ||
        backend_cpu_f64_create(&cpu, 0) != STATUS_OK) {
        printf("%s\n0 passed, 1 failed\n", error_message());
        return 1;
    }
    RUN(test_copies_return_what_was_sent_even_if_the_buffer_is_reused_at_once);
    RUN(test_out_of_memory_names_gpu_and_sizes);
    RUN(test_memory_usage_follows_allocations);
    RUN(test_convert_add_and_fill_give_the_cpus_bits);
    RUN(test_random_normal_gives_the_cpus_bits_in_any_split);
    RUN(test_embedding_matches_reference);
    RUN(test_embedding_backward_is_right_when_few_tokens_fill_the_batch);
    RUN(test_layernorm_forward_matches_reference);
    RUN(test_layernorm_backward_matches_reference);
    RUN(test_linear_forward_matches_reference);
    RUN(test_linear_backward_input_matches_reference);
    RUN(test_linear_backward_parameters_matches_reference);
    RUN(test_gelu_is_right_for_every_finite_bf16);
    RUN(test_classifier_matches_reference);
    RUN(test_attention_matches_reference);
    RUN(test_sums_add_every_element_once_at_any_length_and_offset);
    RUN(test_step_control_decides_as_the_reference);
    RUN(test_adamw_matches_reference);
    RUN(test_stochastic_rounding_is_right_on_average_and_repeatable);
    RUN(test_chosen_algorithms_are_kept_and_a_damaged_file_is_no_error);
    RUN(test_shapes_that_do_not_fit_vectors_are_refused_by_name);
    cpu->free(cpu);
    gpu->free(gpu);
    remove_tree(cache);
    return test_summary();
}
