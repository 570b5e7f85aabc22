"""Samples of a run, and how many of the held-out verb forms its model finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptframe.generate import generate
from gptframe.model import GPT
from gptframe.training import directory


@dataclass(frozen=True)
class SampleConfig:
    """Samples written to samples.txt."""

    count: int = 3
    """How many; 0 for none."""
    interval: int | None = None
    """Steps between them, a multiple of trainer.val_interval; null for after the last step only."""
    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    prompts: list[str] = field(default_factory=list)
    """What the samples continue, in turn; empty for what the corpus suggests, or the start of a document."""


class Sampler:
    """Writes samples.txt, and the table of samples in W&B."""

    def __init__(self, run_dir: Path, options: SampleConfig, seed: int, prepared: Any, tracker: Any, step: int):
        self.path, self.options, self.seed, self.prepared, self.tracker = (
            run_dir / "samples.txt", options, seed, prepared, tracker,
        )  # fmt: skip
        self.rows: list[list[Any]] = []
        self.blocks: list[str] = _blocks_up_to(self.path, step)
        self.last: tuple[int, list[str]] = (-1, [])

    def write(self, model: GPT, step: int) -> list[str]:
        """Draw the samples of a step, once; the same weights and seed give the same ones."""
        if self.last[0] == step:
            return self.last[1]
        o = self.options
        generator = torch.Generator().manual_seed(self.seed)
        prompts = o.prompts or getattr(self.prepared.corpus, "prompts", None) or [""]
        texts: list[str] = []
        for i in range(o.count):
            prompt = prompts[i % len(prompts)]
            ids, shown_ids, stop = self._encode(prompt)
            new = generate(
                model, ids, o.max_new_tokens,
                temperature=o.temperature, top_k=o.top_k, top_p=o.top_p, generator=generator, stop_id=stop,
            )  # fmt: skip
            texts.append(self._decode([*shown_ids, *new]))
            self.rows.append([step, prompt, texts[-1]])
        self.last = (step, texts)
        if texts:
            heading = f"{_HEADING}{step}\n"
            self.blocks = [block for block in self.blocks if not block.startswith(heading)]
            self.blocks.append(f"{_HEADING}{step}\n\n" + "\n\n".join(texts) + "\n\n")
            directory.write_text(self.path, "".join(self.blocks))
            if self.tracker is not None:
                import wandb

                table = wandb.Table(columns=["step", "prompt", "sample"], data=[list(row) for row in self.rows])
                self.tracker.log({"samples": table, "trainer/global_step": step})
        return texts

    def write_if_due(self, model: GPT, step: int) -> None:
        if self.options.interval and step % self.options.interval == 0:
            self.write(model, step)

    def _encode(self, prompt: str) -> tuple[list[int], list[int], int | None]:
        tokenizer = self.prepared.tokenizer
        if tokenizer is None:  # tokens without a tokenizer: start from the beginning of the validation split
            first = self.prepared.val.window(0, 1).tolist()
            return first, first, None
        ids = tokenizer.encode(prompt)
        start = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
        if not ids and not start:
            ids = self.prepared.val.window(0, 1).tolist()
        return [*start, *ids], ids, tokenizer.eos_id

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self.prepared.tokenizer
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)


_HEADING = "=== step "


def _blocks_up_to(path: Path, step: int) -> list[str]:
    """The blocks of an earlier session's samples.txt, those beyond the resumed step cut."""
    if not path.exists():
        return []
    blocks = [_HEADING + part for part in path.read_text(encoding="utf-8").split(_HEADING)[1:]]
    steps = [block[len(_HEADING) :].split("\n", 1)[0] for block in blocks]
    return [block for block, text in zip(blocks, steps, strict=True) if text.isdecimal() and int(text) <= step]


@torch.no_grad()
def slot_accuracy(model: GPT, slots: Any, tokenizer: Any) -> float | None:
    """The part of the held-out verb forms that the model finds, its most likely token right at every token of the form.

    None where no sentence fits the context.
    """
    from gptframe.evaluate import slot_hits

    was_training = model.training
    model.eval()
    hits = [hit for hit in slot_hits(model, list(slots), tokenizer, batch_size=256) if hit is not None]
    model.train(was_training)
    return sum(hits) / len(hits) if hits else None
