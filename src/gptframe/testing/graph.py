"""Checks of how a part runs: compiled, on another device, and at what cost."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptframe.errors import UserError
from gptframe.testing.kit import MODEL_KINDS, Failure, Skip, check, raised
from gptframe.testing.subject import Harness, Subject, randomized, run, shape


@check(*MODEL_KINDS)
def device(s: Subject) -> str:
    """everything is made on the device of the input (rehearsed without a GPU)"""
    harness, x = s.build(), s.x(2, min(5, s.context))
    cause = "a tensor is made on the CPU: pass device=x.device, or register_buffer what is made in __init__"
    with FakeTensorMode(allow_non_fake_inputs=False) as fake:
        for name, p in list(harness.named_parameters()):
            _set(harness, name, nn.Parameter(_on_gpu(p, fake), p.requires_grad))
        for name, b in list(harness.named_buffers()):
            _set(harness, name, _on_gpu(b, fake))
        try:
            y = harness(_on_gpu(x, fake))
        except Exception as error:
            text = str(error)
            if "device" in text or "FakeTensor" in text:
                raise raised(
                    error, s, "with weights and input on a GPU, forward", cause, f"{shape(x)} on a GPU"
                ) from None
            raise Skip(f"cannot be rehearsed: {type(error).__name__}") from None
        if y.device.type != "cuda":
            raise Failure(f"input on cuda, output on {y.device.type}", smallest=shape(x), cause=cause)
    return ""


def _on_gpu(x: Tensor, fake: FakeTensorMode) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cuda")


def _set(harness: nn.Module, name: str, value: Tensor) -> None:
    owner = harness.get_submodule(name.rpartition(".")[0])
    last = name.rpartition(".")[2]
    tables: Any = (owner._parameters, owner._buffers)
    tables[0 if last in owner._parameters else 1][last] = value


@check(*MODEL_KINDS)
def compiles(s: Subject) -> str:
    """torch.compile makes one graph of it, and not a new one for each batch size"""
    import torch._dynamo as dynamo

    harness = randomized(s.build()).eval()
    graphs = 0

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    dynamo.reset()
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its own notice that a limit was reached says less than our failure
    compiled = torch.compile(harness, fullgraph=True, backend=backend)
    sizes = (2, 3, 5, 7)
    try:
        for size in sizes:
            x = s.x(size, min(5, s.context))
            try:
                y = compiled(x)
            except dynamo.exc.TorchDynamoException as error:
                text = " ".join(str(error).split("\n\n")[0].split())
                raise Failure(
                    f"torch.compile cannot take it as one graph: {text[:160]}",
                    smallest=shape(x),
                    where=_where(s, error),
                    cause="forward looks at values (.item(), if on a tensor, print, numpy) or keeps state: use "
                    "torch.where and tensor operations",
                ) from None
            if not torch.allclose(y, harness(x), rtol=1e-4, atol=1e-5):
                raise Failure(f"compiled, it gives another result for {shape(x)}", smallest=shape(x))
        if graphs > 2:  # the second is the one for any size
            raise Failure(
                f"batches of {', '.join(map(str, sizes))} made {graphs} graphs; 2 are enough: one size, then any",
                smallest=f"x[{sizes[0]}, ...] to x[{sizes[2]}, ...]",
                cause="a Python number that follows the batch or changes at each call: an attribute, a counter, "
                "a key of a dict",
            )
    finally:
        dynamo.reset()
        logger.setLevel(level)
    return f"{graphs} graphs for {len(sizes)} batch sizes" if graphs != 1 else "one graph"


def _where(s: Subject, error: Exception) -> str:
    import re

    found = re.findall(rf'File "{re.escape(s.file)}", line (\d+)', str(error))
    return f"{s.file}:{found[-1]}" if found else ""


def _flops(harness: Harness, x: Tensor) -> int:
    # fused attention kernels of the CPU are not counted; their plain form is
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(harness, x)
    return counter.get_total_flops()


@check("sublayer")
def cost(s: Subject) -> str:
    """FLOPs and time a token, against an MLP of the same size; they grow no faster than attention's"""
    harness = s.build().eval()
    n = s.context
    short, long, wide = (_flops(harness, s.x(b, t)) for b, t in ((1, n // 2), (1, n), (4, n)))
    matrices = sum(p.numel() for p in harness.parameters() if p.ndim > 1)
    if wide > 4.5 * long:
        raise Failure(
            f"4 sequences cost {wide / max(long, 1):.1f} times the FLOPs of one",
            smallest=f"x[4, {n}, {s.dim}]",
            cause="work is done across the batch",
        )
    quadratic = 16 * s.dim  # scores and mix take 4 * width a pair of tokens; four times that is still attention
    if long - 2 * short > 2 * quadratic * (n // 2) ** 2:
        raise Failure(
            f"twice as many tokens cost {long / max(short, 1):.1f} times the FLOPs: more than attention would add",
            smallest=f"x[1, {n // 2}, {s.dim}] and x[1, {n}, {s.dim}]",
            cause="the whole past is computed again for each token, or products of three positions are formed",
        )
    per_token = long / n
    like_attention = 2 * matrices + 4 * n * s.dim
    if per_token > 10 * max(like_attention, 1):
        raise Failure(
            f"{per_token:,.0f} FLOPs a token are {per_token / like_attention:.0f} times those of an MLP of "
            f"{matrices:,} parameters and attention over {n} tokens",
            smallest=f"x[1, {n}, {s.dim}]",
            cause="the same products are made many times over",
        )
    ratio = f"{per_token / (2 * matrices):.2g}x an MLP of the same size" if matrices else "no matrices"
    return f"{per_token:,.0f} FLOPs a token, {ratio}; time {_times_mlp(s, harness, matrices):.1f}x"


def _times_mlp(s: Subject, harness: Harness, matrices: int) -> float:
    """Time of a forward pass against that of an MLP with as many parameters, the best of five. Reported, not judged."""
    hidden = max(1, round(matrices / (2 * s.dim)))
    mlp = nn.Sequential(nn.Linear(s.dim, hidden, bias=False), nn.GELU(), nn.Linear(hidden, s.dim, bias=False))
    x = s.x(4, s.context)

    @torch.no_grad()
    def best(function: Any) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    return best(functools.partial(harness, x)) / best(functools.partial(mlp, x))


@check(*MODEL_KINDS)
def formula(s: Subject) -> str:
    """parameter_formulas, where given, count what the built part has"""
    from gptframe.inspect.params import BUILTIN, inventory

    own = getattr(s.value, "parameter_formulas", None)
    if own is None and s.value not in BUILTIN:
        if not list(s.part(s.build()).parameters()):
            return "no parameters"
        raise Skip("gives no parameter_formulas; gptframe params marks it as measured")
    if callable(own):
        own = own(s.cfg, **s.options)
    try:
        found = inventory(s.cfg)
    except UserError as error:
        raise Failure(
            str(error),
            cause="mend the formula, or the size that it predicts; the symbols stand in gptframe/inspect/params.py",
        ) from None
    part = type(s.part(s.build()))
    names = {
        f"{prefix}.{name}"
        for prefix, module in s.model().named_modules()
        if type(module) is part
        for name, _ in module.named_parameters()
    }
    missing = [row.name for row in found.rows if row.name in names and row.formula is None]
    if missing and own:
        raise Failure(f"no formula for {missing[0]}", cause="give one for every parameter, or none at all")
    return "; ".join(f"{name} = {text}" for name, text in own.items()) if own else ""
