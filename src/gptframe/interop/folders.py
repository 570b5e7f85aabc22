"""Hugging Face model folders: config.json, safetensors and tokenizer, to and from run directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptframe.config import ModelConfig
from gptframe.errors import UserError
from gptframe.interop.hf import FORMATS, Format, config_of, half_split, model_of
from gptframe.interop.rundir import Imported, Run
from gptframe.interop.weights import Weights, check_finite, read_json, write_safetensors
from gptframe.model import build_model

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_DOWNLOAD_SECONDS = 24 * 3600.0


def read_folder(place: Path, wanted: str | None, name: str) -> Imported:
    """The model in a folder.

    Args:
        wanted: the model_type that it must have; None for any that we know.

    Raises:
        UserError: it is of another type, has options that we do not have, or its tensors are not what they should be.
    """
    if not place.is_dir():
        raise UserError(f"--from {place}: there is no such folder")
    where = place / "config.json"
    if not where.is_file():
        raise UserError(f"--from {place}: it has no config.json, so it is no Hugging Face model")
    values = read_json(where)
    if wanted is not None and values.get("model_type") != wanted:
        found = values.get("model_type")
        hint = f": use gptframe import {found}" if found in FORMATS else ""
        raise UserError(f"{where}: model_type={found!r}, not {wanted!r}{hint}")
    known, cfg = model_of(values, str(where), name)
    weights = Weights(place)
    state = read_state(known, cfg, weights)
    found_tokenizer, notes = _tokenizer(place, values, cfg)
    source = {"format": known.model_type, "from": str(place)}
    section: dict[str, Any] = {"name": "none"}
    if found_tokenizer is not None:
        section = {"name": "hf_file", "path": str((place / TOKENIZER).absolute())}
    return Imported(cfg, state, section, found_tokenizer, source, notes=notes)


def read_state(known: Format, cfg: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Our parameters from a format's tensors."""
    shapes = {name: tuple(p.shape) for name, p in build_model(cfg, device="meta").named_parameters()}
    bare = not any(name.startswith(known.prefix) for name in weights)
    left, state = set(weights), dict[str, Tensor]()
    for rule in known.rules(cfg):
        theirs = _spelling(rule.theirs, known, weights, bare)
        if theirs not in weights:
            raise UserError(f"{weights.place}: the tensor {theirs} is missing ({len(weights)} are there)")
        left.discard(theirs)
        expected = rule.shape([shapes[name] for name in rule.ours])
        if weights.shape(theirs) != expected:
            raise UserError(
                f"{weights.place}: {theirs} is {list(weights.shape(theirs))}, and by config.json {list(expected)}"
            )
        tensor = weights[theirs]
        check_finite(theirs, tensor, weights.place)
        for name, part in zip(rule.ours, rule.split(tensor, cfg.n_heads), strict=True):
            state[name] = part.contiguous()
    left -= {name for name in left if name.endswith(known.ignored)}
    if cfg.tie_head:
        for name in left & set(_HEADS):  # some files hold a tied head all the same
            if not torch.equal(weights[name], state["token_embedding.weight"]):
                raise UserError(f"{weights.place}: {name} is not the embedding, and config.json ties them")
            left.discard(name)
    if left:
        raise UserError(f"{weights.place}: {min(left)} is no tensor of {known.model_type} ({len(left)} such tensors)")
    return state


_HEADS = ("lm_head.weight", "embed_out.weight")


def _spelling(theirs: str, known: Format, weights: Weights, bare: bool) -> str:
    """The name that a file has for a tensor: the body's prefix may be missing, and GPT-NeoX's head has two names."""
    if theirs in _HEADS:
        return next((name for name in _HEADS if name in weights), theirs)
    return theirs.removeprefix(known.prefix) if bare else theirs


def _tokenizer(place: Path, values: Mapping[str, Any], cfg: ModelConfig) -> tuple[Any, list[str]]:
    """What writes the tokenizer into a run directory, or None with a note that says why not."""
    from gptframe.data.tokenizer import HuggingFaceFile, Source, check_room

    file = place / TOKENIZER
    if not file.is_file():
        old = [name for name in ("vocab.json", "tokenizer.model", "vocab.txt") if (place / name).is_file()]
        why = f"its tokenizer is {old[0]}, which gptframe does not read" if old else "it has no tokenizer.json"
        return None, [f"{why}: give --tokenizer tokenizer.json, or prompt with --ids"]
    inner = HuggingFaceFile(Source(), str(file))
    inner.name = "hf_file"
    check_room(inner, cfg.vocab_size)
    settings = read_json(place / TOKENIZER_CONFIG) if (place / TOKENIZER_CONFIG).is_file() else {}
    generation = place / "generation_config.json"
    more = read_json(generation) if generation.is_file() else {}

    def token(kind: str) -> str | None:
        """By the tokenizer's own word, else by the model's id."""
        name = settings.get(f"{kind}_token")
        name = name.get("content") if isinstance(name, dict) else name
        if isinstance(name, str) and inner._inner.token_to_id(name) is not None:
            return name
        ids = more.get(f"{kind}_token_id", values.get(f"{kind}_token_id"))
        first = ids[0] if isinstance(ids, list) and ids else ids
        return inner._inner.id_to_token(first) if isinstance(first, int) else None

    # A document begins with what the file itself puts before a text: <s> in LLaMA, nothing in GPT-2.
    start = inner._inner.encode("", add_special_tokens=True).ids
    bos = inner._inner.id_to_token(start[0]) if start else None
    eos, pad = token("eos") or inner._names["eos"], token("pad")
    inner._adopt(inner._inner, bos, eos, pad)
    return inner.save, []


def write_folder_files(run: Run, folder: Path, wanted: str | None, dtype: torch.dtype | None, shard_bytes: int) -> Json:
    """Write a run as a Hugging Face folder; return its config.json.

    Raises:
        UserError: no format, or not the wanted one, can express the model.
    """
    cfg = run.config.model
    known, values = config_of(cfg, wanted, prefer=run.imported_from)
    state: Mapping[str, Tensor] = run.state
    if cfg.position["name"] == "rope" and cfg.position.get("pairing", "interleaved") == "interleaved":
        state = half_split(state, cfg)
    written: dict[str, Tensor] = {}
    for rule in known.rules(cfg):
        tensor = rule.join([state[name] for name in rule.ours], cfg.n_heads)
        written[rule.theirs] = tensor if dtype is None else tensor.to(dtype)
    dtypes = {str(t.dtype).removeprefix("torch.") for t in written.values()}
    values["torch_dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
    values |= _write_tokenizer(run, folder)
    write_safetensors(written, folder, shard_bytes)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return values


Json = dict[str, Any]


def _write_tokenizer(run: Run, folder: Path) -> Json:
    """Copy a tokenizer.json where the run has one; return the special ids for config.json."""
    from gptframe.data.tokenizer import load

    none: Json = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    place = run.path / "tokenizer"
    if not place.is_dir():
        return none
    tokenizer = load(place)
    if (place / TOKENIZER).is_file():
        shutil.copyfile(place / TOKENIZER, folder / TOKENIZER)
        names = {f"{k}_token": v for k, v in tokenizer._state().items() if v is not None}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": run.config.model.context_length}
        (folder / TOKENIZER_CONFIG).write_text(json.dumps({**settings, **names}, indent=2) + "\n", encoding="utf-8")
    else:
        run.notes.append(f"tokenizer={tokenizer.name} has no tokenizer.json: the folder holds the model alone")
    return {f"{kind}_token_id": getattr(tokenizer, f"{kind}_id") for kind in ("bos", "eos", "pad")}


def download(name: str) -> Path:
    """A model of the Hugging Face hub, in its own cache.

    Raises:
        UserError: huggingface_hub is not installed, nothing answers, or there is no such model.
    """
    from gptframe.data.hub import in_time, reachable

    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"--from {name}: no such folder, and the hub needs: pip install huggingface_hub") from None
    local: Json = dict(allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*"])
    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True, **local))
    except Exception:  # not there yet, or not whole
        pass
    if not reachable(huggingface_hub.constants.ENDPOINT):
        raise UserError(f"--from {name}: no such folder, and the Hugging Face hub does not answer")
    message = f"--from {name}: the download did not end"
    try:
        return Path(in_time(_DOWNLOAD_SECONDS, lambda: huggingface_hub.snapshot_download(name, **local), message))
    except UserError:
        raise
    except Exception as error:  # the hub's own error classes
        raise UserError(f"--from {name}: {str(error).strip().splitlines()[0]}") from None
