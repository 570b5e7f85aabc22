"""nanoGPT (github.com/karpathy/nanoGPT), from the folder of a clone: `--peer nanogpt=DIR`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path

import torch

from peers import Peer, decayed_by_axes

OVERRIDES = ["activation=gelu_exact"]
NAMES = {
    "attention.pre": "ln_1",
    "attention.core.out": "attn.c_proj",
    "mlp.pre": "ln_2",
    "mlp.core.up": "mlp.c_fc",
    "mlp.core.down": "mlp.c_proj",
}


def load(ours, config, given: str) -> Peer:
    file = Path(given).expanduser() / "model.py"
    if not given or not file.is_file():
        raise ValueError("give the folder of a clone, as in --peer nanogpt=DIR")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cfg = config.model
    if not cfg.tie_head or cfg.position["name"] != "learned" or cfg.norm["name"] != "layernorm":
        raise ValueError("it is a GPT-2: learned positions, layer norms and a tied head")
    sizes = {"n_layer": cfg.n_layers, "n_head": cfg.n_heads, "n_embd": cfg.d_model, "block_size": cfg.context_length}
    with contextlib.redirect_stdout(io.StringIO()):  # it says how many parameters it has
        model = module.GPT(module.GPTConfig(**sizes, vocab_size=cfg.vocab_size, dropout=cfg.dropout, bias=True))
    state = ours.state_dict()
    found = {
        "transformer.wte.weight": state["token_embedding.weight"],
        "lm_head.weight": state["token_embedding.weight"],
    }
    found["transformer.wpe.weight"] = state["position.table.weight"]
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = state[f"final_norm.{kind}"]
        for i in range(cfg.n_layers):
            parts = [state[f"blocks.{i}.attention.core.{n}.{kind}"] for n in "qkv"]
            found[f"transformer.h.{i}.attn.c_attn.{kind}"] = torch.cat(parts)
            for mine, theirs in NAMES.items():
                found[f"transformer.h.{i}.{theirs}.{kind}"] = state[f"blocks.{i}.{mine}.{kind}"]
    model.load_state_dict(found)

    def loss(model, ids, targets):
        return model(ids, targets.masked_fill(targets == -100, -1))[1]

    return Peer("clone", model.train(), loss, decayed_by_axes(model, 0.1))
