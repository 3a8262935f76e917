/* All options of the program: one table drives the command line, the config file, --help, validation and what a
   checkpoint keeps. */
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include "json.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Strings are owned by the struct. 0 in a field marked "0: ..." means what it says. */
struct options {
    /* run */
    char *run_dir; /* --run-dir: "" = runs/<model>-<date>-<time> */
    bool resume; /* --resume: continue the newest valid checkpoint in --run-dir, or start if there is none */
    char *init_from; /* --init-from: checkpoint folder whose weights to start from; "" = random */
    char *config;    /* --config */
    bool dry_run;    /* --dry-run: everything up to the first step, then stop */
    bool plan;       /* --plan: print the memory plan and stop */
    char *gpu;       /* --gpu: plan for this GPU; "" = the one that is there */
    bool quiet;      /* --quiet */
    int64_t seed;    /* --seed: initialisation, data order and samples */
    /* model */
    char *model;                                                    /* --model: a preset */
    int64_t layers, channels, heads, kv_heads, seq_len, vocab_size; /* 0: the preset's */
    /* batch and length */
    int64_t micro_batch; /* --micro-batch: sequences per rank and micro-step; 0: the preset's */
    int64_t
        global_batch; /* --global-batch: tokens per step over all ranks; 0: ranks * micro_batch * seq_len */
    int64_t steps;    /* --steps; 0: from --epochs */
    double epochs;    /* --epochs: passes over the training data, when --steps is 0 */
    /* optimizer */
    double learning_rate; /* --learning-rate; 0: the preset's */
    char *schedule;       /* --schedule: cosine linear constant wsd */
    int64_t warmup_steps, decay_steps;
    double final_learning_rate; /* --final-learning-rate: fraction of the peak at the end */
    double beta1, beta2, epsilon, weight_decay, clip;
    int64_t max_skipped; /* --max-skipped: stop after so many skipped steps in a row; 0: never */
    double skip_loss_zscore, skip_norm_zscore; /* 0: off */
    /* data */
    char *train_data, *val_data; /* "synthetic" or a glob; val "" = none */
    bool shuffle;
    char *tokenizer; /* --tokenizer: "bytes", "none" */
    /* evaluation, samples, checkpoints */
    int64_t eval_every, eval_batches; /* steps (0: off); micro-batches over all ranks (0: all) */
    int64_t sample_every, sample_tokens;
    char *sample_prompt;
    double sample_temperature;
    int64_t checkpoint_every, keep,
        keep_every;    /* steps; newest to keep (0: all); steps of those kept for good */
    int64_t log_every; /* plain progress lines every so many steps */
    /* device */
    char *device;         /* --device: auto cpu cuda */
    int64_t threads;      /* CPU threads a rank; 0: cores / ranks */
    int64_t ranks;        /* --ranks */
    int64_t zero;         /* --zero: 0 or 1; -1: 1 when there are several ranks */
    char *recompute;      /* none gelu layernorm block */
    char *grad_dtype;     /* --grad-dtype: fp32 bf16 (CUDA) */
    char *attention;      /* --attention */
    int64_t logits_mib;   /* --logits-mib: most memory a chunk of logits takes */
    double peak_tflops;   /* 0: from the table */
    double comm_timeout;  /* seconds */
    int64_t max_restarts; /* --max-restarts */
    bool help;
};

/* Defaults, then for each source in turn: options_parse. Later sources win. */
enum status options_init(struct options *options);
void options_free(struct options *options);
/* The command line: --config files are read first, then the rest of the line over them, then the preset fills every
   field the user left at 0. `stored` (may be NULL): a checkpoint's options, taken under the config file. Unknown options
   name the nearest one. --help sets options->help. */
enum status options_parse(
    struct options *options, int argc, const char *const *argv, const struct json *stored);
/* `key = value` lines, # comments; `name` for messages ("file:line: ..."). Exposed for the fuzzer. */
enum status options_parse_config(struct options *options, const char *text, size_t bytes, const char *name);
/* Every value in its range, choices known, relations that need no file: heads divide channels, kv_heads divide heads,
   global batch a multiple of ranks * micro_batch * seq_len, ... The message names the option and the remedy. */
enum status options_check(const struct options *options);
/* Did the user set it (command line or config file)? By the long name without dashes: "seq-len". */
bool options_given(const struct options *options, const char *name);
/* All options that a checkpoint keeps, as members of the writer's open object; read back by options_parse's stored. */
void options_write_json(const struct options *options, struct json_writer *w);
void options_print_help(FILE *out);

/* Presets: name, layers, channels, heads, seq_len, vocab_size, learning rate, micro-batch. */
struct preset {
    const char *name;
    int layers, channels, heads, kv_heads, seq_len, vocab_size, micro_batch;
    double learning_rate;
    const char *note; /* for --help */
};
const struct preset *preset_find(const char *name); /* NULL: unknown */
const struct preset *preset_table(int *count);

#ifdef __cplusplus
}
#endif

#endif
