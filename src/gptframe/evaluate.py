"""How well a model predicts a text: loss, perplexity and bits per byte, with intervals; and its verb forms by slice.

Each document stands for itself: it begins with the token that begins documents, where the tokenizer has one, and is cut
into windows of the model's context that overlap, so that each token is predicted exactly once and with at least
context_length - stride tokens before it (or all that there are). The mark of the end is not scored: the sums are over
the tokens of the text alone, which makes bits per byte comparable between tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gptframe.errors import UserError
from gptframe.model import GPT
from gptframe.model.loss import CHUNK_ELEMENTS

IGNORED = -100
FEW = 30
"""With fewer documents than this, an interval is drawn from stretches of text instead."""


@dataclass
class Document:
    """What a document came to.

    Attributes:
        tokens: that were scored.
        bytes: of its UTF-8; None for tokens without a text.
        nats: the sum of -ln p over its tokens.
        stretches: (nats, tokens) of each window, in order.
    """

    tokens: int = 0
    bytes: int | None = None
    nats: float = 0.0
    stretches: list[tuple[float, int]] = field(default_factory=list)

    @property
    def loss(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.bytes if self.bytes else None


@dataclass(frozen=True)
class Window:
    """Tokens start..stop - 1 go in; the targets from `first` to `stop` are scored (target i is predicted by i - 1)."""

    start: int
    stop: int
    first: int


def windows(n_targets: int, context_length: int, stride: int) -> Iterator[Window]:
    """The windows over a text of n_targets + 1 tokens: each target 1..n_targets is scored once."""
    done = 0
    while done < n_targets:
        stop = min(n_targets, context_length if done == 0 else done + stride)
        yield Window(max(0, stop - context_length), stop, done + 1)
        done = stop


@torch.inference_mode()
def score(
    model: GPT, documents: Iterable[tuple[list[int], int | None]], stride: int | None = None, batch_size: int = 8
) -> Iterator[Document]:
    """Score documents in their order.

    Args:
        documents: (ids, bytes of the text). The first id is not scored: it is what the first prediction sees.
        stride: tokens by which a window moves on; None for half a context.
        batch_size: windows in one forward pass. It changes no number beyond rounding.

    Raises:
        UserError: the stride is none, or the model's logits are not numbers.
    """
    context = model.cfg.context_length
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride <= context:
        raise UserError(f"--stride {stride} must be from 1 to the context, {context}")
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size} must be at least 1")
    waiting: list[tuple[Document, list[int], Window]] = []
    open_documents: list[tuple[Document, int]] = []  # in order, with the windows that each still waits for

    def flush() -> None:
        for (document, _, window), nats in zip(waiting, _nats(model, [(i, w) for _, i, w in waiting]), strict=True):
            n = window.stop - window.first + 1
            document.nats += nats
            document.tokens += n
            document.stretches.append((nats, n))
        waiting.clear()

    for ids, n_bytes in documents:
        document = Document(bytes=n_bytes)
        found = list(windows(len(ids) - 1, context, stride))
        open_documents.append((document, len(found)))
        for window in found:
            waiting.append((document, ids, window))
            if len(waiting) == batch_size:
                flush()
        while open_documents and len(open_documents[0][0].stretches) == open_documents[0][1]:
            yield open_documents.pop(0)[0]
    flush()
    yield from (document for document, _ in open_documents)


def _nats(model: GPT, rows: Sequence[tuple[list[int], Window]]) -> list[float]:
    """The summed loss of each window, accumulated in float64."""
    if not rows:
        return []
    device = model.token_embedding.weight.device
    width = max(window.stop - window.start for _, window in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    targets = torch.full((len(rows), width), IGNORED, dtype=torch.long)
    for row, (tokens, w) in enumerate(rows):  # padded at the right, which no token before it sees
        ids[row, : w.stop - w.start] = torch.tensor(tokens[w.start : w.stop])
        scored = torch.tensor(tokens[w.first : w.stop + 1])
        targets[row, w.first - w.start - 1 : w.stop - w.start] = scored
    asked = targets != IGNORED
    x = model.stream(ids.to(device))[asked.to(device)]  # [N, D]
    wanted = targets[asked].to(device)
    losses: list[Tensor] = []
    chunk = max(1, CHUNK_ELEMENTS // model.token_embedding.num_embeddings)
    for start in range(0, len(wanted), chunk):
        logits = model.read_out(x[start : start + chunk])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(logits, wanted[start : start + chunk], reduction="none").double().cpu())
    loss = torch.cat(losses)
    if not bool(loss.isfinite().all()):
        raise UserError("the model's losses are not numbers: its weights hold NaN or infinite values")
    counts = asked.sum(dim=1).tolist()
    return [math.fsum(part.tolist()) for part in loss.split(counts)]


# Sums and their intervals.


@dataclass(frozen=True)
class Interval:
    """A value with the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass
class Evaluation:
    """What all documents came to together.

    Attributes:
        resampled: what the intervals were drawn from, "documents" or "stretches of text"; None where there is only one
            of them, and the ends of the intervals are NaN.
    """

    documents: int
    tokens: int
    bytes: int | None
    loss: Interval
    perplexity: Interval
    bits_per_byte: Interval | None
    resampled: str | None


def summarise(documents: Sequence[Document], resamples: int = 1000, seed: int = 0) -> Evaluation:
    """Sums over documents, with percentile-bootstrap intervals (Efron, 1979): documents are drawn with replacement, and
    the ratio of the sums is taken each time. Of fewer than 30 documents, the windows' stretches are drawn instead.

    Raises:
        UserError: nothing was scored.
    """
    scored = [d for d in documents if d.tokens]
    tokens = sum(d.tokens for d in scored)
    if not tokens:
        raise UserError("there is nothing to score: every document is shorter than two tokens")
    nats = math.fsum(d.nats for d in scored)
    n_bytes = None if any(d.bytes is None for d in scored) else sum(d.bytes or 0 for d in scored)
    per_token = n_bytes / tokens if n_bytes else math.nan
    if len(scored) >= FEW:
        units = np.array([[d.nats, d.tokens, d.bytes or 0] for d in scored], dtype=np.float64)
    else:  # a stretch's bytes are not known; it gets its share
        units = np.array([[x, n, n * per_token] for d in scored for x, n in d.stretches], dtype=np.float64)
    sums = bootstrap(units, resamples, seed) if len(units) > 1 else np.full((1, 3), np.nan)
    loss = sums[:, 0] / sums[:, 1]
    bpb = None
    if n_bytes:
        with np.errstate(divide="ignore", invalid="ignore"):
            bpb = _interval(nats / math.log(2) / n_bytes, sums[:, 0] / math.log(2) / sums[:, 2])
    return Evaluation(
        len(scored),
        tokens,
        n_bytes,
        _interval(nats / tokens, loss),
        _interval(math.exp(min(nats / tokens, 700)), np.exp(np.minimum(loss, 700))),
        bpb,
        None if len(units) < 2 else "documents" if len(scored) >= FEW else "stretches of text",
    )


def bootstrap(units: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Sums over rows of units[U, K] drawn with replacement, [resamples, K]; Philox words, alike in every NumPy."""
    words = np.random.Philox(key=np.array([seed % 2**64, 0], dtype=np.uint64))
    sums = np.empty((resamples, units.shape[1]))
    for i in range(resamples):
        drawn = (words.random_raw(len(units)) >> np.uint64(11)).astype(np.float64) * (len(units) / 2.0**53)
        sums[i] = units[drawn.astype(np.int64)].sum(axis=0)
    return sums


def _interval(value: float, draws: np.ndarray) -> Interval:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def wilson(right: int, n: int) -> Interval:
    """A share with its 95 % interval (Wilson, 1927)."""
    if n == 0:
        return Interval(math.nan, math.nan, math.nan)
    z, p = 1.959963984540054, right / n
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 / (1 + z * z / n)
    return Interval(p, max(0.0, (centre - spread) * scale), min(1.0, (centre + spread) * scale))


# Texts as ids.


def texts_to_ids(texts: Iterable[str], tokenizer: Any, limit: int | None = None) -> Iterator[tuple[list[int], int]]:
    """(start token and ids, bytes) of each text. Without a start token the first token of a text is not scored, nor its
    bytes counted."""
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    for i, text in enumerate(texts):
        if limit is not None and i >= limit:
            return
        ids, n_bytes = tokenizer.encode(text), len(text.encode("utf-8"))
        if start is not None:
            yield [start, *ids], n_bytes
        else:
            yield ids, max(0, n_bytes - len(tokenizer.decode(ids[:1]).encode("utf-8")))


def unknown_tokens(documents: Iterable[list[int]], tokenizer: Any) -> int:
    """How many ids stand for what the tokenizer does not know: bits per byte are then too low."""
    unknown = getattr(tokenizer, "unk_id", None)
    return sum(ids.count(unknown) for ids in documents) if unknown is not None else 0


# Verb forms.

SLICES = ("tense", "person", "language", "regular", "verb")


@torch.inference_mode()
def slot_hits(model: GPT, slots: Sequence[Any], tokenizer: Any, batch_size: int = 64) -> list[bool | None]:
    """For each slot whether the model's most likely token is right at every token of the answer.

    None where the tokenizer does not split the text at the slot, or the text exceeds the context.

    Args:
        slots: `gptframe.data.verbs.Slot`: the words before a verb form, and those of the form.
    """
    rows: list[tuple[int, list[int], int]] = []
    start = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    for i, slot in enumerate(slots):
        before = tokenizer.encode(" ".join(slot.prompt))
        whole = tokenizer.encode(" ".join([*slot.prompt, *slot.answer]))
        if whole[: len(before)] == before and len(start) + len(whole) - 1 <= model.cfg.context_length and before:
            rows.append((i, [*start, *whole], len(start) + len(before)))
    hits: list[bool | None] = [None] * len(slots)
    device = model.token_embedding.weight.device
    for at in range(0, len(rows), batch_size):
        part = rows[at : at + batch_size]
        width = max(len(ids) for _, ids, _ in part)
        padded = torch.tensor([ids + [0] * (width - len(ids)) for _, ids, _ in part])
        best = model(padded[:, :-1].to(device)).argmax(-1).cpu()
        for row, (i, ids, first) in enumerate(part):
            hits[i] = best[row, first - 1 : len(ids) - 1].tolist() == ids[first:]
    return hits


def slices(slots: Sequence[Any], hits: Sequence[bool | None]) -> dict[str, dict[str, tuple[int, int]]]:
    """{"tense": {"past": (right, of)}, ...}, with "all" first; slots that could not be asked are left out."""
    found: dict[str, dict[str, tuple[int, int]]] = {"all": {}}
    for slot, hit in zip(slots, hits, strict=True):
        if hit is None:
            continue
        for key in ("all", *SLICES):
            name = "all" if key == "all" else str(getattr(slot, key))
            if key == "regular":
                name = "regular" if slot.regular else "irregular"
            right, n = found.setdefault(key, {}).get(name, (0, 0))
            found[key][name] = (right + bool(hit), n + 1)
    return found
