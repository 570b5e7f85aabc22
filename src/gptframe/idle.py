"""Refuses what was typed and would have no effect: an option of a part that this config does not use.

Only what a person typed is refused. Presets and defaults may hold options of parts that an override has switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gptframe.config import Config
from gptframe.errors import UserError


@dataclass(frozen=True)
class Rule:
    """Keys that have no effect where `when` holds.

    Attributes:
        keys: dotted keys; a key stands for all below it.
        when: on the composed config.
        why: what makes them idle, and what to type instead.
    """

    keys: tuple[str, ...]
    when: Callable[[Config], bool]
    why: str


def _built_in(config: Config) -> set[str] | None:
    """The sublayers in use; None where a plugin's is among them, which may read any option of the model."""
    used = {section["name"] for layer in range(config.model.n_layers) for section in config.model.block_of(layer)}
    return used if used <= {"attention", "mlp"} else None


def _without(sublayer: str) -> Callable[[Config], bool]:
    return lambda c: (used := _built_in(c)) is not None and sublayer not in used


def _attention(config: Config, option: str) -> Any:
    return config.model.sublayers.get("attention", {}).get(option)


def _no_norm(config: Config) -> bool:
    from gptframe.registry import lookup

    if _built_in(config) is None or _attention(config, "qk_norm") not in (None, "none"):
        return False
    seats = lookup("norm_placement", config.model.norm_placement["name"], "model.norm_placement.name")
    return not any(getattr(seats, seat, True) for seat in ("pre", "out", "post", "embedding", "final"))


def _warmup_steps(config: Config) -> Any:
    return config.schedule.get("warmup_steps")


def _samples(config: Config) -> dict[str, Any]:
    samples = config.callbacks.get("samples")
    return samples if isinstance(samples, dict) else {}


def _window_is_whole(config: Config) -> bool:
    window = _attention(config, "window")
    return isinstance(window, int) and window >= config.model.context_length


RULES = (
    Rule(("model.norm",), _no_norm, "model.norm_placement={c.model.norm_placement[name]} has no norms"),
    Rule(("model.norm.bias",), lambda c: not c.model.norm.get("affine", True), "model.norm.affine is false"),
    Rule(
        ("model.activation", "model.expansion", "model.mlp"),
        _without("mlp"),
        "no block has an mlp; add it to model.block, as in model.block=[attention,mlp]",
    ),
    Rule(
        ("model.attention", "model.n_heads"),
        _without("attention"),
        "no block has attention; add it to model.block, as in model.block=[attention,mlp]",
    ),
    Rule(
        ("model.position",),
        lambda c: _without("attention")(c) and c.model.position["name"] in ("rope", "alibi"),
        "no block has attention, where these positions enter",
    ),
    Rule(
        ("model.attention.window",),
        _window_is_whole,
        "it is not shorter than model.context_length={c.model.context_length}; for full attention type null",
    ),
    Rule(
        ("model.block",),
        lambda c: len(c.model.layers) == c.model.n_layers,
        "model.layers gives the sublayers of every layer",
    ),
    Rule(
        ("model.init",),
        lambda c: c.init_from is not None,
        "every weight comes from init_from={c.init_from}",
    ),
    Rule(
        ("schedule.warmup_fraction",),
        lambda c: _warmup_steps(c) is not None,
        "schedule.warmup_steps={c.schedule[warmup_steps]} goes before it; add schedule.warmup_steps=null",
    ),
    Rule(
        ("schedule.overlap_warmup",),
        lambda c: c.schedule["name"] == "constant" or not (_warmup_steps(c) or c.schedule.get("warmup_fraction")),
        "there is no decay, or no warm-up, to overlap with",
    ),
    Rule(
        ("schedule.decay", "schedule.min_ratio"),
        lambda c: c.schedule.get("decay_fraction") == 0,
        "schedule.decay_fraction=0 leaves no decay",
    ),
    Rule(
        ("data.baseline_tokens",),
        lambda c: c.data.get("baseline_order") == 0,
        "data.baseline_order=0 leaves out the baseline",
    ),
    Rule(
        tuple(f"callbacks.samples.{k}" for k in "interval prompts max_new_tokens temperature top_k top_p".split()),
        lambda c: _samples(c).get("count") == 0,
        "callbacks.samples.count=0 draws no samples",
    ),
    Rule(
        ("callbacks.samples.top_k", "callbacks.samples.top_p"),
        lambda c: _samples(c).get("temperature") == 0,
        "callbacks.samples.temperature=0 always takes the likeliest token",
    ),
)


def refuse(config: Config, overrides: Sequence[str]) -> None:
    """Check what was typed.

    Args:
        overrides: as typed, `key=value` or `group=option`.

    Raises:
        UserError: an override has no effect.
    """
    from gptframe import compose

    groups = compose.groups()
    for override in overrides:
        key, _, option = override.lstrip("+").partition("=")
        if key not in groups:
            leaves = [key]
        else:
            leaves = compose.keys_of_option(key, option) if option in groups[key] else []
        for rule in RULES:
            idle = [leaf for leaf in leaves if any(leaf == k or leaf.startswith(f"{k}.") for k in rule.keys)]
            if leaves and len(idle) == len(leaves) and _says_something(config, leaves) and rule.when(config):
                raise UserError(f"{override} has no effect: {rule.why.format(c=config)}")


def _says_something(config: Config, leaves: Sequence[str]) -> bool:
    """Whether a value is more than "leave this out", which an idle option may well be told."""
    values: Any = config.to_dict()
    for part in leaves[0].split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return len(leaves) > 1 or values not in (None, False)
