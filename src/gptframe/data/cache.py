"""Where prepared data is kept, and how files get there whole: locked, written beside, renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptframe.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: the rename alone keeps the cache whole, at the cost of doing the work twice
    fcntl = None  # type: ignore[assignment]


def default_cache_dir() -> Path:
    """`$GPTFRAME_CACHE`, else `~/.cache/gptframe`."""
    configured = os.environ.get("GPTFRAME_CACHE")
    try:
        return Path(configured).expanduser() if configured else Path.home() / ".cache" / "gptframe"
    except RuntimeError:  # neither HOME nor an entry in the table of users
        raise UserError("there is no home directory to keep prepared data in: set GPTFRAME_CACHE to a folder") from None


def fingerprint(*parts: Any) -> str:
    """32 hex digits that change with any of the JSON-like parts."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def make_directory(path: Path) -> Path:
    """Create `path` with its parents.

    Raises:
        UserError: it cannot be created, with what to type instead.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create {path}: {error.strerror}. Set GPTFRAME_CACHE to a folder you can write"
        ) from None
    return path


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `<path>.lock`. The system releases it when the process dies."""
    make_directory(path.parent)
    try:
        handle = open(f"{path}.lock", "a+b")
    except OSError as error:
        raise UserError(
            f"cannot write {path}.lock: {error.strerror}. Set GPTFRAME_CACHE to a folder you can write"
        ) from None
    with handle:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # file systems without locks: atomic renames still hold
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def atomic(path: Path, mode: str = "wb") -> Iterator[Any]:
    """Open a temporary file that becomes `path` when the block ends well, and vanishes when it does not.

    Raises:
        UserError: the disk is full or not writable.
    """
    make_directory(path.parent)
    temporary = None
    try:
        options: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
        with tempfile.NamedTemporaryFile(
            mode, dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False, **options
        ) as handle:
            temporary = handle.name
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        if isinstance(error, UserError) or error.errno is None:
            raise
        raise UserError(
            f"cannot write {path}: {error.strerror}. Set GPTFRAME_CACHE to another disk, or make room"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def remove_leftovers(path: Path) -> None:
    """Delete what killed writers of `path` left. Call it while holding `lock(path)`."""
    prefix = f".{path.name}."
    with contextlib.suppress(OSError):
        for entry in os.scandir(path.parent):
            if entry.name.startswith(prefix) and entry.name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
