/* build/prepare: text files -> token shards for training and for validation.

   One pass over the files in a fixed order, in pieces, so memory does not grow with the data. Each file is one document:
   end-of-text, then its tokens. A file goes to validation when that brings validation's share of the bytes closer
   to --val-fraction; a single file is cut instead. Shards are written under temporary names and get their own when
   all is done: a run that fails leaves nothing behind, and older shards untouched. */
#include "llmc/shard.h"
#include "llmc/tokenizer.h"

#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PIECE_BYTES = 1 << 20,   /* of text encoded at once */
    BUFFER_TOKENS = 1 << 16, /* written at once */
    LOOK_BYTES = 8000,       /* a zero in so many first bytes: a binary file */
    NOTES = 10               /* skipped files named one by one */
};
#define MAX_SHARD_TOKENS INT64_C(2000000000)

/* One side of the split. */
struct output {
    const char *name;            /* "train", "val" */
    struct shard_writer *writer; /* of the newest shard */
    int shards;
    int64_t shard_tokens; /* in the newest shard */
    int64_t files, bytes, tokens;
    uint16_t *buffer; /* tokens not yet in a shard */
    int64_t buffered;
};

struct job {
    const char *out_dir, *tokenizer_name, *files_from;
    double val_fraction;
    int64_t shard_tokens;
    bool overwrite, help;
    bool single_file; /* one file is all there is */
    struct tokenizer *tokenizer;
    struct output train, val;
    int64_t skipped;
    char *piece; /* PIECE_BYTES of text */
};

/* ---- shards ---- */

static enum status shard_path(
    const struct job *job, const struct output *output, int number, const char *suffix, char path[PATH_MAX]) {
    char name[64];
    snprintf(name, sizeof name, "%s_%06d.bin%s", output->name, number, suffix);
    return path_join(path, PATH_MAX, job->out_dir, name);
}

/* Puts the buffer into the newest shard, or into a new one if the newest is full and the buffer too: no shard is
   smaller than a full buffer unless it is the only one, for a shard smaller than a sequence is of no use. */
static enum status output_flush(const struct job *job, struct output *output) {
    bool buffer_full = output->buffered == min_i64(BUFFER_TOKENS, job->shard_tokens);
    bool shard_full = output->shard_tokens + output->buffered > job->shard_tokens;
    if (output->writer == NULL || (shard_full && buffer_full)) {
        struct shard_writer *finished = output->writer;
        output->writer = NULL;
        CHECK(shard_finish(finished));
        char path[PATH_MAX];
        CHECK(shard_path(job, output, output->shards, ".tmp", path));
        CHECK(shard_create(&output->writer, path));
        output->shards++;
        output->shard_tokens = 0;
    }
    CHECK(shard_append(output->writer, output->buffer, output->buffered));
    output->shard_tokens += output->buffered;
    output->buffered = 0;
    return STATUS_OK;
}

static enum status output_tokens(
    const struct job *job, struct output *output, const int32_t *tokens, size_t count) {
    int64_t capacity = min_i64(BUFFER_TOKENS, job->shard_tokens);
    for (size_t i = 0; i < count; i++) {
        if (output->buffered == capacity) {
            CHECK(output_flush(job, output));
        }
        output->buffer[output->buffered++] = (uint16_t)tokens[i];
    }
    output->tokens += (int64_t)count;
    return STATUS_OK;
}

static enum status output_finish(const struct job *job, struct output *output) {
    if (output->buffered > 0) {
        CHECK(output_flush(job, output));
    }
    struct shard_writer *writer = output->writer;
    output->writer = NULL;
    return shard_finish(writer);
}

/* Gives the finished shards their names and removes those of an earlier run that are left over. */
static enum status output_publish(const struct job *job, const struct output *output) {
    char temporary[PATH_MAX], final[PATH_MAX];
    for (int i = 0; i < output->shards; i++) {
        CHECK(shard_path(job, output, i, ".tmp", temporary));
        CHECK(shard_path(job, output, i, "", final));
        if (rename(temporary, final) != 0) {
            return fail("%s: cannot rename to %s: %s", temporary, final, strerror(errno));
        }
    }
    for (int i = output->shards;; i++) {
        CHECK(shard_path(job, output, i, "", final));
        if (unlink(final) != 0) {
            return errno == ENOENT ? STATUS_OK : fail("%s: cannot remove: %s", final, strerror(errno));
        }
    }
}

/* Of a run that failed. */
static void output_discard(const struct job *job, struct output *output) {
    shard_finish(output->writer);
    output->writer = NULL;
    for (int i = 0; i < output->shards; i++) {
        char path[PATH_MAX];
        if (shard_path(job, output, i, ".tmp", path) == STATUS_OK) {
            unlink(path);
        }
    }
}

static enum status check_nothing_is_overwritten(const struct job *job, const struct output *output) {
    char path[PATH_MAX];
    CHECK(shard_path(job, output, 0, "", path));
    if (!job->overwrite && path_exists(path)) {
        return fail("%s: is there already; choose another --out-dir or give --overwrite", path);
    }
    return STATUS_OK;
}

/* ---- documents ---- */

/* End-of-text and at most `bytes` bytes of the file from where it stands. */
static enum status add_text(
    const struct job *job, struct output *output, FILE *file, const char *path, int64_t bytes) {
    int32_t end_of_text = tokenizer_end_of_text(job->tokenizer);
    CHECK(output_tokens(job, output, &end_of_text, 1));
    output->files++;
    while (bytes > 0) {
        size_t got = fread(job->piece, 1, (size_t)min_i64(bytes, PIECE_BYTES), file);
        if (ferror(file)) {
            return fail("%s: cannot read: %s", path, strerror(errno));
        }
        if (got == 0) {
            break;
        }
        int32_t *tokens;
        size_t count;
        CHECK(tokenizer_encode(job->tokenizer, job->piece, got, &tokens, &count));
        enum status status = output_tokens(job, output, tokens, count);
        free(tokens);
        CHECK(status);
        output->bytes += (int64_t)got;
        bytes -= (int64_t)got;
    }
    return STATUS_OK;
}

/* Where the training part of a single file ends: after the line in which its share is reached. */
static int64_t find_cut(FILE *file, int64_t size, double val_fraction) {
    int64_t share = (int64_t)((double)size * (1 - val_fraction)), cut = share;
    fseeko(file, share, SEEK_SET);
    for (int byte; (byte = getc(file)) != EOF;) {
        cut++;
        if (byte == '\n') {
            break;
        }
    }
    rewind(file);
    return cut < size ? cut : share;
}

static bool looks_binary(FILE *file) {
    char start[LOOK_BYTES];
    size_t got = fread(start, 1, sizeof start, file);
    rewind(file);
    return memchr(start, 0, got) != NULL;
}

static enum status add_open_file(struct job *job, FILE *file, const char *path, int64_t size) {
    if (size == 0 || looks_binary(file)) {
        if (++job->skipped <= NOTES) {
            fprintf(stderr, "note: %s: skipped, it %s\n", path, size == 0 ? "is empty" : "is binary");
        }
        return STATUS_OK;
    }
    if (job->single_file && job->val_fraction > 0) {
        int64_t train_bytes = find_cut(file, size, job->val_fraction);
        CHECK(add_text(job, &job->train, file, path, train_bytes));
        return add_text(job, &job->val, file, path, size - train_bytes);
    }
    double all_bytes = (double)(job->train.bytes + job->val.bytes + size);
    bool to_val = (double)job->val.bytes + 0.5 * (double)size < job->val_fraction * all_bytes;
    return add_text(job, to_val ? &job->val : &job->train, file, path, size);
}

static enum status add_file(struct job *job, const char *path, int64_t size) {
    FILE *file = fopen(path, "rbe");
    if (file == NULL) {
        return fail("%s: cannot open: %s", path, strerror(errno));
    }
    enum status status = add_open_file(job, file, path, size);
    fclose(file);
    return status;
}

static int not_hidden(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* A file, or the files below a folder in the order of their names, without hidden ones. Links inside folders are
   followed to files only: links to folders may go round in circles. */
static enum status add_path(struct job *job, const char *path, bool in_folder) {
    struct stat info, target;
    if (lstat(path, &info) != 0) {
        return fail("%s: cannot read: %s", path, strerror(errno));
    }
    if (S_ISLNK(info.st_mode)) {
        bool broken = stat(path, &target) != 0;
        if (in_folder && (broken || !S_ISREG(target.st_mode))) {
            return STATUS_OK;
        }
        if (broken) {
            return fail("%s: cannot read: %s", path, strerror(errno));
        }
        info = target;
    }
    if (S_ISREG(info.st_mode)) {
        return add_file(job, path, info.st_size);
    }
    if (!S_ISDIR(info.st_mode)) {
        return in_folder ? STATUS_OK : fail("%s: is neither a file nor a folder", path);
    }
    struct dirent **entries;
    int count = scandir(path, &entries, not_hidden, by_name);
    if (count < 0) {
        return fail("%s: cannot list: %s", path, strerror(errno));
    }
    enum status status = STATUS_OK;
    for (int i = 0; i < count; i++) {
        char *child = NULL;
        if (status == STATUS_OK && asprintf(&child, "%s/%s", path, entries[i]->d_name) < 0) {
            status = fail_as(STATUS_OUT_OF_MEMORY, "out of memory");
        }
        if (status == STATUS_OK) {
            status = add_path(job, child, true);
            free(child);
        }
        free(entries[i]);
    }
    free(entries);
    return status;
}

/* Paths, one a line. */
static enum status add_paths_from(struct job *job, const char *list) {
    FILE *file = strcmp(list, "-") == 0 ? stdin : fopen(list, "re");
    if (file == NULL) {
        return fail("--files-from %s: cannot open: %s", list, strerror(errno));
    }
    enum status status = STATUS_OK;
    char *line = NULL;
    size_t capacity = 0;
    for (ssize_t length; status == STATUS_OK && (length = getline(&line, &capacity, file)) >= 0;) {
        if (length > 0 && line[length - 1] == '\n') {
            line[length - 1] = 0;
        }
        if (line[0] != 0) {
            status = add_path(job, line, false);
        }
    }
    free(line);
    if (file != stdin) {
        fclose(file);
    }
    return status;
}

/* ---- the run ---- */

static enum status write_shards(struct job *job, char **paths, int path_count) {
    CHECK(tokenizer_open(&job->tokenizer, job->tokenizer_name));
    CHECK(ALLOCATE(job->piece, PIECE_BYTES));
    CHECK(ALLOCATE(job->train.buffer, BUFFER_TOKENS));
    CHECK(ALLOCATE(job->val.buffer, BUFFER_TOKENS));
    CHECK(make_directories(job->out_dir));
    CHECK(check_nothing_is_overwritten(job, &job->train));
    CHECK(check_nothing_is_overwritten(job, &job->val));
    job->single_file = path_count == 1 && job->files_from == NULL && !path_is_directory(paths[0]);
    for (int i = 0; i < path_count; i++) {
        CHECK(add_path(job, paths[i], false));
    }
    if (job->files_from != NULL) {
        CHECK(add_paths_from(job, job->files_from));
    }
    if (job->train.tokens == 0) {
        return fail("no text found; give text files, or folders with text files");
    }
    CHECK(output_finish(job, &job->train));
    CHECK(output_finish(job, &job->val));
    CHECK(output_publish(job, &job->train));
    CHECK(output_publish(job, &job->val));
    return file_sync(job->out_dir);
}

static void print_summary(const struct job *job) {
    const struct output *outputs[] = {&job->train, &job->val};
    for (int i = 0; i < 2; i++) {
        const struct output *output = outputs[i];
        printf("%-5s  %8" PRId64 " files  %14" PRId64 " tokens  %6d shards  %s/%s_*.bin\n", output->name,
            output->files, output->tokens, output->shards, job->out_dir, output->name);
    }
    if (job->skipped > 0) {
        fprintf(stderr, "note: skipped %" PRId64 " binary or empty files in all\n", job->skipped);
    }
    if (job->val.shards == 0 && job->val_fraction > 0) {
        fprintf(stderr, "note: no file fell to validation; give more files or a larger --val-fraction\n");
    }
}

static const char help_text[] =
    "usage: build/prepare [options] FILE_OR_FOLDER...\n"
    "\n"
    "Turns text into token shards: train_000000.bin, ... to learn from and val_000000.bin, ... to measure "
    "on.\n"
    "Every file is one document. Folders are searched to the bottom; hidden and binary files are left out.\n"
    "\n"
    "  --out-dir DIR         where the shards go (data/tokens)\n"
    "  --tokenizer NAME      bytes: each byte a token, 256 ends a text; vocabulary 257 (bytes)\n"
    "  --val-fraction F      share of the text for validation, 0 to 0.5; whole files, or the end of a "
    "single\n"
    "                        file (0.1)\n"
    "  --shard-tokens N      a new shard is begun after N tokens, 1 to 2000000000 (100000000)\n"
    "  --files-from FILE     also take the paths in FILE, one a line; - reads them from standard input\n"
    "  --overwrite           replace shards that are in DIR already\n"
    "  --help                this text\n"
    "\n"
    "Example:\n"
    "  build/prepare --out-dir data/tokens/books books/\n"
    "  ./train_gpt --model tiny --tokenizer bytes --train-data 'data/tokens/books/train_*.bin' \\\n"
    "      --val-data 'data/tokens/books/val_*.bin'\n";

static enum status parse_options(struct job *job, int argc, char **argv) {
    enum { OUT_DIR, TOKENIZER, VAL_FRACTION, SHARD_TOKENS, FILES_FROM, OVERWRITE, HELP };
    static const struct option table[] = {{"out-dir", required_argument, NULL, OUT_DIR},
        {"tokenizer", required_argument, NULL, TOKENIZER},
        {"val-fraction", required_argument, NULL, VAL_FRACTION},
        {"shard-tokens", required_argument, NULL, SHARD_TOKENS},
        {"files-from", required_argument, NULL, FILES_FROM}, {"overwrite", no_argument, NULL, OVERWRITE},
        {"help", no_argument, NULL, HELP}, {NULL, 0, NULL, 0}};
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, ":", table, NULL)) != -1;) {
        char *end = NULL;
        switch (option) {
        case OUT_DIR:
            job->out_dir = optarg;
            break;
        case TOKENIZER:
            job->tokenizer_name = optarg;
            break;
        case VAL_FRACTION:
            job->val_fraction = strtod(optarg, &end);
            if (end == optarg || *end != 0 || !(job->val_fraction >= 0 && job->val_fraction <= 0.5)) {
                return fail("--val-fraction: '%s' is no number from 0 to 0.5", optarg);
            }
            break;
        case SHARD_TOKENS:
            job->shard_tokens = strtoll(optarg, &end, 10);
            if (end == optarg || *end != 0 || job->shard_tokens < 1 || job->shard_tokens > MAX_SHARD_TOKENS) {
                return fail(
                    "--shard-tokens: '%s' is no whole number from 1 to %" PRId64, optarg, MAX_SHARD_TOKENS);
            }
            break;
        case FILES_FROM:
            job->files_from = optarg;
            break;
        case OVERWRITE:
            job->overwrite = true;
            break;
        case HELP:
            job->help = true;
            return STATUS_OK;
        case ':':
            return fail("%s: a value is missing; see --help", argv[optind - 1]);
        default:
            return fail("%s: unknown option; see --help", argv[optind - 1]);
        }
    }
    if (optind == argc && job->files_from == NULL) {
        return fail("no files given; see --help");
    }
    return STATUS_OK;
}

int main(int argc, char **argv) {
    struct job job = {.out_dir = "data/tokens",
        .tokenizer_name = "bytes",
        .val_fraction = 0.1,
        .shard_tokens = 100000000,
        .train.name = "train",
        .val.name = "val"};
    enum status status = parse_options(&job, argc, argv);
    if (status == STATUS_OK && job.help) {
        fputs(help_text, stdout);
        return 0;
    }
    if (status == STATUS_OK) {
        status = write_shards(&job, argv + optind, argc - optind);
    }
    if (status == STATUS_OK) {
        print_summary(&job);
    } else {
        fprintf(stderr, "prepare: %s\n", error_message());
        output_discard(&job, &job.train);
        output_discard(&job, &job.val);
    }
    tokenizer_close(job.tokenizer);
    free(job.piece);
    free(job.train.buffer);
    free(job.val.buffer);
    return status == STATUS_OK ? 0 : 1;
}
