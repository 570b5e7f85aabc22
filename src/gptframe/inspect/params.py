"""Counts every parameter twice, by a formula from the config and in the built model, and adds them up.

    symbol  value
    V       vocab_size
    D       d_model
    H       hidden width of the MLP
    T       context_length
    L       n_layers
    d       head dimension, d_model / n_heads unless it is given
    A       heads of queries
    K       heads of keys and values

A plugin's class may say what its parameters should be, in these symbols and its own numeric options, by its own
parameter names:

    parameter_formulas = {"weight": "D*kernel"}

or, where that depends on the options, as a function `parameter_formulas(cfg, **options) -> dict`. A norm's formulas use
`dim` for the width that it normalises. Parameters without a formula are marked "measured".
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.model.activation import Activation
from gptframe.model.attention import Attention
from gptframe.model.block import Sublayer, sublayers
from gptframe.model.gpt import GPT, build_model
from gptframe.model.mlp import MLP
from gptframe.model.norm import LayerNorm, RMSNorm
from gptframe.model.position import ALiBi, LearnedPosition, Position, RoPE, SinusoidalPosition
from gptframe.registry import check, lookup, signature_options
from gptframe.training.optimizer import DECAYED, param_groups

Formulas = dict[str, str]


@dataclass(frozen=True)
class Row:
    """One tensor of the model."""

    name: str
    shape: tuple[int, ...]
    count: int
    formula: str | None
    """In symbols; None where nothing predicts the tensor, and `count` is what was measured."""
    value: int | None
    """What the formula gives."""
    part: str
    """`embedding`, `position`, `head`, `norm`, or the sublayer that the tensor is of."""
    kind: str
    """`matrix`, `embedding`, `norm`, `bias` or `other`."""
    layer: int | None
    decayed: bool
    tied: tuple[str, ...] = ()
    """Other names and uses of the same tensor."""


@dataclass(frozen=True)
class Inventory:
    """Every parameter of a model and the sums over them."""

    model: str
    symbols: dict[str, int]
    rows: list[Row]
    norms: int
    norm_class: str
    n_layers: int
    totals: dict[str, int] = field(default_factory=dict)

    def blocks(self) -> list[int]:
        """Parameters of each block."""
        return [sum(r.count for r in self.rows if r.layer == i) for i in range(self.n_layers)]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for `--json`."""
        return {
            "model": self.model,
            "symbols": self.symbols,
            "tensors": [
                {
                    "name": r.name,
                    "shape": list(r.shape),
                    "formula": r.formula or "measured",
                    "count": r.count,
                    "part": r.part,
                    "kind": r.kind,
                    "block": r.layer,
                    "decayed": r.decayed,
                    "tied": list(r.tied),
                }
                for r in self.rows
            ],
            "totals": self.totals,
            "blocks": self.blocks(),
            "norms": {"class": self.norm_class, "count": self.norms},
        }


def inventory(cfg: ModelConfig) -> Inventory:
    """The parameters of the model that `cfg` describes. Nothing is allocated: it is built on the meta device.

    Raises:
        UserError: a formula gives another number than the built tensor has, or names a tensor that does not exist.
    """
    model = build_model(cfg, device="meta")
    symbols = {
        "V": model.token_embedding.num_embeddings,
        "D": cfg.d_model,
        "H": cfg.hidden,
        "T": cfg.context_length,
        "L": cfg.n_layers,
        "d": cfg.head_dim,
        "A": cfg.n_heads,
        "K": _kv_heads(cfg),
    }
    formulas = _formulas(model, cfg)
    parameters = dict(model.named_parameters())
    for name in formulas:
        if name not in parameters:
            raise UserError(f"{name}: a formula ({formulas[name].text}) predicts it and the built model lacks it")
    norms = _norms(model, cfg)
    decayed = _decayed(model)
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in parameters}
    same: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), []).append(name)
    rows = []
    for name, parameter in parameters.items():
        formula = formulas.get(name)
        value = evaluate(formula.text, {**symbols, **formula.options}, name) if formula else None
        if value is not None and value != parameter.numel():
            raise UserError(
                f"{name}: the formula {formula.text} gives {value:,}, and the built tensor "  # type: ignore[union-attr]
                f"{list(parameter.shape)} has {parameter.numel():,}"
            )
        tied = [other for other in same[id(parameter)] if other != name]
        if model.head is None and parameter is model.token_embedding.weight:
            tied.append("head")
        rows.append(
            Row(
                name,
                tuple(parameter.shape),
                parameter.numel(),
                formula.text if formula else None,
                value,
                _part(name, model),
                _kind(name, parameter, owners[name], norms),
                int(name.split(".")[1]) if name.startswith("blocks.") else None,
                name in decayed,
                tuple(tied),
            )
        )
    norm_class = type(next(iter(norms.values()))).__name__ if norms else "norm"
    return Inventory(cfg.name, symbols, rows, len(norms), norm_class, cfg.n_layers, _totals(rows))


def _totals(rows: list[Row]) -> dict[str, int]:
    def total(*without: str) -> int:
        return sum(r.count for r in rows if r.kind not in without)

    blocks = [r for r in rows if r.layer is not None]
    return {
        "total": total(),
        "without_biases": total("bias"),
        "without_norms": total("norm"),
        "without_embeddings": total("embedding"),
        "biases": sum(r.count for r in rows if r.kind == "bias"),
        "norms": sum(r.count for r in rows if r.kind == "norm"),
        "embeddings": sum(r.count for r in rows if r.kind == "embedding"),
        "head": sum(r.count for r in rows if r.part == "head"),
        "trunk": sum(r.count for r in blocks),
        "block_matrices": sum(r.count for r in blocks if r.kind == "matrix"),
        "decayed": sum(r.count for r in rows if r.decayed),
    }


def _kv_heads(cfg: ModelConfig) -> int:
    options = next((s for i in range(cfg.n_layers) for s in cfg.block_of(i) if s["name"] == "attention"), {})
    return options.get("n_kv_heads") or cfg.n_heads


def _part(name: str, model: GPT) -> str:
    first, *rest = name.split(".")
    if first == "blocks":
        owner = model.get_submodule(".".join([first, *rest[:2]])) if len(rest) > 2 else None
        if not isinstance(owner, Sublayer):
            return "block"
        return "norm" if rest[2] in ("pre", "out", "post") else owner.name
    return {"token_embedding": "embedding", "embedding_norm": "norm", "final_norm": "norm"}.get(first, first)


def _kind(name: str, parameter: Any, owner: nn.Module, norms: Mapping[str, nn.Module]) -> str:
    if any(name.startswith(norm + ".") for norm in norms):
        return "norm"
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if parameter.ndim == 1 and name.rpartition(".")[2] == "bias":
        return "bias"
    return "matrix" if parameter.ndim >= 2 else "other"


def _norms(model: GPT, cfg: ModelConfig) -> dict[str, nn.Module]:
    norm = lookup("norm", cfg.norm["name"])
    known: tuple[type, ...] = (nn.LayerNorm, nn.RMSNorm, *([norm] if isinstance(norm, type) else []))
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        seat = last in ("pre", "out", "post") and name.count(".") == 3 or name in ("embedding_norm", "final_norm")
        is_norm: bool = isinstance(module, known) or (seat and not isinstance(module, nn.Identity))
        if is_norm and not any(name.startswith(outer + ".") for outer in found):
            found[name] = module
    return found


def _decayed(model: GPT) -> set[str]:
    """Names of the parameters that every optimiser with weight decay decays."""
    return {name for group in param_groups(model) if group["role"] in DECAYED for name in group["param_names"]}


# Formulas: each function gives those of one class by its own parameter names.


@dataclass(frozen=True)
class Formula:
    text: str
    options: Mapping[str, int] = field(default_factory=dict)
    """Numeric options of a plugin, which its formula may use as symbols."""


def _formulas(model: GPT, cfg: ModelConfig) -> dict[str, Formula]:
    """{parameter name: formula} of all that can be predicted from the config alone."""
    found = {"token_embedding.weight": Formula("V*D")}
    if model.head is not None:
        found["head.weight"] = Formula("V*D")
    position = lookup("position", cfg.position["name"])
    if position.seat == "embedding":
        _add(found, "position", _own("position", cfg.position, cfg, (cfg,)))
    for name in ("embedding_norm", "final_norm"):
        if not isinstance(getattr(model, name), nn.Identity):
            _add(found, name, _norm(cfg, "D"))
    norm = lookup("norm", cfg.norm["name"])
    for layer, block in enumerate(model.blocks):
        for section, (label, sublayer) in zip(cfg.block_of(layer), sublayers(block), strict=False):
            prefix = f"blocks.{layer}.{label}"
            for seat in ("pre", "out", "post"):
                if type(getattr(sublayer, seat)) is norm:  # a transform may have put something else there
                    _add(found, f"{prefix}.{seat}", _norm(cfg, "D"))
            _add(found, f"{prefix}.core", _own("sublayer", section, cfg, (cfg, layer)))
    return found


def _add(found: dict[str, Formula], prefix: str, formulas: dict[str, Formula]) -> None:
    found.update({f"{prefix}.{name}": formula for name, formula in formulas.items()})


def _own(kind: str, section: Mapping[str, Any], cfg: ModelConfig, positional: tuple[Any, ...]) -> dict[str, Formula]:
    """Formulas of what `section` builds, from our table or from the plugin's `parameter_formulas`."""
    value, given = check(kind, section, len(positional), f"model.{section['name']}")
    defaults = {
        name: parameter.default
        for name, parameter in signature_options(value, len(positional)).items()
        if parameter.default is not parameter.empty
    }
    options = {**defaults, **given}
    if value in BUILTIN:
        return BUILTIN[value](cfg, options)
    stated = getattr(value, "parameter_formulas", {})
    if callable(stated):
        stated = stated(cfg, **options)
    if not isinstance(stated, Mapping) or not all(isinstance(v, str) for v in stated.values()):
        raise UserError(
            f"{kind} {section['name']!r}: parameter_formulas must map names to text, as in {{'weight': 'D*D'}}"
        )
    numbers = {k: v for k, v in options.items() if isinstance(v, int) and not isinstance(v, bool)}
    return {name: Formula(text, numbers) for name, text in stated.items()}


def _norm(cfg: ModelConfig, width: str) -> dict[str, Formula]:
    formulas = _own("norm", cfg.norm, cfg, (None,))
    return {name: Formula(_with_width(f.text, width), f.options) for name, f in formulas.items()}


def _with_width(text: str, width: str) -> str:
    whole = text == "dim" or width.isidentifier()
    return re.sub(r"\bdim\b", width if whole else f"({width})", text)


def _layernorm(cfg: ModelConfig, options: Mapping[str, Any]) -> dict[str, Formula]:
    affine = options["affine"]
    return {n: Formula("dim") for n in ("weight", "bias") if affine and (n == "weight" or options["bias"])}


def _rmsnorm(cfg: ModelConfig, options: Mapping[str, Any]) -> dict[str, Formula]:
    return {"weight": Formula("dim")} if options["affine"] else {}


def _nothing(cfg: ModelConfig, options: Mapping[str, Any]) -> dict[str, Formula]:
    return {}


def _learned(cfg: ModelConfig, options: Mapping[str, Any]) -> dict[str, Formula]:
    return {"table.weight": Formula("T*D")}


def _attention(cfg: ModelConfig, options: Mapping[str, Any]) -> dict[str, Formula]:
    shared = (options["n_kv_heads"] or cfg.n_heads) != cfg.n_heads
    q = "D" if cfg.n_heads * cfg.head_dim == cfg.d_model else "A*d"
    kv = "K*d" if shared else q
    found = {f"{n}.weight": Formula(f"D*{width}") for n, width in (("q", q), ("k", kv), ("v", kv), ("out", q))}
    if options["bias"]:
        found |= {f"{n}.bias": Formula(width) for n, width in (("q", q), ("k", kv), ("v", kv))}
    if options["bias"] if options["out_bias"] is None else options["out_bias"]:
        found["out.bias"] = Formula("D")
    if options["qk_norm"] != "none":
        for name, width in (("q_norm", q), ("k_norm", kv)):
            _add(found, name, _norm(cfg, "d" if options["qk_norm"] == "head" else width))
    if lookup("position", cfg.position["name"]).seat == "attention":
        _add(found, "position", _own("position", cfg.position, cfg, (cfg,)))
    return found


def _mlp(cfg: ModelConfig, options: Mapping[str, Any]) -> dict[str, Formula]:
    gated = getattr(lookup("activation", cfg.activation["name"]), "inputs", 1) == 2
    found: dict[str, Formula] = {}
    _add(found, "activation", _own("activation", cfg.activation, cfg, ()))
    for name in ("up", "gate") if gated else ("up",):
        found[f"{name}.weight"] = Formula("D*H")
        if options["bias"]:
            found[f"{name}.bias"] = Formula("H")
    found["down.weight"] = Formula("H*D")
    if options["bias"]:
        found["down.bias"] = Formula("D")
    return found


BUILTIN: dict[Any, Callable[[ModelConfig, Mapping[str, Any]], dict[str, Formula]]] = {
    LayerNorm: _layernorm,
    RMSNorm: _rmsnorm,
    Attention: _attention,
    MLP: _mlp,
    LearnedPosition: _learned,
    **{cls: _nothing for cls in (Position, SinusoidalPosition, RoPE, ALiBi, Activation)},
}

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def evaluate(formula: str, symbols: Mapping[str, int], where: str = "formula") -> int:
    """The value of a formula of whole numbers, symbols, parentheses and + - * // **.

    Raises:
        UserError: anything else.
    """

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in symbols:
            return symbols[node.id]
        if isinstance(node, ast.Name):
            raise UserError(
                f"{where}: {node.id!r} in the formula {formula!r} is no symbol. Known: {', '.join(symbols)}"
            )
        raise UserError(f"{where}: the formula {formula!r} may use whole numbers, symbols, ( ) + - * // **")

    try:
        return value(ast.parse(formula, mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        raise UserError(f"{where}: {formula!r} is not a formula such as 'D*H'") from None
