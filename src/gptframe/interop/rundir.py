"""Run directories of imported models: made whole or not at all, and read again for export."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptframe import __version__
from gptframe.config import Config, ModelConfig
from gptframe.errors import UserError
from gptframe.model import build_model
from gptframe.training import checkpoint, directory


@dataclass
class Imported:
    """A model that is to become a run directory.

    Attributes:
        model: its config.
        state: every parameter by its name in `GPT`, in the dtype of the file.
        tokenizer: its config section; `{"name": "none"}` without one.
        save_tokenizer: writes it into the folder that it is given.
        source: what manifest.json says about where it comes from.
        optimizer: moments of AdamW by parameter name, `{name: {"exp_avg": ..., "exp_avg_sq": ...}}`.
        step: optimiser steps that it was trained for, where known.
        notes: lines for the user.
    """

    model: ModelConfig
    state: dict[str, Tensor]
    tokenizer: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    save_tokenizer: Callable[[Path], None] | None = None
    source: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Tensor]] | None = None
    step: int = 0
    plugins: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_free(place: Path) -> None:
    """UserError where something is at `place` already."""
    if place.is_dir() and not any(place.iterdir()):
        return
    if place.exists() or place.is_symlink():
        what = "is not empty" if place.is_dir() else "exists"
        raise UserError(f"--to {place} {what}, and nothing is overwritten: name another folder")


def write_folder(place: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder that `fill` has filled, under another name until it is whole.

    Raises:
        UserError: something is at `place`, or it cannot be written.
    """
    check_free(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{place.name}-", dir=place.parent))
    except OSError as error:
        raise UserError(f"--to {place}: {error.strerror}") from None
    try:
        fill(temporary)
        os.chmod(temporary, 0o777 & ~umask())
        os.replace(temporary, place)
    except OSError as error:
        raise UserError(f"--to {place}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def umask() -> int:
    """The process's umask, which can only be read by setting it."""
    current = os.umask(0)
    os.umask(current)
    return current


def write_run(found: Imported, place: Path) -> int:
    """Write the run directory of an imported model; return the number of its parameters.

    Raises:
        UserError: something is at `place`, or the tensors are not those of the config.
    """
    expected = {name: tuple(p.shape) for name, p in build_model(found.model, device="meta").named_parameters()}
    check_state(found.state, expected)
    n_parameters = sum(tensor.numel() for tensor in found.state.values())
    config = Config(
        name=found.model.name,
        plugins=found.plugins,
        model=found.model,
        tokenizer=found.tokenizer,
        data={"name": "text", "path": None},  # it comes without: a run from these weights names its own
    )
    values = config.to_dict()
    meta = {
        "version": __version__,
        "model": values["model"],
        "plugins": checkpoint.used_plugins(values["model"]),
        "step": found.step,
        "imported": found.source,
    }
    saved: dict[str, Any] = {"state_dict": {f"model.{k}": v for k, v in found.state.items()}, "gptframe": meta}
    if found.optimizer is not None:
        saved["optimizer_states"] = [optimizer_state(found.model, found.optimizer, found.step)]

    def fill(folder: Path) -> None:
        directory.write_yaml(folder / "config.yaml", values)
        directory.write_json(
            folder / "manifest.json",
            {"name": config.name, "parameters": n_parameters, "imported": found.source, "status": "imported"},
        )
        if found.save_tokenizer is not None:
            found.save_tokenizer(folder / "tokenizer")
        checkpoint.save(saved, checkpoint.checkpoint_path(folder, found.step))

    write_folder(place, fill)
    return n_parameters


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in state:
            raise UserError(f"the file holds nothing for {name}")
        if tuple(state[name].shape) != shape:
            raise UserError(f"{name} is {list(state[name].shape)} in the file and {list(shape)} by its config")
    extra = sorted(set(state) - set(expected))
    if extra:
        raise UserError(f"the model has no {extra[0]}")


def optimizer_state(cfg: ModelConfig, moments: Mapping[str, dict[str, Tensor]], step: int) -> dict[str, Any]:
    """Moments as torch.optim.AdamW saves them for the groups that training makes."""
    from gptframe.training.optimizer import param_groups

    groups, state, index = [], {}, 0
    for group in param_groups(build_model(cfg, device="meta")):
        names = group["param_names"]
        groups.append({"params": list(range(index, index + len(names))), "param_names": names, "role": group["role"]})
        for name in names:
            state[index] = {"step": torch.tensor(float(step)), **moments[name]}
            index += 1
    return {"state": state, "param_groups": groups}


def moments_of(saved: Mapping[str, Any]) -> dict[str, dict[str, Tensor]] | None:
    """AdamW's moments by parameter name in a checkpoint; None where it has none for some parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for optimizer in saved.get("optimizer_states", []):
        for group in optimizer["param_groups"]:
            for index, name in zip(group["params"], group.get("param_names", []), strict=False):
                state = optimizer["state"].get(index, {})
                if "exp_avg" not in state or "exp_avg_sq" not in state:
                    return None
                found[name.removeprefix("model.")] = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
    return found or None


@dataclass
class Run:
    """A run directory's newest checkpoint, for export: weights in the dtype that they have there."""

    path: Path
    config: Config
    state: dict[str, Tensor]
    step: int
    moments: dict[str, dict[str, Tensor]] | None
    notes: list[str]
    imported_from: str | None = None
    """The format of an import."""


def read_run(run_dir: Path) -> Run:
    """Read what an export needs.

    Raises:
        UserError: it is not a run directory, has no whole checkpoint, or needs a plugin that is not there.
    """
    from gptframe import plugins

    config = directory.read_config(run_dir)
    path, notes = checkpoint.newest_valid(run_dir)
    if path is None:
        raise UserError(f"{run_dir} has no checkpoint yet")
    plugins.load(config.plugins)
    saved = checkpoint.load(path)
    meta = saved.get(checkpoint.META, {})
    checkpoint.check_plugins(meta, path)
    checkpoint.check_compatible(meta, config.to_dict()["model"], path)
    source = (meta.get("imported") or {}).get("format")
    state, step = checkpoint.model_state(saved), int(meta.get("step", 0))
    return Run(run_dir, config, state, step, moments_of(saved), notes, source)
