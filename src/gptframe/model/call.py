"""Calls of submodules that cost no more than what they compute.

A single token goes through a small matrix in a few microseconds, and the way to it through nn.Module takes as long. So
these functions shorten the way, where nobody has put anything on it: a module with a hook or a forward of its own, or
of another class than nn.Linear or nn.Identity, is called as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from gptframe.model.linear import LinearBackend


def part() -> Any:
    """An attribute that holds a submodule: nn.Module finds one only after an ordinary look-up has failed and raised."""
    return _Part()


class _Part:
    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        try:
            return module._modules[self.name]
        except KeyError:  # nn.Module has the words for it
            raise AttributeError(self.name) from None


class Linear(nn.Linear):
    """What an nn.Linear becomes where a linear backend multiplies by its matrix (`gptframe.model.linear`)."""

    backend: LinearBackend

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias, backend=self.backend)

    def manifest(self) -> dict[str, str]:
        """What ran, as the backend says."""
        return self.backend.manifest()

    def unbiased(self, x: Tensor) -> Tensor:
        """x W^T, for who adds the bias himself."""
        return product(x, self.weight, backend=self.backend)


def call(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`."""
    if _plain(module, nn.Identity):
        return x
    if _plain(module, nn.Linear):
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        return product(x, weight, bias, "streamed" in module.__dict__)  # type: ignore[arg-type]
    return module(x)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    streamed: bool = False,
    backend: LinearBackend | None = None,
) -> Tensor:
    """`F.linear(x, weight, bias)`.

    Args:
        x: [..., in]. weight: [out, in]. bias: [out] or None.
        streamed: read `weight` at the speed of the memory where x has few rows, see `streams`.
        backend: computes it; what it leaves is torch's.
    """
    if backend is not None:
        y = backend.product(x, weight, bias)
        if y is not None:
            return y
    if not streamed or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    rows, parts = x.numel() // weight.shape[1], _parts(weight.shape[0])
    if not 0 < rows <= STREAMED_ROWS or parts == 1:
        return F.linear(x, weight, bias)
    vectors = x.reshape(rows, -1).t()[None].expand(parts, -1, -1)  # [parts, in, rows]
    y = torch.bmm(weight.view(parts, -1, weight.shape[1]), vectors).view(-1, rows).t()
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


STREAMED_ROWS = 4  # with more of them other products are as fast
STREAMED_BYTES = 2**25  # a model of this size is not held by the caches


@functools.cache
def streams() -> bool:
    """Whether MKL's product of a matrix and a vector is slow here, and that of a batch of them is not.

    On AMD the former reads a float32 matrix at a third of the speed of the memory, and the latter at two thirds
    (docs/generate-evaluate.md has the numbers).
    """
    if not torch.backends.mkl.is_available():
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def _parts(rows: int) -> int:
    """Into how many equal parts of about 64 rows a matrix is cut; 1 where there are none."""
    fitting = [size for size in range(8, rows // 2 + 1) if rows % size == 0]
    return rows // min(fitting, key=lambda size: abs(size - 64)) if fitting else 1


def call_each(x: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
    """`layer(x)` of each of the layers: x[..., in] -> [..., out_i].

    Without gradients it is one product where the layers' matrices are parts of one (`lay_side_by_side`). Autocast would
    cast x for every layer anew, and keep each copy for the backward pass: here all share one.
    """
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if all(_plain(layer, nn.Linear) for layer in layers):
            weights, biases = ([layer._parameters[name] for layer in layers] for name in ("weight", "bias"))
            weight, bias = _whole(weights), _whole(biases)
            if weight is not None and (bias is not None or not any(b is not None for b in biases)):
                y = product(x, weight, bias, "streamed" in layers[0].__dict__)
                return y.split_with_sizes([layer.out_features for layer in layers], dim=-1)
    plain = [_plain(layer, nn.Linear, Linear) for layer in layers]
    shared = _as_autocast(x) if sum(plain) > 1 else x
    return [call(layer, shared if alone else x) for layer, alone in zip(layers, plain, strict=True)]


def _as_autocast(x: Tensor) -> Tensor:
    """`x` in the dtype to which autocast, where it is on, casts the input of a product."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return x
    if not x.is_floating_point() or x.dtype == torch.float64:  # which autocast leaves alone
        return x
    return x.to(torch.get_autocast_dtype(device))


def lay_side_by_side(parameters: Sequence[Tensor], streamed: bool = False) -> None:
    """Let parameters [n_i, ...] lie in memory as the parts of one [sum of n_i, ...], in the order that is fastest.

    Args:
        streamed: the order that `product` wants for streamed matrices.

    Values, shapes, dtype and device stay as they are. What gives a parameter memory of its own again (`.to`, assigning
    to `.data`) parts it from the others and does no harm. The first gradient does so: torch's fused optimisers write to
    memory as if a parameter, its gradient and its moments were of one order and without gaps.

    MKL multiplies a float32 matrix [out, in] by one vector up to twice as fast if the longer side is contiguous
    (docs/generate-evaluate.md has the numbers); products with many vectors do not care. In bfloat16 the order of
    nn.Linear is the fast one.
    """
    with torch.no_grad():
        whole = torch.cat([p.data for p in parameters]) if len(parameters) > 1 else parameters[0].data
        if whole.ndim == 2 and whole.dtype == torch.float32 and whole.device.type == "cpu":
            if whole.shape[0] >= whole.shape[1] and not streamed:
                whole = whole.t().contiguous().t()
        for parameter, own in zip(parameters, whole.split([p.shape[0] for p in parameters]), strict=True):
            parameter.data = own
            if parameter.requires_grad and not own.is_contiguous():
                parameter.register_post_accumulate_grad_hook(_lay_by_itself)


def _lay_by_itself(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.data, parameter.grad = parameter.data.contiguous(), parameter.grad.contiguous()


def _plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call of the module runs the `forward` of one of these classes and nothing else."""
    return type(module) in kinds and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _whole(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The tensor of which `parts` are consecutive rows, as a view of the same memory; None if they are not."""
    first = parts[0]
    if first is None:
        return None
    stride, start, rows = first.stride(), first.storage_offset(), 0
    for own in parts:
        if own is None or own.storage_offset() != start + rows * stride[0] or own.stride() != stride:
            return None
        rows += own.shape[0]
    # Parameters of the same offset may still lie in different storages.
    if len({own.untyped_storage().data_ptr() for own in parts if own is not None}) > 1:
        return None
    return first.as_strided((rows, *first.shape[1:]), stride)
