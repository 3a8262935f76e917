/* Counter-based random numbers: value i of a stream is a pure function of (seed, stream, i), so that every
   backend, rank and resume draws the same. Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as
   1, 2, 3", SC 2011). Used by C and CUDA alike. */
#ifndef LLMC_RANDOM_H
#define LLMC_RANDOM_H

#include <stdint.h>

#ifdef __CUDACC__
#define RANDOM_INLINE static inline __host__ __device__
#else
#define RANDOM_INLINE static inline
#endif

struct random_block {
    uint32_t word[4];
};

RANDOM_INLINE struct random_block random_block(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = (uint32_t)stream,
             c3 = (uint32_t)(stream >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c0, product1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t next0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0,
                 next2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
        c1 = (uint32_t)product1;
        c3 = (uint32_t)product0;
        c0 = next0;
        c2 = next2;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    struct random_block block = {{c0, c1, c2, c3}};
    return block;
}

/* Uniform in [0, 1), 53 bits. */
RANDOM_INLINE double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    struct random_block r = random_block(seed, stream, index);
    return (double)((((uint64_t)r.word[0] << 32) | r.word[1]) >> 11) * (1.0 / 9007199254740992.0);
}

/* Mean 0, variance 1: the sum of eight 16-bit uniforms (Irwin-Hall), exact in integers and then one float
   multiplication, hence the same bits on every processor. Tails end at 4.9. */
RANDOM_INLINE float random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    struct random_block r = random_block(seed, stream, index);
    int32_t sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += (int32_t)(r.word[i] & 0xFFFFu) + (int32_t)(r.word[i] >> 16);
    }
    /* variance of the sum: 8 (65536^2 - 1) / 12 */
    return (float)(sum - 262140) * (1.0f / 53509.92f);
}

/* Streams: parameters use their index in the table; the rest are far from them. */
enum {
    RANDOM_STREAM_SHUFFLE = 1 << 20,
    RANDOM_STREAM_SYNTHETIC,
    RANDOM_STREAM_SAMPLE,
    RANDOM_STREAM_ROUNDING
};

#endif
