/* What is known of each device without having it: the profiles that the memory plan reads. And, in a build without
   CUDA, the answer that there is no GPU. */
#include "backend.h"

/* ---- attention's memory ---- */

static size_t no_bytes(struct attention_shape shape) {
    (void)shape;
    return 0;
}

/* (B, Hq, T, T) in bf16: P kept for backward; S, then dP, while it runs. */
static size_t score_matrix_bytes(struct attention_shape s) {
    return (size_t)s.batch * (size_t)s.heads * (size_t)s.seq_len * (size_t)s.seq_len *
           dtype_bytes(DTYPE_BF16);
}

/* The flash kernels' backward: dQ accumulated in fp32 over whole tiles, and two fp32 statistics a row. */
static size_t flash_workspace_bytes(struct attention_shape s) {
    size_t rows = (size_t)s.batch * (size_t)s.heads * (size_t)round_up(s.seq_len, 128);
    return rows * ((size_t)round_up(s.head_dim, 32) + 2) * dtype_bytes(DTYPE_F32);
}

/* ---- profiles ---- */

struct attention_profile {
    const char *name;
    size_t (*saved_bytes)(struct attention_shape shape);
    size_t (*workspace_bytes)(struct attention_shape shape);
};

static const struct attention_profile cpu_attention[] = {{"blocked", no_bytes, no_bytes}, {NULL, NULL, NULL}};
static const struct attention_profile cuda_attention[] = {
    {"fa2", no_bytes, flash_workspace_bytes},
    {"fa3", no_bytes, flash_workspace_bytes},
    {"fa1", no_bytes, flash_workspace_bytes},
    {"standard", score_matrix_bytes, score_matrix_bytes},
    {NULL, NULL, NULL},
};

/* The CUDA context, and cuBLASLt's workspace. */
static const size_t cuda_workspace_bytes = (512u + 32u) << 20;

/* `auto` is the first of a device's kernels. */
static const struct {
    struct backend_profile profile;
    const struct attention_profile *attention;
} devices[] = {
    {{.name = "cpu",
         .activation_dtype = DTYPE_F32,
         .parameter_dtype = DTYPE_F32,
         .statistic_dtype = DTYPE_F32,
         .gradient_dtype = DTYPE_F32,
         .master_dtype = DTYPE_F32},
        cpu_attention},
    {{.name = "cpu-f64",
         .activation_dtype = DTYPE_F64,
         .parameter_dtype = DTYPE_F64,
         .statistic_dtype = DTYPE_F64,
         .gradient_dtype = DTYPE_F64,
         .master_dtype = DTYPE_F64},
        cpu_attention},
    {{.name = "cuda",
         .activation_dtype = DTYPE_BF16,
         .parameter_dtype = DTYPE_BF16,
         .statistic_dtype = DTYPE_F32,
         .gradient_dtype = DTYPE_F32,
         .master_dtype = DTYPE_F32,
         .workspace_bytes = cuda_workspace_bytes},
        cuda_attention},
};
enum { DEVICES = sizeof devices / sizeof devices[0] };

static enum status find_attention(
    struct backend_profile *profile, const struct attention_profile *kernels, const char *name) {
    char known[128] = "auto";
    for (const struct attention_profile *kernel = kernels; kernel->name != NULL; kernel++) {
        if (strcmp(name, kernel->name) == 0 || (strcmp(name, "auto") == 0 && kernel == kernels)) {
            profile->attention = kernel->name;
            profile->attention_saved_bytes = kernel->saved_bytes;
            profile->attention_workspace_bytes = kernel->workspace_bytes;
            return STATUS_OK;
        }
        size_t length = strlen(known);
        snprintf(known + length, sizeof known - length, ", %s", kernel->name);
    }
    return fail("--attention: no kernel \"%s\" on device %s; it has: %s", name, profile->name, known);
}

enum status backend_profile_find(struct backend_profile *out, const char *device, const char *attention) {
    for (int i = 0; i < DEVICES; i++) {
        if (strcmp(device, devices[i].profile.name) == 0) {
            *out = devices[i].profile;
            return find_attention(out, devices[i].attention, attention);
        }
    }
    return fail("--device: no device \"%s\"; there are: cpu, cpu-f64, cuda", device);
}

/* ---- builds without CUDA ---- */

#ifndef WITH_CUDA

enum status backend_cuda_create(struct backend **out, int device, const char *attention) {
    (void)attention;
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
