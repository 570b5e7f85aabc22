"""The MLP through cuBLASLt, without a GPU: it compiles and links, its shapes are right, it refuses or falls back."""

from __future__ import annotations

import ctypes
import json
import subprocess

import gptframe_gelu_cuda as G
import pytest
import torch
import torch.nn.functional as F
from gptframe_gelu_cuda import backend, epilogue, toolchain


def test_compiles_links_and_loads(tmp_path):
    """Against the headers and the library of cuBLASLt, with every symbol found."""
    cxx, torch_folder = toolchain.find_cxx(), toolchain.find_torch()
    try:
        command = toolchain.epilogue_command(cxx, torch_folder, tmp_path / "epilogue.so")
    except toolchain.CompileError as error:
        pytest.skip(str(error))
    toolchain.run(command)  # -Wl,--no-undefined among its flags
    if torch.version.cuda:
        torch.ops.load_library(str(tmp_path / "epilogue.so"))
        assert torch._C._dispatch_has_kernel_for_dispatch_key("gptframe_gelu::linear_gelu", "CUDA")


class Matrix(ctypes.Structure):
    _fields_ = [(name, ctypes.c_longlong) for name in ("rows", "columns", "leading")]


class Plan(ctypes.Structure):
    _fields_ = [("backward", ctypes.c_int), ("transpose_a", ctypes.c_int), ("a", Matrix), ("b", Matrix), ("d", Matrix)]


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    cxx = toolchain.find_cxx()
    folder = tmp_path_factory.mktemp("plan")
    unit = folder / "plan.cpp"
    unit.write_text(
        '#include "gelu_epilogue_plan.h"\n'
        'extern "C" gelu::Plan plan(int backward, long long rows, long long hidden, long long width) {\n'
        "  return backward ? gelu::backward_plan(rows, hidden, width) : gelu::forward_plan(rows, hidden, width);\n}\n"
    )
    subprocess.run(
        [*cxx, "-std=c++17", "-shared", "-fPIC", f"-I{toolchain.CSRC}", str(unit), "-o", str(folder / "plan.so")],
        check=True,
    )
    library = ctypes.CDLL(str(folder / "plan.so"))
    library.plan.restype = Plan
    library.plan.argtypes = [ctypes.c_int] + [ctypes.c_longlong] * 3
    return library.plan


def column_major(t: torch.Tensor, m: Matrix) -> torch.Tensor:
    """What cuBLASLt sees in the memory of `t`."""
    assert m.leading >= m.rows and t.numel() >= m.leading * (m.columns - 1) + m.rows
    return t.flatten().as_strided((m.rows, m.columns), (1, m.leading))


@pytest.mark.parametrize("rows, hidden, width", [(5, 16, 8), (1, 8, 24), (33, 40, 16)])
def test_the_column_major_plan_computes_the_row_major_product(plans, rows, hidden, width):
    x, w = torch.randn(rows, width).double(), torch.randn(hidden, width).double()
    plan = plans(0, rows, hidden, width)
    assert plan.transpose_a and not plan.backward
    product = column_major(w, plan.a).t() @ column_major(x, plan.b)
    out = torch.empty(rows, hidden, dtype=torch.float64)
    column_major(out, plan.d).copy_(product)
    torch.testing.assert_close(out, x @ w.t())

    g, w2 = torch.randn(rows, width).double(), torch.randn(width, hidden).double()
    plan = plans(1, rows, hidden, width)
    assert plan.backward and not plan.transpose_a
    column_major(out, plan.d).copy_(column_major(w2, plan.a) @ column_major(g, plan.b))
    torch.testing.assert_close(out, g @ w2)
    assert plan.d.rows == hidden  # the bias and its gradient run along the rows of D; the aux matrix has D's shape
    assert plan.d.leading % 8 == 0


def test_the_operator_on_the_cpu_has_the_gradients_of_the_mlp():
    shapes = ((6, 8), (16, 8), (16,), (8, 16), (8,))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda *a: torch.ops.gptframe_gelu.mlp(*a)[0], leaves)
    x, w1, b1, w2, b2 = leaves
    want = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)
    torch.testing.assert_close(torch.ops.gptframe_gelu.mlp(*leaves)[0], want)
    torch.library.opcheck(torch.ops.gptframe_gelu.mlp.default, tuple(leaves))
    compiled = torch.compile(lambda *a: torch.ops.gptframe_gelu.mlp(*a)[0].sum(), fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), leaves))


@pytest.mark.parametrize("bias", [True, False])
def test_what_does_not_fit_runs_as_separate_kernels(bias):
    x, w1, w2 = torch.randn(2, 3, 5), torch.randn(7, 5), torch.randn(5, 7)
    b1 = torch.randn(7) if bias else None
    want = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2)
    torch.testing.assert_close(epilogue.mlp(x, w1, b1, w2, None), want)


def test_a_second_derivative_is_refused_not_wrong():
    leaves = [torch.randn(s, requires_grad=True) for s in ((6, 8), (16, 8), (16,), (8, 16), (8,))]
    out = torch.ops.gptframe_gelu.mlp(*leaves)[0].sum()
    with pytest.raises(RuntimeError, match="no second derivative.*activation.epilogue=false"):
        torch.autograd.grad(out, leaves, create_graph=True)


def test_a_graph_can_be_compiled_where_the_tensors_fit(monkeypatch):
    """The choice between epilogue and separate kernels must not ask a traced tensor for its address."""
    leaves = [torch.randn(s).bfloat16() for s in ((6, 8), (16, 8), (16,), (8, 16))]
    monkeypatch.setattr(epilogue, "DEVICE", "cpu")  # the operators exist there, too
    assert epilogue.unfit(*leaves) is None
    got = torch.compile(epilogue.mlp, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(got, epilogue.mlp(*leaves))


class Pretend:
    """A tensor on a GPU, as far as `unfit` looks."""

    def __init__(self, *shape, dtype=torch.bfloat16, at=256):
        self.shape, self.dtype, self.at = torch.Size(shape), dtype, at
        self.device = torch.device("cuda:0")

    def numel(self):
        return self.shape.numel()

    def data_ptr(self):
        return self.at


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, None),
        ({"x": Pretend(4, 16, dtype=torch.float32)}, "not a 16-bit type"),
        ({"b": None}, "no bias"),
        ({"b": Pretend(32, dtype=torch.float32)}, "dtypes differ"),
        ({"w1": Pretend(36, 16), "b": Pretend(36), "w2": Pretend(16, 36)}, "not a multiple of 8"),
        ({"w2": Pretend(12, 32)}, "not a multiple of 8"),
        ({"b": Pretend(8)}, "shapes differ"),
        ({"w2": Pretend(16, 24)}, "shapes differ"),
        ({"x": Pretend(0, 16)}, "empty"),
        ({"w1": Pretend(32, 16, at=258)}, "not aligned"),
    ],
)
def test_what_fits(change, words):
    tensors = {"x": Pretend(4, 16), "w1": Pretend(32, 16), "b": Pretend(32), "w2": Pretend(16, 32)} | change
    said = epilogue.unfit(tensors["x"], tensors["w1"], tensors["b"], tensors["w2"])
    assert (said is None) if words is None else words in said


def test_refused_without_a_gpu_a_test_or_a_good_verdict(monkeypatch, tmp_path):
    monkeypatch.setenv("GPTFRAME_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(G.BackendError, match="needs a GPU of compute capability 9.0"):
        G.GeluCuda(epilogue=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretend 100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(G.BackendError, match="untested on Pretend 100.*gelu_epilogue.py"):
        G.GeluCuda(epilogue=True)
    path = epilogue.record(False, "ratio 0.97")
    with pytest.raises(G.BackendError, match="found slower on Pretend 100.*0.97"):
        G.GeluCuda(epilogue=True)
    path.write_text("{")  # as a full disk leaves it
    with pytest.raises(G.BackendError, match="untested on Pretend 100"):
        G.GeluCuda(epilogue=True)
    epilogue.record(True, "ratio 1.03")
    assert len(json.loads(path.read_text())) == 1
    with pytest.raises(G.BackendError, match="compute capability 8.0, 9.0 is needed"):
        G.GeluCuda(epilogue=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(backend, "_built", lambda *_: tmp_path / "none.so")
    with pytest.raises(G.BackendError, match="do not load"):
        G.GeluCuda(epilogue=True)
