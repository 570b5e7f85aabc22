"""The chunked cross-entropy of the head against torch's own, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.model import build_model, loss
from gptframe.model.head import Head
from gptframe.model.loss import head_cross_entropy

N, D, V = 37, 16, 23


def inputs(dtype=torch.float64, targets=None, shape=(N,)):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    if targets is None:
        targets = torch.randint(0, V, shape, generator=generator)
        targets.flatten()[::5] = -100
    return x, weight, targets


def expected(x, weight, targets, softcap):
    """torch's loss in float64 of the same numbers, and its gradients."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = x.flatten(0, -2) @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    value = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
    return value, *torch.autograd.grad(3 * value, (x, weight))


def close(got, want, tolerance):
    return (got.double() - want).abs().max() <= tolerance * want.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 7, N, N + 1])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_value_and_gradient(monkeypatch, dtype, tolerance, rows, softcap):
    """In chunks of one, seven (the last is ragged), all and more tokens."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", rows * V)
    x, weight, targets = inputs(dtype)
    got = head_cross_entropy(x, weight, targets, softcap)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (3 * got).backward()
    value, x_gradient, weight_gradient = expected(x, weight, targets, softcap)
    assert close(got, value, tolerance)
    assert close(x.grad, x_gradient, tolerance) and x.grad.dtype == dtype
    assert close(weight.grad, weight_gradient, tolerance) and weight.grad.dtype == dtype
    assert x.grad[::5].abs().max() == 0  # ignored tokens


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_autocast(monkeypatch, dtype, tolerance, softcap):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 7 * V)
    x, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        got = head_cross_entropy(x, weight, targets, softcap)
    assert got.dtype == torch.float32
    (3 * got).backward()
    value, x_gradient, weight_gradient = expected(x, weight, targets, softcap)
    assert close(got, value, tolerance)
    assert close(x.grad, x_gradient, tolerance) and x.grad.dtype == torch.float32
    assert close(weight.grad, weight_gradient, tolerance) and weight.grad.dtype == torch.float32


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck(monkeypatch, softcap):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 3 * V)
    x, weight, targets = inputs(shape=(2, 4))
    assert torch.autograd.gradcheck(lambda x, w: head_cross_entropy(x, w, targets, softcap), (x, weight))


def test_gradients_only_where_they_are_wanted():
    for frozen in ("x", "weight"):
        x, weight, targets = inputs()
        (x if frozen == "x" else weight).requires_grad_(False)
        head_cross_entropy(x, weight, targets).backward()
        assert (x.grad is None) == (frozen == "x")
        assert (weight.grad is None) == (frozen == "weight")


def test_no_gradient_is_computed_without_grad_mode(monkeypatch):
    """Validation must not pay for gradients that nobody asked for."""
    wanted = []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda *a, **k: wanted.append(1) or softmax(*a, **k))
    x, weight, targets = inputs()
    with torch.no_grad():
        value = head_cross_entropy(x, weight, targets)
    assert not wanted and not value.requires_grad
    assert torch.equal(value, head_cross_entropy(x, weight, targets).detach())
    assert wanted


@pytest.mark.parametrize("shape", [(3, 4), (0,), (2, 0), (1,)])
def test_all_targets_ignored_or_none_at_all(shape):
    x, weight, targets = inputs(targets=torch.full(shape, -100), shape=shape)
    got = head_cross_entropy(x, weight, targets)
    got.backward()
    assert got.item() == 0.0
    assert x.grad.abs().sum() == 0 and weight.grad.abs().sum() == 0


def test_large_logits_do_not_overflow():
    x, weight, targets = inputs(torch.float32)
    got = head_cross_entropy(1e4 * x, weight, targets)
    got.backward()
    value, *_ = expected(1e4 * x, weight, targets, None)
    assert close(got, value, 1e-5)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("target", [V, -1])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    x, weight, targets = inputs()
    targets[3] = target
    with pytest.raises(IndexError, match="out of bounds"):
        head_cross_entropy(x, weight, targets)


def test_rare_tokens_keep_their_gradient_in_float16():
    """With 50257 entries each probability is 2e-5; float16 alone would round those gradients to a few bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, D, generator=generator).half().requires_grad_()
    weight = (0.02 * torch.randn(50257, D, generator=generator)).half().requires_grad_()
    targets = torch.arange(8)
    (1024 * head_cross_entropy(x, weight, targets)).backward()
    x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    (1024 * F.cross_entropy(x64 @ w64.T, targets, reduction="sum")).backward()
    rare = slice(8, None)
    assert close(weight.grad[rare], w64.grad[rare], 1e-2)
    assert close(x.grad, x64.grad, 1e-2)


def test_many_tokens_do_not_overflow_float16():
    """Each of 8192 tokens pulls one row of the head by 63/64."""
    x = torch.ones(8192, D, dtype=torch.float16)
    weight = torch.zeros(64, D, dtype=torch.float16, requires_grad=True)
    (head_cross_entropy(x, weight, torch.zeros(8192, dtype=torch.long)) / 8192).backward()
    assert torch.allclose(weight.grad[0].float(), torch.full((D,), -63 / 64), atol=1e-3)


def test_second_derivatives_are_refused():
    """They would silently lack a term: backward returns what forward has computed."""
    x, weight, targets = inputs()
    (first,) = torch.autograd.grad(head_cross_entropy(x, weight, targets).square(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), x)


def test_shapes_alone_on_the_meta_device():
    with torch.device("meta"):
        x, weight = torch.empty(2, 3, 8, requires_grad=True), torch.empty(16, 8, requires_grad=True)
        loss = head_cross_entropy(x, weight, torch.zeros(2, 3, dtype=torch.long))
        loss.backward()
    assert loss.shape == () and x.grad.shape == x.shape and weight.grad.shape == weight.shape


@pytest.mark.parametrize("options", [{}, {"logit_softcap": 2.0}, {"tie_head": False}])
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 2e-6), (True, 3e-2)], ids=["fp32", "bf16"])
def test_all_logits_at_once_give_the_same(options, autocast, tolerance):
    cfg = ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=V, context_length=8, **options)
    ids = torch.randint(0, V, (2, 8), generator=torch.Generator().manual_seed(0))
    targets = ids.clone()
    targets[:, ::3] = -100
    found = []
    for chunked in (True, False):
        model = build_model(cfg)
        model.trade_memory(chunked_loss=chunked)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = model(ids, targets=targets)
        value.backward()
        assert value.dtype == torch.float32
        found.append([value.detach(), *(p.grad for p in model.parameters())])
    assert all(close(got, want.double(), tolerance) for got, want in zip(*found, strict=True))


def test_a_head_with_a_loss_of_its_own_refuses_all_logits_at_once():
    class Own(Head):
        def loss(self, x, weight, targets, ctx):
            return head_cross_entropy(x, weight, targets)

    model = build_model(ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=V))
    model.output = Own(model.cfg)
    model.trade_memory(chunked_loss=True)
    with pytest.raises(UserError, match="trainer.chunked_loss=false: the head 'linear' has no chunks"):
        model.trade_memory(chunked_loss=False)
