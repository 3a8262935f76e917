/* The ops' kernels for GPUs, run on the CPU by ops_on_cpu.h together with the host code that divides the work and launches
   them, against the CPU backend in fp64: every template instance and every division of work, in shapes as small as that
   allows. test_op_kernels.sh compiles and runs this; gpu_ops.c judges the same ops on a GPU, in real sizes.

   Every op runs twice, with different timing (early and late copies, warps in both orders), and must give the same bits.
   Outputs begin as NaN or as what is added to; all memory lies between guards that must stay as they are. */
#include "test/ops_on_cpu.h"

#include "llmc/cuda/cuda.cuh"
#include "llmc/random.h"
#include "test/control.h"
#include "test/test.h"

#include <set>
#include <tuple>

#include "llmc/cuda/partials.cu"
namespace classifier_ops {
#include "llmc/cuda/classifier.cu"
}
namespace decode_ops {
#include "llmc/cuda/decode.cu"
}
namespace embedding_ops {
#include "llmc/cuda/embedding.cu"
}
namespace layernorm_ops {
#include "llmc/cuda/layernorm.cu"
}
namespace linear_ops {
#include "llmc/cuda/linear.cu"
}
namespace optimizer_ops {
#include "llmc/cuda/optimizer.cu"
}
namespace random_ops {
#include "llmc/cuda/random.cu"
}

/* ---- the backends ---- */

enum { ALIGNMENT = 256, GUARD = 4096 }; /* bytes */

/* Device memory: aligned, and NaN in every float type as are the guards around it. */
struct device_memory {
    size_t bytes;
    std::vector<unsigned char> all;
    unsigned char *data;

    explicit device_memory(size_t bytes_) : bytes(bytes_), all(ALIGNMENT + bytes_ + 2 * GUARD, 0xFF) {
        data = (unsigned char *)(((uintptr_t)all.data() + GUARD + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    }
    device_memory(device_memory &&) = default; /* `data` stays where it is */
    bool guards_are_untouched() const {
        auto untouched = [](unsigned char c) { return c == 0xFF; };
        return std::all_of(all.data(), (const unsigned char *)data, untouched) &&
               std::all_of((const unsigned char *)data + bytes, &all.back(), untouched);
    }
};

static backend_state state;
static backend gpu_table, *gpu = &gpu_table, *cpu_f64;
static std::unique_ptr<device_memory> scratch;

enum status scratch_reserve(backend *, void **out, size_t bytes) {
    scratch.reset(new device_memory(bytes));
    *out = scratch->data;
    return STATUS_OK;
}

enum status cuda_failed(cudaError_t error, const char *what) {
    return fail(
        "%s: %s", what, error == cudaErrorInvalidConfiguration ? "invalid configuration" : "invalid value");
}

enum status matmul(backend *, const struct matmul *) {
    return fail("products are cuBLAS's");
}

/* llmc/backend.c has it, and would bring attention/ with it */
extern "C" enum status backend_profile_find(backend_profile *, const char *, const char *) {
    return STATUS_OK;
}

/* Launches are for a GPU with so many multiprocessors and so much shared memory for a block. */
struct gpu_kind {
    int multiprocessors, shared_bytes;
};
static const gpu_kind H100 = {2, 232448}, A100 = {3, 166912}, RTX_4090 = {2, 101376};

static void use(gpu_kind kind) {
    state.multiprocessors = kind.multiprocessors;
    state.shared_bytes = cpu_most_shared_bytes = kind.shared_bytes;
}

/* ---- values ---- */

static uint64_t draws;
static double normal() {
    return random_normal(11, 0, draws++);
}
static double uniform() {
    return random_uniform(11, 1, draws++);
}

/* Elements of device memory, and what they are or should be in double precision. */
struct values {
    enum dtype dtype;
    device_memory memory;
    std::vector<double> reference;

    values(int64_t count, enum dtype type)
        : dtype(type), memory((size_t)count * dtype_bytes(type)), reference((size_t)count, NAN) {
    }
    values(int64_t count, enum dtype type, double mean, double std) : values(count, type) {
        for (double &value : reference) {
            value = mean + std * normal();
        }
        upload();
    }
    void upload() {
        for (size_t i = 0; i < reference.size(); i++) {
            if (dtype == DTYPE_F32) {
                ((float *)memory.data)[i] = (float)reference[i];
            } else {
                ((uint16_t *)memory.data)[i] = float_to_bf16((float)reference[i]);
            }
        }
        adopt();
    }
    double get(size_t i) const {
        return dtype == DTYPE_F32 ? ((const float *)memory.data)[i]
                                  : bf16_to_float(((const uint16_t *)memory.data)[i]);
    }
    /* The reference goes on from what is in memory. */
    void adopt() {
        for (size_t i = 0; i < reference.size(); i++) {
            reference[i] = get(i);
        }
    }
    void *data() {
        return memory.data;
    }
    double *ref() {
        return reference.data();
    }
    struct tensor tensor() {
        return {memory.data, dtype};
    }
    struct tensor ref_tensor() {
        return {reference.data(), DTYPE_F64};
    }
};

/* Where an op is to add its result, or write it. */
static values sums(int64_t count, enum dtype dtype, bool accumulate) {
    return accumulate ? values(count, dtype, 0, 1) : values(count, dtype);
}

/* Calls the op with both timings: the outputs must be the same bits, and nothing around them may change. */
template <typename Op> static void run(std::vector<values *> outputs, Op op) {
    std::vector<std::vector<unsigned char>> before, first;
    for (values *v : outputs) {
        before.emplace_back(v->memory.data, v->memory.data + v->memory.bytes);
    }
    for (int timing = 0; timing < 2; timing++) {
        cpu.copies_late = cpu.last_first = timing == 1;
        for (size_t i = 0; i < outputs.size(); i++) {
            std::copy(before[i].begin(), before[i].end(), outputs[i]->memory.data);
        }
        EXPECT_OK(op());
        for (size_t i = 0; i < outputs.size(); i++) {
            const device_memory &memory = outputs[i]->memory;
            EXPECT(memory.guards_are_untouched());
            if (timing == 0) {
                first.emplace_back(memory.data, memory.data + memory.bytes);
            } else {
                EXPECT(std::equal(first[i].begin(), first[i].end(), memory.data));
            }
        }
        EXPECT(!scratch || scratch->guards_are_untouched());
    }
}

static const double EXACT_BF16 = 1.001; /* correctly rounded */

/* |result - reference| <= roundings * (largest rounding of the reference to its dtype) + absolute, for every element */
static void expect_within(
    const values &v, double roundings, double absolute, const char *what, int64_t rows, int columns) {
    double unit = v.dtype == DTYPE_F32 ? 0x1p-24 : 0x1p-8;
    for (size_t i = 0; i < v.reference.size(); i++) {
        double expected = v.reference[i], tolerance = roundings * unit * fabs(expected) + absolute;
        if (!(fabs(v.get(i) - expected) <= tolerance)) {
            printf("    %s (%lld, %d): element %zu is %.9g, not %.9g\n", what, (long long)rows, columns, i,
                v.get(i), expected);
            test_failures_in_this_++;
            return;
        }
    }
}

/* The same, with an absolute part in proportion to the results' root mean square. */
static void expect_close(
    const values &v, double roundings, double noise, const char *what, int64_t rows, int columns) {
    double squares = 0;
    for (double value : v.reference) {
        squares += value * value;
    }
    expect_within(v, roundings, noise * sqrt(squares / (double)v.reference.size()), what, rows, columns);
}

/* ---- layernorm ---- */

static const int channel_sizes[] = {
    8, 72, 256, 264, 520, 1000, 1032, 1288, 1600, 2048, 2056, 2560, 4104, 12288, 16384};

static void check_layernorm_forward(int64_t rows, int channels) {
    values in(rows * channels, DTYPE_BF16, 0.5, 2), addend(rows * channels, DTYPE_BF16, 0, 1);
    values weight(channels, DTYPE_BF16, 1, 0.3), bias(channels, DTYPE_BF16, 0, 0.3);
    values sum(rows * channels, DTYPE_BF16), out(rows * channels, DTYPE_BF16);
    values mean(rows, DTYPE_F32), rstd(rows, DTYPE_F32);
    for (bool residual : {false, true}) {
        values &normed = residual ? sum : in;
        if (residual) {
            run({&sum, &out, &mean, &rstd}, [&] {
                return gpu->residual_layernorm_forward(gpu, sum.data(), out.data(), mean.data(), rstd.data(),
                    in.data(), addend.data(), weight.data(), bias.data(), rows, channels);
            });
            EXPECT_OK(cpu_f64->residual_forward(cpu_f64, sum.ref(), in.ref(), addend.ref(), rows * channels));
            expect_close(sum, EXACT_BF16, 0, "residual sum", rows, channels);
            sum.adopt();
        } else {
            run({&out, &mean, &rstd}, [&] {
                return gpu->layernorm_forward(gpu, out.data(), mean.data(), rstd.data(), in.data(),
                    weight.data(), bias.data(), rows, channels);
            });
        }
        EXPECT_OK(cpu_f64->layernorm_forward(cpu_f64, out.ref(), mean.ref(), rstd.ref(), normed.ref(),
            weight.ref(), bias.ref(), rows, channels));
        expect_close(out, EXACT_BF16, 1e-5, "layernorm", rows, channels);
        expect_within(mean, 16, 2e-6, "layernorm mean", rows, channels);
        expect_close(rstd, 16, 0, "layernorm rstd", rows, channels);
    }
}

static void test_layernorm_forward_matches_reference_with_every_division_of_work() {
    std::set<int> instances;
    std::set<bool> several_warps;
    for (int channels : channel_sizes) {
        layernorm_ops::division d = layernorm_ops::divide_forward(channels);
        instances.insert(d.vectors);
        several_warps.insert(d.block.x > CPU_LANES);
        check_layernorm_forward(d.block.y + 1, channels);
    }
    EXPECT(instances.size() == layernorm_ops::FORWARD_VECTORS);
    EXPECT(several_warps.size() == 2);
}

static void test_residual_matches_reference() {
    for (int64_t count : {8, 2048, 2056, 5000}) {
        values a(count, DTYPE_BF16, 0, 1), addend(count, DTYPE_BF16, 0, 1), out(count, DTYPE_BF16);
        run({&out}, [&] { return gpu->residual_forward(gpu, out.data(), a.data(), addend.data(), count); });
        EXPECT_OK(cpu_f64->residual_forward(cpu_f64, out.ref(), a.ref(), addend.ref(), count));
        expect_close(out, EXACT_BF16, 0, "residual", 1, (int)count);
    }
}

static void check_layernorm_backward(int64_t rows, int channels, enum dtype gradient, bool accumulate) {
    values in(rows * channels, DTYPE_BF16, 0.5, 2), d_out(rows * channels, DTYPE_BF16, 0, 1);
    values weight(channels, DTYPE_BF16, 1, 0.3), mean(rows, DTYPE_F32), rstd(rows, DTYPE_F32);
    std::vector<double> unused((size_t)(rows * channels));
    EXPECT_OK(cpu_f64->layernorm_forward(cpu_f64, unused.data(), mean.ref(), rstd.ref(), in.ref(),
        weight.ref(), weight.ref(), rows, channels));
    mean.upload();
    rstd.upload();
    values d_in = sums(rows * channels, DTYPE_BF16, accumulate);
    values d_weight = sums(channels, gradient, accumulate), d_bias = sums(channels, gradient, accumulate);
    run({&d_in, &d_weight, &d_bias}, [&] {
        return gpu->layernorm_backward(gpu, d_in.data(), d_weight.tensor(), d_bias.tensor(), d_out.data(),
            in.data(), weight.data(), mean.data(), rstd.data(), rows, channels, accumulate, accumulate);
    });
    EXPECT_OK(cpu_f64->layernorm_backward(cpu_f64, d_in.ref(), d_weight.ref_tensor(), d_bias.ref_tensor(),
        d_out.ref(), in.ref(), weight.ref(), mean.ref(), rstd.ref(), rows, channels, accumulate, accumulate));
    expect_close(d_in, EXACT_BF16, 1e-5, "layernorm d_in", rows, channels);
    expect_close(d_weight, EXACT_BF16, 1e-5, "layernorm d_weight", rows, channels);
    expect_close(d_bias, EXACT_BF16, 1e-5, "layernorm d_bias", rows, channels);
}

static void test_layernorm_backward_matches_reference_with_every_division_of_work() {
    std::set<int> instances, stages;
    std::set<std::pair<bool, bool>> divisions; /* several warps a group, several groups a block */
    for (gpu_kind kind : {H100, A100, RTX_4090}) {
        use(kind);
        for (int channels : channel_sizes) {
            layernorm_ops::division d = layernorm_ops::divide_backward(channels, kind.shared_bytes - 1024);
            int64_t stage = d.block.y * layernorm_ops::stage_bytes(d.vectors, d.block.x / CPU_LANES);
            bool is_new = instances.insert(d.vectors).second;
            is_new |= divisions.insert({d.block.x > CPU_LANES, d.block.y > 1}).second;
            is_new |= stages.insert(2 * stage <= kind.shared_bytes - 1024 ? 2 : 1).second;
            /* each block goes round several times, and the last time not with all groups */
            int64_t rows = 2 * kind.multiprocessors * (int64_t)d.block.y + 1;
            if (kind.shared_bytes == H100.shared_bytes) {
                check_layernorm_backward(rows, channels, channels % 256 == 0 ? DTYPE_F32 : DTYPE_BF16, true);
            }
            if (is_new || (channels == 12288 && kind.shared_bytes != H100.shared_bytes)) {
                check_layernorm_backward(rows, channels, DTYPE_F32, false);
            }
        }
        check_layernorm_backward(1, 2056, DTYPE_F32, true);
    }
    EXPECT(instances.size() == layernorm_ops::BACKWARD_VECTORS);
    EXPECT(divisions.size() == 3); /* a group of one warp is never alone */
    EXPECT(stages.size() == 2);
}

/* ---- linear ---- */

static void check_bias_gradient(int64_t rows, int columns, enum dtype gradient, bool accumulate) {
    values d_out(rows * columns, DTYPE_BF16, 0.1, 1), d_bias = sums(columns, gradient, accumulate);
    run({&d_bias}, [&] {
        return gpu->linear_backward_parameters(
            gpu, {NULL, gradient}, d_bias.tensor(), d_out.data(), NULL, rows, 8, columns, accumulate);
    });
    EXPECT_OK(cpu_f64->linear_backward_parameters(
        cpu_f64, {NULL, DTYPE_F64}, d_bias.ref_tensor(), d_out.ref(), NULL, rows, 8, columns, accumulate));
    expect_close(d_bias, EXACT_BF16, 1e-5, "bias gradient", rows, columns);
}

static void test_bias_gradient_matches_reference_over_several_blocks_each_way() {
    for (int columns : {8, 256, 264, 1000}) {
        check_bias_gradient(1, columns, DTYPE_F32, false);
        check_bias_gradient(63, columns, DTYPE_BF16, true);
        check_bias_gradient(1500, columns, DTYPE_F32, true);
    }
}

static void test_gelu_is_right_for_every_finite_bf16() {
    enum { COUNT = 1 << 16 };
    values in(COUNT, DTYPE_BF16), out(COUNT, DTYPE_BF16);
    for (int i = 0; i < COUNT; i++) {
        double value = bf16_to_float((uint16_t)i);
        in.reference[(size_t)i] = fabs(value) <= 1e12 ? value : 0; /* where x^3 and its root are finite */
    }
    in.upload();
    run({&out}, [&] { return gpu->gelu_forward(gpu, out.data(), in.data(), COUNT); });
    EXPECT_OK(cpu_f64->gelu_forward(cpu_f64, out.ref(), in.ref(), COUNT));
    expect_within(out, 1.01, 1e-20, "gelu", 1, COUNT);
    enum { FEW = 2056 }; /* the last block is not full */
    values few(FEW, DTYPE_BF16);
    run({&few}, [&] { return gpu->gelu_forward(gpu, few.data(), in.data(), FEW); });
    EXPECT(memcmp(few.data(), out.data(), few.memory.bytes) == 0);
}

/* ---- classifier ---- */

static void check_classifier(int64_t rows, int vocab_size, double logit_std, bool write_gradient) {
    int padded_vocab = (int)round_up(vocab_size + 1, 8);
    const double d_loss = 0.125;
    values logits(rows * padded_vocab, DTYPE_BF16, 0, logit_std), losses(rows, DTYPE_F32);
    std::vector<int32_t> targets;
    for (int64_t i = 0; i < rows; i++) {
        targets.push_back(i == 0 ? vocab_size - 1 : i % 3 == 1 ? -1 : (int32_t)(uniform() * vocab_size));
    }
    run({&logits, &losses}, [&] {
        return gpu->classifier(gpu, logits.data(), losses.data(), targets.data(), rows, vocab_size,
            padded_vocab, d_loss, write_gradient);
    });
    EXPECT_OK(cpu_f64->classifier(cpu_f64, logits.ref(), losses.ref(), targets.data(), rows, vocab_size,
        padded_vocab, d_loss, write_gradient));
    expect_within(logits, write_gradient ? EXACT_BF16 : 0, write_gradient ? 1e-6 * d_loss : 0, "d_logits",
        rows, vocab_size);
    expect_within(losses, 4, 1e-6 * (1 + 5 * logit_std), "losses", rows, vocab_size);
}

static void test_classifier_matches_reference_with_rows_in_shared_memory_and_without() {
    for (gpu_kind kind : {H100, RTX_4090}) {
        use(kind);
        for (int vocab_size : {1, 127, 4096, 16391, 60001}) { /* the last is too long for an RTX 4090 */
            check_classifier(3, vocab_size, 1, true);
            check_classifier(2, vocab_size, 30, false);
        }
    }
}

/* ---- sums and optimizer ---- */

static void check_sums(int64_t count, int64_t offset, enum dtype dtype) {
    values in(count + offset + 9, dtype, 0.5, 1); /* what lies around must not count */
    values sum(1, DTYPE_F32, 2.5, 0), squares(1, DTYPE_F32, 2.5, 0);
    for (int64_t i = offset; i < offset + count; i++) {
        double value = in.reference[(size_t)i];
        sum.reference[0] += value;
        squares.reference[0] += value * value;
    }
    double tolerance = 2e-6 * squares.reference[0];
    struct tensor from = tensor_at(in.tensor(), offset);
    run({&squares}, [&] { return gpu->sum_squares(gpu, squares.data(), from, count); });
    expect_within(squares, 0, tolerance, "sum of squares", offset, (int)count);
    if (dtype == DTYPE_F32) {
        run({&sum}, [&] { return gpu->sum(gpu, sum.data(), from.data, count); });
        expect_within(sum, 0, tolerance, "sum", offset, (int)count);
    }
}

static void test_sums_add_every_element_once_at_any_length_and_offset() {
    for (int64_t count : {0, 1, 2, 3, 4, 5, 31, 1023, 4097, 20011}) {
        for (int64_t offset = 0; offset < 4; offset++) {
            check_sums(count, offset, DTYPE_F32);
            check_sums(count, offset, DTYPE_BF16);
        }
    }
    /* more than all blocks take in one round */
    int64_t round = (int64_t)optimizer_ops::SUM_BLOCKS * optimizer_ops::SUM_THREADS * 4;
    check_sums(optimizer_ops::SUM_AHEAD * round + 3, 1, DTYPE_BF16);
}

static void test_step_control_decides_as_the_reference() {
    for (const control_case &c : control_cases) {
        values control(CONTROL_COUNT, DTYPE_F32);
        control_before(control.ref(), &c);
        control.upload();
        run({&control}, [&] { return gpu->step_control(gpu, control.data(), &c.limits); });
        EXPECT_OK(cpu_f64->step_control(cpu_f64, control.ref(), &c.limits));
        double got[CONTROL_COUNT];
        for (size_t i = 0; i < CONTROL_COUNT; i++) {
            got[i] = control.get(i);
        }
        expect_same_control(got, control.ref());
    }
}

static values control_values(bool apply) {
    values control(CONTROL_COUNT, DTYPE_F32);
    control_of_step_3(control.ref(), apply);
    control.upload();
    return control;
}

static void check_adamw(
    int64_t count, int64_t decay_count, enum dtype gradient, bool has_masters, bool apply) {
    const adamw_options options = {3e-3, 0.9, 0.95, 1e-8, 0.1};
    const double weight_size = 0.02, gradient_size = 1e-3;
    values control = control_values(apply);
    values parameters(count, DTYPE_BF16, 0, weight_size), master(count, DTYPE_F32, 0, weight_size);
    values first_moment(count, DTYPE_F32, 0, gradient_size), second_moment(count, DTYPE_F32);
    values gradients(count, gradient, 0, gradient_size);
    for (double &value : second_moment.reference) {
        value = gradient_size * gradient_size * (0.1 + uniform());
    }
    second_moment.upload();
    run({&parameters, &master, &first_moment, &second_moment}, [&] {
        return gpu->adamw(gpu, parameters.data(), has_masters ? master.data() : NULL, first_moment.data(),
            second_moment.data(), gradients.tensor(), count, decay_count, &options, control.data(), 0);
    });
    values &updated = has_masters ? master : parameters;
    EXPECT_OK(cpu_f64->adamw(cpu_f64, updated.ref(), NULL, first_moment.ref(), second_moment.ref(),
        gradients.ref_tensor(), count, decay_count, &options, control.ref(), 0));
    /* what is added may cancel: the absolute part goes by the size of the terms */
    double update_error = apply ? 2e-6 * weight_size : 0;
    expect_within(first_moment, 8, 0x1p-23 * gradient_size, "first moment", count, (int)decay_count);
    expect_within(
        second_moment, 8, 0x1p-23 * gradient_size * gradient_size, "second moment", count, (int)decay_count);
    expect_within(master, 8, update_error, "adamw master", count, (int)decay_count);
    if (has_masters && apply) {
        master.adopt();
        parameters.reference = master.reference;
    }
    expect_within(
        parameters, EXACT_BF16, has_masters ? 0 : update_error, "adamw parameters", count, (int)decay_count);
}

static void test_adamw_matches_reference() {
    for (int64_t count : {1, 2, 3, 4, 1021, 5003}) {
        for (bool masters : {false, true}) {
            check_adamw(count, count, DTYPE_F32, masters, true);
            check_adamw(count, count / 2, DTYPE_BF16, masters, true);
            check_adamw(count, 0, DTYPE_F32, masters, false);
        }
    }
}

static void test_stochastic_rounding_is_right_on_average() {
    enum { COUNT = 20000 };
    values control = control_values(true), parameters(COUNT, DTYPE_BF16);
    values master(COUNT, DTYPE_F32, 1.0 + 0.3 / 128, 0); /* 3 tenths of the way from one bf16 to the next */
    values moments(COUNT, DTYPE_F32, 0, 0), gradients(COUNT, DTYPE_F32, 0, 0);
    adamw_options still = {0, 0.9, 0.95, 1e-8, 0}; /* learning rate 0: the masters stay */
    run({&parameters}, [&] {
        return gpu->adamw(gpu, parameters.data(), master.data(), moments.data(), moments.data(),
            gradients.tensor(), COUNT, 0, &still, control.data(), 99);
    });
    int up = 0, down = 0;
    for (size_t i = 0; i < COUNT; i++) {
        up += parameters.get(i) == 1.0 + 1.0 / 128;
        down += parameters.get(i) == 1.0;
    }
    EXPECT(up + down == COUNT);
    EXPECT_NEAR((double)up / COUNT, 0.3, 5 * sqrt(0.3 * 0.7 / COUNT));
}

/* ---- values ---- */

static void expect_equal(const device_memory &a, const device_memory &b, const char *what) {
    if (memcmp(a.data, b.data, a.bytes) != 0 || !a.guards_are_untouched()) {
        printf("    %s: not the CPU's bits, or more of them\n", what);
        test_failures_in_this_++;
    }
}

static void test_convert_add_fill_and_random_give_the_cpus_bits() {
    enum { COUNT = 4099, OFFSET = 3 };
    for (enum dtype a : {DTYPE_F32, DTYPE_BF16, DTYPE_F16}) {
        for (enum dtype b : {DTYPE_F32, DTYPE_BF16, DTYPE_F16}) {
            std::vector<float> floats(COUNT);
            for (float &f : floats) {
                f = (float)(normal() * pow(10, 12 * uniform() - 6));
            }
            floats[10] = INFINITY, floats[11] = -0.0f;
            device_memory in(COUNT * dtype_bytes(a)),
                out[2] = {device_memory(COUNT * dtype_bytes(b)), device_memory(COUNT * dtype_bytes(b))};
            struct tensor from = {in.data, a};
            EXPECT_OK(cpu_f64->convert(cpu_f64, from, {floats.data(), DTYPE_F32}, COUNT));
            backend *backends[2] = {gpu, cpu_f64};
            for (int i = 0; i < 2; i++) {
                struct tensor to = {out[i].data, b};
                EXPECT_OK(backends[i]->fill(backends[i], to, 0.3, OFFSET));
                EXPECT_OK(backends[i]->convert(backends[i], tensor_at(to, OFFSET), from, COUNT - OFFSET));
            }
            expect_equal(out[0], out[1], "convert and fill");
            for (int i = 0; i < 2; i++) {
                EXPECT_OK(backends[i]->add(backends[i], {out[i].data, b}, from, COUNT));
            }
            expect_equal(out[0], out[1], "add");
            for (int i = 0; i < 2; i++) {
                EXPECT_OK(backends[i]->random_normal(
                    backends[i], {out[i].data, b}, COUNT, 5, 7, (int64_t)1 << 33, 0.02));
            }
            expect_equal(out[0], out[1], "random_normal");
        }
    }
}

/* ---- embedding ---- */

static void check_embedding(
    int batch, int seq_len, int channels, int vocab_size, double common, enum dtype gradient) {
    int64_t rows = (int64_t)batch * seq_len;
    double roundings =
        gradient == DTYPE_F32 ? 32 : EXACT_BF16; /* thousands of fp32 additions, or one to bf16 */
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < rows; i++) {
        tokens.push_back(uniform() < common ? vocab_size / 3 : (int32_t)(uniform() * vocab_size));
    }
    values token_table((int64_t)vocab_size * channels, DTYPE_BF16, 0, 1);
    values position_table((int64_t)seq_len * channels, DTYPE_BF16, 0, 1), out(rows * channels, DTYPE_BF16);
    run({&out}, [&] {
        return gpu->embedding_forward(gpu, out.data(), tokens.data(), token_table.data(),
            position_table.data(), batch, seq_len, channels);
    });
    EXPECT_OK(cpu_f64->embedding_forward(cpu_f64, out.ref(), tokens.data(), token_table.ref(),
        position_table.ref(), batch, seq_len, channels));
    expect_close(out, EXACT_BF16, 0, "embedding", rows, channels);
    for (bool accumulate : {false, true}) {
        values d_out(rows * channels, DTYPE_BF16, 0, 1),
            d_token = sums((int64_t)vocab_size * channels, gradient, true);
        values d_position = sums((int64_t)seq_len * channels, gradient, accumulate);
        run({&d_token, &d_position}, [&] {
            return gpu->embedding_backward(gpu, d_token.tensor(), d_position.tensor(), d_out.data(),
                tokens.data(), batch, seq_len, channels, vocab_size, accumulate);
        });
        EXPECT_OK(cpu_f64->embedding_backward(cpu_f64, d_token.ref_tensor(), d_position.ref_tensor(),
            d_out.ref(), tokens.data(), batch, seq_len, channels, vocab_size, accumulate));
        expect_close(d_token, roundings, 1e-5, "d_token_table", rows, channels);
        expect_close(d_position, roundings, 1e-5, "d_position_table", rows, channels);
    }
}

static void test_embedding_matches_reference() {
    check_embedding(1, 1, 8, 300, 0, DTYPE_F32);
    check_embedding(3, 31, 72, 257, 0, DTYPE_BF16);
    check_embedding(1, 33, 4104, 5, 0, DTYPE_F32);     /* several slabs of channels */
    check_embedding(2, 600, 8, 70000, 0.3, DTYPE_F32); /* two tiles; over 2^16: three sorting passes */
    check_embedding(3, 3000, 8, 256, 0, DTYPE_F32);    /* counts of more than two rounds to add up */
    check_embedding(5, 99, 264, 3, 1, DTYPE_F32);      /* one run through all pieces */
}

/* ---- attention over the cache ---- */

static void check_attention_cached(int count, int past, int heads, int kv_heads, int head_dim) {
    enum { BATCH = 2 };
    int capacity = past + count + 3;
    attention_shape shape = {BATCH, count, heads, kv_heads, head_dim};
    values cache((int64_t)BATCH * 2 * kv_heads * capacity * head_dim, DTYPE_BF16, 0, 1);
    for (int64_t i = 0; i < (int64_t)cache.reference.size(); i++) {
        if (i / head_dim % capacity >= past) {
            cache.reference[(size_t)i] = NAN; /* what is not there must not be read */
        }
    }
    cache.upload();
    values qkv((int64_t)BATCH * count * (heads + 2 * kv_heads) * head_dim, DTYPE_BF16, 0, 1);
    values out((int64_t)BATCH * count * heads * head_dim, DTYPE_BF16);
    run({&out, &cache}, [&] {
        return gpu->attention_cached(gpu, out.data(), cache.data(), qkv.data(), shape, past, capacity);
    });
    EXPECT_OK(cpu_f64->attention_cached(cpu_f64, out.ref(), cache.ref(), qkv.ref(), shape, past, capacity));
    expect_close(out, EXACT_BF16, 2e-5, "attention over the cache", past, head_dim);
    for (size_t i = 0; i < cache.reference.size(); i++) {
        double got = cache.get(i), expected = cache.reference[i];
        if (!(got == expected || (isnan(got) && isnan(expected)))) {
            printf("    cache of %d: element %zu is %g, not %g\n", past, i, got, expected);
            test_failures_in_this_++;
            break;
        }
    }
}

static void test_attention_over_the_cache_matches_reference() {
    for (int head_dim : {24, 64, 72, 256}) { /* 4, 8, 16 and 32 lanes a position */
        check_attention_cached(3, 0, 2, 1, head_dim);
        check_attention_cached(2, 5, 1, 1, head_dim);
        check_attention_cached(1, 600, 4, 2, head_dim); /* more than all groups take at once */
    }
}

int main() {
    state.scratch = NULL;
    gpu->state = &state;
    classifier_ops::cuda_classifier_install(gpu);
    decode_ops::cuda_decode_install(gpu);
    embedding_ops::cuda_embedding_install(gpu);
    layernorm_ops::cuda_layernorm_install(gpu);
    linear_ops::cuda_linear_install(gpu);
    optimizer_ops::cuda_optimizer_install(gpu);
    random_ops::cuda_random_install(gpu);
    use(H100);
    if (backend_cpu_f64_create(&cpu_f64, 1) != STATUS_OK) {
        printf("%s\n0 passed, 1 failed\n", error_message());
        return 1;
    }
    RUN(test_layernorm_forward_matches_reference_with_every_division_of_work);
    RUN(test_residual_matches_reference);
    RUN(test_layernorm_backward_matches_reference_with_every_division_of_work);
    RUN(test_bias_gradient_matches_reference_over_several_blocks_each_way);
    RUN(test_gelu_is_right_for_every_finite_bf16);
    RUN(test_classifier_matches_reference_with_rows_in_shared_memory_and_without);
    RUN(test_sums_add_every_element_once_at_any_length_and_offset);
    RUN(test_step_control_decides_as_the_reference);
    RUN(test_adamw_matches_reference);
    RUN(test_stochastic_rounding_is_right_on_average);
    RUN(test_convert_add_fill_and_random_give_the_cpus_bits);
    RUN(test_embedding_matches_reference);
    RUN(test_attention_over_the_cache_matches_reference);
    cpu_f64->free(cpu_f64);
    return test_summary();
}
