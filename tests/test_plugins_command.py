"""`gptframe plugins`: what is listed agrees with the registry, what is written works and is never overwritten."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gptframe import plugins, registry
from gptframe.cli import main
from gptframe.plugins_catalogue import POSITIONAL, catalogue
from gptframe.plugins_templates import TEMPLATES

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "plugins" / "examples" / "short_conv.py"


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["plugins", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_catalogue_agrees_with_the_registry():
    """Names, lines and options read from source are those that importing gives."""
    listed = {(entry.kind, entry.name): entry for entry in catalogue() if entry.built_in}
    known = {
        (kind, name): registry.entry(kind, name)
        for kind in registry.KINDS
        for name in registry.names(kind)
        if registry.entry(kind, name).module.startswith("gptframe.")
    }
    assert listed.keys() == known.keys() and len(known) > 40
    for key, entry in known.items():
        assert listed[key].origin == entry.origin
        if key[0] != "norm_placement":
            options = registry.signature_options(entry.value, POSITIONAL.get(key[0], 0))
            assert [o.name for o in listed[key].options] == list(options), key
            required = [name for name, p in options.items() if p.default is p.empty]
            assert [o.name for o in listed[key].options if o.default is None] == required
            assert listed[key].summary == entry.value.__doc__.strip().splitlines()[0]


def test_list_imports_neither_torch_nor_a_plugin(tmp_path):
    file = tmp_path / "never_imported.py"
    file.write_text(
        "from gptframe import register\n\n\n@register('schedule', 'flat')\n"
        "def flat(step, total_steps, level: float = 1.0):\n    'Stays.'\n\n\nraise RuntimeError('imported')\n"
    )
    program = "import sys; from gptframe.cli import main; code = main(sys.argv[1:]); "
    program += "print(code, 'torch' in sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", program, "plugins", "list", "--json", f"plugins=[{file}]"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "0 False\n"
    (entry,) = [e for e in json.loads(done.stdout) if e["name"] == "flat"]
    assert entry == {
        "kind": "schedule",
        "name": "flat",
        "origin": f"{file}:4",
        "built_in": False,
        "summary": "Stays.",
        "options": [{"name": "level", "type": "float", "default": "1.0"}],
    }


def test_list_of_one_kind(capsys):
    code, out, _ = run(capsys, "list", "norm")
    assert code == 0 and "rmsnorm" in out and "eps=1e-05" in out and "swiglu" not in out
    assert "\x1b" not in out  # no colours into a pipe


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_follow_the_environment(monkeypatch, capsys, no_color):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = run(capsys, "check", "rmsnorm", "--only", "contract")
    assert ("\x1b[32mok" in out) is not no_color and "ok" in out


def test_show(capsys):
    code, out, _ = run(capsys, "show", "short_conv", f"plugins=[{EXAMPLE}]")
    assert code == 0
    for text in ("sublayer short_conv", "short_conv.py:14", "ShortConv(cfg, layer: int, kernel: int=4)", "D*kernel"):
        assert text in out
    assert "delta[B,T,D]" in out and "kernel: int, default 4" in out and "how many tokens each one sees" in out
    assert run(capsys, "show", "position/none")[1].count("contract") == 1
    assert run(capsys, "show", "none")[1].count("contract") == 3  # a position, a norm placement and a tokenizer


@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_new_writes_passes_every_check_and_is_not_overwritten(kind, tmp_path, capsys):
    code, out, _ = run(capsys, "new", kind, f"fresh_{kind}", "--dir", str(tmp_path))
    assert code == 0
    written = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    group, name = TEMPLATES[kind].group, f"fresh_{kind}"
    assert written == [f"conf/{group}/{name}.yaml", f"{name}.py", f"test_{name}.py"]
    code, out, _ = run(capsys, "check", str(tmp_path / f"{name}.py"))
    assert code == 0 and "FAIL" not in out and re.search(r"\d+ checks? passed", out), out
    before = (tmp_path / f"{name}.py").read_text()
    (tmp_path / f"{name}.py").write_text(before + "# mine\n")
    code, _, err = run(capsys, "new", kind, name, "--dir", str(tmp_path))
    assert code == 2 and "is never overwritten" in err
    assert (tmp_path / f"{name}.py").read_text() == before + "# mine\n"


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_option_that_new_writes_composes_and_trains_the_part(kind, tmp_path, capsys, monkeypatch):
    from gptframe.cli import _configure
    from gptframe.training.run import train

    monkeypatch.chdir(tmp_path)
    name = f"opt_{kind}"
    out = run(capsys, "new", kind, name)[1]
    (command,) = re.findall(r"gptframe train --config-dir (\S+) (.*)", out)
    short = ["trainer.max_steps=2", "trainer.val_batches=1", "callbacks=none", "data.baseline_order=0", "run_dir=run"]
    short = [s for s in short if "baseline" not in s or kind != "corpus"]
    given = [*shlex.split(command[1]), *short]
    assert train(_configure(given, [command[0]]), given).exit_code == 0
    assert f"{kind}/{name}" in json.loads(Path("run/manifest.json").read_text())["plugins"]


def test_the_test_that_new_writes_passes(tmp_path, capsys):
    assert run(capsys, "new", "activation", "tested", "--dir", str(tmp_path))[0] == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_a_package(tmp_path, capsys, monkeypatch):
    """As an installer leaves it: found by its entry points, with its option file."""
    code, _, _ = run(capsys, "new", "norm", "packed", "--dir", str(tmp_path), "--package")
    root = tmp_path / "gptframe-packed"
    assert code == 0 and (root / "tests" / "test_packed.py").is_file()
    text = (root / "pyproject.toml").read_text()
    points = dict(re.findall(r'\[project.entry-points."(gptframe.\w+)"\]\npacked = "([\w.]+)"', text))
    assert points == {"gptframe.plugins": "gptframe_packed.plugin", "gptframe.conf": "gptframe_packed.conf"}
    info = root / "src" / "gptframe_packed-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gptframe-packed\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\npacked = {value}\n" for group, value in points.items()))
    monkeypatch.syspath_prepend(root / "src")
    assert ("norm", "packed") in {(entry.kind, entry.name) for entry in catalogue()}
    assert ("norm", "packed") in {(group, option) for group, option, _ in plugins.config_options()}
    assert run(capsys, "check", "packed", "--only", "contract,batch")[0] == 0


BROKEN = """
from torch import nn
from gptframe import register


@register("norm", "batchy")
class Batchy(nn.Module):
    def __init__(self, dim: int, shift: float = 0.0):
        super().__init__()
        self.shift = shift

    def forward(self, x):
        if self.shift > 0:
            raise RuntimeError("no shift")
        return x - x.mean(dim=0)
"""


@pytest.fixture
def broken(tmp_path):
    file = tmp_path / "batchy.py"
    file.write_text(BROKEN)
    return str(file)


def test_check_says_what_is_wrong_and_exits_with_1(broken, capsys):
    code, out, err = run(capsys, "check", broken, "--only", "contract,batch")
    assert code == 1 and "FAIL  batch" in out and "1 failed" in out and err == ""
    assert f"norm 'batchy' ({broken}:6)" in out and "x[2, 1, 32]" in out
    code, out, _ = run(capsys, "check", broken, "--only", "contract,batch", "--json")
    (report,) = json.loads(out)
    assert code == 1 and report["passed"].keys() == {"contract"} and report["failures"][0]["check"] == "batch"


def test_a_part_that_exits_or_prints_and_a_check_of_one_of_two_kinds(broken, capsys):
    extra = '\n\n@register("init", "steady")\ndef steady(role, shape, cfg):\n    return 1.0\n'
    Path(broken).write_text(BROKEN.replace('raise RuntimeError("no shift")', "raise SystemExit(0)") + extra)
    code, out, _ = run(capsys, "check", broken, "model.norm.shift=1.5", "--only", "contract")
    assert code == 1 and "raised SystemExit: 0" in out and "init steady" in out
    Path(broken).write_text(BROKEN.replace("return x", "print('noise'); return x") + extra + "print('noise')\n")
    assert len(json.loads(run(capsys, "check", broken, "--only", "contract", "--json")[1])) == 2
    code, out, err = run(capsys, "check", broken, "--only", "tokens")
    assert code == 0 and "norm batchy" in out and "init steady" not in out, err


def test_options_reach_the_part_and_a_bug_of_its_own_shows_its_line(broken, capsys):
    code, out, err = run(capsys, "check", broken, "+model.norm.shift=1.5")
    assert code == 1 and "forward raised RuntimeError: no shift" in out and "0 checks passed" in out
    assert f'File "{broken}", line 14, in forward' in err


def test_sizes_reach_the_model(capsys):
    code, out, _ = run(capsys, "check", "mlp", "model.d_model=48", "model.context_length=8", "--only", "contract")
    assert code == 0 and "x[1, 8, 48]" in out


@pytest.mark.parametrize(
    "argv,message",
    [
        (["lst"], "plugins has no action 'lst'. Did you mean 'list'"),
        (["list", "norms"], "unknown kind 'norms'. Did you mean 'norm'"),
        (["list", "norm", "model=gpt2"], "model=gpt2: `plugins list` takes no override but plugins=[file.py]"),
        (["list", "plugins=[nowhere.py]"], "plugins: nowhere.py does not exist"),
        (["list", "plugins=[nowhere]"], "plugins: nowhere is neither a .py file nor the name of a module"),
        (["show", "swigloo"], "nothing is registered as 'swigloo'. Did you mean 'swiglu'"),
        (["show", "norms/rmsnorm"], "unknown kind 'norms'"),
        (["new", "sublayr", "x"], "no template for a 'sublayr'. Did you mean 'sublayer'"),
        (["new", "sublayer", "a-b"], "'a-b' cannot be a plugin's name"),
        (["new", "sublayer", "code"], "'code' is the name of a Python module, which code.py would hide"),
        (["new", "sublayer", "class"], "'class' cannot be a plugin's name"),
        (["new", "sublayer", "../up"], "cannot be a plugin's name"),
        (["new", "sublayer", "attention"], "sublayer 'attention' is registered already"),
        (["new", "sublayer", "norm"], "'norm' is a key of the model's config"),
        (["new", "sublayer", "fine", "--dir", "/dev/null/x"], "nothing was written"),
        (["check", "nothing_of_that_name"], "nothing is registered as 'nothing_of_that_name'"),
        (["check", "nowhere.py"], "plugins: nowhere.py does not exist"),
        (["check", "mlp", "model.mlp.bias=maybe"], "model.mlp.bias='maybe' must be true or false"),
        (["check", "rmsnorm", "model.norm.epz=1"], "norm RMSNorm has no such option. Did you mean 'eps'"),
        (["check", "rmsnorm", "trainer.max_steps=3"], "trainer.max_steps=3 has no effect"),
        (["check", "rmsnorm", "--only", "futre"], "'futre' is no check of a norm. Did you mean 'future'"),
        (["check", "rmsnorm", "model.norm.name=layernorm"], "has no effect here"),
        (["check", "text"], "data.path is missing"),
        (["check", "rmsnorm", "gpt2"], "gpt2: overrides are of the form key=value"),
        (["check"], "NAME_OR_FILE"),
    ],
)
def test_mistakes_take_a_line_and_exit_with_2(argv, message, capsys):
    code, out, err = run(capsys, *argv)
    assert code == 2 and message in err, err
    assert out == "" and len(err.splitlines()) <= 2 and "Traceback" not in err


def test_a_syntax_error_in_a_plugin_is_named(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("x = (\n")
    code, _, err = run(capsys, "check", str(tmp_path / "bad.py"))
    assert code == 2 and "bad.py: syntax error at line 1" in err


def test_the_tutorial_of_the_docs(tmp_path, capsys, monkeypatch):
    """Its commands run, its mistake is caught as shown, and its remedy passes."""
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    wrong, right = re.findall(r"^(before = torch\.\S.*?)(?: +#.*)?$", text, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "new", "sublayer", "my_layer")[0] == 0
    file = tmp_path / "my_layer.py"
    template = file.read_text()
    assert right in template
    file.write_text(template.replace(right, wrong))
    code, out, _ = run(capsys, "check", "my_layer.py", "--only", "contract,future,prefix")
    shown = re.search(r"  FAIL  future .*?\n(?=```)", text, re.DOTALL)
    assert code == 1 and shown and shown[0] in out


def test_help_fits_a_screen(capsys):
    for argv in ([], ["--help"]):
        code, out, _ = run(capsys, *argv)
        assert code == 0 and len(out.splitlines()) < 24 and "NAME_OR_FILE" not in out
    for action in ("list", "show", "new", "check"):
        with pytest.raises(SystemExit) as stop:
            main(["plugins", action, "--help"])
        assert stop.value.code == 0 and len(capsys.readouterr().out.splitlines()) < 24
