"""Continues texts token by token: how the next token is chosen, what the model sees of the text, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gptframe.errors import UserError
from gptframe.model import GPT, Context, KVCache
from gptframe.model.attention import Attention
from gptframe.model.call import STREAMED_BYTES, lay_side_by_side, streams
from gptframe.model.head import Head
from gptframe.model.mlp import MLP

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits: repetition penalty, temperature, then top-k, top-p and min-p."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Keep the k most likely tokens."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities reach p together (Holtzman et al., 2019)."""
    min_p: float | None = None
    """Keep the tokens with at least p times the probability of the most likely one (Nguyen et al., 2024)."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of all tokens in the text (Keskar et al., CTRL, 2019)."""

    def __post_init__(self) -> None:
        check_sampling(0, self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)


@dataclass
class Continuation:
    """What has been added to one text."""

    ids: list[int] = field(default_factory=list)
    reason: str = "length"
    """Why it ended: `length`, `end` (the end of the text was drawn; its id is not in `ids`) or `stop`."""


def lay_out(model: GPT) -> None:
    """Lay the model's matrices out in memory for generation (see `lay_side_by_side`): those that read the same input
    side by side. Values, shapes and names stay as they are."""
    together = [[m.q, m.k, m.v] for m in model.modules() if isinstance(m, Attention)]
    together += [[m.up, m.gate] for m in model.modules() if isinstance(m, MLP) and m.gate is not None]
    grouped = {layer for layers in together for layer in layers}
    alone = [[m] for m in model.modules() if isinstance(m, nn.Linear) and m not in grouped]
    single = {p.dtype for p in model.parameters()} == {torch.float32} and model.head_weight.device.type == "cpu"
    streamed = single and streams() and sum(p.nbytes for p in model.parameters()) >= STREAMED_BYTES
    for layers in together + alone:
        if all(type(layer) is nn.Linear for layer in layers):
            lay_side_by_side([layer.weight for layer in layers], streamed)
            if all(layer.bias is not None for layer in layers):
                lay_side_by_side([layer.bias for layer in layers])
            if streamed:
                for layer in layers:
                    layer.streamed = True
    if model.head is None:
        lay_side_by_side([model.head_weight], streamed)
    if streamed and isinstance(model.output, Head):
        model.output.streamed = True


def view_start(n: int, context_length: int) -> int:
    """The first of n tokens that the model still sees.

    Up to the context all are seen. Beyond it the oldest ones go, half a context at a time, and the model reads the rest
    again, at positions from 0: so each token has at least half a context before it, nothing depends on what has gone,
    and only every (context_length + 1) // 2 tokens the text is read again. (Keeping the old keys and values while the
    first ones go costs less and breaks models that put their attention there: Xiao et al., StreamingLLM, 2023.)
    """
    step = (context_length + 1) // 2
    return -(-max(0, n - context_length) // step) * step


def generate(
    model: GPT,
    ids: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    generator: torch.Generator | None = None,
    stop_id: int | None = None,
) -> list[int]:
    """Continue `ids`, which must not be empty, and return the new ids only; see `Sampling` and `generate_batch`.

    Args:
        generator: on the CPU; the same one gives the same tokens.
        stop_id: end when this id is drawn (it is not returned).
    """
    return generate_batch(
        model,
        [ids],
        max_new_tokens,
        Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        generators=[generator],
        stop_ids=() if stop_id is None else (stop_id,),
    )[0].ids


@torch.inference_mode()
def generate_batch(
    model: GPT,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    generators: Sequence[torch.Generator | None] | None = None,
    stop_ids: Sequence[int] = (),
    use_cache: bool = True,
    on_token: Callable[[int, int], bool] | None = None,
) -> list[Continuation]:
    """Continue several texts together. Each gets the tokens that it would get alone, up to rounding.

    Shorter texts are padded at the left, and padding is not looked at. A text longer than the context is seen from
    `view_start` on.

    Args:
        prompts: ids of each text; none may be empty.
        sampling: the default draws from the model's own distribution.
        generators: one for each text, on the CPU, so that a text's draws do not depend on the others.
        stop_ids: a text ends when one of them is drawn (it is not returned).
        use_cache: false computes each token from the whole view; the tokens are the same.
        on_token: called with (number of the text, new id); true ends that text, with the reason `stop`.

    Raises:
        UserError: a text is empty, holds an id that the model has no row for, or the logits are not numbers.
    """
    sampling = sampling or Sampling()
    check_sampling(max_new_tokens, sampling.temperature)
    for prompt in prompts:
        check_prompt(prompt, model)
    texts, found = [list(p) for p in prompts], [Continuation() for _ in prompts]
    generators = generators or [None] * len(texts)
    was_training = model.training
    model.eval()
    try:
        reader, rows = Reader(model, use_cache), list(range(len(texts)))
        for _ in range(max_new_tokens):
            if not rows:
                break
            logits = reader([texts[row] for row in rows])
            chosen = choose(logits, [texts[row] for row in rows], sampling, [generators[row] for row in rows])
            going = []
            for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
                if token in stop_ids:
                    found[row].reason = "end"
                    continue
                texts[row].append(token)
                found[row].ids.append(token)
                if on_token is not None and on_token(row, token):
                    found[row].reason = "stop"
                else:
                    going.append(place)
            if len(going) < len(rows):
                rows = [rows[place] for place in going]
                reader.keep(going)
    finally:
        model.train(was_training)
    return found


class Reader:
    """Logits of the next token of texts that grow by one token between calls, from a cache where that can be."""

    def __init__(self, model: GPT, use_cache: bool = True) -> None:
        self.model, self.use_cache, self.incremental = model, use_cache, model.incremental
        self.device = model.token_embedding.weight.device
        self._cache: KVCache | None = None
        self._starts: list[int] = []
        self._padded = False

    def __call__(self, texts: Sequence[list[int]]) -> Tensor:
        """[R, V] for R texts."""
        context = self.model.cfg.context_length
        starts = [view_start(len(text), context) for text in texts]
        if not self.incremental:  # a sublayer of a plugin's: each text alone, whole
            return torch.cat([self._read([text[s:]], None) for text, s in zip(texts, starts, strict=True)])
        # A text that has left may have been longer than all others, so that the cache is full of their padding: then
        # they are read anew.
        if self._cache is not None and starts == self._starts and len(self._cache) < context:
            ctx = Context(cache=self._cache)
            if self._padded:
                here = [[len(text) - 1 - start] for text, start in zip(texts, starts, strict=True)]
                ctx.positions = torch.tensor(here, device=self.device)
            return self._last([text[-1:] for text in texts], ctx)
        views = [text[start:] for text, start in zip(texts, starts, strict=True)]
        self._starts, self._cache = starts, KVCache() if self.use_cache else None
        return self._read(views, self._cache)

    def keep(self, places: list[int]) -> None:
        """Go on with some of the texts."""
        self._starts = [self._starts[place] for place in places] if self._starts else []
        if self._cache is not None and places:
            self._cache.keep(torch.tensor(places, device=self.device))

    def _read(self, views: list[list[int]], cache: KVCache | None) -> Tensor:
        width = max(map(len, views))
        pads = [width - len(view) for view in views]
        self._padded = any(pads)
        ctx = Context(cache=cache)
        if self._padded:
            ctx.positions = torch.arange(width, device=self.device) - torch.tensor(pads, device=self.device)[:, None]
        return self._last([[0] * pad + view for pad, view in zip(pads, views, strict=True)], ctx)

    def _last(self, ids: list[list[int]], ctx: Context) -> Tensor:
        return self.model.read_out(self.model.stream(torch.tensor(ids, device=self.device), ctx)[:, -1])


def choose(
    logits: Tensor,
    texts: Sequence[list[int]],
    sampling: Sampling,
    generators: Sequence[torch.Generator | None],
) -> list[int]:
    """The next id of each text from logits [R,V].

    Raises:
        UserError: the logits are not numbers.
    """
    if sampling.repetition_penalty != 1.0:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # float16 would overflow
        for row, text in enumerate(texts):
            seen = torch.tensor(sorted(set(text)), device=logits.device)
            at = logits[row, seen]
            logits[row, seen] = torch.where(at > 0, at / sampling.repetition_penalty, at * sampling.repetition_penalty)
    best, token = logits.max(dim=-1)
    if not all(map(math.isfinite, best.tolist())):
        raise UserError("the model's logits are not numbers: its weights hold NaN or infinite values")
    if sampling.temperature == 0:
        return token.tolist()
    p = probabilities(logits.float().cpu(), sampling)
    return [int(torch.multinomial(row, 1, generator=g)) for row, g in zip(p, generators, strict=True)]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What is drawn from, [R,V]; the rows need not sum to 1."""
    # Relative to the best first: a small temperature must not make infinities of large logits, nor be rounded to 0.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(sampling.temperature, TINY)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        bound = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < bound, float("-inf"))
    p = torch.softmax(logits, dim=-1)
    if sampling.top_p is not None:
        ordered, order = p.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= max(sampling.top_p, TINY)  # the token that reaches p stays
        p = p.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
    if sampling.min_p is not None:
        p = p.masked_fill(p < sampling.min_p * p.amax(dim=-1, keepdim=True), 0.0)
    return p


def check_sampling(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> None:
    """Refuse sampling options out of range.

    Raises:
        UserError: which one, and its range.
    """
    if max_new_tokens < 0:
        raise UserError(f"--max-new-tokens {max_new_tokens} must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"--temperature {temperature} must be at least 0 and finite (0 is greedy)")
    if top_k is not None and top_k < 1:
        raise UserError(f"--top-k {top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top-p {top_p} must be in (0, 1]")
    if min_p is not None and not 0 <= min_p <= 1:
        raise UserError(f"--min-p {min_p} must be from 0 to 1")
    if not 1e-3 <= repetition_penalty <= 1e3:
        raise UserError(f"--repetition-penalty {repetition_penalty} must be from 0.001 to 1000 (1 is none)")


def check_prompt(ids: list[int], model: GPT) -> None:
    """UserError where a prompt is empty or holds an id that the model has no row for."""
    size = model.token_embedding.num_embeddings
    if not ids:
        raise UserError("the prompt is empty, and there is no token that begins a document: give a prompt")
    for place, token in enumerate(ids):
        if not 0 <= token < size:
            raise UserError(f"token {place} of the prompt has id {token}, and the vocabulary has ids 0 to {size - 1}")


class TextStream:
    """Turns new ids of one text into text as they come, and finds stop strings in it.

    What may still change is held back: half a character, and what could be the beginning of a stop string.
    """

    KEPT = 32
    """So many ids before the new ones are decoded with them; all of a long text, for every token, would take long."""

    def __init__(self, tokenizer: Any, prompt: list[int], stop: Sequence[str] = ()) -> None:
        if any(not text for text in stop):
            raise UserError("--stop is empty: give the text at which to stop")
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self._before_ids, self._new = list(prompt), list[int]()
        self._before, self._settled = tokenizer.decode(prompt), ""
        self.text = ""
        """All that has been generated, cut before a stop string."""
        self.stopped = False
        self._shown = 0

    def add(self, token: int) -> str:
        """Take in a new id; return the text that can be shown now."""
        self._new.append(token)
        ids = [*self._before_ids, *self._new]
        whole = self.tokenizer.decode(ids)
        # With what is before it, since some tokenizers drop the space that begins a text.
        fits = whole.startswith(self._before)
        self.text = self._settled + (whole[len(self._before) :] if fits else self.tokenizer.decode(self._new))
        if fits and len(ids) > 2 * self.KEPT and not whole.endswith("\ufffd"):
            before = self.tokenizer.decode(ids[-self.KEPT :])
            if before and whole.endswith(before):
                self._before_ids, self._new, self._before, self._settled = ids[-self.KEPT :], [], before, self.text
        places = [place for place in (self.text.find(text) for text in self.stop) if place >= 0]
        if places:
            self.stopped = True
            self.text = self.text[: min(places)]
            return self._up_to(len(self.text))
        safe = len(self.text.rstrip("\ufffd"))
        for text in self.stop:
            for length in range(min(len(text) - 1, safe), 0, -1):
                if self.text[:safe].endswith(text[:length]):
                    safe -= length
                    break
        return self._up_to(safe)

    def finish(self) -> str:
        """What was held back."""
        return self._up_to(len(self.text))

    def _up_to(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self.text[start:end]
