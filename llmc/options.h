/* All options of the program: one table (options_table.c) drives the command line, the config file, --help, validation
   and what a checkpoint keeps.

   A value comes from the last of: its default, the checkpoint that a run resumes, the config file, the command line.
   Then the preset that --model names fills what is still 0 of the model's shape, micro-batch and learning rate. */
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include "json.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { OPTIONS_MAX = 80 };

/* Strings are owned by the struct, never NULL. 0 in a field marked "0: ..." means what it says. */
struct options {
    /* run */
    char *run_dir; /* --run-dir: "" = runs/<model>-<date>-<time> */
    bool resume; /* --resume: continue the newest valid checkpoint in --run-dir, or start if there is none */
    char *init_from; /* --init-from: checkpoint folder whose weights to start from; "" = random */
    char *config;    /* --config: the last one read */
    bool dry_run;    /* --dry-run: everything up to the first step, then stop */
    bool plan;       /* --plan: print the memory plan and stop */
    char *gpu;       /* --gpu: plan for this GPU; "" = the one that is there */
    bool quiet;      /* --quiet */
    char *generate;  /* --generate: go on with this text and stop; "-" = stdin; see options_given */
    char *info;      /* --info: tell what is there and stop; "" = do not */
    char *export_to; /* --export: write the model there as Hugging Face reads it, and stop; "" = do not */
    bool evaluate;   /* --evaluate: measure the model on --val-data and --multiple-choice, and stop */
    int64_t seed;    /* --seed: initialisation, data order and samples */
    /* model; after options_parse no field is 0 */
    char *model;                     /* --model: a preset */
    int64_t layers, channels, heads; /* 0: the preset's */
    int64_t kv_heads;                /* 0: heads */
    int64_t seq_len, vocab_size;     /* 0: the preset's */
    /* batch and length */
    int64_t micro_batch;  /* sequences per rank and micro-step; 0: the preset's */
    int64_t global_batch; /* tokens per step over all ranks; 0: ranks * micro_batch * seq_len */
    int64_t steps;        /* 0: from epochs */
    double epochs;        /* passes over the training data, when steps is 0 */
    /* optimizer */
    double learning_rate;              /* the peak; 0: the preset's */
    char *schedule;                    /* cosine linear constant wsd */
    int64_t warmup_steps, decay_steps; /* -1: struct schedule's own */
    double final_learning_rate;        /* fraction of the peak at the end */
    double beta1, beta2, epsilon, weight_decay;
    double clip;                               /* 0: none */
    int64_t max_skipped;                       /* stop after so many skipped steps in a row; 0: never */
    double skip_loss_zscore, skip_norm_zscore; /* 0: off */
    /* data */
    char *train_data, *val_data; /* "synthetic" or a glob; val "" = none */
    bool shuffle;
    char *tokenizer; /* "bytes", "none" or a path ("auto" before the preset is known) */
    /* evaluation, samples, checkpoints */
    int64_t eval_every;   /* steps; 0: off */
    int64_t eval_batches; /* global batches of validation data; 0: all of it */
    int64_t sample_every; /* steps; 0: off */
    int64_t sample_tokens;
    char *sample_prompt;
    double sample_temperature;
    int64_t sample_top_k;                           /* 0: all tokens */
    double sample_top_p, sample_repetition_penalty; /* 1: off */
    int64_t samples;                                /* texts that --generate makes at once */
    char *multiple_choice;                          /* JSON lines; "" = none */
    int64_t checkpoint_every;                       /* steps; 0: off */
    int64_t keep;                                   /* newest checkpoints to keep; 0: all */
    int64_t keep_every;                             /* steps of checkpoints kept for good; 0: none */
    int64_t log_every;                              /* plain progress lines every so many steps */
    /* device */
    char *device;             /* auto cpu cuda */
    int64_t threads;          /* CPU threads a rank; 0: cores / ranks */
    int64_t ranks;            /* 0: the program chooses */
    int64_t zero;             /* 0, 1 or 2; -1: 1 when there are several ranks */
    char *reduce_dtype;       /* fp32 bf16 */
    int64_t comm_ctas;        /* 0: NCCL's choice */
    bool deterministic;       /* NCCL's algorithm */
    char *recompute;          /* none gelu layernorm block */
    char *grad_dtype;         /* fp32 bf16 (CUDA) */
    bool autotune;            /* of matrix products */
    bool stochastic_rounding; /* of bf16 parameters */
    char *attention;          /* auto, or a kernel of attention/ */
    int64_t logits_mib;       /* most memory that a chunk of logits takes */
    int64_t profile;          /* steps to measure; 0: none */
    double peak_tflops;       /* 0: from the table */
    double comm_timeout;      /* seconds */
    int64_t max_restarts;     /* of a run whose rank died */
    bool help;

    bool given[OPTIONS_MAX]; /* set by the user; see options_given */
};

/* The defaults. options_free afterwards, whatever fails. */
enum status options_init(struct options *options);
void options_free(struct options *options);
/* Of initialised options, or zeros: the command line (argv[0] is skipped) over the --config files in it over `stored` (a
   checkpoint's options; may be NULL) over the defaults, whatever *options held before; then the preset. An unknown option
   is answered with the nearest name. --help or -h anywhere sets options->help and nothing else. */
enum status options_parse(
    struct options *options, int argc, const char *const *argv, const struct json *stored);
/* `key = value` lines, # comments; `name` for messages ("name:line: ..."). Part of options_parse; exposed for tests. */
enum status options_parse_config(struct options *options, const char *text, size_t bytes, const char *name);
/* For weights that the user starts from: their shape, the preset that has it (if one does and --model was not given), and
   that preset's values for what the user left open. */
enum status options_take_shape(struct options *options, const struct model_config *shape);
/* Of parsed options: every value in its range and the relations that need no file: heads divide channels, kv_heads
   divide heads, the global batch is a multiple of ranks * micro_batch * seq_len, ... One line names option and remedy.
   options->ranks 0 counts as 1: check again when it is known. */
enum status options_check(const struct options *options);
/* The option that asks for the use of a trained model instead of training: "generate", "evaluate" or "export"; NULL: none
   does. */
const char *options_use(const struct options *options);
/* Did the user set it, on the command line or in a config file? By the long name without dashes: "seq-len". */
bool options_given(const struct options *options, const char *name);
/* What a checkpoint keeps, as members of the writer's open object; options_parse's `stored` reads it back. */
void options_write_json(const struct options *options, struct json_writer *w);
void options_print_help(FILE *out);

#ifdef __cplusplus
}
#endif

#endif
