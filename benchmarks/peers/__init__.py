"""The training steps of other people's code, each on our weights: one file a peer, with `load(ours, config, given)`.

A peer says in `OVERRIDES` which options its architecture needs, and returns a `Peer`. What it cannot express it refuses
with a ValueError that names it. No peer's code is in this repository: it comes from the package index, or from a folder
that is given as `--peer nanogpt=DIR`. `DEVICES` names the devices that it runs on, where these are not all.

A peer that is a program has `start(ours, config, given, tokens, batch, threads)` instead, which returns a `Process`;
`MOST_ROUNDS` says how many steps in a row it does and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Peer:
    """A model with our weights.

    Attributes:
        version: of the peer's code, for the report.
        model: what is compiled.
        loss: (model, ids Long[B,T], targets Long[B,T] with -100 for none) -> mean cross-entropy.
        groups: what goes to AdamW, as the peer's own script splits it.
    """

    version: str
    model: nn.Module
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    groups: Iterable[dict]


def decayed_by_axes(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices and embeddings with decay, the rest without: what scripts in this field do."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


class Process(Protocol):
    """A program that trains on our weights, always on the same batch, and waits between its steps."""

    version: str

    def step(self) -> float:
        """Let it do a step; the loss before the update."""

    def most_held(self) -> int:
        """The most memory that it has held, in bytes."""
