/* Writing values: conversion between element types, constants, random numbers. None of it is in a training step, so
   the kernels are plain: any dtype told at run time, any alignment, a block takes 2048 consecutive elements and its
   threads eight each, 256 apart. */
#include "cuda.cuh"

#include "llmc/random.h"

enum { THREADS = 256, PER_THREAD = 8 };

__device__ inline float load(struct tensor t, int64_t i) {
    switch (t.dtype) {
    case DTYPE_F32:
        return static_cast<const float *>(t.data)[i];
    case DTYPE_BF16:
        return __bfloat162float(static_cast<const bf16 *>(t.data)[i]);
    default:
        return __half2float(static_cast<const __half *>(t.data)[i]);
    }
}

__device__ inline void store(struct tensor t, int64_t i, float value) {
    switch (t.dtype) {
    case DTYPE_F32:
        static_cast<float *>(t.data)[i] = value;
        break;
    case DTYPE_BF16:
        static_cast<bf16 *>(t.data)[i] = __float2bfloat16_rn(value);
        break;
    default:
        static_cast<__half *>(t.data)[i] = __float2half_rn(value);
        break;
    }
}

static enum status check_dtype(const char *op, struct tensor t) {
    return t.dtype == DTYPE_F32 || t.dtype == DTYPE_BF16 || t.dtype == DTYPE_F16
               ? STATUS_OK
               : fail("%s on the GPU: no %s, only F32, BF16 and F16", op, dtype_name(t.dtype));
}

/* Calls value(i) for each of this thread's elements and stores what it returns. */
template <typename Value> __device__ inline void write_each(struct tensor out, int64_t count, Value value) {
    int64_t first = (int64_t)blockIdx.x * (THREADS * PER_THREAD) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        int64_t i = first + j * THREADS;
        if (i < count) {
            store(out, i, value(i));
        }
    }
}

static struct launch_shape shape_for(const char *op, int64_t count) {
    return {op, (unsigned)ceil_div(count, THREADS * PER_THREAD), THREADS};
}

__global__ void convert_kernel(struct tensor out, struct tensor in, int64_t count) {
    write_each(out, count, [&](int64_t i) { return load(in, i); });
}

static enum status convert(struct backend *b, struct tensor out, struct tensor in, int64_t count) {
    CHECK(check_dtype("convert", out));
    CHECK(check_dtype("convert", in));
    if (count == 0) {
        return STATUS_OK;
    }
    return launch(b, shape_for("convert", count), convert_kernel, out, in, count);
}

__global__ void add_kernel(struct tensor out, struct tensor in, int64_t count) {
    write_each(out, count, [&](int64_t i) { return load(out, i) + load(in, i); });
}

static enum status add(struct backend *b, struct tensor out, struct tensor in, int64_t count) {
    CHECK(check_dtype("add", out));
    CHECK(check_dtype("add", in));
    if (count == 0) {
        return STATUS_OK;
    }
    return launch(b, shape_for("add", count), add_kernel, out, in, count);
}

__global__ void fill_kernel(struct tensor out, float value, int64_t count) {
    write_each(out, count, [&](int64_t) { return value; });
}

static enum status fill(struct backend *b, struct tensor out, double value, int64_t count) {
    CHECK(check_dtype("fill", out));
    if (count == 0) {
        return STATUS_OK;
    }
    return launch(b, shape_for("fill", count), fill_kernel, out, (float)value, count);
}

__global__ void random_normal_kernel(
    struct tensor out, int64_t count, uint64_t seed, uint64_t stream, int64_t first, double std) {
    write_each(out, count,
        [&](int64_t i) { return (float)(std * (double)random_normal(seed, stream, (uint64_t)(first + i))); });
}

static enum status fill_normal(struct backend *b, struct tensor out, int64_t count, uint64_t seed,
    uint64_t stream, int64_t first, double std) {
    CHECK(check_dtype("random_normal", out));
    if (count == 0) {
        return STATUS_OK;
    }
    return launch(
        b, shape_for("random_normal", count), random_normal_kernel, out, count, seed, stream, first, std);
}

void cuda_random_install(struct backend *b) {
    b->convert = convert;
    b->add = add;
    b->fill = fill;
    b->random_normal = fill_normal;
}
