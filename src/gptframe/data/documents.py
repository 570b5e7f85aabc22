"""What a corpus is, and how one text becomes a training and a validation part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from gptframe.errors import UserError

T = TypeVar("T")
SPLITS = ("train", "val")


class Corpus:
    """The contract of a corpus. A plugin may subclass this or bring the same methods.

    The class is constructed with the options of the `data` section; wrong input raises UserError, in the constructor
    where it can be known. `words` is the closed vocabulary where there is one. `notes` are lines for the user.
    """

    words: tuple[str, ...] | None = None
    notes: list[str]

    def documents(self, split: str) -> Iterator[str]:
        """The documents of "train" or "val", the same ones in the same order at each call."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A text that changes whenever `documents` would."""
        raise NotImplementedError


def check_fraction(value: float, key: str = "data.val_fraction") -> float:
    """Return `value` if it is a number between 0 and 1, neither included; UserError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise UserError(f"{key}={value!r} must be between 0 and 1, for example {key}=0.1")
    return float(value)


def cut_tail(text: str, fraction: float) -> tuple[str, str]:
    """Split one text: its last `fraction`, counted in characters, is for validation.

    The cut moves forward to the next line end, or else to the next space, where one stands in the first half of the
    tail; so that no line or word is torn in two unless the text has none.
    """
    cut = min(max(len(text) - round(len(text) * fraction), 0), len(text))
    limit = cut + (len(text) - cut) // 2
    for mark in ("\n", " "):
        found = text.find(mark, max(cut - 1, 0), limit)
        if found >= 0:
            return text[: found + 1], text[found + 1 :]
    return text[:cut], text[cut:]


def is_val(index: int, fraction: float) -> bool:
    """Whether document `index` is for validation: one in every 1 / fraction, evenly spaced, never the first."""
    return int((index + 1) * fraction) > int(index * fraction)


def take_split(documents: Iterable[T], split: str, fraction: float) -> Iterator[T]:
    """The documents of one split by `is_val`."""
    for index, document in enumerate(documents):
        if is_val(index, fraction) == (split == "val"):
            yield document


def check_split(split: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is neither 'train' nor 'val'")
    return split
