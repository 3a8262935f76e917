# What the run_*.sh scripts share; they source it from the folder $here. GPT-3's sizes (Brown et al. 2020, table 2.1) with
# its batch of a million tokens and its warm-up over 375 million; whatever options follow the model and the length win
# over these.
. "$here/checks.sh"
print_help "$@"

most_ranks=4096 # COMM_MAX_RANKS

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

mentions() { # mentions OPTION ARGUMENT...: is it among them?
    option=$1
    shift
    for argument in "$@"; do
        case $argument in
        "$option" | "$option="*) return 0 ;;
        esac
    done
    return 1
}

value_of() { # value_of OPTION ARGUMENT...: that of the last OPTION among them, if any
    option=$1
    value=
    while shift && [ $# -gt 0 ]; do
        case $1 in
        "$option") value=${2:-} ;;
        "$option="*) value=${1#*=} ;;
        esac
    done
    printf %s "$value"
}

warmup() { # warmup ARGUMENT...: a run that is shorter than GPT-3's warm-up gets train_gpt's own, a share of its steps
    steps=$(value_of --steps "$@")
    case $steps in
    [123456789] | [123456789][0123456789] | [123456789][0123456789][0123456789]) [ "$steps" -ge 358 ] || return 0 ;;
    esac
    echo --warmup-steps 358
}

# The plan of one of $1 GPUs, for each GPU that the scripts are meant for.
print_plans() {
    ranks=$1
    shift
    unset_ranks
    for gpu in a100-80gb h100-sxm h200; do
        echo "$gpu, $ranks GPUs:"
        "$trainer" $settings --plan --gpu $gpu --ranks "$ranks" "$@" || exit
    done
}

# Ends the script if options are wrong or missing: each rank would say so, were they started. What is missing may stand in
# a --config or in the run that goes on.
check_options() {
    "$trainer" $settings --plan --gpu h200 "$@" --no-resume >/dev/null || exit
    ! mentions --config "$@" || return 0
    [ -n "$(value_of --run-dir "$@")" ] || fail "--run-dir is missing: give the run's folder, one that all machines share"
    mentions --resume "$@" || [ -n "$(value_of --train-data "$@")" ] ||
        fail "--train-data is missing: give the shards, such as 'data/tokens/train*.bin'"
}

dry_run=
for argument in "$@"; do
    shift
    if [ "$argument" = --dry-run ]; then
        dry_run=yes
    else
        set -- "$@" "$argument"
    fi
done
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
! mentions --ranks "$@" || fail "--ranks: this script sets it (see --help); leave it out"
! mentions --gpu "$@" || fail "--gpu: --dry-run plans for a100-80gb, h100-sxm and h200; leave it out, or ask train_gpt --plan --gpu"
find_trainer
settings="--model $model --seq-len $length --micro-batch $(micro_batch "$model" "$length") --global-batch 1Mi $(warmup "$@")"
