"""LitGPT, from the package index: `pip install litgpt==0.5.13`.

It asks for versions of its own of half a dozen libraries, so a folder apart keeps the environment as it is:

    pip install --no-deps --target DIR litgpt==0.5.13 lightning psutil jsonargparse
    PYTHONPATH=DIR python benchmarks/step.py --peer litgpt
"""

from __future__ import annotations

import contextlib
from importlib.metadata import version

from peers import Peer, decayed_by_axes

OVERRIDES = ["position=rope_half", "activation=gelu_exact", "model.tie_head=false", "model.attention.bias=true"]
OVERRIDES += ["model.mlp.bias=true"]


def load(ours, config, given: str) -> Peer:
    import torch
    import torch.nn.functional as F

    with contextlib.redirect_stderr(None):
        from litgpt.config import Config
        from litgpt.model import GPT

    cfg = config.model
    if cfg.tie_head or cfg.position["name"] != "rope" or cfg.norm["name"] != "layernorm":
        raise ValueError("this comparison has rotated positions, layer norms and an untied head")
    model = GPT(
        Config(
            block_size=cfg.context_length,
            vocab_size=cfg.vocab_size,
            padded_vocab_size=cfg.vocab_size,
            n_layer=cfg.n_layers,
            n_head=cfg.n_heads,
            n_embd=cfg.d_model,
            intermediate_size=cfg.hidden,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=True,
            norm_eps=cfg.norm.get("eps", 1e-5),
        )
    )
    state = ours.state_dict()
    found = {"transformer.wte.weight": state["token_embedding.weight"], "lm_head.weight": state["head.weight"]}
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = state[f"final_norm.{kind}"]
        for i in range(cfg.n_layers):
            here, there = f"blocks.{i}", f"transformer.h.{i}"
            found[f"{there}.attn.qkv.{kind}"] = torch.cat([state[f"{here}.attention.core.{n}.{kind}"] for n in "qkv"])
            found[f"{there}.attn.proj.{kind}"] = state[f"{here}.attention.core.out.{kind}"]
            found[f"{there}.norm_1.{kind}"] = state[f"{here}.attention.pre.{kind}"]
            found[f"{there}.norm_2.{kind}"] = state[f"{here}.mlp.pre.{kind}"]
            found[f"{there}.mlp.fc.{kind}"] = state[f"{here}.mlp.core.up.{kind}"]
            found[f"{there}.mlp.proj.{kind}"] = state[f"{here}.mlp.core.down.{kind}"]
    model.load_state_dict(found)

    def loss(model, ids, targets):
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100)

    return Peer(version("litgpt"), model.train(), loss, decayed_by_axes(model, 0.1))
