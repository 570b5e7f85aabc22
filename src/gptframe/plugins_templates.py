"""The texts that `gptframe plugins new` writes: a small working plugin of each kind, its test and its config option."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """`code` and `option` have {name} and {Class} to fill in; `group` is the config group of the option."""

    group: str
    option: str
    run: str
    code: str


SUBLAYER = '''"""A sublayer of your own: it reads the stream x[B,T,D] and returns what to add to it."""

import torch
from torch import Tensor, nn

from gptframe import register


@register("sublayer", "{name}")
class {Class}(nn.Module):
    """Adds a linear map of the token before.

    Args:
        strength: factor of what is added.
    """

    parameter_formulas = {{"mix.weight": "D*D"}}  # what `gptframe params` shows and checks

    def __init__(self, cfg, layer: int, strength: float = 0.5):
        super().__init__()
        self.strength = strength
        self.mix = nn.Linear(cfg.d_model, cfg.d_model, bias=False)

    def forward(self, x: Tensor, ctx) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)  # [B, T, D], one token later
        return self.strength * self.mix(before)
'''

NORM = '''"""A norm of your own: it sees one token at a time, [..., dim]."""

import torch
from torch import Tensor, nn

from gptframe import register


@register("norm", "{name}")
class {Class}(nn.Module):
    """y = gain * x / (mean(|x|) + eps) over the last dimension.

    Args:
        eps: keeps the division away from 0.
    """

    parameter_formulas = {{"gain": "dim"}}  # what `gptframe params` shows and checks

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(dim=-1, keepdim=True) + self.eps) * self.gain.to(x.dtype)
'''

ACTIVATION = '''"""An activation of your own: forward(x) -> x elementwise; with `inputs = 2`, forward(x, gate) -> x."""

import torch
from torch import Tensor, nn

from gptframe import register


@register("activation", "{name}")
class {Class}(nn.Module):
    """x * sigmoid(slope * x).

    Args:
        slope: how sharply it turns on.
    """

    def __init__(self, slope: float = 1.5):
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.slope * x)
'''

POSITION = '''"""A position of your own: added to the embedded tokens."""

import torch
from torch import Tensor, nn

from gptframe import register
from gptframe.model.position import Position


@register("position", "{name}")
class {Class}(Position):
    """Adds one trained direction, times the position over the context length.

    Args:
        size: standard deviation of the direction at the start.
    """

    seat = "embedding"
    incremental = True  # ctx.positions is all that it looks at
    parameter_formulas = {{"direction": "D"}}  # what `gptframe params` shows and checks

    def __init__(self, cfg, size: float = 0.02):
        super().__init__(cfg)
        self.context, self.size = cfg.context_length, size
        self.direction = nn.Parameter(torch.zeros(cfg.d_model))

    def init_weights(self, draw) -> None:
        """Standard normal values come from `draw`, keyed by the parameter's name, so that runs can be compared."""
        self.direction.copy_(draw("direction") * self.size)

    def forward(self, x: Tensor, ctx) -> Tensor:
        place = (ctx.positions / self.context).to(x.dtype)[..., None]  # [T, 1]
        return x + place * self.direction
'''

SCHEDULE = '''"""A schedule of your own: the factor of the learning rate at each optimiser step, after warm-up."""

from gptframe import register


@register("schedule", "{name}")
def {name}(step: int, total_steps: int, power: float = 2.0) -> float:
    """(1 - step / total_steps) ** power.

    Args:
        power: 1 is a straight line.
    """
    return max(0.0, 1.0 - step / max(1, total_steps)) ** power
'''

OPTIMIZER = '''"""An optimiser of your own, of groups with a role: `matrix`, `decayed` or `plain`."""

import torch

from gptframe import register


@register("optimizer", "{name}")
def {name}(groups: list, lr: float, momentum: float = 0.9, weight_decay: float = 0.1) -> torch.optim.Optimizer:
    """SGD with momentum; matrices are decayed, embeddings, norms and biases are not.

    Args:
        momentum: of the running mean of gradients.
    """
    decayed = [{{**g, "weight_decay": 0.0 if g["role"] == "plain" else weight_decay}} for g in groups]
    return torch.optim.SGD(decayed, lr=lr, momentum=momentum)
'''

CORPUS = '''"""A corpus of your own: documents of text, in two splits."""

from collections.abc import Iterator

from gptframe import register


@register("corpus", "{name}")
class {Class}:
    """Sums of two numbers, written out.

    Args:
        largest: the largest number that is added.
    """

    def __init__(self, largest: int = 60):
        self.largest = largest

    def documents(self, split: str) -> Iterator[str]:
        """The same documents in the same order at each call; every tenth is for validation."""
        for a in range(self.largest + 1):
            for b in range(self.largest + 1):
                if ((a * 7 + b) % 10 == 0) == (split == "val"):
                    yield f"{{a}} + {{b}} = {{a + b}} ."

    def fingerprint(self) -> str:
        """Changes whenever the documents would: tokens are cached under it."""
        return f"{name}-1-{{self.largest}}"
'''

SECTION = "# @package model.{kind}\nname: {name}\n"
TEMPLATES = {
    "sublayer": Template(
        "experiment",
        "# @package _global_\n# attention, the new sublayer, MLP; its options stand under model.{name}\n"
        "name: {name}\nmodel:\n  block: [attention, {name}, mlp]\n  {name}:\n    strength: 0.5\n",
        "experiment={name}",
        SUBLAYER,
    ),
    "norm": Template("norm", SECTION + "eps: 1.0e-5\n", "norm={name}", NORM),
    "activation": Template("activation", SECTION + "slope: 1.5\n", "activation={name}", ACTIVATION),
    "position": Template("position", SECTION + "size: 0.02\n", "position={name}", POSITION),
    "schedule": Template(
        "schedule",
        "name: {name}\nwarmup_steps: null     # null: round(warmup_fraction * trainer.max_steps)\n"
        "warmup_fraction: 0.05\noverlap_warmup: false\npower: 2.0\n",
        "schedule={name}",
        SCHEDULE,
    ),
    "optimizer": Template(
        "optimizer",
        "name: {name}\nlr: 0.1\nmomentum: 0.9\nweight_decay: 0.001\n",
        "optimizer={name}",
        OPTIMIZER,
    ),
    "corpus": Template(
        "data", "name: {name}\nlargest: 60\n", "data={name} tokenizer=byte model.vocab_size=257", CORPUS
    ),
}

TEST = '''"""Every promise of a {kind}, tried."""

pytest_plugins = ["gptframe.testing.pytest_plugin"]


def test_{name}(conformance):
    conformance("{kind}", "{name}", plugin="{plugin}")
'''

PYPROJECT = """[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "{distribution}"
version = "0.1.0"
description = "The {kind} {name} for gptframe"
dependencies = ["gptframe"]

[project.entry-points."gptframe.plugins"]
{name} = "{package}.plugin"

[project.entry-points."gptframe.conf"]
{name} = "{package}.conf"

[tool.hatch.build.targets.wheel]
packages = ["src/{package}"]
"""
