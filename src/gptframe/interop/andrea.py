"""ANDREA's checkpoints (experimental): [int32 step][int32 n][n float32 weights][n float32 m][n float32 v].

Little-endian; m and v are Adam's moments. The order of the weights is a map (andrea_order.yaml), since it is published
in part only.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from gptframe.config import Config, ModelConfig
from gptframe.errors import UserError
from gptframe.interop.rundir import Imported, Run, check_free, umask
from gptframe.interop.weights import check_finite
from gptframe.model import build_model

HEADER = struct.Struct("<ii")
ORDER = Path(__file__).with_name("andrea_order.yaml")

# d_model, n_layers, n_heads, vocabulary; 1024 positions and four times the width in all of them.
SIZES = {"andrea12m": (384, 6, 12, 2305), "andrea120m": (768, 12, 12, 8449), "andrea480m": (1536, 16, 24, 8449)}


def config_of(preset: str, tied: bool, biases: bool, affine: bool, name: str) -> ModelConfig:
    """One of the readings of a preset: the head tied or not, linear biases or none, norms affine or parameter-free."""
    d_model, n_layers, n_heads, vocab_size = SIZES[preset]
    section = {
        "name": name,
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "vocab_size": vocab_size,
        "context_length": 1024,
        "tie_head": tied,
        "norm": {"name": "layernorm", "affine": affine},
        "position": {"name": "learned"},
        "attention": {"bias": biases},
        "mlp": {"bias": biases},
    }
    return Config.from_dict({"model": section}).model


def readings(name: str) -> Iterator[tuple[str, ModelConfig, int]]:
    """(preset, config, number of weights) of every reading."""
    for preset, (d, layers, _, vocab) in SIZES.items():
        for tied in (False, True):
            for biases in (False, True):
                for affine in (True, False):
                    block = 12 * d * d + (9 * d if biases else 0) + (4 * d if affine else 0)
                    count = (vocab + 1024) * d + layers * block + (2 * d if affine else 0) + (0 if tied else vocab * d)
                    yield preset, config_of(preset, tied, biases, affine, name), count


def read(file: Path, name: str, preset: str | None = None, order: str | None = None) -> Imported:
    """Read a checkpoint.

    Args:
        preset: `andrea12m`, ...; None where the number of weights tells.
        order: a YAML file with the order of the tensors; None for the likely one.

    Raises:
        UserError: it is truncated, has trailing bytes, holds a number of weights that no preset has, or values that are
            not finite.
    """
    step, n = _header(file)
    cfg = _by_count(n, name, preset, file)
    shapes = {key: tuple(p.shape) for key, p in build_model(cfg, device="meta").named_parameters()}
    entries = read_order(order, cfg, shapes)
    values = np.memmap(file, "<f4", "r", offset=HEADER.size, shape=(3, n))
    weights, m, v = (_split(values[i], entries, shapes) for i in range(3))
    for key, tensor in weights.items():
        check_finite(key, tensor, file)
    moments = {key: {"exp_avg": m[key], "exp_avg_sq": v[key]} for key in weights}
    options = f"{'affine' if cfg.norm['affine'] else 'parameter-free'} norms, " + (
        f"{'tied' if cfg.tie_head else 'untied'} head, linear biases {'on' if cfg.sublayers['mlp']['bias'] else 'off'}"
    )
    return Imported(
        cfg,
        weights,
        source={"format": "andrea", "from": str(file), "order": order or "default"},
        optimizer=moments,
        step=step,
        notes=[
            f"{n:,} weights at step {step}: {options}",
            "experimental: the order inside a layer is not published; the default is the likely one (--map changes it)",
            "the vocabulary is not in the file: give --tokenizer segments.txt, or prompt with --ids",
        ],
    )


def _header(file: Path) -> tuple[int, int]:
    try:
        size = file.stat().st_size
        with open(file, "rb") as handle:
            head = handle.read(HEADER.size)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    if len(head) < HEADER.size:
        raise UserError(f"{file} has {size} bytes, fewer than the {HEADER.size} of a header")
    step, n = HEADER.unpack(head)
    if n < 1 or step < 0:
        raise UserError(f"{file} is no ANDREA checkpoint: its header says step {step} and {n} weights")
    expected = HEADER.size + 12 * n
    if size < expected:
        raise UserError(f"{file} is truncated: {size:,} bytes, and {n:,} weights with their moments take {expected:,}")
    if size > expected:
        raise UserError(f"{file} has {size - expected:,} trailing bytes: {n:,} weights with moments take {expected:,}")
    return step, n


def _by_count(n: int, name: str, preset: str | None, file: Path) -> ModelConfig:
    if preset is not None and preset not in SIZES:
        raise UserError(f"--model {preset!r} is none of {', '.join(SIZES)}")
    known = [(p, cfg, count) for p, cfg, count in readings(name) if preset in (None, p)]
    fitting = [cfg for _, cfg, count in known if count == n]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(f"{file}: {n:,} weights fit several presets: give --model {' or '.join(SIZES)}")
    nearest = sorted(known, key=lambda item: abs(item[2] - n))[:3]
    counts = ", ".join(f"{p} has {count:,}" for p, _, count in nearest)
    raise UserError(f"{file}: {n:,} weights are those of no {preset or 'ANDREA'} model (the nearest: {counts})")


@dataclass(frozen=True)
class Entry:
    """A stretch of the file: tensors of ours joined along their first axis, then perhaps transposed."""

    tensors: tuple[str, ...]
    transposed: bool = False


def read_order(file: str | None, cfg: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[Entry]:
    """The entries of a map for a model, each of its tensors exactly once.

    Raises:
        UserError: the map is no map, or misses a tensor, or names one twice.
    """
    place = Path(file).expanduser() if file else ORDER
    try:
        values = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--map {place}: {str(error).splitlines()[0]}") from None
    keys = ("before", "layer", "after")
    if not isinstance(values, dict) or set(values) != set(keys) or not all(isinstance(values[k], list) for k in keys):
        raise UserError(f"--map {place} must hold the lists before, layer and after")
    entries: list[Entry] = []
    every = [("", entry) for entry in values["before"]]
    every += [(f"blocks.{i}.", entry) for i in range(cfg.n_layers) for entry in values["layer"]]
    every += [("", entry) for entry in values["after"]]
    for prefix, item in every:
        names = [item] if isinstance(item, str) else item.get("tensors") if isinstance(item, dict) else None
        layout = item.get("layout", "out_in") if isinstance(item, dict) else "out_in"
        if not isinstance(names, list) or not names or layout not in ("out_in", "in_out"):
            raise UserError(f"--map {place}: {item!r} is neither a name nor {{tensors: [...], layout: out_in|in_out}}")
        there = tuple(prefix + str(name) for name in names if prefix + str(name) in shapes)
        if there and len(there) < len(names):
            raise UserError(f"--map {place}: the model has some of {item!r} and not the others")
        if there:
            entries.append(Entry(there, layout == "in_out" and len(shapes[there[0]]) == 2))
    placed = [name for entry in entries for name in entry.tensors]
    twice = next((name for name in placed if placed.count(name) > 1), None) if len(set(placed)) < len(placed) else None
    missing = sorted(set(shapes) - set(placed))
    if twice or missing:
        raise UserError(f"--map {place}: {f'{twice} stands twice' if twice else f'{missing[0]} has no place'}")
    return entries


def _split(values: np.ndarray, entries: list[Entry], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    found, start = {}, 0
    for entry in entries:
        rows = [shapes[name][0] for name in entry.tensors]
        shape = (sum(rows), *shapes[entry.tensors[0]][1:])
        count = int(np.prod(shape))
        flat = torch.from_numpy(values[start : start + count].astype(np.float32))
        whole = flat.view(shape[::-1]).T if entry.transposed else flat.view(shape)
        for name, part in zip(entry.tensors, whole.split(rows), strict=True):
            found[name] = part.contiguous()
        start += count
    return found


def write(run: Run, place: Path, order: str | None = None, zero_moments: bool = False) -> None:
    """Write a run as a checkpoint.

    Raises:
        UserError: the model is none of ANDREA's architecture, its optimiser keeps no Adam moments, or `place` exists.
    """
    cfg = run.config.model
    obstacles = _obstacles(cfg)
    if obstacles:
        raise UserError(f"ANDREA's format cannot express this model: {', '.join(obstacles)}")
    moments = run.moments
    if moments is None:
        if not zero_moments:
            raise UserError(
                f"{run.path} has no Adam moments (optimizer.name={run.config.optimizer['name']}, or an import without "
                f"an optimiser): --zero-moments writes zeros"
            )
        zeros = {name: torch.zeros_like(tensor) for name, tensor in run.state.items()}
        moments = {name: {"exp_avg": zero, "exp_avg_sq": zero} for name, zero in zeros.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in run.state.items()}
    entries = read_order(order, cfg, shapes)
    n = sum(tensor.numel() for tensor in run.state.values())
    parts = [
        run.state,
        {name: state["exp_avg"] for name, state in moments.items()},
        {name: state["exp_avg_sq"] for name, state in moments.items()},
    ]
    check_free(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".tmp-{place.name}-", dir=place.parent)
        try:
            with open(descriptor, "wb") as handle:
                handle.write(HEADER.pack(run.step, n))
                for tensors in parts:
                    for entry in entries:
                        handle.write(_joined(tensors, entry))
            os.chmod(temporary, 0o666 & ~umask())  # mkstemp's files are the user's alone
            if place.is_dir():
                place.rmdir()
            os.replace(temporary, place)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--to {place}: {error.strerror}") from None


def _joined(tensors: Mapping[str, Tensor], entry: Entry) -> bytes:
    whole = torch.cat([tensors[name] for name in entry.tensors])
    whole = whole.T if entry.transposed else whole
    return whole.to(torch.float32).contiguous().numpy().astype("<f4").tobytes()


def _obstacles(cfg: ModelConfig) -> list[str]:
    """Options that are not ANDREA's."""
    attention = cfg.sublayers["attention"]
    wanted: dict[str, tuple[Any, Any]] = {
        "norm_placement.name": (cfg.norm_placement["name"], "pre"),
        "norm.name": (cfg.norm["name"], "layernorm"),
        "position.name": (cfg.position["name"], "learned"),
        "activation.name": (cfg.activation["name"], "gelu_tanh"),
        "topology": (cfg.topology_section["name"], "sequential"),
        "block": (cfg.block, ["attention", "mlp"]),
        "layers": (dict(cfg.layers), {}),
        "residual_scale": (cfg.residual_scale, None),
        "logit_softcap": (cfg.logit_softcap, None),
        "head.name": (cfg.head["name"], "linear"),
        "transforms": (",".join(cfg.transforms), ""),
        "attention.n_kv_heads": (attention.get("n_kv_heads") or cfg.n_heads, cfg.n_heads),
        "attention.window": (attention.get("window"), None),
        "attention.qk_norm": (attention.get("qk_norm", "none"), "none"),
        "attention.softcap": (attention.get("softcap"), None),
        "attention.head_dim": (cfg.head_dim, cfg.d_model // cfg.n_heads),
    }
    return [f"model.{key}={value}" for key, (value, allowed) in wanted.items() if value != allowed]
