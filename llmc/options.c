/* Reading options: everything that is a loop over the table. No option is handled by its name but --config and --help,
   and those between which options_check knows a relation. */
#include "options_table.h"

#include <ctype.h>
#include <stdlib.h>

#include "gpus.h"
#include "presets.h"

static const struct option *find_row(const char *name) {
    for (int i = 0; i < option_count; i++) {
        if (strcmp(option_table[i].name, name) == 0) {
            return &option_table[i];
        }
    }
    return NULL;
}

/* ---- names that are nearly right ---- */

enum { NAME_MAX_BYTES = 40 };

struct nearest {
    const char *name;
    int distance;
};

/* Fewest insertions, deletions, replacements and swaps of neighbours that turn a into b ("optimal string alignment"). */
static int edit_distance(const char *a, const char *b) {
    int d[NAME_MAX_BYTES + 1][NAME_MAX_BYTES + 1];
    int rows = (int)strnlen(a, NAME_MAX_BYTES), columns = (int)strnlen(b, NAME_MAX_BYTES);
    for (int i = 0; i <= rows; i++) {
        for (int j = 0; j <= columns; j++) {
            if (i == 0 || j == 0) {
                d[i][j] = i + j;
                continue;
            }
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            best = (int)min_i64(best, min_i64(d[i - 1][j], d[i][j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                best = (int)min_i64(best, d[i - 2][j - 2] + 1);
            }
            d[i][j] = best;
        }
    }
    return d[rows][columns];
}

/* A part of a name is as good as one wrong letter. */
static void consider(struct nearest *nearest, const char *word, const char *candidate) {
    bool part = strlen(word) > 2 && strstr(candidate, word) != NULL;
    int distance = part ? 1 : edit_distance(word, candidate);
    if (nearest->name == NULL || distance < nearest->distance) {
        nearest->name = candidate;
        nearest->distance = distance;
    }
}

/* `where` leads a message: "--" on the command line, "file:line: " in a config file. */
static enum status fail_unknown(
    const char *where, const char *what, const char *word, const struct nearest *nearest) {
    if (nearest->distance > 1 + (int)strnlen(word, NAME_MAX_BYTES) / 3) {
        return fail("%s%.60s: no such %s; --help lists them", where, word, what);
    }
    return fail("%s%.60s: no such %s; did you mean %s%s? --help lists them", where, word, what,
        strcmp(where, "--") == 0 ? where : "", nearest->name);
}

static enum status fail_unknown_option(const char *where, const char *name) {
    struct nearest nearest = {0};
    for (int i = 0; i < option_count; i++) {
        consider(&nearest, name, option_table[i].name);
    }
    return fail_unknown(where, "option", name, &nearest);
}

/* ---- values from text ---- */

static bool is_choice(const char *choices, const char *word) {
    size_t bytes = strlen(word);
    for (const char *at = choices; *at != '\0'; at += strcspn(at, " "), at += *at == ' ') {
        if (strcspn(at, " ") == bytes && memcmp(at, word, bytes) == 0) {
            return true;
        }
    }
    return false;
}

/* The row's range or choices in words. */
static void describe_allowed(const struct option *row, char *out, size_t size) {
    if (row->type == SWITCH) {
        snprintf(out, size, "true or false");
    } else if (row->type == CHOICE) {
        snprintf(out, size, "%s", row->choices);
    } else if (row->most == NO_LIMIT) {
        snprintf(out, size, "%g or more, up to 2^53", row->least);
    } else {
        snprintf(out, size, "%.10g to %.10g", row->least, row->most);
    }
}

/* Is the value in the row's range or among its choices? `text`: as it was written. */
static enum status check_value(
    const struct options *options, const struct option *row, const char *where, const char *text) {
    bool valid = true;
    if (row->type == INTEGER) {
        double value = (double)*integer_of(options, row);
        valid = value >= row->least && value <= row->most;
    } else if (row->type == NUMBER) {
        double value = *number_of(options, row);
        valid = value >= row->least && value <= row->most;
    } else if (row->type == CHOICE) {
        valid = is_choice(row->choices, *text_of(options, row));
    }
    if (!valid) {
        char allowed[100];
        describe_allowed(row, allowed, sizeof allowed);
        return fail("%s%s: %.40s is %s; allowed: %s", where, row->name, text,
            row->type == CHOICE ? "no choice" : "out of range", allowed);
    }
    return STATUS_OK;
}

static enum status check_values(const struct options *options) {
    for (int i = 0; i < option_count; i++) {
        CHECK(check_value(options, &option_table[i], "--", "the value"));
    }
    return STATUS_OK;
}

/* Digits with a sign and one of k, M, G (thousands) or Ki, Mi, Gi (powers of 1024). What 64 bits do not hold becomes the
   nearest that they do: out of every range. False: no whole number. */
static bool parse_integer(const char *text, int64_t *value) {
    static const struct {
        const char *suffix;
        int64_t factor;
    } units[] = {{"", 1}, {"k", 1000}, {"M", 1000000}, {"G", 1000000000}, {"Ki", 1 << 10}, {"Mi", 1 << 20},
        {"Gi", 1 << 30}};
    char *end;
    int64_t digits = strtoll(text, &end, 10);
    if (!isdigit((unsigned char)text[text[0] == '-'])) {
        return false;
    }
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcmp(end, units[i].suffix) == 0) {
            if (__builtin_mul_overflow(digits, units[i].factor, value)) {
                *value = digits < 0 ? INT64_MIN : INT64_MAX;
            }
            return true;
        }
    }
    return false;
}

/* A decimal number without strtod's words, hexadecimal forms and leading spaces. Too large is infinite: out of every
   range. */
static bool parse_number(const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    return text[0] != '\0' && *end == '\0' && strspn(text, "0123456789+-.eE") == strlen(text);
}

static enum status set_text(char **field, const char *text) {
    char *copy = string_copy(text);
    if (copy == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    free(*field);
    *field = copy;
    return STATUS_OK;
}

/* One value that the user wrote. */
static enum status set_value(
    struct options *options, const struct option *row, const char *text, const char *where) {
    bool readable = true;
    const char *kind = "";
    switch (row->type) {
    case SWITCH:
        kind = "a switch's value";
        *switch_of(options, row) = strcmp(text, "true") == 0;
        readable = *switch_of(options, row) || strcmp(text, "false") == 0;
        break;
    case INTEGER:
        kind = "a whole number";
        readable = parse_integer(text, integer_of(options, row));
        break;
    case NUMBER:
        kind = "a number";
        readable = parse_number(text, number_of(options, row));
        break;
    case TEXT:
    case CHOICE:
        CHECK(set_text(text_of(options, row), text));
        break;
    }
    if (!readable) {
        char allowed[100];
        describe_allowed(row, allowed, sizeof allowed);
        return fail("%s%s: \"%.40s\" is not %s; allowed: %s", where, row->name, text, kind, allowed);
    }
    options->given[row - option_table] = true;
    return check_value(options, row, where, text);
}

enum status options_init(struct options *options) {
    memset(options, 0, sizeof *options);
    for (int i = 0; i < option_count; i++) {
        const struct option *row = &option_table[i];
        switch (row->type) {
        case SWITCH:
            *switch_of(options, row) = row->standard != 0;
            break;
        case INTEGER:
            *integer_of(options, row) = (int64_t)row->standard;
            break;
        case NUMBER:
            *number_of(options, row) = row->standard;
            break;
        case TEXT:
        case CHOICE:
            CHECK(set_text(text_of(options, row), row->text));
            break;
        }
    }
    return STATUS_OK;
}

void options_free(struct options *options) {
    for (int i = 0; i < option_count; i++) {
        if (option_table[i].type == TEXT || option_table[i].type == CHOICE) {
            free(*text_of(options, &option_table[i]));
            *text_of(options, &option_table[i]) = NULL;
        }
    }
}

bool options_given(const struct options *options, const char *name) {
    const struct option *row = find_row(name);
    return row != NULL && options->given[row - option_table];
}

const char *options_use(const struct options *options) {
    return options_given(options, "generate") ? "generate"
           : options->evaluate                ? "evaluate"
           : options->export_to[0] != '\0'    ? "export"
                                              : NULL;
}

/* ---- config files ---- */

static char *skip_spaces(char *at) {
    return at + strspn(at, " \t\r");
}

/* What a backslash and this letter stand for in quotes; 0: nothing. */
static char unescape(char letter) {
    switch (letter) {
    case 'n':
        return '\n';
    case 't':
        return '\t';
    case '"':
    case '\\':
        return letter;
    default:
        return '\0';
    }
}

/* The value that begins at `at`, unquoted and terminated in place. Without quotes it ends before a # and the
   spaces before that. */
static enum status config_value(char **value, char *at, const char *where) {
    *value = at;
    if (*at != '"') {
        at += strcspn(at, "#");
        while (at > *value && strchr(" \t\r", at[-1]) != NULL) {
            at--;
        }
        *at = '\0';
        return STATUS_OK;
    }
    char *to = at++;
    for (; *at != '"'; at++) {
        if (*at == '\0') {
            return fail("%sthe quote is not closed; end the value with \"", where);
        }
        *to = *at == '\\' ? unescape(*++at) : *at;
        if (*to++ == '\0') {
            return fail("%sa backslash in quotes is followed by n, t, \" or another backslash", where);
        }
    }
    at = skip_spaces(at + 1);
    if (*at != '\0' && *at != '#') {
        return fail("%stext after the closing quote; only a # comment may follow", where);
    }
    *to = '\0';
    return STATUS_OK;
}

static enum status config_line(struct options *options, char *line, const char *where) {
    char *name = skip_spaces(line);
    if (*name == '\0' || *name == '#') {
        return STATUS_OK;
    }
    char *end = name + strcspn(name, " \t\r=#");
    char *equals = skip_spaces(end);
    if (*equals != '=') {
        return fail(
            "%sno \"=\" after \"%.*s\"; write name = value", where, (int)min_i64(end - name, 60), name);
    }
    *end = '\0';
    char *value;
    CHECK(config_value(&value, skip_spaces(equals + 1), where));
    const struct option *row = find_row(name);
    if (row == NULL) {
        return fail_unknown_option(where, name);
    }
    if (strcmp(name, "config") == 0 || strcmp(name, "help") == 0) {
        return fail("%s%s: for the command line only; take it out of the file", where, name);
    }
    return set_value(options, row, value, where);
}

enum status options_parse_config(struct options *options, const char *text, size_t bytes, const char *name) {
    static const char byte_order_mark[] = "\xef\xbb\xbf"; /* some editors begin every file with it */
    size_t mark = bytes >= 3 && memcmp(text, byte_order_mark, 3) == 0 ? 3 : 0;
    text += mark;
    bytes -= mark;
    enum status status = STATUS_OK;
    char *copy = NULL;
    CHECK(ALLOCATE(copy, bytes + 1));
    memcpy(copy, text, bytes);
    char *end = copy + bytes;
    int number = 1;
    for (char *line = copy, *next; line < end && status == STATUS_OK; line = next, number++) {
        char where[300];
        snprintf(where, sizeof where, "%.280s:%d: ", name, number);
        next = memchr(line, '\n', (size_t)(end - line));
        next = next == NULL ? end : next;
        *next++ = '\0';
        status = strlen(line) + 1 == (size_t)(next - line)
                     ? config_line(options, line, where)
                     : fail("%sa zero byte; a config file is plain text", where);
    }
    free(copy);
    return status;
}

static enum status read_config_file(struct options *options, const char *path) {
    uint8_t *text;
    size_t bytes;
    if (file_read_all(path, &text, &bytes) != STATUS_OK) {
        return fail("--config %s; give a file of lines \"name = value\"", error_message());
    }
    enum status status = options_parse_config(options, (const char *)text, bytes, path);
    free(text);
    return status;
}

/* ---- the command line ---- */

/* The option at argv[*index] and its value; *index moves to the next one. */
static enum status next_argument(
    int argc, const char *const *argv, int *index, const struct option **row, const char **value) {
    const char *argument = argv[(*index)++];
    if (strncmp(argument, "--", 2) != 0) {
        return fail("\"%.60s\": not an option; options are --name value, see --help", argument);
    }
    char name[NAME_MAX_BYTES];
    const char *equals = strchr(argument, '=');
    size_t bytes = (equals != NULL ? (size_t)(equals - argument) : strlen(argument)) - 2;
    snprintf(name, sizeof name, "%.*s", (int)min_i64((int64_t)bytes, sizeof name), argument + 2);
    *value = equals != NULL ? equals + 1 : NULL;
    *row = find_row(name);
    if (*row == NULL && strncmp(name, "no-", 3) == 0) {
        *row = find_row(name + 3);
        if (*row != NULL && ((*row)->type != SWITCH || equals != NULL)) {
            return fail("%.60s: only switches have a --no- form, and it takes no value; write --%s", argument,
                (*row)->name);
        }
        *value = "false";
    }
    if (*row == NULL) {
        return fail_unknown_option("--", name);
    }
    if (*value != NULL) {
        return STATUS_OK;
    }
    if ((*row)->type == SWITCH) {
        *value = "true";
        return STATUS_OK;
    }
    if (*index == argc || strncmp(argv[*index], "--", 2) == 0) {
        return fail("--%s: no value; write --%s %s", name, name, (*row)->unit);
    }
    *value = argv[(*index)++];
    return STATUS_OK;
}

/* Twice over the line: the config files first, then everything else over them. */
static enum status parse_arguments(
    struct options *options, int argc, const char *const *argv, bool config_files) {
    for (int i = 1; i < argc;) {
        const struct option *row = NULL;
        const char *value = NULL;
        CHECK(next_argument(argc, argv, &i, &row, &value));
        bool is_config = strcmp(row->name, "config") == 0;
        if (is_config != config_files) {
            continue;
        }
        CHECK(set_value(options, row, value, "--"));
        if (is_config) {
            CHECK(read_config_file(options, value));
        }
    }
    return STATUS_OK;
}

/* ---- checkpoints ---- */

void options_write_json(const struct options *options, struct json_writer *w) {
    for (int i = 0; i < option_count; i++) {
        const struct option *row = &option_table[i];
        if (!row->kept) {
            continue;
        }
        json_key(w, row->name);
        switch (row->type) {
        case SWITCH:
            json_bool(w, *switch_of(options, row));
            break;
        case INTEGER:
            json_integer(w, *integer_of(options, row));
            break;
        case NUMBER:
            json_number(w, *number_of(options, row));
            break;
        case TEXT:
        case CHOICE:
            json_string(w, *text_of(options, row));
            break;
        }
    }
}

/* Members that this version does not know are another version's and say nothing to it; missing ones stay default. */
static enum status read_json(struct options *options, const struct json *stored) {
    static const char where[] = "the checkpoint's options: ";
    for (int i = 0; i < option_count; i++) {
        const struct option *row = &option_table[i];
        const struct json *value = !row->kept ? NULL : json_get(stored, row->name);
        if (value == NULL) {
            continue;
        }
        bool right_type = true;
        switch (row->type) {
        case SWITCH:
            right_type = value->type == JSON_BOOL;
            *switch_of(options, row) = value->boolean;
            break;
        case INTEGER:
            right_type = value->type == JSON_NUMBER && value->is_integer;
            *integer_of(options, row) = value->integer;
            break;
        case NUMBER:
            right_type = value->type == JSON_NUMBER;
            *number_of(options, row) = value->number;
            break;
        case TEXT:
        case CHOICE:
            right_type = value->type == JSON_STRING;
            if (right_type) {
                CHECK(set_text(text_of(options, row), value->string));
            }
            break;
        }
        if (!right_type) {
            return fail(
                "%s%s: of the wrong type; the file was changed, resume from another", where, row->name);
        }
        CHECK(check_value(options, row, where, "the value"));
    }
    return STATUS_OK;
}

/* ---- the whole ---- */

static void fill(int64_t *field, int64_t value) {
    if (*field == 0) {
        *field = value;
    }
}

static enum status fill_from_preset(struct options *options) {
    const struct preset *preset = preset_find(options->model);
    if (preset == NULL) {
        int count;
        const struct preset *presets = preset_table(&count);
        struct nearest nearest = {0};
        for (int i = 0; i < count; i++) {
            consider(&nearest, options->model, presets[i].name);
        }
        return fail_unknown("--model ", "preset", options->model, &nearest);
    }
    fill(&options->layers, preset->layers);
    fill(&options->channels, preset->channels);
    fill(&options->heads, preset->heads);
    fill(&options->kv_heads, options->heads);
    fill(&options->seq_len, preset->seq_len);
    fill(&options->vocab_size, preset->vocab_size);
    fill(
        &options->micro_batch, max_i64(1, (int64_t)preset->micro_batch * preset->seq_len / options->seq_len));
    if (options->learning_rate == 0) {
        if (options_given(options, "learning-rate")) {
            return fail("--learning-rate 0: nothing would be learnt; give a number above 0");
        }
        options->learning_rate = preset->learning_rate;
    }
    if (strcmp(options->tokenizer, "auto") == 0) {
        CHECK(set_text(&options->tokenizer, options->vocab_size == 257 ? "bytes" : "none"));
    }
    return STATUS_OK;
}

enum status options_take_shape(struct options *options, const struct model_config *shape) {
    int count;
    const struct preset *presets = preset_table(&count);
    for (int i = 0; i < count && !options_given(options, "model"); i++) {
        const struct preset *p = &presets[i];
        if (p->layers == shape->layers && p->channels == shape->channels && p->heads == shape->heads) {
            CHECK(set_text(&options->model, p->name));
            break;
        }
    }
    options->layers = shape->layers;
    options->channels = shape->channels;
    options->heads = shape->heads;
    options->kv_heads = shape->kv_heads;
    options->vocab_size = shape->vocab_size;
    if (!options_given(options, "seq-len")) {
        options->seq_len = shape->seq_len;
    }
    /* what the preset of the command line filled in, and the user did not ask for, is chosen anew */
    if (!options_given(options, "micro-batch")) {
        options->micro_batch = 0;
    }
    if (!options_given(options, "learning-rate")) {
        options->learning_rate = 0;
    }
    if (!options_given(options, "tokenizer")) {
        CHECK(set_text(&options->tokenizer, "auto"));
    }
    CHECK(fill_from_preset(options));
    return check_values(options);
}

enum status options_parse(
    struct options *options, int argc, const char *const *argv, const struct json *stored) {
    options_free(options);
    CHECK(options_init(options));
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            options->help = true;
            return STATUS_OK;
        }
    }
    if (stored != NULL) {
        CHECK(read_json(options, stored));
    }
    CHECK(parse_arguments(options, argc, argv, true));
    CHECK(parse_arguments(options, argc, argv, false));
    return fill_from_preset(options);
}

/* --part divides --whole? */
static enum status check_divides(const char *part_name, int64_t part, const char *whole_name, int64_t whole) {
    if (whole % part == 0) {
        return STATUS_OK;
    }
    int64_t divisor = min_i64(part, whole);
    while (whole % divisor != 0) {
        divisor--;
    }
    return fail("--%s %lld does not divide --%s %lld; the next lower number that does is %lld", part_name,
        (long long)part, whole_name, (long long)whole, (long long)divisor);
}

static enum status check_global_batch(const struct options *o) {
    int64_t ranks = max_i64(o->ranks, 1);
    int64_t least = ranks * o->micro_batch * o->seq_len;
    if (o->global_batch % least == 0) {
        return STATUS_OK;
    }
    int64_t below = max_i64(o->global_batch / least * least, least);
    return fail(
        "--global-batch %lld is not a multiple of the %lld tokens of --ranks %lld x --micro-batch %lld x "
        "--seq-len %lld; %lld and %lld are",
        (long long)o->global_batch, (long long)least, (long long)ranks, (long long)o->micro_batch,
        (long long)o->seq_len, (long long)below, (long long)(below + least));
}

static enum status check_part_of_steps(const struct options *o, const char *name, int64_t part) {
    if (o->steps > 0 && part > o->steps) {
        return fail("--%s %lld is more than --steps %lld; -1 takes a share of them", name, (long long)part,
            (long long)o->steps);
    }
    return STATUS_OK;
}

static enum status check_tokenizer_of_questions(const struct options *o) {
    return o->multiple_choice[0] == '\0' || strcmp(o->tokenizer, "none") != 0
               ? STATUS_OK
               : fail("--multiple-choice: a question's text needs a tokenizer; give --tokenizer");
}

static enum status check_use(const struct options *o) {
    bool generate = options_given(o, "generate");
    if (generate + o->evaluate + (o->export_to[0] != '\0') > 1) {
        return fail("--generate, --evaluate and --export are different things to do: give one of them");
    }
    if (o->ranks > 1) {
        return fail("--%s: one rank does it; leave out --ranks", options_use(o));
    }
    if (generate && strcmp(o->tokenizer, "none") == 0) {
        return fail("--generate: no tokenizer lies beside the model; give --tokenizer");
    }
    if (o->evaluate && o->val_data[0] == '\0' && o->multiple_choice[0] == '\0') {
        return fail("--evaluate: there is nothing to evaluate on; give --val-data or --multiple-choice");
    }
    if (o->evaluate && strcmp(o->val_data, "synthetic") == 0) {
        return fail("--evaluate: random tokens tell nothing of a model; give shards to --val-data");
    }
    return o->evaluate ? check_tokenizer_of_questions(o) : STATUS_OK;
}

static enum status check_data(const struct options *o) {
    if (o->train_data[0] == '\0') {
        return fail("--train-data is missing: make shards of text with build/prepare and give "
                    "--train-data 'data/tokens/train*.bin', or take --train-data synthetic to measure speed");
    }
    if (strcmp(o->train_data, "synthetic") == 0 && o->steps == 0) {
        return fail("--train-data synthetic has no epochs: give --steps");
    }
    if (strcmp(o->val_data, "synthetic") == 0 && o->eval_batches == 0) {
        return fail("--val-data synthetic has no end: give --eval-batches");
    }
    if (options_given(o, "eval-every") && o->eval_every > 0 && o->val_data[0] == '\0' &&
        o->multiple_choice[0] == '\0') {
        return fail(
            "--eval-every %lld: there is nothing to evaluate on; give --val-data", (long long)o->eval_every);
    }
    if (strcmp(o->tokenizer, "bytes") == 0 && o->vocab_size < 257) {
        return fail("--tokenizer bytes has 257 tokens, more than --vocab-size %lld: raise it or take none",
            (long long)o->vocab_size);
    }
    CHECK(check_tokenizer_of_questions(o));
    if (o->sample_every > 0 && strcmp(o->tokenizer, "none") == 0) {
        return fail("--sample-every %lld: there is no text without a tokenizer; give --tokenizer, or 0",
            (long long)o->sample_every);
    }
    return STATUS_OK;
}

enum status options_check(const struct options *options) {
    CHECK(check_values(options));
    if (options->resume && options->run_dir[0] == '\0') {
        return fail("--resume needs --run-dir: the folder of the run to continue");
    }
    if (options->gpu[0] != '\0' && !options->plan) {
        return fail("--gpu %s: only a plan can be for a GPU that is not there; add --plan", options->gpu);
    }
    if (options->gpu[0] != '\0' && gpu_find_key(options->gpu) == NULL) {
        return fail("--gpu %.60s: not in the table of GPUs; --help lists them", options->gpu);
    }
    if (strcmp(options->grad_dtype, "bf16") == 0 && strcmp(options->device, "cpu") == 0) {
        return fail("--grad-dtype bf16 is for GPUs; --device cpu has fp32");
    }
    CHECK(check_divides("heads", options->heads, "channels", options->channels));
    CHECK(check_divides("kv-heads", options->kv_heads, "heads", options->heads));
    CHECK(check_global_batch(options));
    CHECK(check_part_of_steps(options, "warmup-steps", options->warmup_steps));
    CHECK(check_part_of_steps(options, "decay-steps", options->decay_steps));
    return options->plan                  ? STATUS_OK
           : options_use(options) != NULL ? check_use(options)
                                          : check_data(options);
}
