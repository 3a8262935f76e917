/* JSON: a recursive-descent reader with a bounded depth, and a writer into a growing buffer. The reader's tree
   owns every string; a half-read tree is always in a state that clear_value can free. */
#include "json.h"

#include "utf8.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

enum { MAX_DEPTH = 64, QUOTED_BYTES = 100 /* of a key in a message */ };

/* ---- reader ---- */

struct reader {
    const char *text; /* a zero follows text[bytes - 1]: looking at text[at] is always allowed */
    size_t bytes, at;
    const char *name;
};

static enum status fail_at(const struct reader *r, size_t at, const char *what) {
    if (at >= r->bytes) {
        return fail("%s: the JSON ends too early, at byte %zu: %s", r->name, r->bytes, what);
    }
    return fail("%s: not JSON at byte %zu: %s", r->name, at, what);
}

static void skip_space(struct reader *r) {
    while (
        r->text[r->at] == ' ' || r->text[r->at] == '\t' || r->text[r->at] == '\n' || r->text[r->at] == '\r') {
        r->at++;
    }
}

static bool take(struct reader *r, char c) {
    if (r->at < r->bytes && r->text[r->at] == c) {
        r->at++;
        return true;
    }
    return false;
}

static bool take_word(struct reader *r, const char *word) {
    size_t length = strlen(word);
    if (r->bytes - r->at >= length && memcmp(r->text + r->at, word, length) == 0) {
        r->at += length;
        return true;
    }
    return false;
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool take_digits(struct reader *r) {
    size_t start = r->at;
    while (is_digit(r->text[r->at])) {
        r->at++;
    }
    return r->at > start;
}

static enum status parse_number(struct reader *r, struct json *out) {
    size_t start = r->at;
    bool whole = true;
    take(r, '-');
    if (!take(r, '0') && !take_digits(r)) {
        return fail_at(r, r->at, "expected a digit");
    }
    if (take(r, '.')) {
        whole = false;
        if (!take_digits(r)) {
            return fail_at(r, r->at, "expected a digit after the point");
        }
    }
    if (take(r, 'e') || take(r, 'E')) {
        whole = false;
        if (!take(r, '+')) {
            take(r, '-');
        }
        if (!take_digits(r)) {
            return fail_at(r, r->at, "expected a digit in the exponent");
        }
    }
    /* strtod reads on through what the grammar above does not take ("0x1"), but then the text is wrong anyway. */
    out->type = JSON_NUMBER;
    out->number = strtod(r->text + start, NULL);
    if (out->number - out->number != 0) {
        return fail_at(r, start, "the number is too large");
    }
    if (whole) {
        errno = 0;
        out->integer = strtoll(r->text + start, NULL, 10);
        out->is_integer =
            errno == 0 && !(out->integer == 0 && r->text[start] == '-'); /* -0 is a double alone */
    }
    return STATUS_OK;
}

/* Four hexadecimal digits. */
static bool take_hex4(struct reader *r, uint32_t *value) {
    *value = 0;
    for (int i = 0; i < 4; i++) {
        char c = r->text[r->at];
        uint32_t digit = is_digit(c)            ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                                : 16;
        if (digit == 16) {
            return false;
        }
        *value = *value << 4 | digit;
        r->at++;
    }
    return true;
}

/* The character of an escape, after its backslash. */
static enum status parse_escape(struct reader *r, uint32_t *code) {
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    char c = r->text[r->at];
    const char *letter = c != '\0' ? strchr(letters, c) : NULL;
    if (letter != NULL) {
        *code = (uint32_t)meanings[letter - letters];
        r->at++;
        return STATUS_OK;
    }
    if (!take(r, 'u')) {
        return fail_at(r, r->at, "unknown escape in a string");
    }
    if (!take_hex4(r, code)) {
        return fail_at(r, r->at, "expected four hexadecimal digits after \\u");
    }
    if (*code >= 0xd800 && *code < 0xe000) { /* half of a pair (RFC 8259, section 7) */
        uint32_t low = 0;
        if (*code >= 0xdc00 || !take_word(r, "\\u") || !take_hex4(r, &low) || low < 0xdc00 || low >= 0xe000) {
            return fail_at(r, r->at, "half of a surrogate pair in a string");
        }
        *code = 0x10000 + ((*code - 0xd800) << 10) + (low - 0xdc00);
    }
    return STATUS_OK;
}

/* A string, its opening quote being next. *out is malloc'ed and zero-terminated. */
static enum status parse_string(struct reader *r, char **out, size_t *bytes) {
    size_t end = r->at + 1;
    while (end < r->bytes && r->text[end] != '"') {
        end += r->text[end] == '\\' ? 2 : 1;
    }
    if (end >= r->bytes) {
        return fail_at(r, r->bytes, "a string without its closing quote");
    }
    r->at++;
    char *string; /* no escape is shorter than what it stands for */
    CHECK(ALLOCATE(string, end - r->at + 1));
    *out = string;
    size_t used = 0;
    while (r->text[r->at] != '"') {
        if (take(r, '\\')) {
            uint32_t code = 0;
            CHECK(parse_escape(r, &code));
            used += utf8_encode(string + used, code);
            continue;
        }
        uint32_t code;
        size_t length = utf8_decode(r->text + r->at, r->bytes - r->at, &code);
        if (length == 0) {
            return fail_at(r, r->at, "a string that is not UTF-8");
        }
        if (code < 0x20) {
            return fail_at(r, r->at, "a control character in a string");
        }
        memcpy(string + used, r->text + r->at, length);
        used += length;
        r->at += length;
    }
    r->at++;
    *bytes = used;
    return STATUS_OK;
}

/* Room for one more element, a null for now; with_key: and its key, NULL for now. */
static enum status add_item(struct json *container, size_t *capacity, bool with_key) {
    size_t key_capacity = *capacity;
    CHECK(RESERVE(container->items, *capacity, container->count + 1));
    if (with_key) {
        CHECK(RESERVE(container->keys, key_capacity, container->count + 1));
    }
    memset(&container->items[container->count], 0, sizeof *container->items);
    if (with_key) {
        container->keys[container->count] = NULL;
    }
    container->count++;
    return STATUS_OK;
}

static int compare_keys(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Sorted, because a header of a big model holds thousands of keys. */
static enum status check_duplicate_keys(const struct reader *r, const struct json *object) {
    char **sorted;
    CHECK(ALLOCATE(sorted, object->count));
    if (object->count > 0) {
        memcpy(sorted, object->keys, object->count * sizeof *sorted);
        qsort(sorted, object->count, sizeof *sorted, compare_keys);
    }
    enum status status = STATUS_OK;
    for (size_t i = 1; i < object->count && status == STATUS_OK; i++) {
        if (strcmp(sorted[i - 1], sorted[i]) == 0) {
            status = fail("%s: the JSON key \"%.*s\" is there twice", r->name, QUOTED_BYTES, sorted[i]);
        }
    }
    free(sorted);
    return status;
}

static enum status parse_value(struct reader *r, struct json *out, int depth);

static enum status parse_array(struct reader *r, struct json *out, int depth) {
    size_t capacity = 0;
    out->type = JSON_ARRAY;
    r->at++;
    skip_space(r);
    if (take(r, ']')) {
        return STATUS_OK;
    }
    do {
        CHECK(add_item(out, &capacity, false));
        CHECK(parse_value(r, &out->items[out->count - 1], depth + 1));
    } while (take(r, ','));
    return take(r, ']') ? STATUS_OK : fail_at(r, r->at, "expected , or ] in an array");
}

static enum status parse_object(struct reader *r, struct json *out, int depth) {
    size_t capacity = 0;
    out->type = JSON_OBJECT;
    r->at++;
    skip_space(r);
    if (take(r, '}')) {
        return STATUS_OK;
    }
    do {
        skip_space(r);
        if (r->at >= r->bytes || r->text[r->at] != '"') {
            return fail_at(r, r->at, "expected a key in quotes");
        }
        CHECK(add_item(out, &capacity, true));
        size_t key_at = r->at, key_bytes = 0;
        char **key = &out->keys[out->count - 1];
        CHECK(parse_string(r, key, &key_bytes));
        if (strlen(*key) != key_bytes) {
            return fail_at(r, key_at, "a key with a zero in it");
        }
        skip_space(r);
        if (!take(r, ':')) {
            return fail_at(r, r->at, "expected : after a key");
        }
        CHECK(parse_value(r, &out->items[out->count - 1], depth + 1));
    } while (take(r, ','));
    if (!take(r, '}')) {
        return fail_at(r, r->at, "expected , or } in an object");
    }
    return check_duplicate_keys(r, out);
}

/* A value and the space around it, into *out, which is zeroed. */
static enum status parse_value(struct reader *r, struct json *out, int depth) {
    if (depth > MAX_DEPTH) {
        return fail_at(r, r->at, "nested too deep");
    }
    skip_space(r);
    char next = r->text[r->at];
    if (next == '{') {
        CHECK(parse_object(r, out, depth));
    } else if (next == '[') {
        CHECK(parse_array(r, out, depth));
    } else if (next == '"') {
        out->type = JSON_STRING;
        CHECK(parse_string(r, &out->string, &out->string_bytes));
    } else if (next == '-' || is_digit(next)) {
        CHECK(parse_number(r, out));
    } else if (take_word(r, "true")) {
        out->type = JSON_BOOL;
        out->boolean = true;
    } else if (take_word(r, "false")) {
        out->type = JSON_BOOL;
    } else if (!take_word(r, "null")) {
        return fail_at(r, r->at, "expected a value");
    }
    skip_space(r);
    return STATUS_OK;
}

static enum status parse_text(struct reader *r, struct json *root) {
    CHECK(parse_value(r, root, 1));
    return r->at == r->bytes ? STATUS_OK : fail_at(r, r->at, "something follows the value");
}

enum status json_parse(struct json **out, const char *text, size_t bytes, const char *name) {
    *out = NULL;
    char *copy; /* zero-terminated, which the text need not be */
    CHECK(ALLOCATE(copy, bytes + 1));
    if (bytes > 0) {
        memcpy(copy, text, bytes);
    }
    struct reader reader = {copy, bytes, 0, name};
    struct json *root = NULL;
    enum status status = ALLOCATE(root, 1);
    if (status == STATUS_OK) {
        status = parse_text(&reader, root);
    }
    free(copy);
    if (status != STATUS_OK) {
        json_free(root);
        return status;
    }
    *out = root;
    return STATUS_OK;
}

static void clear_value(struct json *value) {
    for (size_t i = 0; i < value->count; i++) {
        clear_value(&value->items[i]);
        if (value->keys != NULL) {
            free(value->keys[i]);
        }
    }
    free(value->items);
    free(value->keys);
    free(value->string);
}

void json_free(struct json *value) {
    if (value != NULL) {
        clear_value(value);
        free(value);
    }
}

enum status json_read_file(struct json **out, const char *path) {
    uint8_t *text;
    size_t bytes;
    *out = NULL;
    CHECK(file_read_text(path, &text, &bytes));
    enum status status = json_parse(out, (const char *)text, bytes, path);
    free(text);
    return status;
}

const struct json *json_get(const struct json *object, const char *key) {
    if (object == NULL || object->type != JSON_OBJECT) {
        return NULL;
    }
    for (size_t i = 0; i < object->count; i++) {
        if (strcmp(object->keys[i], key) == 0) {
            return &object->items[i];
        }
    }
    return NULL;
}

/* The member, of the type; NULL with the message set. */
static const struct json *get_typed(const struct json *object, const char *key, enum json_type type,
    const char *type_name, const char *name) {
    const struct json *member = json_get(object, key);
    if (member == NULL) {
        fail("%s: \"%s\" is missing", name, key);
        return NULL;
    }
    if (member->type != type) {
        fail("%s: \"%s\" is not a %s", name, key, type_name);
        return NULL;
    }
    return member;
}

enum status json_get_integer(const struct json *object, const char *key, int64_t least, int64_t most,
    int64_t *value, const char *name) {
    const struct json *member = get_typed(object, key, JSON_NUMBER, "number", name);
    if (member == NULL) {
        return STATUS_ERROR;
    }
    if (!member->is_integer || member->integer < least || member->integer > most) {
        return fail("%s: \"%s\" is %.17g, not a whole number from %" PRId64 " to %" PRId64, name, key,
            member->number, least, most);
    }
    *value = member->integer;
    return STATUS_OK;
}

enum status json_get_string(
    const struct json *object, const char *key, const char **value, const char *name) {
    const struct json *member = get_typed(object, key, JSON_STRING, "string", name);
    if (member == NULL) {
        return STATUS_ERROR;
    }
    *value = member->string;
    return STATUS_OK;
}

/* ---- writer ---- */

static void append(struct json_writer *w, const char *text, size_t bytes) {
    if (w->failed) {
        return;
    }
    if (RESERVE(w->text, w->capacity, w->bytes + bytes + 1) != STATUS_OK) { /* always room for a final zero */
        w->failed = true;
        return;
    }
    memcpy(w->text + w->bytes, text, bytes);
    w->bytes += bytes;
    w->text[w->bytes] = '\0';
}

static void append_text(struct json_writer *w, const char *text) {
    append(w, text, strlen(text));
}

static void new_line(struct json_writer *w) {
    if (w->pretty) {
        append_text(w, "\n");
        for (int i = 0; i < w->depth; i++) {
            append_text(w, "  ");
        }
    }
}

/* What stands between the element before and this one. */
static void begin_element(struct json_writer *w) {
    if (w->after_key) {
        w->after_key = false;
    } else {
        append_text(w, w->need_comma ? "," : "");
        if (w->depth > 0) {
            new_line(w);
        }
    }
    w->need_comma = true;
}

static void begin_container(struct json_writer *w, const char *bracket) {
    begin_element(w);
    append_text(w, bracket);
    w->depth++;
    w->need_comma = false;
}

static void end_container(struct json_writer *w, const char *bracket) {
    w->depth--;
    if (w->need_comma) { /* it has elements */
        new_line(w);
    }
    append_text(w, bracket);
    w->need_comma = true;
}

static void append_quoted(struct json_writer *w, const char *text, size_t bytes) {
    append_text(w, "\"");
    for (size_t i = 0; i < bytes;) {
        uint32_t code;
        size_t length = utf8_decode(text + i, bytes - i, &code);
        if (length == 0) {
            append_text(w, "\xef\xbf\xbd"); /* U+FFFD, the replacement character, for each bad byte */
            length = 1;
        } else if (code == '"' || code == '\\') {
            append(w, "\\", 1);
            append(w, text + i, 1);
        } else if (code == '\n') {
            append_text(w, "\\n");
        } else if (code < 0x20) {
            char escape[8];
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned)code);
            append_text(w, escape);
        } else {
            append(w, text + i, length);
        }
        i += length;
    }
    append_text(w, "\"");
}

void json_writer_init(struct json_writer *w, bool pretty) {
    memset(w, 0, sizeof *w);
    w->pretty = pretty;
}

void json_begin_object(struct json_writer *w) {
    begin_container(w, "{");
}

void json_end_object(struct json_writer *w) {
    end_container(w, "}");
}

void json_begin_array(struct json_writer *w) {
    begin_container(w, "[");
}

void json_end_array(struct json_writer *w) {
    end_container(w, "]");
}

void json_key(struct json_writer *w, const char *key) {
    begin_element(w);
    append_quoted(w, key, strlen(key));
    append_text(w, w->pretty ? ": " : ":");
    w->after_key = true;
}

void json_string_bytes(struct json_writer *w, const char *text, size_t bytes) {
    begin_element(w);
    append_quoted(w, text, bytes);
}

void json_string(struct json_writer *w, const char *text) {
    json_string_bytes(w, text, strlen(text));
}

void json_integer(struct json_writer *w, int64_t value) {
    char digits[24];
    snprintf(digits, sizeof digits, "%" PRId64, value);
    begin_element(w);
    append_text(w, digits);
}

void json_number(struct json_writer *w, double value) {
    if (value - value != 0) { /* NaN or infinite: JSON has neither */
        json_null(w);
        return;
    }
    char digits[40];
    if (value > -1e15 && value < 1e15 && value == (double)(int64_t)value) {
        snprintf(digits, sizeof digits, "%.0f", value); /* 100, where %g would say 1e+02 */
    } else {
        for (int precision = 1; precision <= 17; precision++) { /* 17 digits always suffice */
            snprintf(digits, sizeof digits, "%.*g", precision, value);
            if (strtod(digits, NULL) == value) {
                break;
            }
        }
    }
    begin_element(w);
    append_text(w, digits);
}

void json_bool(struct json_writer *w, bool value) {
    begin_element(w);
    append_text(w, value ? "true" : "false");
}

void json_null(struct json_writer *w) {
    begin_element(w);
    append_text(w, "null");
}

void json_value(struct json_writer *w, const struct json *value) {
    switch (value->type) {
    case JSON_NULL:
        json_null(w);
        break;
    case JSON_BOOL:
        json_bool(w, value->boolean);
        break;
    case JSON_NUMBER:
        if (value->is_integer) {
            json_integer(w, value->integer);
        } else {
            json_number(w, value->number);
        }
        break;
    case JSON_STRING:
        json_string_bytes(w, value->string, value->string_bytes);
        break;
    case JSON_ARRAY:
        json_begin_array(w);
        for (size_t i = 0; i < value->count; i++) {
            json_value(w, &value->items[i]);
        }
        json_end_array(w);
        break;
    case JSON_OBJECT:
        json_begin_object(w);
        for (size_t i = 0; i < value->count; i++) {
            json_key(w, value->keys[i]);
            json_value(w, &value->items[i]);
        }
        json_end_object(w);
        break;
    }
}

void json_string_member(struct json_writer *w, const char *key, const char *text) {
    json_key(w, key);
    json_string(w, text);
}

void json_integer_member(struct json_writer *w, const char *key, int64_t value) {
    json_key(w, key);
    json_integer(w, value);
}

void json_number_member(struct json_writer *w, const char *key, double value) {
    json_key(w, key);
    json_number(w, value);
}

void json_bool_member(struct json_writer *w, const char *key, bool value) {
    json_key(w, key);
    json_bool(w, value);
}

enum status json_writer_finish(struct json_writer *w, char **text, size_t *bytes) {
    if (w->pretty) {
        append_text(w, "\n");
    }
    *text = NULL;
    if (bytes != NULL) {
        *bytes = 0;
    }
    append_text(w, ""); /* so that there is a text, if an empty one */
    if (w->failed) {
        free(w->text);
        return fail_as(STATUS_OUT_OF_MEMORY, "out of host memory: JSON text of %zu bytes", w->bytes);
    }
    *text = w->text;
    if (bytes != NULL) {
        *bytes = w->bytes;
    }
    return STATUS_OK;
}
