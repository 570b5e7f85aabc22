"""Positions against their papers' identities."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import small

from gptframe.errors import UserError
from gptframe.model import Context, build_model
from gptframe.model.position import ALiBi, RoPE, SinusoidalPosition, alibi_slopes, scaled


def rope(**options) -> RoPE:
    return RoPE(small(n_heads=2), **options)  # head dimension 16, as in the mini model


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("fraction", [1.0, 0.25])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_rotated_products_depend_on_the_distance_alone(pairing, fraction, dtype, tolerance):
    """<R_m q, R_n k> = <q, R_(n-m) k> for all m, n below 32 (Su et al., 2021, eq. 16)."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(16, generator=generator, dtype=dtype) / 4 for _ in range(2))
    turn = rope(pairing=pairing, fraction=fraction)
    rows = torch.arange(32)

    def turned(x, positions):
        return turn.rotate(x.expand(1, 1, len(positions), 16), x.expand(1, 1, len(positions), 16), Context(positions))[
            0
        ][0, 0]

    products = turned(q, rows) @ turned(k, rows).T  # [m, n]
    for m in range(32):
        assert (products[m] - turned(k, rows - m) @ q).abs().max() <= tolerance
    assert products.std() > 1e-3


def test_rotation_of_one_pair_by_hand():
    """At position 1 the first pair turns by 1 radian, the last of four by 10000^(-3/4) = 1e-3."""
    x = torch.zeros(1, 1, 2, 8)
    x[..., 0] = x[..., 6] = 1.0
    cfg = small(n_heads=4)  # head dimension 8
    got = RoPE(cfg).rotate(x, x, Context(torch.tensor([0, 1])))[0][0, 0]
    assert torch.equal(got[0], x[0, 0, 0])
    want = [math.cos(1), math.sin(1), 0, 0, 0, 0, math.cos(1e-3), math.sin(1e-3)]
    assert torch.allclose(got[1], torch.tensor(want), atol=1e-6)
    y = torch.zeros(1, 1, 2, 8)
    y[..., 0] = y[..., 3] = 1.0  # halves: 0 pairs with 4, 3 with 7
    got = RoPE(cfg, pairing="half").rotate(y, y, Context(torch.tensor([0, 1])))[0][0, 0, 1]
    want = [math.cos(1), 0, 0, math.cos(1e-3), math.sin(1), 0, 0, math.sin(1e-3)]
    assert torch.allclose(got, torch.tensor(want), atol=1e-6)


def test_llama3_scaling_by_hand():
    """LLaMA 3.1 8B: base 500000, 64 pairs, factor 8 over 8192 tokens, bounds 1 and 4.

    Wavelengths 2 pi / w below 2048 stay (pair 28: 1956), above 8192 are slowed 8 times (35: 8218), between them a blend
    (30: 2948).
    """
    w = 500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    got = scaled(w, "llama3", factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    wavelengths = 2 * math.pi / w
    assert wavelengths[[28, 30, 35]].tolist() == pytest.approx([1956.5, 2948.3, 8218.3], abs=1)
    assert torch.equal(got[:29], w[:29])
    assert torch.allclose(got[35:], w[35:] / 8, rtol=1e-14)
    smooth = (8192 / wavelengths[30] - 1) / 3
    assert got[30].item() == pytest.approx(((1 - smooth) / 8 + smooth).item() * w[30].item(), rel=1e-14)
    assert torch.equal(scaled(w, "linear", factor=4.0), w / 4)


def test_far_positions_keep_their_digits():
    """At position 1,000,000 an angle computed in float32 would be off by up to 0.03 radians."""
    x = torch.zeros(1, 1, 1, 16)
    x[..., 2] = 1.0
    far = 1_000_003
    got = rope().rotate(x, x, Context(torch.tensor([far])))[0][0, 0, 0]
    angle = far * 10000 ** (-2 / 16)
    assert got[2].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert got[3].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_rotation_keeps_lengths():
    x = torch.randn(2, 3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k = rope(pairing="half").rotate(x, 2 * x, Context(torch.arange(5)))
    assert torch.allclose(q.norm(dim=-1), x.norm(dim=-1))
    assert torch.allclose(k, 2 * q)


def test_sinusoids_by_hand():
    """Vaswani et al., 2017, 3.5: sin and cos of p / 10000^(2i/d) side by side."""
    cfg = small(d_model=4, n_heads=1)
    got = SinusoidalPosition(cfg)(torch.zeros(1, 3, 4), Context(torch.arange(3)))[0, 2]
    want = [math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)]
    assert torch.allclose(got, torch.tensor(want), atol=1e-7)


def test_alibi_slopes_of_the_paper():
    """Press et al., 2021: 1/2, 1/4, ... 1/256 for 8 heads; for 12 the 8 of them and every other one of 16."""
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8) == eight
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(16) == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    assert alibi_slopes(12) == pytest.approx(eight + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_alibi_biases_by_hand():
    bias = ALiBi(small(n_heads=4)).score_bias(torch.tensor([2, 3]), torch.arange(4))
    assert bias.shape == (4, 2, 4)
    # four heads: slopes 1/4, 1/16, 1/64, 1/256
    assert bias[0].tolist() == [[-0.5, -0.25, 0.0, 0.0], [-0.75, -0.5, -0.25, 0.0]]
    assert bias[3, 1, 0].item() == -3 / 256


REFUSED = {
    "an odd head dimension": ({"d_model": 36}, {"name": "rope"}, "9 is 9, which must be even"),
    "an odd part": ({}, {"name": "rope", "fraction": 0.4}, "0.4 of the head dimension"),
    "no part": ({}, {"name": "rope", "fraction": 0.0}, r"fraction=0.0 must be in \(0, 1\]"),
    "more than all": ({}, {"name": "rope", "fraction": 1.5}, r"fraction=1.5 must be in \(0, 1\]"),
    "an unknown scaling": (
        {},
        {"name": "rope", "scaling": {"name": "yarn", "factor": 2}},
        "'yarn' must be one of linear",
    ),
    "a scaling by 1": ({}, {"name": "rope", "scaling": {"name": "linear", "factor": 1}}, "factor=1 scales nothing"),
    "no factor": ({}, {"name": "rope", "scaling": {"name": "linear"}}, "needs a factor"),
    "an option of llama3 for linear": (
        {},
        {"name": "rope", "scaling": {"name": "linear", "factor": 2, "original_context": 5}},
        "scaling.original_context: linear has no such option",
    ),  # fmt: skip
    "crossed bounds": (
        {},
        {"name": "rope", "scaling": {"name": "llama3", "factor": 2, "low_freq_factor": 5}},
        "must be below",
    ),  # fmt: skip
    "a negative factor": (
        {},
        {"name": "rope", "scaling": {"name": "linear", "factor": -2}},
        "must be a number greater",
    ),
    "a base of 0": ({}, {"name": "rope", "base": 0}, "base=0.0 greater than 0"),
    "a negative base": ({}, {"name": "sinusoidal", "base": -2}, r"model.position.base=-2.0 must be greater than 0"),
    "an odd width": ({"d_model": 33, "n_heads": 3}, {"name": "sinusoidal"}, "needs an even model.d_model, not 33"),
    "another pairing": ({}, {"name": "rope", "pairing": "both"}, "'both' is neither 'interleaved' nor 'half'"),
    "a base for learned": (
        {},
        {"name": "learned", "base": 10.0},
        "position LearnedPosition has no such option. It has none",
    ),
    "a base for none": ({}, {"name": "none", "base": 10.0}, "model.position.base"),
    "a base for alibi": ({}, {"name": "alibi", "base": 10.0}, "model.position.base"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_options(case):
    sizes, position, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        build_model(small(**sizes, position=position))
