"""Schedules against the formulas of their sources, written out here."""

import math

import pytest

from gptframe.errors import UserError
from gptframe.training.schedule import make_schedule


def section(name, **options):
    return {"name": name, "warmup_steps": None, "warmup_fraction": 0.0, "overlap_warmup": False, **options}


def test_cosine_after_warmup():
    lr = make_schedule(section("cosine", warmup_steps=10, min_ratio=0.1), 110)
    assert [lr(t) for t in range(10)] == [(t + 1) / 10 for t in range(10)]
    assert lr(10) == 1.0
    assert lr(60) == pytest.approx(0.1 + 0.9 * 0.5)  # half-way through the decay
    assert lr(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert lr(110) == pytest.approx(0.1)


def test_andrea_overlaps_the_decay_with_the_warmup():
    lr = make_schedule(section("cosine", warmup_steps=2000, overlap_warmup=True, min_ratio=0.0), 200_000)
    for t in (0, 1, 999, 1999, 2000, 100_000, 199_999):
        expected = 0.5 * (1 + math.cos(math.pi * t / 200_000)) * min(1, (t + 1) / 2000)
        assert lr(t) == pytest.approx(expected, rel=1e-12)


def test_linear_and_constant():
    lr = make_schedule(section("linear", warmup_steps=2, min_ratio=0.0), 12)
    assert [lr(t) for t in range(12)] == pytest.approx([0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    lr = make_schedule(section("constant", warmup_steps=4), 8)
    assert [lr(t) for t in range(8)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_wsd_holds_then_decays():
    lr = make_schedule(section("wsd", warmup_steps=10, decay_fraction=0.2), 110)  # decays from step 90 on
    assert {lr(t) for t in range(10, 91)} == {1.0}
    assert [lr(95), lr(100), lr(109)] == pytest.approx([0.75, 0.5, 0.05])
    lr = make_schedule(section("wsd", decay_fraction=0.5, decay="sqrt", min_ratio=0.1), 100)
    assert lr(75) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(0.5)))


def test_warmup_fraction_is_resolved_from_the_run():
    lr = make_schedule(section("constant", warmup_fraction=0.05), 60)  # 3 steps
    assert [lr(t) for t in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warmup_steps": 2000}, "warmup_steps=2000 is longer than the run of trainer.max_steps=100"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": 1.5}, "warmup_steps=1.5"),
        ({"warmup_fraction": 1.5}, "warmup_fraction=1.5 must be from 0 to 1"),
        ({"warmup_fraction": "a"}, "warmup_fraction='a'"),
        ({"overlap_warmup": "yes"}, "overlap_warmup='yes'"),
        ({"min_ratio": 2.0}, "min_ratio=2.0"),
        ({"min_ration": 0.1}, "min_ratio"),
        ({"name": "cosin"}, "cosine"),
        ({"name": "wsd", "decay": "steep"}, "'steep'"),
    ],
)
def test_bad_options_are_refused_before_training(options, said):
    with pytest.raises(UserError, match=".*") as error:
        make_schedule(section("cosine") | options, 100)
    assert said in str(error.value)
