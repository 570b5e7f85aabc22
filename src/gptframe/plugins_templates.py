"""The texts that `gptframe plugins new` writes: a small working plugin of each kind, its test and its config option."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """`code` and `option` have {name} and {Class} to fill in; `group` is the config group of the option."""

    group: str
    option: str
    run: str
    code: str


SUBLAYER = '''"""A sublayer of your own: it reads the stream x[B,T,D] and returns what to add to it."""

import torch
from torch import Tensor, nn

from gptframe import register


@register("sublayer", "{name}")
class {Class}(nn.Module):
    """Adds a linear map of the token before.

    Args:
        strength: factor of what is added.
    """

    parameter_formulas = {{"mix.weight": "D*D"}}  # what `gptframe params` shows and checks

    def __init__(self, cfg, layer: int, strength: float = 0.5):
        super().__init__()
        self.strength = strength
        self.mix = nn.Linear(cfg.d_model, cfg.d_model, bias=False)

    def forward(self, x: Tensor, ctx) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)  # [B, T, D], one token later
        if ctx.documents is not None:  # several texts in a sequence (data.mask_documents): none sees another
            first = torch.ones_like(ctx.documents[:, :1], dtype=torch.bool)
            first = torch.cat([first, ctx.documents[:, 1:] != ctx.documents[:, :-1]], dim=1)
            before = before.masked_fill(first[..., None], 0.0)
        return self.strength * self.mix(before)
'''

BACKEND = '''"""Another way to compute causal attention: same values, other speed or memory."""

import torch
from torch import Tensor

from gptframe import register


@register("attention_backend", "{name}")
class {Class}:
    """One query at a time: slow, and never more than one row of scores in memory."""

    def __init__(self, cfg):
        self.scale = cfg.head_dim**-0.5

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None) -> Tensor | None:
        if documents is not None or q.shape[1] != k.shape[1]:
            return None  # torch computes what is not worth the trouble here
        rows = []
        for t in range(q.shape[2]):
            first = 0 if window is None else max(0, t + 1 - window)
            scores = self.scale * q[:, :, t : t + 1] @ k[:, :, first : t + 1].transpose(-1, -2)  # [B, H, 1, S]
            rows.append(torch.softmax(scores, dim=-1) @ v[:, :, first : t + 1])
        return torch.cat(rows, dim=2)
'''

LINEAR = '''"""Another way to multiply by the model's matrices: same values, other speed or memory."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptframe import register


class Product(torch.autograd.Function):
    """x[..., in] weight[out, in]^T: a kernel of your own takes the place of the three products."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, grad.flatten(0, -2).T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None


@register("linear_backend", "{name}")
class {Class}:
    """Takes float32 and bfloat16, inside autocast and out of it."""

    def __init__(self, cfg):
        pass

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        device = x.device.type
        if device not in ("cpu", "cuda") or x.dtype not in (torch.float32, torch.bfloat16):
            return None  # torch computes it
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = Product.apply(x.to(dtype), weight.to(dtype))
        return y if bias is None else y + bias.to(dtype)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """For the output head, whose loss computes its gradients chunk by chunk. May be left out."""
        return grad @ weight.to(grad.dtype), (grad.T @ x).float()
'''

NORM = '''"""A norm of your own: it sees one token at a time, [..., dim]."""

import torch
from torch import Tensor, nn

from gptframe import register


@register("norm", "{name}")
class {Class}(nn.Module):
    """y = gain * x / (mean(|x|) + eps) over the last dimension.

    Args:
        eps: keeps the division away from 0.
    """

    parameter_formulas = {{"gain": "dim"}}  # what `gptframe params` shows and checks

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(dim=-1, keepdim=True) + self.eps) * self.gain.to(x.dtype)
'''

ACTIVATION = '''"""An activation of your own: forward(x) -> x elementwise; with `inputs = 2`, forward(x, gate) -> x."""

import torch
from torch import Tensor, nn

from gptframe import register


@register("activation", "{name}")
class {Class}(nn.Module):
    """x * sigmoid(slope * x).

    Args:
        slope: how sharply it turns on.
    """

    def __init__(self, slope: float = 1.5):
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.slope * x)
'''

POSITION = '''"""A position of your own: added to the embedded tokens."""

import torch
from torch import Tensor, nn

from gptframe import register
from gptframe.model.position import Position


@register("position", "{name}")
class {Class}(Position):
    """Adds one trained direction, times the position over the context length.

    Args:
        size: standard deviation of the direction at the start.
    """

    seat = "embedding"
    incremental = True  # ctx.positions is all that it looks at
    parameter_formulas = {{"direction": "D"}}  # what `gptframe params` shows and checks

    def __init__(self, cfg, size: float = 0.02):
        super().__init__(cfg)
        self.context, self.size = cfg.context_length, size
        self.direction = nn.Parameter(torch.zeros(cfg.d_model))

    def init_weights(self, draw) -> None:
        """Standard normal values come from `draw`, keyed by the parameter's name, so that runs can be compared."""
        self.direction.copy_(draw("direction") * self.size)

    def forward(self, x: Tensor, ctx) -> Tensor:
        place = (ctx.positions / self.context).to(x.dtype)[..., None]  # [T, 1]
        return x + place * self.direction
'''

SCHEDULE = '''"""A schedule of your own: the factor of the learning rate at each optimiser step, after warm-up."""

from gptframe import register


@register("schedule", "{name}")
def {name}(step: int, total_steps: int, power: float = 2.0) -> float:
    """(1 - step / total_steps) ** power.

    Args:
        power: 1 is a straight line.
    """
    return max(0.0, 1.0 - step / max(1, total_steps)) ** power
'''

OPTIMIZER = '''"""An optimiser of your own, of groups with a role: `matrix`, `decayed` or `plain`."""

import torch

from gptframe import register


@register("optimizer", "{name}")
def {name}(groups: list, lr: float, momentum: float = 0.9, weight_decay: float = 0.1) -> torch.optim.Optimizer:
    """SGD with momentum; matrices are decayed, embeddings, norms and biases are not.

    Args:
        momentum: of the running mean of gradients.
    """
    decayed = [{{**g, "weight_decay": 0.0 if g["role"] == "plain" else weight_decay}} for g in groups]
    return torch.optim.SGD(decayed, lr=lr, momentum=momentum)
'''

CORPUS = '''"""A corpus of your own: documents of text, in two splits."""

from collections.abc import Iterator

from gptframe import register


@register("corpus", "{name}")
class {Class}:
    """Sums of two numbers, written out.

    Args:
        largest: the largest number that is added.
    """

    def __init__(self, largest: int = 60):
        self.largest = largest

    def documents(self, split: str) -> Iterator[str]:
        """The same documents in the same order at each call; every tenth is for validation."""
        for a in range(self.largest + 1):
            for b in range(self.largest + 1):
                if ((a * 7 + b) % 10 == 0) == (split == "val"):
                    yield f"{{a}} + {{b}} = {{a + b}} ."

    def fingerprint(self) -> str:
        """Changes whenever the documents would: tokens are cached under it."""
        return f"{name}-1-{{self.largest}}"
'''

TOPOLOGY = '''"""A block of your own: it maps the stream x[B,T,D] through the sublayers that the config gives it."""

import torch
from torch import Tensor, nn

from gptframe import register
from gptframe.model.block import Block


@register("topology", "{name}")
class {Class}(Block):
    """The sublayers in sequence, then a trained part of the stream that came into the first block.

    Args:
        strength: of that part at the start.
    """

    def __init__(self, cfg, layer: int, residual_scale: float, strength: float = 0.1):
        super().__init__(cfg, layer, residual_scale)
        self.strength = nn.Parameter(torch.full((1,), strength))

    def forward(self, x: Tensor, ctx) -> Tensor:
        first = ctx.shared.setdefault("{name}.first", x)
        return super().forward(x, ctx) + self.strength.to(x.dtype) * first
'''

HEAD = '''"""A head of your own: from the normalised stream x[..., D] and the matrix weight[V, D] to logits and loss."""

from torch import Tensor

from gptframe import register
from gptframe.model.head import Head


@register("head", "{name}")
class {Class}(Head):
    """The usual head, and a pull of log Z = logsumexp(logits) towards 0 in training (z-loss, PaLM, 2022).

    Args:
        weight: of the mean of (log Z)^2.
    """

    def __init__(self, cfg, weight: float = 1e-4):
        super().__init__(cfg)
        self.weight = weight

    def loss(self, x: Tensor, weight: Tensor, targets: Tensor, ctx) -> Tensor:
        if self.training:  # train_loss stays the cross-entropy; this is logged beside it
            ctx.add_loss("{name}", self.weight * self.forward(x, weight).float().logsumexp(dim=-1).square().mean())
        return super().loss(x, weight, targets, ctx)
'''

TRANSFORM = '''"""A transform of your own: it changes the built model in place, before its weights are initialised."""

import torch
from torch import Tensor, nn

from gptframe import register
from gptframe.model.block import Sublayer


class Gain(nn.Module):
    """gain * x, one number for all channels."""

    def __init__(self, start: float):
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.to(x.dtype)


@register("transform", "{name}")
def {name}(model, start: float = 0.5):
    """A trained gain for what each sublayer adds to the stream.

    Args:
        start: of every gain.
    """
    for module in list(model.modules()):
        if isinstance(module, Sublayer):
            gain = Gain(start)
            module.out = gain if isinstance(module.out, nn.Identity) else nn.Sequential(module.out, gain)
'''

CALLBACK = '''"""A callback of your own: Lightning calls it between the parts of a step."""

from typing import Any

import pytorch_lightning as pl

from gptframe import register


@register("callback", "{name}")
class {Class}(pl.Callback):
    """Lowers the rate of every later step when the loss is worse than it has been.

    Args:
        factor: of the rate, each time.
    """

    def __init__(self, factor: float = 0.99):
        self.factor, self.best, self.scale = factor, float("inf"), 1.0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run is the same run."""
        return {{"best": self.best, "scale": self.scale}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.scale = state["best"], state["scale"]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        loss = float(pl_module.last_loss)
        if loss > self.best:
            self.scale *= self.factor
        self.best = min(self.best, loss)
        for group in optimizer.param_groups:
            group["lr"] *= self.scale
'''

INIT = '''"""An initialisation of your own: the standard deviation of each matrix."""

from gptframe import register


@register("init", "{name}")
def {name}(role: str, shape: tuple[int, ...], cfg, std: float = 0.02, embedding_std: float | None = None) -> float:
    """1 / sqrt(inputs), less for what writes to the stream of a deep model; embeddings and head as they are told.

    Args:
        std: of embeddings and head.
        embedding_std: of embeddings alone; null for `std`.
    """
    if role == "embedding" and embedding_std is not None:
        return embedding_std
    if role in ("embedding", "head"):
        return std
    return shape[1] ** -0.5 / ((2 * cfg.n_layers) ** 0.5 if role == "residual" else 1)
'''

TOKENIZER = '''"""A tokenizer of your own: text to ids below vocab_size, and back."""

from typing import Any

from gptframe import register
from gptframe.data.tokenizer import Source, Tokenizer


@register("tokenizer", "{name}")
class {Class}(Tokenizer):
    """Bytes, of which pairs of the same one count as one token; 0 ends a text.

    Args:
        pairs: whether pairs have ids of their own.
    """

    bos_id = eos_id = 0

    def __init__(self, source: Source, pairs: bool = True) -> None:
        self.pairs = pairs
        self.vocab_size = 1 + (512 if pairs else 256)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for byte in text.encode():
            if self.pairs and ids and ids[-1] == byte + 1:
                ids[-1] = byte + 257
            else:
                ids.append(byte + 1)
        return ids

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        text = b"".join(bytes([(i - 1) % 256]) * (2 if i > 256 else 1) for i in ids if i)
        return text.decode(errors="replace")

    def _state(self) -> dict[str, Any]:
        """From which the same tokenizer is made when a run is loaded."""
        return {{"pairs": self.pairs}}
'''

SECTION = "# @package model.{kind}\nname: {name}\n"
EXPERIMENT = "# @package _global_\nname: {name}\n"
TEMPLATES = {
    "sublayer": Template(
        "experiment",
        "# @package _global_\n# attention, the new sublayer, MLP; its options stand under model.{name}\n"
        "name: {name}\nmodel:\n  block: [attention, {name}, mlp]\n  {name}:\n    strength: 0.5\n",
        "experiment={name}",
        SUBLAYER,
    ),
    "attention_backend": Template(
        "experiment",
        EXPERIMENT + "model:\n  attention:\n    backend: {name}\n",
        "experiment={name}",
        BACKEND,
    ),
    "linear_backend": Template(
        "experiment",
        EXPERIMENT + "model:\n  linear:\n    backend: {name}\n",
        "experiment={name}",
        LINEAR,
    ),
    "norm": Template("norm", SECTION + "eps: 1.0e-5\n", "norm={name}", NORM),
    "activation": Template("activation", SECTION + "slope: 1.5\n", "activation={name}", ACTIVATION),
    "position": Template("position", SECTION + "size: 0.02\n", "position={name}", POSITION),
    "schedule": Template(
        "schedule",
        "name: {name}\nwarmup_steps: null     # null: round(warmup_fraction * trainer.max_steps)\n"
        "warmup_fraction: 0.05\noverlap_warmup: false\npower: 2.0\n",
        "schedule={name}",
        SCHEDULE,
    ),
    "optimizer": Template(
        "optimizer",
        "name: {name}\nlr: 0.1\nmomentum: 0.9\nweight_decay: 0.001\n",
        "optimizer={name}",
        OPTIMIZER,
    ),
    "topology": Template(
        "experiment",
        EXPERIMENT + "model:\n  topology:\n    name: {name}\n    strength: 0.1\n",
        "experiment={name}",
        TOPOLOGY,
    ),
    "head": Template(
        "experiment",
        EXPERIMENT + "model:\n  head:\n    name: {name}\n    weight: 1.0e-4\n",
        "experiment={name}",
        HEAD,
    ),
    "transform": Template(
        "experiment",
        EXPERIMENT + "model:\n  transforms:\n    {name}:\n      start: 0.5\n",
        "experiment={name}",
        TRANSFORM,
    ),
    "callback": Template(
        "experiment",
        EXPERIMENT + "callbacks:\n  extra:\n    {name}:\n      factor: 0.99\n",
        "experiment={name}",
        CALLBACK,
    ),
    "init": Template(
        "experiment",
        EXPERIMENT + "model:\n  init:\n    name: {name}\n    std: 0.02\n",
        "experiment={name}",
        INIT,
    ),
    "tokenizer": Template(
        "tokenizer",
        "# @package _global_\ntokenizer:\n  name: {name}\n  pairs: true\nmodel:\n"
        "  vocab_size: null   # as many as there are\n",
        "tokenizer={name}",
        TOKENIZER,
    ),
    "corpus": Template(
        "data", "name: {name}\nlargest: 60\n", "data={name} tokenizer=byte model.vocab_size=257", CORPUS
    ),
}

TEST = '''"""Every promise of a {kind}, tried."""

pytest_plugins = ["gptframe.testing.pytest_plugin"]


def test_{name}(conformance):
    conformance("{kind}", "{name}", plugin="{plugin}")
'''

PYPROJECT = """[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "{distribution}"
version = "0.1.0"
description = "The {kind} {name} for gptframe"
dependencies = ["gptframe"]

[project.entry-points."gptframe.plugins"]
{name} = "{package}.plugin"

[project.entry-points."gptframe.conf"]
{name} = "{package}.conf"

[tool.hatch.build.targets.wheel]
packages = ["src/{package}"]
"""
