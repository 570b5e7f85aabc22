"""A sublayer of your own: it reads the stream x[B,T,D] and returns what to add to it.

    python train.py plugins=[plugins/examples/short_conv.py] 'model.block=[attention,short_conv,mlp]'
    python train.py plugins=[plugins/examples/short_conv.py] 'model.block=[short_conv,attention,mlp]' \
        +model.short_conv.kernel=3
"""

import torch
from torch import Tensor, nn

from gptframe import UserError, register


@register("sublayer", "short_conv")
class ShortConv(nn.Module):
    """A causal convolution over the last few tokens, each channel on its own (H3, Fu et al., 2022).

    When generating it keeps the last kernel - 1 tokens of the stream, and no more.

    Args:
        kernel: how many tokens each one sees, itself included.
    """

    incremental = True  # the tokens before x lie in ctx.cache, and padding counts as nothing
    parameter_formulas = {"weight": "D*kernel"}  # what `gptframe params` shows and checks

    def __init__(self, cfg, layer: int, kernel: int = 4):
        super().__init__()
        if kernel < 1:
            raise UserError(f"model.short_conv.kernel={kernel} must be at least 1")
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(cfg.d_model, kernel))
        self.init_weights(lambda name: torch.randn_like(self.weight))

    def init_weights(self, draw) -> None:
        """Standard normal values come from `draw`, keyed by the parameter's name, so that runs can be compared."""
        with torch.no_grad():
            self.weight.copy_(draw("weight") * 0.02)

    def forward(self, x: Tensor, ctx) -> Tensor:
        if ctx.positions.ndim == 2:
            x = x.masked_fill((ctx.positions < 0)[..., None], 0.0)
        known = ctx.cache.state(self) if ctx.cache is not None else None
        before = x.new_zeros(x.shape[0], self.kernel - 1, x.shape[2]) if known is None else known[0]
        whole = torch.cat([before, x], dim=1)  # [B, kernel - 1 + T, D]
        if ctx.cache is not None:
            ctx.cache.set_state(self, whole[:, x.shape[1] :])
        y = torch.zeros_like(x)
        for back in range(self.kernel):  # the token so many places before each one
            start = self.kernel - 1 - back
            seen = whole[:, start : start + x.shape[1]]
            if ctx.documents is not None and 0 < back < x.shape[1]:
                same = ctx.documents[:, back:] == ctx.documents[:, :-back]
                seen = torch.cat([seen[:, :back], seen[:, back:].masked_fill(~same[..., None], 0.0)], dim=1)
            y = y + seen * self.weight[:, back].to(x.dtype)
        return y
