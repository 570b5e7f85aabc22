"""Checks of attention backends: the values and gradients of the formula, for whatever they take upon themselves."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import torch
from torch import Tensor

from gptframe.errors import UserError
from gptframe.testing.kit import Failure, check, raised
from gptframe.testing.subject import Subject, shape

# heads of queries, heads of keys, tokens, window, several documents
CASES = (
    (2, 2, 1, None, False),
    (2, 2, 16, None, False),
    (4, 2, 33, None, False),
    (4, 1, 70, None, False),
    (2, 2, 33, 5, False),
    (4, 2, 70, None, True),
    (2, 1, 70, 9, True),
)
ARGUMENTS = "(q, k, v, window, documents)"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def formula(q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over what each query may see (Vaswani et al., 2017), [B,H,T,d]."""
    groups, tokens = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    distance = tokens[:, None] - tokens[None, :]
    seen = (distance >= 0) & (distance < (window or len(tokens)))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return torch.softmax(scores, -1) @ v


def made(s: Subject, arguments: str) -> Any:
    """The backend that the subject gives, a function of `arguments`."""
    cfg = dataclasses.replace(s.cfg, d_model=16 * s.cfg.n_heads)
    try:
        backend = s.value(cfg, **s.options)
    except UserError:
        raise  # the options or the sizes that a person gave
    except Exception as error:
        raise raised(error, s, "the constructor") from None
    try:
        pickle.loads(pickle.dumps(backend))  # a model is copied and pickled with it
    except Exception as error:
        raise raised(error, s, "pickling", cause="a class instead of a function within a function") from None
    if not callable(backend):
        raise Failure(f"it gave {type(backend).__name__} where a function of {arguments} is wanted")
    return backend


def _inputs(case: tuple[int, int, int, int | None, bool], dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    heads, kv_heads, tokens, _, several = case
    generator = torch.Generator().manual_seed(5)
    # as a model lays them out: the heads of a token side by side
    made = [torch.randn(2, tokens, n, 16, generator=generator) for n in (heads, kv_heads, kv_heads)]
    documents = (torch.arange(tokens) // 13).repeat(2, 1) + torch.tensor([[0], [1]]) if several else None
    return [t.to(dtype).transpose(1, 2) for t in made], documents


@check("attention_backend", name="contract")
def backend_contract(s: Subject) -> str:
    """gives the attention of the formula, or None, for every number of heads, tokens, window and documents"""
    backend, taken = made(s, ARGUMENTS), 0
    for dtype in TOLERANCE:
        for case in CASES:
            (q, k, v), documents = _inputs(case, dtype)
            label = f"q {shape(q)}, k {shape(k)}, window={case[3]}, documents={case[4]}, {str(dtype)[6:]}"
            try:
                y = backend(q, k, v, case[3], documents)
            except Exception as error:
                raise raised(error, s, "the call", smallest=label) from None
            if y is None:
                continue
            taken += 1
            if not isinstance(y, Tensor) or y.shape != q.shape or y.dtype != dtype:
                got = f"{list(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
                raise Failure(f"it returned {got} where {list(q.shape)} {dtype} is wanted", smallest=label)
            wanted = formula(q.double(), k.double(), v.double(), case[3], documents)
            away = float((y.double() - wanted).abs().max())
            if not away <= TOLERANCE[dtype]:
                raise Failure(f"a value is {away:.2g} away from the formula", smallest=label, cause="mask or scale")
    return f"{taken} of {len(TOLERANCE) * len(CASES)} cases; the rest is left to torch"


@check("attention_backend")
def backend_gradients(s: Subject) -> str:
    """gives the gradients of the formula for queries, keys and values"""
    backend = made(s, ARGUMENTS)
    for dtype, tolerance in TOLERANCE.items():
        for case in CASES:
            inputs, documents = _inputs(case, dtype)
            leaves = [t.detach().requires_grad_() for t in inputs]
            y = backend(*leaves, case[3], documents)
            if y is None:
                continue
            label = (
                f"q {shape(leaves[0])}, k {shape(leaves[1])}, window={case[3]}, documents={case[4]}, {str(dtype)[6:]}"
            )
            exact = [t.detach().double().requires_grad_() for t in inputs]
            weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
            try:
                got = torch.autograd.grad(y, leaves, weight.to(dtype))
            except Exception as error:
                raise raised(error, s, "the backward pass", smallest=label) from None
            target = formula(exact[0], exact[1], exact[2], case[3], documents)
            wanted = torch.autograd.grad(target, exact, weight.to(dtype).double())
            for name, g, w in zip("qkv", got, wanted, strict=True):
                away = float((g.double() - w).abs().max() / w.abs().max().clamp(min=1.0))
                if not away <= tolerance:
                    raise Failure(f"the gradient of {name} is {away:.2g} away from the formula's", smallest=label)
    return ""
