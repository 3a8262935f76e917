/* FLOPs, figures as people read them, the progress line and log.jsonl.

   The progress line is a list of figures in the order of reading, each with a rank of importance; the least important
   go until the rest fits into the terminal, and a bar takes the room that is left. */
#include "metrics.h"

#include "utf8.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

double flops_per_token(int64_t parameters, int layers, int channels, int seq_len) {
    return 6.0 * (double)parameters + 12.0 * layers * channels * seq_len;
}

double flops_per_token_causal(int64_t parameters, int layers, int channels, int seq_len) {
    return 6.0 * (double)parameters + 6.0 * layers * channels * seq_len;
}

/* ---- figures ---- */

/* Three significant digits: "0.123", "1.23", "12.3", "123". */
static void format_three_digits(char *out, size_t size, double value) {
    int decimals = value < 0.9995 ? 3 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
    snprintf(out, size, "%.*f", decimals, value);
}

/* In the largest of the units whose step is `step` that leaves at least 1. */
static void format_scaled(
    char *out, size_t size, double value, double step, const char *const *units, int count) {
    int unit = 0;
    while (unit < count - 1 && value >= step - 0.5) { /* 999.5 and up would round to 1000 */
        value /= step;
        unit++;
    }
    char digits[32];
    if (unit == 0 && value == floor(value)) {
        snprintf(digits, sizeof digits, "%.0f", value);
    } else {
        format_three_digits(digits, sizeof digits, value);
    }
    snprintf(out, size, "%s%s", digits, units[unit]);
}

void format_count(char *out, size_t size, double value) {
    static const char *const units[] = {"", "k", "M", "B", "T"};
    format_scaled(out, size, value, 1000, units, 5);
}

void format_bytes(char *out, size_t size, uint64_t bytes) {
    static const char *const units[] = {" B", " KiB", " MiB", " GiB", " TiB"};
    format_scaled(out, size, (double)bytes, 1024, units, 5);
}

void format_duration(char *out, size_t size, double seconds) {
    if (!(seconds >= 0 && seconds < 1e9)) { /* none, or 30 years and more */
        snprintf(out, size, "-");
        return;
    }
    long long s = llround(seconds);
    if (s < 60) {
        snprintf(out, size, "%llds", s);
    } else if (s < 3600) {
        snprintf(out, size, "%lldm%02llds", s / 60, s % 60);
    } else if (s < 86400) {
        snprintf(out, size, "%lldh%02lldm", s / 3600, s / 60 % 60);
    } else {
        snprintf(out, size, "%lldd%02lldh", s / 86400, s / 3600 % 24);
    }
}

/* printf writes the sign of a NaN, which means nothing. */
static double without_nan_sign(double value) {
    return isnan(value) ? NAN : value;
}

/* ---- the progress line ---- */

enum { FIGURES = 10, FIGURE_BYTES = 80, LEAST_IMPORTANT = 9 };
/* Columns of the bar; it is worth more than figures of its importance and less. */
enum { BAR_LEAST = 8, BAR_MOST = 30, BAR_IMPORTANCE = 5 };

struct figure {
    int importance; /* 0 stays always */
    char text[FIGURE_BYTES];
};

/* In the order of reading; importance says what a narrow terminal shows. */
static void make_figures(struct figure figures[FIGURES], const struct step_metrics *step) {
    char value[32], total[32], steps[32];
    int steps_width = snprintf(steps, sizeof steps, "%lld", (long long)step->total_steps);
    struct figure *f = figures;
#define FIGURE(importance_, ...)                                                                             \
    do {                                                                                                     \
        f->importance = (importance_);                                                                       \
        snprintf((f++)->text, FIGURE_BYTES, __VA_ARGS__);                                                    \
    } while (0)
    FIGURE(0, "step %*lld/%s", steps_width, (long long)step->step, steps);
    FIGURE(1, "loss %7.4f", without_nan_sign(step->loss));
    FIGURE(5, "norm %6.3f", without_nan_sign(step->norm));
    FIGURE(6, "lr %.2e", step->learning_rate);
    format_three_digits(value, sizeof value, step->milliseconds);
    FIGURE(7, "%5s ms", value);
    format_count(value, sizeof value, step->tokens_per_second);
    FIGURE(3, "%5s tok/s", value);
    format_three_digits(value, sizeof value, step->tflops);
    FIGURE(8, "%5s TFLOP/s%s", value, step->ranks > 1 ? "/rank" : "");
    if (step->mfu >= 0) {
        FIGURE(4, "MFU %4.1f%%", 100 * step->mfu);
    } else {
        FIGURE(9, "MFU -");
    }
    format_bytes(value, sizeof value, step->memory_bytes);
    format_bytes(total, sizeof total, step->memory_total_bytes);
    if (step->memory_total_bytes > 0) {
        FIGURE(9, "mem %s of %s", value, total);
    } else {
        FIGURE(9, "mem %s", value);
    }
    format_duration(value, sizeof value, step->eta_seconds);
    FIGURE(2, "ETA %6s", value);
#undef FIGURE
}

/* `columns` cells, the done part first. */
static void format_bar(char *out, size_t size, int columns, double done, bool utf8) {
    const char *full = utf8 ? "\u2501" : "=", *rest = utf8 ? "\u2500" : "-";
    int cells = (int)(done * columns);
    size_t bytes = 0;
    for (int i = 0; i < columns && bytes + 4 < size; i++) {
        bytes += (size_t)snprintf(out + bytes, size - bytes, "%s", i < cells ? full : rest);
    }
}

/* Columns of the figures up to this importance, two spaces apart. */
static int figures_width(const struct figure figures[FIGURES], int least_important) {
    int width = -2;
    for (int i = 0; i < FIGURES; i++) {
        if (figures[i].importance <= least_important) {
            width += 2 + (int)strlen(figures[i].text);
        }
    }
    return width;
}

/* How far down the figures' importance a line of so many columns goes. */
static int importance_that_fits(const struct figure figures[FIGURES], int columns) {
    for (int importance = LEAST_IMPORTANT; importance > 0; importance--) {
        int bar = importance >= BAR_IMPORTANCE ? 2 + BAR_LEAST : 0;
        if (columns == 0 || figures_width(figures, importance) + bar <= columns) {
            return importance;
        }
    }
    return 0;
}

void format_step(char *out, size_t size, const struct step_metrics *step, int columns, bool utf8) {
    struct figure figures[FIGURES];
    make_figures(figures, step);
    int importance = importance_that_fits(figures, columns);
    int width = figures_width(figures, importance);
    char bar[4 * BAR_MOST + 1] = "";
    int room = (int)min_i64(columns - width - 2, BAR_MOST);
    if (room >= BAR_LEAST && step->total_steps > 0) {
        format_bar(bar, sizeof bar, room, (double)step->step / (double)step->total_steps, utf8);
    }
    size_t bytes = 0;
    for (int i = 0; i < FIGURES && bytes < size; i++) {
        if (figures[i].importance <= importance) {
            bytes += (size_t)snprintf(out + bytes, size - bytes, "%s%s", i == 0 ? "" : "  ", figures[i].text);
        }
        if (i == 0 && bar[0] != '\0' && bytes < size) {
            bytes += (size_t)snprintf(out + bytes, size - bytes, "  %s", bar);
        }
    }
    if (columns > 0 && width > columns && (size_t)columns < size) {
        out[columns] = '\0'; /* not even the most important figure fits */
    }
}

/* ---- the terminal ---- */

struct metrics_log {
    char *path; /* of log.jsonl */
    int file;   /* -1: none */
    int print_every;
    bool quiet, terminal, utf8;
    bool any_line;        /* is in the file, since it was opened */
    bool losing_lines;    /* the file did not take the last one */
    bool any_step;        /* since it was opened */
    double drawn_seconds; /* when the progress line was drawn last */
    char progress[1024];  /* what stands at the bottom of the terminal; "" nothing */
};

static bool locale_is_utf8(void) {
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"}; /* the first that is set decides */
    for (int i = 0; i < 3; i++) {
        const char *value = getenv(names[i]);
        if (value != NULL && value[0] != '\0') {
            return strcasestr(value, "utf-8") != NULL || strcasestr(value, "utf8") != NULL;
        }
    }
    return false;
}

static bool stdout_is_terminal(void) {
    const char *term = getenv("TERM");
    return isatty(STDOUT_FILENO) && term != NULL && strcmp(term, "dumb") != 0;
}

static int terminal_columns(void) {
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
        return size.ws_col;
    }
    const char *columns = getenv("COLUMNS");
    int value = columns == NULL ? 0 : atoi(columns);
    return value > 0 ? value : 80;
}

#define CLEAR_LINE "\r\033[K"

/* Who reads takes a pause (a terminal after Ctrl-S, `| less`): a line that waited for it would keep all ranks waiting,
   until they give the run up. It is left out; log.jsonl has everything. */
static bool would_block(int file) {
    struct pollfd out = {.fd = file, .events = POLLOUT};
    return poll(&out, 1, 0) == 0;
}

/* A line of its own, above the progress line if there is one. */
static void print_line(struct metrics_log *log, const char *text) {
    if (log->quiet || would_block(STDOUT_FILENO)) {
        return;
    }
    if (log->progress[0] != '\0') {
        fputs(CLEAR_LINE, stdout);
    }
    log_line("%s", text);
    fputs(log->progress, stdout);
    fflush(stdout);
}

/* On stderr, also where nothing else is printed. */
static void print_warning(struct metrics_log *log, const char *text) {
    if (would_block(STDERR_FILENO) || would_block(STDOUT_FILENO)) {
        return;
    }
    if (log->progress[0] != '\0') {
        fputs(CLEAR_LINE, stdout);
        fflush(stdout);
    }
    fprintf(stderr, "train_gpt: %s\n", text);
    fputs(log->progress, stdout);
    fflush(stdout);
}

static void draw_progress(struct metrics_log *log, const struct step_metrics *step) {
    double now = time_seconds();
    bool last = step->step == step->total_steps;
    if (log->any_step && !last && now - log->drawn_seconds < 0.05) {
        return; /* tiny models step faster than people and remote terminals read */
    }
    if (would_block(STDOUT_FILENO)) {
        return;
    }
    log->drawn_seconds = now;
    /* the last column stays free: some terminals wrap when it is written */
    format_step(
        log->progress, sizeof log->progress, step, (int)max_i64(terminal_columns() - 1, 1), log->utf8);
    fputs(CLEAR_LINE, stdout);
    fputs(log->progress, stdout);
    fflush(stdout);
}

static void show_step(struct metrics_log *log, const struct step_metrics *step) {
    char line[1024];
    if (step->skipped) {
        snprintf(line, sizeof line, "step %lld skipped: %s (loss %.4f, norm %.3f)", (long long)step->step,
            step->skip_reason != NULL ? step->skip_reason : "no reason given", without_nan_sign(step->loss),
            without_nan_sign(step->norm));
        print_line(log, line);
    }
    if (log->terminal) {
        draw_progress(log, step);
    } else if (!log->any_step || step->step % log->print_every == 0 || step->step == step->total_steps) {
        format_step(line, sizeof line, step, 0, false);
        print_line(log, line);
    }
    log->any_step = true;
}

/* Bytes of the UTF-8 character at text, 0 if it is none or a control character: a model may write anything, and a
   terminal obeys what it is sent. */
static size_t printable_bytes(const char *text, size_t bytes) {
    uint32_t code;
    size_t length = utf8_decode(text, bytes, &code);
    return length > 0 && code >= 0x20 && (code < 0x7f || code >= 0xa0) ? length : 0;
}

/* The text in lines with a margin; what cannot be printed becomes a question mark, a tab a space. */
static enum status print_sample(struct metrics_log *log, int64_t step, const char *text, size_t bytes) {
    static const char margin[] = "    | ";
    char title[64], *line;
    snprintf(title, sizeof title, "step %lld  sample:", (long long)step);
    print_line(log, title);
    CHECK(ALLOCATE(line, sizeof margin + bytes));
    for (size_t at = 0; at < bytes; at++) { /* one line; past its newline */
        size_t length = strlen(strcpy(line, margin));
        while (at < bytes && text[at] != '\n') {
            size_t printable = printable_bytes(text + at, bytes - at);
            size_t taken = printable > 0 ? printable : 1;
            memcpy(line + length, printable > 0 ? text + at : text[at] == '\t' ? " " : "?", taken);
            length += taken;
            at += taken;
        }
        line[length] = '\0';
        print_line(log, line);
    }
    free(line);
    return STATUS_OK;
}

/* ---- log.jsonl ---- */

/* The "step" of a line of the log; -1: it has none. */
static int64_t line_step(const char *line, size_t bytes) {
    struct json *event;
    if (json_parse(&event, line, bytes, "log.jsonl") != STATUS_OK) {
        return -1;
    }
    const struct json *step = json_get(event, "step");
    int64_t value = step != NULL && step->is_integer ? step->integer : -1;
    json_free(event);
    return value;
}

/* How much of the log stays: whole lines before the first of a step after `resume_step`. Steps never go down in the file
   (every resume cuts it), so the search goes from the end to the first line that stays. */
static size_t bytes_to_keep(const char *text, size_t bytes, int64_t resume_step) {
    const char *newline = memrchr(text, '\n', bytes);
    size_t keep = newline == NULL ? 0 : (size_t)(newline - text) + 1;
    for (size_t end = keep; end > 0 && resume_step >= 0;) {
        newline = memrchr(text, '\n', end - 1);
        size_t begin = newline == NULL ? 0 : (size_t)(newline - text) + 1;
        int64_t step = line_step(text + begin, end - 1 - begin);
        if (step > resume_step) {
            keep = begin;
        } else if (step >= 0) {
            break;
        }
        end = begin;
    }
    return keep;
}

enum status metrics_log_cut(const struct metrics_log *log, int64_t resume_step) {
    struct stat info;
    if (log->file < 0) {
        return STATUS_OK;
    }
    if (fstat(log->file, &info) != 0) {
        return fail("%s: %s", log->path, strerror(errno));
    }
    size_t bytes = S_ISREG(info.st_mode) ? (size_t)info.st_size : 0;
    if (bytes == 0) {
        return STATUS_OK;
    }
    char *text = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, log->file, 0);
    if (text == MAP_FAILED) {
        return fail("%s: cannot read: %s", log->path, strerror(errno));
    }
    size_t keep = bytes_to_keep(text, bytes, resume_step);
    munmap(text, bytes);
    if (keep < bytes && ftruncate(log->file, (off_t)keep) != 0) {
        return fail("%s: cannot be cut at step %lld: %s", log->path, (long long)resume_step, strerror(errno));
    }
    return STATUS_OK;
}

/* Every line is an event of step 0; a file of anything else is not ours to go on in. */
bool metrics_log_is_before_first_step(const char *path) {
    uint8_t *text;
    size_t bytes;
    if (!path_exists(path)) {
        return true;
    }
    if (file_read_text(path, &text, &bytes) != STATUS_OK) {
        return false;
    }
    bool before = true;
    for (size_t at = 0; at < bytes && before;) {
        const char *line = (const char *)text + at, *newline = memchr(line, '\n', bytes - at);
        before = newline != NULL && line_step(line, (size_t)(newline - line)) == 0;
        at += newline != NULL ? (size_t)(newline - line) + 1 : 0;
    }
    free(text);
    return before;
}

/* One run at a time writes a folder: two would cut each other's log and remove each other's checkpoints in the making.
   The lock goes with the process. One that was just killed may take a moment to go, so a second look is worth it. File
   systems that have no locks do without. */
static enum status lock_log(const char *path, int file, int looks) {
    const struct timespec pause = {.tv_nsec = 100000000};
    for (int look = 1; flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; look++) {
        if (look == looks) {
            return fail("%s: another run is writing it; wait for its end, or choose another --run-dir", path);
        }
        nanosleep(&pause, NULL);
    }
    return STATUS_OK;
}

enum status metrics_log_keep_hold(struct metrics_log *log) {
    struct stat held, named;
    if (log->file < 0 || (fstat(log->file, &held) == 0 && stat(log->path, &named) == 0 &&
                             held.st_dev == named.st_dev && held.st_ino == named.st_ino)) {
        return STATUS_OK;
    }
    int file = open(log->path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0) {
        return STATUS_OK; /* its folder is gone, too; the next checkpoint makes it again */
    }
    enum status status = lock_log(log->path, file, 1);
    if (status != STATUS_OK) {
        close(file);
        return status;
    }
    close(log->file);
    log->file = file;
    return STATUS_OK;
}

/* On failure nothing of the line stays. */
static enum status append_line(struct metrics_log *log, const char *text, size_t bytes) {
    char *line;
    CHECK(ALLOCATE(line, bytes + 1));
    memcpy(line, text, bytes);
    line[bytes++] = '\n';
    off_t start = lseek(log->file, 0, SEEK_END);
    enum status status = stream_write(log->file, log->path, line, bytes);
    if (status != STATUS_OK && ftruncate(log->file, start) != 0 && errno != EINVAL) { /* EINVAL: a device */
        fail("%s, and its last line is torn: %s", error_message(), strerror(errno));
    }
    free(line);
    return status;
}

/* A file that takes no more is an error at the start; later on the run is worth more than its log. */
static enum status append_or_lose_line(struct metrics_log *log, const char *text, size_t bytes) {
    if (log->file < 0) {
        return STATUS_OK;
    }
    CHECK(metrics_log_keep_hold(log));
    enum status status = append_line(log, text, bytes);
    if (status == STATUS_OK) {
        log->any_line = true;
        log->losing_lines = false;
        return STATUS_OK;
    }
    if (status != STATUS_ERROR) {
        return status;
    }
    if (!log->any_line) {
        return fail("%s; make room and start again", error_message());
    }
    if (!log->losing_lines) {
        fail("%s; the run goes on, its log is incomplete until there is room", error_message());
        print_warning(log, error_message());
    }
    log->losing_lines = true;
    return STATUS_OK;
}

void metrics_begin_event(struct json_writer *w, const char *type, int64_t step) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    json_writer_init(w, false);
    json_begin_object(w);
    json_string_member(w, "type", type);
    json_integer_member(w, "step", step);
    json_number_member(w, "time", (double)now.tv_sec + (double)(now.tv_nsec / 1000000) * 1e-3);
}

enum status metrics_end_event(struct metrics_log *log, struct json_writer *w) {
    char *text;
    size_t bytes;
    json_end_object(w);
    CHECK(json_writer_finish(w, &text, &bytes));
    enum status status = append_or_lose_line(log, text, bytes);
    free(text);
    return status;
}

/* ---- the log as a whole ---- */

enum status metrics_log_open(struct metrics_log **out, const char *path, bool quiet, int print_every) {
    enum { LOOKS = 20 };
    *out = NULL;
    struct metrics_log *log;
    CHECK(ALLOCATE(log, 1));
    log->file = -1;
    log->print_every = (int)max_i64(print_every, 1);
    log->quiet = quiet || !log_enabled();
    log->terminal = stdout_is_terminal();
    log->utf8 = locale_is_utf8();
    enum status status = STATUS_OK;
    if (path != NULL) {
        log->path = string_copy(path);
        log->file = log->path == NULL ? -1 : open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        status = log->path == NULL ? STATUS_OUT_OF_MEMORY
                 : log->file < 0   ? fail("%s: cannot open for writing: %s", path, strerror(errno))
                                   : lock_log(path, log->file, LOOKS);
    }
    if (status != STATUS_OK) {
        metrics_log_close(log);
        return status;
    }
    *out = log;
    return STATUS_OK;
}

void metrics_log_close(struct metrics_log *log) {
    if (log == NULL) {
        return;
    }
    if (log->progress[0] != '\0') {
        fputc('\n', stdout); /* the last state of the progress line stays */
        fflush(stdout);
    }
    if (log->file >= 0) {
        close(log->file);
    }
    free(log->path);
    free(log);
}

enum status metrics_log_step(struct metrics_log *log, const struct step_metrics *step) {
    if (!log->quiet) {
        show_step(log, step);
    }
    struct json_writer w;
    metrics_begin_event(&w, "step", step->step);
    json_integer_member(&w, "total_steps", step->total_steps);
    json_number_member(&w, "loss", step->loss);
    json_number_member(&w, "norm", step->norm);
    json_number_member(&w, "learning_rate", step->learning_rate);
    json_number_member(&w, "ms", step->milliseconds);
    json_number_member(&w, "data_wait_ms", step->data_wait_milliseconds);
    json_number_member(&w, "tokens_per_second", step->tokens_per_second);
    json_number_member(&w, "tflops", step->tflops);
    json_number_member(&w, "tflops_causal", step->tflops_causal);
    bool known = step->mfu >= 0;
    json_number_member(&w, "mfu", known ? step->mfu : NAN); /* NaN: null */
    json_number_member(&w, "mfu_causal", known ? step->mfu * step->tflops_causal / step->tflops : NAN);
    json_integer_member(&w, "memory_bytes", (int64_t)step->memory_bytes);
    json_integer_member(&w, "memory_total_bytes", (int64_t)step->memory_total_bytes);
    json_number_member(&w, "eta_seconds", step->eta_seconds);
    json_integer_member(&w, "tokens_seen", step->tokens_seen);
    json_integer_member(&w, "epoch", step->epoch);
    json_bool_member(&w, "skipped", step->skipped);
    if (step->skipped && step->skip_reason != NULL) {
        json_string_member(&w, "skip_reason", step->skip_reason);
    }
    return metrics_end_event(log, &w);
}

void format_loss(char *out, size_t size, double loss, int64_t tokens, double seconds) {
    char count[32];
    format_count(count, sizeof count, (double)tokens);
    snprintf(out, size, "validation loss %.4f, perplexity %.2f (%s tokens in %.1f s)", without_nan_sign(loss),
        without_nan_sign(exp(loss)), count, seconds);
}

void format_choices(
    char *out, size_t size, int64_t questions, int64_t correct, int64_t correct_normalised, double seconds) {
    double percent = 100.0 / (double)questions;
    snprintf(out, size, "multiple choice %.2f%% right, %.2f%% by loss per token (%lld questions in %.1f s)",
        percent * (double)correct, percent * (double)correct_normalised, (long long)questions, seconds);
}

/* An evaluation's line. */
static void print_evaluation(struct metrics_log *log, int64_t step, const char *text) {
    char line[300];
    snprintf(line, sizeof line, "step %lld  %s", (long long)step, text);
    print_line(log, line);
}

enum status metrics_log_eval(
    struct metrics_log *log, int64_t step, double loss, int64_t tokens, double seconds) {
    char text[200];
    format_loss(text, sizeof text, loss, tokens, seconds);
    print_evaluation(log, step, text);
    struct json_writer w;
    metrics_begin_event(&w, "eval", step);
    json_number_member(&w, "loss", loss);
    json_integer_member(&w, "tokens", tokens);
    json_number_member(&w, "seconds", seconds);
    return metrics_end_event(log, &w);
}

enum status metrics_log_choices(struct metrics_log *log, int64_t step, int64_t questions, int64_t correct,
    int64_t correct_normalised, double seconds) {
    char text[200];
    format_choices(text, sizeof text, questions, correct, correct_normalised, seconds);
    print_evaluation(log, step, text);
    struct json_writer w;
    metrics_begin_event(&w, "multiple_choice", step);
    json_integer_member(&w, "questions", questions);
    json_integer_member(&w, "correct", correct);
    json_integer_member(&w, "correct_normalised", correct_normalised);
    json_number_member(&w, "seconds", seconds);
    return metrics_end_event(log, &w);
}

enum status metrics_log_sample(struct metrics_log *log, int64_t step, const char *text, size_t bytes) {
    CHECK(print_sample(log, step, text, bytes));
    struct json_writer w;
    metrics_begin_event(&w, "sample", step);
    json_key(&w, "text");
    json_string_bytes(&w, text, bytes);
    return metrics_end_event(log, &w);
}

enum status metrics_log_checkpoint(
    struct metrics_log *log, int64_t step, const char *path, double seconds, uint64_t bytes) {
    char line[4200], size[32];
    format_bytes(size, sizeof size, bytes);
    snprintf(
        line, sizeof line, "step %lld  checkpoint %s (%s in %.1f s)", (long long)step, path, size, seconds);
    print_line(log, line);
    struct json_writer w;
    metrics_begin_event(&w, "checkpoint", step);
    json_string_member(&w, "path", path);
    json_number_member(&w, "seconds", seconds);
    json_integer_member(&w, "bytes", (int64_t)bytes);
    return metrics_end_event(log, &w);
}

static enum status log_text(struct metrics_log *log, int64_t step, const char *text) {
    struct json_writer w;
    metrics_begin_event(&w, "note", step);
    json_string_member(&w, "text", text);
    return metrics_end_event(log, &w);
}

enum status metrics_log_note(struct metrics_log *log, int64_t step, const char *text) {
    print_line(log, text);
    return log_text(log, step, text);
}

enum status metrics_log_warning(struct metrics_log *log, int64_t step, const char *text) {
    print_warning(log, text);
    return log_text(log, step, text);
}
