/* --help: what the program does by example, every option by group, the environment, the exit codes, the presets, the
   GPUs. */
#include "gpus.h"
#include "metrics.h"
#include "options_table.h"
#include "presets.h"

static const char *const group_titles[OPTION_GROUPS] = {
    [RUN] = "Run",
    [USE] = "Use of a trained model (instead of training)",
    [MODEL] = "Model (0: the preset's)",
    [BATCH] = "Batch and length",
    [OPTIMIZER] = "Optimizer (AdamW)",
    [DATA] = "Data",
    [OUTPUT] = "Evaluation, samples, checkpoints",
    [DEVICE] = "Device",
};

enum { HELP_COLUMNS = 100, HELP_INDENT = 34 };

/* `text` from the present column HELP_INDENT on, broken at spaces, further lines indented. */
static void print_wrapped(FILE *out, const char *text) {
    size_t width = HELP_COLUMNS - HELP_INDENT;
    while (strlen(text) > width) {
        size_t line = width, bracket = strcspn(text, "[");
        while (line > 0 && text[line] != ' ') {
            line--;
        }
        if (bracket > 0 && bracket < line) { /* the default is not torn */
            line = bracket - 1;
        }
        line = line == 0 ? width : line; /* one long word */
        fprintf(out, "%.*s\n%*s", (int)line, text, HELP_INDENT, "");
        text += line + (text[line] == ' ');
    }
    fprintf(out, "%s\n", text);
}

static void print_option(FILE *out, const struct option *row) {
    char left[80], text[800], standard[200] = "";
    snprintf(left, sizeof left, "--%s %s", row->name, row->unit != NULL ? row->unit : "");
    if (row->type == SWITCH) {
        snprintf(standard, sizeof standard, "%s", row->standard != 0 ? " [on]" : "");
    } else if (row->type == CHOICE) {
        snprintf(standard, sizeof standard, " (%s) [%s]", row->choices, row->text);
    } else if (row->shown != NULL) {
        snprintf(standard, sizeof standard, " [%s]", row->shown);
    } else if (row->type == TEXT) {
        snprintf(standard, sizeof standard, " [%s]", row->text);
    } else {
        snprintf(standard, sizeof standard, " [%.10g]", row->standard);
    }
    snprintf(text, sizeof text, "%s%s", row->help, standard);
    fprintf(out, "  %-*s", HELP_INDENT - 2, left);
    print_wrapped(out, text);
}

struct row {
    const char *name, *help;
};

static void print_rows(FILE *out, const struct row *rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        fprintf(out, "  %-*s", HELP_INDENT - 2, rows[i].name);
        print_wrapped(out, rows[i].help);
    }
}

static void print_environment(FILE *out) {
    static const struct row variables[] = {
        {"RANK, WORLD_SIZE", "this process is one rank of so many; set by hand or by torchrun (mpirun's and "
                             "Slurm's own variables are understood too)"},
        {"LOCAL_RANK, LOCAL_WORLD_SIZE", "the same among those of this machine: which GPU it takes"},
        {"MASTER_ADDR, MASTER_PORT", "where rank 0 is; the others find it there"},
        {"FLASHGPT_PORT", "wins over MASTER_PORT, and over the port that a job's number gives"},
        {"FLASHGPT_TOKEN", "a word that the ranks of a run have in common: others are not let in [the job's "
                           "number]"},
        {"FLASHGPT_CACHE", "where --autotune keeps its choices [~/.cache/flashgpt]"},
    };
    fprintf(out, "\nEnvironment\n");
    print_rows(out, variables, sizeof variables / sizeof variables[0]);
}

static void print_exit_codes(FILE *out) {
    static const struct row codes[] = {
        {"0", "all is done; or SIGINT, SIGTERM or SIGHUP came, and the run saved its state and stopped"},
        {"1", "an error, told in a line on standard error; also ranks that do not meet at the start"},
        {"3", "a rank was lost after that: it or what all exchange took longer than --comm-timeout, its GPU "
              "failed, or, of ranks started from outside, another one ended"},
        {"128 + N", "signal N ended a rank, or the program itself: 137 is SIGKILL, as when memory runs out; "
                    "130 a second Ctrl-C"},
        {"another", "a library ended a rank with it"},
    };
    fprintf(out, "\nExit code (--max-restarts starts again after 3 and 128 + N)\n");
    print_rows(out, codes, sizeof codes / sizeof codes[0]);
}

static void print_presets(FILE *out) {
    int count;
    const struct preset *presets = preset_table(&count);
    fprintf(out,
        "\nPresets (rate: --learning-rate; micro-batch: fits 80 GB without --recompute, 6.7b from --ranks 4 "
        "on)\n  %-16s %10s "
        "%6s %8s %5s %8s %7s %6s %8s %11s\n",
        "name", "parameters", "layers", "channels", "heads", "head dim", "seq len", "vocab", "rate",
        "micro-batch");
    for (int i = 0; i < count; i++) {
        const struct preset *p = &presets[i];
        char parameters[32];
        format_count(parameters, sizeof parameters, (double)preset_parameters(p));
        fprintf(out, "  %-16s %10s %6d %8d %5d %8d %7d %6d %8.2g %11d\n", p->name, parameters, p->layers,
            p->channels, p->heads, p->channels / p->heads, p->seq_len, p->vocab_size, p->learning_rate,
            p->micro_batch);
    }
}

static void print_gpus(FILE *out) {
    int count;
    const struct gpu_info *gpus = gpu_table(&count);
    fprintf(out, "\nGPUs for --plan --gpu (memory, dense bf16 peak)\n");
    for (int i = 0; i < count; i++) {
        fprintf(out, "  %-16s %5.0f GiB %5.0f TFLOP/s%s", gpus[i].key, gpus[i].memory_gib,
            gpus[i].bf16_tflops, i % 2 == 1 || i == count - 1 ? "\n" : "    ");
    }
}

void options_print_help(FILE *out) {
    fprintf(out,
        "train_gpt trains a GPT (the architecture of GPT-2 and GPT-3) from shards of tokens to a\n"
        "checkpoint that Hugging Face reads, on GPUs or on the CPU.\n"
        "\n"
        "How fast is this GPU? 20 steps on random tokens:\n"
        "  ./train_gpt --model gpt2-124m --train-data synthetic --steps 20\n"
        "Would it fit? The memory of a model on 8 GPUs that need not be there:\n"
        "  ./train_gpt --model gpt3-6.7b --plan --gpu h100-sxm --ranks 8\n"
        "Train, and go on where it stopped when the same line is given again:\n"
        "  ./train_gpt --train-data 'data/tokens/train*.bin' --val-data 'data/tokens/val*.bin' \\\n"
        "              --epochs 2 --run-dir runs/first --resume\n"
        "All GPUs of this machine take part, a rank each; several machines: see scripts/run_machines.sh.\n"
        "Use what was trained, or a GPT-2 of Hugging Face in a folder (--init-from):\n"
        "  ./train_gpt --generate 'Once upon a time' --run-dir runs/first\n"
        "  ./train_gpt --evaluate --val-data 'data/tokens/val*.bin' --init-from data/downloads/gpt2\n"
        "\n"
        "Write --name value or --name=value; a switch is --name, --no-name or --name=false. In whole\n"
        "numbers k, M, G stand for thousands (steps 600k) and Ki, Mi, Gi for powers of 1024 (tokens\n"
        "512Ki). Defaults are in [brackets]. A resumed run takes what its checkpoint keeps as defaults.\n"
        "A config file has lines \"name = value\", values in \"quotes\" if they hold a #, and # comments.\n");
    for (int group = 0; group < OPTION_GROUPS; group++) {
        fprintf(out, "\n%s\n", group_titles[group]);
        for (int i = 0; i < option_count; i++) {
            if ((int)option_table[i].group == group) {
                print_option(out, &option_table[i]);
            }
        }
    }
    print_environment(out);
    print_exit_codes(out);
    print_presets(out);
    print_gpus(out);
}
