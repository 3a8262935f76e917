#include "pace.h"

#include <stdlib.h>

static const double TELL_FRACTION = 0.1; /* of a step that is waited for a rank */

enum status pace_init(struct pace *p, int ranks) {
    memset(p, 0, sizeof *p);
    p->ranks = ranks;
    p->steps = -PACE_WARM_UP;
    p->told_rank = -1;
    return ALLOCATE(p->wait_ms, ranks);
}

void pace_free(struct pace *p) {
    free(p->wait_ms);
    p->wait_ms = NULL;
}

static void start_over(struct pace *p) {
    memset(p->wait_ms, 0, (size_t)p->ranks * sizeof *p->wait_ms);
    p->step_ms = 0.0;
    p->steps = 0;
}

/* How far it is behind the others' mean, a step. */
static double behind_ms(const struct pace *p, int rank) {
    double others = 0.0;
    for (int i = 0; i < p->ranks; i++) {
        others += i == rank ? 0.0 : p->wait_ms[i];
    }
    return (others / (p->ranks - 1) - p->wait_ms[rank]) / p->steps;
}

bool pace_add_step(
    struct pace *p, double step_ms, const double *wait_ms, int stride, char *text, size_t size) {
    int slowest = 0;
    if (p->ranks == 1 || p->steps++ < 0) {
        return false;
    }
    p->step_ms += step_ms;
    for (int rank = 0; rank < p->ranks; rank++) {
        p->wait_ms[rank] += wait_ms[rank * stride];
        slowest = p->wait_ms[rank] < p->wait_ms[slowest] ? rank : slowest;
    }
    if (p->steps < PACE_STEPS) {
        return false;
    }
    double behind = behind_ms(p, slowest), step = p->step_ms / p->steps;
    bool slow = behind >= TELL_FRACTION * step, tell = slow && slowest != p->told_rank;
    p->told_rank = slow ? slowest : -1;
    if (tell) {
        snprintf(text, size, "rank %d is slow: the others wait %.0f of a step's %.0f ms for it", slowest,
            behind, step);
    }
    start_over(p);
    return tell;
}
