/* libFuzzer: a Hugging Face folder whose config.json ('c' first), weight index ('i') or weights ('w') are any bytes. They
   are refused in one line, or make a model. The index finds a file of the right tensors under the name "part". Seeds:
   test/seeds/hugging_face. */
#include "llmc/hugging_face.h"
#include "llmc/safetensors.h"

#include <stdlib.h>
#include <unistd.h>

static const struct model_config tiny = {1, 2, 1, 1, 1, 1};
static char folder[] = "/tmp/fuzz_hugging_face.XXXXXX";

static void require(bool condition) {
    if (!condition) {
        abort();
    }
}

static void remove_folder(void) {
    remove_tree(folder);
}

static void path_of(char out[100], const char *name) {
    snprintf(out, 100, "%s/%s", folder, name);
}

static enum status give_zeros(void *context, int bucket, float *values) {
    const struct layout *layout = context;
    memset(values, 0, (size_t)layout->bucket[bucket].count * sizeof *values);
    return STATUS_OK;
}

static enum status take_any(void *context, int bucket, const float *values) {
    (void)context;
    (void)bucket;
    (void)values;
    return STATUS_OK;
}

static void make_folder(const struct layout *layout) {
    char part[100];
    require(mkdtemp(folder) != NULL);
    atexit(remove_folder);
    path_of(part, "part");
    require(hugging_face_write_weights(part, &tiny, layout, true, give_zeros, (void *)layout, NULL, NULL) ==
            STATUS_OK);
}

/* Of a function that read what was written. */
static void require_one_line(enum status status) {
    require(status == STATUS_OK || (error_message()[0] != '\0' && strchr(error_message(), '\n') == NULL));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static struct layout layout;
    if (layout.buckets == 0) {
        require(layout_init(&layout, &tiny, 1) == STATUS_OK);
        make_folder(&layout);
    }
    const char *name = bytes == 0       ? NULL
                       : data[0] == 'c' ? "config.json"
                       : data[0] == 'i' ? "model.safetensors.index.json"
                       : data[0] == 'w' ? "model.safetensors"
                                        : NULL;
    if (name == NULL) {
        return -1;
    }
    char path[100];
    path_of(path, name);
    require(file_write_all(path, data + 1, bytes - 1) == STATUS_OK);
    if (data[0] == 'c') {
        struct model_config c;
        enum status status = hugging_face_read_config(path, &c);
        require_one_line(status);
        require(status != STATUS_OK || model_config_check(&c) == STATUS_OK);
    } else {
        require_one_line(hugging_face_read_weights(folder, &tiny, &layout, take_any, NULL));
    }
    unlink(path);
    return 0;
}
