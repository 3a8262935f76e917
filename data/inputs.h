/* What build/prepare reads: files, in a fixed order. */
#ifndef DATA_INPUTS_H
#define DATA_INPUTS_H

#include "llmc/common.h"

struct input {
    char *path;              /* "-": standard input */
    int64_t bytes, modified; /* modified: nanoseconds; both 0 for standard input */
};
struct inputs {
    struct input *files;
    size_t capacity;
    int64_t count;
    int64_t bytes; /* of all */
};

/* A file; standard input ("-"); or the files below a folder, in the order of their names, without hidden ones. Links
   inside folders are followed to files only: links to folders may go round in circles. */
enum status inputs_add(struct inputs *inputs, const char *path);
/* The paths in a file ("-": in standard input), one a line. */
enum status inputs_add_list(struct inputs *inputs, const char *list);
void inputs_free(struct inputs *inputs);

#endif
