"""What training costs around the mathematics: gptframe's loop against a bare PyTorch loop over the same steps.

    python benchmarks/overhead.py                         # 5 rounds of 1000 mini steps each, some two minutes
    python benchmarks/overhead.py --steps 300 --rounds 3 --json overhead.json
    python benchmarks/overhead.py --check                 # exit status 1 where the bar is missed

Both train the mini model with the same initial weights, batches, learning rates, clipping and fused AdamW on as many
threads, and must end at the same loss, to the last bit. The bare loop is what a person writes by hand: no log, no
progress, no checkpoint. gptframe's run has its defaults: a row of metrics.csv and a drawn line every ten steps. What is
timed is the steps, from the first to the last, and what happens between them; validation and the last checkpoint, which
the bare loop does not have, come after the last step. Rounds alternate within one process; the ratio is the median over
rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from timing import load, ratio, ratio_words
from torch.nn.utils import clip_grad_norm_

from gptframe.compose import compose_config
from gptframe.config import Config
from gptframe.data.batches import IGNORE, Batches
from gptframe.data.prepare import Prepared, prepare
from gptframe.model import build_model
from gptframe.registry import build
from gptframe.training.optimizer import param_groups
from gptframe.training.run import train
from gptframe.training.schedule import make_schedule

BAR = 1.05
Cost = tuple[float, float, float]  # seconds on the wall, of the processor, and the last loss


class Terminal(io.StringIO):
    """Where the progress bar is drawn, as on a terminal, and nobody looks."""

    def isatty(self) -> bool:
        return True


class Stopwatch(pl.Callback):
    """Reads the clocks when the first step begins and when the last one has its row on disk."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 0:
            self.began = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            self.ended = time.perf_counter(), time.process_time()


def ours(config: Config) -> Cost:
    """gptframe's own run."""
    watch = Stopwatch()
    trainer = pl.Trainer

    def with_watch(*args: Any, callbacks: list[pl.Callback], **kwargs: Any) -> pl.Trainer:
        return trainer(*args, callbacks=[watch, *callbacks], **kwargs)

    pl.Trainer = with_watch
    try:
        with contextlib.redirect_stdout(Terminal()), tempfile.TemporaryDirectory() as folder:
            result = train(Config.from_dict({**config.to_dict(), "run_dir": f"{folder}/run"}), [])
    finally:
        pl.Trainer = trainer
    wall, used = (end - start for start, end in zip(watch.began, watch.ended, strict=True))
    return wall, used, result.train_loss


def bare(config: Config, prepared: Prepared) -> Cost:
    """The same steps in the loop that a person writes by hand."""
    model = build_model(config.model, config.seed)
    optimizer = build("optimizer", config.optimizer, param_groups(model))
    schedule = make_schedule(config.schedule, config.trainer.max_steps)
    batches = Batches(prepared.train, config.model.context_length, config.trainer.global_batch_size, config.seed)
    lr = config.optimizer["lr"]
    wall, used = time.perf_counter(), time.process_time()
    for step in range(config.trainer.max_steps):
        batch = batches.at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step)
        n_targets = (batch["targets"] != IGNORE).sum()  # the last window of an epoch is padded
        loss = model(batch["ids"], None, batch["targets"]) / n_targets
        loss.backward()
        clip_grad_norm_(model.parameters(), config.trainer.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    last = float(loss.detach())
    return time.perf_counter() - wall, time.process_time() - used, last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--progress", choices=("bar", "lines", "none"), default="bar")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the bar is missed")
    arguments = parser.parse_args()
    a = arguments
    os.environ.setdefault("TERM", "xterm-256color")
    config = Config.from_dict(
        compose_config([
            f"trainer.max_steps={a.steps}", f"trainer.global_batch_size={a.batch}", f"trainer.threads={a.threads}",
            f"trainer.val_interval={a.steps}", f"trainer.checkpoint_interval={a.steps}", "trainer=cpu",
            f"callbacks.progress={a.progress}", "callbacks.samples.count=0", "callbacks.loss_curve=false",
            "data.baseline_order=0", "precision=fp32",
        ])
    )  # fmt: skip
    torch.set_num_threads(a.threads)
    prepared = prepare(config.data, config.tokenizer, config.model.vocab_size, seed=config.seed)
    words = load()
    print(f"{words}; torch {torch.__version__}, {a.threads} threads")
    print(f"mini, {a.rounds} rounds of {a.steps} steps of {a.batch} x {config.model.context_length} tokens")
    costs: dict[str, list[Cost]] = {"gptframe": [], "bare": []}
    for number in range(a.rounds + 1):
        for name in ("gptframe", "bare") if number % 2 else ("bare", "gptframe"):
            torch.set_num_threads(a.threads)
            cost = ours(config) if name == "gptframe" else bare(config, prepared)
            if number:  # the first round warms up
                costs[name].append(cost)
    losses = {cost[2] for column in costs.values() for cost in column}
    if len(losses) != 1:
        raise SystemExit(f"error: the losses differ: {sorted(losses)}")
    results: dict[str, Any] = {"machine": words, "steps": a.steps, "batch": a.batch, "costs": costs}
    for place, which in enumerate(("wall", "processor")):
        mine, theirs = ([cost[place] for cost in costs[name]] for name in ("gptframe", "bare"))
        results[which] = ratio(mine, theirs)
        print(
            f"{which:9s} gptframe {statistics.median(mine) / a.steps * 1e3:.3f} ms a step, "
            f"bare {statistics.median(theirs) / a.steps * 1e3:.3f}: ratio {ratio_words(results[which])}"
        )
    reached = results["processor"][1] <= BAR
    print(f"same loss {losses.pop():.6f}; bar (processor time at most {BAR}x): {'reached' if reached else 'MISSED'}")
    if a.json:
        a.json.write_text(json.dumps(results, indent=1))
    return int(a.check and not reached)


if __name__ == "__main__":
    raise SystemExit(main())
