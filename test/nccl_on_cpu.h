/* NCCL and the streams of a GPU on a CPU, for tests of llmc/comm_nccl.cu: a stream is a thread, its events are flags, and
   ranks, which are processes, meet in memory that they share. A collective ends late, and one whose peers are gone ends
   when it is aborted, as NCCL's do. Sums are in the order of the ranks. */
#ifndef TEST_NCCL_ON_CPU_H
#define TEST_NCCL_ON_CPU_H

#include "llmc/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CPU_NCCL_REMOTE_ERROR = 6 }; /* ncclRemoteError */

/* A GPU that runs what it is given in the background; or at once, before cpu_gpu_run and comm->wait return. */
struct backend *cpu_gpu_create(int device, bool background);
void cpu_gpu_free(struct backend *gpu);
/* work(argument) as a kernel on its stream */
void cpu_gpu_run(struct backend *gpu, void (*work)(void *argument), void *argument);
void cpu_gpu_synchronize(struct backend *gpu);

/* From now on NCCL says in this process that it has met such an error. */
void cpu_nccl_meets(int result);

#ifdef __cplusplus
}
#endif

#endif
