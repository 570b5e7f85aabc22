"""An attention that reads the tokens themselves once more: a second embedding, added to the values.

    python train.py plugins=[plugins/examples/value_embedding.py] 'model.block=[value_attention,mlp]'

It needs two things of the framework: `ctx.ids`, and one method of `Attention` to replace.
"""

import torch
from torch import Tensor, nn

from gptframe import register
from gptframe.model.attention import Attention


@register("sublayer", "value_attention")
class ValueAttention(Attention):
    """Attention with values v + s E[token], s trained (value embeddings of the modded-nanogpt speed runs, 2024, after
    value residual learning, Zhou et al., 2024).

    Args:
        strength: s at the start.
    """

    def __init__(self, cfg, layer: int, strength: float = 0.5):
        super().__init__(cfg, layer)
        self.table = nn.Embedding(cfg.vocab_size, self.n_kv_heads * self.head_dim)
        self.strength = nn.Parameter(torch.full((1,), strength))

    def project(self, x: Tensor, ctx) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, ctx)
        extra = self.table(ctx.ids).view(*x.shape[:2], self.n_kv_heads, self.head_dim).transpose(1, 2)
        return q, k, v + (self.strength * extra).to(v.dtype)
