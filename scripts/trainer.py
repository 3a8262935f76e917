"""Runs train_gpt for the scripts that compare with it: its presets, its options, the steps of its log."""

import json
import subprocess
from pathlib import Path

from reference_model import Config


class TrainerError(Exception):
    """train_gpt could not do it; the text is its own line."""


def presets(program):
    """{name: (Config, learning rate)} as the table at the end of `train_gpt --help` has them."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    table = text.partition("\nPresets")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        name, _, layers, channels, heads, _, seq_len, vocab_size, learning_rate, _ = line.split()
        config = Config(layers=int(layers), channels=int(channels), heads=int(heads), kv_heads=int(heads),
                        seq_len=int(seq_len), vocab_size=int(vocab_size))
        found[name] = config, float(learning_rate)
    return found


def train(program, run_dir, options, output=None, timeout=None):
    """Trains with {"option-name": value} and returns the log's steps; output: where progress goes (none: --quiet)."""
    command = [program, f"--run-dir={run_dir}"] + [f"--{name}={value}" for name, value in options.items()]
    try:
        run = subprocess.run(command if output else command + ["--quiet"], stdout=output or subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True, timeout=timeout)
    except OSError as error:
        raise TrainerError(f"{program}: {error.strerror}; build it first, with make") from None
    except subprocess.TimeoutExpired:
        raise TrainerError(f"not done after {timeout} seconds") from None
    if run.returncode != 0:
        said = [line.removeprefix("train_gpt: ") for line in run.stderr.splitlines() if line.startswith("train_gpt: ")]
        raise TrainerError(said[0] if said else f"train_gpt ended with code {run.returncode}")
    events = [json.loads(line) for line in (Path(run_dir) / "log.jsonl").read_text().splitlines()]
    return [event for event in events if event["type"] == "step"]
