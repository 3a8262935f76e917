/* What every room needs: status codes and the last error's text, checked allocation, checked files,
   element types, clocks, and the log.

   Functions that can fail return `enum status`; the text of the last failure of the calling thread is kept
   here. Nothing in llmc/ prints errors or exits: the program does, once, with error_message() (and launch.h, for ranks
   that cannot speak any more). */
#ifndef LLMC_COMMON_H
#define LLMC_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

enum status {
    STATUS_OK = 0,
    STATUS_ERROR = 1,         /* the input, the machine or a file is at fault: one line tells the user */
    STATUS_OUT_OF_MEMORY = 2, /* host or device memory: the program prints the memory plan as well */
    STATUS_PEER_LOST = 3      /* a rank died or does not answer, or this GPU failed: a restart may do */
};

/* Records a printf-style message for error_message() and returns STATUS_ERROR, so that a check reads
   `return fail("--layers: %d is not positive", n);`. One line, no trailing newline, names the thing and the remedy. */
enum status fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
enum status fail_as(enum status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The calling thread's last message; "" if there was none. */
const char *error_message(void);
/* Control characters, which names in other people's files may hold, become spaces; those at the end go. Messages are
   made so. */
void make_one_line(char *text);

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        enum status check_status_ = (call);                                                                  \
        if (check_status_ != STATUS_OK) {                                                                    \
            return check_status_;                                                                            \
        }                                                                                                    \
    } while (0)

/* For functions that clean up: needs a local `enum status status` and a label `cleanup`. */
#define CHECK_CLEANUP(call)                                                                                  \
    do {                                                                                                     \
        status = (call);                                                                                     \
        if (status != STATUS_OK) {                                                                           \
            goto cleanup;                                                                                    \
        }                                                                                                    \
    } while (0)

/* Element types, in files and in device memory. */
enum dtype {
    DTYPE_F64,
    DTYPE_F32,
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_I64,
    DTYPE_I32,
    DTYPE_U16,
    DTYPE_U8,
    DTYPE_COUNT
};
size_t dtype_bytes(enum dtype dtype);
const char *dtype_name(enum dtype dtype); /* safetensors' spelling: "F64", "F32", "BF16", "F16", "I64", ... */
bool dtype_from_name(const char *name, enum dtype *dtype);
/* 16-bit floats <-> float, round to nearest even; NaN and infinity are kept. */
float bf16_to_float(uint16_t bits);
uint16_t float_to_bf16(float value);
float f16_to_float(uint16_t bits);
uint16_t float_to_f16(float value);

/* Zeroed memory for `count` elements of `size` bytes into *out; a count of 0 gives a valid pointer. */
enum status allocate(void **out, size_t count, size_t size);
#define ALLOCATE(pointer, count) allocate((void **)&(pointer), (size_t)(count), sizeof *(pointer))
/* Room for `count` elements in an array that grows, NULL with a capacity of 0 at first: where there is not enough, the
   capacity is at least doubled. What is new is not zeroed. After a failure the array is as it was. */
#define RESERVE(array, capacity, count)                                                                      \
    ((size_t)(count) <= (capacity) ? STATUS_OK                                                               \
                                   : grow((void **)&(array), &(capacity), (size_t)(count), sizeof *(array)))
enum status grow(void **array, size_t *capacity, size_t count, size_t size);
char *string_copy(const char *text); /* malloc'ed; NULL with the message set when memory is out */

/* Files. Errors name the path and the system's reason. What is read whole has a 0 at data[bytes], the caller frees it, and
   it is a text of at most FILE_TEXT_BYTES: as JSON it takes up to 70 times as much memory. */
enum { FILE_TEXT_BYTES = 16 << 20 };
enum status file_read_all(const char *path, uint8_t **data, size_t *bytes); /* a pipe or a device, too */
/* A regular file, to read. Others are refused: a pipe that nobody writes would block, a device may have no end. */
enum status file_open(const char *path, int *file, uint64_t *bytes);
/* All of a regular file that somebody else may have made. */
enum status file_read_text(const char *path, uint8_t **data, size_t *bytes);
enum status file_write_all(const char *path, const void *data, size_t bytes);
enum status file_sync(const char *path); /* fsync of a file or folder */
/* Of an open file, with its name for messages: one read of at most `bytes` (*got 0: the end), all of `bytes` written, and all
   that is left of it. */
enum status stream_read(int file, const char *name, void *data, size_t bytes, size_t *got);
enum status stream_write(int file, const char *name, const void *data, size_t bytes);
enum status stream_read_all(int file, const char *name, uint8_t **data, size_t *bytes);
/* All of `bytes` at `offset`, which the file's header says are there. Safe from several threads. */
enum status file_read_at(int file, const char *path, void *data, size_t bytes, uint64_t offset);
bool path_exists(const char *path);
bool path_is_directory(const char *path);
enum status make_directories(const char *path); /* like mkdir -p */
enum status remove_tree(const char *path);      /* like rm -rf; a missing path is no error */
/* dir + "/" + name into out[size]; too long is an error. */
enum status path_join(char *out, size_t size, const char *directory, const char *name);

double time_seconds(void); /* monotonic */

/* Printing to the person at the terminal: stdout, one call a line. Off on every rank but the first. */
void log_enable(bool enabled);
bool log_enabled(void);
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

static inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}
static inline int64_t round_up(int64_t a, int64_t multiple) {
    return ceil_div(a, multiple) * multiple;
}
static inline int64_t min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static inline int64_t max_i64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

#ifdef __cplusplus
}
#endif

#endif
