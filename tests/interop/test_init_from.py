"""`init_from=`: a new run that starts from the weights, the architecture and the tokenizer of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from gptframe import compose, load
from gptframe.config import Config
from gptframe.data.tokenizer import ByteTokenizer, Source
from gptframe.interop.rundir import Imported, write_run
from gptframe.model import build_model

QUICK = ["trainer.max_steps=2", "trainer.val_interval=2", "trainer.global_batch_size=2", "callbacks.progress=none",
         "callbacks.samples.count=0", "callbacks.loss_curve=false", "trainer=cpu", "data.baseline_order=0"]  # fmt: skip


@pytest.fixture
def source(tmp_path: Path, monkeypatch) -> Path:
    """What an import leaves: d_model 192, so that the learning rate follows from it; and bf16 weights."""
    monkeypatch.setenv("GPTFRAME_CACHE", str(tmp_path / "cache"))
    section = {"name": "foreign", "d_model": 192, "n_layers": 1, "n_heads": 4, "vocab_size": 257, "context_length": 16}
    cfg = Config.from_dict({"model": {**section, "norm": {"name": "rmsnorm"}}}).model
    state = {k: v.bfloat16() for k, v in build_model(cfg, seed=5).state_dict().items()}
    tokenizer = ByteTokenizer(Source())
    tokenizer.name = "byte"
    write_run(Imported(cfg, state, {"name": "byte"}, tokenizer.save, {"format": "test"}), tmp_path / "source")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return tmp_path / "source"


def train(command, source: Path, name: str, *overrides: str) -> tuple[int, str, str]:
    text = source.parent / "text.txt"
    arguments = [f"init_from={source}", "data=text", f"data.path={text}", f"run_dir={source.parent / name}", *QUICK]
    return command("train", *arguments, *overrides)


def test_training_starts_from_the_weights(source: Path, command) -> None:
    code, out, _ = train(command, source, "run", "optimizer.lr=0", "callbacks.progress=lines")
    assert code == 0 and "weights from" in out
    before, after = load(source, dtype="fp32").model.state_dict(), load(source.parent / "run").model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    saved = yaml.safe_load((source.parent / "run" / "config.yaml").read_text())
    assert saved["model"]["norm"]["name"] == "rmsnorm" and saved["name"] == "foreign"
    assert saved["init_from"] == str(source) and saved["tokenizer"]["name"] == "byte"
    # It is a run like any other: it goes on, and its weights are its own.
    for path in (source / "checkpoints").iterdir():
        path.unlink()
    assert command("train", f"resume={source.parent / 'run'}", "trainer.max_steps=3")[0] == 0


def test_what_follows_from_the_architecture_follows_from_the_sources(source: Path) -> None:
    """lr = 6e-4 sqrt(768 / 192) = 1.2e-3, and not mini's 2.1e-3."""
    values = compose.compose_config([f"init_from={source}", "data=text", "data.path=x", "model.dropout=0.25"])
    assert values["optimizer"]["lr"] == 0.0012
    assert values["model"]["d_model"] == 192 and values["model"]["dropout"] == 0.25
    assert compose.compose_config([])["optimizer"]["lr"] == 0.0021


@pytest.mark.parametrize(
    "override,words",
    [
        ("model.d_model=64", "model.d_model is 192 in"),
        ("model=gpt2", "model.d_model is 192 in"),
        ("norm=layernorm", "model.norm.name is 'rmsnorm' in"),
        ("+model.layers={0: [mlp]}", "model.layers"),
        ("tokenizer=char", "go with the tokenizer in it"),
        ("tokenizer.name=char", "go with the tokenizer in it"),
    ],
)
def test_what_does_not_go_with_the_weights_is_refused(override: str, words: str, source: Path, command) -> None:
    code, out, err = train(command, source, "run", override)
    assert code == 2 and words in err and err.count("\n") == 1 and not (source.parent / "run").exists()


def test_sources_that_are_none(source: Path, tmp_path: Path, command) -> None:
    assert train(command, tmp_path / "nothing", "run")[::2] == (
        2, f"error: {tmp_path / 'nothing'}: there is no such directory\n",
    )  # fmt: skip
    for path in (source / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    code, _, err = train(command, source, "run")
    assert code == 2 and "damaged" in err and not (tmp_path / "run").exists()


def test_an_import_is_not_resumed(source: Path, command) -> None:
    code, out, err = command("train", f"resume={source}")
    assert code == 2 and "is an imported model" in err and f"init_from={source}" in err
