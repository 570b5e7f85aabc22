"""Checks a run before it starts: what would fail, waste the machine or surprise, each in a line with what to type.

`examine` does all of it for `gptframe doctor`; `at_start` does what costs nothing once a run has its data and its
device, and training prints what it finds.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptframe import __version__, registry
from gptframe.config import Config
from gptframe.errors import UserError
from gptframe.inspect.machine import available_memory, cpu_count, free_disk, versions
from gptframe.inspect.show import short, size
from gptframe.training.device import Device, activation_elements, choose, cpu_has_bf16
from gptframe.training.schedule import make_schedule, resolve_warmup

LEVELS = ("ok", "note", "warning", "error")
OVERHEAD = 600 * 2**20  # of Python, PyTorch and Lightning, measured
MANY_EPOCHS = 50


@dataclass(frozen=True)
class Finding:
    """One line: how bad, about what, what was found, and what to type where something should change."""

    level: str
    subject: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def at_start(config: Config, device: Device, prepared: Any, n_parameters: int, run_dir: Path | None) -> list[Finding]:
    """The findings of a run that is about to start, without those that are in order. Takes milliseconds.

    Args:
        prepared: what `gptframe.data.prepare.prepare` returned.
        run_dir: where checkpoints will be written.
    """
    need = estimated_memory(config, device, n_parameters)
    found = [
        *check_data(config, prepared),
        *check_vocabulary(config, prepared),
        *check_memory(device, need),
        *check_disk(config, n_parameters, run_dir),
        *check_precision(config, device),
        *check_schedule(config),
        *check_threads(config, device),
    ]
    return [finding for finding in found if finding.level in ("warning", "error")]


def examine(config: Config, run_dir: Path | None = None) -> list[Finding]:
    """Every check. One that fails is a finding, and the others go on."""
    found: list[Finding] = [*check_versions(), *check_plugins(config)]

    def attempt(subject: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except UserError as error:
            found.append(Finding("error", subject, str(error)))
            return None

    from gptframe.data.prepare import prepare

    length = config.model.context_length
    prepared = attempt(
        "data",
        lambda: prepare(
            config.data, config.tokenizer, config.model.vocab_size, seed=config.seed, context_length=length
        ),
    )
    model = config.model
    if prepared is not None:
        model = dataclasses.replace(model, vocab_size=model.vocab_size or prepared.vocab_size)
        config = dataclasses.replace(config, model=model)
        found += [Finding("note", "data", note) for note in prepared.notes]
        found += [*check_data(config, prepared), *check_vocabulary(config, prepared)]

    counted = None
    if model.vocab_size is not None:
        from gptframe.inspect.params import inventory

        counted = attempt("model", lambda: inventory(model).totals["total"])
    if counted is not None:
        found.append(Finding("ok", "model", f"{model.name}, {counted:,} parameters"))
    device = attempt("device", lambda: choose(config.trainer, config.precision, config.model, counted or 0))
    if device is not None:
        found += check_device(config, device)
        if counted is not None:
            from gptframe.inspect.cost import rehearse

            need = attempt(
                "memory",
                lambda: rehearse(
                    model, config.optimizer, device.micro_batch_size, accumulation=device.accumulation,
                    precision=device.precision, clip=config.trainer.clip_norm is not None,
                    recompute=config.trainer.recompute, chunked_loss=config.trainer.chunked_loss,
                ).peak,
            )  # fmt: skip
            if need is not None:
                found += check_memory(device, need)
        found += check_precision(config, device)
    found += attempt("schedule", lambda: list(check_schedule(config))) or []
    if counted is not None:
        found += check_disk(config, counted, run_dir)
    if device is not None:
        found += [*check_activation(config, device), *check_threads(config, device)]
    return found


# The checks. Each yields findings, `ok` ones included.


def check_versions() -> Iterator[Finding]:
    found = versions("torch", "pytorch-lightning", "hydra-core", "numpy")
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    yield Finding("ok", "versions", f"gptframe {__version__}, Python {platform.python_version()}, {text}")


def check_plugins(config: Config) -> Iterator[Finding]:
    added = registry.origins()
    if not added:
        if config.plugins:
            yield Finding("warning", "plugins", f"{', '.join(config.plugins)} registered nothing")
        return
    for name, origin in added.items():
        yield Finding("ok", "plugins", f"{name} from {origin}")


def check_data(config: Config, prepared: Any) -> Iterator[Finding]:
    """Length against context and steps; the validation split."""
    trainer, length = config.trainer, config.model.context_length
    n_train, n_val = len(prepared.train), len(prepared.val)
    windows = max(1, (n_train - 1) // length)
    planned = trainer.max_steps * trainer.global_batch_size * length
    epochs = planned / max(1, n_train)
    text = (
        f"{n_train:,} training tokens, {n_val:,} for validation; the run reads {short(planned)} ({epochs:.3g} epochs)"
    )
    if n_val < 2:
        yield Finding("error", "data", "the validation split is empty", "give more text, or data.val_fraction=0.1")
    if epochs > MANY_EPOCHS:
        steps = max(1, int(10 * n_train / (trainer.global_batch_size * length)))
        yield Finding(
            "warning", "data", f"{text}: it will be learned by heart", f"more text, or trainer.max_steps={steps}"
        )
    else:
        yield Finding("ok", "data", text)
    if windows < trainer.global_batch_size:
        yield Finding(
            "warning",
            "data",
            f"{windows} windows of {length} tokens do not fill a batch of {trainer.global_batch_size}: "
            "sequences repeat inside a step",
            f"trainer.global_batch_size={max(1, windows)}, or a shorter model.context_length",
        )


def check_vocabulary(config: Config, prepared: Any) -> Iterator[Finding]:
    rows, tokenizer = config.model.vocab_size, prepared.tokenizer
    if rows is None or tokenizer is None:
        return
    unused = rows - tokenizer.vocab_size
    text = f"{tokenizer.name} has {tokenizer.vocab_size:,} entries, the model {rows:,}"
    if unused > 0.1 * rows:
        text += f": {unused:,} rows are never used"
        yield Finding("warning", "tokenizer", text, f"model.vocab_size={tokenizer.vocab_size}")
    else:
        yield Finding("ok", "tokenizer", text)


def check_device(config: Config, device: Device) -> Iterator[Finding]:
    name = device.accelerator
    if name == "gpu":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "gpu"
    steps = "micro-batch" if device.accumulation == 1 else "micro-batches"
    yield Finding(
        "ok", "device",
        f"{name}, {device.precision}, {device.accumulation} {steps} of {device.micro_batch_size} sequences a step, "
        f"{'compiled' if device.compile else 'not compiled'}",
    )  # fmt: skip
    if device.accelerator == "cpu" and torch.cuda.is_available():
        yield Finding("warning", "device", "there is a GPU and the run does not use it", "trainer=gpu")


def estimated_memory(config: Config, device: Device, n_parameters: int) -> int:
    """Bytes that a step needs at its peak, without a rehearsal: within a third or so of it."""
    width = 8 if device.precision == "fp64" else 4
    model = config.model
    tokens = device.micro_batch_size * model.context_length
    states = _moments(config)
    activations = tokens * (model.n_layers * activation_elements(model) + 4 * model.d_model) * width
    return int(n_parameters * width * (2 + states) + activations)


def _moments(config: Config) -> float:
    """Numbers of a weight's width that the optimiser keeps for each; two where it is not known."""
    count = {"adamw": 2.0, "muon": 1.5, "lion": 1.0}.get(config.optimizer["name"], 2.0)
    return count / 2 if config.optimizer.get("state_dtype") == "bfloat16" else count


def refuse_oversize(config: Config, device: Device, n_parameters: int) -> None:
    """Refuse a model that this machine cannot hold, before it is built: running out of memory kills the process.

    Raises:
        UserError: weights, gradients and optimiser state alone exceed the memory.
    """
    free = available_memory()
    if free is None:
        return
    need, what = estimated_memory(config, dataclasses.replace(device, micro_batch_size=0), n_parameters), "available"
    if device.accelerator == "gpu" and torch.cuda.is_available():
        on_device = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if config.trainer.strategy in ("auto", "ddp") and need > on_device:
            free, what = on_device, "on the GPU"
        else:
            need = 4 * n_parameters  # it is built on the host
    if need > free:
        raise UserError(
            f"{config.model.name} has {n_parameters:,} parameters: its weights, gradients and optimiser state need "
            f"{size(need)}, and {size(free)} are {what}. Choose a smaller model; gptframe cost tells what one needs"
        )


def check_memory(device: Device, need: int) -> Iterator[Finding]:
    if device.accelerator == "gpu" and torch.cuda.is_available():
        free, what = torch.cuda.mem_get_info()[0], "free on the GPU"
    elif device.accelerator == "cpu":
        found = available_memory()
        if found is None:
            return
        free, what, need = found, "available", need + OVERHEAD
    else:
        return
    text = f"about {size(need)} needed, {size(free)} {what}"
    fewer = f"trainer.micro_batch_size={max(1, device.micro_batch_size // 2)}" if device.micro_batch_size > 1 else ""
    if need > free:
        yield Finding("error", "memory", text, fewer or "a smaller model, or model.context_length")
    elif need > 0.85 * free:
        yield Finding("warning", "memory", text, fewer)
    else:
        yield Finding("ok", "memory", text)


def check_disk(config: Config, n_parameters: int, run_dir: Path | None) -> Iterator[Finding]:
    place = run_dir or Path(config.run_dir or "runs")
    free = free_disk(place)
    if free is None:
        return
    one = int(4 * n_parameters * (1 + _moments(config)))
    kept = config.trainer.keep_checkpoints + 1  # the newest is complete before the oldest goes
    text = f"up to {kept} checkpoints of {size(one)} are {size(kept * one)}, {size(free)} free"
    if kept * one > free:
        yield Finding("error", "disk", text, f"trainer.keep_checkpoints=1, or run_dir=... on another disk than {place}")
    elif kept * one > 0.5 * free:
        yield Finding("warning", "disk", text, "trainer.keep_checkpoints=1")
    else:
        yield Finding("ok", "disk", text)


def check_precision(config: Config, device: Device) -> Iterator[Finding]:
    asked = config.precision["name"]
    if device.accelerator == "cpu" and asked == "bf16" and not cpu_has_bf16():
        yield Finding("warning", "precision", "this CPU emulates bf16: fp32 is faster", "precision=fp32")
    elif device.accelerator == "gpu" and asked == "fp16" and torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("warning", "precision", "this GPU has bf16, which needs no loss scaling", "precision=bf16")
    elif device.precision == "fp64":
        yield Finding("note", "precision", "fp64 is for checking numbers: twice the memory, a fraction of the speed")


def check_schedule(config: Config) -> Iterator[Finding]:
    """Warm-up and intervals against the length of the run."""
    trainer = config.trainer
    make_schedule(config.schedule, trainer.max_steps)
    warmup = resolve_warmup(config.schedule, trainer.max_steps)["warmup_steps"]
    text = f"{config.schedule['name']}, {warmup} of {trainer.max_steps:,} steps are warm-up"
    if warmup > trainer.max_steps / 2:
        yield Finding("warning", "schedule", text, f"schedule.warmup_steps={max(1, trainer.max_steps // 20)}")
    else:
        yield Finding("ok", "schedule", text)
    for key in ("val_interval", "checkpoint_interval", "log_interval"):
        if getattr(trainer, key) > trainer.max_steps:
            yield Finding(
                "note", "schedule",
                f"trainer.{key}={getattr(trainer, key)} is longer than the run: it happens once, at the end",
            )  # fmt: skip


def check_activation(config: Config, device: Device) -> Iterator[Finding]:
    """Which implementation computes the activation; a compiled one is built and tried here."""
    name = config.model.activation["name"]
    try:
        activation = registry.build("activation", config.model.activation, key="model.activation")
    except UserError as error:
        yield Finding("error", "activation", str(error))
        return
    origin = registry.origins().get(f"activation/{name}")
    if origin is None and ":" not in name:
        yield Finding("ok", "activation", f"{name}, PyTorch's own kernel")
        return
    if hasattr(activation, "manifest"):
        try:
            x = torch.zeros(1, 8, device="cuda" if device.accelerator == "gpu" else "cpu")
            activation(*[x] * getattr(activation, "inputs", 1))
        except Exception as error:  # whatever a plugin raises is what the user should see
            yield Finding("error", "activation", f"{name} fails on {device.accelerator}: {str(error).splitlines()[0]}")
            return
        for key, text in activation.manifest().items():
            level = "warning" if text.startswith("aten (") and name == "gelu_cuda" else "ok"
            yield Finding(level, "activation", f"{key}: {text}")
    else:
        fused = ", fused with the bias" if hasattr(activation, "forward_with_bias") else ""
        yield Finding("ok", "activation", f"{name} from {origin or name}{fused}")


def check_threads(config: Config, device: Device) -> Iterator[Finding]:
    """Threads against CPUs. Few of them are right for a small model, unless they were asked for."""
    threads, cpus = device.threads, cpu_count()
    text = f"{threads} of PyTorch on {cpus} CPU{'s' if cpus > 1 else ''}"
    asked = config.trainer.threads is not None or "OMP_NUM_THREADS" in os.environ
    small = config.model.d_model < 256
    if threads > cpus:
        yield Finding("warning", "threads", text, f"trainer.threads={cpus}")
    elif device.accelerator == "cpu" and asked and not small and threads < max(1, cpus // 2):
        yield Finding("warning", "threads", text, f"trainer.threads={cpus}, or unset OMP_NUM_THREADS")
    else:
        yield Finding("ok", "threads", text)
