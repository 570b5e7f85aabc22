"""The typed schema: strict types, nearest names, sizes that must fit together, and the round trip."""

from __future__ import annotations

import json
import math

import pytest

from gptframe.config import Config, ModelConfig, convert
from gptframe.errors import UserError


def model(**values) -> ModelConfig:
    return Config.from_dict({"model": values}).model


def nested(path: str, value) -> dict:
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


REFUSED = [
    # unknown keys
    ("sede", 1, "sede: no such key. Did you mean 'seed'"),
    ("model.d_modle", 64, "model.d_modle: no such key. Did you mean 'd_model'"),
    ("model.sublayers", 3, "model.sublayers: no such key"),
    (
        "model.attentoin",
        {"window": 4},
        "model.attentoin: neither a key of the model nor a sublayer of its blocks. Did you mean",
    ),
    ("model.sublayers", {"attention": {}}, "model.sublayers: neither a key of the model nor a sublayer"),
    ("model.my_layer", {"width": 4}, "model.my_layer: neither a key of the model nor a sublayer of its blocks."),
    ("trainer.max_step", 10, "trainer.max_step: no such key. Did you mean 'max_steps'"),
    ("model.expansion", {"factr": 4}, "model.expansion.factr: no such option. Known: factor, multiple_of"),
    # types
    ("model", "mini", "model='mini' must be a section; select a preset with model=mini"),
    ("model", None, "model=None must be a section"),
    ("model.attention", None, "model.attention=None must be a section of options"),
    ("model.d_model", "wide", "model.d_model='wide' must be a whole number"),
    ("model.d_model", 64.5, "model.d_model=64.5 must be a whole number"),
    ("model.d_model", True, "model.d_model=True must be a whole number"),
    ("model.d_model", None, "model.d_model=None must be a whole number"),
    ("model.d_model", math.inf, "model.d_model=inf must be a whole number"),
    ("model.d_model", math.nan, "model.d_model=nan must be a whole number"),
    ("model.d_model", [64], "model.d_model=[64] must be a whole number"),
    ("model.d_model", "-64", "model.d_model='-64' must be a whole number"),
    ("model.d_model", "9" * 5000, "must be a whole number"),
    ("model.tie_head", "yes", "model.tie_head='yes' must be true or false"),
    ("model.tie_head", 1, "model.tie_head=1 must be true or false"),
    ("model.dropout", "0.1", "model.dropout='0.1' must be a number"),
    ("model.dropout", math.nan, "model.dropout=nan must be a number"),
    ("model.residual_scale", math.inf, "model.residual_scale=inf must be a number or null"),
    ("model.residual_scale", 10**400, "must be a number or null"),
    ("model.residual_scale", "zero", "model.residual_scale='zero' must be a number or null"),
    ("model.block", "attention", "model.block='attention' must be a list"),
    ("model.layers", [["mlp"]], "model.layers=[['mlp']] must be a section of options"),
    ("model.layers", {"first": ["mlp"]}, "model.layers='first' must be a whole number"),
    ("model.layers", {0: "mlp"}, "model.layers.0='mlp' must be a list"),
    ("model.norm", "rmsnorm", "model.norm='rmsnorm' must be a section of options"),
    ("model.name", 3, "model.name=3 must be text"),
    ("plugins", "my.py", "plugins='my.py' must be a list"),
    ("plugins", [3], "plugins[0]=3 must be text"),
    ("trainer", 3, "trainer=3 must be a section of options, as in trainer.max_steps=1000"),
    ("model.linear", "amx", "model.linear='amx' must be a section of options, as in model.linear.backend=torch"),
    ("trainer.clip_norm", "one", "trainer.clip_norm='one' must be a number or null"),
    ("trainer.compile", "maybe", "trainer.compile='maybe' must be true, false, auto or max-autotune"),
    ("seed", "one", "seed='one' must be a whole number"),
    # sizes
    ("model.d_model", 0, "model.d_model=0 must be greater than 0"),
    ("model.n_layers", -1, "model.n_layers=-1 must be greater than 0"),
    ("model.n_heads", 0, "model.n_heads=0 must be greater than 0"),
    ("model.vocab_size", 0, "model.vocab_size=0 must be greater than 0"),
    ("model.context_length", 0, "model.context_length=0 must be greater than 0"),
    ("model.n_heads", 5, "model.d_model=64 is not divisible by model.n_heads=5: try model.n_heads=4"),
    ("model.dropout", 1.0, "model.dropout=1.0 must be at least 0 and below 1"),
    ("model.dropout", -0.1, "model.dropout=-0.1 must be at least 0 and below 1"),
    ("model.logit_softcap", 0.0, "model.logit_softcap=0.0 must be greater than 0"),
    ("model.embedding_scale", -1, "model.embedding_scale=-1.0 must be greater than 0"),
    ("model.expansion", {"factor": 0}, "model.expansion.factor=0 must be a number greater than 0"),
    ("model.expansion", {"factor": -4}, "model.expansion.factor=-4 must be a number greater than 0"),
    (
        "model.expansion",
        {"factor": "8/3"},
        "model.expansion.factor='8/3' must be a number greater than 0, as in 4 or 2.6667",
    ),
    ("model.expansion", {"factor": math.nan}, "model.expansion.factor=nan must be a number"),
    ("model.expansion", {"factor": math.inf}, "model.expansion.factor=inf must be a number"),
    ("model.expansion", {"factor": True}, "model.expansion.factor=True must be a number"),
    ("model.expansion", {"multiple_of": 64}, "model.expansion.factor=None must be a number"),
    (
        "model.expansion",
        {"factor": 4, "multiple_of": 0},
        "model.expansion.multiple_of=0 must be a whole number of at least 1",
    ),
    ("model.expansion", {"factor": 4, "multiple_of": 2.5}, "model.expansion.multiple_of=2.5 must be a whole number"),
    ("trainer.max_steps", 0, "trainer.max_steps=0 must be greater than 0"),
    ("trainer.global_batch_size", -8, "trainer.global_batch_size=-8 must be greater than 0"),
    ("trainer.micro_batch_size", 0, "trainer.micro_batch_size=0 must be greater than 0"),
    ("trainer.clip_norm", 0.0, "trainer.clip_norm=0.0 must be greater than 0"),
    ("seed", -1, "seed=-1 must be a whole number from 0"),
    ("seed", 2**63, "must be a whole number from 0 to 2**63 - 1"),
    # names and blocks
    ("name", "a/b", "name='a/b' must be usable as the name of a folder"),
    ("name", "..", "name='..' must be usable as the name of a folder"),
    ("name", "", "name='' must be usable as the name of a folder"),
    ("model.topology", 3, "model.topology=3 must be text or a section of options"),
    ("model.topology", {"nme": "x"}, "model.topology.name=None must be a name"),
    ("model.transforms", 3, "model.transforms=3 must be names with their options, as in {my_part: {rate: 0.1}}"),
    ("model.head", "linear", "model.head='linear' must be a section of options, as in model.head.name=linear"),
    ("model.transforms", {"lora": 3}, "model.transforms.lora=3 must be a section of options"),
    ("model.block", [], "model.block must be a list of sublayers, as in model.block=[attention,mlp]"),
    ("model.block", [3], "model.block: 3 is neither a sublayer's name nor {name: ..., option: ...}"),
    ("model.block", [{"window": 3}], "model.block: {'window': 3} is neither a sublayer's name"),
    ("model.block", [None], "model.block: None is neither a sublayer's name"),
    ("model.layers", {2: ["mlp"]}, "model.layers.2: there are layers 0 to 1"),
    ("model.layers", {-1: ["mlp"]}, "model.layers.-1: there are layers 0 to 1"),
    ("model.layers", {0: []}, "model.layers.0 must be a list of sublayers"),
    ("model.attention", {"name": "mlp"}, "model.attention.name: sublayers are chosen in model.block"),
    *(
        (f"model.{key}", section, f"model.{key}.name={name} must be a name")
        for key in ("init", "norm_placement", "norm", "activation", "position")
        for section, name in (({}, "None"), ({"name": 3}, "3"), ({"name": None}, "None"))
    ),
    *(
        (key, {"nmae": "x"}, f"{key}.name=None must be a name")
        for key in ("data", "tokenizer", "optimizer", "schedule")
    ),
]


@pytest.mark.parametrize("path,value,message", REFUSED, ids=[f"{p}={str(v)[:30]}" for p, v, _ in REFUSED])
def test_refused(path, value, message):
    with pytest.raises(UserError) as refusal:
        Config.from_dict(nested(path, value))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "hint,value,want",
    [
        (int, 3.0, 3),
        (int, "3", 3),
        (float, 3, 3.0),
        (float | None, None, None),
        (int | None, 4.0, 4),
        (bool | str, "auto", "auto"),
        (bool | str, True, True),
        (list[float], (1, 2), [1.0, 2.0]),
        (dict[int, list[int]], {"1": [2.0]}, {1: [2]}),
    ],
)
def test_conversions_that_lose_nothing(hint, value, want):
    got = convert(hint, value, "key")
    assert got == want and type(got) is type(want)


def test_hints_that_are_not_of_yaml_are_let_through():
    assert convert(complex, "anything", "key") == "anything"
    assert convert(list[complex], 3, "key") == 3


@pytest.mark.parametrize(
    "d_model,factor,multiple_of,hidden",
    [
        (768, 4, 1, 3072),
        (768, 8 / 3, 1, 2048),
        (768, 2.6667, 1, 2048),
        (768, 8 / 3, 64, 2048),
        (768, 8 / 3, 256, 2048),
        (4096, 8 / 3, 256, 11008),  # LLaMA 7B
        (5120, 8 / 3, 256, 13824),  # LLaMA 13B
        (4096, 2.6875, 1, 11008),
        (100, 8 / 3, 1, 267),  # 266.67
        (64, 1, 1, 64),
        (64, 0.5, 1, 32),
        (64, 1e-9, 1, 1),  # never 0
        (64, 1e-9, 8, 8),
        (10_000, 1.234, 1, 12_340),  # exactly what was typed, not a fraction near it
        (1000, 0.001, 1, 1),
        (1000, 1.1, 1, 1100),  # 1100.0000000000002 in floating point
        (64, 4, 100, 300),
    ],
)
def test_hidden_width(d_model, factor, multiple_of, hidden):
    expansion = {"factor": factor, "multiple_of": multiple_of}
    assert model(d_model=d_model, n_heads=1, expansion=expansion).hidden == hidden


def test_multiple_of_may_be_left_out():
    assert model(expansion={"factor": 4}).hidden == 256


def test_defaults_are_the_mini_model():
    cfg = Config.from_dict({})
    assert cfg == Config()
    assert (cfg.model.d_model, cfg.model.n_layers, cfg.model.n_heads, cfg.model.head_dim) == (64, 2, 4, 16)
    assert (cfg.model.vocab_size, cfg.model.context_length, cfg.model.hidden) == (64, 32, 256)


FULL = {
    "name": "trial",
    "seed": 3,
    "plugins": ["my_layer.py"],
    "model": {
        "d_model": 128,
        "n_layers": 4,
        "block": ["attention", {"name": "my_layer", "width": 3}, "mlp"],
        "layers": {2: ["attention"], "3": [{"name": "attention", "window": 4}]},
        "my_layer": {"width": 5, "depth": 2},
        "attention": {"window": 8, "n_kv_heads": None},
        "residual_scale": 0,
        "expansion": {"factor": 8 / 3, "multiple_of": 64},
    },
    "trainer": {"max_steps": 7, "clip_norm": None, "compile": False},
    "optimizer": {"name": "lion", "betas": [0.9, 0.99]},
    "callbacks": {"samples": {"every": 10}},
}


def test_round_trip():
    cfg = Config.from_dict(FULL)
    values = cfg.to_dict()
    assert Config.from_dict(values) == cfg
    assert Config.from_dict(json.loads(json.dumps(values))) == cfg  # as a checkpoint or a manifest holds it
    assert values["model"]["my_layer"] == {"width": 5, "depth": 2}
    assert values["model"]["attention"] == {"window": 8, "n_kv_heads": None}
    assert "sublayers" not in values["model"]
    assert cfg.model.residual_scale == 0.0 and cfg.trainer.clip_norm is None and cfg.trainer.compile is False


def test_what_is_read_is_a_copy():
    values = json.loads(json.dumps(FULL))
    cfg = Config.from_dict(values)
    before = cfg.to_dict()
    values["model"]["attention"]["window"] = 1
    values["model"]["norm"] = {"name": "rmsnorm"}
    values["optimizer"]["name"] = "adamw"
    values["plugins"].append("x.py")
    cfg.to_dict()["model"]["attention"]["window"] = 2
    assert cfg.to_dict() == before


def test_a_sublayers_options_are_merged_and_the_nearest_wins():
    cfg = Config.from_dict(FULL).model
    assert cfg.block_of(0) == [
        {"name": "attention", "window": 8, "n_kv_heads": None},
        {"name": "my_layer", "width": 3, "depth": 2},
        {"name": "mlp"},
    ]
    assert cfg.block_of(2) == [{"name": "attention", "window": 8, "n_kv_heads": None}]
    assert cfg.block_of(3) == [{"name": "attention", "window": 4, "n_kv_heads": None}]


def test_the_nearest_number_of_heads_is_proposed():
    with pytest.raises(UserError, match="model.d_model=100 is not divisible by model.n_heads=12: try model.n_heads=10"):
        model(d_model=100, n_heads=12)
    with pytest.raises(UserError, match="try model.n_heads=1$"):
        model(d_model=7, n_heads=3)


@pytest.mark.parametrize(
    ("pattern", "n_layers", "layers"),
    [
        ("3*[attention]+1*[mlp]", 8, "aaamaaam"),
        ("[attention] + [mlp]", 4, "amam"),
        ("2*[mlp]", 4, "mmmm"),
        ("1*[mlp]+2*[attention]+1*[mlp]", 4, "maam"),
    ],
)
def test_a_pattern_of_blocks_is_repeated_over_the_layers(pattern, n_layers, layers):
    model = Config.from_dict({"model": {"block": pattern, "n_layers": n_layers}}).model
    assert "".join(model.block_of(layer)[0]["name"][0] for layer in range(n_layers)) == layers
    again = Config.from_dict(Config(model=model).to_dict()).model
    assert [again.block_of(i) for i in range(n_layers)] == [model.block_of(i) for i in range(n_layers)]


def test_a_layer_of_its_own_wins_over_the_pattern():
    model = Config.from_dict(
        {"model": {"block": "1*[attention]+1*[mlp]", "n_layers": 4, "layers": {1: ["attention", "mlp"]}}}
    ).model
    assert [len(model.block_of(layer)) for layer in range(4)] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("3*[attention]+1*[mlp]", "a pattern of 4 layers, and model.n_layers=6 is no multiple"),
        ("attention", "or a pattern of lists"),
        ("3*attention", "or a pattern of lists"),
        ("3*[attention", "or a pattern of lists"),
        ("0*[attention]", "a pattern of 0 layers"),
        ("99999999*[mlp]", "more layers"),
        ("3*[]", "or a pattern of lists"),
    ],
)
def test_what_is_no_pattern(pattern, words):
    with pytest.raises(UserError, match="model.block=") as refusal:
        Config.from_dict({"model": {"block": pattern, "n_layers": 6}})
    assert words in str(refusal.value)
