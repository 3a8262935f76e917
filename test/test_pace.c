/* Which rank the others wait for: told once it stands out over a window of steps, and not for noise. */
#include "llmc/pace.h"
#include "test.h"

enum { RANKS = 3 };

/* Windows of steps of 100 ms in which each rank waits as given; the lines that came of them. */
static int look(struct pace *p, int windows, double a, double b, double c, char *text, size_t size) {
    int lines = 0;
    for (int window = 0; window < windows; window++) {
        struct pace_sums all[RANKS] = {{100.0 * PACE_STEPS, a * PACE_STEPS},
            {100.0 * PACE_STEPS, b * PACE_STEPS}, {100.0 * PACE_STEPS, c * PACE_STEPS}};
        lines += pace_look(p, all, RANKS, text, size);
    }
    return lines;
}

static void steps_are_added_up_but_for_the_first_ones(void) {
    struct pace p;
    char text[200];
    pace_init(&p);
    for (int window = 0; window < 3; window++) {
        for (int step = window == 0 ? -PACE_WARM_UP : 0; step < PACE_STEPS; step++) {
            bool warm = step >= 0;
            EXPECT(pace_add_step(&p, warm ? 100 : 1e9, warm ? 7 : 1e9) == (step == PACE_STEPS - 1));
        }
        EXPECT(p.sums.step_ms == 100.0 * PACE_STEPS && p.sums.wait_ms == 7.0 * PACE_STEPS);
        EXPECT(!pace_look(&p, &p.sums, 1, text, sizeof text)); /* one rank alone */
    }
}

static void the_rank_that_waits_least_is_named_once_it_stands_out(void) {
    struct pace p;
    char text[200] = "";
    pace_init(&p);
    EXPECT(look(&p, 1, 25, 2, 35, text, sizeof text) == 1);
    EXPECT_STRING(text, "rank 1 is slow: the others wait 28 of a step's 100 ms for it");
}

static void small_differences_are_not_told(void) {
    struct pace p;
    char text[200] = "";
    pace_init(&p);
    EXPECT(look(&p, 5, 9, 0, 9, text, sizeof text) == 0);
    EXPECT(look(&p, 5, 60, 60, 60, text, sizeof text) == 0);
}

/* Steps of the smallest models: what is a large part of them is still nothing. */
static void less_than_a_millisecond_is_not_told(void) {
    struct pace p;
    char text[200] = "";
    pace_init(&p);
    for (int tenths = 9; tenths <= 11; tenths += 2) {
        double step = 2.0 * PACE_STEPS, wait = 0.1 * tenths * PACE_STEPS;
        struct pace_sums all[RANKS] = {{step, wait}, {step, 0}, {step, wait}};
        EXPECT(pace_look(&p, all, RANKS, text, sizeof text) == (tenths == 11));
    }
    EXPECT_STRING(text, "rank 1 is slow: the others wait 1 of a step's 2 ms for it");
}

static void it_is_told_again_only_after_it_was_as_fast_as_the_others_or_another_was_slow(void) {
    struct pace p;
    char text[200] = "";
    pace_init(&p);
    EXPECT(look(&p, 10, 30, 0, 30, text, sizeof text) == 1);
    EXPECT(look(&p, 1, 30, 30, 0, text, sizeof text) == 1);
    EXPECT_CONTAINS(text, "rank 2 is slow");
    EXPECT(look(&p, 1, 5, 5, 5, text, sizeof text) == 0);
    EXPECT(look(&p, 1, 30, 30, 0, text, sizeof text) == 1);
}

int main(void) {
    RUN(steps_are_added_up_but_for_the_first_ones);
    RUN(the_rank_that_waits_least_is_named_once_it_stands_out);
    RUN(small_differences_are_not_told);
    RUN(less_than_a_millisecond_is_not_told);
    RUN(it_is_told_again_only_after_it_was_as_fast_as_the_others_or_another_was_slow);
    return test_summary();
}
