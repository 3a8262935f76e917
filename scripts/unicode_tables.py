#!/usr/bin/env python3
"""Writes llmc/unicode_tables.c: which code points are letters, numbers and spaces.

The classes must be of the Unicode version that tiktoken's regular expressions know, 16.0. Python's own unicodedata
has it from 3.14 on; for others, pip install unicodedata2==16.0.0. --check only compares with the file that is there.
"""

import argparse
import importlib
import sys
import unicodedata
from pathlib import Path

VERSION = "16.0.0"
BLOCK = 128  # code points; with 2 bits each, the size that makes the two tables smallest
OTHER, LETTER, NUMBER, SPACE = range(4)  # enum char_class
# The property White_Space of PropList.txt, which unicodedata does not tell (str.isspace is another set).
WHITE_SPACE = {*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F,
               0x3000}

HEAD = """\
/* Written by scripts/unicode_tables.py: the letters (general category L), numbers (N) and spaces (White_Space) of
   Unicode {version}. */
#include "unicode_tables.h"

/* clang-format off */
"""


def find_database():
    for name in ("unicodedata", "unicodedata2"):
        try:
            database = importlib.import_module(name)
        except ImportError:
            continue
        if database.unidata_version == VERSION:
            return database
    sys.exit(f"unicodedata has Unicode {unicodedata.unidata_version}, not {VERSION}; pip install "
             f"unicodedata2=={VERSION}")


def classify(database, code):
    if code in WHITE_SPACE:
        return SPACE
    return {"L": LETTER, "N": NUMBER}.get(database.category(chr(code))[0], OTHER)


def pack(classes):
    """Four classes a byte, the first in the lowest bits."""
    return bytes(sum(classes[i + k] << 2 * k for k in range(4)) for i in range(0, len(classes), 4))


def render(database):
    classes = [classify(database, code) for code in range(sys.maxunicode + 1)]
    end = max(code for code, c in enumerate(classes) if c != OTHER) // BLOCK + 1
    blocks, index = {}, []  # the different blocks in order of appearance; each block's number
    for i in range(end):
        block = pack(classes[i * BLOCK:(i + 1) * BLOCK])
        index.append(blocks.setdefault(block, len(blocks)))
    if len(blocks) > 256:
        sys.exit("the numbers of blocks no longer fit bytes")
    ascii_lines = "".join("    " + ",".join(map(str, classes[i:i + 32])) + ",\n" for i in range(0, 128, 32))
    rows = "".join("    {" + ",".join(map(str, block)) + "},\n" for block in blocks)
    lines = "".join("    " + ",".join(map(str, index[i:i + 24])) + ",\n" for i in range(0, end, 24))
    return (HEAD.format(version=VERSION)
            + f"const uint8_t ascii_classes[128] = {{\n{ascii_lines}}};\n"
            + f"const uint32_t unicode_end = {end * BLOCK};\n"
            + f"const uint8_t unicode_block_index[{end}] = {{\n{lines}}};\n"
            + f"const uint8_t unicode_blocks[{len(blocks)}][UNICODE_BLOCK / 4] = {{\n{rows}}};\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file would change")
    arguments = parser.parse_args()
    path = Path(__file__).resolve().parent.parent / "llmc" / "unicode_tables.c"
    text = render(find_database())
    if not arguments.check:
        path.write_text(text)
    elif path.read_text() != text:
        sys.exit(f"{path} is not what this script writes")


if __name__ == "__main__":
    main()
