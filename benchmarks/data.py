"""Data: tokenising against the usual script, the batch loader in tokens/s, and what a training step waits for it.

    python benchmarks/data.py                          # all three, some five minutes
    python benchmarks/data.py tokenise --megabytes 64  # also: loader, wait
    python benchmarks/data.py --check --json data.json # exit status 1 where a bar is missed

tokenise: the same byte-level BPE on the same documents. The rival is what training scripts do, told in our own words:
a `datasets` table of documents, `map` with one process a core that encodes a document at a time, adds the end of text
and keeps a length, and then the pieces joined into a uint16 memory map. Ours is what `prepare` does: the same encoder
on batches of documents, and a token store with its index and checksum. Both leave the same tokens.
loader: batches from a token file in the page cache, in the training process, no workers.
wait: the share of an andrea12m step that goes by in the loader.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import torch
from timing import interleave, load, ratio, ratio_words

from gptframe.compose import compose_config
from gptframe.config import Config
from gptframe.data.batches import Batches
from gptframe.data.tokenizer import END_OF_TEXT, BPETokenizer, Tokenizer, token_documents, train_bpe
from gptframe.data.tokens import TokenStore, write_store
from gptframe.model import Context, build_model
from gptframe.registry import build
from gptframe.training.device import cpu_has_bf16
from gptframe.training.optimizer import param_groups

CPU = torch.device("cpu")
BARS = {"tokenise": 1.5, "loader": 50e6, "wait": 0.01}
CONTEXT = 1024


def make_documents(megabytes: float) -> list[str]:
    """Text with the word lengths and the skewed word counts of English, the same at every call."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    weights = 1 / np.arange(1, 23)
    words = np.array([
        "".join(random.choice(letters, length, p=weights / weights.sum()))
        for length in np.clip(random.poisson(4.2, 30_000), 1, 14)
    ])  # fmt: skip
    chances = 1 / np.arange(8, 30_008)
    documents, size = [], 0
    while size < megabytes * 1e6:
        drawn = random.choice(words, int(random.lognormal(5.8, 0.9)) + 8, p=chances / chances.sum())
        lines = [" ".join(drawn[i : i + 60]) + "." for i in range(0, len(drawn), 60)]
        documents.append("\n".join(lines))
        size += len(documents[-1])
    return documents


class Trained(BPETokenizer):
    """A BPE of documents in memory."""

    name = "bpe"

    def __init__(self, documents: list[str], vocab_size: int) -> None:
        self._adopt(train_bpe(documents, vocab_size, 1), END_OF_TEXT, END_OF_TEXT)


def with_map(documents: Any, tokenizer: Tokenizer, folder: Path, processes: int) -> np.ndarray:
    """The usual script: map over documents, then join."""

    def process(row: dict[str, str]) -> dict[str, Any]:
        ids = tokenizer.encode(row["text"])
        ids.append(tokenizer.eos_id)
        return {"ids": ids, "length": len(ids)}

    table = documents.map(process, remove_columns=["text"], num_proc=processes, load_from_cache_file=False)
    total = int(np.sum(table["length"], dtype=np.uint64))
    tokens = np.memmap(folder / "map.bin", np.uint16, "w+", shape=(total,))
    shards, place = min(1024, len(table)), 0
    for i in range(shards):
        part = table.shard(num_shards=shards, index=i, contiguous=True).with_format("numpy")
        joined = np.concatenate(part["ids"][:])
        tokens[place : place + len(joined)] = joined
        place += len(joined)
    tokens.flush()
    return tokens


def with_prepare(documents: list[str], tokenizer: Tokenizer, folder: Path) -> np.ndarray:
    """What `prepare` does with a corpus that is not in the cache."""
    write_store(folder / "ours", token_documents(tokenizer, documents), np.dtype("<u2"), {})
    return TokenStore.open(folder / "ours").tokens


def tokenise(arguments: argparse.Namespace) -> tuple[bool, Any]:
    import datasets

    documents = make_documents(arguments.megabytes)
    size = sum(len(text) for text in documents) / 1e6
    tokenizer = Trained(documents[: max(1, len(documents) // 8)], 8449)
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        table = datasets.Dataset.from_dict({"text": documents})
        table.save_to_disk(folder / "table")
        table = datasets.load_from_disk(folder / "table")
        rivals: dict[str, Callable[[], np.ndarray]] = {
            "map": lambda: with_map(table, tokenizer, folder, cores),
            "gptframe": lambda: with_prepare(documents, tokenizer, folder),
        }
        same = np.array_equal(*(call() for call in rivals.values()))
        if not same:
            raise SystemExit("error: the tokens differ")
        seconds: dict[str, list[float]] = {name: [] for name in rivals}
        for number in range(arguments.rounds):
            for name in list(rivals)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                rivals[name]()
                seconds[name].append(time.perf_counter() - began)
    found = ratio(seconds["map"], seconds["gptframe"])
    speeds = {name: size / statistics.median(column) for name, column in seconds.items()}
    print(f"tokenise {size:.0f} MB, {len(documents)} documents, {cores} cores: gptframe {speeds['gptframe']:.2f} MB/s, "
          f"datasets.map {speeds['map']:.2f}: ratio {ratio_words(found)} (same tokens)", flush=True)  # fmt: skip
    return found[1] >= BARS["tokenise"], {"ratio": found, "seconds": seconds, "megabytes": size}


def loader(arguments: argparse.Namespace) -> tuple[bool, Any]:
    reached, results = True, {}
    with tempfile.TemporaryDirectory() as place:
        lengths = np.random.default_rng(0).integers(50, 1500, 60_000)
        random = np.random.default_rng(1)
        write_store(
            Path(place) / "tokens",
            ([random.integers(0, 8449, n)] for n in lengths),
            np.dtype("<u2"),
            {"source": "random"},
        )
        store = TokenStore.open(Path(place) / "tokens")
        for size in (8, 16, 64):
            for documents in (False, True):
                batches = Batches(store, CONTEXT, size, seed=0, documents=documents)
                stream = batches.iterate()
                count = max(1, 4096 // size)

                def read(stream: Any = stream, count: int = count) -> None:
                    for _ in range(count):
                        next(stream)

                times = interleave({"ours": read}, arguments.rounds * 2 + 1, CPU)["ours"]
                wall, used = (count * size * CONTEXT / statistics.median(t) for t in (times.seconds, times.processor))
                label = f"loader batch {size:2d}{' mask_documents' if documents else ''}"
                print(f"{label:33s} {wall / 1e6:6.1f} M tokens/s (processor time: {used / 1e6:.1f})", flush=True)
                results[label] = {"wall": wall, "processor": used}
                reached &= used >= BARS["loader"]
    return reached, results


def wait(arguments: argparse.Namespace) -> tuple[bool, Any]:
    config = Config.from_dict(compose_config(["model=andrea12m", "data=verbs", "tokenizer=byte"]))
    model = build_model(config.model, 0)
    optimizer = build("optimizer", config.optimizer, param_groups(model))
    store = TokenStore(np.random.default_rng(0).integers(0, config.model.vocab_size, 4_000_000).astype(np.uint16))
    stream = Batches(store, CONTEXT, 1, seed=0).iterate()
    shares: list[float] = []
    for step in range(arguments.rounds + 1):
        began = time.perf_counter()
        batch = next(stream)
        read = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=cpu_has_bf16()):
            loss = model(batch["ids"], Context(), batch["targets"]) / batch["targets"].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step:
            shares.append((read - began) / (time.perf_counter() - began))
    share = statistics.median(shares)
    print(f"wait for data in an andrea12m step of 1 x {CONTEXT} tokens: {share:.4%} of the step", flush=True)
    return share <= BARS["wait"], {"share": shares}


def main() -> int:
    parts = {"tokenise": tokenise, "loader": loader, "wait": wait}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="tokenise, loader, wait; all three where none is given"
    )
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    arguments = parser.parse_args()
    words = load()
    print(f"{words}; torch {torch.__version__}")
    results: dict[str, Any] = {"machine": words}
    reached = True
    for name in arguments.parts or parts:
        if name not in parts:
            parser.error(f"there is no part {name!r}: {', '.join(parts)}")
        good, results[name] = parts[name](arguments)
        print(f"  bar of {name} ({BARS[name]:g}): {'reached' if good else 'MISSED'}")
        reached &= good
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return int(arguments.check and not reached)


if __name__ == "__main__":
    raise SystemExit(main())
