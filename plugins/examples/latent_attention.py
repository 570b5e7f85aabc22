"""Attention whose cache is small: keys and values of all heads are read out of one short vector a token.

python train.py plugins=[plugins/examples/latent_attention.py] 'model.block=[latent_attention,mlp]'
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe import UserError, register
from gptframe.model.attention import visible
from gptframe.model.init import with_role
from gptframe.model.position import position_at


@register("sublayer", "latent_attention")
class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024): k = U_k c, v = U_v c, with c = norm(W x) of width `rank`.

    Rotation does not commute with U_k, so that positions go into queries and one key of their own beside it, which all
    heads share. The cache holds rank + head_dim numbers a token, where attention holds 2 heads * head_dim.

    Args:
        rank: width of the latent; null for 4 head_dim, as in the paper.
    """

    incremental = True

    @staticmethod
    def parameter_formulas(cfg, rank: int | None = None) -> dict[str, str]:
        r = "4*d" if rank is None else "rank"
        wide = dict.fromkeys(("q.weight", "q_position.weight", "out.weight"), "D*A*d")
        return (
            wide
            | {"latent.weight": f"D*{r}", "k_position.weight": "D*d"}
            | dict.fromkeys(("k.weight", "v.weight"), f"{r}*A*d")
        )

    def __init__(self, cfg, layer: int, rank: int | None = None):
        super().__init__()
        rank = 4 * cfg.head_dim if rank is None else rank
        if rank < 1:
            raise UserError(f"model.latent_attention.rank={rank} must be at least 1")
        self.n_heads, self.head_dim, self.dropout, width = (
            cfg.n_heads,
            cfg.head_dim,
            cfg.dropout,
            cfg.n_heads * cfg.head_dim,
        )
        self.q, self.q_position = (nn.Linear(cfg.d_model, width, bias=False) for _ in range(2))
        self.latent = nn.Linear(cfg.d_model, rank, bias=False)
        self.k_position = nn.Linear(cfg.d_model, cfg.head_dim, bias=False)
        self.k = nn.Linear(rank, width, bias=False)
        self.v = with_role(nn.Linear(rank, width, bias=False), "value")
        self.out = with_role(nn.Linear(width, cfg.d_model, bias=False), "residual")
        self.position = position_at("attention", cfg)

    def heads(self, t: Tensor) -> Tensor:
        """[B, T, A * d] as [B, A, T, d]."""
        return t.view(*t.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, ctx) -> Tensor:
        latent = self.latent(x)
        latent = F.rms_norm(latent, latent.shape[-1:], eps=1e-5)[:, None]  # [B, 1, T, r]
        q_place, k_place = self.position.rotate(self.heads(self.q_position(x)), self.heads(self.k_position(x)), ctx)
        k_positions = ctx.positions
        if ctx.cache is not None:
            latent, k_place = ctx.cache.append(self, latent, k_place)
            k_positions = ctx.cache.positions
        k, v = self.heads(self.k(latent[:, 0])), self.heads(self.v(latent[:, 0]))  # [B, A, S, d]
        q = torch.cat([self.heads(self.q(x)), q_place.to(k.dtype)], dim=-1)  # [B, A, T, 2d]
        k = torch.cat([k, k_place.to(k.dtype).expand_as(k)], dim=-1)
        mask = visible(ctx, k_positions)
        bias = self.position.score_bias(ctx.positions, k_positions)
        if bias is not None:
            mask = bias.to(q.dtype).masked_fill(~mask, float("-inf"))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out(y.transpose(1, 2).flatten(2))
