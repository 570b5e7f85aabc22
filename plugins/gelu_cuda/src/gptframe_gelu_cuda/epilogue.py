"""The MLP as one autograd operator through cuBLASLt's GELU epilogues: off by default, and refused where untested.

`benchmarks/gelu_epilogue.py` measures it on the GPU at hand against separate kernels and records the verdict; only a
verdict "faster" for this GPU, torch and CUDA lets `epilogue=True` pass. Saved for the backward: x, the GELU's input and
its output.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptframe_gelu_cuda import backend, ops

MINIMUM_CAPABILITY = (9, 0)
DEVICE = "cuda"
_loaded = False
_lock = threading.Lock()
_library = ops._library
_ops = torch.ops.gptframe_gelu


def _machine() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def _record() -> Path:
    return backend.cache_folder() / "epilogue.json"


def _verdicts(path: Path) -> dict[str, Any]:
    """Machine -> verdict. A file that is damaged holds none: measuring again is all that it costs."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def record(faster: bool, text: str) -> Path:
    """Write the verdict for this GPU, torch and CUDA; the file that `require` reads."""
    path = _record()
    verdicts = _verdicts(path) | {_machine(): {"faster": faster, "text": text}}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(verdicts, indent=1) + "\n")
    os.replace(temporary, path)
    return path


def load() -> None:
    """Build and load the cuBLASLt object.

    Raises:
        BackendError: no GPU, one older than compute capability 9.0, or nothing to build with.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        if not torch.cuda.is_available():
            raise backend.BackendError(
                "epilogue: it needs a GPU of compute capability 9.0 or newer, and none is visible"
            )
        capability = torch.cuda.get_device_capability()
        if capability < MINIMUM_CAPABILITY:
            raise backend.BackendError(
                f"epilogue: {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, "
                "9.0 is needed"
            )
        backend.open_built("epilogue")
        _loaded = True


def require() -> None:
    """Check that the epilogue was measured on this GPU and found faster, and load it.

    Raises:
        BackendError: it was not measured, was found slower, or cannot be loaded.
    """
    if torch.cuda.is_available():
        verdict = _verdicts(_record()).get(_machine())
        if verdict is None:
            raise backend.BackendError(
                f"epilogue: untested on {_machine()}; python benchmarks/gelu_epilogue.py decides and records"
            )
        if verdict.get("faster") is not True:
            raise backend.BackendError(f"epilogue: found slower on {_machine()} ({verdict.get('text')}); leave it off")
    load()


def unfit(x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor) -> str | None:
    """Why these tensors cannot go through the epilogue (the MLP then runs as separate kernels); None where they can."""
    if x.device.type != DEVICE:
        return f"x is on {x.device}"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"x is {str(x.dtype)[6:]}, not a 16-bit type"
    if up_bias is None:
        return "the up projection has no bias"
    hidden = up_weight.shape[:1]
    if up_weight.shape[1:] != x.shape[-1:] or up_bias.shape != hidden or down_weight.shape[1:] != hidden:
        return "shapes differ"
    if any(t.device != x.device for t in (up_weight, up_bias, down_weight)):
        return "devices differ"
    if any(t.dtype != x.dtype for t in (up_weight, up_bias, down_weight)):
        return "dtypes differ"
    if any(size % 8 for size in (*up_weight.shape, *down_weight.shape)):
        return f"a width of {tuple(up_weight.shape)} or {tuple(down_weight.shape)} is not a multiple of 8"
    if x.numel() == 0:
        return "x is empty"
    # A traced tensor has no address: the compiled object checks those of the real ones.
    compiling = torch.compiler.is_compiling()
    if not compiling and any(t.data_ptr() % 16 for t in (x, up_weight, up_bias, down_weight)):
        return "a tensor is not aligned to 16 bytes"
    return None


# ---- operators: the products (compiled for CUDA; elsewhere the same in separate steps), and the MLP made of them ----

_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define("linear_gelu(Tensor x, Tensor weight, Tensor bias) -> (Tensor, Tensor)", tags=_TAGS)
_library.define("linear_dgelu(Tensor grad, Tensor weight, Tensor aux) -> (Tensor, Tensor)", tags=_TAGS)
_library.define("mlp(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor? b2) -> (Tensor, Tensor, Tensor)", tags=_TAGS)
_library.define(
    "mlp_backward(Tensor grad, Tensor x, Tensor aux, Tensor y, Tensor w1, Tensor w2)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _linear_gelu(x, weight, bias):
    aux = F.linear(x, weight, bias)
    return _ops.gelu(aux), aux


def _linear_dgelu(grad, weight, aux):
    dh = _ops.gelu_backward(grad @ weight, aux)
    return dh, dh.sum(0)


def _mlp(x, w1, b1, w2, b2):
    y, aux = _ops.linear_gelu(x, w1, b1)
    return F.linear(y, w2, b2), aux, y


def _mlp_backward(grad, x, aux, y, w1, w2):
    dh, db1 = _ops.linear_dgelu(grad, w2, aux)
    return dh @ w1, dh.t() @ x, db1, grad.t() @ y


def _mlp_setup(ctx, inputs, output):
    x, w1, _, w2, b2 = inputs
    ctx.save_for_backward(x, output[1], output[2], w1, w2)
    ctx.has_bias = b2 is not None


def _mlp_grad(ctx, grad, _aux, _y):
    if torch.is_grad_enabled():  # create_graph: aux and y count as constants here, so the result would be wrong
        raise RuntimeError("epilogue: there is no second derivative through cuBLASLt; use activation.epilogue=false")
    x, aux, y, w1, w2 = ctx.saved_tensors
    dx, dw1, db1, dw2 = _ops.mlp_backward(grad.contiguous(), x, aux, y, w1, w2)
    return dx, dw1, db1, dw2, grad.sum(0) if ctx.has_bias else None


_library.impl("linear_gelu", _linear_gelu, "CompositeExplicitAutograd")
_library.impl("linear_dgelu", _linear_dgelu, "CompositeExplicitAutograd")
_library.impl("mlp", _mlp, "CompositeExplicitAutograd")
_library.impl("mlp_backward", _mlp_backward, "CompositeExplicitAutograd")


def _fake(name, function):
    torch.library.register_fake(f"gptframe_gelu::{name}", function, lib=_library)


_fake("linear_gelu", lambda x, w, b: (x.new_empty(x.shape[0], w.shape[0]), x.new_empty(x.shape[0], w.shape[0])))
_fake("linear_dgelu", lambda grad, w, aux: (torch.empty_like(aux), aux.new_empty(w.shape[1])))
_fake(
    "mlp",
    lambda x, w1, b1, w2, b2: (
        x.new_empty(x.shape[0], w2.shape[0]),
        x.new_empty(x.shape[0], w1.shape[0]),
        x.new_empty(x.shape[0], w1.shape[0]),
    ),
)
_fake(
    "mlp_backward",
    lambda grad, x, aux, y, w1, w2: (
        x.new_empty(x.shape),
        w1.new_empty(w1.shape),
        w1.new_empty(w1.shape[0]),
        w2.new_empty(w2.shape),
    ),
)
torch.library.register_autograd("gptframe_gelu::mlp", _mlp_grad, setup_context=_mlp_setup, lib=_library)


def mlp(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None = None
) -> Tensor:
    """down(gelu(up(x))) through the epilogues, or through separate kernels where they do not fit (see `unfit`).

    Args:
        x: [..., D]. up_weight: [N, D]. up_bias: [N] or None. down_weight: [M, N]. down_bias: [M] or None.
    """
    if torch.is_autocast_enabled(x.device.type):
        to = torch.get_autocast_dtype(x.device.type)
        x, up_weight, down_weight = x.to(to), up_weight.to(to), down_weight.to(to)
        up_bias, down_bias = (None if b is None else b.to(to) for b in (up_bias, down_bias))
    if unfit(x, up_weight, up_bias, down_weight):
        h = F.linear(x, up_weight)
        return F.linear(ops.gelu(h) if up_bias is None else ops.bias_gelu(h, up_bias), down_weight, down_bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = _ops.mlp(rows, up_weight.contiguous(), up_bias, down_weight.contiguous(), down_bias)[0]
    return out.reshape(*x.shape[:-1], out.shape[-1])
