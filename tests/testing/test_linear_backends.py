"""The kit's checks of linear backends catch planted faults, and leave sound backends alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptframe.registry import register
from gptframe.testing import conformance


class Sound:
    """A backend by torch's own operations, from which the faults depart."""

    def __init__(self, cfg):
        pass

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        return F.linear(x, weight, bias)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        return grad @ weight.to(grad.dtype), (grad.T @ x).float()


class NothingTaken(Sound):
    def __call__(self, x, weight, bias):
        return None

    def backward(self, grad, x, weight):
        return None


class Float32Only(Sound):
    backward = None

    def __call__(self, x, weight, bias):
        return F.linear(x, weight, bias) if x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu") else None


class WrongValues(Sound):
    def __call__(self, x, weight, bias):
        return F.linear(1.01 * x, weight, bias)


class IgnoredBias(Sound):
    def __call__(self, x, weight, bias):
        return F.linear(x, weight)


class RowsAlone(Sound):
    def __call__(self, x, weight, bias):
        return F.linear(x.flatten(0, -2), weight, bias)


class Float32Result(Sound):
    def __call__(self, x, weight, bias):
        return F.linear(x, weight, bias).float()


class BlindToAutocast(Sound):
    def __call__(self, x, weight, bias):
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.to(weight.dtype), weight, bias)


class BlindToStrides(Sound):
    """Reads the matrix as if its rows lay one after the other."""

    def __call__(self, x, weight, bias):
        return F.linear(x, weight.as_strided(weight.shape, (weight.shape[1], 1)), bias)


class ReadsValues(Sound):
    """As a kernel does: a tensor on the meta device has none."""

    def __call__(self, x, weight, bias):
        float(x.detach().flatten()[0])
        return F.linear(x, weight, bias)


class Raises(Sound):
    def __call__(self, x, weight, bias):
        raise ValueError("no such tile")


class Doubled(torch.autograd.Function):
    """A gradient that is twice what it is."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class WrongGradientOfX(Sound):
    def __call__(self, x, weight, bias):
        return F.linear(Doubled.apply(x), weight, bias)


class WrongGradientOfWeight(Sound):
    def __call__(self, x, weight, bias):
        return F.linear(x, Doubled.apply(weight), bias)


class NoGradientOfBias(Sound):
    def __call__(self, x, weight, bias):
        return F.linear(x, weight, None if bias is None else bias.detach())


class Dense(torch.autograd.Function):
    """Reads the gradient as if its numbers lay one after the other."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        flat = torch.zeros(grad.numel(), dtype=grad.dtype)
        stored = grad.untyped_storage().nbytes() // grad.element_size()
        n = min(stored, grad.numel())
        flat[:n] = grad.as_strided((n,), (1,))
        return flat.view(grad.shape)


class BlindToStridesOfGradients(Sound):
    def __call__(self, x, weight, bias):
        return Dense.apply(F.linear(x, weight, bias))


class SwappedBackward(Sound):
    def backward(self, grad, x, weight):
        return tuple(reversed(super().backward(grad, x, weight)))


class WrongBackward(Sound):
    def backward(self, grad, x, weight):
        grad_x, grad_weight = super().backward(grad, x, weight)
        return grad_x, 1.1 * grad_weight


class WrongBackwardOfX(Sound):
    def backward(self, grad, x, weight):
        grad_x, grad_weight = super().backward(grad, x, weight)
        return -grad_x, grad_weight


class NarrowBackward(Sound):
    def backward(self, grad, x, weight):
        return grad @ weight.to(grad.dtype), grad.T @ x


class OneBuffer(Sound):
    buffer = torch.zeros(2**16)

    def backward(self, grad, x, weight):
        grad_x, grad_weight = super().backward(grad, x, weight)
        return grad_x, self.buffer[: weight.numel()].view(weight.shape).copy_(grad_weight)


FAULTS = {
    WrongValues: ("contract", "away from the formula"),
    IgnoredBias: ("contract", "away from the formula"),
    RowsAlone: ("contract", "it returned [6, 96] torch.float32 where [2, 3, 96]"),
    Float32Result: ("contract", "torch.bfloat16 is wanted"),
    BlindToAutocast: ("contract", "torch.bfloat16 is wanted"),
    BlindToStrides: ("contract", "away from the formula"),
    ReadsValues: ("contract", "the call raised RuntimeError"),
    Raises: ("contract", "the call raised ValueError: no such tile"),
    WrongGradientOfX: ("linear_gradients", "the gradient of x"),
    WrongGradientOfWeight: ("linear_gradients", "the gradient of weight"),
    NoGradientOfBias: ("linear_gradients", "the gradient of bias is missing"),
    BlindToStridesOfGradients: ("linear_gradients", "the gradient of x"),
    SwappedBackward: ("head_gradients", "grad_x of backward is"),
    WrongBackward: ("head_gradients", "grad_weight of backward"),
    WrongBackwardOfX: ("head_gradients", "grad_x of backward"),
    NarrowBackward: ("head_gradients", "grad_weight of backward is torch.bfloat16"),
    OneBuffer: ("head_gradients", "changed what the one before it returned"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda cls: cls.__name__)
def test_faults_are_caught(fault):
    check, words = FAULTS[fault]
    register("linear_backend", "faulty")(fault)
    (failure,) = conformance("linear_backend", "faulty").failures
    assert failure.check == check and words in failure.what, failure


@pytest.mark.parametrize("sound,taken", [(Sound, 28), (NothingTaken, 0), (Float32Only, 7)])
def test_sound_backends_pass(sound, taken):
    register("linear_backend", "sound")(sound)
    report = conformance("linear_backend", "sound")
    assert report.ok and report.passed["contract"].startswith(f"{taken} of 28"), report
    assert ("head_gradients" in report.skipped) == (sound is Float32Only)


def test_a_backend_that_cannot_be_copied_with_its_model_is_named():
    register("linear_backend", "local")(lambda cfg: lambda x, weight, bias: None)
    (failure,) = conformance("linear_backend", "local").failures
    assert failure.check == "contract" and "pickling" in failure.what
