"""Command-line arguments: a mistake in them is one line, like every other."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import NoReturn

from gptframe.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse without its usage text before each error; `--help` prints it.

    Raises:
        UserError: an argument is unknown, missing or no value of its type.
    """

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')} ({self.prog} --help)")


def typed(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The options among `names` that were given, as they are typed. Their default must be None or false."""
    given = [name for name in names if getattr(arguments, name) is not None and getattr(arguments, name) is not False]
    return [f"--{name.replace('_', '-')}" for name in given]
