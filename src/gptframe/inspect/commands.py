"""The command lines of this folder: what they take, and what they hand to whom. Imports nothing heavy by itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gptframe.errors import UserError

Configure = Callable[[list[str], list[str]], Any]
"""(overrides, config folders) -> the checked Config, with its plugins imported."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. {self.prog} --help says more")


def _parser(name: str, description: str, *, run: bool = True) -> argparse.ArgumentParser:
    parser = _Parser(f"gptframe {name}", description=description, allow_abbrev=False)
    what = "a run directory, or group and key overrides" if run else "group and key overrides"
    parser.add_argument("source", nargs="*", metavar="OVERRIDE", help=f"{what}, as in model=gpt2 activation=swiglu")
    parser.add_argument("--config-dir", action="append", default=[], help="a folder with options of your own")
    return parser


def read_source(arguments: argparse.Namespace, configure: Configure) -> tuple[Any, Path | None]:
    """The config of the overrides, or of the run directory, that the arguments name; and that directory.

    Raises:
        UserError: a run directory that is none, or an override that cannot be composed.
    """
    folders = [a for a in arguments.source if "=" not in a and not a.startswith("~")]
    if not folders:
        return configure(arguments.source, arguments.config_dir), None
    directory = Path(folders[0]).expanduser()
    if len(arguments.source) > 1:
        raise UserError(f"{folders[0]}: give either a run directory or overrides of the form key=value")
    if not directory.is_dir():
        raise UserError(f"{folders[0]}: neither an override of the form key=value nor a run directory")
    return read_run_config(directory), directory


def read_run_config(directory: Path) -> Any:
    """The config that a run directory holds, with its plugins imported.

    Raises:
        UserError: it is not a run directory.
    """
    from gptframe import plugins
    from gptframe.training.directory import read_config

    config = read_config(directory)
    plugins.load(config.plugins)
    return config


def print_json(value: Any) -> None:
    """Nothing but JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _writable(path: str | None, option: str) -> Path | None:
    """`path` with its folder made, before any work is done for it."""
    if path is None:
        return None
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(f"{option} {path} is a folder; give the name of a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}") from None
    return file


def params(argv: list[str], configure: Configure) -> int:
    """`gptframe params [OVERRIDE ...]`."""
    parser = _parser("params", "Every parameter with its formula, shape and count, and what they add up to.")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--plot", metavar="FILE.png", help="write a stacked bar chart")
    parser.add_argument("--all", action="store_true", help="print equal blocks one by one")
    arguments = parser.parse_intermixed_args(argv)
    plot = _writable(arguments.plot, "--plot")
    config, run = read_source(arguments, configure)
    from gptframe.inspect import params_report
    from gptframe.inspect.params import inventory
    from gptframe.inspect.source import Source, with_vocabulary

    found = inventory(with_vocabulary(Source(config, run)).model)
    if plot:
        params_report.plot(found, plot)
    if arguments.json:
        print_json(found.to_dict())
    else:
        params_report.report(found, every_block=arguments.all)
        if plot:
            print(f"wrote {plot}")
    return 0


CANONICAL = "I work , you work , he works"


def trace(argv: list[str], configure: Configure) -> int:
    """`gptframe trace [OVERRIDE ... | RUN] --text TEXT`."""
    parser = _parser("trace", "One forward pass on paper: every intermediate value by name.")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--text", help=f"what the model reads (default: {CANONICAL!r})")
    tokens.add_argument("--ids", help="token ids instead of a text, as in --ids 5,6,7")
    parser.add_argument("--bos", action="store_true", help="put the token that begins a document before them")
    parser.add_argument("--token", type=int, default=-1, metavar="N", help="whose values are shown (default: the last)")
    parser.add_argument("--layer", type=int, metavar="N", help="show one block value by value")
    parser.add_argument("--all", action="store_true", help="list every block of a deep model")
    parser.add_argument("--show", action="append", default=[], metavar="NAME", help="print one value whole; * matches")
    parser.add_argument("--names", action="store_true", help="list the names with their meaning")
    parser.add_argument("--full", metavar="FILE.safetensors", help="write every value to a file")
    parser.add_argument("--html", metavar="FILE.html", help="write one self-contained page")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_intermixed_args(argv)
    full, page = _writable(arguments.full, "--full"), _writable(arguments.html, "--html")
    if arguments.text is not None and not arguments.text.strip():
        raise UserError("--text is empty: give a few words, or --ids")
    config, run = read_source(arguments, configure)

    from gptframe.inspect import trace_command

    return trace_command.run(config, run, arguments, full, page)


def cost(argv: list[str], configure: Configure) -> int:
    """`gptframe cost [OVERRIDE ...]`."""
    parser = _parser("cost", "FLOPs, memory and time of a run before it starts.")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--throughput", type=float, metavar="N", help="tokens a second on all devices together")
    speed.add_argument("--measure", action="store_true", help="time a few steps on this machine")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.throughput is not None and not 0 < arguments.throughput < float("inf"):
        raise UserError(f"--throughput {arguments.throughput} must be greater than 0")
    config, run = read_source(arguments, configure)

    from gptframe.inspect import cost_command

    return cost_command.run(config, run, arguments)


def probe(argv: list[str], configure: Configure) -> int:
    """`gptframe probe [OVERRIDE ...]`."""
    parser = _parser("probe", "How signals and gradients travel through depth, by layer.", run=False)
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="train N steps and measure again (default 0)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds to repeat it with, from seed= on")
    parser.add_argument("--random", action="store_true", help="random tokens instead of the corpus")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--plot", metavar="FILE.png", help="write a picture")
    arguments = parser.parse_intermixed_args(argv)
    for option, least in (("steps", 0), ("seeds", 1)):
        if getattr(arguments, option) < least:
            raise UserError(f"--{option} {getattr(arguments, option)} must be at least {least}")
    plot = _writable(arguments.plot, "--plot")
    config, run = read_source(arguments, configure)
    if run is not None:
        raise UserError(
            f"{run}: probe starts from a fresh initialisation, with overrides; trace looks at trained weights"
        )

    from gptframe.inspect import probe_command

    return probe_command.run(config, arguments, plot)


def doctor(argv: list[str], configure: Configure) -> int:
    """`gptframe doctor [OVERRIDE ...]`."""
    parser = _parser("doctor", "What would go wrong with a run, and what to type instead.")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_intermixed_args(argv)
    config, run = read_source(arguments, configure)

    from gptframe.inspect import doctor_command

    return doctor_command.run(config, run, arguments)
