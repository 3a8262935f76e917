/* llmc/common.c: the error's one line, element types bit by bit, files and folders. */
#include "llmc/common.h"
#include "folder.h"
#include "test.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- errors ---- */

static void test_a_message_is_one_line_whatever_it_quotes(void) {
    EXPECT(fail("--layers: %d\nis not\r\n\tpositive\x1b[31m\n", -1) == STATUS_ERROR);
    EXPECT_STRING(error_message(), "--layers: -1 is not   positive [31m");
}

static void test_a_message_may_quote_the_one_before(void) {
    fail("inner");
    EXPECT(fail_as(STATUS_OUT_OF_MEMORY, "outer: %s", error_message()) == STATUS_OUT_OF_MEMORY);
    EXPECT_STRING(error_message(), "outer: inner");
}

static void test_a_message_that_is_too_long_is_cut(void) {
    static char text[100000];
    memset(text, 'x', sizeof text - 1);
    fail("%s", text);
    size_t length = strlen(error_message());
    EXPECT(length > 1000 && length < 10000);
}

static void *fail_in_a_thread(void *first) {
    *(bool *)first = strcmp(error_message(), "") == 0;
    fail("of the other thread");
    return NULL;
}

static void test_each_thread_has_its_own_message(void) {
    pthread_t thread;
    bool empty_at_first = false;
    fail("of this thread");
    pthread_create(&thread, NULL, fail_in_a_thread, &empty_at_first);
    pthread_join(thread, NULL);
    EXPECT(empty_at_first);
    EXPECT_STRING(error_message(), "of this thread");
}

/* ---- memory ---- */

static void test_allocate_gives_zeroed_memory_and_a_pointer_for_nothing(void) {
    int *numbers = NULL;
    EXPECT(ALLOCATE(numbers, 1000) == STATUS_OK);
    int sum = 0;
    for (int i = 0; i < 1000; i++) {
        sum |= numbers[i];
    }
    EXPECT(sum == 0);
    free(numbers);
    EXPECT(ALLOCATE(numbers, 0) == STATUS_OK && numbers != NULL);
    free(numbers);
}

static void test_allocate_refuses_sizes_that_overflow(void) {
    double *numbers = (double *)folder;
    volatile size_t count = SIZE_MAX / 8 + 2; /* 8 bytes each: 8 modulo 2^64 */
    EXPECT(ALLOCATE(numbers, count) == STATUS_OUT_OF_MEMORY);
    EXPECT(numbers == NULL);
    EXPECT_CONTAINS(error_message(), "out of host memory");
    volatile int64_t negative = -1;
    EXPECT(ALLOCATE(numbers, negative) == STATUS_OUT_OF_MEMORY);
}

static void test_an_array_that_grows_keeps_what_it_holds_and_is_not_grown_for_each_element(void) {
    int64_t *numbers = NULL;
    size_t capacity = 0, grown = 0;
    for (size_t i = 0; i < 1000; i++) {
        size_t capacity_before = capacity;
        EXPECT(RESERVE(numbers, capacity, i + 1) == STATUS_OK && capacity > i);
        grown += capacity > capacity_before;
        numbers[i] = (int64_t)i * i;
    }
    EXPECT(grown < 10);
    EXPECT(RESERVE(numbers, capacity, 100000) == STATUS_OK && capacity >= 100000);
    for (int64_t i = 0; i < 1000; i++) {
        EXPECT(numbers[i] == i * i);
    }
    const int64_t *before = numbers;
    size_t capacity_before = capacity;
    volatile size_t count = SIZE_MAX / 8 + 2;
    EXPECT(RESERVE(numbers, capacity, count) == STATUS_OUT_OF_MEMORY);
    EXPECT(numbers == before && capacity == capacity_before);
    free(numbers);
}

/* ---- element types ---- */

static void test_dtype_names_are_those_of_safetensors(void) {
    static const struct {
        enum dtype dtype;
        const char *name;
        size_t bytes;
    } expected[] = {{DTYPE_F64, "F64", 8}, {DTYPE_F32, "F32", 4}, {DTYPE_BF16, "BF16", 2},
        {DTYPE_F16, "F16", 2}, {DTYPE_I64, "I64", 8}, {DTYPE_I32, "I32", 4}, {DTYPE_U16, "U16", 2},
        {DTYPE_U8, "U8", 1}};
    EXPECT(sizeof expected / sizeof expected[0] == DTYPE_COUNT);
    for (int i = 0; i < DTYPE_COUNT; i++) {
        enum dtype found = DTYPE_COUNT;
        EXPECT_STRING(dtype_name(expected[i].dtype), expected[i].name);
        EXPECT(dtype_bytes(expected[i].dtype) == expected[i].bytes);
        EXPECT(dtype_from_name(expected[i].name, &found) && found == expected[i].dtype);
    }
    enum dtype found;
    EXPECT(!dtype_from_name("f32", &found) && !dtype_from_name("", &found) && !dtype_from_name("F3", &found));
}

/* The value of a 16-bit float by the definition of its format (IEEE 754, section 3.4), in double: an
   independent reference. The value of an infinity is that of the number that would come next. */
struct format {
    int exponent_bits, mantissa_bits;
    float (*to_float)(uint16_t bits);
    uint16_t (*from_float)(float value);
};
static const struct format formats[2] = {
    {8, 7, bf16_to_float, float_to_bf16}, {5, 10, f16_to_float, float_to_f16}};

static double magnitude_value(const struct format *f, unsigned magnitude) {
    int bias = (1 << (f->exponent_bits - 1)) - 1;
    int exponent = (int)(magnitude >> f->mantissa_bits),
        mantissa = (int)magnitude & ((1 << f->mantissa_bits) - 1);
    if (exponent == 0) {
        return ldexp(mantissa, 1 - bias - f->mantissa_bits);
    }
    return ldexp((1 << f->mantissa_bits) + mantissa, exponent - bias - f->mantissa_bits);
}

static unsigned infinity_bits(const struct format *f) {
    return ((1u << f->exponent_bits) - 1) << f->mantissa_bits;
}

static void test_every_16_bit_float_reads_as_its_definition_says_and_survives_the_round_trip(void) {
    for (int k = 0; k < 2; k++) {
        const struct format *f = &formats[k];
        int wrong = 0;
        for (unsigned bits = 0; bits < 0x10000; bits++) {
            unsigned magnitude = bits & 0x7fff;
            float value = f->to_float((uint16_t)bits);
            uint16_t back = f->from_float(value);
            if (magnitude > infinity_bits(f)) { /* NaN stays NaN, of the same sign */
                wrong += !isnan(value) || (back & 0x7fffu) <= infinity_bits(f) || (back ^ bits) & 0x8000u;
                continue;
            }
            double expected = magnitude == infinity_bits(f) ? INFINITY : magnitude_value(f, magnitude);
            wrong += fabs((double)value) != expected || (signbit(value) != 0) != (bits >> 15) || back != bits;
        }
        EXPECT(wrong == 0);
    }
}

/* The nearest magnitude of the format, ties to even, by bisection over the definition. */
static unsigned nearest_magnitude(const struct format *f, double value) {
    unsigned below = 0, above = infinity_bits(f); /* value(below) <= value < value(above) */
    if (value >= magnitude_value(f, above)) {
        return above;
    }
    while (above - below > 1) {
        unsigned middle = (below + above) / 2;
        if (magnitude_value(f, middle) <= value) {
            below = middle;
        } else {
            above = middle;
        }
    }
    double down = value - magnitude_value(f, below), up = magnitude_value(f, above) - value;
    return down < up || (down == up && below % 2 == 0) ? below : above;
}

static int rounds_wrong(const struct format *f, float value) {
    unsigned sign = signbit(value) ? 0x8000u : 0;
    return f->from_float(value) != (sign | nearest_magnitude(f, fabs((double)value)));
}

static void test_floats_round_to_the_nearest_16_bit_float_ties_to_even(void) {
    for (int k = 0; k < 2; k++) {
        const struct format *f = &formats[k];
        int wrong = 0;
        /* every tie, and its neighbours on both sides */
        for (unsigned magnitude = 0; magnitude < infinity_bits(f); magnitude++) {
            float tie = (float)((magnitude_value(f, magnitude) + magnitude_value(f, magnitude + 1)) / 2);
            wrong += rounds_wrong(f, tie) + rounds_wrong(f, -tie);
            wrong += rounds_wrong(f, nextafterf(tie, 0)) + rounds_wrong(f, nextafterf(tie, INFINITY));
        }
        /* floats all over the range */
        for (uint64_t bits = 0; bits < 0x7f800000u; bits += 65521) {
            uint32_t word = (uint32_t)bits;
            float value;
            memcpy(&value, &word, sizeof value);
            wrong += rounds_wrong(f, value);
        }
        EXPECT(wrong == 0);
        EXPECT(f->from_float(INFINITY) == infinity_bits(f) &&
               f->from_float(-INFINITY) == (0x8000u | infinity_bits(f)));
    }
}

static void test_a_nan_whose_payload_is_cut_off_stays_a_nan(void) {
    uint32_t word = 0x7f800001u; /* only the lowest bit of the payload is set */
    float nan;
    memcpy(&nan, &word, sizeof nan);
    EXPECT(isnan(bf16_to_float(float_to_bf16(nan))));
    EXPECT(isnan(f16_to_float(float_to_f16(nan))));
}

/* ---- files ---- */

static void test_files_hold_what_was_written(void) {
    static const char text[] = "zeros \0 and \n lines";
    uint8_t *data = NULL;
    size_t bytes = 0;
    EXPECT(file_write_all(in_folder("text"), "an older, longer text that is there already", 43) == STATUS_OK);
    EXPECT(file_write_all(in_folder("text"), text, sizeof text) == STATUS_OK);
    EXPECT(file_sync(in_folder("text")) == STATUS_OK && file_sync(folder) == STATUS_OK);
    EXPECT(file_read_all(in_folder("text"), &data, &bytes) == STATUS_OK);
    EXPECT(bytes == sizeof text && memcmp(data, text, sizeof text) == 0 && data[bytes] == 0);
    free(data);
    EXPECT(file_write_all(in_folder("empty"), NULL, 0) == STATUS_OK);
    EXPECT(file_read_all(in_folder("empty"), &data, &bytes) == STATUS_OK && bytes == 0 && data[0] == 0);
    free(data);
}

static void test_a_part_of_a_file_is_read_whole_or_the_error_says_where_it_ends(void) {
    char part[4];
    int file;
    uint64_t bytes;
    EXPECT_OK(file_write_all(in_folder("part"), "0123456789", 10));
    EXPECT_OK(file_open(in_folder("part"), &file, &bytes));
    EXPECT_OK(file_read_at(file, "part", part, 4, 3));
    EXPECT(bytes == 10 && memcmp(part, "3456", 4) == 0);
    EXPECT_OK(file_read_at(file, "part", part, 4, 6));
    EXPECT_OK(file_read_at(file, "part", part, 0, 99));
    EXPECT(memcmp(part, "6789", 4) == 0);
    EXPECT(file_read_at(file, "part", part, 4, 8) == STATUS_ERROR);
    EXPECT_STRING(error_message(), "part: ends at byte 10, before its header says; restore the file");
    close(file);
    EXPECT(file_read_at(file, "part", part, 4, 3) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "part: cannot read at byte 3");
}

static void test_a_file_that_does_not_tell_its_size_is_read_to_its_end(void) {
    uint8_t *data = NULL;
    size_t bytes = 0;
    EXPECT(file_read_all("/proc/self/maps", &data, &bytes) == STATUS_OK);
    EXPECT(bytes > 100 && data != NULL && data[bytes - 1] == '\n');
    free(data);
}

static void test_file_errors_name_the_path_and_the_reason(void) {
    uint8_t *data = NULL;
    size_t bytes = 0;
    EXPECT(file_read_all(in_folder("missing"), &data, &bytes) == STATUS_ERROR && data == NULL);
    EXPECT_CONTAINS(error_message(), in_folder("missing"));
    EXPECT_CONTAINS(error_message(), strerror(ENOENT));
    EXPECT(file_read_all(folder, &data, &bytes) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), strerror(EISDIR));
    EXPECT(file_write_all(in_folder("missing/file"), "x", 1) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), in_folder("missing/file"));
    EXPECT(file_write_all("/dev/full", "x", 1) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), strerror(ENOSPC));
    EXPECT(file_sync(in_folder("missing")) == STATUS_ERROR);
}

static void test_what_is_left_in_a_stream_is_read_from_a_socket_too(void) {
    uint8_t *data = NULL;
    size_t bytes = 0;
    int ends[2];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    EXPECT(write(ends[0], "some text", 9) == 9 && close(ends[0]) == 0);
    EXPECT(stream_read_all(ends[1], "the socket", &data, &bytes) == STATUS_OK && bytes == 9);
    EXPECT_STRING((char *)data, "some text");
    free(data);
    close(ends[1]);
    EXPECT(stream_read_all(-1, "no stream", &data, &bytes) == STATUS_ERROR && data == NULL);
    EXPECT_CONTAINS(error_message(), "no stream: cannot read");
}

static void test_only_a_regular_file_is_opened_and_read_as_a_text(void) {
    uint8_t *data = NULL;
    size_t bytes = 0;
    uint64_t size = 0;
    int file = -1;
    EXPECT(mkfifo(in_folder("pipe"), 0600) == 0);
    const char *const others[] = {"/dev/zero", folder, in_folder("pipe")}; /* nobody writes the pipe */
    for (int i = 0; i < 3; i++) {
        EXPECT(file_open(others[i], &file, &size) == STATUS_ERROR && file == -1);
        EXPECT_CONTAINS(error_message(), "is not a file");
        EXPECT(file_read_text(others[i], &data, &bytes) == STATUS_ERROR && data == NULL);
    }
    EXPECT(file_open(in_folder("missing"), &file, &size) == STATUS_ERROR && file == -1);
    EXPECT_CONTAINS(error_message(), strerror(ENOENT));
    EXPECT(file_write_all(in_folder("text"), "abc", 3) == STATUS_OK);
    EXPECT(file_open(in_folder("text"), &file, &size) == STATUS_OK && size == 3 && close(file) == 0);
    EXPECT(truncate(in_folder("text"), FILE_TEXT_BYTES) == 0);
    EXPECT(file_read_text(in_folder("text"), &data, &bytes) == STATUS_OK && bytes == FILE_TEXT_BYTES);
    free(data);
    EXPECT(truncate(in_folder("text"), FILE_TEXT_BYTES + 1) == 0);
    EXPECT(file_read_text(in_folder("text"), &data, &bytes) == STATUS_ERROR && data == NULL);
    EXPECT_CONTAINS(error_message(), "a file of its kind has at most 16 MiB");
}

static void test_folders_are_made_with_their_parents_and_removed_with_what_they_hold(void) {
    EXPECT(make_directories(in_folder("a/b//c/")) == STATUS_OK);
    EXPECT(make_directories(in_folder("a/b/c")) == STATUS_OK); /* there already */
    EXPECT(path_is_directory(in_folder("a/b/c")) && path_exists(in_folder("a/b")));
    EXPECT(file_write_all(in_folder("a/b/c/file"), "x", 1) == STATUS_OK);
    EXPECT(path_exists(in_folder("a/b/c/file")) && !path_is_directory(in_folder("a/b/c/file")));
    /* a link is removed, not what it points to */
    EXPECT(make_directories(in_folder("kept")) == STATUS_OK &&
           file_write_all(in_folder("kept/file"), "x", 1) == STATUS_OK);
    EXPECT(symlink("../../kept", in_folder("a/b/link")) == 0);
    EXPECT(path_is_directory(in_folder("a/b/link")));
    EXPECT(remove_tree(in_folder("a")) == STATUS_OK);
    EXPECT(!path_exists(in_folder("a")) && path_exists(in_folder("kept/file")));
    EXPECT(remove_tree(in_folder("a")) == STATUS_OK); /* nothing there */
}

static void test_a_file_in_the_way_of_a_folder_is_an_error_that_names_it(void) {
    EXPECT(file_write_all(in_folder("way"), "x", 1) == STATUS_OK);
    EXPECT(make_directories(in_folder("way/below")) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), in_folder("way"));
    EXPECT(make_directories("") == STATUS_ERROR);
    /* the reason is mkdir's, not that of looking what is there */
    EXPECT(symlink("nowhere", in_folder("dangling")) == 0);
    EXPECT(make_directories(in_folder("dangling")) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), strerror(EEXIST));
}

static void test_paths_that_are_too_long_are_errors(void) {
    char path[16];
    EXPECT(path_join(path, sizeof path, "/run", "state.json") == STATUS_OK); /* 15 characters and the zero */
    EXPECT_STRING(path, "/run/state.json");
    EXPECT(path_join(path, sizeof path, "/runs", "state.json") == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "too long");
    static char longest[PATH_MAX + 10];
    memset(longest, 'x', sizeof longest - 1);
    EXPECT(make_directories(longest) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "too long");
}

/* ---- clock and log ---- */

static void test_the_clock_goes_forward_in_seconds(void) {
    double start = time_seconds();
    usleep(20000);
    double passed = time_seconds() - start;
    EXPECT(passed >= 0.02 && passed < 10);
}

static void test_the_log_prints_lines_until_it_is_switched_off(void) {
    fflush(stdout);
    int terminal = dup(1);
    EXPECT(freopen(in_folder("log"), "w", stdout) != NULL);
    log_line("step %d", 1);
    log_enable(false);
    bool off = !log_enabled();
    log_line("step %d", 2);
    log_enable(true);
    log_line("step %d", 3);
    dup2(terminal, 1);
    close(terminal);
    EXPECT(off && log_enabled());
    uint8_t *text = NULL;
    size_t bytes;
    EXPECT(file_read_all(in_folder("log"), &text, &bytes) == STATUS_OK);
    EXPECT_STRING((char *)text, "step 1\nstep 3\n");
    free(text);
}

int main(void) {
    make_folder("test_common");
    RUN(test_a_message_is_one_line_whatever_it_quotes);
    RUN(test_a_message_may_quote_the_one_before);
    RUN(test_a_message_that_is_too_long_is_cut);
    RUN(test_each_thread_has_its_own_message);
    RUN(test_allocate_gives_zeroed_memory_and_a_pointer_for_nothing);
    RUN(test_allocate_refuses_sizes_that_overflow);
    RUN(test_an_array_that_grows_keeps_what_it_holds_and_is_not_grown_for_each_element);
    RUN(test_dtype_names_are_those_of_safetensors);
    RUN(test_every_16_bit_float_reads_as_its_definition_says_and_survives_the_round_trip);
    RUN(test_floats_round_to_the_nearest_16_bit_float_ties_to_even);
    RUN(test_a_nan_whose_payload_is_cut_off_stays_a_nan);
    RUN(test_files_hold_what_was_written);
    RUN(test_a_part_of_a_file_is_read_whole_or_the_error_says_where_it_ends);
    RUN(test_a_file_that_does_not_tell_its_size_is_read_to_its_end);
    RUN(test_file_errors_name_the_path_and_the_reason);
    RUN(test_what_is_left_in_a_stream_is_read_from_a_socket_too);
    RUN(test_only_a_regular_file_is_opened_and_read_as_a_text);
    RUN(test_folders_are_made_with_their_parents_and_removed_with_what_they_hold);
    RUN(test_a_file_in_the_way_of_a_folder_is_an_error_that_names_it);
    RUN(test_paths_that_are_too_long_are_errors);
    RUN(test_the_clock_goes_forward_in_seconds);
    RUN(test_the_log_prints_lines_until_it_is_switched_off);
    remove_tree(folder);
    return test_summary();
}
