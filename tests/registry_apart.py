"""A registry of one's own for a while, as a new process has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from gptframe import plugins, registry


@contextlib.contextmanager
def registry_apart() -> Iterator[None]:
    """What is registered and imported as a plugin in here vanishes after it; the built-in names stay."""
    for kind in registry.KINDS:
        registry.names(kind)
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_table", {kind: dict(rows) for kind, rows in registry._table.items()})
        patch.setattr(registry, "_imported", set(registry._imported))
        patch.setattr(plugins, "_loaded", dict(plugins._loaded))
        yield
    for name in set(sys.modules) - modules:  # or another file of the same name would get a longer one
        if name.startswith("gptframe_plugin_"):
            del sys.modules[name]
