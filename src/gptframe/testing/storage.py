"""Checks of what is written and made anew: checkpoints, copies, and models built without values."""

from __future__ import annotations

import copy
import io
import pickle
import re

import torch
from torch import Tensor

from gptframe.model.init import initialize
from gptframe.testing.kit import MODEL_KINDS, Failure, check, raised
from gptframe.testing.subject import Harness, Subject, randomized, run, shape


def _same(a: Harness, b: Harness, x: Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(run(a.eval(), x), run(b.eval(), x))


@check(*MODEL_KINDS)
def state_dict(s: Subject) -> str:
    """a checkpoint holds all that the output depends on, and loads with weights_only"""
    harness, x = randomized(s.build()), s.x(2, s.context)
    for _ in range(2):
        run(harness.train(), x)  # whatever state a forward pass leaves must be saved as well
    file = io.BytesIO()
    torch.save(harness.state_dict(), file)
    file.seek(0)
    try:
        state = torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise Failure(
            f"the state dict does not load with weights_only=True: it holds {found[1] if found else 'an object'}",
            cause="get_extra_state or a hook puts an object in: save tensors and plain containers only",
        ) from None
    fresh = randomized(s.build(seed=1, constructor_seed=1), seed=8)
    try:
        fresh.load_state_dict(state)
    except RuntimeError as error:
        raise Failure(
            "a fresh instance does not load it: " + " ".join(str(error).split())[:200],
            cause="names or shapes depend on what was computed before: make everything in __init__",
        ) from None
    if not _same(harness, fresh, x):
        raise Failure(
            "loaded into a fresh instance, the state dict gives another output",
            smallest=shape(x),
            cause="a tensor that matters is neither parameter nor persistent buffer: register_buffer(name, value)",
        )
    return f"{len(state)} tensors"


@check(*MODEL_KINDS)
def meta(s: Subject) -> str:
    """builds on the meta device, and works once weights are put in"""
    harness, x = randomized(s.build()), s.x(2, s.context)
    try:
        with torch.device("meta"):
            empty = s.make()
    except Exception as error:
        raise raised(
            error,
            s,
            "on the meta device the constructor",
            "it looks at values of a tensor (.item(), if, numpy): compute with numbers, or in init_weights",
        ) from None
    for name, tensor in [*empty.named_parameters(), *empty.named_buffers()]:
        if tensor.device.type != "meta":
            raise Failure(
                f"{name.removeprefix('core.')} is on {tensor.device} where the model is built on meta",
                cause="the constructor names a device: leave it out, and the model's is taken",
            )
    if any(True for _ in harness.buffers()):
        return "built; its buffers need a real device"
    empty.load_state_dict(harness.state_dict(), assign=True)
    try:
        same = _same(harness, empty, x)
    except RuntimeError as error:
        raise raised(
            error,
            s,
            "with weights put in, forward",
            "a tensor made in the constructor is neither parameter nor buffer and stayed on meta: use register_buffer",
        ) from None
    if not same:
        raise Failure("built on meta and loaded, it gives another output", smallest=shape(x))
    return ""


@check(*MODEL_KINDS)
def initialization(s: Subject) -> str:
    """each parameter is initialised, by the seed and its own name"""
    was, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then gives NaN
    try:
        first = s.build()
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
    for name, tensor in [*first.core.named_parameters(), *first.core.named_buffers()]:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Failure(
                f"{name} holds whatever was in memory",
                cause="torch.empty was never filled: define init_weights(draw), or give it values in __init__",
            )
    again, other = s.build(), s.build(constructor_seed=1)
    for name, p in first.core.named_parameters():
        if not torch.equal(p, again.core.get_parameter(name)):
            raise Failure(
                f"{name} starts differently at each construction", cause="random numbers that are not torch's"
            )
        if not torch.equal(p, other.core.get_parameter(name)):
            raise Failure(
                f"{name} is drawn in the constructor, from whatever torch's generator holds by then",
                cause="models that have it in common would not share it: define init_weights(draw), with "
                f"draw({name.rpartition('.')[2]!r}) for standard normal values",
            )
    restored = s.build(seed=1)
    initialize(restored, s.cfg, 0)
    for name, p in first.core.named_parameters():
        if not torch.equal(p, restored.core.get_parameter(name)):
            raise Failure(
                f"{name} keeps a trace of its earlier values when it is initialised again",
                cause="init_weights must set it, as in self.weight.copy_(draw('weight') * 0.02)",
            )
    return ""


@check(*MODEL_KINDS)
def copies(s: Subject) -> str:
    """deepcopy and pickle give an independent part with the same output"""
    harness, x = randomized(s.build()), s.x(2, min(4, s.context))
    run(harness, x)
    makers = {"copy.deepcopy": copy.deepcopy, "pickle": lambda part: pickle.loads(pickle.dumps(part))}
    for label, make in makers.items():
        try:
            twin = make(harness)
        except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
            raise Failure(
                f"{label}: {str(error).splitlines()[0]}",
                cause="an attribute cannot be copied: a lambda, a local class, an open file, a generator, a tensor "
                "that is not a leaf",
            ) from None
        if not _same(harness, twin, x):
            raise Failure(f"{label} gives another output", smallest=shape(x), cause="state outside the instance")
        before = run(harness.eval(), x).detach()
        randomized(twin, seed=11)
        if not torch.equal(before, run(harness, x)):
            raise Failure(f"{label} shares parameters with the original", cause="state outside the instance")
    return ""
