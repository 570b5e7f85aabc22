"""Checks of the other kinds: schedules, optimisers, initialisations, tokenizers and corpora."""

from __future__ import annotations

import io
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from gptframe import registry
from gptframe.model.gpt import GPT, build_model
from gptframe.testing.kit import Failure, Skip, check
from gptframe.testing.subject import Subject
from gptframe.training.optimizer import param_groups

ROLES = ("embedding", "head", "matrix", "value", "hidden", "residual")
TOTALS = (1, 2, 10, 1000)


def _call(s: Subject, *arguments: Any, **more: Any) -> Any:
    """What the function or class gives, unjudged: `registry.build` refuses a broken result before it can be told."""
    key = {"corpus": "data", "init": "model.init"}.get(s.kind, s.kind)
    value, options = registry.check(s.kind, {**s.section, **more}, len(arguments), key)
    return value(*arguments, **options)


def _number(value: object, least: float, what: str, smallest: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        cause = "a return is missing" if value is None else "return a Python number"
        raise Failure(f"{what} is {type(value).__name__}, not a number", smallest=smallest, cause=cause)
    if not least <= value < math.inf:
        raise Failure(f"{what} is {value}; it must be finite and at least {least:g}", smallest=smallest)
    return float(value)


@check("schedule", name="contract")
def schedule_contract(s: Subject) -> str:
    """gives a number from 0 up for every step of every length, and not always 0"""
    for total in TOTALS:
        values = []
        for step in range(total + 1):
            value = _call(s, step, total)
            values.append(_number(value, 0.0, "the multiplier", f"step={step}, total_steps={total}"))
        if not any(values):
            raise Failure("the multiplier is 0 at every step", smallest=f"total_steps={total}")
    return f"runs of {', '.join(map(str, TOTALS))} steps"


@check("schedule")
def pure(s: Subject) -> str:
    """depends on the step and the length alone, so that a resumed run goes on where it stopped"""
    steps = list(range(11))
    forth = [_call(s, n, 10) for n in steps]
    back = [_call(s, n, 10) for n in reversed(steps)][::-1]
    for n, a, b in zip(steps, forth, back, strict=True):
        if a != b:
            raise Failure(
                f"step {n} of 10 gave {a} and, asked again, {b}",
                smallest="the steps 0 to 10, then 10 to 0",
                cause="a counter or a random number: compute it from step and total_steps",
            )
    return ""


@check("init", name="contract")
def init_contract(s: Subject) -> str:
    """gives a standard deviation greater than 0 for every role"""
    for role, size in itertools.product(ROLES, ((8, 8), (64, 16))):
        value = _call(s, role, size, s.cfg)
        if _number(value, 0.0, "the standard deviation", f"role={role!r}, shape={size}") == 0:
            raise Failure("the standard deviation is 0", smallest=f"role={role!r}, shape={size}")
    return f"{len(ROLES)} roles"


class _Training:
    """A small model, its optimiser and one batch."""

    def __init__(self, s: Subject):
        rate = {} if "lr" in s.options or "lr" not in registry.signature_options(s.value, 1) else {"lr": 1e-2}
        self.model: GPT = build_model(s.plain)
        self.optimizer: Any = _call(s, param_groups(self.model), **rate)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, s.plain.vocab_size or 1, (4, s.context), generator=generator)

    def step(self) -> float:
        loss = self.model(self.ids, targets=self.ids) / self.ids.numel()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def copies(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def moved(self, before: dict[str, torch.Tensor]) -> set[str]:
        return {name for name, p in self.model.named_parameters() if not torch.equal(p, before[name])}


@check("optimizer", name="contract")
def optimizer_contract(s: Subject) -> str:
    """is a torch Optimizer of every parameter, which it moves and which then fit better"""
    training = _Training(s)
    if not isinstance(training.optimizer, torch.optim.Optimizer):
        raise Failure(f"{type(training.optimizer).__name__} is no torch.optim.Optimizer", cause="return the optimiser")
    held = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    before = training.copies()
    losses = [training.step() for _ in range(8)]
    moved = training.moved(before)
    for name, p in training.model.named_parameters():
        if id(p) not in held:
            raise Failure(f"{name} is in none of its groups", cause="hand over every group that was given")
        if name not in moved:
            raise Failure(f"{name} does not move in 8 steps", cause="a group or a kind of parameter is passed over")
    if not losses[-1] < losses[0]:
        raise Failure(f"8 steps on one batch take the loss from {losses[0]:.4f} to {losses[-1]:.4f}", cause="the sign")
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f} in 8 steps"


@check("optimizer")
def learning_rate(s: Subject) -> str:
    """obeys the lr of its groups, which the schedule sets at each step"""
    training = _Training(s)
    training.step()
    before = training.copies()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    training.step()
    moved = training.moved(before)
    if moved:
        raise Failure(
            f"with lr 0 in every group {sorted(moved)[0]} moves",
            cause="the rate is read once in the constructor: read group['lr'] in step()",
        )
    return ""


@check("optimizer")
def decay(s: Subject) -> str:
    """decays matrices at most: embeddings, norms and biases stay where the gradient is 0"""
    training = _Training(s)
    for p in training.model.parameters():
        p.grad = torch.zeros_like(p)
    before = training.copies()
    training.optimizer.step()
    moved = training.moved(before)
    for group in param_groups(training.model):
        for name in group["param_names"]:
            if name in moved and group["role"] == "plain":
                raise Failure(
                    f"{name} moves where its gradient is 0",
                    cause="weight_decay must be 0 for groups of role 'plain'; other roles may have it",
                )
    return f"{len(moved)} tensors are decayed"


@check("optimizer")
def resumes(s: Subject) -> str:
    """its state is saved, loads with weights_only, and goes on exactly"""
    whole, first = _Training(s), _Training(s)
    for _ in range(4):
        whole.step()
    first.step()
    first.step()
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second = _Training(s)
    second.model.load_state_dict(state["model"])
    second.optimizer.load_state_dict(state["optimizer"])
    second.step()
    second.step()
    moved = second.moved(whole.copies())
    if moved:
        raise Failure(
            f"saved after 2 steps and resumed, {sorted(moved)[0]} is another after 4",
            cause="what it remembers must be in self.state and param_groups",
        )
    return ""


def _tokenizer(s: Subject, folder: str) -> tuple[Any, Any]:
    from gptframe.data.tokenizer import Source

    corpus = registry.build("corpus", {"name": "verbs"}, key="data")
    # 512 for those that are trained to a size; others may be as large as they are
    tokenizer = registry.build("tokenizer", s.section, Source(corpus, 512, Path(folder), []), key="tokenizer")
    tokenizer.name = s.name
    return tokenizer, corpus


@check("tokenizer", name="contract")
def tokenizer_contract(s: Subject) -> str:
    """turns text into ids below vocab_size, and those into the same text"""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, corpus = _tokenizer(s, folder)
        size = getattr(tokenizer, "vocab_size", None)
        if s.name == "none":
            raise Skip("stands for no tokenizer")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise Failure(f"vocab_size is {size!r}; it must be a whole number of at least 1")
        for text in itertools.islice(corpus.documents("train"), 20):
            ids = tokenizer.encode(text)
            shown = f"encode({text[:40]!r})"
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise Failure("encode must return a list of ints", smallest=shown)
            if ids and not 0 <= min(ids) <= max(ids) < size:
                raise Failure(f"ids from {min(ids)} to {max(ids)} with vocab_size={size}", smallest=shown)
            if tokenizer.encode(text) != ids:
                raise Failure("the same text gives other ids", smallest=shown)
            back = tokenizer.decode(ids)
            if back != text:
                raise Failure(f"decode(encode(text)) is {back[:40]!r}", smallest=repr(text[:40]))
    return f"vocab_size {size}"


@check("tokenizer")
def reloads(s: Subject) -> str:
    """is saved and loaded as the same tokenizer"""
    from gptframe.data.tokenizer import load

    with tempfile.TemporaryDirectory() as folder:
        tokenizer, corpus = _tokenizer(s, folder)
        if s.name == "none":
            raise Skip("stands for no tokenizer")
        target = Path(folder) / "saved"
        tokenizer.save(target)
        again = load(target)
        text = next(iter(corpus.documents("train")))
        if again.encode(text) != tokenizer.encode(text) or again.vocab_size != tokenizer.vocab_size:
            raise Failure("loaded again, it gives other ids", smallest=repr(text[:40]), cause="_state lacks something")
        if again.fingerprint() != tokenizer.fingerprint():
            raise Failure("loaded again, it has another fingerprint", cause="a set or a path in _state")
    return ""


@check("corpus", name="contract")
def corpus_contract(s: Subject) -> str:
    """gives the documents of train and val as text, the same each time, and a fingerprint"""
    corpus = _call(s)
    for method in ("documents", "fingerprint"):
        if not callable(getattr(corpus, method, None)):
            raise Failure(f"it has no method {method}", cause="see Corpus in gptframe/data/documents.py")
    mark = corpus.fingerprint()
    if not isinstance(mark, str) or not mark or corpus.fingerprint() != mark:
        raise Failure(f"fingerprint gives {mark!r}; it must be text, the same each time")
    if hasattr(corpus, "stores"):
        raise Skip("holds tokens, not text")
    first: dict[str, list[str]] = {}
    for split in ("train", "val"):
        found = [list(itertools.islice(corpus.documents(split), 50)) for _ in range(2)]
        if not found[0]:
            raise Failure(f"documents({split!r}) gives none")
        if not all(isinstance(text, str) for text in found[0]):
            raise Failure("a document is no text", smallest=f"documents({split!r})")
        if found[0] != found[1]:
            raise Failure("the documents differ from call to call", smallest=f"documents({split!r})")
        first[split] = found[0]
    if first["train"] == first["val"]:
        raise Failure("train and val begin with the same documents", cause="the split is not looked at")
    return ""
