"""Text from a Hugging Face dataset, by name or local path. The `datasets` library is optional."""

from __future__ import annotations

import itertools
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gptframe.data.cache import default_cache_dir, fingerprint
from gptframe.data.documents import Corpus, check_fraction, check_split, take_split
from gptframe.errors import UserError
from gptframe.registry import register

T = TypeVar("T")
_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}


def in_time(seconds: float, work: Callable[[], T], message: str) -> T:
    """`work()`, given up after some seconds: a library that waits for a network without end must not take us along.

    Raises:
        UserError: `message`, when the time is over. Whatever `work` raises is raised.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise UserError(message)
    return result[0]


def reachable(url: str, seconds: float = 5.0) -> bool:
    """Whether anything answers at `url` within some seconds; proxies of the environment are used."""

    def ask() -> bool:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError):
            return False
        return True

    try:
        return in_time(seconds + 1, ask, "")
    except UserError:
        return False


@register("corpus", "hf")
class HuggingFaceCorpus(Corpus):
    """A Hugging Face dataset. Each row is one document.

    Args:
        path: a name on the hub, a folder (`save_to_disk`, or data files), or a .json .jsonl .csv .parquet .txt file.
        config: the dataset's configuration (its "subset"), where it has several.
        split: the split to train on.
        val_split: the split to validate on; without it one row in every 1 / val_fraction.
        val_fraction: see `val_split`; 0.01 where neither is given.
        text_column: the column that holds the text.
        streaming: read rows as they are needed and keep no copy of the dataset; needs `max_documents` or patience.
        max_documents: stop after this many rows of a split.
        revision: the dataset's git revision on the hub.
    """

    def __init__(
        self,
        path: str | None = None,
        config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        val_fraction: float | None = None,
        text_column: str = "text",
        streaming: bool = False,
        max_documents: int | None = None,
        revision: str | None = None,
    ) -> None:
        if not path or not isinstance(path, str):
            raise UserError("data.path is missing: name a dataset, for example data.path=roneneldan/TinyStories")
        if val_split and val_fraction is not None:
            raise UserError("data.val_fraction has no effect beside data.val_split: leave one of them out")
        if max_documents is not None and (isinstance(max_documents, bool) or max_documents < 2):
            raise UserError(f"data.max_documents={max_documents} must be at least 2")
        self.path, self.config, self.revision = path, config, revision
        self.split, self.val_split, self.text_column = split, val_split, text_column
        self.val_fraction = check_fraction(0.01 if val_fraction is None else val_fraction)
        self.streaming, self.max_documents, self.notes = bool(streaming), max_documents, []
        self._place = Path(path).expanduser()
        self.local = self._place.exists()
        if not self.local and (config is not None and not isinstance(config, str)):
            raise UserError(f"data.config={config!r} must be a name")
        if self.local and revision is not None:
            raise UserError("data.revision has no effect on a local dataset: leave it out")
        if not self.local and (
            path.startswith((".", "/", "~")) or path.count("/") > 1 or self._place.suffix in _BUILDERS
        ):
            raise UserError(f"data.path: there is no {path}")
        self._loaded = {name: self._load(name) for name in dict.fromkeys([split, val_split]) if name}
        for name, dataset in self._loaded.items():
            columns = dataset.column_names
            if columns is not None and text_column not in columns:
                raise UserError(
                    f"data.text_column={text_column}: split {name!r} of {path} has the columns {', '.join(columns)}"
                )

    def _load(self, split: str) -> Any:
        offline = not self.local and not _online()
        if offline:
            os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are first imported
        try:
            import datasets
            import huggingface_hub.constants
        except ImportError:
            raise UserError("data=hf needs the datasets library: pip install datasets") from None
        if offline:
            datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised as well
        try:
            return self._load_with(datasets, split)
        except UserError:
            raise
        except Exception as error:
            line = _first_line(error)
            if offline:
                raise UserError(
                    f"data.path: {self.path} is neither a path here nor in the local Hugging Face cache, and "
                    "the hub cannot be reached. Download it first, or give a local path"
                ) from None
            raise UserError(f"data.path: cannot load split {split!r} of {self.path}: {line}") from None

    def _load_with(self, datasets: Any, split: str) -> Any:
        common = {"split": split, "streaming": self.streaming}
        if not self.local:
            return datasets.load_dataset(self.path, self.config, revision=self.revision, **common)
        if (self._place / "state.json").exists() or (self._place / "dataset_dict.json").exists():  # save_to_disk
            if self.config is not None:
                raise UserError(f"data.config has no effect on {self.path}, which save_to_disk wrote: leave it out")
            loaded = datasets.load_from_disk(str(self._place))
            if hasattr(loaded, "keys"):
                if split not in loaded:
                    raise UserError(f"data.split: {self.path} has the splits {', '.join(loaded)}, not {split!r}")
                loaded = loaded[split]
            elif split != "train" and split != str(loaded.split):
                raise UserError(f"data.split: {self.path} is a single split, not {split!r}: leave out data.split")
            return loaded.to_iterable_dataset() if self.streaming else loaded
        common["cache_dir"] = str(default_cache_dir() / "datasets")
        if self._place.is_file():
            builder = _BUILDERS.get(self._place.suffix.lower())
            if builder is None:
                raise UserError(f"data.path: {self.path} is none of {', '.join(_BUILDERS)}")
            if split != "train":
                raise UserError(f"data.split: {self.path} is one file and one split, 'train', not {split!r}")
            extra = {"sample_by": "document"} if builder == "text" else {}
            return datasets.load_dataset(builder, data_files={split: str(self._place)}, **common, **extra)
        return datasets.load_dataset(str(self._place), self.config, **common)

    def _rows(self, split: str) -> Iterator[str]:
        dataset = self._loaded[split]
        for index, row in enumerate(self._read(itertools.islice(dataset, self.max_documents))):
            if self.text_column not in row:
                raise UserError(f"data.text_column={self.text_column}: {self.path} has the columns {', '.join(row)}")
            text = row[self.text_column]
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"data.text_column={self.text_column}: row {index} of {self.path} holds "
                    f"{type(text).__name__}, not text"
                )
            if text and text.strip():
                yield text

    def _read(self, rows: Iterator[dict]) -> Iterator[dict]:
        try:
            yield from rows
        except Exception as error:  # a streamed file is read, and its faults are found, only now
            raise UserError(f"data.path: cannot read {self.path}: {_first_line(error)}") from None

    def documents(self, split: str) -> Iterator[str]:
        check_split(split)
        if self.val_split is not None:
            return self._rows(self.split if split == "train" else self.val_split)
        return take_split(self._rows(self.split), split, self.val_fraction)

    def fingerprint(self) -> str:
        content = [getattr(dataset, "_fingerprint", None) for _, dataset in sorted(self._loaded.items())]
        if self.streaming:
            # Rows that were not read cannot be hashed: files by name, size and time; the hub by revision.
            content = (
                [_listing(self._place)]
                if self.local
                else [str(getattr(d.info, "download_checksums", None)) for d in self._loaded.values()]
            )
        options = [
            self.split,
            self.val_split,
            None if self.val_split else self.val_fraction,
            self.text_column,
            self.max_documents,
            self.streaming,
        ]
        return f"hf:{fingerprint(self.path, self.config, self.revision, content, options)}"


def _first_line(error: BaseException) -> str:
    if isinstance(error, StopIteration):
        return "it holds no rows"
    while error.__cause__ is not None:  # the libraries wrap what happened in what they were doing
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _listing(place: Path) -> list:
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    return [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def _online() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    return reachable(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
