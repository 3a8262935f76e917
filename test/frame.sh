# What tests of the programs from outside share; read by them with ".". A test is a function that run_test runs in an empty
# folder under "set -e", so that the first command that fails fails the test (but for "! A", and the A of "A && B"); or a
# condition for check to look at, after commands that may end as they like. "finish" is the last line.
export LC_ALL=C # awk and printf with decimal points, whatever the user's language
build=$(cd "${FLASHGPT_BUILD:-build}" 2>/dev/null && pwd)
prepare=$build/prepare
train_gpt=$(realpath "${FLASHGPT_TRAINER:-$build/train_gpt}")
if [ ! -x "$train_gpt" ]; then
    echo "${FLASHGPT_BUILD:-build} has no train_gpt: make builds it; FLASHGPT_BUILD names another folder"
    exit 1
fi
folder=$(mktemp -d)
trap 'chmod -R u+w "$folder"; rm -rf "$folder"' EXIT
passed=0
failed=0

ok() { # ok NAME [REMARK]
    passed=$((passed + 1))
    echo "  ok $1${2:+: $2}"
}

bad() { # bad NAME WHY
    failed=$((failed + 1))
    echo "  FAILED $1: $2"
}

# check NAME CONDITION...: the command's first line is a remark if it holds, all of them say why if not
check() {
    name=$1
    shift
    if "$@" >"$folder/why" 2>&1; then
        ok "$name" "$(head -n 1 "$folder/why")"
    else
        bad "$name" "$(cat "$folder/why")"
    fi
}

# skip REASON: this machine lacks what all of the script's tests need
skip() {
    echo "  skipped $(basename "$0" .sh): $1"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}

finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}

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

# not COMMAND...: the command must fail; "! COMMAND" would fail no test, since "set -e" looks past it
not() {
    ! "$@"
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

# cuda_as_cxx SOURCE...: copies of CUDA sources in the folder, for test/cuda_on_cpu.h and a C++ compiler, $CXX
cuda_as_cxx() {
    CXX=${CXX:-c++}
    if ! command -v "$CXX" >/dev/null; then
        skip "needs a C++ compiler, and there is no $CXX"
    fi
    for source in "$@"; do
        mkdir -p "$folder/$(dirname "$source")"
        sed -z -E 's/__launch_bounds__\(([^{;]*)\)(\s+\w+\([^{;]*\) \{)/\2 cpu_launch_bounds(\1);/g' "$source" \
            >"$folder/$source"
    done
}

# steps RUN_FOLDER KEY: lines of a step's number and its KEY (a number), as the run's log has them
steps() {
    sed -n "s/.*\"type\":\"step\",\"step\":\([0-9]*\),.*\"$2\":\([^,}]*\).*/\1 \2/p" "$1/log.jsonl"
}
