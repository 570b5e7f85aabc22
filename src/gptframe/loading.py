"""A trained or imported model in three lines: `load(run).generate("...")`, `.logits(...)`, `.trace(...)`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptframe.errors import UserError, nearest
from gptframe.generate import (
    Continuation,
    Reader,
    Sampling,
    TextStream,
    check_prompt,
    check_sampling,
    choose,
    generate_batch,
    lay_out,
    view_start,
)
from gptframe.inspect.source import check_tokens
from gptframe.model import GPT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
Prompt = str | list[int]


class LoadedModel:
    """A model with its tokenizer. Prompts are texts, or lists of token ids.

    Attributes:
        model: the `GPT` itself, in eval mode.
        tokenizer: None for a run on tokens without one.
        path: the run directory.
    """

    def __init__(self, model: GPT, tokenizer: Any, path: Path | None = None) -> None:
        self.model, self.tokenizer, self.path = model, tokenizer, path

    def __repr__(self) -> str:
        n = sum(p.numel() for p in self.model.parameters())
        weight = self.model.token_embedding.weight
        kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}"
        return f"LoadedModel({self.model.cfg.name}: {n:,} parameters, {kind}; .generate, .stream, .logits, .trace)"

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt, after the token that begins a document where there is one. Ids stay as they are.

        Raises:
            UserError: a word that a closed vocabulary lacks (named), nothing at all, or an id that is none.
        """
        if not isinstance(prompt, str):
            ids = [int(token) for token in prompt]
        elif self.tokenizer is None:
            raise UserError("this model has no tokenizer: give token ids")
        else:
            start = self.tokenizer.bos_id
            if not prompt:  # a document may begin behind the end of another
                start = self.tokenizer.eos_id if start is None else start
            check_words(self.tokenizer, prompt)
            ids = [*([] if start is None else [start]), *self.tokenizer.encode(prompt)]
        check_prompt(ids, self.model)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; the ids themselves where there is no tokenizer."""
        return " ".join(map(str, ids)) if self.tokenizer is None else self.tokenizer.decode(ids)

    def continuations(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        *,
        samples: int = 1,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        use_cache: bool = True,
        **sampling: Any,
    ) -> list[list[tuple[str, Continuation]]]:
        """For each prompt its samples, as (generated text, ids and reason). All are computed in one batch.

        Args:
            samples: of each prompt.
            seed: sample i of any prompt draws from seed + i.
            stop: texts at which to end; they are cut off.
            sampling: temperature (default 0.8), top_k, top_p, min_p, repetition_penalty; see `Sampling`.
        """
        if samples < 1:
            raise UserError(f"--samples {samples} must be at least 1")
        settings, stops = _sampling(sampling), _stops(stop)
        rows = [ids for ids in map(self.encode, prompts) for _ in range(samples)]
        streams = [TextStream(self, ids, stops) for ids in rows]

        def on_token(row: int, token: int) -> bool:
            streams[row].add(token)
            return streams[row].stopped

        found = generate_batch(
            self.model,
            rows,
            max_new_tokens,
            settings,
            generators=[_generator(seed + i) for _ in prompts for i in range(samples)],
            stop_ids=self._stop_ids(),
            use_cache=use_cache,
            on_token=on_token,
        )
        texts = [(stream.text, new) for stream, new in zip(streams, found, strict=True)]
        return [texts[i : i + samples] for i in range(0, len(texts), samples)]

    def generate(self, prompt: Prompt | list[str] = "", max_new_tokens: int = 64, **options: Any) -> Any:
        """Prompt and continuation as one text; a list for several prompts or several `samples`.

        Args:
            options: samples, seed, stop, temperature, top_k, top_p, min_p, repetition_penalty; see `continuations`.
        """
        several = isinstance(prompt, list) and any(isinstance(item, (str, list)) for item in prompt)
        prompts: Sequence[Any] = prompt if several else [prompt]
        found = self.continuations(prompts, max_new_tokens, **options)
        shown = [self.shown(one) for one in prompts]
        texts = [[start + text for text, _ in samples] for start, samples in zip(shown, found, strict=True)]
        flat = [samples if options.get("samples", 1) > 1 else samples[0] for samples in texts]
        return flat if several else flat[0]

    def stream(
        self,
        prompt: Prompt = "",
        max_new_tokens: int = 64,
        *,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        use_cache: bool = True,
        **sampling: Any,
    ) -> Iterator[str]:
        """The continuation in pieces, as its tokens are drawn: the same text as `generate` with the same options."""
        settings, ids, generator = _sampling(sampling), self.encode(prompt), _generator(seed)
        check_sampling(max_new_tokens, settings.temperature)
        text = TextStream(self, ids, _stops(stop))
        was_training = self.model.training
        self.model.eval()
        try:
            reader = Reader(self.model, use_cache)
            for _ in range(max_new_tokens):
                with torch.inference_mode():
                    token = choose(reader([ids]), [ids], settings, [generator])[0]
                if token in self._stop_ids():
                    break
                ids.append(token)
                piece = text.add(token)
                if piece:
                    yield piece
                if text.stopped:
                    return
            rest = text.finish()
            if rest:
                yield rest
        finally:
            self.model.train(was_training)

    def shown(self, prompt: Prompt) -> str:
        """A prompt as it stands before its continuation."""
        return self.decode(self.encode(prompt))

    def logits(self, prompt: Prompt) -> Tensor:
        """Logits [T, V] of the next token after each token of a text, float32.

        Raises:
            UserError: the text is longer than the context.
        """
        ids = self.encode(prompt)
        check_tokens(ids, self.model.cfg)
        with torch.inference_mode():
            return self.model(torch.tensor([ids], device=self.model.token_embedding.weight.device))[0].float()

    def trace(self, prompt: Prompt) -> Any:
        """Every intermediate value of the forward pass over a text by name: see `gptframe.trace`."""
        from gptframe.inspect.trace import trace

        ids = self.encode(prompt)
        check_tokens(ids, self.model.cfg)
        with torch.no_grad(), trace(self.model) as found:
            self.model(torch.tensor([ids], device=self.model.token_embedding.weight.device))
        return found

    def seen(self, ids: Sequence[int]) -> int:
        """How many of the last tokens of a text the model sees."""
        return len(ids) - view_start(len(ids), self.model.cfg.context_length)

    def _stop_ids(self) -> tuple[int, ...]:
        ends = getattr(self.tokenizer, "stop_ids", None) or (getattr(self.tokenizer, "eos_id", None),)
        return tuple(end for end in ends if end is not None)


def load(path: str | Path, device: str | None = None, dtype: str | torch.dtype | None = None) -> LoadedModel:
    """The model of a run directory, trained here or imported, ready to use.

    Its matrices are laid out for generation (`gptframe.generate.lay_out`), and some share memory: to write them with
    safetensors, `.clone(memory_format=torch.contiguous_format)` them.

    Args:
        device: `cpu`, `cuda`, ...; None for the CPU.
        dtype: `fp32`, `bf16`, `fp16`, `fp64` or a torch dtype; None for the one that the checkpoint has.

    Raises:
        UserError: it is not a run directory, or has no whole checkpoint.
    """
    from gptframe.training.checkpoint import load_run

    path = Path(path).expanduser()
    if not (path / "config.yaml").exists() and (path / "config.json").exists():
        raise UserError(
            f"{path} is a Hugging Face model, not a run directory: gptframe import hf --from {path} --to NEW"
        )
    try:
        place = torch.device(device or "cpu")
        torch.empty(0, device=place)
        if place.type == "meta":  # it has shapes and no values
            raise RuntimeError
    except (RuntimeError, AssertionError):  # torch without CUDA asserts
        raise UserError(f"--device {device}: there is no such device here") from None
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise UserError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    model, tokenizer = load_run(path, str(place), dtype)
    lay_out(model)
    return LoadedModel(model, tokenizer, path)


def check_words(tokenizer: Any, text: str) -> None:
    """UserError where a closed vocabulary lacks a word or a character of `text`; it is named."""
    unknown = getattr(tokenizer, "unk_id", None)
    if unknown is None or unknown not in tokenizer.encode(text):
        return
    known = getattr(tokenizer, "words", None)
    pieces = re.findall(r"\w+|[^\w\s]", text) if known else text
    missing = list(dict.fromkeys(piece for piece in pieces if unknown in tokenizer.encode(piece)))
    missing = missing or [word for word in text.split() if unknown in tokenizer.encode(word)]  # `<eos>` and its like
    hint = nearest(missing[0], known) if known else ""
    words = ", ".join(map(repr, missing[:8])) + (" are" if len(missing) > 1 else " is")
    raise UserError(f"prompt: {words} not in the model's vocabulary of {tokenizer.vocab_size} entries. {hint}".rstrip())


def _sampling(options: dict[str, Any]) -> Sampling:
    try:
        return Sampling(**{"temperature": 0.8, **options})
    except TypeError:
        known = [f.name for f in dataclasses.fields(Sampling)]
        wrong = next(key for key in options if key not in known)
        raise UserError(f"{wrong}: no such option. {nearest(wrong, known)}Known: {', '.join(known)}") from None


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed % 2**63)
