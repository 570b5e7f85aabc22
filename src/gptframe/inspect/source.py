"""The model, the tokenizer and the tokens that a command looks at: from overrides, or from a run directory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptframe.config import Config, ModelConfig
from gptframe.data.tokenizer import Source as TokenizerSource
from gptframe.data.tokenizer import Tokenizer, build_tokenizer, load
from gptframe.errors import UserError, nearest
from gptframe.inspect.machine import available_memory
from gptframe.inspect.show import size
from gptframe.model import GPT, build_model
from gptframe.registry import build

COMMON_DATA_KEYS = ("mask_documents", "baseline_order", "baseline_tokens")  # of every corpus; `prepare` reads them


@dataclass(frozen=True)
class Source:
    """What a command looks at: a config, and the run directory it is of, if any."""

    config: Config
    run: Path | None = None


def tokenizer_of(source: Source) -> Tokenizer | None:
    """The run's own tokenizer, else what the config's sections build; None for data without text."""
    folder = source.run / "tokenizer" if source.run else None
    if folder is not None and folder.is_dir():
        return load(folder)
    config = source.config
    corpus = build("corpus", {k: v for k, v in config.data.items() if k not in COMMON_DATA_KEYS}, key="data")
    return build_tokenizer(dict(config.tokenizer), TokenizerSource(corpus, config.model.vocab_size))


def with_vocabulary(source: Source) -> Config:
    """The config with `model.vocab_size` taken from the tokenizer where it is null.

    Raises:
        UserError: there is no tokenizer to take it from.
    """
    config = source.config
    if config.model.vocab_size is not None:
        return config
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        raise UserError("model.vocab_size is null and there is no tokenizer to take it from: give model.vocab_size=...")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size))


def model_of(source: Source) -> tuple[GPT, str]:
    """The model in evaluation mode, and where its weights are from: a run's newest checkpoint or the initialisation.

    Raises:
        UserError: the run has no whole checkpoint.
    """
    if source.run is not None:
        from gptframe.training.checkpoint import load_run

        model, _ = load_run(source.run)
        return model.eval(), f"run {source.run}"
    config = with_vocabulary(source)
    check_room(config.model)
    return build_model(config.model, config.seed).eval(), f"initialised from seed {config.seed}, not trained"


def check_room(cfg: ModelConfig) -> None:
    """Refuse to build on the CPU what its memory cannot hold.

    Raises:
        UserError: how much is needed and how much there is.
    """
    n, free = sum(p.numel() for p in build_model(cfg, device="meta").parameters()), available_memory()
    if free is not None and 4 * n > 0.9 * free:
        raise UserError(f"{cfg.name}: {n:,} parameters need {size(4 * n)}, and {size(free)} are available")


def tokens_of_text(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """The ids of `text`.

    Raises:
        UserError: there is no tokenizer, no text, or a word that the vocabulary lacks.
    """
    if tokenizer is None:
        raise UserError("--text needs a tokenizer, and tokenizer=none has none: give --ids")
    if not text.strip():
        raise UserError("--text is empty: give a few words, or --ids")
    ids = tokenizer.encode(text)
    unknown = getattr(tokenizer, "unk_id", None)
    if unknown is not None and unknown in ids:
        pieces = text.split() if getattr(tokenizer, "words", None) else list(dict.fromkeys(text))
        missing = list(dict.fromkeys(p for p in pieces if unknown in tokenizer.encode(p)))
        known = [word for word in getattr(tokenizer, "words", None) or [] if word.isalpha()]
        hint = nearest(missing[0].strip(".,;:!?"), known) if missing else ""
        words = ", ".join(map(repr, missing)) + (" are" if len(missing) > 1 else " is")
        some = f"It knows {', '.join(known[:8])} and {len(known) - 8} more" if len(known) > 8 else ""
        raise UserError(f"--text: {words} not in the vocabulary of tokenizer={tokenizer.name}. {hint}{some}".rstrip())
    return ids


def tokens_of_ids(text: str) -> list[int]:
    """Ids separated by commas or spaces.

    Raises:
        UserError: something else, or nothing.
    """
    pieces = text.replace(",", " ").strip("[]() ").split()
    try:
        ids = [int(piece) for piece in pieces]
    except ValueError:
        wrong = next(p for p in pieces if not p.lstrip("+-").isdecimal())
        raise UserError(f"--ids: {wrong!r} is not a whole number; give ids as in --ids 5,6,7") from None
    if not ids:
        raise UserError("--ids is empty: give ids as in --ids 5,6,7")
    return ids


def check_tokens(ids: list[int], cfg: Any) -> None:
    """Refuse ids that the model has no row for, and more of them than its context.

    Raises:
        UserError: which, and the bound.
    """
    for index, token in enumerate(ids):
        if not 0 <= token < cfg.vocab_size:
            raise UserError(f"token {index} has id {token}, and the vocabulary has ids 0 to {cfg.vocab_size - 1}")
    if len(ids) > cfg.context_length:
        raise UserError(
            f"{len(ids)} tokens do not fit the context of {cfg.context_length}: "
            f"shorten the text, or set model.context_length={len(ids)}"
        )


def token_labels(tokenizer: Tokenizer | None, ids: list[int]) -> list[str]:
    """What each token stands for: its text, or its id where it has none."""
    labels = []
    for token in ids:
        text = tokenizer.decode([token], skip_special=False) if tokenizer is not None else ""
        labels.append(
            text if text.strip() and "\ufffd" not in text else repr(text)[1:-1] if text.isspace() else f"#{token}"
        )
    return labels
