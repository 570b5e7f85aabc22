"""Text to token ids and back: closed, byte, char, bpe, hf_file, tiktoken, and none for data that is tokens already."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptframe.data.cache import atomic, default_cache_dir, fingerprint, lock, make_directory
from gptframe.data.hub import in_time
from gptframe.errors import UserError, nearest
from gptframe.registry import build, lookup, register

END_OF_TEXT = "<|endoftext|>"
_STATE_FILE = "gptframe.json"
_HF_FILE = "tokenizer.json"
_DOWNLOAD_SECONDS = 60.0


@dataclass
class Source:
    """What a tokenizer may learn from: the corpus, the room in the model's vocabulary, and where to keep results."""

    corpus: Any = None
    vocab_size: int | None = None
    cache_dir: Path = field(default_factory=default_cache_dir)
    notes: list[str] = field(default_factory=list)

    def documents(self, split: str = "train") -> Iterator[str]:
        return self.corpus.documents(split)


class Tokenizer:
    """The contract: `__init__(self, source: Source, **options)`, and what stands below.

    A document becomes [bos] + encode(text) + [eos], with the ids that are not None; where one id serves as both, as
    in GPT-2, it stands at the end. `encode` never makes a special id from text: text stays text.
    """

    name = ""
    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    splittable = True
    """Whether encode(a + b) == encode(a) + encode(b) where a ends with a line end and b begins with no space."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, none of them special, all below vocab_size.

        Raises:
            UserError: `text` holds half a surrogate pair, which is no character.
        """
        return self._encode(checked(text))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`. Special and reserved ids vanish, unless `skip_special` is False; unknown ids always do."""
        return self._decode([int(i) for i in ids if 0 <= int(i) < self.vocab_size], skip_special)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def fingerprint(self) -> str:
        """A text that changes whenever `encode` would."""
        return fingerprint(self.name, self._state())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything that `load` needs into `folder`."""
        place = make_directory(Path(folder))
        self._save_files(place)
        with atomic(place / _STATE_FILE, "w") as handle:
            json.dump({"name": self.name, "state": self._state()}, handle, ensure_ascii=False)

    # What a subclass brings:
    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        """Plain containers from which `_restore` makes the same tokenizer."""
        return {}

    @classmethod
    def _restore(cls, state: dict[str, Any], folder: Path) -> Tokenizer:
        return cls(Source(), **state)  # type: ignore[call-arg]

    def _save_files(self, folder: Path) -> None:
        pass


def checked(text: str) -> str:
    """Return `text` if it is Unicode text; UserError where it holds a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text holds the lone surrogate \\u{ord(text[error.start]):04x} at character {error.start}, "
            "which is no valid Unicode"
        ) from None
    return text


def load(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `save` wrote into `folder`.

    Raises:
        UserError: there is none.
    """
    place = Path(folder)
    try:
        saved = json.loads((place / _STATE_FILE).read_text(encoding="utf-8"))
        name, state = saved["name"], saved["state"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{place} holds no tokenizer (no readable {_STATE_FILE})") from None
    tokenizer = lookup("tokenizer", name)._restore(state, place)
    tokenizer.name = name
    return tokenizer


def build_tokenizer(section: dict[str, Any], source: Source) -> Tokenizer | None:
    """The tokenizer of a config section; None for `none`.

    Raises:
        UserError: it is larger than the model's vocabulary.
    """
    tokenizer = build("tokenizer", section, source, key="tokenizer")
    if isinstance(tokenizer, NoTokenizer):
        return None
    tokenizer.name = section["name"]
    check_room(tokenizer, source.vocab_size)
    return tokenizer


def check_room(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """UserError where the tokenizer has more entries than the model."""
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, more than model.vocab_size={vocab_size}: "
            f"type model.vocab_size={tokenizer.vocab_size}, or choose another tokenizer"
        )


@register("tokenizer", "none")
class NoTokenizer:
    """For data that is tokens already (data=bin): samples are shown as ids."""

    def __init__(self, source: Source) -> None:
        if source.corpus is not None and not hasattr(source.corpus, "stores"):
            raise UserError("tokenizer=none needs data that is tokens already (data=bin): type tokenizer=byte or bpe")


@register("tokenizer", "closed")
class ClosedTokenizer(Tokenizer):
    """The whole words of a corpus with a closed vocabulary; any other word becomes <unk>."""

    def __init__(self, source: Source, words: Sequence[str] | None = None) -> None:
        words = words if words is not None else getattr(source.corpus, "words", None)
        if not words:
            raise UserError("tokenizer=closed knows only the words of data=verbs: type tokenizer=byte, char or bpe")
        self.words = tuple(words)
        self._ids = {word: i for i, word in enumerate(self.words)}
        self.vocab_size = len(self.words)
        if len(self._ids) != len(self.words) or self.words[:4] != ("<pad>", "<bos>", "<eos>", "<unk>"):
            raise UserError("tokenizer.words must be different words after <pad>, <bos>, <eos>, <unk>")
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = 0, 1, 2, 3

    def _encode(self, text: str) -> list[int]:
        ids = []
        for chunk in text.split():
            # `work,` is a word and a comma; `<eos>` typed by a person is neither a word nor the special.
            parts = [chunk] if chunk in self._ids else re.findall(r"\w+|[^\w\s]", chunk)
            found = [self._ids.get(part, self.unk_id) for part in parts]
            ids += [i if i > 3 else self.unk_id for i in found]
        return ids

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        return " ".join(self.words[i] for i in ids if i > 2 or not skip_special)

    def _state(self) -> dict[str, Any]:
        return {"words": list(self.words)}


@register("tokenizer", "byte")
class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and the end of text as id 256."""

    vocab_size = 257
    bos_id = eos_id = 256

    def __init__(self, source: Source) -> None:
        pass

    def _encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        end = b"" if skip_special else END_OF_TEXT.encode()
        return b"".join(bytes([i]) if i < 256 else end for i in ids).decode("utf-8", "replace")


@register("tokenizer", "char")
class CharTokenizer(Tokenizer):
    """The characters of the corpus, both splits, after the end of text (0) and the unknown character (1)."""

    bos_id = eos_id = 0
    unk_id = 1

    def __init__(self, source: Source, characters: str | None = None) -> None:
        if characters is None:
            found: set[str] = set()
            for split in ("train", "val"):
                for text in source.documents(split):
                    found.update(text)
            characters = "".join(sorted(found))
        self.characters = characters
        self._ids = {character: i + 2 for i, character in enumerate(characters)}
        self.vocab_size = len(characters) + 2

    def _encode(self, text: str) -> list[int]:
        get, unknown = self._ids.get, self.unk_id
        return [get(character, unknown) for character in text]

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        special = ("", "\ufffd") if skip_special else (END_OF_TEXT, "\ufffd")
        return "".join(self.characters[i - 2] if i > 1 else special[i] for i in ids)

    def _state(self) -> dict[str, Any]:
        return {"characters": self.characters}


class _HuggingFace(Tokenizer):
    """A tokenizer of the Hugging Face `tokenizers` library."""

    def _adopt(self, inner: Any, bos: str | None, eos: str | None, pad: str | None = None) -> None:
        self._inner = inner
        inner.encode_special_tokens = True  # the text "<|endoftext|>" is text, not the end of one
        inner.no_truncation()
        inner.no_padding()
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._names = {"bos": bos, "eos": eos, "pad": pad}
        self.bos_id, self.eos_id, self.pad_id = (inner.token_to_id(t) if t else None for t in (bos, eos, pad))

    def _encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._inner.encode_batch([checked(t) for t in texts], add_special_tokens=False)]

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        return self._inner.decode(ids, skip_special_tokens=skip_special)

    def _state(self) -> dict[str, Any]:
        return self._names

    def fingerprint(self) -> str:
        return fingerprint(self.name, self._names, self._inner.to_str())

    def _save_files(self, folder: Path) -> None:
        with atomic(folder / _HF_FILE, "w") as handle:
            handle.write(self._inner.to_str())

    @classmethod
    def _restore(cls, state: dict[str, Any], folder: Path) -> Tokenizer:
        tokenizer = cls.__new__(cls)
        tokenizer._adopt(_hf_from_file(folder / _HF_FILE), **state)
        return tokenizer


def _hf_from_file(path: Path) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the tokenizer {path}: {getattr(error, 'strerror', None) or error}") from None
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer.json of the tokenizers library: {error}") from None


@register("tokenizer", "bpe")
class BPETokenizer(_HuggingFace):
    """Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019), trained on the training split to exactly the
    model's vocabulary: the end of text, 256 bytes, and merges. Reserved entries fill up where the text has too few.

    Args:
        min_frequency: how often a pair must occur to be merged.
    """

    def __init__(self, source: Source, min_frequency: int = 1) -> None:
        import tokenizers

        size = source.vocab_size
        if size is None:
            raise UserError(
                "tokenizer=bpe is trained to the size of the model's vocabulary: type model.vocab_size=1024"
            )
        if size < 257:
            raise UserError(
                f"tokenizer=bpe needs at least 257 entries (256 bytes and the end of text), model.vocab_size="
                f"{size}: type model.vocab_size=1024"
            )
        if isinstance(min_frequency, bool) or not isinstance(min_frequency, int) or min_frequency < 1:
            raise UserError(f"tokenizer.min_frequency={min_frequency!r} must be a whole number of at least 1")
        if hasattr(source.corpus, "stores"):
            next(iter(source.documents("train")))  # raises: there is no text to train on
        key = fingerprint(1, tokenizers.__version__, source.corpus.fingerprint(), size, min_frequency)
        path = source.cache_dir / "tokenizers" / f"bpe-{key}.json"
        inner = self._cached(path, size)
        if inner is None:
            with lock(path):
                inner = self._cached(path, size)
                if inner is None:
                    inner = train_bpe(source.documents("train"), size, min_frequency)
                    with atomic(path, "w") as handle:
                        handle.write(inner.to_str())
        self._adopt(inner, END_OF_TEXT, END_OF_TEXT)
        reserved = sum(token.startswith("<|reserved_") for token in inner.get_vocab())
        if reserved:
            source.notes.append(
                f"tokenizer: the text yields {size - reserved} of {size} entries; "
                f"{reserved} reserved entries fill it up"
            )

    @staticmethod
    def _cached(path: Path, size: int) -> Any | None:
        if not path.exists():
            return None
        try:
            inner = _hf_from_file(path)
        except UserError:
            return None
        return inner if inner.get_vocab_size() == size else None


def _bounded(text: str, longest: int = 1000) -> Iterator[str]:
    """`text` in parts without a word or a run of spaces above `longest`: the trainer is quadratic in those."""
    start = 0
    for found in re.finditer(rf"\S{{{longest}}}|\s{{{longest}}}", text):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int, min_frequency: int) -> Any:
    """A byte-level BPE with exactly `vocab_size` entries; id 0 is the end of text, 1 to 256 the bytes."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((part for text in texts for part in _bounded(checked(text))), trainer)
    missing = vocab_size - inner.get_vocab_size()
    if missing > 0:
        inner.add_special_tokens([f"<|reserved_{i}|>" for i in range(missing)])
    return inner


@register("tokenizer", "hf_file")
class HuggingFaceFile(_HuggingFace):
    """A tokenizer.json of the Hugging Face tokenizers library.

    Args:
        path: the file, or a folder that holds tokenizer.json.
        eos: the token that ends a document; null takes the file's <|endoftext|>, </s>, <eos>, ... where it has one.
        bos: the token that begins a document; null takes the file's <s>, <bos>, ... where it has one.
    """

    splittable = False  # a normalizer may treat the start of a text apart, as SentencePiece's prefix space does
    _EOS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "[SEP]")
    _BOS = ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]")

    def __init__(self, source: Source, path: str | None = None, eos: str | None = None, bos: str | None = None) -> None:
        if not path:
            raise UserError(
                "tokenizer.path is missing: name a tokenizer.json, for example tokenizer.path=tokenizer.json"
            )
        place = Path(path).expanduser()
        if place.is_dir():
            place = place / _HF_FILE
        if not place.is_file():
            raise UserError(f"tokenizer.path: there is no file {place}")
        inner = _hf_from_file(place)
        for key, token in (("eos", eos), ("bos", bos)):
            if token is not None and inner.token_to_id(token) is None:
                raise UserError(
                    f"tokenizer.{key}={token!r} is no token of {place}. {nearest(token, inner.get_vocab())}"
                )
        eos = eos or next((t for t in self._EOS if inner.token_to_id(t) is not None), None)
        bos = bos or next((t for t in self._BOS if inner.token_to_id(t) is not None), None)
        pad = next((t for t in ("<pad>", "[PAD]", "<|padding|>") if inner.token_to_id(t) is not None), None)
        self._adopt(inner, bos or eos, eos, pad)
        if eos is None:
            source.notes.append(
                f"tokenizer: {place} has no end-of-text token that is known; documents follow one "
                "another without a mark. Name it with tokenizer.eos=..."
            )


@register("tokenizer", "tiktoken")
class TiktokenTokenizer(Tokenizer):
    """An encoding of OpenAI's tiktoken. It is downloaded once, or read from TIKTOKEN_CACHE_DIR.

    Args:
        encoding: gpt2, r50k_base, p50k_base, cl100k_base, o200k_base.
    """

    _RANKS = "ranks.tiktoken"

    def __init__(self, source: Source, encoding: str = "gpt2") -> None:
        tiktoken = self._library()
        known = tiktoken.list_encoding_names()
        if encoding not in known:
            raise UserError(f"tokenizer.encoding={encoding!r}: {nearest(encoding, known)}Known: {', '.join(known)}")
        message = (
            f"tokenizer=tiktoken cannot get the encoding {encoding}: the download failed or did not end. "
            "Set TIKTOKEN_CACHE_DIR to a folder that holds it, or type tokenizer=bpe"
        )
        try:
            self._adopt(in_time(_DOWNLOAD_SECONDS, lambda: tiktoken.get_encoding(encoding), message))
        except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong hash is a ValueError
            raise UserError(f"{message} ({type(error).__name__})") from None

    @staticmethod
    def _library() -> Any:
        try:
            import tiktoken
        except ImportError:
            raise UserError("tokenizer=tiktoken needs the tiktoken library: pip install tiktoken") from None
        return tiktoken

    def _adopt(self, encoding: Any) -> None:
        self._inner = encoding
        self.vocab_size = encoding.n_vocab
        self.eos_id = self.bos_id = encoding._special_tokens.get(END_OF_TEXT)

    def _encode(self, text: str) -> list[int]:
        return self._inner.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._inner.encode_ordinary_batch([checked(t) for t in texts], num_threads=os.cpu_count() or 1)

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        special = set(self._inner._special_tokens.values()) if skip_special else set()
        return b"".join(self._bytes(i) for i in ids if i not in special).decode("utf-8", "replace")

    def _bytes(self, token: int) -> bytes:
        try:
            return self._inner.decode_single_token_bytes(token)
        except KeyError:  # some encodings leave gaps between their ids
            return b""

    def _state(self) -> dict[str, Any]:
        return {"encoding": self._inner.name, "pattern": self._inner._pat_str, "special": self._inner._special_tokens}

    def fingerprint(self) -> str:
        ranks = sorted((rank, token.hex()) for token, rank in self._inner._mergeable_ranks.items())
        return fingerprint(self.name, self._state(), ranks)

    def _save_files(self, folder: Path) -> None:
        # tiktoken's own format: base64 of the bytes, and the rank.
        with atomic(folder / self._RANKS) as handle:
            for token, rank in sorted(self._inner._mergeable_ranks.items(), key=lambda item: item[1]):
                handle.write(base64.b64encode(token) + b" " + str(rank).encode() + b"\n")

    @classmethod
    def _restore(cls, state: dict[str, Any], folder: Path) -> Tokenizer:
        try:
            lines = (folder / cls._RANKS).read_bytes().splitlines()
            ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the tokenizer in {folder}: {error}") from None
        tokenizer = cls.__new__(cls)
        tokenizer._adopt(
            cls._library().Encoding(
                state["encoding"], pat_str=state["pattern"], mergeable_ranks=ranks, special_tokens=state["special"]
            )
        )
        return tokenizer


def _pieces(text: str, size: int) -> Iterator[str]:
    """`text` in parts of about `size` characters, cut between a line end and something that is no space."""
    start = 0
    for found in re.finditer(r"\n(?=\S)", text) if len(text) > size else ():
        if found.end() - start >= size:
            yield text[start : found.end()]
            start = found.end()
    yield text[start:]


def token_documents(
    tokenizer: Tokenizer, texts: Iterable[str], piece: int = 1 << 20, batch: int = 1 << 22
) -> Iterator[list[list[int]]]:
    """The parts of each document as ids, with bos and eos; large documents are encoded piece by piece.

    Args:
        piece: characters that are encoded at a time, at the least, where the tokenizer is `splittable`.
        batch: characters that are handed to `encode_batch` at a time, about.
    """
    bos = [[tokenizer.bos_id]] if tokenizer.bos_id is not None and tokenizer.bos_id != tokenizer.eos_id else []
    eos = [[tokenizer.eos_id]] if tokenizer.eos_id is not None else []

    def encoded(group: list[list[str]]) -> Iterator[list[list[int]]]:
        ids = iter(tokenizer.encode_batch([part for parts in group for part in parts]))
        for parts in group:
            yield [*bos, *(next(ids) for _ in parts), *eos]

    group: list[list[str]] = []
    waiting = 0
    for text in texts:
        group.append(list(_pieces(text, piece)) if tokenizer.splittable else [text])
        waiting += len(text)
        if waiting >= batch:
            yield from encoded(group)
            group, waiting = [], 0
    yield from encoded(group)


__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "ClosedTokenizer",
    "HuggingFaceFile",
    "NoTokenizer",
    "Source",
    "TiktokenTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "check_room",
    "load",
    "token_documents",
    "train_bpe",
]
