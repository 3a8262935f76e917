/* Moments move between the device and the files through a small buffer on the host. The reader looks at every file, so
   that each rank knows that the pieces make up whole buckets, and reads the ranges that it keeps. */
#include "moments.h"

#include "safetensors.h"

#include <inttypes.h>
#include <stdlib.h>

enum { PIECE_BYTES = 4 << 20, TENSOR_NAME_BYTES = 32, PATH_BYTES = 4096 };
static const char FORMAT[] = "flashgpt moments 1", BUCKET_FIRST[] = "bucket_first";
/* the two moments, in the order in which they are stored */
static const char *const moment_names[2] = {"first_moment", "second_moment"};

static struct tensor moment_tensor(const struct optimizer *o, int moment) {
    return moment == 0 ? o->first_moment : o->second_moment;
}

void moments_file_name(char name[MOMENTS_NAME_BYTES], int rank, int ranks) {
    snprintf(name, MOMENTS_NAME_BYTES, "optimizer-%05d-of-%05d.safetensors", rank, ranks);
}

static void tensor_name(char name[TENSOR_NAME_BYTES], int moment, int bucket) {
    snprintf(name, TENSOR_NAME_BYTES, "%s.%d", moment_names[moment], bucket);
}

/* ---- writing ---- */

/* The file's entries, with their names in `names`, and the first element of each bucket. */
static void describe_file(const struct optimizer *o, struct safetensors_entry *entries,
    char (*names)[TENSOR_NAME_BYTES], int64_t *bucket_first) {
    int buckets = model_get_layout(o->model)->buckets;
    snprintf(names[0], TENSOR_NAME_BYTES, "%s", BUCKET_FIRST);
    entries[0] = (struct safetensors_entry){names[0], DTYPE_I64, 1, {buckets}, 0, 0};
    for (int b = 0; b < buckets; b++) {
        int64_t count;
        optimizer_piece(o, b, &bucket_first[b], &count);
        for (int moment = 0; moment < 2; moment++) {
            int i = 1 + 2 * b + moment;
            tensor_name(names[i], moment, b);
            entries[i] =
                (struct safetensors_entry){names[i], moment_tensor(o, moment).dtype, 1, {count}, 0, 0};
        }
    }
}

static enum status create_file(struct safetensors_writer **out, const char *folder, const struct optimizer *o,
    struct safetensors_entry *entries, size_t count) {
    char name[MOMENTS_NAME_BYTES], path[PATH_BYTES], rank[16], ranks[16], zero_stage[16];
    moments_file_name(name, o->comm->rank, o->comm->ranks);
    CHECK(path_join(path, sizeof path, folder, name));
    snprintf(rank, sizeof rank, "%d", o->comm->rank);
    snprintf(ranks, sizeof ranks, "%d", o->comm->ranks);
    snprintf(zero_stage, sizeof zero_stage, "%d", o->options.zero_stage);
    const char *const keys[] = {"format", "rank", "ranks", "zero_stage"};
    const char *const values[] = {FORMAT, rank, ranks, zero_stage};
    return safetensors_create(out, path, entries, count, keys, values, 4);
}

/* Elements [first, first + count) of a bucket's moment, which this rank keeps. */
static enum status write_range(struct safetensors_writer *w, const struct optimizer *o, int moment,
    int bucket, int64_t first, int64_t count, void *piece) {
    struct tensor state = moment_tensor(o, moment);
    int64_t size = (int64_t)dtype_bytes(state.dtype), step = PIECE_BYTES / size;
    int64_t shard_first, shard_count;
    optimizer_shard(o, bucket, &shard_first, &shard_count);
    int64_t from = o->state_offset[bucket] + first - shard_first;
    for (int64_t done = 0; done < count; done += step) {
        size_t bytes = (size_t)(min_i64(step, count - done) * size);
        CHECK(o->backend->copy_to_host(o->backend, piece, tensor_at(state, from + done).data, bytes));
        CHECK(safetensors_write(w, piece, bytes));
    }
    return STATUS_OK;
}

static enum status write_data(
    struct safetensors_writer *w, const struct optimizer *o, const int64_t *bucket_first, void *piece) {
    int buckets = model_get_layout(o->model)->buckets;
    CHECK(safetensors_write(w, bucket_first, (size_t)buckets * sizeof *bucket_first));
    for (int b = 0; b < buckets; b++) {
        int64_t first, count;
        optimizer_piece(o, b, &first, &count);
        for (int moment = 0; moment < 2; moment++) {
            CHECK(write_range(w, o, moment, b, first, count, piece));
        }
    }
    return STATUS_OK;
}

enum status moments_write(const char *folder, const struct optimizer *o, uint64_t *xxh64, uint64_t *bytes) {
    enum status status = STATUS_OK;
    size_t buckets = (size_t)model_get_layout(o->model)->buckets, count = 1 + 2 * buckets;
    struct safetensors_entry *entries = NULL;
    struct safetensors_writer *writer = NULL;
    char(*names)[TENSOR_NAME_BYTES] = NULL;
    int64_t *bucket_first = NULL;
    uint8_t *piece = NULL;
    CHECK_CLEANUP(ALLOCATE(entries, count));
    CHECK_CLEANUP(ALLOCATE(names, count));
    CHECK_CLEANUP(ALLOCATE(bucket_first, buckets));
    CHECK_CLEANUP(ALLOCATE(piece, PIECE_BYTES));
    describe_file(o, entries, names, bucket_first);
    CHECK_CLEANUP(create_file(&writer, folder, o, entries, count));
    CHECK_CLEANUP(write_data(writer, o, bucket_first, piece));
cleanup:
    if (writer != NULL) {
        enum status finish = safetensors_finish(writer, xxh64, bytes);
        status = status == STATUS_OK ? finish : status;
    }
    free(piece);
    free(bucket_first);
    free(names);
    free(entries);
    return status;
}

/* ---- reading ---- */

struct reading {
    struct optimizer *optimizer;
    int file_ranks;
    int64_t *bucket_first; /* of the file at hand */
    int64_t *covered;      /* of each bucket: the elements that the files so far make up, from its first on */
    void *piece;
};

static enum status fail_shape(const struct safetensors *file, const char *what) {
    return fail(
        "%s: %s: it belongs to a model of another shape, or to another set of files", file->path, what);
}

/* Elements [from, from + count) of the file's tensor, into the state from state_index on. */
static enum status read_range(const struct reading *r, const struct safetensors *file,
    const struct safetensors_entry *entry, int moment, int64_t from, int64_t count, int64_t state_index) {
    struct backend *backend = r->optimizer->backend;
    struct tensor state = moment_tensor(r->optimizer, moment);
    int64_t size = (int64_t)dtype_bytes(state.dtype), step = PIECE_BYTES / size;
    for (int64_t done = 0; done < count; done += step) {
        int64_t n = min_i64(step, count - done);
        CHECK(safetensors_read_values(file, entry, from + done, n, r->piece, state.dtype));
        CHECK(backend->copy_to_device(
            backend, tensor_at(state, state_index + done).data, r->piece, (size_t)(n * size)));
    }
    return STATUS_OK;
}

/* A bucket's part of one file: it follows the files before, and where it meets this rank's shard it is read. */
static enum status read_bucket(struct reading *r, const struct safetensors *file, int bucket) {
    const struct optimizer *o = r->optimizer;
    int64_t bucket_count = model_get_layout(o->model)->bucket[bucket].count;
    int64_t first = r->bucket_first[bucket], count = 0, shard_first, shard_count;
    optimizer_shard(o, bucket, &shard_first, &shard_count);
    for (int moment = 0; moment < 2; moment++) {
        char name[TENSOR_NAME_BYTES];
        tensor_name(name, moment, bucket);
        const struct safetensors_entry *entry = safetensors_find(file, name);
        if (entry == NULL || entry->dimensions != 1 || first != r->covered[bucket] ||
            entry->shape[0] > bucket_count - first || (moment == 1 && entry->shape[0] != count)) {
            char what[128];
            snprintf(what, sizeof what, "tensor \"%s\" is not what follows element %" PRId64 " of %" PRId64,
                name, r->covered[bucket], bucket_count);
            return fail_shape(file, what);
        }
        count = entry->shape[0];
        int64_t from = max_i64(first, shard_first), to = min_i64(first + count, shard_first + shard_count);
        if (from < to) {
            CHECK(read_range(r, file, entry, moment, from - first, to - from,
                o->state_offset[bucket] + from - shard_first));
        }
    }
    r->covered[bucket] += count;
    return STATUS_OK;
}

static enum status read_file(struct reading *r, const struct safetensors *file) {
    int buckets = model_get_layout(r->optimizer->model)->buckets;
    const char *format = safetensors_metadata(file, "format");
    if (format == NULL || strcmp(format, FORMAT) != 0) {
        return fail("%s: not a file of moments: its format is not \"%s\"", file->path, FORMAT);
    }
    const struct safetensors_entry *entry = safetensors_find(file, BUCKET_FIRST);
    if (entry == NULL || entry->dtype != DTYPE_I64 || entry->dimensions != 1 || entry->shape[0] != buckets) {
        char what[128];
        snprintf(what, sizeof what, "tensor \"%s\" is not of shape (%d), layers + 1", BUCKET_FIRST, buckets);
        return fail_shape(file, what);
    }
    CHECK(safetensors_read(file, entry, 0, r->bucket_first, (size_t)buckets * sizeof *r->bucket_first));
    for (int b = 0; b < buckets; b++) {
        CHECK(read_bucket(r, file, b));
    }
    return STATUS_OK;
}

static enum status read_files(struct reading *r, const char *folder) {
    for (int rank = 0; rank < r->file_ranks; rank++) {
        char name[MOMENTS_NAME_BYTES], path[PATH_BYTES];
        struct safetensors *file;
        moments_file_name(name, rank, r->file_ranks);
        CHECK(path_join(path, sizeof path, folder, name));
        CHECK(safetensors_open(&file, path));
        enum status status = read_file(r, file);
        safetensors_close(file);
        CHECK(status);
    }
    const struct layout *layout = model_get_layout(r->optimizer->model);
    for (int b = 0; b < layout->buckets; b++) {
        if (r->covered[b] != layout->bucket[b].count) {
            return fail("%s: the moments of bucket %d end at element %" PRId64 " of %" PRId64
                        ": they belong to a model of another shape",
                folder, b, r->covered[b], layout->bucket[b].count);
        }
    }
    return STATUS_OK;
}

enum status moments_read(const char *folder, int file_ranks, struct optimizer *optimizer) {
    enum status status = STATUS_OK;
    size_t buckets = (size_t)model_get_layout(optimizer->model)->buckets;
    struct reading r = {optimizer, file_ranks, NULL, NULL, NULL};
    CHECK_CLEANUP(ALLOCATE(r.bucket_first, buckets));
    CHECK_CLEANUP(ALLOCATE(r.covered, buckets));
    CHECK_CLEANUP(allocate(&r.piece, PIECE_BYTES, 1));
    CHECK_CLEANUP(read_files(&r, folder));
cleanup:
    free(r.piece);
    free(r.covered);
    free(r.bucket_first);
    return status;
}
