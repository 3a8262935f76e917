#!/bin/sh
# What train_gpt does with a trained model, from outside: --generate, --evaluate, --export, --info, and questions while it
# trains. test/golden/choices has a GPT-2 of Hugging Face with random weights (bytes as tokens, 64 positions), 60 questions,
# and how many of them PyTorch gets right with it (scripts/compare_multiple_choice.py).
. test/frame.sh
choices=$PWD/test/golden/choices
vocabulary=$PWD/test/golden/tokenizer
export FLASHGPT_CACHE="$folder/cache"

# the golden model on the CPU, as words without spaces for the folder of a test
ln -s "$train_gpt" "$folder/train_gpt"
ln -s "$choices" "$folder/choices"
use="../train_gpt --init-from ../choices --device cpu"

# fails PATTERN COMMAND...: exit code 1, and the one line matches
fails() {
    pattern=$1
    shift
    code=0
    "$@" >out 2>err || code=$?
    cat err
    [ "$code" -eq 1 ]
    [ "$(wc -l <err)" -eq 1 ]
    grep -Eq -- "$pattern" err
}

# right BY_LOSS BY_MEAN COUNT: the line that evaluations print for so many right answers
right() {
    awk -v a="$1" -v b="$2" -v n="$3" \
        'BEGIN { printf "multiple choice %.2f%% right, %.2f%% by loss per token (%d questions in", 100 * a / n, 100 * b / n, n }'
}

# small_run OPTION...: three steps of a tiny model with bytes
small_run() {
    head -c 20000 "$vocabulary/text.txt" "$choices/questions.jsonl" >text
    [ -d shards ] || "$prepare" --out-dir shards text
    "$train_gpt" --device cpu --layers 1 --channels 32 --heads 2 --seq-len 32 --micro-batch 4 --steps 3 --quiet \
        --train-data 'shards/train_*.bin' --val-data 'shards/val_*.bin' --sample-every 0 "$@"
}

test_a_long_sample_does_not_cost_the_first_rank_the_others() {
    small_run --run-dir run --ranks 2 --comm-timeout 2 --layers 4 --channels 256 --heads 4 --steps 1 --sample-every 1 \
        --sample-prompt abc --sample-temperature 0 --sample-tokens 7000 # takes seconds
    [ "$(grep -c '"type":"sample"' run/log.jsonl)" -eq 1 ]
    [ "$(grep '"type":"sample"' run/log.jsonl | wc -c)" -gt 6000 ] # it does not end before
}

test_as_many_answers_are_right_as_in_pytorch() {
    read -r questions by_sum by_mean <"$choices/answers"
    for batch in 1 7 300; do
        $use --evaluate --multiple-choice "$choices/questions.jsonl" --micro-batch $batch >out
        grep -qF "$(right "$by_sum" "$by_mean" "$questions")" out
    done
}

test_questions_are_asked_while_training_by_any_number_of_ranks() {
    for ranks in 1 2 3; do
        small_run --run-dir run$ranks --ranks $ranks --micro-batch 12 --global-batch 2304 --eval-every 1 --eval-batches 0 \
            --multiple-choice "$choices/questions.jsonl"
        grep '"multiple_choice"' run$ranks/log.jsonl | sed 's/.*"step":\([0-9]*\).*\("questions".*\),"seconds.*/\1 \2/' >asked$ranks
        [ "$(wc -l <asked$ranks)" -eq 3 ]
        grep -q '^3 "questions":60,' asked$ranks
    done
    cmp asked1 asked2
    cmp asked1 asked3
    "$train_gpt" --evaluate --run-dir run1 --device cpu --multiple-choice "$choices/questions.jsonl" >out
    by_sum=$(sed -n 's/^3 .*"correct":\([0-9]*\).*/\1/p' asked1)
    by_mean=$(sed -n 's/^3 .*"correct_normalised":\([0-9]*\).*/\1/p' asked1)
    grep -qF "$(right "$by_sum" "$by_mean" 60)" out
}

test_the_loss_alone_is_the_one_that_the_run_logged() {
    small_run --run-dir run --eval-every 3 --eval-batches 0
    logged=$(sed -n 's/.*"type":"eval","step":3,.*"loss":\([^,]*\),.*/\1/p' run/log.jsonl)
    for batch in 1 5 64; do
        "$train_gpt" --evaluate --run-dir run --device cpu --val-data 'shards/val_*.bin' --micro-batch $batch >out
        grep -qF "validation loss $(printf %.4f "$logged"), perplexity" out
    done
}

test_a_text_goes_on_where_the_prompt_ends() {
    $use --generate 'the man ' --sample-tokens 30 --seed 3 >alone 2>speed
    [ "$(head -c 8 alone)" = 'the man ' ]
    grep -Eq '^[0-9]+ tokens in [0-9.]+ s, [0-9.]+ a second$' speed
    printf 'the man ' | $use --generate - --sample-tokens 30 --seed 3 --quiet >piped 2>quiet
    cmp alone piped
    [ ! -s quiet ]
    $use --generate 'the man ' --sample-tokens 30 --seed 4 --quiet >other
    not cmp -s alone other
}

test_several_samples_come_one_after_the_other() {
    $use --generate ab --samples 3 --sample-tokens 20 --quiet >out
    [ "$(grep -ac '^--- sample [23] of 3$' out)" -eq 2 ]
    $use --generate ab --sample-tokens 20 --quiet >alone
    head -c $(($(wc -c <alone) - 1)) alone | cmp -n $(($(wc -c <alone) - 1)) - out
}

test_top_k_of_1_is_the_likeliest_token_at_any_temperature() {
    $use --generate q --sample-temperature 0 --quiet >greedy
    $use --generate q --sample-temperature 5 --sample-top-k 1 --quiet >one
    $use --generate q --sample-temperature 5 --sample-top-p 1e-9 --quiet >certain
    cmp greedy one
    cmp greedy certain
    $use --generate q --sample-temperature 0 --sample-repetition-penalty 3 --quiet >varied
    not cmp -s greedy varied
    for penalty in 1 100; do # a text without tokens has nothing to repeat, and may end as likely as ever
        $use --generate '' --samples 1000 --sample-tokens 1 --sample-temperature 1 --quiet \
            --sample-repetition-penalty $penalty >first$penalty
    done
    cmp first1 first100
}

test_an_exported_model_is_the_same_and_brings_its_tokenizer() {
    $use --export model >said
    size=$(wc -c <model/model.safetensors | awk '{ printf "%.1f KiB", $1 / 1024 }')
    [ "$(cat said)" = "model: the model of ../choices, 11.7k parameters in fp32, $size, without tokenizer files: its tokens are bytes" ]
    [ -z "$($use --export silent --quiet)" ]
    "$train_gpt" --init-from ../choices --tokenizer none --export bare |
        grep -q ', without a tokenizer: --tokenizer names the one to write with it$'
    $use --generate ab --sample-temperature 0 --quiet >before
    "$train_gpt" --init-from model --device cpu --generate ab --sample-temperature 0 --quiet >after
    cmp before after
    fails '--export .*/text.txt/model: .*cannot create the folder.*; give a folder' $use --export "$vocabulary/text.txt/model"
    fails 'there is a model in it already' $use --export model
    "$prepare" --out-dir tokens --tokenizer "$vocabulary" "$vocabulary/text.txt"
    "$train_gpt" --device cpu --layers 1 --channels 32 --heads 2 --seq-len 32 --vocab-size 700 --steps 1 --quiet --run-dir run \
        --train-data 'tokens/train_*.bin' --tokenizer "$vocabulary" --micro-batch 2
    "$train_gpt" --run-dir run --export with | grep -q '^with: the model of run/checkpoints/step-00000001, .*, with its tokenizer$'
    grep -q '"eos_token_id": 639' run/checkpoints/step-00000001/config.json # the tokenizer's, below the model's last token
    grep -q '"eos_token_id": 639' with/config.json
    for file in vocab.json merges.txt tokenizer.json; do
        cmp run/checkpoints/step-00000001/$file with/$file
        grep -q "  $file\$" run/checkpoints/step-00000001/checksums.xxh64
    done
    "$train_gpt" --init-from with --device cpu --generate 'the the' --sample-tokens 5 --quiet >text
    grep -q '^the the' text
    "$train_gpt" --init-from with --device cpu --steps 1 --micro-batch 2 --quiet --run-dir tuned --train-data 'tokens/train_*.bin'
    cmp with/vocab.json tuned/checkpoints/step-00000001/vocab.json # the tokenizer comes along by itself
    "$train_gpt" --run-dir run --resume --device cpu --steps 2 --quiet --train-data 'tokens/train_*.bin'
}

test_info_tells_what_a_path_is() {
    small_run --run-dir run --eval-every 3
    "$train_gpt" --info run >out
    grep -q '^run .*run/checkpoints/step-00000003$' out
    grep -q '^model  *GPT-2: .* parameters, 1 layers, 32 channels, 2 heads of 16$' out
    grep -q '^checkpoint  *step 3, 384 tokens seen$' out
    "$train_gpt" --info shards/train_000000.bin | grep -Eq '^token shard  *[0-9]+ tokens, ids up to 256$'
    "$train_gpt" --info "$vocabulary" | grep -q '^tokenizer  *640 tokens, end of text is 639$'
    "$train_gpt" --info "$choices/model.safetensors" | grep -q '^safetensors  *28 tensors, 11728 numbers'
    "$train_gpt" --info "$choices" | grep -q '^ .* 64 positions, vocabulary 257$'
    sed 's/{/{"tokenizer": 640, "train": 641, "n_layer": 642, /' "$vocabulary/vocab.json" >vocab.json # words like any other
    cp "$vocabulary/merges.txt" .
    "$train_gpt" --info vocab.json | grep -q '^tokenizer  *643 tokens, end of text is 639$'
    "$train_gpt" --info shards | grep -q '^manifest  *shards of build/prepare, tokenizer bytes of 257 tokens$'
    header='{"a\u001b[2J\nb":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    printf "\\$(printf %o ${#header})"'\0\0\0\0\0\0\0%s\1\2\3\4' "$header" >strange
    "$train_gpt" --info strange >out
    [ "$(wc -l <out)" -eq 3 ]
    grep -q '^ .* F32  1  a \[2J b$' out # control characters do not come through
    fails '--info nothing: there is no such file or folder; give a run' "$train_gpt" --info nothing
    fails 'text: not a file that this program knows' "$train_gpt" --info text
    mkdir empty
    fails 'empty: nothing in this folder' "$train_gpt" --info empty
    head -c 1500 shards/train_000000.bin >cut
    fails 'cut: the header says .* truncated' "$train_gpt" --info cut
}

test_an_export_that_does_not_fit_leaves_no_model_behind_and_one_that_was_killed_is_in_nobodys_way() {
    (
        ulimit -f 20 # the write fails, as on a full disk
        fails 'model/model.safetensors.tmp: cannot write: File too large' $use --export model
    )
    [ -z "$(ls model)" ]
    head -c 5000 "$choices/model.safetensors" >model/model.safetensors.tmp # as a killed one leaves it
    $use --export model
    $use --generate ab --sample-temperature 0 --quiet >before
    "$train_gpt" --init-from model --device cpu --generate ab --sample-temperature 0 --quiet >after
    cmp before after
}

test_a_folder_with_a_pipe_or_a_device_for_a_file_is_refused() {
    for file in config.json model.safetensors model.safetensors.index.json vocab.json; do
        mkdir bad
        cp "$choices/config.json" "$choices/model.safetensors" bad
        [ $file != model.safetensors.index.json ] || rm bad/model.safetensors
        rm -f bad/$file
        mkfifo bad/$file
        fails "bad/$file: is not a file" timeout 20 "$train_gpt" --device cpu --init-from bad --generate x
        rm bad/$file
        ln -s /dev/zero bad/$file
        fails "bad/$file: is not a file" timeout 20 "$train_gpt" --info bad
        rm -r bad
    done
}

test_a_result_that_cannot_be_written_is_an_error() {
    small_run --run-dir run
    for what in "--evaluate --val-data shards/val_*.bin" "--info ../choices" --plan --help "--generate x"; do
        set -f
        case $what in --e* | --g*) set -- $use $what ;; *) set -- "$train_gpt" $what ;; esac
        set +f
        code=0
        "$@" >/dev/full 2>err || code=$?
        [ "$code" -eq 1 ]
        grep -Eq '^train_gpt: .* cannot be written' err
    done
    "$train_gpt" --help | head -n 1 # a reader that has enough is none
}

test_what_cannot_be_done_is_said_in_one_line() {
    fails '--generate needs a model' "$train_gpt" --generate x
    fails '--evaluate needs a model' "$train_gpt" --evaluate
    fails 'not both' "$train_gpt" --generate x --run-dir a --init-from b
    fails 'no checkpoint in it' "$train_gpt" --generate x --run-dir nothing
    fails 'different things to do' $use --generate x --evaluate
    fails 'leave out --ranks' $use --generate x --ranks 2
    fails 'nothing to evaluate on' $use --evaluate
    fails 'give --tokenizer' $use --generate x --tokenizer none
    fails 'give --tokenizer' $use --evaluate --multiple-choice "$choices/questions.jsonl" --tokenizer none
    fails 'more than the model.s 257' $use --generate x --tokenizer "$vocabulary"
    fails 'has 64 positions' $use --generate x --seq-len 65
    fails '--sample-top-p.*allowed' $use --generate x --sample-top-p 0
    mkdir large
    sed 's/"vocab_size": 257/"vocab_size": 70000/' "$choices/config.json" >large/config.json
    fails 'large: .*vocab-size.*allowed: 0 to 65536' "$train_gpt" --init-from large --generate x --tokenizer bytes
    fails 'gone: cannot open' $use --evaluate --multiple-choice gone
    fails '/dev/zero:1: a line of more than' timeout 20 $use --evaluate --multiple-choice /dev/zero
    : >none
    fails 'there is no question in it' $use --evaluate --multiple-choice none
    printf '{"ctx": "a", "endings": ["b", "c"], "label": 2}\n' >bad
    fails '^train_gpt: bad:1: "label" is not the index of one of the 2 endings$' $use --evaluate --multiple-choice bad
    printf '{"ctx": "a", "endings": ["b", "c"], "label": 1}\n\n{"ctx": 1}\n' >bad
    small_run --run-dir early --multiple-choice bad 2>err && exit 1 # before the first step, not at the first evaluation
    grep -q '^train_gpt: bad:3: no text "ctx"' err
    [ ! -e early ]
    mkfifo asked_once
    small_run --run-dir early --multiple-choice asked_once 2>err && exit 1
    grep -q '^train_gpt: --multiple-choice asked_once: is not a file; give a file of questions' err
    fails '^train_gpt: bad:3: no text "ctx"' $use --evaluate --multiple-choice bad
}

for test in $(sed -n 's/^\(test_[a-z0-9_]*\)() {$/\1/p' test/test_use_model.sh); do
    run_test "$test"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
