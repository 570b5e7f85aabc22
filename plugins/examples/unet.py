"""A block of your own: the later half of the stack gets the streams of the earlier half again, the last one first.

python train.py plugins=[plugins/examples/unet.py] model.topology=unet model.n_layers=4
"""

import torch
from torch import Tensor, nn

from gptframe import UserError, register
from gptframe.model.block import Block


@register("topology", "unet")
class UNetBlock(Block):
    """x + s * (the stream after block n - 1 - i), then the sublayers of block i, for i >= n / 2; s is trained
    (the modded-nanogpt speed runs, 2024, after U-Net, Ronneberger et al., 2015).

    Args:
        strength: s at the start.
    """

    def __init__(self, cfg, layer: int, residual_scale: float, strength: float = 1.0):
        super().__init__(cfg, layer, residual_scale)
        self.layer, self.partner = layer, cfg.n_layers - 1 - layer
        self.skip = nn.Parameter(torch.full((1,), strength)) if self.partner < layer else None

    @staticmethod
    def check(cfg) -> None:
        if cfg.n_layers < 2:
            raise UserError("model.topology=unet needs at least two layers: model.n_layers=2")

    def forward(self, x: Tensor, ctx) -> Tensor:
        if self.skip is not None:
            x = x + self.skip.to(x.dtype) * ctx.shared[f"unet.{self.partner}"]
        x = super().forward(x, ctx)
        ctx.shared[f"unet.{self.layer}"] = x
        return x
