"""Tokens and time to a loss: `experiment=speedrun` against nanoGPT's recipe on the same tokens, model size and threads.

    python benchmarks/time_to_loss.py --peer nanogpt=DIR --size 2m --json t.json --png t.png
    python benchmarks/time_to_loss.py --peer nanogpt=DIR --size andrea12m --tokens 250000
    python benchmarks/time_to_loss.py --peer nanogpt=DIR --size 2m --grid none --lr 1e-3 --batch 4 --steps 150

Three parts, in this order:

1. The peer: nanoGPT's own model and groups of AdamW (0.9 / 0.95, decay 0.1, clipping to 1), warm-up and cosine to a
   tenth, in its loop, over a grid of learning rates and batch sizes, each for the same number of tokens. The best final
   validation loss wins. The budget is one pass over the training tokens if none is given, so that nothing overfits.
2. The search, on a seed of its own: the shortest of ever longer budgets (`FRACTIONS` of the peer's) with which ours
   ends below that loss, by `--margin` for the luck of other seeds. Our schedule ends at 0, so each budget is a run.
3. The seeds: both sides once a seed, taking turns at going first. The target is the lowest loss that the peer has
   reached anywhere in 1 and 3. A seed of ours that does not reach it is said to have missed it.

Validation is the mean cross-entropy a token over all windows of the validation split, the same for both, and no part
of the time; nor are checkpoints and start-up. Ours is the training that `gptframe train experiment=speedrun` does.
Both are in float32 and run as PyTorch does them, nothing compiled, as nanoGPT's README has it for a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from timing import load
from torch import Tensor, nn

from gptframe.compose import compose_config
from gptframe.config import Config
from gptframe.data.batches import IGNORE, ValBatches
from gptframe.data.prepare import Prepared, prepare
from gptframe.training.run import train

SIZES = {  # windows of 256 for both: with andrea12m's 1024 a budget that a CPU can pay has too few steps
    "2m": ["model=andrea12m", "model.d_model=192", "model.n_layers=4", "model.n_heads=6", "model.context_length=256"],
    "andrea12m": ["model=andrea12m", "model.context_length=256"],
    "tiny": ["model=andrea12m", "model.d_model=32", "model.n_layers=2", "model.n_heads=2", "model.context_length=64"],
}
OURS = ["trainer.global_batch_size=4"]  # sequences in a step
GRIDS = {"small": "1e-3x4,2e-3x4,5e-4x2,1e-3x2,2e-3x2", "none": ""}  # learning rate x sequences in a step
FRACTIONS = [0.1, 0.125, 0.15, 0.175, 0.2, 0.225, 0.25, 0.275, 0.3, 0.325, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.85, 1.0]
TOKENS_BAR, TIME_BAR = 2.0, 2.5
SEARCH_SEED = 1000


@dataclass(frozen=True)
class Run:
    """One training run: what it came to, and what it cost without validation."""

    side: str
    seed: int
    steps: int
    tokens: int
    loss: float
    train_loss: float
    seconds: float
    processor: float
    parameters: int
    load: float
    recipe: str = ""


class Stopwatch(pl.Callback):
    """The clocks at the first step's beginning and the last one's end, before validation and the checkpoint."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 0:
            self.began = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            self.ended = time.perf_counter(), time.process_time()
            self.parameters = sum(p.numel() for p in module.parameters())


def ours(overrides: list[str], steps: int, seed: int) -> Run:
    """What `gptframe train` does with these overrides."""
    with contextlib.redirect_stderr(io.StringIO()):  # notes on a preset's options that give way
        values = compose_config([
            *overrides, f"seed={seed}", f"trainer.max_steps={steps}", f"trainer.val_interval={steps}",
            f"trainer.checkpoint_interval={steps}", f"trainer.threads={torch.get_num_threads()}", "trainer=cpu",
            "precision=fp32", "callbacks=none", "data.baseline_order=0",
        ])  # fmt: skip
    watch, trainer = Stopwatch(), pl.Trainer

    def with_watch(*args: Any, callbacks: list[pl.Callback], **kwargs: Any) -> pl.Trainer:
        return trainer(*args, callbacks=[watch, *callbacks], **kwargs)

    pl.Trainer = with_watch
    busy = os.getloadavg()[0]
    try:
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
            config = Config.from_dict({**values, "run_dir": f"{folder}/run"})
            result = train(config, [])
    finally:
        pl.Trainer = trainer
    wall, used = (end - start for start, end in zip(watch.began, watch.ended, strict=True))
    tokens = steps * config.trainer.global_batch_size * config.model.context_length
    return Run(
        "ours", seed, steps, tokens, result.val_loss, result.train_loss, wall, used, watch.parameters, busy,
        f"{config.trainer.global_batch_size} sequences",
    )  # fmt: skip


class NanoGPT:
    """nanoGPT's model and recipe, from the folder of a clone."""

    def __init__(self, folder: str, config: Config, data: Prepared):
        file = Path(folder).expanduser() / "model.py"
        if not folder or not file.is_file():
            raise SystemExit("error: give the folder of a clone, as in --peer nanogpt=DIR")
        spec = importlib.util.spec_from_file_location("nanogpt_model", file)
        assert spec is not None and spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.cfg, self.data, self.tokens = config.model, data, np.asarray(data.train.tokens)

    def train(self, lr: float, batch: int, tokens: int, seed: int) -> Run:
        """One run: linear warm-up for 5 % of the steps, then cosine to lr / 10; windows at random offsets."""
        torch.manual_seed(seed)
        cfg, length = self.cfg, self.cfg.context_length
        sizes = {"n_layer": cfg.n_layers, "n_head": cfg.n_heads, "n_embd": cfg.d_model, "block_size": length}
        with contextlib.redirect_stdout(io.StringIO()):  # it says how many parameters it has
            # no biases and no dropout: the defaults of its train.py
            model = self.module.GPT(self.module.GPTConfig(**sizes, vocab_size=cfg.vocab_size, bias=False, dropout=0.0))
            optimizer = model.configure_optimizers(0.1, lr, (0.9, 0.95), "cpu")
        steps = max(1, round(tokens / (batch * length)))
        warmup = round(0.05 * steps)
        busy = os.getloadavg()[0]
        wall, used = time.perf_counter(), time.process_time()
        ids, targets = self.batch(batch)
        for step in range(steps):
            progress = (step - warmup) / max(1, steps - warmup)
            cosine = lr / 10 + 0.5 * (1 + math.cos(math.pi * progress)) * (lr - lr / 10)
            for group in optimizer.param_groups:
                group["lr"] = lr * (step + 1) / (warmup + 1) if step < warmup else cosine
            _, loss = model(ids, targets)
            ids, targets = self.batch(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        wall, used = time.perf_counter() - wall, time.process_time() - used
        count = sum(p.numel() for p in model.parameters())
        return Run(
            "peer", seed, steps, steps * batch * length, self.validate(model), float(loss.detach()), wall, used, count,
            busy, recipe(lr, batch),
        )  # fmt: skip

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """(ids, targets), Long[B,T] each."""
        length = self.cfg.context_length
        starts = torch.randint(len(self.tokens) - length, (size,))
        rows = torch.stack([torch.from_numpy(self.tokens[i : i + length + 1].astype(np.int64)) for i in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        """Mean cross-entropy a token over the windows that gptframe validates on."""
        model.eval()
        total, count = 0.0, 0
        for batch in ValBatches(self.data.val, self.cfg.context_length, 8):
            n = int((batch["targets"] != IGNORE).sum())
            total += float(model(batch["ids"], batch["targets"].masked_fill(batch["targets"] == IGNORE, -1))[1]) * n
            count += n
        return total / count


def recipe(lr: float, batch: int) -> str:
    """What is varied of the peer's recipe, in words."""
    return f"lr {lr:g}, {batch} sequences"


def _earlier(file: Path | None, report: dict[str, Any]) -> list[Run]:
    """The grid and the search of an earlier run of this command, as FILE holds them, where nothing else differs."""
    if file is None or not file.is_file():
        return []
    held = json.loads(file.read_text(encoding="utf-8"))
    if any(held.get(key) != report[key] for key in ("torch", "threads", "size", "ours", "budget", "train_tokens")):
        return []
    return [Run(**{k: v for k, v in row.items() if k != "part"}) for row in held["runs"] if row["part"] != "seeds"]


def interval(values: list[float]) -> tuple[float, float, float]:
    """(mean, lower, upper): the 95 % interval of Student's t, which needs two values."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
    half = quantile.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def search(run: Callable[[int], Run], peer_steps_of_ours: float, wanted: float) -> int:
    """The fewest steps, of `FRACTIONS` of `peer_steps_of_ours`, with which `run` ends at `wanted` or below."""
    place, reached = FRACTIONS.index(0.2), None
    while True:
        steps = max(2, round(FRACTIONS[place] * peer_steps_of_ours))
        good = run(steps).loss <= wanted
        if good and (place == 0 or reached == "not below"):
            return steps
        if not good and (reached is not None and reached != "not below"):
            return int(reached)
        if not good and place == len(FRACTIONS) - 1:
            raise SystemExit("error: ours does not reach the peer's loss with the peer's tokens")
        reached = steps if good else "not below"
        place += -1 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, metavar="nanogpt=DIR")
    parser.add_argument("--size", choices=SIZES, default="2m")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="of each run of the peer; all of the training split if not given")
    parser.add_argument("--grid", default="small", help="small, none, or LRxBATCH,LRxBATCH,...")
    parser.add_argument("--lr", type=float, default=4e-3, help="of the peer, with --grid none")
    parser.add_argument("--batch", type=int, default=4, help="of the peer, with --grid none")
    parser.add_argument("--steps", type=int, help="of ours; searched if not given")
    parser.add_argument("--margin", type=float, default=0.01, help="nats below the target that the search asks for")
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="overrides of our side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="the runs; what FILE holds of grid and search is not run again")
    parser.add_argument("--png", type=Path)
    a = parser.parse_args()
    name, _, folder = a.peer.partition("=")
    if name != "nanogpt":
        raise SystemExit(f"error: --peer {name}: the recipe that is compared is nanogpt's")
    torch.set_num_threads(a.threads)
    # The size comes after the recipe, which is the same for every model; what --ours gives comes last.
    overrides = ["experiment=speedrun", *SIZES[a.size], *OURS, *a.ours]
    with contextlib.redirect_stderr(io.StringIO()):
        config = Config.from_dict(compose_config(SIZES[a.size]))
        batch = Config.from_dict(compose_config(overrides)).trainer.global_batch_size
    data = prepare(config.data, config.tokenizer, config.model.vocab_size)
    peer = NanoGPT(folder, config, data)
    budget = a.tokens or len(data.train)
    report: dict[str, Any] = {
        "machine": load(), "torch": torch.__version__, "threads": a.threads, "size": a.size, "ours": overrides,
        "train_tokens": len(data.train), "val_tokens": len(data.val), "budget": budget, "runs": [],
    }  # fmt: skip
    print(f"{report['machine']}; torch {torch.__version__}, {a.threads} threads")
    print(f"{a.size}: {len(data.train):,} training and {len(data.val):,} validation tokens; the peer sees {budget:,}")

    earlier = _earlier(a.json, report)

    def noted(part: str, run: Run) -> Run:
        report["runs"].append({"part": part, **asdict(run)})
        print(
            f"{part:<6} {run.side:<4} seed {run.seed:<4} {run.steps:>5} steps {run.tokens:>8,} tokens "
            f"{run.seconds:7.1f} s  loss {run.loss:.4f} (training {run.train_loss:.3f})  {run.recipe}, "
            f"{run.parameters:,} parameters, load {run.load:.1f}",
            flush=True,
        )
        if a.json:
            a.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
        return run

    grid = GRIDS.get(a.grid, a.grid)
    points = [(float(lr), int(size)) for lr, size in (point.split("x") for point in grid.split(",") if point)]

    def tuned(lr: float, size: int) -> Run:
        found = [run for run in earlier if run.side == "peer" and run.recipe == recipe(lr, size)]
        return noted("grid", found[0] if found else peer.train(lr, size, budget, SEARCH_SEED))

    tried = [(tuned(lr, size), lr, size) for lr, size in points]
    best, lr, size = min(tried, key=lambda t: t[0].loss) if tried else (None, a.lr, a.batch)

    def one(part: str, steps: int, seed: int) -> Run:
        found = [run for run in earlier if run.side == "ours" and run.steps == steps and part == "search"]
        return noted(part, found[0] if found else ours(overrides, steps, seed))

    steps = a.steps
    if steps is None:
        wanted = (best or tuned(lr, size)).loss - a.margin
        full = budget / (batch * config.model.context_length)
        steps = search(lambda n: one("search", n, SEARCH_SEED), full, wanted)
    pairs = []
    for seed in range(a.seeds):
        sides = {
            "ours": lambda seed=seed: one("seeds", steps, seed),
            "peer": lambda seed=seed: noted("seeds", peer.train(lr, size, budget, seed)),
        }
        order = ("ours", "peer") if seed % 2 else ("peer", "ours")
        done = {side: sides[side]() for side in order}
        pairs.append((done["ours"], done["peer"]))
    target = min(row["loss"] for row in report["runs"] if row["side"] == "peer")
    missed = [mine.seed for mine, _ in pairs if mine.loss > target]
    ratios = {
        "tokens": [theirs.tokens / mine.tokens for mine, theirs in pairs],
        "time": [theirs.seconds / mine.seconds for mine, theirs in pairs],
        "processor": [theirs.processor / mine.processor for mine, theirs in pairs],
    }
    report["target"], report["missed"] = target, missed
    report["ratios"] = {key: dict(zip(("mean", "low", "high"), interval(v), strict=True)) for key, v in ratios.items()}
    print(f"target {target:.4f}, the lowest loss of the peer; ours: "
          + ", ".join(f"{mine.loss:.4f}" for mine, _ in pairs)
          + (f"; MISSED by seeds {missed}" if missed else "; reached by every seed"))  # fmt: skip
    for key, bar in (("tokens", TOKENS_BAR), ("time", TIME_BAR), ("processor", TIME_BAR)):
        mean, low, high = interval(ratios[key])
        says = "reached" if mean >= bar and not missed else "MISSED"
        print(f"{key:<10} peer / ours {mean:.2f} [{low:.2f}, {high:.2f}]  bar {bar}: {says}")
    if a.json:
        a.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if a.png:
        draw(report, a.png)
    return 0


def draw(report: dict[str, Any], path: Path) -> None:
    """Every run as a point: seconds or tokens against the loss that it ended with."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), dpi=130, layout="constrained")
    colours = {"ours": "#d9622b", "peer": "#2a5c9e"}
    names = {"ours": "experiment=speedrun", "peer": "nanoGPT's recipe"}
    for axes, key, unit in zip(figure.subplots(1, 2, sharey=True), ("tokens", "seconds"), (1000, 1), strict=True):
        for side, colour in colours.items():
            for part, filled in (("seeds", True), ("search", False), ("grid", False)):
                rows = [r for r in report["runs"] if r["side"] == side and r["part"] == part]
                axes.scatter(
                    [r[key] / unit for r in rows], [r["loss"] for r in rows], s=28, edgecolors=colour,
                    facecolors=colour if filled else "none", label=names[side] if filled else None,
                )  # fmt: skip
        axes.axhline(report["target"], color="#555555", linestyle="--", linewidth=1)
        axes.set(
            xlabel={"tokens": "thousands of training tokens", "seconds": "seconds of training"}[key], xlim=(0, None)
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        if key == "tokens":
            axes.set_ylabel("final validation loss (nats per token)")
            axes.legend(frameon=False)
    figure.suptitle(f"{report['size']}: filled, the seeds; open, grid and search\n{report['machine']}", fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
