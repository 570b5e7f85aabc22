"""One table from (kind, name) to a class or function: everything that a config can name.

    from gptframe.registry import register

    @register("activation", "squared_relu")
    class SquaredReLU(nn.Module): ...

A config section `{name: squared_relu, option: value}` becomes an object through `build`. A name of the form
`package.module:Attribute` is imported directly, without registration.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gptframe.config import convert
from gptframe.errors import UserError, nearest

T = TypeVar("T")

# What a registered value must be, in the words that `gptframe` shows to people. The modules are imported at the first
# look-up of their kind, so that a command which builds nothing never waits for torch.
_MODEL, _DATA, _TRAINING = "gptframe.model.", "gptframe.data.", "gptframe.training."
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sublayer": (
        "nn.Module: __init__(cfg: ModelConfig, layer: int, **options), forward(x[B,T,D], ctx: Context) -> delta[B,T,D]",
        (_MODEL + "attention", _MODEL + "mlp"),
    ),
    "attention_backend": (
        "function(cfg: ModelConfig) -> function(q[B,H,T,d], k[B,Hk,T,d], v[B,Hk,T,d], window: int | None,"
        " documents: Long[B,T] | None) -> causal attention [B,H,T,d], or None for what torch shall compute",
        (_MODEL + "attention",),
    ),
    "linear_backend": (
        "function(cfg: ModelConfig) -> function(x[..., in], weight[out, in], bias[out] | None) -> x weight^T + bias,"
        " or None for what torch shall compute; with `backward`, where offered, for the head",
        (_MODEL + "linear",),
    ),
    "norm": ("nn.Module: __init__(dim: int, **options), forward(x[..., dim]) -> [..., dim]", (_MODEL + "norm",)),
    "activation": (
        "nn.Module: __init__(**options), forward(x) -> x, or with `inputs = 2` forward(x, gate) -> x",
        (_MODEL + "activation",),
    ),
    "position": (
        "nn.Module: __init__(cfg: ModelConfig, **options) with `seat` 'embedding' (forward(x, ctx) -> x)"
        " or 'attention' (rotate(q, k, ctx), score_bias(q_pos, k_pos))",
        (_MODEL + "position",),
    ),
    "norm_placement": ("NormPlacement: a row of the table in gptframe.model.norm", (_MODEL + "norm",)),
    "topology": (
        "nn.Module: __init__(cfg: ModelConfig, layer: int, residual_scale: float, **options),"
        " forward(x[B,T,D], ctx: Context) -> x[B,T,D], the stream after the block",
        (_MODEL + "block",),
    ),
    "head": (
        "nn.Module: __init__(cfg: ModelConfig, **options), forward(x[...,D], weight[V,D]) -> logits[...,V],"
        " loss(x, weight, targets, ctx) -> summed cross-entropy",
        (_MODEL + "head",),
    ),
    "transform": ("function(model: GPT, **options): changes the model in place, before it is initialised", ()),
    "init": (
        "function(role: str, shape: tuple, cfg: ModelConfig, **options) -> standard deviation",
        (_MODEL + "init",),
    ),
    "optimizer": ("function(groups: list[dict], **options) -> torch.optim.Optimizer", (_TRAINING + "optimizer",)),
    "schedule": ("function(step: int, total_steps: int, **options) -> multiplier", (_TRAINING + "schedule",)),
    "callback": ("pytorch_lightning.Callback: __init__(**options)", ()),
    "tokenizer": (
        "class: __init__(source: Source, **options), encode(str) -> list[int], decode(list[int]) -> str, vocab_size",
        (_DATA + "tokenizer", _DATA + "segments"),
    ),
    "corpus": ("class with documents(split) -> Iterator[str], fingerprint() -> str", (_DATA + "corpus",)),
}


@dataclass(frozen=True)
class Entry:
    """A registered value and where it came from."""

    value: Any
    file: str
    line: int
    module: str
    replaced: Entry | None = None

    @property
    def origin(self) -> str:
        return f"{self.file}:{self.line}"


_table: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
_imported: set[str] = set()


def _known_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UserError(f"unknown registry kind {kind!r}. {nearest(kind, KINDS)}Kinds: {', '.join(KINDS)}")


def register(kind: str, name: str, *, replace: bool = False) -> Callable[[T], T]:
    """Return a decorator that enters a class, function or row under `(kind, name)`.

    Raises:
        UserError: `kind` is unknown, `name` is not a plain name, or the name is taken (both origins are named).
    """
    _known_kind(kind)
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise UserError(f"{name!r} cannot be the name of a {kind}: use letters, digits and underscores")
    # The origin is where `register` was called, not where the value was defined: that may be in torch.
    caller = sys._getframe(1)
    file, line, module = caller.f_code.co_filename, caller.f_lineno, caller.f_globals.get("__name__", "?")

    def enter(value: T) -> T:
        if not module.startswith("gptframe."):
            _import_builtins(kind)
        taken = _table[kind].get(name)
        if taken is not None and not replace:
            raise UserError(
                f"{kind} {name!r} is registered twice: {taken.origin} and {file}:{line}. "
                f"Rename one, or use @register({kind!r}, {name!r}, replace=True)"
            )
        _table[kind][name] = Entry(value, file, line, module, replaced=taken)
        return value

    return enter


def _import_builtins(kind: str) -> None:
    for module in KINDS[kind][1]:
        if module not in _imported:
            _imported.add(module)  # first, since the module's own `register` calls come back here
            try:
                importlib.import_module(module)
            except BaseException:
                _imported.discard(module)
                raise


def forget(module: str) -> None:
    """Undo what `module` registered: a plugin whose import failed half-way must leave nothing behind."""
    for rows in _table.values():
        for name, found in list(rows.items()):
            if found.module == module:
                del rows[name]
                if found.replaced is not None:
                    rows[name] = found.replaced


def names(kind: str) -> list[str]:
    """All names registered under `kind`, sorted."""
    _known_kind(kind)
    _import_builtins(kind)
    return sorted(_table[kind])


def entry(kind: str, name: str, key: str = "") -> Entry:
    """Return the `Entry` of a name, importing it where the name is `package.module:Attribute`.

    Args:
        key: the config key that holds the name, for the message.

    Raises:
        UserError: nothing has that name (the nearest and all known names are listed).
    """
    known = names(kind)
    where = f"{key}: " if key else ""
    if isinstance(name, str) and ":" in name:
        return _import_path(kind, name, where)
    if not isinstance(name, str) or name not in _table[kind]:
        listing = f"Known: {', '.join(known)}" if known else "None ships here"
        raise UserError(
            f"{where}unknown {kind} {name!r}. {nearest(name, known)}{listing}. "
            f"Add one with plugins=[file.py] or plugins=[package.module]"
        )
    return _table[kind][name]


@contextlib.contextmanager
def importing_from(folder: str | Path) -> Iterator[None]:
    """Let modules in `folder` be imported for a while, as `python -m` does with the current directory."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _import_path(kind: str, path: str, where: str) -> Entry:
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise UserError(f"{where}{kind} {path!r} must be of the form package.module:Attribute")
    try:
        with importing_from(Path.cwd()):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not (module_name + ".").startswith(error.name + "."):
            raise  # the module exists and its own import failed: that is its bug, with its own traceback
        raise UserError(f"{where}{kind} {path!r}: there is no module {error.name!r}") from None
    if not hasattr(module, attribute):
        raise UserError(
            f"{where}{kind} {path!r}: {module_name!r} has no {attribute!r}. {nearest(attribute, vars(module))}".rstrip()
        )
    value = getattr(module, attribute)
    try:
        file, line = inspect.getsourcefile(value) or module_name, inspect.getsourcelines(value)[1]
    except (OSError, TypeError):  # no class or function, or one without a source file
        file, line = getattr(module, "__file__", None) or module_name, 1
    return Entry(value, file, line, module_name)


def lookup(kind: str, name: str, key: str = "") -> Any:
    """Return the value registered under `(kind, name)`; see `entry` for what is raised."""
    return entry(kind, name, key).value


def origin(kind: str, name: str) -> str:
    """Where a name was registered, as `file:line`."""
    return entry(kind, name).origin


def origins(module_prefix: str = "gptframe.") -> dict[str, str]:
    """`{"kind/name": "file:line"}` of everything that does not come from `module_prefix`: what plugins added."""
    return {
        f"{kind}/{name}": found.origin
        for kind, rows in _table.items()
        for name, found in sorted(rows.items())
        if not found.module.startswith(module_prefix)
    }


@functools.cache
def _signature(value: Any) -> inspect.Signature:
    # A module without a constructor has nn.Module's, whose **kwargs are there only to be refused with a TypeError.
    # Compared as it is now: torch.compile puts another function in its place.
    module = getattr(sys.modules.get("torch.nn"), "Module", None)
    if module is not None and inspect.isclass(value) and value.__init__ is module.__init__:
        return inspect.Signature()
    return inspect.signature(value)


@functools.cache
def _hints(value: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(value.__init__ if inspect.isclass(value) else value)
    except (NameError, TypeError, AttributeError):  # a plugin's annotations may name what exists for type checkers only
        return {}


def signature_options(value: Any, n_positional: int) -> dict[str, inspect.Parameter]:
    """The options of a registered class or function: its parameters after the first `n_positional`."""
    parameters = list(_signature(value).parameters.values())
    return {p.name: p for p in parameters[n_positional:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def check_options(kind: str, value: Any, options: Mapping[str, Any], n_positional: int, key: str) -> dict[str, Any]:
    """Refuse options that the signature of `value` does not have, or lacks, before anything runs.

    Returns:
        The options as the annotations of `value` want them (1 as 1.0 for a float).

    Raises:
        UserError: an option is unknown, is not of the annotated type, or a required one is missing.
    """
    known = signature_options(value, n_positional)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in _signature(value).parameters.values())
    name = getattr(value, "__name__", str(value))
    for option in options:
        if option not in known and not takes_any:
            listing = f"Known: {', '.join(known)}" if known else "It has none"
            raise UserError(f"{key}.{option}: {kind} {name} has no such option. {nearest(option, known)}{listing}")
    missing = [o for o, p in known.items() if p.default is p.empty and o not in options]
    if missing:
        raise UserError(f"{key}: {kind} {name} needs {', '.join(missing)}; add {key}.{missing[0]}=...")
    hints = _hints(value)
    typed = {o for o, v in options.items() if o in hints and o in known and not (v is None is known[o].default)}
    return {o: convert(hints[o], v, f"{key}.{o}") if o in typed else v for o, v in options.items()}


def check(kind: str, section: Mapping[str, Any], n_positional: int, key: str = "") -> tuple[Any, dict[str, Any]]:
    """Return what `section = {"name": ..., **options}` names, and its options, without building anything.

    Raises:
        UserError: no name, an unknown name, an unknown, missing or mistyped option, or something registered that cannot
            be called as its kind wants it.
    """
    key = key or kind
    if not isinstance(section, Mapping) or not section.get("name"):
        raise UserError(f"{key} needs a name: {key}.name=... Known: {', '.join(names(kind))}")
    # a section of its own, as model.transforms.lora, is called by its name; others have it as an option
    found = entry(kind, section["name"], key if key.endswith(f".{section['name']}") else f"{key}.name")
    broken = UserError(f"{kind} {section['name']!r} ({found.origin}) breaks its contract: {KINDS[kind][0]}")
    if not callable(found.value):
        raise broken
    options = {k: v for k, v in section.items() if k != "name"}
    options = check_options(kind, found.value, options, n_positional, key)
    try:
        _signature(found.value).bind(*[None] * n_positional, **options)
    except TypeError:
        raise broken from None
    return found.value, options


def build(kind: str, section: Mapping[str, Any], *args: Any, key: str = "") -> Any:
    """Build what `section = {"name": ..., **options}` describes: `lookup(kind, name)(*args, **options)`.

    Everything is checked against the signature first (see `check` for what is raised), so that a TypeError inside the
    constructor stays what it is: a bug, with its own file and line.
    """
    value, options = check(kind, section, len(args), key)
    built = value(*args, **options)
    if kind in RESULTS and not RESULTS[kind](built):
        found = entry(kind, section["name"])
        raise UserError(
            f"{kind} {section['name']!r} ({found.origin}) gave {_words(built)}, which breaks its contract: "
            f"{KINDS[kind][0]}"
        )
    return built


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


# What `build` must get, for kinds whose use would fail far from the cause. Modules are checked where they run.
RESULTS: dict[str, Callable[[Any], bool]] = {
    "schedule": _is_number,
    "init": _is_number,
    "attention_backend": callable,
    "linear_backend": callable,
    "optimizer": lambda value: _has(value, "step", "zero_grad", "state_dict"),
    "head": lambda value: _has(value, "loss"),
    "callback": lambda value: _has(value, "on_train_batch_end", "state_dict"),
    "corpus": lambda value: _has(value, "fingerprint") and (_has(value, "documents") or _has(value, "stores")),
}


def _words(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
