"""manifest.json: versions, source, device, data and outcome, everything needed to say what a run was."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptframe import __version__
from gptframe.config import Config
from gptframe.model import GPT
from gptframe.training import checkpoint as checkpoints
from gptframe.training import directory
from gptframe.training.device import Device


class Manifest:
    """manifest.json: everything needed to say what a run was."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        device: Device,
        n_parameters: int,
        fingerprints: Mapping[str, str],
        step: int,
    ):
        self.path = run_dir / "manifest.json"
        self.warnings: list[str] = []
        old = directory.read_json(self.path)
        for key, value in fingerprints.items():
            before = old.get("fingerprints", {}).get(key, value)
            if before != value:
                self.warnings.append(f"the {key} is not what it was when the run began: it will not continue exactly")
        now = {
            "from_step": step,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
            "git_revision": git_revision(),
            "command": sys.orig_argv[1:],
            "device": dataclasses.asdict(device),
            "device_name": _device_name(device),
            "devices": config.trainer.devices * config.trainer.num_nodes,
        }
        self.values: dict[str, Any] = {
            "name": config.name,
            "parameters": n_parameters,
            "plugins": plugins_of(config),
            "fingerprints": dict(fingerprints),
            **{k: old[k] for k in ("wandb_id",) if k in old},
            "sessions": [*old.get("sessions", []), now],
            "status": "running",
        }

    def write(self, **values: Any) -> None:
        self.values.update(values)
        directory.write_json(self.path, self.values)


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"gptframe": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "pytorch-lightning", "hydra-core", "numpy", "tokenizers", "wandb"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def git_revision() -> str | None:
    """The commit of the source that runs, with -dirty for changes; None outside a checkout."""
    here = Path(__file__).resolve().parent
    if not any((parent / ".git").exists() for parent in here.parents):
        return None
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=here, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _device_name(device: Device) -> str:
    if device.accelerator == "gpu":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def module_reports(model: GPT) -> dict[str, str]:
    """What the modules that offer `manifest() -> dict[str, str]` say of themselves, once each."""
    found: dict[str, str] = {}
    for module in model.modules():
        report = getattr(module, "manifest", None)
        if report is not None and not isinstance(report, (torch.Tensor, torch.nn.Module)):
            found.update(report())
    return found


def plugins_of(config: Config) -> dict[str, str]:
    """Where everything came from that the config names and a plugin registered."""
    sections = {key: getattr(config, key) for key in ("data", "tokenizer", "optimizer", "schedule", "callbacks")}
    return checkpoints.used_plugins(config.to_dict()["model"], sections)
