"""metrics.csv row by row, and loggers that cannot start."""

import csv
import sys

import pytest

from gptframe.errors import UserError
from gptframe.training.loggers import COLUMNS, LoggerContext, MetricsCSV, check_logger, read_csv


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_on_disk_at_once_and_one_a_step(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = MetricsCSV(path)
    assert path.read_text() == ",".join(COLUMNS) + "\n"
    metrics.log_metrics({"train_loss": 0.1, "tokens": 32}, 1)
    assert rows(path)[-1]["train_loss"] == "0.1"
    metrics.log_metrics({"train_loss": 1 / 3}, 2)
    metrics.log_metrics({"val_loss": 2.5}, 2)
    got = rows(path)
    assert [(r["step"], r["tokens"], r["train_loss"], r["val_loss"]) for r in got] == [
        ("1", "32", "0.1", ""),
        ("2", "", "0.3333333333333333", "2.5"),
    ]
    assert metrics.series("val_loss") == ([2], [2.5])


def test_a_new_metric_becomes_a_column(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = MetricsCSV(path)
    metrics.log_metrics({"train_loss": 1.0}, 1)
    metrics.log_metrics({"train_loss": 0.5, "mine, too": 7.0}, 2)
    metrics.log_metrics({"train_loss": 0.25}, 3)
    metrics.log_metrics({"val_loss": 0.75}, 3)
    assert [(r["step"], r["train_loss"], r["val_loss"], r["mine, too"]) for r in rows(path)] == [
        ("1", "1.0", "", ""), ("2", "0.5", "", "7.0"), ("3", "0.25", "0.75", ""),
    ]  # fmt: skip


def test_the_step_never_goes_back(tmp_path):
    metrics = MetricsCSV(tmp_path / "metrics.csv")
    metrics.log_metrics({"train_loss": 1.0}, 5)
    with pytest.raises(ValueError, match="step 4 is logged after step 5"):
        metrics.log_metrics({"train_loss": 1.0}, 4)


def test_resuming_cuts_what_lies_beyond(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = MetricsCSV(path)
    for step in range(1, 6):
        metrics.log_metrics({"train_loss": float(step), "mine": 1.0}, step)
    with open(path, "a") as file:
        file.write("6,7,8")  # killed in the middle of a row
    resumed = MetricsCSV(path, resume_step=3)
    resumed.log_metrics({"train_loss": 40.0}, 4)
    assert [(r["step"], r["train_loss"]) for r in rows(path)] == [
        ("1", "1.0"),
        ("2", "2.0"),
        ("3", "3.0"),
        ("4", "40.0"),
    ]
    columns, kept = read_csv(path)
    assert "mine" in columns and len(kept) == 4


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "wandbb"}, "Did you mean 'wandb'"),
        ({"name": "csv", "mode": "offline"}, "logger.mode"),
        ({"name": "wandb", "mode": "cloud"}, "neither 'offline' nor 'online'"),
        ({"name": "wandb", "projects": "x"}, "Did you mean 'project'"),
    ],
)
def test_bad_sections_are_refused(section, said):
    with pytest.raises(UserError) as error:
        check_logger(section)
    assert said in str(error.value)


def test_wandb_online_without_a_key_fails_at_once(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match="needs an API key") as error:
        check_logger({"name": "wandb", "mode": "online"})
    assert "\n" not in str(error.value)


def test_wandb_online_with_an_unreachable_server_says_so(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody listens
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="127.0.0.1 does not answer"):
        check_logger({"name": "wandb", "mode": "online"})


def test_tensorboard_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        check_logger({"name": "tensorboard"})


def test_wandb_is_not_imported_unless_asked_for(tmp_path):
    before = "wandb" in sys.modules
    assert check_logger({"name": "none"})(LoggerContext(tmp_path, "run")) is None
    assert ("wandb" in sys.modules) == before
