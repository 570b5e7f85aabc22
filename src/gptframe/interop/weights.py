"""Tensors by name in a folder: safetensors or torch.save files, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptframe.errors import UserError

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"


class Weights(Mapping[str, Tensor]):
    """The tensors of a model's folder, or of one file; each is read when it is asked for.

    Raises:
        UserError: there are none, a file is damaged, or a shard is missing.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._files = _files(place)
        self._where: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in self._files:
            for name in self._names(file):
                if name in self._where:
                    raise UserError(f"{place}: {name} is in {self._where[name].name} and in {file.name}")
                self._where[name] = file
        for name, shard in _index(place).items():
            if name not in self._where:
                raise UserError(f"{place}: the index says that {name} is in {shard}, and it is not there")

    def __getitem__(self, name: str) -> Tensor:
        file = self._where[name]
        opened = self._open[file]
        try:
            tensor = opened[name] if isinstance(opened, dict) else opened.get_tensor(name)
        except Exception as error:  # the library's own error class
            raise UserError(f"{file} is damaged at {name}: {_first_line(error)}") from None
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise UserError(f"{file}: {name} is {getattr(tensor, 'dtype', type(tensor).__name__)}, not a float tensor")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        opened = self._open[self._where[name]]
        return tuple(opened[name].shape) if isinstance(opened, dict) else tuple(opened.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def _names(self, file: Path) -> list[str]:
        if file.suffix == ".safetensors":
            self._open[file] = open_safetensors(file)
            return list(self._open[file].keys())
        self._open[file] = load_torch(file)
        return [k for k, v in self._open[file].items() if isinstance(v, Tensor)]


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    for name in (SAFETENSORS, TORCH):
        index = _index(place) if (place / (name + INDEX)).is_file() else {}
        if index:
            shards = sorted(set(index.values()))
            missing = [shard for shard in shards if not (place / shard).is_file()]
            if missing:
                raise UserError(f"{place}: {', '.join(missing)} missing, of the {len(shards)} shards in {name}{INDEX}")
            return [place / shard for shard in shards]
        if (place / name).is_file():
            return [place / name]
    found = sorted(place.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise UserError(f"{place} holds no weights: neither {SAFETENSORS} nor {TORCH}, nor their index files")


def _index(place: Path) -> dict[str, str]:
    for name in (SAFETENSORS, TORCH):
        file = place / (name + INDEX)
        if place.is_dir() and file.is_file() and not (place / name).is_file():
            where = read_json(file).get("weight_map")
            if not isinstance(where, dict) or not where or not all(isinstance(v, str) for v in where.values()):
                raise UserError(f"{file} has no weight_map")
            if any(Path(v).name != v for v in where.values()):
                raise UserError(f"{file}: a shard must lie beside it")
            return where
    return {}


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: there is none.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no JSON object")
    return value


def open_safetensors(file: Path) -> Any:
    """An open safetensors file; UserError where it is truncated, has trailing bytes, or is none."""
    import safetensors

    try:
        return safetensors.safe_open(str(file), framework="pt")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or _first_line(error)}") from None
    except Exception as error:  # SafetensorError
        raise UserError(f"{file} is truncated or not a safetensors file: {_first_line(error)}") from None


def load_torch(file: Path) -> dict[str, Any]:
    """What torch.save wrote, tensors and plain containers only; UserError where it is damaged or holds code."""
    try:
        value = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or _first_line(error)}") from None
    except Exception as error:  # torch raises pickle, zip and runtime errors of its own here
        raise UserError(
            f"{file} is truncated, or not a file of tensors and plain values: {_first_line(error)}"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no dictionary of tensors")
    return value


def write_safetensors(
    state: Mapping[str, Tensor], folder: Path, shard_bytes: int, metadata: Mapping[str, str] | None = None
) -> list[Path]:
    """Write tensors as model.safetensors, or as numbered shards of at most `shard_bytes` and their index."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in state.items():
        n_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + n_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size, total = size + n_bytes, total + n_bytes
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SAFETENSORS]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, str(folder / name), metadata={"format": "pt", **(metadata or {})})
    if count > 1:
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        value = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / (SAFETENSORS + INDEX)).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def check_finite(name: str, tensor: Tensor, where: Path) -> None:
    """UserError where a tensor holds a value that is no number."""
    if not bool(tensor.isfinite().all()):
        n = int((~tensor.isfinite()).sum())
        raise UserError(
            f"{where}: {name} holds {n} values that are NaN or infinite: the file is damaged or the run was"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
