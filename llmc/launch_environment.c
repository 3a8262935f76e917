/* Who the environment says this process is: torchrun's variables (also what a person sets by hand), Open MPI's, Slurm's.
   Nothing here talks to anybody. */
#include "launch.h"

#include <ctype.h>
#include <stdlib.h>

enum { STANDARD_PORT = 29500, SLURM_FIRST_PORT = 20000, SLURM_PORTS = 10000 };

static bool is_set(const char *name) {
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0';
}

/* The variable as a whole number from least to most; `standard` where it is not set. */
static enum status read_number(int *out, const char *name, int standard, int least, int most) {
    *out = standard;
    if (!is_set(name)) {
        return STATUS_OK;
    }
    char *end;
    long value = strtol(getenv(name), &end, 10);
    if (*end != '\0' || value < least || value > most) {
        return fail("the environment's %s=%.40s: must be a whole number from %d to %d", name, getenv(name),
            least, most);
    }
    *out = (int)value;
    return STATUS_OK;
}

/* The names of a launcher's variables. */
struct names {
    const char *launcher, *rank, *ranks, *local_rank, *local_ranks;
};

static enum status read_numbers(struct launch_place *p, const struct names *names) {
    p->launcher = names->launcher;
    if (!is_set(names->rank) || !is_set(names->ranks)) {
        return fail("the environment has %s without %s: set both to start ranks one by one, or neither",
            is_set(names->rank) ? names->rank : names->ranks,
            is_set(names->rank) ? names->ranks : names->rank);
    }
    CHECK(read_number(&p->ranks, names->ranks, 0, 1, COMM_MAX_RANKS));
    CHECK(read_number(&p->rank, names->rank, 0, 0, p->ranks - 1));
    CHECK(read_number(&p->local_rank, names->local_rank, p->rank, 0, p->ranks - 1));
    return read_number(&p->local_ranks, names->local_ranks, p->local_rank + 1, p->local_rank + 1, p->ranks);
}

/* The first host of Slurm's short form: "gpu[07-09,12],login" gives gpu07. */
static void first_host(char *out, size_t size, const char *list) {
    size_t prefix = strcspn(list, "[,");
    size_t number = list[prefix] == '[' ? strcspn(list + prefix + 1, "-,]") : 0;
    snprintf(out, size, "%.*s%.*s", (int)prefix, list, (int)number, list + prefix + (number > 0));
}

static void take_token(struct launch_place *p, const char *name) {
    if (p->token[0] == '\0' && is_set(name)) {
        snprintf(p->token, sizeof p->token, "%.*s", (int)sizeof p->token - 1, getenv(name));
    }
}

/* Rank 0's address and port. torchrun's agent listens at MASTER_PORT itself, so the port after it is taken. */
static enum status read_meeting_place(struct launch_place *p) {
    bool agent = is_set("TORCHELASTIC_RUN_ID");
    CHECK(read_number(&p->port, "MASTER_PORT", p->port, 1, 65535));
    p->port += agent && p->port < 65535;
    CHECK(read_number(&p->port, "FLASHGPT_PORT", p->port, 1, 65535));
    if (is_set("MASTER_ADDR")) {
        snprintf(p->address, sizeof p->address, "%s", getenv("MASTER_ADDR"));
    }
    if (p->address[0] == '\0') {
        return fail("%s started rank %d of %d, but not where rank 0 is: set MASTER_ADDR to its host",
            p->launcher, p->rank, p->ranks);
    }
    return STATUS_OK;
}

static enum status read_slurm(struct launch_place *p) {
    static const struct names names = {
        "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"};
    int job;
    CHECK(read_numbers(p, &names));
    /* "8" or "8(x4)" or "8,4": tasks on each host */
    if (is_set("SLURM_STEP_TASKS_PER_NODE")) {
        int tasks = atoi(getenv("SLURM_STEP_TASKS_PER_NODE"));
        p->local_ranks = tasks > p->local_rank ? tasks : p->local_rank + 1;
    }
    CHECK(read_number(&job, "SLURM_JOB_ID", 0, 0, INT32_MAX));
    p->port = SLURM_FIRST_PORT + job % SLURM_PORTS;
    if (is_set("SLURM_STEP_NODELIST")) {
        first_host(p->address, sizeof p->address, getenv("SLURM_STEP_NODELIST"));
    }
    return STATUS_OK;
}

enum status launch_read_environment(struct launch_place *p) {
    static const struct names by_hand = {
        "the environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
    static const struct names open_mpi = {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
    memset(p, 0, sizeof *p);
    p->port = STANDARD_PORT;
    if (is_set("RANK") || is_set("WORLD_SIZE")) {
        CHECK(read_numbers(p, &by_hand));
        p->launcher = is_set("TORCHELASTIC_RUN_ID") ? "torchrun" : by_hand.launcher;
    } else if (is_set("OMPI_COMM_WORLD_RANK")) {
        CHECK(read_numbers(p, &open_mpi));
        if (p->local_ranks == p->ranks) {
            snprintf(p->address, sizeof p->address, "127.0.0.1");
        }
    } else if (is_set("SLURM_STEP_NUM_TASKS")) { /* of a step: a batch script has no ranks of its own */
        CHECK(read_slurm(p));
    }
    if (p->ranks <= 1) {
        p->ranks = 0;
        return STATUS_OK;
    }
    take_token(p, "FLASHGPT_TOKEN");
    take_token(p, "TORCHELASTIC_RUN_ID");
    take_token(p, "SLURM_JOB_ID");
    take_token(p, "OMPI_MCA_ess_base_jobid");
    return read_meeting_place(p);
}
