/* The pattern of GPT-2's words, as a scanner. Each of its alternatives is a run of characters of one class (letters,
   numbers, spaces, others), so reading classes is all it takes. */
#include "pretokenizer.h"

#include "unicode_tables.h"
#include "utf8.h"

enum { LONGEST_CHAR = 4 };

/* Class and bytes of the character at text[0, bytes), bytes > 0; of one byte if there is none. */
static inline enum char_class read_char(const uint8_t *text, size_t bytes, size_t *length) {
    uint32_t code;
    if (text[0] < 0x80) {
        *length = 1;
        return (enum char_class)ascii_classes[text[0]];
    }
    *length = utf8_decode((const char *)text, bytes, &code);
    if (*length == 0) {
        *length = 1;
        return CLASS_BROKEN;
    }
    return unicode_class(code);
}

/* Where the word that goes on at text[at] ends: before the first character of another class than its first's. */
static inline size_t word_end(const uint8_t *text, size_t at, size_t bytes) {
    enum char_class word_class = CLASS_BROKEN;
    for (size_t length; at < bytes; at += length) {
        enum char_class char_class = read_char(text + at, bytes - at, &length);
        if (char_class != word_class && char_class != CLASS_BROKEN) {
            if (word_class != CLASS_BROKEN || char_class == CLASS_SPACE) {
                break;
            }
            word_class = char_class;
        }
    }
    return at;
}

/* Bytes of 's 't 'd 'm 'll 've 're at the apostrophe text[0]; 0 if it is none of them. */
static size_t contraction(const uint8_t *text, size_t bytes) {
    if (bytes >= 2 && (text[1] == 's' || text[1] == 't' || text[1] == 'd' || text[1] == 'm')) {
        return 2;
    }
    if (bytes >= 3 && ((text[1] == 'l' && text[2] == 'l') || (text[1] == 'v' && text[2] == 'e') ||
                          (text[1] == 'r' && text[2] == 'e'))) {
        return 3;
    }
    return 0;
}

/* A run of spaces leaves its last one to the word after it, unless it is the only one. */
static size_t spaces(const uint8_t *text, size_t bytes) {
    size_t at = 0, last = 0, length;
    while (at < bytes && read_char(text + at, bytes - at, &length) == CLASS_SPACE) {
        last = at;
        at += length;
    }
    return at == bytes || last == 0 ? at : last;
}

size_t pretokenizer_next(const uint8_t *text, size_t bytes) {
    if (text[0] == '\'') {
        size_t length = contraction(text, bytes);
        if (length > 0) {
            return length;
        }
    }
    size_t first = text[0] == ' ' && bytes > 1; /* bytes of the space that may lead a word */
    size_t length;
    bool is_space = read_char(text + first, bytes - first, &length) == CLASS_SPACE;
    return is_space ? spaces(text, bytes) : word_end(text, first, bytes);
}

/* Class of the character that ends before text[end], end > 0. */
static enum char_class class_before(const uint8_t *text, size_t end) {
    for (size_t count = 1; count <= LONGEST_CHAR && count <= end; count++) {
        size_t length;
        enum char_class before = read_char(text + end - count, count, &length);
        if (length == count && (count > 1 || text[end - 1] < 0x80)) {
            return before;
        }
    }
    return CLASS_BROKEN;
}

/* A word of letters or numbers ends for good where a character of another class begins, and every word where a space
   does; between the apostrophe and the s of 's there must be no cut. The last bytes may be part of a character. */
size_t pretokenizer_cut(const uint8_t *text, size_t bytes) {
    for (size_t at = bytes < LONGEST_CHAR ? 0 : bytes - LONGEST_CHAR; at > 0; at--) {
        size_t length;
        enum char_class after = read_char(text + at, bytes - at, &length), before = class_before(text, at);
        bool before_is_word = before == CLASS_LETTER || before == CLASS_NUMBER;
        if ((before_is_word && after != before && after != CLASS_BROKEN) ||
            (before != CLASS_SPACE && after == CLASS_SPACE)) {
            return at;
        }
    }
    return 0;
}
