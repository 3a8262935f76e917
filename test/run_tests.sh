#!/bin/sh
# usage: run_tests.sh BUILD_DIR TEST...   runs each test program, sums their closing lines "N passed, N failed".
# A test that ends without that line, with another exit code than it should, without having tested anything, or not within
# a quarter of an hour (those that take longest take a minute), counts as one failure. Tests that this machine lacks
# something for say so in lines "  skipped NAME: reason" and close with "N passed, N failed, N skipped".
build=$1
shift
export FLASHGPT_BUILD="$build" FLASHGPT_TRAINER="$build/train_gpt" OMP_WAIT_POLICY=passive
# whoever tests inside of a launcher's job may be a rank there; the tests' programs are not
ranks='RANK\|WORLD_SIZE\|LOCAL_RANK\|LOCAL_WORLD_SIZE\|MASTER_ADDR\|MASTER_PORT\|FLASHGPT_TOKEN\|SLURM_[A-Z_]*\|OMPI_[A-Za-z_]*'
for name in $(env | sed -n "s/^\($ranks\)=.*/\1/p"); do
    unset "$name"
done
passed=0
failed=0
skipped=0
counts() { # PASSED FAILED SKIPPED
    echo "$1 passed, $2 failed$([ "$3" -eq 0 ] || echo ", $3 skipped")"
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for test in "$@"; do
    name=$(basename "$test")
    start=$(date +%s)
    timeout --foreground 900 "$test" >"$log" 2>&1
    code=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$log" | tail -n 1)
    p=${line%% *}
    f=${line#*, }
    f=${f%% *}
    k=$(echo "$line" | sed -n 's/.*, \([0-9]*\) skipped$/\1/p')
    k=${k:-0}
    p=${p:-0}
    f=${f:-0}
    nothing=$([ $((p + f + k)) -ne 0 ] || [ -n "$FLASHGPT_TEST" ] || echo ", and tested nothing")
    if [ -z "$line" ] || [ -n "$nothing" ] || { [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; }; then
        f=$((f + 1))
        echo "    $name ended with exit code $code$nothing" >>"$log"
    fi
    if [ "$f" -ne 0 ]; then
        cat "$log"
    else
        grep '^  skipped ' "$log"
    fi
    echo "$name: $(counts "$p" "$f" "$k") ($(($(date +%s) - start)) s)"
    passed=$((passed + p))
    failed=$((failed + f))
    skipped=$((skipped + k))
done
counts "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
