"""What the probe measures, against autograd, closed forms and models made for it; the directions that docs/claims.md
reports, on a small scale."""

from __future__ import annotations

import json
import math

import pytest
import torch

from gptframe import cli, compose, trace
from gptframe.config import Config, ModelConfig
from gptframe.inspect.probe import probe, snapshot
from gptframe.inspect.probe_report import mean, shown_blocks, spread, with_spread
from gptframe.model import build_model

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 64, (2, 17), generator=GENERATOR)
BATCH = {"ids": IDS[:, :-1], "targets": IDS[:, 1:]}


def test_gradients_are_those_of_the_mean_loss() -> None:
    model = build_model(ModelConfig(n_layers=3)).double()
    found = snapshot(model, BATCH)
    logits = model(BATCH["ids"])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), BATCH["targets"].flatten())
    assert found.loss == pytest.approx(loss.item())
    for block, norm in zip(model.blocks, found.gradients, strict=True):
        gradients = torch.autograd.grad(loss, list(block.parameters()), retain_graph=True)
        assert norm == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in gradients)))
    # of the stream after the last block: the logits' gradient, through the final norm
    stream = next(reversed(list(_traced(model).stream().values()))).requires_grad_()
    end = torch.nn.functional.linear(model.final_norm(stream), model.head_weight).flatten(0, 1)
    end_loss = torch.nn.functional.cross_entropy(end, BATCH["targets"].flatten())
    assert found.stream_gradients[-1] == pytest.approx(torch.autograd.grad(end_loss, stream)[0].norm().item())
    assert len(found.stream_gradients) == 4 and all(p.grad is None for p in model.parameters())


def _traced(model):
    with torch.no_grad(), trace(model) as t:
        model(BATCH["ids"])
    return t


def test_the_stream_gradient_of_a_scaled_copy_is_scaled() -> None:
    """A block that adds nothing passes the gradient on as it is: with residual_scale s, times s a sublayer."""
    for scale in (1.0, 0.5):
        model = build_model(ModelConfig(n_layers=4, residual_scale=scale, norm_placement={"name": "none"})).double()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith((".core.out.weight", ".core.down.weight")):
                    p.zero_()
        found = snapshot(model, BATCH)
        ratios = [a / b for a, b in zip(found.stream_gradients, found.stream_gradients[1:], strict=False)]
        assert ratios == pytest.approx([scale**2] * 4)
        assert found.change == pytest.approx([1 - scale**2] * 4)
        assert found.cosine == pytest.approx([1.0] * 4)
        assert found.deltas == {"attention": pytest.approx([0.0] * 4), "mlp": pytest.approx([0.0] * 4)}


def test_dead_units_zeros_and_entropy_of_models_made_for_it() -> None:
    model = build_model(ModelConfig(activation={"name": "relu"}))
    with torch.no_grad():
        model.blocks[0].mlp.core.up.bias[:64] = -100.0  # a quarter of the units never fires
        model.blocks[1].attention.core.q.weight.zero_()  # every key looks alike
        model.blocks[0].attention.core.q.weight.mul_(1000)
        model.blocks[0].attention.core.k.weight.mul_(1000)  # one key each
    found = snapshot(model, BATCH)
    assert found.dead == [0.25, 0.0]
    assert 0.55 < found.zeros[0] < 0.7 and 0.4 < found.zeros[1] < 0.6
    assert found.entropy[1] == pytest.approx(1.0) and found.entropy[0] < 0.05


def test_a_snapshot_changes_nothing() -> None:
    model = build_model(ModelConfig(dropout=0.3)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first, second = snapshot(model, BATCH), snapshot(model, BATCH)
    assert first == second and model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(not block._forward_pre_hooks for block in model.blocks)


def test_blocks_without_attention_or_mlp_have_no_number_there() -> None:
    found = snapshot(build_model(ModelConfig(layers={1: ["mlp"]})), BATCH)
    assert not math.isnan(found.entropy[0]) and math.isnan(found.entropy[1])
    assert math.isnan(found.deltas["attention"][1])
    assert math.isnan(snapshot(build_model(ModelConfig(block=["attention"])), BATCH).dead[0])


def test_mean_and_spread() -> None:
    assert mean([1.0, math.nan, 3.0]) == 2 and spread([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert math.isnan(spread([1.0])) and math.isnan(spread([1.0, math.inf]))
    assert (
        with_spread([1.0, 3.0]) == "2.000 ± 71%"
        and with_spread([1e-9]) == "1.00e-09"
        and with_spread([0.0, 0.0]) == "0"
    )
    assert shown_blocks(24) == list(range(24))
    deep = shown_blocks(100)
    assert len(deep) == 24 and deep[0] == 0 and deep[-1] == 99


# The directions of docs/claims.md. Its numbers come from larger batches and more seeds of the same experiments.


def measured(experiment: str):
    config = Config.from_dict(compose.compose_config([f"experiment={experiment}", "trainer=cpu"]))
    return probe(config, lambda seed, step: BATCH, [0], 0).snapshots[0]


def test_gradients_vanish_without_residual_connections_and_norms() -> None:
    assert measured("claims_plain_12").reach() < 1e-30
    assert 0.5 < measured("claims_no_norm_12").reach() < 2
    assert 0.5 < measured("claims_residual_12").reach() < 5


def test_gradients_stay_usable_through_100_blocks_with_them() -> None:
    found = measured("claims_residual_100")
    assert len(found.gradients) == 100 and min(found.gradients) > 0.3 * max(found.gradients)
    assert max(found.change) < 0.2 and min(found.cosine) > 0.98


# The command.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["probe", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_before_and_after_training(capsys, tmp_path) -> None:
    small = ["trainer=cpu", "trainer.global_batch_size=8", "schedule.warmup_steps=0"]
    plot = tmp_path / "probe.png"
    code, out, err = run(capsys, *small, "--steps", "15", "--seeds", "2", "--json", "--plot", str(plot))
    assert code == 0, err
    found = json.loads(out)
    before, after = found["sums"]["0"]["loss"], found["sums"]["15"]["loss"]
    assert len(before) == len(after) == 2 and max(after) < min(before) - 0.3
    assert before[0] == pytest.approx(math.log(64), rel=0.02) and before[0] != before[1]
    assert plot.read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(capsys, *small, "--random", "activation=relu")
    assert code == 0 and "mini at the initialisation" in out and "mlp / stream" in out and "\x1b" not in out


def test_a_run_directory_is_refused_and_not_ignored(capsys, tmp_path) -> None:
    from gptframe.config import Config
    from gptframe.training.directory import write_yaml

    write_yaml(tmp_path / "config.yaml", Config().to_dict())
    code, out, err = run(capsys, str(tmp_path))
    assert code == 2 and out == "" and "fresh initialisation" in err


@pytest.mark.parametrize("arguments", [["--steps", "-1"], ["--seeds", "0"], ["model.d_modle=2"], ["data.name=nothing"]])
def test_what_is_wrong_is_said_in_a_line(capsys, arguments: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") <= 2, err
