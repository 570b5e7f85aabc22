"""What a sublayer may need beside the stream: positions, document boundaries and the key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


class KVCache:
    """Keys and values of the tokens seen so far, for one sequence of calls to `GPT.forward`.

    Each attention keeps its own pair under its own identity, so that a block may hold several. Pairs lie in buffers
    that grow by doubling; they carry no gradients.
    """

    def __init__(self) -> None:
        self.positions = torch.empty(0, dtype=torch.long)  # Long[S] or Long[B,S], positions of all cached tokens
        self._pairs: dict[int, _Pair] = {}
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
        pair = self._pairs.setdefault(id(owner), _Pair())
        return pair.append(k.detach(), v.detach(), None if window is None else window - 1)

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows Long[R] of the batch."""
        if self.positions.ndim == 2:
            self.positions = self.positions[rows]
        for pair in self._pairs.values():
            pair.k, pair.v = pair.k[rows], pair.v[rows]

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
    """Travels beside x through every sublayer. `GPT.forward` fills in `positions` where it is None.

    A sublayer whose class says `incremental = True` promises two things: a token gets the same whether the ones before
    it come with it or lie in `cache`, and none looks at padding. Text is generated with a cache and in padded batches
    where all sublayers promise it, and otherwise row by row from the whole text.
    """

    positions: Tensor = cast(Tensor, None)
    """Long[T]: positions of the tokens of x; Long[B,T] where rows differ. Below 0: padding, which no token looks at."""
    documents: Tensor | None = None
    """Long[B,T]: which document a token is of; attention stays inside a document. None: one document."""
    cache: KVCache | None = None
    """Keys and values of earlier tokens, when generating."""
