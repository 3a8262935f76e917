/* The host's side of attention.h that needs no GPU: the table of kernels, their memory, and the checks that every call
   passes before anything is launched. */
#include "attention/kernel.h"

#include <limits.h>
#include <math.h>

enum {
    VECTOR_BYTES = 16,     /* of every load and store of the kernels */
    ALIGNMENT_BYTES = 256, /* of saved and workspace, and of what lies in them */
    LARGEST_HEAD_DIM = 256,
    LARGEST_SIZE = 1 << 30 /* of any dimension: positions fit an int with room to spare */
};

/* ---- memory ---- */

/* a * b * c * d * bytes rounded up to ALIGNMENT_BYTES; SIZE_MAX if that is beyond any memory. */
static size_t array_bytes(int64_t a, int64_t b, int64_t c, int64_t d, size_t bytes) {
    double exact = (double)a * (double)b * (double)c * (double)d * (double)bytes;
    return exact < 0x1p60 ? (size_t)round_up(a * b * c * d * (int64_t)bytes, ALIGNMENT_BYTES) : SIZE_MAX;
}

/* a + b, where SIZE_MAX stays. */
static size_t add_bytes(size_t a, size_t b) {
    return a == SIZE_MAX || b == SIZE_MAX ? SIZE_MAX : a + b;
}

static size_t no_bytes(const struct attention_params *p) {
    (void)p;
    return 0;
}

/* P, written by forward and read by backward. */
static size_t standard_saved_bytes(const struct attention_params *p) {
    return array_bytes(p->batch, p->heads, p->seqlen_q, standard_row_elements(p), dtype_bytes(p->dtype));
}

struct standard_workspace standard_workspace(const struct attention_params *p) {
    bool grouped = p->heads != p->kv_heads;
    struct standard_workspace w;
    w.sums_offset = array_bytes(1, p->heads, p->seqlen_q, standard_row_elements(p), dtype_bytes(p->dtype));
    w.bytes = add_bytes(
        w.sums_offset, grouped ? array_bytes(2, p->seqlen_k, p->kv_heads, p->head_dim, sizeof(float)) : 0);
    return w;
}

static size_t standard_workspace_bytes(const struct attention_params *p) {
    return standard_workspace(p).bytes;
}

int fa2_padded_head_dim(int64_t head_dim) {
    static const int dims[] = {64, 80, 96, 128, 192, 256};
    int i = 0;
    while (dims[i] < min_i64(head_dim, 256)) {
        i++;
    }
    return dims[i];
}

/* How many thread blocks share the blocks of keys of a head when dQ has to be deterministic: one for every 1024 keys up to
   4 of them, then one for every 2048 up to 16. It depends on the keys alone, so that a sequence has the same bits in any
   batch. More would be faster when batch and heads are few, but each adds to the work of `finish` and to memory. */
static int64_t fa2_splits(int64_t seqlen_k) {
    int64_t splits = max_i64(min_i64(ceil_div(seqlen_k, 1024), 4), ceil_div(seqlen_k, 2048));
    return max_i64(min_i64(splits, 16), 1);
}

struct fa2_workspace fa2_workspace(const struct attention_params *p) {
    struct fa2_workspace w;
    int64_t dim = fa2_padded_head_dim(p->head_dim);
    w.padded_rows = round_up(p->seqlen_q, FA2_LARGEST_ROW_BLOCK);
    w.splits = p->deterministic ? fa2_splits(p->seqlen_k) : 1;
    w.statistics_offset = 0;
    w.dq_offset = array_bytes(p->batch, p->heads, 2, w.padded_rows, sizeof(float));
    w.bytes =
        add_bytes(w.dq_offset, array_bytes(w.splits * p->batch, p->heads, w.padded_rows, dim, sizeof(float)));
    return w;
}

int fa3_backward_head_dim(int64_t head_dim) {
    return head_dim <= 64 ? 64 : head_dim <= 80 ? 80 : FA3_LARGEST_BACKWARD_HEAD_DIM;
}

struct fa3_workspace fa3_workspace(const struct attention_params *p) {
    enum { SMALLEST_ROW_BLOCK = 64 };
    struct fa2_workspace shared = fa2_workspace(p);
    struct fa3_workspace w;
    w.counters_offset =
        p->head_dim > FA3_LARGEST_BACKWARD_HEAD_DIM
            ? shared.bytes
            : add_bytes(shared.dq_offset, array_bytes(p->batch, p->heads, shared.padded_rows,
                                              fa3_backward_head_dim(p->head_dim), sizeof(float)));
    int64_t counters = shared.padded_rows / SMALLEST_ROW_BLOCK + 2;
    w.counters_bytes = array_bytes(p->batch, p->heads, counters, 1, sizeof(int));
    w.bytes = add_bytes(w.counters_offset, w.counters_bytes);
    return w;
}

static size_t fa3_workspace_bytes(const struct attention_params *p) {
    return fa3_workspace(p).bytes;
}

/* fa1's m and l */
static size_t fa1_saved_bytes(const struct attention_params *p) {
    return array_bytes(p->batch, p->heads, 2, p->seqlen_q, sizeof(float));
}

/* The rungs below fa2 have the same passes around them. */
static size_t fa2_workspace_bytes(const struct attention_params *p) {
    return fa2_workspace(p).bytes;
}

/* ---- the table ---- */

#ifdef WITH_CUDA
#define FUNCTIONS(name) , name##_forward, name##_backward
#else
#define FUNCTIONS(name)
#endif

static const struct attention_kernel kernels[] = {
    {"fa3", 90, 90, no_bytes, fa3_workspace_bytes FUNCTIONS(fa3)},
    {"fa2", 80, INT_MAX, no_bytes, fa2_workspace_bytes FUNCTIONS(fa2)},
    {"cut2", 80, INT_MAX, no_bytes, fa2_workspace_bytes FUNCTIONS(cut2)},
    {"cut1", 80, INT_MAX, no_bytes, fa2_workspace_bytes FUNCTIONS(cut1)},
    {"fa1", 80, INT_MAX, fa1_saved_bytes, fa2_workspace_bytes FUNCTIONS(fa1)},
    {"standard", 80, INT_MAX, standard_saved_bytes, standard_workspace_bytes FUNCTIONS(standard)},
};
enum { KERNELS = sizeof kernels / sizeof kernels[0] };

const char *attention_kernel_name(int index) {
    return index >= 0 && index < KERNELS ? kernels[index].name : NULL;
}

const struct attention_kernel *attention_kernel_find(const char *name) {
    for (int i = 0; i < KERNELS; i++) {
        if (strcmp(kernels[i].name, name) == 0) {
            return &kernels[i];
        }
    }
    return NULL;
}

enum status attention_kernel_unknown(const char *name) {
    char known[256] = "";
    for (int i = 0; i < KERNELS; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i > 0 ? ", " : "", kernels[i].name);
    }
    return fail("attention: there is no kernel \"%s\"; known are %s", name, known);
}

bool attention_kernel_suits(const char *kernel, int compute_capability, int64_t head_dim) {
    const struct attention_kernel *found = attention_kernel_find(kernel);
    return found != NULL && compute_capability >= found->first_capability &&
           compute_capability <= found->last_capability && head_dim <= LARGEST_HEAD_DIM;
}

const char *attention_kernel_best(int compute_capability, int64_t head_dim) {
    for (int i = 0; i < KERNELS; i++) {
        if (attention_kernel_suits(kernels[i].name, compute_capability, head_dim)) {
            return kernels[i].name;
        }
    }
    return NULL;
}

size_t attention_saved_bytes(const char *kernel, const struct attention_params *p) {
    const struct attention_kernel *found = attention_kernel_find(kernel);
    return found ? found->saved_bytes(p) : 0;
}

size_t attention_workspace_bytes(const char *kernel, const struct attention_params *p) {
    const struct attention_kernel *found = attention_kernel_find(kernel);
    return found ? found->workspace_bytes(p) : 0;
}

/* ---- checks ---- */

static enum status check_sizes(const struct attention_params *p, bool reference) {
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {{"batch", p->batch}, {"seqlen_q", p->seqlen_q}, {"seqlen_k", p->seqlen_k},
        {"heads", p->heads}, {"kv_heads", p->kv_heads}, {"head_dim", p->head_dim}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value < 1 || sizes[i].value > LARGEST_SIZE) {
            return fail("attention: %s is %lld, must be 1 to 2^30", sizes[i].name, (long long)sizes[i].value);
        }
    }
    if (p->heads % p->kv_heads != 0) {
        return fail("attention: heads %lld is not a multiple of kv_heads %lld", (long long)p->heads,
            (long long)p->kv_heads);
    }
    if (!reference && (p->head_dim % 8 != 0 || p->head_dim > LARGEST_HEAD_DIM)) {
        return fail(
            "attention: head_dim is %lld, must be a multiple of 8, at most %d: pad Q, K and V with zeros",
            (long long)p->head_dim, LARGEST_HEAD_DIM);
    }
    if (!(p->scale > 0) || !isfinite(p->scale)) {
        return fail("attention: scale is %g, must be positive", p->scale);
    }
    return STATUS_OK;
}

/* Strides of dimensions of one element are never used and so are not looked at. */
static enum status check_tensor(const char *name, const struct attention_params *p,
    const struct attention_tensor *t, int64_t seq_len, int64_t heads, bool written) {
    if (t->data == NULL) {
        return fail("attention: %s has no data", name);
    }
    if (p->head_dim > 1 && t->dim_stride != 1) {
        return fail(
            "attention: %s has stride %lld in its last dimension, must be 1: make it contiguous there", name,
            (long long)t->dim_stride);
    }
    const struct {
        const char *name;
        int64_t size, stride;
    } dimensions[] = {{"batch", p->batch, t->batch_stride}, {"seq", seq_len, t->seq_stride},
        {"head", heads, t->head_stride}};
    int64_t unit = p->dtype == DTYPE_F64 ? 1 : VECTOR_BYTES / (int64_t)dtype_bytes(p->dtype);
    for (size_t i = 0; i < sizeof dimensions / sizeof dimensions[0]; i++) {
        int64_t stride = dimensions[i].stride;
        if (dimensions[i].size == 1) {
            continue;
        }
        if (stride < 0 || stride % unit != 0) {
            return fail("attention: %s_stride of %s is %lld elements, must be a multiple of %lld",
                dimensions[i].name, name, (long long)stride, (long long)unit);
        }
        if (written && stride < p->head_dim) {
            return fail("attention: %s_stride of %s is %lld: its rows of %lld overlap, and it is written",
                dimensions[i].name, name, (long long)stride, (long long)p->head_dim);
        }
    }
    if (p->dtype != DTYPE_F64 && (uintptr_t)t->data % VECTOR_BYTES != 0) {
        return fail("attention: %s is at %p, must be a multiple of %d bytes", name, t->data, VECTOR_BYTES);
    }
    return STATUS_OK;
}

static enum status check_tensors(const struct attention_params *p, bool backward) {
    CHECK(check_tensor("q", p, &p->q, p->seqlen_q, p->heads, false));
    CHECK(check_tensor("k", p, &p->k, p->seqlen_k, p->kv_heads, false));
    CHECK(check_tensor("v", p, &p->v, p->seqlen_k, p->kv_heads, false));
    CHECK(check_tensor("o", p, &p->o, p->seqlen_q, p->heads, !backward));
    if (backward) {
        CHECK(check_tensor("d_o", p, &p->d_o, p->seqlen_q, p->heads, false));
        CHECK(check_tensor("dq", p, &p->dq, p->seqlen_q, p->heads, true));
        CHECK(check_tensor("dk", p, &p->dk, p->seqlen_k, p->kv_heads, true));
        CHECK(check_tensor("dv", p, &p->dv, p->seqlen_k, p->kv_heads, true));
    }
    if (p->lse == NULL) {
        return fail("attention: lse has no data");
    }
    return STATUS_OK;
}

static enum status check_memory(const struct attention_kernel *kernel, const struct attention_params *p) {
    size_t saved = kernel->saved_bytes(p), workspace = kernel->workspace_bytes(p);
    if (saved == SIZE_MAX || workspace == SIZE_MAX) {
        return fail("attention %s: these sizes need more memory than can be addressed", kernel->name);
    }
    if (saved > 0 && p->saved == NULL) {
        return fail(
            "attention %s: saved is NULL, needs %zu bytes (attention_saved_bytes)", kernel->name, saved);
    }
    if (workspace > 0 && p->workspace == NULL) {
        return fail("attention %s: workspace is NULL, needs %zu bytes (attention_workspace_bytes)",
            kernel->name, workspace);
    }
    if ((uintptr_t)p->workspace % ALIGNMENT_BYTES != 0 || (uintptr_t)p->saved % ALIGNMENT_BYTES != 0) {
        return fail("attention %s: saved %p or workspace %p is not a multiple of %d bytes", kernel->name,
            p->saved, p->workspace, ALIGNMENT_BYTES);
    }
    return STATUS_OK;
}

enum status attention_check(const char *name, const struct attention_params *p, bool backward) {
    const struct attention_kernel *kernel = attention_kernel_find(name);
    if (kernel == NULL) {
        return attention_kernel_unknown(name);
    }
    if (p->dtype != DTYPE_BF16 && p->dtype != DTYPE_F16) {
        return fail("attention %s: dtype %s, must be BF16 or F16", name, dtype_name(p->dtype));
    }
    CHECK(check_sizes(p, false));
    CHECK(check_tensors(p, backward));
    return check_memory(kernel, p);
}

enum status attention_reference_check(const struct attention_params *p, bool backward) {
    if (p->dtype != DTYPE_F64) {
        return fail("attention reference: dtype %s, must be F64", dtype_name(p->dtype));
    }
    CHECK(check_sizes(p, true));
    return check_tensors(p, backward);
}

#ifndef WITH_CUDA
enum status attention_create(struct attention **out, const char *kernel) {
    *out = NULL;
    return attention_kernel_find(kernel) == NULL
               ? attention_kernel_unknown(kernel)
               : fail("attention %s: this build has no CUDA: build with CUDA=1", kernel);
}

void attention_free(struct attention *attention) {
    (void)attention;
}

enum status attention_forward(struct attention *attention, const struct attention_params *params) {
    (void)attention, (void)params;
    return fail("attention: this build has no CUDA");
}

enum status attention_backward(struct attention *attention, const struct attention_params *params) {
    return attention_forward(attention, params);
}
#endif
