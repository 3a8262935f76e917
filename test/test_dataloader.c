/* Shards and the data loader. Tests know a window by its first token: most shards here are 0, 1, 2, ... */
#include "llmc/dataloader.h"
#include "folder.h"
#include "test.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the test's files ---- */

static char all_shards[2048]; /* the folder's glob */

/* `count` tokens first, first + 1, ...; by hand, because shard_write waits for the disk */
static void write_counting_shard(const char *name, int first, int count) {
    size_t bytes = SHARD_HEADER_BYTES + 2 * (size_t)count;
    uint8_t *data = calloc(bytes, 1);
    memcpy(data, (int32_t[]){SHARD_MAGIC, SHARD_VERSION, count}, 12);
    for (int i = 0; i < count; i++) {
        uint16_t token = (uint16_t)(first + i);
        memcpy(data + SHARD_HEADER_BYTES + 2 * i, &token, 2);
    }
    EXPECT(file_write_all(in_folder(name), data, bytes) == STATUS_OK);
    free(data);
}

static void write_raw(const char *name, int32_t magic, int32_t version, int32_t count, size_t body_bytes) {
    char bytes[SHARD_HEADER_BYTES + 4096] = {0};
    memcpy(bytes, (int32_t[]){magic, version, count}, 12);
    EXPECT(file_write_all(in_folder(name), bytes, SHARD_HEADER_BYTES + body_bytes) == STATUS_OK);
}

static struct dataloader_options default_options(int seq_len, int micro_batch) {
    return (struct dataloader_options){.pattern = all_shards,
        .option = "--train-data",
        .seq_len = seq_len,
        .micro_batch = micro_batch,
        .vocab_size = 65536,
        .rank = 0,
        .ranks = 1,
        .seed = 42,
        .shuffle = true,
        .repeat = true,
        .prefetch = false};
}

static struct dataloader *open_or_exit(const struct dataloader_options *options) {
    struct dataloader *loader = NULL;
    if (dataloader_open(&loader, options) != STATUS_OK) {
        printf("    %s\n", error_message());
        exit(1);
    }
    return loader;
}

static void expect_refused(const struct dataloader_options *options, const char *file, const char *message) {
    struct dataloader *loader = NULL;
    EXPECT(dataloader_open(&loader, options) == STATUS_ERROR);
    EXPECT(loader == NULL);
    EXPECT_CONTAINS(error_message(), file);
    EXPECT_CONTAINS(error_message(), message);
    EXPECT(strchr(error_message(), '\n') == NULL);
}

/* ---- the format ---- */

static void test_a_shard_is_1024_header_bytes_then_16_bit_tokens(void) {
    const uint16_t tokens[] = {1, 515, 65535};
    EXPECT(shard_write(in_folder("a.bin"), tokens, 3) == STATUS_OK);
    uint8_t *data, expected[1030] = {0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0, 3}; /* 0x0134d888 = 20240520 */
    size_t bytes;
    memcpy(expected + 1024, (uint8_t[]){1, 0, 3, 2, 255, 255}, 6);
    EXPECT(file_read_all(in_folder("a.bin"), &data, &bytes) == STATUS_OK);
    EXPECT(bytes == 1030 && memcmp(data, expected, 1030) == 0);
    free(data);
}

static void test_a_shard_written_in_pieces_equals_one_written_at_once(void) {
    uint16_t tokens[1000];
    for (int i = 0; i < 1000; i++) {
        tokens[i] = (uint16_t)(7 * i);
    }
    EXPECT(shard_write(in_folder("whole.bin"), tokens, 1000) == STATUS_OK);
    struct shard_writer *writer;
    EXPECT(shard_create(&writer, in_folder("pieces.bin")) == STATUS_OK);
    for (int i = 0; i < 1000; i += 8) {
        EXPECT(shard_append(writer, tokens + i, 8) == STATUS_OK);
    }
    EXPECT(shard_finish(writer) == STATUS_OK);
    uint8_t *whole, *pieces;
    size_t whole_bytes, pieces_bytes;
    EXPECT(file_read_all(in_folder("whole.bin"), &whole, &whole_bytes) == STATUS_OK);
    EXPECT(file_read_all(in_folder("pieces.bin"), &pieces, &pieces_bytes) == STATUS_OK);
    EXPECT(whole_bytes == pieces_bytes && memcmp(whole, pieces, whole_bytes) == 0);
    free(whole);
    free(pieces);
}

static void test_a_shard_cannot_be_written_where_there_is_no_folder_or_no_room(void) {
    const uint16_t token = 1;
    EXPECT(shard_write(in_folder("missing/a.bin"), &token, 1) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "missing/a.bin: cannot write: No such file");
    EXPECT(shard_write("/dev/full", &token, 1) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "/dev/full: cannot write: No space left");
}

static void test_a_shard_takes_no_more_tokens_than_its_header_can_count(void) {
    struct shard_writer *writer;
    const uint16_t token = 1;
    EXPECT(shard_create(&writer, in_folder("a.bin")) == STATUS_OK);
    EXPECT(shard_append(writer, &token, SHARD_MAX_TOKENS + 1) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "at most 2147483647 tokens");
    EXPECT(shard_finish(writer) == STATUS_OK);
}

/* ---- bad input ---- */

static void test_no_matching_shard_names_option_pattern_and_tool(void) {
    struct dataloader_options options = default_options(8, 1);
    expect_refused(&options, "--train-data: no shard matches '", "*.bin'; make some with build/prepare");
}

static void test_a_file_whose_name_looks_like_a_pattern_is_meant_itself(void) {
    write_counting_shard("a[1].bin", 0, 100);
    write_counting_shard("a1.bin", 0, 50);
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s", in_folder("a[1].bin"));
    struct dataloader_options options = default_options(8, 1);
    options.pattern = path;
    struct dataloader *loader = open_or_exit(&options); /* a pattern that matches stays one */
    EXPECT(dataloader_windows(loader) == 7);
    dataloader_close(loader);
    EXPECT(unlink(in_folder("a1.bin")) == 0);
    loader = open_or_exit(&options);
    EXPECT(dataloader_windows(loader) == 13);
    dataloader_close(loader);
}

static void test_damaged_shards_are_refused_by_name_and_remedy(void) {
    static const struct {
        int32_t magic, version, count;
        size_t body_bytes;
        const char *message;
    } cases[] = {
        {20240801, 1, 100, 200,
            "a.bin: is no token shard (magic number 20240801, not 20240520); make shards"},
        {SHARD_MAGIC, 2, 100, 200, "a.bin: shard version 2 is not 1; make shards"},
        {SHARD_MAGIC, 1, 101, 200, "a.bin: the header says 101 tokens, the file holds 100; it is truncated"},
        {SHARD_MAGIC, 1, INT32_MAX, 200, "a.bin: the header says 2147483647 tokens, the file holds 100;"},
        {SHARD_MAGIC, 1, -1, 200, "a.bin: the header says -1 tokens"},
        {SHARD_MAGIC, 1, 100, 199, "a.bin: the header says 100 tokens, the file holds 99;"},
        {SHARD_MAGIC, 1, 100, 201, "a.bin: 1 bytes follow the 100 tokens of the header;"},
        {SHARD_MAGIC, 1, 90, 200, "a.bin: 20 bytes follow the 90 tokens of the header;"},
        {SHARD_MAGIC, 1, 8, 16,
            "a.bin: its 8 tokens are fewer than one sequence of 8 and its last target; choose"},
        {SHARD_MAGIC, 1, 0, 0, "a.bin: its 0 tokens are fewer than one sequence"},
    };
    struct dataloader_options options = default_options(8, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_raw("a.bin", cases[i].magic, cases[i].version, cases[i].count, cases[i].body_bytes);
        expect_refused(&options, folder, cases[i].message);
    }
    EXPECT(file_write_all(in_folder("a.bin"), "text", 4) == STATUS_OK);
    expect_refused(&options, "a.bin", "4 bytes are less than a shard's header of 1024; prepare it again");
}

static void test_one_damaged_shard_among_good_ones_is_named(void) {
    write_counting_shard("a.bin", 0, 100);
    write_raw("b.bin", SHARD_MAGIC, 1, 5000, 100);
    write_counting_shard("c.bin", 0, 100);
    struct dataloader_options options = default_options(8, 1);
    expect_refused(&options, "b.bin", "it is truncated");
}

static void test_folders_and_pipes_are_no_shards(void) {
    struct dataloader_options options = default_options(8, 1);
    EXPECT(mkdir(in_folder("a.bin"), 0777) == 0);
    expect_refused(&options, "a.bin", "is not a file; give shard files");
    EXPECT(rmdir(in_folder("a.bin")) == 0);
    EXPECT(mkfifo(in_folder("a.bin"), 0666) == 0);
    expect_refused(&options, "a.bin", "is not a file; give shard files");
}

static void test_training_data_must_fill_one_batch_of_all_ranks(void) {
    write_counting_shard("a.bin", 0, 8 * 15 + 1);
    struct dataloader_options options = default_options(8, 4);
    options.ranks = 4;
    expect_refused(&options, "*.bin: 15 sequences of 8 tokens",
        "fewer than micro-batch 4 times 4 ranks; give more data");
    options.ranks = 3;
    dataloader_close(open_or_exit(&options));
    options.ranks = 4;
    options.shuffle = false;
    options.repeat = false;
    dataloader_close(open_or_exit(&options));
}

static void test_a_token_over_the_vocabulary_names_file_index_and_value(void) {
    write_counting_shard("a.bin", 0, 101);
    for (int prefetch = 0; prefetch < 2; prefetch++) {
        struct dataloader_options options = default_options(10, 1);
        options.shuffle = false;
        options.repeat = false;
        options.prefetch = prefetch;
        options.vocab_size = 98; /* the last targets, 98 to 100, are too large */
        struct dataloader *loader = open_or_exit(&options);
        int32_t inputs[10], targets[10];
        for (int i = 0; i < 9; i++) {
            EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
        }
        for (int again = 0; again < 2; again++) {
            EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_ERROR);
            EXPECT_CONTAINS(error_message(), "a.bin: token 98 is 98, but --vocab-size is 98; raise it");
            EXPECT(dataloader_position(loader) == 9);
        }
        EXPECT(dataloader_seek(loader, 3) == STATUS_OK);
        EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
        EXPECT(inputs[0] == 30);
        dataloader_close(loader);
    }
}

static void test_a_file_cut_or_removed_while_in_use_is_an_error_and_recovers_when_restored(void) {
    for (int prefetch = 0; prefetch < 2; prefetch++) {
        write_counting_shard("a.bin", 0, 40001);
        struct dataloader_options options = default_options(100, 1);
        options.prefetch = prefetch;
        struct dataloader *loader = open_or_exit(&options);
        int32_t inputs[100], targets[100];
        EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
        EXPECT(truncate(in_folder("a.bin"), 1100) == 0);
        enum status status = STATUS_OK;
        for (int i = 0; i < 4 && status == STATUS_OK; i++) { /* what was read ahead still comes */
            status = dataloader_next(loader, inputs, targets, NULL);
        }
        EXPECT(status == STATUS_ERROR);
        EXPECT_CONTAINS(
            error_message(), "a.bin: the header says 40001 tokens, the file holds 38; it is truncated");
        int64_t position = dataloader_position(loader);

        write_counting_shard("a.bin", 0, 40001);
        status = STATUS_ERROR;
        for (int i = 0; i < 3 && status != STATUS_OK; i++) { /* the read-ahead may have failed before */
            status = dataloader_next(loader, inputs, targets, NULL);
        }
        EXPECT(status == STATUS_OK);
        EXPECT(dataloader_position(loader) == position + 1);
        EXPECT(targets[99] == inputs[0] + 100);
        dataloader_close(loader);
    }
}

/* a.bin goes, or comes back. */
static void move_shard(bool away) {
    char here[PATH_MAX + 64], there[PATH_MAX + 64];
    snprintf(here, sizeof here, "%s", in_folder("a.bin"));
    snprintf(there, sizeof there, "%s", in_folder("away"));
    EXPECT(rename(away ? here : there, away ? there : here) == 0);
}

static void *bring_back(void *context) {
    (void)context;
    usleep(200000);
    move_shard(false);
    return NULL;
}

static void test_a_file_that_is_away_for_a_moment_is_waited_for(void) {
    write_counting_shard("a.bin", 0, 1001);
    struct dataloader_options options = default_options(100, 1);
    struct dataloader *loader = open_or_exit(&options);
    int32_t inputs[100], targets[100];
    move_shard(true);
    EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_ERROR); /* that was too long */
    EXPECT_CONTAINS(error_message(), "a.bin: cannot open: No such file or directory");
    EXPECT(dataloader_position(loader) == 0);
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, bring_back, NULL) == 0);
    EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
    pthread_join(thread, NULL);
    EXPECT(targets[99] == inputs[0] + 100);
    dataloader_close(loader);
}

static void test_seek_refuses_positions_that_no_run_reaches(void) {
    write_counting_shard("a.bin", 0, 100);
    struct dataloader_options options = default_options(8, 1);
    struct dataloader *loader = open_or_exit(&options);
    EXPECT(dataloader_seek(loader, -1) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "data position -1 is not between 0");
    EXPECT(dataloader_seek(loader, INT64_MAX) == STATUS_ERROR);
    EXPECT(dataloader_position(loader) == 0);
    int32_t inputs[8], targets[8];
    EXPECT(dataloader_seek(loader, DATALOADER_MAX_POSITION) == STATUS_OK);
    EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
    dataloader_close(loader);
}

/* ---- windows ---- */

static void
test_without_shuffle_and_repeat_windows_come_in_order_of_the_sorted_names_and_every_target_counts_once(void) {
    /* 10 tokens: windows at 0, 3, 6. 9 tokens: at 0, 3 and, moved back from 6, at 5. 4 tokens: at 0 */
    write_counting_shard("b.bin", 200, 9);
    write_counting_shard("a.bin", 100, 10);
    write_counting_shard("B.bin", 300, 4); /* before "a" by bytes, whatever the locale */
    const int expected_inputs[] = {300, 100, 103, 106, 200, 203, 205};
    struct dataloader_options options = default_options(3, 1);
    options.shuffle = false;
    options.repeat = false;
    struct dataloader *loader = open_or_exit(&options);
    EXPECT(dataloader_windows(loader) == 7);
    EXPECT(dataloader_tokens(loader) == 23);
    EXPECT(dataloader_shards(loader) == 3);
    int32_t inputs[3], targets[3];
    int counted = 0;
    for (int i = 0; i < 7; i++) {
        EXPECT(dataloader_position(loader) == i);
        EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
        for (int t = 0; t < 3; t++) {
            EXPECT(inputs[t] == expected_inputs[i] + t);
            bool given_before = i == 6 && t < 1;
            EXPECT(targets[t] == (given_before ? -1 : inputs[t] + 1));
            counted += targets[t] >= 0;
        }
    }
    EXPECT(counted == 9 + 8 + 3);  /* every token but each shard's first is a target once */
    for (int i = 0; i < 10; i++) { /* past the end */
        EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
        for (int t = 0; t < 3; t++) {
            EXPECT(inputs[t] == 0 && targets[t] == -1);
        }
    }
    EXPECT(dataloader_seek(loader, 0) == STATUS_OK); /* the next evaluation */
    EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
    EXPECT(inputs[0] == 300 && targets[2] == 303);
    dataloader_close(loader);
}

static void test_any_sequence_length_gives_every_token_as_a_target_once(void) {
    enum { TOKENS = 60 };
    write_counting_shard("a.bin", 0, TOKENS);
    for (int seq_len = 1; seq_len < TOKENS; seq_len++) {
        for (int micro_batch = 1; micro_batch <= 7; micro_batch += 3) {
            struct dataloader_options options = default_options(seq_len, micro_batch);
            options.shuffle = false;
            options.repeat = false;
            struct dataloader *loader = open_or_exit(&options);
            EXPECT(dataloader_windows(loader) == (TOKENS - 1 + seq_len - 1) / seq_len);
            int32_t inputs[7 * TOKENS], targets[7 * TOKENS];
            int seen[TOKENS] = {0};
            while (dataloader_position(loader) < dataloader_windows(loader)) {
                EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
                for (int i = 0; i < micro_batch * seq_len; i++) {
                    if (targets[i] >= 0) {
                        EXPECT(targets[i] == inputs[i] + 1);
                        seen[targets[i]]++;
                    }
                }
            }
            EXPECT(seen[0] == 0);
            for (int i = 1; i < TOKENS; i++) {
                EXPECT(seen[i] == 1);
            }
            dataloader_close(loader);
        }
    }
}

static void test_file_order_repeats_epoch_after_epoch(void) {
    write_counting_shard("a.bin", 0, 13); /* windows from 0, 4, 8 */
    struct dataloader_options options = default_options(4, 1);
    options.shuffle = false;
    struct dataloader *loader = open_or_exit(&options);
    for (int i = 0; i < 7; i++) {
        int32_t inputs[4], targets[4];
        EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
        EXPECT(inputs[0] == i % 3 * 4 && targets[0] == i % 3 * 4 + 1 && targets[3] == i % 3 * 4 + 4);
    }
    dataloader_close(loader);
}

static void test_a_shuffled_epoch_shows_every_token(void) {
    write_counting_shard("a.bin", 0, 1000);
    write_counting_shard("b.bin", 1000, 777);
    struct dataloader_options options = default_options(16, 1);
    struct dataloader *loader = open_or_exit(&options);
    for (int epoch = 0; epoch < 3; epoch++) {
        bool seen[1777] = {false};
        for (int64_t i = 0; i < dataloader_windows(loader); i++) {
            int32_t inputs[16], targets[16];
            EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
            for (int t = 0; t < 16; t++) {
                EXPECT(targets[t] == inputs[t] + 1); /* no target is left out */
                seen[inputs[t]] = seen[targets[t]] = true;
            }
        }
        for (int i = 0; i < 1777; i++) {
            EXPECT(seen[i]);
        }
    }
    dataloader_close(loader);
}

/* ---- the order ---- */

/* With sequences of one token a counting shard of W + 1 tokens has W windows, known by their input. */
static struct dataloader *open_windows(int windows, uint64_t seed) {
    write_counting_shard("a.bin", 0, windows + 1);
    struct dataloader_options options = default_options(1, 1);
    options.seed = seed;
    struct dataloader *loader = open_or_exit(&options);
    EXPECT(dataloader_windows(loader) == windows);
    return loader;
}

static int next_window(struct dataloader *loader) {
    int32_t input = -1, target;
    EXPECT(dataloader_next(loader, &input, &target, NULL) == STATUS_OK);
    return input;
}

static void test_an_epoch_visits_every_window_once_for_any_number_of_windows(void) {
    static const int more[] = {251, 255, 256, 257, 1000, 1023, 1024, 1025, 4099, 16384, 32771, 65535};
    for (int i = 1; i <= 130 + (int)(sizeof more / sizeof *more); i++) {
        int windows = i <= 130 ? i : more[i - 131];
        struct dataloader *loader = open_windows(windows, (uint64_t)i);
        bool *seen = calloc((size_t)windows, sizeof *seen);
        for (int epoch = 0; epoch < 2; epoch++) {
            int repeats = 0;
            memset(seen, 0, (size_t)windows * sizeof *seen);
            for (int p = 0; p < windows; p++) {
                int window = next_window(loader);
                repeats += window < 0 || window >= windows || seen[window];
                seen[window] = true;
            }
            EXPECT(repeats == 0);
        }
        free(seen);
        dataloader_close(loader);
    }
}

static void test_orders_differ_by_epoch_and_seed_and_repeat_for_the_same(void) {
    enum { WINDOWS = 1000 };
    static int orders[4][WINDOWS]; /* seed 1 epochs 0 and 1, seed 2 epoch 0, seed 1 epoch 0 again */
    const uint64_t seeds[] = {1, 1, 2, 1};
    for (int i = 0; i < 4; i++) {
        struct dataloader *loader = open_windows(WINDOWS, seeds[i]);
        EXPECT(dataloader_seek(loader, i == 1 ? WINDOWS : 0) == STATUS_OK);
        for (int p = 0; p < WINDOWS; p++) {
            orders[i][p] = next_window(loader);
        }
        dataloader_close(loader);
    }
    EXPECT(memcmp(orders[0], orders[3], sizeof orders[0]) == 0);
    for (int a = 0; a < 3; a++) {
        for (int b = a + 1; b < 3; b++) {
            int same = 0; /* of two random permutations: 1 on average */
            for (int p = 0; p < WINDOWS; p++) {
                same += orders[a][p] == orders[b][p];
            }
            EXPECT(same <= 8);
        }
    }
}

static void test_an_order_looks_random(void) {
    enum { WINDOWS = 60000 };
    struct dataloader *loader = open_windows(WINDOWS, 3);
    double correlation_position = 0, correlation_next = 0, deviation = WINDOWS / sqrt(12);
    int neighbours = 0, previous = -2;
    for (int p = 0; p < WINDOWS; p++) {
        int window = next_window(loader);
        double centered = (window - WINDOWS / 2.0) / deviation;
        correlation_position += centered * (p - WINDOWS / 2.0) / deviation / WINDOWS;
        correlation_next += previous < 0 ? 0 : centered * (previous - WINDOWS / 2.0) / deviation / WINDOWS;
        neighbours += window == previous + 1;
        previous = window;
    }
    EXPECT_NEAR(correlation_position, 0, 5 / sqrt(WINDOWS));
    EXPECT_NEAR(correlation_next, 0, 5 / sqrt(WINDOWS));
    EXPECT(neighbours <= 8); /* 1 on average */
    dataloader_close(loader);
}

/* All 120 orders of 5 windows, 200 times each: chi-square with 119 degrees of freedom is under 200 but for one seed in
   200,000. */
static void test_every_order_of_a_few_windows_is_equally_likely(void) {
    enum { WINDOWS = 5, ORDERS = 120, EACH = 200 };
    struct dataloader *loader = open_windows(WINDOWS, 11);
    int counts[ORDERS] = {0};
    for (int epoch = 0; epoch < ORDERS * EACH; epoch++) {
        int order[WINDOWS], rank = 0;
        for (int i = 0; i < WINDOWS; i++) {
            order[i] = next_window(loader);
        }
        for (int i = 0; i < WINDOWS; i++) { /* Lehmer code */
            int smaller = 0;
            for (int j = i + 1; j < WINDOWS; j++) {
                smaller += order[j] < order[i];
            }
            rank = rank * (WINDOWS - i) + smaller;
        }
        counts[rank]++;
    }
    double chi_square = 0;
    for (int i = 0; i < ORDERS; i++) {
        chi_square += (counts[i] - EACH) * (double)(counts[i] - EACH) / EACH;
    }
    EXPECT(chi_square < 200);
    dataloader_close(loader);
}

/* From one window to the next all 55 steps modulo 56 are equally likely: chi-square with 54 degrees of freedom is 54 +- 10.
   A Feistel network of 4 rounds has 300. */
static void test_the_step_to_the_next_window_is_uniform(void) {
    enum { WINDOWS = 56, EPOCHS = 3000 };
    struct dataloader *loader = open_windows(WINDOWS, 5);
    int counts[WINDOWS] = {0};
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        int previous = next_window(loader);
        for (int i = 1; i < WINDOWS; i++) {
            int window = next_window(loader);
            counts[(window - previous + WINDOWS) % WINDOWS]++;
            previous = window;
        }
    }
    double chi_square = 0;
    EXPECT(counts[0] == 0);
    for (int i = 1; i < WINDOWS; i++) {
        chi_square += (counts[i] - EPOCHS) * (double)(counts[i] - EPOCHS) / EPOCHS;
    }
    EXPECT(chi_square < 110);
    dataloader_close(loader);
}

/* ---- ranks, micro-batches, resume ---- */

enum { SPLIT_T = 5, SPLIT_TOTAL = 240 };

/* Sequences 0 ... SPLIT_TOTAL - 1 of the run as `ranks` loaders of `micro_batch` give them. */
static void collect(int ranks, int micro_batch, bool prefetch, int32_t (*out)[2 * SPLIT_T]) {
    for (int rank = 0; rank < ranks; rank++) {
        struct dataloader_options options = default_options(SPLIT_T, micro_batch);
        options.rank = rank;
        options.ranks = ranks;
        options.prefetch = prefetch;
        struct dataloader *loader = open_or_exit(&options);
        for (int first = 0; first < SPLIT_TOTAL; first += ranks * micro_batch) {
            EXPECT(dataloader_position(loader) == first);
            int32_t inputs[SPLIT_TOTAL * SPLIT_T], targets[SPLIT_TOTAL * SPLIT_T];
            EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
            for (int b = 0; b < micro_batch; b++) {
                int32_t *sequence = out[first + rank * micro_batch + b];
                memcpy(sequence, inputs + b * SPLIT_T, SPLIT_T * sizeof *inputs);
                memcpy(sequence + SPLIT_T, targets + b * SPLIT_T, SPLIT_T * sizeof *targets);
            }
        }
        dataloader_close(loader);
    }
}

static void test_every_split_into_ranks_and_micro_batches_gives_the_same_sequences(void) {
    write_counting_shard("a.bin", 0, 200);
    write_counting_shard("b.bin", 500, 333);
    static int32_t expected[SPLIT_TOTAL][2 * SPLIT_T], got[SPLIT_TOTAL][2 * SPLIT_T];
    static const int ranks[] = {1, 2, 4, 3, 8, 1, 5}, micro_batches[] = {60, 1, 2, 5, 10, 48, 12};
    collect(1, 1, false, expected);
    for (int i = 0; i < 7; i++) {
        memset(got, 0, sizeof got);
        collect(ranks[i], micro_batches[i], i % 2 == 1, got);
        EXPECT(memcmp(expected, got, sizeof got) == 0);
    }
}

static void test_a_run_stopped_anywhere_goes_on_exactly_under_other_ranks_too(void) {
    write_counting_shard("a.bin", 0, 200);
    write_counting_shard("b.bin", 500, 333);
    static int32_t expected[SPLIT_TOTAL][2 * SPLIT_T];
    collect(1, 1, false, expected);
    int different = 0;
    for (int stop = 0; stop + 12 <= SPLIT_TOTAL; stop++) { /* W is 107: across two epochs' ends */
        for (int rank = 0; rank < 2; rank++) {
            struct dataloader_options options = default_options(SPLIT_T, 3);
            options.rank = rank;
            options.ranks = 2;
            options.prefetch = stop % 2;
            struct dataloader *loader = open_or_exit(&options);
            EXPECT(dataloader_seek(loader, stop) == STATUS_OK);
            for (int call = 0; call < 2; call++) {
                int32_t inputs[3 * SPLIT_T], targets[3 * SPLIT_T];
                EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
                for (int b = 0; b < 3; b++) {
                    const int32_t *sequence = expected[stop + call * 6 + rank * 3 + b];
                    different += memcmp(sequence, inputs + b * SPLIT_T, SPLIT_T * sizeof *inputs) != 0;
                    different +=
                        memcmp(sequence + SPLIT_T, targets + b * SPLIT_T, SPLIT_T * sizeof *targets) != 0;
                }
            }
            dataloader_close(loader);
        }
    }
    EXPECT(different == 0);
}

static void test_seeking_while_the_thread_reads_ahead_gives_what_reading_without_it_gives(void) {
    write_counting_shard("a.bin", 0, 5000);
    struct dataloader_options options = default_options(20, 3);
    struct dataloader *plain = open_or_exit(&options);
    options.prefetch = true;
    struct dataloader *ahead = open_or_exit(&options);
    int different = 0;
    uint32_t random = 1;
    for (int i = 0; i < 3000; i++) {
        random = random * 1664525u + 1013904223u;
        if (random >> 30 == 0) {
            int64_t position = (random >> 8) % 3000;
            EXPECT(dataloader_seek(plain, position) == STATUS_OK &&
                   dataloader_seek(ahead, position) == STATUS_OK);
        }
        int32_t batches[2][2][60];
        EXPECT(dataloader_next(plain, batches[0][0], batches[0][1], NULL) == STATUS_OK);
        EXPECT(dataloader_next(ahead, batches[1][0], batches[1][1], NULL) == STATUS_OK);
        EXPECT(dataloader_position(plain) == dataloader_position(ahead));
        different += memcmp(batches[0], batches[1], sizeof batches[0]) != 0;
    }
    EXPECT(different == 0);
    dataloader_close(plain);
    dataloader_close(ahead);
}

static void test_time_spent_waiting_is_added_up(void) {
    write_counting_shard("a.bin", 0, 5000);
    struct dataloader_options options = default_options(20, 3);
    struct dataloader *loader = open_or_exit(&options);
    int32_t inputs[60], targets[60];
    double seconds = 100;
    EXPECT(dataloader_next(loader, inputs, targets, &seconds) == STATUS_OK);
    EXPECT(seconds > 100 && seconds < 110);
    dataloader_close(loader);
}

/* ---- large data ---- */

/* A sparse file of 2^31 - 1 tokens, the most a header can count: 4 GiB that take a few kilobytes. */
static void test_a_shard_of_4_GiB_is_read_right_on_both_sides_of_2_GiB_and_at_its_end(void) {
    const int64_t tokens = SHARD_MAX_TOKENS, marks[] = {0, INT64_C(1) << 30, tokens - 9};
    write_raw("a.bin", SHARD_MAGIC, 1, (int32_t)tokens, 0);
    int file = open(in_folder("a.bin"), O_WRONLY);
    EXPECT(ftruncate(file, SHARD_HEADER_BYTES + 2 * tokens) == 0);
    for (int i = 0; i < 3; i++) {
        for (int j = -8; j < 9; j++) {
            uint16_t token = (uint16_t)(1000 * (i + 1) + j);
            if (marks[i] + j >= 0) {
                EXPECT(pwrite(file, &token, 2, SHARD_HEADER_BYTES + 2 * (marks[i] + j)) == 2);
            }
        }
    }
    close(file);
    struct dataloader_options options = default_options(8, 1);
    options.shuffle = false;
    options.repeat = false;
    struct dataloader *loader = open_or_exit(&options);
    EXPECT(dataloader_tokens(loader) == tokens);
    EXPECT(dataloader_windows(loader) == (tokens - 1 + 7) / 8);
    int32_t inputs[8], targets[8];
    for (int i = 0; i < 2; i++) {
        EXPECT(dataloader_seek(loader, marks[i] / 8) == STATUS_OK);
        EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
        EXPECT(inputs[0] == 1000 * (i + 1) && targets[7] == 1000 * (i + 1) + 8);
    }
    EXPECT(dataloader_seek(loader, dataloader_windows(loader) - 1) == STATUS_OK);
    EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
    EXPECT(inputs[0] == 3000 && targets[7] == 3008);
    dataloader_close(loader);

    options.shuffle = true;
    options.repeat = true;
    options.prefetch = true;
    loader = open_or_exit(&options);
    for (int i = 0; i < 100; i++) {
        EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
    }
    dataloader_close(loader);
}

static void test_more_shards_than_files_may_be_open_are_read_right(void) {
    enum { SHARDS = 600 };
    for (int i = 0; i < SHARDS; i++) {
        char name[32];
        snprintf(name, sizeof name, "%04d.bin", i);
        write_counting_shard(name, 100 * i, 9);
    }
    struct rlimit before, limit;
    EXPECT(getrlimit(RLIMIT_NOFILE, &before) == 0);
    limit = before;
    limit.rlim_cur = 300;
    EXPECT(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    struct dataloader_options options = default_options(4, 10);
    struct dataloader *loader = open_or_exit(&options);
    EXPECT(dataloader_windows(loader) == 2 * SHARDS);
    int seen[SHARDS][2] = {{0}};
    for (int i = 0; i < 2 * SHARDS / 10; i++) {
        int32_t inputs[40], targets[40];
        EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
        for (int b = 0; b < 10; b++) {
            seen[inputs[4 * b] / 100][inputs[4 * b] % 100 / 4]++;
        }
    }
    for (int i = 0; i < SHARDS; i++) {
        EXPECT(seen[i][0] == 1 && seen[i][1] == 1);
    }
    dataloader_close(loader);
    EXPECT(setrlimit(RLIMIT_NOFILE, &before) == 0);
}

static void test_a_shard_replaced_by_one_of_another_size_is_refused(void) {
    enum { SHARDS = 257 }; /* the last shares its place among the open files with the first */
    for (int i = 0; i < SHARDS; i++) {
        char name[32];
        snprintf(name, sizeof name, "%04d.bin", i);
        write_counting_shard(name, i, 9);
    }
    struct dataloader_options options = default_options(8, 1);
    options.shuffle = false;
    options.repeat = false;
    struct dataloader *loader = open_or_exit(&options);
    write_counting_shard("0256.bin", 0, 100);
    int32_t inputs[8], targets[8];
    EXPECT(dataloader_seek(loader, 256) == STATUS_OK);
    for (int again = 0; again < 2; again++) {
        EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_ERROR);
        EXPECT_CONTAINS(error_message(), "0256.bin: the file was replaced while in use");
    }
    dataloader_close(loader);
}

/* ---- synthetic data ---- */

static void test_synthetic_tokens_depend_on_seed_and_position_alone(void) {
    struct dataloader_options options = default_options(13, 6);
    options.pattern = "synthetic";
    options.vocab_size = 50257;
    struct dataloader *whole = open_or_exit(&options);
    EXPECT(dataloader_windows(whole) == DATALOADER_ENDLESS);
    EXPECT(dataloader_shards(whole) == 0);
    int32_t inputs[6 * 13], targets[6 * 13];
    EXPECT(dataloader_next(whole, inputs, targets, NULL) == STATUS_OK);
    for (int rank = 0; rank < 3; rank++) {
        options.micro_batch = 2;
        options.rank = rank;
        options.ranks = 3;
        options.prefetch = true;
        struct dataloader *part = open_or_exit(&options);
        int32_t part_inputs[2 * 13], part_targets[2 * 13];
        EXPECT(dataloader_next(part, part_inputs, part_targets, NULL) == STATUS_OK);
        EXPECT(memcmp(inputs + rank * 26, part_inputs, sizeof part_inputs) == 0);
        EXPECT(memcmp(targets + rank * 26, part_targets, sizeof part_targets) == 0);
        dataloader_close(part);
    }
    for (int b = 0; b < 6; b++) {
        for (int t = 0; t < 12; t++) {
            EXPECT(targets[b * 13 + t] == inputs[b * 13 + t + 1]);
        }
    }
    int32_t later_inputs[6 * 13], later_targets[6 * 13];
    EXPECT(dataloader_next(whole, later_inputs, later_targets, NULL) == STATUS_OK);
    EXPECT(memcmp(inputs, later_inputs, sizeof inputs) != 0);
    dataloader_close(whole);
}

static void test_synthetic_tokens_are_uniform_over_the_vocabulary(void) {
    enum { VOCAB = 100, COUNT = 64 * 1000 };
    struct dataloader_options options = default_options(1000, 64);
    options.pattern = "synthetic";
    options.vocab_size = VOCAB;
    struct dataloader *loader = open_or_exit(&options);
    static int32_t inputs[COUNT], targets[COUNT];
    EXPECT(dataloader_next(loader, inputs, targets, NULL) == STATUS_OK);
    int counts[VOCAB] = {0};
    for (int i = 0; i < COUNT; i++) {
        EXPECT(inputs[i] >= 0 && inputs[i] < VOCAB);
        counts[inputs[i]]++;
    }
    double chi_square = 0, expected = (double)COUNT / VOCAB; /* 99 degrees of freedom: 99 +- 14 */
    for (int i = 0; i < VOCAB; i++) {
        chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    EXPECT(chi_square > 45 && chi_square < 170);
    dataloader_close(loader);
}

#define RUN_IN_EMPTY_FOLDER(test)                                                                            \
    do {                                                                                                     \
        empty_folder();                                                                                      \
        RUN(test);                                                                                           \
    } while (0)

int main(void) {
    make_folder("test_dataloader");
    snprintf(all_shards, sizeof all_shards, "%s/*.bin", folder);
    RUN_IN_EMPTY_FOLDER(test_a_shard_is_1024_header_bytes_then_16_bit_tokens);
    RUN_IN_EMPTY_FOLDER(test_a_shard_written_in_pieces_equals_one_written_at_once);
    RUN_IN_EMPTY_FOLDER(test_a_shard_cannot_be_written_where_there_is_no_folder_or_no_room);
    RUN_IN_EMPTY_FOLDER(test_a_shard_takes_no_more_tokens_than_its_header_can_count);
    RUN_IN_EMPTY_FOLDER(test_no_matching_shard_names_option_pattern_and_tool);
    RUN_IN_EMPTY_FOLDER(test_a_file_whose_name_looks_like_a_pattern_is_meant_itself);
    RUN_IN_EMPTY_FOLDER(test_damaged_shards_are_refused_by_name_and_remedy);
    RUN_IN_EMPTY_FOLDER(test_one_damaged_shard_among_good_ones_is_named);
    RUN_IN_EMPTY_FOLDER(test_folders_and_pipes_are_no_shards);
    RUN_IN_EMPTY_FOLDER(test_training_data_must_fill_one_batch_of_all_ranks);
    RUN_IN_EMPTY_FOLDER(test_a_token_over_the_vocabulary_names_file_index_and_value);
    RUN_IN_EMPTY_FOLDER(test_a_file_cut_or_removed_while_in_use_is_an_error_and_recovers_when_restored);
    RUN(test_a_file_that_is_away_for_a_moment_is_waited_for);
    RUN_IN_EMPTY_FOLDER(test_seek_refuses_positions_that_no_run_reaches);
    RUN_IN_EMPTY_FOLDER(
        test_without_shuffle_and_repeat_windows_come_in_order_of_the_sorted_names_and_every_target_counts_once);
    RUN_IN_EMPTY_FOLDER(test_any_sequence_length_gives_every_token_as_a_target_once);
    RUN_IN_EMPTY_FOLDER(test_file_order_repeats_epoch_after_epoch);
    RUN_IN_EMPTY_FOLDER(test_a_shuffled_epoch_shows_every_token);
    RUN_IN_EMPTY_FOLDER(test_an_epoch_visits_every_window_once_for_any_number_of_windows);
    RUN_IN_EMPTY_FOLDER(test_orders_differ_by_epoch_and_seed_and_repeat_for_the_same);
    RUN_IN_EMPTY_FOLDER(test_an_order_looks_random);
    RUN_IN_EMPTY_FOLDER(test_every_order_of_a_few_windows_is_equally_likely);
    RUN_IN_EMPTY_FOLDER(test_the_step_to_the_next_window_is_uniform);
    RUN_IN_EMPTY_FOLDER(test_every_split_into_ranks_and_micro_batches_gives_the_same_sequences);
    RUN_IN_EMPTY_FOLDER(test_a_run_stopped_anywhere_goes_on_exactly_under_other_ranks_too);
    RUN_IN_EMPTY_FOLDER(test_seeking_while_the_thread_reads_ahead_gives_what_reading_without_it_gives);
    RUN_IN_EMPTY_FOLDER(test_time_spent_waiting_is_added_up);
    RUN_IN_EMPTY_FOLDER(test_a_shard_of_4_GiB_is_read_right_on_both_sides_of_2_GiB_and_at_its_end);
    RUN_IN_EMPTY_FOLDER(test_more_shards_than_files_may_be_open_are_read_right);
    RUN_IN_EMPTY_FOLDER(test_a_shard_replaced_by_one_of_another_size_is_refused);
    RUN_IN_EMPTY_FOLDER(test_synthetic_tokens_depend_on_seed_and_position_alone);
    RUN_IN_EMPTY_FOLDER(test_synthetic_tokens_are_uniform_over_the_vocabulary);
    remove_tree(folder);
    return test_summary();
}
