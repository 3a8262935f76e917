/* flashgpt: trains a GPT from token shards to checkpoints, on one CPU, one GPU or several.

   The story, from the bottom of this file upwards:
     main           reads the options, finds what to resume, checks data and model, then starts the ranks
     rank_main      one rank: device, data, model, optimizer, weights; then the loop
     train          the loop: step, evaluation, sample, checkpoint, signals
     train_step     micro-steps of forward and backward, one optimizer step, one line of progress
     use_model      instead of a run: texts of a trained model (--generate), how good it is (--evaluate), or its files
                    (--export)

   Plain C in a .cu file: nvcc builds it with CUDA, `cc -x c` without. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "attention/attention.h"
#include "llmc/checkpoint.h"
#include "llmc/checksum.h"
#include "llmc/dataloader.h"
#include "llmc/evaluate.h"
#include "llmc/gpus.h"
#include "llmc/info.h"
#include "llmc/launch.h"
#include "llmc/metrics.h"
#include "llmc/options.h"
#include "llmc/pace.h"
#include "llmc/plan.h"
#include "llmc/profile.h"
#include "llmc/rendezvous.h"
#include "llmc/schedule.h"
#include "llmc/use.h"

enum { PATH_BYTES = 4096, LONGEST_RUN_DIR = 1500 };
static const double GRACE_SECONDS = 5; /* for ranks to end by themselves once one has failed */

/* What a run leaves in its folder: if it changes, somebody is at work there. */
struct footprint {
    int64_t newest_step; /* of its checkpoints, whole or not */
    int64_t log_bytes;
};

/* What is known before the ranks start; they inherit it through the fork. */
struct run {
    struct options options;
    struct model_config config;
    struct run_state state;      /* of the checkpoint, or of a fresh start */
    bool cuda;                   /* the device */
    int gpus;                    /* of this machine, where the device is one */
    struct launch_place place;   /* who the environment says this process is; ranks 0: nothing */
    bool restarted;              /* goes on from its own newest checkpoint */
    char run_dir[PATH_BYTES];    /* "" in a dry run */
    char checkpoint[PATH_BYTES]; /* to resume from; "" = start afresh */
    struct footprint found;      /* when it was looked for */
    struct schedule schedule;
};

/* One rank at work. */
struct worker {
    const struct run *run;
    const struct options *options;
    const struct launch_rank *rank;
    struct backend *device;  /* the real one */
    struct comm *ranks;      /* likewise */
    struct profile *profile; /* NULL: off */
    struct backend *backend; /* what the rest works with: the real ones, or the profiler's in front of them */
    struct comm *comm;
    struct model *model;
    struct optimizer *optimizer;
    struct dataloader *train_data, *val_data;
    struct tokenizer *tokenizer;
    struct decoder *decoder; /* first rank only, where there are samples */
    struct metrics_log *log; /* first rank only */
    struct run_state state;
    char *options_json;
    struct pace pace;
    int32_t *inputs, *targets; /* (micro_batch, seq_len) */
    int64_t micro_steps;       /* per rank and step */
    double peak_tflops;        /* 0: unknown */
    double start_seconds;
    int64_t start_step;
    char last_checkpoint[PATH_BYTES];
};

/* ---- one step ---- */

static enum status log_step(struct worker *w, const struct step_result *result, double learning_rate,
    const char *skipped_because, double seconds, double data_wait) {
    const struct options *o = w->options;
    const struct model_config *c = &w->run->config;
    if (w->log == NULL) {
        return STATUS_OK;
    }
    double tokens_per_second = (double)o->global_batch / seconds;
    double per_rank = tokens_per_second / w->comm->ranks / 1e12;
    int64_t parameters = model_get_layout(w->model)->parameters;
    double steps_done = (double)(w->state.step - w->start_step);
    struct step_metrics m;
    memset(&m, 0, sizeof m);
    m.step = w->state.step;
    m.total_steps = o->steps;
    m.loss = result->loss;
    m.norm = result->norm;
    m.learning_rate = learning_rate;
    m.milliseconds = seconds * 1e3;
    m.tokens_per_second = tokens_per_second;
    m.ranks = w->comm->ranks;
    m.tflops = per_rank * flops_per_token(parameters, c->layers, c->channels, (int)o->seq_len);
    m.tflops_causal = per_rank * flops_per_token_causal(parameters, c->layers, c->channels, (int)o->seq_len);
    m.mfu = w->peak_tflops > 0.0 ? m.tflops / w->peak_tflops : -1.0;
    uint64_t used;
    w->backend->memory_usage(w->backend, &used, &m.memory_bytes, &m.memory_total_bytes);
    m.eta_seconds = (time_seconds() - w->start_seconds) / steps_done * (double)(o->steps - w->state.step);
    m.data_wait_milliseconds = data_wait * 1e3;
    m.skipped = !result->applied;
    m.skip_reason = skipped_because;
    m.tokens_seen = w->state.tokens_seen;
    m.epoch = w->state.data_position / dataloader_windows(w->train_data);
    return metrics_log_step(w->log, &m);
}

static enum status note(struct worker *w, const char *text) {
    return w->log == NULL ? STATUS_OK : metrics_log_note(w->log, w->state.step, text);
}

static enum status look_at_pace(struct worker *w) {
    struct pace_sums *all = NULL;
    char text[160];
    CHECK(ALLOCATE(all, w->comm->ranks));
    enum status status = w->comm->host_all_gather(w->comm, all, &w->pace.sums, sizeof *all);
    if (status == STATUS_OK && pace_look(&w->pace, all, w->comm->ranks, text, sizeof text)) {
        status = note(w, text);
    }
    free(all);
    return status;
}

static enum status train_step(struct worker *w) {
    const struct options *o = w->options;
    struct run_state *state = &w->state;
    double start = time_seconds(), data_wait = 0.0;
    double learning_rate = schedule_learning_rate(&w->run->schedule, state->step);
    double d_loss = 1.0 / (double)o->global_batch;
    double loss_limit = spikes_loss_limit(&state->spikes, o->skip_loss_zscore);
    double norm_limit = spikes_norm_limit(&state->spikes, o->skip_norm_zscore);

    CHECK(optimizer_begin_step(w->optimizer));
    for (int64_t micro = 0; micro < w->micro_steps; micro++) {
        struct model_hooks hooks = optimizer_hooks(w->optimizer, micro == w->micro_steps - 1);
        CHECK(dataloader_next(w->train_data, w->inputs, w->targets, &data_wait));
        CHECK(model_forward_backward(w->model, w->inputs, w->targets, (int)o->micro_batch, (int)o->seq_len,
            d_loss, optimizer_accumulates(w->optimizer, micro == 0), optimizer_loss_sum(w->optimizer),
            &hooks));
    }
    CHECK(optimizer_step(w->optimizer, learning_rate, (double)o->global_batch, loss_limit, norm_limit));
    struct step_result result;
    CHECK(optimizer_result(w->optimizer, &result));

    state->step++;
    state->data_position = dataloader_position(w->train_data);
    state->optimizer_step = result.optimizer_step;
    state->tokens_seen += o->global_batch;
    const char *skipped_because = NULL;
    if (result.applied) {
        state->skipped_in_row = 0;
        spikes_add(&state->spikes, result.loss, result.norm);
    } else {
        state->skipped_total++;
        state->skipped_in_row++;
        skipped_because = spikes_reason(result.loss, result.norm, loss_limit);
    }
    double seconds = time_seconds() - start;
    CHECK(log_step(w, &result, learning_rate, skipped_because, seconds, data_wait));
    if (pace_add_step(&w->pace, seconds * 1e3, result.wait_ms)) {
        CHECK(look_at_pace(w));
    }
    if (o->max_skipped > 0 && state->skipped_in_row >= o->max_skipped) {
        return fail("steps in a row that were skipped: %lld, the last for a %s; the weights are as before "
                    "them: lower --learning-rate, or go on from an earlier checkpoint of %s",
            (long long)state->skipped_in_row, skipped_because, w->run->run_dir);
    }
    return STATUS_OK;
}

/* ---- evaluation, samples, checkpoints ---- */

static enum status evaluate(struct worker *w) {
    const struct options *o = w->options;
    struct model_hooks hooks = optimizer_hooks(w->optimizer, false);
    struct evaluation e = {w->model, w->comm, (int)o->micro_batch, (int)o->seq_len, &hooks};
    double start = time_seconds();
    if (w->val_data != NULL) {
        struct loss_result r;
        CHECK(evaluate_loss(&e, w->val_data, o->eval_batches * w->micro_steps, &r));
        w->state.last_val_loss = r.loss;
        if (isnan(w->state.best_val_loss) || r.loss < w->state.best_val_loss) {
            w->state.best_val_loss = r.loss;
        }
        if (w->log != NULL) {
            CHECK(metrics_log_eval(w->log, w->state.step, r.loss, r.tokens, time_seconds() - start));
        }
    }
    if (o->multiple_choice[0] != '\0') {
        struct choice_result r;
        start = time_seconds();
        CHECK(evaluate_choices(&e, w->tokenizer, o->multiple_choice, &r));
        if (w->log != NULL) {
            CHECK(metrics_log_choices(
                w->log, w->state.step, r.questions, r.correct, r.correct_normalised, time_seconds() - start));
        }
    }
    return STATUS_OK;
}

static enum status add_to_memory(void *file, int text, const char *piece, size_t bytes) {
    (void)text;
    fwrite(piece, 1, bytes, (FILE *)file); /* memory that is out shows when the file is closed */
    return STATUS_OK;
}

/* First rank only: the parameters are all there, and nothing is exchanged. */
static enum status write_sample(struct worker *w) {
    const struct options *o = w->options;
    struct model_hooks hooks = optimizer_hooks(w->optimizer, false);
    struct generate_options g = generate_options_of(o);
    int64_t generated;
    char *text = NULL;
    size_t bytes = 0;
    FILE *memory = open_memstream(&text, &bytes);
    if (memory == NULL) {
        return fail_as(STATUS_OUT_OF_MEMORY, "out of host memory for a sample");
    }
    enum status status = STATUS_OK;
    int buckets = hooks.before_parameters != NULL ? model_get_layout(w->model)->buckets : 0;
    for (int bucket = 0; bucket < buckets && status == STATUS_OK; bucket++) {
        status = hooks.before_parameters(hooks.context, bucket);
    }
    fputs(o->sample_prompt, memory);
    if (status == STATUS_OK) {
        status = generate(w->decoder, w->tokenizer, o->sample_prompt, strlen(o->sample_prompt), &g,
            add_to_memory, memory, &generated);
    }
    if (fclose(memory) != 0 && status == STATUS_OK) {
        status = fail_as(STATUS_OUT_OF_MEMORY, "out of host memory for a sample");
    }
    if (status == STATUS_OK) {
        status = metrics_log_sample(w->log, w->state.step, text, bytes);
    }
    free(text);
    return status;
}

/* The first rank writes, and all know that it may be late for what they do next. */
static enum status sample(struct worker *w) {
    enum { SLOW_SECONDS_A_TOKEN = 1 };
    double seconds = (double)w->options->sample_tokens * SLOW_SECONDS_A_TOKEN;
    w->comm->be_patient(w->comm, seconds);
    enum status status = w->log != NULL ? write_sample(w) : STATUS_OK;
    if (status == STATUS_OK) {
        status = w->comm->barrier(w->comm);
    }
    w->comm->be_patient(w->comm, 0);
    return status;
}

/* Told on the first rank; what the others know they know from it. */
static enum status warn(struct worker *w, const char *what_now) {
    if (w->log == NULL) {
        return STATUS_OK;
    }
    fail("%s; %s", error_message(), what_now);
    return metrics_log_warning(w->log, w->state.step, error_message());
}

/* A failure, which is the same on all ranks, ends the run if this is its last checkpoint. Else it goes on: what is full
   or away now may not be so at the next one. */
static enum status save(struct worker *w, bool last) {
    const struct options *o = w->options;
    double start = time_seconds();
    uint64_t bytes = 0;
    char path[PATH_BYTES];
    if (w->log != NULL) {
        CHECK(metrics_log_keep_hold(w->log)); /* another run's checkpoints are not this one's to remove */
    }
    enum status status = checkpoint_save(
        w->run->run_dir, w->optimizer, &w->state, w->options_json, w->tokenizer, path, sizeof path, &bytes);
    if (status == STATUS_ERROR && !last) {
        return warn(w, "the run goes on to the next checkpoint");
    }
    CHECK(status);
    memcpy(w->last_checkpoint, path, sizeof path);
    if (w->log == NULL) {
        return STATUS_OK;
    }
    CHECK(metrics_log_checkpoint(w->log, w->state.step, path, time_seconds() - start, bytes));
    status = checkpoint_prune(w->run->run_dir, w->state.step, o->keep, o->keep_every);
    return status == STATUS_ERROR ? warn(w, "it is tried again after the next checkpoint") : status;
}

/* ---- the loop ---- */

static bool due(int64_t step, int64_t every) {
    return every > 0 && step % every == 0;
}

static enum status report_profile(struct worker *w) {
    struct json_writer event;
    if (w->log == NULL) {
        return STATUS_OK;
    }
    metrics_begin_event(&event, "profile", w->state.step);
    profile_write_json(w->profile, &event);
    enum status status = metrics_end_event(w->log, &event);
    if (!w->options->quiet) {
        printf("\n");
        profile_print(w->profile, stdout);
        fflush(stdout);
    }
    return status;
}

/* A step, and with --profile what the profiler sees of it. */
static enum status profiled_step(struct worker *w) {
    enum { WARM_UP = 2 };
    int64_t done = w->state.step - w->start_step;
    bool measured = w->profile != NULL && done >= WARM_UP && done < WARM_UP + w->options->profile;
    if (measured) {
        CHECK(profile_begin_step(w->profile));
    }
    CHECK(train_step(w));
    if (measured) {
        CHECK(profile_end_step(w->profile));
        if (profile_steps(w->profile) == w->options->profile) {
            CHECK(report_profile(w));
        }
    }
    return STATUS_OK;
}

static enum status train(struct worker *w) {
    const struct options *o = w->options;
    w->start_seconds = time_seconds();
    w->start_step = w->state.step;
    while (w->state.step < o->steps) {
        launch_note_step(w->rank, w->state.step + 1);
        CHECK(profiled_step(w));
        int64_t step = w->state.step;
        bool last = step == o->steps;
        if (due(step, o->eval_every) || (last && o->eval_every > 0)) {
            enum status status = evaluate(w);
            CHECK(status == STATUS_ERROR ? warn(w, "the run goes on without this evaluation") : status);
        }
        if (due(step, o->sample_every) || (last && o->sample_every > 0)) {
            CHECK(sample(w));
        }
        /* all ranks stop in the same step */
        double stop = launch_signal_caught();
        CHECK(w->comm->host_all_reduce(w->comm, &stop, 1, COMM_MAX));
        if (due(step, o->checkpoint_every) || (last && o->checkpoint_every > 0) || stop > 0.0) {
            CHECK(save(w, last || stop > 0.0));
            CHECK(w->comm->barrier(w->comm)); /* no step waits while the first rank removes old ones */
        }
        if (stop > 0.0 && !last) {
            char text[PATH_BYTES + 128];
            snprintf(text, sizeof text,
                "%s: saved step %lld and stopped; continue with --resume --run-dir %s",
                stop == SIGINT   ? "SIGINT"
                : stop == SIGHUP ? "SIGHUP"
                                 : "SIGTERM",
                (long long)step, w->run->run_dir);
            return note(w, text);
        }
    }
    if (w->profile != NULL && profile_steps(w->profile) < o->profile) { /* the run was shorter */
        return profile_steps(w->profile) > 0
                   ? report_profile(w)
                   : note(w,
                         "--profile: no step was measured; it leaves out the first two, give more --steps");
    }
    return STATUS_OK;
}

/* ---- the run's folder ---- */

/* The name of the run's folder, the same on all ranks. */
static enum status name_run_dir(struct run *run) {
    const struct options *o = &run->options;
    if (o->run_dir[0] != '\0') {
        size_t length = strlen(o->run_dir);
        while (length > 1 && o->run_dir[length - 1] == '/') {
            length--;
        }
        if (length > LONGEST_RUN_DIR) {
            return fail(
                "--run-dir: a path of %zu bytes is too long, at most %d leave room for what goes into it",
                length, (int)LONGEST_RUN_DIR);
        }
        snprintf(run->run_dir, sizeof run->run_dir, "%.*s", (int)length, o->run_dir);
        return STATUS_OK;
    }
    if (run->place.ranks > 0) {
        return fail("--run-dir is missing: ranks started by %s need the name of the run's folder, one that "
                    "all machines share",
            run->place.launcher);
    }
    char stamp[32];
    time_t now = time(NULL);
    struct tm local;
    strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", localtime_r(&now, &local));
    snprintf(run->run_dir, sizeof run->run_dir, "runs/%s-%s", o->model, stamp);
    for (int n = 2; path_exists(run->run_dir); n++) { /* of another run that began in this second */
        snprintf(run->run_dir, sizeof run->run_dir, "runs/%s-%s-%d", o->model, stamp, n);
    }
    return STATUS_OK;
}

static bool goes_on(const struct run *run) {
    return run->options.resume || run->restarted;
}

/* A run that did no step has nothing that another one would lose. */
static enum status check_no_run_is_there(const struct run *run) {
    char log[PATH_BYTES], checkpoints[PATH_BYTES];
    CHECK(path_join(log, sizeof log, run->run_dir, "log.jsonl"));
    CHECK(path_join(checkpoints, sizeof checkpoints, run->run_dir, "checkpoints"));
    if (path_exists(checkpoints) || !metrics_log_is_before_first_step(log)) {
        return fail("--run-dir %s already holds a run: add --resume to continue it, or choose another folder",
            run->run_dir);
    }
    return STATUS_OK;
}

static enum status read_footprint(const char *run_dir, struct footprint *f) {
    char log[PATH_BYTES];
    struct stat info;
    CHECK(path_join(log, sizeof log, run_dir, "log.jsonl"));
    f->log_bytes = stat(log, &info) == 0 ? (int64_t)info.st_size : 0;
    return checkpoint_newest_step(run_dir, &f->newest_step);
}

/* Two that resume one run at once, or one that resumes it while it ends: the later must not go on from what was newest
   before. */
static enum status check_nothing_new_is_there(const struct run *run) {
    struct footprint now;
    CHECK(read_footprint(run->run_dir, &now));
    if (now.newest_step != run->found.newest_step || now.log_bytes != run->found.log_bytes) {
        return fail("--run-dir %s: another process went on with this run while this one began to; start "
                    "again once it has ended",
            run->run_dir);
    }
    return STATUS_OK;
}

/* The run's folder: made, writable, and no other run's. */
static enum status make_run_dir(const struct run *run) {
    char checkpoints[PATH_BYTES];
    CHECK(path_join(checkpoints, sizeof checkpoints, run->run_dir, "checkpoints"));
    if (!goes_on(run)) {
        CHECK(check_no_run_is_there(run));
    }
    if (make_directories(run->run_dir) != STATUS_OK) {
        return fail(
            "--run-dir %s: %s; give a folder that can be made and written", run->run_dir, error_message());
    }
    if (access(run->run_dir, W_OK | X_OK) != 0) {
        return fail("--run-dir %s cannot be written: %s", run->run_dir, strerror(errno));
    }
    if (path_exists(checkpoints) && access(checkpoints, W_OK | X_OK) != 0) {
        return fail("--run-dir %s: its checkpoints cannot be written: %s", run->run_dir, strerror(errno));
    }
    return STATUS_OK;
}

/* ---- a rank's set-up ---- */

static struct dataloader_options make_data_options(const struct run *run, bool training) {
    const struct options *o = &run->options;
    struct dataloader_options d;
    memset(&d, 0, sizeof d);
    d.pattern = training ? o->train_data : o->val_data;
    d.option = training ? "--train-data" : "--val-data";
    d.seq_len = (int)o->seq_len;
    d.micro_batch = (int)o->micro_batch;
    d.vocab_size = run->config.vocab_size;
    d.ranks = (int)o->ranks;
    d.seed = (uint64_t)o->seed;
    d.shuffle = training && o->shuffle;
    d.repeat = training;
    return d;
}

static enum status open_data(struct worker *w, struct dataloader **out, bool training) {
    struct dataloader_options d = make_data_options(w->run, training);
    d.rank = w->comm->rank;
    d.prefetch = true;
    return dataloader_open(out, &d);
}

static enum recompute recompute_level(const struct options *o) {
    for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
        if (strcmp(o->recompute, recompute_names[level]) == 0) {
            return (enum recompute)level;
        }
    }
    return RECOMPUTE_NONE;
}

static int zero_stage(const struct options *o) {
    return o->ranks == 1 ? 0 : o->zero < 0 ? 1 : (int)o->zero;
}

static enum dtype reduce_dtype(const struct options *o) {
    return strcmp(o->reduce_dtype, "bf16") == 0 ? DTYPE_BF16 : DTYPE_F32;
}

static struct model_options make_model_options(const struct run *run, const struct backend_profile *device) {
    const struct options *o = &run->options;
    struct model_options m;
    memset(&m, 0, sizeof m);
    m.config = run->config;
    m.micro_batch = (int)o->micro_batch;
    m.seq_len = (int)o->seq_len;
    m.recompute = recompute_level(o);
    m.gradient_dtype = strcmp(o->grad_dtype, "bf16") == 0 ? DTYPE_BF16 : device->gradient_dtype;
    m.logits_bytes = o->logits_mib << 20;
    m.ranks = (int)o->ranks;
    m.layer_gradients = zero_stage(o) == 2 ? ZERO2_LAYER_GRADIENTS : 0;
    return m;
}

static struct plan_options make_plan_options(
    const struct run *run, const struct backend_profile *device, uint64_t device_bytes) {
    struct plan_options p;
    memset(&p, 0, sizeof p);
    p.model = make_model_options(run, device);
    p.device = *device;
    p.zero_stage = zero_stage(&run->options);
    p.samples = run->options.sample_every > 0;
    p.reduce_dtype = reduce_dtype(&run->options);
    p.device_bytes = device_bytes;
    return p;
}

static enum status create_backend(
    struct backend **out, const struct run *run, int local_rank, int local_ranks) {
    const struct options *o = &run->options;
    if (run->cuda) {
        /* some launchers show each process its own GPU alone */
        int gpu = run->gpus == 1 ? 0 : local_rank;
        const char *attention = strcmp(o->attention, "auto") == 0
                                    ? backend_cuda_attention(gpu, model_head_dim(&run->config))
                                    : o->attention;
        return backend_cuda_create(out, gpu, attention, o->autotune);
    }
    int threads = (int)o->threads;
    if (threads == 0) {
        threads = (int)max_i64(sysconf(_SC_NPROCESSORS_ONLN) / local_ranks, 1);
    }
    return backend_cpu_create(out, threads);
}

static enum status create_model(struct worker *w) {
    const struct options *o = w->options;
    struct model_options m = make_model_options(w->run, &w->backend->profile);
    struct optimizer_options p;
    memset(&p, 0, sizeof p);
    p.zero_stage = zero_stage(o);
    p.reduce_dtype = reduce_dtype(o);
    p.adamw.beta1 = o->beta1;
    p.adamw.beta2 = o->beta2;
    p.adamw.epsilon = o->epsilon;
    p.adamw.weight_decay = o->weight_decay;
    p.clip = o->clip;
    p.stochastic_seed = o->stochastic_rounding ? (uint64_t)o->seed + 1 : 0;
    CHECK(model_create(&w->model, w->backend, &m));
    CHECK(optimizer_create(&w->optimizer, w->model, w->comm, &p));
    CHECK(ALLOCATE(w->inputs, o->micro_batch * o->seq_len));
    CHECK(ALLOCATE(w->targets, o->micro_batch * o->seq_len));
    bool samples = o->sample_every > 0 && w->comm->rank == 0;
    return samples ? decoder_create(&w->decoder, w->model, 1, (int)o->seq_len) : STATUS_OK;
}

static enum status load_weights(struct worker *w) {
    if (w->run->checkpoint[0] != '\0') {
        CHECK(checkpoint_load_weights(w->run->checkpoint, w->optimizer));
        CHECK(checkpoint_load_moments(w->run->checkpoint, w->optimizer));
        CHECK(optimizer_set_step(w->optimizer, w->state.optimizer_step));
        return dataloader_seek(w->train_data, w->state.data_position);
    }
    if (w->options->init_from[0] != '\0') {
        return checkpoint_load_weights(w->options->init_from, w->optimizer);
    }
    return optimizer_initialize(w->optimizer, (uint64_t)w->options->seed);
}

/* Disks that are too small are better known now than at the first checkpoint. A new one is written before an old one goes;
   those of a run that goes on are there already. */
static void note_disk_space(const struct worker *w) {
    struct statvfs disk;
    int64_t keep = w->options->keep;
    double copies = keep > 0 && w->run->checkpoint[0] == '\0' ? (double)keep + 1 : 1;
    double one = (double)checkpoint_bytes(w->model);
    if (w->options->dry_run || statvfs(w->run->run_dir, &disk) != 0 || disk.f_blocks == 0) {
        return;
    }
    double room = (double)disk.f_bavail * (double)disk.f_frsize;
    if (room < copies * one) {
        char size[32], there[32];
        format_bytes(size, sizeof size, (uint64_t)one);
        format_bytes(there, sizeof there, (uint64_t)room);
        log_line(
            "note     a checkpoint takes %s, %.0f of them are to fit, and the disk of %s has room for %s",
            size, copies, w->run->run_dir, there);
    }
}

static void print_summary(const struct worker *w) {
    const struct options *o = w->options;
    const struct model_config *c = &w->run->config;
    char parameters[32], tokens[32], batch[32], zero[32] = "";
    format_count(parameters, sizeof parameters, (double)model_get_layout(w->model)->parameters);
    format_count(batch, sizeof batch, (double)o->global_batch);
    log_line(
        "model    %s: %s parameters, %d layers, %d channels, %d heads of %d%s, %d positions, vocabulary %d",
        o->model, parameters, c->layers, c->channels, c->heads, model_head_dim(c),
        c->kv_heads == c->heads ? "" : " (grouped keys and values)", c->seq_len, c->vocab_size);
    char peak[64] = "peak unknown: no MFU (--peak-tflops sets it)";
    if (w->peak_tflops > 0.0) {
        snprintf(peak, sizeof peak, "peak %.0f TFLOP/s dense bf16", w->peak_tflops);
    }
    log_line("device   %d x %s, attention %s, %s", w->comm->ranks, w->backend->device_name,
        w->backend->profile.attention, peak);
    if (strcmp(o->train_data, "synthetic") == 0) {
        log_line("data     synthetic: random tokens");
    } else {
        format_count(tokens, sizeof tokens, (double)dataloader_tokens(w->train_data));
        log_line("data     %s: %s tokens in %d shard%s", o->train_data, tokens,
            dataloader_shards(w->train_data), dataloader_shards(w->train_data) == 1 ? "" : "s");
    }
    if (w->comm->ranks > 1) {
        snprintf(zero, sizeof zero, ", ZeRO %d", zero_stage(o));
    }
    log_line("batch    %s tokens a step: %lld micro-step%s of %d x %d tokens on %d rank%s%s", batch,
        (long long)w->micro_steps, w->micro_steps == 1 ? "" : "s", (int)o->micro_batch, (int)o->seq_len,
        w->comm->ranks, w->comm->ranks == 1 ? "" : "s", zero);
    if (w->run->run_dir[0] != '\0') {
        log_line("run      %s", w->run->run_dir);
        note_disk_space(w);
    }
    if (w->run->checkpoint[0] != '\0') {
        log_line("resume   %s: step %lld of %lld", w->run->checkpoint, (long long)w->state.step,
            (long long)o->steps);
        int64_t then = w->run->state.data_windows, now = dataloader_windows(w->train_data);
        if (then != now) {
            log_line("note     the training data had %lld sequences and has %lld now: their order is another",
                (long long)then, (long long)now);
        }
    }
}

/* A smaller vocabulary than the model's is fine: GPT-2's is often padded. */
static enum status open_tokenizer(struct worker *w) {
    const struct options *o = w->options;
    if (strcmp(o->tokenizer, "none") == 0) {
        return STATUS_OK;
    }
    CHECK(tokenizer_open(&w->tokenizer, o->tokenizer));
    int tokens = tokenizer_vocab_size(w->tokenizer);
    if (tokens > o->vocab_size) {
        return fail(
            "--tokenizer %s has %d tokens, more than --vocab-size %lld: raise it or take another tokenizer",
            o->tokenizer, tokens, (long long)o->vocab_size);
    }
    return STATUS_OK;
}

/* Over which the ranks' decisions go, and on the CPU all that they exchange. */
static enum status meet_ranks(struct worker *w, const struct launch_rank *rank) {
    const struct options *o = w->options;
    const struct launch_place *place = &w->run->place;
    if (rank->ranks == 1) {
        return comm_single_create(&w->ranks);
    }
    if (place->ranks == 0) {
        return comm_shared_create(&w->ranks, rank->shared, rank->rank, o->comm_timeout);
    }
    /* ranks that start again do so when they know of the loss, the last one when the timeout of all others is over */
    const double restart_seconds = GRACE_SECONDS + 10;
    double seconds = w->run->restarted ? 2 * o->comm_timeout + restart_seconds : o->comm_timeout;
    struct rendezvous_options meeting = {place->address, place->port, place->token, rank->rank, rank->ranks,
        seconds, launch_signal_caught, !o->quiet};
    return comm_tcp_create(&w->ranks, &meeting);
}

/* Every rank has the same number; else the error says what of `rank N` is other than rank 0's, and the remedy. */
static enum status check_same(struct worker *w, uint64_t own, const char *difference) {
    int other;
    CHECK(comm_find_other(w->ranks, &own, sizeof own, &other, NULL));
    return other == 0 ? STATUS_OK : fail("rank %d %s", other, difference);
}

/* All start from the same step, and from given weights or from none. A rank that was lost while the others finished a
   checkpoint looks for one a moment too early when it starts again: it finds this one when it does so once more. */
static enum status check_same_start(struct worker *w) {
    const struct run *run = w->run;
    struct start {
        int64_t step, weights_given;
    } own = {w->state.step, run->checkpoint[0] == '\0' && w->options->init_from[0] != '\0'}, pair[2];
    int other;
    CHECK(comm_find_other(w->ranks, &own, sizeof own, &other, pair));
    if (other == 0) {
        return STATUS_OK;
    }
    if (pair[0].step != pair[1].step) {
        return fail_as(run->restarted ? STATUS_PEER_LOST : STATUS_ERROR,
            "rank %d goes on from step %lld, rank 0 from step %lld: give --resume to all or none, and a "
            "--run-dir that all machines share",
            other, (long long)pair[1].step, (long long)pair[0].step);
    }
    bool given = pair[0].weights_given != 0;
    return fail("rank %d has %s --init-from, rank 0 has %s: give it to all or none", other,
        given ? "no" : "an", given ? "one" : "none");
}

/* What all ranks must have alike, as a JSON object: the options that a checkpoint keeps, and of the others those that
   change what ranks exchange. */
static enum status write_common_options(const struct worker *w, char **text, size_t *bytes) {
    const struct options *o = w->options;
    struct json_writer writer;
    json_writer_init(&writer, false);
    json_begin_object(&writer);
    options_write_json(o, &writer);
    json_string_member(&writer, "device", w->run->cuda ? "cuda" : "cpu");
    json_integer_member(&writer, "zero", zero_stage(o));
    json_string_member(&writer, "reduce-dtype", o->reduce_dtype);
    json_string_member(&writer, "grad-dtype", o->grad_dtype);
    json_bool_member(&writer, "stochastic-rounding", o->stochastic_rounding);
    json_bool_member(&writer, "deterministic", o->deterministic);
    json_integer_member(&writer, "comm-ctas", o->comm_ctas);
    json_bool_member(&writer, "dry-run", o->dry_run);
    json_end_object(&writer);
    return json_writer_finish(&writer, text, bytes);
}

/* Every rank has the same option, given as its JSON value; else the error has the values of rank 0 and of the first that has
   another. */
static enum status check_same_option(struct worker *w, const char *name, const struct json *value) {
    struct {
        uint64_t hash; /* of the whole */
        char text[120];
    } own, pair[2];
    struct json_writer writer;
    char *text = NULL;
    size_t bytes;
    int other;
    json_writer_init(&writer, false);
    json_value(&writer, value);
    CHECK(json_writer_finish(&writer, &text, &bytes));
    memset(&own, 0, sizeof own);
    own.hash = xxh64_of(text, bytes);
    snprintf(own.text, sizeof own.text, "--%s=%s", name, text);
    free(text);
    CHECK(comm_find_other(w->ranks, &own, sizeof own, &other, pair));
    return other == 0 ? STATUS_OK
                      : fail("rank %d has other options than rank 0: %s, not %s; start all with the same "
                             "command line and data",
                            other, pair[1].text, pair[0].text);
}

/* All of them at once, and one by one only if they differ. */
static enum status check_same_options(struct worker *w) {
    char *text = NULL;
    size_t bytes;
    struct json *options;
    CHECK(write_common_options(w, &text, &bytes));
    enum status status = check_same(w, xxh64_of(text, bytes), "has other options than rank 0");
    if (status == STATUS_ERROR && json_parse(&options, text, bytes, "options") == STATUS_OK) {
        for (size_t i = 0; i < options->count; i++) {
            status = check_same_option(w, options->keys[i], &options->items[i]);
            if (status != STATUS_OK) {
                break;
            }
        }
        json_free(options);
    }
    free(text);
    return status;
}

/* For the checkpoints and the log. */
static enum status keep_options(struct worker *w) {
    struct json_writer writer;
    json_writer_init(&writer, false);
    json_begin_object(&writer);
    options_write_json(w->options, &writer);
    json_end_object(&writer);
    return json_writer_finish(&writer, &w->options_json, NULL);
}

static enum status check_same_data(struct worker *w) {
    CHECK(check_same(w, dataloader_fingerprint(w->train_data),
        "finds other shards of --train-data than rank 0, by name or size: give all machines the same files"));
    return w->val_data == NULL
               ? STATUS_OK
               : check_same(w, dataloader_fingerprint(w->val_data),
                     "finds other shards of --val-data than rank 0, by name or size: give all machines the "
                     "same files");
}

/* What several ranks read of text: questions, and the tokenizer that makes tokens of them. */
static enum status check_same_text(struct worker *w) {
    const char *questions = w->options->multiple_choice;
    uint64_t digest = 0;
    if (questions[0] == '\0') {
        return STATUS_OK;
    }
    CHECK(comm_agree(w->ranks, xxh64_file(questions, &digest)));
    CHECK(check_same(w, digest,
        "finds other questions in --multiple-choice than rank 0: give all machines the same file"));
    return check_same(w, tokenizer_fingerprint(w->tokenizer),
        "finds another vocabulary in --tokenizer than rank 0: give all machines the same files");
}

/* A file of this rank's in the folder that the first rank has made. A network's file system may show it late. */
static enum status sign_in(const struct worker *w, const char *folder) {
    char path[PATH_BYTES], name[32];
    const double end = time_seconds() + fmin(w->options->comm_timeout / 2, 60);
    const struct timespec pause = {0, 100000000};
    snprintf(name, sizeof name, "rank-%d", w->ranks->rank);
    CHECK(path_join(path, sizeof path, folder, name));
    while (!path_exists(folder) && time_seconds() < end) {
        nanosleep(&pause, NULL);
    }
    return file_write_all(path, "", 0) == STATUS_OK
               ? STATUS_OK
               : fail("rank %d does not reach what rank 0 made in --run-dir (%s): give a folder that all "
                      "machines share and can write",
                     w->ranks->rank, error_message());
}

/* Else the first checkpoint, after hours maybe, would be the first to notice. */
static enum status check_run_dir_is_shared(struct worker *w) {
    char name[64], folder[PATH_BYTES];
    bool first = w->ranks->rank == 0;
    uint64_t *all = NULL, own;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    own = (uint64_t)now.tv_sec << 32 ^ (uint64_t)now.tv_nsec ^ (uint64_t)getpid() << 40;
    CHECK(ALLOCATE(all, w->ranks->ranks));
    enum status status = w->ranks->host_all_gather(w->ranks, all, &own, sizeof own);
    snprintf(name, sizeof name, ".start-%016llx", (unsigned long long)all[0]);
    free(all);
    CHECK(status);
    CHECK(path_join(folder, sizeof folder, w->run->run_dir, name));
    CHECK(comm_agree(w->ranks, first ? make_directories(folder) : STATUS_OK));
    status = comm_agree(w->ranks, first ? STATUS_OK : sign_in(w, folder));
    if (first) {
        remove_tree(folder); /* where that fails an empty folder stays */
    }
    return status;
}

/* Of ranks that the environment started the first makes the run's folder; those forked here found it made. */
static enum status make_shared_run_dir(struct worker *w) {
    if (w->run->place.ranks == 0 || w->options->dry_run) {
        return STATUS_OK;
    }
    CHECK(comm_agree(w->ranks, w->ranks->rank == 0 ? make_run_dir(w->run) : STATUS_OK));
    return check_run_dir_is_shared(w);
}

/* The device, and what moves data between those of several ranks. */
static enum status create_device(struct worker *w, const struct launch_rank *rank) {
    const struct options *o = w->options;
    CHECK(create_backend(&w->device, w->run, rank->local_rank, rank->local_ranks));
    if (rank->ranks == 1 || !w->run->cuda) {
        return STATUS_OK;
    }
    struct comm_nccl_options nccl = {o->comm_timeout, (int)o->comm_ctas, o->deterministic};
    return comm_nccl_create(&w->ranks, w->ranks, w->device, &nccl);
}

static enum status set_up(struct worker *w, const struct launch_rank *rank) {
    const struct run *run = w->run;
    const struct options *o = w->options;
    CHECK(meet_ranks(w, rank));
    CHECK(check_same_start(w));
    CHECK(check_same_options(w));
    CHECK(keep_options(w));
    CHECK(make_shared_run_dir(w));
    CHECK(create_device(w, rank));
    w->backend = w->device;
    w->comm = w->ranks;
    if (o->profile > 0) {
        CHECK(profile_create(&w->profile, w->device, &run->config));
        w->backend = profile_backend(w->profile);
        w->comm = profile_comm(w->profile, w->ranks);
    }
    w->peak_tflops = o->peak_tflops > 0.0 ? o->peak_tflops : w->backend->peak_tflops;
    w->micro_steps = o->global_batch / (o->ranks * o->micro_batch * o->seq_len);
    CHECK(open_data(w, &w->train_data, true));
    if (o->val_data[0] != '\0') {
        CHECK(open_data(w, &w->val_data, false));
    }
    CHECK(check_same_data(w));
    CHECK(open_tokenizer(w));
    CHECK(check_same_text(w));
    pace_init(&w->pace);
    w->state.data_windows = dataloader_windows(w->train_data);
    CHECK(create_model(w));
    CHECK(load_weights(w));
    if (!o->quiet && rank->rank == 0) {
        print_summary(w);
    }
    return STATUS_OK;
}

/* The log says what made its figures. */
static enum status log_start(struct worker *w) {
    struct json_writer event;
    metrics_begin_event(&event, "start", w->state.step);
    json_string_member(&event, "device", w->backend->device_name);
    json_string_member(&event, "attention", w->backend->profile.attention);
    json_integer_member(&event, "ranks", w->comm->ranks);
    json_number_member(&event, "peak_tflops", w->peak_tflops);
    json_integer_member(&event, "parameters", model_get_layout(w->model)->parameters);
    json_key(&event, "options");
    json_begin_object(&event);
    options_write_json(w->options, &event);
    json_end_object(&event);
    return metrics_end_event(w->log, &event);
}

static enum status open_log(struct worker *w) {
    char path[PATH_BYTES];
    if (w->comm->rank != 0) {
        return STATUS_OK;
    }
    const struct options *o = w->options;
    CHECK(path_join(path, sizeof path, w->run->run_dir, "log.jsonl"));
    CHECK(metrics_log_open(&w->log, path, o->quiet, (int)o->log_every));
    /* now nobody else writes there: is all as it was when this run looked? */
    CHECK(goes_on(w->run) ? check_nothing_new_is_there(w->run) : check_no_run_is_there(w->run));
    CHECK(metrics_log_cut(w->log, w->state.step));
    return log_start(w);
}

static void tear_down(struct worker *w) {
    free(w->options_json);
    free(w->targets);
    free(w->inputs);
    decoder_free(w->decoder);
    optimizer_free(w->optimizer);
    model_free(w->model);
    tokenizer_close(w->tokenizer);
    dataloader_close(w->val_data);
    dataloader_close(w->train_data);
    profile_free(w->profile);
    if (w->ranks != NULL) {
        w->ranks->free(w->ranks);
    }
    if (w->device != NULL) {
        w->device->free(w->device);
    }
}

static void print_end(const struct worker *w) {
    char duration[32];
    if (w->options->dry_run) {
        log_line("dry run  all is ready; nothing was trained or written");
        return;
    }
    if (w->state.step == w->start_step) {
        log_line("done     nothing to do: the run is at step %lld of %lld; a larger --steps goes on",
            (long long)w->state.step, (long long)w->options->steps);
        return;
    }
    format_duration(duration, sizeof duration, time_seconds() - w->start_seconds);
    log_line("done     step %lld of %lld in %s%s%s", (long long)w->state.step, (long long)w->options->steps,
        duration, w->last_checkpoint[0] != '\0' ? ", " : "", w->last_checkpoint);
}

static void print_error(enum status status, const struct worker *w) {
    struct backend *backend = w->device;
    if (status == STATUS_PEER_LOST) {
        launch_print_error("step %lld: %s", (long long)w->state.step + 1, error_message());
    } else {
        launch_print_error("%s", error_message());
    }
    if (status == STATUS_OUT_OF_MEMORY && backend != NULL) {
        uint64_t used, peak, total;
        backend->memory_usage(backend, &used, &peak, &total);
        struct plan plan;
        struct plan_options p = make_plan_options(w->run, &backend->profile, total);
        if (plan_make(&plan, &p) == STATUS_OK) {
            plan_print(stderr, &plan, &p);
        }
    }
}

static int rank_main(const struct launch_rank *rank, void *context) {
    const struct run *run = (const struct run *)context;
    struct worker worker;
    struct worker *w = &worker;
    memset(w, 0, sizeof *w);
    w->run = run;
    w->options = &run->options;
    w->rank = rank;
    w->state = run->state;
    launch_catch_signals();
    log_enable(rank->rank == 0);
    enum status status = set_up(w, rank);
    if (status == STATUS_OK && !run->options.dry_run) {
        status = open_log(w);
        if (status == STATUS_OK) {
            status = train(w);
        }
    }
    metrics_log_close(w->log); /* ends the progress line */
    w->log = NULL;
    if (status == STATUS_OK && !run->options.quiet) {
        print_end(w);
    }
    if (status != STATUS_OK) {
        if (launch_first_failure(rank)) { /* ranks that fail alike speak once */
            print_error(status, w);
        }
        comm_abort(w->ranks);
    }
    tear_down(w);
    return status == STATUS_OK || status == STATUS_PEER_LOST ? (int)status : STATUS_ERROR;
}

/* ---- before the ranks start ---- */

static void fresh_state(struct run_state *state) {
    memset(state, 0, sizeof *state);
    state->best_val_loss = NAN;
    state->last_val_loss = NAN;
}

static void notice(void *context, const char *line) {
    (void)context;
    log_line("%s", line);
}

/* An option the user gave must agree with what the weights at `path` have. */
static enum status check_agrees(
    const struct options *o, const char *name, int64_t wanted, int64_t there, const char *path) {
    if (options_given(o, name) && wanted != there) {
        return fail("--%s %lld: the weights in %s have %lld; leave the option out, or start a new run", name,
            (long long)wanted, path, (long long)there);
    }
    return STATUS_OK;
}

/* The shape comes from the weights that the run starts from. */
static enum status take_shape_from(struct run *run, const char *path) {
    struct options *o = &run->options;
    struct model_config c;
    CHECK(checkpoint_read_config(path, &c));
    run->config = c;
    CHECK(check_agrees(o, "layers", o->layers, c.layers, path));
    CHECK(check_agrees(o, "channels", o->channels, c.channels, path));
    CHECK(check_agrees(o, "heads", o->heads, c.heads, path));
    CHECK(check_agrees(o, "kv-heads", o->kv_heads, c.kv_heads, path));
    CHECK(check_agrees(o, "vocab-size", o->vocab_size, c.vocab_size, path));
    if (options_given(o, "model") &&
        (o->layers != c.layers || o->channels != c.channels || o->heads != c.heads)) {
        return fail(
            "--model %s: the model in %s is another, of %d layers, %d channels and %d heads; leave the "
            "option out",
            o->model, path, c.layers, c.channels, c.heads);
    }
    if (options_given(o, "seq-len") && o->seq_len > c.seq_len) {
        return fail("--seq-len %lld: the model in %s has %d positions; give at most these",
            (long long)o->seq_len, path, c.seq_len);
    }
    return STATUS_OK;
}

/* Shape and tokenizer of weights that a new run starts from, or that are used as they are. */
static enum status take_shape_of_start(struct run *run, const char *path) {
    struct options *o = &run->options;
    char checkpoints[PATH_BYTES], config[PATH_BYTES];
    CHECK(path_join(checkpoints, sizeof checkpoints, path, "checkpoints"));
    CHECK(path_join(config, sizeof config, path, "config.json"));
    if (path_is_directory(checkpoints)) {
        return fail("--init-from %s: is the folder of a run; give one of its checkpoints, those in %s", path,
            checkpoints);
    }
    if (!path_exists(config)) {
        return fail("--init-from %s: there is no config.json in it; give a checkpoint, or a GPT-2 folder of "
                    "Hugging Face's (data/download.sh gpt2 fetches one)",
            path);
    }
    CHECK(take_shape_from(run, path));
    if (options_take_shape(o, &run->config) != STATUS_OK) {
        return fail("%s: %s", path, error_message());
    }
    if (!options_given(o, "tokenizer") && tokenizer_is_in(path)) {
        char *copy = string_copy(path);
        if (copy == NULL) {
            return STATUS_OUT_OF_MEMORY;
        }
        free(o->tokenizer);
        o->tokenizer = copy;
    }
    return STATUS_OK;
}

/* What makes a run another one cannot be changed on the way: the model, and the order of its data. */
static enum status check_same_run(const struct options *o, const struct json *stored, const char *run_dir) {
    const char *model;
    int64_t seed;
    const struct json *shuffle = json_get(stored, "shuffle");
    CHECK(json_get_string(stored, "model", &model, run_dir));
    CHECK(json_get_integer(stored, "seed", 0, INT64_MAX, &seed, run_dir));
    if (options_given(o, "model") && strcmp(o->model, model) != 0) {
        return fail("--model %s: the run in %s is a %s; leave the option out, or start a new run", o->model,
            run_dir, model);
    }
    if (options_given(o, "seed") && o->seed != seed) {
        return fail("--seed %lld: the run in %s has %lld; leave the option out, or start a new run",
            (long long)o->seed, run_dir, (long long)seed);
    }
    if (options_given(o, "shuffle") && shuffle != NULL && o->shuffle != shuffle->boolean) {
        return fail(
            "--shuffle=%s: the run in %s has the other order; leave the option out, or start a new run",
            o->shuffle ? "true" : "false", run_dir);
    }
    return STATUS_OK;
}

/* With --resume: the newest valid checkpoint, its state and its options (under those given now). */
static enum status find_checkpoint(struct run *run, const char *run_dir, int argc, const char *const *argv) {
    struct options *o = &run->options;
    if (run_dir[0] == '\0') {
        return fail("--resume needs --run-dir: the folder of the run to continue");
    }
    CHECK(read_footprint(run_dir, &run->found));
    CHECK(checkpoint_find_newest(run_dir, run->checkpoint, sizeof run->checkpoint, notice, NULL));
    if (run->checkpoint[0] == '\0') {
        log_line("nothing to resume in %s: starting from step 0", run_dir);
        return STATUS_OK;
    }
    struct json *json;
    CHECK(checkpoint_read_state(run->checkpoint, &run->state, &json));
    const struct json *stored = json_get(json, "options");
    enum status status = check_same_run(o, stored, run_dir);
    if (status == STATUS_OK) {
        status = options_parse(o, argc, argv, stored);
    }
    if (status == STATUS_OK && options_given(o, "epochs") && !options_given(o, "steps")) {
        o->steps = 0; /* those of the checkpoint are of its epochs */
    }
    json_free(json);
    CHECK(status);
    return take_shape_from(run, run->checkpoint);
}

/* Counts GPUs in a child, so that this process can still fork ranks: CUDA does not survive a fork. */
static int count_gpus(void) {
    pid_t child = fork();
    if (child == 0) {
        _exit(backend_cuda_device_count());
    }
    int code = 0;
    return child > 0 && waitpid(child, &code, 0) == child && WIFEXITED(code) ? WEXITSTATUS(code) : 0;
}

static enum status choose_device(struct run *run) {
    const struct options *o = &run->options;
    if (strcmp(o->device, "cpu") == 0) {
        return STATUS_OK;
    }
    run->gpus = count_gpus();
    if (strcmp(o->device, "cuda") == 0 && run->gpus == 0) {
        return fail("--device cuda: no GPU found by this build; see `make config`, or use --device cpu");
    }
    run->cuda = run->gpus > 0;
    return STATUS_OK;
}

/* All GPUs, or as many of them as share the global batch evenly. */
static int64_t most_ranks(const struct run *run) {
    const struct options *o = &run->options;
    int64_t ranks = run->gpus;
    while (ranks > 1 && o->global_batch % (ranks * o->micro_batch * o->seq_len) != 0) {
        ranks--;
    }
    return ranks;
}

static enum status choose_ranks(struct run *run) {
    struct options *o = &run->options;
    const struct launch_place *place = &run->place;
    int64_t here = o->ranks;
    if (place->ranks > 0) {
        if (o->ranks != 0 && o->ranks != place->ranks) {
            return fail("--ranks %lld, but %s started %d: leave the option out", (long long)o->ranks,
                place->launcher, place->ranks);
        }
        o->ranks = place->ranks;
        here = place->local_ranks;
    } else if (o->ranks == 0) {
        o->ranks = run->cuda && comm_nccl_built() ? most_ranks(run) : 1;
        here = o->ranks;
    }
    /* one GPU in sight may be the one that a launcher gave this process */
    bool own_gpu = place->ranks > 0 && run->gpus == 1;
    if (run->cuda && here > run->gpus && !own_gpu) {
        return fail(
            "--ranks %lld: this machine has %d GPU%s; start at most so many on it (GPUS of scripts/run_*.sh)",
            (long long)here, run->gpus, run->gpus == 1 ? "" : "s");
    }
    return STATUS_OK;
}

/* The data is there and large enough; how many steps a pass over it takes. */
static enum status check_data(struct run *run) {
    struct options *o = &run->options;
    if (o->multiple_choice[0] != '\0') {
        CHECK(questions_check(o->multiple_choice));
    }
    for (int i = 0; i < 2; i++) {
        bool training = i == 0;
        struct dataloader_options d = make_data_options(run, training);
        struct dataloader *loader;
        if (d.pattern[0] == '\0') {
            continue;
        }
        CHECK(dataloader_open(&loader, &d));
        int64_t windows = dataloader_windows(loader);
        dataloader_close(loader);
        if (training && o->steps == 0) {
            if (strcmp(o->train_data, "synthetic") == 0) {
                return fail("--train-data synthetic has no epochs: give --steps");
            }
            double steps = ceil(o->epochs * (double)windows * (double)o->seq_len / (double)o->global_batch);
            o->steps = (int64_t)fmax(steps, 1.0);
        }
    }
    return STATUS_OK;
}

static void make_schedule(struct run *run) {
    const struct options *o = &run->options;
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++) {
        if (strcmp(o->schedule, schedule_names[kind]) == 0) {
            run->schedule.kind = (enum schedule_kind)kind;
        }
    }
    run->schedule.peak = o->learning_rate;
    run->schedule.final = o->final_learning_rate;
    run->schedule.warmup_steps = o->warmup_steps;
    run->schedule.decay_steps = o->decay_steps;
    run->schedule.total_steps = o->steps;
}

/* --plan: for the device that is there, or a named GPU. */
static enum status print_plan(struct run *run) {
    const struct options *o = &run->options;
    struct backend_profile device;
    uint64_t bytes = 0;
    if (o->gpu[0] != '\0') {
        const struct gpu_info *gpu = gpu_find_key(o->gpu);
        if (gpu == NULL) {
            return fail("--gpu %s is not known; see --help for the names", o->gpu);
        }
        bytes = (uint64_t)(gpu->memory_gib * 1024.0) << 20;
        int capability = atoi(gpu->architecture + strlen("sm_"));
        const char *best = attention_kernel_best(capability, model_head_dim(&run->config));
        bool choose = strcmp(o->attention, "auto") == 0 && best != NULL;
        CHECK(backend_profile_find(&device, "cuda", choose ? best : o->attention));
    } else {
        struct backend *backend;
        uint64_t used, peak;
        CHECK(create_backend(&backend, run, 0, (int)o->ranks));
        backend->memory_usage(backend, &used, &peak, &bytes);
        device = backend->profile;
        backend->free(backend);
        if (!run->cuda) {
            bytes /= (uint64_t)o->ranks; /* they share the machine's memory */
        }
    }
    struct plan plan;
    struct plan_options p = make_plan_options(run, &device, bytes);
    CHECK(plan_make(&plan, &p));
    plan_print(stdout, &plan, &p);
    return STATUS_OK;
}

/* ---- a trained model at use ---- */

/* Whose weights: those of --init-from, or of the newest checkpoint of --run-dir. */
static enum status find_model(struct run *run) {
    const struct options *o = &run->options;
    if ((o->init_from[0] == '\0') == (o->run_dir[0] == '\0')) {
        return fail(
            "--%s needs a model: give --init-from, a checkpoint or Hugging Face folder, or --run-dir, "
            "a run's folder, and not both",
            options_use(o));
    }
    if (o->init_from[0] != '\0') {
        snprintf(run->checkpoint, sizeof run->checkpoint, "%s", o->init_from);
    } else {
        CHECK(checkpoint_find_newest(o->run_dir, run->checkpoint, sizeof run->checkpoint, notice, NULL));
        if (run->checkpoint[0] == '\0') {
            return fail(
                "--run-dir %s: there is no checkpoint in it (the folder of a checkpoint itself is for "
                "--init-from)",
                o->run_dir);
        }
    }
    return take_shape_of_start(run, run->checkpoint);
}

static enum status use_model(const struct run *run) {
    struct backend *backend;
    CHECK(create_backend(&backend, run, 0, 1));
    enum status status = model_use(backend, run->checkpoint, &run->config, &run->options);
    backend->free(backend);
    return status;
}

/* ---- before the ranks start, in order ---- */

/* All that is wanted is told before anything starts. */
static bool only_tells(const struct options *o) {
    return o->help || o->plan || o->info[0] != '\0';
}

/* Everything before the ranks start. */
static enum status prepare(struct run *run, int argc, const char *const *argv) {
    struct options *o = &run->options;
    fresh_state(&run->state);
    run->checkpoint[0] = '\0';
    CHECK(options_parse(o, argc, argv, NULL));
    if (only_tells(o) || options_use(o) != NULL) {
        signal(SIGPIPE, SIG_DFL); /* when nobody reads it any more, nothing is left to do */
    }
    if (o->help) {
        options_print_help(stdout);
        return STATUS_OK;
    }
    if (o->info[0] != '\0') {
        return info_print(stdout, o->info);
    }
    run->config.layers = (int)o->layers;
    run->config.channels = (int)o->channels;
    run->config.heads = (int)o->heads;
    run->config.kv_heads = (int)o->kv_heads;
    run->config.seq_len = (int)o->seq_len;
    run->config.vocab_size = (int)o->vocab_size;
    if (o->resume || run->restarted) {
        CHECK(find_checkpoint(run, run->restarted ? run->run_dir : o->run_dir, argc, argv));
    }
    if (options_use(o) != NULL) {
        CHECK(find_model(run));
        CHECK(options_check(o));
        return o->export_to[0] != '\0' ? STATUS_OK : choose_device(run); /* the CPU keeps every bit */
    }
    if (run->checkpoint[0] == '\0' && o->init_from[0] != '\0') {
        CHECK(take_shape_of_start(run, o->init_from));
    }
    CHECK(options_check(o));
    if (!o->plan || o->gpu[0] == '\0') {
        CHECK(choose_device(run));
    }
    CHECK(choose_ranks(run));
    if (o->global_batch == 0) {
        o->global_batch = o->ranks * o->micro_batch * o->seq_len;
    }
    if (o->plan) {
        CHECK(options_check(o)); /* again: now the ranks are known */
        return run->place.rank == 0 ? print_plan(run) : STATUS_OK;
    }
    CHECK(check_data(run));
    CHECK(options_check(o)); /* again: now the steps are known, too */
    make_schedule(run);
    if (o->dry_run || run->restarted) {
        return STATUS_OK;
    }
    CHECK(name_run_dir(run));
    if (run->place.ranks == 0) {
        return make_run_dir(run);
    }
    /* the first rank makes it when all have met; what is there before is not theirs, whatever comes between */
    return goes_on(run) || run->run_dir[0] == '\0' ? STATUS_OK : check_no_run_is_there(run);
}

/* A rank that died or hung may be worth another try; an error it could name is not, nor a run that was asked to stop. */
static bool worth_a_restart(int code) {
    return launch_signal_caught() == 0 && (code == STATUS_PEER_LOST || code > 128);
}

/* OpenMP threads that spin while they wait for each other starve on a machine that has other work, and a step takes ten
   times as long. They read how to wait before main begins: so the program sets it and starts over, by its own path so
   that ps and killall know its name. */
static void make_openmp_wait_calmly(char **argv) {
    char program[PATH_BYTES];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length > 0 && getenv("OMP_WAIT_POLICY") == NULL && setenv("OMP_WAIT_POLICY", "passive", 1) == 0) {
        program[length] = '\0';
        execv(program, argv); /* where this is not possible, all goes on as it is */
    }
}

/* Where stdin, stdout or stderr is closed, the next file that is opened would take its place, and lines meant for the
   terminal would end up in it. */
static void fill_standard_files(void) {
    int file;
    do {
        file = open("/dev/null", O_RDWR);
    } while (file >= 0 && file <= STDERR_FILENO);
    if (file >= 0) {
        close(file);
    }
}

static int end_of_output(enum status status) {
    if (status == STATUS_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        status = fail("standard output cannot be written: is the disk full?");
    }
    if (status != STATUS_OK) {
        launch_print_error("%s", error_message());
    }
    return status == STATUS_OK ? 0 : 1;
}

int main(int argc, char **argv) {
    static struct run run; /* zeroed; too large for comfort on the stack */
    fill_standard_files();
    signal(SIGPIPE, SIG_IGN); /* what nobody reads any more (`| head -1`) is lost, and the run goes on */
    signal(SIGXFSZ, SIG_IGN); /* a limit on the size of files is like a full disk */
    make_openmp_wait_calmly(argv);
    int code = 0;
    if (launch_read_environment(&run.place) != STATUS_OK) {
        launch_print_error("%s", error_message());
        return 1;
    }
    log_enable(run.place.rank == 0);
    for (int restarts = 0;; restarts++) {
        run.restarted = restarts > 0;
        if (prepare(&run, argc, (const char *const *)argv) != STATUS_OK) {
            launch_print_error("%s", error_message());
            code = 1;
            break;
        }
        if (only_tells(&run.options) || options_use(&run.options) != NULL) {
            code = end_of_output(only_tells(&run.options) ? STATUS_OK : use_model(&run));
            break;
        }
        bool supervised = run.options.max_restarts > 0;
        code = run.place.ranks > 0 ? launch_placed(&run.place, supervised, run.options.comm_timeout,
                                         GRACE_SECONDS, rank_main, &run)
                                   : launch_local((int)run.options.ranks, supervised, (size_t)4 << 20,
                                         GRACE_SECONDS, rank_main, &run);
        if (!worth_a_restart(code) || restarts == run.options.max_restarts || run.options.dry_run) {
            break;
        }
        launch_print_error("restart %d of %d", restarts + 1, (int)run.options.max_restarts);
    }
    options_free(&run.options);
    return code;
}
