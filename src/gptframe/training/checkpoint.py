"""Checkpoints on disk: written whole or not at all, checked before they are trusted, loaded as plain tensors.

A checkpoint is a file of torch.save, `checkpoints/step_00000500.ckpt`. It is written under a temporary name, flushed to
the disk and renamed, so a process killed at any moment leaves the older ones as they were. Its zip container carries a
CRC-32 of every record, which tells a truncated or damaged file from a sound one.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gptframe.config import ModelConfig, without_backends
from gptframe.errors import UserError

if TYPE_CHECKING:
    from gptframe.model import GPT

NAME = re.compile(r"step_(\d+)\.ckpt")
META = "gptframe"  # our own entry beside Lightning's
TEMPORARY = ".tmp-"


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}.ckpt"


def save(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write `checkpoint` to `path` atomically, and durably: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer answers a full disk with a RuntimeError
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
        raise UserError(f"cannot write {path}: {reason}. Older checkpoints are untouched") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def refuse_unreadable(owner: str, state: object) -> None:
    """Refuse a state that could be saved and not be loaded again: `load` takes tensors and plain containers alone.

    Raises:
        UserError: whose state it is, and what is wrong with it.
    """
    file = io.BytesIO()
    try:
        if not isinstance(state, dict):
            raise UserError(f"{owner}.state_dict gave {type(state).__name__}: it must give a dict")
        torch.save(state, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else str(error).splitlines()[0]
        raise UserError(
            f"{owner}.state_dict holds what a checkpoint cannot ({what}): "
            f"keep tensors, numbers, text, lists and dicts in it"
        ) from None


def sync_directory(path: Path) -> None:
    """Make a rename in `path` survive a power cut. A no-op where directories cannot be opened (Windows)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:  # file systems that refuse fsync on a directory
        pass
    finally:
        os.close(descriptor)


def load(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint; only tensors and plain containers are ever unpickled.

    Raises:
        UserError: it is damaged, or not a checkpoint.
    """
    reason = damage(path)
    if reason:
        raise UserError(f"{path} is damaged: {reason}")
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # torch raises pickle, zip and runtime errors of its own here
        raise UserError(f"{path} is not a checkpoint: {str(error).splitlines()[0]}") from None


def damage(path: Path) -> str | None:
    """Why `path` is not a whole checkpoint, or None: every record is read and compared with its CRC-32."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            return f"record {broken} does not match its checksum" if broken else None
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError):
        return f"it is truncated or not a checkpoint ({path.stat().st_size} bytes)"
    except OSError as error:
        return error.strerror or str(error)


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint of a run, newest first, whole or not."""
    found = [(NAME.fullmatch(p.name), p) for p in (run_dir / "checkpoints").glob("*.ckpt")]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def newest_valid(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, or None if the run has none yet, and a line for each newer one passed over.

    Raises:
        UserError: there are checkpoints and all of them are damaged.
    """
    notes: list[str] = []
    for _, path in checkpoints(run_dir):
        reason = damage(path) or _foreign(path)
        if reason is None:
            return path, notes
        notes.append(f"{path.name} is damaged ({reason})")
    if notes:
        raise UserError(f"every checkpoint in {run_dir / 'checkpoints'} is damaged; the newest: {notes[0]}")
    return None, notes


def _foreign(path: Path) -> str | None:
    """Why a sound file is not one of our checkpoints, or None."""
    try:
        meta = metadata(path)
    except UserError as error:
        return str(error).partition(": ")[2]
    step = meta.get("step") if isinstance(meta, Mapping) else None
    return None if isinstance(step, int) and step >= 0 else "it does not say which step it is of"


def prune(run_dir: Path, keep: int, step: int) -> None:
    """Delete all but the `keep` newest checkpoints. Call it after the one of `step` is complete.

    Files of later steps were passed over when the run was resumed: they are damaged, and neither count nor go.
    """
    for _, path in [(of, path) for of, path in checkpoints(run_dir) if of <= step][keep:]:
        path.unlink(missing_ok=True)


def remove_leftovers(run_dir: Path) -> None:
    """Delete what a killed process left half-written."""
    for path in (run_dir / "checkpoints").glob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "model") -> list[str]:
    """Options of the architecture that differ, as `model.d_model is 64 in the checkpoint and 128 now`."""
    lines: list[str] = []
    for key in dict.fromkeys([*saved, *now]):
        a, b = saved.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}.{key}")
        elif _plain(a) != _plain(b):
            lines.append(f"{prefix}.{key} is {a} in the checkpoint and {b} now")
    return lines


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


# What may change without changing the shapes or the meaning of the weights.
_FREE = ("name", "dropout", "init")


def metadata(path: Path) -> dict[str, Any]:
    """What a whole checkpoint says about itself, without reading its tensors."""
    try:
        return torch.load(path, map_location="meta", weights_only=True, mmap=True).get(META, {})
    except Exception as error:  # as in `load`
        raise UserError(f"{path} is not a checkpoint: {str(error).splitlines()[0]}") from None


def check_plugins(meta: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint whose plugin is not loaded.

    Args:
        meta: the checkpoint's own description, `checkpoint["gptframe"]`.

    Raises:
        UserError: the missing plugin, and where it was.
    """
    from gptframe import registry

    for name, origin in meta.get("plugins", {}).items():
        kind, _, plain = name.partition("/")
        if not kind.endswith("_backend") and plain not in registry.names(kind):  # another backend computes the same
            raise UserError(
                f"{path} was written with the {kind} {plain!r} of a plugin ({origin}) that is not loaded: "
                f"add plugins=[{origin.rpartition(':')[0]}] or install its package"
            )


def check_compatible(
    meta: Mapping[str, Any], model: Mapping[str, Any], path: Path, also_free: Sequence[str] = ()
) -> None:
    """Refuse a checkpoint of another architecture.

    Args:
        meta: the checkpoint's own description.
        model: `ModelConfig` as plain containers.
        also_free: keys that may differ, beside the name, dropout, initialisation and backends.

    Raises:
        UserError: the differing options.
    """
    # a checkpoint may be older than an option, which then had its default
    defaults = {key: value for key, value in vars(ModelConfig()).items() if key in model}
    free = {*_FREE, *also_free}
    saved, now = (
        without_backends({k: v for k, v in side.items() if k not in free})
        for side in ({**defaults, **meta.get("model", {})}, model)
    )
    lines = differences(saved, now)
    if lines:
        raise UserError(f"{path} is of another architecture: {'; '.join(lines)}")


def used_plugins(model: Mapping[str, Any], sections: Mapping[str, Any] | None = None) -> dict[str, str]:
    """`{"kind/name": "file:line"}` of what this config takes from plugins."""
    from gptframe import registry

    names: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, str):
            names.add(value)
        elif isinstance(value, Mapping):
            for inner in value.values():
                collect(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                collect(inner)

    collect(model)
    collect(list(model.get("transforms") or {}))
    collect(list((sections or {}).get("callbacks", {}).get("extra") or {}))
    collect({k: v.get("name") for k, v in (sections or {}).items()})
    return {key: origin for key, origin in registry.origins().items() if key.partition("/")[2] in names}


def model_state(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights under the names they have in `GPT`."""
    prefix = "model."
    return {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}


def load_weights(model: GPT, run_dir: str | Path, config: Mapping[str, Any]) -> Path:
    """Give `model` the weights of another run's newest valid checkpoint, or of an import; return its path.

    Args:
        config: `ModelConfig` of `model` as plain containers.

    Raises:
        UserError: there is no whole checkpoint, or it is of another architecture.
    """
    path, _ = newest_valid(Path(run_dir))
    if path is None:
        raise UserError(f"init_from={run_dir} has no checkpoint yet")
    checkpoint = load(path)
    check_plugins(checkpoint.get(META, {}), path)
    check_compatible(checkpoint.get(META, {}), config, path, also_free=["transforms"])
    missing, unexpected = model.load_state_dict(model_state(checkpoint), strict=False)
    if unexpected or (missing and not config.get("transforms")):
        lost = [*unexpected, *missing][0]
        raise UserError(f"init_from={run_dir}: {lost} is in one of the two models only; see model.transforms")
    return path


def load_run(run_dir: str | Path, device: str = "cpu", dtype: torch.dtype | None = torch.float32) -> tuple[GPT, Any]:
    """The model of a run with the weights of its newest valid checkpoint, in eval mode, and its tokenizer.

    Args:
        dtype: of the weights; None for the one that the checkpoint has.

    Returns:
        The model and the tokenizer; None for a run on tokens without one (tokenizer=none).

    Raises:
        UserError: it is not a run directory, has no whole checkpoint, or needs a plugin that is not there.
    """
    from gptframe import plugins
    from gptframe.data.tokenizer import load as load_tokenizer
    from gptframe.model import build_model
    from gptframe.training.directory import read_config

    run_dir = Path(run_dir)
    config = read_config(run_dir)
    path, notes = newest_valid(run_dir)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if path is None:
        raise UserError(f"{run_dir} has no checkpoint yet")
    folder = run_dir / "tokenizer"
    tokenizer = None if config.tokenizer["name"] == "none" and not folder.is_dir() else load_tokenizer(folder)
    plugins.load(config.plugins)
    checkpoint = load(path, device)
    check_plugins(checkpoint.get(META, {}), path)
    check_compatible(checkpoint.get(META, {}), config.to_dict()["model"], path)
    state = model_state(checkpoint)
    del checkpoint
    if dtype is None:
        found = {value.dtype for value in state.values() if value.is_floating_point()}
        dtype = found.pop() if len(found) == 1 else torch.float32
    # Without initialising what is about to be replaced, where nothing but parameters holds values.
    model = build_model(config.model, config.seed, "meta")
    assign = not any(True for _ in model.buffers())
    if not assign:
        model = build_model(config.model, config.seed, device)
    model.load_state_dict(state, assign=assign)
    return model.to(dtype).requires_grad_(True).eval(), tokenizer
