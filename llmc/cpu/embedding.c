/* Token and position embedding. Backward adds rows of many tokens to one table: threads share out the channels, so
   every element has one writer that adds in the order of the tokens. */
#include "cpu.h"

static enum status embedding_forward(struct backend *b, void *out_, const int32_t *tokens,
    const void *token_table_, const void *position_table_, int batch, int seq_len, int channels) {
    real *out = out_;
    const real *token_table = token_table_, *position_table = position_table_;
    int64_t rows = (int64_t)batch * seq_len;
    use_threads(b);
#pragma omp parallel for
    for (int64_t n = 0; n < rows; n++) {
        const real *token = token_table + (int64_t)tokens[n] * channels;
        const real *position = position_table + n % seq_len * channels;
        for (int c = 0; c < channels; c++) {
            out[n * channels + c] = token[c] + position[c];
        }
    }
    return STATUS_OK;
}

static enum status embedding_backward(struct backend *b, struct tensor d_token_table,
    struct tensor d_position_table, const void *d_out_, const int32_t *tokens, int batch, int seq_len,
    int channels, int vocab_size, bool accumulate_position) {
    (void)vocab_size;
    CHECK(check_gradient(d_token_table));
    CHECK(check_gradient(d_position_table));
    real *d_token = d_token_table.data, *d_position = d_position_table.data;
    const real *d_out = d_out_;
    int64_t rows = (int64_t)batch * seq_len;
    use_threads(b);
#pragma omp parallel for
    for (int first = 0; first < channels; first += COLUMN_CHUNK) {
        int last = (int)min_i64(first + COLUMN_CHUNK, channels);
        for (int64_t n = 0; n < rows; n++) {
            real *to = d_token + (int64_t)tokens[n] * channels;
            for (int c = first; c < last; c++) {
                to[c] += d_out[n * channels + c];
            }
        }
        for (int64_t n = 0; n < rows; n++) {
            real *to = d_position + n % seq_len * channels;
            bool add = accumulate_position || n >= seq_len;
            for (int c = first; c < last; c++) {
                to[c] = add ? to[c] + d_out[n * channels + c] : d_out[n * channels + c];
            }
        }
    }
    return STATUS_OK;
}

void embedding_install(struct backend *b) {
    b->embedding_forward = embedding_forward;
    b->embedding_backward = embedding_backward;
}
