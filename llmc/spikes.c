/* See spikes.h. Means and deviations are taken anew for every step: 128 numbers, where a running sum would drift. */
#include "spikes.h"

#include <math.h>
#include <string.h>

void spikes_add(struct spikes *s, double loss, double norm) {
    if (s->count == SPIKE_WINDOW) {
        memmove(s->loss, s->loss + 1, (SPIKE_WINDOW - 1) * sizeof(double));
        memmove(s->norm, s->norm + 1, (SPIKE_WINDOW - 1) * sizeof(double));
        s->count--;
    }
    s->loss[s->count] = loss;
    s->norm[s->count] = norm;
    s->count++;
}

static double limit(const double *recent, int count, double zscore) {
    if (zscore <= 0.0 || count < SPIKE_WINDOW) {
        return INFINITY;
    }
    double mean = 0.0, variance = 0.0;
    for (int i = 0; i < count; i++) {
        mean += recent[i] / count;
    }
    for (int i = 0; i < count; i++) {
        variance += (recent[i] - mean) * (recent[i] - mean) / count;
    }
    return mean + zscore * sqrt(variance);
}

double spikes_loss_limit(const struct spikes *s, double zscore) {
    return limit(s->loss, s->count, zscore);
}

double spikes_norm_limit(const struct spikes *s, double zscore) {
    return limit(s->norm, s->count, zscore);
}

const char *spikes_reason(double loss, double norm, double loss_limit) {
    if (!isfinite(loss)) {
        return "non-finite loss";
    }
    if (!isfinite(norm)) {
        return "non-finite gradient";
    }
    return loss > loss_limit ? "loss spike" : "gradient norm spike";
}
