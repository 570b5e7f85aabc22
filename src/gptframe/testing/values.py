"""Checks of what comes out: shape, dtype, size, and that nothing else is changed on the way."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor

from gptframe.errors import UserError
from gptframe.model.context import Context
from gptframe.model.linear import LinearBackend
from gptframe.testing.kit import MODEL_KINDS, Failure, Skip, check, raised
from gptframe.testing.subject import Harness, Subject, randomized, run, set_mode, shape

EXTREMES = {"zeros": 0.0, "all equal": 3.0, "100 times too large": None}


@check(*MODEL_KINDS)
def contract(s: Subject) -> str:
    """builds, and gives a tensor of the right shape for every batch and length"""
    if s.kind == "position" and s.seat not in ("embedding", "attention"):
        raise Failure(
            f"seat={s.seat!r} must be 'embedding' or 'attention'",
            cause='the class lacks seat = "embedding" or seat = "attention"',
        )
    if s.inputs not in (1, 2):
        raise Failure(f"inputs={s.inputs!r} must be 1 or 2", cause="inputs counts the projections that feed it")
    try:
        harness = s.build()
    except UserError:
        raise  # the options or the sizes that a person gave
    except Exception as error:
        raise raised(error, s, "the constructor") from None
    if s.seat == "attention":
        _position_contract(s, s.part(harness))
    lengths = sorted({1, 2, 3, s.context})
    for batch, length in [(1, 1), *((2, n) for n in lengths), (3, 2), (1, s.context)]:
        x = s.x(batch, length)
        try:
            y = run(harness, x)
        except Exception as error:
            raise raised(error, s, "forward", smallest=shape(x)) from None
        _expect(y, (batch, length, s.dim), x, "forward")
    return f"up to {shape(x)}"


def _expect(y: object, wanted: tuple[int, ...], x: Tensor, what: str) -> None:
    if not isinstance(y, Tensor):
        raise Failure(
            f"{what} returned {type(y).__name__}, not a tensor",
            smallest=shape(x),
            cause="a return is missing" if y is None else "return the tensor alone",
        )
    if tuple(y.shape) != wanted:
        raise Failure(
            f"{what} returned {list(y.shape)} where {list(wanted)} is wanted",
            smallest=shape(x),
            cause="a transpose is missing, an axis was reduced, or the wrong sizes were multiplied",
        )


def _position_contract(s: Subject, position: object) -> None:
    heads, shared, n = s.cfg.n_heads, max(1, s.cfg.n_heads // 2), min(5, s.context)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (torch.ones(2, h, n, s.cfg.head_dim, dtype=dtype) for h in (heads, shared))
        places = torch.arange(n)
        turned = position.rotate(q.clone(), k.clone(), Context(positions=places))  # type: ignore[attr-defined]
        if not isinstance(turned, tuple) or len(turned) != 2:
            raise Failure("rotate must return the pair (q, k)", smallest=f"q{list(q.shape)}, k{list(k.shape)}")
        for label, old, new in (("q", q, turned[0]), ("k", k, turned[1])):
            _expect(new, tuple(old.shape), old, f"rotate ({label})")
            if new.dtype != dtype:
                raise Failure(
                    f"rotate turned {label} from {dtype} into {new.dtype}",
                    smallest=f"{label}{list(old.shape)} {dtype}",
                    cause="angles in float32 or float64 promote what they multiply: cast cos and sin to q.dtype",
                )
        bias = position.score_bias(places, places)  # type: ignore[attr-defined]
        if bias is not None:
            try:
                torch.broadcast_to(bias, (2, heads, n, n))
            except (RuntimeError, AttributeError, TypeError):
                got = list(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
                raise Failure(
                    f"score_bias gave {got} where [H, T, S] = {[heads, n, n]} is wanted",
                    cause="heads come first: one bias for each query and key of each head",
                ) from None


def difference(a: Tensor, b: Tensor) -> float:
    """RMS of a - b against the RMS of b; infinite where one of them is not finite."""
    a, b = a.detach().double(), b.detach().double()
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        return float("inf")
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-6))


@check(*MODEL_KINDS)
def dtype(s: Subject) -> str:
    """float32, float64 and bfloat16 in give the same dtype out, and about the same values"""
    harness = randomized(s.build()).eval()
    with torch.no_grad():
        for parameter in harness.parameters():
            parameter.copy_(parameter.bfloat16())
        for x in (s.x(1, 1, dtype=torch.bfloat16), s.x(2, s.context, dtype=torch.bfloat16)):  # what every dtype holds
            _in_each_dtype(s, harness, x)
    return "bf16 within 10 % of fp32"


def _in_each_dtype(s: Subject, harness: Harness, x: Tensor) -> None:
    reference = run(harness, x.float())
    # one module throughout, since a model is moved between dtypes with all that it has cached by then
    for kind, bound in ((torch.float64, 1e-4), (torch.bfloat16, 0.1), (torch.float32, 1e-5)):
        try:
            y = run(harness.to(kind), x.to(kind))
        except RuntimeError as error:
            cause = "a tensor of a fixed dtype meets x: build it with dtype=x.dtype, or cast it with .to(x.dtype)"
            raise raised(error, s, f"in {kind}", cause, f"{shape(x)} {kind}") from None
        if y.dtype != kind:
            raise Failure(
                f"{kind} in, {y.dtype} out",
                smallest=f"{shape(x)} {kind}",
                cause="a constant or buffer of another dtype promotes the result: build it with dtype=x.dtype, "
                "or return y.to(x.dtype)",
            )
        off = difference(y, reference)
        if off > bound:
            raise Failure(
                f"in {kind} the values differ from float32 by {off:.2g} (at most {bound:g})",
                smallest=f"{shape(x)} {kind}",
                cause="a large sum, a mask value or an eps that this dtype does not hold: do that step in "
                "torch.promote_types(x.dtype, torch.float32)",
            )


@check(*MODEL_KINDS)
def autocast(s: Subject) -> str:
    """bfloat16 autocast runs forward and backward, and gives about the values of float32"""
    harness = randomized(s.build()).eval()
    x = s.x(2, s.context)
    reference = run(harness, x).detach()
    mixed = "products come out in bfloat16 there and meet float32: cast one to the other, as in y.to(x.dtype)"
    for given in (torch.float32, torch.bfloat16):
        leaf = x.to(given).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a norm takes its slower kernel for mixed dtypes
            try:
                y = run(harness, leaf)
            except RuntimeError as error:
                raise raised(error, s, "under autocast", mixed, f"{shape(x)} {given}") from None
        if y.dtype not in (torch.float32, torch.bfloat16):
            raise Failure(f"under autocast {given} in gives {y.dtype} out", smallest=shape(x))
        off = difference(y.detach(), reference)
        if off > 0.1:
            raise Failure(
                f"under autocast the values differ from float32 by {off:.2g} (at most 0.1)",
                smallest=f"{shape(x)} {given} in torch.autocast('cpu', torch.bfloat16)",
                cause="products come out in bfloat16 there: a mask value or a sum needs .float() first",
            )
        if y.requires_grad:
            y.float().square().sum().backward()
    return ""


@check(*MODEL_KINDS)
def numerics(s: Subject) -> str:
    """zeros, equal values and values of 100 give finite outputs and gradients"""
    harness = s.build()
    for label, value in EXTREMES.items():
        x = s.x(2, min(4, s.context))
        x = (x * 100 if value is None else torch.full_like(x, value)).requires_grad_()
        harness.zero_grad(set_to_none=True)
        y = run(harness, x)
        cause = (
            "a root, logarithm or division at 0 needs an eps inside, or an exponential overflows: use the stable form"
        )
        if not bool(y.isfinite().all()):
            raise Failure(f"an input of {label} gives outputs that are not finite", smallest=shape(x), cause=cause)
        if not y.requires_grad:
            continue
        y.sum().backward()
        for name, tensor in [("x", x), *harness.core.named_parameters()]:
            if tensor.grad is not None and not bool(tensor.grad.isfinite().all()):
                raise Failure(
                    f"an input of {label} gives {name} a gradient that is not finite", smallest=shape(x), cause=cause
                )
    return ""


def rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


@check(*MODEL_KINDS)
def scale(s: Subject) -> str:
    """at initialisation a delta is no larger than the stream, and a norm or activation keeps the scale"""
    harness = s.build().eval()
    seen = []
    for size in (0.02, 1.0) if s.kind == "norm" else (1.0,):
        x = s.x(4, s.context) * size
        y = run(harness, x)
        if s.kind in ("topology", "transform") or s.seat == "embedding":
            y = y - x
        ratio = rms(y)
        bound = {"sublayer": 1.0, "norm": 2.0, "activation": 5.0, "position": 2.0}.get(s.kind, 2.0)
        seen.append(f"{ratio:.2g}")
        if ratio > bound:
            raise Failure(
                f"an input of RMS {size:g} gives {'a delta' if s.kind != 'activation' else 'an output'} of RMS "
                f"{ratio:.3g} at initialisation (at most {bound:g})",
                smallest=shape(x),
                cause="a parameter starts too large: use nn.Linear, which is initialised for you, or "
                "init_weights(draw) with a factor of about 0.02",
            )
    return f"RMS {' and '.join(seen)}"


@check(*MODEL_KINDS)
def in_place(s: Subject) -> str:
    """the stream and the context that it is given stay as they were"""
    harness = randomized(s.build())
    for mode in ("eval", "training"):
        set_mode(harness, mode)
        x = s.x(2, min(5, s.context))
        places = torch.arange(x.shape[1])
        ctx = Context(positions=places)
        kept = x.clone()
        with torch.no_grad():
            run(harness, x, ctx)
        cause = "an operation whose name ends in _ or an assignment to a slice: work on a new tensor"
        if not torch.equal(x, kept):
            changed = int((x != kept).sum())
            raise Failure(
                f"forward changed {changed} of {x.numel()} values of its input ({mode} mode)",
                smallest=shape(x),
                cause=cause,
            )
        if ctx.positions is not places or not torch.equal(places, torch.arange(x.shape[1])):
            raise Failure(f"forward changed ctx.positions ({mode} mode)", smallest=shape(x), cause=cause)
    return ""


def _global_state() -> dict[str, Any]:
    return {
        "torch's seed": torch.initial_seed(),
        "the default dtype": torch.get_default_dtype(),
        "gradient recording": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "the matmul precision": torch.get_float32_matmul_precision(),
        "Python's random state": random.getstate(),
    }


@check(*MODEL_KINDS)
def global_state(s: Subject) -> str:
    """neither constructor nor forward changes a setting of torch or of Python"""
    before = _global_state()
    torch_state = torch.get_rng_state()
    try:
        harness = s.make()
        for mode in ("eval", "training"):
            set_mode(harness, mode)
            seed = torch.initial_seed()
            harness(s.x(1, 2))
            if torch.initial_seed() != seed:
                raise Failure(
                    f"forward seeds torch's generator ({mode} mode)",
                    smallest=shape(s.x(1, 2)),
                    cause="torch.manual_seed in forward makes every dropout after it the same: give a torch.Generator",
                )
            if mode == "eval":
                state = torch.get_rng_state()
                harness(s.x(1, 2))
                if not torch.equal(state, torch.get_rng_state()):
                    raise Failure(
                        "forward draws random numbers in eval mode",
                        smallest=shape(s.x(1, 2)),
                        cause="draw only if self.training, as in F.dropout(x, p, self.training)",
                    )
        after = _global_state()
    finally:
        _put_back(before)
        torch.set_rng_state(torch_state)
    for key, value in after.items():
        if key != "torch's seed" and value != before[key]:
            raise Failure(f"{key} is changed for the whole process", cause="set it for a block with a context manager")
    return ""


def _put_back(state: dict[str, Any]) -> None:
    torch.set_default_dtype(state["the default dtype"])
    torch.set_grad_enabled(bool(state["gradient recording"]))
    torch.set_num_threads(state["the number of threads"])
    torch.use_deterministic_algorithms(bool(state["deterministic mode"]))
    torch.set_autocast_enabled("cpu", bool(state["autocast"]))
    torch.set_float32_matmul_precision(str(state["the matmul precision"]))
    random.setstate(state["Python's random state"])


@check("activation")
def offers(s: Subject) -> str:
    """forward_with_bias, forward_mlp and forward_mlp_through, where offered, give what forward gives"""
    core: Any = s.build().core
    names = ("forward_with_bias", "forward_mlp", "forward_mlp_through")
    offered = [name for name in names if getattr(core, name, None) is not None]
    if not offered:
        raise Skip("offers none")
    d, hidden = s.cfg.d_model, s.cfg.hidden
    generator = torch.Generator().manual_seed(5)
    x, up, bias, down, out = (
        torch.randn(n, generator=generator) * 0.3 for n in ((2, 3, d), (hidden, d), (hidden,), (d, hidden), (d,))
    )
    torchs, whole = LinearBackend("torch", s.cfg), core(x @ up.T + bias) @ down.T + out
    wanted = {
        "forward_with_bias": lambda: (core.forward_with_bias(x @ up.T, bias), core(x @ up.T + bias)),
        "forward_mlp": lambda: (core.forward_mlp(x, up, bias, down, out), whole),
        "forward_mlp_through": lambda: (core.forward_mlp_through(torchs, x, up, bias, down, out), whole),
    }
    for name in offered:
        got, plain = wanted[name]()
        if got.shape != plain.shape or difference(got, plain) > 1e-4:
            raise Failure(
                f"{name} differs from forward", smallest=shape(x), cause="see Activation in model/activation.py"
            )
    return ", ".join(offered)
