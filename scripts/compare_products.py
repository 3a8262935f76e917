#!/usr/bin/env python3
"""Are train_gpt's matrix products as fast as PyTorch's? And do its other kernels reach the memory's speed?

train_gpt runs whole steps of a model on random tokens with --profile, which times every product between
events on the GPU's stream. PyTorch then computes the same products with torch.matmul, in bf16 on random
data, each between events as well: first in the order of a step, forward and backward of every layer (with
weights of its own) and of the head, without a pause, in which the GPU gets hot and slows down; then each
product alone, with a pause between two runs, of which the median counts. Whichever is faster is what
train_gpt's are compared with. What they do beyond a product stays in their time: they add the bias, multiply
by GELU's derivative, and add weight gradients up in fp32. --turns repeats both programs in alternation,
because a GPU's speed drifts; the tables have the means of all turns.

The second table has the profile's other rows that move bytes, and what share of a copy's bandwidth they
reach.

Exit code 1 if all products together reach less than --least of PyTorch's rate.

  scripts/compare_products.py --model gpt3-1.3b --seq-len 2048 --micro-batch 16 --attention standard
  scripts/compare_products.py --model gpt3-2.7b --seq-len 2048 --micro-batch 8
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from needs import needs
from trainer import TrainerError, presets, train

LAYERS = ("qkv", "projection", "mlp up", "mlp down", "head")
PASSES = ("forward", "input gradient", "weight gradient")
ALONE = 9  # runs of a product alone


def shapes(config):
    """{layer: (features in, features out)}; the head's vocabulary is padded as train_gpt pads it."""
    c, qkv = config.channels, (config.heads + 2 * config.kv_heads) * config.head_dim
    padded_vocab = -(-config.vocab_size // 128) * 128
    return dict(zip(LAYERS, ((c, qkv), (c, c), (c, 4 * c), (4 * c, c), (c, padded_vocab)), strict=True))


def profile(config, arguments):
    """What train_gpt's profile has of a step: {name: row}, a copy's GB/s, and the step's ms."""
    options = {
        "model": arguments.model, "seq-len": config.seq_len, "micro-batch": arguments.micro_batch,
        "global-batch": arguments.global_batch, "train-data": "synthetic", "checkpoint-every": 0,
        "attention": arguments.attention, "profile": arguments.steps, "steps": arguments.steps + 2,
    }
    with tempfile.TemporaryDirectory() as run_dir:
        (event,) = train(arguments.trainer, run_dir, options, timeout=arguments.timeout, event="profile")
    return {row["name"]: row for row in event["rows"]}, event["copy_gbs"], event["step_ms"]


def pytorch_products(config, rows, repeats):
    """Milliseconds of each product with torch.matmul: {"qkv forward": (in a step's order, alone), ...}"""
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    weights, inputs, gradients = {}, {}, {}
    for layer, (fan_in, fan_out) in shapes(config).items():
        count = 1 if layer == "head" else config.layers
        options = {"device": "cuda", "dtype": torch.bfloat16}
        weights[layer] = [0.02 * torch.randn(fan_out, fan_in, **options) for _ in range(count)]
        inputs[layer] = torch.randn(rows, fan_in, **options)
        gradients[layer] = torch.randn(rows, fan_out, **options)
    spans = []

    def timed(layer, index, kind):
        weight, x, gradient = weights[layer][index], inputs[layer], gradients[layer]
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        if kind == "forward":
            torch.matmul(x, weight.t())
        elif kind == "input gradient":
            torch.matmul(gradient, weight)
        else:
            torch.matmul(gradient.t(), x)
        end.record()
        spans.append((f"{layer} {kind}", begin, end))

    def collect():
        torch.cuda.synchronize()
        times = {}
        for name, begin, end in spans:
            times.setdefault(name, []).append(begin.elapsed_time(end))
        spans.clear()
        return times

    def micro_step():
        for index in range(config.layers):
            for layer in LAYERS[:-1]:
                timed(layer, index, "forward")
        for kind in PASSES:
            timed("head", 0, kind)
        for index in reversed(range(config.layers)):
            for layer in reversed(LAYERS[:-1]):
                timed(layer, index, "weight gradient")
                timed(layer, index, "input gradient")

    micro_step()
    collect()
    for _ in range(repeats):
        micro_step()
    in_step = collect()
    for layer in LAYERS:
        for kind in PASSES:
            for _ in range(ALONE):
                timed(layer, 0, kind)
                torch.cuda.synchronize()
    alone = collect()
    return {name: (statistics.mean(in_step[name]), statistics.median(alone[name])) for name in in_step}


def pytorch_turn(config, arguments):
    """In a process of its own: what it allocated is gone when train_gpt's turn comes."""
    rows = arguments.micro_batch * config.seq_len
    repeats = arguments.steps * arguments.global_batch // rows
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(pytorch_products, config, rows, repeats).result()


def print_products(config, arguments, ours, theirs):
    """Prints the table; returns the ratio of the rates of all products together."""
    print("| product | train_gpt TFLOP/s | torch.matmul, in a step's order | alone | ratio to the faster |\n"
          "|---|--:|--:|--:|--:|")
    rows = arguments.micro_batch * config.seq_len
    total = [0] * 4  # of all products: FLOP, and ms of each column

    def line(name, flops, our_ms, in_step_ms, alone_ms):
        rates = " | ".join(f"{flops / ms / 1e9:.0f}" for ms in (our_ms, in_step_ms, alone_ms))
        print(f"| {name} | {rates} | {min(in_step_ms, alone_ms) / our_ms:.3f} |")

    for layer, (fan_in, fan_out) in shapes(config).items():
        calls = arguments.global_batch // rows * (1 if layer == "head" else config.layers)
        for kind in PASSES:
            name = f"{layer} {kind}"
            columns = [2 * calls * rows * fan_in * fan_out]
            columns.append(statistics.mean(profiled[name]["ms"] for profiled, _, _ in ours))
            columns += [calls * statistics.mean(times[name][i] for times in theirs) for i in range(2)]
            line(name, *columns)
            total = [a + b for a, b in zip(total, columns, strict=True)]
    line("all products", *total)
    print()
    return min(total[2:]) / total[1]


def print_others(ours):
    step_ms = statistics.mean(ms for _, _, ms in ours)
    copy_gbs = statistics.mean(gbs for _, gbs, _ in ours)
    print(f"| other kernels | ms of {step_ms:.1f} | GB/s | of a copy's |\n|---|--:|--:|--:|")
    products = [f"{layer} {kind}" for layer in LAYERS for kind in PASSES] + ["all products"]
    for name in ours[0][0]:
        if name not in products:
            ms = statistics.mean(rows[name]["ms"] for rows, _, _ in ours)
            gbs = statistics.mean(rows[name]["gbs"] or 0 for rows, _, _ in ours)
            reached = f"{gbs:.0f} | {100 * gbs / copy_gbs:.0f}%" if gbs else "- | -"
            print(f"| {name} | {ms:.2f} | {reached} |")


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", metavar="PRESET", default="gpt3-1.3b", help="of train_gpt (default: gpt3-1.3b)")
    add("--seq-len", metavar="TOKENS", type=int, help="default: the preset's")
    add("--micro-batch", metavar="SEQUENCES", type=int, default=16, help="default: 16")
    add("--global-batch", metavar="TOKENS", type=int, default=65536, help="of a step (default: 65536)")
    add("--attention", metavar="NAME", default="auto", help="train_gpt's kernel (default: auto)")
    add("--steps", metavar="N", type=int, default=5, help="that are measured in a turn (default: 5)")
    add("--turns", metavar="N", type=int, default=2, help="of each program (default: 2)")
    add("--least", metavar="X", type=float, default=0.97, help="ratio that is asked for (default: 0.97)")
    add("--timeout", metavar="SECONDS", type=float, default=300, help="of train_gpt's turn (default: 300)")
    add("--trainer", metavar="PROGRAM", default="./train_gpt", help="default: ./train_gpt")
    return parser, parser.parse_args()


def main():
    parser, arguments = parse_arguments()
    needs("torch")
    try:
        known = presets(arguments.trainer)
        if arguments.model not in known:
            parser.error(f"--model {arguments.model} is none of: {' '.join(known)}")
        config = known[arguments.model][0]
        config = replace(config, seq_len=arguments.seq_len or config.seq_len)
        if arguments.global_batch % (arguments.micro_batch * config.seq_len) != 0:
            parser.error(f"--global-batch {arguments.global_batch} is not a multiple of a micro-batch of "
                         f"{arguments.micro_batch} x {config.seq_len} tokens")
        ours, theirs = [], []
        for _ in range(arguments.turns):
            ours.append(profile(config, arguments))
            theirs.append(pytorch_turn(config, arguments))
    except TrainerError as error:
        sys.exit(f"compare_products.py: {error}")
    ratio = print_products(config, arguments, ours, theirs)
    print_others(ours)
    return 0 if ratio >= arguments.least else 1


if __name__ == "__main__":
    sys.exit(main())
