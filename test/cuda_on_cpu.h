/* Enough of CUDA to run kernels on a CPU, thread by thread, as they are: attention_on_cpu.h and ops_on_cpu.h make them
   C++ with it.

   Threads are fibers of one CPU thread, a switch away from each other; thread blocks run one after the other, or two at a
   time, which may be of two kernels whose launches overlap. A fiber runs until it has to wait: at a barrier, for a
   counter, or in an instruction that a whole warp takes part in (mma, ldmatrix, shuffles), which gathers what every lane
   brings and gives every lane its own. Warps run as far as they can before the next one gets its turn. Asynchronous
   copies happen at once, or as late as they may: when they are waited for. Between those two, and with warps and thread
   blocks in both orders or held up at random, a missing wait or barrier has a good chance to be seen; so has any access
   outside of shared memory, which is counted and full of NaN at first. What is not looked at: speed, bank conflicts, the
   order in which other thread blocks see what one writes.

   C++ has no place for __launch_bounds__(n) in front of a function: cuda_as_cxx in frame.sh makes it a statement,
   cpu_launch_bounds(n), at the beginning of the body. */
#ifndef TEST_CUDA_ON_CPU_H
#define TEST_CUDA_ON_CPU_H

#include "llmc/common.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <list>
#include <memory>
#include <setjmp.h>
#include <type_traits>
#include <ucontext.h>
#include <vector>

using std::max;

/* ---- the language ---- */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __align__(bytes)

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
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
    unsigned x, y;
};

struct cpu_copy {
    uint32_t to;
    const void *from;
    bool valid;
};

struct cpu_thread {
    std::unique_ptr<char[]> stack; /* once it has one, the fiber is at `place` */
    jmp_buf place;
    int block; /* which of those that run at a time */
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

enum {
    CPU_MOST_BLOCKS = 2,
    CPU_LANES = 32,
    CPU_MOST_THREADS = 1024,
    CPU_SHARED_BYTES = 232448,
    CPU_NAMED_BARRIERS = 16
};

/* A kernel that has been launched and has not ended. */
struct cpu_grid {
    cpu_index size, block;
    int threads, shared_bytes; /* of a block */
    std::function<void()> body;
    int most_blocks;                               /* at a time */
    std::vector<std::function<void()>> last_deeds; /* copies that its blocks have not waited for */
    unsigned started, asked,
        done; /* of its blocks; asked: for the next kernel's start, and those that are done */

    unsigned blocks() const {
        return size.x * size.y;
    }
};

struct cpu_block {
    cpu_thread threads[CPU_MOST_THREADS];
    cpu_index index;
    cpu_grid *grid;
    bool asked;
    int held_up, warps_held_up[CPU_MOST_THREADS / CPU_LANES]; /* for so many rounds more */
    cpu_barrier warps[CPU_MOST_THREADS / CPU_LANES], named[CPU_NAMED_BARRIERS];
    bool left; /* whether any of its threads is */
};

/* The one simulated multiprocessor. */
static struct {
    cpu_block blocks[CPU_MOST_BLOCKS];
    cpu_thread *running;
    jmp_buf scheduler;
    std::list<cpu_grid> grids;     /* in the order of their launches */
    bool copies_late, last_first;  /* last_first: of warps and of thread blocks */
    uint64_t random;               /* not 0: warps and thread blocks are held up as these numbers have it */
    void (*block_ends)(int place); /* NULL, or called when all threads of a block have ended */
} cpu;

/* The kernels' dynamic shared memory, by its name: of one block behind the other, and addresses are the same for all. */
alignas(1024) unsigned char shared[CPU_MOST_BLOCKS * CPU_SHARED_BYTES];

inline cpu_block &cpu_my_block() {
    return cpu.blocks[cpu.running->block];
}

#define threadIdx (cpu.running->index)
#define blockIdx (cpu_my_block().index)
static cpu_index gridDim, blockDim; /* of the running thread */

inline void cpu_fail(const char *what) {
    printf("    cuda_on_cpu: %s (block %u %u, thread %u %u)\n", what, blockIdx.x, blockIdx.y, threadIdx.x,
        threadIdx.y);
    exit(1);
}

/* What a GPU would not launch. */
inline void cpu_launch_bounds(int most_threads, int least_blocks = 1) {
    (void)least_blocks; /* is for the compiler */
    if (cpu_my_block().grid->threads > most_threads) {
        cpu_fail("a block has more threads than its kernel's __launch_bounds__");
    }
}

/* Switches by setjmp and longjmp: those of ucontext.h ask the kernel for the signal mask each time. */
__attribute__((noinline)) inline void cpu_yield() {
    if (_setjmp(cpu.running->place) == 0) {
        _longjmp(cpu.scheduler, 1);
    }
}

/* A fiber runs the bodies of one block after the other. */
inline void cpu_enter() {
    for (;;) {
        cpu_my_block().grid->body();
        cpu.running->done = true;
        cpu_yield();
    }
}

/* Goes on with a fiber until it yields. */
__attribute__((noinline)) inline void cpu_resume(cpu_thread &t) {
    enum { STACK_BYTES = 100000 }; /* no power of two: stacks use other sets of the cache */
    cpu.running = &t;
    gridDim = cpu_my_block().grid->size, blockDim = cpu_my_block().grid->block;
    if (_setjmp(cpu.scheduler) != 0) {
        return;
    }
    if (t.stack) {
        _longjmp(t.place, 1);
    }
    t.stack.reset(new char[STACK_BYTES]);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = t.stack.get();
    context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&context, cpu_enter, 0);
    setcontext(&context);
}

inline void cpu_wait(cpu_barrier &b, int threads) {
    unsigned passed = b.passed;
    if (++b.arrived == threads) {
        b.arrived = 0;
        b.passed++;
    }
    while (b.passed == passed) {
        cpu_yield();
    }
}

/* The running thread's number in its block. */
inline int cpu_number() {
    return (int)(cpu.running - cpu_my_block().threads);
}
inline int cpu_my_lane() {
    return cpu_number() % CPU_LANES;
}

inline cpu_barrier &cpu_warp_barrier() {
    return cpu_my_block().warps[cpu_number() / CPU_LANES];
}

/* What lane `lane` of this warp brought. */
inline const uint32_t *cpu_lane(unsigned lane) {
    return cpu_my_block().threads[cpu_number() / CPU_LANES * CPU_LANES + (int)lane].brought;
}

/* All lanes bring, all take, all go on. */
template <typename Take> inline auto cpu_with_warp(const uint32_t *bring, int count, Take take) {
    memcpy(cpu.running->brought, bring, (size_t)count * sizeof *bring);
    cpu_wait(cpu_warp_barrier(), CPU_LANES);
    auto taken = take();
    cpu_wait(cpu_warp_barrier(), CPU_LANES);
    return taken;
}

/* Runs the fibers of a warp once each; whether any is left. */
inline bool cpu_run_warp(cpu_block &block, int warp) {
    bool left = false;
    int end = std::min((warp + 1) * CPU_LANES, block.grid->threads);
    for (int i = warp * CPU_LANES; i < end; i++) {
        cpu_thread &t = block.threads[i];
        if (!t.done) {
            cpu_resume(t);
            left |= !t.done;
        }
    }
    return left;
}

inline void cpu_start_block(int place, cpu_grid &grid) {
    cpu_block &block = cpu.blocks[place];
    unsigned number = cpu.last_first ? grid.blocks() - 1 - grid.started : grid.started;
    block.index = {number % grid.size.x, number / grid.size.x};
    block.grid = &grid;
    block.asked = false;
    block.left = true;
    block.held_up = 0;
    memset(block.warps_held_up, 0, sizeof block.warps_held_up);
    grid.started++;
    memset(shared + place * CPU_SHARED_BYTES, 0xFF, CPU_SHARED_BYTES);
    memset(block.warps, 0, sizeof block.warps);
    memset(block.named, 0, sizeof block.named);
    for (int i = 0; i < grid.threads; i++) {
        cpu_thread &t = block.threads[i];
        t.block = place;
        t.index = {(unsigned)i % grid.block.x, (unsigned)i / grid.block.x};
        t.done = false;
        t.groups.clear();
        t.open_group.clear();
    }
}

/* The block has no objection to the next kernel's start. */
inline void cpu_ask_for_next(cpu_block &block) {
    block.grid->asked += !block.asked;
    block.asked = true;
}

inline void cpu_end_block(int place) {
    cpu_block &block = cpu.blocks[place];
    cpu_grid &grid = *block.grid;
    if (cpu.block_ends != nullptr) {
        cpu.block_ends(place);
    }
    const unsigned char *rest =
        shared + place * CPU_SHARED_BYTES + grid.shared_bytes; /* all of it is 0xFF still */
    size_t bytes = CPU_SHARED_BYTES - (size_t)grid.shared_bytes;
    if (bytes > 0 && (rest[0] != 0xFF || memcmp(rest, rest + 1, bytes - 1) != 0)) {
        cpu_fail("a write behind the shared memory that the block asked for");
    }
    cpu_ask_for_next(block);
    if (++grid.done == grid.blocks()) {
        if (&grid != &cpu.grids.front()) {
            cpu_fail("a kernel ends before the one that it overlaps with: what follows waits for the last "
                     "one only");
        }
        for (const std::function<void()> &deed : grid.last_deeds) {
            deed();
        }
        cpu.grids.pop_front();
    }
}

/* True once in so many times, at random, if anything is. */
inline bool cpu_sometimes(unsigned times) {
    cpu.random ^= cpu.random << 13, cpu.random ^= cpu.random >> 7, cpu.random ^= cpu.random << 17;
    return cpu.random != 0 && (cpu.random >> 32) % times == 0;
}

/* Whether what has `rounds` to wait is held up in this one; once in `times` it is for `most` rounds from now on. */
inline bool cpu_is_held_up(int &rounds, unsigned times, int most) {
    rounds = rounds > 0 ? rounds - 1 : cpu_sometimes(times) ? most : 0;
    return rounds > 0;
}

/* Runs the warps of a block, each as far as it goes by itself. */
inline void cpu_run_block(int place) {
    cpu_block &block = cpu.blocks[place];
    int warps = (block.grid->threads + CPU_LANES - 1) / CPU_LANES;
    block.left = false;
    for (int i = 0; i < warps; i++) {
        int warp = cpu.last_first ? warps - 1 - i : i;
        if (cpu_is_held_up(block.warps_held_up[warp], 64, 40)) {
            block.left = true;
            continue;
        }
        unsigned passed;
        bool left;
        do {
            passed = block.warps[warp].passed;
            left = cpu_run_warp(block, warp);
        } while (left && block.warps[warp].passed != passed);
        block.left |= left;
    }
    if (!block.left) {
        cpu_end_block(place);
    }
}

/* The kernel whose block is the next one to start: the oldest that has any left, once the one before it allows it. */
inline cpu_grid *cpu_next_grid() {
    bool allowed = true;
    for (cpu_grid &grid : cpu.grids) {
        if (grid.started < grid.blocks()) {
            return allowed && grid.started - grid.done < (unsigned)grid.most_blocks ? &grid : nullptr;
        }
        allowed = grid.asked == grid.blocks();
    }
    return nullptr;
}

/* Runs what has been launched. With last_first the block that started last is much faster than the one before: it overtakes
   it unless it waits. */
inline void cpu_run() {
    enum { MOST_ROUNDS = 1000000, FAST = 10 };
    int newest = 0;
    for (int round = 0; !cpu.grids.empty(); round++) {
        for (int place = 0; place < CPU_MOST_BLOCKS; place++) {
            cpu_grid *grid = cpu.blocks[place].left ? nullptr : cpu_next_grid();
            if (grid != nullptr) {
                cpu_start_block(place, *grid);
                cpu_run_block(place); /* as far as to its place in the order of starting */
                newest = place;
                round = 0;
            }
        }
        for (int place = 0; place < CPU_MOST_BLOCKS; place++) {
            int turns = cpu.last_first && place == newest ? FAST : 1;
            bool held_up = cpu_is_held_up(cpu.blocks[place].held_up, 256, 200);
            for (int turn = 0; turn < turns && !held_up && cpu.blocks[place].left; turn++) {
                cpu_run_block(place);
            }
        }
        if (round == MOST_ROUNDS) {
            cpu_fail("threads wait for each other");
        }
    }
}

/* What is launched runs when cpu_run is called: here, before a kernel that does not overlap with it. */
inline void cpu_launch(cpu_index grid, cpu_index block, int shared_bytes, const std::function<void()> &body,
    int blocks_at_a_time = 1, bool overlaps = false) {
    if (!overlaps) {
        cpu_run();
    }
    cpu.grids.push_back(
        {grid, block, (int)(block.x * block.y), shared_bytes, body, blocks_at_a_time, {}, 0, 0, 0});
}

/* ---- instructions ---- */

inline float exp2_fast(float x) {
    return exp2f(x);
}

inline void __syncthreads() {
    cpu_wait(cpu_my_block().named[0], cpu_my_block().grid->threads);
}
inline void barrier(int which, int threads) {
    if (which < 0 || which >= CPU_NAMED_BARRIERS || threads % CPU_LANES != 0) {
        cpu_fail("no such barrier, or not for whole warps");
    }
    cpu_wait(cpu_my_block().named[which], threads);
}
/* With last_first a block takes its time from here on, the second one more: the next kernel begins before it has done
   anything, if that is allowed. */
inline void launch_next() {
    enum { SLOW = 20 };
    cpu_ask_for_next(cpu_my_block());
    for (int round = 0; cpu.last_first && round < SLOW * (cpu.running->block + 1); round++) {
        cpu_yield();
    }
}
inline void wait_for_previous() {
    while (&cpu.grids.front() != cpu_my_block().grid) {
        cpu_yield();
    }
}
inline void __syncwarp() {
    cpu_wait(cpu_warp_barrier(), CPU_LANES);
}

template <typename T> inline T cpu_shuffle(T value, int from) {
    static_assert(sizeof(T) % sizeof(uint32_t) == 0, "whole words");
    enum { WORDS = sizeof(T) / sizeof(uint32_t) };
    uint32_t bits[WORDS];
    memcpy(bits, &value, sizeof value);
    return cpu_with_warp(bits, WORDS, [&] {
        T taken;
        memcpy(&taken, cpu_lane((unsigned)from), sizeof taken);
        return taken;
    });
}
template <typename T> inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return cpu_shuffle(value, cpu_my_lane() ^ mask);
}
template <typename T> inline T __shfl_up_sync(unsigned, T value, int distance) {
    return cpu_shuffle(value, cpu_my_lane() < distance ? cpu_my_lane() : cpu_my_lane() - distance);
}
template <typename T> inline T __shfl_sync(unsigned, T value, int lane) {
    return cpu_shuffle(value, lane);
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

template <typename T> inline T atomicAdd(T *to, T value) {
    T before = *to;
    *to += value;
    return before;
}
inline uint32_t shared_address(const void *pointer) {
    return (uint32_t)((const unsigned char *)pointer - shared);
}

/* The bytes at a shared address, aligned, inside of what the block asked for. */
inline unsigned char *cpu_shared(uint32_t address, uint32_t bytes) {
    if (address % bytes != 0 || address + bytes > (uint32_t)cpu_my_block().grid->shared_bytes) {
        cpu_fail("access outside of shared memory, or misaligned");
    }
    return shared + cpu.running->block * CPU_SHARED_BYTES + address;
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
