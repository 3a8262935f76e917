/* Learning-rate schedules: the value of every step, from formulas written out for small runs. */
#include "llmc/schedule.h"
#include "test.h"

static double rate(struct schedule s, int64_t step) {
    return schedule_learning_rate(&s, step);
}

static void expect_rates(struct schedule s, const double *expected) {
    for (int64_t step = 0; step < s.total_steps; step++) {
        EXPECT_NEAR(rate(s, step), expected[step], 1e-15);
    }
}

static void test_warm_up_rises_linearly_from_a_share_of_the_peak_to_the_peak(void) {
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++) {
        struct schedule s = {(enum schedule_kind)kind, 3e-4, 0.1, 4, 3, 100};
        EXPECT_NEAR(rate(s, 0), 0.75e-4, 1e-18); /* peak / warmup_steps: never 0 */
        EXPECT_NEAR(rate(s, 1), 1.50e-4, 1e-18);
        EXPECT_NEAR(rate(s, 2), 2.25e-4, 1e-18);
        EXPECT(rate(s, 3) == 3e-4);
        EXPECT(rate(s, 4) <= 3e-4);
    }
}

static void test_linear_falls_in_equal_parts_to_the_final_fraction_in_the_last_step(void) {
    struct schedule s = {SCHEDULE_LINEAR, 1.0, 0.2, 2, 0, 6};
    expect_rates(s, (const double[]){0.5, 1.0, 0.8, 0.6, 0.4, 0.2});
}

static void test_cosine_is_half_a_period_from_peak_to_final(void) {
    struct schedule s = {SCHEDULE_COSINE, 2.0, 0.5, 1, 0, 5};
    double eighth = 0.70710678118654752440; /* cos(pi / 4) */
    expect_rates(s, (const double[]){2.0, 1.5 + 0.5 * eighth, 1.5, 1.5 - 0.5 * eighth, 1.0});
}

static void test_constant_stays_at_the_peak(void) {
    struct schedule s = {SCHEDULE_CONSTANT, 0.3, 0.1, 2, 2, 5};
    expect_rates(s, (const double[]){0.15, 0.3, 0.3, 0.3, 0.3});
}

static void test_wsd_stays_at_the_peak_and_falls_linearly_over_its_last_steps(void) {
    struct schedule s = {SCHEDULE_WSD, 1.0, 0.0, 2, 4, 9};
    expect_rates(s, (const double[]){0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0});
}

static void test_without_warm_up_the_first_step_has_the_peak(void) {
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++) {
        struct schedule s = {(enum schedule_kind)kind, 0.7, 0.1, 0, 3, 10};
        EXPECT(rate(s, 0) == 0.7);
        EXPECT_NEAR(rate(s, 9), kind == SCHEDULE_CONSTANT ? 0.7 : 0.07, 1e-16);
    }
}

static void test_minus_one_warms_up_over_2_percent_and_decays_over_20(void) {
    struct schedule automatic = {SCHEDULE_WSD, 1.0, 0.1, -1, -1, 1010};
    struct schedule explicit_ = {SCHEDULE_WSD, 1.0, 0.1, 21, 202, 1010};
    for (int64_t step = 0; step < 1010; step++) {
        EXPECT(rate(automatic, step) == rate(explicit_, step));
    }
    EXPECT(rate(automatic, 19) < 1.0 && rate(automatic, 20) == 1.0);
    EXPECT(rate(automatic, 807) == 1.0 && rate(automatic, 808) < 1.0);
}

static void test_steps_beyond_the_end_keep_the_last_rate(void) {
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++) {
        struct schedule s = {(enum schedule_kind)kind, 1.0, 0.1, 2, 3, 10};
        EXPECT(rate(s, 10) == rate(s, 9) && rate(s, 1000000) == rate(s, 9));
    }
}

static void test_a_warm_up_as_long_as_the_run_ends_at_the_peak(void) {
    struct schedule s = {SCHEDULE_COSINE, 1.0, 0.1, 4, 0, 4};
    expect_rates(s, (const double[]){0.25, 0.5, 0.75, 1.0});
    struct schedule one_step = {SCHEDULE_COSINE, 1.0, 0.1, 0, 0, 1};
    EXPECT(rate(one_step, 0) == 1.0);
}

static void test_a_decay_longer_than_the_run_starts_after_the_warm_up(void) {
    struct schedule s = {SCHEDULE_WSD, 1.0, 0.0, 2, 100, 6};
    expect_rates(s, (const double[]){0.5, 1.0, 0.75, 0.5, 0.25, 0.0});
}

static void test_rates_never_rise_after_the_warm_up(void) {
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++) {
        struct schedule s = {(enum schedule_kind)kind, 6e-4, 0.1, 20, 50, 1000};
        for (int64_t step = 20; step < 1000; step++) {
            EXPECT(rate(s, step) <= rate(s, step - 1) && rate(s, step) >= 6e-5 * (1 - 1e-12));
        }
    }
}

int main(void) {
    RUN(test_warm_up_rises_linearly_from_a_share_of_the_peak_to_the_peak);
    RUN(test_linear_falls_in_equal_parts_to_the_final_fraction_in_the_last_step);
    RUN(test_cosine_is_half_a_period_from_peak_to_final);
    RUN(test_constant_stays_at_the_peak);
    RUN(test_wsd_stays_at_the_peak_and_falls_linearly_over_its_last_steps);
    RUN(test_without_warm_up_the_first_step_has_the_peak);
    RUN(test_minus_one_warms_up_over_2_percent_and_decays_over_20);
    RUN(test_steps_beyond_the_end_keep_the_last_rate);
    RUN(test_a_warm_up_as_long_as_the_run_ends_at_the_peak);
    RUN(test_a_decay_longer_than_the_run_starts_after_the_warm_up);
    RUN(test_rates_never_rise_after_the_warm_up);
    return test_summary();
}
