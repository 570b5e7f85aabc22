"""A linear backend multiplies by every matrix of the model, and nothing else changes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptframe import compose, plugins
from gptframe.config import Config, LinearConfig, ModelConfig
from gptframe.errors import UserError
from gptframe.model import Context, build_model
from gptframe.model.activation import GELUTanh
from gptframe.model.call import Linear
from gptframe.registry import register

EXAMPLES = Path(__file__).parents[2] / "plugins" / "examples"
CALLS = {"forward": 0, "backward": 0, "head": 0}


class Product(torch.autograd.Function):
    """What torch computes for F.linear, product by product."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return grad @ weight, rows.T @ x.flatten(0, -2), rows.sum(0) if ctx.biased else None


class Counting:
    def __init__(self, cfg: ModelConfig):
        self.counted = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if self.counted:
            CALLS["forward"] += 1
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        y = Product.apply(x, weight, bias)
        if self.counted and y.requires_grad:
            y.register_hook(self.seen)
        return y

    def seen(self, grad: Tensor) -> None:
        CALLS["backward"] += 1

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if self.counted:
            CALLS["head"] += 1
        return grad @ weight.to(grad.dtype), (grad.T @ x).float()


class Uncounted(Counting):
    def __init__(self, cfg: ModelConfig):
        self.counted = False


class WithoutBackward:
    def __init__(self, cfg: ModelConfig):
        self.inner = Counting(cfg)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        return self.inner(x, weight, bias)


class Mix(nn.Module):
    """A plugin's sublayer: it knows nothing of backends."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.mix = nn.Linear(cfg.d_model, cfg.d_model)

    def forward(self, x: Tensor, ctx) -> Tensor:
        return self.mix(x)


@pytest.fixture(autouse=True)
def backends(registry_put_back):
    CALLS.update(dict.fromkeys(CALLS, 0))
    register("linear_backend", "counting")(Counting)
    register("linear_backend", "uncounted")(Uncounted)
    register("linear_backend", "without_backward")(WithoutBackward)
    register("linear_backend", "nothing")(lambda cfg: lambda x, weight, bias: None)
    register("sublayer", "mixing")(Mix)


def config(*overrides: str, backend: str = "torch") -> ModelConfig:
    values = compose.compose_config([f"model.linear.backend={backend}", *overrides])
    return dataclasses.replace(Config.from_dict(values).model, vocab_size=64)


def trained(cfg: ModelConfig, steps: int = 3, mixed: bool = False, **trade: bool) -> list[Tensor]:
    """The losses of some steps, and the weights after them."""
    model = build_model(cfg, seed=1)
    model.trade_memory(**trade)
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 64, (4, 33), generator=generator)
        with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = model(ids[:, :-1], targets=ids[:, 1:]) / 128
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


MINI, GATED = (), ("attention=gqa", "activation=swiglu", "model.tie_head=false", "model.attention.bias=true")
PLUGINS = ("model.block=[attention,mixing,mlp]",)


@pytest.mark.parametrize("overrides,linears", [(MINI, 6), (GATED, 7), (PLUGINS, 7)])
@pytest.mark.parametrize("mixed", [False, True])
def test_every_matrix_is_taken_and_the_training_is_the_same_to_the_last_bit(overrides, linears, mixed):
    cfg = config(*overrides)
    with_backend = dataclasses.replace(cfg, linear=LinearConfig("counting"))
    # two layers, three steps; the head's 128 tokens are one chunk
    found = trained(with_backend, mixed=mixed)
    assert CALLS == {"forward": 3 * (2 * linears + 1), "backward": 3 * 2 * linears, "head": 3}
    assert equal(found, trained(cfg, mixed=mixed))


def test_head_and_loss_in_chunks_at_once_and_without_backward(monkeypatch):
    cfg, counting = config(), config(backend="counting")
    wanted = trained(cfg, chunked_loss=False)
    assert equal(trained(counting, chunked_loss=False), wanted)
    assert CALLS == {"forward": 3 * 13, "backward": 3 * 13, "head": 0}
    monkeypatch.setattr("gptframe.model.loss.CHUNK_ELEMENTS", 30 * 64)  # of 128 tokens: 5 chunks, the last is ragged
    wanted = trained(cfg, steps=1)
    CALLS.update(dict.fromkeys(CALLS, 0))
    assert equal(trained(counting, steps=1), wanted)
    assert CALLS == {"forward": 12 + 5, "backward": 12, "head": 5}
    assert equal(trained(config(backend="without_backward"), steps=1), wanted)
    assert CALLS == {"forward": 2 * (12 + 5), "backward": 2 * 12, "head": 5}


def test_a_head_of_ones_own_hands_the_backend_on():
    plugins.load([str(EXAMPLES / "multi_token.py")])
    head = {"head": {"name": "multi_token"}}
    model = build_model(dataclasses.replace(config(backend="counting"), **head), seed=1)
    other = build_model(dataclasses.replace(config(), **head), seed=1)
    ids, found = torch.arange(12)[None], []
    for one in (model, other):
        ctx = Context(losses={}, metrics={})
        found.append([one(ids, ctx, ids), *ctx.losses.values()])
        sum(found[-1]).backward()
    assert equal(*found)
    assert CALLS == {"forward": 12 + 1 + 2, "backward": 12 + 1, "head": 2}  # the head's own matrix; both its losses


def test_what_is_left_is_torchs():
    assert equal(trained(config(backend="nothing")), trained(config()))
    assert equal(trained(config(backend="nothing"), mixed=True), trained(config(), mixed=True))
    register("linear_backend", "some")(lambda cfg: lambda x, w, b: None if b is not None else F.linear(x, w))
    assert equal(trained(config(*GATED, backend="some")), trained(config(*GATED)))


def test_without_gradients_the_model_gives_the_same_logits():
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = build_model(config(backend="counting"), seed=1)(ids)
        assert CALLS["forward"] == 13
        assert torch.equal(found, build_model(config(), seed=1)(ids))


def test_torch_puts_nothing_into_the_model():
    model = build_model(config())
    assert not any(isinstance(m, Linear) for m in model.modules()) and model.output.backend is None


def test_names_copies_pickles_and_hooks():
    model = build_model(config(backend="counting"), seed=1)
    assert list(model.state_dict()) == list(build_model(config()).state_dict())
    ids = torch.zeros(1, 5, dtype=torch.long)
    y = model(ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        CALLS["forward"] = 0
        assert torch.equal(other(ids), y) and CALLS["forward"] == 13
        with torch.no_grad():
            other.blocks[0].mlp.core.down.weight.zero_()
    assert torch.equal(model(ids), y)  # a copy has weights of its own
    layer = model.blocks[0].attention.core.q
    seen = []
    layer.register_forward_hook(lambda module, args, y: seen.append(y.shape) or y)
    assert torch.equal(model(ids), y) and seen == [(1, 5, 64)]


def test_compiled_it_is_one_graph():
    model, ids = build_model(config(backend="uncounted"), seed=1), torch.zeros(1, 5, dtype=torch.long)
    torch._dynamo.reset()
    loss = torch.compile(model.forward, fullgraph=True, backend="aot_eager")(ids, None, ids)
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    wanted = model(ids, None, ids)
    wanted.backward()
    assert torch.allclose(loss, wanted)
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(found, model.parameters(), strict=True))


def test_a_class_of_its_own_keeps_its_product():
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def doubled(model):
        model.blocks[0].mlp.core.down = Doubled(256, 64)

    register("transform", "doubled")(doubled)
    model = build_model(dataclasses.replace(config(backend="counting"), transforms={"doubled": {}}), seed=1)
    assert type(model.blocks[0].mlp.core.down) is Doubled
    model(torch.zeros(1, 5, dtype=torch.long))
    assert CALLS["forward"] == 12


class Whole(GELUTanh):
    """An activation that offers everything, and counts what is taken."""

    taken: list[str] = []
    forward_mlp_option: str | None = None

    def forward_with_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        self.taken.append("bias")
        return self(x + bias)

    def forward_mlp(self, x, up_weight, up_bias, down_weight, down_bias):
        self.taken.append("whole")
        return F.linear(self(F.linear(x, up_weight, up_bias)), down_weight, down_bias)


def test_an_activation_that_multiplies_itself_yields_or_is_refused():
    register("activation", "whole")(Whole)
    ids = torch.zeros(1, 5, dtype=torch.long)
    cfg = dataclasses.replace(config(), activation={"name": "whole"}, n_layers=1)
    y = build_model(cfg, seed=1)(ids)
    assert Whole.taken == ["whole"]
    cfg = dataclasses.replace(cfg, linear=LinearConfig("counting"))
    assert torch.allclose(build_model(cfg, seed=1)(ids), y, atol=1e-6)
    assert Whole.taken == ["whole", "bias"] and CALLS["forward"] == 7
    register("activation", "asked_for")(type("AskedFor", (Whole,), {"forward_mlp_option": "save=input"}))
    with pytest.raises(UserError) as refusal:
        build_model(dataclasses.replace(cfg, activation={"name": "asked_for"}))
    assert "model.activation.save=input" in str(refusal.value) and "\n" not in str(refusal.value)
    assert "model.linear.backend=counting" in str(refusal.value)
    build_model(dataclasses.replace(cfg, activation={"name": "asked_for"}, linear=LinearConfig()))


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(
        UserError, match=r"^model.linear.backend: unknown linear_backend 'countin'. Did you mean 'count"
    ):
        build_model(config(backend="countin"))


@pytest.mark.parametrize(
    "broken,message",
    [
        (lambda x, w, b: F.linear(x, w, b)[..., 1:], r"returned \[1, 5, 63\] for x\[1, 5, 64\] and weight\[64, 64\]"),
        (lambda x, w, b: (x,), "returned tuple for x"),
    ],
)
def test_a_broken_contract_is_named(broken, message):
    register("linear_backend", "broken")(lambda cfg: broken)
    with pytest.raises(UserError, match=rf"^linear_backend 'broken' \({__file__}:\d+\) {message}"):
        build_model(config(backend="broken"))(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize(
    "value,message",
    [
        (lambda grad, x, weight: grad @ weight, r"returned \[5, 64\] from backward\(\) for x\[5, 64\]"),
        (lambda grad, x, weight: (x, weight.T[1:]), r"returned \[5, 64\], \[63, 64\] from backward\(\)"),
    ],
)
def test_a_broken_backward_is_named(value, message):
    class Broken(Counting):
        def backward(self, grad, x, weight):
            return value(grad, x, weight)

    register("linear_backend", "broken")(Broken)
    ids = torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(UserError, match=rf"^linear_backend 'broken' \({__file__}:\d+\) {message}"):
        build_model(config(backend="broken"))(ids, targets=ids)


def test_a_factory_that_gives_no_function_is_named():
    register("linear_backend", "odd")(lambda cfg: None)
    with pytest.raises(UserError, match=r"linear_backend 'odd' \(.*gave None, which breaks its contract"):
        build_model(config(backend="odd"))
