"""The forward pass against an independent NumPy implementation, and its behaviour at the edges."""

from __future__ import annotations

import copy
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from helpers import (
    ACTIVATIONS,
    ATTENTIONS,
    NORMS,
    PLACEMENTS,
    POSITIONS,
    TOPOLOGIES,
    perturbed,
    reference_of,
    small,
    tokens,
)
from reference import cross_entropy

from gptframe.model import Context, build_model


def assert_agrees(cfg, documents=None):
    """fp64 to 1e-10 and fp32 to 1e-5 of the largest logit (at least 1); every parameter is used by both."""
    ids = tokens(cfg)
    ctx = None if documents is None else Context(documents=torch.tensor(documents))
    model = perturbed(cfg)
    reference = reference_of(model)
    want = reference(ids.numpy(), documents=documents)
    assert reference.used == set(model.state_dict())
    scale = max(1.0, np.abs(want).max())
    with torch.no_grad():
        got = model(ids, ctx).numpy()
        assert np.abs(got - want).max() <= 1e-10 * scale
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
        loss = model(ids, ctx, targets).item()
        assert abs(loss - cross_entropy(want, targets.numpy())) <= 1e-10 * scale * targets.numel()
        assert np.abs(model.float()(ids, ctx).double().numpy() - want).max() <= 1e-5 * scale


@pytest.mark.parametrize("topology,placement", TOPOLOGIES)
def test_agrees_for_every_activation_and_position(topology, placement):
    """The full product of placement, topology, activation and position; the other options take turns."""
    pick = random.Random(f"{topology} {placement}")
    attentions, norms = itertools.cycle(ATTENTIONS.values()), itertools.cycle(NORMS.values())
    for activation, position in itertools.product(ACTIVATIONS, POSITIONS):
        assert_agrees(
            small(
                placement,
                activation,
                position,
                topology=topology,
                attention=next(attentions),
                norm=next(norms),
                mlp={"bias": pick.random() < 0.5},
                tie_head=pick.random() < 0.5,
                expansion=pick.choice([{"factor": 2}, {"factor": 8 / 3, "multiple_of": 16}, {"factor": 1}]),
                embedding_scale=pick.choice([1.0, 2.5]),
                logit_softcap=pick.choice([None, 3.0]),
            )
        )


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_agrees_for_every_attention_norm_and_position(attention):
    for norm, position in itertools.product(NORMS, POSITIONS):
        assert_agrees(small("sandwich", "relu", position, attention=ATTENTIONS[attention], norm=NORMS[norm]))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_agrees_with_a_document_mask(attention):
    documents = [[0, 0, 0, 1, 1, 1, 1, 2], [5, 5, 5, 5, 5, 7, 7, 7]]
    for position in POSITIONS:
        assert_agrees(small("pre", "gelu_tanh", position, attention=ATTENTIONS[attention]), documents)


SINGLE = {
    "no_residual": {"residual_scale": 0.0},
    "half_residual": {"residual_scale": 0.5},
    "untied": {"tie_head": False},
    "embedding_scale": {"embedding_scale": 5.65},
    "logit_softcap": {"logit_softcap": 1.0},
    "mlp_without_bias": {"mlp": {"bias": False}},
    "attention_bias": {"attention": {"bias": True}},
    "narrow": {"expansion": {"factor": 1}},
    "mlp_first": {"block": ["mlp", "attention"]},
    "one_layer_is_different": {"layers": {1: ["mlp", "attention"]}},
    "attention_only_layer": {"layers": {0: ["attention"]}},
    "eight_heads": {"n_heads": 8, "position": {"name": "alibi"}},
    "alibi_with_heads_that_are_no_power_of_two": {"d_model": 48, "n_heads": 6, "position": {"name": "alibi"}},
    "alibi_with_three_heads": {"d_model": 48, "n_heads": 3, "position": {"name": "alibi"}},
    "window_as_long_as_the_context": {"attention": {"window": 16}},
    "window_of_one": {"attention": {"window": 1}},
}


@pytest.mark.parametrize("option", SINGLE)
@pytest.mark.parametrize("topology", ["sequential", "parallel"])
def test_agrees_for_single_options(option, topology):
    assert_agrees(small(topology=topology, **SINGLE[option]))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("residual_scale", [0.0, 2.0])
def test_residual_scale_overrides_the_placements_own(placement, residual_scale):
    assert_agrees(small(placement, residual_scale=residual_scale))


SWITCHES = {
    "topology": {"topology": "parallel"},
    "embedding_scale": {"embedding_scale": 2.0},
    "residual_scale": {"residual_scale": 0.5},
    "logit_softcap": {"logit_softcap": 2.0},
    "window": {"attention": {"window": 3}},
    "softcap": {"attention": {"softcap": 1.0}},
    "eps": {"norm": {"name": "layernorm", "eps": 0.5}},
    "rmsnorm_eps": {"norm": {"name": "rmsnorm", "eps": 0.5}},
    "base": {"position": {"name": "rope", "base": 100.0}},
    "pairing": {"position": {"name": "rope", "pairing": "half"}},
    "fraction": {"position": {"name": "rope", "fraction": 0.5}},
    **{f"placement_{p}": {"norm_placement": {"name": p}} for p in ("post", "keel", "deepnorm")},
    **{f"activation_{a}": {"activation": {"name": a}} for a in ("gelu_exact", "relu", "squared_relu", "silu")},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_no_switch_is_ignored(switch):
    """With the same weights, one changed option changes the logits."""
    base = {"norm": {"name": "rmsnorm"}} if switch == "rmsnorm_eps" else {}
    usual, changed = perturbed(small(**base)), perturbed(small(**SWITCHES[switch]))
    changed.load_state_dict(usual.state_dict(), strict=False)
    ids = tokens(usual.cfg)
    assert not torch.allclose(usual(ids), changed(ids), atol=1e-4)


def test_dropout_acts_in_training_only():
    model = perturbed(small(dropout=0.5))
    ids = tokens(model.cfg)
    assert torch.equal(model(ids), model(ids))
    assert torch.allclose(model(ids), perturbed(small())(ids))
    model.train()
    assert not torch.allclose(model(ids), model(ids))


@pytest.mark.parametrize("batch,length", [(2, 1), (0, 8), (1, 16)])
def test_shapes_at_the_edges(batch, length):
    model = perturbed(small())
    ids = tokens(model.cfg, batch, length)
    assert model(ids).shape == (batch, length, 19)
    assert model(ids, targets=ids).shape == ()


def test_more_tokens_than_the_context_are_refused():
    model = build_model(small())
    with pytest.raises(ValueError, match="17 tokens exceed the context of 16"):
        model(tokens(model.cfg, 1, 17))


def test_a_context_of_one_token():
    assert_shape = build_model(small("pre", "gelu_tanh", "learned", context_length=1))
    assert assert_shape(tokens(assert_shape.cfg, 2, 1)).shape == (2, 1, 19)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("tie_head", [True, False])
def test_a_copy_is_a_model_of_its_own(copied, tie_head):
    model = perturbed(small("keel", "swiglu", tie_head=tie_head))
    ids = tokens(model.cfg)
    before = model(ids)
    twin = copied(model)
    assert torch.equal(twin(ids), before)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(model(ids), before)


def test_the_tied_head_is_one_parameter():
    tied, untied = build_model(small(tie_head=True)), build_model(small(tie_head=False))
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.weight"}
    assert tied.head_weight is tied.token_embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 19 * 32
    twin = copy.deepcopy(tied)
    assert twin.head_weight is twin.token_embedding.weight


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
@pytest.mark.parametrize("position", POSITIONS)
def test_low_precision_stays_near(dtype, tolerance, position):
    cfg = small("peri", "swiglu", position, attention=ATTENTIONS["all"])
    ids = tokens(cfg)
    exact = perturbed(cfg)(ids)
    low = perturbed(cfg).to(dtype)(ids)
    assert low.dtype == dtype
    assert (low.double() - exact).abs().max() <= tolerance * exact.abs().max()
    with torch.autocast("cpu", dtype=dtype):
        mixed = perturbed(cfg, dtype=torch.float32)(ids)
    assert (mixed.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize(
    "placement,topology,position,attention",
    [
        ("keel", "sequential", "alibi", "all"),
        ("peri", "parallel", "learned", "qk_norm_full"),
    ],
)
def test_compiled_it_gives_the_same(placement, topology, position, attention):
    cfg = small(placement, "swiglu", position, topology=topology, attention=ATTENTIONS[attention], n_layers=1)
    model = perturbed(cfg, dtype=torch.float32)
    ids = tokens(cfg)
    want = model(ids, targets=ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # fullgraph turns a graph break into an error
    got = compiled(ids, targets=ids)
    got.backward()
    assert torch.allclose(got, want)
    assert all(p.grad is not None for p in model.parameters())
    assert set(model.state_dict()) == set(build_model(cfg).state_dict())
