"""The registry entry `gelu_cuda`: the only file that imports gptframe, and the entry point of this package."""

from __future__ import annotations

from typing import Any

from gptframe.errors import UserError
from gptframe.registry import register


# Any: a name that only type checkers can resolve would keep gptframe from checking the types of the options.
@register("activation", "gelu_cuda")
def gelu_cuda(backend: str = "auto", save: str = "both", epilogue: bool = False) -> Any:
    """tanh-GELU through compiled kernels; options as in `gptframe_gelu_cuda.module.GeluCuda`."""
    from gptframe_gelu_cuda.backend import BackendError
    from gptframe_gelu_cuda.module import GeluCuda

    try:
        module = GeluCuda(backend, save, epilogue)
    except BackendError as error:
        raise UserError(f"model.activation: {error}") from None
    module.refusal = UserError  # backend=cpu on a GPU is a person's mistake, too, and shows only when it runs
    return module


gelu_cuda.inputs = 1  # type: ignore[attr-defined]
