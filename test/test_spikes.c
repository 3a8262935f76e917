/* Spikes: the limit is the mean and so many standard deviations of the last 128 applied steps, and of no others. */
#include "llmc/spikes.h"
#include "test.h"

/* Losses that alternate between 2 and 4: mean 3, standard deviation 1. Norms between 10 and 30: mean 20, deviation 10. */
static void add_steps(struct spikes *s, int steps) {
    for (int i = 0; i < steps; i++) {
        spikes_add(s, i % 2 == 0 ? 2.0 : 4.0, i % 2 == 0 ? 10.0 : 30.0);
    }
}

static void test_the_limit_is_so_many_standard_deviations_above_the_mean(void) {
    struct spikes s = {0};
    add_steps(&s, SPIKE_WINDOW);
    /* 128 terms, each rounded: at most 128 units in the last place of a double, 128 * 1.1e-16 * 30 */
    EXPECT_NEAR(spikes_loss_limit(&s, 4.0), 7.0, 1e-12);
    EXPECT_NEAR(spikes_norm_limit(&s, 2.5), 45.0, 1e-12);
}

static void test_there_is_no_limit_before_the_window_is_full(void) {
    struct spikes s = {0};
    EXPECT(spikes_loss_limit(&s, 1.0) == INFINITY && spikes_norm_limit(&s, 1.0) == INFINITY);
    add_steps(&s, SPIKE_WINDOW - 1);
    EXPECT(spikes_loss_limit(&s, 1.0) == INFINITY && spikes_norm_limit(&s, 1.0) == INFINITY);
    add_steps(&s, 1);
    EXPECT(isfinite(spikes_loss_limit(&s, 1.0)) && isfinite(spikes_norm_limit(&s, 1.0)));
}

static void test_a_zscore_of_0_sets_no_limit(void) {
    struct spikes s = {0};
    add_steps(&s, SPIKE_WINDOW);
    EXPECT(spikes_loss_limit(&s, 0.0) == INFINITY && spikes_norm_limit(&s, 0.0) == INFINITY);
}

static void test_steps_older_than_the_window_do_not_count(void) {
    struct spikes s = {0};
    for (int i = 0; i < 1000; i++) {
        spikes_add(&s, 1e6, 1e6);
    }
    add_steps(&s, SPIKE_WINDOW);
    EXPECT(s.count == SPIKE_WINDOW && s.loss[0] == 2.0 && s.norm[SPIKE_WINDOW - 1] == 30.0);
    EXPECT_NEAR(spikes_loss_limit(&s, 4.0), 7.0, 1e-12);
}

static void test_the_reason_names_what_was_wrong_first(void) {
    EXPECT_STRING(spikes_reason(NAN, NAN, INFINITY), "non-finite loss");
    EXPECT_STRING(spikes_reason(INFINITY, 1.0, 5.0), "non-finite loss");
    EXPECT_STRING(spikes_reason(3.0, INFINITY, INFINITY), "non-finite gradient");
    EXPECT_STRING(spikes_reason(6.0, 99.0, 5.0), "loss spike");
    EXPECT_STRING(spikes_reason(5.0, 99.0, 5.0), "gradient norm spike");
}

int main(void) {
    RUN(test_the_limit_is_so_many_standard_deviations_above_the_mean);
    RUN(test_there_is_no_limit_before_the_window_is_full);
    RUN(test_a_zscore_of_0_sets_no_limit);
    RUN(test_steps_older_than_the_window_do_not_count);
    RUN(test_the_reason_names_what_was_wrong_first);
    return test_summary();
}
