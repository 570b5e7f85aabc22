"""gptframe: a training framework for GPT models in which the architecture is configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptframe.errors import UserError
from gptframe.registry import register

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from gptframe.inspect.trace import Trace
    from gptframe.loading import LoadedModel
    from gptframe.model import GPT

__version__ = "0.1.0"
__all__ = ["UserError", "__version__", "load", "register", "trace"]


def load(path: str | Path, device: str | None = None, dtype: str | torch.dtype | None = None) -> LoadedModel:
    """The model of a run directory: `load("runs/...").generate("I work ,")`; see `gptframe.loading`."""
    from gptframe.loading import load as load_model  # late, since it imports torch

    return load_model(path, device, dtype)


def trace(model: GPT) -> AbstractContextManager[Trace]:
    """`with trace(model) as t: model(ids)`, then `t["blocks.1.attention.pattern"]`; see `gptframe.inspect.trace`."""
    from gptframe.inspect.trace import trace as record  # late, since it imports torch

    return record(model)
