"""Trains a model by small matrices beside its own, which stay as they are: a transform of the whole model.

    python train.py run_dir=runs/base
    python train.py plugins=[plugins/examples/lora.py] init_from=runs/base +model.transforms.lora.rank=4

Checkpoints hold both; `gptframe generate` and `gptframe evaluate` take such a run as any other.
"""

import fnmatch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe import UserError, register


class LoRALinear(nn.Linear):
    """y = x W^T + bias + (alpha / rank) x A^T B^T, with W and bias frozen (Hu et al., LoRA, 2021)."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = base.in_features, base.out_features, alpha / rank
        self.weight, self.bias = base.weight, base.bias  # under their old names, so that weights load as before
        if hasattr(base, "role"):
            self.role = base.role
        self.lora = Adapter(base.in_features, base.out_features, rank)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * self.lora(x)


class Adapter(nn.Module):
    """x A^T B^T; B starts at 0, so that the model starts as it was."""

    def __init__(self, n_in: int, n_out: int, rank: int):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(rank, n_in))
        self.b = nn.Parameter(torch.zeros(n_out, rank))

    def init_weights(self, draw) -> None:
        self.a.copy_(draw("a") * self.a.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a), self.b)


@register("transform", "lora")
def lora(model, rank: int = 8, alpha: float = 16.0, targets: str = "*"):
    """Freeze the model, and put a trained pair of matrices beside linears of its blocks.

    Args:
        rank: width of the pair.
        alpha: the pair counts alpha / rank times.
        targets: which linears, as a pattern: `*attention*`, `*.q`, ...
    """
    if rank < 1:
        raise UserError(f"model.transforms.lora.rank={rank} must be at least 1")
    linears = [(n, m) for n, m in model.blocks.named_modules() if type(m) is nn.Linear]
    chosen = [(n, m) for n, m in linears if fnmatch.fnmatchcase(f"blocks.{n}", targets)]
    if not chosen:
        known = ", ".join(f"blocks.{n}" for n, _ in linears[:4])
        raise UserError(f"model.transforms.lora.targets={targets!r} matches no linear. There are {known}, ...")
    model.requires_grad_(False)
    for name, linear in chosen:
        model.blocks.set_submodule(name, LoRALinear(linear, rank, alpha))
