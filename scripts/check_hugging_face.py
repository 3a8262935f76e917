#!/usr/bin/env python3
"""Weights between train_gpt and Hugging Face, both ways. Prints one line a check; exit code 1 if one fails.

check_hugging_face.py CHECKPOINT loads a checkpoint of train_gpt with GPT2LMHeadModel, as it is, and checks

  - that every weight finds its place: none missing, none left over, none of another shape;
  - that the logits on random tokens are those of scripts/reference_model.py, the model that train_gpt's
    golden tests are made with;
  - with --val-data, that the loss on those shards is the one that train_gpt logged at the checkpoint's step.
    The run must have measured all of them (--eval-batches 0) at that step.

Grouped-query attention is not part of GPT2LMHeadModel: such a checkpoint fails at the first check.

check_hugging_face.py without one makes GPT-2s with random weights (a tiny one and 124M), saves them as
Hugging Face does - one file, several with an index, fp16, bf16, without the prefix "transformer.", with the
head stored - and checks

  - that train_gpt --export writes every tensor bit by bit as it was (fp16 and bf16: as its value in fp32);
  - that GPT2LMHeadModel loads what it wrote;
  - that the logits of both programs agree to 1e-4; train_gpt's come token by token, with its cache, from
    build/test/print_logits (make build/test/print_logits).
"""

import argparse
import glob
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from needs import needs

needs("numpy", "torch", "safetensors", "transformers")

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
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


# ---- round trips ----

SHAPES = {
    "tiny": dict(n_layer=3, n_embd=48, n_head=3, n_positions=64, vocab_size=301),
    "124M": dict(n_layer=12, n_embd=768, n_head=12, n_positions=1024, vocab_size=50257),
}


def save_with_head(model, folder):
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


FORMS = {
    "one file": (torch.float32, lambda model, folder: model.save_pretrained(folder)),
    "several files": (torch.float32, lambda model, folder: model.save_pretrained(folder, max_shard_size=shard(model))),
    "fp16, several files": (
        torch.float16, lambda model, folder: model.save_pretrained(folder, max_shard_size=shard(model))),
    "bf16": (torch.bfloat16, lambda model, folder: model.save_pretrained(folder)),
    "without the prefix": (torch.float32, lambda model, folder: model.transformer.save_pretrained(folder)),
    "head stored": (torch.float32, save_with_head),
}


def shard(model):
    """About four files."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) // 4


def run(command):
    ended = subprocess.run([str(word) for word in command], capture_output=True)
    if ended.returncode != 0:
        sys.exit(f"FAILED  {ended.stderr.decode().strip()}")
    return ended.stdout


@torch.no_grad()
def check_round_trip(name, form, programs):
    dtype, save = FORMS[form]
    end_of_text = SHAPES[name]["vocab_size"] - 1
    config = GPT2Config(**SHAPES[name], initializer_range=0.1, bos_token_id=end_of_text, eos_token_id=end_of_text)
    model = GPT2LMHeadModel(config).to(dtype)
    with tempfile.TemporaryDirectory() as work:
        there, back = Path(work) / "there", Path(work) / "back"
        save(model, there)
        files = len(list(there.glob("*.safetensors")))
        run([programs.train_gpt, f"--init-from={there}", f"--export={back}"])
        expected = {f"transformer.{key}": value.float() for key, value in model.transformer.state_dict().items()}
        got = load_file(back / "model.safetensors")
        same = got.keys() == expected.keys() and all(torch.equal(got[key], expected[key]) for key in got)
        good = check(same, f"{name}, {form} ({files} files): {len(expected)} tensors bit by bit")

        loaded, complete = load(back)
        tokens = torch.randint(SHAPES[name]["vocab_size"], (1, 40))
        printed = run([programs.print_logits, there, *tokens[0].tolist()])
        logits = torch.from_numpy(np.frombuffer(printed, np.float32).copy()).reshape(40, -1)
        difference = (loaded(tokens).logits[0] - logits).abs().max().item()
        return check(difference < 1e-4, f"{name}, {form}: logits differ by up to {difference:.1e}") and good and complete


def check_round_trips(programs):
    torch.manual_seed(1)
    results = [check_round_trip(name, form, programs) for name in SHAPES for form in FORMS]
    return all(results)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="?", help="a folder runs/NAME/checkpoints/step-NNNNNNNN")
    parser.add_argument("--val-data", metavar="GLOB", help="the run's --val-data")
    parser.add_argument("--train-gpt", default="./train_gpt", metavar="PROGRAM")
    parser.add_argument("--print-logits", default="build/test/print_logits", metavar="PROGRAM")
    arguments = parser.parse_args()

    logging.disable_progress_bar()
    if arguments.checkpoint is None:
        return 0 if check_round_trips(arguments) else 1
    checkpoint = arguments.checkpoint.resolve()
    model, good = load(checkpoint)
    if good:
        good = check_logits(model, checkpoint)
        if arguments.val_data:
            good = check_logged_loss(model, checkpoint, arguments.val_data) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
