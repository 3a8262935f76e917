"""The GPT of llmc/model.h in PyTorch, for the scripts that compare with it.

GPT-2: learned positions, pre-LayerNorm, tanh GELU, head tied to the token embedding; and grouped-query
attention. Parameters have Hugging Face's GPT-2 names without the leading "transformer."; weights are
(out, in), as in the trainer's memory, where Hugging Face's Conv1D stores (in, out).
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from trainer import Config


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        packed_heads = config.heads + 2 * config.kv_heads
        self.c_attn = nn.Linear(config.channels, packed_heads * config.head_dim)
        self.c_proj = nn.Linear(config.channels, config.channels)

    def forward(self, x):
        heads, kv_heads = self.config.heads, self.config.kv_heads
        # (B, T, Hq + 2 Hkv, D): the query heads, then the key heads, then the value heads
        qkv = self.c_attn(x).unflatten(-1, (heads + 2 * kv_heads, self.config.head_dim)).transpose(1, 2)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if kv_heads != heads:  # query head h reads key/value head h // (Hq / Hkv)
            key = key.repeat_interleave(heads // kv_heads, dim=1)
            value = value.repeat_interleave(heads // kv_heads, dim=1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.channels, 4 * config.channels)
        self.c_proj = nn.Linear(4 * config.channels, config.channels)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.channels, eps=1e-5)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.channels, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.channels)
        self.wpe = nn.Embedding(config.seq_len, config.channels)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.channels, eps=1e-5)

    def forward(self, tokens):
        """tokens (B, T) -> logits (B, T, V)"""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def token_losses(logits, targets):
    """Cross-entropy of every token (B, T); 0 where the target is -1."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    return losses.view_as(targets)


def adamw_groups(model, weight_decay):
    """Parameter groups for AdamW: matrices decay, vectors (biases, LayerNorm) do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def load_checkpoint(folder, dtype=torch.float64):
    """The model in a checkpoint folder of train_gpt (model.safetensors and config.json)."""
    from safetensors.torch import load_file

    folder = Path(folder)
    stored = json.loads((folder / "config.json").read_text())
    config = Config(
        layers=stored["n_layer"],
        channels=stored["n_embd"],
        heads=stored["n_head"],
        kv_heads=stored.get("n_kv_head", stored["n_head"]),
        seq_len=stored["n_positions"],
        vocab_size=stored["vocab_size"],
    )
    model = GPT(config).to(dtype)
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("transformer.")
        is_conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        weights[name] = (tensor.T if is_conv1d else tensor).to(dtype)
    model.load_state_dict(weights)
    return model
