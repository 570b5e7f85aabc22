"""The option files of training: each is accepted as it stands, and the reference recipes hold their numbers."""

import dataclasses

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from torch import nn

from gptframe import compose
from gptframe.config import Config, convert
from gptframe.model import build_model
from gptframe.registry import build
from gptframe.training.loggers import LOGGERS
from gptframe.training.optimizer import param_groups
from gptframe.training.run import CallbackConfig
from gptframe.training.schedule import make_schedule


def read(*overrides):
    compose.prepare_hydra()
    with initialize_config_dir(str(compose.conf_dir()), version_base="1.3"):
        return Config.from_dict(compose.to_container(hydra_compose("train", list(overrides))))


def options(group):
    return sorted(file.stem for file in (compose.conf_dir() / group).glob("*.yaml"))


@pytest.mark.parametrize("name", options("optimizer"))
def test_every_optimizer_file_builds(name):
    config = read(f"optimizer={name}")
    optimizer = build("optimizer", config.optimizer, param_groups(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))))
    assert {group["lr"] for group in optimizer.param_groups} == {config.optimizer["lr"]}
    assert sorted(group["weight_decay"] for group in optimizer.param_groups)[0] == 0.0


@pytest.mark.parametrize("name", options("schedule"))
def test_every_schedule_file_builds(name):
    config = read(f"schedule={name}")
    multiplier = make_schedule(config.schedule, 1000)
    assert multiplier(49) == pytest.approx(1.0)  # the end of 5 % warm-up
    assert multiplier(0) == pytest.approx(1 / 50)


@pytest.mark.parametrize("group", ["trainer", "precision", "callbacks", "logger"])
def test_every_other_file_is_read(group):
    for name in options(group):
        config = read(f"{group}={name}")
        convert(CallbackConfig, config.callbacks, "callbacks").check(config.trainer.val_interval)
        assert config.logger["name"] in LOGGERS


def test_mini_reference():
    config = read("experiment=mini_reference")
    assert config.model.d_model == 64 and config.model.n_layers == 2
    (*_, group) = build("optimizer", config.optimizer, param_groups(nn.Linear(4, 4))).param_groups
    assert group["betas"] == (0.9, 0.95) and group["eps"] == 1e-8
    assert config.optimizer["weight_decay"] == 0.1 and config.trainer.clip_norm == 1.0
    lr = make_schedule(config.schedule, config.trainer.max_steps)
    peak = config.optimizer["lr"]
    assert peak * max(map(lr, range(config.trainer.max_steps))) == pytest.approx(3e-4)
    assert peak * lr(config.trainer.max_steps) == pytest.approx(3e-5)
    assert peak * lr(0) < 3e-5


def test_andrea_reference():
    config = read("experiment=andrea_reference")
    assert config.model.d_model == 768 and config.model.context_length == 1024 and config.model.vocab_size == 8449
    assert (config.trainer.global_batch_size, config.trainer.max_steps) == (8, 200_000)
    assert config.optimizer["betas"] == [0.9, 0.999]
    lr = make_schedule(config.schedule, config.trainer.max_steps)
    for t in (0, 1500, 1999, 100_000):
        cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * t / 200_000, dtype=torch.float64))).item()
        assert lr(t) == pytest.approx(cosine * min(1, (t + 1) / 2000))


@pytest.mark.parametrize("model", options("model"))
def test_speedrun_goes_with_every_model(model):
    config = read("experiment=speedrun", f"model={model}")
    assert config.name == f"speedrun-{model}" and config.model.name == model
    small = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "context_length": 16}
    sublayers = {**config.model.sublayers}
    sublayers["attention"] = {**sublayers["attention"], "head_dim": None, "n_kv_heads": None}
    built = build_model(dataclasses.replace(config.model, **small, sublayers=sublayers))
    optimizer = build("optimizer", config.optimizer, param_groups(built))
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    # no bias, no gain, no table of positions: matrices, the embedding and the head are all there is
    assert {0.02} == {rate for name, rate in rates.items() if name.startswith("blocks.")}
    assert {name for name in rates if not name.startswith("blocks.")} == {"token_embedding.weight", "head.weight"}
    lr = make_schedule(config.schedule, 100)
    assert lr(5) == lr(50) == 1.0 and lr(99) < 0.03


def test_the_command_line_wins_over_a_recipe():
    config = read("optimizer.lr=0.5", "experiment=mini_reference", "trainer.max_steps=7")
    assert config.optimizer["lr"] == 0.5 and config.trainer.max_steps == 7
