"""The commands as a person types them: exit codes, messages, run directories, sweeps, plugins, resuming."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gptframe.cli import main

ROOT = Path(__file__).parent.parent
QUICK = [
    "trainer.max_steps=3",
    "trainer.val_interval=3",
    "trainer.val_batches=1",
    "trainer.global_batch_size=4",
    "trainer.accelerator=cpu",
    "data.baseline_order=0",
    "callbacks=none",
]


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("GPTFRAME_CACHE", str(tmp_path_factory.getbasetemp().parent / "gptframe-tokens"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_dirs(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.rglob("manifest.json"))


def losses(run: Path) -> list[str]:
    with open(run / "metrics.csv", newline="") as file:
        return [row["train_loss"] for row in csv.DictReader(file) if row["train_loss"]]


def fails(capsys, *argv: str) -> str:
    """Run a command that must fail as a person's mistake, without a traceback, and return what it said."""
    assert main(list(argv)) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    message = "\n".join(line for line in lines if not line.startswith("note: "))  # QUICK's keys give way to others
    assert message.startswith("error: ") and "Traceback" not in message and message.count("\n") <= 1, message
    return message


def test_train_leaves_a_run_that_generate_samples_from(workspace, capsys):
    assert main(["train", *QUICK, "name=first"]) == 0
    (run,) = run_dirs(workspace)
    assert run.parent.parent.name == "runs" and run.name.endswith("_first")
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["d_model"] == 64
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == [*QUICK, "name=first"]
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "I work ,", "--temperature", "0", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("I work ,")


def test_a_sweep_runs_the_grid_each_job_in_its_own_directory(workspace, capsys):
    assert main(["train", *QUICK, "-m", "norm_placement=pre,post", "seed=0,1"]) == 0
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in run_dirs(workspace)]
    grid = sorted((c["model"]["norm_placement"]["name"], c["seed"]) for c in configs)
    assert grid == [("post", 0), ("post", 1), ("pre", 0), ("pre", 1)]
    assert len({tuple(losses(run)) for run in run_dirs(workspace)}) == 4


def test_a_failing_job_is_reported_with_its_overrides_and_the_others_go_on(workspace, capsys):
    assert main(["train", *QUICK, "-m", "model.n_heads=2,3,4"]) == 2
    message = capsys.readouterr().err
    assert "model.n_heads=3" in message and "not divisible" in message and "1 of 3 jobs failed" in message
    assert len(run_dirs(workspace)) == 2


LAYER = """
from torch import nn
from gptframe import register

@register("sublayer", "{name}")
class Layer(nn.Module):
    def __init__(self, cfg, layer, width: int = 8):
        super().__init__()
        self.down, self.up = nn.Linear(cfg.d_model, width), nn.Linear(width, cfg.d_model)

    def forward(self, x, ctx):
        return {body}
"""


def test_a_sublayer_of_ones_own_trains_in_a_sweep_and_resumes(workspace, capsys):
    (workspace / "my_layer.py").write_text(LAYER.format(name="cli_layer", body="self.up(self.down(x))"))
    plugin = ["plugins=[my_layer.py]", "model.block=[attention,cli_layer,mlp]", "+model.cli_layer.width=4"]
    assert main(["train", *QUICK, *plugin, "-m", "seed=0,1"]) == 0
    run = run_dirs(workspace)[0]
    before = losses(run)
    elsewhere = workspace / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    assert main(["train", f"resume={run}", "trainer.max_steps=5"]) == 0
    assert losses(run)[: len(before)] == before and len(losses(run)) > len(before)
    assert main(["generate", str(run), "--max-new-tokens", "3"]) == 0


def test_a_wrong_shape_names_the_plugin_and_both_shapes(workspace, capsys):
    (workspace / "wrong.py").write_text(LAYER.format(name="cli_wrong", body="self.down(x)"))
    message = fails(capsys, "train", *QUICK, "plugins=[wrong.py]", "model.block=[attention,cli_wrong]")
    assert "cli_wrong" in message and "wrong.py:" in message and "64]" in message and "8]" in message


def test_a_bug_in_a_plugin_keeps_its_own_file_and_line(workspace, capsys):
    (workspace / "buggy.py").write_text(LAYER.format(name="cli_buggy", body="self.up(self.dwon(x))"))
    assert main(["train", *QUICK, "plugins=[buggy.py]", "model.block=[attention,cli_buggy]"]) == 1
    message = capsys.readouterr().err
    assert "buggy.py" in message and "dwon" in message and "Traceback" in message


@pytest.mark.parametrize("name", ["squared_tanh", "mish"])
def test_an_activation_by_file_and_by_an_unknown_name(name, workspace, capsys):
    file = ROOT / "plugins/examples/mish.py"
    if name == "mish":
        assert main(["train", *QUICK, f"plugins=[{file}]", "model.activation.name=mish"]) == 0
    else:
        message = fails(capsys, "train", *QUICK, f"model.activation.name={name}")
        assert "squared_relu" in message and "plugins=" in message
        assert not run_dirs(workspace)


@pytest.mark.parametrize("block", ["[attention,short_conv,mlp]", "[attention,{name:short_conv,kernel:2}]"])
def test_the_example_sublayer_trains(block, workspace):
    file = ROOT / "plugins/examples/short_conv.py"
    assert main(["train", *QUICK, f"plugins=[{file}]", f"model.block={block}"]) == 0


def test_resume_goes_on_in_place_and_keeps_what_makes_the_run(workspace, capsys):
    assert main(["train", *QUICK, "trainer.max_steps=6", "run_dir=straight"]) == 0
    assert main(["train", *QUICK, "run_dir=run"]) == 0
    assert main(["train", "resume=run", "trainer.max_steps=6", "trainer.val_interval=3"]) == 0
    assert len(run_dirs(workspace)) == 2
    capsys.readouterr()
    message = fails(capsys, "train", "resume=run", "model.d_model=128")
    assert "model.d_model" in message and "64" in message and "128" in message
    assert "activation" in fails(capsys, "train", "resume=run", "activation=swiglu")
    assert "seed" in fails(capsys, "train", "resume=run", "seed=3")
    assert "trainer.global_batch_size" in fails(capsys, "train", "resume=run", "trainer.global_batch_size=8")
    assert main(["train", "resume=run", "model=mini", "seed=0", "trainer.max_steps=7"]) == 0  # repeated, not changed


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda d: None, ["no such directory"]),
        (lambda d: d.mkdir(), ["not a run directory", "config.yaml"]),
        (lambda d: (d.mkdir(), (d / "config.yaml").write_text("a: [")), ["config.yaml", "not the config of a run"]),
    ],
)
def test_resume_of_what_is_no_run(make, words, workspace, capsys):
    make(workspace / "other")
    message = fails(capsys, "train", "resume=other")
    assert all(word in message for word in words), message


def test_a_run_directory_in_use_is_not_overwritten(workspace, capsys):
    (workspace / "mine").mkdir()
    (workspace / "mine" / "thesis.txt").write_text("precious")
    assert "mine" in fails(capsys, "train", *QUICK, "run_dir=mine")
    assert os.listdir(workspace / "mine") == ["thesis.txt"]


@pytest.mark.parametrize(
    "overrides,words",
    [
        (["data=text", "data.path=nothing.txt"], ["nothing.txt"]),
        (["data=text"], ["data.path"]),
        (["data=text", "data.path=empty.txt"], ["empty.txt"]),
        (["data=text", "data.path=latin.txt"], ["latin.txt", "offset 3"]),
        (["data=text", "data.path=short.txt"], ["context", "32"]),
        (["data=text", "data.path=folder"], ["folder"]),
        (["model.vocab_size=32"], ["64", "32"]),
        (["model.attention.n_kv_heads=3"], ["n_kv_heads"]),
        (["model.n_layers=0"], ["model.n_layers"]),
        (["schedule.warmup_steps=100"], ["100", "3"]),
        (["optimizer.lr=abc"], ["optimizer.lr"]),
        (["+optimizer.momentum=0.9"], ["optimizer.momentum"]),
        (["model.topology=parallel", "norm_placement=post"], ["parallel", "post"]),
        (["plugins=[missing.py]"], ["missing.py"]),
        (["trainer.accelerator=tpu"], ["tpu"]),
        (["hydra.run.dir=here"], ["run_dir"]),
        (["norm=[layernorm,rmsnorm]"], ["norm"]),
        (["precision=fp16"], ["fp16"]),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(overrides, words, workspace, capsys):
    (workspace / "empty.txt").write_text("")
    (workspace / "latin.txt").write_bytes(b"abc" + "ñ".encode("latin-1") + b"d" * 500)
    (workspace / "short.txt").write_text("too short")
    (workspace / "folder").mkdir()
    message = fails(capsys, "train", *QUICK, *overrides)
    assert all(word in message for word in words), message
    assert not (workspace / "runs").exists()


def test_unknown_commands_and_runs(capsys, workspace):
    assert "'generate'" in fails(capsys, "genrate")
    assert "nowhere" in fails(capsys, "generate", "nowhere")


def test_help_and_composition_never_import_torch(workspace):
    """They answer in under a second because of it."""
    program = (
        "import sys; from gptframe.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'pytorch_lightning' in sys.modules)"
    )
    for arguments in (["train", "--help"], ["train", "--cfg", "job"], ["train", "model.d_modle=3"], ["--help"]):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "model.d_modle" in done.stderr or "COMMAND" in done.stdout


def test_an_option_of_ones_own_with_config_dir(workspace, capsys):
    folder = workspace / "my_conf" / "activation"
    folder.mkdir(parents=True)
    (folder / "tiny.yaml").write_text("# @package model.activation\nname: relu\n")
    assert main(["train", *QUICK, "--config-dir", str(workspace / "my_conf"), "activation=tiny"]) == 0
    (run,) = run_dirs(workspace)
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["activation"]["name"] == "relu"


def test_a_misspelt_option_stops_a_sweep_before_its_first_job(workspace, capsys):
    assert fails(capsys, "train", "optimizer=lyon").startswith("error: optimizer=lyon: no such option. Did you mean")
    message = fails(capsys, "train", *QUICK, "-m", "optimizer=adamw,lyon")
    assert message.startswith("error: optimizer=lyon: no such option. Did you mean 'lion'?") and not run_dirs(workspace)


def test_quiet_prints_the_run_directory_and_nothing_else(workspace, capsys):
    assert main(["train", *QUICK, "--quiet"]) == 0
    (run,) = run_dirs(workspace)
    assert capsys.readouterr().out == f"{run.relative_to(workspace)}\n"
    assert main(["train", f"resume={run}", "trainer.max_steps=5", "--quiet"]) == 0


def test_surroundings_at_fault_are_a_line(workspace):
    """A full disk behind the output, and a directory that is gone."""
    command = [sys.executable, "-c", "import sys; from gptframe.cli import main; sys.exit(main(sys.argv[1:]))", "train"]
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*command, *QUICK], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 2 and "the output cannot be written" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    (workspace / "gone").mkdir()
    start = f'cd {workspace / "gone"} && rmdir {workspace / "gone"} && exec "$@"'
    done = subprocess.run(["sh", "-c", start, "sh", *command, *QUICK], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.strip().endswith("has been deleted: change to another"), done.stderr


@pytest.mark.parametrize(
    "override,words",
    [
        ("trainer.strategy=foo", "invalid strategy name"),
        ("trainer.threads=100000", "cores"),
        ("model.d_model=1000000000", "must be at most 1048576"),
        ("model.d_model=1000000", "24,000,084,000,000 parameters"),  # 12 D^2 + 64 D a block, and so on
        ("trainer.global_batch_size=1000000007", "must be at most"),
        ("model.init.std=0", "model.init.std=0.0 must be greater than 0"),
        ("model.norm.eps=-1", "model.norm.eps=-1.0 must be greater than 0"),
    ],
)
def test_what_no_machine_holds_is_refused_before_it_is_tried(override, words, workspace, capsys):
    assert words in fails(capsys, "train", *QUICK, override)


def test_a_sweep_on_several_devices_is_refused(workspace, capsys):
    assert main(["train", *QUICK, "trainer.devices=2", "-m", "seed=0,1"]) == 2
    message = capsys.readouterr().err
    assert "leave out -m" in message and "2 of 2 jobs failed" in message and not run_dirs(workspace)


def test_a_parameter_that_no_gradient_reaches_is_named(workspace, capsys):
    layer = LAYER.format(name="cli_idle", body="x * self.up.weight.sum() + self.up.bias")
    (workspace / "idle.py").write_text(layer)
    message = fails(capsys, "train", *QUICK, "plugins=[idle.py]", "model.block=[attention,cli_idle,mlp]")
    assert "blocks.0.cli_idle.core.down.weight" in message


def test_a_sweep_ends_with_a_line_for_each_job(workspace, capsys):
    assert main(["train", *QUICK, "-m", "model.n_heads=2,3"]) == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("job ")]
    assert "model.n_heads=2" in lines[-2] and "validation loss" in lines[-2] and lines[-1].endswith("failed")


def test_options_of_a_sublayer_of_ones_own_need_a_plus(workspace, capsys):
    assert "+model.my_layer.width" in fails(capsys, "train", "model.my_layer.width=3")


def test_a_plugin_that_exits_while_it_is_imported_is_named(workspace, capsys):
    (workspace / "exits.py").write_text("import sys; sys.exit(0)")
    message = fails(capsys, "train", *QUICK, "plugins=[exits.py]")
    assert "exits.py" in message and "sys.exit" in message


def test_a_run_directory_at_work_is_not_resumed_twice(workspace, capsys):
    from gptframe.training import directory

    assert main(["train", *QUICK, "run_dir=run"]) == 0
    capsys.readouterr()
    with directory.hold(workspace / "run"):
        assert "another process" in fails(capsys, "train", "resume=run", "trainer.max_steps=5")
    assert main(["train", "resume=run", "trainer.max_steps=5", "trainer.clip_norm=null"]) == 0
    assert yaml.safe_load((workspace / "run" / "config.yaml").read_text())["trainer"]["clip_norm"] is None
    assert "empty" in fails(capsys, "train", "resume=")


def test_a_foreign_file_in_place_of_the_newest_checkpoint_is_passed_over(workspace, capsys):
    import torch

    assert main(["train", *QUICK, "run_dir=run"]) == 0
    good = workspace / "run" / "checkpoints" / "step_00000003.ckpt"
    torch.save({"weights": torch.zeros(2)}, good.with_name("step_00000009.ckpt"))
    assert main(["train", "resume=run", "trainer.max_steps=4"]) == 0
    assert len(losses(workspace / "run")) >= 3


BACKEND = """
from torch.nn import functional as F

from gptframe import register


@register("linear_backend", "loud")
class Loud:
    def __init__(self, cfg):
        print("a loud backend")

    def __call__(self, x, weight, bias):
        return F.linear(x, weight, bias)
"""


def test_a_run_is_used_and_continued_without_its_linear_backend(workspace, capsys):
    """Who multiplies is no part of what a run has learned."""
    from gptframe import load, registry

    (workspace / "loud.py").write_text(BACKEND)
    short = [*QUICK, "model.n_layers=1"]
    main(["train", "run_dir=plain", *short])
    capsys.readouterr()
    loud = ["plugins=[loud.py]", "model.linear.backend=loud"]
    assert main(["train", "run_dir=a", *loud, *short]) == 0
    assert "a loud backend" in capsys.readouterr().out
    assert losses(workspace / "a") == losses(workspace / "plain")
    assert load("a").generate("I work ,", max_new_tokens=3, temperature=0)
    assert "a loud backend" not in capsys.readouterr().out
    for more in (["resume=plain", "trainer.max_steps=4"], ["run_dir=b", "init_from=plain", *QUICK]):
        assert main(["train", *more, *loud]) == 0
        assert "a loud backend" in capsys.readouterr().out
    registry._table["linear_backend"].pop("loud")
    for more in (["resume=a", "trainer.max_steps=4"], ["run_dir=c", "init_from=a", *QUICK]):
        assert main(["train", *more, "model.linear.backend=torch"]) == 0
    assert "a loud backend" not in capsys.readouterr().out
