/* Tokenizers by name. "bytes" is a BPE without merges, for which looking for words would be idle. */
#include "tokenizer.h"

#include "checksum.h"
#include "pretokenizer.h"
#include "tokenizer_files.h"

#include <limits.h>
#include <stdlib.h>

/* ---- opening ---- */

static enum status open_bytes(struct tokenizer **out) {
    char values[BYTE_VALUES];
    struct bpe_text tokens[BYTE_VALUES + 1] = {{0}};
    for (int i = 0; i < BYTE_VALUES; i++) {
        values[i] = (char)i;
        tokens[i] = (struct bpe_text){&values[i], 1};
    }
    return bpe_create(out, tokens, BYTE_VALUES + 1, BYTE_VALUES, 0, "bytes");
}

static enum status read_file(const char *path, char **text, size_t *bytes) {
    uint8_t *data;
    enum status status = file_read_text(path, &data, bytes);
    *text = (char *)data;
    return status;
}

static enum status path_in(char out[PATH_MAX], const char *folder, const char *name, bool *exists) {
    CHECK(path_join(out, PATH_MAX, folder, name));
    *exists = path_exists(out);
    return STATUS_OK;
}

/* The merges that lie beside a vocab.json. */
static enum status find_merges(char out[PATH_MAX], const char *vocab_path) {
    char folder[PATH_MAX];
    const char *slash = strrchr(vocab_path, '/');
    int folder_length = slash == NULL ? 0 : slash == vocab_path ? 1 : (int)(slash - vocab_path);
    bool exists;
    snprintf(folder, sizeof folder, "%.*s", folder_length, vocab_path);
    CHECK(path_in(out, slash == NULL ? "." : folder, "merges.txt", &exists));
    if (!exists) {
        CHECK(path_in(out, slash == NULL ? "." : folder, "vocab.bpe", &exists));
    }
    return exists ? STATUS_OK : fail("%s: there is no merges.txt beside it", vocab_path);
}

static enum status open_vocab(struct tokenizer **out, struct json *vocab, const char *path) {
    char merges_path[PATH_MAX], *merges;
    size_t merges_bytes;
    CHECK(find_merges(merges_path, path));
    CHECK(read_file(merges_path, &merges, &merges_bytes));
    enum status status = tokenizer_from_vocab(out, vocab, path, merges, merges_bytes, merges_path);
    free(merges);
    return status;
}

static enum status open_json(struct tokenizer **out, const char *text, size_t bytes, const char *path) {
    struct json *root;
    CHECK(json_parse(&root, text, bytes, path));
    const struct json *model =
        json_get(root, "model"); /* in a vocab.json it may be a token, which has a number */
    bool is_whole = model != NULL && model->type == JSON_OBJECT;
    enum status status = is_whole ? tokenizer_from_json(out, root, path) : open_vocab(out, root, path);
    json_free(root);
    return status;
}

static enum status open_text(struct tokenizer **out, char *text, size_t bytes, const char *path) {
    static const char version[] = "#version";
    if (text[strspn(text, " \t\r\n")] == '{') {
        return open_json(out, text, bytes, path);
    }
    if (strncmp(text, version, strlen(version)) == 0) {
        return fail("%s: these are merges; give the vocab.json that belongs to them", path);
    }
    return tokenizer_from_ranks(out, text, bytes, path);
}

static enum status open_file(struct tokenizer **out, const char *path) {
    char *text; /* a zero follows it */
    size_t bytes;
    CHECK(read_file(path, &text, &bytes));
    enum status status = open_text(out, text, bytes, path);
    free(text);
    return status;
}

/* The file that says what the tokens are; "" if there is none. */
static enum status find_file(char out[PATH_MAX], const char *folder) {
    const char *const names[] = {"vocab.json", "tokenizer.json", "encoder.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        bool exists;
        CHECK(path_in(out, folder, names[i], &exists));
        if (exists) {
            return STATUS_OK;
        }
    }
    out[0] = '\0';
    return STATUS_OK;
}

bool tokenizer_is_in(const char *folder) {
    char path[PATH_MAX];
    return find_file(path, folder) == STATUS_OK && path[0] != '\0';
}

static enum status open_folder(struct tokenizer **out, const char *folder) {
    char path[PATH_MAX];
    CHECK(find_file(path, folder));
    return path[0] != '\0'
               ? open_file(out, path)
               : fail("%s: this folder has no vocab.json with merges.txt, and no tokenizer.json", folder);
}

enum status tokenizer_open(struct tokenizer **out, const char *name) {
    *out = NULL;
    if (strcmp(name, "bytes") == 0) {
        enum status status = open_bytes(out);
        if (status != STATUS_OK) {
            tokenizer_close(*out);
            *out = NULL;
        }
        return status;
    }
    if (!path_exists(name)) {
        return fail("--tokenizer: '%s' is not known; use bytes, or the path of vocab.json and merges.txt, of "
                    "tokenizer.json or of a tiktoken rank file",
            name);
    }
    return path_is_directory(name) ? open_folder(out, name) : open_file(out, name);
}

void tokenizer_close(struct tokenizer *tokenizer) {
    bpe_free(tokenizer);
}

/* ---- use ---- */

bool tokenizer_has_files(const struct tokenizer *tokenizer) {
    return tokenizer->merge_count > 0;
}

int tokenizer_vocab_size(const struct tokenizer *tokenizer) {
    return tokenizer->vocab_size;
}

int32_t tokenizer_end_of_text(const struct tokenizer *tokenizer) {
    return tokenizer->end_of_text;
}

enum status tokenizer_encode(
    const struct tokenizer *tokenizer, const char *text, size_t bytes, int32_t **tokens, size_t *count) {
    const uint8_t *data = (const uint8_t *)text;
    int32_t *encoded;
    CHECK(ALLOCATE(encoded, bytes)); /* at most one for each byte */
    enum status status = STATUS_OK;
    if (tokenizer->merge_count > 0) {
        status = bpe_encode(tokenizer, data, bytes, encoded, count);
    } else {
        for (size_t i = 0; i < bytes; i++) {
            encoded[i] = tokenizer->byte_tokens[data[i]];
        }
        *count = bytes;
    }
    if (status != STATUS_OK) {
        free(encoded);
        return status;
    }
    *tokens = encoded;
    return STATUS_OK;
}

size_t tokenizer_cut(const struct tokenizer *tokenizer, const char *text, size_t bytes) {
    return tokenizer->merge_count > 0 ? pretokenizer_cut((const uint8_t *)text, bytes) : bytes;
}

const char *tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t token, size_t *bytes) {
    *bytes = 0;
    if (token < 0 || token >= tokenizer->vocab_size) {
        return NULL;
    }
    *bytes = tokenizer->offsets[token + 1] - tokenizer->offsets[token];
    return tokenizer->bytes + tokenizer->offsets[token];
}

uint64_t tokenizer_fingerprint(const struct tokenizer *t) {
    struct xxh64 checksum;
    xxh64_init(&checksum);
    for (int32_t token = 0; token < tokenizer_vocab_size(t); token++) {
        size_t bytes;
        const char *text = tokenizer_token_bytes(t, token, &bytes);
        xxh64_update(&checksum, &bytes, sizeof bytes);
        xxh64_update(&checksum, text, bytes);
    }
    return xxh64_digest(&checksum);
}
