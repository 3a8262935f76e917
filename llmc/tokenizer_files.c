/* Readers and writers of vocabulary files. A reader lists the tokens by id (the texts stay where the file was read to),
   and then adds the merges; a rank file has none, and they are found again from the order of its tokens. */
#include "tokenizer_files.h"

#include "tokenizer.h"

#include <limits.h>
#include <stdlib.h>

static const char end_of_text_name[] = "<|endoftext|>";

/* ---- GPT-2's byte alphabet ---- */

/* Every byte as a printable character: itself where it is one in Latin-1, else U+0100 and so on in order. */
struct alphabet {
    uint16_t code_of[BYTE_VALUES];
    int16_t byte_of[2 * BYTE_VALUES]; /* -1: no byte's */
};

static void alphabet_init(struct alphabet *alphabet) {
    uint16_t next = BYTE_VALUES;
    memset(alphabet->byte_of, -1, sizeof alphabet->byte_of);
    for (int byte = 0; byte < BYTE_VALUES; byte++) {
        uint16_t code = bpe_byte_is_printable(byte) ? (uint16_t)byte : next++;
        alphabet->code_of[byte] = code;
        alphabet->byte_of[code] = (int16_t)byte;
    }
}

/* Characters in UTF-8 -> the bytes that they stand for, in place; false if one stands for none. */
static bool alphabet_decode(const struct alphabet *alphabet, char *text, size_t *bytes) {
    size_t used = 0;
    for (size_t at = 0; at < *bytes;) {
        uint32_t code = (uint8_t)text[at++];
        if (code >= 0x80) { /* the alphabet's other characters have two bytes, the first 0xc2 to 0xc5 */
            uint32_t low = at < *bytes ? (uint8_t)text[at++] : 0;
            if (code < 0xc2 || code > 0xc5 || (low & 0xc0) != 0x80) {
                return false;
            }
            code = (code & 0x1f) << 6 | (low & 0x3f);
        }
        if (alphabet->byte_of[code] < 0) {
            return false;
        }
        text[used++] = (char)alphabet->byte_of[code];
    }
    *bytes = used;
    return true;
}

/* Room for 2 * bytes + 1; zero-terminated. */
static size_t alphabet_encode(const struct alphabet *alphabet, const char *bytes, size_t count, char *text) {
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t code = alphabet->code_of[(uint8_t)bytes[i]];
        if (code >= 0x80) {
            text[used++] = (char)(0xc0 | code >> 6);
            text[used++] = (char)(0x80 | (code & 0x3f));
        } else {
            text[used++] = (char)code;
        }
    }
    text[used] = '\0';
    return used;
}

/* ---- tokens by id ---- */

struct vocabulary {
    const char *name;
    struct alphabet alphabet;
    struct bpe_text *tokens;
    int32_t capacity, count;
    int32_t end_of_text; /* -1: not seen */
};

static enum status vocabulary_init(struct vocabulary *v, size_t capacity, const char *name) {
    memset(v, 0, sizeof *v);
    if (capacity > BPE_MAX_TOKENS) {
        return fail("%s: %zu tokens are more than the %d that are supported", name, capacity, BPE_MAX_TOKENS);
    }
    alphabet_init(&v->alphabet);
    v->name = name;
    v->capacity = (int32_t)capacity;
    v->end_of_text = -1;
    return ALLOCATE(v->tokens, capacity + 1);
}

static enum status vocabulary_put(struct vocabulary *v, int64_t id, const char *text, size_t bytes) {
    if (id < 0 || id >= v->capacity) {
        return fail("%s: token id %lld is not in 0 to %d, though the ids have no gaps", v->name,
            (long long)id, v->capacity - 1);
    }
    if (v->tokens[id].text != NULL) {
        return fail("%s: token id %lld is there twice", v->name, (long long)id);
    }
    v->tokens[id] = (struct bpe_text){text, (uint32_t)(bytes > UINT32_MAX ? UINT32_MAX : bytes)};
    v->count++;
    return STATUS_OK;
}

/* An entry of "vocab". Some of them may be known already as added tokens, whose text is no bytes' alphabet. */
static enum status vocabulary_put_symbols(struct vocabulary *v, char *symbols, const struct json *value) {
    if (value->type != JSON_NUMBER || !value->is_integer) {
        return fail("%s: the id of token \"%.40s\" is no whole number", v->name, symbols);
    }
    int64_t id = value->integer;
    size_t bytes = strlen(symbols);
    if (id >= 0 && id < v->capacity && v->tokens[id].text != NULL && v->tokens[id].bytes == bytes &&
        memcmp(v->tokens[id].text, symbols, bytes) == 0) {
        return STATUS_OK;
    }
    if (strcmp(symbols, end_of_text_name) == 0) {
        v->end_of_text = (int32_t)(id >= 0 && id < v->capacity ? id : -1);
    } else if (!alphabet_decode(&v->alphabet, symbols, &bytes)) {
        return fail(
            "%s: token %lld has characters that stand for no byte; only byte-level vocabularies are read",
            v->name, (long long)id);
    }
    return vocabulary_put(v, id, symbols, bytes);
}

/* Checks that there are no gaps, adds the end of text where it is missing, and makes the tokenizer. */
static enum status vocabulary_finish(struct vocabulary *v, struct tokenizer **out, size_t merge_capacity) {
    for (int32_t id = 0; id < v->count; id++) {
        if (v->tokens[id].text == NULL) {
            return fail("%s: no token has the id %d, though there are higher ones", v->name, id);
        }
    }
    if (v->end_of_text < 0) {
        v->end_of_text = v->count++;
    }
    if (merge_capacity > BPE_MAX_TOKENS) {
        return fail("%s: %zu merges are more than the %d that are supported", v->name, merge_capacity,
            BPE_MAX_TOKENS);
    }
    return bpe_create(out, v->tokens, v->count, v->end_of_text, (int32_t)merge_capacity, v->name);
}

static enum status add_symbol_merge(const struct vocabulary *v, struct tokenizer *t, char *left,
    size_t left_bytes, char *right, size_t right_bytes, const char *name) {
    int number = t->merge_count + 1;
    if (!alphabet_decode(&v->alphabet, left, &left_bytes) ||
        !alphabet_decode(&v->alphabet, right, &right_bytes)) {
        return fail("%s: merge %d has characters that stand for no byte", name, number);
    }
    int32_t left_token = bpe_find(t, (uint8_t *)left, left_bytes);
    int32_t right_token = bpe_find(t, (uint8_t *)right, right_bytes);
    if (left_token < 0 || right_token < 0) {
        return fail("%s: merge %d joins a token that the vocabulary does not have", name, number);
    }
    return bpe_add_merge(t, left_token, right_token, name);
}

/* "left right" */
static enum status add_merge_line(
    const struct vocabulary *v, struct tokenizer *t, char *line, size_t bytes, const char *name) {
    char *space = memchr(line, ' ', bytes);
    if (space == NULL || memchr(space + 1, ' ', bytes - (size_t)(space + 1 - line)) != NULL) {
        return fail("%s: merge %d is not two tokens with a space between", name, t->merge_count + 1);
    }
    size_t left_bytes = (size_t)(space - line);
    return add_symbol_merge(v, t, line, left_bytes, space + 1, bytes - left_bytes - 1, name);
}

/* What every reader ends with. */
static enum status finish(struct tokenizer **out, struct vocabulary *v, enum status status) {
    free(v->tokens);
    if (status == STATUS_OK) {
        status = bpe_finish(*out);
    }
    if (status != STATUS_OK) {
        bpe_free(*out);
        *out = NULL;
    }
    return status;
}

/* ---- lines ---- */

static size_t count_lines(const char *text, size_t bytes) {
    size_t lines = 1;
    for (size_t i = 0; i < bytes; i++) {
        lines += text[i] == '\n';
    }
    return lines;
}

/* The line at *at without its end, which may have a carriage return; false after the last. */
static bool next_line(char *text, size_t bytes, size_t *at, char **line, size_t *length) {
    if (*at >= bytes) {
        return false;
    }
    *line = text + *at;
    char *end = memchr(*line, '\n', bytes - *at);
    *length = end != NULL ? (size_t)(end - *line) : bytes - *at;
    *at += *length + 1;
    *length -= *length > 0 && (*line)[*length - 1] == '\r';
    return true;
}

/* ---- vocab.json + merges.txt ---- */

static enum status read_vocab_object(struct vocabulary *v, struct json *vocab) {
    for (size_t i = 0; i < vocab->count; i++) {
        CHECK(vocabulary_put_symbols(v, vocab->keys[i], &vocab->items[i]));
    }
    return STATUS_OK;
}

static enum status read_merges_text(
    const struct vocabulary *v, struct tokenizer *t, char *text, size_t bytes, const char *name) {
    static const char version[] = "#version";
    char *line;
    size_t at = 0, length;
    for (bool first = true; next_line(text, bytes, &at, &line, &length); first = false) {
        bool is_version = first && length >= strlen(version) && memcmp(line, version, strlen(version)) == 0;
        if (length > 0 && !is_version) {
            CHECK(add_merge_line(v, t, line, length, name));
        }
    }
    return STATUS_OK;
}

static enum status from_vocab(struct tokenizer **out, struct vocabulary *v, struct json *vocab,
    const char *vocab_name, char *merges, size_t merges_bytes, const char *merges_name) {
    if (vocab->type != JSON_OBJECT) {
        return fail("%s: not an object of tokens and their ids", vocab_name);
    }
    CHECK(vocabulary_init(v, vocab->count, vocab_name));
    CHECK(read_vocab_object(v, vocab));
    CHECK(vocabulary_finish(v, out, count_lines(merges, merges_bytes)));
    return read_merges_text(v, *out, merges, merges_bytes, merges_name);
}

enum status tokenizer_from_vocab(struct tokenizer **out, struct json *vocab, const char *vocab_name,
    char *merges, size_t merges_bytes, const char *merges_name) {
    struct vocabulary v = {0};
    *out = NULL;
    enum status status = from_vocab(out, &v, vocab, vocab_name, merges, merges_bytes, merges_name);
    return finish(out, &v, status);
}

/* ---- tokenizer.json ---- */

/* A member that must not be there, or be null, false, 0 or "": what this encoder does not do. */
static enum status expect_unset(const struct json *object, const char *key, const char *name) {
    const struct json *value = json_get(object, key);
    if (value == NULL || value->type == JSON_NULL || (value->type == JSON_BOOL && !value->boolean) ||
        (value->type == JSON_NUMBER && value->number == 0) ||
        (value->type == JSON_STRING && value->string_bytes == 0)) {
        return STATUS_OK;
    }
    return fail("%s: \"%s\" is not supported; only byte-level BPE as GPT-2 has it is", name, key);
}

static bool is_string(const struct json *value, const char *expected) {
    return value != NULL && value->type == JSON_STRING && strcmp(value->string, expected) == 0;
}

/* Does the file say that text is cut and encoded as GPT-2 does it? */
static enum status check_is_gpt2_like(const struct json *root, const char *name) {
    const struct json *model = json_get(root, "model"), *words = json_get(root, "pre_tokenizer");
    const char *const unset[] = {
        "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"};
    for (size_t i = 0; i < sizeof unset / sizeof *unset; i++) {
        CHECK(expect_unset(model, unset[i], name));
    }
    if (json_get(model, "type") != NULL && !is_string(json_get(model, "type"), "BPE")) {
        return fail("%s: its model is not of type BPE", name);
    }
    CHECK(expect_unset(root, "normalizer", name));
    const struct json *use_regex = json_get(words, "use_regex");
    if (!is_string(json_get(words, "type"), "ByteLevel") ||
        (use_regex != NULL && (use_regex->type != JSON_BOOL || !use_regex->boolean))) {
        return fail("%s: its pre_tokenizer is not GPT-2's ByteLevel", name);
    }
    return expect_unset(words, "add_prefix_space", name);
}

static enum status read_added_tokens(struct vocabulary *v, const struct json *added) {
    for (size_t i = 0; added != NULL && i < added->count; i++) {
        const struct json *content = json_get(&added->items[i], "content");
        int64_t id;
        CHECK(json_get_integer(&added->items[i], "id", 0, v->capacity - 1, &id, v->name));
        if (content == NULL || content->type != JSON_STRING) {
            return fail("%s: the added token %lld has no \"content\"", v->name, (long long)id);
        }
        if (is_string(content, end_of_text_name)) {
            v->end_of_text = (int32_t)id;
        }
        CHECK(vocabulary_put(v, id, content->string, content->string_bytes));
    }
    return STATUS_OK;
}

/* Each merge "left right" or, in newer files, ["left", "right"]. */
static enum status read_merges_array(const struct vocabulary *v, struct tokenizer *t, struct json *merges) {
    for (size_t i = 0; i < merges->count; i++) {
        struct json *merge = &merges->items[i], *pair = merge->items;
        if (merge->type == JSON_STRING) {
            CHECK(add_merge_line(v, t, merge->string, merge->string_bytes, v->name));
        } else if (merge->type == JSON_ARRAY && merge->count == 2 && pair[0].type == JSON_STRING &&
                   pair[1].type == JSON_STRING) {
            CHECK(add_symbol_merge(
                v, t, pair[0].string, pair[0].string_bytes, pair[1].string, pair[1].string_bytes, v->name));
        } else {
            return fail("%s: merge %zu is not two tokens", v->name, i + 1);
        }
    }
    return STATUS_OK;
}

static enum status from_json(
    struct tokenizer **out, struct vocabulary *v, const struct json *root, const char *name) {
    const struct json *model = json_get(root, "model"), *added = json_get(root, "added_tokens");
    struct json *vocab = (struct json *)json_get(model, "vocab");
    struct json *merges = (struct json *)json_get(model, "merges");
    CHECK(check_is_gpt2_like(root, name));
    if (vocab == NULL || vocab->type != JSON_OBJECT || merges == NULL || merges->type != JSON_ARRAY) {
        return fail("%s: its model has no object \"vocab\" and array \"merges\"", name);
    }
    if (added != NULL && added->type != JSON_ARRAY) {
        return fail("%s: \"added_tokens\" is no array", name);
    }
    CHECK(vocabulary_init(v, vocab->count + (added != NULL ? added->count : 0), name));
    CHECK(read_added_tokens(v, added));
    CHECK(read_vocab_object(v, vocab));
    CHECK(vocabulary_finish(v, out, merges->count));
    return read_merges_array(v, *out, merges);
}

enum status tokenizer_from_json(struct tokenizer **out, struct json *root, const char *name) {
    struct vocabulary v = {0};
    *out = NULL;
    enum status status = from_json(out, &v, root, name);
    return finish(out, &v, status);
}

/* ---- rank files ---- */

/* RFC 4648, in place, with padding; false if it is none. */
static bool base64_decode(char *text, size_t bytes, size_t *decoded) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t used = 0;
    uint32_t bits = 0;
    if (bytes == 0 || bytes % 4 != 0) {
        return false;
    }
    size_t padding = text[bytes - 1] != '=' ? 0 : text[bytes - 2] != '=' ? 1 : 2;
    for (size_t i = 0; i < bytes - padding; i++) {
        const char *digit = memchr(digits, text[i], sizeof digits - 1);
        if (digit == NULL) {
            return false;
        }
        bits = bits << 6 | (uint32_t)(digit - digits);
        if (i % 4 > 0) {
            text[used++] = (char)(bits >> (6 - 2 * (i % 4)));
        }
    }
    *decoded = used;
    return true;
}

static bool parse_rank(const char *text, size_t bytes, int64_t *rank) {
    enum { MOST_DIGITS = 9 };
    *rank = 0;
    for (size_t i = 0; i < bytes && i < MOST_DIGITS; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        *rank = *rank * 10 + (text[i] - '0');
    }
    return bytes > 0 && bytes <= MOST_DIGITS;
}

static enum status read_rank_lines(struct vocabulary *v, char *text, size_t bytes) {
    char *line;
    size_t at = 0, length, decoded;
    for (int number = 1; next_line(text, bytes, &at, &line, &length); number++) {
        char *space = memchr(line, ' ', length);
        int64_t rank;
        if (length == 0) {
            continue;
        }
        size_t digits = space != NULL ? (size_t)(space - line) : 0;
        if (space == NULL || !parse_rank(space + 1, length - digits - 1, &rank) ||
            !base64_decode(line, digits, &decoded)) {
            return fail("%s: line %d is not a token in base64, a space and its rank", v->name, number);
        }
        CHECK(vocabulary_put(v, rank, line, decoded));
    }
    return STATUS_OK;
}

/* tiktoken joins the two neighbours whose bytes together are the token of the lowest rank. When the token's rank comes
   up, all that is lower has been joined, so what its own bytes have become by then are the two that it joins. */
static enum status find_rank_merges(struct tokenizer *t, int32_t ranks, const char *name) {
    int32_t *parts;
    enum status status = STATUS_OK;
    CHECK(ALLOCATE(parts, BPE_MAX_TOKEN_BYTES));
    for (int32_t token = 0; token < ranks && status == STATUS_OK; token++) {
        size_t bytes, count;
        const char *text = tokenizer_token_bytes(t, token, &bytes);
        if (bytes == 1) {
            continue;
        }
        status = bpe_merge_word(t, (const uint8_t *)text, bytes, parts, &count);
        if (status == STATUS_OK && count != 2) {
            status = fail("%s: the token of rank %d is not made of two tokens of lower ranks", name, token);
        }
        if (status == STATUS_OK) {
            status = bpe_add_merge(t, parts[0], parts[1], name);
        }
    }
    free(parts);
    return status;
}

static enum status from_ranks(
    struct tokenizer **out, struct vocabulary *v, char *text, size_t bytes, const char *name) {
    size_t lines = count_lines(text, bytes);
    CHECK(vocabulary_init(v, lines, name));
    CHECK(read_rank_lines(v, text, bytes));
    int32_t ranks = v->count;
    CHECK(vocabulary_finish(v, out, lines));
    return find_rank_merges(*out, ranks, name);
}

enum status tokenizer_from_ranks(struct tokenizer **out, char *text, size_t bytes, const char *name) {
    struct vocabulary v = {0};
    *out = NULL;
    enum status status = from_ranks(out, &v, text, bytes, name);
    return finish(out, &v, status);
}

/* ---- writing ---- */

struct symbols {
    struct alphabet alphabet;
    char text[2 * BPE_MAX_TOKEN_BYTES + 1];
};

static const char *token_symbols(struct symbols *s, const struct tokenizer *t, int32_t token) {
    size_t bytes;
    const char *text = tokenizer_token_bytes(t, token, &bytes);
    alphabet_encode(&s->alphabet, text, bytes, s->text);
    return token == t->end_of_text ? end_of_text_name : s->text;
}

static void write_vocab(struct json_writer *w, struct symbols *s, const struct tokenizer *t) {
    json_begin_object(w);
    for (int32_t token = 0; token < t->vocab_size; token++) {
        json_integer_member(w, token_symbols(s, t, token), token);
    }
    json_end_object(w);
}

static void write_end_of_text(struct json_writer *w, const struct tokenizer *t) {
    const char *const off[] = {"single_word", "lstrip", "rstrip", "normalized"};
    json_begin_array(w);
    json_begin_object(w);
    json_integer_member(w, "id", t->end_of_text);
    json_string_member(w, "content", end_of_text_name);
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        json_bool_member(w, off[i], false);
    }
    json_bool_member(w, "special", true);
    json_end_object(w);
    json_end_array(w);
}

/* The ByteLevel of a pre_tokenizer, post_processor or decoder: the same members in each. */
static void write_byte_level(struct json_writer *w, const char *key) {
    json_key(w, key);
    json_begin_object(w);
    json_string_member(w, "type", "ByteLevel");
    json_bool_member(w, "add_prefix_space", false);
    json_bool_member(w, "trim_offsets", true);
    json_bool_member(w, "use_regex", true);
    json_end_object(w);
}

static void write_tokenizer_json(struct json_writer *w, struct symbols *s, const struct tokenizer *t) {
    json_begin_object(w);
    json_string_member(w, "version", "1.0");
    json_key(w, "added_tokens");
    write_end_of_text(w, t);
    json_key(w, "normalizer");
    json_null(w);
    write_byte_level(w, "pre_tokenizer");
    write_byte_level(w, "decoder");
    json_key(w, "model");
    json_begin_object(w);
    json_string_member(w, "type", "BPE");
    json_key(w, "vocab");
    write_vocab(w, s, t);
    json_key(w, "merges");
    json_begin_array(w);
    for (int32_t i = 0; i < t->merge_count; i++) {
        json_begin_array(w);
        json_string(w, token_symbols(s, t, t->merges[i].left));
        json_string(w, token_symbols(s, t, t->merges[i].right));
        json_end_array(w);
    }
    json_end_array(w);
    json_end_object(w);
    json_end_object(w);
}

static enum status save_json(struct json_writer *w, const char *folder, const char *name) {
    char path[PATH_MAX], *text;
    size_t bytes;
    CHECK(json_writer_finish(w, &text, &bytes));
    enum status status = path_join(path, sizeof path, folder, name);
    if (status == STATUS_OK) {
        status = file_write_all(path, text, bytes);
    }
    free(text);
    return status;
}

static enum status save_merges(struct symbols *s, const struct tokenizer *t, const char *folder) {
    char path[PATH_MAX], *text = NULL;
    size_t bytes = 0;
    CHECK(path_join(path, sizeof path, folder, "merges.txt"));
    FILE *file = open_memstream(&text, &bytes);
    if (file == NULL) {
        return fail_as(STATUS_OUT_OF_MEMORY, "%s: out of host memory", path);
    }
    fputs("#version: 0.2\n", file);
    for (int32_t i = 0; i < t->merge_count; i++) {
        fprintf(file, "%s ", token_symbols(s, t, t->merges[i].left));
        fprintf(file, "%s\n", token_symbols(s, t, t->merges[i].right));
    }
    enum status status = fclose(file) == 0 ? file_write_all(path, text, bytes)
                                           : fail_as(STATUS_OUT_OF_MEMORY, "%s: out of host memory", path);
    free(text);
    return status;
}

const char *const tokenizer_files[TOKENIZER_FILES] = {"vocab.json", "merges.txt", "tokenizer.json"};

enum status tokenizer_save(const struct tokenizer *tokenizer, const char *folder) {
    struct symbols *s;
    struct json_writer vocab, all;
    CHECK(ALLOCATE(s, 1));
    alphabet_init(&s->alphabet);
    json_writer_init(&vocab, false);
    write_vocab(&vocab, s, tokenizer);
    json_writer_init(&all, false);
    write_tokenizer_json(&all, s, tokenizer);
    enum status status = save_json(&vocab, folder, "vocab.json");
    enum status all_status = save_json(&all, folder, "tokenizer.json");
    status = status == STATUS_OK ? all_status : status;
    if (status == STATUS_OK) {
        status = save_merges(s, tokenizer, folder);
    }
    free(s);
    return status;
}
