"""What the command line composes: every shipped option, in any order, and what a wrong one is answered."""

from __future__ import annotations

import itertools

import pytest

from gptframe import compose as composing
from gptframe import plugins
from gptframe.config import Config
from gptframe.errors import UserError
from gptframe.model import build_model

GROUPS = composing.groups()


def composed(*overrides: str) -> dict:
    return composing.compose_config(overrides)


@pytest.mark.parametrize("group,option", [(g, o) for g, options in GROUPS.items() for o in options])
def test_every_shipped_option_composes_into_a_valid_config(group: str, option: str) -> None:
    config = Config.from_dict(composed(f"{group}={option}"))
    if config.model.vocab_size is not None:
        build_model(config.model, device="meta")


# DESIGN.md's table, and the published sizes of the other families.
COUNTS = {
    "mini": 103_680,
    "andrea12m": 11_925_888,
    "andrea120m": 92_331_264,
    "andrea120m_untied": 98_737_152,
    "andrea480m": 467_857_920,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "pythia_70m": 70_426_624,
    "pythia_160m": 162_322_944,
    "pythia_410m": 405_334_016,
    "llama_160m": 162_417_408,
    "llama2_7b": 6_738_415_616,
    # 37000 * 512 + 6 * (4 * 512^2 + 2 * 512 * 2048 + 2048 + 512 + 2 * 2 * 512)
    "transformer2017": 37_846_016,
}


def test_the_table_of_sizes_covers_every_preset() -> None:
    assert sorted(COUNTS) == GROUPS["model"]


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    config = Config.from_dict(composed(f"model={preset}"))
    assert sum(p.numel() for p in build_model(config.model, device="meta").parameters()) == COUNTS[preset]


def test_the_option_file_of_an_installed_plugin_has_keys_as_a_shipped_one(monkeypatch) -> None:
    """`resume=` and `init_from=` ask for them: without, they called an installed activation unknown."""
    text = "# @package model.activation\nname: mine\nslope: 1.5\n"
    monkeypatch.setattr(plugins, "config_options", lambda: iter([("activation", "mine", text)]))
    assert composing.keys_of_option("activation", "mine") == ["model.activation.name", "model.activation.slope"]
    with pytest.raises(UserError, match="activation=mined: no such option. Did you mean 'mine'"):
        composing.keys_of_option("activation", "mined")


def test_a_preset_sets_no_key_that_an_option_file_owns() -> None:
    """Otherwise the preset, which is merged last, would silently win over the option that a user selected."""
    owned = {
        key
        for group, options in GROUPS.items()
        if group not in ("model", "experiment")
        for option in options
        for key in composing.keys_of_option(group, option)
    }
    for preset in GROUPS["model"]:
        keys = set(composing.keys_of_option("model", preset))
        # A preset's vocabulary comes before what a tokenizer would take by itself.
        assert owned & keys <= {"model.vocab_size"}, preset


def test_the_command_line_wins_over_the_preset_in_any_order() -> None:
    arguments = ["model=andrea120m", "norm_placement=post", "activation=swiglu", "expansion=8_3x", "position=rope"]
    results = [composed(*order) for order in itertools.islice(itertools.permutations(arguments), 0, 120, 7)]
    for result in results:
        assert result["model"]["d_model"] == 768
        assert result["model"]["norm_placement"]["name"] == "post"
        assert result["model"]["activation"]["name"] == "swiglu"
        assert result["model"]["position"] == {
            "name": "rope", "base": 1e4, "pairing": "interleaved", "fraction": 1.0, "scaling": None
        }  # fmt: skip
        assert Config.from_dict(result).model.hidden == 2048


def test_an_option_replaces_all_of_the_option_that_the_preset_chose() -> None:
    assert composed("model=pythia_160m", "position=rope")["model"]["position"]["fraction"] == 1.0
    assert composed("model=pythia_160m", "attention=gqa", "model.attention.n_kv_heads=3")["model"]["attention"] == {
        "bias": True,
        "out_bias": None,
        "head_dim": None,
        "n_kv_heads": 3,
        "window": None,
        "qk_norm": "none",
        "softcap": None,
        "backend": "sdpa",
    }
    assert composed("attention=mha")["model"]["attention"]["n_kv_heads"] is None


def test_small_floats_stay_numbers() -> None:
    """PyYAML reads 1e-05 as text; Hydra's own grammar does not."""
    assert composed("model.norm.eps=1e-05")["model"]["norm"]["eps"] == 1e-5


def test_default_learning_rate_shrinks_with_the_square_root_of_the_width() -> None:
    assert composing.learning_rate(6e-4, 768) == 6e-4
    assert composing.learning_rate(6e-4, 3072) == 3e-4


@pytest.mark.parametrize("n_heads,expected", [(4, 2), (12, 3), (32, 8), (25, 5), (1, 1), (7, 1)])
def test_grouped_query_option_keeps_about_a_quarter_of_the_heads(n_heads: int, expected: int) -> None:
    assert composing.kv_heads(n_heads) == expected and n_heads % expected == 0


@pytest.mark.parametrize(
    "override,words",
    [
        ("model.d_modle=128", ["model.d_modle", "'d_model'"]),
        ("trainer.max_step=3", ["trainer.max_step", "'max_steps'"]),
        ("sede=1", ["sede", "'seed'"]),
        ("model=minni", ["model=minni", "'mini'", "andrea120m"]),
        ("activation=swigloo", ["activation=swigloo", "'swiglu'"]),
        ("aktivation=swiglu", ["aktivation", "'activation'"]),
        ("model/activation=swiglu", ["model/activation", "activation=..."]),
        ("max_steps=3", ["max_steps", "trainer.max_steps"]),
        ("model.d_model=${model.width}", ["model.d_model", "model.width"]),
        ("model.block=[attention", ["model.block=[attention"]),
    ],
)
def test_a_wrong_override_is_answered_with_the_nearest_right_one(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        composed(override)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.count("\n") <= 1 and len(message) < 500, message
