"""The `gptframe import` and `gptframe export` commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptframe.arguments import Parser
from gptframe.errors import UserError, nearest

if TYPE_CHECKING:
    from gptframe.interop.rundir import Imported

# name -> what it is. The Hugging Face formats are those of gptframe.interop.hf, which imports torch.
HUGGING_FACE = {
    "hf": "a Hugging Face model, by its own model_type",
    "gpt2": "GPT-2",
    "llama": "LLaMA 1 to 3.x, and what shares its format",
    "mistral": "Mistral",
    "qwen2": "Qwen 2 and 2.5",
    "qwen3": "Qwen 3",
    "olmo2": "OLMo 2",
    "gpt_neox": "GPT-NeoX, Pythia",
}
ALIASES = {"neox": "gpt_neox", "pythia": "gpt_neox", "qwen": "qwen3", "olmo": "olmo2", "huggingface": "hf"}
IMPORTS = {
    **HUGGING_FACE,
    "safetensors": "what gptframe export --format safetensors wrote",
    "nanogpt": "nanoGPT's ckpt.pt",
    "andrea": "ANDREA's checkpoint (experimental)",
}
EXPORTS = {
    **{**HUGGING_FACE, "hf": "the first Hugging Face format that can express the model"},
    "safetensors": "any model: its weights under gptframe's names, with its config",
    "andrea": "ANDREA's checkpoint, with Adam's moments (experimental)",
}
DTYPES = ("fp32", "bf16", "fp16")


def _listing(formats: dict[str, str]) -> str:
    return "formats:\n" + "\n".join(f"  {name:<12} {what}" for name, what in formats.items())


def _format(name: str, known: dict[str, str], option: str) -> str:
    name = ALIASES.get(name, name)
    if name not in known:
        raise UserError(f"{option} {name!r}: no such format. {nearest(name, known)}Known: {', '.join(known)}")
    return name


def import_command(argv: list[str]) -> int:
    """`gptframe import FORMAT --from SOURCE --to DIR`."""
    parser = Parser(
        "gptframe import",
        description="Read a model of another library into a run directory, for generate, evaluate, trace and training:"
        " gptframe train init_from=DIR data=...",
        epilog=_listing(IMPORTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("format", metavar="FORMAT")
    parser.add_argument("--from", dest="source", required=True, help="a folder or file; for Hugging Face also a hub id")
    parser.add_argument("--to", required=True, help="the run directory to make")
    parser.add_argument("--name", help="the model's name (default: that of the source)")
    parser.add_argument("--tokenizer", help="a tokenizer.json, where the source has none; ANDREA: a segments file")
    parser.add_argument("--map", help="andrea: a YAML file with the order of the tensors")
    parser.add_argument("--model", help="andrea: the preset, where the number of weights does not tell")
    arguments = parser.parse_args(argv)
    kind = _format(arguments.format, IMPORTS, "gptframe import")
    for option in ("map", "model"):
        if getattr(arguments, option) and kind != "andrea":
            raise UserError(f"--{option} goes with gptframe import andrea")

    from gptframe.interop import rundir

    place = Path(arguments.to).expanduser()
    rundir.check_free(place)
    found = _read(kind, arguments)
    n_parameters = rundir.write_run(found, place)
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in found.state.values()})
    print(f"{found.model.name}: {n_parameters:,} parameters, {', '.join(dtypes)}, context {found.model.context_length}")
    for note in found.notes:
        print(f"note: {note}")
    print(f"run directory: {place}")
    prompt = '--prompt "..."' if found.save_tokenizer is not None else "--ids 1,2,3"
    print(f"sample from it: gptframe generate {place} {prompt}")
    print(f"train it on: gptframe train init_from={place} data=text data.path=my.txt")
    return 0


def _read(kind: str, arguments: argparse.Namespace) -> Imported:
    source = Path(arguments.source).expanduser()
    name = arguments.name or re.sub(r"\W+", "_", source.absolute().name.removesuffix(".pt")).strip("_") or kind
    if kind in HUGGING_FACE:
        from gptframe.interop import folders

        if not source.exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", arguments.source):
            source = folders.download(arguments.source)
        found = folders.read_folder(source, None if kind == "hf" else kind, name)
    else:
        if not source.exists():
            raise UserError(f"--from {source}: there is no such file")
        readers: dict[str, Callable[[], Any]] = {
            "safetensors": lambda: _module("native").read(source, arguments.name),
            "nanogpt": lambda: _module("nanogpt").read(source, name),
            "andrea": lambda: _module("andrea").read(source, name, arguments.model, arguments.map),
        }
        found = readers[kind]()
    if arguments.tokenizer:
        _give_tokenizer(found, Path(arguments.tokenizer).expanduser(), kind)
    return found


def _module(name: str) -> Any:
    import importlib

    return importlib.import_module(f"gptframe.interop.{name}")


def _give_tokenizer(found: Imported, file: Path, kind: str) -> None:
    from gptframe.data.tokenizer import Source, build_tokenizer

    section = {"name": "segments" if kind == "andrea" else "hf_file", "path": str(file.absolute())}
    tokenizer = build_tokenizer(section, Source(vocab_size=found.model.vocab_size))
    assert tokenizer is not None
    if kind == "andrea" and tokenizer.vocab_size != found.model.vocab_size:
        raise UserError(
            f"--tokenizer {file}: {tokenizer.vocab_size - 257} segments, 256 bytes and a start make "
            f"{tokenizer.vocab_size} entries, and the model has {found.model.vocab_size}"
        )
    found.tokenizer, found.save_tokenizer = section, tokenizer.save
    found.notes = [note for note in found.notes if "--tokenizer" not in note]


def export_command(argv: list[str]) -> int:
    """`gptframe export RUN --format hf|safetensors|andrea --to DIR`."""
    parser = Parser(
        "gptframe export",
        description="Write the model of a run directory for another library.",
        epilog=_listing(EXPORTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", help="a run directory, trained here or imported")
    parser.add_argument("--format", required=True, help="see below")
    parser.add_argument("--to", required=True, help="the folder to make; andrea: the file")
    parser.add_argument("--dtype", choices=DTYPES, help="(default: the checkpoint's)")
    parser.add_argument("--shard-size", help="safetensors: at most this much in one file (default 5GB)")
    parser.add_argument("--map", help="andrea: a YAML file with the order of the tensors")
    parser.add_argument("--zero-moments", action="store_true", help="andrea: write zeros where a run has no moments")
    arguments = parser.parse_args(argv)
    kind = _format(arguments.format, EXPORTS, "--format")
    if arguments.shard_size is not None and kind == "andrea":
        raise UserError("--shard-size goes with safetensors: --format andrea is one file")
    shard_bytes = _bytes(arguments.shard_size or "5GB")
    if kind == "andrea" and arguments.dtype not in (None, "fp32"):
        raise UserError("--format andrea is float32")
    if (arguments.map or arguments.zero_moments) and kind != "andrea":
        raise UserError("--map and --zero-moments go with --format andrea")

    import torch

    from gptframe.interop import rundir

    place = Path(arguments.to).expanduser()
    rundir.check_free(place)
    run = rundir.read_run(Path(arguments.run).expanduser())
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    dtype = dtypes[arguments.dtype]
    if kind == "andrea":
        andrea = _module("andrea")
        andrea.write(run, place, arguments.map, arguments.zero_moments)
        what = "ANDREA's checkpoint"
    elif kind == "safetensors":
        rundir.write_folder(place, lambda folder: _module("native").write(run, folder, dtype, shard_bytes))
        what = "gptframe's own tensors"
    else:
        from gptframe.interop import folders

        written: dict[str, Any] = {}
        wanted = None if kind == "hf" else kind
        rundir.write_folder(
            place, lambda folder: written.update(folders.write_folder_files(run, folder, wanted, dtype, shard_bytes))
        )
        what = f"{written['architectures'][0]}, {written['torch_dtype']}"
    n_parameters = sum(t.numel() for t in run.state.values())
    print(f"{place}: {what}, {n_parameters:,} parameters, step {run.step}")
    for note in run.notes:
        print(f"note: {note}")
    return 0


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|B|KB|MB|GB)", text.strip(), re.IGNORECASE)
    value = float(found[1]) * {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[found[2].upper()] if found else 0
    if value < 1:
        raise UserError(f"--shard-size {text!r} must be a size, as in 5GB or 200MB")
    return int(value)
