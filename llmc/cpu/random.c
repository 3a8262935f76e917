/* Values: conversion between element types, constants, random numbers. They pass in blocks through an array of
   doubles, which holds every element type exactly. */
#include "cpu.h"

#include "../random.h"

enum { BLOCK = 512 };

static bool is_float(enum dtype dtype) {
    return dtype == DTYPE_F64 || dtype == DTYPE_F32 || dtype == DTYPE_BF16 || dtype == DTYPE_F16;
}

static enum status check_float(struct tensor t) {
    return is_float(t.dtype) ? STATUS_OK : fail("%s values are not floating point", dtype_name(t.dtype));
}

static void load_block(double *out, struct tensor in, int64_t count) {
    const double *f64 = in.data;
    const float *f32 = in.data;
    const uint16_t *bits = in.data;
    for (int64_t i = 0; i < count && in.dtype == DTYPE_F64; i++) {
        out[i] = f64[i];
    }
    for (int64_t i = 0; i < count && in.dtype == DTYPE_F32; i++) {
        out[i] = f32[i];
    }
    for (int64_t i = 0; i < count && in.dtype == DTYPE_BF16; i++) {
        out[i] = bf16_to_float(bits[i]);
    }
    for (int64_t i = 0; i < count && in.dtype == DTYPE_F16; i++) {
        out[i] = f16_to_float(bits[i]);
    }
}

static void store_block(struct tensor out, const double *in, int64_t count) {
    double *f64 = out.data;
    float *f32 = out.data;
    uint16_t *bits = out.data;
    for (int64_t i = 0; i < count && out.dtype == DTYPE_F64; i++) {
        f64[i] = in[i];
    }
    for (int64_t i = 0; i < count && out.dtype == DTYPE_F32; i++) {
        f32[i] = (float)in[i];
    }
    for (int64_t i = 0; i < count && out.dtype == DTYPE_BF16; i++) {
        bits[i] = float_to_bf16((float)in[i]);
    }
    for (int64_t i = 0; i < count && out.dtype == DTYPE_F16; i++) {
        bits[i] = float_to_f16((float)in[i]);
    }
}

static enum status convert(struct backend *b, struct tensor out, struct tensor in, int64_t count) {
    CHECK(check_float(out));
    CHECK(check_float(in));
    use_threads(b);
#pragma omp parallel for
    for (int64_t first = 0; first < count; first += BLOCK) {
        double block[BLOCK];
        int64_t width = min_i64(BLOCK, count - first);
        load_block(block, tensor_at(in, first), width);
        store_block(tensor_at(out, first), block, width);
    }
    return STATUS_OK;
}

static enum status add(struct backend *b, struct tensor out, struct tensor in, int64_t count) {
    CHECK(check_float(out));
    CHECK(check_float(in));
    use_threads(b);
#pragma omp parallel for
    for (int64_t first = 0; first < count; first += BLOCK) {
        double sum[BLOCK], block[BLOCK];
        int64_t width = min_i64(BLOCK, count - first);
        load_block(sum, tensor_at(out, first), width);
        load_block(block, tensor_at(in, first), width);
        for (int64_t i = 0; i < width; i++) {
            sum[i] += block[i];
        }
        store_block(tensor_at(out, first), sum, width);
    }
    return STATUS_OK;
}

static enum status fill(struct backend *b, struct tensor out, double value, int64_t count) {
    CHECK(check_float(out));
    double block[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        block[i] = value;
    }
    use_threads(b);
#pragma omp parallel for
    for (int64_t first = 0; first < count; first += BLOCK) {
        store_block(tensor_at(out, first), block, min_i64(BLOCK, count - first));
    }
    return STATUS_OK;
}

static enum status fill_normal(struct backend *b, struct tensor out, int64_t count, uint64_t seed,
    uint64_t stream, int64_t first_index, double std) {
    CHECK(check_float(out));
    use_threads(b);
#pragma omp parallel for
    for (int64_t first = 0; first < count; first += BLOCK) {
        double block[BLOCK];
        int64_t width = min_i64(BLOCK, count - first);
        for (int64_t i = 0; i < width; i++) {
            block[i] = std * random_normal(seed, stream, (uint64_t)(first_index + first + i));
        }
        store_block(tensor_at(out, first), block, width);
    }
    return STATUS_OK;
}

void random_install(struct backend *b) {
    b->convert = convert;
    b->add = add;
    b->fill = fill;
    b->random_normal = fill_normal;
}
