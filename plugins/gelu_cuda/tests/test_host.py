"""Under ASan and UBSan: the CUDA kernels' bodies on the host (the first way without a GPU), and the CPU loops."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import FAULTS, patched_sources
from gptframe_gelu_cuda import toolchain

HERE = Path(__file__).resolve().parent


def build_and_run(folder: Path, fault: str | None, unit: str, *flags: str) -> subprocess.CompletedProcess:
    cxx = toolchain.find_cxx()
    if cxx is None:
        pytest.skip("no C++ compiler is found")
    sources = patched_sources(folder / "csrc", fault)
    command = [*cxx, "-std=c++17", *flags, "-fno-sanitize-recover=all", "-fno-math-errno", "-fno-trapping-math"]
    command += ["-ffp-contract=fast", "-w", f"-I{sources}", str(HERE / unit), "-o", str(folder / "program")]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "sanitize" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    return subprocess.run([str(folder / "program")], capture_output=True, text=True)


BOTH = ("-O1", "-fsanitize=address,undefined")


def test_kernels_on_the_host(tmp_path):
    done = build_and_run(tmp_path, None, "host_kernels.cpp", *BOTH)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr[:2000]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(tmp_path, fault):
    done = build_and_run(tmp_path, fault, "host_kernels.cpp", *BOTH, "-DQUICK=1")  # bf16 and f32, without the bias
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert {"misaligned": "misaligned address", "tail": "i=", "constant": "not "}[fault] in said, said[:1000]


@pytest.mark.parametrize(
    "flags",
    [
        ("-O0", "-fsanitize=address"),  # all instruction sets of this processor; -O1 would take minutes to compile
        ("-O1", "-fsanitize=undefined", "-DGELU_BASELINE_ONLY"),
    ],
    ids=["address", "undefined"],
)
def test_cpu_loops(tmp_path, flags):
    done = build_and_run(tmp_path, None, "host_cpu.cpp", *flags)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr[:2000]


def test_a_tail_copied_too_long_is_caught(tmp_path, monkeypatch):
    end = "n * sizeof(T));\n}\ntemplate <class T>\nGELU_FN void unpad"
    monkeypatch.setitem(FAULTS, "overrun", ("gelu_cpu_body.h", "(unsigned long)" + end, "(unsigned long)1 + " + end))
    done = build_and_run(tmp_path, "overrun", "host_cpu.cpp", "-O0", "-fsanitize=address", "-DGELU_BASELINE_ONLY")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
