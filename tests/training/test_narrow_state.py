"""Optimiser state in bfloat16 against PyTorch's AdamW in float32, and that it is stored, saved and counted as said."""

import copy

import pytest
import torch
from torch import nn

from gptframe.errors import UserError
from gptframe.inspect.doctor import check_disk, estimated_memory
from gptframe.registry import build
from gptframe.training import narrow_state
from gptframe.training.device import choose
from gptframe.training.narrow_state import NarrowState, round_at_random
from gptframe.training.optimizer import param_groups, parts

NAMES = ("adamw", "lion", "muon")


def noise_for(x, seed=0):
    return torch.randint(
        -(2**15), 2**15, (x.numel(),), dtype=torch.int16, generator=torch.Generator().manual_seed(seed)
    )


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Linear(64, 3))


def optimizer_of(model, name="adamw", **options):
    return build("optimizer", {"name": name, "lr": 0.01, "state_dtype": "bfloat16", **options}, param_groups(model))


def run(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_rounding_takes_one_of_two_neighbours_and_is_right_on_average():
    x = torch.randn(1000).repeat(1000, 1).T.contiguous()  # each number a thousand times
    x[:4] = torch.tensor([0.0, 1.0, -2.5, 1.0e38])[:, None]  # exact but the last
    found = round_at_random(x.clone(), noise_for(x)).double()
    assert torch.equal(found[:3].float(), x[:3])
    assert ((found - x).abs() <= x.abs() * 2.0**-7).all()
    down = x.abs().view(torch.int32).bitwise_and(-(2**16)).view(torch.float32)
    up = (down.view(torch.int32) + 2**16).view(torch.float32)
    assert ((found.abs() == down) | (found.abs() == up)).all()
    # a number's mean over n draws is off by half a step over sqrt(n), here with five of these for a thousand numbers
    assert ((found.mean(1) - x[:, 0]).abs() <= 5 * 0.5 * (up - down)[:, 0] / 1000**0.5).all()
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    kept = round_at_random(special.clone(), noise_for(special)).float()
    assert kept[0] == special[0] and kept[1] == special[1] and kept[2].isnan()


def test_a_mean_that_falls_by_a_thousandth_falls():
    layer = nn.Linear(100, 50, bias=False)
    optimizer = optimizer_of(layer, lr=0.0, betas=[0.9, 0.999])
    layer.weight.grad = torch.ones(50, 100)
    optimizer.step()
    layer.weight.grad = torch.zeros(50, 100)
    start = optimizer.state[layer.weight]["exp_avg_sq"].float().mean()
    for part in parts(optimizer):
        part._accelerator_graph_capture_health_check = lambda: None  # as GPTModule does on a CPU: it takes longer
    for _ in range(100):
        optimizer.step()
    mean = optimizer.state[layer.weight]["exp_avg_sq"].float().mean() / start
    assert mean == pytest.approx(0.999**100, rel=0.01)  # rounded to the nearest it would still be 1


@pytest.mark.parametrize("fused", [True, False])
def test_adamws_update_is_torchs_up_to_the_rounding_of_what_it_remembers(fused):
    ours, theirs = layers(), layers()
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    optimizer = optimizer_of(ours, fused=fused)
    # The first step knows no state: it is the same, whatever it is stored in.
    for a, b in zip(run(ours, optimizer, 1), run(theirs, reference, 1), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    # Both moments are within 2^-7 of the exact ones, so a step of 0.01 is off by about 1e-4, to either side.
    steps = 20
    for a, b in zip(run(ours, optimizer, steps, 1), run(theirs, reference, steps, 1), strict=True):
        assert (a - b).abs().max() < 0.01 * 2**-7 * steps
        assert (a - b).abs().mean() > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_bfloat16_and_the_parameters_are_not(name):
    model = layers()
    optimizer = optimizer_of(model, name)
    run(model, optimizer, 2)
    assert isinstance(optimizer, NarrowState)
    for p in model.parameters():
        moments = {k: v for k, v in optimizer.state[p].items() if k != "step"}
        assert moments and all(m.dtype == torch.bfloat16 and m.shape == p.shape for m in moments.values())
        assert p.dtype == torch.float32
    assert not any(part.state for part in list(parts(optimizer))[1:])  # nothing wide is left


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 2**22], ids=["one by one", "together"])
def test_state_survives_saving_to_the_bit(name, batch, monkeypatch):
    monkeypatch.setattr(narrow_state, "BATCH_ELEMENTS", batch)
    straight, stopped = layers(), layers()
    wanted = run(straight, optimizer_of(straight, name), 6)
    first = optimizer_of(stopped, name)
    run(stopped, first, 3)
    second = optimizer_of(stopped, name)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(wanted, run(stopped, second, 3, 3), strict=True))
    moments = [v for s in second.state_dict()["state"].values() for k, v in s.items() if k != "step"]
    assert {m.dtype for m in moments} == {torch.bfloat16}


def test_a_parameter_without_a_gradient_keeps_its_state():
    model = layers()
    optimizer = optimizer_of(model)
    run(model, optimizer, 2)
    p = model[0].weight
    before = {k: v.clone() for k, v in optimizer.state[p].items()}
    p.grad = None
    optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in optimizer.state[p].items())


def test_other_dtypes_are_refused():
    for name in NAMES:
        with pytest.raises(UserError, match="optimizer.state_dtype='float16' is not one of float32, bfloat16"):
            optimizer_of(layers(), name, state_dtype="float16")


@pytest.mark.parametrize(("name", "moments"), [("adamw", 2), ("lion", 1), ("muon", 1.5)])
def test_the_doctor_counts_it(make_config, name, moments):
    n, found = 10**6, {}
    for dtype in ("float32", "bfloat16"):
        config = make_config(optimizer={"name": name, "lr": 0.01, "state_dtype": dtype})
        device = choose(config.trainer, config.precision, config.model)
        found[dtype] = estimated_memory(config, device, n), next(check_disk(config, n, None)).text
    assert found["float32"][0] - found["bfloat16"][0] == moments * 2 * n
    assert found["float32"][1] != found["bfloat16"][1]
