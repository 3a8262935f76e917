/* Which rank the others wait for: told once it stands out over a window of steps, and not for noise. */
#include "llmc/pace.h"
#include "test.h"

enum { RANKS = 3 };

/* So many steps of 100 ms in which each rank waits as given; the lines that came of them. */
static int add_steps(struct pace *p, int steps, double a, double b, double c, char *text, size_t size) {
    double wait_ms[2 * RANKS] = {a, -1e9, b, -1e9, c, -1e9}; /* what lies between is not looked at */
    int lines = 0;
    for (int i = 0; i < steps; i++) {
        lines += pace_add_step(p, 100, wait_ms, 2, text, size);
    }
    return lines;
}

static void the_rank_that_waits_least_is_named_once_it_stands_out(void) {
    struct pace p;
    char text[200] = "";
    EXPECT(pace_init(&p, RANKS) == STATUS_OK);
    EXPECT(add_steps(&p, PACE_WARM_UP + PACE_STEPS - 1, 25, 2, 35, text, sizeof text) == 0);
    EXPECT(add_steps(&p, 1, 25, 2, 35, text, sizeof text) == 1);
    EXPECT_STRING(text, "rank 1 is slow: the others wait 28 of a step's 100 ms for it");
    pace_free(&p);
}

static void it_is_told_again_only_after_it_was_as_fast_as_the_others_or_another_was_slow(void) {
    struct pace p;
    char text[200] = "";
    EXPECT(pace_init(&p, RANKS) == STATUS_OK);
    EXPECT(add_steps(&p, PACE_WARM_UP + PACE_STEPS, 30, 0, 30, text, sizeof text) == 1);
    EXPECT(add_steps(&p, 10 * PACE_STEPS, 30, 0, 30, text, sizeof text) == 0);
    EXPECT(add_steps(&p, PACE_STEPS, 30, 30, 0, text, sizeof text) == 1);
    EXPECT_CONTAINS(text, "rank 2 is slow");
    EXPECT(add_steps(&p, PACE_STEPS, 5, 5, 5, text, sizeof text) == 0);
    EXPECT(add_steps(&p, PACE_STEPS, 30, 30, 0, text, sizeof text) == 1);
    pace_free(&p);
}

static void the_first_steps_small_differences_and_single_ranks_are_not_told(void) {
    struct pace p;
    char text[200] = "";
    EXPECT(pace_init(&p, RANKS) == STATUS_OK);
    EXPECT(add_steps(&p, PACE_WARM_UP, 9000, 0, 9000, text, sizeof text) == 0);
    EXPECT(add_steps(&p, 2 * PACE_STEPS, 9, 0, 9, text, sizeof text) == 0);
    pace_free(&p);
    EXPECT(pace_init(&p, 1) == STATUS_OK);
    EXPECT(add_steps(&p, 3 * PACE_STEPS, 90, 0, 0, text, sizeof text) == 0);
    pace_free(&p);
}

int main(void) {
    RUN(the_rank_that_waits_least_is_named_once_it_stands_out);
    RUN(it_is_told_again_only_after_it_was_as_fast_as_the_others_or_another_was_slow);
    RUN(the_first_steps_small_differences_and_single_ranks_are_not_told);
    return test_summary();
}
