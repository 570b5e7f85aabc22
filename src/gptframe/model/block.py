"""The residual stream: a sublayer around a core, and a block of sublayers in sequence or in parallel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.model.call import call, part
from gptframe.model.context import Context
from gptframe.registry import build, entry, lookup, register


class Sublayer(nn.Module):
    """y = post(x * residual_scale + out(core(pre(x)))); a seat that is not taken holds the identity."""

    pre, core, out, post, dropout = part(), part(), part(), part(), part()

    def __init__(self, core: nn.Module, name: str, cfg: ModelConfig, residual_scale: float):
        super().__init__()
        seats = lookup("norm_placement", cfg.norm_placement["name"], "model.norm_placement.name")
        self.pre = seat(seats.pre, cfg)
        self.core = core
        self.out = seat(seats.out, cfg)
        self.post = seat(seats.post, cfg)
        self.dropout = nn.Dropout(cfg.dropout) if cfg.dropout else nn.Identity()
        self.name, self.norm_name, self.residual_scale = name, str(cfg.norm["name"]), residual_scale

    def delta(self, x: Tensor, ctx: Context) -> Tensor:
        """What the sublayer adds to the stream: [B,T,D] -> [B,T,D]."""
        delta = self._kept("sublayer", self.name, self.core(self._normed(self.pre, x), ctx), x)
        return call(self.dropout, self._normed(self.out, delta))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self._normed(self.post, torch.add(self.delta(x, ctx), x, alpha=self.residual_scale))

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return self._kept("norm", self.norm_name, call(norm, x), x)

    def _kept(self, kind: str, name: str, y: object, x: Tensor) -> Tensor:
        """`y`, which must have the shape of `x`."""
        if y is x or (isinstance(y, Tensor) and y.shape == x.shape):
            return y
        got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        where = name if ":" in name else entry(kind, name).origin
        raise UserError(f"{kind} {name!r} ({where}) returned {got} for an input of {list(x.shape)}: they must be equal")


@register("topology", "sequential")
class Block(nn.Module):
    """Sublayers one after the other. A block of your own derives from it, or is any map of the stream."""

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Refuse a config that this block cannot serve, before anything is allocated."""

    def __init__(self, cfg: ModelConfig, layer: int, residual_scale: float):
        super().__init__()
        self.residual_scale = residual_scale
        for section in cfg.block_of(layer):
            name = section["name"]
            label = name.replace(":", "_").replace(".", "_")
            if hasattr(self, label) and label not in self._modules:
                raise UserError(
                    f"model.block: {name!r} is an attribute of every block and cannot name a sublayer; rename it"
                )
            core = build("sublayer", section, cfg, layer, key=f"model.{name}")
            taken = sum(other == label or other.startswith(label + "__") for other, _ in self.named_children())
            self.add_module(f"{label}__{taken + 1}" if taken else label, Sublayer(core, name, cfg, residual_scale))

    @property
    def incremental(self) -> bool:
        """Whether every core is (see `Context`)."""
        return all(getattr(sublayer.core, "incremental", False) for _, sublayer in sublayers(self))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        for _, sublayer in sublayers(self):
            x = sublayer(x, ctx)
        return x


@register("topology", "parallel")
class ParallelBlock(Block):
    """Sublayers side by side on the same stream: x * residual_scale + sum of deltas (GPT-J, 2021)."""

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        name = cfg.norm_placement["name"]
        if lookup("norm_placement", name).post:
            raise UserError(
                f"model.topology=parallel has no place for the post norms of norm_placement={name}: they would get no "
                f"gradient. Use norm_placement=pre, or model.topology=sequential"
            )
        if all(len(cfg.block_of(other)) == 1 for other in range(cfg.n_layers)):
            raise UserError(
                "model.topology=parallel needs at least two sublayers in model.block, as in [attention,mlp]"
            )

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        deltas = [sublayer.delta(x, ctx) for _, sublayer in sublayers(self)]
        return torch.add(sum(deltas[1:], deltas[0]), x, alpha=self.residual_scale)


def sublayers(block: nn.Module) -> Iterator[tuple[str, Sublayer]]:
    """The sublayers of a block, by the names that they have in it."""
    return ((name, module) for name, module in block.named_children() if isinstance(module, Sublayer))


def seat(taken: bool, cfg: ModelConfig) -> nn.Module:
    """A norm over d_model where the seat is taken, else the identity."""
    return build("norm", cfg.norm, cfg.d_model, key="model.norm") if taken else nn.Identity()
