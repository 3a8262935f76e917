# What the run_*.sh scripts share; they source it from the folder $here. GPT-3's sizes (Brown et al. 2020, table 2.1) with
# its batch of a million tokens and its warm-up over 375 million; whatever options follow the model and the length win
# over these.
. "$here/checks.sh"

# Micro-batches fit into 80 GB without recomputation: see --dry-run. They divide 64 and 16 sequences, what each of 8 GPUs
# takes of a million tokens.
micro_batch() {
    case "$1 $2" in
    "gpt3-1.3b 2048") echo 16 ;;
    "gpt3-1.3b 8192") echo 4 ;;
    "gpt3-2.7b 2048") echo 8 ;;
    "gpt3-2.7b 8192") echo 2 ;;
    esac
}

[ $# -ge 2 ] || usage "MODEL LENGTH [--dry-run] [OPTIONS OF train_gpt], such as: $0 gpt3-1.3b 2048 --dry-run"
model=$1
length=$2
shift 2
case $model in
gpt3-1.3b | gpt3-2.7b) ;;
*) fail "MODEL is gpt3-1.3b or gpt3-2.7b, not '$model'" ;;
esac
case $length in
2048 | 8192) ;;
*) fail "LENGTH is 2048 or 8192, not '$length'" ;;
esac
find_trainer
dry_run=
if [ "${1:-}" = --dry-run ]; then
    dry_run=yes
    shift
fi
settings="--model $model --seq-len $length --micro-batch $(micro_batch "$model" "$length") --global-batch 1Mi
    --warmup-steps 358"
most_ranks=4096 # COMM_MAX_RANKS

# The plan of one of $1 GPUs, for each GPU that the scripts are meant for.
print_plans() {
    ranks=$1
    shift
    for gpu in a100-80gb h100-sxm h200; do
        echo "$gpu, $ranks GPUs:"
        "$trainer" $settings --plan --gpu $gpu --ranks "$ranks" "$@" || exit
    done
}

# Ends the script if the options are wrong: each rank would say so, were they started.
check_options() {
    "$trainer" $settings --plan --gpu h200 "$@" --no-resume >/dev/null || exit
}
