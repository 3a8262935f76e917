/* libFuzzer: any bytes as a line of questions. It is refused in one line, or has what its score needs. Seeds:
   test/seeds/questions. */
#include "llmc/evaluate.h"

#include <stdlib.h>

static void require(bool condition) {
    if (!condition) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct question q;
    if (question_parse(&q, (const char *)data, bytes, "fuzz:1") != STATUS_OK) {
        require(strncmp(error_message(), "fuzz:1", 6) == 0 && strchr(error_message(), '\n') == NULL);
        return 0;
    }
    require(q.context->type == JSON_STRING && q.endings->count >= 2);
    require(q.label >= 0 && (size_t)q.label < q.endings->count);
    for (size_t i = 0; i < q.endings->count; i++) {
        require(q.endings->items[i].type == JSON_STRING && q.endings->items[i].string_bytes > 0);
    }
    question_free(&q);
    return 0;
}
