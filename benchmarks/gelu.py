"""Compiled GELU against ATen and inductor: time, bandwidth against a measured copy, accuracy, and memory saved.

python benchmarks/gelu.py                 # CPU, or the GPU where there is one
python benchmarks/gelu.py --check         # exit status 1 where the bar is missed: 3x ATen on one thread, 2x on two
python benchmarks/gelu.py --memory        # what one MLP keeps for its backward
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait must not look like threads that work

import torch
import torch.nn.functional as F
from gptframe_gelu_cuda import backend, bias_gelu, bias_gelu_linear, ops
from timing import Timing, interleave, machine, ratio
from torch import Tensor

OPS = torch.ops.gptframe_gelu
SHAPES = {"3M": (3_145_728,), "1024x3072": (1024, 3072), "8192x3072": (8192, 3072)}  # the last two: andrea120m's MLP
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
BAR = {1: 3.0, 2: 2.0}  # threads -> times ATen


def aten(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def aten_backward(g: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(g, x, approximate="tanh")


class Rotating:
    """Calls a function on one of several sets of tensors in turn, so that a GPU's cache does not hold the next one."""

    def __init__(self, call: Callable, sets: list[tuple[Tensor, ...]]):
        self.call, self.sets, self.turn = call, sets, 0

    def __call__(self) -> None:
        self.turn = (self.turn + 1) % len(self.sets)
        self.call(*self.sets[self.turn])


def make_sets(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, ...]]:
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    count = max(1, min(64, 2**29 // size)) if device.type == "cuda" else 1
    return [tuple(torch.randn(shape, device=device).to(dtype) for _ in range(2)) for _ in range(count)]


def compare(
    title: str, rivals: dict[str, Callable], sets: list, streams: int, copied: float, rounds: int, device: torch.device
) -> tuple[float, float, float]:
    """Print one line for a set of rivals; the ratio of ATen to ours, of processor time on a CPU.

    Other load on the machine stretches the wall's time of whoever is interrupted, but not the processor's.
    """
    times = interleave({name: Rotating(call, sets) for name, call in rivals.items()}, rounds, device)
    moved = streams * sets[0][0].nbytes
    wall = ratio(times["aten"].seconds, times["ours"].seconds)
    used = ratio(times["aten"].processor, times["ours"].processor)

    def words(timing: Timing) -> str:
        return f"{timing.best * 1e3:8.3f} ms {moved / timing.best / 1e9:7.1f} GB/s"

    line = " | ".join(f"{name} {words(timing)}" for name, timing in times.items())
    share = moved / times["ours"].best / copied
    spread = f"aten/ours {wall[1]:.2f} [{wall[0]:.2f}, {wall[2]:.2f}]"
    if device.type == "cpu":
        spread += f", processor time {used[1]:.2f} [{used[0]:.2f}, {used[2]:.2f}]"
    print(f"{title:34s} {line} | {spread} | {share:4.0%} of copy", flush=True)
    return used


def speed(args: argparse.Namespace, device: torch.device) -> bool:
    """Time forward and backward. True where every ratio that the bar speaks of reaches it."""
    compiled = {} if args.no_inductor else {"forward": torch.compile(aten), "backward": torch.compile(aten_backward)}
    reached = True
    for threads in args.threads if device.type == "cpu" else [0]:
        if threads:
            torch.set_num_threads(threads)
        for name in args.dtypes:
            for shape_name in args.shapes:
                sets = make_sets(SHAPES[shape_name], DTYPES[name], device)
                to = torch.empty_like(sets[0][0])
                copy = interleave({"copy": Rotating(lambda x, g, to=to: to.copy_(x), sets)}, args.rounds, device)[
                    "copy"
                ]
                copied = 2 * to.nbytes / copy.best
                where = f"{name} {shape_name}" + (f" {threads} thread{'s' * (threads > 1)}" if threads else "")
                print(f"{where:34s} copy {copy.best * 1e3:.3f} ms, {copied / 1e9:.1f} GB/s")
                for kind, theirs, ours, streams in (
                    ("forward", lambda x, g: aten(x), lambda x, g: OPS.gelu(x), 2),
                    ("backward", lambda x, g: aten_backward(g, x), lambda x, g: OPS.gelu_backward(g, x), 3),
                ):
                    rivals = {"aten": theirs, "ours": ours}
                    if compiled:
                        f = compiled[kind]
                        call = (lambda x, g, f=f: f(x)) if kind == "forward" else (lambda x, g, f=f: f(g, x))
                        rivals["inductor"] = call
                    _, middle, _ = compare(f"{where} {kind}", rivals, sets, streams, copied, args.rounds, device)
                    if device.type == "cpu" and name in ("fp32", "bf16") and middle < BAR.get(threads, 0):
                        reached = False
                        print(f"    below the bar of {BAR[threads]:.0f}x")
                if len(SHAPES[shape_name]) == 2:
                    bias = torch.randn(SHAPES[shape_name][1], device=device).to(DTYPES[name])
                    compare(
                        f"{where} bias backward",
                        {
                            "aten": lambda x, g, b=bias: (d := aten_backward(g, x + b), d.sum(0)),
                            "ours": lambda x, g, b=bias: OPS.bias_gelu_backward(g, x, b),
                        },
                        sets, 3, copied, args.rounds, device,
                    )  # fmt: skip
    return reached


def accuracy(device: torch.device) -> None:
    """Print how many results are not the correctly rounded ones, of all finite 16-bit inputs and of a large sample."""
    k = (2 / torch.pi) ** 0.5
    for name in ("bf16", "fp16", "fp32"):
        if name == "fp32":
            x = torch.randn(1_000_000)
        else:
            x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(DTYPES[name])
            x = x[x.isfinite() & (x.abs() < 64)]
        wide = x.double()
        v = 2 * k * (wide + 0.044715 * wide**3)
        s, r = torch.sigmoid(v), torch.sigmoid(-v)
        y = (wide * s).to(x.dtype)
        dy = (s + wide * s * r * 2 * k * (1 + 3 * 0.044715 * wide**2)).to(x.dtype)
        x, one = x.to(device), torch.ones_like(x, device=device)
        counts = [
            (got.cpu() != want).sum().item()
            for got, want in (
                (aten(x), y),
                (OPS.gelu(x), y),
                (aten_backward(one, x), dy),
                (OPS.gelu_backward(one, x), dy),
            )
        ]
        print(
            f"{name}: not correctly rounded, of {x.numel()}: forward aten {counts[0]}, ours {counts[1]}; "
            f"backward aten {counts[2]}, ours {counts[3]}"
        )


def memory(device: torch.device) -> None:
    """Print what the MLP of andrea120m keeps for its backward, beside its parameters and its input."""
    rows, d_model, hidden = 1024, 768, 3072
    x = torch.randn(rows, d_model, device=device, dtype=torch.bfloat16)
    shapes = ((hidden, d_model), (hidden,), (d_model, hidden), (d_model,))
    up, b, down, c = (torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    own = {t.untyped_storage().data_ptr() for t in (x, up, b, down, c)}

    def separate(x: Tensor) -> Tensor:
        return F.linear(aten(F.linear(x, up, b)), down, c)

    def fused(x: Tensor) -> Tensor:
        return F.linear(bias_gelu(F.linear(x, up), b), down, c)

    def saving_input(x: Tensor) -> Tensor:
        return bias_gelu_linear(F.linear(x, up), b, down, c)

    print(f"one MLP of andrea120m, {rows} tokens, bf16: kept for the backward, beside input and parameters")
    backend_name = "inductor" if device.type == "cuda" else "aot_eager"
    for name, f in (("ATen", separate), ("save: both", fused), ("save: input", saving_input)):
        kept: dict[int, int] = {}

        def pack(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if t.untyped_storage().data_ptr() not in own:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            f(x)
        torch._dynamo.reset()
        y = torch.compile(f, backend=backend_name, fullgraph=True)(x)
        graph = {t.untyped_storage().data_ptr(): t.nbytes for t in y.grad_fn.saved_tensors}
        compiled = sum(size for place, size in graph.items() if place not in own)
        print(f"  {name:12s} eager {sum(kept.values()) / 2**20:6.2f} MiB, compiled graph {compiled / 2**20:6.2f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU threads to measure with")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the bar is missed")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    try:
        backend.require(device.type)
    except backend.BackendError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ops.gelu(torch.ones(1, device=device))
    print(f"{machine(device, args.threads)}; kernels: {backend.status()[device.type]}")
    if args.memory:
        memory(device)
        return 0
    accuracy(device)
    reached = speed(args, device)
    return int(args.check and not reached)


if __name__ == "__main__":
    sys.exit(main())
