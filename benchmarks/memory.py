"""What the switches that save memory cost in speed: whole runs of `python train.py`, each in a process of its own.

    python benchmarks/memory.py                              # andrea12m, a few minutes
    python benchmarks/memory.py --model andrea120m --steps 3 --rounds 1
    python benchmarks/memory.py --size model.vocab_size=32768 --only 'all logits at once'

Memory is the peak of the process (Python and PyTorch included). Speed is tokens a second of processor time, the median
after the first step; its ratio to the plain run is taken within a round, so that other load on the machine is shared.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from timing import machine

ROOT = Path(__file__).parents[1]
CASES = {
    "plain": [],
    "recompute": ["trainer.recompute=true"],
    "one sequence at a time": ["trainer.micro_batch_size=1"],
    "both": ["trainer.recompute=true", "trainer.micro_batch_size=1"],
    "all logits at once": ["trainer.chunked_loss=false"],
    "optimiser state in bf16": ["optimizer.state_dtype=bfloat16"],
    "lion (one moment, not two)": ["optimizer=lion"],
    "lion, state in bf16": ["optimizer=lion", "optimizer.state_dtype=bfloat16"],
    "bf16 products": ["precision=bf16"],
    "freed memory given back": ["trainer.reuse_memory=false"],
    "all that save": ["trainer.recompute=true", "trainer.micro_batch_size=1", "precision=bf16", "optimizer=lion"],
}
CASES["all that save"] += ["optimizer.state_dtype=bfloat16", "trainer.reuse_memory=false"]


def processor_clock() -> object:
    """A callback that logs how long the processor has worked."""
    import pytorch_lightning as pl

    class Clock(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_) -> None:
            pl_module.log("processor", time.process_time())

    return Clock()


def run(overrides: list[str], a, place: Path) -> tuple[float, float]:
    """(peak in GiB, sequences a second of processor time) of one run."""
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        f"model={a.model}",
        *a.size,
        "data=text",
        f"data.path={place.parent / 'text.txt'}",
        "data.baseline_order=0",
    ]
    command += ["tokenizer=byte", f"trainer.max_steps={a.steps}", "trainer.val_batches=1", "trainer.log_interval=1"]
    command += ["precision=fp32", f"plugins=[{__file__}]", "+callbacks.extra.processor_clock={}"]
    command += [f"trainer.global_batch_size={a.batch}", f"trainer.micro_batch_size={a.batch}", "callbacks=none"]
    typed = {override.partition("=")[0] for override in overrides}
    command = [c for c in command if c.partition("=")[0] not in typed]
    # Not the verbs, whose forms are asked for at the end of a run.
    (place.parent / "text.txt").write_text("Memory is short, and time is as well. " * 10000)
    started = subprocess.Popen(
        [*command, *overrides, f"run_dir={place}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT
    )
    said = started.stderr.read().decode()
    _, status, usage = os.wait4(started.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(overrides) or 'the plain run'} failed: {said}")
    with open(place / "metrics.csv", newline="") as file:
        clock = [float(row["aux/processor"]) for row in csv.DictReader(file) if row["aux/processor"]]
    return usage.ru_maxrss / 2**20, statistics.median(
        a.batch / (after - before) for before, after in zip(clock, clock[1:], strict=False)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="andrea12m")
    parser.add_argument("--size", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(CASES)[1:], help="this case, beside the plain run")
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    cases = {name: overrides for name, overrides in CASES.items() if name in ("plain", *(a.only or CASES))}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    load = os.getloadavg()[0]
    for _ in range(a.rounds):
        for name, overrides in cases.items():
            with tempfile.TemporaryDirectory() as place:
                found[name].append(run(overrides, a, Path(place) / "run"))
    print(f"{machine(torch.device('cpu'), [torch.get_num_threads()])}, load {load:.1f} before the start")
    print(f"{a.model} {' '.join(a.size)}, {a.batch} sequences a step, {a.rounds} rounds of {a.steps} steps")
    print(f"{'':<28} {'peak':>9}  speed against plain")
    for name, rows in found.items():
        ratios = sorted(row[1] / plain[1] for row, plain in zip(rows, found["plain"], strict=True))
        peak = max(row[0] for row in rows)
        print(f"{name:<28} {peak:6.2f} GiB  {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    if a.json:
        Path(a.json).write_text(json.dumps({"load": load, "arguments": vars(a), "runs": found}, indent=1))


if __name__ == "__main__":
    main()
else:  # loaded as a plugin by the runs
    from gptframe import register

    register("callback", "processor_clock")(processor_clock)
