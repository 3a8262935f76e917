/* What a run tells: FLOPs against the figures that the project measures itself by, what a terminal and a file show,
   and that log.jsonl survives a kill, a resume and a full disk. */
#include "llmc/metrics.h"
#include "folder.h"
#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

static char log_path[2048];

/* ---- FLOPs ---- */

static void test_flops_per_token_are_those_of_the_measured_runs(void) {
    int64_t p_124m = 124439808;
    /* 12 L C^2 + 13 L C + (V + S) C + 2 C; the measured figures count 47 tokens of padding in V */
    int64_t p_13b = 24LL * (12LL * 2048 * 2048 + 13 * 2048) + (50257LL + 2048) * 2048 + 2 * 2048;
    int64_t p_27b = 32LL * (12LL * 2560 * 2560 + 13 * 2560) + (50257LL + 2048) * 2560 + 2 * 2560;
    EXPECT_NEAR(flops_per_token(p_124m, 12, 768, 1024), 0.860e9, 0.001e9);
    EXPECT_NEAR(flops_per_token(p_13b, 24, 2048, 2048), 9.103e9, 0.001e9);
    EXPECT_NEAR(flops_per_token(p_27b, 32, 2560, 2048), 17.92e9, 0.005e9);
    /* at 8k there are 6144 positions more */
    EXPECT_NEAR(flops_per_token(p_13b + 6144LL * 2048, 24, 2048, 8192), 12.80e9, 0.005e9);
    EXPECT_NEAR(flops_per_token(p_27b + 6144LL * 2560, 32, 2560, 8192), 24.06e9, 0.005e9);
}

static void test_causal_flops_halve_attention_alone(void) {
    EXPECT(flops_per_token(1000, 2, 8, 16) == 6000 + 12 * 2 * 8 * 16);
    EXPECT(flops_per_token_causal(1000, 2, 8, 16) == 6000 + 6 * 2 * 8 * 16);
    /* no 32-bit products */
    EXPECT(flops_per_token(0, 1024, 65536, 1048576) == 12.0 * 1024 * 65536 * 1048576);
}

/* ---- figures ---- */

static void test_counts_have_three_digits_and_a_unit(void) {
    static const struct {
        double value;
        const char *text;
    } cases[] = {{0, "0"}, {7, "7"}, {257, "257"}, {999, "999"}, {0.5, "0.500"}, {12.34, "12.3"},
        {1000, "1.00k"}, {12400, "12.4k"}, {999499, "999k"}, {999500, "1.00M"}, {124439808, "124M"},
        {1.3157e9, "1.32B"}, {6.66e9, "6.66B"}, {1.5e13, "15.0T"}, {2e15, "2000T"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[32];
        format_count(text, sizeof text, cases[i].value);
        EXPECT_STRING(text, cases[i].text);
    }
}

static void test_bytes_come_in_binary_units(void) {
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {{0, "0 B"}, {512, "512 B"}, {1024, "1.00 KiB"}, {1536, "1.50 KiB"}, {1299227607, "1.21 GiB"},
        {76450873344, "71.2 GiB"}, {150000000000, "140 GiB"}, {1099511627776, "1.00 TiB"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[32];
        format_bytes(text, sizeof text, cases[i].bytes);
        EXPECT_STRING(text, cases[i].text);
    }
}

static void test_durations_have_two_units(void) {
    static const struct {
        double seconds;
        const char *text;
    } cases[] = {{0, "0s"}, {0.4, "0s"}, {41, "41s"}, {59.6, "1m00s"}, {125, "2m05s"}, {3599.7, "1h00m"},
        {7380, "2h03m"}, {86400, "1d00h"}, {198000, "2d07h"}, {-1, "-"}, {INFINITY, "-"}, {NAN, "-"},
        {1e300, "-"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[32];
        format_duration(text, sizeof text, cases[i].seconds);
        EXPECT_STRING(text, cases[i].text);
    }
}

/* ---- the progress line ---- */

static struct step_metrics step_at(int64_t step) {
    struct step_metrics m = {.step = step,
        .total_steps = 20000,
        .loss = 3.29141,
        .norm = 0.4212,
        .learning_rate = 5.99e-4,
        .milliseconds = 312.4,
        .tokens_per_second = 209800,
        .tflops = 640.2,
        .tflops_causal = 600.5,
        .mfu = 0.647,
        .memory_bytes = 76450873344,
        .memory_total_bytes = 150000000000,
        .eta_seconds = 5820,
        .data_wait_milliseconds = 0.25,
        .tokens_seen = 65536 * step,
        .epoch = 1};
    return m;
}

static void test_a_plain_step_shows_everything(void) {
    struct step_metrics m = step_at(1234);
    char line[400];
    format_step(line, sizeof line, &m, 0, true);
    EXPECT_STRING(line,
        "step  1234/20000  loss  3.2914  norm  0.421  lr 5.99e-04    312 ms   210k tok/s    640 TFLOP/s  "
        "MFU 64.7%  mem 71.2 GiB of 140 GiB  ETA  1h37m");
    m.mfu = -1;
    m.memory_total_bytes = 0;
    m.loss = -NAN; /* what a processor makes of 0 / 0 */
    format_step(line, sizeof line, &m, 0, true);
    EXPECT_STRING(line,
        "step  1234/20000  loss     nan  norm  0.421  lr 5.99e-04    312 ms   210k tok/s    640 TFLOP/s  "
        "MFU -  mem 71.2 GiB  ETA  1h37m");
    m = step_at(1234);
    m.ranks = 8; /* tokens are of all of them, FLOPs of one */
    format_step(line, sizeof line, &m, 0, true);
    EXPECT_CONTAINS(line, "   210k tok/s    640 TFLOP/s/rank  MFU 64.7%");
}

static int characters(const char *utf8) {
    int count = 0;
    for (; *utf8 != '\0'; utf8++) {
        count += ((unsigned char)*utf8 & 0xc0) != 0x80;
    }
    return count;
}

static void test_a_narrow_terminal_keeps_what_matters_most(void) {
    struct step_metrics m = step_at(10000);
    char line[400];
    format_step(line, sizeof line, &m, 200, false);
    EXPECT_STRING(line, "step 10000/20000  ===============---------------  loss  3.2914  norm  0.421  lr "
                        "5.99e-04    312 ms   210k tok/s    "
                        "640 TFLOP/s  MFU 64.7%  mem 71.2 GiB of 140 GiB  ETA  1h37m");
    format_step(line, sizeof line, &m, 78, false);
    EXPECT_STRING(line, "step 10000/20000  =====-----  loss  3.2914   210k tok/s  MFU 64.7%  ETA  1h37m");
    format_step(line, sizeof line, &m, 47, false);
    EXPECT_STRING(line, "step 10000/20000  loss  3.2914  ETA  1h37m");
    format_step(line, sizeof line, &m, 20, false);
    EXPECT_STRING(line, "step 10000/20000");
    format_step(line, sizeof line, &m, 6, false);
    EXPECT_STRING(line, "step 1");
    for (int columns = 1; columns < 220; columns++) {
        format_step(line, sizeof line, &m, columns, true);
        EXPECT(characters(line) <= columns);
        format_step(line, sizeof line, &m, columns, false);
        EXPECT((int)strlen(line) <= columns);
    }
}

static void test_the_bar_fills_with_the_steps(void) {
    static const struct {
        int64_t step;
        const char *bar;
    } cases[] = {{1, "  ----------  "}, {1999, "  ----------  "}, {2000, "  =---------  "},
        {19999, "  =========-  "}, {20000, "  ==========  "}, {30000, "  ==========  "}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct step_metrics m = step_at(cases[i].step);
        char line[400];
        format_step(line, sizeof line, &m, 78, false);
        EXPECT_CONTAINS(line, cases[i].bar);
    }
    struct step_metrics m = step_at(6000);
    char line[400];
    format_step(line, sizeof line, &m, 78, true);
    EXPECT_CONTAINS(line, "  \u2501\u2501\u2501\u2500\u2500\u2500\u2500\u2500\u2500\u2500  ");
}

static void test_a_small_buffer_cuts_the_line(void) {
    struct step_metrics m = step_at(10000);
    for (size_t size = 1; size < 200; size++) {
        char line[201];
        memset(line, 'x', sizeof line);
        format_step(line, size, &m, 0, false);
        EXPECT(strlen(line) < size && line[size] == 'x');
    }
}

/* ---- what stdout shows ---- */

/* stdout goes to `descriptor` until the matching call of restore_stdout. */
static int redirect_stdout(int descriptor) {
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    dup2(descriptor, STDOUT_FILENO);
    return saved;
}

static void restore_stdout(int saved) {
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
}

static const char sample_text[] = "To be,\nor not\tto be\x1b[2J\xff \xc3\xa9\n";

/* A run of 6 steps as the trainer would log it. */
static void log_a_run(struct metrics_log *log) {
    for (int64_t i = 1; i <= 6; i++) {
        struct step_metrics m = step_at(i);
        m.total_steps = 6;
        m.skipped = i == 5;
        m.skip_reason = i == 5 ? "loss spike" : NULL;
        EXPECT(metrics_log_step(log, &m) == STATUS_OK);
        if (i == 3) {
            EXPECT(metrics_log_eval(log, i, 3.25, 2097152, 3.21) == STATUS_OK);
            EXPECT(metrics_log_sample(log, i, sample_text, strlen(sample_text)) == STATUS_OK);
            EXPECT(metrics_log_checkpoint(log, i, "runs/a/checkpoints/step-00000003", 0.44, 1503238554) ==
                   STATUS_OK);
            EXPECT(metrics_log_note(log, i, "SIGTERM: saved step 3") == STATUS_OK);
        }
    }
}

static char *read_text(const char *path) {
    uint8_t *data = NULL;
    size_t bytes;
    EXPECT(file_read_all(path, &data, &bytes) == STATUS_OK);
    return (char *)data;
}

static void test_a_log_is_before_the_first_step_if_all_its_events_are_of_step_0(void) {
    static const struct {
        const char *text;
        bool before;
    } logs[] = {{"", true}, {"{\"type\":\"start\",\"step\":0,\"time\":1}\n", true},
        {"{\"type\":\"start\",\"step\":0}\n{\"type\":\"note\",\"step\":0}\n", true},
        {"{\"type\":\"start\",\"step\":0}\n{\"type\":\"step\",\"step\":1}\n", false},
        {"{\"type\":\"start\",\"step\":0}\n{\"type\":\"st", false}, /* a step was about to be told */
        {"{\"type\":\"start\",\"step\":5}\n", false}, {"a person's notes\n", false}, {"\n", false}};
    const char *path = in_folder("begun.jsonl");
    EXPECT(metrics_log_is_before_first_step(path)); /* there is none */
    for (size_t i = 0; i < sizeof logs / sizeof logs[0]; i++) {
        EXPECT(file_write_all(path, logs[i].text, strlen(logs[i].text)) == STATUS_OK);
        EXPECT(metrics_log_is_before_first_step(path) == logs[i].before);
    }
    EXPECT(!metrics_log_is_before_first_step("/"));
}

/* What a run of 6 steps prints into a file. */
static char *plain_output(bool quiet, int print_every) {
    const char *path = in_folder("stdout");
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    int saved = redirect_stdout(file);
    struct metrics_log *log = NULL;
    enum status status = metrics_log_open(&log, NULL, quiet, print_every);
    if (status == STATUS_OK) {
        log_a_run(log);
    }
    metrics_log_close(log);
    restore_stdout(saved);
    close(file);
    EXPECT(status == STATUS_OK);
    return read_text(path);
}

static const char *const own_lines[] = {
    "step 3  validation loss 3.2500, perplexity 25.79 (2.10M tokens in 3.2 s)",
    "step 3  sample:",
    "    | To be,",
    "    | or not to be?[2J? \u00e9",
    "step 3  checkpoint runs/a/checkpoints/step-00000003 (1.40 GiB in 0.4 s)",
    "SIGTERM: saved step 3",
};

static void test_a_file_gets_the_first_every_nth_and_the_last_step_as_plain_lines(void) {
    char expected[2000] = "", step[400];
    size_t bytes = 0;
#define ADD_STEP(number)                                                                                     \
    do {                                                                                                     \
        struct step_metrics m_ = step_at(number);                                                            \
        m_.total_steps = 6;                                                                                  \
        format_step(step, sizeof step, &m_, 0, false);                                                       \
        bytes += (size_t)snprintf(expected + bytes, sizeof expected - bytes, "%s\n", step);                  \
    } while (0)
    ADD_STEP(1);
    for (int i = 0; i < 6; i++) {
        bytes += (size_t)snprintf(expected + bytes, sizeof expected - bytes, "%s\n", own_lines[i]);
    }
    ADD_STEP(4);
    bytes += (size_t)snprintf(
        expected + bytes, sizeof expected - bytes, "step 5 skipped: loss spike (loss 3.2914, norm 0.421)\n");
    ADD_STEP(6);
#undef ADD_STEP
    char *text = plain_output(false, 4);
    EXPECT_STRING(text, expected);
    free(text);
}

static void test_quiet_prints_nothing(void) {
    char *text = plain_output(true, 1);
    EXPECT_STRING(text, "");
    free(text);
    log_enable(false); /* any rank but the first */
    text = plain_output(false, 1);
    log_enable(true);
    EXPECT_STRING(text, "");
    free(text);
}

/* A terminal that knows what the progress line uses: carriage return, newline, "clear to the end of the line". */
enum { SCREEN_ROWS = 40, SCREEN_COLUMNS = 100 };
struct screen {
    char rows[SCREEN_ROWS][SCREEN_COLUMNS + 1];
    int row, column, overflow;
};

static void screen_write(struct screen *screen, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        char *row = screen->rows[screen->row];
        if (text[i] == '\r') {
            screen->column = 0;
        } else if (text[i] == '\n') {
            screen->row = screen->row + 1 < SCREEN_ROWS ? screen->row + 1 : screen->row;
            screen->column = 0;
        } else if (bytes - i >= 3 && memcmp(text + i, "\033[K", 3) == 0) {
            row[screen->column] = '\0';
            i += 2;
        } else if (screen->column < SCREEN_COLUMNS) {
            bool at_end = row[screen->column] == '\0';
            row[screen->column++] = text[i];
            if (at_end) {
                row[screen->column] = '\0';
            }
        } else {
            screen->overflow++;
        }
    }
}

/* A pseudo-terminal of SCREEN_COLUMNS columns; false where the system has none. */
static bool open_terminal(int *master, int *slave) {
    *master = posix_openpt(O_RDWR | O_NOCTTY);
    if (*master < 0 || grantpt(*master) != 0 || unlockpt(*master) != 0) {
        return false;
    }
    *slave = open(ptsname(*master), O_RDWR | O_NOCTTY);
    struct winsize size = {.ws_row = SCREEN_ROWS, .ws_col = SCREEN_COLUMNS};
    struct termios raw;
    if (*slave < 0 || ioctl(*slave, TIOCSWINSZ, &size) != 0 || tcgetattr(*slave, &raw) != 0) {
        return false;
    }
    cfmakeraw(&raw); /* what is read is what was written */
    return tcsetattr(*slave, TCSANOW, &raw) == 0;
}

/* All that was written to the terminal, which hands it on in its own time: its end comes once nobody can write more. */
static size_t read_terminal(int master, int slave, char *output, size_t size) {
    size_t total = 0;
    ssize_t bytes;
    close(slave);
    while (total < size - 1 && (bytes = read(master, output + total, size - 1 - total)) > 0) {
        total += (size_t)bytes;
    }
    output[total] = '\0';
    close(master);
    return total;
}

static void test_a_terminal_shows_the_progress_line_below_everything_else(void) {
    int master, slave;
    EXPECT(open_terminal(&master, &slave));
    setenv("TERM", "xterm", 1);
    setenv("LC_ALL", "C", 1);
    int saved = redirect_stdout(slave);
    struct metrics_log *log = NULL;
    enum status status = metrics_log_open(&log, NULL, false, 1);
    if (status == STATUS_OK) {
        log_a_run(log);
    }
    metrics_log_close(log);
    restore_stdout(saved);
    EXPECT(status == STATUS_OK);

    struct screen screen = {.row = 0};
    static char output[16384];
    size_t bytes = read_terminal(master, slave, output, sizeof output);
    EXPECT(bytes > 0);
    screen_write(&screen, output, bytes);
    for (int i = 0; i < 6; i++) {
        EXPECT_STRING(screen.rows[i], own_lines[i]);
    }
    EXPECT_STRING(screen.rows[6], "step 5 skipped: loss spike (loss 3.2914, norm 0.421)");
    char last[400];
    struct step_metrics m = step_at(6);
    m.total_steps = 6;
    format_step(last, sizeof last, &m, SCREEN_COLUMNS - 1, false);
    EXPECT_STRING(screen.rows[7], last);
    EXPECT_CONTAINS(last, "step 6/6  =========="); /* a bar, full */
    EXPECT(screen.row == 8 && screen.column == 0 && screen.overflow == 0);
}

static void test_a_dumb_terminal_gets_plain_lines(void) {
    int master, slave;
    EXPECT(open_terminal(&master, &slave));
    setenv("TERM", "dumb", 1);
    int saved = redirect_stdout(slave);
    struct metrics_log *log = NULL;
    enum status status = metrics_log_open(&log, NULL, false, 100);
    struct step_metrics m = step_at(1);
    if (status == STATUS_OK) {
        status = metrics_log_step(log, &m);
    }
    metrics_log_close(log);
    restore_stdout(saved);
    EXPECT(status == STATUS_OK);
    char output[1000], expected[1000];
    read_terminal(master, slave, output, sizeof output);
    format_step(expected, sizeof expected - 1, &m, 0, false);
    strcat(expected, "\n");
    EXPECT_STRING(output, expected);
}

/* ---- log.jsonl ---- */

static struct metrics_log *open_log(int64_t resume_step) {
    struct metrics_log *log = NULL;
    EXPECT(metrics_log_open(&log, log_path, true, 1) == STATUS_OK);
    EXPECT(metrics_log_cut(log, resume_step) == STATUS_OK);
    return log;
}

static void write_log(const char *text) {
    EXPECT(file_write_all(log_path, text, strlen(text)) == STATUS_OK);
}

static void expect_log(const char *expected) {
    char *text = read_text(log_path);
    EXPECT_STRING(text, expected);
    free(text);
}

static double number_of(const struct json *event, const char *key) {
    const struct json *value = json_get(event, key);
    return value != NULL && value->type == JSON_NUMBER ? value->number : NAN;
}

static const char *string_of(const struct json *event, const char *key) {
    const struct json *value = json_get(event, key);
    return value != NULL && value->type == JSON_STRING ? value->string : "no string";
}

/* The events of the log, an object a line. */
static int read_events(struct json **events, int most) {
    char *text = read_text(log_path), *rest = text;
    int count = 0;
    for (char *line = strsep(&rest, "\n"); line != NULL && rest != NULL; line = strsep(&rest, "\n")) {
        EXPECT(count < most && json_parse(&events[count], line, strlen(line), "log.jsonl") == STATUS_OK);
        count++;
    }
    free(text);
    return count;
}

static void test_the_log_has_an_object_a_line_with_everything(void) {
    unlink(log_path);
    struct metrics_log *log = open_log(-1);
    log_a_run(log);
    struct json_writer own;
    metrics_begin_event(&own, "profile", 6);
    json_integer_member(&own, "steps", 4);
    EXPECT(metrics_end_event(log, &own) == STATUS_OK);
    struct json *events[16];
    int count = read_events(events, 16); /* before it is closed: nothing waits in a buffer */
    static const char *const types[] = {
        "step", "step", "step", "eval", "sample", "checkpoint", "note", "step", "step", "step", "profile"};
    static const int steps[] = {1, 2, 3, 3, 3, 3, 3, 4, 5, 6, 6};
    EXPECT(count == 11);
    for (int i = 0; i < count; i++) {
        EXPECT_STRING(string_of(events[i], "type"), types[i]);
        EXPECT(number_of(events[i], "step") == steps[i]);
        EXPECT(number_of(events[i], "time") > 1.6e9);
    }
    const struct json *step = events[0];
    EXPECT(number_of(step, "total_steps") == 6 && number_of(step, "loss") == 3.29141);
    EXPECT(number_of(step, "norm") == 0.4212 && number_of(step, "learning_rate") == 5.99e-4);
    EXPECT(number_of(step, "ms") == 312.4 && number_of(step, "data_wait_ms") == 0.25);
    EXPECT(number_of(step, "tokens_per_second") == 209800 && number_of(step, "eta_seconds") == 5820);
    EXPECT(number_of(step, "tflops") == 640.2 && number_of(step, "tflops_causal") == 600.5);
    EXPECT(number_of(step, "mfu") == 0.647);
    EXPECT_NEAR(number_of(step, "mfu_causal"), 0.647 * 600.5 / 640.2, 1e-15);
    EXPECT(number_of(step, "memory_bytes") == 76450873344 && number_of(step, "memory_total_bytes") == 150e9);
    EXPECT(number_of(step, "tokens_seen") == 65536 && number_of(step, "epoch") == 1);
    EXPECT(!json_get(step, "skipped")->boolean && json_get(step, "skip_reason") == NULL);
    EXPECT(json_get(events[8], "skipped")->boolean);
    EXPECT_STRING(string_of(events[8], "skip_reason"), "loss spike");
    EXPECT(number_of(events[3], "loss") == 3.25 && number_of(events[3], "tokens") == 2097152);
    EXPECT(number_of(events[3], "seconds") == 3.21);
    EXPECT_STRING(string_of(events[4], "text"), "To be,\nor not\tto be\x1b[2J\xef\xbf\xbd \xc3\xa9\n");
    EXPECT_STRING(string_of(events[5], "path"), "runs/a/checkpoints/step-00000003");
    EXPECT(number_of(events[5], "bytes") == 1503238554 && number_of(events[5], "seconds") == 0.44);
    EXPECT_STRING(string_of(events[6], "text"), "SIGTERM: saved step 3");
    EXPECT(number_of(events[10], "steps") == 4);
    for (int i = 0; i < count; i++) {
        json_free(events[i]);
    }
    metrics_log_close(log);
}

static void test_what_is_not_a_number_is_null_in_the_log(void) {
    unlink(log_path);
    struct metrics_log *log = open_log(-1);
    struct step_metrics m = step_at(1);
    m.loss = NAN;
    m.norm = INFINITY;
    m.mfu = -1;
    EXPECT(metrics_log_step(log, &m) == STATUS_OK);
    metrics_log_close(log);
    struct json *event = NULL;
    EXPECT(read_events(&event, 1) == 1);
    static const char *const keys[] = {"loss", "norm", "mfu", "mfu_causal"};
    for (int i = 0; i < 4; i++) {
        const struct json *value = json_get(event, keys[i]);
        EXPECT(value != NULL && value->type == JSON_NULL);
    }
    json_free(event);
}

#define LINE(step) "{\"type\":\"step\",\"step\":" #step "}\n"

static void test_on_resume_later_steps_are_cut_off(void) {
    write_log(LINE(1)
            LINE(2) "{\"type\":\"eval\",\"step\":2}\n" LINE(3) "{\"type\":\"eval\",\"step\":3}\n" LINE(4));
    struct metrics_log *log = open_log(2);
    expect_log(LINE(1) LINE(2) "{\"type\":\"eval\",\"step\":2}\n");
    EXPECT(metrics_log_note(log, 3, "again") == STATUS_OK);
    metrics_log_close(log);
    struct json *events[4];
    int count = read_events(events, 4);
    EXPECT(count == 4);
    EXPECT_STRING(string_of(events[count - 1], "text"), "again");
    for (int i = 0; i < count; i++) {
        json_free(events[i]);
    }
}

static void test_lines_without_a_step_go_with_the_lines_around_them(void) {
    write_log(LINE(1) "{\"type\":\"other\"}\n" LINE(2) "{\"type\":\"other\"}\n" LINE(
        3) "no json\n{\"step\":\"x\"}\n");
    metrics_log_close(open_log(1));
    expect_log(LINE(1) "{\"type\":\"other\"}\n");
}

static void test_a_resume_at_or_beyond_the_end_cuts_nothing(void) {
    write_log(LINE(1) LINE(2));
    metrics_log_close(open_log(2));
    metrics_log_close(open_log(100));
    metrics_log_close(open_log(-1));
    expect_log(LINE(1) LINE(2));
    metrics_log_close(open_log(0));
    expect_log("");
    metrics_log_close(open_log(0));
    expect_log("");
}

static void test_a_torn_last_line_is_dropped(void) {
    static const char torn[] = LINE(1) LINE(2) "{\"type\":\"step\",\"st";
    write_log(torn);
    metrics_log_close(open_log(-1));
    expect_log(LINE(1) LINE(2));
    write_log(torn);
    metrics_log_close(open_log(1));
    expect_log(LINE(1));
    write_log("{\"type\":\"step\",\"step\":1}"); /* whole, but who knows */
    metrics_log_close(open_log(5));
    expect_log("");
}

static void test_a_long_log_is_cut_in_the_middle(void) {
    FILE *file = fopen(log_path, "w");
    for (int i = 1; i <= 20000; i++) {
        fprintf(file, "{\"type\":\"step\",\"step\":%d}\n", i);
    }
    fclose(file);
    metrics_log_close(open_log(12345));
    struct json **events = calloc(20000, sizeof *events);
    int count = read_events(events, 20000);
    EXPECT(count == 12345);
    EXPECT(count < 1 || number_of(events[count - 1], "step") == 12345);
    for (int i = 0; i < count; i++) {
        json_free(events[i]);
    }
    free(events);
}

static void test_a_disk_that_is_full_from_the_start_is_an_error_that_names_the_file(void) {
    struct metrics_log *log = NULL;
    EXPECT(metrics_log_open(&log, "/dev/full", true, 1) == STATUS_OK);
    struct step_metrics m = step_at(1);
    EXPECT(metrics_log_step(log, &m) == STATUS_ERROR);
    EXPECT_STRING(
        error_message(), "/dev/full: cannot write: No space left on device; make room and start again");
    metrics_log_close(log);
}

/* stderr, until the second call puts it back and gives what came; of a pipe, which no limit on files cuts. */
struct captured {
    int before, reader;
    char text[1000];
};

static void capture_errors(struct captured *c) {
    int ends[2];
    fflush(stderr);
    c->before = dup(STDERR_FILENO);
    EXPECT(pipe(ends) == 0);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    c->reader = ends[0];
}

static void end_capture(struct captured *c) {
    dup2(c->before, STDERR_FILENO);
    close(c->before);
    ssize_t bytes = read(c->reader, c->text, sizeof c->text - 1);
    c->text[bytes > 0 ? bytes : 0] = '\0';
    close(c->reader);
}

static void test_lines_that_a_full_disk_does_not_take_are_lost_with_one_warning_and_none_is_torn(void) {
    unlink(log_path);
    struct metrics_log *log = open_log(-1);
    EXPECT(metrics_log_note(log, 1, "fits") == STATUS_OK);
    struct stat info;
    EXPECT(stat(log_path, &info) == 0);
    struct rlimit old, limit;
    struct captured errors;
    char expected[sizeof log_path + 300];
    getrlimit(RLIMIT_FSIZE, &old);
    limit = old;
    limit.rlim_cur = (rlim_t)info.st_size + 10; /* some bytes of the next line */
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    capture_errors(&errors);
    setrlimit(RLIMIT_FSIZE, &limit);
    EXPECT(metrics_log_note(log, 2, "does not fit") == STATUS_OK);
    EXPECT(metrics_log_note(log, 3, "neither") == STATUS_OK);
    setrlimit(RLIMIT_FSIZE, &old);
    end_capture(&errors);
    signal(SIGXFSZ, handler);
    snprintf(expected, sizeof expected,
        "train_gpt: %s: cannot write: File too large; the run goes on, its log is incomplete until there is "
        "room\n",
        log_path);
    EXPECT_STRING(errors.text, expected);
    EXPECT(metrics_log_note(log, 4, "fits again") == STATUS_OK);
    metrics_log_close(log);
    struct json *events[3] = {NULL};
    EXPECT(read_events(events, 3) == 2);
    EXPECT(number_of(events[0], "step") == 1 && number_of(events[1], "step") == 4);
    json_free(events[0]);
    json_free(events[1]);
}

static void test_a_log_that_was_removed_is_begun_again(void) {
    unlink(log_path);
    struct metrics_log *log = open_log(-1);
    EXPECT(metrics_log_note(log, 1, "before") == STATUS_OK);
    unlink(log_path);
    EXPECT(metrics_log_note(log, 2, "after") == STATUS_OK);
    int other = open(log_path, O_RDWR); /* it is held as the first was */
    EXPECT(flock(other, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK);
    close(other);
    metrics_log_close(log);
    struct json *events[2] = {NULL};
    EXPECT(read_events(events, 2) == 1);
    EXPECT(number_of(events[0], "step") == 2);
    json_free(events[0]);
}

static void test_a_run_whose_folder_another_run_has_taken_ends(void) {
    unlink(log_path);
    struct metrics_log *log = open_log(-1);
    EXPECT(metrics_log_note(log, 1, "mine") == STATUS_OK);
    unlink(log_path);
    struct metrics_log *other = open_log(-1);
    EXPECT(metrics_log_note(other, 1, "another's") == STATUS_OK);
    EXPECT(metrics_log_keep_hold(log) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "log.jsonl: another run is writing it");
    EXPECT(metrics_log_note(log, 2, "lost") == STATUS_ERROR);
    EXPECT(metrics_log_note(other, 2, "another's") == STATUS_OK);
    metrics_log_close(other);
    metrics_log_close(log);
}

static void test_a_log_that_cannot_be_opened_is_an_error_that_names_it(void) {
    struct metrics_log *log = NULL;
    EXPECT(metrics_log_open(&log, "/nowhere/log.jsonl", true, 1) == STATUS_ERROR && log == NULL);
    EXPECT_STRING(error_message(), "/nowhere/log.jsonl: cannot open for writing: No such file or directory");
    EXPECT(metrics_log_open(&log, folder, true, 1) == STATUS_ERROR && log == NULL);
    EXPECT_CONTAINS(error_message(), folder);
    metrics_log_close(NULL);
}

static void test_a_log_that_another_run_writes_is_left_alone(void) {
    struct metrics_log *first = NULL, *second = NULL;
    EXPECT(metrics_log_open(&first, log_path, true, 1) == STATUS_OK);
    EXPECT(metrics_log_cut(first, 0) == STATUS_OK);
    EXPECT(metrics_log_note(first, 7, "the first one's") == STATUS_OK);
    EXPECT(metrics_log_open(&second, log_path, true, 1) == STATUS_ERROR && second == NULL);
    EXPECT_CONTAINS(error_message(), log_path);
    EXPECT_CONTAINS(error_message(), "another run is writing it");
    struct json *event = NULL;
    EXPECT(read_events(&event, 1) == 1 && number_of(event, "step") == 7);
    json_free(event);
    metrics_log_close(first);
    EXPECT(metrics_log_open(&second, log_path, true, 1) == STATUS_OK);
    EXPECT(metrics_log_cut(second, 7) == STATUS_OK);
    metrics_log_close(second);
}

int main(void) {
    make_folder("test_metrics");
    snprintf(log_path, sizeof log_path, "%s/log.jsonl", folder);
    RUN(test_flops_per_token_are_those_of_the_measured_runs);
    RUN(test_causal_flops_halve_attention_alone);
    RUN(test_counts_have_three_digits_and_a_unit);
    RUN(test_bytes_come_in_binary_units);
    RUN(test_durations_have_two_units);
    RUN(test_a_log_is_before_the_first_step_if_all_its_events_are_of_step_0);
    RUN(test_a_plain_step_shows_everything);
    RUN(test_a_narrow_terminal_keeps_what_matters_most);
    RUN(test_the_bar_fills_with_the_steps);
    RUN(test_a_small_buffer_cuts_the_line);
    RUN(test_a_file_gets_the_first_every_nth_and_the_last_step_as_plain_lines);
    RUN(test_quiet_prints_nothing);
    RUN(test_a_terminal_shows_the_progress_line_below_everything_else);
    RUN(test_a_dumb_terminal_gets_plain_lines);
    RUN(test_the_log_has_an_object_a_line_with_everything);
    RUN(test_what_is_not_a_number_is_null_in_the_log);
    RUN(test_on_resume_later_steps_are_cut_off);
    RUN(test_lines_without_a_step_go_with_the_lines_around_them);
    RUN(test_a_resume_at_or_beyond_the_end_cuts_nothing);
    RUN(test_a_torn_last_line_is_dropped);
    RUN(test_a_long_log_is_cut_in_the_middle);
    RUN(test_a_disk_that_is_full_from_the_start_is_an_error_that_names_the_file);
    RUN(test_lines_that_a_full_disk_does_not_take_are_lost_with_one_warning_and_none_is_torn);
    RUN(test_a_log_that_was_removed_is_begun_again);
    RUN(test_a_run_whose_folder_another_run_has_taken_ends);
    RUN(test_a_log_that_cannot_be_opened_is_an_error_that_names_it);
    RUN(test_a_log_that_another_run_writes_is_left_alone);
    remove_tree(folder);
    return test_summary();
}
