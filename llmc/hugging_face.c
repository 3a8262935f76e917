/* Weights travel a bucket at a time between the ranks and the first rank's memory, and a slab of rows at a time
   between there and the file, turned around on the way where the file has the transpose. */
#include "hugging_face.h"

#include "json.h"
#include "safetensors.h"

#include <limits.h>
#include <stdlib.h>

enum {
    SLAB_BYTES = 4 << 20,
    TILE = 32, /* rows and columns that a transpose moves together, so that both sides stay in cache */
    NAME_BYTES = 128
};

/* ---- the tensors of a model, bucket by bucket, in the order of the flat layout ---- */

struct model_tensor {
    enum parameter_id id;
    int bucket;
    char name[NAME_BYTES];
    int dimensions;
    int64_t shape[2];         /* in the file; a vector's second size is 1 */
    int64_t offset_in_bucket; /* elements */
};

struct tensor_list {
    struct model_tensor *tensors;
    size_t count;
};

static void describe_tensor(struct model_tensor *t, const struct model_config *config,
    const struct layout *layout, enum parameter_id id, int bucket) {
    const struct parameter_info *info = &parameter_table[id];
    int64_t rows = info->file_rows(config), columns = info->columns(config);
    t->id = id;
    t->bucket = bucket;
    const char *layer = strstr(info->hugging_face, "%d");
    if (layer != NULL) {
        snprintf(t->name, sizeof t->name, "%.*s%d%s", (int)(layer - info->hugging_face), info->hugging_face,
            bucket - 1, layer + 2);
    } else {
        snprintf(t->name, sizeof t->name, "%s", info->hugging_face);
    }
    t->dimensions = info->decay ? 2 : 1; /* weight decay is for the matrices, and for all of them */
    t->shape[0] = info->transposed_in_file ? columns : rows;
    t->shape[1] = info->transposed_in_file ? rows : columns;
    t->offset_in_bucket = layout_offset(layout, config, id, bucket - 1) - layout->bucket[bucket].offset;
}

static enum status list_tensors(
    struct tensor_list *list, const struct model_config *config, const struct layout *layout) {
    list->count = 0;
    CHECK(ALLOCATE(list->tensors, (size_t)layout->buckets * PARAMETER_KINDS));
    for (int bucket = 0; bucket < layout->buckets; bucket++) {
        for (int id = 0; id < PARAMETER_KINDS; id++) {
            if (parameter_table[id].per_layer == (bucket > 0)) {
                describe_tensor(&list->tensors[list->count], config, layout, (enum parameter_id)id, bucket);
                list->count++;
            }
        }
    }
    return STATUS_OK;
}

static int64_t largest_bucket(const struct layout *layout) {
    int64_t largest = 0;
    for (int b = 0; b < layout->buckets; b++) {
        largest = max_i64(largest, layout->bucket[b].count);
    }
    return largest;
}

/* Rows of the file's matrix that are moved at a time. */
static int64_t slab_rows(const struct model_tensor *t) {
    return min_i64(t->shape[0], max_i64(1, SLAB_BYTES / (t->shape[1] * (int64_t)sizeof(float))));
}

static int64_t slab_elements(const struct tensor_list *list) {
    int64_t most = 0;
    for (size_t i = 0; i < list->count; i++) {
        most = max_i64(most, slab_rows(&list->tensors[i]) * list->tensors[i].shape[1]);
    }
    return most;
}

/* to[c * to_stride + r] = from[r * from_stride + c] */
static void transpose(
    float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows, int64_t columns) {
    for (int64_t r0 = 0; r0 < rows; r0 += TILE) {
        for (int64_t c0 = 0; c0 < columns; c0 += TILE) {
            int64_t r1 = min_i64(r0 + TILE, rows), c1 = min_i64(c0 + TILE, columns);
            for (int64_t r = r0; r < r1; r++) {
                for (int64_t c = c0; c < c1; c++) {
                    to[c * to_stride + r] = from[r * from_stride + c];
                }
            }
        }
    }
}

/* ---- writing ---- */

static enum status write_tensor(
    struct safetensors_writer *w, const struct model_tensor *t, const float *values, float *slab) {
    int64_t file_columns = t->shape[1];
    int64_t rows = slab_rows(t);
    for (int64_t row = 0; row < t->shape[0]; row += rows) {
        int64_t n = min_i64(rows, t->shape[0] - row);
        const float *from = values + row * file_columns;
        if (parameter_table[t->id].transposed_in_file) { /* the file's rows are our columns */
            transpose(slab, file_columns, values + row, t->shape[0], file_columns, n);
            from = slab;
        }
        CHECK(safetensors_write(w, from, (size_t)(n * file_columns) * sizeof(float)));
    }
    return STATUS_OK;
}

static enum status create_file(
    struct safetensors_writer **out, const char *path, const struct tensor_list *list) {
    static const char *const key[] = {"format"}, *const value[] = {"pt"}; /* transformers asks for it */
    struct safetensors_entry *entries;
    CHECK(ALLOCATE(entries, list->count));
    for (size_t i = 0; i < list->count; i++) {
        struct model_tensor *t = &list->tensors[i];
        entries[i].name = t->name;
        entries[i].dtype = DTYPE_F32;
        entries[i].dimensions = t->dimensions;
        entries[i].shape[0] = t->shape[0];
        entries[i].shape[1] = t->shape[1];
    }
    enum status status = safetensors_create(out, path, entries, list->count, key, value, 1);
    free(entries);
    return status;
}

/* What the first rank holds while it writes. */
struct export {
    struct tensor_list list;
    struct safetensors_writer *writer;
    float *bucket, *slab;
};

static enum status begin_export(
    struct export *e, const char *path, const struct model_config *config, const struct layout *layout) {
    CHECK(list_tensors(&e->list, config, layout));
    CHECK(ALLOCATE(e->bucket, largest_bucket(layout)));
    CHECK(ALLOCATE(e->slab, slab_elements(&e->list)));
    return create_file(&e->writer, path, &e->list);
}

static enum status write_bucket(struct export *e, int bucket) {
    for (size_t i = 0; i < e->list.count; i++) {
        const struct model_tensor *t = &e->list.tensors[i];
        if (t->bucket == bucket) {
            CHECK(write_tensor(e->writer, t, e->bucket + t->offset_in_bucket, e->slab));
        }
    }
    return STATUS_OK;
}

enum status hugging_face_write_weights(
    const char *path, struct optimizer *optimizer, uint64_t *xxh64, uint64_t *bytes) {
    const struct layout *layout = model_get_layout(optimizer->model);
    bool first_rank = optimizer->comm->rank == 0;
    struct export e;
    memset(&e, 0, sizeof e);
    enum status status = STATUS_OK, exchange = STATUS_OK;
    if (first_rank) {
        status = begin_export(&e, path, model_get_config(optimizer->model), layout);
    }
    for (int b = 0; b < layout->buckets && exchange == STATUS_OK; b++) {
        bool writing = first_rank && status == STATUS_OK; /* after a failure: only keep up with the others */
        exchange = optimizer_export_bucket(optimizer, b, writing ? e.bucket : NULL);
        if (writing && exchange == STATUS_OK) {
            status = write_bucket(&e, b);
        }
    }
    if (e.writer != NULL) {
        enum status finish = safetensors_finish(e.writer, xxh64, bytes);
        status = status == STATUS_OK ? finish : status;
    }
    free(e.slab);
    free(e.bucket);
    free(e.list.tensors);
    return exchange != STATUS_OK ? exchange : status;
}

/* ---- reading ---- */

static void shape_text(char *out, size_t size, const int64_t *shape, int dimensions) {
    size_t used = (size_t)snprintf(out, size, "(");
    for (int i = 0; i < dimensions && used < size; i++) {
        used += (size_t)snprintf(out + used, size - used, "%s%lld", i > 0 ? ", " : "", (long long)shape[i]);
    }
    if (used < size) {
        snprintf(out + used, size - used, ")");
    }
}

/* The tensor, which may also be named as in a bare GPT2Model, without the prefix. */
static enum status find_tensor(
    const struct safetensors *file, const struct model_tensor *t, const struct safetensors_entry **out) {
    static const char prefix[] = "transformer.";
    const struct safetensors_entry *entry = safetensors_find(file, t->name);
    if (entry == NULL && strncmp(t->name, prefix, sizeof prefix - 1) == 0) {
        entry = safetensors_find(file, t->name + sizeof prefix - 1);
    }
    if (entry == NULL) {
        return fail("%s: tensor \"%s\" is missing: is it a GPT-2 of as many layers?", file->path, t->name);
    }
    bool same = entry->dimensions == t->dimensions;
    for (int i = 0; same && i < t->dimensions; i++) {
        same = entry->shape[i] == t->shape[i];
    }
    if (!same) {
        char there[256], wanted[64];
        shape_text(there, sizeof there, entry->shape, entry->dimensions);
        shape_text(wanted, sizeof wanted, t->shape, t->dimensions);
        return fail(
            "%s: tensor \"%s\" is %s, but this model's is %s: choose the model's shape as it was trained",
            file->path, t->name, there, wanted);
    }
    *out = entry;
    return STATUS_OK;
}

static enum status read_tensor(
    const struct safetensors *file, const struct model_tensor *t, float *values, float *slab) {
    const struct safetensors_entry *entry = NULL;
    CHECK(find_tensor(file, t, &entry));
    int64_t file_columns = t->shape[1];
    int64_t rows = slab_rows(t);
    for (int64_t row = 0; row < t->shape[0]; row += rows) {
        int64_t n = min_i64(rows, t->shape[0] - row);
        bool transposed = parameter_table[t->id].transposed_in_file;
        float *to = transposed ? slab : values + row * file_columns;
        CHECK(safetensors_read_values(file, entry, row * file_columns, n * file_columns, to, DTYPE_F32));
        if (transposed) {
            transpose(values + row, t->shape[0], slab, file_columns, n, file_columns);
        }
    }
    return STATUS_OK;
}

static enum status read_buckets(struct optimizer *optimizer, const struct safetensors *file,
    const struct tensor_list *list, float *bucket, float *slab) {
    const struct layout *layout = model_get_layout(optimizer->model);
    for (int b = 0; b < layout->buckets; b++) {
        /* what no file holds, the padding of the vocabulary, is 0 */
        memset(bucket, 0, (size_t)layout->bucket[b].count * sizeof *bucket);
        for (size_t i = 0; i < list->count; i++) {
            const struct model_tensor *t = &list->tensors[i];
            if (t->bucket == b) {
                CHECK(read_tensor(file, t, bucket + t->offset_in_bucket, slab));
            }
        }
        CHECK(optimizer_import_bucket(optimizer, b, bucket));
    }
    return STATUS_OK;
}

enum status hugging_face_read_weights(const char *path, struct optimizer *optimizer) {
    const struct layout *layout = model_get_layout(optimizer->model);
    enum status status = STATUS_OK;
    struct safetensors *file = NULL;
    struct tensor_list list = {NULL, 0};
    float *bucket = NULL, *slab = NULL;
    CHECK_CLEANUP(safetensors_open(&file, path));
    CHECK_CLEANUP(list_tensors(&list, model_get_config(optimizer->model), layout));
    CHECK_CLEANUP(ALLOCATE(bucket, largest_bucket(layout)));
    CHECK_CLEANUP(ALLOCATE(slab, slab_elements(&list)));
    CHECK_CLEANUP(read_buckets(optimizer, file, &list, bucket, slab));
cleanup:
    free(slab);
    free(bucket);
    free(list.tensors);
    safetensors_close(file);
    return status;
}

/* ---- config.json ---- */

static const char ACTIVATION[] = "gelu_new"; /* the tanh form */
static const double NORM_EPSILON = 1e-5;     /* backend.h */

static void integer_member(struct json_writer *w, const char *key, int64_t value) {
    json_key(w, key);
    json_integer(w, value);
}
static void number_member(struct json_writer *w, const char *key, double value) {
    json_key(w, key);
    json_number(w, value);
}
static void string_member(struct json_writer *w, const char *key, const char *value) {
    json_key(w, key);
    json_string(w, value);
}

enum status hugging_face_config_text(const struct model_config *c, char **text, size_t *bytes) {
    int end_of_text = c->vocab_size - 1; /* GPT-2's 50256; 256 of the bytes tokenizer */
    struct json_writer w;
    json_writer_init(&w, true);
    json_begin_object(&w);
    json_key(&w, "architectures");
    json_begin_array(&w);
    json_string(&w, "GPT2LMHeadModel");
    json_end_array(&w);
    string_member(&w, "model_type", "gpt2");
    integer_member(&w, "n_layer", c->layers);
    integer_member(&w, "n_embd", c->channels);
    integer_member(&w, "n_head", c->heads);
    if (c->kv_heads != c->heads) {
        integer_member(&w, "n_kv_head", c->kv_heads);
    }
    integer_member(&w, "n_positions", c->seq_len);
    integer_member(&w, "n_ctx", c->seq_len);
    integer_member(&w, "vocab_size", c->vocab_size);
    string_member(&w, "activation_function", ACTIVATION);
    number_member(&w, "layer_norm_epsilon", NORM_EPSILON);
    number_member(&w, "initializer_range", 0.02);
    number_member(&w, "embd_pdrop", 0);
    number_member(&w, "attn_pdrop", 0);
    number_member(&w, "resid_pdrop", 0);
    json_key(&w, "tie_word_embeddings");
    json_bool(&w, true);
    integer_member(&w, "bos_token_id", end_of_text);
    integer_member(&w, "eos_token_id", end_of_text);
    string_member(&w, "torch_dtype", "float32");
    json_end_object(&w);
    return json_writer_finish(&w, text, bytes);
}

static enum status read_size(const struct json *json, const char *key, const char *path, int *out) {
    int64_t value;
    CHECK(json_get_integer(json, key, 1, INT_MAX, &value, path));
    *out = (int)value;
    return STATUS_OK;
}

/* Where the key is there, it has this value. */
static enum status expect_string(
    const struct json *json, const char *key, const char *expected, const char *path) {
    const struct json *member = json_get(json, key);
    if (member == NULL || (member->type == JSON_STRING && strcmp(member->string, expected) == 0)) {
        return STATUS_OK;
    }
    return fail("%s: \"%s\" is not \"%s\": not a model that this program has", path, key, expected);
}

static enum status expect_bool(const struct json *json, const char *key, bool expected, const char *path) {
    const struct json *member = json_get(json, key);
    if (member == NULL || (member->type == JSON_BOOL && member->boolean == expected)) {
        return STATUS_OK;
    }
    return fail(
        "%s: \"%s\" is not %s: not a model that this program has", path, key, expected ? "true" : "false");
}

static enum status check_architecture(
    const struct json *json, const char *path, const struct model_config *c) {
    CHECK(expect_string(json, "model_type", "gpt2", path));
    CHECK(expect_string(json, "activation_function", ACTIVATION, path));
    CHECK(expect_bool(json, "tie_word_embeddings", true, path));
    CHECK(expect_bool(json, "scale_attn_weights", true, path));
    CHECK(expect_bool(json, "scale_attn_by_inverse_layer_idx", false, path));
    const struct json *epsilon = json_get(json, "layer_norm_epsilon"), *inner = json_get(json, "n_inner");
    if (epsilon != NULL && !(epsilon->type == JSON_NUMBER && epsilon->number == NORM_EPSILON)) {
        return fail(
            "%s: \"layer_norm_epsilon\" is not %g: not a model that this program has", path, NORM_EPSILON);
    }
    if (inner != NULL && inner->type != JSON_NULL &&
        !(inner->is_integer && inner->integer == 4 * (int64_t)c->channels)) {
        return fail("%s: \"n_inner\" is not 4 * n_embd: not a model that this program has", path);
    }
    return STATUS_OK;
}

static enum status read_members(const struct json *json, const char *path, struct model_config *c) {
    CHECK(read_size(json, "n_layer", path, &c->layers));
    CHECK(read_size(json, "n_embd", path, &c->channels));
    CHECK(read_size(json, "n_head", path, &c->heads));
    CHECK(read_size(json, "n_positions", path, &c->seq_len));
    CHECK(read_size(json, "vocab_size", path, &c->vocab_size));
    c->kv_heads = c->heads;
    if (json_get(json, "n_kv_head") != NULL) {
        CHECK(read_size(json, "n_kv_head", path, &c->kv_heads));
    }
    CHECK(check_architecture(json, path, c));
    if (model_config_check(c) != STATUS_OK) {
        return fail("%s: %s", path, error_message());
    }
    return STATUS_OK;
}

enum status hugging_face_read_config(const char *path, struct model_config *config) {
    enum status status = STATUS_OK;
    uint8_t *text = NULL;
    size_t bytes;
    struct json *json = NULL;
    CHECK(file_read_all(path, &text, &bytes));
    CHECK_CLEANUP(json_parse(&json, (const char *)text, bytes, path));
    CHECK_CLEANUP(read_members(json, path, config));
cleanup:
    json_free(json);
    free(text);
    return status;
}
