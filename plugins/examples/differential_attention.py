"""An attention of your own, which works with every position and with the cache.

python train.py plugins=[plugins/examples/differential_attention.py] 'model.block=[differential_attention,mlp]'
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe import UserError, register
from gptframe.model.attention import visible
from gptframe.model.init import with_role
from gptframe.model.position import position_at

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@register("sublayer", "differential_attention")
class DifferentialAttention(nn.Module):
    """(softmax(q1 k1) - lambda softmax(q2 k2)) v, heads in pairs (Ye et al., Differential Transformer, 2024).

    What both patterns of a pair have in common cancels, as noise does in a differential amplifier.
    """

    incremental = True  # positions come from ctx, and keys and values go through its cache
    parameter_formulas = {f"{n}.weight": "D*A*d" for n in ("q", "k", "v", "out")} | dict.fromkeys(LAMBDAS, "d")

    def __init__(self, cfg, layer: int):
        super().__init__()
        if cfg.n_heads % 2:
            raise UserError(f"differential_attention pairs heads: model.n_heads={cfg.n_heads} must be even")
        self.n_heads, self.head_dim, self.dropout = cfg.n_heads, cfg.head_dim, cfg.dropout
        width = cfg.n_heads * cfg.head_dim
        self.q, self.k = (nn.Linear(cfg.d_model, width, bias=False) for _ in range(2))
        self.v = with_role(nn.Linear(cfg.d_model, width, bias=False), "value")
        self.out = with_role(nn.Linear(width, cfg.d_model, bias=False), "residual")
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        for name in LAMBDAS:
            setattr(self, name, nn.Parameter(torch.zeros(cfg.head_dim)))
        self.position = position_at("attention", cfg)

    def init_weights(self, draw) -> None:
        for name in LAMBDAS:
            getattr(self, name).copy_(draw(name) * 0.1)

    def forward(self, x: Tensor, ctx) -> Tensor:
        def heads(t: Tensor, n: int) -> Tensor:
            return t.view(*x.shape[:2], n, t.shape[-1] // n).transpose(1, 2)

        q, k = heads(self.q(x), self.n_heads), heads(self.k(x), self.n_heads)  # [B, A, T, d]
        v = heads(self.v(x), self.n_heads // 2)  # [B, A/2, T, 2d]: one for both heads of a pair
        q, k = self.position.rotate(q, k, ctx)
        k_positions = ctx.positions
        if ctx.cache is not None:
            k, v = ctx.cache.append(self, k, v)
            k_positions = ctx.cache.positions
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)  # [B, A, T, S]
        bias = self.position.score_bias(ctx.positions, k_positions)
        scores = scores if bias is None else scores + bias.to(scores.dtype)
        pattern = scores.masked_fill(~visible(ctx, k_positions), -math.inf).softmax(dim=-1).to(v.dtype)
        first, second = F.dropout(pattern, self.dropout, self.training).unflatten(1, (-1, 2)).unbind(dim=2)
        mixed = (first - self.factor().to(v.dtype) * second) @ v  # [B, A/2, T, 2d]
        mixed = F.rms_norm(mixed, mixed.shape[-1:], eps=1e-5) * (1 - self.start)
        return self.out(mixed.transpose(1, 2).flatten(2).to(x.dtype))

    def factor(self) -> Tensor:
        """lambda, a scalar; `start` at first, less in the early layers."""
        one = torch.exp((self.lambda_q1 * self.lambda_k1).sum())
        return one - torch.exp((self.lambda_q2 * self.lambda_k2).sum()) + self.start
