"""The operators against the formula in float64 and against ATen: values, derivatives, shapes, transforms, refusals."""

from __future__ import annotations

import copy
import math
import pickle

import gptframe_gelu_cuda as G
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import formula
from gptframe_gelu_cuda import ops
from hypothesis import given, settings
from hypothesis import strategies as st

OPS = ops._ops
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
HALF = [torch.float16, torch.bfloat16]


def aten(x):
    return F.gelu(x, approximate="tanh")


def aten_backward(g, x):
    return torch.ops.aten.gelu_backward(g, x, approximate="tanh")


def every_finite(dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    return x[x.isfinite()]


def wrong(got, want):
    return (~(got == want)).sum().item()


@pytest.mark.parametrize("dtype", HALF)
def test_every_finite_half_is_rounded_correctly_more_often_than_by_aten(dtype):
    x = every_finite(dtype)
    y, dy, ddy = (t.to(dtype) for t in formula(x))
    ours, theirs = wrong(OPS.gelu(x), y), wrong(aten(x), y)
    assert ours <= 8 < theirs, (ours, theirs)
    one = torch.ones_like(x)
    ours, theirs = wrong(OPS.gelu_backward(one, x), dy), wrong(aten_backward(one, x), dy)
    assert ours <= 8 < theirs, (ours, theirs)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(aten(leaf).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert wrong(OPS.gelu_double_backward(one, one, x), ddy) <= 8 < wrong(second, ddy)


@pytest.mark.parametrize("scale", [0.02, 0.05, 0.3, 1.0, 3.0, 8.0])
def test_float32_is_no_worse_than_aten(scale):
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(1)) * scale
    y, dy, _ = (t.float() for t in formula(x))
    one = torch.ones_like(x)
    assert wrong(OPS.gelu(x), y) <= wrong(aten(x), y)
    assert wrong(OPS.gelu_backward(one, x), dy) <= wrong(aten_backward(one, x), dy)
    near = x.abs() < 9.5
    assert ((OPS.gelu(x) - y).abs() / y.abs().clamp_min(1e-45))[near].max() < 2e-5  # ATen's tail: 0.05 and more


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs a long double beyond float64")
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 8.0])
def test_float64_is_no_worse_than_aten(scale):
    x = np.random.default_rng(2).standard_normal(100_003) * scale
    wide = x.astype(np.longdouble)
    k = np.sqrt(2 / (4 * np.arctan(np.longdouble(1))))
    c = np.longdouble(44715) / 1_000_000
    v = 2 * k * (wide + c * wide**3)
    s, r = 1 / (1 + np.exp(-v)), 1 / (1 + np.exp(v))
    y = (wide * s).astype(np.float64)
    dy = (s + wide * s * r * 2 * k * (1 + 3 * c * wide**2)).astype(np.float64)
    x = torch.from_numpy(x)
    one = torch.ones_like(x)
    fused = "baseline" not in G.status()["cpu"]  # without a fused multiply-add, double is only about as good
    allowed = 1.0 if fused else 1.1
    assert (OPS.gelu(x).numpy() != y).sum() <= allowed * (aten(x).numpy() != y).sum()
    assert (OPS.gelu_backward(one, x).numpy() != dy).sum() <= allowed * (aten_backward(one, x).numpy() != dy).sum()


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype):
    big, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, tiny / 4, -tiny / 4, tiny, big, -big], dtype=dtype)
    y = OPS.gelu(x)
    assert y.isnan().tolist() == aten(x).isnan().tolist() == [False] * 3 + [True] * 2 + [False] * 5
    assert y[:3].tolist() == [0, 0, math.inf] and y.signbit()[:2].tolist() == [False, True]
    assert y[5:9].tolist() == formula(x)[0].to(dtype)[5:9].tolist()  # denormals are not flushed
    assert y[8] == big and y[9] == 0 and y.signbit()[9]
    dy = OPS.gelu_backward(torch.ones_like(x), x)
    # The limits; ATen has NaN at the infinities, and in float32 at the largest numbers, too.
    assert dy.isnan().tolist() == [False] * 4 + [True] + [False] * 5
    assert dy[[0, 1, 2, 3, 5, 6, 7, 8, 9]].tolist() == [0.5, 0.5, 1, 0, 0.5, 0.5, 0.5, 1, 0]
    ddy = OPS.gelu_double_backward(torch.ones_like(x), torch.ones_like(x), x)
    assert ddy.isnan().tolist() == dy.isnan().tolist() and ddy[[2, 3, 8, 9]].tolist() == [0] * 4


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_float32(value):
    x = torch.tensor([value])
    y, dy, ddy = formula(x)
    one = torch.ones(1)
    # Below -10 the result is of the order of 1e-36 and the error that of e, w*ln2*2^-23, with w up to 206.
    assert math.isclose(OPS.gelu(x).item(), y.float().item(), rel_tol=3e-5, abs_tol=3e-45)
    assert math.isclose(OPS.gelu_backward(one, x).item(), dy.item(), rel_tol=3e-5, abs_tol=2e-7)
    assert math.isclose(OPS.gelu_double_backward(one, one, x).item(), ddy.item(), rel_tol=3e-5, abs_tol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(DTYPES), st.integers(0, 3), st.booleans(), st.data())
def test_any_shape_and_stride(shape, dtype, offset, flip, data):
    order = data.draw(st.permutations(range(len(shape))))
    storage = torch.randn(math.prod(shape) * 2 + offset).to(dtype)
    x = storage[offset::2][: math.prod(shape)].reshape(shape).permute(order)
    if flip and x.dim():
        x = x.expand(3, *x.shape)[1:]
    g = torch.randn(x.shape).to(dtype)
    want = [t.to(dtype) for t in formula(x)]
    y, dy = OPS.gelu(x), OPS.gelu_backward(g, x)
    assert y.shape == x.shape and y.stride() == torch.empty_like(x).stride()
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y, want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dy, (g.double() * formula(x)[1]).to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 127, 32768, 32769, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_depends_on_its_value_alone(n, dtype, two_threads):
    """Tails, blocks and threads: the result of an element is the same bits wherever it lies."""
    values = torch.linspace(-6, 6, 97).to(dtype)
    alone = torch.cat([OPS.gelu(v.reshape(1)) for v in values])
    x = values.repeat(n // 97 + 1)[:n]
    assert torch.equal(OPS.gelu(x), alone.repeat(n // 97 + 1)[:n])
    assert torch.equal(OPS.gelu(x), OPS.gelu(x))


def test_channels_last_keeps_its_layout():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = OPS.gelu(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, aten(x))
    g = torch.randn(2, 3, 4, 5)  # another layout than x
    torch.testing.assert_close(OPS.gelu_backward(g, x), aten_backward(g, x))


# ---- derivatives ----


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 7), (2, 3, 4)])
def test_gradcheck(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(G.gelu, (x,))
    assert torch.autograd.gradgradcheck(G.gelu, (x,))
    g = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, g: OPS.gelu_backward(g, x), (x, g))  # third order


def test_gradcheck_of_the_fused_forms():
    x, b, w, c = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (5,), (4, 5), (4,)))
    for f, args in ((G.bias_gelu, (x, b)), (G.bias_gelu_linear, (x, b, w, c))):
        assert torch.autograd.gradcheck(f, args)
        assert torch.autograd.gradgradcheck(f, args)
    assert torch.autograd.gradcheck(lambda x, w: G.bias_gelu_linear(x, None, w, None), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: G.bias_gelu_linear(x, None, w, None), (x, w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "transposed", "expanded", "empty"])
def test_opcheck(dtype, layout):
    x = {
        "dense": lambda: torch.randn(3, 5),
        "transposed": lambda: torch.randn(5, 3).t(),
        "expanded": lambda: torch.randn(5).expand(3, 5),
        "empty": lambda: torch.randn(0, 5),
    }[layout]().to(dtype)
    g, b = torch.randn(3 if layout != "empty" else 0, 5).to(dtype), torch.randn(5).to(dtype)
    x = x.detach().requires_grad_() if layout == "dense" else x
    calls = [(OPS.gelu, (x,)), (OPS.gelu_backward, (g, x)), (OPS.gelu_double_backward, (g, g, x))]
    calls += [(OPS.bias_gelu, (x, b)), (OPS.bias_gelu_backward, (g, x, b))]
    w = torch.randn(4, 5).to(dtype)
    calls += [(OPS.bias_gelu_linear, (x, b, w, None)), (OPS.bias_gelu_linear, (x, None, w, w[:, 0].contiguous()))]
    for op, args in calls:
        torch.library.opcheck(op.default, args)


def test_a_gradient_through_an_expanded_view_is_summed():
    x = torch.randn(1, 4, requires_grad=True)
    G.gelu(x.expand(3, 4)).sum().backward()
    torch.testing.assert_close(x.grad, 3 * formula(x.detach())[1].float())


# ---- bias ----


@pytest.mark.parametrize("columns", [1, 7, 64, 100, 256])
@pytest.mark.parametrize("dtype, wide_bias", [(d, False) for d in DTYPES] + [(d, True) for d in HALF])
def test_bias(columns, dtype, wide_bias, two_threads):
    x, g = torch.randn(3, 41, columns).to(dtype), torch.randn(3, 41, columns).to(dtype)
    b = torch.randn(columns).to(torch.float32 if wide_bias else dtype)
    y, dy, _ = formula(x.double() + b.double())
    d = g.double() * dy
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(OPS.bias_gelu(x, b), y.to(dtype), rtol=tolerance, atol=tolerance)
    dx, db = OPS.bias_gelu_backward(g, x, b)
    assert db.dtype == b.dtype
    torch.testing.assert_close(dx, d.to(dtype), rtol=tolerance, atol=tolerance)
    # The sum is kept in float32 or wider: only the result is rounded.
    fine = 1e-12 if dtype == torch.float64 else 5e-6 * 123**0.5 if db.dtype == torch.float32 else tolerance
    torch.testing.assert_close(db.double(), d.sum((0, 1)), rtol=fine, atol=fine)


def test_bias_gradient_is_the_same_for_any_number_of_threads():
    x, g, b = torch.randn(3000, 96), torch.randn(3000, 96), torch.randn(96)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(OPS.bias_gelu_backward(g, x, b)[1])
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_bias_of_no_rows_and_no_columns():
    dx, db = OPS.bias_gelu_backward(torch.empty(0, 4), torch.empty(0, 4), torch.ones(4))
    assert dx.shape == (0, 4) and db.tolist() == [0, 0, 0, 0]
    assert OPS.bias_gelu(torch.empty(3, 0), torch.empty(0)).shape == (3, 0)


def test_saving_the_input_alone_halves_what_is_saved():
    x, b, w = torch.randn(64, 512, requires_grad=True), torch.randn(512), torch.randn(32, 512)
    w.requires_grad_()

    def saved(f):
        kept: dict[int, int] = {}

        def pack(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = f()
        return y, sum(kept.values()) - b.nbytes - w.nbytes

    fused, few = saved(lambda: G.bias_gelu_linear(x, b, w))
    apart, many = saved(lambda: F.linear(G.bias_gelu(x, b), w))
    assert few == x.nbytes and many == 2 * x.nbytes
    torch.testing.assert_close(fused, apart)
    g = torch.randn_like(fused)
    for a, c in zip(torch.autograd.grad(fused, (x, w), g), torch.autograd.grad(apart, (x, w), g), strict=True):
        torch.testing.assert_close(a, c)


# ---- transforms ----


def test_compile_fullgraph_matches_eager():
    x, b = torch.randn(6, 10, requires_grad=True), torch.randn(10, requires_grad=True)
    w, c = torch.randn(3, 10, requires_grad=True), torch.randn(3, requires_grad=True)

    def f(x, b, w, c):
        return G.gelu(x).sum() + G.bias_gelu(x, b).sum() + G.bias_gelu_linear(x, b, w, c).sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(f(x, b, w, c), (x, b, w, c))
    got = torch.autograd.grad(compiled(x, b, w, c), (x, b, w, c))
    torch.testing.assert_close(got, want)


def test_compiled_graph_saves_the_input_alone():
    """Through AOTAutograd's partitioner, which would otherwise keep the GELU's output for the weight's gradient."""
    x, b, w = torch.randn(64, 512, requires_grad=True), torch.randn(512), torch.randn(32, 512, requires_grad=True)
    y = torch.compile(lambda x, b, w: G.bias_gelu_linear(x, b, w), fullgraph=True, backend="aot_eager")(x, b, w)
    kept = {t.untyped_storage().data_ptr(): t.nbytes for t in y.grad_fn.saved_tensors}
    assert sum(kept.values()) == x.nbytes + b.nbytes + w.nbytes


def test_functorch_transforms():
    x = torch.randn(4, 5, dtype=torch.float64)
    each = torch.func.vmap(torch.func.grad(lambda v: G.gelu(v).sum()))(x)
    torch.testing.assert_close(each, formula(x)[1])
    b = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(G.bias_gelu)(x.unsqueeze(1), b).squeeze(1), aten(x + b))
    torch.testing.assert_close(torch.func.vmap(G.bias_gelu, (0, None))(x, b[0]), aten(x + b[0]))
    hessian = torch.func.hessian(lambda v: G.gelu(v).sum())(x[0])
    torch.testing.assert_close(hessian, torch.diag(formula(x[0])[2]))
    with torch.autograd.forward_ad.dual_level():  # a tangent must not get lost
        dual = G.gelu(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, formula(x)[1])


def test_functorch_transforms_inside_a_compiled_graph():
    """Where the operator itself would lose a tangent without a word."""
    x = torch.randn(4, 5, dtype=torch.float64)
    _, slope, curvature = formula(x)

    def compiled(f):
        return torch.compile(f, fullgraph=True, backend="aot_eager")

    jvp = compiled(lambda x: torch.func.jvp(G.gelu, (x,), (torch.ones_like(x),))[1])
    torch.testing.assert_close(jvp(x), slope)
    each = compiled(torch.func.vmap(torch.func.grad(lambda v: G.gelu(v).sum())))
    torch.testing.assert_close(each(x), slope)
    hessian = compiled(torch.func.hessian(lambda v: G.gelu(v).sum()))
    torch.testing.assert_close(hessian(x[0]), torch.diag(curvature[0]))


def test_autocast_leaves_the_input_alone_and_casts_weights():
    x, b = torch.randn(3, 8), torch.randn(8)
    w, c = torch.randn(4, 8, requires_grad=True), torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert G.gelu(x).dtype == torch.float32
        h = x.bfloat16().requires_grad_()
        y = G.bias_gelu_linear(h, b, w, c)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert w.grad.dtype == torch.float32 and c.grad.tolist() == [3.0] * 4


# ---- refusals, and what a module must survive ----


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: G.gelu(torch.arange(3)), "needs float64, float32, float16 or bfloat16"),
        (lambda: G.gelu(torch.randn(3).to(torch.complex64)), "needs float64, float32, float16 or bfloat16"),
        (lambda: G.gelu(torch.ones(3, dtype=torch.bool)), "needs float64, float32, float16 or bfloat16"),
        (lambda: G.bias_gelu(torch.randn(2, 3), torch.randn(4)), "must have shape \\[3\\]|must have shape \\[N\\]"),
        (lambda: G.bias_gelu(torch.randn(2, 3), torch.randn(1, 3)), "must have shape"),
        (lambda: G.bias_gelu(torch.tensor(1.0), torch.randn(1)), "dimension"),
        (lambda: G.bias_gelu(torch.randn(2, 3), torch.randn(3).double()), "dtype of x"),
        (lambda: G.bias_gelu(torch.randn(2, 3).half(), torch.randn(3).bfloat16()), "dtype of x"),
        (lambda: OPS.gelu_backward(torch.randn(3).half(), torch.randn(3)), "dtype"),
        (lambda: OPS.gelu_backward(torch.randn(4), torch.randn(3)), "shape"),
        (lambda: G.bias_gelu_linear(torch.randn(2, 3), None, torch.randn(4, 5)), "weight must have shape"),
        (lambda: G.bias_gelu_linear(torch.randn(2, 3), None, torch.randn(4, 3, device="meta")), "weight is on meta"),
        (lambda: G.gelu(torch.arange(3, device="meta")), "needs float64"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(RuntimeError, match=words):
        call()


def test_module_pickles_copies_and_compiles():
    module = G.GeluCuda(save="input")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert (other.backend, other.save, other.inputs) == ("auto", "input", 1)
        x = torch.randn(3, 4)
        torch.testing.assert_close(other(x), aten(x))
        y = torch.compile(other.forward_mlp, fullgraph=True, backend="aot_eager")(
            x, torch.eye(4), None, torch.eye(4), None
        )
        torch.testing.assert_close(y, aten(x))
    assert module.manifest()["gelu on cpu"].startswith("cpu (")
    assert not list(module.parameters()) and module.state_dict() == {}


def test_gptframe_hears_of_mistakes_as_such():
    registry = pytest.importorskip("gptframe.registry")
    from gptframe.errors import UserError

    pytest.importorskip("gptframe_gelu_cuda.plugin")
    for option, value in (("epilogue", "maybe"), ("backend", 5), ("save", None)):
        with pytest.raises(UserError, match=f"model.activation.{option}={value!r} must be"):
            registry.build("activation", {"name": "gelu_cuda", option: value}, key="model.activation")
    module = registry.build("activation", {"name": "gelu_cuda"}, key="model.activation")
    module.backend = "cuda"  # as if made where there was a GPU
    with pytest.raises(UserError, match="backend=cuda, but the tensor is on cpu; use backend=auto"):
        module(torch.ones(1))


def test_module_refuses_what_it_cannot_do():
    for options, words in (
        ({"backend": "gpu"}, "auto, cuda, cpu, aten"),
        ({"save": "none"}, "both or input"),
        ({"backend": "aten", "save": "input"}, "backend=aten"),
        ({"backend": "cpu", "epilogue": True}, "use backend=auto"),
        ({"save": "input", "epilogue": True}, "leave out save=input or epilogue"),
        ({"epilogue": "maybe"}, "true or false, not 'maybe'"),
    ):
        with pytest.raises(G.BackendError, match=words):
            G.GeluCuda(**options)
    assert G.GeluCuda().forward_mlp is None and G.GeluCuda().forward_mlp_option is None
    assert G.GeluCuda(save="input").forward_mlp_option is None
    assert G.GeluCuda(backend="cpu")(torch.empty(2, device="meta")).device.type == "meta"
