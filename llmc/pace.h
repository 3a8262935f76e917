/* Which rank keeps the others waiting. Every rank says after each step how long it waited for the others; the one that
   waits least is the slowest, and if it stands out over some steps there is a line about it. */
#ifndef LLMC_PACE_H
#define LLMC_PACE_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Steps that are looked at together, after some at the start that are not: they are slow for other reasons. */
enum { PACE_STEPS = 20, PACE_WARM_UP = 3 };

struct pace {
    int ranks, steps; /* steps: in the sums; negative while warming up */
    double *wait_ms;  /* [ranks], sums */
    double step_ms;   /* sum */
    int told_rank;    /* -1: none */
};

enum status pace_init(struct pace *pace, int ranks);
void pace_free(struct pace *pace);

/* A step of `step_ms`, in which rank r waited wait_ms[r * stride] (of doubles). True: `text` names a rank for which the
   others wait a tenth of a step and more; once for as long as it stays that rank. */
bool pace_add_step(
    struct pace *pace, double step_ms, const double *wait_ms, int stride, char *text, size_t size);

#ifdef __cplusplus
}
#endif

#endif
