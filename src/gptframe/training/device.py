"""What the machine offers: accelerator, precision, micro-batch and compilation where the config leaves them open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gptframe.config import ModelConfig, TrainerConfig
from gptframe.errors import UserError, nearest

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp64": "64-true"}
CPU_MICRO_TOKENS = 4096  # tokens of a forward pass: more gains no speed on a CPU and costs memory
# Below this width an operation on a CPU is so short that the casts of autocast cost more than bf16 products save, and
# that waiting for a second thread costs what it brings: on a busy machine, forty times as much.
SMALL_D_MODEL = 256


@dataclass(frozen=True)
class Device:
    """The choices for one run."""

    accelerator: str
    """Lightning's name: cpu, gpu, mps, ..."""
    precision: str
    """fp32, bf16, fp16 or fp64."""
    compile: bool
    micro_batch_size: int
    accumulation: int
    """Micro-batches in a step on each device."""
    threads: int
    """CPU threads of PyTorch."""
    compile_mode: str | None = None
    """Of torch.compile; None for its default."""

    @property
    def lightning_precision(self) -> Any:
        return PRECISIONS[self.precision]


def choose(trainer: TrainerConfig, precision: Mapping[str, Any], model: ModelConfig, n_parameters: int = 0) -> Device:
    """Resolve every `auto` and null.

    Raises:
        UserError: what was asked for is not there, or sizes do not divide.
    """
    accelerator = choose_accelerator(trainer.accelerator, trainer.devices)
    name = choose_precision(precision, accelerator, model)
    world = trainer.devices * trainer.num_nodes
    per_rank, rest = divmod(trainer.global_batch_size, world)
    if rest:
        raise UserError(
            f"trainer.global_batch_size={trainer.global_batch_size} is not divisible by the {world} devices of "
            f"trainer.devices={trainer.devices} x trainer.num_nodes={trainer.num_nodes}"
        )
    micro = trainer.micro_batch_size
    if micro is None:
        micro = derive_micro_batch(per_rank, accelerator, name, model, n_parameters)
    elif trainer.global_batch_size % (micro * world):
        fits = max(d for d in range(1, min(micro, per_rank) + 1) if per_rank % d == 0)
        raise UserError(
            f"trainer.global_batch_size={trainer.global_batch_size} is not divisible by "
            f"trainer.micro_batch_size={micro} x {world} device{'s' if world > 1 else ''}: "
            f"try trainer.micro_batch_size={fits}"
        )
    compile = accelerator == "gpu" if trainer.compile == "auto" else bool(trainer.compile)
    threads = choose_threads(trainer, accelerator, model)
    mode = "max-autotune-no-cudagraphs" if trainer.compile == "max-autotune" else None
    return Device(accelerator, name, compile, micro, per_rank // micro, threads, mode)


def choose_accelerator(name: str, devices: int) -> str:
    """`auto` is a GPU if there is one, else the CPU.

    Raises:
        UserError: the accelerator, or that many devices of it, are not there.
    """
    from pytorch_lightning.accelerators import AcceleratorRegistry

    def available(candidate: str) -> bool:
        return AcceleratorRegistry[candidate]["accelerator"].is_available()

    if name == "auto":
        return next((n for n, a in (("gpu", "cuda"), ("mps", "mps")) if available(a)), "cpu")
    if name == "gpu":
        name = "mps" if not available("cuda") and available("mps") else "cuda"
    known = AcceleratorRegistry.available_accelerators()
    if name not in known:
        raise UserError(
            f"trainer.accelerator={name!r} is not one of auto, gpu, {', '.join(sorted(known))}. "
            f"{nearest(name, [*known, 'auto', 'gpu'])}".rstrip()
        )
    shown = "gpu" if name == "cuda" else name
    if not available(name):
        reason = "PyTorch sees no GPU" if name == "cuda" else f"PyTorch sees no {name} device"
        if name == "cuda" and torch.version.cuda is None:
            reason += " (this PyTorch is built without CUDA)"
        raise UserError(
            f"trainer.accelerator={shown} was asked for and is not there: {reason}. Use trainer=cpu or trainer=auto"
        )
    count = AcceleratorRegistry[name]["accelerator"].auto_device_count()
    if shown != "cpu" and devices > count:
        raise UserError(f"trainer.devices={devices}, and this machine has {count}")
    return shown


def choose_precision(section: Mapping[str, Any], accelerator: str, model: ModelConfig) -> str:
    """`auto`: bf16 where the device multiplies it natively and the model gains by it, fp16 on older GPUs, else fp32.

    Raises:
        UserError: an unknown precision, or one that the accelerator does not have.
    """
    name = section["name"]
    extra = set(section) - {"name"}
    if extra:
        raise UserError(f"precision.{extra.pop()}: a precision has no options")
    if name not in (*PRECISIONS, "auto"):
        raise UserError(
            f"precision.name: unknown precision {name!r}. {nearest(name, PRECISIONS)}"
            f"Known: auto, {', '.join(PRECISIONS)}"
        )
    if name == "fp16" and accelerator == "cpu":
        raise UserError("precision=fp16 needs a GPU; on a CPU use precision=bf16 or precision=fp32")
    if name == "fp64" and accelerator == "mps":
        raise UserError("precision=fp64 is not available on mps; use trainer=cpu")
    if name != "auto":
        return name
    if accelerator == "gpu":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if accelerator == "cpu" and model.d_model >= SMALL_D_MODEL and cpu_has_bf16():
        return "bf16"
    return "fp32"


def choose_threads(trainer: TrainerConfig, accelerator: str, model: ModelConfig) -> int:
    """What was asked for; else one for a small model on a CPU, and PyTorch's choice for any other."""
    if trainer.threads is not None:
        cores = os.cpu_count() or 1
        if trainer.threads > 16 * cores:
            raise UserError(f"trainer.threads={trainer.threads}, and this machine has {cores} cores")
        return trainer.threads
    if accelerator == "cpu" and model.d_model < SMALL_D_MODEL and "OMP_NUM_THREADS" not in os.environ:
        return 1
    return torch.get_num_threads()


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices in hardware (AMX or AVX512-BF16)."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def derive_micro_batch(per_rank: int, accelerator: str, precision: str, model: ModelConfig, n_parameters: int) -> int:
    """The largest divisor of `per_rank` whose forward and backward pass fits the device."""
    if accelerator == "gpu":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        # weights, gradients and two moments in fp32; then what a block keeps for its backward pass
        free = 0.6 * total - 16 * n_parameters
        tokens = max(1.0, free) / (model.n_layers * activation_elements(model) * (8 if precision == "fp64" else 4))
    else:
        tokens = CPU_MICRO_TOKENS
    most = max(1, int(tokens // model.context_length))
    return max(d for d in range(1, min(per_rank, most) + 1) if per_rank % d == 0)


def activation_elements(model: ModelConfig) -> int:
    """Numbers that a block keeps for backward, a token: about ten of the stream's width and four of the MLP's."""
    return 10 * model.d_model + 4 * model.hidden
