/* A run's state on disk. <run>/checkpoints/step-00001000/ holds
     model.safetensors, config.json   what Hugging Face's GPT2LMHeadModel reads (fp32)
     optimizer-00000-of-00008.safetensors   each rank's shard of the moments
     vocab.json, merges.txt, tokenizer.json   where the run has a tokenizer of such files
     state.json                       step, data position, counters, options
     checksums.xxh64                  of every file above; `xxh64sum -c` reads it
   It is written under a temporary name, fsynced and renamed: a folder of the final name is complete. */
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "json.h"
#include "optimizer.h"
#include "spikes.h"
#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the loop must know to go on, besides weights and moments. */
struct run_state {
    int64_t step;          /* steps done */
    int64_t data_position; /* sequences, dataloader_position */
    int64_t data_windows;  /* dataloader_windows: a position means the same only in the same data */
    int64_t optimizer_step;
    int64_t tokens_seen;
    int64_t skipped_total, skipped_in_row;
    double best_val_loss; /* NaN: none yet */
    double last_val_loss;
    struct spikes spikes; /* the last applied steps */
};

/* What a checkpoint takes on the disk; some kilobytes come on top. */
uint64_t checkpoint_bytes(const struct model *model);
/* Collective: every rank calls. options_json: the object of options_write_json. tokenizer: whose end of text config.json
   names, and whose files, where it has some, go beside the weights; NULL: none. On any rank's failure every rank returns it
   and the temporary folder is removed. path_out[path_size]: the finished folder; bytes_out: of all files. */
enum status checkpoint_save(const char *run_dir, struct optimizer *optimizer, const struct run_state *state,
    const char *options_json, const struct tokenizer *tokenizer, char *path_out, size_t path_size,
    uint64_t *bytes_out);
/* Removes old checkpoints and left-over temporary folders; keeps the newest `keep` (0: all) up to `step`, the one just
   saved, and every step that is a multiple of keep_every (0: none). Those of later steps, which are damaged ones that
   the resume passed over, do not count and stay. First rank only. */
enum status checkpoint_prune(const char *run_dir, int64_t step, int64_t keep, int64_t keep_every);

/* The newest checkpoint whose files are all there and whose checksums hold; damaged ones are passed over, each with a
   line through `notice` that names the file and what is wrong. path "" if there is none at all. If there are some but
   none is valid, or one is met with a file that is there but cannot be read: an error. */
enum status checkpoint_find_newest(const char *run_dir, char *path, size_t size,
    void (*notice)(void *context, const char *line), void *context);

/* The newest step that there is a checkpoint of, valid or not; -1: of none. Errors: the folder cannot be read. */
enum status checkpoint_newest_step(const char *run_dir, int64_t *step);

/* state.json: the parsed file (its "options" member goes to options_parse, "model" has the shape). Caller frees. */
enum status checkpoint_read_state(const char *path, struct run_state *state, struct json **json);
/* config.json of a checkpoint or Hugging Face folder. */
enum status checkpoint_read_config(const char *path, struct model_config *config);
/* Weights alone (masters too), of a checkpoint or Hugging Face folder. Every rank calls. */
enum status checkpoint_load_weights(const char *path, struct optimizer *optimizer);
/* Moments, from any number of ranks' shards into this rank's. Every rank calls. */
enum status checkpoint_load_moments(const char *path, struct optimizer *optimizer);

#ifdef __cplusplus
}
#endif

#endif
