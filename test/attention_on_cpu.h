/* The kernels of attention/ on a CPU (cuda_on_cpu.h says how): this stands in for attention/device.cuh and
   attention/mma_sm80.cuh, and the .cu files are then included as C++. */
#ifndef TEST_ATTENTION_ON_CPU_H
#define TEST_ATTENTION_ON_CPU_H

#define ATTENTION_DEVICE_CUH
#define ATTENTION_MMA_SM80_CUH
#define COMPILED_FOR(shared_kb) true
#define __shared__

#include "test/cuda_on_cpu.h"

#include "attention/kernel.h"

/* ---- device.cuh ---- */

template <typename Arguments>
enum status launch(const char *what, void (*kernel)(Arguments), int64_t blocks, int threads, int shared_bytes,
    void *stream, const Arguments &arguments, bool overlap = false) {
    (void)stream;
    if (threads > CPU_MOST_THREADS || shared_bytes > CPU_SHARED_BYTES) {
        return fail("%s: %d threads and %d bytes are too many", what, threads, shared_bytes);
    }
    cpu_launch(
        {(unsigned)blocks, 1}, {(unsigned)threads, 1}, shared_bytes, [=] { kernel(arguments); },
        CPU_MOST_BLOCKS, overlap);
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

inline int load_count(const int *counter) {
    cpu_yield(); /* it may be one look of many */
    return *counter;
}
inline void wait_for_count(const int *counter, int count) {
    while (load_count(counter) != count) {
    }
}
inline void count_up(int *counter, int by = 1) {
    *counter += by;
}
inline int take_count(int *counter) {
    return (*counter)++;
}
inline void reduce_add_4(float *to, const float (&c)[4]) {
    for (int i = 0; i < 4; i++) {
        to[i] += c[i];
    }
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

#endif
