"""The command line: `gptframe train|generate ...`; train.py is its first command."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gptframe import __version__
from gptframe.errors import UserError

COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {}


def command(name: str, summary: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    def enter(function: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        COMMANDS[name] = (summary, function)
        return function

    return enter


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for a person's mistake, 1 for a bug, 130 and 143 for signals."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a terminal without accents shows \xe9 for them
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: gptframe COMMAND ...\n")
        print("\n".join(f"  {name:<10} {summary}" for name, (summary, _) in COMMANDS.items()))
        print("\ngptframe COMMAND --help says more.")
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] == "complete" and len(arguments) == 3:  # asked by the shell, not by people
        from gptframe.completion import answer

        print("\n".join(answer(arguments[1], arguments[2], COMMANDS)))
        return 0
    try:
        if arguments[0] not in COMMANDS:
            from gptframe.errors import nearest

            known = ", ".join(COMMANDS)
            raise UserError(f"there is no command {arguments[0]!r}. {nearest(arguments[0], COMMANDS)}Commands: {known}")
        code = COMMANDS[arguments[0]][1](arguments[1:])
        sys.stdout.flush()
        return code
    except UserError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `gptframe ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception, context: str = "") -> int:
    """A bug's full traceback; a line where the surroundings are at fault."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return _report(UserError("the output cannot be written: no space left on the device"), context)
    try:
        os.getcwd()
    except FileNotFoundError:
        return _report(UserError("the current directory has been deleted: change to another"), context)
    traceback.print_exception(error)
    return 1


def _report(error: BaseException, context: str = "") -> int:
    print(f"error: {context}{error}", file=sys.stderr)
    return getattr(error, "exit_code", 2)


@command("train", "train a model; the same as python train.py")
def train(argv: list[str]) -> int:
    from gptframe import compose

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands us its exceptions instead of printing them
    import hydra

    compose.prepare_hydra()
    outcomes: list[int] = []
    table: list[str] = []

    started = False

    def job(cfg: Any) -> None:
        nonlocal started
        started = True
        outcomes.append(_job(cfg, table))
        if outcomes[-1] > 128:  # a signal ends the sweep, not one job of it
            raise SystemExit(outcomes[-1])

    folders = [b for a, b in zip(argv, argv[1:], strict=False) if a in ("--config-dir", "-cd")]
    folders += [a.partition("=")[2] for a in argv if a.startswith("--config-dir=")]
    groups = compose.all_groups([Path(f).expanduser() for f in folders])
    if "--help" in argv or "-h" in argv:
        print(train_help(groups))
        return 0
    if "--quiet" in argv:
        argv = [*(a for a in argv if a != "--quiet"), "callbacks.progress=none", "callbacks.summary=false"]
    # argparse takes positional arguments in one piece only: `a=1 -m b=2` must become `-m a=1 b=2`.
    overrides = [a for a in argv if not a.startswith("-") and ("=" in a or a.startswith("~"))]
    options = [a for a in argv if a not in overrides]
    compose.check_typed(overrides)
    compose.check_choices(overrides, groups)
    script = Path(__file__).with_name("launch") / "train.py"
    saved_argv, sys.argv = sys.argv, [str(script), *options, *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(compose.conf_dir()), config_name="train")(job)()
    except Exception as error:
        # Hydra's error for an option that is not there is an OSError as well
        if (started or isinstance(error, OSError)) and not isinstance(error, compose.COMPOSE_ERRORS):
            raise
        raise UserError(compose.explain(error)) from None  # Hydra refuses some overrides with bare ValueErrors
    finally:
        sys.argv = saved_argv
    failed = [code for code in outcomes if code]
    if table:
        print("\n".join(["", *table]))
    if len(outcomes) > 1 and failed:
        print(f"error: {len(failed)} of {len(outcomes)} jobs failed", file=sys.stderr)
    return failed[0] if failed else 0


TRAIN_HELP = """gptframe trains a GPT whose architecture is configuration.

  python train.py                                  mini on its own corpus, under a minute on a CPU
  python train.py model=andrea120m                 92M parameters on English text
  python train.py data=text data.path=my.txt       your own text
  python train.py norm_placement=post activation=swiglu expansion=8_3x
  python train.py -m activation=relu,swiglu seed=0,1   every combination
  python train.py resume=runs/DATE/TIME_NAME       continue a run
  python train.py plugins=[my_layer.py] 'model.block=[attention,my_layer,mlp]'

Groups, selected with group=option:

{groups}

Any value is set with its path, as in model.d_model=128 or trainer.max_steps=500.
--cfg job prints the composed config; --config-dir DIR adds options of your own;
--quiet prints the run directory alone; --info explains."""


def train_help(groups: dict[str, list[str]]) -> str:
    """Hydra's own help composes every option first, which takes seconds on slow machines."""
    import textwrap

    lines = [
        textwrap.fill(", ".join(options), 100, initial_indent=f"  {group:<15} ", subsequent_indent=" " * 18)
        for group, options in sorted(groups.items())
    ]
    return TRAIN_HELP.format(groups="\n".join(lines))


def _job(cfg: Any, table: list[str]) -> int:
    """One run, alone or in a multirun. Failures are reported here, at once, and the other jobs go on.

    Args:
        table: takes a line for each job of a multirun, to be printed after the last.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    settings = HydraConfig.get()
    sweep = settings.mode == RunMode.MULTIRUN
    overrides = [str(o) for o in OmegaConf.to_container(settings.overrides.task, resolve=False) or ()]
    context = f"job {settings.job.num} ({' '.join(overrides)}): " if sweep else ""
    try:
        if not sweep and settings.run.dir != ".":
            raise UserError("hydra.run.dir is not used here; choose the run directory with run_dir=...")
        config = read_config(cfg, overrides, settings.runtime.output_dir if sweep else None)
        if sweep and config.trainer.devices * config.trainer.num_nodes > 1:
            raise UserError("a run on several devices starts its own command again, all of a sweep's: leave out -m")
        with _uncollected():
            from gptframe.training.run import train as run_training

        if sweep:
            print(f"\n{context.rstrip(': ')}", flush=True)
        result = run_training(config, overrides)
        if sweep:
            table.append(f"{context}validation loss {result.val_loss:.4f}, {os.path.relpath(result.run_dir)}")
        return result.exit_code
    except UserError as error:
        if sweep:
            table.append(f"{context}failed")
        return _report(error, context)
    except Exception as error:
        if sweep:
            table.append(f"{context}failed")
            print(f"error: {context.rstrip(': ')} failed", file=sys.stderr)
        return _unexpected(error, context)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection while a large library is imported: it makes objects by the million, and no garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_config(cfg: Any, overrides: list[str], output_dir: str | None = None) -> Any:
    """The checked `Config` of what Hydra composed, with plugins imported and paths made absolute.

    Args:
        cfg: Hydra's config, or plain containers from `compose.compose_config`.
        output_dir: the directory that Hydra made for this job of a multirun.
    """
    from gptframe import compose, idle, plugins
    from gptframe.config import Config

    values = cfg if isinstance(cfg, dict) else compose.to_container(cfg, overrides)
    for override in overrides:
        key, _, option = override.partition("=")
        if key.lstrip("+") in compose.groups() and option.startswith("["):
            raise UserError(f"{override}: select one option; -m {key}={option.strip('[]')} runs one after the other")
    if values.get("resume") == "":
        raise UserError("resume= is empty: give the run directory to continue")
    if values.get("resume"):
        values = _resumed(values, overrides)
    elif output_dir is not None and values.get("run_dir") is None:
        values["run_dir"] = output_dir
    for key, group in compose.groups().items():
        section = values.get("model", {}).get(key) if isinstance(values.get("model"), dict) else None
        if isinstance(section, str):
            raise UserError(f"model.{key}={section}: options of a group are selected with {key}={section}")
        if isinstance(values.get(key), str) and group and key not in ("resume", "init_from", "run_dir", "name"):
            raise UserError(f"{key}={values[key]}: no such option. Options: {', '.join(group)}")
    for section in ("data", "tokenizer"):  # a run must find its text again from another directory
        path = values.get(section, {}).get("path")
        if isinstance(path, str) and Path(path).expanduser().exists():
            values[section]["path"] = str(Path(path).expanduser().absolute())
    config = Config.from_dict(values)
    origins = plugins.load(config.plugins)
    if config.resume is None:
        idle.refuse(config, overrides)
    return Config.from_dict({**config.to_dict(), "plugins": origins})


# What a resumed run may change. Anything else would make it another run.
RESUMABLE = (
    "trainer.",
    "logger",
    "callbacks",
    "precision",
    "plugins",
    "model.attention.backend",
    "model.linear.backend",
)
DERIVED = ("schedule.warmup_steps", "model.vocab_size")  # null until the run has found them


def _resumed(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The config of the run directory `values["resume"]`, with the allowed `overrides` of the command line applied."""
    import yaml

    from gptframe import compose

    directory = Path(str(values["resume"])).expanduser()
    file = directory / "config.yaml"
    if not directory.is_dir():
        raise UserError(f"resume={directory}: there is no such directory")
    if not file.is_file():
        raise UserError(f"resume={directory} is not a run directory: it has no config.yaml")
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert isinstance(saved, dict) and isinstance(saved.get("model"), dict)
    except (yaml.YAMLError, UnicodeDecodeError, AssertionError):
        raise UserError(f"resume={directory}: {file} is not the config of a run; restore it from a copy") from None
    for override in overrides:
        if override.startswith("~"):
            raise UserError(f"{override}: a resumed run keeps all of its keys")
        key, _, option = override.lstrip("+").partition("=")
        if key in compose.groups() and key in RESUMABLE:
            saved[key] = values[key]  # the whole section: the options of another choice mean nothing here
            continue
        for leaf in compose.keys_of_option(key, option) if key in compose.groups() else [key]:
            new, old = _at(values, leaf), _at(saved, leaf)
            if leaf == "resume" or new == old or (new is None and leaf in DERIVED):
                continue
            if not leaf.startswith(RESUMABLE) or leaf == "trainer.global_batch_size":
                raise UserError(
                    f"{leaf} is {old!r} in {directory} and {new!r} here: a resumed run keeps it. "
                    f"May change: {', '.join(k.rstrip('.') for k in RESUMABLE)}. For anything else start a new run"
                )
            _set(saved, leaf, new)
    return {**saved, "resume": str(directory.absolute()), "run_dir": None}


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        values = values.setdefault(part, {})
    values[last] = value


@command("generate", "sample text from a run directory")
def generate(argv: list[str]) -> int:
    from gptframe.generate_command import command_line

    return command_line(argv)


@command("evaluate", "loss, perplexity and bits per byte of a run on a text; tasks")
def evaluate(argv: list[str]) -> int:
    from gptframe.compose import compose_config
    from gptframe.evaluate_command import command_line

    return command_line(argv, compose_config)


@command("import", "read a model of another library into a run directory")
def import_model(argv: list[str]) -> int:
    from gptframe.interop.commands import import_command

    return import_command(argv)


@command("export", "write the model of a run directory for another library")
def export_model(argv: list[str]) -> int:
    from gptframe.interop.commands import export_command

    return export_command(argv)


@command("completion", "shell completion: gptframe completion bash|zsh|fish")
def completion(argv: list[str]) -> int:
    from gptframe.completion import script

    sys.stdout.write(script(argv))
    return 0


def _configure(overrides: list[str], config_dirs: list[str]) -> Any:
    """The checked `Config` of a command that looks at a run without starting it."""
    from gptframe import compose

    return read_config(compose.compose_config(overrides, config_dirs), overrides)


@command("params", "every parameter with its formula, and what they add up to")
def params(argv: list[str]) -> int:
    from gptframe.inspect import commands

    return commands.params(argv, _configure)


@command("trace", "one forward pass on paper: every intermediate value by name")
def trace(argv: list[str]) -> int:
    from gptframe.inspect import commands

    return commands.trace(argv, _configure)


@command("cost", "FLOPs, memory and time of a run before it starts")
def cost(argv: list[str]) -> int:
    from gptframe.inspect import commands

    return commands.cost(argv, _configure)


@command("probe", "gradients, contributions and activations by layer")
def probe(argv: list[str]) -> int:
    from gptframe.inspect import commands

    return commands.probe(argv, _configure)


@command("doctor", "what would go wrong with a run, and what to type instead")
def doctor(argv: list[str]) -> int:
    from gptframe.inspect import commands

    return commands.doctor(argv, _configure)


@command("plugins", "what is registered; write a new plugin; check one")
def plugins_command(argv: list[str]) -> int:
    from gptframe.plugins_command import command_line

    return command_line(argv)
