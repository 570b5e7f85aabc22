"""What a sublayer may need beside the stream: positions, document boundaries and the key-value cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class KVCache:
    """Keys and values of the tokens seen so far, for one sequence of calls to `GPT.forward`.

    Each attention keeps its own pair under its own identity, so that a block may hold several.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None  # Long[S], positions of all cached tokens
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return 0 if self.positions is None else self.positions.shape[0]

    def advance(self, positions: Tensor) -> None:
        """Note the positions Long[T] of the tokens that are about to be appended."""
        self.positions = positions if self.positions is None else torch.cat([self.positions, positions])

    def append(self, owner: object, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v [B,H,T,d] of `owner` and return all of its keys and values [B,H,S,d]."""
        if id(owner) in self._pairs:
            past_k, past_v = self._pairs[id(owner)]
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        self._pairs[id(owner)] = (k, v)
        return k, v


@dataclass
class Context:
    """Travels beside x through every sublayer. `GPT.forward` fills in `positions` where it is None."""

    positions: Tensor | None = None
    """Long[T]: positions of the tokens of x."""
    documents: Tensor | None = None
    """Long[B,T]: which document a token is of; attention stays inside a document. None: one document."""
    cache: KVCache | None = None
    """Keys and values of earlier tokens, when generating."""
