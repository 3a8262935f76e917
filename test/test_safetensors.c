/* llmc/safetensors.c: what is written reads back, every kind of malformed header is refused with one line that names
   the file, and a disk that takes no more is noticed. */
#include "llmc/safetensors.h"
#include "llmc/checksum.h"
#include "folder.h"
#include "test.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

static char path[PATH_MAX * 2];

/* A file of the header's length (or, not 0, `claimed_bytes`), the header and `data_bytes` zeros. */
static void write_file(const char *header, uint64_t claimed_bytes, size_t data_bytes) {
    uint64_t length = claimed_bytes != 0 ? claimed_bytes : strlen(header);
    FILE *file = fopen(path, "wb");
    fwrite(&length, 1, sizeof length, file);
    fputs(header, file);
    for (size_t i = 0; i < data_bytes; i++) {
        fputc(0, file);
    }
    fclose(file);
}

static struct safetensors *open_file(void) {
    struct safetensors *file = NULL;
    EXPECT(safetensors_open(&file, path) == STATUS_OK);
    return file;
}

static void expect_refused(const char *why) {
    struct safetensors *file = NULL;
    EXPECT(safetensors_open(&file, path) == STATUS_ERROR);
    EXPECT(file == NULL);
    EXPECT_CONTAINS(error_message(), path);
    EXPECT_CONTAINS(error_message(), why);
    safetensors_close(file);
}

/* ---- reading ---- */

static void test_a_header_is_read_with_its_tensors_in_the_order_of_their_data(void) {
    write_file("{\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]},"
               "\"__metadata__\":{\"format\":\"pt\",\"empty\":\"\"},"
               "\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},"
               "\"none\":{\"dtype\":\"F64\",\"shape\":[5,0],\"data_offsets\":[4,4]},"
               "\"mask\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[28,29]}}   ",
        0, 29);
    struct safetensors *file = open_file();
    if (file == NULL) {
        return;
    }
    EXPECT(file->count == 4);
    static const char *const names[] = {"a", "none", "b", "mask"};
    for (size_t i = 0; i < 4; i++) {
        EXPECT_STRING(file->entries[i].name, names[i]);
    }
    const struct safetensors_entry *b = safetensors_find(file, "b"), *mask = safetensors_find(file, "mask");
    EXPECT(b == &file->entries[2] && b->dtype == DTYPE_F32 && b->dimensions == 2);
    EXPECT(b->shape[0] == 2 && b->shape[1] == 3 && b->begin == 4 && b->end == 28);
    EXPECT(mask != NULL && mask->dtype == DTYPE_U8 && mask->dimensions == 0);
    EXPECT(safetensors_find(file, "c") == NULL && safetensors_find(file, "__metadata__") == NULL);
    EXPECT_STRING(safetensors_metadata(file, "format"), "pt");
    EXPECT_STRING(safetensors_metadata(file, "empty"), "");
    EXPECT(safetensors_metadata(file, "other") == NULL);
    safetensors_close(file);
}

static void test_a_file_without_tensors_is_valid(void) {
    write_file("{}", 0, 0);
    struct safetensors *file = open_file();
    EXPECT(file != NULL && file->count == 0);
    safetensors_close(file);
}

static void test_malformed_headers_are_refused(void) {
#define F32_2 "\"dtype\":\"F32\",\"shape\":[2]"
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *why;
    } cases[] = {
        {"", 0, "does not begin with {"},
        {"[]", 0, "does not begin with {"},
        {" {}", 0, "does not begin with {"},
        {"{\"a\":", 0, "JSON ends too early"},
        {"{} x", 0, "something follows"},
        {"{}", 1, "take 0 bytes, the file holds 1"},
        {"{\"a\":1}", 0, "\"a\": \"dtype\" is missing"},
        {"{\"a\":{}}", 0, "\"a\": \"dtype\" is missing"},
        {"{\"a\":{\"dtype\":4,\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
            "\"dtype\" is missing or not a string"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "\"F31\" is not supported"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "\"shape\" is not an array"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", 8, "\"shape\" is not an array"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "\"shape\" is not an array"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}", 8,
            "\"shape\" is not an array"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[\"2\"],\"data_offsets\":[0,8]}}", 8,
            "\"shape\" is not an array"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
            "at most 8 sizes"},
        {"{\"a\":{" F32_2 "}}", 8, "\"data_offsets\" is not [begin, end]"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[]}}", 8, "\"data_offsets\" is not [begin, end]"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0]}}", 8, "\"data_offsets\" is not [begin, end]"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0,8,8]}}", 8, "\"data_offsets\" is not [begin, end]"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[8,0]}}", 8, "\"data_offsets\" is not [begin, end]"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[-8,0]}}", 8, "\"data_offsets\" is not [begin, end]"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0,8e0]}}", 8, "\"data_offsets\" is not [begin, end]"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0,4]}}", 4, "its shape takes 8 bytes, its data_offsets 4"},
        /* sizes and offsets that a double would round to fit */
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9007199254740993],\"data_offsets\":[0,9007199254740992]}}", 8,
            "takes 9007199254740993 bytes, its data_offsets 9007199254740992"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9007199254740993],\"data_offsets\":[0,9007199254740993]}}", 8,
            "take 9007199254740993 bytes, the file holds 8"},
        /* products that wrap around to the right size: 2^61 * 8 + 0, 2^32 * 2^32 + 0 */
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0,
            "than any memory"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
            "than any memory"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0,8]},\"b\":{" F32_2 ",\"data_offsets\":[4,12]}}", 12,
            "\"b\": overlaps the one before"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0,8]},\"b\":{" F32_2 ",\"data_offsets\":[0,8]}}", 8,
            "overlaps the one before"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0,8]},\"b\":{" F32_2 ",\"data_offsets\":[9,17]}}", 17,
            "\"b\": there is a hole before its data"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[1,9]}}", 9, "\"a\": there is a hole before its data"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0,8]}}", 9, "the tensors take 8 bytes, the file holds 9"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0,8]}}", 7, "the tensors take 8 bytes, the file holds 7"},
        {"{\"a\":{" F32_2 ",\"data_offsets\":[0,8]},\"a\":{" F32_2 ",\"data_offsets\":[8,16]}}", 16,
            "\"a\" is there twice"},
        {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object"},
        {"{\"__metadata__\":{\"step\":5}}", 0, "\"step\" of __metadata__ is not a string"},
    };
#undef F32_2
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_file(cases[i].header, 0, cases[i].data_bytes);
        expect_refused(cases[i].why);
    }
}

static void test_header_lengths_that_cannot_be_are_refused(void) {
    write_file("{}", 3, 0);
    expect_refused("a header of 3 bytes in a file of 10");
    write_file("{}", UINT64_MAX, 0);
    expect_refused("a header of 18446744073709551615 bytes");
    write_file("{}", UINT64_MAX - 7, 100); /* 8 + this is 0 */
    expect_refused("a header of 18446744073709551608 bytes");
    write_file("{}", 100000001, 0);
    EXPECT(truncate(path, 200000000) == 0); /* sparse: the length would fit the file */
    expect_refused("a header of 100000001 bytes in a file of 200000000");
    EXPECT(file_write_all(path, "1234567", 7) == STATUS_OK);
    expect_refused("only 7 bytes");
    EXPECT(file_write_all(path, NULL, 0) == STATUS_OK);
    expect_refused("only 0 bytes");
}

static void test_what_is_no_file_is_refused(void) {
    struct safetensors *file = NULL;
    EXPECT(safetensors_open(&file, folder) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "not a file");
    unlink(path);
    expect_refused(strerror(ENOENT));
}

static void test_only_what_is_inside_a_tensor_can_be_read(void) {
    float data[4] = {1, 2, 3, 4}, read[4];
    struct safetensors_entry entries[] = {{"a", DTYPE_F32, 1, {2}, 0, 0}, {"b", DTYPE_F32, 1, {2}, 0, 0}};
    struct safetensors_writer *writer;
    EXPECT(safetensors_create(&writer, path, entries, 2, NULL, NULL, 0) == STATUS_OK);
    EXPECT(safetensors_write(writer, data, sizeof data) == STATUS_OK);
    EXPECT(safetensors_finish(writer, NULL, NULL) == STATUS_OK);
    struct safetensors *file = open_file();
    const struct safetensors_entry *a = safetensors_find(file, "a"), *b = safetensors_find(file, "b");
    EXPECT(safetensors_read(file, b, 4, read, 4) == STATUS_OK && read[0] == 4);
    EXPECT(safetensors_read(file, a, 8, read, 0) == STATUS_OK);
    EXPECT(safetensors_read(file, a, 4, read, 8) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "tensor \"a\" has 8 bytes, not 8 from 4 on");
    EXPECT(safetensors_read(file, a, 9, read, 0) == STATUS_ERROR);
    EXPECT(safetensors_read(file, a, UINT64_MAX, read, 8) == STATUS_ERROR);
    EXPECT(truncate(path, (off_t)file->file_bytes - 2) == 0); /* under the reader's feet */
    EXPECT(safetensors_read(file, a, 0, read, 8) == STATUS_OK);
    EXPECT(safetensors_read(file, b, 0, read, 8) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "before its header says");
    safetensors_close(file);
}

static void test_values_of_every_floating_point_type_are_converted(void) {
    enum { COUNT = 5000 }; /* more than is converted at a time */
    static double f64[COUNT], as_f64[COUNT];
    static float f32[COUNT], as_f32[COUNT];
    static uint16_t bf16[COUNT], f16[COUNT];
    for (int i = 0; i < COUNT; i++) {
        f64[i] = i + ldexp(1, -40);
        f32[i] = (float)i + 0.1f;
        bf16[i] = float_to_bf16((float)(i % 256));
        f16[i] = float_to_f16((float)(i % 2048) / 4);
    }
    int64_t bits = 0x7ff0000000000001; /* a signalling NaN: unchanged only if it is not touched */
    memcpy(&f64[COUNT - 1], &bits, sizeof bits);
    struct safetensors_entry entries[] = {{"f64", DTYPE_F64, 1, {COUNT}, 0, 0},
        {"f32", DTYPE_F32, 1, {COUNT}, 0, 0}, {"bf16", DTYPE_BF16, 1, {COUNT}, 0, 0},
        {"f16", DTYPE_F16, 1, {COUNT}, 0, 0}, {"tokens", DTYPE_I32, 1, {1}, 0, 0}};
    struct safetensors_writer *writer;
    EXPECT(safetensors_create(&writer, path, entries, 5, NULL, NULL, 0) == STATUS_OK);
    EXPECT(safetensors_write(writer, f64, sizeof f64) == STATUS_OK &&
           safetensors_write(writer, f32, sizeof f32) == STATUS_OK);
    EXPECT(safetensors_write(writer, bf16, sizeof bf16) == STATUS_OK &&
           safetensors_write(writer, f16, sizeof f16) == STATUS_OK);
    EXPECT(safetensors_write(writer, "1234", 4) == STATUS_OK &&
           safetensors_finish(writer, NULL, NULL) == STATUS_OK);
    struct safetensors *file = open_file();
    EXPECT(safetensors_read_values(file, safetensors_find(file, "f64"), 0, COUNT, as_f64, DTYPE_F64) ==
           STATUS_OK);
    EXPECT(memcmp(as_f64, f64, sizeof f64) == 0);
    EXPECT(safetensors_read_values(file, safetensors_find(file, "f64"), 3, 4000, as_f32, DTYPE_F32) ==
           STATUS_OK);
    EXPECT(as_f32[0] == 3.0f && as_f32[3999] == 4002.0f);
    EXPECT(safetensors_read_values(file, safetensors_find(file, "f32"), 0, COUNT, as_f64, DTYPE_F64) ==
           STATUS_OK);
    EXPECT(as_f64[4000] == (double)f32[4000]);
    EXPECT(safetensors_read_values(file, safetensors_find(file, "bf16"), 1000, 4000, as_f32, DTYPE_F32) ==
           STATUS_OK);
    EXPECT(as_f32[0] == 1000 % 256 && as_f32[3999] == 4999 % 256);
    EXPECT(safetensors_read_values(file, safetensors_find(file, "f16"), 0, COUNT, as_f64, DTYPE_F64) ==
           STATUS_OK);
    EXPECT(as_f64[2047] == 2047 / 4.0 && as_f64[4999] == (4999 - 4096) / 4.0);
    EXPECT(safetensors_read_values(file, safetensors_find(file, "f32"), 4999, 2, as_f64, DTYPE_F64) ==
           STATUS_ERROR);
    EXPECT(safetensors_read_values(file, safetensors_find(file, "tokens"), 0, 1, as_f32, DTYPE_F32) ==
           STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "tensor \"tokens\" holds I32, not floating-point numbers");
    safetensors_close(file);
}

/* ---- writing ---- */

static void test_a_file_is_written_byte_by_byte_as_the_format_says(void) {
    char matrix[] = "quote\"";
    struct safetensors_entry entries[] = {
        {matrix, DTYPE_U8, 2, {1, 3}, 0, 0}, {"s", DTYPE_U16, 0, {0}, 0, 0}};
    static const char *const keys[] = {"format"}, *const values[] = {"pt"};
    struct safetensors_writer *writer;
    uint64_t told = 0, told_bytes = 0, right = 1;
    EXPECT(safetensors_create(&writer, path, entries, 2, keys, values, 1) == STATUS_OK);
    EXPECT(entries[0].begin == 0 && entries[0].end == 3 && entries[1].begin == 3 && entries[1].end == 5);
    EXPECT(
        safetensors_write(writer, "ab", 2) == STATUS_OK); /* pieces that do not heed the tensors' borders */
    EXPECT(safetensors_write(writer, NULL, 0) == STATUS_OK);
    EXPECT(safetensors_write(writer, "cde", 3) == STATUS_OK);
    EXPECT(safetensors_finish(writer, &told, &told_bytes) == STATUS_OK);
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                                 "\"quote\\\"\":{\"dtype\":\"U8\",\"shape\":[1,3],\"data_offsets\":[0,3]},"
                                 "\"s\":{\"dtype\":\"U16\",\"shape\":[],\"data_offsets\":[3,5]}}";
    uint8_t *data = NULL;
    size_t bytes = 0, padded = (size_t)round_up(sizeof header - 1, 8);
    EXPECT(file_read_all(path, &data, &bytes) == STATUS_OK);
    EXPECT(bytes == 8 + padded + 5 && told_bytes == bytes);
    uint64_t length;
    memcpy(&length, data, 8);
    EXPECT(length == padded);
    EXPECT(memcmp(data + 8, header, sizeof header - 1) == 0);
    for (size_t i = sizeof header - 1; i < padded; i++) {
        EXPECT(data[8 + i] == ' ');
    }
    EXPECT(memcmp(data + 8 + padded, "abcde", 5) == 0);
    EXPECT(xxh64_file(path, &right) == STATUS_OK && told == right);
    free(data);
}

static void test_many_tensors_read_back_as_they_were_written(void) {
    enum { COUNT = 2000 };
    static struct safetensors_entry entries[COUNT];
    static char names[COUNT][32];
    uint64_t values[9];
    struct safetensors_writer *writer;
    for (int i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "h.%d.weight", i);
        entries[i] = (struct safetensors_entry){names[i], (enum dtype)(i % DTYPE_COUNT), 2, {i % 3, 3}, 0, 0};
    }
    EXPECT(safetensors_create(&writer, path, entries, COUNT, NULL, NULL, 0) == STATUS_OK);
    for (int i = 0; i < COUNT; i++) {
        memset(values, i % 251, sizeof values);
        EXPECT(safetensors_write(writer, values, entries[i].end - entries[i].begin) == STATUS_OK);
    }
    EXPECT(safetensors_finish(writer, NULL, NULL) == STATUS_OK);
    struct safetensors *file = open_file();
    EXPECT(file != NULL && file->count == COUNT && file->data_offset % 8 == 0);
    int wrong = 0;
    for (int i = 0; i < COUNT && file != NULL; i++) {
        const struct safetensors_entry *entry = safetensors_find(file, names[i]);
        uint8_t read[sizeof values];
        wrong += entry == NULL || entry->dtype != entries[i].dtype || entry->begin != entries[i].begin ||
                 entry->dimensions != 2 || entry->shape[0] != i % 3 || entry->shape[1] != 3;
        size_t bytes = (size_t)(i % 3) * 3 * dtype_bytes(entries[i].dtype);
        wrong += safetensors_read(file, entry, 0, read, bytes) != STATUS_OK;
        for (size_t k = 0; k < bytes; k++) {
            wrong += read[k] != i % 251;
        }
    }
    EXPECT(wrong == 0);
    safetensors_close(file);
}

static void test_data_that_is_not_what_the_entries_say_is_an_error(void) {
    struct safetensors_entry entry = {"a", DTYPE_F32, 1, {2}, 0, 0};
    struct safetensors_writer *writer;
    EXPECT(safetensors_create(&writer, path, &entry, 1, NULL, NULL, 0) == STATUS_OK);
    EXPECT(safetensors_write(writer, "1234", 4) == STATUS_OK);
    EXPECT(safetensors_finish(writer, NULL, NULL) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "4 of the 8 bytes");
    EXPECT(safetensors_create(&writer, path, &entry, 1, NULL, NULL, 0) == STATUS_OK);
    EXPECT(safetensors_write(writer, "123456789", 9) == STATUS_ERROR);
    EXPECT(safetensors_write(writer, "12345678", 8) == STATUS_ERROR); /* the failure is kept */
    fail("something else went wrong meanwhile");
    EXPECT(safetensors_finish(writer, NULL, NULL) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "more data than the 8 bytes");
}

static void test_shapes_that_are_too_large_are_not_begun(void) {
    struct safetensors_writer *writer;
    struct safetensors_entry wraps = {"a", DTYPE_F64, 2, {INT64_C(1) << 31, INT64_C(1) << 30}, 0, 0};
    EXPECT(safetensors_create(&writer, path, &wraps, 1, NULL, NULL, 0) == STATUS_ERROR && writer == NULL);
    EXPECT_CONTAINS(error_message(), "tensor \"a\" is too large");
    struct safetensors_entry sum[] = {{"a", DTYPE_U8, 1, {INT64_MAX}, 0, 0}, {"b", DTYPE_U8, 1, {1}, 0, 0}};
    EXPECT(safetensors_create(&writer, path, sum, 2, NULL, NULL, 0) == STATUS_ERROR && writer == NULL);
    struct safetensors_entry negative = {"a", DTYPE_U8, 1, {-1}, 0, 0};
    EXPECT(safetensors_create(&writer, path, &negative, 1, NULL, NULL, 0) == STATUS_ERROR && writer == NULL);
}

static void test_a_disk_that_takes_no_more_is_told_with_the_file_and_the_reason(void) {
    struct safetensors_entry entry = {"a", DTYPE_U8, 1, {10000}, 0, 0};
    struct safetensors_writer *writer = NULL;
    static uint8_t data[5000];
    EXPECT(safetensors_create(&writer, "/dev/full", &entry, 1, NULL, NULL, 0) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "/dev/full");
    EXPECT_CONTAINS(error_message(), strerror(ENOSPC));
    /* A limit on the file's size acts like a disk that fills up in the middle of a write: the first is cut short. */
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_IGN);
    EXPECT(safetensors_create(&writer, path, &entry, 1, NULL, NULL, 0) == STATUS_OK);
    limit = (struct rlimit){7000, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    enum status first = safetensors_write(writer, data, sizeof data);
    enum status second = safetensors_write(writer, data, sizeof data);
    enum status last = safetensors_finish(writer, NULL, NULL);
    setrlimit(RLIMIT_FSIZE, &before);
    EXPECT(first == STATUS_OK && second == STATUS_ERROR && last == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), path);
    EXPECT_CONTAINS(error_message(), strerror(EFBIG));
    EXPECT(safetensors_create(&writer, folder, &entry, 1, NULL, NULL, 0) == STATUS_ERROR && writer == NULL);
    EXPECT_CONTAINS(error_message(), strerror(EISDIR));
}

int main(void) {
    make_folder("test_safetensors");
    snprintf(path, sizeof path, "%s/file.safetensors", folder);
    RUN(test_a_header_is_read_with_its_tensors_in_the_order_of_their_data);
    RUN(test_a_file_without_tensors_is_valid);
    RUN(test_malformed_headers_are_refused);
    RUN(test_header_lengths_that_cannot_be_are_refused);
    RUN(test_what_is_no_file_is_refused);
    RUN(test_only_what_is_inside_a_tensor_can_be_read);
    RUN(test_values_of_every_floating_point_type_are_converted);
    RUN(test_a_file_is_written_byte_by_byte_as_the_format_says);
    RUN(test_many_tensors_read_back_as_they_were_written);
    RUN(test_data_that_is_not_what_the_entries_say_is_an_error);
    RUN(test_shapes_that_are_too_large_are_not_begun);
    RUN(test_a_disk_that_takes_no_more_is_told_with_the_file_and_the_reason);
    remove_tree(folder);
    return test_summary();
}
