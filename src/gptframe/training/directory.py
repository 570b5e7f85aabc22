"""The run directory: made once, never shared, never overwritten, and every file in it whole."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptframe.config import Config, without_backends
from gptframe.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


LOCK = ".lock"


def create(run_dir: str | None, name: str, now: time.struct_time | None = None) -> Path:
    """Make the directory of a new run: `run_dir`, or `runs/<date>/<time>_<name>`.

    Two jobs of one second get `..._<name>` and `..._<name>_2`: the one that makes the directory owns it.

    Raises:
        UserError: `run_dir` exists and is not empty, or cannot be made.
    """
    try:
        if run_dir is not None:
            path = Path(run_dir).expanduser()
            path.mkdir(parents=True, exist_ok=True)
            if any(entry.name != LOCK for entry in path.iterdir()):
                raise UserError(
                    f"run_dir={run_dir} is not empty, and nothing is overwritten: "
                    f"name another, or continue it with resume={run_dir}"
                )
            return path.absolute()
        now = time.localtime() if now is None else now
        day = Path("runs") / time.strftime("%Y-%m-%d", now)
        day.mkdir(parents=True, exist_ok=True)
        stem, suffix = f"{time.strftime('%H-%M-%S', now)}_{name}", ""
        while True:
            path = day / (stem + suffix)
            try:
                path.mkdir(exist_ok=False)
                return path.absolute()
            except FileExistsError:
                suffix = f"_{int(suffix[1:] or 1) + 1}"
    except OSError as error:
        raise UserError(f"cannot make the run directory {error.filename}: {error.strerror}") from None


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Keep other processes from training in `run_dir`. The system lets go when the process dies.

    Raises:
        UserError: another process is at work there, or the directory cannot be written.
    """
    try:
        handle = open(run_dir / LOCK, "ab")
    except OSError as error:
        raise UserError(f"cannot write in {run_dir}: {error.strerror}") from None
    with handle:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is training in {run_dir}: wait for it, or stop it first") from None
            except OSError:  # a file system without locks
                pass
        yield


def write_text(path: Path, text: str) -> None:
    """Replace `path` in one step."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_yaml(path: Path, value: Any) -> None:
    import yaml

    write_text(path, yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one where the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_config(run_dir: Path) -> Config:
    """The config that a run was started with, but for its backends: what reads a run leaves their work to torch.

    Raises:
        UserError: `run_dir` is not a run directory.
    """
    import yaml

    file = run_dir / "config.yaml"
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such directory")
    if not file.is_file():
        raise UserError(f"{run_dir} is not a run directory: it has no config.yaml")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{file} is not the config of a run; restore it from a copy")
    return Config.from_dict({**values, "model": without_backends(values.get("model", {}))})
