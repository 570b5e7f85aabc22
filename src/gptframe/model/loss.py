"""Cross-entropy through the output head in chunks, so that the logits of a whole batch never exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from gptframe.model.linear import LinearBackend

IGNORED = -100
# Logits held at once. Several passes go over them: on a CPU a quarter of that stays nearer, as long as the rows suffice
# for the matrix products.
CHUNK_ELEMENTS = 2**24  # 64 MiB in float32
CPU_CHUNK_ELEMENTS, CPU_CHUNK_ROWS = 2**22, 128


def head_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None = None,
    backend: LinearBackend | None = None,
) -> Tensor:
    """Sum over tokens of -log softmax(cap(x weight^T))[target].

    The gradients are computed in the same pass over the chunks, so that backward recomputes nothing.

    Args:
        x: [..., D], any floating dtype; inside autocast the products run in its dtype.
        weight: [V, D].
        targets: Long [...]; tokens with target -100 count for nothing.
        softcap: c in cap(z) = c * tanh(z / c); None for the identity.
        backend: computes the products, as far as it takes them; None for torch.

    Returns:
        A scalar in float32 (float64 for float64 inputs).
    """
    mixed = torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
    if mixed:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if not torch.is_grad_enabled():  # an autograd.Function cannot see this, and gradients cost twice the loss
        x, weight = x.detach(), weight.detach()
    if not mixed and weight.dtype != x.dtype:  # a product of two dtypes is no backend's
        backend = None
    return _HeadCrossEntropy.apply(x.flatten(0, -2), weight, targets.flatten(), softcap, backend)


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, backend: LinearBackend | None
    ) -> Tensor:
        want_x, want_weight = ctx.needs_input_grad[:2]
        accumulate = torch.promote_types(x.dtype, torch.float32)
        w: Tensor | None = None  # the weight in the dtype of x, once torch multiplies by it
        # float16 has no room for probabilities below 6e-8 and for sums above 65504: keep away from both.
        scale, most_rows = (16.0, 1024) if x.dtype == torch.float16 else (1.0, CHUNK_ELEMENTS)
        total = torch.zeros((), dtype=accumulate, device=x.device)
        grad_x = torch.empty_like(x) if want_x else None
        grad_w: Tensor | None = None
        chunk = max(1, CHUNK_ELEMENTS // weight.shape[0])
        if x.device.type == "cpu":
            chunk = min(chunk, max(CPU_CHUNK_ROWS, CPU_CHUNK_ELEMENTS // weight.shape[0]))
        chunk = min(chunk, most_rows)
        for start in range(0, x.shape[0], chunk):
            xs, ts = x[start : start + chunk], targets[start : start + chunk]
            product = None if backend is None else backend.product(xs, weight)
            if product is None:
                w = weight.to(x.dtype) if w is None else w
                product = F.linear(xs, w)
            logits = product.to(accumulate)
            if softcap is not None:
                squashed = torch.tanh(logits / softcap)
                logits = softcap * squashed
            total += F.cross_entropy(logits, ts, ignore_index=IGNORED, reduction="sum")
            if not (want_x or want_weight):
                continue
            keep = ts != IGNORED
            grad = torch.softmax(logits, dim=-1)
            grad.scatter_add_(1, ts.clamp(min=0)[:, None], -torch.ones_like(ts, dtype=grad.dtype)[:, None])
            grad *= keep[:, None] * scale
            if softcap is not None:
                grad *= 1 - squashed.square()
            grad = grad.to(x.dtype)
            both = None
            if backend is not None and want_x and want_weight:
                both = backend.backward(grad, xs, weight if w is None else w)
            if grad_x is not None:
                if both is None:
                    w = weight.to(x.dtype) if w is None else w
                    grad_x[start : start + chunk] = grad @ w
                else:
                    grad_x[start : start + chunk] = both[0]
            if want_weight:
                part = grad.T @ xs if both is None else both[1]
                grad_w = part.to(accumulate) if grad_w is None else grad_w.add_(part)
        if want_weight and grad_w is None:  # not a single token
            grad_w = torch.zeros(weight.shape, dtype=accumulate, device=x.device)
        ctx.save_for_backward(grad_x, grad_w)
        ctx.scale, ctx.weight_dtype = scale, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_x, grad_w = ctx.saved_tensors
        factor = grad_output / ctx.scale
        return (
            None if grad_x is None else (grad_x * factor).to(grad_x.dtype),
            None if grad_w is None else (grad_w * factor).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
