"""Where numbers go: metrics.csv always, W&B or TensorBoard on request. Steps are optimiser steps everywhere."""

from __future__ import annotations

import csv
import importlib.util
import io
import netrc
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from gptframe.errors import UserError, nearest
from gptframe.registry import check_options
from gptframe.training.directory import write_text

COLUMNS = ["step", "tokens", "train_loss", "val_loss", "lr", "grad_norm", "tokens_per_second"]


class MetricsCSV(Logger):
    """One row a step in `metrics.csv`; what is logged twice for a step joins its row.

    A row is on disk before the call returns. A new metric becomes a new column, by rewriting the file aside.

    Args:
        path: the file.
        resume_step: keep rows up to this step of an existing file, and cut what lies beyond; None starts a new file.
        write: False on all ranks but the first, which then only read.
    """

    def __init__(self, path: Path, resume_step: int | None = None, write: bool = True):
        super().__init__()
        self.path, self.write = path, write
        self.columns = list(COLUMNS)
        self.rows: list[dict[str, str]] = []
        if resume_step is not None and path.exists():
            columns, rows = read_csv(path)
            self.columns += [c for c in columns if c not in self.columns]
            self.rows = [row for row in rows if int(row["step"]) <= resume_step]
        self._rewrite()

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """config.yaml holds them."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step is None or not metrics:
            return
        last = int(self.rows[-1]["step"]) if self.rows else -1
        if step < last:
            raise ValueError(f"step {step} is logged after step {last}")
        values = {key: repr(value) if isinstance(value, float) else str(value) for key, value in metrics.items()}
        new = [key for key in values if key not in self.columns]
        if step > last:
            self.rows.append({"step": str(step), **values})
        else:
            self.rows[-1].update(values)
        if new:
            self.columns += new
            self._rewrite()
        else:
            self._write_last(appended=step > last)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one column, where it is filled."""
        filled = [(int(row["step"]), float(row[key])) for row in self.rows if row.get(key)]
        return [step for step, _ in filled], [value for _, value in filled]

    def _format(self, rows: Iterable[Mapping[str, str]]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        writer.writerows(rows)
        return text.getvalue()

    def _rewrite(self) -> None:
        if not self.write:
            return
        header = self._format([{column: column for column in self.columns}])
        body = self._format(self.rows[:-1])
        last = self._format(self.rows[-1:])
        write_text(self.path, header + body + last)
        self._last_offset = len((header + body).encode())

    def _write_last(self, appended: bool) -> None:
        # The last row starts at _last_offset. A row only grows when values join it, so overwriting it in one write
        # never leaves the tail of an older one.
        with open(self.path, "r+b") as file:
            if appended:
                self._last_offset = file.seek(0, os.SEEK_END)
            file.seek(self._last_offset)
            file.write(self._format(self.rows[-1:]).encode())
            file.truncate()


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and whole rows of a metrics.csv; a row that a killed process left half-written is dropped."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()
    reader = csv.reader(lines)
    columns = next(reader, list(COLUMNS))
    rows = [dict(zip(columns, row, strict=True)) for row in reader if len(row) == len(columns) and row[0].isdecimal()]
    return columns, rows


@dataclass(frozen=True)
class LoggerContext:
    """What a logger is told about the run."""

    run_dir: Path
    name: str
    resume_step: int = 0
    run_id: str | None = None
    """W&B's, of the run that is continued."""


Starter = Callable[[LoggerContext], "Logger | None"]


def _none() -> Starter:
    """No logger beside metrics.csv, which the loss curve and resuming need."""
    return lambda context: None


def _wandb(
    mode: str = "offline",
    project: str = "gptframe",
    entity: str | None = None,
    group: str | None = None,
    tags: list[str] | None = None,
    timeout: float = 30.0,
) -> Starter:
    """Weights & Biases.

    Args:
        mode: `offline` writes into the run directory, for `wandb sync` later; `online` needs an API key.
        timeout: seconds to wait for the server when online.
    """
    if mode not in ("offline", "online"):
        raise UserError(f"logger.mode={mode!r} is neither 'offline' nor 'online'")
    if importlib.util.find_spec("wandb") is None:
        raise UserError("logger=wandb needs the package wandb: pip install wandb")
    import wandb

    if mode == "online":
        _check_wandb(os.environ.get("WANDB_BASE_URL") or str(wandb.setup().settings.base_url), timeout)

    def start(context: LoggerContext) -> Logger:
        from pytorch_lightning.loggers import WandbLogger

        settings = wandb.Settings(silent=True, console="off", init_timeout=timeout, disable_git=True)
        options: dict[str, Any] = {"mode": mode, "reinit": "create_new", "resume": "allow", "settings": settings}
        try:
            run = wandb.init(
                project=project, entity=entity, group=group, tags=tags,
                name=context.name, dir=str(context.run_dir), id=context.run_id, **options,
            )  # fmt: skip
        except Exception as error:  # wandb raises types of its own for what is one thing here: it cannot log
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"logger=wandb could not start: {reason} logger.mode=offline needs no server") from None
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step")
        return WandbLogger(experiment=run, save_dir=str(context.run_dir), project=project, id=run.id)

    return start


def _check_wandb(server: str, timeout: float) -> None:
    """Refuse at once what W&B would answer with a prompt or a long wait.

    Raises:
        UserError: there is no API key, or the server does not answer.
    """
    url = urllib.parse.urlsplit(server)
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _netrc_has(host)):
        raise UserError(
            f"logger.mode=online needs an API key for {host}: run `wandb login` or set WANDB_API_KEY, "
            f"or use logger.mode=offline"
        )
    if urllib.request.getproxies():  # behind a proxy a direct connection says nothing; wandb's own timeout decides
        return
    try:
        socket.create_connection((host, port), timeout=min(timeout, 10.0)).close()
    except OSError as error:
        raise UserError(
            f"logger.mode=online: {host} does not answer ({error.strerror or error}): use logger.mode=offline"
        ) from None


def _netrc_has(host: str) -> bool:
    file = os.environ.get("NETRC") or Path.home() / (".netrc" if os.name != "nt" else "_netrc")
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _tensorboard() -> Starter:
    """TensorBoard event files under <run directory>/tensorboard."""
    if not any(importlib.util.find_spec(package) for package in ("tensorboard", "tensorboardX")):
        raise UserError("logger=tensorboard needs the package tensorboard: pip install tensorboard")

    def start(context: LoggerContext) -> Logger:
        from pytorch_lightning.loggers import TensorBoardLogger

        # events beyond the resumed step are hidden where purge_step is given
        purge: dict[str, Any] = {"purge_step": context.resume_step + 1} if context.resume_step else {}
        return TensorBoardLogger(str(context.run_dir), name="tensorboard", version="", **purge)

    return start


LOGGERS: dict[str, Callable[..., Starter]] = {
    "csv": _none,
    "wandb": _wandb,
    "tensorboard": _tensorboard,
    "none": _none,
}


def check_logger(section: Mapping[str, Any]) -> Starter:
    """What starts the logger beside metrics.csv that `logger=` asks for, once the run directory is there.

    Raises:
        UserError: an unknown logger or option, a package that is missing, a server that is not reachable.
    """
    name = section.get("name")
    if name not in LOGGERS:
        raise UserError(f"logger.name: unknown logger {name!r}. {nearest(name, LOGGERS)}Known: {', '.join(LOGGERS)}")
    options = {k: v for k, v in section.items() if k != "name"}
    return LOGGERS[name](**check_options("logger", LOGGERS[name], options, 0, "logger"))


def wandb_run(logger: Logger | None) -> Any:
    """The W&B run of a logger, or None for another logger."""
    from pytorch_lightning.loggers import WandbLogger

    return logger.experiment if isinstance(logger, WandbLogger) else None
