"""The activation `gelu_cuda` as a module: chooses a backend and offers the fused forms to the MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gptframe_gelu_cuda import backend as backends
from gptframe_gelu_cuda import ops


class _GeluLinear(torch.autograd.Function):
    """linear(gelu(h + bias), weight, out_bias) with a linear backend's products, keeping h and no other activation."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, bias: Tensor | None, weight: Tensor, out_bias: Tensor | None, linear: Any
    ) -> Tensor:
        ctx.save_for_backward(h, bias, weight)
        ctx.linear, ctx.out_dtype = linear, None if out_bias is None else out_bias.dtype
        return linear.linear(ops.gelu(h) if bias is None else ops.bias_gelu(h, bias), weight, out_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, bias, weight = ctx.saved_tensors
        rows, to_weight = grad.reshape(-1, grad.shape[-1]), None
        if ctx.needs_input_grad[2]:
            y = ops.activated_again(h, bias)
            to_y, to_weight = ctx.linear.gradients(rows, y.reshape(-1, y.shape[-1]), weight)
            to_weight = to_weight.to(weight.dtype)
            del y
        else:
            to_y = rows @ weight.to(rows.dtype)
        if bias is None:
            to_h, to_bias = torch.ops.gptframe_gelu.gelu_backward(to_y.view_as(h), h), None
        else:
            to_h, to_bias = torch.ops.gptframe_gelu.bias_gelu_backward(to_y.view_as(h), h, bias)
        to_out = None if ctx.out_dtype is None else rows.sum(0).to(ctx.out_dtype)
        return to_h, to_bias, to_weight, to_out, None


class GeluCuda(nn.Module):
    """tanh-GELU (Hendrycks and Gimpel, 2016) through compiled kernels.

    Args:
        backend: `auto` takes the compiled kernel of each tensor's device, or ATen; `cuda` and `cpu` insist on theirs;
            `aten` never compiles or loads anything.
        save: what training keeps for the backward. `both` the input and the output of the GELU, the output for the
            gradient of the projection after it; `input` only the input, and the output is computed once more.
        epilogue: run the MLP through cuBLASLt's GELU epilogues; refused unless `benchmarks/gelu_epilogue.py` has
            found it faster on this GPU.

    Raises:
        BackendError: the backend cannot run here, or an option has no such value.
    """

    inputs = 1
    refusal: type[Exception] = backends.BackendError  # what a tensor on another device than the backend's raises

    def __init__(self, backend: str = "auto", save: str = "both", epilogue: bool = False):
        super().__init__()
        backends.require(backend)
        if save not in ("both", "input"):
            raise backends.BackendError(f"save must be both or input, not {save!r}")
        if not isinstance(epilogue, bool):
            raise backends.BackendError(f"epilogue must be true or false, not {epilogue!r}")
        if backend == "aten" and (save != "both" or epilogue):
            raise backends.BackendError("save=input and epilogue belong to the compiled backends, not to backend=aten")
        if epilogue and backend == "cpu":
            raise backends.BackendError("epilogue runs on CUDA, and backend=cpu insists on the CPU; use backend=auto")
        if epilogue and save == "input":
            raise backends.BackendError("epilogue keeps the GELU's input and output: leave out save=input or epilogue")
        if epilogue:
            from gptframe_gelu_cuda import epilogue as cublaslt

            cublaslt.require()
        self.backend, self.save, self.epilogue = backend, save, epilogue

    def _check_device(self, x: Tensor) -> None:
        if self.backend in ("cuda", "cpu") and x.device.type not in (self.backend, "meta"):
            raise self.refusal(f"backend={self.backend}, but the tensor is on {x.device}; use backend=auto")

    def forward(self, x: Tensor) -> Tensor:
        """gelu(x), any shape."""
        if self.backend == "aten":
            return F.gelu(x, approximate="tanh")
        self._check_device(x)
        return ops.gelu(x)

    def forward_with_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """gelu(x + bias), x [..., N] and bias [N]."""
        if self.backend == "aten":
            return F.gelu(x + bias.to(x.dtype), approximate="tanh")
        self._check_device(x)
        return ops.bias_gelu(x, bias)

    @property
    def forward_mlp(self) -> Callable[..., Tensor] | None:
        """The whole MLP, where an option asks for more than the activation; else None.

        A function (x [..., D], up_weight [N, D], up_bias [N] or None, down_weight [M, N], down_bias [M] or None)
        -> [..., M].
        """
        if self.epilogue:
            return self._through_cublaslt
        return self._saving_input if self.save == "input" else None

    @property
    def forward_mlp_through(self) -> Callable[..., Tensor] | None:
        """The same with another's products: a function (linear backend, x, ...) -> [..., M], or None."""
        return self._saving_input_through if self.save == "input" else None

    @property
    def forward_mlp_option(self) -> str | None:
        """The option that asks for `forward_mlp` alone; None where none does."""
        return "epilogue=true" if self.epilogue else None

    def _through_cublaslt(self, x: Tensor, *projections: Tensor | None) -> Tensor:
        from gptframe_gelu_cuda import epilogue as cublaslt

        self._check_device(x)
        return cublaslt.mlp(x, *projections)

    def _saving_input(
        self, x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None
    ) -> Tensor:
        self._check_device(x)
        return ops.bias_gelu_linear(F.linear(x, up_weight), up_bias, down_weight, down_bias)

    def _saving_input_through(
        self,
        linear: Any,
        x: Tensor,
        up_weight: Tensor,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        self._check_device(x)
        h = linear.linear(x, up_weight)
        if ops.transformed():
            return linear.linear(ops.gelu(h) if up_bias is None else ops.bias_gelu(h, up_bias), down_weight, down_bias)
        return _GeluLinear.apply(h, up_bias, down_weight, down_bias, linear)

    def manifest(self) -> dict[str, str]:
        """What ran, for the run's manifest: device type -> implementation and where it came from."""
        if self.backend == "aten":
            return {"gelu": f"aten (torch {torch.__version__})"}
        return {f"gelu on {device}": text for device, text in backends.status().items()}

    def extra_repr(self) -> str:
        """The options that differ from the defaults."""
        epilogue = ", epilogue=True" if self.epilogue else ""
        return f"backend={self.backend}, save={self.save}{epilogue}"
