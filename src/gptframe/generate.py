"""Samples text from a model: the function, and the `gptframe generate` command."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from gptframe.errors import UserError
from gptframe.model import GPT, Context, KVCache


@torch.inference_mode()
def generate(
    model: GPT,
    ids: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    stop_id: int | None = None,
) -> list[int]:
    """Continue `ids`, which must not be empty, and return the new ids only.

    Once the context is full, each further token sees the last `context_length` tokens, at positions from 0.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens.
        top_p: keep the fewest tokens whose probabilities reach p together (Holtzman et al., 2019).
        generator: on the CPU; the same one gives the same tokens.
        stop_id: end when this id is drawn (it is not returned).
    """
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    device = model.token_embedding.weight.device
    was_training = model.training
    model.eval()
    tokens, new = list(ids), []
    cache: KVCache | None = None
    for _ in range(max_new_tokens):
        window = tokens[-model.cfg.context_length :]
        if cache is not None and len(cache) + 1 <= model.cfg.context_length:
            step = window[-1:]
        else:
            step, cache = window, KVCache()
        logits = model(torch.tensor([step], device=device), Context(cache=cache))[0, -1]
        token = sample(logits.float().cpu(), temperature, top_k, top_p, generator)
        if token == stop_id:
            break
        tokens.append(token)
        new.append(token)
    model.train(was_training)
    return new


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> int:
    """Draw one id from logits [V]."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits, dim=-1)
    if top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= top_p  # the token that reaches p stays
        probabilities[order[beyond]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse sampling options out of range.

    Raises:
        UserError: which one, and its range.
    """
    if max_new_tokens < 0:
        raise UserError(f"--max-new-tokens {max_new_tokens} must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"--temperature {temperature} must be at least 0 (0 is greedy)")
    if top_k is not None and top_k < 1:
        raise UserError(f"--top-k {top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top-p {top_p} must be in (0, 1]")


def command_line(argv: list[str]) -> int:
    """`gptframe generate RUN --prompt TEXT`."""
    parser = argparse.ArgumentParser("gptframe generate", description="Sample text from a run directory.")
    parser.add_argument("run", type=Path, help="a run directory, as printed at the end of training")
    parser.add_argument("--prompt", default="", help="text to continue (default: start of a document)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, default=None)
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    check_sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p)

    from gptframe.training.checkpoint import load_run

    model, tokenizer = load_run(args.run)
    ids = tokenizer.encode(args.prompt)
    start = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
    if not ids and not start:
        raise UserError("--prompt is empty and the tokenizer has no start token: give a prompt")
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.samples):
        new = generate(
            model,
            [*start, *ids],
            args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            generator=generator,
            stop_id=tokenizer.eos_id,
        )
        print(tokenizer.decode([*ids, *new]))
    return 0
