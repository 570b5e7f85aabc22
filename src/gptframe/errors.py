"""Errors that are meant for people: a mistake in what was typed, not a bug."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A person's mistake. The command line prints its message in a line or two, without traceback, and exits with 2."""

    exit_code = 2


def nearest(name: object, known: Iterable[str]) -> str:
    """Return `"Did you mean 'x' or 'y'? "`, or an empty string where nothing in `known` is near `name`."""
    matches = difflib.get_close_matches(str(name), list(known), n=2, cutoff=0.6)
    return f"Did you mean {' or '.join(repr(m) for m in matches)}? " if matches else ""
