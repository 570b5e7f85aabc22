"""What every test may use: one thread a worker, and a registry that is put back after each test that adds to it."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores

import pytest  # noqa: E402

from gptframe import plugins, registry  # noqa: E402


@pytest.fixture(autouse=True)
def registry_put_back(monkeypatch):
    """Plugins and registrations of a test vanish after it; the built-in names stay."""
    for kind in registry.KINDS:
        registry.names(kind)
    monkeypatch.setattr(registry, "_table", {kind: dict(rows) for kind, rows in registry._table.items()})
    monkeypatch.setattr(registry, "_imported", set(registry._imported))
    monkeypatch.setattr(plugins, "_loaded", dict(plugins._loaded))


@pytest.fixture
def fresh_registry(registry_put_back):
    """The modules that a test imports vanish as well."""
    modules = set(sys.modules)
    yield registry
    for name in set(sys.modules) - modules:
        if not name.startswith(("gptframe.", "torch", "triton", "numpy")):
            del sys.modules[name]
