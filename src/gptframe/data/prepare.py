"""From the data and tokenizer sections of a config to token stores on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gptframe.data.cache import default_cache_dir, fingerprint
from gptframe.data.ngram import NgramBaseline, ngram_baseline
from gptframe.data.tokenizer import Source, Tokenizer, build_tokenizer, check_room, load, token_documents
from gptframe.data.tokens import TokenStore, open_or_write, token_dtype
from gptframe.errors import UserError
from gptframe.registry import build

FORMAT = 1  # of the token cache: raise it when the same corpus and tokenizer would give other files


@dataclass
class Prepared:
    """Everything that training needs to know about its data.

    tokenizer: None where the data is tokens already and none was chosen.
    vocab_size: what the model needs, if its config leaves it open: the tokenizer's size.
    notes: lines for the user.
    fingerprints: of "corpus" and "tokenizer", for the manifest.
    """

    train: TokenStore
    val: TokenStore
    tokenizer: Tokenizer | None
    corpus: Any
    vocab_size: int
    mask_documents: bool = False
    notes: list[str] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    baseline_order: int = 5
    baseline_tokens: int = 1_000_000

    def baseline(self) -> NgramBaseline | None:
        """The n-gram baseline on the same split; None where data.baseline_order=0 leaves it out."""
        if not self.baseline_order:
            return None
        return ngram_baseline(self.train, self.val, self.vocab_size, self.baseline_order, self.baseline_tokens)


def prepare(
    data: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    vocab_size: int | None,
    cache_dir: str | Path | None = None,
    seed: int = 0,
    *,
    context_length: int | None = None,
    tokenizer_dir: str | Path | None = None,
) -> Prepared:
    """Build the corpus and the tokenizer, and tokenize where the cache does not hold the result.

    Args:
        data: `{name: ..., options of the corpus}` with mask_documents, baseline_order, baseline_tokens beside them.
        tokenizer: `{name: ..., options}`.
        vocab_size: the model's; None takes the tokenizer's.
        cache_dir: default $GPTFRAME_CACHE, else ~/.cache/gptframe.
        seed: without effect on the tokens; which are in which batch depends on it (see `Batches`).
        context_length: the model's, to refuse data that does not fill one window.
        tokenizer_dir: a run's own tokenizer folder, used instead of building the section's.

    Raises:
        UserError: anything that is wrong with the input.
    """
    options = dict(data)
    mask = options.pop("mask_documents", False)
    order = options.pop("baseline_order", 5)
    baseline_tokens = options.pop("baseline_tokens", 1_000_000)
    if not isinstance(mask, bool):
        raise UserError(f"data.mask_documents={mask!r} must be true or false")
    for key, value, least in (("baseline_order", order, 0), ("baseline_tokens", baseline_tokens, 100)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"data.{key}={value!r} must be a whole number of at least {least}")
    place = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    notes: list[str] = []
    corpus = build("corpus", options, key="data")
    corpus_print = corpus.fingerprint()
    built: Tokenizer | None
    if tokenizer_dir is not None and Path(tokenizer_dir).is_dir():
        built = load(tokenizer_dir)
        check_room(built, vocab_size)
    else:
        built = build_tokenizer(dict(tokenizer), Source(corpus, vocab_size, place, notes))
    tokenizer_print = built.fingerprint() if built is not None else "none"
    if hasattr(corpus, "stores"):
        train, val = corpus.stores(place)
        size = _check_ids(train, val, built, vocab_size)
    else:
        if built is None:
            raise UserError("tokenizer=none needs data that is tokens already (data=bin): type tokenizer=byte or bpe")
        train = _tokenized(corpus, corpus_print, built, tokenizer_print, "train", place, notes)
        val = _tokenized(corpus, corpus_print, built, tokenizer_print, "val", place, notes)
        size = _check_ids(train, val, built, vocab_size)
    _check_lengths(train, val, context_length, data)
    notes += [note for note in getattr(corpus, "notes", []) if note not in notes]
    if mask and not train.has_documents:
        notes.append("data.mask_documents=true has no effect: the training data is one document")
    return Prepared(
        train, val, built, corpus, size, mask, notes,
        {"corpus": corpus_print, "tokenizer": tokenizer_print}, order, baseline_tokens,
    )  # fmt: skip


def _tokenized(
    corpus: Any,
    corpus_print: str,
    tokenizer: Tokenizer,
    tokenizer_print: str,
    split: str,
    place: Path,
    notes: list[str],
) -> TokenStore:
    dtype = token_dtype(tokenizer.vocab_size)
    key = fingerprint(FORMAT, corpus_print, tokenizer_print, split, dtype.str)
    info = {"corpus": corpus_print, "tokenizer": tokenizer_print, "split": split}
    store = open_or_write(
        place / "tokens" / f"{key}-{split}",
        lambda: token_documents(tokenizer, corpus.documents(split)),
        dtype,
        info,
        notes,
    )
    store.source = f"the {split} split of data.name={getattr(corpus, 'name', type(corpus).__name__)}"
    return store


def _check_ids(train: TokenStore, val: TokenStore, tokenizer: Tokenizer | None, vocab_size: int | None) -> int:
    """Refuse ids that the model or the tokenizer does not have; return the size of the vocabulary."""
    largest = max(train.max_token(), val.max_token())
    if vocab_size is None and tokenizer is None:
        raise UserError(
            f"model.vocab_size is not given and tokenizer=none has none: type model.vocab_size={largest + 1} "
            f"or more (the largest token id in the data is {largest})"
        )
    limits = [("model.vocab_size", vocab_size)] if vocab_size is not None else []
    if tokenizer is not None:
        limits.append((f"the size of tokenizer {tokenizer.name}", tokenizer.vocab_size))
    for what, limit in limits:
        for store in (train, val):
            if store.max_token() >= limit:
                position = int(np.argmax(store.tokens >= limit))
                fix = f"type model.vocab_size={largest + 1}, " if what.startswith("model") else "choose the tokenizer "
                fix += "or check data.dtype" if what.startswith("model") else "that made the file"
                raise UserError(
                    f"{store.source}: token id {int(store.tokens[position])} at position {position} is beyond "
                    f"{what}={limit} (the largest id is {largest}): {fix}"
                )
    return vocab_size if vocab_size is not None else limits[0][1]


def _check_lengths(train: TokenStore, val: TokenStore, context_length: int | None, data: Mapping[str, Any]) -> None:
    where = f"data.path={data['path']}" if data.get("path") else f"data.name={data.get('name')}"
    if context_length is not None and len(train) < context_length + 1:
        advice = (
            f"type model.context_length={len(train) - 1}, or give more text" if len(train) > 2 else "give more text"
        )
        raise UserError(
            f"{where} has {len(train)} tokens for training (val_fraction set aside), fewer than "
            f"model.context_length={context_length} and one more: {advice}"
        )
    if len(val) < 2:
        raise UserError(
            f"{where} has {len(val)} tokens for validation, at least 2 are needed: "
            "type a larger data.val_fraction, or give more text"
        )
