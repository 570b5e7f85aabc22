"""The example plugins compute what their papers say, and train from their own option files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gptframe import plugins, registry
from gptframe.config import ModelConfig
from gptframe.model import Context

FOLDER = Path(__file__).parents[2] / "plugins" / "examples"


def build(kind: str, name: str, *arguments, **options):
    plugins.load([str(FOLDER / f"{name}.py")])
    return registry.build(kind, {"name": name, **options}, *arguments).double()


def noisy(part):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in part.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    return part


CFG = ModelConfig(d_model=8, n_heads=2, context_length=6, position={"name": "none"})
X = torch.randn(1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CTX = Context(positions=torch.arange(6))


def test_dyt():
    norm = build("norm", "dyt", 2, alpha=0.5)
    with torch.no_grad():
        norm.gain.copy_(torch.tensor([2.0, 3.0]))
        norm.bias.copy_(torch.tensor([0.0, 1.0]))
    got = norm(torch.tensor([2.0, -4.0], dtype=torch.float64))
    assert got.tolist() == pytest.approx([2 * math.tanh(1), 3 * math.tanh(-2) + 1])


def test_ntk_rope_slows_the_slowest_pair_by_the_factor_and_the_fastest_not_at_all():
    cfg = ModelConfig(d_model=32, n_heads=2, context_length=8)
    wide, plain = build("position", "ntk_rope", cfg, factor=4.0), registry.build("position", {"name": "rope"}, cfg)
    w, v = (p._frequencies(torch.device("cpu")) for p in (wide, plain))
    assert float(w[0]) == float(v[0]) == 1.0
    assert float(v[-1] / w[-1]) == pytest.approx(4.0)


def test_differential_attention_against_loops():
    part = noisy(build("sublayer", "differential_attention", CFG, 3))
    q, k, v = (m(X)[0] for m in (part.q, part.k, part.v))  # [6, 8]: two heads of 4, one pair
    one, two = ((a @ b).item() for a, b in ((part.lambda_q1, part.lambda_k1), (part.lambda_q2, part.lambda_k2)))
    factor = math.exp(one) - math.exp(two)
    start = 0.8 - 0.6 * math.exp(-0.9)
    rows = []
    for t in range(6):
        patterns = [(k[: t + 1, h] @ q[t, h] / 2).softmax(0) for h in (slice(0, 4), slice(4, 8))]
        mixed = (patterns[0] - (factor + start) * patterns[1]) @ v[: t + 1]
        rows.append(mixed / (mixed.square().mean() + 1e-5).sqrt() * (1 - start))
    assert torch.allclose(part(X, CTX)[0], part.out(torch.stack(rows)), atol=1e-10)


def test_gated_linear_attention_against_the_recurrence():
    part = noisy(build("sublayer", "gated_linear_attention", CFG, 0, keep=1.0))
    q, k, v = (m(X)[0].view(6, 2, 4) for m in (part.q, part.k, part.v))
    gates = torch.sigmoid(part.gate(X)[0] + 1.0)
    state, rows = torch.zeros(2, 4, 4, dtype=torch.float64), []
    for t in range(6):
        state = gates[t][:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
        y = torch.einsum("hd,hde->he", q[t], state) / 2
        rows.append((y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten())
    assert torch.allclose(part(X, CTX)[0], part.out(torch.stack(rows)), atol=1e-10)


@pytest.mark.parametrize(
    "name,overrides,cls",
    [
        ("dyt", ["norm=dyt"], "DyT"),
        ("ntk_rope", ["position=ntk_rope", "model.context_length=64"], "NTKRoPE"),
        ("differential_attention", ["model.block=[differential_attention,mlp]"], "DifferentialAttention"),
        (
            "gated_linear_attention",
            ["model.block=[gated_linear_attention,mlp]", "position=none"],
            "GatedLinearAttention",
        ),
    ],
)
def test_the_command_in_the_docstring_builds_it(name, overrides, cls):
    from gptframe.cli import _configure
    from gptframe.model import build_model

    text = (FOLDER / f"{name}.py").read_text()
    assert all(override in text for override in overrides)
    config = _configure([f"plugins=[{FOLDER / f'{name}.py'}]", *overrides], [str(FOLDER / "conf")])
    model = build_model(config.model)
    assert cls in {type(module).__name__ for module in model.modules()}
    ids = torch.zeros(1, 8, dtype=torch.long)
    model(ids, targets=ids).backward()
    assert all(p.grad is not None for p in model.parameters())
