"""One optimiser step: gradient and loss do not depend on how a batch is cut, and clipping acts on the whole."""

import dataclasses

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader, IterableDataset

from gptframe.config import ModelConfig
from gptframe.model import build_model
from gptframe.training.module import GPTModule, split, step_seed
from gptframe.training.optimizer import param_groups
from gptframe.training.run import quiet_lightning

CFG = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, context_length=8)


class Repeat(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        while True:
            yield from self.batches


def ragged_batch(rows=8, seed=0):
    """Rows with 1 to 8 targets, so that a mean of means over micro-batches would differ from the mean over tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (rows, 9), generator=generator)
    targets = ids[:, 1:].clone()
    for row in range(rows):
        targets[row, 1 + row % 8 :] = -100
    return {"ids": ids[:, :-1], "targets": targets}


class Spy(GPTModule):
    """Keeps the gradients that the optimiser is given, and does not step when asked so."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def fit(batch, micro, steps=1, clip=None, section=None, model=None, precision=None, **options):
    model = build_model(CFG, 0) if model is None else model
    section = section or {"name": "adamw", "lr": 0.01}
    module = Spy(model, section, lambda step: 1.0, micro_batch_size=micro, clip_norm=clip, **options)
    with quiet_lightning():
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            plugins=[precision] if precision else None,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Repeat([batch]), batch_size=None))
    assert trainer.global_step == steps
    return module


def by_hand(batch, model):
    """Mean cross-entropy over all targets at once, and its gradients, without any of our code but the logits."""
    logits = model(batch["ids"]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, batch["targets"].flatten(), ignore_index=-100)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("micro", [8, 4, 3, 1])
def test_micro_batches_change_neither_gradient_nor_loss(micro):
    batch = ragged_batch()
    loss, gradients = by_hand(batch, build_model(CFG, 0))
    module = fit(batch, micro)
    torch.testing.assert_close(module.last_loss, loss, rtol=1e-6, atol=1e-6)
    for got, expected in zip(module.gradients, gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
    assert int(module.tokens) == sum(1 + row % 8 for row in range(8))


def test_a_micro_batch_of_nothing_but_padding():
    batch = ragged_batch()
    batch["targets"][:4] = -100
    loss, _ = by_hand(batch, build_model(CFG, 0))
    module = fit(batch, 4)
    torch.testing.assert_close(module.last_loss, loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bound", [0.01, 1000.0])
def test_clipping_bounds_the_global_norm(bound):
    batch = ragged_batch()
    _, gradients = by_hand(batch, build_model(CFG, 0))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    module = fit(batch, 4, clip=bound)
    factor = min(1.0, bound / norm.item())
    torch.testing.assert_close(module.last_norm, norm, rtol=1e-4, atol=0)  # logged before clipping
    for got, expected in zip(module.gradients, gradients, strict=True):
        torch.testing.assert_close(got, expected * factor, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_acts_on_unscaled_gradients(fused):
    # A loss scaler multiplies gradients by its scale; had they been clipped before unscaling, the clipped norm would
    # come out 1 / scale of the bound.
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    batch = ragged_batch()
    section = {"name": "adamw", "lr": 0.0, "fused": fused}
    module = fit(batch, 4, clip=0.01, section=section, precision=MixedPrecision("16-mixed", "cpu", scaler))
    norm = torch.cat([g.flatten().float() for g in module.gradients]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)
    _, gradients = by_hand(batch, build_model(CFG, 0))
    expected = torch.cat([g.flatten() for g in gradients]).norm()
    assert module.last_norm.item() == pytest.approx(expected.item(), rel=0.05)  # fp16


def test_a_step_is_adamws():
    batch = ragged_batch()
    module = fit(batch, 4, steps=3)
    model = build_model(CFG, 0)
    groups = param_groups(model)
    decay = {"matrix": 0.1, "decayed": 0.1, "plain": 0.0}
    reference = torch.optim.AdamW(
        [{"params": g["params"], "weight_decay": decay[g["role"]]} for g in groups], lr=0.01, betas=(0.9, 0.95)
    )
    for _ in range(3):
        for p, g in zip(model.parameters(), by_hand(batch, model)[1], strict=True):
            p.grad = g
        reference.step()
    for a, b in zip(module.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing():
    class Poisoned(Spy):
        def training_step(self, batch, batch_idx):
            real = self.loss_sum
            if batch_idx == 1:
                self.loss_sum = lambda *a: real(*a) * float("nan")
            super().training_step(batch, batch_idx)
            self.loss_sum = real
            self.seen = [*getattr(self, "seen", []), (self.bad_steps, self.model.token_embedding.weight.sum().item())]

    module = Poisoned(
        build_model(CFG, 0), {"name": "adamw", "lr": 0.01}, lambda s: 1.0, micro_batch_size=8, clip_norm=1.0
    )
    with quiet_lightning():
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=3, max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Repeat([ragged_batch()]), batch_size=None))
    (bad0, sum0), (bad1, sum1), (bad2, sum2) = module.seen
    assert (bad0, bad1, bad2) == (0, 1, 0)
    assert sum0 == sum1 != sum2 and module.weights_are_finite()
    assert trainer.global_step == 3  # a skipped update is a step all the same: the data has moved on


def test_the_learning_rate_follows_the_schedule():
    batch, seen = ragged_batch(), []

    class Watch(Spy):
        def on_before_optimizer_step(self, optimizer):
            seen.append([group["lr"] for group in optimizer.param_groups])
            super().on_before_optimizer_step(optimizer)

    module = Watch(
        build_model(CFG, 0),
        {"name": "muon", "lr": 0.1, "adamw_lr": 0.01},
        lambda step: 1 / (step + 1),
        micro_batch_size=8,
    )
    with quiet_lightning():
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=3, max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Repeat([batch]), batch_size=None))
    assert seen == [pytest.approx([0.1 / k, 0.01 / k]) for k in (1, 2, 3)]


def test_compiling_leaves_names_and_loss_alone(monkeypatch):
    compile, counter = torch.compile, CompileCounterWithBackend("aot_eager")  # which generates no code: that is slow
    modes = []

    def without_code(function, mode):
        modes.append(mode)
        return compile(function, backend=counter, fullgraph=True)

    monkeypatch.setattr(torch, "compile", without_code)
    torch._dynamo.reset()
    batch = ragged_batch()
    plain, compiled = fit(batch, 4, steps=3), fit(batch, 4, steps=3, compile=True, compile_mode="max-autotune")
    assert counter.frame_count == 1 and modes == ["max-autotune"]  # one graph for all micro-batches and steps
    torch.testing.assert_close(compiled.last_loss, plain.last_loss, rtol=1e-5, atol=1e-6)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert not any("_orig_mod" in name for name in compiled.state_dict())


def test_split_keeps_rows_together():
    batch = {"ids": torch.arange(10).view(5, 2), "targets": torch.arange(10, 20).view(5, 2)}
    parts = split(batch, 2)
    assert [len(p["ids"]) for p in parts] == [2, 2, 1]
    assert all(torch.equal(p["targets"], p["ids"] + 10) for p in parts)


def test_step_seeds_differ_by_seed_step_and_rank():
    seeds = {step_seed(seed, step, rank) for seed in (0, 1) for step in range(3) for rank in range(2)}
    assert len(seeds) == 12 and all(0 <= s < 2**63 for s in seeds)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_activations_give_the_same_gradients_to_the_bit(dropout):
    cfg = dataclasses.replace(CFG, dropout=dropout)
    plain = fit(ragged_batch(), 4, model=build_model(cfg, 0))
    model = build_model(cfg, 0)
    model.recompute = True
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    again = fit(ragged_batch(), 4, model=model)
    assert len(calls) == 4  # two micro-batches, forward and once more in backward
    assert torch.equal(plain.last_loss, again.last_loss)
    for got, expected in zip(again.gradients, plain.gradients, strict=True):
        assert torch.equal(got, expected)
