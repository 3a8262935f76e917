/* The rungs that lead from FlashAttention to FlashAttention-2, as switches of one kernel each way. The last cut, warps
   that split the rows of Q, is a kernel of its own: fa2_forward.cu and fa2_backward.cu. */
#ifndef ATTENTION_FA1_CUH
#define ATTENTION_FA1_CUH

#include "attention/fa2.cuh"

struct rung {
    /* O is divided by l after every block of keys, and m and l are kept for backward; else (cut 1) O~ is divided once, and
       lse is kept. */
    bool normalised;
    /* One thread block for a whole (batch, head); else (cut 2) one for each of its blocks. */
    bool head_parallel;
};

constexpr rung FA1 = {true, true}, CUT1 = {false, true}, CUT2 = {false, false};

enum {
    FA1_WARPS = 4,
    FA1_THREADS = FA1_WARPS * LANES,
    FA1_STEP_ROWS = 16,      /* queries that the warps work on together */
    FA1_EXCHANGE_SQUARES = 4 /* of 16 columns, that the warps add up at a time */
};

/* Warps that split the keys have only parts of every sum over keys. Each writes its fragments to its own place in shared
   memory; after a barrier, warp w adds up fragments w, w + FA1_WARPS, ... of all warps. */
struct fragment_exchange {
    static constexpr int FRAGMENTS = 2 * FA1_EXCHANGE_SQUARES;
    static constexpr int WARP_BYTES = FRAGMENTS * FRAGMENT_FLOATS * (int)sizeof(float);
    static constexpr int BYTES = FA1_WARPS * WARP_BYTES;

    static __device__ __forceinline__ uint32_t address(uint32_t shared, int warp, int fragment) {
        return shared + warp * WARP_BYTES + (fragment * LANES + lane_index()) * CHUNK_BYTES;
    }
    static __device__ __forceinline__ void put(uint32_t shared, int fragment, const float (&c)[4]) {
        store_shared_floats(
            address(shared, (int)warp_index(), fragment), make_float4(c[0], c[1], c[2], c[3]));
    }
    static __device__ __forceinline__ void sum(float (&c)[4], uint32_t shared, int fragment) {
        c[0] = c[1] = c[2] = c[3] = 0;
#pragma unroll
        for (int warp = 0; warp < FA1_WARPS; warp++) {
            float4 part = load_shared_floats(address(shared, warp, fragment));
            c[0] += part.x, c[1] += part.y, c[2] += part.z, c[3] += part.w;
        }
    }
};

#endif
