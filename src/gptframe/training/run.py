"""From a config to a trained run directory: `train(config, overrides)`. Read it from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptframe import __version__
from gptframe.config import Config, convert
from gptframe.errors import UserError
from gptframe.generate import check_sampling
from gptframe.model import GPT, build_model
from gptframe.registry import build
from gptframe.training import checkpoint as checkpoints
from gptframe.training import directory
from gptframe.training.allocator import reused_memory
from gptframe.training.device import Device, choose
from gptframe.training.manifest import Manifest, module_reports, plugins_of
from gptframe.training.optimizer import param_groups
from gptframe.training.samples import SampleConfig, Sampler, slot_accuracy
from gptframe.training.schedule import make_schedule, resolve_warmup
from gptframe.training.summary import RunResult, announce, command, shown, summary


@dataclass(frozen=True)
class CallbackConfig:
    """The `callbacks` section."""

    progress: str = "auto"
    """`bar`, `lines`, `none`, or `auto`: a bar on a terminal, lines elsewhere."""
    loss_curve: bool = True
    """Draw loss_curve.png at the end."""
    summary: bool = True
    """Print what the run came to; without it, the path of the run directory alone."""
    samples: SampleConfig = field(default_factory=SampleConfig)
    extra: dict[str, dict[str, Any] | None] | None = None
    """Callbacks of plugins, by name with their options, as in `{hypergradient: {rate: 0.1}}`; null for none."""

    def build(self) -> list[Any]:
        """The callbacks of plugins."""
        extra = self.extra or {}
        return [build("callback", {"name": n, **(o or {})}, key=f"callbacks.extra.{n}") for n, o in extra.items()]

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
        with quiet_lightning(), contextlib.ExitStack() as held:
            return _train(config, overrides, held)
    finally:
        torch.set_num_threads(threads)


def _train(config: Config, overrides: list[str], held: contextlib.ExitStack) -> RunResult:
    import pytorch_lightning as pl
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    from gptframe.data.datamodule import GPTDataModule
    from gptframe.data.prepare import prepare
    from gptframe.inspect.doctor import at_start, refuse_oversize
    from gptframe.training.callbacks import AtomicCheckpointIO, Progress, StepBoundary, plot_losses
    from gptframe.training.loggers import LoggerContext, MetricsCSV, check_logger, wandb_run
    from gptframe.training.module import GPTModule
    from gptframe.training.signals import Interrupted, Signals

    # Everything that can be refused is refused before anything is made.
    options: CallbackConfig = convert(CallbackConfig, config.callbacks, "callbacks")
    options.check(config.trainer.val_interval)
    extra = options.build()
    resumed = Path(config.resume).expanduser().absolute() if config.resume else None
    rank_zero = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0
    if resumed and rank_zero:
        directory.read_config(resumed)
        held.enter_context(directory.hold(resumed))
    start = _find_checkpoint(resumed, config) if resumed else None
    config = dataclasses.replace(config, schedule=resolve_warmup(config.schedule, config.trainer.max_steps))
    schedule = make_schedule(config.schedule, config.trainer.max_steps)
    chosen = choose(config.trainer, config.precision, config.model)
    torch.set_num_threads(chosen.threads)
    held.enter_context(reused_memory(config.trainer.reuse_memory, chosen.accelerator))
    start_logger = check_logger(config.logger)

    origin = resumed or (Path(config.init_from) if config.init_from else None)
    prepared = prepare(
        config.data,
        config.tokenizer,
        config.model.vocab_size,
        seed=config.seed,
        context_length=config.model.context_length,
        tokenizer_dir=origin / "tokenizer" if origin else None,
    )
    vocab_size = config.model.vocab_size or prepared.vocab_size
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
    n_parameters = sum(p.numel() for p in build_model(config.model, device="meta").parameters())
    device = choose(config.trainer, config.precision, config.model, n_parameters)
    refuse_oversize(config, device, n_parameters)
    model = build_model(config.model, config.seed)
    model.trade_memory(config.trainer.recompute, config.trainer.chunked_loss)
    build("optimizer", config.optimizer, param_groups(model))  # refuses its options while there is no run directory
    if config.init_from and start is None:
        weights = checkpoints.load_weights(model, config.init_from, config.to_dict()["model"])
        prepared.notes.append(f"weights from {shown(weights)}")
    if resumed and start:
        checkpoints.check_compatible(start.meta, config.to_dict()["model"], start.path)

    run_dir = resumed or _create_together(config)
    if rank_zero and not resumed:
        held.enter_context(directory.hold(run_dir))
    manifest = Manifest(run_dir, config, device, n_parameters, prepared.fingerprints, start.step if start else 0)
    progress = Progress(config.trainer.max_steps, options.progress, enabled=rank_zero)
    findings = [f"{f.level}: {f}" for f in at_start(config, device, prepared, n_parameters, run_dir)]
    for note in [*prepared.notes, *(start.notes if start else []), *manifest.warnings]:
        findings.append(f"note: {note}")
    for line in findings:
        progress.note(line)
    if rank_zero:
        checkpoints.remove_leftovers(run_dir)
        directory.write_yaml(run_dir / "config.yaml", {**config.to_dict(), "resume": None, "run_dir": None})
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
        logger.log_hyperparams({**config.to_dict(), "parameters": n_parameters})

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
            compile_mode=device.compile_mode,
            metadata={
                "version": __version__,
                "model": config.to_dict()["model"],
                "schedule": dict(config.schedule),
                "plugins": plugins_of(config),
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
        try:
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
                callbacks=[*extra, boundary],  # what an extra one keeps is in the checkpoint that `boundary` writes
                plugins=[AtomicCheckpointIO()],
                default_root_dir=str(run_dir),
                use_distributed_sampler=False,
                num_sanity_val_steps=0,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        except (ValueError, MisconfigurationException) as error:  # an unknown strategy, or one that is not installed
            reason = str(error).split(". ")[0]
            raise UserError(f"trainer.strategy={config.trainer.strategy} on {device.accelerator}: {reason}") from None
        announce(progress, config, device, n_parameters, prepared, run_dir, start.step if start else None)
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
                print(f"saved at step {step}; continue with: {command()} resume={shown(run_dir)}", flush=True)
            elif options.summary:
                summary(result, config.trainer.max_steps)
            else:
                print(shown(run_dir), flush=True)
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
    if meta.get("imported"):
        raise UserError(
            f"resume={shown(run_dir)} is an imported model, not a run that was interrupted: "
            f"start a run from its weights with init_from={shown(run_dir)}"
        )
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
    compiler = logging.getLogger("torch.utils.cpp_extension")
    levels = [logger.level for logger in (*loggers, compiler)]
    import pytorch_lightning  # noqa: F401  (sets its level to INFO when it is imported)

    with warnings.catch_warnings():
        for pattern in _CHATTER:
            warnings.filterwarnings("ignore", pattern)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        compiler.setLevel(logging.ERROR)  # it warns of a CUDA toolkit without a GPU, whatever it compiles for
        try:
            yield
        finally:
            for logger, level in zip((*loggers, compiler), levels, strict=True):
                logger.setLevel(level)
