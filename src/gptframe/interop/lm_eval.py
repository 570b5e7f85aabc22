"""A model of ours for EleutherAI's lm-evaluation-harness (pip install lm-eval), and its tasks from a command."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gptframe.errors import UserError, nearest
from gptframe.generate import Sampling, TextStream, generate_batch
from gptframe.loading import LoadedModel

try:
    from lm_eval.api.model import LM
except ImportError:
    raise UserError("--tasks needs lm-eval: pip install lm-eval") from None


class GPTFrameLM(LM):
    """The three kinds of request of the harness.

    A text that is longer than the context is cut at the left, as the harness asks.
    """

    def __init__(self, model: LoadedModel, batch_size: int = 8) -> None:
        super().__init__()
        if model.tokenizer is None:
            raise UserError("tasks are texts, and this run has no tokenizer (tokenizer=none)")
        self.loaded, self.batch = model, batch_size
        tokenizer = model.tokenizer
        self.start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if self.start is None:
            raise UserError("tasks need a token that begins a text, and this tokenizer has none")

    @property
    def tokenizer_name(self) -> str:
        return f"gptframe-{self.loaded.tokenizer.fingerprint()}"

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(ln p(continuation | context), whether it is the greedy one) of each request."""
        rows = []
        for request in requests:
            context, continuation = request.args
            # Spaces at the end of a context belong to the continuation, as in the harness's own models.
            spaces = len(context) - len(context.rstrip())
            if spaces:
                context, continuation = context[:-spaces], context[-spaces:] + continuation
            encode = self.loaded.tokenizer.encode
            before, whole = encode(context) if context else [], encode(context + continuation)
            after = whole[len(before) :] or encode(continuation)
            rows.append(([self.start, *before], after))
        return [(sum(logps), greedy) for logps, greedy in self._score(rows)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """ln p of whole texts, in windows of the context."""
        from gptframe.evaluate import score

        encode = self.loaded.tokenizer.encode
        documents = [([self.start, *encode(request.args[0])], None) for request in requests]
        return [-document.nats for document in score(self.loaded.model, documents, None, self.batch)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop string."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, prompt: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        temperature = _temperature(options.get("do_sample"), options.get("temperature"))
        ids = [self.start, *self.loaded.tokenizer.encode(prompt)]
        stream = TextStream(self.loaded.tokenizer, ids, [stop for stop in stops if stop])

        def on_token(row: int, token: int) -> bool:
            stream.add(token)
            return stream.stopped

        end = self.loaded.tokenizer.eos_id
        generate_batch(
            self.loaded.model,
            [ids],
            int(options.get("max_gen_toks", 256)),
            Sampling(temperature, top_k=options.get("top_k"), top_p=options.get("top_p")),
            generators=[torch.Generator().manual_seed(0)],
            stop_ids=() if end is None else (end,),
            on_token=on_token,
        )
        return stream.text

    @torch.inference_mode()
    def _score(self, rows: list[tuple[list[int], list[int]]]) -> list[tuple[list[float], bool]]:
        model = self.loaded.model
        device, found = model.token_embedding.weight.device, []
        for at in range(0, len(rows), self.batch):
            part = []
            for before, after in rows[at : at + self.batch]:
                whole = [*before, *after][-(model.cfg.context_length + 1) :]
                part.append((whole, min(len(after), len(whole) - 1)))
            width = max(len(whole) for whole, _ in part) - 1
            ids = torch.tensor([whole[:-1] + [0] * (width - len(whole) + 1) for whole, _ in part], device=device)
            logits = model(ids).float()
            for row, (whole, n) in enumerate(part):
                last = len(whole) - 1
                picked = F.log_softmax(logits[row, last - n : last], dim=-1).cpu()
                targets = torch.tensor(whole[-n:]) if n else torch.empty(0, dtype=torch.long)
                greedy = bool((picked.argmax(-1) == targets).all())
                found.append((picked.gather(1, targets[:, None]).flatten().double().tolist(), greedy))
        return found


def run_tasks(
    model: LoadedModel, names: list[str], folder: str | None, batch_size: int, limit: int | None
) -> dict[str, dict[str, Any]]:
    """The metrics of each task.

    Args:
        folder: with task files of one's own.

    Raises:
        UserError: lm-eval is not installed, or has no task of a name.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lm_eval
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).expanduser().is_dir():
        raise UserError(f"--tasks-from {folder}: there is no such folder")
    with _quiet():
        own = str(Path(folder).expanduser().absolute()) if folder else None
        manager = TaskManager(include_path=own)
        for name in names:
            if name not in manager.all_tasks:
                raise UserError(
                    f"--tasks {name}: lm-eval has no such task. {nearest(name, manager.all_tasks)}".rstrip()
                )
        found = lm_eval.simple_evaluate(
            model=GPTFrameLM(model, batch_size), tasks=names, task_manager=manager, limit=limit, verbosity="ERROR",
            bootstrap_iters=1000,
        )  # fmt: skip
    results: dict[str, dict[str, Any]] = {}
    for task, values in found["results"].items():
        n = found["n-samples"].get(task, {}).get("effective")
        metrics = {k.removesuffix(",none"): v for k, v in values.items() if k not in ("alias", "name", "sample_len")}
        results[task] = {"examples": n, **metrics}
    return results


@contextlib.contextmanager
def _quiet():
    """The harness logs and draws bars; what it finds is printed once, by us."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    errors = os.dup(2)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stderr(nothing):
            os.dup2(nothing.fileno(), 2)  # it asks git for a revision, which complains by itself
            yield
    finally:
        os.dup2(errors, 2)
        os.close(errors)
        logging.disable(before)


def _temperature(do_sample: bool | None, temperature: float | None) -> float:
    """0 for greedy: by `do_sample: false`, whatever the temperature, or by no temperature where it says nothing."""
    if do_sample is False or (do_sample is None and not temperature):
        return 0.0
    return 1.0 if temperature is None else float(temperature)
