"""Learning-rate schedules: pure functions from the step to a multiplier of the optimiser's learning rate.

Step t counts from 0, so the first update is t = 0. All shapes share a linear warm-up of W steps, min(1, (t + 1) / W):

    overlap_warmup: false    warm-up alone for W steps, then shape(t - W, T - W)
    overlap_warmup: true     shape(t, T) * warm-up, the decay running from the first step on

T is trainer.max_steps. Extending it on resume evaluates the same functions with the new T and the old W: cosine and
linear stretch over the longer run, so the rate rises again to where the longer run would have it; wsd and constant do
not move unless wsd's decay had begun, in which case the rate returns to its plateau (Hu et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gptframe.errors import UserError
from gptframe.registry import build, check_options, lookup, register

WARMUP_OPTIONS = ("warmup_steps", "warmup_fraction", "overlap_warmup")


def _floor(multiplier: float, min_ratio: float) -> float:
    return min_ratio + (1.0 - min_ratio) * multiplier


def _check_ratio(key: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UserError(f"schedule.{key}={value} must be from 0 to 1")


@register("schedule", "cosine")
def cosine(step: int, total_steps: int, min_ratio: float = 0.1) -> float:
    """Half a cosine from 1 to `min_ratio` (Loshchilov and Hutter, 2017, without restarts)."""
    _check_ratio("min_ratio", min_ratio)
    return _floor(0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(1, total_steps)))), min_ratio)


@register("schedule", "linear")
def linear(step: int, total_steps: int, min_ratio: float = 0.0) -> float:
    """A straight line from 1 to `min_ratio`."""
    _check_ratio("min_ratio", min_ratio)
    return _floor(1.0 - min(1.0, step / max(1, total_steps)), min_ratio)


@register("schedule", "constant")
def constant(step: int, total_steps: int) -> float:
    """1 throughout."""
    return 1.0


@register("schedule", "wsd")
def wsd(
    step: int, total_steps: int, decay_fraction: float = 0.2, decay: str = "linear", min_ratio: float = 0.0
) -> float:
    """Warm-up, stable, decay (Hu et al., MiniCPM, 2024): 1, then down to `min_ratio` in the last steps.

    Args:
        decay_fraction: the part of the steps after warm-up that decays.
        decay: `linear`, or `sqrt` for 1 - sqrt(progress) (Haegele et al., 2024).
    """
    _check_ratio("decay_fraction", decay_fraction)
    _check_ratio("min_ratio", min_ratio)
    if decay not in ("linear", "sqrt"):
        raise UserError(f"schedule.decay={decay!r} is neither 'linear' nor 'sqrt'")
    length = round(decay_fraction * total_steps)
    into = step - (total_steps - length)
    if into <= 0:
        return 1.0
    progress = min(1.0, into / length)
    return _floor(1.0 - (progress if decay == "linear" else math.sqrt(progress)), min_ratio)


def resolve_warmup(section: Mapping[str, Any], max_steps: int) -> dict[str, Any]:
    """The section with `warmup_steps` as a number: round(warmup_fraction * max_steps) where it is null.

    Raises:
        UserError: a warm-up that is negative or longer than the run.
    """
    steps, fraction = section.get("warmup_steps"), section.get("warmup_fraction", 0.0)
    if steps is None:
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise UserError(f"schedule.warmup_fraction={fraction!r} must be a number from 0 to 1")
        _check_ratio("warmup_fraction", fraction)
        steps = round(fraction * max_steps)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UserError(f"schedule.warmup_steps={steps!r} must be a whole number of at least 0, or null")
    if steps > max_steps:
        raise UserError(
            f"schedule.warmup_steps={steps} is longer than the run of trainer.max_steps={max_steps}: "
            f"lower the first or raise the second"
        )
    return {**section, "warmup_steps": steps}


def make_schedule(section: Mapping[str, Any], max_steps: int) -> Callable[[int], float]:
    """The multiplier as a function of the step, checked once.

    Args:
        section: `{name, warmup_steps, warmup_fraction, overlap_warmup, **options of the shape}`.
        max_steps: T.

    Raises:
        UserError: an unknown shape or option, or a warm-up longer than the run.
    """
    section = resolve_warmup(section, max_steps)
    warmup, overlap = section["warmup_steps"], section.get("overlap_warmup", False)
    if not isinstance(overlap, bool):
        raise UserError(f"schedule.overlap_warmup={overlap!r} must be true or false")
    shape_section = {k: v for k, v in section.items() if k not in WARMUP_OPTIONS}
    build("schedule", shape_section, 0, max_steps)  # refuses bad names, options and values before training starts
    shape = lookup("schedule", section["name"])
    options = {k: v for k, v in shape_section.items() if k != "name"}
    options = check_options("schedule", shape, options, 2, "schedule")

    def multiplier(step: int) -> float:
        if overlap:
            decay = shape(step, max_steps, **options)
        else:
            decay = shape(step - warmup, max_steps - warmup, **options) if step >= warmup else 1.0
        return decay * min(1.0, (step + 1) / warmup) if warmup else decay

    return multiplier
