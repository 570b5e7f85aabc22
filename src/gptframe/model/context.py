"""What a sublayer may need beside the stream: token ids, positions, documents, the cache, and where losses go."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from gptframe.errors import UserError


class KVCache:
    """What is kept of the tokens seen so far, for one sequence of calls to `GPT.forward`.

    An attention keeps keys and values (`append`), a recurrent sublayer its state (`state`), each under its own
    identity, so that a block may hold several. Pairs lie in buffers that grow by doubling. Nothing carries gradients.
    """

    def __init__(self) -> None:
        self.positions = torch.empty(0, dtype=torch.long)  # Long[S] or Long[B,S], positions of all cached tokens
        self._pairs: dict[int, _Pair] = {}
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._shared: dict[Hashable, Any] = {}
        self._constant: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return self.positions.shape[-1]

    def advance(self, positions: Tensor) -> None:
        """Note the positions Long[T] or Long[B,T] of the tokens that are about to be appended."""
        self.positions = torch.cat([self.positions, positions], dim=-1) if len(self) else positions
        self._shared.clear()

    def append(self, owner: object, k: Tensor, v: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Append k, v [B,H,T,d] of `owner` and return its newest keys and values [B,H,S,d].

        Args:
            window: what comes before all of the T windows is not returned, and is dropped when room is needed.
        """
        pair = self._pairs.get(id(owner))
        if pair is None:
            pair = self._pairs[id(owner)] = _Pair()
        return pair.append(k.detach(), v.detach(), None if window is None else window - 1)

    def state(self, owner: object) -> tuple[Tensor, ...] | None:
        """What `owner` has left with `set_state` after the tokens before these; None at the start of a text."""
        return self._states.get(id(owner))

    def set_state(self, owner: object, *tensors: Tensor) -> None:
        """Leave what `owner` needs of the tokens so far, [B, ...] each, for its next call."""
        self._states[id(owner)] = tuple(t.detach() for t in tensors)

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows Long[R] of the batch."""
        if self.positions.ndim == 2:
            self.positions = self.positions[rows]
        for pair in self._pairs.values():
            pair.k, pair.v = pair.k[rows], pair.v[rows]
        self._states = {owner: tuple(t[rows] for t in tensors) for owner, tensors in self._states.items()}

    def shared(self, key: Hashable, make: Callable[[], Any], constant: bool = False) -> Any:
        """`make()`, once a step for all layers that ask with the same key; once for all if `constant`."""
        found = self._constant if constant else self._shared
        if key not in found:
            found[key] = make()
        return found[key]


class _Pair:
    """Keys and values of one attention: the first `length` of the rows of two buffers [B,H,room,d]."""

    def __init__(self) -> None:
        self.k = self.v = torch.empty(0)
        self.length = 0

    def append(self, k: Tensor, v: Tensor, past: int | None) -> tuple[Tensor, Tensor]:
        new = k.shape[2]
        if self.k.ndim != 4 or self.length + new > self.k.shape[2]:
            kept = self.length if past is None else min(self.length, past)
            room = max(64, 2 * (kept + new))
            self.k, self.v = (self._moved(old, x, kept, room) for old, x in ((self.k, k), (self.v, v)))
            self.length = kept
        start, self.length = self.length, self.length + new
        self.k.narrow(2, start, new).copy_(k)
        self.v.narrow(2, start, new).copy_(v)
        first = 0 if past is None else max(0, start - past)
        return self.k.narrow(2, first, self.length - first), self.v.narrow(2, first, self.length - first)

    def _moved(self, old: Tensor, like: Tensor, kept: int, room: int) -> Tensor:
        buffer = like.new_empty((*like.shape[:2], room, like.shape[3]))
        if kept:
            buffer[:, :, :kept] = old[:, :, self.length - kept : self.length]
        return buffer


@dataclass
class Context:
    """Travels beside x through every sublayer. `GPT.forward` fills in `positions` and `ids`.

    A sublayer whose class says `incremental = True` promises two things: a token gets the same whether the ones before
    it come with it or lie in `cache`, and none looks at padding. Text is generated with a cache and in padded batches
    where all sublayers promise it, and otherwise row by row from the whole text.
    """

    positions: Tensor = cast(Tensor, None)
    """Long[T]: positions of the tokens of x; Long[B,T] where rows differ. Below 0: padding, which no token looks at."""
    documents: Tensor | None = None
    """Long[B,T]: which document a token is of, a number that grows along T; attention stays inside a document. None:
    one document."""
    cache: KVCache | None = None
    """What is kept of earlier tokens, when generating."""
    ids: Tensor = cast(Tensor, None)
    """Long[B,T]: the tokens themselves."""
    shared: dict[str, Any] = field(default_factory=dict)
    """What a layer leaves for later layers of the same pass. Set it and read it; with recomputation a layer may do both
    twice, so take nothing out and append nothing."""
    losses: dict[str, Tensor] | None = None
    """In training, what `add_loss` has gathered; None where nobody wants it."""
    metrics: dict[str, list[Tensor | float]] | None = None
    """In training, what `log` has gathered."""

    def add_loss(self, name: str, value: Tensor) -> None:
        """Train a scalar beside the cross-entropy, with its coefficient in it, in nats a token.

        The gradient is that of the cross-entropy a token plus all of these. Those of one name are summed over the
        layers, and logged as `aux/<name>`; train_loss and val_loss stay the cross-entropy alone.
        """
        if self.losses is not None:
            self.losses[name] = self.losses[name] + value if name in self.losses else value

    def log(self, name: str, value: Tensor | float) -> None:
        """Log a scalar as `aux/<name>`, averaged over the layers and the micro-batches that give it."""
        if self.metrics is not None:
            value = value.detach().float() if isinstance(value, Tensor) else value
            self.metrics.setdefault(name, []).append(value)


def scalars(ctx: Context) -> dict[str, Tensor]:
    """What a forward pass has left in `ctx` by name: losses with their gradients, then means of metrics.

    Raises:
        UserError: one of them is no scalar, or a name stands for both.
    """
    found: dict[str, Tensor] = {}
    for name, value in (ctx.losses or {}).items():
        check_name("ctx.add_loss", name)
        if not isinstance(value, Tensor) or value.ndim:
            raise UserError(f"ctx.add_loss got {_words(value)} as {name!r}: it takes a scalar tensor, as in x.mean()")
        found[name] = value
    for name, values in (ctx.metrics or {}).items():
        check_name("ctx.log", name)
        if name in found:
            raise UserError(f"ctx.log({name!r}, ...): there is a loss of that name, which is logged already")
        for one in values:
            if not isinstance(one, (Tensor, int, float)) or (isinstance(one, Tensor) and one.ndim):
                raise UserError(f"ctx.log got {_words(one)} as {name!r}: it takes a scalar, as in x.mean()")
        found[name] = torch.as_tensor(sum(values) / len(values), dtype=torch.float32)
    return found


def check_name(call: str, name: object) -> None:
    """Refuse a name that cannot head a column of metrics.csv.

    Args:
        call: what was called with it, for the message.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or set(name) & set(',"'):
        raise UserError(f"{call}: {name!r} cannot be the name of a column: use letters, digits, _ and /")


def _words(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
