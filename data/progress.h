/* How far a run of build/prepare is, kept beside its unfinished shards in prepare.progress, so that one that was killed
   goes on from there. */
#ifndef DATA_PROGRESS_H
#define DATA_PROGRESS_H

#include "output.h"

struct progress {
    uint64_t run;                   /* a checksum of the options and inputs: what makes it the same run */
    int64_t input;                  /* index of the input that is being read */
    int64_t side;                   /* index of the output that it goes to */
    int64_t cut;                    /* where its part for validation begins; 0: it is all for one side */
    int64_t offset;                 /* bytes of it, from its beginning, whose tokens are in the outputs */
    int64_t line;                   /* and lines, of JSON lines */
    int64_t document;               /* 1: a document begins there; 0: it goes on */
    int64_t skipped;                /* inputs without text */
    struct output_state outputs[2]; /* training, validation */
};

/* Into <folder>/prepare.progress, whole or not at all; with the outputs' buffers. */
enum status progress_save(
    const char *folder, const struct progress *progress, const struct output *const outputs[2]);
/* *there: is there one? The outputs get their states and buffers. A damaged file is an error. */
enum status progress_load(
    const char *folder, struct progress *progress, struct output *const outputs[2], bool *there);
enum status progress_remove(const char *folder);

#endif
