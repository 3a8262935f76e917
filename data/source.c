/* Lines are read whole, up to a limit, so memory does not grow with the file. */
#include "source.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>

enum { LOOK_BYTES = 8000, MOST_LINE_BYTES = 64 << 20 };

static enum status fail_at_end(const struct source *s) {
    return fail("%s: ends before the place where the interrupted run stood; give the same input", s->path);
}

static enum status fail_reading(const struct source *s) {
    return fail("%s: cannot read: %s", s->path, strerror(errno));
}

/* Standard input cannot go back: what an earlier run took of it is read again and dropped. */
static enum status skip(struct source *s, int64_t bytes) {
    char dropped[1 << 14];
    while (bytes > 0) {
        size_t got = fread(dropped, 1, (size_t)min_i64(bytes, sizeof dropped), s->file);
        if (got == 0) {
            return fail_at_end(s);
        }
        bytes -= (int64_t)got;
    }
    return STATUS_OK;
}

enum status source_open(struct source *s) {
    bool standard = strcmp(s->path, "-") == 0;
    if (s->offset > s->end) {
        return fail_at_end(s);
    }
    s->file = standard ? stdin : fopen(s->path, "rbe");
    if (s->file == NULL) {
        return fail("%s: cannot open: %s", s->path, strerror(errno));
    }
    if (standard) {
        return skip(s, s->offset);
    }
    return fseeko(s->file, s->offset, SEEK_SET) == 0 ? STATUS_OK : fail_reading(s);
}

void source_close(struct source *s) {
    if (s->file != NULL && s->file != stdin) {
        fclose(s->file);
    }
    s->file = NULL;
    json_free(s->json);
    s->json = NULL;
    free(s->buffer);
    s->buffer = NULL;
}

bool source_is_binary(struct source *s) {
    char start[LOOK_BYTES];
    if (s->file == stdin) {
        return false;
    }
    size_t got = fread(start, 1, sizeof start, s->file);
    fseeko(s->file, s->offset, SEEK_SET);
    return memchr(start, 0, got) != NULL;
}

/* ---- JSON lines ---- */

/* Without its end. No line is left: *there is false. */
static enum status read_line(struct source *s, size_t *bytes, bool *there) {
    int byte = EOF;
    *bytes = 0;
    while (s->offset < s->end && (byte = getc_unlocked(s->file)) != EOF) {
        s->offset++;
        if (byte == '\n') {
            break;
        }
        CHECK(RESERVE(s->buffer, s->buffer_bytes, *bytes + 1));
        s->buffer[(*bytes)++] = (char)byte;
        if (*bytes > MOST_LINE_BYTES) {
            return fail("%s:%" PRId64 ": a line of more than %d MiB; a line has one document", s->path,
                s->line + 1, (int)(MOST_LINE_BYTES >> 20));
        }
    }
    if (ferror(s->file)) {
        return fail_reading(s);
    }
    *there = *bytes > 0 || byte == '\n';
    s->line += *there;
    return STATUS_OK;
}

static bool is_blank(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (strchr(" \t\r", text[i]) == NULL || text[i] == '\0') {
            return false;
        }
    }
    return true;
}

static enum status take_text(struct source *s, size_t bytes) {
    char where[PATH_MAX + 32];
    snprintf(where, sizeof where, "%s:%" PRId64, s->path, s->line);
    json_free(s->json);
    s->json = NULL;
    CHECK(json_parse(&s->json, s->buffer, bytes, where));
    const struct json *text = json_get(s->json, s->field);
    if (text == NULL || text->type != JSON_STRING) {
        return fail(
            "%s: no text \"%s\" in it: --field names the member that has the document", where, s->field);
    }
    s->text = text->string;
    s->text_bytes = text->string_bytes;
    return STATUS_OK;
}

/* ---- documents ---- */

enum status source_next(struct source *s, bool *there) {
    if (s->field == NULL) {
        *there = !s->begun;
        s->begun = true;
        return STATUS_OK;
    }
    size_t bytes;
    s->text_bytes = 0;
    for (;;) {
        s->document_offset = s->offset;
        s->document_line = s->line;
        CHECK(read_line(s, &bytes, there));
        if (!*there || !is_blank(s->buffer, bytes)) {
            if (*there) {
                CHECK(take_text(s, bytes));
            }
            if (!*there || s->text_bytes > 0) {
                return STATUS_OK;
            }
        }
    }
}

enum status source_read(struct source *s, char *to, size_t capacity, size_t *got, bool *ended) {
    if (s->field != NULL) {
        *got = s->text_bytes < capacity ? s->text_bytes : capacity;
        memcpy(to, s->text, *got);
        s->text += *got;
        s->text_bytes -= *got;
        *ended = s->text_bytes == 0;
        return STATUS_OK;
    }
    *got = fread(to, 1, (size_t)min_i64((int64_t)capacity, s->end - s->offset), s->file);
    if (ferror(s->file)) {
        return fail_reading(s);
    }
    s->offset += (int64_t)*got;
    *ended = s->offset == s->end || (*got < capacity && feof(s->file));
    return STATUS_OK;
}
