"""Each check of the doctor on a config, a machine or data made to fail it."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gptframe import cli, compose, register
from gptframe.config import Config
from gptframe.inspect import doctor
from gptframe.inspect.cost import rehearse
from gptframe.inspect.machine import available_memory, free_disk, versions
from gptframe.training.device import choose

GIB = 2**30


def config(*overrides: str) -> Config:
    return Config.from_dict(compose.compose_config(["trainer=cpu", "precision=fp32", *overrides]))


def device_of(found: Config):
    return choose(found.trainer, found.precision, found.model, 103_680)


def data(train: int = 100_000, val: int = 1000, vocabulary: int = 64) -> SimpleNamespace:
    return SimpleNamespace(
        train=range(train), val=range(val), tokenizer=SimpleNamespace(name="closed", vocab_size=vocabulary)
    )


def one(findings, level: str) -> doctor.Finding:
    matching = [f for f in findings if f.level == level]
    assert len(matching) == 1, list(findings)
    return matching[0]


def test_data_against_context_and_steps() -> None:
    plenty = list(doctor.check_data(config(), data()))
    assert [f.level for f in plenty] == ["ok"] and "10.2 epochs" in plenty[0].text
    # 1000 steps of 1024 tokens on 5000 tokens: 205 epochs; ten epochs are 48 steps
    by_heart = one(doctor.check_data(config(), data(5000)), "warning")
    assert "205 epochs" in by_heart.text and "trainer.max_steps=48" in by_heart.fix
    few = list(doctor.check_data(config("trainer.max_steps=1"), data(321)))
    assert "10 windows of 32 tokens" in few[1].text and "trainer.global_batch_size=10" in few[1].fix
    assert one(doctor.check_data(config(), data(val=1)), "error").text == "the validation split is empty"


def test_tokenizer_against_vocabulary() -> None:
    assert one(doctor.check_vocabulary(config(), data()), "ok")
    unused = one(doctor.check_vocabulary(config("model.vocab_size=1024"), data()), "warning")
    assert "960 rows are never used" in unused.text and unused.fix == "model.vocab_size=64"


@pytest.mark.parametrize("free,level", [(16 * GIB, "ok"), (3.4 * GIB, "warning"), (1 * GIB, "error")])
def test_memory_needed_against_memory_present(monkeypatch, free: float, level: str) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: int(free))
    found = one(doctor.check_memory(device_of(config()), int(2.5 * GIB)), level)
    assert ("trainer.micro_batch_size=16" == found.fix) == (level != "ok")


@pytest.mark.parametrize("free,level", [(100 * GIB, "ok"), (5 * GIB, "warning"), (2 * GIB, "error")])
def test_disk_for_checkpoints(monkeypatch, tmp_path, free: int, level: str) -> None:
    monkeypatch.setattr(doctor, "free_disk", lambda path: free)
    # weights and two moments in float32, two kept and one being written: 3 * 12 bytes a parameter, 3.35 GiB
    found = one(doctor.check_disk(config(), 100_000_000, tmp_path), level)
    assert "3.4 GiB" in found.text and ("keep_checkpoints=1" in found.fix) == (level != "ok")


def test_precision_that_the_device_emulates(monkeypatch) -> None:
    asked = config("precision=bf16")
    monkeypatch.setattr(doctor, "cpu_has_bf16", lambda: False)
    assert one(doctor.check_precision(asked, device_of(asked)), "warning").fix == "precision=fp32"
    monkeypatch.setattr(doctor, "cpu_has_bf16", lambda: True)
    assert list(doctor.check_precision(asked, device_of(asked))) == []


def test_warm_up_and_intervals_against_the_length() -> None:
    half = one(doctor.check_schedule(config("schedule.warmup_steps=600")), "warning")
    assert "600 of 1,000" in half.text and half.fix == "schedule.warmup_steps=50"
    notes = [f.text for f in doctor.check_schedule(config("trainer.max_steps=50")) if f.level == "note"]
    assert len(notes) == 2 and "trainer.val_interval=100 is longer" in notes[0]


def test_more_threads_than_cpus(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "cpu_count", lambda: 4)
    asked = config("trainer.threads=9")
    assert one(doctor.check_threads(asked, device_of(asked)), "warning").fix == "trainer.threads=4"
    asked = config("trainer.threads=1")  # right for mini, not for a large model
    assert one(doctor.check_threads(asked, device_of(asked)), "ok")
    asked = config("trainer.threads=1", "model.d_model=512")
    assert "trainer.threads=4" in one(doctor.check_threads(asked, device_of(asked)), "warning").fix
    asked = config("trainer.threads=4")
    assert one(doctor.check_threads(asked, device_of(asked)), "ok")


def test_which_backend_computes_the_activation(fresh_registry) -> None:
    assert "PyTorch" in one(doctor.check_activation(config(), device_of(config())), "ok").text

    class Compiled(nn.Module):
        broken = False

        def forward(self, x):
            if self.broken:
                raise RuntimeError("no kernel image\nmore")
            return torch.relu(x)

        def manifest(self):
            return {"gelu on cpu": "cpu (libgelu.so)"}

    register("activation", "compiled_here")(Compiled)
    asked = config("model.activation.name=compiled_here")
    found = one(doctor.check_activation(asked, device_of(asked)), "ok")
    assert str(found) == "activation: gelu on cpu: cpu (libgelu.so)"
    Compiled.broken = True
    assert "no kernel image" in one(doctor.check_activation(asked, device_of(asked)), "error").text
    plugins = [str(f) for f in doctor.check_plugins(asked)]
    assert len(plugins) == 1 and "activation/compiled_here from" in plugins[0] and __file__ in plugins[0]
    silent = dataclasses.replace(asked, plugins=["quiet.py"])
    assert any(f.subject == "plugins" for f in doctor.check_plugins(silent))


def test_the_quick_estimate_of_memory_is_near_the_rehearsal() -> None:
    for overrides in ([], ["model.d_model=256", "model.n_layers=6", "optimizer=lion"], ["activation=swiglu"]):
        asked = config(*overrides)
        device = device_of(asked)
        n = sum(p.numel() for p in _model(asked).parameters())
        exact = rehearse(asked.model, asked.optimizer, device.micro_batch_size, accumulation=device.accumulation).peak
        assert 0.6 < doctor.estimated_memory(asked, device, n) / exact < 1.6


def _model(asked: Config):
    from gptframe.model import build_model

    return build_model(asked.model, device="meta")


def test_a_run_in_order_starts_without_a_word(monkeypatch, tmp_path) -> None:
    asked = config("trainer.threads=1")
    monkeypatch.setattr(doctor, "cpu_count", lambda: 2)
    assert doctor.at_start(asked, device_of(asked), data(), 103_680, tmp_path) == []
    found = doctor.at_start(asked, device_of(asked), data(5000, vocabulary=20), 103_680, tmp_path)
    assert [f.subject for f in found] == ["data", "tokenizer"]


def test_what_the_machine_says() -> None:
    free = available_memory()
    assert free is None or free > 100 * 2**20
    assert free_disk(__import__("pathlib").Path("/no/such/folder/at/all")) != 0
    assert versions("torch", "no-such-package")["no-such-package"] == "missing"


# The command.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["doctor", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_good_run(capsys) -> None:
    code, out, err = run(capsys, "trainer=cpu", "--json")
    found = json.loads(out)
    assert code == 0, err
    subjects = {f["subject"] for f in found}
    assert subjects >= {
        "versions",
        "data",
        "tokenizer",
        "model",
        "device",
        "memory",
        "disk",
        "schedule",
        "activation",
        "threads",
    }
    assert not any(f["level"] == "error" for f in found)


def test_every_error_is_found_at_once(capsys) -> None:
    wrong = ["data=text", "data.path=/no/such.txt", "trainer=cpu", "precision=fp16", "schedule.warmup_steps=5000"]
    code, out, err = run(capsys, *wrong)
    assert code == 2 and err == ""
    assert "3 errors" in out and "/no/such.txt" in out and "precision=fp16 needs a GPU" in out and "longer than" in out
    code, out, err = run(capsys, "model.n_heads=5")
    assert code == 2 and out == "" and err.startswith("error: model.d_model=64")
