"""The n-gram baseline by hand."""

from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptframe.data.ngram import ngram_baseline, ngram_losses
from gptframe.data.tokens import TokenStore

TRAIN = np.array([0, 1, 0, 1, 0, 2, 0, 1, 1, 0])  # counts: 0 five times, 1 four, 2 once
VAL = np.array([0, 1, 2])


def test_unigram_by_hand():
    # Targets 1 and 2: (4 + 1) / (10 + 3) and (1 + 1) / (10 + 3).
    losses = ngram_losses(TRAIN, VAL, 3, 1, (1.0,))
    assert losses[1, 1.0] == pytest.approx(-(log(5 / 13) + log(2 / 13)) / 2, abs=1e-12)


def test_bigram_by_hand():
    # After 0 come 1, 1, 2, 1 (four times); after 1 come 0, 0, 1, 0. Targets: 1 after 0, 2 after 1.
    losses = ngram_losses(TRAIN, VAL, 3, 2, (0.5,))
    assert losses[2, 0.5] == pytest.approx(-(log(3.5 / 5.5) + log(0.5 / 5.5)) / 2, abs=1e-12)


def test_trigram_by_hand():
    # Target 1 has only the context 0, which in training is the start of the text once, followed by 1 (the context is as
    # long as it can be). Target 2 after 0, 1: followed in training by 0, 0, 1.
    losses = ngram_losses(TRAIN, VAL, 3, 3, (1.0,))
    assert losses[3, 1.0] == pytest.approx(-(log(2 / 4) + log(1 / 6)) / 2, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=3, max_size=60), st.lists(st.integers(0, 4), min_size=2, max_size=20))
def test_against_counting_with_dictionaries(train, val):
    losses = ngram_losses(np.array(train), np.array(val), 5, 4, (0.1,))
    for order in range(1, 5):
        pairs, contexts = {}, {}
        for i, token in enumerate(train):
            context = (min(i, order - 1), *train[max(0, i - order + 1) : i])
            contexts[context] = contexts.get(context, 0) + 1
            pairs[context, token] = pairs.get((context, token), 0) + 1
        total = 0.0
        for i, token in enumerate(val[1:], 1):
            context = (min(i, order - 1), *val[max(0, i - order + 1) : i])
            total -= log((pairs.get((context, token), 0) + 0.1) / (contexts.get(context, 0) + 0.5))
        assert losses[order, 0.1] == pytest.approx(total / (len(val) - 1), abs=1e-9)


def test_order_is_chosen_without_the_validation_split():
    rng = np.random.default_rng(0)
    cycle = TokenStore(np.tile(np.arange(5), 200).astype("<u2"))
    noise = TokenStore(rng.integers(0, 5, 500).astype("<u2"))
    chosen, other = ngram_baseline(cycle, noise, 5), ngram_baseline(cycle, cycle, 5)
    assert (chosen.order, chosen.alpha) == (other.order, other.alpha)
    assert chosen.order > 1 and chosen.loss > other.loss
    assert chosen.best_order == 1 and chosen.best_loss <= chosen.loss


def test_token_cap():
    store = TokenStore(np.tile(np.arange(5), 2000).astype("<u2"))
    result = ngram_baseline(store, store, 5, max_tokens=1000)
    assert (result.train_tokens, result.val_tokens) == (1000, 100)
