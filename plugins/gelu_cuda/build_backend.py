"""setuptools as the build backend, which asks for torch only where this interpreter does not have its headers.

pip builds in an isolated environment. The compiled part needs torch's headers and libtorch_cpu, at least version 2.13,
and the ones that are installed beside pip will do: a wheel fits all later versions. Without this, every build would
download torch.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

_spec = importlib.util.spec_from_file_location(
    "_toolchain", Path(__file__).resolve().parent / "src/gptframe_gelu_cuda/toolchain.py"
)
_toolchain = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_toolchain)


def _torch() -> list[str]:
    found = _toolchain.find_torch()
    enough = found is not None and _toolchain.torch_version(found) >= _toolchain.MINIMUM_TORCH
    return [] if enough else ["torch>=2.13"]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _torch()
