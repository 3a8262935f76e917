/* How a step goes, per bucket (a layer, or what exists once):

     backward of the last micro-step   the bucket's gradients start their reduction as soon as they are final
                                       (ZeRO 2: of every micro-step; the own shard of the sum is added up before the
                                       bucket's buffer serves another layer)
     norm                              every rank squares its shard of each bucket; one all-reduce of two numbers
     control block                     loss, norm, clip factor and "apply or skip", on the device
     AdamW                             ZeRO 0: the whole bucket; ZeRO 1: the own shard, then its all-gather starts
     next forward                      waits for each bucket's gather just before it reads the bucket

   Shards are the same pieces of buckets in all stages, so that the norm, and with it every bit of the result, does
   not depend on the stage. */
#include "optimizer.h"

#include <math.h>
#include <stdlib.h>

static const struct bucket *get_bucket(const struct optimizer *o, int b) {
    return &model_get_layout(o->model)->bucket[b];
}
static int bucket_count(const struct optimizer *o) {
    return model_get_layout(o->model)->buckets;
}
static bool has_masters(const struct optimizer *o) {
    return o->backend->profile.master_dtype != o->backend->profile.parameter_dtype;
}
static int gather_slot(int bucket) {
    return 2 * bucket;
}
static int reduce_slot(int bucket) {
    return 2 * bucket + 1;
}
static int control_slot(const struct optimizer *o) {
    return 2 * bucket_count(o);
}

void optimizer_piece(const struct optimizer *o, int bucket, int64_t *first, int64_t *count) {
    const struct bucket *k = get_bucket(o, bucket);
    int64_t piece = k->padded_count / o->comm->ranks;
    *first = min_i64(piece * o->comm->rank, k->count);
    *count = min_i64(piece, k->count - *first);
}

void optimizer_shard(const struct optimizer *o, int bucket, int64_t *first, int64_t *count) {
    if (o->options.zero_stage == 0) {
        *first = 0;
        *count = get_bucket(o, bucket)->count;
    } else {
        optimizer_piece(o, bucket, first, count);
    }
}

static struct tensor parameters_at(const struct optimizer *o, int bucket, int64_t index) {
    return tensor_at(model_parameters(o->model), get_bucket(o, bucket)->offset + index);
}
/* Of this step and all ranks, within what optimizer_shard gives, once the reduction is collected. */
static struct tensor reduced_gradients_at(const struct optimizer *o, int bucket, int64_t index) {
    if (o->gradient_shards.data == NULL) {
        return tensor_at(model_bucket_gradients(o->model, bucket), index);
    }
    int64_t first, count;
    optimizer_shard(o, bucket, &first, &count);
    return tensor_at(o->gradient_shards, o->state_offset[bucket] + index - first);
}

/* ---- life ---- */

static enum status allocate_state(struct optimizer *o, struct tensor *out, enum dtype dtype) {
    struct backend *b = o->backend;
    size_t bytes = (size_t)o->state_total * dtype_bytes(dtype);
    out->dtype = dtype;
    CHECK(b->memory_allocate(b, &out->data, bytes));
    return b->set_zero(b, out->data, bytes);
}

/* Two, so that one bucket is converted while another is on its way; bucket 0 is the largest or a layer is. */
static enum status allocate_wires(struct optimizer *o) {
    int64_t largest = max_i64(get_bucket(o, 0)->padded_count, get_bucket(o, 1)->padded_count);
    for (int i = 0; i < 2; i++) {
        o->wire[i].dtype = o->options.reduce_dtype;
        CHECK(o->backend->memory_allocate(
            o->backend, &o->wire[i].data, (size_t)largest * dtype_bytes(o->options.reduce_dtype)));
    }
    return STATUS_OK;
}

static enum status allocate_all(struct optimizer *o) {
    struct backend *b = o->backend;
    CHECK(ALLOCATE(o->state_offset, bucket_count(o)));
    CHECK(ALLOCATE(o->reductions, bucket_count(o)));
    for (int i = 0; i < bucket_count(o); i++) {
        int64_t first, count;
        optimizer_shard(o, i, &first, &count);
        o->state_offset[i] = o->state_total;
        o->state_total += round_up(count, 128);
    }
    CHECK(allocate_state(o, &o->first_moment, b->profile.statistic_dtype));
    CHECK(allocate_state(o, &o->second_moment, b->profile.statistic_dtype));
    if (has_masters(o)) {
        CHECK(allocate_state(o, &o->master, b->profile.master_dtype));
    }
    if (o->options.zero_stage == 2) {
        CHECK(allocate_state(o, &o->gradient_shards, model_gradients(o->model).dtype));
    }
    if (optimizer_narrows(o->options.reduce_dtype, model_gradients(o->model).dtype, o->comm->ranks)) {
        CHECK(allocate_wires(o));
    }
    CHECK(b->memory_allocate(b, &o->staging, OPTIMIZER_STAGING_ELEMENTS * sizeof(float)));
    size_t control_bytes = CONTROL_COUNT * dtype_bytes(b->profile.statistic_dtype);
    CHECK(b->memory_allocate(b, &o->control, control_bytes));
    return b->set_zero(b, o->control, control_bytes);
}

bool optimizer_narrows(enum dtype reduce_dtype, enum dtype gradient_dtype, int ranks) {
    return ranks > 1 && dtype_bytes(reduce_dtype) < dtype_bytes(gradient_dtype);
}

enum status optimizer_create(
    struct optimizer **out, struct model *model, struct comm *comm, const struct optimizer_options *options) {
    struct optimizer *o;
    CHECK(ALLOCATE(o, 1));
    o->backend = model_get_backend(model);
    o->comm = comm;
    o->model = model;
    o->options = *options;
    if (comm->ranks == 1) {
        o->options.zero_stage = 0;
    }
    enum status status = allocate_all(o);
    if (status != STATUS_OK) {
        optimizer_free(o);
        return status;
    }
    *out = o;
    return STATUS_OK;
}

void optimizer_free(struct optimizer *o) {
    if (o == NULL) {
        return;
    }
    o->backend->memory_free(o->backend, o->control);
    o->backend->memory_free(o->backend, o->staging);
    o->backend->memory_free(o->backend, o->master.data);
    for (int i = 0; i < 2; i++) {
        o->backend->memory_free(o->backend, o->wire[i].data);
    }
    o->backend->memory_free(o->backend, o->gradient_shards.data);
    o->backend->memory_free(o->backend, o->second_moment.data);
    o->backend->memory_free(o->backend, o->first_moment.data);
    free(o->reductions);
    free(o->state_offset);
    free(o);
}

enum status optimizer_initialize(struct optimizer *o, uint64_t seed) {
    const struct layout *layout = model_get_layout(o->model);
    CHECK(model_initialize(o->model, model_parameters(o->model), 0, layout->total, seed));
    for (int i = 0; has_masters(o) && i < layout->buckets; i++) {
        int64_t first, count;
        optimizer_shard(o, i, &first, &count);
        CHECK(model_initialize(o->model, tensor_at(o->master, o->state_offset[i]),
            layout->bucket[i].offset + first, count, seed));
    }
    return STATUS_OK;
}

/* ---- a step ---- */

static void *control_at(const struct optimizer *o, enum control_index index) {
    struct tensor control = {o->control, o->backend->profile.statistic_dtype};
    return tensor_at(control, index).data;
}

void *optimizer_loss_sum(const struct optimizer *o) {
    return control_at(o, CONTROL_LOSS_SUM);
}

enum status optimizer_begin_step(struct optimizer *o) {
    o->comm->blocked_ms(o->comm); /* for a rank that wrote a sample or removed a checkpoint: not in a step */
    for (int i = 0; i < bucket_count(o); i++) {
        o->reductions[i].summed = false;
    }
    struct tensor sums = {control_at(o, CONTROL_LOSS_SUM), o->backend->profile.statistic_dtype};
    return o->backend->fill(o->backend, sums, 0.0, CONTROL_NORM_SQUARED - CONTROL_LOSS_SUM + 1);
}

static enum status wait_for_gather(void *context, int bucket) {
    struct optimizer *o = (struct optimizer *)context;
    return o->comm->wait(o->comm, gather_slot(bucket));
}

/* Makes the compute stream wait for a bucket's reduction, and puts the sum where reduced_gradients_at finds it. */
static enum status collect(struct optimizer *o, int bucket) {
    struct reduction *r = &o->reductions[bucket];
    if (!r->running) {
        return STATUS_OK;
    }
    r->running = false;
    CHECK(o->comm->wait(o->comm, reduce_slot(bucket)));
    struct tensor sum = model_bucket_gradients(o->model, bucket);
    bool narrow = o->wire[0].data != NULL, sharded = o->gradient_shards.data != NULL;
    if (!narrow && !sharded) {
        return STATUS_OK; /* it is there */
    }
    int64_t first, count;
    optimizer_shard(o, bucket, &first, &count);
    sum = tensor_at(narrow ? o->wire[r->wire] : sum, first);
    struct tensor to = reduced_gradients_at(o, bucket, first);
    bool add = sharded && r->summed;
    r->summed = true;
    return add ? o->backend->add(o->backend, to, sum, count)
               : o->backend->convert(o->backend, to, sum, count);
}

/* Of all buckets whose sums lie in this buffer. */
static enum status collect_from(struct optimizer *o, const void *buffer) {
    for (int i = 0; i < bucket_count(o); i++) {
        const struct reduction *r = &o->reductions[i];
        if (r->running && (model_bucket_gradients(o->model, i).data == buffer ||
                              (o->wire[0].data != NULL && o->wire[r->wire].data == buffer))) {
            CHECK(collect(o, i));
        }
    }
    return STATUS_OK;
}

static enum status free_gradients(void *context, int bucket) {
    struct optimizer *o = (struct optimizer *)context;
    return collect_from(o, model_bucket_gradients(o->model, bucket).data);
}

static enum status start_reduction(void *context, int bucket) {
    struct optimizer *o = (struct optimizer *)context;
    const struct bucket *k = get_bucket(o, bucket);
    struct reduction *r = &o->reductions[bucket];
    struct tensor gradients = model_bucket_gradients(o->model, bucket);
    if (o->wire[0].data != NULL) {
        r->wire = o->next_wire;
        o->next_wire = 1 - o->next_wire;
        CHECK(collect_from(o, o->wire[r->wire].data));
        CHECK(o->backend->convert(o->backend, o->wire[r->wire], gradients, k->padded_count));
        gradients = o->wire[r->wire];
    }
    r->running = true;
    if (o->options.zero_stage == 0) {
        return o->comm->all_reduce(o->comm, gradients, k->padded_count, COMM_SUM, reduce_slot(bucket));
    }
    return o->comm->reduce_scatter(o->comm, gradients, k->padded_count / o->comm->ranks, reduce_slot(bucket));
}

bool optimizer_accumulates(const struct optimizer *o, bool first_micro_step) {
    return !first_micro_step && o->options.zero_stage < 2;
}

struct model_hooks optimizer_hooks(struct optimizer *o, bool last_micro_step) {
    struct model_hooks hooks = {NULL, NULL, NULL, o};
    if (o->comm->ranks > 1) {
        hooks.before_parameters = wait_for_gather;
        hooks.before_gradients = free_gradients;
        hooks.gradients_ready = last_micro_step || o->options.zero_stage == 2 ? start_reduction : NULL;
    }
    return hooks;
}

static enum status reduce_control(struct optimizer *o) {
    struct tensor sums = {control_at(o, CONTROL_LOSS_SUM), o->backend->profile.statistic_dtype};
    CHECK(o->comm->all_reduce(
        o->comm, sums, CONTROL_NORM_SQUARED - CONTROL_LOSS_SUM + 1, COMM_SUM, control_slot(o)));
    return o->comm->wait(o->comm, control_slot(o));
}

static enum status update_bucket(struct optimizer *o, int bucket, const struct adamw_options *adamw) {
    const struct bucket *k = get_bucket(o, bucket);
    int64_t first, count;
    optimizer_shard(o, bucket, &first, &count);
    if (count > 0) {
        int64_t decay_count = max_i64(0, min_i64(k->decay_count - first, count));
        int64_t state = o->state_offset[bucket];
        /* buckets number their elements from 0: each draws from a seed of its own */
        uint64_t seed = o->options.stochastic_seed == 0 ? 0 : o->options.stochastic_seed + (uint64_t)bucket;
        void *master = has_masters(o) ? tensor_at(o->master, state).data : NULL;
        CHECK(o->backend->adamw(o->backend, parameters_at(o, bucket, first).data, master,
            tensor_at(o->first_moment, state).data, tensor_at(o->second_moment, state).data,
            reduced_gradients_at(o, bucket, first), count, decay_count, adamw, o->control, seed));
    }
    if (o->options.zero_stage == 0) {
        return STATUS_OK;
    }
    return o->comm->all_gather(
        o->comm, parameters_at(o, bucket, 0), k->padded_count / o->comm->ranks, gather_slot(bucket));
}

enum status optimizer_step(
    struct optimizer *o, double learning_rate, double tokens, double loss_limit, double norm_limit) {
    struct backend *b = o->backend;
    CHECK(b->mark(b, MARK_BACKWARD_DONE));
    for (int i = bucket_count(o) - 1; i >= 0; i--) { /* in the order in which backward started them */
        int64_t first, count;
        optimizer_piece(o, i, &first, &count);
        CHECK(collect(o, i));
        CHECK(
            b->sum_squares(b, control_at(o, CONTROL_NORM_SQUARED), reduced_gradients_at(o, i, first), count));
    }
    CHECK(reduce_control(o));
    CHECK(b->mark(b, MARK_STEP_AGREED));
    struct adamw_options adamw = o->options.adamw;
    adamw.learning_rate = learning_rate;
    struct step_limits limits = {tokens, o->options.clip, loss_limit, norm_limit, adamw.beta1, adamw.beta2};
    CHECK(b->step_control(b, o->control, &limits));
    for (int i = 0; i < bucket_count(o); i++) {
        CHECK(update_bucket(o, i, &adamw));
    }
    return STATUS_OK;
}

enum status optimizer_result(struct optimizer *o, struct step_result *result) {
    double control[CONTROL_COUNT];
    CHECK(backend_read_statistics(o->backend, o->control, CONTROL_COUNT, control));
    CHECK(o->comm->wait(o->comm, control_slot(o))); /* if a rank was lost meanwhile the values are none */
    result->wait_ms = 0.0;
    if (o->comm->ranks > 1) {
        CHECK(o->backend->elapsed(o->backend, MARK_BACKWARD_DONE, MARK_STEP_AGREED, &result->wait_ms));
        double blocked_ms = o->comm->blocked_ms(o->comm); /* where it counts, backward has waited too */
        result->wait_ms = blocked_ms > 0.0 ? blocked_ms : result->wait_ms;
    }
    result->loss = control[CONTROL_LOSS];
    result->norm = control[CONTROL_NORM];
    result->applied = control[CONTROL_APPLY] > 0.0;
    result->optimizer_step = (int64_t)control[CONTROL_OPTIMIZER_STEP];
    return STATUS_OK;
}

enum status optimizer_set_step(struct optimizer *o, int64_t optimizer_step) {
    struct tensor step = {control_at(o, CONTROL_OPTIMIZER_STEP), o->backend->profile.statistic_dtype};
    return o->backend->fill(o->backend, step, (double)optimizer_step, 1);
}

/* ---- checkpoints ---- */

/* Where the fp32 values of a bucket's element come from: the master, or the parameter itself. */
static struct tensor exported(const struct optimizer *o, int bucket, int64_t shard_first, int64_t index) {
    return has_masters(o) ? tensor_at(o->master, o->state_offset[bucket] + index - shard_first)
                          : parameters_at(o, bucket, index);
}

enum status optimizer_export_bucket(struct optimizer *o, int bucket, float *host) {
    struct backend *b = o->backend;
    const struct bucket *k = get_bucket(o, bucket);
    int ranks = o->comm->ranks;
    /* every rank brings its piece, in rounds: staging holds one part of each rank's piece */
    int64_t piece = k->padded_count / ranks, part = min_i64(OPTIMIZER_STAGING_ELEMENTS / ranks, piece);
    int64_t shard_first, shard_count, own_first, own_count;
    optimizer_shard(o, bucket, &shard_first, &shard_count);
    optimizer_piece(o, bucket, &own_first, &own_count);
    struct tensor staging = {o->staging, DTYPE_F32};
    CHECK(o->comm->wait(o->comm, gather_slot(bucket)));
    for (int64_t at = 0; at < piece; at += part) {
        int64_t n = min_i64(part, own_count - at);
        if (n > 0) {
            CHECK(b->convert(b, tensor_at(staging, o->comm->rank * part),
                exported(o, bucket, shard_first, own_first + at), n));
        }
        if (ranks > 1) {
            CHECK(o->comm->all_gather(o->comm, staging, part, control_slot(o)));
            CHECK(o->comm->wait(o->comm, control_slot(o)));
        }
        for (int rank = 0; host != NULL && rank < ranks; rank++) {
            int64_t to = rank * piece + at;
            int64_t wanted = min_i64(min_i64(part, piece - at), k->count - to);
            if (wanted > 0) {
                CHECK(b->copy_to_host(
                    b, host + to, tensor_at(staging, rank * part).data, (size_t)wanted * sizeof(float)));
            }
        }
    }
    return STATUS_OK;
}

enum status optimizer_import_bucket(struct optimizer *o, int bucket, const float *host) {
    struct backend *b = o->backend;
    const struct bucket *k = get_bucket(o, bucket);
    int64_t shard_first, shard_count;
    optimizer_shard(o, bucket, &shard_first, &shard_count);
    struct tensor staging = {o->staging, DTYPE_F32};
    for (int64_t at = 0; at < k->count; at += OPTIMIZER_STAGING_ELEMENTS) {
        int64_t n = min_i64(OPTIMIZER_STAGING_ELEMENTS, k->count - at);
        CHECK(b->copy_to_device(b, o->staging, host + at, (size_t)n * sizeof(float)));
        CHECK(b->convert(b, parameters_at(o, bucket, at), staging, n));
        int64_t from = max_i64(at, shard_first), to = min_i64(at + n, shard_first + shard_count);
        if (has_masters(o) && from < to) {
            CHECK(b->convert(b, tensor_at(o->master, o->state_offset[bucket] + from - shard_first),
                tensor_at(staging, from - at), to - from));
        }
    }
    return STATUS_OK;
}
