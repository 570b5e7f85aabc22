"""Shows an inventory of parameters: a table in the terminal, and a stacked bar chart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from gptframe.inspect.params import Inventory, Row
from gptframe.inspect.show import Lines, short, show

FOLD_FROM = 80  # rows from which equal blocks are shown as one

WORDS = {
    "V": "vocabulary",
    "D": "d_model",
    "H": "MLP width",
    "T": "context",
    "L": "layers",
    "d": "head dim",
    "K": "key-value heads",
}


def report(found: Inventory, every_block: bool = False) -> None:
    """Print the table and the sums."""
    used = {s for r in found.rows for s in re.findall(r"\w+", r.formula or "")} | {"L"}
    symbols = ", ".join(f"{s} = {v:,} {WORDS[s]}" for s, v in found.symbols.items() if s in used)
    columns = ("~tensor", "shape", ">formula", ">count", "decay", "tied to")
    lines = Lines(*columns, heading=f"Parameters of {found.model}", note=symbols)
    lines.fold(0)
    n_rows = len(found.rows)
    groups = [[r] for r in found.rows] if every_block or n_rows < FOLD_FROM else _folded(found.rows)
    previous: object = None
    for group in groups:
        row = group[0]
        section = row.layer if row.layer is not None else row.name.split(".")[0]
        if previous is not None and section != previous:
            lines.add_section()
        previous = section
        name = row.name
        if len(group) > 1:
            name = re.sub(r"^blocks\.\d+", f"blocks.{row.layer}-{group[-1].layer}", name)
        lines.add_row(
            name,
            " x ".join(str(n) for n in row.shape),
            row.formula or "[yellow]measured[/]",
            f"{row.count:,}" + (f" [dim]x {len(group)}[/]" if len(group) > 1 else ""),
            "yes" if row.decayed else "[dim]no[/]",
            ", ".join(row.tied) or "",
        )
    show(lines, _sums(found))


def _folded(rows: list[Row]) -> list[list[Row]]:
    """Rows with those of consecutive equal blocks put together."""
    by_layer: dict[int, list[Row]] = {}
    for row in rows:
        if row.layer is not None:
            by_layer.setdefault(row.layer, []).append(row)

    def pattern(layer: int) -> list[tuple[object, ...]]:
        return [(r.name.split(".", 2)[2], r.shape, r.formula, r.decayed, r.tied) for r in by_layer[layer]]

    groups: list[list[Row]] = [[r] for r in rows if r.layer is None and not r.name.startswith(("final_norm", "head"))]
    runs: list[list[int]] = []
    for layer in sorted(by_layer):
        if runs and pattern(runs[-1][0]) == pattern(layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    for run in runs:
        groups += [list(same) for same in zip(*(by_layer[layer] for layer in run), strict=True)]
    return groups + [[r] for r in rows if r.layer is None and r.name.startswith(("final_norm", "head"))]


def _sums(found: Inventory) -> object:
    t = found.totals
    lines = Lines("sum", ">parameters", "~", heading="Totals")
    lines.fold(2)
    formulas = sum(r.formula is not None for r in found.rows)
    measured = len(found.rows) - formulas
    checked = f"{formulas} formulas agree with the built model" + (f", {measured} tensors measured" if measured else "")
    lines.add_row("[bold]total[/]", f"[bold]{t['total']:,}[/]", checked)
    lines.add_row("  without biases", f"{t['without_biases']:,}", f"{t['biases']:,} in biases")
    lines.add_row("  without norms", f"{t['without_norms']:,}", f"{t['norms']:,} in {found.norms} x {found.norm_class}")
    tied = any("head" in r.tied for r in found.rows)
    head = "the head is the token embedding" if tied else f"the untied head has {t['head']:,} more"
    lines.add_row("  without embeddings", f"{t['without_embeddings']:,}", f"{t['embeddings']:,} in embeddings; {head}")
    lines.add_section()
    blocks = found.blocks()
    if len(set(blocks)) == 1:
        each = f"{len(blocks)} blocks of {blocks[0]:,}"
    else:
        each = "blocks of " + ", ".join(f"{n:,}" for n in blocks)
    lines.add_row("trunk", f"{t['trunk']:,}", each)
    lines.add_row("  its matrices", f"{t['block_matrices']:,}", "without biases and norms")
    lines.add_row("with weight decay", f"{t['decayed']:,}", "")
    return lines


COLOURS = {
    "token embedding": "#4c78a8",
    "positions": "#72b7b2",
    "attention": "#f58518",
    "mlp": "#54a24b",
    "other": "#b279a2",
    "norms": "#e45756",
    "biases": "#9d755d",
    "head": "#79706e",
}


def _colour_key(row: Row) -> str:
    if row.kind == "norm":
        return "norms"
    if row.kind == "bias":
        return "biases"
    names = {"embedding": "token embedding", "position": "positions", "head": "head"}
    return names.get(row.part, row.part)


def plot(found: Inventory, file: Path) -> None:
    """Write a stacked bar chart: one bar for what stands before the blocks, one a block, one for what follows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars: list[tuple[str, list[Row]]] = [
        ("embed", [r for r in found.rows if r.layer is None and not r.name.startswith(("final_norm", "head"))])
    ]
    bars += [(str(i), [r for r in found.rows if r.layer == i]) for i in range(found.n_layers)]
    last = [r for r in found.rows if r.layer is None and r.name.startswith(("final_norm", "head"))]
    bars.append(("head" if any(r.part == "head" for r in last) else "final\nnorm", last))

    keys = _order(_colour_key(r) for r in found.rows)
    extra = iter(["#b279a2", "#eeca3b", "#ff9da6", "#d67195"] * 8)
    colours = {key: COLOURS.get(key) or next(extra) for key in keys}
    figure, axes = plt.subplots(figsize=(min(4 + 0.55 * len(bars), 18), 4.8), layout="constrained")
    bottoms = [0.0] * len(bars)
    for key in keys:
        heights = [float(sum(r.count for r in rows if _colour_key(r) == key)) for _, rows in bars]
        label = f"{key}  {short(sum(heights))}"
        axes.bar(range(len(bars)), heights, 0.8, bottom=bottoms, color=colours[key], label=label)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    crowded = len(bars) > 30
    for x, total in enumerate(bottoms):
        if total and not crowded:
            axes.text(x, total, short(total), ha="center", va="bottom", fontsize=8)
    step = max(1, len(bars) // 24)
    shown = [x for x in range(len(bars)) if x in (0, len(bars) - 1) or ((x - 1) % step == 0 and x < len(bars) - step)]
    axes.set_xticks(shown, [bars[x][0] for x in shown])
    axes.set_xlabel("block")
    axes.set_ylabel("parameters")
    axes.yaxis.set_major_formatter(lambda y, _: short(y))
    axes.set_ylim(0, 1.08 * max(bottoms))
    axes.spines[["top", "right"]].set_visible(False)
    tied = " (head tied to the token embedding)" if any("head" in r.tied for r in found.rows) else ""
    axes.set_title(f"{found.model}: {found.totals['total']:,} parameters{tied}", loc="left", fontsize=11, pad=12)
    figure.legend(loc="outside right upper", frameon=False, reverse=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _order(keys: Iterable[str]) -> list[str]:
    found = dict.fromkeys(keys)
    return [k for k in COLOURS if k in found] + [k for k in found if k not in COLOURS]
