"""Fixtures of the plugin's tests: the CPU kernels built once, and patched copies of the sources for planted faults."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gptframe_gelu_cuda import backend, toolchain

FAULTS = {
    # The vector load starts one element late: not on a multiple of 16 bytes.
    "misaligned": ("gelu_kernels.h", "reinterpret_cast<const Quad*>(p)[", "reinterpret_cast<const Quad*>(p + 1)["),
    # The tail forgets its last element.
    "tail": ("gelu_kernels.h", "if (block == 0 && i < n) {", "if (block == 0 && i < n - 1) {"),
    # 0.044715 became 0.0447.
    "constant": ("gelu_math.h", "#define GELU_B 0.1029432395800234874176221", "#define GELU_B 0.1029087"),
}


@pytest.fixture(scope="session", autouse=True)
def kernels():
    """The CPU kernels, prebuilt or built into the cache; these tests mean nothing on the fallback."""
    backend.require("cpu")
    return backend.status()["cpu"]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def patched_sources(folder: Path, fault: str | None) -> Path:
    """A copy of csrc with one planted fault; the replaced text must be there."""
    shutil.copytree(toolchain.CSRC, folder)
    if fault:
        name, old, new = FAULTS[fault]
        text = (folder / name).read_text()
        assert text.count(old) == 1, f"the fault {fault} has no place in {name} any more"
        (folder / name).write_text(text.replace(old, new))
    return folder


@pytest.fixture(scope="session")
def nvcc() -> str:
    found = toolchain.find_nvcc()
    if found is None:
        if os.environ.get("GPTFRAME_BUILD_CUDA") == "1":
            pytest.fail("GPTFRAME_BUILD_CUDA=1, but nvcc is not found")
        pytest.skip("nvcc is not found")
    return found


@pytest.fixture(scope="session")
def cuobjdump() -> list[str]:
    """cuobjdump with nvdisasm beside it, from PATH or from triton's wheel."""
    if found := shutil.which("cuobjdump"):
        return [found]
    spec = importlib.util.find_spec("triton")
    if spec and spec.origin:
        tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
        if tool.is_file():
            return ["env", f"PATH={tool.parent}:{os.environ['PATH']}", str(tool)]
    pytest.skip("cuobjdump is neither on PATH nor in a triton wheel")


def compile_kernels(nvcc: str, sources: Path, output: Path, *flags: str) -> None:
    """Compile the kernels without torch's headers: seconds."""
    unit = output.with_suffix(".cu")
    unit.write_text('#include "gelu_kernels.h"\n')
    command = [nvcc, "-std=c++17", "-O3", f"-I{sources}", *flags, str(unit), "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def formula(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """GELU and its first two derivatives from the tanh formula, in float64.

    Where 1 + tanh cancels, through sigmoid(v) = exp(v)/(1+exp(v)), the same function: (1 + tanh(v/2))/2.
    """
    x = x.double()
    k = (2 / torch.pi) ** 0.5
    v, dv, ddv = 2 * k * (x + 0.044715 * x**3), 2 * k * (1 + 3 * 0.044715 * x**2), 12 * k * 0.044715 * x
    s, r = torch.sigmoid(v), torch.sigmoid(-v)
    y, dy = x * s, s + x * s * r * dv
    ddy = s * r * (2 * dv + x * ((r - s) * dv**2 + ddv))
    far = x.abs() > 50  # s*r has underflowed, and x^5 may overflow beside it
    return (
        torch.where(far, torch.where(x > 0, x, -torch.zeros_like(x)), y),
        torch.where(far, (x > 0).double(), dy),
        torch.where(far, torch.zeros_like(x), ddy),
    )
