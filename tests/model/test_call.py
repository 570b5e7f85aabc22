"""The short ways to submodules: the same numbers, and whatever has been put on a module still happens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gptframe.model.call import call, call_each, lay_side_by_side, part, product

X = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))


def layers(bias: bool = True, side_by_side: bool = True) -> list[nn.Linear]:
    torch.manual_seed(1)
    found = [nn.Linear(6, n, bias=bias) for n in (4, 2, 5)]
    if side_by_side:
        for name in ("weight", "bias") if bias else ("weight",):
            lay_side_by_side([getattr(layer, name) for layer in found])
    return found


def by_hand(layer: nn.Linear, x: Tensor = X) -> np.ndarray:
    y = np.einsum("bti,oi->bto", x.double().numpy(), layer.weight.detach().double().numpy())
    return y if layer.bias is None else y + layer.bias.detach().double().numpy()


def together(tensors) -> bool:
    """Whether they have come out of one product."""
    return len({t.untyped_storage().data_ptr() for t in tensors}) == 1


def right(tensors, of: list[nn.Linear], x: Tensor = X) -> bool:
    return all(np.allclose(t.numpy(), by_hand(layer, x), atol=1e-5) for t, layer in zip(tensors, of, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_each_layer_gives_its_own(bias: bool, side_by_side: bool) -> None:
    of = layers(bias, side_by_side)
    with torch.no_grad():
        for x in (X, X[:1, :1]):
            found = call_each(x, *of)
            assert right(found, of, x) and together(found) == side_by_side


def test_gradients_reach_each_layer() -> None:
    of, apart = layers(), layers(side_by_side=False)
    sum(y.square().sum() for y in call_each(X, *of)).backward()
    sum(layer(X).square().sum() for layer in apart).backward()
    for a, b in zip(of, apart, strict=True):
        assert torch.allclose(a.weight.grad, b.weight.grad, rtol=1e-4) and torch.allclose(a.bias.grad, b.bias.grad)


@torch.no_grad()
def test_layers_that_have_changed_are_not_taken_for_what_they_were() -> None:
    of = layers()
    of[1].weight.mul_(2)  # in place: still a part of the whole
    assert right(call_each(X, *of), of) and together(call_each(X, *of))
    of[2].bias.data = torch.ones(5)
    assert right(call_each(X, *of), of) and not together(call_each(X, *of))
    of = layers()
    of[0].double(), of[1].double(), of[2].double()
    assert right(call_each(X.double(), *of), of, X.double())
    of = layers()
    of[0], of[1] = of[1], of[0]
    assert right(call_each(X, *of), of) and not together(call_each(X, *of))
    two = [layers(), layers()]
    mixed = [two[0][0], two[1][1], two[0][2]]  # each at its place, in another memory
    mixed[1].weight.add_(1)
    assert right(call_each(X, *mixed), mixed) and not together(call_each(X, *mixed))


@torch.no_grad()
def test_hooks_and_other_classes_are_called() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    of = layers()
    plain = call_each(X, *of)
    handle = of[1].register_forward_hook(lambda module, args, y: y + 1)
    found = call_each(X, *of)
    assert torch.allclose(found[1], plain[1] + 1) and torch.allclose(found[0], plain[0])
    handle.remove()
    doubled = Doubled(6, 2)
    doubled.load_state_dict(of[1].state_dict())
    assert torch.allclose(call_each(X, of[0], doubled, of[2])[1], 2 * plain[1])
    assert torch.allclose(call(doubled, X), 2 * plain[1]) and torch.allclose(call(of[1], X), plain[1], atol=1e-6)
    of[1].forward = lambda x: torch.zeros(x.shape[:-1] + (2,))  # as accelerate's hooks do it
    assert not call_each(X, *of)[1].any() and not call(of[1], X).any()
    identity = nn.Identity()
    assert call(identity, X) is X
    identity.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert torch.equal(call(identity, X), X + 1)


def test_a_part_is_whatever_module_is_there() -> None:
    class Whole(nn.Module):
        inner, other = part(), part()

    whole = Whole()
    assert not hasattr(whole, "inner")
    whole.inner = nn.Linear(2, 2)
    assert whole.inner is whole._modules["inner"] and list(whole.state_dict()) == ["inner.weight", "inner.bias"]
    whole._modules["inner"] = nn.Identity()  # as torch.ao's converters do it
    assert isinstance(whole.inner, nn.Identity)
    whole.other = None  # an empty seat may hold no module at all
    assert whole.other is None
    del whole.inner
    with pytest.raises(AttributeError, match="inner"):
        whole.inner  # noqa: B018


@pytest.mark.parametrize("rows_out", [1, 7, 16, 17, 192, 2305, 8449])  # 2305 = 5 * 461, 8449 = 71 * 119; 17 is prime
@pytest.mark.parametrize("shape", [(6,), (1, 6), (1, 1, 6), (4, 1, 6), (2, 3, 6), (1, 9, 6), (0, 6)])
def test_a_streamed_product_is_the_same_product(rows_out: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    weight, bias, x = torch.randn(rows_out, 6), torch.randn(rows_out), torch.randn(shape)
    for given in (bias, None):
        y = product(x, weight, given, streamed=True)
        exact = np.einsum("...i,oi->...o", x.double().numpy(), weight.double().numpy())
        exact = exact if given is None else exact + given.double().numpy()
        assert y.shape == exact.shape and np.allclose(y.numpy(), exact, atol=1e-5)
    turned = weight.t().contiguous().t()  # not laid out as it should be
    assert torch.allclose(product(x, turned, bias, streamed=True), y + bias, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_under_autocast_the_layers_share_one_cast_of_their_input(bias: bool) -> None:
    of = layers(bias, side_by_side=False)
    kept: list[Tensor] = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        found = call_each(X, *of)
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        assert sum(sizes.values()) == 2 * (2 * 3 * 6)  # bfloat16 of X[2,3,6], of which each layer kept one before
        apart = [layer(X) for layer in of]
    assert all(a.dtype == torch.bfloat16 and torch.equal(a, b) for a, b in zip(found, apart, strict=True))
    sum(y.float().square().sum() for y in found).backward()
    exact = torch.einsum("bto,bti->oi", 2 * found[2].detach().float(), X)
    assert torch.allclose(of[2].weight.grad, exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))


def test_outside_autocast_and_in_float64_nothing_is_cast() -> None:
    of = layers()
    assert all(y.dtype == torch.float32 for y in call_each(X, *of))
    double = [layer.double() for layer in layers()]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(y.dtype == torch.float64 for y in call_each(X.double(), *double))
        seen = []
        of[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        call_each(X, *of)
    assert seen[0] is X  # a hook sees what the layer gets
