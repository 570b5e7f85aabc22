"""The operators gptframe_gelu::*: schema, ATen fallback, shapes for tracing and derivatives, all in Python.

The compiled objects only add implementations for CPU and CUDA to them, so the operators exist everywhere: where no
object can be had, the fallback computes with ATen. The first call for a device loads its object.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from gptframe_gelu_cuda import backend, reference

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_NAMESPACE = "gptframe_gelu"
_library = torch.library.Library(_NAMESPACE, "DEF")


def _check(x: Tensor, **others: Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise RuntimeError(f"gelu needs float64, float32, float16 or bfloat16, and x is {str(x.dtype)[6:]}")
    for name, other in others.items():
        if other.dtype != x.dtype or other.shape != x.shape or other.device != x.device:
            raise RuntimeError(
                f"gelu: {name} must have the dtype, shape and device of x: {name} is {_words(other)}, x is {_words(x)}"
            )


def _check_bias(x: Tensor, bias: Tensor) -> None:
    if x.dim() < 1 or bias.dim() != 1 or bias.shape[0] != x.shape[-1]:
        raise RuntimeError(
            f"bias_gelu: the bias must have shape [N], N the last dimension of x: "
            f"bias is {_words(bias)}, x is {_words(x)}"
        )
    half = x.dtype in (torch.float16, torch.bfloat16)
    if bias.dtype != x.dtype and not (half and bias.dtype == torch.float32):
        raise RuntimeError(
            f"bias_gelu: the bias must have the dtype of x (or float32 beside a 16-bit x): "
            f"bias is {_words(bias)}, x is {_words(x)}"
        )
    if bias.device != x.device:
        raise RuntimeError(f"bias_gelu: bias is on {bias.device} and x on {x.device}")


def _words(x: Tensor) -> str:
    return f"{str(x.dtype)[6:]}{list(x.shape)} on {x.device}"


def _define(schema: str, fallback: Callable, fake: Callable, check: Callable, pointwise: bool = True) -> None:
    """Register one operator. `fallback` runs where no compiled kernel is registered for the device."""
    name = schema.split("(")[0]
    tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.pointwise,) if pointwise else ()))
    _library.define(schema, tags=tags)

    def composite(*args):
        check(*args)
        x = args[-2] if name.startswith("bias_") else args[-1]
        if x.layout == torch.strided and backend.load(x.device):
            return getattr(torch.ops.gptframe_gelu, name)(*args)  # now goes to the compiled kernel
        return fallback(*args)

    def checked_fake(*args):
        check(*args)
        return fake(*args)

    _library.impl(name, composite, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", checked_fake, lib=_library)


def _dense(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_define("gelu(Tensor x) -> Tensor", reference.gelu, torch.empty_like, lambda x: _check(x))
_define(
    "gelu_backward(Tensor grad, Tensor x) -> Tensor",
    reference.gelu_backward,
    lambda grad, x: torch.empty_like(x),
    lambda grad, x: _check(x, grad=grad),
)
_define(
    "gelu_double_backward(Tensor gradgrad, Tensor grad, Tensor x) -> Tensor",
    reference.gelu_double_backward,
    lambda gradgrad, grad, x: torch.empty_like(x),
    lambda gradgrad, grad, x: _check(x, grad=grad, gradgrad=gradgrad),
)


def _check_bias_gelu(x: Tensor, bias: Tensor) -> None:
    _check(x)
    _check_bias(x, bias)


def _check_bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> None:
    _check(x, grad=grad)
    _check_bias(x, bias)


_define(
    "bias_gelu(Tensor x, Tensor bias) -> Tensor",
    reference.bias_gelu,
    lambda x, bias: _dense(x),
    _check_bias_gelu,
    pointwise=False,
)
_define(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor, Tensor)",
    reference.bias_gelu_backward,
    lambda grad, x, bias: (_dense(x), _dense(bias)),
    _check_bias_gelu_backward,
    pointwise=False,
)

_ops = torch.ops.gptframe_gelu


def _autograd(name: str, backward: Callable, inputs: slice = slice(None)) -> None:
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    torch.library.register_autograd(f"{_NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)


def _gelu_grad(ctx, grad):
    (x,) = ctx.saved_tensors
    return _ops.gelu_backward(grad, x)


def _gelu_backward_grad(ctx, gradgrad):
    grad, x = ctx.saved_tensors
    need_grad, need_x = ctx.needs_input_grad
    return (
        _ops.gelu_backward(gradgrad, x) if need_grad else None,
        _ops.gelu_double_backward(gradgrad, grad, x) if need_x else None,
    )


def _gelu_double_backward_grad(ctx, outer):
    gradgrad, grad, x = ctx.saved_tensors
    need_gradgrad, need_grad, need_x = ctx.needs_input_grad
    return (
        _ops.gelu_double_backward(outer, grad, x) if need_gradgrad else None,
        _ops.gelu_double_backward(gradgrad, outer, x) if need_grad else None,
        outer * gradgrad * grad * reference.third_derivative(x) if need_x else None,
    )


def _bias_gelu_grad(ctx, grad):
    x, bias = ctx.saved_tensors
    dx, db = _ops.bias_gelu_backward(grad, x, bias)
    return dx, db


def _bias_gelu_backward_grad(ctx, grad_dx, grad_db):
    grad, x, bias = ctx.saved_tensors
    total = x + bias  # float32 where x has 16 bits and the bias has 32
    g, outer = grad.to(total.dtype), (grad_dx + grad_db).to(total.dtype)
    d = _ops.gelu_double_backward(outer, g, total)
    d_bias = d.reshape(-1, bias.shape[0]).sum(0) if bias.shape[0] else torch.zeros_like(bias)
    return _ops.gelu_backward(outer, total).to(grad.dtype), d.to(x.dtype), d_bias.to(bias.dtype)


_autograd("gelu", _gelu_grad)
_autograd("gelu_backward", _gelu_backward_grad)
_autograd("gelu_double_backward", _gelu_double_backward_grad)
_autograd("bias_gelu", _bias_gelu_grad)
_autograd("bias_gelu_backward", _bias_gelu_backward_grad)


# ---- gelu and the projection after it as one operator, which saves the input of the GELU alone ----

_library.define(
    "bias_gelu_linear(Tensor x, Tensor? bias, Tensor weight, Tensor? out_bias) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "bias_gelu_linear_backward(Tensor grad, Tensor x, Tensor? bias, Tensor weight) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _activate(x: Tensor, bias: Tensor | None) -> Tensor:
    return _ops.gelu(x) if bias is None else _ops.bias_gelu(x, bias)


def activated_again(x: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x + bias) in a backward pass; torch.compile would take `gelu` for the forward pass's, and keep that."""
    return _ops.activated_again(x, bias)


_library.define("activated_again(Tensor x, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("activated_again", _activate, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::activated_again", lambda x, bias: _activate(x, bias), lib=_library)


def _check_linear(x: Tensor, bias: Tensor | None, weight: Tensor, out_bias: Tensor | None) -> None:
    _check(x)
    if bias is not None:
        _check_bias(x, bias)
    for name, other in (("weight", weight), ("out_bias", out_bias)):
        if other is not None and other.device != x.device:
            raise RuntimeError(f"bias_gelu_linear: {name} is on {other.device} and x on {x.device}")
    if weight.dim() != 2 or x.dim() < 1 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
        raise RuntimeError(
            f"bias_gelu_linear: the weight must have shape [M, N], N the last dimension of x, and x's dtype: "
            f"weight is {_words(weight)}, x is {_words(x)}"
        )
    if out_bias is not None and (out_bias.shape != weight.shape[:1] or out_bias.dtype != x.dtype):
        raise RuntimeError(
            f"bias_gelu_linear: out_bias must have shape [{weight.shape[0]}] and x's dtype: {_words(out_bias)}"
        )


def _bias_gelu_linear(x, bias, weight, out_bias):
    _check_linear(x, bias, weight, out_bias)
    return F.linear(_activate(x, bias), weight, out_bias)


def _bias_gelu_linear_fake(x, bias, weight, out_bias):
    _check_linear(x, bias, weight, out_bias)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _bias_gelu_linear_backward(grad, x, bias, weight):
    rows = grad.reshape(-1, weight.shape[0])
    d_weight = rows.t() @ _activate(x, bias).reshape(-1, weight.shape[1])  # the GELU's output lives only here
    d_out = grad @ weight
    if bias is None:
        return _ops.gelu_backward(d_out, x), x.new_empty(0), d_weight
    dx, db = _ops.bias_gelu_backward(d_out, x, bias)
    return dx, db, d_weight


def _bias_gelu_linear_backward_fake(grad, x, bias, weight):
    dx = torch.empty_like(x) if bias is None else _dense(x)
    return (
        dx,
        x.new_empty(0) if bias is None else _dense(bias),
        torch.empty(weight.shape, dtype=weight.dtype, device=weight.device),
    )


def _bias_gelu_linear_setup(ctx, inputs, output):
    x, bias, weight, out_bias = inputs
    ctx.save_for_backward(x, bias, weight)
    ctx.out_bias_dtype = None if out_bias is None else out_bias.dtype


def _bias_gelu_linear_grad(ctx, grad):
    x, bias, weight = ctx.saved_tensors
    d_out_bias = None
    if ctx.out_bias_dtype is not None:
        d_out_bias = grad.reshape(-1, weight.shape[0]).sum(0)
    if torch.is_grad_enabled():  # create_graph: the same in operators that can be differentiated again
        dx, db, d_weight = _bias_gelu_linear_backward(grad, x, bias, weight)
    else:
        dx, db, d_weight = _ops.bias_gelu_linear_backward(grad, x, bias, weight)
    return dx, None if bias is None else db, d_weight, d_out_bias


_library.impl("bias_gelu_linear", _bias_gelu_linear, "CompositeExplicitAutograd")
_library.impl("bias_gelu_linear_backward", _bias_gelu_linear_backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::bias_gelu_linear", _bias_gelu_linear_fake, lib=_library)
torch.library.register_fake(f"{_NAMESPACE}::bias_gelu_linear_backward", _bias_gelu_linear_backward_fake, lib=_library)
torch.library.register_autograd(
    f"{_NAMESPACE}::bias_gelu_linear",
    _bias_gelu_linear_grad,
    setup_context=_bias_gelu_linear_setup,
    lib=_library,
)


# ---- what people call ----


def transformed() -> bool:
    """Inside torch.func's transforms or forward-mode differentiation, which an operator's derivatives do not reach.

    While torch.compile traces, too: there a lost tangent would be a wrong result without a word.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def gelu(x: Tensor) -> Tensor:
    """tanh-GELU, x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)) (Hendrycks and Gimpel, 2016), of any shape and stride.

    Differentiable any number of times; float32, float64, float16 and bfloat16. Autocast leaves the dtype of x alone.
    Inside torch.func transforms and forward-mode differentiation ATen computes.

    Raises:
        RuntimeError: x has another dtype.
    """
    if transformed():
        return F.gelu(x, approximate="tanh")
    return _ops.gelu(x)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) in one pass; its backward also sums the bias gradient.

    Args:
        x: [..., N].
        bias: [N], of x's dtype, or float32 beside a 16-bit x, as parameters are under autocast.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    if transformed():
        return F.gelu(x + bias, approximate="tanh").to(x.dtype)
    return _ops.bias_gelu(x, bias)


def bias_gelu_linear(x: Tensor, bias: Tensor | None, weight: Tensor, out_bias: Tensor | None = None) -> Tensor:
    """linear(gelu(x + bias), weight, out_bias), saving x and no other activation.

    Its backward computes the GELU once more. Under autocast the weight and out_bias are cast to x's dtype.

    Args:
        x: [..., N]. bias: [N] or None. weight: [M, N]. out_bias: [M] or None.

    Returns:
        [..., M]

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    if torch.is_autocast_enabled(x.device.type):
        weight, out_bias = weight.to(x.dtype), None if out_bias is None else out_bias.to(x.dtype)
    if transformed():
        return F.linear(gelu(x) if bias is None else bias_gelu(x, bias), weight, out_bias)
    return _ops.bias_gelu_linear(x, bias, weight, out_bias)
