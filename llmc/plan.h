/* The memory plan: every buffer of a run with its bytes, before anything is allocated. Pure arithmetic: also
   for a GPU and a number of ranks that are not there. */
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

struct plan_options {
    struct model_options model; /* micro_batch at least 1 */
    struct backend_profile device;
    int zero_stage;
    bool samples;            /* the run writes texts now and then, on its first rank */
    enum dtype reduce_dtype; /* as in struct optimizer_options */
    uint64_t device_bytes;   /* 0: unknown */
};

struct plan {
    uint64_t buffer_bytes[BUFFER_KINDS]; /* all copies */
    uint64_t parameter_bytes, gradient_bytes, master_bytes, moment_bytes;
    uint64_t staging_bytes, decoder_bytes, wire_bytes, device_workspace_bytes;
    uint64_t group_bytes[BUFFER_GROUPS];
    uint64_t total_bytes;
    uint64_t sequence_bytes; /* what one more sequence in the micro-batch costs */
    int largest_micro_batch; /* 0: device unknown, or not even one fits */
    int64_t parameters;      /* P, without vocabulary padding */
};

enum status plan_make(struct plan *plan, const struct plan_options *options);
/* The plan as text: the buffers by group, the activations of every recompute level, the largest micro-batch. */
void plan_print(FILE *out, const struct plan *plan, const struct plan_options *options);

#ifdef __cplusplus
}
#endif

#endif
