"""Checks of output heads: from the stream to logits, and to a loss that can be compared with any other model's."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptframe.errors import UserError
from gptframe.model.context import Context
from gptframe.model.gpt import GPT
from gptframe.model.init import initialize
from gptframe.model.loss import IGNORED
from gptframe.testing.kit import Failure, check, raised
from gptframe.testing.subject import Subject, shape


class _Bench:
    """A head with weights, a stream and targets."""

    def __init__(self, s: Subject, seed: int = 0):
        self.s, cfg = s, s.cfg
        assert cfg.vocab_size is not None
        self.model = GPT(cfg)
        initialize(self.model, cfg, seed)
        self.head: Any = self.model.output
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(2, s.context, cfg.d_model, generator=generator)
        self.weight = torch.randn(cfg.vocab_size, cfg.d_model, generator=generator) * 0.1
        self.targets = torch.randint(0, cfg.vocab_size, self.x.shape[:2], generator=generator)
        self.targets[0, :2] = IGNORED

    def loss(self, x: Tensor | None = None, targets: Tensor | None = None) -> tuple[Tensor, Context]:
        ctx = Context(torch.arange(self.x.shape[1]), ids=self.targets.clamp(min=0), losses={}, metrics={})
        value = self.head.loss(
            self.x if x is None else x, self.weight, self.targets if targets is None else targets, ctx
        )
        return value, ctx


@check("head", name="contract")
def head_contract(s: Subject) -> str:
    """gives logits [..., V] for every leading shape, and the loss as a scalar"""
    try:
        bench = _Bench(s)
    except UserError:
        raise  # the options or the sizes that a person gave
    except Exception as error:
        raise raised(error, s, "the constructor") from None
    for x in (bench.x, bench.x[:, :1], bench.x.flatten(0, 1), bench.x[:, -1], bench.x.bfloat16()):
        try:
            y = bench.head.to(x.dtype)(x, bench.weight.to(x.dtype))
        except Exception as error:
            raise raised(error, s, "forward", smallest=f"{shape(x)} {x.dtype}") from None
        wanted = (*x.shape[:-1], bench.weight.shape[0])
        if not isinstance(y, Tensor) or tuple(y.shape) != wanted:
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise Failure(f"forward returned {got} where {list(wanted)} is wanted", smallest=shape(x))
    bench.head.float()
    value, _ = bench.loss()
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise Failure(f"loss returned {got} where a scalar is wanted", smallest=shape(bench.x), cause="sum over tokens")
    return ""


@check("head")
def cross_entropy(s: Subject) -> str:
    """the loss is the summed cross-entropy of its own logits, so that models can be compared"""
    bench = _Bench(s)
    for mode in ("eval", "training"):
        bench.head.train(mode == "training")
        logits = bench.head(bench.x, bench.weight)
        wanted = F.cross_entropy(logits.flatten(0, 1), bench.targets.flatten(), reduction="sum", ignore_index=IGNORED)
        got, _ = bench.loss()
        if not torch.allclose(got, wanted, rtol=1e-4):
            raise Failure(
                f"loss gives {float(got):.4f}, and forward's logits a cross-entropy of {float(wanted):.4f} ({mode})",
                smallest=shape(bench.x),
                cause="return the sum over targets other than -100; what is trained besides goes through ctx.add_loss",
            )
        nothing, _ = bench.loss(targets=torch.full_like(bench.targets, IGNORED))
        nothing = nothing.detach()
        if float(nothing) != 0:
            raise Failure(f"without any target the loss is {float(nothing):.4f} and not 0 ({mode})", cause="a mean")
    return ""


@check("head")
@torch.no_grad()
def each_token(s: Subject) -> str:
    """the logits of a token depend on its own stream alone"""
    bench = _Bench(s)
    bench.head.eval()
    whole = bench.head(bench.x, bench.weight)
    for t in range(bench.x.shape[1]):
        x = bench.x.clone()
        x[:, t] += 3.0
        moved = (bench.head(x, bench.weight) - whole).abs().amax(dim=(0, 2)) > 1e-4
        moved[t] = False
        if bool(moved.any()):
            other = int(moved.nonzero()[0])
            raise Failure(
                f"the logits at token {other} change with the stream at token {t}",
                smallest=shape(bench.x),
                cause="forward mixes tokens; generation hands over the last one alone",
            )
    return ""


@check("head")
def head_gradients(s: Subject) -> str:
    """the stream, the output matrix and each parameter get a finite gradient in training"""
    bench = _Bench(s)
    bench.head.train()
    leaf, bench.weight = bench.x.clone().requires_grad_(), bench.weight.requires_grad_()
    value, ctx = bench.loss(leaf)
    total = value + sum((ctx.losses or {}).values())
    total.backward()
    for name, tensor in [("x", leaf), ("weight", bench.weight), *bench.head.named_parameters()]:
        if tensor.grad is None or not bool(tensor.grad.isfinite().all()) or not bool(tensor.grad.any()):
            kind = "no" if tensor.grad is None else "a gradient that is zero or not finite, and no useful"
            raise Failure(f"{kind} gradient reaches {name}", smallest=shape(leaf), cause="loss does not use it")
    n = len(list(bench.head.parameters()))
    return f"{n} parameter tensor{'s' if n != 1 else ''}" + "".join(f", adds {name}" for name in ctx.losses or ())


@check("head")
def head_storage(s: Subject) -> str:
    """each parameter is initialised by the seed and its name; checkpoints and copies hold all that matters"""
    bench, again = _Bench(s), _Bench(s)
    for name, p in bench.head.named_parameters():
        if not bool(p.isfinite().all()) or not torch.equal(p, again.head.get_parameter(name)):
            raise Failure(
                f"{name} starts differently at each construction",
                cause="define init_weights(draw), with draw(name) for standard normal values",
            )
    with torch.no_grad():
        for p in bench.head.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    file = io.BytesIO()
    torch.save(bench.head.state_dict(), file)
    file.seek(0)
    again.head.load_state_dict(torch.load(file, weights_only=True))
    wanted, ctx = bench.loss()
    for label, head in (("loaded into a fresh instance", again.head), ("copied", copy.deepcopy(bench.head))):
        bench.head = head
        got, other = bench.loss()
        same = all(torch.equal(v, (other.losses or {})[n]) for n, v in (ctx.losses or {}).items())
        if not torch.equal(got, wanted) or not same:
            raise Failure(f"{label}, it gives another loss", cause="a tensor is neither parameter nor buffer")
    return ""


@check("head")
def head_compiles(s: Subject) -> str:
    """torch.compile makes one graph of the model's loss"""
    bench = _Bench(s)
    ids = bench.targets.clamp(min=0)

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        ctx = Context(losses={}, metrics={})
        value = bench.model(ids, ctx, targets)
        return functools.reduce(torch.add, (ctx.losses or {}).values(), value)

    try:
        got = torch.compile(loss, fullgraph=True, backend="aot_eager")(ids, bench.targets)
    except Exception as error:
        if type(error).__module__.startswith("torch._dynamo"):
            raise raised(error, s, "torch.compile(fullgraph=True)", "a print, .item() or an if on data") from None
        raise
    if not torch.allclose(got, loss(ids, bench.targets), rtol=1e-4):
        raise Failure("compiled, it gives another loss", smallest=shape(bench.x))
    return ""
