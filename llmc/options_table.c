/* All options. A row says how an option is called, where its value lies in struct options, what it may be, and what a
   person should know about it. */
#include "options_table.h"

#define AT(field) offsetof(struct options, field)
#define SWITCH_OF(field, standard_) .type = SWITCH, .offset = AT(field), .standard = (standard_)
#define INTEGER_OF(field, standard_, least_, most_)                                                          \
    .type = INTEGER, .offset = AT(field), .standard = (standard_), .least = (least_), .most = (most_)
#define NUMBER_OF(field, standard_, least_, most_)                                                           \
    .type = NUMBER, .offset = AT(field), .standard = (standard_), .least = (least_), .most = (most_)
#define TEXT_OF(field, text_) .type = TEXT, .offset = AT(field), .text = (text_)
#define CHOICE_OF(field, text_, choices_)                                                                    \
    .type = CHOICE, .offset = AT(field), .text = (text_), .choices = (choices_), .unit = "NAME"

const struct option option_table[] = {
    {"config", RUN, false, TEXT_OF(config, ""), .unit = "FILE", .shown = "none",
        .help = "read options from a file of \"name = value\" lines; the command line wins over it"},
    {"run-dir", RUN, false, TEXT_OF(run_dir, ""), .unit = "FOLDER", .shown = "runs/<model>-<date>-<time>",
        .help = "where the log and the checkpoints go"},
    {"resume", RUN, false, SWITCH_OF(resume, 0),
        .help = "continue from the newest valid checkpoint in --run-dir, or start if there is none"},
    {"init-from", RUN, false, TEXT_OF(init_from, ""), .unit = "FOLDER", .shown = "random weights",
        .help = "start a new run with the weights of this checkpoint or Hugging Face folder"},
    {"seed", RUN, true, INTEGER_OF(seed, 1337, 0, NO_LIMIT), .unit = "N",
        .help = "of initial weights, data order and samples"},
    {"plan", RUN, false, SWITCH_OF(plan, 0),
        .help = "print what the run would take of memory, buffer by buffer, and stop"},
    {"gpu", RUN, false, TEXT_OF(gpu, ""), .unit = "NAME", .shown = "the one that is there",
        .help = "make the plan for this GPU; names are below"},
    {"dry-run", RUN, false, SWITCH_OF(dry_run, 0), .help = "do everything up to the first step, then stop"},
    {"quiet", RUN, false, SWITCH_OF(quiet, 0), .help = "print no progress; log.jsonl has everything"},
    {"help", RUN, false, SWITCH_OF(help, 0), .help = "print this text and stop; also -h"},

    {"generate", USE, false, TEXT_OF(generate, ""), .unit = "TEXT", .shown = "none",
        .help = "go on with this text (- reads it from standard input), as --sample-... say, with the model "
                "of --init-from or the newest of --run-dir"},
    {"samples", USE, false, INTEGER_OF(samples, 1, 1, 4096), .unit = "N",
        .help = "texts that --generate makes at once"},
    {"evaluate", USE, false, SWITCH_OF(evaluate, 0),
        .help = "measure such a model on --val-data, --multiple-choice or both"},
    {"export", USE, false, TEXT_OF(export_to, ""), .unit = "FOLDER", .shown = "none",
        .help = "write such a model, in fp32, and its tokenizer as Hugging Face reads them"},
    {"info", USE, false, TEXT_OF(info, ""), .unit = "PATH", .shown = "none",
        .help = "tell what a run, checkpoint, model, shard or tokenizer is"},

    {"model", MODEL, true, TEXT_OF(model, "tiny"), .unit = "PRESET",
        .help = "sizes by name, from the table below; the options that follow change one each"},
    {"layers", MODEL, true, INTEGER_OF(layers, 0, 0, 1024), .unit = "N", .shown = "the preset's",
        .help = "transformer blocks"},
    {"channels", MODEL, true, INTEGER_OF(channels, 0, 0, 65536), .unit = "N", .shown = "the preset's",
        .help = "width of the residual stream, a multiple of --heads"},
    {"heads", MODEL, true, INTEGER_OF(heads, 0, 0, 1024), .unit = "N", .shown = "the preset's",
        .help = "query heads of attention"},
    {"kv-heads", MODEL, true, INTEGER_OF(kv_heads, 0, 0, 1024), .unit = "N", .shown = "as many as --heads",
        .help = "key and value heads; fewer than --heads is grouped-query attention"},
    {"seq-len", MODEL, true, INTEGER_OF(seq_len, 0, 0, 1048576), .unit = "TOKENS", .shown = "the preset's",
        .help = "length of a training sequence"},
    {"vocab-size", MODEL, true, INTEGER_OF(vocab_size, 0, 0, 65536), .unit = "N", .shown = "the preset's",
        .help = "different tokens: 257 for bytes, 50257 for GPT-2's"},

    {"micro-batch", BATCH, true, INTEGER_OF(micro_batch, 0, 0, 65536), .unit = "SEQUENCES",
        .shown = "the preset's, as many tokens at another --seq-len",
        .help = "sequences that a rank takes at once; memory grows with it, results do not depend on it"},
    {"global-batch", BATCH, true, INTEGER_OF(global_batch, 0, 0, NO_LIMIT), .unit = "TOKENS",
        .shown = "one micro-batch of every rank",
        .help = "tokens of an optimizer step over all ranks, accumulated from micro-batches"},
    {"steps", BATCH, true, INTEGER_OF(steps, 0, 0, NO_LIMIT), .unit = "STEPS", .shown = "as --epochs says",
        .help = "optimizer steps of the whole run"},
    {"epochs", BATCH, true, NUMBER_OF(epochs, 1, 1e-6, 1e6), .unit = "X",
        .help = "passes over the training data, where --steps is 0"},

    {"learning-rate", OPTIMIZER, true, NUMBER_OF(learning_rate, 0, 0, 100), .unit = "X",
        .shown = "the preset's", .help = "the highest, after the warm-up"},
    {"schedule", OPTIMIZER, true, CHOICE_OF(schedule, "cosine", "cosine linear constant wsd"),
        .help = "how the learning rate goes down after the warm-up; wsd stays up until --decay-steps "
                "before the end"},
    {"warmup-steps", OPTIMIZER, true, INTEGER_OF(warmup_steps, -1, -1, NO_LIMIT), .unit = "STEPS",
        .shown = "-1: 2% of all steps",
        .help = "the learning rate rises linearly over so many steps; 0: none"},
    {"decay-steps", OPTIMIZER, true, INTEGER_OF(decay_steps, -1, -1, NO_LIMIT), .unit = "STEPS",
        .shown = "-1: 20% of all steps", .help = "length of the linear decay at the end of schedule wsd"},
    {"final-learning-rate", OPTIMIZER, true, NUMBER_OF(final_learning_rate, 0.1, 0, 1), .unit = "FRACTION",
        .help = "of the highest, in the last step"},
    {"beta1", OPTIMIZER, true, NUMBER_OF(beta1, 0.9, 0, 0.999999), .unit = "X",
        .help = "decay of the gradient's mean"},
    {"beta2", OPTIMIZER, true, NUMBER_OF(beta2, 0.95, 0, 0.999999), .unit = "X",
        .help = "decay of the squared gradient's mean"},
    {"epsilon", OPTIMIZER, true, NUMBER_OF(epsilon, 1e-8, 1e-20, 1), .unit = "X",
        .help = "added to the root of the squared gradient's mean"},
    {"weight-decay", OPTIMIZER, true, NUMBER_OF(weight_decay, 0.1, 0, 10), .unit = "X",
        .help = "of matrices and embeddings; biases and layernorms do not decay"},
    {"clip", OPTIMIZER, true, NUMBER_OF(clip, 1, 0, 1e9), .unit = "NORM",
        .help = "longer gradients are scaled down to this norm; 0: off"},
    {"max-skipped", OPTIMIZER, true, INTEGER_OF(max_skipped, 20, 0, NO_LIMIT), .unit = "STEPS",
        .help = "stop after so many skipped steps in a row (a step whose loss or gradient is not finite is "
                "always skipped); 0: never stop"},
    {"skip-loss-zscore", OPTIMIZER, true, NUMBER_OF(skip_loss_zscore, 0, 0, 1e6), .unit = "SIGMAS",
        .help = "skip steps whose loss is so far above that of the last 128 steps; 0: off"},
    {"skip-norm-zscore", OPTIMIZER, true, NUMBER_OF(skip_norm_zscore, 0, 0, 1e6), .unit = "SIGMAS",
        .help = "the same for the gradient's norm; 0: off"},

    {"train-data", DATA, true, TEXT_OF(train_data, ""), .unit = "GLOB", .shown = "must be given",
        .help = "shards of tokens as build/prepare writes them, in quotes: 'data/tokens/train*.bin'; or "
                "synthetic: random tokens, to measure speed"},
    {"val-data", DATA, true, TEXT_OF(val_data, ""), .unit = "GLOB", .shown = "no validation",
        .help = "the same for validation"},
    {"shuffle", DATA, true, SWITCH_OF(shuffle, 1), .help = "visit sequences in another order every epoch"},
    {"tokenizer", DATA, true, TEXT_OF(tokenizer, "auto"), .unit = "NAME",
        .help = "turns samples into text: bytes, or the path of GPT-2's vocab.json and merges.txt, of "
                "tokenizer.json or of a tiktoken rank file; none; auto: bytes for a vocabulary of 257, else "
                "the files in --init-from, else none"},

    {"eval-every", OUTPUT, true, INTEGER_OF(eval_every, 250, 0, NO_LIMIT), .unit = "STEPS",
        .help = "how often the loss on --val-data and the score of --multiple-choice are measured; 0: off"},
    {"eval-batches", OUTPUT, true, INTEGER_OF(eval_batches, 20, 0, 1e6), .unit = "N",
        .help = "an evaluation takes so many global batches of --val-data; 0: all of it"},
    {"sample-every", OUTPUT, true, INTEGER_OF(sample_every, 0, 0, NO_LIMIT), .unit = "STEPS",
        .shown = "0: off", .help = "how often the model writes a text"},
    {"sample-tokens", OUTPUT, true, INTEGER_OF(sample_tokens, 128, 1, 1048576), .unit = "TOKENS",
        .help = "length of such a text"},
    {"sample-prompt", OUTPUT, true, TEXT_OF(sample_prompt, ""), .unit = "TEXT", .shown = "end of text",
        .help = "how it begins"},
    {"sample-temperature", OUTPUT, true, NUMBER_OF(sample_temperature, 0.8, 0, 100), .unit = "X",
        .help = "0: always the likeliest token; 1: as the model thinks"},
    {"sample-top-k", OUTPUT, true, INTEGER_OF(sample_top_k, 0, 0, 65536), .unit = "N", .shown = "0: all",
        .help = "draw from the so many likeliest tokens only"},
    {"sample-top-p", OUTPUT, true, NUMBER_OF(sample_top_p, 1, 1e-9, 1), .unit = "SHARE", .shown = "1: all",
        .help = "draw from the likeliest tokens that have this share of the probability together"},
    {"sample-repetition-penalty", OUTPUT, true, NUMBER_OF(sample_repetition_penalty, 1, 0.01, 100),
        .unit = "X", .shown = "1: none",
        .help = "makes tokens that the text has already less likely: above 0 logits are divided by it, below "
                "multiplied"},
    {"multiple-choice", OUTPUT, true, TEXT_OF(multiple_choice, ""), .unit = "FILE", .shown = "none",
        .help = "questions as HellaSwag's JSON lines have them (ctx, endings, label), asked when --val-data "
                "is measured; needs a tokenizer"},
    {"checkpoint-every", OUTPUT, true, INTEGER_OF(checkpoint_every, 1000, 0, NO_LIMIT), .unit = "STEPS",
        .help = "how often the run is saved, besides at its end; 0: never"},
    {"keep", OUTPUT, true, INTEGER_OF(keep, 2, 0, NO_LIMIT), .unit = "N",
        .help = "newest checkpoints that stay; 0: all"},
    {"keep-every", OUTPUT, true, INTEGER_OF(keep_every, 0, 0, NO_LIMIT), .unit = "STEPS", .shown = "0: none",
        .help = "checkpoints of these steps stay for good"},
    {"log-every", OUTPUT, false, INTEGER_OF(log_every, 10, 1, NO_LIMIT), .unit = "STEPS",
        .help = "a line of progress every so many steps, where output is not a terminal; of several ranks "
                "tok/s is of all, "
                "TFLOP/s, MFU and memory of one"},

    {"device", DEVICE, false, CHOICE_OF(device, "auto", "auto cpu cuda"),
        .help = "auto: cuda where there is a GPU"},
    {"ranks", DEVICE, false, INTEGER_OF(ranks, 0, 0, 4096), .unit = "N",
        .shown = "0: all GPUs of this machine that --global-batch can be divided among; 1 on the CPU",
        .help = "processes that this program starts, one GPU each; under torchrun, Slurm or mpirun, or with "
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, each is started from outside"},
    {"zero", DEVICE, false, INTEGER_OF(zero, -1, -1, 2), .unit = "STAGE", .shown = "-1: 1 for several ranks",
        .help = "what ranks share instead of each having all of it: 1: the optimizer's memory; 2: that of "
                "gradients as well, which then travel in every micro-step; 0: nothing"},
    {"reduce-dtype", DEVICE, false, CHOICE_OF(reduce_dtype, "fp32", "fp32 bf16"),
        .help = "gradients between ranks; bf16 halves what travels, for slow networks, and loses precision"},
    {"comm-ctas", DEVICE, false, INTEGER_OF(comm_ctas, 0, 0, 64), .unit = "N", .shown = "0: NCCL's choice",
        .help = "thread blocks, each on an SM of its own, that move data between GPUs"},
    {"deterministic", DEVICE, false, SWITCH_OF(deterministic, 0),
        .help = "between GPUs one algorithm for all sizes, so that a run repeats bit by bit also where NCCL "
                "would choose another; all else always does"},
    {"threads", DEVICE, false, INTEGER_OF(threads, 0, 0, 4096), .unit = "N", .shown = "0: cores / ranks",
        .help = "CPU threads of a rank"},
    {"recompute", DEVICE, false, CHOICE_OF(recompute, "none", "none gelu layernorm block"),
        .help = "what backward computes again instead of keeping it; each saves more memory than the one "
                "before, block most and slowest"},
    {"grad-dtype", DEVICE, false, CHOICE_OF(grad_dtype, "fp32", "fp32 bf16"),
        .help = "gradients on a GPU; bf16 takes half the memory and loses precision"},
    {"stochastic-rounding", DEVICE, false, SWITCH_OF(stochastic_rounding, 0),
        .help = "round a GPU's bf16 weights up or down by chance, so that small updates count on average; a "
                "resumed run rounds its first weights to the nearest"},
    {"attention", DEVICE, false, CHOICE_OF(attention, "auto", "auto fa3 fa2 cut2 cut1 fa1 standard"),
        .help = "attention kernel on a GPU; auto: the fastest for it and the heads; fa3: H100 and H200; cut1 "
                "and cut2 are the steps from fa1 to fa2"},
    {"autotune", DEVICE, false, SWITCH_OF(autotune, 1),
        .help =
            "time several algorithms for each matrix product on a GPU and keep the best, in $FLASHGPT_CACHE "
            "or ~/.cache/flashgpt; a resumed run gives the same bits as long as that folder stays"},
    {"logits-mib", DEVICE, false, INTEGER_OF(logits_mib, 1024, 1, 1048576), .unit = "MIB",
        .help = "most memory for logits; more tokens than fit go in several chunks"},
    {"profile", DEVICE, false, INTEGER_OF(profile, 0, 0, 1000), .unit = "STEPS", .shown = "0: off",
        .help = "measure where the time of so many steps goes, after two to warm up; prints a table"},
    {"peak-tflops", DEVICE, false, NUMBER_OF(peak_tflops, 0, 0, 1e6), .unit = "TFLOPS",
        .shown = "the GPU's by its name", .help = "dense bf16 peak that MFU is counted against"},
    {"comm-timeout", DEVICE, false, NUMBER_OF(comm_timeout, 120, 1, 1e6), .unit = "SECONDS",
        .help = "how long ranks wait for one of them, at the start and in a step, before the run fails"},
    {"max-restarts", DEVICE, false, INTEGER_OF(max_restarts, 0, 0, 1e6), .unit = "N",
        .help = "start again from the newest checkpoint so many times when a rank dies"},
};

const int option_count = sizeof option_table / sizeof option_table[0];
_Static_assert(
    sizeof option_table / sizeof option_table[0] <= OPTIONS_MAX, "struct options has room for all");
