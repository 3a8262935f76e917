#!/usr/bin/env python3
"""Times a training step on the CPU, train_gpt's against PyTorch's: gpt2-124m, 4 sequences of 64 tokens, fp32.

Both do the same work: forward, backward, clipping by the global norm, AdamW (PyTorch's fused one). They take
turns, because a machine's speed changes over minutes, and each turn's first steps are not counted. Prints the
median and the fastest step of each and the ratio of the medians; exit code 1 if it is over --limit.

Build train_gpt with OpenBLAS first. Other work on the machine spoils the result; where there is some, run the
whole script with real-time priority: chrt -f 1 scripts/compare_cpu_step.py
"""

import argparse
import statistics
import sys
import tempfile
import time

from needs import needs

needs("torch")

import torch
from torch.nn import functional as F

from reference_model import GPT, adamw_groups
from trainer import Config, TrainerError, train

BATCH, SEQ_LEN = 4, 64
GPT2_124M = Config(layers=12, channels=768, heads=12, kv_heads=12, seq_len=SEQ_LEN, vocab_size=50257)
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
WARMUP_STEPS = 2


class PyTorch:
    def __init__(self, threads, compiled):
        torch.set_num_threads(threads)
        self.plain_model = GPT(GPT2_124M)
        self.model = torch.compile(self.plain_model) if compiled else self.plain_model
        self.optimizer = torch.optim.AdamW(
            adamw_groups(self.plain_model, WEIGHT_DECAY),
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPSILON,
            fused=True,
        )

    def step(self):
        tokens = torch.randint(GPT2_124M.vocab_size, (BATCH, SEQ_LEN + 1))
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.plain_model.parameters(), CLIP)
        self.optimizer.step()
        return loss.item()

    def turn(self, steps):
        milliseconds = []
        for _ in range(WARMUP_STEPS + steps):
            start = time.perf_counter()
            self.step()
            milliseconds.append(1000 * (time.perf_counter() - start))
        return milliseconds[WARMUP_STEPS:]


def train_gpt_turn(program, threads, steps):
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "model": "gpt2-124m", "seq-len": SEQ_LEN, "micro-batch": BATCH, "train-data": "synthetic",
            "steps": WARMUP_STEPS + steps, "learning-rate": LEARNING_RATE, "schedule": "constant",
            "beta1": BETAS[0], "beta2": BETAS[1], "epsilon": EPSILON, "weight-decay": WEIGHT_DECAY,
            "clip": CLIP, "checkpoint-every": 0, "device": "cpu", "threads": threads,
        }
        steps_done = train(program, folder, options)
    return [step["ms"] for step in steps_done[WARMUP_STEPS:]]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default="./train_gpt", help="default: ./train_gpt")
    parser.add_argument("--threads", type=int, default=2, help="of each (default: 2)")
    parser.add_argument("--turns", type=int, default=4, help="of each (default: 4)")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of a turn (default: 5)")
    parser.add_argument("--compile", action="store_true", help="let PyTorch compile its model")
    parser.add_argument("--limit", type=float, default=1.25, help="largest good ratio (default: 1.25)")
    arguments = parser.parse_args()

    pytorch = PyTorch(arguments.threads, arguments.compile)
    times = {"PyTorch": [], "train_gpt": []}
    for turn in range(arguments.turns):
        times["PyTorch"] += pytorch.turn(arguments.steps)
        try:
            times["train_gpt"] += train_gpt_turn(arguments.program, arguments.threads, arguments.steps)
        except TrainerError as error:
            sys.exit(f"{parser.prog}: {error}")
        print(f"turn {turn + 1} of {arguments.turns}", file=sys.stderr)
    for name, milliseconds in times.items():
        median, fastest = statistics.median(milliseconds), min(milliseconds)
        print(f"{name:10} median {median:7.1f} ms, fastest {fastest:7.1f} ms "
              f"({len(milliseconds)} steps, {arguments.threads} threads)")
    ratio = statistics.median(times["train_gpt"]) / statistics.median(times["PyTorch"])
    print(f"train_gpt takes {ratio:.2f} times as long as PyTorch (limit {arguments.limit})")
    return 0 if ratio <= arguments.limit else 1


if __name__ == "__main__":
    sys.exit(main())
