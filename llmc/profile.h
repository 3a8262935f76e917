/* Where a step's time goes. The profiler stands between the model and its backend (and the ranks' comm): every op
   passes through it, is marked before and after on the compute stream, and counts the FLOPs and bytes it must move.
   A run that is not profiled uses the backend itself and pays nothing. */
#ifndef LLMC_PROFILE_H
#define LLMC_PROFILE_H

#include "comm.h"
#include "json.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

struct profile;

/* Measures the device's copy bandwidth as the ceiling of what moves bytes. `backend` must outlive the profile. */
enum status profile_create(struct profile **out, struct backend *backend, const struct model_config *config);
void profile_free(struct profile *profile);

/* What model and optimizer are given in place of the real ones. Valid until profile_free; not theirs to free. */
struct backend *profile_backend(struct profile *profile);
struct comm *profile_comm(struct profile *profile, struct comm *comm);

/* Around each step to measure; ops outside are passed through unmeasured. */
enum status profile_begin_step(struct profile *profile);
enum status profile_end_step(struct profile *profile);
int profile_steps(const struct profile *profile); /* measured so far */

/* A line per kind of work: calls and ms a step, share, TFLOP/s or GB/s reached, and of the ceiling. */
void profile_print(const struct profile *profile, FILE *out);
/* The same as members of the writer's open object. */
void profile_write_json(const struct profile *profile, struct json_writer *w);

#ifdef __cplusplus
}
#endif

#endif
