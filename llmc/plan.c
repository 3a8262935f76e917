/* The plan adds up what model.c and optimizer.c allocate: both read the same buffer table and layout, so the plan cannot
   drift from the truth. */
#include "plan.h"

#include "decoder.h"
#include "metrics.h"
#include "optimizer.h"

/* All copies. */
static uint64_t bytes_of(int id, const struct model_options *options, const struct backend_profile *device) {
    enum buffer_id buffer = (enum buffer_id)id;
    return (uint64_t)buffer_bytes(buffer, options, device) * (uint64_t)buffer_copies(buffer, options);
}

/* Of all of the model's buffers. */
static uint64_t activation_bytes(const struct model_options *options, const struct backend_profile *device) {
    uint64_t bytes = 0;
    for (int id = 0; id < BUFFER_KINDS; id++) {
        bytes += bytes_of(id, options, device);
    }
    return bytes;
}

/* All that is not one of the model's buffers. */
static void plan_states(struct plan *plan, const struct plan_options *options, const struct layout *layout) {
    const struct model_options *model = &options->model;
    const struct backend_profile *device = &options->device;
    uint64_t elements = (uint64_t)layout->total;
    uint64_t states = options->zero_stage == 0 ? elements : elements / (uint64_t)model->ranks;
    plan->parameters = layout->parameters;
    plan->parameter_bytes = elements * dtype_bytes(device->parameter_dtype);
    uint64_t gradients = (uint64_t)model_gradient_elements(layout, model->layer_gradients);
    gradients += options->zero_stage == 2 ? states : 0;
    plan->gradient_bytes = gradients * dtype_bytes(model->gradient_dtype);
    if (optimizer_narrows(options->reduce_dtype, model->gradient_dtype, model->ranks)) {
        uint64_t largest = (uint64_t)max_i64(layout->bucket[0].padded_count, layout->bucket[1].padded_count);
        plan->wire_bytes = 2 * largest * dtype_bytes(options->reduce_dtype);
    }
    plan->moment_bytes = states * 2 * dtype_bytes(device->statistic_dtype);
    plan->master_bytes =
        device->master_dtype == device->parameter_dtype ? 0 : states * dtype_bytes(device->master_dtype);
    plan->staging_bytes = OPTIMIZER_STAGING_ELEMENTS * sizeof(float);
    plan->decoder_bytes = options->samples ? decoder_bytes(&model->config, device, 1, model->seq_len) : 0;
    plan->device_workspace_bytes = device->workspace_bytes + (model->ranks > 1 ? device->comm_bytes : 0);
}

/* The largest micro-batch with which the buffers fit into so many bytes, by bisection: chunks make them not quite linear. */
static int largest_micro_batch(const struct plan_options *options, uint64_t bytes) {
    struct model_options model = options->model;
    int low = 0, high = 1 << 20;
    while (low < high) {
        model.micro_batch = low + (high - low + 1) / 2;
        if (activation_bytes(&model, &options->device) <= bytes) {
            low = model.micro_batch;
        } else {
            high = model.micro_batch - 1;
        }
    }
    return low;
}

enum status plan_make(struct plan *plan, const struct plan_options *options) {
    const struct model_options *model = &options->model;
    const struct backend_profile *device = &options->device;
    memset(plan, 0, sizeof *plan);
    CHECK(model_config_check(&model->config));
    struct layout layout;
    CHECK(layout_init(&layout, &model->config, model->ranks));
    plan_states(plan, options, &layout);
    layout_free(&layout);
    plan->group_bytes[BUFFER_PARAMETERS] = plan->parameter_bytes;
    plan->group_bytes[BUFFER_GRADIENTS] = plan->gradient_bytes;
    plan->group_bytes[BUFFER_OPTIMIZER] = plan->moment_bytes + plan->master_bytes;
    plan->group_bytes[BUFFER_WORKSPACE] =
        plan->staging_bytes + plan->decoder_bytes + plan->wire_bytes + plan->device_workspace_bytes;
    for (int id = 0; id < BUFFER_KINDS; id++) {
        plan->buffer_bytes[id] = bytes_of(id, model, device);
        plan->group_bytes[buffer_group((enum buffer_id)id)] += plan->buffer_bytes[id];
    }
    for (int g = 0; g < BUFFER_GROUPS; g++) {
        plan->total_bytes += plan->group_bytes[g];
    }

    struct model_options more = *model;
    more.micro_batch = model->micro_batch + 1;
    uint64_t now = activation_bytes(model, device), fixed = plan->total_bytes - now;
    plan->sequence_bytes = activation_bytes(&more, device) - now;
    if (options->device_bytes >= fixed) {
        plan->largest_micro_batch = largest_micro_batch(options, options->device_bytes - fixed);
    }
    return STATUS_OK;
}

static void print_line(FILE *out, const char *name, uint64_t bytes, const char *remark) {
    char text[32];
    format_bytes(text, sizeof text, bytes);
    fprintf(out, "  %-28s %12s%s%s\n", name, text, remark[0] != '\0' ? "  " : "", remark);
}

static const char *const group_names[BUFFER_GROUPS] = {
    "parameters", "gradients", "optimizer", "activations", "workspace"};

/* The buffers of a group that are large enough to matter, and what is beside them. */
static void print_group(
    FILE *out, enum buffer_group g, const struct plan *plan, const struct plan_options *options) {
    print_line(out, group_names[g], plan->group_bytes[g], "");
    for (int id = 0; id < BUFFER_KINDS; id++) {
        if (plan->buffer_bytes[id] < (1u << 20) || buffer_group((enum buffer_id)id) != g) {
            continue;
        }
        char name[64], bytes[32], remark[128];
        int copies = buffer_copies((enum buffer_id)id, &options->model);
        format_bytes(bytes, sizeof bytes, plan->buffer_bytes[id] / (uint64_t)copies);
        snprintf(remark, sizeof remark, "  = %d x %s", copies, bytes);
        snprintf(name, sizeof name, "  %s", buffer_names[id]);
        print_line(out, name, plan->buffer_bytes[id], copies > 1 ? remark : "");
    }
    if (g != BUFFER_WORKSPACE) {
        return;
    }
    print_line(out, "  checkpoint staging", plan->staging_bytes, "");
    if (plan->decoder_bytes > 0) {
        print_line(out, "  sampling", plan->decoder_bytes, "");
    }
    if (plan->wire_bytes > 0) {
        print_line(out, "  gradients between ranks", plan->wire_bytes, dtype_name(options->reduce_dtype));
    }
    if (plan->device_workspace_bytes > 0) {
        print_line(out, "  device and libraries", plan->device_workspace_bytes, "");
    }
}

/* What the same run would take at each level of recomputation. */
static void print_levels(FILE *out, const struct plan_options *options) {
    fprintf(out, "  by recompute level (activations and workspace; each more sequence):\n");
    for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
        char name[64], bytes[32], remark[128], most[64] = "";
        struct plan_options other = *options;
        other.model.recompute = (enum recompute)level;
        struct plan plan;
        if (plan_make(&plan, &other) != STATUS_OK) {
            continue;
        }
        if (options->device_bytes > 0) {
            snprintf(most, sizeof most, ", largest micro-batch %d", plan.largest_micro_batch);
        }
        format_bytes(bytes, sizeof bytes, plan.sequence_bytes);
        snprintf(remark, sizeof remark, "+ %s a sequence%s", bytes, most);
        snprintf(name, sizeof name, "  --recompute %s", recompute_names[level]);
        print_line(
            out, name, plan.group_bytes[BUFFER_ACTIVATIONS] + plan.group_bytes[BUFFER_WORKSPACE], remark);
    }
}

void plan_print(FILE *out, const struct plan *plan, const struct plan_options *options) {
    const struct model_options *model = &options->model;
    const struct backend_profile *device = &options->device;
    char text[32], remark[128];
    format_count(text, sizeof text, (double)plan->parameters);
    fprintf(out,
        "memory plan for one of %d rank%s: %s parameters, micro-batch %d x %d tokens, recompute %s\n",
        model->ranks, model->ranks == 1 ? "" : "s", text, model->micro_batch, model_seq_len(model),
        recompute_names[model->recompute]);
    print_line(out, "parameters", plan->parameter_bytes, dtype_name(device->parameter_dtype));
    snprintf(remark, sizeof remark, "%s%s", dtype_name(model->gradient_dtype),
        options->zero_stage == 2 ? ", ZeRO 2: this rank's, and those of two layers and the embeddings" : "");
    print_line(out, "gradients", plan->gradient_bytes, remark);
    snprintf(remark, sizeof remark, "%s, ZeRO %d", dtype_name(device->statistic_dtype), options->zero_stage);
    print_line(out, "optimizer moments", plan->moment_bytes, remark);
    if (plan->master_bytes > 0) {
        print_line(out, "optimizer master weights", plan->master_bytes, dtype_name(device->master_dtype));
    }
    print_group(out, BUFFER_ACTIVATIONS, plan, options);
    print_group(out, BUFFER_WORKSPACE, plan, options);
    print_line(out, "total", plan->total_bytes, "");
    print_levels(out, options);
    if (options->device_bytes > 0) {
        format_bytes(text, sizeof text, options->device_bytes);
        fprintf(out, "  the device has %s: %s\n", text,
            plan->total_bytes <= options->device_bytes ? "the plan fits"
            : plan->largest_micro_batch > 0
                ? "too little, lower --micro-batch or recompute more"
                : "too little for any micro-batch; more --ranks, --zero 2 and --recompute block take less");
    }
}
