/* Kernels made ready on a device, and the two calls. */
#include "attention/device.cuh"

#include <cublas_v2.h>
#include <stdlib.h>

static enum status find_device(struct attention *a) {
    int device, major, minor;
    CHECK(cuda_check(cudaGetDevice(&device), "finding the GPU"));
    CHECK(cuda_check(
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "its generation"));
    CHECK(cuda_check(
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "its generation"));
    CHECK(cuda_check(cudaDeviceGetAttribute(&a->multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "its multiprocessors"));
    a->compute_capability = 10 * major + minor;
    if (a->compute_capability < a->kernel->first_capability ||
        a->compute_capability > a->kernel->last_capability) {
        return fail("attention %s: GPU %d is of compute capability %d.%d, %d.%d%s is needed", a->kernel->name,
            device, major, minor, a->kernel->first_capability / 10, a->kernel->first_capability % 10,
            a->kernel->last_capability > a->kernel->first_capability ? " or newer" : "");
    }
    return STATUS_OK;
}

/* fp32 sums throughout: the products of long rows must not be reduced in 16 bits. */
static enum status create_cublas(struct attention *a) {
    cublasHandle_t handle;
    if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) {
        return fail("attention %s: cuBLAS does not start: is the GPU's memory full?", a->kernel->name);
    }
    a->cublas = handle;
    cublasSetMathMode(
        handle, (cublasMath_t)(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
    return STATUS_OK;
}

/* What makes TMA's descriptions of tensors is in the driver. */
static enum status find_tensor_maps(struct attention *a) {
    if (!fa3_is_compiled()) {
        return fail("attention fa3: not in this build: build with GPU_ARCH=90a");
    }
    enum cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &a->encode_tensor_map, 12000, cudaEnableDefault, &found);
#else
    cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &a->encode_tensor_map, cudaEnableDefault, &found);
#endif
    CHECK(cuda_check(error, "finding cuTensorMapEncodeTiled"));
    return found == cudaDriverEntryPointSuccess
               ? STATUS_OK
               : fail("attention fa3: the driver has no cuTensorMapEncodeTiled: update it, or use fa2");
}

extern "C" enum status attention_create(struct attention **out, const char *kernel) {
    *out = NULL;
    struct attention made = {attention_kernel_find(kernel)};
    if (made.kernel == NULL) {
        return attention_kernel_unknown(kernel);
    }
    CHECK(find_device(&made));
    if (made.kernel->forward == fa3_forward) {
        CHECK(find_tensor_maps(&made));
    }
    struct attention *kept;
    CHECK(ALLOCATE(kept, 1));
    *kept = made;
    enum status status = made.kernel->forward == standard_forward ? create_cublas(kept) : STATUS_OK;
    if (status != STATUS_OK) {
        free(kept);
        return status;
    }
    *out = kept;
    return STATUS_OK;
}

extern "C" void attention_free(struct attention *a) {
    if (a != NULL && a->cublas != NULL) {
        cublasDestroy((cublasHandle_t)a->cublas);
    }
    free(a);
}

extern "C" enum status attention_forward(struct attention *a, const struct attention_params *p) {
    CHECK(attention_check(a->kernel->name, p, false));
    return a->kernel->forward(a, p);
}

extern "C" enum status attention_backward(struct attention *a, const struct attention_params *p) {
    CHECK(attention_check(a->kernel->name, p, true));
    return a->kernel->backward(a, p);
}
