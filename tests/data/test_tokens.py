"""The token store against bytes laid out by hand, and against everything that can happen to its files."""

import multiprocessing
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptframe.data import tokens as tokens_module
from gptframe.data.tokens import DamagedStore, TokenStore, open_or_write, token_dtype, write_store
from gptframe.errors import UserError

U16 = np.dtype("<u2")


def written(folder, documents, dtype=U16):
    prefix = folder / "store"
    write_store(prefix, ([d] for d in documents), dtype, {"made": "here"})
    return prefix


def test_layout_is_megatrons(tmp_path):
    prefix = written(tmp_path, [[1, 2, 3], [40000], []])
    # _IndexWriter of Megatron-LM's indexed_dataset.py: magic, version, dtype code 8 (uint16), counts,
    # lengths (int32), byte pointers (int64), document indices (int64).
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i", 3, 1, 0) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "store.idx").read_bytes() == expected
    assert (tmp_path / "store.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 40000)
    assert np.fromfile(f"{prefix}.bin", dtype=np.uint16).tolist() == [1, 2, 3, 40000]  # as nanoGPT reads it


def test_ids_above_65535_are_int32(tmp_path):
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<i4")
    prefix = written(tmp_path, [[70000, 5]], token_dtype(70001))
    assert (tmp_path / "store.idx").read_bytes()[17] == 4
    assert TokenStore.open(prefix).tokens.tolist() == [70000, 5]
    assert np.fromfile(f"{prefix}.bin", dtype=np.uint32).tolist() == [70000, 5]


@settings(max_examples=50, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 65535), max_size=20), max_size=10))
def test_what_is_written_is_read(tmp_path_factory, documents):
    store = TokenStore.open(written(tmp_path_factory.mktemp("s"), documents))
    assert len(store) == sum(map(len, documents))
    parts = [store.tokens[a:b].tolist() for a, b in zip(store.documents, store.documents[1:], strict=False)]
    assert parts == documents
    assert store.max_token() == max((t for d in documents for t in d), default=-1)


def test_a_document_longer_than_a_sequence_stays_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "_MAX_SEQUENCE", 4)
    store = TokenStore.open(written(tmp_path, [list(range(10)), [7]]))
    assert store.documents.tolist() == [0, 10, 11]
    assert struct.unpack("<Q", (tmp_path / "store.idx").read_bytes()[18:26]) == (4,)


def test_window_and_slice():
    store = TokenStore(np.arange(10, dtype=U16), np.array([0, 4, 10]))
    assert store.window(8, 5).tolist() == [8, 9] and store.window(0, 2).dtype == np.int64
    part = store.slice(2, 9)
    assert part.tokens.tolist() == [2, 3, 4, 5, 6, 7, 8] and part.documents.tolist() == [0, 2, 7]
    with pytest.raises(IndexError):
        store.window(-1, 2)


def damages():
    def cut_bin(p):
        (p / "store.bin").write_bytes((p / "store.bin").read_bytes()[:-2])

    def cut_idx(p):
        (p / "store.idx").write_bytes((p / "store.idx").read_bytes()[:-3])

    def flip(p):
        data = bytearray((p / "store.bin").read_bytes())
        data[2] ^= 1
        (p / "store.bin").write_bytes(data)

    def zeros(p):
        (p / "store.idx").write_bytes(bytes(len((p / "store.idx").read_bytes())))

    def no_json(p):
        (p / "store.json").write_text("{")

    def no_bin(p):
        (p / "store.bin").unlink()

    return [cut_bin, cut_idx, flip, zeros, no_json, no_bin]


@pytest.mark.parametrize("damage", damages(), ids=lambda f: f.__name__)
def test_a_damaged_store_is_noticed_and_rebuilt(tmp_path, damage):
    prefix = written(tmp_path, [[1, 2, 3], [4, 5]])
    damage(tmp_path)
    with pytest.raises(DamagedStore):
        TokenStore.open(prefix)
    notes = []
    store = open_or_write(prefix, lambda: [[[1, 2, 3]], [[4, 5]]], U16, {}, notes)
    assert store.tokens.tolist() == [1, 2, 3, 4, 5]
    assert len(notes) == 1 and "rebuilding" in notes[0]


def test_a_store_exists_only_once_its_index_does(tmp_path):
    prefix = tmp_path / "store"

    def dies():
        yield [[1, 2]]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_or_write(prefix, dies, U16, {})
    assert [f.name for f in tmp_path.iterdir()] == ["store.lock"]
    assert open_or_write(prefix, lambda: [[[9, 9]]], U16, {}).tokens.tolist() == [9, 9]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    (tmp_path / ".store.bin.abc.tmp").write_bytes(b"half")
    (tmp_path / "store.bin").write_bytes(b"\1\0")  # killed between the renames: no .idx, so no store
    store = open_or_write(tmp_path / "store", lambda: [[[3]]], U16, {})
    assert store.tokens.tolist() == [3]
    assert not [f for f in tmp_path.iterdir() if f.name.endswith(".tmp")]


def test_a_full_disk_leaves_no_temporary_file(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device.*GPTFRAME_CACHE"):
        open_or_write(tmp_path / "store", lambda: [[[3]]], U16, {})
    assert [f.name for f in tmp_path.iterdir()] == ["store.lock"]


def _build(prefix, barrier, calls):
    barrier.wait()

    def documents():
        with calls.get_lock():
            calls.value += 1
        return ([list(range(i, i + 50))] for i in range(2000))

    store = open_or_write(prefix, documents, U16, {})
    assert len(store) == 100_000 and int(store.tokens[-1]) == 2048


def test_processes_that_start_together_write_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, calls = context.Barrier(3), context.Value("i", 0)
    workers = [context.Process(target=_build, args=(tmp_path / "store", barrier, calls)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert calls.value == 1
