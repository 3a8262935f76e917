#!/bin/sh
# build/prepare from outside: what it writes, what it says, what it refuses.
. test/frame.sh

# refuses MESSAGE ARGUMENT...: prepare with these arguments
refuses() {
    message=$1
    shift
    refused "$message" "$prepare" "$@"
}

# letters COUNT CHARACTER
letters() {
    head -c "$1" /dev/zero | tr '\0' "$2"
}

test_documents_are_end_of_text_then_bytes_in_the_order_of_names() {
    mkdir -p in/sub
    printf 'hi\n' >in/a
    printf '\303\251' >in/b
    printf 'z' >in/sub/c
    "$prepare" --out-dir out --val-fraction 0 in
    [ "$(tokens out/train_000000.bin | xargs)" = "256 104 105 10 256 195 169 256 122" ]
    [ "$(ls out | xargs)" = "manifest.json train_000000.bin" ]
}

test_the_header_is_magic_version_count_and_zeros() {
    printf 'hello' >a
    "$prepare" --out-dir out --val-fraction 0 a
    [ "$(head -c 1024 out/train_000000.bin | od -An -v -t d4 -w4 | xargs)" = \
        "20240520 1 6 $(yes 0 | head -n 253 | xargs)" ]
    [ "$(wc -c <out/train_000000.bin)" -eq $((1024 + 12)) ]
}

test_text_over_several_pieces_comes_out_as_it_went_in() {
    seq 1 500000 >numbers # 3.4 MB
    "$prepare" --out-dir out --val-fraction 0 numbers
    tail -c +1025 out/train_000000.bin | od -An -v -t u1 -w2 | awk '{ print $1 }' >got # the low bytes
    { echo 0 && od -An -v -t u1 -w1 numbers | tr -d ' '; } >expected                 # 256 has a low byte of 0
    cmp got expected
}

test_whole_files_go_to_validation_until_its_share_is_reached() {
    mkdir in
    for i in $(seq 100 199); do
        letters 1000 x >in/$i
    done
    "$prepare" --out-dir out --val-fraction 0.2 in
    [ "$(tokens out/val_*.bin | grep -c '^256$')" -eq 20 ]
    [ "$(tokens out/val_*.bin | wc -l)" -eq $((20 * 1001)) ]
    [ "$(tokens out/train_*.bin | wc -l)" -eq $((80 * 1001)) ]
}

test_the_split_is_the_same_every_time() {
    mkdir in
    for i in $(seq 100 150); do
        letters $((i * i % 977 + 1)) x >in/$i
    done
    "$prepare" --out-dir one in
    "$prepare" --out-dir two in
    [ -s one/val_000000.bin ]
    diff -r one two
}

test_a_single_file_is_cut_after_a_line() {
    for i in $(seq 100 199); do
        echo "line $i"
    done >text
    "$prepare" --out-dir out --val-fraction 0.25 text
    [ "$(tokens out/val_000000.bin | head -n 9 | xargs)" = "256 108 105 110 101 32 49 55 54" ] # line 176
    [ "$(tokens out/*.bin | wc -l)" -eq $((900 + 2)) ]
}

test_a_folder_or_list_of_one_file_is_cut_as_the_file_itself() {
    mkdir in
    letters 1000 x >in/text
    "$prepare" --out-dir one in/text
    "$prepare" --out-dir folder in
    echo in/text | "$prepare" --out-dir list --files-from -
    diff -r one folder
    diff -r one list
    [ "$(tokens folder/val_000000.bin | wc -l)" -eq 101 ]
}

test_a_single_file_of_one_line_is_cut_at_the_share() {
    letters 1000 x >text
    "$prepare" --out-dir out --val-fraction 0.25 text
    [ "$(tokens out/train_000000.bin | wc -l)" -eq 751 ]
    [ "$(tokens out/val_000000.bin | wc -l)" -eq 251 ]
}

test_where_no_file_is_small_enough_the_last_one_with_text_is_cut() {
    mkdir in
    for i in 1 2 3 4 5; do
        seq $((i * 100)) $((i * 100 + 99)) >in/$i # 400 bytes each
    done
    "$prepare" --out-dir out in >summary
    [ "$(xargs <summary)" = \
        "train 5 files 1809 tokens 1 shard out/train_*.bin val 1 file 197 tokens 1 shard out/val_*.bin" ]
    "$prepare" --decode out/val_000000.bin >val
    { printf '<|endoftext|>' && seq 551 599; } | cmp - val
    "$prepare" --decode out/train_000000.bin | sed 's/<|endoftext|>//' >train # none of it is learnt from
    { cat in/1 in/2 in/3 in/4 && seq 500 550; } | cmp - train
    printf 'a\0b' >in/6
    : >in/7
    "$prepare" --out-dir with in 2>notes
    cmp out/val_000000.bin with/val_000000.bin # what has no text does not count
    cmp out/train_000000.bin with/train_000000.bin
    [ "$(wc -l <notes)" -eq 3 ]
    echo standard | "$prepare" --out-dir piped - in/1
    "$prepare" --decode piped/val_000000.bin | tail -n 1 | grep -qx 199
}

test_a_long_line_is_cut_between_words_or_characters() {
    seq -s ' ' 100 399 >words # one line; its share of 1080 bytes is reached in 370
    "$prepare" --out-dir words-out words
    [ "$("$prepare" --decode words-out/val_000000.bin)" = "<|endoftext|>$(seq -s ' ' 371 399)" ]
    printf 'x%s' "$(for i in $(seq 500); do printf '\346\274\242'; done)" >characters
    "$prepare" --out-dir characters-out characters
    for side in train val; do
        "$prepare" --decode characters-out/${side}_000000.bin | iconv -f UTF-8 -t UTF-8 >"$side"
    done
    cat train val | sed 's/<|endoftext|>//g' | cmp - characters
    { letters 885 a && printf '<|endoftext|>' && letters 95 b; } >documents
    "$prepare" --out-dir documents-out --split-documents documents
    [ "$("$prepare" --decode documents-out/train_000000.bin)" = \
        "<|endoftext|>$(letters 885 a)<|endoftext|>$(letters 95 b)" ]
    mkdir small
    printf 'hello world\n' >small/a
    printf '<|endoftext|>' >small/b
    printf x >small/c
    "$prepare" --out-dir small-out --split-documents --val-fraction 0.5 small # no place before the beginning
}

test_text_of_long_lines_has_its_share_too() {
    { letters 950 x && echo && letters 40 y && echo; } >text # the line in which the share is reached ends late
    "$prepare" --out-dir out text
    [ "$(tokens out/val_000000.bin | wc -l)" -eq 101 ]
    { seq 100 299 && letters 119 y && echo; } >text # before the line it is a little more than the share: nothing is torn
    "$prepare" --out-dir whole text
    [ "$("$prepare" --decode whole/val_000000.bin)" = "<|endoftext|>$(letters 119 y)" ]
    printf a >byte
    "$prepare" --out-dir one byte 2>notes
    [ "$(tokens one/train_000000.bin | xargs)" = "256 97" ]
    [ ! -e one/val_000000.bin ]
}

test_text_that_cannot_be_shared_out_is_noted() {
    echo text | "$prepare" --out-dir out - 2>notes
    grep -q '^note: nothing fell to validation: .*--val-fraction$' notes
    [ ! -e out/val_000000.bin ]
}

test_full_shards_are_followed_by_new_ones_and_the_last_takes_the_rest() {
    letters 250 x >text
    "$prepare" --out-dir out --val-fraction 0 --shard-tokens 100 text
    [ "$(ls out | xargs)" = "manifest.json train_000000.bin train_000001.bin" ]
    [ "$(tokens out/train_000000.bin | wc -l)" -eq 100 ]
    [ "$(tokens out/train_000001.bin | wc -l)" -eq 151 ]
    letters 500000 y >text
    "$prepare" --out-dir big --val-fraction 0 --shard-tokens 200000 text
    [ "$(tokens big/train_000000.bin | wc -l)" -eq 196608 ] # three full buffers of 65536
    [ "$(tokens big/train_*.bin | wc -l)" -eq 500001 ]
}

test_binary_and_empty_files_are_skipped_with_a_note() {
    mkdir in
    printf 'a\0b' >in/binary
    : >in/empty
    printf 'text' >in/text
    "$prepare" --out-dir out --val-fraction 0 in 2>notes
    grep -qF 'note: in/binary: skipped, it is binary' notes
    grep -qF 'note: in/empty: skipped, it is empty' notes
    [ "$(tokens out/train_000000.bin | wc -l)" -eq 5 ]
}

test_hidden_files_links_to_folders_and_broken_links_are_left_out_of_folders() {
    mkdir -p in/.git
    printf 'text' >in/text
    printf 'hidden' >in/.hidden
    printf 'hidden' >in/.git/config
    ln -s . in/round
    ln -s nowhere in/broken
    ln -s text in/zlink
    "$prepare" --out-dir out --val-fraction 0 in
    [ "$(tokens out/train_000000.bin | wc -l)" -eq 10 ] # text and its link
    "$prepare" --out-dir out2 --val-fraction 0 in/.hidden # unless asked for
    [ "$(tokens out2/train_000000.bin | wc -l)" -eq 7 ]
}

test_paths_are_read_from_a_file_or_standard_input() {
    printf 'one' >'a file'
    mkdir in
    printf 'two' >in/b
    printf 'a file\n\nin' >list
    "$prepare" --out-dir one --val-fraction 0 --files-from list
    "$prepare" --out-dir two --val-fraction 0 --files-from - <list
    [ "$(tokens one/train_000000.bin | xargs)" = "256 111 110 101 256 116 119 111" ]
    diff -r one two
    printf 'a file\r\n\r\nin\r\n' >list
    "$prepare" --out-dir three --val-fraction 0 --files-from list
    diff -r one three
}

test_shards_are_not_written_over_unless_asked() {
    letters 300 x >long
    letters 50 y >short
    "$prepare" --out-dir out --val-fraction 0 --shard-tokens 100 long
    cp -r out before
    code=0
    "$prepare" --out-dir out short >output 2>&1 || code=$?
    [ "$code" -eq 1 ]
    grep -qF 'out/train_000000.bin: is there already; choose another --out-dir or give --overwrite' output
    diff -r before out
    grep -q '"tokens": 301,' out/manifest.json
    "$prepare" --out-dir out --val-fraction 0 --overwrite short
    [ "$(ls out | xargs)" = "manifest.json train_000000.bin" ]
    [ "$(tokens out/train_000000.bin | wc -l)" -eq 51 ]
    grep -q '"tokens": 51,' out/manifest.json
}

test_one_run_at_a_time_writes_a_folder() {
    seq 1 40000 >numbers # more than a pipe holds
    echo other >other
    mkfifo pipe
    "$prepare" --out-dir out --val-fraction 0 - <pipe &
    first=$!
    exec 3>pipe
    cat numbers >&3 # it has the folder once it reads
    refused "out: another run writes shards there" "$prepare" --out-dir out --overwrite other
    exec 3>&-
    wait $first
    "$prepare" --out-dir whole --val-fraction 0 numbers
    cmp whole/train_000000.bin out/train_000000.bin
    "$prepare" --out-dir out --overwrite other # the lock went with the process
}

test_a_run_that_fails_leaves_older_shards_and_no_temporary_ones() {
    letters 300 x >text
    "$prepare" --out-dir out text
    cp -r out before
    code=0
    "$prepare" --out-dir out --overwrite --shard-tokens 10 text missing >output 2>&1 || code=$?
    [ "$code" -eq 1 ]
    grep -qF 'prepare: missing: there is no such file or folder' output
    diff -r before out
}

test_the_summary_counts_files_tokens_and_shards() {
    mkdir in
    letters 100 x >in/a
    letters 9 x >in/b
    "$prepare" --out-dir out in >summary
    [ "$(sed -n 1p summary | xargs)" = "train 1 file 101 tokens 1 shard out/train_*.bin" ]
    [ "$(sed -n 2p summary | xargs)" = "val 1 file 10 tokens 1 shard out/val_*.bin" ]
    letters 9 x >in/c
    "$prepare" --out-dir out --overwrite --shard-tokens 50 in >summary
    [ "$(sed -n 1p summary | xargs)" = "train 2 files 111 tokens 2 shards out/train_*.bin" ]
}

test_standard_input_is_a_document() {
    printf 'hi' | "$prepare" --out-dir out --val-fraction 0 -
    [ "$(tokens out/train_000000.bin | xargs)" = "256 104 105" ]
    printf 'one' >a
    printf 'two' | "$prepare" --out-dir two --val-fraction 0 a -
    [ "$(tokens two/train_000000.bin | xargs)" = "256 111 110 101 256 116 119 111" ]
    mkdir empty
    cd empty
    refuses "-: standard input can be read once only" - - </dev/null
    refuses "-: standard input can be read once only" --files-from - - </dev/null
    refuses "--train-bpe reads its text twice" --train-bpe 300 - </dev/null
}

test_a_field_of_json_lines_is_a_document() {
    printf '{"id": 1, "text": "a\\n\\u00e9"}\n\n{"text": "", "id": 2}\r\n  {"id": {"text": "no"}, "text": "<b>"}' >lines
    "$prepare" --out-dir out --val-fraction 0 --field text lines
    [ "$(tokens out/train_000000.bin | xargs)" = "256 97 10 195 169 256 60 98 62" ]
    "$prepare" --out-dir piped --val-fraction 0 --field text - <lines
    cmp out/train_000000.bin piped/train_000000.bin
    for i in $(seq 1 100); do
        printf '{"other": "%s", "content": "%s"}\n' $i "$(letters $i x)"
    done >lines
    "$prepare" --out-dir split --val-fraction 0.2 --field content lines # cut after a line: no document is on both sides
    [ "$(tokens split/train_*.bin split/val_*.bin | grep -c '^256$')" -eq 100 ]
    [ "$(tokens split/val_*.bin | head -n 1)" -eq 256 ]
    "$prepare" --out-dir shared --val-fraction 0.2 --field content - <lines
    [ "$(tokens shared/train_*.bin shared/val_*.bin | wc -l)" -eq $((5050 + 100)) ]
    val=$(tokens shared/val_*.bin | wc -l)
    [ "$val" -ge 950 ]
    [ "$val" -le 1150 ]
}

test_a_file_of_json_lines_is_cut_between_lines_where_the_last_has_more_than_the_share() {
    for end in '\n' ''; do
        printf '{"text": "a"}\n{"text": "b"}\n{"text": "%s"}'"$end" "$(letters 40000 x)" >lines
        "$prepare" --out-dir out --overwrite --field text lines
        [ "$(tokens out/train_000000.bin | xargs)" = "256 97 256 98" ]
        [ "$(tokens out/val_000000.bin | wc -l)" -eq 40001 ]
        printf '{"text": "only one"}'"$end" >line
        "$prepare" --out-dir one --overwrite --field text line
        [ "$(ls one | xargs)" = "manifest.json train_000000.bin" ]
        [ "$(tokens one/train_000000.bin | wc -l)" -eq 9 ]
    done
}

test_wrong_json_lines_are_named_by_file_and_line() {
    printf '{"text": "a"}\n{"text": 3}\n' >../lines
    refuses '../lines:2: no text "text" in it: --field names the member' --val-fraction 0 --field text ../lines
    refuses '../lines:1: no text "body" in it' --val-fraction 0 --field body ../lines
    printf '{"text": "a"}\n{"text": "b"\n' >../lines
    refuses '../lines:2: ' --val-fraction 0 --field text ../lines
    printf '{"text": "a", "text": "b"}\n' >../lines
    refuses '../lines:1: ' --val-fraction 0 --field text ../lines
    printf '{"text": "a\377"}\n' >../lines
    refuses '../lines:1: ' --val-fraction 0 --field text ../lines
    { printf '{"text": "' && letters 67108900 x; } >../lines
    refuses '../lines:1: a line of more than 64 MiB' --val-fraction 0 --field text ../lines
}

# killed_and_resumed ARGUMENT...: kills prepare with these arguments again and again until it ends by itself
killed_and_resumed() {
    kills=0
    delay=0.02
    until timeout -s KILL $delay "$prepare" --resume "$@"; do
        kills=$((kills + 1))
        [ "$kills" -lt 200 ]
        delay=$(echo "$delay" | awk '{ print $1 * 1.15 }')
    done
    [ "$kills" -gt 0 ]
}

test_a_run_that_is_killed_goes_on_to_the_same_bytes() {
    mkdir in
    for i in 1 2 3 4 5 6; do
        seq $((i * 1000)) $((i * 140000)) >in/$i
        seq 1 $((i * 60000)) | sed 's/.*/{"text": "&", "n": 0}/' >>lines
    done
    for form in "in" "in/6" "in/5 in/6" "--field text lines"; do
        "$prepare" --out-dir whole --threads 1 --shard-tokens 200000 $form
        killed_and_resumed --out-dir parts --threads 1 --shard-tokens 200000 $form
        diff -r whole parts
        rm -r whole parts
    done
}

test_a_killed_run_has_done_what_it_saved() {
    seq 1 2000000 >numbers # 15 MB
    "$prepare" --out-dir whole --threads 1 --shard-tokens 1000000 - <numbers
    mkfifo pipe
    "$prepare" --out-dir parts --threads 1 --shard-tokens 1000000 - <pipe &
    { head -c 12000000 numbers && until [ -e parts/prepare.progress ]; do sleep 0.01; done && kill -9 $!; } >pipe
    wait $! || true
    [ -e parts/train_000000.bin.tmp ]
    code=0
    "$prepare" --out-dir parts --shard-tokens 1000000 - </dev/null >output 2>&1 || code=$?
    [ "$code" -eq 1 ]
    grep -qF 'parts: an interrupted run is in it; --resume goes on with it, --overwrite begins anew' output
    code=0
    "$prepare" --out-dir parts --resume --shard-tokens 999999 - <numbers >output 2>&1 || code=$?
    [ "$code" -eq 1 ]
    grep -qF 'had other options or inputs' output
    code=0
    head -c 100 numbers | "$prepare" --out-dir parts --resume --shard-tokens 1000000 - >output 2>&1 || code=$?
    [ "$code" -eq 1 ]
    grep -qF -- '-: ends before the place where the interrupted run stood; give the same input; --resume goes on' output
    mv parts/train_000000.bin.tmp parts/train_000000.bin # as one that was killed while it gave the shards their names
    "$prepare" --out-dir parts --resume --shard-tokens 1000000 - <numbers
    diff -r whole parts
    cp -r whole again
    head -c 300 numbers >again/prepare.progress
    for bytes in 0 10 300; do
        head -c $bytes numbers >again/prepare.progress
        code=0
        "$prepare" --out-dir again --resume --overwrite numbers >output 2>&1 || code=$?
        [ "$code" -eq 1 ]
        [ "$(wc -l <output)" -eq 1 ]
        grep -q '^prepare: again/prepare.progress: .*begin anew with --overwrite$' output
    done
    "$prepare" --out-dir again --overwrite --shard-tokens 1000000 - <numbers
    diff -r whole again
}

test_a_run_that_could_not_name_its_shards_has_only_that_left() {
    letters 3000 x >text
    "$prepare" --out-dir whole text
    mkdir -p out/train_000000.bin # in the way
    code=0
    "$prepare" --out-dir out --overwrite text >output 2>&1 || code=$?
    [ "$code" -eq 1 ]
    grep -q 'cannot rename to out/train_000000.bin: .*; --resume goes on where it stopped' output
    rmdir out/train_000000.bin
    "$prepare" --out-dir out --resume text
    diff -r whole out
    "$prepare" --out-dir out --resume text >output # killed at its last moment, it would have nothing left to do
    [ "$(cat output)" = "out: complete already" ]
    diff -r whole out
    echo more >>text
    code=0
    "$prepare" --out-dir out --resume text >output 2>&1 || code=$?
    [ "$code" -eq 1 ]
    grep -q 'out/train_000000.bin: is there already' output
}

test_how_far_it_is_shows_on_a_terminal_only() {
    seq 1 600000 >numbers
    "$prepare" --out-dir out numbers 2>notes
    [ ! -s notes ]
    if command -v script >/dev/null; then
        script -qec "'$prepare' --out-dir terminal --threads 1 numbers" /dev/null </dev/null >seen
        grep -q 'encoding .*% .* of .* MB/s  ETA' seen
    fi
}

test_help_explains_every_option_and_succeeds() {
    "$prepare" --help >help
    for option in out-dir tokenizer val-fraction shard-tokens files-from field overwrite resume; do
        grep -q -- "--$option" help
    done
}

test_bad_options_are_refused_by_name() {
    echo text >../text
    refuses "--frobnicate: unknown option; see --help" --frobnicate ../text
    refuses "-y: unknown option; see --help" -yz ../text
    refuses "--out-dir: a value is missing; see --help" ../text --out-dir
    refuses "--val-fraction: 'lots' is no number from 0 to 0.5" --val-fraction lots ../text
    refuses "--val-fraction: '0.6' is no number from 0 to 0.5" --val-fraction=0.6 ../text
    refuses "--val-fraction: 'nan' is no number from 0 to 0.5" --val-fraction nan ../text
    refuses "--shard-tokens: '0' is no whole number from 1 to 2000000000" --shard-tokens 0 ../text
    refuses "--shard-tokens: '1e6' is no whole number" --shard-tokens 1e6 ../text
    refuses "--shard-tokens: '99999999999999999999' is no whole number" --shard-tokens 99999999999999999999 ../text
    refuses "--tokenizer: 'words' is not known; use bytes" --tokenizer words ../text
    refuses "no files given; see --help"
}

test_bad_files_are_refused_by_name() {
    refuses "missing: there is no such file or folder to read text from" missing
    refuses "--files-from missing: cannot open: No such file or directory; give a file" --files-from missing
    refuses "--files-from .: cannot read: Is a directory" --files-from .
    mkfifo pipe
    refuses "pipe: is neither a file nor a folder" pipe
    mkdir in
    : >in/empty
    code=0
    "$prepare" in >output 2>&1 || code=$?
    [ "$code" -eq 1 ]
    grep -q 'no text found; give text files' output
}

test_a_full_disk_is_told_and_resume_goes_on_once_there_is_room() {
    seq 1 200000 >numbers
    "$prepare" --out-dir whole numbers
    code=0
    # 1 MB of 2.6: the write fails, as on a full disk
    sh -c 'ulimit -f 2000 && exec "$0" --out-dir out numbers' "$prepare" >output 2>&1 || code=$?
    cat output
    [ "$code" -eq 1 ]
    [ "$(wc -l <output)" -eq 1 ]
    grep -q '^prepare: out/train_000000.bin.tmp: cannot write: File too large' output
    "$prepare" --out-dir out --resume numbers
    diff -r whole out
}

test_an_output_folder_that_cannot_be_written_is_named() {
    echo text >text
    refuses "text" --out-dir text/out text
}

for test in $(sed -n 's/^\(test_[a-z0-9_]*\)() {$/\1/p' "$0"); do
    run_test "$test"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
