/* Options: what every way of giving one means, which way wins, and the exact line that each mistake is answered with. */
#include "attention/attention.h"
#include "llmc/gpus.h"
#include "llmc/model.h"
#include "llmc/options.h"
#include "llmc/presets.h"
#include "llmc/schedule.h"
#include "test.h"

#include <stdlib.h>
#include <unistd.h>

static enum status parse_with(struct options *o, const struct json *stored, const char *const *argv) {
    int argc = 0;
    while (argv[argc] != NULL) {
        argc++;
    }
    return options_parse(o, argc, argv, stored);
}

/* PARSE(&options, "--layers", "3"): the command line */
#define PARSE(o, ...) parse_with(o, NULL, (const char *const[]){"train_gpt", __VA_ARGS__, NULL})

/* The command line is refused by the parser with exactly this line. */
#define EXPECT_REFUSED(message, ...)                                                                         \
    do {                                                                                                     \
        struct options refused_;                                                                             \
        EXPECT(options_init(&refused_) == STATUS_OK);                                                        \
        EXPECT(PARSE(&refused_, __VA_ARGS__) == STATUS_ERROR);                                               \
        EXPECT_STRING(error_message(), message);                                                             \
        options_free(&refused_);                                                                             \
    } while (0)

/* The command line is read, and then refused by options_check with exactly this line. */
#define EXPECT_INVALID(message, ...)                                                                         \
    do {                                                                                                     \
        struct options invalid_;                                                                             \
        EXPECT(options_init(&invalid_) == STATUS_OK);                                                        \
        EXPECT(PARSE(&invalid_, "--train-data", "x.bin", __VA_ARGS__) == STATUS_OK);                         \
        EXPECT(options_check(&invalid_) == STATUS_ERROR);                                                    \
        EXPECT_STRING(error_message(), message);                                                             \
        options_free(&invalid_);                                                                             \
    } while (0)

#define EXPECT_VALID(...)                                                                                    \
    do {                                                                                                     \
        struct options valid_;                                                                               \
        EXPECT(options_init(&valid_) == STATUS_OK);                                                          \
        EXPECT(PARSE(&valid_, "--train-data", "x.bin", __VA_ARGS__) == STATUS_OK);                           \
        EXPECT(options_check(&valid_) == STATUS_OK);                                                         \
        options_free(&valid_);                                                                               \
    } while (0)

#define EXPECT_CONFIG_REFUSED(message, text)                                                                 \
    do {                                                                                                     \
        struct options config_;                                                                              \
        EXPECT(options_init(&config_) == STATUS_OK);                                                         \
        EXPECT(options_parse_config(&config_, text, sizeof(text) - 1, "my.conf") == STATUS_ERROR);           \
        EXPECT_STRING(error_message(), message);                                                             \
        options_free(&config_);                                                                              \
    } while (0)

static struct json *json_of(const char *text) {
    struct json *value = NULL;
    EXPECT(json_parse(&value, text, strlen(text), "state.json") == STATUS_OK);
    return value;
}

static char *write_json(const struct options *o) {
    struct json_writer w;
    char *text = NULL;
    json_writer_init(&w, false);
    json_begin_object(&w);
    options_write_json(o, &w);
    json_end_object(&w);
    EXPECT(json_writer_finish(&w, &text, NULL) == STATUS_OK);
    return text;
}

/* ---- defaults and values ---- */

static void test_defaults_are_those_of_the_papers_and_everything_optional_is_off(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--train-data=x.bin") == STATUS_OK);
    EXPECT(options_check(&o) == STATUS_OK);
    EXPECT_STRING(o.model, "tiny");
    EXPECT(o.beta1 == 0.9 && o.beta2 == 0.95 && o.epsilon == 1e-8 && o.weight_decay == 0.1 && o.clip == 1.0);
    EXPECT_STRING(o.schedule, "cosine");
    EXPECT(o.final_learning_rate == 0.1 && o.warmup_steps == -1 && o.decay_steps == -1);
    EXPECT(o.seed == 1337 && o.steps == 0 && o.epochs == 1.0 && o.global_batch == 0);
    EXPECT(o.max_skipped == 20 && o.skip_loss_zscore == 0 && o.skip_norm_zscore == 0);
    EXPECT(o.keep == 2 && o.keep_every == 0 && o.sample_every == 0 && o.checkpoint_every == 1000);
    EXPECT(o.shuffle && !o.resume && !o.plan && !o.dry_run && !o.quiet && !o.help);
    EXPECT_STRING(o.val_data, "");
    EXPECT_STRING(o.run_dir, "");
    EXPECT_STRING(o.device, "auto");
    EXPECT_STRING(o.recompute, "none");
    EXPECT(o.ranks == 0 && o.zero == -1 && o.threads == 0 && o.max_restarts == 0 && o.peak_tflops == 0);
    options_free(&o);
}

static void test_every_option_sets_its_own_field(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(
        PARSE(&o, "--run-dir", "a", "--resume", "--init-from", "b", "--seed", "1", "--plan", "--gpu", "h200",
            "--dry-run", "--quiet", "--model", "gpt3-125m", "--layers", "2", "--channels", "30", "--heads",
            "6", "--kv-heads", "3", "--seq-len", "4", "--vocab-size", "500", "--micro-batch", "5",
            "--global-batch", "200", "--steps", "7", "--epochs", "0.5", "--learning-rate", "1e-4",
            "--schedule", "wsd", "--warmup-steps", "8", "--decay-steps", "9", "--final-learning-rate", "0.25",
            "--beta1", "0.8", "--beta2", "0.7", "--epsilon", "1e-6", "--weight-decay", "0.2", "--clip", "2.5",
            "--max-skipped", "10", "--skip-loss-zscore", "4", "--skip-norm-zscore", "6", "--train-data", "c",
            "--val-data", "d", "--no-shuffle", "--tokenizer", "bytes", "--eval-every", "11", "--eval-batches",
            "12", "--sample-every", "13", "--sample-tokens", "14", "--sample-prompt", "e",
            "--sample-temperature", "1.5", "--checkpoint-every", "15", "--keep", "16", "--keep-every", "17",
            "--log-every", "18", "--device", "cpu", "--ranks", "19", "--zero", "1", "--threads", "20",
            "--recompute", "block", "--grad-dtype", "bf16", "--attention", "fa2", "--logits-mib", "21",
            "--peak-tflops", "312.5", "--comm-timeout", "22.5", "--max-restarts", "23", "--reduce-dtype",
            "bf16", "--comm-ctas", "24", "--deterministic", "--generate", "f", "--evaluate", "--export", "g",
            "--info", "h", "--samples", "25", "--sample-top-k", "26", "--sample-top-p", "0.9",
            "--sample-repetition-penalty", "1.25", "--multiple-choice", "i") == STATUS_OK);
    EXPECT_STRING(o.generate, "f");
    EXPECT_STRING(o.export_to, "g");
    EXPECT_STRING(o.info, "h");
    EXPECT_STRING(o.multiple_choice, "i");
    EXPECT(o.evaluate && o.samples == 25 && o.sample_top_k == 26 && o.sample_top_p == 0.9);
    EXPECT(o.sample_repetition_penalty == 1.25);
    EXPECT_STRING(o.run_dir, "a");
    EXPECT_STRING(o.init_from, "b");
    EXPECT_STRING(o.gpu, "h200");
    EXPECT_STRING(o.model, "gpt3-125m");
    EXPECT_STRING(o.schedule, "wsd");
    EXPECT_STRING(o.train_data, "c");
    EXPECT_STRING(o.val_data, "d");
    EXPECT_STRING(o.tokenizer, "bytes");
    EXPECT_STRING(o.sample_prompt, "e");
    EXPECT_STRING(o.device, "cpu");
    EXPECT_STRING(o.recompute, "block");
    EXPECT_STRING(o.grad_dtype, "bf16");
    EXPECT_STRING(o.attention, "fa2");
    EXPECT(o.resume && o.plan && o.dry_run && o.quiet && !o.shuffle);
    EXPECT(o.seed == 1 && o.layers == 2 && o.channels == 30 && o.heads == 6 && o.kv_heads == 3);
    EXPECT(o.seq_len == 4 && o.vocab_size == 500 && o.micro_batch == 5 && o.global_batch == 200);
    EXPECT(o.steps == 7 && o.warmup_steps == 8 && o.decay_steps == 9 && o.max_skipped == 10);
    EXPECT(o.eval_every == 11 && o.eval_batches == 12 && o.sample_every == 13 && o.sample_tokens == 14);
    EXPECT(o.checkpoint_every == 15 && o.keep == 16 && o.keep_every == 17 && o.log_every == 18);
    EXPECT(o.ranks == 19 && o.zero == 1 && o.threads == 20 && o.logits_mib == 21 && o.max_restarts == 23);
    EXPECT(o.epochs == 0.5 && o.learning_rate == 1e-4 && o.final_learning_rate == 0.25);
    EXPECT(o.beta1 == 0.8 && o.beta2 == 0.7 && o.epsilon == 1e-6 && o.weight_decay == 0.2 && o.clip == 2.5);
    EXPECT(o.skip_loss_zscore == 4 && o.skip_norm_zscore == 6 && o.sample_temperature == 1.5);
    EXPECT(o.peak_tflops == 312.5 && o.comm_timeout == 22.5 && o.comm_ctas == 24 && o.deterministic);
    EXPECT_STRING(o.reduce_dtype, "bf16");
    options_free(&o);
}

static void test_a_value_follows_as_next_word_or_after_equals_and_the_last_one_wins(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--steps=5", "--zero", "-1", "--sample-prompt=--steps=9", "--seed", "1", "--seed=2",
               "--val-data=") == STATUS_OK);
    EXPECT(o.steps == 5 && o.zero == -1 && o.seed == 2);
    EXPECT_STRING(o.sample_prompt, "--steps=9");
    EXPECT_STRING(o.val_data, "");
    options_free(&o);
}

static void test_switches_are_set_by_name_no_name_and_value(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--quiet", "--no-shuffle") == STATUS_OK && o.quiet && !o.shuffle);
    EXPECT(PARSE(&o, "--quiet=true", "--shuffle=false") == STATUS_OK && o.quiet && !o.shuffle);
    EXPECT(PARSE(&o, "--quiet", "--no-quiet") == STATUS_OK && !o.quiet && o.shuffle);
    options_free(&o);
    EXPECT_REFUSED("--quiet: \"yes\" is not a switch's value; allowed: true or false", "--quiet=yes");
    EXPECT_REFUSED("\"false\": not an option; options are --name value, see --help", "--quiet", "false");
    EXPECT_REFUSED("--no-steps: only switches have a --no- form, and it takes no value; write --steps",
        "--no-steps", "5");
    EXPECT_REFUSED("--no-quiet=true: only switches have a --no- form, and it takes no value; write --quiet",
        "--no-quiet=true");
}

static void test_whole_numbers_take_decimal_and_binary_suffixes(void) {
    static const struct {
        const char *text;
        int64_t value;
    } cases[] = {{"0", 0}, {"007", 7}, {"600k", 600000}, {"2M", 2000000}, {"3G", 3000000000},
        {"512Ki", 524288}, {"1Mi", 1048576}, {"4Gi", 4294967296}, {"9007199254740992", 9007199254740992}};
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(PARSE(&o, "--steps", cases[i].text) == STATUS_OK);
        EXPECT(o.steps == cases[i].value);
    }
    options_free(&o);
}

static void test_what_is_no_whole_number_is_refused(void) {
    static const char *const texts[] = {
        "", "ten", "1.5", "1e3", "0x10", " 5", "5 ", "+5", "-", "--5", "5kk", "5K", "5ki", "k", "\xd9\xa3"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        char argument[64], message[200];
        snprintf(argument, sizeof argument, "--steps=%s", texts[i]);
        snprintf(message, sizeof message,
            "--steps: \"%s\" is not a whole number; allowed: 0 or more, up to 2^53", texts[i]);
        EXPECT_REFUSED(message, argument);
    }
}

static void test_numbers_are_decimal_and_finite(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--clip", "1e-4") == STATUS_OK && o.clip == 1e-4);
    EXPECT(PARSE(&o, "--clip", ".5") == STATUS_OK && o.clip == 0.5);
    EXPECT(PARSE(&o, "--clip", "2.") == STATUS_OK && o.clip == 2.0);
    EXPECT(PARSE(&o, "--clip", "+6.02E+2") == STATUS_OK && o.clip == 602.0);
    options_free(&o);
    static const char *const texts[] = {"", "nan", "inf", "infinity", "0x1p3", "1e-3x", "1,5", "1e", ".",
        "e5", " 1", "1 ", "1.5.2", "--1", "5k"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        char argument[64], message[200];
        snprintf(argument, sizeof argument, "--clip=%s", texts[i]);
        snprintf(
            message, sizeof message, "--clip: \"%s\" is not a number; allowed: 0 to 1000000000", texts[i]);
        EXPECT_REFUSED(message, argument);
    }
}

static void test_values_out_of_range_are_refused_with_the_range(void) {
    EXPECT_REFUSED("--layers: -2 is out of range; allowed: 0 to 1024", "--layers", "-2");
    EXPECT_REFUSED("--layers: 1025 is out of range; allowed: 0 to 1024", "--layers", "1025");
    EXPECT_REFUSED("--ranks: 4097 is out of range; allowed: 0 to 4096", "--ranks", "4097");
    EXPECT_REFUSED("--vocab-size: 70000 is out of range; allowed: 0 to 65536", "--vocab-size", "70000");
    EXPECT_REFUSED("--zero: 3 is out of range; allowed: -1 to 2", "--zero", "3");
    EXPECT_REFUSED("--steps: -1 is out of range; allowed: 0 or more, up to 2^53", "--steps", "-1");
    EXPECT_REFUSED("--beta1: 1.5 is out of range; allowed: 0 to 0.999999", "--beta1", "1.5");
    EXPECT_REFUSED("--epsilon: 0 is out of range; allowed: 1e-20 to 1", "--epsilon", "0");
    EXPECT_REFUSED("--learning-rate: -1e-4 is out of range; allowed: 0 to 100", "--learning-rate", "-1e-4");
    EXPECT_REFUSED("--clip: 1e999 is out of range; allowed: 0 to 1000000000", "--clip", "1e999");
    /* more than 64 bits, also through the suffix */
    EXPECT_REFUSED("--steps: 99999999999999999999 is out of range; allowed: 0 or more, up to 2^53", "--steps",
        "99999999999999999999");
    EXPECT_REFUSED("--steps: -99999999999999999999 is out of range; allowed: 0 or more, up to 2^53",
        "--steps", "-99999999999999999999");
    EXPECT_REFUSED(
        "--steps: 99999999999Gi is out of range; allowed: 0 or more, up to 2^53", "--steps", "99999999999Gi");
    EXPECT_REFUSED("--steps: 9007199254740993k is out of range; allowed: 0 or more, up to 2^53", "--steps",
        "9007199254740993k");
}

static void test_choices_are_those_that_the_rooms_below_know(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    for (int i = 0; i < SCHEDULE_KINDS; i++) {
        EXPECT(PARSE(&o, "--schedule", schedule_names[i]) == STATUS_OK);
        EXPECT_STRING(o.schedule, schedule_names[i]);
    }
    for (int i = 0; i < RECOMPUTE_LEVELS; i++) {
        EXPECT(PARSE(&o, "--recompute", recompute_names[i]) == STATUS_OK);
        EXPECT_STRING(o.recompute, recompute_names[i]);
    }
    for (int i = 0; attention_kernel_name(i) != NULL; i++) {
        EXPECT(PARSE(&o, "--attention", attention_kernel_name(i)) == STATUS_OK);
        EXPECT_STRING(o.attention, attention_kernel_name(i));
    }
    options_free(&o);
    EXPECT_REFUSED(
        "--schedule: cosin is no choice; allowed: cosine linear constant wsd", "--schedule", "cosin");
    EXPECT_REFUSED("--schedule: cosine linear is no choice; allowed: cosine linear constant wsd",
        "--schedule", "cosine linear");
    EXPECT_REFUSED("--recompute:  is no choice; allowed: none gelu layernorm block", "--recompute=");
}

/* ---- mistakes on the command line ---- */

static void test_an_unknown_option_is_answered_with_the_nearest_name(void) {
    EXPECT_REFUSED("--layer: no such option; did you mean --layers? --help lists them", "--layer", "3");
    EXPECT_REFUSED(
        "--mirco-batch: no such option; did you mean --micro-batch? --help lists them", "--mirco-batch=3");
    EXPECT_REFUSED("--learning_rate: no such option; did you mean --learning-rate? --help lists them",
        "--learning_rate");
    EXPECT_REFUSED("--batch: no such option; did you mean --micro-batch? --help lists them", "--batch", "3");
    EXPECT_REFUSED("--Seed: no such option; did you mean --seed? --help lists them", "--Seed", "3");
    EXPECT_REFUSED("--no-shufle: no such option; did you mean --shuffle? --help lists them", "--no-shufle");
    EXPECT_REFUSED("--xyzzy: no such option; --help lists them", "--xyzzy");
    EXPECT_REFUSED("--: no such option; --help lists them", "--");
    EXPECT_REFUSED("--: no such option; --help lists them", "--=3");
}

static void test_a_very_long_word_is_refused_in_a_short_line(void) {
    char word[10000];
    memset(word, 'a', sizeof word - 1);
    word[sizeof word - 1] = '\0';
    word[0] = word[1] = '-';
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, word) == STATUS_ERROR && strlen(error_message()) < 120);
    EXPECT(PARSE(&o, word + 2) == STATUS_ERROR && strlen(error_message()) < 120);
    EXPECT(PARSE(&o, "--steps", word + 2) == STATUS_ERROR && strlen(error_message()) < 120);
    EXPECT(PARSE(&o, "--schedule", word + 2) == STATUS_ERROR && strlen(error_message()) < 120);
    EXPECT(PARSE(&o, "--model", word + 2) == STATUS_ERROR && strlen(error_message()) < 120);
    options_free(&o);
}

static void test_an_option_without_its_value_is_refused(void) {
    EXPECT_REFUSED("--steps: no value; write --steps STEPS", "--steps");
    EXPECT_REFUSED("--steps: no value; write --steps STEPS", "--steps", "--quiet");
    EXPECT_REFUSED("--run-dir: no value; write --run-dir FOLDER", "--quiet", "--run-dir");
}

static void test_words_that_are_no_options_are_refused(void) {
    EXPECT_REFUSED("\"shard.bin\": not an option; options are --name value, see --help", "shard.bin");
    EXPECT_REFUSED("\"-steps\": not an option; options are --name value, see --help", "-steps", "3");
    EXPECT_REFUSED("\"\": not an option; options are --name value, see --help", "");
}

static void test_help_anywhere_is_all_that_counts(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--bogus", "--help") == STATUS_OK && o.help);
    EXPECT(PARSE(&o, "-h") == STATUS_OK && o.help);
    EXPECT(PARSE(&o, "--quiet") == STATUS_OK && !o.help);
    options_free(&o);
}

static void test_no_arguments_at_all_are_the_defaults(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(options_parse(&o, 0, NULL, NULL) == STATUS_OK && o.layers == 4);
    options_free(&o);
}

/* ---- config files ---- */

static void test_a_config_file_has_names_values_quotes_and_comments(void) {
    static const char text[] = "# a comment\n"
                               "\n"
                               "steps=5\n"
                               "  micro-batch =\t8   # sequences\r\n"
                               "quiet = true\n"
                               "run-dir = runs/with space # not this\n"
                               "train-data = \"data/#1/*.bin\" # this\n"
                               "sample-prompt = \" a\\tb\\n\\\"c\\\" \\\\\"\n"
                               "val-data = # nothing\n"
                               "schedule = \"wsd\"\n"
                               "steps = 6";
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(options_parse_config(&o, text, strlen(text), "my.conf") == STATUS_OK);
    EXPECT(o.steps == 6 && o.micro_batch == 8 && o.quiet);
    EXPECT_STRING(o.run_dir, "runs/with space");
    EXPECT_STRING(o.train_data, "data/#1/*.bin");
    EXPECT_STRING(o.sample_prompt, " a\tb\n\"c\" \\");
    EXPECT_STRING(o.val_data, "");
    EXPECT_STRING(o.schedule, "wsd");
    options_free(&o);
}

static void test_mistakes_in_a_config_file_name_file_and_line(void) {
    EXPECT_CONFIG_REFUSED(
        "my.conf:2: layrs: no such option; did you mean layers? --help lists them", "steps = 3\nlayrs = 2\n");
    EXPECT_CONFIG_REFUSED(
        "my.conf:1: --steps: no such option; did you mean steps? --help lists them", "--steps = 3");
    EXPECT_CONFIG_REFUSED("my.conf:3: no \"=\" after \"steps:\"; write name = value", "\n# x\nsteps: 3\n");
    EXPECT_CONFIG_REFUSED("my.conf:1: no \"=\" after \"quiet\"; write name = value", "quiet");
    EXPECT_CONFIG_REFUSED("my.conf:1: no \"=\" after \"steps\"; write name = value", "steps # = 3");
    EXPECT_CONFIG_REFUSED(
        "my.conf:2: steps: \"ten\" is not a whole number; allowed: 0 or more, up to 2^53", "\nsteps = ten\n");
    EXPECT_CONFIG_REFUSED(
        "my.conf:1: steps: \"\" is not a whole number; allowed: 0 or more, up to 2^53", "steps =\n");
    EXPECT_CONFIG_REFUSED("my.conf:1: beta2: 1 is out of range; allowed: 0 to 0.999999", "beta2 = 1\n");
    EXPECT_CONFIG_REFUSED("my.conf:1: device: tpu is no choice; allowed: auto cpu cuda", "device = tpu");
    EXPECT_CONFIG_REFUSED(
        "my.conf:1: quiet: \"yes\" is not a switch's value; allowed: true or false", "quiet = yes");
    EXPECT_CONFIG_REFUSED(
        "my.conf:2: the quote is not closed; end the value with \"", "\nrun-dir = \"runs/a\nseed = 1\"\n");
    EXPECT_CONFIG_REFUSED(
        "my.conf:1: text after the closing quote; only a # comment may follow", "run-dir = \"runs/a\" b\n");
    EXPECT_CONFIG_REFUSED("my.conf:1: a backslash in quotes is followed by n, t, \" or another backslash",
        "run-dir = \"runs\\a\"\n");
    EXPECT_CONFIG_REFUSED("my.conf:1: a backslash in quotes is followed by n, t, \" or another backslash",
        "run-dir = \"runs\\");
    EXPECT_CONFIG_REFUSED("my.conf:2: a zero byte; a config file is plain text", "seed = 1\nste\0ps = 3\n");
    EXPECT_CONFIG_REFUSED(
        "my.conf:1: config: for the command line only; take it out of the file", "config = other.conf\n");
    EXPECT_CONFIG_REFUSED(
        "my.conf:1: help: for the command line only; take it out of the file", "help = true\n");
    EXPECT_CONFIG_REFUSED("my.conf:1: : no such option; --help lists them", "= 3\n");
}

static void test_a_config_file_that_cannot_be_read_is_refused(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--config", "/nowhere/my.conf") == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "/nowhere/my.conf");
    options_free(&o);
}

/* ---- who wins ---- */

static void write_file(char *path, const char *text) {
    int file = mkstemp(path);
    EXPECT(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text));
    close(file);
}

static void test_the_command_line_wins_over_the_config_file_over_the_checkpoint_over_the_defaults(void) {
    char first[] = "/tmp/flashgpt-options-XXXXXX", second[] = "/tmp/flashgpt-options-XXXXXX";
    write_file(first, "seed = 30\nsteps = 30\nclip = 30\nkeep = 30\n");
    write_file(second, "keep = 31\n");
    struct json *stored = json_of("{\"seed\": 20, \"steps\": 20, \"beta1\": 0.2, \"ranks\": 20}");
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    /* wherever --config stands on the line */
    EXPECT(parse_with(&o, stored,
               (const char *const[]){
                   "train_gpt", "--seed", "40", "--config", first, "--config", second, NULL}) == STATUS_OK);
    EXPECT(o.seed == 40);    /* the command line's */
    EXPECT(o.steps == 30);   /* the file's */
    EXPECT(o.clip == 30);    /* the file's */
    EXPECT(o.keep == 31);    /* the later file's */
    EXPECT(o.beta1 == 0.2);  /* the checkpoint's */
    EXPECT(o.beta2 == 0.95); /* the default */
    EXPECT(o.ranks == 0);    /* not for a checkpoint to say */
    EXPECT_STRING(o.config, second);
    options_free(&o);
    json_free(stored);
    unlink(first);
    unlink(second);
}

static void test_given_options_are_those_of_the_user_not_of_the_checkpoint_or_preset(void) {
    struct json *stored = json_of("{\"layers\": 3, \"seed\": 5}");
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(parse_with(&o, stored, (const char *const[]){"train_gpt", "--heads", "2", "--quiet", NULL}) ==
           STATUS_OK);
    EXPECT(o.layers == 3 && o.channels == 128);
    EXPECT(options_given(&o, "heads") && options_given(&o, "quiet"));
    EXPECT(!options_given(&o, "layers") && !options_given(&o, "channels") && !options_given(&o, "seed"));
    EXPECT(!options_given(&o, "no-such-option"));
    /* a later parse starts anew */
    EXPECT(PARSE(&o, "--seed", "1") == STATUS_OK);
    EXPECT(options_given(&o, "seed") && !options_given(&o, "heads") && o.layers == 4);
    EXPECT(options_parse_config(&o, "keep = 3", 8, "my.conf") == STATUS_OK && options_given(&o, "keep"));
    EXPECT(options_parse_config(&o, "\xef\xbb\xbfkeep = 4", 11, "my.conf") == STATUS_OK && o.keep == 4);
    options_free(&o);
    json_free(stored);
}

/* ---- presets ---- */

static void test_presets_have_the_papers_sizes(void) {
    static const struct preset papers[] = {
        /* Radford et al. 2019, table 2; heads of 64 */
        {"gpt2-124m", 12, 768, 12, 1024, 50257, 0, 6e-4},
        {"gpt2-355m", 24, 1024, 16, 1024, 50257, 0, 3e-4},
        {"gpt2-774m", 36, 1280, 20, 1024, 50257, 0, 2.5e-4},
        {"gpt2-1.5b", 48, 1600, 25, 1024, 50257, 0, 2e-4},
        /* Brown et al. 2020, table 2.1 */
        {"gpt3-125m", 12, 768, 12, 2048, 50257, 0, 6e-4},
        {"gpt3-350m", 24, 1024, 16, 2048, 50257, 0, 3e-4},
        {"gpt3-760m", 24, 1536, 16, 2048, 50257, 0, 2.5e-4},
        {"gpt3-1.3b", 24, 2048, 16, 2048, 50257, 0, 2e-4},
        {"gpt3-2.7b", 32, 2560, 32, 2048, 50257, 0, 1.6e-4},
        {"gpt3-2.7b-hd128", 32, 2560, 20, 2048, 50257, 0, 1.6e-4},
        {"gpt3-6.7b", 32, 4096, 32, 2048, 50257, 0, 1.2e-4},
        /* this project's own, over bytes */
        {"tiny", 4, 128, 4, 128, 257, 0, 1e-3},
    };
    int count;
    preset_table(&count);
    EXPECT(count == (int)(sizeof papers / sizeof papers[0]));
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    for (int i = 0; i < count; i++) {
        const struct preset *p = &papers[i];
        EXPECT(PARSE(&o, "--train-data", "x.bin", "--model", p->name) == STATUS_OK);
        EXPECT(options_check(&o) == STATUS_OK);
        EXPECT(o.layers == p->layers && o.channels == p->channels && o.heads == p->heads);
        EXPECT(o.kv_heads == p->heads && o.seq_len == p->seq_len && o.vocab_size == p->vocab_size);
        EXPECT(o.learning_rate == p->learning_rate && o.micro_batch == preset_find(p->name)->micro_batch);
        EXPECT(o.micro_batch > 0);
    }
    options_free(&o);
}

static void test_presets_have_the_published_numbers_of_parameters(void) {
    EXPECT(preset_parameters(preset_find("gpt2-124m")) == 124439808);
    EXPECT(preset_parameters(preset_find("gpt2-355m")) == 354823168);
    EXPECT(preset_parameters(preset_find("gpt2-774m")) == 774030080);
    EXPECT(preset_parameters(preset_find("gpt2-1.5b")) == 1557611200);
    /* and those of the model's own table */
    int count;
    const struct preset *presets = preset_table(&count);
    for (int i = 0; i < count; i++) {
        const struct preset *p = &presets[i];
        struct model_config config = {p->layers, p->channels, p->heads, p->heads, p->seq_len, p->vocab_size};
        struct layout layout;
        EXPECT(layout_init(&layout, &config, 1) == STATUS_OK);
        EXPECT(layout.parameters == preset_parameters(p));
        layout_free(&layout);
    }
    EXPECT(preset_find("gpt4") == NULL);
}

static void test_each_dimension_of_a_preset_can_be_changed(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--heads", "6", "--model", "gpt2-124m") == STATUS_OK);
    EXPECT(o.layers == 12 && o.heads == 6 && o.kv_heads == 6 && o.learning_rate == 6e-4);
    EXPECT(PARSE(&o, "--kv-heads", "4", "--model", "gpt2-124m") == STATUS_OK && o.heads == 12 &&
           o.kv_heads == 4);
    EXPECT(PARSE(&o, "--micro-batch", "3", "--learning-rate", "1") == STATUS_OK);
    EXPECT(o.micro_batch == 3 && o.learning_rate == 1.0);
    options_free(&o);
}

static void test_longer_sequences_keep_the_tokens_of_the_presets_micro_batch(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--model", "gpt3-1.3b", "--seq-len", "8192") == STATUS_OK && o.micro_batch == 4);
    EXPECT(PARSE(&o, "--model", "gpt3-1.3b", "--seq-len", "1024") == STATUS_OK && o.micro_batch == 32);
    EXPECT(PARSE(&o, "--model", "gpt3-1.3b", "--seq-len", "65536") == STATUS_OK && o.micro_batch == 1);
    options_free(&o);
}

static void test_the_tokenizer_follows_the_vocabulary(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--model", "tiny") == STATUS_OK);
    EXPECT_STRING(o.tokenizer, "bytes");
    EXPECT(PARSE(&o, "--model", "gpt2-124m") == STATUS_OK);
    EXPECT_STRING(o.tokenizer, "none");
    EXPECT(PARSE(&o, "--model", "gpt2-124m", "--tokenizer", "bytes") == STATUS_OK);
    EXPECT_STRING(o.tokenizer, "bytes");
    options_free(&o);
}

static void test_an_unknown_preset_is_answered_with_the_nearest_name(void) {
    EXPECT_REFUSED(
        "--model gpt2-124: no such preset; did you mean gpt2-124m? --help lists them", "--model", "gpt2-124");
    EXPECT_REFUSED("--model gtp3-1.3b: no such preset; did you mean gpt3-1.3b? --help lists them", "--model",
        "gtp3-1.3b");
    EXPECT_REFUSED("--model llama: no such preset; --help lists them", "--model", "llama");
    EXPECT_REFUSED("--model : no such preset; --help lists them", "--model=");
}

/* ---- relations ---- */

static void test_heads_divide_channels_and_kv_heads_divide_heads(void) {
    EXPECT_INVALID("--heads 3 does not divide --channels 32; the next lower number that does is 2",
        "--channels", "32", "--heads", "3");
    EXPECT_INVALID("--heads 64 does not divide --channels 32; the next lower number that does is 32",
        "--channels", "32", "--heads", "64");
    EXPECT_INVALID("--kv-heads 5 does not divide --heads 8; the next lower number that does is 4", "--heads",
        "8", "--kv-heads", "5");
    EXPECT_INVALID("--kv-heads 16 does not divide --heads 8; the next lower number that does is 8", "--heads",
        "8", "--kv-heads", "16");
    EXPECT_VALID("--channels", "32", "--heads", "8", "--kv-heads", "2");
}

static void test_the_global_batch_is_a_multiple_of_all_ranks_micro_batches(void) {
    EXPECT_INVALID(
        "--global-batch 500000 is not a multiple of the 131072 tokens of --ranks 8 x --micro-batch 16 x "
        "--seq-len 1024; 393216 and 524288 are",
        "--model", "gpt2-124m", "--ranks", "8", "--micro-batch", "16", "--global-batch", "500k");
    EXPECT_INVALID("--global-batch 33 is not a multiple of the 1024 tokens of --ranks 1 x --micro-batch 8 x "
                   "--seq-len 128; 1024 and 2048 are",
        "--global-batch", "33");
    EXPECT_VALID("--model", "gpt2-124m", "--ranks", "8", "--micro-batch", "16", "--global-batch", "512Ki");
    /* the largest of everything does not overflow */
    EXPECT_INVALID("--global-batch 1 is not a multiple of the 281474976710656 tokens of --ranks 4096 x "
                   "--micro-batch 65536 x --seq-len 1048576; 281474976710656 and 562949953421312 are",
        "--ranks", "4096", "--micro-batch", "65536", "--seq-len", "1048576", "--global-batch", "1");
}

static void test_warm_up_and_decay_are_within_the_steps(void) {
    EXPECT_INVALID("--warmup-steps 11 is more than --steps 10; -1 takes a share of them", "--steps", "10",
        "--warmup-steps", "11");
    EXPECT_INVALID("--decay-steps 11 is more than --steps 10; -1 takes a share of them", "--steps", "10",
        "--decay-steps", "11");
    EXPECT_VALID("--steps", "10", "--warmup-steps", "10");
    EXPECT_VALID("--warmup-steps", "11");
}

static void test_training_needs_data_and_says_how_to_get_some(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--steps", "5") == STATUS_OK);
    EXPECT(options_check(&o) == STATUS_ERROR);
    EXPECT_STRING(error_message(),
        "--train-data is missing: make shards of text with build/prepare and give --train-data "
        "'data/tokens/train*.bin', or take --train-data synthetic to measure speed");
    EXPECT(PARSE(&o, "--plan") == STATUS_OK);
    EXPECT(options_check(&o) == STATUS_OK); /* a plan needs none */
    options_free(&o);
    EXPECT_INVALID("--train-data synthetic has no epochs: give --steps", "--train-data", "synthetic");
    EXPECT_VALID("--train-data", "synthetic", "--steps", "5");
    EXPECT_INVALID("--val-data synthetic has no end: give --eval-batches", "--val-data", "synthetic",
        "--eval-batches", "0");
    EXPECT_VALID("--val-data", "synthetic", "--eval-batches", "1");
}

static void test_what_makes_no_sense_together_is_refused(void) {
    EXPECT_INVALID("--resume needs --run-dir: the folder of the run to continue", "--resume");
    EXPECT_VALID("--resume", "--run-dir", "runs/a");
    EXPECT_INVALID("--gpu h200: only a plan can be for a GPU that is not there; add --plan", "--gpu", "h200");
    EXPECT_INVALID("--gpu voodoo: not in the table of GPUs; --help lists them", "--plan", "--gpu", "voodoo");
    EXPECT_VALID("--plan", "--gpu", "h200");
    EXPECT_INVALID(
        "--grad-dtype bf16 is for GPUs; --device cpu has fp32", "--device", "cpu", "--grad-dtype", "bf16");
    EXPECT_INVALID(
        "--eval-every 100: there is nothing to evaluate on; give --val-data", "--eval-every", "100");
    EXPECT_VALID("--eval-every", "0");
    EXPECT_VALID("--eval-every", "100", "--val-data", "y.bin");
    EXPECT_INVALID("--tokenizer bytes has 257 tokens, more than --vocab-size 256: raise it or take none",
        "--vocab-size", "256", "--tokenizer", "bytes");
    EXPECT_INVALID("--sample-every 5: there is no text without a tokenizer; give --tokenizer, or 0",
        "--model", "gpt2-124m", "--sample-every", "5");
    EXPECT_VALID("--sample-every", "5");
    EXPECT_INVALID("--multiple-choice: a question's text needs a tokenizer; give --tokenizer", "--model",
        "gpt2-124m", "--multiple-choice", "q");
    EXPECT_VALID("--multiple-choice", "q", "--eval-every", "100");
}

static void test_the_use_of_a_model_needs_no_training_data_and_is_one_thing_at_a_time(void) {
    static const char different[] =
        "--generate, --evaluate and --export are different things to do: give one of them";
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--steps", "5") == STATUS_OK && options_use(&o) == NULL);
    EXPECT(PARSE(&o, "--generate", "") == STATUS_OK && options_check(&o) == STATUS_OK); /* an empty prompt */
    EXPECT_STRING(options_use(&o), "generate");
    EXPECT(PARSE(&o, "--evaluate", "--val-data", "x") == STATUS_OK && options_check(&o) == STATUS_OK);
    EXPECT_STRING(options_use(&o), "evaluate");
    EXPECT(PARSE(&o, "--export", "x", "--tokenizer", "none") == STATUS_OK && options_check(&o) == STATUS_OK);
    EXPECT_STRING(options_use(&o), "export");
    options_free(&o);
    EXPECT_INVALID(different, "--generate", "x", "--evaluate");
    EXPECT_INVALID(different, "--export", "x", "--evaluate");
    EXPECT_INVALID(different, "--generate", "x", "--export", "y");
    EXPECT_INVALID("--export: one rank does it; leave out --ranks", "--export", "x", "--ranks", "2");
    EXPECT_INVALID("--generate: no tokenizer lies beside the model; give --tokenizer", "--generate", "x",
        "--tokenizer", "none");
    EXPECT_INVALID(
        "--evaluate: there is nothing to evaluate on; give --val-data or --multiple-choice", "--evaluate");
    EXPECT_INVALID("--evaluate: random tokens tell nothing of a model; give shards to --val-data",
        "--evaluate", "--val-data", "synthetic");
}

static void test_ranges_hold_for_values_that_the_program_set(void) {
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(PARSE(&o, "--train-data", "x.bin") == STATUS_OK);
    o.ranks = 5000; /* as an environment might say */
    EXPECT(options_check(&o) == STATUS_ERROR);
    EXPECT_STRING(error_message(), "--ranks: the value is out of range; allowed: 0 to 4096");
    options_free(&o);
}

/* ---- checkpoints ---- */

static void test_what_a_checkpoint_keeps_reads_back_the_same(void) {
    struct options o, again;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(options_init(&again) == STATUS_OK);
    EXPECT(
        PARSE(&o, "--model", "gpt2-355m", "--kv-heads", "4", "--seed", "9007199254740991", "--clip",
            "0.1234567890123456789", "--epsilon", "1.1e-19", "--no-shuffle", "--train-data", "a \"b\" \\c\n",
            "--ranks", "8", "--quiet", "--run-dir", "runs/x", "--global-batch", "1Gi") == STATUS_OK);
    char *text = write_json(&o);
    struct json *stored = json_of(text);
    /* what belongs to one start of the program is not kept */
    EXPECT(json_get(stored, "ranks") == NULL && json_get(stored, "quiet") == NULL);
    EXPECT(json_get(stored, "run-dir") == NULL && json_get(stored, "config") == NULL);
    EXPECT(parse_with(&again, stored, (const char *const[]){"train_gpt", NULL}) == STATUS_OK);
    EXPECT(again.seed == o.seed && again.clip == o.clip && again.epsilon == o.epsilon && !again.shuffle);
    EXPECT(again.layers == 24 && again.kv_heads == 4 && again.learning_rate == 3e-4);
    EXPECT_STRING(again.train_data, "a \"b\" \\c\n");
    EXPECT_STRING(again.tokenizer, "none");
    EXPECT(again.ranks == 0 && !again.quiet);
    char *text_again = write_json(&again);
    EXPECT_STRING(text_again, text);
    free(text);
    free(text_again);
    json_free(stored);
    options_free(&o);
    options_free(&again);
}

static void test_damaged_stored_options_are_refused(void) {
    static const struct {
        const char *json, *message;
    } cases[] = {
        {"{\"layers\": \"4\"}",
            "the checkpoint's options: layers: of the wrong type; the file was changed, resume from another"},
        {"{\"layers\": 4.5}",
            "the checkpoint's options: layers: of the wrong type; the file was changed, resume from another"},
        {"{\"clip\": null}",
            "the checkpoint's options: clip: of the wrong type; the file was changed, resume from another"},
        {"{\"shuffle\": 1}", "the checkpoint's options: shuffle: of the wrong type; the file was changed, "
                             "resume from another"},
        {"{\"model\": 1}",
            "the checkpoint's options: model: of the wrong type; the file was changed, resume from another"},
        {"{\"layers\": 4000}",
            "the checkpoint's options: layers: the value is out of range; allowed: 0 to 1024"},
        {"{\"schedule\": \"x\"}", "the checkpoint's options: schedule: the value is no choice; allowed: "
                                  "cosine linear constant wsd"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct json *stored = json_of(cases[i].json);
        struct options o;
        EXPECT(options_init(&o) == STATUS_OK);
        EXPECT(parse_with(&o, stored, (const char *const[]){"train_gpt", NULL}) == STATUS_ERROR);
        EXPECT_STRING(error_message(), cases[i].message);
        options_free(&o);
        json_free(stored);
    }
}

static void test_options_of_another_version_are_passed_over(void) {
    struct json *stored = json_of("{\"rotary\": true, \"layers\": 6}");
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    EXPECT(parse_with(&o, stored, (const char *const[]){"train_gpt", NULL}) == STATUS_OK);
    EXPECT(o.layers == 6 && o.seed == 1337);
    options_free(&o);
    json_free(stored);
}

/* ---- help ---- */

static void test_help_lists_every_option_preset_and_gpu_within_100_columns(void) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    options_print_help(out);
    fclose(out);
    int column = 0, widest = 0, brackets = 0;
    for (size_t i = 0; i < bytes; i++) {
        column = text[i] == '\n' ? 0 : column + 1;
        widest = column > widest ? column : widest;
        brackets += (text[i] == '[') - (text[i] == ']');
    }
    EXPECT(widest > 80 && widest <= 100);
    EXPECT(brackets == 0); /* no default is cut off */
    static const char *const lines[] = {"\nModel (0: the preset's)\n", "\n  --kv-heads N  ",
        "\n  --final-learning-rate FRACTION  of the highest, in the last step [0.1]\n",
        "\n  --comm-timeout SECONDS ", "among; 1 on the CPU]\n", "(cosine linear constant wsd)",
        "\n  --shuffle  ", "[on]\n", "\nEnvironment\n", "\n  MASTER_ADDR, MASTER_PORT ", "\nExit code ",
        "\n  128 + N "};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        EXPECT_CONTAINS(text, lines[i]);
    }
    char lost[16];
    snprintf(lost, sizeof lost, "\n  %d  ", STATUS_PEER_LOST);
    EXPECT_CONTAINS(text, lost);
    /* what a checkpoint keeps is most of the options */
    struct options o;
    EXPECT(options_init(&o) == STATUS_OK);
    char *kept = write_json(&o);
    struct json *stored = json_of(kept);
    EXPECT(stored->count > 30);
    for (size_t i = 0; i < stored->count; i++) {
        char name[64];
        snprintf(name, sizeof name, "\n  --%s ", stored->keys[i]);
        EXPECT_CONTAINS(text, name);
    }
    int count;
    const struct preset *presets = preset_table(&count);
    for (int i = 0; i < count; i++) {
        char name[64];
        snprintf(name, sizeof name, "\n  %s ", presets[i].name);
        EXPECT_CONTAINS(text, name);
    }
    const struct gpu_info *gpus = gpu_table(&count);
    for (int i = 0; i < count; i++) {
        char name[64];
        snprintf(name, sizeof name, "  %s ", gpus[i].key);
        EXPECT_CONTAINS(text, name);
    }
    json_free(stored);
    free(kept);
    free(text);
    options_free(&o);
}

int main(void) {
    RUN(test_defaults_are_those_of_the_papers_and_everything_optional_is_off);
    RUN(test_every_option_sets_its_own_field);
    RUN(test_a_value_follows_as_next_word_or_after_equals_and_the_last_one_wins);
    RUN(test_switches_are_set_by_name_no_name_and_value);
    RUN(test_whole_numbers_take_decimal_and_binary_suffixes);
    RUN(test_what_is_no_whole_number_is_refused);
    RUN(test_numbers_are_decimal_and_finite);
    RUN(test_values_out_of_range_are_refused_with_the_range);
    RUN(test_choices_are_those_that_the_rooms_below_know);
    RUN(test_an_unknown_option_is_answered_with_the_nearest_name);
    RUN(test_a_very_long_word_is_refused_in_a_short_line);
    RUN(test_an_option_without_its_value_is_refused);
    RUN(test_words_that_are_no_options_are_refused);
    RUN(test_help_anywhere_is_all_that_counts);
    RUN(test_no_arguments_at_all_are_the_defaults);
    RUN(test_a_config_file_has_names_values_quotes_and_comments);
    RUN(test_mistakes_in_a_config_file_name_file_and_line);
    RUN(test_a_config_file_that_cannot_be_read_is_refused);
    RUN(test_the_command_line_wins_over_the_config_file_over_the_checkpoint_over_the_defaults);
    RUN(test_given_options_are_those_of_the_user_not_of_the_checkpoint_or_preset);
    RUN(test_presets_have_the_papers_sizes);
    RUN(test_presets_have_the_published_numbers_of_parameters);
    RUN(test_each_dimension_of_a_preset_can_be_changed);
    RUN(test_longer_sequences_keep_the_tokens_of_the_presets_micro_batch);
    RUN(test_the_tokenizer_follows_the_vocabulary);
    RUN(test_an_unknown_preset_is_answered_with_the_nearest_name);
    RUN(test_heads_divide_channels_and_kv_heads_divide_heads);
    RUN(test_the_global_batch_is_a_multiple_of_all_ranks_micro_batches);
    RUN(test_warm_up_and_decay_are_within_the_steps);
    RUN(test_training_needs_data_and_says_how_to_get_some);
    RUN(test_what_makes_no_sense_together_is_refused);
    RUN(test_the_use_of_a_model_needs_no_training_data_and_is_one_thing_at_a_time);
    RUN(test_ranges_hold_for_values_that_the_program_set);
    RUN(test_what_a_checkpoint_keeps_reads_back_the_same);
    RUN(test_damaged_stored_options_are_refused);
    RUN(test_options_of_another_version_are_passed_over);
    RUN(test_help_lists_every_option_preset_and_gpu_within_100_columns);
    return test_summary();
}
