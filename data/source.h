/* The documents of one input: a text file or standard input is one; of a file of JSON lines, every line has one, as a
   string member of its object. */
#ifndef DATA_SOURCE_H
#define DATA_SOURCE_H

#include "llmc/json.h"

struct source {
    const char *path;  /* the caller's; "-": standard input */
    const char *field; /* of the JSON lines that has the text; NULL: plain text */
    int64_t end;       /* bytes of the file, from its beginning, that belong to this source; INT64_MAX: all */
    /* where it stands */
    int64_t offset;                         /* bytes read, from the beginning of the file */
    int64_t line;                           /* lines read (JSON lines) */
    bool begun;                             /* plain text: the document was given out */
    int64_t document_offset, document_line; /* where the document begins */
    /* own */
    FILE *file;
    char *buffer; /* a line */
    size_t buffer_bytes;
    struct json *json;
    const char *text; /* what is left of the line's text */
    size_t text_bytes;
};

/* From the position in source->offset and ->line on, 0 for the beginning. The struct's first three members are set. */
enum status source_open(struct source *source);
void source_close(struct source *source);
/* Goes on to the next document; *there: is there one? Documents without text are passed over (JSON lines). */
enum status source_next(struct source *source, bool *there);
/* At most `capacity` bytes more of the document, at least one if it has not ended; *ended: it has, with these. */
enum status source_read(struct source *source, char *to, size_t capacity, size_t *got, bool *ended);
/* Does it look like no text? Of a plain file; leaves it where it was. */
bool source_is_binary(struct source *source);

#endif
