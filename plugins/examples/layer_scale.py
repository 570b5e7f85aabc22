"""A gain for what each sublayer adds to the stream: a transform that fills a seat of every sublayer.

python train.py plugins=[plugins/examples/layer_scale.py] +model.transforms.layer_scale.start=0.1
"""

import torch
from torch import Tensor, nn

from gptframe import register
from gptframe.model.block import Sublayer


class Scale(nn.Module):
    """gain * x, one gain a channel."""

    def __init__(self, dim: int, start: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


@register("transform", "layer_scale")
def layer_scale(model, start: float = 0.1):
    """LayerScale (Touvron et al., CaiT, 2021): after the norm on a delta, if there is one.

    Args:
        start: of every gain; the deeper the model, the smaller.
    """
    for module in list(model.modules()):
        if isinstance(module, Sublayer):
            scale = Scale(model.cfg.d_model, start)
            module.out = scale if isinstance(module.out, nn.Identity) else nn.Sequential(module.out, scale)
