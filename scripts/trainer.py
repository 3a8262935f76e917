"""Runs train_gpt for the scripts that compare with it: its presets, its options, the steps of its log."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Config:
    layers: int
    channels: int
    heads: int
    kv_heads: int
    seq_len: int
    vocab_size: int

    @property
    def head_dim(self):
        return self.channels // self.heads


class TrainerError(Exception):
    """train_gpt could not do it; the text is its own line."""


def run(command, **more):
    """The ended program, with what it printed as text."""
    try:
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, **more)
    except OSError as error:
        raise TrainerError(f"{command[0]}: {error.strerror}; build it first, with make") from None
    except subprocess.TimeoutExpired as error:
        raise TrainerError(f"not done after {error.timeout:g} seconds") from None
    if ended.returncode != 0:
        said = [line for line in ended.stderr.splitlines() if line.startswith("train_gpt: ")]
        code = f"{command[0]} ended with code {ended.returncode}"
        raise TrainerError(said[0].removeprefix("train_gpt: ") if said else code)
    return ended


def presets(program):
    """{name: (Config, learning rate)} as the table of `train_gpt --help` has them."""
    text = run([program, "--help"], stdout=subprocess.PIPE).stdout
    table = text.partition("\nPresets")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        name, _, layers, channels, heads, _, seq_len, vocab_size, learning_rate, _ = line.split()
        config = Config(layers=int(layers), channels=int(channels), heads=int(heads), kv_heads=int(heads),
                        seq_len=int(seq_len), vocab_size=int(vocab_size))
        found[name] = config, float(learning_rate)
    return found


def train(program, run_dir, options, output=None, timeout=None, event="step"):
    """Trains with {"option-name": value}; the lines of its log of type `event`, a step each as a rule. output takes
    the progress (None: none)."""
    command = [program, f"--run-dir={run_dir}"] + [f"--{name}={value}" for name, value in options.items()]
    run(command if output else command + ["--quiet"], stdout=output or subprocess.DEVNULL, timeout=timeout)
    events = [json.loads(line) for line in (Path(run_dir) / "log.jsonl").read_text().splitlines()]
    return [e for e in events if e["type"] == event]
