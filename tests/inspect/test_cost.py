"""FLOPs against PyTorch's counter and hand computation, memory against the allocator of a real training step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptframe import cli, compose, register
from gptframe.config import Config, ModelConfig
from gptframe.inspect.cost import flops, rehearse, sharded, visible_pairs
from gptframe.model import GPT
from gptframe.model.loss import CHUNK_ELEMENTS


def preset(*overrides: str) -> Config:
    return Config.from_dict(compose.compose_config(overrides))


# FLOPs.


def test_flops_of_mini_by_hand() -> None:
    found = flops(ModelConfig())
    parts = {p.name: (p.full, p.causal) for p in found.parts}
    assert parts["attention projections"] == (2 * 2 * 4 * 64 * 64,) * 2
    # 32 tokens look at 1, 2, ... 32 tokens: 528 pairs, each 2 x 64 for the score and 2 x 64 for the mix, in 2 blocks
    assert parts["attention scores and mix"] == (2 * 4 * 32 * 64, 2 * 4 * 528 / 32 * 64)
    assert parts["mlp"] == (2 * 2 * 2 * 64 * 256,) * 2
    assert parts["head"] == (2 * 64 * 64,) * 2
    assert found.training[1] == 3 * found.forward[1] == 3 * sum(p.full for p in found.parts)


def test_pairs_that_a_window_leaves() -> None:
    for length, window in [(1, None), (7, None), (7, 3), (7, 1), (7, 9)]:
        seen = sum(1 for t in range(length) for s in range(length) if 0 <= t - s < (window or length))
        assert visible_pairs(length, window) == seen


@pytest.mark.parametrize(
    "overrides,length",
    [
        (["model=mini"], 32),
        (["model=andrea120m"], 1024),
        (["model=andrea120m_untied", "activation=swiglu", "attention=gqa", "expansion=8_3x"], 256),
        (["model=pythia_70m"], 128),
        (["model=mini", "model.block=[attention,mlp,mlp]", "attention=mqa", "position=alibi"], 32),
    ],
)
def test_flops_are_within_5_percent_of_pytorchs_counter(overrides: list[str], length: int) -> None:
    cfg = preset(*overrides).model
    with FakeTensorMode():  # shapes without values: the large ones need no memory
        model = GPT(cfg)
        ids = torch.zeros(2, length, dtype=torch.long)
        # in plain operations, since the counter does not know every fused attention kernel; they mask afterwards
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(ids, targets=ids).backward()
    counted = counter.get_total_flops() / (2 * length)
    assert flops(cfg, length).training[1] == pytest.approx(counted, rel=0.05)
    assert counted == pytest.approx(flops(cfg, length).training[1], rel=1e-6)  # in fact to the digit


def test_a_plugins_flops_are_measured(fresh_registry) -> None:
    class Low(nn.Module):
        def __init__(self, cfg, layer: int):
            super().__init__()
            self.down, self.up = nn.Linear(cfg.d_model, 8), nn.Linear(8, cfg.d_model)

        def forward(self, x, ctx):
            return self.up(self.down(x))

    register("sublayer", "low_rank")(Low)
    found = flops(ModelConfig(block=["low_rank", "mlp"], position={"name": "none"}))
    assert next(p for p in found.parts if p.name == "low_rank").full == 2 * (2 * 64 * 8 * 2)


# Memory.


def measured(config: Config, batch: int, length: int, precision: str = "fp32", accumulation: int = 1) -> dict:
    wanted = {
        "model": config.to_dict()["model"], "optimizer": config.optimizer,
        "batch": batch, "length": length, "precision": precision, "accumulation": accumulation,
    }  # fmt: skip
    script = Path(__file__).with_name("measure_peak.py")
    done = subprocess.run([sys.executable, str(script), json.dumps(wanted)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def mini_measured() -> dict:
    return measured(preset("model=mini"), 8, 32)


def test_memory_of_mini_is_within_10_percent_of_the_allocators_peak(mini_measured: dict) -> None:
    config = preset("model=mini")
    found = rehearse(config.model, config.optimizer, 8)
    assert found.peak == pytest.approx(mini_measured["peak"], rel=0.10)
    assert found.weights + found.optimizer == pytest.approx(mini_measured["kept"], rel=0.01)


def test_memory_of_andrea120m_is_within_10_percent_of_the_measured_peak(mini_measured: dict) -> None:
    config = preset("model=andrea120m")
    real = measured(config, 1, 64)
    found = rehearse(config.model, config.optimizer, 1, length=64)
    assert found.peak == pytest.approx(real["peak"], rel=0.10)
    assert found.weights == 4 * 92_331_264 and found.optimizer == pytest.approx(2 * found.weights, rel=1e-3)
    if real["resident"] is not None:  # of the process: what mini's takes is the libraries'
        libraries = mini_measured["resident"] - mini_measured["peak"]
        assert found.peak == pytest.approx(real["resident"] - libraries, rel=0.10)


def test_memory_of_other_options_and_of_accumulation() -> None:
    overrides = ["optimizer=muon", "activation=swiglu", "attention=gqa", "position=alibi", "norm_placement=sandwich"]
    config = preset("model=mini", *overrides)
    found = rehearse(config.model, config.optimizer, 8, precision="bf16", accumulation=3)
    assert found.peak == pytest.approx(measured(config, 8, 32, "bf16", 3)["peak"], rel=0.10)


def test_what_each_choice_changes() -> None:
    cfg = ModelConfig(n_layers=4)
    adamw = {"name": "adamw", "lr": 1e-3}
    plain = rehearse(cfg, adamw, 8)
    assert plain.gradients == plain.weights
    assert rehearse(cfg, {"name": "lion", "lr": 1e-3}, 8).optimizer == plain.weights
    narrow = rehearse(cfg, {**adamw, "state_dtype": "bfloat16"}, 8)
    assert narrow.optimizer == pytest.approx(plain.optimizer / 2, rel=0.01)
    assert rehearse(cfg, adamw, 8, precision="fp64").weights == 2 * plain.weights
    # from the second micro-batch on, gradients live through the forward pass
    assert rehearse(cfg, adamw, 8, accumulation=2).peak == pytest.approx(plain.peak + plain.gradients, rel=0.02)
    # twice the sequences keep twice the activations, the gradients of head and embedding apart
    assert rehearse(cfg, adamw, 16).activations == pytest.approx(2 * plain.activations, rel=0.01)
    # of each block, checkpointing keeps the stream that enters it
    kept = rehearse(cfg, adamw, 8, recompute=True).activations
    stream = 8 * 32 * 64 * 4
    assert 4 * stream < kept < 12 * stream < plain.activations / 3
    halves = sharded(plain, "fsdp", 2)
    assert (halves.weights, halves.optimizer) == (plain.weights // 2, plain.optimizer // 2)
    assert sharded(plain, "ddp", 2).peak == plain.peak + plain.gradients
    assert sharded(plain, "ddp", 1) == plain


def test_logits_of_a_large_vocabulary_are_held_a_chunk_at_a_time() -> None:
    cfg = ModelConfig(vocab_size=2**16, d_model=16, n_heads=1, n_layers=1)
    found = rehearse(cfg, {"name": "lion", "lr": 1e-3}, 64)
    assert found.peak < found.weights * 3 + 6 * 4 * CHUNK_ELEMENTS < 64 * 32 * 2**16 * 4


# The command.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_planned_run_is_arithmetic(capsys) -> None:
    code, out, err = run(capsys, "--json", "--throughput", "1000", "trainer=cpu", "precision=fp32")
    assert code == 0, err
    found = json.loads(out)
    assert found["run"]["tokens"] == 1000 * 32 * 32
    assert found["run"]["seconds"] == pytest.approx(1024)
    assert found["run"]["tokens_per_parameter"] == pytest.approx(1_024_000 / 103_680)
    assert found["run"]["chinchilla_tokens"] == 20 * 103_680
    assert found["run"]["checkpoint_bytes"] == pytest.approx(3 * 4 * 103_680, rel=0.01)
    assert found["flops_per_token"]["backward_full"] == 2 * found["flops_per_token"]["forward_full"]


def test_the_table_for_people(capsys) -> None:
    code, out, _ = run(capsys, "trainer=cpu", "precision=fp32", "--measure")
    assert code == 0
    for words in (
        "causal",
        "full attention",
        "activations",
        "recompute=true",
        "103,680 parameters",
        "measured here",
    ):
        assert words in out


def test_a_gpu_that_is_not_here_is_assumed_and_said(capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code, out, err = run(capsys, "trainer=ddp", "trainer.devices=4", "--json")
    found = json.loads(out)
    assert code == 0 and found["devices"] == 4 and "no GPU here" in found["assumed"] and found["precision"] == "bf16"
    assert found["memory"]["communication"] == found["memory"]["gradients"]
    code, _, err = run(capsys, "trainer=gpu", "--measure")
    assert code == 2 and "no GPU here" in err


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--throughput", "0"], ["--throughput"]),
        (["trainer=cpu", "trainer.micro_batch_size=5"], ["micro_batch_size=5"]),
        (["trainer=ddp", "trainer.devices=3"], ["32", "3"]),
        (["optimizer.lrr=3"], ["'lr'"]),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, arguments: list[str], words: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") <= 2, err
    assert all(word in err for word in words), err
