/* Which rank keeps the others waiting. Every rank adds up how long it waits for the others; now and then all look at all
   sums: the one that waits least is the slowest, and if it stands out there is a line about it. */
#ifndef LLMC_PACE_H
#define LLMC_PACE_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Steps between two looks, after some at the start that are not counted: they are slow for other reasons. */
enum { PACE_STEPS = 20, PACE_WARM_UP = 3 };

/* What a rank did in PACE_STEPS steps. */
struct pace_sums {
    double step_ms, wait_ms;
};

struct pace {
    struct pace_sums sums;
    int steps;     /* in the sums; negative while warming up */
    int told_rank; /* -1: none */
};

void pace_init(struct pace *pace);
/* One more step of this rank. True, on all ranks after the same step: it is time to look. */
bool pace_add_step(struct pace *pace, double step_ms, double wait_ms);
/* The sums of all ranks, this one's among them; starts new ones. True: `text` names a rank for which the others wait a
   tenth of a step and a millisecond, or more; once for as long as it stays that rank. */
bool pace_look(struct pace *pace, const struct pace_sums *all, int ranks, char *text, size_t size);

#ifdef __cplusplus
}
#endif

#endif
