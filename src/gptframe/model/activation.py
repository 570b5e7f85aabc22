"""Activations of the MLP. `inputs` says how many projections feed one: 2 for the gated linear units."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gptframe.registry import register


class Activation(nn.Module):
    """forward(x) -> x elementwise; with `inputs = 2`, forward(x, gate) -> x.

    A class may offer `forward_with_bias(x, bias)`, the same as `forward(x + bias)` in one pass, and `forward_mlp(x,
    up_weight, up_bias, down_weight, down_bias)`, the whole MLP; the MLP then uses it. An offer that is None is none.
    Where a linear backend multiplies by the matrices (`model.linear.backend`), `forward_mlp_through(backend, x, ...)`
    is used, with the same weights and a `gptframe.model.linear.LinearBackend`. Without it `forward_mlp` is left aside,
    unless `forward_mlp_option` names the option with which a person asked for it, as in "epilogue=true": then both are
    refused.
    """

    inputs = 1


@register("activation", "gelu_tanh")
class GELUTanh(Activation):
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


@register("activation", "gelu_exact")
class GELUExact(Activation):
    """x Phi(x), with the normal distribution function Phi (Hendrycks and Gimpel, 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


@register("activation", "relu")
class ReLU(Activation):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


@register("activation", "squared_relu")
class SquaredReLU(Activation):
    """max(x, 0)^2 (So et al., Primer, 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


@register("activation", "silu")
class SiLU(Activation):
    """x sigmoid(x) (Elfwing et al., 2017)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class GatedActivation(Activation):
    """x * f(gate) (Shazeer, GLU Variants Improve Transformer, 2020)."""

    inputs = 2


@register("activation", "swiglu")
class SwiGLU(GatedActivation):
    """x * silu(gate) (Shazeer, 2020)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * F.silu(gate)


@register("activation", "geglu")
class GEGLU(GatedActivation):
    """x * gelu_tanh(gate) (Shazeer, 2020)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * F.gelu(gate, approximate="tanh")


@register("activation", "reglu")
class ReGLU(GatedActivation):
    """x * relu(gate) (Shazeer, 2020)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * F.relu(gate)
