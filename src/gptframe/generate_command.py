"""The `gptframe generate` command: samples, streamed or as JSON, and a dialogue with the model."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from gptframe.arguments import Parser, typed
from gptframe.errors import UserError

if TYPE_CHECKING:
    from gptframe.loading import LoadedModel

EXAMPLES = """examples:
  gptframe generate RUN --prompt "I work ,"
  gptframe generate RUN --prompt "Once" --temperature 0.7 --top-p 0.9 --samples 4 --seed 1
  gptframe generate RUN --prompt "Q: " --stop "\\nQ:" --json
  gptframe generate RUN --interactive

A text longer than the model's context is seen from its last part on: when the context is full, the oldest half goes.
"""


def command_line(argv: list[str]) -> int:
    """`gptframe generate RUN --prompt TEXT`."""
    parser = Parser(
        "gptframe generate",
        description="Continue texts with the model of a run directory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", help="a run directory, trained here or imported")
    what = parser.add_argument_group("the text")
    what.add_argument("--prompt", action="append", help="text to continue; may be repeated (default: a new document)")
    what.add_argument("--ids", action="append", help="token ids to continue instead, as in --ids 5,6,7")
    what.add_argument("--interactive", action="store_true", help="a dialogue: what you type is continued, line by line")
    how = parser.add_argument_group("how tokens are drawn")
    how.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    how.add_argument("--top-k", type=int, help="of the k most likely tokens")
    how.add_argument("--top-p", type=float, help="of the fewest tokens with this probability together")
    how.add_argument("--min-p", type=float, help="of those with this part of the most likely one's probability")
    how.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1: less of what was there (default 1)"
    )
    how.add_argument("--seed", type=int, help="sample i is drawn from seed + i (default 0)")
    end = parser.add_argument_group("how much")
    end.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    end.add_argument("--stop", action="append", default=[], help="end before this text; may be repeated")
    end.add_argument("--samples", type=int, default=1, help="of each prompt, computed together (default 1)")
    rest = parser.add_argument_group("and")
    rest.add_argument("--json", action="store_true", help="print JSON only")
    rest.add_argument("--no-cache", action="store_true", help="compute every token from the whole text; slow, the same")
    rest.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    rest.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), help="(default: the checkpoint's)")
    arguments = parser.parse_args(argv)
    if arguments.interactive and (arguments.json or arguments.ids or arguments.samples != 1):
        raise UserError(
            "--interactive goes with --prompt and with how tokens are drawn, not with --json, --ids, --samples"
        )
    if arguments.interactive and len(arguments.prompt or []) > 1:
        raise UserError("--interactive begins with one --prompt")
    if arguments.temperature == 0:  # nothing is drawn
        idle = typed(arguments, ("top_k", "top_p", "min_p", "seed"))
        if arguments.samples > 1:
            idle.append("--samples")
        if idle:
            raise UserError(f"--temperature 0 always takes the likeliest token, so that {idle[0]} has no effect")
    arguments.seed = arguments.seed or 0
    if arguments.prompt and arguments.ids:
        raise UserError("give either --prompt or --ids")
    if any(not text for text in arguments.stop):
        raise UserError("--stop is empty: give the text at which to stop")
    if arguments.samples < 1:
        raise UserError(f"--samples {arguments.samples} must be at least 1")

    from gptframe.generate import check_sampling
    from gptframe.inspect.source import tokens_of_ids
    from gptframe.loading import load

    sampling = {
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "repetition_penalty": arguments.repetition_penalty,
    }
    check_sampling(arguments.max_new_tokens, **sampling)
    prompts: list[Any] = [tokens_of_ids(ids) for ids in arguments.ids] if arguments.ids else arguments.prompt or [""]
    model = load(arguments.run, arguments.device, arguments.dtype)
    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        "stop": arguments.stop,
        "use_cache": not arguments.no_cache,
        **sampling,
    }
    if arguments.interactive:
        return _dialogue(model, prompts[0], options)
    if model.tokenizer is None and not arguments.ids:
        raise UserError("this run has no tokenizer (tokenizer=none): give --ids, as in --ids 5,6,7")
    for prompt in prompts:
        _say_what_is_seen(model, model.encode(prompt))
    if arguments.json:
        _print_json(model, arguments, prompts, options)
    elif len(prompts) == 1 and arguments.samples == 1:
        _print_stream(model, prompts[0], options)
    else:
        _print_samples(model, prompts, arguments.samples, options)
    return 0


def _say_what_is_seen(model: LoadedModel, ids: list[int]) -> None:
    seen = model.seen(ids)
    if seen < len(ids):
        context = model.model.cfg.context_length
        print(
            f"note: the prompt has {len(ids)} tokens and the context is {context}: the model sees the last {seen}",
            file=sys.stderr,
        )


def _print_stream(model: LoadedModel, prompt: Any, options: dict[str, Any]) -> None:
    start = model.shown(prompt)
    write, space = sys.stdout.write, " " if model.tokenizer is None else ""
    write(start)
    for piece in model.stream(prompt, **options):
        write(space + piece if space and not piece.startswith(" ") else piece)
        sys.stdout.flush()
    write("\n")
    sys.stdout.flush()


def _print_samples(model: LoadedModel, prompts: list[Any], samples: int, options: dict[str, Any]) -> None:
    found = model.continuations(prompts, samples=samples, **options)
    for number, (prompt, texts) in enumerate(zip(prompts, found, strict=True), 1):
        for i, (text, _) in enumerate(texts, 1):
            which = f"prompt {number}, " if len(prompts) > 1 else ""
            print(f"--- {which}sample {i}" if samples > 1 else f"--- prompt {number}")
            print(model.shown(prompt) + text)


def _print_json(model: LoadedModel, arguments: argparse.Namespace, prompts: list[Any], options: dict[str, Any]) -> None:
    import json

    began = time.perf_counter()
    found = model.continuations(prompts, samples=arguments.samples, **options)
    seconds = time.perf_counter() - began
    tokens = sum(len(new.ids) for texts in found for _, new in texts)
    values = {
        "run": arguments.run,
        "seed": arguments.seed,
        "max_new_tokens": arguments.max_new_tokens,
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "prompts": [
            {
                "prompt": prompt if isinstance(prompt, str) else None,
                "prompt_ids": model.encode(prompt),
                "samples": [{"text": text, "ids": new.ids, "ended": new.reason} for text, new in texts],
            }
            for prompt, texts in zip(prompts, found, strict=True)
        ],
    }
    sys.stdout.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


HELP = """  what you type is added to the text, and the model goes on from there
  /reset   begin a new text
  /text    show the text so far
  /quit    leave, as Ctrl-D does; Ctrl-C ends an answer early
"""


def _dialogue(model: LoadedModel, prompt: str, options: dict[str, Any]) -> int:
    """Read lines and continue them until the input ends. The text so far stays before each new line."""
    if model.tokenizer is None:
        raise UserError("--interactive needs a tokenizer, and this run has none (tokenizer=none)")
    terminal = sys.stdin.isatty()
    if terminal:
        try:
            import readline  # noqa: F401  (line editing and history)
        except ImportError:
            pass
        print(f"{model.model.cfg.name}, context {model.model.cfg.context_length}. /help says more, /quit leaves.")
    if prompt:
        model.encode(prompt)  # refused before the first line is read
    text, seed = prompt, options["seed"]
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            if terminal:
                print()
            return 0
        if line.startswith("/"):
            command = line.split()[0]
            if command in ("/quit", "/exit"):
                return 0
            if command == "/reset":
                text = prompt
            elif command == "/text":
                print(text)
            else:
                print(HELP if command == "/help" else f"  there is no {command}; /help lists the commands")
            continue
        whole = " ".join(filter(None, [text, line])) if model.tokenizer.name == "closed" else text + line
        try:
            answer = ""
            for piece in model.stream(whole, **{**options, "seed": seed}):
                answer += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
            print()
            text, seed = whole + answer, seed + 1
        except KeyboardInterrupt:
            print("  [stopped]")
            text = whole + answer
        except UserError as error:  # a word that the vocabulary lacks ends the line, not the dialogue
            print(f"error: {error}", file=sys.stderr)
