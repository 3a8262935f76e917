/* build/prepare: text files -> token shards for training and for validation, and back.

   One pass over the files in a fixed order, in pieces, so memory does not grow with the data; --train-bpe makes one
   before it to learn the vocabulary. Each file is one document: end-of-text, then its tokens. A file goes to validation
   when that brings validation's share of the bytes closer to --val-fraction; a single file is cut instead. Pieces are
   gathered until there is work for all threads, encoded, and written in their order. Shards are written under temporary
   names and get their own when all is done: a run that fails leaves nothing behind, and older shards untouched. */
#include "llmc/bpe_train.h"
#include "llmc/checksum.h"
#include "llmc/json.h"
#include "llmc/shard.h"
#include "llmc/tokenizer.h"
#include "llmc/tokenizer_batch.h"

#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PIECE_BYTES = 1 << 20, /* of text encoded at once, at most; a word that is longer is cut */
    PIECES = 1024,         /* gathered at once, at most */
    MOST_THREADS = 256,
    BUFFER_TOKENS = 1 << 16, /* written at once */
    LOOK_BYTES = 8000,       /* a zero in so many first bytes: a binary file */
    NOTES = 10               /* skipped files named one by one */
};
#define MAX_SHARD_TOKENS INT64_C(2000000000)
#define MAX_VOCAB_SIZE 65536 /* a shard's tokens have 16 bits */
static const char end_of_text_name[] = "<|endoftext|>";
enum { NAME_BYTES = sizeof end_of_text_name - 1 };

/* One side of the split. */
struct output {
    const char *name;            /* "train", "val" */
    struct shard_writer *writer; /* of the newest shard */
    int shards;
    int64_t shard_tokens; /* in the newest shard */
    int64_t files, documents, bytes, tokens;
    uint16_t *buffer; /* tokens not yet in a shard */
    int64_t buffered;
};

/* Where a piece of text goes. */
struct place {
    struct output *output;
    bool begins_document;
};

struct job {
    const char *out_dir, *tokenizer_name, *files_from;
    double val_fraction;
    int64_t shard_tokens, threads;
    int64_t train_bpe; /* tokens of the vocabulary to learn; 0: none */
    bool overwrite, split_documents, decode, help;
    char **paths; /* all that were given or listed */
    size_t path_count;
    bool single_file; /* one file is all there is */
    struct tokenizer *tokenizer;
    struct bpe_trainer *trainer; /* while words are counted: no shards are written */
    struct output train, val;
    int64_t skipped;
    char *text; /* of the pieces, and after them PIECE_BYTES for the next one */
    size_t text_used, text_capacity;
    struct tokenizer_piece pieces[PIECES];
    struct place places[PIECES];
    int piece_count;
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

/* What a run that failed has left; nothing is left of one that did not. */
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

/* ---- pieces of text ---- */

static enum status write_piece(
    const struct job *job, const struct place *place, const struct tokenizer_piece *piece) {
    if (place->begins_document) {
        int32_t end_of_text = tokenizer_end_of_text(job->tokenizer);
        CHECK(output_tokens(job, place->output, &end_of_text, 1));
    }
    return output_tokens(job, place->output, piece->tokens, piece->count);
}

static enum status encode_pieces(struct job *job) {
    enum status status =
        tokenizer_encode_pieces(job->tokenizer, job->pieces, job->piece_count, (int)job->threads);
    for (int i = 0; i < job->piece_count; i++) {
        if (status == STATUS_OK) {
            status = write_piece(job, &job->places[i], &job->pieces[i]);
        }
        free(job->pieces[i].tokens);
    }
    return status;
}

/* A vocabulary is learnt from what the model will learn from. */
static enum status count_words(struct job *job) {
    for (int i = 0; i < job->piece_count; i++) {
        if (job->places[i].output == &job->train) {
            CHECK(bpe_trainer_add(job->trainer, job->pieces[i].text, job->pieces[i].bytes));
        }
    }
    return STATUS_OK;
}

static enum status finish_pieces(struct job *job) {
    CHECK(job->trainer != NULL ? count_words(job) : encode_pieces(job));
    job->piece_count = 0;
    job->text_used = 0;
    return STATUS_OK;
}

/* Room for another piece; the `rest` bytes that lie behind the last one are its beginning. */
static enum status make_room(struct job *job, size_t rest) {
    if (job->piece_count < PIECES && job->text_capacity - job->text_used >= PIECE_BYTES) {
        return STATUS_OK;
    }
    size_t rest_at = job->text_used;
    CHECK(finish_pieces(job));
    memmove(job->text, job->text + rest_at, rest);
    return STATUS_OK;
}

static void add_piece(struct job *job, struct output *output, bool begins_document, size_t bytes) {
    job->pieces[job->piece_count] = (struct tokenizer_piece){job->text + job->text_used, bytes, NULL, 0};
    job->places[job->piece_count++] = (struct place){output, begins_document};
    job->text_used += bytes;
    output->documents += begins_document;
}

/* How much of the text can be encoded before more of it is read; all, if it is a single word of a whole piece. The name
   of the end of text may have begun in the last bytes. */
static size_t find_piece(const struct job *job, const char *text, size_t bytes) {
    size_t held = job->split_documents ? NAME_BYTES - 1 : 0, sure = bytes > held ? bytes - held : 0;
    size_t cut =
        job->trainer != NULL ? bpe_trainer_cut(text, sure) : tokenizer_cut(job->tokenizer, text, sure);
    return cut > 0 || bytes < PIECE_BYTES ? cut : sure;
}

/* ---- documents ---- */

/* At most `bytes` bytes of the file from where it stands: a document, or several with --split-documents. */
static enum status add_text(
    struct job *job, struct output *output, FILE *file, const char *path, int64_t bytes) {
    size_t rest = 0; /* bytes that were read and are in no piece yet */
    bool begins_document = true, at_end = false;
    const char *name = NULL; /* of the end of text, where it is next */
    output->files++;
    while (!at_end || name != NULL) {
        CHECK(make_room(job, rest));
        char *text = job->text + job->text_used;
        size_t got = fread(text + rest, 1, (size_t)min_i64((int64_t)(PIECE_BYTES - rest), bytes), file);
        if (ferror(file)) {
            return fail("%s: cannot read: %s", path, strerror(errno));
        }
        bytes -= (int64_t)got;
        output->bytes += (int64_t)got;
        rest += got;
        at_end = bytes == 0 || (got == 0 && rest < PIECE_BYTES);
        name = job->split_documents ? memmem(text, rest, end_of_text_name, NAME_BYTES) : NULL;
        size_t piece = name != NULL ? (size_t)(name - text) : at_end ? rest : find_piece(job, text, rest);
        if (piece > 0) {
            add_piece(job, output, begins_document, piece);
            begins_document = false;
            rest -= piece;
        }
        if (name != NULL) {
            begins_document = true;
            job->text_used += NAME_BYTES;
            rest -= NAME_BYTES;
        }
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
        if (++job->skipped <= NOTES && job->trainer == NULL) { /* not twice */
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

/* ---- the run ---- */

static enum status add_to_paths(struct job *job, const char *path) {
    char **grown = realloc(job->paths, (job->path_count + 1) * sizeof *grown);
    if (grown == NULL) {
        return fail_as(STATUS_OUT_OF_MEMORY, "out of host memory: %zu paths", job->path_count);
    }
    job->paths = grown;
    job->paths[job->path_count] = string_copy(path);
    return job->paths[job->path_count++] != NULL ? STATUS_OK : STATUS_OUT_OF_MEMORY;
}

/* Paths, one a line. */
static enum status read_paths(struct job *job, const char *list) {
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
            status = add_to_paths(job, line);
        }
    }
    free(line);
    if (file != stdin) {
        fclose(file);
    }
    return status;
}

static enum status add_all_paths(struct job *job) {
    for (size_t i = 0; i < job->path_count; i++) {
        CHECK(add_path(job, job->paths[i], false));
    }
    if (job->train.documents == 0) {
        return fail("no text found; give text files, or folders with text files");
    }
    return finish_pieces(job);
}

static enum status train_vocabulary(struct job *job) {
    CHECK(bpe_trainer_create(&job->trainer, 0));
    CHECK(add_all_paths(job));
    CHECK(bpe_trainer_finish(job->trainer, (int)job->train_bpe, &job->tokenizer));
    bpe_trainer_free(job->trainer);
    job->trainer = NULL;
    job->train.files = job->train.documents = job->train.bytes = 0;
    job->val.files = job->val.documents = job->val.bytes = 0;
    job->skipped = 0;
    if (tokenizer_vocab_size(job->tokenizer) < job->train_bpe) {
        fprintf(stderr, "note: the text gives a vocabulary of only %d tokens\n",
            tokenizer_vocab_size(job->tokenizer));
    }
    return STATUS_OK;
}

static enum status open_tokenizer(struct job *job) {
    CHECK(tokenizer_open(&job->tokenizer, job->tokenizer_name));
    if (tokenizer_vocab_size(job->tokenizer) > MAX_VOCAB_SIZE) {
        return fail("--tokenizer %s has %d tokens; a shard can hold no more than %d", job->tokenizer_name,
            tokenizer_vocab_size(job->tokenizer), MAX_VOCAB_SIZE);
    }
    return STATUS_OK;
}

/* ---- the manifest ---- */

static enum status write_shard_entry(
    const struct job *job, const struct output *output, int number, struct json_writer *w) {
    char path[PATH_MAX], digits[24];
    struct shard shard;
    uint64_t digest;
    CHECK(shard_path(job, output, number, "", path));
    CHECK(xxh64_file(path, &digest));
    CHECK(shard_open(&shard, path));
    shard_close(&shard);
    snprintf(digits, sizeof digits, "%016" PRIx64, digest);
    json_begin_object(w);
    json_key(w, "file");
    json_string(w, strrchr(path, '/') + 1);
    json_key(w, "tokens");
    json_integer(w, shard.tokens);
    json_key(w, "xxh64");
    json_string(w, digits);
    json_end_object(w);
    return STATUS_OK;
}

static enum status write_output_entry(
    const struct job *job, const struct output *output, struct json_writer *w) {
    json_key(w, output->name);
    json_begin_object(w);
    json_key(w, "documents");
    json_integer(w, output->documents);
    json_key(w, "text_bytes");
    json_integer(w, output->bytes);
    json_key(w, "tokens");
    json_integer(w, output->tokens);
    json_key(w, "shards");
    json_begin_array(w);
    enum status status = STATUS_OK;
    for (int i = 0; i < output->shards && status == STATUS_OK; i++) {
        status = write_shard_entry(job, output, i, w);
    }
    json_end_array(w);
    json_end_object(w);
    return status;
}

/* Which vocabulary the shards' tokens are of, and what they hold. "bytes" has nothing to tell. */
static enum status write_manifest(const struct job *job) {
    struct json_writer w;
    char path[PATH_MAX], *text;
    size_t bytes;
    json_writer_init(&w, true);
    json_begin_object(&w);
    json_key(&w, "tokenizer");
    json_string(&w, job->tokenizer_name);
    json_key(&w, "vocab_size");
    json_integer(&w, tokenizer_vocab_size(job->tokenizer));
    json_key(&w, "end_of_text");
    json_integer(&w, tokenizer_end_of_text(job->tokenizer));
    enum status train_status = write_output_entry(job, &job->train, &w);
    enum status val_status = write_output_entry(job, &job->val, &w);
    json_end_object(&w);
    CHECK(json_writer_finish(&w, &text, &bytes));
    enum status status = train_status != STATUS_OK ? train_status : val_status;
    if (status == STATUS_OK) {
        status = path_join(path, sizeof path, job->out_dir, "manifest.json");
    }
    if (status == STATUS_OK) {
        status = file_write_all(path, text, bytes);
    }
    free(text);
    return status;
}

/* ---- text to shards, shards to text ---- */

static enum status publish(struct job *job) {
    CHECK(output_finish(job, &job->train));
    CHECK(output_finish(job, &job->val));
    CHECK(output_publish(job, &job->train));
    CHECK(output_publish(job, &job->val));
    if (job->train_bpe > 0) {
        CHECK(tokenizer_save(job->tokenizer, job->out_dir));
    }
    if (strcmp(job->tokenizer_name, "bytes") != 0) {
        CHECK(write_manifest(job));
    }
    return file_sync(job->out_dir);
}

static enum status write_shards(struct job *job, char **paths, int path_count) {
    for (int i = 0; i < path_count; i++) {
        CHECK(add_to_paths(job, paths[i]));
    }
    if (job->files_from != NULL) {
        CHECK(read_paths(job, job->files_from));
    }
    if (job->train_bpe == 0) {
        CHECK(open_tokenizer(job));
    }
    job->text_capacity = (size_t)(2 * job->threads + 1) * PIECE_BYTES;
    CHECK(ALLOCATE(job->text, job->text_capacity));
    CHECK(ALLOCATE(job->train.buffer, BUFFER_TOKENS));
    CHECK(ALLOCATE(job->val.buffer, BUFFER_TOKENS));
    CHECK(make_directories(job->out_dir));
    CHECK(check_nothing_is_overwritten(job, &job->train));
    CHECK(check_nothing_is_overwritten(job, &job->val));
    job->single_file = path_count == 1 && job->files_from == NULL && !path_is_directory(paths[0]);
    if (job->train_bpe > 0) {
        CHECK(train_vocabulary(job));
    }
    CHECK(add_all_paths(job));
    return publish(job);
}

static enum status decode_tokens(
    const struct job *job, const char *path, const uint16_t *tokens, int64_t count, FILE *out) {
    for (int64_t i = 0; i < count; i++) {
        size_t bytes;
        const char *text = tokenizer_token_bytes(job->tokenizer, tokens[i], &bytes);
        if (text == NULL) {
            return fail("%s: the token %u is none of the %d of --tokenizer %s", path, tokens[i],
                tokenizer_vocab_size(job->tokenizer), job->tokenizer_name);
        }
        if (tokens[i] == tokenizer_end_of_text(job->tokenizer)) {
            text = end_of_text_name;
            bytes = strlen(end_of_text_name);
        }
        fwrite(text, 1, bytes, out);
    }
    return ferror(out) ? fail("cannot write the text: %s", strerror(errno)) : STATUS_OK;
}

static enum status decode_shard(const struct job *job, const char *path, uint16_t *buffer, FILE *out) {
    struct shard shard;
    CHECK(shard_open(&shard, path));
    enum status status = STATUS_OK;
    for (int64_t at = 0; at < shard.tokens && status == STATUS_OK; at += BUFFER_TOKENS) {
        int64_t count = min_i64(BUFFER_TOKENS, shard.tokens - at);
        status = shard_read(&shard, at, buffer, count);
        if (status == STATUS_OK) {
            status = decode_tokens(job, path, buffer, count, out);
        }
    }
    shard_close(&shard);
    return status;
}

static enum status decode_shards(struct job *job, char **paths, int path_count) {
    CHECK(open_tokenizer(job));
    CHECK(ALLOCATE(job->train.buffer, BUFFER_TOKENS));
    for (int i = 0; i < path_count; i++) {
        CHECK(decode_shard(job, paths[i], job->train.buffer, stdout));
    }
    return fflush(stdout) == 0 ? STATUS_OK : fail("cannot write the text: %s", strerror(errno));
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
    "       build/prepare --decode [--tokenizer NAME] SHARD...\n"
    "\n"
    "Turns text into token shards: train_000000.bin, ... to learn from and val_000000.bin, ... to measure "
    "on.\n"
    "Every file is one document. Folders are searched to the bottom; hidden and binary files are left out.\n"
    "\n"
    "  --out-dir DIR         where the shards go (data/tokens)\n"
    "  --tokenizer NAME      bytes: each byte a token, 256 ends a text; vocabulary 257 (bytes)\n"
    "                        or a path: a folder with GPT-2's vocab.json and merges.txt, or tokenizer.json, "
    "or "
    "a\n"
    "                        tiktoken rank file\n"
    "  --train-bpe N         learn a vocabulary of N tokens from the text first, 257 to 65536; it goes to "
    "DIR\n"
    "  --val-fraction F      share of the text for validation, 0 to 0.5; whole files, or the end of a "
    "single\n"
    "                        file (0.1)\n"
    "  --shard-tokens N      a new shard is begun after N tokens, 1 to 2000000000 (100000000)\n"
    "  --files-from FILE     also take the paths in FILE, one a line; - reads them from standard input\n"
    "  --split-documents     a text <|endoftext|> in a file begins another document\n"
    "  --overwrite           replace shards that are in DIR already\n"
    "  --threads N           that encode, 1 to 256 (as many as cores)\n"
    "  --decode              print the text of shards; documents begin with <|endoftext|>\n"
    "  --help                this text\n"
    "\n"
    "Example:\n"
    "  build/prepare --out-dir data/tokens/books --train-bpe 8192 books/\n"
    "  ./train_gpt --model tiny --vocab-size 8192 --tokenizer data/tokens/books \\\n"
    "      --train-data 'data/tokens/books/train_*.bin' --val-data 'data/tokens/books/val_*.bin'\n";

static enum status parse_count(const char *name, int64_t least, int64_t most, int64_t *value) {
    char *end;
    errno = 0;
    long long number = strtoll(optarg, &end, 10);
    if (end == optarg || *end != 0 || errno != 0 || number < least || number > most) {
        return fail("--%s: '%s' is no whole number from %" PRId64 " to %" PRId64, name, optarg, least, most);
    }
    *value = number;
    return STATUS_OK;
}

static enum status parse_fraction(double *value) {
    char *end;
    *value = strtod(optarg, &end);
    if (end == optarg || *end != 0 || !(*value >= 0 && *value <= 0.5)) {
        return fail("--val-fraction: '%s' is no number from 0 to 0.5", optarg);
    }
    return STATUS_OK;
}

enum option_id {
    OUT_DIR,
    TOKENIZER,
    TRAIN_BPE,
    VAL_FRACTION,
    SHARD_TOKENS,
    FILES_FROM,
    SPLIT_DOCUMENTS,
    OVERWRITE,
    THREADS,
    DECODE,
    HELP
};

static enum status take_option(struct job *job, int option) {
    switch (option) {
    case OUT_DIR:
        job->out_dir = optarg;
        break;
    case TOKENIZER:
        job->tokenizer_name = optarg;
        break;
    case TRAIN_BPE:
        return parse_count("train-bpe", 257, MAX_VOCAB_SIZE, &job->train_bpe);
    case VAL_FRACTION:
        return parse_fraction(&job->val_fraction);
    case SHARD_TOKENS:
        return parse_count("shard-tokens", 1, MAX_SHARD_TOKENS, &job->shard_tokens);
    case FILES_FROM:
        job->files_from = optarg;
        break;
    case SPLIT_DOCUMENTS:
        job->split_documents = true;
        break;
    case OVERWRITE:
        job->overwrite = true;
        break;
    case THREADS:
        return parse_count("threads", 1, MOST_THREADS, &job->threads);
    case DECODE:
        job->decode = true;
        break;
    case HELP:
        job->help = true;
        break;
    }
    return STATUS_OK;
}

static enum status parse_options(struct job *job, int argc, char **argv) {
    static const struct option table[] = {{"out-dir", required_argument, NULL, OUT_DIR},
        {"tokenizer", required_argument, NULL, TOKENIZER}, {"train-bpe", required_argument, NULL, TRAIN_BPE},
        {"val-fraction", required_argument, NULL, VAL_FRACTION},
        {"shard-tokens", required_argument, NULL, SHARD_TOKENS},
        {"files-from", required_argument, NULL, FILES_FROM},
        {"split-documents", no_argument, NULL, SPLIT_DOCUMENTS}, {"overwrite", no_argument, NULL, OVERWRITE},
        {"threads", required_argument, NULL, THREADS}, {"decode", no_argument, NULL, DECODE},
        {"help", no_argument, NULL, HELP}, {NULL, 0, NULL, 0}};
    opterr = 0;
    for (int option; !job->help && (option = getopt_long(argc, argv, ":", table, NULL)) != -1;) {
        if (option == ':') {
            return fail("%s: a value is missing; see --help", argv[optind - 1]);
        }
        if (option == '?') {
            return fail("%s: unknown option; see --help", argv[optind - 1]);
        }
        CHECK(take_option(job, option));
    }
    if (job->train_bpe > 0 && job->tokenizer_name != NULL) {
        return fail(
            "--train-bpe makes a tokenizer: --tokenizer %s cannot be had as well", job->tokenizer_name);
    }
    if (!job->help && optind == argc && (job->files_from == NULL || job->decode)) {
        return fail("no files given; see --help");
    }
    return STATUS_OK;
}

static void clear(struct job *job) {
    output_discard(job, &job->train);
    output_discard(job, &job->val);
    for (size_t i = 0; i < job->path_count; i++) {
        free(job->paths[i]);
    }
    free(job->paths);
    tokenizer_close(job->tokenizer);
    bpe_trainer_free(job->trainer);
    free(job->text);
    free(job->train.buffer);
    free(job->val.buffer);
    free(job);
}

static enum status run(struct job *job, int argc, char **argv) {
    CHECK(parse_options(job, argc, argv));
    if (job->tokenizer_name == NULL) {
        job->tokenizer_name = job->train_bpe > 0 ? job->out_dir : "bytes";
    }
    if (job->help) {
        fputs(help_text, stdout);
        return STATUS_OK;
    }
    if (job->decode) {
        return decode_shards(job, argv + optind, argc - optind);
    }
    CHECK(write_shards(job, argv + optind, argc - optind));
    print_summary(job);
    return STATUS_OK;
}

int main(int argc, char **argv) {
    struct job *job;
    enum status status = ALLOCATE(job, 1);
    if (status == STATUS_OK) {
        job->out_dir = "data/tokens";
        job->val_fraction = 0.1;
        job->shard_tokens = 100000000;
        job->threads = max_i64(1, min_i64(sysconf(_SC_NPROCESSORS_ONLN), MOST_THREADS));
        job->train.name = "train";
        job->val.name = "val";
        status = run(job, argc, argv);
        clear(job);
    }
    if (status != STATUS_OK) {
        fprintf(stderr, "prepare: %s\n", error_message());
    }
    return status == STATUS_OK ? 0 : 1;
}
