/* Learning-rate schedules. */
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
    double peak;          /* learning rate after warm-up */
    double final;         /* fraction of the peak at the end */
    int64_t warmup_steps; /* linear from peak / warmup_steps in the first step */
    int64_t decay_steps;  /* WSD: length of the linear decay at the end */
    int64_t total_steps;
};
/* Of step 0, 1, ..., total_steps - 1 (and beyond: the final value). */
double schedule_learning_rate(const struct schedule *schedule, int64_t step);

#ifdef __cplusplus
}
#endif

#endif
