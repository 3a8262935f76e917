/* Which steps are not to be applied: those whose loss or gradient norm is not finite, and, where the user asks for it,
   those that lie far above the last ones. The device takes the decision (backend.h, step_control); here are the limits
   that it is given, and the reason afterwards. */
#ifndef LLMC_SPIKES_H
#define LLMC_SPIKES_H

#ifdef __cplusplus
extern "C" {
#endif

enum { SPIKE_WINDOW = 128 };

/* The last applied steps, oldest first: mean loss in nats a token, gradient norm before clipping. Zeroed: none yet. */
struct spikes {
    int count;
    double loss[SPIKE_WINDOW], norm[SPIKE_WINDOW];
};

/* One more applied step. */
void spikes_add(struct spikes *spikes, double loss, double norm);
/* The value above which a step is a spike: the mean and `zscore` standard deviations of the window. INFINITY while the
   window is not full, and for a zscore of 0. */
double spikes_loss_limit(const struct spikes *spikes, double zscore);
double spikes_norm_limit(const struct spikes *spikes, double zscore);
/* Why a step with this loss and norm was skipped: "non-finite loss", "non-finite gradient", "loss spike" or "gradient norm
   spike". */
const char *spikes_reason(double loss, double norm, double loss_limit);

#ifdef __cplusplus
}
#endif

#endif
