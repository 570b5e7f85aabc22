"""What the documentation says can be typed: every command of README.md and docs/ runs, and every page is in the site.

A page's commands run in order, each as in a new process, in a folder that holds what the page takes for granted.
Nothing that a reader types is left out; what keeps a run short is appended to it.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from registry_apart import registry_apart

from gptframe import cli, compose
from gptframe.config import Config
from gptframe.data import verbs
from gptframe.interop import andrea

ROOT = Path(__file__).parent.parent
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))

NOT_RUN = {  # part of a command: why it is not run
    "pip install": "it changes the environment; the folders, packages and extras that it names are looked up",
    "pytest": "it is this suite",
    "logger.mode=online": "it needs an account at W&B",
    "trainer=ddp trainer.devices=2": "it needs two GPUs; the command below it does the same on a CPU",
    "--tasks": "it needs lm-eval; test_docs_in_out.py runs it where that is installed",
}
RUN = "runs/2026-01-31/12-00-00_mini"  # what the pages call the run that a reader has trained
OWN_PLUGIN = {"README.md": "my_layer.py", "docs/es/index.md": "mi_capa.py"}  # the file that a page's Python block is
SHORT = ["trainer.val_batches=1", "trainer.global_batch_size=2", "trainer.accelerator=cpu", "data.baseline_order=0"]
TINY = ["model.d_model=48", "model.n_layers=2", "model.n_heads=2", "model.context_length=32", "model.vocab_size=300"]


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def steps(page: str) -> Iterator[tuple[str, str]]:
    """What a reader does with a page, in order: `(command, what it should print)`, or `("", code)` to put in a file.

    A block without a language holds commands and nothing else; a console block a command and what it prints.
    """
    for language, text in blocks(page):
        if language == "console":
            command, _, printed = text.partition("\n")
            yield command.removeprefix("$ "), printed
        elif language == "python":
            yield "", text
        elif not language:
            for line in text.splitlines():
                for command in re.sub(r"\s+# .*", "", line).split(" && "):
                    yield command, ""


COMMANDS = [(page, command) for page in ["README.md", *DOCS] for command, _ in steps(page) if command]


RAN: set[str] = set()


def reason(command: str) -> str | None:
    return next((why for part, why in NOT_RUN.items() if part in command), None)


def appended(words: list[str]) -> list[str]:
    """What makes a command short."""
    named = [option for word in words for option in (word, word.partition("=")[0])]
    if words[0] == "probe":
        return ["trainer.global_batch_size=2", "model.d_model=32", *(["--steps", "1"] if "--steps" in named else [])]
    if words[0] in ("cost", "doctor") and "model" in named:
        return ["model.n_layers=1"]
    if words[:2] == ["plugins", "check"]:  # test_plugins_command.py runs all of it on what `plugins new` writes
        return ["--only", "contract,future,prefix"]
    if words[0] != "train" or "--help" in words:
        return []
    short = [*SHORT, f"trainer.max_steps={3 if 'resume' in named else 2}"]
    short += ["schedule.warmup_steps=1"] if "experiment" in named and "--config-dir" not in named else []
    short += [] if "--quiet" in named else ["callbacks=none"]
    return short + (TINY if any("andrea" in word for word in words) else [])


def main(words: list[str]) -> int:
    with registry_apart():
        return cli.main(words)


def run(command: str, whole: bool = False) -> int:
    """Run one command, whole or made short, and return its exit code."""
    words = shlex.split(command)
    if words[:2] == ["python", "train.py"] or words[0] == "gptframe":
        words = ["train", *words[2:]] if words[0] == "python" else words[1:]
        words += [] if whole else appended(words)
        if any(word.startswith("trainer.devices=") for word in words):  # the second process types the command again
            return in_a_process(ROOT / "train.py", *words[1:])
        return main(words)
    if words[0] == "python":
        return in_a_process(ROOT / words[1], *words[2:], "--rounds", "1", "--new-tokens", "4")
    script = re.fullmatch(r'eval "\$\(gptframe completion bash\)"', command)
    assert script, f"{command}: how is this run? Output belongs into a block of its own, of the language text"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", "bash"]) == 0
    return subprocess.run(["bash", "-c", f"{out.getvalue()}\ncomplete -p gptframe"], check=False).returncode


def in_a_process(script: Path, *words: str) -> int:
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
    print(done.stdout)
    print(done.stderr, file=sys.stderr)
    return done.returncode


def write_code(page: str, code: str) -> None:
    """Do with a Python block what the page says: it is a plugin, or a line of one that `plugins new` has written."""
    if page in OWN_PLUGIN:
        Path(OWN_PLUGIN[page]).write_text(code, encoding="utf-8")
    elif code.startswith("before = "):
        (plugin,) = [file for file in Path.cwd().glob("*.py") if "before = torch" in file.read_text(encoding="utf-8")]
        text, count = re.subn(r"before = torch.*\n", lambda _: code, plugin.read_text(encoding="utf-8"), count=1)
        assert count == 1
        plugin.write_text(text, encoding="utf-8")


def unlike(shown: str, printed: str) -> list[str]:
    """The lines that a page shows and that were not printed; the digits of measured numbers are not compared."""

    def plain(text: str) -> str:
        return re.sub(r"\d+\.\d+", "#", " ".join(text.split()))

    return [line for line in shown.splitlines() if line.strip() != "..." and plain(line) not in plain(printed)]


@pytest.fixture(scope="module", autouse=True)
def small_corpora(tmp_path_factory):
    """Nothing here looks at how well a model has learned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPTFRAME_CACHE", str(tmp_path_factory.getbasetemp().parent / "gptframe-tokens"))
        patch.setattr(verbs, "_ENOUGH", 1000)
        patch.setattr(verbs, "_VALIDATION", 50)
        patch.setitem(andrea.SIZES, "andrea_tiny", (8, 2, 2, 260))
        yield


@pytest.fixture(scope="module")
def belongings(small_corpora, tmp_path_factory) -> Path:
    """A folder with what the pages take for granted: runs, texts, tokens, and weights from elsewhere."""
    folder = tmp_path_factory.mktemp("reader")
    english = [ROOT / page for page in DOCS if page.count("/") == 1]
    for name, pages in {"folder": english, "notes": english[:3]}.items():
        (folder / name).mkdir()
        for page in pages:
            shutil.copy(page, folder / name)
    shutil.copy(ROOT / "README.md", folder / "my.txt")
    (folder / "train.bin").write_bytes(struct.pack("<5000H", *(7 * i % 50257 for i in range(5000))))
    (folder / "segments.txt").write_text("work\nwor\ned\n")
    count = next(n for preset, cfg, n in andrea.readings("x") if preset == "andrea_tiny" and cfg.norm["affine"])
    (folder / "model.bin").write_bytes(struct.pack("<ii", 5, count) + torch.randn(3 * count).numpy().tobytes())
    shutil.copytree(ROOT / "plugins" / "examples", folder / "plugins" / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        short = [*SHORT, "trainer.max_steps=2", "callbacks=none"]
        assert main(["train", f"run_dir={RUN}", *short]) == 0
        assert main(["train", "run_dir=RUN", "norm_placement=peri", *short]) == 0
        # a folder of the name that a model has on the hub is read in its place
        gpt2 = ["model=gpt2", *TINY, "data=text", "data.path=folder", "tokenizer=bpe"]
        assert main(["train", "run_dir=ours", *gpt2, *short]) == 0
        assert main(["export", "ours", "--format", "gpt2", "--to", "openai-community/gpt2"]) == 0
        shutil.rmtree("ours")
    return folder


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_every_command_runs(page, belongings, tmp_path, monkeypatch, capsys):
    shutil.copytree(belongings, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    failed = []
    for command, shown in steps(page):
        if not command:
            write_code(page, shown)
            continue
        # runs and reports that several pages show, and of which nothing on a page reads the outcome
        again = command in RAN and re.match(r"python train\.py|gptframe (cost|doctor|params|trace) ", command)
        if reason(command) or again:
            continue
        monkeypatch.setattr(sys, "stdin", io.StringIO("I\n"))
        capsys.readouterr()
        code = run(command, whole="checks passed" in shown)
        out, err = capsys.readouterr()
        is_refused = re.search(r"^error: |^ *FAIL ", shown, re.M) is not None
        missing = unlike(shown, out + err)
        if (code != 0) != is_refused or "Traceback" in out + err or missing:
            failed.append(f"{command}\nexit code {code}, not printed: {missing}\n{out[-2000:]}\n{err[-2000:]}")
        RAN.add(command)
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("command", [command for _, command in COMMANDS if reason(command)])
def test_what_is_not_run_is_right_as_far_as_it_goes(command):
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        target, extra = re.fullmatch(r"(?:-e )?([\w./-]+)(?:\[(\w+)\])?", " ".join(words[2:])).groups()
        project = (ROOT / "pyproject.toml").read_text()
        assert (ROOT / target / "pyproject.toml").is_file() or f'"{target}' in project
        assert extra is None or f"\n{extra} = [" in project
    elif words[0] == "python":
        config = cli.read_config(compose.compose_config(words[2:]), words[2:])
        assert isinstance(config, Config)
    else:
        assert words[0] == "pytest" or words[1] in cli.COMMANDS


def test_no_row_of_the_table_is_idle():
    assert len(COMMANDS) > 100
    assert [part for part in NOT_RUN if not any(part in command for _, command in COMMANDS)] == []


def test_the_tests_that_the_pages_name_are_there():
    there = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")))
    assert named and named <= there, named - there


def test_every_page_is_in_the_site():
    listed = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(f"docs/{page}" for page in listed if not page.startswith("reference/")) == DOCS
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["strict"] is True


def test_the_site_builds_without_a_warning(tmp_path, monkeypatch):
    """In it the reference, with every key of the schema and every registered name."""
    mkdocs = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    mkdocs.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    keys = (tmp_path / "site" / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    assert "trainer.global&#95;batch&#95;size" in keys or "trainer.global_batch_size" in keys
    assert "Width of the residual stream" in keys
    names = (tmp_path / "site" / "reference" / "registry" / "index.html").read_text(encoding="utf-8")
    assert "squared_relu" in names and "Adam" in names
