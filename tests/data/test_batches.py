"""Batches against their definition: coverage of targets, purity in (seed, step), independence of the ranks."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptframe.data.batches import Batches, ValBatches, permutation
from gptframe.data.tokens import TokenStore
from gptframe.errors import UserError


def store(n, documents=None):
    return TokenStore(np.arange(n, dtype="<u2"), documents)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 200), length=st.integers(1, 40), batch=st.integers(1, 9), seed=st.integers(0, 2**63 - 1))
def test_each_token_is_a_target_once_an_epoch(n, length, batch, seed):
    batches = Batches(store(n), length, batch, seed)
    windows = batches.windows
    # As many steps as make whole epochs: the batches run across the ends of epochs.
    seen = Counter()
    for step in range(windows):
        got = batches.at(step)
        mask = got["targets"] != -100
        assert torch.equal(got["ids"][mask] + 1, got["targets"][mask])  # the store counts up
        seen.update(got["targets"][mask].tolist())
    assert seen == Counter({token: batch for token in range(1, n)})


@given(st.integers(1, 300), st.integers(0, 2**63 - 1), st.integers(0, 50))
def test_permutation(n, seed, epoch):
    order = permutation(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, permutation(n, seed, epoch))


def test_permutation_is_the_documented_one():
    # Philox4x64-10 words of NumPy's stream for SeedSequence((3, 1)), ranked; pinned, since runs resume on it.
    words = np.random.Philox(np.random.SeedSequence((3, 1))).random_raw(6).tolist()
    assert permutation(6, 3, 1).tolist() == sorted(range(6), key=words.__getitem__)
    assert permutation(6, 3, 1).tolist() != permutation(6, 3, 2).tolist()
    assert permutation(100, 3, 1).tolist() != permutation(100, 4, 1).tolist()


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_together_make_the_batch(world_size):
    whole = Batches(store(500), 7, 12, 5)
    parts = [Batches(store(500), 7, 12, 5, rank, world_size) for rank in range(world_size)]
    for step in (0, 4, 17):
        for key in ("ids", "targets"):
            assert torch.equal(whole.at(step)[key], torch.cat([part.at(step)[key] for part in parts]))


def test_iteration_from_a_step_goes_on_where_at_says():
    batches = Batches(store(300), 8, 4, 1)
    stream = batches.iterate(5)
    for step in (5, 6, 7):
        assert torch.equal(next(stream)["ids"], batches.at(step)["ids"])


def test_last_window_is_padded_and_masked():
    rows = list(ValBatches(store(10), 4, 2, pad_id=3))
    assert torch.cat([r["ids"] for r in rows]).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 3, 3], [3, 3, 3, 3]]
    assert rows[1]["targets"].tolist() == [[9, -100, -100, -100], [-100] * 4]
    assert all(r["ids"].shape == (2, 4) for r in rows)


def test_a_store_shorter_than_the_context_is_one_padded_window():
    batch = Batches(store(3), 8, 1, 0).at(0)
    assert batch["ids"].tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[1, 2] + [-100] * 6]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 150), length=st.integers(1, 20), batch=st.integers(1, 6), world=st.integers(1, 4))
def test_validation_visits_each_target_once_over_all_ranks(n, length, batch, world):
    ranks = [ValBatches(store(n), length, batch, rank=r, world_size=world) for r in range(world)]
    assert len({len(r) for r in ranks}) == 1
    targets = torch.cat([b["targets"].flatten() for r in ranks for b in r])
    assert sorted(targets[targets != -100].tolist()) == list(range(1, n))


def test_validation_limit_is_spread_over_the_split():
    batches = ValBatches(store(1001), 10, 5, limit=4)
    assert [int(b["ids"][0, 0]) for b in batches] == [0, 250, 500, 750]
    assert len(ValBatches(store(1001), 10, 5, limit=100)) == 20


def test_documents():
    batches = ValBatches(store(12, np.array([0, 3, 3, 5, 12])), 6, 2, documents=True)
    batch = next(iter(batches))
    assert batch["documents"].tolist() == [[0, 0, 0, 2, 2, 3], [0, 0, 0, 0, 0, 0]]
    assert "documents" not in next(iter(ValBatches(store(12), 6, 2)))


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30), length=st.integers(1, 12))
def test_documents_are_those_of_a_search_at_each_position(lengths, length):
    ends = np.cumsum([0, 2, *lengths])
    plain = np.searchsorted(ends, np.arange(ends[-1] + length), side="right") - 1
    start = 0
    for batch in ValBatches(store(int(ends[-1]), ends), length, 2, documents=True):
        for row, targets in zip(batch["documents"], batch["targets"], strict=True):
            if (targets != -100).any():
                expected = plain[start : start + length]
                assert row.tolist() == (expected - expected[0]).tolist()
            start += length


def test_writing_into_a_batch_changes_no_other():
    batches = Batches(store(50), 5, 2, 0)
    batch = batches.at(0)
    before = batch["targets"].clone()
    batch["ids"].fill_(7)
    assert torch.equal(batch["targets"], before)
    assert torch.equal(batches.at(0)["targets"], before)


def test_refusals():
    with pytest.raises(UserError, match="global_batch_size=5 is not divisible by 2"):
        Batches(store(50), 5, 5, 0, 0, 2)
    with pytest.raises(UserError, match="1 tokens"):
        Batches(store(1), 5, 5, 0)
