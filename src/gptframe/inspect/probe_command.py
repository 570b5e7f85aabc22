"""`gptframe probe`: from a config to measured gradients."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from gptframe.config import Config
from gptframe.inspect import probe_report
from gptframe.inspect.commands import print_json
from gptframe.inspect.probe import Batch, probe
from gptframe.inspect.source import Source, check_room, with_vocabulary


def run(config: Config, arguments: argparse.Namespace, plot: Path | None) -> int:
    """Probe, print, and write the plot asked for."""
    if arguments.random:
        config = with_vocabulary(Source(config))
        batches = _random(config)
    else:
        config, batches = _of_corpus(config)
    check_room(config.model)
    seeds = [config.seed + i for i in range(arguments.seeds)]
    found = probe(config, batches, seeds, arguments.steps)
    if plot:
        probe_report.plot(found, plot)
    if arguments.json:
        print_json(probe_report.to_dict(found))
    else:
        probe_report.report(found)
        if plot:
            print(f"wrote {plot}")
    return 0


def _of_corpus(config: Config) -> tuple[Config, Callable[[int, int], Batch]]:
    import dataclasses

    from gptframe.data.batches import Batches
    from gptframe.data.prepare import prepare

    length = config.model.context_length
    prepared = prepare(
        config.data, config.tokenizer, config.model.vocab_size, seed=config.seed, context_length=length
    )  # fmt: skip
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or prepared.vocab_size)
    made: dict[int, Batches] = {}

    def batches(seed: int, step: int) -> Batch:
        if seed not in made:
            size = config.trainer.global_batch_size
            made[seed] = Batches(prepared.train, length, size, seed, documents=prepared.mask_documents)
        return made[seed].at(step)

    return dataclasses.replace(config, model=model), batches


def _random(config: Config) -> Callable[[int, int], Batch]:
    shape = (config.trainer.global_batch_size, config.model.context_length + 1)

    def batches(seed: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(0, config.model.vocab_size or 1, shape, generator=generator)
        return {"ids": rows[:, :-1], "targets": rows[:, 1:]}

    return batches
