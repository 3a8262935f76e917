/* The CUDA backend's life and memory: one GPU, one compute stream that everything is enqueued on, and the table of ops.

   Only copy_to_host and synchronize wait for the GPU. Copies to the GPU go through a ring of pinned slots: the host
   runs ahead of the GPU and waits only when a slot's copy from several copies ago is not done. Nothing is allocated
   once every shape has been seen: the ops' scratch memory and the products' plans only grow. */
#include "cuda.cuh"

#include "attention/attention.h"
#include "llmc/gpus.h"

#include <nvtx3/nvToolsExt.h>
#include <stdlib.h>

static const double GIB = 1024.0 * 1024.0 * 1024.0;

enum { SCRATCH_BYTES_AT_START = 32 << 20 };

enum status cuda_failed(cudaError_t error, const char *what) {
    switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorUnknown:
        return fail_as(STATUS_PEER_LOST, "CUDA: %s: %s; the GPU failed, dmesg says more", what,
            cudaGetErrorString(error));
    default:
        return fail("CUDA: %s: %s", what, cudaGetErrorString(error));
    }
}

int backend_cuda_device_count(void) {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/* ---- memory ---- */

/* Of the whole device, as its driver reports: the context, libraries and other processes on it included. */
static void memory_usage(struct backend *b, uint64_t *used, uint64_t *peak, uint64_t *total) {
    size_t free_bytes = 0, total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    *total = total_bytes;
    *used = total_bytes - free_bytes;
    if (*used > b->state->peak_bytes) {
        b->state->peak_bytes = *used;
    }
    *peak = b->state->peak_bytes;
}

static enum status memory_allocate(struct backend *b, void **out, size_t bytes) {
    *out = NULL;
    cudaError_t error = cudaMalloc(out, bytes > 0 ? bytes : 1);
    uint64_t used, peak, total;
    memory_usage(b, &used, &peak, &total);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* it has been told */
        return fail_as(STATUS_OUT_OF_MEMORY,
            "GPU %d (%s) is out of memory: %.2f GiB asked, %.2f of its %.2f GiB free: lower --micro-batch or "
            "raise "
            "--recompute",
            b->state->device, b->device_name, (double)bytes / GIB, (double)(total - used) / GIB,
            (double)total / GIB);
    }
    CUDA_CHECK(error);
    return STATUS_OK;
}

static void memory_free(struct backend *b, void *pointer) {
    (void)b;
    cudaFree(pointer);
}

enum status scratch_reserve(struct backend *b, void **out, size_t bytes) {
    struct backend_state *s = b->state;
    if (bytes > s->scratch_bytes) {
        CUDA_CHECK(cudaStreamSynchronize(s->stream));
        CUDA_CHECK(cudaFree(s->scratch));
        s->scratch = NULL;
        s->scratch_bytes = 0;
        CHECK(memory_allocate(b, &s->scratch, bytes));
        s->scratch_bytes = bytes;
    }
    *out = s->scratch;
    return STATUS_OK;
}

static enum status copy_to_device(struct backend *b, void *device, const void *host, size_t bytes) {
    struct backend_state *s = b->state;
    for (size_t at = 0; at < bytes; at += STAGING_SLOT_BYTES) {
        size_t part = bytes - at < STAGING_SLOT_BYTES ? bytes - at : STAGING_SLOT_BYTES;
        char *slot = s->staging + (size_t)s->staging_next * STAGING_SLOT_BYTES;
        cudaEvent_t done = s->staging_done[s->staging_next];
        s->staging_next = (s->staging_next + 1) % STAGING_SLOTS;
        CUDA_CHECK(cudaEventSynchronize(done));
        memcpy(slot, (const char *)host + at, part);
        CUDA_CHECK(cudaMemcpyAsync((char *)device + at, slot, part, cudaMemcpyHostToDevice, s->stream));
        CUDA_CHECK(cudaEventRecord(done, s->stream));
    }
    return STATUS_OK;
}

static enum status copy_to_host(struct backend *b, void *host, const void *device, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, b->state->stream));
    CUDA_CHECK(cudaStreamSynchronize(b->state->stream));
    return STATUS_OK;
}

static enum status copy(struct backend *b, void *to, const void *from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, b->state->stream));
    return STATUS_OK;
}

static enum status set_zero(struct backend *b, void *device, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(device, 0, bytes, b->state->stream));
    return STATUS_OK;
}

static enum status synchronize(struct backend *b) {
    CUDA_CHECK(cudaStreamSynchronize(b->state->stream));
    return STATUS_OK;
}

/* ---- time ---- */

static enum status mark(struct backend *b, int index) {
    struct backend_state *s = b->state;
    if (s->marks[index] == NULL) {
        CUDA_CHECK(cudaEventCreate(&s->marks[index]));
    }
    CUDA_CHECK(cudaEventRecord(s->marks[index], s->stream));
    return STATUS_OK;
}

static enum status elapsed(struct backend *b, int from, int to, double *milliseconds) {
    float measured;
    CUDA_CHECK(cudaEventSynchronize(b->state->marks[to]));
    CUDA_CHECK(cudaEventElapsedTime(&measured, b->state->marks[from], b->state->marks[to]));
    *milliseconds = measured;
    return STATUS_OK;
}

static void range_begin(struct backend *b, const char *name) {
    (void)b;
    nvtxRangePushA(name);
}

static void range_end(struct backend *b) {
    (void)b;
    nvtxRangePop();
}

/* ---- life ---- */

/* 0 for a GPU that is neither in the table nor of a known generation. */
static double peak_tflops(const struct cudaDeviceProp *properties, int device) {
    const struct gpu_info *known = gpu_find_device(properties->name);
    int clock_khz = 0;
    if (known != NULL) {
        return known->bf16_tflops;
    }
    cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device);
    return gpu_peak_from_clock(
        properties->major, properties->minor, properties->multiProcessorCount, (double)clock_khz * 1e-6);
}

static enum status open_device(struct backend *b, int device) {
    struct backend_state *s = b->state;
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        return fail("--device cuda: no GPU is in reach (%s); use --device cpu",
            error != cudaSuccess ? cudaGetErrorString(error) : "none found");
    }
    if (device < 0 || device >= count) {
        return fail("GPU %d: this machine has %d, counted from 0", device, count);
    }
    struct cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    if (properties.major < 8) {
        return fail("GPU %d (%s) is of compute capability %d.%d, bf16 needs 8.0 or newer; use --device cpu",
            device, properties.name, properties.major, properties.minor);
    }
    snprintf(b->device_name, sizeof b->device_name, "%.127s", properties.name);
    b->peak_tflops = peak_tflops(&properties, device);
    s->device = device;
    s->multiprocessors = properties.multiProcessorCount;
    s->shared_bytes = (int)properties.sharedMemPerBlockOptin;
    s->overlapping = properties.major >= 9;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMallocHost((void **)&s->staging, (size_t)STAGING_SLOTS * STAGING_SLOT_BYTES));
    for (int i = 0; i < STAGING_SLOTS; i++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&s->staging_done[i], cudaEventDisableTiming));
    }
    return STATUS_OK;
}

static void backend_free(struct backend *b) {
    if (b == NULL) {
        return;
    }
    struct backend_state *s = b->state;
    if (s != NULL) {
        attention_free(s->attention);
        matmul_plans_free(b);
        cudaFree(s->scratch);
        for (int i = 0; i < STAGING_SLOTS; i++) {
            if (s->staging_done[i] != NULL) {
                cudaEventDestroy(s->staging_done[i]);
            }
        }
        for (int i = 0; i < BACKEND_MARKS; i++) {
            if (s->marks[i] != NULL) {
                cudaEventDestroy(s->marks[i]);
            }
        }
        cudaFreeHost(s->staging);
        if (s->stream != NULL) {
            cudaStreamDestroy(s->stream);
        }
        free(s);
    }
    free(b);
}

static void install(struct backend *b) {
    b->free = backend_free;
    b->memory_allocate = memory_allocate;
    b->memory_free = memory_free;
    b->memory_usage = memory_usage;
    b->copy_to_device = copy_to_device;
    b->copy_to_host = copy_to_host;
    b->copy = copy;
    b->set_zero = set_zero;
    b->synchronize = synchronize;
    b->mark = mark;
    b->elapsed = elapsed;
    b->range_begin = range_begin;
    b->range_end = range_end;
    cuda_attention_install(b);
    cuda_classifier_install(b);
    cuda_decode_install(b);
    cuda_embedding_install(b);
    cuda_layernorm_install(b);
    cuda_linear_install(b);
    cuda_optimizer_install(b);
    cuda_random_install(b);
}

static enum status prepare(struct backend *b, int device, const char *attention, bool autotune) {
    CHECK(backend_profile_find(&b->profile, "cuda", attention));
    CHECK(ALLOCATE(b->state, 1));
    CHECK(open_device(b, device));
    void *scratch;
    CHECK(scratch_reserve(b, &scratch, SCRATCH_BYTES_AT_START));
    CHECK(matmul_plans_create(b, autotune));
    return attention_create(&b->state->attention, b->profile.attention);
}

const char *backend_cuda_attention(int device, int64_t head_dim) {
    int major = 0, minor = 0;
    const char *best = NULL;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess) {
        best = attention_kernel_best(10 * major + minor, head_dim);
    } else {
        (void)cudaGetLastError(); /* creating the backend says what is wrong */
    }
    return best != NULL ? best : "auto";
}

enum status backend_cuda_create(struct backend **out, int device, const char *attention, bool autotune) {
    *out = NULL;
    struct backend *b;
    CHECK(ALLOCATE(b, 1));
    install(b);
    enum status status = prepare(b, device, attention, autotune);
    if (status != STATUS_OK) {
        backend_free(b);
        return status;
    }
    *out = b;
    return STATUS_OK;
}
