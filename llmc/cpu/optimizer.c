/* Sums over whole buffers, the step's decision, and AdamW (Loshchilov and Hutter 2019). */
#include "cpu.h"

/* ---- sums ---- */

/* A buffer is cut into so many chunks whatever the number of threads; chunks are summed in double precision, and their
   sums in order. */
enum { SUM_CHUNKS = 256, SUM_LANES = 16 };

static double sum_chunk(const real *in, int64_t count, bool squares) {
    double lane[SUM_LANES] = {0};
    int64_t i = 0;
    for (; i + SUM_LANES <= count; i += SUM_LANES) {
        for (int l = 0; l < SUM_LANES; l++) {
            double x = in[i + l];
            lane[l] += squares ? x * x : x;
        }
    }
    for (int l = 0; i < count; i++, l++) {
        double x = in[i];
        lane[l] += squares ? x * x : x;
    }
    double total = 0;
    for (int l = 0; l < SUM_LANES; l++) {
        total += lane[l];
    }
    return total;
}

static void add_sum(struct backend *b, real *sum, const real *in, int64_t count, bool squares) {
    int64_t chunk = round_up(ceil_div(count, SUM_CHUNKS), SUM_LANES);
    double part[SUM_CHUNKS] = {0};
    use_threads(b);
#pragma omp parallel for
    for (int64_t i = 0; i < SUM_CHUNKS; i++) {
        if (i * chunk < count) {
            part[i] = sum_chunk(in + i * chunk, min_i64(chunk, count - i * chunk), squares);
        }
    }
    double total = 0;
    for (int i = 0; i < SUM_CHUNKS; i++) {
        total += part[i];
    }
    *sum += (real)total;
}

static enum status sum(struct backend *b, void *out, const void *in, int64_t count) {
    add_sum(b, out, in, count, false);
    return STATUS_OK;
}

static enum status sum_squares(struct backend *b, void *out, struct tensor in, int64_t count) {
    CHECK(check_gradient(in));
    add_sum(b, out, in.data, count, true);
    return STATUS_OK;
}

/* ---- the step's decision ---- */

/* Whatever is not a number fails every comparison, so a NaN is never applied. */
static enum status step_control(struct backend *b, void *control_, const struct step_limits *limits) {
    (void)b;
    real *control = control_;
    /* judged as they are reported: rounded */
    double loss = (real)(control[CONTROL_LOSS_SUM] / limits->tokens);
    double norm = (real)sqrt((double)control[CONTROL_NORM_SQUARED]);
    bool apply = isfinite(loss) && isfinite(norm) && loss <= limits->loss_limit && norm <= limits->norm_limit;
    if (apply) {
        control[CONTROL_OPTIMIZER_STEP] += 1;
    }
    double step = control[CONTROL_OPTIMIZER_STEP];
    control[CONTROL_LOSS] = (real)loss;
    control[CONTROL_NORM] = (real)norm;
    control[CONTROL_SCALE] = (real)(limits->clip > 0 && norm > limits->clip ? limits->clip / norm : 1);
    control[CONTROL_APPLY] = apply;
    control[CONTROL_CORRECTION1] = (real)(1 - pow(limits->beta1, step));
    control[CONTROL_CORRECTION2] = (real)(1 - pow(limits->beta2, step));
    return STATUS_OK;
}

/* ---- AdamW ---- */

/* One step's constants: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
   p = keep p - step m / (sqrt(v) / sqrt(correction2) + epsilon). */
struct adamw_factors {
    real gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, step, root_factor, epsilon;
};

static void update(real *restrict parameters, real *restrict first_moment, real *restrict second_moment,
    const real *restrict gradients, int64_t count, real keep, const struct adamw_factors *factors) {
    struct adamw_factors f = *factors;
    for (int64_t i = 0; i < count; i++) {
        real gradient = gradients[i] * f.gradient_scale;
        real m = f.beta1 * first_moment[i] + f.one_minus_beta1 * gradient;
        real v = f.beta2 * second_moment[i] + f.one_minus_beta2 * gradient * gradient;
        first_moment[i] = m;
        second_moment[i] = v;
        parameters[i] = keep * parameters[i] - f.step * m / ((real)sqrt(v) * f.root_factor + f.epsilon);
    }
}

/* Parameters have the optimizer's own dtype here: there are no masters and nothing to round. */
static enum status adamw(struct backend *b, void *parameters, void *master, void *first_moment,
    void *second_moment, struct tensor gradients, int64_t count, int64_t decay_count,
    const struct adamw_options *options, const void *control_, uint64_t stochastic_seed) {
    enum { CHUNK = 4096 };
    (void)stochastic_seed;
    CHECK(check_gradient(gradients));
    if (master != NULL) {
        return fail("the CPU's parameters are their own masters: adamw takes no others");
    }
    const real *control = control_;
    if (control[CONTROL_APPLY] == 0) {
        return STATUS_OK;
    }
    struct adamw_factors factors = {control[CONTROL_SCALE], (real)options->beta1, (real)(1 - options->beta1),
        (real)options->beta2, (real)(1 - options->beta2),
        (real)(options->learning_rate / control[CONTROL_CORRECTION1]),
        (real)(1 / sqrt((double)control[CONTROL_CORRECTION2])), (real)options->epsilon};
    real decayed = (real)(1 - options->learning_rate * options->weight_decay);
    use_threads(b);
#pragma omp parallel for
    for (int64_t first = 0; first < count; first += CHUNK) {
        int64_t last = min_i64(first + CHUNK, count), middle = max_i64(first, min_i64(decay_count, last));
        real *p = parameters, *m = first_moment, *v = second_moment;
        const real *g = gradients.data;
        update(p + first, m + first, v + first, g + first, middle - first, decayed, &factors);
        update(p + middle, m + middle, v + middle, g + middle, last - middle, 1, &factors);
    }
    return STATUS_OK;
}

void optimizer_install(struct backend *b) {
    b->sum = sum;
    b->sum_squares = sum_squares;
    b->step_control = step_control;
    b->adamw = adamw;
}
