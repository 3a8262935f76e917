/* Models by name: what --model takes. */
#ifndef LLMC_PRESETS_H
#define LLMC_PRESETS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct preset {
    const char *name;
    int layers, channels, heads, seq_len, vocab_size;
    int micro_batch;      /* fits a GPU of 80 GB: one alone, and of 6.7B each of 4 */
    double learning_rate; /* peak */
};
const struct preset *preset_find(const char *name); /* NULL: unknown */
const struct preset *preset_table(int *count);
int64_t preset_parameters(const struct preset *preset); /* without vocabulary padding */

#ifdef __cplusplus
}
#endif

#endif
