# What the scripts share; they source it: whatever they cannot work with ends them with one line and exit code 1.

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

find_trainer() { # where the user says, here, or beside the scripts
    trainer=${FLASHGPT_TRAINER:-./train_gpt}
    [ -n "${FLASHGPT_TRAINER:-}" ] || [ -e "$trainer" ] || trainer=$here/../train_gpt
    program "$trainer" "build it with make, or name it in FLASHGPT_TRAINER"
}
