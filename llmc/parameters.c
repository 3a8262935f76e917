/* The parameter table and the flat layout that it implies: bucket 0 holds what exists once, bucket 1 + l holds layer
   l. Initialisation, weight decay, sharding, checkpoints and the number of parameters are loops over this table. */
#include "model.h"

#include <stdlib.h>

static int64_t one(const struct model_config *c) {
    (void)c;
    return 1;
}
static int64_t channels(const struct model_config *c) {
    return c->channels;
}
static int64_t hidden(const struct model_config *c) {
    return 4 * (int64_t)c->channels;
}
static int64_t qkv(const struct model_config *c) {
    return model_qkv_features(c);
}
static int64_t vocab(const struct model_config *c) {
    return c->vocab_size;
}
static int64_t padded_vocab(const struct model_config *c) {
    return model_padded_vocab(c);
}
static int64_t positions(const struct model_config *c) {
    return c->seq_len;
}

/* clang-format off */
const struct parameter_info parameter_table[PARAMETER_KINDS] = {
    /* Hugging Face name, per layer, decay, transposed in file, initial values, rows, columns, rows in file */
    [TOKEN_EMBEDDING] = {"transformer.wte.weight", false, true, false, INIT_NORMAL, padded_vocab, channels, vocab},
    [POSITION_EMBEDDING] = {"transformer.wpe.weight", false, true, false, INIT_NORMAL, positions, channels, positions},
    [FINAL_NORM_WEIGHT] = {"transformer.ln_f.weight", false, false, false, INIT_ONE, channels, one, channels},
    [FINAL_NORM_BIAS] = {"transformer.ln_f.bias", false, false, false, INIT_ZERO, channels, one, channels},
    [QKV_WEIGHT] = {"transformer.h.%d.attn.c_attn.weight", true, true, true, INIT_NORMAL, qkv, channels, qkv},
    [ATTENTION_PROJECTION_WEIGHT] = {"transformer.h.%d.attn.c_proj.weight", true, true, true, INIT_NORMAL_RESIDUAL, channels, channels, channels},
    [MLP_UP_WEIGHT] = {"transformer.h.%d.mlp.c_fc.weight", true, true, true, INIT_NORMAL, hidden, channels, hidden},
    [MLP_DOWN_WEIGHT] = {"transformer.h.%d.mlp.c_proj.weight", true, true, true, INIT_NORMAL_RESIDUAL, channels, hidden, channels},
    [QKV_BIAS] = {"transformer.h.%d.attn.c_attn.bias", true, false, false, INIT_ZERO, qkv, one, qkv},
    [ATTENTION_PROJECTION_BIAS] = {"transformer.h.%d.attn.c_proj.bias", true, false, false, INIT_ZERO, channels, one, channels},
    [MLP_UP_BIAS] = {"transformer.h.%d.mlp.c_fc.bias", true, false, false, INIT_ZERO, hidden, one, hidden},
    [MLP_DOWN_BIAS] = {"transformer.h.%d.mlp.c_proj.bias", true, false, false, INIT_ZERO, channels, one, channels},
    [ATTENTION_NORM_WEIGHT] = {"transformer.h.%d.ln_1.weight", true, false, false, INIT_ONE, channels, one, channels},
    [ATTENTION_NORM_BIAS] = {"transformer.h.%d.ln_1.bias", true, false, false, INIT_ZERO, channels, one, channels},
    [MLP_NORM_WEIGHT] = {"transformer.h.%d.ln_2.weight", true, false, false, INIT_ONE, channels, one, channels},
    [MLP_NORM_BIAS] = {"transformer.h.%d.ln_2.bias", true, false, false, INIT_ZERO, channels, one, channels},
};
/* clang-format on */

enum status model_config_check(const struct model_config *c) {
    if (c->layers < 1 || c->channels < 1 || c->heads < 1 || c->kv_heads < 1 || c->seq_len < 1 ||
        c->vocab_size < 1) {
        return fail(
            "model shape: layers %d, channels %d, heads %d, kv-heads %d, seq-len %d and vocab-size %d must "
            "all be at least 1",
            c->layers, c->channels, c->heads, c->kv_heads, c->seq_len, c->vocab_size);
    }
    if (c->layers > MODEL_MOST_LAYERS || c->channels > MODEL_MOST_SIZE || c->seq_len > MODEL_MOST_SIZE ||
        c->vocab_size > MODEL_MOST_SIZE) {
        return fail(
            "model shape: layers %d, channels %d, seq-len %d and vocab-size %d must be at most %d layers and "
            "%d of the others",
            c->layers, c->channels, c->seq_len, c->vocab_size, (int)MODEL_MOST_LAYERS, (int)MODEL_MOST_SIZE);
    }
    if (c->channels % c->heads != 0) {
        return fail("--heads %d does not divide --channels %d: choose a divisor", c->heads, c->channels);
    }
    if (c->heads % c->kv_heads != 0) {
        return fail("--kv-heads %d does not divide --heads %d: choose a divisor", c->kv_heads, c->heads);
    }
    return STATUS_OK;
}

int64_t parameter_elements(const struct model_config *config, enum parameter_id id) {
    return parameter_table[id].rows(config) * parameter_table[id].columns(config);
}

enum status layout_init(struct layout *layout, const struct model_config *config, int ranks) {
    memset(layout, 0, sizeof *layout);
    layout->buckets = config->layers + 1;
    CHECK(ALLOCATE(layout->bucket, layout->buckets));
    for (int b = 0; b < layout->buckets; b++) {
        struct bucket *bucket = &layout->bucket[b];
        bucket->offset = layout->total;
        for (int id = 0; id < PARAMETER_KINDS; id++) {
            const struct parameter_info *info = &parameter_table[id];
            if (info->per_layer != (b > 0)) {
                continue;
            }
            int64_t elements = parameter_elements(config, (enum parameter_id)id);
            bucket->count += elements;
            bucket->decay_count += info->decay ? elements : 0;
            layout->parameters += info->file_rows(config) * info->columns(config);
        }
        bucket->padded_count = round_up(bucket->count, (int64_t)ranks * 128);
        layout->total += bucket->padded_count;
    }
    return STATUS_OK;
}

void layout_free(struct layout *layout) {
    free(layout->bucket);
    memset(layout, 0, sizeof *layout);
}

int64_t layout_offset(
    const struct layout *layout, const struct model_config *config, enum parameter_id id, int layer) {
    bool per_layer = parameter_table[id].per_layer;
    int64_t offset = layout->bucket[per_layer ? layer + 1 : 0].offset;
    for (int before = 0; before < (int)id; before++) {
        if (parameter_table[before].per_layer == per_layer) {
            offset += parameter_elements(config, (enum parameter_id)before);
        }
    }
    return offset;
}
