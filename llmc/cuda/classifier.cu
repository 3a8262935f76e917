/* Softmax cross-entropy, from logits to losses and their gradient in place.

   One block a row, in two passes. The first takes the row from memory into shared memory (100 KB for GPT-2's
   vocabulary, so that two blocks fit a Hopper multiprocessor and one loads while the other stores); on the way each
   thread keeps the largest of its logits so far and the sum of exponentials relative to it (Milakov and Gimelshein
   2018). The second pass turns the copy into gradients. Each thread sees only the elements that it loaded itself. A row
   too long for shared memory is read again from where it is. Bytes moved: each logit read and written once. */
#include "cuda.cuh"

enum { THREADS = 512, WARPS = THREADS / 32, AHEAD = 4 };

/* The whole block gets the result; `shared` must not be written again before the block's next barrier. */
template <typename Reduce> __device__ inline float block_reduce(float value, float *shared, Reduce reduce) {
    for (int offset = 16; offset > 0; offset /= 2) {
        value = reduce(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
    }
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = shared[0];
    for (int w = 1; w < WARPS; w++) {
        value = reduce(value, shared[w]);
    }
    return value;
}

struct classifier_arguments {
    bf16 *logits;
    float *losses;
    const int32_t *targets;
    int vocab_size, padded_vocab;
    float d_loss;
    bool write_gradient;
};

/* Eight logits; those of padding columns become -infinity. */
__device__ inline uint4 mask_padding(uint4 bits, int column, int vocab_size) {
    if (column + 8 > vocab_size) {
        float x[8];
        unpack8(x, bits);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = column + i < vocab_size ? x[i] : -INFINITY;
        }
        bits = pack8(x);
    }
    return bits;
}

static const float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

/* exp(logit - largest) of eight logits. As 2^(logit log2(e) - shift): the rounding of shift = largest log2(e) cancels in
   loss and gradient. */
__device__ inline void exponentials(float (&out)[8], uint4 logits, float shift) {
    unpack8(out, logits);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        out[i] = exp2_fast(fmaf(out[i], LOG2_E, -shift));
    }
}

__device__ inline __nv_bfloat162 largest_pair(__nv_bfloat162 largest, uint4 bits) {
    const __nv_bfloat162 *pair = reinterpret_cast<const __nv_bfloat162 *>(&bits);
    return __hmax2(largest, __hmax2(__hmax2(pair[0], pair[1]), __hmax2(pair[2], pair[3])));
}

/* Of the logits seen so far. It starts below any logit that counts, but finite: -infinity less itself is no number. */
struct running_softmax {
    float shift = -1e30f, sum = 0.0f;

    __device__ void add(const uint4 (&logits)[AHEAD]) {
        __nv_bfloat162 pair = largest_pair(__float2bfloat162_rn(-INFINITY), logits[0]);
#pragma unroll
        for (int j = 1; j < AHEAD; j++) {
            pair = largest_pair(pair, logits[j]);
        }
        float higher = fmaxf(shift, LOG2_E * fmaxf(__low2float(pair), __high2float(pair)));
        sum *= exp2_fast(shift - higher);
        shift = higher;
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            float x[8];
            exponentials(x, logits[j], shift);
            sum += ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
        }
    }
};

/* AHEAD vectors of the row, THREADS apart; -infinity past its end. */
__device__ inline void load_ahead(uint4 (&out)[AHEAD], const bf16 *logits, int first, int vectors) {
    const uint32_t infinities = 0xFF80FF80u;
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        int v = first + j * THREADS;
        out[j] =
            v < vectors ? load16(logits + 8 * v) : make_uint4(infinities, infinities, infinities, infinities);
    }
}

template <bool COPY> __global__ void __launch_bounds__(THREADS, 2) classifier_kernel(classifier_arguments a) {
    uint4 *copy = dynamic_shared;
    __shared__ float shared[2][WARPS];
    int64_t row = blockIdx.x;
    bf16 *logits = a.logits + row * a.padded_vocab;
    int vectors = a.padded_vocab / 8;
    int32_t target = a.targets[row];
    if (target < 0) {
        for (int v = threadIdx.x; a.write_gradient && v < vectors; v += THREADS) {
            store16(logits + 8 * v, make_uint4(0, 0, 0, 0));
        }
        if (threadIdx.x == 0) {
            a.losses[row] = 0.0f;
        }
        return;
    }
    float target_logit = __bfloat162float(logits[target]);

    struct running_softmax own;
    uint4 current[AHEAD], next[AHEAD];
    load_ahead(next, logits, threadIdx.x, vectors);
    for (int first = threadIdx.x; first < vectors; first += AHEAD * THREADS) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            current[j] = mask_padding(next[j], 8 * (first + j * THREADS), a.vocab_size);
        }
        load_ahead(next, logits, first + AHEAD * THREADS, vectors);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (COPY && first + j * THREADS < vectors) {
                copy[first + j * THREADS] = current[j];
            }
        }
        own.add(current);
    }
    float shift = block_reduce(own.shift, shared[0], [](float x, float y) { return fmaxf(x, y); });
    float sum = block_reduce(
        own.sum * exp2_fast(own.shift - shift), shared[1], [](float x, float y) { return x + y; });
    if (threadIdx.x == 0) {
        a.losses[row] = LN_2 * (log2f(sum) + shift) - target_logit;
    }
    if (!a.write_gradient) {
        return;
    }
    float factor = a.d_loss / sum;
    for (int v = threadIdx.x; v < vectors; v += THREADS) {
        float x[8];
        exponentials(x, COPY ? copy[v] : mask_padding(load16(logits + 8 * v), 8 * v, a.vocab_size), shift);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] *= factor;
        }
        if (v == target / 8) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] -= i == target % 8 ? a.d_loss : 0.0f;
            }
        }
        store16(logits + 8 * v, pack8(x));
    }
}

static enum status classifier(struct backend *b, void *logits, void *losses, const int32_t *targets,
    int64_t rows, int vocab_size, int padded_vocab, double d_loss, bool write_gradient) {
    if (padded_vocab % 8 != 0) {
        return fail("classifier on the GPU: %d columns are not a multiple of 8", padded_vocab);
    }
    struct classifier_arguments a = {
        (bf16 *)logits, (float *)losses, targets, vocab_size, padded_vocab, (float)d_loss, write_gradient};
    int64_t row_bytes = padded_vocab * (int64_t)sizeof(bf16), reserved = 2 * WARPS * sizeof(float);
    bool fits = row_bytes + reserved <= b->state->shared_bytes;
    return launch(b, {"classifier", (unsigned)rows, THREADS, fits ? row_bytes : 0},
        fits ? classifier_kernel<true> : classifier_kernel<false>, a);
}

void cuda_classifier_install(struct backend *b) {
    b->classifier = classifier;
}
