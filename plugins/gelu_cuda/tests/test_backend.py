"""Finding, building and loading the kernels: each thing that can be missing or go wrong, in a fresh process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import gptframe_gelu_cuda
import pytest
from gptframe_gelu_cuda import backend, toolchain

SRC = Path(gptframe_gelu_cuda.__file__).resolve().parent


def python(tmp_path: Path, code: str, wait: bool = True, **env: str | None):
    """Run code in a process with its own cache and without the wheel's objects, so that it must build."""
    package = tmp_path / "site" / SRC.name
    if not package.exists():
        shutil.copytree(SRC, package, ignore=shutil.ignore_patterns("*.so", "*.sha256", "__pycache__", "_build.json"))
    variables = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "site"),
        "GPTFRAME_CACHE_DIR": str(tmp_path / "cache"),
        **env,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={name: value for name, value in variables.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    if not wait:
        return process
    said = process.communicate()[0]
    return process.returncode, said


def compiler(tmp_path: Path, body: str) -> str:
    """A stand-in for g++; `real` in its body is the real one."""
    real = toolchain.find_cxx()
    if real is None:
        pytest.skip("no C++ compiler is found")
    path = tmp_path / "fake-cxx"
    path.write_text(f"#!/bin/sh\nreal='{' '.join(real)}'\n[ \"$1\" = --version ] && exec $real --version\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def quick(tmp_path) -> str:
    """What a compiler does that needs no time: it copies kernels that are built already to where `-o` says."""
    wheel = backend._PACKAGE / "_cpu.abi3.so"
    return f'for a in "$@"; do out=$a; done\ncp {wheel if wheel.is_file() else backend._built("cpu")} "$out"'


USE = "import torch, gptframe_gelu_cuda as G; print(G.gelu(torch.tensor([1.0])).item(), G.status())"


def test_builds_once_and_keeps_the_build(tmp_path, quick):
    log = tmp_path / "log"
    cxx = compiler(tmp_path, f"echo built >> {log}\n{quick}")
    racers = [python(tmp_path, USE, wait=False, CXX=cxx) for _ in range(3)]
    said = [p.communicate()[0] for p in racers]
    assert all(p.returncode == 0 for p in racers), said
    assert all("0.8411" in s and "built at first use" in s for s in said), said
    assert log.read_text() == "built\n"  # three processes at once, one build
    assert python(tmp_path, USE, CXX=cxx)[0] == 0 and log.read_text() == "built\n"
    left = sorted(p.name for p in (tmp_path / "cache/gelu_cuda").iterdir())
    assert [name.rpartition(".")[2] for name in left] == ["lock", "sha256", "so"], left
    # Another source makes another key.
    source = tmp_path / "site" / SRC.name / "csrc/gelu_math.h"
    source.write_text(source.read_text() + "\n")
    python(tmp_path, USE, CXX=compiler(tmp_path, f"echo again >> {log}\nexit 1"))
    assert log.read_text() == "built\nagain\n"


def test_a_truncated_library_is_built_again(tmp_path, quick):
    """Opened as it is, it would end the process with SIGBUS."""
    log = tmp_path / "log"
    cxx = compiler(tmp_path, f"echo built >> {log}\n{quick}")
    assert python(tmp_path, USE, CXX=cxx)[0] == 0
    (library,) = (tmp_path / "cache/gelu_cuda").glob("gelu_cpu-*.so")
    os.truncate(library, library.stat().st_size // 2)
    code, said = python(tmp_path, USE, CXX=cxx)
    assert code == 0 and "0.8411" in said and "built at first use" in said, said
    assert log.read_text() == "built\nbuilt\n"


def test_a_damaged_library_in_the_wheel_is_not_opened(tmp_path, quick):
    """Opened truncated, it would end the process with SIGBUS."""
    assert python(tmp_path, "")[0] == 0
    library = tmp_path / "site" / SRC.name / "_cpu.abi3.so"
    library.write_bytes(Path(quick.split()[-2]).read_bytes()[:100_000])
    code, said = python(tmp_path, USE, CXX=None, PATH="/nonexistent")
    (line,) = (line for line in said.splitlines() if line.startswith("gelu_cuda:"))
    assert code == 0 and "0.8411" in said and "'aten (the wheel's cpu kernels do not load" in said.replace('"', "'"), (
        said
    )
    assert "is damaged" in line and "reinstall gptframe-gelu-cuda" in line and "install g++" in line
    code, said = python(tmp_path, USE, CXX=compiler(tmp_path, quick))
    assert code == 0 and "is damaged" in said and "built at first use" in said, said


def test_a_library_that_does_not_load_is_built_again(tmp_path, quick):
    bad = compiler(tmp_path, 'for a in "$@"; do out=$a; done\necho no library > "$out"')
    code, said = python(tmp_path, USE, CXX=bad)
    assert code == 0 and "0.8411" in said and "built but do not load" in said, said
    code, said = python(tmp_path, USE, CXX=compiler(tmp_path, quick))  # the same key
    assert code == 0 and "built at first use" in said and "ATen" not in said, said


def test_a_compiler_that_is_none(tmp_path, monkeypatch):
    with pytest.raises(toolchain.CompileError, match="reports success, but wrote nothing to .*out.so"):
        toolchain.compile_library([compiler(tmp_path, "exit 0")], tmp_path / "out.so")
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(backend.BackendError, match="CXX='g\\+\\+ is no command: no closing quotation"):
        backend._built("cpu")


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("GPTFRAME_GELU_CPU", "avx3")
    with pytest.raises(backend.BackendError, match="one of baseline, avx2, avx512, not 'avx3'"):
        backend._load_cpu()


def test_a_killed_build_leaves_neither_lock_nor_half_a_library(tmp_path, quick):
    started = tmp_path / "started"
    slow = compiler(tmp_path, f'for a in "$@"; do out=$a; done\necho half > "$out"\ntouch {started}\nexec sleep 60')
    victim = python(tmp_path, USE, wait=False, CXX=slow)
    for _ in range(600):
        if started.exists():
            break
        time.sleep(0.1)
    assert started.exists()
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    cache = tmp_path / "cache/gelu_cuda"
    assert any(p.name.startswith(".gelu_cpu") for p in cache.iterdir())  # what the victim had half written
    # The same compiler by its name, so that the key is the same; now it works.
    code, said = python(tmp_path, USE, CXX=compiler(tmp_path, quick))
    assert code == 0 and "built at first use" in said, said
    assert not any(p.name.startswith(".gelu_cpu") for p in cache.iterdir())


def test_a_broken_compiler_shows_its_own_message_and_aten_computes(tmp_path):
    cxx = compiler(tmp_path, "echo 'cc1plus: error: my own words' >&2; exit 3")
    code, said = python(tmp_path, USE, CXX=cxx)
    assert code == 0 and "0.8411" in said and "my own words" in said and "ATen computes on cpu" in said
    code, said = python(tmp_path, "import gptframe_gelu_cuda as G; G.GeluCuda(backend='cpu')", CXX=cxx)
    assert code == 1 and "BackendError" in said and "my own words" in said and "status 3" in said


def test_no_compiler_is_one_line_and_aten(tmp_path):
    code, said = python(tmp_path, USE, CXX=None, PATH="/nonexistent")
    lines = [line for line in said.splitlines() if "gelu_cuda:" in line]
    assert code == 0 and "0.8411" in said and "'aten (" in said
    assert len(lines) == 1 and "ATen computes on cpu" in lines[0] and "install g++" in lines[0]
    code, said = python(tmp_path, USE, CXX="/nonexistent/g++")
    assert code == 0 and "cannot be started: No such file" in said


def test_cuda_says_all_that_is_missing(tmp_path):
    code = """
        import torch, gptframe_gelu_cuda as G
        from gptframe_gelu_cuda import toolchain
        toolchain.find_nvcc = lambda: None
        torch.cuda.is_available = lambda: False
        for version in (None, "13.0"):
            torch.version.cuda = version
            try:
                G.GeluCuda(backend="cuda")
            except G.BackendError as error:
                print("<", error, ">")
        try:
            module = G.GeluCuda()
            module.backend = "cuda"  # as if made where there was a GPU
            module(torch.ones(1))
        except G.BackendError as error:
            print(error)
    """
    status, said = python(tmp_path, code)
    assert status == 0, said
    assert "torch is built without CUDA; install a CUDA build" in said and "download.pytorch.org" in said
    assert "no GPU is visible; check nvidia-smi" in said
    assert said.count("nvcc is not found") == 2 and "nvidia-cuda-nvcc" in said
    assert "the tensor is on cpu; use backend=auto" in said


@pytest.mark.skipif(os.name != "posix", reason="folders and permissions of POSIX")
def test_a_folder_that_the_user_names_is_used_or_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, mode in (("mine", 0o700), ("group/gelu_cuda", 0o770), ("all/gelu_cuda", 0o777), ("above", 0o777)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name).chmod(mode)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPTFRAME_CACHE_DIR", "~/mine")
    assert backend.cache_folder() == (tmp_path / "mine/gelu_cuda").resolve()
    for name, words in (
        ("file", "file/gelu_cuda: Not a directory"),  # which not even root can write into
        ("group", "others can write to .*group/gelu_cuda.*chmod go-w"),
        ("all", "others can write to .*all/gelu_cuda.*chmod go-w"),
        ("above", "others can write to .*above, .*chmod go-w"),
    ):
        monkeypatch.setenv("GPTFRAME_CACHE_DIR", str(tmp_path / name))
        with pytest.raises(backend.BackendError, match=f"GPTFRAME_CACHE_DIR=.*{name} cannot be used: .*{words}"):
            backend.cache_folder()


@pytest.mark.skipif(os.name != "posix", reason="folders and permissions of POSIX")
def test_without_a_usable_home_the_temporary_folder_serves(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir(mode=0o700)
    (tmp_path / "tmp").chmod(0o1777)  # others may add names there, but not replace ours
    monkeypatch.delenv("GPTFRAME_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    assert backend.cache_folder() == (tmp_path / "home/.cache/gptframe/gelu_cuda").resolve()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    private = tmp_path / f"tmp/gptframe-{os.getuid()}/gelu_cuda"
    assert backend.cache_folder() == private.resolve()
    private.chmod(0o777)
    with pytest.raises(backend.BackendError, match="set GPTFRAME_CACHE_DIR .*Not a directory.*others can write"):
        backend.cache_folder()


def test_backend_aten_loads_nothing(tmp_path):
    code = """
        import torch, gptframe_gelu_cuda as G
        module = G.GeluCuda(backend="aten")
        print(module(torch.ones(1)).item(), module.forward_with_bias(torch.ones(2, 1), torch.zeros(1)).shape)
        print(G.status())
    """
    status, said = python(tmp_path, code, CXX="/nonexistent/g++")
    assert status == 0 and "0.8411" in said and said.rstrip().endswith("{}")


@pytest.mark.parametrize("variant", ["baseline", "avx2", "avx512"])
def test_each_instruction_set(variant, kernels):
    """The loops for smaller processors, where this one has them."""
    code = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
        import torch, torch.nn.functional as F
        from conftest import formula
        from gptframe_gelu_cuda import backend, ops
        backend.require("cpu")
        print(backend.status()["cpu"])
        for dtype in (torch.float16, torch.bfloat16):
            x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
            x = x[x.isfinite()]
            assert (ops.gelu(x) != formula(x)[0].to(dtype)).sum() <= 8
            assert (ops._ops.gelu_backward(torch.ones_like(x), x) != formula(x)[1].to(dtype)).sum() <= 8
            assert ops.gelu(torch.tensor([float("nan"), float("inf"), -0.0], dtype=dtype)).tolist()[1] == float("inf")
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(100_003, dtype=dtype) * 2
            y, dy, ddy = formula(x)
            one = torch.ones_like(x)
            close = dict(rtol=2e-6 if dtype == torch.float32 else 1e-14, atol=3e-7 if dtype == torch.float32 else 1e-15)
            torch.testing.assert_close(ops.gelu(x), y.to(dtype), **close)
            torch.testing.assert_close(ops._ops.gelu_backward(one, x), dy.to(dtype), **close)
            close = {{k: 4 * v for k, v in close.items()}}
            torch.testing.assert_close(ops._ops.gelu_double_backward(one, one, x), ddy.to(dtype), **close)
        if dtype == torch.float64:
            x = torch.randn(300_000)
            y, dy, _ = (t.float() for t in formula(x))
            assert (ops.gelu(x) != y).sum() <= (F.gelu(x, approximate="tanh") != y).sum()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "GPTFRAME_GELU_CPU": variant, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    widest = ("baseline", "avx2", "avx512").index(kernels.split("(")[1].split(",")[0])
    if ("baseline", "avx2", "avx512").index(variant) <= widest:
        assert variant in done.stdout


# ---- toolchain ----


def test_architectures(monkeypatch, nvcc):
    parse = toolchain.parse_architectures
    assert parse("8.0;9.0a 10.0+PTX") == [(80, "", False), (90, "a", False), (100, "", True)]
    assert parse("Hopper+PTX") == [(90, "", True)]
    with pytest.raises(toolchain.CompileError, match="'nine'"):
        parse("nine")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert toolchain.architectures(nvcc, (9, 0)) == [(86, "", False)]
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    assert toolchain.architectures(nvcc, (9, 0)) == [(90, "", False)]
    assert toolchain.architectures(nvcc)[-1][2]  # the newest with PTX


def test_architectures_that_leave_out_this_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: str(tmp_path / "nvcc"))
    with pytest.raises(backend.BackendError, match=r"TORCH_CUDA_ARCH_LIST=8.6 leaves out this GPU, which is 9.0"):
        backend._built("cuda", (9, 0))


def test_nvcc_gets_the_compiler_and_not_its_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/usr/bin/ccache g++-12 -m64")
    command = toolchain.cuda_command("nvcc", tmp_path, tmp_path / "out.so", [(90, "", False)])
    assert command[command.index("-ccbin") + 1] == "g++-12"


def test_what_runs_on_which_gpu():
    wheel = toolchain.parse_architectures(toolchain.DEFAULT_ARCHITECTURES)
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert toolchain.covers(wheel, capability), capability
    assert not toolchain.covers(wheel, (7, 5))
    assert not toolchain.covers([(90, "a", False)], (10, 0)) and not toolchain.covers([(86, "", False)], (8, 0))
