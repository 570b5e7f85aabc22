"""English prose that every Python installation holds: the language reference and the library's docstrings.

Both belong to CPython and are licensed under the PSF licence. The files are parsed, never imported. The text differs
from one Python to the next, so the corpus carries a fingerprint of what was found.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from gptframe.data.cache import atomic, default_cache_dir, fingerprint
from gptframe.data.documents import Corpus, check_fraction, check_split, take_split
from gptframe.errors import UserError
from gptframe.registry import register

# Tests, vendored wheels and grammar fixtures: not prose, and in part not parseable.
_SKIP = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "_bundled",
    "turtledemo",
    "pydoc_data",
    "lib-dynload",
}
_VERSION = 1


def topics(source: str) -> list[str]:
    """The texts of pydoc_data/topics.py, given its source: the values of the dictionary `topics`."""
    for node in ast.parse(source).body:
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if isinstance(node, ast.Assign) and "topics" in names and isinstance(node.value, ast.Dict):
            return [ast.literal_eval(value) for value in node.value.values]
    return []


def docstrings(source: str) -> str:
    """All docstrings of a module, in the order of the source, with an empty line between."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        tree = ast.parse(source)
    found = [
        (getattr(node, "lineno", 0), ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, nodes)
    ]
    return "\n\n".join(text.strip() for _, text in sorted(found, key=lambda pair: pair[0]) if text and text.strip())


def library_files(root: Path) -> list[Path]:
    """The modules of a standard library that may hold prose, in a fixed order."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIP and not name.startswith("."))
        found += [Path(folder, name) for name in sorted(files) if name.endswith(".py")]
    return found


def extract(root: Path) -> list[str]:
    """The documents of the standard library at `root`: one for each reference topic, one for each module."""
    found: list[str] = []
    reference = root / "pydoc_data" / "topics.py"
    if reference.is_file():
        found += topics(reference.read_text(encoding="utf-8"))
    for file in library_files(root):
        try:
            found.append(docstrings(file.read_text(encoding="utf-8")))
        except (SyntaxError, ValueError, OSError):  # a module in another encoding, or one that is not for this Python
            continue
    # A lone surrogate, written as an escape in a docstring, is no UTF-8 text.
    return [text.encode("utf-8", "replace").decode("utf-8").strip() + "\n" for text in found if text.strip()]


@register("corpus", "english")
class EnglishCorpus(Corpus):
    """Python's own reference prose and docstrings, about 2 MB.

    Args:
        val_fraction: one document in every 1 / val_fraction, evenly spaced, is for validation.
    """

    def __init__(self, val_fraction: float = 0.05) -> None:
        self.val_fraction = check_fraction(val_fraction)
        self.notes = []
        self._texts = _cached(Path(sysconfig.get_paths()["stdlib"]))
        if len(self._texts) * self.val_fraction < 1:
            raise UserError(
                f"data=english: this Python at {sysconfig.get_paths()['stdlib']} has {len(self._texts)} texts in its "
                "standard library, too few. Install it with sources, or use data=text data.path=my.txt"
            )

    def documents(self, split: str) -> Iterator[str]:
        return take_split(self._texts, check_split(split), self.val_fraction)

    def fingerprint(self) -> str:
        digest = hashlib.sha256("\0".join(self._texts).encode()).hexdigest()
        return f"english:{digest}:{self.val_fraction}"


def _cached(root: Path) -> list[str]:
    # Parsing 600 files takes seconds; the key is what a changed installation changes.
    listing = [[str(f.relative_to(root)), f.stat().st_size, f.stat().st_mtime_ns] for f in library_files(root)]
    reference = root / "pydoc_data" / "topics.py"
    listing.append([reference.stat().st_size, reference.stat().st_mtime_ns] if reference.is_file() else [])
    path = default_cache_dir() / "english" / f"{fingerprint(_VERSION, sys.version, listing)}.json"
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return texts
    except (OSError, ValueError):
        pass
    texts = extract(root)
    with atomic(path, "w") as handle:
        json.dump(texts, handle, ensure_ascii=False)
    return texts
