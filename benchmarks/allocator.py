"""What `trainer.reuse_memory` saves on a CPU: page faults and processor time of a training step, and its peak.

    python benchmarks/allocator.py                                  # andrea12m in float32
    python benchmarks/allocator.py --model andrea120m --precision bf16 --steps 1 --rounds 1

Each measurement is a process of its own, in turns; a step is forward, backward, clipping and AdamW. `huge pages` is
glibc's tunable glibc.malloc.hugetlb=1 in addition, which only the environment of a new process can set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from timing import load

CASES = {"as it is": {}, "reuse_memory": {"REUSE": "1"}, "huge pages": {"REUSE": "1"}}
CASES["huge pages"]["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"


def one(a: argparse.Namespace) -> None:
    """Measure in this process, and print medians over the steps as JSON."""
    from gptframe.training.allocator import reused_memory

    with reused_memory("REUSE" in os.environ, "cpu"):
        import torch
        from step import most_held

        from gptframe.compose import compose_config
        from gptframe.config import Config
        from gptframe.model import build_model
        from gptframe.registry import build
        from gptframe.training.optimizer import param_groups

        torch.set_num_threads(a.threads)
        config = Config.from_dict(compose_config([f"model={a.model}"]))
        model = build_model(config.model, seed=1)
        optimizer = build("optimizer", {"name": "adamw", "lr": 1e-4}, param_groups(model))
        shape = tuple(map(int, a.batch.split("x")))
        ids = torch.randint(0, model.cfg.vocab_size, shape, generator=torch.Generator().manual_seed(0))

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16) if a.precision == "bf16" else contextlib.nullcontext():
                loss = model(ids, targets=ids) / ids.numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        rows = []
        for number in range(a.steps + 2):
            before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            step()
            after = resource.getrusage(resource.RUSAGE_SELF)
            system = after.ru_stime - before.ru_stime
            processor = after.ru_utime - before.ru_utime + system
            if number >= 2:
                rows.append((time.perf_counter() - wall, processor, system, after.ru_minflt - before.ru_minflt))
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(json.dumps([*medians, most_held() / 2**30]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="andrea12m")
    parser.add_argument("--batch", default="2x1024", metavar="BxT")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one:
        one(a)
        return
    print(f"{load()}, {a.threads} threads; {a.model}, {a.batch}, {a.precision}, {a.rounds} rounds of {a.steps} steps")
    found: dict[str, list[list[float]]] = {name: [] for name in CASES}
    for _ in range(a.rounds):
        for name, variables in CASES.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--one"]
            done = subprocess.run(
                command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(
        f"{'':<14} {'wall':>7} {'processor':>10} {'kernel':>7} {'faults':>8} {'peak':>9}   processor, as it is / this"
    )
    for name, rows in found.items():
        wall, processor, system, faults, peak = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = sorted(plain[1] / row[1] for plain, row in zip(found["as it is"], rows, strict=True))
        words = f"{statistics.median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        print(f"{name:<14} {wall:6.2f}s {processor:9.2f}s {system:6.2f}s {faults:8.0f} {peak:5.2f} GiB   {words}")


if __name__ == "__main__":
    main()
