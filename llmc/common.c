/* What every room needs. The last error's text is kept per thread; the log switch is the one global. */
#include "common.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- errors ---- */

static _Thread_local char last_message[2048];

void make_one_line(char *text) {
    size_t length = strlen(text);
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == 0x7f) {
            text[i] = ' ';
        }
    }
    while (length > 0 && text[length - 1] == ' ') {
        text[--length] = '\0';
    }
}

/* Composed aside first: an argument may be error_message() itself, when a caller adds to the line. */
static enum status record(enum status status, const char *format, va_list arguments) {
    char composed[sizeof last_message];
    vsnprintf(composed, sizeof composed, format, arguments);
    make_one_line(composed);
    memcpy(last_message, composed, strlen(composed) + 1);
    return status;
}

enum status fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    enum status status = record(STATUS_ERROR, format, arguments);
    va_end(arguments);
    return status;
}

enum status fail_as(enum status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    record(status, format, arguments);
    va_end(arguments);
    return status;
}

const char *error_message(void) {
    return last_message;
}

/* ---- element types ---- */

static const struct {
    const char *name;
    size_t bytes;
} dtypes[DTYPE_COUNT] = {
    [DTYPE_F64] = {"F64", 8},
    [DTYPE_F32] = {"F32", 4},
    [DTYPE_BF16] = {"BF16", 2},
    [DTYPE_F16] = {"F16", 2},
    [DTYPE_I64] = {"I64", 8},
    [DTYPE_I32] = {"I32", 4},
    [DTYPE_U16] = {"U16", 2},
    [DTYPE_U8] = {"U8", 1},
};

size_t dtype_bytes(enum dtype dtype) {
    return dtypes[dtype].bytes;
}

const char *dtype_name(enum dtype dtype) {
    return dtypes[dtype].name;
}

bool dtype_from_name(const char *name, enum dtype *dtype) {
    for (int i = 0; i < DTYPE_COUNT; i++) {
        if (strcmp(name, dtypes[i].name) == 0) {
            *dtype = (enum dtype)i;
            return true;
        }
    }
    return false;
}

static uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float bf16_to_float(uint16_t bits) {
    return bits_float((uint32_t)bits << 16);
}

/* bits >> shift, rounded to nearest, ties to even; a carry runs into the exponent, as it should. 1 <= shift <= 31. */
static uint32_t shift_right_rounded(uint32_t bits, int shift) {
    uint32_t kept_odd = (bits >> shift) & 1;
    return (bits + (1u << (shift - 1)) - 1 + kept_odd) >> shift;
}

uint16_t float_to_bf16(float value) {
    uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)(bits >> 16 | 0x40u); /* a quiet NaN: its payload's top may be all zero */
    }
    return (uint16_t)shift_right_rounded(bits, 16);
}

float f16_to_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0x1f) {
        return bits_float(sign | 0x7f800000u | mantissa << 13);
    }
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exact */
        float magnitude = (float)mantissa * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t float_to_f16(float value) {
    uint32_t bits = float_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) { /* NaN, made quiet */
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
    }
    if (magnitude >= 0x477ff000u) { /* 65520 and up, halfway to 2^16: infinity */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (magnitude >= 0x38800000u) { /* 2^-14 and up: normal; the exponent's bias changes from 127 to 15 */
        return (uint16_t)(sign | shift_right_rounded(magnitude - (112u << 23), 13));
    }
    if (magnitude <= 0x33000000u) { /* 2^-25, half the smallest subnormal, ties to 0 */
        return (uint16_t)sign;
    }
    uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u; /* value = mantissa * 2^(exponent - 150) */
    return (uint16_t)(sign | shift_right_rounded(mantissa, 126 - (int)(magnitude >> 23)));
}

/* ---- memory ---- */

static enum status fail_without_room(size_t count, size_t size) {
    return fail_as(
        STATUS_OUT_OF_MEMORY, "out of host memory: no room for %zu elements of %zu bytes", count, size);
}

enum status allocate(void **out, size_t count, size_t size) {
    size_t bytes;
    bool overflow = __builtin_mul_overflow(count, size, &bytes);
    void *memory = overflow ? NULL : calloc(bytes > 0 ? bytes : 1, 1);
    memcpy(out, &memory, sizeof memory); /* *out is a pointer of any type: no aliasing through void * */
    return memory != NULL ? STATUS_OK : fail_without_room(count, size);
}

enum status grow(void **array, size_t *capacity, size_t count, size_t size) {
    size_t doubled = *capacity > 0 ? 2 * *capacity : 4, wanted = count > doubled ? count : doubled, bytes;
    void *memory;
    memcpy(&memory, array, sizeof memory); /* as in allocate */
    memory = __builtin_mul_overflow(wanted, size, &bytes) ? NULL : realloc(memory, bytes);
    if (memory == NULL) {
        return fail_without_room(wanted, size);
    }
    memcpy(array, &memory, sizeof memory);
    *capacity = wanted;
    return STATUS_OK;
}

char *string_copy(const char *text) {
    char *copy = strdup(text);
    if (copy == NULL) {
        fail_as(STATUS_OUT_OF_MEMORY, "out of host memory: no room for a text of %zu bytes", strlen(text));
    }
    return copy;
}

/* ---- files ---- */

enum status stream_read(int file, const char *name, void *data, size_t bytes, size_t *got) {
    ssize_t result;
    do {
        result = read(file, data, bytes);
    } while (result < 0 && errno == EINTR);
    *got = result > 0 ? (size_t)result : 0;
    return result >= 0 ? STATUS_OK : fail("%s: cannot read: %s", name, strerror(errno));
}

enum status stream_write(int file, const char *name, const void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t put = write(file, (const char *)data + done, bytes - done);
        if (put < 0 && errno != EINTR) {
            return fail("%s: cannot write: %s", name, strerror(errno));
        }
        done += put > 0 ? (size_t)put
                        : 0; /* a short write, as before a full disk, is tried again and then has a reason */
    }
    return STATUS_OK;
}

enum status stream_read_all(int file, const char *name, uint8_t **data, size_t *bytes) {
    enum status status = STATUS_OK;
    uint8_t *buffer = NULL;
    size_t used = 0, capacity;
    struct stat info;
    *data = NULL;
    *bytes = 0;
    /* The size is a hint (a pipe or /proc file tells none, a file may grow): what read() gives is what counts. */
    capacity = fstat(file, &info) == 0 ? (size_t)min_i64(info.st_size, FILE_TEXT_BYTES) + 2 : 2;
    CHECK_CLEANUP(ALLOCATE(buffer, capacity));
    for (;;) {
        size_t got;
        CHECK_CLEANUP(stream_read(file, name, buffer + used, capacity - 1 - used, &got));
        if (got == 0) {
            break;
        }
        used += got;
        if (used > FILE_TEXT_BYTES) {
            status = fail("%s: does not end within %d MiB; a text of its kind is shorter", name,
                (int)(FILE_TEXT_BYTES >> 20));
            goto cleanup;
        }
        if (used == capacity - 1) {
            CHECK_CLEANUP(RESERVE(buffer, capacity, capacity + 4096));
        }
    }
    buffer[used] = 0;
    *data = buffer;
    *bytes = used;
    buffer = NULL;
cleanup:
    free(buffer);
    return status;
}

enum status file_read_at(int file, const char *path, void *data, size_t bytes, uint64_t offset) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = pread(file, (char *)data + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno != EINTR) {
            return fail("%s: cannot read at byte %" PRIu64 ": %s", path, offset + done, strerror(errno));
        }
        if (got == 0) {
            return fail("%s: ends at byte %" PRIu64 ", before its header says; restore the file", path,
                offset + done);
        }
        done += got > 0 ? (size_t)got : 0;
    }
    return STATUS_OK;
}

enum status file_read_all(const char *path, uint8_t **data, size_t *bytes) {
    *data = NULL;
    *bytes = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return fail("%s: cannot open: %s", path, strerror(errno));
    }
    enum status status = stream_read_all(file, path, data, bytes);
    close(file);
    return status;
}

enum status file_open(const char *path, int *file, uint64_t *bytes) {
    struct stat info;
    *file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*file < 0 || fstat(*file, &info) != 0) {
        fail("%s: cannot open: %s", path, strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        fail("%s: is not a file", path);
    } else {
        *bytes = (uint64_t)info.st_size;
        return STATUS_OK;
    }
    if (*file >= 0) {
        close(*file);
        *file = -1;
    }
    return STATUS_ERROR;
}

enum status file_read_text(const char *path, uint8_t **data, size_t *bytes) {
    int file;
    uint64_t size;
    *data = NULL;
    *bytes = 0;
    CHECK(file_open(path, &file, &size));
    enum status status = size <= FILE_TEXT_BYTES
                             ? stream_read_all(file, path, data, bytes)
                             : fail("%s: %.0f MiB; a file of its kind has at most %d MiB", path,
                                   (double)size / (1 << 20), (int)(FILE_TEXT_BYTES >> 20));
    close(file);
    return status;
}

enum status file_write_all(const char *path, const void *data, size_t bytes) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) {
        return fail("%s: cannot create: %s", path, strerror(errno));
    }
    enum status status = stream_write(file, path, data, bytes);
    if (close(file) != 0 && status == STATUS_OK) {
        status = fail("%s: cannot write: %s", path, strerror(errno));
    }
    return status;
}

enum status file_sync(const char *path) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return fail("%s: cannot open: %s", path, strerror(errno));
    }
    enum status status = STATUS_OK;
    /* EINVAL: a file system that has no fsync of folders; there is nothing more to do there. */
    if (fsync(file) != 0 && errno != EINVAL) {
        status = fail("%s: cannot write to disk: %s", path, strerror(errno));
    }
    close(file);
    return status;
}

bool path_exists(const char *path) {
    return access(path, F_OK) == 0;
}

bool path_is_directory(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

/* Makes the one folder `path`. That it is there already is fine: another rank may have made it just now. */
static enum status make_directory(const char *path) {
    if (mkdir(path, 0777) == 0) {
        return STATUS_OK;
    }
    int error = errno; /* the look below has its own */
    return path_is_directory(path) ? STATUS_OK
                                   : fail("%s: cannot create the folder: %s", path, strerror(error));
}

enum status make_directories(const char *path) {
    char part[PATH_MAX];
    size_t length = strlen(path);
    if (length >= sizeof part) {
        return fail("%.60s...: the path is too long", path);
    }
    for (size_t i = 1; i < length; i++) {
        if (path[i] == '/' && path[i - 1] != '/') {
            memcpy(part, path, i);
            part[i] = '\0';
            CHECK(make_directory(part));
        }
    }
    return make_directory(path);
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *position) {
    (void)info;
    (void)kind;
    (void)position;
    return remove(path) == 0 || errno == ENOENT ? 0 : -1;
}

enum status remove_tree(const char *path) {
    enum { OPEN_FOLDERS = 16 };
    if (nftw(path, remove_entry, OPEN_FOLDERS, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT) {
        return fail("%s: cannot remove: %s", path, strerror(errno));
    }
    return STATUS_OK;
}

enum status path_join(char *out, size_t size, const char *directory, const char *name) {
    int length = snprintf(out, size, "%s/%s", directory, name);
    if (length < 0 || (size_t)length >= size) {
        return fail("%.60s.../%.60s: the path is too long", directory, name);
    }
    return STATUS_OK;
}

/* ---- clock and log ---- */

double time_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static bool log_on = true;

void log_enable(bool enabled) {
    log_on = enabled;
}

bool log_enabled(void) {
    return log_on;
}

void log_line(const char *format, ...) {
    if (!log_on) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
    fflush(stdout);
}
