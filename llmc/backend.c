/* What is known of each device without having it: the profiles that the memory plan reads. And, in a build without
   CUDA, the answer that there is no GPU. */
#include "backend.h"

#include "attention/attention.h"

/* The CPU's own kernel: goes through the keys in blocks, keeps nothing and needs no workspace. */
static const char *const cpu_attention = "blocked";

/* The CUDA context, cuBLASLt's workspace and the ops' scratch memory, as an H200 shows them. */
static const size_t cuda_workspace_bytes = (size_t)690 << 20;
static const size_t nccl_bytes = (size_t)800 << 20; /* buffers and kernels of NCCL, as two H200s show them */

static const struct backend_profile devices[] = {
    {.name = "cpu",
        .activation_dtype = DTYPE_F32,
        .parameter_dtype = DTYPE_F32,
        .statistic_dtype = DTYPE_F32,
        .gradient_dtype = DTYPE_F32,
        .master_dtype = DTYPE_F32},
    {.name = "cpu-f64",
        .activation_dtype = DTYPE_F64,
        .parameter_dtype = DTYPE_F64,
        .statistic_dtype = DTYPE_F64,
        .gradient_dtype = DTYPE_F64,
        .master_dtype = DTYPE_F64},
    {.name = "cuda",
        .activation_dtype = DTYPE_BF16,
        .parameter_dtype = DTYPE_BF16,
        .statistic_dtype = DTYPE_F32,
        .gradient_dtype = DTYPE_F32,
        .master_dtype = DTYPE_F32,
        .workspace_bytes = cuda_workspace_bytes,
        .comm_bytes = nccl_bytes},
};
enum { DEVICES = sizeof devices / sizeof devices[0] };

/* ---- attention ---- */

/* Kernel `index` of a device, best first; NULL past the last. */
static const char *attention_name(const struct backend_profile *device, int index) {
    if (strcmp(device->name, "cuda") == 0) {
        return attention_kernel_name(index);
    }
    return index == 0 ? cpu_attention : NULL;
}

/* "auto": the best kernel that runs on every GPU, with every head dimension. */
static const char *general_attention(const struct backend_profile *device) {
    enum { OLDEST_CAPABILITY = 80, LARGEST_HEAD_DIM = 256 };
    return strcmp(device->name, "cuda") == 0 ? attention_kernel_best(OLDEST_CAPABILITY, LARGEST_HEAD_DIM)
                                             : cpu_attention;
}

static enum status find_attention(struct backend_profile *device, const char *name) {
    char known[128] = "auto";
    if (strcmp(name, "auto") == 0) {
        name = general_attention(device);
    }
    for (int i = 0; attention_name(device, i) != NULL; i++) {
        const char *kernel = attention_name(device, i);
        if (strcmp(name, kernel) == 0) {
            device->attention = kernel;
            return STATUS_OK;
        }
        size_t length = strlen(known);
        snprintf(known + length, sizeof known - length, ", %s", kernel);
    }
    return fail("--attention: no kernel \"%s\" on device %s; it has: %s", name, device->name, known);
}

static struct attention_params attention_sizes(struct attention_shape s) {
    struct attention_params p = {.dtype = DTYPE_BF16,
        .batch = s.batch,
        .seqlen_q = s.seq_len,
        .seqlen_k = s.seq_len,
        .heads = s.heads,
        .kv_heads = s.kv_heads,
        .head_dim = s.head_dim,
        .causal = true,
        .deterministic = true};
    return p;
}

size_t backend_attention_saved_bytes(const struct backend_profile *device, struct attention_shape shape) {
    struct attention_params sizes = attention_sizes(shape);
    return strcmp(device->attention, cpu_attention) == 0 ? 0
                                                         : attention_saved_bytes(device->attention, &sizes);
}

size_t backend_attention_workspace_bytes(const struct backend_profile *device, struct attention_shape shape) {
    struct attention_params sizes = attention_sizes(shape);
    return strcmp(device->attention, cpu_attention) == 0
               ? 0
               : attention_workspace_bytes(device->attention, &sizes);
}

/* ---- profiles ---- */

enum status backend_profile_find(struct backend_profile *out, const char *device, const char *attention) {
    for (int i = 0; i < DEVICES; i++) {
        if (strcmp(device, devices[i].name) == 0) {
            *out = devices[i];
            return find_attention(out, attention);
        }
    }
    return fail("--device: no device \"%s\"; there are: cpu, cpu-f64, cuda", device);
}

/* ---- builds without CUDA ---- */

#ifndef WITH_CUDA

const char *backend_cuda_attention(int device, int64_t head_dim) {
    (void)device;
    (void)head_dim;
    return "auto";
}

enum status backend_cuda_create(struct backend **out, int device, const char *attention, bool autotune) {
    (void)attention;
    (void)autotune;
    *out = NULL;
    return fail(
        "--device cuda: GPU %d is out of reach, this program was built without CUDA; use --device cpu or "
        "build where nvcc is",
        device);
}

int backend_cuda_device_count(void) {
    return 0;
}

#endif
