"""Checks of who sees whom: nothing from later tokens, from other sequences, or from earlier calls."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from gptframe.model.context import Context, KVCache
from gptframe.testing.kit import MODEL_KINDS, STREAM_KINDS, Failure, Skip, check
from gptframe.testing.subject import Harness, Subject, randomized, run, set_mode, shape, weights_like

# Rows of one product may differ in the last digits when another row changes their kernel's blocking.
SLACK = 1e-5


def _reach(harness: Harness, x: Tensor) -> Tensor | None:
    """[T, T]: the largest gradient of y[:, i] with respect to x[:, j]; None where y depends on nothing."""
    x = x.clone().requires_grad_()
    y = run(harness, x)
    if not y.requires_grad:
        return None
    weighted = y * weights_like(y)
    rows = []
    for i in range(x.shape[1]):
        (grad,) = torch.autograd.grad(weighted[:, i].sum(), x, retain_graph=True, allow_unused=True)
        rows.append(torch.zeros(x.shape[1]) if grad is None else grad.abs().amax(dim=(0, 2)).float())
    return torch.stack(rows)


def _seen_by_gradient(harness: Harness, x: Tensor) -> tuple[int, int, float] | None:
    """(i, j, gradient) of the first output i that depends on a later input j."""
    reach = _reach(harness, x)
    if reach is None:
        return None
    ahead = reach.triu(1)
    ahead = torch.where(ahead > SLACK * reach.amax().clamp(min=1e-12), ahead, 0.0)
    if not bool(ahead.any()):
        return None
    i, j = (int(n) for n in ahead.nonzero()[0])
    return i, j, float(ahead[i, j])


@torch.no_grad()
def _seen_by_change(
    harness: Harness, x: Tensor, other: Tensor, forward: Callable[[Harness, Tensor], Tensor] = run
) -> tuple[int, int, float] | None:
    """(i, j, change) of the first output i that moves when the inputs from j on, j > i, are replaced."""
    y = forward(harness, x)
    bound = SLACK * float(y.float().abs().amax().clamp(min=1e-12))
    for j in range(1, x.shape[1]):
        changed = torch.cat([x[:, :j], other[:, j:]], dim=1)
        moved = (forward(harness, changed)[:, :j].float() - y[:, :j].float()).abs().amax(dim=(0, 2))
        if not bool((moved <= bound).all()):  # a NaN counts as moved
            i = int((~(moved <= bound)).nonzero()[0])
            return i, j, float(moved[i])
    return None


AHEAD = (
    "a mask, shift or window that lets token t read beyond t, or a statistic over the time axis: token t may read "
    "x[:, :t + 1] only"
)


def _autocast(harness: Harness, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run(harness, x)


def _leak(s: Subject, harness: Harness, length: int, mode: str) -> Failure | None:
    x = s.x(1, length, seed=length)
    smallest = f"{shape(x)}, {mode} mode, float32"
    seen = _seen_by_gradient(harness, x)
    if seen:
        i, j, size = seen
        what = f"the output at token {i} has a gradient of {size:.2g} with respect to the input at token {j}"
        return Failure(what, smallest=smallest, cause=AHEAD)
    for factor in (1.0, 30.0):
        seen = _seen_by_change(harness, x, s.x(1, length, seed=99) * factor)
        if seen:
            return _ahead(seen, smallest, AHEAD)
    return None


@check(*MODEL_KINDS)
def future(s: Subject) -> str:
    """no token sees a later one: every position, by gradient and by change, in every mode and dtype"""
    harness = randomized(s.build())
    lengths = sorted({n for n in (2, 3, 5, s.context) if n <= s.context})
    for mode in ("eval", "training"):
        set_mode(harness, mode)
        for length in lengths:
            failure = _leak(s, harness, length, mode)
            if failure:
                shorter = (_leak(s, harness, n, mode) for n in range(2, length) if n not in lengths)
                raise next((f for f in shorter if f), failure)
    harness.eval()
    x, other = s.x(1, s.context), s.x(1, s.context, seed=99)
    low = "the mask is lost in low precision: fill with -inf (or torch.finfo(scores.dtype).min), and mask after casting"
    seen = _seen_by_change(harness, x, other * 10, _autocast)
    if seen:
        raise _ahead(seen, f"{shape(x)} under bfloat16 autocast", low)
    harness.bfloat16()
    seen = _seen_by_change(harness, x.bfloat16(), other.bfloat16() * 10)
    if seen:
        raise _ahead(seen, f"{shape(x)} bfloat16", low)
    return f"each of {s.context} positions"


def _ahead(seen: tuple[int, int, float], smallest: str, cause: str) -> Failure:
    i, j, size = seen
    return Failure(
        f"the output at token {i} moves by {size:.2g} when the input from token {j} on is replaced",
        smallest=smallest,
        cause=cause,
    )


@check(*MODEL_KINDS)
@torch.no_grad()
def prefix(s: Subject) -> str:
    """the first tokens give the same alone as with others after them"""
    harness = randomized(s.build()).eval()
    for n in sorted({2, 3, s.context}):
        x = s.x(1, min(n, s.context))
        whole = run(harness, x)
        bound = 1e-4 * float(whole.abs().amax().clamp(min=1e-12))
        for length in range(1, x.shape[1]):
            off = (run(harness, x[:, :length]) - whole[:, :length]).abs().amax()
            if not bool(off <= bound):
                raise Failure(
                    f"the first {length} of {x.shape[1]} tokens give another result alone, by {float(off):.2g}",
                    smallest=f"{shape(x)} and x[:, :{length}], eval mode",
                    cause="something depends on the length: a mean over it, positions counted from the end, or a cache "
                    "of another length's mask",
                )
    return ""


@check(*MODEL_KINDS)
def batch(s: Subject) -> str:
    """no sequence of a batch sees another, and each gives the same alone"""
    for size, length in ((2, 1), (2, min(2, s.context)), (3, min(4, s.context))):
        _sequences_apart(s, size, length)
    return ""


def _sequences_apart(s: Subject, size: int, length: int) -> None:
    harness = randomized(s.build())
    x, other = s.x(size, length), s.x(size, length, seed=99) * 10
    rest = [i for i in range(size) if i != 1]
    mixed = "a statistic over the batch axis, or a reshape that mixes it with another: reduce over the last axis only"
    for mode in ("eval", "training"):
        set_mode(harness, mode)
        where = f"{shape(x)}, {mode} mode"
        leaf = x.clone().requires_grad_()
        y = run(copy.deepcopy(harness), leaf)
        if y.requires_grad:
            (grad,) = torch.autograd.grad((y[1] * weights_like(y[1])).sum(), leaf, allow_unused=True)
            if grad is not None and float(grad[rest].abs().max()) > SLACK * float(grad.abs().max()):
                raise Failure(
                    "the output of sequence 1 has a gradient at another sequence", smallest=where, cause=mixed
                )
        with torch.no_grad():
            y = run(copy.deepcopy(harness), x)
            bound = 1e-4 * float(y.abs().amax().clamp(min=1e-12))
            changed = other.clone()
            changed[1] = x[1]
            moved = float((run(copy.deepcopy(harness), changed)[1] - y[1]).abs().amax())
            if not moved <= bound:
                what = f"the output of sequence 1 moves by {moved:.2g} when the others change"
                raise Failure(what, smallest=where, cause=mixed)
            if mode == "training" and s.cfg.dropout:
                continue  # a batch of another size draws another mask
            alone = run(copy.deepcopy(harness), x[1:2])
            off = float((alone[0] - y[1]).abs().amax())
            if not off <= bound and not _draws(harness, x):
                raise Failure(
                    f"a sequence alone gives another result than in a batch of {size}, by {off:.2g}",
                    smallest=f"{shape(x)} and x[1:2], {mode} mode",
                    cause=mixed,
                )


def _draws(harness: Harness, x: Tensor) -> bool:
    """Whether a forward pass draws random numbers, in the mode that the module is in."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        copy.deepcopy(harness)(x)
        return not torch.equal(before, torch.get_rng_state())


@check("norm", "activation", "position")
def tokens(s: Subject) -> str:
    """each token is treated by itself: its result does not depend on its neighbours"""
    if s.seat == "attention":
        raise Skip("acts in attention, which mixes tokens")
    harness = randomized(s.build())
    for mode in ("eval", "training"):
        set_mode(harness, mode)
        x = s.x(2, min(6, s.context))
        reach = _reach(harness, x)
        if reach is None:
            continue
        off = reach - torch.diag(reach.diagonal())
        if float(off.max()) > SLACK * float(reach.max()):
            i, j = (int(n) for n in (off == off.max()).nonzero()[0])
            raise Failure(
                f"the output at token {i} depends on the input at token {j}",
                smallest=f"{shape(x)}, {mode} mode",
                cause="reduce over the last axis (dim=-1) only: a text is generated token by token",
            )
    return ""


@check(*MODEL_KINDS)
@torch.no_grad()
def history(s: Subject) -> str:
    """what was computed before changes nothing: no hidden state between calls or instances"""
    harness, second = randomized(s.build()).eval(), randomized(s.build(seed=1), seed=8).eval()
    x, other = s.x(2, min(5, s.context)), s.x(3, s.context, seed=99) * 3
    alike = s.x(2, min(5, s.context), seed=98)
    first = run(harness, x)
    for what, step in (
        ("a call with other values of the same shape", lambda: run(harness, alike)),
        ("a call with other values", lambda: run(harness, other)),
        ("a call of another instance", lambda: run(second, x)),
        ("a call in training mode", lambda: run(harness.train(), other)),
    ):
        kept = {name: buffer.clone() for name, buffer in harness.named_buffers()}
        step()
        harness.eval()
        registered = any(not torch.equal(kept[name], b) for name, b in harness.named_buffers() if name in kept)
        again = run(harness, x)
        if not torch.equal(first, again):
            if registered and "training" in what:
                break  # state that the class registered, and that checkpoints hold
            raise Failure(
                f"{what} changes what the same input gives, by {float((first - again).abs().amax()):.2g}",
                smallest=f"{shape(x)}, {shape(other)}, {shape(x)} again, eval mode",
                cause="an attribute, class variable or global keeps something: keep nothing, or key it by all that it "
                "depends on",
            )
    return ""


@check(*MODEL_KINDS)
@torch.no_grad()
def cache(s: Subject) -> str:
    """token by token and in pieces from a cache gives the same as all at once; padding is not seen"""
    if s.kind in ("norm", "activation"):
        raise Skip("treats each token by itself")
    if not s.incremental:
        raise Skip("does not declare incremental = True: text is generated from the whole text at each step")
    harness = randomized(s.build()).eval()
    n = s.context
    x = s.x(2, n)
    whole = run(harness, x)
    bound = 1e-4 * float(whole.abs().amax().clamp(min=1e-12))
    for pieces in ([1] * n, [n - 1, 1], [n // 2, 1, n - n // 2 - 1], [2, 3] + [n - 5]):
        pieces = [p for p in pieces if p > 0]
        if sum(pieces) != n:
            continue
        kv, start = KVCache(), 0
        done: list[int] = []
        for piece in pieces:
            places = torch.arange(start, start + piece)
            kv.advance(places)
            y = run(harness, x[:, start : start + piece], Context(positions=places, cache=kv))
            off = (y - whole[:, start : start + piece]).abs().amax()
            if y.shape[1] != piece or not bool(off <= bound):
                raise Failure(
                    f"with {start} tokens in the cache, the next {piece} give another result than all at once, by "
                    f"{float(off):.2g}",
                    smallest=f"{shape(x[:, : start + piece])} in pieces of {[*done, piece]}, eval mode",
                    cause="positions must come from ctx.positions, keys and values from ctx.cache.append; what keeps "
                    "nothing of earlier tokens cannot be incremental",
                )
            start += piece
            done.append(piece)
    _padded(s, harness, x)
    return ""


def _padded(s: Subject, harness: Harness, x: Tensor) -> None:
    """Row 1 begins with two tokens of padding, whose values must not matter."""
    n = x.shape[1]
    if n < 4:
        return
    places = torch.stack([torch.arange(n), torch.arange(n) - 2])
    results = []
    for factor in (1.0, 30.0):
        given = x.clone()
        given[1, :2] *= factor
        results.append(run(harness, given, Context(positions=places))[1, 2:])
    alone = run(harness, x[1:, 2:])[0]
    bound = 1e-4 * float(alone.abs().amax().clamp(min=1e-12))
    if not bool((results[0] - results[1]).abs().amax() <= bound) or not bool(
        (results[0] - alone).abs().amax() <= bound
    ):
        raise Failure(
            "a sequence with padding before it gives another result than without",
            smallest=f"{shape(x)} with positions [[0, 1, ...], [-2, -1, 0, ...]], eval mode",
            cause="a token at a position below 0 is padding: no other may look at it (see Context)",
        )


@check(*STREAM_KINDS)
@torch.no_grad()
def documents(s: Subject) -> str:
    """where ctx.documents marks documents, no token sees another one"""
    harness = randomized(s.build()).eval()
    x, other = s.x(1, s.context), s.x(1, s.context, seed=99) * 3
    places = torch.arange(s.context)
    for start in sorted({1, s.context // 2}):
        marks = (places >= start).long()[None]
        whole = run(harness, x, Context(positions=places, documents=marks))
        bound = 1e-4 * float(whole.abs().amax().clamp(min=1e-12))
        changed = torch.cat([other[:, :start], x[:, start:]], dim=1)
        moved = (run(harness, changed, Context(positions=places, documents=marks)) - whole).abs().amax(dim=(0, 2))
        seen = [t for t in range(start, s.context) if not float(moved[t]) <= bound]
        if seen:
            raise Failure(
                f"the output at token {seen[0]} moves by {float(moved[seen[0]]):.2g} when an earlier document changes",
                smallest=f"{shape(x)}, the second document from token {start} on",
                cause="texts may share a sequence: where ctx.documents is given, look only at tokens with the same "
                "number (gptframe.model.attention.visible gives the mask)",
            )
    return ""
