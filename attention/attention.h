/* Exact attention, forward and backward, as a C interface over several kernels that compute the same thing:

       S = scale * Q K^T    P = softmax(S)    O = P V    lse = log(sum(exp(S)))          (per batch and head)

   "standard"  S and P in memory, cuBLAS for the products: what attention is without FlashAttention
   "fa1"       FlashAttention (Dao et al. 2022, algorithms 1 and 4)
   "cut1"      fa1 with FlashAttention-2's online softmax: unscaled output, one division, only lse stored
   "cut2"      cut1 with thread blocks over the rows as well
   "fa2"       FlashAttention-2 (Dao 2023): cut2 with warps that split the rows of Q
   "fa3"       the same with Hopper's own instructions (Shah et al. 2024): sm_90; beyond head dimension 128
               its backward pass is fa2's

   Every kernel takes [batch, seq, heads, head_dim] tensors with free strides, so the packed output of a QKV
   projection is read, and its gradient written, in place. The reference takes the same arguments on the CPU.

   Causal masks are aligned bottom-right: query i sees keys 0 .. i + seqlen_k - seqlen_q. A row that sees nothing
   gives O = 0, lse = -infinity and no gradient. Grouped queries: query head h reads key/value head
   h / (heads / kv_heads). All calls are enqueued on a stream and do not wait for it. */
#ifndef ATTENTION_ATTENTION_H
#define ATTENTION_ATTENTION_H

#include "llmc/common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A [batch, seq, heads, head_dim] tensor; strides count elements. dim_stride must be 1. On the GPU data and strides
   are multiples of 16 bytes; a stride of 0 repeats (inputs only). */
struct attention_tensor {
    void *data;
    int64_t batch_stride, seq_stride, head_stride, dim_stride;
};

struct attention_params {
    enum dtype dtype; /* of the tensors: DTYPE_BF16 or DTYPE_F16; the reference: DTYPE_F64 */
    int64_t batch, seqlen_q, seqlen_k;
    int64_t heads, kv_heads; /* kv_heads divides heads */
    int64_t head_dim;        /* a multiple of 8, at most 256; the reference: any */
    double scale;            /* factor on Q K^T, usually 1 / sqrt(head_dim) */
    bool causal;
    bool deterministic; /* backward: dQ bitwise repeatable too (O, lse, dK and dV always are) */

    struct attention_tensor q, k, v;    /* in */
    struct attention_tensor o;          /* forward: out; backward: in */
    struct attention_tensor d_o;        /* backward, in */
    struct attention_tensor dq, dk, dv; /* backward, out: every element is written */
    void *lse; /* [batch, heads, seqlen_q] natural log, fp32 (reference: fp64); forward: out; backward: in */
    void *saved;     /* attention_saved_bytes, from forward to backward; may be NULL where that is 0 */
    void *workspace; /* attention_workspace_bytes while a call runs; 256-byte aligned; NULL where that is 0 */
    void *stream;    /* cudaStream_t; NULL: the default stream */
};

/* A dense [batch, seq, heads, head_dim] tensor. */
static inline struct attention_tensor attention_dense(
    void *data, int64_t seq_len, int64_t heads, int64_t head_dim) {
    struct attention_tensor t = {data, seq_len * heads * head_dim, heads * head_dim, head_dim, 1};
    return t;
}

/* Heads first_head and following of a packed [batch, seq, packed_heads, head_dim] tensor of `element_bytes` each: the
   packed QKV projection has heads + 2 * kv_heads, Q first. */
static inline struct attention_tensor attention_packed(void *data, size_t element_bytes, int64_t seq_len,
    int64_t packed_heads, int64_t head_dim, int64_t first_head) {
    struct attention_tensor t = attention_dense(
        (char *)data + (size_t)(first_head * head_dim) * element_bytes, seq_len, packed_heads, head_dim);
    return t;
}

/* The names of the kernels, best first; NULL past the last. */
const char *attention_kernel_name(int index);

/* Where the named kernel can run: compute capabilities (10 * major + minor) and head dimensions. */
bool attention_kernel_suits(const char *kernel, int compute_capability, int64_t head_dim);
/* The best that suits; NULL if none does. */
const char *attention_kernel_best(int compute_capability, int64_t head_dim);

/* Bytes of params->saved and params->workspace that the named kernel needs for these sizes; 0 for an unknown kernel.
   Read only sizes, dtype and flags: usable where there is no GPU. The workspace serves forward and backward. */
size_t attention_saved_bytes(const char *kernel, const struct attention_params *params);
size_t attention_workspace_bytes(const char *kernel, const struct attention_params *params);

/* What forward and backward check before they launch anything: sizes, dtype, scale, strides, alignment, pointers. */
enum status attention_check(const char *kernel, const struct attention_params *params, bool backward);

/* The named kernel made ready on the current device, with what it needs there (the standard kernel: a cuBLAS handle).
   Fails in a build without CUDA, on an unknown name and on a device older than sm_80. One thread at a time may use
   the result; it must be made and used on the same device. */
struct attention;
enum status attention_create(struct attention **out, const char *kernel);
void attention_free(struct attention *attention); /* NULL is allowed */
enum status attention_forward(struct attention *attention, const struct attention_params *params);
enum status attention_backward(struct attention *attention, const struct attention_params *params);

/* The definition, in float64 on the CPU: O(seqlen_q * seqlen_k) time, one row of memory. Needs no saved and no
   workspace. Same checks, except for head_dim, alignment and dtype. */
enum status attention_reference_forward(const struct attention_params *params);
enum status attention_reference_backward(const struct attention_params *params);

#ifdef __cplusplus
}
#endif

#endif
