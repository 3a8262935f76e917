#!/bin/sh
# usage: run_tests.sh BUILD_DIR TEST...   runs each test program, sums their closing lines "N passed, N failed".
# A test that cannot run on this machine says so in a line that begins with "skipped", and passes nothing.
# A test that ends without that line, or with another exit code than it should, counts as one failure.
build=$1
shift
export FLASHGPT_BUILD="$build" FLASHGPT_TRAINER="$build/train_gpt" OMP_WAIT_POLICY=passive
passed=0
failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for test in "$@"; do
    name=$(basename "$test")
    start=$(date +%s)
    "$test" >"$log" 2>&1
    code=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
    p=${line%% *}
    f=${line#*, }
    f=${f%% *}
    if [ -z "$line" ] || { [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; }; then
        p=${p:-0}
        f=$((${f:-0} + 1))
        echo "    $name ended with exit code $code" >>"$log"
    fi
    if [ "$f" -ne 0 ]; then
        cat "$log"
    fi
    grep '^skipped' "$log"
    echo "$name: $p passed, $f failed ($(($(date +%s) - start)) s)"
    passed=$((passed + p))
    failed=$((failed + f))
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
