"""The numbers in docs/ are the ones that the commands print, and both languages print the same ones."""

from __future__ import annotations

import re
from pathlib import Path

import mini_by_hand
import pytest
import torch

from gptframe import compose, trace
from gptframe.config import Config, ModelConfig
from gptframe.inspect.params import inventory
from gptframe.inspect.trace_report import at_token
from gptframe.model import build_model

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROW = re.compile(r"(\S+)\s+(head \d+\s+)?((?:-?\d+\.\d{4}\s*)+)")


def rows(page: str) -> list[tuple[str, int | None, list[float]]]:
    found = []
    for block in re.findall(r"```text\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL):
        for line in block.splitlines():
            match = ROW.fullmatch(line.rstrip())
            assert match, line
            head = int(match[2].split()[1]) if match[2] else None
            found.append((match[1], head, [float(n) for n in match[3].split()]))
    return found


def test_the_walk_through_mini_shows_what_the_command_prints() -> None:
    with torch.no_grad(), trace(build_model(ModelConfig(), seed=0)) as t:
        t.model(torch.tensor([mini_by_hand.IDS]))
    found = rows("mini-by-hand.md")
    assert len(found) > 30
    for name, head, numbers in found:
        value = at_token(t, name, 7)
        value = value if head is None else value[head]
        # a number that lies between two may be rounded either way on another machine
        assert value.reshape(-1)[: len(numbers)].tolist() == pytest.approx(numbers, abs=6e-5), name
        assert len(numbers) == (8 if name.endswith(("scores", "pattern")) else 4)
    left_out = {"ids", "probabilities", "blocks.0.stream_before", *t.names("*.mask"), *(n for n in t if t.alias_of(n))}
    assert {name for name, _, _ in found} == set(t) - left_out


def test_both_languages_walk_through_the_same_numbers() -> None:
    assert rows("mini-by-hand.md") == rows("mini-a-mano.md")
    english, spanish = ((DOCS / p).read_text(encoding="utf-8") for p in ("mini-by-hand.md", "mini-a-mano.md"))
    prose = [
        sorted(re.findall(r"\d+[.,]\d{3,}", re.sub(r"```.*?```", "", page, flags=re.DOTALL).replace(",", ".")))
        for page in (english, spanish)
    ]
    assert prose[0] == prose[1] and len(prose[0]) > 50
    assert english.count("## ") == spanish.count("## ")


@pytest.mark.parametrize(
    "preset,keys",
    [
        ("mini", ["total", "trunk"]),
        ("andrea120m", ["total", "without_biases", "trunk", "block_matrices", "biases", "norms"]),
        ("andrea120m_untied", ["total", "head", "block_matrices"]),
    ],
)
def test_the_page_of_numbers_has_the_counts(preset: str, keys: list[str]) -> None:
    page = (DOCS / "numbers.md").read_text(encoding="utf-8")
    totals = inventory(Config.from_dict(compose.compose_config([f"model={preset}"])).model).totals
    assert [key for key in keys if f"{totals[key]:,}" not in page] == []


def test_every_claim_comes_from_a_checked_in_experiment() -> None:
    page = (DOCS / "claims.md").read_text(encoding="utf-8")
    named = set(re.findall(r"claims_\w+", page)) - {"claims_"}
    checked_in = {name for name in compose.groups()["experiment"] if name.startswith("claims_")}
    assert named == checked_in
