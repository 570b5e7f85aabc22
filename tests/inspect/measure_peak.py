"""Trains a real model for two steps on the CPU and prints what the allocator and the system say it took, as JSON.

python tests/inspect/measure_peak.py '{"model": {...ModelConfig...}, "optimizer": {...}, "batch": 1, "length": 64}'
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gptframe.config import Config
from gptframe.model import build_model
from gptframe.registry import build
from gptframe.training.optimizer import param_groups


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def main(wanted: dict) -> dict:
    cfg = Config.from_dict({"model": wanted["model"]}).model
    warm = torch.randn(64, 64, requires_grad=True)
    (warm @ warm).sum().backward()
    before = status("VmRSS") if Path("/proc/self/status").exists() else None
    model = build_model(cfg)
    if wanted.get("precision") == "fp64":
        model.double()
    steps = build("optimizer", wanted["optimizer"], param_groups(model))
    ids = torch.randint(0, cfg.vocab_size, (wanted["batch"], wanted["length"]))
    bf16 = wanted.get("precision") == "bf16"

    def step() -> None:
        for _ in range(wanted.get("accumulation", 1)):
            with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
                loss = model(ids, targets=ids)
            (loss * 0.5).backward()
            del loss
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        steps.step()
        steps.zero_grad(set_to_none=True)

    step()
    resident = status("VmHWM") - before if before is not None else None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    tensors = [
        *model.parameters(),
        *(t for s in steps.state.values() for t in s.values() if isinstance(t, torch.Tensor)),
    ]
    kept = sum(t.numel() * t.element_size() for t in tensors)
    return {"peak": kept + most, "kept": kept, "resident": resident, "left": now}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
