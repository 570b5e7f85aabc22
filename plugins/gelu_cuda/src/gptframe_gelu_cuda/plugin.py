"""The registry entries `gelu_cuda`, `flash_cpu` and `amx`: the only file that imports gptframe, and the entry point."""

from __future__ import annotations

from typing import Any

from gptframe.config import ModelConfig
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


@register("attention_backend", "flash_cpu")
def flash_cpu(cfg: ModelConfig) -> Any:
    """Causal attention on a CPU through compiled kernels: forward and backward, windows, GQA, several documents."""
    from gptframe_gelu_cuda.attention import FlashCPU
    from gptframe_gelu_cuda.backend import BackendError

    if cfg.head_dim % 16:
        raise UserError(
            f"model.attention.backend=flash_cpu needs heads of a multiple of 16, and these are {cfg.head_dim}"
        )
    try:
        return FlashCPU()
    except BackendError as error:
        raise UserError(f"model.attention.backend: {error}") from None


@register("linear_backend", "amx")
def amx(cfg: ModelConfig) -> Any:
    """Linear layers in bfloat16 training on a CPU with AMX: a compiled kernel for the gradients of weights."""
    from gptframe_gelu_cuda.backend import BackendError
    from gptframe_gelu_cuda.product import AMX

    try:
        return AMX()
    except BackendError as error:
        raise UserError(f"model.linear.backend: {error}") from None
