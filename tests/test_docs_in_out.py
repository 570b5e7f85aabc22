"""Of docs/generate-evaluate.md and docs/import-export.md what a command's exit code does not show."""

from __future__ import annotations

import io
import re
import shlex
import struct
import sys
from pathlib import Path

import pytest
import torch

from gptframe import cli, load
from gptframe.data.tokenizer import ClosedTokenizer, Source
from gptframe.data.verbs import VerbsCorpus
from gptframe.interop.rundir import Imported, write_run
from gptframe.model import build_model

DOCS = Path(__file__).parent.parent / "docs"


def blocks(name: str, language: str) -> list[str]:
    text = (DOCS / name).read_text(encoding="utf-8")
    return [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if kind == language]


def commands(name: str) -> list[list[str]]:
    lines = [line for block in blocks(name, "") for line in block.splitlines() if line.startswith("gptframe ")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.fixture
def first(tmp_path: Path, monkeypatch) -> Path:
    """What `gptframe train run_dir=runs/first` leaves, but for the training."""
    from gptframe.config import Config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("I\n"))
    closed = ClosedTokenizer(Source(VerbsCorpus()))
    closed.name = "closed"
    cfg = Config.from_dict({"model": {"vocab_size": closed.vocab_size}}).model
    run = Path("runs/first")
    write_run(Imported(cfg, build_model(cfg).state_dict(), {"name": "closed"}, closed.save), run)
    values = (run / "config.yaml").read_text().replace("name: text", "name: verbs").replace("  path: null\n", "", 1)
    (run / "config.yaml").write_text(values)
    (tmp_path / "my.txt").write_text("I work , you work , he works\nyesterday I worked , you worked\n" * 9)
    return run


def test_the_notebook(first: Path) -> None:
    (code,) = blocks("generate-evaluate.md", "python")
    exec(code, {})


def test_the_task(first: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("my_tasks").mkdir()
    (Path("my_tasks") / "my_task.yaml").write_text(blocks("generate-evaluate.md", "yaml")[0])
    (Path("my_tasks") / "rows.json").write_text(blocks("generate-evaluate.md", "json")[0])
    (arguments,) = [a for a in commands("generate-evaluate.md") if "--tasks" in a]
    assert cli.main(arguments) == 0, capsys.readouterr().err
    assert "my_task: 1 examples" in capsys.readouterr().out


def test_import_and_export(first: Path, capsys, monkeypatch) -> None:
    from gptframe.interop import andrea

    monkeypatch.setitem(andrea.SIZES, "andrea_tiny", (8, 2, 2, 260))
    n = next(count for preset, cfg, count in andrea.readings("x") if preset == "andrea_tiny" and cfg.norm["affine"])
    data = struct.pack("<ii", 5, n) + torch.randn(3 * n).numpy().astype("<f4").tobytes()
    Path("model.bin").write_bytes(data)
    Path("segments.txt").write_text("work\nwor\ned\n")
    found = [arguments for arguments in commands("import-export.md") if "runs/andrea" in arguments]
    assert [arguments[0] for arguments in found] == ["import", "export"]
    for arguments in found:
        assert cli.main(arguments) == 0, (arguments, capsys.readouterr().err)
    assert Path("back.bin").read_bytes() == data and load("runs/andrea").encode("worked")[-1] == 2
