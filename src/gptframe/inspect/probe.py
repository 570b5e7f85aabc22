"""Measures how signals and gradients travel through depth, at the initialisation and after some steps of training.

For one batch and its mean loss, of each block:

    gradient            L2 norm of the gradient of the block's parameters
    stream gradient     L2 norm of the gradient of the stream that enters the block
    change              length of what the block does to the stream, over the length of the stream: |out - in| / |in|
    cosine              between the stream before and after the block
    delta / stream      of each sublayer: length of what it adds, over the length of the stream before it
    activation std      standard deviation of the MLP's activation
    zeros               part of the activations that are exactly 0
    dead                part of the hidden units that give less than a thousandth of the RMS activation for every token
    entropy             of the attention pattern, over the largest that the mask allows (1: looks everywhere alike)

Lengths and cosines are means over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gptframe.config import Config
from gptframe.inspect.trace import Trace, trace
from gptframe.model import GPT, Context, build_model
from gptframe.registry import build
from gptframe.training.optimizer import param_groups
from gptframe.training.schedule import make_schedule

MOST_TOKENS = 4096  # of one forward pass
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """What one model showed on one batch; a number a block unless said otherwise."""

    step: int
    seed: int
    loss: float
    gradients: list[float]
    stream_gradients: list[float]
    """One more than blocks: the last is of the stream after the last block."""
    embedding_gradient: float
    change: list[float]
    cosine: list[float]
    deltas: dict[str, list[float]]
    """By the sublayer's label; nan where a block has no such sublayer."""
    activation_std: list[float]
    zeros: list[float]
    dead: list[float]
    entropy: list[float]

    def reach(self) -> float:
        """The gradient of the stream that enters the first block, over that after the last."""
        return self.stream_gradients[0] / self.stream_gradients[-1] if self.stream_gradients[-1] else math.nan

    def reach_of_parameters(self) -> float:
        """The gradient of the first block's parameters, over that of the last block's."""
        return self.gradients[0] / self.gradients[-1] if self.gradients[-1] else math.nan


@dataclass
class Probe:
    """Snapshots of several seeds: before training, and after `steps` steps where there are any."""

    model: str
    steps: int
    tokens: int
    snapshots: list[Snapshot] = field(default_factory=list)

    def at(self, step: int) -> list[Snapshot]:
        return [s for s in self.snapshots if s.step == step]

    @property
    def stages(self) -> list[int]:
        return sorted({s.step for s in self.snapshots})


def probe(config: Config, batches: Callable[[int, int], Batch], seeds: list[int], steps: int) -> Probe:
    """Measure every seed at the initialisation, train `steps` steps with the config's optimiser, and measure again.

    Args:
        batches: (seed, step) -> the batch of that step, with `ids`, `targets` and perhaps `documents`.
    """
    device = "cuda" if torch.cuda.is_available() and config.trainer.accelerator != "cpu" else "cpu"
    first = batches(seeds[0], 0)["ids"]
    found = Probe(config.model.name, steps, _few(first, first).numel())
    for seed in seeds:
        model = build_model(config.model, seed).to(device)
        found.snapshots.append(snapshot(model, _to(batches(seed, 0), device), 0, seed))
        if steps:
            _train(config, model, batches, device, seed, steps)
            found.snapshots.append(snapshot(model, _to(batches(seed, steps), device), steps, seed))
    return found


def _to(batch: Batch, device: str) -> Batch:
    return {key: value.to(device) for key, value in batch.items()}


def _few(value: Tensor, ids: Tensor) -> Tensor:
    return value[: max(1, MOST_TOKENS // ids.shape[1])]


def _train(
    config: Config, model: GPT, batches: Callable[[int, int], Batch], device: str, seed: int, steps: int
) -> None:
    optimizer = build("optimizer", config.optimizer, param_groups(model))
    multiplier = make_schedule(config.schedule, max(steps, config.trainer.max_steps))
    rates = [group["lr"] for group in optimizer.param_groups]
    model.train()
    for step in range(steps):
        torch.manual_seed(hash((seed, step)) % 2**63)  # of dropout
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * multiplier(step)
        batch = _to(batches(seed, step), device)
        n_targets = int((batch["targets"] != -100).sum())
        size = max(1, MOST_TOKENS // batch["ids"].shape[1])
        for part in zip(*(value.split(size) for value in batch.values()), strict=True):
            micro = dict(zip(batch, part, strict=True))
            (model(micro["ids"], _context(micro), micro["targets"]) / max(1, n_targets)).backward()
        if config.trainer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _context(batch: Batch) -> Context | None:
    return Context(documents=batch["documents"]) if "documents" in batch else None


def snapshot(model: GPT, batch: Batch, step: int = 0, seed: int = 0) -> Snapshot:
    """Run forward and backward once on (the first sequences of) a batch and measure. No parameter changes."""
    was_training = model.training
    model.eval()
    model.zero_grad(set_to_none=True)
    batch = {key: _few(value, batch["ids"]) for key, value in batch.items()}
    streams: list[Tensor] = []

    def watch(_: Any, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad and not args[0].is_leaf:
            args[0].retain_grad()
        streams.append(args[0])

    hooks = [block.register_forward_pre_hook(watch) for block in model.blocks]
    hooks.append(model.final_norm.register_forward_pre_hook(watch))
    try:
        with trace(model) as values:
            total = model(batch["ids"], _context(batch), batch["targets"])
    finally:
        for hook in hooks:
            hook.remove()
    loss = total / (batch["targets"] != -100).sum().clamp(min=1)
    loss.backward()
    n = len(model.blocks)
    labels = dict.fromkeys(name.split(".")[2] for name in values.names("blocks.*.delta"))
    measured = Snapshot(
        step=step,
        seed=seed,
        loss=loss.item(),
        gradients=[_norm(p.grad for p in block.parameters()) for block in model.blocks],
        stream_gradients=[_norm([x.grad]) for x in streams],
        embedding_gradient=_norm([model.token_embedding.weight.grad]),
        change=[_change(values, i) for i in range(n)],
        cosine=[_cosine(values, i) for i in range(n)],
        deltas={label: [_ratio(values, f"blocks.{i}.{label}") for i in range(n)] for label in labels},
        activation_std=[_of_mlp(values, i, lambda a: a.std(correction=0).item()) for i in range(n)],
        zeros=[_of_mlp(values, i, lambda a: (a == 0).double().mean().item()) for i in range(n)],
        dead=[_of_mlp(values, i, _dead) for i in range(n)],
        entropy=[_entropy(values, i) for i in range(n)],
    )
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return measured


def _norm(gradients: Any) -> float:
    squares = [g.double().square().sum() for g in gradients if g is not None]
    return math.sqrt(sum(s.item() for s in squares))


def _length(x: Tensor) -> Tensor:
    return x.double().norm(dim=-1)


def _change(values: Trace, block: int) -> float:
    before, after = values[f"blocks.{block}.stream_before"], values[f"blocks.{block}.stream_after"]
    return (_length(after - before) / _length(before).clamp(min=1e-300)).mean().item()


def _cosine(values: Trace, block: int) -> float:
    before, after = values[f"blocks.{block}.stream_before"], values[f"blocks.{block}.stream_after"]
    return torch.cosine_similarity(before.double(), after.double(), dim=-1, eps=1e-300).mean().item()


def _ratio(values: Trace, prefix: str) -> float:
    if f"{prefix}.delta" not in values:
        return math.nan
    before = _length(values[f"{prefix}.stream_before"]).clamp(min=1e-300)
    return (_length(values[f"{prefix}.delta"]) / before).mean().item()


def _of_mlp(values: Trace, block: int, function: Callable[[Tensor], float]) -> float:
    found = [function(values[n].double()) for n in values.names(f"blocks.{block}.*.activation") if n.count(".") == 3]
    return sum(found) / len(found) if found else math.nan


def _dead(activation: Tensor) -> float:
    rms = activation.square().mean().sqrt()
    return (activation.abs().flatten(0, -2).amax(0) < 1e-3 * rms).double().mean().item()


def _entropy(values: Trace, block: int) -> float:
    found = []
    for name in values.names(f"blocks.{block}.*.pattern"):
        p = values[name].double()
        most = values[name.removesuffix("pattern") + "mask"].sum(-1).double().log()  # [T] or [B, 1, T]
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)  # [B, A, T]
        found.append((entropy / most)[most.expand_as(entropy) > 0].mean().item())
    return sum(found) / len(found) if found else math.nan
