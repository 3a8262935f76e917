/* The loss is a sum over the loader's batches. Endings of questions are collected into batches of any size, padded to
   the longest; what each token cost comes back and is added to its ending. */
#include "evaluate.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- loss ---- */

struct batch {
    int32_t *inputs, *targets; /* (batch, seq_len) */
    double *losses;
};

static enum status batch_create(struct batch *b, const struct evaluation *e) {
    int64_t tokens = (int64_t)e->batch * e->seq_len;
    memset(b, 0, sizeof *b);
    CHECK(ALLOCATE(b->inputs, tokens));
    CHECK(ALLOCATE(b->targets, tokens));
    return ALLOCATE(b->losses, tokens);
}

static void batch_free(struct batch *b) {
    free(b->inputs);
    free(b->targets);
    free(b->losses);
}

static enum status add_losses(
    const struct evaluation *e, struct dataloader *data, struct batch *b, int64_t batches, double totals[2]) {
    CHECK(dataloader_seek(data, 0));
    for (int64_t i = 0; i < batches; i++) {
        CHECK(dataloader_next(data, b->inputs, b->targets, NULL));
        CHECK(model_token_losses(e->model, b->inputs, b->targets, e->batch, e->seq_len, b->losses, e->hooks));
        for (int64_t t = 0; t < (int64_t)e->batch * e->seq_len; t++) {
            totals[0] += b->losses[t];
            totals[1] += b->targets[t] >= 0 ? 1.0 : 0.0;
        }
    }
    return STATUS_OK;
}

enum status evaluate_loss(
    const struct evaluation *e, struct dataloader *data, int64_t batches, struct loss_result *result) {
    int64_t all = ceil_div(dataloader_windows(data), (int64_t)e->batch * e->comm->ranks);
    double totals[2] = {0.0, 0.0}; /* loss, tokens */
    struct batch b;
    enum status status = batch_create(&b, e);
    if (status == STATUS_OK) {
        status = add_losses(e, data, &b, batches > 0 ? min_i64(batches, all) : all, totals);
    }
    batch_free(&b);
    CHECK(comm_agree(e->comm, status));
    CHECK(e->comm->host_all_reduce(e->comm, totals, 2, COMM_SUM));
    result->loss = totals[0] / totals[1];
    result->tokens = (int64_t)totals[1];
    return STATUS_OK;
}

/* ---- questions ---- */

enum { MOST_LINE_BYTES = 1 << 20, MOST_ENDINGS = 100 };

void question_free(struct question *q) {
    json_free(q->json);
    q->json = NULL;
}

static enum status read_label(struct question *q, const char *where) {
    const struct json *label = json_get(q->json, "label");
    int64_t value = -1;
    if (label != NULL && label->type == JSON_NUMBER && label->is_integer) {
        value = label->integer;
    } else if (label != NULL && label->type == JSON_STRING && label->string_bytes > 0 &&
               label->string_bytes <= 3 && strspn(label->string, "0123456789") == label->string_bytes) {
        value = strtol(label->string, NULL, 10);
    }
    if (value < 0 || value >= (int64_t)q->endings->count) {
        return fail("%s: \"label\" is not the index of one of the %zu endings", where, q->endings->count);
    }
    q->label = value;
    return STATUS_OK;
}

static enum status read_question(struct question *q, const char *where) {
    q->context = json_get(q->json, "ctx");
    q->endings = json_get(q->json, "endings");
    if (q->context == NULL || q->context->type != JSON_STRING) {
        return fail("%s: no text \"ctx\": a line is a question as HellaSwag's", where);
    }
    if (q->endings == NULL || q->endings->type != JSON_ARRAY || q->endings->count < 2 ||
        q->endings->count > MOST_ENDINGS) {
        return fail("%s: no array \"endings\" of 2 to %d texts", where, (int)MOST_ENDINGS);
    }
    for (size_t i = 0; i < q->endings->count; i++) {
        if (q->endings->items[i].type != JSON_STRING || q->endings->items[i].string_bytes == 0) {
            return fail("%s: ending %zu is no text, or empty", where, i);
        }
    }
    return read_label(q, where);
}

enum status question_parse(struct question *out, const char *line, size_t bytes, const char *where) {
    memset(out, 0, sizeof *out);
    if (bytes > MOST_LINE_BYTES) {
        return fail("%s: a line of more than the %d bytes of a question", where, (int)MOST_LINE_BYTES);
    }
    CHECK(json_parse(&out->json, line, bytes, where));
    enum status status = read_question(out, where);
    if (status != STATUS_OK) {
        question_free(out);
    }
    return status;
}

/* Called with every question of a file, numbered from 0. */
typedef enum status (*question_visitor)(void *context, const struct question *q, int64_t number);

static bool is_blank(const char *line, size_t bytes) {
    return strspn(line, " \t\r\n") == bytes;
}

/* The next line with its end, or the beginning of one that is too long, as question_parse will say; 0: none is left.
   A zero follows it. */
static size_t read_line(FILE *file, char line[MOST_LINE_BYTES + 2]) {
    size_t bytes = 0;
    for (int byte; bytes <= MOST_LINE_BYTES && (byte = getc_unlocked(file)) != EOF;) {
        line[bytes++] = (char)byte;
        if (byte == '\n') {
            break;
        }
    }
    line[bytes] = '\0';
    return bytes;
}

static enum status visit_lines(FILE *file, const char *path, question_visitor visit, void *context) {
    char *line, where[PATH_MAX + 32];
    int64_t lines = 0, questions = 0;
    enum status status = STATUS_OK;
    CHECK(ALLOCATE(line, MOST_LINE_BYTES + 2));
    for (size_t bytes; status == STATUS_OK && (bytes = read_line(file, line)) > 0;) {
        struct question q;
        snprintf(where, sizeof where, "%s:%" PRId64, path, ++lines);
        if (is_blank(line, bytes)) {
            continue;
        }
        status = question_parse(&q, line, bytes, where);
        if (status == STATUS_OK) {
            status = visit(context, &q, questions++);
            question_free(&q);
        }
    }
    free(line);
    CHECK(status);
    if (ferror(file)) {
        return fail("%s: cannot read: %s", path, strerror(errno));
    }
    return questions > 0 ? STATUS_OK : fail("%s: there is no question in it", path);
}

static const char remedy[] = "give a file of questions (data/download.sh hellaswag fetches one)";

static enum status visit_questions(const char *path, question_visitor visit, void *context) {
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return fail("--multiple-choice %s: cannot open: %s; %s", path, strerror(errno), remedy);
    }
    enum status status = visit_lines(file, path, visit, context);
    fclose(file);
    return status;
}

static enum status ignore_question(void *context, const struct question *q, int64_t number) {
    (void)context;
    (void)q;
    (void)number;
    return STATUS_OK;
}

/* A pipe would have nothing left for the next time. */
enum status questions_check(const char *path) {
    int file;
    uint64_t bytes;
    if (file_open(path, &file, &bytes) != STATUS_OK) {
        return fail("--multiple-choice %s; %s", error_message(), remedy);
    }
    close(file);
    return visit_questions(path, ignore_question, NULL);
}

/* ---- their score ---- */

struct ending {
    int64_t question; /* of the file */
    bool right;
    double loss;
    int tokens;
};

struct scoring {
    const struct evaluation *e;
    const struct tokenizer *tokenizer;
    struct batch batch;
    int sequences;          /* in the batch */
    int longest;            /* of them */
    int64_t *owner;         /* (batch): ending of each sequence */
    struct ending *endings; /* of all questions of this rank, in order */
    int64_t count;
    size_t capacity;
};

/* Rows are padded to a multiple, so that batches have few different shapes. */
static enum status score_batch(struct scoring *s) {
    enum { MULTIPLE = 64 };
    const struct evaluation *e = s->e;
    struct batch *b = &s->batch;
    int length = (int)min_i64(round_up(s->longest, MULTIPLE), e->seq_len);
    if (s->sequences == 0) {
        return STATUS_OK;
    }
    for (int64_t i = 0; i < e->batch; i++) { /* rows of seq_len move together */
        memmove(b->inputs + i * length, b->inputs + i * e->seq_len, (size_t)length * sizeof *b->inputs);
        memmove(b->targets + i * length, b->targets + i * e->seq_len, (size_t)length * sizeof *b->targets);
    }
    CHECK(model_token_losses(e->model, b->inputs, b->targets, e->batch, length, b->losses, e->hooks));
    for (int64_t i = 0; i < s->sequences; i++) {
        struct ending *ending = &s->endings[s->owner[i]];
        for (int64_t t = i * length; t < (i + 1) * length; t++) {
            ending->loss += b->losses[t];
            ending->tokens += b->targets[t] >= 0;
        }
    }
    s->sequences = s->longest = 0;
    return STATUS_OK;
}

static void clear_batch(struct scoring *s) {
    int64_t tokens = (int64_t)s->e->batch * s->e->seq_len;
    memset(s->batch.inputs, 0, (size_t)tokens * sizeof *s->batch.inputs);
    for (int64_t i = 0; i < tokens; i++) {
        s->batch.targets[i] = -1;
    }
}

static enum status add_ending(struct scoring *s, int64_t question, bool right) {
    CHECK(RESERVE(s->endings, s->capacity, s->count + 1));
    s->endings[s->count++] = (struct ending){question, right, 0.0, 0};
    return STATUS_OK;
}

/* The last seq_len + 1 tokens of context and ending; the ending's are targets. A context without tokens is the start of
   a document. */
static enum status add_sequence(struct scoring *s, const int32_t *context, size_t context_count,
    const int32_t *ending, size_t ending_count) {
    const struct evaluation *e = s->e;
    int32_t end_of_text = tokenizer_end_of_text(s->tokenizer);
    if (context_count == 0) {
        context = &end_of_text;
        context_count = 1;
    }
    size_t all = context_count + ending_count,
           first = all > (size_t)e->seq_len + 1 ? all - (size_t)e->seq_len - 1 : 0;
    if (s->sequences == 0) {
        clear_batch(s);
    }
    int32_t *inputs = s->batch.inputs + (int64_t)s->sequences * e->seq_len;
    int32_t *targets = s->batch.targets + (int64_t)s->sequences * e->seq_len;
    for (size_t i = first; i + 1 < all; i++) {
        inputs[i - first] = i < context_count ? context[i] : ending[i - context_count];
        if (i + 1 >= context_count) {
            targets[i - first] = ending[i + 1 - context_count];
        }
    }
    s->owner[s->sequences++] = s->count - 1;
    s->longest = (int)max_i64(s->longest, (int64_t)(all - 1 - first));
    return s->sequences == e->batch ? score_batch(s) : STATUS_OK;
}

static enum status add_question(struct scoring *s, const struct question *q, int64_t number) {
    int32_t *context = NULL, *ending = NULL;
    size_t context_count, ending_count;
    enum status status = STATUS_OK;
    CHECK(tokenizer_encode(
        s->tokenizer, q->context->string, q->context->string_bytes, &context, &context_count));
    for (size_t i = 0; i < q->endings->count && status == STATUS_OK; i++) {
        const struct json *text = &q->endings->items[i];
        char *spaced;
        CHECK_CLEANUP(ALLOCATE(spaced, text->string_bytes + 1));
        spaced[0] = ' ';
        memcpy(spaced + 1, text->string, text->string_bytes);
        status = tokenizer_encode(s->tokenizer, spaced, text->string_bytes + 1, &ending, &ending_count);
        free(spaced);
        CHECK_CLEANUP(status);
        status = add_ending(s, number, (int64_t)i == q->label);
        if (status == STATUS_OK) {
            status = add_sequence(s, context, context_count, ending, ending_count);
        }
        free(ending);
    }
cleanup:
    free(context);
    return status;
}

/* The endings of a question lie together. */
static void count_correct(const struct scoring *s, struct choice_result *r) {
    for (int64_t first = 0, next; first < s->count; first = next) {
        int64_t best = first, best_normalised = first;
        for (next = first; next < s->count && s->endings[next].question == s->endings[first].question;
             next++) {
            const struct ending *it = &s->endings[next], *least = &s->endings[best_normalised];
            best = it->loss < s->endings[best].loss ? next : best;
            best_normalised = it->loss / it->tokens < least->loss / least->tokens ? next : best_normalised;
        }
        r->questions++;
        r->correct += s->endings[best].right;
        r->correct_normalised += s->endings[best_normalised].right;
    }
}

/* Questions are shared out over the ranks one by one. */
static enum status score_question(void *context, const struct question *q, int64_t number) {
    struct scoring *s = context;
    const struct comm *comm = s->e->comm;
    return number % comm->ranks == comm->rank ? add_question(s, q, number) : STATUS_OK;
}

enum status evaluate_choices(const struct evaluation *e, const struct tokenizer *tokenizer, const char *path,
    struct choice_result *result) {
    struct scoring s = {.e = e, .tokenizer = tokenizer};
    memset(result, 0, sizeof *result);
    enum status status = batch_create(&s.batch, e);
    if (status == STATUS_OK) {
        status = ALLOCATE(s.owner, e->batch);
    }
    if (status == STATUS_OK) {
        status = visit_questions(path, score_question, &s);
    }
    if (status == STATUS_OK) {
        status = score_batch(&s);
    }
    if (status == STATUS_OK) {
        count_correct(&s, result);
    }
    batch_free(&s.batch);
    free(s.owner);
    free(s.endings);
    CHECK(comm_agree(e->comm, status));
    double totals[3] = {
        (double)result->questions, (double)result->correct, (double)result->correct_normalised};
    CHECK(e->comm->host_all_reduce(e->comm, totals, 3, COMM_SUM));
    result->questions = (int64_t)totals[0];
    result->correct = (int64_t)totals[1];
    result->correct_normalised = (int64_t)totals[2];
    return STATUS_OK;
}
