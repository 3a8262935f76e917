/* The random numbers: the generator against its published test vectors, its distribution, and that a stream gives the
   same values however it is cut. */
#include "test.h"

#include <stdlib.h>

#include "llmc/backend.h"
#include "llmc/random.h"

static bool block_is(struct random_block r, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return r.word[0] == a && r.word[1] == b && r.word[2] == c && r.word[3] == d;
}

/* "philox4x32 10" of kat_vectors in Random123, the authors' own implementation */
static void test_blocks_are_the_published_philox_vectors(void) {
    EXPECT(block_is(random_block(0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
    EXPECT(block_is(random_block(~0ull, ~0ull, ~0ull), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
    /* counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0: the digits of pi */
    EXPECT(block_is(random_block(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88), 0xd16cfe09,
        0x94fdcceb, 0x5001e420, 0x24126ea1));
}

static void test_normal_values_have_the_moments_of_a_sum_of_eight_uniforms(void) {
    enum { COUNT = 1 << 20 };
    double sum[5] = {0}, largest = 0;
    for (int i = 0; i < COUNT; i++) {
        double z = random_normal(42, 7, (uint64_t)i), power = 1;
        for (int p = 1; p <= 4; p++) {
            power *= z;
            sum[p] += power / COUNT;
        }
        largest = fmax(largest, fabs(z));
    }
    /* five standard deviations of each estimate */
    EXPECT_NEAR(sum[1], 0, 5 * 1e-3);
    EXPECT_NEAR(sum[2], 1, 5 * 1.4e-3);
    EXPECT_NEAR(sum[3], 0, 5 * 3.7e-3);
    EXPECT_NEAR(sum[4], 3 - 1.2 / 8, 5 * 9e-3); /* a uniform's excess kurtosis is -1.2 */
    EXPECT(largest > 4 && largest < 4.9);
}

/* The standard normal distribution function, which eight uniforms meet within 0.003. */
static void test_normal_values_are_distributed_normally(void) {
    enum { COUNT = 1 << 18 };
    const double points[] = {-2, -1, -0.5, 0, 0.5, 1, 2};
    for (int p = 0; p < 7; p++) {
        int below = 0;
        for (int i = 0; i < COUNT; i++) {
            below += random_normal(1, 2, (uint64_t)i) < points[p];
        }
        EXPECT_NEAR((double)below / COUNT, 0.5 * erfc(-points[p] / sqrt(2)), 0.008);
    }
}

static void test_uniform_values_fill_the_unit_interval_evenly(void) {
    enum { COUNT = 1 << 18, BINS = 16 };
    int bin[BINS] = {0};
    for (int i = 0; i < COUNT; i++) {
        double u = random_uniform(5, RANDOM_STREAM_SAMPLE, (uint64_t)i);
        EXPECT(u >= 0 && u < 1);
        bin[(int)(u * BINS)]++;
    }
    double chi_squared = 0, expected = (double)COUNT / BINS;
    for (int i = 0; i < BINS; i++) {
        chi_squared += (bin[i] - expected) * (bin[i] - expected) / expected;
    }
    EXPECT(chi_squared < 44); /* 15 degrees of freedom: passed by all but one in 10,000 */
}

static double correlation(uint64_t seed0, uint64_t stream0, uint64_t seed1, uint64_t stream1, uint64_t lag) {
    enum { COUNT = 1 << 16 };
    double sum = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        sum += (double)random_normal(seed0, stream0, i) * random_normal(seed1, stream1, i + lag);
    }
    return sum / COUNT;
}

static void test_seeds_streams_and_neighbours_are_uncorrelated(void) {
    const double five_sigma = 5.0 / 256;
    EXPECT_NEAR(correlation(1, 0, 1, 0, 0), 1, five_sigma);
    EXPECT_NEAR(correlation(1, 0, 2, 0, 0), 0, five_sigma);
    EXPECT_NEAR(correlation(1, 0, 1, 1, 0), 0, five_sigma);
    EXPECT_NEAR(correlation(1, 0, 1, 0, 1), 0, five_sigma);
    EXPECT_NEAR(correlation(1, 0, 1ull << 32, 0, 0), 0, five_sigma);
    EXPECT_NEAR(correlation(1, 0, 1, 1ull << 32, 0), 0, five_sigma);
}

/* ---- the backend's op ---- */

enum { FILLED = 3001 };

static void test_a_filled_buffer_is_the_stream_scaled_and_rounded(void) {
    struct backend *b;
    EXPECT(backend_cpu_create(&b, 2) == STATUS_OK);
    float *single = NULL;
    double *twice = NULL;
    uint16_t *half = NULL;
    EXPECT(ALLOCATE(single, FILLED) == STATUS_OK && ALLOCATE(twice, FILLED) == STATUS_OK &&
           ALLOCATE(half, FILLED) == STATUS_OK);
    struct tensor f32 = {single, DTYPE_F32}, f64 = {twice, DTYPE_F64}, bf16 = {half, DTYPE_BF16};
    EXPECT(b->random_normal(b, f32, FILLED, 9, 3, 100, 0.02) == STATUS_OK);
    EXPECT(b->random_normal(b, f64, FILLED, 9, 3, 100, 0.02) == STATUS_OK);
    EXPECT(b->random_normal(b, bf16, FILLED, 9, 3, 100, 0.02) == STATUS_OK);
    for (int i = 0; i < FILLED; i++) {
        double value = 0.02 * random_normal(9, 3, (uint64_t)i + 100);
        EXPECT(twice[i] == value && single[i] == (float)value && half[i] == float_to_bf16((float)value));
    }
    free(single);
    free(twice);
    free(half);
    b->free(b);
}

static void test_any_split_of_a_buffer_fills_it_with_the_same_values(void) {
    struct backend *b;
    EXPECT(backend_cpu_create(&b, 2) == STATUS_OK);
    float whole[FILLED], pieces[FILLED];
    struct tensor to = {whole, DTYPE_F32}, from = {pieces, DTYPE_F32};
    EXPECT(b->random_normal(b, to, FILLED, 11, 5, 0, 1) == STATUS_OK);
    const int cuts[] = {0, 1, 513, 514, 1500, FILLED};
    for (int i = 0; i < 5; i++) {
        int first = cuts[i], count = cuts[i + 1] - cuts[i];
        EXPECT(b->random_normal(b, tensor_at(from, first), count, 11, 5, first, 1) == STATUS_OK);
    }
    EXPECT(memcmp(whole, pieces, sizeof whole) == 0);
    b->free(b);
}

int main(void) {
    RUN(test_blocks_are_the_published_philox_vectors);
    RUN(test_normal_values_have_the_moments_of_a_sum_of_eight_uniforms);
    RUN(test_normal_values_are_distributed_normally);
    RUN(test_uniform_values_fill_the_unit_interval_evenly);
    RUN(test_seeds_streams_and_neighbours_are_uncorrelated);
    RUN(test_a_filled_buffer_is_the_stream_scaled_and_rounded);
    RUN(test_any_split_of_a_buffer_fills_it_with_the_same_values);
    return test_summary();
}
