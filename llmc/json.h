/* JSON (RFC 8259) for files of this program and of others: a reader that bounds depth and names the byte where
   input is wrong, and a writer. */
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum json_type { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

struct json {
    enum json_type type;
    bool boolean;
    double number;
    int64_t integer; /* valid when is_integer: the number is written without fraction or exponent and fits */
    bool is_integer;
    char *string; /* UTF-8, zero-terminated; may hold zeros: string_bytes */
    size_t string_bytes;
    size_t count;       /* elements of an array or object */
    struct json *items; /* values */
    char **keys;        /* of an object, zero-terminated */
};

/* The whole of text[0, bytes) is one value. Duplicate keys, bad UTF-8, depth over 64 are errors. `name` for messages. */
enum status json_parse(struct json **out, const char *text, size_t bytes, const char *name);
/* A file that has one value, of at most FILE_TEXT_BYTES. */
enum status json_read_file(struct json **out, const char *path);
void json_free(struct json *value);
const struct json *json_get(const struct json *object, const char *key); /* NULL if not there, or no object */
/* Members that must be there and of the right type and range; messages name `name` and key. */
enum status json_get_integer(const struct json *object, const char *key, int64_t least, int64_t most,
    int64_t *value, const char *name);
enum status json_get_string(const struct json *object, const char *key, const char **value, const char *name);

/* A growing text buffer; out of memory is remembered and told by json_writer_finish. */
struct json_writer {
    char *text;
    size_t bytes, capacity;
    int depth;
    bool need_comma, after_key, failed, pretty;
};
/* pretty: two-space indents and a final newline; else one line */
void json_writer_init(struct json_writer *w, bool pretty);
void json_begin_object(struct json_writer *w);
void json_end_object(struct json_writer *w);
void json_begin_array(struct json_writer *w);
void json_end_array(struct json_writer *w);
void json_key(struct json_writer *w, const char *key);
void json_string(struct json_writer *w, const char *text);
void json_string_bytes(
    struct json_writer *w, const char *text, size_t bytes); /* invalid UTF-8 becomes U+FFFD */
void json_integer(struct json_writer *w, int64_t value);
void json_number(
    struct json_writer *w, double value); /* shortest text that reads back the same; NaN, inf: null */
void json_bool(struct json_writer *w, bool value);
void json_null(struct json_writer *w);
void json_value(struct json_writer *w, const struct json *value); /* a parsed value with all it holds */
/* A key and its value. */
void json_string_member(struct json_writer *w, const char *key, const char *text);
void json_integer_member(struct json_writer *w, const char *key, int64_t value);
void json_number_member(struct json_writer *w, const char *key, double value);
void json_bool_member(struct json_writer *w, const char *key, bool value);
/* The text, zero-terminated; the caller frees it. bytes may be NULL. */
enum status json_writer_finish(struct json_writer *w, char **text, size_t *bytes);

#ifdef __cplusplus
}
#endif

#endif
