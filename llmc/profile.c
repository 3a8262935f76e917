/* The profiler's backend is a copy of the real one's table in which every op that the model or the optimizer calls in a
   step is replaced by a function that marks, calls the real op, marks and remembers the span. A step's spans are read
   when it ends (or when the marks are used up). What no span covers is the time the device waited for the host. */
#include "profile.h"

#include <stdlib.h>

/* Linear layers by name and pass; then the rest. */
enum linear_layer {
    QKV_LAYER,
    PROJECTION_LAYER,
    UP_LAYER,
    DOWN_LAYER,
    HEAD_LAYER,
    OTHER_LAYER,
    LINEAR_LAYERS
};
enum linear_pass { FORWARD_PASS, INPUT_PASS, WEIGHT_PASS, LINEAR_PASSES };
static const char *const linear_layers[LINEAR_LAYERS] = {[QKV_LAYER] = "qkv",
    [PROJECTION_LAYER] = "projection",
    [UP_LAYER] = "mlp up",
    [DOWN_LAYER] = "mlp down",
    [HEAD_LAYER] = "head",
    [OTHER_LAYER] = "other"};
static const char *const linear_passes[LINEAR_PASSES] = {
    [FORWARD_PASS] = "forward", [INPUT_PASS] = "input gradient", [WEIGHT_PASS] = "weight gradient"};

enum row_id {
    LINEAR_ROWS = LINEAR_LAYERS * LINEAR_PASSES, /* rows before this one are the linear layers' products */
    ATTENTION_FORWARD = LINEAR_ROWS,
    ATTENTION_BACKWARD,
    NORM_FORWARD,
    NORM_BACKWARD,
    GELU_FORWARD,
    BIAS_GRADIENT,
    CLASSIFIER,
    EMBEDDING_FORWARD,
    EMBEDDING_BACKWARD,
    GRADIENT_NORM,
    ADAMW,
    COMMUNICATION,
    ROWS
};
static const char *const other_rows[ROWS - LINEAR_ROWS] = {"attention forward", "attention backward",
    "layernorm forward", "layernorm backward", "gelu", "bias gradients", "classifier", "embedding forward",
    "embedding backward", "gradient norm", "adamw", "communication, exposed"};

struct row {
    double milliseconds, flops, bytes;
    int64_t calls;
};

enum { SPANS = PROFILE_MARKS / 2 - 1 }; /* the last two marks: the step's */
enum { STEP_BEGIN = PROFILE_MARKS - 2, STEP_END = PROFILE_MARKS - 1 };

struct profile {
    struct backend outer; /* first: the ops find the profile through it */
    struct backend *inner;
    struct comm outer_comm;
    struct comm *inner_comm;
    struct model_config config;
    const void *head_weight;
    struct row rows[ROWS];
    int spans[SPANS]; /* the row of span i, which lies between marks 2 i and 2 i + 1 */
    int span_count;
    bool measuring;
    int steps;
    double step_milliseconds;
    double communication_milliseconds; /* also where nothing waited for it */
    double copy_gbs;                   /* bytes read plus written, 1e9 a second */
};

static struct profile *of(struct backend *b) {
    return (struct profile *)(void *)b;
}

static void row_name(int row, char *out, size_t size) {
    if (row < LINEAR_ROWS) {
        snprintf(out, size, "%s %s", linear_layers[row / LINEAR_PASSES], linear_passes[row % LINEAR_PASSES]);
    } else {
        snprintf(out, size, "%s", other_rows[row - LINEAR_ROWS]);
    }
}

/* ---- spans ---- */

static enum status collect(struct profile *p) {
    for (int i = 0; i < p->span_count; i++) {
        double milliseconds;
        CHECK(p->inner->elapsed(p->inner, 2 * i, 2 * i + 1, &milliseconds));
        p->rows[p->spans[i]].milliseconds += milliseconds;
    }
    p->span_count = 0;
    return STATUS_OK;
}

static enum status begin(struct profile *p, int row, double flops, double bytes) {
    if (!p->measuring) {
        return STATUS_OK;
    }
    if (p->span_count == SPANS) {
        CHECK(collect(p));
    }
    char name[64];
    row_name(row, name, sizeof name);
    p->inner->range_begin(p->inner, name);
    p->spans[p->span_count] = row;
    p->rows[row].calls++;
    p->rows[row].flops += flops;
    p->rows[row].bytes += bytes;
    return p->inner->mark(p->inner, 2 * p->span_count);
}

static enum status end(struct profile *p, enum status status) {
    if (!p->measuring || status != STATUS_OK) {
        return status;
    }
    CHECK(p->inner->mark(p->inner, 2 * p->span_count + 1));
    p->inner->range_end(p->inner);
    p->span_count++;
    return STATUS_OK;
}

#define MEASURED(row, flops, bytes, call)                                                                    \
    do {                                                                                                     \
        CHECK(begin(p, row, flops, bytes));                                                                  \
        return end(p, (call));                                                                               \
    } while (0)

/* ---- the ops ---- */

static double activation_bytes(const struct profile *p, double elements) {
    return elements * (double)dtype_bytes(p->inner->profile.activation_dtype);
}
static double statistic_bytes(const struct profile *p, double elements) {
    return elements * (double)dtype_bytes(p->inner->profile.statistic_dtype);
}

static enum status embedding_forward(struct backend *b, void *out, const int32_t *tokens,
    const void *token_table, const void *position_table, int batch, int seq_len, int channels) {
    struct profile *p = of(b);
    double elements = (double)batch * seq_len * channels;
    MEASURED(EMBEDDING_FORWARD, 0.0, activation_bytes(p, 2 * elements),
        p->inner->embedding_forward(
            p->inner, out, tokens, token_table, position_table, batch, seq_len, channels));
}

static enum status embedding_backward(struct backend *b, struct tensor d_token_table,
    struct tensor d_position_table, const void *d_out, const int32_t *tokens, int batch, int seq_len,
    int channels, int vocab_size, bool accumulate_position) {
    struct profile *p = of(b);
    /* not counted: the rows of the token table, only the device knows how many it adds to */
    double elements = (double)batch * seq_len * channels, positions = (double)seq_len * channels;
    double position_bytes = (accumulate_position ? 2 : 1) * (double)dtype_bytes(d_position_table.dtype);
    MEASURED(EMBEDDING_BACKWARD, 0.0, activation_bytes(p, elements) + positions * position_bytes,
        p->inner->embedding_backward(p->inner, d_token_table, d_position_table, d_out, tokens, batch, seq_len,
            channels, vocab_size, accumulate_position));
}

static enum status layernorm_forward(struct backend *b, void *out, void *mean, void *rstd, const void *in,
    const void *weight, const void *bias, int64_t rows, int channels) {
    struct profile *p = of(b);
    MEASURED(NORM_FORWARD, 0.0, activation_bytes(p, 2.0 * (double)rows * channels),
        p->inner->layernorm_forward(p->inner, out, mean, rstd, in, weight, bias, rows, channels));
}

static enum status residual_layernorm_forward(struct backend *b, void *sum, void *out, void *mean, void *rstd,
    const void *a, const void *addend, const void *weight, const void *bias, int64_t rows, int channels) {
    struct profile *p = of(b);
    MEASURED(NORM_FORWARD, 0.0, activation_bytes(p, 4.0 * (double)rows * channels),
        p->inner->residual_layernorm_forward(
            p->inner, sum, out, mean, rstd, a, addend, weight, bias, rows, channels));
}

static enum status layernorm_backward(struct backend *b, void *d_in, struct tensor d_weight,
    struct tensor d_bias, const void *d_out, const void *in, const void *weight, const void *mean,
    const void *rstd, int64_t rows, int channels, bool accumulate_input, bool accumulate_parameters) {
    struct profile *p = of(b);
    MEASURED(NORM_BACKWARD, 0.0,
        activation_bytes(p, (accumulate_input ? 4.0 : 3.0) * (double)rows * channels),
        p->inner->layernorm_backward(p->inner, d_in, d_weight, d_bias, d_out, in, weight, mean, rstd, rows,
            channels, accumulate_input, accumulate_parameters));
}

static enum status gelu_forward(struct backend *b, void *out, const void *in, int64_t count) {
    struct profile *p = of(b);
    MEASURED(GELU_FORWARD, 0.0, activation_bytes(p, 2.0 * (double)count),
        p->inner->gelu_forward(p->inner, out, in, count));
}

/* The layer is told by its shape, but for the head, which alone has no bias and shows its weight that way. */
static int linear_row(
    const struct profile *p, int in_features, int out_features, const void *weight, enum linear_pass pass) {
    int channels = p->config.channels;
    enum linear_layer layer = weight == p->head_weight                         ? HEAD_LAYER
                              : in_features == 4 * channels                    ? DOWN_LAYER
                              : out_features == model_qkv_features(&p->config) ? QKV_LAYER
                              : out_features == channels                       ? PROJECTION_LAYER
                              : out_features == 4 * channels                   ? UP_LAYER
                                                                               : OTHER_LAYER;
    return layer * LINEAR_PASSES + pass;
}

/* A layer with GELU, and below the gradients of weight and bias, are called as the two ops that they can be taken apart
   into, with the same bits: so the products stand alone. */
static enum status linear_forward(struct backend *b, void *out, void *pre_gelu, const void *in,
    const void *weight, const void *bias, int64_t rows, int in_features, int out_features,
    enum linear_epilogue epilogue) {
    struct profile *p = of(b);
    if (epilogue == LINEAR_BIAS_GELU) {
        CHECK(linear_forward(
            b, pre_gelu, NULL, in, weight, bias, rows, in_features, out_features, LINEAR_BIAS));
        return gelu_forward(b, out, pre_gelu, rows * out_features);
    }
    if (bias == NULL) {
        p->head_weight = weight;
    }
    MEASURED(linear_row(p, in_features, out_features, weight, FORWARD_PASS),
        2.0 * (double)rows * in_features * out_features, 0.0,
        p->inner->linear_forward(
            p->inner, out, pre_gelu, in, weight, bias, rows, in_features, out_features, epilogue));
}

static enum status linear_backward_input(struct backend *b, void *d_in, const void *d_out, const void *weight,
    const void *pre_gelu, int64_t rows, int in_features, int out_features) {
    struct profile *p = of(b);
    MEASURED(linear_row(p, in_features, out_features, weight, INPUT_PASS),
        2.0 * (double)rows * in_features * out_features, 0.0,
        p->inner->linear_backward_input(
            p->inner, d_in, d_out, weight, pre_gelu, rows, in_features, out_features));
}

static enum status linear_backward_parameters(struct backend *b, struct tensor d_weight, struct tensor d_bias,
    const void *d_out, const void *in, int64_t rows, int in_features, int out_features, bool accumulate) {
    struct profile *p = of(b);
    struct tensor none = {NULL, d_bias.dtype};
    const void *weight = d_bias.data == NULL ? p->head_weight : NULL;
    CHECK(begin(p, linear_row(p, in_features, out_features, weight, WEIGHT_PASS),
        2.0 * (double)rows * in_features * out_features, 0.0));
    CHECK(end(p, p->inner->linear_backward_parameters(
                     p->inner, d_weight, none, d_out, in, rows, in_features, out_features, accumulate)));
    if (d_bias.data == NULL) {
        return STATUS_OK;
    }
    MEASURED(BIAS_GRADIENT, 0.0, activation_bytes(p, (double)rows * out_features),
        p->inner->linear_backward_parameters(
            p->inner, none, d_bias, d_out, in, rows, in_features, out_features, accumulate));
}

/* The paper's count: 4 S^2 D H forward, halved under the causal mask, and 2.5 times that backward. */
static double attention_flops(struct attention_shape s) {
    return 2.0 * s.batch * s.heads * (double)s.seq_len * s.seq_len * s.head_dim;
}

static enum status attention_forward(struct backend *b, void *out, void *logsumexp, void *saved,
    void *workspace, const void *qkv, struct attention_shape shape) {
    struct profile *p = of(b);
    MEASURED(ATTENTION_FORWARD, attention_flops(shape), 0.0,
        p->inner->attention_forward(p->inner, out, logsumexp, saved, workspace, qkv, shape));
}

static enum status attention_backward(struct backend *b, void *d_qkv, void *workspace, const void *d_out,
    const void *out, const void *logsumexp, const void *saved, const void *qkv,
    struct attention_shape shape) {
    struct profile *p = of(b);
    MEASURED(ATTENTION_BACKWARD, 2.5 * attention_flops(shape), 0.0,
        p->inner->attention_backward(p->inner, d_qkv, workspace, d_out, out, logsumexp, saved, qkv, shape));
}

static enum status classifier(struct backend *b, void *logits, void *losses, const int32_t *targets,
    int64_t rows, int vocab_size, int padded_vocab, double d_loss, bool write_gradient) {
    struct profile *p = of(b);
    MEASURED(CLASSIFIER, 0.0, activation_bytes(p, (write_gradient ? 2.0 : 1.0) * (double)rows * padded_vocab),
        p->inner->classifier(
            p->inner, logits, losses, targets, rows, vocab_size, padded_vocab, d_loss, write_gradient));
}

static enum status sum_squares(struct backend *b, void *sum, struct tensor in, int64_t count) {
    struct profile *p = of(b);
    MEASURED(GRADIENT_NORM, 0.0, (double)count * (double)dtype_bytes(in.dtype),
        p->inner->sum_squares(p->inner, sum, in, count));
}

static enum status adamw(struct backend *b, void *parameters, void *master, void *first_moment,
    void *second_moment, struct tensor gradients, int64_t count, int64_t decay_count,
    const struct adamw_options *options, const void *control, uint64_t stochastic_seed) {
    struct profile *p = of(b);
    const struct backend_profile *device = &p->inner->profile;
    double parameter = (double)dtype_bytes(device->parameter_dtype);
    /* moments and weights are read and written, gradients read; with masters the parameters are only written */
    double weights =
        master != NULL ? 2 * (double)dtype_bytes(device->master_dtype) + parameter : 2 * parameter;
    double bytes = statistic_bytes(p, 4.0 * (double)count) +
                   (double)count * (weights + (double)dtype_bytes(gradients.dtype));
    MEASURED(ADAMW, 0.0, bytes,
        p->inner->adamw(p->inner, parameters, master, first_moment, second_moment, gradients, count,
            decay_count, options, control, stochastic_seed));
}

/* ---- comm: what the compute stream waits for ---- */

static struct profile *of_comm(struct comm *c) {
    return (struct profile *)(void *)((char *)c - offsetof(struct profile, outer_comm));
}

static enum status comm_wait(struct comm *c, int slot) {
    struct profile *p = of_comm(c);
    MEASURED(COMMUNICATION, 0.0, 0.0, p->inner_comm->wait(p->inner_comm, slot));
}

/* ---- life ---- */

static enum status measure_copy(struct profile *p) {
    struct backend *b = p->inner;
    bool gpu = strncmp(b->profile.name, "cpu", 3) != 0;
    size_t bytes = (size_t)(gpu ? 512 : 64) << 20;
    void *from = NULL, *to = NULL;
    double milliseconds = 0.0;
    enum { COPIES = 8 };
    enum status status = b->memory_allocate(b, &from, bytes);
    if (status == STATUS_OK) {
        status = b->memory_allocate(b, &to, bytes);
    }
    if (status == STATUS_OK) {
        status = b->set_zero(b, from, bytes);
    }
    for (int i = 0; status == STATUS_OK && i < 2 * COPIES; i++) { /* the first half warms up */
        if (i == COPIES) {
            status = b->mark(b, 0);
        }
        if (status == STATUS_OK) {
            status = b->copy(b, to, from, bytes);
        }
    }
    if (status == STATUS_OK) {
        status = b->mark(b, 1);
    }
    if (status == STATUS_OK) {
        status = b->elapsed(b, 0, 1, &milliseconds);
    }
    b->memory_free(b, to);
    b->memory_free(b, from);
    if (status == STATUS_OK) {
        p->copy_gbs = 2.0 * COPIES * (double)bytes / milliseconds / 1e6;
    }
    return status;
}

enum status profile_create(struct profile **out, struct backend *backend, const struct model_config *config) {
    struct profile *p;
    CHECK(ALLOCATE(p, 1));
    p->inner = backend;
    p->config = *config;
    p->outer = *backend;
    p->outer.embedding_forward = embedding_forward;
    p->outer.embedding_backward = embedding_backward;
    p->outer.layernorm_forward = layernorm_forward;
    p->outer.residual_layernorm_forward = residual_layernorm_forward;
    p->outer.layernorm_backward = layernorm_backward;
    p->outer.linear_forward = linear_forward;
    p->outer.linear_backward_input = linear_backward_input;
    p->outer.linear_backward_parameters = linear_backward_parameters;
    p->outer.gelu_forward = gelu_forward;
    p->outer.attention_forward = attention_forward;
    p->outer.attention_backward = attention_backward;
    p->outer.classifier = classifier;
    p->outer.sum_squares = sum_squares;
    p->outer.adamw = adamw;
    enum status status = measure_copy(p);
    if (status != STATUS_OK) {
        profile_free(p);
        return status;
    }
    *out = p;
    return STATUS_OK;
}

void profile_free(struct profile *p) {
    free(p);
}

struct backend *profile_backend(struct profile *p) {
    return &p->outer;
}

struct comm *profile_comm(struct profile *p, struct comm *comm) {
    p->inner_comm = comm;
    p->outer_comm = *comm;
    if (comm->ranks > 1) {
        p->outer_comm.wait = comm_wait;
    }
    return &p->outer_comm;
}

enum status profile_begin_step(struct profile *p) {
    p->measuring = true;
    if (p->inner_comm != NULL) {
        p->inner_comm->running_ms(p->inner_comm); /* from here on */
    }
    return p->inner->mark(p->inner, STEP_BEGIN);
}

enum status profile_end_step(struct profile *p) {
    double milliseconds;
    CHECK(p->inner->mark(p->inner, STEP_END));
    CHECK(p->inner->elapsed(p->inner, STEP_BEGIN, STEP_END, &milliseconds));
    CHECK(collect(p));
    p->measuring = false;
    p->step_milliseconds += milliseconds;
    if (p->inner_comm != NULL) {
        p->communication_milliseconds += p->inner_comm->running_ms(p->inner_comm);
    }
    p->steps++;
    return STATUS_OK;
}

int profile_steps(const struct profile *p) {
    return p->steps;
}

/* ---- the report ---- */

/* Rows of linear layers added up, and all rows. */
static struct row sum_rows(const struct profile *p, int first, int last) {
    struct row sum = {0};
    for (int i = first; i < last; i++) {
        sum.milliseconds += p->rows[i].milliseconds;
        sum.flops += p->rows[i].flops;
        sum.bytes += p->rows[i].bytes;
        sum.calls += p->rows[i].calls;
    }
    return sum;
}

enum { ALL_PRODUCTS = ROWS, IDLE, ALL_COMMUNICATION, REPORT_ROWS };

/* Line i of the report: the rows, two that follow from them, and what ran beside them. False: nothing of the kind ran. */
static bool report_row(const struct profile *p, int i, char *name, size_t size, struct row *row) {
    if (i == ALL_PRODUCTS) {
        snprintf(name, size, "all products");
        *row = sum_rows(p, 0, LINEAR_ROWS);
        return true;
    }
    if (i == IDLE) {
        snprintf(name, size, "idle and unnamed");
        struct row idle = {.milliseconds = p->step_milliseconds - sum_rows(p, 0, ROWS).milliseconds};
        *row = idle;
        return true;
    }
    if (i == ALL_COMMUNICATION) {
        snprintf(name, size, "communication, in all");
        struct row beside = {
            .milliseconds = p->communication_milliseconds, .calls = p->rows[COMMUNICATION].calls};
        *row = beside;
        return row->milliseconds > 0.0;
    }
    row_name(i, name, size);
    *row = p->rows[i];
    return row->calls > 0;
}

static void print_row(const struct profile *p, FILE *out, const char *name, const struct row *row) {
    double ms = row->milliseconds / p->steps;
    double gflops = row->flops / row->milliseconds / 1e6, gbs = row->bytes / row->milliseconds / 1e6;
    fprintf(out, "  %-26s %7lld %10.3f %6.1f%%", name, (long long)(row->calls / p->steps), ms,
        100.0 * row->milliseconds / p->step_milliseconds);
    if (row->flops > 0.0) {
        fprintf(out, " %9.1f %s", gflops < 1e3 ? gflops : gflops / 1e3, gflops < 1e3 ? "GFLOP/s" : "TFLOP/s");
        if (p->inner->peak_tflops > 0.0) {
            fprintf(out, " %5.1f%%", gflops / 10.0 / p->inner->peak_tflops);
        }
    } else if (row->bytes > 0.0) {
        fprintf(out, " %9.1f GB/s    %5.1f%%", gbs, 100.0 * gbs / p->copy_gbs);
    }
    fprintf(out, "\n");
}

void profile_print(const struct profile *p, FILE *out) {
    if (p->steps == 0) {
        return;
    }
    fprintf(out, "profile of %d step%s, %.2f ms each; ceilings: ", p->steps, p->steps == 1 ? "" : "s",
        p->step_milliseconds / p->steps);
    if (p->inner->peak_tflops > 0.0) {
        fprintf(out, "%.0f TFLOP/s, ", p->inner->peak_tflops);
    }
    fprintf(out, "copies at %.0f GB/s\n", p->copy_gbs);
    fprintf(out, "  %-26s %7s %10s %7s %18s %6s\n", "", "calls", "ms", "share", "reached", "of it");
    for (int i = 0; i < REPORT_ROWS; i++) {
        char name[64];
        struct row row;
        if (report_row(p, i, name, sizeof name, &row)) {
            print_row(p, out, name, &row);
        }
    }
}

static void write_row(
    const struct profile *p, struct json_writer *w, const char *name, const struct row *row) {
    json_begin_object(w);
    json_string_member(w, "name", name);
    json_integer_member(w, "calls", row->calls / p->steps);
    json_number_member(w, "ms", row->milliseconds / p->steps);
    json_number_member(w, "share", row->milliseconds / p->step_milliseconds);
    json_number_member(w, "tflops", row->flops / row->milliseconds / 1e9);
    json_number_member(w, "gbs", row->bytes / row->milliseconds / 1e6);
    json_end_object(w);
}

void profile_write_json(const struct profile *p, struct json_writer *w) {
    json_integer_member(w, "steps", p->steps);
    if (p->steps == 0) {
        return;
    }
    json_number_member(w, "step_ms", p->step_milliseconds / p->steps);
    json_number_member(w, "copy_gbs", p->copy_gbs);
    json_key(w, "rows");
    json_begin_array(w);
    for (int i = 0; i < REPORT_ROWS; i++) {
        char name[64];
        struct row row;
        if (report_row(p, i, name, sizeof name, &row)) {
            write_row(p, w, name, &row);
        }
    }
    json_end_array(w);
}
