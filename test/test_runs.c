/* What a whole run promises, checked on ./train_gpt itself with a model that trains in a second:
   - killed, interrupted or crippled at random moments and resumed, it ends with the very losses and weights
     of a run that nobody disturbed;
   - the number of ranks, the ZeRO stage and the split into micro-batches change the losses by rounding at
     most.

   Moments are random: the seed is printed, FLASHGPT_SEED repeats it. A run that gets to its end
   between two faults is compared and followed by a new one, so that start and end are hit as well as the
   middle. */
#include "llmc/json.h"
#include "llmc/random.h"
#include "llmc/shard.h"
#include "port.h"
#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STEPS = 20, FAULTS = 50, MAX_RANKS = 4, PATH_BYTES = 512, MAX_EVENTS = 200, PATIENCE_SECONDS = 60 };

static char folder[PATH_BYTES / 2]; /* of all files of this test */
static uint64_t seed;
static const char *trainer = "./train_gpt";

/* ---- files ---- */

static void make_shard(const char *name, uint64_t stream, int64_t tokens) {
    char path[PATH_BYTES];
    uint16_t *values = malloc((size_t)tokens * sizeof *values);
    /* every fourth token follows from the one before: something to learn */
    for (int64_t i = 0; i < tokens; i++) {
        int drawn = (int)(random_uniform(11, stream, (uint64_t)i) * 64);
        values[i] = (uint16_t)(i % 4 == 3 ? (values[i - 1] * 5 + 3) % 64 : drawn);
    }
    EXPECT(path_join(path, sizeof path, folder, name) == STATUS_OK);
    EXPECT(shard_write(path, values, tokens) == STATUS_OK);
    free(values);
}

/* The losses in a run's log in their order, and the bytes of its last weights. */
struct outcome {
    int events;
    struct {
        bool evaluation;
        int64_t step;
        double loss, norm;
    } event[MAX_EVENTS];
    uint8_t *weights;
    size_t weights_bytes;
};

static void read_event(struct outcome *o, const char *line, size_t bytes) {
    struct json *json;
    const char *type = "";
    EXPECT(json_parse(&json, line, bytes, "log.jsonl") == STATUS_OK);
    EXPECT(json_get_string(json, "type", &type, "log.jsonl") == STATUS_OK);
    bool step = strcmp(type, "step") == 0, evaluation = strcmp(type, "eval") == 0;
    if ((step || evaluation) && o->events < MAX_EVENTS) {
        int64_t number = 0;
        const struct json *loss = json_get(json, "loss"), *norm = json_get(json, "norm");
        EXPECT(json_get_integer(json, "step", 1, STEPS, &number, "log.jsonl") == STATUS_OK);
        EXPECT(loss != NULL && loss->type == JSON_NUMBER);
        EXPECT(!step || (norm != NULL && norm->type == JSON_NUMBER));
        o->event[o->events].evaluation = evaluation;
        o->event[o->events].step = number;
        o->event[o->events].loss = loss != NULL ? loss->number : (double)NAN;
        o->event[o->events++].norm = norm != NULL ? norm->number : 0;
    }
    json_free(json);
}

/* The run's log, to be freed; NULL: there is none yet. */
static char *log_text(const char *run_dir) {
    char path[2 * PATH_BYTES];
    uint8_t *log = NULL;
    size_t bytes;
    snprintf(path, sizeof path, "%s/log.jsonl", run_dir);
    EXPECT(!path_exists(path) || file_read_all(path, &log, &bytes) == STATUS_OK);
    return (char *)log;
}

/* Reads what there is; a run may have been killed in the middle of a line. */
static void read_log(struct outcome *o, const char *run_dir) {
    char *log = log_text(run_dir);
    memset(o, 0, sizeof *o);
    for (char *line = log, *end; line != NULL && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        read_event(o, line, (size_t)(end - line));
    }
    free(log);
}

static void checkpoint_path(char *path, size_t size, const char *run_dir, int step) {
    snprintf(path, size, "%s/checkpoints/step-%08d/model.safetensors", run_dir, step);
}

/* The newest checkpoint's step, 0: none. */
static int saved_step(const char *run_dir) {
    char path[2 * PATH_BYTES];
    int step = STEPS;
    for (; step > 0; step--) {
        checkpoint_path(path, sizeof path, run_dir, step);
        if (path_exists(path)) {
            break;
        }
    }
    return step;
}

static int64_t logged_step(const char *run_dir) {
    struct outcome o;
    read_log(&o, run_dir);
    return o.events == 0 ? 0 : o.event[o.events - 1].step;
}

static void read_outcome(struct outcome *o, const char *run_dir) {
    char path[2 * PATH_BYTES];
    read_log(o, run_dir);
    checkpoint_path(path, sizeof path, run_dir, STEPS);
    EXPECT(file_read_all(path, &o->weights, &o->weights_bytes) == STATUS_OK);
}

static void free_outcome(struct outcome *o) {
    free(o->weights);
}

static bool same_weights(const struct outcome *a, const struct outcome *b) {
    return a->weights_bytes == b->weights_bytes && memcmp(a->weights, b->weights, a->weights_bytes) == 0;
}

/* Every step once and in order, all losses and norms of the same bits. */
static bool same_losses(const struct outcome *a, const struct outcome *b) {
    bool same = a->events == b->events;
    for (int i = 0; same && i < a->events; i++) {
        same = a->event[i].evaluation == b->event[i].evaluation && a->event[i].step == b->event[i].step &&
               a->event[i].loss == b->event[i].loss && a->event[i].norm == b->event[i].norm;
    }
    return same;
}

/* ---- the trainer as a child ---- */

struct trainer {
    const char *run_dir;
    pid_t process;
    int errors; /* read end of its stderr */
    char text[4096];
    int ending;
};

/* One command for the first start and every resume. `more` ends with NULL. */
static void trainer_start_printing_to(
    struct trainer *t, int output, const char *run_dir, const char *const *more) {
    char data[PATH_BYTES], validation[PATH_BYTES];
    snprintf(data, sizeof data, "%s/train*.bin", folder);
    snprintf(validation, sizeof validation, "%s/val.bin", folder);
    const char *arguments[64] = {trainer, "--device", "cpu", "--threads", "1", "--model", "tiny", "--layers",
        "2", "--channels", "32", "--heads", "4", "--seq-len", "16", "--vocab-size", "64", "--global-batch",
        "128", "--steps", "20", "--warmup-steps", "4", "--learning-rate", "3e-3", "--train-data", data,
        "--val-data", validation, "--eval-every", "5", "--eval-batches", "0", "--sample-every", "0",
        "--run-dir", run_dir, "--resume"};
    int count = 0, ends[2];
    while (arguments[count] != NULL) {
        count++;
    }
    for (; *more != NULL && count < 63; more++) {
        arguments[count++] = *more;
    }
    t->run_dir = run_dir;
    EXPECT(pipe(ends) == 0);
    fflush(stdout);
    t->process = fork();
    if (t->process == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        dup2(output, STDOUT_FILENO);
        execv(arguments[0], (char *const *)arguments);
        _exit(127);
    }
    close(ends[1]);
    t->errors = ends[0];
}

static void trainer_start(struct trainer *t, const char *run_dir, const char *const *more) {
    int nowhere = open("/dev/null", O_WRONLY);
    trainer_start_printing_to(t, nowhere, run_dir, more);
    close(nowhere);
}

/* True once it has ended. */
static bool trainer_ended(struct trainer *t) {
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)t->process, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
}

/* Waits for so long, or until the trainer has ended. */
static void wait_or_end(struct trainer *t, double seconds) {
    for (double end = time_seconds() + seconds; time_seconds() < end && !trainer_ended(t);) {
        usleep(500);
    }
}

/* Waits until the trainer and all its ranks have closed stderr; false if that takes too long. */
static bool trainer_wait(struct trainer *t) {
    size_t length = 0;
    ssize_t got = 1;
    double deadline = time_seconds() + PATIENCE_SECONDS;
    while (got > 0 && length < sizeof t->text - 1) {
        struct pollfd watched = {t->errors, POLLIN, 0};
        if (time_seconds() > deadline) {
            kill(t->process, SIGKILL);
            break;
        }
        if (poll(&watched, 1, 1000) > 0) {
            got = read(t->errors, t->text + length, sizeof t->text - 1 - length);
            length += got > 0 ? (size_t)got : 0;
        }
    }
    t->text[length] = '\0';
    close(t->errors);
    EXPECT(waitpid(t->process, &t->ending, 0) == t->process);
    return got == 0;
}

static void run_to_end(const char *run_dir, const char *const *more) {
    struct trainer t;
    trainer_start(&t, run_dir, more);
    EXPECT(trainer_wait(&t));
    EXPECT_STRING(t.text, "");
    EXPECT(t.ending == 0);
}

/* The process of a rank; -1 if the ranks, at most two, are not all there (yet, or any more). */
static pid_t find_rank(const struct trainer *t, int rank, int ranks) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)t->process, (int)t->process);
    FILE *file = fopen(path, "r");
    int process[2] = {-1, -1};
    if (file == NULL) {
        return -1;
    }
    bool all = fscanf(file, "%d %d", &process[0], &process[1]) == ranks;
    fclose(file);
    return all ? process[rank] : -1;
}

/* ---- faults ---- */

static double draw(uint64_t *index) {
    return random_uniform(seed, 0, (*index)++);
}

/* Strikes a running trainer, waits for its end and judges exit code and stderr. */
typedef void (*fault)(struct trainer *t, uint64_t *index);

static void ended_well(const struct trainer *t) {
    EXPECT(t->ending == 0);
    EXPECT_STRING(t->text, "");
}

/* With one line that says why; unless it was through before the fault came. */
static void ended_for(const struct trainer *t, int code, const char *message) {
    if (t->ending == 0) {
        ended_well(t);
        return;
    }
    EXPECT(WIFEXITED(t->ending) && WEXITSTATUS(t->ending) == code);
    EXPECT_CONTAINS(t->text, message);
    EXPECT(t->text[0] != '\0' && strchr(t->text, '\n') == t->text + strlen(t->text) - 1);
}

static void ended_by_signal(const struct trainer *t, int number) {
    EXPECT(t->ending == 0 || (WIFSIGNALED(t->ending) && WTERMSIG(t->ending) == number));
    EXPECT_STRING(t->text, "");
}

static void kill_all(struct trainer *t, uint64_t *index) {
    (void)index;
    kill(t->process, SIGKILL);
    EXPECT(trainer_wait(t));
    ended_by_signal(t, SIGKILL);
}

static void ask_to_stop(struct trainer *t, uint64_t *index) {
    int number = draw(index) < 0.5 ? SIGTERM : SIGHUP; /* of a job scheduler, of a terminal that is closed */
    kill(t->process, number);
    EXPECT(trainer_wait(t));
    ended_by_signal(t, number); /* if it came before the program listened */
    EXPECT(t->ending != 0 || saved_step(t->run_dir) == logged_step(t->run_dir));
}

static void kill_rank(struct trainer *t, int rank, pid_t process) {
    char message[128];
    snprintf(message, sizeof message, "rank %d was killed by signal 9 (Killed)", rank);
    kill(process, SIGKILL);
    EXPECT(trainer_wait(t));
    ended_for(t, 128 + SIGKILL, message);
}

static void delay_rank(struct trainer *t, pid_t process) {
    kill(process, SIGSTOP);
    usleep(200000);
    kill(process, SIGCONT);
    EXPECT(trainer_wait(t));
    ended_well(t);
}

static void stop_rank(struct trainer *t, int rank, pid_t process) {
    char message[128];
    snprintf(message, sizeof message, "rank %d did not arrive within 2 s", rank);
    kill(process, SIGSTOP);
    wait_or_end(t, 5);
    if (!trainer_ended(t)) { /* it had said its last word, or they save, which may take longer */
        kill(process, SIGCONT);
    }
    EXPECT(trainer_wait(t));
    ended_for(t, STATUS_PEER_LOST, message);
}

static void strike_a_rank(struct trainer *t, uint64_t *index) {
    int rank = draw(index) < 0.5 ? 0 : 1;
    double choice = draw(index);
    pid_t process = find_rank(t, rank, 2);
    if (process <= 0 || choice < 0.1) {
        kill_all(t, index);
    } else if (choice < 0.2) {
        ask_to_stop(t, index);
    } else if (choice < 0.84) {
        kill_rank(t, rank, process);
    } else if (choice < 0.94) {
        delay_rank(t, process);
    } else {
        stop_rank(t, rank, process);
    }
}

static void finish_run(const char *run_dir, const struct outcome *reference) {
    struct outcome disturbed;
    read_outcome(&disturbed, run_dir);
    EXPECT(same_losses(&disturbed, reference));
    EXPECT(same_weights(&disturbed, reference));
    free_outcome(&disturbed);
    remove_tree(run_dir);
}

/* One start of the run; returns whether the fault came before the end. */
static bool disturb(
    const char *run_dir, const char *const *more, fault strike, double longest_seconds, uint64_t *index) {
    struct trainer t;
    trainer_start(&t, run_dir, more);
    wait_or_end(&t, draw(index) * longest_seconds);
    if (!trainer_ended(&t)) {
        strike(&t, index);
        return true;
    }
    EXPECT(trainer_wait(&t));
    ended_well(&t);
    return false;
}

static void disturb_runs(const char *name, fault strike, const char *const *more) {
    char run_dir[PATH_BYTES];
    struct outcome reference;
    snprintf(run_dir, sizeof run_dir, "%s/%s-reference", folder, name);
    double start = time_seconds();
    run_to_end(run_dir, more);
    double whole_seconds = time_seconds() - start;
    read_outcome(&reference, run_dir);
    EXPECT(reference.events == STEPS + STEPS / 5);
    EXPECT(reference.event[reference.events - 1].loss < reference.event[0].loss);
    uint64_t index = 0;
    int faults = 0, runs = 0, midway = 0;
    while (test_failures_in_this_ == 0 && faults < FAULTS) {
        snprintf(run_dir, sizeof run_dir, "%s/%s-%d", folder, name, runs);
        int saved = saved_step(run_dir);
        faults += disturb(run_dir, more, strike, 0.6 * whole_seconds, &index);
        if (faults == FAULTS) {
            run_to_end(run_dir, more);
        }
        EXPECT(logged_step(run_dir) >= saved); /* what was saved is not done again */
        if (saved_step(run_dir) == STEPS) {
            finish_run(run_dir, &reference);
            runs++;
        } else {
            midway += saved_step(run_dir) > saved;
        }
    }
    EXPECT(midway > 0);
    printf("    %d faults in %d runs, %d of them midway, seed %llu\n", faults, runs, midway,
        (unsigned long long)seed);
    free_outcome(&reference);
}

static void a_run_killed_at_50_random_moments_ends_as_if_nothing_had_happened(void) {
    static const char *const more[] = {"--micro-batch", "4", "--checkpoint-every", "1", NULL};
    disturb_runs("killed", kill_all, more);
}

static void a_run_asked_to_stop_at_50_random_moments_ends_as_if_nothing_had_happened(void) {
    /* saves when asked, not at every step */
    static const char *const more[] = {"--micro-batch", "4", "--checkpoint-every", "7", NULL};
    disturb_runs("asked", ask_to_stop, more);
}

static void ranks_killed_stopped_or_delayed_at_50_random_moments_lose_nothing(void) {
    static const char *const more[] = {
        "--micro-batch", "2", "--checkpoint-every", "1", "--ranks", "2", "--comm-timeout", "2", NULL};
    disturb_runs("ranks", strike_a_rank, more);
}

/* Kills a rank, or leaves it stopped, that the end of the run cannot do without: it is held still first, so that what was
   looked at is still so when it is struck. */
static bool strike_midway(const char *run_dir, pid_t process, int signal) {
    if (process <= 0 || kill(process, SIGSTOP) != 0) {
        return false;
    }
    bool midway = saved_step(run_dir) < STEPS - 1;
    kill(process, midway ? signal : SIGCONT);
    return midway;
}

static void a_run_restarts_by_itself_when_its_ranks_are_killed(void) {
    static const char *const calm[] = {"--micro-batch", "4", "--checkpoint-every", "1", "--ranks", "2", NULL};
    static const char *const more[] = {
        "--micro-batch", "4", "--checkpoint-every", "1", "--ranks", "2", "--max-restarts", "100", NULL};
    enum { KILLS = 10 };
    char run_dir[PATH_BYTES];
    struct outcome reference;
    struct trainer t;
    uint64_t index = 0;
    snprintf(run_dir, sizeof run_dir, "%s/restarts-reference", folder);
    double start = time_seconds();
    run_to_end(run_dir, calm);
    double longest_seconds = (time_seconds() - start) / 2;
    read_outcome(&reference, run_dir);
    int kills = 0, runs = 0;
    while (test_failures_in_this_ == 0 && kills < KILLS) {
        int kills_before = kills;
        snprintf(run_dir, sizeof run_dir, "%s/restarts-%d", folder, runs++);
        trainer_start(&t, run_dir, more);
        while (kills < KILLS && !trainer_ended(&t)) {
            wait_or_end(&t, draw(&index) * longest_seconds);
            kills += strike_midway(run_dir, find_rank(&t, draw(&index) < 0.5 ? 0 : 1, 2), SIGKILL);
        }
        EXPECT(trainer_wait(&t));
        EXPECT(t.ending == 0);
        EXPECT((strstr(t.text, "restart 1 of 100") != NULL) == (kills > kills_before));
        finish_run(run_dir, &reference);
    }
    printf("    %d kills in %d runs, seed %llu\n", kills, runs, (unsigned long long)seed);
    free_outcome(&reference);
}

static void a_single_rank_that_is_killed_is_restarted_too(void) {
    static const char *const calm[] = {"--micro-batch", "1", "--checkpoint-every", "1", NULL};
    static const char *const more[] = {
        "--micro-batch", "1", "--checkpoint-every", "1", "--max-restarts", "1", NULL};
    char run_dir[PATH_BYTES];
    struct outcome reference;
    struct trainer t;
    snprintf(run_dir, sizeof run_dir, "%s/restart-reference", folder);
    run_to_end(run_dir, calm);
    read_outcome(&reference, run_dir);
    bool killed = false;
    for (int run = 0; test_failures_in_this_ == 0 && !killed; run++) {
        snprintf(run_dir, sizeof run_dir, "%s/restart-%d", folder, run);
        trainer_start(&t, run_dir, more);
        while (!killed && !trainer_ended(&t)) {
            usleep(500);
            killed = saved_step(run_dir) >= 2 && strike_midway(run_dir, find_rank(&t, 0, 1), SIGKILL);
        }
        EXPECT(trainer_wait(&t));
        EXPECT(t.ending == 0);
        EXPECT((strstr(t.text, "train_gpt: rank 0 was killed by signal 9") != NULL) == killed);
        EXPECT((strstr(t.text, "train_gpt: restart 1 of 1\n") != NULL) == killed);
        finish_run(run_dir, &reference);
    }
    free_outcome(&reference);
}

/* As `train_gpt ... | head -1` does. */
static void a_run_whose_reader_has_gone_goes_on_to_its_end(void) {
    static const char *const one[] = {"--micro-batch", "4", NULL};
    static const char *const two[] = {"--micro-batch", "4", "--ranks", "2", NULL};
    for (int ranks = 1; ranks <= 2; ranks++) {
        const char *const *more = ranks == 1 ? one : two;
        char run_dir[PATH_BYTES];
        struct outcome reference;
        struct trainer t;
        int ends[2];
        snprintf(run_dir, sizeof run_dir, "%s/reader-%d-reference", folder, ranks);
        run_to_end(run_dir, more);
        read_outcome(&reference, run_dir);
        snprintf(run_dir, sizeof run_dir, "%s/reader-%d", folder, ranks);
        EXPECT(pipe(ends) == 0);
        close(ends[0]);
        trainer_start_printing_to(&t, ends[1], run_dir, more);
        close(ends[1]);
        EXPECT(trainer_wait(&t));
        ended_well(&t);
        finish_run(run_dir, &reference);
        free_outcome(&reference);
    }
}

static bool log_contains(const char *run_dir, const char *text) {
    char *log = log_text(run_dir);
    bool found = log != NULL && strstr(log, text) != NULL;
    free(log);
    return found;
}

/* The last step of the log, 0 if there is none. */
static int64_t newest_step(const char *run_dir) {
    static const char key[] = "\"type\":\"step\",\"step\":";
    char *log = log_text(run_dir);
    int64_t step = 0;
    for (const char *at = log; at != NULL && (at = strstr(at, key)) != NULL; at++) {
        step = strtoll(at + strlen(key), NULL, 10);
    }
    free(log);
    return step;
}

/* As a terminal after Ctrl-S, or `train_gpt ... | less`: rank 0 must not wait until rank 1 has lost its patience. */
static void a_run_whose_reader_takes_a_pause_goes_on(void) {
    static const char *const more[] = {"--micro-batch", "4", "--ranks", "2", "--comm-timeout", "2",
        "--log-every", "1", "--steps", "2000", "--warmup-steps", "4", "--eval-every", "0",
        "--checkpoint-every", "0", NULL};
    char run_dir[PATH_BYTES];
    struct trainer t;
    int ends[2];
    snprintf(run_dir, sizeof run_dir, "%s/pause", folder);
    EXPECT(pipe(ends) == 0);
    trainer_start_printing_to(&t, ends[1], run_dir, more);
    close(ends[1]);
    /* 2000 steps print lines of 300 kB, where a pipe holds 64; a busy machine may take its time for them */
    int64_t step = 0;
    for (double end = time_seconds() + 20; time_seconds() < end && !trainer_ended(&t);) {
        usleep(50000);
        int64_t now = newest_step(run_dir);
        end = now > step ? time_seconds() + 20 : end;
        step = now;
    }
    EXPECT(trainer_ended(&t) && newest_step(run_dir) == 2000);
    close(ends[0]);
    EXPECT(trainer_wait(&t));
    ended_well(&t);
    remove_tree(run_dir);
}

/* It has work to do, and does not wait for others. */
static bool is_at_work(pid_t process) {
    char path[64], state;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *file = fopen(path, "r");
    bool there = file != NULL && fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
    if (file != NULL) {
        fclose(file);
    }
    return there && state == 'R';
}

/* One rank loses time in every step, as with a hot GPU; more and more of it, until a busy machine, which has the other
   one wait for a core meanwhile, is no excuse. */
static void a_rank_that_keeps_the_others_waiting_is_named_in_the_log(void) {
    static const char *const more[] = {
        "--micro-batch", "2", "--ranks", "2", "--steps", "1000000", "--eval-every", "0", NULL};
    char run_dir[PATH_BYTES];
    struct trainer t;
    snprintf(run_dir, sizeof run_dir, "%s/slow", folder);
    trainer_start(&t, run_dir, more);
    bool told = false;
    int64_t step = 0;
    double pause_us = 15000;
    for (double end = time_seconds() + 3 * PATIENCE_SECONDS;
         !told && time_seconds() < end && !trainer_ended(&t);) {
        pid_t process = find_rank(&t, 1, 2);
        int64_t now = newest_step(run_dir);
        if (process > 0 && now > step && is_at_work(process)) {
            kill(process, SIGSTOP);
            usleep((useconds_t)pause_us);
            kill(process, SIGCONT);
            pause_us *= 1.05;
            step = now;
        }
        usleep(1000);
        told = log_contains(run_dir, "rank 1 is slow: the others wait ");
    }
    EXPECT(told);
    kill(t.process, SIGKILL);
    EXPECT(trainer_wait(&t));
    remove_tree(run_dir);
}

/* ---- ranks that are started one by one and meet over TCP ---- */

/* As torchrun, srun or a person would; rank `rank` of two. */
static void rank_start(struct trainer *t, int rank, int port, const char *run_dir, const char *const *more) {
    char rank_text[12], port_text[12];
    snprintf(rank_text, sizeof rank_text, "%d", rank);
    snprintf(port_text, sizeof port_text, "%d", port);
    setenv("RANK", rank_text, 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", port_text, 1);
    trainer_start(t, run_dir, more);
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
}

static void ranks_started_one_by_one_train_as_those_forked(void) {
    static const char *const forked[] = {
        "--micro-batch", "2", "--ranks", "2", "--checkpoint-every", "8", NULL};
    static const char *const placed[] = {"--micro-batch", "2", "--checkpoint-every", "8", NULL};
    char run_dir[PATH_BYTES];
    struct outcome reference;
    struct trainer ranks[2];
    snprintf(run_dir, sizeof run_dir, "%s/forked", folder);
    run_to_end(run_dir, forked);
    read_outcome(&reference, run_dir);
    snprintf(run_dir, sizeof run_dir, "%s/placed", folder);
    int holder, port = hold_port(&holder);
    for (int rank = 1; rank >= 0; rank--) {
        rank_start(&ranks[rank], rank, port, run_dir, placed);
    }
    for (int rank = 0; rank < 2; rank++) {
        EXPECT(trainer_wait(&ranks[rank]));
        ended_well(&ranks[rank]);
    }
    close(holder);
    finish_run(run_dir, &reference);
    free_outcome(&reference);
}

static void ranks_started_one_by_one_restart_when_any_of_them_is_killed_or_hangs(void) {
    static const char *const calm[] = {"--micro-batch", "4", "--checkpoint-every", "1", "--ranks", "2", NULL};
    static const char *const more[] = {"--micro-batch", "4", "--checkpoint-every", "1", "--max-restarts",
        "100", "--comm-timeout", "3", NULL};
    enum { STRIKES = 6 }; /* either rank killed; stopped; stopped while the other is killed */
    char run_dir[PATH_BYTES];
    struct outcome reference;
    struct trainer ranks[2];
    snprintf(run_dir, sizeof run_dir, "%s/restarts-placed-reference", folder);
    run_to_end(run_dir, calm);
    read_outcome(&reference, run_dir);
    int holder, port = hold_port(&holder), strikes = 0, runs = 0;
    while (test_failures_in_this_ == 0 && strikes < STRIKES) {
        int strikes_before = strikes;
        snprintf(run_dir, sizeof run_dir, "%s/restarts-placed-%d", folder, runs++);
        for (int rank = 0; rank < 2; rank++) {
            rank_start(&ranks[rank], rank, port, run_dir, more);
        }
        while (strikes < STRIKES && !trainer_ended(&ranks[0])) {
            int before = saved_step(run_dir);
            for (int i = 0; i < 20000 && saved_step(run_dir) == before && !trainer_ended(&ranks[0]); i++) {
                usleep(1000); /* until they have met again */
            }
            pid_t struck = find_rank(&ranks[strikes % 2], 0, 1);
            pid_t other = find_rank(&ranks[1 - strikes % 2], 0, 1);
            if (other > 0 && strike_midway(run_dir, struck, strikes < 2 ? SIGKILL : SIGSTOP)) {
                if (strikes >= 4) {
                    kill(other, SIGKILL);
                }
                strikes++;
            }
        }
        for (int rank = 0; rank < 2; rank++) {
            EXPECT(trainer_wait(&ranks[rank]));
            EXPECT(ranks[rank].ending == 0);
            EXPECT((strstr(ranks[rank].text, "restart 1 of 100") != NULL) == (strikes > strikes_before));
        }
        finish_run(run_dir, &reference);
    }
    printf("    %d strikes in %d runs\n", strikes, runs);
    close(holder);
    free_outcome(&reference);
}

/* Both ranks end before the first step with this line. */
/* Where rank 0 finishes a checkpoint while rank 1, which was lost, is starting again. */
static void a_rank_that_looks_for_the_checkpoint_too_early_looks_again(void) {
    static const char *const calm[] = {"--micro-batch", "4", "--checkpoint-every", "1", "--ranks", "2", NULL};
    static const char *const more[] = {
        "--micro-batch", "4", "--checkpoint-every", "1", "--max-restarts", "3", NULL};
    char run_dir[PATH_BYTES], newest[2 * PATH_BYTES], aside[2 * PATH_BYTES];
    struct outcome reference;
    struct trainer ranks[2];
    snprintf(run_dir, sizeof run_dir, "%s/early-reference", folder);
    run_to_end(run_dir, calm);
    read_outcome(&reference, run_dir);
    snprintf(run_dir, sizeof run_dir, "%s/early", folder);
    int holder, port = hold_port(&holder);
    for (int rank = 0; rank < 2; rank++) {
        rank_start(&ranks[rank], rank, port, run_dir, more);
    }
    pid_t first = -1, second = -1, again = -1;
    while ((saved_step(run_dir) < 3 || first <= 0 || second <= 0) && !trainer_ended(&ranks[0])) {
        usleep(500);
        first = find_rank(&ranks[0], 0, 1);
        second = find_rank(&ranks[1], 0, 1);
    }
    kill(first, SIGSTOP);
    kill(second, SIGSTOP);
    int step = saved_step(run_dir);
    EXPECT(step < STEPS);
    snprintf(newest, sizeof newest, "%s/checkpoints/step-%08d", run_dir, step);
    snprintf(aside, sizeof aside, "%s/not-yet", run_dir);
    EXPECT(rename(newest, aside) == 0);
    kill(second, SIGKILL);
    while ((again <= 0 || again == second) && !trainer_ended(&ranks[1])) {
        usleep(500);
        again = find_rank(&ranks[1], 0, 1);
    }
    EXPECT(rename(aside, newest) == 0);
    kill(first, SIGKILL);
    for (int rank = 0; rank < 2; rank++) {
        EXPECT(trainer_wait(&ranks[rank]));
        EXPECT(ranks[rank].ending == 0);
        EXPECT_CONTAINS(ranks[rank].text, "train_gpt: restart 2 of 3\n");
    }
    snprintf(newest, sizeof newest, "rank 1 goes on from step %d, rank 0 from step %d", step - 1, step);
    EXPECT_CONTAINS(ranks[1].text, newest);
    finish_run(run_dir, &reference);
    close(holder);
    free_outcome(&reference);
}

static void both_refuse(struct trainer ranks[2], const char *message) {
    for (int rank = 0; rank < 2; rank++) {
        EXPECT(trainer_wait(&ranks[rank]));
        ended_for(&ranks[rank], STATUS_ERROR, message);
        EXPECT(ranks[rank].ending != 0 && logged_step(ranks[rank].run_dir) == 0);
    }
}

static void a_rank_started_with_other_options_ends_both_with_a_line_that_names_the_option(void) {
    static const struct {
        const char *option, *first, *second, *told;
    } pairs[] = {{"--micro-batch", "2", "4", "--micro-batch=4, not --micro-batch=2; start all"},
        {"--learning-rate", "0.003", "1e-4", "--learning-rate=0.0001, not --learning-rate=0.003; start all"},
        {"--sample-prompt", "once, upon", "once\" upon",
            "--sample-prompt=\"once\\\" upon\", not --sample-prompt=\"once, upon\"; start all"},
        {"--zero", "-1", "0", "--zero=0, not --zero=1; start all"}, /* of several ranks -1 is 1 */
        {"--deterministic", "--deterministic=false", "--deterministic=true",
            "--deterministic=true, not --deterministic=false; start all"}};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        char run_dir[PATH_BYTES], expected[256];
        struct trainer ranks[2];
        int holder, port = hold_port(&holder);
        snprintf(run_dir, sizeof run_dir, "%s/differ-%zu", folder, i);
        snprintf(expected, sizeof expected, "rank 1 has other options than rank 0: %s", pairs[i].told);
        for (int rank = 0; rank < 2; rank++) {
            const char *value = rank == 0 ? pairs[i].first : pairs[i].second;
            bool one_word = value[0] == '-' && value[1] == '-';
            const char *const more[] = {
                "--micro-batch", "2", one_word ? value : pairs[i].option, one_word ? NULL : value, NULL};
            rank_start(&ranks[rank], rank, port, run_dir, more);
        }
        both_refuse(ranks, expected);
        close(holder);
    }
}

static void of_options_that_differ_far_behind_the_line_names_the_option(void) {
    char run_dir[PATH_BYTES], prompts[2][400];
    struct trainer ranks[2];
    int holder, port = hold_port(&holder);
    snprintf(run_dir, sizeof run_dir, "%s/differ-behind", folder);
    for (int rank = 0; rank < 2; rank++) {
        memset(prompts[rank], 'x', 399);
        prompts[rank][399] = '\0';
        prompts[rank][398] = rank == 0 ? 'y' : 'z';
        const char *const more[] = {"--micro-batch", "2", "--sample-prompt", prompts[rank], NULL};
        rank_start(&ranks[rank], rank, port, run_dir, more);
    }
    both_refuse(ranks, "rank 1 has other options than rank 0: --sample-prompt=\"xxxx");
    close(holder);
}

static void a_rank_that_counts_other_ranks_than_its_launcher_is_refused(void) {
    static const char *const wrong[] = {"--micro-batch", "2", "--ranks", "4", NULL};
    char run_dir[PATH_BYTES];
    struct trainer rank;
    int holder, port = hold_port(&holder);
    snprintf(run_dir, sizeof run_dir, "%s/count", folder);
    rank_start(&rank, 0, port, run_dir, wrong);
    EXPECT(trainer_wait(&rank));
    EXPECT_STRING(rank.text, "train_gpt: --ranks 4, but the environment started 2: leave the option out\n");
    close(holder);
}

static void ranks_that_resume_from_other_checkpoints_are_refused_at_the_start(void) {
    static const char *const more[] = {"--micro-batch", "2", NULL};
    char run_dirs[2][PATH_BYTES];
    struct trainer ranks[2];
    int holder, port = hold_port(&holder);
    for (int rank = 0; rank < 2; rank++) {
        snprintf(run_dirs[rank], PATH_BYTES, "%s/resumed-%d", folder, rank);
    }
    run_to_end(run_dirs[0], more);
    for (int rank = 0; rank < 2; rank++) {
        rank_start(&ranks[rank], rank, port, run_dirs[rank], more);
    }
    for (int rank = 0; rank < 2; rank++) {
        EXPECT(trainer_wait(&ranks[rank]));
        EXPECT(ranks[rank].ending != 0);
        ended_for(&ranks[rank], STATUS_ERROR,
            "rank 1 goes on from step 0, rank 0 from step 20: give --resume to all or none, and a --run-dir "
            "that all machines share");
    }
    close(holder);
    remove_tree(run_dirs[0]);
}

/* The one that stops still saves: the other, which looked for the newest checkpoint before, must not go on from there. */
static void a_run_that_is_resumed_before_it_has_ended_stays_as_it_was(void) {
    static const char *const more[] = {
        "--micro-batch", "4", "--checkpoint-every", "7", "--steps", "1000000", "--eval-every", "0", NULL};
    char run_dir[PATH_BYTES];
    struct trainer first, second;
    snprintf(run_dir, sizeof run_dir, "%s/twice", folder);
    trainer_start(&first, run_dir, more);
    while (newest_step(run_dir) < 20 && !trainer_ended(&first)) {
        usleep(1000);
    }
    kill(first.process, SIGSTOP);
    trainer_start(&second, run_dir, more);
    usleep(700000); /* it has looked, and waits for the log */
    kill(first.process, SIGTERM);
    kill(first.process, SIGCONT);
    EXPECT(trainer_wait(&first));
    ended_well(&first);
    char *log = log_text(run_dir);
    EXPECT(trainer_wait(&second));
    EXPECT(second.ending != 0);
    ended_for(&second, STATUS_ERROR, "another process went on with this run while this one began to");
    char *after = log_text(run_dir);
    EXPECT_STRING(after, log);
    free(log);
    free(after);
    remove_tree(run_dir);
}

/* As after a power cut. */
static void a_run_whose_log_ends_in_half_a_line_goes_on(void) {
    static const char *const more[] = {"--micro-batch", "4", "--checkpoint-every", "1", NULL};
    char run_dir[PATH_BYTES], path[2 * PATH_BYTES];
    struct outcome reference;
    struct trainer t;
    snprintf(run_dir, sizeof run_dir, "%s/torn-reference", folder);
    run_to_end(run_dir, more);
    read_outcome(&reference, run_dir);
    snprintf(run_dir, sizeof run_dir, "%s/torn", folder);
    trainer_start(&t, run_dir, more);
    while (saved_step(run_dir) < 2 && !trainer_ended(&t)) {
        usleep(500);
    }
    kill(t.process, SIGKILL);
    EXPECT(trainer_wait(&t));
    snprintf(path, sizeof path, "%s/log.jsonl", run_dir);
    FILE *log = fopen(path, "a");
    EXPECT(log != NULL && fputs("{\"type\":\"st", log) >= 0 && fclose(log) == 0);
    run_to_end(run_dir, more);
    finish_run(run_dir, &reference);
    free_outcome(&reference);
}

/* What is there was there before the ranks met, and is not theirs to go on with when they start again. */
static void a_rank_started_alone_does_not_wait_where_another_run_is(void) {
    static const char *const more[] = {"--micro-batch", "4", NULL};
    static const char *const another[] = {"--micro-batch", "4", "--no-resume", "--max-restarts", "2", NULL};
    char run_dir[PATH_BYTES];
    struct trainer rank;
    int holder, port = hold_port(&holder);
    snprintf(run_dir, sizeof run_dir, "%s/occupied", folder);
    run_to_end(run_dir, more);
    double start = time_seconds();
    rank_start(&rank, 0, port, run_dir, another);
    EXPECT(trainer_wait(&rank));
    EXPECT(rank.ending != 0 && time_seconds() - start < 30); /* not --comm-timeout, since nobody comes */
    ended_for(&rank, STATUS_ERROR, "already holds a run");
    close(holder);
    remove_tree(run_dir);
}

static void ranks_that_start_from_other_weights_are_refused_at_the_start(void) {
    char run_dirs[2][PATH_BYTES], weights[2][3 * PATH_BYTES], run_dir[PATH_BYTES];
    static const char *const seeds[] = {"1", "2"};
    snprintf(run_dir, sizeof run_dir, "%s/from-weights", folder);
    for (int i = 0; i < 2; i++) {
        const char *const more[] = {"--micro-batch", "2", "--steps", "4", "--seed", seeds[i], NULL};
        snprintf(run_dirs[i], PATH_BYTES, "%s/weights-%d", folder, i);
        snprintf(weights[i], sizeof weights[i], "%s/checkpoints/step-00000004", run_dirs[i]);
        run_to_end(run_dirs[i], more);
    }
    for (int one_alone = 0; one_alone < 2; one_alone++) {
        struct trainer ranks[2];
        int holder, port = hold_port(&holder);
        for (int rank = 0; rank < 2; rank++) {
            const char *option = one_alone && rank == 1 ? NULL : "--init-from";
            const char *const more[] = {"--micro-batch", "2", option, weights[rank], NULL};
            rank_start(&ranks[rank], rank, port, run_dir, more);
        }
        both_refuse(ranks, one_alone ? "rank 1 has no --init-from, rank 0 has one: give it to all or none"
                                     : "rank 1 reads other weights than rank 0: give all the same files");
        close(holder);
        remove_tree(run_dir);
    }
    remove_tree(run_dirs[0]);
    remove_tree(run_dirs[1]);
}

/* As on machines whose disks are their own. */
static void ranks_that_do_not_share_the_runs_folder_are_refused_at_the_start(void) {
    static const char *const more[] = {"--micro-batch", "2", "--comm-timeout", "4", NULL};
    char run_dirs[2][PATH_BYTES];
    struct trainer ranks[2];
    int holder, port = hold_port(&holder);
    for (int rank = 0; rank < 2; rank++) {
        snprintf(run_dirs[rank], PATH_BYTES, "%s/own-%d", folder, rank);
        rank_start(&ranks[rank], rank, port, run_dirs[rank], more);
    }
    both_refuse(ranks, "rank 1 does not reach what rank 0 made in --run-dir");
    EXPECT(!path_exists(run_dirs[1]));
    close(holder);
    remove_tree(run_dirs[0]);
}

/* A home with train-0.bin, a second shard (NULL: none) and val.bin: "~" is another folder on every rank. */
static void make_home(const char *name, const char *second, int64_t tokens, int64_t val_tokens) {
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    EXPECT(make_directories(path) == STATUS_OK);
    setenv("HOME", path, 1);
    snprintf(path, sizeof path, "%s/train-0.bin", name);
    make_shard(path, 0, 1500);
    if (second != NULL) {
        snprintf(path, sizeof path, "%s/%s", name, second);
        make_shard(path, 1, tokens);
    }
    snprintf(path, sizeof path, "%s/val.bin", name);
    make_shard(path, 2, val_tokens);
}

static void ranks_that_find_other_data_are_refused_at_the_start(void) {
    static const char *const more[] = {
        "--micro-batch", "2", "--train-data", "~/train*.bin", "--val-data", "~/val.bin", NULL};
    static const struct {
        const char *second;
        int64_t tokens, val_tokens;
        const char *option;
    } others[] = {{NULL, 0, 700, "--train-data"}, {"train-1.bin", 899, 700, "--train-data"},
        {"train-2.bin", 900, 700, "--train-data"}, {"train-1.bin", 900, 701, "--val-data"}};
    char *home = getenv("HOME") == NULL ? NULL : strdup(getenv("HOME"));
    for (int i = 0; i < 4; i++) {
        char run_dir[PATH_BYTES], name[64], expected[128];
        struct trainer ranks[2];
        int holder, port = hold_port(&holder);
        snprintf(run_dir, sizeof run_dir, "%s/other-data-%d", folder, i);
        snprintf(name, sizeof name, "home-%d", i);
        make_home("home", "train-1.bin", 900, 700);
        rank_start(&ranks[0], 0, port, run_dir, more);
        make_home(name, others[i].second, others[i].tokens, others[i].val_tokens);
        rank_start(&ranks[1], 1, port, run_dir, more);
        snprintf(expected, sizeof expected, "rank 1 finds other shards of %s than rank 0", others[i].option);
        both_refuse(ranks, expected);
        close(holder);
    }
    if (home != NULL) {
        setenv("HOME", home, 1);
    }
    free(home);
}

/* A vocabulary as tiktoken writes it, of all bytes and this pair of letters: base64 and rank. */
static void write_vocabulary(const char *pair) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    FILE *file = fopen("words", "w");
    int a = pair[0], b = pair[1];
    EXPECT(file != NULL);
    for (int byte = 0; byte < 256; byte++) {
        fprintf(file, "%c%c== %d\n", digits[byte / 4], digits[byte % 4 * 16], byte);
    }
    fprintf(file, "%c%c%c= 256\n", digits[a / 4], digits[a % 4 * 16 + b / 16], digits[b % 16 * 4]);
    fclose(file);
}

/* What ranks read of text lies in the folder that each is started in. */
static void ranks_that_read_other_questions_or_another_vocabulary_are_refused_at_the_start(void) {
    static const char *const more[] = {"--micro-batch", "2", "--vocab-size", "300", "--multiple-choice",
        "questions", "--tokenizer", "words", NULL};
    static const struct {
        const char *label, *pair, *told;
    } other[] = {{"1", "ab", "rank 1 finds other questions in --multiple-choice than rank 0"},
        {"0", "ba", "rank 1 finds another vocabulary in --tokenizer than rank 0"}};
    const char *given = trainer;
    char *program = realpath(trainer, NULL);
    int here = open(".", O_RDONLY | O_DIRECTORY);
    EXPECT(program != NULL && here >= 0);
    trainer = program;
    for (int i = 0; i < 2; i++) {
        char run_dir[PATH_BYTES], own[PATH_BYTES], text[64];
        struct trainer ranks[2];
        int holder, port = hold_port(&holder);
        snprintf(run_dir, sizeof run_dir, "%s/other-text-%d", folder, i);
        for (int rank = 0; rank < 2; rank++) {
            snprintf(own, sizeof own, "%s/text-%d-%d", folder, i, rank);
            EXPECT(make_directories(own) == STATUS_OK && chdir(own) == 0);
            int bytes = snprintf(text, sizeof text,
                "{\"ctx\":\"a\",\"endings\":[\"b\",\"c\"],\"label\":%s}\n", rank == 1 ? other[i].label : "0");
            EXPECT(file_write_all("questions", text, (size_t)bytes) == STATUS_OK);
            write_vocabulary(rank == 1 ? other[i].pair : "ab");
            rank_start(&ranks[rank], rank, port, run_dir, more);
        }
        both_refuse(ranks, other[i].told);
        close(holder);
        EXPECT(fchdir(here) == 0);
    }
    close(here);
    trainer = given;
    free(program);
}

/* ---- ranks, ZeRO stages and micro-batches ---- */

static void train_split(struct outcome *o, int ranks, int zero, int micro_batch) {
    char run_dir[PATH_BYTES], ranks_text[12], zero_text[12], micro_batch_text[12];
    snprintf(run_dir, sizeof run_dir, "%s/split-%d-%d-%d", folder, ranks, zero, micro_batch);
    snprintf(ranks_text, sizeof ranks_text, "%d", ranks);
    snprintf(zero_text, sizeof zero_text, "%d", zero);
    snprintf(micro_batch_text, sizeof micro_batch_text, "%d", micro_batch);
    const char *const more[] = {"--ranks", ranks_text, "--zero", zero_text, "--micro-batch", micro_batch_text,
        "--eval-batches", "2", NULL}; /* 256 of 700 tokens */
    run_to_end(run_dir, more);
    read_outcome(o, run_dir);
    EXPECT(o->events == STEPS + STEPS / 5);
    remove_tree(run_dir);
}

static void ranks_zero_stages_and_micro_batches_give_the_same_losses(void) {
    struct outcome reference;
    train_split(&reference, 1, 0, 8);
    double largest = 0;
    for (int ranks = 1; ranks <= MAX_RANKS; ranks *= 2) {
        for (int micro_batch = 1; micro_batch <= 8 / ranks; micro_batch *= 2) {
            struct outcome stage0, stage1, stage2;
            train_split(&stage0, ranks, 0, micro_batch);
            train_split(&stage1, ranks, 1, micro_batch);
            train_split(&stage2, ranks, 2, micro_batch);
            EXPECT(same_losses(&stage0, &stage1));
            EXPECT(same_weights(&stage0, &stage1));
            for (int i = 0; i < reference.events && i < stage0.events; i++) {
                double loss = reference.event[i].loss;
                EXPECT_NEAR(stage0.event[i].loss, loss, 1e-6 * loss);
                EXPECT_NEAR(stage2.event[i].loss, loss, 1e-6 * loss); /* adds up in another order */
                largest = fmax(largest, fabs(stage0.event[i].loss - loss) / loss);
            }
            free_outcome(&stage0);
            free_outcome(&stage1);
            free_outcome(&stage2);
        }
    }
    printf("    losses differ by %.1e of their value at most\n", largest);
    free_outcome(&reference);
}

static void gradients_in_bf16_between_ranks_cost_little(void) {
    static const char *const whole[] = {"--micro-batch", "2", "--ranks", "2", NULL};
    struct outcome reference;
    char run_dir[PATH_BYTES];
    snprintf(run_dir, sizeof run_dir, "%s/fp32", folder);
    run_to_end(run_dir, whole);
    read_outcome(&reference, run_dir);
    for (int zero = 0; zero <= 2; zero++) {
        char stage[12];
        struct outcome narrow;
        snprintf(stage, sizeof stage, "%d", zero);
        const char *const half[] = {
            "--micro-batch", "2", "--ranks", "2", "--reduce-dtype", "bf16", "--zero", stage, NULL};
        snprintf(run_dir, sizeof run_dir, "%s/bf16-%d", folder, zero);
        run_to_end(run_dir, half);
        read_outcome(&narrow, run_dir);
        EXPECT(narrow.events == reference.events);
        EXPECT(!same_weights(&narrow, &reference));
        for (int i = 0; i < reference.events && i < narrow.events; i++) {
            /* bf16 has 8 bits: a gradient is off by 0.4% at most, and noise averages out */
            EXPECT_NEAR(narrow.event[i].loss, reference.event[i].loss, 1e-3 * reference.event[i].loss);
        }
        free_outcome(&narrow);
    }
    free_outcome(&reference);
}

/* In memory where that is possible: there fsync costs nothing, and what kill does to a process is the same. */
static bool make_folder(void) {
    const char *parent = getenv("TMPDIR");
    if (parent == NULL) {
        parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    }
    snprintf(folder, sizeof folder, "%s/flashgpt-runs-XXXXXX", parent);
    return mkdtemp(folder) != NULL;
}

int main(void) {
    signal(SIGHUP, SIG_DFL); /* also where the tests themselves run under nohup */
    const char *given = getenv("FLASHGPT_SEED");
    seed = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)getpid();
    if (getenv("FLASHGPT_TRAINER") != NULL) { /* of another build */
        trainer = getenv("FLASHGPT_TRAINER");
    }
    if (access(trainer, X_OK) != 0) {
        printf("%s is not there: make builds it\n", trainer);
        return 1;
    }
    if (!make_folder()) {
        printf("%s: %s\n", folder, strerror(errno));
        return 1;
    }
    make_shard("train-0.bin", 0, 1500);
    make_shard("train-1.bin", 1, 900);
    make_shard("val.bin", 2, 700);
    RUN(a_run_killed_at_50_random_moments_ends_as_if_nothing_had_happened);
    RUN(a_run_asked_to_stop_at_50_random_moments_ends_as_if_nothing_had_happened);
    RUN(ranks_killed_stopped_or_delayed_at_50_random_moments_lose_nothing);
    RUN(a_run_restarts_by_itself_when_its_ranks_are_killed);
    RUN(a_single_rank_that_is_killed_is_restarted_too);
    RUN(a_run_whose_reader_has_gone_goes_on_to_its_end);
    RUN(a_run_whose_reader_takes_a_pause_goes_on);
    RUN(a_rank_that_keeps_the_others_waiting_is_named_in_the_log);
    RUN(ranks_started_one_by_one_train_as_those_forked);
    RUN(ranks_started_one_by_one_restart_when_any_of_them_is_killed_or_hangs);
    RUN(a_rank_started_with_other_options_ends_both_with_a_line_that_names_the_option);
    RUN(of_options_that_differ_far_behind_the_line_names_the_option);
    RUN(a_rank_that_counts_other_ranks_than_its_launcher_is_refused);
    RUN(a_rank_that_looks_for_the_checkpoint_too_early_looks_again);
    RUN(ranks_that_resume_from_other_checkpoints_are_refused_at_the_start);
    RUN(a_run_whose_log_ends_in_half_a_line_goes_on);
    RUN(a_run_that_is_resumed_before_it_has_ended_stays_as_it_was);
    RUN(a_rank_started_alone_does_not_wait_where_another_run_is);
    RUN(ranks_that_start_from_other_weights_are_refused_at_the_start);
    RUN(ranks_that_do_not_share_the_runs_folder_are_refused_at_the_start);
    RUN(ranks_that_find_other_data_are_refused_at_the_start);
    RUN(ranks_that_read_other_questions_or_another_vocabulary_are_refused_at_the_start);
    RUN(gradients_in_bf16_between_ranks_cost_little);
    RUN(ranks_zero_stages_and_micro_batches_give_the_same_losses);
    remove_tree(folder);
    return test_summary();
}
