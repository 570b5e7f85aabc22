"""The `gptframe evaluate` command: what a model makes of a text, as a table or as JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptframe.arguments import Parser, typed
from gptframe.errors import UserError

if TYPE_CHECKING:
    from gptframe.evaluate import Document, Evaluation, Interval
    from gptframe.loading import LoadedModel

EXAMPLES = """examples:
  gptframe evaluate RUN                                   on the validation split of its own data
  gptframe evaluate RUN data=text data.path=my.txt --split all
  gptframe evaluate RUN data=verbs                        accuracy of the verb forms, too
  gptframe evaluate RUN --tasks my_task --tasks-from FOLDER    tasks of lm-eval (pip install lm-eval)
"""

ONLY_TRAINING = ("mask_documents", "baseline_order", "baseline_tokens")
"""Keys of `data` that a corpus does not take."""

Compose = Callable[[Sequence[str], Sequence[str]], dict[str, Any]]


def command_line(argv: list[str], compose: Compose) -> int:
    """`gptframe evaluate RUN [data=...]`."""
    parser = Parser(
        "gptframe evaluate",
        description="Loss, perplexity and bits per byte of a run's model on a text, with 95 % intervals.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", help="a run directory, trained here or imported")
    parser.add_argument("override", nargs="*", metavar="data=...", help="the text (default: the run's own data)")
    parser.add_argument("--config-dir", action="append", default=[], help="a folder with options of your own")
    parser.add_argument("--split", choices=("train", "val", "all"), help="(default val)")
    parser.add_argument("--documents", type=int, metavar="N", help="score no more than N documents")
    parser.add_argument("--stride", type=int, help="tokens by which a window moves on (default: half a context)")
    parser.add_argument("--batch-size", type=int, default=8, help="windows in a forward pass; changes no result")
    parser.add_argument("--resamples", type=int, help="of the bootstrap (default 1000)")
    parser.add_argument("--seed", type=int, help="of the bootstrap (default 0)")
    parser.add_argument("--per-document", metavar="FILE.jsonl", help="write a line for each document")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), default="fp32", help="(default fp32)")
    tasks = parser.add_argument_group("tasks of lm-eval")
    tasks.add_argument("--tasks", help="names separated by commas, instead of a text")
    tasks.add_argument("--tasks-from", metavar="FOLDER", help="a folder with task files of your own")
    tasks.add_argument("--limit", type=int, help="score no more than N examples of a task")
    arguments = parser.parse_intermixed_args(argv)
    for override in arguments.override:
        key = override.lstrip("+").partition("=")[0]
        if "=" not in override or (key != "data" and not key.startswith("data.")):
            raise UserError(f"{override}: only the text is chosen here, as in data=text data.path=my.txt")
    wasted = [o for o in arguments.override if o.lstrip("+").partition("=")[0] in [f"data.{k}" for k in ONLY_TRAINING]]
    if wasted:
        raise UserError(f"{wasted[0]} has no effect here: it is about training")
    for option in ("documents", "limit"):
        if getattr(arguments, option) is not None and getattr(arguments, option) < 1:
            raise UserError(f"--{option} {getattr(arguments, option)} must be at least 1")
    if arguments.tasks is not None:
        idle = typed(arguments, ("split", "documents", "stride", "resamples", "seed", "per_document"))
        idle += ["--config-dir"] if arguments.config_dir else []
        if arguments.override or idle:
            raise UserError(f"--tasks names its own texts: leave out {'data=' if arguments.override else idle[0]}")
    elif arguments.tasks_from or arguments.limit:
        raise UserError("--tasks-from and --limit go with --tasks")
    arguments.split = arguments.split or "val"
    arguments.seed = arguments.seed or 0
    arguments.resamples = 1000 if arguments.resamples is None else arguments.resamples
    if not 2 <= arguments.resamples <= 1_000_000:
        raise UserError(f"--resamples {arguments.resamples} must be from 2 to 1,000,000")
    composed = compose(arguments.override, arguments.config_dir)["data"] if arguments.override else None
    target = Path(arguments.per_document).expanduser() if arguments.per_document else None
    if target is not None and target.exists():
        raise UserError(f"--per-document {target} exists, and nothing is overwritten")

    from gptframe.loading import load

    model = load(arguments.run, arguments.device, arguments.dtype)
    if arguments.tasks is not None:
        return _tasks(model, arguments)
    return _text(model, arguments, composed, target)


def _text(model: LoadedModel, arguments: argparse.Namespace, data: dict[str, Any] | None, target: Path | None) -> int:
    from gptframe import evaluate
    from gptframe.registry import build
    from gptframe.training.directory import read_config

    config = read_config(Path(arguments.run).expanduser())
    section = dict(config.data if data is None else data)
    if data is None and section.get("name") == "text" and section.get("path") is None:
        raise UserError(f"{arguments.run} has no text of its own: name one, as in data=text data.path=my.txt")
    options = {k: v for k, v in section.items() if k not in ONLY_TRAINING}
    corpus = build("corpus", options, key="data")
    splits = ("train", "val") if arguments.split == "all" else (arguments.split,)
    notes: list[str] = list(getattr(corpus, "notes", []))
    rows: list[tuple[list[int], int | None]]
    if hasattr(corpus, "stores"):
        rows = list(itertools.islice(_stored(model, corpus, splits), arguments.documents))
    elif model.tokenizer is None:
        raise UserError("this run has no tokenizer (tokenizer=none): evaluate it on tokens, data=bin")
    else:
        texts = itertools.chain.from_iterable(corpus.documents(split) for split in splits)
        rows = list(evaluate.texts_to_ids(texts, model.tokenizer, arguments.documents))
        unknown = evaluate.unknown_tokens((ids for ids, _ in rows), model.tokenizer)
        if unknown:
            notes.append(f"{unknown} tokens are unknown to the tokenizer: bits per byte are lower than they should be")
    for ids, _ in rows:
        if ids and not 0 <= max(ids) < model.model.token_embedding.num_embeddings:
            raise UserError(
                f"token id {max(ids)} is beyond model.vocab_size={model.model.token_embedding.num_embeddings}"
            )
    documents = list(evaluate.score(model.model, rows, arguments.stride, arguments.batch_size))
    found = evaluate.summarise(documents, arguments.resamples, arguments.seed)
    verbs = None
    if hasattr(corpus, "slots") and model.tokenizer is not None:
        slots = [slot for split in splits for slot in corpus.slots(split)]
        hits = evaluate.slot_hits(model.model, slots, model.tokenizer)
        verbs = evaluate.slices(slots, hits)
        skipped = sum(hit is None for hit in hits)
        if skipped:
            notes.append(f"{skipped} of {len(hits)} verb forms could not be asked with this tokenizer and context")
    if target is not None:
        _write_documents(target, documents)
    name = section["name"] + (f" {section['path']}" if isinstance(section.get("path"), str) else "")
    if arguments.json:
        _print_json(arguments, model, name, found, verbs, notes)
    else:
        _print_table(arguments, model, name, found, documents, verbs)
        for note in notes:
            print(f"note: {note}")
        if target is not None:
            print(f"wrote {target}")
    return 0


def _stored(model: LoadedModel, corpus: Any, splits: Sequence[str]) -> Iterator[tuple[list[int], int | None]]:
    """Documents of a corpus that is tokens already; their bytes by decoding, where there is a tokenizer."""
    from gptframe.data.cache import default_cache_dir

    stores = dict(zip(("train", "val"), corpus.stores(default_cache_dir()), strict=True))
    for split in splits:
        store = stores[split]
        for start, stop in itertools.pairwise(store.documents.tolist()):
            ids = store.tokens[start:stop].astype("int64").tolist()
            n_bytes = None if model.tokenizer is None else len(model.tokenizer.decode(ids[1:]).encode("utf-8"))
            yield ids, n_bytes


def _write_documents(target: Path, documents: Sequence[Document]) -> None:
    lines = []
    for i, d in enumerate(documents):
        loss = d.loss if d.tokens else None
        lines.append(
            json.dumps(
                {"document": i, "tokens": d.tokens, "bytes": d.bytes, "nats": d.nats, "loss": loss,
                 "bits_per_byte": d.bits_per_byte}
            )
        )  # fmt: skip
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "x", encoding="utf-8") as handle:
            handle.write("".join(line + "\n" for line in lines))
    except OSError as error:
        raise UserError(f"--per-document {target}: {error.strerror}") from None


def _shown(value: Interval) -> dict[str, float | None]:
    # Beyond six digits stands the rounding of float32, which depends on the batch size.
    return {"value": _round(value.value), "low": _round(value.low), "high": _round(value.high)}


def _round(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.6g}")  # JSON has no NaN


def _print_json(
    arguments: argparse.Namespace, model: LoadedModel, name: str, found: Evaluation, verbs: Any, notes: list[str]
) -> None:
    from gptframe.evaluate import wilson

    values: dict[str, Any] = {
        "run": arguments.run,
        "data": name,
        "split": arguments.split,
        "context_length": model.model.cfg.context_length,
        "stride": arguments.stride or max(1, model.model.cfg.context_length // 2),
        "documents": found.documents,
        "tokens": found.tokens,
        "bytes": found.bytes,
        "loss": _shown(found.loss),
        "perplexity": _shown(found.perplexity),
        "bits_per_byte": None if found.bits_per_byte is None else _shown(found.bits_per_byte),
        "interval": f"95 %, {arguments.resamples} resamples of {found.resampled}" if found.resampled else None,
    }
    if verbs is not None:
        values["verbs"] = {
            key: {name: {"right": r, "of": n, "accuracy": _shown(wilson(r, n))} for name, (r, n) in group.items()}
            for key, group in verbs.items()
        }
    values["notes"] = notes
    sys.stdout.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _print_table(
    arguments: argparse.Namespace,
    model: LoadedModel,
    name: str,
    found: Evaluation,
    documents: Sequence[Document],
    verbs: Any,
) -> None:
    from gptframe.evaluate import wilson

    context = model.model.cfg.context_length
    stride = arguments.stride or max(1, context // 2)
    size = f", {found.bytes:,} bytes" if found.bytes is not None else ""
    print(f"{arguments.run} on {name}, {arguments.split}: {found.documents:,} documents, {found.tokens:,} tokens{size}")
    print(f"windows of {context} tokens, moved on by {stride}; each token scored once\n")
    for label, value in (
        ("loss", found.loss),
        ("perplexity", found.perplexity),
        ("bits per byte", found.bits_per_byte),
    ):
        if value is not None:
            interval = f"   {value.low:.4f} to {value.high:.4f}" if found.resampled else ""
            print(f"  {label:<14} {value.value:10.4f}{interval}")
    if found.resampled:
        print(f"\n  95 % intervals from {arguments.resamples} resamples of {found.resampled}")
    else:
        print("\n  no intervals: the text fits one window, and there is nothing to resample")
    losses = sorted(d.loss for d in documents if d.tokens)
    if len(losses) > 1:
        middle = losses[len(losses) // 2]
        print(f"  loss of a document: lowest {losses[0]:.4f}, median {middle:.4f}, highest {losses[-1]:.4f}")
    if verbs is not None:
        _print_verbs(verbs, wilson)


def _print_verbs(verbs: dict[str, dict[str, tuple[int, int]]], wilson: Callable[[int, int], Interval]) -> None:
    print("\n  verb forms       right      of   accuracy")
    for key, group in verbs.items():
        for name, (right, n) in group.items():
            label = name if key in ("all", "regular") else f"{key} {name}"
            share = wilson(right, n)
            print(f"  {label:<15} {right:6} {n:7}   {share.value:8.1%}   {share.low:.1%} to {share.high:.1%}")


def _tasks(model: LoadedModel, arguments: argparse.Namespace) -> int:
    from gptframe.interop.lm_eval import run_tasks

    names = [name for name in arguments.tasks.split(",") if name]
    if not names:
        raise UserError("--tasks is empty: give names separated by commas")
    found = run_tasks(model, names, arguments.tasks_from, arguments.batch_size, arguments.limit)
    if arguments.json:
        sys.stdout.write(json.dumps({"run": arguments.run, "tasks": found}, indent=2, ensure_ascii=False) + "\n")
        sys.stdout.flush()
        return 0
    for task, values in found.items():
        print(f"{task}: {values.pop('examples')} examples")
        for metric, value in values.items():
            print(f"  {metric:<28} {value:.4f}" if isinstance(value, float) else f"  {metric:<28} {value}")
    return 0
