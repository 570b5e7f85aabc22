"""Builds the kernels into the wheel: for CPU always, for CUDA where nvcc is (GPTFRAME_BUILD_CUDA=0|auto|1).

The objects hold torch operators and no Python functions, so that one wheel serves all Python versions (abi3).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_spec = importlib.util.spec_from_file_location(
    "_toolchain", Path(__file__).resolve().parent / "src/gptframe_gelu_cuda/toolchain.py"
)
toolchain = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toolchain)


def wants_cuda() -> bool:
    """Whether to build the CUDA object; exits with a message where it is demanded and nvcc is missing."""
    wish = os.environ.get("GPTFRAME_BUILD_CUDA", "auto")
    if wish not in ("0", "auto", "1"):
        sys.exit(f"error: GPTFRAME_BUILD_CUDA must be 0, auto or 1, not {wish!r}")
    nvcc = toolchain.find_nvcc()
    if wish == "1" and nvcc is None:
        sys.exit(f"error: GPTFRAME_BUILD_CUDA=1, but nvcc is not found; {toolchain.NVCC_HINT}")
    return wish != "0" and nvcc is not None


class BuildKernels(build_ext):
    """Calls g++ and nvcc directly: seconds, where torch's cpp_extension takes minutes and wants CUDA_HOME."""

    def build_extension(self, ext: Extension) -> None:
        torch = toolchain.find_torch()
        if torch is None:
            sys.exit("error: torch 2.13 or newer is not installed in this interpreter; pip install 'torch>=2.13'")
        if toolchain.torch_version(torch) < toolchain.MINIMUM_TORCH:
            sys.exit("error: the installed torch is older than 2.13; pip install --upgrade torch")
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            if ext.name.endswith("_cuda"):
                nvcc = toolchain.find_nvcc()
                archs = toolchain.architectures(nvcc)
                toolchain.compile_library(toolchain.cuda_command(nvcc, torch, output, archs), output)
                (output.parent / "_build.json").write_text(json.dumps({"architectures": archs}) + "\n")
            else:
                cxx = toolchain.find_cxx()
                if cxx is None:
                    sys.exit(f"error: no C++ compiler is found; {toolchain.CXX_HINT}")
                toolchain.compile_library(
                    toolchain.cpu_command(cxx, torch, output, ext.name.rpartition("_")[2]), output
                )
        except toolchain.CompileError as error:
            without = "\n  GPTFRAME_BUILD_CUDA=0 builds without CUDA" if ext.name.endswith("_cuda") else ""
            sys.exit(f"error: {error}{without}")

    def copy_extensions_to_source(self) -> None:  # of an editable install, which would leave the digests behind
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = toolchain.digest_file(Path(self.build_lib, self.get_ext_filename(ext.name)))
            shutil.copy(built, Path(__file__).resolve().parent / "src/gptframe_gelu_cuda" / built.name)


class Abi3Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.py_limited_api = "cp310"


# A build folder of its own: what an earlier build with CUDA left behind must not get into a wheel without it.
scratch = tempfile.TemporaryDirectory(prefix="gelu_cuda-")
names = ["_cpu", "_attention", "_product", *(["_cuda"] if wants_cuda() else [])]
setup(
    ext_modules=[Extension(f"gptframe_gelu_cuda.{name}", [], py_limited_api=True) for name in names],
    options={"build": {"build_base": scratch.name}},
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Abi3Wheel},
)
