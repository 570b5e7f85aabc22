"""Which tokens are in which batch: a pure function of (seed, step).

The store is cut into windows of `context_length` targets: window i predicts tokens i*T + 1 ... i*T + T from the ones
before, so each token but the very first is a target exactly once an epoch. The last window is padded. An epoch visits
the windows in a permutation drawn from (seed, epoch); batches follow one another without regard to epochs' ends, and
sample number `step * global_batch_size + i` is the i-th sequence of batch `step`, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gptframe.data.tokens import TokenStore
from gptframe.errors import UserError

IGNORE = -100  # torch.nn.functional.cross_entropy's ignore_index


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of n windows in one epoch, [n].

    It sorts raw Philox words (Salmon et al., 2011): a bit generator's stream is the same in every NumPy, which
    Generator.permutation's is not promised to be.
    """
    words = np.random.Philox(np.random.SeedSequence((seed, epoch))).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.uint32 if n <= 2**32 else np.int64)


class _Windows:
    """Windows of a store as tensors."""

    def __init__(self, store: TokenStore, context_length: int, documents: bool, pad_id: int | None) -> None:
        if len(store) < 2:
            raise UserError(f"{store.source} has {len(store)} tokens, too few to predict one from another")
        self.store, self.length, self.with_documents, self.pad = store, context_length, documents, pad_id or 0
        self.count = -(-(len(store) - 1) // context_length)
        whole = len(store) >= context_length + 1
        # Rows of this view are windows of T + 1 tokens, so that a batch is one gather of whole rows.
        self._rows = np.lib.stride_tricks.sliding_window_view(store.tokens, context_length + 1) if whole else None

    def at(self, windows: np.ndarray) -> dict[str, Tensor]:
        """ids and targets, Long[b, T], and documents, Long[b, T], of the given windows; -1 gives a row of padding."""
        starts = windows.astype(np.int64) * self.length
        whole = (windows >= 0) & (starts + self.length < len(self.store))
        if self._rows is not None and whole.all():
            rows = self._rows[starts].astype(np.int64)
            targets = rows[:, 1:].copy()
        else:
            rows = np.full((len(windows), self.length + 1), self.pad, dtype=np.int64)
            targets = np.full((len(windows), self.length), IGNORE, dtype=np.int64)
            for row in np.flatnonzero(windows >= 0):
                tokens = self.store.window(int(starts[row]), self.length + 1)
                rows[row, : len(tokens)] = tokens
                targets[row, : len(tokens) - 1] = tokens[1:]
        # The copies are contiguous tensors of their own: whoever writes into one changes no other.
        batch = {"ids": torch.from_numpy(rows[:, :-1].copy()), "targets": torch.from_numpy(targets)}
        if self.with_documents:
            batch["documents"] = torch.from_numpy(self._documents_of(np.clip(starts, 0, None)))
        return batch

    def _documents_of(self, starts: np.ndarray) -> np.ndarray:
        """For each position of the windows at `starts` its document, counted from the window's first, [b, T]."""
        ends = self.store.documents
        # Looked up once a window, not at every position: the documents that begin inside, summed from left to right.
        first, last = (np.searchsorted(ends, at, side="right") for at in (starts, starts + self.length - 1))
        begun = [
            np.bincount(ends[i:j] - start, minlength=self.length)
            for i, j, start in zip(first, last, starts, strict=True)
        ]
        return np.cumsum(begun, axis=1, dtype=np.int64)


class Batches:
    """The batches of training, of one rank.

    Args:
        global_batch_size: sequences in one optimiser step, over all ranks; divisible by world_size.
        documents: add `documents`, Long[b, T]: for each position the number of its document, counted from the
            window's first.
        pad_id: what stands where there is no token.
    """

    def __init__(
        self,
        store: TokenStore,
        context_length: int,
        global_batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        documents: bool = False,
        pad_id: int | None = None,
    ) -> None:
        if global_batch_size % world_size:
            raise UserError(f"trainer.global_batch_size={global_batch_size} is not divisible by {world_size} devices")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._windows = _Windows(store, context_length, documents, pad_id)
        self.global_batch_size, self.seed = global_batch_size, seed
        self._share = global_batch_size // world_size
        self._first = rank * self._share
        self._epochs: dict[int, np.ndarray] = {}

    @property
    def windows(self) -> int:
        """Windows, and so samples, in an epoch."""
        return self._windows.count

    def epoch(self, step: int) -> float:
        """Epochs that are over before `step`, with their fraction."""
        return step * self.global_batch_size / self.windows

    def window_indices(self, step: int) -> np.ndarray:
        """The windows of this rank's part of batch `step`, [b]."""
        samples = step * self.global_batch_size + self._first + np.arange(self._share, dtype=np.int64)
        first, last = int(samples[0]) // self.windows, int(samples[-1]) // self.windows
        if first == last:
            return self._order(first)[samples - first * self.windows].astype(np.int64)
        epochs, places = np.divmod(samples, self.windows)
        result = np.empty(self._share, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = self._order(int(epoch))[places[here]]
        return result

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = permutation(self.windows, self.seed, epoch)
        return self._epochs[epoch]

    def at(self, step: int) -> dict[str, Tensor]:
        """Batch `step`: `ids` and `targets`, Long[b, T], and `documents` where asked for."""
        if step < 0:
            raise IndexError(f"step {step}")
        return self._windows.at(self.window_indices(step))

    def iterate(self, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Batches `start`, `start + 1`, ... without end."""
        while True:
            yield self.at(start)
            start += 1


class ValBatches:
    """The batches of validation, in order; over all ranks each target once.

    Every rank has the same number of batches of the same shape; rows without a window have no targets. `limit` takes
    that many batches, evenly spaced over the split.
    """

    def __init__(
        self,
        store: TokenStore,
        context_length: int,
        batch_size: int,
        limit: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        *,
        documents: bool = False,
        pad_id: int | None = None,
    ) -> None:
        self._windows = _Windows(store, context_length, documents, pad_id)
        self._size, self._rank, self._ranks = batch_size, rank, world_size
        total = -(-self._windows.count // (batch_size * world_size))
        self._chosen: Sequence[int] = range(total)
        if limit is not None and limit < total:
            self._chosen = [i * total // limit for i in range(limit)]

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self._chosen:
            first = (batch * self._ranks + self._rank) * self._size
            windows = np.arange(first, first + self._size)
            yield self._windows.at(np.where(windows < self._windows.count, windows, -1))
