"""Calls of submodules that cost no more than what they compute.

A single token goes through a small matrix in a few microseconds, and the way to it through nn.Module takes as long. So
these functions shorten the way, where nobody has put anything on it: a module with a hook or a forward of its own, or
of another class than nn.Linear or nn.Identity, is called as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


def call(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`."""
    if _plain(module, nn.Identity):
        return x
    if _plain(module, nn.Linear):
        return F.linear(x, module._parameters["weight"], module._parameters["bias"])  # type: ignore[arg-type]
    return module(x)


def call_each(x: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
    """`layer(x)` of each of the layers: x[..., in] -> [..., out_i].

    Without gradients it is one product where the layers' matrices are parts of one (`lay_side_by_side`).
    """
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if all(_plain(layer, nn.Linear) for layer in layers):
            weights, biases = ([layer._parameters[name] for layer in layers] for name in ("weight", "bias"))
            weight, bias = _whole(weights), _whole(biases)
            if weight is not None and (bias is not None or not any(b is not None for b in biases)):
                return F.linear(x, weight, bias).split_with_sizes([layer.out_features for layer in layers], dim=-1)
    return [call(layer, x) for layer in layers]


def lay_side_by_side(parameters: Sequence[Tensor]) -> None:
    """Let parameters [n_i, ...] lie in memory as the parts of one [sum of n_i, ...], in the order that is fastest.

    Values, shapes, dtype and device stay as they are. What gives a parameter memory of its own again (`.to`, assigning
    to `.data`) parts it from the others and does no harm.

    MKL multiplies a float32 matrix [out, in] by one vector up to twice as fast if the longer side is contiguous
    (docs/generate-evaluate.md has the numbers); products with many vectors do not care. In bfloat16 the order of
    nn.Linear is the fast one.
    """
    with torch.no_grad():
        whole = torch.cat([p.data for p in parameters]) if len(parameters) > 1 else parameters[0].data
        if whole.ndim == 2 and whole.dtype == torch.float32 and whole.device.type == "cpu":
            if whole.shape[0] >= whole.shape[1]:
                whole = whole.t().contiguous().t()
        for parameter, own in zip(parameters, whole.split([p.shape[0] for p in parameters]), strict=True):
            parameter.data = own


def _plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module runs `kind.forward` and nothing else."""
    return type(module) is kind and not (
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
