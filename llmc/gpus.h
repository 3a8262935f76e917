/* GPUs by name: their memory, their peak rate and their generation, also of those that are not there. */
#ifndef LLMC_GPUS_H
#define LLMC_GPUS_H

#ifdef __cplusplus
extern "C" {
#endif

struct gpu_info {
    const char *key;          /* what --gpu takes: "a100-80gb", "h100-sxm", "h200" */
    const char *device_name;  /* words that are all in the driver's name */
    double memory_gib;        /* what an allocator can have */
    double bf16_tflops;       /* dense, fp32 accumulation */
    const char *architecture; /* "sm_80", "sm_90a", ... */
};
const struct gpu_info *gpu_find_key(const char *key);            /* NULL: unknown */
const struct gpu_info *gpu_find_device(const char *device_name); /* the longest match; NULL: unknown */
const struct gpu_info *gpu_table(int *count);
/* TFLOP/s for unknown names: SMs x clock x dense bf16 FLOP per clock and SM of the compute capability; 0: a generation
   without bf16, or not known. */
double gpu_peak_from_clock(
    int compute_capability_major, int compute_capability_minor, int multiprocessors, double clock_ghz);

#ifdef __cplusplus
}
#endif

#endif
