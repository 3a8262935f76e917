/* Folders are walked once, before anything is read; so what there is to do is known, and an interrupted run can tell
   whether the files are still the same. */
#include "inputs.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>

static enum status add_file(struct inputs *inputs, const char *path, int64_t bytes, int64_t modified) {
    CHECK(RESERVE(inputs->files, inputs->capacity, inputs->count + 1));
    char *copy = string_copy(path);
    if (copy == NULL) {
        return STATUS_OUT_OF_MEMORY;
    }
    inputs->files[inputs->count++] = (struct input){copy, bytes, modified};
    inputs->bytes += bytes;
    return STATUS_OK;
}

static int not_hidden(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static enum status add_path(struct inputs *inputs, const char *path, bool in_folder);

static enum status add_folder(struct inputs *inputs, const char *path) {
    struct dirent **entries;
    int count = scandir(path, &entries, not_hidden, by_name);
    if (count < 0) {
        return fail("%s: cannot list: %s", path, strerror(errno));
    }
    enum status status = STATUS_OK;
    for (int i = 0; i < count; i++) {
        char *child = NULL;
        if (status == STATUS_OK && asprintf(&child, "%s/%s", path, entries[i]->d_name) < 0) {
            status = fail_as(STATUS_OUT_OF_MEMORY, "out of memory");
        }
        if (status == STATUS_OK) {
            status = add_path(inputs, child, true);
            free(child);
        }
        free(entries[i]);
    }
    free(entries);
    return status;
}

static enum status fail_to_find(const char *path) {
    return errno == ENOENT
               ? fail("%s: there is no such file or folder to read text from; give paths that exist", path)
               : fail("%s: cannot read: %s", path, strerror(errno));
}

static enum status add_path(struct inputs *inputs, const char *path, bool in_folder) {
    struct stat info, target;
    if (lstat(path, &info) != 0) {
        return fail_to_find(path);
    }
    if (S_ISLNK(info.st_mode)) {
        bool broken = stat(path, &target) != 0;
        if (in_folder && (broken || !S_ISREG(target.st_mode))) {
            return STATUS_OK;
        }
        if (broken) {
            return fail_to_find(path);
        }
        info = target;
    }
    if (S_ISREG(info.st_mode)) {
        return add_file(
            inputs, path, info.st_size, (int64_t)info.st_mtim.tv_sec * 1000000000 + info.st_mtim.tv_nsec);
    }
    if (S_ISDIR(info.st_mode)) {
        return add_folder(inputs, path);
    }
    return in_folder ? STATUS_OK
                     : fail("%s: is neither a file nor a folder; - stands for standard input", path);
}

enum status inputs_add(struct inputs *inputs, const char *path) {
    return strcmp(path, "-") == 0 ? add_file(inputs, path, 0, 0) : add_path(inputs, path, false);
}

enum status inputs_add_list(struct inputs *inputs, const char *list) {
    FILE *file = strcmp(list, "-") == 0 ? stdin : fopen(list, "re");
    if (file == NULL) {
        return fail(
            "--files-from %s: cannot open: %s; give a file with a path on each line, or - for standard input",
            list, strerror(errno));
    }
    enum status status = STATUS_OK;
    char *line = NULL;
    size_t capacity = 0;
    for (ssize_t length; status == STATUS_OK && (length = getline(&line, &capacity, file)) >= 0;) {
        while (length > 0 && (line[length - 1] == '\n' || line[length - 1] == '\r')) {
            line[--length] = 0; /* of Windows' lists, too */
        }
        if (line[0] != 0) {
            status = add_path(inputs, line, false);
        }
    }
    if (status == STATUS_OK && ferror(file)) {
        status = fail("--files-from %s: cannot read: %s", list, strerror(errno));
    }
    free(line);
    if (file != stdin) {
        fclose(file);
    }
    return status;
}

void inputs_free(struct inputs *inputs) {
    for (int64_t i = 0; i < inputs->count; i++) {
        free(inputs->files[i].path);
    }
    free(inputs->files);
    memset(inputs, 0, sizeof *inputs);
}
