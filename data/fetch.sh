#!/bin/sh
# usage: data/fetch.sh URL FILE     fetches one file, or the rest of it where an earlier try was interrupted
#
# What is not complete lies beside it as FILE.part. A complete file has the size that the server said, and the SHA-256
# that the server said, where it says one (Hugging Face does for large files, in x-linked-etag), and else the one that
# was noted in SHA256SUMS, in the same folder, when it was fetched first. A file that is there is only checked.
set -eu

fail() {
    echo "fetch.sh: $*" >&2
    exit 1
}

[ $# -eq 2 ] || fail "usage: data/fetch.sh URL FILE"
url=$1
file=$2
[ ! -d "$file" ] || fail "$file: is a folder; give the name of the file"
folder=$(dirname "$file")
name=$(basename "$file")
command -v curl >/dev/null || fail "curl is missing: install it"
command -v sha256sum >/dev/null || fail "sha256sum is missing: install coreutils"
mkdir -p "$folder"

bytes_of() {
    wc -c <"$1" | tr -d ' '
}
sha256_of() {
    sha256sum "$1" | cut -d ' ' -f 1
}
noted() { # the SHA-256 in SHA256SUMS; nothing if there is none
    [ ! -f "$folder/SHA256SUMS" ] ||
        name=$name awk 'substr($0, 67) == ENVIRON["name"] { sum = $1 } END { if (sum) print sum }' "$folder/SHA256SUMS"
}

if [ -f "$file" ] && [ -n "$(noted)" ]; then
    [ "$(sha256_of "$file")" = "$(noted)" ] || fail "$file: is not what was fetched (SHA256SUMS); remove it to fetch it again"
    echo "$file: is there, $(bytes_of "$file") bytes, SHA-256 as noted"
    exit 0
fi

# ---- what the server says: of all answers on the way, through redirections ----
head=$(curl -sSfLI "$url" 2>&1) || fail "$url: cannot be reached; check the network and the address (curl: ${head##*curl: })"
header() { # header NAME: the last one
    printf '%s\n' "$head" | tr -d '\r"' | awk -v name="$1:" 'tolower($1) == name { value = $2 } END { if (value) print value }'
}
size=$(header x-linked-size)
size=${size:-$(header content-length)}
sum=$(header x-linked-etag)
case $sum in
*[!0-9a-f]*) sum= ;;
esac
[ ${#sum} -eq 64 ] || sum= # of small files it is no SHA-256
echo "$file: ${size:-an unknown number of} bytes from $url"

# ---- the bytes ----
said=
get_bytes() { # get_bytes OPTION...: a bar and curl's words on a terminal, else its words in $said
    if [ -t 2 ]; then
        curl -fL --progress-bar --retry 3 "$@" --output "$part" "$url"
    else
        said=$(curl -fL --silent --show-error --retry 3 "$@" --output "$part" "$url" 2>&1)
    fi
}

part=$file.part
if [ -n "$size" ] && [ -f "$part" ] && [ "$(bytes_of "$part")" -gt "$size" ]; then
    rm "$part" # of another file
fi
if [ -z "$size" ] || [ ! -f "$part" ] || [ "$(bytes_of "$part")" -lt "$size" ]; then
    code=0
    get_bytes --continue-at - || code=$?
    if [ $code -eq 33 ]; then # the server gives no rest of a file: all of it, then
        code=0
        get_bytes || code=$?
    fi
    [ $code -eq 0 ] || fail "$url: interrupted${said:+ (curl: ${said##*curl: })}; the same command goes on from $part"
fi
if [ -n "$size" ] && [ "$(bytes_of "$part")" != "$size" ]; then
    fail "$part: $(bytes_of "$part") bytes, not $size; the same command goes on"
fi

# ---- are they the right ones? ----
got=$(sha256_of "$part")
expected=${sum:-$(noted)}
if [ -n "$expected" ] && [ "$got" != "$expected" ]; then
    rm "$part"
    fail "$file: SHA-256 is $got, not $expected; what came was removed, fetch it again"
fi
mv "$part" "$file"
echo "$got  $name" >>"$folder/SHA256SUMS"
if [ -n "$sum" ]; then
    echo "$file: SHA-256 $got, as the server says"
else
    echo "$file: SHA-256 $got, noted; the server says none"
fi
