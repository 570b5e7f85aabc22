"""modded-nanogpt (github.com/KellerJordan/modded-nanogpt), from the folder of a clone: `--peer modded_nanogpt=DIR`.

The model is that of its record of 14 October 2024, the last in plain PyTorch and the first of the modern architecture:
RMS norms without gain, rotation, normalised queries and keys, squared ReLU, a tied head. Later ones are written for
eight H100 in kernels of their own, and have no equal here. Its script starts a run for several GPUs as soon as it is
imported, so what is taken from it are its imports, classes and functions.
"""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import torch

from peers import Peer, decayed_by_axes

DEVICES = ("cuda",)
OVERRIDES = ["norm=rmsnorm", "position=rope_half", "activation=squared_relu", "model.tie_head=true"]
OVERRIDES += ["model.norm.affine=false", "model.norm.eps=1.1920929e-07", "model.attention.qk_norm=head"]
OVERRIDES += ["model.attention.bias=false", "model.mlp.bias=false"]
FILE = "records/track_1_short/2024-10-14_ModernArch/train_gpt2.py"
NAMES = {"attention.core.v": "attn.c_v", "attention.core.out": "attn.c_proj"}
NAMES |= {"mlp.core.up": "mlp.c_fc", "mlp.core.down": "mlp.c_proj"}


def load(ours, config, given: str) -> Peer:
    file = Path(given).expanduser() / FILE
    if not given or not file.is_file():
        raise ValueError("give the folder of a clone, as in --peer modded_nanogpt=DIR")
    cfg = config.model
    if cfg.hidden != 4 * cfg.d_model or cfg.d_model % cfg.n_heads:
        raise ValueError("its MLP is 4 d_model wide")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    module = sys.modules["modded_nanogpt"] = types.ModuleType("modded_nanogpt")
    exec(compile(tree, str(file), "exec"), vars(module))
    sizes = {"n_layer": cfg.n_layers, "n_head": cfg.n_heads, "n_embd": cfg.d_model}
    model = module.GPT(module.GPTConfig(vocab_size=cfg.vocab_size, **sizes))

    def turned(weight: torch.Tensor) -> torch.Tensor:
        """The same rotation in the other direction, which it has: the halves of each head change places."""
        first, second = weight.view(cfg.n_heads, 2, -1, cfg.d_model).unbind(1)
        return torch.stack([second, first], dim=1).view_as(weight)

    state = ours.state_dict()
    embedding = state["token_embedding.weight"]
    found = {"transformer.wte.weight": embedding, "lm_head.weight": embedding}
    for i in range(cfg.n_layers):
        for n in "qk":
            found[f"transformer.h.{i}.attn.c_{n}.weight"] = turned(state[f"blocks.{i}.attention.core.{n}.weight"])
        for mine, theirs in NAMES.items():
            found[f"transformer.h.{i}.{theirs}.weight"] = state[f"blocks.{i}.{mine}.weight"]
    model.load_state_dict(found)

    def loss(model, ids, targets):
        return model(ids, targets.masked_fill(targets == -100, -1), return_logits=False)[1]

    return Peer("2024-10-14", model.train(), loss, decayed_by_axes(model, 0.1))
