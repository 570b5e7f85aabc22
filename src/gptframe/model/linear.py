"""Who multiplies by the model's matrices: torch, or the linear backend that the config names."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.model.call import Linear
from gptframe.model.head import Head
from gptframe.registry import build, entry, register

Product = Callable[[Tensor, Tensor, "Tensor | None"], "Tensor | None"]


@register("linear_backend", "torch")
class Torch:
    """torch's F.linear. Nothing is put into a model for it: it stands for no backend."""

    def __init__(self, cfg: ModelConfig):
        pass

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """None: it is left to torch."""
        return None


class LinearBackend:
    """A registered linear backend, and what it promised: an answer that breaks the promise is refused by its name."""

    def __init__(self, name: str, cfg: ModelConfig):
        self.name = name
        self.function: Product = build("linear_backend", {"name": name}, cfg, key="model.linear.backend")

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """x[..., in] weight[out, in]^T + bias[out], or None for what torch shall compute."""
        y = self.function(x, weight, bias)
        if y is None or (isinstance(y, Tensor) and y.shape == (*x.shape[:-1], weight.shape[0])):
            return y
        raise self._broken(_words(y), f"for x{list(x.shape)} and weight{list(weight.shape)}")

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """grad[rows, out] weight and grad^T x[rows, in], the latter in float32; None for what torch shall compute."""
        offered = getattr(self.function, "backward", None)
        found = None if offered is None else offered(grad, x, weight)
        if found is None:
            return None
        if isinstance(found, tuple) and len(found) == 2 and all(isinstance(t, Tensor) for t in found):
            if found[0].shape == x.shape and found[1].shape == weight.shape:
                return found
        got = ", ".join(_words(t) for t in found) if isinstance(found, tuple) else _words(found)
        raise self._broken(got, f"from backward() for x{list(x.shape)} and weight{list(weight.shape)}")

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`product`, or torch's."""
        y = self.product(x, weight, bias)
        return F.linear(x, weight, bias) if y is None else y

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`backward`, or torch's."""
        both = self.backward(grad, x, weight)
        return (grad @ weight.to(grad.dtype), grad.T @ x) if both is None else both

    def manifest(self) -> dict[str, str]:
        """What the backend says of what ran, for the manifest of a run; nothing where it says nothing."""
        report = getattr(self.function, "manifest", None)
        return {} if report is None else report()

    def _broken(self, got: str, where: str) -> UserError:
        origin = entry("linear_backend", self.name, "model.linear.backend").origin
        return UserError(f"linear_backend {self.name!r} ({origin}) returned {got} {where}")


def _words(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def give_backend(model: nn.Module, head: nn.Module, cfg: ModelConfig) -> None:
    """Let the config's linear backend multiply by the matrix of every nn.Linear in `model`, and by that of `head`.

    A subclass of nn.Linear and a head that does not derive from `Head` multiply in ways of their own, and keep them.
    """
    if cfg.linear.backend == "torch":
        return
    backend = LinearBackend(cfg.linear.backend, cfg)
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            module.__class__ = Linear  # as it is: parameters, names and hooks
            assert isinstance(module, Linear)
            module.backend = backend
    if isinstance(head, Head):
        head.backend = backend
