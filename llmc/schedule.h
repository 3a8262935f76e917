/* Learning-rate schedules: a linear warm-up to the peak, then down to a fraction of it. */
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum schedule_kind { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD, SCHEDULE_KINDS };
extern const char *const schedule_names[SCHEDULE_KINDS];

struct schedule {
    enum schedule_kind kind;
    double peak;  /* learning rate after warm-up */
    double final; /* fraction of the peak in the last step; CONSTANT has none */
    /* Linear from peak / warmup_steps in the first step; 0: none; -1: 2% of total_steps. */
    int64_t warmup_steps;
    int64_t decay_steps; /* WSD: length of the linear decay at the end; -1: 20% of total_steps */
    int64_t total_steps;
};
/* Of step 0, 1, ..., total_steps - 1; beyond, that of the last step. The warm-up's last step and, without warm-up, the
   first step have the peak; the last step has peak * final (if the warm-up leaves room for it). */
double schedule_learning_rate(const struct schedule *schedule, int64_t step);

#ifdef __cplusplus
}
#endif

#endif
