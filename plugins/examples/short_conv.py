"""A sublayer of your own: it reads the stream x[B,T,D] and returns what to add to it.

    python train.py plugins=[plugins/examples/short_conv.py] 'model.block=[attention,short_conv,mlp]'
    python train.py plugins=[plugins/examples/short_conv.py] 'model.block=[short_conv,attention,mlp]' \
        +model.short_conv.kernel=3
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe import UserError, register


@register("sublayer", "short_conv")
class ShortConv(nn.Module):
    """A causal convolution over the last few tokens, each channel on its own (H3, Fu et al., 2022).

    Args:
        kernel: how many tokens each one sees, itself included.
    """

    parameter_formulas = {"weight": "D*kernel"}  # what `gptframe params` shows and checks

    def __init__(self, cfg, layer: int, kernel: int = 4):
        super().__init__()
        if kernel < 1:
            raise UserError(f"model.short_conv.kernel={kernel} must be at least 1")
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(cfg.d_model, 1, kernel))
        self.init_weights(lambda name: torch.randn_like(self.weight))

    def init_weights(self, draw) -> None:
        """Standard normal values come from `draw`, keyed by the parameter's name, so that runs can be compared."""
        with torch.no_grad():
            self.weight.copy_(draw("weight") * 0.02)

    def forward(self, x: Tensor, ctx) -> Tensor:
        x = F.pad(x.transpose(1, 2), (self.kernel - 1, 0))  # [B, D, T + kernel - 1]: zeros before the first token
        return F.conv1d(x, self.weight, groups=self.weight.shape[0]).transpose(1, 2)
