/* The ops' kernels for GPUs, run on the CPU by ops_on_cpu.h together with the host code that divides the work and launches
   them, against the CPU backend in fp64: every template instance and every division of work, in shapes as small as that
   allows. test_op_kernels.sh compiles and runs this; gpu_ops.c judges the same ops on a GPU, in real sizes.

   Every op runs twice, with different timing (early and late copies, warps in both orders), and must give the same bits.
   Outputs begin as NaN or as what is added to; all memory lies between guards that must stay as they are. */
#include "test/ops_on_cpu.h"

#include "llmc/cuda/cuda.cuh"
#include "llmc/random.h"
#include "test/test.h"

#include <set>
#include <tuple>

#include "llmc/cuda/partials.cu"
namespace layernorm_ops {
#include "llmc/cuda/layernorm.cu"
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
    device_memory(const device_memory &) = delete;
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

static void must(enum status status) {
    if (status != STATUS_OK) {
        printf("    %s\n", error_message());
        test_failures_in_this_++;
    }
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
        cpu.copies_late = cpu.last_warp_first = timing == 1;
        for (size_t i = 0; i < outputs.size(); i++) {
            std::copy(before[i].begin(), before[i].end(), outputs[i]->memory.data);
        }
        must(op());
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
            must(cpu_f64->residual_forward(cpu_f64, sum.ref(), in.ref(), addend.ref(), rows * channels));
            expect_close(sum, EXACT_BF16, 0, "residual sum", rows, channels);
            sum.adopt();
        } else {
            run({&out, &mean, &rstd}, [&] {
                return gpu->layernorm_forward(gpu, out.data(), mean.data(), rstd.data(), in.data(),
                    weight.data(), bias.data(), rows, channels);
            });
        }
        must(cpu_f64->layernorm_forward(cpu_f64, out.ref(), mean.ref(), rstd.ref(), normed.ref(),
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
        must(cpu_f64->residual_forward(cpu_f64, out.ref(), a.ref(), addend.ref(), count));
        expect_close(out, EXACT_BF16, 0, "residual", 1, (int)count);
    }
}

static void check_layernorm_backward(int64_t rows, int channels, enum dtype gradient, bool accumulate) {
    values in(rows * channels, DTYPE_BF16, 0.5, 2), d_out(rows * channels, DTYPE_BF16, 0, 1);
    values weight(channels, DTYPE_BF16, 1, 0.3), mean(rows, DTYPE_F32), rstd(rows, DTYPE_F32);
    std::vector<double> unused((size_t)(rows * channels));
    must(cpu_f64->layernorm_forward(cpu_f64, unused.data(), mean.ref(), rstd.ref(), in.ref(), weight.ref(),
        weight.ref(), rows, channels));
    mean.upload();
    rstd.upload();
    values d_in = sums(rows * channels, DTYPE_BF16, accumulate);
    values d_weight = sums(channels, gradient, accumulate), d_bias = sums(channels, gradient, accumulate);
    run({&d_in, &d_weight, &d_bias}, [&] {
        return gpu->layernorm_backward(gpu, d_in.data(), d_weight.tensor(), d_bias.tensor(), d_out.data(),
            in.data(), weight.data(), mean.data(), rstd.data(), rows, channels, accumulate, accumulate);
    });
    must(cpu_f64->layernorm_backward(cpu_f64, d_in.ref(), d_weight.ref_tensor(), d_bias.ref_tensor(),
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

int main() {
    state.scratch = NULL;
    gpu->state = &state;
    layernorm_ops::cuda_layernorm_install(gpu);
    use(H100);
    if (backend_cpu_f64_create(&cpu_f64, 1) != STATUS_OK) {
        printf("%s\n0 passed, 1 failed\n", error_message());
        return 1;
    }
    RUN(test_layernorm_forward_matches_reference_with_every_division_of_work);
    RUN(test_residual_matches_reference);
    RUN(test_layernorm_backward_matches_reference_with_every_division_of_work);
    cpu_f64->free(cpu_f64);
    return test_summary();
}
