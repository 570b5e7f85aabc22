"""Initialisation keyed by parameter name, so that two variants share every matrix that they have in common.

    role        who marks it                                normal              deepnorm (Wang et al., 2022)
    embedding   token and position embeddings               std (see below)     std (see below)
    head        the untied output head                      std                 std
    matrix      any other linear: queries, keys             std                 Xavier, gain 1
    value       values                                      std                 Xavier, gain (8 N)^(-1/4)
    hidden      the MLP's up and gate projections           std                 Xavier, gain (8 N)^(-1/4)
    residual    what writes to the stream                   std / sqrt(2 N)     Xavier, gain (8 N)^(-1/4)

N is n_layers. Biases start at 0; norms as their class leaves them. `std` is 0.02 (GPT-2). Embeddings take
min(std, 1 / d_model) when a norm ends the last sublayer and the head is tied: a post-norm stream still points along the
token's own embedding at the start, and d_model * std times that direction would otherwise be its logit.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.registry import build, lookup, register

M = TypeVar("M", bound=nn.Module)


def with_role(module: M, role: str) -> M:
    """Mark the weight of a linear or embedding with its role in the table above, and return the module."""
    module.role = role  # type: ignore[assignment]
    return module


def draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Standard normal values that depend on (seed, parameter name) and on nothing else; float32 on the CPU.

    NumPy's Philox stream is counter-based and the same on every machine, which torch's vectorised normal is not.
    """
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key[:16], dtype=np.uint64)))
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


@register("init", "normal")
def normal(role: str, shape: tuple[int, ...], cfg: ModelConfig, std: float = 0.02, embedding_std: float | None = None):
    """Radford et al. (GPT-2, 2019)."""
    for option, value in (("std", std), ("embedding_std", embedding_std)):
        if value is not None and not value > 0:
            raise UserError(f"model.init.{option}={value} must be greater than 0")
    if role == "embedding":
        return _embedding_std(cfg, std) if embedding_std is None else embedding_std
    return std / (2 * cfg.n_layers) ** 0.5 if role == "residual" else std


@register("init", "deepnorm")
def deepnorm(
    role: str, shape: tuple[int, ...], cfg: ModelConfig, std: float = 0.02, embedding_std: float | None = None
):
    """Wang et al. (DeepNet, 2022), decoder-only."""
    if role in ("embedding", "head"):
        return normal(role, shape, cfg, std, embedding_std)
    gain = 1.0 if role == "matrix" else (8 * cfg.n_layers) ** -0.25
    return gain * (2 / (shape[0] + shape[1])) ** 0.5


def _embedding_std(cfg: ModelConfig, std: float) -> float:
    ends_in_norm = lookup("norm_placement", cfg.norm_placement["name"], "model.norm_placement.name").post
    return min(std, 1 / cfg.d_model) if ends_in_norm and cfg.tie_head else std


@torch.no_grad()
def initialize(model: nn.Module, cfg: ModelConfig, seed: int) -> None:
    """Fill the parameters of `model` in place.

    Weights of linears and embeddings follow the table; a module with other random parameters defines
    `init_weights(draw)`, where `draw(name)` gives standard normal values for its own parameter of that name; any other
    parameter keeps what its constructor gave it.
    """
    for module_name, module in model.named_modules():
        prefix = module_name + "." if module_name else ""
        if hasattr(module, "init_weights"):
            module.init_weights(
                lambda name, prefix=prefix, module=module: draw(prefix + name, getattr(module, name).shape, seed)
            )
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            role = getattr(module, "role", "matrix")
            std = build("init", cfg.init, role, tuple(module.weight.shape), cfg, key="model.init")
            module.weight.copy_(draw(prefix + "weight", tuple(module.weight.shape), seed).mul_(std))
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
