"""Initialisation keyed by parameter name, reproduced in NumPy; and the loss at the start."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from helpers import ACTIVATIONS, PLACEMENTS, POSITIONS, TOPOLOGIES, plain, small, tokens
from reference import drawn, init_std
from torch import nn

from gptframe import registry
from gptframe.config import Config
from gptframe.errors import UserError
from gptframe.model import build_model
from gptframe.model import init as init_module


def assert_as_in_numpy(model, seed):
    config = plain(model.cfg)
    for name, value in model.state_dict().items():
        if value.ndim == 2:
            want = drawn(name, tuple(value.shape), seed) * np.float32(init_std(name, tuple(value.shape), config))
            assert np.array_equal(value.numpy(), want), name
        else:
            is_gain = "norm" in name or name.split(".")[-2] in ("pre", "out", "post")
            assert (value == (1.0 if is_gain and name.endswith("weight") else 0.0)).all(), name


@pytest.mark.parametrize("init", ["normal", "deepnorm"])
@pytest.mark.parametrize("tie_head", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_value_is_that_of_an_independent_draw(placement, tie_head, init):
    changes = {"init": {"name": init}, "tie_head": tie_head, "attention": {"bias": True, "n_kv_heads": 2}}
    model = build_model(small(placement, "swiglu", "learned", d_model=64, norm={"name": "rmsnorm"}, **changes), seed=7)
    assert_as_in_numpy(model, 7)


def test_options_of_the_init():
    model = build_model(small("pre", "relu", "learned", init={"name": "normal", "std": 0.5, "embedding_std": 0.125}))
    assert_as_in_numpy(model, 0)
    assert model.token_embedding.weight.std().item() == pytest.approx(0.125, rel=0.1)


def test_one_value_written_down():
    """The first number of one matrix, as it was on the day that the rule was made: it must not change."""
    digest = hashlib.sha256(b"0:blocks.0.attention.core.q.weight").digest()[:16]
    key = np.frombuffer(digest, dtype="<u8")
    first = np.random.Generator(np.random.Philox(key=key)).standard_normal(1, dtype=np.float32)[0]
    model = build_model(small())
    assert model.blocks[0].attention.core.q.weight[0, 0].item() == np.float32(0.02) * first


VARIANTS = {
    **{f"activation_{a}": {"activation": {"name": a}} for a in ACTIVATIONS},
    **{f"position_{p}": {"position": POSITIONS[p]} for p in POSITIONS},
    **{f"placement_{p}": {"norm_placement": {"name": p}, "tie_head": False} for p in PLACEMENTS},
    "parallel": {"topology": "parallel"},
    "untied": {"tie_head": False},
    "biases": {"attention": {"bias": True}, "mlp": {"bias": False}},
    "qk_norm": {"attention": {"qk_norm": "head"}},
    "rmsnorm": {"norm": {"name": "rmsnorm"}},
    "order": {"block": ["mlp", "attention"]},
    "gqa": {"attention": {"n_kv_heads": 2}},
    "wider": {"expansion": {"factor": 8}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_share_what_they_have_in_common(variant):
    """All matrices of one name and shape are equal to the last bit."""
    base = build_model(small(tie_head="placement" not in variant), seed=3).state_dict()
    other = build_model(small(**VARIANTS[variant]), seed=3).state_dict()
    common = [k for k in base if k in other and base[k].shape == other[k].shape and base[k].ndim == 2]
    assert len(common) >= 9
    assert all(torch.equal(base[k], other[k]) for k in common)


def test_seeds_and_names_give_different_matrices():
    one, two = build_model(small(), seed=0), build_model(small(), seed=1)
    matrices = [p for model in (one, two) for p in model.parameters() if p.shape == (32, 32)]
    assert len(matrices) == 16
    assert len({p.detach().numpy().tobytes() for p in matrices}) == 16


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    build_model(small("pre", "gelu_tanh", "learned"), seed=9)
    assert torch.equal(torch.rand(3), want)


def test_a_modules_own_init_weights(fresh_registry):
    """A plugin's parameter that is no linear draws by its own name, so it too does not depend on its neighbours."""

    @registry.register("sublayer", "mixer")
    class Mixer(nn.Module):
        def __init__(self, cfg, layer: int):
            super().__init__()
            self.kernel = nn.Parameter(torch.empty(cfg.d_model, 3))

        def init_weights(self, draw):
            self.kernel.copy_(0.1 * draw("kernel"))

        def forward(self, x, ctx):
            return x * self.kernel.sum(dim=1)

    model = build_model(small(block=["attention", "mixer"]), seed=2)
    got = model.blocks[1].mixer.core.kernel.detach().numpy()
    assert np.array_equal(got, np.float32(0.1) * drawn("blocks.1.mixer.core.kernel", (32, 3), 2))


def test_what_a_plugins_constructor_draws_follows_the_seed(fresh_registry):
    @registry.register("sublayer", "random")
    class Random(nn.Module):
        def __init__(self, cfg, layer: int):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(cfg.d_model))

        def forward(self, x, ctx):
            return x * self.kernel

    kernels = [
        build_model(small(block=["attention", "random"]), seed=s).blocks[0].random.core.kernel for s in (1, 1, 2)
    ]
    assert torch.equal(kernels[0], kernels[1]) and not torch.equal(kernels[0], kernels[2])


@pytest.mark.parametrize(
    "init,message",
    [
        ({"name": "nomral"}, "model.init.name: unknown init 'nomral'. Did you mean 'normal'"),
        ({"name": "normal", "sdt": 0.1}, "model.init.sdt: init normal has no such option. Did you mean 'std'"),
        ({"name": "normal", "std": "small"}, "model.init.std='small' must be a number"),
    ],
)
def test_refused_options(init, message):
    with pytest.raises(UserError, match=message):
        build_model(small(init=init))


MINI = {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "context_length": 32}


@pytest.mark.parametrize("placement,topology", [(p, t) for t, p in TOPOLOGIES])
def test_the_loss_at_the_start_of_mini(placement, topology):
    """ln(64) = 4.159 nats to 2 %: before training nothing is known of the next token."""
    for activation in ACTIVATIONS:
        for position in ("rope", "learned", "sinusoidal", "alibi", "none"):
            for init in ("normal", "deepnorm") if placement == "deepnorm" else ("normal",):
                changes = {"norm_placement": {"name": placement}, "activation": {"name": activation}}
                section = {
                    **MINI,
                    **changes,
                    "position": POSITIONS[position],
                    "init": {"name": init},
                    "topology": topology,
                }
                model = build_model(Config.from_dict({"model": section}).model)
                ids = tokens(model.cfg, 16, 33)
                with torch.no_grad():
                    loss = model(ids[:, :-1], targets=ids[:, 1:]).item() / (16 * 32)
                assert loss == pytest.approx(math.log(64), rel=0.02), (activation, position, init)


ANDREA = {"d_model": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 8449, "context_length": 1024}


@pytest.fixture(scope="module")
def cached_draws():
    """Each matrix of 92 million parameters is drawn once for all placements, which share them."""
    patch, drawn_before = pytest.MonkeyPatch(), {}
    original = init_module.draw

    def draw(name, shape, seed):
        key = (name, shape, seed)
        if key not in drawn_before:
            drawn_before[key] = original(name, shape, seed)
        return drawn_before[key].clone()

    patch.setattr(init_module, "draw", draw)
    patch.setattr(nn.Linear, "reset_parameters", lambda self: None)  # overwritten anyway, and slow
    patch.setattr(nn.Embedding, "reset_parameters", lambda self: None)
    yield
    patch.undo()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_loss_at_the_start_of_andrea120m(cached_draws, placement):
    """ln(8449) = 9.042 nats to 2 %, at full size."""
    section = {
        **ANDREA,
        "norm_placement": {"name": placement},
        "position": {"name": "learned"},
        "attention": {"bias": True},
    }
    model = build_model(Config.from_dict({"model": section}).model)
    ids = tokens(model.cfg, 1, 193)
    with torch.no_grad():
        loss = model(ids[:, :-1], targets=ids[:, 1:]).item() / 192
    assert loss == pytest.approx(math.log(8449), rel=0.02)
