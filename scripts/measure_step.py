#!/usr/bin/env python3
"""How fast is a whole training step? A Markdown table of ./train_gpt's, and of PyTorch's beside it.

A configuration is a model, a sequence length, a micro-batch and the tokens of an optimizer step; it is
measured with each of the --attention kernels, and with --torch also in PyTorch, on the same GPU right after.
--turns repeats that in alternation, because a GPU's speed drifts with its temperature. Each turn begins with
--warmup steps that do not count; the table has the median of all others. Data are random tokens.

TFLOP/s are by the Megatron formula, 6 P + 12 L C S FLOP a token: attention is not halved for the causal mask,
and P counts no padding of the vocabulary. MFU is their fraction of the GPU's dense bf16 peak. "of PyTorch" is
the ratio of tokens/s to the fastest PyTorch row's of that configuration. Memory is the peak that each program
had allocated.

The PyTorch step is what its users write for speed: torch.compile, bf16 autocast, scaled_dot_product_attention
with the kernel that --torch names (auto: PyTorch's choice), fused AdamW, and a vocabulary padded to a
multiple of 128.

A configuration that fails says why in its row and the others go on; the exit code is then 1.

  scripts/measure_step.py --set 1.3b --attention standard,fa2
  scripts/measure_step.py --set 1.3b --set 2.7b --attention fa2 --torch cudnn,flash --turns 2
  scripts/measure_step.py --configuration gpt2-355m:1024:32:65536
  scripts/measure_step.py --configuration tiny:64:2:256 --device cpu --torch auto
"""

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from needs import needs
from trainer import TrainerError, presets, train

TOKENS_A_STEP = 65536
SETS = {
    "124m": [("gpt2-124m", 1024, 64)],
    "1.3b": [("gpt3-1.3b", 2048, 16), ("gpt3-1.3b", 8192, 4)],
    "2.7b": [("gpt3-2.7b", 2048, 8), ("gpt3-2.7b", 8192, 2)],
}
DOES_NOT_FIT = "does not fit"  # with --fit, which has tried all: a result
SDPA_KERNELS = {"auto": None, "cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "math": "MATH"}


@dataclass(frozen=True)
class Configuration:
    model: str
    seq_len: int
    micro_batch: int
    global_batch: int = TOKENS_A_STEP

    @classmethod
    def parse(cls, text):
        model, *sizes = text.split(":")
        if len(sizes) not in (2, 3) or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise argparse.ArgumentTypeError(f"'{text}' is not MODEL:SEQ_LEN:MICRO_BATCH[:TOKENS_A_STEP]")
        configuration = cls(model, *map(int, sizes))
        if configuration.global_batch % (configuration.seq_len * configuration.micro_batch) != 0:
            raise argparse.ArgumentTypeError(
                f"'{text}': {configuration.global_batch} tokens a step are no multiple of a micro-batch's"
            )
        return configuration

    @property
    def micro_steps(self):
        return self.global_batch // (self.seq_len * self.micro_batch)


@dataclass
class Row:
    """One program with one attention kernel; what its turns gave."""
    program: str
    attention: str
    micro_batch: int
    milliseconds: list = field(default_factory=list)
    memory_bytes: int = 0
    failure: str = ""

    def tokens_per_second(self, configuration):
        return 1000 * configuration.global_batch / statistics.median(self.milliseconds)


# ---- train_gpt ----


def train_gpt_turn(configuration, row, arguments):
    options = {"ranks": 1} | dict(option.split("=", 1) for option in arguments.option) | {
        "model": configuration.model, "seq-len": configuration.seq_len,
        "micro-batch": row.micro_batch, "global-batch": configuration.global_batch,
        "train-data": "synthetic", "checkpoint-every": 0,
        "steps": arguments.warmup + arguments.steps, "attention": row.attention, "device": arguments.device,
    }
    with tempfile.TemporaryDirectory() as run_dir:
        steps = train(arguments.trainer, run_dir, options, timeout=arguments.timeout)
    skipped = [step["step"] for step in steps if step["skipped"]]
    if skipped:
        raise TrainerError(f"step {skipped[0]} was skipped: its time is not a whole step's")
    milliseconds = [step["ms"] for step in steps[arguments.warmup :]]
    return milliseconds, steps[-1]["memory_bytes"], peak_tflops(steps[-1])


def fitting_turn(configuration, row, arguments):
    """With --fit the row's micro-batch is halved until the GPU's memory is enough."""
    while True:
        try:
            return train_gpt_turn(configuration, row, arguments)
        except TrainerError as error:
            if not (arguments.fit and row.micro_batch % 2 == 0 and "out of memory" in str(error)):
                raise
            row.micro_batch //= 2


def peak_tflops(step):
    return step["tflops"] / step["mfu"] if step["mfu"] else None


# ---- PyTorch, in a process of its own: what it allocated is gone when train_gpt's turn comes ----


def pytorch_steps(configuration, config, kernel, device, warmup, steps):
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from reference_model import GPT, adamw_groups

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1)
    on_gpu = device == "cuda"
    with torch.device(device):
        model = GPT(replace(config, vocab_size=-(-config.vocab_size // 128) * 128))
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, 0.02)
    optimizer = torch.optim.AdamW(adamw_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)

    @torch.compile
    def loss_of(inputs, targets):
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def step():
        for _ in range(configuration.micro_steps):
            shape = (configuration.micro_batch, configuration.seq_len + 1)
            tokens = torch.randint(config.vocab_size, shape, device=device)
            with torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext():
                loss = loss_of(tokens[:, :-1], tokens[:, 1:])
            (loss / configuration.micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the GPU

    milliseconds = []
    backend = SDPA_KERNELS[kernel]
    with sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext():
        for _ in range(warmup + steps):
            start = time.perf_counter()
            step()
            milliseconds.append(1000 * (time.perf_counter() - start))
    return milliseconds[warmup:], torch.cuda.max_memory_allocated() if on_gpu else 0


def pytorch_turn(configuration, config, row, arguments):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(pytorch_steps, configuration, config, row.attention, arguments.device,
                              arguments.warmup, arguments.steps).result()


# ---- the table ----


def flops_per_token(config):
    layer = 12 * config.channels**2 + 13 * config.channels  # 4 matrices, their biases, 2 LayerNorms
    parameters = (config.vocab_size + config.seq_len + 2) * config.channels + config.layers * layer
    return 6 * parameters + 12 * config.layers * config.channels * config.seq_len


def measure(configuration, config, arguments):
    """The rows of a configuration and the GPU's peak."""
    rows = [Row("train_gpt", name, configuration.micro_batch) for name in arguments.attention]
    rows += [Row("PyTorch", name, configuration.micro_batch) for name in arguments.torch]
    peak = arguments.peak_tflops
    for turn in range(arguments.turns):
        for row in rows:
            if row.failure:
                continue
            print(f"{configuration.model} {configuration.seq_len}: {row.program} {row.attention}, "
                  f"turn {turn + 1} of {arguments.turns}", file=sys.stderr)
            try:
                if row.program == "train_gpt":
                    milliseconds, row.memory_bytes, known_peak = fitting_turn(configuration, row, arguments)
                    peak = peak or known_peak
                else:
                    milliseconds, row.memory_bytes = pytorch_turn(configuration, config, row, arguments)
                row.milliseconds += milliseconds
            except TrainerError as error:
                does_not_fit = arguments.fit and "out of memory" in str(error)
                row.failure = DOES_NOT_FIT if does_not_fit else f"failed: {error}"
            except Exception as error:  # whatever PyTorch raises: the other rows go on
                row.failure = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return rows, peak


def print_header():
    print("| model | length | micro-batch | program | attention | ms | tokens/s | TFLOP/s | MFU | memory "
          "| of PyTorch |")
    print("|---|--:|--:|---|---|--:|--:|--:|--:|--:|--:|")


def print_rows(configuration, config, rows, peak):
    pytorch = [r.tokens_per_second(configuration) for r in rows if r.program == "PyTorch" and not r.failure]
    for row in rows:
        c = configuration
        cells = [c.model, c.seq_len, row.micro_batch, row.program, row.attention]
        if row.failure:
            cells += [row.failure.replace("|", "/")] + [""] * 5
        else:
            rate = row.tokens_per_second(configuration)
            tflops = rate * flops_per_token(config) / 1e12
            cells += [
                f"{statistics.median(row.milliseconds):.1f}", f"{rate:,.0f}", f"{tflops:.4g}",
                f"{100 * tflops / peak:.1f}%" if peak else "-",
                f"{row.memory_bytes / 2**30:.1f} GiB" if row.memory_bytes else "-",
                f"{rate / max(pytorch):.3f}" if pytorch else "-",
            ]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def names(text):
    return [name for name in text.split(",") if name]


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--set", action="append", choices=SETS, default=[],
        help=f"configurations of {TOKENS_A_STEP} tokens a step: " +
             "; ".join(f"{name}: " + ", ".join(f"{b} x {t}" for _, t, b in rows)
                       for name, rows in SETS.items()))
    add("--configuration", action="append", type=Configuration.parse, default=[],
        metavar="MODEL:SEQ_LEN:MICRO_BATCH[:TOKENS_A_STEP]", help="another one; both can be repeated")
    add("--attention", type=names, metavar="LIST", default=["auto"],
        help="train_gpt's kernels, each a row: standard,fa1,fa2,fa3 (default: auto)")
    add("--torch", type=names, metavar="LIST", default=[],
        help=f"PyTorch's kernels, each a row: {','.join(SDPA_KERNELS)} (default: no PyTorch)")
    add("--turns", type=int, default=1, metavar="N", help="of each row, in alternation (default: 1)")
    add("--steps", type=int, default=10, metavar="N", help="of a turn that count (default: 10)")
    add("--warmup", type=int, default=3, metavar="N", help="of a turn before these (default: 3)")
    add("--fit", action="store_true",
        help="halve train_gpt's micro-batch where the GPU's memory is too small for it")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of both (default: cuda)")
    add("--peak-tflops", type=float, metavar="X", help="for MFU (default: what train_gpt knows)")
    add("--option", action="append", default=[], metavar="NAME=VALUE",
        help="one more option of train_gpt, such as recompute=gelu; can be repeated")
    add("--timeout", type=float, default=300, metavar="SECONDS",
        help="of a turn of train_gpt (default: 300)")
    add("--trainer", metavar="PROGRAM", default="./train_gpt", help="default: ./train_gpt")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.torch if name not in SDPA_KERNELS]
    if unknown:
        parser.error(f"--torch: {unknown[0]} is none of {','.join(SDPA_KERNELS)}")
    if min(arguments.turns, arguments.steps) < 1 or arguments.warmup < 0:
        parser.error("--turns and --steps are at least 1, --warmup at least 0")
    if not all("=" in option for option in arguments.option):
        parser.error("--option takes NAME=VALUE")
    configurations = [Configuration(*row) for name in arguments.set for row in SETS[name]]
    configurations += arguments.configuration
    if not configurations:
        parser.error("nothing to measure: give --set or --configuration")
    return parser, arguments, configurations


def main():
    parser, arguments, configurations = parse_arguments()
    if arguments.torch:
        needs("torch")
    try:
        known = presets(arguments.trainer)
    except TrainerError as error:
        sys.exit(f"measure_step.py: {error}")
    for configuration in configurations:
        if configuration.model not in known:
            parser.error(f"{configuration.model} is none of train_gpt's models: {' '.join(known)}")
    failed = False
    print_header()
    for configuration in configurations:
        config = replace(known[configuration.model][0], seq_len=configuration.seq_len)
        rows, peak = measure(configuration, config, arguments)
        print_rows(configuration, config, rows, peak)
        failed = failed or any(row.failure not in ("", DOES_NOT_FIT) for row in rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
