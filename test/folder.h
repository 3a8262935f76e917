/* A folder of the test program's own, which make_folder makes at its start and remove_tree removes at its end. */
#ifndef TEST_FOLDER_H
#define TEST_FOLDER_H

#include "test.h"

static char folder[1024];

static inline void make_folder(const char *test) {
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/%s.XXXXXX", parent != NULL ? parent : "/tmp", test);
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        exit(1);
    }
}

static inline void empty_folder(void) {
    EXPECT_OK(remove_tree(folder));
    EXPECT_OK(make_directories(folder));
}

/* The path of something in it; stays until some more calls. */
static inline const char *in_folder(const char *name) {
    static char paths[4][2048];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

#endif
