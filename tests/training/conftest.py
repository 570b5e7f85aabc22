"""A small run that every training test starts from: data=verbs, a model of 4,000 parameters, its own cache."""

from __future__ import annotations

import csv

import pytest

from gptframe.config import Config

BASE = {
    "name": "tiny",
    "model": {
        "d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "context_length": 16, "expansion": {"factor": 2},
    },
    "data": {"name": "verbs", "baseline_order": 0},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "schedule": {"name": "cosine", "warmup_fraction": 0.1},
    "trainer": {
        "max_steps": 20, "global_batch_size": 8, "val_interval": 5, "val_batches": 3, "log_interval": 1,
        "checkpoint_interval": 5, "accelerator": "cpu",
    },
    "callbacks": {"progress": "none", "loss_curve": False, "samples": {"count": 0}},
}  # fmt: skip


def merge(base: dict, changes: dict) -> dict:
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict) and "name" not in value
        merged[key] = merge(merged[key], value) if nested else value
    return merged


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


def rows(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def without_times(run_dir):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows(run_dir)]
