/* The control block of a step in the tests of the CUDA backend: what test_op_kernels.cpp asks on the CPU, and gpu_ops.c on
   a GPU. Blocks are CONTROL_COUNT doubles. */
#ifndef TEST_CONTROL_H
#define TEST_CONTROL_H

#include "llmc/backend.h"
#include "test/test.h"

/* Sums of losses and of squares that the decision is taken on, after so many applied steps. */
#define LIMITS(clip, loss, norm)                                                                             \
    { 1000, clip, loss, norm, 0.9, 0.95 }
static const struct control_case {
    double loss_sum, norm_squared, steps;
    struct step_limits limits;
} control_cases[] = {
    {4000, 0.25, 0, LIMITS(1, INFINITY, INFINITY)},
    {4000, 9, 41, LIMITS(1, INFINITY, INFINITY)},
    {4000, 9, 1000000, LIMITS(1, INFINITY, INFINITY)},
    {(double)NAN, 9, 3, LIMITS(1, INFINITY, INFINITY)},
    {4000, (double)NAN, 3, LIMITS(1, INFINITY, INFINITY)},
    {4000, INFINITY, 3, LIMITS(1, INFINITY, INFINITY)},
    {-INFINITY, 4, 3, LIMITS(1, INFINITY, INFINITY)},
    {4000, 9, 3, LIMITS(0, INFINITY, INFINITY)},
    {4000, 9, 3, LIMITS(0, 3.5, INFINITY)},
    {3000, 9, 3, LIMITS(0, 3.5, INFINITY)},
    {3000, 9, 3, LIMITS(0, 3.5, 2.5)},
};
#undef LIMITS
enum { CONTROL_CASES = sizeof control_cases / sizeof control_cases[0] };

/* What the op is given; its outputs begin as NaN. */
static inline void control_before(double *control, const struct control_case *c) {
    for (int i = 0; i < CONTROL_COUNT; i++) {
        control[i] = NAN;
    }
    control[CONTROL_LOSS_SUM] = c->loss_sum;
    control[CONTROL_NORM_SQUARED] = c->norm_squared;
    control[CONTROL_OPTIMIZER_STEP] = c->steps;
}

/* What the op makes of it, in fp32, and what the reference does. */
static inline void expect_same_control(const double *got, const double *expected) {
    for (int i = 0; i < CONTROL_COUNT; i++) {
        EXPECT((isnan(got[i]) && isnan(expected[i])) || got[i] == expected[i] ||
               fabs(got[i] - expected[i]) <= 1e-6 * fabs(expected[i]));
    }
}

/* What AdamW reads in the third step. */
static inline void control_of_step_3(double *control, bool apply) {
    for (int i = 0; i < CONTROL_COUNT; i++) {
        control[i] = NAN;
    }
    control[CONTROL_SCALE] = 0.7;
    control[CONTROL_APPLY] = apply;
    control[CONTROL_OPTIMIZER_STEP] = 3;
    control[CONTROL_CORRECTION1] = 1 - pow(0.9, 3);
    control[CONTROL_CORRECTION2] = 1 - pow(0.95, 3);
}

#endif
