#!/usr/bin/env python3
"""Writes the golden values of test/test_golden.c: two tiny GPTs with fixed weights, in float64 by PyTorch.

Each file test/golden/NAME.safetensors holds (S steps, B sequences, T positions, V vocabulary)
  metadata                     the model's shape and AdamW's settings
  weight/P                     every parameter before training, under its Hugging Face name, weights (out, in)
  tokens, targets              int32 (S, B, T); a target of -1 has no loss
  lengths                      int32 (S): step s trains on the first lengths[s] positions
  logits, token_losses         of step 0: (B, T, V) and (B, T)
  gradient/P                   of step 0's mean loss
  losses, norms                (S): mean loss and gradient norm before clipping of every step
  trained/P                    every parameter after the S steps of AdamW
"""

import argparse
import sys
from pathlib import Path

from needs import needs

needs("torch", "safetensors")

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from reference_model import GPT, adamw_groups, token_losses
from trainer import Config

MODELS = {
    "mha": Config(layers=2, channels=24, heads=3, kv_heads=3, seq_len=16, vocab_size=61),
    "gqa": Config(layers=2, channels=32, heads=4, kv_heads=2, seq_len=16, vocab_size=61),
}
BATCH = 3
STEPS = 10
SHORT_LENGTH = 11  # every other step
# the clip lies between the norms: some steps are clipped and some are not
ADAMW = {
    "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 2.5,
}


def draw_weights(model, generator):
    """Weights large enough that attention is far from uniform and no gradient is tiny; exact in float32."""
    for name, parameter in model.named_parameters():
        normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.dim() >= 2:
            value = 0.2 * normal
        elif name.endswith("bias"):
            value = 0.1 * normal
        else:  # LayerNorm
            value = 1.0 + 0.1 * normal
        parameter.data.copy_(value)


def draw_batches(config, generator):
    text = torch.randint(config.vocab_size, (STEPS, BATCH, config.seq_len + 1), generator=generator)
    tokens, targets = text[:, :, :-1].clone(), text[:, :, 1:].clone()
    no_loss = torch.rand(targets.shape, generator=generator) < 0.15
    targets[no_loss] = -1
    lengths = torch.tensor([SHORT_LENGTH if step % 2 else config.seq_len for step in range(STEPS)])
    return tokens, targets, lengths


def train(model, tokens, targets, lengths):
    """STEPS steps of AdamW; returns everything but the weights and the batches."""
    optimizer = torch.optim.AdamW(
        adamw_groups(model, ADAMW["weight_decay"]),
        lr=ADAMW["learning_rate"],
        betas=(ADAMW["beta1"], ADAMW["beta2"]),
        eps=ADAMW["epsilon"],
    )
    golden, losses, norms = {}, [], []
    for step, length in enumerate(lengths):
        step_targets = targets[step, :, :length]
        logits = model(tokens[step, :, :length])
        each = token_losses(logits, step_targets)
        loss = each.sum() / (step_targets != -1).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        if step == 0:
            golden["logits"] = logits.detach().clone()
            golden["token_losses"] = each.detach().clone()
            golden |= {f"gradient/transformer.{n}": p.grad.clone() for n, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad *= min(1.0, ADAMW["clip"] / norm)
        optimizer.step()
        losses.append(loss.detach())
        norms.append(norm)
    golden["losses"], golden["norms"] = torch.stack(losses), torch.stack(norms)
    golden |= {f"trained/transformer.{n}": p.detach().clone() for n, p in model.named_parameters()}
    return golden


def make_golden(config, seed):
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config).to(torch.float64)
    draw_weights(model, generator)
    tokens, targets, lengths = draw_batches(config, generator)
    golden = {f"weight/transformer.{n}": p.detach().clone() for n, p in model.named_parameters()}
    golden |= {"tokens": tokens, "targets": targets, "lengths": lengths}
    golden |= train(model, tokens, targets, lengths)
    in_float64 = ("losses", "norms", "token_losses")
    for name, tensor in golden.items():
        if not tensor.is_floating_point():
            golden[name] = tensor.to(torch.int32)
        elif name not in in_float64:
            golden[name] = tensor.to(torch.float32)
    return golden


def largest_difference(golden, path):
    with safe_open(path, framework="pt") as stored:
        if set(stored.keys()) != set(golden):
            return float("inf")
        return max((stored.get_tensor(n).double() - t.double()).abs().max().item() for n, t in golden.items())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent.parent / "test" / "golden",
                        help="folder to write to (default: test/golden)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and tokens (default: 1)")
    parser.add_argument("--check", action="store_true",
                        help="write nothing: compare with the files that are there, to 1e-7")
    arguments = parser.parse_args()

    agree = True
    for name, config in MODELS.items():
        golden = make_golden(config, arguments.seed)
        path = arguments.output / f"{name}.safetensors"
        if arguments.check:
            difference = largest_difference(golden, path)
            agree = agree and difference <= 1e-7
            print(f"{path}: largest difference {difference:.2g}")
        else:
            metadata = {key: str(value) for key, value in (vars(config) | ADAMW).items()}
            save_file(golden, path, metadata)
            path.chmod(0o644)
            norms = golden["norms"]
            print(f"{path}: {path.stat().st_size} bytes, losses {golden['losses'][0]:.4f} to "
                  f"{golden['losses'][-1]:.4f}, norms {norms.min():.2f} to {norms.max():.2f}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
