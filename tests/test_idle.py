"""What is typed has an effect or is refused."""

from __future__ import annotations

import pytest

from gptframe import cli, compose
from gptframe.errors import UserError


def read(*overrides: str):
    return cli.read_config(compose.compose_config(overrides), list(overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["attention=sliding", "model.attention.window=32"], "model.attention.window=32 has no effect"),
        (["model.attention.window=100"], "not shorter than model.context_length=32"),
        (["norm=rmsnorm", "norm_placement=none"], "norm=rmsnorm has no effect: model.norm_placement=none has no norms"),
        (["norm_placement=none", "model.norm.eps=0.1"], "model.norm.eps=0.1 has no effect"),
        (["model.norm.affine=false", "+model.norm.bias=true"], "model.norm.affine is false"),
        (["model.block=[attention]", "activation=relu"], "no block has an mlp"),
        (["model.block=[attention]", "expansion=2x"], "no block has an mlp"),
        (["model.block=[attention]", "model.mlp.bias=true"], "no block has an mlp"),
        (["model.block=[mlp]", "position=learned", "attention=gqa"], "no block has attention"),
        (["model.block=[mlp]", "position=alibi"], "where these positions enter"),
        (["model.block=[mlp]", "model.layers={0: [attention], 1: [attention, mlp]}"], "model.layers gives"),
        (["schedule.warmup_steps=5", "schedule.warmup_fraction=0.5"], "add schedule.warmup_steps=null"),
        (["experiment=andrea_reference", "schedule.warmup_fraction=0.5"], "schedule.warmup_steps=2000 goes before it"),
        (["schedule=constant", "schedule.overlap_warmup=true"], "overlap with"),
        (["schedule.warmup_fraction=0", "schedule.overlap_warmup=true"], "overlap with"),
        (["schedule=wsd", "schedule.decay_fraction=0", "schedule.decay=sqrt"], "leaves no decay"),
        (["data.baseline_order=0", "data.baseline_tokens=9"], "leaves out the baseline"),
        (["callbacks.samples.count=0", "callbacks.samples.top_k=4"], "draws no samples"),
        (["callbacks.samples.temperature=0", "callbacks.samples.top_p=0.5"], "takes the likeliest token"),
        (["~data"], "no key can be removed"),
        (["~trainer.max_steps"], "no key can be removed"),
        (["~experiment"], "no key can be removed"),
    ],
)  # fmt: skip
def test_what_is_typed_in_vain_is_refused(overrides, words):
    with pytest.raises(UserError) as refusal:
        read(*overrides)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=gpt2", "norm_placement=none"],  # the preset's norm, not the user's
        ["norm_placement=none", "norm=rmsnorm", "model.attention.qk_norm=head"],
        ["model.block=[attention]", "model.position.base=100"],
        ["model.block=[mlp]", "position=learned"],
        ["attention=sliding", "model.attention.window=31"],
        ["attention=mha", "model.attention.window=null", "model.block=[attention]"],
        ["schedule.warmup_steps=null", "schedule.warmup_fraction=0.5"],
        ["model.layers={0: [attention]}", "model.block=[mlp, attention]"],
        ["schedule=constant", "schedule.overlap_warmup=false"],
        ["seed=1", "seed=1"],
    ],
)
def test_what_has_an_effect_passes(overrides):
    read(*overrides)


def test_the_later_of_two_counts_and_that_is_said(capsys):
    assert read("model=gpt2", "seed=1", "model=mini", "seed=1").model.d_model == 64
    assert capsys.readouterr().err == "note: model=gpt2 gives way to model=mini, which comes later\n"


def test_a_sublayer_of_a_plugin_may_read_any_option(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from torch import nn\nfrom gptframe import register\n"
        "@register('sublayer', 'own_of_this_test')\nclass Own(nn.Linear):\n"
        "    def __init__(self, cfg, layer): super().__init__(cfg.d_model, cfg.d_model)\n"
    )
    read(
        f"plugins=[{file}]", "model.block=[own_of_this_test]", "expansion=8x", "activation=relu", "norm_placement=none"
    )
