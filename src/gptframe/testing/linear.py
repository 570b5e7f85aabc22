"""Checks of linear backends: the values and gradients of F.linear, for whatever they take upon themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptframe.testing.backends import made
from gptframe.testing.kit import Failure, Skip, check, raised
from gptframe.testing.subject import Subject, shape

# leading dimensions of x, width in, width out
SIZES = (((1,), 32, 64), ((5,), 48, 33), ((2, 3), 64, 96), ((2, 1, 7), 32, 257), ((70,), 128, 32))
# dtype of x, dtype of weight and bias, whether autocast to bfloat16 is on
MODES = (
    (torch.float32, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float32, torch.float32, True),
    (torch.bfloat16, torch.float32, True),
)
NAMES = ("x", "weight", "bias")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class _Case:
    """One product: what goes in, and what F.linear would make of it."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    autocast: bool
    label: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else self.x.dtype

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inputs as leaves, in the memory in which they lie."""
        x, weight = self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()
        return x, weight, None if self.bias is None else self.bias.detach().requires_grad_()

    @property
    def exact(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inputs as the product sees them, in float64."""
        x, weight = self.x.to(self.dtype).double(), self.weight.to(self.dtype).double()
        return x, weight, None if self.bias is None else self.bias.to(self.dtype).double()

    @property
    def context(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)


def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias: [..., in] and [out, in] -> [..., out]."""
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def _cases() -> Iterator[_Case]:
    generator = torch.Generator().manual_seed(5)
    for x_dtype, dtype, autocast in MODES:
        for i, (rows, n_in, n_out) in enumerate(SIZES):
            x = torch.randn(*rows, n_in, generator=generator)
            weight = torch.randn(n_out, n_in, generator=generator) / n_in**0.5
            bias = torch.randn(n_out, generator=generator) if i % 2 == 0 else None
            label = f"x {shape(x)} {str(x_dtype)[6:]}, weight {shape(weight)} {str(dtype)[6:]}"
            label += f"{'' if bias is None else ', bias'}{', in autocast' if autocast else ''}"
            x, weight, bias = x.to(x_dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            yield _Case(x, weight, bias, autocast, label)
            if i == 3:  # a plugin may have turned its stream, or a matrix
                turned = weight.t().contiguous().t()
                yield _Case(x, turned, bias, autocast, f"{label}, weight in columns")
                turned = x.transpose(0, -1).contiguous().transpose(0, -1)
                yield _Case(turned, weight, bias, autocast, f"{label}, x in columns")


def _backend(s: Subject) -> Any:
    return made(s, "(x, weight, bias)")


@check("linear_backend", name="contract")
def linear_contract(s: Subject) -> str:
    """gives x weight^T + bias, or None, in the shape and dtype of F.linear, with and without bias and autocast"""
    backend, taken, cases = _backend(s), 0, list(_cases())
    for case in cases:
        # A backend may take products for training alone, or only those without gradients.
        taken += any([_right(s, backend, case, trained) for trained in (False, True)])
    label = "x[2,32] and weight[8,32] on the meta device, where a model is built to count its costs"
    try:
        y = backend(torch.empty(2, 32, device="meta"), torch.empty(8, 32, device="meta"), None)
    except Exception as error:
        raise raised(
            error, s, "the call", smallest=label, cause="a tensor without values, to be left to torch"
        ) from None
    if y is not None and (y.shape != (2, 8) or y.device.type != "meta"):
        raise Failure(f"it returned {list(y.shape)} on {y.device}", smallest=label)
    return f"{taken} of {len(cases)} cases; the rest is left to torch"


def _right(s: Subject, backend: Any, case: _Case, trained: bool) -> bool:
    """Whether the backend takes the product, which is then the formula's."""
    try:
        with case.context, torch.set_grad_enabled(trained):
            y = backend(*(case.given if trained else (case.x, case.weight, case.bias)))
    except Exception as error:
        raise raised(error, s, "the call", smallest=case.label) from None
    if y is None:
        return False
    wanted = formula(*case.exact)
    if not isinstance(y, Tensor) or y.shape != wanted.shape or y.dtype != case.dtype:
        got = f"{list(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        raise Failure(f"it returned {got} where {list(wanted.shape)} {case.dtype} is wanted", smallest=case.label)
    away = float((y.detach().double() - wanted).abs().max())
    if not away <= TOLERANCE[case.dtype]:
        raise Failure(f"a value is {away:.2g} away from the formula", smallest=case.label, cause="bias or strides")
    return True


@check("linear_backend")
def linear_gradients(s: Subject) -> str:
    """gives the gradients of x weight^T + bias, all of them and each alone"""
    backend = _backend(s)
    for case in _cases():
        inputs = {name: t for name, t in zip(NAMES, case.given, strict=True) if t is not None}
        for wanted_of in (list(inputs), *([name] for name in inputs)):  # the others are frozen
            leaves = {name: t if name in wanted_of else t.detach() for name, t in inputs.items()}
            with case.context:
                y = backend(leaves["x"], leaves["weight"], leaves.get("bias"))
            if y is None:
                continue
            above = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(y.dtype)
            if len(wanted_of) == 1:
                above = above.flatten()[:1].expand(y.numel()).view_as(y)  # as the gradient of a sum: one number
            exact = {n: t.requires_grad_() for n, t in zip(NAMES, case.exact, strict=True) if t is not None}
            try:
                found = torch.autograd.grad(y, [leaves[n] for n in wanted_of], above, allow_unused=True)
            except Exception as error:
                raise raised(error, s, "the backward pass", smallest=case.label) from None
            target = formula(exact["x"], exact["weight"], exact.get("bias"))
            right = torch.autograd.grad(target, [exact[n] for n in wanted_of], above.double())
            for name, g, w in zip(wanted_of, found, right, strict=True):
                _near(g, w, TOLERANCE[case.dtype], f"the gradient of {name}", case.label)
    return ""


@check("linear_backend")
def head_gradients(s: Subject) -> str:
    """backward, where offered, gives grad weight and grad^T x, the latter in float32, for the head"""
    backend = _backend(s)
    if getattr(backend, "backward", None) is None:
        raise Skip("it offers no backward: torch computes the gradients of the head")
    generator, kept = torch.Generator().manual_seed(7), None
    for case in _cases():
        if case.x.ndim != 2 or (case.autocast and case.x.dtype == torch.float32):
            continue
        grad = torch.randn(len(case.x), len(case.weight), generator=generator).to(case.dtype)
        try:
            with case.context, torch.no_grad():
                found = backend.backward(grad, case.x, case.weight)
        except Exception as error:
            raise raised(error, s, "backward", smallest=case.label) from None
        if found is None:
            continue
        if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(t, Tensor) for t in found):
            raise Failure(f"backward returned {type(found).__name__} where (grad_x, grad_weight) is wanted")
        for name, g, dtype in (("grad_x", found[0], case.dtype), ("grad_weight", found[1], torch.float32)):
            if g.dtype != dtype:
                raise Failure(f"{name} of backward is {g.dtype} where {dtype} is wanted", smallest=case.label)
        x, weight, _ = case.exact
        for name, g, w in zip(
            ("grad_x", "grad_weight"), found, (grad.double() @ weight, grad.double().T @ x), strict=True
        ):
            _near(g, w, TOLERANCE[case.dtype], f"{name} of backward", case.label)
        if kept is not None and not torch.equal(kept[0], kept[1]):
            cause = "a buffer that is used twice: the head adds to the first one"
            raise Failure("a call of backward changed what the one before it returned", cause=cause)
        kept = found[1], found[1].clone()
    return "" if kept is not None else "every case is left to torch"


def _near(g: Any, w: Tensor, tolerance: float, what: str, label: str) -> None:
    if g is None or g.shape != w.shape:
        got = "missing" if g is None else f"of shape {list(g.shape)} and not {list(w.shape)}"
        raise Failure(f"{what} is {got}", smallest=label)
    away = float((g.double() - w).abs().max() / w.abs().max().clamp(min=1.0))
    if not away <= tolerance:
        raise Failure(f"{what} is {away:.2g} away from the formula's", smallest=label)
