"""The CUDA kernels without a GPU, first way: their bodies on the host under ASan and UBSan (host_kernels.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import FAULTS, patched_sources
from gptframe_gelu_cuda import toolchain

HERE = Path(__file__).resolve().parent


def build_and_run(folder: Path, fault: str | None, quick: bool = False) -> subprocess.CompletedProcess:
    cxx = toolchain.find_cxx()
    if cxx is None:
        pytest.skip("no C++ compiler is found")
    sources = patched_sources(folder / "csrc", fault)
    flags = ["-std=c++17", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{sources}"]
    flags += [f"-DQUICK={int(quick)}"]  # bf16 and f32, without the bias
    program = folder / "host_kernels"
    built = subprocess.run(
        [*cxx, *flags, str(HERE / "host_kernels.cpp"), "-o", str(program)], capture_output=True, text=True
    )
    if built.returncode and "sanitize" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    return subprocess.run([str(program)], capture_output=True, text=True)


def test_kernels_on_the_host(tmp_path):
    done = build_and_run(tmp_path, None)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr[:2000]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(tmp_path, fault):
    done = build_and_run(tmp_path, fault, quick=True)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert {"misaligned": "misaligned address", "tail": "i=", "constant": "not "}[fault] in said, said[:1000]
