/* The CPU backend's table: its life, its memory and copies. Calls are done when they return, so there is nothing to
   wait for. A block of memory has its size in the 256 bytes before it. */
#include "cpu.h"

#include <stdlib.h>
#include <unistd.h>
#ifdef WITH_OPENBLAS
#include <cblas.h>
#endif

enum { ALIGNMENT = 256 };

static uint64_t physical_memory_bytes(void) {
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    return pages > 0 && page_bytes > 0 ? (uint64_t)pages * (uint64_t)page_bytes : 0;
}

static int core_count(void) {
#ifdef _OPENMP
    return omp_get_num_procs();
#else
    return 1;
#endif
}

/* ---- memory ---- */

/* Linux hands out more memory than there is and kills whoever uses it: what can never fit is refused here. */
static enum status memory_allocate(struct backend *b, void **out, size_t bytes) {
    struct backend_state *s = b->state;
    *out = NULL;
    if (s->total_bytes != 0 &&
        bytes > s->total_bytes - min_i64((int64_t)s->used_bytes, (int64_t)s->total_bytes)) {
        return fail_as(STATUS_OUT_OF_MEMORY,
            "out of memory: %zu bytes wanted beside %llu in use, this machine has %llu; make the model or "
            "--micro-batch smaller",
            bytes, (unsigned long long)s->used_bytes, (unsigned long long)s->total_bytes);
    }
    char *block = NULL;
    if (bytes <= SIZE_MAX - 2 * ALIGNMENT) {
        block = aligned_alloc(ALIGNMENT, ALIGNMENT + (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    }
    if (block == NULL) {
        return fail_as(STATUS_OUT_OF_MEMORY,
            "out of memory: the system refuses %zu bytes; make the model or --micro-batch smaller", bytes);
    }
    memcpy(block, &bytes, sizeof bytes);
    s->used_bytes += bytes;
    s->peak_bytes = s->used_bytes > s->peak_bytes ? s->used_bytes : s->peak_bytes;
    *out = block + ALIGNMENT;
    return STATUS_OK;
}

static void memory_free(struct backend *b, void *pointer) {
    if (pointer == NULL) {
        return;
    }
    char *block = (char *)pointer - ALIGNMENT;
    size_t bytes;
    memcpy(&bytes, block, sizeof bytes);
    b->state->used_bytes -= bytes;
    free(block);
}

static void memory_usage(struct backend *b, uint64_t *used, uint64_t *peak, uint64_t *total) {
    *used = b->state->used_bytes;
    *peak = b->state->peak_bytes;
    *total = b->state->total_bytes;
}

static enum status copy_to_device(struct backend *b, void *device, const void *host, size_t bytes) {
    (void)b;
    memcpy(device, host, bytes);
    return STATUS_OK;
}

static enum status copy_to_host(struct backend *b, void *host, const void *device, size_t bytes) {
    (void)b;
    memcpy(host, device, bytes);
    return STATUS_OK;
}

static enum status copy(struct backend *b, void *to, const void *from, size_t bytes) {
    (void)b;
    memmove(to, from, bytes);
    return STATUS_OK;
}

static enum status set_zero(struct backend *b, void *device, size_t bytes) {
    (void)b;
    memset(device, 0, bytes);
    return STATUS_OK;
}

static enum status synchronize(struct backend *b) {
    (void)b;
    return STATUS_OK;
}

/* ---- time ---- */

static enum status mark(struct backend *b, int index) {
    b->state->marks[index] = time_seconds();
    return STATUS_OK;
}

static enum status elapsed(struct backend *b, int from, int to, double *milliseconds) {
    *milliseconds = (b->state->marks[to] - b->state->marks[from]) * 1e3;
    return STATUS_OK;
}

static void range_begin(struct backend *b, const char *name) {
    (void)b;
    (void)name;
}

static void range_end(struct backend *b) {
    (void)b;
}

/* ---- life ---- */

static void backend_free(struct backend *b) {
    if (b == NULL) {
        return;
    }
    if (b->state != NULL) {
        memory_free(b, b->state->scratch);
        free(b->state);
    }
    free(b);
}

static void install(struct backend *b) {
    b->free = backend_free;
    b->memory_allocate = memory_allocate;
    b->memory_free = memory_free;
    b->memory_usage = memory_usage;
    b->copy_to_device = copy_to_device;
    b->copy_to_host = copy_to_host;
    b->copy = copy;
    b->set_zero = set_zero;
    b->synchronize = synchronize;
    b->mark = mark;
    b->elapsed = elapsed;
    b->range_begin = range_begin;
    b->range_end = range_end;
    embedding_install(b);
    layernorm_install(b);
    linear_install(b);
    attention_install(b);
    classifier_install(b);
    optimizer_install(b);
    random_install(b);
}

static enum status prepare(struct backend *b, const char *device, int threads) {
    CHECK(backend_profile_find(&b->profile, device, "auto"));
    CHECK(ALLOCATE(b->state, 1));
    b->state->threads = threads;
    snprintf(b->device_name, sizeof b->device_name, "CPU, %d thread%s", threads, threads == 1 ? "" : "s");
    b->state->total_bytes = physical_memory_bytes();
    b->profile.workspace_bytes = (size_t)threads * sizeof(struct scratch);
    void *scratch;
    CHECK(memory_allocate(b, &scratch, b->profile.workspace_bytes));
    b->state->scratch = scratch;
    return STATUS_OK;
}

#ifdef CPU_F64
#define CREATE backend_cpu_f64_create
#define DEVICE "cpu-f64"
#else
#define CREATE backend_cpu_create
#define DEVICE "cpu"
#endif

enum status CREATE(struct backend **out, int threads) {
    *out = NULL;
    if (threads < 0 || threads > 4096) {
        return fail("--threads: %d is not between 0 and 4096", threads);
    }
    struct backend *b;
    CHECK(ALLOCATE(b, 1));
    install(b);
    enum status status = prepare(b, DEVICE, threads == 0 ? core_count() : threads);
    if (status != STATUS_OK) {
        backend_free(b);
        return status;
    }
#ifdef WITH_OPENBLAS
    openblas_set_num_threads(1); /* the threads are ours: each multiplies its own tile */
#endif
    *out = b;
    return STATUS_OK;
}
