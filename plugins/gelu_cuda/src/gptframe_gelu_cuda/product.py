"""The linear backend `amx`: gradients of weights in bfloat16 training on a CPU, and the operator gptframe_product.

PyTorch's products take the processor's AMX units to what they can do, but for one of the three that a linear layer
needs: the gradient of its weight, whose depth runs across the rows of both matrices, takes twice as long there. And
autocast keeps a bfloat16 copy of every weight, and gives its gradient in bfloat16; here both stay in float32.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gptframe_gelu_cuda import backend, ops

log = logging.getLogger("gptframe.amx")

_NAMESPACE = "gptframe_product"
_library = torch.library.Library(_NAMESPACE, "DEF")
for _schema in (
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "input_gradient(Tensor grad, Tensor weight) -> Tensor",
    "weight_gradient(Tensor grad, Tensor x) -> (Tensor, Tensor)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_ops = torch.ops.gptframe_product
LEAST_ROWS = 64  # with fewer, packing both sides costs more than the product


# Torch's products, as operators of their own: torch.compile would else keep the cast weight from forward to backward.
def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _torch_input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    return grad @ weight.to(grad.dtype)


_library.impl("linear", _torch_linear, "CompositeExplicitAutograd")
_library.impl("input_gradient", _torch_input_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake(f"{_NAMESPACE}::linear", lib=_library)
def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake(f"{_NAMESPACE}::input_gradient", lib=_library)
def _fake_input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], weight.shape[1]))


@torch.library.register_fake(f"{_NAMESPACE}::weight_gradient", lib=_library)
def _fake_weight_gradient(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    single = {"dtype": torch.float32}
    return grad.new_empty((grad.shape[1], x.shape[1]), **single), grad.new_empty((grad.shape[1],), **single)


def weight_gradient(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """grad^T x and the sums of grad's columns: the gradients of a linear layer's weight and bias.

    Args:
        grad: BFloat16[rows, out]. x: BFloat16[rows, in].

    Returns:
        Float[out, in] and Float[out], summed in float32.

    Raises:
        BackendError: the kernel cannot be had here.
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    backend.require_product()
    return _ops.weight_gradient(grad, x)


class _Linear(torch.autograd.Function):
    """x weight^T + bias of BFloat16[..., in], with weight [out, in] and bias [out] of any floating dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        to_x, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _ops.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = _ops.input_gradient(grad, weight) if ctx.needs_input_grad[0] else None
        to_weight = to_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            to_weight, to_bias = _ops.weight_gradient(rows, x.reshape(-1, x.shape[-1]))
            to_weight = to_weight.to(ctx.weight_dtype)
        elif ctx.needs_input_grad[2]:
            to_bias = rows.sum(0, dtype=torch.float32)
        return to_x, to_weight, to_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None


class AMX(nn.Module):
    """The products of linear layers; what it cannot compute it leaves to torch, and says so once.

    Raises:
        BackendError: the kernel cannot be had here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}  # device -> dtype of what torch computed
        backend.require_product()

    def manifest(self) -> dict[str, str]:
        """What ran, for the run's manifest: where the kernel came from; or what did not run."""
        if self.left:
            return {f"products on {device}": f"torch ({dtype}, not amx)" for device, dtype in self.left.items()}
        return {"products on cpu": f"amx ({backend.require_product()})"}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """[..., out] of x[..., in], weight[out, in] and bias[out]; None for what is left to torch."""
        if x.numel() < LEAST_ROWS * max(1, x.shape[-1]) or not torch.is_grad_enabled() or ops.transformed():
            return None
        if x.device.type == "cpu" and x.dtype != torch.float64 and torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        return _Linear.apply(x, weight, bias) if self._takes(x) else None

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """The gradients of x[rows, in] and of weight[out, in], the latter in float32, from grad[rows, out]."""
        if grad.shape[0] < LEAST_ROWS or not self._takes(grad):
            return None
        return _ops.input_gradient(grad, weight), _ops.weight_gradient(grad, x)[0]

    def _takes(self, x: Tensor) -> bool:
        if x.device.type == "cpu" and x.dtype == torch.bfloat16:
            return True
        if x.device.type != "meta" and not torch.compiler.is_compiling():
            self.left[x.device.type] = str(x.dtype)[6:]
            backend.say(log, f"torch computes products in {str(x.dtype)[6:]} on {x.device.type}, not amx")
        return False
