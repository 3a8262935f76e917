/* XXH64: four 64-bit lanes each take every fourth 8-byte word of the input in stripes of 32 bytes; at the end the
   lanes are merged, the last bytes mixed in, and the bits spread. Words are little-endian, as this program's machines
   are. */
#include "checksum.h"

#include <stdlib.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "files are read and written in the machine's byte order, which must be little-endian"
#endif

/* the specification's five primes */
#define PRIME1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME3 UINT64_C(0x165667B19E3779F9)
#define PRIME4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME5 UINT64_C(0x27D4EB2F165667C5)

enum { STRIPE_BYTES = 32, FILE_PIECE_BYTES = 1 << 20 };

static uint64_t rotate_left(uint64_t value, int bits) {
    return value << bits | value >> (64 - bits);
}

static uint64_t load64(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static uint64_t load32(const uint8_t *bytes) {
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static uint64_t mix(uint64_t lane, uint64_t word) {
    return rotate_left(lane + word * PRIME2, 31) * PRIME1;
}

void xxh64_init(struct xxh64 *state) {
    memset(state, 0, sizeof *state);
    state->lane[0] = PRIME1 + PRIME2;
    state->lane[1] = PRIME2;
    state->lane[2] = 0;
    state->lane[3] = -PRIME1;
}

/* Whole stripes. */
static void take_stripes(struct xxh64 *state, const uint8_t *data, size_t stripes) {
    uint64_t a = state->lane[0], b = state->lane[1], c = state->lane[2], d = state->lane[3];
    for (size_t i = 0; i < stripes; i++, data += STRIPE_BYTES) {
        a = mix(a, load64(data));
        b = mix(b, load64(data + 8));
        c = mix(c, load64(data + 16));
        d = mix(d, load64(data + 24));
    }
    state->lane[0] = a;
    state->lane[1] = b;
    state->lane[2] = c;
    state->lane[3] = d;
}

void xxh64_update(struct xxh64 *state, const void *data, size_t bytes) {
    const uint8_t *next = data;
    if (bytes == 0) { /* data may be NULL */
        return;
    }
    state->total_bytes += bytes;
    if (state->buffered > 0) {
        size_t wanted = STRIPE_BYTES - state->buffered;
        size_t taken = bytes < wanted ? bytes : wanted;
        memcpy(state->buffer + state->buffered, next, taken);
        state->buffered += taken;
        next += taken;
        bytes -= taken;
        if (state->buffered < STRIPE_BYTES) {
            return;
        }
        take_stripes(state, state->buffer, 1);
        state->buffered = 0;
    }
    take_stripes(state, next, bytes / STRIPE_BYTES);
    next += bytes - bytes % STRIPE_BYTES;
    state->buffered = bytes % STRIPE_BYTES;
    memcpy(state->buffer, next, state->buffered);
}

uint64_t xxh64_digest(const struct xxh64 *state) {
    const uint64_t *lane = state->lane;
    uint64_t hash = PRIME5;
    if (state->total_bytes >= STRIPE_BYTES) {
        hash = rotate_left(lane[0], 1) + rotate_left(lane[1], 7) + rotate_left(lane[2], 12) +
               rotate_left(lane[3], 18);
        for (int i = 0; i < 4; i++) {
            hash = (hash ^ mix(0, lane[i])) * PRIME1 + PRIME4;
        }
    }
    hash += state->total_bytes;
    const uint8_t *next = state->buffer, *end = state->buffer + state->buffered;
    for (; end - next >= 8; next += 8) {
        hash = rotate_left(hash ^ mix(0, load64(next)), 27) * PRIME1 + PRIME4;
    }
    for (; end - next >= 4; next += 4) {
        hash = rotate_left(hash ^ load32(next) * PRIME1, 23) * PRIME2 + PRIME3;
    }
    for (; next < end; next++) {
        hash = rotate_left(hash ^ *next * PRIME5, 11) * PRIME1;
    }
    hash = (hash ^ hash >> 33) * PRIME2;
    hash = (hash ^ hash >> 29) * PRIME3;
    return hash ^ hash >> 32;
}

uint64_t xxh64_of(const void *data, size_t bytes) {
    struct xxh64 state;
    xxh64_init(&state);
    xxh64_update(&state, data, bytes);
    return xxh64_digest(&state);
}

enum status xxh64_file(const char *path, uint64_t *digest) {
    enum status status = STATUS_OK;
    uint8_t *piece = NULL;
    struct xxh64 state;
    xxh64_init(&state);
    int file;
    uint64_t bytes;
    CHECK(file_open(path, &file, &bytes));
    CHECK_CLEANUP(ALLOCATE(piece, FILE_PIECE_BYTES));
    for (size_t got = 1; got > 0;) {
        CHECK_CLEANUP(stream_read(file, path, piece, FILE_PIECE_BYTES, &got));
        xxh64_update(&state, piece, got);
    }
    *digest = xxh64_digest(&state);
cleanup:
    free(piece);
    close(file);
    return status;
}
