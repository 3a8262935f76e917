/* Weights from Hugging Face folders: in one file or several, with or without the prefix, in every float type, with the
   head stored; and what is wrong with a folder is said in one line that names the file. */
#include "folder.h"
#include "test.h"

#include <stdlib.h>
#include <unistd.h>

#include "llmc/hugging_face.h"
#include "llmc/random.h"
#include "llmc/safetensors.h"

static const struct model_config config = {2, 12, 3, 3, 5, 7};

/* ---- a model's tensors ---- */

enum { MOST_TENSORS = 40, MOST_VALUES = 12 * 48 };

struct tensor_file {
    char name[100];
    int dimensions;
    int64_t shape[2];
    float values[MOST_VALUES];
};
struct files {
    struct tensor_file tensors[MOST_TENSORS];
    int count;
    enum dtype dtype;
};

/* Exact in 8 bits, so that every float type holds it. */
static float value_of(int tensor, int64_t i) {
    return (float)(int)(random_uniform(1, (uint64_t)tensor, (uint64_t)i) * 200 - 100) / 64;
}

/* As in a GPT2LMHeadModel, in the order of the parameter table. */
static void make_tensors(struct files *f, const char *prefix) {
    memset(f, 0, sizeof *f);
    f->dtype = DTYPE_F32;
    for (int id = 0; id < PARAMETER_KINDS; id++) {
        const struct parameter_info *info = &parameter_table[id];
        for (int layer = 0; layer < (info->per_layer ? config.layers : 1); layer++) {
            struct tensor_file *t = &f->tensors[f->count];
            int64_t rows = info->file_rows(&config), columns = info->columns(&config);
            const char *name = info->hugging_face + strlen("transformer."), *mark = strstr(name, "%d");
            if (mark != NULL) {
                snprintf(
                    t->name, sizeof t->name, "%s%.*s%d%s", prefix, (int)(mark - name), name, layer, mark + 2);
            } else {
                snprintf(t->name, sizeof t->name, "%s%s", prefix, name);
            }
            t->dimensions = info->decay ? 2 : 1;
            t->shape[0] = info->transposed_in_file ? columns : rows;
            t->shape[1] = info->transposed_in_file ? rows : columns;
            for (int64_t i = 0; i < rows * columns; i++) {
                t->values[i] = value_of(f->count, i);
            }
            f->count++;
        }
    }
}

static void add_head(struct files *f) {
    f->tensors[f->count] = f->tensors[0];
    strcpy(f->tensors[f->count++].name, "lm_head.weight");
}

static void encode(void *out, const float *values, int64_t count, enum dtype dtype) {
    for (int64_t i = 0; i < count; i++) {
        if (dtype == DTYPE_F32) {
            ((float *)out)[i] = values[i];
        } else if (dtype == DTYPE_F64) {
            ((double *)out)[i] = values[i];
        } else {
            ((uint16_t *)out)[i] = dtype == DTYPE_F16 ? float_to_f16(values[i]) : float_to_bf16(values[i]);
        }
    }
}

/* Every `parts`-th tensor from `part` on. */
static void write_file(const struct files *f, const char *name, int part, int parts) {
    struct safetensors_entry entries[MOST_TENSORS] = {{0}};
    struct safetensors_writer *w;
    int count = 0;
    for (int i = part; i < f->count; i += parts) {
        const struct tensor_file *t = &f->tensors[i];
        entries[count].name = (char *)t->name;
        entries[count].dtype = f->dtype;
        entries[count].dimensions = t->dimensions;
        memcpy(entries[count++].shape, t->shape, sizeof t->shape);
    }
    EXPECT(safetensors_create(&w, in_folder(name), entries, (size_t)count, NULL, NULL, 0) == STATUS_OK);
    for (int i = part; i < f->count; i += parts) {
        const struct tensor_file *t = &f->tensors[i];
        int64_t values = t->shape[0] * (t->dimensions == 2 ? t->shape[1] : 1);
        double bits[MOST_VALUES];
        encode(bits, t->values, values, f->dtype);
        EXPECT(safetensors_write(w, bits, (size_t)values * dtype_bytes(f->dtype)) == STATUS_OK);
    }
    EXPECT(safetensors_finish(w, NULL, NULL) == STATUS_OK);
}

static void write_text(const char *name, const char *text) {
    EXPECT(file_write_all(in_folder(name), text, strlen(text)) == STATUS_OK);
}

static void write_index(const struct files *f, int parts) {
    char text[8000] = "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {";
    for (int i = 0; i < f->count; i++) {
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s\"%s\": \"part-%d.safetensors\"", i > 0 ? ", " : "",
            f->tensors[i].name, i % parts);
    }
    strcat(text, "}}");
    write_text("model.safetensors.index.json", text);
}

static void write_parts(const struct files *f, int parts) {
    for (int part = 0; part < parts; part++) {
        char name[40];
        snprintf(name, sizeof name, "part-%d.safetensors", part);
        write_file(f, name, part, parts);
    }
    write_index(f, parts);
}

/* ---- reading ---- */

struct reading {
    const struct layout *layout;
    int wrong, buckets;
};

static enum status check_bucket(void *context, int bucket, const float *values) {
    struct reading *r = context;
    int tensor = 0;
    for (int id = 0; id < PARAMETER_KINDS; id++) {
        const struct parameter_info *info = &parameter_table[id];
        int64_t rows = info->file_rows(&config), columns = info->columns(&config);
        for (int layer = 0; layer < (info->per_layer ? config.layers : 1); layer++, tensor++) {
            if ((info->per_layer ? layer + 1 : 0) != bucket) {
                continue;
            }
            const float *at = values + layout_offset(r->layout, &config, (enum parameter_id)id, layer) -
                              r->layout->bucket[bucket].offset;
            for (int64_t i = 0; i < rows; i++) {
                for (int64_t j = 0; j < columns; j++) {
                    int64_t in_file = info->transposed_in_file ? j * rows + i : i * columns + j;
                    r->wrong += at[i * columns + j] != value_of(tensor, in_file);
                }
            }
        }
    }
    r->buckets++;
    return STATUS_OK;
}

static enum status read_folder(struct reading *r) {
    struct layout layout;
    EXPECT(layout_init(&layout, &config, 1) == STATUS_OK);
    *r = (struct reading){&layout, 0, 0};
    enum status status = hugging_face_read_weights(folder, &config, &layout, check_bucket, r);
    layout_free(&layout);
    return status;
}

static void expect_read(void) {
    struct reading r;
    enum status status = read_folder(&r);
    EXPECT(status == STATUS_OK);
    if (status != STATUS_OK) {
        printf("    %s\n", error_message());
    }
    EXPECT(r.buckets == 3 && r.wrong == 0);
}

static void expect_refused(const char *part) {
    struct reading r;
    EXPECT(read_folder(&r) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), part);
    EXPECT(strchr(error_message(), '\n') == NULL);
}

static void test_one_file_and_several_in_every_float_type_with_and_without_the_prefix(void) {
    const enum dtype dtypes[] = {DTYPE_F32, DTYPE_F64, DTYPE_BF16, DTYPE_F16};
    const char *const prefixes[] = {"transformer.", ""};
    for (int i = 0; i < 4 * 2 * 3; i++) {
        struct files f;
        int parts = i / 8 == 0 ? 0 : i / 8 == 1 ? 1 : 7;
        empty_folder();
        make_tensors(&f, prefixes[i % 2]);
        f.dtype = dtypes[i / 2 % 4];
        if (parts == 0) {
            write_file(&f, "model.safetensors", 0, 1);
        } else {
            write_parts(&f, parts);
        }
        expect_read();
    }
}

static void test_a_stored_head_must_be_the_token_embedding(void) {
    struct files f;
    make_tensors(&f, "transformer.");
    add_head(&f);
    for (int parts = 0; parts <= 3; parts += 3) {
        for (int different = 0; different < 2; different++) {
            empty_folder();
            f.tensors[f.count - 1].values[80] = value_of(0, 80) + (float)different;
            if (parts == 0) {
                write_file(&f, "model.safetensors", 0, 1);
            } else {
                write_parts(&f, parts);
            }
            if (different) {
                expect_refused("\"lm_head.weight\" is not the token embedding");
            } else {
                expect_read();
            }
        }
    }
}

static void test_what_is_missing_or_of_another_shape_is_named(void) {
    struct files f;
    empty_folder();
    expect_refused("no model.safetensors in it");
    make_tensors(&f, "transformer.");
    strcpy(f.tensors[9].name, "something else");
    write_parts(&f, 2);
    expect_refused("model.safetensors.index.json: tensor \"transformer.h.1.mlp.c_fc.weight\" is missing");
    make_tensors(&f, "transformer.");
    f.tensors[5].shape[0]--;
    write_parts(&f, 2);
    expect_refused("part-1.safetensors: tensor \"transformer.h.1.attn.c_attn.weight\" is (11, 36), but this "
                   "model's is (12, 36)");
}

static void test_a_wrong_index_is_refused_in_one_line(void) {
    const struct {
        const char *text, *message;
    } cases[] = {
        {"", "model.safetensors.index.json"},
        {"[]", "no object \"weight_map\""},
        {"{\"weight_map\": 3}", "no object \"weight_map\""},
        {"{\"weight_map\": {}}", "is missing"},
        {"{\"weight_map\": {\"a\": 1}}", "\"a\" is not the name of a file"},
        {"{\"weight_map\": {\"a\": \"\"}}", "\"a\" is not the name of a file"},
        {"{\"weight_map\": {\"a\": \"../x\"}}", "\"a\" is not the name of a file"},
        {"{\"weight_map\": {\"a\": \"/etc/passwd\"}}", "\"a\" is not the name of a file"},
        {"{\"weight_map\": {\"a\": \"x\\u0000y\"}}", "\"a\" is not the name of a file"},
        {"{\"weight_map\": {\"a\": \"gone.safetensors\"}}", "gone.safetensors: cannot open"},
        {"{\"weight_map\": {\"a\": \"part-0.safetensors\", \"a\": \"part-0.safetensors\"}}", "\"a\""},
        {"{\"weight_map\": {\"transformer.wte.weight\": \"part-1.safetensors\"}}",
            "part-1.safetensors: tensor \"transformer.wte.weight\" is not in it"},
        {"{\"weight_map\": {\"a\": \"model.safetensors.index.json\"}}", "model.safetensors.index.json"},
    };
    struct files f;
    empty_folder();
    make_tensors(&f, "transformer.");
    write_parts(&f, 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_text("model.safetensors.index.json", cases[i].text);
        expect_refused(cases[i].message);
    }
}

int main(void) {
    make_folder("test_hugging_face");
    RUN(test_one_file_and_several_in_every_float_type_with_and_without_the_prefix);
    RUN(test_a_stored_head_must_be_the_token_embedding);
    RUN(test_what_is_missing_or_of_another_shape_is_named);
    RUN(test_a_wrong_index_is_refused_in_one_line);
    remove_tree(folder);
    return test_summary();
}
