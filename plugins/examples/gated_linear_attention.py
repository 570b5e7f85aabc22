"""A mixer of your own without softmax: what a token remembers of the past fades at a rate that the tokens choose.

python train.py plugins=[plugins/examples/gated_linear_attention.py] \
    'model.block=[gated_linear_attention,mlp]' position=none
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe import register
from gptframe.model.attention import visible
from gptframe.model.init import with_role


@register("sublayer", "gated_linear_attention")
class GatedLinearAttention(nn.Module):
    """y_t = sum over s <= t of (a_{s+1} ... a_t) (q_t k_s) v_s, with a gate a in (0, 1) for each head and token.

    Gated linear attention (Yang et al., 2023) with the scalar gate of Mamba-2 (Dao and Gu, 2024). Over a text the sum
    is one masked product, as in attention; of what came before, the state sum over s of (a_{s+1} ... a_t) k_s v_s^T is
    enough, whose size does not grow with the text.

    Args:
        keep: log-odds of the gate at the start; 4 keeps 98 % from one token to the next.
    """

    incremental = True
    parameter_formulas = {f"{n}.weight": "D*A*d" for n in ("q", "k", "v", "out")} | {"gate.weight": "D*A"}

    def __init__(self, cfg, layer: int, keep: float = 4.0):
        super().__init__()
        self.n_heads, self.head_dim, self.keep = cfg.n_heads, cfg.head_dim, keep
        width = cfg.n_heads * cfg.head_dim
        self.q, self.k = (nn.Linear(cfg.d_model, width, bias=False) for _ in range(2))
        self.v = with_role(nn.Linear(cfg.d_model, width, bias=False), "value")
        self.gate = nn.Linear(cfg.d_model, cfg.n_heads, bias=False)
        self.out = with_role(nn.Linear(width, cfg.d_model, bias=False), "residual")
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, ctx) -> Tensor:
        q, k, v = (
            t.view(*x.shape[:2], self.n_heads, self.head_dim).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x))
        )  # [B, A, T, d]
        wide = torch.promote_types(x.dtype, torch.float32)  # a sum of many logarithms
        gates = F.logsigmoid(self.gate(x).to(wide) + self.keep).transpose(1, 2)  # [B, A, T]
        if ctx.positions.ndim == 2:  # padding leaves the state as it is
            padding = (ctx.positions < 0)[:, None]
            gates, k = gates.masked_fill(padding, 0.0), k.masked_fill(padding[..., None], 0.0)
        faded = gates.cumsum(dim=-1)
        hidden = ~visible(ctx, ctx.positions)
        memory = (faded[..., :, None] - faded[..., None, :]).masked_fill(hidden, -math.inf).exp()  # [B, A, T, T]
        q = q / math.sqrt(self.head_dim)
        y = ((q @ k.transpose(-1, -2)).to(wide) * memory).to(v.dtype) @ v
        if ctx.cache is not None:
            left = (faded[..., -1:] - faded).exp()[..., None]  # of each token after the last one
            state = (k.to(wide) * left).transpose(-1, -2) @ v.to(wide)  # [B, A, d, d]
            known = ctx.cache.state(self)
            if known is not None:
                y = y + (faded.exp()[..., None] * (q.to(wide) @ known[0])).to(y.dtype)
                state = state + faded[..., -1].exp()[..., None, None] * known[0]
            ctx.cache.set_state(self, state)
        y = F.rms_norm(y, y.shape[-1:], eps=1e-5)  # the sum grows with the past
        return self.dropout(self.out(y.transpose(1, 2).flatten(2).to(x.dtype)))
