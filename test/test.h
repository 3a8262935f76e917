/* The tests' frame: a test is a function, RUN calls it and prints "ok NAME" or the failed expectations; the last line
   is "N passed, N failed". A test that lacks something of the machine says SKIP("needs ..."), and the last line counts
   it: "N passed, N failed, N skipped". FLASHGPT_TEST=text runs, and counts, only the tests whose name contains the text. */
#ifndef TEST_TEST_H
#define TEST_TEST_H

#include "llmc/common.h"

#include <math.h>
#include <stdlib.h>

static int test_passed_, test_failed_, test_skipped_, test_failures_in_this_;
static const char *test_skip_reason_;

#define EXPECT(condition)                                                                                    \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            test_failures_in_this_++;                                                                        \
            printf("    %s:%d: expected %s\n", __FILE__, __LINE__, #condition);                              \
        }                                                                                                    \
    } while (0)

/* A call of the library's: a failure prints its message. */
static inline bool succeeded(enum status status) {
    if (status != STATUS_OK) {
        printf("    %s\n", error_message());
    }
    return status == STATUS_OK;
}
#define EXPECT_OK(call) EXPECT(succeeded(call))

/* |a - b| <= tolerance; a NaN fails */
#define EXPECT_NEAR(a, b, tolerance)                                                                         \
    do {                                                                                                     \
        double a_ = (double)(a), b_ = (double)(b), tolerance_ = (tolerance);                                 \
        if (!(fabs(a_ - b_) <= tolerance_)) {                                                                \
            test_failures_in_this_++;                                                                        \
            printf("    %s:%d: %s = %.9g, %s = %.9g, differ by %.3g > %.3g\n", __FILE__, __LINE__, #a, a_,   \
                #b, b_, fabs(a_ - b_), tolerance_);                                                          \
        }                                                                                                    \
    } while (0)

#define EXPECT_STRING(a, b)                                                                                  \
    do {                                                                                                     \
        const char *a_ = (a), *b_ = (b);                                                                     \
        if (strcmp(a_, b_) != 0) {                                                                           \
            test_failures_in_this_++;                                                                        \
            printf("    %s:%d: \"%s\" is not \"%s\"\n", __FILE__, __LINE__, a_, b_);                         \
        }                                                                                                    \
    } while (0)

/* the text contains the part */
#define EXPECT_CONTAINS(text, part)                                                                          \
    do {                                                                                                     \
        const char *text_ = (text), *part_ = (part);                                                         \
        if (strstr(text_, part_) == NULL) {                                                                  \
            test_failures_in_this_++;                                                                        \
            printf("    %s:%d: \"%s\" does not contain \"%s\"\n", __FILE__, __LINE__, text_, part_);         \
        }                                                                                                    \
    } while (0)

/* ends the test that it is in */
#define SKIP(reason)                                                                                         \
    do {                                                                                                     \
        test_skip_reason_ = (reason);                                                                        \
        return;                                                                                              \
    } while (0)

#define RUN(test)                                                                                            \
    do {                                                                                                     \
        const char *chosen_ = getenv("FLASHGPT_TEST");                                                       \
        if (chosen_ != NULL && strstr(#test, chosen_) == NULL) {                                             \
            break;                                                                                           \
        }                                                                                                    \
        test_failures_in_this_ = 0;                                                                          \
        test_skip_reason_ = NULL;                                                                            \
        test();                                                                                              \
        if (test_failures_in_this_ == 0 && test_skip_reason_ != NULL) {                                      \
            test_skipped_++;                                                                                 \
            printf("  skipped %s: %s\n", #test, test_skip_reason_);                                          \
        } else if (test_failures_in_this_ == 0) {                                                            \
            test_passed_++;                                                                                  \
            printf("  ok %s\n", #test);                                                                      \
        } else {                                                                                             \
            test_failed_++;                                                                                  \
            printf("  FAILED %s\n", #test);                                                                  \
        }                                                                                                    \
        fflush(stdout);                                                                                      \
    } while (0)

static inline int test_summary(void) {
    printf("%d passed, %d failed", test_passed_, test_failed_);
    if (test_skipped_ > 0) {
        printf(", %d skipped", test_skipped_);
    }
    printf("\n");
    return test_failed_ == 0 ? 0 : 1;
}

#endif
