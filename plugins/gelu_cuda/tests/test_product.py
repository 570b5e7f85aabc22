"""amx against sums in float64 and against torch: gradients, layouts, what is left to torch, refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from gptframe_gelu_cuda import backend
from gptframe_gelu_cuda import product as P

gptframe = pytest.importorskip("gptframe")

try:
    backend.require_product()
    HERE = True
except backend.BackendError as error:
    if "needs a processor" not in str(error):  # a build that fails is a failure
        raise
    HERE = False
amx = pytest.mark.skipif(not HERE, reason="this processor has no AMX")


def matrices(rows, wide, narrow, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, n, generator=generator).bfloat16() for n in (wide, narrow)]


def relative(a, b):
    return float((a.double() - b).norm() / b.norm())


@amx
@pytest.mark.parametrize(
    "rows,wide,narrow", [(64, 16, 16), (100, 77, 33), (65, 1, 1), (5000, 40, 100), (496, 3000, 64)]
)
def test_gradients_are_summed_in_float32(rows, wide, narrow):
    grad, x = matrices(rows, wide, narrow)
    weight, bias = P.weight_gradient(grad, x)
    assert weight.dtype == bias.dtype == torch.float32
    assert relative(weight, grad.double().T @ x.double()) < 4e-7
    assert relative(bias, grad.double().sum(0)) < 4e-7


@amx
def test_any_strides_and_no_rows_or_columns():
    grad, x = matrices(100, 48, 32)
    exact = grad.double().T @ x.double()
    for a, b in (
        (grad.T.contiguous().T, x),
        (torch.cat([grad, grad], 1)[:, :48], torch.cat([x, x], 0)[:100]),
        (torch.stack([grad, grad], 2)[..., 0], torch.stack([x, x], 2)[..., 1]),
    ):
        assert relative(P.weight_gradient(a, b)[0], exact) < 4e-7
    shared = grad[:1].expand(100, -1)
    assert relative(P.weight_gradient(shared, x)[0], shared.double().T @ x.double()) < 4e-7
    weight, bias = P.weight_gradient(grad[:0], x[:0])
    assert weight.shape == (48, 32) and not weight.any() and not bias.any()
    assert P.weight_gradient(grad[:, :0], x)[0].shape == (0, 32)
    weight, bias = P.weight_gradient(grad, x[:, :0])
    assert weight.shape == (48, 0) and relative(bias, grad.double().sum(0)) < 4e-7


@amx
def test_what_is_no_number_stays_none():
    grad, x = matrices(64, 40, 40)
    grad[3, 5], x[7, 2] = float("nan"), float("inf")
    weight, bias = P.weight_gradient(grad, x)
    assert weight[5].isnan().all() and bias[5].isnan() and not weight[6, 3].isnan()
    assert not weight[:, 2].isfinite().any()


@amx
def test_the_bits_do_not_depend_on_threads():
    grad, x = matrices(3000, 200, 130)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(P.weight_gradient(grad, x))
    finally:
        torch.set_num_threads(before)
    for weight, bias in found[1:]:
        assert torch.equal(weight, found[0][0]) and torch.equal(bias, found[0][1])


@amx
@pytest.mark.parametrize(
    "grad,x,words",
    [
        (torch.ones(4, 3), torch.ones(4, 3).bfloat16(), "the gradient must be bfloat16"),
        (torch.ones(4, 3).bfloat16(), torch.ones(4, 3), "x must be bfloat16"),
        (torch.ones(4, 3).bfloat16(), torch.ones(5, 3).bfloat16(), "4 rows and x 5"),
        (torch.ones(4).bfloat16(), torch.ones(4, 1).bfloat16(), "must be a matrix"),
    ],
)
def test_what_does_not_fit_is_refused(grad, x, words):
    with pytest.raises(RuntimeError, match=words):
        P.weight_gradient(grad, x)


@amx
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_has_the_values_of_torch_and_closer_gradients(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 150, 96, generator=generator).bfloat16()
    weight, bias = (torch.randn(*s, generator=generator).to(dtype) for s in ((130, 96), (130,)))
    grad = torch.randn(2, 150, 130, generator=generator).bfloat16()

    def run(function, cast=lambda t: t, rounded=lambda t: t):
        leaves = [cast(t).requires_grad_() for t in (x, weight, bias)]
        y = function(leaves[0], *map(rounded, leaves[1:]))
        return [y.detach(), *torch.autograd.grad(y, leaves, cast(grad))]

    ours = run(P.AMX())
    torchs = run(F.linear, rounded=lambda t: t.bfloat16())
    exact = run(F.linear, lambda t: t.bfloat16().double())
    assert torch.equal(ours[0], torchs[0]) and torch.equal(ours[1], torchs[1])
    for a, b, c in zip(ours[2:], torchs[2:], exact[2:], strict=True):
        assert a.dtype == dtype and relative(a, c) <= 1.01 * relative(b, c)
    if dtype == torch.float32:
        assert all(relative(a, c) < 4e-7 for a, c in zip(ours[2:], exact[2:], strict=True))


@amx
@pytest.mark.parametrize("free", [(True, False, False), (False, True, False), (False, False, True)])
def test_what_is_frozen_costs_nothing(free, monkeypatch):
    counted = []
    gradient = P._ops.weight_gradient
    monkeypatch.setattr(P._ops, "weight_gradient", lambda *given: counted.append(1) or gradient(*given))
    shapes, kept = ((64, 48), (32, 48), (32,)), []
    x, weight, bias = (torch.ones(s, requires_grad=f) for s, f in zip(shapes, free, strict=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = P.AMX()(x.bfloat16(), weight, bias)
    y.sum().backward()
    assert [s for s, f in zip(((32, 48), (64, 48)), free, strict=False) if f] == kept
    assert len(counted) == free[1] and (bias.grad is None or bias.grad.tolist() == [64.0] * 32)


@amx
def test_the_dtype_is_autocasts():
    weight = torch.ones(32, 48, requires_grad=True)
    for given, mixed in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        x = torch.ones(64, 48, dtype=given)
        with torch.autocast("cpu", mixed):
            y = P.AMX()(x, weight, None)
        assert (y is None) == (mixed == torch.float16)
        if y is not None:
            y.sum().backward()
            assert weight.grad.eq(64).all()
    assert P.AMX()(torch.ones(64, 0).bfloat16(), weight[:, :0], None) is None


def models(*overrides):
    from gptframe import plugins
    from gptframe.compose import compose_config
    from gptframe.config import Config
    from gptframe.model import build_model

    plugins.load_entry_points()
    size = ["model=mini", "model.vocab_size=64", "model.context_length=96", *overrides]
    return [
        build_model(Config.from_dict(compose_config([*size, f"model.linear.backend={name}"])).model, seed=1)
        for name in ("amx", "torch")
    ]


def step(model):
    ids = torch.randint(0, 64, (2, 96), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, None, ids.roll(-1, 1)) / ids.numel()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@amx
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["attention=gqa", "activation=swiglu"],
        ["model.tie_head=false"],
        ["activation=gelu_cuda"],
        ["activation=gelu_cuda", "model.activation.save=input"],
        ["norm_placement=post"],
    ],
    ids=lambda o: "".join(o) or "plain",
)
def test_a_model_has_the_loss_and_gradients_of_torch(overrides, monkeypatch):
    counted = []
    gradient = P._ops.weight_gradient
    monkeypatch.setattr(P._ops, "weight_gradient", lambda *given: counted.append(1) or gradient(*given))
    ours, theirs = models(*overrides)
    (loss, found), (exact, wanted) = step(ours), step(theirs)
    assert abs(loss - exact) < 1e-2
    for name, g in found.items():
        assert g.dtype == torch.float32 and relative(g, wanted[name].double()) < 5e-2, name
    layers = sum(isinstance(m, torch.nn.Linear) for m in ours.modules())
    assert len(counted) == layers + (ours.head is None)  # the head multiplies, tied or not


@amx
@pytest.mark.parametrize("overrides", [[], ["activation=gelu_cuda", "model.activation.save=input"]], ids=len)
def test_of_a_frozen_model_only_the_head_is_multiplied(overrides, monkeypatch):
    counted = []
    gradient = P._ops.weight_gradient
    monkeypatch.setattr(P._ops, "weight_gradient", lambda *given: counted.append(1) or gradient(*given))
    ours, theirs = models(*overrides)
    for model in (ours, theirs):
        for name, p in model.named_parameters():
            p.requires_grad_("embedding" in name)
    (_, found), (_, wanted) = step(ours), step(theirs)
    assert len(counted) == 1
    for name, g in found.items():
        assert g is None if wanted[name] is None else relative(g, wanted[name].double()) < 5e-2, name


@amx
def test_a_model_is_one_graph():
    ours, theirs = models()
    compiled = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    ids = torch.arange(80)[None] % 64
    found = []
    for forward, model in ((compiled, ours), (theirs.forward, theirs)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(ids, None, ids)
        loss.backward()
        found.append((loss.detach(), next(p.grad for n, p in model.named_parameters() if n.endswith("up.weight"))))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-2, atol=0)
    assert relative(found[0][1], found[1][1].double()) < 5e-2


@amx
def test_what_is_left_to_torch_is_said_and_not_reported_as_ours(tmp_path):
    for precision, notes in (("fp32", 1), ("bf16", 0)):
        run = tmp_path / precision
        options = ["model=mini", "model.linear.backend=amx", f"precision={precision}", "trainer.max_steps=1"]
        program = "import sys; from gptframe.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
        done = subprocess.run(
            [sys.executable, "-c", program, *options, "trainer.val_interval=1", f"run_dir={run}"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("torch computes products in float32 on cpu, not amx") == notes
        assert ("torch (float32, not amx)" in (run / "manifest.json").read_text()) == bool(notes)


@amx
def test_one_word_names_all_that_is_fast(tmp_path):
    run = tmp_path / "run"
    program = "import sys; from gptframe.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
    short = ["trainer.max_steps=1", "trainer.val_batches=1", "data.baseline_order=0", "trainer.compile=false"]
    done = subprocess.run(
        [sys.executable, "-c", program, "experiment=amx", *short, f"run_dir={run}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ran = (run / "manifest.json").read_text()
    for what in ("products on cpu", "attention on cpu", "gelu on cpu"):
        assert f'"{what}": ' in ran and f'"{what}": "torch' not in ran and "aten" not in ran
    assert "compile: false" in (run / "config.yaml").read_text()  # the command line wins


def test_a_processor_without_amx_is_told_so(monkeypatch):
    from gptframe.errors import UserError

    monkeypatch.setattr(backend, "_product", None)
    monkeypatch.setattr(backend, "_variant", lambda path, what: "none")
    with pytest.raises(UserError, match=r"model\.linear\.backend: amx needs a processor with AMX and bfloat16"):
        models()


@amx
def test_it_keeps_the_contract_of_a_backend():
    from gptframe import plugins
    from gptframe.testing import conformance

    plugins.load_entry_points()
    report = conformance("linear_backend", "amx")
    assert report.ok, report.failures
    assert not report.passed["contract"].startswith("0 of")  # it takes nothing without gradients
