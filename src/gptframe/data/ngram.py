"""An n-gram model with add-alpha smoothing: what a model must beat to have learned more than short contexts.

p(w | c) = (count(c, w) + alpha) / (count(c) + alpha * V), where c are the order - 1 tokens before w (Lidstone, 1920;
Jurafsky and Martin, Speech and Language Processing, chapter 3). At the start of the text c is as long as it can be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gptframe.data.tokens import TokenStore

ALPHAS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)


@dataclass(frozen=True)
class NgramBaseline:
    """The baseline and how it was chosen.

    loss: validation loss in nats a token, of the order and alpha that were best on the last tenth of the training
        documents, with counts of the other nine tenths.
    best_loss: the lowest validation loss of any order and alpha, chosen with sight of the validation split: a bound
        that no honest choice passes.
    train_tokens, val_tokens: how much of each split was used.
    """

    order: int
    alpha: float
    loss: float
    best_order: int
    best_alpha: float
    best_loss: float
    train_tokens: int
    val_tokens: int


def ngram_losses(
    train: np.ndarray, val: np.ndarray, vocab_size: int, max_order: int, alphas: tuple[float, ...] = ALPHAS
) -> dict[tuple[int, float], float]:
    """Mean loss in nats over val[1:], by (order, alpha).

    Like a model's, the first token of `val` is no target; contexts do not reach from `val` back into `train`.
    """
    tokens = np.concatenate((train, val)).astype(np.int64)
    n = len(train)
    losses = {}
    context = np.zeros(len(tokens), dtype=np.int64)  # the number of each position's context among those that occur
    for order in range(1, max_order + 1):
        if order > 1:
            # A longer context is the token before it with its own shorter context; renumbered, it never overflows.
            previous = np.empty_like(context)
            previous[1:] = context[:-1] * (vocab_size + 1) + tokens[:-1] + 1
            previous[0] = previous[n] = 0  # nothing stands before the first token of a split
            context = np.unique(previous, return_inverse=True)[1].reshape(-1)
        pair = np.unique(context * vocab_size + tokens, return_inverse=True)[1].reshape(-1)
        seen_context = np.bincount(context[:n], minlength=int(context.max()) + 1)[context[n:]][1:]
        seen_pair = np.bincount(pair[:n], minlength=int(pair.max()) + 1)[pair[n:]][1:]
        for alpha in alphas:
            p = (seen_pair + alpha) / (seen_context + alpha * vocab_size)
            losses[order, alpha] = float(-np.log(p).mean())
    return losses


def ngram_baseline(
    train: TokenStore, val: TokenStore, vocab_size: int, max_order: int = 5, max_tokens: int = 1_000_000
) -> NgramBaseline:
    """The best n-gram model of orders 1 to `max_order`.

    Args:
        max_tokens: take no more than the first so many tokens of training, and a tenth of that of validation.
    """
    train = train.slice(0, min(len(train), max_tokens))
    val = val.slice(0, min(len(val), max(max_tokens // 10, 2)))
    a, b = train.window(0, len(train)), val.window(0, len(val))
    # The choice is made inside the training split, at the document boundary nearest to nine tenths.
    cut = int(len(a) * 0.9)
    if train.has_documents:
        inner = train.documents[1:-1]
        cut = int(inner[np.argmin(np.abs(inner - cut))])
    cut = min(max(cut, 1), len(a) - 2)
    inside = ngram_losses(a[:cut], a[cut:], vocab_size, max_order)
    order, alpha = min(inside, key=lambda key: inside[key])
    losses = ngram_losses(a, b, vocab_size, max_order)
    best = min(losses, key=lambda key: losses[key])
    return NgramBaseline(order, alpha, losses[order, alpha], best[0], best[1], losses[best], len(a), len(b))
