"""Shell completion: commands, groups and options, keys, run directories."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from gptframe.errors import UserError

# Bash cuts words at = and :, and expects the piece after the cut; zsh and fish expect the whole word.
SCRIPTS = {
    "bash": """_gptframe() {
  local IFS=$'\\n'
  COMPREPLY=($(gptframe complete pieces "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} != *= ]] || compopt -o nospace 2>/dev/null
}
complete -o default -F _gptframe gptframe
""",
    "zsh": """_gptframe() {
  local -a found
  found=("${(@f)$(gptframe complete words "${LBUFFER}" 2>/dev/null)}")
  (( ${#found} )) && compadd -S '' -a found || _files
}
compdef _gptframe gptframe
""",
    "fish": """complete -c gptframe -a '(gptframe complete words (commandline -cp) 2>/dev/null)'
""",
}
INSTALL = {
    "bash": 'eval "$(gptframe completion bash)"     in ~/.bashrc',
    "zsh": 'eval "$(gptframe completion zsh)"      in ~/.zshrc, after compinit',
    "fish": "gptframe completion fish | source     in ~/.config/fish/config.fish",
}

TAKES_OVERRIDES = ("train", "params", "trace", "cost", "probe", "doctor")
TAKES_A_RUN = ("generate", "evaluate", "export", "params", "trace", "cost", "doctor")
RUN_KEYS = ("resume", "init_from")


def script(arguments: list[str]) -> str:
    """What a shell evaluates to complete `gptframe` commands.

    Raises:
        UserError: a shell that is not known.
    """
    if len(arguments) != 1 or arguments[0] not in SCRIPTS:
        lines = "\n".join(f"  {line}" for line in INSTALL.values())
        if arguments in (["-h"], ["--help"]):
            return f"usage: gptframe completion bash|zsh|fish\n\n{lines}\n"
        raise UserError(f"gptframe completion needs one of {', '.join(SCRIPTS)}, as in\n{lines}")
    return SCRIPTS[arguments[0]]


def answer(style: str, line: str, commands: Iterable[str]) -> list[str]:
    """The words that may stand where `line` ends.

    Args:
        style: "words", or "pieces" for what follows the last = of a word.
        line: the command line up to the cursor.
    """
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        return []
    current = "" if not words or line[-1:].isspace() else words.pop()
    found = sorted(word for word in set(_candidates(words[1:], current, commands)) if word.startswith(current))
    cut = current.rfind("=") + 1 if style == "pieces" else 0
    return [word[cut:] for word in found]


def _candidates(words: list[str], current: str, commands: Iterable[str]) -> Iterator[str]:
    if not words:
        yield from commands
        return
    if words[0] == "completion":
        yield from SCRIPTS
    if words[0] in TAKES_A_RUN and len(words) == 1:
        yield from _run_directories(current)
    if words[0] not in TAKES_OVERRIDES:
        return
    from gptframe import compose

    groups = compose.all_groups()
    key, equals, _ = current.partition("=")
    if not equals:
        yield from (f"{group}=" for group in groups)
        yield from (f"{leaf}=" for leaf in compose.default_keys())
        return
    section = key.removesuffix(".name").rpartition(".")[2] if key.endswith(".name") else key
    yield from (f"{key}={option}" for option in groups.get(section, ()))
    if key in RUN_KEYS:
        yield from (f"{key}={folder}" for folder in _run_directories(current.partition("=")[2]))


def _run_directories(prefix: str) -> Iterator[str]:
    """Run directories whose path begins with `prefix`, and the folders on the way to others."""
    folder = Path(os.path.dirname(prefix) or ".")
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            shown = os.path.join(os.path.dirname(prefix), path.name)
            yield shown if (path / "config.yaml").is_file() else shown + "/"
