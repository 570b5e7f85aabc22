"""What is registered, read from source text: names, options and docstrings without importing torch or any plugin."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from gptframe.errors import UserError
from gptframe.registry import KINDS, importing_from

# Parameters that the framework passes itself, before the options.
POSITIONAL = {
    "sublayer": 2,
    "attention_backend": 1,
    "linear_backend": 1,
    "norm": 1,
    "position": 1,
    "topology": 3,
    "head": 1,
    "transform": 1,
    "init": 3,
    "optimizer": 1,
    "schedule": 2,
    "tokenizer": 1,
}
Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Option:
    """An option as its signature has it; `default` is source text, and None where the option must be given."""

    name: str
    type: str
    default: str | None

    def __str__(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default}"


@dataclass(frozen=True)
class Listing:
    """A registered name, as far as its source says."""

    kind: str
    name: str
    file: str
    line: int
    doc: str = ""
    signature: str = ""
    options: list[Option] = field(default_factory=list)
    formulas: str = ""
    """Source text of `parameter_formulas`, where the class has them."""
    built_in: bool = False

    @property
    def origin(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def summary(self) -> str:
        return self.doc.strip().splitlines()[0] if self.doc.strip() else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for `--json`."""
        return {
            "kind": self.kind,
            "name": self.name,
            "origin": self.origin,
            "built_in": self.built_in,
            "summary": self.summary,
            "options": [{"name": o.name, "type": o.type, "default": o.default} for o in self.options],
        }


def catalogue(plugins: Iterable[str] = ()) -> list[Listing]:
    """Everything that ships here, that installed packages register, and that the files or modules `plugins` do.

    Raises:
        UserError: a plugin that is not there, or has a syntax error.
    """
    here = Path(__file__).resolve().parent
    files = {file: True for folder in ("model", "data", "training") for file in sorted((here / folder).glob("*.py"))}
    for point in sorted(entry_points(group="gptframe.plugins"), key=lambda p: p.name):
        files |= dict.fromkeys(_of_module(point.module), False)
    for plugin in plugins:
        path = Path(plugin).expanduser()
        found = [path] if path.suffix == ".py" or path.exists() else list(_of_module(plugin))
        if not found or not found[0].is_file():
            if path.suffix == ".py" or path.exists():
                kind = "is a folder: give a .py file" if path.is_dir() else "does not exist"
                raise UserError(f"plugins: {plugin} {kind}")
            raise UserError(f"plugins: {plugin} is neither a .py file nor the name of a module")
        files |= {file.resolve(): False for file in found}
    listings = [listing for file, built_in in files.items() for listing in read(file, built_in)]
    order = list(KINDS)
    return sorted(listings, key=lambda entry: (order.index(entry.kind), entry.name))


def _of_module(module: str) -> Iterator[Path]:
    """The source of a module, found without importing it; of a package, all its modules of one level."""
    package, *rest = module.split(".")
    try:
        with importing_from(Path.cwd()):
            spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, *rest)
        if path.with_suffix(".py").is_file():
            yield path.with_suffix(".py")
        elif (path / "__init__.py").is_file():
            yield from sorted(path.glob("*.py"))
    if spec and spec.origin and not rest and not spec.submodule_search_locations:
        yield Path(spec.origin)


def read(file: Path, built_in: bool = False) -> list[Listing]:
    """The listings of one source file.

    Raises:
        UserError: it cannot be read, or has a syntax error.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        raise UserError(f"{file}: syntax error at line {error.lineno}: {error.msg}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    known = {node.name: node for node in tree.body if isinstance(node, Definition)}
    found = []
    for node in tree.body:
        if isinstance(node, Definition):
            for decorator in node.decorator_list:
                for kind, name in _registration(decorator):
                    found.append(_listing(kind, name, file, decorator.lineno, node, known, built_in))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # register("kind", "name")(value)
            for kind, name in _registration(node.value.func):
                value = node.value.args[0] if node.value.args else None
                target = known.get(value.id) if isinstance(value, ast.Name) else None
                text = "" if value is None else ast.unparse(value)
                found.append(
                    _listing(kind, name, file, node.lineno, target, known, built_in)
                    if target
                    else Listing(kind, name, str(file), node.lineno, doc=text, signature=text, built_in=built_in)
                )
    return found


def _registration(node: ast.expr) -> Iterator[tuple[str, str]]:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    kind, name = (a.value if isinstance(a, ast.Constant) else None for a in node.args[:2])
    if called == "register" and isinstance(kind, str) and kind in KINDS and isinstance(name, str):
        yield kind, name


def _listing(
    kind: str, name: str, file: Path, line: int, node: Definition, known: dict[str, Definition], built_in: bool
) -> Listing:
    function = _constructor(node, known)
    options: list[Option] = []
    signature = f"{node.name}()"
    if function is not None:
        arguments = function.args
        plain = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
        pairs = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
        skipped = POSITIONAL.get(kind, 0) + isinstance(node, ast.ClassDef)
        options = [
            Option(
                argument.arg,
                ast.unparse(argument.annotation) if argument.annotation else "",
                ast.unparse(default) if default is not None else None,
            )
            for argument, default in pairs[skipped:]
        ]
        signature = f"{node.name}({ast.unparse(arguments).removeprefix('self, ')})"
    return Listing(
        kind, name, str(file), line, ast.get_docstring(node) or "", signature, options, _formulas(node), built_in
    )


def _constructor(node: Definition, known: dict[str, Definition]) -> ast.FunctionDef | None:
    """What is called with the options: the function itself, or `__init__` of a class or its nearest base here."""
    if isinstance(node, ast.FunctionDef):
        return node
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return inner
    for base in node.bases:
        found = known.get(base.id) if isinstance(base, ast.Name) else None
        if isinstance(found, ast.ClassDef):
            return _constructor(found, known)
    return None


def _formulas(node: Definition) -> str:
    for inner in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(inner, ast.Assign) and getattr(inner.targets[0], "id", "") == "parameter_formulas":
            return ast.unparse(inner.value)
        if isinstance(inner, ast.FunctionDef) and inner.name == "parameter_formulas":
            return f"computed at {inner.lineno}: parameter_formulas({ast.unparse(inner.args)})"
    return ""
