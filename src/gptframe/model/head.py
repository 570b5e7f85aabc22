"""The output head: from the normalised stream to logits, or to the loss without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe.config import ModelConfig
from gptframe.model.call import product
from gptframe.model.context import Context
from gptframe.model.loss import IGNORED, head_cross_entropy
from gptframe.registry import register

if TYPE_CHECKING:
    from gptframe.model.linear import LinearBackend


@register("head", "linear")
class Head(nn.Module):
    """logits = cap(x W^T), with W the token embedding where the head is tied; a head of your own derives from it.

    Attributes:
        chunked: let no more logits exist at once than the loss of a chunk needs, and compute their gradients there.
        streamed: read the matrix at the speed of the memory, for generation (`gptframe.model.call.product`).
        backend: multiplies by the matrix (`gptframe.model.linear`); None for torch.
    """

    chunked, streamed = True, False
    backend: LinearBackend | None = None

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.softcap = cfg.logit_softcap

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits [..., V] of the normalised stream x[..., D] and weight[V, D]."""
        logits = product(x, weight, None, self.streamed, self.backend)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def loss(self, x: Tensor, weight: Tensor, targets: Tensor, ctx: Context) -> Tensor:
        """The SUM over tokens of the cross-entropy of the logits, in nats; targets Long[B,T], -100 is ignored.

        What a head trains besides (as other tokens further ahead) goes through `ctx.add_loss`.
        """
        if self.chunked:
            return head_cross_entropy(x, weight, targets, self.softcap, self.backend)
        logits = self(x, weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
