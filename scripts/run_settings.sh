# What the run_*.sh scripts share; they source it. GPT-3's sizes (Brown et al. 2020, table 2.1) with its batch of a
# million tokens and its warm-up over 375 million; whatever options follow the model and the length win over these.
trainer=${FLASHGPT_TRAINER:-./train_gpt}
[ -n "${FLASHGPT_TRAINER:-}" ] || [ -e "$trainer" ] || trainer=$(dirname "$0")/../train_gpt

usage() {
    echo "usage: $0 MODEL LENGTH [--dry-run] [options of train_gpt]" >&2
    echo "  MODEL gpt3-1.3b or gpt3-2.7b, LENGTH 2048 or 8192; --dry-run prints the memory plan of one GPU" >&2
    echo "  such as: $0 gpt3-1.3b 2048 --train-data 'data/tokens/train*.bin' --run-dir runs/1.3b" >&2
    exit 2
}

# Micro-batches fit into 80 GB without recomputation: see --dry-run. They divide 64 and 16 sequences, what each of 8 GPUs
# takes of a million tokens.
micro_batch() {
    case "$1 $2" in
    "gpt3-1.3b 2048") echo 16 ;;
    "gpt3-1.3b 8192") echo 4 ;;
    "gpt3-2.7b 2048") echo 8 ;;
    "gpt3-2.7b 8192") echo 2 ;;
    *) return 1 ;;
    esac
}

[ $# -ge 2 ] || usage
if ! command -v "$trainer" >/dev/null; then
    echo "$0: no $trainer: build it with make, or name it in FLASHGPT_TRAINER" >&2
    exit 1
fi
model=$1
length=$2
micro=$(micro_batch "$model" "$length") || usage
shift 2
dry_run=
if [ "${1:-}" = --dry-run ]; then
    dry_run=yes
    shift
fi
settings="--model $model --seq-len $length --micro-batch $micro --global-batch 1Mi --warmup-steps 358"

# The plan of one of $1 GPUs, for each GPU that the scripts are meant for.
print_plans() {
    ranks=$1
    shift
    for gpu in a100-80gb h100-sxm h200; do
        echo "$gpu, $ranks GPUs:"
        "$trainer" $settings --plan --gpu $gpu --ranks "$ranks" "$@" || exit
    done
}
