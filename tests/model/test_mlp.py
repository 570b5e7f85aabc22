"""The fused forms that an activation may offer: the MLP takes them, and the result is the plain one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gptframe.config import ModelConfig
from gptframe.model.activation import GELUTanh
from gptframe.model.mlp import MLP
from gptframe.registry import register


class WithBias(GELUTanh):
    calls = 0

    def forward_with_bias(self, x, bias):
        type(self).calls += 1
        return self(x + bias)


class Whole(WithBias):
    def forward_mlp(self, x, up_weight, up_bias, down_weight, down_bias):
        type(self).calls += 1
        return F.linear(self(F.linear(x, up_weight, up_bias)), down_weight, down_bias)


class Undecided(Whole):
    forward_mlp = None


def test_the_mlp_takes_the_largest_form_on_offer(fresh_registry):
    torch.manual_seed(0)
    plain = MLP(ModelConfig(), 0).double()
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    for cls in (WithBias, Whole, Undecided):
        name = f"offering_{cls.__name__}"
        register("activation", name)(cls)
        fused = MLP(ModelConfig(activation={"name": name}), 0).double()
        fused.load_state_dict(plain.state_dict())
        before = cls.calls
        assert torch.allclose(fused(x, None), plain(x, None), atol=1e-14)
        assert cls.calls == before + 1


def test_without_biases_only_the_whole_form_is_taken(fresh_registry):
    register("activation", "bias_only")(WithBias)
    register("activation", "whole_only")(Whole)
    for name, calls in (("bias_only", 0), ("whole_only", 1)):
        mlp = MLP(ModelConfig(activation={"name": name}), 0, bias=False)
        before = type(mlp.activation).calls
        mlp(torch.zeros(1, 1, 64), None)
        assert type(mlp.activation).calls == before + calls
