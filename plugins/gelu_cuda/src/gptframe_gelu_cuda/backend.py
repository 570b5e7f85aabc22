"""Which implementation runs: finds, builds and loads the compiled kernels, and says why where it cannot.

For each device type: the object that came with the wheel, else one built at first use into a cache, else ATen.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gptframe_gelu_cuda import toolchain

log = logging.getLogger("gptframe.gelu_cuda")

BACKENDS = ("auto", "cuda", "cpu", "aten")
VARIANTS = ("baseline", "avx2", "avx512")
ATTENTION_VARIANTS = ("avx2", "avx512", "avx512_bf16", "amx")
_PACKAGE = Path(__file__).resolve().parent


class BackendError(RuntimeError):
    """The backend that was asked for cannot run here; the message says what is missing and what to install."""


@dataclass(frozen=True)
class Loaded:
    """What serves a device type: `backend` is cuda, cpu or aten; `detail` says from where, or why it is aten."""

    backend: str
    detail: str


_state: dict[str, Loaded] = {}
_attention: str | None = None
_product: str | None = None
_lock = threading.Lock()


_said: set[str] = set()


def say(to: logging.Logger, message: str) -> None:
    """A warning that is given once in a process."""
    if message not in _said:
        _said.add(message)
        to.warning(message)


def status() -> dict[str, str]:
    """Device type -> the implementation that serves it, for logs and manifests; types not used so far are absent."""
    return {device: f"{found.backend} ({found.detail})" for device, found in _state.items()}


def load(device: torch.device) -> bool:
    """Make the kernels for `device` available. False where ATen has to compute; says so once, in one line.

    Called by the operators' fallback, so at most once for a device whose kernels load.
    """
    kind = device.type
    with _lock:
        if kind not in _state:
            try:
                _state[kind] = Loaded(kind, _load(kind))
                log.info("gelu_cuda: %s kernels (%s)", kind, _state[kind].detail)
            except BackendError as error:
                reason = str(error)
                _state[kind] = Loaded("aten", " ".join(line.strip() for line in reason.splitlines()[:2]))
                log.warning("gelu_cuda: ATen computes on %s: %s", kind, reason)
        return _state[kind].backend != "aten"


def require(backend: str) -> None:
    """Check that `backend` can be had, and load it unless it is `auto` or `aten`.

    Raises:
        BackendError: the name is unknown, or something that it needs is missing.
    """
    if backend not in BACKENDS:
        raise BackendError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend not in ("cuda", "cpu"):
        return
    with _lock:
        found = _state.get(backend)
        if found is None or found.backend == "aten":
            detail = _load(backend)  # raises, with the whole message
            _state[backend] = Loaded(backend, detail)
            log.info("gelu_cuda: %s kernels (%s)", backend, detail)


def _load(kind: str) -> str:
    if kind == "cuda":
        return _load_cuda()
    if kind == "cpu":
        return _load_cpu()
    raise BackendError(f"there are no compiled kernels for {kind} devices")


def _load_cpu() -> str:
    variant = os.environ.get("GPTFRAME_GELU_CPU", "")
    if variant not in ("", *VARIANTS):
        raise BackendError(f"GPTFRAME_GELU_CPU must be one of {', '.join(VARIANTS)}, not {variant!r}")
    path, origin = _from_wheel_or_built("cpu")
    return f"{_variant(path, 'gelu')}, {origin}"


def _variant(path: Path, what: str) -> str:
    """The instruction set that a library has chosen."""
    variant = getattr(ctypes.CDLL(str(path)), f"gptframe_{what}_cpu_variant")
    variant.restype = ctypes.c_char_p
    return variant().decode()


def require_attention() -> str:
    """Load the attention kernels of the CPU; the instruction set, and where they came from.

    Raises:
        BackendError: this processor has none of the instruction sets, or something that a build needs is missing.
    """
    global _attention
    if _attention is not None:  # before the lock, which torch.compile(fullgraph=True) cannot enter
        return _attention
    with _lock:
        if _attention is None:
            asked = os.environ.get("GPTFRAME_ATTENTION_CPU", "")
            if asked not in ("", *ATTENTION_VARIANTS):
                known = ", ".join(ATTENTION_VARIANTS)
                raise BackendError(f"GPTFRAME_ATTENTION_CPU must be one of {known}, not {asked!r}")
            path, origin = _from_wheel_or_built("attention")
            name = _variant(path, "attention")
            if name == "none":
                raise BackendError(f"flash_cpu needs a processor with {asked or 'AVX2'} and kernels built by GCC")
            _attention = f"{name}, {origin}"
            log.info("flash_cpu: attention kernels (%s)", _attention)
        return _attention


def require_product() -> str:
    """Load the matrix products of the CPU; the instruction set, and where they came from.

    Raises:
        BackendError: this processor has no AMX, or something that a build needs is missing.
    """
    global _product
    if _product is not None:  # before the lock, as above
        return _product
    with _lock:
        if _product is None:
            path, origin = _from_wheel_or_built("product")
            name = _variant(path, "product")
            if name == "none":
                raise BackendError("amx needs a processor with AMX and bfloat16, and kernels built by GCC")
            _product = f"{name}, {origin}"
            log.info("amx: matrix products (%s)", _product)
        return _product


def _load_cuda() -> str:
    missing = []
    if torch.version.cuda is None:
        missing.append(
            "torch is built without CUDA; install a CUDA build of it (pip install torch --index-url "
            "https://download.pytorch.org/whl/cu130)"
        )
    elif not torch.cuda.is_available():
        missing.append("no GPU is visible; check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES")
    wheel = _PACKAGE / "_cuda.abi3.so"
    if not wheel.is_file() and toolchain.find_nvcc() is None:
        missing.append(
            f"the wheel was built without CUDA kernels and nvcc is not found to build them; {toolchain.NVCC_HINT}"
        )
    if missing:
        raise BackendError("backend cuda: " + "; also, ".join(missing))
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        name = torch.cuda.get_device_name()
        raise BackendError(
            f"backend cuda: {name} has compute capability {capability[0]}.{capability[1]}, 8.0 is needed"
        )
    return _from_wheel_or_built("cuda", capability)[1]


def _wheel_architectures() -> list[tuple[int, str, bool]]:
    try:
        return [tuple(arch) for arch in json.loads((_PACKAGE / "_build.json").read_text())["architectures"]]
    except (OSError, ValueError, KeyError, TypeError):
        return toolchain.parse_architectures(toolchain.DEFAULT_ARCHITECTURES)


def _open(path: Path) -> str | None:
    """Load a library of operators; None, or why it does not load."""
    if not path.is_file():
        return "it is not there"
    if not toolchain.is_whole(path):
        return "it is damaged (its checksum is not that of the build); reinstall gptframe-gelu-cuda"
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return str(error.__cause__ or error).splitlines()[0]
    return None


def _from_wheel_or_built(kind: str, capability: tuple[int, int] | None = None) -> tuple[Path, str]:
    """Load the wheel's library, else one built here; it, and where it came from.

    Raises:
        BackendError: see `open_built`; the message also says what is wrong with the wheel's, where there is one.
    """
    wheel = _PACKAGE / f"_{kind}.abi3.so"
    broken = ""
    if capability is None or toolchain.covers(_wheel_architectures(), capability):
        why = _open(wheel)
        if why is None:
            return wheel, "from the wheel"
        if wheel.exists():
            broken = f"the wheel's {kind} kernels do not load: {why}; "
    try:
        path = open_built(kind, capability)
    except BackendError as error:
        raise BackendError(f"{broken}{error}") from None
    if broken:
        log.warning("gelu_cuda: %sthose built here are used", broken)
    return path, "built at first use"


def open_built(kind: str, capability: tuple[int, int] | None = None) -> Path:
    """Build a library, or find it in the cache, and load it.

    Raises:
        BackendError: see `_built`; or it does not load, and is then built again the next time.
    """
    path = _built(kind, capability)
    if failure := _open(path):
        toolchain.digest_file(path).unlink(missing_ok=True)
        raise BackendError(f"the {kind} kernels were built but do not load: {failure}")
    return path


def _built(kind: str, capability: tuple[int, int] | None = None) -> Path:
    """Build a library into the cache, or find it there.

    Raises:
        BackendError: no compiler, no headers, no writable place, or the compiler failed.
    """
    if os.name != "posix":
        raise BackendError("kernels are built at first use on Linux and macOS only")
    folder = Path(torch.__file__).resolve().parent
    if not (folder / "include/torch/csrc/stable/library.h").is_file():
        raise BackendError(f"torch {torch.__version__} comes without the headers that a build needs")
    if toolchain.torch_version(folder) < toolchain.MINIMUM_TORCH:
        raise BackendError(f"torch {torch.__version__} is too old for these kernels; pip install 'torch>=2.13'")
    try:
        if kind == "cuda":
            nvcc = toolchain.find_nvcc()
            if nvcc is None:
                raise BackendError(f"nvcc is not found; {toolchain.NVCC_HINT}")
            archs = toolchain.architectures(nvcc, capability)
            if capability and not toolchain.covers(archs, capability):
                asked = os.environ["TORCH_CUDA_ARCH_LIST"]
                here = ".".join(map(str, capability))
                raise BackendError(
                    f"TORCH_CUDA_ARCH_LIST={asked} leaves out this GPU, which is {here}; add it or unset it"
                )
            compiler, command = [nvcc], lambda out: toolchain.cuda_command(nvcc, folder, out, archs)
        else:
            cxx = toolchain.find_cxx()
            if cxx is None:
                raise BackendError(f"no C++ compiler is found; {toolchain.CXX_HINT}")
            if kind == "epilogue":
                compiler, command = cxx, lambda out: toolchain.epilogue_command(cxx, folder, out)
            else:
                compiler, command = cxx, lambda out: toolchain.cpu_command(cxx, folder, out, kind)
        key = _key(compiler, command(Path("out")))
        cache = cache_folder()
        path = cache / f"gelu_{kind}-{key}.so"
        if toolchain.is_whole(path):
            return path
        with _locked(cache / f"gelu_{kind}-{key}.lock"):
            if not toolchain.is_whole(path):  # another process may have built it while this one waited
                for stale in cache.glob(f".{path.name}.*"):
                    stale.unlink(missing_ok=True)  # of a builder that was killed: it no longer holds the lock
                temporary = cache / f".{path.name}.{os.getpid()}"
                log.warning("gelu_cuda: building the %s kernels once, into %s", kind, cache)
                toolchain.compile_library(command(temporary), temporary)
                os.replace(temporary, path)
                os.replace(toolchain.digest_file(temporary), toolchain.digest_file(path))
        return path
    except toolchain.CompileError as error:
        raise BackendError(f"the {kind} kernels cannot be built: {error}") from None
    except OSError as error:
        raise BackendError(f"the {kind} kernels cannot be built: {_reason(error)}") from None


def _key(compiler: list[str], command: list[str]) -> str:
    """Names a build by all that goes into it: sources, torch, the command with its architectures, the compiler."""
    digest = hashlib.sha256()
    for source in sorted(toolchain.CSRC.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    facts = [torch.__version__, str(torch.version.cuda), platform.machine(), toolchain.version_text(compiler), *command]
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """$GPTFRAME_CACHE_DIR, else the user's cache folder, else a private folder in the temporary folder.

    Raises:
        BackendError: $GPTFRAME_CACHE_DIR, or each of the others, cannot be used.
    """
    if asked := os.environ.get("GPTFRAME_CACHE_DIR"):
        try:
            return _private(Path(asked).expanduser().absolute() / "gelu_cuda")
        except (OSError, RuntimeError) as error:
            raise BackendError(f"GPTFRAME_CACHE_DIR={asked} cannot be used: {_reason(error)}") from None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    candidates = [Path(tempfile.gettempdir()).absolute() / f"gptframe-{os.getuid()}" / "gelu_cuda"]
    if os.path.isabs(home):  # "~" stays where neither HOME nor the user database knows a home
        candidates.insert(0, Path(home) / "gptframe" / "gelu_cuda")
    tried = []
    for folder in candidates:
        try:
            return _private(folder)
        except OSError as error:
            tried.append(f"{folder}: {_reason(error)}")
    raise BackendError("no folder for the compiled kernels; set GPTFRAME_CACHE_DIR (" + "; ".join(tried) + ")")


def _private(folder: Path) -> Path:
    """`folder`, created where it is missing, after a look at who else could put code there.

    Raises:
        OSError: it cannot be made or written to, it belongs to someone else, or others can write to it or above it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = folder.resolve()
    if folder.stat().st_uid not in (os.getuid(), 0):
        raise OSError(f"{folder} belongs to another user, and code is loaded from it")
    for place in (folder, *folder.parents):
        mode = place.stat().st_mode
        sticky = place != folder and mode & stat.S_ISVTX  # as /tmp: others may add names there, but not replace ours
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            raise OSError(f"others can write to {place}, and code is loaded from it; chmod go-w {place}")
    with tempfile.TemporaryFile(dir=folder):
        return folder


def _reason(error: Exception) -> str:
    """An error of the system in words and with the file; one of ours as it is."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases with the process, however it ends."""
    import fcntl

    with open(path, "a") as file:
        with contextlib.suppress(OSError):  # a file system without locks: the rename still keeps builds whole
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
