"""The conformance kit as a pytest fixture: `pytest_plugins = ["gptframe.testing.pytest_plugin"]` in a test file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptframe import plugins, registry
from gptframe.testing.kit import Report
from gptframe.testing.kit import conformance as run_conformance


@pytest.fixture
def conformance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """`conformance(kind, name, options=None, cfg=None, only=None, plugin=None)`: fails with every broken promise.

    `plugin` is a file to load first, relative to the test's own folder, or a module. What it registers is gone after
    the test.
    """
    monkeypatch.setattr(registry, "_table", {kind: dict(rows) for kind, rows in registry._table.items()})
    monkeypatch.setattr(registry, "_imported", set(registry._imported))
    monkeypatch.setattr(plugins, "_loaded", dict(plugins._loaded))

    def check(kind: str, name: str, options: Any = None, *, plugin: str | Path | None = None, **how: Any) -> Report:
        if plugin is not None:
            plugins.load([str(plugin)], base=request.path.parent)
        report = run_conformance(kind, name, options, **how)
        report.raise_failures()
        return report

    return check
