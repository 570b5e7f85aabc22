"""What a run will cost before it starts: floating-point operations by formula, memory by a rehearsal without memory.

FLOPs count the two operations of each multiply-add in matrix products, as in Kaplan et al. (2020) and in PyTorch's
FlopCounterMode; norms, activations and softmax, a few percent, are left out. Backward counts twice forward.

Memory is rehearsed: two optimiser steps run on tensors that have shapes and no values, with the model, loss and
optimiser of the run, while every allocation is counted. What a kernel allocates for itself is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptframe.config import Config, ModelConfig
from gptframe.errors import UserError
from gptframe.model import GPT, Context, build_model
from gptframe.model.attention import Attention
from gptframe.model.block import sublayers
from gptframe.model.mlp import MLP
from gptframe.registry import build
from gptframe.training.device import Device, choose
from gptframe.training.optimizer import param_groups

CHINCHILLA = 20.0  # training tokens a parameter (Hoffmann et al., 2022)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


# FLOPs.


@dataclass(frozen=True)
class Part:
    """Forward FLOPs a token of one part of the model, all its blocks together."""

    name: str
    full: float
    """With attention over all T x T pairs, as a kernel that masks afterwards computes it."""
    causal: float
    """With the pairs that the mask leaves."""
    note: str = ""


@dataclass(frozen=True)
class Flops:
    parts: list[Part]
    parameters: int
    embeddings: int
    """Parameters that are looked up and multiply nothing: all embeddings, a tied head's apart."""

    @property
    def forward(self) -> tuple[float, float]:
        """(causal, full), a token."""
        return sum(p.causal for p in self.parts), sum(p.full for p in self.parts)

    @property
    def training(self) -> tuple[float, float]:
        """(causal, full) of forward and backward, a token."""
        causal, full = self.forward
        return 3 * causal, 3 * full


def visible_pairs(length: int, window: int | None) -> int:
    """How many (query, key) pairs a causal mask with a window leaves in `length` tokens."""
    w = length if window is None else min(window, length)
    return w * (w + 1) // 2 + (length - w) * w


def flops(cfg: ModelConfig, length: int | None = None) -> Flops:
    """Forward FLOPs a token by part, for sequences of `length` tokens (default: the context)."""
    length = cfg.context_length if length is None else length
    model = build_model(cfg, device="meta")
    d, width = cfg.d_model, cfg.hidden
    rows: dict[str, list[Any]] = {}

    def add(name: str, full: float, causal: float | None = None, note: str = "") -> None:
        row = rows.setdefault(name, [0.0, 0.0, note])
        row[0] += full
        row[1] += full if causal is None else causal

    for block in model.blocks:
        for _, sublayer in sublayers(block):
            core = sublayer.core
            if type(core) is Attention:
                q, kv = core.n_heads * core.head_dim, core.n_kv_heads * core.head_dim
                add("attention projections", 2 * (2 * d * q + 2 * d * kv), note="q, k, v and output")
                pairs = visible_pairs(length, core.window) / length
                add("attention scores and mix", 4 * length * q, 4 * pairs * q, note=f"{length} tokens")
            elif type(core) is MLP:
                add("mlp", 2 * (3 if core.gate is not None else 2) * d * width)
            else:
                add(sublayer.name, _measured(core, cfg, length), note="measured with FlopCounterMode")
    add("head", 2 * d * model.token_embedding.num_embeddings, note="tied" if model.head is None else "untied")
    parts = [Part(name, full, causal, note) for name, (full, causal, note) in rows.items()]
    looked_up = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    if model.head is None:
        looked_up -= model.token_embedding.weight.numel()
    return Flops(parts, sum(p.numel() for p in model.parameters()), looked_up)


def _measured(core: nn.Module, cfg: ModelConfig, length: int) -> float:
    """FLOPs a token of a plugin's core: counted while it runs on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.empty(1, length, cfg.d_model, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        try:
            core(x, Context(positions=torch.arange(length, device="meta")))
        except (NotImplementedError, RuntimeError):  # looks at values, which the meta device has not
            return float(sum(2 * p.numel() for p in core.parameters() if p.ndim >= 2))
    return counter.get_total_flops() / length


# Memory.


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What the forward pass of one micro-batch leaves for its backward pass."""
    peak: int
    """The most that is alive at once in a step."""
    when: str
    """In which part of the step the peak is."""
    communication: int = 0
    """Buffers of data parallelism, in the peak too."""


class _Meter(TorchDispatchMode):
    """Counts the bytes of all storages that live, and the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out


def rehearse(
    cfg: ModelConfig,
    optimizer: Mapping[str, Any],
    micro_batch_size: int,
    *,
    length: int | None = None,
    accumulation: int = 1,
    precision: str = "fp32",
    clip: bool = True,
    recompute: bool = False,
    chunked_loss: bool = True,
) -> Memory:
    """The memory of one training step, from two steps on tensors without values.

    Args:
        micro_batch_size: sequences of one forward pass.
        length: tokens of a sequence; the context if not given.
        accumulation: micro-batches in a step: from two on, a forward pass runs beside gradients.
        precision: fp32, fp64, or bf16 and fp16 for autocast around weights in fp32.
        recompute: as `trainer.recompute`.
        chunked_loss: as `trainer.chunked_loss`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    length = cfg.context_length if length is None else length
    marks: dict[str, int] = {}
    with FakeTensorMode(), _Meter() as meter:
        with _default_dtype(torch.float64 if precision == "fp64" else torch.float32):
            model = GPT(cfg)
        model.trade_memory(recompute, chunked_loss)
        parameters = list(model.parameters())
        for parameter in parameters:
            meter.add(parameter)
        weights = meter.now
        steps = build("optimizer", optimizer, param_groups(model))
        ids = torch.zeros(micro_batch_size, length, dtype=torch.long)
        meter.add(ids)
        before_state, state = meter.now, 0
        for _ in range(2):  # the second begins with the optimiser's state
            state, marks = meter.now - before_state, {}
            for _micro_batch in range(min(accumulation, 2)):
                before = meter.now
                meter.peak = meter.now
                with _autocast(precision):
                    loss = model(ids, targets=ids)
                activations = meter.now - before
                marks["forward pass"] = max(marks.get("forward pass", 0), meter.peak)
                meter.peak = meter.now
                (loss * 0.5).backward()
                marks["backward pass"] = max(marks.get("backward pass", 0), meter.peak)
                del loss
            gradients = sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None)
            meter.peak = meter.now
            if clip:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            steps.step()
            marks["optimiser step"] = meter.peak
            steps.zero_grad(set_to_none=True)
    when = max(marks, key=lambda key: marks[key])
    return Memory(weights, gradients, state, activations, marks[when], when)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    if precision in ("bf16", "fp16"):
        return torch.autocast("cpu", DTYPES[precision])
    return contextlib.nullcontext()


def sharded(memory: Memory, strategy: str, world: int) -> Memory:
    """The memory of one of `world` devices: replicated, with DDP's buckets for gradients, or sharded by FSDP."""
    if world == 1:
        return memory
    if "fsdp" in strategy or strategy == "deepspeed":
        kept = memory.weights + memory.optimizer + memory.gradients
        parts = {k: -(-getattr(memory, k) // world) for k in ("weights", "gradients", "optimizer")}
        return replace(memory, **parts, peak=memory.peak - kept + sum(parts.values()))
    return replace(memory, communication=memory.gradients, peak=memory.peak + memory.gradients)


# The plan of a run.


@dataclass(frozen=True)
class Plan:
    """What a config would cost on this machine, or on the one that it names."""

    config: Config
    device: Device
    assumed: str
    """What had to be assumed because the device is not here; empty where nothing had."""
    world: int
    flops: Flops
    memory: Memory
    otherwise: Memory
    """The same with the other value of trainer.recompute."""
    checkpoint_bytes: int
    throughput: float | None = None
    """Tokens a second on all devices together."""
    throughput_from: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        trainer = self.config.trainer
        return trainer.max_steps * trainer.global_batch_size * self.config.model.context_length

    @property
    def seconds(self) -> float | None:
        return self.tokens / self.throughput if self.throughput else None


def plan(config: Config) -> Plan:
    """Work out the cost of `config`.

    Raises:
        UserError: sizes that do not fit together.
    """
    cfg, trainer = config.model, config.trainer
    counted = flops(cfg)
    device, assumed = _device(config, counted.parameters)
    world = trainer.devices * trainer.num_nodes
    rehearsed = functools.partial(
        rehearse,
        cfg,
        config.optimizer,
        device.micro_batch_size,
        accumulation=device.accumulation,
        precision=device.precision,
        clip=trainer.clip_norm is not None,
        chunked_loss=trainer.chunked_loss,
    )
    memory, otherwise = (
        sharded(rehearsed(recompute=value), trainer.strategy, world)
        for value in (trainer.recompute, not trainer.recompute)
    )
    whole = memory.weights + memory.optimizer
    if "fsdp" in trainer.strategy:
        whole *= world
    return Plan(config, device, assumed, world, counted, memory, otherwise, whole)


def _device(config: Config, n_parameters: int) -> tuple[Device, str]:
    """As training would choose it; a GPU that is not here is taken for granted."""
    trainer = config.trainer
    if trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        wanted = config.precision["name"]
        given = trainer.micro_batch_size
        cpu = replace(trainer, accelerator="cpu", devices=1, num_nodes=1, global_batch_size=_share(trainer))
        precision = {"name": "bf16" if wanted in ("auto", "fp16") else wanted}
        device = choose(cpu, precision, config.model, n_parameters)
        assumed = "no GPU here: bf16 assumed" if wanted == "auto" else "no GPU here"
        if given is None:
            assumed += f", micro-batch {device.micro_batch_size} as on a CPU (trainer.micro_batch_size=...)"
        return replace(device, accelerator="gpu", precision="fp16" if wanted == "fp16" else device.precision), assumed
    return choose(trainer, config.precision, config.model, n_parameters), ""


def _share(trainer: Any) -> int:
    world = trainer.devices * trainer.num_nodes
    if trainer.global_batch_size % world:
        raise UserError(f"trainer.global_batch_size={trainer.global_batch_size} is not divisible by {world} devices")
    return trainer.global_batch_size // world


def measured_throughput(config: Config, device: Device, budget_seconds: float = 20.0) -> float:
    """Tokens a second of forward, backward and update on this machine's device, from a few micro-batches."""
    import time

    target = torch.device("cuda" if device.accelerator == "gpu" else device.accelerator)
    dtype = torch.float64 if device.precision == "fp64" else torch.float32
    model = build_model(config.model, config.seed).to(target, dtype)
    model.trade_memory(config.trainer.recompute, config.trainer.chunked_loss)
    steps = build("optimizer", config.optimizer, param_groups(model))
    shape = (device.micro_batch_size, config.model.context_length)
    ids = torch.randint(0, model.token_embedding.num_embeddings, shape, device=target)

    def once() -> None:
        precision = device.precision
        context: Any = contextlib.nullcontext()
        if precision in ("bf16", "fp16"):
            context = torch.autocast(target.type, DTYPES[precision])
        with context:
            loss = model(ids, targets=ids)
        (loss / ids.numel()).backward()
        steps.step()
        steps.zero_grad(set_to_none=True)
        if target.type == "cuda":
            torch.cuda.synchronize()

    once()  # kernels are chosen and caches filled
    start, count = time.perf_counter(), 0
    while count < 10 and (count == 0 or time.perf_counter() - start < budget_seconds):
        once()
        count += 1
    return count * ids.numel() / (time.perf_counter() - start)
