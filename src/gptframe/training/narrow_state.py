"""Optimiser state in bfloat16: half the memory, and the same update, which is computed in float32.

A running mean cannot simply be kept in bfloat16, which has 8 bits: with beta2 = 0.999 a mean that should fall by a
thousandth is rounded back to where it was, step after step. So what is stored is rounded at random, up or down with
the odds that keep it right on average. The random bits are a function of the step alone, and a run that is resumed
goes on to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gptframe.errors import UserError

DTYPES = ("float32", "bfloat16")
BATCH_ELEMENTS = 2**22  # of parameters that are widened at once: 16 MiB a moment, or the largest parameter


def stored_as(state_dtype: str, optimizer: Optimizer) -> Optimizer:
    """`optimizer`, with its state in the dtype that an option names.

    Raises:
        UserError: it is not one of `DTYPES`.
    """
    if state_dtype not in DTYPES:
        raise UserError(f"optimizer.state_dtype={state_dtype!r} is not one of {', '.join(DTYPES)}")
    return NarrowState(optimizer) if state_dtype == "bfloat16" else optimizer


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss that a `step` is given to compute, with its gradients; None where it is given none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class NarrowState(Optimizer):
    """Keeps the state of any other optimiser in bfloat16, and lends it in the parameter's dtype, some parameters at a
    time, for its step. Of the inner one nothing is kept between steps."""

    def __init__(self, inner: Optimizer):
        self.inner = {"inner": inner}
        super().__init__([{**group, "roundings": 0} for group in inner.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        inner = self.inner["inner"]
        for number, (group, params) in enumerate(self._batches()):
            inner.param_groups = [{**group, "params": params}]
            inner.state = defaultdict(dict)
            for p in params:
                if p in self.state:
                    inner.state[p] = {k: t.to(p.dtype) if _is_moment(k, t) else t for k, t in self.state[p].items()}
            inner.step()
            self._store(inner.state, group["roundings"] * 8191 + number)
            inner.state.clear()  # an optimiser inside `inner` may hold the same dict
        for group in self.param_groups:
            group["roundings"] += 1
        return loss

    def _batches(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        for group in self.param_groups:
            batch: list[Tensor] = []
            size = 0
            for p in group["params"]:
                if batch and size + p.numel() > BATCH_ELEMENTS:
                    yield group, batch
                    batch, size = [], 0
                batch.append(p)
                size += p.numel()
            if batch:
                yield group, batch

    def _store(self, state: Mapping[Tensor, dict[str, Any]], seed: int) -> None:
        moments = [(p, key, t) for p, own in state.items() for key, t in own.items() if _is_moment(key, t)]
        for p, own in state.items():  # a moment stays where it is in memory: moved at every step it would scatter
            kept = self.state[p]
            for key, value in own.items():
                if not _is_moment(key, value):
                    kept[key] = value
                elif key not in kept:
                    kept[key] = torch.empty_like(value, dtype=torch.bfloat16)
        if not moments:
            return
        device = moments[0][2].device
        sizes = [t.numel() for _, _, t in moments]
        # One call for all, of 64 bits for four moments: a CPU draws them one after the other.
        bits = torch.empty(-(-sum(sizes) // 4), dtype=torch.int64, device=device)
        bits.random_(-(2**63), None, generator=torch.Generator(device).manual_seed(seed))
        for (p, key, t), noise in zip(moments, bits.view(torch.int16)[: sum(sizes)].split(sizes), strict=True):
            self.state[p][key].copy_(round_at_random(t, noise))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # which takes the state to the dtype of its parameter
        for own in self.state.values():
            own.update({key: t.to(torch.bfloat16) for key, t in own.items() if _is_moment(key, t)})


def _is_moment(key: str, value: Any) -> bool:
    """PyTorch's own rule: what is floating, and is not the count of steps, goes with the parameter."""
    return key != "step" and isinstance(value, Tensor) and value.is_floating_point()


def round_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """x in bfloat16, to one of its two neighbours, with odds that make the mean right. What is exact stays.

    Args:
        x: is written over.
        noise: int16, as many as x has, uniform.
    """
    bits = x.float().view(torch.int32)
    bits += noise.view(x.shape)
    bits += 2**15  # noise from 0 to 2^16 - 1 carries into the upper half as often as the lower half is full
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)
