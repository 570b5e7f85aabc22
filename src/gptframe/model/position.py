"""How a model knows where a token stands: at the embedding (learned, sinusoidal) or in attention (rope, alibi)."""

from __future__ import annotations

import math
from typing import Any

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
    incremental = False
    """Whether ctx.positions may be Long[B,T] with values below 0 for padding (see `Context`)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """x[B,T,D] with positions added."""
        return x

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """q[B,H,T,d] and k[B,Hk,T,d] with positions turned into them."""
        return q, k

    def score_bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """What is added to the scores: [H,T,S] for positions Long[T] and Long[S] ([B,H,T,S] for rows of their own)."""
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
        return NoPosition(cfg)
    return build("position", cfg.position, cfg, key="model.position")


@register("position", "none")
class NoPosition(Position):
    """The order of the tokens shows in the causal mask alone (Kazemnejad et al., 2023)."""

    incremental = True


@register("position", "learned")
class LearnedPosition(Position):
    """One trained vector a position (GPT-2)."""

    incremental = True

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.table = with_role(nn.Embedding(cfg.context_length, cfg.d_model), "embedding")

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return x + self.table(ctx.positions if ctx.positions.ndim == 1 else ctx.positions.clamp(min=0))


@register("position", "sinusoidal")
class SinusoidalPosition(Position):
    """sin(p w_i) in even and cos(p w_i) in odd dimensions, w_i = base^(-2i/D) (Vaswani et al., 2017)."""

    incremental = True

    def __init__(self, cfg: ModelConfig, base: float = 10000.0):
        super().__init__(cfg)
        if cfg.d_model % 2:
            raise UserError(f"model.position.name=sinusoidal needs an even model.d_model, not {cfg.d_model}")
        if not base > 0:
            raise UserError(f"model.position.base={base} must be greater than 0")
        self.dim, self.base = cfg.d_model, base

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        angle = _angles(ctx.positions, _frequencies(self.dim, self.base, ctx.positions.device))  # [T, D/2]
        return x + torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).to(x.dtype)


@register("position", "rope")
class RoPE(Position):
    """Rotates pairs of each head's dimensions by p w_i, w_i = base^(-2i/d) (Su et al., RoFormer, 2021).

    Args:
        pairing: `interleaved` rotates dimensions (2i, 2i+1), as in the paper; `half` rotates (i, i + d/2), as in
            GPT-NeoX and LLaMA's released weights.
        fraction: the part of the head dimension that is rotated (0.25 in Pythia).
        scaling: stretches the w_i for a context longer than the one that the model was trained on, as in
            `{name: llama3, factor: 8, original_context: 8192}`; see `scaled`. null for none.
    """

    seat = "attention"
    incremental = True

    def __init__(
        self,
        cfg: ModelConfig,
        base: float = 10000.0,
        pairing: str = "interleaved",
        fraction: float = 1.0,
        scaling: dict[str, Any] | None = None,
    ):
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
        self.scaling = None if scaling is None else _check_scaling(scaling)
        self._key = (self.dim, self.base, self.pairing, str(self.scaling))

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        cos, sin = self._turns(q.dtype, ctx)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _frequencies(self, device: torch.device) -> Tensor:
        w = _frequencies(self.dim, self.base, device)
        return w if self.scaling is None else scaled(w, **self.scaling)

    def _turns(self, dtype: torch.dtype, ctx: Context) -> tuple[Tensor, Tensor]:
        """cos and sin of the angle of each dimension, [T,d] or [B,1,T,d]; negative for the first of a pair."""
        if ctx.cache is None:
            return self._cos_sin(self._signed_frequencies(ctx.positions.device), dtype, ctx.positions)
        shared = ctx.cache.shared

        def turns() -> tuple[Tensor, Tensor]:
            w = shared(self._key, lambda: self._signed_frequencies(ctx.positions.device), constant=True)
            return self._cos_sin(w, dtype, ctx.positions)

        return shared((self._key, dtype), turns)  # the same for all layers

    def _signed_frequencies(self, device: torch.device) -> Tensor:
        """-w_i for the first dimension of a pair and w_i for the second, [d]."""
        w = self._frequencies(device)
        return torch.cat([-w, w]) if self.pairing == "half" else torch.stack([-w, w], dim=-1).flatten()

    @staticmethod
    def _cos_sin(frequencies: Tensor, dtype: torch.dtype, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = _angles(positions, frequencies)  # [T, d]
        if angle.ndim == 3:
            angle = angle[:, None]  # [B, 1, T, d]
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Each pair (a, b) becomes (a cos - b sin, b cos + a sin); the minus is in the first one's sine."""
        if self.dim < x.shape[-1]:
            return torch.cat([self._rotate(x[..., : self.dim], cos, sin), x[..., self.dim :]], dim=-1)
        if self.pairing == "half":
            other = x.roll(self.dim // 2, dims=-1)
        else:
            other = x.unflatten(-1, (self.dim // 2, 2)).flip(-1).flatten(-2)
        return torch.addcmul(x * cos, other, sin)


@register("position", "alibi")
class ALiBi(Position):
    """Adds -slope_h * (query position - key position) to the scores (Press et al., 2021)."""

    seat = "attention"
    incremental = True

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.slopes = alibi_slopes(cfg.n_heads)

    def score_bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        slopes = torch.tensor(self.slopes, device=q_positions.device, dtype=torch.float64)
        distance = (q_positions[..., :, None] - k_positions[..., None, :]).clamp(min=0)  # [T, S], or [B, T, S]
        return -slopes[:, None, None] * distance.unsqueeze(-3)


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8 i / n) for n heads, i from 1; for n that is no power of 2, the paper's interleaving of two such series."""

    def series(n: int) -> list[float]:
        return [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]

    power = 2 ** math.floor(math.log2(n_heads))
    return series(power) + series(2 * power)[0::2][: n_heads - power]


def _frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    """w_i = base^(-2i/dim), [dim/2]."""
    # In float64, since p * w loses digits in float32 from a few thousand positions on. Not a buffer: `.to(bfloat16)`
    # would round it.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return base ** -(torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)


def _angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions.to(frequencies.dtype)[..., None] * frequencies


def scaled(
    w: Tensor,
    name: str,
    factor: float,
    original_context: int = 8192,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Tensor:
    """The frequencies w[d/2], slowed down.

    linear      w / factor (Chen et al., Position Interpolation, 2023)
    llama3      w / factor for wavelengths 2 pi / w above original_context / low_freq_factor, w for those below
                original_context / high_freq_factor, and between them (1 - s) w / factor + s w, where s goes from 0 to 1
                with original_context / wavelength (LLaMA 3.1, 2024)
    """
    if name == "linear":
        return w / factor
    turns = original_context * w / (2 * math.pi)  # within the original context
    s = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - s) * w / factor + s * w


_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_context", "low_freq_factor", "high_freq_factor"),
}


def _check_scaling(scaling: dict[str, Any]) -> dict[str, Any]:
    key, options = "model.position.scaling", {k: v for k, v in scaling.items() if k != "name"}
    name = scaling.get("name")
    if name not in _SCALINGS:
        raise UserError(f"{key}.name={name!r} must be one of {', '.join(_SCALINGS)}")
    for option, value in options.items():
        if option not in _SCALINGS[name]:
            raise UserError(f"{key}.{option}: {name} has no such option. Known: {', '.join(_SCALINGS[name])}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UserError(f"{key}.{option}={value!r} must be a number greater than 0")
    if "factor" not in options:
        raise UserError(f"{key} needs a factor, as in {key}={{name: {name}, factor: 8}}")
    if options["factor"] == 1:
        raise UserError(f"{key}.factor=1 scales nothing: use {key}=null")
    if name == "llama3" and not options.get("low_freq_factor", 1) < options.get("high_freq_factor", 4):
        raise UserError(f"{key}.low_freq_factor must be below {key}.high_freq_factor")
    return {"name": name, **options}
