"""What every test may use: one thread a worker, and a registry that is put back after each test that adds to it."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores

import pytest  # noqa: E402
from registry_apart import registry_apart  # noqa: E402

from gptframe import registry  # noqa: E402


@pytest.fixture(autouse=True)
def registry_put_back():
    """Plugins and registrations of a test vanish after it."""
    with registry_apart():
        yield


@pytest.fixture
def fresh_registry(registry_put_back):
    """The modules that a test imports vanish as well."""
    modules = set(sys.modules)
    yield registry
    for name in set(sys.modules) - modules:
        if not name.startswith(("gptframe.", "torch", "triton", "numpy")):
            del sys.modules[name]
