/* Classes of Unicode characters, as GPT-2's pre-tokenisation needs them: \p{L}, \p{N}, \s. The tables are of Unicode
   16.0, which tiktoken's regular expressions know too; scripts/unicode_tables.py writes them. */
#ifndef LLMC_UNICODE_TABLES_H
#define LLMC_UNICODE_TABLES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum char_class {
    CLASS_OTHER,
    CLASS_LETTER,
    CLASS_NUMBER,
    CLASS_SPACE,
    CLASS_BROKEN /* in no table: a byte of no well-formed character */
};

enum { UNICODE_BLOCK = 128 }; /* code points */

extern const uint8_t ascii_classes[128];
extern const uint32_t unicode_end;          /* all from here on are CLASS_OTHER */
extern const uint8_t unicode_block_index[]; /* code / UNICODE_BLOCK -> its block */
extern const uint8_t
    unicode_blocks[][UNICODE_BLOCK / 4]; /* four classes a byte, the first in the lowest bits */

static inline enum char_class unicode_class(uint32_t code) {
    if (code >= unicode_end) {
        return CLASS_OTHER;
    }
    uint8_t four = unicode_blocks[unicode_block_index[code / UNICODE_BLOCK]][code % UNICODE_BLOCK / 4];
    return (enum char_class)(four >> 2 * (code % 4) & 3);
}

#ifdef __cplusplus
}
#endif

#endif
