"""The wheel, built as a person builds it: what it holds, how it is tagged, and that it runs."""

from __future__ import annotations

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


def test_wheel(tmp_path):
    done = pip_wheel(tmp_path, GPTFRAME_BUILD_CUDA="0")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"gptframe_gelu_cuda-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = archive.namelist()
        points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    package = tmp_path / "site/gptframe_gelu_cuda"
    assert (package / "_cpu.abi3.so").is_file() and not (package / "_cuda.abi3.so").exists()
    assert (package / "csrc/gelu_cuda.cu").is_file()  # for the build at first use
    assert (package / "conf/activation/gelu_cuda.yaml").is_file()
    assert "[gptframe.plugins]" in points and "[gptframe.conf]" in points
    for file in (tmp_path / "site").rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for private in {str(PLUGIN), sys.prefix, os.path.expanduser("~")} - {"/", "/usr"}:
                assert private.encode() not in data, (
                    f"{file.name} holds the path {private} of the machine that built it"
                )
    code = "import torch, gptframe_gelu_cuda as G; print(G.__file__, G.gelu(torch.ones(2)), G.status())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "CXX": "/nonexistent"},  # nothing can be built
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
