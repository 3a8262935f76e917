# What the scripts share; they source it: whatever they cannot work with ends them with one line and exit code 1.

print_help() { # print_help ARGUMENT...: with --help or -h among them the script's first lines are its answer
    for argument in "$@"; do
        case $argument in
        --help | -h)
            sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//; p' "$0"
            exit
            ;;
        esac
    done
}

fail() { # fail WHY
    printf '%s: %s\n' "$0" "$(printf %s "$1" | tr '[:cntrl:]' ' ')" >&2
    exit 1
}

usage() { # usage ARGUMENTS
    echo "usage: $0 $1" >&2
    exit 1
}

whole() { # whole NAME VALUE LEAST MOST: a number of nine digits at most, which every shell can count with
    case $2 in
    '' | *[!0123456789]* | 0?* | ??????????*) ;;
    *) [ "$2" -lt "$3" ] || [ "$2" -gt "$4" ] || return 0 ;;
    esac
    fail "$1 is a whole number from $3 to $4, not '$2'"
}

program() { # program NAME REMEDY: a path, or found by its name
    file=$(command -v "$1") && [ -f "$file" ] && [ -x "$file" ] || fail "no $1: $2"
}

unset_ranks() { # what is left in the environment of a launcher's ranks is not for what this script starts
    unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMPI_COMM_WORLD_RANK SLURM_STEP_NUM_TASKS
}

find_trainer() { # where the user says, here, or beside the scripts
    trainer=${FLASHGPT_TRAINER:-./train_gpt}
    [ -n "${FLASHGPT_TRAINER:-}" ] || [ -e "$trainer" ] || trainer=$here/../train_gpt
    program "$trainer" "build it with make, or name it in FLASHGPT_TRAINER"
}
