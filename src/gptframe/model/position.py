"""How a model knows where a token stands: at the embedding (learned, sinusoidal) or in attention (rope, alibi)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.model.context import Context
from gptframe.model.init import with_role
from gptframe.registry import build, lookup, origin, register


class Position(nn.Module):
    """Leaves everything as it is; a position overrides the hook of its seat.

    `seat = "embedding"`: built once, `forward` is applied to the embedded tokens.
    `seat = "attention"`: built by each attention, `rotate` and `score_bias` are applied there.
    """

    seat = "embedding"

    def __init__(self, cfg: ModelConfig):
        super().__init__()

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """x[B,T,D] with positions added."""
        return x

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """q[B,H,T,d] and k[B,Hk,T,d] with positions turned into them."""
        return q, k

    def score_bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """What is added to the scores: [H,T,S] for positions Long[T] and Long[S], or None."""
        return None


def position_at(seat: str, cfg: ModelConfig) -> Position:
    """The configured position if it belongs at `seat`, else one that does nothing."""
    name = cfg.position["name"]
    cls_seat = getattr(lookup("position", name, "model.position.name"), "seat", None)
    if cls_seat not in ("embedding", "attention"):
        raise UserError(
            f"position {name!r} ({origin('position', name)}): seat={cls_seat!r} must be embedding or attention"
        )
    if cls_seat != seat:
        return Position(cfg)
    return build("position", cfg.position, cfg, key="model.position")


register("position", "none")(Position)


@register("position", "learned")
class LearnedPosition(Position):
    """One trained vector a position (GPT-2)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.table = with_role(nn.Embedding(cfg.context_length, cfg.d_model), "embedding")

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return x + self.table(ctx.positions)


@register("position", "sinusoidal")
class SinusoidalPosition(Position):
    """sin(p w_i) in even and cos(p w_i) in odd dimensions, w_i = base^(-2i/D) (Vaswani et al., 2017)."""

    def __init__(self, cfg: ModelConfig, base: float = 10000.0):
        super().__init__(cfg)
        if cfg.d_model % 2:
            raise UserError(f"model.position.name=sinusoidal needs an even model.d_model, not {cfg.d_model}")
        if not base > 0:
            raise UserError(f"model.position.base={base} must be greater than 0")
        self.dim, self.base = cfg.d_model, base

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        angle = _angles(ctx.positions, self.dim, self.base)  # [T, D/2]
        return x + torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).to(x.dtype)


@register("position", "rope")
class RoPE(Position):
    """Rotates pairs of each head's dimensions by p w_i, w_i = base^(-2i/d) (Su et al., RoFormer, 2021).

    Args:
        pairing: `interleaved` rotates dimensions (2i, 2i+1), as in the paper; `half` rotates (i, i + d/2), as in
            GPT-NeoX and LLaMA's released weights.
        fraction: the part of the head dimension that is rotated (0.25 in Pythia).
    """

    seat = "attention"

    def __init__(self, cfg: ModelConfig, base: float = 10000.0, pairing: str = "interleaved", fraction: float = 1.0):
        super().__init__(cfg)
        if pairing not in ("interleaved", "half"):
            raise UserError(f"model.position.pairing={pairing!r} is neither 'interleaved' nor 'half'")
        if not 0 < fraction <= 1 or not base > 0:
            raise UserError(f"model.position: fraction={fraction} must be in (0, 1] and base={base} greater than 0")
        self.dim = int(cfg.head_dim * fraction)
        if self.dim % 2 or self.dim == 0:
            raise UserError(
                f"model.position.name=rope rotates pairs: {fraction} of the head dimension d_model / n_heads = "
                f"{cfg.head_dim} is {self.dim}, which must be even and not 0"
            )
        self.base, self.pairing = base, pairing

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        angle = _angles(ctx.positions, self.dim, self.base)  # [T, d/2]
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : self.dim], x[..., self.dim :]
        if self.pairing == "interleaved":
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


@register("position", "alibi")
class ALiBi(Position):
    """Adds -slope_h * (query position - key position) to the scores (Press et al., 2021)."""

    seat = "attention"

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.slopes = alibi_slopes(cfg.n_heads)

    def score_bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        slopes = torch.tensor(self.slopes, device=q_positions.device, dtype=torch.float64)
        distance = (q_positions[:, None] - k_positions[None, :]).clamp(min=0)  # [T, S]
        return -slopes[:, None, None] * distance


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8 i / n) for n heads, i from 1; for n that is no power of 2, the paper's interleaving of two such series."""

    def series(n: int) -> list[float]:
        return [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]

    power = 2 ** math.floor(math.log2(n_heads))
    return series(power) + series(2 * power)[0::2][: n_heads - power]


def _angles(positions: Tensor, dim: int, base: float) -> Tensor:
    # In float64, since p * w loses digits in float32 from a few thousand positions on. Not a buffer: `.to(bfloat16)`
    # would round it.
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    exponent = torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / dim
    return positions.to(dtype)[..., None] * base**-exponent
