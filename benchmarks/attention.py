"""The attention backend flash_cpu against torch's own: forward and backward, in turns in one process.

    python benchmarks/attention.py                   # heads of andrea120m and andrea12m, one thread, processor time
    python benchmarks/attention.py --threads 2       # on a quiet machine
    python benchmarks/attention.py --shape 4x12x1024x64 --window 256 --documents 300

Before anything is timed both must give the same values and gradients.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from gptframe_gelu_cuda import attention, backend
from timing import Timing, interleave, load, ratio
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2}


def case(
    shape: list[int], dtype: str, window: int | None, documents: int | None
) -> tuple[dict, dict, list[Tensor], list[Tensor]]:
    """Calls of the forward and of the backward passes by rival, and what each gives."""
    rows, heads, tokens, width = shape
    q, k, v, g = (torch.randn(rows, tokens, heads, width).to(DTYPES[dtype]).transpose(1, 2) for _ in range(4))
    numbers = (torch.arange(tokens) // documents).repeat(rows, 1) if documents else None
    first = None if numbers is None else attention.first_keys(numbers)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    mask = None
    if window or numbers is not None:
        mask = ((distance >= 0) & (distance < (window or tokens)))[None, None]
        if numbers is not None:
            mask = mask & (numbers[:, None, :, None] == numbers[:, None, None, :])
    calls = {
        "flash_cpu": lambda *qkv: attention.attention(*qkv, window=window, first=first),
        "torch": lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=mask is None),
    }
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    forward, backward, found = {}, {}, {}
    for name, call in calls.items():
        graph = call(*leaves)
        forward[name] = lambda call=call: call(q, k, v)
        backward[name] = lambda graph=graph: torch.autograd.grad(graph, leaves, g, retain_graph=True)
        found[name] = [graph.detach(), *backward[name]()]
    return forward, backward, found["flash_cpu"], found["torch"]


def line(label: str, times: dict[str, Timing], flops: float, processor: bool) -> None:
    ours, theirs = ((t.processor if processor else t.seconds) for t in (times["flash_cpu"], times["torch"]))
    low, middle, high = ratio(theirs, ours)
    print(
        f"{label:36} {min(ours) * 1e3:9.2f} {min(theirs) * 1e3:9.2f} ms  {flops / min(ours) / 1e9:6.0f} GFLOP/s   "
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="rows x heads x tokens x head_dim")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--window", type=int)
    parser.add_argument("--documents", type=int, metavar="TOKENS", help="length of each document")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    processor = a.threads == 1
    print(f"{load()}, torch {torch.__version__}, flash_cpu: {backend.require_attention()}")
    print(f"threads {a.threads}, {'processor' if processor else 'wall'} time, {a.rounds} rounds; FLOPs of what is seen")
    print(f"{'':36} {'flash_cpu':>9} {'torch':>9}{'':20}  torch / flash_cpu")
    for text in a.shape or ["1x12x1024x64", "1x12x1024x32"]:
        shape = [int(n) for n in text.split("x")]
        rows, heads, tokens, width = shape
        for dtype in a.dtypes:
            forward, backward, ours, theirs = case(shape, dtype, a.window, a.documents)
            away = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(ours, theirs, strict=True))
            if not away <= TOLERANCE[dtype]:
                print(f"{text} {dtype}: not timed, values or gradients are {away:.2g} apart")
                continue
            seen = min(a.window or tokens, a.documents or tokens)
            pairs = seen * (tokens - seen / 2) if not a.documents else tokens * seen / 2
            flops = 4 * rows * heads * pairs * width
            line(f"{text} {dtype} forward", interleave(forward, a.rounds, torch.device("cpu")), flops, processor)
            line(
                f"{text} {dtype} backward", interleave(backward, a.rounds, torch.device("cpu")), 2.5 * flops, processor
            )


if __name__ == "__main__":
    main()
