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
    for (int64_t i = 0; i < count; i++) {
        switch (in.dtype) {
        case DTYPE_F64:
            out[i] = ((const double *)in.data)[i];
            break;
        case DTYPE_F32:
            out[i] = ((const float *)in.data)[i];
            break;
        case DTYPE_BF16:
            out[i] = bf16_to_float(((const uint16_t *)in.data)[i]);
            break;
        default:
            out[i] = f16_to_float(((const uint16_t *)in.data)[i]);
            break;
        }
    }
}

static void store_block(struct tensor out, const double *in, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        switch (out.dtype) {
        case DTYPE_F64:
            ((double *)out.data)[i] = in[i];
            break;
        case DTYPE_F32:
            ((float *)out.data)[i] = (float)in[i];
            break;
        case DTYPE_BF16:
            ((uint16_t *)out.data)[i] = float_to_bf16((float)in[i]);
            break;
        default:
            ((uint16_t *)out.data)[i] = float_to_f16((float)in[i]);
            break;
        }
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
    b->fill = fill;
    b->random_normal = fill_normal;
}
