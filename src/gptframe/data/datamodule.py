"""The batches as Lightning sees them: one batch of the training loader is one optimiser step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gptframe.data.batches import Batches, ValBatches
from gptframe.data.prepare import Prepared


class _Stream(IterableDataset):
    def __init__(self, module: GPTDataModule) -> None:
        self.module = module

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        # Asked for when iteration begins, that is after a checkpoint has set the step.
        return self.module.batches().iterate(self.module.step)


class _Validation(IterableDataset):
    def __init__(self, batches: ValBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


class GPTDataModule(pl.LightningDataModule):
    """Training and validation batches of prepared data.

    A training batch holds all sequences of one optimiser step on this rank (`ids`, `targets`, Long[b, T] with
    b = global_batch_size / world size); the training module splits it into micro-batches. The stream has no end and
    begins at the trainer's global_step, so that a resumed run sees what it would have seen.

    Args:
        val_batch_size: sequences in a validation batch.
        val_batches: upper bound on the number of validation batches; None for the whole split.
    """

    def __init__(
        self,
        prepared: Prepared,
        context_length: int,
        global_batch_size: int,
        val_batch_size: int,
        seed: int = 0,
        val_batches: int | None = None,
    ) -> None:
        super().__init__()
        self.prepared = prepared
        self.context_length, self.global_batch_size = context_length, global_batch_size
        self.val_batch_size, self.seed, self.val_batches = val_batch_size, seed, val_batches

    @property
    def step(self) -> int:
        """Optimiser steps that are done; the next batch has this number."""
        return self.trainer.global_step if self.trainer is not None else 0

    def _common(self) -> dict[str, Any]:
        tokenizer = self.prepared.tokenizer
        ranks = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        return {
            "rank": ranks[0],
            "world_size": ranks[1],
            "documents": self.prepared.mask_documents,
            "pad_id": tokenizer.pad_id if tokenizer is not None else None,
        }

    def batches(self) -> Batches:
        """The training batches of this rank, by step."""
        return Batches(self.prepared.train, self.context_length, self.global_batch_size, self.seed, **self._common())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Stream(self), batch_size=None, num_workers=0, pin_memory=torch.cuda.is_available())

    def val_dataloader(self) -> DataLoader:
        batches = ValBatches(
            self.prepared.val, self.context_length, self.val_batch_size, self.val_batches, **self._common()
        )
        return DataLoader(_Validation(batches), batch_size=None, num_workers=0, pin_memory=torch.cuda.is_available())
