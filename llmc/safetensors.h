/* safetensors: 8 bytes header length N (little-endian), N bytes of JSON, then the tensors' bytes without holes. */
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SAFETENSORS_MAX_DIMENSIONS = 8 };

struct safetensors_entry {
    char *name;
    enum dtype dtype;
    int dimensions;
    int64_t shape[SAFETENSORS_MAX_DIMENSIONS];
    uint64_t begin, end; /* bytes, relative to the data */
};

/* Reading: header checked completely (types, shapes, offsets against each other and the file's size). */
struct safetensors {
    char *path;
    size_t count;
    struct safetensors_entry *entries; /* by ascending offset */
    uint64_t data_offset, file_bytes;
    size_t metadata_count; /* __metadata__ */
    char **metadata_keys, **metadata_values;
    int file; /* descriptor */
};
enum status safetensors_open(struct safetensors **out, const char *path);
void safetensors_close(struct safetensors *file);
const struct safetensors_entry *safetensors_find(
    const struct safetensors *file, const char *name);                             /* NULL: none */
const char *safetensors_metadata(const struct safetensors *file, const char *key); /* NULL: none */
/* Bytes [offset, offset + bytes) of the tensor; safe from several threads. */
enum status safetensors_read(const struct safetensors *file, const struct safetensors_entry *entry,
    uint64_t offset, void *data, size_t bytes);
/* Elements [first, first + count) of a tensor of floating-point numbers, converted to out_dtype: F32 or F64. */
enum status safetensors_read_values(const struct safetensors *file, const struct safetensors_entry *entry,
    int64_t first, int64_t count, void *out, enum dtype out_dtype);

/* Writing: all entries first (name, dtype, dimensions, shape; begin and end are set here), then their data in order,
   in pieces of any size. A checksum of the whole file comes out. */
struct safetensors_writer;
enum status safetensors_create(struct safetensors_writer **out, const char *path,
    struct safetensors_entry *entries, size_t count, const char *const *metadata_keys,
    const char *const *metadata_values, size_t metadata_count);
enum status safetensors_write(struct safetensors_writer *writer, const void *data, size_t bytes);
/* Flushes, fsyncs and closes; an error (also of an earlier write) is told here at the latest. The file's checksum and
   size are stored where xxh64 and bytes are not NULL. Frees the writer always. */
enum status safetensors_finish(struct safetensors_writer *writer, uint64_t *xxh64, uint64_t *bytes);

#ifdef __cplusplus
}
#endif

#endif
