"""The attention backend `flash_cpu`: the operators gptframe_attention::*, their derivatives, and what they leave.

The kernels work block by block and keep no scores (Dao, 2023: FlashAttention-2), with AVX2, AVX-512, AVX-512 with
bfloat16, or AMX.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe_gelu_cuda import backend, ops

log = logging.getLogger("gptframe.flash_cpu")

_NAMESPACE = "gptframe_attention"
_library = torch.library.Library(_NAMESPACE, "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? first, int window) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? first, int window)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_ops = torch.ops.gptframe_attention
DTYPES = (torch.float32, torch.bfloat16)


def _token_major(like: Tensor) -> Tensor:
    """Uninitialised [B,H,T,D] that lies in memory as [B,T,H,D]."""
    rows, heads, tokens, width = like.shape
    return like.new_empty((rows, tokens, heads, width)).transpose(1, 2)


@torch.library.register_fake(f"{_NAMESPACE}::attention", lib=_library)
def _fake(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, window: int) -> tuple[Tensor, Tensor]:
    return _token_major(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake(f"{_NAMESPACE}::attention_backward", lib=_library)
def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: Tensor | None, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _token_major(q), _token_major(k), _token_major(v)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, first, window = inputs
    ctx.save_for_backward(q, k, v, *output, first)
    ctx.window = window
    ctx.mark_non_differentiable(output[1])


def _grad(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, first = ctx.saved_tensors
    return (*_ops.attention_backward(grad, q, k, v, out, lse, first, ctx.window), None, None)


def _no_second(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError("flash_cpu is differentiable once; use model.attention.backend=sdpa for second derivatives")


torch.library.register_autograd(f"{_NAMESPACE}::attention", _grad, setup_context=_setup, lib=_library)
torch.library.register_autograd(f"{_NAMESPACE}::attention_backward", _no_second, lib=_library)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, first: Tensor | None = None) -> Tensor:
    """Causal softmax(q k^T / sqrt(D)) v (Vaswani et al., 2017), differentiable once.

    Args:
        q: [B,H,T,D] of any strides, float32 or bfloat16, D a multiple of 16.
        k: [B,Hk,T,D], Hk a divisor of H (Ainslie et al., 2023). v: the same.
        window: how many keys a query sees, itself included; None for all.
        first: Int[B,T], the first key that each query sees, at most itself (int32, contiguous).

    Returns:
        [B,H,T,D], in memory [B,T,H,D].

    Raises:
        BackendError: the kernels cannot be had here.
        RuntimeError: shapes, dtypes or devices do not fit, or a query would see no key.
    """
    backend.require_attention()
    if window is not None and window < 1:
        raise RuntimeError(f"attention: window={window} must be at least 1: each query sees itself")
    return _ops.attention(q, k, v, first, window or 0)[0]


def first_keys(documents: Tensor) -> Tensor:
    """Int[B,T]: where the document of each token begins, from their numbers Long[B,T], equal ones side by side."""
    changed = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    tokens = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(changed, tokens, 0).cummax(dim=1).values.int()


class FlashCPU(nn.Module):
    """Causal attention on a CPU; what it cannot compute it leaves to torch, and says so once.

    Raises:
        BackendError: the kernels cannot be had here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}  # device -> dtype of what torch computed
        backend.require_attention()

    def manifest(self) -> dict[str, str]:
        """What ran, for the run's manifest: the instruction set, and where the kernels came from; or what did not."""
        if self.left:
            return {f"attention on {device}": f"torch ({dtype}, not flash_cpu)" for device, dtype in self.left.items()}
        return {"attention on cpu": f"flash_cpu ({backend.require_attention()})"}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None) -> Tensor | None:
        """[B,H,T,d] of q[B,H,T,d], k and v[B,Hk,T,d]; None for what is left to torch."""
        if not (q.device.type == "cpu" and q.dtype in DTYPES and q.dtype == k.dtype == v.dtype):
            if q.device.type != "meta" and not torch.compiler.is_compiling():
                self.left[q.device.type] = str(q.dtype)[6:]
                backend.say(log, f"torch computes attention in {str(q.dtype)[6:]} on {q.device.type}, not flash_cpu")
            return None
        if ops.transformed():
            return None
        first = None if documents is None else first_keys(documents)
        return _ops.attention(q, k, v, first, window or 0)[0]
