/* Forward with a cache. New tokens go through the layers as model.c's do, R rows at most at once: a prompt in chunks,
   then one token of each sequence after the other. No row of activations is kept; what stays is the cache,

     cache[l]  (sequences, 2, Hkv, capacity, D)   keys and values of layer l */
#include "decoder.h"

#include <stdlib.h>

enum { CHUNK_ROWS = 256 }; /* of a prompt, over all sequences: enough for the products to be efficient */

/* (R, channels), (R, features) ... in the backend's memory */
enum decoder_buffer {
    RESIDUAL,
    NORMALISED,
    MEAN,
    RSTD,
    PACKED_QKV,
    ATTENDED,
    ADDEND, /* a branch's output, before it is added to the residual stream */
    MLP_PRE_GELU,
    MLP_GELU,
    LAST_ROWS,   /* (sequences, channels) */
    NEXT_LOGITS, /* (sequences, padded_vocab) */
    NEW_TOKENS,
    CACHE,
    DECODER_BUFFERS
};

struct decoder {
    struct backend *backend;
    struct model_config config;
    const struct layout *layout;
    struct tensor parameters;
    int sequences, capacity, length;
    void *buffers[DECODER_BUFFERS];
    int32_t *host_tokens;
    void *host_logits; /* activation dtype */
};

static int64_t most_rows(int sequences) {
    return max_i64(sequences, CHUNK_ROWS);
}

static uint64_t buffer_bytes_of(enum decoder_buffer id, const struct model_config *c,
    const struct backend_profile *device, int sequences, int capacity) {
    uint64_t rows = (uint64_t)most_rows(sequences), channels = (uint64_t)c->channels;
    uint64_t activation = dtype_bytes(device->activation_dtype);
    switch (id) {
    case RESIDUAL:
    case NORMALISED:
    case ATTENDED:
    case ADDEND:
        return rows * channels * activation;
    case MEAN:
    case RSTD:
        return rows * dtype_bytes(device->statistic_dtype);
    case PACKED_QKV:
        return rows * (uint64_t)model_qkv_features(c) * activation;
    case MLP_PRE_GELU:
    case MLP_GELU:
        return rows * 4 * channels * activation;
    case LAST_ROWS:
        return (uint64_t)sequences * channels * activation;
    case NEXT_LOGITS:
        return (uint64_t)sequences * (uint64_t)model_padded_vocab(c) * activation;
    case NEW_TOKENS:
        return rows * sizeof(int32_t);
    case CACHE:
        return (uint64_t)c->layers * (uint64_t)sequences * 2 * (uint64_t)c->kv_heads * (uint64_t)capacity *
               (uint64_t)model_head_dim(c) * activation;
    case DECODER_BUFFERS:
        break;
    }
    return 0;
}

uint64_t decoder_bytes(
    const struct model_config *config, const struct backend_profile *device, int sequences, int capacity) {
    uint64_t bytes = 0;
    capacity = capacity > 0 ? capacity : config->seq_len;
    for (int id = 0; id < DECODER_BUFFERS; id++) {
        bytes += buffer_bytes_of((enum decoder_buffer)id, config, device, sequences, capacity);
    }
    return bytes;
}

/* ---- life ---- */

static enum status allocate_all(struct decoder *d) {
    struct backend *b = d->backend;
    for (int id = 0; id < DECODER_BUFFERS; id++) {
        uint64_t bytes =
            buffer_bytes_of((enum decoder_buffer)id, &d->config, &b->profile, d->sequences, d->capacity);
        CHECK(b->memory_allocate(b, &d->buffers[id], (size_t)bytes));
    }
    CHECK(ALLOCATE(d->host_tokens, most_rows(d->sequences)));
    return allocate(&d->host_logits, (size_t)d->sequences * (size_t)model_padded_vocab(&d->config),
        dtype_bytes(b->profile.activation_dtype));
}

enum status decoder_create(struct decoder **out, struct model *model, int sequences, int capacity) {
    const struct model_config *c = model_get_config(model);
    struct decoder *d;
    *out = NULL;
    if (capacity > c->seq_len) {
        return fail("a text of %d tokens is over the model's %d positions", capacity, c->seq_len);
    }
    CHECK(ALLOCATE(d, 1));
    d->backend = model_get_backend(model);
    d->config = *c;
    d->layout = model_get_layout(model);
    d->parameters = model_parameters(model);
    d->sequences = sequences;
    d->capacity = capacity > 0 ? capacity : c->seq_len;
    enum status status = allocate_all(d);
    if (status == STATUS_OUT_OF_MEMORY) {
        fail_as(status,
            "%d texts of %d tokens do not fit beside the model: take fewer --samples or a shorter "
            "--seq-len",
            sequences, d->capacity);
    }
    if (status != STATUS_OK) {
        decoder_free(d);
        return status;
    }
    *out = d;
    return STATUS_OK;
}

void decoder_free(struct decoder *d) {
    if (d == NULL) {
        return;
    }
    for (int id = 0; id < DECODER_BUFFERS; id++) {
        d->backend->memory_free(d->backend, d->buffers[id]);
    }
    free(d->host_tokens);
    free(d->host_logits);
    free(d);
}

const struct model_config *decoder_config(const struct decoder *d) {
    return &d->config;
}
int decoder_sequences(const struct decoder *d) {
    return d->sequences;
}
int decoder_capacity(const struct decoder *d) {
    return d->capacity;
}
int decoder_length(const struct decoder *d) {
    return d->length;
}
void decoder_clear(struct decoder *d) {
    d->length = 0;
}

/* ---- forward ---- */

static const void *parameter(const struct decoder *d, enum parameter_id id, int layer) {
    return tensor_at(d->parameters, layout_offset(d->layout, &d->config, id, layer)).data;
}

static void *activation_at(const struct decoder *d, enum decoder_buffer id, int64_t index) {
    return (char *)d->buffers[id] + (size_t)index * dtype_bytes(d->backend->profile.activation_dtype);
}

/* The residual stream takes a branch's output and is normalised for the next. */
static enum status add_and_normalise(
    struct decoder *d, enum parameter_id weight, enum parameter_id bias, int layer, int64_t rows) {
    struct backend *b = d->backend;
    return b->residual_layernorm_forward(b, d->buffers[RESIDUAL], d->buffers[NORMALISED], d->buffers[MEAN],
        d->buffers[RSTD], d->buffers[RESIDUAL], d->buffers[ADDEND], parameter(d, weight, layer),
        parameter(d, bias, layer), rows, d->config.channels);
}

static enum status attention_branch(struct decoder *d, int l, int count) {
    struct backend *b = d->backend;
    const struct model_config *c = &d->config;
    int64_t rows = (int64_t)d->sequences * count;
    struct attention_shape shape = {d->sequences, count, c->heads, c->kv_heads, model_head_dim(c)};
    int64_t cached = (int64_t)d->sequences * 2 * c->kv_heads * d->capacity * shape.head_dim;
    CHECK(b->linear_forward(b, d->buffers[PACKED_QKV], NULL, d->buffers[NORMALISED],
        parameter(d, QKV_WEIGHT, l), parameter(d, QKV_BIAS, l), rows, c->channels, model_qkv_features(c),
        LINEAR_BIAS));
    CHECK(b->attention_cached(b, d->buffers[ATTENDED], activation_at(d, CACHE, l * cached),
        d->buffers[PACKED_QKV], shape, d->length, d->capacity));
    return b->linear_forward(b, d->buffers[ADDEND], NULL, d->buffers[ATTENDED],
        parameter(d, ATTENTION_PROJECTION_WEIGHT, l), parameter(d, ATTENTION_PROJECTION_BIAS, l), rows,
        c->channels, c->channels, LINEAR_BIAS);
}

static enum status mlp_branch(struct decoder *d, int l, int64_t rows) {
    struct backend *b = d->backend;
    int channels = d->config.channels;
    CHECK(b->linear_forward(b, d->buffers[MLP_GELU], d->buffers[MLP_PRE_GELU], d->buffers[NORMALISED],
        parameter(d, MLP_UP_WEIGHT, l), parameter(d, MLP_UP_BIAS, l), rows, channels, 4 * channels,
        LINEAR_BIAS_GELU));
    return b->linear_forward(b, d->buffers[ADDEND], NULL, d->buffers[MLP_GELU],
        parameter(d, MLP_DOWN_WEIGHT, l), parameter(d, MLP_DOWN_BIAS, l), rows, 4 * channels, channels,
        LINEAR_BIAS);
}

/* Up to the final norm: a chunk whose rows fit the buffers, tokens (sequences, count) in host_tokens. */
static enum status forward(struct decoder *d, int count) {
    struct backend *b = d->backend;
    const struct model_config *c = &d->config;
    int64_t rows = (int64_t)d->sequences * count;
    struct tensor positions = {(void *)parameter(d, POSITION_EMBEDDING, 0), d->parameters.dtype};
    CHECK(
        b->copy_to_device(b, d->buffers[NEW_TOKENS], d->host_tokens, (size_t)rows * sizeof *d->host_tokens));
    CHECK(b->embedding_forward(b, d->buffers[RESIDUAL], (const int32_t *)d->buffers[NEW_TOKENS],
        parameter(d, TOKEN_EMBEDDING, 0), tensor_at(positions, (int64_t)d->length * c->channels).data,
        d->sequences, count, c->channels));
    CHECK(b->layernorm_forward(b, d->buffers[NORMALISED], d->buffers[MEAN], d->buffers[RSTD],
        d->buffers[RESIDUAL], parameter(d, ATTENTION_NORM_WEIGHT, 0), parameter(d, ATTENTION_NORM_BIAS, 0),
        rows, c->channels));
    for (int l = 0; l < c->layers; l++) {
        bool last = l == c->layers - 1;
        CHECK(attention_branch(d, l, count));
        CHECK(add_and_normalise(d, MLP_NORM_WEIGHT, MLP_NORM_BIAS, l, rows));
        CHECK(mlp_branch(d, l, rows));
        CHECK(add_and_normalise(d, last ? FINAL_NORM_WEIGHT : ATTENTION_NORM_WEIGHT,
            last ? FINAL_NORM_BIAS : ATTENTION_NORM_BIAS, l + 1, rows));
    }
    d->length += count;
    return STATUS_OK;
}

/* Of the last of `count` rows of each sequence. */
static enum status next_logits(struct decoder *d, int count, float *logits) {
    struct backend *b = d->backend;
    const struct model_config *c = &d->config;
    int padded_vocab = model_padded_vocab(c);
    enum dtype dtype = b->profile.activation_dtype;
    const void *rows = d->buffers[NORMALISED];
    if (count > 1) {
        rows = d->buffers[LAST_ROWS];
        for (int s = 0; s < d->sequences; s++) {
            CHECK(b->copy(b, activation_at(d, LAST_ROWS, (int64_t)s * c->channels),
                activation_at(d, NORMALISED, ((int64_t)s * count + count - 1) * c->channels),
                (size_t)c->channels * dtype_bytes(dtype)));
        }
    }
    CHECK(b->linear_forward(b, d->buffers[NEXT_LOGITS], NULL, rows, parameter(d, TOKEN_EMBEDDING, 0), NULL,
        d->sequences, c->channels, padded_vocab, LINEAR_BIAS));
    CHECK(b->copy_to_host(b, d->host_logits, d->buffers[NEXT_LOGITS],
        (size_t)d->sequences * (size_t)padded_vocab * dtype_bytes(dtype)));
    for (int64_t s = 0; s < d->sequences; s++) {
        for (int64_t i = 0; i < c->vocab_size; i++) {
            int64_t at = s * padded_vocab + i;
            logits[s * c->vocab_size + i] = dtype == DTYPE_F32 ? ((const float *)d->host_logits)[at]
                                            : dtype == DTYPE_F64
                                                ? (float)((const double *)d->host_logits)[at]
                                                : bf16_to_float(((const uint16_t *)d->host_logits)[at]);
        }
    }
    return STATUS_OK;
}

enum status decoder_next(struct decoder *d, const int32_t *tokens, int count, float *logits) {
    if (count < 1 || count > d->capacity - d->length) {
        return fail(
            "%d more tokens do not fit after %d of a text of at most %d", count, d->length, d->capacity);
    }
    int chunk = (int)(most_rows(d->sequences) / d->sequences), taken = 0, n = 0;
    while (taken < count) {
        n = (int)min_i64(chunk, count - taken);
        for (int s = 0; s < d->sequences; s++) {
            memcpy(d->host_tokens + (int64_t)s * n, tokens + (int64_t)s * count + taken,
                (size_t)n * sizeof *tokens);
        }
        CHECK(forward(d, n));
        taken += n;
    }
    return next_logits(d, n, logits);
}
