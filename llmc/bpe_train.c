/* Learning merges. First all words are counted; then only the different words are looked at, each as many times as it
   was counted. For every pair of tokens its count is kept and a list of the words that have it (or had: a word changes,
   lists do not), and a heap gives the most frequent. A merge visits the words in its pair's list and changes the counts
   of the pairs around. Counts in the heap are those of when an entry was made; they only fall, except for pairs
   with the newest token, so an entry that is out of date is put back with its count of now. */
#include "bpe_train.h"

#include "bpe.h"
#include "pretokenizer.h"

#include <stdlib.h>

enum { MOST_WORDS = 2000000, LONGEST_WORD = 256, FIRST_SLOTS = 1 << 12, FIRST_PAIRS = 1 << 16 };
#define HASH_FACTOR UINT64_C(0x9e3779b97f4a7c15)
#define NONE UINT32_MAX

/* ---- words and how often they are there ---- */

struct word {
    uint64_t text; /* place in the trainer's text */
    int64_t count; /* 0: an empty slot */
    uint32_t length;
};

struct bpe_trainer {
    struct word *slots; /* open addressing, a power of two, at most half full */
    size_t slot_count, word_count, most_words;
    char *text;
    size_t text_bytes, text_capacity;
};

enum status bpe_trainer_create(struct bpe_trainer **out, size_t most_words) {
    struct bpe_trainer *trainer;
    CHECK(ALLOCATE(trainer, 1));
    *out = trainer;
    trainer->most_words = most_words > 0 ? most_words : MOST_WORDS;
    trainer->slot_count = FIRST_SLOTS;
    return ALLOCATE(trainer->slots, FIRST_SLOTS);
}

void bpe_trainer_free(struct bpe_trainer *trainer) {
    if (trainer != NULL) {
        free(trainer->slots);
        free(trainer->text);
        free(trainer);
    }
}

static struct word *find_slot(const struct bpe_trainer *trainer, const char *word, uint32_t length) {
    uint64_t hash = length;
    for (uint32_t i = 0; i < length; i++) {
        hash = (hash ^ (uint8_t)word[i]) * HASH_FACTOR;
        hash ^= hash >> 29;
    }
    size_t mask = trainer->slot_count - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
        struct word *slot = &trainer->slots[at];
        if (slot->count == 0 ||
            (slot->length == length && memcmp(trainer->text + slot->text, word, length) == 0)) {
            return slot;
        }
    }
}

static enum status put_word(struct bpe_trainer *trainer, const char *word, uint32_t length, int64_t count) {
    struct word *slot = find_slot(trainer, word, length);
    if (slot->count == 0) {
        CHECK(RESERVE(trainer->text, trainer->text_capacity, trainer->text_bytes + length));
        memcpy(trainer->text + trainer->text_bytes, word, length);
        slot->text = trainer->text_bytes;
        slot->length = length;
        trainer->text_bytes += length;
        trainer->word_count++;
    }
    slot->count += count;
    return STATUS_OK;
}

/* Into a new table those words that were counted more than `rarest` times. */
static enum status rebuild(struct bpe_trainer *trainer, size_t slot_count, int64_t rarest) {
    struct bpe_trainer old = *trainer;
    enum status status = STATUS_OK;
    trainer->slot_count = slot_count;
    trainer->word_count = 0;
    trainer->text = NULL;
    trainer->text_bytes = trainer->text_capacity = 0;
    trainer->slots = NULL;
    CHECK_CLEANUP(ALLOCATE(trainer->slots, slot_count));
    for (size_t i = 0; i < old.slot_count; i++) {
        const struct word *word = &old.slots[i];
        if (word->count > rarest) {
            CHECK_CLEANUP(put_word(trainer, old.text + word->text, word->length, word->count));
        }
    }
cleanup:
    free(old.slots);
    free(old.text);
    return status;
}

/* Room for one more word. */
static enum status make_room(struct bpe_trainer *trainer) {
    if (trainer->word_count >= trainer->most_words) {
        for (int64_t rarest = 1; trainer->word_count > trainer->most_words / 2; rarest++) {
            CHECK(rebuild(trainer, trainer->slot_count, rarest));
        }
    }
    if (2 * (trainer->word_count + 1) > trainer->slot_count) {
        return rebuild(trainer, 2 * trainer->slot_count, 0);
    }
    return STATUS_OK;
}

enum status bpe_trainer_add(struct bpe_trainer *trainer, const char *text, size_t bytes) {
    size_t length;
    for (size_t at = 0; at < bytes; at += length) {
        length = pretokenizer_next((const uint8_t *)text + at, bytes - at);
        if (length <= LONGEST_WORD) {
            CHECK(make_room(trainer));
            CHECK(put_word(trainer, text + at, (uint32_t)length, 1));
        }
    }
    return STATUS_OK;
}

size_t bpe_trainer_cut(const char *text, size_t bytes) {
    return pretokenizer_cut((const uint8_t *)text, bytes);
}

/* ---- merging ---- */

struct sequence { /* a word as tokens */
    uint32_t first, length;
    int64_t count;
};

struct pair {
    uint64_t tokens; /* left << 32 | right; UINT64_MAX: an empty slot */
    int64_t count;
    uint32_t words; /* the newest node of its list; NONE: empty */
    bool touched;   /* its count has risen with the newest merge and is not in the heap */
};

struct node { /* of a list of words */
    uint32_t word, next;
};

struct candidate {
    int64_t count;
    uint64_t tokens;
};

struct learner {
    struct sequence *sequences;
    size_t sequence_count;
    int32_t *tokens;    /* of all sequences */
    struct pair *pairs; /* open addressing, a power of two, at most half full */
    size_t pair_slots, pair_count;
    struct node *nodes;
    size_t node_count, node_capacity;
    struct candidate *heap;
    size_t heap_count, heap_capacity;
    uint64_t *touched; /* pairs */
    size_t touched_count, touched_capacity;
};

static void learner_clear(struct learner *l) {
    free(l->sequences);
    free(l->tokens);
    free(l->pairs);
    free(l->nodes);
    free(l->heap);
    free(l->touched);
}

static struct pair *find_pair(const struct learner *l, uint64_t tokens) {
    size_t mask = l->pair_slots - 1;
    size_t at = (tokens * HASH_FACTOR >> 32) & mask;
    while (l->pairs[at].tokens != tokens && l->pairs[at].tokens != UINT64_MAX) {
        at = (at + 1) & mask;
    }
    return &l->pairs[at];
}

static enum status allocate_pairs(struct learner *l, size_t slots) {
    CHECK(ALLOCATE(l->pairs, slots));
    l->pair_slots = slots;
    for (size_t i = 0; i < slots; i++) {
        l->pairs[i].tokens = UINT64_MAX;
    }
    return STATUS_OK;
}

static enum status grow_pairs(struct learner *l) {
    struct pair *old = l->pairs;
    size_t old_slots = l->pair_slots;
    enum status status = allocate_pairs(l, 2 * old_slots);
    for (size_t i = 0; i < old_slots && status == STATUS_OK; i++) {
        if (old[i].tokens != UINT64_MAX) {
            *find_pair(l, old[i].tokens) = old[i];
        }
    }
    free(old);
    return status;
}

static uint64_t pair_of(int32_t left, int32_t right) {
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

/* A pair is there once more in a word, which counts `count` times. */
static enum status add_pair(struct learner *l, uint64_t tokens, uint32_t word, int64_t count) {
    struct pair *pair = find_pair(l, tokens);
    if (pair->tokens == UINT64_MAX) {
        *pair = (struct pair){tokens, 0, NONE, false};
        if (2 * ++l->pair_count > l->pair_slots) {
            CHECK(grow_pairs(l));
            pair = find_pair(l, tokens);
        }
    }
    pair->count += count;
    if (!pair->touched) {
        pair->touched = true;
        CHECK(RESERVE(l->touched, l->touched_capacity, l->touched_count + 1));
        l->touched[l->touched_count++] = tokens;
    }
    if (pair->words != NONE && l->nodes[pair->words].word == word) {
        return STATUS_OK;
    }
    if (l->node_count == NONE) {
        return fail("too much text to train a vocabulary on; give a part of it");
    }
    CHECK(RESERVE(l->nodes, l->node_capacity, l->node_count + 1));
    l->nodes[l->node_count] = (struct node){word, pair->words};
    pair->words = (uint32_t)l->node_count++;
    return STATUS_OK;
}

static void remove_pair(struct learner *l, uint64_t tokens, int64_t count) {
    find_pair(l, tokens)->count -= count;
}

/* The more frequent first, then the one with the lower ids. */
static bool before(struct candidate a, struct candidate b) {
    return a.count != b.count ? a.count > b.count : a.tokens < b.tokens;
}

static enum status heap_push(struct learner *l, struct candidate candidate) {
    CHECK(RESERVE(l->heap, l->heap_capacity, l->heap_count + 1));
    size_t at = l->heap_count++;
    while (at > 0 && before(candidate, l->heap[(at - 1) / 2])) {
        l->heap[at] = l->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    l->heap[at] = candidate;
    return STATUS_OK;
}

static struct candidate heap_pop(struct learner *l) {
    struct candidate top = l->heap[0], last = l->heap[--l->heap_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < l->heap_count; at = child) {
        if (child + 1 < l->heap_count && before(l->heap[child + 1], l->heap[child])) {
            child++;
        }
        if (!before(l->heap[child], last)) {
            break;
        }
        l->heap[at] = l->heap[child];
    }
    l->heap[at] = last;
    return top;
}

static enum status push_touched(struct learner *l) {
    for (size_t i = 0; i < l->touched_count; i++) {
        struct pair *pair = find_pair(l, l->touched[i]);
        pair->touched = false;
        CHECK(heap_push(l, (struct candidate){pair->count, pair->tokens}));
    }
    l->touched_count = 0;
    return STATUS_OK;
}

/* The most frequent pair of now; false if none is there twice. */
static enum status pop_best(struct learner *l, uint64_t *tokens, bool *found) {
    *found = false;
    while (l->heap_count > 0) {
        struct candidate top = heap_pop(l);
        int64_t count = find_pair(l, top.tokens)->count;
        if (count == top.count) {
            *tokens = top.tokens;
            *found = count > 1;
            return STATUS_OK;
        }
        CHECK(heap_push(l, (struct candidate){count, top.tokens}));
    }
    return STATUS_OK;
}

static enum status merge_in_word(struct learner *l, uint32_t word, uint64_t tokens, int32_t merged) {
    struct sequence *sequence = &l->sequences[word];
    int32_t left = (int32_t)(tokens >> 32), right = (int32_t)(uint32_t)tokens;
    int32_t *at = l->tokens + sequence->first;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < sequence->length; i++) {
        if (at[i] != left || i + 1 == sequence->length || at[i + 1] != right) {
            at[kept++] = at[i];
            continue;
        }
        if (kept > 0) {
            remove_pair(l, pair_of(at[kept - 1], left), sequence->count);
            CHECK(add_pair(l, pair_of(at[kept - 1], merged), word, sequence->count));
        }
        if (i + 2 < sequence->length) {
            remove_pair(l, pair_of(right, at[i + 2]), sequence->count);
            CHECK(add_pair(l, pair_of(merged, at[i + 2]), word, sequence->count));
        }
        at[kept++] = merged;
        i++;
    }
    sequence->length = kept;
    return STATUS_OK;
}

/* In all its words. Its list may grow meanwhile only at its start, where the newest nodes are. */
static enum status merge_pair(struct learner *l, uint64_t tokens, int32_t merged) {
    uint32_t node = find_pair(l, tokens)->words;
    while (node != NONE) {
        CHECK(merge_in_word(l, l->nodes[node].word, tokens, merged));
        node = l->nodes[node].next;
    }
    find_pair(l, tokens)->count = 0;
    return push_touched(l);
}

/* The words as bytes' tokens, in the order of the table, and their pairs. */
static enum status learner_init(
    struct learner *l, const struct bpe_trainer *trainer, const int32_t byte_tokens[BYTE_VALUES]) {
    uint32_t used = 0;
    if (trainer->text_bytes > INT32_MAX) {
        return fail("too many different words to train a vocabulary on; give a part of the text");
    }
    CHECK(ALLOCATE(l->sequences, trainer->word_count));
    CHECK(ALLOCATE(l->tokens, trainer->text_bytes));
    CHECK(allocate_pairs(l, FIRST_PAIRS));
    for (size_t i = 0; i < trainer->slot_count; i++) {
        const struct word *word = &trainer->slots[i];
        if (word->count == 0) {
            continue;
        }
        uint32_t number = (uint32_t)l->sequence_count++;
        l->sequences[number] = (struct sequence){used, word->length, word->count};
        for (uint32_t k = 0; k < word->length; k++) {
            l->tokens[used++] = byte_tokens[(uint8_t)trainer->text[word->text + k]];
            if (k > 0) {
                CHECK(add_pair(l, pair_of(l->tokens[used - 2], l->tokens[used - 1]), number, word->count));
            }
        }
    }
    return push_touched(l);
}

/* ---- the vocabulary ---- */

struct learned {
    struct bpe_text *tokens; /* the bytes first, then one for each merge */
    struct bpe_merge *merges;
    int32_t merge_count, token_count;
    char bytes[BYTE_VALUES];
    int32_t byte_tokens[BYTE_VALUES];
};

/* The ids that GPT-2 has: the bytes that are printable characters before the others. */
static void start_with_bytes(struct learned *learned) {
    for (int printable = 1; printable >= 0; printable--) {
        for (int byte = 0; byte < BYTE_VALUES; byte++) {
            if (bpe_byte_is_printable(byte) == printable) {
                learned->bytes[byte] = (char)byte;
                learned->byte_tokens[byte] = learned->token_count;
                learned->tokens[learned->token_count++] = (struct bpe_text){&learned->bytes[byte], 1};
            }
        }
    }
}

static enum status join(struct learned *learned, uint64_t tokens) {
    int32_t left = (int32_t)(tokens >> 32), right = (int32_t)(uint32_t)tokens;
    struct bpe_text a = learned->tokens[left], b = learned->tokens[right];
    char *text;
    CHECK(ALLOCATE(text, a.bytes + b.bytes));
    memcpy(text, a.text, a.bytes);
    memcpy(text + a.bytes, b.text, b.bytes);
    learned->merges[learned->merge_count++] = (struct bpe_merge){left, right, learned->token_count};
    learned->tokens[learned->token_count++] = (struct bpe_text){text, a.bytes + b.bytes};
    return STATUS_OK;
}

static enum status learn(
    const struct bpe_trainer *trainer, struct learned *learned, struct learner *l, int32_t merges) {
    CHECK(learner_init(l, trainer, learned->byte_tokens));
    for (int32_t i = 0; i < merges; i++) {
        uint64_t tokens;
        bool found;
        CHECK(pop_best(l, &tokens, &found));
        if (!found) {
            break;
        }
        CHECK(merge_pair(l, tokens, learned->token_count));
        CHECK(join(learned, tokens));
    }
    return STATUS_OK;
}

static enum status build(const struct learned *learned, struct tokenizer **out) {
    static const char name[] = "the trained vocabulary";
    CHECK(bpe_create(
        out, learned->tokens, learned->token_count + 1, learned->token_count, learned->merge_count, name));
    for (int32_t i = 0; i < learned->merge_count; i++) {
        CHECK(bpe_add_merge(*out, learned->merges[i].left, learned->merges[i].right, name));
    }
    return bpe_finish(*out);
}

enum status bpe_trainer_finish(struct bpe_trainer *trainer, int vocab_size, struct tokenizer **out) {
    struct learned learned = {0};
    struct learner learner = {0};
    enum status status = STATUS_OK;
    int32_t merges = vocab_size - BYTE_VALUES - 1;
    *out = NULL;
    if (merges < 0 || vocab_size > BPE_MAX_TOKENS) {
        return fail("a vocabulary of %d tokens: it has at least %d and at most %d", vocab_size,
            BYTE_VALUES + 1, BPE_MAX_TOKENS);
    }
    CHECK_CLEANUP(ALLOCATE(learned.tokens, vocab_size));
    CHECK_CLEANUP(ALLOCATE(learned.merges, merges));
    start_with_bytes(&learned);
    CHECK_CLEANUP(learn(trainer, &learned, &learner, merges));
    CHECK_CLEANUP(build(&learned, out));
cleanup:
    if (status != STATUS_OK) {
        bpe_free(*out);
        *out = NULL;
    }
    for (int32_t i = BYTE_VALUES; i < learned.token_count; i++) {
        free((char *)learned.tokens[i].text);
    }
    free(learned.tokens);
    free(learned.merges);
    learner_clear(&learner);
    return status;
}
