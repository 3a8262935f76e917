/* A model that is used has no optimizer and no gradients, and one rank. */
#include "use.h"

#include "dataloader.h"
#include "evaluate.h"
#include "inference.h"
#include "metrics.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

enum { EVALUATION_TOKENS = 16384 }; /* of a batch, where the user says nothing */

struct generate_options generate_options_of(const struct options *o) {
    struct generate_options g = {.sampling = {o->sample_temperature, o->sample_top_k, o->sample_top_p,
                                     o->sample_repetition_penalty, (uint64_t)o->seed},
        .tokens = o->sample_tokens};
    return g;
}

/* ---- texts ---- */

/* The first text is written as it comes, the others when all are complete. */
struct texts {
    int count;
    FILE **memory; /* of each but the first */
    char **text;
    size_t *bytes;
};

static enum status open_texts(struct texts *t, int count) {
    t->count = count;
    CHECK(ALLOCATE(t->memory, count));
    CHECK(ALLOCATE(t->text, count));
    CHECK(ALLOCATE(t->bytes, count));
    for (int i = 1; i < count; i++) {
        t->memory[i] = open_memstream(&t->text[i], &t->bytes[i]);
        if (t->memory[i] == NULL) {
            return fail_as(STATUS_OUT_OF_MEMORY, "out of host memory for --samples %d", count);
        }
    }
    return STATUS_OK;
}

static void close_texts(struct texts *t) {
    for (int i = 1; i < t->count && t->bytes != NULL; i++) {
        if (t->memory[i] != NULL) {
            fclose(t->memory[i]);
        }
        free(t->text[i]);
    }
    free(t->memory);
    free(t->text);
    free(t->bytes);
}

static enum status fail_writing(void) {
    return fail("the text cannot be written: %s", strerror(errno));
}

static enum status take_piece(void *context, int number, const char *piece, size_t bytes) {
    const struct texts *t = context;
    FILE *out = number == 0 ? stdout : t->memory[number];
    bool good = fwrite(piece, 1, bytes, out) == bytes && (number > 0 || fflush(out) == 0);
    return good ? STATUS_OK : fail_writing();
}

static enum status write_texts(struct decoder *decoder, const struct tokenizer *tokenizer,
    const struct options *o, const char *prompt, size_t prompt_bytes, struct texts *t) {
    struct generate_options g = generate_options_of(o);
    int64_t generated;
    double start = time_seconds();
    fwrite(prompt, 1, prompt_bytes, stdout);
    CHECK(generate(decoder, tokenizer, prompt, prompt_bytes, &g, take_piece, t, &generated));
    double seconds = time_seconds() - start;
    for (int i = 1; i < t->count; i++) {
        if (fflush(t->memory[i]) != 0) {
            return fail_writing();
        }
        printf("\n--- sample %d of %d\n", i + 1, t->count);
        fwrite(prompt, 1, prompt_bytes, stdout);
        fwrite(t->text[i], 1, t->bytes[i], stdout);
    }
    putchar('\n');
    if (fflush(stdout) != 0) {
        return fail_writing();
    }
    if (!o->quiet) {
        fprintf(stderr, "%lld tokens in %.2f s, %.1f a second\n", (long long)generated, seconds,
            (double)generated / seconds);
    }
    return STATUS_OK;
}

/* All of standard input, or the text itself. */
static enum status read_prompt(const char *option, char **text, size_t *bytes) {
    if (strcmp(option, "-") == 0) {
        return stream_read_all(STDIN_FILENO, "standard input", (uint8_t **)text, bytes);
    }
    *text = string_copy(option);
    *bytes = strlen(option);
    return *text != NULL ? STATUS_OK : STATUS_OUT_OF_MEMORY;
}

static enum status generate_texts(const struct inference *it, const struct options *o) {
    struct texts texts = {0};
    struct decoder *decoder = NULL;
    char *prompt = NULL;
    size_t prompt_bytes = 0;
    enum status status = STATUS_OK;
    CHECK_CLEANUP(open_texts(&texts, (int)o->samples));
    CHECK_CLEANUP(read_prompt(o->generate, &prompt, &prompt_bytes));
    CHECK_CLEANUP(decoder_create(&decoder, it->model, (int)o->samples, (int)o->seq_len));
    CHECK_CLEANUP(write_texts(decoder, it->tokenizer, o, prompt, prompt_bytes, &texts));
cleanup:
    decoder_free(decoder);
    free(prompt);
    close_texts(&texts);
    return status;
}

/* ---- evaluation ---- */

static enum status print_loss(const struct evaluation *e, const struct options *o) {
    struct dataloader_options d = {.pattern = o->val_data,
        .option = "--val-data",
        .seq_len = e->seq_len,
        .micro_batch = e->batch,
        .vocab_size = model_get_config(e->model)->vocab_size,
        .ranks = 1,
        .prefetch = true};
    struct dataloader *data;
    struct loss_result r;
    char line[200];
    double start = time_seconds();
    int64_t wanted = options_given(o, "eval-batches") ? o->eval_batches : 0;
    int64_t micro_steps = max_i64(o->global_batch / ((int64_t)e->batch * e->seq_len), 1);
    CHECK(dataloader_open(&data, &d));
    enum status status = evaluate_loss(e, data, wanted * micro_steps, &r);
    dataloader_close(data);
    CHECK(status);
    format_loss(line, sizeof line, r.loss, r.tokens, time_seconds() - start);
    log_line("%s", line);
    return STATUS_OK;
}

static enum status print_choices(
    const struct evaluation *e, const struct tokenizer *tokenizer, const char *path) {
    struct choice_result r;
    char line[200];
    double start = time_seconds();
    CHECK(evaluate_choices(e, tokenizer, path, &r));
    format_choices(line, sizeof line, r.questions, r.correct, r.correct_normalised, time_seconds() - start);
    log_line("%s", line);
    return STATUS_OK;
}

static enum status evaluate_model(const struct inference *it, const struct options *o, int batch) {
    struct evaluation e = {.model = it->model, .batch = batch, .seq_len = (int)o->seq_len};
    CHECK(comm_single_create(&e.comm));
    enum status status = o->val_data[0] != '\0' ? print_loss(&e, o) : STATUS_OK;
    if (status == STATUS_OK && o->multiple_choice[0] != '\0') {
        status = print_choices(&e, it->tokenizer, o->multiple_choice);
    }
    e.comm->free(e.comm);
    return status;
}

/* ---- export ---- */

static enum status export_model(const struct inference *it, const char *from, const struct options *o) {
    char parameters[32], size[32];
    uint64_t bytes = 0;
    CHECK(inference_export(it, o->export_to, &bytes));
    if (o->quiet) {
        return STATUS_OK;
    }
    format_count(parameters, sizeof parameters, (double)model_get_layout(it->model)->parameters);
    format_bytes(size, sizeof size, bytes);
    log_line("%s: the model of %s, %s parameters in fp32, %s, %s", o->export_to, from, parameters, size,
        it->tokenizer == NULL ? "without a tokenizer: --tokenizer names the one to write with it"
        : tokenizer_has_files(it->tokenizer) ? "with its tokenizer"
                                             : "without tokenizer files: its tokens are bytes");
    return STATUS_OK;
}

/* ---- what the program calls ---- */

enum status model_use(
    struct backend *backend, const char *folder, const struct model_config *config, const struct options *o) {
    struct inference it;
    int batch = 1, seq_len = 1; /* a decoder has buffers of its own */
    if (o->evaluate) {
        seq_len = (int)o->seq_len;
        batch = options_given(o, "micro-batch") ? (int)o->micro_batch
                                                : (int)max_i64(1, EVALUATION_TOKENS / o->seq_len);
    }
    CHECK(inference_open(&it, backend, folder, config, o->tokenizer, batch, seq_len, o->logits_mib << 20));
    enum status status = o->evaluate               ? evaluate_model(&it, o, batch)
                         : o->export_to[0] != '\0' ? export_model(&it, folder, o)
                                                   : generate_texts(&it, o);
    inference_close(&it);
    return status;
}
