"""Token files made elsewhere: nanoGPT's bare .bin, llm.c's .bin with a header, Megatron-LM's .bin and .idx."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gptframe.data.cache import atomic, fingerprint
from gptframe.data.documents import Corpus, check_fraction
from gptframe.data.text import find_files, path_list
from gptframe.data.tokens import DamagedStore, TokenStore, open_or_write
from gptframe.errors import UserError
from gptframe.registry import register

# llm.c, dev/data/data_common.py: 256 int32 of header (magic, version, number of tokens), then the tokens.
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
HEADER_BYTES = 256 * 4
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}


def read_tokens(path: Path, dtype: str = "auto") -> tuple[np.ndarray, bool, np.ndarray | None]:
    """Map one token file: (tokens, whether it has llm.c's header, document offsets of a Megatron pair).

    Args:
        dtype: of a file without a header: "uint16", "uint32", or "auto" for uint16.

    Raises:
        UserError: empty, truncated, an odd number of bytes, an unknown version, or dtype contradicts the header.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            start = handle.read(HEADER_BYTES)
    except OSError as error:
        raise UserError(f"data.path: cannot read {path}: {error.strerror}") from None
    if not size:
        raise UserError(f"data.path: {path} is empty")
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and index.is_file() and index.read_bytes()[:9] == b"MMIDIDX\x00\x00":
        try:
            store = TokenStore.open(path.with_suffix(""))
        except DamagedStore as error:
            raise UserError(f"data.path: {path}: {error}") from None
        return store.tokens, False, store.documents
    magic, version, count = (int(n) for n in np.frombuffer(start[:12].ljust(12, b"\0"), "<i4"))
    if magic in HEADERS:
        known, text = HEADERS[magic]
        if version != known or size < HEADER_BYTES:
            raise UserError(f"data.path: {path} has magic {magic} with version {version}; known is version {known}")
        if dtype != "auto" and _DTYPES[dtype] != text:
            raise UserError(
                f"data.dtype={dtype}: the header of {path} says {np.dtype(text).name}; leave out data.dtype"
            )
        expected = HEADER_BYTES + count * np.dtype(text).itemsize
        if count < 1 or size != expected:
            raise UserError(f"data.path: {path} has {size} bytes, its header promises {expected} ({count} tokens)")
        return np.memmap(path, text, "r", offset=HEADER_BYTES), True, None
    item = np.dtype(_DTYPES["uint16" if dtype == "auto" else dtype])
    if size % item.itemsize:
        raise UserError(
            f"data.path: {path} has {size} bytes, not a multiple of {item.itemsize} ({item.name}): truncated?"
        )
    tokens = np.memmap(path, item, "r")
    probe = tokens[: 1 << 16]
    if dtype == "auto" and len(probe) >= 64 and len(tokens) % 2 == 0 and probe[::2].any() and not probe[1::2].any():
        raise UserError(
            f"data.path: every second uint16 of {path} is 0, as in a uint32 file: type data.dtype=uint32 "
            "(or data.dtype=uint16 if it is right)"
        )
    return tokens, False, None


@register("corpus", "bin")
class BinCorpus(Corpus):
    """Tokens instead of text. One file is mapped where it lies; several are joined once in the cache, in sorted order.

    Args:
        path: a .bin file, a folder of them, a glob, or a list.
        val_path: the validation tokens; without it the last `val_fraction` of the tokens.
        val_fraction: see `val_path`; 0.01 where neither is given.
        dtype: "uint16" or "uint32" of files without a header; "auto" reads the header, or takes uint16.
        separator: the token between documents (50256 in GPT-2's files), for data.mask_documents. It ends a document,
            and starts one in files with llm.c's header. A Megatron pair has its own boundaries.
    """

    def __init__(
        self,
        path: str | Sequence[str] | None = None,
        val_path: str | Sequence[str] | None = None,
        val_fraction: float | None = None,
        dtype: str = "auto",
        separator: int | None = None,
    ) -> None:
        if not path_list(path):
            raise UserError("data.path is missing: name a token file, for example data.path=train.bin")
        if dtype not in ("auto", *_DTYPES):
            raise UserError(f"data.dtype={dtype!r} must be auto, uint16 or uint32")
        if val_path and val_fraction is not None:
            raise UserError("data.val_fraction has no effect beside data.val_path: leave one of them out")
        if separator is not None and (isinstance(separator, bool) or not isinstance(separator, int) or separator < 0):
            raise UserError(f"data.separator={separator!r} must be a token id")
        self.val_fraction = check_fraction(0.01 if val_fraction is None else val_fraction)
        self.dtype, self.separator, self.notes = dtype, separator, []
        self._train, self._val = self._files(path), self._files(val_path) if val_path else None
        for file in [*self._train, *(self._val or [])]:
            read_tokens(file, dtype)

    @staticmethod
    def _files(path: str | Sequence[str] | None) -> list[Path]:
        return list({f: None for p in path_list(path) for f in find_files(p, (".bin",), "token file")})

    def documents(self, split: str) -> Iterator[str]:
        raise UserError(
            "data=bin holds tokens, not text: a tokenizer cannot be trained on it. "
            "Type tokenizer=none, or the tokenizer that made the file: tokenizer=tiktoken, tokenizer=hf_file"
        )

    def fingerprint(self) -> str:
        listing = [_identity(file) for file in [*self._train, *(self._val or [])]]
        options = [len(self._train), None if self._val else self.val_fraction, self.dtype, self.separator]
        return f"bin:{fingerprint(listing, options)}"

    def stores(self, cache_dir: Path) -> tuple[TokenStore, TokenStore]:
        """The tokens for training and for validation."""
        train = self._store(self._train, cache_dir)
        if self._val is not None:
            return train, self._store(self._val, cache_dir)
        cut = max(0, len(train) - max(2, round(len(train) * self.val_fraction)))
        return train.slice(0, cut), train.slice(cut, len(train))

    def _store(self, files: list[Path], cache_dir: Path) -> TokenStore:
        tokens, header, documents = read_tokens(files[0], self.dtype)
        key = fingerprint([_identity(file) for file in files], self.dtype)
        if len(files) == 1:
            store = TokenStore(tokens, documents, source=str(files[0]))
        else:
            kinds = {read_tokens(file, self.dtype)[0].dtype for file in files}
            wide = any(kind.itemsize > 2 for kind in kinds)

            def shards() -> Iterator[Iterator[np.ndarray]]:
                for file in files:
                    shard = read_tokens(file, self.dtype)[0]
                    yield (shard[i : i + (1 << 24)] for i in range(0, len(shard), 1 << 24))

            store = open_or_write(
                cache_dir / "tokens" / f"joined-{key}",
                shards,
                np.dtype("<i4" if wide else "<u2"),
                {"source": [str(file) for file in files]},
                self.notes,
            )
        if self.separator is not None and documents is None:
            store.documents = _boundaries(store, self.separator, starts=header)
        # The largest id needs a pass over the file; it is remembered under the file's identity.
        memory = cache_dir / "tokens" / f"scan-{key}.json"
        try:
            store.info["max_token"] = int(json.loads(memory.read_text())["max_token"])
        except (OSError, ValueError, KeyError, TypeError):
            with atomic(memory, "w") as handle:
                json.dump({"max_token": store.max_token()}, handle)
        return store


def _identity(file: Path) -> list:
    stat = file.stat()
    with open(file, "rb") as handle:
        start = hashlib.sha256(handle.read(1 << 16)).hexdigest()
    return [os.path.realpath(file), stat.st_size, stat.st_mtime_ns, start]


def _boundaries(store: TokenStore, separator: int, *, starts: bool) -> np.ndarray:
    step = 1 << 24
    found = [np.flatnonzero(store.tokens[i : i + step] == separator) + i for i in range(0, len(store), step)]
    inner = np.concatenate(found).astype(np.int64) + (0 if starts else 1)
    return np.unique(np.concatenate(([0], inner, [len(store)]))).astype(np.int64)
