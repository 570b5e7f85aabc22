"""Counts against published sums and hand computation, formulas against built models, and the command's output."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from gptframe import cli, compose, registry
from gptframe.config import Config, ModelConfig
from gptframe.errors import UserError
from gptframe.inspect.params import evaluate, inventory

PLACEMENTS = ["pre", "post", "output", "sandwich", "peri", "keel", "deepnorm", "none"]


def preset(*overrides: str) -> ModelConfig:
    return Config.from_dict(compose.compose_config(overrides)).model


def test_mini_is_the_inventory_of_its_lesson() -> None:
    found = inventory(preset("model=mini"))
    counts = {row.name: row.count for row in found.rows}
    assert counts["token_embedding.weight"] == 64 * 64 == 4096
    for block in ("blocks.0", "blocks.1"):
        attention = sum(counts[f"{block}.attention.core.{n}.weight"] for n in ("q", "k", "v", "out"))
        mlp = sum(counts[f"{block}.mlp.core.{n}"] for n in ("up.weight", "up.bias", "down.weight", "down.bias"))
        norms = sum(counts[f"{block}.{n}.pre.{p}"] for n in ("attention", "mlp") for p in ("weight", "bias"))
        assert (attention, mlp, norms) == (16_384, 33_088, 256)
    assert found.blocks() == [49_728, 49_728]
    assert found.totals["trunk"] == 99_456
    assert found.totals["total"] == sum(counts.values()) == 103_680
    # "About 57k" is one block and an untied head without its norms' and MLP's small change.
    assert found.totals["block_matrices"] // 2 + 2 * 4096 == 57_344


def test_andrea120m_is_the_sum_of_its_lesson() -> None:
    found = inventory(preset("model=andrea120m"))
    assert found.totals["total"] == 92_331_264
    assert found.totals["without_biases"] == 92_248_320
    assert (found.norms, found.norm_class) == (25, "LayerNorm")
    assert found.totals["block_matrices"] == 84_934_656
    assert found.totals["embeddings"] == 8449 * 768 + 1024 * 768
    untied = inventory(preset("model=andrea120m_untied"))
    assert untied.totals["total"] == 98_737_152
    assert untied.totals["head"] == 6_488_832


def test_a_seven_billion_parameter_model_is_counted_without_memory() -> None:
    found = inventory(preset("model=llama2_7b"))
    assert found.totals["total"] == 6_738_415_616
    assert all(row.value == row.count for row in found.rows)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_head": False, "position": {"name": "learned"}, "activation": {"name": "swiglu"}},
        {
            "norm": {"name": "rmsnorm"},
            "sublayers": {"attention": {"n_kv_heads": 2, "qk_norm": "head", "bias": True}, "mlp": {"bias": False}},
        },
        {
            "norm": {"name": "layernorm", "bias": False},
            "sublayers": {"attention": {"n_kv_heads": 1, "qk_norm": "full"}, "mlp": {}},
            "block": ["attention", "attention", "mlp"],
            "layers": {1: ["mlp"]},
            "expansion": {"factor": 8 / 3, "multiple_of": 64},
        },
        {"norm": {"name": "layernorm", "affine": False}, "position": {"name": "alibi"}},
    ],
)
def test_formulas_predict_every_tensor_of_every_option(placement: str, options: dict) -> None:
    found = inventory(ModelConfig(norm_placement={"name": placement}, **options))
    assert [row.name for row in found.rows if row.value is None] == []
    assert sum(row.value or 0 for row in found.rows) == found.totals["total"]


class _Conv(nn.Module):
    def __init__(self, cfg, layer: int, kernel: int = 4, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(cfg.d_model, 1, kernel))
        self.mix = nn.Linear(cfg.d_model, cfg.d_model, bias=bias)

    def forward(self, x, ctx):
        return self.mix(x) * self.weight.sum()


def _with_conv(formulas: object, **options: object) -> ModelConfig:
    cls = type("Conv", (_Conv,), {"parameter_formulas": formulas} if formulas is not None else {})
    registry.register("sublayer", "conv_of_this_test", replace=True)(cls)
    block = ["attention", {"name": "conv_of_this_test", **options}, "mlp"]
    return ModelConfig(block=block, n_layers=1)


def test_a_plugin_gives_its_own_formula_or_is_measured(fresh_registry) -> None:
    def measured(cfg: ModelConfig) -> dict:
        return {r.name.partition(".core.")[2]: r.formula for r in inventory(cfg).rows if "conv_of_this" in r.name}

    seats = {"": "D"}
    assert measured(_with_conv(None)) == {**seats, "weight": None, "mix.weight": None, "mix.bias": None}
    partly = _with_conv({"weight": "D*kernel", "mix.weight": "D**2"}, kernel=3)
    assert measured(partly) == {**seats, "weight": "D*kernel", "mix.weight": "D**2", "mix.bias": None}

    def formulas(cfg, kernel, bias):
        return {"weight": f"D*{kernel}", "mix.weight": "D*D", **({"mix.bias": "D"} if bias else {})}

    by_options = _with_conv(staticmethod(formulas), bias=False)
    assert measured(by_options) == {**seats, "weight": "D*4", "mix.weight": "D*D"}


@pytest.mark.parametrize(
    "formulas,words",
    [
        ({"weight": "D*(kernel + 1)"}, ["blocks.0.conv_of_this_test.core.weight", "320", "256", "D*(kernel + 1)"]),
        ({"wieght": "D"}, ["core.wieght", "lacks it"]),
        ({"weight": "D*width"}, ["'width'", "kernel"]),
        ({"weight": "D*__import__('os')"}, ["+ - * // **"]),
        ({"weight": "D*"}, ["'D*'"]),
        (["D"], ["parameter_formulas"]),
    ],
)
def test_a_wrong_formula_is_an_error(fresh_registry, formulas: object, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        inventory(_with_conv(formulas))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_formula_is_arithmetic_only() -> None:
    assert evaluate("3*D*(H - 1)//2 + D**2", {"D": 4, "H": 7}) == 52
    with pytest.raises(UserError):
        evaluate("D/2", {"D": 4})


def test_what_decays_is_the_optimisers_rule() -> None:
    from gptframe.model import build_model
    from gptframe.registry import build
    from gptframe.training.optimizer import param_groups

    cfg = ModelConfig(position={"name": "learned"}, tie_head=False)
    model = build_model(cfg)
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = build("optimizer", {"name": "adamw", "lr": 1.0, "weight_decay": 0.1}, param_groups(model))
    decayed = {names[id(p)] for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert {row.name for row in inventory(cfg).rows if row.decayed} == decayed
    assert "head.weight" in decayed and "token_embedding.weight" not in decayed


# The command.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["params", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_the_table_and_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "model=mini")
    assert code == 0 and err == ""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "token_embedding.weight 64 x 64 V*D 4,096 no head" in lines
    assert "blocks.1.mlp.core.up.weight 256 x 64 D*H 16,384 yes" in lines
    assert any(line.startswith("total 103,680") for line in lines)
    assert "\x1b" not in out  # a pipe gets no colours


def test_equal_blocks_are_folded_until_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    folded = run(capsys, "model=andrea120m")[1]
    assert "blocks.0-11.mlp.core.up.weight" in folded and "2,359,296 x 12" in folded
    every = run(capsys, "model=andrea120m", "--all")[1]
    assert "blocks.7.mlp.core.up.weight" in every
    mixed = run(capsys, "model=andrea120m", "+model.layers={5: [attention]}")[1]
    assert all(part in mixed for part in ("blocks.0-4.", "blocks.5.attention", "blocks.6-11."))


def test_json_is_all_that_json_prints(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    code, out, _ = run(capsys, "--json", "model=mini", "--plot", str(tmp_path / "deep" / "p.png"))
    found = json.loads(out)
    assert code == 0 and found["totals"]["total"] == sum(t["count"] for t in found["tensors"]) == 103_680
    assert (tmp_path / "deep" / "p.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["model.d_modle=3"], ["'d_model'"]),
        (["model=mini", "no/such/run"], ["no/such/run"]),
        (["no/such/run"], ["no/such/run", "key=value"]),
        (["model.n_heads=5"], ["model.d_model=64", "model.n_heads=5"]),
        (["--plot", "."], ["--plot"]),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, arguments: list[str], words: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") <= 2
    assert all(word in err for word in words), err


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    script = (
        "import sys; from gptframe.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    try: main([command, '--help'])\n"
        "    except SystemExit: pass\n"
        "    assert main([command, 'model.d_modle=3']) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script, "params"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
