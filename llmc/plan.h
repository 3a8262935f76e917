/* The memory plan: every buffer of a run with its bytes, before anything is allocated. Pure arithmetic: also
   for a GPU and a number of ranks that are not there. */
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

struct plan_options {
    struct model_config model;
    struct backend_profile device;
    enum dtype gradient_dtype;
    enum recompute recompute;
    int micro_batch;
    int seq_len; /* of the training sequences; at most model.seq_len */
    int ranks;
    int zero_stage;
    int64_t logits_bytes;  /* most that one chunk of logits may take */
    uint64_t device_bytes; /* 0: unknown */
};

enum plan_group {
    PLAN_PARAMETERS,
    PLAN_GRADIENTS,
    PLAN_OPTIMIZER,
    PLAN_ACTIVATIONS,
    PLAN_WORKSPACE,
    PLAN_GROUPS
};

struct plan_buffer {
    const char *name;
    enum plan_group group;
    uint64_t bytes;
};

enum { PLAN_MAX_BUFFERS = 64 };
struct plan {
    struct plan_buffer buffers[PLAN_MAX_BUFFERS];
    int count;
    uint64_t group_bytes[PLAN_GROUPS];
    uint64_t total_bytes;
    /* what one more sequence in the micro-batch costs, and the largest micro-batch that fits (0: unknown or none) */
    uint64_t sequence_bytes;
    int largest_micro_batch;
};

void plan_make(struct plan *plan, const struct plan_options *options);
/* The plan as text: the buffers by group, the activations of every recompute level, the largest micro-batch. */
void plan_print(FILE *out, const struct plan *plan, const struct plan_options *options);

#ifdef __cplusplus
}
#endif

#endif
