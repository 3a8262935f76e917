/* What the tests of generation hold a model's losses against. */
#ifndef TEST_LOSS_H
#define TEST_LOSS_H

#include <math.h>

/* -log softmax(logits)[target] */
static inline double loss_of(const float *logits, int count, int target) {
    double highest = -INFINITY, sum = 0;
    for (int i = 0; i < count; i++) {
        highest = fmax(highest, logits[i]);
    }
    for (int i = 0; i < count; i++) {
        sum += exp(logits[i] - highest);
    }
    return highest + log(sum) - logits[target];
}

#endif
