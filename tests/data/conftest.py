"""A cache of their own for tests of data, so that none reads what another run left."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GPTFRAME_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
