"""A tokenizer of given segments with longest match: ANDREA's morphemes, bytes for all else, and a start of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptframe.data.tokenizer import Source, Tokenizer
from gptframe.errors import UserError
from gptframe.registry import register


@register("tokenizer", "segments")
class SegmentsTokenizer(Tokenizer):
    """Ids are the segments in the order of the file, then the 256 bytes, then the token that begins a text.

    From the left, the longest segment that fits is taken; where none does, one byte of UTF-8. How ANDREA encodes is not
    published: this is the rule that its lessons describe, and the order of the three parts is assumed.

    Args:
        path: a UTF-8 file with a segment a line (spaces count), or a .json file with a list of them.
    """

    def __init__(self, source: Source, path: str | None = None, segments: Sequence[str] | None = None) -> None:
        if segments is None:
            if not path:
                raise UserError("tokenizer.path is missing: name a file with a segment a line")
            segments = _read(Path(path).expanduser())
        self.segments = tuple(segments)
        twice = len(set(self.segments)) < len(self.segments)
        if twice or not all(isinstance(s, str) and s for s in self.segments):
            raise UserError(f"tokenizer.path={path}: the segments must be different, and none of them empty")
        self._ids = {segment.encode("utf-8"): i for i, segment in enumerate(self.segments)}
        self._longest = max(map(len, self._ids), default=1)
        self._bytes = len(self.segments)
        self.bos_id = self._bytes + 256
        self.vocab_size = self._bytes + 257

    def _encode(self, text: str) -> list[int]:
        data, ids, start = text.encode("utf-8"), list[int](), 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                found = self._ids.get(data[start:end])
                if found is not None:
                    ids.append(found)
                    start = end
                    break
            else:
                ids.append(self._bytes + data[start])
                start += 1
        return ids

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        parts = []
        for i in ids:
            if i < self._bytes:
                parts.append(self.segments[i].encode("utf-8"))
            elif i < self._bytes + 256:
                parts.append(bytes([i - self._bytes]))
            elif not skip_special:
                parts.append(b"<bos>")
        return b"".join(parts).decode("utf-8", "replace")

    def _state(self) -> dict[str, Any]:
        return {"segments": list(self.segments)}


def _read(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"tokenizer.path={file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"tokenizer.path={file} is not UTF-8 (byte {error.start})") from None
    if file.suffix == ".json":
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UserError(f"tokenizer.path={file} is not JSON: {error}") from None
        if not isinstance(found, list):
            raise UserError(f"tokenizer.path={file} holds no list of segments")
        return found
    return [line for line in text.split("\n") if line]
