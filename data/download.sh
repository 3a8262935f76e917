#!/bin/sh
# usage: data/download.sh            lists what there is, and how large it is; fetches nothing
#        data/download.sh NAME...    fetches it into data/downloads/NAME, and says what to do with it
#
# Sizes with "about" are from memory: the server says the size before each file comes. data/fetch.sh does the work: it
# goes on where it was interrupted, and checks. FLASHGPT_MIRROR=URL takes all files from URL/<host>/<path> instead.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
downloads=${FLASHGPT_DOWNLOADS:-data/downloads}

list() {
    cat <<END
name               size           what
tinyshakespeare    1115394 bytes  Shakespeare's plays, in one file, to try things out
tinystories        about 2.3 GB   short stories in simple words (TinyStoriesV2-GPT4): text, for training and validation
fineweb            about 200 MB   a shard each of FineWeb in GPT-2 tokens, llm.c's format, for training and validation
                   and 200 MB     (100 million tokens each); fineweb:N has N training shards, up to 103: 10 billion tokens
hellaswag          about 12 MB    10042 questions with four endings each, for --multiple-choice
gpt2               about 550 MB   OpenAI's GPT-2, 124M: weights and vocabulary
gpt2-medium        about 1.5 GB   the same, 355M
gpt2-large         about 3.2 GB   774M
gpt2-xl            about 6.4 GB   1.5B
gpt2-vocabulary    about 1.5 MB   GPT-2's vocabulary alone
END
}

get() { # get URL FILE
    url=$1
    if [ -n "${FLASHGPT_MIRROR:-}" ]; then
        url=$FLASHGPT_MIRROR/${url#https://}
    fi
    "$here/fetch.sh" "$url" "$2"
}

fineweb() { # fineweb SHARDS
    folder=$downloads/fineweb
    from=https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main
    get $from/fineweb_val_000000.bin "$folder/fineweb_val_000000.bin"
    shard=1
    while [ "$shard" -le "$1" ]; do
        file=$(printf 'fineweb_train_%06d.bin' "$shard")
        get "$from/$file" "$folder/$file"
        shard=$((shard + 1))
    done
    echo "next: ./train_gpt --model gpt2-124m --train-data '$folder/fineweb_train_*.bin' --val-data '$folder/fineweb_val_*.bin'"
}

gpt2() { # gpt2 NAME FILE...
    name=$1
    shift
    for file in "$@"; do
        get "https://huggingface.co/openai-community/$name/resolve/main/$file" "$downloads/$name/$file"
    done
}

download() {
    folder=$downloads/$1
    case $1 in
    tinyshakespeare)
        get https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt "$folder/input.txt"
        echo "next: build/prepare --out-dir data/tokens/$1 $folder/input.txt"
        ;;
    tinystories)
        for part in valid train; do
            get "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-$part.txt" \
                "$folder/TinyStoriesV2-GPT4-$part.txt"
        done
        echo "next: build/prepare --split-documents --train-bpe 8192 --out-dir data/tokens/$1 $folder/*.txt"
        ;;
    fineweb) fineweb 1 ;;
    fineweb:*[!0-9]* | fineweb:) unknown "$1" ;;
    fineweb:*)
        [ "${1#fineweb:}" -ge 1 ] && [ "${1#fineweb:}" -le 103 ] || unknown "$1"
        fineweb "${1#fineweb:}"
        ;;
    hellaswag)
        get https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl "$folder/hellaswag_val.jsonl"
        echo "next: ./train_gpt --evaluate --init-from $downloads/gpt2 --multiple-choice $folder/hellaswag_val.jsonl"
        ;;
    gpt2 | gpt2-medium | gpt2-large | gpt2-xl)
        gpt2 "$1" config.json vocab.json merges.txt model.safetensors
        echo "next: ./train_gpt --generate 'Once upon a time' --init-from $folder"
        ;;
    gpt2-vocabulary)
        for file in vocab.json merges.txt; do
            get "https://huggingface.co/openai-community/gpt2/resolve/main/$file" "$folder/$file"
        done
        echo "next: build/prepare --tokenizer $folder --out-dir data/tokens/mine FILES..."
        ;;
    *) unknown "$1" ;;
    esac
}

unknown() {
    echo "download.sh: $1: not in the list; data/download.sh shows it" >&2
    exit 1
}

if [ $# -eq 0 ]; then
    list
fi
for name in "$@"; do
    download "$name"
done
