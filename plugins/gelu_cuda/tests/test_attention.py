"""flash_cpu against the formula in float64 and against torch's attention: values, gradients, layouts, refusals."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from gptframe_gelu_cuda import attention as A
from gptframe_gelu_cuda import backend

try:
    NAME = backend.require_attention().partition(",")[0]
except backend.BackendError as error:
    if "needs a processor" not in str(error):  # a build that fails is a failure
        raise
    pytest.skip(str(error), allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16]


def inputs(shape, dtype=torch.float32, kv_heads=None, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    rows, heads, tokens, width = shape
    made = [(rows, n, tokens, width) for n in (heads, kv_heads or heads, kv_heads or heads, heads)]
    return [(scale * torch.randn(s, generator=generator)).to(dtype) for s in made]


def formula(q, k, v, window=None, first=None):
    groups, tokens = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    distance = tokens[:, None] - tokens
    seen = ((distance >= 0) & (distance < (window or len(tokens))))[None, None]
    if first is not None:
        seen = seen & (tokens >= first[:, None, :, None])
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return torch.softmax(scores, -1) @ v


def both(q, k, v, g, **options):
    """Output and three gradients, ours and those of the formula in float64."""
    found = []
    for function, cast in ((A.attention, lambda t: t), (formula, lambda t: t.double())):
        leaves = [cast(t.detach()).requires_grad_() for t in (q, k, v)]
        y = function(*leaves, **options)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, cast(g))])
    return found


SHAPES = [
    ((2, 2, 64, 64), None, {}),
    ((1, 4, 129, 32), 2, {}),
    ((2, 3, 300, 16), 1, {"window": 50}),
    ((1, 2, 257, 128), None, {"window": 1000}),
    ((1, 1, 1, 16), None, {"window": 1}),
    ((1, 2, 66, 256), None, {"window": 1}),
]


@pytest.mark.parametrize("shape,kv_heads,options", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(dtype, shape, kv_heads, options):
    q, k, v, g = inputs(shape, dtype, kv_heads)
    ours, exact = both(q, k, v, g, **options)
    theirs = [t.to(dtype).double() for t in exact]
    for name, a, b, rounded in zip(("y", "q", "k", "v"), ours, exact, theirs, strict=True):
        away, size = (a.double() - b).abs().max(), b.abs().max().clamp(min=1)
        assert a.dtype == dtype and a.shape == b.shape
        assert away <= (2e-6 if dtype is torch.float32 else 2e-2) * size + (rounded - b).abs().max(), name


def test_bfloat16_is_as_close_to_the_formula_as_torch_is():
    q, k, v, g = inputs((1, 4, 512, 64), torch.bfloat16)
    ours, exact = both(q, k, v, g)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, is_causal=True)
    theirs = [y, *torch.autograd.grad(y, leaves, g)]
    for a, t, b in zip(ours, theirs, exact, strict=True):
        assert (a.double() - b).norm() <= 1.3 * (t.double() - b).norm()


def test_documents_do_not_see_each_other():
    documents = torch.tensor([[0] * 5 + [1] * 60 + [2] + [3] * 34, [7] * 100])
    first = A.first_keys(documents)
    assert first[0, :6].tolist() == [0, 0, 0, 0, 0, 5] and first[0, 65:67].tolist() == [65, 66]
    assert not first[1].any() and first.dtype == torch.int32
    q, k, v, g = inputs((2, 2, 100, 32))
    for a, b in zip(*both(q, k, v, g, first=first, window=40), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)
    whole = A.attention(q, k, v, first=first)
    alone = A.attention(q[:1, :, 5:65], k[:1, :, 5:65], v[:1, :, 5:65])
    torch.testing.assert_close(whole[:1, :, 5:65], alone, rtol=0, atol=1e-6)


def test_any_strides_and_a_result_that_heads_can_be_joined_in():
    q, k, v, g = inputs((2, 4, 70, 32))
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    sliced = [torch.cat([t, t], -1)[..., ::2] for t in (q, k, v)]  # neighbouring features two apart
    expected = formula(*(t[..., ::2].repeat(1, 1, 1, 2) for t in (q, k, v)))
    torch.testing.assert_close(A.attention(*sliced), expected, rtol=0, atol=1e-5)
    y = A.attention(*strided)
    assert torch.equal(y, A.attention(q, k, v)) and y.transpose(1, 2).is_contiguous()
    shared = k[:, :1].expand(-1, 4, -1, -1)
    torch.testing.assert_close(A.attention(q, shared, v), formula(q, shared, v), rtol=0, atol=1e-5)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    one = torch.ones(())  # a gradient that is expanded from one number
    got = torch.autograd.grad(A.attention(*leaves), leaves, one.expand(q.shape))
    want = torch.autograd.grad(formula(*leaves).sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_the_number_of_threads_changes_no_bit(two_threads):
    q, k, v, g = inputs((2, 4, 200, 64), kv_heads=2)
    found = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        y = A.attention(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, g)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow_and_a_nan_is_not_hidden(dtype):
    q, k, v, g = inputs((1, 2, 90, 32), dtype, scale=60.0)
    (y, *grads), (exact, *_) = both(q, k, v, g)
    assert all(t.isfinite().all() for t in (y, *grads))
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=0.5)
    k[0, 0, 40, 3] = math.nan
    y = A.attention(q, k, v)
    assert y[0, 0, :40].isfinite().all() and y[0, 0, 40:].isnan().all() and y[0, 1].isfinite().all()


def test_nothing_in_and_nothing_out():
    for shape in ((0, 2, 5, 16), (1, 2, 0, 16)):
        q, k, v, g = inputs(shape)
        q.requires_grad_()
        y = A.attention(q, k, v)
        y.backward(g)
        assert y.shape == q.grad.shape == shape


def test_the_function_is_one_graph():
    q, k, v, _ = inputs((1, 2, 20, 16))
    compiled = torch.compile(lambda *t: 2 * A.attention(*t, window=3), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), 2 * A.attention(q, k, v, window=3))


def test_torch_checks_the_operators():
    q, k, v, g = (t.requires_grad_() for t in inputs((1, 2, 20, 16)))
    first = torch.zeros(1, 20, dtype=torch.int32)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(A._ops.attention, (q, k, v, first, 3), test_utils=tests)
    with torch.no_grad():
        out, lse = A._ops.attention(q, k, v, None, 0)
        torch.library.opcheck(
            A._ops.attention_backward, (g, q, k, v, out, lse, None, 0), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda q, k, v: (q.double(), k.double(), v.double()), "float32 or bfloat16"),
        (lambda q, k, v: (q, k.bfloat16(), v), "one dtype"),
        (lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]), "multiple of 16"),
        (lambda q, k, v: (q, k[:, :, :5], v[:, :, :5]), "different shapes"),
        (lambda q, k, v: (q, k, v[:, :, :5]), "different shapes"),
        (lambda q, k, v: (q, k[:, [0, 0, 0]], v[:, [0, 0, 0]]), "no multiple"),
        (lambda q, k, v: (q[0], k[0], v[0]), r"\[B, H, T, D\]"),
        (lambda q, k, v: (q[:, :0], k, v), "no multiple"),  # its gradients of k and v would stay unwritten
    ],
)
def test_refusals(change, message):
    q, k, v, _ = inputs((1, 2, 20, 16))
    with pytest.raises(RuntimeError, match=message):
        A.attention(*change(q, k, v))
    with pytest.raises(RuntimeError, match="int32"):
        A.attention(q, k, v, first=torch.zeros(1, 20, dtype=torch.long))
    y = A.attention(q.requires_grad_(), k, v)
    (once,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(
        RuntimeError, match="differentiable once"
    ):  # one derivative is all there is, and a second is no silent zero
        torch.autograd.grad(once.sum(), q)


def test_a_query_that_sees_no_key_is_refused():
    """The block of such a query would be read where nothing was written, or before the first key."""
    q, k, v, _ = inputs((1, 2, 100, 16))
    for window in (0, -1, -(2**40)):
        with pytest.raises(RuntimeError, match="window.* must be at least 1"):
            A.attention(q, k, v, window=window)
    with pytest.raises(RuntimeError, match="window must be at least 1"):
        A._ops.attention(q, k, v, None, -1)
    torch.testing.assert_close(A.attention(q, k, v, window=2**40), A.attention(q, k, v), rtol=0, atol=0)
    own = torch.arange(100, dtype=torch.int32)[None]
    torch.testing.assert_close(A.attention(q, k, v, first=own), v, rtol=0, atol=1e-6)
    for first in (own + 1, own - 1):
        with pytest.raises(RuntimeError, match="first must be from 0 up to"):
            A.attention(q, k, v, first=first)


@pytest.mark.parametrize("asked", ["avx2", "amx", "sse2"])
def test_a_narrower_instruction_set_can_be_asked_for(asked):
    program = "from gptframe_gelu_cuda import backend; print(backend.require_attention())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env={**os.environ, "GPTFRAME_ATTENTION_CPU": asked},
    )  # fmt: skip
    if asked == "sse2":
        assert "must be one of avx2, avx512, avx512_bf16, amx, not 'sse2'" in done.stderr
    elif done.returncode:
        assert f"needs a processor with {asked}" in done.stderr and asked != NAME
    else:
        assert done.stdout.startswith(f"{asked}, ")


# ---- in a model ----

gptframe = pytest.importorskip("gptframe")


def models(*overrides):
    from gptframe import plugins
    from gptframe.compose import compose_config
    from gptframe.config import Config
    from gptframe.model import build_model

    plugins.load_entry_points()
    size = ["model=mini", "model.vocab_size=64", "model.context_length=96", *overrides]
    return [
        build_model(Config.from_dict(compose_config([*size, f"model.attention.backend={name}"])).model, seed=1)
        for name in ("flash_cpu", "sdpa")
    ]


def step(model, documents=None, dtype=None):
    from gptframe.model import Context

    ids = torch.randint(0, 64, (2, 96), generator=torch.Generator().manual_seed(1))
    ctx = Context(documents=documents)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = model(ids, ctx, ids.roll(-1, 1)) / ids.numel()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "overrides",
    [[], ["attention=gqa"], ["attention=sliding"], ["model.attention.qk_norm=head"], ["position=learned"]],
    ids=lambda o: "".join(o) or "plain",
)
def test_a_model_has_the_loss_and_gradients_of_torch(overrides, dtype):
    documents = (torch.arange(96) // 29).repeat(2, 1)
    for given in (None, documents):
        (loss, ours), (exact, theirs) = (step(m, given, dtype) for m in models(*overrides))
        assert abs(loss - exact) < (1e-5 if dtype is torch.float32 else 1e-2)
        for name, g in ours.items():
            away = (g - theirs[name]).norm() / theirs[name].norm()
            assert away < (1e-4 if dtype is torch.float32 else 5e-2), name


def test_a_model_is_one_graph_and_generates_as_torch_does():
    ours, theirs = models()
    compiled = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    ids = torch.arange(40)[None] % 64
    torch.testing.assert_close(compiled(ids, None, ids), theirs(ids, None, ids), rtol=1e-5, atol=0)
    from gptframe.generate import generate

    ours, theirs = (generate(m.eval(), [3, 4, 5], max_new_tokens=20, temperature=0.0) for m in (ours, theirs))
    assert ours == theirs


@pytest.mark.parametrize(
    "overrides,message",
    [
        (["model.n_heads=8"], "multiple of 16"),
        (["position=alibi"], "would compute nothing beside position=alibi"),
        (["model.dropout=0.1"], "would compute nothing beside model.dropout"),
        (["model.attention.softcap=5"], "would compute nothing beside model.attention.softcap"),
    ],
)
def test_what_it_cannot_do_is_refused(overrides, message):
    from gptframe.errors import UserError

    with pytest.raises(UserError, match=message):
        models(*overrides)


def test_what_is_left_to_torch_is_said_and_not_reported_as_ours(tmp_path):
    options = ["model=mini", "model.attention.backend=flash_cpu", "precision=fp64", "trainer.max_steps=1"]
    program = "import sys; from gptframe.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *options, "trainer.val_interval=1", f"run_dir={tmp_path / 'run'}"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch computes attention in float64 on cpu, not flash_cpu") == 1
    assert "torch (float64, not flash_cpu)" in (tmp_path / "run/manifest.json").read_text()


def test_it_keeps_the_contract_of_a_backend():
    from gptframe import plugins
    from gptframe.testing import conformance

    plugins.load_entry_points()
    report = conformance("attention_backend", "flash_cpu")
    assert report.ok and report.passed["contract"].startswith("14 of 14"), report.failures


def test_a_run_is_used_and_continued_without_the_plugin(tmp_path, monkeypatch, capsys):
    """Who computes attention is no part of what a run has learned."""
    from gptframe import load, registry
    from gptframe.cli import main

    monkeypatch.chdir(tmp_path)
    short = ["trainer.val_interval=2", "callbacks=none", "model.n_layers=1"]
    assert main(["train", "run_dir=a", "model.attention.backend=flash_cpu", "trainer.max_steps=2", *short]) == 0
    monkeypatch.delitem(registry._table["attention_backend"], "flash_cpu")
    assert load("a").generate("I work ,", max_new_tokens=3, temperature=0)
    changed = "model.attention.backend=sdpa"
    assert main(["train", "resume=a", changed, "trainer.max_steps=4"]) == 0
    assert main(["train", "run_dir=b", "init_from=a", changed, "trainer.max_steps=2", *short[:2]]) == 0
    assert main(["train", "resume=a", "trainer.max_steps=6"]) == 0  # the change is kept
    assert "flash_cpu" not in capsys.readouterr().err
