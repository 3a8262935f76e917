/* UTF-8 (RFC 3629). */
#ifndef LLMC_UTF8_H
#define LLMC_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the well-formed character at text[0, bytes), bytes > 0, and its code point; 0 if there is none. */
static inline size_t utf8_decode(const char *text, size_t bytes, uint32_t *code) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000}; /* that needs so many bytes */
    const uint8_t *c = (const uint8_t *)text;
    size_t length = c[0] < 0x80   ? 1
                    : c[0] < 0xc2 ? 0
                    : c[0] < 0xe0 ? 2
                    : c[0] < 0xf0 ? 3
                    : c[0] < 0xf5 ? 4
                                  : 0;
    if (length == 0 || length > bytes) {
        return 0;
    }
    *code = length == 1 ? c[0] : c[0] & (0x7fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((c[i] & 0xc0) != 0x80) {
            return 0;
        }
        *code = *code << 6 | (c[i] & 0x3fu);
    }
    bool surrogate = *code >= 0xd800 && *code < 0xe000;
    return *code >= least[length] && *code <= 0x10ffff && !surrogate ? length : 0;
}

/* Writes a code point that is no surrogate; returns its bytes. */
static inline size_t utf8_encode(char out[4], uint32_t code) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    out[0] = (char)((0xf00 >> length & 0xf0) | code);
    return length;
}

#endif
