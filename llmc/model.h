/* The GPT: GPT-2's architecture (learned positions, pre-LayerNorm, tanh GELU, tied head; Radford et al. 2019,
   Brown et al. 2020), with grouped-query attention. Its parameter table, its buffers, forward and backward, written
   once for any backend.

   B batch (sequences of a micro-batch), T seq_len, C channels, V vocab_size, Vp padded_vocab, L layers,
   Hq query heads, Hkv key/value heads, D head_dim, N = B*T. */
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H

#include "backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct model_config {
    int layers, channels, heads, kv_heads;
    int seq_len;    /* positions: the longest sequence */
    int vocab_size; /* padded to a multiple of 128 inside only */
};
/* Up to these, features fit an int and the number of parameters 64 bits. */
enum { MODEL_MOST_LAYERS = 1024, MODEL_MOST_SIZE = 1 << 20 /* of channels, positions, tokens */ };
static inline int model_head_dim(const struct model_config *c) {
    return c->channels / c->heads;
}
static inline int model_qkv_features(const struct model_config *c) {
    return (c->heads + 2 * c->kv_heads) * model_head_dim(c);
}
static inline int model_padded_vocab(const struct model_config *c) {
    return (int)round_up(c->vocab_size, 128);
}
/* Names what is wrong and how to mend it. */
enum status model_config_check(const struct model_config *config);

/* ---- the parameter table ---- */

enum parameter_id {
    /* once */
    TOKEN_EMBEDDING,
    POSITION_EMBEDDING,
    FINAL_NORM_WEIGHT,
    FINAL_NORM_BIAS,
    /* in every layer */
    QKV_WEIGHT,
    ATTENTION_PROJECTION_WEIGHT,
    MLP_UP_WEIGHT,
    MLP_DOWN_WEIGHT,
    QKV_BIAS,
    ATTENTION_PROJECTION_BIAS,
    MLP_UP_BIAS,
    MLP_DOWN_BIAS,
    ATTENTION_NORM_WEIGHT,
    ATTENTION_NORM_BIAS,
    MLP_NORM_WEIGHT,
    MLP_NORM_BIAS,
    PARAMETER_KINDS
};
enum parameter_init { INIT_NORMAL, INIT_NORMAL_RESIDUAL, INIT_ONE, INIT_ZERO };

struct parameter_info {
    const char *hugging_face; /* "transformer.h.%d.attn.c_attn.weight": %d is the layer */
    bool per_layer;
    bool decay;              /* weight decay; within a bucket those that decay come first */
    bool transposed_in_file; /* Conv1D: the file has (in, out), we have (out, in) */
    enum parameter_init init;
    int64_t (*rows)(const struct model_config *c);      /* ours, padded */
    int64_t (*columns)(const struct model_config *c);   /* 1 for vectors */
    int64_t (*file_rows)(const struct model_config *c); /* rows without padding */
};
extern const struct parameter_info parameter_table[PARAMETER_KINDS];

/* Parameters lie in buckets: bucket 0 holds what exists once, bucket 1 + l holds layer l. A bucket is contiguous,
   padded so that ranks divide it evenly in pieces of whole 256-byte lines, and is what ranks reduce and gather. */
struct bucket {
    int64_t offset;       /* of its first element in the flat buffer */
    int64_t count;        /* elements of parameters */
    int64_t padded_count; /* a multiple of ranks * 128 */
    int64_t decay_count;  /* the first so many decay */
};
struct layout {
    int buckets; /* layers + 1 */
    struct bucket *bucket;
    int64_t total;      /* elements of the flat buffer */
    int64_t parameters; /* P: parameters without vocabulary padding */
};
enum status layout_init(struct layout *layout, const struct model_config *config, int ranks);
void layout_free(struct layout *layout);
/* Element offset in the flat buffer of a parameter; layer is ignored for those that exist once. */
int64_t layout_offset(
    const struct layout *layout, const struct model_config *config, enum parameter_id id, int layer);
int64_t parameter_elements(const struct model_config *config, enum parameter_id id); /* rows * columns */

/* ---- what a model is made with ---- */

/* What backward computes again instead of keeping it from forward. Gradients are bitwise the same. */
enum recompute { RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_LAYERNORM, RECOMPUTE_BLOCK, RECOMPUTE_LEVELS };
extern const char *const recompute_names[RECOMPUTE_LEVELS];

struct model_options {
    struct model_config config;
    int micro_batch; /* most sequences at once */
    int seq_len;     /* most tokens of a sequence, at most config.seq_len; 0: config.seq_len */
    enum recompute recompute;
    enum dtype gradient_dtype;
    int layer_gradients;  /* buffers (2 or more) for layers to take turns in; 0: each has its own gradients */
    int64_t logits_bytes; /* most that one chunk of logits may take */
    int ranks;            /* for the layout's padding */
    bool forward_only;    /* no gradients, nothing kept for backward: for model_token_losses and decoders */
};

/* The longest sequence that the model takes. */
static inline int model_seq_len(const struct model_options *options) {
    return options->seq_len > 0 ? options->seq_len : options->config.seq_len;
}

/* Called by forward before a bucket's parameters are read, by backward before a bucket's gradients are written and when
   they are final for this micro-step (a layer's: by the next layer's attention). Each may be NULL. */
struct model_hooks {
    enum status (*before_parameters)(void *context, int bucket);
    enum status (*before_gradients)(void *context, int bucket);
    enum status (*gradients_ready)(void *context, int bucket);
    void *context;
};

/* ---- buffers: one table that the plan adds up and the model allocates ---- */

enum buffer_group {
    BUFFER_PARAMETERS,
    BUFFER_GRADIENTS,
    BUFFER_OPTIMIZER,
    BUFFER_ACTIVATIONS,
    BUFFER_WORKSPACE,
    BUFFER_GROUPS
};

enum buffer_id {
    /* of every layer, or one for all layers where the recompute level computes them again */
    RESIDUAL_IN,
    NORM1,
    NORM1_MEAN,
    NORM1_RSTD,
    QKV,
    ATTENTION,
    ATTENTION_LOGSUMEXP,
    ATTENTION_SAVED,
    RESIDUAL_MID,
    NORM2,
    NORM2_MEAN,
    NORM2_RSTD,
    PRE_GELU,
    GELU,
    /* once */
    FINAL_RESIDUAL,
    FINAL_NORM,
    FINAL_NORM_MEAN,
    FINAL_NORM_RSTD,
    LOGITS,
    LOSSES,
    BRANCH,
    D_RESIDUAL,
    D_BRANCH,
    D_WIDE,
    ATTENTION_WORKSPACE,
    TOKENS,
    TARGETS,
    BUFFER_KINDS
};
extern const char *const buffer_names[BUFFER_KINDS];

/* Bytes of one copy, a multiple of 256, and the number of copies (layers, or 1). */
size_t buffer_bytes(
    enum buffer_id id, const struct model_options *options, const struct backend_profile *device);
int buffer_copies(enum buffer_id id, const struct model_options *options);
enum buffer_group buffer_group(enum buffer_id id);

/* ---- the model ---- */

struct model;

enum status model_create(struct model **out, struct backend *backend, const struct model_options *options);
void model_free(struct model *model);

const struct model_config *model_get_config(const struct model *model);
const struct layout *model_get_layout(const struct model *model);
struct backend *model_get_backend(const struct model *model);
struct tensor model_parameters(const struct model *model); /* the flat buffer, layout->total elements */
struct tensor model_gradients(const struct model *model);  /* all; laid out alike if layers have their own */
/* Where a bucket's gradients are: padded_count elements. */
struct tensor model_bucket_gradients(const struct model *model, int bucket);
/* Elements of all gradients; layer_gradients as in struct model_options. */
int64_t model_gradient_elements(const struct layout *layout, int layer_gradients);

/* Initial values by the table: N(0, 0.02), residual projections by 1/sqrt(2L) smaller, LayerNorm 1, biases and padding
   0. They depend on the seed alone. `out` has the flat layout in any float dtype (the parameters, or fp32 masters):
   elements [first, first + count) of the flat layout are written to out[0, count). */
enum status model_initialize(
    struct model *model, struct tensor out, int64_t first, int64_t count, uint64_t seed);

/* Tokens and targets are (B,T) int32 on the host, with batch <= micro_batch and seq_len <= options.seq_len. */

/* One micro-step: adds the sum of token losses to *loss_sum, one element of statistic dtype in the backend's memory, and
   writes (or adds, with accumulate) the gradients of d_loss * that sum. */
enum status model_forward_backward(struct model *model, const int32_t *tokens, const int32_t *targets,
    int batch, int seq_len, double d_loss, bool accumulate, void *loss_sum, const struct model_hooks *hooks);

/* Forward alone: the loss of every token, losses (B,T) on the host, 0 without a target. */
enum status model_token_losses(struct model *model, const int32_t *tokens, const int32_t *targets, int batch,
    int seq_len, double *losses, const struct model_hooks *hooks);

/* Sets a bucket's parameters from bucket->count floats on the host. Where there is an optimizer, its masters must follow:
   optimizer_import_bucket does both. */
enum status model_import_bucket(struct model *model, int bucket, const float *host);
/* The other way. */
enum status model_export_bucket(struct model *model, int bucket, float *host);

#ifdef __cplusplus
}
#endif

#endif
