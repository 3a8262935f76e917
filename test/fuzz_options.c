/* libFuzzer harness of the options. The first line of the input chooses the reader of the rest: "arguments" (an argument
   a line), "config" (a config file), "stored" (the options in a checkpoint's state.json). What was read and holds is
   written as a checkpoint keeps it and read again: the second writing must be the first. An error is one line. Seeds:
   test/seeds/options. */
#include "llmc/options.h"

#include <stdlib.h>

enum { MOST_ARGUMENTS = 64 };

static void require(bool condition) {
    if (!condition) {
        abort();
    }
}

static char *write_json(const struct options *options, size_t *bytes) {
    struct json_writer w;
    char *text;
    json_writer_init(&w, false);
    json_begin_object(&w);
    options_write_json(options, &w);
    json_end_object(&w);
    require(json_writer_finish(&w, &text, bytes) == STATUS_OK);
    return text;
}

/* Without --config: a fuzzer must not open any file of the machine. */
static enum status read_arguments(struct options *options, char *text) {
    const char *argv[MOST_ARGUMENTS + 1] = {"train_gpt"};
    int argc = 1;
    char *rest = text;
    for (char *line = strsep(&rest, "\n"); line != NULL && argc <= MOST_ARGUMENTS;
         line = strsep(&rest, "\n")) {
        if (strncmp(line, "--config", 8) != 0) {
            argv[argc++] = line;
        }
    }
    return options_parse(options, argc, argv, NULL);
}

static enum status read_stored(struct options *options, const char *text, size_t bytes) {
    struct json *stored;
    if (json_parse(&stored, text, bytes, "state.json") != STATUS_OK) {
        return STATUS_ERROR;
    }
    enum status status = options_parse(options, 0, NULL, stored);
    json_free(stored);
    return status;
}

static void write_and_read_again(const struct options *options) {
    size_t bytes, bytes_again;
    char *text = write_json(options, &bytes);
    struct options again;
    require(options_init(&again) == STATUS_OK && read_stored(&again, text, bytes) == STATUS_OK);
    char *text_again = write_json(&again, &bytes_again);
    require(bytes == bytes_again && memcmp(text, text_again, bytes) == 0);
    free(text);
    free(text_again);
    options_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char *text = malloc(bytes + 1), *newline;
    require(text != NULL);
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    newline = memchr(text, '\n', bytes);
    struct options options;
    require(options_init(&options) == STATUS_OK);
    if (newline != NULL) {
        char *body = newline + 1;
        size_t body_bytes = bytes - (size_t)(body - text);
        enum status status = STATUS_OK;
        bool filled = true; /* the preset has been applied, so that options_check may be asked */
        if (strncmp(text, "arguments\n", 10) == 0) {
            status = read_arguments(&options, body);
            filled = !options.help;
        } else if (strncmp(text, "config\n", 7) == 0) {
            status = options_parse_config(&options, body, body_bytes, "fuzz.conf");
            filled = false;
        } else if (strncmp(text, "stored\n", 7) == 0) {
            status = read_stored(&options, body, body_bytes);
        } else {
            filled = false;
        }
        if (status == STATUS_OK && filled) {
            status = options_check(&options);
            write_and_read_again(&options);
        }
        require(status == STATUS_OK || (error_message()[0] != '\0' && strchr(error_message(), '\n') == NULL));
    }
    options_free(&options);
    free(text);
    return 0;
}
