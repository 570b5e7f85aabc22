"""Writes a trace as one self-contained HTML page: no network, no other file."""

from __future__ import annotations

import base64
import html
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gptframe.errors import UserError
from gptframe.inspect.trace import Trace, logit_lens
from gptframe.model.block import sublayers

MOST_VALUES = 3_000_000  # numbers that a page carries, 5.4 bytes each; the largest values are left out first
TEMPLATE = Path(__file__).with_name("page.html")


def write_page(found: Trace, labels: list[str], vocabulary: list[str], origin: str, file: Path) -> None:
    """Write the page.

    Raises:
        UserError: the file cannot be written.
    """
    data = json.dumps(page_data(found, labels, vocabulary, origin), ensure_ascii=False, allow_nan=False)
    text = TEMPLATE.read_text(encoding="utf-8")
    text = text.replace("__TITLE__", html.escape(f"{found.model.cfg.name}: {' '.join(labels)}"))
    # "</script>" or "<!--" in a token must not end the script that holds it
    text = text.replace("__DATA__", data.replace("<", "\\u003c"))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def page_data(found: Trace, labels: list[str], vocabulary: list[str], origin: str) -> dict[str, Any]:
    """All that the page shows, as plain containers."""
    model, cfg = found.model, found.model.cfg
    stream = found.stream()
    lens = {place: torch.softmax(logits[0].double(), -1) for place, logits in logit_lens(found).items()}
    kept = _kept(found)
    return {
        "model": cfg.name,
        "origin": origin,
        "parameters": sum(p.numel() for p in model.parameters()),
        "facts": {
            "d_model": cfg.d_model,
            "blocks": cfg.n_layers,
            "heads": cfg.n_heads,
            "vocabulary": cfg.vocab_size,
            "context": cfg.context_length,
            "norm": f"{cfg.norm['name']}, {cfg.norm_placement['name']}",
            "positions": cfg.position["name"],
            "activation": cfg.activation["name"],
            "topology": cfg.topology_section["name"],
            "head": "tied" if model.head is None else "untied",
        },
        "tokens": [{"text": t, "id": i} for t, i in zip(labels, found["ids"][0].tolist(), strict=True)],
        "diagram": _diagram(found),
        "places": list(stream),
        "norms": [x[0].double().norm(dim=-1).tolist() for x in stream.values()],
        "deltas": _deltas(found, stream),
        "lens": [[_top(row, vocabulary, 5) for row in p] for p in lens.values()],
        "expected": [_top(row, vocabulary, 5) for row in found["probabilities"][0].double()],
        "attention": [
            {"name": n, "layer": int(n.split(".")[1]), "label": n.split(".")[2]}
            for n in found.names("*.pattern")
            if n in kept
        ],
        "values": {n: _value(found, n, n in kept) for n in found if found.alias_of(n) is None},
        "left_out": [n for n in found if found.alias_of(n) is None and n not in kept],
    }


def _kept(found: Trace) -> set[str]:
    names = [n for n in found if found.alias_of(n) is None]
    total = sum(found[n].numel() for n in names)
    for name in sorted(names, key=lambda n: found[n].numel(), reverse=True):
        if total <= MOST_VALUES:
            break
        total -= found[name].numel()
        names.remove(name)
    return set(names)


def _value(found: Trace, name: str, whole: bool) -> dict[str, Any]:
    value = found[name]
    row: dict[str, Any] = {"shape": list(value.shape), "axes": found.axes(name), "meaning": found.meaning(name)}
    if value.dtype.is_floating_point:
        x = value.double()
        row |= {"mean": _finite(x.mean()), "std": _finite(x.std(correction=0)), "norm": _finite(x.norm())}
    if whole:
        row["data"] = base64.b64encode(value.to(torch.float32).contiguous().numpy().tobytes()).decode()
    return row


def _finite(value: Tensor) -> float | None:
    number = value.item()
    return number if math.isfinite(number) else None


def _deltas(found: Trace, stream: dict[str, Tensor]) -> list[dict[str, Any]]:
    rows = []
    for name in found.names("*.delta"):
        before, delta = found[name.removesuffix("delta") + "stream_before"][0].double(), found[name][0].double()
        rows.append(
            {
                "name": name.removesuffix(".delta"),
                "norm": delta.norm(dim=-1).tolist(),
                "ratio": (delta.norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-300)).tolist(),
                "cosine": torch.cosine_similarity(before, delta, dim=-1, eps=1e-300).tolist(),
            }
        )
    return rows


def _top(probabilities: Tensor, vocabulary: list[str], n: int) -> list[list[Any]]:
    best = probabilities.topk(min(n, probabilities.numel()))
    return [[vocabulary[i], round(p, 6)] for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]


def _diagram(found: Trace) -> dict[str, Any]:
    model = found.model

    def taken(module: object) -> bool:
        return not isinstance(module, nn.Identity)

    blocks = [
        [
            {
                "name": f"blocks.{layer}.{label}",
                "label": label,
                "pre": taken(sublayer.pre),
                "out": taken(sublayer.out),
                "post": taken(sublayer.post),
                "scale": sublayer.residual_scale,
            }
            for label, sublayer in sublayers(block)
        ]
        for layer, block in enumerate(model.blocks)
    ]
    return {
        "position": "position" in found,
        "embedding_norm": taken(model.embedding_norm),
        "final_norm": taken(model.final_norm),
        "parallel": model.cfg.topology_section["name"] == "parallel",
        "blocks": blocks,
    }
