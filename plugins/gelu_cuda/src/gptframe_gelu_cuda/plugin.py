"""The registry entry `gelu_cuda`: the only file that imports gptframe, and the entry point of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptframe.errors import UserError
from gptframe.registry import register

if TYPE_CHECKING:
    from gptframe_gelu_cuda.module import GeluCuda


@register("activation", "gelu_cuda")
def gelu_cuda(backend: str = "auto", save: str = "both", epilogue: bool = False) -> GeluCuda:
    """tanh-GELU through compiled kernels; options as in `gptframe_gelu_cuda.module.GeluCuda`."""
    from gptframe_gelu_cuda.backend import BackendError
    from gptframe_gelu_cuda.module import GeluCuda

    try:
        return GeluCuda(backend, save, epilogue)
    except BackendError as error:
        raise UserError(f"model.activation: {error}") from None


gelu_cuda.inputs = 1  # type: ignore[attr-defined]
