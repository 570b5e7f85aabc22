"""The user's own text: a UTF-8 file, a folder, a glob, or a list of them."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptframe.data.documents import Corpus, check_fraction, check_split, cut_tail
from gptframe.errors import UserError
from gptframe.registry import register

SUFFIXES = (".txt", ".md", ".rst", ".text")


def find_files(path: str, suffixes: Sequence[str] | None, what: str) -> list[Path]:
    """The files that `path` names: itself, those in its folder, or the matches of its pattern; sorted.

    A name that exists is taken literally, even where it holds `*` or `[`. In a folder, hidden files and folders are
    skipped and links to folders are not followed; a file reached twice is taken once.

    Raises:
        UserError: nothing is there.
    """
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            found = [file for file in _walk(place) if suffixes is None or file.suffix.lower() in suffixes]
            if not found:
                endings = f" with the ending {', '.join(suffixes)}" if suffixes else ""
                raise UserError(
                    f"data.path: the folder {path} holds no {what}{endings}. "
                    f"Name other files with a pattern: 'data.path=\"{path.rstrip('/')}/**/*.py\"'"
                )
        elif place.exists():
            if not place.is_file():
                raise UserError(f"data.path: {path} is neither a file nor a folder")
            found = [place]
        elif any(mark in path for mark in "*?["):
            found = _matches(place)
            if not found:
                raise UserError(f"data.path: no file matches {path}")
        else:
            raise UserError(
                f"data.path: there is no {path} (looked in {Path.cwd()})"
                if not place.is_absolute()
                else f"data.path: there is no {path}"
            )
    except (OSError, ValueError) as error:  # a name that is too long, holds NUL, or leads through a closed folder
        raise UserError(f"data.path: {path!r}: {getattr(error, 'strerror', None) or error}") from None
    once = {os.path.realpath(file): file for file in reversed(found)}
    return sorted(once.values())


def path_list(path: object) -> list[str]:
    """One path or several, as texts: a folder named 2024 arrives from the command line as a number."""
    several = path if isinstance(path, (list, tuple)) else [] if path is None else [path]
    return [str(p) for p in several if str(p)]


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            file = Path(root, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _matches(pattern: Path) -> list[Path]:
    # pathlib's ** does not follow links to folders, so that a loop of links ends; glob.glob's does.
    parts = pattern.parts[1:] if pattern.anchor else pattern.parts
    if parts[-1] == "**":  # before Python 3.13 a final ** names folders only
        parts = (*parts, "*")
    root = Path(pattern.anchor) if pattern.anchor else Path()
    return [file for file in root.glob(os.path.join(*parts)) if file.is_file()]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark and with \\n as line end.

    Raises:
        UserError: not readable, not UTF-8 (with the byte offset), or binary (it holds NUL).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"data.path: cannot read {path}: {error.strerror}") from None
    bom = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    try:
        text = data[bom:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = bom + error.start
        utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        source = "UTF-16" if utf16 else "latin-1"
        raise UserError(
            f"data.path: {path} is not UTF-8: byte 0x{data[offset]:02x} at offset {offset}. "
            f"Convert it: iconv -f {source} -t utf-8 {path.name} > converted.txt"
        ) from None
    nul = text.find("\0")
    if nul >= 0:
        offset = bom + len(text[:nul].encode())
        raise UserError(f"data.path: {path} is not text: NUL byte at offset {offset} (a binary or UTF-16 file?)")
    return text.replace("\r\n", "\n").replace("\r", "\n")


@register("corpus", "text")
class TextCorpus(Corpus):
    """The user's text. Each file is one document, and gives its last `val_fraction` to validation.

    Args:
        path: a file, a folder (files ending in .txt .md .rst .text), a glob, or a list of them.
        val_fraction: the share of each file, counted in characters, that is for validation.
    """

    def __init__(self, path: str | Sequence[str] | None = None, val_fraction: float = 0.1) -> None:
        paths = path_list(path)
        if not paths:
            raise UserError("data.path is missing: name your text, for example data.path=my.txt")
        self.val_fraction = check_fraction(val_fraction)
        self.path = ", ".join(paths)
        self.notes = []
        files = {file: None for p in paths for file in find_files(p, SUFFIXES, "text file")}
        self._files: list[Path] = []
        digest = hashlib.sha256()
        empty = []
        for file in files:
            text = read_text(file)
            if text.strip():
                self._files.append(file)
                data = text.encode("utf-8")
                digest.update(len(data).to_bytes(8, "little") + data)
            else:
                empty.append(file)
        if not self._files:
            raise UserError(f"data.path: {self.path} holds no text: {len(empty)} empty file{'s' * (len(empty) > 1)}")
        if empty:
            self.notes.append(f"data.path: skipped {len(empty)} empty files, the first of them {empty[0]}")
        self._digest = digest.hexdigest()

    def documents(self, split: str) -> Iterator[str]:
        check_split(split)
        for file in self._files:
            part = cut_tail(read_text(file), self.val_fraction)[split == "val"]
            if part.strip():
                yield part

    def fingerprint(self) -> str:
        return f"text:{self._digest}:{self.val_fraction}"
