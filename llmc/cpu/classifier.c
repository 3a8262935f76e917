/* Softmax and cross-entropy of a row at a time; its logits become their gradient in place. */
#include "cpu.h"

enum { BLOCK = 512 };

/* The sum of exp(row - highest); the row becomes these exponentials when they are to be kept. */
static real sum_exponentials(real *row, int count, real highest, bool keep) {
    real block[BLOCK], sum = 0;
    for (int first = 0; first < count; first += BLOCK) {
        int width = (int)min_i64(BLOCK, count - first);
        for (int i = 0; i < width; i++) {
            block[i] = exp_real(row[first + i] - highest);
        }
        sum += sum_row(block, width);
        if (keep) {
            memcpy(row + first, block, (size_t)width * sizeof(real));
        }
    }
    return sum;
}

/* The loss of one row; with write_gradient the row becomes (softmax - onehot) * d_loss. */
static real classify_row(
    real *row, int target, int vocab_size, int padded_vocab, real d_loss, bool write_gradient) {
    if (target < 0) {
        if (write_gradient) {
            memset(row, 0, (size_t)padded_vocab * sizeof(real));
        }
        return 0;
    }
    real highest = max_row(row, vocab_size), target_logit = row[target];
    real sum = sum_exponentials(row, vocab_size, highest, write_gradient);
    if (write_gradient) {
        real factor = d_loss / sum;
        for (int i = 0; i < vocab_size; i++) {
            row[i] *= factor;
        }
        row[target] -= d_loss;
        memset(row + vocab_size, 0, (size_t)(padded_vocab - vocab_size) * sizeof(real));
    }
    return (real)log(sum) + (highest - target_logit);
}

static enum status classifier(struct backend *b, void *logits, void *losses, const int32_t *targets,
    int64_t rows, int vocab_size, int padded_vocab, double d_loss, bool write_gradient) {
    use_threads(b);
#pragma omp parallel for
    for (int64_t n = 0; n < rows; n++) {
        ((real *)losses)[n] = classify_row((real *)logits + n * padded_vocab, targets[n], vocab_size,
            padded_vocab, (real)d_loss, write_gradient);
    }
    return STATUS_OK;
}

void classifier_install(struct backend *b) {
    b->classifier = classifier;
}
