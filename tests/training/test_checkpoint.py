"""Checkpoints: whole or absent, checked before trusted, and named differences between architectures."""

import os

import pytest
import torch

from gptframe import registry
from gptframe.errors import UserError
from gptframe.training import checkpoint as c


def write(run_dir, step, value=0.0):
    path = c.checkpoint_path(run_dir, step)
    c.save({"state_dict": {"w": torch.full((1000,), value)}, "gptframe": {"step": step}}, path)
    return path


def test_round_trip_and_nothing_beside_it(tmp_path):
    path = write(tmp_path, 7, 3.5)
    assert os.listdir(path.parent) == ["step_00000007.ckpt"]
    loaded = c.load(path)
    assert torch.equal(loaded["state_dict"]["w"], torch.full((1000,), 3.5)) and loaded["gptframe"] == {"step": 7}


class Refuses:
    def __reduce__(self):
        raise RuntimeError("disk full, say")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = write(tmp_path, 7, 3.5)
    with pytest.raises(RuntimeError, match="disk full"):
        c.save({"a": Refuses()}, path)
    assert os.listdir(path.parent) == [path.name]
    assert c.load(path)["state_dict"]["w"][0] == 3.5


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    path = tmp_path / "evil.ckpt"
    torch.save({"a": Evil()}, path)
    with pytest.raises(UserError, match="is not a checkpoint"):
        c.load(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.9, -1])
def test_every_truncation_is_seen(tmp_path, keep):
    path = write(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert c.damage(path)
    with pytest.raises(UserError, match="damaged"):
        c.load(path)


def test_a_flipped_bit_is_seen(tmp_path):
    path = write(tmp_path, 1, 1.0)
    data = bytearray(path.read_bytes())
    at = data.find(torch.ones(8).numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    path.write_bytes(bytes(data))
    assert "checksum" in c.damage(path)


def test_newest_valid_goes_back_and_says_so(tmp_path):
    assert c.newest_valid(tmp_path) == (None, [])
    write(tmp_path, 9), write(tmp_path, 100), write(tmp_path, 1000)
    newest = c.checkpoint_path(tmp_path, 1000)
    newest.write_bytes(newest.read_bytes()[:-10])
    (tmp_path / "checkpoints" / "notes.ckpt").write_text("not one of ours")
    path, notes = c.newest_valid(tmp_path)
    assert path == c.checkpoint_path(tmp_path, 100)
    assert len(notes) == 1 and "step_00001000.ckpt is damaged" in notes[0]
    for step in (9, 100):
        c.checkpoint_path(tmp_path, step).write_bytes(b"")
    with pytest.raises(UserError, match="every checkpoint"):
        c.newest_valid(tmp_path)


def test_prune_keeps_the_newest(tmp_path):
    for step in (5, 1000, 50, 500):
        write(tmp_path, step)
    c.prune(tmp_path, 2, step=1000)
    assert [step for step, _ in c.checkpoints(tmp_path)] == [1000, 500]


def test_prune_does_not_count_what_was_passed_over(tmp_path):
    """A run that went on from step 50, because 1000 was damaged, keeps what it has written since."""
    for step in (5, 50, 100):
        write(tmp_path, step)
    c.checkpoint_path(tmp_path, 1000).write_bytes(b"damaged")
    c.prune(tmp_path, 1, step=100)
    assert [step for step, _ in c.checkpoints(tmp_path)] == [1000, 100]


def test_leftovers_go(tmp_path):
    path = write(tmp_path, 5)
    (path.parent / ".tmp-123-step_00000010.ckpt").write_bytes(b"half")
    c.remove_leftovers(tmp_path)
    assert os.listdir(path.parent) == [path.name]


MODEL = {"name": "mini", "d_model": 64, "dropout": 0.0, "block": ["attention", "mlp"], "norm": {"name": "layernorm"}}


def test_another_architecture_is_named_by_its_options(tmp_path):
    now = {**MODEL, "d_model": 128, "norm": {"name": "rmsnorm"}, "dropout": 0.1, "name": "other"}
    with pytest.raises(UserError) as error:
        c.check_compatible({"model": MODEL}, now, tmp_path)
    said = str(error.value)
    assert "model.d_model is 64 in the checkpoint and 128 now" in said
    assert "model.norm.name is layernorm in the checkpoint and rmsnorm now" in said
    assert "dropout" not in said and "mini" not in said
    c.check_compatible({"model": MODEL}, {**MODEL, "block": ("attention", "mlp")}, tmp_path)


def test_a_plugin_that_is_not_loaded_is_named(tmp_path):
    meta = {"model": MODEL, "plugins": {"activation/my_act": "/home/me/my_act.py:7"}}
    with pytest.raises(UserError, match=r"activation 'my_act' of a plugin.*plugins=\[/home/me/my_act.py\]"):
        c.check_plugins(meta, tmp_path)
    c.check_plugins({"plugins": {"activation/gelu_tanh": "replaced.py:1"}}, tmp_path)


def test_used_plugins_are_those_of_the_config(monkeypatch):
    monkeypatch.setattr(registry, "origins", lambda: {"activation/mine": "a.py:1", "norm/unused": "b.py:2"})
    assert c.used_plugins({"activation": {"name": "mine"}, "block": ["attention"]}) == {"activation/mine": "a.py:1"}
