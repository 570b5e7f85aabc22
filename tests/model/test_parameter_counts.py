"""Exact parameter counts of the presets: published figures, and sums written out by hand."""

from __future__ import annotations

import pytest
from helpers import ACTIVATIONS, PLACEMENTS, small
from torch import nn

from gptframe.config import Config
from gptframe.model import build_model

PUBLISHED = {
    "mini": 103_680,
    "andrea120m": 92_331_264,
    "andrea120m_untied": 98_737_152,
    "gpt2": 124_439_808,  # Radford et al., 2019; the released weights
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "pythia_70m": 70_426_624,  # Biderman et al., 2023, table of the models' page
    "pythia_160m": 162_322_944,
    "pythia_410m": 405_334_016,
    "llama2_7b": 6_738_415_616,  # Touvron et al., 2023; the released weights
}


def preset(name: str, *overrides: str):
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from gptframe.compose import conf_dir, prepare_hydra

    prepare_hydra()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        section = OmegaConf.to_container(compose("train", [f"model={name}", *overrides]).model, resolve=True)
    return Config.from_dict({"model": section}).model


def count(cfg) -> int:
    return sum(p.numel() for p in build_model(cfg, device="meta").parameters())


def gpt_with_all_biases(d, layers, vocab, context):
    """Tied head, learned positions: the sum over the parts of a GPT-2."""
    attention = 4 * (d * d + d)
    mlp = (d * 4 * d + 4 * d) + (4 * d * d + d)
    norms = 2 * 2 * d
    return vocab * d + context * d + layers * (attention + mlp + norms) + 2 * d


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name):
    assert count(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    "name,sizes,total",
    [
        ("andrea12m", (384, 6, 2305, 1024), 11_925_888),
        ("andrea120m", (768, 12, 8449, 1024), 92_331_264),
        ("andrea480m", (1536, 16, 8449, 1024), 467_857_920),
    ],
)
def test_andrea_from_its_parts(name, sizes, total):
    assert count(preset(name)) == gpt_with_all_biases(*sizes) == total


def test_the_parts_of_andrea120m():
    """25 affine LayerNorms, 84,934,656 weights in block matrices (12 layers of 12 d^2), 0.8 M positions."""
    model = build_model(preset("andrea120m"), device="meta")
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 25
    assert all(m.weight.shape == m.bias.shape == (768,) and m.eps == 1e-5 for m in norms)
    assert sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, nn.Linear)) == 84_934_656
    assert 12 * 12 * 768**2 == 84_934_656
    assert model.position.table.weight.shape == (1024, 768)
    assert model.head_weight.shape == (8449, 768)


def test_the_parts_of_mini():
    """Lynx Cortex: E 4,096; attention 16,384 and MLP 33,088 a block; norms 256 a block and 128 at the end."""
    model = build_model(preset("mini"), device="meta")
    assert model.token_embedding.weight.numel() == 4096
    for block in model.blocks:
        assert sum(p.numel() for p in block.attention.core.parameters()) == 16_384
        assert sum(p.numel() for p in block.mlp.core.parameters()) == 33_088
        assert sum(p.numel() for p in block.parameters()) == 49_728
    assert sum(p.numel() for p in model.final_norm.parameters()) == 128
    assert model.blocks[0].attention.core.position.pairing == "interleaved"
    assert model.blocks[0].attention.core.position.dim == 16


def test_one_block_and_an_untied_head_are_the_57k_of_hearsay():
    """Without norms, biases and the tied head: 2 * 4,096 + 16,384 + 32,768 = 57,344."""
    overrides = ["model.n_layers=1", "model.tie_head=false", "model.mlp.bias=false", "norm_placement=none"]
    assert count(preset("mini", *overrides)) == 57_344


def test_llama_and_pythia_are_of_the_right_kind():
    llama = build_model(preset("llama2_7b"), device="meta")
    assert llama.blocks[0].mlp.core.up.weight.shape == (11008, 4096)
    assert not any(name.endswith("bias") for name, _ in llama.named_parameters())
    pythia = build_model(preset("pythia_160m"), device="meta")
    assert type(pythia.blocks[0]).__name__ == "ParallelBlock"
    assert pythia.blocks[0].attention.core.position.dim == 16  # a quarter of 64
    assert pythia.blocks[0].attention.core.position.pairing == "half"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_by_formula(placement, activation):
    """d 32, hidden 128, 4 heads of which 2 for keys, vocabulary 19, context 16, 2 layers."""
    d, hidden, kv = 32, 128, 16
    per_sublayer = {"pre": 1, "post": 1, "output": 1, "sandwich": 2, "peri": 2, "keel": 2, "deepnorm": 1, "none": 0}
    outside = {"pre": 1, "output": 1, "sandwich": 1, "peri": 2}.get(placement, 0)
    norms = 2 * d * (2 * 2 * per_sublayer[placement] + outside)
    inputs = 2 if activation in ("swiglu", "geglu", "reglu") else 1
    attention = 2 * d * d + 2 * d * kv
    mlp = inputs * (d * hidden + hidden) + hidden * d + d
    want = 19 * d + 16 * d + norms + 2 * (attention + mlp)
    assert count(small(placement, activation, "learned", attention={"n_kv_heads": 2})) == want
    assert count(small(placement, activation, "rope", attention={"n_kv_heads": 2}, tie_head=False)) == want + 3 * d


def test_the_meta_device_allocates_nothing():
    model = build_model(preset("llama2_7b"), device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {b.device.type for b in model.buffers()} <= {"meta"}
