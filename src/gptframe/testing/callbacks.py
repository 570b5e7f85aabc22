"""Checks of callbacks: they run in a training, and what they keep is in its checkpoints."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from gptframe import registry
from gptframe.errors import UserError
from gptframe.model.gpt import build_model
from gptframe.testing.kit import Failure, check, raised
from gptframe.testing.subject import Subject
from gptframe.training.checkpoint import refuse_unreadable

STEPS = 6


class _Batches(torch.utils.data.Dataset):
    """One batch, again and again: Lightning does not go on behind those that it has seen."""

    def __init__(self, s: Subject):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, s.plain.vocab_size or 1, (4, s.context), generator=generator)

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.ids, "targets": self.ids.roll(-1, dims=-1)}


def _callback(s: Subject) -> Any:
    return registry.build("callback", s.section, key=f"callbacks.extra.{s.name}")


@contextlib.contextmanager
def _trainer(s: Subject, steps: int) -> Iterator[tuple[Any, Any]]:
    """A Lightning trainer for some steps of a small run, with the callback in it, and the module."""
    import pytorch_lightning as pl

    from gptframe.training.module import GPTModule
    from gptframe.training.run import quiet_lightning

    with quiet_lightning(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = GPTModule(build_model(s.plain), {"name": "adamw", "lr": 1e-2}, lambda step: 1.0, micro_batch_size=4)
        yield (
            pl.Trainer(
                accelerator="cpu",
                max_steps=steps,
                callbacks=[_callback(s)],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
            ),
            module,
        )


def _loader(s: Subject) -> DataLoader:
    return DataLoader(_Batches(s), batch_size=None)


@check("callback", name="contract")
def callback_contract(s: Subject) -> str:
    """is a Lightning callback that a training runs with, and leaves the weights finite"""
    import pytorch_lightning as pl

    callback = _callback(s)
    if not isinstance(callback, pl.Callback):
        raise Failure(f"{type(callback).__name__} is no pytorch_lightning.Callback", cause="derive from pl.Callback")
    with _trainer(s, STEPS) as (trainer, module):
        try:
            trainer.fit(module, _loader(s))
        except Exception as error:
            raise raised(error, s, "in a training of 6 steps it") from None
        for name, p in module.model.named_parameters():
            if not bool(p.isfinite().all()):
                raise Failure(f"after {STEPS} steps {name} is not finite")
    return f"{STEPS} steps"


@check("callback")
def checkpointed(s: Subject) -> str:
    """saved after half of the steps and resumed, the run ends with the same weights to the last bit"""
    with _trainer(s, STEPS) as (trainer, whole):
        trainer.fit(whole, _loader(s))
        try:
            refuse_unreadable(s.name, trainer.callbacks[0].state_dict())
        except UserError as error:
            raise Failure(str(error), cause="state_dict must hold tensors and plain containers") from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half.ckpt"
        with _trainer(s, STEPS // 2) as (trainer, half):
            trainer.fit(half, _loader(s))
            trainer.save_checkpoint(path)
        with _trainer(s, STEPS) as (trainer, resumed):
            trainer.fit(resumed, _loader(s), ckpt_path=path, weights_only=True)
    for name, p in whole.model.named_parameters():
        if not torch.equal(p, resumed.model.get_parameter(name)):
            raise Failure(
                f"resumed after {STEPS // 2} of {STEPS} steps, {name} is another",
                cause="what it remembers must be in state_dict and come back in load_state_dict",
            )
    return ""
