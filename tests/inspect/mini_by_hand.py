"""mini's forward pass of the canonical example, value by value, in NumPy float64 and from the formulas.

It shares no code with gptframe: weights are drawn from (seed, parameter name) by tests/model/reference.py, and its
logits are checked against the forward pass there. `python tests/inspect/mini_by_hand.py` rewrites mini_goldens.json.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
GOLDENS = HERE / "mini_goldens.json"


def _reference():
    spec = importlib.util.spec_from_file_location("reference_for_goldens", HERE.parent / "model" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = _reference()

TEXT = "I work , you work , he works"
IDS = [7, 53, 4, 61, 53, 4, 32, 55]
SEED = 0
V, D, H, HEADS, LAYERS = 64, 64, 256, 4, 2
CONFIG = {
    "d_model": D, "n_layers": LAYERS, "n_heads": HEADS, "block": ["attention", "mlp"], "topology": "sequential",
    "tie_head": True, "norm_placement": {"name": "pre"}, "norm": {"name": "layernorm", "eps": 1e-5},
    "activation": {"name": "gelu_tanh"}, "position": {"name": "rope", "base": 10000.0, "pairing": "interleaved"},
    "attention": {}, "init": {"name": "normal", "std": 0.02},
}  # fmt: skip


def weights() -> dict[str, np.ndarray]:
    """Every parameter of mini as it is initialised: standard normal values by name, times the standard deviation."""

    def matrix(name, *shape):
        std = np.float32(reference.init_std(name, shape, CONFIG))
        return (reference.drawn(name, shape, SEED) * std).astype(np.float64)

    p = {"token_embedding.weight": matrix("token_embedding.weight", V, D)}
    for i in range(LAYERS):
        for part in ("q", "k", "v", "out"):
            name = f"blocks.{i}.attention.core.{part}.weight"
            p[name] = matrix(name, D, D)
        p[f"blocks.{i}.mlp.core.up.weight"] = matrix(f"blocks.{i}.mlp.core.up.weight", H, D)
        p[f"blocks.{i}.mlp.core.up.bias"] = np.zeros(H)
        p[f"blocks.{i}.mlp.core.down.weight"] = matrix(f"blocks.{i}.mlp.core.down.weight", D, H)
        p[f"blocks.{i}.mlp.core.down.bias"] = np.zeros(D)
        for sublayer in ("attention", "mlp"):
            p[f"blocks.{i}.{sublayer}.pre.weight"] = np.ones(D)
            p[f"blocks.{i}.{sublayer}.pre.bias"] = np.zeros(D)
    p["final_norm.weight"], p["final_norm.bias"] = np.ones(D), np.zeros(D)
    return p


def forward(p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every intermediate by the name that `gptframe trace` gives it, without the axis of sequences."""
    t = len(IDS)
    d = D // HEADS
    v: dict[str, np.ndarray] = {"token_embedding": p["token_embedding.weight"][IDS]}

    def layer_norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def heads(x):
        return x.reshape(t, HEADS, d).transpose(1, 0, 2)

    def rotated(x):  # pairs (2i, 2i + 1) turned by position * 10000^(-2i/d)
        y = x.copy()
        for position in range(t):
            for i in range(d // 2):
                angle = position * 10000.0 ** (-2 * i / d)
                a, b = x[:, position, 2 * i], x[:, position, 2 * i + 1]
                y[:, position, 2 * i] = a * math.cos(angle) - b * math.sin(angle)
                y[:, position, 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return y

    x = v["token_embedding"]
    for i in range(LAYERS):
        name, core = f"blocks.{i}.attention", f"blocks.{i}.attention.core"
        if i == 0:
            v["blocks.0.stream_before"] = x
        pre = v[f"{name}.pre"] = layer_norm(x)
        for part in "qkv":
            v[f"{name}.{part}"] = heads(pre @ p[f"{core}.{part}.weight"].T)
        q = v[f"{name}.q_rotated"] = rotated(v[f"{name}.q"])
        k = v[f"{name}.k_rotated"] = rotated(v[f"{name}.k"])
        scores = v[f"{name}.scores"] = q @ k.transpose(0, 2, 1) / math.sqrt(d)
        mask = v[f"{name}.mask"] = np.tril(np.ones((t, t), dtype=bool))
        e = np.where(mask, np.exp(scores), 0.0)
        pattern = v[f"{name}.pattern"] = e / e.sum(-1, keepdims=True)
        mixed = v[f"{name}.heads"] = pattern @ v[f"{name}.v"]
        delta = v[f"{name}.delta"] = mixed.transpose(1, 0, 2).reshape(t, D) @ p[f"{core}.out.weight"].T
        x = v[f"{name}.stream_after"] = x + delta

        name, core = f"blocks.{i}.mlp", f"blocks.{i}.mlp.core"
        pre = v[f"{name}.pre"] = layer_norm(x)
        up = v[f"{name}.up"] = pre @ p[f"{core}.up.weight"].T + p[f"{core}.up.bias"]
        act = v[f"{name}.activation"] = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        delta = v[f"{name}.delta"] = act @ p[f"{core}.down.weight"].T + p[f"{core}.down.bias"]
        x = v[f"{name}.stream_after"] = x + delta
    final = v["final_norm"] = layer_norm(x)
    logits = v["logits"] = final @ p["token_embedding.weight"].T
    e = np.exp(logits)
    v["probabilities"] = e / e.sum(-1, keepdims=True)
    return v


def goldens() -> dict[str, object]:
    """A few numbers of every value: its norm, and what belongs to the last token, ten digits each."""
    values = forward(weights())
    found = {}
    for name, x in values.items():
        x = x.astype(np.float64)
        last = x[..., -1, :]
        found[name] = {
            "shape": list(x.shape),
            "norm": round(float(np.sqrt((x**2).sum())), 10),
            "last_token": [round(float(n), 10) for n in last.reshape(-1)[:64]],
        }
    return {"text": TEXT, "ids": IDS, "seed": SEED, "values": found}


if __name__ == "__main__":
    p = weights()
    assert np.abs(reference.Reference(p, CONFIG)([IDS])[0] - forward(p)["logits"]).max() < 1e-12
    lines = json.dumps(goldens(), indent=1, ensure_ascii=False)
    import re

    lines = re.sub(r"\[\s+([-\d.e,\s]+?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", lines)
    GOLDENS.write_text(lines + "\n", encoding="utf-8")
    print(f"wrote {GOLDENS.name}")
