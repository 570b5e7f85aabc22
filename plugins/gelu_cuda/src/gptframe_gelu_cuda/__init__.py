"""Compiled tanh-GELU for torch on CUDA and CPU: names of the package, imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "gelu": "ops",
    "bias_gelu": "ops",
    "bias_gelu_linear": "ops",
    "BackendError": "backend",
    "status": "backend",
    "GeluCuda": "module",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
