"""Weights & Biases offline: what is in the file that `wandb sync` would upload."""

import json
import struct
from pathlib import Path

import pytest

from gptframe.errors import UserError
from gptframe.training import directory
from gptframe.training.module import GPTModule
from gptframe.training.run import train

wandb = pytest.importorskip("wandb")
wandb_internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")


def records(run_dir):
    """The records of a run's only .wandb file: LevelDB's log format behind a header of seven bytes."""
    wandb.teardown()  # W&B's own process writes the file, and may still be at it after run.finish()
    (path,) = Path(run_dir).glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def values(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_a_run_holds_config_metrics_samples_and_curve(make_config):
    config = make_config(
        logger={"name": "wandb", "project": "mine", "tags": ["a"]},
        callbacks={"loss_curve": True, "samples": {"count": 2, "max_new_tokens": 4}},
    )
    run = train(config, []).run_dir
    written = records(run)
    (started,) = [r.run for r in written if r.HasField("run")]
    assert started.project == "mine" and list(started.tags) == ["a"] and started.display_name == run.name
    sent = {}
    for record in written:
        if record.HasField("config"):
            sent.update(values(record.config.update))
        elif record.HasField("run"):
            sent.update(values(record.run.config.update))
    assert sent["model"]["d_model"] == 16 and sent["schedule"]["warmup_steps"] == 2
    assert sent["parameters"] == json.loads((run / "manifest.json").read_text())["parameters"]
    history = [values(r.history.item) for r in written if r.HasField("history")]
    losses = [(h["trainer/global_step"], h["train_loss"]) for h in history if "train_loss" in h]
    assert [step for step, _ in losses] == list(range(1, 21))
    assert [h["trainer/global_step"] for h in history if "val_loss" in h] == [5, 10, 15, 20]
    assert any(h.get("samples/_type") == "table-file" for h in history)
    assert any(h.get("loss_curve/_type") == "image-file" for h in history)
    axes = {r.metric.glob_name or r.metric.name: r.metric.step_metric for r in written if r.HasField("metric")}
    assert axes["*"] == "trainer/global_step"
    assert [r.exit.exit_code for r in written if r.HasField("exit")] == [0]


def test_a_failed_job_is_marked_failed_and_the_next_has_a_run_of_its_own(make_config, monkeypatch):
    with monkeypatch.context() as patch:
        real = GPTModule.training_step

        def poisoned(self, batch, batch_idx):
            self.loss_sum = lambda *a: self.model(*a) * float("nan")
            real(self, batch, batch_idx)

        patch.setattr(GPTModule, "training_step", poisoned)
        with pytest.raises(UserError, match="not finite"):
            train(make_config(logger={"name": "wandb"}, run_dir="failed"), [])
    fine = train(make_config(logger={"name": "wandb"}, trainer={"max_steps": 2}), []).run_dir
    assert [r.exit.exit_code for r in records("failed") if r.HasField("exit")] == [1]
    assert [r.exit.exit_code for r in records(fine) if r.HasField("exit")] == [0]
    ids = [next(r.run.run_id for r in records(run) if r.HasField("run")) for run in ("failed", fine)]
    assert ids[0] != ids[1]


def test_resuming_continues_the_same_run(make_config):
    run = train(make_config(logger={"name": "wandb"}, trainer={"max_steps": 5}), []).run_dir
    config = directory.read_config(run).to_dict()
    config["trainer"]["max_steps"] = 8
    train(make_config(**{**config, "resume": str(run)}), [])
    ids = {path.name for path in run.glob("wandb/offline-run-*/run-*.wandb")}
    assert len(list(run.glob("wandb/offline-run-*"))) >= 1 and len(ids) == 1
