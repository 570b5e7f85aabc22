"""Hugging Face transformers' formats: config.json to our options and back, and which tensor is which; a row a format.

Each format says what it takes from config.json, what stands in the way of writing one, and which of its tensors hold
which of ours. The files are read and written directly; the transformers library is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gptframe.config import Config, ModelConfig
from gptframe.errors import UserError
from gptframe.model import build_model

Json = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """Where tensors of ours lie in a file.

    how:
        same         as it is
        transposed   [in, out] instead of our [out, in]
        columns      several of ours side by side in one [in, out] matrix, or behind one another in one vector
        heads        queries, keys and values in turn for each head, in one [out, in] matrix or vector
    """

    theirs: str
    ours: tuple[str, ...]
    how: str = "same"

    def split(self, tensor: Tensor, n_heads: int) -> list[Tensor]:
        """Ours from theirs."""
        if self.how == "heads":
            return [part.flatten(0, 1) for part in tensor.unflatten(0, (n_heads, len(self.ours), -1)).unbind(1)]
        tensor = tensor.T if self.how != "same" and tensor.ndim == 2 else tensor
        return list(tensor.chunk(len(self.ours)))

    def join(self, tensors: list[Tensor], n_heads: int) -> Tensor:
        """Theirs from ours."""
        if self.how == "heads":
            return torch.stack([t.unflatten(0, (n_heads, -1)) for t in tensors], dim=1).flatten(0, 2)
        whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        return whole.T if self.how != "same" and whole.ndim == 2 else whole

    def shape(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Of theirs, from the shapes of ours."""
        whole = (sum(s[0] for s in shapes), *shapes[0][1:])
        return whole[::-1] if self.how in ("transposed", "columns") else whole


@dataclass(frozen=True)
class Format:
    """One model_type of transformers."""

    model_type: str
    architecture: str
    """The class that config.json names."""
    read: Callable[[Reader], Json]
    """config.json -> `model` section."""
    write: Callable[[Writer], Json]
    """Our config -> config.json; what stands in the way is noted in the Writer."""
    rules: Callable[[ModelConfig], list[Rule]]
    prefix: str
    """Before the names of the body; files of the bare body lack it."""
    ignored: tuple[str, ...] = ()
    """Ends of names of constants that older files hold."""


class Reader:
    """config.json, with its mistakes named."""

    def __init__(self, values: Json, where: str) -> None:
        self.values, self.where = values, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{self.where}: {key}={value!r} must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UserError(f"{self.where}: {key}={value!r} must be a number greater than 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key}={value!r} must be true or false")
        return value

    def refuse(self, **unsupported: Any) -> None:
        """UserError where a key has another value than the one that is supported."""
        for key, value in unsupported.items():
            if self.get(key, value) != value:
                raise UserError(f"{self.where}: {key}={self.get(key)!r} is not supported")

    def activation(self, key: str, table: Mapping[str, str]) -> Json:
        name = self.get(key)
        if name not in table:
            raise UserError(f"{self.where}: {key}={name!r} is not supported. Known: {', '.join(table)}")
        return {"name": table[name]}

    def sizes(self, d_model: str, n_layers: str, n_heads: str, context: str) -> Json:
        return {
            "d_model": self.whole(d_model),
            "n_layers": self.whole(n_layers),
            "n_heads": self.whole(n_heads),
            "vocab_size": self.whole("vocab_size"),
            "context_length": self.whole(context),
            "init": {"name": "normal", "std": self.number("initializer_range", 0.02)},
        }

    def rope(self, fraction: float = 1.0) -> Json:
        """The `position` section. transformers 4 has rope_theta and rope_scaling, transformers 5 rope_parameters."""
        nested = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(nested, dict):
            raise UserError(f"{self.where}: the RoPE parameters {nested!r} must be an object")
        if any(isinstance(value, dict) for value in nested.values()):
            raise UserError(f"{self.where}: RoPE parameters that differ between layers are not supported")
        inner = Reader(nested, f"{self.where}: RoPE")
        base = inner.number("rope_theta", self.number("rope_theta", 10000.0))
        kind = nested.get("rope_type", nested.get("type", "default"))
        fraction = inner.number("partial_rotary_factor", self.number("partial_rotary_factor", fraction))
        section: Json = {"name": "rope", "base": base, "pairing": "half", "fraction": fraction}
        if kind == "linear":
            section["scaling"] = {"name": "linear", "factor": inner.number("factor", 1.0)}
        elif kind == "llama3":
            section["scaling"] = {
                "name": "llama3",
                "factor": inner.number("factor", 8.0),
                "original_context": inner.whole("original_max_position_embeddings", 8192),
                "low_freq_factor": inner.number("low_freq_factor", 1.0),
                "high_freq_factor": inner.number("high_freq_factor", 4.0),
            }
        elif kind != "default":
            raise UserError(f"{self.where}: RoPE of type {kind!r} is not supported. Known: default, linear, llama3")
        if section.get("scaling", {}).get("factor") == 1:
            del section["scaling"]
        return section


@dataclass
class Writer:
    """Our config, and what stands in the way of writing it in a format."""

    cfg: ModelConfig
    obstacles: list[str] = field(default_factory=list)

    def need(self, key: str, value: Any, *allowed: Any) -> None:
        if value not in allowed:
            shown = f"model.{key}={_yaml(value)}"
            self.obstacles.append(shown)

    def common(self) -> None:
        """What none of the formats has."""
        cfg = self.cfg
        self.need("embedding_scale", cfg.embedding_scale, 1.0)
        self.need("residual_scale", cfg.residual_scale, None, 1.0)
        self.need("logit_softcap", cfg.logit_softcap, None)
        self.need("head.name", cfg.head["name"], "linear")
        self.need("transforms", ",".join(cfg.transforms), "")
        self.need("attention.softcap", self.attention.get("softcap"), None)
        for layer in range(cfg.n_layers):
            names = [section["name"] for section in cfg.block_of(layer)]
            if names != ["attention", "mlp"]:
                self.obstacles.append(
                    f"model.{f'layers.{layer}' if layer in cfg.layers else 'block'}=[{','.join(names)}]"
                )
                return
        for layer in range(cfg.n_layers):
            for section in cfg.block_of(layer):
                own = {k: v for k, v in section.items() if k not in ("name", "window")}
                shared = {k: v for k, v in cfg.sublayers[section["name"]].items() if k != "window"}
                if any(own.get(k) != shared.get(k) for k in {*own, *shared}):
                    self.obstacles.append(f"model.layers.{layer}")
                    return

    @property
    def attention(self) -> Json:
        return self.cfg.sublayers.get("attention", {})

    @property
    def mlp(self) -> Json:
        return self.cfg.sublayers.get("mlp", {})

    @property
    def kv_heads(self) -> int:
        return self.attention.get("n_kv_heads") or self.cfg.n_heads

    @property
    def biases(self) -> tuple[bool, bool]:
        """Of queries, keys and values, and of the output."""
        bias = bool(self.attention.get("bias", False))
        out = self.attention.get("out_bias")
        return bias, bias if out is None else bool(out)

    def windows(self) -> list[int | None]:
        """Of each layer; None where it would hide nothing."""
        found = [section.get("window") for i in range(self.cfg.n_layers) for section in self.cfg.block_of(i)[:1]]
        return [None if w is None or w >= self.cfg.context_length else w for w in found]

    def norm(self, name: str, *, bias: bool = True) -> float:
        norm = self.cfg.norm
        self.need("norm.name", norm["name"], name)
        self.need("norm.affine", norm.get("affine", True), True)
        if name == "layernorm":
            self.need("norm.bias", norm.get("bias", True), bias)
        return float(norm.get("eps", 1e-5))

    def activation(self, table: Mapping[str, str]) -> str:
        name = self.cfg.activation["name"]
        back = {ours: theirs for theirs, ours in reversed(list(table.items()))}
        self.need("activation.name", name, *back)
        self.need("activation", {k: v for k, v in self.cfg.activation.items() if k != "name"}, {})
        return back.get(name, "")

    def rope(self) -> Json:
        """rope_theta and rope_scaling, and the part of each head that is rotated."""
        position = self.cfg.position
        self.need("position.name", position["name"], "rope")
        values: Json = {"rope_theta": float(position.get("base", 10000.0))}
        scaling = position.get("scaling")
        if scaling is not None:
            values["rope_scaling"] = {"rope_type": scaling["name"], "factor": float(scaling["factor"])}
            if scaling["name"] == "llama3":
                values["rope_scaling"] |= {
                    "low_freq_factor": float(scaling.get("low_freq_factor", 1.0)),
                    "high_freq_factor": float(scaling.get("high_freq_factor", 4.0)),
                    "original_max_position_embeddings": int(scaling.get("original_context", 8192)),
                }
        return values

    @property
    def fraction(self) -> float:
        return float(self.cfg.position.get("fraction", 1.0))


def _yaml(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, value) if not isinstance(value, dict) else str(value)


def expansion(hidden: int, d_model: int) -> Json:
    """An `expansion` section that gives exactly this width."""
    for section in (
        {"factor": hidden // d_model if hidden % d_model == 0 else hidden / d_model, "multiple_of": 1},
        {"factor": math.floor(1000 * hidden / d_model) / 1000 or hidden / d_model / 2, "multiple_of": hidden},
    ):
        if ModelConfig(d_model=d_model, n_heads=1, expansion=section).hidden == hidden:
            return section
    raise UserError(f"an MLP width of {hidden} cannot be given as a multiple of {d_model}")


# GPT-2, and what shares its plain MLP.

PLAIN = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu_exact",
         "relu": "relu", "silu": "silu", "swish": "silu"}  # fmt: skip
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "relu": "reglu"}


def _read_gpt2(c: Reader) -> Json:
    c.refuse(scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True, add_cross_attention=False)
    sizes = c.sizes("n_embd", "n_layer", "n_head", "n_positions" if "n_positions" in c.values else "n_ctx")
    return {
        **sizes,
        "expansion": expansion(c.whole("n_inner", 4 * sizes["d_model"]), sizes["d_model"]),
        "tie_head": c.flag("tie_word_embeddings", True),
        "norm": {"name": "layernorm", "eps": c.number("layer_norm_epsilon", 1e-5)},
        "activation": c.activation("activation_function", PLAIN),
        "position": {"name": "learned"},
        "attention": {"bias": True},
        "mlp": {"bias": True},
    }


def _write_gpt2(w: Writer) -> Json:
    cfg = w.cfg
    w.common()
    w.need("norm_placement.name", cfg.norm_placement["name"], "pre")
    w.need("topology", cfg.topology_section["name"], "sequential")
    w.need("position.name", cfg.position["name"], "learned")
    w.need("attention.n_kv_heads", w.kv_heads, cfg.n_heads)
    w.need("attention.qk_norm", w.attention.get("qk_norm", "none"), "none")
    w.need("attention.window", next((x for x in w.windows() if x), None), None)
    w.need("attention.head_dim", cfg.head_dim, cfg.d_model // cfg.n_heads)
    w.need("attention.bias", w.biases[0], True)
    w.need("attention.out_bias", w.biases[1], True)
    w.need("mlp.bias", w.mlp.get("bias", True), True)
    return {
        "n_embd": cfg.d_model,
        "n_layer": cfg.n_layers,
        "n_head": cfg.n_heads,
        "n_positions": cfg.context_length,
        "n_inner": cfg.hidden,
        "layer_norm_epsilon": w.norm("layernorm"),
        "activation_function": w.activation(PLAIN),
        **{key: cfg.dropout for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")},
    }


def _both(theirs: str, *ours: str, how: str = "same", bias: bool = True) -> list[Rule]:
    parts = ("weight", "bias") if bias else ("weight",)
    return [Rule(f"{theirs}.{part}", tuple(f"{name}.{part}" for name in ours), how) for part in parts]


def _head(cfg: ModelConfig, theirs: str = "lm_head") -> list[Rule]:
    return [] if cfg.tie_head else [Rule(f"{theirs}.weight", ("head.weight",))]


def _rules_gpt2(cfg: ModelConfig) -> list[Rule]:
    rules = [
        Rule("transformer.wte.weight", ("token_embedding.weight",)),
        Rule("transformer.wpe.weight", ("position.table.weight",)),
        *_both("transformer.ln_f", "final_norm"),
        *_head(cfg),
    ]
    for i in range(cfg.n_layers):
        h, b = f"transformer.h.{i}", f"blocks.{i}"
        rules += _both(f"{h}.ln_1", f"{b}.attention.pre") + _both(f"{h}.ln_2", f"{b}.mlp.pre")
        rules += _both(f"{h}.attn.c_attn", *(f"{b}.attention.core.{n}" for n in "qkv"), how="columns")
        rules += _both(f"{h}.attn.c_proj", f"{b}.attention.core.out", how="transposed")
        rules += _both(f"{h}.mlp.c_fc", f"{b}.mlp.core.up", how="transposed")
        rules += _both(f"{h}.mlp.c_proj", f"{b}.mlp.core.down", how="transposed")
    return rules


# GPT-NeoX (Pythia).


def _read_neox(c: Reader) -> Json:
    sizes = c.sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    position = c.rope(c.number("rotary_pct", 0.25))
    if "rotary_emb_base" in c.values:
        position["base"] = c.number("rotary_emb_base", 10000.0)
    return {
        **sizes,
        "expansion": expansion(c.whole("intermediate_size"), sizes["d_model"]),
        "topology": "parallel" if c.flag("use_parallel_residual", True) else "sequential",
        "tie_head": c.flag("tie_word_embeddings", False),
        "norm": {"name": "layernorm", "eps": c.number("layer_norm_eps", 1e-5)},
        "activation": c.activation("hidden_act", PLAIN),
        "position": position,
        "attention": {"bias": c.flag("attention_bias", True)},
        "mlp": {"bias": True},
    }


def _write_neox(w: Writer) -> Json:
    cfg, topology = w.cfg, w.cfg.topology_section["name"]
    w.common()
    w.need("norm_placement.name", cfg.norm_placement["name"], "pre")
    w.need("topology", topology, "sequential", "parallel")
    w.need("attention.n_kv_heads", w.kv_heads, cfg.n_heads)
    w.need("attention.qk_norm", w.attention.get("qk_norm", "none"), "none")
    w.need("attention.window", next((x for x in w.windows() if x), None), None)
    w.need("attention.head_dim", cfg.head_dim, cfg.d_model // cfg.n_heads)
    w.need("attention.out_bias", w.biases[1], w.biases[0])
    w.need("mlp.bias", w.mlp.get("bias", True), True)
    rope = w.rope()
    return {
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "max_position_embeddings": cfg.context_length,
        "intermediate_size": cfg.hidden,
        "use_parallel_residual": topology == "parallel",
        "layer_norm_eps": w.norm("layernorm"),
        "hidden_act": w.activation(PLAIN),
        "attention_bias": w.biases[0],
        "rotary_pct": w.fraction,
        "rotary_emb_base": rope["rope_theta"],
        **rope,
        "hidden_dropout": cfg.dropout,
        "attention_dropout": cfg.dropout,
    }


def _rules_neox(cfg: ModelConfig) -> list[Rule]:
    bias = bool(cfg.sublayers["attention"].get("bias", False))
    rules = [
        Rule("gpt_neox.embed_in.weight", ("token_embedding.weight",)),
        *_both("gpt_neox.final_layer_norm", "final_norm"),
        *_head(cfg, "embed_out"),
    ]
    for i in range(cfg.n_layers):
        h, b = f"gpt_neox.layers.{i}", f"blocks.{i}"
        rules += _both(f"{h}.input_layernorm", f"{b}.attention.pre")
        rules += _both(f"{h}.post_attention_layernorm", f"{b}.mlp.pre")
        names = (f"{b}.attention.core.{n}" for n in "qkv")
        rules += _both(f"{h}.attention.query_key_value", *names, how="heads", bias=bias)
        rules += _both(f"{h}.attention.dense", f"{b}.attention.core.out", bias=bias)
        rules += _both(f"{h}.mlp.dense_h_to_4h", f"{b}.mlp.core.up")
        rules += _both(f"{h}.mlp.dense_4h_to_h", f"{b}.mlp.core.down")
    return rules


# LLaMA and its kin: one table, a row a format.


@dataclass(frozen=True)
class Kin:
    """How a format differs from LLaMA.

    Attributes:
        biases: of queries, keys, values and output: "all" or "none" by the flag attention_bias, or always "qkv".
        mlp_bias: whether the flag mlp_bias exists.
        windows: "none", "all" (sliding_window for all layers), or "some" (layer_types says which).
        placement, qk_norm: what the architecture has.
        head_dim: what it is where config.json does not say; None for hidden_size / num_attention_heads.
        eps: of the norms, where config.json does not say.
    """

    biases: str = "flag"
    mlp_bias: bool = False
    windows: str = "none"
    placement: str = "pre"
    qk_norm: str = "none"
    head_dim: int | None = None
    eps: float = 1e-6


KIN = {
    "llama": Kin(mlp_bias=True),
    "mistral": Kin(biases="none", windows="all"),
    "qwen2": Kin(biases="qkv", windows="some"),
    "qwen3": Kin(qk_norm="head", windows="some", head_dim=128),
    "olmo2": Kin(placement="output", qk_norm="full", eps=1e-5),
}


def _read_kin(kin: Kin) -> Callable[[Reader], Json]:
    def read(c: Reader) -> Json:
        sizes = c.sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        heads, d_model = sizes["n_heads"], sizes["d_model"]
        attention: Json = {"n_kv_heads": c.whole("num_key_value_heads", heads), "qk_norm": kin.qk_norm}
        if attention["n_kv_heads"] == heads:
            attention["n_kv_heads"] = None
        head_dim = c.whole("head_dim", kin.head_dim or max(1, d_model // heads))
        if head_dim * heads != d_model:
            attention["head_dim"] = head_dim
        attention["bias"] = {"none": False, "qkv": True, "flag": c.flag("attention_bias")}[kin.biases]
        if kin.biases == "qkv":
            attention["out_bias"] = False
        section = {
            **sizes,
            "expansion": expansion(c.whole("intermediate_size"), d_model),
            "tie_head": c.flag("tie_word_embeddings", False),
            "norm": {"name": "rmsnorm", "eps": c.number("rms_norm_eps", kin.eps)},
            "norm_placement": {"name": kin.placement},
            "activation": c.activation("hidden_act", GATED),
            "position": c.rope(),
            "attention": attention,
            "mlp": {"bias": c.flag("mlp_bias") if kin.mlp_bias else False},
        }
        windows = _windows(c, kin, sizes["n_layers"])
        if len(set(windows)) == 1:
            attention["window"] = windows[0]
        else:
            section["layers"] = {
                i: [{"name": "attention", "window": w}, "mlp"] for i, w in enumerate(windows) if w is not None
            }
        return section

    return read


def _windows(c: Reader, kin: Kin, n_layers: int) -> list[int | None]:
    """Of each layer. transformers 5 lists layer_types; before, max_window_layers counted the full ones from 0 on."""
    if kin.windows == "none" or c.get("sliding_window") is None:
        return [None] * n_layers
    window = c.whole("sliding_window")
    if kin.windows == "all":
        return [window] * n_layers
    if not c.flag("use_sliding_window"):
        return [None] * n_layers
    types = c.get("layer_types")
    if types is None:
        full = c.get("max_window_layers", 28)
        types = ["full_attention" if i < full else "sliding_attention" for i in range(n_layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != n_layers or any(t not in known for t in types):
        raise UserError(f"{c.where}: layer_types must name full_attention or sliding_attention for {n_layers} layers")
    return [known[t] for t in types]


def _write_kin(name: str, kin: Kin) -> Callable[[Writer], Json]:
    def write(w: Writer) -> Json:
        cfg = w.cfg
        w.common()
        w.need("norm_placement.name", cfg.norm_placement["name"], kin.placement)
        w.need("topology", cfg.topology_section["name"], "sequential")
        w.need("attention.qk_norm", w.attention.get("qk_norm", "none"), kin.qk_norm)
        w.need("position.fraction", w.fraction, 1.0)
        qkv, out = w.biases
        allowed = {"none": [(False, False)], "qkv": [(True, False)], "flag": [(False, False), (True, True)]}
        if (qkv, out) not in allowed[kin.biases]:
            w.obstacles.append(f"model.attention.bias={_yaml(qkv)} with out_bias={_yaml(out)}")
        w.need("mlp.bias", w.mlp.get("bias", True), False, *([True] if kin.mlp_bias else []))
        windows = w.windows()
        values: Json = {}
        if kin.windows == "none":
            w.need("attention.window", next((x for x in windows if x), None), None)
        elif kin.windows == "all":
            if len(set(windows)) > 1:
                w.obstacles.append("model.layers (windows that differ)")
            values["sliding_window"] = windows[0]
        else:
            if len({x for x in windows if x}) > 1:
                w.obstacles.append("model.layers (windows that differ)")
            window = next((x for x in windows if x), None)
            first = next((i for i, x in enumerate(windows) if x), len(windows))
            values |= {
                "use_sliding_window": window is not None,
                "sliding_window": window,
                "max_window_layers": first,
                "layer_types": ["sliding_attention" if x else "full_attention" for x in windows],
            }
        if name == "qwen2" or name == "olmo2":  # they have no head_dim of their own
            w.need("attention.head_dim", cfg.head_dim, cfg.d_model // cfg.n_heads)
        else:
            values["head_dim"] = cfg.head_dim
        if kin.biases == "flag":
            values["attention_bias"] = qkv
        if kin.mlp_bias:
            values["mlp_bias"] = bool(w.mlp.get("bias", True))
        return {
            "hidden_size": cfg.d_model,
            "num_hidden_layers": cfg.n_layers,
            "num_attention_heads": cfg.n_heads,
            "num_key_value_heads": w.kv_heads,
            "max_position_embeddings": cfg.context_length,
            "intermediate_size": cfg.hidden,
            "rms_norm_eps": w.norm("rmsnorm"),
            "hidden_act": w.activation(GATED),
            **w.rope(),
            **values,
            "attention_dropout": cfg.dropout,
        }

    return write


def _rules_kin(kin: Kin) -> Callable[[ModelConfig], list[Rule]]:
    def rules(cfg: ModelConfig) -> list[Rule]:
        qkv, out = Writer(cfg).biases
        mlp = bool(cfg.sublayers["mlp"].get("bias", True))
        names = {"token_embedding": "embed_tokens", "final_norm": "norm"}
        found = [Rule(f"model.{theirs}.weight", (f"{ours}.weight",)) for ours, theirs in names.items()]
        found += _head(cfg)
        # Before the core: input_layernorm; in OLMo 2 they stand after it.
        before = ("input_layernorm", "post_attention_layernorm")
        after = ("post_attention_layernorm", "post_feedforward_layernorm")
        seat, norms = ("out", after) if kin.placement == "output" else ("pre", before)
        for i in range(cfg.n_layers):
            h, b = f"model.layers.{i}", f"blocks.{i}"
            for norm, sublayer in zip(norms, ("attention", "mlp"), strict=True):
                found.append(Rule(f"{h}.{norm}.weight", (f"{b}.{sublayer}.{seat}.weight",)))
            for n in "qkv":
                found += _both(f"{h}.self_attn.{n}_proj", f"{b}.attention.core.{n}", bias=qkv)
            found += _both(f"{h}.self_attn.o_proj", f"{b}.attention.core.out", bias=out)
            if kin.qk_norm != "none":
                for n in ("q_norm", "k_norm"):
                    found.append(Rule(f"{h}.self_attn.{n}.weight", (f"{b}.attention.core.{n}.weight",)))
            for n in ("gate", "up", "down"):
                found += _both(f"{h}.mlp.{n}_proj", f"{b}.mlp.core.{n}", bias=mlp)
        return found

    return rules


_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2"}
FORMATS: dict[str, Format] = {
    "gpt2": Format(
        "gpt2", "GPT2LMHeadModel", _read_gpt2, _write_gpt2, _rules_gpt2, "transformer.",
        (".attn.bias", ".attn.masked_bias"),
    ),
    **{
        name: Format(
            name, f"{_CLASSES[name]}ForCausalLM", _read_kin(kin), _write_kin(name, kin), _rules_kin(kin), "model.",
            (".rotary_emb.inv_freq",),
        )
        for name, kin in KIN.items()
    },
    "gpt_neox": Format(
        "gpt_neox", "GPTNeoXForCausalLM", _read_neox, _write_neox, _rules_neox, "gpt_neox.",
        (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
}  # fmt: skip


def model_of(values: Json, where: str, name: str) -> tuple[Format, ModelConfig]:
    """The format and our config of a config.json.

    Raises:
        UserError: a model_type or an option that we do not have, or sizes that do not fit together.
    """
    kind = values.get("model_type")
    if kind not in FORMATS:
        raise UserError(f"{where}: model_type={kind!r} is not supported. Known: {', '.join(FORMATS)}")
    section = FORMATS[kind].read(Reader(values, where))
    try:
        cfg = Config.from_dict({"model": {"name": name, **section}}).model
        build_model(cfg, device="meta")
        return FORMATS[kind], cfg
    except UserError as error:
        raise UserError(f"{where} does not fit together: {error}") from None


_KINDS = ("model.position.name", "model.norm.name")


def config_of(cfg: ModelConfig, wanted: str | None = None, prefer: str | None = None) -> tuple[Format, Json]:
    """The format that holds a model, and its config.json.

    Args:
        wanted: a model_type; None takes the first that can hold it.
        prefer: the model_type to try first.

    Raises:
        UserError: none can, or the wanted one cannot; with the options that stand in the way.
    """
    tried: list[tuple[Format, list[str]]] = []
    for name, known in sorted(FORMATS.items(), key=lambda item: item[0] != prefer):
        if wanted in (None, name):
            writer = Writer(cfg)
            values = known.write(writer)
            if not writer.obstacles:
                return known, _whole_config(cfg, known, values)
            tried.append((known, writer.obstacles))
    # A position or a norm of another kind is further away than a switch.
    best, obstacles = min(tried, key=lambda item: sum(1 + 4 * o.startswith(_KINDS) for o in item[1]))
    which = f"{best.model_type} cannot" if wanted else f"no Hugging Face format can (the nearest is {best.model_type})"
    raise UserError(f"{which} express this model: {', '.join(obstacles)}")


def _whole_config(cfg: ModelConfig, known: Format, values: Json) -> Json:
    return {
        "architectures": [known.architecture],
        "model_type": known.model_type,
        "vocab_size": cfg.vocab_size,
        **values,
        "tie_word_embeddings": cfg.tie_head,
        "initializer_range": float(cfg.init.get("std", 0.02)),
        "use_cache": True,
    }


def half_split(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """The weights of a model with interleaved RoPE pairs (2i, 2i+1) in the order of pairs (i, i + d/2).

    Queries and keys are permuted alike, so that every product of theirs is what it was.
    """
    d = cfg.head_dim
    turned = int(d * cfg.position.get("fraction", 1.0))
    order = torch.cat([torch.arange(0, turned, 2), torch.arange(1, turned, 2), torch.arange(turned, d)])
    found = dict(state)
    for name, tensor in state.items():
        if ".core.q" in name or ".core.k" in name:
            found[name] = tensor.unflatten(0, (-1, d))[:, order].flatten(0, 1)
    return found
