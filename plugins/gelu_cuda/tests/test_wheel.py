"""The wheel, built as a person builds it: what it holds, how it is tagged, and that it runs."""

from __future__ import annotations

import csv
import importlib
import inspect
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PLUGIN = Path(__file__).resolve().parent.parent


def pip_wheel(folder: Path, **env: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(PLUGIN),
    ]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and, in `site`, what it unpacks to, so that Python finds its entry points there."""
    folder = tmp_path_factory.mktemp("wheel")
    done = pip_wheel(folder, GPTFRAME_BUILD_CUDA="0")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder


def test_wheel(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    assert re.fullmatch(r"gptframe_gelu_cuda-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    package = built / "site/gptframe_gelu_cuda"
    assert (package / "_cpu.abi3.so").is_file() and not (package / "_cuda.abi3.so").exists()
    assert (package / "csrc/gelu_cuda.cu").is_file()  # for the build at first use
    assert (package / "conf/activation/gelu_cuda.yaml").is_file()
    assert "[gptframe.plugins]" in points and "[gptframe.conf]" in points
    for file in (built / "site").rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for private in {str(PLUGIN), sys.prefix, os.path.expanduser("~")} - {"/", "/usr"}:
                assert private.encode() not in data, (
                    f"{file.name} holds the path {private} of the machine that built it"
                )
    code = "import torch, gptframe_gelu_cuda as G; print(G.__file__, G.gelu(torch.ones(2)), G.status())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(built / "site"), "CXX": "/nonexistent"},  # nothing can be built
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert str(package) in run.stdout and "from the wheel" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize(
    "env, words",
    [
        ({"GPTFRAME_BUILD_CUDA": "yes"}, "must be 0, auto or 1"),
        ({"GPTFRAME_BUILD_CUDA": "0", "CXX": "/nonexistent/g++"}, "cannot be started: No such file"),
    ],
)
def test_a_wheel_that_cannot_be_built_says_why(tmp_path, env, words):
    done = pip_wheel(tmp_path, **env)
    assert done.returncode != 0 and words in done.stdout + done.stderr


@pytest.mark.parametrize("options", [[], ["model.activation.save=input"]])
def test_mini_trains_to_the_loss_of_gelu_tanh(built, tmp_path, options):
    """The whole way: entry points, `activation=gelu_cuda` on the command line, forward and backward, 30 steps."""
    pytest.importorskip("gptframe")
    if options and "forward_mlp" not in inspect.getsource(importlib.import_module("gptframe.model.mlp")):
        pytest.skip("gptframe's MLP does not hand its projections to the activation")
    losses = {}
    for name in ("gelu_cuda", "gelu_tanh"):
        run = tmp_path / name
        start = "import sys; from gptframe.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
        command = [sys.executable, "-c", start, "model=mini", f"activation={name}", f"run_dir={run}"]
        command += ["trainer.max_steps=30", "trainer.val_interval=30", *(options if name == "gelu_cuda" else [])]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(built / "site"), *sys.path])},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        with open(run / "metrics.csv") as file:
            losses[name] = [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]
    assert losses["gelu_cuda"] == pytest.approx(losses["gelu_tanh"], rel=2e-6)  # float32, 30 steps
    assert losses["gelu_tanh"][-1] < 4.0  # it did learn: log(64) is 4.16
