"""A mkdocs hook: the reference pages, from the schema, the option files and the registry, so that they cannot age."""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

from gptframe import compose, registry
from gptframe.config import Config, ModelConfig, TrainerConfig
from gptframe.training.run import CallbackConfig
from gptframe.training.samples import SampleConfig

SCHEMA = (
    ("The run", "", Config),
    ("The model", "model.", ModelConfig),
    ("The loop", "trainer.", TrainerConfig),
    ("What is shown and drawn", "callbacks.", CallbackConfig),
    ("Samples", "callbacks.samples.", SampleConfig),
)


def on_files(files: Files, config: Any) -> Files:
    for name, text in (("config", config_keys()), ("options", options()), ("registry", registered())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def config_keys() -> str:
    lines = [
        "# Config keys",
        "",
        "Every key with its type, the default of the schema, and what it means. `python train.py --cfg job` prints",
        "what a command composes. Sections such as `model.norm` hold a name and the options of what the name stands",
        "for: see [options](options.md) and the [registry](registry.md).",
    ]
    for title, prefix, cls in SCHEMA:
        lines += ["", f"## {title}", "", "| key | type | default | |", "|---|---|---|---|"]
        for name, kind, default, text in fields(cls):
            lines.append(f"| `{prefix}{name}` | {cell(kind)} | {cell(default)} | {plain(text)} |")
    return "\n".join(lines) + "\n"


def fields(cls: Any) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of a dataclass; the meaning is the string below the field."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    meaning: dict[str, str] = {}
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                meaning[node.target.id] = " ".join(str(following.value.value).split())
    for field in dataclasses.fields(cls):
        if field.name == "sublayers" or (field.default_factory is not dataclasses.MISSING and field.name == "samples"):
            continue
        default = field.default
        if default is dataclasses.MISSING:
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else ""
        if not dataclasses.is_dataclass(default):
            yield field.name, str(field.type), "null" if default is None else str(default), meaning.get(field.name, "")


def cell(text: str) -> str:
    return f"<code>{plain(text)}</code>" if text else ""


def plain(text: str) -> str:
    """For a table of Markdown, which takes pipes and angle brackets for its own."""
    return html.escape(text).replace("|", "&#124;").replace("*", "&#42;").replace("_", "&#95;")


def options() -> str:
    lines = ["# Options of each group", "", "The files of `conf/`, selected with `group=option`."]
    for group, names in compose.groups().items():
        lines += ["", f"## {group}"]
        for name in names:
            text = (compose.conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8").rstrip()
            lines += ["", f"### {group}={name}", "", "```yaml", text, "```"]
    return "\n".join(lines) + "\n"


def registered() -> str:
    lines = ["# Registry", "", "What a config can name, by kind. `@register(kind, name)` adds to it."]
    for kind, (contract, _) in registry.KINDS.items():
        lines += ["", f"## {kind}", "", "What a plugin of this kind is:", "", "```text", contract, "```"]
        for name in registry.names(kind):
            value = registry.lookup(kind, name)
            lines += ["", f"### {kind} {name}", "", *described(kind, value)]
    return "\n".join(lines) + "\n"


SKIPPED = {"sublayer": 2, "norm": 1, "activation": 0, "position": 1, "init": 3, "optimizer": 1, "schedule": 2}


def described(kind: str, value: Any) -> Iterator[str]:
    if not callable(value):
        yield "```text"
        yield repr(value)
        yield "```"
        return
    text = inspect.getdoc(value)
    if text:
        yield "```text"
        yield text
        yield "```"
    parameters = list(registry.signature_options(value, SKIPPED.get(kind, 1)).values())
    if parameters:
        yield ""
        yield "| option | type | default |"
        yield "|---|---|---|"
        for p in parameters:
            default = "" if p.default is p.empty else str(p.default)
            kind_ = "" if p.annotation is p.empty else inspect.formatannotation(p.annotation).strip("'")
            yield f"| `{p.name}` | {cell(kind_)} | {cell(default)} |"
