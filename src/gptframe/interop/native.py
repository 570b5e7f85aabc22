"""gptframe's own weights as safetensors, for any model: the names of `GPT`, beside the config of the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from gptframe.config import Config
from gptframe.data.tokenizer import load
from gptframe.errors import UserError
from gptframe.interop.rundir import Imported, Run
from gptframe.interop.weights import Weights, check_finite, write_safetensors
from gptframe.training import directory

TOKENIZER = "tokenizer"


def write(run: Run, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """Write weights, config.yaml and tokenizer."""
    state = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in run.state.items()}
    write_safetensors(state, folder, shard_bytes, {"step": str(run.step)})
    directory.write_yaml(folder / "config.yaml", {**run.config.to_dict(), "resume": None, "run_dir": None})
    if (run.path / TOKENIZER).is_dir():
        shutil.copytree(run.path / TOKENIZER, folder / TOKENIZER)


def read(place: Path, name: str | None = None) -> Imported:
    """Read what `write` wrote.

    Args:
        name: of the model; None for the one that it has.

    Raises:
        UserError: it is something else, or damaged.
    """
    from gptframe import plugins

    if not (place / "config.yaml").is_file():
        raise UserError(f"--from {place}: it has no config.yaml, so gptframe did not write it")
    config = directory.read_config(place)
    plugins.load(config.plugins)
    if name is not None:
        values = config.to_dict()
        config = Config.from_dict({**values, "name": name, "model": {**values["model"], "name": name}})
    weights = Weights(place)
    state = {name: weights[name] for name in weights}
    for name, tensor in state.items():
        check_finite(name, tensor, place)
    found = Imported(config.model, state, source={"format": "safetensors", "from": str(place)}, plugins=config.plugins)
    if (place / TOKENIZER).is_dir():
        found.tokenizer, found.save_tokenizer = dict(config.tokenizer), load(place / TOKENIZER).save
    return found
