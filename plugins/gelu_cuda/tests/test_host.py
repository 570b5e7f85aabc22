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


def variants(text: str) -> list[str]:
    *names, last = text.split()
    assert last == "ok", text
    return names


def test_attention(tmp_path):
    """With AMX's tiles in plain loops, where the processor has at least AVX-512 with bfloat16 for the rest."""
    done = build_and_run(tmp_path, None, "host_attention.cpp", *BOTH, "-DEMULATE_TILES")
    assert done.returncode == 0, done.stdout + done.stderr[:2000]
    names = variants(done.stdout)
    assert names in (["avx2"], ["avx2", "avx512"], ["avx2", "avx512", "avx512_bf16", "amx"], [])


@pytest.mark.parametrize(
    "old,new",
    [
        (
            "visible(load(s + r), key, from + r, row + r)",
            "visible(load(s + r), key, from + r, row + r + 1)",
        ),  # a token sees the next one
        ("queries * row_block);   // [R / kPack, D] each", "queries * row_block - 16);"),
        ("load(products + at + i * R)", "load(products + at)"),
    ],
    ids=["future", "overrun", "pair"],
)
def test_planted_faults_in_attention_are_caught(tmp_path, monkeypatch, old, new):
    monkeypatch.setitem(FAULTS, "attention", ("attention_body.h", old, new))
    done = build_and_run(tmp_path, "attention", "host_attention.cpp", "-O1", "-fsanitize=address")
    if old.startswith("load(products") and "avx512_bf16" not in done.stdout:
        pytest.skip("pairs of rows are for processors with AVX-512 and bfloat16")
    assert done.returncode != 0, done.stdout


def test_the_gradient_of_a_weight(tmp_path):
    """With AMX's tiles in plain loops, where the processor has AVX-512 with bfloat16 for the rest."""
    done = build_and_run(tmp_path, None, "host_product.cpp", *BOTH, "-DEMULATE_TILES")
    assert done.returncode == 0, done.stdout + done.stderr[:2000]
    if done.stdout == "none\n":
        pytest.skip("the loops are for processors with AVX-512 and bfloat16")
    assert done.stdout == "ok\n"


@pytest.mark.parametrize(
    "old,new",
    [
        ("2 * i + 1 < depth ? exist : 0", "exist"),  # a row behind the last one
        ("k > 0,\n", "false,\n"),  # what a deep product has summed so far
        ("r % kPanel / 16 * kTile", "r % kPanel / 16 * 0"),
    ],
    ids=["row", "sum", "tile"],
)
def test_planted_faults_in_it_are_caught(tmp_path, monkeypatch, old, new):
    monkeypatch.setitem(FAULTS, "product", ("product_kernels.h", old, new))
    done = build_and_run(tmp_path, "product", "host_product.cpp", "-O1", "-fsanitize=address", "-DEMULATE_TILES")
    if done.stdout == "none\n":
        pytest.skip("the loops are for processors with AVX-512 and bfloat16")
    assert done.returncode != 0, done.stdout
