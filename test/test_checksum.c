/* llmc/checksum.c against published values of XXH64 with seed 0. */
#include "llmc/checksum.h"
#include "test.h"

#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

/* The buffer of xxHash's own sanity check: the top bytes of p, p q, p q^2, ... for two of its primes. */
static void fill_sanity_buffer(uint8_t *buffer, size_t bytes) {
    uint64_t generator = 2654435761u;
    for (size_t i = 0; i < bytes; i++) {
        buffer[i] = (uint8_t)(generator >> 56);
        generator *= UINT64_C(11400714785074694797);
    }
}

static void test_published_values(void) {
    static const struct {
        const char *text;
        uint64_t expected;
    } texts[] = {
        {"", UINT64_C(0xEF46DB3751D8E999)},
        {"a", UINT64_C(0xD24EC4F1A98C6E5B)},
        {"abc", UINT64_C(0x44BC2CF5AD770999)},
        {"Nobody inspects the spammish repetition", UINT64_C(0xFBCEA83C8A378BF1)},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        EXPECT(xxh64_of(texts[i].text, strlen(texts[i].text)) == texts[i].expected);
    }
    /* lengths that end in each of the tails: none, bytes, 4-byte and 8-byte words, stripes */
    static const struct {
        size_t bytes;
        uint64_t expected;
    } lengths[] = {
        {0, UINT64_C(0xEF46DB3751D8E999)},
        {1, UINT64_C(0xE934A84ADB052768)},
        {4, UINT64_C(0x9136A0DCA57457EE)},
        {14, UINT64_C(0x8282DCC4994E35C8)},
        {222, UINT64_C(0xB641AE8CB691C174)},
    };
    uint8_t buffer[222];
    fill_sanity_buffer(buffer, sizeof buffer);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        EXPECT(xxh64_of(buffer, lengths[i].bytes) == lengths[i].expected);
    }
}

static void test_pieces_of_any_size_give_the_checksum_of_the_whole(void) {
    uint8_t buffer[222];
    fill_sanity_buffer(buffer, sizeof buffer);
    for (size_t piece = 1; piece <= sizeof buffer; piece++) {
        struct xxh64 state;
        xxh64_init(&state);
        xxh64_update(&state, NULL, 0);
        for (size_t done = 0; done < sizeof buffer; done += piece) {
            size_t left = sizeof buffer - done;
            xxh64_update(&state, buffer + done, piece < left ? piece : left);
        }
        EXPECT(xxh64_digest(&state) == UINT64_C(0xB641AE8CB691C174));
    }
}

static void test_every_flipped_bit_changes_it(void) {
    uint8_t buffer[77];
    fill_sanity_buffer(buffer, sizeof buffer);
    uint64_t right = xxh64_of(buffer, sizeof buffer);
    for (size_t bit = 0; bit < 8 * sizeof buffer; bit++) {
        buffer[bit / 8] ^= (uint8_t)(1 << bit % 8);
        EXPECT(xxh64_of(buffer, sizeof buffer) != right);
        buffer[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

static void test_a_file_has_the_checksum_of_its_bytes(void) {
    const char *parent = getenv("TMPDIR");
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/test_checksum.XXXXXX", parent != NULL ? parent : "/tmp");
    int file = mkstemp(path);
    EXPECT(file >= 0);
    close(file);
    size_t bytes = (3u << 20) + 13; /* several pieces, the last one odd */
    uint8_t *buffer = malloc(bytes);
    fill_sanity_buffer(buffer, bytes);
    EXPECT(file_write_all(path, buffer, bytes) == STATUS_OK);
    uint64_t digest = 0;
    EXPECT(xxh64_file(path, &digest) == STATUS_OK);
    EXPECT(digest == xxh64_of(buffer, bytes));
    free(buffer);
    unlink(path);
    EXPECT(xxh64_file(path, &digest) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), path);
}

int main(void) {
    RUN(test_published_values);
    RUN(test_pieces_of_any_size_give_the_checksum_of_the_whole);
    RUN(test_every_flipped_bit_changes_it);
    RUN(test_a_file_has_the_checksum_of_its_bytes);
    return test_summary();
}
