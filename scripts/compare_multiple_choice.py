#!/usr/bin/env python3
"""Multiple choice in train_gpt against PyTorch: a random GPT-2 and random questions, which both answer.

PyTorch takes one ending at a time, in float64, and no batches; train_gpt takes batches of several sizes. The
numbers of right answers must be equal, by the endings' loss and by their loss per token.

--golden FOLDER writes a small model, questions and answers there instead: the test's golden files
(scripts/compare_multiple_choice.py --golden test/golden/choices --questions 60)."""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from needs import needs

needs("torch", "transformers")

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

WORDS = "the a man woman dog sits stands runs over under with café Straße naïve 日本 and then looks 7 42 away . , ! ?"
END_OF_TEXT = 256


def make_model(seed, positions):
    torch.manual_seed(seed)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=positions, vocab_size=257,
                        initializer_range=0.4, bos_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT)
    return GPT2LMHeadModel(config).eval()


def make_questions(count, draw, positions):
    def text(least, most):
        return " ".join(draw.choice(WORDS.split()) for _ in range(draw.randint(least, most)))

    for i in range(count):
        long = i % 10 == 9  # loses its beginning
        context = "" if i % 25 == 7 else text(positions // 4, positions // 2) if long else text(1, 6)
        endings = sorted({text(1, 5) for _ in range(draw.choice([2, 3, 4, 4, 5]))} | {"a last one"})  # all different
        draw.shuffle(endings)
        label = draw.randrange(len(endings))
        yield {"ind": i, "ctx": context, "endings": endings, "label": str(label) if i % 3 == 0 else label}


@torch.no_grad()
def losses_of_ending(model, context, ending):
    """Of each of the ending's tokens that the model's length leaves."""
    context, ending = list(context.encode()) or [END_OF_TEXT], list((" " + ending).encode())
    tokens = (context + ending)[-(model.config.n_positions + 1):]
    logits = model(torch.tensor([tokens[:-1]])).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    return losses[-len(ending):]


def answer(model, questions):
    """Right answers by the sum of the losses, and by their mean."""
    by_sum = by_mean = 0
    for question in questions:
        losses = [losses_of_ending(model, question["ctx"], ending) for ending in question["endings"]]
        label = int(question["label"])
        by_sum += min(range(len(losses)), key=lambda i: losses[i].sum().item()) == label
        by_mean += min(range(len(losses)), key=lambda i: losses[i].mean().item()) == label
    return by_sum, by_mean


def answer_with_trainer(program, folder, questions, count, options):
    """The same from what train_gpt prints."""
    command = [program, "--evaluate", f"--init-from={folder}", f"--multiple-choice={questions}",
               "--tokenizer=bytes", *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"([\d.]+)% right, ([\d.]+)% by loss per token \((\d+) questions", ended.stdout)
    if ended.returncode != 0 or found is None or int(found[3]) != count:
        sys.exit(f"FAILED  {ended.stderr.strip() or ended.stdout.strip()}")
    return tuple(round(float(share) * count / 100) for share in found.groups()[:2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-gpt", default="./train_gpt", metavar="PROGRAM")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--golden", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()

    logging.disable_progress_bar()
    positions = 64
    model = make_model(arguments.seed, positions)
    questions = list(make_questions(arguments.questions, random.Random(arguments.seed), positions))
    with tempfile.TemporaryDirectory() as work:
        folder = arguments.golden or Path(work)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        file = folder / "questions.jsonl"
        file.write_text("".join(json.dumps(q, ensure_ascii=False) + "\n" for q in questions))
        expected = answer(model.double(), questions)
        if arguments.golden:
            (folder / "answers").write_text(f"{len(questions)} {expected[0]} {expected[1]}\n")
            return 0
        good = True
        for batch in 1, 3, 32:
            got = answer_with_trainer(arguments.train_gpt, folder, file, len(questions),
                                      [f"--micro-batch={batch}", "--device=cpu"])
            good = good and got == expected
            print(f"{'ok' if got == expected else 'FAILED'}  {len(questions)} questions in batches of {batch}: "
                  f"train_gpt {got[0]} right, {got[1]} by loss per token; PyTorch {expected[0]}, {expected[1]}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
