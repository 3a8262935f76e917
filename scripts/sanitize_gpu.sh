#!/bin/sh
# NVIDIA's compute-sanitizer over the tests of the GPU: memcheck (accesses out of bounds) and racecheck (shared memory
# that one thread writes and another reads without a barrier). What `make sanitize-gpu` runs.
# usage: sanitize_gpu.sh TEST...      TOOLS="memcheck racecheck synccheck" chooses the tools
#
# Under it the tests choose their small shapes (FLASHGPT_SMALL): a checked kernel is up to a thousand times slower.
# A call of CUDA that fails is no finding here, the program checks each of them itself and a test makes them fail.
# racecheck leaves out cuBLAS' kernels, which are not ours and synchronise in ways that it does not know.
export FLASHGPT_SMALL=1 OMP_WAIT_POLICY=passive
PATH=$PATH:/usr/local/cuda/bin
foreign=kns=nvjet,kns=cublas,kns=cutlass,kns=xmma,kns=gemm
passed=0
failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for test in "$@"; do
    for tool in ${TOOLS:-memcheck racecheck}; do
        case $tool in
        memcheck) options="--report-api-errors no" ;;
        racecheck) options="--kernel-name-exclude $foreign" ;;
        *) options= ;;
        esac
        start=$(date +%s)
        # shellcheck disable=SC2086 # options are words
        compute-sanitizer --tool "$tool" --error-exitcode 99 $options "$test" >"$log" 2>&1
        code=$?
        summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//')
        if [ "$code" -eq 0 ] && [ -n "$summary" ]; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            grep -v '^  ok ' "$log" | head -n 60
        fi
        echo "$(basename "$test") under $tool: exit code $code, ${summary:-no summary} ($(($(date +%s) - start)) s)"
    done
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
