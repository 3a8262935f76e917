/* XXH64 (Collet; the published specification), seed 0: what the tool xxh64sum prints. */
#ifndef LLMC_CHECKSUM_H
#define LLMC_CHECKSUM_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A checksum under way: init, any number of updates, digest. Pieces of any size give what the whole gives. */
struct xxh64 {
    uint64_t lane[4];
    uint64_t total_bytes;
    uint8_t buffer[32];
    size_t buffered;
};
void xxh64_init(struct xxh64 *state);
void xxh64_update(struct xxh64 *state, const void *data, size_t bytes);
uint64_t xxh64_digest(const struct xxh64 *state);
/* The whole at once. */
uint64_t xxh64_of(const void *data, size_t bytes);
/* Of a regular file; errors name it and the system's reason. */
enum status xxh64_file(const char *path, uint64_t *digest);

#ifdef __cplusplus
}
#endif

#endif
