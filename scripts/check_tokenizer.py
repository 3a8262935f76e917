#!/usr/bin/env python3
"""Compares llmc/tokenizer with tiktoken and with Hugging Face tokenizers, token by token, and times all three.

The vocabulary is a folder with GPT-2's vocab.json and merges.txt (or encoder.json and vocab.bpe), or any other that
build/prepare --train-bpe wrote. It is read here in each of the formats that tokenizer_open knows. Compared are
  - the own bytes of every token, and every Unicode character beside letters, numbers, spaces and itself
  - man pages in all languages that are installed, this repository, and any files given by --text
  - random words in two dozen scripts, random characters, and random bytes (those must come back unchanged)
  - texts cut at tokenizer_cut, whose halves must give the tokens of the whole
Hugging Face's regular expressions may know another version of Unicode: texts with characters whose class differs
there are compared with tiktoken only. Needs cc, tiktoken, tokenizers and numpy.
"""

import argparse
import base64
import ctypes
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from needs import needs

needs("numpy", "tiktoken", "tokenizers")

import numpy
import tiktoken
import tokenizers
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["bpe", "common", "json", "pretokenizer", "tokenizer", "tokenizer_files", "unicode_tables"]
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# First and last letters of scripts, for random words
SCRIPTS = {
    "Latin": (0x41, 0x24F), "Greek": (0x391, 0x3C9), "Cyrillic": (0x410, 0x45F), "Armenian": (0x531, 0x586),
    "Hebrew": (0x5D0, 0x5EA), "Arabic": (0x620, 0x669), "Syriac": (0x710, 0x74A), "Thaana": (0x780, 0x7B1),
    "Devanagari": (0x904, 0x96F), "Bengali": (0x985, 0x9EF), "Gurmukhi": (0xA05, 0xA6F), "Gujarati": (0xA85, 0xAEF),
    "Tamil": (0xB85, 0xBEF), "Telugu": (0xC05, 0xC6F), "Kannada": (0xC85, 0xCEF), "Malayalam": (0xD05, 0xD6F),
    "Sinhala": (0xD85, 0xDF3), "Thai": (0xE01, 0xE59), "Lao": (0xE81, 0xED9), "Tibetan": (0xF00, 0xF6C),
    "Myanmar": (0x1000, 0x1049), "Georgian": (0x10A0, 0x10FA), "Hangul": (0xAC00, 0xD7A3), "Ethiopic": (0x1200, 0x1357),
    "Khmer": (0x1780, 0x17E9), "Mongolian": (0x1820, 0x1878), "Kana": (0x3041, 0x30FE), "Han": (0x4E00, 0x9FFF),
    "Gothic": (0x10330, 0x1034A), "mathematical": (0x1D400, 0x1D7FF), "emoji": (0x1F300, 0x1F6FF),
}


class Native:
    """llmc/tokenizer by ctypes."""

    def __init__(self, library, path):
        self.library = library
        self.handle = ctypes.c_void_p()
        if library.tokenizer_open(ctypes.byref(self.handle), str(path).encode()) != 0:
            sys.exit(library.error_message().decode())

    def encode(self, data):
        tokens, count = ctypes.POINTER(ctypes.c_int32)(), ctypes.c_size_t()
        status = self.library.tokenizer_encode(
            self.handle, data, ctypes.c_size_t(len(data)), ctypes.byref(tokens), ctypes.byref(count))
        if status != 0:
            sys.exit(self.library.error_message().decode())
        result = numpy.ctypeslib.as_array(tokens, (count.value,)).tolist() if count.value else []
        self.library.free(tokens)
        return result

    def decode(self, tokens):
        size = ctypes.c_size_t()
        parts = []
        for token in tokens:
            text = self.library.tokenizer_token_bytes(self.handle, ctypes.c_int32(token), ctypes.byref(size))
            parts.append(ctypes.string_at(text, size.value))
        return b"".join(parts)

    def cut(self, data):
        return self.library.tokenizer_cut(self.handle, data, ctypes.c_size_t(len(data)))

    def vocab_size(self):
        return self.library.tokenizer_vocab_size(self.handle)


def build_library(folder):
    path = Path(folder) / "tokenizer.so"
    files = [str(ROOT / "llmc" / f"{name}.c") for name in SOURCES]
    subprocess.run(["cc", "-std=c11", "-D_GNU_SOURCE", "-O3", "-shared", "-fPIC", "-I", str(ROOT), *files, "-o", path],
                   check=True)
    library = ctypes.CDLL(str(path))
    library.error_message.restype = ctypes.c_char_p
    library.tokenizer_token_bytes.restype = ctypes.c_void_p
    library.tokenizer_cut.restype = ctypes.c_size_t
    library.free.argtypes = [ctypes.c_void_p]
    return library


def find_vocabulary(folder):
    for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (folder / vocab).exists():
            return folder / vocab, folder / merges
    sys.exit(f"{folder}: no vocab.json with merges.txt")


class Checker:
    def __init__(self, natives, tik, hf):
        self.natives, self.tik, self.hf = natives, tik, hf
        self.passed = self.failed = 0
        self.hf_differs = hugging_face_differences(hf)

    def report(self, name, failures, detail):
        self.passed += not failures
        self.failed += bool(failures)
        print(f"{'FAILED' if failures else 'ok':6} {name}: {detail}" + "".join(f"\n    {f}" for f in failures[:5]))

    def compare(self, name, texts):
        """Every native reader's tokens against both references'."""
        failures, size, with_hf = [], 0, 0
        for text in texts:
            data = text.encode()
            size += len(data)
            expected = self.tik.encode_ordinary(text)
            for form, native in self.natives.items():
                if native.encode(data) != expected:
                    failures.append(f"{form} differs from tiktoken: {text[:60]!r}")
            if self.hf_differs.isdisjoint(text):
                with_hf += len(data)
                if self.hf.encode(text, add_special_tokens=False).ids != expected:
                    failures.append(f"Hugging Face differs from tiktoken: {text[:60]!r}")
        self.report(name, failures, f"{len(texts)} texts, {size / 1e6:.1f} MB ({with_hf / 1e6:.1f} MB of it with "
                                    "Hugging Face too)")

    def check_cuts(self, name, texts):
        native, failures, cuts = next(iter(self.natives.values())), [], 0
        for data in texts:
            at = native.cut(data)
            cuts += at > 0
            if at > 0 and native.encode(data[:at]) + native.encode(data[at:]) != native.encode(data):
                failures.append(f"cut at {at}: {data[:60]!r}")
        self.report(name, failures, f"{cuts} cuts in {len(texts)} texts")

    def check_bytes(self, name, texts):
        native, failures = next(iter(self.natives.values())), []
        for data in texts:
            if native.decode(native.encode(data)) != data:
                failures.append(f"does not come back: {data[:60]!r}")
        self.report(name, failures, f"{len(texts)} byte strings")


def tiktoken_class(pattern, text):
    """The characters of the text that match, by an encoding of nothing else."""
    words = tiktoken.Encoding("class", pat_str=pattern, special_tokens={},
                              mergeable_ranks={bytes([i]): i for i in range(256)})
    return set(words.decode(words.encode_ordinary(text)))


def all_characters():
    return [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]


def hugging_face_differences(hf):
    """Characters whose class is another in Hugging Face's regular expressions than in tiktoken's."""
    characters = [c for c in all_characters() if c < "\U00040000"]
    text = "".join(characters)
    mates = dict.fromkeys(characters, "!")
    mates.update(dict.fromkeys(tiktoken_class(r"\p{L}", text), "a"))
    mates.update(dict.fromkeys(tiktoken_class(r"\p{N}", text), "1"))
    mates.update(dict.fromkeys(tiktoken_class(r"\s", text), "\n"))
    words = hf.pre_tokenizer.pre_tokenize_str  # two characters of one class are one word
    return {c for c in characters if len(words(mates[c] + c)) != 1}


def read_texts(paths, limit):
    """The files below the paths that are UTF-8, unpacked, up to `limit` bytes."""
    texts, size = [], 0
    for path in paths:
        for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
            if size >= limit:
                return texts
            try:
                data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
                texts.append(data.decode())
            except (UnicodeDecodeError, OSError, EOFError):
                continue
            size += len(data)
    return texts


def script_texts(rng, count):
    texts = []
    for _ in range(count):
        words = []
        for _ in range(rng.randint(1, 40)):
            first, last = rng.choice(list(SCRIPTS.values()))
            word = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 9)))
            words.append(word + rng.choice(["", "'s", "'ll", "'t ", "12", ",", ".\n", "\u3000", "\u0301", " ", "  "]))
        texts.append(rng.choice(["", " "]).join(words))
    return texts


def random_texts(rng, count):
    """Short texts of few different characters, which hit the corners of the pattern."""
    corners = "aA1 \t\n\r\u00a0\u3000\u200b'stdmlver!-_\u00e9\u4e2d\u0301\u00b2\u0660\U0001f600\x00\x1c\x7f\u0085"
    return ["".join(rng.choice(corners) for _ in range(rng.randint(0, 30))) for _ in range(count)]


def character_texts():
    characters = all_characters()
    return ["".join(f"x{c}1{c} {c}  {c}!{c}" for c in characters[i:i + 64]) for i in range(0, len(characters), 64)]


def write_formats(folder, vocab, merges, ranks):
    """Hugging Face's tokenizer, and the vocabulary in each format: name -> path."""
    (folder / "both").mkdir()
    (folder / "both" / "vocab.json").write_bytes(vocab.read_bytes())
    (folder / "both" / "merges.txt").write_bytes(merges.read_bytes())
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda r: r[1])]
    (folder / "ranks.tiktoken").write_bytes(b"".join(lines))
    whole, hf = (tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges))) for _ in range(2))
    for tokenizer in (whole, hf):
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.add_special_tokens(["<|endoftext|>"])  # hf has none: like tokenizer_encode, it takes all as text
    whole.save(str(folder / "tokenizer.json"))
    return hf, {"vocab.json": folder / "both", "tokenizer.json": folder / "tokenizer.json",
                "rank file": folder / "ranks.tiktoken"}


def measure(name, encode, texts, size):
    """The best of three, so that a machine that is busy with other things disturbs less."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        for text in texts:
            encode(text)
        seconds.append(time.process_time() - start)
    print(f"       {name:24} {size / min(seconds) / 1e6:8.1f} MB/s")
    return size / min(seconds)


def measure_all(checker, texts):
    texts = [text[:1 << 18] for text in texts]
    data = [text.encode() for text in texts]
    size = sum(map(len, data))
    print(f"speed on {size / 1e6:.1f} MB, one thread, processor time:")
    native = next(iter(checker.natives.values()))
    count, tokens = ctypes.c_size_t(), ctypes.POINTER(ctypes.c_int32)()

    def encode_native(text):
        native.library.tokenizer_encode(
            native.handle, text, ctypes.c_size_t(len(text)), ctypes.byref(tokens), ctypes.byref(count))
        native.library.free(tokens)

    ours = measure("flashgpt", encode_native, data, size)
    theirs = measure("tiktoken", checker.tik.encode_ordinary, texts, size)
    measure("Hugging Face tokenizers", lambda text: checker.hf.encode(text, add_special_tokens=False), texts, size)
    checker.report("speed", [] if ours >= theirs else ["slower than tiktoken"], f"{ours / theirs:.1f} x tiktoken's")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", type=Path, help="folder with vocab.json and merges.txt")
    parser.add_argument("--text", type=Path, action="append", default=[], help="more files and folders of UTF-8 text")
    parser.add_argument("--megabytes", type=float, default=100, help="of man pages, and of such text, at most")
    parser.add_argument("--random", type=int, default=100000, help="number of random byte strings and texts")
    parser.add_argument("--seed", type=int, default=1337)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    vocab, merges = find_vocabulary(arguments.vocabulary)
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=str(merges), encoder_json_file=str(vocab))
    tik = tiktoken.Encoding("checked", pat_str=PATTERN, mergeable_ranks=ranks,
                            special_tokens={"<|endoftext|>": json.loads(vocab.read_text())["<|endoftext|>"]})
    with tempfile.TemporaryDirectory() as folder:
        hf, paths = write_formats(Path(folder), vocab, merges, ranks)
        library = build_library(folder)
        natives = {form: Native(library, path) for form, path in paths.items()}
        checker = Checker(natives, tik, hf)
        print(f"{natives['vocab.json'].vocab_size()} tokens; tiktoken {tiktoken.__version__}, tokenizers "
              f"{tokenizers.__version__}, which has another class for {len(checker.hf_differs)} characters")
        run_checks(checker, rng, ranks, arguments)
    print(f"{checker.passed} passed, {checker.failed} failed")
    sys.exit(checker.failed > 0)


def run_checks(checker, rng, ranks, arguments):
    native = checker.natives["vocab.json"]
    wrong = [token for token, rank in ranks.items()
             if native.encode(token) != checker.tik._encode_bytes(token) or native.decode([rank]) != token]
    checker.report("every token's own bytes", wrong, f"{len(ranks)} tokens")
    checker.compare("every Unicode character", character_texts())
    budget = arguments.megabytes * 1e6
    man = read_texts([Path("/usr/share/man")], budget)
    source = read_texts([*(ROOT / name for name in ("llmc", "attention", "scripts", "test", "README.md"))], budget)
    checker.compare("man pages", man)
    checker.compare("source code", source)
    if arguments.text:
        checker.compare("given texts", read_texts(arguments.text, budget))
    scripts = script_texts(rng, arguments.random // 20)
    checker.compare(f"words in {len(SCRIPTS)} scripts", scripts)
    corners = random_texts(rng, arguments.random)
    checker.compare("random characters", corners)
    checker.compare("long words", ["x" * 5000, "ab" * 70000, " " * 9999 + "x", "\u4e2d" * 3000, "=-" * 3000,
                                   "".join(rng.choice("abcdefgh") for _ in range(50000))])
    noise = [rng.randbytes(rng.randint(0, 60)) for _ in range(arguments.random)]
    noise += [bytes(rng.choice(b"a 1'!\xc3\xa9\xe4\xb8\xad\xff\n") for _ in range(20)) for _ in range(arguments.random)]
    checker.check_bytes("random bytes", noise)
    checker.check_cuts("cuts", noise + [text.encode() for text in corners + scripts])
    measure_all(checker, man[:2000] + source)


if __name__ == "__main__":
    main()
