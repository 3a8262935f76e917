#!/usr/bin/env python3
"""Loads a checkpoint of train_gpt with Hugging Face's GPT2LMHeadModel, as it is, and checks

  - that every weight finds its place: none missing, none left over, none of another shape;
  - that the logits on random tokens are those of scripts/reference_model.py, the model that train_gpt's
    golden tests are made with;
  - with --val-data, that the loss on those shards is the one that train_gpt logged at the checkpoint's step.
    The run must have measured all of them (--eval-batches 0) at that step.

Prints one line a check; exit code 1 if one fails. Grouped-query attention is not part of GPT2LMHeadModel:
such a checkpoint fails at the first check.
"""

import argparse
import glob
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2LMHeadModel
from transformers.utils import logging

from reference_model import load_checkpoint, token_losses

SHARD_HEADER_BYTES = 1024


def check(good, text):
    print(f"{'ok' if good else 'FAILED'}  {text}")
    return good


def load(checkpoint):
    model, report = GPT2LMHeadModel.from_pretrained(
        checkpoint, dtype=torch.float64, ignore_mismatched_sizes=True, output_loading_info=True
    )
    left = {kind: names for kind, names in report.items() if names}
    good = check(not left, f"weights in place{f', but for {left}' if left else ''}")
    return model.eval(), good


@torch.no_grad()
def check_logits(model, checkpoint):
    reference = load_checkpoint(checkpoint)
    config = reference.config
    tokens = torch.randint(config.vocab_size, (2, config.seq_len), generator=torch.Generator().manual_seed(1))
    difference = (model(tokens).logits - reference(tokens)).abs().max().item()
    return check(difference < 1e-9, f"logits are the reference's, largest difference {difference:.1e}")


@torch.no_grad()
def loss_of_shards(model, pattern):
    """Mean loss of all tokens of the shards but their first, predicted in windows of the model's length."""
    total, counted, seq_len = 0.0, 0, model.config.n_positions
    paths = sorted(glob.glob(pattern))
    if not paths:
        sys.exit(f"--val-data: no file matches '{pattern}'")
    for path in paths:
        tokens = torch.from_numpy(np.fromfile(path, "<u2", offset=SHARD_HEADER_BYTES).astype(np.int64))
        last = len(tokens) - 1  # this token is only a target
        for first in range(0, last, seq_len):
            begin = min(first, last - seq_len)  # the last window is moved back to end with the shard
            logits = model(tokens[None, begin : begin + seq_len]).logits
            losses = token_losses(logits, tokens[None, begin + 1 : begin + seq_len + 1])
            total += losses[:, first - begin :].sum().item()
            counted += seq_len - (first - begin)
    return total / counted, counted


def check_logged_loss(model, checkpoint, pattern):
    step = json.loads((checkpoint / "state.json").read_text())["step"]
    log = checkpoint.parent.parent / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    logged = [line for line in lines if line["type"] == "eval" and line["step"] == step]
    if not logged:
        return check(False, f"{log} has no evaluation at step {step}")
    loss, counted = loss_of_shards(model, pattern)
    if counted != logged[-1]["tokens"]:
        evaluated = logged[-1]["tokens"]
        return check(False, f"step {step} was evaluated on {evaluated} tokens, the shards have {counted}")
    return check(abs(loss - logged[-1]["loss"]) < 1e-5,
                 f"loss {loss:.6f} over {counted} tokens, train_gpt logged {logged[-1]['loss']:.6f}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a folder runs/NAME/checkpoints/step-NNNNNNNN")
    parser.add_argument("--val-data", metavar="GLOB", help="the run's --val-data")
    arguments = parser.parse_args()

    checkpoint = arguments.checkpoint.resolve()
    logging.disable_progress_bar()
    model, good = load(checkpoint)
    if good:
        good = check_logits(model, checkpoint)
        if arguments.val_data:
            good = check_logged_loss(model, checkpoint, arguments.val_data) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
