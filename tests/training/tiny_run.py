"""A small run that every training test starts from: data=verbs, a model of 4,000 parameters; and how to read it."""

from __future__ import annotations

import csv

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


def rows(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def without_times(run_dir):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows(run_dir)]
