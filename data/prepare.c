/* build/prepare: text -> token shards for training and for validation, and back.

   One pass over the inputs in a fixed order, in pieces, so memory does not grow with the data; --train-bpe makes one
   before it to learn the vocabulary. A document is end-of-text, then its tokens. An input goes to validation when that
   brings validation's share of the bytes closer to --val-fraction; if that is none, the last one is cut. Pieces are
   gathered until there is work for all threads, encoded, and written in their order.

     inputs.h     the list of files          source.h     the documents of one of them
     output.h     tokens into shards         progress.h   what --resume goes on from

   Shards are written under temporary names and get their own when all is done. Every now and then, with all pieces
   written, the state is saved. A run that fails before it was saved leaves nothing behind; a later one, or a run that is
   killed, leaves what --resume needs, and ends with the same bytes as one that nobody disturbed. */
#include "data/progress.h"
#include "data/inputs.h"
#include "data/source.h"
#include "llmc/bpe_train.h"
#include "llmc/checksum.h"
#include "llmc/json.h"
#include "llmc/metrics.h"
#include "llmc/tokenizer.h"
#include "llmc/tokenizer_batch.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

enum {
    PIECE_BYTES = 1 << 20, /* of text encoded at once, at most; a word that is longer is cut */
    PIECES = 1024,         /* gathered at once, at most */
    MOST_THREADS = 256,
    NOTES = 10 /* skipped files named one by one */
};
#define MAX_SHARD_TOKENS INT64_C(2000000000)
#define MAX_VOCAB_SIZE 65536 /* a shard's tokens have 16 bits */
static const double SAVE_SECONDS = 10, DRAW_SECONDS = 0.2;
static const char end_of_text_name[] = "<|endoftext|>";
enum { NAME_BYTES = sizeof end_of_text_name - 1 };
enum side { TRAIN, VAL };

/* Where a piece of text goes. */
struct place {
    enum side side;
    bool begins_document;
};

struct job {
    const char *out_dir, *tokenizer_name, *files_from, *field;
    double val_fraction;
    int64_t shard_tokens, threads;
    int64_t train_bpe; /* tokens of the vocabulary to learn; 0: none */
    bool overwrite, resume, split_documents, decode, help;
    int lock; /* the open out_dir; -1: not yet */
    struct inputs inputs;
    int64_t last_text;   /* index of the last file that is not empty or binary; -1: there is none */
    bool standard_input; /* is among the inputs: what is in it shows only when it is read */
    struct tokenizer *tokenizer;
    char found_tokenizer[PATH_MAX]; /* --decode: the name of a shard's, where none was given */
    struct bpe_trainer *trainer;    /* while words are counted: no shards are written */
    struct output outputs[2];
    char *text; /* of the pieces, and after them PIECE_BYTES for the next one */
    size_t text_used, text_capacity;
    struct tokenizer_piece pieces[PIECES];
    struct place places[PIECES];
    int piece_count;
    /* where it is */
    struct progress progress;
    bool began;    /* the unfinished shards that lie there are its own */
    bool saved;    /* and can be resumed */
    bool complete; /* nothing is left to do: --resume, and all shards have their names */
    int64_t saved_shards;
    double saved_seconds, drawn_seconds, begin_seconds;
    int64_t done_bytes;  /* of the inputs before this one */
    int64_t begin_bytes; /* that an interrupted run did */
    bool terminal;       /* stderr is one */
};

static enum status check_nothing_is_overwritten(const struct job *job, const struct output *output) {
    char path[PATH_MAX];
    CHECK(output_shard_path(output, 0, "", path));
    if (!job->overwrite && path_exists(path)) {
        return fail("%s: is there already; choose another --out-dir or give --overwrite", path);
    }
    return STATUS_OK;
}

/* ---- where it is ---- */

/* One line that is drawn over itself. */
static void draw_bar(struct job *job, const struct source *source) {
    double now = time_seconds(), seconds = now - job->begin_seconds;
    if (!job->terminal || now - job->drawn_seconds < DRAW_SECONDS) {
        return;
    }
    int64_t done = job->done_bytes + source->offset, total = job->inputs.bytes;
    double rate = (double)(done - job->begin_bytes) / seconds;
    char of_bytes[32], all_bytes[32], eta[32];
    job->drawn_seconds = now;
    format_bytes(of_bytes, sizeof of_bytes, (uint64_t)done);
    format_bytes(all_bytes, sizeof all_bytes, (uint64_t)total);
    format_duration(eta, sizeof eta, (double)(total - done) / rate);
    const char *what = job->trainer != NULL ? "counting words" : "encoding";
    if (total >= done && total > 0) {
        fprintf(stderr, "\r%s  %3d%%  %s of %s  %.1f MB/s  ETA %s\033[K", what, (int)(100 * done / total),
            of_bytes, all_bytes, 1e-6 * rate, eta);
    } else { /* how much comes through standard input nobody knows */
        fprintf(stderr, "\r%s  %s  %.1f MB/s\033[K", what, of_bytes, 1e-6 * rate);
    }
}

static void end_bar(const struct job *job) {
    if (job->drawn_seconds > 0) {
        fputs("\r\033[K", stderr);
    }
}

/* After all pieces are written: the inputs up to `offset` of this one are in the outputs. */
static enum status save(struct job *job, int64_t offset, int64_t line, bool begins_document) {
    const struct output *const outputs[2] = {&job->outputs[TRAIN], &job->outputs[VAL]};
    job->progress.offset = offset;
    job->progress.line = line;
    job->progress.document = begins_document;
    CHECK(output_sync(&job->outputs[TRAIN]));
    CHECK(output_sync(&job->outputs[VAL]));
    CHECK(progress_save(job->out_dir, &job->progress, outputs));
    job->saved = true;
    job->saved_shards = outputs[TRAIN]->state.shards + outputs[VAL]->state.shards;
    job->saved_seconds = time_seconds();
    return STATUS_OK;
}

static enum status save_if_due(struct job *job, int64_t offset, int64_t line, bool begins_document) {
    int64_t shards = job->outputs[TRAIN].state.shards + job->outputs[VAL].state.shards;
    bool due = shards > job->saved_shards || time_seconds() - job->saved_seconds >= SAVE_SECONDS;
    return due && job->trainer == NULL ? save(job, offset, line, begins_document) : STATUS_OK;
}

/* ---- pieces of text ---- */

static enum status write_piece(
    struct job *job, const struct place *place, const struct tokenizer_piece *piece) {
    struct output *output = &job->outputs[place->side];
    if (place->begins_document) {
        int32_t end_of_text = tokenizer_end_of_text(job->tokenizer);
        CHECK(output_tokens(output, &end_of_text, 1));
    }
    return output_tokens(output, piece->tokens, piece->count);
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
        if (job->places[i].side == TRAIN) {
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
static enum status make_room(
    struct job *job, const struct source *source, size_t rest, bool begins_document) {
    if (job->piece_count < PIECES && job->text_capacity - job->text_used >= PIECE_BYTES) {
        return STATUS_OK;
    }
    size_t rest_at = job->text_used;
    CHECK(finish_pieces(job));
    memmove(job->text, job->text + rest_at, rest);
    draw_bar(job, source);
    if (source->field == NULL) {
        return save_if_due(job, source->offset - (int64_t)rest, 0, begins_document);
    }
    /* within a line there is no place in the file to go on from */
    bool at_begin = begins_document && rest == 0;
    return at_begin ? save_if_due(job, source->document_offset, source->document_line, true) : STATUS_OK;
}

static void add_piece(struct job *job, enum side side, bool begins_document, size_t bytes) {
    job->pieces[job->piece_count] = (struct tokenizer_piece){job->text + job->text_used, bytes, NULL, 0};
    job->places[job->piece_count++] = (struct place){side, begins_document};
    job->text_used += bytes;
    job->outputs[side].state.documents += begins_document;
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

/* A document of the source, or several with --split-documents; with begins_document false the rest of one. */
static enum status add_document(
    struct job *job, enum side side, struct source *source, bool begins_document) {
    size_t rest = 0; /* bytes that were read and are in no piece yet */
    bool at_end = false;
    const char *name = NULL; /* of the end of text, where it is next */
    while (!at_end || name != NULL) {
        CHECK(make_room(job, source, rest, begins_document));
        char *text = job->text + job->text_used;
        size_t got = 0;
        if (!at_end) {
            CHECK(source_read(source, text + rest, PIECE_BYTES - rest, &got, &at_end));
        }
        job->outputs[side].state.bytes += (int64_t)got;
        rest += got;
        name = job->split_documents ? memmem(text, rest, end_of_text_name, NAME_BYTES) : NULL;
        size_t piece = name != NULL ? (size_t)(name - text) : at_end ? rest : find_piece(job, text, rest);
        if (piece > 0) {
            add_piece(job, side, begins_document, piece);
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

/* Does validation come closer to its share with so many more bytes? */
static bool belongs_to_val(const struct job *job, int64_t bytes) {
    int64_t train = job->outputs[TRAIN].state.bytes, val = job->outputs[VAL].state.bytes;
    return (double)val + 0.5 * (double)bytes < job->val_fraction * (double)(train + val + bytes);
}

/* The source up to its end. Documents of JSON lines that come through standard input are shared out one by one. */
static enum status add_source(struct job *job, enum side side, struct source *source, bool resumed) {
    bool begins_document = !resumed || job->progress.document != 0, there;
    bool one_by_one = source->field != NULL && strcmp(source->path, "-") == 0;
    job->progress.side = side;
    job->outputs[side].state.files += !resumed;
    for (;;) {
        CHECK(source_next(source, &there));
        if (!there) {
            return STATUS_OK;
        }
        if (one_by_one) {
            side = belongs_to_val(job, (int64_t)source->text_bytes) ? VAL : TRAIN;
        }
        CHECK(add_document(job, side, source, begins_document));
        begins_document = true;
    }
}

/* Where the line begins that the byte before `end` is in. */
static int64_t find_line(FILE *file, int64_t end) {
    char piece[1 << 14];
    while (end > 0) {
        size_t bytes = (size_t)min_i64(end, sizeof piece);
        end -= (int64_t)bytes;
        if (fseeko(file, end, SEEK_SET) != 0 || fread(piece, 1, bytes, file) != bytes) {
            return 0;
        }
        const char *newline = memrchr(piece, '\n', bytes);
        if (newline != NULL) {
            return end + (newline - piece) + 1;
        }
    }
    return 0;
}

/* The first place at or after `from` behind a line's end or, where `blanks` will do, a blank; the file's end if there is none. */
static int64_t find_place(FILE *file, int64_t from, bool blanks) {
    fseeko(file, from, SEEK_SET);
    for (int byte; (byte = getc(file)) != EOF;) {
        from++;
        if (byte == '\n' || (blanks && byte == ' ')) {
            break;
        }
    }
    return from;
}

/* No byte of a character of UTF-8 but its first. */
static int64_t find_character(FILE *file, int64_t from) {
    fseeko(file, from, SEEK_SET);
    for (int byte; (byte = getc(file)) != EOF && (byte & 0xC0) == 0x80;) {
        from++;
    }
    return from;
}

/* Where the training part of the file ends that is cut because none was small enough for validation: after the line in
   which its share is reached. Where that leaves nothing, JSON is cut before that line; where it leaves little, text is
   cut before it or, if that is too much, within it, between words or at least characters. 0: nowhere, it is a single line
   of JSON, a byte, or one word that may hold the end of a document. */
static int64_t find_cut(const struct job *job, const struct input *input) {
    int64_t size = input->bytes, all = job->outputs[TRAIN].state.bytes + size;
    int64_t share = (int64_t)((double)size - job->val_fraction * (double)all);
    FILE *file = share > 0 ? fopen(input->path, "rbe") : NULL;
    if (file == NULL) { /* reading it will tell */
        return 0;
    }
    int64_t cut = find_place(file, share, false), begin = find_line(file, share), wanted = size - share;
    if (job->field != NULL) {
        cut = cut < size ? cut : begin;
    } else if (2 * (size - cut) < wanted) {
        cut = begin > 0 && size - begin <= 2 * wanted ? begin : find_place(file, share, true);
        cut = 2 * (size - cut) < wanted && !job->split_documents ? find_character(file, share) : cut;
    }
    fclose(file);
    return cut < size ? cut : 0;
}

/* The part of an input that ends at `end`. */
static enum status add_part(
    struct job *job, const struct input *input, enum side side, int64_t begin, int64_t end, bool resumed) {
    struct source source = {.path = input->path, .field = job->field, .end = end, .offset = begin};
    if (resumed) {
        source.offset = job->progress.offset;
        source.line = job->progress.line;
    }
    enum status status = source_open(&source);
    if (status == STATUS_OK) {
        bool binary = !resumed && begin == 0 && source.field == NULL && source_is_binary(&source);
        if (!binary && end > 0) {
            status = add_source(job, side, &source, resumed);
        } else if (++job->progress.skipped <= NOTES && job->trainer == NULL) { /* not twice */
            end_bar(job);
            fprintf(stderr, "note: %s: skipped, it %s\n", input->path, end == 0 ? "is empty" : "is binary");
        }
    }
    source_close(&source);
    return status;
}

/* There is to be text for validation, and no other file will bring it. Where none was small enough the last one has at
   least twice the share that is wanted. */
static bool must_be_cut(const struct job *job, enum side side) {
    return job->progress.input == job->last_text && job->val_fraction > 0 && side == TRAIN &&
           job->outputs[VAL].state.documents == 0;
}

static enum status add_input(struct job *job, const struct input *input, bool resumed) {
    bool standard = strcmp(input->path, "-") == 0;
    int64_t end = standard ? INT64_MAX : input->bytes;
    enum side side = resumed                                          ? (enum side)job->progress.side
                     : !standard && belongs_to_val(job, input->bytes) ? VAL
                                                                      : TRAIN;
    if (!resumed) {
        job->progress.cut = must_be_cut(job, side) ? find_cut(job, input) : 0;
    }
    int64_t cut = job->progress.cut;
    if (cut == 0) {
        return add_part(job, input, side, 0, end, resumed);
    }
    bool train_done = resumed && side == VAL;
    if (!train_done) {
        CHECK(add_part(job, input, TRAIN, 0, cut, resumed));
    }
    return add_part(job, input, VAL, cut, end, train_done);
}

static enum status add_inputs(struct job *job, bool resumed) {
    job->begin_seconds = job->saved_seconds = time_seconds();
    job->done_bytes = 0;
    for (int64_t i = 0; i < job->inputs.count; i++) {
        if (!resumed || i >= job->progress.input) {
            bool here = resumed && i == job->progress.input;
            if (here) {
                job->begin_bytes = job->done_bytes + job->progress.offset;
            }
            job->progress.input = i;
            CHECK(add_input(job, &job->inputs.files[i], here));
        }
        job->done_bytes += job->inputs.files[i].bytes;
    }
    if (job->outputs[TRAIN].state.documents == 0) {
        return fail("no text found; give text files, or folders with text files");
    }
    return finish_pieces(job);
}

/* ---- the run ---- */

static enum status train_vocabulary(struct job *job) {
    CHECK(bpe_trainer_create(&job->trainer, 0));
    CHECK(add_inputs(job, false));
    CHECK(bpe_trainer_finish(job->trainer, (int)job->train_bpe, &job->tokenizer));
    bpe_trainer_free(job->trainer);
    job->trainer = NULL;
    memset(&job->outputs[TRAIN].state, 0, sizeof job->outputs[TRAIN].state);
    memset(&job->outputs[VAL].state, 0, sizeof job->outputs[VAL].state);
    job->progress.skipped = 0;
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

/* Runs with the same number write the same shards. */
static uint64_t number_of_run(const struct job *job) {
    struct xxh64 checksum;
    xxh64_init(&checksum);
    xxh64_update(&checksum, &job->val_fraction, sizeof job->val_fraction);
    xxh64_update(&checksum, &job->shard_tokens, sizeof job->shard_tokens);
    xxh64_update(&checksum, &job->split_documents, sizeof job->split_documents);
    if (job->field != NULL) {
        xxh64_update(&checksum, job->field, strlen(job->field) + 1);
    }
    uint64_t vocabulary = tokenizer_fingerprint(job->tokenizer);
    xxh64_update(&checksum, &vocabulary, sizeof vocabulary);
    for (int64_t i = 0; i < job->inputs.count; i++) {
        const struct input *input = &job->inputs.files[i];
        xxh64_update(&checksum, input->path, strlen(input->path) + 1);
        xxh64_update(&checksum, &input->bytes, sizeof input->bytes);
        xxh64_update(&checksum, &input->modified, sizeof input->modified);
    }
    return xxh64_digest(&checksum);
}

static enum status manifest_path(const struct job *job, char path[PATH_MAX]) {
    return path_join(path, PATH_MAX, job->out_dir, "manifest.json");
}

static void format_number(char digits[24], uint64_t number) {
    snprintf(digits, 24, "%016" PRIx64, number);
}

/* Did this run end already? Then its shards have a manifest with its number. */
static bool is_complete(const struct job *job) {
    char path[PATH_MAX], shard[PATH_MAX], digits[24];
    struct json *manifest = NULL;
    const char *run;
    format_number(digits, job->progress.run);
    bool complete = output_shard_path(&job->outputs[TRAIN], 0, "", shard) == STATUS_OK &&
                    path_exists(shard) && manifest_path(job, path) == STATUS_OK &&
                    json_read_file(&manifest, path) == STATUS_OK &&
                    json_get_string(manifest, "run", &run, path) == STATUS_OK && strcmp(run, digits) == 0;
    json_free(manifest);
    return complete;
}

/* Sets *resumed if there is an interrupted run to go on with. */
static enum status begin_or_resume(struct job *job, bool *resumed) {
    struct output *const outputs[2] = {&job->outputs[TRAIN], &job->outputs[VAL]};
    struct progress interrupted;
    bool there = false;
    uint64_t number = number_of_run(job);
    *resumed = false;
    if (!job->overwrite || job->resume) {
        CHECK(progress_load(job->out_dir, &interrupted, outputs, &there));
    }
    if (there && !job->resume) {
        return fail("%s: an interrupted run is in it; --resume goes on with it, --overwrite begins anew",
            job->out_dir);
    }
    if (there && interrupted.run != number) {
        return fail(
            "--resume: the interrupted run in %s had other options or inputs; give the same, or begin anew "
            "with --overwrite",
            job->out_dir);
    }
    if (there) {
        job->progress = interrupted;
        job->began = job->saved = *resumed = true;
        job->saved_shards = outputs[TRAIN]->state.shards + outputs[VAL]->state.shards;
        CHECK(output_continue(outputs[TRAIN]));
        return output_continue(outputs[VAL]);
    }
    job->progress.run = number;
    job->complete = job->resume && !job->overwrite && !job->standard_input && is_complete(job);
    if (job->complete) {
        return STATUS_OK;
    }
    CHECK(check_nothing_is_overwritten(job, outputs[TRAIN]));
    CHECK(check_nothing_is_overwritten(job, outputs[VAL]));
    CHECK(progress_remove(job->out_dir));
    output_discard(outputs[TRAIN]);
    output_discard(outputs[VAL]);
    job->began = true;
    return STATUS_OK;
}

/* ---- the manifest ---- */

static enum status write_shard_entry(const struct output *output, int64_t number, struct json_writer *w) {
    char path[PATH_MAX], digits[24];
    struct shard shard;
    uint64_t digest;
    CHECK(output_shard_path(output, number, "", path));
    CHECK(xxh64_file(path, &digest));
    CHECK(shard_open(&shard, path));
    shard_close(&shard);
    format_number(digits, digest);
    json_begin_object(w);
    json_string_member(w, "file", strrchr(path, '/') + 1);
    json_integer_member(w, "tokens", shard.tokens);
    json_string_member(w, "xxh64", digits);
    json_end_object(w);
    return STATUS_OK;
}

static enum status write_output_entry(const struct output *output, struct json_writer *w) {
    json_key(w, output->name);
    json_begin_object(w);
    json_integer_member(w, "documents", output->state.documents);
    json_integer_member(w, "text_bytes", output->state.bytes);
    json_integer_member(w, "tokens", output->state.tokens);
    json_key(w, "shards");
    json_begin_array(w);
    enum status status = STATUS_OK;
    for (int64_t i = 0; i < output->state.shards && status == STATUS_OK; i++) {
        status = write_shard_entry(output, i, w);
    }
    json_end_array(w);
    json_end_object(w);
    return status;
}

/* Which vocabulary the shards' tokens are of, and what they hold. */
static enum status write_manifest(const struct job *job) {
    struct json_writer w;
    char path[PATH_MAX], digits[24], *text;
    size_t bytes;
    format_number(digits, job->progress.run);
    json_writer_init(&w, true);
    json_begin_object(&w);
    json_string_member(&w, "run", digits);
    json_string_member(&w, "tokenizer", job->tokenizer_name);
    json_integer_member(&w, "vocab_size", tokenizer_vocab_size(job->tokenizer));
    json_integer_member(&w, "end_of_text", tokenizer_end_of_text(job->tokenizer));
    enum status train_status = write_output_entry(&job->outputs[TRAIN], &w);
    enum status val_status = write_output_entry(&job->outputs[VAL], &w);
    json_end_object(&w);
    CHECK(json_writer_finish(&w, &text, &bytes));
    enum status status = train_status != STATUS_OK ? train_status : val_status;
    if (status == STATUS_OK) {
        status = manifest_path(job, path);
    }
    if (status == STATUS_OK) {
        status = file_write_all(path, text, bytes);
    }
    free(text);
    return status;
}

/* ---- text to shards, shards to text ---- */

static enum status publish(struct job *job) {
    job->progress.input = job->inputs.count; /* all are done: a run that is killed below has only this left */
    CHECK(save(job, 0, 0, true));
    for (int side = TRAIN; side <= VAL; side++) {
        CHECK(output_finish(&job->outputs[side]));
    }
    for (int side = TRAIN; side <= VAL; side++) {
        CHECK(output_publish(&job->outputs[side]));
    }
    if (job->train_bpe > 0) {
        CHECK(tokenizer_save(job->tokenizer, job->out_dir));
    }
    CHECK(write_manifest(job));
    CHECK(progress_remove(job->out_dir));
    job->saved = false;
    return file_sync(job->out_dir);
}

/* What cannot be opened counts: reading it will tell. */
static bool has_text(const struct job *job, const struct input *input) {
    struct source source = {.path = input->path, .field = job->field, .end = input->bytes};
    if (input->bytes == 0) { /* empty, or standard input */
        return false;
    }
    bool binary = source.field == NULL && source_open(&source) == STATUS_OK && source_is_binary(&source);
    source_close(&source);
    return !binary;
}

static enum status list_inputs(struct job *job, char **paths, int path_count) {
    bool list_is_standard = job->files_from != NULL && strcmp(job->files_from, "-") == 0;
    int texts = 0; /* from standard input */
    for (int i = 0; i < path_count; i++) {
        texts += strcmp(paths[i], "-") == 0;
        CHECK(inputs_add(&job->inputs, paths[i]));
    }
    if (texts + list_is_standard > 1) {
        return fail("-: standard input can be read once only");
    }
    job->standard_input = texts > 0;
    if (job->standard_input && job->train_bpe > 0) {
        return fail("--train-bpe reads its text twice, which standard input cannot be; give files");
    }
    if (job->files_from != NULL) {
        CHECK(inputs_add_list(&job->inputs, job->files_from));
    }
    job->last_text = job->inputs.count - 1;
    while (job->last_text >= 0 && !has_text(job, &job->inputs.files[job->last_text])) {
        job->last_text--;
    }
    return STATUS_OK;
}

/* One run at a time writes a folder: a second would take the first one's unfinished shards for what a failed run left.
   The lock goes with the process. File systems that have no locks do without. */
static enum status lock_folder(struct job *job) {
    job->lock = open(job->out_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (job->lock < 0) {
        return fail("%s: cannot open: %s", job->out_dir, strerror(errno));
    }
    if (flock(job->lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        return fail("%s: another run writes shards there; wait for its end, or choose another --out-dir",
            job->out_dir);
    }
    return STATUS_OK;
}

static enum status write_shards(struct job *job, char **paths, int path_count) {
    bool resumed;
    CHECK(list_inputs(job, paths, path_count));
    if (job->train_bpe == 0) {
        CHECK(open_tokenizer(job));
    }
    job->text_capacity = (size_t)(2 * job->threads + 1) * PIECE_BYTES;
    CHECK(ALLOCATE(job->text, job->text_capacity));
    CHECK(output_create(&job->outputs[TRAIN], job->out_dir, "train", job->shard_tokens));
    CHECK(output_create(&job->outputs[VAL], job->out_dir, "val", job->shard_tokens));
    if (make_directories(job->out_dir) != STATUS_OK) {
        return fail(
            "--out-dir %s: %s; give a folder that can be made and written", job->out_dir, error_message());
    }
    CHECK(lock_folder(job));
    if (job->train_bpe > 0 && !job->resume) { /* before words are counted for long */
        CHECK(check_nothing_is_overwritten(job, &job->outputs[TRAIN]));
        CHECK(check_nothing_is_overwritten(job, &job->outputs[VAL]));
    }
    if (job->train_bpe > 0) {
        CHECK(train_vocabulary(job));
    }
    CHECK(begin_or_resume(job, &resumed));
    if (job->complete) {
        return STATUS_OK;
    }
    CHECK(add_inputs(job, resumed));
    return publish(job);
}

static enum status decode_tokens(
    const struct job *job, const char *path, const uint16_t *tokens, int64_t count, FILE *out) {
    for (int64_t i = 0; i < count; i++) {
        size_t bytes;
        const char *text = tokenizer_token_bytes(job->tokenizer, tokens[i], &bytes);
        if (text == NULL) {
            return fail(
                "%s: the token %u is none of the %d of --tokenizer %s; give the one that made the shard",
                path, tokens[i], tokenizer_vocab_size(job->tokenizer), job->tokenizer_name);
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

/* The tokenizer that the manifest beside a shard names, or files beside it, which is where a learned one has them; else
   bytes. */
static enum status find_tokenizer_of(const char *shard, char name[PATH_MAX]) {
    char folder[PATH_MAX], manifest[PATH_MAX];
    const char *slash = strrchr(shard, '/'), *named = "";
    struct json *json = NULL;
    enum status status = STATUS_OK;
    snprintf(folder, sizeof folder, "%.*s", slash == NULL ? 1 : (int)min_i64(slash - shard, PATH_MAX - 1),
        slash == NULL ? "." : shard);
    CHECK(path_join(manifest, sizeof manifest, folder[0] == '\0' ? "/" : folder, "manifest.json"));
    if (path_exists(manifest)) {
        CHECK(json_read_file(&json, manifest));
        status = json_get_string(json, "tokenizer", &named, manifest);
    }
    if (strcmp(named, "bytes") != 0 && tokenizer_is_in(folder)) {
        named = folder;
    }
    if (status == STATUS_OK) {
        snprintf(name, PATH_MAX, "%s", named[0] != '\0' ? named : "bytes");
    }
    json_free(json);
    return status;
}

static enum status open_tokenizer_of(struct job *job, const char *shard) {
    tokenizer_close(job->tokenizer);
    job->tokenizer = NULL;
    job->tokenizer_name = job->found_tokenizer;
    return find_tokenizer_of(shard, job->found_tokenizer) == STATUS_OK && open_tokenizer(job) == STATUS_OK
               ? STATUS_OK
               : fail("%s: its tokenizer cannot be read (%s); give --tokenizer", shard, error_message());
}

static enum status decode_shards(struct job *job, char **paths, int path_count) {
    bool given = job->tokenizer_name != NULL;
    if (given) {
        CHECK(open_tokenizer(job));
    }
    CHECK(output_create(&job->outputs[TRAIN], "", "train", job->shard_tokens)); /* for its buffer */
    for (int i = 0; i < path_count; i++) {
        if (!path_exists(paths[i])) {
            return fail("--decode %s: there is no such file; give shards", paths[i]);
        }
        if (!given) {
            CHECK(open_tokenizer_of(job, paths[i]));
        }
        CHECK(decode_shard(job, paths[i], job->outputs[TRAIN].buffer, stdout));
    }
    return fflush(stdout) == 0 ? STATUS_OK : fail("cannot write the text: %s", strerror(errno));
}

static const char *plural(int64_t count) {
    return count == 1 ? " " : "s"; /* as wide, for the columns */
}

static void print_summary(const struct job *job) {
    for (int side = TRAIN; side <= VAL; side++) {
        const struct output *output = &job->outputs[side];
        const struct output_state *state = &output->state;
        printf("%-5s  %8" PRId64 " file%s  %14" PRId64 " tokens  %6" PRId64 " shard%s  %s/%s_*.bin\n",
            output->name, state->files, plural(state->files), state->tokens, state->shards,
            plural(state->shards), job->out_dir, output->name);
    }
    if (job->progress.skipped > 0) {
        fprintf(stderr, "note: skipped %" PRId64 " binary or empty files in all\n", job->progress.skipped);
    }
    if (job->outputs[VAL].state.shards == 0 && job->val_fraction > 0) {
        fprintf(stderr, "note: nothing fell to validation: standard input and a single line of JSON are for "
                        "training; give "
                        "more files or a larger --val-fraction\n");
    }
}

static const char help_text[] =
    "usage: build/prepare [options] FILE_OR_FOLDER_OR_-...\n"
    "       build/prepare --decode [--tokenizer NAME] SHARD...\n"
    "\n"
    "Turns text into token shards: train_000000.bin, ... to learn from and val_000000.bin, ... to measure "
    "on.\n"
    "Every file is one document. Folders are searched to the bottom; hidden and binary files are left out;\n"
    "- is standard input. Shows how far it is where stderr is a terminal.\n"
    "\n"
    "  --out-dir DIR         where the shards go (data/tokens)\n"
    "  --tokenizer NAME      bytes: each byte a token, 256 ends a text; vocabulary 257 (bytes)\n"
    "                        or a path: a folder with GPT-2's vocab.json and merges.txt, or tokenizer.json, "
    "or "
    "a\n"
    "                        tiktoken rank file\n"
    "  --train-bpe N         learn a vocabulary of N tokens from the text first, 257 to 65536; it goes to "
    "DIR\n"
    "  --val-fraction F      share of the text for validation, 0 to 0.5; whole files, or the end of the "
    "last\n"
    "                        one if none is small enough (0.1)\n"
    "  --shard-tokens N      a new shard is begun after N tokens, 1 to 2000000000 (100000000)\n"
    "  --files-from FILE     also take the paths in FILE, one a line; - reads them from standard input\n"
    "  --field NAME          files are JSON lines: each line an object, its member NAME a document\n"
    "  --split-documents     a text <|endoftext|> in a file begins another document\n"
    "  --overwrite           replace shards that are in DIR already\n"
    "  --resume              go on where a run with the same options and files was interrupted, if one was\n"
    "  --threads N           that encode, 1 to 256 (as many as cores)\n"
    "  --decode              print the text of shards, with the tokenizer of their folder if none is given;\n"
    "                        documents begin with <|endoftext|>\n"
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
    FIELD,
    SPLIT_DOCUMENTS,
    OVERWRITE,
    RESUME,
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
    case FIELD:
        job->field = optarg;
        break;
    case SPLIT_DOCUMENTS:
        job->split_documents = true;
        break;
    case OVERWRITE:
        job->overwrite = true;
        break;
    case RESUME:
        job->resume = true;
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
        {"files-from", required_argument, NULL, FILES_FROM}, {"field", required_argument, NULL, FIELD},
        {"split-documents", no_argument, NULL, SPLIT_DOCUMENTS}, {"overwrite", no_argument, NULL, OVERWRITE},
        {"resume", no_argument, NULL, RESUME}, {"threads", required_argument, NULL, THREADS},
        {"decode", no_argument, NULL, DECODE}, {"help", no_argument, NULL, HELP}, {NULL, 0, NULL, 0}};
    opterr = 0;
    for (int option; !job->help && (option = getopt_long(argc, argv, ":", table, NULL)) != -1;) {
        if (option == ':') {
            return fail("%s: a value is missing; see --help", argv[optind - 1]);
        }
        if (option == '?' && optopt != 0) {
            return fail("-%c: unknown option; see --help", optopt);
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
    for (int side = TRAIN; side <= VAL; side++) {
        if (job->began && !job->saved) {
            output_discard(&job->outputs[side]);
        }
        output_free(&job->outputs[side]);
    }
    inputs_free(&job->inputs);
    tokenizer_close(job->tokenizer);
    bpe_trainer_free(job->trainer);
    free(job->text);
    if (job->lock >= 0) {
        close(job->lock);
    }
    free(job);
}

static enum status run(struct job *job, int argc, char **argv) {
    CHECK(parse_options(job, argc, argv));
    if (job->help) {
        fputs(help_text, stdout);
        return STATUS_OK;
    }
    if (job->decode) {
        return decode_shards(job, argv + optind, argc - optind);
    }
    if (job->tokenizer_name == NULL) {
        job->tokenizer_name = job->train_bpe > 0 ? job->out_dir : "bytes";
    }
    enum status status = write_shards(job, argv + optind, argc - optind);
    end_bar(job);
    if (job->complete) {
        printf("%s: complete already\n", job->out_dir);
    } else if (status == STATUS_OK) {
        print_summary(job);
    } else if (job->saved) {
        status = fail_as(status, "%s; --resume goes on where it stopped", error_message());
    }
    return status;
}

int main(int argc, char **argv) {
    struct job *job;
    enum status status = ALLOCATE(job, 1);
    signal(SIGXFSZ, SIG_IGN); /* a limit on the size of files is like a full disk */
    if (status == STATUS_OK) {
        job->lock = -1;
        job->out_dir = "data/tokens";
        job->val_fraction = 0.1;
        job->shard_tokens = 100000000;
        job->threads = max_i64(1, min_i64(sysconf(_SC_NPROCESSORS_ONLN), MOST_THREADS));
        job->terminal = isatty(STDERR_FILENO) == 1;
        status = run(job, argc, argv);
        clear(job);
    }
    if (status != STATUS_OK) {
        fprintf(stderr, "prepare: %s\n", error_message());
    }
    return status == STATUS_OK ? 0 : 1;
}
