"""How the kernels are compiled: compilers, flags and architectures, shared by setup.py and the build at first use.

Imports neither torch nor the package, so that setup.py can load this file by its path.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

CSRC = Path(__file__).resolve().parent / "csrc"
SOURCES = {
    "cpu": "gelu_cpu.cpp",
    "cuda": "gelu_cuda.cu",
    "epilogue": "gelu_epilogue.cpp",
    "attention": "attention_cpu.cpp",
    "product": "product_cpu.cpp",
}

# torch 2.13 is the oldest whose stable ABI hands out the CUDA stream through libtorch_cpu: one object for all later
# versions, with CUDA or without.
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020d000000000000"
MINIMUM_TORCH = (2, 13)

DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"
_FAMILIES = {"Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}

_LAUNCHERS = ("ccache", "sccache", "distcc")

NVCC_HINT = (
    "install the CUDA toolkit 12.8 or newer and put nvcc on PATH, or pip install 'nvidia-cuda-nvcc==13.0.*' "
    "'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'"
)
CXX_HINT = "install g++ (apt install g++, dnf install gcc-c++) or set CXX"


class CompileError(Exception):
    """A compiler failed, or is missing; the message holds the first lines of what it said."""


def find_cxx() -> list[str] | None:
    """The C++ compiler as a command: $CXX, else g++, c++ or clang++ from PATH.

    Raises:
        CompileError: $CXX is no command.
    """
    asked = os.environ.get("CXX", "").strip()
    if asked:
        try:
            return shlex.split(asked)
        except ValueError as error:
            raise CompileError(f"CXX={asked} is no command: {str(error).lower()}") from None
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    return None


def find_nvcc() -> str | None:
    """nvcc from $CUDA_HOME, PATH, /usr/local/cuda or the pip packages of NVIDIA's compiler."""
    candidates = [Path(home, "bin/nvcc") for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    if found := shutil.which("nvcc"):
        candidates.append(Path(found))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    candidates += [Path(site, "nvidia", folder, "bin/nvcc") for site in _site() for folder in ("cu13", "cuda_nvcc")]
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), None)


def _site() -> list[str]:
    return list(dict.fromkeys([sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path]))


def find_torch() -> Path | None:
    """The folder of the torch package of this interpreter, without importing it.

    Inside pip's build isolation sys.path lacks the environment's packages, but sysconfig still names their folder.
    """
    for site in _site():
        folder = Path(site, "torch")
        if site and (folder / "include/torch/csrc/stable/library.h").is_file():
            return folder
    return None


def torch_version(torch: Path) -> tuple[int, int]:
    """(major, minor) from the headers of the torch package in `torch`."""
    text = (torch / "include/torch/headeronly/version.h").read_text(encoding="utf-8")
    major, minor = (re.search(rf"#define TORCH_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    return (int(major[1]), int(minor[1])) if major and minor else (0, 0)


def parse_architectures(text: str) -> list[tuple[int, str, bool]]:
    """`"8.0;9.0a 10.0+PTX"` -> [(80, "", False), (90, "a", False), (100, "", True)].

    Raises:
        CompileError: an entry is neither a version such as 9.0 (with an optional letter and +PTX) nor a known family.
    """
    for family, versions in _FAMILIES.items():
        text = re.sub(rf"\b{family}\b(\+PTX)?", lambda m, v=versions: v + (m[1] or ""), text)
    found = []
    for entry in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if not match:
            raise CompileError(f"TORCH_CUDA_ARCH_LIST: {entry!r} is no architecture; write for example '8.0;9.0+PTX'")
        found.append((int(match[1]) * 10 + int(match[2]), match[3], bool(match[4])))
    return found


def architectures(nvcc: str, capability: tuple[int, int] | None = None) -> list[tuple[int, str, bool]]:
    """What to compile for: $TORCH_CUDA_ARCH_LIST, else the GPU at hand, else the default list.

    The defaults are cut to what this nvcc knows, and the newest kept one carries PTX for later GPUs.

    Raises:
        CompileError: $TORCH_CUDA_ARCH_LIST is no list of architectures, or this nvcc knows none of the defaults.
    """
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if asked:
        return parse_architectures(asked)
    if capability:
        return [(capability[0] * 10 + capability[1], "", False)]
    known = {int(number) for number in re.findall(r"compute_(\d+)\b", _output([nvcc, "--list-gpu-arch"]))}
    kept = [arch for arch in parse_architectures(DEFAULT_ARCHITECTURES) if not known or arch[0] in known]
    if not kept:
        raise CompileError(
            f"{nvcc} knows none of {DEFAULT_ARCHITECTURES}: set TORCH_CUDA_ARCH_LIST to one that it knows"
        )
    return [(number, letter, number == kept[-1][0]) for number, letter, _ in kept]


def covers(archs: Iterable[tuple[int, str, bool]], capability: tuple[int, int]) -> bool:
    """Whether code for `archs` runs on a GPU of this compute capability (same major, or PTX to translate)."""
    gpu = capability[0] * 10 + capability[1]
    return any(
        gpu == number if letter else (number // 10 == gpu // 10 and number <= gpu) or (ptx and number <= gpu)
        for number, letter, ptx in archs
    )


def cpu_command(cxx: list[str], torch: Path, output: Path, kind: str = "cpu") -> list[str]:
    """The command that compiles CPU kernels: `kind` is cpu (the GELU), attention or product.

    No -ffast-math: it would flush denormals in the whole process.
    """
    return [
        *cxx, "-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
        "-ffp-contract=fast", "-w", TORCH_TARGET, f"-I{torch / 'include'}", f"-ffile-prefix-map={CSRC}=csrc",
        f"-ffile-prefix-map={torch}=torch", str(CSRC / SOURCES[kind]), f"-L{torch / 'lib'}", "-ltorch_cpu",
        "-Wl,--strip-all", "-o", str(output),
    ]  # fmt: skip


def cuda_command(nvcc: str, torch: Path, output: Path, archs: list[tuple[int, str, bool]]) -> list[str]:
    """The command that compiles the CUDA kernels, with the CUDA runtime linked statically."""
    codes = []
    for number, letter, ptx in archs:
        name = f"{number}{letter}"
        code = f"[sm_{name},compute_{name}]" if ptx else f"sm_{name}"
        codes.append(f"-gencode=arch=compute_{name},code={code}")
    prefix = f"-fPIC,-fvisibility=hidden,-ffile-prefix-map={CSRC}=csrc,-ffile-prefix-map={torch}=torch"
    cxx = find_cxx()
    host = []
    if os.environ.get("CXX") and cxx:  # nvcc wants a compiler there, and calls ccache with its own arguments in vain
        host = ["-ccbin", next((word for word in cxx if Path(word).name not in _LAUNCHERS), cxx[0])]
    libraries = Path(nvcc).resolve().parent.parent / "lib"  # where NVIDIA's pip packages keep libcudart_static.a
    return [
        nvcc, *host, "-std=c++17", "-O3", "-shared", "-cudart", "static", "-w", "-Xfatbin", "-compress-all",
        "-Xcompiler", prefix, TORCH_TARGET, f"-I{torch / 'include'}", *codes, str(CSRC / SOURCES["cuda"]),
        f"-L{torch / 'lib'}", *([f"-L{libraries}"] if libraries.is_dir() else []), "-ltorch_cpu",
        "-Xlinker", "--strip-all", "-o", str(output),
    ]  # fmt: skip


def epilogue_command(cxx: list[str], torch: Path, output: Path) -> list[str]:
    """The command that compiles the cuBLASLt MLP.

    Raises:
        CompileError: cublasLt.h or the library is not found.
    """
    site = torch.parent
    for include, lib in (
        (site / "nvidia/cu13/include", site / "nvidia/cu13/lib"),
        (site / "nvidia/cublas/include", site / "nvidia/cublas/lib"),
        (Path("/usr/local/cuda/include"), Path("/usr/local/cuda/lib64")),
    ):
        library = next(iter(sorted(lib.glob("libcublasLt.so*"))), None) if lib.is_dir() else None
        if (include / "cublasLt.h").is_file() and library:
            break
    else:
        raise CompileError("cublasLt.h and libcublasLt.so are missing: pip install nvidia-cublas")
    return [
        *cxx, "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-w", TORCH_TARGET,
        f"-I{torch / 'include'}", f"-I{include}", *(["-I/usr/local/cuda/include"]),
        f"-ffile-prefix-map={CSRC}=csrc", f"-ffile-prefix-map={torch}=torch", str(CSRC / SOURCES["epilogue"]),
        f"-L{torch / 'lib'}", "-ltorch_cpu", str(library), "-Wl,--no-undefined", "-Wl,--strip-all", "-o", str(output),
    ]  # fmt: skip


def compile_library(command: list[str], output: Path) -> None:
    """Run a compiler that writes the library `output`, and write its digest beside it.

    Raises:
        CompileError: see `run`; or the compiler reports success and wrote nothing.
    """
    output.unlink(missing_ok=True)
    run(command)
    if not output.is_file() or output.stat().st_size == 0:
        raise CompileError(f"{command[0]} reports success, but wrote nothing to {output}")
    digest_file(output).write_text(hashlib.sha256(output.read_bytes()).hexdigest())


def digest_file(library: Path) -> Path:
    """Where the digest of a library is kept."""
    return library.with_suffix(".sha256")


def is_whole(library: Path) -> bool:
    """Whether a library is as it was built: the loader answers a truncated one with SIGBUS, not with an error."""
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == digest_file(library).read_text()
    except (OSError, ValueError):
        return False


def run(command: list[str]) -> None:
    """Run a compiler.

    Raises:
        CompileError: it cannot be started or fails; its own first lines are in the message.
    """
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be started: {error.strerror or error}") from None
    if done.returncode:
        said = [line.rstrip() for line in done.stdout.splitlines() if line.strip()] or ["(it printed nothing)"]
        more = f"\n  ... {len(said) - 12} more lines" if len(said) > 12 else ""
        raise CompileError(f"{command[0]} failed with status {done.returncode}:\n  " + "\n  ".join(said[:12]) + more)


def version_text(compiler: list[str]) -> str:
    """What `compiler --version` prints: part of the key of a cached build."""
    return _output([*compiler, "--version"])


def _output(command: list[str]) -> str:
    """What a compiler answers; nothing where it cannot be started, which its build will report."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    except OSError:
        return ""
