"""What the documentation says can be typed: its commands parse and compose, its plugins train, its pages are listed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from gptframe import cli, compose
from gptframe.config import Config

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LINES = [
    (page.relative_to(ROOT / "docs").as_posix(), line)
    for page in PAGES
    for block in re.findall(r"^```(?:sh|bash)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for line in block.splitlines()
    if line.startswith(("python train.py", "gptframe "))
]
COMPOSING = ("train", "params", "trace", "cost", "doctor", "probe")
OPTIONS = ("-m", "--help", "--quiet", "--multirun")


def words(line: str) -> list[str]:
    typed = shlex.split(line, comments=True)
    return ["train", *typed[2:]] if typed[0] == "python" else typed[1:]


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line}" for page, line in LINES])
def test_every_command_is_one(page, line, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *arguments = words(line)
    assert command in cli.COMMANDS
    if command not in COMPOSING or "--config-dir" in arguments:  # options that `plugins new` has written
        return
    overrides = [a for a in arguments if re.match(r"^\+?[\w./@]+=", a) and not a.startswith(("resume=", "init_from="))]
    if "-m" in arguments:  # a grid composes in its first values
        overrides = [re.sub(r"=([^\[,']+),.*", r"=\1", a) for a in overrides]
    if command == "train":
        unknown = [a for a in arguments if a.startswith("-") and a not in OPTIONS]
        assert not unknown
    own = {"mi_capa.py": "es/index.md"}  # a plugin that the page itself holds
    for name, holder in own.items():
        code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / holder).read_text(encoding="utf-8"), re.S)
        assert code is not None
        (tmp_path / name).write_text(code[1], encoding="utf-8")
        overrides = [a.replace(f"[{name}]", f"[{tmp_path / name}]") for a in overrides]
    config = compose.compose_config(overrides)
    if command == "train":
        config = cli.read_config(config, overrides)
        assert isinstance(config, Config)
        if config.plugins:
            from gptframe.model import build_model

            assert sum(p.numel() for p in build_model(config.model).parameters()) > 0


def test_there_are_commands_on_the_pages():
    assert len(LINES) > 30 and {"index.md", "how-to.md", "es/index.md"} <= {page for page, _ in LINES}


def test_every_page_is_in_the_site():
    listed = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    there = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]
    assert sorted(page for page in listed if not page.startswith("reference/")) == there
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
