/* The likeliest tokens come off a heap one by one: for top-k so many, for top-p until their probability is enough, which
   for most texts is soon. Without either, a draw walks over the tokens in their own order. */
#include "sampling.h"

#include <math.h>
#include <stdlib.h>

struct sampler {
    struct sampling options;
    int vocab_size;
    double *weights; /* exp((logit - highest) / temperature) */
    int32_t *heap;   /* tokens, heaviest first; those that were taken lie behind its end */
};

enum status sampler_create(struct sampler **out, const struct sampling *options, int vocab_size) {
    struct sampler *s;
    *out = NULL;
    CHECK(ALLOCATE(s, 1));
    s->options = *options;
    s->vocab_size = vocab_size;
    enum status status = ALLOCATE(s->weights, vocab_size);
    if (status == STATUS_OK) {
        status = ALLOCATE(s->heap, vocab_size);
    }
    if (status != STATUS_OK) {
        sampler_free(s);
        return status;
    }
    *out = s;
    return STATUS_OK;
}

void sampler_free(struct sampler *s) {
    if (s != NULL) {
        free(s->weights);
        free(s->heap);
        free(s);
    }
}

static void penalise(float *logits, const bool *seen, int count, double penalty) {
    for (int i = 0; i < count; i++) {
        if (seen[i]) {
            logits[i] = (float)(logits[i] > 0 ? logits[i] / penalty : logits[i] * penalty);
        }
    }
}

static int likeliest(const float *logits, int count) {
    int best = 0;
    for (int i = 1; i < count; i++) {
        best = logits[i] > logits[best] || isnan(logits[best]) ? i : best;
    }
    return best;
}

/* The sum of all. */
static double weigh(struct sampler *s, const float *logits, float highest) {
    double sum = 0.0;
    for (int i = 0; i < s->vocab_size; i++) {
        double weight = exp(((double)logits[i] - highest) / s->options.temperature);
        s->weights[i] = weight >= 0.0 ? weight : 0.0; /* not a NaN */
        sum += s->weights[i];
    }
    return sum;
}

/* ---- the heap: a parent is no lighter than its children, and before them among equals ---- */

static bool before(const struct sampler *s, int32_t a, int32_t b) {
    return s->weights[a] > s->weights[b] || (s->weights[a] == s->weights[b] && a < b);
}

static void sift_down(struct sampler *s, int at, int count) {
    int32_t token = s->heap[at];
    for (int child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && before(s, s->heap[child + 1], s->heap[child])) {
            child++;
        }
        if (!before(s, s->heap[child], token)) {
            break;
        }
        s->heap[at] = s->heap[child];
    }
    s->heap[at] = token;
}

static void make_heap(struct sampler *s) {
    for (int i = 0; i < s->vocab_size; i++) {
        s->heap[i] = i;
    }
    for (int i = s->vocab_size / 2; i-- > 0;) {
        sift_down(s, i, s->vocab_size);
    }
}

/* Moves the heaviest of `count` tokens behind the others. */
static int32_t take_first(struct sampler *s, int count) {
    int32_t token = s->heap[0];
    s->heap[0] = s->heap[count - 1];
    s->heap[count - 1] = token;
    sift_down(s, 0, count - 1);
    return token;
}

/* ---- drawing ---- */

static int32_t draw_from_all(const struct sampler *s, double left) {
    int last = 0; /* the last that has any weight, should rounding leave something */
    for (int i = 0; i < s->vocab_size; i++) {
        left -= s->weights[i];
        if (left < 0.0) {
            return i;
        }
        last = s->weights[i] > 0.0 ? i : last;
    }
    return last;
}

/* sum: of all weights. Taken tokens lie at the end of the heap array, the first taken last. */
static int32_t draw_from_likeliest(struct sampler *s, double sum, double uniform) {
    int n = s->vocab_size, taken = 0;
    double kept = 0.0;
    make_heap(s);
    if (s->options.top_k > 0 && s->options.top_k < n) {
        while (taken < s->options.top_k) {
            kept += s->weights[take_first(s, n - taken)];
            taken++;
        }
        sum = kept;
    } else {
        while (taken < n && (taken == 0 || kept < s->options.top_p * sum)) {
            kept += s->weights[take_first(s, n - taken)];
            taken++;
        }
    }
    double enough = s->options.top_p * sum, share = 0.0;
    int count = 0; /* of those taken, how many top-p leaves */
    while (count < taken && (count == 0 || share < enough)) {
        share += s->weights[s->heap[n - 1 - count]];
        count++;
    }
    double left = uniform * share;
    for (int i = 0; i < count; i++) {
        left -= s->weights[s->heap[n - 1 - i]];
        if (left < 0.0) {
            return s->heap[n - 1 - i];
        }
    }
    return s->heap[n - 1]; /* rounding left something: the likeliest */
}

int32_t sampler_draw(struct sampler *s, float *logits, const bool *seen, double uniform) {
    const struct sampling *o = &s->options;
    if (o->repetition_penalty != 1.0) {
        penalise(logits, seen, s->vocab_size, o->repetition_penalty);
    }
    int32_t best = likeliest(logits, s->vocab_size);
    if (o->temperature <= 0.0 || !isfinite(logits[best])) {
        return best;
    }
    double sum = weigh(s, logits, logits[best]);
    bool some = (o->top_k > 0 && o->top_k < s->vocab_size) || o->top_p < 1.0;
    return some ? draw_from_likeliest(s, sum, uniform) : draw_from_all(s, uniform * sum);
}
