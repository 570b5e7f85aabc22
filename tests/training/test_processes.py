"""Real processes: signals from outside, a kill without warning, and two ranks that do as one."""

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from tiny_run import BASE, merge, rows, without_times

from gptframe.training.run import train

SCRIPT = """
import sys, yaml
from gptframe.config import Config
from gptframe.training.run import train
if __name__ == "__main__":
    sys.exit(train(Config.from_dict(yaml.safe_load(open(sys.argv[1]))), sys.argv[2:]).exit_code)
"""


@pytest.fixture
def launch(tmp_path, token_cache):
    """`launch(run_dir, **changes)` starts a training process and returns it."""

    def start(run_dir, **changes):
        config = merge(BASE, {"callbacks": {"progress": "lines"}, **changes})
        config["run_dir"] = str(run_dir)
        (tmp_path / "train.py").write_text(SCRIPT)
        file = tmp_path / f"{run_dir.name}.yaml"
        file.write_text(yaml.safe_dump(config))
        return subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py"), str(file)],
            cwd=tmp_path,
            env={**os.environ, "GPTFRAME_CACHE": str(token_cache), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def wait_for(process, text, seconds=120):
    seen, end = [], time.monotonic() + seconds
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
        assert time.monotonic() < end, "".join(seen)
    raise AssertionError("".join(seen))


LONG = {"max_steps": 100_000, "val_interval": 50_000, "checkpoint_interval": 20, "log_interval": 10}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_its_code(launch, tmp_path, number):
    process = launch(tmp_path / "run", trainer=LONG, schedule={"name": "constant"})
    wait_for(process, "step     30/")
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, said
    assert "saved at step" in said and "resume=" in said and "Traceback" not in said
    step = int(rows(tmp_path / "run")[-1]["step"])
    assert (tmp_path / "run" / "checkpoints" / f"step_{step:08d}.ckpt").is_file()


def test_a_kill_without_warning_leaves_a_run_that_resumes_to_the_last_bit(launch, make_config, tmp_path):
    steps = {**LONG, "val_interval": 10, "checkpoint_interval": 1}  # it is nearly always saving
    process = launch(tmp_path / "run", trainer=steps, schedule={"name": "constant"})
    wait_for(process, "step     20/")
    process.kill()
    process.communicate()
    steps["max_steps"] = int(rows(tmp_path / "run")[-1]["step"]) + 10
    for key, name in (("resume", "run"), ("run_dir", "straight")):
        train(make_config(**{key: str(tmp_path / name)}, trainer=steps, schedule={"name": "constant"}), [])
    resumed, straight = (without_times(tmp_path / name) for name in ("run", "straight"))
    assert resumed == straight
    assert not list((tmp_path / "run").rglob(".tmp-*"))


def test_two_ranks_train_as_one(launch, make_config, tmp_path):
    steps = {"max_steps": 4, "val_interval": 2, "val_batches": None, "micro_batch_size": 2}
    train(make_config(trainer=steps, run_dir=str(tmp_path / "one")), [])
    two = launch(tmp_path / "two", trainer={**steps, "devices": 2, "strategy": "ddp"})
    said = two.communicate(timeout=300)[0]
    assert two.returncode == 0, said
    assert said.count("run directory:") == 1
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert a["step"] == b["step"] and a["tokens"] == b["tokens"]
        for key in ("train_loss", "val_loss", "grad_norm"):
            assert (a[key] == "") == (b[key] == "")
            if a[key]:
                assert float(a[key]) == pytest.approx(float(b[key]), rel=1e-4)
