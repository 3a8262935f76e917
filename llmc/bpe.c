/* Byte-pair encoding. Two hash tables do the work: one from words to tokens, which settles most words at once, and one
   from pairs of tokens to their merge. A short word is merged in place, each step a look at all its pairs; a long one
   through a heap of possible merges, in O(n log n). */
#include "bpe.h"

#include "pretokenizer.h"

#include <stdlib.h>

enum { SHORT_WORD = 48, START_BYTES = 8, LEAST_BITS = 4 };
#define HASH_FACTOR UINT64_C(0x9e3779b97f4a7c15) /* 2^64 / golden ratio: Fibonacci hashing */

/* Bits of the number of slots for `count` entries. */
static int table_bits(int64_t count) {
    int bits = LEAST_BITS;
    while (INT64_C(1) << bits < 2 * count) {
        bits++;
    }
    return bits;
}

/* ---- pairs ---- */

static inline struct pair_slot *find_pair_slot(const struct tokenizer *t, int32_t left, int32_t right) {
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint64_t mask = (UINT64_C(1) << t->pair_bits) - 1;
    uint64_t at = pair * HASH_FACTOR >> (64 - t->pair_bits);
    while (t->pairs[at].pair != pair && t->pairs[at].pair != BPE_NO_PAIR) {
        at = (at + 1) & mask;
    }
    return &t->pairs[at];
}

/* rank << 32 | token, or BPE_NO_MERGE, which empty slots hold. */
static inline uint64_t find_merge(const struct tokenizer *t, int32_t left, int32_t right) {
    return find_pair_slot(t, left, right)->merge;
}

/* ---- words ---- */

/* The first eight bytes, zeros after the end. `readable` bytes may be looked at, so that most loads need no loop. */
static inline uint64_t load_start(const uint8_t *word, size_t length, size_t readable) {
    uint64_t start = 0;
    if (readable >= START_BYTES) {
        memcpy(&start, word, START_BYTES);
        return length >= START_BYTES ? start : start & ((UINT64_C(1) << 8 * length) - 1);
    }
    for (size_t i = 0; i < length; i++) {
        start |= (uint64_t)word[i] << 8 * i;
    }
    return start;
}

/* The slot of the word, or the empty one where it would be. */
static inline struct word_slot *find_word_slot(
    const struct tokenizer *t, const uint8_t *word, size_t length, size_t readable) {
    uint64_t start = load_start(word, length, readable), hash = (start ^ length) * HASH_FACTOR;
    for (size_t i = START_BYTES; i < length; i++) {
        hash = (hash ^ hash >> 32 ^ word[i]) * HASH_FACTOR;
    }
    uint64_t mask = (UINT64_C(1) << t->word_bits) - 1;
    for (uint64_t at = hash >> (64 - t->word_bits);; at = (at + 1) & mask) {
        struct word_slot *slot = &t->words[at];
        if (slot->length == 0) {
            return slot;
        }
        if (slot->start == start && slot->length == length &&
            (length <= START_BYTES || memcmp(t->bytes + t->offsets[slot->token], word, length) == 0)) {
            return slot;
        }
    }
}

int32_t bpe_find(const struct tokenizer *t, const uint8_t *bytes, size_t count) {
    return count == 0 ? -1 : find_word_slot(t, bytes, count, count)->token;
}

/* ---- building ---- */

static void token_bytes(const struct tokenizer *t, int32_t token, const uint8_t **bytes, size_t *count) {
    *bytes = (const uint8_t *)t->bytes + t->offsets[token];
    *count = t->offsets[token + 1] - t->offsets[token];
}

static enum status copy_tokens(
    struct tokenizer *t, const struct bpe_text *tokens, int32_t end_of_text, const char *name) {
    size_t all_bytes = 0;
    for (int32_t i = 0; i < t->vocab_size; i++) {
        if (tokens[i].bytes > BPE_MAX_TOKEN_BYTES || (tokens[i].bytes == 0 && i != end_of_text)) {
            return fail("%s: token %d has %u bytes; tokens have 1 to %d", name, i, tokens[i].bytes,
                BPE_MAX_TOKEN_BYTES);
        }
        all_bytes += i == end_of_text ? 0 : tokens[i].bytes;
    }
    if (all_bytes > UINT32_MAX / 2) {
        return fail("%s: its tokens have more than 2 GiB", name);
    }
    CHECK(ALLOCATE(t->bytes, all_bytes));
    CHECK(ALLOCATE(t->offsets, t->vocab_size + 1));
    for (int32_t i = 0; i < t->vocab_size; i++) {
        uint32_t bytes = i == end_of_text ? 0 : tokens[i].bytes;
        memcpy(t->bytes + t->offsets[i], bytes > 0 ? tokens[i].text : "", bytes);
        t->offsets[i + 1] = t->offsets[i] + bytes;
    }
    return STATUS_OK;
}

/* The table of words with all tokens, or with those that `keep` says. */
static enum status fill_words(struct tokenizer *t, const bool *keep, const char *name) {
    size_t slots = (size_t)1 << t->word_bits;
    for (size_t i = 0; i < slots; i++) {
        t->words[i] = (struct word_slot){0, 0, -1};
    }
    for (int32_t token = 0; token < t->vocab_size; token++) {
        const uint8_t *bytes;
        size_t count;
        token_bytes(t, token, &bytes, &count);
        if (token == t->end_of_text || (keep != NULL && !keep[token])) {
            continue;
        }
        struct word_slot *slot = find_word_slot(t, bytes, count, count);
        if (slot->length != 0) {
            return fail("%s: tokens %d and %d are the same bytes", name, slot->token, token);
        }
        *slot = (struct word_slot){load_start(bytes, count, count), (uint32_t)count, token};
    }
    return STATUS_OK;
}

static enum status find_byte_tokens(struct tokenizer *t, const char *name) {
    for (int value = 0; value < BYTE_VALUES; value++) {
        uint8_t byte = (uint8_t)value;
        t->byte_tokens[value] = bpe_find(t, &byte, 1);
        if (t->byte_tokens[value] < 0) {
            return fail("%s: no token for the byte 0x%02x; a byte-level vocabulary has all 256", name, value);
        }
    }
    return STATUS_OK;
}

enum status bpe_create(struct tokenizer **out, const struct bpe_text *tokens, int32_t count,
    int32_t end_of_text, int32_t merge_capacity, const char *name) {
    struct tokenizer *t;
    CHECK(ALLOCATE(*out, 1));
    t = *out;
    t->vocab_size = count;
    t->end_of_text = end_of_text;
    t->merge_capacity = merge_capacity;
    t->word_bits = table_bits(count);
    t->pair_bits = table_bits(merge_capacity);
    CHECK(copy_tokens(t, tokens, end_of_text, name));
    CHECK(ALLOCATE(t->words, (size_t)1 << t->word_bits));
    CHECK(ALLOCATE(t->pairs, (size_t)1 << t->pair_bits));
    CHECK(ALLOCATE(t->merges, merge_capacity));
    memset(t->pairs, 0xff, ((size_t)1 << t->pair_bits) * sizeof *t->pairs); /* BPE_NO_PAIR, BPE_NO_MERGE */
    CHECK(fill_words(t, NULL, name));
    return find_byte_tokens(t, name);
}

enum status bpe_add_merge(struct tokenizer *t, int32_t left, int32_t right, const char *name) {
    uint8_t joined[2 * BPE_MAX_TOKEN_BYTES];
    const uint8_t *left_bytes, *right_bytes;
    size_t left_count, right_count;
    int32_t rank = t->merge_count;
    if (rank == t->merge_capacity) {
        return fail("%s: more merges than announced", name);
    }
    token_bytes(t, left, &left_bytes, &left_count);
    token_bytes(t, right, &right_bytes, &right_count);
    memcpy(joined, left_bytes, left_count);
    memcpy(joined + left_count, right_bytes, right_count);
    int32_t token = bpe_find(t, joined, left_count + right_count);
    if (token < 0) {
        return fail("%s: merge %d makes a token that the vocabulary does not have", name, rank + 1);
    }
    struct pair_slot *slot = find_pair_slot(t, left, right);
    if (slot->pair != BPE_NO_PAIR) {
        return fail(
            "%s: merge %d is there before, as merge %d", name, rank + 1, (int)(slot->merge >> 32) + 1);
    }
    slot->pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    slot->merge = (uint64_t)(uint32_t)rank << 32 | (uint32_t)token;
    t->merges[t->merge_count++] = (struct bpe_merge){left, right, token};
    return STATUS_OK;
}

/* A token that its own bytes do not merge to, for instance one that was added by hand, is no word's. */
enum status bpe_finish(struct tokenizer *t) {
    enum status status = STATUS_OK;
    bool *keep = NULL;
    int32_t *tokens = NULL;
    CHECK_CLEANUP(ALLOCATE(keep, t->vocab_size));
    CHECK_CLEANUP(ALLOCATE(tokens, BPE_MAX_TOKEN_BYTES));
    for (int32_t token = 0; token < t->vocab_size; token++) {
        const uint8_t *bytes;
        size_t length, count;
        token_bytes(t, token, &bytes, &length);
        CHECK_CLEANUP(bpe_merge_word(t, bytes, length, tokens, &count));
        keep[token] = count == 1 && tokens[0] == token;
    }
    CHECK_CLEANUP(fill_words(t, keep, ""));
cleanup:
    free(tokens);
    free(keep);
    return status;
}

void bpe_free(struct tokenizer *t) {
    if (t != NULL) {
        free(t->bytes);
        free(t->offsets);
        free(t->merges);
        free(t->pairs);
        free(t->words);
        free(t);
    }
}

/* ---- encoding ---- */

/* tokens[0, length) are the word's bytes at first. merges[i] joins tokens i and i + 1. */
static size_t merge_short_word(const struct tokenizer *t, int32_t *tokens, size_t length) {
    uint64_t merges[SHORT_WORD];
    size_t count = length;
    for (size_t i = 0; i + 1 < count; i++) {
        merges[i] = find_merge(t, tokens[i], tokens[i + 1]);
    }
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) {
            best = merges[i] < merges[best] ? i : best;
        }
        if (merges[best] == BPE_NO_MERGE) {
            break;
        }
        tokens[best] = (int32_t)(uint32_t)merges[best];
        count--;
        memmove(tokens + best + 1, tokens + best + 2, (count - best - 1) * sizeof *tokens);
        memmove(merges + best, merges + best + 1, (count - best - 1) * sizeof *merges);
        if (best > 0) {
            merges[best - 1] = find_merge(t, tokens[best - 1], tokens[best]);
        }
        if (best + 1 < count) {
            merges[best] = find_merge(t, tokens[best], tokens[best + 1]);
        }
    }
    return count;
}

/* A long word's tokens as a list in both directions, each at the place of its first byte, and the merges that were
   possible when they were found: rank << 32 | place, in a heap with the lowest on top. */
struct long_word {
    const struct tokenizer *tokenizer;
    int32_t *tokens; /* -1: became part of the one before */
    uint32_t *next, *previous;
    uint32_t length;
    uint64_t *heap;
    size_t heap_count;
};

static void heap_push(struct long_word *w, uint64_t value) {
    size_t at = w->heap_count++;
    while (at > 0 && w->heap[(at - 1) / 2] > value) {
        w->heap[at] = w->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    w->heap[at] = value;
}

static uint64_t heap_pop(struct long_word *w) {
    uint64_t top = w->heap[0], last = w->heap[--w->heap_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < w->heap_count; at = child) {
        if (child + 1 < w->heap_count && w->heap[child + 1] < w->heap[child]) {
            child++;
        }
        if (w->heap[child] >= last) {
            break;
        }
        w->heap[at] = w->heap[child];
    }
    w->heap[at] = last;
    return top;
}

/* The merge of the token at `place` with the one after it. */
static uint64_t merge_at(const struct long_word *w, uint32_t place) {
    if (w->tokens[place] < 0 || w->next[place] == w->length) {
        return BPE_NO_MERGE;
    }
    return find_merge(w->tokenizer, w->tokens[place], w->tokens[w->next[place]]);
}

static void push_merge_at(struct long_word *w, uint32_t place) {
    uint64_t merge = merge_at(w, place);
    if (merge != BPE_NO_MERGE) {
        heap_push(w, merge >> 32 << 32 | place);
    }
}

static void merge_all(struct long_word *w) {
    for (uint32_t i = 0; i < w->length; i++) {
        w->previous[i] = i - 1; /* never asked for at 0 */
        w->next[i] = i + 1;
    }
    for (uint32_t i = 0; i < w->length; i++) {
        push_merge_at(w, i);
    }
    while (w->heap_count > 0) {
        uint64_t top = heap_pop(w);
        uint32_t place = (uint32_t)top;
        uint64_t merge = merge_at(w, place);
        if (merge == BPE_NO_MERGE || merge >> 32 != top >> 32) {
            continue; /* its tokens have merged with others since */
        }
        uint32_t gone = w->next[place];
        w->tokens[place] = (int32_t)(uint32_t)merge;
        w->tokens[gone] = -1;
        w->next[place] = w->next[gone];
        if (w->next[place] < w->length) {
            w->previous[w->next[place]] = place;
            push_merge_at(w, place);
        }
        if (place > 0) {
            push_merge_at(w, w->previous[place]);
        }
    }
}

/* As merge_short_word. A merge takes one token away and finds at most two new merges: 3 length in the heap at most. */
static enum status merge_long_word(const struct tokenizer *t, int32_t *tokens, size_t length, size_t *count) {
    struct long_word w = {.tokenizer = t, .tokens = tokens, .length = (uint32_t)length};
    enum status status = STATUS_OK;
    if (length > UINT32_MAX / 4) {
        return fail("a word of %zu bytes: too long to encode", length);
    }
    CHECK_CLEANUP(ALLOCATE(w.next, length));
    CHECK_CLEANUP(ALLOCATE(w.previous, length));
    CHECK_CLEANUP(ALLOCATE(w.heap, 3 * length));
    merge_all(&w);
    *count = 0;
    for (size_t i = 0; i < length; i++) {
        if (tokens[i] >= 0) {
            tokens[(*count)++] = tokens[i];
        }
    }
cleanup:
    free(w.heap);
    free(w.previous);
    free(w.next);
    return status;
}

enum status bpe_merge_word(
    const struct tokenizer *t, const uint8_t *word, size_t length, int32_t *tokens, size_t *count) {
    for (size_t i = 0; i < length; i++) {
        tokens[i] = t->byte_tokens[word[i]];
    }
    if (length > SHORT_WORD) {
        return merge_long_word(t, tokens, length, count);
    }
    *count = merge_short_word(t, tokens, length);
    return STATUS_OK;
}

enum status bpe_encode(
    const struct tokenizer *t, const uint8_t *text, size_t bytes, int32_t *tokens, size_t *count) {
    size_t length, used = 0, word_tokens;
    for (size_t at = 0; at < bytes; at += length) {
        length = pretokenizer_next(text + at, bytes - at);
        int32_t token = find_word_slot(t, text + at, length, bytes - at)->token;
        if (token >= 0) {
            tokens[used++] = token;
        } else {
            CHECK(bpe_merge_word(t, text + at, length, tokens + used, &word_tokens));
            used += word_tokens;
        }
    }
    *count = used;
    return STATUS_OK;
}
