"""Normalisation layers, and the table of where they sit around a sublayer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe.errors import UserError
from gptframe.registry import register


def positive(eps: float) -> float:
    if not eps > 0:
        raise UserError(f"model.norm.eps={eps} must be greater than 0")
    return eps


@register("norm", "layernorm")
class LayerNorm(nn.LayerNorm):
    """y = gain * (x - mean(x)) / sqrt(var(x) + eps) + bias over the last dimension (Ba et al., 2016)."""

    def __init__(self, dim: int, eps: float = 1e-5, affine: bool = True, bias: bool = True):
        super().__init__(dim, eps=positive(eps), elementwise_affine=affine, bias=bias)


@register("norm", "rmsnorm")
class RMSNorm(nn.Module):
    """y = gain * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float = 1e-5, affine: bool = True):
        super().__init__()
        self.dim, self.eps = dim, positive(eps)
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)


@dataclass(frozen=True)
class NormPlacement:
    """Which seats of y = post(x * residual_scale + out(core(pre(x)))) are taken, and what else belongs to a placement.

    Attributes:
        pre, out, post: the seats of each sublayer.
        embedding: normalise the stream before the first block.
        final: normalise the stream after the last block.
        residual_scale: factor of the stream as a function of the number of sublayers in the stack.
    """

    pre: bool = False
    out: bool = False
    post: bool = False
    embedding: bool = False
    final: bool = True
    residual_scale: Callable[[int], float] = lambda n_sublayers: 1.0


# Xiong et al. (2020): the normalised branch keeps the stream an unbroken sum.
register("norm_placement", "pre")(NormPlacement(pre=True))
# Vaswani et al. (2017). Its last sublayer already ends in a norm, so that a final one would only repeat it.
register("norm_placement", "post")(NormPlacement(post=True, final=False))
# OLMo 2 (2024): only the delta is normalised.
register("norm_placement", "output")(NormPlacement(out=True))
# CogView (Ding et al., 2021), Gemma 2 (2024): before and after the core.
register("norm_placement", "sandwich")(NormPlacement(pre=True, out=True))
# Peri-LN (Kim et al., 2025): sandwich, and the embeddings too.
register("norm_placement", "peri")(NormPlacement(pre=True, out=True, embedding=True))
# Keel (Chen and Wei, 2026): post-norm over a stream scaled by the number of sublayers, with a normalised branch.
register("norm_placement", "keel")(NormPlacement(pre=True, post=True, final=False, residual_scale=lambda n: float(n)))
# DeepNorm (Wang et al., 2022), decoder-only: alpha = (2 N)^(1/4), 2 N sublayers; init "deepnorm" is its other half.
register("norm_placement", "deepnorm")(NormPlacement(post=True, final=False, residual_scale=lambda n: n**0.25))
register("norm_placement", "none")(NormPlacement(final=False))
