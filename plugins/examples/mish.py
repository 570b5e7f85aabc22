"""An activation of your own: a class with a forward.

python train.py plugins=[plugins/examples/mish.py] model.activation.name=mish
"""

import torch.nn.functional as F
from torch import Tensor, nn

from gptframe import register


@register("activation", "mish")
class Mish(nn.Module):
    """x tanh(softplus(x)) (Misra, 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.mish(x)
