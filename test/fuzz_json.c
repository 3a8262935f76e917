/* libFuzzer harness of the JSON reader and writer. What is read is written and read again: the second writing must be
   the first. Seeds: test/seeds/json. */
#include "llmc/json.h"

#include <stdlib.h>

static char *write_again(const struct json *value, bool pretty, size_t *bytes) {
    struct json_writer w;
    char *text;
    json_writer_init(&w, pretty);
    json_value(&w, value);
    return json_writer_finish(&w, &text, bytes) == STATUS_OK ? text : NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct json *value;
    if (json_parse(&value, (const char *)data, bytes, "fuzz") != STATUS_OK) {
        return 0;
    }
    bool pretty = bytes % 2 == 0;
    size_t first_bytes = 0, second_bytes = 0;
    char *first = write_again(value, pretty, &first_bytes);
    struct json *again;
    if (first == NULL || json_parse(&again, first, first_bytes, "written") != STATUS_OK) {
        abort();
    }
    char *second = write_again(again, pretty, &second_bytes);
    if (second == NULL || first_bytes != second_bytes || memcmp(first, second, first_bytes) != 0) {
        abort();
    }
    free(first);
    free(second);
    json_free(value);
    json_free(again);
    return 0;
}
