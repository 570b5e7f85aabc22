"""What happens between two steps: stop on a bad loss, log, validate, sample, save, obey a signal. In that order.

One callback does all of it, because the order is what makes a run resumable: a row of metrics.csv is on disk before the
checkpoint of its step, and a checkpoint is complete before an older one goes.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import CheckpointIO
from torch import Tensor

from gptframe.errors import UserError
from gptframe.training import checkpoint as checkpoints
from gptframe.training.loggers import MetricsCSV
from gptframe.training.module import GPTModule
from gptframe.training.signals import Interrupted, Signals


class AtomicCheckpointIO(CheckpointIO):
    """Lets Lightning write and read checkpoints through `gptframe.training.checkpoint`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        checkpoints.save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: Any = None) -> dict[str, Any]:
        return checkpoints.load(Path(path), map_location or "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


class StepBoundary(pl.Callback):
    """The end of every step.

    Args:
        run_dir: where checkpoints go.
        metrics: metrics.csv, which also tells whether a validation is still owed after a resume.
        progress: told about every step and every row.
        signals: the flag that SIGTERM and Ctrl-C set.
        val_loader: makes the batches of the validation split, once the ranks are known; None where there is none.
        on_validation: called with the step after each validation (samples).
    """

    def __init__(
        self,
        run_dir: Path,
        metrics: MetricsCSV,
        progress: Progress,
        signals: Signals,
        *,
        val_loader: Callable[[], Iterable[dict[str, Tensor]]] | None,
        val_interval: int,
        log_interval: int,
        checkpoint_interval: int,
        keep_checkpoints: int,
        nonfinite_patience: int,
        on_validation: Callable[[int], None] | None = None,
    ):
        self.run_dir, self.metrics, self.progress, self.signals = run_dir, metrics, progress, signals
        self.val_loader, self.val_interval, self.log_interval = val_loader, val_interval, log_interval
        self.checkpoint_interval, self.keep_checkpoints = checkpoint_interval, keep_checkpoints
        self.nonfinite_patience, self.on_validation = nonfinite_patience, on_validation
        self.seconds = 0.0  # spent in steps since the last row
        self.tokens_logged = 0
        self._mark = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        self.signals.install()  # Lightning has put its own handlers in the meantime
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:  # now, as the first checkpoint may be hours away
            checkpoints.refuse_unreadable(type(callback).__name__, callback.state_dict())
        self.tokens_logged = int(pl_module.tokens)
        step = trainer.global_step
        owed = step > 0 and step % self.val_interval == 0 and step not in self.metrics.series("val_loss")[0]
        if owed:  # a signal came between the step and its validation
            self._validate(trainer, pl_module, step)
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GPTModule)
        step = trainer.global_step
        last = step >= trainer.max_steps or trainer.should_stop  # a callback of a plugin may stop early
        if pl_module.bad_steps >= self.nonfinite_patience or (last and pl_module.bad_steps):
            raise self._not_finite(pl_module, step)
        self.seconds += time.perf_counter() - self._mark
        stopping = self._stopping(trainer)
        if step % self.log_interval == 0 or step == 1 or last or stopping:
            self._log(trainer, pl_module, step)
        else:
            self.progress.step(step)
        if last or (not stopping and step % self.val_interval == 0):
            self._validate(trainer, pl_module, step, to_the_end=last)  # the last one has no later session to do it
            stopping = self._stopping(trainer)
        if step % self.checkpoint_interval == 0 or last or stopping:
            self.save(trainer, pl_module)
        if stopping:
            raise Interrupted
        self._mark = time.perf_counter()

    def save(self, trainer: pl.Trainer, module: GPTModule) -> None:
        """Write a checkpoint of this step, then drop what is older than the newest few."""
        step = trainer.global_step
        if not module.weights_are_finite():
            raise self._not_finite(module, step)
        trainer.save_checkpoint(checkpoints.checkpoint_path(self.run_dir, step))
        if trainer.is_global_zero:
            checkpoints.prune(self.run_dir, self.keep_checkpoints, step)

    def _log(self, trainer: pl.Trainer, module: GPTModule, step: int) -> None:
        tokens = int(module.tokens)
        row: dict[str, float] = {
            "tokens": tokens,
            "train_loss": float(module.last_loss),
            "lr": float(module.last_lr),
            "grad_norm": float(module.last_norm),
            **{f"aux/{name}": float(value) for name, value in module.last_extras.items()},
            **{f"aux/{name}": value for name, value in module.noted.items()},
            "tokens_per_second": round((tokens - self.tokens_logged) / max(self.seconds, 1e-9), 1),
        }
        self.seconds, self.tokens_logged, module.noted = 0.0, tokens, {}
        self._write(trainer, row, step)

    def _write(self, trainer: pl.Trainer, row: dict[str, float], step: int) -> None:
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(row, step)
        self.progress.row(step, row)

    def _validate(self, trainer: pl.Trainer, module: GPTModule, step: int, to_the_end: bool = False) -> None:
        """Validate, unless a signal cuts it short: a resumed run then does it from the start."""
        if self.val_loader is None:
            return
        alone = trainer.world_size == 1 and not to_the_end  # several ranks go through the same number of batches
        loss = evaluate(trainer, module, self.val_loader(), lambda: alone and self.signals.received is not None)
        if loss is None:
            return
        self._write(trainer, {"val_loss": loss}, step)
        if self.on_validation is not None and trainer.is_global_zero:
            self.on_validation(step)

    def _stopping(self, trainer: pl.Trainer) -> bool:
        if trainer.world_size == 1:
            return self.signals.received is not None
        # all ranks must leave the loop at the same step, whichever of them got the signal
        flag = torch.tensor(float(self.signals.received or 0), device=trainer.strategy.root_device)
        received = int(trainer.strategy.reduce(flag, reduce_op="max"))
        if received:
            self.signals.received = received
        return bool(received)

    def _not_finite(self, module: GPTModule, step: int) -> UserError:
        found = checkpoints.checkpoints(self.run_dir)
        kept = f"the last good checkpoint is of step {found[0][0]}" if found else "there was no checkpoint yet"
        loss = float(module.last_loss)
        what = "gradient or a weight" if math.isfinite(loss) else "loss"
        extras = {name: float(value) for name, value in module.last_extras.items()}
        aux = "".join(f", aux/{name} {value:g}" for name, value in extras.items() if not math.isfinite(value))
        return UserError(
            f"the {what} is not finite at step {step} (loss {loss:g}{aux}, lr {module.last_lr:.3g}); {kept}. "
            f"Try a lower optimizer.lr, a longer schedule.warmup_steps or a lower trainer.clip_norm"
        )


@torch.no_grad()
def evaluate(
    trainer: pl.Trainer,
    module: GPTModule,
    batches: Iterable[dict[str, Tensor]],
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """The mean loss a token over `batches`, in nats, in eval mode; None if `stop` said so before the end."""
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.strategy.root_device)
    was_training = module.training
    module.eval()
    try:
        for i, batch in enumerate(batches):
            if stop():
                return None
            batch = trainer.strategy.batch_to_device(batch)
            part = trainer.strategy.validation_step(batch, i)
            assert isinstance(part, Tensor)
            sums += part
    finally:
        module.train(was_training)
    if trainer.world_size > 1:
        sums = trainer.strategy.reduce(sums, reduce_op="sum")
    total, targets = sums.tolist()
    return total / targets if targets else math.nan


class Progress:
    """A bar on a terminal, one plain line a row elsewhere: step, loss, lr, tokens/s, time left."""

    def __init__(self, max_steps: int, style: str = "auto", enabled: bool = True):
        from rich.console import Console

        self.console = Console(highlight=False)
        self.max_steps, self.first_rank, self.enabled = max_steps, enabled, enabled and style != "none"
        self.use_bar = style == "bar" or (style == "auto" and self.console.is_terminal)
        self.bar: Any = None
        self.values: dict[str, float] = {}
        self._started, self._first = 0.0, 0

    def start(self, step: int) -> None:
        self._started, self._first = time.perf_counter(), step
        if not (self.enabled and self.use_bar):
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            TextColumn("eta"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            refresh_per_second=2,  # each drawing takes as long as a small model's step, from the steps' own time
        )
        self.task = self.bar.add_task("", total=self.max_steps, completed=step, text="")
        self.bar.start()

    def step(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def row(self, step: int, row: dict[str, float]) -> None:
        """Show a row; a validation alone updates the bar, and gets a line of its own elsewhere."""
        self.values.update(row)
        text = "  ".join(
            f"{label} {form(self.values[key])}" for key, (label, form) in SHOWN.items() if key in self.values
        )
        if self.bar is not None:
            self.bar.update(self.task, completed=step, text=text)
        elif self.enabled:
            shown = "  ".join(f"{label} {form(row[key])}" for key, (label, form) in SHOWN.items() if key in row)
            print(
                f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}  {shown}{self._eta(step, row)}", flush=True
            )

    def _eta(self, step: int, row: dict[str, float]) -> str:
        done = step - self._first
        if "train_loss" not in row or done < 1:
            return ""
        left = (time.perf_counter() - self._started) / done * (self.max_steps - step)
        return f"  eta {int(left // 60)}:{int(left % 60):02d}"

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self.enabled:
            self.console.print(text, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line that needs attention: `style="none"` does not silence it, but sends it to stderr."""
        if self.enabled:
            self.say(text)
        elif self.first_rank:
            print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
            sys.stdout.flush()


SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "train_loss": ("loss", lambda v: f"{v:.4f}"),
    "val_loss": ("val", lambda v: f"{v:.4f}"),
    "lr": ("lr", lambda v: f"{v:.2e}"),
    "tokens_per_second": ("tokens/s", lambda v: f"{v:,.0f}"),
}


def plot_losses(metrics: MetricsCSV, path: Path, baseline: float | None = None, title: str = "") -> None:
    """Draw training and validation loss over optimiser steps, with the baseline as a dashed line."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    steps, losses = metrics.series("train_loss")
    if len(steps) > 40:  # single steps are noisy: a thin line for them, a running mean to read
        axes.plot(steps, losses, color="#9db8d9", linewidth=0.7)
        axes.plot(steps, smooth(losses, len(losses) // 40 + 1), color="#2a5c9e", linewidth=1.8, label="training")
    else:
        axes.plot(
            steps, losses, color="#2a5c9e", linewidth=1.8, marker="." if len(steps) < 10 else None, label="training"
        )
    val_steps, val_losses = metrics.series("val_loss")
    if val_steps:
        axes.plot(val_steps, val_losses, color="#d9622b", marker="o", markersize=3.5, linewidth=1.8, label="validation")
    if baseline is not None and math.isfinite(baseline):
        axes.axhline(baseline, color="#555555", linestyle="--", linewidth=1.2, label=f"n-gram baseline {baseline:.2f}")
    axes.set(xlabel="optimiser step", ylabel="loss (nats per token)", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    temporary = path.with_name(f".tmp-{path.name}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def smooth(values: list[float], width: int) -> list[float]:
    """Centred running mean over at most 2 * width + 1 values."""
    return [
        sum(values[max(0, i - width) : i + width + 1]) / len(values[max(0, i - width) : i + width + 1])
        for i in range(len(values))
    ]
