"""What a run says to people when it begins and when it ends."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptframe.config import Config
from gptframe.training.device import Device


@dataclass(frozen=True)
class RunResult:
    """What a run came to."""

    run_dir: Path
    exit_code: int = 0
    """0, or 143 and 130 where SIGTERM or Ctrl-C ended it; everything is saved then."""
    step: int = 0
    train_loss: float = math.nan
    """Of the last step, nats a token."""
    val_loss: float = math.nan
    """Of the last validation, nats a token; nan where there was none."""
    baseline: float | None = None
    """The n-gram's loss on the same validation tokens."""
    baseline_order: int | None = None
    baseline_best: float | None = None
    """The same with the order and alpha that suit the validation tokens best, which no honest n-gram can know."""
    verb_accuracy: float | None = None
    backends: dict[str, str] = field(default_factory=dict)
    """What ran where a module had a choice, as its `manifest()` says."""
    samples: list[str] = field(default_factory=list)


def announce(
    progress: Any,
    config: Config,
    device: Device,
    n_parameters: int,
    prepared: Any,
    run_dir: Path,
    resumed_at: int | None,
) -> None:
    """What will be trained, on what, where."""
    t, m = config.trainer, config.model
    tokens = t.global_batch_size * m.context_length
    where = f"{device.accelerator}" + (f" x {t.devices * t.num_nodes}" if t.devices * t.num_nodes > 1 else "")
    accumulation = (
        f" in {device.accumulation} micro-batches of {device.micro_batch_size}" if device.accumulation > 1 else ""
    )
    progress.say(f"{config.name}: {n_parameters:,} parameters, {where}, {device.precision}")
    progress.say(
        f"data: {config.data['name']}, {len(prepared.train):,} training and {len(prepared.val):,} validation tokens"
    )
    progress.say(
        f"step: {t.global_batch_size} x {m.context_length} = {tokens:,} tokens{accumulation}; {t.max_steps} steps"
    )
    if resumed_at is not None:
        progress.say(f"resuming {shown(run_dir)} from step {resumed_at}")
        if resumed_at >= t.max_steps:
            progress.say(f"it is complete; train on with trainer.max_steps={2 * t.max_steps}")
    else:
        progress.say(f"run directory: {shown(run_dir)}")


def summary(result: RunResult, max_steps: int) -> None:
    """Print what the run came to."""
    from rich.console import Console
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    def loss(value: float) -> str:
        return f"{value:.4f}  (perplexity {math.exp(min(value, 700)):.2f})" if math.isfinite(value) else "none"

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("training loss", loss(result.train_loss))
    table.add_row("validation loss", loss(result.val_loss))
    if result.baseline is not None:
        gap = result.baseline - result.val_loss
        verdict = f"beaten by {gap:.4f}" if gap > 0 else f"not beaten: {-gap:.4f} short"
        table.add_row(f"{result.baseline_order}-gram baseline", f"{loss(result.baseline)}, {verdict}")
        if result.baseline_best is not None and result.baseline_best < result.baseline:
            table.add_row("", f"{result.baseline_best:.4f} with order and alpha chosen on the validation text itself")
    if result.verb_accuracy is not None:
        table.add_row("held-out verb forms", f"{result.verb_accuracy:.1%} right")
    for part, backend in result.backends.items():
        table.add_row(part, escape(backend))
    run = shown(result.run_dir)
    table.add_row("run directory", escape(run))
    table.add_row("sample from it", escape(f'gptframe generate {run} --prompt "..."'))
    for i, text in enumerate(result.samples[:3], 1):
        line = " ".join(text.split())
        table.add_row(f"sample {i}", escape(line if len(line) <= 240 else line[:237] + "..."))
    Console(highlight=False).print(Panel(table, title=f"step {result.step} of {max_steps}", title_align="left"))


def shown(path: Path) -> str:
    """A path as a person would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def command() -> str:
    """The command that was typed, for the line that says how to go on."""
    typed = sys.orig_argv[1:2]  # sys.argv is what Lightning starts again
    return f"python {typed[0]}" if typed and typed[0].endswith("train.py") else "gptframe train"
