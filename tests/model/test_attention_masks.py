"""What a token may see: causality, windows, documents; and the key-value cache, which must change nothing."""

from __future__ import annotations

import pytest
import torch
from helpers import ATTENTIONS, PLACEMENTS, POSITIONS, perturbed, small, tokens

from gptframe.model import Context, KVCache

pytestmark = pytest.mark.parametrize("attention", ATTENTIONS)
T = 12


def model_with(attention, position, **changes):
    return perturbed(small("pre", "gelu_tanh", position, attention=ATTENTIONS[attention], **changes))


@pytest.mark.parametrize("topology", ["sequential", "parallel"])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_token_changes_nothing_before_it(attention, position, topology):
    model = model_with(attention, position, topology=topology)
    ids = tokens(model.cfg, 2, T)
    before = model(ids)
    for t in (1, 5, T - 1):
        changed = ids.clone()
        changed[:, t] = (changed[:, t] + 1) % model.cfg.vocab_size
        difference = (model(changed) - before).abs().amax(dim=(0, 2))  # [T]
        assert difference[:t].max() <= 1e-12
        assert difference[t] > 1e-3  # the change itself is seen


@pytest.mark.parametrize("position", POSITIONS)
def test_no_gradient_flows_from_the_past_to_the_future(attention, position):
    model = model_with(attention, position)
    embedded = []
    model.token_embedding.register_forward_hook(lambda module, args, out: embedded.append(out) or out.retain_grad())
    t = 5
    model(tokens(model.cfg, 2, T))[:, t].square().sum().backward()
    gradient = embedded[0].grad.abs().amax(dim=(0, 2))  # [T]
    assert gradient[t + 1 :].max() == 0
    window = ATTENTIONS[attention].get("window", T)
    reach = model.cfg.n_layers * (window - 1)  # each layer looks window - 1 tokens back
    seen = torch.arange(t - min(reach, t), t + 1)
    assert gradient[seen].min() > 0
    assert gradient[: seen[0]].numel() == 0 or gradient[: seen[0]].max() == 0


@pytest.mark.parametrize("position", POSITIONS)
def test_documents_do_not_see_each_other(attention, position):
    """A document in a packed row gives what it gives alone at the same positions."""
    model = model_with(attention, position)
    ids = tokens(model.cfg, 2, T)
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 5 + [9] * 7])
    packed = model(ids, Context(documents=documents))
    assert (packed[:, :5] - model(ids[:, :5])).abs().max() <= 1e-12
    alone = model(ids[:, 5:], Context(positions=torch.arange(5, T)))
    assert (packed[:, 5:] - alone).abs().max() <= 1e-12
    assert (packed[:, 5:] - model(ids)[:, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("position", POSITIONS)
def test_the_cache_changes_nothing(attention, position):
    """A prompt, single tokens and a further chunk give the logits of one forward pass."""
    model = model_with(attention, position)
    ids = tokens(model.cfg, 2, T)
    whole = model(ids)
    cache, pieces, start = KVCache(), [], 0
    for length in (4, 1, 1, 1, 5):
        pieces.append(model(ids[:, start : start + length], Context(cache=cache)))
        start += length
    assert len(cache) == T
    assert (torch.cat(pieces, dim=1) - whole).abs().max() <= 1e-12


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_cache_serves_every_placement_and_several_attentions(attention, placement):
    block = ["attention", "mlp", "attention"]
    model = perturbed(small(placement, attention=ATTENTIONS[attention], block=block))
    ids = tokens(model.cfg, 1, 6)
    cache = KVCache()
    stepped = torch.cat([model(ids[:, t : t + 1], Context(cache=cache)) for t in range(6)], dim=1)
    assert (stepped - model(ids)).abs().max() <= 1e-11


@pytest.mark.parametrize("position", POSITIONS)
def test_left_padding_changes_nothing(attention, position):
    """Rows of different lengths in one batch give what each gives alone, with and without the cache."""
    model = model_with(attention, position)
    ids = tokens(model.cfg, 3, T)
    lengths = [T, 5, 1]
    pads = torch.tensor([T - n for n in lengths])
    for row, n in enumerate(lengths):  # text at the right, whatever at the left
        ids[row, T - n :] = tokens(model.cfg, 1, T, seed=row)[0, :n]
    positions = torch.arange(T) - pads[:, None]
    whole = model(ids, Context(positions=positions))
    cache = KVCache()
    pieces = [model(ids[:, a:b], Context(positions[:, a:b], cache=cache)) for a, b in ((0, 9), (9, 10), (10, T))]
    for row, n in enumerate(lengths):
        alone = model(ids[row : row + 1, T - n :])[0]
        assert (whole[row, T - n :] - alone).abs().max() <= 1e-11
        assert (torch.cat(pieces, dim=1)[row, T - n :] - alone).abs().max() <= 1e-11
    assert whole.isfinite().all()  # padding too: a value that is no number would spread through the mixing


@pytest.mark.parametrize("position", ["rope", "learned", "alibi"])
def test_rows_leave_the_cache(attention, position):
    model = model_with(attention, position)
    ids = tokens(model.cfg, 4, 7)
    cache = KVCache()
    model(ids[:, :5], Context(cache=cache))
    cache.keep(torch.tensor([2, 0]))
    kept = model(ids[[2, 0], 5:], Context(cache=cache))
    assert (kept - model(ids[[2, 0]])[:, 5:]).abs().max() <= 1e-12


def test_a_window_drops_what_no_token_sees_any_more(attention):
    """The buffers of a windowed attention stay small, however long the text."""
    model = model_with(attention, "rope", context_length=400)
    ids = tokens(model.cfg, 1, 300)
    cache = KVCache()
    stepped = torch.cat([model(ids[:, t : t + 1], Context(cache=cache)) for t in range(300)], dim=1)
    assert (stepped - model(ids)).abs().max() <= 1e-10
    rooms = {pair.k.shape[2] for pair in cache._pairs.values()}
    assert rooms == ({64} if "window" in ATTENTIONS[attention] else {526})  # 64, then twice what is needed


def test_a_cache_does_not_go_with_documents(attention):
    model = model_with(attention, "rope")
    ids = tokens(model.cfg)
    with pytest.raises(ValueError, match="either documents or cache"):
        model(ids, Context(documents=torch.zeros_like(ids), cache=KVCache()))


def test_a_full_cache_is_refused(attention):
    model = model_with(attention, "learned")
    cache = KVCache()
    model(tokens(model.cfg, 1, 16), Context(cache=cache))
    with pytest.raises(ValueError, match="17 tokens exceed the context of 16"):
        model(tokens(model.cfg, 1, 1), Context(cache=cache))


def test_relative_positions_do_not_depend_on_the_start(attention):
    """RoPE and ALiBi see distances only; learned and sinusoidal positions see where the text stands."""
    for position in POSITIONS:
        model = model_with(attention, position)
        ids = tokens(model.cfg, 2, 6)
        shifted = model(ids, Context(positions=torch.arange(3, 9)))
        difference = (shifted - model(ids)).abs().max()
        assert (difference > 1e-3) if position in ("learned", "sinusoidal") else (difference <= 1e-10)
