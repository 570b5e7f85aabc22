"""Shows a probe: a table for each stage, the sums that claims are made of, and a plot."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptframe.inspect.probe import Probe, Snapshot
from gptframe.inspect.show import Lines, show

MOST_ROWS = 24


def mean(values: Sequence[float]) -> float:
    """The mean of what is a number; infinity where one is infinite."""
    known = [v for v in values if not math.isnan(v)]
    return statistics.fmean(known) if known else math.nan


def spread(values: Sequence[float]) -> float:
    """The sample standard deviation of what is a number; nan for less than two, or where one is infinite."""
    known = [v for v in values if not math.isnan(v)]
    return statistics.stdev(known) if len(known) > 1 and all(map(math.isfinite, known)) else math.nan


def with_spread(values: Sequence[float]) -> str:
    """`1.23e-04 ± 5%`, or the number alone where there is one seed."""
    centre, deviation = mean(values), spread(values)
    if math.isnan(centre):
        return ""
    text = f"{centre:.2e}" if centre and not 0.01 <= abs(centre) < 1000 else f"{centre:.3f}"
    text = "0" if not centre else text.replace("inf", "infinite")
    return text if math.isnan(deviation) or not centre else f"{text} ± {abs(deviation / centre):.0%}"


def report(found: Probe) -> None:
    """Print it."""
    for step in found.stages:
        show(_table(found, step))
    show(_sums(found))


def shown_blocks(n: int) -> list[int]:
    """All blocks of a model of ordinary depth; some of a deep one, both ends included."""
    if n <= MOST_ROWS:
        return list(range(n))
    return sorted({round(i * (n - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})


def _table(found: Probe, step: int) -> Any:
    snapshots = found.at(step)
    labels = list(snapshots[0].deltas)
    n = len(snapshots[0].gradients)
    seeds = (
        f", mean of seeds {', '.join(str(s.seed) for s in snapshots)} ± their deviation" if len(snapshots) > 1 else ""
    )
    when = "at the initialisation" if step == 0 else f"after {step} steps"
    columns = [
        "block",
        ">gradient",
        ">stream gradient",
        ">change",
        ">cosine",
        *(f">{label} / stream" for label in labels),
    ]
    columns += [">act. std", ">zeros", ">dead", ">entropy"]
    blocks = shown_blocks(n)
    caption = f"{len(blocks)} of {n} blocks; --json has all" if len(blocks) < n else None
    lines = Lines(*columns, heading=f"{found.model} {when}, {found.tokens} tokens{seeds}", note=caption)

    def plain(values: Sequence[float], form: str = ".3f") -> str:
        value = mean(values)
        return "" if math.isnan(value) else format(value, form)

    for i in blocks:
        lines.add_row(
            str(i),
            with_spread([s.gradients[i] for s in snapshots]),
            with_spread([s.stream_gradients[i] for s in snapshots]),
            plain([s.change[i] for s in snapshots], ".3g"),
            plain([s.cosine[i] for s in snapshots]),
            *(plain([s.deltas[label][i] for s in snapshots], ".3g") for label in labels),
            plain([s.activation_std[i] for s in snapshots], ".3g"),
            plain([s.zeros[i] for s in snapshots], ".1%"),
            plain([s.dead[i] for s in snapshots], ".1%"),
            plain([s.entropy[i] for s in snapshots]),
        )
    lines.add_row("end", "", with_spread([s.stream_gradients[-1] for s in snapshots]))
    return lines


SUMS: list[tuple[str, Callable[[Snapshot], float]]] = [
    ("loss", lambda s: s.loss),
    ("stream gradient, first block / end", Snapshot.reach),
    ("gradient, first block / last block", Snapshot.reach_of_parameters),
    (
        "gradient, largest block / smallest",
        lambda s: max(s.gradients) / min(s.gradients) if min(s.gradients) else math.inf,
    ),
    ("gradient of the token embedding", lambda s: s.embedding_gradient),
    ("change of the stream by a block, mean", lambda s: mean(s.change)),
    ("cosine of stream before and after a block, mean", lambda s: mean(s.cosine)),
    ("dead hidden units", lambda s: mean(s.dead)),
]


def _sums(found: Probe) -> Any:
    several = len(found.at(found.stages[0])) > 1
    columns = ["~over all blocks"]
    for step in found.stages:
        columns += [
            f">{'at the initialisation' if step == 0 else f'after {step} steps'}",
            *([">from", ">to"] if several else []),
        ]
    lines = Lines(*columns)
    for name, function in SUMS:
        cells = []
        for step in found.stages:
            values = [function(s) for s in found.at(step)]
            cells.append(with_spread(values))
            if several:
                cells += [f"{v:.3g}" if not math.isnan(v) else "" for v in (min(values), max(values))]
        if any(cells):
            lines.add_row(name, *cells)
    return lines


def to_dict(found: Probe) -> dict[str, Any]:
    """Plain containers, for `--json`; nan becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list) else value

    sums = {
        str(step): {name: [plain(function(s)) for s in found.at(step)] for name, function in SUMS}
        for step in found.stages
    }
    return {
        "model": found.model,
        "steps": found.steps,
        "tokens": found.tokens,
        "sums": sums,
        "snapshots": [plain(asdict(s)) for s in found.snapshots],
    }


def _delta(label: str, snapshot: Snapshot) -> list[float]:
    return snapshot.deltas[label]


def plot(found: Probe, file: Path) -> None:
    """Write a picture of four panels: gradients, stream gradients, contributions, activations; a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(11, 7.2), layout="constrained")
    colours = {step: colour for step, colour in zip(found.stages, ("#4c78a8", "#e45756"), strict=False)}
    labels = list(found.snapshots[0].deltas)
    styles = ["-", "--", ":", "-."]

    def draw(axes: Any, get: Callable[[Snapshot], list[float]], name: str = "", style: str = "-") -> None:
        for step in found.stages:
            rows = [get(s) for s in found.at(step)]
            centre = [mean(column) for column in zip(*rows, strict=True)]
            if all(math.isnan(v) for v in centre):
                continue
            for row in rows if len(rows) > 1 else []:
                axes.plot(row, style, color=colours[step], alpha=0.3, linewidth=0.8)
            when = "at the initialisation" if step == 0 else f"after {step} steps"
            axes.plot(centre, style, color=colours[step], linewidth=1.8, label=f"{name}{', ' if name else ''}{when}")

    draw(panels[0, 0], lambda s: s.gradients)
    draw(panels[0, 1], lambda s: s.stream_gradients)
    for label, style in zip(labels, styles * 8, strict=False):
        draw(panels[1, 0], functools.partial(_delta, label), label, style)
    draw(panels[1, 1], lambda s: s.activation_std, "activation std", "-")
    draw(panels[1, 1], lambda s: s.entropy, "attention entropy", "--")
    draw(panels[1, 1], lambda s: s.dead, "dead units", ":")
    titles = (
        "gradient of each block's parameters",
        "gradient of the stream entering each block",
        "delta / stream",
        "activations",
    )
    for axes, title in zip(panels.flat, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("block", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if axes.lines:
            axes.legend(fontsize=8, frameon=False)
    for axes in panels[0]:
        if any(v > 0 for line in axes.lines for v in line.get_ydata()):
            axes.set_yscale("log")
    seeds = len(found.at(found.stages[0]))
    figure.suptitle(f"{found.model}, {found.tokens} tokens, {seeds} seed{'s' if seeds > 1 else ''}", x=0.01, ha="left")
    figure.savefig(file, dpi=130)
    plt.close(figure)
