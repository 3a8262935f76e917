/* What a run tells: FLOPs, the progress line, log.jsonl, figures as people read them. */
#ifndef LLMC_METRICS_H
#define LLMC_METRICS_H

#include "json.h"

#ifdef __cplusplus
extern "C" {
#endif

/* FLOPs of training one token by the Megatron formula of the FlashAttention-2 paper, 6 P + 12 L C S (per sequence
   6 S P + 12 L C S^2), attention not halved for the causal mask; and with it halved. */
double flops_per_token(int64_t parameters, int layers, int channels, int seq_len);
double flops_per_token_causal(int64_t parameters, int layers, int channels, int seq_len);

/* One step as people see it. */
struct step_metrics {
    int64_t step, total_steps; /* 1-based: steps done */
    double loss, norm, learning_rate;
    double milliseconds; /* of this step */
    double tokens_per_second;
    int ranks;                                 /* that tokens_per_second is of, all together */
    double tflops, tflops_causal;              /* per rank */
    double mfu;                                /* of tflops, fraction of the peak; negative: peak unknown */
    uint64_t memory_bytes, memory_total_bytes; /* peak used, device; total 0: unknown */
    double eta_seconds;
    double data_wait_milliseconds;
    bool skipped;
    const char *skip_reason; /* of spikes.h; NULL if applied */
    int64_t tokens_seen, epoch;
};

/* The step as a line of at most `columns` terminal columns, with a bar, less important figures left out where there is
   no room; columns 0: all figures, no bar, widths that line up with other steps'. utf8: the bar may be drawn so. */
void format_step(char *out, size_t size, const struct step_metrics *step, int columns, bool utf8);

/* Shows the run on stdout and keeps it in log.jsonl. On a terminal the progress line stays at the bottom, redrawn in
   place, and everything else scrolls above it; elsewhere there is a plain line every so many steps. A line that would
   have to wait, since nobody reads just now, is not shown. The file has an object a line, each with "type" ("start",
   "step", "eval", "multiple_choice", "sample", "checkpoint", "profile", "note"), "step" and "time" (Unix seconds),
   written at once. Only the first rank has one. What cannot be written (the disk is full) is an error for the first
   line; later ones are lost with one warning until there is room again, and none is torn. A log that was removed or
   replaced is begun again. */
struct metrics_log;
/* path: of log.jsonl, appended to; NULL: none. print_every: steps between plain lines. What is in it stays: to be cut. */
enum status metrics_log_open(struct metrics_log **out, const char *path, bool quiet, int print_every);
/* Before a run goes on: lines from the first of a step after `resume_step` on are cut off (-1: none), so that a step stands
   once in the log; and so is a last line that a killed run left torn. */
enum status metrics_log_cut(const struct metrics_log *log, int64_t resume_step);
void metrics_log_close(struct metrics_log *log); /* NULL is allowed */
/* Is there no log at `path`, or is it one of a run that ended before its first step was done? Such a run is in nobody's way:
   another one goes on in its log. */
bool metrics_log_is_before_first_step(const char *path);
enum status metrics_log_step(struct metrics_log *log, const struct step_metrics *step);
enum status metrics_log_eval(
    struct metrics_log *log, int64_t step, double loss, int64_t tokens, double seconds);
enum status metrics_log_choices(struct metrics_log *log, int64_t step, int64_t questions, int64_t correct,
    int64_t correct_normalised, double seconds);
enum status metrics_log_sample(struct metrics_log *log, int64_t step, const char *text, size_t bytes);
enum status metrics_log_checkpoint(
    struct metrics_log *log, int64_t step, const char *path, double seconds, uint64_t bytes);
/* A notice to the person at the terminal; a warning goes to stderr, also in a quiet run. */
enum status metrics_log_note(struct metrics_log *log, int64_t step, const char *text);
enum status metrics_log_warning(struct metrics_log *log, int64_t step, const char *text);
/* Is log.jsonl still this run's? Opens it again where it was removed; an error says that another run writes there. */
enum status metrics_log_keep_hold(struct metrics_log *log);
/* An event of the caller's own, to the file only: begin opens the object and writes what every event has, the caller adds
   members, end closes it, appends the line and frees the text. */
void metrics_begin_event(struct json_writer *w, const char *type, int64_t step);
enum status metrics_end_event(struct metrics_log *log, struct json_writer *w);

/* An evaluation in words, as they stand in the run's lines. */
void format_loss(char *out, size_t size, double loss, int64_t tokens, double seconds);
void format_choices(
    char *out, size_t size, int64_t questions, int64_t correct, int64_t correct_normalised, double seconds);
/* "1.32B", "124M", "12.4k", "257"; "1.21 GiB"; "2d07h", "2h03m", "2m05s", "41s", "-" for no time. Into out. */
void format_count(char *out, size_t size, double value);
void format_bytes(char *out, size_t size, uint64_t bytes);
void format_duration(char *out, size_t size, double seconds);

#ifdef __cplusplus
}
#endif

#endif
