"""Fixtures of the training tests: a config of the tiny run, its own token cache, and one run that nothing stopped."""

from __future__ import annotations

import pytest
from tiny_run import BASE, merge

from gptframe.config import Config


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    return tmp_path_factory.getbasetemp().parent / "gptframe-tokens"  # shared by the workers


@pytest.fixture(scope="session")
def straight(tmp_path_factory, token_cache):
    """The run directory of BASE, trained without interruption."""
    from gptframe.training.run import train

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPTFRAME_CACHE", str(token_cache))
        return train(
            Config.from_dict({**BASE, "run_dir": str(tmp_path_factory.mktemp("straight") / "run")}), []
        ).run_dir


@pytest.fixture
def make_config(tmp_path, monkeypatch, token_cache):
    """`make_config(trainer={...}, ...)`: a checked Config that differs from BASE by what is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTFRAME_CACHE", str(token_cache))

    def make(**changes):
        return Config.from_dict(merge(BASE, changes))

    return make
