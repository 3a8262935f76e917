/* Enough of CUDA to run the tiled kernels of attention/ on a CPU, thread by thread, as they are: it stands in for
   attention/device.cuh and attention/mma_sm80.cuh, and their .cu files are then included as C++.

   A thread block's threads are fibers of one CPU thread, a switch away from each other; thread blocks run one after the
   other. A fiber runs until it has to wait: at a barrier, or in an instruction that a whole warp takes part in (mma,
   ldmatrix, shuffles), which gathers what every lane brings and gives every lane its own. Warps run as far as they can
   before the next one gets its turn. Asynchronous copies happen at once, or as late as they may: when they are waited
   for. Between those two, and with the warps in both orders, a missing wait or barrier has a good chance to be seen; so
   has any access outside of shared memory, which is counted and full of NaN at first. What is not looked at: speed, bank
   conflicts, races between thread blocks. */
#ifndef TEST_CUDA_ON_CPU_H
#define TEST_CUDA_ON_CPU_H

#define ATTENTION_DEVICE_CUH
#define ATTENTION_MMA_SM80_CUH
#define COMPILED_FOR(shared_kb) true

#include "attention/kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <ucontext.h>
#include <vector>

using std::max;

/* ---- the language ---- */

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes)

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
template <typename A, typename B> inline typename std::common_type<A, B>::type min(A a, B b) {
    return a < b ? a : b;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* ---- threads ---- */

struct cpu_index {
    unsigned x;
};

struct cpu_copy {
    uint32_t to;
    const void *from;
    bool valid;
};

struct cpu_thread {
    ucontext_t context;
    std::vector<char> stack;
    cpu_index index;
    bool done;
    uint32_t brought[8]; /* to the instruction that the warp is in */
    std::vector<std::vector<cpu_copy>> groups;
    std::vector<cpu_copy> open_group;
};

struct cpu_barrier {
    int arrived;
    unsigned passed; /* how often all have */
};

enum { CPU_LANES = 32, CPU_MOST_THREADS = 512, CPU_SHARED_BYTES = 232448, CPU_NAMED_BARRIERS = 16 };

/* The one simulated multiprocessor. */
static struct {
    cpu_thread threads[CPU_MOST_THREADS];
    cpu_thread *running;
    ucontext_t scheduler;
    int thread_count;
    cpu_index block, grid;
    int shared_bytes; /* that the block asked for */
    cpu_barrier warps[CPU_MOST_THREADS / CPU_LANES], named[CPU_NAMED_BARRIERS];
    void (*body)();
    bool copies_late, last_warp_first;
} cpu;

alignas(1024) unsigned char shared[CPU_SHARED_BYTES]; /* the kernels' dynamic shared memory, by its name */

#define threadIdx (cpu.running->index)
#define blockIdx (cpu.block)
#define gridDim (cpu.grid)

inline void cpu_fail(const char *what) {
    printf("    cuda_on_cpu: %s (block %u, thread %u)\n", what, cpu.block.x, threadIdx.x);
    exit(1);
}

inline void cpu_wait(cpu_barrier &b, int threads) {
    unsigned passed = b.passed;
    if (++b.arrived == threads) {
        b.arrived = 0;
        b.passed++;
    }
    while (b.passed == passed) {
        swapcontext(&cpu.running->context, &cpu.scheduler);
    }
}

inline cpu_barrier &cpu_warp_barrier() {
    return cpu.warps[threadIdx.x / CPU_LANES];
}

/* What lane `lane` of this warp brought. */
inline const uint32_t *cpu_lane(unsigned lane) {
    return cpu.threads[threadIdx.x / CPU_LANES * CPU_LANES + lane].brought;
}

/* All lanes bring, all take, all go on. */
template <typename Take> inline auto cpu_with_warp(const uint32_t *bring, int count, Take take) {
    memcpy(cpu.running->brought, bring, (size_t)count * sizeof *bring);
    cpu_wait(cpu_warp_barrier(), CPU_LANES);
    auto taken = take();
    cpu_wait(cpu_warp_barrier(), CPU_LANES);
    return taken;
}

inline void cpu_enter() {
    cpu.body();
    cpu.running->done = true;
    swapcontext(&cpu.running->context, &cpu.scheduler);
}

/* Runs the fibers of a warp once each; whether any is left. */
inline bool cpu_run_warp(int warp) {
    bool left = false;
    for (int lane = 0; lane < CPU_LANES; lane++) {
        cpu_thread &t = cpu.threads[warp * CPU_LANES + lane];
        if (!t.done) {
            cpu.running = &t;
            swapcontext(&cpu.scheduler, &t.context);
            left |= !t.done;
        }
    }
    return left;
}

inline void cpu_run_block(unsigned block) {
    enum { STACK_BYTES = 128 * 1024, MOST_ROUNDS = 1000000 };
    cpu.block.x = block;
    memset(shared, 0xFF, sizeof shared);
    memset(cpu.warps, 0, sizeof cpu.warps);
    memset(cpu.named, 0, sizeof cpu.named);
    for (int i = 0; i < cpu.thread_count; i++) {
        cpu_thread &t = cpu.threads[i];
        t.stack.resize(STACK_BYTES);
        t.index.x = (unsigned)i;
        t.done = false;
        t.groups.clear();
        t.open_group.clear();
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data();
        t.context.uc_stack.ss_size = STACK_BYTES;
        t.context.uc_link = nullptr;
        makecontext(&t.context, cpu_enter, 0);
    }
    int warps = cpu.thread_count / CPU_LANES;
    bool left = true;
    for (int round = 0; left; round++) {
        left = false;
        for (int i = 0; i < warps; i++) {
            int warp = cpu.last_warp_first ? warps - 1 - i : i;
            unsigned passed;
            bool warp_left;
            do { /* as far as it goes by itself */
                passed = cpu.warps[warp].passed;
                warp_left = cpu_run_warp(warp);
            } while (warp_left && cpu.warps[warp].passed != passed);
            left |= warp_left;
        }
        if (round == MOST_ROUNDS) {
            cpu_fail("threads wait for each other");
        }
    }
}

/* ---- device.cuh ---- */

template <typename Arguments> struct cpu_call {
    static inline void (*kernel)(Arguments);
    static inline const Arguments *arguments;
    static void run() {
        kernel(*arguments);
    }
};

template <typename Arguments>
enum status launch(const char *what, void (*kernel)(Arguments), int64_t blocks, int threads, int shared_bytes,
    void *stream, const Arguments &arguments, bool overlap = false) {
    (void)stream, (void)overlap;
    if (threads > CPU_MOST_THREADS || shared_bytes > CPU_SHARED_BYTES) {
        return fail("%s: %d threads and %d bytes are too many", what, threads, shared_bytes);
    }
    cpu_call<Arguments>::kernel = kernel;
    cpu_call<Arguments>::arguments = &arguments;
    cpu.body = cpu_call<Arguments>::run;
    cpu.thread_count = threads;
    cpu.shared_bytes = shared_bytes;
    cpu.grid.x = (unsigned)blocks;
    for (int64_t block = 0; block < blocks; block++) {
        cpu_run_block((unsigned)block);
    }
    return STATUS_OK;
}

template <enum dtype TYPE> inline uint32_t pack(float low, float high) {
    bool bf16 = TYPE == DTYPE_BF16;
    uint32_t l = bf16 ? float_to_bf16(low) : float_to_f16(low),
             h = bf16 ? float_to_bf16(high) : float_to_f16(high);
    return l | h << 16;
}

template <enum dtype TYPE> inline float2 unpack(uint32_t bits) {
    uint16_t low = (uint16_t)bits, high = (uint16_t)(bits >> 16);
    return TYPE == DTYPE_BF16 ? float2{bf16_to_float(low), bf16_to_float(high)}
                              : float2{f16_to_float(low), f16_to_float(high)};
}

inline float exp2_fast(float x) {
    return exp2f(x);
}

struct device_tensor {
    uint16_t *data;
    int64_t batch_stride, seq_stride, head_stride;

    uint16_t *row(int64_t batch, int64_t position, int64_t head) const {
        return data + batch * batch_stride + position * seq_stride + head * head_stride;
    }
};

static inline device_tensor on_device(const attention_tensor &t) {
    return {(uint16_t *)t.data, t.batch_stride, t.seq_stride, t.head_stride};
}

/* ---- instructions ---- */

inline void __syncthreads() {
    cpu_wait(cpu.named[0], cpu.thread_count);
}
inline void barrier(int which, int threads) {
    cpu_wait(cpu.named[which], threads);
}
/* launches do not overlap here */
inline void launch_next() {
}
inline void wait_for_previous() {
}
inline void __syncwarp() {
    cpu_wait(cpu_warp_barrier(), CPU_LANES);
}

template <typename T> inline T cpu_shuffle(T value, unsigned from) {
    static_assert(sizeof(T) == sizeof(uint32_t), "32 bits");
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t taken = cpu_with_warp(&bits, 1, [&] { return cpu_lane(from)[0]; });
    memcpy(&value, &taken, sizeof value);
    return value;
}
template <typename T> inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return cpu_shuffle(value, threadIdx.x % CPU_LANES ^ (unsigned)mask);
}
template <typename T> inline T __shfl_sync(unsigned, T value, int lane) {
    return cpu_shuffle(value, (unsigned)lane);
}
inline bool __any_sync(unsigned, bool value) {
    uint32_t bits = value;
    return cpu_with_warp(&bits, 1, [] {
        bool any = false;
        for (unsigned lane = 0; lane < CPU_LANES; lane++) {
            any |= cpu_lane(lane)[0] != 0;
        }
        return any;
    });
}

inline float atomicAdd(float *to, float value) {
    float before = *to;
    *to += value;
    return before;
}
inline void reduce_add_4(float *to, const float (&c)[4]) {
    for (int i = 0; i < 4; i++) {
        to[i] += c[i];
    }
}

inline uint32_t shared_address(const void *pointer) {
    return (uint32_t)((const unsigned char *)pointer - shared);
}

/* The bytes at a shared address, aligned, inside of what the block asked for. */
inline unsigned char *cpu_shared(uint32_t address, uint32_t bytes) {
    if (address % bytes != 0 || address + bytes > (uint32_t)cpu.shared_bytes) {
        cpu_fail("access outside of shared memory, or misaligned");
    }
    return shared + address;
}
template <typename T> inline T cpu_load(uint32_t address) {
    T value;
    memcpy(&value, cpu_shared(address, sizeof value), sizeof value);
    return value;
}
template <typename T> inline void cpu_store(uint32_t address, const T &value) {
    memcpy(cpu_shared(address, sizeof value), &value, sizeof value);
}
inline void store_shared(uint32_t address, uint32_t bits) {
    cpu_store(address, bits);
}
inline uint32_t load_shared(uint32_t address) {
    return cpu_load<uint32_t>(address);
}
inline uint4 load_shared_chunk(uint32_t address) {
    return cpu_load<uint4>(address);
}
inline void store_shared_float(uint32_t address, float value) {
    cpu_store(address, value);
}
inline float load_shared_float(uint32_t address) {
    return cpu_load<float>(address);
}
inline void store_shared_floats(uint32_t address, float4 values) {
    cpu_store(address, values);
}
inline float4 load_shared_floats(uint32_t address) {
    return cpu_load<float4>(address);
}
inline float2 load_shared_pair(uint32_t address) {
    return cpu_load<float2>(address);
}

/* Matrix i has its rows where lanes 8 i to 8 i + 7 say. Lane l gets elements (l / 4, 2 (l % 4)) and the next one in the
   row; transposed, in the column. */
inline void cpu_ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed) {
    cpu_with_warp(&address, 1, [&] {
        unsigned lane = threadIdx.x % CPU_LANES;
        for (unsigned i = 0; i < 4; i++) {
            uint16_t pair[2];
            for (unsigned e = 0; e < 2; e++) {
                unsigned row = transposed ? lane % 4 * 2 + e : lane / 4,
                         column = transposed ? lane / 4 : lane % 4 * 2 + e;
                memcpy(&pair[e], cpu_shared(cpu_lane(8 * i + row)[0], 16) + 2 * column, sizeof pair[e]);
            }
            r[i] = pair[0] | (uint32_t)pair[1] << 16;
        }
        return 0;
    });
}
inline void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    cpu_ldmatrix(r, address, false);
}
inline void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    cpu_ldmatrix(r, address, true);
}

/* Element k of row `row` of A, or of column `column` of B, by the layout that mma_sm80.cuh describes. */
template <enum dtype TYPE> inline float cpu_a(int row, int k) {
    float2 pair = unpack<TYPE>(cpu_lane((unsigned)(row % 8 * 4 + k % 8 / 2))[row / 8 + 2 * (k / 8)]);
    return k % 2 == 0 ? pair.x : pair.y;
}
template <enum dtype TYPE> inline float cpu_b(int k, int column) {
    float2 pair = unpack<TYPE>(cpu_lane((unsigned)(column * 4 + k % 8 / 2))[4 + k / 8]);
    return k % 2 == 0 ? pair.x : pair.y;
}

template <enum dtype TYPE> inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t bring[] = {a[0], a[1], a[2], a[3], b0, b1};
    cpu_with_warp(bring, 6, [&] {
        int lane = (int)(threadIdx.x % CPU_LANES);
        for (int i = 0; i < 4; i++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) {
                sum += cpu_a<TYPE>(lane / 4 + i / 2 * 8, k) * cpu_b<TYPE>(k, lane % 4 * 2 + i % 2);
            }
            c[i] += sum;
        }
        return 0;
    });
}

inline void cpu_copy_now(const cpu_copy &copy) {
    unsigned char *to = cpu_shared(copy.to, 16);
    if (copy.valid) {
        memcpy(to, copy.from, 16);
    } else {
        memset(to, 0, 16);
    }
}
inline void copy_async(uint32_t address, const void *from, bool valid) {
    if (valid && (uintptr_t)from % 16 != 0) {
        cpu_fail("copy from a misaligned address");
    }
    cpu_copy copy = {address, from, valid};
    if (cpu.copies_late) {
        cpu.running->open_group.push_back(copy);
    } else {
        cpu_copy_now(copy);
    }
}
inline void copy_commit() {
    cpu.running->groups.push_back(cpu.running->open_group);
    cpu.running->open_group.clear();
}
template <int PENDING> inline void copy_wait() {
    auto &groups = cpu.running->groups;
    while ((int)groups.size() > PENDING) {
        for (const cpu_copy &copy : groups[0]) {
            cpu_copy_now(copy);
        }
        groups.erase(groups.begin());
    }
}

#endif
