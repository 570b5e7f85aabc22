"""Interleaved timing: rivals take turns within one run, so that a loaded or throttled machine is the same for all."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one rival in each round: on the wall, and of processor time (on a GPU the same)."""

    seconds: list[float]
    processor: list[float]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleave(rivals: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, Timing]:
    """Time every rival once a round, in an order that rotates, after two rounds that do not count."""
    names = list(rivals)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            elapsed = _once(rivals[name], device)
            if number >= 2:
                seconds[name].append(elapsed)
    return {name: Timing(*(list(column) for column in zip(*rows, strict=True))) for name, rows in seconds.items()}


def _once(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000, start.elapsed_time(end) / 1000
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def ratio(slow: Sequence[float], fast: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile) of slow/fast, round by round."""
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    return ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]


def machine(device: torch.device, threads: Sequence[int]) -> str:
    """One line that says what the numbers were measured on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"{processor()}, threads {list(threads)}, torch {torch.__version__}"


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "CPU")
    except OSError:
        return "CPU"


def ratio_words(values: tuple[float, float, float]) -> str:
    """A median with its quartiles, as it is printed."""
    return f"{values[1]:.3f} [{values[0]:.3f}, {values[2]:.3f}]"


def load() -> str:
    """What the machine is and what else keeps it busy: processes that want to run, against cores."""
    busy = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{processor()}, {os.cpu_count()} cores, load {busy} (1, 5, 15 minutes)"
