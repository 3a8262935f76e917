/* Starting ranks. `train_gpt --ranks 8` forks its own on this machine; the first process stays behind as the
   supervisor: it forwards SIGINT and SIGTERM, notices a rank that ends badly, ends the others within seconds and
   says which rank it was. Under torchrun, Slurm or mpirun the environment says who this process is. */
#ifndef LLMC_LAUNCH_H
#define LLMC_LAUNCH_H

#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

struct launch_rank {
    int rank, ranks;                   /* in the whole run */
    int local_rank, local_ranks;       /* on this machine */
    struct comm_shared_memory *shared; /* NULL if the ranks were not forked here, or there is one */
};

/* What a rank does; returns its exit code. */
typedef int (*launch_main)(const struct launch_rank *rank, void *context);

/* Runs main_function on `ranks` ranks of this machine (1: in this process) and returns the exit code of the run: 0 if
   all ranks returned 0; else that of the first to fail, after one line on stderr that names the rank and how it
   ended. A rank that fails ends the others: within grace_seconds by SIGTERM-like notice through the shared memory,
   then SIGKILL. If the supervisor itself dies its ranks die too. */
int launch_local(
    int ranks, size_t window_bytes, double grace_seconds, launch_main main_function, void *context);

/* SIGINT and SIGTERM only set a flag, from here on; the loop asks after each step. A second SIGINT ends at once. */
void launch_catch_signals(void);
int launch_signal_caught(void); /* 0, or the signal's number */

#ifdef __cplusplus
}
#endif

#endif
