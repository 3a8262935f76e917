#!/usr/bin/env python3
"""Are train_gpt's matrix products as fast as PyTorch's? And do its other kernels reach the memory's speed?

train_gpt runs whole steps of a model on random tokens with --profile, which times every product between events on
the GPU's stream. PyTorch then computes the same products with torch.matmul, in bf16 on random data, in the order of
a step, each between events as well: forward and backward of every layer and of the head, with weights of its own
for each layer. What train_gpt's products do beyond that stays in their time: they add the bias, multiply by GELU's
derivative, and add weight gradients up in fp32. --turns repeats both in alternation, because a GPU's speed drifts
with its temperature; the tables have the sums of all turns.

The second table has the profile's other rows that move bytes, and what share of a copy's bandwidth they reach.

Exit code 1 if all products together reach less than --least of PyTorch's rate.

  scripts/compare_products.py --model gpt3-1.3b --seq-len 2048 --micro-batch 16 --attention standard
  scripts/compare_products.py --model gpt3-2.7b --seq-len 2048 --micro-batch 8
"""

import argparse
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from trainer import TrainerError, presets, train

LAYERS = ("qkv", "projection", "mlp up", "mlp down", "head")
PASSES = ("forward", "input gradient", "weight gradient")


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
    """Milliseconds of each product with torch.matmul: {"qkv forward": mean of all calls, ...}"""
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    features = shapes(config)
    weights, inputs, gradients = {}, {}, {}
    for layer, (fan_in, fan_out) in features.items():
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
    torch.cuda.synchronize()
    spans.clear()
    for _ in range(repeats):
        micro_step()
    torch.cuda.synchronize()
    times = {}
    for name, begin, end in spans:
        times.setdefault(name, []).append(begin.elapsed_time(end))
    return {name: sum(values) / len(values) for name, values in times.items()}


def pytorch_turn(config, arguments):
    """In a process of its own: what it allocated is gone when train_gpt's turn comes."""
    rows = arguments.micro_batch * config.seq_len
    repeats = arguments.steps * arguments.global_batch // rows
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(pytorch_products, config, rows, repeats).result()


def print_products(config, arguments, ours, theirs):
    """Prints the table; returns the ratio of the rates of all products together."""
    print("| product | train_gpt TFLOP/s | torch.matmul TFLOP/s | ratio |\n|---|--:|--:|--:|")
    micro_steps = arguments.global_batch // (arguments.micro_batch * config.seq_len)
    all_flops = all_ours = all_theirs = 0
    for layer, (fan_in, fan_out) in shapes(config).items():
        for kind in PASSES:
            name = f"{layer} {kind}"
            calls = micro_steps * (1 if layer == "head" else config.layers)
            flops = 2 * calls * arguments.micro_batch * config.seq_len * fan_in * fan_out
            our_ms = sum(rows[name]["ms"] for rows, _, _ in ours) / len(ours)
            their_ms = calls * sum(times[name] for times in theirs) / len(theirs)
            print(f"| {name} | {flops / our_ms / 1e9:.0f} | {flops / their_ms / 1e9:.0f} "
                  f"| {their_ms / our_ms:.3f} |")
            all_flops, all_ours, all_theirs = all_flops + flops, all_ours + our_ms, all_theirs + their_ms
    print(f"| all products | {all_flops / all_ours / 1e9:.0f} | {all_flops / all_theirs / 1e9:.0f} "
          f"| {all_theirs / all_ours:.3f} |\n")
    return all_theirs / all_ours


def print_others(ours):
    step_ms = sum(step for _, _, step in ours) / len(ours)
    print(f"| kernel | ms of {step_ms:.1f} | GB/s | of copy |\n|---|--:|--:|--:|")
    products = [f"{layer} {kind}" for layer in LAYERS for kind in PASSES] + ["all products"]
    for name in ours[0][0]:
        if name in products:
            continue
        ms = sum(rows[name]["ms"] for rows, _, _ in ours) / len(ours)
        rate = sum(rows[name]["gbs"] or 0 for rows, _, _ in ours) / len(ours)
        copy = sum(gbs for _, gbs, _ in ours) / len(ours)
        print(f"| {name} | {ms:.2f} | " + (f"{rate:.0f} | {100 * rate / copy:.0f}% |" if rate else "- | - |"))


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
