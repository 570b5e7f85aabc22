"""Activations against their formulas, value by value, and the fused bias where one offers it."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import ACTIVATIONS, perturbed, small, tokens
from torch import nn

from gptframe import registry
from gptframe.model.activation import Activation

X = torch.linspace(-6, 6, 241, dtype=torch.float64)


def phi(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "gelu_tanh": tanh_gelu,
    "gelu_exact": lambda x: x * phi(x),
    "relu": lambda x: max(x, 0.0),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
    "swiglu": lambda x: x / (1 + math.exp(-x)),
    "geglu": tanh_gelu,
    "reglu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_formula(name):
    """For the gated ones this is what is done to the gate, the value being 2."""
    activation = registry.build("activation", {"name": name})
    want = torch.tensor([FORMULAS[name](x) for x in X.tolist()], dtype=torch.float64)
    if activation.inputs == 2:
        assert torch.allclose(activation(torch.full_like(X, 2.0), X), 2 * want, atol=1e-14)
        assert torch.allclose(activation(X, torch.full_like(X, 2.0)), X * FORMULAS[name](2.0), atol=1e-14)
    else:
        assert torch.allclose(activation(X), want, atol=1e-14)


def test_hand_computed_values():
    """GELU(1) = 0.8413 exactly and 0.8412 by tanh (Hendrycks and Gimpel, 2016)."""
    one = torch.tensor(1.0, dtype=torch.float64)
    assert registry.build("activation", {"name": "gelu_exact"})(one).item() == pytest.approx(
        0.8413447460685429, abs=1e-12
    )
    assert registry.build("activation", {"name": "gelu_tanh"})(one).item() == pytest.approx(
        0.8411919906082768, abs=1e-12
    )


def test_the_table_is_complete():
    assert registry.names("activation") == sorted(ACTIVATIONS)


@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_bias_is_used_where_there_is_one(fresh_registry, bias):
    calls = []

    @registry.register("activation", "fused_relu")
    class FusedReLU(Activation):
        def forward(self, x):
            return x.relu()

        def forward_with_bias(self, x, b):
            calls.append(b)
            return (x + b).relu()

    fused, usual = (perturbed(small("pre", name, mlp={"bias": bias})) for name in ("fused_relu", "relu"))
    ids = tokens(usual.cfg)
    assert torch.allclose(fused(ids), usual(ids), atol=1e-12)
    assert len(calls) == (usual.cfg.n_layers if bias else 0)


def test_an_activation_with_parameters_of_its_own(fresh_registry):
    @registry.register("activation", "prelu")
    class PReLU(nn.Module):  # without `inputs`: one
        def __init__(self, slope: float = 0.25):
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(slope))

        def forward(self, x):
            return torch.where(x > 0, x, self.slope * x)

    model = perturbed(small(activation={"name": "prelu", "slope": 0.5}))
    ids = tokens(model.cfg)
    model(ids, targets=ids).backward()
    slopes = [p for name, p in model.named_parameters() if name.endswith("activation.slope")]
    assert len(slopes) == 2 and all(p.grad.abs() > 0 for p in slopes)
