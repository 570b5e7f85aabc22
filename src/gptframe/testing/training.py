"""Checks of what training does with a part: gradients, modes, recomputation, and the groups of the optimiser."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import CheckpointError, checkpoint

from gptframe.errors import UserError
from gptframe.model.context import Context, scalars
from gptframe.model.gpt import GPT
from gptframe.model.position import Position
from gptframe.testing.kit import MODEL_KINDS, STREAM_KINDS, Failure, Skip, check
from gptframe.testing.subject import Harness, Subject, randomized, run, set_mode, shape, weights_like
from gptframe.training.optimizer import param_groups


def _backward(harness: Harness, x: Tensor, seed: int = 0) -> dict[str, Tensor | None]:
    """The gradients of one pass, by parameter name; `x` where the input has one."""
    harness.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    y = run(harness, leaf, seed=seed)
    if y.requires_grad:
        (y * weights_like(y)).sum().backward()
    return {"x": leaf.grad, **{name: p.grad for name, p in harness.core.named_parameters() if p.requires_grad}}


@check(*MODEL_KINDS)
def gradients(s: Subject) -> str:
    """each parameter gets a finite gradient that is not always zero"""
    harness = randomized(s.build())
    x = s.x(4, s.context)
    found = _backward(harness, x)
    for name, grad in found.items():
        if name == "x":
            continue
        if grad is None:
            raise Failure(
                f"no gradient reaches {name}",
                smallest=shape(x),
                cause="forward does not use it, or passes it through detach(), .data, .item() or no_grad: use it, "
                "remove it, or freeze it with requires_grad_(False)",
            )
        if not bool(grad.isfinite().all()):
            raise Failure(f"the gradient of {name} is not finite", smallest=shape(x), cause="a division or root at 0")
        if not bool(grad.any()):
            raise Failure(
                f"the gradient of {name} is zero everywhere, whatever the input",
                smallest=shape(x),
                cause="something after it does not depend on its value: rounding, a comparison, a norm that removes it",
            )
    n = len(found) - 1
    return f"{n} parameter tensor{'s' if n != 1 else ''}"


@check(*MODEL_KINDS)
def every_batch(s: Subject) -> str:
    """each parameter gets a gradient from every batch, as data parallelism needs"""
    harness = randomized(s.build())
    batches = [s.x(1, 1), s.x(1, s.context, seed=1), s.x(3, 2, seed=2) * 10, -s.x(1, 3, seed=3).abs()]
    for x in [*batches, torch.zeros_like(batches[0]), s.x(1, 2).abs()]:
        for mode in ("training", "eval"):
            set_mode(harness, mode)
            missing = [n for n, grad in _backward(harness, x).items() if grad is None and n != "x"]
            if missing:
                raise Failure(
                    f"this batch gives {', '.join(missing[:3])} no gradient, and others do",
                    smallest=f"{shape(x)}, {mode} mode",
                    cause="a parameter is used for some inputs only: DistributedDataParallel waits for it for ever. "
                    "Use it for all, with a weight of 0 where it does not count",
                )
    return ""


@check(*MODEL_KINDS)
def gradcheck(s: Subject) -> str:
    """in float64 the gradients agree with finite differences"""
    harness = randomized(s.build()).double().eval()
    x = s.x(1, min(2, s.context), dtype=torch.float64).requires_grad_()
    names = [name for name, p in harness.named_parameters() if p.requires_grad]
    values = [p.detach().clone().requires_grad_() for p in harness.parameters() if p.requires_grad]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            given = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(harness, given, (x,))

    if not function(x, *values).requires_grad:
        raise Skip("nothing to differentiate")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.autograd.gradcheck(function, (x, *values), fast_mode=True, check_batched_grad=False)
    except GradcheckError as error:
        line = next((row for row in str(error).splitlines() if row.strip()), "")
        raise Failure(
            f"backward and finite differences disagree: {line}",
            smallest=f"{shape(x)} float64",
            cause="a backward of your own is wrong, a detach cuts a path, or float32 inside drops float64's digits "
            "(use torch.promote_types(x.dtype, torch.float32))",
        ) from None
    return f"{len(values)} parameter tensors and x"


@check(*MODEL_KINDS)
@torch.no_grad()
def modes(s: Subject) -> str:
    """eval mode draws nothing; training mode is the same under the same seed"""
    dropping = s.with_cfg(dropout=0.5)
    harness, plain = randomized(dropping.build()), randomized(s.build()).eval()
    x = s.x(2, s.context)
    harness.eval()
    if not torch.equal(run(harness, x, seed=0), run(harness, x, seed=1)):
        raise Failure(
            "eval mode gives another result under another seed",
            smallest=f"{shape(x)}, model.dropout=0.5",
            cause="dropout or noise without regard to self.training",
        )
    if not torch.equal(run(harness, x), run(plain, x)):
        raise Failure(
            "model.dropout changes what eval mode gives",
            smallest=f"{shape(x)}, model.dropout=0.5 against 0",
            cause="scale by 1 / (1 - p) in training, as F.dropout does, and do nothing in eval mode",
        )
    harness.train()
    first, again = run(copy.deepcopy(harness), x), run(copy.deepcopy(harness), x)
    if not torch.equal(first, again):
        raise Failure(
            "two training passes under one seed differ",
            smallest=f"{shape(x)}, training mode, torch.manual_seed(0) before each",
            cause="random numbers from elsewhere (numpy, random, a generator of its own), or a state that passes on",
        )
    return ""


@check(*MODEL_KINDS)
def recomputation(s: Subject) -> str:
    """activation checkpointing gives the same gradients"""
    harness = randomized(s.with_cfg(dropout=0.25).build())
    x = s.x(2, s.context)
    wanted = _backward(copy.deepcopy(harness), x)
    again = copy.deepcopy(harness)
    leaf = x.clone().requires_grad_()
    cause = "forward does something else the second time: a counter, a cache, or random numbers that are not torch's"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        y = checkpoint(again, leaf, use_reentrant=False)
        if not y.requires_grad:
            raise Skip("nothing to differentiate")
        try:
            (y * weights_like(y)).sum().backward()
        except CheckpointError as error:
            line = str(error).splitlines()[0]
            raise Failure(f"the second forward saves other tensors: {line}", smallest=shape(x), cause=cause) from None
    got = {"x": leaf.grad, **{n: p.grad for n, p in again.core.named_parameters() if p.requires_grad}}
    for name, grad in wanted.items():
        other = got[name]
        if (grad is None) != (other is None) or (
            grad is not None and other is not None and not torch.allclose(grad, other, rtol=1e-4, atol=1e-6)
        ):
            raise Failure(f"recomputed, {name} gets another gradient", smallest=shape(x), cause=cause)
    return ""


@check(*MODEL_KINDS)
def inference(s: Subject) -> str:
    """training goes on after a validation in inference mode"""
    harness = randomized(s.build())
    x = s.x(2, s.context)
    wanted = _backward(copy.deepcopy(harness), x)
    with torch.inference_mode():
        run(harness.eval(), x)
    harness.train()
    try:
        got = _backward(harness, x)
    except RuntimeError as error:
        if "nference" not in str(error):
            raise
        raise Failure(
            f"backward after a validation: {str(error).splitlines()[0]}",
            smallest=f"{shape(x)} in torch.inference_mode(), then in training",
            cause="a tensor of the first forward is kept and used again: make it in __init__ with register_buffer, "
            "or anew each time",
        ) from None
    for name, grad in wanted.items():
        other = got[name]
        if grad is not None and (other is None or not torch.allclose(grad, other, rtol=1e-4, atol=1e-6)):
            raise Failure(f"after a validation {name} gets another gradient", smallest=shape(x), cause="state is kept")
    return ""


def _hidden(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, value) of parameters and modules that hang on plain attributes, where PyTorch does not look."""

    def within(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        if isinstance(value, (nn.Parameter, nn.Module)):
            yield path, value
        elif depth and isinstance(value, dict):
            for key, inner in value.items():
                yield from within(inner, f"{path}[{key!r}]", depth - 1)
        elif depth and isinstance(value, (list, tuple, set)):
            for index, inner in enumerate(value):
                yield from within(inner, f"{path}[{index}]", depth - 1)

    for prefix, owner in module.named_modules():
        for name, value in vars(owner).items():
            if not name.startswith("_") or name not in nn.Module().__dict__:
                yield from within(value, f"{prefix}.{name}".lstrip("."), 3)


def _leaves(y: Tensor) -> set[Tensor]:
    """The tensors at which the graph of y ends."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    open_nodes: list[Any] = [y.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        open_nodes += [inner for inner, _ in node.next_functions]
    return found


@check(*MODEL_KINDS)
def parameters(s: Subject) -> str:
    """everything that is trained is a registered parameter, once, and of this instance alone"""
    harness = s.build()
    before = dict(harness.core.named_parameters())
    listed = "put modules in nn.ModuleList or nn.ModuleDict, and tensors in nn.Parameter or nn.ParameterList"
    own = {id(p) for p in before.values()} | {id(m) for m in harness.modules()}
    for path, value in _hidden(harness.core):
        inner = list(value.parameters()) if isinstance(value, nn.Module) else [value]
        if any(id(p) not in own for p in inner):
            raise Failure(
                f"self.{path} holds parameters that PyTorch does not see: no optimiser, no checkpoint", cause=listed
            )
    names = [name for name, _ in harness.core.named_parameters(remove_duplicate=False)]
    if len(names) != len(before):
        twice = sorted(set(names) - set(before))
        raise Failure(
            f"{', '.join(twice)} is another name of a parameter that is registered already: it is saved twice",
            cause="register it once, and reach it from the other place through a method",
        )
    x = s.x(2, min(4, s.context)).requires_grad_()
    y = run(harness, x)
    after = dict(harness.core.named_parameters())
    if set(after) != set(before) or any(after[n] is not p for n, p in before.items()):
        new = sorted(set(after) - set(before)) or sorted(n for n, p in before.items() if after.get(n) is not p)
        raise Failure(
            f"{', '.join(new)} was made by the first forward",
            smallest=shape(x),
            cause="the optimiser was built before: make parameters in __init__",
        )
    known = {id(p) for p in after.values()} | {id(x)}
    for leaf in _leaves(y):
        if id(leaf) not in known and leaf.requires_grad:
            raise Failure(
                f"a tensor {list(leaf.shape)} gets gradients and is no parameter", smallest=shape(x), cause=listed
            )
    other = s.build(seed=1, layer=s.cfg.n_layers - 1)
    shared = {p.data_ptr() for p in after.values() if p.numel()} & {
        p.data_ptr() for p in other.core.parameters() if p.numel()
    }
    if shared:
        raise Failure(
            "two instances share a parameter", cause="make it in __init__, not in the class or as a default argument"
        )
    return f"{sum(p.numel() for p in after.values()):,} values"


@check(*MODEL_KINDS)
def optimizer_groups(s: Subject) -> str:
    """each parameter is in one group of the optimiser, and no vector is decayed"""
    model = s.model()
    owner = GPT if s.kind == "transform" else type(s.part(s.build()))
    roles: dict[str, str] = {}
    for group in param_groups(model):
        for name in group["param_names"]:
            roles[name] = group["role"]
    counts: dict[str, int] = {}
    for prefix, module in model.named_modules():
        if type(module) is not owner:
            continue
        for path, parameter in module.named_parameters():
            name = f"{prefix}.{path}".lstrip(".")
            if parameter.requires_grad and name not in roles:
                if parameter is model.token_embedding.weight:
                    continue
                raise Failure(f"{name} is in no group of the optimiser", cause="register it under one name")
            role = roles.get(name, "frozen")
            counts[role] = counts.get(role, 0) + 1
            holder = module.get_submodule(path.rpartition(".")[0])
            axes = sum(n > 1 for n in parameter.shape)
            if role == "decayed" and axes < 2 and not isinstance(holder, (nn.Linear, nn.Embedding, Position)):
                raise Failure(
                    f"{name} {list(parameter.shape)} is a vector with {parameter.ndim} axes, decayed as a matrix",
                    cause="weight decay goes by the number of axes: make the parameter one-dimensional, and reshape it "
                    "in forward",
                )
    return ", ".join(f"{n} {role}" for role, n in counts.items()) or "no parameters"


@check(*STREAM_KINDS)
def losses(s: Subject) -> str:
    """what it adds to the loss is a finite scalar with a gradient, and what it logs is a scalar"""
    harness, x = randomized(s.build()).train(), s.x(2, s.context)
    ctx = Context(positions=torch.arange(s.context), losses={}, metrics={})
    run(harness, x.requires_grad_(), ctx)
    assert ctx.losses is not None and ctx.metrics is not None
    try:
        found = scalars(ctx)  # as a training step reads them
    except UserError as error:
        what, _, remedy = str(error).rpartition(": ")
        raise Failure(what, smallest=shape(x), cause=remedy) from None
    for name, value in found.items():
        if not bool(value.isfinite()):
            raise Failure(f"{name!r} is {float(value)} and not finite", smallest=shape(x), cause="log(0), or 0 / 0")
    for name, value in ctx.losses.items():
        if not value.requires_grad:
            raise Failure(
                f"the loss {name!r} has no gradient",
                smallest=shape(x),
                cause="detach(), .item() or a count: use ctx.log",
            )
    if not ctx.losses and not ctx.metrics:
        raise Skip("adds no loss and logs nothing")
    return f"adds {', '.join(ctx.losses) or 'none'}, logs {', '.join(ctx.metrics) or 'nothing'}"
