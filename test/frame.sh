# What tests of the programs from outside share; read by them with ".". Each test is a function that run_test runs in an empty
# folder under "set -e": the first command that fails fails the test.
build=$(cd "${FLASHGPT_BUILD:-build}" && pwd)
prepare=$build/prepare
train_gpt=$build/train_gpt
folder=$(mktemp -d)
trap 'chmod -R u+w "$folder"; rm -rf "$folder"' EXIT
passed=0
failed=0

run_test() {
    mkdir "$folder/$1"
    (
        cd "$folder/$1" || exit 1
        set -ex
        "$1"
    ) >"$folder/log" 2>&1
    if [ $? -eq 0 ]; then
        echo "  ok $1"
        passed=$((passed + 1))
    else
        sed 's/^/    /' "$folder/log"
        echo "  FAILED $1"
        failed=$((failed + 1))
    fi
}

# refused MESSAGE COMMAND...: exit code 1, the message in the only line, no shards
refused() {
    message=$1
    shift
    code=0
    "$@" >../output 2>&1 || code=$?
    cat ../output
    [ "$code" -eq 1 ]
    [ "$(wc -l <../output)" -eq 1 ]
    grep -qF -- "$message" ../output
    [ -z "$(find . -name '*.bin*')" ]
}

# tokens SHARD...: all their tokens, one a line
tokens() {
    for shard in "$@"; do
        tail -c +1025 "$shard" | od -An -v -t u2 -w2 | tr -d ' '
    done
}
