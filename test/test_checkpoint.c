/* llmc/checkpoint.c with hugging_face.c and moments.c: what is saved comes back bit by bit under any number of ranks;
   the files are those that Hugging Face reads; what is damaged is passed over and said; a save that fails harms nothing.

   Ranks are processes forked for each piece of work, as in the program. They compare with values that a formula gives
   for every element, so no rank needs another's memory to know what is right. */
#include "llmc/checkpoint.h"

#include "llmc/checksum.h"
#include "llmc/safetensors.h"
#include "folder.h"
#include "test.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };
static char run_dir[PATH_BYTES / 2];

static const struct model_config multi_head = {2, 16, 4, 4, 8, 150}; /* 256 rows of padded vocabulary */
static const struct model_config grouped = {3, 24, 4, 2, 8, 130};
static const char OPTIONS[] =
    "{\"model\":\"tiny\",\"seed\":9007199254740993,\"beta2\":0.95,\"shuffle\":true}";

/* A run folder of its own for every test. */
static void new_run(void) {
    static int runs;
    snprintf(run_dir, sizeof run_dir, "%s/run-%d", folder, runs++);
}

static const char *path_of(const char *name) {
    static char paths[4][PATH_BYTES];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, PATH_BYTES, "%s/checkpoints/%s", run_dir, name);
    return path;
}

/* ---- ranks ---- */

struct rank {
    struct backend *backend;
    struct comm *comm;
    struct model *model;
    struct optimizer *optimizer;
};

struct setup {
    const struct model_config *config;
    int ranks, zero_stage;
    bool f64;
};

static void create_rank(
    struct rank *r, const struct setup *setup, struct comm_shared_memory *shared, int rank) {
    struct model_options m = {.config = *setup->config, .micro_batch = 1, .ranks = setup->ranks};
    struct optimizer_options o = {
        .zero_stage = setup->zero_stage, .adamw = {1e-2, 0.9, 0.95, 1e-8, 0.1}, .clip = 1.0};
    enum status status =
        setup->f64 ? backend_cpu_f64_create(&r->backend, 1) : backend_cpu_create(&r->backend, 1);
    if (status == STATUS_OK) {
        status =
            shared == NULL ? comm_single_create(&r->comm) : comm_shared_create(&r->comm, shared, rank, 20);
    }
    m.seq_len = setup->config->seq_len;
    m.gradient_dtype = r->backend->profile.gradient_dtype;
    if (status != STATUS_OK || model_create(&r->model, r->backend, &m) != STATUS_OK ||
        optimizer_create(&r->optimizer, r->model, r->comm, &o) != STATUS_OK) {
        fprintf(stderr, "%s\n", error_message());
        abort();
    }
}

static void free_rank(struct rank *r) {
    optimizer_free(r->optimizer);
    model_free(r->model);
    r->comm->free(r->comm);
    r->backend->free(r->backend);
}

typedef void (*rank_work)(struct rank *rank, const void *argument);

/* Runs the work on every rank, each a process; expectations that fail there fail here. */
static void on_ranks(const struct setup *setup, rank_work work, const void *argument) {
    struct comm_shared_memory *shared = NULL;
    pid_t processes[8];
    fflush(stdout);
    EXPECT(setup->ranks == 1 || comm_shared_memory_create(&shared, setup->ranks, 1 << 16) == STATUS_OK);
    for (int rank = 0; rank < setup->ranks; rank++) {
        processes[rank] = fork();
        if (processes[rank] == 0) {
            struct rank r = {0};
            test_failures_in_this_ = 0;
            create_rank(&r, setup, shared, rank);
            work(&r, argument);
            free_rank(&r);
            fflush(stdout);
            exit(test_failures_in_this_ == 0 ? 0 : 1);
        }
    }
    for (int rank = 0; rank < setup->ranks; rank++) {
        int code = -1;
        EXPECT(waitpid(processes[rank], &code, 0) == processes[rank] && code == 0);
    }
    if (shared != NULL) {
        comm_shared_memory_free(shared);
    }
}

/* ---- values by formula ---- */

/* Of element i of bucket b; `kind` 0: the parameter, 1 and 2: the moments. No two are equal, none is round. */
static double formula(int kind, int b, int64_t i) {
    return (double)((float)((kind * 37 + b) * 100003 + i) / 7.0f);
}

/* In the padding of the vocabulary, which no file holds, parameters are 0. */
static double parameter_formula(const struct model_config *c, int b, int64_t i) {
    int64_t first = (int64_t)c->vocab_size * c->channels, last = (int64_t)model_padded_vocab(c) * c->channels;
    return b == 0 && i >= first && i < last ? 0 : formula(0, b, i);
}

static double get(struct tensor t, int64_t i) {
    return t.dtype == DTYPE_F64 ? ((double *)t.data)[i] : (double)((float *)t.data)[i];
}

static void set(struct tensor t, int64_t i, double value) {
    if (t.dtype == DTYPE_F64) {
        ((double *)t.data)[i] = value;
    } else {
        ((float *)t.data)[i] = (float)value;
    }
}

static void fill_by_formula(struct rank *r) {
    const struct layout *layout = model_get_layout(r->model);
    const struct model_config *c = model_get_config(r->model);
    struct optimizer *o = r->optimizer;
    for (int b = 0; b < layout->buckets; b++) {
        int64_t first, count;
        for (int64_t i = 0; i < layout->bucket[b].count; i++) {
            set(model_parameters(r->model), layout->bucket[b].offset + i, parameter_formula(c, b, i));
        }
        optimizer_shard(o, b, &first, &count);
        for (int64_t i = 0; i < count; i++) {
            set(o->first_moment, o->state_offset[b] + i, formula(1, b, first + i));
            set(o->second_moment, o->state_offset[b] + i, formula(2, b, first + i));
        }
    }
}

static void expect_formula(struct rank *r, bool moments_too) {
    const struct layout *layout = model_get_layout(r->model);
    const struct model_config *c = model_get_config(r->model);
    struct optimizer *o = r->optimizer;
    int64_t wrong = 0;
    for (int b = 0; b < layout->buckets; b++) {
        int64_t first, count;
        for (int64_t i = 0; i < layout->bucket[b].count; i++) {
            wrong +=
                get(model_parameters(r->model), layout->bucket[b].offset + i) != parameter_formula(c, b, i);
        }
        optimizer_shard(o, b, &first, &count);
        for (int64_t i = 0; i < count && moments_too; i++) {
            wrong += get(o->first_moment, o->state_offset[b] + i) != formula(1, b, first + i);
            wrong += get(o->second_moment, o->state_offset[b] + i) != formula(2, b, first + i);
        }
    }
    EXPECT(wrong == 0);
}

/* ---- saving, for all tests ---- */

static struct run_state state_of_step(int64_t step) {
    struct run_state state = {.step = step, .best_val_loss = NAN, .last_val_loss = NAN};
    return state;
}

static void save_step(struct rank *r, int64_t step) {
    struct run_state state = state_of_step(step);
    char path[PATH_BYTES];
    uint64_t bytes = 0;
    fill_by_formula(r);
    EXPECT(checkpoint_save(run_dir, r->optimizer, &state, OPTIONS, NULL, path, sizeof path, &bytes) ==
           STATUS_OK);
    EXPECT(bytes > 1000);
    char name[32];
    snprintf(name, sizeof name, "step-%08d", (int)step);
    EXPECT_STRING(path, path_of(name));
}

static void save_steps(struct rank *r, const void *steps) {
    for (const int *step = steps; *step >= 0; step++) {
        save_step(r, *step);
    }
}

static void save_with(const struct model_config *config, int ranks, int zero_stage, int step) {
    struct setup setup = {config, ranks, zero_stage, false};
    int steps[] = {step, -1};
    on_ranks(&setup, save_steps, steps);
}

/* ---- state.json ---- */

static const double odd_doubles[] = {
    0.1 + 0.2, 1.0 / 3, 5e-324, 1.7976931348623157e308, -0.0, 123456789.0, 6.02214076e23};

static void save_odd_state(struct rank *r, const void *argument) {
    const struct run_state *state = argument;
    char path[PATH_BYTES];
    uint64_t bytes;
    EXPECT(
        checkpoint_save(run_dir, r->optimizer, state, OPTIONS, NULL, path, sizeof path, &bytes) == STATUS_OK);
    EXPECT(checkpoint_save(run_dir, r->optimizer, state, "{\"not\": json}", NULL, path, sizeof path,
               &bytes) == STATUS_ERROR);
}

static void test_the_state_reads_back_bit_by_bit(void) {
    struct run_state state, back;
    struct json *json = NULL;
    const struct setup one = {&grouped, 1, 0, false};
    memset(&state, 0, sizeof state);
    state.step = 7;
    state.data_position = INT64_C(1) << 62; /* the largest */
    state.optimizer_step = 6;
    state.tokens_seen = (INT64_C(1) << 53) + 1;
    state.skipped_total = 3;
    state.skipped_in_row = 1;
    state.best_val_loss = NAN;
    state.last_val_loss = 0.1;
    state.spikes.count = SPIKE_WINDOW;
    for (int i = 0; i < SPIKE_WINDOW; i++) {
        state.spikes.loss[i] = odd_doubles[i % 7] * (i < 7 ? 1 : 0.7);
        state.spikes.norm[i] = -odd_doubles[i % 7] / 3;
    }
    new_run();
    on_ranks(&one, save_odd_state, &state);
    EXPECT(checkpoint_read_state(path_of("step-00000007"), &back, &json) == STATUS_OK);
    EXPECT(isnan(back.best_val_loss));
    back.best_val_loss = state.best_val_loss; /* NaNs may differ in their bits */
    EXPECT(memcmp(&back, &state, sizeof state) == 0);

    const struct json *options = json_get(json, "options");
    EXPECT(options != NULL && options->count == 4);
    EXPECT_STRING(json_get(options, "model")->string, "tiny");
    EXPECT(json_get(options, "seed")->integer == 9007199254740993);
    EXPECT(json_get(options, "beta2")->number == 0.95);
    const struct json *model = json_get(json, "model");
    static const char *const sizes[] = {"layers", "channels", "heads", "kv_heads", "seq_len", "vocab_size"};
    for (int i = 0; i < 6; i++) {
        const struct json *size = json_get(model, sizes[i]);
        EXPECT(size != NULL && size->integer == ((const int *)&grouped)[i]);
    }
    json_free(json);
}

static void test_a_state_that_is_not_one_is_refused(void) {
    static const struct {
        const char *from, *to, *why;
    } changes[] = {
        {"\"version\": 1", "\"version\": 2", "\"version\" is 2"},
        {"\"step\": 4", "\"step\": -4", "\"step\" is -4"},
        {"\"step\": 4", "\"steps\": 4", "\"step\" is missing"},
        {"\"data_position\": 0", "\"data_position\": 0.5", "\"data_position\" is 0.5"},
        {"\"tokens_seen\": 0", "\"tokens_seen\": 4611686018427387905",
            "\"tokens_seen\" is 4.6116860184273879e+18, not a whole number from 0 to 4611686018427387904"},
        {"\"optimizer_step\": 0", "\"optimizer_step\": 9223372036854775807", "\"optimizer_step\" is 9.2"},
        {"\"best_val_loss\": null", "\"best_val_loss\": \"low\"", "\"best_val_loss\""},
        {"\"recent_loss\": []", "\"recent_loss\": {}", "\"recent_loss\" is not an array"},
        {"\"recent_loss\": []", "\"recent_loss\": [true]", "\"recent_loss\" is not an array of numbers"},
        {"\"recent_loss\": []", "\"recent_loss\": [null]", "\"recent_loss\" is not an array of numbers"},
        {"\"recent_norm\": []", "\"recent_norm\": [1.5]", "not of one length"},
        {"\"version\": 1", "\"version\": ", "not JSON"},
    };
    new_run();
    save_with(&multi_head, 1, 0, 4);
    uint8_t *text = NULL;
    size_t bytes;
    EXPECT(file_read_all(path_of("step-00000004/state.json"), &text, &bytes) == STATUS_OK);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        char changed[8192];
        struct run_state state;
        struct json *json = NULL;
        const char *place = strstr((char *)text, changes[i].from);
        EXPECT(place != NULL);
        int length = snprintf(changed, sizeof changed, "%.*s%s%s", (int)(place - (char *)text), text,
            changes[i].to, place + strlen(changes[i].from));
        EXPECT(file_write_all(path_of("step-00000004/state.json"), changed, (size_t)length) == STATUS_OK);
        EXPECT(
            checkpoint_read_state(path_of("step-00000004"), &state, &json) == STATUS_ERROR && json == NULL);
        EXPECT_CONTAINS(error_message(), "step-00000004/state.json");
        EXPECT_CONTAINS(error_message(), changes[i].why);
    }
    free(text);
}

/* ---- weights and moments ---- */

static void load_and_expect_formula(struct rank *r, const void *name) {
    EXPECT(checkpoint_load_weights(path_of(name), r->optimizer) == STATUS_OK);
    EXPECT(checkpoint_load_moments(path_of(name), r->optimizer) == STATUS_OK);
    expect_formula(r, true);
}

static void test_any_ranks_and_zero_stage_read_what_any_other_wrote(void) {
    static const int ways[][2] = {{1, 0}, {2, 0}, {2, 1}, {3, 1}, {4, 1}}; /* ranks, ZeRO stage */
    enum { WAYS = sizeof ways / sizeof ways[0] };
    for (int from = 0; from < WAYS; from++) {
        new_run();
        save_with(&grouped, ways[from][0], ways[from][1], 5);
        for (int to = 0; to < WAYS; to++) {
            struct setup setup = {&grouped, ways[to][0], ways[to][1], false};
            on_ranks(&setup, load_and_expect_formula, "step-00000005");
        }
    }
}

static void test_ranks_share_the_writing_of_moments_under_either_stage(void) {
    uint64_t bytes[2][3];
    for (int zero_stage = 0; zero_stage < 2; zero_stage++) {
        new_run();
        save_with(&grouped, 3, zero_stage, 5);
        for (int rank = 0; rank < 3; rank++) {
            char name[96];
            struct safetensors *file = NULL;
            snprintf(name, sizeof name, "step-00000005/optimizer-%05d-of-00003.safetensors", rank);
            EXPECT(safetensors_open(&file, path_of(name)) == STATUS_OK);
            EXPECT_STRING(safetensors_metadata(file, "ranks"), "3");
            EXPECT_STRING(safetensors_metadata(file, "zero_stage"), zero_stage == 0 ? "0" : "1");
            bytes[zero_stage][rank] = file->file_bytes;
            safetensors_close(file);
        }
        EXPECT(!path_exists(path_of("step-00000005/optimizer-00003-of-00003.safetensors")));
    }
    EXPECT(memcmp(bytes[0], bytes[1], sizeof bytes[0]) == 0);
}

static void save_f64(struct rank *r, const void *argument) {
    (void)argument;
    save_step(r, 1);
    set(r->optimizer->first_moment, 0, M_PI); /* no float */
    struct run_state state = state_of_step(2);
    char path[PATH_BYTES];
    uint64_t bytes;
    EXPECT(checkpoint_save(run_dir, r->optimizer, &state, OPTIONS, NULL, path, sizeof path, &bytes) ==
           STATUS_OK);
}

static void load_f64(struct rank *r, const void *argument) {
    load_and_expect_formula(r, "step-00000001");
    EXPECT(checkpoint_load_moments(path_of("step-00000002"), r->optimizer) == STATUS_OK);
    bool f64 = r->optimizer->first_moment.dtype == DTYPE_F64;
    EXPECT(get(r->optimizer->first_moment, 0) == (f64 ? M_PI : (double)(float)M_PI));
    (void)argument;
}

static void test_moments_of_the_double_backend_are_kept_in_double_and_readable_in_float(void) {
    const struct setup f64 = {&multi_head, 1, 0, true}, f32 = {&multi_head, 1, 0, false};
    new_run();
    on_ranks(&f64, save_f64, NULL);
    on_ranks(&f64, load_f64, NULL);
    on_ranks(&f32, load_f64, NULL);
}

/* One step of training, the same on every rank. */
static void train_step(struct rank *r, int step) {
    int32_t tokens[8], targets[8];
    for (int i = 0; i < 8; i++) {
        tokens[i] = (i * 7 + step * 5) % 130;
        targets[i] = (i * 11 + step * 3) % 130;
    }
    struct model_hooks hooks = optimizer_hooks(r->optimizer, true);
    EXPECT(optimizer_begin_step(r->optimizer) == STATUS_OK);
    EXPECT(model_forward_backward(r->model, tokens, targets, 1, 8, 1.0 / (8 * r->comm->ranks), false,
               optimizer_loss_sum(r->optimizer), &hooks) == STATUS_OK);
    EXPECT(optimizer_step(r->optimizer, 1e-2, 8 * r->comm->ranks, INFINITY, INFINITY) == STATUS_OK);
}

static void train_and_save(struct rank *r, const void *argument) {
    (void)argument;
    EXPECT(optimizer_initialize(r->optimizer, 5) == STATUS_OK);
    for (int step = 1; step <= 4; step++) {
        train_step(r, step);
        if (step % 2 == 0) {
            struct run_state state = state_of_step(step);
            struct step_result result;
            char path[PATH_BYTES];
            uint64_t bytes;
            EXPECT(optimizer_result(r->optimizer, &result) == STATUS_OK && result.applied);
            state.optimizer_step = result.optimizer_step;
            EXPECT(checkpoint_save(run_dir, r->optimizer, &state, OPTIONS, NULL, path, sizeof path, &bytes) ==
                   STATUS_OK);
        }
    }
}

/* From step 2 on: steps 3 and 4 end in the same files, byte by byte, as without the interruption. */
static void resume_and_save_elsewhere(struct rank *r, const void *other_run) {
    struct run_state state;
    struct json *json = NULL;
    char path[PATH_BYTES];
    uint64_t bytes;
    EXPECT(checkpoint_read_state(path_of("step-00000002"), &state, &json) == STATUS_OK);
    json_free(json);
    EXPECT(checkpoint_load_weights(path_of("step-00000002"), r->optimizer) == STATUS_OK);
    EXPECT(checkpoint_load_moments(path_of("step-00000002"), r->optimizer) == STATUS_OK);
    EXPECT(optimizer_set_step(r->optimizer, state.optimizer_step) == STATUS_OK);
    train_step(r, 3);
    train_step(r, 4);
    struct step_result result;
    EXPECT(optimizer_result(r->optimizer, &result) == STATUS_OK && result.optimizer_step == 4);
    state = state_of_step(4);
    state.optimizer_step = 4;
    EXPECT(checkpoint_save(other_run, r->optimizer, &state, OPTIONS, NULL, path, sizeof path, &bytes) ==
           STATUS_OK);
}

static void test_a_resumed_run_goes_on_bit_by_bit_as_one_that_was_not_interrupted(void) {
    for (int ranks = 1; ranks <= 2; ranks++) {
        struct setup setup = {&grouped, ranks, ranks - 1, false};
        char other[PATH_BYTES / 2 + 8], path[PATH_BYTES];
        uint8_t *whole = NULL, *resumed = NULL;
        size_t whole_bytes = 0, resumed_bytes = 0;
        new_run();
        snprintf(other, sizeof other, "%s-other", run_dir);
        on_ranks(&setup, train_and_save, NULL);
        on_ranks(&setup, resume_and_save_elsewhere, other);
        /* the checksums of all files */
        EXPECT(file_read_all(path_of("step-00000004/checksums.xxh64"), &whole, &whole_bytes) == STATUS_OK);
        snprintf(path, sizeof path, "%s/checkpoints/step-00000004/checksums.xxh64", other);
        EXPECT(file_read_all(path, &resumed, &resumed_bytes) == STATUS_OK);
        EXPECT_STRING((char *)resumed, (char *)whole);
        free(whole);
        free(resumed);
    }
}

/* ---- the files are Hugging Face's ---- */

/* Element (i, j) of a tensor in model.safetensors of step 3. */
struct hugging_face_file {
    struct safetensors *file;
    const struct model_config *config;
    struct layout layout;
};

static float file_value(const struct hugging_face_file *h, const char *name, int64_t rows, int64_t columns,
    int64_t i, int64_t j) {
    const struct safetensors_entry *entry = safetensors_find(h->file, name);
    float value = NAN;
    if (entry == NULL) {
        printf("    no tensor %s\n", name);
        return value;
    }
    EXPECT(entry->dtype == DTYPE_F32 && entry->dimensions == (columns == 0 ? 1 : 2));
    EXPECT(entry->shape[0] == rows && (columns == 0 || entry->shape[1] == columns));
    EXPECT(safetensors_read(h->file, entry, (uint64_t)(i * max_i64(columns, 1) + j) * 4, &value, 4) ==
           STATUS_OK);
    return value;
}

/* Ours, by the layout: row i, column j of a (rows, columns) parameter. */
static float our_value(const struct hugging_face_file *h, enum parameter_id id, int layer, int64_t columns,
    int64_t i, int64_t j) {
    int b = parameter_table[id].per_layer ? layer + 1 : 0;
    int64_t offset = layout_offset(&h->layout, h->config, id, layer) - h->layout.bucket[b].offset;
    return (float)formula(0, b, offset + i * columns + j);
}

/* In layer `layer`: the Conv1D weight `name` of (inputs, outputs) and its bias. */
static void expect_conv1d(const struct hugging_face_file *h, const char *module, int layer,
    enum parameter_id weight, enum parameter_id bias, int64_t inputs, int64_t outputs) {
    char name[128];
    snprintf(name, sizeof name, "transformer.h.%d.%s.weight", layer, module);
    for (int64_t in = 0; in < inputs; in += 5) {
        for (int64_t out = 0; out < outputs; out += 7) {
            EXPECT(file_value(h, name, inputs, outputs, in, out) ==
                   our_value(h, weight, layer, inputs, out, in));
        }
    }
    snprintf(name, sizeof name, "transformer.h.%d.%s.bias", layer, module);
    EXPECT(file_value(h, name, outputs, 0, outputs - 1, 0) == our_value(h, bias, layer, 1, outputs - 1, 0));
}

static void expect_vector(
    const struct hugging_face_file *h, const char *name, int layer, enum parameter_id id, int64_t count) {
    EXPECT(file_value(h, name, count, 0, 0, 0) == our_value(h, id, layer, 1, 0, 0));
    EXPECT(file_value(h, name, count, 0, count - 1, 0) == our_value(h, id, layer, 1, count - 1, 0));
}

static void expect_hugging_face_weights(const struct model_config *c) {
    struct hugging_face_file h = {NULL, c, {0}};
    int64_t C = c->channels, qkv = (c->heads + 2 * c->kv_heads) * (C / c->heads);
    new_run();
    save_with(c, 1, 0, 3);
    EXPECT(layout_init(&h.layout, c, 1) == STATUS_OK);
    EXPECT(safetensors_open(&h.file, path_of("step-00000003/model.safetensors")) == STATUS_OK);
    if (h.file == NULL) {
        return;
    }
    EXPECT_STRING(safetensors_metadata(h.file, "format"), "pt");
    EXPECT(h.file->count == (size_t)(4 + 12 * c->layers)); /* and so no lm_head */
    for (int64_t i = 0; i < c->vocab_size; i += 3) {
        EXPECT(file_value(&h, "transformer.wte.weight", c->vocab_size, C, i, i % C) ==
               our_value(&h, TOKEN_EMBEDDING, 0, C, i, i % C));
    }
    EXPECT(file_value(&h, "transformer.wpe.weight", c->seq_len, C, 5, 7) ==
           our_value(&h, POSITION_EMBEDDING, 0, C, 5, 7));
    expect_vector(&h, "transformer.ln_f.weight", 0, FINAL_NORM_WEIGHT, C);
    expect_vector(&h, "transformer.ln_f.bias", 0, FINAL_NORM_BIAS, C);
    for (int layer = 0; layer < c->layers; layer++) {
        char name[128];
        expect_conv1d(&h, "attn.c_attn", layer, QKV_WEIGHT, QKV_BIAS, C, qkv);
        expect_conv1d(&h, "attn.c_proj", layer, ATTENTION_PROJECTION_WEIGHT, ATTENTION_PROJECTION_BIAS, C, C);
        expect_conv1d(&h, "mlp.c_fc", layer, MLP_UP_WEIGHT, MLP_UP_BIAS, C, 4 * C);
        expect_conv1d(&h, "mlp.c_proj", layer, MLP_DOWN_WEIGHT, MLP_DOWN_BIAS, 4 * C, C);
        static const enum parameter_id norms[] = {
            ATTENTION_NORM_WEIGHT, ATTENTION_NORM_BIAS, MLP_NORM_WEIGHT, MLP_NORM_BIAS};
        for (int i = 0; i < 4; i++) {
            snprintf(
                name, sizeof name, "transformer.h.%d.ln_%d.%s", layer, 1 + i / 2, i % 2 ? "bias" : "weight");
            expect_vector(&h, name, layer, norms[i], C);
        }
    }
    safetensors_close(h.file);
    layout_free(&h.layout);
}

static void test_weights_have_the_names_shapes_and_orientation_of_hugging_face(void) {
    expect_hugging_face_weights(&multi_head);
    expect_hugging_face_weights(&grouped);
}

static void test_the_config_is_one_of_hugging_face(void) {
    for (int i = 0; i < 2; i++) {
        const struct model_config *c = i == 0 ? &multi_head : &grouped;
        uint8_t *text = NULL;
        size_t bytes;
        struct json *json = NULL;
        new_run();
        save_with(c, 1, 0, 3);
        EXPECT(file_read_all(path_of("step-00000003/config.json"), &text, &bytes) == STATUS_OK);
        EXPECT(json_parse(&json, (char *)text, bytes, "config.json") == STATUS_OK);
        EXPECT_STRING(json_get(json, "model_type")->string, "gpt2");
        EXPECT_STRING(json_get(json, "architectures")->items[0].string, "GPT2LMHeadModel");
        EXPECT_STRING(json_get(json, "activation_function")->string, "gelu_new");
        EXPECT(json_get(json, "layer_norm_epsilon")->number == 1e-5);
        EXPECT(json_get(json, "tie_word_embeddings")->boolean);
        EXPECT(json_get(json, "n_layer")->integer == c->layers &&
               json_get(json, "n_embd")->integer == c->channels);
        EXPECT(json_get(json, "n_head")->integer == c->heads);
        EXPECT(json_get(json, "n_positions")->integer == c->seq_len &&
               json_get(json, "n_ctx")->integer == c->seq_len);
        EXPECT(json_get(json, "vocab_size")->integer == c->vocab_size);
        const struct json *kv_heads = json_get(json, "n_kv_head");
        EXPECT(c == &grouped ? kv_heads != NULL && kv_heads->integer == 2 : kv_heads == NULL);
        struct model_config back = {0};
        EXPECT(checkpoint_read_config(path_of("step-00000003"), &back) == STATUS_OK);
        EXPECT(memcmp(&back, c, sizeof back) == 0);
        json_free(json);
        free(text);
    }
}

static void test_configs_of_other_models_are_refused(void) {
#define SIZES "\"n_layer\":2,\"n_embd\":8,\"n_head\":2,\"n_positions\":4,\"vocab_size\":9"
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"{" SIZES "}", NULL},
        {"{" SIZES ",\"n_inner\":null,\"n_kv_head\":1}", NULL},
        {"{" SIZES ",\"n_inner\":32,\"scale_attn_weights\":true}", NULL},
        {"{" SIZES ",\"activation_function\":\"gelu_pytorch_tanh\"}", NULL},
        {"{\"n_layer\":2}", "\"n_embd\" is missing"},
        {"{\"n_layer\":0}", "\"n_layer\" is 0"},
        {"{\"n_layer\":2147483647,\"n_embd\":8,\"n_head\":2,\"n_positions\":4,\"vocab_size\":9}",
            "must be at most 1024 layers"},
        {"{\"n_layer\":2,\"n_embd\":2147483647,\"n_head\":1,\"n_positions\":4,\"vocab_size\":9}",
            "1048576 of the others"},
        {"{\"n_layer\":4294967297}", "\"n_layer\" is 4294967297"},
        {"{" SIZES ",\"model_type\":\"llama\"}", "\"model_type\" is not \"gpt2\""},
        {"{" SIZES ",\"activation_function\":\"relu\"}", "\"activation_function\" is not \"gelu_new\""},
        {"{" SIZES ",\"layer_norm_epsilon\":1e-6}", "\"layer_norm_epsilon\" is not 1e-05"},
        {"{" SIZES ",\"scale_attn_by_inverse_layer_idx\":true}",
            "\"scale_attn_by_inverse_layer_idx\" is not false"},
        {"{" SIZES ",\"n_inner\":24}", "\"n_inner\" is not 4 * n_embd"},
        {"{" SIZES ",\"n_kv_head\":3}", "--kv-heads 3"},
        {"[]", "\"n_layer\" is missing"},
        {"{", "ends too early"},
    };
#undef SIZES
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/config.json", folder);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct model_config config;
        EXPECT(file_write_all(path, cases[i].text, strlen(cases[i].text)) == STATUS_OK);
        EXPECT(checkpoint_read_config(folder, &config) == (cases[i].why == NULL ? STATUS_OK : STATUS_ERROR));
        if (cases[i].why != NULL) {
            EXPECT_CONTAINS(error_message(), path);
            EXPECT_CONTAINS(error_message(), cases[i].why);
        }
    }
}

static uint16_t bf16_of_formula(double value) {
    return float_to_bf16((float)value);
}

static void expect_bf16_formula(struct rank *r, const void *name) {
    EXPECT(checkpoint_load_weights(path_of(name), r->optimizer) == STATUS_OK);
    const struct layout *layout = model_get_layout(r->model);
    int64_t wrong = 0;
    for (int b = 0; b < layout->buckets; b++) {
        for (int64_t i = 0; i < layout->bucket[b].count; i++) {
            double expected = parameter_formula(model_get_config(r->model), b, i);
            wrong += get(model_parameters(r->model), layout->bucket[b].offset + i) !=
                     (double)bf16_to_float(bf16_of_formula(expected));
        }
    }
    EXPECT(wrong == 0);
}

/* GPT-2 as its authors publish it: names without "transformer.", and the masks of attention beside the weights. */
static void test_a_bare_gpt2_in_bf16_with_tensors_that_are_no_weights_can_be_loaded(void) {
    struct safetensors *file = NULL;
    struct safetensors_writer *writer = NULL;
    new_run();
    save_with(&multi_head, 1, 0, 3);
    EXPECT(safetensors_open(&file, path_of("step-00000003/model.safetensors")) == STATUS_OK);
    size_t count = file->count + 1;
    struct safetensors_entry *entries = calloc(count, sizeof *entries);
    char mask[] = "h.0.attn.bias";
    for (size_t i = 0; i < file->count; i++) {
        entries[i] = file->entries[i];
        entries[i].name += strlen("transformer.");
        entries[i].dtype = DTYPE_BF16;
    }
    entries[count - 1] = (struct safetensors_entry){mask, DTYPE_U8, 4, {1, 1, 2, 2}, 0, 0};
    EXPECT(make_directories(path_of("bare")) == STATUS_OK);
    EXPECT(safetensors_create(&writer, path_of("bare/model.safetensors"), entries, count, NULL, NULL, 0) ==
           STATUS_OK);
    for (size_t i = 0; i < file->count; i++) {
        for (uint64_t at = 0; at < file->entries[i].end - file->entries[i].begin; at += 4) {
            float value;
            EXPECT(safetensors_read(file, &file->entries[i], at, &value, 4) == STATUS_OK);
            uint16_t bits = float_to_bf16(value);
            EXPECT(safetensors_write(writer, &bits, 2) == STATUS_OK);
        }
    }
    EXPECT(safetensors_write(writer, "\1\0\1\1", 4) == STATUS_OK);
    EXPECT(safetensors_finish(writer, NULL, NULL) == STATUS_OK);
    free(entries);
    safetensors_close(file);
    const struct setup one = {&multi_head, 1, 0, false};
    on_ranks(&one, expect_bf16_formula, "bare");
}

/* ---- the wrong model ---- */

struct mismatch {
    struct model_config config;
    const char *weights, *moments; /* what the messages say; NULL: they fit */
};

static void load_and_expect_errors(struct rank *r, const void *argument) {
    const struct mismatch *m = argument;
    EXPECT(checkpoint_load_weights(path_of("step-00000003"), r->optimizer) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "step-00000003/model.safetensors");
    EXPECT_CONTAINS(error_message(), m->weights);
    enum status moments = checkpoint_load_moments(path_of("step-00000003"), r->optimizer);
    EXPECT(moments == (m->moments == NULL ? STATUS_OK : STATUS_ERROR));
    if (m->moments != NULL) {
        EXPECT_CONTAINS(error_message(), "step-00000003");
        EXPECT_CONTAINS(error_message(), m->moments);
    }
}

static void test_a_checkpoint_of_another_shape_names_the_tensor_and_both_shapes(void) {
    static const struct mismatch mismatches[] = {
        {{2, 24, 4, 4, 8, 150}, "\"transformer.wte.weight\" is (150, 16), but this model's is (150, 24)",
            "the moments of bucket 0 end at element 4256 of"},
        {{2, 16, 4, 4, 8, 151}, "\"transformer.wte.weight\" is (150, 16), but this model's is (151, 16)",
            NULL /* of the same padded size */},
        {{2, 16, 4, 4, 9, 150}, "\"transformer.wpe.weight\" is (8, 16), but this model's is (9, 16)",
            "the moments of bucket 0"},
        {{2, 16, 4, 2, 8, 150},
            "\"transformer.h.0.attn.c_attn.weight\" is (16, 48), but this model's is (16, 32)",
            "\"first_moment.1\""},
        {{3, 16, 4, 4, 8, 150}, "\"transformer.h.2.attn.c_attn.weight\" is missing",
            "\"bucket_first\" is not of shape (4)"},
    };
    new_run();
    save_with(&multi_head, 2, 1, 3);
    for (size_t i = 0; i < sizeof mismatches / sizeof mismatches[0]; i++) {
        struct setup setup = {&mismatches[i].config, 2, 1, false};
        on_ranks(&setup, load_and_expect_errors, &mismatches[i]);
    }
}

static void expect_moments_refused(struct rank *r, const void *why) {
    EXPECT(checkpoint_load_moments(path_of("step-00000003"), r->optimizer) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), why);
}

static void test_moments_that_do_not_make_up_the_whole_are_refused(void) {
    const struct setup one = {&multi_head, 1, 0, false};
    new_run();
    save_with(&multi_head, 2, 1, 3);
    char first[PATH_BYTES], second[PATH_BYTES];
    snprintf(first, sizeof first, "%s", path_of("step-00000003/optimizer-00000-of-00002.safetensors"));
    snprintf(second, sizeof second, "%s", path_of("step-00000003/optimizer-00001-of-00002.safetensors"));
    EXPECT(rename(second, path_of("aside")) == 0);
    on_ranks(&one, expect_moments_refused, "optimizer-00001-of-00002.safetensors: cannot open");
    EXPECT(link(first, second) == 0); /* the same piece twice */
    on_ranks(&one, expect_moments_refused, "\"first_moment.0\" is not what follows element");
    EXPECT(unlink(second) == 0 && link(path_of("step-00000003/model.safetensors"), second) == 0);
    on_ranks(&one, expect_moments_refused, "not a file of moments");
}

/* ---- damage ---- */

static char notices[16384];

static void keep_notice(void *context, const char *line) {
    EXPECT(context == notices);
    strncat(notices, line, sizeof notices - strlen(notices) - 2);
    strcat(notices, "\n");
}

/* The newest valid checkpoint is `name`. */
static void expect_newest(const char *name) {
    char path[PATH_BYTES];
    notices[0] = '\0';
    EXPECT(checkpoint_find_newest(run_dir, path, sizeof path, keep_notice, notices) == STATUS_OK);
    EXPECT_STRING(path, path_of(name));
}

static void test_checksums_are_those_of_the_files_in_the_form_that_xxh64sum_reads(void) {
    new_run();
    save_with(&grouped, 2, 1, 12);
    uint8_t *text = NULL;
    size_t bytes;
    EXPECT(file_read_all(path_of("step-00000012/checksums.xxh64"), &text, &bytes) == STATUS_OK);
    char expected[1024] = "";
    static const char *const names[] = {"model.safetensors", "optimizer-00000-of-00002.safetensors",
        "optimizer-00001-of-00002.safetensors", "config.json", "state.json"};
    for (int i = 0; i < 5; i++) {
        char name[128];
        uint64_t xxh64 = 0;
        snprintf(name, sizeof name, "step-00000012/%s", names[i]);
        EXPECT(xxh64_file(path_of(name), &xxh64) == STATUS_OK);
        size_t used = strlen(expected);
        snprintf(expected + used, sizeof expected - used, "%016" PRIx64 "  %s\n", xxh64, names[i]);
    }
    EXPECT_STRING((char *)text, expected);
    free(text);
    int files = 0;
    DIR *open_folder = opendir(path_of("step-00000012"));
    for (struct dirent *entry; (entry = readdir(open_folder)) != NULL;) {
        files += entry->d_name[0] != '.';
    }
    closedir(open_folder);
    EXPECT(files == 6);
}

enum damage { FLIP_A_BIT, CUT_A_BYTE, ADD_A_BYTE, EMPTY, REMOVE, DAMAGES };

static void damage_file(const char *path, enum damage damage) {
    uint8_t *data = NULL;
    size_t bytes;
    EXPECT(file_read_all(path, &data, &bytes) == STATUS_OK && bytes > 0);
    switch (damage) {
    case FLIP_A_BIT:
        data[bytes * 2 / 3] ^= 4;
        EXPECT(file_write_all(path, data, bytes) == STATUS_OK);
        break;
    case CUT_A_BYTE:
        EXPECT(truncate(path, (off_t)bytes - 1) == 0);
        break;
    case ADD_A_BYTE:
        EXPECT(file_write_all(path, data, bytes + 1) == STATUS_OK); /* a zero follows the data */
        break;
    case EMPTY:
        EXPECT(truncate(path, 0) == 0);
        break;
    default:
        EXPECT(unlink(path) == 0);
    }
    free(data);
}

static void test_any_damage_to_any_file_is_found_and_the_checkpoint_before_is_taken(void) {
    static const char *const names[] = {"model.safetensors", "config.json", "state.json",
        "optimizer-00000-of-00002.safetensors", "optimizer-00001-of-00002.safetensors", "checksums.xxh64"};
    const struct setup two = {&multi_head, 2, 1, false};
    static const int steps[] = {9, 10, -1};
    new_run();
    on_ranks(&two, save_steps, steps);
    expect_newest("step-00000010");
    EXPECT_STRING(notices, "");
    for (int i = 0; i < 6; i++) {
        for (int damage = 0; damage < DAMAGES; damage++) {
            char name[128];
            uint8_t *saved = NULL;
            size_t bytes;
            snprintf(name, sizeof name, "step-00000010/%s", names[i]);
            EXPECT(file_read_all(path_of(name), &saved, &bytes) == STATUS_OK);
            damage_file(path_of(name), (enum damage)damage);
            expect_newest("step-00000009");
            EXPECT_CONTAINS(notices, "checkpoint of step 10 is damaged and passed over: ");
            EXPECT_CONTAINS(notices, damage == FLIP_A_BIT && i == 5 ? "step-00000010/" : name);
            EXPECT(strchr(notices, '\n') == notices + strlen(notices) - 1); /* one line */
            EXPECT(file_write_all(path_of(name), saved, bytes) == STATUS_OK);
            free(saved);
        }
    }
    expect_newest("step-00000010");
}

static void test_a_list_of_checksums_without_one_of_the_files_is_damage(void) {
    const struct setup two = {&multi_head, 2, 1, false};
    static const int steps[] = {9, 10, -1};
    new_run();
    on_ranks(&two, save_steps, steps);
    uint8_t *text = NULL;
    size_t bytes;
    EXPECT(file_read_all(path_of("step-00000010/checksums.xxh64"), &text, &bytes) == STATUS_OK);
    for (char *line = (char *)text; *line != '\0'; line = strchr(line, '\n') + 1) {
        char without[4096];
        const char *next = strchr(line, '\n') + 1;
        int length = snprintf(without, sizeof without, "%.*s%s", (int)(line - (char *)text), text, next);
        EXPECT(
            file_write_all(path_of("step-00000010/checksums.xxh64"), without, (size_t)length) == STATUS_OK);
        expect_newest("step-00000009");
        EXPECT_CONTAINS(notices, "no checksum of ");
    }
    free(text);
}

static void expect_unreadable(const char *name, const char *reason) {
    char path[PATH_BYTES];
    notices[0] = '\0';
    EXPECT(checkpoint_find_newest(run_dir, path, sizeof path, keep_notice, notices) == STATUS_ERROR);
    EXPECT_STRING(path, "");
    EXPECT_STRING(notices, "");
    EXPECT_CONTAINS(error_message(), path_of(name));
    EXPECT_CONTAINS(error_message(), reason);
}

/* It may be as good as ever: to pass it over would be to do its steps again, and to replace it then. */
static void test_a_checkpoint_that_is_there_but_cannot_be_read_stops_the_search(void) {
    static const char *const names[] = {
        "model.safetensors", "state.json", "optimizer-00001-of-00002.safetensors", "checksums.xxh64"};
    const struct setup two = {&multi_head, 2, 1, false};
    static const int steps[] = {9, 10, -1};
    new_run();
    on_ranks(&two, save_steps, steps);
    for (int i = 0; i < 4; i++) {
        char name[128];
        snprintf(name, sizeof name, "step-00000010/%s", names[i]);
        EXPECT(rename(path_of(name), path_of("aside")) == 0);
        EXPECT(symlink(names[i], path_of(name)) == 0); /* to itself */
        expect_unreadable(name, strerror(ELOOP));
        EXPECT(unlink(path_of(name)) == 0 && make_directories(path_of(name)) == STATUS_OK);
        expect_unreadable(name, "is not a file");
        EXPECT(rmdir(path_of(name)) == 0 && symlink("nowhere", path_of(name)) == 0);
        expect_newest("step-00000009"); /* what is not there is damage */
        EXPECT_CONTAINS(notices, name);
        EXPECT(unlink(path_of(name)) == 0 && rename(path_of("aside"), path_of(name)) == 0);
    }
    expect_newest("step-00000010");
    EXPECT(rename(path_of("step-00000010"), path_of("aside")) == 0);
    EXPECT(symlink("step-00000010", path_of("step-00000010")) == 0);
    expect_unreadable("step-00000010/checksums.xxh64", strerror(ELOOP));
}

static atomic_bool moving;

/* As a run that saves a newer checkpoint and takes the older one away; every name is sound while it is there. */
static void *move_on(void *unused) {
    char from[PATH_BYTES + 32], to[PATH_BYTES + 32];
    for (int step = 10; atomic_load(&moving); step++) {
        snprintf(from, sizeof from, "%s/checkpoints/step-%08d", run_dir, step);
        snprintf(to, sizeof to, "%s/checkpoints/step-%08d", run_dir, step + 1);
        EXPECT(rename(from, to) == 0);
        usleep(3000); /* reading takes less */
    }
    return unused;
}

static void test_a_checkpoint_that_is_removed_while_it_is_read_is_no_damaged_one(void) {
    const struct setup one = {&multi_head, 1, 1, false};
    static const int steps[] = {10, -1};
    pthread_t mover;
    char path[PATH_BYTES];
    new_run();
    on_ranks(&one, save_steps, steps);
    atomic_store(&moving, true);
    EXPECT(pthread_create(&mover, NULL, move_on, NULL) == 0);
    notices[0] = '\0';
    for (int i = 0; i < 500; i++) {
        EXPECT(checkpoint_find_newest(run_dir, path, sizeof path, keep_notice, notices) == STATUS_OK);
    }
    EXPECT_STRING(notices, "");
    atomic_store(&moving, false);
    EXPECT(pthread_join(mover, NULL) == 0);
}

static void test_if_all_are_damaged_it_is_an_error_and_if_there_is_none_it_is_not(void) {
    char path[PATH_BYTES] = "x";
    new_run();
    EXPECT(checkpoint_find_newest(run_dir, path, sizeof path, keep_notice, notices) == STATUS_OK);
    EXPECT_STRING(path, "");
    EXPECT(make_directories(path_of("step-1x")) == STATUS_OK &&
           make_directories(path_of(".tmp-step-00000001")) == STATUS_OK);
    EXPECT(checkpoint_find_newest(run_dir, path, sizeof path, keep_notice, notices) == STATUS_OK);
    EXPECT_STRING(path, "");
    EXPECT(make_directories(path_of("step-00000001")) == STATUS_OK &&
           make_directories(path_of("step-00000002")) == STATUS_OK);
    notices[0] = '\0';
    EXPECT(checkpoint_find_newest(run_dir, path, sizeof path, keep_notice, notices) == STATUS_ERROR);
    EXPECT_STRING(path, "");
    EXPECT_CONTAINS(error_message(), "all 2 checkpoints are damaged");
    EXPECT_CONTAINS(notices, "step-00000002/checksums.xxh64: cannot open");
    EXPECT_CONTAINS(notices, "step-00000001/checksums.xxh64: cannot open");
}

static void test_steps_are_compared_as_numbers(void) {
    const struct setup one = {&multi_head, 1, 0, false};
    static const int steps[] = {99999999, 100000000, 5, -1};
    new_run();
    on_ranks(&one, save_steps, steps);
    expect_newest("step-100000000");
}

static void test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(void) {
    new_run();
    save_with(&multi_head, 2, 1, 9);
    save_with(&multi_head, 2, 1, 10);
    EXPECT(truncate(path_of("step-00000010/model.safetensors"), 100) == 0);
    expect_newest("step-00000009");
    save_with(&multi_head, 1, 0, 10); /* other files than before */
    expect_newest("step-00000010");
    EXPECT_STRING(notices, "");
    EXPECT(!path_exists(path_of("step-00000010/optimizer-00000-of-00002.safetensors")));
    EXPECT(!path_exists(path_of(".tmp-removed-step-00000010")));
}

/* ---- saves that fail ---- */

static int count_entries(const char *path) {
    int entries = 0;
    DIR *open_folder = opendir(path);
    for (struct dirent *entry; open_folder != NULL && (entry = readdir(open_folder)) != NULL;) {
        entries += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    }
    if (open_folder != NULL) {
        closedir(open_folder);
    }
    return entries;
}

static void save_and_expect_failure(struct rank *r, const char *why) {
    struct run_state state = state_of_step(20);
    char path[PATH_BYTES];
    uint64_t bytes;
    EXPECT(checkpoint_save(run_dir, r->optimizer, &state, OPTIONS, NULL, path, sizeof path, &bytes) ==
           STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), run_dir);
    EXPECT_CONTAINS(error_message(), "step 20 is not saved");
    EXPECT_CONTAINS(error_message(), why);
}

/* Files of this process cannot grow over the limit, as if the disk were full, if it is rank `full_rank`. */
struct full_disk {
    int full_rank;
    rlim_t limit_bytes;
    const char *file; /* that does not fit */
};

static void save_on_a_full_disk(struct rank *r, const void *argument) {
    const struct full_disk *full = argument;
    EXPECT(optimizer_initialize(r->optimizer, 1) ==
           STATUS_OK); /* OpenMP starts, and may make files, before the limit */
    struct rlimit limit, before;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    if (r->comm->rank == full->full_rank) {
        signal(SIGXFSZ, SIG_IGN);
        limit.rlim_cur = full->limit_bytes;
    }
    setrlimit(RLIMIT_FSIZE, &limit);
    save_and_expect_failure(r, full->file);
    EXPECT_CONTAINS(error_message(), strerror(EFBIG));
    setrlimit(RLIMIT_FSIZE, &before);
    save_step(r, 30); /* when there is room again */
}

static void test_a_full_disk_on_any_rank_fails_on_all_and_harms_nothing(void) {
    static const struct full_disk cases[] = {{0, 20000, "model.safetensors"}, {0, 100, "model.safetensors"},
        {1, 5000, "optimizer-00001-of-00002.safetensors"}, {1, 100, "optimizer-00001-of-00002.safetensors"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct setup two = {&multi_head, 2, 1, false};
        new_run();
        save_with(&multi_head, 2, 1, 10);
        on_ranks(&two, save_on_a_full_disk, &cases[i]);
        expect_newest("step-00000030");
        EXPECT(count_entries(path_of("")) == 2); /* no temporary folder is left */
    }
}

static double longest_patience; /* that a communicator of this process was asked for, in seconds */

static void note_patience(struct comm *c, double seconds) {
    (void)c;
    longest_patience = fmax(longest_patience, seconds);
}

static void save_with_noted_patience(struct rank *r, const void *argument) {
    (void)argument;
    r->comm->be_patient = note_patience;
    save_step(r, 40);
    double writing = 12.0 * (double)model_get_layout(r->model)->parameters / 50e6; /* at 50 MB a second */
    EXPECT_NEAR(longest_patience, 60 + writing, 1e-9);
}

static void test_ranks_are_patient_with_one_that_saves_as_long_as_its_bytes_take(void) {
    const struct setup two = {&multi_head, 2, 1, false};
    new_run();
    on_ranks(&two, save_with_noted_patience, NULL);
}

static void save_where_a_file_is_in_the_way(struct rank *r, const void *argument) {
    (void)argument;
    save_and_expect_failure(r, "cannot create the folder");
}

static void test_a_folder_that_cannot_be_made_fails_on_all_ranks(void) {
    const struct setup two = {&multi_head, 2, 1, false};
    new_run();
    EXPECT(make_directories(run_dir) == STATUS_OK);
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/checkpoints", run_dir);
    EXPECT(file_write_all(path, "x", 1) == STATUS_OK);
    on_ranks(&two, save_where_a_file_is_in_the_way, NULL);
    EXPECT(path_exists(path) && !path_is_directory(path));
}

/* A folder of this process whose path has `length` bytes. */
static void make_deep_folder(char path[PATH_BYTES], size_t length) {
    enum { NAME_BYTES = 200 };
    size_t used = strlen(strcpy(path, folder));
    while (used < length) {
        size_t left = length - used; /* a name of one byte at least has to follow */
        size_t bytes = left <= NAME_BYTES + 1   ? left - 1
                       : left == NAME_BYTES + 2 ? NAME_BYTES - 1
                                                : NAME_BYTES;
        path[used++] = '/';
        memset(path + used, 'd', bytes);
        used += bytes;
        path[used] = '\0';
    }
    EXPECT(used == length && make_directories(path) == STATUS_OK);
}

/* Saves and looks for it: as far as its longest path fits that works, beyond it a line says why not. */
static void save_in_deep_folder(struct rank *r, const void *argument) {
    const char *deep = argument;
    struct run_state state = state_of_step(3);
    char path[PATH_BYTES + 64], found[PATH_BYTES + 64];
    uint64_t bytes;
    fill_by_formula(r);
    bool fits =
        strlen(deep) + strlen("/checkpoints/.tmp-step-00000003/optimizer-00000-of-00001.safetensors") < 4096;
    enum status status =
        checkpoint_save(deep, r->optimizer, &state, OPTIONS, NULL, path, sizeof path, &bytes);
    EXPECT(status == (fits ? STATUS_OK : STATUS_ERROR));
    EXPECT(fits || strstr(error_message(), "too long") != NULL);
    EXPECT(checkpoint_find_newest(deep, found, sizeof found, keep_notice, notices) == STATUS_OK ||
           strstr(error_message(), "too long") != NULL);
    EXPECT_STRING(found, fits ? path : "");
    if (fits) {
        EXPECT(checkpoint_load_weights(path, r->optimizer) == STATUS_OK);
        EXPECT(checkpoint_load_moments(path, r->optimizer) == STATUS_OK);
        EXPECT(checkpoint_prune(deep, 3, 1, 0) == STATUS_OK);
    }
}

static void test_paths_up_to_the_systems_limit_work_and_longer_ones_are_an_error(void) {
    const struct setup one = {&multi_head, 1, 0, false};
    /* 4027 is the last that fits */
    for (size_t length = 4024; length < 4095; length += length < 4030 ? 1 : 6) {
        char deep[PATH_BYTES], top[PATH_BYTES];
        make_deep_folder(deep, length);
        on_ranks(&one, save_in_deep_folder, deep);
        snprintf(top, sizeof top, "%.*s", (int)(strlen(folder) + 201), deep);
        EXPECT(remove_tree(top) == STATUS_OK);
    }
}

static void test_what_a_killed_save_left_is_no_hindrance_and_no_checkpoint(void) {
    new_run();
    EXPECT(make_directories(path_of(".tmp-step-00000003/nested")) == STATUS_OK);
    EXPECT(file_write_all(path_of(".tmp-step-00000003/optimizer-00005-of-00006.safetensors"), "x", 1) ==
           STATUS_OK);
    save_with(&multi_head, 1, 0, 3);
    expect_newest("step-00000003");
    EXPECT_STRING(notices, "");
    EXPECT(count_entries(path_of("")) == 1 && count_entries(path_of("step-00000003")) == 5);
}

/* ---- pruning ---- */

static void make_steps(const int *steps) {
    for (; *steps >= 0; steps++) {
        char name[64];
        snprintf(name, sizeof name, "step-%08d", *steps);
        EXPECT(make_directories(path_of(name)) == STATUS_OK);
        snprintf(name, sizeof name, "step-%08d/state.json", *steps);
        EXPECT(file_write_all(path_of(name), "x", 1) == STATUS_OK);
    }
}

static void expect_steps(const int *steps) {
    int count = 0;
    for (; *steps >= 0; steps++, count++) {
        char name[64];
        snprintf(name, sizeof name, "step-%08d", *steps);
        EXPECT(path_exists(path_of(name)));
    }
    EXPECT(count_entries(path_of("")) == count);
}

static void test_pruning_keeps_the_newest_and_those_kept_for_good(void) {
    static const struct {
        int step, keep, keep_every;
        int left[8];
    } cases[] = {
        {60, 0, 0, {10, 20, 30, 40, 50, 60, -1}}, /* all */
        {60, 0, 20, {10, 20, 30, 40, 50, 60, -1}}, {60, 1, 0, {60, -1}}, {60, 2, 0, {50, 60, -1}},
        {60, 9, 0, {10, 20, 30, 40, 50, 60, -1}}, {60, 1, 20, {20, 40, 60, -1}},
        {60, 2, 30, {30, 50, 60, -1}},
        {40, 2, 0, {30, 40, 50, 60, -1}}, /* 50 and 60 are damaged ones: they are not counted, and stay */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static const int all[] = {10, 20, 30, 40, 50, 60, -1};
        new_run();
        make_steps(all);
        EXPECT(make_directories(path_of(".tmp-step-00000070/nested")) == STATUS_OK);
        EXPECT(make_directories(path_of(".tmp-removed-step-00000005")) == STATUS_OK);
        EXPECT(checkpoint_prune(run_dir, cases[i].step, cases[i].keep, cases[i].keep_every) == STATUS_OK);
        expect_steps(cases[i].left);
    }
    new_run(); /* where there is nothing */
    EXPECT(checkpoint_prune(run_dir, 10, 1, 0) == STATUS_OK);
}

static void test_pruning_leaves_what_is_not_a_checkpoint(void) {
    static const int steps[] = {1, 2, -1};
    new_run();
    make_steps(steps);
    EXPECT(make_directories(path_of("step-00000001-mine")) == STATUS_OK);
    EXPECT(make_directories(path_of("step-1")) == STATUS_OK);
    EXPECT(checkpoint_prune(run_dir, 2, 1, 0) == STATUS_OK);
    EXPECT(!path_exists(path_of("step-00000001")) && path_exists(path_of("step-00000002")));
    EXPECT(path_exists(path_of("step-00000001-mine")) && path_exists(path_of("step-1")));
}

int main(void) {
    make_folder("test_checkpoint");
    RUN(test_the_state_reads_back_bit_by_bit);
    RUN(test_a_state_that_is_not_one_is_refused);
    RUN(test_any_ranks_and_zero_stage_read_what_any_other_wrote);
    RUN(test_ranks_share_the_writing_of_moments_under_either_stage);
    RUN(test_moments_of_the_double_backend_are_kept_in_double_and_readable_in_float);
    RUN(test_a_resumed_run_goes_on_bit_by_bit_as_one_that_was_not_interrupted);
    RUN(test_weights_have_the_names_shapes_and_orientation_of_hugging_face);
    RUN(test_the_config_is_one_of_hugging_face);
    RUN(test_configs_of_other_models_are_refused);
    RUN(test_a_bare_gpt2_in_bf16_with_tensors_that_are_no_weights_can_be_loaded);
    RUN(test_a_checkpoint_of_another_shape_names_the_tensor_and_both_shapes);
    RUN(test_moments_that_do_not_make_up_the_whole_are_refused);
    RUN(test_checksums_are_those_of_the_files_in_the_form_that_xxh64sum_reads);
    RUN(test_any_damage_to_any_file_is_found_and_the_checkpoint_before_is_taken);
    RUN(test_a_list_of_checksums_without_one_of_the_files_is_damage);
    RUN(test_a_checkpoint_that_is_there_but_cannot_be_read_stops_the_search);
    RUN(test_a_checkpoint_that_is_removed_while_it_is_read_is_no_damaged_one);
    RUN(test_if_all_are_damaged_it_is_an_error_and_if_there_is_none_it_is_not);
    RUN(test_steps_are_compared_as_numbers);
    RUN(test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again);
    RUN(test_ranks_are_patient_with_one_that_saves_as_long_as_its_bytes_take);
    RUN(test_a_full_disk_on_any_rank_fails_on_all_and_harms_nothing);
    RUN(test_a_folder_that_cannot_be_made_fails_on_all_ranks);
    RUN(test_paths_up_to_the_systems_limit_work_and_longer_ones_are_an_error);
    RUN(test_what_a_killed_save_left_is_no_hindrance_and_no_checkpoint);
    RUN(test_pruning_keeps_the_newest_and_those_kept_for_good);
    RUN(test_pruning_leaves_what_is_not_a_checkpoint);
    remove_tree(folder);
    return test_summary();
}
