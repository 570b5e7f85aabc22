"""From a config to a trained run directory: `train(config, overrides)`. Read it from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptframe import __version__
from gptframe.config import Config, convert
from gptframe.errors import UserError
from gptframe.generate import check_sampling, generate
from gptframe.model import GPT, build_model
from gptframe.registry import build
from gptframe.training import checkpoint as checkpoints
from gptframe.training import directory
from gptframe.training.device import Device, choose
from gptframe.training.optimizer import param_groups
from gptframe.training.schedule import make_schedule, resolve_warmup


@dataclass(frozen=True)
class SampleConfig:
    """Samples written to samples.txt."""

    count: int = 3
    """How many; 0 for none."""
    interval: int | None = None
    """Steps between them, a multiple of trainer.val_interval; null for after the last step only."""
    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    prompts: list[str] = field(default_factory=list)
    """What the samples continue, in turn; empty for what the corpus suggests, or the start of a document."""


@dataclass(frozen=True)
class CallbackConfig:
    """The `callbacks` section."""

    progress: str = "auto"
    """`bar`, `lines`, `none`, or `auto`: a bar on a terminal, lines elsewhere."""
    loss_curve: bool = True
    """Draw loss_curve.png at the end."""
    samples: SampleConfig = field(default_factory=SampleConfig)

    def check(self, val_interval: int) -> None:
        if self.progress not in ("auto", "bar", "lines", "none"):
            raise UserError(f"callbacks.progress={self.progress!r} is not one of auto, bar, lines, none")
        s = self.samples
        if s.count < 0:
            raise UserError(f"callbacks.samples.count={s.count} must be at least 0")
        if s.interval is not None and (s.interval < 1 or s.interval % val_interval):
            raise UserError(
                f"callbacks.samples.interval={s.interval} must be a multiple of trainer.val_interval={val_interval}"
            )
        check_sampling(s.max_new_tokens, s.temperature, s.top_k, s.top_p)


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


def train(config: Config, overrides: list[str]) -> RunResult:
    """Train, or continue where `config.resume` names a run directory.

    Args:
        config: as the command line leaves it; its plugins are imported already.
        overrides: what was typed, kept in overrides.yaml.

    Raises:
        UserError: something in the config or on the machine does not fit, or the loss is not finite.
    """
    threads = torch.get_num_threads()
    try:
        with quiet_lightning():
            return _train(config, overrides)
    finally:
        torch.set_num_threads(threads)


def _train(config: Config, overrides: list[str]) -> RunResult:
    import pytorch_lightning as pl

    from gptframe.data.datamodule import GPTDataModule
    from gptframe.data.prepare import prepare
    from gptframe.inspect.doctor import at_start
    from gptframe.training.callbacks import AtomicCheckpointIO, Progress, StepBoundary, plot_losses
    from gptframe.training.loggers import LoggerContext, MetricsCSV, check_logger, wandb_run
    from gptframe.training.module import GPTModule
    from gptframe.training.signals import Interrupted, Signals

    # Everything that can be refused is refused before anything is made.
    options: CallbackConfig = convert(CallbackConfig, config.callbacks, "callbacks")
    options.check(config.trainer.val_interval)
    resumed = Path(config.resume).expanduser().absolute() if config.resume else None
    start = _find_checkpoint(resumed, config) if resumed else None
    config = dataclasses.replace(config, schedule=resolve_warmup(config.schedule, config.trainer.max_steps))
    schedule = make_schedule(config.schedule, config.trainer.max_steps)
    torch.set_num_threads(choose(config.trainer, config.precision, config.model).threads)
    start_logger = check_logger(config.logger)

    prepared = prepare(
        config.data,
        config.tokenizer,
        config.model.vocab_size,
        seed=config.seed,
        context_length=config.model.context_length,
        tokenizer_dir=resumed / "tokenizer" if resumed else None,
    )
    vocab_size = config.model.vocab_size or prepared.vocab_size
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
    model = build_model(config.model, config.seed)
    n_parameters = sum(p.numel() for p in model.parameters())
    device = choose(config.trainer, config.precision, config.model, n_parameters)
    build("optimizer", config.optimizer, param_groups(model))  # refuses its options while there is no run directory
    if resumed and start:
        checkpoints.check_compatible(start.meta, _plain(config)["model"], start.path)

    run_dir = resumed or _create_together(config)
    rank_zero = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0
    manifest = Manifest(run_dir, config, device, n_parameters, prepared.fingerprints, start.step if start else 0)
    progress = Progress(config.trainer.max_steps, options.progress, enabled=rank_zero)
    findings = [f"{f.level}: {f}" for f in at_start(config, device, prepared, n_parameters, run_dir)]
    for note in [*prepared.notes, *(start.notes if start else []), *manifest.warnings]:
        findings.append(f"note: {note}")
    for line in findings:
        progress.note(line)
    if rank_zero:
        checkpoints.remove_leftovers(run_dir)
        directory.write_yaml(run_dir / "config.yaml", {**_plain(config), "resume": None, "run_dir": None})
        _append_overrides(run_dir / "overrides.yaml", overrides, resumed is not None)
        if prepared.tokenizer is not None and not (run_dir / "tokenizer").is_dir():
            prepared.tokenizer.save(run_dir / "tokenizer")
        manifest.write()
    metrics = MetricsCSV(run_dir / "metrics.csv", start.step if start else None, write=rank_zero)
    name = run_dir.name if config.name in run_dir.name else f"{config.name}-{run_dir.name}"
    logger = None
    if rank_zero:
        known_id = manifest.values.get("wandb_id") if resumed else None
        logger = start_logger(LoggerContext(run_dir, name, start.step if start else 0, known_id))
    tracker = wandb_run(logger)
    if tracker is not None:
        manifest.write(wandb_id=tracker.id)
    if logger is not None:
        logger.log_hyperparams({**_plain(config), "parameters": n_parameters})

    exit_code = 1
    try:
        module = GPTModule(
            model,
            config.optimizer,
            schedule,
            micro_batch_size=device.micro_batch_size,
            clip_norm=config.trainer.clip_norm,
            seed=config.seed,
            compile=device.compile,
            metadata={
                "version": __version__,
                "model": _plain(config)["model"],
                "schedule": dict(config.schedule),
                "plugins": checkpoints.used_plugins(_plain(config)["model"], _sections(config)),
            },
        )
        data = GPTDataModule(
            prepared,
            config.model.context_length,
            config.trainer.global_batch_size,
            val_batch_size=device.micro_batch_size,
            seed=config.seed,
            val_batches=config.trainer.val_batches,
        )
        sampler = Sampler(run_dir, options.samples, config.seed, prepared, tracker, start.step if start else 0)
        signals = Signals()
        boundary = StepBoundary(
            run_dir,
            metrics,
            progress,
            signals,
            val_loader=data.val_dataloader,
            val_interval=config.trainer.val_interval,
            log_interval=config.trainer.log_interval,
            checkpoint_interval=config.trainer.checkpoint_interval,
            keep_checkpoints=config.trainer.keep_checkpoints,
            nonfinite_patience=config.trainer.nonfinite_patience,
            on_validation=lambda step: sampler.write_if_due(model, step),
        )
        trainer = pl.Trainer(
            accelerator=device.accelerator,
            devices=config.trainer.devices,
            num_nodes=config.trainer.num_nodes,
            strategy=config.trainer.strategy,
            precision=device.lightning_precision,
            max_steps=config.trainer.max_steps,
            max_epochs=-1,
            limit_val_batches=0,  # StepBoundary validates, in its place between logging and saving
            deterministic=config.trainer.deterministic,
            logger=[metrics, *([logger] if logger else [])],
            callbacks=[boundary],
            plugins=[AtomicCheckpointIO()],
            default_root_dir=str(run_dir),
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        _announce(progress, config, device, n_parameters, prepared, run_dir, start)
        interrupted = False
        with signals:
            progress.start(start.step if start else 0)
            try:
                trainer.fit(module, data, ckpt_path=str(start.path) if start else None, weights_only=True)
            except Interrupted:
                interrupted = True
            except SystemExit:  # Lightning's answer to KeyboardInterrupt
                if signals.received:
                    raise KeyboardInterrupt from None
                raise
            finally:
                progress.stop()
        step = trainer.global_step or (start.step if start else 0)
        result = _result(run_dir, metrics, step, signals.exit_code if interrupted else 0)
        result = dataclasses.replace(result, backends=module_reports(model))
        if rank_zero and not interrupted:
            result = _finish(result, model, prepared, sampler, config, device)
        if rank_zero and options.loss_curve and metrics.rows:
            plot_losses(metrics, run_dir / "loss_curve.png", result.baseline, config.name)
            if tracker is not None:
                import wandb

                tracker.log({"loss_curve": wandb.Image(str(run_dir / "loss_curve.png")), "trainer/global_step": step})
        if rank_zero:
            status = "interrupted" if interrupted else "finished"
            manifest.write(status=status, result=_without_paths(result))
            if interrupted:
                print(f"saved at step {step}; continue with: {_command()} resume={shown(run_dir)}", flush=True)
            else:
                summary(result, config.trainer.max_steps)
        exit_code = result.exit_code
        return result
    finally:
        if exit_code == 1 and rank_zero:
            manifest.write(status="failed")
        if logger is not None:
            logger.finalize("success" if exit_code == 0 else "failed")
        if tracker is not None:
            tracker.finish(exit_code=exit_code)


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from."""

    path: Path
    step: int
    meta: Mapping[str, Any]
    notes: list[str]


def _find_checkpoint(run_dir: Path, config: Config) -> Start | None:
    """The newest whole checkpoint of a run directory; None where it was killed before its first.

    Raises:
        UserError: not a run directory, no whole checkpoint, another architecture, or a plugin that is missing.
    """
    directory.read_config(run_dir)
    path, notes = checkpoints.newest_valid(run_dir)
    if path is None:
        print(f"note: {shown(run_dir)} has no checkpoint yet: starting from step 0", flush=True)
        return None
    meta = checkpoints.metadata(path)
    checkpoints.check_plugins(meta, path)
    return Start(path, int(meta.get("step", 0)), meta, notes)


def _create_together(config: Config) -> Path:
    """The run directory; processes of one run agree on it through the environment that the first one sets."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0:
        path = directory.create(config.run_dir, config.name)
        if config.trainer.devices * config.trainer.num_nodes > 1:
            os.environ[RUN_DIR_VARIABLE] = str(path)  # Lightning's launcher hands it down to the other ranks
        return path
    known = os.environ.get(RUN_DIR_VARIABLE) or config.run_dir
    if not known:
        raise UserError("run_dir must be given where processes are started from outside (torchrun, SLURM)")
    return Path(known).absolute()


RUN_DIR_VARIABLE = "GPTFRAME_RUN_DIR"


class Manifest:
    """manifest.json: everything needed to say what a run was."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        device: Device,
        n_parameters: int,
        fingerprints: Mapping[str, str],
        step: int,
    ):
        self.path = run_dir / "manifest.json"
        self.warnings: list[str] = []
        old = directory.read_json(self.path)
        for key, value in fingerprints.items():
            before = old.get("fingerprints", {}).get(key, value)
            if before != value:
                self.warnings.append(f"the {key} is not what it was when the run began: it will not continue exactly")
        now = {
            "from_step": step,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
            "git_revision": git_revision(),
            "command": sys.orig_argv[1:],
            "device": dataclasses.asdict(device),
            "device_name": _device_name(device),
            "devices": config.trainer.devices * config.trainer.num_nodes,
        }
        self.values: dict[str, Any] = {
            "name": config.name,
            "parameters": n_parameters,
            "plugins": checkpoints.used_plugins(_plain(config)["model"], _sections(config)),
            "fingerprints": dict(fingerprints),
            **{k: old[k] for k in ("wandb_id",) if k in old},
            "sessions": [*old.get("sessions", []), now],
            "status": "running",
        }

    def write(self, **values: Any) -> None:
        self.values.update(values)
        directory.write_json(self.path, self.values)


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"gptframe": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "pytorch-lightning", "hydra-core", "numpy", "tokenizers", "wandb"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def git_revision() -> str | None:
    """The commit of the source that runs, with -dirty for changes; None outside a checkout."""
    here = Path(__file__).resolve().parent
    if not any((parent / ".git").exists() for parent in here.parents):
        return None
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=here, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _device_name(device: Device) -> str:
    if device.accelerator == "gpu":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


class Sampler:
    """Writes samples.txt, and the table of samples in W&B."""

    def __init__(self, run_dir: Path, options: SampleConfig, seed: int, prepared: Any, tracker: Any, step: int):
        self.path, self.options, self.seed, self.prepared, self.tracker = (
            run_dir / "samples.txt", options, seed, prepared, tracker,
        )  # fmt: skip
        self.rows: list[list[Any]] = []
        self.blocks: list[str] = _blocks_up_to(self.path, step)
        self.last: tuple[int, list[str]] = (-1, [])

    def write(self, model: GPT, step: int) -> list[str]:
        """Draw the samples of a step, once; the same weights and seed give the same ones."""
        if self.last[0] == step:
            return self.last[1]
        o = self.options
        generator = torch.Generator().manual_seed(self.seed)
        prompts = o.prompts or getattr(self.prepared.corpus, "prompts", None) or [""]
        texts: list[str] = []
        for i in range(o.count):
            prompt = prompts[i % len(prompts)]
            ids, shown_ids, stop = self._encode(prompt)
            new = generate(
                model, ids, o.max_new_tokens,
                temperature=o.temperature, top_k=o.top_k, top_p=o.top_p, generator=generator, stop_id=stop,
            )  # fmt: skip
            texts.append(self._decode([*shown_ids, *new]))
            self.rows.append([step, prompt, texts[-1]])
        self.last = (step, texts)
        if texts:
            heading = f"{_HEADING}{step}\n"
            self.blocks = [block for block in self.blocks if not block.startswith(heading)]
            self.blocks.append(f"{_HEADING}{step}\n\n" + "\n\n".join(texts) + "\n\n")
            directory.write_text(self.path, "".join(self.blocks))
            if self.tracker is not None:
                import wandb

                table = wandb.Table(columns=["step", "prompt", "sample"], data=[list(row) for row in self.rows])
                self.tracker.log({"samples": table, "trainer/global_step": step})
        return texts

    def write_if_due(self, model: GPT, step: int) -> None:
        if self.options.interval and step % self.options.interval == 0:
            self.write(model, step)

    def _encode(self, prompt: str) -> tuple[list[int], list[int], int | None]:
        tokenizer = self.prepared.tokenizer
        if tokenizer is None:  # tokens without a tokenizer: start from the beginning of the validation split
            first = self.prepared.val.window(0, 1).tolist()
            return first, first, None
        ids = tokenizer.encode(prompt)
        start = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
        if not ids and not start:
            ids = self.prepared.val.window(0, 1).tolist()
        return [*start, *ids], ids, tokenizer.eos_id

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self.prepared.tokenizer
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)


_HEADING = "=== step "


def _blocks_up_to(path: Path, step: int) -> list[str]:
    """The blocks of an earlier session's samples.txt, those beyond the resumed step cut."""
    if not path.exists():
        return []
    blocks = [_HEADING + part for part in path.read_text(encoding="utf-8").split(_HEADING)[1:]]
    steps = [block[len(_HEADING) :].split("\n", 1)[0] for block in blocks]
    return [block for block, text in zip(blocks, steps, strict=True) if text.isdecimal() and int(text) <= step]


def _result(run_dir: Path, metrics: Any, step: int, exit_code: int) -> RunResult:
    train, val = metrics.series("train_loss")[1], metrics.series("val_loss")[1]
    return RunResult(run_dir, exit_code, step, train[-1] if train else math.nan, val[-1] if val else math.nan)


def _finish(
    result: RunResult, model: GPT, prepared: Any, sampler: Sampler, config: Config, device: Device
) -> RunResult:
    """What is measured once, at the end: the baseline, the verbs and the samples."""
    baseline = prepared.baseline()
    accuracy = None
    if hasattr(prepared.corpus, "slots") and prepared.tokenizer is not None:
        accuracy = slot_accuracy(model, prepared.corpus.slots("val"), prepared.tokenizer)
    return dataclasses.replace(
        result,
        baseline=baseline.loss if baseline else None,
        baseline_order=baseline.order if baseline else None,
        baseline_best=baseline.best_loss if baseline else None,
        verb_accuracy=accuracy,
        samples=sampler.write(model, result.step),
    )


def module_reports(model: GPT) -> dict[str, str]:
    """What the modules that offer `manifest() -> dict[str, str]` say of themselves, once each."""
    found: dict[str, str] = {}
    for module in model.modules():
        report = getattr(module, "manifest", None)
        if report is not None and not isinstance(report, (torch.Tensor, torch.nn.Module)):
            found.update(report())
    return found


@torch.no_grad()
def slot_accuracy(model: GPT, slots: Any, tokenizer: Any, batch_size: int = 256) -> float | None:
    """The part of the held-out verb forms that the model finds: its most likely word at every word of the form."""
    from gptframe.data.batches import slot_batch

    was_training = model.training
    model.eval()
    device, right = model.token_embedding.weight.device, 0
    slots = [s for s in slots if len(s.prompt) + len(s.answer) <= model.cfg.context_length]
    for i in range(0, len(slots), batch_size):
        batch = slot_batch(slots[i : i + batch_size], tokenizer)
        ids, targets = batch["ids"].to(device), batch["targets"].to(device)
        guess = model(ids).argmax(-1)
        right += int(((guess == targets) | (targets == -100)).all(1).sum())
    model.train(was_training)
    return right / len(slots) if slots else None


def _announce(
    progress: Any, config: Config, device: Device, n_parameters: int, prepared: Any, run_dir: Path, start: Start | None
) -> None:
    t, m = config.trainer, config.model
    tokens = t.global_batch_size * m.context_length
    where = f"{device.accelerator}" + (f" x {t.devices * t.num_nodes}" if t.devices * t.num_nodes > 1 else "")
    accumulation = (
        f" in {device.accumulation} micro-batches of {device.micro_batch_size}" if device.accumulation > 1 else ""
    )
    progress.note(f"{config.name}: {n_parameters:,} parameters, {where}, {device.precision}")
    progress.note(
        f"data: {config.data['name']}, {len(prepared.train):,} training and {len(prepared.val):,} validation tokens"
    )
    progress.note(
        f"step: {t.global_batch_size} x {m.context_length} = {tokens:,} tokens{accumulation}; {t.max_steps} steps"
    )
    if start:
        progress.note(f"resuming {shown(run_dir)} from step {start.step}")
        if start.step >= t.max_steps:
            progress.note(f"it is complete; train on with trainer.max_steps={2 * t.max_steps}")
    else:
        progress.note(f"run directory: {shown(run_dir)}")


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


def _command() -> str:
    typed = sys.orig_argv[1:2]  # sys.argv is what Lightning starts again
    return f"python {typed[0]}" if typed and typed[0].endswith("train.py") else "gptframe train"


def _plain(config: Config) -> dict[str, Any]:
    return config.to_dict()


def _sections(config: Config) -> dict[str, Mapping[str, Any]]:
    keys = ("data", "tokenizer", "optimizer", "schedule")
    return {key: getattr(config, key) for key in keys}


def _without_paths(result: RunResult) -> dict[str, Any]:
    values = dataclasses.asdict(result)
    return {k: v for k, v in values.items() if k not in ("run_dir", "samples")}


def _append_overrides(path: Path, overrides: list[str], resumed: bool) -> None:
    """The overrides as typed; those of a resume are kept below the ones of the start."""
    import yaml

    old: Any = None
    if resumed and path.exists():
        with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
            old = yaml.safe_load(path.read_text(encoding="utf-8"))
    old = old if isinstance(old, list) else []
    directory.write_yaml(path, [*old, *overrides])


# What Lightning says to everybody and gptframe's users need not read: advertising, hints about loops that we do not
# use, and lines that the announcement above already holds.
_CHATTER = (
    r".*does not have many workers.*",
    r".*You defined a `validation_step` but have no `val_dataloader`.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*GPU available but not used.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*`weights_only` was not set.*",
    r".*Starting from v1.9.0, `tensorboardX` has been removed.*",
    r".*Experiment logs directory .* exists and is not empty.*",
)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's chatter for a while; warnings that mean something stay."""
    names = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    import pytorch_lightning  # noqa: F401  (sets its level to INFO when it is imported)

    with warnings.catch_warnings():
        for pattern in _CHATTER:
            warnings.filterwarnings("ignore", pattern)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
