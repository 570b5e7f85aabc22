"""The README's table names every option that there is, and its links lead somewhere. test_documentation.py runs it."""

from __future__ import annotations

import re
from pathlib import Path

from gptframe import compose

TEXT = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_table_of_switches_names_every_option():
    groups = compose.groups()
    rows = [row for row in TEXT.splitlines() if row.startswith("| `") and "=`" in row]
    for group in ("model", "norm_placement", "norm", "activation", "expansion", "attention", "position", "data",
                  "tokenizer", "optimizer", "schedule", "trainer", "precision", "logger"):  # fmt: skip
        (row,) = [row for row in rows if f"`{group}=`" in row]
        missing = [option for option in groups[group] if f"`{option}`" not in row]
        assert missing in ([], ["none"]), (group, missing)


def test_every_link_in_the_readme_leads_somewhere():
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (root / target).exists(), target
