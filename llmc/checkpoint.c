/* Checkpoints as folders. Saving goes in four rounds, after each of which the ranks agree that all is well:

     1  the first rank makes <run>/checkpoints/.tmp-step-N, empty
     2  the first rank writes the weights as they come from all ranks; every rank writes its moments
     3  the first rank writes config.json, state.json and the checksums, and flushes all to disk
     4  it renames the folder to step-N

   A kill at any moment leaves the older checkpoints as they are, and perhaps a .tmp-* folder, which the next save or
   prune removes. Nothing of a folder changes once it has its final name; what is removed is renamed first. */
#include "checkpoint.h"

#include "checksum.h"
#include "hugging_face.h"
#include "moments.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_BYTES = 4096, STATE_VERSION = 1, MESSAGE_BYTES = 1024 };
static const char WEIGHTS[] = "model.safetensors", CONFIG[] = "config.json", STATE[] = "state.json",
                  CHECKSUMS[] = "checksums.xxh64";
static const char TEMPORARY_PREFIX[] = ".tmp-", STEP_PREFIX[] = "step-";

uint64_t checkpoint_bytes(const struct model *model) {
    enum { BYTES_A_PARAMETER = 12 }; /* its value and two moments, fp32 */
    return (uint64_t)model_get_layout(model)->parameters * BYTES_A_PARAMETER;
}

/* Ranks wait so much longer for one that writes or reads, on a disk that all share, and that may be busy. */
static double disk_seconds(const struct optimizer *optimizer) {
    enum { SLOW_BYTES_A_SECOND = 50000000, BUSY_SECONDS = 60 };
    return BUSY_SECONDS + (double)checkpoint_bytes(optimizer->model) / SLOW_BYTES_A_SECOND;
}

static enum status checkpoints_folder(char out[PATH_BYTES], const char *run_dir) {
    return path_join(out, PATH_BYTES, run_dir, "checkpoints");
}

/* <parent>/<prefix>step-N */
static enum status step_folder(char out[PATH_BYTES], const char *parent, const char *prefix, int64_t step) {
    char name[64];
    snprintf(name, sizeof name, "%s%s%08" PRId64, prefix, STEP_PREFIX, step);
    return path_join(out, PATH_BYTES, parent, name);
}

/* ---- state.json ---- */

/* The counters, one table for writing and reading. */
#define COUNTER(member)                                                                                      \
    { #member, offsetof(struct run_state, member) }
static const struct {
    const char *name;
    size_t offset;
} counters[] = {COUNTER(step), COUNTER(data_position), COUNTER(data_windows), COUNTER(optimizer_step),
    COUNTER(tokens_seen), COUNTER(skipped_total), COUNTER(skipped_in_row)};
enum { COUNTERS = sizeof counters / sizeof counters[0] };
/* No run gets so far, and what it adds to a counter cannot overflow. */
static const int64_t LARGEST_COUNTER = INT64_C(1) << 62;

static int64_t *counter_of(struct run_state *state, int i) {
    return (int64_t *)((char *)state + counters[i].offset);
}

static void numbers_member(struct json_writer *w, const char *key, const double *values, int count) {
    json_key(w, key);
    json_begin_array(w);
    for (int i = 0; i < count; i++) {
        json_number(w, values[i]);
    }
    json_end_array(w);
}

static void write_model(struct json_writer *w, const struct model_config *c) {
    json_key(w, "model");
    json_begin_object(w);
    json_integer_member(w, "layers", c->layers);
    json_integer_member(w, "channels", c->channels);
    json_integer_member(w, "heads", c->heads);
    json_integer_member(w, "kv_heads", c->kv_heads);
    json_integer_member(w, "seq_len", c->seq_len);
    json_integer_member(w, "vocab_size", c->vocab_size);
    json_end_object(w);
}

static enum status state_text(const struct optimizer *optimizer, const struct run_state *state,
    const char *options_json, char **text, size_t *bytes) {
    struct run_state copy = *state;
    struct json *options;
    struct json_writer w;
    CHECK(json_parse(&options, options_json, strlen(options_json), "the options to save"));
    json_writer_init(&w, true);
    json_begin_object(&w);
    json_integer_member(&w, "version", STATE_VERSION);
    json_integer_member(&w, "ranks", optimizer->comm->ranks);
    for (int i = 0; i < COUNTERS; i++) {
        json_integer_member(&w, counters[i].name, *counter_of(&copy, i));
    }
    json_number_member(&w, "best_val_loss", state->best_val_loss);
    json_number_member(&w, "last_val_loss", state->last_val_loss);
    numbers_member(&w, "recent_loss", state->spikes.loss, state->spikes.count);
    numbers_member(&w, "recent_norm", state->spikes.norm, state->spikes.count);
    write_model(&w, model_get_config(optimizer->model));
    json_key(&w, "options");
    json_value(&w, options);
    json_end_object(&w);
    json_free(options);
    return json_writer_finish(&w, text, bytes);
}

/* A number, or null for "not a number". */
static bool read_double(const struct json *json, double *out) {
    *out = json != NULL && json->type == JSON_NUMBER ? json->number : (double)NAN;
    return json != NULL && (json->type == JSON_NUMBER || json->type == JSON_NULL);
}

static enum status read_recent(
    const struct json *json, const char *key, const char *path, double *values, int *count) {
    const struct json *array = json_get(json, key);
    if (array == NULL || array->type != JSON_ARRAY || array->count > SPIKE_WINDOW) {
        return fail("%s: \"%s\" is not an array of at most %d numbers", path, key, SPIKE_WINDOW);
    }
    for (size_t i = 0; i < array->count; i++) {
        /* only applied steps are in it, and a NaN would make every coming step a spike */
        if (!read_double(&array->items[i], &values[i]) || !isfinite(values[i])) {
            return fail("%s: \"%s\" is not an array of numbers", path, key);
        }
    }
    *count = (int)array->count;
    return STATUS_OK;
}

static enum status read_state_members(struct run_state *state, const struct json *json, const char *path) {
    int64_t version;
    CHECK(json_get_integer(json, "version", STATE_VERSION, STATE_VERSION, &version, path));
    for (int i = 0; i < COUNTERS; i++) {
        CHECK(json_get_integer(json, counters[i].name, 0, LARGEST_COUNTER, counter_of(state, i), path));
    }
    if (!read_double(json_get(json, "best_val_loss"), &state->best_val_loss) ||
        !read_double(json_get(json, "last_val_loss"), &state->last_val_loss)) {
        return fail("%s: \"best_val_loss\" or \"last_val_loss\" is neither a number nor null", path);
    }
    int norms;
    CHECK(read_recent(json, "recent_loss", path, state->spikes.loss, &state->spikes.count));
    CHECK(read_recent(json, "recent_norm", path, state->spikes.norm, &norms));
    if (norms != state->spikes.count) {
        return fail("%s: \"recent_loss\" and \"recent_norm\" are not of one length", path);
    }
    return STATUS_OK;
}

enum status checkpoint_read_state(const char *path, struct run_state *state, struct json **json) {
    char file[PATH_BYTES];
    *json = NULL;
    memset(state, 0, sizeof *state);
    CHECK(path_join(file, sizeof file, path, STATE));
    CHECK(json_read_file(json, file));
    enum status status = read_state_members(state, *json, file);
    if (status != STATUS_OK) {
        json_free(*json);
        *json = NULL;
    }
    return status;
}

/* How many ranks wrote the checkpoint. */
static enum status read_ranks(const char *path, int *ranks) {
    char file[PATH_BYTES];
    struct json *json;
    int64_t value;
    CHECK(path_join(file, sizeof file, path, STATE));
    CHECK(json_read_file(&json, file));
    enum status status = json_get_integer(json, "ranks", 1, COMM_MAX_RANKS, &value, file);
    json_free(json);
    *ranks = status == STATUS_OK ? (int)value : 0;
    return status;
}

/* ---- saving ---- */

struct saving {
    struct optimizer *optimizer;
    const struct run_state *state;
    const char *options_json;
    const struct tokenizer *tokenizer;
    bool first_rank;
    char parent[PATH_BYTES];    /* <run>/checkpoints */
    char temporary[PATH_BYTES]; /* <run>/checkpoints/.tmp-step-N */
    char final[PATH_BYTES];     /* <run>/checkpoints/step-N */
    struct shard {
        uint64_t xxh64, bytes;
    } moments, *all_moments; /* this rank's file; on every rank, all ranks' */
    uint64_t weights_xxh64;
    uint64_t bytes;  /* that this rank wrote */
    char *checksums; /* the text of checksums.xxh64 */
    size_t checksums_bytes, checksums_capacity;
};

static enum status make_temporary_folder(const struct saving *s, const char *run_dir) {
    CHECK(make_directories(s->parent));
    CHECK(file_sync(run_dir));
    CHECK(remove_tree(s->temporary)); /* of a run that was killed while saving this step */
    return make_directories(s->temporary);
}

static enum status export_bucket(void *optimizer, int bucket, float *values) {
    return optimizer_export_bucket((struct optimizer *)optimizer, bucket, values);
}

static enum status write_tensors(struct saving *s) {
    char path[PATH_BYTES];
    uint64_t weights_bytes = 0;
    const struct model *model = s->optimizer->model;
    CHECK(path_join(path, sizeof path, s->temporary, WEIGHTS));
    enum status status = hugging_face_write_weights(path, model_get_config(model), model_get_layout(model),
        s->first_rank, export_bucket, s->optimizer, &s->weights_xxh64, &weights_bytes);
    if (status == STATUS_OK) {
        status = moments_write(s->temporary, s->optimizer, &s->moments.xxh64, &s->moments.bytes);
    }
    s->bytes += weights_bytes + s->moments.bytes;
    return status;
}

static void add_checksum(struct saving *s, uint64_t xxh64, const char *name) {
    s->checksums_bytes += (size_t)snprintf(s->checksums + s->checksums_bytes,
        s->checksums_capacity - s->checksums_bytes, "%016" PRIx64 "  %s\n", xxh64, name);
}

/* A small file, on disk when this returns. */
static enum status write_text(struct saving *s, const char *name, const char *text, size_t bytes) {
    char path[PATH_BYTES];
    CHECK(path_join(path, sizeof path, s->temporary, name));
    CHECK(file_write_all(path, text, bytes));
    s->bytes += bytes;
    return file_sync(path);
}

static enum status write_and_add_checksum(
    struct saving *s, const char *name, const char *text, size_t bytes) {
    add_checksum(s, xxh64_of(text, bytes), name);
    return write_text(s, name, text, bytes);
}

static enum status write_config_and_state(struct saving *s) {
    char *text;
    size_t bytes;
    CHECK(hugging_face_config_text(model_get_config(s->optimizer->model), s->tokenizer, &text, &bytes));
    enum status status = write_and_add_checksum(s, CONFIG, text, bytes);
    free(text);
    CHECK(status);
    CHECK(state_text(s->optimizer, s->state, s->options_json, &text, &bytes));
    status = write_and_add_checksum(s, STATE, text, bytes);
    free(text);
    return status;
}

static enum status write_tokenizer(struct saving *s) {
    if (s->tokenizer == NULL || !tokenizer_has_files(s->tokenizer)) {
        return STATUS_OK;
    }
    CHECK(tokenizer_save(s->tokenizer, s->temporary));
    for (int i = 0; i < TOKENIZER_FILES; i++) {
        char path[PATH_BYTES];
        uint64_t xxh64;
        struct stat info;
        CHECK(path_join(path, sizeof path, s->temporary, tokenizer_files[i]));
        CHECK(file_sync(path));
        CHECK(xxh64_file(path, &xxh64));
        add_checksum(s, xxh64, tokenizer_files[i]);
        s->bytes += stat(path, &info) == 0 ? (uint64_t)info.st_size : 0;
    }
    return STATUS_OK;
}

static enum status write_texts(struct saving *s) {
    enum { LINE_BYTES = 16 + 2 + MOMENTS_NAME_BYTES + 1, FILES_BESIDE_MOMENTS = 3 + TOKENIZER_FILES };
    int ranks = s->optimizer->comm->ranks;
    s->checksums_capacity = (size_t)(ranks + FILES_BESIDE_MOMENTS) * LINE_BYTES + 1;
    CHECK(ALLOCATE(s->checksums, s->checksums_capacity));
    add_checksum(s, s->weights_xxh64, WEIGHTS);
    for (int rank = 0; rank < ranks; rank++) {
        char name[MOMENTS_NAME_BYTES];
        moments_file_name(name, rank, ranks);
        add_checksum(s, s->all_moments[rank].xxh64, name);
    }
    CHECK(write_config_and_state(s));
    CHECK(write_tokenizer(s));
    CHECK(write_text(s, CHECKSUMS, s->checksums, s->checksums_bytes));
    return file_sync(s->temporary);
}

static enum status rename_folder(const char *from, const char *to) {
    return rename(from, to) == 0 ? STATUS_OK : fail("%s: cannot rename to %s: %s", from, to, strerror(errno));
}

/* Renames step-N to .tmp-removed-step-N, so that it is never half there under its name. */
static enum status set_aside(const char *parent, int64_t step, char aside[PATH_BYTES]) {
    char path[PATH_BYTES];
    CHECK(step_folder(path, parent, "", step));
    CHECK(step_folder(aside, parent, ".tmp-removed-", step));
    CHECK(remove_tree(aside));
    return rename_folder(path, aside);
}

/* A folder of that name is there if it is damaged and the resume passed it over: the new one takes its place. A kill
   between the renames loses no more than that one. */
static enum status publish(const struct saving *s) {
    char aside[PATH_BYTES] = "";
    if (path_exists(s->final)) {
        CHECK(set_aside(s->parent, s->state->step, aside));
    }
    CHECK(rename_folder(s->temporary, s->final));
    CHECK(file_sync(s->parent));
    if (aside[0] != '\0') {
        remove_tree(aside); /* the new one is there whatever becomes of the old; pruning tries again */
    }
    return STATUS_OK;
}

/* Rounds 1 to 4; collective. */
static enum status save(struct saving *s, const char *run_dir) {
    struct comm *comm = s->optimizer->comm;
    CHECK(ALLOCATE(s->all_moments, comm->ranks));
    CHECK(comm_agree(comm, s->first_rank ? make_temporary_folder(s, run_dir) : STATUS_OK));
    CHECK(comm_agree(comm, write_tensors(s)));
    CHECK(comm->host_all_gather(comm, s->all_moments, &s->moments, sizeof s->moments));
    CHECK(comm_agree(comm, s->first_rank ? write_texts(s) : STATUS_OK));
    return comm_agree(comm, s->first_rank ? publish(s) : STATUS_OK);
}

enum status checkpoint_save(const char *run_dir, struct optimizer *optimizer, const struct run_state *state,
    const char *options_json, const struct tokenizer *tokenizer, char *path_out, size_t path_size,
    uint64_t *bytes_out) {
    struct comm *comm = optimizer->comm;
    struct saving s;
    memset(&s, 0, sizeof s);
    s.optimizer = optimizer;
    s.state = state;
    s.options_json = options_json;
    s.tokenizer = tokenizer;
    s.first_rank = comm->rank == 0;
    CHECK(checkpoints_folder(s.parent, run_dir));
    CHECK(step_folder(s.temporary, s.parent, TEMPORARY_PREFIX, state->step));
    CHECK(step_folder(s.final, s.parent, "", state->step));
    comm->be_patient(comm, disk_seconds(optimizer));
    enum status status = save(&s, run_dir);
    comm->be_patient(comm, 0);
    free(s.checksums);
    free(s.all_moments);
    if (status == STATUS_ERROR) {
        fail("step %" PRId64 " is not saved, earlier checkpoints are as they were: %s", state->step,
            error_message());
    }
    if (status != STATUS_OK) {
        char message[MESSAGE_BYTES];
        snprintf(message, sizeof message, "%s", error_message());
        if (s.first_rank) {
            remove_tree(s.temporary);
        }
        return fail_as(status, "%s", message); /* whatever the removal said */
    }
    double bytes = (double)s.bytes;
    CHECK(comm->host_all_reduce(comm, &bytes, 1, COMM_SUM));
    *bytes_out = (uint64_t)bytes;
    if ((size_t)snprintf(path_out, path_size, "%s", s.final) >= path_size) {
        return fail("%s: the path is too long", s.final);
    }
    return STATUS_OK;
}

/* ---- the folders of a run ---- */

struct step_list {
    int64_t *steps; /* descending */
    size_t count, capacity;
};

/* N of "step-N"; -1 for other names. */
static int64_t step_of_name(const char *name) {
    size_t prefix = sizeof STEP_PREFIX - 1;
    size_t digits = strncmp(name, STEP_PREFIX, prefix) == 0 ? strspn(name + prefix, "0123456789") : 0;
    if (digits < 8 || digits > 18 || name[prefix + digits] != '\0') {
        return -1;
    }
    return strtoll(name + prefix, NULL, 10);
}

static enum status add_step(struct step_list *list, int64_t step) {
    CHECK(RESERVE(list->steps, list->capacity, list->count + 1));
    list->steps[list->count++] = step;
    return STATUS_OK;
}

static int compare_descending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x > y ? -1 : x < y;
}

/* Calls `visit` for every entry of the folder; no folder is no entry. */
static enum status visit_folder(
    const char *path, enum status (*visit)(void *context, const char *name), void *context) {
    DIR *folder = opendir(path);
    if (folder == NULL) {
        return errno == ENOENT ? STATUS_OK : fail("%s: cannot open: %s", path, strerror(errno));
    }
    enum status status = STATUS_OK;
    struct dirent *entry;
    while (errno = 0, status == STATUS_OK && (entry = readdir(folder)) != NULL) {
        status = visit(context, entry->d_name);
    }
    if (status == STATUS_OK && errno != 0) { /* at the end of the folder readdir leaves it alone */
        status = fail("%s: cannot read: %s", path, strerror(errno));
    }
    closedir(folder);
    return status;
}

static enum status note_step(void *context, const char *name) {
    int64_t step = step_of_name(name);
    return step < 0 ? STATUS_OK : add_step(context, step);
}

static enum status list_steps(struct step_list *list, const char *parent) {
    memset(list, 0, sizeof *list);
    enum status status = visit_folder(parent, note_step, list);
    if (list->count > 0) {
        qsort(list->steps, list->count, sizeof *list->steps, compare_descending);
    }
    return status;
}

static enum status remove_if_temporary(void *context, const char *name) {
    char path[PATH_BYTES];
    if (strncmp(name, TEMPORARY_PREFIX, sizeof TEMPORARY_PREFIX - 1) != 0) {
        return STATUS_OK;
    }
    CHECK(path_join(path, sizeof path, (const char *)context, name));
    return remove_tree(path);
}

enum status checkpoint_prune(const char *run_dir, int64_t step, int64_t keep, int64_t keep_every) {
    char parent[PATH_BYTES];
    struct step_list list;
    CHECK(checkpoints_folder(parent, run_dir));
    enum status status = list_steps(&list, parent);
    int64_t newer = 0; /* checkpoints between this one and the one just saved */
    for (size_t i = 0; i < list.count && status == STATUS_OK; i++) {
        if (list.steps[i] > step) {
            continue;
        }
        bool for_good = keep_every > 0 && list.steps[i] % keep_every == 0;
        if (keep > 0 && newer >= keep && !for_good) {
            char aside[PATH_BYTES];
            status = set_aside(parent, list.steps[i], aside);
        }
        newer++;
    }
    free(list.steps);
    CHECK(status);
    return visit_folder(parent, remove_if_temporary, parent); /* those set aside, and left-over ones */
}

/* ---- finding a valid one ---- */

/* What fails below is either damage (`damaged` is set), which is passed over and replaced when its step comes again; or a
   file is there but cannot be read (permissions, a failing disk, too many open files), and may be as good as ever. */

static bool is_absent(const char *path) {
    return access(path, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR);
}

/* One line of checksums.xxh64, without its end. */
static enum status check_line(const char *folder, const char *checksums, const char *line, bool *damaged) {
    char path[PATH_BYTES];
    bool well_formed = strspn(line, "0123456789abcdef") == 16 && strncmp(line + 16, "  ", 2) == 0 &&
                       line[18] != '\0' && strchr(line, '/') == NULL;
    if (!well_formed) {
        return fail("%s: a line that is no checksum", checksums);
    }
    uint64_t expected = strtoull(line, NULL, 16), found = 0;
    *damaged = false;
    CHECK(path_join(path, sizeof path, folder, line + 18));
    enum status status = xxh64_file(path, &found);
    *damaged = status == STATUS_OK || is_absent(path);
    CHECK(status);
    if (found != expected) {
        return fail("%s: its checksum is %016" PRIx64 ", not %016" PRIx64 " as when it was written", path,
            found, expected);
    }
    return STATUS_OK;
}

/* Is there a line for the file? */
static enum status check_listed(const char *folder, const char *text, const char *name) {
    char wanted[MOMENTS_NAME_BYTES + 4];
    snprintf(wanted, sizeof wanted, "  %s\n", name);
    return strstr(text, wanted) != NULL ? STATUS_OK
                                        : fail("%s/%s: no checksum of %s", folder, CHECKSUMS, name);
}

/* Every file of a complete checkpoint is listed; what is listed has been checked. */
static enum status check_complete(const char *folder, const char *text) {
    int ranks;
    CHECK(check_listed(folder, text, WEIGHTS));
    CHECK(check_listed(folder, text, CONFIG));
    CHECK(check_listed(folder, text, STATE));
    CHECK(read_ranks(folder, &ranks));
    for (int rank = 0; rank < ranks; rank++) {
        char name[MOMENTS_NAME_BYTES];
        moments_file_name(name, rank, ranks);
        CHECK(check_listed(folder, text, name));
    }
    return STATUS_OK;
}

static enum status check_lines(const char *folder, const char *checksums, const char *text, bool *damaged) {
    for (const char *next = text; *next != '\0';) {
        char line[256];
        size_t length = strcspn(next, "\n");
        snprintf(line, sizeof line, "%.*s", (int)min_i64((int64_t)length, sizeof line - 1), next);
        CHECK(check_line(folder, checksums, line, damaged));
        next += length + (next[length] == '\n');
    }
    return check_complete(folder, text);
}

/* The message of a failure says which file it is and what is wrong. */
static enum status verify(const char *folder, bool *damaged) {
    char checksums[PATH_BYTES];
    uint8_t *text;
    size_t bytes;
    *damaged = false;
    CHECK(path_join(checksums, sizeof checksums, folder, CHECKSUMS));
    enum status status = file_read_text(checksums, &text, &bytes);
    *damaged = status == STATUS_OK || is_absent(checksums);
    CHECK(status);
    status = memchr(text, 0, bytes) == NULL ? check_lines(folder, checksums, (const char *)text, damaged)
                                            : fail("%s: not a text", checksums);
    free(text);
    return status;
}

/* *removed: a run that goes on has taken away what was listed, since it has a newer one. */
static enum status find_valid(const struct step_list *list, const char *parent, char *path, size_t size,
    void (*notice)(void *context, const char *line), void *context, bool *removed) {
    *removed = false;
    for (size_t i = 0; i < list->count; i++) {
        char folder[PATH_BYTES], line[MESSAGE_BYTES];
        CHECK(step_folder(folder, parent, "", list->steps[i]));
        bool damaged;
        enum status status = verify(folder, &damaged);
        if (status == STATUS_OK) {
            return (size_t)snprintf(path, size, "%s", folder) < size
                       ? STATUS_OK
                       : fail("%s: the path is too long", folder);
        }
        if (status == STATUS_OUT_OF_MEMORY) {
            return status; /* says nothing about the checkpoint */
        }
        struct stat info;
        *removed = lstat(folder, &info) != 0 && errno == ENOENT;
        if (*removed) {
            return fail("%s: was removed while it was read", folder);
        }
        if (!damaged) {
            return fail("%s; make it readable, or remove the checkpoint to go on from the one before",
                error_message());
        }
        snprintf(line, sizeof line, "checkpoint of step %" PRId64 " is damaged and passed over: %s",
            list->steps[i], error_message());
        notice(context, line);
    }
    return fail(
        "%s: all %zu checkpoints are damaged: restore one from a copy, or start a new run in another folder",
        parent, list->count);
}

enum status checkpoint_find_newest(const char *run_dir, char *path, size_t size,
    void (*notice)(void *context, const char *line), void *context) {
    enum { LOOKS = 100 }; /* at a folder that changes */
    char parent[PATH_BYTES];
    enum status status = STATUS_OK;
    bool removed = true;
    path[0] = '\0';
    CHECK(checkpoints_folder(parent, run_dir));
    for (int look = 0; look < LOOKS && removed; look++) {
        struct step_list list;
        removed = false;
        status = list_steps(&list, parent);
        if (status == STATUS_OK && list.count > 0) {
            status = find_valid(&list, parent, path, size, notice, context, &removed);
        }
        free(list.steps);
    }
    return status;
}

enum status checkpoint_newest_step(const char *run_dir, int64_t *step) {
    char parent[PATH_BYTES];
    struct step_list list;
    CHECK(checkpoints_folder(parent, run_dir));
    enum status status = list_steps(&list, parent);
    *step = status == STATUS_OK && list.count > 0 ? list.steps[0] : -1;
    free(list.steps);
    return status;
}

/* ---- loading ---- */

enum status checkpoint_read_config(const char *path, struct model_config *config) {
    char file[PATH_BYTES];
    CHECK(path_join(file, sizeof file, path, CONFIG));
    return hugging_face_read_config(file, config);
}

/* Where weights go, and what all ranks must have read alike. */
struct import {
    struct optimizer *optimizer;
    struct xxh64 hash;
};

static enum status import_bucket(void *context, int bucket, const float *values) {
    struct import *import = context;
    if (import->optimizer->comm->ranks > 1) {
        int64_t count = model_get_layout(import->optimizer->model)->bucket[bucket].count;
        xxh64_update(&import->hash, values, (size_t)count * sizeof *values);
    }
    return optimizer_import_bucket(import->optimizer, bucket, values);
}

/* Each machine may have the files at a path of its own. */
static enum status check_same_weights(struct comm *comm, const char *path, uint64_t own) {
    int other;
    CHECK(comm_find_other(comm, &own, sizeof own, &other, NULL));
    return other == 0
               ? STATUS_OK
               : fail("%s: rank %d reads other weights than rank 0: give all the same files", path, other);
}

static enum status agree_on_reading(struct optimizer *optimizer, enum status own_status) {
    struct comm *comm = optimizer->comm;
    comm->be_patient(comm, disk_seconds(optimizer));
    enum status status = comm_agree(comm, own_status);
    comm->be_patient(comm, 0);
    return status;
}

enum status checkpoint_load_weights(const char *path, struct optimizer *optimizer) {
    const struct model *model = optimizer->model;
    struct import import = {.optimizer = optimizer};
    xxh64_init(&import.hash);
    CHECK(agree_on_reading(optimizer, hugging_face_read_weights(path, model_get_config(model),
                                          model_get_layout(model), import_bucket, &import)));
    return check_same_weights(optimizer->comm, path, xxh64_digest(&import.hash));
}

static enum status read_moments(const char *path, struct optimizer *optimizer) {
    int ranks;
    CHECK(read_ranks(path, &ranks));
    return moments_read(path, ranks, optimizer);
}

enum status checkpoint_load_moments(const char *path, struct optimizer *optimizer) {
    return agree_on_reading(optimizer, read_moments(path, optimizer));
}
