/* Attention: the packed QKV projection handed to the kernels of attention/, which read and write it in place. */
#include "cuda.cuh"

#include "attention/attention.h"

#include <math.h>

/* The parts of qkv (B,T,Hq+2Hkv,D), or of its gradient. */
struct packed_parts {
    struct attention_tensor q, k, v;
};

static struct packed_parts unpack(const void *qkv, struct attention_shape s) {
    void *data = (void *)qkv;
    int packed_heads = s.heads + 2 * s.kv_heads;
    struct packed_parts parts = {attention_packed(data, sizeof(bf16), s.seq_len, packed_heads, s.head_dim, 0),
        attention_packed(data, sizeof(bf16), s.seq_len, packed_heads, s.head_dim, s.heads),
        attention_packed(data, sizeof(bf16), s.seq_len, packed_heads, s.head_dim, s.heads + s.kv_heads)};
    return parts;
}

static struct attention_params common_params(struct backend *b, struct attention_shape s, const void *qkv,
    const void *out, const void *logsumexp, const void *saved, void *workspace) {
    struct packed_parts in = unpack(qkv, s);
    struct attention_params p = {};
    p.dtype = DTYPE_BF16;
    p.batch = s.batch;
    p.seqlen_q = p.seqlen_k = s.seq_len;
    p.heads = s.heads;
    p.kv_heads = s.kv_heads;
    p.head_dim = s.head_dim;
    p.scale = 1.0 / sqrt((double)s.head_dim);
    p.causal = true;
    p.deterministic = true;
    p.q = in.q;
    p.k = in.k;
    p.v = in.v;
    p.o = attention_dense((void *)out, s.seq_len, s.heads, s.head_dim);
    p.lse = (void *)logsumexp;
    p.saved = (void *)saved;
    p.workspace = workspace;
    p.stream = b->state->stream;
    return p;
}

static enum status packed_attention_forward(struct backend *b, void *out, void *logsumexp, void *saved,
    void *workspace, const void *qkv, struct attention_shape shape) {
    struct attention_params p = common_params(b, shape, qkv, out, logsumexp, saved, workspace);
    return attention_forward(b->state->attention, &p);
}

static enum status packed_attention_backward(struct backend *b, void *d_qkv, void *workspace,
    const void *d_out, const void *out, const void *logsumexp, const void *saved, const void *qkv,
    struct attention_shape shape) {
    struct attention_params p = common_params(b, shape, qkv, out, logsumexp, saved, workspace);
    struct packed_parts gradient = unpack(d_qkv, shape);
    p.d_o = attention_dense((void *)d_out, shape.seq_len, shape.heads, shape.head_dim);
    p.dq = gradient.q;
    p.dk = gradient.k;
    p.dv = gradient.v;
    return attention_backward(b->state->attention, &p);
}

void cuda_attention_install(struct backend *b) {
    b->attention_forward = packed_attention_forward;
    b->attention_backward = packed_attention_backward;
}
