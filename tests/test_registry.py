"""The table from names to classes: look-ups, refusals, duplicates, options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gptframe import register, registry
from gptframe.errors import UserError, nearest


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(i for i, line in enumerate(file, 1) if line.strip() == text)


def test_register_and_build(fresh_registry):
    @register("activation", "scaled")
    class Scaled:
        def __init__(self, by: float = 1.0):
            self.by = by

    assert registry.lookup("activation", "scaled") is Scaled
    assert "scaled" in registry.names("activation")
    assert registry.build("activation", {"name": "scaled", "by": 3}).by == 3.0
    line = line_of('@register("activation", "scaled")')
    assert registry.origin("activation", "scaled") == f"{__file__}:{line}"
    assert registry.origins()["activation/scaled"] == registry.origin("activation", "scaled")


def test_functions_and_values_of_other_modules_have_the_plugins_origin(fresh_registry):
    """What a plugin registers is the plugin's, also when it is a class of torch or an object of ours."""
    import torch

    from gptframe.model.norm import NormPlacement

    register("activation", "mish")(torch.nn.Mish)
    register("norm_placement", "mine")(NormPlacement(pre=True))
    assert registry.origin("activation", "mish").startswith(__file__)
    assert {"activation/mish", "norm_placement/mine"} <= set(registry.origins())
    registry.forget(__name__)
    assert "mish" not in registry.names("activation") and "mine" not in registry.names("norm_placement")


def test_built_ins_have_an_origin_and_are_no_plugins():
    assert "/model/activation.py:" in registry.origin("activation", "swiglu")
    assert not [name for name in registry.origins() if name.endswith("/swiglu")]


def test_an_unknown_name_lists_the_nearest_and_all():
    with pytest.raises(UserError) as refusal:
        registry.lookup("activation", "swigloo", "model.activation.name")
    text = str(refusal.value)
    assert text.startswith("model.activation.name: unknown activation 'swigloo'. Did you mean 'swiglu'")
    assert all(name in text for name in registry.names("activation"))
    assert "plugins=[file.py]" in text


@pytest.mark.parametrize("name", [None, 3, ["gelu_tanh"], {"a": 1}, "", "gelu tanh", "é" * 50])
def test_hostile_names_are_unknown(name):
    with pytest.raises(UserError, match="unknown activation"):
        registry.lookup("activation", name)


def test_an_unknown_kind():
    for attempt in (lambda: register("activations", "x"), lambda: registry.names("activations")):
        with pytest.raises(UserError, match="unknown registry kind 'activations'. Did you mean 'activation'"):
            attempt()


@pytest.mark.parametrize("name", ["", "_", "a-b", "a.b", "a:b", "a b", 3, None])
def test_names_that_cannot_be_registered(name):
    with pytest.raises(UserError, match="cannot be the name of a norm: use letters, digits and underscores"):
        register("norm", name)


def test_a_duplicate_names_both_origins(fresh_registry):
    register("norm", "twice")(dict)  # first
    with pytest.raises(UserError) as refusal:
        register("norm", "twice")(list)  # second
    text = str(refusal.value)
    lines = [line_of('register("norm", "twice")(dict)  # first'), line_of('register("norm", "twice")(list)  # second')]
    assert all(f"{__file__}:{line}" in text for line in lines)
    assert "replace=True" in text
    assert registry.lookup("norm", "twice") is dict


def test_a_built_in_is_protected_although_it_is_not_imported_yet():
    """In a fresh process nothing has imported the built-in activations when the plugin registers its own."""
    program = """
from gptframe import register, UserError
import sys
assert "torch" not in sys.modules
try:
    register("activation", "relu")(print)
except UserError as error:
    assert "model/activation.py" in str(error) and "<string>:6" in str(error), error
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr


def test_replace_is_explicit_and_undone_by_forget(fresh_registry):
    before = registry.lookup("activation", "relu")
    register("activation", "relu", replace=True)(dict)
    assert registry.lookup("activation", "relu") is dict
    registry.forget(__name__)
    assert registry.lookup("activation", "relu") is before


def test_a_path_is_imported_directly():
    assert registry.lookup("activation", "torch.nn:Mish").__name__ == "Mish"
    assert "activation.py:" in registry.origin("activation", "torch.nn:Mish")
    assert registry.build("norm", {"name": "torch.nn:LayerNorm", "eps": 1e-3}, 8).eps == 1e-3


@pytest.mark.parametrize(
    "path,message",
    [
        ("nowhere_at_all:X", "model.norm.name: norm 'nowhere_at_all:X': there is no module 'nowhere_at_all'"),
        ("torch.nowhere:X", "there is no module 'torch.nowhere'"),
        ("torch.nn:LayerNrom", "'torch.nn' has no 'LayerNrom'. Did you mean 'LayerNorm'"),
        ("torch.nn:", "must be of the form package.module:Attribute"),
        (":LayerNorm", "must be of the form package.module:Attribute"),
        (".nn:LayerNorm", "must be of the form package.module:Attribute"),
        ("torch.nn:a.b", "must be of the form package.module:Attribute"),
        ("a/b.py:X", "must be of the form package.module:Attribute"),
    ],
)
def test_paths_that_lead_nowhere(path, message):
    with pytest.raises(UserError) as refusal:
        registry.lookup("norm", path, "model.norm.name")
    assert message in str(refusal.value)


@pytest.mark.parametrize("bug", ["None.nothing", "int('x')", "import not_there_either"])
def test_a_bug_in_a_module_given_by_path_is_not_hidden(fresh_registry, tmp_path, monkeypatch, bug):
    (tmp_path / "buggy_by_path.py").write_text(f"class X: pass\n\n{bug}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((AttributeError, ValueError, ModuleNotFoundError)) as error:
        registry.lookup("norm", "buggy_by_path:X")
    assert error.traceback[-1].path.name == "buggy_by_path.py"
    assert error.traceback[-1].lineno == 2  # counted from 0


class Part:
    def __init__(self, dim, width: int, eps: float = 1e-5, name_of: str | None = None, flag: bool = False):
        self.values = dim, width, eps, name_of, flag


class Implicit:
    def __init__(self, dim, limit: int = None):  # noqa: RUF013 - as plugins are written
        self.limit = limit


class Unresolved:
    def __init__(self, dim, other: ThisDoesNotExist = 3):  # noqa: F821
        self.other = other


class Open:
    def __init__(self, dim, **rest):
        self.rest = rest


@pytest.fixture
def parts(fresh_registry):
    for name, value in {
        "part": Part,
        "implicit": Implicit,
        "unresolved": Unresolved,
        "open": Open,
        "number": 3,
    }.items():
        register("norm", name)(value)


@pytest.mark.parametrize(
    "section,message",
    [
        (
            {"name": "part", "widht": 3},
            "model.norm.widht: norm Part has no such option. Did you mean 'width'? Known: width, eps",
        ),
        ({"name": "part"}, "model.norm: norm Part needs width; add model.norm.width=..."),
        ({"name": "part", "width": 3, "dim": 4}, "model.norm.dim: norm Part has no such option"),
        ({"name": "part", "width": 3.5}, "model.norm.width=3.5 must be a whole number"),
        ({"name": "part", "width": True}, "model.norm.width=True must be a whole number"),
        ({"name": "part", "width": None}, "model.norm.width=None must be a whole number"),
        ({"name": "part", "width": 3, "eps": "1e-5"}, "model.norm.eps='1e-5' must be a number"),
        ({"name": "part", "width": 3, "eps": float("nan")}, "model.norm.eps=nan must be a number"),
        ({"name": "part", "width": 3, "flag": "no"}, "model.norm.flag='no' must be true or false"),
        ({"name": "part", "width": 3, "flag": 0}, "model.norm.flag=0 must be true or false"),
        ({"name": "part", "width": 3, "name_of": 5}, "model.norm.name_of=5 must be text or null"),
        ({"name": "implicit", "limit": "many"}, "model.norm.limit='many' must be a whole number"),
        ({"name": "number"}, "norm 'number'"),
        ({"width": 3}, "model.norm needs a name: model.norm.name=... Known: "),
        ({"name": ""}, "model.norm needs a name"),
        ([], "model.norm needs a name"),
        (None, "model.norm needs a name"),
    ],
)
def test_refused_sections(parts, section, message):
    with pytest.raises(UserError) as refusal:
        registry.build("norm", section, 8, key="model.norm")
    assert message in str(refusal.value)


def test_accepted_sections(parts):
    assert registry.build("norm", {"name": "part", "width": 3.0, "eps": 1}, 8).values == (8, 3, 1.0, None, False)
    assert registry.build("norm", {"name": "implicit", "limit": None}, 8).limit is None
    assert registry.build("norm", {"name": "unresolved", "other": "anything"}, 8).other == "anything"
    assert registry.build("norm", {"name": "open", "a": 1, "b": [2]}, 8).rest == {"a": 1, "b": [2]}


def test_a_class_that_takes_too_little_is_told_the_contract(parts):
    register("sublayer", "no_layer")(Part.__class__)
    register("norm", "no_dim")(lambda: None)
    with pytest.raises(
        UserError, match=r"norm 'no_dim' \(.*test_registry.py:\d+\) .*__init__\(dim: int, \*\*options\)"
    ):
        registry.build("norm", {"name": "no_dim"}, 8)


def test_a_module_without_a_constructor_has_no_options(fresh_registry):
    """nn.Module's own __init__ takes **kwargs, only to raise a TypeError."""
    import torch

    @register("activation", "bare")
    class Bare(torch.nn.Module):
        pass

    with pytest.raises(UserError, match="activation.slope: activation Bare has no such option. It has none"):
        registry.build("activation", {"name": "bare", "slope": 1.0})
    assert isinstance(registry.build("activation", {"name": "bare"}), Bare)

    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))  # dynamo replaces nn.Module.__init__

    @register("activation", "bare_too")
    class BareToo(torch.nn.Module):
        pass

    with pytest.raises(UserError, match="activation.slope: activation BareToo has no such option. It has none"):
        registry.build("activation", {"name": "bare_too", "slope": 1.0})


def test_a_type_error_inside_a_constructor_stays_one(fresh_registry):
    @register("norm", "broken")
    class Broken:
        def __init__(self, dim):
            dim + "text"

    with pytest.raises(TypeError) as error:
        registry.build("norm", {"name": "broken"}, 8)
    assert error.traceback[-1].path.name == "test_registry.py"


def test_a_failed_import_of_built_ins_is_tried_again(fresh_registry, monkeypatch):
    """Else the second look-up would find an empty table and list nothing."""
    tables = {**registry.KINDS, "corpus": ("", ("gptframe.not_there",))}
    monkeypatch.setattr(registry, "KINDS", tables)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            registry.names("corpus")


def test_every_kind_states_its_contract():
    assert list(registry.KINDS) == [
        *(
            "sublayer",
            "attention_backend",
            "linear_backend",
            "norm",
            "activation",
            "position",
            "norm_placement",
            "topology",
            "head",
            "transform",
        ),
        *("init", "optimizer", "schedule", "callback", "tokenizer", "corpus"),
    ]
    assert all(contract for contract, _ in registry.KINDS.values())
    # no transform and no callback ships; everything else does
    assert {kind for kind, (_, modules) in registry.KINDS.items() if not modules} == {"transform", "callback"}


def test_nearest():
    assert nearest("adamv", ["adamw", "lion"]) == "Did you mean 'adamw'? "
    assert nearest("zzz", ["adamw", "lion"]) == ""
    assert nearest(7, ["adamw"]) == ""
    assert nearest("pre", ["peri", "pre_", "prex"]).count("'") == 4  # two at most


def test_neither_the_registry_nor_the_config_import_torch():
    program = """
import sys, gptframe.registry, gptframe.config, gptframe.plugins
print("torch" in sys.modules, "hydra" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
