"""The trace against the untraced model, against a computation by hand, and against its own rules."""

from __future__ import annotations

import itertools
import json

import mini_by_hand
import numpy as np
import pytest
import torch
from torch import nn

import gptframe
from gptframe.config import ModelConfig
from gptframe.generate import lay_out
from gptframe.inspect.trace import GLOSSARY, Trace, logit_lens, trace
from gptframe.model import Context, KVCache, build_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
PLACEMENTS = ["pre", "post", "output", "sandwich", "peri", "keel", "deepnorm", "none"]
POSITIONS = {
    "learned": {"name": "learned"},
    "rope": {"name": "rope"},
    "rope_half": {"name": "rope", "pairing": "half", "fraction": 0.25},
    "sinusoidal": {"name": "sinusoidal"},
    "alibi": {"name": "alibi"},
    "none": {"name": "none"},
}
ATTENTIONS = {
    "mha": {"bias": True},
    "gqa": {"n_kv_heads": 2},
    "mqa": {"n_kv_heads": 1},
    "sliding": {"window": 3},
    "qk_head": {"qk_norm": "head", "n_kv_heads": 2},
    "qk_full": {"qk_norm": "full", "n_kv_heads": 2},
    "softcap": {"softcap": 0.5, "window": 4},
}


def config(**options: object) -> ModelConfig:
    attention = options.pop("attention", {})
    return ModelConfig(sublayers={"attention": attention, "mlp": {}}, vocab_size=32, **options)  # type: ignore[arg-type]


def model_of(cfg: ModelConfig, std: float = 0.3):
    """Weights large enough that patterns, caps and activations are far from their linear range."""
    model = build_model(cfg).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.mul_(std / 0.02)
            elif p.ndim == 1 and name.endswith("bias"):
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return model


COMBINATIONS = [
    *(("pre", attention, position, "sequential") for attention, position in itertools.product(ATTENTIONS, POSITIONS)),
    *((placement, "qk_head", "rope", "sequential") for placement in PLACEMENTS),
    *(
        (placement, "softcap", "alibi", "parallel")
        for placement in PLACEMENTS
        if placement not in ("post", "keel", "deepnorm")
    ),
]


@pytest.mark.parametrize("placement,attention,position,topology", COMBINATIONS)
def test_a_trace_changes_no_bit_and_explains_the_fused_kernel(placement, attention, position, topology) -> None:
    cfg = config(
        attention=ATTENTIONS[attention], position=POSITIONS[position], topology=topology,
        norm_placement={"name": placement}, activation={"name": "swiglu"}, logit_softcap=5.0,
    )  # fmt: skip
    model = model_of(cfg)
    with torch.no_grad():
        before = model(IDS)
        with trace(model) as t:
            during = model(IDS)
        after = model(IDS)
        assert torch.equal(before, during) and torch.equal(before, after) and torch.equal(t["logits"], before)
        for layer in range(cfg.n_layers):
            name = f"blocks.{layer}.attention"
            core = model.blocks[layer].attention.core
            values = t[f"{name}.v"].repeat_interleave(cfg.n_heads // core.n_kv_heads, dim=1)
            # What the kernel returned is the recomputed pattern times the values, and it is what was projected.
            assert torch.allclose(t[f"{name}.pattern"] @ values, t[f"{name}.heads"], atol=1e-5)
            projected = core.out(t[f"{name}.heads"].transpose(1, 2).flatten(2))
            out = f"{name}.core" if f"{name}.core" in t else f"{name}.delta"
            assert torch.allclose(projected, t[out], atol=1e-5)
            assert torch.allclose(t[f"{name}.pattern"].sum(-1), torch.ones(2, cfg.n_heads, 8), atol=1e-5)
            assert (f"{name}.q_rotated" in t) == position.startswith("rope")
            assert (f"{name}.score_bias" in t) == (position == "alibi")
            assert (f"{name}.scores_capped" in t) == (attention == "softcap")
            assert (f"{name}.q_norm" in t) == attention.startswith("qk")
        if topology == "sequential":
            for name in t.names("*.delta"):
                prefix = name.removesuffix(".delta")
                scale = model.get_submodule(prefix).residual_scale
                total = scale * t[f"{prefix}.stream_before"] + t[name]
                assert torch.allclose(
                    total, t[f"{prefix}.sum" if f"{prefix}.sum" in t else f"{prefix}.stream_after"], atol=1e-5
                )
        else:
            total = t["blocks.0.stream_before"] + t["blocks.0.attention.delta"] + t["blocks.0.mlp.delta"]
            assert torch.allclose(total, t["blocks.0.stream_after"], atol=1e-5)
        assert ("position" in t) == (position in ("learned", "sinusoidal"))
        assert ("final_norm" in t) == (placement not in ("post", "keel", "deepnorm", "none"))
        assert ("embedding_norm" in t) == (placement == "peri")
        # the last place of the stream is the end of the model
        assert torch.allclose(list(logit_lens(t).values())[-1], before, atol=1e-5)


def test_a_trace_changes_no_bit_of_a_model_laid_out_for_generation() -> None:
    model = model_of(config(attention={"n_kv_heads": 2, "bias": True}, activation={"name": "swiglu"}))
    apart = dict(model.named_modules())
    expected = {f"attention.{n}": apart[f"blocks.0.attention.core.{n}"] for n in ("q", "k", "v")}
    expected |= {f"mlp.{n}": apart[f"blocks.0.mlp.core.{n}"] for n in ("up", "gate")}
    lay_out(model)
    with torch.no_grad():
        before = model(IDS)
        with trace(model) as t:
            assert torch.equal(model(IDS), before)
        for name, layer in expected.items():
            value = t[f"blocks.0.{name}"]
            value = value.transpose(1, 2).flatten(2) if value.ndim == 4 else value
            assert torch.allclose(value, layer(t[f"blocks.0.{name.split('.')[0]}.pre"]), atol=1e-5)


def test_every_name_is_in_the_glossary_or_a_plugins_module() -> None:
    for placement, activation in [("keel", "swiglu"), ("peri", "gelu_tanh")]:
        attention = {"softcap": 1.0, "qk_norm": "head"}
        cfg = config(norm_placement={"name": placement}, activation={"name": activation}, attention=attention)
        with trace(build_model(cfg)) as t:
            t.model(IDS)
        assert {name.rpartition(".")[2] for name in t} <= set(GLOSSARY)
        for name in t:
            assert len(t.axes(name).split()) == t[name].ndim and "?" not in t.axes(name), name


# mini's canonical example: computed by hand in NumPy, see mini_by_hand.py.


def mini_trace(dtype: torch.dtype) -> Trace:
    model = build_model(ModelConfig(), seed=mini_by_hand.SEED).to(dtype).eval()
    with torch.no_grad(), gptframe.trace(model) as t:
        model(torch.tensor([mini_by_hand.IDS]))
    return t


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 2e-9), (torch.float32, 2e-5)])
def test_the_trace_of_mini_is_what_the_formulas_give_by_hand(dtype: torch.dtype, tolerance: float) -> None:
    t = mini_trace(dtype)
    saved = json.loads(mini_by_hand.GOLDENS.read_text(encoding="utf-8"))
    for name, golden in saved["values"].items():
        value = t[name] if name.endswith("mask") else t[name][0]
        value = value.double()
        assert list(value.shape) == golden["shape"], name
        last = value[..., -1, :].reshape(-1)[: len(golden["last_token"])]
        assert np.abs(last.numpy() - np.array(golden["last_token"])).max() < tolerance, name
        assert abs(value.norm().item() - golden["norm"]) < tolerance * golden["norm"] + 1e-9, name
    left_out = {"ids", *(n for n in t if t.alias_of(n))}
    assert set(saved["values"]) == set(t) - left_out


def test_the_goldens_are_what_the_numpy_computation_gives_today() -> None:
    weights = mini_by_hand.weights()
    by_hand = mini_by_hand.forward(weights)
    logits = mini_by_hand.reference.Reference(weights, mini_by_hand.CONFIG)([mini_by_hand.IDS])[0]
    assert np.abs(by_hand["logits"] - logits).max() < 1e-12
    saved = json.loads(mini_by_hand.GOLDENS.read_text(encoding="utf-8"))["values"]
    assert saved.keys() == by_hand.keys()
    for name, golden in saved.items():
        last = by_hand[name].astype(np.float64)[..., -1, :].reshape(-1)[:64]
        assert np.abs(last - np.array(golden["last_token"])).max() < 1e-9, name


def test_the_first_score_of_mini_on_paper() -> None:
    """One number all the way from the weights, without arrays: how much the last token looks at the first, head 0."""
    p = mini_by_hand.weights()

    def row(token: int) -> list[float]:
        x = [float(v) for v in p["token_embedding.weight"][token]]
        mean = sum(x) / 64
        variance = sum((v - mean) ** 2 for v in x) / 64
        return [(v - mean) / (variance + 1e-5) ** 0.5 for v in x]

    def projected(matrix: str, token: int, position: int) -> list[complex]:
        w = p[f"blocks.0.attention.core.{matrix}.weight"]
        y = [sum(float(w[j, i]) * v for i, v in enumerate(row(token))) for j in range(16)]
        return [complex(y[2 * i], y[2 * i + 1]) * np.exp(1j * position * 10000 ** (-i / 8)) for i in range(8)]

    q, k = projected("q", mini_by_hand.IDS[7], 7), projected("k", mini_by_hand.IDS[0], 0)
    score = sum((a * b.conjugate()).real for a, b in zip(q, k, strict=True)) / 4
    assert abs(mini_trace(torch.float64)["blocks.0.attention.scores"][0, 0, 7, 0].item() - score) < 1e-12


# What else may run inside.


def test_documents_and_cache_have_their_own_masks() -> None:
    model = model_of(config())
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [0] * 8])
    with torch.no_grad(), trace(model) as t:
        model(IDS, Context(documents=documents))
        assert t["blocks.0.attention.mask"].shape == (2, 1, 8, 8)
        assert t["blocks.1.attention.pattern"][0, :, 5, :3].abs().max() == 0
        assert t["blocks.1.attention.pattern"][1, :, 5, :3].min() > 0

        cache = KVCache()
        model(IDS[:, :7], Context(cache=cache))
        model(IDS[:, 7:], Context(cache=cache))
        step = t["blocks.1.attention.pattern"]
        model(IDS)
        assert step.shape == (2, 4, 1, 8) and torch.allclose(step, t["blocks.1.attention.pattern"][:, :, 7:], atol=1e-5)


def test_with_targets_the_loss_is_returned_and_the_logits_are_there() -> None:
    model = model_of(config(logit_softcap=3.0, tie_head=False))
    targets = IDS.roll(-1, 1)
    with trace(model) as t:
        loss = model(IDS, targets=targets)
        loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    expected = nn.functional.cross_entropy(t["logits"].flatten(0, 1), targets.flatten(), reduction="sum")
    assert torch.allclose(expected, loss.detach(), rtol=1e-5)
    assert not t["logits"].requires_grad


def test_training_with_dropout_draws_the_same_mask() -> None:
    model = model_of(config(dropout=0.5, norm_placement={"name": "sandwich"})).train()
    torch.manual_seed(1)
    plain = model(IDS)
    torch.manual_seed(1)
    with trace(model) as t:
        assert torch.equal(model(IDS), plain)
    # the delta is what dropout has left of the normalised output
    zeros = (t["blocks.0.mlp.delta"] == 0).double().mean()
    assert 0.3 < zeros < 0.7 and (t["blocks.0.mlp.out"] == 0).double().mean() < 0.01


def test_autocast_and_a_compiled_model() -> None:
    model = model_of(config(attention={"n_kv_heads": 2}))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(IDS)
        with trace(model) as t:
            assert torch.equal(model(IDS), plain)
    assert t["blocks.0.attention.pattern"].dtype == torch.float32
    model.compile(backend="eager")
    with torch.no_grad(), trace(model) as t:
        model(IDS)
    assert "blocks.1.attention.pattern" in t and model._compiled_call_impl is not None


def test_a_fused_activation_and_a_plugins_modules_are_seen(fresh_registry) -> None:
    class Fused(nn.Module):
        def forward(self, x):
            return torch.relu(x)

        def forward_with_bias(self, x, bias):
            return torch.relu(x + bias)

    class Mixer(nn.Module):
        def __init__(self, cfg, layer: int):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(cfg.d_model, 8), nn.Tanh(), nn.Linear(8, cfg.d_model))

        def forward(self, x, ctx):
            return self.net(x)

    gptframe.register("activation", "fused_for_trace")(Fused)
    gptframe.register("sublayer", "mixer")(Mixer)
    cfg = config(activation={"name": "fused_for_trace"}, block=["mixer", "mlp", "mixer"], position={"name": "learned"})
    model = model_of(cfg)
    with torch.no_grad(), trace(model) as t:
        assert torch.equal(model(IDS), t["logits"])
    up = t["blocks.0.mlp.up"]
    linear = model.blocks[0].mlp.core.up
    assert torch.allclose(up, linear(t["blocks.0.mlp.pre"]), atol=1e-6)
    assert torch.equal(t["blocks.0.mlp.activation"], torch.relu(up))
    assert t["blocks.1.mixer.net.1"].shape == (2, 8, 8)
    assert torch.equal(t["blocks.1.mixer__2.net"], t["blocks.1.mixer__2.delta"])
    assert t.meaning("blocks.1.mixer.net.1").startswith("the output of the module")
    assert t.names("*.pattern") == []


def test_a_core_that_works_in_place_does_not_rewrite_history(fresh_registry) -> None:
    class InPlace(nn.Module):
        def __init__(self, cfg, layer: int):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x, ctx):
            x.mul_(2)
            return x * self.scale

    gptframe.register("sublayer", "in_place")(InPlace)
    cfg = config(block=["in_place", "mlp"], norm_placement={"name": "none"}, position={"name": "none"})
    model = model_of(cfg)
    with torch.no_grad():
        plain = model(IDS)
        with trace(model) as t:
            assert torch.equal(model(IDS), plain)
    assert torch.equal(t["blocks.0.stream_before"], t["token_embedding"])
    assert torch.equal(t["blocks.0.in_place.delta"], 2 * t["token_embedding"])


def test_nothing_is_left_behind() -> None:
    model = build_model(config()).eval()
    before = [dict(m.__dict__) for m in model.modules()]
    with pytest.raises(ZeroDivisionError), trace(model) as t:
        model(IDS)
        raise ZeroDivisionError
    for module, attributes in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert not module._forward_hooks and not module._forward_pre_hooks
    kept = t["logits"].clone()
    with torch.no_grad():
        model(IDS + 1)
    assert torch.equal(t["logits"], kept)


def test_nested_traces_and_a_second_pass() -> None:
    model = build_model(config()).eval()
    with torch.no_grad(), trace(model) as outer:
        with trace(model) as inner:
            model(IDS)
        assert torch.equal(inner["blocks.1.attention.scores"], outer["blocks.1.attention.scores"])
        model(IDS[:, :3])
    assert outer["logits"].shape[1] == 3 and inner["logits"].shape[1] == 8


def test_names_are_listed_completed_and_corrected() -> None:
    with trace(build_model(config())) as t:
        with pytest.raises(KeyError, match="empty"):
            t["logits"]
        t.model(IDS)
    assert "blocks.1.attention.pattern" in t._ipython_key_completions_()
    assert t.names("blocks.*.attention.pattern") == ["blocks.0.attention.pattern", "blocks.1.attention.pattern"]
    assert "softmax of the scores" in t.help()
    with pytest.raises(KeyError) as caught:
        t["blocks.1.attention.patern"]
    assert "'blocks.1.attention.pattern'" in str(caught.value)
    with pytest.raises(KeyError) as caught:
        t["blocks.1.attention.score_bias"]
    assert GLOSSARY["score_bias"][1] in str(caught.value)
    with pytest.raises(TypeError, match="GPT"), trace(nn.Linear(2, 2)):
        pass
