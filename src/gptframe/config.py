"""The typed schema of a run: what `conf/` composes, checked before anything is built.

Every value has a field here or belongs to an options section `{name: ..., option: ...}`, whose options are checked
against the signature of what the name stands for (see `gptframe.registry.build`). Anything else is refused.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Union

from gptframe.errors import UserError, nearest

Section = dict[str, Any]


# Far beyond any model, and below what overflows on the way to the message that memory is short.
LARGEST = {"d_model": 2**20, "n_layers": 2**14, "n_heads": 2**20, "vocab_size": 2**31 - 1, "context_length": 2**31 - 1}
LARGEST_BATCH = 2**24


def _section(name: str, **options: Any) -> Any:
    return field(default_factory=lambda: {"name": name, **options})


@dataclass(frozen=True)
class LinearConfig:
    """The products with the model's matrices."""

    backend: str = "torch"
    """What computes them: `torch`, or a plugin's; no part of the architecture."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. Sizes are plain fields; every exchangeable part is a section `{name: ..., options}`."""

    name: str = "mini"
    """A label for people: it names the run directory and nothing else."""
    d_model: int = 64
    """Width of the residual stream."""
    n_layers: int = 2
    """Number of blocks."""
    n_heads: int = 4
    """Query heads of each attention; d_model / n_heads is the head dimension."""
    vocab_size: int | None = 64
    """Rows of the token embedding. A tokenizer may use fewer, never more. null: as many as the tokenizer has, which is
    known once it has read the text."""
    context_length: int = 32
    """Longest sequence, in tokens."""
    block: list[Any] = field(default_factory=lambda: ["attention", "mlp"])
    """The sublayers of each block, in order: names, or `{name: ..., option: ...}`. A pattern over the layers is text,
    `3*[conv,mlp]+1*[attention,mlp]`; it is repeated, and becomes `block` and `layers` when it is read."""
    layers: dict[int, list[Any]] = field(default_factory=dict)
    """`block` for single layers: `{3: [attention]}`; layers count from 0."""
    topology: str | Section = "sequential"
    """How a block joins its sublayers: `sequential`, or `parallel`, where all read the same stream (GPT-J, GPT-NeoX,
    PaLM), or a plugin's, with options as `{name: ..., option: ...}`."""
    residual_scale: float | None = None
    """Factor of the stream at each addition; null takes the norm placement's, 0 removes the residual connections."""
    linear: LinearConfig = field(default_factory=LinearConfig)
    """Of every nn.Linear and of the head."""
    embedding_scale: float = 1.0
    """Factor of the token embedding as it enters the stream (sqrt(d_model) in Vaswani et al., 2017)."""
    tie_head: bool = True
    """Use the token embedding as output head."""
    dropout: float = 0.0
    """Probability, at the embedding, the attention pattern and each sublayer's delta."""
    logit_softcap: float | None = None
    """c in c * tanh(logits / c) (Gemma 2, 2024); null for none."""
    head: Section = _section("linear")
    """From the normalised stream to logits and loss."""
    transforms: dict[str, Section] = field(default_factory=dict)
    """What is done to the model once it is built, in order, by name: `{lora: {rank: 8}}`."""
    init: Section = _section("normal", std=0.02)
    norm_placement: Section = _section("pre")
    norm: Section = _section("layernorm")
    activation: Section = _section("gelu_tanh")
    expansion: Section = field(default_factory=lambda: {"factor": 4, "multiple_of": 1})
    """MLP width: d_model * factor, rounded up to a multiple of `multiple_of`."""
    position: Section = _section("rope")
    sublayers: dict[str, Section] = field(default_factory=lambda: {"attention": {}, "mlp": {}})
    """Options of each sublayer by its name; in YAML they stand directly under `model`: `model.attention.window`."""

    @property
    def topology_section(self) -> Section:
        """`topology` as a section `{name: ..., options}`."""
        return {"name": self.topology} if isinstance(self.topology, str) else self.topology

    @property
    def head_dim(self) -> int:
        """Width of each head: `model.attention.head_dim`, or d_model / n_heads."""
        return self.sublayers.get("attention", {}).get("head_dim") or self.d_model // self.n_heads

    @property
    def hidden(self) -> int:
        """MLP width. A factor within 1e-4 of thirds is read as thirds, so that 2.6667 of 768 is 2048 and not 2049."""
        factor, multiple = Fraction(str(self.expansion["factor"])), self.expansion.get("multiple_of", 1)
        thirds = Fraction(round(factor * 3), 3)
        exact = thirds if abs(factor - thirds) < Fraction(1, 10_000) and thirds else factor
        return math.ceil(exact * self.d_model / multiple) * multiple

    def block_of(self, layer: int) -> list[Section]:
        """The sublayers of one layer as sections, with the options that stand under `model.<name>` merged in."""
        items = self.layers.get(layer, self.block)
        sections = [{"name": item} if isinstance(item, str) else dict(item) for item in items]
        return [{**self.sublayers.get(section["name"], {}), **section} for section in sections]

    def __post_init__(self) -> None:
        for key, most in LARGEST.items():
            if getattr(self, key) is not None:
                _positive(f"model.{key}", getattr(self, key), most)
        head_dim = self.sublayers.get("attention", {}).get("head_dim")
        if head_dim is not None and (not isinstance(head_dim, int) or isinstance(head_dim, bool) or head_dim < 1):
            raise UserError(f"model.attention.head_dim={head_dim!r} must be a whole number of at least 1")
        if head_dim is None and self.d_model % self.n_heads:
            raise UserError(
                f"model.d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}: "
                f"try model.n_heads={_divisor_near(self.d_model, self.n_heads)}"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout={self.dropout} must be at least 0 and below 1")
        for key in ("embedding_scale", "logit_softcap"):
            if getattr(self, key) is not None and not getattr(self, key) > 0:
                raise UserError(f"model.{key}={getattr(self, key)} must be greater than 0")
        for key in ("init", "norm_placement", "norm", "activation", "position", "head", "topology_section"):
            name = getattr(self, key).get("name")
            if not isinstance(name, str):
                raise UserError(f"model.{key.removesuffix('_section')}.name={name!r} must be a name")
        self._check_expansion()
        self._check_blocks()

    def _check_expansion(self) -> None:
        unknown = set(self.expansion) - {"factor", "multiple_of"}
        if unknown:
            raise UserError(f"model.expansion.{unknown.pop()}: no such option. Known: factor, multiple_of")
        factor, multiple = self.expansion.get("factor"), self.expansion.get("multiple_of", 1)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1024:
            raise UserError(f"model.expansion.factor={factor!r} must be a number greater than 0, as in 4 or 2.6667")
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise UserError(f"model.expansion.multiple_of={multiple!r} must be a whole number of at least 1")

    def _check_blocks(self) -> None:
        for layer in self.layers:
            if not 0 <= layer < self.n_layers:
                raise UserError(f"model.layers.{layer}: there are layers 0 to {self.n_layers - 1}")
        for key, items in [("model.block", self.block), *((f"model.layers.{i}", b) for i, b in self.layers.items())]:
            if not isinstance(items, list) or not items:
                raise UserError(f"{key} must be a list of sublayers, as in {key}=[attention,mlp]")
            for item in items:
                name = item if isinstance(item, str) else item.get("name") if isinstance(item, Mapping) else None
                if not isinstance(name, str):
                    raise UserError(f"{key}: {item!r} is neither a sublayer's name nor {{name: ..., option: ...}}")
        used = {section["name"] for layer in range(self.n_layers) for section in self.block_of(layer)}
        for name, options in self.sublayers.items():
            if "name" in options:
                raise UserError(
                    f"model.{name}.name: sublayers are chosen in model.block, as in model.block=[attention]"
                )
            if name not in used and name not in ("attention", "mlp"):  # those two are always in the composed config
                raise UserError(
                    f"model.{name}: neither a key of the model nor a sublayer of its blocks. "
                    f"{nearest(name, [*_fields(ModelConfig), *used])}Sublayers in use: {', '.join(sorted(used))}"
                )


@dataclass(frozen=True)
class TrainerConfig:
    """The loop. Steps are optimiser steps everywhere."""

    max_steps: int = 1000
    """Optimiser steps of the whole run, those before a resume included."""
    global_batch_size: int = 32
    """Sequences in one optimiser step, over all devices and micro-batches."""
    micro_batch_size: int | None = None
    """Sequences in one forward pass on one device; null derives it from the device and the model."""
    val_interval: int = 100
    """Steps between validations; one more follows the last step."""
    val_batches: int | None = None
    """Upper bound on the validation batches; null takes the whole validation split."""
    log_interval: int = 10
    """Steps between rows of metrics.csv and of every other logger."""
    checkpoint_interval: int = 500
    """Steps between checkpoints; one more follows the last step."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay on disk."""
    clip_norm: float | None = 1.0
    """Bound on the global gradient norm; null for none."""
    nonfinite_patience: int = 1
    """Consecutive steps with a loss that is not finite after which the run stops."""
    accelerator: str = "auto"
    """`auto`, `cpu`, `gpu`, or another of Lightning's."""
    devices: int = 1
    """Devices on each node."""
    strategy: str = "auto"
    """Lightning's strategy: `auto`, `ddp`, ..."""
    num_nodes: int = 1
    compile: bool | str = "auto"
    """torch.compile: true, false, auto (on for CUDA), or max-autotune, which tries several kernels for each matrix
    product before the first step. That takes minutes, and leaves CUDA graphs out: they and gradients summed over
    micro-batches do not go together."""
    recompute: bool = False
    """Keep only the stream between blocks for the backward pass, and compute each block once more there: less memory,
    about a third more time (activation checkpointing, Chen et al., 2016)."""
    chunked_loss: bool = True
    """Compute the loss and its gradients in chunks of tokens, so that the logits of a micro-batch never exist at once:
    at a large vocabulary most of the memory. false: all logits at once, and PyTorch's own cross-entropy."""
    deterministic: bool = False
    """Refuse operations that have no deterministic implementation (torch.use_deterministic_algorithms)."""
    threads: int | None = None
    """CPU threads of PyTorch; null is 1 for small models (d_model < 256, more cost time), else PyTorch's choice."""
    reuse_memory: bool | str = "auto"
    """On a CPU, keep the memory that a step frees for the next one instead of giving it back to the system: true,
    false, or auto (on where malloc is glibc's)."""

    def __post_init__(self) -> None:
        for key in (
            "max_steps global_batch_size micro_batch_size val_interval val_batches log_interval "
            "checkpoint_interval keep_checkpoints nonfinite_patience devices num_nodes threads clip_norm"
        ).split():
            if getattr(self, key) is not None:
                _positive(f"trainer.{key}", getattr(self, key))
        _positive("trainer.global_batch_size", self.global_batch_size, LARGEST_BATCH)
        if self.compile not in (True, False, "auto", "max-autotune"):
            raise UserError(f"trainer.compile={self.compile!r} must be true, false, auto or max-autotune")
        if self.reuse_memory not in (True, False, "auto"):
            raise UserError(f"trainer.reuse_memory={self.reuse_memory!r} must be true, false or auto")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    name: str = "mini"
    """Names the run directory and the run in every logger."""
    seed: int = 0
    """Of the initialisation, the order of the data, dropout and samples."""
    plugins: list[str] = field(default_factory=list)
    """Files and modules to import first."""
    resume: str | None = None
    """A run directory to continue in place."""
    init_from: str | None = None
    """A run directory, trained here or imported, whose architecture, weights and tokenizer a new run starts from."""
    run_dir: str | None = None
    """Where the run is written; null for runs/<date>/<time>_<name>."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: Section = _section("verbs")
    tokenizer: Section = _section("closed")
    optimizer: Section = _section("adamw")
    schedule: Section = _section("cosine")
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    precision: Section = _section("auto")
    logger: Section = _section("csv")
    callbacks: Section = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} must be a whole number from 0 to 2**63 - 1")
        if not self.name or self.name in (".", "..") or any(c in self.name for c in "/\\\0\n"):
            raise UserError(f"name={self.name!r} must be usable as the name of a folder")
        for key in ("data", "tokenizer", "optimizer", "schedule", "precision", "logger"):
            if not isinstance(getattr(self, key).get("name"), str):
                raise UserError(f"{key}.name={getattr(self, key).get('name')!r} must be a name")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Read plain containers, as OmegaConf.to_container gives them.

        Raises:
            UserError: an unknown key, a value of the wrong type, or sizes that do not fit together.
        """
        values = dict(values)
        model = values.get("model", {})
        if not isinstance(model, Mapping):
            raise UserError(f"model={model!r} must be a section; select a preset with model=mini")
        values["model"] = _gather_sublayers(model)
        return _read(cls, values, "")

    def to_dict(self) -> dict[str, Any]:
        """Plain containers; `Config.from_dict` reads them back."""
        values = dataclasses.asdict(self)
        values["model"].update(values["model"].pop("sublayers"))
        return values


def without_backends(model: Mapping[str, Any]) -> dict[str, Any]:
    """The containers of a model's config without what says who computes attention and products: that is no part of the
    architecture, and weights may be read where a backend is missing."""
    return {k: v for k, v in _without_attention_backend(model).items() if k != "linear"}


def _without_attention_backend(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {k: _without_attention_backend(v) for k, v in value.items()}
        for section in (kept, kept.get("attention")):
            if isinstance(section, dict) and (section is not kept or section.get("name") == "attention"):
                section.pop("backend", None)
        return kept
    return [_without_attention_backend(v) for v in value] if isinstance(value, (list, tuple)) else value


def _gather_sublayers(model: Mapping[str, Any]) -> dict[str, Any]:
    """Move `model.<sublayer>.<option>` under `sublayers`, where a field of that name does not exist."""
    known = set(_fields(ModelConfig)) - {"sublayers"}
    values = {k: v for k, v in model.items() if k in known}
    rest = {str(k): v for k, v in model.items() if k not in known}
    for key, value in rest.items():
        if not isinstance(value, Mapping):
            if key in ("attention", "mlp"):
                raise UserError(f"model.{key}={value!r} must be a section of options")
            raise UserError(f"model.{key}: no such key. {nearest(key, known)}Known: {', '.join(sorted(known))}")
    values["layers"] = values.get("layers") or {}
    transforms = values.get("transforms") or {}
    if isinstance(transforms, Mapping):  # `lora: null` and `lora: {}` are the same: no options
        transforms = {name: options or {} for name, options in transforms.items()}
    values["transforms"] = transforms
    if isinstance(values.get("block"), str) and isinstance(values["layers"], Mapping):
        blocks = repeat_pattern(values["block"], values.get("n_layers", ModelConfig.n_layers))
        values["block"] = blocks[0]
        others = {layer: block for layer, block in enumerate(blocks) if block != blocks[0]}
        values["layers"] = {**others, **values["layers"]}
    values["sublayers"] = {"attention": {}, "mlp": {}, **{k: dict(v) for k, v in rest.items()}}
    return values


def repeat_pattern(pattern: str, n_layers: Any) -> list[list[str]]:
    """The block of each layer: `1*[a,b]+2*[c]` for 6 layers is [a, b], [c], [c], [a, b], [c], [c].

    Raises:
        UserError: it is no pattern, or the layers are no whole number of repetitions.
    """
    names = r"\s*[\w.:]+\s*(?:,\s*[\w.:]+\s*)*"
    term = rf"\s*(?:(\d+)\s*\*\s*)?\[({names})\]\s*"
    if not re.fullmatch(rf"{term}(?:\+{term})*", pattern):
        raise UserError(
            f"model.block={pattern!r} must be a list of sublayers, as in model.block=[attention,mlp], or a pattern of "
            f"lists, as in \"model.block='3*[conv,mlp]+1*[attention,mlp]'\""
        )
    blocks: list[list[str]] = []
    for count, inner in re.findall(term, pattern):
        if int(count or 1) > LARGEST["n_layers"]:
            raise UserError(f"model.block={pattern!r}: {count} is more layers than there can be")
        blocks += [[name.strip() for name in inner.split(",")]] * int(count or 1)
    if not blocks or not isinstance(n_layers, int) or n_layers % len(blocks):
        raise UserError(
            f"model.block={pattern!r} is a pattern of {len(blocks)} layers, and model.n_layers={n_layers} "
            f"is no multiple of it"
        )
    return blocks * (n_layers // len(blocks))


def _fields(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _read(cls: Any, values: Mapping[str, Any], path: str) -> Any:
    known = _fields(cls)
    for key in values:
        if key not in known:
            raise UserError(f"{path}{key}: no such key. {nearest(key, known)}Known: {', '.join(known)}")
    hints = typing.get_type_hints(cls)
    return cls(**{key: convert(hints[key], value, path + key) for key, value in values.items()})


def convert(hint: Any, value: Any, key: str) -> Any:
    """Return `value` as `hint`, accepting only conversions that lose nothing (3.0 for 3).

    Hints that are not made of the types of YAML are let through.

    Raises:
        UserError: `value` is of another type; the message begins with `key`.
    """
    if hint is Any or not _is_plain(hint):
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            example = next((f for f in dataclasses.fields(hint) if f.default is not dataclasses.MISSING), None)
            as_in = f", as in {key}.{example.name}={example.default}" if example else ""
            raise UserError(f"{key}={value!r} must be a section of options{as_in}")
        return _read(hint, value, key + ".")
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        for argument in (a for a in arguments if a is not type(None)):
            try:
                return convert(argument, value, key)
            except UserError:
                continue
    elif kind is list and isinstance(value, (list, tuple)):
        return [convert(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    elif kind is dict and isinstance(value, Mapping):
        return {convert(arguments[0], k, key): convert(arguments[1], v, f"{key}.{k}") for k, v in value.items()}
    elif hint is bool and isinstance(value, bool):
        return value
    elif hint is int and not isinstance(value, bool) and isinstance(value, (int, float)) and value == _int_or(value):
        return int(value)
    elif hint is int and isinstance(value, str) and value.isdecimal() and len(value) < 19:
        return int(value)
    elif hint is float and not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) < 1e300:
        return float(value)
    elif hint is str and isinstance(value, str):
        return value
    named = isinstance(value, str) and hint == Section and key != "model.expansion"
    raise UserError(f"{key}={value!r} must be {_words(hint)}" + (f", as in {key}.name={value}" if named else ""))


def _int_or(value: float) -> int | None:
    return int(value) if abs(value) < 1e300 else None


def _is_plain(hint: Any) -> bool:
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind in (Union, types.UnionType, list, dict):
        return all(_is_plain(a) for a in arguments)
    return hint in _WORDS or dataclasses.is_dataclass(hint)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Any: "a value",
}


def _words(hint: Any) -> str:
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(_words(a) for a in arguments)
    if kind is list:
        return "a list"
    if kind is dict:
        named = any(typing.get_origin(h) is dict for h in (arguments[1], *typing.get_args(arguments[1])))
        return "names with their options, as in {my_part: {rate: 0.1}}" if named else "a section of options"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _positive(key: str, value: float, most: float = math.inf) -> None:
    if not value > 0:
        raise UserError(f"{key}={value} must be greater than 0")
    if value > most:
        raise UserError(f"{key}={value} must be at most {most}")


def _divisor_near(number: int, wanted: int) -> int:
    return min((d for d in range(1, min(number, 65536) + 1) if number % d == 0), key=lambda d: abs(d - wanted))
