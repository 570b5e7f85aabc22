"""Tokens at rest: Megatron-LM's .bin + .idx pair, written once, then memory-mapped.

The .bin is the bare tokens, little-endian (a nanoGPT token file); the .idx is Megatron-LM's MMapIndexedDataset index:

    9 bytes  "MMIDIDX\\0\\0" | uint64 version 1 | uint8 dtype code | uint64 sequences | uint64 documents + 1
    int32 length of each sequence | int64 byte offset of each sequence | int64 first sequence of each document, and end

A sequence here is a document, or a part of one that is longer than an int32 counts. Beside them lies a .json with a
checksum, which tells a damaged store from a sound one.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gptframe.data.cache import atomic, lock, remove_leftovers
from gptframe.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
# Megatron-LM's dtype codes. It has no uint32: ids above 65535 are stored as int32, the same bytes.
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(text): code for code, text in DTYPES.items()}
_MAX_SEQUENCE = 2**31 - 1
_CHECK_BLOCK = 1 << 20
_CHECK_BLOCKS = 256


class DamagedStore(Exception):
    """The files at a prefix are not a whole token store."""


class TokenStore:
    """A read-only sequence of tokens with document boundaries.

    tokens: one-dimensional integer array, usually a memory map.
    documents: int64 offsets into tokens, [n_documents + 1]; document i is tokens[documents[i]:documents[i + 1]].
    """

    def __init__(self, tokens: np.ndarray, documents: np.ndarray | None = None, *, source: str = "tokens") -> None:
        # A plain view: indexing an np.memmap goes through its slow __array_finalize__.
        self.tokens = np.asarray(tokens).view(np.ndarray)
        self.documents = np.array([0, len(tokens)], dtype=np.int64) if documents is None else documents
        self.source = source
        self.info: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def has_documents(self) -> bool:
        """Whether there is a boundary inside the store."""
        return len(self.documents) > 2

    def window(self, start: int, length: int) -> np.ndarray:
        """tokens[start : start + length] as int64, shorter at the end of the store."""
        if start < 0 or length < 0:
            raise IndexError(f"window({start}, {length})")
        return self.tokens[start : start + length].astype(np.int64)

    def max_token(self) -> int:
        """The largest id, or -1 in an empty store; read once."""
        if "max_token" not in self.info:
            step = 1 << 24
            parts = (self.tokens[i : i + step] for i in range(0, len(self), step))
            self.info["max_token"] = max((int(part.max()) for part in parts), default=-1)
        return self.info["max_token"]

    def slice(self, start: int, stop: int) -> TokenStore:
        """Tokens start..stop as a store; no copy. A document cut by an end keeps the part inside."""
        inside = self.documents[(self.documents > start) & (self.documents < stop)]
        documents = np.concatenate(([start], inside, [stop])).astype(np.int64) - start
        return TokenStore(self.tokens[start:stop], documents, source=self.source)

    @classmethod
    def open(cls, prefix: str | os.PathLike[str], *, check: bool = True) -> TokenStore:
        """Map `<prefix>.bin` and `<prefix>.idx`.

        Args:
            check: compare the checksum in `<prefix>.json`, where there is one.

        Raises:
            DamagedStore: a file is missing, truncated or changed.
        """
        prefix = os.fspath(prefix)
        try:
            with open(prefix + ".idx", "rb") as handle:
                header = handle.read(34)
                if len(header) < 34 or header[:9] != MAGIC:
                    raise DamagedStore(f"{prefix}.idx is not a Megatron index")
                version, code, sequences, ends = struct.unpack("<QBQQ", header[9:])
                if version != 1 or code not in DTYPES:
                    raise DamagedStore(f"{prefix}.idx has version {version} and dtype code {code}")
                expected = 34 + sequences * 12 + ends * 8
                # Megatron's multimodal sets append one more byte for each sequence.
                if os.fstat(handle.fileno()).st_size not in (expected, expected + sequences) or ends < 1:
                    raise DamagedStore(f"{prefix}.idx is truncated")
                body = handle.read(expected - 34)
            size = os.path.getsize(prefix + ".bin")
        except OSError as error:
            raise DamagedStore(f"{error.filename}: {error.strerror}") from None
        lengths = np.frombuffer(body, "<i4", sequences).astype(np.int64)
        pointers = np.frombuffer(body, "<i8", sequences, sequences * 4)
        firsts = np.frombuffer(body, "<i8", ends, sequences * 12)
        dtype = np.dtype(DTYPES[code])
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        if (
            (lengths < 0).any()
            or not np.array_equal(pointers, offsets[:-1] * dtype.itemsize)
            or size != offsets[-1] * dtype.itemsize
        ):
            raise DamagedStore(f"{prefix}.bin has {size} bytes, its index counts {offsets[-1] * dtype.itemsize}")
        if firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
            raise DamagedStore(f"{prefix}.idx has document boundaries out of order")
        tokens = np.memmap(prefix + ".bin", dtype, "r") if size else np.zeros(0, dtype)
        store = cls(tokens, offsets[firsts], source=prefix + ".bin")
        if os.path.exists(prefix + ".json"):
            try:
                with open(prefix + ".json", encoding="utf-8") as handle:
                    store.info = json.load(handle)
            except (OSError, ValueError):
                raise DamagedStore(f"{prefix}.json cannot be read") from None
            if check and store.info.get("checksum") != checksum(store.tokens):
                raise DamagedStore(f"{prefix}.bin does not have the checksum of {prefix}.json")
        return store


def checksum(tokens: np.ndarray) -> int:
    """CRC-32 over the bytes: all of them up to 256 MiB, else 256 evenly spaced blocks of 1 MiB."""
    data = np.ascontiguousarray(tokens).view(np.uint8)
    if data.nbytes <= _CHECK_BLOCK * _CHECK_BLOCKS:
        return zlib.crc32(data.data)
    value = data.nbytes & 0xFFFFFFFF
    for start in np.linspace(0, data.nbytes - _CHECK_BLOCK, _CHECK_BLOCKS).astype(np.int64):
        value = zlib.crc32(data[start : start + _CHECK_BLOCK].data, value)
    return value


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else int32 (nanoGPT's uint32 for ids below 2**31)."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<i4")


def write_store(
    prefix: Path, documents: Iterable[Iterable[np.ndarray | list[int]]], dtype: np.dtype, info: dict[str, Any]
) -> None:
    """Write a store; each document is given as consecutive parts.

    Every file is written under a temporary name and renamed, .bin first and .idx last: a store exists once its .idx
    does. A writer that is killed leaves temporary files, which the next writer removes.
    """
    lengths: list[int] = []
    firsts = [0]
    largest = -1
    for suffix in (".idx", ".json"):  # from here to the last rename there is no store
        Path(f"{prefix}{suffix}").unlink(missing_ok=True)
    with atomic(Path(f"{prefix}.bin")) as handle:
        for parts in documents:
            length = 0
            for part in parts:
                ids = np.asarray(part)
                if len(ids):
                    largest = max(largest, int(ids.max()))
                    handle.write(ids.astype(dtype).tobytes())
                    length += len(ids)
            while length > _MAX_SEQUENCE:
                lengths.append(_MAX_SEQUENCE)
                length -= _MAX_SEQUENCE
            lengths.append(length)
            firsts.append(len(lengths))
    sizes = np.array(lengths, dtype=np.int64)
    total = int(sizes.sum())
    mapped = np.memmap(f"{prefix}.bin", dtype, "r") if total else np.zeros(0, dtype)
    meta = {**info, "tokens": total, "documents": len(firsts) - 1, "max_token": largest, "checksum": checksum(mapped)}
    with atomic(Path(f"{prefix}.json"), "w") as handle:
        json.dump(meta, handle, indent=1)
    with atomic(Path(f"{prefix}.idx")) as handle:
        handle.write(MAGIC + struct.pack("<QBQQ", 1, _CODES[dtype], len(sizes), len(firsts)))
        handle.write(sizes.astype("<i4").tobytes())
        handle.write(((np.cumsum(sizes) - sizes) * dtype.itemsize).astype("<i8").tobytes())
        handle.write(np.array(firsts, dtype="<i8").tobytes())


def open_or_write(
    prefix: Path, documents: Any, dtype: np.dtype, info: dict[str, Any], notes: list[str] | None = None
) -> TokenStore:
    """Open the store at `prefix`; where it is missing or damaged, write it from `documents()` and open it.

    Processes that start together wait for one writer. A damaged store is rebuilt, with a line in `notes`.
    """
    try:
        return TokenStore.open(prefix)
    except DamagedStore:
        pass
    with lock(prefix):
        try:
            return TokenStore.open(prefix)  # another process wrote it while this one waited
        except DamagedStore as error:
            if os.path.exists(f"{prefix}.idx") and notes is not None:
                notes.append(f"rebuilding the token cache: {error}")
        for suffix in (".bin", ".json", ".idx"):
            remove_leftovers(Path(f"{prefix}{suffix}"))
        write_store(prefix, documents(), dtype, info)
        try:
            return TokenStore.open(prefix)
        except DamagedStore as error:
            raise UserError(f"the token cache does not hold what was written: {error}. Is the disk sound?") from None
