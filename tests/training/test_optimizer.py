"""Optimisers against PyTorch's own, or against steps worked out by hand, and the groups that parameters fall into."""

import copy
import math

import pytest
import torch
from torch import nn

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.model import build_model
from gptframe.registry import build
from gptframe.training.optimizer import param_groups


def config(**changes):
    return ModelConfig(**{"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "context_length": 8, **changes})


def names(groups):
    return {group["role"]: set(group["param_names"]) for group in groups}


def test_groups_of_a_tied_model():
    model = build_model(config(position={"name": "learned"}))
    groups = param_groups(model)
    by_role = names(groups)
    assert set(by_role) == {"matrix", "plain"}
    # 4 attention and 2 MLP matrices a block; the tied head is the embedding
    assert len(by_role["matrix"]) == 2 * 6
    assert {"token_embedding.weight", "position.table.weight", "final_norm.weight"} <= by_role["plain"]
    assert all(p.ndim == 2 for g in groups if g["role"] == "matrix" for p in g["params"])
    counted = [id(p) for g in groups for p in g["params"]]
    assert len(counted) == len(set(counted)) == len(list(model.parameters()))


def test_groups_of_an_untied_model():
    by_role = names(param_groups(build_model(config(tie_head=False))))
    assert by_role["decayed"] == {"head.weight"}
    assert "token_embedding.weight" in by_role["plain"]


def test_groups_of_what_a_plugin_brings():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.zeros(4, 3))
            self.gate = nn.Parameter(torch.zeros(4))
            self.conv = nn.Conv1d(4, 4, 3)
            self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
            self.linear = nn.Linear(4, 8, bias=False)
            self.table = nn.Embedding(8, 4)
            self.table.weight = self.linear.weight  # tied the other way round: still an embedding

    by_role = names(param_groups(Odd()))
    assert by_role == {"decayed": {"filter", "conv.weight"}, "plain": {"gate", "conv.bias", "table.weight"}}


def test_a_shared_parameter_counts_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert names(param_groups(model))["matrix"] == {"0.weight"}


def train(model, optimizer, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(5, 6, generator=generator)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))


@pytest.mark.parametrize("fused", [None, False, True])
def test_adamw_is_torchs_with_decay_on_matrices_only(fused):
    ours, theirs = small(), small()
    got = train(
        ours, build("optimizer", {"name": "adamw", "lr": 0.01, "weight_decay": 0.5, "fused": fused}, param_groups(ours))
    )
    decayed = [p for p in theirs.parameters() if p.ndim == 2]
    rest = [p for p in theirs.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False,
    )  # fmt: skip
    for a, b in zip(got, train(theirs, reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_lion_by_hand():
    # Chen et al. (2023), algorithm 2, with b1 = 0.9, b2 = 0.99, lr = 0.1, decay = 0.5
    linear = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, -2.0]]))
    optimizer = build("optimizer", {"name": "lion", "lr": 0.1, "weight_decay": 0.5}, param_groups(linear))
    linear.weight.grad = torch.tensor([[1.0, -1.0]])
    optimizer.step()
    # m = 0: u = sign(0.1 g) = (1, -1); p = p (1 - 0.05) - 0.1 u = (0.95 - 0.1, -1.9 + 0.1)
    torch.testing.assert_close(linear.weight.detach(), torch.tensor([[0.85, -1.8]]))
    linear.weight.grad = torch.tensor([[-0.05, 3.0]])
    optimizer.step()
    # m = 0.01 g1 = (0.01, -0.01): u = sign(0.9 m + 0.1 g2) = sign(0.009 - 0.005, -0.009 + 0.3) = (1, 1)
    torch.testing.assert_close(linear.weight.detach(), torch.tensor([[0.85 * 0.95 - 0.1, -1.8 * 0.95 - 0.1]]))


def test_muon_takes_the_matrices_and_adamw_the_rest():
    ours, theirs = small(), small()
    optimizer = build("optimizer", {"name": "muon", "lr": 0.01, "weight_decay": 0.1}, param_groups(ours))
    got = train(ours, optimizer)
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    rest = [p for p in theirs.parameters() if p.ndim < 2]
    two = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    class Both:
        def zero_grad(self):
            theirs.zero_grad()

        def step(self):
            for one in two:
                one.step()

    for a, b in zip(got, train(theirs, Both()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_muons_first_step_has_the_documented_size():
    # orthogonalised [A, B] has singular values near 1: RMS sqrt(1 / max(A, B)), times 0.2 sqrt(max(A, B)) = 0.2 lr
    linear = nn.Linear(64, 32, bias=False)
    before = linear.weight.detach().clone()
    optimizer = build("optimizer", {"name": "muon", "lr": 0.5, "weight_decay": 0.0}, param_groups(linear))
    linear.weight.grad = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    rms = (linear.weight.detach() - before).square().mean().sqrt().item()
    assert rms == pytest.approx(0.2 * 0.5, rel=0.2)


RATES = {"name": "muon", "lr": 0.02, "adamw_lr": 0.003, "embedding_lr": 0.01, "head_lr": 0.005}


def test_muon_with_rates_of_its_own_for_embeddings_and_head():
    model = build_model(config(tie_head=False, position={"name": "learned"}))
    optimizer = build("optimizer", {**RATES, "weight_decay": 0.0}, param_groups(model))
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert set(rates) == {name for name, _ in model.named_parameters()}
    assert rates["blocks.0.attention.core.q.weight"] == 0.02 and rates["final_norm.weight"] == 0.003
    assert rates["token_embedding.weight"] == rates["position.table.weight"] == 0.01 and rates["head.weight"] == 0.005
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    # Adam's first step is its rate, by the sign of the gradient (Kingma and Ba, 2015, section 2.1)
    for name in ("token_embedding.weight", "head.weight", "final_norm.weight"):
        torch.testing.assert_close(
            model.get_parameter(name) - before[name], torch.full_like(before[name], -rates[name])
        )


def test_a_rate_for_a_head_that_is_tied_is_refused():
    with pytest.raises(UserError, match="optimizer.head_lr=0.005 has no effect: the head is tied"):
        build("optimizer", RATES, param_groups(build_model(config())))


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_state_survives_saving(name):
    straight, stopped = small(), small()
    section = {"name": name, "lr": 0.01}
    wanted = train(straight, build("optimizer", section, param_groups(straight)), 5)
    optimizer = build("optimizer", section, param_groups(stopped))
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = build("optimizer", section, param_groups(stopped))
            optimizer.load_state_dict(saved)
        x = torch.randn(5, 6, generator=generator)
        optimizer.zero_grad()
        stopped(x).square().sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(wanted, stopped.parameters(), strict=True))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "adamw"}, "lr"),
        ({"name": "adamw", "lr": -1.0}, "optimizer.lr=-1.0"),
        ({"name": "adamw", "lr": 1.0, "betas": [0.9]}, "betas"),
        ({"name": "adamw", "lr": 1.0, "betas": [0.9, 1.0]}, "betas"),
        ({"name": "adamw", "lr": 1.0, "eps": -1.0}, "eps"),
        ({"name": "adamw", "lr": 1.0, "weight_decay": math.nan}, "weight_decay"),
        ({"name": "adamw", "lr": 1.0, "weight_decays": 0.1}, "weight_decay"),
        ({"name": "lion", "lr": 1.0, "eps": 0.1}, "eps"),
        ({"name": "muon", "lr": 1.0, "adjust_lr": "none"}, "match_rms_adamw"),
        ({"name": "muon", "lr": 1.0, "ns_steps": 0}, "ns_steps"),
        ({"name": "muon", "lr": 1.0, "embedding_lr": -1.0}, "optimizer.embedding_lr=-1.0"),
        ({"name": "adam", "lr": 1.0}, "adamw"),
    ],
)
def test_bad_options_are_refused(section, said):
    with pytest.raises(UserError) as error:
        build("optimizer", section, param_groups(small()))
    assert said in str(error.value)
