"""ANDREA's format against bytes written by hand, its counts, its moments, and its tokenizer."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from gptframe import load
from gptframe.config import Config
from gptframe.data.segments import SegmentsTokenizer
from gptframe.data.tokenizer import Source
from gptframe.data.tokenizer import load as load_tokenizer
from gptframe.errors import UserError
from gptframe.interop import andrea, rundir
from gptframe.model import build_model
from gptframe.training import checkpoint, directory

D, LAYERS, V, C = 8, 2, 11, 1024


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(andrea.SIZES, "andrea_tiny", (D, LAYERS, 2, V))


def tensors(seed: int) -> list[tuple[str, np.ndarray]]:
    """The published order, and the likely one inside a layer, of an untied model with affine norms and no biases."""
    random = np.random.default_rng(seed)

    def t(name: str, *shape: int) -> tuple[str, np.ndarray]:
        return name, random.standard_normal(shape).astype("<f4")

    found = [t("token_embedding.weight", V, D), t("position.table.weight", C, D)]
    for i in range(LAYERS):
        b = f"blocks.{i}"
        found += [t(f"{b}.attention.pre.{n}", D) for n in ("weight", "bias")]
        found += [t(f"{b}.attention.core.{n}.weight", D, D) for n in ("q", "k", "v", "out")]
        found += [t(f"{b}.mlp.pre.{n}", D) for n in ("weight", "bias")]
        found += [t(f"{b}.mlp.core.up.weight", 4 * D, D), t(f"{b}.mlp.core.down.weight", D, 4 * D)]
    return [*found, t("final_norm.weight", D), t("final_norm.bias", D), t("head.weight", V, D)]


def content(step: int = 1234) -> tuple[bytes, list[list[tuple[str, np.ndarray]]]]:
    parts = [tensors(seed) for seed in range(3)]
    n = sum(a.size for _, a in parts[0])
    return struct.pack("<ii", step, n) + b"".join(a.tobytes() for part in parts for _, a in part), parts


def test_weights_and_moments_come_from_their_places(tmp_path: Path, command) -> None:
    data, (weights, m, v) = content()
    (tmp_path / "model.bin").write_bytes(data)
    code, out, _ = command("import", "andrea", "--from", tmp_path / "model.bin", "--to", tmp_path / "run")
    assert code == 0 and "at step 1234: affine norms, untied head, linear biases off" in out and "experimental" in out
    state = load(tmp_path / "run").model.state_dict()
    assert sorted(state) == sorted(name for name, _ in weights)
    for name, array in weights:
        assert np.array_equal(state[name].numpy(), array), name
    moments = rundir.read_run(tmp_path / "run").moments
    for (name, first), (_, second) in zip(m, v, strict=True):
        assert np.array_equal(moments[name]["exp_avg"].numpy(), first)
        assert np.array_equal(moments[name]["exp_avg_sq"].numpy(), second)
    assert command("export", tmp_path / "run", "--format", "andrea", "--to", tmp_path / "back.bin")[0] == 0
    assert (tmp_path / "back.bin").read_bytes() == data
    (tmp_path / "ordinary").touch()
    assert (tmp_path / "back.bin").stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    code, _, err = command(
        "export", tmp_path / "run", "--format", "andrea", "--to", tmp_path / "c.bin", "--shard-size", "1MB"
    )
    assert code == 2 and "--shard-size goes with safetensors" in err and not (tmp_path / "c.bin").exists()


def test_a_map_of_ones_own(tmp_path: Path, command) -> None:
    """Fused queries, keys and values as one [in, out] matrix, and the other matrices transposed."""
    order = yaml.safe_load(andrea.ORDER.read_text())
    fused = [f"attention.core.{n}.weight" for n in "qkv"]
    order["layer"] = [
        {"tensors": fused, "layout": "in_out"},
        {"tensors": ["attention.core.out.weight"], "layout": "in_out"},
        *[name for name in order["layer"] if "pre" in name],
        *[{"tensors": [f"mlp.core.{n}.weight"], "layout": "in_out"} for n in ("up", "down")],
    ]
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(order))
    parts = []
    for seed in range(3):
        known = dict(tensors(seed))
        chunks = [known["token_embedding.weight"], known["position.table.weight"]]
        for i in range(LAYERS):
            b = f"blocks.{i}."
            chunks += [np.concatenate([known[b + name].T for name in fused], axis=1)]  # [in, 3 out]
            chunks += [known[b + "attention.core.out.weight"].T]
            chunks += [known[b + f"{s}.pre.{n}"] for s in ("attention", "mlp") for n in ("weight", "bias")]
            chunks += [known[b + "mlp.core.up.weight"].T, known[b + "mlp.core.down.weight"].T]
        parts += [*chunks, known["final_norm.weight"], known["final_norm.bias"], known["head.weight"]]
    n = sum(a.size for _, a in tensors(0))
    data = struct.pack("<ii", 5, n) + b"".join(np.ascontiguousarray(a).tobytes() for a in parts)
    (tmp_path / "m.bin").write_bytes(data)
    arguments = ("--map", tmp_path / "map.yaml")
    assert command("import", "andrea", "--from", tmp_path / "m.bin", "--to", tmp_path / "run", *arguments)[0] == 0
    state = load(tmp_path / "run").model.state_dict()
    assert all(np.array_equal(state[name].numpy(), array) for name, array in tensors(0))
    assert command("export", tmp_path / "run", "--format", "andrea", "--to", tmp_path / "b.bin", *arguments)[0] == 0
    assert (tmp_path / "b.bin").read_bytes() == data


def test_the_published_counts() -> None:
    """98,698,752 and 98,737,152 weights for 120M, 12,780,288 and 12,790,272 for 12M tell the norms apart."""
    known = list(andrea.readings("x"))
    counts = {count: (preset, cfg) for preset, cfg, count in known}
    assert len(counts) == len(known)  # no two readings have the same number
    for count, preset, affine in (
        (98_698_752, "andrea120m", False),
        (98_737_152, "andrea120m", True),
        (12_780_288, "andrea12m", False),
        (12_790_272, "andrea12m", True),
    ):
        found, cfg = counts[count]
        assert found == preset and cfg.norm["affine"] is affine
        assert not cfg.tie_head and not cfg.sublayers["mlp"]["bias"]
    for preset, cfg, count in known:
        if preset == "andrea_tiny":
            assert sum(p.numel() for p in build_model(cfg, device="meta").parameters()) == count
    assert counts[92_331_264][1].tie_head and counts[92_331_264][1].sublayers["attention"]["bias"]  # as it is taught


def refused(command, tmp_path: Path, data: bytes, *arguments: str) -> str:
    (tmp_path / "bad.bin").write_bytes(data)
    code, out, err = command("import", "andrea", "--from", tmp_path / "bad.bin", "--to", tmp_path / "run", *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and not (tmp_path / "run").exists()
    return err


def test_sizes_are_checked(tmp_path: Path, command) -> None:
    data, parts = content()
    n = sum(a.size for _, a in parts[0])
    assert f"is truncated: {len(data) - 1:,} bytes" in refused(command, tmp_path, data[:-1])
    assert "has 4 trailing bytes" in refused(command, tmp_path, data + b"1234")
    assert "fewer than the 8 of a header" in refused(command, tmp_path, data[:7])
    assert "step 1234 and -5 weights" in refused(command, tmp_path, struct.pack("<ii", 1234, -5))
    one_less = struct.pack("<ii", 1, n - 1) + data[8 : 8 + 12 * (n - 1)]
    assert "weights are those of no ANDREA model" in (err := refused(command, tmp_path, one_less))
    assert f"andrea_tiny has {n:,}" in err
    nan = bytearray(data)
    nan[8:12] = struct.pack("<f", float("nan"))
    assert "token_embedding.weight holds 1 values that are NaN" in refused(command, tmp_path, bytes(nan))
    assert "'andrea7b' is none of" in refused(command, tmp_path, data, "--model", "andrea7b")


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda o: o["layer"].remove("attention.core.k.weight"), "attention.core.k.weight has no place"),
        (lambda o: o["layer"].append("attention.core.k.weight"), "attention.core.k.weight stands twice"),
        (lambda o: o["layer"].append({"tensors": ["mlp.core.up.weight"], "layout": "diagonal"}), "diagonal"),
        (lambda o: o.pop("after"), "must hold the lists before, layer and after"),
        (lambda o: o["after"].append(7), "7 is neither a name"),
    ],
)
def test_maps_that_do_not_fit(change, words: str, tmp_path: Path, command) -> None:
    order = yaml.safe_load(andrea.ORDER.read_text())
    change(order)
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(order))
    assert words in refused(command, tmp_path, content()[0], "--map", str(tmp_path / "map.yaml"))
    assert "--map" in refused(command, tmp_path, content()[0], "--map", str(tmp_path / "nothing.yaml"))


def a_run(folder: Path, optimizer: str = "adamw", **changes) -> Path:
    cfg = Config.from_dict({"model": {"d_model": D, "n_heads": 2, "position": {"name": "learned"}, **changes}}).model
    model = build_model(cfg)
    folder.mkdir()
    config = Config(model=cfg, tokenizer={"name": "none"}, optimizer={"name": optimizer})
    directory.write_yaml(folder / "config.yaml", config.to_dict())
    state = {f"model.{k}": v for k, v in model.state_dict().items()}
    saved = {"state_dict": state, "gptframe": {"model": config.to_dict()["model"], "step": 3}}
    checkpoint.save(saved, checkpoint.checkpoint_path(folder, 3))
    return folder


def test_exports_that_the_format_cannot_hold(tmp_path: Path, command) -> None:
    for i, (changes, words) in enumerate(
        [
            ({"norm_placement": {"name": "post"}}, "model.norm_placement.name=post"),
            ({"position": {"name": "rope"}}, "model.position.name=rope"),
            ({"activation": {"name": "swiglu"}}, "model.activation.name=swiglu"),
            ({"attention": {"n_kv_heads": 1}}, "model.attention.n_kv_heads=1"),
        ]
    ):
        run = a_run(tmp_path / f"run{i}", **changes)
        code, _, err = command("export", run, "--format", "andrea", "--to", tmp_path / "x.bin")
        assert code == 2 and words in err
    run = a_run(tmp_path / "muon", "muon")
    code, _, err = command("export", run, "--format", "andrea", "--to", tmp_path / "x.bin")
    assert code == 2 and "optimizer.name=muon" in err and "--zero-moments" in err and not (tmp_path / "x.bin").exists()
    assert command("export", run, "--format", "andrea", "--to", tmp_path / "x.bin", "--zero-moments")[0] == 0
    n = sum(p.numel() for p in load(run).model.parameters())
    data = (tmp_path / "x.bin").read_bytes()
    assert struct.unpack("<ii", data[:8]) == (3, n) and len(data) == 8 + 12 * n and not any(data[8 + 4 * n :])
    code, _, err = command("export", run, "--format", "andrea", "--to", tmp_path / "x.bin", "--zero-moments")
    assert code == 2 and "exists, and nothing is overwritten" in err


def test_moments_of_a_trained_run_are_the_optimisers(tmp_path: Path) -> None:
    """What torch.optim.AdamW saves for the groups of training is found again by parameter name."""
    from gptframe.registry import build
    from gptframe.training.optimizer import param_groups

    model = build_model(Config.from_dict({"model": {"position": {"name": "learned"}}}).model)
    optimizer = build("optimizer", {"name": "adamw", "lr": 1e-3}, param_groups(model))
    model(torch.tensor([[1, 2, 3]]), targets=torch.tensor([[2, 3, 4]])).backward()
    optimizer.step()
    moments = rundir.moments_of({"optimizer_states": [optimizer.state_dict()]})
    for name, parameter in model.named_parameters():
        assert torch.equal(moments[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    assert rundir.moments_of({}) is None


# The tokenizer.


def test_longest_match_by_hand(tmp_path: Path, command) -> None:
    (tmp_path / "segments.txt").write_text("work\nwor\ned\n un\né\n", encoding="utf-8")
    found = SegmentsTokenizer(Source(), str(tmp_path / "segments.txt"))
    assert found.vocab_size == 5 + 257 and found.bos_id == 261
    assert found.encode("worked") == [0, 2]
    assert found.encode("worrk un") == [1, 5 + ord("r"), 5 + ord("k"), 3]
    assert found.encode("é€") == [4, *(5 + b for b in "€".encode())]
    for text in ("worked unworé€ \n", "", "\0", "unédé"):
        assert found.decode([found.bos_id, *found.encode(text)]) == text
    found.name = "segments"
    found.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode("worked un") == found.encode("worked un")


def test_the_segments_must_fill_the_models_vocabulary(tmp_path: Path, command, monkeypatch) -> None:
    monkeypatch.setitem(andrea.SIZES, "andrea_tiny", (D, LAYERS, 2, 262))
    monkeypatch.setitem(globals(), "V", 262)
    data, _ = content()
    (tmp_path / "m.bin").write_bytes(data)
    (tmp_path / "s.txt").write_text("work\nwor\ned\n un\n", encoding="utf-8")
    arguments = ("import", "andrea", "--from", tmp_path / "m.bin", "--to", tmp_path / "run")
    code, _, err = command(*arguments, "--tokenizer", tmp_path / "s.txt")
    assert code == 2 and "4 segments, 256 bytes and a start make 261 entries, and the model has 262" in err
    (tmp_path / "s.txt").write_text("work\nwor\ned\n un\né\n", encoding="utf-8")
    assert command(*arguments, "--tokenizer", tmp_path / "s.txt")[0] == 0
    assert load(tmp_path / "run").encode("worked") == [261, 0, 2]
    assert command("generate", tmp_path / "run", "--prompt", "worked", "--max-new-tokens", "3")[0] == 0


@pytest.mark.parametrize(
    "name,data,words",
    [
        ("s.txt", b"\xff", "not UTF-8"),
        ("s.json", b"{", "not JSON"),
        ("s.json", b"{}", "no list"),
        ("s.json", b'["a", 3]', "different, and none of them empty"),
        ("s.txt", b"a\na\n", "different"),
    ],
)
def test_segments_files_that_are_none(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=words):
        SegmentsTokenizer(Source(), str(tmp_path / name))
    with pytest.raises(UserError, match="No such file"):
        SegmentsTokenizer(Source(), str(tmp_path / "nothing"))
