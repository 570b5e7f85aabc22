"""The list of checks, what a failure says, and the loop that runs the one and collects the other."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gptframe.config import ModelConfig
from gptframe.errors import UserError, nearest

if TYPE_CHECKING:
    from gptframe.testing.subject import Subject

MODEL_KINDS = ("sublayer", "norm", "activation", "position", "topology", "transform")
STREAM_KINDS = ("sublayer", "topology", "transform")
MODULES = (
    "values",
    "causality",
    "training",
    "processes",
    "storage",
    "graph",
    "functions",
    "heads",
    "backends",
    "linear",
    "callbacks",
)


class Failure(AssertionError):
    """A part breaks its contract.

    Attributes:
        what: what was seen, in one line.
        where: the part and where it was registered, or the line that raised.
        smallest: the smallest input that shows it; empty where the input does not matter.
        cause: the likely cause and its remedy.
        check: name of the check; the kit fills it in.
        trace: the traceback, where the part itself raised.
    """

    def __init__(self, what: str, *, smallest: str = "", cause: str = "", where: str = "", trace: str = ""):
        super().__init__(what)
        self.what, self.smallest, self.cause, self.where, self.trace = what, smallest, cause, where, trace
        self.check = ""

    def __str__(self) -> str:
        rows = [("where", self.where), ("smallest", self.smallest), ("likely", self.cause)]
        return "\n".join([f"{self.check}: {self.what}", *(f"    {name:<9} {text}" for name, text in rows if text)])

    def to_dict(self) -> dict[str, str]:
        """Plain containers, for `--json`."""
        return {k: getattr(self, k) for k in ("check", "what", "where", "smallest", "cause")}


class Skip(Exception):
    """The check does not apply to this part; the message says why."""


@dataclass(frozen=True)
class Check:
    """One promise of a contract, and the function that tries to break it."""

    name: str
    kinds: tuple[str, ...]
    summary: str
    run: Callable[[Subject], str | None]
    """Returns a line for the report, or nothing. Raises Failure or Skip."""


CHECKS: list[Check] = []


Function = Callable[["Subject"], "str | None"]


def check(*kinds: str, name: str | None = None) -> Callable[[Function], Function]:
    """Enter a function as a check for parts of `kinds`; its name and its docstring are the check's."""

    def enter(function: Function) -> Function:
        summary = (function.__doc__ or "").strip().splitlines()[0]
        CHECKS.append(Check(name or function.__name__, kinds, summary, function))
        return function

    return enter


@dataclass
class Report:
    """What the kit found about one part."""

    kind: str
    name: str
    origin: str
    passed: dict[str, str] = field(default_factory=dict)
    """Check -> its line, which may be empty."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Check -> why it does not apply."""
    failures: list[Failure] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    """Checks that need what a failed one has shown to be broken."""

    @property
    def ok(self) -> bool:
        return not self.failures

    def raise_failures(self) -> None:
        """Raise AssertionError with every failure, if there is one."""
        if self.failures:
            text = "\n".join(f"{failure}\n{failure.trace}".rstrip() for failure in self.failures)
            raise AssertionError(f"{self.kind} {self.name!r} breaks its contract\n{text}")

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for `--json`."""
        return {
            "kind": self.kind,
            "name": self.name,
            "origin": self.origin,
            "ok": self.ok,
            "passed": self.passed,
            "skipped": self.skipped,
            "failures": [f.to_dict() for f in self.failures],
            "not_run": self.not_run,
        }


def checks_of(kind: str, only: Iterable[str] | None = None) -> list[Check]:
    """The checks for parts of `kind`, in the order in which they run.

    Raises:
        UserError: a name in `only` is no check of this kind.
    """
    for module in MODULES:  # in the order of the checks
        importlib.import_module(f"gptframe.testing.{module}")
    found = [c for c in CHECKS if kind in c.kinds]
    if only is None:
        return found
    names = [c.name for c in found]
    for name in only:
        if name not in names:
            article = "an" if kind[0] in "aeio" else "a"
            raise UserError(
                f"{name!r} is no check of {article} {kind}. {nearest(name, names)}Checks: {', '.join(names)}"
            )
    return [c for c in found if c.name in set(only)]


def conformance(
    kind: str,
    name: str,
    options: Mapping[str, Any] | None = None,
    cfg: ModelConfig | None = None,
    only: Iterable[str] | None = None,
) -> Report:
    """Run the checks on one registered part.

    Args:
        kind: a kind of the registry, as in "sublayer".
        name: a registered name, or `package.module:Attribute`.
        options: of the part, as they would stand in a config.
        cfg: the model around it; a small one if not given. Sizes decide how long this takes.
        only: names of checks, instead of all.

    Raises:
        UserError: an unknown kind, name, option or check. What the part does wrong is in the report.
    """
    from gptframe.testing.subject import Subject

    subject = Subject(kind, name, dict(options or {}), cfg)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more cost time on tensors of this size
    try:
        return _conformance(subject, checks_of(kind, only))
    finally:
        torch.set_num_threads(threads)


def _conformance(subject: Subject, wanted: list[Check]) -> Report:
    report = Report(subject.kind, subject.name, subject.origin)
    for position, one in enumerate(wanted):
        try:
            report.passed[one.name] = one.run(subject) or ""
        except Skip as reason:
            report.skipped[one.name] = str(reason)
        except Failure as failure:
            report.failures.append(_named(failure, one, subject))
        except (Exception, SystemExit) as error:  # a part that calls sys.exit must not end the report
            if one.name == "contract" and isinstance(error, UserError):
                raise  # the options or sizes that were given
            report.failures.append(_named(raised(error, subject), one, subject))
        if one.name == "contract" and report.failures:  # nothing can be asked of what does not run
            report.not_run = [c.name for c in wanted[position + 1 :]]
            break
    return report


def _named(failure: Failure, one: Check, subject: Subject) -> Failure:
    failure.check = one.name
    failure.where = failure.where or f"{subject.kind} {subject.name!r} ({subject.origin})"
    return failure


def raised(error: BaseException, subject: Subject, during: str = "", cause: str = "", smallest: str = "") -> Failure:
    """The failure of a part that raised `error`: where is the innermost line of the part's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == subject.file]
    where = f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}" if own else ""
    text = (str(error).strip().splitlines() or [""])[0]
    what = f"{during}{' ' if during else ''}raised {type(error).__name__}: {text}"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(what, where=where, smallest=smallest, cause=cause, trace=trace)
