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
    NAME_BYTES = 128,
    MOST_FILES = 1000 /* of one model */
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

enum status hugging_face_write_weights(const char *path, const struct model_config *config,
    const struct layout *layout, bool writing, hugging_face_source source, void *context, uint64_t *xxh64,
    uint64_t *bytes) {
    struct export e;
    memset(&e, 0, sizeof e);
    enum status status = STATUS_OK, exchange = STATUS_OK;
    if (writing) {
        status = begin_export(&e, path, config, layout);
    }
    for (int b = 0; b < layout->buckets && exchange == STATUS_OK; b++) {
        bool wanted = writing && status == STATUS_OK; /* after a failure: only keep up with the others */
        exchange = source(context, b, wanted ? e.bucket : NULL);
        if (wanted && exchange == STATUS_OK) {
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

/* The files of a model: one without an index, or those that the index names. */
struct weights {
    struct json *index;     /* NULL: none */
    const struct json *map; /* in the index: names of tensors and files */
    char where[PATH_MAX];   /* the index, or the one file */
    struct safetensors **files;
    const char **names; /* of the files, as the index has them */
    size_t count;
};

static void close_weights(struct weights *w) {
    for (size_t i = 0; i < w->count; i++) {
        safetensors_close(w->files[i]);
    }
    free(w->files);
    free(w->names);
    json_free(w->index);
}

/* NULL: not open yet. */
static const struct safetensors *open_file_of(const struct weights *w, const char *name) {
    for (size_t i = 0; i < w->count; i++) {
        if (strcmp(w->names[i], name) == 0) {
            return w->files[i];
        }
    }
    return NULL;
}

static enum status open_indexed_files(struct weights *w, const char *folder) {
    w->map = json_get(w->index, "weight_map");
    if (w->map == NULL || w->map->type != JSON_OBJECT) {
        return fail("%s: no object \"weight_map\" in it: is it the index of a model's weights?", w->where);
    }
    for (size_t i = 0; i < w->map->count; i++) {
        const struct json *name = &w->map->items[i];
        if (name->type != JSON_STRING || name->string[0] == '\0' || strchr(name->string, '/') != NULL ||
            strlen(name->string) != name->string_bytes) {
            return fail("%s: the file of tensor \"%.100s\" is not the name of a file in this folder",
                w->where, w->map->keys[i]);
        }
        if (open_file_of(w, name->string) != NULL) {
            continue;
        }
        char path[PATH_MAX];
        if (w->count == MOST_FILES) {
            return fail("%s: names more than %d files", w->where, (int)MOST_FILES);
        }
        CHECK(path_join(path, sizeof path, folder, name->string));
        CHECK(safetensors_open(&w->files[w->count], path));
        w->names[w->count++] = name->string;
    }
    return STATUS_OK;
}

static enum status open_index(struct weights *w, const char *folder) {
    CHECK(path_join(w->where, sizeof w->where, folder, "model.safetensors.index.json"));
    if (!path_exists(w->where)) {
        return fail("%s: no model.safetensors in it, and no model.safetensors.index.json", folder);
    }
    CHECK(json_read_file(&w->index, w->where));
    return open_indexed_files(w, folder);
}

static enum status open_weights(struct weights *w, const char *folder) {
    CHECK(ALLOCATE(w->files, MOST_FILES));
    CHECK(ALLOCATE(w->names, MOST_FILES));
    CHECK(path_join(w->where, sizeof w->where, folder, "model.safetensors"));
    if (!path_exists(w->where)) {
        return open_index(w, folder);
    }
    CHECK(safetensors_open(&w->files[0], w->where));
    w->names[0] = "";
    w->count = 1;
    return STATUS_OK;
}

/* *entry stays NULL if there is no tensor of that name. */
static enum status look_up(const struct weights *w, const char *name, const struct safetensors **file,
    const struct safetensors_entry **entry) {
    *file = w->files[0];
    if (w->map != NULL) {
        const struct json *file_name = json_get(w->map, name);
        if (file_name == NULL) {
            return STATUS_OK;
        }
        *file = open_file_of(w, file_name->string);
        if (safetensors_find(*file, name) == NULL) {
            return fail("%s: tensor \"%s\" is not in it, where %s says it is", (*file)->path, name, w->where);
        }
    }
    *entry = safetensors_find(*file, name);
    return STATUS_OK;
}

/* The tensor, which may also be named as in a bare GPT2Model, without the prefix. */
static enum status find_tensor(const struct weights *w, const struct model_tensor *t,
    const struct safetensors **file, const struct safetensors_entry **out) {
    static const char prefix[] = "transformer.";
    const struct safetensors_entry *entry = NULL;
    CHECK(look_up(w, t->name, file, &entry));
    if (entry == NULL && strncmp(t->name, prefix, sizeof prefix - 1) == 0) {
        CHECK(look_up(w, t->name + sizeof prefix - 1, file, &entry));
    }
    if (entry == NULL) {
        return fail("%s: tensor \"%s\" is missing: is it a GPT-2 of as many layers?", w->where, t->name);
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
            (*file)->path, t->name, there, wanted);
    }
    *out = entry;
    return STATUS_OK;
}

static enum status read_tensor(
    const struct weights *w, const struct model_tensor *t, float *values, float *slab) {
    const struct safetensors *file = NULL;
    const struct safetensors_entry *entry = NULL;
    CHECK(find_tensor(w, t, &file, &entry));
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

/* A head of its own that is stored is one that this model does not have, unless it is the token embedding again. */
static enum status check_head(
    const struct weights *w, const struct model_tensor *embedding, const float *values, float *slab) {
    struct model_tensor head = *embedding;
    const struct safetensors *file = NULL;
    const struct safetensors_entry *entry = NULL;
    snprintf(head.name, sizeof head.name, "lm_head.weight");
    CHECK(look_up(w, head.name, &file, &entry));
    if (entry == NULL) {
        return STATUS_OK;
    }
    CHECK(find_tensor(w, &head, &file, &entry));
    int64_t rows = slab_rows(&head), columns = head.shape[1];
    for (int64_t row = 0; row < head.shape[0]; row += rows) {
        int64_t n = min_i64(rows, head.shape[0] - row);
        CHECK(safetensors_read_values(file, entry, row * columns, n * columns, slab, DTYPE_F32));
        if (memcmp(slab, values + row * columns, (size_t)(n * columns) * sizeof *slab) != 0) {
            return fail("%s: tensor \"%s\" is not the token embedding: a model with a head of its own is not "
                        "one that this program has",
                file->path, head.name);
        }
    }
    return STATUS_OK;
}

static enum status read_bucket(
    const struct weights *w, const struct tensor_list *list, int bucket, float *values, float *slab) {
    for (size_t i = 0; i < list->count; i++) {
        const struct model_tensor *t = &list->tensors[i];
        if (t->bucket != bucket) {
            continue;
        }
        CHECK(read_tensor(w, t, values + t->offset_in_bucket, slab));
        if (t->id == TOKEN_EMBEDDING) {
            CHECK(check_head(w, t, values + t->offset_in_bucket, slab));
        }
    }
    return STATUS_OK;
}

enum status hugging_face_read_weights(const char *folder, const struct model_config *config,
    const struct layout *layout, hugging_face_sink sink, void *context) {
    enum status status = STATUS_OK;
    struct weights weights = {.count = 0};
    struct tensor_list list = {NULL, 0};
    float *values = NULL, *slab = NULL;
    CHECK_CLEANUP(open_weights(&weights, folder));
    CHECK_CLEANUP(list_tensors(&list, config, layout));
    CHECK_CLEANUP(ALLOCATE(values, largest_bucket(layout)));
    CHECK_CLEANUP(ALLOCATE(slab, slab_elements(&list)));
    for (int b = 0; b < layout->buckets; b++) {
        /* what no file holds, the padding of the vocabulary, is 0 */
        memset(values, 0, (size_t)layout->bucket[b].count * sizeof *values);
        CHECK_CLEANUP(read_bucket(&weights, &list, b, values, slab));
        CHECK_CLEANUP(sink(context, b, values));
    }
cleanup:
    free(slab);
    free(values);
    free(list.tensors);
    close_weights(&weights);
    return status;
}

/* ---- config.json ---- */

static const char ACTIVATION[] = "gelu_new"; /* the tanh form, which has a second name */
static const char ACTIVATION_TOO[] = "gelu_pytorch_tanh";
static const double NORM_EPSILON = 1e-5; /* backend.h */

enum status hugging_face_config_text(
    const struct model_config *c, const struct tokenizer *tokenizer, char **text, size_t *bytes) {
    int end_of_text = tokenizer != NULL ? tokenizer_end_of_text(tokenizer) : c->vocab_size - 1;
    struct json_writer w;
    json_writer_init(&w, true);
    json_begin_object(&w);
    json_key(&w, "architectures");
    json_begin_array(&w);
    json_string(&w, "GPT2LMHeadModel");
    json_end_array(&w);
    json_string_member(&w, "model_type", "gpt2");
    json_integer_member(&w, "n_layer", c->layers);
    json_integer_member(&w, "n_embd", c->channels);
    json_integer_member(&w, "n_head", c->heads);
    if (c->kv_heads != c->heads) {
        json_integer_member(&w, "n_kv_head", c->kv_heads);
    }
    json_integer_member(&w, "n_positions", c->seq_len);
    json_integer_member(&w, "n_ctx", c->seq_len);
    json_integer_member(&w, "vocab_size", c->vocab_size);
    json_string_member(&w, "activation_function", ACTIVATION);
    json_number_member(&w, "layer_norm_epsilon", NORM_EPSILON);
    json_number_member(&w, "initializer_range", 0.02);
    json_number_member(&w, "embd_pdrop", 0);
    json_number_member(&w, "attn_pdrop", 0);
    json_number_member(&w, "resid_pdrop", 0);
    json_bool_member(&w, "tie_word_embeddings", true);
    json_integer_member(&w, "bos_token_id", end_of_text);
    json_integer_member(&w, "eos_token_id", end_of_text);
    json_string_member(&w, "torch_dtype", "float32");
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
    const struct json *activation = json_get(json, "activation_function");
    if (activation == NULL || activation->type != JSON_STRING ||
        strcmp(activation->string, ACTIVATION_TOO) != 0) {
        CHECK(expect_string(json, "activation_function", ACTIVATION, path));
    }
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
    struct json *json;
    CHECK(json_read_file(&json, path));
    enum status status = read_members(json, path, config);
    json_free(json);
    return status;
}
