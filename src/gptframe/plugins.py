"""Imports plugins, so that the names they register can be used: files, modules and installed entry points.

One file, `plugins=[path/to/my_layer.py]`; one module, `plugins=[package.module]`; or an installed package that names
its module under the entry-point group `gptframe.plugins` and needs no `plugins=` at all. A package may also bring
option files for Hydra's groups: the entry-point group `gptframe.conf` names a folder of them inside a package.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from gptframe import registry
from gptframe.errors import UserError

_loaded: dict[str, str] = {}  # canonical origin -> module name


def load(plugins: Iterable[str], *, base: Path | None = None) -> list[str]:
    """Import installed entry points, then each of `plugins`; return the canonical origins of the latter.

    Loading the same origin twice is harmless, as happens in a multirun.

    Args:
        plugins: file paths (ending in .py, or containing a path separator) or module names.
        base: folder against which relative paths are read; the current directory if not given.

    Raises:
        UserError: a plugin is missing, has a syntax error or lacks a dependency. Any other exception that a plugin
            raises keeps its own traceback: it is a bug of the plugin's.
    """
    load_entry_points()
    return [_load_one(str(plugin), base or Path.cwd()) for plugin in plugins]


def load_entry_points() -> None:
    """Import the modules that installed packages name under `gptframe.plugins`."""
    for point in sorted(entry_points(group="gptframe.plugins"), key=lambda p: p.name):
        origin = f"entry point {point.name} ({point.value})"
        if origin not in _loaded:
            distribution = point.dist.name if point.dist else point.value
            _import(point.load, f"the installed plugin {distribution!r}", point.module)
            _loaded[origin] = point.value


def _load_one(plugin: str, base: Path) -> str:
    if plugin.endswith(".py") or os.sep in plugin or "/" in plugin:
        path = (base / Path(plugin).expanduser()).resolve()
        if not path.is_file():
            kind = "is a folder" if path.is_dir() else "does not exist"
            raise UserError(f"plugins: {plugin} {kind} (looked for {path}). Give a .py file or the name of a module")
        origin = str(path)
        if origin not in _loaded:
            _loaded[origin] = _import_file(path)
        return origin
    if plugin not in _loaded:
        if not all(part.isidentifier() for part in plugin.split(".")):
            raise UserError(f"plugins: {plugin!r} is neither a .py file nor the name of a module")
        with registry.importing_from(base):
            _import(lambda: importlib.import_module(plugin), f"plugins: {plugin}", plugin)
        _loaded[plugin] = plugin
    return plugin


def _import_file(path: Path) -> str:
    # The module's name must not differ between processes (pickle, DDP) nor hide an installed package of that name.
    name = "gptframe_plugin_" + re.sub(r"\W", "_", path.stem)
    if name in sys.modules:
        name += "_" + re.sub(r"\W", "_", str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"plugins: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    try:
        with registry.importing_from(path.parent):  # a plugin may have helpers beside it
            _import(lambda: loader.exec_module(module), f"plugins: {path}", name)
    except BaseException:
        del sys.modules[name]
        raise
    return name


def _import(action: Callable[[], object], what: str, module: str) -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for what was asked for, as with --json
            action()
    except SyntaxError as error:
        registry.forget(module)
        raise UserError(f"{what}: syntax error at {error.filename}:{error.lineno}: {error.msg}") from None
    except ModuleNotFoundError as error:
        registry.forget(module)
        if not error.name:
            raise
        if (module + ".").startswith(error.name + "."):
            raise UserError(
                f"{what}: there is no module {error.name!r}; give a .py file or an installed module"
            ) from None
        raise UserError(f"{what} needs {error.name!r}, which is not installed: pip install {error.name}") from None
    except SystemExit as error:
        registry.forget(module)
        raise UserError(f"{what} called sys.exit({error.code!r}) while it was imported") from None
    except BaseException:
        registry.forget(module)
        raise


def config_options() -> Iterator[tuple[str, str, str]]:
    """Yield `(group, option, YAML text)` of the option files that installed packages bring (`gptframe.conf`).

    Files are read without importing the package, so that `--help` stays fast.
    """
    for point in sorted(entry_points(group="gptframe.conf"), key=lambda p: p.name):
        for folder in _folders(point):
            for file in sorted(folder.rglob("*.yaml")):
                yield str(file.parent.relative_to(folder)), file.stem, file.read_text(encoding="utf-8")


def _folders(point: EntryPoint) -> Iterator[Path]:
    package, _, rest = point.value.partition(".")
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location, *rest.split(".")) if rest else Path(location)
        if folder.is_dir():
            yield folder
