"""Prints for people: tables that keep their shape when piped, and numbers that line up."""

from __future__ import annotations

import io
import sys
from typing import Any

PIPED_WIDTH = 150


def width() -> int:
    """Columns that a line may have."""
    from rich.console import Console

    return max(Console().width, 60) if sys.stdout.isatty() else PIPED_WIDTH


class Lines:
    """A light table under a heading. Where the line is too short, the `~` column gives way, and no number does."""

    def __init__(self, *columns: str, heading: str | None = None, note: str | None = None) -> None:
        from rich import box
        from rich.table import Table

        self.heading, self.note = heading, note
        self.table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1))
        for name in columns:
            elastic = name.startswith("~")
            self.table.add_column(
                name.lstrip(">~"),
                justify="right" if name.startswith(">") else "left",
                no_wrap=True,
                ratio=1 if elastic else None,
            )

    def add_row(self, *cells: str) -> None:
        self.table.add_row(*cells)

    def add_section(self) -> None:
        self.table.add_section()

    def fold(self, *columns: int) -> None:
        """Let these columns break over lines instead of being cut."""
        for index in columns:
            self.table.columns[index].no_wrap, self.table.columns[index].overflow = False, "fold"


def show(*renderables: Any, columns: int | None = None) -> None:
    """Write rich renderables to standard output in one piece.

    Colours follow the terminal, NO_COLOR and FORCE_COLOR. A pipe gets plain lines, wide enough not to be folded.

    Raises:
        BrokenPipeError: the reader has gone (`| head`).
    """
    from rich.console import Console

    buffer = io.StringIO()
    actual = Console()
    console = Console(
        file=buffer,
        force_terminal=actual.is_terminal,
        color_system=actual.color_system if actual.is_terminal else None,  # type: ignore[arg-type]
        width=columns or width(),
        highlight=False,
    )
    for renderable in renderables:
        if isinstance(renderable, Lines):
            if renderable.heading:
                console.print(f"[bold]{renderable.heading}[/]")
            natural = console.measure(renderable.table, options=console.options.update(width=10_000)).maximum
            renderable.table.expand = natural > console.width
            console.print(renderable.table)
            if renderable.note:
                console.print(f"[dim]{renderable.note}[/]\n")
        else:
            console.print(renderable)
    text = "\n".join(line.rstrip() for line in buffer.getvalue().split("\n"))
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def size(n_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def short(number: float) -> str:
    """12_345_678 -> '12.3M'."""
    for limit, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """90 -> '1 min 30 s'."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours / 24:.1f} days"
