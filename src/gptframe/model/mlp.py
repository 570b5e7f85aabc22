"""The position-wise MLP: expand, activate, contract."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.model.call import Linear, call, call_each, part
from gptframe.model.init import with_role
from gptframe.registry import build, entry, register


@register("sublayer", "mlp")
class MLP(nn.Module):
    """down(act(up(x))), or down(act(up(x), gate(x))) for an activation with two inputs.

    Args:
        bias: biases of all projections.
    """

    incremental = True
    activation, up, gate, down = part(), part(), part(), part()

    def __init__(self, cfg: ModelConfig, layer: int, bias: bool = True):
        super().__init__()
        self.activation_name = str(cfg.activation["name"])
        self.activation = build("activation", cfg.activation, key="model.activation")
        self.up = with_role(nn.Linear(cfg.d_model, cfg.hidden, bias=bias), "hidden")
        gated = getattr(self.activation, "inputs", 1) == 2
        self.gate = with_role(nn.Linear(cfg.d_model, cfg.hidden, bias=bias), "hidden") if gated else None
        self.down = with_role(nn.Linear(cfg.hidden, cfg.d_model, bias=bias), "residual")
        self.offers_whole = not gated and self._offers("forward_mlp")
        self.offers_through = not gated and self._offers("forward_mlp_through")
        option = getattr(self.activation, "forward_mlp_option", None)
        if self.offers_whole and not self.offers_through and option and cfg.linear.backend != "torch":
            raise UserError(
                f"model.activation.{option} multiplies by the MLP's matrices itself, and so would "
                f"model.linear.backend={cfg.linear.backend}: leave one of them out"
            )
        self.offers_fused = bias and not gated and self._offers("forward_with_bias")

    def _offers(self, name: str) -> bool:
        return getattr(self.activation, name, None) is not None

    # A transform (LoRA) may have put something else in the place of a projection, which only a call of it does.
    @property
    def whole(self) -> bool:
        """Whether the activation computes the whole MLP from its weights."""
        return self.offers_whole and type(self.up) is type(self.down) is nn.Linear

    @property
    def through(self) -> bool:
        """Whether the activation computes the whole MLP with the products of the linear backend."""
        return self.offers_through and type(self.up) is type(self.down) is Linear

    @property
    def fused(self) -> bool:
        """Whether the activation adds the bias."""
        return self.offers_fused and type(self.up) in (nn.Linear, Linear)

    def forward(self, x: Tensor, ctx: object) -> Tensor:
        if self.whole or self.through:
            weights = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
            if self.whole:
                return self.activation.forward_mlp(x, *weights)
            return self.activation.forward_mlp_through(self.down.backend, x, *weights)
        if self.fused:
            h = F.linear(x, self.up.weight) if type(self.up) is nn.Linear else self.up.unbiased(x)
            h = self.activation.forward_with_bias(h, self.up.bias)
        else:
            h = self.activation(*self.inputs(x))  # [B, T, hidden]
        if not isinstance(h, Tensor) or h.shape != (*x.shape[:-1], self.down.in_features):
            self._refuse(h, x)
        return call(self.down, h)

    def inputs(self, x: Tensor) -> Sequence[Tensor]:
        """The inputs of the activation, [B,T,hidden] each."""
        return [call(self.up, x)] if self.gate is None else call_each(x, self.up, self.gate)

    def _refuse(self, h: object, x: Tensor) -> None:
        got = list(h.shape) if isinstance(h, Tensor) else type(h).__name__
        wanted = [*x.shape[:-1], self.down.in_features]
        raise UserError(
            f"activation {self.activation_name!r} ({entry('activation', self.activation_name).origin}) returned {got} "
            f"for an input of {wanted}: they must be equal"
        )
