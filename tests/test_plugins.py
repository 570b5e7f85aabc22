"""Plugins by file, by module and by entry point, and the words that people get when one fails."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from gptframe import plugins, registry
from gptframe.config import Config
from gptframe.errors import UserError
from gptframe.model import Context, build_model
from gptframe.model.attention import Attention

PLUGIN = '''
import torch
from torch import nn
from gptframe import register


@register("activation", "cube")
class Cube(nn.Module):
    def forward(self, x):
        return x**3


@register("norm", "halve")
class Halve(nn.Module):
    def __init__(self, dim: int, by: float = 2.0):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x / self.by


@register("position", "step")
class Step(nn.Module):
    seat = "embedding"

    def __init__(self, cfg, size: float = 0.1):
        super().__init__()
        self.size = size

    def forward(self, x, ctx):
        return x + self.size * ctx.positions[:, None]


@register("sublayer", "conv")
class Conv(nn.Module):
    """Mixes each token with the one before it."""

    def __init__(self, cfg, layer: int, width: int = 2):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, cfg.d_model))

    def forward(self, x, ctx):
        back = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        return self.weight[0] * x + self.weight[1] * back
'''


def model_of_plugins():
    section = {
        "d_model": 16,
        "n_heads": 2,
        "block": ["attention", "conv", "mlp"],
        "conv": {"width": 3},
        "activation": {"name": "cube"},
        "norm": {"name": "halve", "by": 4},
        "position": {"name": "step"},
    }
    return build_model(Config.from_dict({"model": section}).model)


def assert_model_uses_the_plugin():
    model = model_of_plugins()
    assert model.blocks[1].conv.core.weight.shape == (3, 16)
    assert model.final_norm.by == 4.0
    assert type(model.blocks[0].mlp.core.activation).__name__ == "Cube"
    assert type(model.position).__name__ == "Step"
    ids = torch.randint(0, 64, (2, 9))
    model(ids, targets=ids).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def write(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return folder / name


def test_by_file(fresh_registry, tmp_path):
    file = write(tmp_path, "my_parts.py", PLUGIN)
    assert plugins.load([str(file)]) == [str(file)]
    assert_model_uses_the_plugin()
    line = PLUGIN.splitlines().index('@register("sublayer", "conv")') + 1
    assert registry.origin("sublayer", "conv") == f"{file}:{line}"
    assert registry.origins()["activation/cube"].startswith(str(file))


def test_a_relative_path_is_read_against_the_base(fresh_registry, tmp_path):
    file = write(tmp_path / "deep", "my_parts.py", PLUGIN)
    assert plugins.load(["deep/my_parts.py"], base=tmp_path) == [str(file)]
    assert plugins.load(["./deep/../deep/my_parts.py"], base=tmp_path) == [str(file)]  # the same one, once
    assert "cube" in registry.names("activation")


def test_by_module(fresh_registry, tmp_path):
    write(tmp_path / "my_package", "__init__.py", "")
    write(tmp_path / "my_package", "parts.py", PLUGIN)
    path = list(sys.path)
    assert plugins.load(["my_package.parts"], base=tmp_path) == ["my_package.parts"]
    assert sys.path == path
    assert_model_uses_the_plugin()
    assert plugins.load(["my_package.parts"]) == ["my_package.parts"]


def test_by_path_in_the_config(fresh_registry, tmp_path, monkeypatch):
    write(tmp_path, "my_direct.py", PLUGIN.replace("@register", "# @register"))
    monkeypatch.syspath_prepend(tmp_path)
    section = {
        "d_model": 16,
        "n_heads": 2,
        "block": ["attention", "my_direct:Conv"],
        "activation": {"name": "my_direct:Cube"},
    }
    section |= {"position": {"name": "my_direct:Step", "size": 1.0}, "norm": {"name": "my_direct:Halve"}}
    model = build_model(Config.from_dict({"model": section}).model)
    assert type(model.blocks[0].my_direct_Conv.core).__name__ == "Conv"
    assert type(model.position).__name__ == "Step"


def installed(folder, name, value):
    """What an installer leaves behind: a module, and metadata that name it."""
    write(folder / f"{name}-1.0.dist-info", "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    write(folder / f"{name}-1.0.dist-info", "entry_points.txt", f"[gptframe.plugins]\n{name} = {value}\n")


def test_by_entry_point(fresh_registry, tmp_path, monkeypatch):
    installed(tmp_path, "parts_for_sale", "parts_for_sale.all")
    write(tmp_path / "parts_for_sale", "__init__.py", "")
    write(tmp_path / "parts_for_sale", "all.py", PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.load([]) == []
    assert_model_uses_the_plugin()
    plugins.load([])  # once is enough


@pytest.mark.parametrize(
    "text,message",
    [
        (
            "import not_installed_at_all",
            "the installed plugin 'lame' needs 'not_installed_at_all', which is not installed",
        ),
        ("def f(:", "the installed plugin 'lame': syntax error at "),
    ],
)
def test_an_entry_point_that_fails_is_named(fresh_registry, tmp_path, monkeypatch, text, message):
    installed(tmp_path, "lame", "lame_module")
    write(tmp_path, "lame_module.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as refusal:
        plugins.load([])
    assert message in str(refusal.value)


def test_two_plugins_with_one_name(fresh_registry, tmp_path):
    first, second = write(tmp_path, "first.py", PLUGIN), write(tmp_path, "second.py", PLUGIN)
    with pytest.raises(UserError) as refusal:
        plugins.load([str(first), str(second)])
    line = PLUGIN.splitlines().index('@register("activation", "cube")') + 1
    assert f"activation 'cube' is registered twice: {first}:{line} and {second}:{line}" in str(refusal.value)


def test_two_files_of_one_name_live_side_by_side(fresh_registry, tmp_path):
    one = write(tmp_path / "one", "act.py", "from gptframe import register\nregister('activation', 'one')(dict)")
    two = write(tmp_path / "two", "act.py", "from gptframe import register\nregister('activation', 'two')(list)")
    plugins.load([str(one), str(two)])
    assert registry.lookup("activation", "one") is dict and registry.lookup("activation", "two") is list


def test_a_built_in_name_is_taken(fresh_registry, tmp_path):
    file = write(tmp_path, "mine.py", "from gptframe import register\nregister('activation', 'relu')(dict)")
    with pytest.raises(
        UserError, match=rf"activation 'relu' is registered twice: .*model/activation.py:\d+ and {file}:2"
    ):
        plugins.load([str(file)])


@pytest.mark.parametrize(
    "plugin,message",
    [
        ("nowhere.py", "plugins: nowhere.py does not exist (looked for {base}/nowhere.py). Give a .py file or"),
        ("sub/", "plugins: sub/ is a folder (looked for {base}/sub)"),
        ("no_such_module", "plugins: no_such_module: there is no module 'no_such_module'; give a .py file"),
        ("torch.no_such_part", "there is no module 'torch.no_such_part'"),
        ("my-layer", "plugins: 'my-layer' is neither a .py file nor the name of a module"),
        ("", "plugins: '' is neither a .py file nor the name of a module"),
    ],
)
def test_plugins_that_are_not_there(fresh_registry, tmp_path, plugin, message):
    (tmp_path / "sub").mkdir()
    with pytest.raises(UserError) as refusal:
        plugins.load([plugin], base=tmp_path)
    assert message.format(base=tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


FAULTS = {
    "syntax error": ("x = 1\ndef f(:\n", UserError, "syntax error at {file}:2: "),
    "missing dependency": (
        "import nowhere_to_be_found\n",
        UserError,
        "needs 'nowhere_to_be_found', which is not installed",
    ),
    "bug": ("x = 1\nx.nothing\n", AttributeError, "has no attribute 'nothing'"),
    "nameless": ("raise ModuleNotFoundError('by hand')\n", ModuleNotFoundError, "by hand"),
    "exit": ("raise SystemExit(3)\n", UserError, "called sys.exit(3) while it was imported"),
}


@pytest.mark.parametrize("route", ["file", "module"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_plugin_that_fails_leaves_nothing_behind(fresh_registry, tmp_path, fault, route):
    """So that the next job of a multirun can go on, and the mended plugin can be loaded."""
    text, kind, message = FAULTS[fault]
    good = "from gptframe import register\nregister('activation', 'late')(dict)\n"
    good += "register('activation', 'relu', replace=True)(dict)\n"
    file = write(tmp_path, "faulty.py", text if fault == "syntax error" else good + text)
    plugin = str(file) if route == "file" else "faulty"
    before = registry.lookup("activation", "relu")
    for _ in range(2):
        with pytest.raises(kind) as error:
            plugins.load([plugin], base=tmp_path)
        assert message.format(file=file) in str(error.value)
        assert "late" not in registry.names("activation")
        assert registry.lookup("activation", "relu") is before
        assert not [name for name in sys.modules if "faulty" in name]


def test_a_bug_keeps_its_own_file_and_line(fresh_registry, tmp_path):
    file = write(tmp_path, "buggy.py", "def helper():\n    return 1 / 0\n\nhelper()\n")
    with pytest.raises(ZeroDivisionError) as error:
        plugins.load([str(file)])
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno) == (str(file), 1)  # counted from 0


def test_a_bug_in_a_forward_keeps_its_own_file_and_line(fresh_registry, tmp_path):
    file = write(tmp_path, "buggy_forward.py", PLUGIN.replace("return x**3", "return x + undefined"))
    plugins.load([str(file)])
    with pytest.raises(NameError) as error:
        model_of_plugins()(torch.zeros(1, 2, dtype=torch.long))
    assert str(error.traceback[-1].path) == str(file)


def test_the_module_name_is_the_same_in_every_process(tmp_path):
    """Pickles and spawned workers find the class again."""
    file = write(tmp_path, "stable-name.py", "x = 1")
    program = f"import sys; from gptframe import plugins; plugins.load([{str(file)!r}]); "
    program += "print([name for name in sys.modules if name.startswith('gptframe_plugin')])"
    names = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert names == {"['gptframe_plugin_stable_name']\n"}


def test_option_files_of_an_installed_package_are_read_without_importing_it(fresh_registry, tmp_path, monkeypatch):
    folder = tmp_path / "brings_options"
    write(folder, "__init__.py", "raise RuntimeError('imported')")
    write(folder / "conf" / "activation", "cube.yaml", "# @package model.activation\nname: cube\n")
    write(
        tmp_path / "brings_options-1.0.dist-info",
        "METADATA",
        "Metadata-Version: 2.1\nName: brings_options\nVersion: 1.0\n",
    )
    write(
        tmp_path / "brings_options-1.0.dist-info",
        "entry_points.txt",
        "[gptframe.conf]\nbrings_options = brings_options.conf\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert ("activation", "cube", "# @package model.activation\nname: cube\n") in list(plugins.config_options())


def test_a_plugin_finds_the_helper_beside_it_and_a_path_finds_the_current_folder(fresh_registry, tmp_path, monkeypatch):
    (tmp_path / "plugin_helper_beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "with_helper.py").write_text(
        "from plugin_helper_beside import NAME\nfrom torch import nn\nfrom gptframe import register\n"
        "@register('activation', NAME)\nclass A(nn.ReLU):\n    pass\n"
    )
    plugins.load([str(tmp_path / "with_helper.py")])
    assert "beside" in fresh_registry.names("activation")
    monkeypatch.chdir(tmp_path)
    assert fresh_registry.lookup("tokenizer", "plugin_helper_beside:NAME") == "beside"


@pytest.mark.parametrize(
    "kind,name,broken,message",
    [
        ("activation", "cube", "return None", "returned NoneType for an input of [1, 2, 64]: they must be equal"),
        ("activation", "cube", "return x[..., 1:]", "returned [1, 2, 63] for an input of [1, 2, 64]"),
        ("norm", "halve", "return None", "returned NoneType for an input of [1, 2, 16]: they must be equal"),
        ("norm", "halve", "return x.mean(-1)", "returned [1, 2] for an input of [1, 2, 16]"),
    ],
)
def test_a_part_that_returns_something_else_is_named(fresh_registry, tmp_path, kind, name, broken, message):
    right = {"cube": "return x**3", "halve": "return x / self.by"}[name]
    file = write(tmp_path, "breaks_its_contract.py", PLUGIN.replace(right, broken))
    plugins.load([str(file)])
    with pytest.raises(UserError) as refusal:
        model_of_plugins()(torch.zeros(1, 2, dtype=torch.long))
    line = PLUGIN.splitlines().index(f'@register("{kind}", "{name}")') + 1
    assert str(refusal.value).startswith(f"{kind} {name!r} ({file}:{line}) {message}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "kind,value,arguments,got",
    [
        ("schedule", lambda step, total: None, (0, 10), "None"),
        ("schedule", lambda step, total: float("nan"), (0, 10), "nan"),
        ("init", lambda role, shape, cfg: "0.02", ("matrix", (2, 2), None), "'0.02'"),
        ("attention_backend", lambda cfg: None, (None,), "None"),
        ("optimizer", lambda groups: None, ([],), "None"),
        ("corpus", lambda: object(), (), "object"),
    ],
)
def test_a_function_that_gives_something_else_is_named(kind, value, arguments, got):
    registry.register(kind, "odd")(value)
    with pytest.raises(UserError) as refusal:
        registry.build(kind, {"name": "odd"}, *arguments)
    assert f"{kind} 'odd' ({__file__}:" in str(refusal.value)
    assert f"gave {got}, which breaks its contract: {registry.KINDS[kind][0]}" in str(refusal.value)


def test_an_attention_backend_that_breaks_its_contract_is_named():
    cfg = Config.from_dict({"model": {"vocab_size": 8, "d_model": 32, "n_heads": 2}}).model
    registry.register("attention_backend", "bare")(lambda: None)
    with pytest.raises(UserError, match=r"attention_backend 'bare' \(.*breaks its contract"):
        Attention(cfg, 0, backend="bare")
    for value, got in ((lambda q: q.transpose(1, 2), r"\[1, 5, 2, 16\]"), (lambda q: (q, None), "tuple")):
        registry.register("attention_backend", "odd")(lambda cfg, value=value: lambda q, k, v, *_: value(q))
        with pytest.raises(UserError, match=rf"'odd' \(.*\) returned {got} for queries of \[1, 2, 5, 16\]"):
            Attention(cfg, 0, backend="odd")(torch.zeros(1, 5, 32), Context(positions=torch.arange(5)))
        del registry._table["attention_backend"]["odd"]
