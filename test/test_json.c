/* llmc/json.c against RFC 8259: what is JSON, what is not, and that what is written reads back the same. */
#include "llmc/json.h"
#include "llmc/random.h"
#include "test.h"

#include <stdlib.h>

static struct json *parse(const char *text) {
    struct json *value = NULL;
    return json_parse(&value, text, strlen(text), "test.json") == STATUS_OK ? value : NULL;
}

/* The text is refused with one line that names the file and says `why`. */
static void expect_refused(const char *text, size_t bytes, const char *why) {
    struct json *value = NULL;
    EXPECT(json_parse(&value, text, bytes, "test.json") == STATUS_ERROR);
    EXPECT(value == NULL);
    EXPECT_CONTAINS(error_message(), "test.json");
    EXPECT_CONTAINS(error_message(), why);
    json_free(value);
}

/* ---- reading ---- */

static void test_every_type_is_read(void) {
    struct json *root =
        parse(" {\"a\": [1, -2.5e3, true, false, null, \"text\", {}, []] ,\r\n\t\"b\":{\"c\":0}} ");
    const struct json *a = json_get(root, "a");
    EXPECT(a != NULL && a->type == JSON_ARRAY && a->count == 8);
    if (a != NULL && a->count == 8) {
        EXPECT(a->items[0].type == JSON_NUMBER && a->items[0].is_integer && a->items[0].integer == 1);
        EXPECT(a->items[1].type == JSON_NUMBER && !a->items[1].is_integer && a->items[1].number == -2500);
        EXPECT(a->items[2].type == JSON_BOOL && a->items[2].boolean);
        EXPECT(a->items[3].type == JSON_BOOL && !a->items[3].boolean);
        EXPECT(a->items[4].type == JSON_NULL);
        EXPECT(a->items[5].type == JSON_STRING && a->items[5].string_bytes == 4);
        EXPECT_STRING(a->items[5].string, "text");
        EXPECT(a->items[6].type == JSON_OBJECT && a->items[6].count == 0);
        EXPECT(a->items[7].type == JSON_ARRAY && a->items[7].count == 0);
    }
    EXPECT(json_get(json_get(root, "b"), "c") != NULL);
    EXPECT(json_get(root, "none") == NULL && json_get(a, "a") == NULL && json_get(NULL, "a") == NULL);
    json_free(root);
}

static void test_integers_are_exact_to_64_bits_and_doubles_beyond(void) {
    static const struct {
        const char *text;
        bool is_integer;
        int64_t integer;
        double number;
    } cases[] = {
        {"9007199254740993", true, 9007199254740993, 9007199254740992.0}, /* 2^53 + 1: no double */
        {"9223372036854775807", true, INT64_MAX, 9223372036854775808.0},
        {"-9223372036854775808", true, INT64_MIN, -9223372036854775808.0},
        {"9223372036854775808", false, 0, 9223372036854775808.0},
        {"-0", false, 0, -0.0},
        {"1.0", false, 0, 1.0},
        {"1e0", false, 0, 1.0},
        {"1E+2", false, 0, 100.0},
        {"25e-1", false, 0, 2.5},
        {"4.9406564584124654e-324", false, 0, 4.9406564584124654e-324},
        {"1.7976931348623157e308", false, 0, 1.7976931348623157e308},
        {"1e-999", false, 0, 0.0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct json *value = parse(cases[i].text);
        EXPECT(value != NULL && value->type == JSON_NUMBER && value->is_integer == cases[i].is_integer);
        EXPECT(value != NULL && (!value->is_integer || value->integer == cases[i].integer));
        EXPECT(value != NULL && value->number == cases[i].number);
        EXPECT(value != NULL && signbit(value->number) == signbit(cases[i].number));
        json_free(value);
    }
}

static void test_strings_are_decoded_to_utf8(void) {
    static const struct {
        const char *text, *string;
        size_t bytes;
    } cases[] = {
        {"\"\"", "", 0},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t", 8},
        {"\"\\u0041\\u00e9\\u20AC\"", "A\xc3\xa9\xe2\x82\xac", 6},
        {"\"\\ud83d\\ude00\"", "\xf0\x9f\x98\x80", 4}, /* a surrogate pair */
        {"\"\\udbff\\udfff\"", "\xf4\x8f\xbf\xbf", 4}, /* the last code point */
        {"\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\x7f\"", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\x7f", 10},
        {"\"a\\u0000b\"", "a\0b", 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct json *value = parse(cases[i].text);
        EXPECT(value != NULL && value->type == JSON_STRING && value->string_bytes == cases[i].bytes);
        EXPECT(value != NULL && memcmp(value->string, cases[i].string, cases[i].bytes + 1) == 0);
        json_free(value);
    }
}

static void test_what_is_not_json_is_refused_at_the_byte_where_it_is_wrong(void) {
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"", "ends too early, at byte 0"},
        {" ", "ends too early, at byte 1"},
        {"{", "ends too early, at byte 1"},
        {"[1,", "ends too early, at byte 3"},
        {"\"abc", "ends too early, at byte 4: a string without its closing quote"},
        {"\"abc\\\"", "without its closing quote"},
        {"nul", "byte 0: expected a value"},
        {"True", "byte 0: expected a value"},
        {"NaN", "byte 0: expected a value"},
        {"Infinity", "byte 0: expected a value"},
        {"-Infinity", "byte 1: expected a digit"},
        {"'a'", "byte 0: expected a value"},
        {"\xef\xbb\xbf{}", "byte 0: expected a value"}, /* a byte order mark */
        {"+1", "byte 0: expected a value"},
        {".5", "byte 0: expected a value"},
        {"1.", "ends too early, at byte 2"},
        {"1.e1", "byte 2: expected a digit after the point"},
        {"01", "byte 1: something follows"},
        {"0x1", "byte 1: something follows"},
        {"1e", "ends too early"},
        {"1e+", "ends too early"},
        {"1ex", "byte 2: expected a digit in the exponent"},
        {"1e999", "byte 0: the number is too large"},
        {"[-1e999]", "byte 1: the number is too large"},
        {"{} {}", "byte 3: something follows"},
        {"[1 2]", "byte 3: expected , or ]"},
        {"[1,]", "byte 3: expected a value"},
        {"[,1]", "byte 1: expected a value"},
        {"[1}", "byte 2: expected , or ]"},
        {"{\"a\" 1}", "byte 5: expected : after a key"},
        {"{\"a\":1,}", "byte 7: expected a key in quotes"},
        {"{\"a\":1 \"b\":2}", "byte 7: expected , or }"},
        {"{a:1}", "byte 1: expected a key in quotes"},
        {"{1:1}", "byte 1: expected a key in quotes"},
        {"{\"a\":}", "byte 5: expected a value"},
        {"{\"a\":1,\"b\":2,\"a\":3}", "\"a\" is there twice"},
        {"{\"a\":1,\"\\u0061\":3}", "\"a\" is there twice"},
        {"{\"a\\u0000\":1}", "byte 1: a key with a zero in it"},
        {"\"\\x41\"", "byte 2: unknown escape"},
        {"\"\\u12g4\"", "four hexadecimal digits"},
        {"\"\\u12\"", "four hexadecimal digits"},
        {"\"\\ud800\"", "half of a surrogate pair"},
        {"\"\\ud800x\"", "half of a surrogate pair"},
        {"\"\\ud800\\u0041\"", "half of a surrogate pair"},
        {"\"\\udc00\"", "half of a surrogate pair"},
        {"\"a\nb\"", "byte 2: a control character"},
        {"\"\x1f\"", "byte 1: a control character"},
        {"\"\x80\"", "byte 1: a string that is not UTF-8"},
        {"\"\xc3\"", "byte 1: a string that is not UTF-8"},
        {"\"\xc0\xaf\"", "not UTF-8"},         /* overlong / */
        {"\"\xe0\x9f\xbf\"", "not UTF-8"},     /* overlong */
        {"\"\xf0\x8f\xbf\xbf\"", "not UTF-8"}, /* overlong */
        {"\"\xed\xa0\x80\"", "not UTF-8"},     /* a surrogate */
        {"\"\xf4\x90\x80\x80\"", "not UTF-8"}, /* beyond the last code point */
        {"\"\xff\"", "not UTF-8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        expect_refused(cases[i].text, strlen(cases[i].text), cases[i].why);
    }
    expect_refused("\"a\0b\"", 5, "byte 2: a control character");
    expect_refused("1\0", 2, "byte 1: something follows");
}

static void test_nothing_beyond_the_given_bytes_is_read(void) {
    struct json *value = NULL;
    EXPECT(json_parse(&value, "1234", 2, "test.json") == STATUS_OK && value->integer == 12);
    json_free(value);
    expect_refused("true", 3, "expected a value");
}

static void test_depth_is_bounded_at_64(void) {
    char text[2000];
    for (int depth = 64; depth <= 65; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        text[2 * depth] = '\0';
        struct json *value = parse(text);
        EXPECT((value != NULL) == (depth == 64));
        json_free(value);
    }
    memset(text, '[', sizeof text);
    expect_refused(text, sizeof text, "nested too deep");
}

static void test_every_truncation_of_a_text_is_refused(void) {
    static const char text[] = "{\"a\":[1.5e3,true,null,\"\\ud83d\\ude00\xc3\xa9\"],\"b\":{\"c\":false}}";
    for (size_t bytes = 0; bytes < sizeof text - 1; bytes++) {
        struct json *value = NULL;
        EXPECT(json_parse(&value, text, bytes, "test.json") == STATUS_ERROR && value == NULL);
    }
}

static void test_members_of_the_wrong_kind_are_named(void) {
    struct json *root = parse("{\"whole\": 5, \"part\": 1.5, \"text\": \"t\", \"none\": null}");
    int64_t integer = -1;
    const char *string = NULL;
    EXPECT(json_get_integer(root, "whole", 5, 5, &integer, "test.json") == STATUS_OK && integer == 5);
    EXPECT(json_get_string(root, "text", &string, "test.json") == STATUS_OK);
    EXPECT_STRING(string, "t");

    EXPECT(json_get_integer(root, "whole", 6, 9, &integer, "test.json") == STATUS_ERROR);
    EXPECT_STRING(error_message(), "test.json: \"whole\" is 5, not a whole number from 6 to 9");
    EXPECT(json_get_integer(root, "whole", 1, 4, &integer, "test.json") == STATUS_ERROR);
    EXPECT(json_get_integer(root, "part", 0, 9, &integer, "test.json") == STATUS_ERROR);
    EXPECT_STRING(error_message(), "test.json: \"part\" is 1.5, not a whole number from 0 to 9");
    EXPECT(json_get_integer(root, "missing", 0, 9, &integer, "test.json") == STATUS_ERROR);
    EXPECT_STRING(error_message(), "test.json: \"missing\" is missing");
    EXPECT(json_get_integer(root, "none", 0, 9, &integer, "test.json") == STATUS_ERROR);
    EXPECT_STRING(error_message(), "test.json: \"none\" is not a number");
    EXPECT(json_get_string(root, "whole", &string, "test.json") == STATUS_ERROR);
    EXPECT_STRING(error_message(), "test.json: \"whole\" is not a string");
    EXPECT(integer == 5);
    json_free(root);
}

/* ---- writing ---- */

static char *written(struct json_writer *w) {
    char *text = NULL;
    size_t bytes = 0;
    EXPECT(json_writer_finish(w, &text, &bytes) == STATUS_OK);
    EXPECT(text != NULL && strlen(text) == bytes);
    return text;
}

static void write_sample(struct json_writer *w) {
    json_begin_object(w);
    json_key(w, "a\"");
    json_begin_array(w);
    json_integer(w, INT64_MIN);
    json_number(w, 0.1);
    json_bool(w, true);
    json_null(w);
    json_end_array(w);
    json_key(w, "empty");
    json_begin_object(w);
    json_end_object(w);
    json_key(w, "text");
    json_string(w, "\\ \"\n\x01\xc3\xa9");
    json_end_object(w);
}

static void test_a_text_is_written_on_one_line_or_indented(void) {
    struct json_writer w;
    json_writer_init(&w, false);
    write_sample(&w);
    char *text = written(&w);
    EXPECT_STRING(text, "{\"a\\\"\":[-9223372036854775808,0.1,true,null],\"empty\":{},"
                        "\"text\":\"\\\\ \\\"\\n\\u0001\xc3\xa9\"}");
    free(text);
    json_writer_init(&w, true);
    write_sample(&w);
    text = written(&w);
    EXPECT_STRING(text, "{\n  \"a\\\"\": [\n    -9223372036854775808,\n    0.1,\n    true,\n    null\n  ],\n"
                        "  \"empty\": {},\n  \"text\": \"\\\\ \\\"\\n\\u0001\xc3\xa9\"\n}\n");
    free(text);
    json_writer_init(&w, false);
    text = written(&w);
    EXPECT_STRING(text, "");
    free(text);
}

static void expect_number(double value, const char *expected) {
    struct json_writer w;
    json_writer_init(&w, false);
    json_number(&w, value);
    char *text = written(&w);
    EXPECT_STRING(text, expected);
    free(text);
}

static void test_numbers_are_written_as_short_as_they_can_be(void) {
    expect_number(0, "0");
    expect_number(-0.0, "-0");
    expect_number(100, "100");
    expect_number(-1234567, "-1234567");
    expect_number(0.1, "0.1");
    expect_number(0.1 + 0.2, "0.30000000000000004");
    expect_number(1e-5, "1e-05");
    expect_number(2.5e22, "2.5e+22");
    expect_number(5e-324, "5e-324");
    expect_number(1.7976931348623157e308, "1.7976931348623157e+308");
    expect_number(NAN, "null");
    expect_number(INFINITY, "null");
    expect_number(-INFINITY, "null");
}

static void test_doubles_read_back_bit_by_bit(void) {
    int wrong = 0;
    for (uint64_t i = 0; i < 20000; i++) {
        struct random_block r = random_block(7, 0, i);
        uint64_t bits = (uint64_t)r.word[0] << 32 | r.word[1];
        double value;
        memcpy(&value, &bits, sizeof value);
        if (value - value != 0) {
            continue;
        }
        struct json_writer w;
        json_writer_init(&w, false);
        json_number(&w, value);
        char *text = written(&w);
        struct json *back = parse(text);
        wrong += back == NULL || memcmp(&back->number, &value, sizeof value) != 0;
        json_free(back);
        free(text);
    }
    EXPECT(wrong == 0);
}

static void test_bytes_that_are_not_utf8_become_replacement_characters(void) {
    struct json_writer w;
    json_writer_init(&w, false);
    json_string_bytes(&w, "a\xff\xc3z\0\xe2\x82", 7);
    char *text = written(&w);
    EXPECT_STRING(text, "\"a\xef\xbf\xbd\xef\xbf\xbdz\\u0000\xef\xbf\xbd\xef\xbf\xbd\"");
    struct json *back = parse(text);
    EXPECT(back != NULL && back->string_bytes == 15);
    json_free(back);
    free(text);
}

static void test_a_parsed_value_is_written_again_the_same(void) {
    static const char text[] =
        "{\"a\":[9007199254740993,-0.25,true,false,null,\"\\\"\\u0000\"],\"b\":{\"c\":[]}}";
    struct json *root = parse(text);
    EXPECT(root != NULL);
    if (root != NULL) {
        struct json_writer w;
        json_writer_init(&w, false);
        json_value(&w, root);
        char *again = written(&w);
        EXPECT_STRING(again, text);
        free(again);
    }
    json_free(root);
}

int main(void) {
    RUN(test_every_type_is_read);
    RUN(test_integers_are_exact_to_64_bits_and_doubles_beyond);
    RUN(test_strings_are_decoded_to_utf8);
    RUN(test_what_is_not_json_is_refused_at_the_byte_where_it_is_wrong);
    RUN(test_nothing_beyond_the_given_bytes_is_read);
    RUN(test_depth_is_bounded_at_64);
    RUN(test_every_truncation_of_a_text_is_refused);
    RUN(test_members_of_the_wrong_kind_are_named);
    RUN(test_a_text_is_written_on_one_line_or_indented);
    RUN(test_numbers_are_written_as_short_as_they_can_be);
    RUN(test_doubles_read_back_bit_by_bit);
    RUN(test_bytes_that_are_not_utf8_become_replacement_characters);
    RUN(test_a_parsed_value_is_written_again_the_same);
    return test_summary();
}
