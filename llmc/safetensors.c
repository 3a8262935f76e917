/* safetensors. The reader believes nothing: the header is checked completely before anything is read through it. The
   writer computes all offsets from the entries, so that it can only write valid files, and keeps a running checksum.
   Header (N bytes of JSON): name -> {"dtype", "shape", "data_offsets": [begin, end)}, and optionally "__metadata__" of
   strings. The tensors, in the order of their offsets, fill the file from byte 8 + N to its end. */
#include "safetensors.h"

#include "checksum.h"
#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    LENGTH_BYTES = 8,
    MAX_HEADER_BYTES = 100000000, /* the reference implementation's limit */
    ALIGNMENT = 8,                /* of the data; the header is padded with spaces */
    QUOTED_BYTES = 100            /* of a name in a message */
};
static const char METADATA_KEY[] = "__metadata__";

/* Bytes of a tensor of that shape and dtype; false if a size is negative or they do not fit 63 bits. */
static bool tensor_bytes(const struct safetensors_entry *entry, uint64_t *bytes) {
    int64_t product = (int64_t)dtype_bytes(entry->dtype);
    for (int i = 0; i < entry->dimensions; i++) {
        if (entry->shape[i] < 0 || __builtin_mul_overflow(product, entry->shape[i], &product)) {
            return false;
        }
    }
    *bytes = (uint64_t)product;
    return true;
}

/* ---- reading ---- */

static enum status fail_entry(const struct safetensors *f, const char *name, const char *what) {
    return fail("%s: tensor \"%.*s\": %s", f->path, QUOTED_BYTES, name, what);
}

static enum status read_metadata(struct safetensors *f, const struct json *metadata) {
    if (metadata->type != JSON_OBJECT) {
        return fail("%s: __metadata__ is not an object", f->path);
    }
    CHECK(ALLOCATE(f->metadata_keys, metadata->count));
    CHECK(ALLOCATE(f->metadata_values, metadata->count));
    for (size_t i = 0; i < metadata->count; i++) {
        if (metadata->items[i].type != JSON_STRING) {
            return fail(
                "%s: \"%.*s\" of __metadata__ is not a string", f->path, QUOTED_BYTES, metadata->keys[i]);
        }
        f->metadata_keys[i] = string_copy(metadata->keys[i]);
        f->metadata_values[i] = string_copy(metadata->items[i].string);
        f->metadata_count = i + 1;
        if (f->metadata_keys[i] == NULL || f->metadata_values[i] == NULL) {
            return STATUS_OUT_OF_MEMORY;
        }
    }
    return STATUS_OK;
}

/* Whole numbers of at least 0, at most `most` of them. */
static bool read_sizes(const struct json *array, int64_t *out, size_t most) {
    if (array == NULL || array->type != JSON_ARRAY || array->count > most) {
        return false;
    }
    for (size_t i = 0; i < array->count; i++) {
        if (!array->items[i].is_integer || array->items[i].integer < 0) {
            return false;
        }
        out[i] = array->items[i].integer;
    }
    return true;
}

static enum status read_entry(
    struct safetensors *f, struct safetensors_entry *entry, const char *name, const struct json *value) {
    entry->name = string_copy(name);
    if (entry->name == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    const struct json *dtype = json_get(value, "dtype"), *shape = json_get(value, "shape"),
                      *offsets = json_get(value, "data_offsets");
    if (dtype == NULL || dtype->type != JSON_STRING) {
        return fail_entry(f, name, "\"dtype\" is missing or not a string");
    }
    if (strcmp(dtype->string, "BOOL") == 0) {
        entry->dtype = DTYPE_U8; /* a byte of 0 or 1: the attention masks of older GPT-2 files */
    } else if (!dtype_from_name(dtype->string, &entry->dtype)) {
        return fail("%s: tensor \"%.*s\": dtype \"%.*s\" is not supported", f->path, QUOTED_BYTES, name,
            QUOTED_BYTES, dtype->string);
    }
    if (!read_sizes(shape, entry->shape, SAFETENSORS_MAX_DIMENSIONS)) {
        return fail_entry(f, name, "\"shape\" is not an array of at most 8 sizes");
    }
    entry->dimensions = (int)shape->count;
    int64_t range[2];
    if (!read_sizes(offsets, range, 2) || offsets->count != 2 || range[0] > range[1]) {
        return fail_entry(f, name, "\"data_offsets\" is not [begin, end]");
    }
    entry->begin = (uint64_t)range[0];
    entry->end = (uint64_t)range[1];
    uint64_t bytes;
    if (!tensor_bytes(entry, &bytes)) {
        return fail_entry(f, name, "its shape has more elements than any memory");
    }
    if (bytes != entry->end - entry->begin) {
        return fail("%s: tensor \"%.*s\": its shape takes %" PRIu64 " bytes, its data_offsets %" PRIu64,
            f->path, QUOTED_BYTES, name, bytes, entry->end - entry->begin);
    }
    return STATUS_OK;
}

/* By begin; empty tensors before the one that begins there too. */
static int compare_entries(const void *a, const void *b) {
    const struct safetensors_entry *x = a, *y = b;
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    return x->end < y->end ? -1 : x->end > y->end;
}

/* The tensors follow each other from the first byte of data to the file's last. */
static enum status check_offsets(const struct safetensors *f) {
    uint64_t end = 0;
    for (size_t i = 0; i < f->count; i++) {
        const struct safetensors_entry *entry = &f->entries[i];
        if (entry->begin != end) {
            return fail_entry(f, entry->name,
                entry->begin < end ? "overlaps the one before" : "there is a hole before its data");
        }
        end = entry->end;
    }
    if (end != f->file_bytes - f->data_offset) {
        return fail("%s: the tensors take %" PRIu64 " bytes, the file holds %" PRIu64
                    " (truncated, or not all of it downloaded?)",
            f->path, end, f->file_bytes - f->data_offset);
    }
    return STATUS_OK;
}

static enum status read_header(struct safetensors *f, const struct json *header) {
    if (header->type != JSON_OBJECT) {
        return fail("%s: the header is not a JSON object", f->path);
    }
    CHECK(ALLOCATE(f->entries, header->count));
    for (size_t i = 0; i < header->count; i++) {
        if (strcmp(header->keys[i], METADATA_KEY) == 0) {
            CHECK(read_metadata(f, &header->items[i]));
        } else {
            f->count++;
            CHECK(read_entry(f, &f->entries[f->count - 1], header->keys[i], &header->items[i]));
        }
    }
    qsort(f->entries, f->count, sizeof *f->entries, compare_entries);
    return check_offsets(f);
}

/* The header's length and text; *text is the caller's to free. */
static enum status read_header_text(struct safetensors *f, char **text, size_t *bytes) {
    if (f->file_bytes < LENGTH_BYTES) {
        return fail("%s: not a safetensors file: only %" PRIu64 " bytes", f->path, f->file_bytes);
    }
    uint64_t length;
    CHECK(file_read_at(f->file, f->path, &length, sizeof length, 0));
    if (length > MAX_HEADER_BYTES || length > f->file_bytes - LENGTH_BYTES) {
        return fail("%s: not a safetensors file, or truncated: a header of %" PRIu64
                    " bytes in a file of %" PRIu64,
            f->path, length, f->file_bytes);
    }
    f->data_offset = LENGTH_BYTES + length;
    CHECK(ALLOCATE(*text, length));
    CHECK(file_read_at(f->file, f->path, *text, length, LENGTH_BYTES));
    if (length == 0 || (*text)[0] != '{') {
        return fail("%s: not a safetensors file: the header does not begin with {", f->path);
    }
    *bytes = length;
    return STATUS_OK;
}

enum status safetensors_open(struct safetensors **out, const char *path) {
    enum status status = STATUS_OK;
    struct safetensors *f = NULL;
    struct json *header = NULL;
    char *text = NULL;
    size_t bytes = 0;
    *out = NULL;
    CHECK(ALLOCATE(f, 1));
    f->file = -1;
    CHECK_CLEANUP(file_open(path, &f->file, &f->file_bytes));
    f->path = string_copy(path);
    if (f->path == NULL) {
        status = STATUS_OUT_OF_MEMORY;
        goto cleanup;
    }
    CHECK_CLEANUP(read_header_text(f, &text, &bytes));
    CHECK_CLEANUP(json_parse(&header, text, bytes, path));
    CHECK_CLEANUP(read_header(f, header));
    *out = f;
    f = NULL;
cleanup:
    json_free(header);
    free(text);
    safetensors_close(f);
    return status;
}

void safetensors_close(struct safetensors *f) {
    if (f == NULL) {
        return;
    }
    for (size_t i = 0; i < f->count; i++) {
        free(f->entries[i].name);
    }
    for (size_t i = 0; i < f->metadata_count; i++) {
        free(f->metadata_keys[i]);
        free(f->metadata_values[i]);
    }
    free(f->entries);
    free(f->metadata_keys);
    free(f->metadata_values);
    free(f->path);
    if (f->file >= 0) {
        close(f->file);
    }
    free(f);
}

const struct safetensors_entry *safetensors_find(const struct safetensors *f, const char *name) {
    for (size_t i = 0; i < f->count; i++) {
        if (strcmp(f->entries[i].name, name) == 0) {
            return &f->entries[i];
        }
    }
    return NULL;
}

const char *safetensors_metadata(const struct safetensors *f, const char *key) {
    for (size_t i = 0; i < f->metadata_count; i++) {
        if (strcmp(f->metadata_keys[i], key) == 0) {
            return f->metadata_values[i];
        }
    }
    return NULL;
}

enum status safetensors_read(const struct safetensors *f, const struct safetensors_entry *entry,
    uint64_t offset, void *data, size_t bytes) {
    uint64_t size = entry->end - entry->begin;
    if (offset > size || bytes > size - offset) {
        return fail("%s: tensor \"%.*s\" has %" PRIu64 " bytes, not %zu from %" PRIu64 " on", f->path,
            QUOTED_BYTES, entry->name, size, bytes, offset);
    }
    return file_read_at(f->file, f->path, data, bytes, f->data_offset + entry->begin + offset);
}

/* The element at `bytes` of a floating-point type; every one of them is exact in double. */
static double load_value(const uint8_t *bytes, enum dtype dtype) {
    double f64;
    float f32;
    uint16_t bits;
    switch (dtype) {
    case DTYPE_F64:
        memcpy(&f64, bytes, sizeof f64);
        return f64;
    case DTYPE_F32:
        memcpy(&f32, bytes, sizeof f32);
        return (double)f32;
    default:
        memcpy(&bits, bytes, sizeof bits);
        return (double)(dtype == DTYPE_BF16 ? bf16_to_float(bits) : f16_to_float(bits));
    }
}

enum status safetensors_read_values(const struct safetensors *f, const struct safetensors_entry *entry,
    int64_t first, int64_t count, void *out, enum dtype out_dtype) {
    size_t size = dtype_bytes(entry->dtype);
    if (entry->dtype == out_dtype) { /* bit by bit, NaNs too */
        return safetensors_read(f, entry, (uint64_t)first * size, out, (size_t)count * size);
    }
    if (entry->dtype > DTYPE_F16) { /* the floating-point types come first */
        return fail("%s: tensor \"%.*s\" holds %s, not floating-point numbers", f->path, QUOTED_BYTES,
            entry->name, dtype_name(entry->dtype));
    }
    uint8_t piece[8192];
    int64_t piece_count = (int64_t)(sizeof piece / size);
    for (int64_t done = 0; done < count; done += piece_count) {
        int64_t n = min_i64(piece_count, count - done);
        CHECK(safetensors_read(f, entry, (uint64_t)(first + done) * size, piece, (size_t)n * size));
        for (int64_t i = 0; i < n; i++) {
            double value = load_value(piece + (size_t)i * size, entry->dtype);
            if (out_dtype == DTYPE_F64) {
                ((double *)out)[done + i] = value;
            } else {
                ((float *)out)[done + i] = (float)value;
            }
        }
    }
    return STATUS_OK;
}

/* ---- writing ---- */

struct safetensors_writer {
    int file;
    char *path;
    uint64_t data_bytes; /* of all tensors */
    uint64_t written;    /* of these so far */
    struct xxh64 checksum;
    enum status status; /* of the first failure, kept with its message for safetensors_finish */
    char message[512];
};

static enum status keep_failure(struct safetensors_writer *w, enum status status) {
    if (status != STATUS_OK && w->status == STATUS_OK) {
        w->status = status;
        snprintf(w->message, sizeof w->message, "%s", error_message());
    }
    return status;
}

static enum status write_bytes(struct safetensors_writer *w, const void *data, size_t bytes) {
    CHECK(stream_write(w->file, w->path, data, bytes));
    xxh64_update(&w->checksum, data, bytes);
    return STATUS_OK;
}

/* Gives every entry its offsets, in their order. */
static enum status place_entries(
    struct safetensors_writer *w, struct safetensors_entry *entries, size_t count) {
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t bytes;
        if (!tensor_bytes(&entries[i], &bytes) || bytes > (uint64_t)INT64_MAX - end) {
            return fail("%s: tensor \"%s\" is too large", w->path, entries[i].name);
        }
        entries[i].begin = end;
        end += bytes;
        entries[i].end = end;
    }
    w->data_bytes = end;
    return STATUS_OK;
}

static void write_header_json(struct json_writer *json, const struct safetensors_entry *entries, size_t count,
    const char *const *metadata_keys, const char *const *metadata_values, size_t metadata_count) {
    json_begin_object(json);
    if (metadata_count > 0) {
        json_key(json, METADATA_KEY);
        json_begin_object(json);
        for (size_t i = 0; i < metadata_count; i++) {
            json_string_member(json, metadata_keys[i], metadata_values[i]);
        }
        json_end_object(json);
    }
    for (size_t i = 0; i < count; i++) {
        json_key(json, entries[i].name);
        json_begin_object(json);
        json_string_member(json, "dtype", dtype_name(entries[i].dtype));
        json_key(json, "shape");
        json_begin_array(json);
        for (int d = 0; d < entries[i].dimensions; d++) {
            json_integer(json, entries[i].shape[d]);
        }
        json_end_array(json);
        json_key(json, "data_offsets");
        json_begin_array(json);
        json_integer(json, (int64_t)entries[i].begin);
        json_integer(json, (int64_t)entries[i].end);
        json_end_array(json);
        json_end_object(json);
    }
    json_end_object(json);
}

static enum status write_header(struct safetensors_writer *w, const char *text, size_t bytes) {
    uint64_t length = (uint64_t)round_up((int64_t)bytes, ALIGNMENT);
    if (length > MAX_HEADER_BYTES) {
        return fail("%s: a header of %" PRIu64 " bytes is over the format's limit", w->path, length);
    }
    CHECK(write_bytes(w, &length, sizeof length));
    CHECK(write_bytes(w, text, bytes));
    return write_bytes(w, "        ", (size_t)length - bytes);
}

static void free_writer(struct safetensors_writer *w) {
    if (w->file >= 0) {
        close(w->file);
    }
    free(w->path);
    free(w);
}

enum status safetensors_create(struct safetensors_writer **out, const char *path,
    struct safetensors_entry *entries, size_t count, const char *const *metadata_keys,
    const char *const *metadata_values, size_t metadata_count) {
    enum status status = STATUS_OK;
    struct safetensors_writer *w = NULL;
    struct json_writer json;
    char *text = NULL;
    size_t bytes;
    *out = NULL;
    CHECK(ALLOCATE(w, 1));
    xxh64_init(&w->checksum);
    w->file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w->file < 0) {
        status = fail("%s: cannot create: %s", path, strerror(errno));
        goto cleanup;
    }
    w->path = string_copy(path);
    if (w->path == NULL) {
        status = STATUS_OUT_OF_MEMORY;
        goto cleanup;
    }
    CHECK_CLEANUP(place_entries(w, entries, count));
    json_writer_init(&json, false);
    write_header_json(&json, entries, count, metadata_keys, metadata_values, metadata_count);
    CHECK_CLEANUP(json_writer_finish(&json, &text, &bytes));
    CHECK_CLEANUP(write_header(w, text, bytes));
    *out = w;
    w = NULL;
cleanup:
    free(text);
    if (w != NULL) {
        free_writer(w);
    }
    return status;
}

enum status safetensors_write(struct safetensors_writer *w, const void *data, size_t bytes) {
    if (w->status != STATUS_OK) {
        return fail_as(w->status, "%s", w->message);
    }
    if (bytes > w->data_bytes - w->written) {
        return keep_failure(
            w, fail("%s: more data than the %" PRIu64 " bytes of its tensors", w->path, w->data_bytes));
    }
    w->written += bytes;
    return keep_failure(w, write_bytes(w, data, bytes));
}

/* On disk, or an error. */
static enum status flush_and_close(struct safetensors_writer *w) {
    if (w->status != STATUS_OK) {
        return fail_as(w->status, "%s", w->message);
    }
    if (w->written != w->data_bytes) {
        return fail("%s: %" PRIu64 " of the %" PRIu64 " bytes of its tensors were written", w->path,
            w->written, w->data_bytes);
    }
    if (fsync(w->file) != 0) {
        return fail("%s: cannot write to disk: %s", w->path, strerror(errno));
    }
    int file = w->file;
    w->file = -1;
    return close(file) == 0 ? STATUS_OK : fail("%s: cannot write: %s", w->path, strerror(errno));
}

enum status safetensors_finish(struct safetensors_writer *w, uint64_t *xxh64, uint64_t *bytes) {
    enum status status = flush_and_close(w);
    if (xxh64 != NULL) {
        *xxh64 = xxh64_digest(&w->checksum);
    }
    if (bytes != NULL) {
        *bytes = w->checksum.total_bytes;
    }
    free_writer(w);
    return status;
}
