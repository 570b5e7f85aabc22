"""How time and memory of a training step grow with context, depth, width, vocabulary and batch; with fitted exponents.

    python benchmarks/growth.py                       # about ten minutes on two cores
    python benchmarks/growth.py --axis context --largest 2048 --png growth.png

Each axis changes one size of one small model. Time is of the processor, for a whole step (forward, backward, clipping,
AdamW); memory is the peak of tensors, counted on fake ones. The exponent p of `cost = c size^p` is fitted over the
larger half of an axis, and stands beside the one that the mathematics asks for there: FLOPs as `gptframe cost` counts
them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from pathlib import Path

import torch
from timing import machine

SMALL = {"d_model": 128, "n_heads": 4, "n_layers": 2, "vocab_size": 512, "context_length": 256}
AXES = {
    "context": ("context_length", [256, 512, 1024, 2048, 4096, 8192]),
    "depth": ("n_layers", [1, 2, 4, 8, 16]),
    "width": ("d_model", [64, 128, 256, 512, 1024]),
    "vocabulary": ("vocab_size", [64, 512, 4096, 32768, 131072]),
    "batch": ("", [1, 2, 4, 8, 16]),
}


def cost(cfg, batch: int, rounds: int) -> tuple[float, float, float]:
    """(seconds of the processor, peak bytes, FLOPs) of one step."""
    from gptframe.inspect.cost import flops, rehearse
    from gptframe.model import build_model
    from gptframe.registry import build
    from gptframe.training.optimizer import param_groups

    section = {"name": "adamw", "lr": 1e-4}
    model = build_model(cfg)
    optimizer = build("optimizer", section, param_groups(model))
    ids = torch.randint(0, cfg.vocab_size, (batch, cfg.context_length))

    def step() -> float:
        start = time.process_time()
        (model(ids, targets=ids) / ids.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.process_time() - start

    step()
    seconds = min(step() for _ in range(rounds))
    asked = flops(cfg).training[0] * batch * cfg.context_length
    return seconds, float(rehearse(cfg, section, batch).peak), asked


def exponent(sizes: list[int], costs: list[float]) -> float:
    """p of costs = c sizes^p by least squares on logarithms, over the larger half."""
    half = list(zip(sizes, costs, strict=True))[len(sizes) // 2 :]
    xs, ys = [math.log(s) for s, _ in half], [math.log(c) for _, c in half]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", action="append", choices=AXES)
    parser.add_argument("--largest", type=int, default=2**20, help="leave out larger sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--png", metavar="FILE")
    a = parser.parse_args()
    from gptframe.config import ModelConfig

    torch.set_num_threads(a.threads)
    where = f"{machine(torch.device('cpu'), [a.threads])}, load {os.getloadavg()[0]:.1f}"
    print(where)
    print(f"{'axis':<12} {'size':>7} {'time':>9} {'memory':>10}")
    report: dict[str, dict] = {}
    for axis in a.axis or AXES:
        field, every = AXES[axis]
        sizes = [size for size in every if size <= a.largest]
        rows = []
        for size in sizes:
            cfg = dataclasses.replace(ModelConfig(), **{**SMALL, **({field: size} if field else {})})
            rows.append(cost(cfg, 1 if field else size, a.rounds))
            print(f"{axis:<12} {size:>7} {rows[-1][0]:7.3f} s {rows[-1][1] / 2**20:6.1f} MiB", flush=True)
        fitted = [exponent(sizes, [row[i] for row in rows]) for i in range(3)]
        print(f"{axis:<12} exponents: time {fitted[0]:.2f}, FLOPs {fitted[2]:.2f}, memory {fitted[1]:.2f}")
        report[axis] = {"sizes": sizes, "rows": rows, "exponents": fitted}
    if a.json:
        Path(a.json).write_text(json.dumps({"machine": where, "axes": report}, indent=1))
    if a.png:
        draw(report, where, a.png)


def draw(report: dict[str, dict], where: str, path: str) -> None:
    """Time and FLOPs above, memory below; both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(report) + 0.6, 5.2), dpi=130, layout="constrained")
    axes = figure.subplots(2, len(report), squeeze=False)
    for column, (axis, found) in enumerate(report.items()):
        sizes, rows, fitted = found["sizes"], found["rows"], found["exponents"]
        top, bottom = axes[0][column], axes[1][column]
        top.loglog(sizes, [row[0] for row in rows], marker="o", color="#2a5c9e", label=f"time, p = {fitted[0]:.2f}")
        scale = rows[-1][0] / rows[-1][2]
        top.loglog(sizes, [row[2] * scale for row in rows], "--", color="#777777", label=f"FLOPs, p = {fitted[2]:.2f}")
        bottom.loglog(
            sizes, [row[1] / 2**20 for row in rows], marker="o", color="#d9622b", label=f"memory, p = {fitted[1]:.2f}"
        )
        top.set_title(axis)
        for one in (top, bottom):
            one.set_xticks(sizes, [str(size) for size in sizes], rotation=45, fontsize=7)
            one.minorticks_off()
            one.legend(frameon=False, fontsize=7)
            one.grid(alpha=0.25)
    axes[0][0].set_ylabel("seconds a step")
    axes[1][0].set_ylabel("MiB")
    figure.suptitle(where, fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
