"""What the README says can be typed: its commands compose, its plugin trains, its tables name what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gptframe import compose
from gptframe.cli import main
from gptframe.config import Config

TEXT = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)[2:] for line in re.findall(r"^(?:.*&& )?(python train\.py.*)$", TEXT, re.M)
]
QUICK = ["trainer.max_steps=2", "trainer.val_batches=1", "trainer.global_batch_size=2", "trainer.accelerator=cpu"]


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_training_command_composes(arguments, monkeypatch, tmp_path):
    overrides = [a for a in arguments if not a.startswith(("-", "resume="))]
    if "-m" in arguments:  # a grid composes in its first values
        overrides = [f"{key}={values.split(',')[0]}" for key, values in (a.split("=", 1) for a in overrides)]
    Config.from_dict(compose.compose_config(overrides))


def test_the_layer_of_the_readme_trains(monkeypatch, tmp_path, tmp_path_factory):
    monkeypatch.setenv("GPTFRAME_CACHE", str(tmp_path_factory.getbasetemp().parent / "gptframe-tokens"))
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    (tmp_path / "my_layer.py").write_text(code)
    (command,) = [c for c in COMMANDS if any("my_layer" in a for a in c)]
    assert main(["train", *QUICK, "callbacks=none", "data.baseline_order=0", *command]) == 0


def test_the_table_of_switches_names_every_option():
    groups = compose.groups()
    rows = [row for row in TEXT.splitlines() if row.startswith("| `") and "=`" in row]
    for group in ("model", "norm_placement", "norm", "activation", "expansion", "attention", "position", "data",
                  "tokenizer", "optimizer", "schedule", "trainer", "precision", "logger"):  # fmt: skip
        (row,) = [row for row in rows if f"`{group}=`" in row]
        missing = [option for option in groups[group] if f"`{option}`" not in row]
        assert missing in ([], ["none"]), (group, missing)


def test_every_link_in_the_readme_leads_somewhere():
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (root / target).exists(), target
