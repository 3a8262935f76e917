#!/bin/sh
# data/fetch.sh and data/download.sh, with files of this machine in the place of a server's.
. test/frame.sh
fetch=$PWD/data/fetch.sh
download=$PWD/data/download.sh

# the address of the folder that a test runs in
this_folder() {
    printf 'file://%s' "$PWD" | sed 's/ /%20/g'
}

# fails PATTERN COMMAND...: exit code 1, and the last line matches
fails() {
    pattern=$1
    shift
    code=0
    "$@" >said 2>&1 || code=$?
    cat said
    [ "$code" -eq 1 ]
    tail -n 1 said | grep -Eq -- "$pattern"
}

test_a_file_is_fetched_whole_and_its_checksum_noted() {
    seq 1 100000 >there
    "$fetch" "$(this_folder)/there" "sub/here" >said
    cmp there sub/here
    grep -q "^sub/here: $(wc -c <there) bytes from file:" said
    [ ! -e sub/here.part ]
    (cd sub && sha256sum -c --quiet SHA256SUMS)
    "$fetch" "$(this_folder)/there" sub/here | grep -q 'is there, .* SHA-256 as noted'
}

test_an_interrupted_file_goes_on_where_it_stopped() {
    seq 1 100000 >there
    head -c 300000 there >here.part
    printf 'X' | dd of=here.part conv=notrunc 2>/dev/null # shows that it is not fetched again
    "$fetch" "$(this_folder)/there" here
    [ "$(head -c 1 here)" = X ]
    tail -c +2 there >expected
    tail -c +2 here | cmp - expected
    cp there whole.part # complete, but for its name
    "$fetch" "$(this_folder)/there" whole
    cmp there whole
    cat there there >long.part # of something else
    "$fetch" "$(this_folder)/there" long
    cmp there long
}

test_other_bytes_than_noted_are_refused() {
    seq 1 1000 >there
    "$fetch" "$(this_folder)/there" here
    echo more >>here
    fails 'here: is not what was fetched' "$fetch" "$(this_folder)/there" here
    rm here
    seq 2 1001 >there
    fails 'here: SHA-256 is .*, not .*; what came was removed' "$fetch" "$(this_folder)/there" here
    [ ! -e here ]
    [ ! -e here.part ]
}

test_a_server_that_gives_no_rest_of_a_file_gives_all_of_it() {
    seq 1 1000 >there
    printf 'X' >here.part
    mkdir bin
    cat >bin/curl <<'END'
#!/bin/sh
case "$*" in
*-sSfLI*) printf 'HTTP/1.0 200 OK\r\nContent-Length: %s\r\n\r\n' "$(wc -c <there)" ;;
*--continue-at*) exit 33 ;; # as curl does of such a server
*)
    while [ "$1" != --output ]; do shift; done
    cp there "$2"
    ;;
esac
END
    chmod +x bin/curl
    PATH="$PWD/bin:$PATH" "$fetch" http://host/there here
    cmp there here
}

test_names_may_have_spaces_and_are_of_files() {
    seq 1 1000 >there
    "$fetch" "$(this_folder)/there" 'a new file'
    "$fetch" "$(this_folder)/there" 'a new file' | grep -q 'is there, .* SHA-256 as noted'
    mkdir sub
    fails 'sub: is a folder' "$fetch" "$(this_folder)/there" sub
}

# A curl that answers as Hugging Face does: a redirection that names size and SHA-256, then the store's own answer.
answers_like_hugging_face() { # answers_like_hugging_face SHA256
    mkdir -p bin
    cat >bin/curl <<END
#!/bin/sh
case "\$*" in
*-sSfLI*)
    printf 'HTTP/2 302\\r\\nx-linked-size: %s\\r\\nx-linked-etag: "%s"\\r\\ncontent-length: 1100\\r\\n\\r\\n' $(wc -c <there) $1
    printf 'HTTP/2 200\\r\\ncontent-length: %s\\r\\netag: "another"\\r\\n\\r\\n' $(wc -c <there)
    ;;
*)
    while [ "\$1" != --output ]; do shift; done
    cp "$PWD/there" "\$2"
    ;;
esac
END
    chmod +x bin/curl
}

test_the_checksum_of_the_server_is_kept_to() {
    seq 1 1000 >there
    answers_like_hugging_face "$(sha256sum there | cut -d ' ' -f 1)"
    PATH="$PWD/bin:$PATH" "$fetch" https://host/there here >said
    grep -q '^here: 3893 bytes from https://host/there$' said
    grep -q ', as the server says$' said
    cmp there here
    answers_like_hugging_face "$(seq 2 1000 | sha256sum | cut -d ' ' -f 1)"
    PATH="$PWD/bin:$PATH" fails 'other: SHA-256 is .*, not .*; what came was removed' "$fetch" https://host/there other
    [ ! -e other ]
    [ ! -e other.part ]
    answers_like_hugging_face 0123456789012345678901234567890123456789 # a small file's: of Git
    PATH="$PWD/bin:$PATH" "$fetch" https://host/there small | grep -q 'noted; the server says none'
}

test_what_is_not_there_is_told() {
    fails 'nothing: cannot be reached; check the network and the address .curl: .37. ' "$fetch" "$(this_folder)/nothing" here
    [ "$(wc -l <said)" -eq 1 ]
    mkdir bin
    cat >bin/curl <<'END'
#!/bin/sh
case "$*" in
*-sSfLI*) printf 'HTTP/1.0 200 OK\r\nContent-Length: 10\r\n\r\n' ;;
*) echo 'curl: (56) the line is dead' >&2 && exit 56 ;;
esac
END
    chmod +x bin/curl
    PATH="$PWD/bin:$PATH" fails 'interrupted .curl: .56. the line is dead.; the same command goes on from here.part' \
        "$fetch" http://host/there here
    [ "$(grep -c '^fetch.sh: ' said)" -eq 1 ]
    not grep -q '^curl' said
    [ ! -e here ]
    [ ! -e here.part ]
    fails 'usage' "$fetch" only-one
}

test_the_list_fetches_nothing_and_names_are_checked() {
    export FLASHGPT_DOWNLOADS="$PWD/downloads" FLASHGPT_MIRROR="$(this_folder)/nowhere"
    "$download" >said
    for name in tinyshakespeare tinystories fineweb hellaswag gpt2 gpt2-vocabulary; do
        grep -Eq "^$name  *(about )?[0-9.]+ (bytes|MB|GB) " said
    done
    [ ! -e downloads ]
    fails 'gpt3: not in the list' "$download" gpt3
    fails 'fineweb:x: not in the list' "$download" fineweb:x
    fails 'fineweb:104: not in the list' "$download" fineweb:104
    fails 'cannot be reached' "$download" hellaswag
}

test_every_name_takes_its_files_from_a_mirror() {
    hub=mirror/huggingface.co
    raw=mirror/raw.githubusercontent.com
    mkdir -p $raw/karpathy/char-rnn/master/data/tinyshakespeare $raw/rowanz/hellaswag/master/data \
        $hub/openai-community/gpt2/resolve/main $hub/datasets/kjj0/fineweb10B-gpt2/resolve/main \
        $hub/datasets/roneneldan/TinyStories/resolve/main
    echo a >$raw/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    echo b >$raw/rowanz/hellaswag/master/data/hellaswag_val.jsonl
    for file in config.json vocab.json merges.txt model.safetensors; do
        echo $file >$hub/openai-community/gpt2/resolve/main/$file
    done
    for file in val_000000 train_000001 train_000002; do
        echo $file >$hub/datasets/kjj0/fineweb10B-gpt2/resolve/main/fineweb_$file.bin
    done
    for part in train valid; do
        echo $part >$hub/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-$part.txt
    done
    export FLASHGPT_DOWNLOADS=downloads FLASHGPT_MIRROR="$(this_folder)/mirror"
    "$download" tinyshakespeare hellaswag gpt2 gpt2-vocabulary fineweb:2 tinystories >said
    [ "$(grep -c '^next: ' said)" -eq 6 ]
    [ "$(find downloads -type f ! -name SHA256SUMS | wc -l)" -eq 13 ]
    [ "$(cat downloads/fineweb/fineweb_train_000002.bin)" = train_000002 ]
}

if ! command -v curl >/dev/null; then
    skip "needs curl"
fi
for test in $(sed -n 's/^\(test_[a-z0-9_]*\)() {$/\1/p' "$0"); do
    run_test "$test"
done
finish
