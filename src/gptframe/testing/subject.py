"""A part under test: how it is built, what goes into it, and what comes out, the same for all kinds of the model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gptframe import registry
from gptframe.config import ModelConfig
from gptframe.model.context import Context
from gptframe.model.gpt import GPT, build_model
from gptframe.model.init import initialize

SMALL: dict[str, Any] = {"name": "conformance", "d_model": 32, "n_heads": 4, "context_length": 16, "vocab_size": 64}
OF_A_STACK: dict[str, Any] = {**SMALL, "d_model": 16, "n_heads": 2, "context_length": 8}  # all of its blocks are tried


class Harness(nn.Module):
    """Calls a part of any kind as `y = harness(x, ctx)`, with x[B,T,width] and y[B,T,width_out]."""

    def __init__(self, kind: str, core: nn.Module, seat: str = ""):
        super().__init__()
        self.kind, self.core, self.seat = kind, core, seat
        self.inputs = getattr(core, "inputs", 1) if kind == "activation" else 1

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        if self.kind == "activation":
            return self.core(*x.chunk(self.inputs, dim=-1))
        if self.kind == "norm":
            return self.core(x)
        if ctx is None:
            ctx = Context(positions=torch.arange(x.shape[1], device=x.device))
        ctx.ids, ctx.shared = tokens_of(x), {}
        return self.core(x, ctx)


def tokens_of(x: Tensor) -> Tensor:
    """Ids from 0 to 31 that go with the rows of x[B,T,D], each with its own: five signs, which no dtype changes."""
    signs = (x.detach()[..., :5] > 0).long()
    return (signs * (1 << torch.arange(signs.shape[-1], device=x.device))).sum(dim=-1)


class Stack(nn.Module):
    """The blocks of a model, as a map of the stream."""

    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        for block in self.blocks:
            x = block(x, ctx)
        return x


class Subject:
    """One registered part with its options, and a small model to put it in."""

    def __init__(self, kind: str, name: str, options: Mapping[str, Any], cfg: ModelConfig | None = None):
        self.kind, self.name, self.options = kind, name, dict(options)
        self.entry = registry.entry(kind, name)
        self.value, self.origin, self.file = self.entry.value, self.entry.origin, self.entry.file
        self.section = {"name": name, **self.options}
        small = OF_A_STACK if kind in ("topology", "transform") else SMALL
        self.plain = cfg if cfg is not None else ModelConfig(**small)
        self.cfg = self._place(self.plain)
        self.seat = getattr(self.value, "seat", "") if kind == "position" else ""

    def _place(self, cfg: ModelConfig) -> ModelConfig:
        """`cfg` with this part in its seat."""
        if self.kind == "sublayer":
            block = [self.section] if self.name == "attention" else ["attention", self.section]
            return dataclasses.replace(cfg, block=block, layers={}, sublayers={"attention": {}, "mlp": {}})
        if self.kind == "transform":
            return dataclasses.replace(cfg, transforms={self.name: self.options})
        if self.kind in ("norm", "activation", "position", "init", "topology", "head"):
            seats: dict[str, Any] = {self.kind: self.section}
            return dataclasses.replace(cfg, **seats)
        return cfg

    def with_cfg(self, **changes: Any) -> Subject:
        """The same part in a model with other values."""
        return Subject(self.kind, self.name, self.options, dataclasses.replace(self.plain, **changes))

    @property
    def dim(self) -> int:
        """Width of what goes in, for each input."""
        return self.cfg.hidden if self.kind == "activation" else self.cfg.d_model

    @functools.cached_property
    def inputs(self) -> int:
        """How many inputs an activation has."""
        return getattr(self.value, "inputs", 1) if self.kind == "activation" else 1

    def make(self, constructor_seed: int = 0, layer: int = 0) -> Harness:
        """The part as its constructor leaves it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(constructor_seed)
            if self.kind == "position" and self.seat == "attention":
                # attention is where such a position acts, and turns it into a map of the stream
                core = registry.build("sublayer", {"name": "attention"}, self.cfg, layer, key="model.attention")
            elif self.kind in ("topology", "transform"):
                core = Stack(GPT(self.cfg).blocks)
            else:
                arguments = {
                    "sublayer": (self.cfg, layer),
                    "norm": (self.cfg.d_model,),
                    "activation": (),
                    "position": (self.cfg,),
                }[self.kind]
                key = f"model.{self.name if self.kind == 'sublayer' else self.kind}"
                core = registry.build(self.kind, self.section, *arguments, key=key)
        if not isinstance(core, nn.Module):
            raise TypeError(f"{self.kind} {self.name!r} is no nn.Module but {type(core).__name__}")
        return Harness(self.kind, core, self.seat)

    def build(self, seed: int = 0, constructor_seed: int = 0, layer: int = 0) -> Harness:
        """The part as a model holds it: constructed, then initialised from `seed`; in training mode."""
        harness = self.make(constructor_seed, layer)
        initialize(harness, self.cfg, seed)
        return harness

    def part(self, harness: Harness) -> Any:
        """The part itself: attention holds a position of its seat, and a stack the blocks."""
        if self.kind == "topology":
            return harness.core.get_submodule("blocks.0")
        return harness.core.position if harness.seat == "attention" else harness.core

    @functools.cached_property
    def incremental(self) -> bool:
        if self.kind in ("topology", "transform"):
            return all(getattr(block, "incremental", False) for block in GPT(self.cfg).blocks)
        return bool(getattr(self.value, "incremental", False))

    def model(self, seed: int = 0, device: str = "cpu") -> GPT:
        """A small GPT with the part in it."""
        return build_model(self.cfg, seed, device)

    def x(self, batch: int, length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values [batch, length, width]; the same seed gives the same values."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, length, self.dim * self.inputs, generator=generator).to(dtype)

    @property
    def context(self) -> int:
        return self.cfg.context_length


def run(harness: Harness, x: Tensor, ctx: Context | None = None, seed: int = 0) -> Tensor:
    """One forward pass with everything random drawn from `seed`; torch's own generator is put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return harness(x, ctx)


def set_mode(harness: Harness, mode: str) -> None:
    harness.train(mode == "training")


def randomized(harness: Harness, seed: int = 7, scale: float = 0.3) -> Harness:
    """Add noise to every parameter: at initialisation zeros and ones hide what a trained part does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in harness.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
            parameter.add_(noise * (scale if parameter.ndim < 2 else fan_in**-0.5))
    return harness


def shape(x: Tensor) -> str:
    return f"x{list(x.shape)}"


def weights_like(y: Tensor, seed: int = 3) -> Tensor:
    """Random weights for a sum over y: a plain sum is blind to whatever a norm keeps at zero mean."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
