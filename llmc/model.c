/* The GPT's buffers, forward and backward. Layer l computes, on N = B*T rows,

     residual_in[l]  = residual_mid[l-1] + mlp branch of layer l-1        (layer 0: the embedding)
     norm1           = layernorm(residual_in)
     qkv             = norm1 Wqkv^T + b
     attention       = causal attention(qkv)
     residual_mid    = residual_in + (attention Wproj^T + b)
     norm2           = layernorm(residual_mid)
     gelu            = GELU(pre_gelu = norm2 Wup^T + b)
     mlp branch      = gelu Wdown^T + b

   Each sum with the branch is fused with the layernorm that follows it. Backward carries one gradient of the residual
   stream, d_residual, through the layers from last to first and adds the branches' gradients to it.

   The head runs in chunks of rows: logits, loss and their gradient, so that logits never exist for the whole
   micro-batch. What the recompute level does not keep per layer is one buffer for all layers; it still holds the last
   layer's values when backward starts, so that layer is never computed twice. */
#include "model.h"

#include <math.h>
#include <stdlib.h>

struct model {
    struct backend *backend;
    struct model_options options;
    struct layout layout;
    struct tensor parameters, gradients;
    void *buffers[BUFFER_KINDS];
    /* Distance from a layer's copy to the next; 0 where there is one for all. */
    size_t copy_bytes[BUFFER_KINDS];
    void *host_losses; /* of a micro-batch, statistic dtype */
};

const char *const recompute_names[RECOMPUTE_LEVELS] = {"none", "gelu", "layernorm", "block"};

/* ---- buffers ---- */

const char *const buffer_names[BUFFER_KINDS] = {"residual in", "norm 1", "norm 1 mean", "norm 1 rstd", "qkv",
    "attention", "attention logsumexp", "attention saved", "residual mid", "norm 2", "norm 2 mean",
    "norm 2 rstd", "before gelu", "gelu", "final residual", "final norm", "final norm mean",
    "final norm rstd", "logits chunk", "losses", "branch", "residual gradient", "branch gradient",
    "wide gradient", "attention workspace", "tokens", "targets"};

static struct attention_shape attention_shape(const struct model_config *c, int batch, int seq_len) {
    struct attention_shape shape = {batch, seq_len, c->heads, c->kv_heads, model_head_dim(c)};
    return shape;
}

/* Rows of logits that one chunk holds: as many as logits_bytes allow, in equal chunks (no small last one) of a multiple
   of 128, which the products like. */
static int64_t logits_rows(const struct model_options *options, int64_t rows, size_t activation_bytes) {
    int64_t row_bytes = (int64_t)model_padded_vocab(&options->config) * (int64_t)activation_bytes;
    int64_t limit = options->logits_bytes > 0 ? max_i64(options->logits_bytes / row_bytes, 1) : rows;
    int64_t equal = ceil_div(rows, ceil_div(rows, limit)), aligned = round_up(equal, 128);
    return aligned <= limit && aligned <= rows ? aligned : equal;
}

/* In double: exact for every size that a machine can have, and no option is large enough to overflow it. */
static double wanted_bytes(
    enum buffer_id id, const struct model_options *options, const struct backend_profile *device) {
    const struct model_config *c = &options->config;
    int seq_len = model_seq_len(options);
    double rows = (double)options->micro_batch * seq_len;
    double activation = (double)dtype_bytes(device->activation_dtype);
    double statistic = (double)dtype_bytes(device->statistic_dtype);
    double channels = c->channels, qkv = model_qkv_features(c);
    double gradient = options->forward_only ? 0 : activation; /* of an element of an activation's gradient */
    struct attention_shape shape = attention_shape(c, options->micro_batch, seq_len);
    switch (id) {
    case RESIDUAL_IN:
    case NORM1:
    case ATTENTION:
    case RESIDUAL_MID:
    case NORM2:
    case FINAL_RESIDUAL:
    case FINAL_NORM:
    case BRANCH:
        return rows * channels * activation;
    case D_RESIDUAL:
    case D_BRANCH:
        return rows * channels * gradient;
    case NORM1_MEAN:
    case NORM1_RSTD:
    case NORM2_MEAN:
    case NORM2_RSTD:
    case FINAL_NORM_MEAN:
    case FINAL_NORM_RSTD:
    case LOSSES:
        return rows * statistic;
    case QKV:
        return rows * qkv * activation;
    case ATTENTION_LOGSUMEXP:
        return rows * c->heads * statistic;
    case ATTENTION_SAVED:
        return (double)backend_attention_saved_bytes(device, shape);
    case PRE_GELU:
    case GELU:
        return rows * 4 * channels * activation;
    case D_WIDE:
        return rows * fmax(qkv, 4 * channels) * gradient;
    case LOGITS:
        return (double)logits_rows(options, (int64_t)rows, dtype_bytes(device->activation_dtype)) *
               model_padded_vocab(c) * activation;
    case ATTENTION_WORKSPACE:
        return (double)backend_attention_workspace_bytes(device, shape);
    case TOKENS:
    case TARGETS:
        return rows * sizeof(int32_t);
    case BUFFER_KINDS:
        break;
    }
    return 0;
}

size_t buffer_bytes(
    enum buffer_id id, const struct model_options *options, const struct backend_profile *device) {
    /* more than any machine has, and still small enough that the buffers of all layers add up in 64 bits */
    const double beyond_all_memory = (double)(UINT64_C(1) << 48);
    return (size_t)round_up((int64_t)fmin(wanted_bytes(id, options, device), beyond_all_memory), 256);
}

int buffer_copies(enum buffer_id id, const struct model_options *options) {
    enum recompute kept_below; /* kept per layer below this level */
    switch (id) {
    case RESIDUAL_IN:
        kept_below = RECOMPUTE_LEVELS;
        break;
    case GELU:
        kept_below = RECOMPUTE_GELU;
        break;
    case NORM1:
    case NORM2:
        kept_below = RECOMPUTE_LAYERNORM;
        break;
    case NORM1_MEAN:
    case NORM1_RSTD:
    case QKV:
    case ATTENTION:
    case ATTENTION_LOGSUMEXP:
    case ATTENTION_SAVED:
    case RESIDUAL_MID:
    case NORM2_MEAN:
    case NORM2_RSTD:
    case PRE_GELU:
        kept_below = RECOMPUTE_BLOCK;
        break;
    default:
        return 1;
    }
    return options->recompute < kept_below && !options->forward_only ? options->config.layers : 1;
}

enum buffer_group buffer_group(enum buffer_id id) {
    return id <= FINAL_NORM_RSTD ? BUFFER_ACTIVATIONS : BUFFER_WORKSPACE;
}

/* NULL if the buffer has no bytes. */
static void *buffer(const struct model *m, enum buffer_id id, int layer) {
    return m->buffers[id] == NULL ? NULL : (char *)m->buffers[id] + (size_t)layer * m->copy_bytes[id];
}

/* Element `index` of an activation that exists once. */
static void *activation_at(const struct model *m, enum buffer_id id, int64_t index) {
    return (char *)m->buffers[id] + (size_t)index * dtype_bytes(m->backend->profile.activation_dtype);
}

/* ---- life ---- */

static enum status allocate_buffers(struct model *m) {
    struct backend *b = m->backend;
    for (int id = 0; id < BUFFER_KINDS; id++) {
        size_t bytes = buffer_bytes((enum buffer_id)id, &m->options, &b->profile);
        int copies = buffer_copies((enum buffer_id)id, &m->options);
        m->copy_bytes[id] = copies > 1 ? bytes : 0;
        if (bytes > 0) {
            CHECK(b->memory_allocate(b, &m->buffers[id], bytes * (size_t)copies));
        }
    }
    size_t parameter_bytes = (size_t)m->layout.total * dtype_bytes(m->parameters.dtype);
    CHECK(b->memory_allocate(b, &m->parameters.data, parameter_bytes));
    CHECK(b->set_zero(b, m->parameters.data, parameter_bytes));
    if (!m->options.forward_only) {
        size_t gradient_bytes = (size_t)model_gradient_elements(&m->layout, m->options.layer_gradients) *
                                dtype_bytes(m->gradients.dtype);
        CHECK(b->memory_allocate(b, &m->gradients.data, gradient_bytes));
        CHECK(b->set_zero(b, m->gradients.data, gradient_bytes));
    }
    return allocate(&m->host_losses, (size_t)m->options.micro_batch * (size_t)model_seq_len(&m->options),
        dtype_bytes(b->profile.statistic_dtype));
}

enum status model_create(struct model **out, struct backend *backend, const struct model_options *options) {
    CHECK(model_config_check(&options->config));
    if (model_seq_len(options) > options->config.seq_len) {
        return fail(
            "--seq-len %d is over the model's %d positions", options->seq_len, options->config.seq_len);
    }
    struct model *m;
    CHECK(ALLOCATE(m, 1));
    m->backend = backend;
    m->options = *options;
    m->parameters.dtype = backend->profile.parameter_dtype;
    m->gradients.dtype = options->gradient_dtype;
    enum status status = layout_init(&m->layout, &options->config, options->ranks);
    if (status == STATUS_OK) {
        status = allocate_buffers(m);
    }
    if (status != STATUS_OK) {
        model_free(m);
        return status;
    }
    *out = m;
    return STATUS_OK;
}

void model_free(struct model *m) {
    if (m == NULL) {
        return;
    }
    for (int id = 0; id < BUFFER_KINDS; id++) {
        m->backend->memory_free(m->backend, m->buffers[id]);
    }
    m->backend->memory_free(m->backend, m->parameters.data);
    m->backend->memory_free(m->backend, m->gradients.data);
    layout_free(&m->layout);
    free(m->host_losses);
    free(m);
}

const struct model_config *model_get_config(const struct model *m) {
    return &m->options.config;
}
const struct layout *model_get_layout(const struct model *m) {
    return &m->layout;
}
struct backend *model_get_backend(const struct model *m) {
    return m->backend;
}
struct tensor model_parameters(const struct model *m) {
    return m->parameters;
}
struct tensor model_gradients(const struct model *m) {
    return m->gradients;
}

int64_t model_gradient_elements(const struct layout *layout, int layer_gradients) {
    const struct bucket *once = &layout->bucket[0], *layer = &layout->bucket[1];
    return layer_gradients == 0 ? layout->total : once->padded_count + layer_gradients * layer->padded_count;
}

struct tensor model_bucket_gradients(const struct model *m, int bucket) {
    const struct bucket *of = &m->layout.bucket[bucket];
    int buffers = m->options.layer_gradients;
    int64_t offset = of->offset;
    if (buffers > 0 && bucket > 0) { /* the layers' buffers follow bucket 0, all of a size */
        offset = m->layout.bucket[1].offset + (bucket - 1) % buffers * of->padded_count;
    }
    return tensor_at(m->gradients, offset);
}

/* ---- initial values ---- */

/* The part [begin, end) of the flat layout's tensor at `offset`, written where it falls into [first, first + count). */
static enum status initialize_range(struct model *m, struct tensor out, int64_t first, int64_t count,
    int64_t offset, int64_t begin, int64_t end, enum parameter_init init, uint64_t seed, uint64_t stream) {
    struct backend *b = m->backend;
    int64_t from = max_i64(offset + begin, first), to = min_i64(offset + end, first + count);
    if (from >= to) {
        return STATUS_OK;
    }
    struct tensor part = tensor_at(out, from - first);
    switch (init) {
    case INIT_NORMAL:
        return b->random_normal(b, part, to - from, seed, stream, from - offset, 0.02);
    case INIT_NORMAL_RESIDUAL:
        return b->random_normal(
            b, part, to - from, seed, stream, from - offset, 0.02 / sqrt(2.0 * m->options.config.layers));
    case INIT_ONE:
        return b->fill(b, part, 1.0, to - from);
    case INIT_ZERO:
        break;
    }
    return b->fill(b, part, 0.0, to - from);
}

enum status model_initialize(
    struct model *m, struct tensor out, int64_t first, int64_t count, uint64_t seed) {
    const struct model_config *c = &m->options.config;
    for (int id = 0; id < PARAMETER_KINDS; id++) {
        const struct parameter_info *info = &parameter_table[id];
        int64_t in_file = info->file_rows(c) * info->columns(c);
        int64_t padded = parameter_elements(c, (enum parameter_id)id);
        for (int layer = 0; layer < (info->per_layer ? c->layers : 1); layer++) {
            int64_t offset = layout_offset(&m->layout, c, (enum parameter_id)id, layer);
            uint64_t stream = (uint64_t)layer * PARAMETER_KINDS + (uint64_t)id;
            CHECK(initialize_range(m, out, first, count, offset, 0, in_file, info->init, seed, stream));
            CHECK(initialize_range(m, out, first, count, offset, in_file, padded, INIT_ZERO, seed, stream));
        }
    }
    for (int i = 0; i < m->layout.buckets; i++) {
        const struct bucket *bucket = &m->layout.bucket[i];
        CHECK(initialize_range(
            m, out, first, count, bucket->offset, bucket->count, bucket->padded_count, INIT_ZERO, seed, 0));
    }
    return STATUS_OK;
}

/* ---- forward ---- */

static const void *parameter(const struct model *m, enum parameter_id id, int layer) {
    return tensor_at(m->parameters, layout_offset(&m->layout, &m->options.config, id, layer)).data;
}
static struct tensor gradient(const struct model *m, enum parameter_id id, int layer) {
    int bucket = parameter_table[id].per_layer ? layer + 1 : 0;
    return tensor_at(model_bucket_gradients(m, bucket),
        layout_offset(&m->layout, &m->options.config, id, layer) - m->layout.bucket[bucket].offset);
}

static enum status call_hook(enum status (*hook)(void *context, int bucket), void *context, int bucket) {
    return hook != NULL ? hook(context, bucket) : STATUS_OK;
}
static enum status before_parameters(const struct model_hooks *hooks, int bucket) {
    return hooks != NULL ? call_hook(hooks->before_parameters, hooks->context, bucket) : STATUS_OK;
}
static enum status before_gradients(const struct model_hooks *hooks, int bucket) {
    return hooks != NULL ? call_hook(hooks->before_gradients, hooks->context, bucket) : STATUS_OK;
}
static enum status gradients_ready(const struct model_hooks *hooks, int bucket) {
    return hooks != NULL ? call_hook(hooks->gradients_ready, hooks->context, bucket) : STATUS_OK;
}

/* From norm1 to the MLP's GELU; leaves residual_mid and gelu. The MLP's last product is left to the caller:
   recomputation does not need it. */
static enum status block_inner(struct model *m, int l, int batch, int seq_len) {
    struct backend *b = m->backend;
    const struct model_config *c = &m->options.config;
    int64_t rows = (int64_t)batch * seq_len;
    CHECK(b->linear_forward(b, buffer(m, QKV, l), NULL, buffer(m, NORM1, l), parameter(m, QKV_WEIGHT, l),
        parameter(m, QKV_BIAS, l), rows, c->channels, model_qkv_features(c), LINEAR_BIAS));
    CHECK(b->attention_forward(b, buffer(m, ATTENTION, l), buffer(m, ATTENTION_LOGSUMEXP, l),
        buffer(m, ATTENTION_SAVED, l), m->buffers[ATTENTION_WORKSPACE], buffer(m, QKV, l),
        attention_shape(c, batch, seq_len)));
    CHECK(b->linear_forward(b, m->buffers[BRANCH], NULL, buffer(m, ATTENTION, l),
        parameter(m, ATTENTION_PROJECTION_WEIGHT, l), parameter(m, ATTENTION_PROJECTION_BIAS, l), rows,
        c->channels, c->channels, LINEAR_BIAS));
    CHECK(b->residual_layernorm_forward(b, buffer(m, RESIDUAL_MID, l), buffer(m, NORM2, l),
        buffer(m, NORM2_MEAN, l), buffer(m, NORM2_RSTD, l), buffer(m, RESIDUAL_IN, l), m->buffers[BRANCH],
        parameter(m, MLP_NORM_WEIGHT, l), parameter(m, MLP_NORM_BIAS, l), rows, c->channels));
    return b->linear_forward(b, buffer(m, GELU, l), buffer(m, PRE_GELU, l), buffer(m, NORM2, l),
        parameter(m, MLP_UP_WEIGHT, l), parameter(m, MLP_UP_BIAS, l), rows, c->channels, 4 * c->channels,
        LINEAR_BIAS_GELU);
}

/* Tokens to FINAL_NORM. */
static enum status forward(
    struct model *m, const int32_t *tokens, int batch, int seq_len, const struct model_hooks *hooks) {
    struct backend *b = m->backend;
    const struct model_config *c = &m->options.config;
    int64_t rows = (int64_t)batch * seq_len;
    if (batch < 1 || batch > m->options.micro_batch || seq_len < 1 || seq_len > model_seq_len(&m->options)) {
        return fail(
            "a batch of %d sequences of %d tokens does not fit the model's buffers, made for %d of %d", batch,
            seq_len, m->options.micro_batch, model_seq_len(&m->options));
    }
    CHECK(b->copy_to_device(b, m->buffers[TOKENS], tokens, (size_t)rows * sizeof *tokens));
    CHECK(before_parameters(hooks, 0));
    CHECK(b->embedding_forward(b, buffer(m, RESIDUAL_IN, 0), (const int32_t *)m->buffers[TOKENS],
        parameter(m, TOKEN_EMBEDDING, 0), parameter(m, POSITION_EMBEDDING, 0), batch, seq_len, c->channels));
    for (int l = 0; l < c->layers; l++) {
        CHECK(before_parameters(hooks, l + 1));
        if (l == 0) {
            CHECK(b->layernorm_forward(b, buffer(m, NORM1, 0), buffer(m, NORM1_MEAN, 0),
                buffer(m, NORM1_RSTD, 0), buffer(m, RESIDUAL_IN, 0), parameter(m, ATTENTION_NORM_WEIGHT, 0),
                parameter(m, ATTENTION_NORM_BIAS, 0), rows, c->channels));
        } else {
            CHECK(b->residual_layernorm_forward(b, buffer(m, RESIDUAL_IN, l), buffer(m, NORM1, l),
                buffer(m, NORM1_MEAN, l), buffer(m, NORM1_RSTD, l), buffer(m, RESIDUAL_MID, l - 1),
                m->buffers[BRANCH], parameter(m, ATTENTION_NORM_WEIGHT, l),
                parameter(m, ATTENTION_NORM_BIAS, l), rows, c->channels));
        }
        CHECK(block_inner(m, l, batch, seq_len));
        CHECK(b->linear_forward(b, m->buffers[BRANCH], NULL, buffer(m, GELU, l),
            parameter(m, MLP_DOWN_WEIGHT, l), parameter(m, MLP_DOWN_BIAS, l), rows, 4 * c->channels,
            c->channels, LINEAR_BIAS));
    }
    return b->residual_layernorm_forward(b, m->buffers[FINAL_RESIDUAL], m->buffers[FINAL_NORM],
        m->buffers[FINAL_NORM_MEAN], m->buffers[FINAL_NORM_RSTD], buffer(m, RESIDUAL_MID, c->layers - 1),
        m->buffers[BRANCH], parameter(m, FINAL_NORM_WEIGHT, 0), parameter(m, FINAL_NORM_BIAS, 0), rows,
        c->channels);
}

/* FINAL_NORM to LOSSES, in chunks of rows; with `backward` also to D_BRANCH (gradient of FINAL_NORM) and the token
   embedding's gradient. */
static enum status head(
    struct model *m, const int32_t *targets, int64_t rows, bool backward, double d_loss, bool accumulate) {
    struct backend *b = m->backend;
    const struct model_config *c = &m->options.config;
    const void *weight = parameter(m, TOKEN_EMBEDDING, 0);
    int padded_vocab = model_padded_vocab(c);
    struct tensor no_bias = {NULL, m->gradients.dtype};
    int64_t full_rows = (int64_t)m->options.micro_batch * model_seq_len(&m->options);
    int64_t chunk_rows = logits_rows(&m->options, full_rows, dtype_bytes(b->profile.activation_dtype));
    CHECK(b->copy_to_device(b, m->buffers[TARGETS], targets, (size_t)rows * sizeof *targets));
    for (int64_t first = 0; first < rows; first += chunk_rows) {
        int64_t n = min_i64(chunk_rows, rows - first);
        const void *in = activation_at(m, FINAL_NORM, first * c->channels);
        struct tensor losses = {m->buffers[LOSSES], b->profile.statistic_dtype};
        CHECK(b->linear_forward(
            b, m->buffers[LOGITS], NULL, in, weight, NULL, n, c->channels, padded_vocab, LINEAR_BIAS));
        CHECK(b->classifier(b, m->buffers[LOGITS], tensor_at(losses, first).data,
            (const int32_t *)m->buffers[TARGETS] + first, n, c->vocab_size, padded_vocab, d_loss, backward));
        if (backward) {
            CHECK(b->linear_backward_input(b, activation_at(m, D_BRANCH, first * c->channels),
                m->buffers[LOGITS], weight, NULL, n, c->channels, padded_vocab));
            CHECK(b->linear_backward_parameters(b, gradient(m, TOKEN_EMBEDDING, 0), no_bias,
                m->buffers[LOGITS], in, n, c->channels, padded_vocab, accumulate || first > 0));
        }
    }
    return STATUS_OK;
}

/* ---- backward ---- */

/* Brings back what forward did not keep of layer l. The last layer's values are still there. */
static enum status recompute(struct model *m, int l, int batch, int seq_len) {
    struct backend *b = m->backend;
    const struct model_config *c = &m->options.config;
    int64_t rows = (int64_t)batch * seq_len;
    enum recompute level = m->options.recompute;
    if (l == c->layers - 1 || level == RECOMPUTE_NONE) {
        return STATUS_OK;
    }
    if (level >= RECOMPUTE_LAYERNORM) {
        CHECK(b->layernorm_forward(b, buffer(m, NORM1, l), buffer(m, NORM1_MEAN, l), buffer(m, NORM1_RSTD, l),
            buffer(m, RESIDUAL_IN, l), parameter(m, ATTENTION_NORM_WEIGHT, l),
            parameter(m, ATTENTION_NORM_BIAS, l), rows, c->channels));
    }
    if (level == RECOMPUTE_BLOCK) {
        return block_inner(m, l, batch, seq_len);
    }
    if (level == RECOMPUTE_LAYERNORM) {
        CHECK(b->layernorm_forward(b, buffer(m, NORM2, l), buffer(m, NORM2_MEAN, l), buffer(m, NORM2_RSTD, l),
            buffer(m, RESIDUAL_MID, l), parameter(m, MLP_NORM_WEIGHT, l), parameter(m, MLP_NORM_BIAS, l),
            rows, c->channels));
    }
    return b->gelu_forward(b, buffer(m, GELU, l), buffer(m, PRE_GELU, l), rows * 4 * c->channels);
}

/* Layer l, from D_RESIDUAL (gradient of the layer's output) to D_RESIDUAL (gradient of its input). That the gradients of
   the layer above are ready is told before this layer's attention: what ranks exchange takes multiprocessors away, which
   costs little beside attention's many short thread blocks, and much beside a product, whose blocks are all in place from
   its start to its end. */
static enum status block_backward(
    struct model *m, int l, int batch, int seq_len, bool accumulate, const struct model_hooks *hooks) {
    struct backend *b = m->backend;
    const struct model_config *c = &m->options.config;
    int64_t rows = (int64_t)batch * seq_len;
    int channels = c->channels, hidden = 4 * c->channels, qkv_features = model_qkv_features(c);
    void *d_residual = m->buffers[D_RESIDUAL], *d_branch = m->buffers[D_BRANCH], *d_wide = m->buffers[D_WIDE];
    CHECK(recompute(m, l, batch, seq_len));

    /* MLP branch */
    CHECK(b->linear_backward_parameters(b, gradient(m, MLP_DOWN_WEIGHT, l), gradient(m, MLP_DOWN_BIAS, l),
        d_residual, buffer(m, GELU, l), rows, hidden, channels, accumulate));
    CHECK(b->linear_backward_input(b, d_wide, d_residual, parameter(m, MLP_DOWN_WEIGHT, l),
        buffer(m, PRE_GELU, l), rows, hidden, channels));
    CHECK(b->linear_backward_parameters(b, gradient(m, MLP_UP_WEIGHT, l), gradient(m, MLP_UP_BIAS, l), d_wide,
        buffer(m, NORM2, l), rows, channels, hidden, accumulate));
    CHECK(b->linear_backward_input(
        b, d_branch, d_wide, parameter(m, MLP_UP_WEIGHT, l), NULL, rows, channels, hidden));
    CHECK(b->layernorm_backward(b, d_residual, gradient(m, MLP_NORM_WEIGHT, l), gradient(m, MLP_NORM_BIAS, l),
        d_branch, buffer(m, RESIDUAL_MID, l), parameter(m, MLP_NORM_WEIGHT, l), buffer(m, NORM2_MEAN, l),
        buffer(m, NORM2_RSTD, l), rows, channels, true, accumulate));

    /* attention branch */
    CHECK(b->linear_backward_parameters(b, gradient(m, ATTENTION_PROJECTION_WEIGHT, l),
        gradient(m, ATTENTION_PROJECTION_BIAS, l), d_residual, buffer(m, ATTENTION, l), rows, channels,
        channels, accumulate));
    CHECK(b->linear_backward_input(b, d_branch, d_residual, parameter(m, ATTENTION_PROJECTION_WEIGHT, l),
        NULL, rows, channels, channels));
    if (l + 1 < c->layers) {
        CHECK(gradients_ready(hooks, l + 2));
    }
    CHECK(b->attention_backward(b, d_wide, m->buffers[ATTENTION_WORKSPACE], d_branch, buffer(m, ATTENTION, l),
        buffer(m, ATTENTION_LOGSUMEXP, l), buffer(m, ATTENTION_SAVED, l), buffer(m, QKV, l),
        attention_shape(c, batch, seq_len)));
    CHECK(b->linear_backward_parameters(b, gradient(m, QKV_WEIGHT, l), gradient(m, QKV_BIAS, l), d_wide,
        buffer(m, NORM1, l), rows, channels, qkv_features, accumulate));
    CHECK(b->linear_backward_input(
        b, d_branch, d_wide, parameter(m, QKV_WEIGHT, l), NULL, rows, channels, qkv_features));
    return b->layernorm_backward(b, d_residual, gradient(m, ATTENTION_NORM_WEIGHT, l),
        gradient(m, ATTENTION_NORM_BIAS, l), d_branch, buffer(m, RESIDUAL_IN, l),
        parameter(m, ATTENTION_NORM_WEIGHT, l), buffer(m, NORM1_MEAN, l), buffer(m, NORM1_RSTD, l), rows,
        channels, true, accumulate);
}

static enum status embedding_backward(struct model *m, int batch, int seq_len, bool accumulate) {
    struct backend *b = m->backend;
    const struct model_config *c = &m->options.config;
    struct tensor d_position = gradient(m, POSITION_EMBEDDING, 0);
    if (!accumulate && seq_len < c->seq_len) { /* positions that this run never reaches */
        struct tensor beyond = tensor_at(d_position, (int64_t)seq_len * c->channels);
        CHECK(b->set_zero(b, beyond.data,
            (size_t)(c->seq_len - seq_len) * (size_t)c->channels * dtype_bytes(beyond.dtype)));
    }
    return b->embedding_backward(b, gradient(m, TOKEN_EMBEDDING, 0), d_position, m->buffers[D_RESIDUAL],
        (const int32_t *)m->buffers[TOKENS], batch, seq_len, c->channels, c->vocab_size, accumulate);
}

/* ---- what the program calls ---- */

enum status model_forward_backward(struct model *m, const int32_t *tokens, const int32_t *targets, int batch,
    int seq_len, double d_loss, bool accumulate, void *loss_sum, const struct model_hooks *hooks) {
    struct backend *b = m->backend;
    const struct model_config *c = &m->options.config;
    int64_t rows = (int64_t)batch * seq_len;
    CHECK(forward(m, tokens, batch, seq_len, hooks));
    CHECK(before_gradients(hooks, 0));
    CHECK(head(m, targets, rows, true, d_loss, accumulate));
    CHECK(b->sum(b, loss_sum, m->buffers[LOSSES], rows));
    CHECK(b->layernorm_backward(b, m->buffers[D_RESIDUAL], gradient(m, FINAL_NORM_WEIGHT, 0),
        gradient(m, FINAL_NORM_BIAS, 0), m->buffers[D_BRANCH], m->buffers[FINAL_RESIDUAL],
        parameter(m, FINAL_NORM_WEIGHT, 0), m->buffers[FINAL_NORM_MEAN], m->buffers[FINAL_NORM_RSTD], rows,
        c->channels, false, accumulate));
    for (int l = c->layers - 1; l >= 0; l--) {
        CHECK(before_gradients(hooks, l + 1));
        CHECK(block_backward(m, l, batch, seq_len, accumulate, hooks));
    }
    CHECK(gradients_ready(hooks, 1));
    CHECK(embedding_backward(m, batch, seq_len, accumulate));
    return gradients_ready(hooks, 0);
}

enum status model_token_losses(struct model *m, const int32_t *tokens, const int32_t *targets, int batch,
    int seq_len, double *losses, const struct model_hooks *hooks) {
    struct backend *b = m->backend;
    enum dtype dtype = b->profile.statistic_dtype;
    int64_t rows = (int64_t)batch * seq_len;
    CHECK(forward(m, tokens, batch, seq_len, hooks));
    CHECK(head(m, targets, rows, false, 0.0, false));
    CHECK(b->copy_to_host(b, m->host_losses, m->buffers[LOSSES], (size_t)rows * dtype_bytes(dtype)));
    for (int64_t i = 0; i < rows; i++) {
        losses[i] = dtype == DTYPE_F64 ? ((const double *)m->host_losses)[i]
                                       : (double)((const float *)m->host_losses)[i];
    }
    return STATUS_OK;
}

/* A bucket between the device and fp32 on the host, a piece of it at a time: exactly one of the two is given. */
static enum status exchange_bucket(struct model *m, int bucket, const float *from_host, float *to_host) {
    enum { STAGING_ELEMENTS = 1 << 22 };
    struct backend *b = m->backend;
    const struct bucket *k = &m->layout.bucket[bucket];
    struct tensor staging = {NULL, DTYPE_F32};
    int64_t most = min_i64(k->count, STAGING_ELEMENTS);
    enum status status = b->memory_allocate(b, &staging.data, (size_t)most * sizeof(float));
    for (int64_t at = 0; at < k->count && status == STATUS_OK; at += most) {
        int64_t n = min_i64(most, k->count - at);
        size_t bytes = (size_t)n * sizeof(float);
        struct tensor parameters = tensor_at(m->parameters, k->offset + at);
        if (from_host != NULL) {
            CHECK_CLEANUP(b->copy_to_device(b, staging.data, from_host + at, bytes));
            CHECK_CLEANUP(b->convert(b, parameters, staging, n));
        } else {
            CHECK_CLEANUP(b->convert(b, staging, parameters, n));
            CHECK_CLEANUP(b->copy_to_host(b, to_host + at, staging.data, bytes));
        }
    }
    CHECK_CLEANUP(status);
    status = b->synchronize(b);
cleanup:
    b->memory_free(b, staging.data);
    return status;
}

enum status model_import_bucket(struct model *m, int bucket, const float *host) {
    return exchange_bucket(m, bucket, host, NULL);
}

enum status model_export_bucket(struct model *m, int bucket, float *host) {
    return exchange_bucket(m, bucket, NULL, host);
}
