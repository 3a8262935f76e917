#!/bin/sh
# NVIDIA's compute-sanitizer over the tests of the GPU: memcheck (accesses out of bounds) and racecheck (shared memory
# that one thread writes and another reads without a barrier). What `make sanitize-gpu` runs.
#
#     scripts/sanitize_gpu.sh TEST...
#     TOOLS="initcheck synccheck" scripts/sanitize_gpu.sh build/test/gpu_ops
#
# TOOLS are memcheck, racecheck, initcheck, synccheck, or several of them (default "memcheck racecheck").
#
# Under it the tests choose their small shapes (FLASHGPT_SMALL): a checked kernel is up to a thousand times slower.
# A call of CUDA that fails is no finding here: the program checks each of them itself, and a test makes them fail.
# Hazards within cuBLAS' own kernels are not ours to judge and do not count. (They cannot be left out beforehand: with
# racecheck's filters on, these kernels crash.)
export FLASHGPT_SMALL=1 OMP_WAIT_POLICY=passive
PATH=$PATH:/usr/local/cuda/bin
here=$(dirname "$0")
. "$here/checks.sh"
print_help "$@"
[ $# -ge 1 ] || usage "TEST..., such as: make sanitize-gpu"
for tool in ${TOOLS:-}; do
    case $tool in
    memcheck | racecheck | initcheck | synccheck) ;;
    *) fail "TOOLS are memcheck, racecheck, initcheck, synccheck, not '$tool'" ;;
    esac
done
program compute-sanitizer "it comes with CUDA; its folder is to be in PATH"
for test in "$@"; do
    program "$test" "build it with make gpu-tests"
done
foreign='nvjet|cublas|cutlass|xmma|gemm'
passed=0
failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for test in "$@"; do
    for tool in ${TOOLS:-memcheck racecheck}; do
        # memory that the tests fill beforehand would count as written
        [ "$tool" != initcheck ] || export FLASHGPT_UNPOISONED=1
        start=$(date +%s)
        compute-sanitizer --tool "$tool" --report-api-errors no --print-limit 0 "$test" >"$log" 2>&1
        code=$?
        # a finding begins with "========= Invalid ..." or "========= Error: Race reported between ... at KERNEL"
        findings=$(grep -E '^=+ (Invalid|Error|Warning|Misaligned|Barrier|Uninitialized|Internal|Program hit)' "$log" |
            grep -vcE "$foreign")
        all=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//')
        if [ "$code" -eq 0 ] && [ "$findings" -eq 0 ] && [ -n "$all" ]; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            grep -v '^  ok ' "$log" | head -n 60
        fi
        echo "$(basename "$test") under $tool: $findings findings ($all), exit code $code, $(($(date +%s) - start)) s"
        unset FLASHGPT_UNPOISONED
    done
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
