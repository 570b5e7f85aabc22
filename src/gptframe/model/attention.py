"""Causal self-attention: multi-head, grouped-query and multi-query, with window, QK-norm and soft cap as switches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.model.call import call, call_each, part
from gptframe.model.context import Context
from gptframe.model.init import with_role
from gptframe.model.position import Position, position_at
from gptframe.registry import build, entry, lookup, register

Backend = Callable[[Tensor, Tensor, Tensor, "int | None", "Tensor | None"], "Tensor | None"]


@register("attention_backend", "sdpa")
class SDPA:
    """torch's scaled_dot_product_attention, for all that `Attention` can be asked for."""

    def __init__(self, cfg: ModelConfig):
        pass

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None) -> Tensor | None:
        """None: `Attention.attend` goes on with torch's."""
        return None


@register("sublayer", "attention")
class Attention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over the tokens up to and including each one (Vaswani et al., 2017).

    Args:
        n_kv_heads: heads of keys and values; null for n_heads. Fewer is grouped-query attention (Ainslie et al.,
            2023), 1 is multi-query attention (Shazeer, 2019).
        window: how many tokens each one sees, itself included (Mistral, 2023); null for all.
        qk_norm: `none`; `head` normalises each head's queries and keys (Qwen 3); `full` all heads together (OLMo 2).
        softcap: c in c * tanh(scores / c) (Gemma 2, 2024); null for none.
        bias: biases of queries, keys and values.
        out_bias: bias of the output projection; null for the same as `bias` (Qwen 2 has only the former three).
        head_dim: width of each head; null for d_model / n_heads. Of all layers alike.
        backend: what computes causal attention of whole texts; the rest (a cache, say) is torch's in any case.
    """

    incremental = True
    q, k, v, out = part(), part(), part(), part()
    q_norm, k_norm, position = part(), part(), part()

    def __init__(
        self,
        cfg: ModelConfig,
        layer: int,
        n_kv_heads: int | None = None,
        window: int | None = None,
        qk_norm: str = "none",
        softcap: float | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        head_dim: int | None = None,
        backend: str = "sdpa",
    ):
        super().__init__()
        if head_dim is not None and head_dim != cfg.head_dim:
            raise UserError(f"head_dim={head_dim} of one layer: give model.attention.head_dim, which holds for all")
        self.n_heads, self.head_dim = cfg.n_heads, cfg.head_dim
        self.n_kv_heads = cfg.n_heads if n_kv_heads is None else n_kv_heads
        if self.n_kv_heads < 1 or cfg.n_heads % self.n_kv_heads:
            raise UserError(f"model.n_heads={cfg.n_heads} is not divisible by model.attention.n_kv_heads={n_kv_heads}")
        if window is not None and window < 1:
            raise UserError(f"model.attention.window={window} must be at least 1: each token sees itself")
        if softcap is not None and not softcap > 0:
            raise UserError(f"model.attention.softcap={softcap} must be greater than 0")
        self.window, self.softcap, self.dropout = window, softcap, cfg.dropout

        q_dim, kv_dim = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q = nn.Linear(cfg.d_model, q_dim, bias=bias)
        self.k = nn.Linear(cfg.d_model, kv_dim, bias=bias)
        self.v = with_role(nn.Linear(cfg.d_model, kv_dim, bias=bias), "value")
        out_bias = bias if out_bias is None else out_bias
        self.out = with_role(nn.Linear(q_dim, cfg.d_model, bias=out_bias), "residual")
        dims = {"none": None, "head": (self.head_dim, self.head_dim), "full": (q_dim, kv_dim)}
        if qk_norm not in dims:
            raise UserError(f"model.attention.qk_norm={qk_norm!r} must be one of {', '.join(dims)}")
        self.norm_full = qk_norm == "full"
        self.q_norm, self.k_norm = (
            build("norm", cfg.norm, dim, key="model.norm") if dim else nn.Identity() for dim in dims[qk_norm] or (0, 0)
        )
        self.position = position_at("attention", cfg)
        lookup("attention_backend", backend, "model.attention.backend")  # its name is the whole option, not its `name`
        self.backend: Backend = build("attention_backend", {"name": backend}, cfg, key="model.attention.backend")
        self.backend_name = backend
        biased = type(self.position).score_bias is not Position.score_bias
        if backend != "sdpa" and (softcap is not None or biased or cfg.dropout):
            what = "model.attention.softcap" if softcap is not None else "model.dropout"
            what = f"position={cfg.position['name']}" if biased else what
            raise UserError(
                f"model.attention.backend={backend} would compute nothing beside {what}: leave one of them out"
            )

    def qkv(self, x: Tensor) -> Sequence[Tensor]:
        """What the three matrices make of x[B,T,D]: [B, T, H * d], and twice [B, T, Hk * d]."""
        return call_each(x, self.q, self.k, self.v)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B,H,T,d], keys and values [B,Hk,T,d] of x[B,T,D], before positions."""
        q, k, v = self.qkv(x)
        if self.norm_full:
            q, k = self.q_norm(q), self.k_norm(k)
        n_rows, n_tokens, _ = x.shape
        q, k, v = (
            t.view(n_rows, n_tokens, t.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2) for t in (q, k, v)
        )
        if not self.norm_full:
            q, k = call(self.q_norm, q), call(self.k_norm, k)
        return q, k, v

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.project(x, ctx)
        q, k = self.position.rotate(q, k, ctx)
        k_positions = ctx.positions
        if ctx.cache is not None:
            k, v = ctx.cache.append(self, k, v, self.window)
            k_positions = ctx.cache.positions
            if k_positions.shape[-1] > k.shape[2]:  # a window drops the oldest
                k_positions = k_positions[..., -k.shape[2] :]
        if q.dtype != v.dtype:  # a norm in float32 under autocast
            q, k = q.to(v.dtype), k.to(v.dtype)
        y = self.attend(q, k, v, ctx, k_positions)  # [B, H, T, d]
        return call(self.out, y.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, k_positions: Tensor) -> Tensor:
        """Mix v[B,Hk,S,d] by the pattern of q[B,H,T,d] and k[B,Hk,S,d]; returns [B,H,T,d]."""
        groups, n_queries, n_keys = self.n_heads // self.n_kv_heads, q.shape[2], k.shape[2]
        dropout = self.dropout if self.training else 0.0
        bias = self.position.score_bias(ctx.positions, k_positions)
        causal = bias is None and self.softcap is None and ctx.positions.ndim == 1
        plain = causal and ctx.documents is None
        if plain and n_queries == 1 and ctx.cache is not None:  # the newest token sees all that the cache hands out
            # the queries that share a head of keys stand where a text's tokens would: nothing is copied
            shared = q.reshape(q.shape[0], self.n_kv_heads, groups, -1)
            return F.scaled_dot_product_attention(shared, k, v, dropout_p=dropout).reshape(q.shape)
        window = None if self.window is None or self.window >= n_keys else self.window
        if causal and not dropout and n_queries == n_keys and (window is None or ctx.cache is None):
            y = self.backend(q, k, v, window, ctx.documents)
            if y is not None:
                if not isinstance(y, Tensor) or y.shape != q.shape:
                    got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
                    where = f"{self.backend_name!r} ({entry('attention_backend', self.backend_name).origin})"
                    raise UserError(f"attention_backend {where} returned {got} for queries of {list(q.shape)}")
                return y
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if plain and n_queries == n_keys and window is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        if ctx.cache is None:
            mask = self.mask(ctx, k_positions)
        else:
            mask = ctx.cache.shared(("mask", self.window, n_keys), lambda: self.mask(ctx, k_positions))
        if bias is not None:
            mask = bias.to(q.dtype).masked_fill(~mask, -math.inf)
        if self.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-1, -2)  # in this order float16 does not overflow
        scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        pattern = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
        return F.dropout(pattern, dropout) @ v

    def mask(self, ctx: Context, k_positions: Tensor) -> Tensor:
        """See `visible`."""
        return visible(ctx, k_positions, self.window)


def visible(ctx: Context, k_positions: Tensor, window: int | None = None) -> Tensor:
    """Bool, broadcastable to [B,H,T,S]: True where a query may look at a key.

    Keys up to the query's own position, of the same document, among the last `window`; padding looks at itself alone.

    Args:
        k_positions: Long[S] or Long[B,S], where the keys stand.
    """
    distance = ctx.positions[..., :, None] - k_positions[..., None, :]  # [T, S], or [B, T, S]
    mask = distance >= 0
    if distance.ndim == 3:  # padding, at positions below 0, is seen by padding alone
        mask = (mask & ((k_positions >= 0)[:, None, :] | (ctx.positions < 0)[:, :, None]))[:, None]
        distance = distance[:, None]
    if window is not None:
        mask = mask & (distance < window)
    if ctx.documents is not None:
        mask = mask & (ctx.documents[:, None, :, None] == ctx.documents[:, None, None, :])
    return mask
