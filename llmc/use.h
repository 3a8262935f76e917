/* What train_gpt does with a trained model instead of training one, as the options say: texts (--generate), how good it
   is (--evaluate), its files for Hugging Face (--export). Results go to stdout. */
#ifndef LLMC_USE_H
#define LLMC_USE_H

#include "generate.h"
#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* folder: a checkpoint or Hugging Face folder, whose config.json says `config`. options_use(options) is not NULL. */
enum status model_use(struct backend *backend, const char *folder, const struct model_config *config,
    const struct options *options);

/* What --sample-... say, for texts of a run as well. */
struct generate_options generate_options_of(const struct options *options);

#ifdef __cplusplus
}
#endif

#endif
