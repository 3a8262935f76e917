/* What a kernel of attention.h consists of. The table in params.c lists them; each kernel's files fill in the rest. */
#ifndef ATTENTION_KERNEL_H
#define ATTENTION_KERNEL_H

#include "attention/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

struct attention_kernel {
    const char *name;
    int first_capability, last_capability; /* of the GPUs it runs on: 10 * major + minor */
    size_t (*saved_bytes)(const struct attention_params *p);
    size_t (*workspace_bytes)(const struct attention_params *p);
#ifdef WITH_CUDA
    /* The arguments have passed attention_check. */
    enum status (*forward)(const struct attention *a, const struct attention_params *p);
    enum status (*backward)(const struct attention *a, const struct attention_params *p);
#endif
};

/* A kernel on a device. */
struct attention {
    const struct attention_kernel *kernel;
    void *cublas;            /* cublasHandle_t of the standard kernel; NULL for the others */
    int multiprocessors;     /* of the device */
    int compute_capability;  /* 10 * major + minor */
    void *encode_tensor_map; /* cuTensorMapEncodeTiled of the driver; NULL before sm_90 */
};

/* NULL when there is none of that name. */
const struct attention_kernel *attention_kernel_find(const char *name);
/* The message for an unknown name: lists the known ones. */
enum status attention_kernel_unknown(const char *name);

/* attention_check for the reference. */
enum status attention_reference_check(const struct attention_params *p, bool backward);

/* ---- standard.cu ---- */

/* A row of S, P, dP or dS in memory: a multiple of 16 bytes. */
static inline int64_t standard_row_elements(const struct attention_params *p) {
    return round_up(p->seqlen_k, 8);
}

/* dP of one sequence [heads, seqlen_q, row elements]; with grouped heads dK and dV of one sequence in fp32
   [2, seqlen_k, kv_heads, head_dim] behind it. */
struct standard_workspace {
    size_t sums_offset;
    size_t bytes;
};
struct standard_workspace standard_workspace(const struct attention_params *p);

/* ---- fa2_*.cu ---- */

/* The smallest head dimension with code of its own that holds head_dim. */
int fa2_padded_head_dim(int64_t head_dim);

enum { FA2_LARGEST_ROW_BLOCK = 128 }; /* the rows of a head are padded to a multiple of it in the workspace */
struct fa2_workspace {
    int64_t padded_rows;      /* of one head */
    size_t statistics_offset; /* fp32 [batch, heads, 2, padded_rows]: lse * log2(e), and D */
    int64_t splits;           /* of the deterministic backward: how many sums of dQ there are; else 1 */
    size_t dq_offset;         /* fp32 [splits, batch, heads, padded_rows, padded head_dim], in fragments */
    size_t bytes;
};
struct fa2_workspace fa2_workspace(const struct attention_params *p);

/* ---- fa3_*.cu ---- */

/* Larger ones have a forward pass of fa3's and the backward pass of fa2. */
enum { FA3_LARGEST_BACKWARD_HEAD_DIM = 128 };

/* The head dimension that backward computes with: 64, 80 or 128. */
int fa3_backward_head_dim(int64_t head_dim);

/* Begins as fa2's: for heads with a backward pass of fa3's with one split and the head dimension of that pass. */
struct fa3_workspace {
    size_t counters_offset; /* int [1 + batch heads (row blocks + 1)] or more: what thread blocks have done */
    size_t counters_bytes;
    size_t bytes;
};
struct fa3_workspace fa3_workspace(const struct attention_params *p);

#ifdef WITH_CUDA
enum status standard_forward(const struct attention *a, const struct attention_params *p);
enum status standard_backward(const struct attention *a, const struct attention_params *p);
enum status fa1_forward(const struct attention *a, const struct attention_params *p);
enum status fa1_backward(const struct attention *a, const struct attention_params *p);
enum status cut1_forward(const struct attention *a, const struct attention_params *p);
enum status cut1_backward(const struct attention *a, const struct attention_params *p);
enum status cut2_forward(const struct attention *a, const struct attention_params *p);
enum status cut2_backward(const struct attention *a, const struct attention_params *p);
enum status fa2_forward(const struct attention *a, const struct attention_params *p);
enum status fa2_backward(const struct attention *a, const struct attention_params *p);
enum status fa3_forward(const struct attention *a, const struct attention_params *p);
enum status fa3_backward(const struct attention *a, const struct attention_params *p);
bool fa3_is_compiled(void); /* for the current device */
#endif

#ifdef __cplusplus
}
#endif

#endif
