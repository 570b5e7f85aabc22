"""A norm of your own that normalises nothing: it squashes each value by itself.

python train.py plugins=[plugins/examples/dyt.py] --config-dir plugins/examples/conf norm=dyt
"""

import torch
from torch import Tensor, nn

from gptframe import UserError, register


@register("norm", "dyt")
class DyT(nn.Module):
    """gain * tanh(alpha * x) + bias (Zhu et al., Transformers without Normalization, 2025).

    Args:
        alpha: slope at the start; it is trained.
    """

    parameter_formulas = {"alpha": "1", "gain": "dim", "bias": "dim"}

    def __init__(self, dim: int, alpha: float = 0.5):
        super().__init__()
        if not alpha > 0:
            raise UserError(f"model.norm.alpha={alpha} must be greater than 0")
        self.alpha = nn.Parameter(torch.full((1,), alpha))
        self.gain = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        alpha, gain, bias = (p.to(x.dtype) for p in (self.alpha, self.gain, self.bias))
        return gain * torch.tanh(alpha * x) + bias
