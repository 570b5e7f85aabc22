"""What a sublayer adds to the loss or logs: the gradients and numbers of a computation by hand."""

from __future__ import annotations

import pytest
import torch
from test_module import CFG, fit, ragged_batch
from torch import nn

from gptframe import UserError
from gptframe.model import Context, build_model
from gptframe.model.context import scalars
from gptframe.registry import register


def register_sized(kind="loss", shape=()):
    """A sublayer whose loss is 0.5 mean(x^2), or which logs the mean of x."""

    @register("sublayer", "sized")
    class Sized(nn.Module):
        def __init__(self, cfg, layer: int):
            super().__init__()
            self.matrix = nn.Linear(cfg.d_model, cfg.d_model)

        infinite = False

        def forward(self, x, ctx):
            y = self.matrix(x)
            if self.infinite:
                ctx.add_loss("size", y.mean() + torch.inf)
            elif kind == "loss":
                ctx.add_loss("size", 0.5 * y.square().mean() + torch.zeros(shape))
            else:
                ctx.log("mean", y.mean())
            return y

    return Sized


def model():
    from dataclasses import replace

    return build_model(replace(CFG, block=["attention", "sized"]), 0)


@pytest.mark.parametrize("micro", [8, 4, 3])
def test_the_gradient_is_that_of_the_mean_over_targets_plus_the_loss_of_each_micro_batch(micro):
    register_sized()
    batch, plain = ragged_batch(), model()
    n = (batch["targets"] != -100).sum()
    total, extra, cross = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for ids, targets in zip(batch["ids"].split(micro), batch["targets"].split(micro), strict=True):
        seen = []
        hooks = [b.sized.core.register_forward_hook(lambda m, i, y, seen=seen: seen.append(y)) for b in plain.blocks]
        logits = plain(ids).flatten(0, 1)
        for hook in hooks:
            hook.remove()
        own = (targets != -100).sum() / n
        aux = sum(0.5 * y.square().mean() for y in seen)  # of one name over the layers: summed
        ce = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum") / n
        total, extra, cross = total + ce + own * aux, extra + own * aux, cross + ce
    expected = torch.autograd.grad(total, list(plain.parameters()))
    module = fit(batch, micro, model=model())
    for got, wanted in zip(module.gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(module.last_loss, cross.detach(), rtol=1e-6, atol=1e-6)  # comparable with any model's
    torch.testing.assert_close(module.last_extras["size"], extra.detach(), rtol=1e-5, atol=1e-8)


def test_a_metric_is_averaged_over_layers_and_changes_no_gradient():
    register_sized("metric")
    batch, plain = ragged_batch(), model()
    seen = []
    for block in plain.blocks:
        block.sized.core.register_forward_hook(lambda m, i, y: seen.append(y.mean()))
    loss = nn.functional.cross_entropy(plain(batch["ids"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
    expected = torch.autograd.grad(loss, list(plain.parameters()))
    module = fit(batch, 8, model=model())
    torch.testing.assert_close(module.last_extras["mean"], torch.stack(seen).mean().detach())
    for got, wanted in zip(module.gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)


def test_compiled_it_is_the_same():
    register_sized()
    plain, ids = model(), ragged_batch()["ids"]
    found = []
    for forward in (plain.forward, torch.compile(plain.forward, fullgraph=True, backend="aot_eager")):
        ctx = Context(losses={}, metrics={})
        (forward(ids, ctx, ids) + ctx.losses["size"]).backward()
        found.append([ctx.losses["size"].detach(), *(p.grad.clone() for p in plain.parameters())])
        plain.zero_grad()
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_a_metric_of_some_micro_batches_and_layers_is_their_mean():
    @register("sublayer", "sized")
    class Sometimes(nn.Module):
        def __init__(self, cfg, layer: int):
            super().__init__()
            self.layer, self.calls, self.matrix = layer, 0, nn.Linear(cfg.d_model, cfg.d_model)

        def forward(self, x, ctx):
            self.calls += 1
            if self.calls % 2:  # not in each micro-batch
                ctx.log("three", 3.0 if self.layer else torch.tensor(3))
            return self.matrix(x)

    assert float(fit(ragged_batch(), 2, model=model()).last_extras["three"]) == pytest.approx(3)


@pytest.mark.parametrize(
    ("losses", "metrics", "said"),
    [
        ({"size": torch.zeros(3)}, {}, r"ctx.add_loss got \[3\] as 'size': it takes a scalar"),
        ({"size": 1.0}, {}, "ctx.add_loss got float as 'size'"),
        ({}, {"size": [torch.zeros(3)]}, r"ctx.log got \[3\] as 'size'"),
        ({}, {"size": ["x"]}, "ctx.log got str as 'size'"),
        ({"size": torch.zeros(())}, {"size": [1.0]}, "there is a loss of that name"),
        *(({}, {name: [1.0]}, "cannot be the name of a column") for name in ("a,b", "a\nb", 'a"', " ", "", 3)),
    ],
)
def test_what_cannot_be_added_or_logged_is_named(losses, metrics, said):
    with pytest.raises(UserError, match=said):
        scalars(Context(losses=losses, metrics=metrics))


def test_a_loss_that_is_not_finite_is_named(make_config, tmp_path):
    from gptframe.training.run import train

    register_sized(shape=()).infinite = True
    with pytest.raises(UserError, match="aux/size inf"):
        train(make_config(model={"block": ["attention", "sized"]}, run_dir=str(tmp_path / "run")), [])


def test_nothing_is_gathered_where_nobody_asks():
    register_sized()
    ctx = Context()
    plain = model().eval()
    ids = ragged_batch()["ids"]
    assert torch.equal(plain(ids, ctx), plain(ids)) and ctx.losses is None and ctx.metrics is None


def test_the_columns_of_metrics_csv(make_config, tmp_path):
    from tiny_run import rows

    from gptframe.training.run import train

    register_sized()
    run = train(make_config(model={"block": ["attention", "sized"]}, run_dir=str(tmp_path / "run")), []).run_dir
    found = rows(run)
    assert all(float(row["aux/size"]) > 0 for row in found if row["train_loss"])


def test_recomputed_it_is_the_same():
    register_sized()
    plain, other = model(), model()
    other.recompute = True
    one, two = fit(ragged_batch(), 4, model=plain), fit(ragged_batch(), 4, model=other)
    assert torch.equal(one.last_extras["size"], two.last_extras["size"])
    for got, wanted in zip(two.gradients, one.gradients, strict=True):
        assert torch.equal(got, wanted)
