#!/bin/sh
# build/prepare and train_gpt with byte-pair encoding, from outside.
. test/frame.sh
golden=$PWD/test/golden/tokenizer

# decode SHARD...: their text, with the golden vocabulary
decode() {
    "$prepare" --decode --tokenizer "$golden" "$@"
}

# 3.3 MB with words of all kinds, some longer than what is encoded at once
long_text() {
    for i in $(seq 1 300); do
        cat "$golden/text.txt"
    done
    head -c 1500000 /dev/zero | tr '\0' 'x'
    seq 1 100000
}

test_tokens_are_those_of_the_vocabulary() {
    printf 'the the' >text
    "$prepare" --out-dir out --val-fraction 0 --tokenizer "$golden" text
    [ "$(tokens out/train_000000.bin | xargs)" = "639 83 266 277" ] # "t", "he", " the"
}

test_every_form_of_a_vocabulary_gives_the_same_shards() {
    cp "$golden/text.txt" text
    "$prepare" --out-dir out --val-fraction 0 --tokenizer "$golden" text
    for form in vocab.json tokenizer.json ranks.tiktoken; do
        "$prepare" --out-dir out-$form --val-fraction 0 --tokenizer "$golden/$form" text
        cmp out/train_000000.bin out-$form/train_000000.bin
    done
}

test_any_number_of_threads_gives_the_same_shards() {
    long_text >text
    cp -r "$golden" more
    for threads in 1 2 7; do
        "$prepare" --out-dir out$threads --threads $threads --tokenizer "$golden" text more
    done
    diff -r out1 out2
    diff -r out1 out7
}

test_text_comes_back_from_shards() {
    long_text >text
    "$prepare" --out-dir out --shard-tokens 1000000 --tokenizer "$golden" text
    decode out/train_*.bin out/val_*.bin | sed 's/<|endoftext|>//' | cmp - text
    head -c 100000 "$prepare" | tr '\0' '\1' >noise
    "$prepare" --out-dir noisy --val-fraction 0 --tokenizer "$golden" noise
    decode noisy/train_000000.bin >decoded
    printf '<|endoftext|>' | cat - noise | cmp - decoded
    printf 'bytes' >text
    "$prepare" --out-dir plain --val-fraction 0 text
    [ "$("$prepare" --decode plain/train_000000.bin)" = '<|endoftext|>bytes' ]
}

test_decoding_finds_the_tokenizer_that_made_the_shards() {
    "$prepare" --out-dir learnt --train-bpe 640 "$golden/text.txt"
    "$prepare" --out-dir given --tokenizer "$golden" "$golden/text.txt"
    printf 'bytes' >text
    "$prepare" --out-dir plain --val-fraction 0 text
    { "$prepare" --decode --tokenizer learnt learnt/train_000000.bin && decode given/val_000000.bin; } >expected
    mv learnt moved # beside the shards is where it is looked for first
    "$prepare" --decode moved/train_000000.bin given/val_000000.bin | cmp - expected
    "$prepare" --decode plain/train_000000.bin given/train_000000.bin >both
    { printf '<|endoftext|>bytes' && decode given/train_000000.bin; } | cmp - both
    (cd plain && [ "$("$prepare" --decode train_000000.bin)" = '<|endoftext|>bytes' ])
    "$prepare" --out-dir moved --overwrite --val-fraction 0 text # the vocabulary there made other shards
    [ "$("$prepare" --decode moved/train_000000.bin)" = '<|endoftext|>bytes' ]
    mkdir alone
    cp given/val_000000.bin alone
    cd alone
    code=0
    "$prepare" --decode val_000000.bin >text 2>err || code=$?
    [ "$code" -eq 1 ]
    grep -Eq 'the token [0-9]+ is none of the 257 of --tokenizer bytes; give the one that made the shard$' err
    sed 's/"tokenizer": "[^"]*"/"tokenizer": "gone"/' ../given/manifest.json >manifest.json
    "$prepare" --decode val_000000.bin 2>err && exit 1
    grep -q "^prepare: val_000000.bin: its tokenizer cannot be read (.*gone.*); give --tokenizer$" err
}

test_documents_in_a_file_are_split_at_the_end_of_text() {
    mark='<|endoftext|>'
    printf '%s' "${mark}one$mark${mark}two <|endoftext$mark" >text
    "$prepare" --out-dir out --val-fraction 0 --split-documents --tokenizer "$golden" text
    [ "$(decode out/train_000000.bin)" = "${mark}one${mark}two <|endoftext" ]
    grep -q '"documents": 2' out/manifest.json
    "$prepare" --out-dir whole --val-fraction 0 --tokenizer "$golden" text
    [ "$(tokens whole/train_000000.bin | grep -c '^639$')" -eq 1 ]
    for i in $(seq 100000 130000); do # 2 MB: marks lie across the ends of what is read at once
        printf '%s' "$mark$i some words to go with it. Up to here it is a document"
    done >text
    "$prepare" --out-dir many --overwrite --val-fraction 0 --split-documents --tokenizer "$golden" text
    decode many/train_000000.bin | cmp - text
    [ "$(tokens many/train_000000.bin | grep -c '^639$')" -eq 30001 ]
}

test_the_manifest_has_counts_and_checksums() {
    mkdir in
    printf 'the first text' >in/a
    printf 'the second' >in/b
    "$prepare" --out-dir out --val-fraction 0 --tokenizer "$golden" in
    [ "$(tr -d ' \n' <out/manifest.json | sed 's/"xxh64":"[0-9a-f]\{16\}"/SUM/; s/"tokenizer":"[^"]*"/NAME/; s/"run":"[0-9a-f]\{16\}"/RUN/')" = \
        '{RUN,NAME,"vocab_size":640,"end_of_text":639,"train":{"documents":2,"text_bytes":24,"tokens":16,"shards":[{"file":"train_000000.bin","tokens":16,SUM}]},"val":{"documents":0,"text_bytes":0,"tokens":0,"shards":[]}}' ]
    [ "$(tokens out/train_000000.bin | wc -l)" -eq 16 ]
    if command -v xxh64sum; then
        grep -q "\"xxh64\": \"$(xxh64sum out/train_000000.bin | cut -d ' ' -f 1)\"" out/manifest.json
    fi
}

test_a_vocabulary_is_trained_and_its_files_lie_beside_the_shards() {
    "$prepare" --out-dir out --val-fraction 0 --train-bpe 640 "$golden/text.txt"
    cmp out/vocab.json "$golden/vocab.json"
    cmp out/merges.txt "$golden/merges.txt"
    "$prepare" --out-dir given --val-fraction 0 --tokenizer "$golden" "$golden/text.txt"
    cmp out/train_000000.bin given/train_000000.bin
    "$prepare" --out-dir again --val-fraction 0 --tokenizer out/tokenizer.json "$golden/text.txt"
    cmp out/train_000000.bin again/train_000000.bin
    [ "$(ls out | xargs)" = "manifest.json merges.txt tokenizer.json train_000000.bin vocab.json" ]
}

test_training_reads_listed_files_and_leaves_out_those_for_validation() {
    for i in 1 2 3 4 5 6 7 8; do
        echo "aaaa bbbb aaaa bbbb" >text$i
    done
    tr 'ab' 'xy' <text1 >text5 # the one that goes to validation
    ls text* | "$prepare" --out-dir out --val-fraction 0.125 --train-bpe 300 --files-from - 2>notes
    "$prepare" --decode --tokenizer out out/val_000000.bin | grep -q 'xxxx yyyy'
    grep -q '"aaaa"' out/vocab.json
    not grep -q '"xx' out/vocab.json
    grep -q 'note: the text gives a vocabulary of only 26[0-9] tokens' notes
}

test_a_model_is_trained_on_it_and_samples_text() {
    for i in 1 2 3 4 5 6 7 8; do
        cat "$golden/text.txt"
    done >text
    "$prepare" --out-dir out --train-bpe 400 text
    "$build/train_gpt" --device cpu --model tiny --layers 1 --seq-len 32 --micro-batch 4 --vocab-size 400 --steps 1 \
        --train-data 'out/train_*.bin' --tokenizer out --sample-every 1 --sample-tokens 4 --sample-prompt 'Falsches Üben' \
        --run-dir run
    grep -q '"text":"Falsches Üben' run/log.jsonl
}

test_what_does_not_fit_is_refused() {
    echo text >../text
    set -- --model tiny --vocab-size 300 --steps 1 --train-data synthetic --dry-run --tokenizer
    refused "--tokenizer $golden has 640 tokens, more than --vocab-size 300" "$build/train_gpt" "$@" "$golden"
    refused "--tokenizer: 'words' is not known; use bytes" "$build/train_gpt" "$@" words
    refused "--train-bpe: '256' is no whole number from 257 to 65536" "$prepare" --train-bpe 256 ../text
    refused "--train-bpe: '65537' is no whole number from 257 to 65536" "$prepare" --train-bpe 65537 ../text
    refused "--train-bpe makes a tokenizer: --tokenizer bytes cannot be had as well" \
        "$prepare" --train-bpe 300 --tokenizer bytes ../text
    refused "--threads: '0' is no whole number from 1 to 256" "$prepare" --threads 0 ../text
    refused "no files given; see --help" "$prepare" --decode
    refused "--decode missing: there is no such file; give shards" "$prepare" --decode missing
    refused "this folder has no vocab.json" "$prepare" --tokenizer . ../text
    { cat "$golden/ranks.tiktoken" && awk 'BEGIN { for (i = 639; i < 65540; i++) print "YWFh", i }'; } >ranks
    refused "tokens 639 and 640 are the same bytes" "$prepare" --tokenizer ranks ../text
}

# All 65536 pairs of bytes as tokens, with the bytes themselves.
test_a_vocabulary_that_shards_cannot_hold_is_refused() {
    awk 'BEGIN {
        digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
        for (a = 0; a < 256; a++) {
            high = substr(digits, int(a / 4) + 1, 1)
            print high substr(digits, a % 4 * 16 + 1, 1) "==", a
            for (b = 0; b < 256; b++)
                print high substr(digits, a % 4 * 16 + int(b / 16) + 1, 1) substr(digits, b % 16 * 4 + 1, 1) "=", \
                    256 + a * 256 + b
        }
    }' >ranks
    refused "--tokenizer ranks has 65793 tokens; a shard can hold no more than 65536" \
        "$prepare" --tokenizer ranks "$golden/text.txt"
}

for test in $(sed -n 's/^\(test_[a-z0-9_]*\)() {$/\1/p' "$0"); do
    run_test "$test"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
