"""Completion, asked as a shell asks it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gptframe import cli, completion
from gptframe.errors import UserError


def words(line: str) -> list[str]:
    return completion.answer("words", line, cli.COMMANDS)


def test_commands_groups_options_and_keys():
    assert words("gptframe tra") == ["trace", "train"]
    assert words("gptframe train norm_pl") == ["norm_placement="]
    assert words("gptframe train activation=s") == ["activation=silu", "activation=squared_relu", "activation=swiglu"]
    assert words("gptframe cost model=mini model.norm_placement.name=p") == [
        "model.norm_placement.name=peri", "model.norm_placement.name=post", "model.norm_placement.name=pre",
    ]  # fmt: skip
    assert words("gptframe train trainer.max") == ["trainer.max_steps="]
    assert words("gptframe train activation=nothing") == words("gptframe train 'open") == []
    assert words("gptframe completion ") == ["bash", "fish", "zsh"]


def test_run_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for day, name in (("2026-01-31", "12_mini"), ("2026-02-01", "13_gpt2")):
        run = tmp_path / "runs" / day / name
        run.mkdir(parents=True)
        (run / "config.yaml").touch()
    assert words("gptframe generate ru") == ["runs/"]
    assert words("gptframe generate runs/") == ["runs/2026-01-31/", "runs/2026-02-01/"]
    assert words("gptframe evaluate runs/2026-02-01/") == ["runs/2026-02-01/13_gpt2"]
    assert words("gptframe train resume=runs/2026-01-31/1") == ["resume=runs/2026-01-31/12_mini"]
    assert words("gptframe generate nowhere/") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_in_bash(tmp_path):
    """Bash cuts words at the equals sign: the reply is what follows it."""
    asked = completion.script(["bash"]) + (
        'gptframe() { "$PYTHON" -c "import sys; from gptframe.cli import main; sys.exit(main(sys.argv[1:]))" "$@"; }\n'
        'for line in "gptframe train activation=sw" "gptframe do"; do\n'
        '  COMP_LINE=$line COMP_POINT=${#line}; _gptframe; echo "${COMPREPLY[*]}"\ndone\n'
    )
    environment = {"PYTHON": sys.executable, "PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.split() == ["swiglu", "doctor"], done.stderr


def test_a_shell_that_is_not_known():
    with pytest.raises(UserError, match="one of bash, zsh, fish"):
        completion.script(["csh"])
