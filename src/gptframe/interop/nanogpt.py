"""nanoGPT's ckpt.pt: a GPT-2 with or without biases, saved with torch.save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptframe.config import Config
from gptframe.errors import UserError
from gptframe.interop.rundir import Imported
from gptframe.interop.weights import check_finite, load_torch
from gptframe.model import build_model

COMPILED = "_orig_mod."
ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")


def read(file: Path, name: str) -> Imported:
    """Read a checkpoint (github.com/karpathy/nanoGPT, train.py); it is unpickled as tensors and plain values only.

    Raises:
        UserError: it is damaged, or no checkpoint of nanoGPT's.
    """
    file = file / "ckpt.pt" if file.is_dir() else file
    saved = load_torch(file)
    arguments, weights = saved.get("model_args"), saved.get("model")
    if not isinstance(arguments, dict) or not isinstance(weights, dict):
        raise UserError(f"{file} is no checkpoint of nanoGPT's: it has no model and model_args")
    for key in ARGUMENTS:
        value = arguments.get(key, True if key == "bias" else None)
        if not isinstance(value, int) or value < (0 if key == "bias" else 1):
            raise UserError(f"{file}: model_args.{key}={value!r} is no size")
    bias = bool(arguments.get("bias", True))
    section: dict[str, Any] = {
        "name": name,
        "d_model": arguments["n_embd"],
        "n_layers": arguments["n_layer"],
        "n_heads": arguments["n_head"],
        "vocab_size": arguments["vocab_size"],
        "context_length": arguments["block_size"],
        "tie_head": True,
        "dropout": float(arguments.get("dropout", 0.0)),
        "norm": {"name": "layernorm", "eps": 1e-5, "bias": bias},
        "activation": {"name": "gelu_exact"},
        "position": {"name": "learned"},
        "attention": {"bias": bias},
        "mlp": {"bias": bias},
    }
    cfg = Config.from_dict({"model": section}).model
    state = _state(file, {str(k).removeprefix(COMPILED): v for k, v in weights.items()}, cfg.n_layers, cfg.d_model)
    shapes = {key: tuple(p.shape) for key, p in build_model(cfg, device="meta").named_parameters()}
    for key, shape in shapes.items():
        if key not in state:
            raise UserError(f"{file}: there is nothing for {key}")
        if tuple(state[key].shape) != shape:
            raise UserError(f"{file}: {key} is {list(state[key].shape)}, and by model_args {list(shape)}")
        check_finite(key, state[key], file)
    extra = sorted(set(state) - set(shapes))
    if extra:
        raise UserError(f"{file}: {extra[0]} is there, and by model_args (bias={bias}) it should not be")
    step = saved.get("iter_num", 0)
    return Imported(
        cfg,
        state,
        source={"format": "nanogpt", "from": str(file)},
        step=step if isinstance(step, int) and step >= 0 else 0,
        notes=[
            "the vocabulary is not in the file: give --tokenizer tokenizer.json (mostly GPT-2's), or prompt with --ids"
        ],
    )


NAMES = {
    "ln_1": "attention.pre",
    "ln_2": "mlp.pre",
    "attn.c_proj": "attention.core.out",
    "mlp.c_fc": "mlp.core.up",
    "mlp.c_proj": "mlp.core.down",
}


def _state(file: Path, weights: dict[str, Any], n_layers: int, d_model: int) -> dict[str, Tensor]:
    """Our names; nanoGPT's linears are nn.Linear, [out, in] as ours."""
    top = {
        "transformer.wte.weight": "token_embedding.weight",
        "transformer.wpe.weight": "position.table.weight",
        "transformer.ln_f.weight": "final_norm.weight",
        "transformer.ln_f.bias": "final_norm.bias",
    }
    found: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{file}: {key} is no tensor")
        parts = key.split(".")
        if key in top:
            found[top[key]] = tensor
        elif key == "lm_head.weight":
            if "transformer.wte.weight" in weights and not torch.equal(tensor, weights["transformer.wte.weight"]):
                raise UserError(f"{file}: lm_head.weight is not the embedding, to which nanoGPT ties it")
        elif key.endswith(".attn.bias") and tensor.ndim == 4:  # the causal mask of old versions
            continue
        elif parts[:2] == ["transformer", "h"] and len(parts) > 4 and parts[2].isdecimal() and int(parts[2]) < n_layers:
            block, inner, kind = f"blocks.{parts[2]}", ".".join(parts[3:-1]), parts[-1]
            if inner == "attn.c_attn" and tensor.shape[0] == 3 * d_model:
                for n, part in zip("qkv", tensor.chunk(3), strict=True):
                    found[f"{block}.attention.core.{n}.{kind}"] = part.contiguous()
            elif inner in NAMES:
                found[f"{block}.{NAMES[inner]}.{kind}"] = tensor
            else:
                raise UserError(f"{file}: {key} {list(tensor.shape)} is no tensor of nanoGPT's")
        else:
            raise UserError(f"{file}: {key} is no tensor of nanoGPT's")
    return found
