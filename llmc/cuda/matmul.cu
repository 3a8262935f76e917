/* Matrix products by cuBLASLt. A plan is made once per product (shape, layout, epilogue, types, alignment) and kept:
   descriptors and the chosen algorithm.

   The algorithm is chosen by time: cuBLASLt proposes up to CANDIDATES, they run up to ROUNDS times on the very data of
   the first call, the fastest stays. Products that come once in a while (a sample's growing length) are not worth that
   and take the first proposal. All candidates accumulate in fp32 and, where they split the inner dimension, add the parts
   in fp32.

   Choices are kept on disk, in $FLASHGPT_CACHE or ~/.cache/flashgpt, one file per library version and device. The
   first line for a product counts for everyone, so that all ranks, and a resumed run, compute the same bits; a file
   that cannot be read or written only costs the time of choosing again. */
#include "cuda.cuh"

#include <float.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

enum { CANDIDATES = 16, ROUNDS = 12, WORKSPACE_BYTES = 64 << 20 };

/* What tells one plan from another: all int64_t, so that it compares as bytes and prints as a list. */
struct plan_key {
    int64_t m, n, k, transpose_a, transpose_b, d_dtype, accumulate, epilogue;
    int64_t alignment_a, alignment_b, alignment_d, alignment_bias, alignment_auxiliary;
};
enum { KEY_FIELDS = sizeof(struct plan_key) / sizeof(int64_t) };

struct plan {
    struct plan_key key;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
};
enum { ALGORITHM_WORDS = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t) };

struct matmul_plans {
    cublasLtHandle_t handle;
    bool autotune;
    void *workspace;
    struct plan *plan;
    int count;
    size_t capacity;
    char cache_path[1024]; /* "": there is none */
};

static enum status cublas_failed(cublasStatus_t error, const char *what) {
    return fail("cuBLASLt: %s: %s", what, cublasLtGetStatusString(error));
}

#define CUBLAS_CHECK(call)                                                                                   \
    do {                                                                                                     \
        cublasStatus_t cublas_error_ = (call);                                                               \
        if (cublas_error_ != CUBLAS_STATUS_SUCCESS) {                                                        \
            return cublas_failed(cublas_error_, #call);                                                      \
        }                                                                                                    \
    } while (0)

/* ---- the cache on disk: a line is the key's fields and the algorithm's words ---- */

static void find_cache(struct matmul_plans *plans, const char *device_name) {
    const char *directory = getenv("FLASHGPT_CACHE"), *home = getenv("HOME");
    char base[768];
    if (directory != NULL && directory[0] != '\0') {
        snprintf(base, sizeof base, "%s", directory);
    } else if (home != NULL && home[0] != '\0') {
        snprintf(base, sizeof base, "%s/.cache/flashgpt", home);
    } else {
        return;
    }
    if (make_directories(base) != STATUS_OK) {
        return;
    }
    int written = snprintf(plans->cache_path, sizeof plans->cache_path, "%s/cublaslt-%zu-%s.txt", base,
        cublasLtGetVersion(), device_name);
    for (char *c = plans->cache_path + strlen(base) + 1; *c != '\0'; c++) {
        *c = *c == ' ' || *c == '/' ? '-' : *c;
    }
    if (written < 0 || (size_t)written >= sizeof plans->cache_path) {
        plans->cache_path[0] = '\0';
    }
}

/* Reads `count` numbers of a line; NULL if they are not there. */
static const char *read_numbers(const char *at, uint64_t *out, int count, int base) {
    for (int i = 0; i < count; i++) {
        char *end;
        out[i] = strtoull(at, &end, base);
        if (end == at) {
            return NULL;
        }
        at = end;
    }
    return at;
}

static bool cache_find(
    const struct matmul_plans *plans, const struct plan_key *key, cublasLtMatmulAlgo_t *out) {
    FILE *file = plans->cache_path[0] != '\0' ? fopen(plans->cache_path, "r") : NULL;
    if (file == NULL) {
        return false;
    }
    char line[1024];
    bool found = false;
    while (!found && fgets(line, sizeof line, file) != NULL) {
        uint64_t fields[KEY_FIELDS], words[ALGORITHM_WORDS];
        const char *rest = read_numbers(line, fields, KEY_FIELDS, 10);
        rest = rest != NULL ? read_numbers(rest, words, ALGORITHM_WORDS, 16) : NULL;
        if (rest != NULL && *rest == '\n' && memcmp(fields, key, sizeof fields) == 0) {
            memcpy(out, words, sizeof words);
            found = true;
        }
    }
    fclose(file);
    return found;
}

/* One write of one line, so that the lines of several ranks do not mix. */
static void cache_add(
    const struct matmul_plans *plans, const struct plan_key *key, const cublasLtMatmulAlgo_t *algorithm) {
    int64_t fields[KEY_FIELDS];
    uint64_t words[ALGORITHM_WORDS];
    memcpy(fields, key, sizeof fields);
    memcpy(words, algorithm, sizeof words);
    char line[1024];
    size_t length = 0;
    for (int i = 0; i < KEY_FIELDS; i++) {
        length += (size_t)snprintf(line + length, sizeof line - length, "%" PRId64 " ", fields[i]);
    }
    for (int i = 0; i < ALGORITHM_WORDS; i++) {
        length += (size_t)snprintf(line + length, sizeof line - length, "%" PRIx64 "%c", words[i],
            i + 1 < ALGORITHM_WORDS ? ' ' : '\n');
    }
    int file =
        plans->cache_path[0] != '\0' ? open(plans->cache_path, O_WRONLY | O_APPEND | O_CREAT, 0644) : -1;
    if (file >= 0) {
        ssize_t written = write(file, line, length);
        (void)written; /* a torn line is passed over when read */
        close(file);
    }
}

/* ---- plans ---- */

static int64_t alignment_of(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer;
    return pointer == NULL || address % 256 == 0 ? 256 : (int64_t)(address & (~address + 1));
}

static struct plan_key key_of(const struct matmul *p) {
    struct plan_key key = {p->m, p->n, p->k, p->transpose_a, p->transpose_b, p->d.dtype, p->accumulate,
        p->epilogue, alignment_of(p->a), alignment_of(p->b), alignment_of(p->d.data), alignment_of(p->bias),
        alignment_of(p->auxiliary)};
    return key;
}

static cudaDataType_t cuda_type(enum dtype dtype) {
    return dtype == DTYPE_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

static void plan_destroy(struct plan *plan) {
    if (plan->d != NULL) {
        cublasLtMatrixLayoutDestroy(plan->d);
    }
    if (plan->b != NULL) {
        cublasLtMatrixLayoutDestroy(plan->b);
    }
    if (plan->a != NULL) {
        cublasLtMatrixLayoutDestroy(plan->a);
    }
    if (plan->operation != NULL) {
        cublasLtMatmulDescDestroy(plan->operation);
    }
}

static enum status set_attribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
    const void *value, size_t bytes) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, value, bytes));
    return STATUS_OK;
}

static enum status set_pointers(struct plan *plan, const struct matmul *p) {
    if (p->bias != NULL) {
        CHECK(set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, sizeof p->bias));
    }
    if (p->auxiliary != NULL) {
        CHECK(set_attribute(
            plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->auxiliary, sizeof p->auxiliary));
    }
    return STATUS_OK;
}

static enum status describe(struct plan *plan, const struct matmul *p) {
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t a = p->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                      b = p->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    CHECK(set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a));
    CHECK(set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b));
    CHECK(set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &p->epilogue, sizeof p->epilogue));
    if (p->auxiliary != NULL) {
        CHECK(set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &p->m, sizeof p->m));
    }
    CHECK(set_pointers(plan, p));
    uint64_t m = (uint64_t)p->m, n = (uint64_t)p->n, k = (uint64_t)p->k;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(
        &plan->a, CUDA_R_16BF, p->transpose_a ? k : m, p->transpose_a ? m : k, p->transpose_a ? p->k : p->m));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(
        &plan->b, CUDA_R_16BF, p->transpose_b ? n : k, p->transpose_b ? k : n, p->transpose_b ? p->n : p->k));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->d, cuda_type(p->d.dtype), m, n, p->m));
    return STATUS_OK;
}

static enum status propose(struct matmul_plans *plans, const struct plan *plan, int wanted,
    cublasLtMatmulHeuristicResult_t *results, int *count) {
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const struct plan_key *key = &plan->key;
    uint64_t workspace_bytes = WORKSPACE_BYTES;
    uint32_t fp32_reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint32_t a = (uint32_t)key->alignment_a, b = (uint32_t)key->alignment_b, d = (uint32_t)key->alignment_d;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t bytes;
    } settings[] = {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &fp32_reductions, sizeof fp32_reductions},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a, sizeof a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b, sizeof b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &d, sizeof d},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &d, sizeof d}};
    cublasStatus_t error = CUBLAS_STATUS_SUCCESS;
    for (size_t i = 0; i < sizeof settings / sizeof settings[0] && error == CUBLAS_STATUS_SUCCESS; i++) {
        error = cublasLtMatmulPreferenceSetAttribute(
            preference, settings[i].attribute, settings[i].value, settings[i].bytes);
    }
    *count = 0;
    if (error == CUBLAS_STATUS_SUCCESS) {
        error = cublasLtMatmulAlgoGetHeuristic(plans->handle, plan->operation, plan->a, plan->b, plan->d,
            plan->d, preference, wanted, results, count);
    }
    cublasLtMatmulPreferenceDestroy(preference);
    if (error != CUBLAS_STATUS_SUCCESS || *count == 0) {
        return fail("cuBLASLt has no algorithm for a product of %lld x %lld x %lld (epilogue %d): %s",
            (long long)key->m, (long long)key->n, (long long)key->k, (int)key->epilogue,
            cublasLtGetStatusString(error));
    }
    return STATUS_OK;
}

static enum status run(struct backend *b, const struct plan *plan, const struct matmul *p,
    const cublasLtMatmulAlgo_t *algorithm, float alpha) {
    const float beta = p->accumulate ? 1.0f : 0.0f;
    struct matmul_plans *plans = b->state->plans;
    CUBLAS_CHECK(
        cublasLtMatmul(plans->handle, plan->operation, &alpha, p->a, plan->a, p->b, plan->b, &beta, p->d.data,
            plan->d, p->d.data, plan->d, algorithm, plans->workspace, WORKSPACE_BYTES, b->state->stream));
    return STATUS_OK;
}

/* ---- choosing by time ---- */

/* Milliseconds of one run; FLT_MAX if the candidate does not run. */
static enum status time_candidate(struct backend *b, const struct plan *plan, const struct matmul *p,
    const cublasLtMatmulAlgo_t *algorithm, cudaEvent_t start, cudaEvent_t stop, float *milliseconds) {
    /* accumulating, the trial runs must leave D as it is: their products shrink to nothing */
    float alpha = p->accumulate ? FLT_MIN : 1.0f;
    *milliseconds = FLT_MAX;
    CUDA_CHECK(cudaEventRecord(start, b->state->stream));
    if (run(b, plan, p, algorithm, alpha) != STATUS_OK) {
        return STATUS_OK;
    }
    CUDA_CHECK(cudaEventRecord(stop, b->state->stream));
    CUDA_CHECK(cudaEventSynchronize(stop));
    CUDA_CHECK(cudaEventElapsedTime(milliseconds, start, stop));
    return STATUS_OK;
}

/* Candidates run in turns, so that all see the same clock rates, and their times are added up; one that falls behind
   is out, and those that stay are told apart by many rounds: they differ by less than one run does from the next. */
static enum status time_rounds(struct backend *b, struct plan *plan, const struct matmul *p,
    const cublasLtMatmulHeuristicResult_t *candidates, int count, cudaEvent_t start, cudaEvent_t stop) {
    const float behind = 1.06f;
    float total[CANDIDATES] = {0}, least = 0.0f;
    for (int round = 0; round <= ROUNDS; round++) {
        float before = least;
        least = FLT_MAX;
        for (int i = 0; i < count; i++) {
            if (round > 2 && total[i] > behind * before) {
                total[i] = FLT_MAX;
                continue;
            }
            float milliseconds;
            CHECK(time_candidate(b, plan, p, &candidates[i].algo, start, stop, &milliseconds));
            total[i] = round > 0 ? total[i] + milliseconds : 0.0f; /* the first run loads code */
            if (total[i] < least) {
                least = total[i];
                plan->algorithm = candidates[i].algo;
            }
        }
    }
    return STATUS_OK;
}

static enum status choose_by_time(struct backend *b, struct plan *plan, const struct matmul *p,
    const cublasLtMatmulHeuristicResult_t *candidates, int count) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    enum status status = time_rounds(b, plan, p, candidates, count, start, stop);
    cudaEventDestroy(stop);
    cudaEventDestroy(start);
    return status;
}

/* A large product of round sizes comes again at every step. */
static bool worth_timing(const struct matmul *p) {
    double flops = 2.0 * (double)p->m * (double)p->n * (double)p->k;
    return flops >= 1e9 && p->m % 64 == 0 && p->n % 64 == 0 && p->k % 64 == 0;
}

/* An algorithm from the cache may be damaged: cuBLASLt says whether it fits the product. */
static bool cached_algorithm(struct matmul_plans *plans, struct plan *plan) {
    cublasLtMatmulAlgo_t algorithm;
    cublasLtMatmulHeuristicResult_t result;
    if (!cache_find(plans, &plan->key, &algorithm) ||
        cublasLtMatmulAlgoCheck(plans->handle, plan->operation, plan->a, plan->b, plan->d, plan->d,
            &algorithm, &result) != CUBLAS_STATUS_SUCCESS ||
        result.workspaceSize > WORKSPACE_BYTES) {
        return false;
    }
    plan->algorithm = algorithm;
    return true;
}

static enum status choose_algorithm(struct backend *b, struct plan *plan, const struct matmul *p) {
    struct matmul_plans *plans = b->state->plans;
    bool timed = plans->autotune && worth_timing(p);
    if (timed && cached_algorithm(plans, plan)) {
        return STATUS_OK;
    }
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
    int count;
    CHECK(propose(plans, plan, timed ? CANDIDATES : 1, candidates, &count));
    plan->algorithm = candidates[0].algo;
    if (timed && count > 1) {
        CHECK(choose_by_time(b, plan, p, candidates, count));
        cache_add(plans, &plan->key, &plan->algorithm);
        cached_algorithm(plans, plan); /* another rank may have been first */
    }
    return STATUS_OK;
}

static enum status plan_make(struct backend *b, struct plan *plan, const struct matmul *p) {
    plan->key = key_of(p);
    CHECK(describe(plan, p));
    return choose_algorithm(b, plan, p);
}

static enum status plan_find(struct backend *b, struct plan **out, const struct matmul *p) {
    struct matmul_plans *plans = b->state->plans;
    struct plan_key key = key_of(p);
    for (int i = 0; i < plans->count; i++) {
        if (memcmp(&plans->plan[i].key, &key, sizeof key) == 0) {
            *out = &plans->plan[i];
            return STATUS_OK;
        }
    }
    CHECK(RESERVE(plans->plan, plans->capacity, plans->count + 1));
    struct plan *plan = &plans->plan[plans->count];
    memset(plan, 0, sizeof *plan);
    enum status status = plan_make(b, plan, p);
    if (status != STATUS_OK) {
        plan_destroy(plan);
        return status;
    }
    plans->count++;
    *out = plan;
    return STATUS_OK;
}

enum status matmul(struct backend *b, const struct matmul *p) {
    struct plan *plan = NULL;
    CHECK(plan_find(b, &plan, p));
    CHECK(set_pointers(plan, p));
    return run(b, plan, p, &plan->algorithm, 1.0f);
}

/* ---- life ---- */

enum status matmul_plans_create(struct backend *b, bool autotune) {
    struct backend_state *s = b->state;
    CHECK(ALLOCATE(s->plans, 1));
    s->plans->autotune = autotune;
    CUBLAS_CHECK(cublasLtCreate(&s->plans->handle));
    CHECK(b->memory_allocate(b, &s->plans->workspace, WORKSPACE_BYTES));
    find_cache(s->plans, b->device_name);
    return STATUS_OK;
}

void matmul_plans_free(struct backend *b) {
    struct matmul_plans *plans = b->state->plans;
    if (plans == NULL) {
        return;
    }
    for (int i = 0; i < plans->count; i++) {
        plan_destroy(&plans->plan[i]);
    }
    free(plans->plan);
    b->memory_free(b, plans->workspace);
    if (plans->handle != NULL) {
        cublasLtDestroy(plans->handle);
    }
    free(plans);
}
