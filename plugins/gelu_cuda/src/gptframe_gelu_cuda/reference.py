"""The operators in ATen's own operations: the fallback where nothing compiled is at hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_C = 0.044715
_V1 = 2 * math.sqrt(2 / math.pi)  # v = _V1 (x + _C x^3), gelu = x sigmoid(v)
_V3 = 3 * _V1 * _C


def _placed(y: Tensor, like: Tensor) -> Tensor:
    """`y` with the strides that `torch.empty_like(like)` has, which the compiled kernels promise."""
    out = torch.empty_like(like)
    return y if y.stride() == out.stride() else out.copy_(y)


def gelu(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016); any shape."""
    return _placed(F.gelu(x, approximate="tanh"), x)


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """grad * gelu'(x); shapes as x."""
    return _placed(torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), x)


def _sigmoids(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = _V1 * (x + _C * x**3)
    return torch.sigmoid(v), torch.sigmoid(-v), _V1 + _V3 * x * x  # s, 1-s, v'


def second_derivative(x: Tensor) -> Tensor:
    """gelu''(x) = p (2 v' + x (m v'^2 + v'')) with p = s(1-s), m = 1-2s; differentiable."""
    s, rest, dv = _sigmoids(x)
    return s * rest * (2 * dv + x * ((rest - s) * dv * dv + 2 * _V3 * x))


def third_derivative(x: Tensor) -> Tensor:
    """gelu'''(x), from p' = p m v' and m' = -2 p v'; differentiable, so that higher orders follow."""
    s, rest, dv = _sigmoids(x)
    p, m, ddv = s * rest, rest - s, 2 * _V3 * x
    inner = m * dv * dv + ddv
    return p * (
        m * dv * (2 * dv + x * inner) + 2 * ddv + inner + x * (2 * m * dv * ddv + 2 * _V3 - 2 * p * dv * dv * dv)
    )


def gelu_double_backward(gradgrad: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """gradgrad * grad * gelu''(x); shapes as x."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return _placed((gradgrad * grad * second_derivative(wide)).to(x.dtype), x)


def _sum(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias if x.dtype == bias.dtype else (x.float() + bias)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias); x [..., N], bias [N]."""
    return F.gelu(_sum(x, bias), approximate="tanh").to(x.dtype).contiguous()


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(dx [..., N], dbias [N]) of bias_gelu."""
    total = _sum(x, bias)
    dx = torch.ops.aten.gelu_backward(grad.to(total.dtype), total, approximate="tanh")
    db = dx.reshape(-1, bias.shape[0]).sum(0) if bias.shape[0] else torch.empty_like(bias)
    return dx.to(x.dtype).contiguous(), db.to(bias.dtype).contiguous()
