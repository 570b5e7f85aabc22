"""nanoGPT's ckpt.pt against a forward pass written with its names and torch's functions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gptframe import load

L, H, D, T, V = 2, 3, 24, 16, 31


def weights(bias: bool) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def t(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) * (0.3 if len(shape) > 1 else 0.5)

    w = {"transformer.wte.weight": t(V, D), "transformer.wpe.weight": t(T, D)}

    def add(name: str, *shape: int) -> None:
        w[f"{name}.weight"] = t(*shape)
        if bias:
            w[f"{name}.bias"] = t(shape[0])

    for i in range(L):
        h = f"transformer.h.{i}"
        add(f"{h}.ln_1", D)
        add(f"{h}.attn.c_attn", 3 * D, D)
        add(f"{h}.attn.c_proj", D, D)
        add(f"{h}.ln_2", D)
        add(f"{h}.mlp.c_fc", 4 * D, D)
        add(f"{h}.mlp.c_proj", D, 4 * D)
    add("transformer.ln_f", D)
    w["lm_head.weight"] = w["transformer.wte.weight"]
    return w


def forward(w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """model.py of nanoGPT: LayerNorm with optional bias, fused attention projection, exact GELU, tied head."""

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, (D,), w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    n = ids.shape[1]
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:n]
    for i in range(L):
        h = f"transformer.h.{i}"
        q, k, v = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(D, dim=2)
        q, k, v = (t.view(-1, n, H, D // H).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(D // H)
        scores = scores.masked_fill(torch.ones(n, n).tril() == 0, float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, n, D)
        x = x + linear(y, f"{h}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")), f"{h}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T


def checkpoint(w: dict, bias: bool, prefix: str = "", **changes) -> dict:
    arguments = {
        "n_layer": L, "n_head": H, "n_embd": D, "block_size": T, "vocab_size": V, "bias": bias, "dropout": 0.1,
    }  # fmt: skip
    return {
        "model": {prefix + k: v for k, v in w.items()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "model_args": {**arguments, **changes},
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare_char", "device": "cuda"},
    }


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_logits_are_nanogpts(bias: bool, prefix: str, tmp_path: Path, command) -> None:
    w = weights(bias)
    torch.save(checkpoint(w, bias, prefix), tmp_path / "ckpt.pt")
    code, out, _ = command("import", "nanogpt", "--from", tmp_path, "--to", tmp_path / "run")
    assert code == 0 and "the vocabulary is not in the file" in out
    ids = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(2))
    want = forward(w, ids)[0]
    got = load(tmp_path / "run").logits(ids[0].tolist())
    assert want.abs().max() > 1 and (got - want).abs().max() <= 1e-4
    assert (tmp_path / "run" / "checkpoints" / "step_00000250.ckpt").exists()
    code, out, err = command("export", tmp_path / "run", "--format", "hf", "--to", tmp_path / "hf")
    if bias:  # GPT-2 as transformers has it
        assert code == 0 and "GPT2LMHeadModel" in out
    else:
        assert code == 2 and "model.attention.bias=false" in err


def test_files_that_are_something_else(tmp_path: Path, command) -> None:
    w = weights(True)

    def refused(value: object) -> str:
        torch.save(value, tmp_path / "c.pt")
        code, out, err = command("import", "nanogpt", "--from", tmp_path / "c.pt", "--to", tmp_path / "run")
        assert code == 2 and out == "" and err.count("\n") == 1 and not (tmp_path / "run").exists()
        return err

    assert "no checkpoint of nanoGPT's" in refused({"model": w})
    assert "no dictionary" in refused([1])
    assert "model_args.n_layer=None" in refused(checkpoint(w, True, n_layer=None))
    assert "[31, 24], and by model_args [32, 24]" in refused(checkpoint(w, True, vocab_size=32))
    assert "nothing for blocks.2." in refused(checkpoint(w, True, n_layer=3))
    assert "transformer.h.1." in refused(checkpoint(w, True, n_layer=1))
    assert "and by model_args (bias=False) it should not be" in refused(checkpoint(w, False))
    assert "is no tensor of nanoGPT's" in refused(
        checkpoint({**w, "transformer.h.0.extra.weight": w["lm_head.weight"]}, True)
    )
    assert "lm_head.weight is not the embedding" in refused(
        checkpoint({**w, "lm_head.weight": w["lm_head.weight"] + 1}, True)
    )
    bad = {**w, "transformer.ln_f.weight": torch.full((D,), float("inf"))}
    assert "final_norm.weight holds 24 values" in refused(checkpoint(bad, True))
    (tmp_path / "c.pt").write_bytes((tmp_path / "c.pt").read_bytes()[:-100])
    code, _, err = command("import", "nanogpt", "--from", tmp_path / "c.pt", "--to", tmp_path / "run")
    assert code == 2 and "is truncated" in err
    code, _, err = command("import", "nanogpt", "--from", tmp_path / "none.pt", "--to", tmp_path / "run")
    assert code == 2 and "there is no such file" in err
