/* What a device must be able to do for the model: one struct of functions. model.c and optimizer.c call
   nothing else. llmc/cpu/ implements it in fp32 (and, compiled a second time, in fp64: the oracle of the
   tests); llmc/cuda/ in bf16 + fp32.

   Conventions
   - `void *` and struct tensor point into the backend's own memory (device memory on a GPU), row-major.
   - Dtypes by role, told by the backend: activation, parameter, statistic (LayerNorm mean and 1/std, softmax
     logsumexp, losses, the control block, optimizer moments). Arguments are of their role's dtype; gradients
     of parameters carry their dtype in a struct tensor because --grad-dtype chooses it.
   - Calls are enqueued in order on the backend's compute stream; only copy_to_host and synchronize wait.
   - Every op is deterministic: same inputs, same bits.
   - "accumulate" false writes the result, true adds it to what is there.
   - Token arrays are int32 in the backend's memory. A target of -1 means "no loss here".
   Errors: STATUS_ERROR with a message (launch failed, shape not supported), STATUS_OUT_OF_MEMORY. */
#ifndef LLMC_BACKEND_H
#define LLMC_BACKEND_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

struct tensor {
    void *data;
    enum dtype dtype;
};

/* The element at `index`, as a tensor. */
static inline struct tensor tensor_at(struct tensor t, int64_t index) {
    struct tensor moved = {(char *)t.data + (size_t)index * dtype_bytes(t.dtype), t.dtype};
    return moved;
}

struct attention_shape {
    int batch, seq_len; /* B, T */
    int heads;          /* query heads Hq */
    int kv_heads;       /* key/value heads Hkv; divides heads */
    int head_dim;       /* D */
};

enum linear_epilogue {
    LINEAR_BIAS,      /* out = in W^T + bias (bias may be NULL) */
    LINEAR_BIAS_GELU, /* pre_gelu = in W^T + bias, out = gelu(pre_gelu) */
};

/* The control block: CONTROL_COUNT elements of statistic dtype in the backend's memory. The step's loss and
   gradient norm meet here, the decision whether to apply the step is taken here, and AdamW reads it here, all
   without the host. */
enum control_index {
    CONTROL_LOSS_SUM,       /* in: sum of token losses of the step, over ranks after the all-reduce */
    CONTROL_NORM_SQUARED,   /* in: sum of squared gradients, over shards after the all-reduce */
    CONTROL_LOSS,           /* out: mean loss */
    CONTROL_NORM,           /* out: global gradient norm before clipping */
    CONTROL_SCALE,          /* out: factor on every gradient, min(1, clip / norm) */
    CONTROL_APPLY,          /* out: 1 if AdamW may change the weights, 0 if the step is skipped */
    CONTROL_OPTIMIZER_STEP, /* kept: number of applied steps, counted up when APPLY */
    CONTROL_CORRECTION1,    /* out: 1 - beta1^OPTIMIZER_STEP */
    CONTROL_CORRECTION2,    /* out: 1 - beta2^OPTIMIZER_STEP */
    CONTROL_COUNT
};

struct step_limits {
    double tokens;       /* the global batch: loss = LOSS_SUM / tokens */
    double clip;         /* largest gradient norm; 0: no clipping */
    double loss_limit;   /* apply only if loss <= this; INFINITY: no limit. A NaN is never applied */
    double norm_limit;   /* the same for the norm before clipping */
    double beta1, beta2; /* for the bias corrections */
};

/* Slots of marks in time: the profiler's, then the optimizer's. */
enum { PROFILE_MARKS = 1 << 14, MARK_BACKWARD_DONE = PROFILE_MARKS, MARK_STEP_AGREED, BACKEND_MARKS };

struct adamw_options {
    double learning_rate, beta1, beta2, epsilon, weight_decay;
};

/* What the memory plan must know of a device, also of one that is not there. */
struct backend_profile {
    const char *name;      /* "cpu", "cpu-f64", "cuda" */
    const char *attention; /* the attention kernel's name */
    enum dtype activation_dtype, parameter_dtype, statistic_dtype;
    enum dtype gradient_dtype; /* default for parameter gradients */
    enum dtype master_dtype; /* of the optimizer's master weights; equal to parameter_dtype: there are none */
    size_t workspace_bytes;  /* what the device's own libraries and contexts take whatever the model */
    size_t comm_bytes;       /* and what moves data between several ranks takes beside */
};

struct backend {
    struct backend_profile profile;
    char device_name[128];       /* "NVIDIA H200"; "CPU, 2 threads" */
    double peak_tflops;          /* dense bf16 peak; 0: unknown */
    struct backend_state *state; /* the implementation's own */

    void (*free)(struct backend *b);

    /* ---- memory ---- */
    enum status (*memory_allocate)(
        struct backend *b, void **out, size_t bytes); /* 256-byte aligned, not zeroed */
    void (*memory_free)(struct backend *b, void *pointer);
    /* Bytes in use now and, as far as it was looked, at most so far, and the device's total; 0: unknown. On the CPU what
       this backend has allocated; on a GPU all that its driver reports, also of other processes. */
    void (*memory_usage)(struct backend *b, uint64_t *used, uint64_t *peak, uint64_t *total);
    /* The host buffer may be reused at once. */
    enum status (*copy_to_device)(struct backend *b, void *device, const void *host, size_t bytes);
    /* Waits for all work enqueued before. */
    enum status (*copy_to_host)(struct backend *b, void *host, const void *device, size_t bytes);
    enum status (*copy)(struct backend *b, void *to, const void *from, size_t bytes); /* within the device */
    enum status (*set_zero)(struct backend *b, void *device, size_t bytes);
    enum status (*synchronize)(struct backend *b);

    /* ---- values ---- */
    /* out[i] = in[i], converted; F32, F64 (CPU), BF16, F16. */
    enum status (*convert)(struct backend *b, struct tensor out, struct tensor in, int64_t count);
    /* out[i] += in[i], in any pair of these types. */
    enum status (*add)(struct backend *b, struct tensor out, struct tensor in, int64_t count);
    enum status (*fill)(struct backend *b, struct tensor out, double value, int64_t count);
    /* out[i] = std * z(seed, stream, first + i), z as random_normal of random.h: the same values on every backend
       (rounded to out.dtype), and over several calls the same in any split. */
    enum status (*random_normal)(struct backend *b, struct tensor out, int64_t count, uint64_t seed,
        uint64_t stream, int64_t first, double std);

    /* ---- embedding ---- */
    /* out (B,T,C) = token_table[tokens (B,T)] (V,C) + position_table (T,C) */
    enum status (*embedding_forward)(struct backend *b, void *out, const int32_t *tokens,
        const void *token_table, const void *position_table, int batch, int seq_len, int channels);
    /* d_token_table (V,C) += sums over equal tokens (always accumulates: the head wrote it before);
       d_position_table (T,C) = or += sums over the batch. */
    enum status (*embedding_backward)(struct backend *b, struct tensor d_token_table,
        struct tensor d_position_table, const void *d_out, const int32_t *tokens, int batch, int seq_len,
        int channels, int vocab_size, bool accumulate_position);

    /* ---- layernorm, epsilon 1e-5, over the last dimension ---- */
    /* out (N,C), mean (N), rstd (N) from in (N,C) */
    enum status (*layernorm_forward)(struct backend *b, void *out, void *mean, void *rstd, const void *in,
        const void *weight, const void *bias, int64_t rows, int channels);
    /* sum (N,C) = a + addend; then layernorm_forward of sum. `sum` may be `a` or `addend`. */
    enum status (*residual_layernorm_forward)(struct backend *b, void *sum, void *out, void *mean, void *rstd,
        const void *a, const void *addend, const void *weight, const void *bias, int64_t rows, int channels);
    /* out = a + addend, `count` elements each; `out` may be `a` or `addend` */
    enum status (*residual_forward)(
        struct backend *b, void *out, const void *a, const void *addend, int64_t count);
    /* d_in (N,C) += dL/din when accumulate_input (the residual stream's gradient), else = .
       d_weight (C), d_bias (C) = or += . `in` is what the forward normalised. */
    enum status (*layernorm_backward)(struct backend *b, void *d_in, struct tensor d_weight,
        struct tensor d_bias, const void *d_out, const void *in, const void *weight, const void *mean,
        const void *rstd, int64_t rows, int channels, bool accumulate_input, bool accumulate_parameters);

    /* ---- linear: weight (O,I) row-major, activations (N,I) and (N,O) ---- */
    enum status (*linear_forward)(struct backend *b, void *out, void *pre_gelu, const void *in,
        const void *weight, const void *bias, int64_t rows, int in_features, int out_features,
        enum linear_epilogue epilogue);
    /* d_in (N,I) = d_out (N,O) W; with pre_gelu (N,I) not NULL: times gelu'(pre_gelu), the gradient before the GELU
       that made `in`. */
    enum status (*linear_backward_input)(struct backend *b, void *d_in, const void *d_out, const void *weight,
        const void *pre_gelu, int64_t rows, int in_features, int out_features);
    /* d_weight (O,I) = or += d_out^T in; d_bias (O) = or += column sums of d_out; the data of either may be NULL */
    enum status (*linear_backward_parameters)(struct backend *b, struct tensor d_weight, struct tensor d_bias,
        const void *d_out, const void *in, int64_t rows, int in_features, int out_features, bool accumulate);

    /* ---- GELU, tanh form, on its own: bitwise what LINEAR_BIAS_GELU gives ---- */
    enum status (*gelu_forward)(struct backend *b, void *out, const void *in, int64_t count);

    /* ---- attention: causal self-attention over packed qkv (B,T,Hq+2Hkv,D), scale 1/sqrt(D) ---- */
    /* out (B,T,Hq,D), logsumexp (B,Hq,T). `saved` holds what the kernel keeps for backward
       (backend_attention_saved_bytes; may be NULL where that is 0), `workspace` what it needs while it runs. */
    enum status (*attention_forward)(struct backend *b, void *out, void *logsumexp, void *saved,
        void *workspace, const void *qkv, struct attention_shape shape);
    /* d_qkv (B,T,Hq+2Hkv,D), packed like qkv, every element written. */
    enum status (*attention_backward)(struct backend *b, void *d_qkv, void *workspace, const void *d_out,
        const void *out, const void *logsumexp, const void *saved, const void *qkv,
        struct attention_shape shape);

    /* The attention of generation: shape.seq_len = T new tokens of each sequence come after `past` earlier ones. Their
       keys and values go from qkv (B,T,Hq+2Hkv,D) into cache (B,2,Hkv,capacity,D), first keys and then values, at
       positions past .. past+T-1; out (B,T,Hq,D): query t attends to positions 0 .. past+t. past + T <= capacity. */
    enum status (*attention_cached)(struct backend *b, void *out, void *cache, const void *qkv,
        struct attention_shape shape, int past, int capacity);

    /* ---- classifier ---- */
    /* losses (N) = -log softmax(logits)[target] over the first vocab_size of padded_vocab columns. With write_gradient,
       logits become d_logits = (softmax - onehot) * d_loss in place; padded columns become 0. target -1: loss 0,
       gradient 0. */
    enum status (*classifier)(struct backend *b, void *logits, void *losses, const int32_t *targets,
        int64_t rows, int vocab_size, int padded_vocab, double d_loss, bool write_gradient);

    /* ---- reductions and optimizer ---- */
    /* *sum (statistic dtype, one element) += sum of in (N), statistic dtype */
    enum status (*sum)(struct backend *b, void *sum, const void *in, int64_t count);
    /* *sum += sum of squares */
    enum status (*sum_squares)(struct backend *b, void *sum, struct tensor in, int64_t count);
    /* Fills the control block's outputs from its inputs. */
    enum status (*step_control)(struct backend *b, void *control, const struct step_limits *limits);
    /* One AdamW step (Loshchilov and Hutter, decoupled decay) over `count` elements, if control says APPLY; the first
       decay_count elements decay. `parameters` are written from `master` (rounded) where there are masters
       (master NULL: the parameters are their own). first_moment and second_moment are statistic dtype.
       stochastic_seed not 0: round parameters stochastically. */
    enum status (*adamw)(struct backend *b, void *parameters, void *master, void *first_moment,
        void *second_moment, struct tensor gradients, int64_t count, int64_t decay_count,
        const struct adamw_options *options, const void *control, uint64_t stochastic_seed);

    /* ---- time, for the profiler ---- */
    /* Remembers in slot `index` (below BACKEND_MARKS) when the compute stream gets here. */
    enum status (*mark)(struct backend *b, int index);
    /* Milliseconds from one mark to another; waits for both. */
    enum status (*elapsed)(struct backend *b, int from, int to, double *milliseconds);
    /* Named ranges for tools that draw timelines (NVTX); on the CPU nothing. */
    void (*range_begin)(struct backend *b, const char *name);
    void (*range_end)(struct backend *b);
};

/* The profile of "cpu", "cpu-f64" or "cuda" with the named attention kernel ("auto": the best for any GPU; the CPU
   has one kernel of its own). Unknown names are errors that list the known ones. */
enum status backend_profile_find(struct backend_profile *out, const char *device, const char *attention);

/* Bytes that the device's attention leaves in forward for backward (one layer), and bytes both need while running. */
size_t backend_attention_saved_bytes(const struct backend_profile *device, struct attention_shape shape);
size_t backend_attention_workspace_bytes(const struct backend_profile *device, struct attention_shape shape);

/* The devices that this build has. Each call makes one of its own. */
enum status backend_cpu_create(struct backend **out, int threads);     /* fp32; threads 0: as many as cores */
enum status backend_cpu_f64_create(struct backend **out, int threads); /* the oracle */
/* The best attention kernel for this very GPU and head dimension; "auto" where there is no such GPU. */
const char *backend_cuda_attention(int device, int64_t head_dim);
/* device: GPU index. attention: a kernel's name or "auto". autotune: choose the algorithm of each large matrix product by
   time when it first comes, and keep the choices on disk; else take cuBLASLt's first proposal, which is the same on every
   machine of a kind. In a build without CUDA, or with no GPU, fails and says so. */
enum status backend_cuda_create(struct backend **out, int device, const char *attention, bool autotune);
int backend_cuda_device_count(void); /* 0 without CUDA or without a GPU */

/* `count` values of statistic dtype from the backend's memory, at most CONTROL_COUNT; waits for them. */
static inline enum status backend_read_statistics(
    struct backend *b, const void *device, int count, double *values) {
    union {
        double f64[CONTROL_COUNT];
        float f32[CONTROL_COUNT];
    } host;
    enum dtype dtype = b->profile.statistic_dtype;
    CHECK(b->copy_to_host(b, &host, device, (size_t)count * dtype_bytes(dtype)));
    for (int i = 0; i < count; i++) {
        values[i] = dtype == DTYPE_F64 ? host.f64[i] : (double)host.f32[i];
    }
    return STATUS_OK;
}

#ifdef __cplusplus
}
#endif

#endif
