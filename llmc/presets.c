/* The models that --model knows: sizes of GPT-2 (Radford et al. 2019, table 2) and GPT-3 (Brown et al. 2020, table 2.1).
   GPT-3's learning rates are that table's; GPT-2's paper gives none, so its sizes take GPT-3's of like size. Where
   table 2.1 contradicts itself (XL: 24 heads of 128 in 2048 channels) the channels decide. A micro-batch is what
   fits into 80 GB without recomputation, of 6.7B on each of 4 GPUs that share the optimizer's memory: bf16 training takes
   18 bytes a parameter and about 2.6 GiB a sequence for 1.3B, in proportion to layers * channels * seq_len. */
#include "presets.h"

#include <stddef.h>
#include <string.h>

static const struct preset presets[] = {
    {"tiny", 4, 128, 4, 128, 257, 8, 1e-3},
    {"gpt2-124m", 12, 768, 12, 1024, 50257, 64, 6e-4},
    {"gpt2-355m", 24, 1024, 16, 1024, 50257, 64, 3e-4},
    {"gpt2-774m", 36, 1280, 20, 1024, 50257, 32, 2.5e-4},
    {"gpt2-1.5b", 48, 1600, 25, 1024, 50257, 16, 2e-4},
    {"gpt3-125m", 12, 768, 12, 2048, 50257, 64, 6e-4},
    {"gpt3-350m", 24, 1024, 16, 2048, 50257, 32, 3e-4},
    {"gpt3-760m", 24, 1536, 16, 2048, 50257, 16, 2.5e-4},
    {"gpt3-1.3b", 24, 2048, 16, 2048, 50257, 16, 2e-4},
    {"gpt3-2.7b", 32, 2560, 32, 2048, 50257, 4, 1.6e-4},
    {"gpt3-2.7b-hd128", 32, 2560, 20, 2048, 50257, 4, 1.6e-4},
    {"gpt3-6.7b", 32, 4096, 32, 2048, 50257, 2, 1.2e-4},
};

const struct preset *preset_table(int *count) {
    *count = (int)(sizeof presets / sizeof presets[0]);
    return presets;
}

const struct preset *preset_find(const char *name) {
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(presets[i].name, name) == 0) {
            return &presets[i];
        }
    }
    return NULL;
}

int64_t preset_parameters(const struct preset *preset) {
    int64_t channels = preset->channels;
    int64_t layer = 12 * channels * channels + 13 * channels; /* 4 matrices, their biases, 2 layernorms */
    return (preset->vocab_size + preset->seq_len) * channels + preset->layers * layer + 2 * channels;
}
