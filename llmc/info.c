/* Files are told by their first bytes, JSON files by their members, folders by what lies in them. A folder may be
   several things at once, and every one is told. */
#include "info.h"

#include "checkpoint.h"
#include "metrics.h"
#include "model.h"
#include "safetensors.h"
#include "shard.h"
#include "tokenizer.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

enum { SCAN_TOKENS = 1 << 16, SHOWN_TENSORS = 6 };

static void line(FILE *out, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void line(FILE *out, const char *name, const char *format, ...) {
    char text[2 * PATH_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    make_one_line(text); /* names of tensors are whatever the file's maker liked */
    fprintf(out, "%-12s %s\n", name, text);
}

/* ---- shards ---- */

static enum status scan_shard(FILE *out, const struct shard *shard) {
    uint16_t *tokens, most = 0;
    CHECK(ALLOCATE(tokens, SCAN_TOKENS));
    enum status status = STATUS_OK;
    for (int64_t at = 0; at < shard->tokens && status == STATUS_OK; at += SCAN_TOKENS) {
        int64_t count = min_i64(SCAN_TOKENS, shard->tokens - at);
        status = shard_read(shard, at, tokens, count);
        for (int64_t i = 0; i < count && status == STATUS_OK; i++) {
            most = tokens[i] > most ? tokens[i] : most;
        }
    }
    free(tokens);
    CHECK(status);
    line(out, "token shard", "%" PRId64 " tokens, ids up to %d", shard->tokens, (int)most);
    return STATUS_OK;
}

static enum status print_shard(FILE *out, const char *path) {
    struct shard shard;
    CHECK(shard_open(&shard, path));
    enum status status = scan_shard(out, &shard);
    shard_close(&shard);
    return status;
}

/* ---- tensors ---- */

static void print_tensor(FILE *out, const struct safetensors_entry *e) {
    char shape[200] = "";
    for (int i = 0; i < e->dimensions; i++) {
        size_t used = strlen(shape);
        snprintf(shape + used, sizeof shape - used, "%s%" PRId64, i > 0 ? " x " : "", e->shape[i]);
    }
    line(out, "", "%s  %s  %.100s", dtype_name(e->dtype), shape, e->name);
}

static enum status print_safetensors(FILE *out, const char *path) {
    struct safetensors *file;
    char size[32];
    int64_t elements = 0, of_dtype[DTYPE_COUNT] = {0};
    CHECK(safetensors_open(&file, path));
    for (size_t i = 0; i < file->count; i++) {
        int64_t count = (int64_t)(file->entries[i].end - file->entries[i].begin) /
                        (int64_t)dtype_bytes(file->entries[i].dtype);
        elements += count;
        of_dtype[file->entries[i].dtype] += count;
    }
    format_bytes(size, sizeof size, file->file_bytes);
    line(out, "safetensors", "%zu tensors, %" PRId64 " numbers, %s", file->count, elements, size);
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        if (of_dtype[dtype] > 0) {
            line(out, "", "%" PRId64 " of %s", of_dtype[dtype], dtype_name((enum dtype)dtype));
        }
    }
    for (size_t i = 0; i < file->count && i < SHOWN_TENSORS; i++) {
        print_tensor(out, &file->entries[i]);
    }
    if (file->count > SHOWN_TENSORS) {
        line(out, "", "... and %zu more", file->count - SHOWN_TENSORS);
    }
    safetensors_close(file);
    return STATUS_OK;
}

/* ---- models and checkpoints ---- */

static enum status print_config(FILE *out, const char *folder) {
    struct model_config c;
    struct layout layout;
    char parameters[32];
    CHECK(checkpoint_read_config(folder, &c));
    CHECK(layout_init(&layout, &c, 1));
    format_count(parameters, sizeof parameters, (double)layout.parameters);
    layout_free(&layout);
    line(out, "model", "GPT-2: %s parameters, %d layers, %d channels, %d heads of %d", parameters, c.layers,
        c.channels, c.heads, model_head_dim(&c));
    line(out, "", "%d positions, vocabulary %d", c.seq_len, c.vocab_size);
    if (c.kv_heads != c.heads) {
        line(out, "", "%d heads of keys and values: grouped-query attention", c.kv_heads);
    }
    return STATUS_OK;
}

static enum status print_state(FILE *out, const char *folder) {
    struct run_state state;
    struct json *json;
    char tokens[32];
    CHECK(checkpoint_read_state(folder, &state, &json));
    json_free(json);
    format_count(tokens, sizeof tokens, (double)state.tokens_seen);
    line(out, "checkpoint", "step %" PRId64 ", %s tokens seen", state.step, tokens);
    if (state.last_val_loss == state.last_val_loss) { /* not a NaN */
        line(out, "", "validation loss %.4f, best %.4f", state.last_val_loss, state.best_val_loss);
    }
    return STATUS_OK;
}

static void print_notice(void *context, const char *text) {
    line((FILE *)context, "", "%s", text);
}

static enum status print_run(FILE *out, const char *folder) {
    char newest[PATH_MAX];
    CHECK(checkpoint_find_newest(folder, newest, sizeof newest, print_notice, out));
    line(out, "run", "%s", newest[0] != '\0' ? newest : "no checkpoint yet");
    return newest[0] != '\0' ? info_print(out, newest) : STATUS_OK;
}

/* ---- tokenizers, JSON ---- */

static enum status print_tokenizer(FILE *out, const char *path) {
    struct tokenizer *t;
    CHECK(tokenizer_open(&t, path));
    line(out, "tokenizer", "%d tokens, end of text is %" PRId32, tokenizer_vocab_size(t),
        tokenizer_end_of_text(t));
    tokenizer_close(t);
    return STATUS_OK;
}

/* A file that is nothing else. */
static enum status try_tokenizer(FILE *out, const char *path) {
    if (print_tokenizer(out, path) == STATUS_OK) {
        return STATUS_OK;
    }
    return fail("%s: not a file that this program knows (as a tokenizer: %s)", path, error_message());
}

/* One side of a manifest. */
static void print_side(FILE *out, const struct json *manifest, const char *name) {
    const struct json *side = json_get(manifest, name), *shards = json_get(side, "shards");
    size_t count = shards != NULL ? shards->count : 0;
    int64_t tokens, documents;
    if (json_get_integer(side, "tokens", 0, INT64_MAX, &tokens, name) == STATUS_OK &&
        json_get_integer(side, "documents", 0, INT64_MAX, &documents, name) == STATUS_OK) {
        line(out, "", "%s: %" PRId64 " tokens of %" PRId64 " document%s in %zu shard%s", name, tokens,
            documents, documents == 1 ? "" : "s", count, count == 1 ? "" : "s");
    }
}

static enum status print_manifest(FILE *out, const struct json *manifest, const char *path) {
    const char *tokenizer;
    int64_t vocab_size;
    CHECK(json_get_string(manifest, "tokenizer", &tokenizer, path));
    CHECK(json_get_integer(manifest, "vocab_size", 1, INT32_MAX, &vocab_size, path));
    line(out, "manifest", "shards of build/prepare, tokenizer %s of %" PRId64 " tokens", tokenizer,
        vocab_size);
    print_side(out, manifest, "train");
    print_side(out, manifest, "val");
    return STATUS_OK;
}

/* A vocab.json has a token for each byte. */
static bool is_vocabulary(const struct json *json) {
    const struct json *token = json_get(json, "!");
    return token != NULL && token->type == JSON_NUMBER;
}

static enum status print_json(FILE *out, const char *path) {
    struct json *json;
    CHECK(json_read_file(&json, path));
    const struct json *map = json_get(json, "weight_map");
    bool tokenizer = is_vocabulary(json);
    enum status status = STATUS_OK;
    if (tokenizer) {
        /* any word may be one of its tokens, "n_layer" or "train" as well */
    } else if (json_get(json, "n_layer") != NULL || json_get(json, "data_position") != NULL) {
        line(out, "JSON", "%s of a model: give its folder",
            json_get(json, "n_layer") != NULL ? "config.json" : "state.json");
    } else if (map != NULL && map->type == JSON_OBJECT) {
        line(out, "index", "of a model's weights in several files: %zu tensors; give its folder", map->count);
    } else if (json_get(json, "tokenizer") != NULL && json_get(json, "train") != NULL) {
        status = print_manifest(out, json, path);
    } else {
        tokenizer = true;
    }
    json_free(json);
    return tokenizer ? try_tokenizer(out, path) : status;
}

/* ---- what it is ---- */

static enum status print_folder(FILE *out, const char *folder) {
    static const struct {
        const char *file;
        enum status (*print)(FILE *out, const char *folder);
    } kinds[] = {{"checkpoints", print_run}, {"config.json", print_config}, {"state.json", print_state}};
    static const char *const files[] = {"model.safetensors", "model.safetensors.index.json", "manifest.json"};
    bool known = false;
    char path[PATH_MAX];
    for (int i = 0; i < 3; i++) {
        CHECK(path_join(path, sizeof path, folder, kinds[i].file));
        if (path_exists(path)) {
            CHECK(kinds[i].print(out, folder));
            known = true;
        }
    }
    for (int i = 0; i < 3; i++) {
        CHECK(path_join(path, sizeof path, folder, files[i]));
        if (path_exists(path)) {
            CHECK(info_print(out, path));
            known = true;
        }
    }
    if (tokenizer_is_in(folder)) {
        CHECK(print_tokenizer(out, folder));
        known = true;
    }
    return known
               ? STATUS_OK
               : fail(
                     "%s: nothing in this folder that this program knows; give a run, a checkpoint, a model, "
                     "a tokenizer, or a file",
                     folder);
}

/* Zeros after the end of a short file. */
static enum status first_bytes(const char *path, uint8_t start[16]) {
    int file;
    uint64_t bytes;
    memset(start, 0, 16);
    CHECK(file_open(path, &file, &bytes));
    ssize_t got = read(file, start, 16);
    int error = errno;
    close(file);
    return got >= 0 ? STATUS_OK : fail("%s: cannot read: %s", path, strerror(error));
}

enum status info_print(FILE *out, const char *path) {
    uint8_t start[16];
    int32_t magic;
    if (!path_exists(path)) {
        return fail("--info %s: there is no such file or folder; give a run, a checkpoint, a shard, a model "
                    "or a tokenizer",
            path);
    }
    if (path_is_directory(path)) {
        return print_folder(out, path);
    }
    CHECK(first_bytes(path, start));
    memcpy(&magic, start, sizeof magic);
    if (magic == SHARD_MAGIC) {
        return print_shard(out, path);
    }
    if (start[8] == '{' && start[7] == 0) { /* after a length of 8 bytes */
        return print_safetensors(out, path);
    }
    if (start[0] == '{' || start[0] == ' ' || start[0] == '\n' || start[0] == '[') {
        return print_json(out, path);
    }
    return try_tokenizer(out, path);
}
