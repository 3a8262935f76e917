/* Positions -> windows -> tokens.

   The order of an epoch is a keyed permutation of [0, W) that is computed, not stored: a Feistel network over the
   smallest even number of bits that covers W, walked until it lands below W. It takes no memory whatever W is, and any
   position can be visited at any time: that makes resume and the split over ranks exact.

   With prefetch, one thread reads batches in position order into two slots; dataloader_next takes them in the same
   order. Whoever reads (the thread, or dataloader_next without one) is the only one to touch the shards' files and the
   window buffer, so the lock guards the slots' bookkeeping alone. */
#include "dataloader.h"

#include "checksum.h"
#include "random.h"

#include <glob.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

enum {
    OPEN_SHARDS = 256, /* files open at once, at most: well under the usual limit of 1024 */
    FEISTEL_ROUNDS = 8,
    SLOTS = 2,
    MESSAGE_BYTES = 2048
};

struct loader_shard {
    struct shard shard;
    int64_t first_window;
};

struct slot {
    int32_t *inputs, *targets; /* (B,T) */
    enum status status;
    char message[MESSAGE_BYTES]; /* the thread's, if status is not STATUS_OK */
};

struct prefetch {
    pthread_t thread;
    bool started;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* the thread waits for room or the caller for a batch, never both */
    struct slot slots[SLOTS];
    int next_slot;      /* the thread fills it next; the oldest filled one is `filled` slots before it */
    int filled;         /* slots ready to be taken */
    int64_t position;   /* of the batch for next_slot */
    int64_t generation; /* seeks so far: a batch begun before one is dropped */
    bool stop;
};

struct dataloader {
    struct dataloader_options options;
    bool synthetic;
    struct loader_shard *shards;
    int shard_count;
    struct shard *open[OPEN_SHARDS]; /* shard i is open in place i % OPEN_SHARDS, or not at all */
    int64_t windows, tokens, position;
    uint64_t fingerprint;
    uint16_t *window; /* T + 1 tokens */
    struct prefetch prefetch;
};

/* ---- the order of an epoch ---- */

static uint64_t feistel(uint64_t value, int half_bits, uint64_t seed, uint64_t epoch) {
    uint64_t mask = (UINT64_C(1) << half_bits) - 1;
    uint64_t left = value >> half_bits, right = value & mask;
    uint64_t stream = epoch << 32 | RANDOM_STREAM_SHUFFLE;
    for (uint64_t round = 0; round < FEISTEL_ROUNDS; round++) {
        uint64_t mixed = left ^ (random_block(seed, stream, round << 32 | right).word[0] & mask);
        left = right;
        right = mixed;
    }
    return left << half_bits | right;
}

/* A bijection of [0, count): the walk along a cycle of a permutation from a value below count comes back below count.
   The network permutes fewer than 4 * count values, so that takes fewer than 4 steps on average; at least 64 of
   them, because a network on fewer favours some orders. */
static int64_t shuffled(int64_t index, int64_t count, uint64_t seed, int64_t epoch) {
    int half_bits = 3;
    while (INT64_C(1) << (2 * half_bits) < count) {
        half_bits++;
    }
    uint64_t value = (uint64_t)index;
    do {
        value = feistel(value, half_bits, seed, (uint64_t)epoch);
    } while (value >= (uint64_t)count);
    return (int64_t)value;
}

/* ---- reading ---- */

/* The shard's file, opened if it is not: runs over thousands of shards stay within the limit of open files. */
static enum status open_shard(struct dataloader *loader, int index) {
    struct shard *shard = &loader->shards[index].shard;
    if (shard->file >= 0) {
        return STATUS_OK;
    }
    struct shard **place = &loader->open[index % OPEN_SHARDS];
    if (*place != NULL) {
        shard_close(*place);
    }
    *place = shard;
    int64_t tokens = shard->tokens;
    enum status status = shard_open(shard, shard->path);
    if (status == STATUS_OK && shard->tokens != tokens) {
        shard_close(shard);
        status = fail("%s: the file was replaced while in use; restore it and resume", shard->path);
    }
    shard->tokens = tokens; /* also after a failure: the file may come back */
    return status;
}

static int find_shard(const struct dataloader *loader, int64_t window) {
    int low = 0, high = loader->shard_count; /* the shard is in [low, high) */
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (loader->shards[middle].first_window <= window) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* What fails is tried again on the file opened anew, after 0.1, 0.3 and 0.9 s: file systems over a network may be away for
   a moment, and all ranks would stop for it. */
static enum status read_tokens(struct dataloader *loader, int index, int64_t first, int count) {
    enum { PAUSES = 3 };
    struct shard *shard = &loader->shards[index].shard;
    struct timespec pause = {.tv_nsec = 100000000};
    for (int pauses = 0;; pauses++, pause.tv_nsec *= 3) {
        enum status status = open_shard(loader, index);
        if (status == STATUS_OK) {
            status = shard_read(shard, first, loader->window, count);
        }
        if (status == STATUS_OK || pauses == PAUSES) {
            return status;
        }
        shard_close(shard);
        nanosleep(&pause, NULL);
    }
}

/* Tokens [first, first + T] of a shard into loader->window. */
static enum status read_window(struct dataloader *loader, int index, int64_t first) {
    int count = loader->options.seq_len + 1;
    const struct shard *shard = &loader->shards[index].shard;
    CHECK(read_tokens(loader, index, first, count));
    for (int i = 0; i < count; i++) {
        if (loader->window[i] >= loader->options.vocab_size) {
            return fail("%s: token %" PRId64
                        " is %d, but --vocab-size is %d; raise it or use data of the model's tokenizer",
                shard->path, first + i, loader->window[i], loader->options.vocab_size);
        }
    }
    return STATUS_OK;
}

static enum status read_sequence(
    struct dataloader *loader, int64_t position, int32_t *inputs, int32_t *targets) {
    int seq_len = loader->options.seq_len;
    int64_t window = position % loader->windows, epoch = position / loader->windows;
    if (epoch > 0 && !loader->options.repeat) {
        memset(inputs, 0, (size_t)seq_len * sizeof *inputs);
        memset(targets, -1, (size_t)seq_len * sizeof *targets);
        return STATUS_OK;
    }
    if (loader->options.shuffle) {
        window = shuffled(window, loader->windows, loader->options.seed, epoch);
    }
    int index = find_shard(loader, window);
    const struct loader_shard *shard = &loader->shards[index];
    int64_t regular = (window - shard->first_window) * seq_len;
    int64_t first = min_i64(regular, shard->shard.tokens - (seq_len + 1));
    int64_t repeated = loader->options.repeat ? 0 : regular - first; /* targets the previous window gave */
    CHECK(read_window(loader, index, first));
    for (int t = 0; t < seq_len; t++) {
        inputs[t] = loader->window[t];
        targets[t] = t < repeated ? -1 : loader->window[t + 1];
    }
    return STATUS_OK;
}

static void make_synthetic_sequence(
    const struct dataloader *loader, int64_t position, int32_t *inputs, int32_t *targets) {
    int seq_len = loader->options.seq_len;
    uint64_t blocks = (uint64_t)seq_len / 4 + 1; /* of T + 1 tokens, four to a block */
    struct random_block random = {{0}};
    for (int t = 0; t <= seq_len; t++) {
        if (t % 4 == 0) {
            random = random_block(
                loader->options.seed, RANDOM_STREAM_SYNTHETIC, (uint64_t)position * blocks + (uint64_t)t / 4);
        }
        int32_t token = (int32_t)((uint64_t)random.word[t % 4] * (uint64_t)loader->options.vocab_size >> 32);
        if (t < seq_len) {
            inputs[t] = token;
        }
        if (t > 0) {
            targets[t - 1] = token;
        }
    }
}

/* This rank's part of the call that begins at `position`. */
static enum status read_batch(
    struct dataloader *loader, int64_t position, int32_t *inputs, int32_t *targets) {
    int64_t micro_batch = loader->options.micro_batch, seq_len = loader->options.seq_len;
    for (int64_t b = 0; b < micro_batch; b++) {
        int64_t sequence = position + loader->options.rank * micro_batch + b;
        if (loader->synthetic) {
            make_synthetic_sequence(loader, sequence, inputs + b * seq_len, targets + b * seq_len);
        } else {
            CHECK(read_sequence(loader, sequence, inputs + b * seq_len, targets + b * seq_len));
        }
    }
    return STATUS_OK;
}

static int64_t call_sequences(const struct dataloader *loader) {
    return (int64_t)loader->options.ranks * loader->options.micro_batch;
}

static size_t batch_tokens(const struct dataloader *loader) {
    return (size_t)loader->options.micro_batch * (size_t)loader->options.seq_len;
}

/* ---- the prefetch thread ---- */

static void *prefetch_main(void *context) {
    struct dataloader *loader = context;
    struct prefetch *p = &loader->prefetch;
    pthread_mutex_lock(&p->lock);
    while (true) {
        while (!p->stop && p->filled == SLOTS) {
            pthread_cond_wait(&p->changed, &p->lock);
        }
        if (p->stop) {
            break;
        }
        struct slot *slot = &p->slots[p->next_slot];
        int64_t position = p->position, generation = p->generation;
        pthread_mutex_unlock(&p->lock);

        slot->status = read_batch(loader, position, slot->inputs, slot->targets);
        if (slot->status != STATUS_OK) {
            snprintf(slot->message, sizeof slot->message, "%s", error_message());
        }

        pthread_mutex_lock(&p->lock);
        if (p->generation == generation) {
            p->next_slot = (p->next_slot + 1) % SLOTS;
            p->filled++;
            p->position = position + call_sequences(loader);
            pthread_cond_signal(&p->changed);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static enum status prefetch_start(struct dataloader *loader) {
    struct prefetch *p = &loader->prefetch;
    for (int i = 0; i < SLOTS; i++) {
        CHECK(ALLOCATE(p->slots[i].inputs, batch_tokens(loader)));
        CHECK(ALLOCATE(p->slots[i].targets, batch_tokens(loader)));
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    /* signals are the main thread's business: the new thread inherits a mask that blocks them all */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&p->thread, NULL, prefetch_main, loader);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        return fail(
            "cannot start the data thread: %s; raise the limit of processes (ulimit -u)", strerror(error));
    }
    p->started = true;
    return STATUS_OK;
}

static void prefetch_stop(struct prefetch *p) {
    if (p->started) {
        pthread_mutex_lock(&p->lock);
        p->stop = true;
        pthread_cond_signal(&p->changed);
        pthread_mutex_unlock(&p->lock);
        pthread_join(p->thread, NULL);
        pthread_cond_destroy(&p->changed);
        pthread_mutex_destroy(&p->lock);
    }
    for (int i = 0; i < SLOTS; i++) {
        free(p->slots[i].inputs);
        free(p->slots[i].targets);
    }
}

/* Drops what was read ahead and goes on from `position`. */
static void prefetch_seek(struct prefetch *p, int64_t position) {
    pthread_mutex_lock(&p->lock);
    p->generation++;
    p->filled = 0;
    p->position = position;
    pthread_cond_signal(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static enum status prefetch_take(struct dataloader *loader, int32_t *inputs, int32_t *targets) {
    struct prefetch *p = &loader->prefetch;
    pthread_mutex_lock(&p->lock);
    while (p->filled == 0) {
        pthread_cond_wait(&p->changed, &p->lock);
    }
    const struct slot *slot = &p->slots[(p->next_slot + SLOTS - p->filled) % SLOTS];
    pthread_mutex_unlock(&p->lock); /* a filled slot is the caller's until `filled` goes down */
    if (slot->status != STATUS_OK) {
        enum status status = fail_as(slot->status, "%s", slot->message);
        prefetch_seek(p, loader->position);
        return status;
    }
    memcpy(inputs, slot->inputs, batch_tokens(loader) * sizeof *inputs);
    memcpy(targets, slot->targets, batch_tokens(loader) * sizeof *targets);
    pthread_mutex_lock(&p->lock);
    p->filled--;
    pthread_cond_signal(&p->changed);
    pthread_mutex_unlock(&p->lock);
    return STATUS_OK;
}

/* ---- opening ---- */

/* By bytes, whatever the locale: all machines of a run must agree. */
static int compare_paths(const void *a, const void *b) {
    return strcmp(((const struct loader_shard *)a)->shard.path, ((const struct loader_shard *)b)->shard.path);
}

static enum status find_shards(struct dataloader *loader, const char *pattern, const char *option) {
    glob_t found;
    /* the name of a file that has a [ or * in it may match nothing else */
    int literal = path_exists(pattern) ? GLOB_NOCHECK : 0;
    int result = glob(pattern, GLOB_NOSORT | GLOB_TILDE | literal, NULL, &found);
    if (result == GLOB_NOMATCH) {
        globfree(&found);
        bool validation = strcmp(option, "--val-data") == 0;
        return fail("%s: no shard matches '%s'; make some with build/prepare%s (see data/README.md)", option,
            pattern, validation ? ", with a larger --val-fraction if it made none" : "");
    }
    enum status status = STATUS_OK;
    if (result != 0 || found.gl_pathc > INT32_MAX) {
        CHECK_CLEANUP(fail("%s: cannot search for '%s'", option, pattern));
    }
    CHECK_CLEANUP(ALLOCATE(loader->shards, found.gl_pathc));
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char *path = string_copy(found.gl_pathv[i]);
        if (path == NULL) {
            CHECK_CLEANUP(STATUS_OUT_OF_MEMORY);
        }
        loader->shards[i].shard = (struct shard){.path = path, .file = -1};
        loader->shard_count++;
    }
    qsort(loader->shards, found.gl_pathc, sizeof *loader->shards, compare_paths);
cleanup:
    globfree(&found);
    return status;
}

static void add_to_fingerprint(struct xxh64 *hash, const struct shard *shard) {
    const char *slash = strrchr(shard->path, '/'), *name = slash != NULL ? slash + 1 : shard->path;
    xxh64_update(hash, name, strlen(name) + 1);
    xxh64_update(hash, &shard->tokens, sizeof shard->tokens);
}

static enum status check_shards(struct dataloader *loader, const char *option, const char *pattern) {
    int seq_len = loader->options.seq_len;
    struct xxh64 hash;
    xxh64_init(&hash);
    for (int i = 0; i < loader->shard_count; i++) {
        struct loader_shard *entry = &loader->shards[i];
        CHECK(shard_open(&entry->shard, entry->shard.path));
        shard_close(&entry->shard);
        if (entry->shard.tokens < (int64_t)seq_len + 1) {
            return fail("%s: its %" PRId64
                        " tokens are fewer than one sequence of %d and its last target; choose a "
                        "smaller --seq-len or leave the file out of %s",
                entry->shard.path, entry->shard.tokens, seq_len, option);
        }
        entry->first_window = loader->windows;
        loader->windows += ceil_div(entry->shard.tokens - 1, seq_len);
        loader->tokens += entry->shard.tokens;
        add_to_fingerprint(&hash, &entry->shard);
    }
    loader->fingerprint = xxh64_digest(&hash);
    if (loader->options.repeat && loader->windows < call_sequences(loader)) {
        return fail("%s %s: %" PRId64
                    " sequences of %d tokens are fewer than micro-batch %d times %d ranks; give more "
                    "data, a smaller --micro-batch or --seq-len, or fewer --ranks",
            option, pattern, loader->windows, seq_len, loader->options.micro_batch, loader->options.ranks);
    }
    return STATUS_OK;
}

static enum status open_loader(struct dataloader *loader) {
    const char *pattern = loader->options.pattern, *option = loader->options.option;
    loader->options.pattern = loader->options.option = NULL; /* the caller's, not ours to keep */
    loader->synthetic = strcmp(pattern, "synthetic") == 0;
    if (loader->synthetic) {
        loader->windows = DATALOADER_ENDLESS;
    } else {
        CHECK(find_shards(loader, pattern, option));
        CHECK(check_shards(loader, option, pattern));
        CHECK(ALLOCATE(loader->window, loader->options.seq_len + 1));
    }
    return loader->options.prefetch ? prefetch_start(loader) : STATUS_OK;
}

enum status dataloader_open(struct dataloader **out, const struct dataloader_options *options) {
    struct dataloader *loader;
    CHECK(ALLOCATE(loader, 1));
    loader->options = *options;
    enum status status = open_loader(loader);
    if (status != STATUS_OK) {
        dataloader_close(loader);
        return status;
    }
    *out = loader;
    return STATUS_OK;
}

void dataloader_close(struct dataloader *loader) {
    if (loader == NULL) {
        return;
    }
    prefetch_stop(&loader->prefetch);
    for (int i = 0; i < loader->shard_count; i++) {
        shard_close(&loader->shards[i].shard);
        free((char *)loader->shards[i].shard.path);
    }
    free(loader->shards);
    free(loader->window);
    free(loader);
}

/* ---- using ---- */

int64_t dataloader_windows(const struct dataloader *loader) {
    return loader->windows;
}

int64_t dataloader_tokens(const struct dataloader *loader) {
    return loader->tokens;
}

int dataloader_shards(const struct dataloader *loader) {
    return loader->shard_count;
}

uint64_t dataloader_fingerprint(const struct dataloader *loader) {
    return loader->fingerprint;
}

int64_t dataloader_position(const struct dataloader *loader) {
    return loader->position;
}

enum status dataloader_seek(struct dataloader *loader, int64_t position) {
    if (position < 0 || position > DATALOADER_MAX_POSITION) {
        return fail("data position %" PRId64 " is not between 0 and %" PRId64 "; the checkpoint is damaged",
            position, DATALOADER_MAX_POSITION);
    }
    if (position != loader->position) {
        loader->position = position;
        if (loader->prefetch.started) {
            prefetch_seek(&loader->prefetch, position);
        }
    }
    return STATUS_OK;
}

enum status dataloader_next(
    struct dataloader *loader, int32_t *inputs, int32_t *targets, double *wait_seconds) {
    double start = time_seconds();
    enum status status = loader->prefetch.started ? prefetch_take(loader, inputs, targets)
                                                  : read_batch(loader, loader->position, inputs, targets);
    if (wait_seconds != NULL) {
        *wait_seconds += time_seconds() - start;
    }
    CHECK(status);
    loader->position += call_sequences(loader);
    return STATUS_OK;
}
