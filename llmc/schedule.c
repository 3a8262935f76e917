/* Learning-rate schedules. After the warm-up each is the peak times a factor that falls from 1 to `final` between two
   steps: for cosine (Loshchilov and Hutter, "SGDR", ICLR 2017, without restarts) and linear from the warm-up's last
   step, for WSD (warm-up, stable, decay; Hu et al., "MiniCPM", 2024) from decay_steps before the last. */
#include "schedule.h"

#include <math.h>

const char *const schedule_names[SCHEDULE_KINDS] = {"cosine", "linear", "constant", "wsd"};

double schedule_learning_rate(const struct schedule *schedule, int64_t step) {
    int64_t total = schedule->total_steps;
    int64_t warmup = schedule->warmup_steps < 0 ? ceil_div(total, 50) : schedule->warmup_steps;
    int64_t decay = schedule->decay_steps < 0 ? ceil_div(total, 5) : schedule->decay_steps;
    int64_t last = total - 1;
    step = min_i64(step, last);
    if (step < warmup) {
        return schedule->peak * (double)(step + 1) / (double)warmup;
    }
    if (schedule->kind == SCHEDULE_CONSTANT) {
        return schedule->peak;
    }
    int64_t start = max_i64(warmup - 1, 0); /* the last step at the peak */
    if (schedule->kind == SCHEDULE_WSD) {
        start = max_i64(start, last - decay);
    }
    if (step <= start) {
        return schedule->peak;
    }
    double progress = (double)(step - start) / (double)(last - start); /* in (0, 1] */
    double remaining = schedule->kind == SCHEDULE_COSINE
                           ? 0.5 * (1.0 + cos(3.14159265358979323846 * progress))
                           : 1.0 - progress;
    return schedule->peak * (schedule->final + (1.0 - schedule->final) * remaining);
}
