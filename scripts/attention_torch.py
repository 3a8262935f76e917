#!/usr/bin/env python3
"""This project's attention kernels from PyTorch, checked and timed beside PyTorch's own.

    from attention_torch import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)        # q, k, v: [batch, seq, heads, head_dim], fp16 or bf16, on a GPU

Run as a program it checks the kernels against float64 and prints TFLOP/s (forward/backward/both) beside the SDPA
backends, over the FlashAttention-2 paper's grid, all in one run:

    make lib && python3 scripts/attention_torch.py [--kernels fa2,standard] [--peers flash,cudnn,math] [--quick]

The shared library is the repository's libattention.so, or what LIBATTENTION names. This mirrors attention/attention.h.
"""
import argparse
import ctypes
import math
import os
import random
import sys

try:
    import torch
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    sys.exit("attention_torch.py: needs torch: pip install torch")

DTYPES = {torch.bfloat16: 2, torch.float16: 3}  # enum dtype of llmc/common.h
LIBRARY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "libattention.so")


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in
                                              ("batch_stride", "seq_stride", "head_stride", "dim_stride")]

    @classmethod
    def of(cls, t):
        return cls(t.data_ptr(), *t.stride())


class Params(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("batch", ctypes.c_int64), ("seqlen_q", ctypes.c_int64),
                ("seqlen_k", ctypes.c_int64), ("heads", ctypes.c_int64), ("kv_heads", ctypes.c_int64),
                ("head_dim", ctypes.c_int64), ("scale", ctypes.c_double), ("causal", ctypes.c_bool),
                ("deterministic", ctypes.c_bool)]
    _fields_ += [(name, Tensor) for name in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("lse", "saved", "workspace", "stream")]


class Kernel:
    """One of the library's kernels on one device."""

    library = None
    made = {}

    @classmethod
    def get(cls, name, device):
        key = (name, device.index)
        if key not in cls.made:
            cls.made[key] = cls(name, device)
        return cls.made[key]

    def __init__(self, name, device):
        if Kernel.library is None:
            path = os.environ.get("LIBATTENTION", LIBRARY)
            if not os.path.exists(path):
                raise RuntimeError(f"{path}: not there; build it with make lib, or set LIBATTENTION to where it is")
            library = ctypes.CDLL(path)
            library.error_message.restype = ctypes.c_char_p
            for function in (library.attention_saved_bytes, library.attention_workspace_bytes):
                function.restype = ctypes.c_size_t
                function.argtypes = [ctypes.c_char_p, ctypes.POINTER(Params)]
            for function in (library.attention_forward, library.attention_backward):
                function.argtypes = [ctypes.c_void_p, ctypes.POINTER(Params)]
            library.attention_create.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p]
            Kernel.library = library
        self.name, self.handle = name.encode(), ctypes.c_void_p()
        with torch.cuda.device(device):
            self.check(Kernel.library.attention_create(ctypes.byref(self.handle), self.name))

    @staticmethod
    def check(status):
        if status != 0:
            raise RuntimeError(Kernel.library.error_message().decode())

    def bytes(self, which, params, device):
        size = getattr(Kernel.library, f"attention_{which}_bytes")(self.name, params)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def run(self, direction, params, device):
        params.stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            self.check(getattr(Kernel.library, f"attention_{direction}")(self.handle, params))


def make_params(q, k, v, o, lse, scale, causal, deterministic):
    p = Params(dtype=DTYPES[q.dtype], batch=q.shape[0], seqlen_q=q.shape[1], seqlen_k=k.shape[1], heads=q.shape[2],
               kv_heads=k.shape[2], head_dim=q.shape[3], scale=scale, causal=causal, deterministic=deterministic)
    p.q, p.k, p.v, p.o, p.lse = Tensor.of(q), Tensor.of(k), Tensor.of(v), Tensor.of(o), lse.data_ptr()
    return p


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, causal, deterministic, name):
        kernel = Kernel.get(name, q.device)
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        p = make_params(q, k, v, o, lse, scale, causal, deterministic)
        saved, workspace = kernel.bytes("saved", p, q.device), kernel.bytes("workspace", p, q.device)
        p.saved, p.workspace = saved.data_ptr(), workspace.data_ptr()
        kernel.run("forward", p, q.device)
        ctx.save_for_backward(q, k, v, o, lse, saved)
        ctx.options = scale, causal, deterministic, kernel
        return o

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, o, lse, saved = ctx.saved_tensors
        scale, causal, deterministic, kernel = ctx.options
        if d_o.stride(-1) != 1:
            d_o = d_o.contiguous()
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        p = make_params(q, k, v, o, lse, scale, causal, deterministic)
        p.d_o, p.dq, p.dk, p.dv = Tensor.of(d_o), Tensor.of(dq), Tensor.of(dk), Tensor.of(dv)
        workspace = kernel.bytes("workspace", p, q.device)
        p.saved, p.workspace = saved.data_ptr(), workspace.data_ptr()
        kernel.run("backward", p, q.device)
        return dq, dk, dv, None, None, None, None


def check_tensors(q, k, v):
    """What the library cannot see: of k and v it is told where they lie, all else is q's or k's."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4 or t.dtype not in DTYPES or t.device.type != "cuda":
            raise ValueError(f"{name} is {t.dtype} {list(t.shape)} on {t.device}; "
                             "give fp16 or bf16 [batch, seq, heads, head_dim] on a GPU")
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(f"{name} is {t.dtype} on {t.device}, but q {q.dtype} on {q.device}")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: "
                         "k and v must be of one shape, with the batch and head_dim of q")


def flash_attn_func(q, k, v, causal=False, softmax_scale=None, deterministic=False, kernel="fa2"):
    """Exact attention over [batch, seq, heads, head_dim]; k and v may have fewer heads. Causal masks are aligned
    bottom-right."""
    check_tensors(q, k, v)
    scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(q.shape[-1])
    return Attention.apply(q, k, v, scale, causal, deterministic, kernel)


# ---- the comparison -------------------------------------------------------------------------------------------

def sdpa(backend, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}

    def run(q, k, v):
        with sdpa_kernel(backends[backend]):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return run


def random_inputs(batch, seqlen, heads, head_dim, dtype=torch.bfloat16):
    shape = (batch, seqlen, heads, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v, torch.randn(shape, device="cuda", dtype=dtype)


def relative_errors(run, causal):
    """Of O, dQ, dK and dV against the formula in float64."""
    q, k, v, d_o = random_inputs(2, 333, 4, 80)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", exact[0], exact[1]) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], device="cuda", dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    reference = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), exact[2])
    out = run(q, k, v)
    results = [out, *torch.autograd.grad(out, (q, k, v), d_o)]
    references = [reference, *torch.autograd.grad(reference, exact, d_o.double())]
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(results, references)]


def one_ms(call):
    """Of the GPU alone: it is kept busy until the host has enqueued the whole call."""
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    torch.cuda._sleep(2_000_000)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def medians_ms(calls, repeats=11, warm_up=3):
    """Of several calls, which take turns in an order that is always another: the GPU's clock falls with the power that it
    has drawn just before, by a sixth and more, and so it falls for all alike."""
    times = [[] for _ in calls]
    order = list(range(len(calls)))
    shuffle = random.Random(0).shuffle
    for i in range(-warm_up, repeats):
        shuffle(order)
        for which in order:
            ms = one_ms(calls[which])
            if i >= 0:
                times[which].append(ms)
    return [sorted(column)[repeats // 2] for column in times]


def rates(runs, seqlen, head_dim, causal):
    """For each of runs TFLOP/s forward, backward and both; None where it does not run (the math backend runs out of memory)."""
    hidden = 2560 if head_dim == 80 else 2048
    batch, heads = 16384 // seqlen, hidden // head_dim
    q, k, v, d_o = random_inputs(batch, seqlen, heads, head_dim)
    outs = {}
    for run in runs:
        try:
            out = run(q, k, v)
            torch.autograd.grad(out, (q, k, v), d_o, retain_graph=True)
            outs[run] = out
        except RuntimeError:
            torch.cuda.empty_cache()
    forward = medians_ms([lambda run=run: run(q, k, v) for run in outs])
    backward = medians_ms([lambda out=out: torch.autograd.grad(out, (q, k, v), d_o, retain_graph=True)
                           for out in outs.values()])
    flops = 4 * seqlen**2 * head_dim * heads * batch / (2 if causal else 1) / 1e9
    rates_of = {run: (flops / f, 2.5 * flops / b, 3.5 * flops / (f + b)) for run, f, b in zip(outs, forward, backward)}
    return [rates_of.get(run) for run in runs]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default="fa2,fa2:deterministic",
                        help="of this project, by name; NAME:deterministic repeats dQ bit by bit")
    parser.add_argument("--peers", default="flash,cudnn", help="SDPA backends: flash, cudnn, math")
    parser.add_argument("--quick", action="store_true", help="2k and 8k only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention_torch.py: needs a GPU, and PyTorch finds none")
    columns = options.kernels.split(",") + options.peers.split(",")

    def runner(name, causal):
        if name in options.kernels.split(","):
            kernel, _, mode = name.partition(":")
            return lambda q, k, v: flash_attn_func(q, k, v, causal=causal, kernel=kernel,
                                                   deterministic=mode == "deterministic")
        return sdpa(name, causal)

    for name in columns:
        for causal in (False, True):
            errors = relative_errors(runner(name, causal), causal)
            print(f"{name:9} {'causal' if causal else 'full':6} relative errors of o, dq, dk, dv:",
                  " ".join(f"{e:.1e}" for e in errors))
            if name in options.kernels.split(",") and not max(errors) < 8e-3:
                sys.exit(f"{name} is wrong")
    others = columns[1:]
    print(f"{'dim':>4} {'seqlen':>6} mask   " + " ".join(f"{name:>17}" for name in columns)
          + f"   both: {columns[0]} over " + ", ".join(others))
    for head_dim in (64, 128, 80):
        for causal in (False, True):
            for seqlen in (2048, 8192) if options.quick else (512, 1024, 2048, 4096, 8192, 16384):
                row = rates([runner(name, causal) for name in columns], seqlen, head_dim, causal)
                cells = ["/".join(f"{x:.0f}" for x in r) if r else "-" for r in row]
                ratios = [f"{row[0][2] / r[2]:.2f}" if row[0] and r else "-" for r in row[1:]]
                print(f"{head_dim:4} {seqlen:6} {'causal' if causal else 'full':6} "
                      + " ".join(f"{cell:>17}" for cell in cells) + "   " + " ".join(ratios), flush=True)


if __name__ == "__main__":
    main()
