#!/usr/bin/env python3
"""Writes the golden values of test/test_bpe.c into test/golden/tokenizer/ by Hugging Face tokenizers and tiktoken.

text.txt is there; a vocabulary of 640 tokens is trained on it by tokenizers' BpeTrainer. Then follow
  vocab.json, merges.txt, tokenizer.json   as tokenizers writes them, <|endoftext|> being the last token
  ranks.tiktoken                           the same as tiktoken's ranks
  encodings.txt                            lines of a text's bytes in hexadecimal and its tokens, by tiktoken
"""

import base64
import random
from pathlib import Path

from needs import needs

needs("tiktoken", "tokenizers")

import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from check_tokenizer import PATTERN, random_texts, script_texts

FOLDER = Path(__file__).resolve().parent.parent / "test" / "golden" / "tokenizer"
VOCAB_SIZE = 640


def train(text):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1, min_frequency=2, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def byte_alphabet():
    """GPT-2's character of every byte -> the byte: printable ones stand for themselves, the others begin at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def main():
    text = (FOLDER / "text.txt").read_text()
    tokenizer = train(text)
    tokenizer.save(str(FOLDER / "tokenizer.json"), pretty=False)
    vocab = tokenizer.get_vocab()
    tokenizer.model.save(str(FOLDER))
    end = vocab.pop("<|endoftext|>")
    path = FOLDER / "vocab.json"  # tokenizers leaves added tokens out
    path.write_text(path.read_text().rstrip()[:-1] + f',"<|endoftext|>":{end}}}')
    alphabet = byte_alphabet()
    ranks = {bytes(alphabet[c] for c in token): rank for token, rank in vocab.items()}
    in_order = sorted(ranks, key=ranks.get)
    lines = [f"{base64.b64encode(token).decode()} {ranks[token]}\n" for token in in_order]
    (FOLDER / "ranks.tiktoken").write_text("".join(lines))
    tik = tiktoken.Encoding("golden", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end})
    rng = random.Random(1337)
    texts = text.splitlines() + random_texts(rng, 100) + script_texts(rng, 8) + [
        "ab" * 100, "the " * 60, "a" * 300, " " * 100 + "x", "the" * 100 + "!" * 50, "<|endoftext|>"]
    (FOLDER / "encodings.txt").write_text("".join(
        f"{t.encode().hex()} {' '.join(map(str, tik.encode_ordinary(t)))}\n" for t in texts if t))


if __name__ == "__main__":
    main()
