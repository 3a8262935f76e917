/* Starting ranks. `train_gpt --ranks 8` forks its own on this machine; the first process stays behind as
   the supervisor: it forwards stop signals, notices a rank that ends badly, ends the others within
   seconds and says which rank it was. Under torchrun, Slurm or mpirun the environment says who this process
   is; it runs that one rank, and has a supervisor only where it may be restarted.

   A run that fails tells its cause once, in one line on stderr:
   - A rank that meets an error prints it if launch_first_failure() says that no other was before, and
     returns a code that is not 0. Errors that all ranks meet alike, and every STATUS_PEER_LOST, are thus
     told once.
   - The supervisor prints how a rank ended that could not say so itself (a signal, an exit in a library) or
     did not arrive in time. */
#ifndef LLMC_LAUNCH_H
#define LLMC_LAUNCH_H

#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

struct launch_rank {
    int rank, ranks;                   /* in the whole run */
    int local_rank, local_ranks;       /* on this machine */
    struct comm_shared_memory *shared; /* NULL if the rank was not forked here */
    int seat;                          /* its number among those forked here */
};

/* What the environment says of this process. */
struct launch_place {
    int ranks; /* 0: nothing, or that it is alone */
    int rank, local_rank, local_ranks;
    const char *launcher; /* "torchrun", "Slurm", "mpirun", "the environment" */
    char address[256];    /* where rank 0 is to be found */
    int port;
    char token[64]; /* what the ranks of one run have in common; "" if there is nothing */
};

/* From, in this order: RANK and WORLD_SIZE (torchrun, or set by hand), OMPI_COMM_WORLD_* (Open MPI), SLURM_* of a
   step (srun). MASTER_ADDR and MASTER_PORT say where rank 0 is; Slurm's first host and a port from the job's number
   stand in where they are not set, and this machine where mpirun started all ranks on it. torchrun listens at
   MASTER_PORT itself: under it the port is the next one. FLASHGPT_PORT wins over all of these. FLASHGPT_TOKEN or the
   job's number is the token. Errors: variables that are no numbers, contradict each other or miss a partner. */
enum status launch_read_environment(struct launch_place *place);

/* What a rank does; returns its exit code. */
typedef int (*launch_main)(const struct launch_rank *rank, void *context);

/* Runs main_function on `ranks` ranks of this machine and returns the exit code of the run: 0 if all ranks
   returned 0; else that of the first to fail, 128 + the signal's number if one killed it, STATUS_PEER_LOST if
   it did not arrive in time. One rank runs in this process, unless it is to be `supervised`, which outlives
   its crash; several always are. A rank that fails ends the others: within grace_seconds by notice through
   the shared memory, then by SIGKILL (at once the one that did not arrive). If the supervisor itself dies its
   ranks die too. Call it before the process has threads. */
int launch_local(int ranks, bool supervised, size_t window_bytes, double grace_seconds,
    launch_main main_function, void *context);

/* Runs main_function as the rank that the place says; with `supervised` in a process that is forked and watched, as
   above. One that a signal has stopped is late after timeout_seconds: its peers, elsewhere, can only give it up. */
int launch_placed(const struct launch_place *place, bool supervised, double timeout_seconds,
    double grace_seconds, launch_main main_function, void *context);

/* Called by a rank when it begins a step: what its supervisor says of its end names the step. */
void launch_note_step(const struct launch_rank *rank, int64_t step);

/* Called by a rank that failed, before it prints its error: true if it is the first of those forked here
   (or was not forked here), so that the error is its to print. Tells the other ranks. */
bool launch_first_failure(const struct launch_rank *rank);

/* One line on stderr, without its end, behind the program's name: all that a run says of its failure. */
void launch_print_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The stop signals SIGINT, SIGTERM and SIGHUP (unless it was ignored, as nohup has it) only set a flag, from
   here on; the loop asks after each step. Ranks forked by launch_local are so from their first moment. A
   SIGINT after the first signal ends the run at once, unless it follows so closely that it is the same wish:
   `timeout` and terminals signal a process and its whole group. Where stderr is a terminal the first SIGINT is
   answered there. */
void launch_catch_signals(void);
int launch_signal_caught(void); /* 0, or the signal's number */

#ifdef __cplusplus
}
#endif

#endif
