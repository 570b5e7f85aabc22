"""`gptframe doctor`: every check, a line each."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape

from gptframe.config import Config
from gptframe.inspect.commands import print_json
from gptframe.inspect.doctor import LEVELS, Finding, examine
from gptframe.inspect.show import Lines, show

MARKS = {"ok": "[green]ok[/]", "note": "[cyan]note[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def run(config: Config, directory: Path | None, arguments: argparse.Namespace) -> int:
    """Examine and print. The exit code is 2 where the run would fail, else 0."""
    found = examine(config, directory)
    if arguments.json:
        print_json([vars(finding) for finding in found])
    else:
        report(found)
    return 2 if any(finding.level == "error" for finding in found) else 0


def report(found: list[Finding]) -> None:
    """Print the findings and what they come to."""
    lines = Lines("", "about", "~found", "what to type")
    lines.fold(2, 3)
    for finding in found:
        lines.add_row(MARKS[finding.level], finding.subject, escape(finding.text), f"[bold]{escape(finding.fix)}[/]")
    counts = {level: sum(f.level == level for f in found) for level in LEVELS}
    if counts["error"]:
        verdict = f"[red]This run would fail:[/] {counts['error']} error{'s' if counts['error'] > 1 else ''}"
    elif counts["warning"]:
        verdict = f"[yellow]This run can start;[/] {counts['warning']} warning{'s' if counts['warning'] > 1 else ''}"
    else:
        verdict = "[green]This run can start.[/]"
    show(lines, verdict)
