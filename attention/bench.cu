/* TFLOP/s of the attention kernels over the FlashAttention-2 paper's grid, and a little more.

   usage: build/attention/bench [--kernel LIST] [--head-dim LIST] [--seqlen LIST] [--repeats N] [--json FILE] [--deterministic]
          (--kernel, --head-dim and --seqlen are lists with commas, and keep only the cases that agree; or by
          make bench-attention ARGS="...")

   The grid: 16,384 tokens, hidden dimension 2048 (2560 for head dimension 80), bf16, causal and not. FLOPs: forward 4
   seqlen^2 head_dim heads a sequence, half of it causal; backward 2.5 times that. Times are medians of single calls
   between events, after a warm-up, on random data; slow kernels are repeated less often.

   Before a kernel is timed, random rows of its results are compared with the float64 reference; a case that is wrong
   prints "wrong" and makes the exit status 1. The table is Markdown; times are in the JSON lines. */
#include "attention/check_rows.cuh"

struct bench_case {
    int64_t head_dim, seqlen, batch, heads, kv_heads;
    bool causal;
};

struct bench_options {
    const char *kernels, *head_dims, *seqlens; /* lists; NULL: all */
    const char *json;
    int repeats;
    bool deterministic;
};

static struct attention_params make_data(const struct bench_case *c, bool deterministic) {
    struct attention_params p = {};
    p.dtype = DTYPE_BF16;
    p.batch = c->batch, p.seqlen_q = p.seqlen_k = c->seqlen;
    p.heads = c->heads, p.kv_heads = c->kv_heads, p.head_dim = c->head_dim;
    p.scale = 1 / sqrt((double)c->head_dim);
    p.causal = c->causal, p.deterministic = deterministic;
    make_random_data(&p, 0, 1);
    return p;
}

/* ---- timing ---- */

typedef enum status (*pass)(struct attention *, const struct attention_params *);

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static float one_ms(struct attention *kernel, const struct attention_params *p, pass run, cudaEvent_t begin,
    cudaEvent_t end) {
    float ms;
    CUDA_MUST(cudaEventRecord(begin));
    MUST(run(kernel, p));
    CUDA_MUST(cudaEventRecord(end));
    CUDA_MUST(cudaEventSynchronize(end));
    CUDA_MUST(cudaEventElapsedTime(&ms, begin, end));
    return ms;
}

static double median_ms(struct attention *kernel, const struct attention_params *p, pass run, int repeats) {
    enum { WARM_UPS = 3, MOST_REPEATS = 1000, LONGEST_WARM_UP_MS = 100, LONGEST_MS = 500 };
    float times[MOST_REPEATS], total = 0;
    cudaEvent_t begin, end;
    CUDA_MUST(cudaEventCreate(&begin));
    CUDA_MUST(cudaEventCreate(&end));
    for (int i = 0; i < WARM_UPS && total < LONGEST_WARM_UP_MS; i++) {
        total += one_ms(kernel, p, run, begin, end);
    }
    int count = 0;
    for (total = 0; count < repeats && count < MOST_REPEATS && total < LONGEST_MS; count++) {
        times[count] = one_ms(kernel, p, run, begin, end);
        total += times[count];
    }
    CUDA_MUST(cudaEventDestroy(begin));
    CUDA_MUST(cudaEventDestroy(end));
    qsort(times, (size_t)count, sizeof *times, compare_floats);
    return times[count / 2];
}

/* ---- the table ---- */

enum { CHECKED_ROWS = 8 };

/* Prints a cell, and a line of JSON. False if the kernel was wrong. */
static bool bench_kernel(
    const struct bench_case *c, struct attention_params *p, const char *name, int repeats, FILE *json) {
    struct attention *kernel;
    MUST(attention_create(&kernel, name));
    p->saved = poisoned_memory(attention_saved_bytes(name, p));
    p->workspace = poisoned_memory(attention_workspace_bytes(name, p));
    MUST(attention_forward(kernel, p));
    MUST(attention_backward(kernel, p));
    double error = relative_error_of_rows(p, CHECKED_ROWS);
    double forward = median_ms(kernel, p, attention_forward, repeats),
           backward = median_ms(kernel, p, attention_backward, repeats);
    double flops =
        4.0 * (double)(c->seqlen * c->seqlen * c->head_dim * c->heads * c->batch) * (c->causal ? 0.5 : 1);
    double forward_rate = flops / forward / 1e9, backward_rate = 2.5 * flops / backward / 1e9,
           rate = 3.5 * flops / (forward + backward) / 1e9;
    bool right = error <= LARGEST_ROW_ERROR;
    if (right) {
        printf(" %.0f / %.0f / %.0f |", forward_rate, backward_rate, rate);
    } else {
        printf(" wrong: relative error %.2g |", error);
    }
    fflush(stdout);
    if (json != NULL) {
        fprintf(json,
            "{\"kernel\": \"%s\", \"head_dim\": %d, \"seqlen\": %d, \"batch\": %d, \"heads\": %d, "
            "\"kv_heads\": %d, \"causal\": %s, \"forward_ms\": %.4f, \"backward_ms\": %.4f, "
            "\"forward_tflops\": %.1f, \"backward_tflops\": %.1f, \"both_tflops\": %.1f, "
            "\"relative_error\": %.2e}\n",
            name, (int)c->head_dim, (int)c->seqlen, (int)c->batch, (int)c->heads, (int)c->kv_heads,
            c->causal ? "true" : "false", forward, backward, forward_rate, backward_rate, rate, error);
    }
    attention_free(kernel);
    CUDA_MUST(cudaFree(p->saved));
    CUDA_MUST(cudaFree(p->workspace));
    return right;
}

/* Made for this GPU and head dimension, and what it keeps fits: the standard kernel does not at every length. */
static bool suits(const char *name, const struct attention_params *p) {
    struct cudaDeviceProp device;
    CUDA_MUST(cudaGetDeviceProperties(&device, 0));
    if (!attention_kernel_suits(name, 10 * device.major + device.minor, p->head_dim)) {
        return false;
    }
    size_t free_bytes, total_bytes;
    CUDA_MUST(cudaMemGetInfo(&free_bytes, &total_bytes));
    return attention_saved_bytes(name, p) + attention_workspace_bytes(name, p) < free_bytes / 10 * 9;
}

/* Is the name in the list, "a,b,c"? NULL has all. */
static bool listed(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *at = list; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == '\0')) {
            return true;
        }
    }
    return list == NULL;
}

static bool listed_number(const char *list, int64_t number) {
    char name[24];
    snprintf(name, sizeof name, "%lld", (long long)number);
    return listed(list, name);
}

static void print_header(const struct bench_options *o) {
    const char *name;
    char rule[256] = "|--:|--:|--:|---|";
    printf("| head dim | seqlen | batch x heads | mask |");
    for (int i = 0; (name = attention_kernel_name(i)) != NULL; i++) {
        if (listed(o->kernels, name)) {
            printf(" %s |", name);
            strncat(rule, "--:|", sizeof rule - strlen(rule) - 1);
        }
    }
    printf("\n%s\n", rule);
}

static bool bench_case_run(const struct bench_case *c, const struct bench_options *o, FILE *json) {
    if (!listed_number(o->head_dims, c->head_dim) || !listed_number(o->seqlens, c->seqlen)) {
        return true;
    }
    struct attention_params p = make_data(c, o->deterministic);
    bool right = true;
    const char *name;
    printf("| %d | %d | %d x %d/%d | %s |", (int)c->head_dim, (int)c->seqlen, (int)c->batch, (int)c->heads,
        (int)c->kv_heads, c->causal ? "causal" : "full");
    for (int i = 0; (name = attention_kernel_name(i)) != NULL; i++) {
        if (listed(o->kernels, name) && suits(name, &p)) {
            right &= bench_kernel(c, &p, name, o->repeats, json);
        } else if (listed(o->kernels, name)) {
            printf(" - |");
        }
    }
    printf("\n");
    free_data(&p);
    return right;
}

static bool bench_grid(const struct bench_options *o, FILE *json) {
    static const int64_t others[][5] = {/* head_dim, seqlen, batch, heads, kv_heads */
        {128, 2048, 8, 16, 4}, {128, 8192, 2, 16, 4}, {64, 2048, 8, 32, 1}, {96, 2048, 8, 20, 20},
        {96, 8192, 2, 20, 20}, {192, 2048, 8, 10, 10}, {192, 8192, 2, 10, 10}, {256, 2048, 8, 8, 8},
        {256, 8192, 2, 8, 8}};
    static const int64_t head_dims[] = {64, 128, 80};
    bool right = true;
    for (int causal = 0; causal < 2; causal++) {
        for (int d = 0; d < 3; d++) {
            for (int64_t seqlen = 512; seqlen <= 16384; seqlen *= 2) {
                int64_t heads = (head_dims[d] == 80 ? 2560 : 2048) / head_dims[d];
                struct bench_case c = {head_dims[d], seqlen, 16384 / seqlen, heads, heads, causal == 1};
                right &= bench_case_run(&c, o, json);
            }
        }
        for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
            const int64_t *g = others[i];
            struct bench_case c = {g[0], g[1], g[2], g[3], g[4], causal == 1};
            right &= bench_case_run(&c, o, json);
        }
    }
    return right;
}

/* ---- the program ---- */

static const char USAGE[] =
    "usage: build/attention/bench [--kernel LIST] [--head-dim LIST] [--seqlen LIST] [--repeats N] "
    "[--json FILE] [--deterministic]\n";

static struct bench_options parse(int argc, char **argv) {
    struct bench_options o = {};
    o.repeats = 15;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--deterministic") == 0) {
            o.deterministic = true;
            continue;
        }
        if (value != NULL && strcmp(argv[i], "--kernel") == 0) {
            o.kernels = value;
        } else if (value != NULL && strcmp(argv[i], "--json") == 0) {
            o.json = value;
        } else if (value != NULL && strcmp(argv[i], "--head-dim") == 0) {
            o.head_dims = value;
        } else if (value != NULL && strcmp(argv[i], "--seqlen") == 0) {
            o.seqlens = value;
        } else if (value != NULL && strcmp(argv[i], "--repeats") == 0 && atoi(value) > 0) {
            o.repeats = atoi(value);
        } else {
            fputs(USAGE, stderr);
            exit(1);
        }
        i++;
    }
    return o;
}

int main(int argc, char **argv) {
    struct bench_options o = parse(argc, argv);
    FILE *json = o.json != NULL ? fopen(o.json, "w") : NULL;
    if (o.json != NULL && json == NULL) {
        fprintf(stderr, "bench-attention: cannot write %s\n", o.json);
        return 1;
    }
    struct cudaDeviceProp device;
    CUDA_MUST(cudaGetDeviceProperties(&device, 0));
    printf("%s, %d multiprocessors; bf16, TFLOP/s forward / backward / both, medians of %d%s\n\n",
        device.name, device.multiProcessorCount, o.repeats, o.deterministic ? ", deterministic" : "");
    print_header(&o);
    bool right = bench_grid(&o, json);
    if (json != NULL && fclose(json) != 0) {
        fprintf(stderr, "bench-attention: cannot write %s\n", o.json);
        return 1;
    }
    return right ? 0 : 1;
}
