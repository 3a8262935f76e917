/* Hopper's instructions for attention_on_cpu.h: this stands in for attention/wgmma_sm90.cuh, so that the kernels of
   fa3 run on a CPU as they are.

   Products and copies are under way until something waits for them, so each happens at one of two moments. With
   cpu.copies_late copies by TMA happen when they are waited for (loads: at the first look at their barrier; stores and
   additions read when their reading is waited for, and write when all of them is, or with the kernel's end) and products
   at once; without, copies at once and products when they are waited for. Between the two a stage that is filled too soon,
   read too soon or given back too soon is seen as a wrong result, and a phase that never ends as threads that wait for each
   other. Descriptors are decoded as the hardware does it: address, distances and swizzle. What is not looked at: fences
   and numbers of registers. */
#ifndef TEST_HOPPER_ON_CPU_H
#define TEST_HOPPER_ON_CPU_H

#include "test/attention_on_cpu.h"

#define ATTENTION_WGMMA_SM90_CUH
#define COMPILED_FOR_SM90A true
#define __grid_constant__

#include "attention/panel_tile.cuh"

#include <map>

enum { WARPGROUP = 128 };

/* ---- the host's side of CUDA ---- */

typedef void *cudaStream_t;
enum cudaError_t { cudaSuccess };
struct cudaFuncAttributes {
    int ptxVersion;
};
template <typename Kernel> inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, Kernel) {
    out->ptxVersion = 90;
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
    cpu_run(); /* the kernels before it */
    memset(to, value, bytes);
    return cudaSuccess;
}
inline enum status cuda_check(cudaError_t, const char *) {
    return STATUS_OK;
}

typedef uint64_t cuuint64_t;
typedef uint32_t cuuint32_t;
enum CUresult { CUDA_SUCCESS };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_32B = 1,
    CU_TENSOR_MAP_SWIZZLE_64B,
    CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
struct CUtensorMap {
    unsigned char *data;
    int64_t sizes[4], stride_bytes[4];
    int columns, rows; /* of a box */
};
inline CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *data,
    const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *,
    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    map->data = (unsigned char *)data;
    for (int i = 0; i < 4; i++) {
        map->sizes[i] = (int64_t)sizes[i];
        map->stride_bytes[i] = i == 0 ? 2 : (int64_t)strides[i - 1];
    }
    map->columns = (int)box[0], map->rows = (int)box[1];
    return CUDA_SUCCESS;
}

/* ---- things under way ---- */

typedef std::function<void()> cpu_deed;

/* Whether a copy happens late. In random orders every one has its own moment. */
inline bool cpu_copies_late() {
    return cpu.random != 0 ? cpu_sometimes(2) : cpu.copies_late;
}

/* What a thread has started and not waited for, in groups of which the last is open. */
struct cpu_started {
    std::vector<std::vector<cpu_deed>> groups = {{}};

    void start(bool late, cpu_deed deed) {
        if (late) {
            groups.back().push_back(deed);
        } else {
            deed();
        }
    }
    void commit() {
        groups.emplace_back();
    }
    int pending() const {
        return (int)groups.size() - 1;
    }
    /* Others get `rounds` turns before what is waited for happens, if it has not. */
    void wait(int most_pending, int rounds) {
        bool late = false;
        for (int i = 0; i < pending() - most_pending; i++) {
            late |= !groups[(size_t)i].empty();
        }
        for (int i = 0; late && i < rounds; i++) {
            cpu_yield();
        }
        while (pending() > most_pending) {
            for (const cpu_deed &deed : groups.front()) {
                deed();
            }
            groups.erase(groups.begin());
        }
    }
};

struct cpu_arrival {
    int count, missing; /* arrivals to a phase; of this one */
    int64_t bytes;      /* expected, and not yet here */
    unsigned phase;
    std::vector<cpu_deed> copies;
};

enum { PRODUCT_ROUNDS = 2, BULK_ROUNDS = 30 }; /* a step of a kernel is a few */

static std::map<uint32_t, cpu_arrival> cpu_arrivals[CPU_MOST_BLOCKS];
static cpu_started cpu_products[CPU_MOST_BLOCKS][CPU_MOST_THREADS],
    cpu_bulk_reads[CPU_MOST_BLOCKS][CPU_MOST_THREADS], cpu_bulk_writes[CPU_MOST_BLOCKS][CPU_MOST_THREADS];

inline std::map<uint32_t, cpu_arrival> &cpu_my_arrivals() {
    return cpu_arrivals[cpu.running->block];
}

/* ---- barriers ---- */

inline void arrival_init(uint32_t barrier, int count) {
    cpu_shared(barrier, 8);
    cpu_my_arrivals()[barrier] = {count, count, 0, 0, {}};
}
inline void arrival_init_done() {
}
inline void cpu_arrival_end(cpu_arrival &a) {
    if (a.missing < 0) {
        cpu_fail("more arrivals than a barrier counts");
    }
    if (a.missing == 0 && a.bytes == 0) {
        a.missing = a.count;
        a.phase++;
    }
}
inline void arrive(uint32_t barrier) {
    cpu_my_arrivals().at(barrier).missing--;
    cpu_arrival_end(cpu_my_arrivals().at(barrier));
}
inline void arrive_expecting(uint32_t barrier, int bytes) {
    cpu_my_arrivals().at(barrier).bytes += bytes;
    arrive(barrier);
}
inline void arrival_wait(uint32_t barrier, unsigned parity) {
    cpu_arrival &a = cpu_my_arrivals().at(barrier);
    for (;;) {
        std::vector<cpu_deed> copies;
        copies.swap(a.copies);
        for (const cpu_deed &copy : copies) {
            copy();
        }
        if (a.phase % 2 != parity) {
            return;
        }
        cpu_yield();
    }
}
inline void named_wait(int which, int threads) {
    barrier(which, threads);
}
inline void named_arrive(int which, int threads) {
    cpu_barrier &b = cpu_my_block().named[which];
    if (++b.arrived == threads) {
        b.arrived = 0;
        b.passed++;
    }
}
inline void fence_async() {
}
inline void fence_async_memory() {
}
inline float4 __ldcg(const float4 *from) {
    return *from;
}
constexpr int registers_at_start(int threads) {
    return 65536 / threads / 8 * 8;
}
template <int REGISTERS> inline void registers_release() {
}
template <int REGISTERS> inline void registers_acquire() {
}

/* ---- copies ---- */

/* Calls element(shared memory, tensor or NULL) for every element of a box. */
template <typename Element>
inline void cpu_for_box(const CUtensorMap &map, uint32_t tile, const int (&at)[4], Element element) {
    if (at[0] % map.columns != 0 || tile % 128 != 0) {
        cpu_fail("a box that begins within a panel, or in shared memory at no multiple of 128 bytes");
    }
    for (int row = 0; row < map.rows; row++) {
        for (int column = 0; column < map.columns; column++) {
            const int64_t index[4] = {at[0] + column, at[1] + row, at[2], at[3]};
            unsigned char *in_tensor = map.data;
            for (int i = 0; i < 4; i++) {
                bool inside = index[i] >= 0 && index[i] < map.sizes[i];
                in_tensor =
                    inside && in_tensor != nullptr ? in_tensor + index[i] * map.stride_bytes[i] : nullptr;
            }
            uint32_t row_bytes = 2 * (uint32_t)map.columns;
            uint32_t address = tile + (uint32_t)row * row_bytes + 2 * (uint32_t)column;
            element(cpu_shared(address ^ (address >> 3 & (row_bytes - 16)), 2), in_tensor);
        }
    }
}

inline void cpu_load_arrived(uint32_t barrier, int64_t bytes) {
    cpu_arrival &a = cpu_my_arrivals().at(barrier);
    a.bytes -= bytes;
    cpu_arrival_end(a);
}

inline void cpu_start_load(uint32_t barrier, cpu_deed copy) {
    if (cpu_copies_late()) {
        cpu_my_arrivals().at(barrier).copies.push_back(copy);
    } else {
        copy();
    }
}

inline void tma_load(
    uint32_t to, const CUtensorMap *map, uint32_t barrier, int d, int position, int head, int batch) {
    cpu_start_load(barrier, [=] {
        cpu_for_box(
            *map, to, {d, position, head, batch}, [](unsigned char *shared_element, unsigned char *element) {
                element != nullptr ? memcpy(shared_element, element, 2) : memset(shared_element, 0, 2);
            });
        cpu_load_arrived(barrier, 2 * (int64_t)map->columns * map->rows);
    });
}

inline void bulk_load(uint32_t to, const void *from, uint32_t barrier, int bytes) {
    cpu_start_load(barrier, [=] {
        for (int i = 0; i < bytes; i += 16) {
            memcpy(cpu_shared(to + (uint32_t)i, 16), (const unsigned char *)from + i, 16);
        }
        cpu_load_arrived(barrier, bytes);
    });
}

inline cpu_started &cpu_my_bulk_reads() {
    return cpu_bulk_reads[cpu.running->block][threadIdx.x];
}
inline cpu_started &cpu_my_bulk_writes() {
    return cpu_bulk_writes[cpu.running->block][threadIdx.x];
}

/* A copy to memory: read() takes what is in shared memory and returns what writes it. */
template <typename Read> inline void cpu_start_bulk(Read read) {
    bool late = cpu_copies_late();
    cpu_my_bulk_reads().start(late, [=] { cpu_my_bulk_writes().start(late, read()); });
}

inline void tma_store(const CUtensorMap *map, uint32_t from, int d, int position, int head, int batch) {
    cpu_start_bulk([=]() -> cpu_deed {
        std::vector<std::pair<unsigned char *, uint16_t>> elements;
        cpu_for_box(*map, from, {d, position, head, batch},
            [&](unsigned char *shared_element, unsigned char *element) {
                if (element != nullptr) {
                    elements.emplace_back(element, 0);
                    memcpy(&elements.back().second, shared_element, 2);
                }
            });
        return [=] {
            for (const auto &e : elements) {
                memcpy(e.first, &e.second, 2);
            }
        };
    });
}
inline std::vector<float> cpu_bulk_floats(uint32_t from, int bytes) {
    std::vector<float> floats;
    for (int i = 0; i < bytes; i += 16) {
        const float *chunk = (const float *)cpu_shared(from + (uint32_t)i, 16);
        floats.insert(floats.end(), chunk, chunk + 4);
    }
    return floats;
}
inline void bulk_store(void *to, uint32_t from, int bytes) {
    cpu_start_bulk([=]() -> cpu_deed {
        std::vector<float> floats = cpu_bulk_floats(from, bytes);
        return [=] { memcpy(to, floats.data(), (size_t)bytes); };
    });
}
inline void bulk_add(float *to, uint32_t from, int bytes) {
    cpu_start_bulk([=]() -> cpu_deed {
        std::vector<float> floats = cpu_bulk_floats(from, bytes);
        return [=] {
            for (size_t i = 0; i < floats.size(); i++) {
                to[i] += floats[i];
            }
        };
    });
}
inline void bulk_commit() {
    cpu_my_bulk_reads().start(cpu.copies_late || cpu.random != 0, [] { cpu_my_bulk_writes().commit(); });
    cpu_my_bulk_reads().commit();
}
template <int PENDING> inline void bulk_wait_read() {
    cpu_my_bulk_reads().wait(PENDING, BULK_ROUNDS);
}
template <int PENDING> inline void bulk_wait() {
    bulk_wait_read<PENDING>();
    cpu_my_bulk_writes().wait(PENDING - cpu_my_bulk_reads().pending(), BULK_ROUNDS);
}
/* What a block's threads have not waited for must have been read when it ends, and is seen when its kernel has ended. */
inline void cpu_end_bulk(int place) {
    cpu_grid &grid = *cpu.blocks[place].grid;
    for (int i = 0; i < grid.threads; i++) {
        if (cpu_bulk_reads[place][i].pending() > 0) {
            cpu_fail("a block ends while its shared memory is still read");
        }
        for (const std::vector<cpu_deed> &group : cpu_bulk_writes[place][i].groups) {
            grid.last_deeds.insert(grid.last_deeds.end(), group.begin(), group.end());
        }
        cpu_bulk_writes[place][i] = {};
    }
}
static const bool cpu_ends_bulk = (cpu.block_ends = cpu_end_bulk, true);

inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
    uint32_t bring[] = {address, r[0], r[1], r[2], r[3]};
    cpu_with_warp(bring, 5, [&] { /* this lane writes its row of the matrix that it gives the address for */
        unsigned lane = threadIdx.x % CPU_LANES, matrix = lane / 8, row = lane % 8;
        for (unsigned i = 0; i < 4; i++) {
            memcpy(cpu_shared(address, 16) + 4 * i, &cpu_lane(4 * row + i)[1 + matrix], 4);
        }
        return 0;
    });
}

/* ---- products ---- */

/* Element of a tile that a descriptor is of: number `index` of the rows of A or columns of B, in the depth k. */
template <enum dtype TYPE, enum depth WAY> inline float cpu_element(uint64_t descriptor, int index, int k) {
    static const uint32_t widths[] = {0, 64, 32, 16};
    uint32_t width = widths[descriptor >> 62], row_bytes = 2 * width;
    uint32_t start = (uint32_t)(descriptor & 0x3FFF) << 4,
             panels = (uint32_t)(descriptor >> 16 & 0x3FFF) << 4,
             groups = (uint32_t)(descriptor >> 32 & 0x3FFF) << 4;
    uint32_t row = (uint32_t)(WAY == DEPTH_ACROSS ? index : k),
             column = (uint32_t)(WAY == DEPTH_ACROSS ? k : index);
    uint32_t address =
        start + row / 8 * groups + row % 8 * row_bytes + column / width * panels + column % width * 2;
    uint16_t bits;
    memcpy(&bits, cpu_shared(address ^ (address >> 3 & (row_bytes - 16)), 2), 2);
    return TYPE == DTYPE_BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

inline cpu_started &cpu_my_products() {
    return cpu_products[cpu.running->block][threadIdx.x];
}

/* left(half, k): this thread's rows of A */
template <enum dtype TYPE, enum depth B, int N, typename Left>
inline void cpu_multiply(float (&d)[N][4], uint64_t b, bool add, Left left) {
    int lane = lane_index();
    cpu_my_products().start(!cpu.copies_late, [=, &d] {
        float rows[2][16];
        for (int k = 0; k < 16; k++) {
            rows[0][k] = left(0, k), rows[1][k] = left(1, k);
        }
        for (int n = 0; n < N; n++) {
            for (int e = 0; e < 2; e++) {
                float sums[2] = {0, 0};
                for (int k = 0; k < 16; k++) {
                    float right = cpu_element<TYPE, B>(b, 8 * n + lane % 4 * 2 + e, k);
                    sums[0] += rows[0][k] * right, sums[1] += rows[1][k] * right;
                }
                d[n][e] = sums[0] + (add ? d[n][e] : 0);
                d[n][2 + e] = sums[1] + (add ? d[n][2 + e] : 0);
            }
        }
    });
}

template <enum dtype TYPE, enum depth A, enum depth B, int N>
inline void wgmma_tiles(float (&d)[N][4], uint64_t a, uint64_t b, bool add) {
    int row = (int)(threadIdx.x % WARPGROUP / CPU_LANES * 16) + lane_index() / 4;
    cpu_multiply<TYPE, B>(
        d, b, add, [=](int half, int k) { return cpu_element<TYPE, A>(a, row + 8 * half, k); });
}

template <enum dtype TYPE, enum depth B, int N>
inline void wgmma_fragment(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    struct rows {
        float values[2][16];
    };
    rows mine = cpu_with_warp(a, 4, [&] {
        rows r;
        for (int k = 0; k < 16; k++) {
            r.values[0][k] = cpu_a<TYPE>(lane_index() / 4, k);
            r.values[1][k] = cpu_a<TYPE>(lane_index() / 4 + 8, k);
        }
        return r;
    });
    cpu_multiply<TYPE, B>(d, b, add, [=](int half, int k) { return mine.values[half][k]; });
}

inline void wgmma_begin() {
}
inline void wgmma_commit() {
    cpu_my_products().commit();
}
template <int PENDING, int N> inline void wgmma_wait(float (&)[N][4]) {
    cpu_my_products().wait(PENDING, PRODUCT_ROUNDS);
}
template <int N> inline void registers_change(float (&)[N][4]) {
}

#endif
