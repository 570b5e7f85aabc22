"""Small models for the tests of gptframe.model."""

from __future__ import annotations

import dataclasses

import torch
from reference import Reference
from torch import nn

from gptframe.config import Config, ModelConfig
from gptframe.model import GPT, build_model

PLACEMENTS = ["pre", "post", "output", "sandwich", "peri", "keel", "deepnorm", "none"]
POST = ("post", "keel", "deepnorm")  # those with a norm after the addition, which a parallel block has no place for
TOPOLOGIES = [(t, p) for t in ("sequential", "parallel") for p in PLACEMENTS if not (t == "parallel" and p in POST)]
ACTIVATIONS = ["gelu_tanh", "gelu_exact", "relu", "squared_relu", "silu", "swiglu", "geglu", "reglu"]
POSITIONS = {
    "learned": {"name": "learned"},
    "rope": {"name": "rope", "base": 10000.0, "pairing": "interleaved"},
    "rope_half": {"name": "rope", "base": 500.0, "pairing": "half"},
    "rope_quarter_half": {"name": "rope", "pairing": "half", "fraction": 0.25},
    "rope_llama3": {
        "name": "rope",
        "pairing": "half",
        "base": 30.0,
        "scaling": {"name": "llama3", "factor": 4.0, "original_context": 32, "high_freq_factor": 3.0},
    },
    "rope_linear": {"name": "rope", "scaling": {"name": "linear", "factor": 2.5}},
    "rope_part_interleaved": {"name": "rope", "pairing": "interleaved", "fraction": 0.5},
    "sinusoidal": {"name": "sinusoidal", "base": 100.0},
    "alibi": {"name": "alibi"},
    "none": {"name": "none"},
}
ATTENTIONS = {
    "mha": {},
    "bias": {"bias": True},
    "no_out_bias": {"bias": True, "out_bias": False},
    "out_bias": {"out_bias": True},
    "head_dim": {"head_dim": 16, "n_kv_heads": 2},
    "gqa": {"n_kv_heads": 2},
    "mqa": {"n_kv_heads": 1},
    "window": {"window": 3},
    "qk_norm_head": {"qk_norm": "head"},
    "qk_norm_full": {"qk_norm": "full", "n_kv_heads": 2},
    "softcap": {"softcap": 1.5},
    "all": {"n_kv_heads": 2, "window": 4, "qk_norm": "head", "softcap": 2.0, "bias": True},
}
NORMS = {
    "layernorm": {"name": "layernorm", "eps": 1e-3},
    "layernorm_no_bias": {"name": "layernorm", "bias": False},
    "layernorm_plain": {"name": "layernorm", "affine": False},
    "rmsnorm": {"name": "rmsnorm", "eps": 1e-2},
    "rmsnorm_plain": {"name": "rmsnorm", "affine": False},
}
SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 19, "context_length": 16}


def small(placement: str = "pre", activation: str = "gelu_tanh", position: str = "rope", /, **changes) -> ModelConfig:
    """A config of width 32 with the named options; `changes` are keys of `model`."""
    named = {"norm_placement": {"name": placement}, "activation": {"name": activation}, "position": POSITIONS[position]}
    if unknown := set(changes) - {f.name for f in dataclasses.fields(ModelConfig)} - {"attention", "mlp"}:
        raise TypeError(f"no such options: {unknown}")
    return Config.from_dict({"model": {**SMALL, **named, **changes}}).model


def perturbed(cfg: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> GPT:
    """The model of `cfg` with values of order one everywhere, so that each gain and bias matters.

    The values are exact in float32, so that models of both precisions have the same.
    """
    model = build_model(cfg, seed=seed).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                noise = torch.randn(p.shape, generator=generator)
                if isinstance(module, nn.Embedding):
                    p.copy_(0.7 * noise)
                elif p.ndim == 2:
                    p.copy_(0.7 * noise / p.shape[1] ** 0.5)
                else:
                    p.copy_(0.3 * noise + (1.0 if name == "weight" else 0.0))
    return model.eval()


def plain(cfg: ModelConfig) -> dict:
    """The config as plain containers, with `attention` and `mlp` where YAML has them."""
    return Config(model=cfg).to_dict()["model"]


def reference_of(model: GPT) -> Reference:
    return Reference({k: v.double().numpy() for k, v in model.state_dict().items()}, plain(model.cfg))


def tokens(cfg: ModelConfig, batch: int = 2, length: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, cfg.vocab_size, (batch, length), generator=generator)
