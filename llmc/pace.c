/* Waits are judged in windows of steps: a single step is late for many reasons. */
#include "pace.h"

#include <math.h>

/* Least that is waited for a rank: of a step, and in any case. */
static const double TELL_FRACTION = 0.1, TELL_MS = 1.0;

void pace_init(struct pace *p) {
    memset(p, 0, sizeof *p);
    p->steps = -PACE_WARM_UP;
    p->told_rank = -1;
}

bool pace_add_step(struct pace *p, double step_ms, double wait_ms) {
    if (p->steps++ < 0) {
        return false;
    }
    p->sums.step_ms += step_ms;
    p->sums.wait_ms += wait_ms;
    return p->steps == PACE_STEPS;
}

/* How far it is behind the others' mean, a step. */
static double behind_ms(const struct pace_sums *all, int ranks, int rank) {
    double others = 0.0;
    for (int i = 0; i < ranks; i++) {
        others += i == rank ? 0.0 : all[i].wait_ms;
    }
    return (others / (ranks - 1) - all[rank].wait_ms) / PACE_STEPS;
}

bool pace_look(struct pace *p, const struct pace_sums *all, int ranks, char *text, size_t size) {
    int slowest = 0;
    memset(&p->sums, 0, sizeof p->sums);
    p->steps = 0;
    if (ranks == 1) {
        return false;
    }
    for (int rank = 0; rank < ranks; rank++) {
        slowest = all[rank].wait_ms < all[slowest].wait_ms ? rank : slowest;
    }
    double behind = behind_ms(all, ranks, slowest), step = all[slowest].step_ms / PACE_STEPS;
    bool slow = behind >= fmax(TELL_FRACTION * step, TELL_MS), tell = slow && slowest != p->told_rank;
    p->told_rank = slow ? slowest : -1;
    if (tell) {
        snprintf(text, size, "rank %d is slow: the others wait %.0f of a step's %.0f ms for it", slowest,
            behind, step);
    }
    return tell;
}
