/* Weights go straight from the file into the model: no optimizer, no gradients. */
#include "inference.h"

#include "hugging_face.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

static enum status import_bucket(void *model, int bucket, const float *values) {
    return model_import_bucket((struct model *)model, bucket, values);
}

static enum status open_tokenizer(struct inference *i, const char *name, int vocab_size) {
    if (strcmp(name, "none") == 0) {
        return STATUS_OK;
    }
    CHECK(tokenizer_open(&i->tokenizer, name));
    if (tokenizer_vocab_size(i->tokenizer) > vocab_size) {
        return fail("--tokenizer %s has %d tokens, more than the model's %d: take the one that the model was "
                    "trained with",
            name, tokenizer_vocab_size(i->tokenizer), vocab_size);
    }
    return STATUS_OK;
}

enum status inference_open(struct inference *out, struct backend *backend, const char *folder,
    const struct model_config *config, const char *tokenizer, int batch, int seq_len, int64_t logits_bytes) {
    struct model_options m = {.config = *config,
        .micro_batch = batch,
        .seq_len = seq_len,
        .gradient_dtype = backend->profile.gradient_dtype,
        .logits_bytes = logits_bytes,
        .ranks = 1,
        .forward_only = true};
    memset(out, 0, sizeof *out);
    enum status status = open_tokenizer(out, tokenizer, config->vocab_size);
    if (status == STATUS_OK) {
        status = model_create(&out->model, backend, &m);
    }
    if (status == STATUS_OK) {
        status = hugging_face_read_weights(
            folder, config, model_get_layout(out->model), import_bucket, out->model);
    }
    if (status != STATUS_OK) {
        inference_close(out);
    }
    return status;
}

/* NULL: a write has failed, and there are no other ranks to keep up with. */
static enum status export_bucket(void *model, int bucket, float *values) {
    return values != NULL ? model_export_bucket((struct model *)model, bucket, values) : STATUS_OK;
}

static enum status write_files(
    const struct inference *i, const char *folder, const char *weights, uint64_t *weight_bytes) {
    char config[PATH_BYTES], *text;
    size_t bytes;
    const struct model_config *c = model_get_config(i->model);
    CHECK(hugging_face_write_weights(
        weights, c, model_get_layout(i->model), true, export_bucket, i->model, NULL, weight_bytes));
    if (i->tokenizer != NULL && tokenizer_has_files(i->tokenizer)) {
        CHECK(tokenizer_save(i->tokenizer, folder));
    }
    CHECK(path_join(config, sizeof config, folder, "config.json"));
    CHECK(hugging_face_config_text(c, i->tokenizer, &text, &bytes));
    enum status status = file_write_all(config, text, bytes);
    free(text);
    if (status != STATUS_OK) {
        unlink(config);
    }
    return status;
}

/* Weights and config.json come last, so that what is interrupted or does not fit is no model, and the same command makes
   one of it. */
enum status inference_export(const struct inference *i, const char *folder, uint64_t *bytes) {
    char weights[PATH_BYTES], unfinished[PATH_BYTES], config[PATH_BYTES];
    CHECK(path_join(weights, sizeof weights, folder, "model.safetensors"));
    CHECK(path_join(unfinished, sizeof unfinished, folder, "model.safetensors.tmp"));
    CHECK(path_join(config, sizeof config, folder, "config.json"));
    if (path_exists(weights) || path_exists(config)) {
        return fail("--export %s: there is a model in it already; choose another folder", folder);
    }
    if (make_directories(folder) != STATUS_OK) {
        return fail("--export %s: %s; give a folder that can be made and written", folder, error_message());
    }
    enum status status = write_files(i, folder, unfinished, bytes);
    if (status != STATUS_OK) {
        unlink(unfinished);
        return status;
    }
    return rename(unfinished, weights) == 0
               ? STATUS_OK
               : fail("%s: cannot rename to %s: %s", unfinished, weights, strerror(errno));
}

void inference_close(struct inference *i) {
    tokenizer_close(i->tokenizer);
    model_free(i->model);
    memset(i, 0, sizeof *i);
}
