"""`gptframe plugins list|show|new|check`: what is registered, a new one, and whether one keeps its promises."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import keyword
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptframe.arguments import Parser
from gptframe.errors import UserError, nearest
from gptframe.plugins_catalogue import Listing, catalogue
from gptframe.registry import KINDS

if TYPE_CHECKING:
    from gptframe.testing.kit import Report

ACTIONS = {
    "list": "what is registered: built in, by installed packages, by plugins=[...]",
    "show": "contract, signature, docstring and source of one name",
    "new": "write a small working plugin, its test and its config option",
    "check": "try every promise of a part's contract",
}


def command_line(argv: list[str]) -> int:
    """`gptframe plugins ACTION ...`; returns the exit code, 1 where a check failed."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: gptframe plugins ACTION ...\n")
        print("\n".join(f"  {name:<6} {summary}" for name, summary in ACTIONS.items()))
        print("\ngptframe plugins ACTION --help says more. docs/plugins.md is the manual.")
        return 0
    actions = {"list": _list, "show": _show, "new": _new, "check": _check}
    if argv[0] not in actions:
        known = ", ".join(actions)
        raise UserError(f"plugins has no action {argv[0]!r}. {nearest(argv[0], actions)}Actions: {known}")
    return actions[argv[0]](argv[1:])


def _parser(action: str) -> argparse.ArgumentParser:
    return Parser(f"gptframe plugins {action}", description=f"{ACTIONS[action].capitalize()}.", allow_abbrev=False)


def _plugins(overrides: Sequence[str]) -> list[str]:
    """The files and modules of `plugins=[a,b]` among overrides."""
    values = [o.partition("=")[2] for o in overrides if o.lstrip("+").startswith("plugins=")]
    return [p.strip().strip("'\"") for value in values for p in value.strip("[]").split(",") if p.strip()]


def _only_plugins(overrides: Sequence[str], action: str) -> list[str]:
    for override in overrides:
        if not override.lstrip("+").startswith("plugins="):
            raise UserError(f"{override}: `plugins {action}` takes no override but plugins=[file.py]")
    return _plugins(overrides)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _short(path: str) -> str:
    """`path` from the current directory, or from where packages are installed."""
    if "site-packages/" in path:
        return path.rpartition("site-packages/")[2]
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def _list(argv: list[str]) -> int:
    parser = _parser("list")
    parser.add_argument("kind", nargs="?", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("overrides", nargs="*", metavar="plugins=[FILE]", help="plugins to list as well")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_intermixed_args(argv)
    kind, overrides = arguments.kind, arguments.overrides
    if kind and "=" in kind:
        kind, overrides = None, [kind, *overrides]
    if kind and kind not in KINDS:
        raise UserError(f"unknown kind {kind!r}. {nearest(kind, KINDS)}Kinds: {', '.join(KINDS)}")
    found = [entry for entry in catalogue(_only_plugins(overrides, "list")) if kind in (None, entry.kind)]
    if arguments.json:
        _print_json([entry.to_dict() for entry in found])
        return 0
    _print_table(found)
    return 0


def _print_table(found: Sequence[Listing]) -> None:
    from rich.markup import escape

    from gptframe.inspect.show import Lines, show

    tables = []
    for kind in KINDS:
        rows = [entry for entry in found if entry.kind == kind]
        if rows:
            table = Lines("name", "from", "~what it is", "~options", heading=kind)
            table.fold(2, 3)
            for entry in rows:
                where = "built in" if entry.built_in else _short(entry.origin)
                options = ", ".join(map(str, entry.options))
                table.add_row(entry.name, escape(where), escape(entry.summary), escape(options))
            tables.append(table)
    show(*tables)


def _find(name: str, found: Sequence[Listing]) -> list[Listing]:
    """The listings of `NAME` or `KIND/NAME`.

    Raises:
        UserError: there is none.
    """
    kind, _, plain = name.rpartition("/")
    if kind and kind not in KINDS:
        raise UserError(f"unknown kind {kind!r}. {nearest(kind, KINDS)}Kinds: {', '.join(KINDS)}")
    matches = [entry for entry in found if entry.name == plain and kind in ("", entry.kind)]
    if not matches:
        names = {entry.name for entry in found if kind in ("", entry.kind)}
        raise UserError(
            f"nothing is registered as {name!r}. {nearest(plain, names)}`gptframe plugins list` shows what is; add a "
            f"file of yours with plugins=[file.py]"
        )
    return matches


def _show(argv: list[str]) -> int:
    parser = _parser("show")
    parser.add_argument("name", help="a name, or KIND/NAME where several kinds have it")
    parser.add_argument("overrides", nargs="*", metavar="plugins=[FILE]", help="plugins to look into as well")
    arguments = parser.parse_intermixed_args(argv)
    from rich.markup import escape

    from gptframe.inspect.show import show

    for entry in _find(arguments.name, catalogue(_only_plugins(arguments.overrides, "show"))):
        lines = [f"[bold]{entry.kind} {entry.name}[/]  {escape(_short(entry.origin))}", ""]
        lines += [f"  [dim]contract[/]   {escape(KINDS[entry.kind][0])}"]
        lines += [f"  [dim]signature[/]  {escape(entry.signature)}"]
        lines += [f"  [dim]formulas[/]   {escape(entry.formulas)}"] if entry.formulas else []
        for option in entry.options:
            default = "must be given" if option.default is None else f"default {option.default}"
            text = f"{option.name}: {option.type or 'any'}, {default}"
            lines.append(f"  [dim]option[/]     {escape(text)}")
        lines += ["", *(f"  {escape(line)}".rstrip() for line in entry.doc.splitlines()), ""]
        show("\n".join(lines))
    return 0


def _new(argv: list[str]) -> int:
    from gptframe.plugins_templates import PYPROJECT, TEMPLATES, TEST

    parser = _parser("new")
    parser.add_argument("kind", help=f"one of {', '.join(TEMPLATES)}")
    parser.add_argument("name", help="letters, digits and underscores")
    parser.add_argument("--dir", default=".", metavar="D", help="where to write (default: here)")
    parser.add_argument("--package", action="store_true", help="an installable package instead of a single file")
    arguments = parser.parse_intermixed_args(argv)
    kind, name, folder = arguments.kind, arguments.name, Path(arguments.dir).expanduser()
    if kind not in TEMPLATES:
        raise UserError(f"no template for a {kind!r}. {nearest(kind, TEMPLATES)}There are: {', '.join(TEMPLATES)}")
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name.startswith("_"):
        raise UserError(f"{name!r} cannot be a plugin's name: use letters, digits and underscores, a letter first")
    taken = [entry for entry in catalogue() if (entry.kind, entry.name) == (kind, name)]
    if taken:
        raise UserError(f"{kind} {name!r} is registered already ({taken[0].origin}): choose another name")
    if not arguments.package and importlib.util.find_spec(name) is not None:
        raise UserError(f"{name!r} is the name of a Python module, which {name}.py would hide: choose another name")
    if kind == "sublayer" and name in _model_keys():
        raise UserError(f"{name!r} is a key of the model's config, and cannot name a sublayer: choose another name")
    template = TEMPLATES[kind]
    values = {"kind": kind, "name": name, "Class": "".join(part.capitalize() for part in name.split("_"))}
    code, option = template.code.format(**values), template.option.format(**values)
    option_file = f"conf/{template.group}/{name}.yaml"
    if arguments.package:
        package = f"gptframe_{name}"
        root, plugin = folder / package.replace("_", "-"), f"src/{package}/plugin.py"
        values |= {"package": package, "distribution": package.replace("_", "-"), "plugin": f"../{plugin}"}
        files = {
            root / "pyproject.toml": PYPROJECT.format(**values),
            root / f"src/{package}/__init__.py": f'"""The {kind} {name} for gptframe."""\n',
            root / plugin: code,
            root / f"src/{package}/{option_file}": option,
            root / f"tests/test_{name}.py": TEST.format(**values),
        }
        plugin_file, run = root / plugin, f"pip install -e {root}\n  gptframe train {template.run.format(**values)}"
    else:
        plugin_file = folder / f"{name}.py"
        values["plugin"] = plugin_file.name
        files = {
            plugin_file: code,
            folder / f"test_{name}.py": TEST.format(**values),
            folder / option_file: option,
        }
        run = f"gptframe train --config-dir {folder / 'conf'} 'plugins=[{plugin_file}]' {template.run.format(**values)}"
    _write(files)
    print("\n".join(f"wrote {path}" for path in files))
    print(f"\nnext:\n  gptframe plugins check {plugin_file}\n  {run}")
    return 0


def _model_keys() -> set[str]:
    from dataclasses import fields

    from gptframe.config import ModelConfig

    return {f.name for f in fields(ModelConfig)}


def _write(files: dict[Path, str]) -> None:
    """Write new files, all or none.

    Raises:
        UserError: one exists, or cannot be written.
    """
    for path in files:
        if path.exists() or path.is_symlink():
            raise UserError(f"{path} exists, and is never overwritten: choose another name or --dir")
    written: list[Path] = []
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise UserError(f"{error.filename}: {error.strerror}; nothing was written") from None


def _check(argv: list[str]) -> int:
    parser = _parser("check")
    parser.add_argument(
        "target", metavar="NAME_OR_FILE", help="a name, KIND/NAME, or a .py file: all that it registers"
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="sizes and options, as in model.d_model=128")
    parser.add_argument("--only", metavar="CHECK,...", help="these checks alone")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_intermixed_args(argv)
    target, overrides = arguments.target, arguments.overrides
    for override in overrides:
        if "=" not in override:
            raise UserError(f"{override}: overrides are of the form key=value, as in model.d_model=128")
    is_file = target.endswith(".py")
    files = [target] if is_file else []
    listed = catalogue([*files, *_plugins(overrides)])
    if is_file:
        file = str(Path(target).expanduser().resolve())
        parts = [(entry.kind, entry.name) for entry in listed if entry.file == file]
    else:
        parts = [(entry.kind, entry.name) for entry in _find(target, listed)]
    parts = [(kind, name) for kind, name in parts if kind != "norm_placement"]
    if not parts:
        raise UserError(f"{target}: there is nothing to check; it registers no class and no function by a plain name")

    from gptframe import plugins

    only = [name.strip() for name in arguments.only.split(",")] if arguments.only else None
    with _stdout_apart() if arguments.json else contextlib.nullcontext():
        plugins.load([*files, *_plugins(overrides)])
        reports = _run(parts, overrides, only)
    if arguments.json:
        _print_json([report.to_dict() for report in reports])
    else:
        for report in reports:
            _print_report(report)
    return 0 if all(report.ok for report in reports) else 1


@contextlib.contextmanager
def _stdout_apart() -> Iterator[None]:
    """What a part prints goes to stderr, from the processes that a check starts as well."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _run(parts: Sequence[tuple[str, str]], overrides: Sequence[str], only: list[str] | None) -> list[Report]:
    from gptframe.testing import conformance
    from gptframe.testing.kit import checks_of

    own = {part: _options(*part, overrides) for part in parts}
    used = {override for _, taken in own.values() for override in taken}
    rest = [o for o in overrides if o not in used and not o.lstrip("+").startswith("plugins=")]
    cfg = _small_model(rest) if rest else None
    wanted: dict[tuple[str, str], list[str] | None] = dict.fromkeys(parts)
    if only is not None:  # of several parts, each has the checks of its kind
        known = {part: {one.name for one in checks_of(part[0])} for part in parts}
        nobodys = [name for name in only if not any(name in names for names in known.values())]
        wanted = {part: nobodys + [name for name in only if name in names] for part, names in known.items()}
    return [conformance(*part, own[part][0], cfg, wanted[part]) for part in parts if wanted[part] != []]


PREFIXES = {
    "sublayer": "model.{name}.",
    "transform": "model.transforms.{name}.",
    "callback": "callbacks.extra.{name}.",
    "schedule": "schedule.",
    "optimizer": "optimizer.",
    "tokenizer": "tokenizer.",
    "corpus": "data.",
}
WARMUP = ("warmup_steps", "warmup_fraction", "overlap_warmup")  # of the schedule's section, not of its shape


def _options(kind: str, name: str, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of a part among overrides, and those overrides."""
    import yaml

    prefix = PREFIXES.get(kind, f"model.{kind}.").format(name=name)
    options: dict[str, Any] = {}
    taken: list[str] = []
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if not key.startswith(prefix):
            continue
        option = key.removeprefix(prefix)
        if option == "name" or (kind == "schedule" and option in WARMUP):
            raise UserError(f"{override} has no effect here: {kind} {name!r} is what is checked")
        try:
            options[option] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"{override}: the value is not YAML") from None
        if isinstance(options[option], str):  # YAML 1.1 reads 1e-3 as text
            try:
                options[option] = float(value)
            except ValueError:
                pass
        taken.append(override)
    return options, taken


def _small_model(overrides: Sequence[str]) -> Any:
    """A small model with what was typed: the checks run on it dozens of times."""
    from gptframe.compose import compose_config
    from gptframe.config import Config
    from gptframe.testing.subject import SMALL

    for override in overrides:
        if override.lstrip("+").split("=")[0].split(".")[0] in ("trainer", "logger", "callbacks", "run_dir", "seed"):
            raise UserError(f"{override} has no effect: a check trains nothing")
    sizes = [f"model.{key}={value}" for key, value in SMALL.items() if key != "name"]
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
    base = [] if "model" in typed else [size for size in sizes if size.partition("=")[0] not in typed]
    return Config.from_dict(compose_config([*base, *overrides])).model


def _print_report(report: Report) -> None:
    from rich.markup import escape

    from gptframe.inspect.show import show

    here = f"{Path.cwd()}/"
    lines = [f"[bold]{report.kind} {escape(report.name)}[/]  {escape(_short(report.origin))}"]
    lines += [f"  [green]ok[/]    {name:<17}{escape(text)}".rstrip() for name, text in report.passed.items()]
    lines += [f"  [dim]--    {name:<17}{escape(text)}[/]" for name, text in report.skipped.items()]
    for failure in report.failures:
        lines.append(f"  [red]FAIL[/]  [bold]{failure.check:<17}[/]{escape(failure.what)}")
        for label, text in (
            ("where", failure.where.replace(here, "")),
            ("smallest", failure.smallest),
            ("likely", failure.cause),
        ):
            if text:
                lines.append(f"          {label:<10}{escape(text)}")
    counts = [f"{len(report.passed)} check{'s' if len(report.passed) != 1 else ''} passed"]
    counts += [f"{len(report.skipped)} do not apply"] if report.skipped else []
    counts += [f"{len(report.failures)} failed"] if report.failures else []
    counts += [f"{len(report.not_run)} not run"] if report.not_run else []
    show("\n".join([*lines, ", ".join(counts), ""]), columns=400)
    sys.stdout.flush()
    traces = {failure.trace.strip().splitlines()[-1]: failure.trace for failure in report.failures if failure.trace}
    for trace in traces.values():
        print(trace, file=sys.stderr)
