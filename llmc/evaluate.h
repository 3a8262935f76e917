/* How good a model is: its loss on shards, and its score on questions with several endings. */
#ifndef LLMC_EVALUATE_H
#define LLMC_EVALUATE_H

#include "comm.h"
#include "dataloader.h"
#include "json.h"
#include "model.h"
#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The model, what it takes at once, and the ranks that share the work. Every rank calls, and gets the result of all, or the
   error of any. */
struct evaluation {
    struct model *model;
    struct comm *comm;
    int batch, seq_len;
    const struct model_hooks *hooks; /* may be NULL */
};

/* ---- loss ---- */

struct loss_result {
    double loss; /* mean over tokens, natural logarithm */
    int64_t tokens;
};
/* data: opened without repeat, for batches of this size, on every rank for its part. batches: at most so many of every
   rank; 0: all of the data. */
enum status evaluate_loss(
    const struct evaluation *e, struct dataloader *data, int64_t batches, struct loss_result *result);

/* ---- multiple choice ---- */

/* A file has a question a line, as HellaSwag's: {"ctx": "A man sits down.", "endings": ["He ...", ...], "label": 2};
   label is the index of the right ending, as a number or as digits in a string; other members are ignored. */
struct question {
    struct json *json; /* owns the texts */
    const struct json *context, *endings;
    int64_t label;
};
/* One line, without its end; `where` leads messages. */
enum status question_parse(struct question *out, const char *line, size_t bytes, const char *where);
void question_free(struct question *question);
/* Is every line of the file a question, and is there one? */
enum status questions_check(const char *path);

/* The model chooses the ending with the least loss: the mean over the ending's tokens ("normalised"), or their sum. An
   ending comes after a space. What is longer than seq_len loses its beginning. */
struct choice_result {
    int64_t questions, correct, correct_normalised;
};
enum status evaluate_choices(const struct evaluation *e, const struct tokenizer *tokenizer, const char *path,
    struct choice_result *result);

#ifdef __cplusplus
}
#endif

#endif
