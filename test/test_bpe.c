/* Byte-level BPE: encoding, vocabulary files, training. The golden values in test/golden/tokenizer are tiktoken's and
   Hugging Face tokenizers' (scripts/golden_tokenizer.py). */
#include "llmc/bpe.h"
#include "llmc/bpe_train.h"
#include "llmc/pretokenizer.h"
#include "llmc/random.h"
#include "llmc/tokenizer.h"
#include "llmc/tokenizer_batch.h"
#include "llmc/unicode_tables.h"
#include "folder.h"
#include "test.h"

#include <limits.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define GOLDEN "test/golden/tokenizer"
enum { GOLDEN_TOKENS = 640, RANDOM_BYTES = 64 };

static const char *const forms[] = {
    GOLDEN, GOLDEN "/vocab.json", GOLDEN "/tokenizer.json", GOLDEN "/ranks.tiktoken"};
enum { FORMS = sizeof forms / sizeof *forms };

static struct tokenizer *open_golden(const char *path) {
    struct tokenizer *tokenizer = NULL;
    EXPECT(tokenizer_open(&tokenizer, path) == STATUS_OK);
    if (tokenizer == NULL) {
        printf("%s\n", error_message());
        exit(1);
    }
    return tokenizer;
}

static char *read_golden(const char *name, size_t *bytes) {
    char path[PATH_MAX];
    uint8_t *data;
    if (path_join(path, sizeof path, GOLDEN, name) != STATUS_OK ||
        file_read_all(path, &data, bytes) != STATUS_OK) {
        printf("%s\n", error_message());
        exit(1);
    }
    return (char *)data;
}

/* Few different bytes, so that words, spaces, contractions and broken characters are frequent. */
static size_t random_bytes(char *out, uint64_t number) {
    static const char parts[][4] = {"a", "b", "'", "s", "t", "ll", " ", " ", "\n", "1", "!", "\xc3\xa9",
        "\xe4\xb8\xad", "\xe3\x80\x80", "\xcc\x81", "\xff", "\xc3", "\xe4\xb8", "\x80", "the"};
    enum { PARTS = sizeof parts / sizeof *parts };
    size_t bytes = 0, wanted = (size_t)(random_uniform(1, 1, number) * (RANDOM_BYTES - 3));
    for (uint64_t i = 0; bytes < wanted; i++) {
        const char *part = parts[(int)(random_uniform(2, number, i) * PARTS)];
        memcpy(out + bytes, part, strlen(part));
        bytes += strlen(part);
    }
    return bytes;
}

/* ---- characters and words ---- */

static void test_the_unicode_tables_have_the_letters_numbers_and_spaces_of_unicode_16(void) {
    int counts[4] = {0};
    for (uint32_t code = 0; code < 0x110000; code++) {
        counts[unicode_class(code)]++;
    }
    EXPECT(counts[CLASS_LETTER] == 141028 && counts[CLASS_NUMBER] == 1911 && counts[CLASS_SPACE] == 25);
    const uint32_t letters[] = {
        'a', 'Z', 0xaa, 0xe9, 0x416, 0x5d0, 0x905, 0x4e00, 0xac00, 0x10d4, 0x1c89, 0x105c0, 0x323af};
    const uint32_t numbers[] = {'0', '9', 0xb2, 0xbd, 0x660, 0x966, 0x2167, 0x3007, 0x1d7ff, 0x10d40};
    const uint32_t spaces[] = {'\t', '\r', ' ', 0x85, 0xa0, 0x1680, 0x2028, 0x3000};
    const uint32_t others[] = {
        0, 0x1c, '_', '!', 0xb4, 0x301, 0x200b, 0x20ac, 0xe000, 0x1f600, 0x10ffff, 0xffffffff};
    for (size_t i = 0; i < sizeof letters / 4; i++) {
        EXPECT(unicode_class(letters[i]) == CLASS_LETTER);
    }
    for (size_t i = 0; i < sizeof numbers / 4; i++) {
        EXPECT(unicode_class(numbers[i]) == CLASS_NUMBER);
    }
    for (size_t i = 0; i < sizeof spaces / 4; i++) {
        EXPECT(unicode_class(spaces[i]) == CLASS_SPACE);
    }
    for (size_t i = 0; i < sizeof others / 4; i++) {
        EXPECT(unicode_class(others[i]) == CLASS_OTHER);
    }
    for (uint32_t code = 0; code < 128; code++) {
        EXPECT(ascii_classes[code] == unicode_class(code));
    }
}

/* The words of the text with bars between. */
static const char *words_of(const char *text, size_t bytes) {
    static char words[512];
    size_t used = 0;
    for (size_t at = 0; at < bytes;) {
        size_t length = pretokenizer_next((const uint8_t *)text + at, bytes - at);
        EXPECT(length > 0 && length <= bytes - at);
        used += (size_t)snprintf(
            words + used, sizeof words - used, "%s%.*s", at > 0 ? "|" : "", (int)length, text + at);
        at += length;
    }
    return words;
}

static void test_a_text_is_cut_into_words_by_the_pattern_of_gpt2(void) {
    static const char *const examples[][2] = {
        {"Hello world", "Hello| world"},
        {"it's they'll I'd we've you're I'm don't", "it|'s| they|'ll| I|'d| we|'ve| you|'re| I|'m| don|'t"},
        {"IT'S 'sir' 'x", "IT|'|S| '|sir|'| '|x"},
        {"!'s 'ss", "!'|s| '|ss"},
        {"'", "'"},
        {"'r", "'|r"},
        {"a1b22 333", "a|1|b|22| 333"},
        {"x=y+_z; // ok", "x|=|y|+_|z|;| //| ok"},
        {"a  b   c", "a| | b|  | c"},
        {"a \n b\n\nc", "a| \n| b|\n|\n|c"},
        {"end  ", "end|  "},
        {" ", " "},
        {"\t\tx", "\t|\t|x"},
        {"caf\xc3\xa9 d\xc3\xa9j\xc3\xa0", "caf\xc3\xa9| d\xc3\xa9j\xc3\xa0"},
        {"\xe4\xb8\xad\xe3\x80\x80\xe3\x80\x80\xe4\xb8\xad",
            "\xe4\xb8\xad|\xe3\x80\x80|\xe3\x80\x80|\xe4\xb8\xad"},
        {"e\xcc\x81t", "e|\xcc\x81|t"}, /* a combining accent is no letter */
        {"\xd9\xa3\xd9\xa4x", "\xd9\xa3\xd9\xa4|x"},
    };
    for (size_t i = 0; i < sizeof examples / sizeof *examples; i++) {
        EXPECT_STRING(words_of(examples[i][0], strlen(examples[i][0])), examples[i][1]);
    }
}

static void test_bytes_that_are_not_utf8_go_with_the_word_around_them(void) {
    static const char *const examples[][2] = {
        {"caf\xe9 noir", "caf\xe9| noir"},
        {"\xe9t\xe9", "\xe9t\xe9"},
        {"  \xff!a", " | \xff!|a"},
        {"1\xc3 2\xe4\xb8", "1\xc3| 2\xe4\xb8"},
        {"\xed\xa0\x80\xc0\x80\xf5",
            "\xed\xa0\x80\xc0\x80\xf5"}, /* a surrogate, an overlong zero, beyond Unicode */
        {"a\xe0\x80\x80"
         "b\xf4\x90\x80\x80"
         "c",
            "a\xe0\x80\x80"
            "b\xf4\x90\x80\x80"
            "c"},
        {"\xff\n", "\xff|\n"},
    };
    for (size_t i = 0; i < sizeof examples / sizeof *examples; i++) {
        EXPECT_STRING(words_of(examples[i][0], strlen(examples[i][0])), examples[i][1]);
    }
}

/* ---- encoding ---- */

static int hex_digit(char c) {
    return c <= '9' ? c - '0' : c - 'a' + 10;
}

/* "hex tokens..." into text and tokens; returns where the next line begins. */
static const char *read_encoding(
    const char *line, char *text, size_t *bytes, int32_t *tokens, size_t *count) {
    *bytes = *count = 0;
    for (; *line != ' '; line += 2) {
        text[(*bytes)++] = (char)(hex_digit(line[0]) << 4 | hex_digit(line[1]));
    }
    while (*line != '\n') {
        char *end;
        tokens[(*count)++] = (int32_t)strtol(line, &end, 10);
        line = end;
    }
    return line + 1;
}

static void test_texts_encode_as_tiktoken_encodes_them_from_every_kind_of_file(void) {
    size_t file_bytes;
    char *file = read_golden("encodings.txt", &file_bytes);
    for (int form = 0; form < FORMS; form++) {
        struct tokenizer *tokenizer = open_golden(forms[form]);
        int lines = 0;
        for (const char *line = file; *line != '\0'; lines++) {
            char text[1024];
            int32_t expected[1024], *tokens;
            size_t bytes, expected_count, count;
            line = read_encoding(line, text, &bytes, expected, &expected_count);
            EXPECT(tokenizer_encode(tokenizer, text, bytes, &tokens, &count) == STATUS_OK);
            EXPECT(count == expected_count && memcmp(tokens, expected, count * sizeof *tokens) == 0);
            free(tokens);
        }
        EXPECT(lines > 100);
        tokenizer_close(tokenizer);
    }
    free(file);
}

static void test_the_end_of_text_is_a_token_without_bytes_and_not_made_from_its_name(void) {
    for (int form = 0; form < FORMS; form++) {
        struct tokenizer *tokenizer = open_golden(forms[form]);
        const char name[] = "<|endoftext|>";
        int32_t *tokens;
        size_t count, bytes;
        EXPECT(tokenizer_vocab_size(tokenizer) == GOLDEN_TOKENS);
        EXPECT(tokenizer_end_of_text(tokenizer) == GOLDEN_TOKENS - 1);
        EXPECT(tokenizer_token_bytes(tokenizer, GOLDEN_TOKENS - 1, &bytes) != NULL && bytes == 0);
        EXPECT(tokenizer_token_bytes(tokenizer, GOLDEN_TOKENS, &bytes) == NULL && bytes == 0);
        EXPECT(tokenizer_encode(tokenizer, name, strlen(name), &tokens, &count) == STATUS_OK);
        for (size_t i = 0; i < count; i++) {
            EXPECT(tokens[i] != GOLDEN_TOKENS - 1);
        }
        EXPECT(count > 1);
        free(tokens);
        tokenizer_close(tokenizer);
    }
}

static void test_every_token_encodes_to_itself(void) {
    struct tokenizer *tokenizer = open_golden(GOLDEN);
    for (int32_t token = 0; token < GOLDEN_TOKENS - 1; token++) {
        size_t bytes, count;
        int32_t *tokens;
        const char *text = tokenizer_token_bytes(tokenizer, token, &bytes);
        EXPECT(tokenizer_encode(tokenizer, text, bytes, &tokens, &count) == STATUS_OK);
        EXPECT(count == 1 && tokens[0] == token);
        free(tokens);
    }
    tokenizer_close(tokenizer);
}

static void test_any_bytes_come_back_from_their_tokens(void) {
    struct tokenizer *tokenizer = open_golden(GOLDEN);
    for (uint64_t number = 0; number < 5000; number++) {
        char text[RANDOM_BYTES], decoded[RANDOM_BYTES];
        size_t bytes = random_bytes(text, number), count, used = 0, token_bytes;
        int32_t *tokens;
        EXPECT(tokenizer_encode(tokenizer, text, bytes, &tokens, &count) == STATUS_OK);
        for (size_t i = 0; i < count; i++) {
            const char *token = tokenizer_token_bytes(tokenizer, tokens[i], &token_bytes);
            EXPECT(used + token_bytes <= bytes);
            memcpy(decoded + used, token, token_bytes);
            used += token_bytes;
        }
        EXPECT(used == bytes && memcmp(text, decoded, bytes) == 0);
        free(tokens);
    }
    tokenizer_close(tokenizer);
}

static void test_a_text_cut_where_it_may_be_encodes_as_the_whole(void) {
    struct tokenizer *tokenizer = open_golden(GOLDEN);
    int cuts = 0;
    for (uint64_t number = 0; number < 5000; number++) {
        char text[RANDOM_BYTES];
        size_t bytes = random_bytes(text, number), cut = tokenizer_cut(tokenizer, text, bytes), count[3];
        int32_t *tokens[3];
        EXPECT(cut <= bytes);
        EXPECT(tokenizer_encode(tokenizer, text, bytes, &tokens[0], &count[0]) == STATUS_OK);
        EXPECT(tokenizer_encode(tokenizer, text, cut, &tokens[1], &count[1]) == STATUS_OK);
        EXPECT(tokenizer_encode(tokenizer, text + cut, bytes - cut, &tokens[2], &count[2]) == STATUS_OK);
        EXPECT(count[0] == count[1] + count[2] && memcmp(tokens[0], tokens[1], count[1] * 4) == 0 &&
               memcmp(tokens[0] + count[1], tokens[2], count[2] * 4) == 0);
        cuts += cut > 0;
        for (int i = 0; i < 3; i++) {
            free(tokens[i]);
        }
    }
    EXPECT(cuts > 2500);
    tokenizer_close(tokenizer);
}

static void test_a_cut_leaves_what_more_text_may_change(void) {
    struct tokenizer *tokenizer = open_golden(GOLDEN);
    static const struct {
        const char *text;
        size_t cut;
    } examples[] = {{"some words here", 10}, {"oneword", 0}, {"it's", 0}, {"ends in spaces    ", 14},
        {"\xe4\xb8\xad\xe6\x96\x87\xe3\x80\x82\xe4\xb8\xad\xe6\x96\x87\xe5\xad\x97", 6}, {"", 0},
        {"        ", 0}};
    for (size_t i = 0; i < sizeof examples / sizeof *examples; i++) {
        EXPECT(tokenizer_cut(tokenizer, examples[i].text, strlen(examples[i].text)) == examples[i].cut);
    }
    tokenizer_close(tokenizer);
}

/* The obvious: the leftmost of the lowest-numbered tokens that two neighbours make, again and again. */
static size_t merge_obviously(const struct tokenizer *t, const char *word, size_t length, int32_t *tokens) {
    for (size_t i = 0; i < length; i++) {
        tokens[i] = bpe_find(t, (const uint8_t *)word + i, 1);
    }
    for (size_t count = length;;) {
        size_t best = count;
        int32_t lowest = INT32_MAX;
        for (size_t i = 0; i + 1 < count; i++) {
            uint8_t joined[256];
            size_t left, right;
            const char *left_text = tokenizer_token_bytes(t, tokens[i], &left);
            const char *right_text = tokenizer_token_bytes(t, tokens[i + 1], &right);
            memcpy(joined, left_text, left);
            memcpy(joined + left, right_text, right);
            int32_t token = bpe_find(t, joined, left + right);
            if (token >= 0 && token < lowest) {
                lowest = token;
                best = i;
            }
        }
        if (best == count) {
            return count;
        }
        tokens[best] = lowest;
        count--;
        memmove(tokens + best + 1, tokens + best + 2, (count - best - 1) * sizeof *tokens);
    }
}

static void test_words_of_any_length_merge_like_the_obvious_algorithm(void) {
    struct tokenizer *tokenizer = open_golden(GOLDEN);
    enum { LONGEST = 300 };
    size_t source_bytes;
    char *source = read_golden("text.txt", &source_bytes);
    for (uint64_t number = 0; number < 400; number++) {
        size_t length = number < LONGEST ? number : LONGEST, count = 0;
        char word[LONGEST];
        int32_t tokens[LONGEST], expected[LONGEST];
        bool few_letters = number % 2 == 0;
        size_t first = (size_t)(random_uniform(3, 0, number) * (double)(source_bytes - LONGEST));
        for (size_t i = 0; i < length; i++) {
            word[i] = few_letters ? "etha "[(int)(random_uniform(3, number, i) * 5)] : source[first + i];
        }
        EXPECT(bpe_merge_word(tokenizer, (uint8_t *)word, length, tokens, &count) == STATUS_OK);
        EXPECT(count == merge_obviously(tokenizer, word, length, expected));
        EXPECT(memcmp(tokens, expected, count * sizeof *tokens) == 0);
    }
    free(source);
    tokenizer_close(tokenizer);
}

static void test_a_word_of_a_megabyte_takes_no_quadratic_time(void) {
    struct tokenizer *tokenizer = open_golden(GOLDEN);
    enum { BYTES = 1 << 20 };
    char *text = malloc(BYTES);
    int32_t *tokens;
    size_t count;
    for (size_t i = 0; i < BYTES; i++) {
        text[i] = "theano"[(int)(random_uniform(4, 0, i) * 6)];
    }
    clock_t start = clock();
    EXPECT(tokenizer_encode(tokenizer, text, BYTES, &tokens, &count) == STATUS_OK);
    EXPECT(clock() - start < 10 * CLOCKS_PER_SEC); /* under a sanitizer; n^2 would be an hour */
    EXPECT(count < BYTES);
    free(tokens);
    free(text);
    tokenizer_close(tokenizer);
}

static void test_pieces_encode_the_same_by_any_number_of_threads(void) {
    struct tokenizer *tokenizer = open_golden(GOLDEN);
    enum { PIECES = 500 };
    static char texts[PIECES][RANDOM_BYTES];
    struct tokenizer_piece pieces[PIECES];
    for (int threads = 1; threads <= 5; threads += 2) {
        for (int i = 0; i < PIECES; i++) {
            pieces[i] = (struct tokenizer_piece){texts[i], random_bytes(texts[i], (uint64_t)i), NULL, 0};
        }
        EXPECT(tokenizer_encode_pieces(tokenizer, pieces, PIECES, threads) == STATUS_OK);
        for (int i = 0; i < PIECES; i++) {
            int32_t *tokens;
            size_t count;
            EXPECT(tokenizer_encode(tokenizer, texts[i], pieces[i].bytes, &tokens, &count) == STATUS_OK);
            EXPECT(pieces[i].count == count && memcmp(pieces[i].tokens, tokens, count * sizeof *tokens) == 0);
            free(tokens);
            free(pieces[i].tokens);
        }
    }
    EXPECT(tokenizer_encode_pieces(tokenizer, pieces, 0, 4) == STATUS_OK);
    tokenizer_close(tokenizer);
}

/* ---- files ---- */

static void write_file(const char *name, const char *text, size_t bytes) {
    EXPECT(file_write_all(in_folder(name), text, bytes) == STATUS_OK);
}

/* A golden file with the first `from` in it replaced by `to`, as NAME in the test's folder. */
static void write_changed(const char *name, const char *from, const char *to) {
    size_t bytes;
    char *text = read_golden(name, &bytes), *at = strstr(text, from);
    EXPECT(at != NULL);
    char *changed = malloc(bytes + strlen(to) + 1);
    if (at != NULL && changed != NULL) {
        size_t before = (size_t)(at - text), after = before + strlen(from);
        memcpy(changed, text, before);
        memcpy(changed + before, to, strlen(to));
        memcpy(changed + before + strlen(to), text + after, bytes - after);
        write_file(name, changed, bytes - strlen(from) + strlen(to));
    }
    free(changed);
    free(text);
}

static void expect_refused(const char *name, const char *message) {
    struct tokenizer *tokenizer = (struct tokenizer *)&folder;
    EXPECT(tokenizer_open(&tokenizer, in_folder(name)) == STATUS_ERROR);
    EXPECT(tokenizer == NULL);
    EXPECT_CONTAINS(error_message(), message);
    EXPECT_CONTAINS(error_message(), folder);
}

struct damage {
    const char *name, *from, *to, *message;
};

static void test_damaged_files_are_refused_with_one_line(void) {
    static const struct damage damages[] = {
        {"tokenizer.json", "\"BPE\"", "\"WordPiece\"", "its model is not of type BPE"},
        {"tokenizer.json", "\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}",
            "\"normalizer\" is not supported"},
        {"tokenizer.json", "\"byte_fallback\":false", "\"byte_fallback\":true",
            "\"byte_fallback\" is not supported"},
        {"tokenizer.json", "\"ignore_merges\":false", "\"ignore_merges\":true",
            "\"ignore_merges\" is not supported"},
        {"tokenizer.json", "\"dropout\":null", "\"dropout\":0.1", "\"dropout\" is not supported"},
        {"tokenizer.json", "\"add_prefix_space\":false", "\"add_prefix_space\":true",
            "\"add_prefix_space\" is not"},
        {"tokenizer.json", "\"use_regex\":true", "\"use_regex\":false",
            "its pre_tokenizer is not GPT-2's ByteLevel"},
        {"tokenizer.json", "\"ByteLevel\"", "\"Metaspace\"", "its pre_tokenizer is not GPT-2's ByteLevel"},
        {"tokenizer.json", "\"vocab\":{", "\"words\":{", "no object \"vocab\" and array \"merges\""},
        {"tokenizer.json", "\"id\":639", "\"id\":7", "token id 7 is there twice"},
        {"tokenizer.json", "\"id\":639", "\"id\":-1", "\"id\" is -1"},
        {"tokenizer.json", "\"content\":", "\"contents\":", "added token 639 has no \"content\""},
        {"tokenizer.json", "\"merges\":[", "\"merges\":[[\"a\"],", "merge 1 is not two tokens"},
        {"tokenizer.json", "\"merges\":[", "\"merges\":[7,", "merge 1 is not two tokens"},
        {"tokenizer.json", "\"merges\":[", "\"merges\":[\"a b c\",",
            "merge 1 is not two tokens with a space between"},
        {"tokenizer.json", "\"merges\":[", "\"merges\":[\"q q\",",
            "merge 1 makes a token that the vocabulary does not"},
        {"tokenizer.json", "\"merges\":[", "\"merges\":[[\"q\",\"nowhere\"],",
            "merge 1 joins a token that the vocabulary"},
        {"tokenizer.json", "\"merges\":[", "\"merges\":[[\"\",\"q\"],",
            "merge 1 joins a token that the vocabulary"},
        {"tokenizer.json", "\"!\":0", "\"!\":\"0\"", "the id of token \"!\" is no whole number"},
        {"tokenizer.json", "\"!\":0", "\"!\":0.5", "the id of token \"!\" is no whole number"},
        {"tokenizer.json", "\"!\":0", "\"!\":1", "token id 1 is there twice"},
        {"tokenizer.json", "\"!\":0", "\"!\":99999999999", "token id 99999999999 is not in 0 to"},
        {"tokenizer.json", "\"!\":0,", "", "\"id\" is 639, not a whole number from 0 to 638"},
        {"tokenizer.json", "\"!\":0", "\"!!\":0", "no token for the byte 0x21"},
        {"tokenizer.json", "\"!\":0", "\"\":0", "token 0 has 0 bytes"},
        {"tokenizer.json", "\"!\":0", "\"! \":0", "token 0 has characters that stand for no byte"},
        {"tokenizer.json", "\"!\":0", "\"\xe4\xb8\xad\":0", "token 0 has characters that stand for no byte"},
        {"tokenizer.json", "\"!\":0", "\"!\":0,\"!\":0", "the JSON key \"!\" is there twice"},
        {"tokenizer.json", "}", "", "not JSON at byte"},
        {"ranks.tiktoken", "IQ== 0\n", "", "no token has the id 0"},
        {"ranks.tiktoken", "IQ== 0", "IQ== 1", "token id 1 is there twice"},
        {"ranks.tiktoken", "IQ== 0", "IQ== 123456789", "token id 123456789 is not in 0 to"},
        {"ranks.tiktoken", "IQ== 0", "IQ== 99999999999999999999", "line 1 is not a token in base64"},
        {"ranks.tiktoken", "IQ== 0", "IQ== -1", "line 1 is not a token in base64"},
        {"ranks.tiktoken", "IQ== 0", "IQ== ", "line 1 is not a token in base64"},
        {"ranks.tiktoken", "IQ== 0", "IQ==0", "line 1 is not a token in base64"},
        {"ranks.tiktoken", "IQ== 0", "I?== 0", "line 1 is not a token in base64"},
        {"ranks.tiktoken", "IQ== 0", "IQ= 0", "line 1 is not a token in base64"},
        {"ranks.tiktoken", "IQ== 0", "==== 0", "line 1 is not a token in base64"},
        {"ranks.tiktoken", "IQ== 0", " 0", "line 1 is not a token in base64"},
        {"ranks.tiktoken", "IQ== 0", "Ig== 0", "tokens 0 and 1 are the same bytes"},
        {"ranks.tiktoken", " 638", " 638\nYWJjZGVm 639",
            "the token of rank 639 is not made of two tokens of lower ranks"},
    };
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        write_changed(damages[i].name, damages[i].from, damages[i].to);
        expect_refused(damages[i].name, damages[i].message);
    }
    write_file("ranks.tiktoken", "", 0);
    expect_refused("ranks.tiktoken", "no token for the byte 0x00");
    write_file("ranks.tiktoken", "words and words\n", 16);
    expect_refused("ranks.tiktoken", "line 1 is not a token in base64");
}

static void test_damaged_merges_are_refused_by_their_number(void) {
    static const struct damage damages[] = {
        {"merges.txt", "#version: 0.2\n", "#version: 0.2\nno-space\n",
            "merge 1 is not two tokens with a space between"},
        {"merges.txt", "#version: 0.2\n", "#version: 0.2\na b c\n",
            "merge 1 is not two tokens with a space between"},
        {"merges.txt", "#version: 0.2\n", "#version: 0.2\na \n",
            "merge 1 joins a token that the vocabulary does not have"},
        {"merges.txt", "#version: 0.2\n", "#version: 0.2\nq q\n",
            "merge 1 makes a token that the vocabulary does not have"},
        {"merges.txt", "#version: 0.2\n", "#version: 0.2\na \xe4\xb8\xad\n",
            "merge 1 has characters that stand for no byte"},
        {"merges.txt", "#version: 0.2\n", "#version: 0.2\nt h\n", "is there before, as merge 1"},
    };
    write_changed("vocab.json", "{", "{");
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        write_changed(damages[i].name, damages[i].from, damages[i].to);
        struct tokenizer *tokenizer = NULL;
        EXPECT(tokenizer_open(&tokenizer, in_folder("vocab.json")) == STATUS_ERROR);
        EXPECT_CONTAINS(error_message(), damages[i].message);
        EXPECT_CONTAINS(error_message(), "/merges.txt: ");
    }
    write_file("vocab.json", "[]", 2);
    expect_refused("vocab.json", "line 1 is not a token in base64");
    write_file("vocab.json", "{\"a\": 0}", 8);
    expect_refused("vocab.json", "no token for the byte 0x00");
}

static void test_missing_and_strange_files_are_named(void) {
    struct tokenizer *tokenizer;
    EXPECT(make_directories(in_folder("empty")) == STATUS_OK);
    expect_refused("empty", "this folder has no vocab.json with merges.txt, and no tokenizer.json");
    write_file("empty/vocab.json", "{}", 2);
    expect_refused("empty/vocab.json", "there is no merges.txt beside it");
    write_file("big", "", 0);
    EXPECT(truncate(in_folder("big"), (off_t)17 << 20) == 0);
    expect_refused("big", "a file of its kind has at most 16 MiB");
    EXPECT(tokenizer_open(&tokenizer, "/dev/zero") == STATUS_ERROR);
    EXPECT_STRING(error_message(), "/dev/zero: is not a file");
}

static void test_merges_alone_are_refused(void) {
    write_changed("merges.txt", "#", "#");
    expect_refused("merges.txt", "these are merges; give the vocab.json that belongs to them");
}

static void test_names_of_openai_and_lines_of_windows_are_read(void) {
    size_t vocab_bytes, merges_bytes, used = 0;
    char *vocab = read_golden("vocab.json", &vocab_bytes), *merges = read_golden("merges.txt", &merges_bytes);
    char *windows = malloc(2 * merges_bytes), path[PATH_MAX];
    for (size_t i = 0; i < merges_bytes; i++) {
        if (merges[i] == '\n') {
            windows[used++] = '\r';
        }
        windows[used++] = merges[i];
    }
    EXPECT(
        path_join(path, sizeof path, folder, "openai") == STATUS_OK && make_directories(path) == STATUS_OK);
    write_file("openai/encoder.json", vocab, vocab_bytes);
    write_file("openai/vocab.bpe", windows, used);
    struct tokenizer *tokenizer = open_golden(path);
    EXPECT(tokenizer->vocab_size == GOLDEN_TOKENS && tokenizer->merge_count == GOLDEN_TOKENS - 257);
    tokenizer_close(tokenizer);
    free(windows);
    free(merges);
    free(vocab);
}

static void test_a_vocabulary_without_end_of_text_gets_one(void) {
    write_changed("vocab.json", ",\"<|endoftext|>\":639", "");
    write_changed("merges.txt", "#", "#");
    struct tokenizer *tokenizer = open_golden(folder);
    EXPECT(tokenizer_vocab_size(tokenizer) == GOLDEN_TOKENS);
    EXPECT(tokenizer_end_of_text(tokenizer) == GOLDEN_TOKENS - 1);
    tokenizer_close(tokenizer);
}

/* A token that no merge makes is never chosen, though its bytes are there. */
static void test_tokens_without_merges_are_read_but_not_made(void) {
    write_changed("vocab.json", "\"<|endoftext|>\":639", "\"<|endoftext|>\":639,\"zzzz\":640");
    write_changed("merges.txt", "#", "#");
    struct tokenizer *tokenizer = open_golden(folder);
    int32_t *tokens;
    size_t count, bytes;
    EXPECT(tokenizer_vocab_size(tokenizer) == GOLDEN_TOKENS + 1);
    EXPECT(memcmp(tokenizer_token_bytes(tokenizer, 640, &bytes), "zzzz", 4) == 0 && bytes == 4);
    EXPECT(tokenizer_encode(tokenizer, "zzzz", 4, &tokens, &count) == STATUS_OK && count == 4);
    free(tokens);
    tokenizer_close(tokenizer);
}

static bool same_file(const char *golden_name, const char *name) {
    size_t golden_bytes, bytes = 0;
    uint8_t *data = NULL;
    char *golden = read_golden(golden_name, &golden_bytes);
    EXPECT(file_read_all(in_folder(name), &data, &bytes) == STATUS_OK);
    bool same = bytes == golden_bytes && memcmp(data, golden, bytes) == 0;
    free(data);
    free(golden);
    return same;
}

static void test_saved_files_are_those_that_were_read(void) {
    struct tokenizer *tokenizer = open_golden(GOLDEN "/ranks.tiktoken");
    EXPECT(tokenizer_save(tokenizer, folder) == STATUS_OK);
    EXPECT(same_file("vocab.json", "vocab.json"));
    EXPECT(same_file("merges.txt", "merges.txt"));
    struct tokenizer *again = open_golden(in_folder("tokenizer.json"));
    EXPECT(again->vocab_size == tokenizer->vocab_size && again->end_of_text == tokenizer->end_of_text);
    EXPECT(memcmp(again->offsets, tokenizer->offsets, (GOLDEN_TOKENS + 1) * sizeof *again->offsets) == 0);
    EXPECT(memcmp(again->bytes, tokenizer->bytes, again->offsets[GOLDEN_TOKENS]) == 0);
    EXPECT(memcmp(again->merges, tokenizer->merges, (size_t)again->merge_count * sizeof *again->merges) == 0);
    tokenizer_close(again);
    tokenizer_close(tokenizer);
}

/* ---- training ---- */

static struct tokenizer *train(
    const char *text, size_t bytes, size_t part_bytes, size_t most_words, int vocab_size) {
    struct bpe_trainer *trainer;
    struct tokenizer *tokenizer = NULL;
    EXPECT(bpe_trainer_create(&trainer, most_words) == STATUS_OK);
    while (bytes > 0) {
        size_t part = bytes <= part_bytes ? bytes : bpe_trainer_cut(text, part_bytes);
        EXPECT(bpe_trainer_add(trainer, text, part) == STATUS_OK);
        text += part;
        bytes -= part;
    }
    EXPECT(bpe_trainer_finish(trainer, vocab_size, &tokenizer) == STATUS_OK);
    bpe_trainer_free(trainer);
    return tokenizer;
}

static void test_training_gives_the_vocabulary_of_hugging_faces_trainer(void) {
    size_t bytes;
    char *text = read_golden("text.txt", &bytes);
    const size_t parts[] = {SIZE_MAX, 1000, 300};
    for (int i = 0; i < 3; i++) {
        struct tokenizer *tokenizer = train(text, bytes, parts[i], 0, GOLDEN_TOKENS);
        EXPECT(tokenizer_save(tokenizer, folder) == STATUS_OK);
        EXPECT(same_file("vocab.json", "vocab.json"));
        EXPECT(same_file("merges.txt", "merges.txt"));
        tokenizer_close(tokenizer);
    }
    free(text);
}

static void test_training_stops_when_no_pair_is_there_twice(void) {
    const char text[] = "abcd abcd xy";
    struct tokenizer *tokenizer = train(text, strlen(text), SIZE_MAX, 0, 1000);
    /* "abcd" and " abcd": ab, then abc, abcd; " a" is there once */
    EXPECT(tokenizer_vocab_size(tokenizer) == 256 + 3 + 1);
    EXPECT(bpe_find(tokenizer, (const uint8_t *)"abcd", 4) == 258);
    EXPECT(tokenizer_end_of_text(tokenizer) == 259);
    tokenizer_close(tokenizer);
    tokenizer = train("", 0, SIZE_MAX, 0, 1000);
    EXPECT(tokenizer_vocab_size(tokenizer) == 257);
    tokenizer_close(tokenizer);
}

static void test_of_equally_frequent_pairs_the_one_with_lower_ids_is_first(void) {
    const char text[] = "yz ba yz ba";
    struct tokenizer *tokenizer = train(text, strlen(text), SIZE_MAX, 0, 259);
    EXPECT(bpe_find(tokenizer, (const uint8_t *)"ba", 2) == 256);
    EXPECT(bpe_find(tokenizer, (const uint8_t *)"yz", 2) == 257);
    tokenizer_close(tokenizer);
}

static void test_training_forgets_rare_words_rather_than_growing(void) {
    enum { WORDS = 20000 };
    char *text = malloc(WORDS * 16);
    size_t used = 0;
    for (int i = 0; i < WORDS; i++) { /* every other word is new */
        used += (size_t)sprintf(text + used, " frequent %c%c%c%c", 'a' + i % 23, 'a' + i / 23 % 23,
            'a' + i / 529 % 23, 'a' + i / 12167 % 23);
    }
    struct tokenizer *tokenizer = train(text, used, SIZE_MAX, 100, 265);
    EXPECT(tokenizer_vocab_size(tokenizer) == 265);
    EXPECT(bpe_find(tokenizer, (const uint8_t *)" frequent", 9) == 263); /* its 8 merges come first */
    tokenizer_close(tokenizer);
    free(text);
}

static void test_a_vocabulary_smaller_than_the_bytes_is_refused(void) {
    struct bpe_trainer *trainer;
    struct tokenizer *tokenizer;
    EXPECT(bpe_trainer_create(&trainer, 0) == STATUS_OK);
    EXPECT(bpe_trainer_finish(trainer, 256, &tokenizer) == STATUS_ERROR);
    EXPECT_STRING(error_message(), "a vocabulary of 256 tokens: it has at least 257 and at most 1048576");
    EXPECT(tokenizer == NULL);
    bpe_trainer_free(trainer);
}

int main(void) {
    make_folder("test_bpe");
    RUN(test_the_unicode_tables_have_the_letters_numbers_and_spaces_of_unicode_16);
    RUN(test_a_text_is_cut_into_words_by_the_pattern_of_gpt2);
    RUN(test_bytes_that_are_not_utf8_go_with_the_word_around_them);
    RUN(test_texts_encode_as_tiktoken_encodes_them_from_every_kind_of_file);
    RUN(test_the_end_of_text_is_a_token_without_bytes_and_not_made_from_its_name);
    RUN(test_every_token_encodes_to_itself);
    RUN(test_any_bytes_come_back_from_their_tokens);
    RUN(test_a_text_cut_where_it_may_be_encodes_as_the_whole);
    RUN(test_a_cut_leaves_what_more_text_may_change);
    RUN(test_words_of_any_length_merge_like_the_obvious_algorithm);
    RUN(test_a_word_of_a_megabyte_takes_no_quadratic_time);
    RUN(test_pieces_encode_the_same_by_any_number_of_threads);
    RUN(test_damaged_files_are_refused_with_one_line);
    RUN(test_damaged_merges_are_refused_by_their_number);
    RUN(test_missing_and_strange_files_are_named);
    RUN(test_merges_alone_are_refused);
    RUN(test_names_of_openai_and_lines_of_windows_are_read);
    RUN(test_a_vocabulary_without_end_of_text_gets_one);
    RUN(test_tokens_without_merges_are_read_but_not_made);
    RUN(test_saved_files_are_those_that_were_read);
    RUN(test_training_gives_the_vocabulary_of_hugging_faces_trainer);
    RUN(test_training_stops_when_no_pair_is_there_twice);
    RUN(test_of_equally_frequent_pairs_the_one_with_lower_ids_is_first);
    RUN(test_training_forgets_rare_words_rather_than_growing);
    RUN(test_a_vocabulary_smaller_than_the_bytes_is_refused);
    remove_tree(folder);
    return test_summary();
}
