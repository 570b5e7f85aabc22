"""Whole runs: the run directory, resuming to the last bit, and what stops a run."""

import io
import json
import math
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import yaml
from tiny_run import rows, without_times

from gptframe.errors import UserError
from gptframe.training import callbacks, directory
from gptframe.training import checkpoint as c
from gptframe.training.module import GPTModule
from gptframe.training.run import train


def weights(run_dir, step):
    return c.load(c.checkpoint_path(run_dir, step))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dropout": 0.2}, "trainer": {"micro_batch_size": 3, "global_batch_size": 9}},
        {"optimizer": {"name": "muon", "lr": 0.01}, "model": {"dropout": 0.1}},
        {"optimizer": {"name": "lion", "lr": 0.001}, "schedule": {"name": "wsd"}, "precision": {"name": "bf16"}},
        {"optimizer": {"name": "adamw", "lr": 0.01, "state_dtype": "bfloat16"}},
    ],
    ids=["dropout-accumulation", "muon", "lion-wsd-bf16", "narrow-state"],
)
def test_resuming_continues_to_the_last_bit(make_config, changes):
    straight = train(make_config(**changes), []).run_dir
    config = make_config(**changes)
    stopped = stop_after(config, 13)  # neither a validation nor a checkpoint is due there
    assert [int(r["step"]) for r in rows(stopped)][-1] == 13
    train(resume(stopped), [])
    assert without_times(stopped) == without_times(straight)
    a, b = weights(straight, 20), weights(stopped, 20)
    assert same(a["state_dict"], b["state_dict"]) and same(a["optimizer_states"], b["optimizer_states"])
    assert [int(r["step"]) for r in rows(stopped)] == list(range(1, 21))


def resume(run_dir, **trainer):
    """As the command line does it: the saved config, with what may change."""
    config = directory.read_config(run_dir).to_dict()
    config["trainer"].update(trainer)
    return type(directory.read_config(run_dir)).from_dict({**config, "resume": str(run_dir)})


def stop_after(config, step, number=signal.SIGTERM):
    """Train until a signal arrives during a step, and return the run directory."""
    real = GPTModule.training_step

    def training_step(self, batch, batch_idx):
        real(self, batch, batch_idx)
        if self.trainer.global_step == step:
            os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTModule, "training_step", training_step)
        result = train(config, [])
    assert result.exit_code == 128 + number and result.step == step
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    return result.run_dir


def test_a_signal_at_a_validation_step_leaves_the_validation_to_the_resumed_run(make_config, straight):
    stopped = stop_after(make_config(), 10, signal.SIGINT)
    assert rows(stopped)[-1]["step"] == "10" and rows(stopped)[-1]["val_loss"] == ""
    train(resume(stopped), [])
    assert without_times(stopped) == without_times(straight)


def test_resuming_from_an_older_checkpoint_cuts_the_rows_beyond_it(make_config, straight, capsys):
    run = train(make_config(trainer={"keep_checkpoints": 3}), []).run_dir
    c.checkpoint_path(run, 20).unlink()
    damaged = c.checkpoint_path(run, 15)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    (run / "checkpoints" / ".tmp-99-step_00000020.ckpt").write_bytes(b"half")
    capsys.readouterr()
    config = resume(run)
    train(type(config).from_dict({**config.to_dict(), "callbacks": {"progress": "lines", "samples": {"count": 0}}}), [])
    said = capsys.readouterr().out
    assert "step_00000015.ckpt is damaged" in said and "from step 10" in said
    assert without_times(run) == without_times(straight)
    assert not list((run / "checkpoints").glob(".tmp-*"))


def test_a_run_killed_before_its_first_checkpoint_starts_over(make_config, straight, capsys):
    run = train(make_config(), []).run_dir
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    train(resume(run), [])
    assert "no checkpoint yet" in capsys.readouterr().out
    assert without_times(run) == without_times(straight)


def test_max_steps_can_be_extended(make_config):
    run = train(make_config(schedule={"name": "constant"}), []).run_dir
    result = train(resume(run, max_steps=30), [])
    assert result.step == 30 and [int(r["step"]) for r in rows(run)] == list(range(1, 31))
    assert float(rows(run)[-1]["lr"]) == pytest.approx(0.01)
    whole = train(make_config(schedule={"name": "constant"}, trainer={"max_steps": 30}), []).run_dir
    assert without_times(run) == without_times(whole)


def test_the_run_directory_holds_everything(make_config):
    config = make_config(
        data={"name": "verbs"},
        callbacks={"loss_curve": True, "samples": {"count": 2, "interval": 10, "max_new_tokens": 5}},
    )
    result = train(config, ["trainer.max_steps=20"])
    run = result.run_dir
    assert {p.name for p in run.iterdir()} == {
        "config.yaml", "overrides.yaml", "metrics.csv", "loss_curve.png", "samples.txt", "manifest.json", "tokenizer",
        "checkpoints", ".lock",
    }  # fmt: skip
    assert run.parent.parent == Path.cwd() / "runs" and run.name.endswith("_tiny")
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["schedule"]["warmup_steps"] == 2  # 0.1 of 20 steps, fixed for whoever extends the run
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == ["trainer.max_steps=20"]
    assert directory.read_config(run).model == config.model
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "finished" and set(manifest["fingerprints"]) == {"corpus", "tokenizer"}
    assert manifest["parameters"] == sum(
        v.numel() for k, v in weights(run, 20)["state_dict"].items() if k.startswith("model.")
    )
    session = manifest["sessions"][0]
    assert session["versions"]["torch"] == torch.__version__.split("+")[0] or session["versions"]["torch"]
    assert session["device"]["precision"] == "fp32" and session["device"]["threads"] >= 1
    samples = (run / "samples.txt").read_text()
    assert samples.count("=== step ") == 2 and "=== step 10\n" in samples and "=== step 20\n" in samples
    assert len(result.samples) == 2
    assert [step for step, _ in c.checkpoints(run)] == [20, 15]
    assert math.isfinite(result.train_loss) and math.isfinite(result.val_loss) and result.baseline > 0
    assert (run / "loss_curve.png").read_bytes()[:4] == b"\x89PNG"


def test_validation_counts_every_target_once(make_config):
    config = make_config(trainer={"max_steps": 1, "val_batches": None, "micro_batch_size": 3, "global_batch_size": 9})
    result = train(config, [])
    model, _ = c.load_run(result.run_dir)
    from gptframe.data.prepare import prepare

    tokens = torch.from_numpy(prepare(config.data, config.tokenizer, 64).val.window(0, 10**9))
    total = count = 0.0
    for start in range(0, len(tokens) - 1, 16):
        window = tokens[start : start + 17]
        logits = model(window[None, :-1])[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    assert count == len(tokens) - 1
    assert result.val_loss == pytest.approx(total / count, rel=1e-5)


def test_checkpoints_load_as_plain_tensors_under_plain_names(make_config):
    run = train(make_config(trainer={"max_steps": 2, "compile": False}), []).run_dir
    checkpoint = torch.load(c.checkpoint_path(run, 2), weights_only=True)
    assert "model.token_embedding.weight" in checkpoint["state_dict"]
    assert not any("_orig_mod" in k for k in checkpoint["state_dict"])
    assert checkpoint["gptframe"]["step"] == 2


@pytest.mark.parametrize("patience", [1, 3])
def test_a_loss_that_is_not_finite_stops_the_run(make_config, monkeypatch, patience):
    real = GPTModule.training_step

    def poisoned(self, batch, batch_idx):
        if self.trainer.global_step >= 6:
            inner, self.loss_sum = self.loss_sum, lambda *a: inner(*a) * float("nan")
            real(self, batch, batch_idx)
            self.loss_sum = inner
        else:
            real(self, batch, batch_idx)

    monkeypatch.setattr(GPTModule, "training_step", poisoned)
    config = make_config(trainer={"nonfinite_patience": patience}, run_dir="run")
    with pytest.raises(UserError) as error:
        train(config, [])
    assert f"not finite at step {6 + patience} (loss nan, lr 0.00" in str(error.value)
    assert "last good checkpoint is of step 5" in str(error.value)
    assert [step for step, _ in c.checkpoints(Path("run"))] == [5]
    assert json.loads(Path("run/manifest.json").read_text())["status"] == "failed"


def test_weights_that_are_not_finite_are_never_saved(make_config, monkeypatch):
    real = GPTModule.training_step

    def poisoned(self, batch, batch_idx):
        real(self, batch, batch_idx)
        if self.trainer.global_step == 10:
            with torch.no_grad():
                self.model.final_norm.weight[0] = float("inf")

    monkeypatch.setattr(GPTModule, "training_step", poisoned)
    with pytest.raises(UserError, match="not finite at step 10"):
        train(make_config(run_dir="run", trainer={"val_interval": 100}), [])
    assert [step for step, _ in c.checkpoints(Path("run"))] == [5]


def test_a_kill_during_a_save_leaves_a_directory_that_resumes(
    make_config, straight, monkeypatch, tmp_path, token_cache
):

    class Killed(BaseException):
        pass

    def killed(checkpoint, file):
        file.write(b"PK half of it")
        file.flush()
        raise Killed

    real = torch.save
    monkeypatch.setattr(torch, "save", lambda ck, f: killed(ck, f) if ck.get("global_step") == 15 else real(ck, f))
    monkeypatch.setattr(Path, "unlink", lambda *a, **k: None)  # a killed process tidies nothing
    with pytest.raises(Killed):
        train(make_config(run_dir="run"), [])
    monkeypatch.undo()
    run = tmp_path / "run"
    monkeypatch.setenv("GPTFRAME_CACHE", str(token_cache))
    assert [p.name for p in (run / "checkpoints").glob(".tmp-*")]
    train(resume(run), [])
    assert without_times(run) == without_times(straight)
    assert not list(run.rglob(".tmp-*"))


def test_two_runs_of_one_second_have_two_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import time

    now, made = time.localtime(), []
    workers = [threading.Thread(target=lambda: made.append(directory.create(None, "x", now))) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(made)) == 8 and all(path.is_dir() for path in made)


def test_a_directory_with_files_is_refused(make_config):
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match="run_dir=mine is not empty.*resume=mine"):
        train(make_config(run_dir="mine"), [])
    assert os.listdir("mine") == ["thesis.txt"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer": {"micro_batch_size": 3}}, "global_batch_size=8 is not divisible by trainer.micro_batch_size=3"),
        ({"trainer": {"accelerator": "gpu"}}, "accelerator=gpu was asked for and is not there"),
        ({"trainer": {"accelerator": "gpuu"}}, "not one of auto, gpu"),
        ({"schedule": {"name": "cosine", "warmup_steps": 21}}, "warmup_steps=21 is longer than the run"),
        ({"precision": {"name": "fp8"}}, "unknown precision 'fp8'"),
        ({"precision": {"name": "fp16"}}, "precision=fp16 needs a GPU"),
        ({"precision": {"name": "fp32", "x": 1}}, "precision.x"),
        ({"callbacks": {"progres": "bar"}}, "progres"),
        ({"callbacks": {"progress": "bars"}}, "callbacks.progress='bars'"),
        ({"callbacks": {"samples": {"interval": 7}}}, "multiple of trainer.val_interval=5"),
        ({"callbacks": {"samples": {"count": -1}}}, "count=-1"),
        ({"logger": {"name": "wandbb"}}, "Did you mean 'wandb'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(make_config, changes, said):
    if "gpu" in str(changes) and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError) as error:
        train(make_config(**changes), [])
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not Path("runs").exists()


def test_resuming_what_is_not_a_run_or_does_not_fit(make_config):
    run = train(make_config(trainer={"max_steps": 5}), []).run_dir
    config = resume(run)
    with pytest.raises(UserError, match="model.n_layers is 2 in the checkpoint and 1 now"):
        values = config.to_dict()
        train(type(config).from_dict({**values, "model": {**values["model"], "n_layers": 1}}), [])
    Path("empty").mkdir()
    with pytest.raises(UserError, match="is not a run directory"):
        train(type(config).from_dict({**config.to_dict(), "resume": "empty"}), [])
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="every checkpoint .* is damaged"):
        train(config, [])


def test_smooth_is_a_centred_mean():
    assert callbacks.smooth([0.0, 3.0, 6.0, 9.0], 1) == [1.5, 3.0, 6.0, 7.5]


def test_a_second_ctrl_c_stops_at_once(make_config, monkeypatch):
    real = GPTModule.training_step

    def training_step(self, batch, batch_idx):
        real(self, batch, batch_idx)
        if self.trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(GPTModule, "training_step", training_step)
    with pytest.raises(KeyboardInterrupt):
        train(make_config(run_dir="run"), [])
    assert signal.getsignal(signal.SIGINT) == before
    assert [step for step, _ in c.checkpoints(Path("run"))] == [5]


def test_without_a_terminal_every_row_is_a_line(make_config, capsys):
    train(make_config(callbacks={"progress": "auto"}, trainer={"max_steps": 10, "log_interval": 5}), [])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines if "loss" in line] == ["1/10", "5/10", "10/10"]
    assert all(part in lines[-2] for part in ("loss ", "lr ", "tokens/s ", "eta 0:00"))
    assert sum("val " in line for line in lines) == 2


def test_on_a_terminal_a_bar_shows_step_loss_lr_and_speed(monkeypatch):
    from rich.console import Console

    progress = callbacks.Progress(100, "bar")
    progress.console = Console(file=io.StringIO(), force_terminal=True, width=120)
    progress.start(0)
    progress.row(40, {"train_loss": 1.25, "lr": 3e-4, "tokens_per_second": 12345.0})
    progress.step(41)
    progress.stop()
    shown = progress.console.file.getvalue()
    assert all(part in shown for part in ("41/100", "loss 1.2500", "lr 3.00e-04", "tokens/s 12,345"))


def test_tensorboard_counts_in_steps_and_hides_what_a_resume_repeats(make_config):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(make_config(logger={"name": "tensorboard"}, trainer={"max_steps": 10}), []).run_dir
    c.checkpoint_path(run, 10).unlink()
    train(resume(run), [])  # from step 5
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == list(range(1, 11))
    assert [event.step for event in events.Scalars("val_loss")] == [5, 10]


def test_threads_are_set_and_put_back(make_config):
    before = torch.get_num_threads()
    run = train(make_config(trainer={"max_steps": 1, "threads": 2}), []).run_dir
    assert json.loads((run / "manifest.json").read_text())["sessions"][0]["device"]["threads"] == 2
    assert torch.get_num_threads() == before


def register_callback(state, stop_after=10**9):
    """A callback `mine` that logs how many steps it saw, and may stop the run."""
    import pytorch_lightning as pl

    from gptframe import register

    @register("callback", "mine")
    class Mine(pl.Callback):
        def state_dict(self):
            return state

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.log("steps", trainer.global_step)
            trainer.should_stop = trainer.global_step >= stop_after


def test_a_callback_logs_and_stops_and_the_run_is_saved_where_it_stopped(make_config):
    register_callback({}, stop_after=7)
    run = train(make_config(callbacks={"extra": {"mine": {}}}), [])
    assert run.step == 7 and (run.run_dir / "checkpoints" / "step_00000007.ckpt").is_file()
    found = rows(run.run_dir)
    assert [row["aux/steps"] for row in found] == ["1.0", "2.0", "3.0", "4.0", "5.0", "6.0", "7.0"]
    assert found[-1]["val_loss"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"path": Path("x")}, "Mine.state_dict holds what a checkpoint cannot (pathlib"),
        ({"function": lambda: 0}, "Mine.state_dict holds what a checkpoint cannot"),
        (3, "Mine.state_dict gave int: it must give a dict"),
    ],
)
def test_a_state_that_could_not_be_loaded_is_refused_before_the_first_step(make_config, state, said):
    register_callback(state)
    with pytest.raises(UserError) as error:
        train(make_config(callbacks={"extra": {"mine": {}}}, run_dir="run"), [])
    assert said in str(error.value) and not rows(Path("run"))
