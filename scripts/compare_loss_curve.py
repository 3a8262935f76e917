#!/usr/bin/env python3
"""Does train_gpt learn as PyTorch does? Trains one GPT with both and compares the loss of every step.

Both start from the same weights: PyTorch draws them as GPT-2 does and writes them as a Hugging Face folder,
from which train_gpt starts with --init-from. Both read the same windows of the same shards in file order, and
take the same AdamW steps: gradients summed over micro-batches, clipped by their global norm, decay of the
matrices, a cosine schedule. On a GPU the PyTorch side is what its users write: fp32 weights under bf16
autocast, torch.compile, scaled_dot_product_attention, fused AdamW. On the CPU both compute in fp32.

Prints some steps side by side, then the mean of the difference (train_gpt - PyTorch), which shows a bias, and
the mean of its absolute value, which also has the noise of rounding. Exit code 1 if one is over its limit.

On a GPU, any shards will do: those that `make train` wrote, too, whose bytes are valid GPT-2 tokens:
  scripts/compare_loss_curve.py --data 'data/tokens/this-repository/train_*.bin' --out loss-curve.json
The same in little, on the CPU, in a minute:
  scripts/compare_loss_curve.py --model tiny --steps 50 --micro-batch 2 --global-batch 512 --device cpu \\
      --data 'data/tokens/this-repository/train_*.bin'
"""

import argparse
import contextlib
import glob
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from needs import needs

needs("numpy", "torch", "safetensors")

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from reference_model import GPT, adamw_groups
from trainer import TrainerError, presets, train

SHARD_HEADER_BYTES = 1024
BETAS, EPSILON, WEIGHT_DECAY, CLIP, FINAL_LEARNING_RATE = (0.9, 0.95), 1e-8, 0.1, 1.0, 0.1
PROGRESS_STEPS = 25


def draw_weights(model, seed):
    """N(0, 0.02), by 1/sqrt(2 layers) smaller for projections into the residual; LayerNorm 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            into_residual = name.endswith("c_proj.weight")
            deviation = 0.02 / math.sqrt(2 * model.config.layers) if into_residual else 0.02
            torch.nn.init.normal_(parameter, 0.0, deviation, generator=generator)
        else:
            torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


def write_hugging_face(model, folder):
    """model.safetensors and config.json; Hugging Face's GPT-2 keeps the weights of layers as (in, out)."""
    is_conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    tensors = {
        f"transformer.{name}": (p.detach().T if name.endswith(is_conv1d) else p.detach()).contiguous()
        for name, p in model.named_parameters()
    }
    c = model.config
    config = {
        "model_type": "gpt2", "n_layer": c.layers, "n_embd": c.channels, "n_head": c.heads,
        "n_positions": c.seq_len, "vocab_size": c.vocab_size,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


class Windows:
    """The training sequences of shards in file order, as data/README.md defines them."""

    def __init__(self, pattern, seq_len):
        self.seq_len = seq_len
        self.windows = []  # (shard, first token)
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise FileNotFoundError(f"--data: no file matches '{pattern}'")
        for path in paths:
            shard = np.memmap(path, "<u2", "r", offset=SHARD_HEADER_BYTES)
            last = len(shard) - 1 - seq_len
            self.windows += [(shard, min(first, last)) for first in range(0, len(shard) - 1, seq_len)]

    def batch(self, position, count):
        """inputs, targets (count, T) of the sequences from `position` on; epoch follows epoch"""
        chosen = [self.windows[(position + i) % len(self.windows)] for i in range(count)]
        tokens = np.stack([shard[first : first + self.seq_len + 1] for shard, first in chosen])
        tokens = torch.from_numpy(tokens.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]


def learning_rate(arguments, step):
    """llmc/schedule.c's cosine: the peak in the warm-up's last step, FINAL_LEARNING_RATE of it at the end."""
    peak, warmup, last = arguments.learning_rate, arguments.warmup_steps, arguments.steps - 1
    if step < warmup:
        return peak * (step + 1) / warmup
    start = max(warmup - 1, 0)
    if step <= start:
        return peak
    cosine = 0.5 * (1 + math.cos(math.pi * (step - start) / (last - start)))
    return peak * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


def train_pytorch(model, arguments):
    """The loss of every step."""
    torch.set_float32_matmul_precision("high")
    device, micro_batch, seq_len = arguments.device, arguments.micro_batch, model.config.seq_len
    micro_steps = arguments.global_batch // (micro_batch * seq_len)
    bf16 = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()
    windows, position, losses = Windows(arguments.data, seq_len), 0, []
    model.to(device)
    optimizer = torch.optim.AdamW(adamw_groups(model, WEIGHT_DECAY), betas=BETAS, eps=EPSILON, fused=True)

    @torch.compile(disable=device == "cpu")
    def loss_of(inputs, targets):
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    for step in range(arguments.steps):
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=device)
        for _ in range(micro_steps):
            inputs, targets = windows.batch(position, micro_batch)
            position += micro_batch
            with bf16:
                loss = loss_of(inputs.to(device), targets.to(device)) / micro_steps
            loss.backward()
            step_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(arguments, step)
        optimizer.step()
        losses.append(step_loss.item())
        if (step + 1) % PROGRESS_STEPS == 0:
            print(f"PyTorch step {step + 1}/{arguments.steps}  loss {losses[-1]:.4f}", file=sys.stderr)
    return losses


def train_train_gpt(arguments, initial, run_dir):
    """The loss of every step."""
    options = {
        "init-from": initial, "model": arguments.model, "seq-len": arguments.seq_len,
        "micro-batch": arguments.micro_batch, "global-batch": arguments.global_batch,
        "train-data": arguments.data, "shuffle": "false", "steps": arguments.steps,
        "learning-rate": arguments.learning_rate, "schedule": "cosine",
        "warmup-steps": arguments.warmup_steps, "final-learning-rate": FINAL_LEARNING_RATE,
        "beta1": BETAS[0], "beta2": BETAS[1], "epsilon": EPSILON,
        "weight-decay": WEIGHT_DECAY, "clip": CLIP, "attention": arguments.attention,
        "device": arguments.device, "checkpoint-every": 0, "log-every": PROGRESS_STEPS,
    }
    steps = train(arguments.trainer, run_dir, options, output=sys.stderr)
    skipped = [step["step"] for step in steps if step["skipped"]]
    if skipped:
        raise TrainerError(f"train_gpt skipped step {skipped[0]}: the curves are not of the same run")
    return [step["loss"] for step in steps]


def report(arguments, ours, theirs):
    """Prints the comparison; whether it is within the limits."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    print("|  step | train_gpt | PyTorch | difference |\n|------:|----------:|--------:|-----------:|")
    for step in sorted({1, arguments.steps, *range(PROGRESS_STEPS, arguments.steps, PROGRESS_STEPS)}):
        a, b = ours[step - 1], theirs[step - 1]
        print(f"| {step:5} | {a:9.4f} | {b:7.4f} | {a - b:+10.5f} |")
    signed = sum(differences) / len(differences)
    absolute = sum(map(abs, differences)) / len(differences)
    # said so that a loss that is not a number is not within the limits
    good = abs(signed) < arguments.max_signed and absolute < arguments.max_absolute
    print(f"\nover {len(differences)} steps, train_gpt - PyTorch:\n"
          f"mean signed difference    {signed:+.3g}  (limit {arguments.max_signed:g} either way)\n"
          f"mean absolute difference  {absolute:.3g}  (limit {arguments.max_absolute:g})\n"
          f"{'the curves agree' if good else 'the curves do NOT agree'}")
    if arguments.out:
        settings = vars(arguments) | {"out": str(arguments.out)}
        result = {"settings": settings, "pytorch_version": torch.__version__, "mean_signed": signed,
                  "mean_absolute": absolute, "agree": good, "train_gpt_loss": ours, "pytorch_loss": theirs}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return good


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", metavar="GLOB", required=True, help="token shards, in quotes")
    add("--model", metavar="PRESET", default="gpt2-124m", help="of train_gpt (default: gpt2-124m)")
    add("--steps", metavar="N", type=int, default=300, help="default: 300")
    add("--seq-len", metavar="TOKENS", type=int, help="default: the preset's")
    add("--micro-batch", metavar="SEQUENCES", type=int, default=16, help="of both (default: 16)")
    add("--global-batch", metavar="TOKENS", type=int, default=65536, help="of a step (default: 65536)")
    add("--learning-rate", metavar="X", type=float, help="the highest (default: the preset's)")
    add("--warmup-steps", metavar="N", type=int, help="default: a tenth of all")
    add("--seed", metavar="N", type=int, default=1, help="of the initial weights (default: 1)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of both (default: cuda)")
    add("--attention", metavar="NAME", default="auto", help="train_gpt's kernel (default: auto)")
    add("--trainer", metavar="PROGRAM", default="./train_gpt", help="default: ./train_gpt")
    add("--max-signed", metavar="X", type=float, default=0.005, help="default: 0.005")
    add("--max-absolute", metavar="X", type=float, default=0.02, help="default: 0.02")
    add("--out", metavar="FILE", type=Path, help="write settings, curves and result there, as JSON")
    return parser, parser.parse_args()


def complete(parser, arguments):
    """Fills in what the preset decides, and checks; returns the model's shape."""
    known = presets(arguments.trainer)
    if arguments.model not in known:
        parser.error(f"--model {arguments.model} is none of: {' '.join(known)}")
    config, preset_rate = known[arguments.model]
    config = replace(config, seq_len=arguments.seq_len or config.seq_len)
    arguments.seq_len = config.seq_len
    arguments.learning_rate = arguments.learning_rate or preset_rate
    if arguments.warmup_steps is None:
        arguments.warmup_steps = arguments.steps // 10
    if arguments.global_batch % (arguments.micro_batch * config.seq_len) != 0:
        parser.error(f"--global-batch {arguments.global_batch} is not a multiple of a micro-batch of "
                     f"{arguments.micro_batch} x {config.seq_len} tokens")
    return config


def main():
    parser, arguments = parse_arguments()
    try:
        config = complete(parser, arguments)
        model = GPT(config)
        draw_weights(model, arguments.seed)
        with tempfile.TemporaryDirectory() as folder:
            write_hugging_face(model, Path(folder) / "initial")
            ours = train_train_gpt(arguments, Path(folder) / "initial", Path(folder) / "run")
        theirs = train_pytorch(model, arguments)
        return 0 if report(arguments, ours, theirs) else 1
    except (TrainerError, OSError) as error:
        sys.exit(f"compare_loss_curve.py: {error}")


if __name__ == "__main__":
    sys.exit(main())
