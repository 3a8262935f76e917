/* The table of options, for the files that loop over it: options.c reads values, options_help.c prints --help. */
#ifndef LLMC_OPTIONS_TABLE_H
#define LLMC_OPTIONS_TABLE_H

#include "options.h"

enum option_group { RUN, USE, MODEL, BATCH, OPTIMIZER, DATA, OUTPUT, DEVICE, OPTION_GROUPS };
enum option_type { SWITCH, INTEGER, NUMBER, TEXT, CHOICE };

struct option {
    const char *name; /* without the leading dashes */
    enum option_group group;
    bool kept; /* by a checkpoint; the rest belongs to one start of the program */
    enum option_type type;
    size_t offset;       /* of the value in struct options */
    double standard;     /* default of a switch or number */
    const char *text;    /* default of a text or choice */
    double least, most;  /* of a number, inclusive */
    const char *choices; /* separated by spaces */
    const char *unit;    /* what stands for the value in --help */
    const char *shown;   /* default in words, where the value does not tell */
    const char *help;
};

extern const struct option option_table[];
extern const int option_count;

/* Whole numbers stay below 2^53, which every JSON reader holds exactly; it stands for "no limit". */
#define NO_LIMIT 9007199254740992.0

/* A row's value; the one that its type says is valid. */
static inline bool *switch_of(const struct options *options, const struct option *row) {
    return (bool *)((char *)options + row->offset);
}
static inline int64_t *integer_of(const struct options *options, const struct option *row) {
    return (int64_t *)((char *)options + row->offset);
}
static inline double *number_of(const struct options *options, const struct option *row) {
    return (double *)((char *)options + row->offset);
}
static inline char **text_of(const struct options *options, const struct option *row) {
    return (char **)((char *)options + row->offset);
}

#endif
