"""Composes `conf/` with Hydra, and turns Hydra's complaints into a line or two for people."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptframe import plugins
from gptframe.errors import UserError, nearest

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException)


def conf_dir() -> Path:
    """The shipped option files: inside the package once installed, at the top of a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"gptframe's conf/ folder is missing beside {package}")


def learning_rate(base: float, d_model: int) -> float:
    """base * sqrt(768 / d_model), to two digits: wide models want smaller steps."""
    # A width that is refused later must not fail here first, in words about learning rates.
    return float(f"{base * (768 / max(d_model, 1)) ** 0.5:.2g}")


def kv_heads(n_heads: int) -> int:
    """The largest divisor of n_heads that is at most max(2, n_heads // 4)."""
    return max((d for d in range(1, max(2, n_heads // 4) + 1) if n_heads % d == 0), default=1)


def prepare_hydra() -> None:
    """Enter our resolvers, and the option files of installed plugins, into Hydra's tables."""
    resolvers: dict[str, Callable[..., Any]] = {
        "lr": learning_rate,
        "kv_heads": kv_heads,
        "quarter": lambda value: max(1, value // 4),
        "sqrt": lambda value: float(value) ** 0.5,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(f"gptframe.{name}", function, replace=True)
    store = ConfigStore.instance()
    for group, option, text in plugins.config_options():
        node = OmegaConf.create(text)
        package = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
        # "installed" must not shadow what ships here or what a user gives with --config-dir
        if not (conf_dir() / group / f"{option}.yaml").exists():
            store.store(group=group, name=option, node=node, package=package.group(1) if package else None)


def check_typed(overrides: Sequence[str]) -> None:
    """Refuse the removal of a key, and say which of two overrides of a key counts: the later one, as scripts expect.

    Raises:
        UserError: an override removes a key.
    """
    seen: dict[str, str] = {}
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if override.startswith("~"):
            instead = f"{key}=none" if "none" in groups().get(key, []) else "give another value instead"
            raise UserError(f"{override}: no key can be removed; {instead}")
        if seen.get(key, override) != override:
            print(f"note: {seen[key]} gives way to {override}, which comes later", file=sys.stderr)
        seen[key] = override


def check_choices(overrides: Sequence[str], known: Mapping[str, Sequence[str]]) -> None:
    """Refuse an option of a sweep that does not exist before the first job starts, not when its turn has come.

    Args:
        known: group -> options.

    Raises:
        UserError: the group and its options.
    """
    for override in overrides:
        group, _, choices = override.partition("=")
        if group in known and re.fullmatch(r"[\w.-]+(,[\w.-]+)+", choices):
            for option in choices.split(","):
                if option not in known[group] and option != "null":
                    raise UserError(_no_option(group, option, known[group]))


def _no_option(group: str, option: str, options: Sequence[str]) -> str:
    return f"{group}={option}: no such option. {nearest(option, options)}Options: {', '.join(options)}"


def compose_config(overrides: Sequence[str] = (), config_dirs: Sequence[str] = ()) -> dict[str, Any]:
    """What `python train.py OVERRIDES` composes, as plain containers, for commands that do not train.

    Args:
        config_dirs: folders with options of the user's own, as `--config-dir` adds them.

    Raises:
        UserError: an override that cannot be composed, explained as `train` explains it.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    check_typed(overrides)
    prepare_hydra()
    GlobalHydra.instance().clear()
    paths = ", ".join("'file://" + str(Path(d).expanduser().absolute()).replace("'", "\\'") + "'" for d in config_dirs)
    search = [f"hydra.searchpath=[{paths}]"] if config_dirs else []
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return to_container(compose("train", overrides=[*search, *overrides]), overrides)
    except COMPOSE_ERRORS as error:
        raise UserError(explain(error)) from None


def to_container(cfg: DictConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Plain containers with all interpolations resolved; `hydra` itself is left out.

    Args:
        overrides: what was typed, to check it against the run of `init_from`.

    Raises:
        UserError: an interpolation fails, a value is missing, or what was typed does not go with `init_from`.
    """
    if cfg.get("init_from") and not cfg.get("resume"):
        cfg = _with_architecture_of(cfg, overrides)
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except COMPOSE_ERRORS as error:
        raise UserError(explain(error)) from None
    assert isinstance(values, dict)
    values.pop("hydra", None)
    return {str(k): v for k, v in values.items()}


# What may differ from the run whose weights are taken: it changes neither a shape nor what the weights mean.
FREE_WITH_WEIGHTS = (
    "model.name",
    "model.dropout",
    "model.init",
    "model.transforms",
    "model.attention.backend",
    "model.linear.backend",
)


def _with_architecture_of(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """`cfg` with the model and tokenizer of the run directory `cfg.init_from`.

    The model takes its place before interpolations are resolved, so that what follows from it (the learning rate) does.
    """
    from gptframe.training.directory import read_config

    source = Path(str(cfg.init_from)).expanduser().absolute()
    saved = read_config(source).to_dict()
    has_tokenizer = (source / "tokenizer").is_dir()
    cfg = copy.deepcopy(cfg)
    typed: list[str] = []
    for override in overrides:
        key, _, option = override.lstrip("+~").partition("=")
        for leaf in keys_of_option(key, option) if key in groups() else [key]:
            if leaf.startswith("tokenizer") and has_tokenizer:
                raise UserError(f"{override}: the weights of init_from={cfg.init_from} go with the tokenizer in it")
            if not leaf.startswith("model.") or (key == "tokenizer" and leaf == "model.vocab_size"):
                continue
            if leaf.startswith(FREE_WITH_WEIGHTS):
                typed.append(leaf)
                continue
            new: Any = OmegaConf.select(cfg, leaf)
            old: Any = saved
            for part in leaf.split("."):
                old = old.get(part) if isinstance(old, Mapping) else None
            if (OmegaConf.to_container(new) if OmegaConf.is_config(new) else new) != old:
                raise UserError(
                    f"{leaf} is {old!r} in {cfg.init_from} and {new!r} here: weights fit their own architecture only. "
                    f"May differ: {', '.join(FREE_WITH_WEIGHTS)}"
                )
    kept = {leaf: OmegaConf.select(cfg, leaf) for leaf in typed}
    OmegaConf.set_struct(cfg, False)
    cfg.init_from = str(source)
    cfg.model = saved["model"]
    for leaf, value in kept.items():
        OmegaConf.update(cfg, leaf, value)
    if has_tokenizer:
        cfg.tokenizer = saved["tokenizer"]
    cfg.plugins = list(dict.fromkeys([*saved["plugins"], *(cfg.plugins or [])]))
    return cfg


def flat_keys(values: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Every dotted key of nested mappings."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")


def groups() -> dict[str, list[str]]:
    """Group -> options that ship here."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(conf_dir().iterdir())
        if folder.is_dir()
    }


def all_groups(config_dirs: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Group -> options: what ships here, what installed plugins bring, and what folders of the user's own hold."""
    found = {group: set(options) for group, options in groups().items()}
    for group, option, _ in plugins.config_options():
        found.setdefault(group, set()).add(option)
    for folder in config_dirs:
        for file in folder.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(options) for group, options in found.items()}


def keys_of_option(group: str, option: str) -> list[str]:
    """The dotted keys of the composed config that an option file sets, shipped or brought by an installed plugin.

    Raises:
        UserError: there is no such file.
    """
    file = conf_dir() / group / f"{option}.yaml"
    if file.is_file():
        text = file.read_text(encoding="utf-8")
    else:
        installed = {o: text for g, o, text in plugins.config_options() if g == group}
        if option not in installed:
            raise UserError(f"{group}={option}: no such option. {nearest(option, all_groups()[group])}")
        text = installed[option]
    package = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    prefix = package.group(1) if package else group
    values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    assert isinstance(values, dict)
    values.pop("defaults", None)
    keys = list(flat_keys(values, "" if prefix == "_global_" else f"{prefix}."))
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def default_keys() -> list[str]:
    """The dotted keys of the default config, for suggestions."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return list(flat_keys(OmegaConf.to_container(compose("train"), resolve=False)))  # type: ignore[arg-type]


def explain(error: BaseException) -> str:
    """Hydra's or OmegaConf's complaint in a line or two: what was wrong, and what to type instead."""
    text = str(error).strip()
    chain: BaseException | None = error.__cause__ or error.__context__
    while chain is not None:
        text += "\n" + str(chain)
        chain = chain.__cause__ or chain.__context__

    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        if value and not set(value) & set("[]{}(),'\""):  # a bare text with letters or signs that need quotes
            return f"{error.override}: quote the value twice, once for the shell: \"{key}='{value}'\""
        example = "quote what holds brackets or spaces, as in 'model.block=[attention,mlp]'"
        return f"{error.override}: {text.splitlines()[0]}; {example}"
    if found := re.search(r"Multiple values for (\S+)\.", text):
        group = found.group(1)
        return f"+{group}=...: a {group} is selected already; leave out the plus, as in {group}={groups()[group][0]}"
    if "Ambiguous value for argument" in text:
        override = text.split("'")[1]
        return f"{override}: several values need -m, which runs every combination"
    if found := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        group, option = found.groups()
        options = groups().get(group, []) or re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        return _no_option(group, option, options)
    if found := re.search(r"Could not override '([^']+)'", text):
        return _explain_key(found.group(1), text)
    if found := re.search(r"Interpolation key '([^']+)' not found", text):
        where = re.search(r"full_key: (\S+)", text)
        target = nearest(found.group(1), default_keys())
        return (
            f"{where.group(1) if where else 'config'}: there is no key {found.group(1)!r} to refer to. {target}".strip()
        )
    if found := re.search(r"full_key: (\S+)", text):
        return f"{found.group(1)}: {text.splitlines()[0]}"
    return " ".join(line.strip() for line in text.splitlines()[:2])


def _explain_key(key: str, text: str) -> str:
    known_groups = groups()
    last = re.split(r"[./]", key)[-1]
    if last in known_groups and last != key:
        return f"{key}: options of a group are selected with {last}=..., one of {', '.join(known_groups[last])}"
    if "/" in key:
        return f"{key}: no such group. {nearest(key, known_groups)}Groups: {', '.join(known_groups)}"
    keys = default_keys()
    if key in keys:  # one of the default option, which another option of the group leaves out
        group = key.partition(".")[0]
        return f"{key}: the option of {group}= that is selected leaves it out; a plus adds it: +{key}=..."
    head, _, tail = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == head]
    near = nearest(tail, siblings)
    if not near:  # the right name in the wrong section, or a wrong section
        elsewhere = [k for k in keys if k.rpartition(".")[2] == tail and k != key]
        near = "".join(f"Did you mean {k!r}? " for k in elsewhere[:2]) or nearest(key, {*known_groups, *keys} - {head})
    title, known = (
        (f"Keys of {head}", siblings) if head and siblings else ("Keys and groups", [*known_groups, *keys_at_top(keys)])
    )
    if key.startswith(("model.", "callbacks.extra.")) and key.count(".") > 1 and not siblings:
        return f"{key}: no such key. The options of a part of your own need a plus: +{key}=..."
    return f"{key}: no such key. {near}{title}: {', '.join(dict.fromkeys(known))}"


def keys_at_top(keys: Sequence[str]) -> list[str]:
    return [key for key in keys if "." not in key]
