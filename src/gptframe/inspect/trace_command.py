"""`gptframe trace`: from a text to a traced forward pass, and to everything that can be made of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from gptframe.config import Config
from gptframe.errors import UserError, nearest
from gptframe.inspect import source as sources
from gptframe.inspect import trace_report
from gptframe.inspect.commands import CANONICAL, print_json
from gptframe.inspect.show import show
from gptframe.inspect.trace import Trace, trace


def run(
    config: Config, directory: Path | None, arguments: argparse.Namespace, full: Path | None, page: Path | None
) -> int:
    """Trace what the arguments ask for, print it, and write the files asked for."""
    source = sources.Source(config, directory)
    given = sources.tokens_of_ids(arguments.ids) if arguments.ids is not None else None
    tokenizer = _tokenizer(source, needed=given is None)
    ids = given if given is not None else sources.tokens_of_text(tokenizer, arguments.text or CANONICAL)
    if arguments.bos:
        if tokenizer is None or tokenizer.bos_id is None:
            raise UserError("--bos: this tokenizer has no token that begins a document")
        ids = [tokenizer.bos_id, *ids]
    source = sources.Source(sources.with_vocabulary(source), directory)
    cfg = source.config.model
    sources.check_tokens(ids, cfg)
    token = _index(arguments.token, len(ids), "--token", "tokens")
    layer = None if arguments.layer is None else _index(arguments.layer, cfg.n_layers, "--layer", "layers")

    model, origin = sources.model_of(source)
    with torch.inference_mode(), trace(model) as found:
        model(torch.tensor([ids]))
    labels = sources.token_labels(tokenizer, ids)
    vocabulary = sources.token_labels(tokenizer, list(range(found["logits"].shape[-1])))

    wrote = []
    if full:
        metadata = {"model": cfg.name, "origin": origin, "tokens": " ".join(labels)}
        trace_report.write_safetensors(found, full, metadata)
        wrote.append(trace_report.wrote(full))
    if page:
        from gptframe.inspect.page import write_page

        write_page(found, labels, vocabulary, origin, page)
        wrote.append(trace_report.wrote(page))
    if arguments.json:
        print_json(trace_report.summary(found, labels, token))
        return 0
    if arguments.names:
        show(found.help(), columns=200)
    elif arguments.show:
        _show_whole(found, arguments.show)
    else:
        trace_report.report(found, labels, origin, vocabulary, token, layer, arguments.all)
    print("\n".join(wrote), end="\n" if wrote else "")
    return 0


def _tokenizer(source: sources.Source, needed: bool) -> Any:
    """The tokenizer; with `--ids` it only gives the tokens their names, and may be missing."""
    try:
        return sources.tokenizer_of(source)
    except UserError:
        if needed or source.config.model.vocab_size is None:
            raise
        return None


def _index(value: int, n: int, option: str, what: str) -> int:
    if not -n <= value < n:
        raise UserError(f"{option} {value}: there are {what} 0 to {n - 1}")
    return value % n


def _show_whole(found: Trace, patterns: list[str]) -> None:
    torch.set_printoptions(precision=4, linewidth=150, threshold=100_000, sci_mode=False)
    try:
        for pattern in patterns:
            names = found.names(pattern)
            if not names:
                raise UserError(f"--show {pattern}: no such value. {nearest(pattern, found)}--names lists all")
            for name in names:
                text = str(found[name]).replace("[", r"\[")
                show(f"[bold]{name}[/]  [dim]{found.axes(name)}: {found.meaning(name)}[/]", text, columns=200)
    finally:
        torch.set_printoptions(profile="default")
