/* AdamW over the model's buckets, with the gradients' journey between ranks: ZeRO 0 all-reduces gradients and
   every rank updates everything; ZeRO 1 reduce-scatters them, every rank updates its shard of each bucket and the
   shards are all-gathered; ZeRO 2 reduce-scatters in every micro-step and keeps of the gradients the own shards
   alone (Rajbhandari et al., "ZeRO", SC 2020). Loss, norm, clipping and the decision to skip happen in the backend's
   control block. */
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include "comm.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* fp32 elements of the staging buffer through which checkpoints pass. */
enum { OPTIMIZER_STAGING_ELEMENTS = 1 << 22 };

/* What ZeRO 2 asks of the model (model_options.layer_gradients): one buffer is reduced while the next is written. */
enum { ZERO2_LAYER_GRADIENTS = 2 };

struct optimizer_options {
    int zero_stage;             /* 0, 1 or 2; one rank alone has 0 */
    enum dtype reduce_dtype;    /* of gradients between ranks, where it is smaller than their own */
    struct adamw_options adamw; /* learning_rate is set per step */
    double clip;                /* largest gradient norm; 0: no clipping */
    uint64_t stochastic_seed;   /* 0: round to nearest */
};

struct optimizer {
    struct backend *backend;
    struct comm *comm;
    struct model *model;
    struct optimizer_options options;
    /* Of bucket b this rank keeps elements [shard_first, shard_first + shard_count) (relative to the bucket) of master,
       first_moment and second_moment, at state_offset[b] of each buffer. ZeRO 0: whole buckets. */
    int64_t *state_offset;
    int64_t state_total;
    struct tensor master; /* data NULL: the parameters are their own masters */
    struct tensor first_moment, second_moment;
    /* ZeRO 2: sums over the micro-steps so far, laid out like the moments; else data NULL. */
    struct tensor gradient_shards;
    struct tensor wire[2]; /* gradients in reduce_dtype on their way; data NULL: they go as they are */
    int next_wire;
    /* Of each bucket: is its reduction on the way, through which wire, and do gradient_shards hold a sum of this step? */
    struct reduction {
        bool running, summed;
        int wire;
    } * reductions;
    void *control; /* CONTROL_COUNT elements of statistic dtype */
    void *staging; /* fp32, for checkpoints */
};

struct step_result {
    double loss, norm;
    bool applied;
    /* For other ranks, since the step began; on a GPU from the last gradient until all agreed on the norm. 0 for one
       rank. */
    double wait_ms;
    int64_t optimizer_step; /* applied steps so far */
};

enum status optimizer_create(
    struct optimizer **out, struct model *model, struct comm *comm, const struct optimizer_options *options);
void optimizer_free(struct optimizer *optimizer);

/* Do gradients go between ranks through buffers of a smaller type? */
bool optimizer_narrows(enum dtype reduce_dtype, enum dtype gradient_dtype, int ranks);

/* This rank's equal piece of a bucket, in elements relative to the bucket: what it adds to the norm, and stores. */
void optimizer_piece(const struct optimizer *optimizer, int bucket, int64_t *first, int64_t *count);
/* What it keeps and updates: under ZeRO 0 the whole bucket, else its piece. */
void optimizer_shard(const struct optimizer *optimizer, int bucket, int64_t *first, int64_t *count);

/* Masters and parameters from the seed. */
enum status optimizer_initialize(struct optimizer *optimizer, uint64_t seed);
/* Where to add token losses: control[CONTROL_LOSS_SUM]. */
void *optimizer_loss_sum(const struct optimizer *optimizer);

/* Before a step's first micro-step. */
enum status optimizer_begin_step(struct optimizer *optimizer);
/* Are a micro-step's gradients to be added to those of the ones before it? */
bool optimizer_accumulates(const struct optimizer *optimizer, bool first_micro_step);
/* Hooks for a micro-step: wait for gathered parameters; start each bucket's reduction, in the last micro-step or (ZeRO 2)
   in every. */
struct model_hooks optimizer_hooks(struct optimizer *optimizer, bool last_micro_step);
/* After the last micro-step: norm, decision, AdamW, gather. */
enum status optimizer_step(
    struct optimizer *optimizer, double learning_rate, double tokens, double loss_limit, double norm_limit);
/* The last step's outcome; waits for it. */
enum status optimizer_result(struct optimizer *optimizer, struct step_result *result);
/* On resume: the number of applied steps so far. */
enum status optimizer_set_step(struct optimizer *optimizer, int64_t optimizer_step);

/* For checkpoints. Exchange of whole parameters in fp32 (masters where there are), bucket by bucket:
   every rank calls; `host` gets bucket->count floats, and is NULL on ranks that do not want them. */
enum status optimizer_export_bucket(struct optimizer *optimizer, int bucket, float *host);
/* Sets the parameters (and this rank's masters) of a bucket from bucket->count floats on the host of every rank. */
enum status optimizer_import_bucket(struct optimizer *optimizer, int bucket, const float *host);

#ifdef __cplusplus
}
#endif

#endif
