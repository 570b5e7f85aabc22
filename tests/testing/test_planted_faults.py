"""What the kit is worth: every planted fault is caught by the check that is meant for it, and no sound part accused."""

from __future__ import annotations

import re
from pathlib import Path

import planted_faults
import pytest

from gptframe.errors import UserError
from gptframe.testing import checks_of, conformance
from gptframe.testing.kit import MODEL_KINDS

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"


def path(cls: type) -> str:
    return f"planted_faults:{cls.__name__}"


@pytest.mark.parametrize("kind,cls", planted_faults.SOUND, ids=lambda v: getattr(v, "__name__", v))
def test_a_sound_part_is_not_accused(kind, cls):
    report = conformance(kind, path(cls))
    assert report.ok, "\n".join(map(str, report.failures))
    assert set(report.passed) | set(report.skipped) == {c.name for c in checks_of(kind)}
    assert set(report.skipped) <= {"cache", "formula", "losses", "offers", "tokens"}


@pytest.mark.parametrize("kind,check,cls", planted_faults.FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_a_planted_fault_is_caught(kind, check, cls):
    (failure,) = conformance(kind, path(cls), only=[check]).failures
    assert failure.check == check
    assert "planted_faults.py:" in failure.where
    # caught for what it is, and not because the planted class is broken in another way
    assert not re.search(r"raised (AttributeError|NameError|TypeError|KeyError)", failure.what), failure.trace
    assert failure.cause or "raised" in failure.what
    assert len(str(failure).splitlines()) <= 4


def test_every_check_of_the_model_has_a_planted_fault():
    planted = {(kind, check) for kind, check, _ in planted_faults.FAULTS}
    assert {check for _, check in planted} == {c.name for kind in MODEL_KINDS for c in checks_of(kind)}
    assert len(planted_faults.FAULTS) == len({cls for _, _, cls in planted_faults.FAULTS}) >= 30


def test_the_figure_in_the_docs_is_this_one():
    found = re.search(r"\*\*(\d+) planted faults, (\d+) caught", DOCS.read_text(encoding="utf-8"))
    assert found and int(found[1]) == int(found[2]) == len(planted_faults.FAULTS)


def test_the_docs_list_every_check():
    text = DOCS.read_text(encoding="utf-8")
    assert [c.name for kind in MODEL_KINDS for c in checks_of(kind) if f"`{c.name}`" not in text] == []


def test_the_smallest_input_that_shows_a_leak_is_named():
    report = conformance("sublayer", path(planted_faults.FutureByOne), only=["future"])
    assert "x[1, 2, 32]" in report.failures[0].smallest
    report = conformance("sublayer", path(planted_faults.FutureOfAWholeContext), only=["future"])
    assert "x[1, 16, 32]" in report.failures[0].smallest


def test_what_does_not_run_is_asked_nothing_more():
    report = conformance("sublayer", path(planted_faults.ReturnsNothing))
    assert [f.check for f in report.failures] == ["contract"] and not report.passed
    assert "future" in report.not_run and "contract" not in report.not_run


def test_a_bug_in_the_part_keeps_its_traceback_and_line():
    (failure,) = conformance("sublayer", path(planted_faults.FailsForOneToken)).failures
    assert 'raise ValueError("too short")' in failure.trace and 'raise ValueError("too short")' in failure.where


def test_all_failures_are_told_at_once():
    report = conformance("norm", path(planted_faults.NormOverTheBatch))
    with pytest.raises(AssertionError, match="breaks its contract") as error:
        report.raise_failures()
    assert all(f"{f.check}: " in str(error.value) for f in report.failures)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("sublayer", "nothing"), "unknown sublayer 'nothing'"),
        (("norm", "rmsnorm", {"epz": 1}), "norm RMSNorm has no such option. Did you mean 'eps'"),
        (("norm", "rmsnorm", {}, None, ["futures"]), "'futures' is no check of a norm. Did you mean 'future'"),
    ],
)
def test_mistakes_of_a_person(arguments, message):
    with pytest.raises(UserError) as refusal:
        conformance(*arguments)
    assert message in str(refusal.value)
