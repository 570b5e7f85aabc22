"""Shows a trace: on paper in the terminal, and as a safetensors file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor

from gptframe.errors import UserError
from gptframe.inspect.show import Lines, show, size, width
from gptframe.inspect.trace import Trace, logit_lens

MANY_LAYERS = 4  # above it, only the first and the last are shown unless asked for


def report(
    found: Trace, labels: list[str], origin: str, vocabulary: list[str], token: int, layer: int | None, everything: bool
) -> None:
    """Print the tokens, every intermediate, the values of one token, and what the model expects next.

    Args:
        labels: the text of each token.
        vocabulary: the text of each id.
        token: whose values are shown, from 0.
        layer: the block that is shown value by value; None for a summary of all.
        everything: show each block of a deep model.
    """
    show(_tokens(found, labels, origin, token), _table(found, labels, token, layer, everything))
    if layer is not None:
        for name in _names_of(found, layer):
            show(*_values(found, name, labels, token))
    show(_through_depth(found, labels, vocabulary, token), _expected(found, labels, vocabulary, token))


def _tokens(found: Trace, labels: list[str], origin: str, token: int) -> Any:
    numbers = [f">{'[reverse]' if i == token else ''}{i}" for i in range(len(labels))]
    lines = Lines("token", *numbers, heading=f"{found.model.cfg.name}, {escape(origin)}")
    lines.add_row("text", *(escape(label) for label in labels))
    lines.add_row("id", *(str(i) for i in found["ids"][0].tolist()))
    return lines


def _names_of(found: Trace, layer: int) -> list[str]:
    return [n for n in found.names(f"blocks.{layer}.*") if found.alias_of(n) is None]


def shown_layers(n_layers: int, layer: int | None, everything: bool) -> set[int]:
    """The layers whose rows the table has."""
    if layer is not None:
        return {layer}
    return set(range(n_layers)) if everything or n_layers <= MANY_LAYERS else {0, n_layers - 1}


def _table(found: Trace, labels: list[str], token: int, layer: int | None, everything: bool) -> Any:
    n_layers = found.model.cfg.n_layers
    layers = shown_layers(n_layers, layer, everything)
    hidden = n_layers - len(layers)
    caption = "mean, std and norm are over the whole tensor"
    if hidden and layer is None:
        caption += f"; {hidden} blocks between are left out: --layer N shows one value by value, --all lists all"
    columns = ("value", "axes", "shape", ">mean", ">std", ">norm", f"~of token {token}, {escape(labels[token])}")
    lines = Lines(*columns, heading="One forward pass", note=caption)
    previous = None
    for name, value in found.items():
        section = ".".join(name.split(".")[:3]) if name.count(".") > 2 else name.split(".")[0]
        if found.alias_of(name) or (name.startswith("blocks.") and int(name.split(".")[1]) not in layers):
            continue
        if previous is not None and section != previous and "." in section + previous:
            lines.add_section()
        previous = section
        shape = " ".join(map(str, value.shape))
        if value.dtype.is_floating_point:
            x = value.double()
            finite = x[x.isfinite()]
            numbers = [f"{finite.mean():.4f}", f"{finite.std(correction=0):.4f}", f"{finite.norm():.4f}"]
        else:
            numbers = ["", "", ""]
        lines.add_row(name, found.axes(name), shape, *numbers, _first_values(found, name, token))
    return lines


def at_token(found: Trace, name: str, token: int) -> Tensor:
    """What belongs to one token of the first sequence: a scalar, a vector, or one row a head."""
    value, axes = found[name], found.axes(name).split()
    if axes[0] in ("B", "?") and value.ndim > 1:
        value, axes = value[0], axes[1:]
    if "T" in axes:
        return value.select(axes.index("T"), token)
    if "S" in axes:  # values of all keys: the token's own
        return value.select(axes.index("S"), value.shape[axes.index("S")] - found["ids"].shape[1] + token)
    return value[token] if value.ndim and value.shape[0] > token else value


def _first_values(found: Trace, name: str, token: int, n: int = 5) -> str:
    value = at_token(found, name, token)
    if value.ndim == 2:
        value = value[0]
        return "head 0: " + _numbers(value[: n - 1]) + (" ..." if value.numel() > n - 1 else "")
    return _numbers(value.reshape(-1)[:n]) + (" ..." if value.numel() > n else "")


def _numbers(value: Tensor, width: int = 8) -> str:
    if value.dtype.is_floating_point:
        return " ".join(f"{v:>{width}.4f}" for v in value.tolist())
    return " ".join(str(int(v)) for v in value.reshape(-1).tolist())


def _values(found: Trace, name: str, labels: list[str], token: int) -> list[Any]:
    """A heading and all the numbers of one value that belong to the token."""
    value = at_token(found, name, token)
    heading = f"[bold]{name}[/]  [dim]{found.meaning(name)}[/]"
    if "S" in found.axes(name).split() and name.rpartition(".")[2] != "v":  # a row of keys for each head
        lines = Lines("head", *(f">{escape(label)}" for label in labels))
        rows = value if value.ndim == 2 else value[None]
        for head, row in enumerate(rows):
            cells = [f"{v:.4f}" if row.dtype.is_floating_point else "yes" if v else "[dim]no[/]" for v in row.tolist()]
            cells = [f"[dim]{c}[/]" if i > token else c for i, c in enumerate(cells)]
            lines.add_row(str(head) if value.ndim == 2 else "all", *cells)
        return [heading, lines]
    if value.ndim == 2:
        text = "\n".join(f"  head {head}  " + ("\n" + " " * 10).join(_lines(row)) for head, row in enumerate(value))
    else:
        text = "\n".join("  " + line for line in _lines(value.reshape(-1)))
    return [f"{heading}  [dim]norm {value.double().norm():.4f}[/]", text, ""]


def _lines(row: Tensor) -> list[str]:
    per_line = 16 if width() >= 144 else 8
    return [_numbers(part, 7) for part in row.split(per_line)]


def _through_depth(found: Trace, labels: list[str], vocabulary: list[str], token: int) -> Any:
    columns = ("after", ">stream norm", ">delta norm", ">delta / stream", "~if the model ended here (logit lens)")
    lines = Lines(*columns, heading=f"The stream of token {token}, {escape(labels[token])}, through depth")
    lens = logit_lens(found)
    previous: Tensor | None = None
    for place, stream in found.stream().items():
        norm = stream[0, token].double().norm()
        cells = ["", ""]
        if f"{place}.delta" in found and previous is not None:
            change = found[f"{place}.delta"][0, token].double().norm()
            cells = [f"{change:.4f}", f"{change / previous:.4f}"]
        probabilities = torch.softmax(lens[place][0, token].double(), -1)
        lines.add_row(place, f"{norm:.4f}", *cells, top_tokens(probabilities, vocabulary, 3))
        previous = norm
    return lines


def top_tokens(probabilities: Tensor, vocabulary: list[str], n: int) -> str:
    best = probabilities.topk(min(n, probabilities.numel()))
    return "   ".join(
        f"{escape(vocabulary[i])} {p:.2%}" for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )


def _expected(found: Trace, labels: list[str], vocabulary: list[str], token: int) -> Any:
    text = escape(" ".join(labels[: token + 1]))
    best = top_tokens(found["probabilities"][0, token].double(), vocabulary, 5)
    return f"[bold]After[/] {text} [bold]the model expects[/]  {best}\n"


def summary(found: Trace, labels: list[str], token: int) -> dict[str, Any]:
    """Plain containers, for `--json`: statistics of every value, and its numbers at one token."""

    def plain(value: Tensor) -> Any:
        return json.loads(json.dumps(value.tolist()).replace("-Infinity", "null").replace("Infinity", "null"))

    values = {}
    for name, value in found.items():
        row: dict[str, Any] = {"shape": list(value.shape), "axes": found.axes(name), "meaning": found.meaning(name)}
        if value.dtype.is_floating_point:
            x = value.double()
            row |= {"mean": x.mean().item(), "std": x.std(correction=0).item(), "norm": x.norm().item()}
        values[name] = {**row, "at_token": plain(at_token(found, name, token))}
    return {"tokens": labels, "ids": found["ids"][0].tolist(), "token": token, "values": values}


_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL",
}  # fmt: skip


def write_safetensors(found: Trace, file: Path, metadata: dict[str, str]) -> int:
    """Write every value under its name (github.com/huggingface/safetensors, format of 2023); return the bytes written.

    The file is an eight-byte little-endian length, that many bytes of JSON, and the tensors one after the other.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, value in found.items():
        start, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": _SAFETENSORS[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with open(file, "wb") as handle:
            handle.write(struct.pack("<Q", len(text)) + text)
            for value in found.values():
                handle.write(value.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
    return 8 + len(text) + end


def wrote(file: Path) -> str:
    return f"wrote {file} ({size(file.stat().st_size)})"
