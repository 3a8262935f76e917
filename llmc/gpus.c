/* GPUs by name: memory, and the dense bf16 rate with fp32 accumulation that MFU is counted against. Rates are the
   vendor's datasheets and architecture papers', which print most of them doubled for sparsity. GeForce chips
   accumulate in fp32 at half the tensor rate of the workstation cards of their generation; their figures are the
   lower ones. */
#include "gpus.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

static const struct gpu_info gpus[] = {
    {"a100-40gb", "A100 40GB", 39.4, 312, "sm_80"},
    {"a100-80gb", "A100 80GB", 79.1, 312, "sm_80"},
    {"a800-80gb", "A800 80GB", 79.1, 312, "sm_80"},
    {"a30", "A30", 23.5, 165, "sm_80"},
    {"a10", "A10", 22.0, 125, "sm_86"},
    {"a10g", "A10G", 22.0, 70, "sm_86"},
    {"a40", "A40", 44.4, 149.7, "sm_86"},
    {"rtx-a5000", "RTX A5000", 23.5, 111, "sm_86"},
    {"rtx-a6000", "RTX A6000", 47.4, 154.8, "sm_86"},
    {"rtx-3080", "RTX 3080", 9.6, 59.5, "sm_86"},
    {"rtx-3090", "RTX 3090", 23.6, 71, "sm_86"},
    {"rtx-3090-ti", "RTX 3090 Ti", 23.6, 80, "sm_86"},
    {"l4", "L4", 22.0, 121, "sm_89"},
    {"l40", "L40", 44.4, 181, "sm_89"},
    {"l40s", "L40S", 44.4, 362, "sm_89"},
    {"rtx-4080", "RTX 4080", 15.6, 97.5, "sm_89"},
    {"rtx-4090", "RTX 4090", 23.5, 165.2, "sm_89"},
    {"rtx-5000-ada", "RTX 5000 Ada", 31.5, 261, "sm_89"},
    {"rtx-6000-ada", "RTX 6000 Ada", 47.4, 364, "sm_89"},
    {"h100-sxm", "H100 HBM3", 79.1, 989, "sm_90a"},
    {"h100-pcie", "H100 PCIe", 79.1, 756, "sm_90a"},
    {"h100-nvl", "H100 NVL", 93.1, 835, "sm_90a"},
    {"h20", "H20", 95.1, 148, "sm_90a"},
    {"h200", "H200", 139.7, 989, "sm_90a"},
    {"h200-nvl", "H200 NVL", 139.7, 835, "sm_90a"},
    {"gh200-96gb", "GH200 480GB", 94.5, 989, "sm_90a"},
    {"gh200-144gb", "GH200 144G", 139.7, 989, "sm_90a"},
    {"b100", "B100", 178.3, 1750, "sm_100a"},
    {"b200", "B200", 178.3, 2250, "sm_100a"},
    {"gb200", "GB200", 184.0, 2500, "sm_100a"},
    {"b300", "B300", 267.0, 2250, "sm_103a"},
    {"rtx-5080", "RTX 5080", 15.5, 112.6, "sm_120a"},
    {"rtx-5090", "RTX 5090", 31.4, 209.5, "sm_120a"},
    {"rtx-pro-6000", "RTX PRO 6000 Blackwell", 94.9, 503, "sm_120a"},
};

enum { COUNT = sizeof gpus / sizeof gpus[0] };

const struct gpu_info *gpu_table(int *count) {
    *count = COUNT;
    return gpus;
}

const struct gpu_info *gpu_find_key(const char *key) {
    for (int i = 0; i < COUNT; i++) {
        if (strcmp(gpus[i].key, key) == 0) {
            return &gpus[i];
        }
    }
    return NULL;
}

/* The next run of letters and digits at or after `at`; its length into *bytes, 0 at the end. */
static const char *next_word(const char *at, size_t *bytes) {
    while (*at != '\0' && !isalnum((unsigned char)*at)) {
        at++;
    }
    for (*bytes = 0; isalnum((unsigned char)at[*bytes]); ++*bytes) {
    }
    return at;
}

static bool has_word(const char *text, const char *word, size_t word_bytes) {
    size_t bytes;
    for (const char *at = next_word(text, &bytes); bytes > 0; at = next_word(at + bytes, &bytes)) {
        if (bytes == word_bytes && memcmp(at, word, bytes) == 0) {
            return true;
        }
    }
    return false;
}

static bool has_all_words(const char *text, const char *words) {
    size_t bytes;
    for (const char *at = next_word(words, &bytes); bytes > 0; at = next_word(at + bytes, &bytes)) {
        if (!has_word(text, at, bytes)) {
            return false;
        }
    }
    return true;
}

/* Words that make another chip, or a part of one, of a well-known name. */
static bool same_variant(const char *a, const char *b) {
    static const char *const variants[] = {"Ti", "SUPER", "D", "Laptop", "Max", "MIG"};
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        size_t bytes = strlen(variants[i]);
        if (has_word(a, variants[i], bytes) != has_word(b, variants[i], bytes)) {
            return false;
        }
    }
    return true;
}

/* Whole words, since "NVIDIA RTX A1000" is no A100 and "NVIDIA GH200 480GB" no H200. */
const struct gpu_info *gpu_find_device(const char *device_name) {
    const struct gpu_info *best = NULL;
    for (int i = 0; i < COUNT; i++) {
        const char *words = gpus[i].device_name;
        if (has_all_words(device_name, words) && same_variant(device_name, words) &&
            (best == NULL || strlen(words) > strlen(best->device_name))) {
            best = &gpus[i];
        }
    }
    return best;
}

double gpu_peak_from_clock(
    int compute_capability_major, int compute_capability_minor, int multiprocessors, double clock_ghz) {
    static const struct {
        int capability; /* 10 * major + minor */
        int flop_per_clock;
    } generations[] = {
        {80, 2048}, {86, 1024}, {89, 1024}, {90, 4096}, {100, 8192}, {103, 8192}, {120, 1024}, {121, 1024}};
    for (size_t i = 0; i < sizeof generations / sizeof generations[0]; i++) {
        if (generations[i].capability == 10 * compute_capability_major + compute_capability_minor) {
            return multiprocessors * clock_ghz * generations[i].flop_per_clock * 1e-3;
        }
    }
    return 0;
}
